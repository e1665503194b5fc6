// Owns: one answer of a chat, while it comes and when it is there: text, thought, speed, how full the context is, fault.

import { element, write } from "./element.js";
import { refusalCard } from "./refusal.js";

const FIGURES_EVERY_MS = 250;
const REFUSALS = ["insufficient_memory", "engine_out_of_memory", "memory_busy", "context_length_exceeded", "queue_full", "rate_limit_exceeded", "memory_pressure"];

export class Answer {
  /** kept: one that was given before. grew(): it became longer. */
  constructor({ model, grew = () => {}, isNamed = false, kept = null }) {
    this.model = model;
    this.grew = grew;
    this.element = element(
      "div", { className: "message assistant" },
      element("span", { className: "hidden" }, "Answer: "), element("p", { className: "by faint", hidden: !isNamed }, model),
      element("div", { className: "thought" }), element("div", { className: "text" }),
      element("meter", { min: 0, max: 1, hidden: true }), element("p", { className: "note" }), element("p", { className: "error", role: "alert" }),
    );
    [this.shownThought, this.shown, this.meter, this.shownNote, this.shownError] = [".thought", ".text", "meter", ".note", ".error"].map(
      (part) => this.element.querySelector(part),
    );
    this.text = kept?.text ?? "";
    this.thought = kept?.thought ?? "";
    this.figures = kept?.figures ?? null;
    this.end = kept?.end ?? ""; // in words, where it did not end by itself
    this.reason = this.usage = this.firstMs = this.lastMs = null;
    this.nPieces = 0;
    this.drawn_ms = 0;
    if (kept) this.drawKept();
  }

  /** What is kept of it. */
  get kept() {
    const { model, text, thought, figures, end } = this;
    return { model, text, thought, figures, end };
  }

  drawKept() {
    write(this.shownThought, this.thought);
    this.shown.replaceChildren(...blocks(this.text.trimStart()));
    this.drawFigures();
  }

  waitFor(isLoaded) {
    write(this.shownNote, isLoaded ? "…" : "loading the model …");
  }

  take({ event, prefill }) {
    if (prefill !== undefined) write(this.shownNote, `reading the conversation, ${prefill} %`);
    if (!event) return;
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.[0];
    this.reason = choice?.finish_reason ?? this.reason;
    const thought = choice?.delta?.reasoning_content ?? "";
    const text = choice?.delta?.content ?? "";
    if (!thought && !text) return;
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.nPieces += 1;
    this.thought += thought;
    this.text += text;
    write(this.shownThought, this.thought);
    this.shown.replaceChildren(...blocks(this.text.trimStart()));
    if (this.lastMs - this.drawn_ms > FIGURES_EVERY_MS) {
      this.drawn_ms = this.lastMs;
      write(this.shownNote, this.nPieces > 1 ? speedOf(this.nPieces, this.lastMs - this.firstMs) : "");
    }
    this.grew();
  }

  /** It is whole. window: tokens of context, where that is known. */
  finish(window) {
    if (this.usage) {
      const { completion_tokens: made, total_tokens: held } = this.usage;
      this.figures = { made, held, window, ms: this.lastMs - this.firstMs };
    }
    if (this.reason === "length") this.end = "cut: its token limit is reached";
    if (!this.text && !this.thought) this.end = "the answer is empty";
    this.drawFigures();
    this.grew();
  }

  /** Stopped by who asked. */
  stop() {
    this.end = "stopped";
    this.drawFigures();
  }

  drawFigures() {
    const facts = [];
    if (this.figures) {
      const { made, held, window, ms } = this.figures;
      facts.push(`${made} tokens`);
      if (made > 1) facts.push(speedOf(made, ms));
      facts.push(window ? `${held} of ${window} tokens of context` : `${held} tokens of context`);
      this.meter.hidden = !window;
      if (window) {
        Object.assign(this.meter, { max: window, high: 0.85 * window, optimum: 0, value: held, title: `${held} of ${window} tokens of context` });
        this.meter.setAttribute("aria-label", "Context used");
      }
    }
    if (this.end) facts.push(this.end);
    write(this.shownNote, facts.join(" · "));
  }

  /** remedies: see refusalCard. */
  fail(fault, remedies) {
    write(this.shownNote, "");
    if (REFUSALS.includes(fault.code)) this.element.append(refusalCard(fault, { model: this.model, ...remedies }));
    else write(this.shownError, fault.message);
    this.grew();
  }
}

function speedOf(tokens, ms) {
  return `${((1000 * (tokens - 1)) / Math.max(ms, 1)).toFixed(1)} tokens/s`;
}

/** The text with its fenced code as blocks of their own. */
function blocks(text) {
  return text.split(/^```[^\n]*\n?/m).map((part, index) => (index % 2 ? element("pre", { tabIndex: 0 }, part.replace(/\n$/, "")) : part));
}
