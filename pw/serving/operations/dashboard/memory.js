// Where the budget is: a bar of bytes by class, and a picture of the arena page by page.

import { bytes, count, percent } from "./format.js";
import { $, colour, make, onThemeChange, prepare, text, tooltip } from "./dom.js";

const PLANES = 8;
const HEIGHT = 240; // of the picture, about
// Kinds of pages by their letters in /v1/pw/precision: planes are digits.
const KINDS = { L: ["lut", "lookup tables"], M: ["moving", "on their way back"], K: ["kv", "KV cache"], F: ["free", "free"],
  C: ["cached", "free, holds a prefix that may be used again"] };
for (let plane = 0; plane < PLANES; plane++) KINDS[plane] = [`bit${plane + 1}`, `bit ${plane + 1} of the experts`];

let picture = null; // the `pages` of the latest precision map
let grid = { columns: 1, size: 1 };

/** The bar and its legend: `held` = bytes by class of the status, `pages` as far as known. */
export function showBudget(held, pages) {
  picture = pages ?? picture;
  const parts = [["dense", "dense weights", held.dense], ["bit6", "unquantized experts", held.experts_dense], ...arena(held),
    ["tables", "tables", held.tables], ["workspace", "workspace", held.workspace]].filter(([, , size]) => size > 0);
  const bar = $("bar");
  while (bar.children.length > parts.length) bar.lastChild.remove();
  while (bar.children.length < parts.length) bar.append(make("div"));
  parts.forEach(([name, words, size], index) => {
    const piece = bar.children[index];
    piece.className = name;
    piece.style.background = `var(--${name})`;
    piece.style.width = `${(100 * size) / held.budget}%`;
    piece.title = `${words}: ${bytes(size)}`;
  });
  bar.setAttribute("aria-label", parts.map(([, words, size]) => `${words} ${bytes(size)}`).join(", "));
  $("bar-legend").replaceChildren(...parts.map(([name, words, size]) => {
    const swatch = make("i", { class: name });
    swatch.style.background = `var(--${name})`;
    return make("li", {}, swatch, `${words} `, make("span", { class: "quiet" }, bytes(size)));
  }));
}

/** The arena's classes: planes bit by bit where the picture tells them apart. */
function arena(held) {
  const cached = Math.min(held.free, (picture?.counts.C ?? 0) * (picture?.page_bytes ?? 0));
  const rest = [["kv", "KV cache", held.kv], ["cached", "kept prefixes", cached], ["free", "free", held.free - cached]];
  if (!picture) return [["bit5", "bit-planes", held.planes], ["lut", "lookup tables", held.luts], ...rest];
  // The picture may be a second older than the status: shares of its pages, bytes of the status.
  const { counts } = picture;
  const planes = [...Array(PLANES).keys()].map((plane) => counts[plane]);
  const pages = planes.reduce((sum, each) => sum + each, counts.M) || 1;
  const share = (each) => (held.planes * each) / pages;
  return [...planes.map((each, plane) => [`bit${plane + 1}`, `bit ${plane + 1}`, share(each)]),
    ["moving", "on their way back", share(counts.M)], ["lut", "lookup tables", held.luts], ...rest];
}

/** Draw the picture of the arena. */
export function drawPages(pages = picture) {
  if (!pages) return;
  picture = pages;
  const canvas = $("pages");
  const cells = pages.cells;
  const width = canvas.parentElement.clientWidth - 32;
  const size = Math.max(3, Math.min(20, Math.floor(Math.sqrt((width * HEIGHT) / cells.length))));
  grid = { columns: Math.floor(width / size), size };
  const rows = Math.ceil(cells.length / grid.columns);
  const context = prepare(canvas, width, rows * size);
  const gap = size >= 5 ? 1 : 0;
  const colours = Object.fromEntries(Object.entries(KINDS).map(([kind, [name]]) => [kind, colour(name)]));
  for (let cell = 0; cell < cells.length; cell++) {
    const [x, y] = [(cell % grid.columns) * size, Math.floor(cell / grid.columns) * size];
    context.fillStyle = context.strokeStyle = colours[cells[cell]];
    if (cells[cell] === "F" && gap) context.strokeRect(x + 0.5, y + 0.5, size - gap - 1, size - gap - 1);
    else context.fillRect(x, y, size - gap, size - gap);
  }
  const run = pages.pages_per_cell > 1 ? `, ${count(pages.pages_per_cell)} a square` : "";
  text("pages-text", `${count(pages.pages)} of ${bytes(pages.page_bytes)}${run}`);
}

function describe(x, y) {
  const column = Math.floor(x / grid.size);
  const cell = Math.floor(y / grid.size) * grid.columns + column;
  if (!picture || column >= grid.columns || cell >= picture.cells.length) return null;
  const kind = picture.cells[cell];
  const first = cell * picture.pages_per_cell;
  const last = Math.min(first + picture.pages_per_cell, picture.pages) - 1;
  const which = first === last ? `page ${count(first)}` : `pages ${count(first)} to ${count(last)}`;
  return `${which}: ${KINDS[kind][1]}\n${percent(picture.counts[kind] / picture.pages)} of all pages`;
}

tooltip($("pages"), describe);
addEventListener("resize", () => drawPages());
onThemeChange(() => drawPages());
