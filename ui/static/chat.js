// The Chat tab: which chat is open, its messages, what the user does and what the server tells.

import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { h, iconButton } from "./dom.js";
import { mountDrop } from "./drop.js";
import { Gauge } from "./gauge.js";
import { MessageView } from "./message.js";
import { attempt } from "./notice.js";
import { makeOffer } from "./offer.js";
import { Follower } from "./scroll.js";
import { SettingsPanel } from "./settings.js";
import { titleOf } from "./sidebar.js";
import { isBusy, newestLeaf, variantsOf } from "./tree.js";

let tab = null;

export function mount(container, api) {
  tab = new ChatTab(container, api);
}
export function unmount() {
  tab.close();
  tab = null;
}
export const show = (id) => tab.open(id ? decodeURIComponent(id) : null);
export const escape = () => tab.escape();
export const focusBox = () => tab?.composer.box.focus();
export const toggleSettings = () => tab?.toggleSettings();

class ChatTab {
  constructor(container, api) {
    this.api = api;
    this.chat = null; // Conversation
    this.views = new Map(); // of the messages that are shown, by id
    this.examples = null;
    this.list = h("div", { class: "messages", role: "log", "aria-label": "Conversation", "aria-live": "off" });
    const scroller = h("div", { class: "scroller" }, this.list);
    const jump = iconButton("bottom", "Jump to latest", null, { class: "icon-button jump", hidden: true });
    this.announcer = h("p", { class: "visually-hidden", role: "status" });
    this.composer = new Composer(api, {
      send: (text, files) => this.send(text, files),
      stop: () => this.stop(),
      editLast: () => this.editLast(),
    });
    this.settings = new SettingsPanel(api, (settings) => this.saveSettings(settings), () => this.toggleSettings(false));
    this.settingsButton = iconButton("settings", "Settings", () => this.toggleSettings(), { "aria-expanded": "false" });
    this.gauge = new Gauge();
    document.getElementById("actions").append(this.gauge.element, this.settingsButton);
    this.element = h(
      "div",
      { class: "chat" },
      h("div", { class: "chat-main" }, scroller, h("div", { class: "chat-foot" }, jump, this.composer.element), this.announcer),
      this.settings.element,
    );
    container.append(this.element);
    this.follower = new Follower(scroller, jump);
    mountDrop(this.element, (file) => this.composer.addFile(file));
    this.offer = makeOffer(api);
    this.offs = [
      this.offer.end,
      api.on("connected", () => this.loadExamples()),
      api.on("chat", (chat) => this.takeChat(chat)),
      api.on("node", (node) => this.takeNode(node)),
      api.on("delta", (delta) => this.takeDelta(delta)),
      api.on("context", (context) => this.gauge.show(context)),
      api.on("chats", ({ chats }) => this.takeList(chats)),
    ];
  }

  close() {
    for (const off of this.offs) off();
  }

  open(id) {
    if (this.chat?.id === id && this.chat.isLoaded && !this.isMissing) return;
    this.chat = new Conversation(id);
    this.isMissing = false;
    this.composer.open(id);
    this.gauge.show(null);
    this.settings.show({});
    this.draw();
    this.follower.jump();
    this.showTitle();
    // The first event is the whole chat, also when the connection was lost and is back.
    this.api.watch({ chat: id });
    if (!matchMedia("(pointer: coarse)").matches) this.composer.box.focus();
    this.loadExamples();
  }

  // What the server tells

  /** The whole chat, or what is new about it. */
  takeChat(news) {
    if (news.id !== this.chat.id) return;
    const isFirst = !this.chat.isLoaded;
    if (news.nodes) this.chat.takeWhole(news);
    else this.chat.takeNews(news);
    const isTyped = this.settings.element.contains(document.activeElement);
    if (news.settings && (isFirst || !isTyped)) this.settings.show(news.settings);
    if (news.context !== undefined) this.gauge.show(news.context);
    this.draw();
    if (isFirst) this.follower.jump();
    this.showTitle();
  }

  takeNode(node) {
    if (node.chat_id !== this.chat.id || !this.chat.isLoaded) return;
    const was = this.chat.takeNode(node);
    this.draw();
    if (isBusy(was) && !isBusy(node)) {
      this.announcer.textContent = `Answer: ${node.state === "failed" ? node.error : node.text.slice(0, 500)}`;
    }
  }

  takeDelta(delta) {
    const was = this.chat.takeDelta(delta);
    const view = this.views.get(delta.id);
    if (was !== null && view) this.follower.change(() => view.apply(delta, was));
    this.composer.setBusy(this.chat.isBusy);
  }

  takeList(chats) {
    const { chat } = this;
    const isListed = chats.some((each) => each.id === chat.id);
    if (chat.id !== null && !isListed && (chat.isListed || !chat.isLoaded)) this.showMissing();
    this.chat.isListed = isListed;
    this.showTitle();
  }

  // What is shown

