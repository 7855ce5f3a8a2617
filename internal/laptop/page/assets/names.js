// The queries for names of the clusters.
import {emptyState, Table} from './dom.js';
import {clock, seconds} from './format.js';
import {filterField} from './filter.js';

const most = 256;

export class Names {
  constructor(section) {
    this.queries = [];
    this.serial = 0;
    this.filter = filterField('Filter names', () => this.update());
    this.table = new Table('Queries for names of the clusters, the latest first', ['Name', 'Time', 'Type', 'From', 'Code', '#Took',
      'Answer', 'Server'], emptyState('No query has come for a name of a cluster. Ask for one, such as', 'dig kubernetes.default.svc.cluster.local'));
    section.append(this.filter.node, this.table.node);
  }

  sample({dns}) {
    for (const q of dns) this.queries.unshift({...q, key: (this.serial += 1)});
    this.queries.length = Math.min(this.queries.length, most);
  }

  update() {
    const shown = this.queries.filter((q) => this.filter.matches(`${q.name} ${q.type} ${q.from} ${q.rcode} ${(q.answers ?? []).join(' ')}`));
    this.table.update(shown, (q) => q.key, (q) => [q.name || '.', clock(q.time), q.type, q.from, q.rcode, seconds(q.seconds),
      `${(q.answers ?? []).join(', ')}${q.records > (q.answers ?? []).length ? `, and ${q.records - (q.answers ?? []).length} more` : ''}`,
      q.server], (row, q) => { row.className = q.rcode === 'NOERROR' ? '' : 'warn'; });
  }
}
