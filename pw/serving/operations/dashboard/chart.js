// Four small charts over the same seconds, drawn as SVG, with one crosshair through all of them.

import { count, percent, rate } from "./format.js";
import { $, choice, make, tooltip } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const RIGHT = 34; // pixels for the axis
const RELOADS = ["idle", "headroom"]; // triggers by which planes come back

let samples = [];
let minutes = 5;
let hovered = null; // sample under the pointer

const arena = (sample) => sample.pages_weights + sample.pages_kv + sample.pages_free || 1;

// What is drawn. `lines` are [name, colour, value of a sample]; `stacked` ones add up.
const CHARTS = [
  {
    name: "Pages", stacked: true, top: () => 1, axis: percent, marks: true,
    lines: [["weights", "bit5", (s) => s.pages_weights / arena(s)], ["KV", "kv", (s) => s.pages_kv / arena(s)]],
  },
  { name: "Mean bits", top: (most) => Math.max(2, Math.ceil(most)), axis: (n) => n.toFixed(0), digits: (n) => n.toFixed(2), lines: [["", "bit6", (s) => s.mean_bits]] },
  {
    name: "Tokens a second", top: nice, axis: count,
    lines: [["generated", "bit6", (s) => s.generation_tokens_per_second], ["prompts", "dense", (s) => s.prompt_tokens_per_second]],
  },
  { name: "Requests", stacked: true, top: nice, axis: count, digits: count, lines: [["running", "bit5", (s) => s.running], ["waiting", "dense", (s) => s.waiting]] },
];

/** The next of 1, 2, 5, 10, 20, ... */
function nice(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, most)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most);
}

function svg(tag, attributes, words) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (words !== undefined) element.textContent = words;
  return element;
}

/** Add the samples that are new; the server keeps a quarter of an hour. */
export function addSamples(latest) {
  if (latest.length && samples.length && latest[0].number < samples[samples.length - 1].number) samples = []; // began anew
  samples.push(...latest);
  samples = samples.slice(-900);
  drawCharts();
}

/** Number of the next sample to ask for. */
export const nextSample = () => (samples.length ? samples[samples.length - 1].number + 1 : 0);

/** The latest sample. */
export const lastSample = () => samples[samples.length - 1];

/** What the server that is gone has said is no longer true. */
export function forgetSamples() {
  samples = [];
}

export function drawCharts() {
  for (const chart of CHARTS) draw(chart);
}

function frame(chart) {
  if (!chart.box) {
    chart.image = svg("svg", { "data-chart": chart.name });
    chart.value = make("span", { class: "value" });
    const name = make("span", { class: "name" }, chart.name);
    const marks = chart.marks ? [["planes given up", "text"], ["coming back", "moving"]] : [];
    for (const [words, paint] of [...chart.lines.filter(([words]) => words), ...marks]) {
      const swatch = make("i", { class: "key" });
      swatch.style.background = `var(--${paint})`;
      name.append(swatch, make("span", { class: "quiet" }, words));
    }
    chart.box = make("div", { class: "chart" }, name, chart.value, chart.image);
    tooltip(chart.image, (x) => hover(chart, x));
    chart.image.addEventListener("pointerleave", () => { hovered = null; drawCharts(); });
    $("charts").append(chart.box);
  }
  return { width: chart.image.clientWidth - RIGHT, height: chart.image.clientHeight };
}

function draw(chart) {
  const { width, height } = frame(chart);
  const last = lastSample();
  if (!last || width <= 0) return;
  const end = last.time;
  const begin = beginOf(end);
  const shown = samples.filter((sample) => sample.time >= begin - 2);
  const heights = shown.map((sample) => sums(chart, sample));
  const most = Math.max(...heights.map((sums) => Math.max(...sums)));
  const top = chart.top(most);
  const x = (sample) => Math.max(0, (width * (sample.time - begin)) / (end - begin));
  const y = (value) => height - 1 - ((height - 2) * value) / top;
  const parts = [...gridOf(chart, width, height, top)];
  chart.lines.forEach(([, paint], index) => {
    const upper = shown.map((sample, at) => `${x(sample).toFixed(1)},${y(heights[at][index]).toFixed(1)}`);
    if (chart.stacked) {
      const lower = shown.map((sample, at) => `${x(sample).toFixed(1)},${y(index ? heights[at][index - 1] : 0).toFixed(1)}`);
      parts.push(svg("polygon", { points: [...upper, ...lower.reverse()].join(" "), fill: `var(--${paint})`, "fill-opacity": 0.85 }));
    } else {
      parts.push(svg("polyline", { points: upper.join(" "), fill: "none", stroke: `var(--${paint})`, "stroke-width": 1.6, "stroke-linejoin": "round" }));
    }
  });
  if (chart.marks) parts.push(...shown.filter((sample) => Object.keys(sample.plans).length).map((sample) => mark(sample, x(sample), height)));
  const at = hovered ?? last;
  if (hovered) parts.push(svg("line", { class: "cross", x1: x(at), x2: x(at), y1: 0, y2: height }));
  chart.image.replaceChildren(...parts);
  chart.value.textContent = valueText(chart, at);
}

/** Where the charts begin: the minutes asked for, or less where there is less, but a minute. */
const beginOf = (end) => Math.min(end - 60, Math.max(end - 60 * minutes, samples[0].time));

/** Values of a sample, each on top of those before it where they are stacked. */
function sums(chart, sample) {
  let sum = 0;
  return chart.lines.map(([, , value]) => (chart.stacked ? (sum += value(sample)) : value(sample)));
}

function* gridOf(chart, width, height, top) {
  for (const part of [0, 0.5, 1]) {
    const y = height - 1 - (height - 2) * part;
    yield svg("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y });
    if (part !== 0.5 || top >= 4 || chart.axis === percent) {
      yield svg("text", { class: "axis", x: width + 6, y: Math.min(height - 1, Math.max(8, y + 3)) }, chart.axis(top * part));
    }
  }
}

/** A tick where planes were given up (from above) or began to come back (from below). */
function mark(sample, x, height) {
  const back = Object.keys(sample.plans).every((trigger) => RELOADS.includes(trigger));
  const [y1, y2] = back ? [height - 1, height - 9] : [1, 9];
  return svg("line", { x1: x, x2: x, y1, y2, stroke: back ? "var(--moving)" : "var(--text)", "stroke-width": 1.5, "data-plan": Object.keys(sample.plans).join(" ") });
}

function valueText(chart, sample) {
  const digits = chart.digits ?? (chart.axis === percent ? percent : rate);
  return chart.lines.map(([, , value]) => digits(value(sample))).join(" · ");
}

function hover(chart, x) {
  const last = lastSample();
  const width = chart.image.clientWidth - RIGHT;
  if (!last || x > width) return null;
  const begin = beginOf(last.time);
  const time = begin + ((last.time - begin) * x) / width;
  const nearest = samples.reduce((best, sample) => (Math.abs(sample.time - time) < Math.abs(best.time - time) ? sample : best), last);
  if (Math.abs(nearest.time - time) > 3) return null;
  hovered = nearest;
  drawCharts();
  const plans = Object.entries(nearest.plans).map(([trigger, each]) => `\n${each.plans} × ${trigger}: ${each.moves} blocks, ${each.pages} pages`);
  return new Date(1000 * nearest.time).toLocaleTimeString() + plans.join("");
}

choice("range", "minutes", (chosen) => { minutes = Number(chosen); drawCharts(); });
addEventListener("resize", drawCharts);
