// How much of the context a chat has used: a ring with figures beside it.

import { count, h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const RADIUS = 7;
const LENGTH = 2 * Math.PI * RADIUS;

export class Gauge {
  constructor() {
    const ring = document.createElementNS(SVG, "svg");
    ring.setAttribute("viewBox", "0 0 18 18");
    ring.setAttribute("aria-hidden", "true");
    const circles = ["track", "fill"].map((name) => {
      const circle = document.createElementNS(SVG, "circle");
      for (const [key, value] of Object.entries({ class: name, cx: 9, cy: 9, r: RADIUS })) circle.setAttribute(key, value);
      return circle;
    });
    ring.append(...circles);
    this.fill = circles[1];
    this.text = h("span", { class: "gauge-text" });
    this.element = h("div", { class: "gauge", role: "meter", "aria-label": "Context used", "aria-valuemin": 0, hidden: true }, ring, this.text);
  }

  /** context: {used_tokens, max_tokens} or null. */
  show(context) {
    this.element.hidden = !context?.max_tokens;
    if (this.element.hidden) return;
    const { used_tokens: used, max_tokens: most } = context;
    const share = Math.min(used / most, 1);
    this.fill.setAttribute("stroke-dasharray", `${share * LENGTH} ${LENGTH}`);
    this.element.dataset.level = share > 0.9 ? "high" : "normal";
    this.text.textContent = `${count(used)} / ${count(most)}`;
    this.element.title = `${count(used)} of ${count(most)} tokens of context used`;
    this.element.setAttribute("aria-valuenow", used);
    this.element.setAttribute("aria-valuemax", most);
    this.element.setAttribute("aria-valuetext", this.element.title);
  }
}
