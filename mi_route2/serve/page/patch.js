// The Patch tab: a question about two prompts, the sweep that answers it, and what the patched model says at one cell.

import { $, chip, clearErrors, escaped, later, make, number, numberOf, remember, say, showError, state, unescaped, visible } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { events, post } from "./net.js";

const FIELDS = ["clean", "corrupt", "answer", "foil", "method", "metric", "alpha"];
const MAIN = ["resid_pre", "attn_out", "mlp_out", "z", "kept_out", "quarantine_out"]; // the other sites are behind "more"
const EDGES = 20;
const HEADED = new Set(["z", "q", "k", "v"]);

let page, map, running, asking;
let swept = null; // the body of the sweep that the grid shows
let remarks = []; // what its end said of it
let chosen = new Set();
const noCell = [...$("cell-head").childNodes];
const soon = later(250);

export function open(given) {
  page = given;
  map = new Heatmap($("map"), { onOpen: openCell, onLook: lookAt });
  drawExamples();
  chosen = new Set((state.get("sites") ?? "resid_pre").split(",").filter(name => page.sites.includes(name)));
  if (!chosen.size) chosen.add(page.sites[0]);
  drawSites();
  restore();
  listen();
  align();
  if (state.get("swept")) sweep();
}

function drawExamples() {
  $("patch-examples").replaceChildren(...page.examples.map(example => chip(example.title, undefined, () => use(example), `${example.clean}\n→ ${example.corrupt}`)));
}

function use(example) {
  for (const name of ["clean", "corrupt"]) $(name).value = example[name];
  for (const name of ["answer", "foil"]) $(name).value = escaped(example[name] ?? "");
  changed();
  typed();
}

function restore() {
  if (!FIELDS.some(name => state.has(name)) && page.examples.length) return use(page.examples[0]);
  for (const name of FIELDS) if (state.has(name)) $(name).value = state.get(name);
  usable();
}

function listen() {
  const form = $("patch-form");
  form.addEventListener("input", changed);
  $("prompts").addEventListener("input", typed);
  form.addEventListener("submit", event => {
    event.preventDefault();
    sweep();
  });
  form.addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) sweep();
  });
  $("zoom").addEventListener("input", () => map.zoom(Number($("zoom").value)));
  $("sweep-cancel").addEventListener("click", () => running?.abort());
  $("peak").addEventListener("click", () => {
    const { row, column } = map.peak();
    map.goTo(row, column);
  });
}

function changed() {
  remember({ ...values(), sites: [...chosen].join(","), cell: null });
  usable();
  drawNote();
}

/** Other prompts: what was refused of those before is not theirs. */
function typed() {
  clearErrors($("prompts"), $("align-error"));
  soon(align);
}

const values = () => Object.fromEntries(FIELDS.map(name => [name, $(name).value]));

/** A metric says which tokens it needs; the others are out of use, and not sent. */
function usable() {
  $("answer").disabled = $("metric").value === "kl";
  $("foil").disabled = $("metric").value !== "logit_diff";
  for (const name of ["answer", "foil"]) $(`${name}-shown`).textContent = /[\s\\]/.test($(name).value) ? visible(unescaped($(name).value)) : "";
}

function drawSites() {
  const main = MAIN.filter(name => page.sites.includes(name));
  const others = page.sites.filter(name => !MAIN.includes(name));
  const one = name => chip(name, chosen.has(name), () => toggle(name), HEADED.has(name) ? `${name}, head by head` : name);
  const more = make("details", { open: others.some(name => chosen.has(name)) }, make("summary", { class: "chip", text: "more" }), make("div", { class: "chips" }, ...others.map(one)));
  $("sites").replaceChildren(...main.map(one), ...(others.length ? [more] : []));
}

function toggle(name) {
  if (!chosen.delete(name)) chosen.add(name);
  const open = $("sites").querySelector("details")?.open;
  const focused = document.activeElement?.textContent;
  drawSites();
  if (open) $("sites").querySelector("details").open = true;
  [...$("sites").querySelectorAll("button")].find(node => node.textContent === focused)?.focus();
  changed();
}

