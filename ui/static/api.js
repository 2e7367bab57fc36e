// All that the page says to its server: requests, and one stream of events for the tab that is looked at.

export class ApiError extends Error {
  constructor(message, status, data = null) {
    super(message);
    this.status = status; // 0: no connection
    this.data = data; // the answer's JSON
  }
}

const LOST = "No connection to the server. Is it running? Start it, then try again.";

/** "the queue is full" → "The queue is full." */
export function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…:)]$/.test(whole) ? whole : `${whole}.`;
}

async function request(method, path, body) {
  const options = { method, headers: {} };
  if (body instanceof Blob || body instanceof ArrayBuffer) {
    options.body = body;
    options.headers["Content-Type"] = "application/octet-stream";
  } else if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new ApiError(LOST, 0);
  }
  if (response.status === 204) return null;
  const isJson = (response.headers.get("content-type") ?? "").includes("json");
  const data = await (isJson ? response.json() : response.text()).catch(() => null);
  if (response.ok) return data;
  const error = data?.error;
  const message = error?.message ?? `The server could not answer (HTTP ${response.status})`;
  throw new ApiError(sentence(message), response.status, isJson ? data : null);
}

const EVENTS = ["chats", "chat", "node", "delta", "context", "engine", "models", "selftest", "computer"];
const RETRY_MS = [300, 600, 1000, 2000, 4000];

/** The stream of events: open while the page is visible, and again after every loss. */
class Events {
  #watched = { chat: null, engine: false };
  #source = null;
  #timer = null;
  #losses = 0;
  #handlers = new Map();

  constructor() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.#open()));
    window.addEventListener("online", () => this.#open());
  }

  on(name, handler) {
    if (!this.#handlers.has(name)) this.#handlers.set(name, new Set());
    this.#handlers.get(name).add(handler);
    return () => this.#handlers.get(name).delete(handler);
  }

  watch(changes) {
    const watched = { ...this.#watched, ...changes };
    const isSame = watched.chat === this.#watched.chat && watched.engine === this.#watched.engine;
    this.#watched = watched;
    // Once for all changes of the same moment.
    if (this.#source === null || !isSame) queueMicrotask(() => this.#watched === watched && this.#open());
  }

  #emit(name, data) {
    for (const handler of [...(this.#handlers.get(name) ?? [])]) handler(data);
  }

  #close() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }

  #open() {
    this.#close();
    if (document.hidden) return;
    const query = new URLSearchParams();
    if (this.#watched.chat) query.set("chat", this.#watched.chat);
    if (this.#watched.engine) query.set("engine", "1");
    const source = new EventSource(`/api/events?${query}`);
    this.#source = source;
    source.onopen = () => {
      this.#losses = 0;
      this.#emit("connected");
    };
    source.onerror = () => {
      if (source !== this.#source) return;
      this.#close();
      this.#emit("disconnected");
      const wait_ms = RETRY_MS[Math.min(this.#losses, RETRY_MS.length - 1)];
      this.#losses += 1;
      this.#timer = setTimeout(() => this.#open(), wait_ms);
    };
    for (const name of EVENTS) {
      source.addEventListener(name, (event) => {
        if (source === this.#source) this.#emit(name, JSON.parse(event.data));
      });
    }
  }
}

const events = new Events();

/**
 * What tabs are given.
 * get(path), post(path, body), put, patch, delete: JSON; they throw ApiError, whose message is a sentence.
 * on(name, handler): called with each event's data, returns a function that ends it. Beside the server's events there
 *   are "connected" (also after a loss: what was missed must be asked for) and "disconnected".
 * watch({chat: ID or null, engine: bool}): which events the server shall send beside those for everybody.
 */
export const api = {
  get: (path) => request("GET", path),
  post: (path, body) => request("POST", path, body),
  put: (path, body) => request("PUT", path, body),
  patch: (path, body) => request("PATCH", path, body),
  delete: (path) => request("DELETE", path),
  on: (name, handler) => events.on(name, handler),
  watch: (changes) => events.watch(changes),
};
