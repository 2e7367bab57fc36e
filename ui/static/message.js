// One message: what was said, what is told about it, what can be done with it.

import { sentence } from "./api.js";
import { count, h, icon, iconButton, setHtml } from "./dom.js";
import { isBusy } from "./tree.js";

/**
 * The view of a node. `actions`: retry(node), edit(node, text), goOn(node), walk(node, step).
 */
export class MessageView {
  constructor(node, actions) {
    this.actions = actions;
    this.isAnswer = node.role === "assistant";
    this.body = h("div", { class: this.isAnswer ? "answer" : "question" });
    this.foot = h("div", { class: "message-foot" });
    this.element = h(
      "article",
      {
        class: `message ${node.role}`,
        "data-testid": this.isAnswer ? "bot" : "user",
        "data-id": node.id,
        "aria-label": this.isAnswer ? "Answer" : "You",
      },
      this.body,
      this.foot,
    );
    if (this.isAnswer) {
      this.thought = new Thought();
      this.text = h("div", { class: "markdown" });
      this.note = h("div", { class: "note" });
      this.body.append(this.thought.element, this.text, this.note);
    }
  }

  /** Show a node as it is now; `place` is {index, of} among its variants. */
  update(node, place) {
    this.node = node;
    this.place = place;
    if (this.isEditing) return;
    if (this.isAnswer) {
      setBlocks(this.text, 0, node.blocks);
      this.thought.update(node);
      this.#drawState();
    } else {
      this.body.replaceChildren(
        ...files(node),
        h("div", { class: "bubble" }, node.text),
      );
    }
    this.#drawFoot();
  }

  /** Draw what a delta changed; the node has it already. */
  apply(delta, wasState) {
    const { node } = this;
    setBlocks(this.text, delta.blocks_from, delta.blocks);
    this.thought.update(node, delta.thought_blocks_from);
    if (wasState !== node.state || this.element.dataset.shown !== "text") this.#drawState();
    if (wasState !== node.state) this.#drawFoot();
  }

