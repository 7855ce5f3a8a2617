// Builds and updates the document. Text of the cluster becomes text nodes only: nothing here parses HTML.

// clean removes control characters, and format characters that reorder or hide text, as api.Clean does.
export function clean(value) {
  return String(value ?? '').replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => (c === '\n' || c === '\t' ? c : ''));
}

// el makes an element. Children are elements or text.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : clean(value));
  }
  for (const child of children) node.append(child instanceof Node ? child : clean(child));
  return node;
}

// setText replaces the text of a node, unless it is the same.
export function setText(node, value) {
  const text = clean(value);
  if (node.textContent !== text) node.textContent = text;
}

// setContent shows text, or an element, in a node.
function setContent(node, value) {
  if (value instanceof Node) {
    if (node.firstChild !== value || node.childNodes.length !== 1) node.replaceChildren(value);
  } else setText(node, value);
}

// keyed makes the children of a node those of the items. Nodes of known keys are kept, so focus and scrolling are too.
export function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = clean(key(item));
    const node = old.get(name) ?? make(item);
    node.dataset.key = name;
    old.delete(name);
    update(node, item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const node of old.values()) node.remove();
}

let serial = 0;

// newID returns an ID that no other element has.
export function newID(prefix) {
  serial += 1;
  return `${prefix}-${serial}`;
}

// emptyState says that there is nothing, and the next step: a command.
export function emptyState(text, command) {
  const node = el('p', {class: 'empty'}, `${text} `);
  if (command) node.append(el('code', {}, command));
  return node;
}

// Table is a table with a caption, in a region that scrolls. A column is a name, or a name with "#" before it for
// numbers. The first cell of a row is its header.
export class Table {
  constructor(caption, columns, empty) {
    const id = newID('caption');
    this.columns = columns.map((name) => ({name: name.replace('#', ''), number: name.startsWith('#')}));
    this.body = el('tbody');
    this.scroll = el('div', {class: 'scroll', role: 'region', tabindex: 0, 'aria-labelledby': id},
      el('table', {}, el('caption', {id}, caption), el('thead', {}, el('tr', {}, ...this.columns.map((c) =>
        el('th', {scope: 'col', class: c.number && 'number'}, c.name)))), this.body));
    this.empty = empty ?? emptyState('None.');
    this.node = el('div', {}, this.scroll, this.empty);
    this.update([], () => '', () => []);
  }

  // update shows a row for each item. cells returns its cells, which are text or elements.
  update(items, key, cells, changed = () => {}) {
    this.scroll.hidden = items.length === 0;
    this.empty.hidden = items.length > 0;
    keyed(this.body, items, key, () => el('tr', {}, ...this.columns.map((c, n) =>
      el(n === 0 ? 'th' : 'td', {scope: n === 0 && 'row', class: c.number && 'number'}))), (row, item) => {
      cells(item, row).forEach((value, n) => setContent(row.children[n], value));
      changed(row, item);
    });
  }
}

// facts makes a list of names and values; update shows those that have a value.
export function facts() {
  const node = el('dl');
  return {
    node,
    update(pairs) {
      keyed(node, pairs.filter(([, value]) => value), ([name]) => name,
        ([name]) => el('div', {}, el('dt', {}, name), el('dd')), (row, [, value]) => setText(row.lastChild, value));
    },
  };
}

// notes makes a list of warnings; update shows them.
export function notes(label) {
  const node = el('ul', {class: 'notes', 'aria-label': label});
  return {
    node,
    update(texts) {
      node.hidden = texts.length === 0;
      keyed(node, texts.map((text, n) => ({text, n})), ({n}) => n, () => el('li'), (item, {text}) => setText(item, text));
    },
  };
}

// badge shows a state as a word with a color.
export function badge(node, text, kind) {
  setText(node, text);
  node.className = `badge ${kind}`;
}

let announced = '';

// announce tells screen readers about a change.
export function announce(text) {
  if (text === announced) return;
  announced = text;
  setText(document.getElementById('announce'), text);
}
