// Building elements. Text is always text here: only `setHtml` takes markup, and it is for the server's rendered blocks.

const SVG = "http://www.w3.org/2000/svg";

/** h("button", {class: "x", type: "button", "aria-label": "Copy", onclick: copy}, "Copy"): an element. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Markup from the server's Markdown renderer, which has cleaned it. Nothing else may be given. */
export function setHtml(element, html) {
  element.innerHTML = html;
}

// Drawn on 20 × 20 with a line of 1.5.
const ICONS = {
  menu: "M3 5.5h14M3 10h14M3 14.5h14",
  plus: "M10 4v12M4 10h12",
  search: "M9 15A6 6 0 1 0 9 3a6 6 0 0 0 0 12zM13.5 13.5 17 17",
  chat: "M4 4h12a1 1 0 0 1 1 1v8a1 1 0 0 1-1 1H9l-4 3v-3H4a1 1 0 0 1-1-1V5a1 1 0 0 1 1-1z",
  engine: "M3 10h3l2-6 4 12 2-6h3",
  models: "M10 3l7 3.5-7 3.5-7-3.5zM3 10l7 3.5 7-3.5M3 13.5 10 17l7-3.5",
  selftest: "M4 11a6 6 0 0 1 12 0M10 11l3-3M2.5 15h15",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  attach: "M15.5 9.5 10 15a3.5 3.5 0 0 1-5-5l6-6a2.4 2.4 0 0 1 3.4 3.4l-6 6a1.2 1.2 0 0 1-1.7-1.7l5.3-5.3",
  file: "M5 3h7l3 3v11H5zM12 3v3h3M7.5 10h5M7.5 13h5",
  copy: "M7 7h9v10H7zM13 7V3H4v10h3",
  check: "M4 10.5l4 4 8-9",
  edit: "M4 16l.8-3.4L13 4.4l2.6 2.6-8.2 8.2zM11.5 6l2.6 2.6",
  retry: "M16 10a6 6 0 1 1-1.8-4.3M16.5 3v3.5H13",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  down: "M5 8l5 5 5-5",
  bottom: "M10 4v12M5 11l5 5 5-5",
  more: "M4.5 10h.01M10 10h.01M15.5 10h.01",
  settings: "M3 6h8M15 6h2M3 14h2M9 14h8M13 8a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM7 16a2 2 0 1 0 0-4 2 2 0 0 0 0 4z",
  alert: "M10 17.5a7.5 7.5 0 1 0 0-15 7.5 7.5 0 0 0 0 15zM10 6.5v4.5M10 13.7h.01",
  close: "M5 5l10 10M15 5 5 15",
  trash: "M4 6h12M8 6V4h4v2M6 6l.7 11h6.6L14 6",
  sun: "M10 13.5a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7zM10 2v2M10 16v2M2 10h2M16 10h2M4.3 4.3l1.4 1.4M14.3 14.3l1.4 1.4M4.3 15.7l1.4-1.4M14.3 5.7l1.4-1.4",
  moon: "M16.5 12A7 7 0 0 1 8 3.5a7 7 0 1 0 8.5 8.5z",
  auto: "M10 17a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM10 3v14M10 6h4M10 10h6.5M10 14h4",
  download: "M10 3v9M6 8.5l4 4 4-4M4 16h12",
  upload: "M10 13V4M6 7.5l4-4 4 4M4 16h12",
  help: "M7.5 7.5a2.5 2.5 0 1 1 3.5 2.3c-.7.3-1 .8-1 1.700M10 14.5h.01",
};

/** An icon by its name; hidden from screen readers, so what holds it needs a name of its own. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", `icon icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows an icon only; `label` is its name and its tooltip. */
export function iconButton(name, label, onclick, properties = {}) {
  return h(
    "button",
    { class: "icon-button", type: "button", "aria-label": label, title: label, onclick, ...properties },
    icon(name),
  );
}

/** Text and value that stay in this browser; a browser that keeps nothing just forgets. */
export const local = {
  get(key) {
    try {
      return localStorage.getItem(key);
    } catch {
      return null;
    }
  },
  set(key, value) {
    try {
      if (value === null || value === "") localStorage.removeItem(key);
      else localStorage.setItem(key, value);
    } catch {
      // Full or switched off.
    }
  },
};

/** Let the browser save what the server sends at a path. */
export function download(path) {
  h("a", { href: path, download: "" }).click();
}

/** 1234.5 → "1,234.5" */
export const count = (number) => number.toLocaleString("en-US");
