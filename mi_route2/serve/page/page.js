// Start: what the server serves, the tabs, and the token.

import { $, make, remember, state } from "./dom.js";
import { get, token } from "./net.js";
import * as patch from "./patch.js";
import * as stream from "./stream.js";

const VIEWS = { patch, stream };
const tabs = [...document.querySelectorAll("[role=tab]")];
const opened = new Set();
let served = null;

function show(name, focus = false) {
  for (const tab of tabs) {
    const on = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    $(tab.dataset.tab).hidden = !on || !served; // the browser itself would send a form that nobody listens to, prompts and all
    if (on && focus) tab.focus();
  }
  remember({ tab: name });
  if (served && !opened.has(name)) {
    opened.add(name); // a view asks nothing of the server before it is looked at
    VIEWS[name].open(served);
  }
}

function walkTabs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = (tabs.indexOf(event.target) + step + tabs.length) % tabs.length;
  show(tabs[next].dataset.tab, true);
  event.preventDefault();
}

function askToken() {
  $("token").hidden = false;
  $("token-value").focus();
}

async function load() {
  try {
    const found = await get("/v1/page");
    if (found.token_needed && !token.get()) return askToken();
    if (found.token_needed) await get("/v1/models"); // a wrong token is told here, not by whatever is pressed first
    served = found;
  } catch (error) {
    $("banner").textContent = error.message;
    $("banner").hidden = false;
    return;
  }
  $("token").hidden = true;
  $("banner").hidden = true;
  $("model").replaceChildren(make("b", { text: served.model }), ` ${served.layers} layers, context ${served.context}`);
  show(current());
}

const current = () => (Object.hasOwn(VIEWS, state.get("tab") ?? "") ? state.get("tab") : "patch");

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab.dataset.tab));
  tab.addEventListener("keydown", walkTabs);
}
addEventListener("token-needed", askToken);
// A link that is pasted over this page changes only what is behind the #, for which a browser loads nothing
addEventListener("hashchange", () => location.reload());
$("token").addEventListener("submit", event => {
  event.preventDefault();
  token.set($("token-value").value.trim());
  $("token-value").value = "";
  load();
});

show(current());
load();
