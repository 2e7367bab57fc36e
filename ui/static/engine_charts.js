// The Engine tab's small charts: tokens per second, predictions, the bound.

import { h } from "./dom.js";
import { figure, svg } from "./svg.js";

const HISTORY_MS = 120_000;
const WIDTH = 300; // of a chart's own units; stretched to the card
const HEIGHT = 56;

const history = []; // {at, output, prompt}: outlives the tab

function points(series, x, y) {
  return series.map((item) => `${x(item).toFixed(1)},${y(item).toFixed(1)}`).join(" ");
}

const chart = (label) =>
  svg("svg", { class: "engine-chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });

function line(kind, path) {
  return svg("polyline", { class: `engine-curve ${kind}`, points: path, "vector-effect": "non-scaling-stroke" });
}

// Tokens per second.

export function makeSpeed() {
  const rows = ["output", "prompt"].map((kind) => {
    const number = h("strong", { class: "engine-number" }, "–");
    const most = h("span", { class: "engine-figures" });
    const picture = chart("");
    const name = kind === "output" ? "written" : "prompts read";
    const root = h("div", { class: "engine-speed" }, h("div", { class: "engine-line" }, h("span", {}, number, ` ${name}`), most), picture);
    return { kind, number, most, picture, root, name };
  });
  const axis = () => h("p", { class: "engine-axis" }, h("span", {}, "2 minutes ago"), h("span", {}, "now"));
  for (const row of rows) row.root.append(axis());
  const root = h("div", { class: "engine-speeds" }, ...rows.map((row) => row.root));

  function show(rates) {
    const now = Date.now();
    if (rates) history.push({ at: now, output: rates.output_tokens_per_s, prompt: rates.prompt_tokens_per_s });
    while (history.length && history[0].at < now - HISTORY_MS) history.shift();
    for (const row of rows) draw(row, rates, now);
  }

  function draw(row, rates, now) {
    const latest = rates ? rates[`${row.kind}_tokens_per_s`] : null;
    const highest = Math.max(...history.map((item) => item[row.kind]), 0);
    row.number.textContent = latest === null ? "–" : figure(Math.round(latest));
    row.most.textContent = highest > 0 ? `at most ${figure(Math.round(highest))}` : "";
    row.picture.setAttribute("aria-label", `Tokens ${row.name} per second over two minutes: ${row.number.textContent} now, ${row.most.textContent || "none"}`);
    const x = (item) => WIDTH * (1 - (now - item.at) / HISTORY_MS);
    const y = (item) => HEIGHT - 2 - ((HEIGHT - 6) * item[row.kind]) / (highest || 1);
    const path = points(history, x, y);
    const base = svg("line", { class: "engine-base", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 });
    const parts = [base];
    if (history.length > 1) {
      const area = `${x(history[0]).toFixed(1)},${HEIGHT - 1} ${path} ${x(history.at(-1)).toFixed(1)},${HEIGHT - 1}`;
      parts.push(svg("polygon", { class: `engine-area ${row.kind}`, points: area }), line(row.kind, path));
    }
    row.picture.replaceChildren(...parts);
  }
  const hasHistory = () => history.some((item) => item.output + item.prompt > 0);
  return { root, show, hasHistory };
}

// Predicted against real.

export function makePrediction() {
  const text = h("p", { class: "engine-says" });
  const picture = chart("");
  picture.classList.add("tall");
  const keys = h(
    "ul",
    { class: "engine-legend" },
    h("li", {}, h("span", { class: "engine-key real" }), "took"),
    h("li", {}, h("span", { class: "engine-key predicted" }), "predicted"),
  );
  const root = h("div", {}, text, picture, keys);

  function show(prediction, policy) {
    const isThere = prediction !== null;
    picture.toggleAttribute("hidden", !isThere);
    keys.hidden = !isThere;
    if (!isThere) {
      text.textContent =
        policy === "gpu-only" || policy === "fastdecode"
          ? `The policy ${policy} has one place to live: nothing needs to be predicted.`
          : "Shown as soon as there is work.";
      return;
    }
    const { predicted_ms: predicted, real_ms: real, mean_error: error } = prediction;
    text.replaceChildren(
      "Last iteration: predicted ",
      h("strong", {}, `${figure(predicted.at(-1))} ms`),
      ", took ",
      h("strong", {}, `${figure(real.at(-1))} ms`),
      `. Off by ${Math.round(100 * error)} % on average over ${real.length === 1 ? "1 iteration" : `${real.length} iterations`}.`,
    );
    const most = highest([...predicted, ...real]);
    const x = (_, index) => (real.length > 1 ? (WIDTH * index) / (real.length - 1) : 0);
    const path = (series) =>
      series.map((ms, index) => `${x(ms, index).toFixed(1)},${(HEIGHT - 2 - ((HEIGHT - 6) * Math.min(ms, most)) / most).toFixed(1)}`).join(" ");
    picture.setAttribute("aria-label", text.textContent);
    picture.replaceChildren(
      svg("line", { class: "engine-base", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }),
      line("real", path(real)),
      line("predicted", path(predicted)),
    );
  }
  return { root, show };
}

/** What the axis ends at: nearly all of it, so that one long iteration does not flatten the rest. */
function highest(series) {
  const sorted = [...series].sort((a, b) => a - b);
  return Math.max(1.15 * sorted[Math.floor(0.97 * (sorted.length - 1))], 1e-6);
}

// The bound.

export function makeBound() {
  const text = h("p", { class: "engine-says" });
  const bars = h("dl", { class: "engine-bars" });
  const root = h("div", {}, text, bars);

  function show(bound, policy) {
    bars.hidden = bound === null;
    if (bound === null) {
      text.textContent =
        policy === "gpu-only" || policy === "fastdecode"
          ? `Without predictions (policy ${policy}) nothing was measured here that a limit could be computed from.`
          : "Shown as soon as there is work.";
      return;
    }
    const { real_ms: real, least_ms: least, gpu_alone_ms: alone } = bound;
    const percent = Math.round(100 * bound.share);
    const says = [h("strong", {}, `${percent} %`), " of the fastest that this computer could do with any schedule."];
    if (percent > 100) says.push(" More than 100 %: the tables were measured while the computer was busier.");
    // Rounded down: it is a claim.
    const times = alone === null ? 0 : Math.floor((10 * alone) / real) / 10;
    if (times > 1) says.push(" With GPU memory alone the same work would have taken at least ", h("strong", {}, `${times.toFixed(1)} times`), " as long.");
    text.replaceChildren(...says);
    const most = Math.max(real, least, alone ?? 0);
    const bar = (name, ms, kind) => {
      const fill = h("span", { class: `engine-fill ${kind}` });
      fill.style.width = `${(100 * ms) / most}%`;
      return [h("dt", {}, name), h("dd", {}, h("span", { class: "engine-track" }, fill), h("span", {}, `${figure(ms)} ms`))];
    };
    bars.replaceChildren(
      ...bar("It took", real, "real"),
      ...bar("Least possible", least, "least"),
      ...(alone === null || policy === "gpu-only" ? [] : bar("Least, GPU memory alone", alone, "gpu")),
    );
  }
  return { root, show };
}
