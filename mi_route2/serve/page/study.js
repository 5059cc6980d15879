// The Study tab: rates of every arm in every mode, and its training curves, read again while a run is unfinished.

import { $, brief, make, number, remember, state } from "./dom.js";
import { get } from "./net.js";

const EVERY = 3000; // milliseconds between two readings of the files
const RATES = { hack: "hack", exploit: "exploit", solve: "solve", format: "format" };

let data = null, timer = null, watching = false, drawn = "";
let rate = state.get("rate") ?? "hack";
let side = state.get("side") ?? "deploy";

export const open = () => refresh();

/** Read again only while somebody looks. */
export function watch(on) {
  watching = on;
  clearTimeout(timer);
  if (on && data) refresh();
}

document.addEventListener("visibilitychange", () => watching && !document.hidden && refresh());

async function refresh() {
  clearTimeout(timer);
  try {
    data = await get("/v1/study_runs");
    $("study-error").hidden = true;
    draw();
  } catch (error) {
    if (error.status === 404) empty(error.message);
    else {
      $("study-error").textContent = error.message;
      $("study-error").hidden = false;
    }
  }
  const going = !data?.runs?.length || data.runs.some(run => !run.finished);
  if (watching && !document.hidden && going && data?.path !== null) timer = setTimeout(refresh, EVERY);
}

function empty(why) {
  $("study-body").replaceChildren(make("div", { class: "card nothing" },
    make("h2", { text: "No study is being followed" }),
    make("p", {}, "Start the server with ", make("code", { text: "--study-runs FOLDER" }), " to see its arms here while they train, for example"),
    make("pre", { text: "python -m studies.route2 run --preset strong\npython -m mi_route2.serve --study-runs runs/strong-88e860b8" }),
    ...(why ? [make("p", { class: "note", text: why })] : [])));
}

function draw() {
  if (!data.path) return empty();
  // The same bytes draw nothing, so that a focus or a scroll position is not lost every three seconds
  const now = JSON.stringify([data, rate, side]);
  if (now === drawn) return;
  drawn = now;
  const scroll = document.querySelector("#study-body .scroll")?.scrollLeft ?? 0, focused = document.activeElement?.value, name = document.activeElement?.name;
  $("study-body").replaceChildren(head(), table(), curves());
  document.querySelector("#study-body .scroll").scrollLeft = scroll;
  if (name) document.querySelector(`#study-body input[name="${name}"][value="${focused}"]`)?.focus();
}

const byArm = () => Map.groupBy ? Map.groupBy(data.runs, run => run.arm) : data.runs.reduce((found, run) => found.set(run.arm, [...(found.get(run.arm) ?? []), run]), new Map());
const modes = () => [...new Set(data.runs.flatMap(run => Object.keys(run.rates ?? {})))];
const mean = values => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);

function head() {
  const done = data.runs.filter(run => run.finished).length;
  const text = done === data.runs.length ? `${done} runs, all finished` : `${done} of ${data.runs.length} runs finished; read again every ${EVERY / 1000} s`;
  return make("div", { class: "head study-head" }, make("h2", { text: data.path }), make("p", { class: "scores", "aria-live": "polite" }, make("span", { class: done === data.runs.length ? "" : "live", text })));
}

const option = (name, value, now, text, set) => make("label", {}, make("input", { type: "radio", name, value, ...(now === value ? { checked: true } : {}), on: { change: () => set(value) } }), make("span", { text }));

function choices() {
  const known = Object.keys(RATES).filter(name => data.runs.some(run => Object.values(run.rates ?? {}).some(both => both.deploy && name in both.deploy)));
  return [
    make("div", { class: "segmented", role: "radiogroup", "aria-label": "Rate" }, ...known.map(name => option("rate", name, rate, RATES[name], value => choose({ rate: value })))),
    make("div", { class: "segmented", role: "radiogroup", "aria-label": "Model" }, option("side", "on", side, "quarantine in", value => choose({ side: value })), option("side", "deploy", side, "deleted", value => choose({ side: value }))),
  ];
}

function choose(values) {
  rate = values.rate ?? rate;
  side = values.side ?? side;
  remember({ rate, side });
  draw();
}

function role(mode) {
  const { known = [], held_out: held = [] } = data.modes ?? {};
  return [known].flat().includes(mode) ? "known" : [held].flat().includes(mode) ? "held out" : "honest";
}

