
"use strict";

// -- tasks: a share by problem length, a dot for each seed, a line through the median of those that learned -------

const GATE = 0.99;
const ASIDE = 4;  // pixels between two schemes beside each other

class Problems extends Chart {
  range() { return [0, 1]; }

  x(ratio) {
    const ratios = this.data.lengths.map((entry) => entry.ratio);
    const [first, last] = [Math.log2(Math.min(...ratios)), Math.log2(Math.max(...ratios))];
    return this.left + 26 + (this.right - this.left - 52) * (Math.log2(ratio) - first) / (last - first || 1);
  }

  entry(series) {
    const button = super.entry(series);
    if (series.hollow) {
      button.querySelector("line").remove();
      button.querySelector("path").replaceWith(this.dot(series, 17, 7, false));
    }
    return button;
  }

  name(series, end, height, words) {
    const group = super.name(series, end, height, words);
    if (series.hollow) {
      group.querySelector("path.lead")?.remove();
      group.querySelector("path.point").replaceWith(this.dot(series, this.right + 13, height, false));
    }
    return group;
  }

  dot(series, x, y, filled) {
    return element("path", { d: MARKS[series.mark], fill: filled ? series.ink : "var(--page)", stroke: series.ink,
      "stroke-width": 1.4, transform: `translate(${x} ${y}) scale(.8)` });
  }

  axes() {
    const { left, right, top, bottom } = this, parts = [];
    const text = (x, y, anchor, words) => element("text", { x, y, "text-anchor": anchor }, words);
    for (const value of [0, 0.25, 0.5, 0.75, 1]) {
      const y = this.y(value);
      parts.push(element("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        text(left - 6, y + 4, "end", `${100 * value}`));
    }
    const taken = [];
    const whole = (entry) => Number.isInteger(entry.ratio);
    const order = [...this.data.lengths].sort((a, b) => (b.ratio === 1) - (a.ratio === 1) || whole(b) - whole(a));
    for (const { ratio, length } of order) {
      const x = this.x(ratio);
      parts.push(element("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom }));
      if (taken.some((other) => Math.abs(other - x) < LABEL)) continue;
      taken.push(x);
      parts.push(text(x, bottom + 18, "middle", `${length ?? ""}`),
        text(x, bottom + 34, "middle", `${Number(ratio.toPrecision(3))}x`));
    }
    const trained = this.x(1), gate = this.y(GATE);
    const unit = this.view === "level" ? "answer tokens right, %" : "whole answers right, %";
    parts.push(element("line", { class: "trained", x1: trained, x2: trained, y1: top, y2: bottom }),
      element("line", { class: "mark", x1: left, x2: right, y1: gate, y2: gate, "stroke-width": 0.6 }),
      text(trained - 6, bottom - 8, "end", "trained up to here"),
      element("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
      element("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }),
      text((left + right) / 2, bottom + 52, "middle", "problem length (log scale)"),
      this.place.unitAbove ? text(2, 16, "start", unit) : element("text", { "text-anchor": "middle",
        transform: `translate(14 ${(top + bottom) / 2}) rotate(-90)` }, unit));
    return parts;
  }

  curve(series) {
    const points = series.points.filter((point) => point[this.view]);
    if (!points.length) return [];
    const shown = this.data.series.filter((other) => other.on);
    const aside = ASIDE * (shown.indexOf(series) - (shown.length - 1) / 2);
    const at = points.map((point) => [this.x(point.ratio) + aside, this.y(point[this.view][0])]);
    const group = element("g", { class: "series", "data-label": series.label });
    if (!series.hollow) group.append(element("path", { class: "curve", stroke: series.ink,
      d: "M" + at.map((pair) => pair.join(" ")).join("L") }));
    points.forEach((point, i) => {
      for (const [share, learned] of point.seeds[this.view])
        group.append(this.dot(series, at[i][0], this.y(share), learned));
      this.spot(series, point, at[i]);
    });
    return [group];
  }

  spot(series, point, [x, y]) {
    const percent = (share) => (100 * share).toFixed(1);
    const counted = point.seeds[this.view].filter(([, learned]) => learned || series.hollow).map(([share]) => share);
    const range = counted.length > 1 ? `, seeds ${percent(Math.min(...counted))} to ${percent(Math.max(...counted))}` : "";
    const where = `${series.label} at length ${point.length} (${Number(point.ratio.toPrecision(3))}x)`;
    this.spots.push({ x, y, words: `${where}: ${percent(point[this.view][0])} %${range}` });
  }
}

for (const figure of document.querySelectorAll("figure.problems")) {
  figure.style.margin = "0";
  new Problems(figure);
}
