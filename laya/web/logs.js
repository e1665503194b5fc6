// Owns: the log of one engine as it is written: followed while it is open, filtered by words, scrolled to a line.

import { element, write } from "./element.js";
import { textLines } from "./server.js";

const LINES_FIRST = 400;
const LINES_MOST = 2000; // what the server keeps, too
const NEAR_END_PX = 60;
const AGAIN_MS = 2000;

export class Logs {
  constructor(card, box) {
    this.card = card;
    this.engines = [];
    this.following = null;
    this.wanted = null; // the words of a line that is to be shown when it comes
    this.engine = element("select", { id: "log-engine" });
    this.filter = element("input", { type: "search", id: "log-filter", placeholder: "Only lines with", autocomplete: "off", spellcheck: false });
    this.said = element("p", { className: "faint", role: "status" });
    this.lines = element("div", { className: "log-lines", role: "log", "aria-label": "Log", tabIndex: 0 });
    this.details = element(
      "details", { className: "log" }, element("summary", {}, "Follow the log of an engine"),
      element(
        "div", { className: "log-head" }, element("label", { className: "hidden", htmlFor: "log-engine" }, "Engine"), this.engine,
        element("label", { className: "hidden", htmlFor: "log-filter" }, "Filter"), this.filter,
      ),
      this.said, this.lines,
    );
    box.append(this.details);
    this.details.addEventListener("toggle", () => this.restart());
    this.engine.addEventListener("change", () => this.restart());
    this.filter.addEventListener("input", () => this.refilter());
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** models: as `/admin/state` has them. */
  draw(models) {
    const engines = models.flatMap((model) => {
      const replicas = model.extra?.replicas?.length ?? 1;
      return Array.from({ length: replicas }, (_, index) => (replicas > 1 ? `${model.id}#${index + 1}` : model.id));
    });
    this.card.hidden = engines.length === 0;
    if (this.engines.join("\n") === engines.join("\n")) return;
    const chosen = this.engine.value || models.find(({ state }) => state !== "unloaded")?.id;
    this.engines = engines;
    this.engine.replaceChildren(...engines.map((name) => element("option", { value: name }, name)));
    if (engines.includes(chosen)) this.engine.value = chosen;
  }

  /** Show the line with these words in the log of this engine. */
  show(engine, words) {
    this.wanted = words;
    this.filter.value = "";
    if (this.engines.includes(engine)) this.engine.value = engine;
    this.card.scrollIntoView({ block: "nearest" });
    if (this.details.open) this.restart();
    else this.details.open = true; // which starts it
  }

  async restart() {
    this.following?.abort();
    this.following = null;
    if (!this.details.open || document.hidden || !this.engine.value) return;
    const following = (this.following = new AbortController());
    const [model, replica] = splitReplica(this.engine.value);
    const path = `/admin/models/${model.split("/").map(encodeURIComponent).join("/")}/logs?follow=true&lines=${LINES_FIRST}${replica ? `&replica=${replica}` : ""}`;
    this.lines.replaceChildren();
    write(this.said, "");
    try {
      for await (const line of textLines(path, following.signal)) this.add(line);
      write(this.said, "The log has ended.");
    } catch (fault) {
      if (fault.name === "AbortError") return;
      write(this.said, fault.message);
      setTimeout(() => this.following === following && this.restart(), AGAIN_MS);
    }
  }

  add(text) {
    const lines = this.lines;
    const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < NEAR_END_PX;
    const line = element("div", { className: `line${isFault(text) ? " fault" : text.startsWith("laya: ") ? " own" : ""}` }, text || " ");
    line.hidden = !this.passes(text);
    lines.append(line);
    if (lines.children.length > LINES_MOST) lines.firstChild.remove();
    if (this.wanted && text.includes(this.wanted)) {
      line.classList.add("wanted");
      line.scrollIntoView({ block: "center" });
      this.wanted = null;
    } else if (isAtEnd && !lines.querySelector(".wanted")) {
      lines.scrollTop = lines.scrollHeight;
    }
  }

  passes(text) {
    return text.toLowerCase().includes(this.filter.value.trim().toLowerCase());
  }

  refilter() {
    for (const line of this.lines.children) line.hidden = !this.passes(line.textContent);
    this.lines.scrollTop = this.lines.scrollHeight;
  }
}

function isFault(text) {
  return /^[\d.:]+ E |\berror\b|failed|GGML_ASSERT|engine ended/i.test(text);
}

function splitReplica(engine) {
  const found = engine.match(/^(.*)#(\d+)$/);
  return found ? [found[1], found[2]] : [engine, null];
}
