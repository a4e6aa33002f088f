
"use strict";

// -- tables: click a header to sort; what has no number goes last ------------------------------------------------

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}

function sortBy(header) {
  const up = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentElement.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = header.closest("table").tBodies[0], column = header.cellIndex;
  const rows = [...body.rows].map((row, index) => ({ row, index, cell: row.cells[column] }));
  rows.sort((a, b) => compare(a.cell, b.cell, up) || a.index - b.index);
  body.append(...rows.map((entry) => entry.row));
}

function compare(a, b, up) {
  const [x, y] = [a, b].map((cell) => "number" in cell.dataset ? Number(cell.dataset.number) : null);
  if (x === null && y === null) return (up ? 1 : -1) * a.textContent.localeCompare(b.textContent);
  if (x === null || y === null) return x === null ? 1 : -1;
  return up ? x - y : y - x;
}

// -- curves --------------------------------------------------------------------------------------------------------

const LEFT = 64, RIGHT = 940, TOP = 14, BOTTOM = 384;
const MARKS = {
  "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "s": "M-4-4h8v8h-8z", "^": "M0-5 5 4h-10z", "v": "M0 5 5-4h-10z",
  "D": "M0-5.5 5.5 0 0 5.5-5.5 0z", "<": "M-5 0 4-5v10z", ">": "M5 0-4-5v10z", "p": "M0-5 5-1 3 5h-6l-2-6z",
  "P": "M-2-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z", "X": "M-5-3-3-5 0-2 3-5 5-3 2 0 5 3 3 5 0 2-3 5-5 3-2 0z",
};

