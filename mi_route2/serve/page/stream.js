// The Stream tab: a completion whose tokens take the color of what a monitor read, and two sliders that act while it runs.

import { $, chip, clearErrors, hideTip, later, make, number, numberOf, remember, say, showError, showTip, state, visible } from "./dom.js";
import { events, post, rowsOf } from "./net.js";

const FIELDS = ["prompt", "adapters", "max_tokens", "temperature", "seed"];

let page, monitor, running;
let vectors = {}; // what the scale slider scales: { site: { vector, scale } }
let request = null; // the server's number of the running stream
let tokens = []; // by position: { text, generated, node, reading, threshold }
let marks = []; // positions at which a slider moved
let looked = null; // position of the token whose values stand beside
let unmoved = null; // the slider whose change the server refused
let holds = 0; // the threshold that the server has, which follows the slider
let base = 1; // the scale with which the stream was sent, of which the server knows the slider's as a multiple
let probed = {}; // what a link says of the monitor, if it is a probe
let sent = {}; // the sliders and the adapters with which it was sent
let acting = Promise.resolve(); // one change of a slider after another: a late one would undo a newer one
let probing = Promise.resolve(); // a stream that is sent waits for the probe that is being made
const NEARLY_ZERO = 1e-6; // a vector of scale 0 could not be turned up while the stream runs
const noToken = [...$("token-detail").childNodes];
const actSoon = { scale: later(80), threshold: later(80) };

export function open(given) {
  page = given;
  watch(page.monitors_example, page.steering_example);
  $("block").max = page.layers - 1;
  $("block").value = state.get("s.block") ?? Math.floor(page.layers / 2);
  const modes = Object.entries(page.modes).filter(([, served]) => served);
  $("adapters").replaceChildren(...modes.map(([name]) => make("option", { value: name, text: name })));
  $("stream-examples").replaceChildren(...page.prompts.map(text => chip(short(text), undefined, () => use(text), text)));
  restore();
  limits();
  listen();
  if (state.has("s.block")) probing = probe({ clean: state.get("s.clean"), corrupt: state.get("s.corrupt"), threshold: state.get("s.threshold") });
}

/** Watch the stream with a monitor, and steer it by vectors; without any, by the monitor's own probe. */
function watch(given, steering) {
  // As the server names it, and where it acts if it does not say so
  monitor = given ? { ...given, name: given.name || given.site, prompt: given.prompt ?? Boolean(given.quarantine) } : null;
  vectors = steering ?? (monitor ? { [monitor.site]: { vector: monitor.probe } } : {});
  for (const node of [$("lens"), ...document.querySelectorAll("[data-field=scale], [data-field=threshold]")]) node.hidden = !monitor;
  $("no-monitor").hidden = Boolean(monitor);
}

/** Make a monitor of the Patch tab's two prompts, or of a link's: the direction between their last tokens, 1 from the one to the other. */
async function probe(link = {}) {
  const patched = state.has("clean") || state.has("corrupt") ? Object.fromEntries(state) : (page.examples[0] ?? {});
  const prompts = ["clean", "corrupt"].map(name => link[name] ?? patched[name] ?? "");
  const block = $("block").value, site = `blocks.${block}.resid_post`;
  $("act-error").hidden = true;
  try {
    const [clean, corrupt] = await Promise.all(prompts.map(prompt => lastValue(prompt, site)));
    const difference = clean.map((value, i) => value - corrupt[i]), square = difference.reduce((sum, value) => sum + value * value, 0);
    if (!square) throw new Error("both prompts have the same value there: choose a later block, or prompts that differ");
    const direction = difference.map(value => value / square);
    const threshold = direction.reduce((sum, value, i) => sum + (value * (clean[i] + corrupt[i])) / 2, 0);
    const above = Number(block) < page.layers - 1; // behind the last block there is no quarantine to close
    const quarantine = above && page.sites.includes("quarantine_out") ? { quarantine: "close" } : {};
    watch({ name: "toward clean", site, probe: direction, threshold: Number(threshold.toFixed(2)), sharpness: 6, ...quarantine }, { [site]: { vector: difference } });
    aim(link.threshold ?? monitor.threshold);
    // The Patch tab may have other prompts by the time at which the link is opened
    probed = { "s.block": block, "s.clean": prompts[0], "s.corrupt": prompts[1] };
    keep();
    for (const one of tokens) unread(one); // what was read belongs to another probe
    looked = null;
    hideTip();
    $("token-detail").replaceChildren(...noToken);
    limits();
    repaint();
  } catch (error) {
    $("act-error").textContent = error.message;
    $("act-error").hidden = false;
  }
}