// --- both prompts, token by token

async function align() {
  const { clean, corrupt } = values();
  if (!clean || !corrupt) return drawStrip(null); // the sweep says what is missing
  try {
    const answer = await post("/v1/align", { clean, corrupt });
    if (clean !== $("clean").value || corrupt !== $("corrupt").value) return; // typed on meanwhile
    drawStrip(answer);
  } catch (error) {
    if (clean !== $("clean").value || corrupt !== $("corrupt").value) return;
    drawStrip(null);
    showError(error, $("prompts"), $("align-error"));
  }
}

function drawStrip(answer) {
  $("strip-note").textContent = answer?.summary ?? "";
  $("strip").replaceChildren(...(answer ? columns(answer).map(drawColumn) : []));
}

/** Pairs in reading order; a token of either prompt without a partner stands alone. */
function columns({ clean, corrupt, partner, differs }) {
  const found = [];
  let next = 0;
  corrupt.forEach((token, position) => {
    const source = partner[position];
    if (source !== null) while (next < source) found.push({ clean: clean[next++], corrupt: null });
    if (source !== null) next = source + 1;
    found.push({ clean: source === null ? null : clean[source], corrupt: token, position, differs: differs.includes(position) });
  });
  while (next < clean.length) found.push({ clean: clean[next++], corrupt: null });
  return found;
}

function drawColumn({ clean, corrupt, position, differs }) {
  const kind = clean === null || corrupt === null ? "alone" : differs ? "differs" : "same";
  const token = text => make("span", { class: text === null ? "token none" : "token", text: text === null ? "" : visible(text) });
  const parts = kind === "same" ? [token(corrupt)] : [token(clean), token(corrupt)];
  const told = kind === "same" ? corrupt : `clean ${clean ?? "nothing"}, corrupt ${corrupt ?? "nothing"}`;
  return make("span", { class: `couple ${kind}`, "data-position": position, title: position === undefined ? "only in the clean prompt" : `position ${position}`, "aria-label": told, role: "img" }, ...parts);
}

// --- the sweep

function body() {
  const { clean, corrupt, answer, foil, method, metric, alpha } = values();
  const sites = page.sites.filter(name => chosen.has(name)); // in whichever order they were chosen, it is one grid
  const asked = { clean, corrupt, method, metric, sites, alpha: numberOf(alpha), heads: sites.some(name => HEADED.has(name)), stream: true };
  if (metric !== "kl" && answer) asked.answer = unescaped(answer);
  if (metric === "logit_diff" && foil) asked.foil = unescaped(foil);
  return asked;
}

async function sweep() {
  running?.abort();
  clearErrors($("patch-form"), $("patch-error"));
  if (!chosen.size) return showError({ param: "sites", message: "choose at least one site" }, $("patch-form"), $("patch-error"));
  const control = (running = new AbortController());
  const asked = body(); // what is typed before the answer is not of this sweep
  remember({ ...values(), sites: [...chosen].join(","), swept: 1 });
  busy(true);
  try {
    if (asked.method === "edges") {
      const { clean, corrupt, answer, foil, metric } = asked;
      drawEdges(await post("/v1/edges", { clean, corrupt, answer, foil, metric, k: EDGES, kept: [EDGES] }, control.signal));
      return;
    }
    for await (const { event, data } of events("/v1/patch_sweep", asked, control.signal)) {
      // A sweep that is refused leaves the grid of the one before, whose cells are of its prompts
      if (event === "start") swept = asked;
      if (event === "summary") estimated(data, asked);
      receive(event, data);
    }
    say("The sweep is done", true);
  } catch (error) {
    if (error.name === "AbortError") say("The sweep was cancelled", true);
    else showError(same(asked) ? error : new Error(`the sweep before: ${error.message}`), $("patch-form"), $("patch-error"));
  } finally {
    if (running === control) {
      running = null;
      busy(false);
    }
  }
}

