// Owns: the heat map of a Mixture-of-Experts model: which experts of each layer the words of the chat use.

import { element, write } from "./element.js";
import { refusalCard } from "./refusal.js";
import { ask } from "./server.js";

const TEXT_MOST = 20_000; // characters of the end of the conversation; the server takes 64 KiB
const WARMEST = 3; // times the fair share: as dark as it gets

export class Experts {
  /** chat: whose conversation is measured: `{model, documents}`. */
  constructor({ card, box, chat }) {
    this.card = card;
    this.chat = chat;
    this.running = null;
    this.button = element("button", { type: "button", className: "quiet" }, "Measure this chat");
    this.part = element("select", { "aria-label": "Which words", hidden: true });
    this.said = element("p", { className: "faint", role: "status" });
    this.result = element("div", { className: "heat-box" });
    box.append(element("div", { className: "row" }, this.button, this.part), this.said, this.result);
    this.button.addEventListener("click", () => (this.running ? this.running.abort() : this.measure()));
    this.part.addEventListener("change", () => this.draw());
  }

  /** Hidden until there is something to measure. */
  offer() {
    const { model, documents } = this.chat();
    this.card.hidden = documents.length === 0;
    if (!this.running && !this.found && !this.result.firstChild)
      write(this.said, `Which experts of ${model} the words of this chat use. An engine does not tell, so its file is computed once more beside it.`);
  }

  async measure() {
    const { model, documents } = this.chat();
    this.running = new AbortController();
    this.found = null;
    this.part.hidden = true;
    this.result.replaceChildren();
    write(this.button, "Stop");
    write(this.said, `Measuring ${model} …`);
    try {
      const path = model.split("/").map(encodeURIComponent).join("/");
      this.found = await ask("POST", `/admin/models/${path}/experts`, { documents: tail(documents) }, this.running.signal);
      this.offerParts();
      this.draw();
    } catch (fault) {
      write(this.said, "");
      if (fault.name === "AbortError") write(this.said, "Stopped.");
      else if (fault.code === "insufficient_memory") this.result.replaceChildren(refusalCard(fault, { model, retry: () => this.measure() }));
      else this.result.replaceChildren(element("p", { className: "error", role: "alert" }, fault.message));
    }
    this.running = null;
    write(this.button, "Measure this chat");
  }

  offerParts() {
    const names = ["all of it", ...(this.found.topics.length > 1 ? this.found.topics.map(({ topic }) => topic) : [])];
    this.part.replaceChildren(...names.map((name) => element("option", {}, name)));
    this.part.hidden = names.length === 1;
  }

  draw() {
    const { n_experts: nExperts, top_k: topK, band, topics, verdict, model } = this.found;
    const shown = topics.find(({ topic }) => topic === this.part.value) ?? this.found;
    const [low, high] = band;
    write(this.said, `${model}: ${shown.n_tokens} tokens, ${topK} of ${nExperts} experts a token. ${verdict}`);
    const head = element("tr", {}, element("th", {}, "layer"), ...Array.from({ length: nExperts }, (_, index) => element("th", {}, String(index))));
    const rows = shown.layers.map(({ layer, share }) => element(
      "tr", {}, element("th", {}, String(layer)),
      ...share.map((part, expert) => {
        const isEven = part >= low - 1e-6 && part <= high + 1e-6;
        const cell = element("td", { className: isEven ? "even" : part > high ? "above" : "below" }, nExperts > 16 ? "" : (100 * part).toFixed(1));
        cell.title = `layer ${layer}, expert ${expert}: ${(100 * part).toFixed(1)} %${isEven ? ", even" : ""}`;
        cell.style.setProperty("--heat", Math.min(1, (part * nExperts) / WARMEST));
        return cell;
      }),
    ));
    const percent = (value) => `${+(100 * value).toPrecision(3)}`;
    this.result.replaceChildren(
      element("div", { className: "scrolls", tabIndex: 0 }, element("table", { className: "heat", "aria-label": "Share of each expert, in percent" }, element("thead", {}, head), element("tbody", {}, ...rows))),
      element("p", { className: "faint" }, element("i", { className: "swatch band" }), `${percent(low)}-${percent(high)} %: even, between 0.8 and 1.2 of the fair share (${percent(1 / nExperts)} %). Rows are layers, columns experts.`),
    );
  }
}

/** The end of the conversation, as much as may be sent. */
function tail(documents) {
  let room = TEXT_MOST;
  const kept = [];
  for (const { topic, text } of [...documents].reverse()) {
    if (room <= 0) break;
    kept.unshift({ topic, text: text.slice(-room) });
    room -= text.length;
  }
  return kept;
}
