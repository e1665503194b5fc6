// Owns: the page as a whole: looks at the server again and again, hands what it says to the parts, asks for a key.

import { Chat } from "./chat.js";
import { write } from "./element.js";
import { Events } from "./events.js";
import { drawDevices } from "./ledger.js";
import { isLoaded, Models } from "./models.js";
import { ask, forgetKey, hasKey, useKey } from "./server.js";

const LOOK_EVERY_MS = 1000;
const LOOK_SOON_MS = 300; // while something loads or unloads

const part = (id) => document.getElementById(id);
const models = new Models(part("models"), part("models-said"), () => look());
const chat = new Chat({
  form: part("chat-form"), box: part("message"), send: part("send"), stop: part("stop"),
  messages: part("messages"), model: part("chat-model"),
});
const events = new Events(part("events-card"), part("events"));
let timer = null;
let isLooking = false;
let isMissed = false;
let isUser = false;

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
      const state = await ask("GET", "/admin/state");
      draw(state);
      await events.look();
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
    say(fault.message, true);
  }
  isLooking = false;
  if (!document.hidden) timer = setTimeout(look, isMissed ? 0 : wait);
  isMissed = false;
}

function draw(state) {
  show(true);
  write(part("version"), state.version);
  drawDevices(part("devices"), state);
  models.draw(state);
  part("no-models").hidden = state.models.length > 0;
  chat.offer(state.models);
  const loaded = state.models.filter(isLoaded).length;
  say(`${loaded} of ${state.models.length} models loaded, ${state.in_flight} ${state.in_flight === 1 ? "request" : "requests"} running`, false);
}

/** What a key that is no admin's may see: its models, its own requests. */
async function drawForUser() {
  const [models, requests] = await Promise.all([ask("GET", "/v1/models"), ask("GET", "/v1/requests")]);
  show(false);
  chat.offer(models.data.map(({ id, task, loaded }) => ({ id, task, state: loaded ? "ready" : "unloaded" })));
  say(`${requests.data.length} of your ${requests.data.length === 1 ? "request" : "requests"} running`, false);
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
  forgetKey();
  location.reload();
});
part("new-chat").addEventListener("click", () => chat.clear());
document.addEventListener("visibilitychange", () => document.hidden || look());
document.addEventListener("keydown", (event) => {
  const isWriting = event.target.matches("input, textarea, select");
  if (event.key === "Escape") chat.stop();
  if (event.key === "/" && !isWriting && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    part("message").focus();
  }
});
write(part("base-url"), `${location.origin}/v1`);
look();
