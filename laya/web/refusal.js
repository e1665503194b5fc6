// Owns: the card of a refusal, the same wherever it comes from: what was needed, what there is, and up to three buttons
// that each do something about it. What fits is asked of the server's planner.

import { element, size } from "./element.js";
import { ask } from "./server.js";

const BUTTONS = 3;
let does = {}; // load(model, flags, how), unload(model), tryOut(model): the page's

export function setRemedies(remedies) {
  does = { ...does, ...remedies };
}

/** The card. model: what was refused. retry, newChat: where there is something to do again. `isUser` may change nothing. */
export function refusalCard(fault, { model, retry, newChat, isUser = false } = {}) {
  const buttons = element("div", { className: "ways" });
  const card = element(
    "div", { className: "refusal", role: "alert" },
    element("p", { className: "refusal-title" }, element("strong", {}, titleOf(fault, model))),
    ...needAndHave(fault.details ?? {}),
    buttons, element("p", { className: "refusal-words error" }, fault.message),
  );
  const show = (remedies) => buttons.replaceChildren(...remedies.slice(0, BUTTONS).map((remedy) => makeButton(remedy, card)));
  const given = { model, retry, newChat };
  buttons.append(element("span", { className: "faint" }, isUser ? "" : "Asking what would fit …"));
  if (isUser) show(simple(fault, given));
  else remedies(fault, given).then(show, () => show(simple(fault, given)));
  return card;
}

const TITLES = {
  insufficient_memory: "does not fit", engine_out_of_memory: "took more than it may", memory_busy: "waits for memory",
  context_length_exceeded: "has too short a context", queue_full: "has a full queue", rate_limit_exceeded: "is asked too often",
  model_loading: "is loading", memory_pressure: "is not loaded: memory is short",
};

function titleOf(fault, model) {
  return `${model ?? "This"} ${TITLES[fault.code] ?? "was refused"}`;
}

function needAndHave(details) {
  let pair = null;
  if (details.need_bytes != null) pair = [size(details.need_bytes), size(details.available_bytes)];
  else if (details.limit_bytes != null) pair = [`more than ${size(details.peak_bytes)}`, size(details.limit_bytes)];
  else if (details.prompt_tokens != null) pair = [`${details.prompt_tokens} tokens`, `${details.max_seq_len} tokens`];
  else if (details.allowed != null) pair = [`${details.used + details.asked}`, `${details.allowed}`];
  if (!pair) return [];
  const row = (word, value) => [element("dt", {}, word), element("dd", {}, value)];
  return [element("dl", { className: "need-have" }, ...row("need", pair[0]), ...row("have", pair[1]))];
}

function makeButton({ words, note, act }, card) {
  const button = element("button", { type: "button", className: "quiet way" }, element("b", {}, words), note ? ` ${note}` : "");
  button.addEventListener("click", async () => {
    for (const each of card.querySelectorAll("button")) each.disabled = true;
    await act();
    for (const each of card.querySelectorAll("button")) each.disabled = false; // who made the card takes it away
  });
  return button;
}

/** What can be done without asking the server anything. */
function simple(fault, { retry, newChat }) {
  const found = [];
  if (retry) found.push({ words: "Try again", act: retry });
  if (newChat && fault.code === "context_length_exceeded") found.unshift({ words: "Start a new chat", act: newChat });
  return found;
}

async function remedies(fault, given) {
  const { model } = given;
  const after = (change) => async () => {
    if ((await change()) !== false && given.retry) await given.retry();
  };
  const details = fault.details ?? {};
  const found = [];
  if (fault.code === "insufficient_memory" || fault.code === "engine_out_of_memory") {
    const trial = await ask("GET", `/admin/fit?${new URLSearchParams({ model })}`);
    for (const way of trial.suggestions) found.push({ words: way.note, note: size(way.total_bytes), act: after(() => does.load(model, way.flags)) });
    for (const other of details.models ?? []) found.push({ words: `Load ${other} instead`, act: () => does.load(other) });
    if (found.length >= BUTTONS) return found;
    found.push({ words: "Load it anyway", note: "under the ceiling of what is free", act: after(() => does.load(model, "", "anyway=true")) });
    found.push({ words: "Try other settings", act: () => does.tryOut(model) });
  } else if (fault.code === "memory_busy") {
    for (const other of Object.keys(details.held_bytes ?? {})) found.push({ words: `Unload ${other}`, note: size(details.held_bytes[other]), act: after(() => does.unload(other)) });
    found.push({ words: "Try other settings", act: () => does.tryOut(model) });
  } else if (fault.code === "context_length_exceeded") {
    const { steps } = await ask("GET", `/admin/fit?${new URLSearchParams({ model })}`);
    for (const tokens of steps.max_seq_len.filter((each) => each > details.prompt_tokens)) {
      const flags = `--max-seq-len ${tokens}`;
      const trial = await ask("GET", `/admin/fit?${new URLSearchParams({ model, flags })}`);
      if (!trial.fits) break;
      if (tokens < 1.25 * details.prompt_tokens) continue; // no room for an answer
      found.push({ words: `Load it with ${tokens} tokens`, note: size(trial.plan.devices.reduce((sum, each) => sum + each.total_bytes, 0)), act: after(() => does.load(model, flags)) });
      break;
    }
    found.push({ words: "Try other settings", act: () => does.tryOut(model) });
  } else if (["engine_crashed", "engine_failed", "engine_stuck"].includes(fault.code) && model) {
    found.push({ words: "Load it again", act: after(() => does.load(model)) });
    found.push({ words: "Try other settings", act: () => does.tryOut(model) });
  }
  return [...found, ...simple(fault, given)];
}
