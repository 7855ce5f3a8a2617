// Reads the updates of the daemon and shows the view that the address names.
import {announce, setText} from './dom.js';
import {dropToken, lines, send, takeToken} from './daemon.js';
import {Connections, summary} from './connections.js';
import {Flows} from './flows.js';
import {Names} from './names.js';
import {Intercepts} from './intercepts.js';
import {Checks} from './checks.js';
import {Log} from './log.js';

const section = (id) => document.getElementById(id);
const views = {
  connections: new Connections(section('connections')), flows: new Flows(section('flows')), names: new Names(section('names')),
  intercepts: new Intercepts(section('intercepts')), checks: new Checks(section('checks')), log: new Log(section('log')),
};
let last; // the last update
let paused = false;

// shown returns the name of the view.
const shown = () => (location.hash.slice(1) in views ? location.hash.slice(1) : 'connections');

function draw() {
  if (!last || paused) return;
  summary(last.status);
  setText(section('version'), `kubevpn ${last.status.version}`);
  views[shown()].update(last);
}

// navigate shows the view of the address, and moves the focus to its heading.
function navigate(focus) {
  const name = shown();
  for (const id of Object.keys(views)) section(id).hidden = id !== name;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.hash === `#${name}`) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  const title = section(`${name}-title`);
  document.title = `${title.textContent} – kubevpn`;
  draw();
  if (!focus) return;
  title.focus({preventScroll: true});
  scrollTo(0, 0);
}

function problem(text) {
  section('problem').hidden = false;
  setText(section('problem'), text);
}

// follow reads updates until the page ends. It does not try again: another program may serve this address by then.
async function follow() {
  try {
    for await (const update of lines(await send('updates'))) {
      last = update;
      for (const view of Object.values(views)) view.sample?.(update);
      draw();
    }
    problem('The daemon has ended, so this page shows old data. Run `kubevpn ui` and open the new page.');
  } catch (e) {
    problem(e.status ? e.message : 'The daemon does not answer, so this page shows old data. Run `kubevpn ui` and open the new page.');
  }
  dropToken();
}

section('pause').addEventListener('click', (event) => {
  paused = !paused;
  event.target.setAttribute('aria-pressed', String(paused));
  announce(paused ? 'The page is paused' : 'The page follows the state again');
  draw();
});
addEventListener('hashchange', () => {
  if (location.hash.startsWith('#token=')) location.reload(); // of a new page at the same address
  else if (location.hash !== '#main') navigate(true);
});

const known = takeToken();
navigate(false);
if (known) follow();
else problem('This tab has no token. Run `kubevpn ui` and open the URL that it prints.');
