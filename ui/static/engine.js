// The Engine tab: what runs where, right now. All figures come from GET /api/engine and the "engine" events.

import { count, h } from "./dom.js";
import { makeBound, makePrediction, makeSpeed } from "./engine_charts.js";
import { makeTimeline } from "./engine_timeline.js";

const MAX_SHOWN = 64; // chats drawn one by one, per place

const ABOUT = {
  memory:
    "While a model writes, it keeps keys and values of every token so far (the KV cache). They fill GPU memory as " +
    "chats get longer and more. Here they live in two places: the GPU-cache, and the CPU-cache in main memory. What " +
    "ended chats left behind stays until somebody needs the room: a chat that goes on finds its beginning there.",
  chats:
    "Each square is a chat, or another request to the server. Where its memory lies, there its attention is computed: " +
    "only small vectors cross the bus. “GPU memory alone” counts how many of these chats the GPU-cache would hold at " +
    "their present lengths, at most. Everybody in a batch shares one reading of the model's weights; so more chats at " +
    "once mean more tokens per second.",
  speed: "Tokens of all chats together, over the last three seconds. Prompt tokens count when they are computed.",
  timeline:
    "An iteration brings every chat in the batch one token further, or a part of a prompt. With two sub-batches, the " +
    "CPU attends for one while the GPU computes for the other. Overlap is the share of the CPU's attention in which the " +
    "GPU was busy, too. One iteration a second is recorded, and only while this page is looked at. Point at a piece, " +
    "or focus the picture and use the arrow keys.",
  prediction:
    "Before each iteration the scheduler predicts, from tables measured on this computer, how long every way to do it " +
    "would take, and chooses the best. These are the last hundred predictions beside what the iterations took.",
  bound:
    "The least time in which this computer could have done the work of the last hundred iterations, by the same " +
    "tables: weights read as seldom as the memory allows, perfect overlap, nobody waiting. No schedule reaches it " +
    "entirely. Likewise for the GPU-cache alone: faster than that, nothing without offloading could have been.",
  model:
    "Two sub-batches: iterations in which the CPU attended for one while the GPU computed for the other. Moved: chats " +
    "whose memory was brought to the other place. Begun again: chats that had to give their memory up for older ones, " +
    "and were read again later.",
};

let page = null;

export function mount(container, api) {
  page = makePage();
  container.append(page.root);
  page.end = api.on("engine", show);
  api.get("/api/engine").then(show, (error) => page && page.sentence.replaceChildren(error.message));
}

export function unmount() {
  page?.end();
  page?.timeline.end();
  page = null;
}

function card(title, about, ...children) {
  const id = `engine-${title.toLowerCase().replaceAll(" ", "-")}`;
  return h(
    "section",
    { class: "card engine-card", "aria-labelledby": id },
    h("h2", { id }, title),
    h("details", {}, h("summary", { "aria-label": `What is this: ${title}?`, title: "What is this?" }, "?"), h("p", {}, about)),
    ...children,
  );
}

