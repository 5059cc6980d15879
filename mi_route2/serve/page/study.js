// The Study tab: rates of every arm in every mode, and its training curves, read again while a run goes on.

import { $, brief, make, number, remember, state } from "./dom.js";
import { get } from "./net.js";

const SOON = 3000, LATER = 15000; // milliseconds between two readings: while a run writes, and otherwise
const LAST = 10; // steps over which a training rate is averaged, as in the study's own tables
const RATES = ["hack", "exploit", "solve"];
const SIDES = { train: "training", on: "quarantine in", deploy: "quarantine deleted" };

let study, runs = null, left = 0, folder = "", roles = {}, differ = false, timer = null, watching = false, drawn = "";
let rate = state.get("rate") ?? "hack";
let chosen = state.get("side"), side; // what is shown depends on the files alone where it was not chosen, as it does for whoever opens a link

export function open(given) {
  study = given;
  if (study.study_runs) refresh();
  else empty();
}

/** Read again only while somebody looks. */
export function watch(on) {
  watching = on;
  clearTimeout(timer);
  if (on && study?.study_runs) refresh(); // the first reading may have failed
}

document.addEventListener("visibilitychange", () => watching && study?.study_runs && !document.hidden && refresh());

async function refresh() {
  clearTimeout(timer);
  try {
    const data = await get("/v1/study_runs");
    $("study-error").hidden = true;
    if (!data.path) return empty();
    [folder, roles, differ, left] = [data.path, data.modes ?? {}, Boolean(data.modes_differ), data.left_out];
    runs = data.runs.map(readable);
    draw();
  } catch (error) {
    $("study-error").textContent = error.message;
    $("study-error").hidden = false;
  }
  if (watching && !document.hidden) timer = setTimeout(refresh, runs?.some(run => !run.finished) ? SOON : LATER);
}

/** A run with its rates by side, mode and name; the training's are known from its first step on. */
const readable = run => ({ ...run, rates: { ...sides(run.rates), train: training(run.curve) } });

/** `{mode: {on, deploy}}` of an evaluation as `{on: {mode}, deploy: {mode}}`. */
function sides(rates) {
  const of = name => Object.fromEntries(Object.entries(rates ?? {}).map(([mode, both]) => [mode, both[name] ?? {}]));
  return { on: of("on"), deploy: of("deploy") };
}

/** Each mode's rates over the rollouts of the last steps; a step without any of a mode has rates of 0 there. */
function training(curve) {
  const last = curve.slice(-LAST), found = {};
  for (const mode of Object.keys(curve.at(-1)?.modes ?? {})) {
    found[mode] = Object.fromEntries(RATES.map(name => [name, share(last.map(row => row.modes?.[mode] ?? {}), name)]));
  }
  return found;
}

function share(rows, name) {
  const some = rows.filter(row => typeof row[name] === "number").map(row => [row.n ?? 1, row[name]]);
  const rollouts = some.reduce((sum, [n]) => sum + n, 0);
  return rollouts ? some.reduce((sum, [n, value]) => sum + n * value, 0) / rollouts : null;
}

function empty() {
  runs = null;
  $("study-body").replaceChildren(make("div", { class: "card nothing" },
    make("h2", { text: "No study is being followed" }),
    make("p", {}, "Start the server with ", make("code", { text: "--study-runs FOLDER" }), ", and the arms in it are shown here while they train:"),
    make("pre", { text: "python -m studies.route2 run --preset strong\npython -m mi_route2.serve --study-runs runs/strong-88e860b8" })));
}

function draw() {
  // The same numbers draw nothing, so that a focus or a scroll position is not lost every three seconds
  const now = JSON.stringify([folder, roles, differ, left, runs, rate, chosen]);
  if (now === drawn) return;
  drawn = now;
  const scroll = document.querySelector("#study-body .scroll")?.scrollLeft ?? 0;
  const { name, value } = document.activeElement ?? {};
  const content = runs.length ? [table(), curves()] : [make("p", { class: "empty", text: `No run has written a step below ${folder} yet.` })];
  $("study-body").replaceChildren(head(), ...content);
  const scroller = document.querySelector("#study-body .scroll");
  if (scroller) scroller.scrollLeft = scroll;
  if (name) document.querySelector(`#study-body input[name="${name}"][value="${value}"]`)?.focus();
}