async function lastValue(prompt, site) {
  const answer = await post("/v1/completions", { prompt, max_tokens: 1, temperature: 0, capture: [{ site, part: "prompt" }] });
  return rowsOf(answer.choices[0].mi_route2.captured[site].rows).at(-1);
}

const short = text => text.trim().replaceAll("\n", " ⏎ ");

function use(text) {
  $("prompt").value = text;
  keep();
}

function restore() {
  for (const name of FIELDS) if (state.has(`s.${name}`)) $(name).value = state.get(`s.${name}`);
  if (!$("prompt").value && page.prompts.length) $("prompt").value = page.prompts[0];
  // That of a link with a probe is for the probe, which may fail
  aim((state.has("s.block") ? null : state.get("s.threshold")) ?? monitor?.threshold ?? 0);
  $("scale").value = state.get("s.scale") ?? 0;
  const lens = document.querySelector(`input[name=lens][value="${state.get("s.lens") === "gate" ? "gate" : "score"}"]`);
  lens.checked = true;
}

/** Put the threshold's slider at a value: its ends first, or they would hold it. */
function aim(value) {
  const slider = $("threshold"), middle = Number(value);
  slider.min = (middle - 3).toFixed(2);
  slider.max = (middle + 3).toFixed(2);
  slider.value = middle;
}

/** The readings that set a scale: not the first token's, which many models give activations ten times as large as any other's. */
const typical = () => tokens.flatMap(({ reading, threshold }, position) => (reading && position ? [{ ...reading, threshold }] : []));

/** The slider's ends: the monitor's own unit, known only from what was read. */
function limits() {
  const scores = typical().map(one => one.score);
  const now = Number($("threshold").value);
  const low = Math.min(now - 1, ...scores), high = Math.max(now + 1, ...scores);
  const slider = $("threshold"), room = (high - low) * 0.1;
  if (Number(slider.min) > low) slider.min = (low - room).toFixed(2);
  if (Number(slider.max) < high) slider.max = (high + room).toFixed(2);
  slider.value = now;
  drawSliders();
}

function keep() {
  const values = Object.fromEntries(FIELDS.map(name => [`s.${name}`, $(name).value]));
  remember({ "s.block": null, "s.clean": null, "s.corrupt": null, ...probed, ...values, "s.scale": $("scale").value, "s.threshold": $("threshold").value, "s.lens": lens() });
}

const lens = () => document.querySelector("input[name=lens]:checked").value;

function listen() {
  const form = $("stream-form");
  form.addEventListener("input", keep);
  form.addEventListener("submit", event => {
    event.preventDefault();
    go();
  });
  form.addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go();
  });
  $("stop").addEventListener("click", () => running?.abort());
  for (const radio of document.querySelectorAll("input[name=lens]")) radio.addEventListener("change", () => (keep(), repaint()));
  for (const name of ["scale", "threshold"]) $(name).addEventListener("input", () => moved(name));
  for (const [kind, react] of [["pointerover", look], ["focusin", look], ["pointerleave", hideTip], ["focusout", hideTip]]) $("tokens").addEventListener(kind, react);
  $("tokens").addEventListener("keydown", walk);
  $("probe").addEventListener("click", () => (probing = probing.then(() => probe())));
  drawSliders();
}

// --- the sliders

function moved(name) {
  drawSliders();
  keep();
  if (name === "threshold") repaint();
  actSoon[name](() => act(name));
}

const act = name => (acting = acting.then(() => tell(name)));

