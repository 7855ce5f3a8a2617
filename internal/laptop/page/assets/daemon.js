// Sends requests to the daemon. The token came in the fragment of the URL, which browsers send to nobody; each request
// has it in a header.

const stored = 'kubevpn-token';

// takeToken moves the token from the address bar to the storage of this tab.
export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(stored, found[1]);
    history.replaceState(null, '', location.pathname);
  }
  return sessionStorage.getItem(stored) !== null;
}

// dropToken forgets the token. Another user's program may serve this address later.
export function dropToken() { sessionStorage.removeItem(stored); }

// send returns the response to a request, or throws the daemon's error.
export async function send(path, {body, signal} = {}) {
  const response = await fetch(`/api/${path}`, {
    method: body === undefined ? 'GET' : 'POST',
    headers: {Authorization: `Bearer ${sessionStorage.getItem(stored)}`},
    body: body === undefined ? undefined : JSON.stringify(body),
    signal, cache: 'no-store', credentials: 'omit', redirect: 'error',
  });
  if (response.ok) return response;
  throw await failure(response);
}

async function failure(response) {
  try {
    const e = await response.json();
    return Object.assign(new Error(describe(e)), {status: response.status});
  } catch {
    return Object.assign(new Error(`The daemon answered ${response.status}.`), {status: response.status});
  }
}

// describe returns the text of an api.Error.
export const describe = (e) => (e.hint ? `${e.message}; ${e.hint}` : e.message);

// lines yields the JSON lines of a response.
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n');
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}
