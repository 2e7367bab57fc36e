// The panel with a chat's settings: system prompt with presets, and how tokens are drawn.

import { h, icon, iconButton } from "./dom.js";
import { attempt, notify } from "./notice.js";

// field, label, what it does, whole numbers only
const NUMBERS = [
  ["temperature", "Temperature", "0 is the most predictable", false],
  ["top_p", "Top-p", "Likeliest tokens up to this total", false],
  ["top_k", "Top-k", "Likeliest tokens up to this many", true],
  ["min_p", "Min-p", "Share of the likeliest token's chance", false],
  ["repetition_penalty", "Repetition penalty", "Above 1: fewer repeats", false],
  ["max_tokens", "Max tokens", "Longest answer", true],
  ["seed", "Seed", "Same seed, same answer", true],
];
const NONE = Object.fromEntries([["system_prompt", null], ...NUMBERS.map(([field]) => [field, null])]);

/** onChange(settings) → throws if the server refuses them. */
export class SettingsPanel {
  #api;
  #onChange;
  #onClose;
  #settings = { ...NONE };
  #inputs = {};
  #presets = [];

  constructor(api, onChange, onClose) {
    this.#api = api;
    this.#onChange = onChange;
    this.#onClose = onClose;
    this.prompt = h("textarea", {
      class: "field",
      id: "setting-system_prompt",
      rows: 4,
      placeholder: "none",
      onchange: () => this.#set("system_prompt", this.prompt.value.trim() ? this.prompt.value : null),
    });
    this.select = h("select", { class: "field", "aria-label": "Preset", onchange: () => this.#choosePreset() });
    this.removeButton = iconButton("trash", "Delete preset", () => this.#deletePreset());
    this.error = h("p", { class: "error", role: "alert" });
    this.element = h(
      "aside",
      { id: "settings", "aria-label": "Settings of this chat", hidden: true },
      h(
        "div",
        { class: "settings-head" },
        h("h2", {}, "Settings"),
        iconButton("close", "Close settings", onClose),
      ),
      h("label", { for: "setting-system_prompt" }, "System prompt"),
      this.prompt,
      h("div", { class: "presets" }, this.select, iconButton("plus", "Save as preset", () => this.#savePreset()), this.removeButton),
      NUMBERS.map((row) => this.#number(row)),
      this.error,
      h("button", { class: "button", type: "button", onclick: () => this.#reset() }, icon("retry"), "Reset to the model's own"),
      h("p", { class: "muted" }, "They hold for this chat, from the next answer on."),
    );
  }

  get settings() {
    return { ...this.#settings };
  }

  show(settings) {
    this.#settings = { ...NONE, ...settings };
    this.error.textContent = "";
    this.prompt.value = this.#settings.system_prompt ?? "";
    for (const [field] of NUMBERS) {
      this.#inputs[field].value = this.#settings[field] ?? "";
      this.#inputs[field].removeAttribute("aria-invalid");
    }
    this.#drawPresets();
  }

  async toggle(isOpen = this.element.hidden) {
    this.element.hidden = !isOpen;
    if (!isOpen) return;
    this.prompt.focus();
    this.#presets = (await attempt(() => this.#api.get("/api/presets")))?.presets ?? [];
    this.#drawPresets();
  }

  #number([field, label, hint, isWhole]) {
    const id = `setting-${field}`;
    const input = h("input", {
      class: "field",
      id,
      inputmode: isWhole ? "numeric" : "decimal",
      placeholder: "default",
      autocomplete: "off",
      "aria-describedby": `${id}-hint`,
      onchange: () => {
        const text = input.value.trim().replace(",", ".");
        const isNumber = isWhole ? /^-?\d{1,15}$/.test(text) : text !== "" && Number.isFinite(Number(text));
        if (text && !isNumber) {
          input.setAttribute("aria-invalid", "true");
          this.error.textContent = `${label} is ${isWhole ? "a whole number" : "a number"}, not “${input.value.trim()}”.`;
        } else this.#set(field, text ? Number(text) : null, input);
      },
    });
    this.#inputs[field] = input;
    return h("div", { class: "setting" }, h("label", { for: id }, label), input, h("p", { class: "muted", id: `${id}-hint` }, hint));
  }

  async #set(field, value, input = this.prompt) {
    const before = this.#settings[field];
    this.#settings[field] = value;
    try {
      await this.#onChange(this.settings);
      input.removeAttribute("aria-invalid");
      this.error.textContent = "";
    } catch (error) {
      this.#settings[field] = before;
      input.setAttribute("aria-invalid", "true");
      const label = input.labels[0].textContent;
      this.error.textContent = error.message.replace(new RegExp(`^${field}\\b`, "i"), label);
    }
    this.#drawPresets();
  }

  #reset() {
    const before = this.settings;
    this.show({});
    attempt(() => this.#onChange(this.settings));
    notify("The settings are the model's own again.", {
      label: "Undo",
      run: () => {
        this.show(before);
        attempt(() => this.#onChange(before));
      },
    });
  }

  #drawPresets() {
    const chosen = this.#presets.find((preset) => preset.text === this.prompt.value && preset.text);
    this.select.replaceChildren(
      h("option", { value: "" }, this.#presets.length ? "Choose a preset" : "No presets yet"),
      ...this.#presets.map((preset) => h("option", { value: preset.name, selected: preset === chosen }, preset.name)),
    );
    this.removeButton.disabled = !chosen;
  }

  #choosePreset() {
    const preset = this.#presets.find((each) => each.name === this.select.value);
    this.prompt.value = preset?.text ?? "";
    this.#set("system_prompt", this.prompt.value || null);
  }

  #savePreset() {
    const text = this.prompt.value;
    if (!text.trim()) return notify("Write a system prompt first, then save it.");
    const name = h("input", { class: "field", "aria-label": "Name of the preset", placeholder: "Name", required: true, maxlength: 60 });
    const save = async () => {
      if (!name.value.trim()) return name.focus();
      const path = `/api/presets/${encodeURIComponent(name.value.trim())}`;
      if ((await attempt(async () => (await this.#api.put(path, { text }), true))) === undefined) return undefined;
      dialog.close();
      this.#presets = (await attempt(() => this.#api.get("/api/presets")))?.presets ?? this.#presets;
      return this.#drawPresets();
    };
    name.addEventListener("keydown", (event) => event.key === "Enter" && !event.isComposing && save());
    const dialog = h(
      "dialog",
      { "aria-label": "Save as preset", onclose: () => dialog.remove() },
      h("h2", {}, "Save as preset"),
      name,
      h(
        "div",
        { class: "dialog-foot" },
        h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Cancel"),
        h("button", { class: "button primary", type: "button", onclick: save }, "Save"),
      ),
    );
    document.body.append(dialog);
    return dialog.showModal();
  }

  async #deletePreset() {
    const preset = this.#presets.find((each) => each.name === this.select.value);
    const path = `/api/presets/${encodeURIComponent(preset.name)}`;
    if ((await attempt(async () => (await this.#api.delete(path), true))) === undefined) return;
    this.#presets = this.#presets.filter((each) => each !== preset);
    this.#drawPresets();
    notify(`Deleted the preset “${preset.name}”.`, {
      label: "Undo",
      run: async () => {
        await attempt(() => this.#api.put(path, { text: preset.text }));
        this.#presets.push(preset);
        this.#drawPresets();
      },
    });
  }
}
