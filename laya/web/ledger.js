// Owns: the bar of each device: other programs, what models hold and were promised, the ceiling, and a model's ghost on it.
// Draws what the server says; asks and computes nothing but widths.

import { element, keep, size, write } from "./element.js";

const TERMS = { kv_cache: "KV cache", prompt_cache: "prompt cache", correction: "learned of earlier runs" };
const SHARE_WITH_NAME = 0.07; // of the bar: what is narrower has its name in the line below alone

/** What the plan of a model counts on one device, in words. */
export function termsOf(device) {
  const terms = Object.entries(device.terms).filter(([, bytes]) => bytes > 0);
  return terms.map(([name, bytes]) => `${TERMS[name] ?? name.replaceAll("_", " ")} ${size(bytes)}`).join(" · ");
}

export class Ledger {
  constructor(target) {
    this.target = target;
    this.rooms = new Map(); // device -> what there is room for, as the server says it
    this.trial = null; // what a load would do
    this.state = null;
  }

  setRooms(rooms) {
    this.rooms = new Map(rooms.map((room) => [room.device, room]));
    if (this.state) this.draw(this.state);
  }

  /** Show what a load would do; null: nothing. */
  setTrial(trial) {
    this.trial = trial;
    if (this.state) this.draw(this.state);
  }

  draw(state) {
    this.state = state;
    keep(this.target, state.devices, (device) => device.device, makeDevice, (row, device) => this.drawDevice(row, device));
  }

  drawDevice(row, device) {
    const room = this.rooms.get(device.device);
    const [used, ...rest] = (room?.sentence ?? `${size(device.reserved_bytes)} of ${size(device.budget_bytes)}.`).split(/(?<=[a-zA-Z]\.) /);
    write(row.querySelector(".device-name"), device.name);
    write(row.querySelector(".device-used"), used);
    write(row.querySelector(".device-room"), rest.join(" "));
    const mark = Math.min(1, (device.others_bytes + device.budget_bytes) / device.total_bytes);
    const text = row.querySelector(".mark-text");
    row.querySelector(".mark").style.left = text.style.left = `${100 * mark}%`;
    text.style.transform = mark > 0.8 ? "translateX(-100%)" : mark < 0.2 ? "none" : "";
    write(text, `ceiling ${size(device.budget_bytes)}`);
    const bar = row.querySelector(".bar");
    const limit = `${size(device.measured_bytes)} measured, ${size(device.reserved_bytes)} promised. ${size(device.others_bytes)} of other programs, ${size(device.total_bytes)} in all. The ceiling follows from: ${device.limit}.`;
    bar.setAttribute("aria-label", `${device.name}: ${used} ${rest.join(" ")} ${limit}`);
    for (const name of ["total", "others", "measured", "reserved", "budget"]) bar.dataset[name] = device[`${name}_bytes`];
    const leaving = new Set(this.trial?.leaving ?? []);
    const slices = slicesOf(device, this.state, leaving, this.trial?.model);
    keep(bar.querySelector(".slices"), slices, (slice) => slice.id, (slice) => makeSlice(row, slice), (shown, slice) => {
      shown.className = `slice ${slice.kind}${slice.isLeaving ? " leaving" : ""}`;
      shown.style.width = `${(100 * slice.bytes) / device.total_bytes}%`;
      shown.dataset.bytes = slice.bytes;
      shown.dataset.about = slice.about;
      shown.setAttribute("aria-label", slice.about);
      shown.tabIndex = slice.bytes ? 0 : -1;
      write(shown.firstChild, slice.bytes / device.total_bytes > SHARE_WITH_NAME ? slice.name : "");
    });
    const shown = bar.querySelector(".slice:hover, .slice:focus");
    const detail = row.querySelector(".device-detail");
    detail.dataset.rest = limit;
    write(detail, shown?.dataset.about ?? limit);
    drawGhost(bar.querySelector(".ghost"), device, slices, this.trial);
  }
}

