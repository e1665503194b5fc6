// Owns: the conversation: what was said, the answer as it comes, stop, and what goes wrong in words.

import { element, write } from "./element.js";
import { isLoaded } from "./models.js";
import { streamChat } from "./server.js";

const NEAR_END_PX = 120; // who reads here follows new text; who scrolled up is left there

export class Chat {
  constructor({ form, box, send, stop, messages, model }) {
    Object.assign(this, { form, box, sendButton: send, stopButton: stop, messages, model });
    this.history = [];
    this.running = null;
    this.models = new Map();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    stop.addEventListener("click", () => this.stop());
  }

  /** Offer the models that chat, loaded ones first; the choice stays as long as it is there. */
  offer(models) {
    const able = models.filter((model) => model.task === "chat");
    able.sort((a, b) => isLoaded(b) - isLoaded(a) || a.id.localeCompare(b.id));
    this.models = new Map(able.map((model) => [model.id, model]));
    const offered = able.map((model) => model.id).sort();
    if (this.offered !== offered.join("\n")) {
      const chosen = this.model.value;
      this.offered = offered.join("\n");
      this.model.replaceChildren(...offered.map((id) => element("option", { value: id }, id)));
      this.model.value = offered.includes(chosen) ? chosen : able[0]?.id ?? "";
    }
    this.sendButton.disabled = able.length === 0;
  }

  clear() {
    this.stop();
    this.history = [];
    this.messages.replaceChildren();
    this.box.focus();
  }

  stop() {
    this.running?.abort();
  }

  async send() {
    const text = this.box.value.trim();
    if (!text || this.running || !this.model.value) return;
    const turn = { role: "user", content: text };
    const [history, model] = [this.history, this.model.value];
    history.push(turn);
    this.box.value = "";
    this.add("user", text);
    const answer = new Answer(this.add("assistant"), () => this.follow());
    this.setRunning(new AbortController());
    try {
      const request = { model, messages: history, stream_options: { include_usage: true } };
      answer.waitFor(this.models.get(model));
      for await (const piece of streamChat(request, this.running.signal)) answer.take(piece);
      const settings = this.models.get(model)?.plan?.settings;
      answer.finish(settings?.kv_pool_tokens ? settings.max_seq_len : undefined);
    } catch (fault) {
      if (fault.name === "AbortError") answer.note("stopped");
      else answer.fail(fault.message);
    }
    if (answer.text) history.push({ role: "assistant", content: answer.text });
    else this.takeBack(history, turn);
    this.setRunning(null);
  }

  /** A turn without an answer goes back to where it was written, unless something else is written there. */
  takeBack(history, turn) {
    history.splice(history.lastIndexOf(turn), 1);
    if (!this.box.value) this.box.value = turn.content;
  }

  setRunning(controller) {
    const hadFocus = [this.sendButton, this.stopButton].includes(document.activeElement);
    this.running = controller;
    this.sendButton.hidden = Boolean(controller);
    this.stopButton.hidden = !controller;
    this.messages.setAttribute("aria-busy", String(Boolean(controller))); // read out whole, not word by word
    if (hadFocus) (controller ? this.stopButton : this.box).focus();
  }

  add(role, text = "") {
    const message = element(
      "div", { className: `message ${role}` },
      element("span", { className: "hidden" }, role === "user" ? "You: " : "Answer: "),
      element("div", { className: "thought" }), element("div", { className: "text" }, text),
      element("p", { className: "note" }), element("p", { className: "error", role: "alert" }),
    );
    this.messages.append(message);
    this.messages.scrollTop = this.messages.scrollHeight;
    return message;
  }

  follow() {
    const list = this.messages;
    if (list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX) list.scrollTop = list.scrollHeight;
  }
}

/** One answer while it comes. */
class Answer {
  constructor(message, grew) {
    [this.shownThought, this.shown, this.shownNote, this.shownError] = [".thought", ".text", ".note", ".error"].map(
      (part) => message.querySelector(part),
    );
    this.grew = grew;
    this.text = "";
    this.thought = "";
    this.reason = null;
    this.usage = null;
    this.firstMs = null;
    this.lastMs = null;
  }

  waitFor(model) {
    this.note(model && isLoaded(model) ? "…" : "loading the model …");
  }

  take({ event, prefill }) {
    if (prefill !== undefined) this.note(`reading the conversation, ${prefill} %`);
    if (!event) return;
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.[0];
    this.reason = choice?.finish_reason ?? this.reason;
    const thought = choice?.delta?.reasoning_content ?? "";
    const text = choice?.delta?.content ?? "";
    if (!thought && !text) return;
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.thought += thought;
    this.text += text;
    write(this.shownThought, this.thought);
    this.shown.replaceChildren(...blocks(this.text));
    this.note("");
    this.grew();
  }

  /** Tokens, speed and how full the context is. */
  finish(contextTokens) {
    const facts = [];
    if (this.usage) {
      const { completion_tokens: made, total_tokens: held } = this.usage;
      facts.push(`${made} tokens`);
      if (made > 1) facts.push(`${((1000 * (made - 1)) / (this.lastMs - this.firstMs)).toFixed(1)} tokens/s`);
      facts.push(contextTokens ? `${held} of ${contextTokens} tokens of context` : `${held} tokens of context`);
    }
    if (this.reason === "length") facts.push("cut: its token limit is reached");
    if (!this.text && !this.thought) facts.push("the answer is empty");
    this.note(facts.join(" · "));
    this.grew();
  }

  fail(message) {
    this.note("");
    write(this.shownError, message);
    this.grew();
  }

  note(text) {
    write(this.shownNote, text);
  }
}

/** The text with its fenced code as blocks of their own. */
function blocks(text) {
  return text.split(/^```[^\n]*\n?/m).map((part, index) => (index % 2 ? element("pre", { tabIndex: 0 }, part.replace(/\n$/, "")) : part));
}
