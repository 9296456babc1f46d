// Asks the server once a second while the tab is seen, and shows what it says.

import { get, key, Unauthorized, Unreachable } from "./api.js";
import { addSamples, drawCharts, forgetSamples, lastSample, nextSample } from "./chart.js";
import { $, make, text } from "./dom.js";
import { bytes, count, percent, rate, seconds } from "./format.js";
import { drawExperts } from "./heatmap.js";
import { drawPages, showBudget } from "./memory.js";

const INTERVAL_MS = 1000;
const REASONS = {
  draining: ["warn", "draining", "The server answers what it has accepted and takes no new requests."],
  engine_failed: ["bad", "engine failed", "The engine has failed and does not come back: restart the server. What is shown is its last state."],
  engine_unhealthy: ["bad", "engine not responding", "The engine does not respond. What is shown is its last state."],
  engine_stalled: ["bad", "engine stalled", "The engine has requests but makes no steps. The server's log says what it knew."],
};

let turn = 0;
let lastSeen = 0; // milliseconds

async function look() {
  const status = await get("v1/pw/status");
  lastSeen = Date.now();
  $("key-form").hidden = true;
  $("main").hidden = false;
  $("forget").hidden = !key.get();
  const alive = status.not_ready_reason !== "engine_failed";
  const [timeline, requests, precision] = await Promise.allSettled([
    get(`v1/pw/timeline?since=${nextSample()}`), get("v1/pw/requests"),
    alive && turn % 2 === 0 ? get("v1/pw/precision") : Promise.reject(),
  ]);
  turn += 1;
  if (timeline.status === "fulfilled") addSamples(timeline.value.samples);
  showStatus(status);
  showBudget(status.bytes, precision.value?.pages);
  showPlans(status);
  if (requests.status === "fulfilled") showRequests(requests.value);
  if (precision.status === "fulfilled") {
    drawPages(precision.value.pages);
    drawExperts(precision.value.layers);
  }
}

function showState(kind, words, sentence) {
  $("state").className = `state ${kind}`;
  text("state", words);
  $("notice").hidden = !sentence;
  text("notice", sentence ?? "");
  $("main").classList.toggle("stale", kind === "bad");
}

function showStatus(status) {
  const unknown = ["bad", "not ready", status.not_ready_reason];
  showState(...(status.ready ? ["good", "ready"] : REASONS[status.not_ready_reason] ?? unknown));
  document.title = `${status.model} · PagedWeight`;
  text("model", status.model);
  $("policy").hidden = false;
  text("policy", status.policy);
  text("about", `${status.version} · contexts up to ${count(status.max_model_len)} tokens`);
  const now = lastSample();
  text("bits", count(status.mean_bits, 2));
  const layers = Object.values(status.layer_bits);
  text("bits-range", layers.length ? `layers ${Math.min(...layers).toFixed(2)} to ${Math.max(...layers).toFixed(2)}` : "unquantized");
  rateTile("generated", now?.generation_tokens_per_second, `${count(status.generation_tokens)} in all`);
  const cached = status.prefix_cache_hits ? `, ${percent(status.prefix_cache_hits / status.prefix_cache_queries)} from cache` : " in all";
  rateTile("prompts", now?.prompt_tokens_per_second, `${count(status.prompt_tokens)}${cached}`);
  $("running").replaceChildren(count(status.running), make("small", {}, ` running  ${count(status.waiting)} waiting`));
  const preempted = status.preemptions ? `, ${count(status.preemptions)} preempted` : "";
  const failed = status.failed ? `, ${count(status.failed)} failed` : "";
  text("finished", `${count(status.finished)} done${failed}${preempted}`);
  const room = status.pages_kv + status.pages_free;
  text("kv", percent(room ? status.pages_kv / room : 0));
  text("kv-bytes", `${bytes(status.bytes.kv)} of ${bytes(room * status.page_bytes)} room`);
  text("over", bytes(status.bytes_over_budget));
  $("over").classList.toggle("bad", status.bytes_over_budget > 0);
  text("budget", `budget ${bytes(status.bytes.budget)}`);
}

function rateTile(id, value, words) {
  $(id).replaceChildren(rate(value ?? 0), make("small", {}, " tokens/s"));
  text(`${id}-total`, words);
}

function showRequests({ count: all, requests }) {
  text("requests-count", all > requests.length ? `oldest ${requests.length} of ${all}` : "");
  const rows = requests.map((request) => row(
    request.sequences > 1 ? `${request.id} × ${request.sequences}` : request.id, request.state, count(request.prompt_tokens),
    count(request.generated_tokens), seconds(request.ttft_seconds), seconds(request.age_seconds), request.bits ? request.bits.toFixed(2) : "–"));
  $("requests").replaceChildren(...(rows.length ? rows : [none(7, "none now")]));
}

function showPlans(status) {
  text("plans-count", `${count(status.plans)} in all, ${count(status.transitions)} changes of width`);
  const rows = status.plan_history.slice(-40).reverse().map((plan) => row(
    count(plan.step ?? 0), plan.reason, count(plan.moves), count(plan.pages), (plan.damage ?? 0).toExponential(1), (plan.mean_bits ?? 0).toFixed(2)));
  $("plans").replaceChildren(...(rows.length ? rows : [none(6, "none yet: nothing had to move")]));
}

const row = (...cells) => make("tr", {}, ...cells.map((cell) => make("td", { title: cell }, cell)));
const none = (columns, words) => make("tr", {}, make("td", { class: "none", colspan: columns }, words));

function askForKey() {
  const wrong = key.get() !== null;
  key.forget();
  $("main").hidden = true;
  $("forget").hidden = true;
  $("key-form").hidden = false;
  $("key-text").classList.toggle("bad", wrong);
  if (wrong) text("key-text", "The server does not know this key.");
  showState("warn", "key needed");
  $("key").focus();
}

/** Look again and again; false ends it, until a key has been given. */
async function watch() {
  for (;;) {
    try {
      if (!document.hidden) await look();
    } catch (error) {
      if (error instanceof Unauthorized) return askForKey();
      if (!(error instanceof Unreachable)) throw error;
      const ago = lastSeen ? `, last seen ${seconds((Date.now() - lastSeen) / 1000)} ago` : "";
      showState("bad", "not reachable", `The server does not answer${ago}. This page goes on asking.`);
      if (lastSeen && Date.now() - lastSeen > 60_000) forgetSamples();
    }
    await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value);
  $("key").value = "";
  watch();
});
$("forget").addEventListener("click", () => { key.forget(); location.reload(); });
drawCharts();
watch();
