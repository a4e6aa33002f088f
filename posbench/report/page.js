
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

// -- a sign beside tables that are wider than the page, until their end is seen ----------------------------------

for (const place of document.querySelectorAll(".scroll")) {
  const look = () => place.parentElement.classList.toggle(
    "more", place.scrollWidth - place.clientWidth - place.scrollLeft > 2);
  place.addEventListener("scroll", look);
  new ResizeObserver(look).observe(place);
}

// -- curves --------------------------------------------------------------------------------------------------------

const MARKS = {
  "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "s": "M-4-4h8v8h-8z", "^": "M0-5 5 4h-10z", "v": "M0 5 5-4h-10z",
  "D": "M0-5.5 5.5 0 0 5.5-5.5 0z", "<": "M-5 0 4-5v10z", ">": "M5 0-4-5v10z", "p": "M0-5 5-1 3 5h-6l-2-6z",
  "P": "M-2-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z", "X": "M-5-3-3-5 0-2 3-5 5-3 2 0 5 3 3 5 0 2-3 5-5 3-2 0z",
};
// In pixels, on a page wide enough and on a phone: beside the panel on either side, above it, and its least lower edge.
// On a phone the unit stands above the axis and not beside it.
const WIDE = { left: 64, right: 196, top: 14, lowest: 384, unitAbove: false };
const NARROW = { left: 40, right: 104, top: 30, lowest: 300, unitAbove: true };
const NARROW_BELOW = 640;
const NAME = 16, SIGN = 20;  // heights of a name and of a stop sign
const NAME_AT = 22;  // from the panel to a name
const LABEL = 38;  // room for a length below the axis
const MOST = 8;  // curves with bands, beyond which bands hide each other
const NEAR = { mouse: 28, touch: 90 };  // how far from a point it is read

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

// Of a name that is wider than there is room the beginning and the end, where variants of a scheme differ.
function short(name, end, room) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  let words = name + end;
  for (let half = Math.floor(name.length / 2); half > 1 && pen.measureText(words).width > room; half--) {
    words = `${name.slice(0, half)}\u2026${name.slice(-half)}${end}`;
  }
  return words;
}

