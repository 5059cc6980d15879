// The grid of a sweep: bands of rows by point, columns by token. It fills cell by cell, and the arrow keys walk in it.

import { brief, hideTip, make, number, showTip, visible } from "./dom.js";

const WIDE = 58; // pixels of a column from which a token is written across, with numbers in the cells from NUMBERS on
const NUMBERS = 31;

/** `blocks.3.attn.q.kept_out` is row `L3 attn.q` of the band `kept_out`; `blocks.3.z[2]` is row `L3H2` of `z`. */
export function split(name) {
  const [, base, head] = name.match(/^(.*?)(?:\[(\d+)\])?$/);
  const at = base.lastIndexOf(".");
  const point = base.slice(at + 1);
  const rest = base.slice(0, at).replace(/^blocks\.(\d+)\.?/, "L$1 ").trim();
  return { point, label: head === undefined ? rest : `${rest}H${head}` };
}

/** Bands in the order of the rows; within a band the first layer is at the bottom, as in every other figure of the project. */
function bands(rows) {
  const found = new Map();
  rows.forEach((name, row) => {
    const { point, label } = split(name);
    if (!found.has(point)) found.set(point, []);
    found.get(point).unshift({ row, label });
  });
  return found;
}

export class Heatmap {
  /** `onOpen(cell)` is called for a click or Enter, `onLook(cell)` for hover and focus; a cell is `{ row, column }`. */
  constructor(host, { onOpen, onLook }) {
    this.host = host;
    this.onOpen = onOpen;
    this.onLook = onLook;
    this.cells = [];
    this.looked = null; // the cell of which the tip speaks
    // A new width changes what fits into a cell, and never what is drawn
    new ResizeObserver(() => this.fit()).observe(host);
  }

  /** Draw an empty grid for `{ rows, columns, positions, skipped, at, differs, clean, corrupt }`. */
  start(asked) {
    this.leave();
    Object.assign(this, asked, { values: new Map(), reach: 1, open: null, focus: null });
    this.span = this.clean - this.corrupt;
    this.defined = Math.abs(this.span) > 1e-9;
    this.cells = this.rows.map(() => []);
    this.order = []; // rows from top to bottom, in which the arrow keys move
    const table = make("div", { class: "grid", role: "grid", "aria-label": "Effect of each patch, sites by tokens", "aria-rowcount": this.rows.length + 1, "aria-colcount": this.columns.length + 1, style: { "--columns": this.columns.length, "--name": `calc(${Math.max(2, ...this.rows.map(name => split(name).label.length))}ch + 10px)` } });
    const groups = bands(this.rows);
    table.append(this.axis(), ...[...groups].map(([point, rows]) => this.band(point, rows)));
    table.addEventListener("keydown", event => this.key(event));
    table.addEventListener("pointerover", event => this.look(event.target));
    table.addEventListener("pointerleave", () => this.leave());
    table.addEventListener("focusin", event => this.look(event.target));
    table.addEventListener("focusout", () => this.leave());
    table.addEventListener("click", event => this.press(event.target));
    this.table = table;
    this.host.replaceChildren(make("div", { class: "scroll" }, table));
    this.rove(this.order[0], 0);
    // As many rows as fit into the window, as long as they can be told apart
    this.zoom(Math.max(10, Math.min(24, 2 * Math.floor((innerHeight - 270) / (this.rows.length + groups.size) / 2) - 2)));
  }

  /** Set the height of a row, in pixels. */
  zoom(high) {
    this.high = high;
    this.table?.style.setProperty("--high", `${high}px`);
    this.fit();
  }

  band(point, rows) {
    const lines = rows.map(({ row, label }) => {
      this.order.push(row);
      return make("div", { class: "row", role: "row" }, make("span", { class: "name", role: "rowheader", text: label, title: this.rows[row] }), ...this.columns.map((_, column) => this.cell(row, column)));
    });
    return make("div", { class: "band", role: "rowgroup", "aria-label": point }, make("div", { class: "point", text: point }), ...lines);
  }

  cell(row, column) {
    const skipped = this.skipped.has(column);
    const node = make("div", { class: skipped ? "cell skipped" : "cell", role: "gridcell", tabindex: "-1", "data-row": row, "data-column": column, "aria-label": `${this.where(row, column)}: ${skipped ? "no partner in the clean prompt" : "not done yet"}` });
    this.cells[row][column] = node;
    return node;
  }

  axis() {
    const ticks = this.columns.map((label, column) => {
      const kind = this.differs.has(column) ? " differs" : column === this.at ? " scored" : "";
      return make("span", { class: `tick${kind}`, role: "columnheader", title: `position ${this.positions[column]}: ${JSON.stringify(label)}` }, make("span", { text: visible(label) }), make("i", { text: this.positions[column] ?? "" }));
    });
    return make("div", { class: "row axis", role: "row" }, make("span", { class: "name", text: "" }), ...ticks);
  }

  where(row, column) {
    const position = this.positions[column];
    return position === null ? `${this.rows[row]}, all positions` : `${this.rows[row]}, position ${position} ${JSON.stringify(this.columns[column])}`;
  }

  /** What a score means: the share recovered, or the bare effect where clean and corrupt cannot be told apart. */
  shown(value) {
    return this.defined ? (value - this.corrupt) / this.span : value - this.corrupt;
  }

  /** Fill cells `[row, column, value]`. */
  fill(cells) {
    const before = this.reach;
    for (const [row, column, value] of cells) {
      if (value === null || !this.cells[row]?.[column]) continue;
      this.values.set(row * this.columns.length + column, value);
      this.reach = Math.max(this.reach, Math.abs(this.shown(value)));
    }
    if (this.reach > before) this.repaint();
    else for (const [row, column] of cells) this.paint(row, column);
    if (this.looked) this.look(this.looked);
  }

