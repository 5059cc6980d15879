// Small helpers that every view uses: elements, errors beside their field, the tooltip, numbers, tokens and the URL's state.

export const $ = id => document.getElementById(id);

/** Make an element: `make("td", { class: "x", text: "1", on: { click } }, child...)`. Text is never read as HTML. */
export function make(tag, { text, on = {}, style = {}, ...attributes } = {}, ...children) {
  const svg = ["svg", "path", "line", "rect", "circle", "g", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const [name, value] of Object.entries(style)) node.style.setProperty(name, value);
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

/** Show the server's sentence under the field that it speaks of, else in `box`. */
export function showError(error, form, box) {
  clearErrors(form, box);
  const field = String(error.param ?? "").split(".").map(name => form.querySelector(`[data-field="${CSS.escape(name)}"]`)).find(Boolean);
  if (!field) {
    box.textContent = error.message;
    box.hidden = false;
    return;
  }
  field.append(make("p", { class: "error", role: "alert", text: error.message }));
  field.querySelector("input, textarea, select")?.setAttribute("aria-invalid", "true");
}

export function clearErrors(form, box) {
  box.hidden = true;
  form.querySelectorAll(".field > .error:not([id])").forEach(node => node.remove());
  form.querySelectorAll("[aria-invalid]").forEach(node => node.removeAttribute("aria-invalid"));
}

/** Tell a screen reader, at most once a second: a sweep would otherwise talk without end. */
let told = 0;
export function say(text, always = false) {
  if (!always && performance.now() - told < 1000) return;
  told = performance.now();
  $("say").textContent = text;
}

export function showTip(anchor, ...content) {
  const tip = $("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = anchor.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const above = box.top - height - 8;
  tip.style.left = `${Math.max(8, Math.min(box.left + box.width / 2 - width / 2, document.documentElement.clientWidth - width - 8))}px`;
  tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
}

export const hideTip = () => ($("tip").hidden = true);

const MINUS = "−";
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(1) : value.toFixed(digits);
  return text.replace("-", MINUS);
}

/** The number in a field; what is none, as an empty field, stays a text, which the server refuses: it is not zero. */
export const numberOf = text => (text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text));

/** Two digits for the inside of a cell: .53, −.07, 1.2. */
export function brief(value) {
  const text = Math.abs(value) >= 9.95 ? value.toFixed(0) : Math.abs(value) >= 0.995 ? value.toFixed(1) : value.toFixed(2).replace("0.", ".");
  return text === "-.00" ? ".00" : text.replace("-", MINUS);
}

/** A token as text that shows what cannot be seen. */
export const visible = token => (token === "" ? "∅" : token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·"));

/** A token as it is written into a field of one line, which would drop a line break, and back. */
const ESCAPES = { "\\": "\\\\", "\n": "\\n", "\t": "\\t" };
export const escaped = token => token.replace(/[\\\n\t]/g, one => ESCAPES[one]);
export const unescaped = text => text.replace(/\\([\\nt])/g, (_, one) => ({ n: "\n", t: "\t" })[one] ?? one);

/** Restart a timer at every call: `later(200)(work)`. */
export function later(wait) {
  let timer;
  return work => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
}

// The state is behind the #, so that prompts do not reach the server's log.
export const state = new URLSearchParams(location.hash.slice(1));

export function remember(values) {
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") state.delete(name);
    else state.set(name, value);
  }
  write();
}

const PAUSE = 200; // milliseconds between two writes: browsers refuse more than 10 a second (Safari, by an error) or 20 (Chrome, in silence)
let written = -PAUSE, writing;
function write() {
  clearTimeout(writing);
  const early = written + PAUSE - performance.now();
  if (early > 0) return (writing = setTimeout(write, early));
  written = performance.now();
  history.replaceState(null, "", `#${state}`);
}

export const chip = (text, pressed, press, title) =>
  make("button", { type: "button", class: "chip", text, title, "aria-pressed": pressed === undefined ? null : String(pressed), on: { click: press } });