function element(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function ticks(low, high) {
  const raw = (high - low) / 8, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.svg = figure.querySelector("svg");
    this.readout = figure.querySelector(".readout");
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.view = "level";
    for (const button of figure.querySelectorAll(".view")) {
      button.addEventListener("click", () => this.show(button));
    }
    figure.querySelector(".legend").append(...this.data.series.map((series) => this.entry(series)));
    this.draw();
  }

  show(button) {
    this.view = button.dataset.view;
    for (const other of this.figure.querySelectorAll(".view")) other.setAttribute("aria-pressed", other === button);
    this.draw();
  }

  entry(series) {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", series.on);
    const sample = element("svg", { viewBox: "0 0 34 14" },
      element("line", { class: "curve", x1: 1, x2: 33, y1: 7, y2: 7, stroke: series.colour,
        "stroke-dasharray": series.dash }));
    if (series.mark) sample.append(element("path", { class: "point", d: MARKS[series.mark], fill: series.colour,
      transform: "translate(17 7)" }));
    button.append(sample, series.label);
    button.addEventListener("click", () => {
      series.on = !series.on;
      button.setAttribute("aria-pressed", series.on);
      this.draw();
    });
    return button;
  }

  draw() {
    const on = this.data.series.filter((series) => series.on);
    const points = on.flatMap((series) => series.points);
    const shown = points.flatMap((point) => [point[this.view] ?? [], point.seeds ? point.seeds[this.view] : []]).flat();
    const values = shown.length ? shown : [0, 1];
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const room = Math.max(0.05 * (most - least), 0.02);
    this.low = least - room;
    this.high = most + room;
    this.svg.replaceChildren(...this.axes(), ...on.flatMap((series) => this.curve(series)),
      ...on.filter((series) => series.undefined_at).flatMap((series) => this.stop(series)));
  }

  x(ratio) {
    const last = Math.log2(Math.max(2, ...this.data.lengths.map((entry) => entry.ratio)));
    return LEFT + 14 + (RIGHT - LEFT - 40) * Math.log2(ratio) / last;
  }

  y(value) { return BOTTOM - (BOTTOM - TOP) * (value - this.low) / (this.high - this.low); }

  axes() {
    const parts = [];
    const text = (x, y, anchor, words) => element("text", { x, y, "text-anchor": anchor, fill: "#333" }, words);
    for (const value of ticks(this.low, this.high)) {
      const y = this.y(value);
      parts.push(element("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y, y2: y }),
        text(LEFT - 8, y + 4, "end", value.toFixed(2)));
    }
    for (const { ratio, length } of this.data.lengths) {
      const x = this.x(ratio);
      parts.push(element("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: BOTTOM }),
        text(x, BOTTOM + 18, "middle", `${length}`), text(x, BOTTOM + 34, "middle", `${ratio}x`));
    }
    const trained = this.x(1);
    parts.push(element("line", { class: "trained", x1: trained, x2: trained, y1: TOP, y2: BOTTOM }),
      text(trained + 6, TOP + 10, "start", `trained at ${this.data.train_length}`),
      element("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: BOTTOM, y2: BOTTOM }),
      element("line", { class: "axis", x1: LEFT, x2: LEFT, y1: TOP, y2: BOTTOM }),
      text((LEFT + RIGHT) / 2, BOTTOM + 52, "middle", "context, tokens (log scale)"),
      element("text", { transform: `translate(14 ${(TOP + BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle",
        fill: "#333" }, this.view === "level" ? "nll, nats per token" : "rise against 1x, nats per token"));
    return parts;
  }

  curve(series) {
    const points = series.points.filter((point) => point[this.view]);
    if (!points.length) return [];
    const at = points.map((point) => [this.x(point.ratio), this.y(point[this.view][0])]);
    const path = (pairs) => "M" + pairs.map((pair) => pair.join(" ")).join("L");
    const group = element("g", { class: "series", "data-label": series.label });
    const banded = points.filter((point) => point[this.view].length === 3);
    if (banded.length > 1) {
      const edge = (i) => banded.map((point) => [this.x(point.ratio), this.y(point[this.view][i])]);
      group.append(element("path", { class: "band", fill: series.colour, d: path([...edge(1), ...edge(2).reverse()]) + "Z" }));
    }
    if (points[0].seeds) group.append(...this.seeds(series, points));
    else {
      group.append(element("path", { class: "curve", stroke: series.colour, "stroke-dasharray": series.dash, d: path(at) }));
      if (series.mark) group.append(...at.map(([x, y]) => element("path",
        { class: "point", d: MARKS[series.mark], fill: series.colour, transform: `translate(${x} ${y})` })));
    }
    points.forEach((point, i) => group.append(this.hit(series, point, at[i])));
    return [group];
  }

  // Outcomes in two groups: a thin line per seed, in place of a mean that no seed is near.
  seeds(series, points) {
    const at = (point, seed) => [this.x(point.ratio), this.y(point.seeds[this.view][seed])];
    return points[0].seeds[this.view].flatMap((_, seed) => [
      element("path", { class: "seed", stroke: series.colour, d: "M" + points.map((p) => at(p, seed).join(" ")).join("L") }),
      ...points.map((point) => element("path", { class: "point", d: MARKS[series.mark], fill: series.colour,
        transform: `translate(${at(point, seed).join(" ")}) scale(.75)` })),
    ]);
  }

  // A stop sign, over all curves: beyond it the scheme is undefined.
  stop(series) {
    const last = series.points.filter((point) => point[this.view]).at(-1);
    if (!last) return [];
    const [x, y] = [this.x(last.ratio), this.y(last[this.view][0])];
    const sign = (x + this.x(series.undefined_at)) / 2;
    return [element("g", { class: "end" },
      element("title", {}, `${series.label}: undefined from ${series.undefined_at}x`),
      element("line", { class: "curve", x1: x, x2: sign, y1: y, y2: y, stroke: "#b00020", "stroke-dasharray": "2 3" }),
      element("path", { class: "stop", d: "M-4-9h8l5 5v8l-5 5h-8l-5-5v-8z", transform: `translate(${sign} ${y})` }),
      element("rect", { x: sign - 5, y: y - 1.5, width: 10, height: 3, fill: "#fff" }))];
  }

  hit(series, point, [x, y]) {
    const spot = element("circle", { class: "hit", cx: x, cy: y, r: 6 });
    const [mean, low, high] = point[this.view].map((value) => value.toFixed(3));
    const interval = low === undefined ? "" : ` (95 %: ${low} to ${high})`;
    const words = `${series.label} at ${point.length} tokens (${point.ratio}x): ${mean}${interval}`;
    spot.addEventListener("pointerenter", () => { this.readout.textContent = words; });
    return spot;
  }
}

for (const figure of document.querySelectorAll("figure.chart")) new Chart(figure);
