// The intercepts and clones of this machine.
import {announce, badge, el, emptyState, facts, keyed, notes, Table} from './dom.js';
import {age} from './format.js';
import {Requests} from './requests.js';

const kinds = {active: 'good', running: 'good', done: 'good', failed: 'bad', waiting: 'warn'};

const reason = (e) => (e.hint ? `${e.message}; ${e.hint}` : e.message);

export class Intercepts {
  constructor(section) {
    this.empty = emptyState('No workload is intercepted from this machine. Intercept one with', 'kubevpn proxy deployment/web');
    this.list = el('div');
    this.cards = new Map();
    section.append(this.empty, this.list);
  }

  update({status}) {
    const key = (i) => `${i.connection} ${i.id}`;
    this.empty.hidden = status.intercepts.length > 0;
    for (const [name, card] of this.cards) {
      if (!status.intercepts.some((i) => key(i) === name)) {
        card.requests.stop();
        this.cards.delete(name);
        announce(`The intercept of ${card.workload} ended`);
      }
    }
    keyed(this.list, status.intercepts, key, (i) => {
      this.cards.set(key(i), new Card(i));
      return this.cards.get(key(i)).node;
    }, (_, i) => this.cards.get(key(i)).update(i, status.connections.find((c) => c.id === i.connection)));
  }
}

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

// browser tells how the requests of a browser for http URLs get what the match needs.
const browser = (i, connection) => i.addHeaders && ['kubevpn connect --socks 127.0.0.1:1080',
  ...connection?.context ? [`--context ${quoted(connection.context)}`] : [],
  ...i.addHeaders.map((h) => `--add-header ${quoted(`${h.name}=${h.value}`)}`)].join(' ') +
  ', then set the PAC file that it prints as the proxy of the browser; it adds this to http URLs of the cluster';

class Card {
  constructor(i) {
    this.workload = i.workload;
    this.state = el('span');
    this.facts = facts();
    this.problems = notes('Problems');
    this.pods = new Table('Pods of the workload', ['Pod', 'Intercepted', 'Reason'], emptyState('The workload has no pod.'));
    this.clone = i.clone ? new Clone() : undefined;
    this.requests = new Requests(i);
    this.node = el('article', {class: 'card'}, el('h3', {}, `${i.namespace}/${i.workload} `, this.state), this.problems.node,
      this.facts.node, ...this.clone ? [this.clone.node] : [], this.pods.node, this.requests.node);
  }

  update(i, connection) {
    if (this.last !== undefined && this.last !== i.state) announce(`The intercept of ${i.workload} is ${i.state}`);
    this.last = i.state;
    badge(this.state, i.state, kinds[i.state] ?? 'busy');
    this.problems.update([i.error && reason(i.error), i.lastError, ...i.warnings ?? [], ...(i.others ?? []).map((o) =>
      `${o.owner} intercepts ${o.match}`)].filter(Boolean));
    this.facts.update([
      ['Match', i.match], ['Requests go to', i.clone ? `the clone ${i.clone.name}` : `this machine${i.mirror ? ', as copies' : ''}`],
      ['Name in the cluster', i.exposed],
      ['Ports', (i.ports ?? []).map((p) => `${p.protocol} ${p.container} to ${p.local}`).join(', ')], ['Requests so far', String(i.requests)],
      ['Mode', i.modeReason ? `${i.mode}: ${i.modeReason}` : i.mode], ['Owner', i.owner], ['Connection', i.connection], ['Age', age(i.since)],
      ['For a browser', browser(i, connection)],
    ]);
    this.pods.update(i.pods ?? [], (p) => p.name, (p) => [p.name, p.intercepted ? 'yes' : 'no', p.reason]);
    if (this.clone && i.clone) this.clone.update(i.clone);
  }
}

class Clone {
  constructor() {
    this.state = el('span');
    this.facts = facts();
    this.notes = notes('Differences from the workload');
    this.pods = new Table('Pods of the clone', ['Pod', 'Ready', 'IP', 'Reason'], emptyState('The clone has no pod yet.'));
    this.sync = new Table('Synced files', ['On this machine', 'In the clone', 'State', '#Files', 'Last change'],
      emptyState('No files are synced. Sync a directory with', 'kubevpn clone deployment/web --sync .:/app'));
    this.node = el('div', {}, el('h4', {}, 'Clone ', this.state), this.facts.node, this.notes.node, this.pods.node, this.sync.node);
  }

  update(c) {
    badge(this.state, c.state, kinds[c.state] ?? 'busy');
    this.facts.update([['Job', `${c.namespace}/${c.name}`], ['Host', c.host], ['Error', c.lastError]]);
    this.notes.update(c.notes ?? []);
    this.pods.update(c.pods ?? [], (p) => p.name, (p) => [p.name, p.ready ? 'yes' : 'no', p.ip, p.reason]);
    this.sync.update(c.sync ?? [], (s) => `${s.local} ${s.remote}`, (s) => [s.local, s.remote,
      s.lastError || (s.synced ? 'synced' : 'syncing'), s.files, s.last && age(s.last) ? `${age(s.last)} ago` : ''],
    (row, s) => { row.className = s.lastError ? 'bad' : ''; });
  }
}
