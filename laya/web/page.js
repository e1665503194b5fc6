// Owns: the page as a whole: looks at the server again and again, hands what it says to the parts, asks for a key.

import { Chat } from "./chat.js";
import { write } from "./element.js";
import { Events } from "./events.js";
import { Experts } from "./experts.js";
import { Explain } from "./explain.js";
import { Connect } from "./connect.js";
import { Curves } from "./curve.js";
import { Drag } from "./drag.js";
import { Fit } from "./fit.js";
import { listen } from "./keys.js";
import { Ledger } from "./ledger.js";
import { Logs } from "./logs.js";
import { isLoaded, Models } from "./models.js";
import { drawPeers } from "./peers.js";
import { setRemedies } from "./refusal.js";
import { Requests } from "./requests.js";
import { ask, forgetKey, hasKey, useKey } from "./server.js";

const LOOK_EVERY_MS = 1000;
const LOOK_SOON_MS = 300; // while something loads or unloads
const AROUND_EVERY_MS = 4000;

const part = (id) => document.getElementById(id);
const ledger = new Ledger(part("devices"));
const curves = new Curves(part("devices"));
const fit = new Fit({ panel: part("fit"), ledger, load: (model, flags) => models.load(model, flags) });
const models = new Models({
  list: part("models"), catalogue: part("catalogue"), search: part("search"), said: part("models-said"),
  fit, drag: new Drag(part("ledger"), fit), changed: () => look(),
});
const chat = new Chat({
  form: part("chat-form"), box: part("message"), send: part("send"), stop: part("stop"),
  messages: part("messages"), model: part("chat-model"), other: part("chat-other"), badge: part("chat-fit"),
  list: part("conversations"), forget: part("forget-chat"), isUser: () => isUser,
});
const logs = new Logs(part("logs-card"), part("logs"));
const explain = new Explain(part("explain"), { openLog: () => (isUser ? null : (engine, words) => logs.show(engine, words)) });
const requests = new Requests({
  card: part("requests-card"), list: part("requests"), open: (id) => explain.open(id), changed: () => look(),
  failed: (fault) => say(fault.message, true),
});
const experts = new Experts({ card: part("experts-card"), box: part("experts"), chat: () => chat.spoken });
const connect = new Connect(part("connect"));
const events = new Events(part("events-card"), part("events"));
let timer = null;
let isLooking = false;
let isMissed = false;
let isUser = false;
let isPaused = false;
let lookedAround_ms = -Infinity; // at what changes seldom
let seen = ""; // who held what memory then

async function look() {
  clearTimeout(timer);
  if (isLooking) {
    isMissed = true;
    return;
  }
  isLooking = true;
  let wait = LOOK_EVERY_MS;
  try {
    if (isUser) {
      await drawForUser();
    } else {
      const [state, asked] = await Promise.all([ask("GET", "/admin/state"), ask("GET", "/v1/requests?ended=6")]);
      draw(state, asked.data);
      requests.draw(asked);
      await events.look();
      await lookAround(state);
      if (state.models.some(({ state }) => state === "loading" || state === "draining")) wait = LOOK_SOON_MS;
    }
  } catch (fault) {
    if (fault.status === 403 && !isUser) {
      isUser = true; // of this key: it may talk to models and see its own requests, no more
      isLooking = false;
      look();
      return;
    }
    if (fault.status === 401) {
      askForKey(hasKey() ? fault.message : "");
      isLooking = false;
      return;
    }
    events.forget();
    curves.forget();
    say(fault.message, true);
  }
  isLooking = false;
  if (!document.hidden) timer = setTimeout(look, isMissed ? 0 : wait);
  isMissed = false;
}

/** What changes seldom or is drawn over minutes. */
async function lookAround(state) {
  const now = state.devices.map((device) => `${device.reserved_bytes} ${Math.round(device.budget_bytes / 2 ** 26)}`).join();
  const isDue = performance.now() - lookedAround_ms > AROUND_EVERY_MS;
  if (!isDue && now === seen) return;
  seen = now;
  lookedAround_ms = performance.now();
  const [rooms] = await Promise.all([ask("GET", "/admin/headroom"), curves.look(events.all), models.lookAtCatalogue()]);
  ledger.setRooms(rooms.devices);
}

function draw(state, requests) {
  show(true);
  write(part("version"), state.version);
  ledger.draw(state);
  drawPeers(part("peers"), state.peers);
  models.draw(state, requests);
  drawPause(state.is_paused);
  part("no-models").hidden = state.models.length > 0;
  chat.offer(state.models);
  connect.offer([...state.models].sort((a, b) => isLoaded(b) - isLoaded(a)));
  logs.draw(state.models);
  experts.offer();
  const loaded = state.models.filter(isLoaded).length;
  say(`${loaded} of ${state.models.length} models loaded, ${state.in_flight} ${state.in_flight === 1 ? "request" : "requests"} running`, false);
}

function drawPause(is_paused) {
  isPaused = is_paused;
  part("paused").hidden = !isPaused;
  part("pause").setAttribute("aria-pressed", String(isPaused));
  write(part("pause"), isPaused ? "Resume all" : "Pause all");
}

async function pause() {
  if (isUser) return;
  try {
    const { is_paused } = await ask("POST", `/admin/pause?on=${!isPaused}`);
    drawPause(is_paused);
    look();
  } catch (fault) {
    say(fault.message, true);
  }
}

/** What a key that is no admin's may see: its models, its own requests. */
async function drawForUser() {
  const [models, asked] = await Promise.all([ask("GET", "/v1/models"), ask("GET", "/v1/requests?ended=6")]);
  show(false);
  chat.offer(models.data.map(({ id, task, loaded }) => ({ id, task, state: loaded ? "ready" : "unloaded" })));
  connect.offer([...models.data].sort((a, b) => b.loaded - a.loaded));
  requests.draw(asked);
  say(`${asked.data.length} of your ${asked.data.length === 1 ? "request" : "requests"} running`, false);
}

function show(isAdmin) {
  part("key-form").hidden = true;
  part("main").hidden = false;
  document.body.classList.toggle("user", !isAdmin);
  part("forget-key").hidden = !hasKey();
}

function say(text, isBad) {
  const status = part("status");
  status.classList.toggle("bad", isBad);
  status.role = isBad ? "alert" : null;
  write(status, text);
}

function askForKey(why) {
  part("main").hidden = true;
  part("forget-key").hidden = true;
  part("key-form").hidden = false;
  say("", false);
  write(part("key-error"), why);
  part("key").focus();
}

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = part("key").value.trim();
  part("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) {
    askForKey("That is no key: it has characters that no key has.");
    return;
  }
  useKey(key, part("keep-key").checked);
  isUser = false;
  look();
});
part("forget-key").addEventListener("click", () => {
  chat.forgetAll();
  forgetKey();
  location.reload();
});
part("new-chat").addEventListener("click", () => chat.clear());
document.addEventListener("visibilitychange", () => document.hidden || look());
document.addEventListener("keydown", (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && chat.stop());
part("pause").addEventListener("click", pause);
part("connect-open").addEventListener("click", () => connect.open());
listen({
  "/": () => (isUser ? part("message") : part("search")).focus(),
  l: () => models.press("load"),
  u: () => models.press("unload"),
  p: pause,
});
setRemedies({
  load: (model, flags, how) => models.load(model, flags, how),
  unload: (model) => models.unload(model),
  tryOut: (model) => fit.open(model),
});
write(part("base-url"), `${location.origin}/v1`);
look();
