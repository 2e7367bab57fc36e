// What the page knows of the open chat, and how news changes it. Nothing is drawn here.

import { isBusy, pathTo } from "./tree.js";

export class Conversation {
  #clock = 0;
  #heardAt = new Map(); // id of a message → clock when an event last told of it
  #nextLeaf = null; // what shall be shown as soon as it is known

  /** id: null for a chat that the server does not know yet. */
  constructor(id) {
    this.id = id;
    this.title = "";
    this.nodes = new Map();
    this.leafId = null;
    this.isLoaded = id === null;
    this.isListed = false; // seen in the list of chats: if it is gone from there, it was deleted
  }

  /** The messages that are shown. */
  get path() {
    return pathTo(this.nodes, this.leafId);
  }

  get isBusy() {
    return isBusy(this.nodes.get(this.leafId));
  }

  get address() {
    return `/api/chats/${encodeURIComponent(this.id)}`;
  }

  takeWhole(whole) {
    this.id = whole.id;
    this.title = whole.title;
    this.nodes = new Map(whole.nodes.map((node) => [node.id, node]));
    this.leafId = whole.leaf_id;
    this.isLoaded = true;
  }

  /** Title and leaf, as another tab may have changed them. */
  takeNews({ title, leaf_id }) {
    this.title = title ?? this.title;
    // A new message may come after the news that it is the one to show.
    this.#nextLeaf = leaf_id ?? null;
    this.#goToNextLeaf();
  }

  /** A message, new or changed; returns how it was before. */
  takeNode(node) {
    const was = this.nodes.get(node.id);
    this.#heardAt.set(node.id, ++this.#clock);
    this.nodes.set(node.id, node);
    // What another tab asks here is followed here.
    if (!was && node.parent_id === this.leafId) this.leafId = node.id;
    this.#goToNextLeaf();
    return was;
  }

  /** What an answer has gained; returns its state before, or null if it is none of this chat's. */
  takeDelta(delta) {
    const node = this.nodes.get(delta.id);
    if (!node) return null;
    this.#heardAt.set(delta.id, ++this.#clock);
    const was = node.state;
    node.state = delta.state;
    node.thought_s = delta.thought_s ?? null;
    node.blocks.splice(delta.blocks_from, Infinity, ...delta.blocks);
    node.thought_blocks.splice(delta.thought_blocks_from, Infinity, ...delta.thought_blocks);
    return was;
  }

  /** To be called before a request: gives what takes the messages that it brings, of which the last is shown. */
  expect() {
    const since = this.#clock;
    return (added) => {
      // Events may have been faster than the answer to the request: what they brought is newer.
      for (const node of added) if (!(this.#heardAt.get(node.id) > since)) this.nodes.set(node.id, node);
      this.leafId = added.at(-1).id;
      this.#nextLeaf = null;
    };
  }

  #goToNextLeaf() {
    if (!this.nodes.has(this.#nextLeaf)) return;
    this.leafId = this.#nextLeaf;
    this.#nextLeaf = null;
  }
}
