// The sidebar: tabs, the list of chats with search, and what concerns the whole page.

import { attempt, notify, openMenu } from "./notice.js";
import { download, h, icon, iconButton, local } from "./dom.js";
import { showShortcuts } from "./help.js";

const TABS = [
  ["engine", "Engine"],
  ["models", "Models"],
  ["self-test", "Self-test"],
];
const SEARCH_AFTER_MS = 200;

let api;
let list;
let search;
let chats = [];
let found = null; // what a search gave; null: nothing is searched for
let place = { tab: "chat", rest: "" };
let renaming = null; // id of the chat whose title is being changed

export function mountSidebar(container, given) {
  api = given;
  search = h("input", {
    class: "field",
    type: "search",
    placeholder: "Search chats",
    "aria-label": "Search chats",
    oninput: () => schedule(),
    onkeydown: (event) => {
      if (event.key === "Escape" && search.value) {
        search.value = "";
        runSearch();
        event.preventDefault();
      } else if (event.key === "ArrowDown" || event.key === "Enter") {
        list.querySelector("a")?.[event.key === "Enter" ? "click" : "focus"]();
        event.preventDefault();
      }
    },
  });
  const notice = h("p", { class: "side-notice", role: "status", hidden: true });
  list = h("ul", { id: "chats", "aria-label": "Chats", onkeydown: walk });
  container.append(
    h(
      "div",
      { class: "side-head" },
      h("a", { class: "brand", href: "#/chat" }, h("img", { src: "/static/icon.svg", alt: "", width: 26, height: 26 }), "neo-desktop"),
      h("button", { class: "button primary", type: "button", id: "new-chat", onclick: startChat }, icon("plus"), "New chat"),
      h(
        "nav",
        { "aria-label": "Tabs" },
        TABS.map(([name, label]) =>
          h("a", { href: `#/${name}`, "data-tab": name }, icon(name.replace("-", "")), label),
        ),
      ),
      search,
    ),
    h("div", { class: "side-list" }, list),
    notice,
    h(
      "div",
      { class: "side-foot" },
      themeButton(),
      iconButton("more", "All chats", (event) => openMenu(event.currentTarget, wholeMenu()), { "aria-haspopup": "menu" }),
      iconButton("help", "Keys", showShortcuts),
    ),
  );
  api.on("chats", (data) => {
    chats = data.chats;
    notice.textContent = data.notice ?? ""; // trouble with the file that chats are kept in
    notice.hidden = !data.notice;
    if (found === null) draw();
    else runSearch();
  });
}

