// The Self-test tab: runs the bench on the server's computer and shows its reports. One view: GET /api/selftest and the
// "selftest" events.

import { h } from "./dom.js";
import { progress, setProgress } from "./models.js";
import { attempt } from "./notice.js";

const ABOUT = {
  hardware: ["Hardware", "memory, processor, GPU and the bus between them"],
  "cpu-attention": ["CPU attention", "the kernel that reads the CPU-cache"],
  gpu: ["Model", "one model at several batch sizes"],
  weights: ["Weights", "a model larger than GPU memory"],
  "cost-model": ["Predictions", "how well times are predicted"],
  throughput: ["Throughput", "what offloading gains on many requests"],
  load: ["Load", "waiting times while requests arrive"],
};

let page = null;

export function mount(container, api) {
  page = makePage(api);
  container.append(page.root);
  page.end = api.on("selftest", show);
  attempt(() => api.get("/api/selftest")).then((view) => view && show(view));
}

export function unmount() {
  page?.end();
  page = null;
}

function makePage(api) {
  const suites = h("fieldset", { class: "suites" }, h("legend", {}, "What to measure"));
  const start = h("button", { class: "button primary", type: "submit" }, "Start");
  const form = h("form", { class: "card selftest-start" }, suites, h("div", { class: "selftest-go" }, start, h("span", { class: "muted" }, "All of it takes about 3 minutes.")));
  const parts = {
    api,
    suites,
    form,
    shown: null, // the name of the report in the frame
    listed: null,
    status: h("div", { role: "status" }),
    reports: h("ul", { class: "report-list" }),
    history: h("section", { hidden: true, "aria-labelledby": "reports-title" }),
    frame: h("div", { class: "report-frame", hidden: true }),
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const chosen = [...suites.querySelectorAll("input:checked")].map((box) => box.value);
    attempt(async () => show(await api.post("/api/selftest/start", { suites: chosen })));
  });
  suites.addEventListener("change", () => {
    start.disabled = suites.querySelector("input:checked") === null;
  });
  parts.history.append(h("h2", { id: "reports-title" }, "Reports"), parts.reports, parts.frame);
  parts.root = h(
    "div",
    { class: "tab-page" },
    h("h1", {}, "Self-test"),
    h(
      "p",
      { class: "muted selftest-intro" },
      "Measures this computer: what it can run, how fast, and what offloading gains on it. The loaded model is unloaded first, to leave its memory to what is measured. A message sent meanwhile loads it again, and disturbs the figures.",
    ),
    form,
    parts.status,
    parts.history,
  );
  return parts;
}

function show(view) {
  if (page === null) return;
  const { suites, status, form } = page;
  if (suites.querySelector("input") === null) suites.append(...view.suites.map(choice));
  form.hidden = view.running !== null;
  showRun(view);
  if (view.running === null && view.error) {
    status.replaceChildren(h("p", { class: "models-error", role: "alert" }, view.error));
  }
  showReports(view);
}

function choice(suite) {
  const [name, about] = ABOUT[suite] ?? [suite, ""];
  return h("label", { class: "suite" }, h("input", { type: "checkbox", value: suite, checked: true }), h("span", {}, h("strong", {}, name), h("span", { class: "muted" }, about)));
}

function showRun(view) {
  const { status, api } = page;
  const run = view.running;
  if (run === null) {
    delete status.dataset.report;
    if (!view.error) status.replaceChildren();
    return;
  }
  if (status.dataset.report !== run.report) {
    status.dataset.report = run.report;
    const stop = h("button", { class: "button", type: "button", onclick: () => attempt(() => api.post("/api/selftest/stop")) }, "Stop");
    status.replaceChildren(h("div", { class: "card models-loading" }, h("strong", {}, "Measuring"), ...progress("the self-test"), stop));
  }
  status.querySelector("button").disabled = run.is_stopping;
  setProgress(status, run.share, run.what);
}

function showReports(view) {
  const { history, reports } = page;
  history.hidden = view.reports.length === 0;
  const names = view.reports.map((report) => report.name).join();
  if (names === page.listed) return;
  const isNew = page.listed !== null;
  page.listed = names;
  reports.replaceChildren(...view.reports.map(entry));
  if (view.reports.length && (isNew || page.shown === null)) open(view.reports[0].name);
}

function entry(report) {
  const when = new Date(report.started ?? NaN);
  const date = Number.isNaN(when.getTime()) ? report.name : when.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  const suites = report.suites.map((suite) => ABOUT[suite]?.[0] ?? suite).join(", ");
  return h(
    "li",
    {},
    h(
      "button",
      { class: "report-entry", type: "button", "data-report": report.name, "aria-pressed": "false", onclick: () => open(report.name) },
      h("strong", {}, date),
      h("span", { class: "muted" }, `${suites}${report.interrupted ? " (ended early)" : ""}`),
    ),
  );
}

function open(name) {
  page.shown = name;
  for (const button of page.reports.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.report === name));
  const address = `/api/selftest/report?name=${encodeURIComponent(name)}`;
  page.frame.hidden = false;
  page.frame.replaceChildren(
    h("iframe", { src: address, sandbox: "", title: `Report of ${name}` }),
    h("p", {}, h("a", { href: address, target: "_blank", rel: "noopener" }, "Open in a tab of its own")),
  );
}
