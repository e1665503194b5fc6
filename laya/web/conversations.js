// Owns: conversations, kept in this browser and nowhere else, apart for each key. They stay as long as the key does: a
// key of this tab alone has conversations of this tab alone. Nothing of them is kept on the server.

import { keyPlace, theKey } from "./server.js";

const PREFIX = "laya-chats-";
const MOST = 50;

/** The ones of the key in use, the newest first. */
export function kept() {
  const found = JSON.parse(keyPlace().getItem(nameOf(theKey())) ?? "[]");
  return found.sort((a, b) => b.updated - a.updated);
}

/** Whose they are: changes with the key. */
export const owner = () => nameOf(theKey());

export function keepConversation(conversation) {
  let all = [conversation, ...kept().filter(({ id }) => id !== conversation.id)].slice(0, MOST);
  for (;;) {
    try {
      keyPlace().setItem(owner(), JSON.stringify(all));
      return;
    } catch (fault) {
      if (fault.name !== "QuotaExceededError" || all.length < 2) throw fault;
      all = all.slice(0, -1); // the browser gives no more room: the oldest one goes
    }
  }
}

export function forgetConversation(id) {
  keyPlace().setItem(owner(), JSON.stringify(kept().filter((each) => each.id !== id)));
}

/** With the key they go, too. */
export function forgetAll() {
  keyPlace().removeItem(owner());
}

/** A number for the key that tells it from others; where it lies, the key itself does. */
function nameOf(key) {
  let hash = 2166136261; // FNV-1a: crypto.subtle is not there on http in a LAN
  for (const byte of new TextEncoder().encode(key ?? "")) hash = Math.imul(hash ^ byte, 16777619) >>> 0;
  return PREFIX + hash.toString(16);
}