/** Mark where the user is. */
export function showPlace(tab, rest) {
  place = { tab, rest };
  for (const link of document.querySelectorAll("#sidebar nav a")) {
    if (link.dataset.tab === tab) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  draw();
}

export function focusSearch() {
  search.focus();
  search.select();
}

/** The chat `step` places below the open one. */
export function neighbourChat(step) {
  const at = chats.findIndex((chat) => chat.id === place.rest);
  return chats[at < 0 ? 0 : Math.min(Math.max(at + step, 0), chats.length - 1)]?.id;
}

export const titleOf = (id) => chats.find((chat) => chat.id === id)?.title;

function startChat() {
  location.hash = "#/chat";
  document.body.classList.remove("drawer-open");
  document.getElementById("box")?.focus();
}

let timer = null;
function schedule() {
  clearTimeout(timer);
  timer = setTimeout(runSearch, SEARCH_AFTER_MS);
}

async function runSearch() {
  const query = search.value.trim();
  if (!query) found = null;
  else {
    const answer = await attempt(() => api.get(`/api/chats?query=${encodeURIComponent(query)}`));
    if (search.value.trim() !== query) return; // typed on meanwhile
    found = answer?.chats ?? [];
  }
  draw();
}

function draw() {
  if (renaming !== null) return;
  const control = list.contains(document.activeElement) ? document.activeElement : null;
  const shown = found ?? chats;
  const rows = [];
  let day = null;
  for (const chat of shown) {
    const next = found ? null : dayOf(chat.updated_s);
    if (next !== day) rows.push(h("li", { class: "day", role: "presentation" }, (day = next)));
    rows.push(row(chat));
  }
  if (found && shown.length === 0) rows.push(h("li", { class: "day" }, "Nothing found"));
  list.replaceChildren(...rows);
  if (control) focusRow(control.closest("li").dataset.id, control.localName);
}

function focusRow(id, control = "a") {
  list.querySelector(`li[data-id="${CSS.escape(id)}"] ${control}`)?.focus();
}

function row(chat) {
  const isOpen = place.tab === "chat" && place.rest === chat.id;
  const title = chat.title || "New chat";
  const link = h(
    "a",
    { href: `#/chat/${encodeURIComponent(chat.id)}`, "aria-current": isOpen ? "page" : null, title },
    h("span", { class: "title" }, title),
    chat.is_streaming && h("span", { class: "streaming", role: "img", "aria-label": "answering" }),
    found && chat.snippet && h("span", { class: "snippet" }, chat.snippet),
  );
  const more = iconButton("more", `More about ${title}`, (event) => openMenu(event.currentTarget, chatMenu(chat)), {
    "aria-haspopup": "menu",
  });
  return h("li", { "data-id": chat.id, class: isOpen ? "open" : null, ondblclick: () => rename(chat) }, link, more);
}

function chatMenu(chat) {
  const file = (format) => () => download(`/api/chats/${encodeURIComponent(chat.id)}/export?format=${format}`);
  return [
    { icon: "edit", label: "Rename", run: () => rename(chat) },
    { icon: "download", label: "Export as Markdown", run: file("markdown") },
    { icon: "download", label: "Export as JSON", run: file("json") },
    { icon: "trash", label: "Delete", run: () => remove(chat), danger: true },
  ];
}

function rename(chat) {
  const item = list.querySelector(`li[data-id="${CSS.escape(chat.id)}"]`);
  if (!item || renaming) return;
  renaming = chat.id;
  const end = (title, byKey) => {
    if (renaming !== chat.id) return;
    renaming = null;
    const isNew = title && title !== chat.title;
    if (isNew) chat.title = title; // shown at once; the server's list follows
    draw();
    if (byKey) focusRow(chat.id);
    if (isNew) attempt(() => api.patch(`/api/chats/${encodeURIComponent(chat.id)}`, { title }));
  };
  const field = h("input", {
    class: "field",
    "aria-label": "Title",
    maxlength: 200,
    onkeydown: (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter") end(field.value.trim(), true);
      else if (event.key === "Escape") {
        end(null, true);
        event.preventDefault();
      }
    },
    onblur: () => end(field.value.trim(), false),
  });
  field.value = chat.title;
  item.replaceChildren(field);
  field.focus();
  field.select();
}

async function remove(chat) {
  const path = `/api/chats/${encodeURIComponent(chat.id)}`;
  if ((await attempt(() => api.delete(path))) === undefined) return;
  const wasOpen = place.rest === chat.id;
  if (wasOpen) startChat();
  else document.getElementById("new-chat").focus();
  notify(`Deleted “${chat.title || "New chat"}”.`, {
    label: "Undo",
    run: async () => {
      const restored = await attempt(() => api.post(`${path}/restore`));
      if (restored && wasOpen) location.hash = `#/chat/${encodeURIComponent(chat.id)}`;
    },
  });
}

function walk(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.target.tagName !== "A" || event.altKey) return;
  const links = [...list.querySelectorAll("a")];
  const at = links.indexOf(event.target);
  if (step) links[Math.min(Math.max(at + step, 0), links.length - 1)].focus();
  else if (event.key === "F2") rename((found ?? chats).find((chat) => chat.id === event.target.closest("li").dataset.id));
  else if (event.key === "Delete") remove((found ?? chats).find((chat) => chat.id === event.target.closest("li").dataset.id));
  else return;
  event.preventDefault();
}

function wholeMenu() {
  return [
    { icon: "upload", label: "Import chats …", run: importChats },
    { icon: "download", label: "Export all chats", run: () => download("/api/export") },
  ];
}

function importChats() {
  const input = h("input", { type: "file", accept: ".json,application/json", hidden: true });
  input.addEventListener("change", () =>
    attempt(async () => {
      let data;
      try {
        data = JSON.parse(await input.files[0].text());
      } catch {
        throw new Error(`${input.files[0].name} is not a JSON file: choose one that was exported here.`);
      }
      const taken = (await api.post("/api/import", data)).chats.length;
      notify(`${taken} chat${taken === 1 ? "" : "s"} imported.`);
    }),
  );
  input.click();
}

const THEMES = { auto: "light", light: "dark", dark: "auto" };

function themeButton() {
  const button = iconButton("auto", "", () => apply(THEMES[local.get("theme") ?? "auto"]));
  const apply = (theme) => {
    local.set("theme", theme === "auto" ? null : theme);
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const label = `Theme: ${theme === "auto" ? "as the system" : theme}`;
    button.setAttribute("aria-label", label);
    button.title = label;
    button.replaceChildren(icon({ auto: "auto", light: "sun", dark: "moon" }[theme]));
  };
  apply(local.get("theme") in THEMES ? local.get("theme") : "auto");
  return button;
}

function dayOf(seconds) {
  const midnight = new Date();
  midnight.setHours(0, 0, 0, 0);
  const days = Math.ceil((midnight.getTime() / 1000 - seconds) / 86_400);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  return days <= 30 ? "Last 30 days" : "Older";
}