function makeDevice() {
  return element(
    "div", { className: "device" },
    element("div", { className: "device-bar" },
      element("div", { className: "bar", role: "group" },
        element("div", { className: "slices" }),
        element("div", { className: "ghost", hidden: true }, element("span")),
        element("span", { className: "mark" }), element("span", { className: "mark-text" })),
      element("p", { className: "device-detail faint" }),
      element("div", { className: "curve" })),
    element("p", { className: "device-sentence" },
      element("span", { className: "device-name" }), element("strong", { className: "device-used" }), " ",
      element("span", { className: "device-room" })),
  );
}

function makeSlice(row, slice) {
  const made = element("div", { className: `slice ${slice.kind}`, role: "img" }, element("span"));
  const detail = row.querySelector(".device-detail");
  for (const name of ["mouseenter", "focus"]) made.addEventListener(name, () => write(detail, made.dataset.about));
  for (const name of ["mouseleave", "blur"]) made.addEventListener(name, () => write(detail, detail.dataset.rest));
  return made;
}

/** Left to right: what others hold, then of each engine what was measured and what was promised beyond that; what would
 *  leave comes last, where the ghost begins. */
function slicesOf(device, state, leaving, tried) {
  const others = `Other programs: ${size(device.others_bytes)}`;
  const slices = [{ id: "others", kind: "others", bytes: device.others_bytes, about: others, name: "other programs" }];
  const owners = Object.entries(state.ledger[device.device]?.owners ?? {});
  const models = new Map(state.models.map((model) => [model.id, model]));
  const held = owners.map(([engine, { promised, measured }]) => {
    const model = models.get(engine) ?? models.get(engine.replace(/#\d+'*$/, ""));
    const plan = model?.plan?.devices.find((planned) => planned.device === device.device);
    const isLeaving = leaving.has(model?.id ?? engine) || (tried != null && model?.id === tried);
    const live = device.device === "cpu" && model ? liveBytes(model, engine) : measured; // of RAM it is known as of now
    return { engine, promised, measured: live, plan, isLeaving };
  });
  held.sort((a, b) => a.isLeaving - b.isLeaving);
  for (const { engine, promised, measured, plan, isLeaving } of held) {
    const ratio = measured ? `, ${(promised / measured).toFixed(2)} × the peak` : "";
    const about = `${engine}: ${size(measured)} measured of ${size(promised)} planned${ratio}${plan ? `. ${termsOf(plan)}` : ""}`;
    slices.push({ id: `${engine} measured`, kind: "measured", bytes: measured, about, name: engine, isLeaving });
    const rest = Math.max(0, promised - measured);
    slices.push({ id: `${engine} promised`, kind: "promised", bytes: rest, about, name: rest > measured ? engine : "", isLeaving });
  }
  return slices;
}

/** What one engine of a model holds of RAM; 0 where it has none. */
function liveBytes(model, engine) {
  const one = model.extra?.replicas?.find((replica) => replica.name === engine) ?? model;
  return one.pid ? one.measured_bytes ?? 0 : 0;
}

/** Where the model would lie: from the end of what stays. What goes past the ceiling is cut at the bar's end. */
function drawGhost(ghost, device, slices, trial) {
  const plan = trial?.plan.devices.find((planned) => planned.device === device.device);
  ghost.hidden = !plan;
  if (!plan) return;
  const stays = slices.filter((slice) => !slice.isLeaving).reduce((sum, slice) => sum + slice.bytes, 0);
  const left = Math.min(0.97, stays / device.total_bytes);
  const width = Math.min(1 - left, plan.total_bytes / device.total_bytes);
  const label = width > 0.3 ? "wide" : left + width > 0.6 ? "to-left" : "";
  ghost.className = `ghost ${trial.fits ? "fits" : "too-big"} ${label}`;
  ghost.style.left = `${100 * left}%`;
  ghost.style.width = `${100 * width}%`;
  ghost.dataset.bytes = plan.total_bytes;
  write(ghost.firstChild, `${trial.model} ${size(plan.total_bytes)}`);
}
