// A line plot of the last minutes, with the same in words below it.
import {clean, el, setText} from './dom.js';

const samples = 300; // five minutes
const width = 600;
const height = 120;
const namespace = 'http://www.w3.org/2000/svg';

function svg(tag, attributes) {
  const node = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, clean(value));
  return node;
}

// Plot shows series of numbers. A missing number is a gap.
export class Plot {
  constructor(title, names, format) {
    this.title = title;
    this.format = format;
    this.series = names.map((name, n) => ({name, values: [], path: svg('path', {class: `line line${n + 1}`})}));
    this.drawing = svg('svg', {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', role: 'img'});
    for (const y of [0, 0.5, 1]) {
      this.drawing.append(svg('path', {class: 'grid', d: `M0 ${y * (height - 2) + 1}H${width}`}));
    }
    this.drawing.append(...this.series.map((s) => s.path));
    this.top = el('span', {class: 'top', 'aria-hidden': true});
    this.now = this.series.map((s, n) => el('span', {class: `key key${n + 1}`}));
    this.node = el('figure', {}, el('figcaption', {}, el('strong', {}, title), ...this.now),
      el('div', {class: 'plot'}, this.drawing, this.top), el('p', {class: 'axis', 'aria-hidden': true}, 'last 5 minutes'));
  }

  push(...values) {
    this.series.forEach((s, n) => {
      s.values.push(values[n] ?? null);
      if (s.values.length > samples) s.values.shift();
    });
  }

  draw() {
    const most = Math.max(0, ...this.series.flatMap((s) => s.values));
    const top = most > 0 ? most : 1;
    this.series.forEach((s, n) => {
      s.path.setAttribute('d', line(s.values, top));
      const last = s.values.at(-1);
      setText(this.now[n], `${s.name} ${last === null || last === undefined ? '–' : this.format(last)}`);
    });
    setText(this.top, most > 0 ? this.format(most) : '');
    this.drawing.setAttribute('aria-label', clean(`${this.title} of the last 5 minutes: ${this.series.map((s) => {
      const known = s.values.filter((v) => v !== null);
      if (known.length === 0) return `${s.name} unknown`;
      return `${s.name} now ${this.format(known.at(-1))}, at most ${this.format(Math.max(...known))}`;
    }).join('; ')}`));
  }
}

// line returns the path of the values, the last one at the right.
function line(values, top) {
  let path = '';
  let pen = 'M';
  values.forEach((v, n) => {
    if (v === null) {
      pen = 'M';
      return;
    }
    const x = width - (values.length - 1 - n) * (width / (samples - 1));
    path += `${pen}${x.toFixed(1)} ${(height - 1 - (v / top) * (height - 2)).toFixed(1)}`;
    pen = 'L';
  });
  return path;
}
