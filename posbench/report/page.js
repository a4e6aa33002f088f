
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

const LEFT = 64, RIGHT = 764, WIDTH = 960, TOP = 14, LOWEST = 384;
const NAME = 16, LONGEST_NAME = 23, SIGN = 20;  // heights of a name and of a stop sign; characters
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

// Heights nearest to those wanted, in their order, at which things of one size do not overlap (isotonic regression).
function apart(wanted, size, low, high) {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b] || a - b);
  const pools = [];
  order.forEach((i, rank) => {
    pools.push({ sum: wanted[i] - rank * size, count: 1 });
    while (pools.length > 1 && pools.at(-2).sum / pools.at(-2).count >= pools.at(-1).sum / pools.at(-1).count) {
      const last = pools.pop();
      pools.at(-1).sum += last.sum;
      pools.at(-1).count += last.count;
    }
  });
  const free = pools.flatMap((pool) => Array(pool.count).fill(pool.sum / pool.count));
  const found = [], room = high - (order.length - 1) * size;
  order.forEach((i, rank) => { found[i] = Math.max(low, Math.min(free[rank], room)) + rank * size; });
  return found;
}

// Of a long name the beginning and the end, where variants of a scheme differ.
function short(name, most) {
  const half = Math.floor((most - 1) / 2);
  return name.length > most ? `${name.slice(0, half)}\u2026${name.slice(-half)}` : name;
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
    this.legend(figure.querySelector(".legend"));
    this.draw();
  }

  // The names, one row for each family where there is more than one.
  legend(place) {
    for (const family of new Set(this.data.series.map((series) => series.family))) {
      const members = this.data.series.filter((series) => series.family === family);
      const row = document.createElement("div");
      row.className = "row";
      const entries = members.map((series) => this.entry(series));
      if (family) row.append(this.heading(family, members, entries));
      row.append(...entries);
      place.append(row);
    }
  }

  heading(family, members, entries) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "family";
    button.append(family);
    button.addEventListener("click", () => {
      const plain = members.filter((series) => series.mark), on = !plain.some((series) => series.on);
      for (const series of on ? plain : members) series.on = on;
      members.forEach((series, i) => entries[i].setAttribute("aria-pressed", series.on));
      this.draw();
    });
    return button;
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
    const on = this.data.series.filter((series) => series.on && series.points.some((point) => point[this.view]));
    const [least, most] = this.range(on);
    const room = Math.max(0.05 * (most - least), 0.02);
    this.low = least - room;
    this.high = most + room;
    this.bottom = Math.max(LOWEST, TOP + NAME * on.length);
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${this.bottom + 56}`);
    const [width, height] = [RIGHT - LEFT, this.bottom - TOP];
    const inside = element("svg", { x: LEFT, y: TOP, width, height, viewBox: `${LEFT} ${TOP} ${width} ${height}` },
      ...on.flatMap((series) => this.curve(series)), ...this.stops(on.filter((series) => series.undefined_at)));
    this.svg.replaceChildren(...this.axes(), inside, ...this.names(on));
  }

  // All that is shown; curves that would flatten the others count only among themselves.
  range(on) {
    const others = on.filter((series) => !series.outside);
    const points = (others.length ? others : on).flatMap((series) => series.points);
    const shown = points.flatMap((point) => [point[this.view] ?? [], point.seeds ? point.seeds[this.view] : []]).flat();
    return shown.length ? [Math.min(...shown), Math.max(...shown)] : [0, 1];
  }

  last(series) { return series.points.filter((point) => point[this.view]).at(-1); }

  // Beside the ends of the curves, pushed apart.
  names(on) {
    const ends = on.map((series) => this.y(this.last(series)[this.view][0]));
    const within = ends.map((y) => Math.min(this.bottom, Math.max(TOP, y)));
    const heights = apart(within, NAME, TOP + NAME / 2, this.bottom - NAME / 2);
    return on.map((series, i) => this.name(series, ends[i], heights[i]));
  }

  name(series, end, height) {
    const most = Math.max(...series.points.map((point) => point[this.view]?.[0] ?? -Infinity));
    const goesTo = most > this.high ? ` \u2191 ${most.toFixed(2)}` : "";
    const words = short(series.label, LONGEST_NAME - goesTo.length) + goesTo;
    const group = element("g", { class: "name" }, element("title", {}, series.label),
      element("text", { x: RIGHT + 22, y: height + 4, fill: series.colour }, words));
    if (series.mark) group.append(element("path", { class: "point", d: MARKS[series.mark], fill: series.colour,
      transform: `translate(${RIGHT + 13} ${height})` }));
    if (!series.undefined_at && most <= this.high) group.append(element("path", { class: "lead", stroke: series.colour,
      d: `M${this.x(this.last(series).ratio)} ${end}L${RIGHT - 4} ${height}h10` }));
    return group;
  }

  x(ratio) {
    const last = Math.log2(Math.max(2, ...this.data.lengths.map((entry) => entry.ratio)));
    return LEFT + 14 + (RIGHT - LEFT - 48) * Math.log2(ratio) / last;
  }

  y(value) { return this.bottom - (this.bottom - TOP) * (value - this.low) / (this.high - this.low); }

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
      parts.push(element("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: this.bottom }),
        text(x, this.bottom + 18, "middle", `${length}`), text(x, this.bottom + 34, "middle", `${ratio}x`));
    }
    const trained = this.x(1);
    parts.push(element("line", { class: "trained", x1: trained, x2: trained, y1: TOP, y2: this.bottom }),
      text(trained + 6, TOP + 10, "start", `trained at ${this.data.train_length}`),
      element("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: this.bottom, y2: this.bottom }),
      element("line", { class: "axis", x1: LEFT, x2: LEFT, y1: TOP, y2: this.bottom }),
      text((LEFT + RIGHT) / 2, this.bottom + 52, "middle", "context, tokens (log scale)"),
      element("text", { transform: `translate(14 ${(TOP + this.bottom) / 2}) rotate(-90)`, "text-anchor": "middle",
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

  // Stop signs, over all curves: beyond them the schemes are undefined. Those that would overlap are pushed apart.
  stops(on) {
    const ends = on.map((series) => this.last(series));
    const x = on.map((series, i) => (this.x(ends[i].ratio) + this.x(series.undefined_at)) / 2);
    const y = ends.map((point) => this.y(point[this.view][0]));
    const order = x.map((_, i) => i).sort((a, b) => x[a] - x[b] || a - b);
    const near = [];
    for (const i of order) {
      if (near.length && x[i] - x[near.at(-1).at(-1)] < SIGN) near.at(-1).push(i);
      else near.push([i]);
    }
    return near.flatMap((some) => {
      const heights = apart(some.map((i) => y[i]), SIGN, TOP + SIGN / 2, this.bottom - SIGN / 2);
      return some.map((i, n) => this.stop(on[i], this.x(ends[i].ratio), y[i], x[i], heights[n]));
    });
  }

  stop(series, x, y, sign, height) {
    return element("g", { class: "end" },
      element("title", {}, `${series.label}: undefined from ${series.undefined_at}x`),
      element("line", { class: "curve", x1: x, x2: sign, y1: y, y2: height, stroke: "#b00020", "stroke-dasharray": "2 3" }),
      element("path", { class: "stop", d: "M-4-9h8l5 5v8l-5 5h-8l-5-5v-8z", transform: `translate(${sign} ${height})` }),
      element("rect", { x: sign - 5, y: height - 1.5, width: 10, height: 3, fill: "#fff" }));
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
