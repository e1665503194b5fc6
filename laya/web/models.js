// Owns: the list of models: state, memory, what they work on, and the button that loads or unloads one.

import { element, keep, size, span, write } from "./element.js";
import { termsOf } from "./ledger.js";
import { ask } from "./server.js";

const RANK = { loading: 0, draining: 0, degraded: 1, ready: 1, failed: 2, unloaded: 3 };
const ACTIONS = {
  unloaded: ["load", "Load"], failed: ["load", "Load again"], ready: ["unload", "Unload"],
  degraded: ["unload", "Unload"],
  loading: ["unload", "Stop"], draining: [null, "Unloading"],
};

/** Whether a model answers, as well as it should or not. */
export function isLoaded({ state }) {
  return state === "ready" || state === "degraded";
}

export class Models {
  /** `changed` is called when something was asked for, so that the page looks at the server at once. */
  constructor(list, said, changed) {
    this.list = list;
    this.said = said;
    this.changed = changed;
    this.asked = new Map(); // model -> what it was asked to do and has not answered yet
    this.refused = new Map(); // model -> the fault that says why
  }

  draw(state) {
    const models = [...state.models].sort((a, b) => RANK[a.state] - RANK[b.state] || a.id.localeCompare(b.id));
    keep(this.list, models, (model) => model.id, () => this.make(), (row, model) => this.update(row, model));
  }

  make() {
    const button = element("button", { type: "button" });
    const anyway = element("button", { type: "button", className: "quiet anyway", hidden: true }, "Load anyway");
    anyway.title = "It runs under a ceiling of what is free: it may be stopped there, the machine goes on.";
    anyway.addEventListener("click", () => this.act(row.dataset.id, "load", "?anyway=true"));
    const row = element(
      "li", { className: "model" },
      element(
        "div", {}, element("span", { className: "model-name" }), element("span", { className: "state" }),
        element("span", { className: "layers" }),
      ),
      button,
      element("p", { className: "facts" }), element("p", { className: "terms" }),
      element("progress", { max: 1, hidden: true }), element("p", { className: "error" }), anyway,
    );
    button.addEventListener("click", () => this.act(row.dataset.id, button.dataset.action));
    return row;
  }

  update(row, model) {
    const [name, state, layers, button, facts, terms, progress, error] = [
      ".model-name", ".state", ".layers", "button:not(.anyway)", ".facts", ".terms", "progress", ".error",
    ].map((part) => row.querySelector(part));
    write(name, model.id);
    state.className = `state ${model.state}`;
    const percent = model.extra?.load_percent;
    const loading = `loading${percent == null ? "" : ` ${percent} %`}, ${span(model.since_s)}`;
    write(state, model.state === "loading" ? loading : model.state);
    const onGpu = model.gpu_layers;
    const isFallen = onGpu && (onGpu.loaded < onGpu.planned || onGpu.why_none);
    layers.className = `layers${isFallen ? " fallen" : ""}`;
    write(layers, onGpu ? `GPU ${onGpu.why_none ? "no" : `${onGpu.loaded}/${onGpu.total ?? onGpu.planned}`} layers` : "");
    const [action, words] = ACTIONS[model.state] ?? [null, model.state];
    const isWaiting = this.asked.get(model.id) === action;
    button.dataset.action = action ?? "";
    button.className = action === "load" ? "" : "quiet";
    button.disabled = action === null || isWaiting;
    button.setAttribute("aria-label", `${words} ${model.id}`);
    write(button, isWaiting && action === "load" ? "Loading" : words);
    write(facts, model.plan ? factsOf(model) : "");
    write(terms, model.plan ? model.plan.devices.map(termsOf).join("; ") : "");
    drawProgress(progress, model);
    const refusal = action === "load" ? this.refused.get(model.id) : null;
    write(error, refusal?.message ?? model.error ?? "");
    const anyway = row.querySelector(".anyway");
    anyway.hidden = refusal?.code !== "insufficient_memory" || isWaiting;
    anyway.setAttribute("aria-label", `Load ${model.id} anyway`);
  }

  async act(id, action, how = "") {
    this.asked.set(id, action);
    this.refused.delete(id);
    this.say(action === "load" ? `Loading ${id}.` : `Unloading ${id}.`);
    this.changed();
    try {
      const path = id.split("/").map(encodeURIComponent).join("/");
      const status = await ask("POST", `/admin/models/${path}/${action}${how}`);
      this.say(`${id} is ${status.state}.`);
    } catch (fault) {
      const wasStopped = action === "load" && this.asked.get(id) === "unload";
      if (!wasStopped) this.refused.set(id, fault);
      this.say(wasStopped ? "" : `${id}: ${action} failed.`);
    }
    if (this.asked.get(id) === action) this.asked.delete(id);
    this.changed();
  }

  say(text) {
    write(this.said, text);
  }
}

/** A load is as far as the server says; not known: it merely goes on. */
function drawProgress(progress, model) {
  progress.hidden = model.state !== "loading";
  if (progress.hidden) return;
  progress.setAttribute("aria-label", `Loading ${model.id}`);
  const percent = model.extra?.load_percent;
  if (percent != null) progress.value = percent / 100;
  else progress.removeAttribute("value");
}

function factsOf(model) {
  const { settings, devices } = model.plan;
  const promised = devices.reduce((sum, device) => sum + device.total_bytes, 0);
  const facts = [`${size(promised)} promised`];
  if (model.pid && model.measured_bytes) facts.push(`${size(model.measured_bytes)} measured`);
  const length = settings.kv_pool_tokens ? ` × ${settings.max_seq_len} tokens` : " at once"; // a program plans its own
  facts.push(`${settings.max_num_seqs}${length}`);
  if (model.running) facts.push(`${model.running} running${prefillOf(model)}`);
  if (model.queued) facts.push(`${model.queued} waiting`);
  if (model.pinned) facts.push("pinned");
  else if (model.ttl_s !== null && model.idle_s !== null && isLoaded(model))
    facts.push(`unloads in ${span(Math.max(0, model.ttl_s - model.idle_s))}`);
  return facts.join(" · ");
}

function prefillOf(model) {
  const reading = model.requests.find((request) => request.prompt_tokens);
  return reading ? `, prefill ${Math.floor((100 * reading.prefill_tokens) / reading.prompt_tokens)} %` : "";
}
