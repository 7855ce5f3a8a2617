// The flows through the tunnels.
import {el, emptyState, notes, setText, Table} from './dom.js';
import {bytes, count, rate, seconds} from './format.js';

const stalls = {
  program: 'program does not read', destination: 'destination does not read', connecting: 'destination does not answer',
  tunnel: 'tunnel is interrupted',
};

export const objectName = (name) => (name?.name ? `${name.kind} ${name.namespace ? `${name.namespace}/` : ''}${name.name}` : '');

export class Flows {
  constructor(section) {
    this.total = el('p');
    this.warnings = notes('Missing from the list');
    this.table = new Table('Flows of the programs of this machine', ['Program', 'Protocol', 'Destination', 'Name', '#Sent',
      '#Received', '#Rate', '#Round trip', 'Stall', 'Transport', 'Source'],
    emptyState('Nothing passes the tunnels now. Send a request, such as', 'curl http://web.default'));
    section.append(this.total, this.warnings.node, this.table.node);
  }

  update({flows}) {
    const t = flows.total;
    setText(this.total, `${count(t.flows, 'flow')}, ${t.stalled} stalled: ${rate(t.sentBytesPerSecond)} sent, ` +
      `${rate(t.receivedBytesPerSecond)} received`);
    this.warnings.update(flows.warnings ?? []);
    this.table.update(flows.items, (f) => `${f.connection} ${f.protocol} ${f.source} ${f.destination} ${f.since}`, (f) => [
      f.program ? `${f.program} (${f.pid})` : 'unknown', f.protocol, f.destination, objectName(f.name),
      f.counted ? bytes(f.sentBytes) : '', f.counted ? bytes(f.receivedBytes) : '',
      f.counted ? rate(f.sentBytesPerSecond + f.receivedBytesPerSecond) : '', seconds(f.roundTripSeconds),
      f.stall ? `${stalls[f.stall] ?? f.stall}, ${seconds(f.stallSeconds)}` : '', f.transport, f.source,
    ], (row, f) => { row.className = f.stall ? 'warn' : ''; });
  }
}
