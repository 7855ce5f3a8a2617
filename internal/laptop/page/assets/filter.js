// A field that selects rows by the words in them.
import {el, newID} from './dom.js';

export function filterField(label, changed) {
  const id = newID('filter');
  const input = el('input', {id, type: 'search', autocomplete: 'off', spellcheck: 'false'});
  input.addEventListener('input', changed);
  return {
    node: el('p', {class: 'filter'}, el('label', {for: id}, label), input),
    // matches reports whether the text contains each word of the field.
    matches: (text) => input.value.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word)),
  };
}
