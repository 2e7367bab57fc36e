// The Models tab: what is on this computer, what fits, what is loaded. All of it is one view, GET /api/models and the
// "models" events.

import { count, h } from "./dom.js";
import { attempt } from "./notice.js";

let page = null;

export function mount(container, api) {
  page = makePage(api);
  container.append(page.root);
  page.end = api.on("models", show);
  attempt(() => api.get("/api/models")).then((view) => view && show(view));
}

export function unmount() {
  page?.end();
  page = null;
}

function makePage(api) {
  const parts = {
    api,
    shown: "",
    note: h("span"), // what all figures rest on
    status: h("div", { class: "models-status", role: "status" }),
    list: h("ul", { class: "models-list" }),
    pull: makePull(api),
    folders: h("p", { class: "muted models-folders" }),
  };
  parts.root = h(
    "div",
    { class: "tab-page" },
    h("h1", {}, "Models"),
    h("p", { class: "muted models-intro" }, "What is on this computer, and what each would bring here. One is loaded at a time. ", parts.note),
    parts.status,
    parts.list,
    parts.pull.root,
    parts.folders,
  );
  return parts;
}

function show(view) {
  if (page === null) return;
  showStatus(view);
  const lasting = JSON.stringify([view.models, view.loaded, view.loading?.name]);
  if (lasting !== page.shown) {
    page.shown = lasting;
    const focused = document.activeElement?.getAttribute("data-key");
    page.note.textContent = note(view.models.map((model) => model.fit).filter(Boolean));
    page.list.replaceChildren(...sorted(view).map((model) => card(model, view)));
    if (focused) [...page.list.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus();
  }
  page.pull.show(view);
  page.folders.textContent = view.folders.length ? `Looked for in ${view.folders.join(", ")}.` : "";
}

/** The loaded one first, then what can be loaded. */
function sorted(view) {
  const rank = (model) => (model.name === view.loaded?.name ? 0 : model.runnable && !model.fit?.reason ? 1 : model.runnable ? 2 : 3);
  return view.models.map((model, index) => [model, index]).sort(([a, i], [b, j]) => rank(a) - rank(b) || i - j).map(([model]) => model);
}

function showStatus(view) {
  const { status, api } = page;
  if (view.loading) {
    const { name, share, what, reason } = view.loading;
    const title = reason ? `Starting ${name} again` : `Loading ${name}`;
    if (status.dataset.title !== title) {
      status.dataset.title = title;
      const stop = h("button", { class: "button", type: "button", onclick: () => attempt(() => api.post("/api/models/unload")) }, "Stop");
      status.replaceChildren(h("div", { class: "card models-loading" }, h("strong", {}, title), ...progress(name), stop, reason ? h("p", { class: "models-reason", role: "alert" }, `${ended(capital(reason))} Chats that were cut are kept: continue them then.`) : ""));
    }
    setProgress(status, share, what);
  } else {
    delete status.dataset.title;
    status.replaceChildren(...(view.error ? [h("p", { class: "models-error", role: "alert" }, `${ended(capital(view.error))} No model is loaded now: choose one.`)] : []));
  }
}

export function progress(name) {
  return [h("progress", { max: 1, "aria-label": `Progress of ${name}` }), h("span", { class: "muted progress-what" })];
}

export function setProgress(root, share, what) {
  const bar = root.querySelector("progress");
  bar.value = share;
  root.querySelector(".progress-what").textContent = `${Math.floor(share * 100)} %, ${what.charAt(0).toLowerCase()}${what.slice(1)}`;
}

function card(model, view) {
  const isLoaded = model.name === view.loaded?.name;
  const { fit } = model;
  const canLoad = model.runnable && !fit?.reason;
  const reason = model.reason ?? fit?.reason;
  return h(
    "li",
    { class: `card model-card${canLoad ? "" : " is-unusable"}`, "data-model": model.name },
    h(
      "div",
      { class: "model-head" },
      h("h2", {}, model.name),
      isLoaded ? h("span", { class: "model-badge" }, view.loaded.is_resting ? "Resting" : "Loaded") : null,
    ),
    h("p", { class: "muted model-facts" }, ...facts(model).flatMap((fact, index) => [index ? " · " : "", h("span", {}, fact)])),
    reason ? h("p", { class: "model-reason" }, `${model.runnable ? "Does not fit" : "Cannot be run"}: ${ended(reason)}`) : null,
    canLoad && fit ? chats(fit) : null,
    canLoad && fit ? details(model) : null,
    canLoad ? h("div", { class: "model-actions" }, button(model, view, isLoaded)) : null,
  );
}

function button(model, view, isLoaded) {
  const { api } = page;
  const isBusy = view.loading !== null;
  const act = (path, body) => () => attempt(async () => show(await api.post(path, body)));
  const common = { type: "button", "data-key": `act:${model.name}`, disabled: isBusy };
  if (isLoaded && !view.loaded.is_resting) {
    return h("button", { ...common, class: "button", "aria-label": `Unload ${model.name}`, onclick: act("/api/models/unload") }, "Unload");
  }
  return h("button", { ...common, class: "button", "aria-label": `Load ${model.name}`, onclick: act("/api/models/load", { name: model.name }) }, "Load");
}

function facts(model) {
  const found = [];
  if (model.size_bytes) found.push(bytes(model.size_bytes));
  if (model.dtype) found.push(model.dtype);
  if (model.parameters) found.push(`${short(model.parameters)} parameters`);
  if (model.backend === "llamacpp" && model.runnable) found.push("computed by llama.cpp");
  if (model.is_by_transformers && model.runnable) found.push("by the code of transformers");
  if (model.context_tokens) found.push(`context ${count(model.context_tokens)}`);
  return found;
}

/** "3 chats of 4k tokens on the GPU alone, 40 with main memory", and the same as a bar. */
function chats(fit) {
  const length = fit.chat_tokens === 4096 ? "4k" : count(fit.chat_tokens);
  const most = (number) => (number >= fit.most_chats ? `${number} or more` : count(number));
  const gpu = fit.gpu_chats;
  const noun = gpu === 1 ? "chat" : "chats";
  const place = fit.is_imitated ? "in the imitated GPU-cache" : "on the GPU alone";
  const both = fit.is_imitated ? "with the CPU-cache" : "with main memory";
  const sentence =
    fit.chats > gpu
      ? [h("strong", {}, `${most(gpu)} ${noun}`), ` of ${length} tokens ${place}, `, h("strong", {}, most(fit.chats)), ` ${both}`]
      : [h("strong", {}, `${most(gpu)} ${noun}`), ` of ${length} tokens at once`];
  const share = fit.chats ? gpu / fit.chats : 0;
  const bar = h("span", { class: "model-bar", "aria-hidden": "true" }, h("span", { class: "is-gpu" }), h("span", { class: "is-cpu" }));
  [share, 1 - share].forEach((part, index) => {
    bar.children[index].style.flexGrow = String(part);
    bar.children[index].hidden = part === 0;
  });
  return h("div", { class: "model-chats" }, h("p", {}, ...sentence), bar);
}

function details({ fit }) {
  const elsewhere = fit.host_weights_bytes
    ? `, ${bytes(fit.host_weights_bytes)} of it in main memory: CPU and GPU compute it together`
    : "";
  const rows = [
    ["Weights", `${bytes(fit.weights_bytes)}, ${fit.weights_become}${elsewhere}`],
    ["KV cache", `${bytes(fit.kv_bytes_per_1000_tokens)} per 1,000 tokens`],
  ];
  if (fit.speed) {
    const { one_chat_tokens_per_s: one, best_chats: best, best_tokens_per_s: all, best_ms_per_token: wait } = fit.speed;
    rows.push(["One chat", `about ${rounded(one)} tokens per second (predicted)`]);
    if (best > 1) rows.push([`${best} chats`, `about ${rounded(all)} together, ${rounded(wait)} ms per token for each`]);
  } else {
    rows.push(["Speed", `not known: ${fit.speed_reason}`]);
  }
  return h("dl", { class: "model-figures" }, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function note(fits) {
  const speed = fits.find((fit) => fit.speed)?.speed;
  return [
    fits.some((fit) => fit.is_imitated) ? "There is no GPU here: its cache is imitated in main memory." : "",
    speed ? `Speeds are ${speed.assumption.split(";")[0]}, for chats half as long as counted.` : "",
  ].join(" ");
}

function makePull(api) {
  const input = h("input", { class: "field", id: "pull-name", placeholder: "Qwen/Qwen3-0.6B", autocomplete: "off", spellcheck: "false" });
  const start = h("button", { class: "button", type: "submit" }, "Download");
  const state = h("div", { class: "pull-state", role: "status" });
  const form = h("form", { class: "pull-form" }, input, start);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const name = input.value.trim();
    if (name) attempt(() => api.post("/api/models/pull", { name })); // events tell what becomes of it
    else input.focus();
  });
  const stop = h("button", { class: "button", type: "button", onclick: () => attempt(() => api.post("/api/models/pull/stop")) }, "Stop");
  const bar = h("div", { class: "models-loading" }, h("strong"), ...progress("the download"), stop);
  const root = h(
    "section",
    { class: "card models-pull", hidden: true, "aria-labelledby": "pull-title" },
    h("h2", { id: "pull-title" }, "Get another model"),
    h("label", { class: "muted", for: "pull-name" }, "Its name on huggingface.co, as ORGANISATION/NAME; of GGUF files, :QUANTISATION may follow. No code is downloaded."),
    form,
    state,
  );
  return {
    root,
    show(view) {
      root.hidden = !view.can_pull;
      start.disabled = view.pulling !== null;
      if (view.pulling) {
        bar.querySelector("strong").textContent = view.pulling.name;
        setProgress(bar, view.pulling.share, view.pulling.what);
        if (state.firstChild !== bar) state.replaceChildren(bar);
      } else {
        state.replaceChildren(...(view.pull_error ? [h("p", { class: "error", role: "alert" }, ended(capital(view.pull_error)))] : []));
      }
    },
  };
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const ended = (text) => (/[.!?…)]$/.test(text) ? text : `${text}.`);
export const bytes = (number) => (number >= 1e9 ? `${(number / 1e9).toFixed(1)} GB` : number >= 1e6 ? `${Math.round(number / 1e6)} MB` : `${Math.max(1, Math.round(number / 1e3))} kB`);
const short = (number) => (number >= 1e9 ? `${(number / 1e9).toFixed(1)} billion` : number >= 1e6 ? `${Math.round(number / 1e6)} million` : count(number));

/** Two figures: a prediction has no more. */
function rounded(number) {
  return number < 10 ? number.toPrecision(2) : Number(number.toPrecision(2)).toLocaleString("en-US");
}
