// The first page's offer of a real model, where only the built-in one is there.

import { h } from "./dom.js";
import { bytes, capital, ended, progress, setProgress } from "./models.js";
import { attempt } from "./notice.js";

/** Keep an element up to date that fetches the model and loads it; empty where there is nothing to offer. */
export function makeOffer(api) {
  const element = h("section", { class: "offer", "aria-label": "A real model", hidden: true });
  let shown = "";
  const show = (view) => {
    const { offer, pulling, pull_error: trouble } = view;
    const isPulling = offer !== null && pulling?.name === offer.name;
    element.hidden = offer === null;
    const state = JSON.stringify([offer, isPulling, pulling === null, trouble]);
    if (offer !== null && state !== shown) {
      element.replaceChildren(...(isPulling ? arriving(offer) : offered(offer, pulling !== null, trouble)));
    }
    shown = state;
    if (isPulling) setProgress(element, pulling.share, pulling.what);
  };
  // What becomes of it events tell: a reply may be older than an event that came meanwhile.
  const start = (name) => attempt(() => api.post("/api/models/pull", { name, load: true }));
  const stop = () => attempt(() => api.post("/api/models/pull/stop"));

  const arriving = ({ name, title }) => [
    h("strong", {}, title),
    ...progress(name),
    h("button", { class: "button", type: "button", onclick: stop }, "Stop"),
  ];
  const offered = ({ name, title, size_bytes: size, licence }, isBusy, trouble) => [
    h("p", { class: "muted" }, "Only the small built-in guide is here. A real model answers more."),
    h("button", { class: "button", type: "button", disabled: isBusy, onclick: () => start(name) }, `Get ${title}`),
    h("p", { class: "muted" }, `${bytes(size)} to download, licence ${licence}. `, h("a", { href: "#/models" }, "Other models")),
    trouble ? h("p", { class: "error", role: "alert" }, ended(capital(trouble))) : "",
  ];
  return { element, end: api.on("models", show) };
}
