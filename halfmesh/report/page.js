"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 3 });
const digits = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const power = (base, n) => base + (n < 0 ? "⁻" : "") + [...String(Math.abs(n))].map((d) => digits[d]).join("");

function readable(value) {
  if (value == null) return "no number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(3).replace(/\.?0*e\+?/, "e");
  return value.toLocaleString("en", { maximumSignificantDigits: Number.isInteger(value) ? 15 : 5 });
}

function ticks(chart, values) {
  const { log, lines } = chart;
  if (log) {  // below the lines are the marks of skipped updates only
    const least = Math.min(...lines.filter((line) => line.kind !== "skips").flatMap((line) => line.y.filter((v) => v)));
    const name = (v) => {
      const exponent = Math.log2(v) / Math.log2(log), whole = Math.round(exponent);
      return Math.abs(exponent - whole) < 1e-6 ? power(log, whole) : v < 2e-3 ? v.toExponential(0) : short.format(v);
    };
    return values.map((v) => v == null || (log === 2 && v < least) ? "" : name(v));
  }
  const most = Math.max(...values.map(Math.abs));
  if (most < 2e-3) return values.map((v) => v === 0 ? "0" : v.toExponential(2).replace(/\.?0*e/, "e"));
  return values.map(most >= 1e4 && most < 1e15 ? short.format : readable);
}

// The place of a line's value at, or nearest to, a place of all lines: lines have values at different updates.
function nearest(values, at) {
  for (let d = 0; d < values.length; d++) {
    if (values[at - d] !== undefined) return at - d;
    if (values[at + d] !== undefined) return at + d;
  }
  return at;
}

function series(line) {
  const colour = () => css(`--c${line.colour}`);
  const isSkips = line.kind === "skips";
  const last = line.y[line.y.length - 1];
  return {
    label: line.label,
    stroke: colour,
    width: isSkips ? 0 : 1.6,
    dash: line.kind === "plan" ? [2, 5] : line.kind === "dots" ? [6, 4] : [],
    paths: isSkips ? () => null : undefined,
    points: isSkips || line.kind === "dots" ? { show: true, size: 6, fill: colour, stroke: colour }
      : line.kind === "plan" ? { show: false } : { fill: () => css("--card") },
    value: (u, value, i, at) => isSkips ? (at == null ? "" : value == null ? "no" : "yes") : readable(at == null ? last : value),
  };
}

// A running mean of a line, over about a twentieth of it; points of an evaluation and planned values stay.
function smoothed(line) {
  const share = Math.min(0.5, 20 / line.y.length);
  let mean = null;
  return line.kind !== "line" ? line
    : { ...line, y: line.y.map((v) => v == null ? v : (mean = mean == null ? v : mean + share * (v - mean))) };
}

function makeSwitch(figure, text, change) {
  const label = document.createElement("label"), box = document.createElement("input");
  box.type = "checkbox";
  box.addEventListener("change", () => change(box.checked));
  label.append(box, ` ${text}`);
  figure.nextElementSibling.append(label);
}

function plotOf(figure, chart) {
  const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid") }, ticks: { stroke: () => css("--grid") } };
  const font = "11px system-ui, sans-serif";
  const base = chart.log || 10;
  const options = {
    width: figure.clientWidth,
    height: 240,
    cursor: {
      sync: { key: "update" },
      y: false,
      dataIdx: (u, i, at) => i === 0 || chart.lines[i - 1].kind === "skips" ? at : nearest(u.data[i], at),
    },
    scales: {
      x: { time: false },
      y: chart.log ? { distr: 3, log: base } : { range: (u, low, high) => range(chart, low, high) },
    },
    axes: [
      { ...axis, font, incrs: [1, 2, 5].flatMap((n) => [...Array(13).keys()].map((p) => n * 10 ** p)).sort((a, b) => a - b),
        values: (u, values) => ticks({}, values), label: "update", labelFont: font, labelSize: 18, size: 30 },
      { ...axis, font, size: 58, values: (u, values) => ticks(chart, values) },
    ],
    series: [{ label: "update", value: (u, value) => value == null ? "last" : value.toLocaleString("en") }, ...chart.lines.map(series)],
  };
  return new uPlot(options, uPlot.join([[[0, chart.last]], ...chart.lines.map((line) => [line.x, line.y])]), figure);
}

function draw(figure) {
  const given = data[figure.dataset.chart], chart = { ...given };
  let plot = plotOf(figure, chart);
  const change = (changes) => {
    plot.destroy();
    plot = plotOf(figure, Object.assign(chart, changes));
  };
  if (given.lines.some((line) => line.kind === "line" && line.y.length > 20) && figure.dataset.chart !== "loss_scale")
    makeSwitch(figure, "smooth", (on) => change({ lines: on ? given.lines.map(smoothed) : given.lines }));
  if (given.lines.every((line) => line.y.every((v) => v == null || v > 0)) && given.log !== 2) {
    makeSwitch(figure, "log axis", (on) => change({ log: on ? 10 : 0 }));
    figure.nextElementSibling.lastChild.firstChild.checked = given.log === 10;
  }
  new ResizeObserver(() => plot.setSize({ width: figure.clientWidth, height: 240 })).observe(figure);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false));
  figure.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(plot.data[0].length - 1, (plot.cursor.idx ?? -1) + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: 0 });
  });
}

function range(chart, low, high) {
  if (low == null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [chart.zero && low >= 0 ? 0 : low - room, high + room];
}

document.querySelectorAll("figure.plot").forEach(draw);
