// Owns: the bar of each device: other programs, what models hold and were promised, and the ceiling. Draws, asks nothing.

import { element, keep, size, write } from "./element.js";

const TERMS = { kv_cache: "KV cache", prompt_cache: "prompt cache" };

/** What the plan of a model counts on one device, in words. */
export function termsOf(device) {
  const terms = Object.entries(device.terms).filter(([, bytes]) => bytes > 0);
  return terms.map(([name, bytes]) => `${TERMS[name] ?? name} ${size(bytes)}`).join(", ");
}

export function drawDevices(target, state) {
  keep(target, state.devices, (device) => device.device, makeDevice, (row, device) => drawDevice(row, device, state));
}

function makeDevice() {
  return element(
    "div", { className: "device" },
    element("p", { className: "device-line" }, element("span", { className: "of-models" }), element("span", { className: "faint of-others" })),
    element("div", { className: "bar", role: "img" },
      element("div", { className: "slices" }),
      element("span", { className: "mark" }), element("span", { className: "mark-text" })),
    element("p", { className: "faint device-limit" }),
  );
}

function drawDevice(row, device, state) {
  const free = Math.max(0, device.budget_bytes - device.reserved_bytes);
  const [line, ofOthers, limit] = [".of-models", ".of-others", ".device-limit"].map((name) => row.querySelector(name));
  const sentence = `${size(device.reserved_bytes)} promised of ${size(device.budget_bytes)} for models, ${size(free)} left`;
  if (line.dataset.said !== sentence) {
    line.dataset.said = sentence;
    line.replaceChildren(element("b", {}, device.name), `  ${sentence}`);
  }
  write(ofOthers, `${size(device.others_bytes)} other programs, ${size(device.total_bytes)} in all`);
  write(limit, `Measured ${size(device.measured_bytes)}. The ceiling follows from: ${device.limit}.`);
  const mark = Math.min(1, (device.others_bytes + device.budget_bytes) / device.total_bytes);
  const text = row.querySelector(".mark-text");
  row.querySelector(".mark").style.left = text.style.left = `${100 * mark}%`;
  text.style.transform = mark > 0.8 ? "translateX(-100%)" : mark < 0.2 ? "none" : "";
  write(text, `ceiling ${size(device.budget_bytes)}`);
  const bar = row.querySelector(".bar");
  bar.setAttribute("aria-label", `${device.name}: ${sentence}. ${ofOthers.textContent}. ${limit.textContent}`);
  for (const name of ["total", "others", "measured", "reserved", "budget"]) bar.dataset[name] = device[`${name}_bytes`];
  keep(row.querySelector(".slices"), slicesOf(device, state), (slice) => slice.id,
    (slice) => element("div", { className: `slice ${slice.kind}` }),
    (shown, slice) => {
      shown.style.width = `${(100 * slice.bytes) / device.total_bytes}%`;
      shown.title = slice.about;
      shown.dataset.bytes = slice.bytes;
    });
}

/** Left to right: what others hold, then what was measured and what was promised beyond that: in RAM by model; a
 *  card's memory is measured for all of them together. */
function slicesOf(device, state) {
  const slices = [{ id: "others", kind: "others", bytes: device.others_bytes, about: `Other programs: ${size(device.others_bytes)}` }];
  if (device.device !== "cpu") {
    const about = `Models: ${size(device.measured_bytes)} measured, ${size(device.reserved_bytes)} promised`;
    slices.push({ id: "measured", kind: "measured", bytes: device.measured_bytes, about });
    const promised = Math.max(0, device.reserved_bytes - device.measured_bytes);
    return [...slices, { id: "promised", kind: "promised", bytes: promised, about }];
  }
  for (const model of state.models) {
    const plan = model.plan?.devices.find((planned) => planned.device === device.device);
    if (!plan) continue;
    const measured = model.pid ? model.measured_bytes ?? 0 : 0;
    const about = `${model.id}: measured ${size(measured)} of ${size(plan.total_bytes)} promised (${termsOf(plan)})`;
    slices.push({ id: `${model.id} measured`, kind: "measured", bytes: measured, about });
    slices.push({ id: `${model.id} promised`, kind: "promised", bytes: Math.max(0, plan.total_bytes - measured), about });
  }
  return slices;
}
