// Owns: the last ten minutes of each device as a curve, with the guard's events as flags on it. Its samples are the
// server's (/admin/history), so a page that was just opened has them too.

import { element, size } from "./element.js";
import { ask } from "./server.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [600, 56]; // units of its own: the drawing is stretched to the bar
const QUIET = new Set(["loading", "ready", "reloaded", "tuned", "resumed"]); // the rows say so themselves
const [AT, MEASURED, RESERVED, , BUDGET] = [0, 1, 2, 3, 4]; // of a sample

export class Curves {
  constructor(devices) {
    this.devices = devices; // the element that holds the bars
    this.forget();
  }

  forget() {
    this.last = 0;
    this.samples = new Map();
  }

  async look(events) {
    const { devices, kept_s } = await ask("GET", `/admin/history?after=${this.last.toFixed(3)}`);
    for (const [device, fresh] of Object.entries(devices)) {
      const kept = [...(this.samples.get(device) ?? []), ...fresh];
      this.last = Math.max(this.last, kept.at(-1)?.[AT] ?? 0);
      this.samples.set(device, kept.filter((sample) => sample[AT] > this.last - kept_s));
    }
    for (const [device, samples] of this.samples) {
      const row = this.devices.querySelector(`.device[data-id="${CSS.escape(device)}"] .curve`);
      if (row && samples.length > 1) draw(row, samples, kept_s, events);
    }
  }
}

function draw(target, samples, kept_s, events) {
  const end = samples.at(-1)[AT];
  const x = (at) => WIDTH * (1 - (end - at) / kept_s);
  const top = Math.max(...samples.map((sample) => Math.max(sample[BUDGET], sample[RESERVED], sample[MEASURED])), 1);
  const peak = Math.max(...samples.map((sample) => Math.max(sample[RESERVED], sample[MEASURED])));
  const scale = Math.min(top, Math.max(4 * peak, top / 16)); // small models are still seen
  const y = (bytes) => HEIGHT - 2 - (HEIGHT - 8) * Math.min(1, bytes / scale);
  const line = (field) => samples.map((sample) => `${x(sample[AT]).toFixed(1)},${y(sample[field]).toFixed(1)}`).join(" ");
  const from = x(samples[0][AT]).toFixed(1);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(
    shape("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 2, y2: HEIGHT - 2 }),
    shape("polygon", { class: "area", points: `${from},${HEIGHT - 2} ${line(MEASURED)} ${WIDTH},${HEIGHT - 2}` }),
    shape("polyline", { class: "reserved", points: line(RESERVED) }),
    shape("polyline", { class: "now", points: line(MEASURED) }),
  );
  if (scale >= top) svg.append(shape("polyline", { class: "ceiling", points: line(BUDGET) }));
  const flags = events.filter((event) => !QUIET.has(event.kind) && event.at > end - kept_s);
  const marks = flags.map((event) => flag(event, (100 * x(event.at)) / WIDTH));
  const words = `The last ten minutes: at most ${size(peak)}, now ${size(samples.at(-1)[MEASURED])} measured. ${flags.length} ${flags.length === 1 ? "event" : "events"}.`;
  const had = target.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  target.replaceChildren(
    svg, ...marks,
    element("p", { className: "curve-scale faint" },
      element("span", {}, "10 min ago"), element("span", {}, `up to ${size(scale)}`), element("span", {}, "now")),
    element("p", { className: "hidden" }, words),
  );
  if (had) marks.find((mark) => mark.dataset.id === had)?.focus();
}

function flag(event, left) {
  const at = new Date(event.at * 1000).toLocaleTimeString();
  const made = element("button", { type: "button", className: `flag ${event.level}`, "aria-label": `${at}: ${event.text}` },
    element("span", { className: "flag-text" }, `${at}  ${event.text}`));
  made.dataset.id = event.id;
  made.style.left = `${Math.max(0, Math.min(100, left))}%`;
  if (left > 60) made.classList.add("to-left");
  return made;
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
