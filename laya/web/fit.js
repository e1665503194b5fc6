// Owns: trying a model before it is loaded: its ghost on the bars, the three sliders that make it fit, and the load.
// Every figure is the server's plan (/admin/fit); this knows no sizes.

import { element, size, write } from "./element.js";
import { termsOf } from "./ledger.js";
import { ask } from "./server.js";

const SETTLE_MS = 60; // of a slider that still moves

const SLIDERS = [
  { flag: "--max-seq-len", name: "max_seq_len", label: "Context", words: (value) => `${value.toLocaleString("en")} tokens` },
  { flag: "--max-num-seqs", name: "max_num_seqs", label: "Sequences", words: (value) => `${value} at once` },
  { flag: "--kv-cache-dtype", name: "kv_cache_dtype", label: "KV type", words: (value) => value },
];

export class Fit {
  /** load(model, flags): loads it so. */
  constructor({ panel, ledger, load }) {
    Object.assign(this, { panel, ledger, load });
    this.model = null;
    this.asked = null;
    this.make();
  }

  make() {
    const close = element("button", { type: "button", className: "quiet", "aria-label": "Close the fit" }, "Close");
    close.addEventListener("click", () => this.close());
    this.title = element("h3", { tabIndex: -1 });
    this.verdict = element("p", { className: "verdict", role: "status" });
    this.terms = element("p", { className: "faint fit-terms" });
    this.sliders = SLIDERS.map((slider) => this.slider(slider));
    this.ways = element("div", { className: "ways" });
    this.go = element("button", { type: "button" });
    this.go.addEventListener("click", () => {
      const [model, flags] = [this.model, this.flags];
      this.close();
      this.load(model, flags);
    });
    this.pull = element("p", { className: "pull faint", hidden: true });
    this.panel.replaceChildren(
      element("div", { className: "fit-head" }, this.title, close), this.verdict, this.terms,
      element("div", { className: "sliders" }, ...this.sliders.map((slider) => slider.row)), this.ways,
      element("div", { className: "fit-foot" }, this.go, this.pull),
    );
    this.panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
  }

  slider({ flag, name, label, words }) {
    const id = `fit-${name}`;
    const input = element("input", { type: "range", id, min: 0, step: 1 });
    const value = element("output", { htmlFor: id });
    input.addEventListener("input", () => {
      this.chosen.set(flag, this.trial.steps[name][input.valueAsNumber]);
      write(value, words(this.chosen.get(flag)));
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.look(), SETTLE_MS);
    });
    return { flag, name, words, input, value, row: element("div", { className: "slider" }, element("label", { htmlFor: id }, label), input, value) };
  }

  get flags() {
    return [...this.chosen].map(([flag, value]) => `${flag} ${value}`).join(" ");
  }

  /** Begin with the settings it has; the panel opens with `open`. */
  async begin(model) {
    if (this.model === model) return;
    this.asked?.abort();
    this.model = model;
    this.from = document.activeElement;
    this.chosen = new Map();
    this.trial = null;
    this.panel.className = "fit asking";
    write(this.verdict, "Asking the planner …");
    write(this.terms, "");
    this.ways.replaceChildren();
    await this.look();
  }

  /** The ghost may be seen. */
  show(isShown) {
    this.ledger.setTrial(isShown && this.trial?.model ? this.trial : null);
    this.isShown = isShown;
  }

  async open(model) {
    this.panel.hidden = false;
    write(this.title, model);
    this.isShown = true;
    await this.begin(model);
    this.show(true);
    this.panel.scrollIntoView({ block: "nearest" });
    this.title.focus({ preventScroll: true });
  }

  close() {
    this.asked?.abort();
    clearTimeout(this.timer);
    const hadFocus = this.panel.contains(document.activeElement);
    this.model = this.trial = null;
    this.panel.hidden = true;
    this.show(false);
    if (hadFocus && this.from?.isConnected) this.from.focus();
  }

  /** Ask what the load would do; what was asked before and is not answered yet does not matter any more. */
  async look() {
    this.asked?.abort();
    const asking = (this.asked = new AbortController());
    const query = new URLSearchParams({ model: this.model, flags: this.flags });
    try {
      const trial = await ask("GET", `/admin/fit?${query}`, undefined, asking.signal);
      if (asking.signal.aborted) return;
      this.trial = trial;
      this.draw();
    } catch (fault) {
      if (fault.name === "AbortError") return;
      this.panel.className = "fit too-big";
      write(this.verdict, fault.message);
    }
  }

  draw() {
    const { trial } = this;
    if (this.isShown) this.show(true);
    this.panel.className = `fit ${trial.fits ? "fits" : "too-big"}`;
    write(this.verdict, trial.verdict);
    const { settings, devices } = trial.plan;
    write(this.terms, devices.map((device) => `${devices.length > 1 ? `${device.device}: ` : ""}${termsOf(device)}`).join("; "));
    for (const { flag, name, words, input, value, row } of this.sliders) {
      const steps = trial.steps[name];
      row.hidden = steps.length < 2;
      if (row.hidden || document.activeElement === input && this.chosen.has(flag)) continue;
      input.max = steps.length - 1;
      input.value = steps.indexOf(settings[name]);
      write(value, words(settings[name]));
      input.setAttribute("aria-valuetext", value.textContent);
    }
    this.drawWays(trial);
    this.go.hidden = !trial.is_here;
    this.go.disabled = !trial.fits && trial.waits_for.length === 0;
    write(this.go, this.chosen.size ? "Load it so" : "Load it");
    this.pull.hidden = trial.is_here;
    if (!trial.is_here) this.pull.replaceChildren("Not on this disk yet: ", element("code", {}, `laya pull ${trial.model}`), " fetches it. Planned from what the catalogue knows of its header.");
  }

  /** Changes that do fit, one click each. */
  drawWays(trial) {
    const ways = trial.fits ? [] : trial.suggestions.slice(0, 3);
    this.ways.replaceChildren(...ways.map((way) => {
      const button = element("button", { type: "button", className: "quiet way" }, element("b", {}, way.note), ` ${size(way.total_bytes)}`);
      button.title = way.flags;
      button.addEventListener("click", () => {
        this.chosen = flagsOf(way.flags);
        this.look();
      });
      return button;
    }));
  }
}

/** `--max-num-seqs 1 --no-mmap` as a map of each flag's value. */
function flagsOf(text) {
  const found = new Map();
  for (const part of text.split(/ (?=--)/)) {
    const [flag, ...value] = part.split(" ");
    found.set(flag, value.join(" "));
  }
  return found;
}