async function tell(name) {
  if (request === null) return;
  const stream = request, value = Number($(name).value);
  const body = name === "scale" ? { scale: value / base } : { monitor: monitor.name, threshold: value };
  const position = tokens.length;
  try {
    await post(`/v1/streams/${stream}/${name}`, body);
    if (request !== stream) return;
    if (unmoved === name) $("act-error").hidden = true; // what is told of the other slider still holds
    marks.push(position);
    if (name === "threshold") holds = value;
    drawTrace();
  } catch (error) {
    // The stream may have ended while the slider moved; the next one starts with its value
    if (request !== stream) return;
    unmoved = name;
    $("act-error").textContent = error.message;
    $("act-error").hidden = false;
  }
}

/** What the monitor does by its gate; nothing if it only watches. */
const acts = () => [
  { close: "closes the quarantine above it", open: "opens the quarantine above it" }[monitor?.quarantine],
  monitor?.adds?.length && "adds its vectors",
  monitor?.gate_rows && "gates the steering vectors above it",
].filter(Boolean).join(", ");
const reaches = () => (monitor.prompt ? "in the prompt too" : "at generated tokens only");

function drawSliders() {
  for (const name of ["scale", "threshold"]) $(`${name}-value`).textContent = number(Number($(name).value), 2);
  if (!monitor) return;
  const live = request !== null ? "Acts on the running stream." : "Acts from the first token of the next stream on.";
  $("scale-note").textContent = `Times the steering vector at ${Object.keys(vectors).join(", ")}. ${live}`;
  $("threshold-note").textContent = `Monitor ${monitor.name} at ${monitor.site} ${acts() ? `${acts()}, ${reaches()}` : "only watches"}.`;
}

// --- the stream

function body() {
  const asked = { model: page.model, prompt: $("prompt").value, max_tokens: numberOf($("max_tokens").value), temperature: numberOf($("temperature").value), stream: true };
  if ($("adapters").value) asked.adapters = $("adapters").value;
  // Drawn here if none is given: a number of 64 bits would lose its last digits in JavaScript, and could not be given again
  asked.seed = numberOf($("seed").value.trim() || String(crypto.getRandomValues(new Uint32Array(1))[0]));
  sent = { adapters: asked.adapters };
  if (!monitor) return asked;
  sent = { ...sent, scale: $("scale").value, threshold: $("threshold").value };
  base = Number($("scale").value) || NEARLY_ZERO;
  const scaled = given => (given?.vector === undefined ? { vector: given, scale: base } : { ...given, scale: (given.scale ?? 1) * base });
  asked.decode_steering_vectors = Object.fromEntries(Object.entries(vectors).map(([site, given]) => [site, scaled(given)]));
  return { ...asked, readings: true, monitors: [{ ...monitor, threshold: Number($("threshold").value) }] };
}

async function go() {
  running?.abort();
  clearErrors($("stream-form"), $("stream-error"));
  $("act-error").hidden = true;
  const control = (running = new AbortController());
  busy(true);
  try {
    let next = false;
    do {
      await probing;
      clear(next);
      const asked = await fitting(body(), control.signal);
      for await (const { data } of events("/v1/completions", asked, control.signal)) receive(data);
      request = null; // a slider now acts on the next one
      status("done");
      next = true;
    } while ($("again").checked && (await pause(control.signal)));
  } catch (error) {
    if (running !== control) return; // another stream stands there
    status(error.name === "AbortError" ? "stopped" : "ended by an error");
    repaint(); // without a token, what stands there is of the stream before
    if (error.name !== "AbortError") showError(error, $("stream-form"), $("stream-error"));
  } finally {
    if (running === control) {
      running = request = null;
      busy(false);
    }
  }
}

function clear(next) {
  request = finish = seed = null;
  tokens = [];
  marks = [];
  looked = null;
  holds = Number($("threshold").value);
  $("tokens").replaceChildren();
  $("token-detail").replaceChildren(...noToken);
  hideTip();
  if (next) $("act-error").hidden = true; // the next stream has what the sliders say
  else repaint(); // else the page would jump with every completion
  $("stream-status").textContent = "waiting for the first token";
  drawSliders();
}

