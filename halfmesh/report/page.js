"use strict";
// Values where the pointer is, or the arrow keys have gone to. Without this script the page only lacks them.
const data = JSON.parse(document.getElementById("data").textContent);

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
}

function readable(value) {
  if (value === null) return "no number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(4).replace(/\.?0*e\+?/, "e");
  return value.toLocaleString("en", { maximumSignificantDigits: 5 });
}

function show(svg, step) {
  const { left, right, low, high, chart } = Object.fromEntries(
    Object.entries(svg.dataset).map(([key, value]) => [key, key === "chart" ? value : Number(value)]));
  const drawn = data[chart];
  const lines = [];
  let at = null;
  for (const line of drawn.lines) {
    const place = nearest(line.x, step);
    if (at === null || Math.abs(line.x[place] - step) < Math.abs(at - step)) at = line.x[place];
  }
  const slack = (high - low) / (right - left) * 4;
  for (const line of drawn.lines) {
    const place = nearest(line.x, at);
    if (Math.abs(line.x[place] - at) > slack * 3) continue;
    const elsewhere = line.x[place] === at ? "" : ` (update ${line.x[place].toLocaleString("en")})`;
    lines.push(`${line.label} ${readable(line.y[place])}${elsewhere}`);
  }
  for (const marks of drawn.skips) {
    const near = marks.ranges.filter(([first, last]) => first <= at + slack && last >= at - slack).slice(0, 6);
    if (near.length) lines.push(`${marks.label}: ${near.map(([a, b]) => a === b ? a : `${a}-${b}`).join(", ")}`);
  }
  const cross = svg.querySelector(".cross");
  const x = left + (at - low) / (high - low) * (right - left);
  cross.setAttribute("x1", x);
  cross.setAttribute("x2", x);
  cross.setAttribute("visibility", "visible");
  svg.dataset.at = at;
  const tip = svg.parentElement.querySelector(".tip");
  tip.textContent = [`update ${at.toLocaleString("en")}`, ...lines].join("\n");
  tip.hidden = false;
  const scale = svg.clientWidth / svg.viewBox.baseVal.width;
  const before = x * scale > svg.clientWidth / 2;
  const shift = before ? x * scale - tip.offsetWidth - 10 : x * scale + 10;
  tip.style.left = `${Math.max(0, Math.min(shift, svg.clientWidth - tip.offsetWidth))}px`;
  tip.style.top = `${svg.offsetTop + svg.getBoundingClientRect().top - svg.parentElement.getBoundingClientRect().top + 8}px`;
}

function hide(svg) {
  svg.querySelector(".cross").setAttribute("visibility", "hidden");
  svg.parentElement.querySelector(".tip").hidden = true;
}

for (const svg of document.querySelectorAll("svg.chart")) {
  svg.addEventListener("pointermove", (event) => {
    const { left, right, low, high } = svg.dataset;
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const share = Math.min(1, Math.max(0, (x - left) / (right - left)));
    show(svg, Number(low) + share * (high - low));
  });
  svg.addEventListener("pointerleave", () => hide(svg));
  svg.addEventListener("blur", () => hide(svg));
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide(svg);
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const steps = data[svg.dataset.chart].lines[0].x;
    const from = "at" in svg.dataset ? nearest(steps, Number(svg.dataset.at)) : -1;
    const place = from + (event.key === "ArrowLeft" ? -1 : 1);
    show(svg, steps[Math.max(0, Math.min(place, steps.length - 1))]);
  });
}
