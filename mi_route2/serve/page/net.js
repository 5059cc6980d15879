// Talking to the server: JSON, server-sent events read from fetch() (EventSource cannot POST), and its errors as exceptions.

const TOKEN = "mi-route2 token";

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: value => sessionStorage.setItem(TOKEN, value),
};

let server = null; // the number of the process that answered first; a proxy's own answer has none

/** The server's sentence; `param` is the body field that it speaks of, if any. */
export class ServerError extends Error {
  constructor(status, { message, param = null, type = "" } = {}) {
    super(message || `the server answered ${status}`);
    this.status = status;
    this.param = param;
    this.type = type;
  }
}

async function refused(response) {
  let error;
  try {
    error = (await response.json()).error;
  } catch {
    // not JSON: a proxy's page, or a server that is ending
  }
  if (response.status === 401) dispatchEvent(new CustomEvent("token-needed"));
  return new ServerError(response.status, error);
}

async function call(path, body, signal) {
  if (/[^ -~]/.test(token.get())) throw new ServerError(0, { message: "the token has characters that no header can have: give it as the server has it" });
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, { message: "the server does not answer: is it still running?" });
  }
  // One that was started again may serve another model than the page shows
  const now = response.headers.get("mi-route2-server");
  server ??= now;
  if (body !== undefined && now !== null && now !== server) throw new ServerError(0, { message: "the server was started again, maybe with another model: reload this page" });
  if (!response.ok) throw await refused(response);
  return response;
}

export const get = async (path, signal) => (await call(path, undefined, signal)).json();
export const post = async (path, body, signal) => (await call(path, body, signal)).json();

/** Yield the events of a stream as `{ event, data }` until `[DONE]`; an error event is thrown. */
export async function* events(path, body, signal) {
  const response = await call(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      // A connection that breaks is an error of the reader's, whose words are the browser's
      const { done, value } = await reader.read().catch(error => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      // An event may be cut anywhere, so only what an empty line has ended is parsed
      const blocks = (waiting + (value ?? "").replaceAll("\r", "")).split("\n\n");
      waiting = blocks.pop();
      for (const block of blocks) {
        const one = parse(block);
        if (one?.data === "[DONE]") return;
        if (one) yield decoded(one);
      }
      if (done) throw new ServerError(0, { message: "the connection ended before the answer did: press the button again" });
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const READ = {
  float64: raw => new Float64Array(raw),
  float32: raw => new Float32Array(raw),
  // the upper half of a float32
  bfloat16: raw => new Float32Array(Uint32Array.from(new Uint16Array(raw), half => half << 16).buffer),
};

/** The rows of a captured value, `{ dtype, shape, data }` with little-endian bytes as base64. */
export function rowsOf({ dtype, shape: [count, width], data }) {
  if (!(dtype in READ)) throw new ServerError(0, { message: `values of ${dtype} cannot be read here: serve the model in float32 or bfloat16` });
  const flat = READ[dtype](Uint8Array.from(atob(data), one => one.charCodeAt(0)).buffer);
  return Array.from({ length: count }, (_, row) => [...flat.subarray(row * width, (row + 1) * width)]);
}

function parse(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: data.join("\n") } : null; // a comment keeps the connection alive
}

function decoded({ event, data }) {
  const value = JSON.parse(data);
  if (value.error) throw new ServerError(200, value.error);
  return { event, data: value };
}
