// The requests of one intercept. Nothing is recorded before the user asks for it.
import {announce, clean, el, emptyState, newID, setText, Table} from './dom.js';
import {describe, lines, send} from './daemon.js';
import {clock, count, seconds} from './format.js';
import {filterField} from './filter.js';

const most = 300; // exchanges that the page keeps
const bodyLimit = 16 << 10;

export class Requests {
  constructor(intercept) {
    this.intercept = intercept;
    this.exchanges = []; // the latest first: {key, e}
    this.serial = 0;
    this.state = el('p', {class: 'state'});
    this.button = el('button', {type: 'button', 'aria-pressed': 'false'}, 'Record requests');
    this.button.addEventListener('click', () => (this.following ? this.stop() : this.record()));
    this.save = el('button', {type: 'button'}, 'Save as HAR');
    this.save.addEventListener('click', () => this.saveHAR());
    const bodies = newID('bodies');
    this.bodies = el('input', {type: 'checkbox', id: bodies});
    this.filter = filterField('Filter requests', () => this.draw());
    this.table = new Table('Recorded requests, the latest first', ['Request', 'Time', '#Status', '#Wait', '#Took', 'To', 'Pod', 'Match'],
      emptyState('No request is shown. Record them here, or keep the last ones with', 'kubevpn proxy --record 500'));
    this.detail = el('div');
    this.node = el('div', {}, el('h4', {}, `Requests of ${intercept.workload}`), el('div', {class: 'buttons'}, this.button, this.save,
      el('label', {class: 'check', for: bodies}, this.bodies, `with the first ${bodyLimit >> 10} KiB of bodies`)), this.state, this.filter.node,
    this.table.node, this.detail);
    this.draw();
    this.kept();
  }

  // kept shows the requests that the intercept has kept. It may keep none, which is no error.
  async kept() {
    try {
      await this.read({follow: false});
    } catch { /* see above */ }
  }

  async record() {
    this.following = new AbortController();
    this.button.setAttribute('aria-pressed', 'true');
    setText(this.button, 'Stop recording');
    this.bodies.disabled = true;
    this.say('Recording begins');
    try {
      await this.read({follow: true, body: this.bodies.checked ? bodyLimit : 0, signal: this.following.signal});
      this.say('Recording ended');
    } catch (e) {
      this.say(e.name === 'AbortError' ? 'Recording ended' : e.message);
    }
    this.following = undefined;
    this.button.setAttribute('aria-pressed', 'false');
    setText(this.button, 'Record requests');
    this.bodies.disabled = false;
  }

  stop() { this.following?.abort(); }

  async read({follow, body, signal}) {
    const {connection, id} = this.intercept;
    for await (const record of lines(await send('requests', {body: {connection, workload: id, follow, body}, signal}))) {
      if (record.error) throw new Error(describe(record.error));
      if (record.pods) this.say(`Recording in ${count(record.pods, 'pod')}`);
      if (record.warning) this.say(record.warning);
      if (record.dropped) this.say(`${count(record.dropped, 'request')} not recorded: there were too many at a time`);
      if (record.exchange) this.add(record.exchange);
    }
  }

  say(text) {
    setText(this.state, text);
    announce(`${this.intercept.workload}: ${text}`);
  }

  add(e) {
    this.exchanges.unshift({key: (this.serial += 1), e});
    this.exchanges.length = Math.min(this.exchanges.length, most);
    this.pending ??= requestAnimationFrame(() => {
      this.pending = undefined;
      this.draw();
    });
  }

  shown() {
    return this.exchanges.filter(({e}) => this.filter.matches(
      `${e.request.method} ${e.request.path} ${e.request.host} ${e.response?.status ?? ''} ${e.destination} ${e.pod} ${e.error ?? ''}`));
  }

  draw() {
    const shown = this.shown();
    this.save.disabled = shown.length === 0;
    this.table.update(shown, ({key}) => key, ({key, e}, row) => [row.firstChild.firstElementChild ?? this.opener(key, e), clock(e.began),
      e.response ? status(e) : e.error ?? 'no answer', seconds(e.waitSeconds), seconds(e.seconds),
      e.mirrored ? `${e.destination}, and a copy to the laptop` : e.destination, e.pod, e.match],
    (row, {e}) => { row.className = !e.response || e.response.status >= 500 ? 'bad' : e.response.status >= 400 ? 'warn' : ''; });
  }

  // opener returns the button that shows the detail of an exchange.
  opener(key, e) {
    const button = el('button', {type: 'button', class: 'plain', 'aria-expanded': 'false'}, `${e.request.method} ${e.request.path}`);
    button.addEventListener('click', () => this.show(e, button));
    return button;
  }

  async show(e, opener) {
    const title = el('h4', {tabindex: -1}, `${e.request.method} ${e.request.path}`);
    const command = el('pre', {}, 'Asking for the command');
    const copy = el('button', {type: 'button'}, 'Copy as cURL');
    copy.addEventListener('click', () => this.copy(command.textContent));
    const close = el('button', {type: 'button'}, 'Close');
    close.addEventListener('click', () => {
      this.detail.replaceChildren();
      opener.setAttribute('aria-expanded', 'false');
      opener.focus();
    });
    this.opened?.setAttribute('aria-expanded', 'false');
    this.opened = opener;
    opener.setAttribute('aria-expanded', 'true');
    this.detail.replaceChildren(el('section', {class: 'detail', 'aria-label': 'Request'}, title, el('div', {class: 'buttons'}, copy, close),
      el('h5', {}, 'Request'), el('pre', {}, message(`${e.request.method} ${e.request.path} ${e.request.protocol}`, e.request, e.request.host)),
      el('h5', {}, 'Answer'), el('pre', {}, e.response ? message(`${e.response.status}`, e.response) : e.error ?? 'none'),
      el('h5', {}, 'The same with cURL'), command));
    title.focus();
    try {
      setText(command, await (await send('curl', {body: e})).json());
    } catch (failed) {
      setText(command, failed.message);
    }
  }

  async copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      this.say('Copied');
    } catch {
      this.say('The browser does not let the page copy: select the command below');
    }
  }

  async saveHAR() {
    try {
      const har = await (await send('har', {body: this.shown().map(({e}) => e).reverse()})).blob();
      const url = URL.createObjectURL(har);
      el('a', {href: url, download: `${this.intercept.workload.replace(/\W+/g, '-')}.har`}).click();
      URL.revokeObjectURL(url);
      this.say('Saved');
    } catch (e) {
      this.say(e.message);
    }
  }
}

function status(e) {
  const code = e.response.trailers?.['Grpc-Status'] ?? e.response.headers?.['Grpc-Status'];
  return code ? `${e.response.status} grpc:${code}` : e.response.status;
}

// message returns a request or an answer as text.
function message(first, m, host) {
  const heads = Object.entries(m.headers ?? {}).flatMap(([name, values]) => values.map((v) => `${name}: ${v}`));
  const trailers = Object.entries(m.trailers ?? {}).flatMap(([name, values]) => values.map((v) => `${name}: ${v}`));
  return [first, ...host ? [`Host: ${host}`] : [], ...heads, '', body(m.body), ...trailers].map(clean).join('\n').trimEnd();
}

function body({size, data}) {
  if (!size) return '';
  let text = '';
  let shown = 0;
  try {
    const raw = Uint8Array.from(atob(data ?? ''), (c) => c.charCodeAt(0));
    text = new TextDecoder('utf-8', {fatal: true}).decode(raw, {stream: true});
    shown = raw.length;
  } catch { /* no text: only the size is shown */ }
  return size > shown ? `${text}\n(${size - shown} more bytes)` : text;
}