  draw() {
    const { nodes, path, isLoaded } = this.chat;
    this.follower.change(() => {
      if (path.length === 0) {
        this.views.clear();
        this.list.replaceChildren(...(isLoaded ? [this.emptyPage()] : []));
        return;
      }
      const views = new Map();
      for (const node of path) {
        const view = this.views.get(node.id) ?? new MessageView(node, this.actions);
        const variants = variantsOf(nodes, node);
        const place = { index: variants.indexOf(node), of: variants.length };
        const isSame = view.node === node && view.place.of === place.of && view.place.index === place.index;
        if (!isSame) view.update(node, place);
        views.set(node.id, view);
      }
      this.views = views;
      // Only what changed is touched: focus and selection stay.
      const elements = [...views.values()].map((view) => view.element);
      elements.forEach((element, index) => {
        const there = this.list.children[index] ?? null;
        if (there !== element) this.list.insertBefore(element, there);
      });
      while (this.list.children.length > elements.length) this.list.lastElementChild.remove();
    });
    this.composer.setBusy(this.chat.isBusy);
  }

  emptyPage() {
    const ask = (question) => {
      const isFree = !this.composer.box.value.trim();
      this.composer.setText(question);
      if (isFree) this.composer.send();
    };
    const buttons = this.examples?.map((question) => h("button", { type: "button", onclick: () => ask(question) }, question));
    return h("div", { class: "empty" }, h("h1", {}, "What would you like to know?"), buttons && h("div", { class: "examples" }, buttons), this.offer.element);
  }

  async loadExamples() {
    if (this.chat?.id !== null) return;
    this.examples = (await this.api.get("/api/examples").catch(() => null))?.examples ?? null;
    if (this.chat.id === null && !this.isMissing) this.draw();
  }

  showMissing() {
    this.chat = new Conversation(null);
    this.isMissing = true;
    this.api.watch({ chat: null });
    this.views.clear();
    this.gauge.show(null);
    this.composer.setBusy(false);
    this.list.replaceChildren(
      h(
        "div",
        { class: "empty" },
        h("h1", {}, "This chat is not there"),
        h("p", { class: "muted" }, "It was deleted, or the link is not right. A message below starts a new one."),
      ),
    );
  }

  showTitle() {
    const title = this.chat.id && (titleOf(this.chat.id) || this.chat.title);
    document.title = title ? `${title} · neo-desktop` : "neo-desktop";
  }

  // What the user does

  actions = {
    retry: (node) => attempt(() => this.ask(async () => [await this.api.post(`/api/messages/${node.id}/retry`)])),
    goOn: (node) => attempt(() => this.ask(async () => [await this.api.post(`/api/messages/${node.id}/continue`)])),
    edit: (node, text) => this.post(node.parent_id, text, node.attachments ?? []),
    walk: (node, step) => this.walk(node, step),
  };

  async send(text, files) {
    if (this.chat.id === null && !(await this.create())) return false;
    return this.post(this.chat.leafId, text, files);
  }

  async create() {
    try {
      const whole = await this.api.post("/api/chats", { settings: this.settings.settings });
      this.isMissing = false;
      this.chat.takeWhole(whole);
      this.composer.moveTo(whole.id);
      this.api.watch({ chat: whole.id });
      // Without a place in the history of its own: "back" leads to what was before the chat.
      history.replaceState(null, "", `#/chat/${encodeURIComponent(whole.id)}`);
      window.dispatchEvent(new HashChangeEvent("hashchange"));
      return true;
    } catch (error) {
      this.composer.tell(error.message);
      return false;
    }
  }

  async post(parentId, text, files) {
    const body = { parent_id: parentId, text, attachment_ids: files.map((file) => file.id) };
    try {
      await this.ask(async () => {
        const { question, answer } = await this.api.post(`${this.chat.address}/messages`, body);
        return [question, answer];
      });
      return true;
    } catch (error) {
      this.composer.tell(error.message);
      return false;
    }
  }

  /** Run a request that gives messages, at whose end the chat goes on. */
  async ask(request) {
    const { chat } = this;
    const take = chat.expect();
    take(await request());
    if (chat !== this.chat) return;
    this.draw();
    this.follower.jump();
  }

  async walk(node, step) {
    const { chat } = this;
    const variants = variantsOf(chat.nodes, node);
    const next = variants[variants.indexOf(node) + step];
    if (!next) return;
    chat.leafId = newestLeaf(chat.nodes, next.id);
    this.draw();
    const label = `${step < 0 ? "Previous" : "Next"} variant`;
    this.views.get(next.id)?.foot.querySelector(`[aria-label="${label}"]:enabled`)?.focus();
    await attempt(() => this.api.patch(chat.address, { leaf_id: chat.leafId }));
  }

  async stop() {
    const { chat } = this;
    if (!chat.isBusy) return;
    const stopped = await attempt(() => this.api.post(`/api/messages/${chat.leafId}/stop`));
    if (stopped) this.takeNode(stopped);
  }

  editLast() {
    const questions = [...this.views.values()].filter((view) => !view.isAnswer);
    if (!this.chat.isBusy) questions.at(-1)?.edit();
  }

  escape() {
    if (this.chat.isBusy) this.stop();
    else if (!this.settings.element.hidden) this.toggleSettings(false);
  }

  toggleSettings(isOpen = this.settings.element.hidden) {
    this.settings.toggle(isOpen);
    this.settingsButton.setAttribute("aria-expanded", String(isOpen));
    if (!isOpen) this.settingsButton.focus();
  }

  async saveSettings(settings) {
    if (this.chat.id !== null) await this.api.patch(this.chat.address, { settings });
  }
}
