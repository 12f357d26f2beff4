// The server's interface, as far as this page needs it.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

async function failure(response) {
  let message = `The server answered ${response.status}.`;
  try { message = (await response.json()).error.message; } catch { /* not JSON: the status has to do */ }
  return new ApiError(response.status, message);
}

export async function props(key) {
  const response = await fetch("/props", { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Streams an answer: every parsed chunk goes to `onChunk`. Ends early when `signal` says so.
export async function chat(body, key, signal, onChunk) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(key), signal, body: JSON.stringify({ ...body, stream: true, return_steps: true }),
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "The connection broke off.");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      onChunk(chunk);
    }
  }
}
