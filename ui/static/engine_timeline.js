// Who was busy when in one iteration: a lane per worker, a hue per sub-batch.

import { h } from "./dom.js";
import { figure, onResize, svg, ticks } from "./svg.js";

const LANE = 24; // px, with the gap below
const TOP = 4;
const AXIS = 20;
const NAMES = { device: "GPU", "to-host": "to main memory", cpu: "CPU", "to-device": "to the GPU", swap: "moves", peer: "second GPU" };
const SHORT = { "to-host": "to host", "to-device": "to GPU" };

export function makeTimeline() {
  const says = h("p", { class: "engine-says" });
  const frame = h("div", { class: "engine-frame", tabindex: "0", role: "group", "aria-roledescription": "timeline" });
  const readout = h("p", { class: "engine-readout", "aria-live": "polite" });
  const few = h("button", { class: "button quiet engine-zoom", type: "button", "aria-pressed": "false", onclick: zoom }, "A few layers");
  const key = (kind, text) => h("li", {}, h("span", { class: `engine-key ${kind}` }), text);
  const second = key("sub1", "sub-batch 1");
  const bothKey = key("both", "both at work");
  const keys = h("ul", { class: "engine-legend" }, key("sub0", "sub-batch 0"), second, bothKey);
  const foot = h("div", { class: "engine-line engine-foot" }, keys, readout, few);
  const root = h("div", {}, says, frame, foot);
  let shown = null; // what is drawn
  let names = { device: "GPU" };
  let waiting = null; // what came while somebody looks closely
  let chosen = null; // {lane, span, box}

  const isLookedAt = () => frame.matches(":hover") || document.activeElement === frame;
  const end = onResize(frame, () => shown && draw());
  frame.addEventListener("pointermove", (event) => choose(event.target.piece ?? null));
  frame.addEventListener("pointerleave", release);
  frame.addEventListener("blur", release);
  frame.addEventListener("focus", () => chosen ?? step(0, 0));
  frame.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (!move) return;
    event.preventDefault();
    step(...move);
  });

  function zoom() {
    few.setAttribute("aria-pressed", String(few.getAttribute("aria-pressed") !== "true"));
    if (shown) draw();
  }

  function release() {
    if (isLookedAt()) return;
    choose(null);
    if (waiting) show(...waiting);
  }

  /** [from, to] in ms: all, or some layers from the middle on. */
  function range() {
    if (few.getAttribute("aria-pressed") !== "true") return [0, shown.total_ms];
    const spans = shown.lanes.flatMap((lane) => lane.spans);
    const middle = Math.floor(Math.max(...spans.map((span) => span.layer)) / 2);
    const inside = spans.filter((span) => span.layer >= middle && span.layer < middle + 3);
    if (!inside.length) return [0, shown.total_ms];
    return [Math.min(...inside.map((span) => span.start_ms)), Math.max(...inside.map((span) => span.end_ms))];
  }

  function show(timeline, allNames) {
    waiting = null;
    if (timeline && shown && isLookedAt()) {
      waiting = [timeline, allNames];
      return;
    }
    shown = timeline;
    names = allNames;
    frame.hidden = foot.hidden = timeline === null;
    if (timeline === null) {
      says.textContent = "The next iteration is drawn here.";
      return;
    }
    const busy = Object.fromEntries(timeline.lanes.map((lane) => [lane.name, Math.round(100 * lane.busy)]));
    const parts = [h("strong", {}, `${figure(timeline.total_ms)} ms`)];
    if (timeline.age_s >= 3) parts.push(`, ${Math.round(timeline.age_s)} s ago`);
    const halves = [];
    if ("device" in busy) halves.push(`the ${names.device} was busy for ${busy.device} %`);
    if ("cpu" in busy) halves.push(`the CPU attended for ${busy.cpu} %`);
    parts.push(`: ${halves.join(", ")}.`);
    if (timeline.overlap !== null) parts.push(" Overlap: ", h("strong", {}, `${Math.round(100 * timeline.overlap)} %`), ".");
    if (!timeline.is_device_recorded) parts.push(" The GPU ran this iteration as one CUDA graph, whose parts are not recorded.");
    says.replaceChildren(...parts);
    second.hidden = !timeline.lanes.some((lane) => lane.spans.some((span) => span.sub_batch === 1));
    bothKey.hidden = timeline.overlap === null;
    frame.setAttribute("aria-label", `Timeline of one iteration. ${says.textContent} Arrow keys walk through its pieces.`);
    draw();
  }

  function draw() {
    const width = Math.max(frame.clientWidth, 280);
    const isNarrow = width < 560;
    const left = isNarrow ? 62 : 112;
    const [from, to] = range();
    const lanes = shown.lanes;
    const both = overlaps(lanes, from, to);
    const bottom = TOP + LANE * lanes.length + (both.length ? 10 : 0);
    const x = (ms) => left + ((width - left - 4) * (ms - from)) / Math.max(to - from, 1e-6);
    const picture = svg("svg", { width, height: bottom + AXIS, viewBox: `0 0 ${width} ${bottom + AXIS}`, "aria-hidden": "true" });
    for (const ms of ticks(to - from, isNarrow ? 3 : 7)) {
      const at = x(from + ms);
      picture.append(
        svg("line", { class: "engine-tick", x1: at, x2: at, y1: TOP, y2: bottom }),
        svg("text", { class: "engine-label", x: at, y: bottom + 14, "text-anchor": ms === 0 ? "start" : at > width - 30 ? "end" : "middle" }, `${ms} ms`),
      );
    }
    lanes.forEach((lane, index) => {
      const y = TOP + LANE * index;
      const name = lane.name === "device" ? (isNarrow ? "GPU" : names.device) : ((isNarrow && SHORT[lane.name]) || NAMES[lane.name] || lane.name);
      picture.append(
        svg("text", { class: "engine-label name", x: left - 8, y: y + 14, "text-anchor": "end" }, name),
        svg("line", { class: "engine-base", x1: left, x2: width - 4, y1: y + LANE - 3, y2: y + LANE - 3 }),
      );
      for (const span of lane.spans) {
        if (span.end_ms >= from && span.start_ms <= to) picture.append(...piece(lane, span, x, y, from, to));
      }
    });
    for (const [start, stop] of both) {
      picture.append(svg("rect", { class: "engine-both", x: x(start), width: Math.max(x(stop) - x(start), 0.5), y: bottom - 7, height: 4 }));
    }
    frame.replaceChildren(picture);
    chosen = null;
    readout.textContent = "";
  }

  function piece(lane, span, x, y, from, to) {
    const start = x(Math.max(span.start_ms, from));
    const width = Math.max(x(Math.min(span.end_ms, to)) - start - 0.5, 0.75);
    const isAttention = lane.name === "device" && span.stage === "attention";
    const box = svg("rect", {
      class: `engine-span sub${span.sub_batch ?? "none"}${isAttention ? " light" : ""}`,
      x: start,
      y: y + 2,
      width,
      height: LANE - 6,
      rx: width > 6 ? 2 : 0,
    });
    box.piece = { lane, span, box };
    span.box = box;
    const text = lane.name === "device" || lane.name === "cpu" ? span.stage.replace("CPU attention", "attention") : "";
    if (width < 9 + 6.2 * text.length || text === "") return [box];
    return [box, svg("text", { class: "engine-inside", x: start + 5, y: y + 15 }, text)];
  }

  function choose(piece) {
    if (chosen?.box === piece?.box) return;
    chosen?.box.classList.remove("is-chosen");
    chosen = piece;
    if (!piece) {
      readout.textContent = "";
      return;
    }
    const { lane, span, box } = piece;
    box.classList.add("is-chosen");
    const who = lane.name === "device" ? names.device : (NAMES[lane.name] ?? lane.name);
    const batch = span.sub_batch === null ? "" : `, sub-batch ${span.sub_batch}`;
    readout.textContent = `${who}: ${span.stage}, layer ${span.layer}${batch}, ${figure(span.end_ms - span.start_ms)} ms (from ${figure(span.start_ms)} ms on)`;
  }

  function step(along, across) {
    if (!shown) return;
    const lanes = shown.lanes;
    const laneIndex = chosen ? lanes.indexOf(chosen.lane) : 0;
    const target = lanes[Math.min(Math.max(laneIndex + across, 0), lanes.length - 1)];
    const visible = target.spans.filter((span) => span.box?.isConnected);
    if (!visible.length) return;
    let index = 0;
    if (chosen && across === 0) index = visible.indexOf(chosen.span) + along;
    else if (chosen) index = visible.findIndex((span) => span.end_ms >= chosen.span.start_ms);
    const span = visible[Math.min(Math.max(index, 0), visible.length - 1)];
    choose({ lane: target, span, box: span.box });
  }

  return { root, show, end };
}

/** Where the device and the CPU's attention are both at work: [start, end] in ms. */
function overlaps(lanes, from, to) {
  const spans = (name) => lanes.find((lane) => lane.name === name)?.spans ?? [];
  const found = [];
  for (const a of spans("cpu")) {
    for (const b of spans("device")) {
      const start = Math.max(a.start_ms, b.start_ms, from);
      const end = Math.min(a.end_ms, b.end_ms, to);
      if (start < end) found.push([start, end]);
    }
  }
  return found;
}
