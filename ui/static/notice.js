// Short notices at the bottom, menus beside the button that opens them.

import { h, icon } from "./dom.js";

const SHOWN_MS = 10_000;

/** Show a line for some seconds; with `action`, a button that takes back what was done. */
export function notify(text, action = null) {
  const toast = h("div", { class: "toast" }, h("span", {}, text));
  const close = () => toast.remove();
  if (action) {
    toast.append(h("button", { type: "button", onclick: () => (close(), action.run()) }, action.label));
  }
  document.getElementById("toasts").append(toast);
  let timer = setTimeout(close, SHOWN_MS);
  // It stays while somebody reads it or is about to press its button.
  for (const start of ["pointerenter", "focusin"]) toast.addEventListener(start, () => clearTimeout(timer));
  for (const end of ["pointerleave", "focusout"]) {
    toast.addEventListener(end, () => (clearTimeout(timer), (timer = setTimeout(close, SHOWN_MS / 2))));
  }
}

/** Run something that asks the server; what goes wrong is shown. */
export async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    notify(error.message);
    return undefined;
  }
}

/** Open a menu at a button. entries: [{icon, label, run, danger}]. */
export function openMenu(button, entries) {
  const items = entries.map((entry) =>
    h(
      "button",
      { type: "button", role: "menuitem", class: entry.danger ? "danger" : null, onclick: () => (close(), entry.run()) },
      icon(entry.icon),
      entry.label,
    ),
  );
  const menu = h("div", { class: "menu", role: "menu", popover: "auto" }, items);
  const close = () => menu.hidePopover();
  menu.addEventListener("toggle", (event) => {
    if (event.newState !== "closed") return;
    button.setAttribute("aria-expanded", "false");
    if (menu.contains(document.activeElement)) button.focus();
    menu.remove();
  });
  menu.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = items.indexOf(document.activeElement);
    items[(at + step + items.length) % items.length].focus();
  });
  document.body.append(menu);
  menu.showPopover();
  button.setAttribute("aria-expanded", "true");
  const place = button.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = menu;
  const left = Math.min(place.left, innerWidth - width - 8);
  const below = place.bottom + 4;
  menu.style.left = `${Math.max(8, left)}px`;
  menu.style.top = `${below + height > innerHeight ? Math.max(8, place.top - height - 4) : below}px`;
  items[0].focus();
}
