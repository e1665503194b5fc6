// Owns: the list of requests: who asked, which model, how far it is or what it waits for, since when, and its end.

import { element, keep, span, write } from "./element.js";
import { ask } from "./server.js";

const ENDED_SHOWN = 6;

export class Requests {
  /** open(id): explain that request. changed(): look at the server at once. failed(fault): a cancel was not possible. */
  constructor({ card, list, open, changed, failed }) {
    Object.assign(this, { card, list, open, changed, failed });
    this.cancelling = new Set();
    this.ended = element("ul", { className: "requests ended" });
    this.title = element("h3", {}, "Just finished");
    this.none = element("p", { className: "faint" }, "Nothing runs.");
    list.before(this.none);
    list.after(this.title, this.ended);
  }

  draw({ data, ended }) {
    this.card.hidden = data.length + ended.length === 0;
    this.none.hidden = data.length > 0;
    keep(this.list, data, (each) => each.id, (each) => this.make(each, true), (row, each) => this.update(row, each));
    this.title.hidden = ended.length === 0;
    // two requests may have been given one id
    const shown = ended.slice(0, ENDED_SHOWN).map((each) => ({ ...each, place: `${each.id} ${each.ended}` }));
    keep(this.ended, shown, (each) => each.place, (each) => this.make(each, false), (row, each) => updateEnded(row, each));
  }

  make({ id }, isLive) {
    const open = element(
      "button", { type: "button", className: "request-open", title: "Where its time goes, and why it went there" },
      element("b", { className: "who" }), element("span", { className: "what" }), element("span", { className: "how" }),
      element("span", { className: "since faint" }),
    );
    open.addEventListener("click", () => this.open(id));
    const row = element("li", { className: "request" }, open);
    if (!isLive) return row;
    const cancel = element("button", { type: "button", className: "quiet cancel", "aria-label": `Cancel ${id}` }, "Cancel");
    cancel.addEventListener("click", () => this.cancel(id));
    row.append(cancel);
    return row;
  }

  update(row, request) {
    const [who, what, how, since] = [".who", ".what", ".how", ".since"].map((name) => row.querySelector(name));
    write(who, whoOf(request));
    write(what, request.model ?? "no model yet");
    write(how, howOf(request));
    how.className = `how ${request.phase}`;
    write(since, `since ${new Date(request.since * 1000).toLocaleTimeString()}, ${span(request.age_s)}`);
    row.querySelector(".cancel").disabled = this.cancelling.has(request.id);
  }

  async cancel(id) {
    this.cancelling.add(id);
    this.changed();
    try {
      await ask("DELETE", `/v1/requests/${encodeURIComponent(id)}`);
    } catch (fault) {
      if (fault.status !== 404) this.failed(fault); // else it ended by itself meanwhile
    } finally {
      this.cancelling.delete(id);
      this.changed();
    }
  }
}

/** The key's name; without keys, the machine it came from. */
export function whoOf(request) {
  return request.key ?? request.client ?? "this server";
}

/** `prefill 41 %`, `62.1 tok/s`, `waits for qwen to unload, 6 s`. */
export function howOf(request) {
  if (request.waits_for) return `waits for ${request.waits_for}, ${span(request.age_s)}`;
  if (request.phase === "queued") return "is being let in";
  if (request.phase === "prefill") {
    if (!request.prompt_tokens) return "prefill";
    return `prefill ${Math.floor((100 * request.prefill_tokens) / request.prompt_tokens)} %`;
  }
  return request.tokens_per_s ? `${request.tokens_per_s.toFixed(1)} tok/s, ${request.tokens} tokens` : "answers";
}

function updateEnded(row, request) {
  const [who, what, how, since] = [".who", ".what", ".how", ".since"].map((name) => row.querySelector(name));
  write(who, whoOf(request));
  write(what, request.model ?? "no model");
  how.className = `how ${request.outcome}`;
  const figures = request.tokens ? `${request.tokens} tokens${request.tokens_per_s ? `, ${request.tokens_per_s.toFixed(1)} tok/s` : ""}` : "";
  write(how, [request.outcome, request.error?.code, figures].filter(Boolean).join(", "));
  write(since, `${new Date(request.ended * 1000).toLocaleTimeString()}, took ${took(request.age_s)}`);
}

export function took(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
}
