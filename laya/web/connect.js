// Owns: the dialog whose lines connect another program to this server. The lines are the server's (/v1/connect, the same
// as `laya connect`), with the key that this page has; the key is shown when somebody asks to see it, and copied always.

import { element, write } from "./element.js";
import { ask, theKey } from "./server.js";

export class Connect {
  constructor(dialog) {
    this.dialog = dialog;
    this.models = [];
    this.client = 0;
    this.model = element("select", { id: "connect-model" });
    this.tabs = element("div", { className: "tabs", role: "group", "aria-label": "Clients" });
    this.where = element("p", { className: "where" });
    this.text = element("pre", { tabIndex: 0, "aria-label": "Lines to paste" });
    this.copy = element("button", { type: "button" }, "Copy");
    this.shows = element("input", { type: "checkbox", id: "connect-key" });
    this.keyRow = element("label", { className: "check", htmlFor: "connect-key" }, this.shows, " show the key");
    this.said = element("p", { className: "faint", role: "status" });
    const close = element("button", { type: "button", className: "quiet", "aria-label": "Close" }, "Close");
    close.addEventListener("click", () => dialog.close());
    dialog.append(
      element("div", { className: "fit-head" }, element("h2", { id: "connect-title" }, "Connect"), close),
      element("div", { className: "row" }, element("label", { htmlFor: "connect-model", className: "faint" }, "model"), this.model),
      this.tabs, this.where, this.text, element("div", { className: "fit-foot" }, this.copy, this.keyRow, this.said),
    );
    this.model.addEventListener("change", () => this.look());
    this.shows.addEventListener("change", () => this.draw());
    this.copy.addEventListener("click", () => this.take());
  }

  /** Models that chat, loaded ones first. */
  offer(models) {
    this.models = models.filter((model) => model.task === "chat").map((model) => model.id);
  }

  async open() {
    const chosen = this.model.value;
    this.model.replaceChildren(...this.models.map((id) => element("option", { value: id }, id)));
    if (this.models.includes(chosen)) this.model.value = chosen;
    this.dialog.showModal();
    await this.look();
  }

  async look() {
    write(this.said, "");
    try {
      this.told = await ask("GET", `/v1/connect?${new URLSearchParams({ model: this.model.value })}`);
      this.draw();
    } catch (fault) {
      write(this.where, fault.message);
    }
  }

  draw() {
    const { clients, context_length, needs_key } = this.told;
    this.tabs.replaceChildren(...clients.map((client, index) => {
      const tab = element("button", { type: "button", className: "quiet tab", "aria-pressed": String(index === this.client) }, client.title);
      tab.addEventListener("click", () => {
        this.client = index;
        this.draw();
        this.tabs.children[index].focus();
      });
      return tab;
    }));
    const { text, where, install } = clients[this.client];
    this.where.replaceChildren(`${where} It is installed by `, element("code", {}, install), ".");
    write(this.text, needs_key && !this.shows.checked ? text.replaceAll(theKey(), "••••••••") : text);
    this.keyRow.hidden = !needs_key;
    const window = context_length ? `Context: ${context_length.toLocaleString("en")} tokens.` : "";
    write(this.said, needs_key ? window : `${window} This server needs no key: any text does.`);
  }

  async take() {
    const { text } = this.told.clients[this.client];
    try {
      await navigator.clipboard.writeText(text);
      write(this.said, "Copied.");
    } catch { // a page that is not of this machine, without TLS, has no clipboard
      this.shows.checked = true;
      this.draw();
      getSelection().selectAllChildren(this.text);
      write(this.said, "Selected: the browser lets no page copy here. Press Ctrl+C.");
    }
  }
}
