// Owns: what one request tells when it is clicked: where its time went, why it went where it did, what it said.

import { element } from "./element.js";
import { howOf, took, whoOf } from "./requests.js";
import { ask } from "./server.js";

const LOOK_EVERY_MS = 1000;
const MEANS = {
  read: "its body came in", route: "the engine was chosen", load: "the engine was loaded", queue: "it waited for a place",
  prefill: "the prompt was read", decode: "the answer was written", answer: "the engine answered",
};

export class Explain {
  /** openLog(engine, words): shows that line of an engine's log; null where logs may not be read. */
  constructor(dialog, { openLog }) {
    Object.assign(this, { dialog, openLog });
    this.id = null;
    dialog.addEventListener("close", () => clearTimeout(this.timer));
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  async open(id) {
    this.id = id;
    this.said = "";
    if (!this.dialog.open) {
      this.dialog.replaceChildren(this.head(id), element("p", { className: "faint" }, "Asking …"));
      this.dialog.showModal();
    }
    await this.look();
  }

  async look() {
    clearTimeout(this.timer);
    const id = this.id;
    let told;
    try {
      told = await ask("GET", `/v1/requests/${encodeURIComponent(id)}`);
    } catch (fault) {
      this.dialog.replaceChildren(this.head(id), element("p", { className: "error" }, fault.message));
      return;
    }
    if (id !== this.id || !this.dialog.open) return;
    this.draw(told);
    if (told.phase !== "ended") this.timer = setTimeout(() => this.look(), LOOK_EVERY_MS);
  }

  head(id) {
    const close = element("button", { type: "button", className: "quiet close", autofocus: true }, "Close");
    close.addEventListener("click", () => this.dialog.close());
    return element("div", { className: "card-head" }, element("h2", { id: "explain-title" }, `Request ${id}`), close);
  }

  draw(told) {
    const scrolled = this.dialog.scrollTop;
    const isEnded = told.phase === "ended";
    const state = isEnded ? [told.outcome, told.error?.code].filter(Boolean).join(", ") : howOf(told);
    const tokens = [told.prompt_tokens ? `${told.prompt_tokens} prompt tokens` : "", told.tokens ? `${told.tokens} tokens of answer` : ""];
    const facts = [whoOf(told), told.model, told.engine !== told.model ? told.engine : null, state, took(told.age_s), ...tokens];
    const parts = [this.head(told.id), element("p", {}, facts.filter(Boolean).join(" · "))];
    if (told.error) parts.push(element("p", { className: "error" }, told.error.message));
    if (told.outcome === "failed" && told.engine && this.openLog()) parts.push(this.logButton(told));
    parts.push(element("h3", {}, "Where its time went"), ...timesOf(told.parts));
    parts.push(element("h3", {}, "Why it went there"), ...routeOf(told));
    parts.push(element("h3", {}, "What it said"), bodyOf(told));
    const hadFocus = this.dialog.contains(document.activeElement);
    this.dialog.replaceChildren(...parts);
    if (hadFocus) this.dialog.querySelector(".close").focus();
    this.dialog.scrollTop = scrolled;
  }

  logButton(told) {
    const button = element("button", { type: "button", className: "quiet" }, "Show its line in the log");
    button.addEventListener("click", () => {
      this.dialog.close();
      this.openLog()(told.engine, `request ${told.id} failed`);
    });
    return button;
  }
}

/** A bar of the parts, and the same as a table. */
function timesOf(told) {
  const parts = told.filter((each) => each.ms > 0 || each.part !== "load"); // where nothing was loaded, nothing waited for it
  const total = parts.reduce((sum, each) => sum + each.ms, 0) || 1;
  const bar = element("div", { className: "times", role: "img", "aria-label": parts.map((each) => `${each.part} ${ms(each.ms)}`).join(", ") });
  const rows = parts.map((each) => {
    const slice = element("i", { className: `part ${each.part}`, title: `${each.part} ${ms(each.ms)}` });
    slice.style.flexGrow = each.ms;
    bar.append(slice);
    return element(
      "tr", {}, element("td", {}, element("i", { className: `swatch part ${each.part}` }), each.part),
      element("td", { className: "number" }, ms(each.ms)), element("td", { className: "number" }, `${((100 * each.ms) / total).toFixed(1)} %`),
      element("td", { className: "faint" }, MEANS[each.part] ?? ""),
    );
  });
  return [bar, element("div", { className: "scrolls", tabIndex: 0 }, element("table", {}, element("tbody", {}, ...rows)))];
}

/** `0.7 µs`, `12 ms`, `3.4 s`. */
export function ms(value) {
  if (value < 0.1) return `${(1000 * value).toFixed(1)} µs`;
  if (value < 1000) return `${value.toFixed(value < 10 ? 2 : 0)} ms`;
  return `${(value / 1000).toFixed(2)} s`;
}

function routeOf({ route, why_no_route: why, engine }) {
  if (!route) return [element("p", { className: "faint" }, `Not explained: ${why}.`)];
  const found = [element("p", {}, route.rule ? `The rule “${route.rule}” took it: ${route.models.join(", then ")}.` : "No rule took it: the model that it names serves it.")];
  const missed = route.verdicts.filter((verdict) => verdict.misses);
  if (missed.length) found.push(element("p", { className: "faint" }, `Rules that did not: ${missed.map((verdict) => `${verdict.rule} (${verdict.misses})`).join("; ")}.`));
  for (const tried of route.tried) {
    const head = ["candidate", "score", "sequences", "tokens", ""].map((word) => element("th", {}, word));
    const rows = tried.candidates.map((each) => element(
      "tr", { className: each.is_chosen ? "chosen" : "" }, element("td", {}, each.name),
      element("td", { className: "number" }, each.score === null ? "none" : each.score.toExponential(2)),
      element("td", { className: "number" }, String(each.n_seqs)), element("td", { className: "number" }, String(each.tokens)),
      element("td", {}, each.is_chosen ? "chosen" : each.why_not || (each.has_room ? "has room" : "is full")),
    ));
    found.push(
      element("p", {}, `${tried.model}, by the policy ${tried.policy}: ${tried.why}.`),
      element("div", { className: "scrolls", tabIndex: 0 }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))),
    );
  }
  found.push(element("p", { className: "faint" }, `As the route table is now${engine ? `; it went to ${engine}` : ""}.`));
  return found;
}

function bodyOf({ body, is_captured: isCaptured }) {
  if (body) return element("pre", { className: "body", tabIndex: 0 }, pretty(body));
  const words = isCaptured ? "It came before its body was kept, or had none." : "Not kept: request_log.content is off, so nobody can read it here.";
  return element("p", { className: "faint" }, words);
}

function pretty(body) {
  try {
    return JSON.stringify(JSON.parse(body), null, 2);
  } catch {
    return body; // the beginning of a long one
  }
}