  /** The end: without a difference above the noise there is nothing to recover, and the colors stand for the effect's own size. */
  finish({ defined, skipped }) {
    for (const column of skipped) this.skip(column);
    this.defined = defined;
    const sizes = [...this.values.values()].map(value => Math.abs(this.shown(value)));
    this.reach = Math.max(defined ? 1 : 0, ...sizes) || 1;
    this.repaint();
    if (this.looked) this.look(this.looked);
  }

  skip(column) {
    this.skipped.add(column);
    for (const row of this.order) {
      const node = this.cells[row][column];
      node.classList.add("skipped");
      node.setAttribute("aria-label", `${this.where(row, column)}: no partner in the clean prompt`);
    }
  }

  value(row, column) {
    return this.values.get(row * this.columns.length + column);
  }

  repaint() {
    for (const key of this.values.keys()) this.paint(Math.floor(key / this.columns.length), key % this.columns.length);
  }

  paint(row, column) {
    const value = this.value(row, column), node = this.cells[row]?.[column];
    if (value === undefined || !node) return;
    const shown = this.shown(value), strength = Math.min(1, Math.abs(shown) / this.reach);
    const color = Math.sqrt(strength); // of a tenth of the greatest score a third is seen, where a tenth would not be
    node.style.setProperty("--t", `${(100 * color).toFixed(1)}%`);
    // Where the text turns over so that its contrast stays above 4.5: in the dark, and in the light
    const ink = color > 0.78 ? " strong stronger" : color > 0.62 ? " strong" : "";
    node.className = `cell done ${shown < 0 ? "away" : "toward"}${ink}${node.classList.contains("open") ? " open" : ""}`;
    // Numbers in all the cells without an effect would hide the others
    node.textContent = strength < 0.005 ? "" : brief(shown);
    node.setAttribute("aria-label", `${this.where(row, column)}: ${this.meaning(value)}`);
  }

  meaning(value) {
    const name = this.defined ? "recovered" : "change";
    return `${name} ${number(this.shown(value))}, score ${number(value)}`;
  }

  /** The cell whose score is furthest from the corrupt one. */
  peak() {
    let best = null;
    for (const [key, value] of this.values) {
      if (!best || Math.abs(value - this.corrupt) > Math.abs(best.value - this.corrupt)) best = { key, value };
    }
    return best && { row: Math.floor(best.key / this.columns.length), column: best.key % this.columns.length, value: best.value };
  }

  fit() {
    if (!this.table) return;
    const width = this.cells[this.order[0]]?.[0]?.getBoundingClientRect().width ?? 0;
    this.table.classList.toggle("wide", width >= WIDE);
    this.table.classList.toggle("numbers", width >= NUMBERS && this.high >= 16);
    this.host.firstChild.style.setProperty("--axis", `${this.table.firstChild.offsetHeight}px`);
  }

  cellOf(node) {
    const cell = node.closest?.(".cell");
    return cell && { row: Number(cell.dataset.row), column: Number(cell.dataset.column), node: cell };
  }

  look(target) {
    const cell = this.cellOf(target);
    if (!cell) return this.leave();
    this.looked = cell.node;
    const value = this.value(cell.row, cell.column);
    const text = value !== undefined ? this.meaning(value) : this.skipped.has(cell.column) ? "no partner in the clean prompt" : "not done yet";
    showTip(cell.node, make("b", { text: this.rows[cell.row] }), make("span", { text: this.positions[cell.column] === null ? "all positions" : `${this.positions[cell.column]} ${visible(this.columns[cell.column])}` }), make("span", { text }));
    this.onLook(cell);
  }

  leave() {
    this.looked = null;
    hideTip();
  }

  press(target) {
    const cell = this.cellOf(target);
    if (!cell) return;
    this.rove(cell.row, cell.column);
    if (!this.skipped.has(cell.column)) this.show(cell.row, cell.column);
  }

  show(row, column) {
    this.table.querySelector(".open")?.classList.remove("open");
    this.cells[row][column].classList.add("open");
    this.cells[row][column].scrollIntoView({ block: "nearest", inline: "nearest" });
    this.leave(); // what the tip says stands beside the grid now
    this.onOpen({ row, column });
  }

  /** One cell is in the tab order; the arrow keys move which. */
  rove(row, column) {
    if (this.focus) this.cells[this.focus.row][this.focus.column].tabIndex = -1;
    this.focus = { row, column };
    this.cells[row][column].tabIndex = 0;
  }

  goTo(row, column) {
    this.rove(row, column);
    this.cells[row][column].focus();
  }

  key(event) {
    const cell = this.cellOf(event.target);
    if (!cell) return;
    const line = this.order.indexOf(cell.row), last = this.columns.length - 1, rows = this.order.length - 1;
    const moves = {
      ArrowUp: [line - 1, cell.column], ArrowDown: [line + 1, cell.column], ArrowLeft: [line, cell.column - 1], ArrowRight: [line, cell.column + 1],
      Home: [event.ctrlKey ? 0 : line, 0], End: [event.ctrlKey ? rows : line, last], PageUp: [line - 10, cell.column], PageDown: [line + 10, cell.column],
    };
    if (event.key === "Enter" || event.key === " ") this.press(event.target);
    else if (event.key === "Escape") this.leave();
    else if (moves[event.key]) {
      const inside = (value, most) => Math.max(0, Math.min(value, most));
      this.goTo(this.order[inside(moves[event.key][0], rows)], inside(moves[event.key][1], last));
    } else return;
    event.preventDefault();
  }
}
