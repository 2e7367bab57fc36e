// The page's start: shell, router by the address's hash, and what stays while tabs change.

import { api } from "./api.js";
import * as chat from "./chat.js";
import { h, icon, local } from "./dom.js";
import * as engine from "./engine.js";
import { showShortcuts } from "./help.js";
import { startModelLine } from "./model_line.js";
import * as models from "./models.js";
import * as selftest from "./selftest.js";
import { focusSearch, mountSidebar, neighbourChat, showPlace } from "./sidebar.js";

// A tab: mount(container, api) fills the empty container, unmount() ends what it started (what api.on returned, timers).
// show(rest) is called with what follows in the hash, also when that changes while the tab is open.
const TABS = { chat, engine, models, "self-test": selftest };

const container = document.getElementById("tab");
let current = null;

function route() {
  const [, name = "", ...rest] = location.hash.split("/");
  const tab = TABS[name] ?? chat;
  closeDrawer();
  showPlace(name in TABS ? name : "chat", rest.join("/"));
  if (tab !== current) {
    current?.unmount();
    container.replaceChildren();
    document.getElementById("actions").replaceChildren();
    document.title = "neo-desktop";
    api.watch({ chat: null, engine: tab === engine });
    current = tab;
    tab.mount(container, api);
  }
  tab.show?.(rest.join("/"));
}

const isNarrow = () => matchMedia("(width < 860px)").matches;

function closeDrawer() {
  document.body.classList.remove("drawer-open");
}

function toggleSidebar() {
  const { classList } = document.body;
  if (isNarrow()) {
    if (classList.toggle("drawer-open")) document.querySelector("#sidebar button, #sidebar a").focus();
  } else {
    local.set("sidebar", classList.toggle("sidebar-hidden") ? "hidden" : null);
  }
}

function startShell() {
  const menu = document.getElementById("menu");
  menu.append(icon("menu"));
  menu.title = "Toggle sidebar";
  menu.addEventListener("click", toggleSidebar);
  document.getElementById("backdrop").addEventListener("click", closeDrawer);
  if (local.get("sidebar") === "hidden") document.body.classList.add("sidebar-hidden");

  const connection = document.getElementById("connection");
  let timer = null;
  api.on("disconnected", () => {
    // A server that is back at once need not be told of.
    timer ??= setTimeout(() => {
      connection.textContent = "No connection to the server. Is it running? This page goes on as soon as it answers.";
      connection.hidden = false;
    }, 700);
  });
  api.on("connected", () => {
    clearTimeout(timer);
    timer = null;
    connection.hidden = true;
  });

  // A GPU that cannot be used: told until somebody has read it, and again when it is another reason.
  const trouble = document.getElementById("trouble");
  api.on("computer", (data) => {
    const read = () => (local.set("trouble-read", data.trouble), (trouble.hidden = true));
    trouble.replaceChildren(data.trouble, " ", h("button", { class: "button", type: "button", onclick: read }, "Dismiss"));
    trouble.hidden = data.trouble === local.get("trouble-read");
  });
}

const isTyping = (target) => target.closest("input, textarea, select, [contenteditable]") !== null;

function shortcut(event) {
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open], :popover-open")) return;
  if (key === "escape") {
    if (document.body.classList.contains("drawer-open")) closeDrawer();
    else current.escape?.();
  } else if (command && key === "k") {
    if (isNarrow()) document.body.classList.add("drawer-open");
    document.body.classList.remove("sidebar-hidden");
    focusSearch();
  } else if (command && event.shiftKey && key === "o") {
    location.hash = "#/chat";
    chat.focusBox();
  } else if (command && key === "b" && !event.shiftKey) toggleSidebar();
  else if (command && key === ",") chat.toggleSettings();
  else if (event.altKey && !command && (key === "arrowup" || key === "arrowdown")) {
    const id = neighbourChat(key === "arrowup" ? -1 : 1);
    if (id) location.hash = `#/chat/${id}`;
  } else if (key === "?" && !isTyping(event.target)) showShortcuts();
  else if (key === "/" && !command && !isTyping(event.target)) chat.focusBox();
  else return;
  event.preventDefault();
}

startShell();
mountSidebar(document.getElementById("sidebar"), api);
startModelLine(document.getElementById("model"), api);
window.addEventListener("hashchange", route);
document.addEventListener("keydown", shortcut);
route();