const PAUSE = 900; // milliseconds to look at a completion before the next

const pause = signal => new Promise((resolve, reject) => {
  signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  setTimeout(resolve, PAUSE, true);
});

/** As many tokens as fit behind the prompt, if more are asked for. */
async function fitting(asked, signal) {
  const { ids } = await post("/v1/tokenize", { text: asked.prompt }, signal);
  const room = page.context - ids.length;
  return room >= 1 && asked.max_tokens > room ? { ...asked, max_tokens: room } : asked;
}

function busy(on) {
  $("stop").hidden = !on;
  $("probe").disabled = on; // a running stream keeps the monitor with which it was sent
  $("go").textContent = on ? "Start again" : "Go";
  $("stream-card").setAttribute("aria-busy", String(on));
  $("stream-empty").hidden = true;
  drawSliders();
}

function status(text) {
  const made = tokens.filter(one => one.generated).length;
  $("stream-status").textContent = `${made} tokens, ${text}${finish ? ` (${finish})` : ""}${seed === null ? "" : `, seed ${seed}`}${sent.adapters ? `, adapters ${sent.adapters}` : ""}`;
  if (text !== "running") say(`${made} tokens, ${text}`, true);
}

let seed = null, finish = null;

function receive(chunk) {
  const told = chunk.mi_route2, [choice] = chunk.choices;
  if (told.prompt_tokens) begin(told);
  finish = choice.finish_reason ?? finish;
  told.tokens.forEach(text => add(text, true));
  for (const [position, readings] of Object.entries(told.readings)) read(Number(position), readings);
  limits();
  repaint();
  status("running");
}

function begin(told) {
  request = told.request;
  seed = told.seed;
  finish = null;
  told.prompt_tokens.forEach(text => add(text, false));
  // What has moved since the stream was sent could not act yet
  for (const name of Object.keys(actSoon)) if (monitor && $(name).value !== sent[name]) act(name);
  drawSliders();
}

function add(text, generated) {
  const position = tokens.length;
  const node = make("span", { class: `token ${generated ? "made" : "given"}`, tabindex: position ? "-1" : "0", role: "img", "data-position": position });
  // The line break is drawn and also broken, so that code keeps its shape
  node.append(...text.split(/(\n)/).flatMap(part => (part === "\n" ? [make("i", { text: "⏎" }), "\n"] : [part])));
  tokens.push({ text, generated, node });
  unread(tokens.at(-1));
  $("tokens").append(node);
}

function unread(one) {
  one.reading = one.threshold = null;
  one.node.classList.remove("above", "below");
  one.node.setAttribute("aria-label", `${JSON.stringify(one.text)}, not read`);
}

function read(position, readings) {
  const one = tokens[position], reading = monitor && readings[monitor.name];
  if (!one || !reading) return;
  one.reading = reading;
  one.threshold = holds;
  if (position === looked) {
    hideTip(); // which says that it is not read
    detail();
  }
}

// --- colors

function repaint() {
  const by = lens(), middle = by === "score" ? Number($("threshold").value) : 0;
  const sizes = typical().map(one => Math.abs(one[by] - middle));
  const reach = by === "gate" ? 1 : Math.max(0, ...sizes) || 1;
  for (const one of tokens) if (one.reading) paint(one, one.reading[by] - middle, reach);
  drawLegend(by, middle, reach, sizes.length);
  drawTrace();
}

function paint({ node, reading, text }, value, reach) {
  node.style.setProperty("--t", `${(100 * Math.sqrt(Math.min(1, Math.abs(value) / reach))).toFixed(1)}%`);
  node.classList.toggle("above", value >= 0);
  node.classList.toggle("below", value < 0);
  node.setAttribute("aria-label", `${JSON.stringify(text)}, score ${number(reading.score)}, gate ${number(reading.gate)}`);
}

