// The log of the daemon.
import {el, emptyState, newID, setText} from './dom.js';
import {filterField} from './filter.js';

const most = 500;

export class Log {
  constructor(section) {
    this.lines = [];
    const id = newID('log');
    this.filter = filterField('Filter lines', () => this.update());
    this.text = el('pre', {class: 'scroll', role: 'region', tabindex: 0, 'aria-labelledby': id});
    this.empty = emptyState('No line. The whole log is in the output of', 'kubevpn logs');
    section.append(this.filter.node, el('p', {id}, 'The last lines of the daemon, the latest first'), this.text, this.empty);
  }

  sample({log}) {
    this.lines.unshift(...log.toReversed());
    this.lines.length = Math.min(this.lines.length, most);
  }

  update() {
    const shown = this.lines.filter((line) => this.filter.matches(line));
    this.text.hidden = shown.length === 0;
    this.empty.hidden = shown.length > 0;
    setText(this.text, shown.join('\n'));
  }
}