const numbersIn = values => values.filter(value => typeof value === "number");
const mean = values => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);

function byArm() {
  const found = new Map();
  for (const run of runs) found.set(run.arm, [...(found.get(run.arm) ?? []), run]);
  return found;
}

function head() {
  const going = runs.filter(run => !run.finished).length;
  // So far: a run without files may be still to come, as all are while the next seed's base model is trained
  const text = !runs.length ? "" : `${runs.length} ${runs.length === 1 ? "run" : "runs"} so far, ${going ? runs.length - going : "all"} finished; read again every ${(going ? SOON : LATER) / 1000} s`;
  const more = left ? `; ${left} more, whose names come later, are left out: look at the folder of one study` : "";
  return make("div", { class: "head study-head" }, make("h2", { text: folder }), make("p", { class: "scores" }, make("span", { class: going ? "live" : "", text: text + more })));
}

// --- arms x modes

const has = (of, what) => runs.some(run => Object.values(run.rates[of]).some(rates => typeof rates[what] === "number"));
const option = (name, value, now, text, set) => make("label", {}, make("input", { type: "radio", name, value, checked: now === value, on: { change: () => set(value) } }), make("span", { text }));

function choices() {
  const known = Object.keys(SIDES).filter(of => RATES.some(what => has(of, what)));
  const usual = runs.every(run => run.finished) || !known.includes("train") ? known.at(-1) ?? "train" : "train";
  side = known.includes(chosen) ? chosen : usual;
  const what = make("div", { class: "segmented", role: "radiogroup", "aria-label": "Rate" }, ...RATES.filter(one => has(side, one)).map(one => option("rate", one, rate, one, () => choose({ rate: one }))));
  const of = make("div", { class: "segmented", role: "radiogroup", "aria-label": "Model" }, ...known.map(one => option("side", one, side, SIDES[one], () => choose({ side: one }))));
  return known.length > 1 ? [what, of] : [what];
}

function choose(values) {
  rate = values.rate ?? rate;
  chosen = values.side ?? chosen;
  remember(values);
  draw();
}

function table() {
  const controls = choices(); // first: it decides the side
  const columns = [...new Set(runs.flatMap(run => Object.keys(run.rates[side])))];
  const rows = [...byArm()].map(([arm, of]) => {
    const cells = columns.map(mode => cell(of.flatMap(run => numbersIn([run.rates[side][mode]?.[rate]]))));
    return make("tr", {}, make("th", { scope: "row" }, arm, ...(of[0].role ? [make("small", { text: of[0].role })] : [])), ...cells, make("td", { class: "n", text: counted(of) }), make("td", { class: "progress", text: progress(of) }));
  });
  const names = [...columns, "seeds", "step"].map(name => make("th", { scope: "col" }, name, make("small", { text: columns.includes(name) ? role(name) : "" })));
  const whole = make("table", { class: "rates" }, make("caption", { class: "visually-hidden", text: `Rate of ${rate}, ${SIDES[side]}, mean over seeds` }), make("thead", {}, make("tr", {}, make("th", { scope: "col", text: "arm" }), ...names)), make("tbody", {}, ...rows));
  const note = side === "train" ? `Training rollouts of the last ${LAST} steps` : "Evaluation after training";
  const why = differ ? "the studies below this folder name other modes, so look at the folder of one." : "neither the study nor the model that is served names them.";
  const unknown = !columns.length || columns.some(role) ? "" : ` Which modes were held out is not known here: ${why}`;
  return make("div", { class: "card" }, make("div", { class: "head" }, make("h2", { text: "Arms and modes" }), ...controls), make("div", { class: "scroll" }, whole), make("p", { class: "note", text: `${note}, mean over seeds; hover for each seed.${unknown}` }));
}

