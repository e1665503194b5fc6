// Owns: the choice of a chat's model, or of two side by side, each with a badge: loaded, fits, does not fit.

import { element, write } from "./element.js";
import { isLoaded } from "./models.js";
import { ask } from "./server.js";

const ASK_EVERY_MS = 15_000; // what fits changes with what is loaded, which asks at once

export class Picker {
  constructor({ first, second, badge }) {
    Object.assign(this, { first, second, badge });
    this.models = new Map(); // id -> {state, window}
    this.windows = new Map(); // id -> tokens of context; null: it does not fit
    this.asked_ms = -Infinity;
    this.seen = "";
    for (const each of [first, second]) each.addEventListener("change", () => this.drawBadge());
  }

  /** The models of the next turn: one, or two. */
  get chosen() {
    return [this.first.value, this.second.value].filter(Boolean);
  }

  choose([first, second]) {
    if (this.models.has(first)) this.first.value = first;
    this.second.value = this.models.has(second) ? second : "";
    this.drawBadge();
  }

  windowOf(id) {
    const settings = this.models.get(id)?.plan?.settings;
    return settings?.kv_pool_tokens ? settings.max_seq_len : settings ? undefined : this.windows.get(id) ?? undefined;
  }

  isLoaded(id) {
    const model = this.models.get(id);
    return Boolean(model && isLoaded(model));
  }

  /** Models that chat; the choice stays as long as it is there. */
  offer(models) {
    const able = models.filter((model) => model.task === "chat").sort((a, b) => isLoaded(b) - isLoaded(a) || a.id.localeCompare(b.id));
    this.models = new Map(able.map((model) => [model.id, model]));
    const states = able.map(({ id, state }) => `${id} ${state}`).join("\n");
    if (states !== this.seen || performance.now() - this.asked_ms > ASK_EVERY_MS) {
      this.seen = states;
      this.askWhatFits();
    }
    this.draw(able);
  }

  async askWhatFits() {
    this.asked_ms = performance.now();
    const { data } = await ask("GET", "/v1/models").catch(() => ({ data: [] })); // the page says that it does not answer
    this.windows = new Map(data.map((model) => [model.id, model.context_length]));
    this.draw([...this.models.values()]);
  }

  draw(able) {
    const [first, second] = [this.first.value, this.second.value];
    const ids = able.map(({ id }) => id);
    const words = able.map(({ id }) => `${id}: ${this.badgeOf(id)}`);
    if (this.drawn !== words.join("\n")) {
      this.drawn = words.join("\n");
      const options = () => ids.map((id, index) => element("option", { value: id }, words[index]));
      this.first.replaceChildren(...options());
      this.second.replaceChildren(element("option", { value: "" }, "one model"), ...options());
      this.first.value = ids.includes(first) ? first : ids[0] ?? "";
      this.second.value = ids.includes(second) ? second : "";
    }
    this.second.hidden = ids.length < 2;
    this.drawBadge();
  }

  badgeOf(id) {
    if (this.isLoaded(id)) return "loaded";
    const { state } = this.models.get(id) ?? {};
    if (state === "loading" || state === "draining") return state;
    if (!this.windows.has(id)) return "not loaded";
    const window = this.windows.get(id);
    return window === null ? "does not fit" : `fits, ${window} tokens`;
  }

  drawBadge() {
    const id = this.first.value;
    const text = id ? this.badgeOf(id) : "";
    write(this.badge, text);
    this.badge.className = `badge ${text.split(/[ ,]/)[0]}`;
  }
}
