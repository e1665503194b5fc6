// Owns: the models as rows, loaded ones first, and those of the catalogue below: how each stands, and what can be done
// with it: load, unload, pin, try. What a refused load needs is the refusal's card.

import { element, keep, size, span, write } from "./element.js";
import { refusalCard } from "./refusal.js";
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
  /** changed: called when something was asked for, so that the page looks at the server at once. */
  constructor({ list, catalogue, search, said, fit, drag, changed }) {
    Object.assign(this, { list, catalogue, search, said, fit, drag, changed });
    this.asked = new Map(); // model -> what it was asked to do and has not answered yet
    this.refused = new Map(); // model -> the card that says why
    this.speeds = new Map(); // model -> tokens per second, as last seen
    this.known = [];
    this.state = { models: [] };
    search.addEventListener("input", () => this.filter());
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "ArrowDown") this.rows()[0]?.focus();
      if (event.key === "Escape") {
        search.value = "";
        this.filter();
        search.blur();
      }
      if (["Enter", "ArrowDown"].includes(event.key)) event.preventDefault();
    });
  }

  /** requests: those that run, with their speeds. */
  draw(state, requests) {
    this.state = state;
    const models = [...state.models].sort((a, b) => RANK[a.state] - RANK[b.state] || a.id.localeCompare(b.id));
    this.measure(requests);
    keep(this.list, models, (model) => model.id, (model) => this.make(model.id), (row, model) => this.update(row, model));
    this.filter();
  }

  measure(requests) {
    const now = new Map();
    for (const { model, tokens_per_s } of requests) if (tokens_per_s) now.set(model, (now.get(model) ?? 0) + tokens_per_s);
    for (const [model, speed] of now) this.speeds.set(model, speed);
    this.fast = now;
  }

  async lookAtCatalogue() {
    const { models } = await ask("GET", "/admin/catalogue");
    this.known = models;
    keep(this.catalogue.querySelector("ul"), models, (model) => model.id, (model) => this.makeKnown(model), () => {});
    write(this.catalogue.querySelector("summary"), `${models.length} more in the catalogue, not on this disk`);
    this.filter();
  }

  /** Only what the search names; nothing said: all. */
  filter() {
    const words = this.search.value.trim().toLowerCase();
    for (const row of this.list.children) row.hidden = !row.textContent.toLowerCase().includes(words);
    let found = 0;
    for (const row of this.catalogue.querySelectorAll("li")) {
      row.hidden = !row.textContent.toLowerCase().includes(words);
      found += !row.hidden;
    }
    this.catalogue.hidden = !found;
    if (words && found) this.catalogue.open = true;
  }

  rows() {
    const rows = [...this.list.children, ...(this.catalogue.open ? this.catalogue.querySelectorAll("li") : [])];
    return rows.filter((row) => !row.hidden);
  }

  /** The row that has the focus, or the only one that the search leaves. */
  chosen() {
    const rows = this.rows();
    return rows.find((row) => row.contains(document.activeElement)) ?? (rows.length === 1 ? rows[0] : null);
  }

  /** `load` or `unload` of the chosen row, by a key. */
  press(action) {
    const row = this.chosen();
    if (!row) {
      this.say(`Choose a model first: / searches, Enter takes the first one, then ${action === "load" ? "l" : "u"}.`);
      return;
    }
    const model = this.state.models.find((each) => each.id === row.dataset.id);
    if (!model) this.fit.open(row.dataset.id);
    else if ((ACTIONS[model.state] ?? [])[0] === action) this.act(model.id, action);
    else this.say(`${model.id} is ${model.state}.`);
  }

  grip() {
    return element("button", { type: "button", className: "grip", tabIndex: -1, "aria-hidden": "true", title: "Drag it over the bar to see whether it fits" }, "⠿");
  }

  makeRow(id, ...parts) {
    const row = element("li", { className: "model", tabIndex: 0 }, this.grip(), ...parts);
    row.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step || event.target !== row) return;
      const rows = this.rows();
      rows[rows.indexOf(row) + step]?.focus();
      event.preventDefault();
    });
    this.drag.attach(row.querySelector(".grip"), () => id);
    this.drag.attach(row.querySelector(".model-line"), () => id);
    return row;
  }

  fitButton(id) {
    const button = element("button", { type: "button", className: "quiet fit-button", "aria-label": `Fit ${id}` }, "Fit");
    button.addEventListener("click", () => this.fit.open(id));
    return button;
  }

  make(id) {
    const act = element("button", { type: "button", className: "act" });
    const pin = element("button", { type: "button", className: "quiet pin", "aria-label": `Pin ${id}`, "aria-pressed": "false" }, "Pin");
    pin.title = "A pinned model stays when another one needs room";
    const row = this.makeRow(
      id,
      element("div", { className: "model-line" },
        element("span", { className: "model-name" }, id), element("span", { className: "state" }), element("span", { className: "layers" })),
      element("p", { className: "facts" }),
      element("div", { className: "acts" }, pin, this.fitButton(id), act),
      element("progress", { max: 1, hidden: true }), element("p", { className: "error" }), element("div", { className: "refused" }),
    );
    act.addEventListener("click", () => this.act(id, act.dataset.action));
    pin.addEventListener("click", () => this.pin(id, pin.getAttribute("aria-pressed") !== "true"));
    return row;
  }

  makeKnown(model) {
    return this.makeRow(
      model.id,
      element("div", { className: "model-line" }, element("span", { className: "model-name" }, model.id)),
      element("p", { className: "facts" }, `${size(model.file_bytes)} · ${model.what_for}`),
      element("div", { className: "acts" }, this.fitButton(model.id)),
    );
  }

  update(row, model) {
    const [state, layers, act, pin, facts, progress, error, refused] = [
      ".state", ".layers", ".act", ".pin", ".facts", "progress", ".error", ".refused",
    ].map((part) => row.querySelector(part));
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
    act.dataset.action = action ?? "";
    act.className = action === "load" ? "act" : "act quiet";
    act.disabled = action === null || isWaiting;
    act.setAttribute("aria-label", `${words} ${model.id}`);
    write(act, isWaiting && action === "load" ? "Loading" : words);
    pin.setAttribute("aria-pressed", String(model.pinned));
    write(pin, model.pinned ? "Pinned" : "Pin");
    this.writeFacts(facts, model);
    drawProgress(progress, model);
    const card = action === "load" ? this.refused.get(model.id) : null;
    write(error, card ? "" : model.error ?? "");
    if (refused.firstChild !== (card ?? null)) refused.replaceChildren(...(card ? [card] : []));
  }

  /** Figures in one line, each with its name for who cannot see the line. */
  writeFacts(facts, model) {
    const said = [];
    if (model.plan) {
      const { settings, devices } = model.plan;
      const promised = devices.reduce((sum, device) => sum + device.total_bytes, 0);
      said.push(["memory", model.pid && model.measured_bytes ? ofBoth(model.measured_bytes, promised) : size(promised)]);
      if (settings.kv_pool_tokens) said.push(["context", `${tokens(model.kv_tokens_promised ?? 0)} of ${settings.max_num_seqs} × ${tokens(settings.max_seq_len)}`]);
      else said.push(["at once", String(settings.max_num_seqs)]);
    }
    const speed = this.speeds.get(model.id);
    if (isLoaded(model) && speed) said.push(["speed", `${speed.toFixed(speed < 10 ? 1 : 0)} tok/s`, this.fast.has(model.id) ? "" : "past"]);
    if (model.running || isLoaded(model)) said.push(["running", `${model.running}${prefillOf(model)}`]);
    if (model.queued || isLoaded(model)) said.push(["queue", String(model.queued)]);
    if (model.pinned && isLoaded(model)) said.push(["stays", "pinned"]);
    else if (model.ttl_s !== null && model.idle_s !== null && isLoaded(model)) said.push(["unloads in", clock(Math.max(0, model.ttl_s - model.idle_s))]);
    keep(facts, said, ([name]) => name, () => element("span", { className: "fact" }, element("i"), element("b")), (shown, [name, value, mood = ""]) => {
      shown.className = `fact ${mood}`;
      write(shown.firstChild, `${name} `);
      write(shown.lastChild, value);
    });
  }

  async act(id, action) {
    return action === "load" ? this.load(id) : this.unload(id);
  }

  /** flags: settings instead of the configured ones; how: more of the query. Gives false where it was refused. */
  async load(id, flags = "", how = "") {
    const query = new URLSearchParams(how);
    if (flags) query.set("flags", flags);
    return this.do(id, "load", String(query));
  }

  async unload(id) {
    return this.do(id, "unload");
  }

  async do(id, action, query = "") {
    this.asked.set(id, action);
    this.refused.delete(id);
    this.say(action === "load" ? `Loading ${id}.` : `Unloading ${id}.`);
    this.changed();
    let isDone = true;
    try {
      const status = await ask("POST", `/admin/models/${pathOf(id)}/${action}${query && `?${query}`}`);
      this.say(`${id} is ${status.state}.`);
    } catch (fault) {
      const wasStopped = action === "load" && this.asked.get(id) === "unload";
      if (!wasStopped) this.refuse(id, fault);
      this.say(wasStopped ? "" : `${id}: ${action} failed.`);
      isDone = false;
    }
    if (this.asked.get(id) === action) this.asked.delete(id);
    this.changed();
    return isDone;
  }

  refuse(id, fault) {
    const card = refusalCard(fault, { model: id, retry: null });
    const close = element("button", { type: "button", className: "quiet dismiss", "aria-label": "Close the refusal" }, "×");
    close.addEventListener("click", () => {
      this.refused.delete(id);
      card.remove();
    });
    card.prepend(close);
    this.refused.set(id, card);
  }

  async pin(id, isPinned) {
    try {
      await ask("POST", `/admin/models/${pathOf(id)}/pin?on=${isPinned}`);
      this.say(`${id} is ${isPinned ? "pinned: it stays when others need room" : "not pinned any more"}.`);
    } catch (fault) {
      this.say(fault.message);
    }
    this.changed();
  }

  say(text) {
    write(this.said, text);
  }
}

function pathOf(id) {
  return id.split("/").map(encodeURIComponent).join("/");
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

/** `44 of 104 MiB`. */
function ofBoth(part, whole) {
  const [held, most] = [size(part), size(whole)];
  return held.split(" ")[1] === most.split(" ")[1] ? `${held.split(" ")[0]} of ${most}` : `${held} of ${most}`;
}

/** `512`, `8k`, `131k`. */
function tokens(n) {
  return n < 1000 ? String(n) : `${Math.floor(n / 1000)}k`;
}

/** `4:09`, `58 s`. */
function clock(seconds) {
  const whole = Math.round(seconds);
  if (whole < 100) return `${whole} s`;
  return whole < 3600 ? `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}` : span(seconds);
}

function prefillOf(model) {
  const reading = model.requests.find((request) => request.prompt_tokens);
  return reading ? `, prefill ${Math.floor((100 * reading.prefill_tokens) / reading.prompt_tokens)} %` : "";
}
