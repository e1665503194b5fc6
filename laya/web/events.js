// Owns: what happened to engines and memory, as the server tells it: the newest few, newest first.

import { element, keep } from "./element.js";
import { ask } from "./server.js";

const SHOWN = 6;
const KEPT = 100; // for the flags of the curve

export class Events {
  constructor(section, list) {
    this.section = section;
    this.list = list;
    this.forget();
  }

  /** The server may be another one now, whose events are numbered from the start. */
  forget() {
    this.last = 0;
    this.kept = [];
    this.all = [];
  }

  async look() {
    const { events } = await ask("GET", `/admin/events?after=${this.last}`);
    if (events.length) this.last = events.at(-1).id;
    this.all = [...this.all, ...events].slice(-KEPT);
    this.kept = [...events.reverse(), ...this.kept].slice(0, SHOWN);
    this.section.hidden = this.kept.length === 0;
    keep(this.list, this.kept, (event) => String(event.id), makeEvent, () => {});
  }
}

function makeEvent(event) {
  const at = new Date(event.at * 1000);
  return element(
    "li", { className: `event ${event.level}` },
    element("time", { dateTime: at.toISOString(), className: "faint" }, at.toLocaleTimeString()),
    element("span", {}, event.text),
  );
}