function makePage() {
  const sentence = h("p", { class: "engine-sentence", "aria-live": "polite" }, "Asking the engine …");
  const notes = h("p", { class: "engine-notes", hidden: true });
  const gauges = { gpu: makeGauge("gpu"), cpu: makeGauge("cpu"), secondGpu: makeGauge("second-gpu") };
  const chats = makeChats();
  const speed = makeSpeed();
  const timeline = makeTimeline();
  const prediction = makePrediction();
  const bound = makeBound();
  const facts = h("dl", { class: "engine-facts" });
  const all = {
    memory: card("Memory of chats", ABOUT.memory, gauges.gpu.root, gauges.cpu.root, gauges.secondGpu.root, legend()),
    chats: card("Chats", ABOUT.chats, chats.root),
    speed: card("Tokens per second", ABOUT.speed, speed.root),
    timeline: card("Last iteration", ABOUT.timeline, timeline.root),
    prediction: card("Prediction", ABOUT.prediction, prediction.root),
    bound: card("The limit", ABOUT.bound, bound.root),
    model: card("Model", ABOUT.model, facts),
  };
  all.timeline.classList.add("engine-wide");
  all.speed.classList.add("engine-flat");
  all.model.classList.add("engine-flat");
  const cards = h("div", { class: "engine-grid", hidden: true }, ...Object.values(all));
  const root = h(
    "div",
    { class: "tab-page engine" },
    h("h1", {}, "Engine"),
    h("div", { class: "engine-top" }, sentence, notes),
    cards,
  );
  return { root, sentence, notes, cards, all, gauges, chats, speed, timeline, prediction, bound, facts, end: () => {} };
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function show(view) {
  if (!page) return;
  const { running } = view;
  page.root.dataset.state = view.state;
  setText(page.sentence, view.sentence);
  const late = view.age_s >= 3 ? [`The engine is busy with a long iteration; this is from ${Math.round(view.age_s)} s ago.`] : [];
  const notes = [...view.notes, ...late].join(" ");
  setText(page.notes, notes);
  page.notes.hidden = notes === "";
  page.cards.hidden = running === null;
  if (running === null) {
    page.speed.show(null);
    return;
  }
  const isOurs = running.backend !== "llamacpp"; // it has a schedule of which there is something to tell
  const names = {
    gpu: running.is_gpu_imitated ? "GPU-cache, imitated" : "GPU-cache",
    cpu: "CPU-cache",
    device: running.is_gpu_imitated ? "imitated GPU" : "GPU",
    waiting: isOurs ? "Waiting for memory" : "Waiting for their turn",
  };
  page.gauges.gpu.show(names.gpu, running.gpu_cache, running.requests);
  page.gauges.cpu.show(names.cpu, running.cpu_cache, running.requests);
  page.gauges.secondGpu.show("Second GPU", running.second_gpu_cache ?? null, running.requests);
  page.chats.show(running, names);
  page.speed.show(running.rates);
  // What an idle engine has not begun to tell of is left out.
  const isIdle = view.state === "idle";
  page.all.speed.hidden = isIdle && !page.speed.hasHistory();
  page.all.timeline.hidden = (isIdle || !isOurs) && running.timeline === null;
  page.all.prediction.hidden = (isIdle || !isOurs) && running.prediction === null;
  page.all.bound.hidden = (isIdle || !isOurs) && running.bound === null;
  page.timeline.show(running.timeline, names);
  page.prediction.show(running.prediction, running.policy);
  page.bound.show(running.bound, running.policy);
  showFacts(running);
}

// Memory.

function makeGauge(place) {
  const name = h("span", { class: "engine-name" });
  const figures = h("span", { class: "engine-figures" });
  const bar = h("div", { class: `engine-bar engine-${place}`, "aria-hidden": "true" });
  const fill = h("span", { class: "engine-figures" });
  const root = h("div", { class: "engine-gauge" }, h("div", { class: "engine-line" }, name, fill), bar, figures);

  function piece(kind, tokens, title) {
    const element = h("span", { class: `engine-piece ${kind}`, title });
    element.style.flexGrow = String(tokens);
    return element;
  }

  function show(label, cache, requests) {
    root.hidden = cache === null;
    if (cache === null) return;
    const { total_tokens: total, used_tokens: used, leftover_tokens: left } = cache;
    const percent = total ? Math.round((100 * used) / total) : 0;
    setText(name, label);
    const leftText = left ? ` · ${count(left)} left over` : "";
    setText(fill, total ? `${percent} %` : "");
    setText(figures, total ? `${count(used)} of ${count(total)} tokens${leftText}` : "switched off");
    const there = requests.filter((request) => request.place === place);
    const tokens = there.reduce((sum, request) => sum + request.tokens, 0);
    const scale = tokens > used ? used / tokens : 1; // chats that share a beginning keep it once
    bar.replaceChildren(
      ...there.map((request) => piece("used", request.tokens * scale, describe(request))),
      piece("used rest", Math.max(used - tokens, 0), null),
      piece("left", left, "left over by ended chats, can be reused"),
      piece("free", Math.max(total - used - left, 0), "free"),
    );
  }
  return { root, show };
}

function legend() {
  const entry = (kind, text) => h("li", {}, h("span", { class: `engine-key ${kind}` }), text);
  return h(
    "ul",
    { class: "engine-legend" },
    entry("gpu", "on the GPU"),
    entry("cpu", "in main memory"),
    entry("left", "left over, reusable"),
    entry("free", "free"),
  );
}

// Chats.

function describe(request) {
  const state =
    request.progress === "prefilling"
      ? `reading its prompt, ${count(request.computed_tokens)} of ${count(request.tokens)} tokens`
      : `${count(request.tokens)} tokens${request.is_held ? ", waits for the CPU" : ", writing"}`;
  return `Chat ${request.number}: ${state}`;
}

function makeChats() {
  const root = h("div", { class: "engine-chats" });
  const rows = new Map();

  function row(key) {
    if (!rows.has(key)) {
      const parts = { name: h("span", { class: "engine-name" }), figure: h("strong"), dots: h("ul", { class: "engine-dots" }) };
      parts.root = h("div", { class: "engine-row" }, h("div", { class: "engine-line" }, parts.name, parts.figure), parts.dots);
      rows.set(key, parts);
      root.append(parts.root);
    }
    return rows.get(key);
  }

  function fill(key, name, total, dots, isHidden) {
    const parts = row(key);
    setText(parts.name, name);
    setText(parts.figure, String(total));
    const more = total - dots.length;
    parts.dots.replaceChildren(...dots, more > 0 ? h("li", { class: "engine-more" }, `+ ${count(more)}`) : "");
    parts.root.classList.toggle("is-empty", total === 0);
    parts.root.hidden = isHidden;
  }

  const dot = (request) => {
    const state = request.is_held ? "held" : request.progress;
    const text = describe(request);
    return h("li", { class: `engine-dot ${request.place} ${state}`, title: text }, h("span", { class: "visually-hidden" }, text));
  };

  const compare = h("div", { class: "engine-compare" });
  const nobody = h("p", { class: "muted" }, "Ask something, on this page or through the API, and it shows here.");
  root.append(nobody);

  function show(running, names) {
    const { requests, waiting } = running;
    nobody.hidden = requests.length + waiting > 0;
    const side = (place) => requests.filter((request) => request.place === place);
    const sides = [
      ["gpu", `Memory on the ${names.device}`, running.gpu_cache !== null],
      ["cpu", "Memory in main memory", running.cpu_cache !== null],
      ["second-gpu", "Memory on the second GPU", Boolean(running.second_gpu_cache)],
      ["worker", "Memory on workers", running.workers.length > 0],
    ];
    for (const [place, name, exists] of sides) {
      const there = side(place);
      fill(place, name, there.length, there.slice(0, MAX_SHOWN).map(dot), !nobody.hidden || !exists);
    }
    const waits = Array.from({ length: Math.min(waiting, MAX_SHOWN) }, () => h("li", { class: "engine-dot queued" }));
    fill("waiting", names.waiting, waiting, waits, waiting === 0);
    root.append(compare);
    showCompare(compare, running);
  }
  return { root, show };
}

function showCompare(root, running) {
  const now = running.requests.length;
  const alone = running.gpu_alone_requests;
  root.hidden = now === 0 || alone === null || running.policy === "gpu-only";
  if (root.hidden) return;
  const most = Math.max(now, alone, 1);
  const cpu = running.requests.filter((request) => request.place === "cpu").length;
  const bar = (name, number, parts) => {
    const fills = parts.map(([kind, part]) => {
      const fill = h("span", { class: `engine-fill ${kind}` });
      fill.style.width = `${(100 * part) / most}%`;
      return fill;
    });
    return [h("dt", {}, name), h("dd", {}, h("span", { class: "engine-track" }, ...fills), h("strong", {}, count(number)))];
  };
  root.replaceChildren(
    h(
      "dl",
      {},
      ...bar("At once now", now, [["gpu", now - cpu], ["cpu", cpu]]),
      ...bar("GPU memory alone would hold", alone, [["gpu", alone]]),
    ),
  );
}

// Facts.

const bytesText = (bytes) =>
  bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.max(bytes / 1e6, 0.1).toFixed(bytes < 1e7 ? 1 : 0)} MB`;

const share = (part, whole) => (whole ? ` (${Math.round((100 * part) / whole)} %)` : "");

function showFacts(running) {
  const { counters } = running;
  const sms = running.gpu_sms ? `, ${running.gpu_sms} multiprocessors` : "";
  const rows = [
    ["Model", running.model],
    ["Runs on", running.device_name ? `${running.device_name}${sms}` : running.is_gpu_imitated ? "CPU (GPU imitated)" : "CPU"],
    ["Policy", running.policy],
    ...running.weights.map((one) => [
      "Weights",
      `${bytesText(one.bytes)}, ${one.place === "gpu" ? "GPU memory" : "main memory"}`,
    ]),
    ["Computes in", running.dtype],
    ["Iterations", `${count(counters.iterations)}`],
    ["with two sub-batches", `${count(counters.double_iterations)}${share(counters.double_iterations, counters.iterations)}`],
    ["Tokens written", count(counters.output_tokens)],
    ["attended to by the CPU", `${count(counters.cpu_decodes)}${share(counters.cpu_decodes, counters.output_tokens)}`],
    ["at their own pace", `${count(counters.staggered_decodes)}${share(counters.staggered_decodes, counters.output_tokens)}`],
    ["Prompt tokens", count(counters.prompt_tokens)],
    ["reused, not read again", `${count(counters.cached_tokens)}${share(counters.cached_tokens, counters.prompt_tokens)}`],
    ["Moved / begun again", `${count(counters.moves)} / ${count(counters.preemptions)}`],
  ];
  if (running.backend === "llamacpp") {
    rows.splice(2, 1, ["Computed by", "llama.cpp"]);
    for (const name of ["with two sub-batches", "attended to by the CPU", "Moved / begun again"]) {
      rows.splice(rows.findIndex(([each]) => each === name), 1);
    }
  }
  const isDetail = (name) => name[0] !== name[0].toUpperCase();
  page.facts.replaceChildren(
    ...rows.map(([name, value]) =>
      h("div", { class: "engine-line" }, h("dt", { class: isDetail(name) ? "detail" : null }, name), h("dd", {}, value)),
    ),
  );
}
