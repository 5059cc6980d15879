// Start: what the server serves, the tabs, and the key.

import { $, make, remember, state } from "./dom.js";
import { get, key } from "./net.js";
import * as patch from "./patch.js";
import * as stream from "./stream.js";
import * as study from "./study.js";

const VIEWS = { patch, stream, study };
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
  study.watch(name === "study" && served !== null);
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

function askKey() {
  $("key").hidden = false;
  $("key-value").focus();
}

async function load() {
  try {
    const found = await get("/v1/study");
    if (found.key_needed && !key.get()) return askKey();
    if (found.key_needed) await get("/v1/models"); // a wrong key is told here, not by whatever is pressed first
    served = found;
  } catch (error) {
    $("banner").textContent = error.message;
    $("banner").hidden = false;
    return;
  }
  $("key").hidden = true;
  $("banner").hidden = true;
  $("model").replaceChildren(make("b", { text: served.model }), ` ${served.layers} layers, context ${served.context}`);
  show(current());
}

const current = () => (Object.hasOwn(VIEWS, state.get("tab") ?? "") ? state.get("tab") : "patch");

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab.dataset.tab));
  tab.addEventListener("keydown", walkTabs);
}
addEventListener("key-needed", askKey);
// A link that is pasted over this page changes only what is behind the #, for which a browser loads nothing
addEventListener("hashchange", () => location.reload());
$("key").addEventListener("submit", event => {
  event.preventDefault();
  key.set($("key-value").value.trim());
  $("key-value").value = "";
  load();
});

show(current());
load();
