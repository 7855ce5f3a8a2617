// The connections, with their transports, checks and plots.
import {announce, badge, el, emptyState, facts, keyed, notes, setText, Table} from './dom.js';
import {age, bytes, count, rate, seconds} from './format.js';
import {Plot} from './plot.js';

const kinds = {connected: 'good', failed: 'bad', connecting: 'busy', reconnecting: 'busy', disconnecting: 'busy'};

export class Connections {
  constructor(section) {
    this.empty = emptyState('This machine is not connected. Connect it with', 'kubevpn connect');
    this.list = el('div');
    section.append(this.empty, this.list);
    this.cards = new Map();
    this.samples = new Map(); // of the traffic, by the ID of the connection
  }

  // sample adds to the plots, also while the page pauses.
  sample({status, flows}) {
    for (const c of status.connections) {
      const plots = this.card(c).plots;
      const sent = sum(c.transports, 'sentBytes');
      const received = sum(c.transports, 'receivedBytes');
      const before = this.samples.get(c.id);
      const now = Date.parse(flows.time) / 1000;
      this.samples.set(c.id, {sent, received, now});
      const known = before && now > before.now && sent >= before.sent && received >= before.received;
      plots.throughput.push(...known ? [(received - before.received) / (now - before.now),
        (sent - before.sent) / (now - before.now)] : []);
      plots.roundTrip.push(c.status === 'connected' && c.roundTripSeconds ? c.roundTripSeconds : null);
    }
    for (const id of this.cards.keys()) {
      if (!status.connections.some((c) => c.id === id)) {
        this.cards.delete(id);
        this.samples.delete(id);
        announce(`Connection ${id} ended`);
      }
    }
  }

  update({status}) {
    this.empty.hidden = status.connections.length > 0;
    keyed(this.list, status.connections, (c) => c.id, (c) => this.card(c).node, (_, c) => this.card(c).update(c));
  }

  card(c) {
    if (!this.cards.has(c.id)) this.cards.set(c.id, new Card(c));
    return this.cards.get(c.id);
  }
}

const sum = (list, field) => (list ?? []).reduce((n, t) => n + (t[field] ?? 0), 0);

class Card {
  constructor(c) {
    this.state = el('span');
    this.facts = facts();
    this.error = notes('Error');
    this.warnings = notes('Warnings');
    this.plots = {
      throughput: new Plot('Throughput', ['received', 'sent'], rate), roundTrip: new Plot('Round trip', ['to the manager'], seconds),
    };
    this.transports = new Table('Transports', ['Transport', 'State', '#Round trip', '#Sent', '#Received', 'Reason']);
    this.checks = new Table('Checks of the tunnel', ['Check', 'Target', 'Result', 'Seen', '#Time'], emptyState('No check has run yet.'));
    this.title = el('h3', {}, c.cluster || c.id, ' ', this.state);
    this.node = el('article', {class: 'card'}, this.title, this.error.node, this.warnings.node, this.facts.node,
      el('div', {class: 'plots'}, this.plots.throughput.node, this.plots.roundTrip.node), this.transports.node, this.checks.node);
  }

  update(c) {
    if (this.last !== undefined && this.last !== c.status) announce(`Connection ${c.id} is ${c.status}`);
    this.last = c.status;
    badge(this.state, c.status, kinds[c.status] ?? 'busy');
    this.error.update(c.error ? [c.error.hint ? `${c.error.message}; ${c.error.hint}` : c.error.message] : []);
    this.warnings.update(c.warnings ?? []);
    this.facts.update([
      ['ID', c.id], ['Context', c.context], ['Namespace', c.namespace], ['API server', c.server],
      ['Transport', c.transport], ['Netstack', c.netstackReason ? `${c.netstack}: ${c.netstackReason}` : c.netstack],
      ['Traffic manager', c.managerPod && `${c.managerNamespace}/${c.managerPod} ${c.managerVersion}`],
      ['Services', c.services], ['Names', c.dns.mode && `${c.dns.domain} by way of ${c.dns.mode}`], ['Device', c.device],
      ['Addresses', (c.addresses ?? []).join(', ')], ['Networks', (c.cidrs ?? []).join(', ')], ['Age', age(c.since)],
    ]);
    this.plots.throughput.draw();
    this.plots.roundTrip.draw();
    this.transports.update(c.transports ?? [], (t) => t.name, (t) => [t.name, t.state, seconds(t.roundTripSeconds),
      bytes(t.sentBytes), bytes(t.receivedBytes), t.reason]);
    this.checks.update(c.checks ?? [], (k) => `${k.what} ${k.target}`, (k) => [k.what, k.target, k.ok ? 'ok' : 'failed',
      k.seen, seconds(k.seconds)], (row, k) => { row.className = k.ok ? '' : 'bad'; });
  }
}

// summary shows the number of connections and intercepts.
export function summary(status) {
  const connected = status.connections.filter((c) => c.status === 'connected').length;
  const all = status.connections.length;
  const part = all === 0 ? 'not connected' : `${connected === all ? '' : `${connected} of `}${count(all, 'connection')}`;
  setText(document.getElementById('summary'), `${part}, ${count(status.intercepts.length, 'intercept')}`);
}