/** True if a sweep is of what the form says now. */
const same = asked => JSON.stringify(asked) === JSON.stringify(body());

function drawNote() {
  const fresh = swept && same(swept);
  remember({ swept: fresh ? 1 : null });
  $("map-note").textContent = [...(swept && !fresh ? ["This grid is not of what stands above: sweep again."] : []), ...remarks].join(" ");
}

function busy(on) {
  $("sweep-cancel").hidden = !on;
  $("sweep").textContent = on ? "Sweep again" : "Sweep";
  $("sweep-progress").hidden = !on;
  $("map-card").setAttribute("aria-busy", String(on));
  if (on) $("sweep-progress").removeAttribute("value"); // of unknown length until the server has counted
}

function receive(event, data) {
  if (event === "start") started(data);
  else if (event === "summary") ended(data);
  else filled(data.cells);
}

function started(data) {
  asking?.abort();
  remarks = [];
  drawNote();
  $("cell-head").replaceChildren(...noCell); // what stands there is of a cell of the grid before
  $("cell-answer").replaceChildren();
  const columns = of => new Set(of.map(position => data.positions.indexOf(position)));
  map.start({ ...data, differs: columns(data.differs), skipped: columns(data.skipped), at: data.columns.length - 1 });
  $("zoom").value = map.high;
  $("map-empty").hidden = true;
  $("legend").hidden = false;
  $("peak").textContent = "";
  $("sweep-progress").max = data.total || 1;
  drawScores();
}

function filled(cells) {
  map.fill(cells);
  drawScores();
  const done = map.values.size;
  $("sweep-progress").value = done;
  say(`${done} of ${map.total} cells`);
}

/** An estimate comes without a start, whose place its grid takes. */
function estimated({ grid }, asked) {
  if (asked.method === "exact") return;
  swept = asked;
  const { sites: rows, labels: columns, positions, skipped, clean, corrupt, values } = grid;
  const differs = [...document.querySelectorAll("#strip .differs")].map(node => Number(node.dataset.position));
  started({ rows, columns, positions, skipped: skipped.map(skip => skip.position), differs, clean, corrupt, total: values.flat().length });
}

function ended({ grid, summary }) {
  const positions = grid.positions;
  const columns = grid.skipped.map(skip => positions.indexOf(skip.position)).filter(column => column >= 0);
  // The summary is the truth: it also has cells that a slow reader was not sent one by one
  map.fill(grid.values.flatMap((row, i) => row.map((value, j) => [i, j, value])));
  map.finish({ defined: grid.recovered !== null, skipped: columns });
  if (grid.recovered === null) remarks.push("Clean and corrupt have the same score within the noise, so the colors show the change of the score: choose prompts that the model tells apart.");
  drawNote();
  drawScores(grid.noise_floor);
  drawPeak();
  restoreCell();
}

function drawScores(noise) {
  $("map-title").textContent = map.defined ? "Recovered" : "Change of the score";
  const part = (name, value) => [make("span", { text: name }), make("b", { text: number(value, 2) })];
  $("scores").replaceChildren(...part("clean", map.clean), ...part("corrupt", map.corrupt), ...(noise === undefined ? [] : [make("span", { text: "noise" }), make("b", { text: noise.toExponential(0) })]));
  $("legend-away").textContent = map.defined ? "away from clean" : "lower score";
  $("legend-toward").textContent = map.defined ? "toward clean" : "higher score";
  $("legend-low").textContent = number(-map.reach, map.reach < 0.1 ? 3 : 1);
  $("legend-high").textContent = number(map.reach, map.reach < 0.1 ? 3 : 1);
}

function drawPeak() {
  const peak = map.peak();
  if (!peak) return;
  $("peak").textContent = `peak ${number(map.shown(peak.value), 2)} at ${map.rows[peak.row]}${map.positions[peak.column] === null ? "" : `, ${map.positions[peak.column]} ${visible(map.columns[peak.column])}`}`;
}

