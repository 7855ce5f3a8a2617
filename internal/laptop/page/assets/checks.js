// The findings of `kubevpn doctor`.
import {announce, badge, el, facts, keyed, setText} from './dom.js';
import {send} from './daemon.js';
import {seconds} from './format.js';

const kinds = {ok: 'good', warning: 'warn', failed: 'bad', skipped: 'busy'};

export class Checks {
  constructor(section) {
    this.button = el('button', {type: 'button'}, 'Run the checks');
    this.button.addEventListener('click', () => this.run());
    this.state = el('p', {});
    this.list = el('ul', {class: 'findings'});
    section.append(el('p', {}, 'The checks of ', el('code', {}, 'kubevpn doctor'), ' look at this machine, the way to the API server and the cluster of the last ',
      el('code', {}, 'kubevpn ui'), '. They change nothing.'), el('p', {class: 'buttons'}, this.button), this.state, this.list);
  }

  async run() {
    this.button.disabled = true;
    this.say('The checks run. This may take some seconds.');
    try {
      this.show(await (await send('doctor', {body: {}})).json());
    } catch (e) {
      this.say(e.message);
    }
    this.button.disabled = false;
    this.button.focus();
  }

  say(text) {
    setText(this.state, text);
    announce(text);
  }

  show({findings}) {
    const number = (verdict) => findings.filter((f) => f.verdict === verdict).length;
    const order = ['failed', 'warning', 'ok', 'skipped'];
    keyed(this.list, findings.toSorted((a, b) => order.indexOf(a.verdict) - order.indexOf(b.verdict)), (f) => f.name, finding,
      (node, f) => node.update(f));
    this.say(`${number('failed')} failed, ${number('warning')} warnings, ${number('ok')} ok, ${number('skipped')} skipped`);
  }

  update() {}
}

// finding makes the node of one finding.
function finding(f) {
  const verdict = el('span');
  const about = el('span');
  const rest = facts();
  const node = el('li', {class: 'card'}, el('h3', {}, `${f.section}: ${f.name} `, verdict), about, rest.node);
  node.update = ({verdict: now, cause, seen, notes, effect, fix, seconds: took}) => {
    badge(verdict, now, kinds[now] ?? 'busy');
    setText(about, cause || seen || '');
    rest.update([['Notes', notes?.join('\n')], ['Effect', effect], ['Fix', fix], ['Took', fix && seconds(took)]]);
  };
  return node;
}
