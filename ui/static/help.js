// The dialog that lists the keys.

import { h } from "./dom.js";

const isMac = navigator.platform.startsWith("Mac");
const COMMAND = isMac ? "⌘" : "Ctrl";

const KEYS = [
  ["Send the message", ["Enter"]],
  ["New line", ["Shift", "Enter"]],
  ["Stop the answer, close what is open", ["Esc"]],
  ["Edit your last message (in an empty box)", ["↑"]],
  ["New chat", [COMMAND, "Shift", "O"]],
  ["Search chats", [COMMAND, "K"]],
  ["Chat above, chat below", ["Alt", "↑ ↓"]],
  ["To the message box", ["/"]],
  ["Settings of this chat", [COMMAND, ","]],
  ["Show or hide the sidebar", [COMMAND, "B"]],
  ["This list", ["?"]],
];

export function showShortcuts() {
  const rows = KEYS.flatMap(([what, keys]) => [
    h("dt", {}, what),
    h("dd", {}, keys.flatMap((key, index) => (index ? [" ", h("kbd", {}, key)] : [h("kbd", {}, key)]))),
  ]);
  const dialog = h(
    "dialog",
    { "aria-labelledby": "keys-title", onclose: () => dialog.remove() },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", { class: "keys" }, rows),
    h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Close"),
  );
  document.body.append(dialog);
  dialog.showModal();
}
