// Formats values for people.

const units = ['B', 'kB', 'MB', 'GB', 'TB'];

export function bytes(n) {
  let value = Number(n) || 0;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const rate = (n) => `${bytes(n)}/s`;

export function seconds(s) {
  if (!s) return '';
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.00995) return `${(s * 1e3).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1e3)} ms`;
  return s < 9.95 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`;
}

const two = (n) => String(n).padStart(2, '0');

// clock returns the time of day, with milliseconds.
export function clock(text) {
  const t = new Date(text);
  if (Number.isNaN(t.getTime())) return '';
  return `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}.${String(t.getMilliseconds()).padStart(3, '0')}`;
}

// age returns the time since then, as kubectl does.
export function age(text, now = Date.now()) {
  const s = Math.floor((now - new Date(text).getTime()) / 1000);
  if (!(s >= 0) || new Date(text).getTime() < 0) return '';
  if (s < 120) return `${s}s`;
  if (s < 7200) return `${Math.floor(s / 60)}m`;
  if (s < 172800) return `${Math.floor(s / 3600)}h`;
  return `${Math.floor(s / 86400)}d`;
}

// count returns "1 flow" or "2 flows".
export const count = (n, what) => `${n} ${what}${n === 1 ? '' : 's'}`;