/** Runs of which the means are: an evaluation has those that ended. */
function counted(of) {
  const some = of.filter(run => Object.values(run.rates[side]).some(rates => typeof rates[rate] === "number")).length;
  return some === of.length ? some : `${some} of ${of.length}`;
}

const role = mode => (roles.known?.includes(mode) ? "known" : roles.held_out?.includes(mode) ? "held out" : "");

function progress(of) {
  const steps = of.map(run => run.step ?? 0), low = Math.min(...steps), high = Math.max(...steps);
  const planned = of[0].steps && of.some(run => !run.finished) ? ` (settings: ${of[0].steps})` : ""; // an arm may have its own, which only its end tells
  return high ? `${low === high ? low : `${low} to ${high}`}${planned}` : "–";
}

function cell(values) {
  const value = mean(values);
  if (value === null) return make("td", { class: "rate none", text: "–" });
  return make("td", { class: `rate ${rate === "solve" ? "good" : "bad"}${value > 0.6 ? " strong" : ""}`, style: { "--t": `${(88 * value).toFixed(0)}%` }, title: values.map(one => number(one)).join("  "), text: brief(value) });
}

// --- curves: one small picture an arm, all on the same axes

const W = 240, H = 96, LINES = { solve: "good", hack: "bad" };

function curves() {
  const last = Math.max(1, ...runs.map(run => run.step ?? 0));
  const shown = [...byArm()].filter(([, of]) => of.some(run => run.curve.length));
  const key = make("p", { class: "keys" }, ...Object.entries(LINES).map(([name, kind]) => make("span", { class: `k ${kind}`, text: name })), make("span", { text: `of training rollouts, from 0 to 1 over steps 0 to ${last}; thin: a seed, thick: their mean, smoothed over five steps; numbers: its end` }));
  const none = make("p", { class: "empty", text: "No run has written a step yet." });
  return make("div", { class: "card" }, make("div", { class: "head" }, make("h2", { text: "Training" }), key), shown.length ? make("div", { class: "small-multiples" }, ...shown.map(([arm, of]) => picture(arm, of, last))) : none);
}

const points = (run, name) => run.curve.map(row => [row.step, row[name]]).filter(([, value]) => typeof value === "number");

function picture(arm, of, steps) {
  const spot = (step, value, i) => `${i ? "L" : "M"}${((W * step) / steps).toFixed(1)} ${(2 + (H - 4) * (1 - Math.min(1, Math.max(0, value)))).toFixed(1)}`;
  const path = (rows, kind) => make("path", { class: kind, d: rows.map(([step, value], i) => spot(step, value, i)).join("") });
  const ends = {};
  const lines = Object.entries(LINES).flatMap(([name, kind]) => {
    const each = of.map(run => points(run, name)), middle = average(each);
    ends[name] = middle.at(-1)?.[1] ?? null;
    return [...each.map(rows => path(rows, `thin ${kind}`)), path(middle, `thick ${kind}`)];
  });
  const told = `${arm}: hack ${number(ends.hack, 2)}, solve ${number(ends.solve, 2)} at the last step, smoothed`;
  const half = make("line", { class: "rule", x1: 0, x2: W, y1: H / 2, y2: H / 2 });
  const value = name => make("span", { class: LINES[name], text: ends[name] === null ? "–" : brief(ends[name]) });
  return make("figure", {}, make("figcaption", {}, make("b", { text: arm }), value("hack"), value("solve")), make("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": told }, half, ...lines));
}

/** The mean at each step over the seeds that have it, smoothed over five rows, because one step has few rollouts. */
function average(each) {
  const at = new Map();
  for (const [step, value] of each.flat()) at.set(step, [...(at.get(step) ?? []), value]);
  const rows = [...at].sort(([a], [b]) => a - b).map(([step, values]) => [step, mean(values)]);
  return rows.map(([step], i) => [step, mean(rows.slice(Math.max(0, i - 2), i + 3).map(([, value]) => value))]);
}
