// SPDX-License-Identifier: Apache-2.0
// Talks to the server: the key, requests, a job's events, its clip. Knows nothing of the page.

const BASE = new URL("v1/", document.baseURI);
const KEY = "h3-key";
const FIRST_EVENT_MS = 8000;
const TRIES = 5;

/** An answer that is no success. */
export class Refusal extends Error {
  constructor(status, body) {
    super(body?.error?.message || `HTTP ${status}`);
    this.status = status;
    this.faults = body?.faults ?? [];
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** Ask the server; the response of a success. Raises Refusal, or TypeError where nobody answers. */
export async function ask(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const sent = key === null ? headers : { ...headers, Authorization: `Bearer ${key}` };
  const answer = await fetch(new URL(path, BASE), { ...options, headers: sent, cache: "no-store" });
  if (answer.ok) return answer;
  let body = null;
  try {
    body = await answer.json();
  } catch { /* A proxy answers in HTML; the status says enough. */ }
  // An answer to the key before says nothing of one that was given meanwhile.
  const now = sessionStorage.getItem(KEY);
  if (answer.status === 401 && now !== null && now !== key) return ask(path, { headers, ...options });
  throw new Refusal(answer.status, body);
}

/** JSON, with seeds as they stand there: a double does not hold all of them. */
function parse(text) {
  return JSON.parse(text, (name, value, context) =>
    name === "seed" && typeof value === "number" ? (context?.source ?? String(value)) : value);
}

export const read = async (path, options) => parse(await (await ask(path, options)).text());

/** A word that no other request has; crypto.randomUUID is missing where the page comes by plain HTTP. */
export const newKey = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** A job each time that it moves. EventSource cannot send a key, so the stream is read here. */
export async function* events(id, signal) {
  const stream = new AbortController();
  const stop = () => stream.abort();
  signal.addEventListener("abort", stop, { once: true });
  // The first event comes at once, unless something between holds the stream back.
  const timer = setTimeout(stop, FIRST_EVENT_MS);
  let whole = false;
  try {
    const answer = await ask(`videos/${id}/events`, { signal: stream.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await reader.read()).done; ) {
      clearTimeout(timer);
      const messages = (rest + part.value).split("\n\n");
      rest = messages.pop();
      for (const message of messages) {
        const data = message.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) yield parse(data.join("\n"));
      }
    }
    whole = true;
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
    if (!whole) stop();
  }
}

/** The clip as a blob; where the connection breaks, the rest is asked for. */
export async function clip(job, signal, onPercent) {
  const tag = `"${job.sha256}"`;
  let parts = [], have = 0;
  for (let tries = 0; ; tries++) {
    try {
      const headers = have ? { Range: `bytes=${have}-`, "If-Range": tag } : {};
      const answer = await ask(`videos/${job.id}/content`, { signal, headers });
      if (answer.status !== 206) [parts, have] = [[], 0];
      const reader = answer.body.getReader();
      for (let part; !(part = await reader.read()).done; ) {
        parts.push(part.value);
        have += part.value.byteLength;
        onPercent(Math.floor((100 * have) / job.bytes));
      }
      if (have !== job.bytes) throw new TypeError(`${have} of ${job.bytes} bytes came`);
      return new Blob(parts, { type: "video/mp4" });
    } catch (error) {
      if (signal.aborted || error instanceof Refusal || tries >= TRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, 500 * 2 ** tries));
    }
  }
}
