// The box that messages are written in: draft, files, send and stop.

import { h, icon, iconButton, local } from "./dom.js";
import { chip, grow } from "./message.js";
import { attempt, notify } from "./notice.js";

const LONG_PASTE_CHARS = 6000; // longer ones become a file beside the message

/** callbacks: send(text, attachments) → true when the server has it, stop(), editLast(). */
export class Composer {
  #api;
  #callbacks;
  #key = "new"; // whose draft this is
  #attachments = [];
  #uploads = 0;
  #isBusy = false;
  #isSending = false;

  constructor(api, callbacks) {
    this.#api = api;
    this.#callbacks = callbacks;
    this.box = h("textarea", {
      id: "box",
      rows: 1,
      placeholder: "Message",
      "aria-label": "Message",
      autocomplete: "off",
      oninput: () => (this.#save(), this.#draw()),
      onkeydown: (event) => this.#keyDown(event),
      onpaste: (event) => this.#paste(event),
    });
    this.chips = h("div", { class: "chips" });
    this.problem = h("p", { class: "composer-problem", role: "alert", hidden: true });
    const picker = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files", onchange: () => this.#pick(picker) });
    this.sendButton = h("button", { class: "send", type: "button", "aria-label": "Send", title: "Send", onclick: () => this.send() }, icon("send"));
    this.stopButton = h(
      "button",
      { class: "send stop", type: "button", "aria-label": "Stop", title: "Stop (Esc)", hidden: true, onclick: () => callbacks.stop() },
      icon("stop"),
    );
    this.element = h(
      "div",
      { class: "composer" },
      this.problem,
      h(
        "div",
        { class: "composer-frame" },
        this.chips,
        h(
          "div",
          { class: "composer-row" },
          iconButton("attach", "Attach files", () => picker.click()),
          picker,
          this.box,
          this.sendButton,
          this.stopButton,
        ),
      ),
    );
  }

  /** Take the draft of a chat (null: of the chat that is not there yet). */
  open(chatId) {
    this.#key = chatId ?? "new";
    this.tell(null);
    let draft = {};
    try {
      draft = JSON.parse(local.get(`draft:${this.#key}`)) ?? {};
    } catch {
      // Not ours.
    }
    this.box.value = draft.text ?? "";
    this.#attachments = draft.attachments ?? [];
    this.#draw();
  }

  /** The chat that was new is there now, under this id: its draft goes on. */
  moveTo(chatId) {
    local.set("draft:new", null);
    this.#key = chatId;
    this.#save();
  }

  setBusy(isBusy) {
    if (isBusy === this.#isBusy) return;
    const hadFocus = [this.sendButton, this.stopButton].includes(document.activeElement);
    this.#isBusy = isBusy;
    this.#draw();
    if (hadFocus) this.box.focus();
  }

  setText(text) {
    this.box.value = text;
    this.#save();
    this.#draw();
    this.box.focus();
  }

  /** Say what is wrong above the box; null: nothing any more. */
  tell(text) {
    this.problem.hidden = text === null;
    this.problem.textContent = text ?? "";
  }

  async send() {
    const text = this.box.value;
    if (this.#isBusy || this.#isSending || this.#uploads || !(text.trim() || this.#attachments.length)) return;
    this.#isSending = true;
    this.tell(null);
    const files = this.#attachments;
    const key = this.#key;
    const isTaken = await this.#callbacks.send(text, files);
    this.#isSending = false;
    if (!isTaken) return;
    local.set(`draft:${key}`, null);
    if (this.#attachments !== files) return; // another chat was opened meanwhile
    this.#attachments = [];
    if (this.box.value === text) this.box.value = "";
    this.#save();
    this.#draw();
  }

  async addFile(file, name = file.name) {
    this.#uploads += 1;
    this.#draw();
    const key = this.#key;
    const taken = await attempt(() => this.#api.post(`/api/attachments?name=${encodeURIComponent(name)}`, file));
    this.#uploads -= 1;
    if (taken && key === this.#key) {
      this.#attachments.push(taken);
      this.#save();
    }
    this.#draw();
    this.box.focus();
  }

  #pick(picker) {
    for (const file of picker.files) this.addFile(file);
    picker.value = "";
  }

  #paste(event) {
    const files = [...event.clipboardData.files];
    const text = event.clipboardData.getData("text/plain");
    if (files.length && !text) {
      event.preventDefault();
      for (const file of files) this.addFile(file);
    } else if (text.length > LONG_PASTE_CHARS) {
      event.preventDefault();
      this.addFile(new Blob([text]), "Pasted text.txt");
      notify("The long text goes with your message as a file.", {
        label: "As text instead",
        run: () => {
          this.#remove(this.#attachments.findLast((file) => file.name === "Pasted text.txt"));
          this.setText(this.box.value + text);
        },
      });
    }
  }

  #remove(file) {
    this.#attachments = this.#attachments.filter((other) => other !== file);
    this.#save();
    this.#draw();
    this.box.focus();
  }

  #keyDown(event) {
    // A phone's keyboard has no Shift+Enter worth the name: there Enter is a new line.
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
    if (sends) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !this.box.value && !event.altKey) {
      event.preventDefault();
      this.#callbacks.editLast();
    }
  }

  #save() {
    const isEmpty = !this.box.value && !this.#attachments.length;
    const draft = isEmpty ? null : JSON.stringify({ text: this.box.value, attachments: this.#attachments });
    local.set(`draft:${this.#key}`, draft);
  }

  #draw() {
    grow(this.box);
    this.stopButton.hidden = !this.#isBusy;
    this.sendButton.hidden = this.#isBusy;
    this.sendButton.disabled = this.#uploads > 0 || !(this.box.value.trim() || this.#attachments.length);
    const chips = this.#attachments.map((file) =>
      chip(file, iconButton("close", `Remove ${file.name}`, () => this.#remove(file))),
    );
    if (this.#uploads) chips.push(h("span", { class: "chip muted", role: "status" }, "Reading …"));
    this.chips.replaceChildren(...chips);
    this.chips.hidden = chips.length === 0;
  }
}
