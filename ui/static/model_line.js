// The header's line: which model answers, how much it can read, and whether it is there.

import { count, h } from "./dom.js";

/** Keep the line up to date: asked again whenever the connection is back or the models change. */
export function startModelLine(line, api) {
  const show = (state, name, rest, why = "") => {
    line.dataset.state = state;
    line.replaceChildren(h("span", { class: "dot" }), h("strong", {}, name), h("span", { class: "rest" }, rest));
    line.title = why ? `${name}${rest} ${why}` : `${name}${rest}`;
  };
  let loading = null;
  const refresh = async () => {
    if (loading) return show("loading", loading.reason ? "Starting again:" : "Loading", ` ${loading.name} …`, loading.reason);
    try {
      const health = await api.get("/health").catch((error) => {
        // A server that loads or stops says so with status 503.
        if (error.data === null) throw error;
        return error.data;
      });
      if (loading) return refresh(); // it began meanwhile
      if (health.status === "ok") {
        const listed = (await api.get("/v1/models")).data;
        const model = listed.find((each) => each.id === health.model) ?? listed[0];
        const context = model?.max_model_len;
        const by = health.backend === "llamacpp" ? " · by llama.cpp" : "";
        show("ready", health.model, `${context ? ` · ${count(context)} tokens of context` : ""}${by}`, by && health.note);
      } else if (health.status === "restarting") show("loading", "The engine is started again …", "", health.reason);
      else if (health.status === "loading") show("loading", "Loading a model …", "");
      else if (health.status === "no model") show("none", "No model loaded", " · choose one");
      else show("failed", "The model does not answer", "", health.reason);
    } catch {
      show("none", "No server", "");
    }
  };
  api.on("connected", refresh);
  api.on("models", (view) => {
    loading = view.loading;
    refresh();
  });
}
