// Bits and routing of every expert: layers down, experts across.

import { $, choice, colour, make, onThemeChange, prepare, text, tooltip } from "./dom.js";

const LABEL = 34; // pixels left of a map for the layers' numbers
const MEAN = 44; // and right of it for the layers' means
const GAP = 28; // between two maps, as in style.css
const BITS = ["gate_up", "down"];

let view = "bits";
let layers = [];
const maps = {}; // name -> {box, canvas, cell}

/** Draw the `layers` of the precision map. */
export function drawExperts(latest = layers) {
  layers = latest;
  const empty = layers.length === 0;
  $("map-text").hidden = !empty;
  $("view").hidden = empty;
  if (empty) text("map-text", "The experts are served unquantized: there are no widths to show.");
  const unrouted = !empty && layers[0].mass === null;
  if (view === "routing" && unrouted) {
    $("map-text").hidden = false;
    text("map-text", "Nothing plans under this policy, so nobody counts the routing.");
  }
  const few = !empty && 2 * (LABEL + MEAN + 30 * layers[0].gate_up.length) < 0.55 * innerWidth;
  $("main").classList.toggle("few", few); // there is room for all maps at once
  const routing = unrouted ? [] : ["mass"];
  const names = empty ? [] : few ? [...BITS, ...routing] : view === "bits" ? BITS : routing;
  $("maps").replaceChildren(...names.map(boxOf));
  for (const name of names) draw(name, names.length);
  drawLegend(empty);
}

function boxOf(name) {
  if (!maps[name]) {
    const canvas = make("canvas", { role: "img", "data-map": name });
    const title = name === "mass" ? "share of the router's weight" : `bits of ${name}`;
    maps[name] = { canvas, box: make("div", { class: "map" }, make("h3", {}, title), canvas) };
    tooltip(canvas, (x, y) => describe(maps[name], x, y));
  }
  return maps[name].box;
}

/** Largest cell with which the maps fit beside each other, or below each other if that is tiny. */
function cellSize(experts, maps) {
  const width = $("maps").clientWidth;
  const fit = (room) => Math.floor((room - LABEL - MEAN) / experts);
  const beside = fit((width - GAP * (maps - 1)) / maps);
  const wide = Math.max(3, Math.min(30, beside >= 4 ? beside : fit(width)));
  return { wide, high: Math.max(8, Math.min(22, wide, Math.floor(480 / layers.length))) };
}

function draw(name, shown) {
  const { canvas } = maps[name];
  const experts = layers[0].gate_up.length;
  const cell = (maps[name].cell = cellSize(experts, shown));
  const top = 16; // for the experts' numbers
  const context = prepare(canvas, LABEL + experts * cell.wide + MEAN, top + layers.length * cell.high);
  const paint = name === "mass" ? massColours() : bitColours();
  const gap = { x: cell.wide >= 5 ? 1 : 0, y: 1 };
  const every = cell.high >= 13 ? 1 : 2;
  context.font = "10px system-ui, sans-serif";
  context.textBaseline = "middle";
  layers.forEach((layer, row) => {
    const y = top + row * cell.high;
    layer[name].forEach((value, expert) => {
      context.fillStyle = paint(value);
      context.fillRect(LABEL + expert * cell.wide, y, cell.wide - gap.x, cell.high - gap.y);
    });
    context.fillStyle = colour("quiet");
    if (row % every === 0) {
      context.textAlign = "right";
      context.fillText(layer.layer, LABEL - 7, y + cell.high / 2);
      context.textAlign = "left";
      const mean = layer[name].reduce((sum, bits) => sum + bits, 0) / experts;
      if (name !== "mass") context.fillText(mean.toFixed(2), LABEL + experts * cell.wide + 8, y + cell.high / 2);
    }
  });
  numberExperts(context, experts, cell, name !== "mass");
  canvas.setAttribute("aria-label", `${name} of ${experts} experts in ${layers.length} layers`);
}

function numberExperts(context, experts, cell, shownMean) {
  context.fillStyle = colour("quiet");
  context.textAlign = "left";
  const every = [1, 2, 4, 8, 16, 32].find((step) => step * cell.wide >= 24) ?? 64;
  for (let expert = 0; expert < experts; expert += every) context.fillText(expert, LABEL + expert * cell.wide, 7);
  if (shownMean) context.fillText("mean", LABEL + experts * cell.wide + 8, 7);
  context.textAlign = "right";
  context.fillText("layer", LABEL - 7, 7);
}

function bitColours() {
  const ramp = [...Array(9).keys()].map((bits) => (bits ? colour(`bit${bits}`) : "transparent"));
  return (bits) => ramp[bits];
}

/** Shares relative to an equal share, from none to four times as much, on the ramp of the bits. */
function massColours() {
  const paint = bitColours();
  const equal = 1 / layers[0].gate_up.length;
  return (share) => paint(massStep(share / equal));
}

const massStep = (times) => (times === 0 ? 1 : Math.max(2, Math.min(8, Math.round(5 + 1.5 * Math.log2(times)))));

function describe(map, x, y) {
  const expert = Math.floor((x - LABEL) / map.cell.wide);
  const row = Math.floor((y - 16) / map.cell.high);
  const layer = layers[row];
  if (!layer || expert < 0 || expert >= layer.gate_up.length || y < 16) return null;
  const mass = layer.mass === null ? "" : `\nrouting ${(100 * layer.mass[expert]).toFixed(2)} %`;
  return `layer ${layer.layer}, expert ${expert}\ngate_up ${layer.gate_up[expert]} bits, down ${layer.down[expert]} bits${mass}`;
}

function drawLegend(empty) {
  const steps = view === "bits"
    ? [...widths()].map(([bits, blocks]) => [bits, `${bits} bits`, `${blocks}`])
    : [[1, "none", ""], [2, "a quarter or less", ""], [5, "an equal share", ""], [8, "four times as much", ""]];
  $("map-legend").replaceChildren(...(empty ? [] : steps).map(([bits, words, blocks]) => {
    const swatch = make("i");
    swatch.style.background = `var(--bit${bits})`;
    return make("li", {}, swatch, `${words} `, make("span", { class: "quiet" }, blocks && `${blocks} blocks`));
  }));
}

/** Blocks at each width, narrowest first. */
function widths() {
  const blocks = new Map();
  for (const layer of layers) for (const name of BITS) for (const bits of layer[name]) blocks.set(bits, (blocks.get(bits) ?? 0) + 1);
  return [...blocks].sort(([one], [other]) => one - other);
}

choice("view", "view", (chosen) => { view = chosen; drawExperts(); });
addEventListener("resize", () => drawExperts());
onThemeChange(() => drawExperts());