function restoreCell() {
  const [site, position] = (state.get("cell") ?? "").split("@");
  const row = map.rows.indexOf(site), column = map.positions.findIndex(one => String(one) === position);
  if (row >= 0 && column >= 0) map.show(row, column);
}

// --- one cell

function lookAt({ column }) {
  $("strip").querySelector(".here")?.classList.remove("here");
  if (swept.clean !== $("clean").value || swept.corrupt !== $("corrupt").value) return; // the strip is of other prompts
  $("strip").querySelector(`[data-position="${map.positions[column]}"]`)?.classList.add("here");
}

async function openCell({ row, column }) {
  const site = map.rows[row], position = map.positions[column], value = map.value(row, column);
  remember({ cell: `${site}@${position}` });
  drawHead(site, position, column, value);
  asking?.abort();
  const control = (asking = new AbortController());
  $("cell-answer").replaceChildren(make("p", { class: "empty waiting", text: "The patched model answers…" }));
  try {
    const { clean, corrupt, alpha } = swept;
    if (innerWidth < 980) $("cell-head").scrollIntoView({ block: "nearest" });
    drawAnswer(await post("/v1/patch_cell", { clean, corrupt, site, position, alpha, max_tokens: 16 }, control.signal));
  } catch (error) {
    if (error.name !== "AbortError") $("cell-answer").replaceChildren(make("p", { class: "error", role: "alert", text: error.message }));
  }
}

function drawHead(site, position, column, value) {
  const facts = [["recovered", map.defined && value !== undefined ? number(map.shown(value)) : "–"], ["score", number(value)], ["clean", number(map.clean)], ["corrupt", number(map.corrupt)]];
  $("cell-head").replaceChildren(
    make("h2", { text: site }),
    make("p", { class: "where" }, ...(position === null ? ["all positions"] : [`position ${position} `, make("code", { text: visible(map.columns[column]) })])),
    make("dl", { class: "facts" }, ...facts.map(([name, text]) => make("div", {}, make("dt", { text: name }), make("dd", { text })))),
  );
}

/** The strongest edges stand where the answer of a cell would. */
function drawEdges({ graph, faithfulness, total }) {
  $("cell-head").replaceChildren(
    make("h2", { text: `${graph.edges.length} strongest of ${total} edges` }),
    make("p", { class: "where", text: `alone they keep ${number(faithfulness[0], 2)} of the effect` }),
  );
  const line = ({ source, target, weight }) => make("tr", {}, make("th", { scope: "row" }, make("code", { text: `${source} → ${target}` })), make("td", { class: "p", text: number(weight) }));
  $("cell-answer").replaceChildren(make("table", { class: "tops edges" }, make("tbody", {}, ...graph.edges.map(line))));
  $("map-empty").textContent = "Edges have no map. The strongest are in the list.";
}

function drawAnswer({ text, top }) {
  const mark = token => (token === swept.answer ? " answer" : token === swept.foil ? " foil" : "");
  const line = ({ token, logprob }) => {
    const p = Math.exp(logprob);
    const word = mark(token).trim();
    return make("tr", { class: `top${mark(token)}` },
      make("th", { scope: "row", title: visible(token) }, make("div", {}, make("code", { text: visible(token) }), ...(word ? [make("small", { text: word })] : []))),
      make("td", { class: "bar-of-p" }, make("span", { class: "fill", style: { width: `${(100 * p).toFixed(1)}%` } })),
      make("td", { class: "p", text: p < 0.001 ? "<.001" : p.toFixed(3).replace(/^0/, ""), title: `log-probability ${number(logprob)}` }));
  };
  $("cell-answer").replaceChildren(
    make("h3", { text: "The patched model answers" }),
    make("pre", { class: "answered", text: text || "(nothing)" }),
    make("h3", { text: "Its next token" }),
    make("table", { class: "tops" }, make("tbody", {}, ...top.map(line))),
  );
}