// Short names; where two would read alike, from there on where they differ.
function distinct(labels, ends, room) {
  let words = labels.map((label, i) => short(label, ends[i], room));
  for (const begin of [/[^ =]*$/, /$/]) {
    words = words.map((word, i) => {
      const alike = labels.filter((_, j) => words[j] === word);
      if (alike.length < 2) return word;
      let same = 0;
      while (alike.every((label) => label[same] === alike[0][same])) same++;
      return short(`\u2026${labels[i].slice(alike[0].slice(0, same).search(begin))}`, ends[i], room);
    });
  }
  return words;
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
    this.svg.addEventListener("pointermove", (event) => this.read(event));
    this.svg.addEventListener("pointerdown", (event) => this.read(event));
    new ResizeObserver(() => { if (this.svg.clientWidth !== this.width) this.draw(); }).observe(this.svg);
    this.draw();
  }

  // The names, one row for each family where there is more than one.
  legend(place) {
    const many = this.data.series.filter((series) => !series.on).length > MOST;
    for (const family of new Set(this.data.series.map((series) => series.family))) {
      const members = this.data.series.filter((series) => series.family === family);
      const row = document.createElement("div");
      row.className = "row";
      const entries = members.map((series) => this.entry(series));
      if (family) row.append(this.heading(family, members, entries));
      const off = entries.filter((_, i) => many && !members[i].on);
      row.append(...entries.filter((entry) => !off.includes(entry)));
      if (off.length) row.append(this.folded(off));
      place.append(row);
    }
  }

  // Many curves that are off at first fill no page.
  folded(entries) {
    const place = document.createElement("details"), title = document.createElement("summary");
    title.append(`${entries.length} more, off`);
    place.append(title, ...entries);
    return place;
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
      element("line", { class: "curve", x1: 1, x2: 33, y1: 7, y2: 7, stroke: series.ink,
        "stroke-dasharray": series.dash }));
    if (series.mark) sample.append(element("path", { class: "point", d: MARKS[series.mark], fill: series.ink,
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
    this.width = this.svg.clientWidth;
    this.place = this.width < NARROW_BELOW ? NARROW : WIDE;
    this.left = this.place.left;
    this.top = this.place.top;
    this.right = Math.max(this.left + 80, this.width - this.place.right);
    this.bottom = Math.max(this.place.lowest, this.top + NAME * on.length);
    this.spots = [];
    this.banded = on.length <= MOST;
    this.svg.setAttribute("viewBox", `0 0 ${this.right + this.place.right} ${this.bottom + 56}`);
    const [x, y, width, height] = [this.left, this.top, this.right - this.left, this.bottom - this.top];
    const inside = element("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` },
      ...on.flatMap((series) => this.curve(series)), ...this.stops(on.filter((series) => series.undefined_at)));
    this.here = element("circle", { class: "here", r: 8, visibility: "hidden" });
    this.svg.replaceChildren(...this.axes(), inside, this.here, ...this.names(on));
  }

  // The point nearest to the mouse or the finger, if one is near.
  read(event) {
    const box = this.svg.getBoundingClientRect();
    const away = (spot) => Math.hypot(spot.x - (event.clientX - box.left), spot.y - (event.clientY - box.top));
    const nearest = this.spots.reduce((a, b) => (a && away(a) <= away(b) ? a : b), null);
    const near = nearest && away(nearest) < (event.pointerType === "mouse" ? NEAR.mouse : NEAR.touch);
    this.here.setAttribute("visibility", near ? "visible" : "hidden");
    if (!near) return;
    this.here.setAttribute("cx", nearest.x);
    this.here.setAttribute("cy", nearest.y);
    this.readout.textContent = nearest.words;
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
    const within = ends.map((y) => Math.min(this.bottom, Math.max(this.top, y)));
    const heights = apart(within, NAME, this.top + NAME / 2, this.bottom - NAME / 2);
    const labels = on.map((series) => series.label), goTo = on.map((series) => {
      const most = this.most(series);
      return most > this.high ? ` \u2191 ${most.toFixed(2)}` : "";
    });
    const words = distinct(labels, goTo, this.place.right - NAME_AT - 2);
    return on.map((series, i) => this.name(series, ends[i], heights[i], words[i]));
  }

  most(series) { return Math.max(...series.points.map((point) => point[this.view]?.[0] ?? -Infinity)); }

  name(series, end, height, words) {
    const most = this.most(series), right = this.right;
    const group = element("g", { class: "name" }, element("title", {}, series.label),
      element("text", { x: right + NAME_AT, y: height + 4 }, words));
    if (series.mark) group.append(element("path", { class: "point", d: MARKS[series.mark], fill: series.ink,
      transform: `translate(${right + 13} ${height})` }));
    else group.append(element("path", { class: "curve", stroke: series.ink, "stroke-dasharray": "4 2",
      d: `M${right + 7} ${height}h12` }));
    if (!series.undefined_at && most <= this.high) group.append(element("path", { class: "lead", stroke: series.ink,
      d: `M${this.x(this.last(series).ratio)} ${end}L${right - 4} ${height}h10` }));
    return group;
  }

  x(ratio) {
    const last = Math.log2(Math.max(2, ...this.data.lengths.map((entry) => entry.ratio)));
    return this.left + 14 + (this.right - this.left - 40) * Math.log2(ratio) / last;
  }

  y(value) { return this.bottom - (this.bottom - this.top) * (value - this.low) / (this.high - this.low); }

  axes() {
    const { left, right, top, bottom } = this, parts = [];
    const text = (x, y, anchor, words) => element("text", { x, y, "text-anchor": anchor }, words);
    const values = ticks(this.low, this.high);
    const digits = Math.max(...values.map((value) => (`${+value.toFixed(4)}`.split(".")[1] ?? "").length));
    for (const value of values) {
      const y = this.y(value);
      parts.push(element("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        text(left - 6, y + 4, "end", value.toFixed(digits)));
    }
    let labelled = -Infinity;
    for (const { ratio, length } of this.data.lengths) {
      const x = this.x(ratio);
      parts.push(element("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom }));
      if (x < labelled + LABEL) continue;
      labelled = x;
      parts.push(text(x, bottom + 18, "middle", `${length}`), text(x, bottom + 34, "middle", `${ratio}x`));
    }
    const trained = this.x(1), unit = this.view === "level" ? "nll, nats per token" : "rise against 1x, nats per token";
    parts.push(element("line", { class: "trained", x1: trained, x2: trained, y1: top, y2: bottom }),
      text(trained + 6, top + 10, "start", `trained at ${this.data.train_length}`),
      element("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
      element("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }),
      text((left + right) / 2, bottom + 52, "middle", "context, tokens (log scale)"),
      this.place.unitAbove ? text(2, 16, "start", unit) : element("text", { "text-anchor": "middle",
        transform: `translate(14 ${(top + bottom) / 2}) rotate(-90)` }, unit));
    return parts;
  }

  curve(series) {
    const points = series.points.filter((point) => point[this.view]);
    if (!points.length) return [];
    const at = points.map((point) => [this.x(point.ratio), this.y(point[this.view][0])]);
    const path = (pairs) => "M" + pairs.map((pair) => pair.join(" ")).join("L");
    const group = element("g", { class: "series", "data-label": series.label });
    const banded = points.filter((point) => point[this.view].length === 3);
    if (this.banded && banded.length > 1) {
      const edge = (i) => banded.map((point) => [this.x(point.ratio), this.y(point[this.view][i])]);
      group.append(element("path", { class: "band", fill: series.ink, d: path([...edge(1), ...edge(2).reverse()]) + "Z" }));
    }
    if (points[0].seeds) group.append(...this.seeds(series, points));
    else {
      group.append(element("path", { class: "curve", stroke: series.ink, "stroke-dasharray": series.dash, d: path(at) }));
      if (series.mark) group.append(...at.map(([x, y]) => element("path",
        { class: "point", d: MARKS[series.mark], fill: series.ink, transform: `translate(${x} ${y})` })));
    }
    points.forEach((point, i) => this.spot(series, point, at[i]));
    return [group];
  }

  // Outcomes in two groups: a thin line per seed, in place of a mean that no seed is near.
  seeds(series, points) {
    const at = (point, seed) => [this.x(point.ratio), this.y(point.seeds[this.view][seed])];
    return points[0].seeds[this.view].flatMap((_, seed) => [
      element("path", { class: "seed", stroke: series.ink, d: "M" + points.map((p) => at(p, seed).join(" ")).join("L") }),
      ...points.map((point) => element("path", { class: "point", d: MARKS[series.mark], fill: series.ink,
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
      const heights = apart(some.map((i) => y[i]), SIGN, this.top + SIGN / 2, this.bottom - SIGN / 2);
      return some.map((i, n) => this.stop(on[i], this.x(ends[i].ratio), y[i], x[i], heights[n]));
    });
  }

  stop(series, x, y, sign, height) {
    return element("g", { class: "end" },
      element("title", {}, `${series.label}: undefined from ${series.undefined_at}x`),
      element("line", { class: "curve", x1: x, x2: sign, y1: y, y2: height, stroke: "var(--stop)",
        "stroke-dasharray": "2 3" }),
      element("path", { class: "stop", d: "M-4-9h8l5 5v8l-5 5h-8l-5-5v-8z", transform: `translate(${sign} ${height})` }),
      element("rect", { x: sign - 5, y: height - 1.5, width: 10, height: 3, class: "bar" }));
  }

  spot(series, point, [x, y]) {
    const [mean, low, high] = point[this.view].map((value) => value.toFixed(3));
    const interval = low === undefined ? "" : ` (95 %: ${low} to ${high})`;
    const words = `${series.label} at ${point.length} tokens (${point.ratio}x): ${mean}${interval}`;
    if (y >= this.top) this.spots.push({ x, y, words });
  }
}

for (const figure of document.querySelectorAll("figure.chart")) new Chart(figure);
