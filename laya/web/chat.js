// Owns: the conversation: what is said, to which models, the answers side by side, stop, regenerate, and which
// conversation is shown. Its keeping is conversations.js's.

import { Answer } from "./answer.js";
import { forgetAll, forgetConversation, keepConversation, kept, owner } from "./conversations.js";
import { element } from "./element.js";
import { Picker } from "./picker.js";
import { streamChat } from "./server.js";

const NEAR_END_PX = 120; // who reads here follows new text; who scrolled up is left there
const TITLE_CHARACTERS = 48;

export class Chat {
  constructor({ form, box, send, stop, messages, model, other, badge, list, forget, isUser }) {
    Object.assign(this, { form, box, sendButton: send, stopButton: stop, messages, list, forgetButton: forget, isUser });
    this.picker = new Picker({ first: model, second: other, badge });
    this.running = null;
    this.forgotten = new WeakSet(); // conversations whose answer may still be ending
    this.owner = null;
    this.regenerateButton = element("button", { type: "button", className: "quiet regenerate" }, "Regenerate");
    this.regenerateButton.addEventListener("click", () => this.regenerate());
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
    list.addEventListener("change", () => this.show(kept().find(({ id }) => String(id) === list.value)));
    forget.addEventListener("click", () => {
      this.forgotten.add(this.now);
      forgetConversation(this.now.id);
      this.clear();
    });
    this.begin();
  }

  /** What a measurement of experts is about. */
  get spoken() {
    const documents = this.now.turns.flatMap(({ user, answers }) => [
      { topic: "you", text: user }, ...answers.slice(0, 1).map(({ text }) => ({ topic: "answers", text })),
    ]);
    return { model: this.picker.chosen[0], documents: documents.filter(({ text }) => text) };
  }

  offer(models) {
    this.picker.offer(models);
    this.sendButton.disabled = this.picker.models.size === 0;
    if (this.owner === owner()) return;
    this.owner = owner(); // another key has others
    this.begin();
    const [last] = kept();
    if (last) this.show(last);
    this.drawList();
  }

  begin() {
    this.stop();
    this.lastTurn = null; // the last one with an answer
    this.now = { id: Date.now(), title: "", updated: 0, models: [], turns: [] };
    this.messages.replaceChildren();
  }

  clear() {
    this.begin();
    this.drawList();
    this.box.focus();
  }

  forgetAll() {
    this.forgotten.add(this.now);
    this.begin();
    forgetAll();
  }

  show(conversation) {
    if (!conversation) return this.clear();
    this.begin();
    this.now = conversation;
    this.picker.choose(conversation.models);
    for (const { user, answers } of conversation.turns)
      this.lastTurn = this.drawTurn(user, answers.map((answer) => this.makeAnswer(answer.model, answers.length > 1, answer)));
    this.offerAgain();
    this.messages.scrollTop = this.messages.scrollHeight;
    this.drawList();
  }

  drawList() {
    const all = kept();
    const isKept = all.some(({ id }) => id === this.now.id);
    const options = all.map(({ id, title }) => element("option", { value: String(id) }, title));
    this.list.replaceChildren(...(isKept ? [] : [element("option", { value: "" }, "New chat")]), ...options);
    this.list.value = isKept ? String(this.now.id) : "";
    this.list.hidden = all.length === 0;
    this.forgetButton.hidden = !isKept;
  }

  stop() {
    this.running?.abort();
  }

  async send() {
    const text = this.box.value.trim();
    if (!text || this.running || !this.picker.chosen.length) return;
    this.box.value = "";
    await this.ask(text);
  }

  /** The last turn again, by the models that are chosen now. */
  async regenerate() {
    if (this.running) return;
    const [conversation, shown, turn] = [this.now, this.lastTurn, this.now.turns.pop()];
    const nBefore = conversation.turns.length;
    shown.hidden = true;
    await this.ask(turn.user);
    if (conversation.turns.length > nBefore) return shown.remove();
    conversation.turns.push(turn); // nothing came instead
    shown.hidden = false;
    if (this.box.value === turn.user) this.box.value = "";
  }

  async ask(text) {
    const [conversation, models] = [this.now, this.picker.chosen];
    const answers = models.map((model) => this.makeAnswer(model, models.length > 1));
    const shown = this.drawTurn(text, answers);
    this.regenerateButton.remove();
    this.messages.scrollTop = this.messages.scrollHeight;
    const running = new AbortController();
    this.setRunning(running);
    const faults = await Promise.all(answers.map((answer, place) => this.have(answer, place, text, running.signal)));
    if (this.running === running) this.setRunning(null);
    if (this.forgotten.has(conversation)) return;
    if (answers.some((answer) => answer.text || answer.thought)) {
      conversation.turns.push({ user: text, answers: answers.map((answer) => answer.kept) });
      Object.assign(conversation, { title: conversation.title || text.slice(0, TITLE_CHARACTERS), updated: Date.now(), models });
      keepConversation(conversation);
      this.lastTurn = shown;
    } else if (this.now === conversation && !this.box.value) {
      this.box.value = text; // a message that got no answer goes back to where it was written
    }
    if (this.now !== conversation) return;
    answers.forEach((answer, place) => faults[place] && answer.fail(faults[place], this.remedies(shown, text)));
    this.offerAgain();
    this.drawList();
  }

  /** One answer from its beginning to its end; gives the fault, where there is one. */
  async have(answer, place, text, signal) {
    const { model } = answer;
    const messages = [...this.now.turns.flatMap((turn) => {
      const given = turn.answers[place] ?? turn.answers[0];
      return [{ role: "user", content: turn.user }, ...(given?.text ? [{ role: "assistant", content: given.text }] : [])];
    }), { role: "user", content: text }];
    answer.waitFor(this.picker.isLoaded(model));
    try {
      for await (const piece of streamChat({ model, messages, stream_options: { include_usage: true } }, signal)) answer.take(piece);
      answer.finish(this.picker.windowOf(model));
    } catch (fault) {
      if (fault.name !== "AbortError") return fault;
      answer.stop();
    }
    return null;
  }

  remedies(shown, text) {
    const retry = async () => {
      if (this.running) return;
      shown.remove();
      if (this.box.value === text) this.box.value = "";
      await this.ask(text);
    };
    return { retry, newChat: () => this.clear(), isUser: this.isUser() };
  }

  setRunning(controller) {
    const hadFocus = [this.sendButton, this.stopButton].includes(document.activeElement);
    this.running = controller;
    this.sendButton.hidden = Boolean(controller);
    this.stopButton.hidden = !controller;
    this.messages.setAttribute("aria-busy", String(Boolean(controller))); // read out whole, not word by word
    if (hadFocus) (controller ? this.stopButton : this.box).focus();
  }

  makeAnswer(model, isNamed, given = null) {
    return new Answer({ model, isNamed, kept: given, grew: () => this.follow() });
  }

  drawTurn(text, answers) {
    const user = element("div", { className: "message user" }, element("span", { className: "hidden" }, "You: "), element("div", { className: "text" }, text));
    const beside = element("div", { className: `answers${answers.length > 1 ? " two" : ""}` }, ...answers.map((answer) => answer.element));
    const turn = element("div", { className: "turn" }, user, beside);
    this.messages.append(turn);
    return turn;
  }

  offerAgain() {
    const last = this.messages.lastElementChild;
    if (last && last === this.lastTurn) last.append(this.regenerateButton);
  }

  follow() {
    const list = this.messages;
    if (list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX) list.scrollTop = list.scrollHeight;
  }
}