function drawLegend(by, middle, reach, count) {
  $("stream-legend").hidden = !count;
  $("stream-ramp").classList.toggle("one", by === "gate");
  $("stream-low").textContent = by === "gate" ? "0" : number(middle - reach, 2);
  $("stream-high").textContent = by === "gate" ? "1" : number(middle + reach, 2);
  $("stream-words").textContent = by === "gate" ? `gate: how far the monitor ${acts() ? `acts, ${reaches()}` : "would act"}` : `probe score around the threshold ${number(middle, 2)}`;
}

const HEIGHT = 96, GATE = 22;

/** Score over the positions with the threshold that held then, and the gate as a strip beneath. */
function drawTrace() {
  const points = tokens.flatMap(({ reading, threshold }, position) => (reading ? [{ position, threshold, ...reading }] : []));
  if (points.length < 2) return $("trace").replaceChildren();
  const every = typical().flatMap(({ score, threshold }) => [score, threshold]);
  const low = Math.min(...every), span = Math.max(...every) - low || 1, last = Math.max(tokens.length - 1, 1);
  const x = position => ((1000 * position) / last).toFixed(1), y = value => (4 + (HEIGHT - 8) * (1 - Math.min(1, Math.max(0, (value - low) / span)))).toFixed(1);
  const line = points.map((one, i) => `${i ? "L" : "M"}${x(one.position)} ${y(one.score)}`).join("");
  // A threshold holds until the next one: a slope between them would show values that never were
  const steps = points.map((one, i) => `${i ? `H${x(one.position - 0.5)}V` : `M${x(one.position)} `}${y(one.threshold)}`).join("") + `H${x(points.at(-1).position)}`;
  const first = tokens.findIndex(one => one.generated), width = 1000 / last;
  const gates = points.map(({ position, gate }) => make("rect", { class: "gate", x: (x(position) - width / 2).toFixed(1), y: (HEIGHT + 4 + GATE * (1 - gate)).toFixed(1), width: width.toFixed(1), height: (GATE * gate).toFixed(1) }));
  const ticks = [...(first > 0 ? [[first - 0.5, "begin"]] : []), ...marks.map(position => [position - 0.5, "moved"])].map(([at, kind]) => make("line", { class: kind, x1: x(at), x2: x(at), y1: 0, y2: HEIGHT + GATE + 4 }));
  const picture = make("svg", { viewBox: `0 0 1000 ${HEIGHT + GATE + 4}`, preserveAspectRatio: "none", role: "img", "aria-label": `Probe score from ${number(low, 2)} to ${number(low + span, 2)} and the gate, over ${points.length} tokens` }, ...gates, ...ticks, make("path", { class: "threshold", d: steps }), make("path", { class: "score", d: line }));
  const key = make("p", { class: "keys" }, ...[["score", "score"], ["threshold", "threshold"], ["gate", "gate"], ...(marks.length ? [["moved", "slider moved"]] : [])].map(([kind, text]) => make("span", { class: `k ${kind}`, text })));
  $("trace").replaceChildren(picture, key);
}

// --- values of one token

function look(event) {
  const node = event.target.closest?.(".token");
  if (!node) return hideTip();
  looked = Number(node.dataset.position);
  showTip(node, make("b", { text: visible(tokens[looked].text) }), make("span", { text: `position ${looked}` }), ...facts(looked).map(([name, value]) => make("span", { text: `${name} ${value}` })));
  detail();
}

function facts(position) {
  const { reading, generated } = tokens[position];
  if (reading) return [["score", number(reading.score)], ["gate", number(reading.gate)], ...(generated || monitor.prompt || !acts() ? [] : [["acts", "not on a prompt"]])];
  return [["not read", generated && position === tokens.length - 1 ? "the last token is never an input" : ""]];
}

function detail() {
  const { text, generated } = tokens[looked];
  const all = [["position", looked], ["from", generated ? "the model" : "the prompt"], ...facts(looked)];
  $("token-detail").replaceChildren(make("h3", {}, make("code", { text: visible(text) })), make("dl", { class: "facts" }, ...all.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value })))));
}

function walk(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const from = Number(event.target.dataset?.position ?? NaN), next = tokens[from + step];
  if (!step || !next) return;
  tokens[from].node.tabIndex = -1;
  next.node.tabIndex = 0;
  next.node.focus();
  event.preventDefault();
}
