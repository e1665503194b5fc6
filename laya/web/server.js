// Owns: speaking to the server this page came from: the API key, JSON answers, the stream of a chat.
// Knows no element of the page.

const KEPT_AS = "laya-api-key";
let key = sessionStorage.getItem(KEPT_AS) ?? localStorage.getItem(KEPT_AS);

/** A fault in words: the server's own, or that it did not answer (status 0). */
export class ServerError extends Error {
  constructor(message, status, code, details = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.details = details; // what else the server's error says: need_bytes, suggestions, ...
  }
}

export const hasKey = () => Boolean(key);
export const theKey = () => key;

/** Where what belongs to the key is kept: as long as the key is; in this browser where none is needed. */
export const keyPlace = () => (key && localStorage.getItem(KEPT_AS) !== key ? sessionStorage : localStorage);

/** Use this key from now on; `keep` outlives the tab. */
export function useKey(value, keep) {
  forgetKey();
  key = value;
  (keep ? localStorage : sessionStorage).setItem(KEPT_AS, value);
}

export function forgetKey() {
  key = null;
  sessionStorage.removeItem(KEPT_AS);
  localStorage.removeItem(KEPT_AS);
}

/** The JSON at `path`. Throws ServerError. */
export async function ask(method, path, body, signal) {
  const answer = await open(method, path, body, signal);
  return answer.json();
}

/** The lines of a text that goes on for as long as it is read. Throws ServerError. */
export async function* textLines(path, signal) {
  const answer = await open("GET", path, undefined, signal);
  yield* lines(answer.body);
}

/** The events of a streamed chat: {event} for each chunk, {prefill: percent} while a long prompt is read. */
export async function* streamChat(body, signal) {
  const answer = await open("POST", "/v1/chat/completions", { ...body, stream: true }, signal);
  for await (const line of lines(answer.body)) {
    if (line.startsWith(": prefill ")) {
      yield { prefill: parseInt(line.slice(10), 10) };
    } else if (line === "data: [DONE]") {
      return;
    } else if (line.startsWith("data: ")) {
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ServerError(event.error.message, 200, event.error.code, event.error);
      yield { event };
    }
  }
  throw new ServerError("The answer broke off: the server went away.", 0);
}

async function open(method, path, body, signal) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const request = { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" };
  let answer;
  try {
    answer = await fetch(path, request);
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ServerError("Laya does not answer. Is `laya serve` still running?", 0);
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  const error = said?.error ?? { message: `The server answered ${answer.status} without a word.` };
  throw new ServerError(error.message, answer.status, error.code, error);
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ServerError("The answer broke off: the connection was lost.", 0);
  } finally {
    reader.cancel().catch(() => {}); // a stream that failed already has nothing left to cancel
  }
}
