// The conversation follows its end while the reader is there, and never otherwise.

/**
 * `change(action)` runs what changes the conversation, then follows. Who scrolls up by any amount, by any means, is let
 * go at once: also when that happened between two frames, before the browser told of it.
 */
export class Follower {
  #element;
  #button;
  #top = 0; // where the last look found the reader
  #follows = true;

  constructor(element, button) {
    this.#element = element;
    this.#button = button;
    element.addEventListener("scroll", () => this.#look(), { passive: true });
    element.addEventListener("wheel", (event) => event.deltaY < 0 && this.#canScroll && this.#set(false), { passive: true });
    button.addEventListener("click", () => this.jump());
    new ResizeObserver(() => this.change(() => {})).observe(element);
  }

  get #canScroll() {
    return this.#element.scrollHeight > this.#element.clientHeight + 1;
  }

  get #toEnd() {
    return this.#element.scrollHeight - this.#element.clientHeight - this.#element.scrollTop;
  }

  #set(follows) {
    this.#follows = follows;
    this.#button.hidden = follows || this.#toEnd < 80;
  }

  #look() {
    const top = this.#element.scrollTop;
    if (top < this.#top - 0.5 && this.#toEnd > 1) this.#set(false);
    else if (this.#toEnd <= 2) this.#set(true);
    else this.#set(this.#follows);
    this.#top = top;
  }

  change(action) {
    this.#look();
    const result = action();
    if (this.#follows) this.#toBottom();
    else this.#set(false);
    return result;
  }

  /** To the end, and follow from there. */
  jump() {
    this.#toBottom();
    this.#set(true);
  }

  #toBottom() {
    this.#element.scrollTop = this.#element.scrollHeight;
    this.#top = this.#element.scrollTop;
  }
}