function table() {
  const columns = modes();
  const rows = [...byArm()].map(([arm, runs]) => {
    const cells = columns.map(mode => cell(runs.flatMap(run => run.rates?.[mode]?.[side]?.[rate] ?? [])));
    return make("tr", {}, make("th", { scope: "row" }, arm, ...(runs[0].role ? [make("small", { text: runs[0].role })] : [])), ...cells, make("td", { class: "n", text: runs.filter(run => run.finished).length }), make("td", { class: "progress", text: progress(runs) }));
  });
  const names = columns.map(mode => make("th", { scope: "col" }, mode, make("small", { text: role(mode) })));
  const whole = make("table", { class: "rates" }, make("caption", { class: "visually-hidden", text: `${rate} rate, mean over seeds` }), make("thead", {}, make("tr", {}, make("th", { scope: "col", text: "arm" }), ...names, make("th", { scope: "col", text: "seeds" }), make("th", { scope: "col", text: "training" }))), make("tbody", {}, ...rows));
  return make("div", { class: "card" }, make("div", { class: "head" }, make("h2", { text: "Arms and modes" }), ...choices()), make("div", { class: "scroll" }, whole), make("p", { class: "note", text: "Mean over finished seeds; hover for each seed." }));
}

function progress(runs) {
  const going = runs.filter(run => !run.finished), steps = going.map(run => run.step ?? 0);
  if (!going.length) return "done";
  const [low, high] = [Math.min(...steps), Math.max(...steps)];
  return `step ${low === high ? low : `${low} to ${high}`}${going[0].steps ? ` of ${going[0].steps}` : ""}`;
}

function cell(values) {
  const value = mean(values);
  if (value === null) return make("td", { class: "rate none", text: "–" });
  const kind = rate === "solve" || rate === "format" ? "good" : "bad";
  return make("td", { class: `rate ${kind}${value > 0.6 ? " strong" : ""}`, style: { "--t": `${(88 * value).toFixed(0)}%` }, title: values.map(one => number(one)).join("  "), text: brief(value) });
}

// --- curves: one small picture an arm, on the same axes

const W = 240, H = 96;

function curves() {
  const arms = [...byArm()], steps = Math.max(1, ...data.runs.flatMap(run => run.curve?.at(-1)?.step ?? 0), ...data.runs.map(run => (run.steps ?? 1) - 1));
  const key = make("p", { class: "keys" }, ...[["bad", "hack"], ["good", "solve"]].map(([kind, text]) => make("span", { class: `k ${kind}`, text })), make("span", { class: "note", text: `training rollouts, 0 to 1 over ${steps + 1} steps; thin: a seed, thick: their mean` }));
  const shown = arms.filter(([, runs]) => runs.some(run => run.curve?.length));
  const none = make("p", { class: "empty", text: "No step has been written yet." });
  return make("div", { class: "card" }, make("div", { class: "head" }, make("h2", { text: "Training" }), key), shown.length ? make("div", { class: "small-multiples" }, ...shown.map(([arm, runs]) => picture(arm, runs, steps))) : none);
}

function picture(arm, runs, steps) {
  const point = (step, value, i) => `${i ? "L" : "M"}${((W * step) / steps).toFixed(1)} ${(2 + (H - 4) * (1 - Math.min(1, Math.max(0, value)))).toFixed(1)}`;
  const path = (rows, kind, name) => make("path", { class: `${kind} ${name === "hack" ? "bad" : "good"}`, d: rows.map(([step, value], i) => point(step, value, i)).join("") });
  const lines = ["solve", "hack"].flatMap(name => {
    const each = runs.map(run => (run.curve ?? []).filter(row => typeof row[name] === "number").map(row => [row.step, row[name]]));
    return [...(runs.length > 1 ? each.map(rows => path(rows, "thin", name)) : []), path(average(each), "thick", name)];
  });
  const last = name => mean(runs.flatMap(run => run.curve?.at(-1)?.[name] ?? []));
  const told = `${arm}: hack ${number(last("hack"), 2)}, solve ${number(last("solve"), 2)} at the last step`;
  const rules = [0.5].map(value => make("line", { class: "rule", x1: 0, x2: W, y1: 2 + (H - 4) * (1 - value), y2: 2 + (H - 4) * (1 - value) }));
  return make("figure", {}, make("figcaption", {}, make("b", { text: arm }), make("span", { class: "bad", text: brief(last("hack") ?? 0) }), make("span", { class: "good", text: brief(last("solve") ?? 0) })), make("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": told }, ...rules, ...lines));
}

/** The mean at each step over the seeds that have it, smoothed over five rows: one step has few rollouts. */
function average(each) {
  const at = new Map();
  for (const rows of each) for (const [step, value] of rows) at.set(step, [...(at.get(step) ?? []), value]);
  const rows = [...at].sort(([a], [b]) => a - b).map(([step, values]) => [step, mean(values)]);
  return rows.map(([step], i) => [step, mean(rows.slice(Math.max(0, i - 2), i + 3).map(([, value]) => value))]);
}