  #drawState() {
    const { node } = this;
    const hasText = node.blocks.length > 0;
    this.element.dataset.state = node.state;
    this.element.dataset.shown = hasText ? "text" : "nothing";
    this.element.setAttribute("aria-busy", String(isBusy(node)));
    const parts = [];
    if (isBusy(node) && !hasText && !node.thought_blocks?.length) {
      parts.push(h("p", { class: "waiting" }, "waiting for the first token"));
    }
    if (node.state === "failed") {
      parts.push(h("p", { class: "failure", role: "alert" }, icon("alert"), h("span", {}, sentence(node.error || "the answer failed"))));
    }
    const line = isBusy(node) ? "" : figures(node);
    if (line) parts.push(h("p", { class: "figures" }, line));
    this.note.replaceChildren(...parts);
  }

  #drawFoot() {
    const { node, place } = this;
    const parts = [];
    if (!isBusy(node)) {
      parts.push(iconButton("copy", "Copy message", (event) => copy(event.currentTarget, node.text)));
      if (this.isAnswer) {
        parts.push(iconButton("retry", "Retry", () => this.actions.retry(node)));
        const isUnfinished = ["stopped", "cut"].includes(node.state) || node.figures?.finish_reason === "length";
        if (isUnfinished && (node.text || node.thought)) {
          parts.push(
            h("button", { class: "button quiet go-on", type: "button", onclick: () => this.actions.goOn(node) }, "Continue"),
          );
        }
      } else parts.push(iconButton("edit", "Edit", () => this.edit()));
    }
    if (place.of > 1) {
      parts.push(
        h(
          "span",
          { class: "variants", role: "group", "aria-label": "Variants" },
          iconButton("left", "Previous variant", () => this.actions.walk(node, -1), { disabled: place.index === 0 }),
          h("span", {}, `${place.index + 1}/${place.of}`),
          iconButton("right", "Next variant", () => this.actions.walk(node, 1), { disabled: place.index === place.of - 1 }),
        ),
      );
    }
    // Who walks by keyboard stays on the button.
    const label = this.foot.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.foot.replaceChildren(...parts);
    if (label) this.foot.querySelector(`[aria-label="${CSS.escape(label)}"]:enabled`)?.focus();
  }

  /** Let the user change the question; sent, it becomes a branch of its own. */
  edit() {
    const { node } = this;
    const end = () => {
      this.isEditing = false;
      this.element.classList.remove("editing");
      this.update(this.node, this.place);
    };
    const submit = async () => {
      if (!field.value.trim() || field.disabled) return;
      field.disabled = true;
      const isSent = await this.actions.edit(node, field.value);
      field.disabled = false;
      if (isSent) end();
    };
    const field = h("textarea", {
      class: "field",
      rows: 1,
      "aria-label": "Edit your question",
      oninput: () => grow(field),
      onkeydown: (event) => {
        if (event.isComposing) return;
        if (event.key === "Enter" && !event.shiftKey) {
          event.preventDefault();
          submit();
        } else if (event.key === "Escape") {
          event.preventDefault();
          end();
          this.foot.querySelector("[aria-label=Edit]")?.focus();
        }
      },
    });
    field.value = node.text;
    this.isEditing = true;
    this.element.classList.add("editing");
    this.body.replaceChildren(...files(node), field);
    this.foot.replaceChildren(
      h("button", { class: "button", type: "button", onclick: end }, "Cancel"),
      h("button", { class: "button primary", type: "button", onclick: submit }, "Submit"),
    );
    grow(field);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

/** What a thinking model thought, folded under how long it took. */
class Thought {
  constructor() {
    this.label = h("span", {});
    this.blocks = h("div", { class: "markdown" });
    this.element = h("details", { class: "thought", hidden: true }, h("summary", {}, icon("right"), this.label), this.blocks);
  }

  update(node, from = 0) {
    const blocks = node.thought_blocks ?? [];
    this.element.hidden = blocks.length === 0;
    setBlocks(this.blocks, from, blocks.slice(from));
    const isThinking = isBusy(node) && node.thought_s === null && node.blocks.length === 0;
    this.element.classList.toggle("thinking", isThinking);
    if (!this.element.hidden) this.label.textContent = isThinking ? "Thinking …" : node.thought_s === null ? "Thought" : `Thought for ${duration(node.thought_s)}`;
  }
}

function setBlocks(container, from, blocks) {
  while (container.children.length > from) container.lastElementChild.remove();
  for (const html of blocks) {
    const block = h("div", { class: "block" });
    setHtml(block, html);
    for (const code of block.querySelectorAll("pre")) addCodeHead(code);
    container.append(block);
  }
}

function addCodeHead(pre) {
  const button = h("button", { type: "button", "aria-label": "Copy code" }, icon("copy"), h("span", {}, "Copy"));
  button.addEventListener("click", () => copy(button, pre.textContent));
  const frame = h("div", { class: "code-frame" });
  pre.replaceWith(frame);
  pre.tabIndex = 0; // it scrolls, also by keyboard
  frame.append(h("div", { class: "code-head" }, h("span", {}, pre.dataset.language ?? ""), button), pre);
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS and not on this computer, browsers have no clipboard for pages: the old way.
    const area = h("textarea", { class: "visually-hidden", readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.getAttribute("aria-label");
  if (label === "Copied") return; // shown already, from the click before
  const shown = button.querySelector(".icon");
  const done = icon("check");
  shown.replaceWith(done);
  button.setAttribute("aria-label", "Copied");
  setTimeout(() => {
    done.replaceWith(shown);
    button.setAttribute("aria-label", label);
  }, 1500);
}

const duration = (seconds) =>
  seconds < 60 ? `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;

/** One line under an answer: time to first token, speed, length, and why it ended if cut. */
export function figures(node) {
  const parts = [];
  const { first_token_s, tokens_per_s, output_tokens, finish_reason } = node.figures ?? {};
  if (node.state === "stopped") parts.push(node.text || node.thought ? "stopped" : "stopped before the first token");
  if (node.state === "cut") parts.push("cut off when the server ended");
  if (first_token_s != null) parts.push(`first token after ${first_token_s.toFixed(2)} s`);
  if (tokens_per_s != null) parts.push(`${tokens_per_s.toFixed(1)} tokens/s`);
  if (output_tokens) parts.push(`${count(output_tokens)} token${output_tokens === 1 ? "" : "s"}`);
  if (node.state === "done" && finish_reason === "length") parts.push("cut at the token limit");
  else if (node.state === "done" && !node.text) parts.push("no text");
  return parts.join(" · ");
}

const files = ({ attachments }) =>
  attachments?.length ? [h("div", { class: "files" }, attachments.map((file) => chip(file)))] : [];

/** A file that goes with a question. */
export function chip(file, ...more) {
  const size = file.num_chars === undefined ? "" : `${count(file.num_chars)} characters`;
  return h("span", { class: "chip" }, icon("file"), h("span", { class: "name", title: file.name }, file.name), h("span", { class: "muted" }, size), ...more);
}

/** Make a text box as high as its text, up to what its style allows. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
