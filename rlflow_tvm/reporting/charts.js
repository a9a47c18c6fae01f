// Making elements, writing numbers, and curves. Texts become text nodes and attributes, never markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'on') for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const sv = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

// seconds for a person, in a unit that fits
function time(secs) {
  if (secs === null || secs === undefined) return 'unknown';
  const size = Math.abs(secs);
  if (size >= 1) return `${secs.toFixed(3)} s`;
  return size >= 1e-4 || size === 0 ? `${(secs * 1e3).toFixed(3)} ms` : `${(secs * 1e6).toFixed(1)} µs`;
}

// a number with a decimal prefix: operations, bytes
function amount(value, unit) {
  const prefixes = ['', 'k', 'M', 'G', 'T', 'P'];
  let step = 0;
  while (Math.abs(value) >= 999.5 && step < prefixes.length - 1) { value /= 1000; step += 1; }
  return `${step ? value.toPrecision(3) : value} ${prefixes[step]}${unit}`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

// round numbers between two values, about so many of them
function ticks(low, high, about) {
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

const plain = (value) => String(Number.isInteger(value) ? value : Number(value.toPrecision(6)));

const tip = byId('tip');

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
}

// An element that tells `text` while the pointer is over it, or, if it can have it, the focus: to listen for the focus
// makes an SVG element take it.
function tells(element, text) {
  element.addEventListener('pointermove', (event) => showTip(text, event.clientX, event.clientY));
  element.addEventListener('pointerleave', () => { tip.hidden = true; });
  if (!element.hasAttribute('tabindex')) return element;
  element.addEventListener('focus', () => {
    const box = element.getBoundingClientRect();
    showTip(text, box.right, box.bottom);
  });
  element.addEventListener('blur', () => { tip.hidden = true; });
  return element;
}

// A curve through `points` [x, y]; y may be null where nothing is known. `pick(i)`: called for a click on a point.
// `tellOf(i)`: what its tooltip says. `whole`: x are whole numbers. `steps`: a value holds until the next point.
function lineChart({ points, label, xLabel, yLabel, width = 900, height = 300, whole = false, steps = false, tellOf, pick }) {
  const known = points.filter(([, y]) => y !== null);
  const margin = { left: 66, right: 14, top: 12, bottom: 40 };
  const xs = points.map(([x]) => x);
  const ys = known.map(([, y]) => y);
  let [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (left === right) [left, right] = whole ? [left, left + 1] : [left - 1, right + 1];
  const space = high === low ? Math.abs(high) * 0.05 || 1 : (high - low) * 0.08;
  [low, high] = [low - space, high + space];
  const atX = (x) => margin.left + ((x - left) / (right - left)) * (width - margin.left - margin.right);
  const atY = (y) => height - margin.bottom - ((y - low) / (high - low)) * (height - margin.top - margin.bottom);
  const across = ticks(left, right, width / 90).filter((x) => !whole || Number.isInteger(Number(plain(x))));
  const svg = sv('svg', { viewBox: `0 0 ${width} ${height}`, role: pick ? 'group' : 'img', 'aria-label': label });
  const axis = sv('g', { class: 'axis' });
  for (const y of ticks(low, high, height / 55)) {
    axis.append(
      sv('line', { x1: margin.left, x2: width - margin.right, y1: atY(y), y2: atY(y) }),
      sv('text', { x: margin.left - 6, y: atY(y) + 4, 'text-anchor': 'end' }, plain(y)),
    );
  }
  for (const x of across) axis.append(sv('text', { x: atX(x), y: height - margin.bottom + 16, 'text-anchor': 'middle' }, plain(x)));
  axis.append(
    sv('text', { x: (margin.left + width - margin.right) / 2, y: height - 6, 'text-anchor': 'middle' }, xLabel),
    sv('text', { transform: `translate(12 ${(height - margin.bottom) / 2 + 6}) rotate(-90)`, 'text-anchor': 'middle' }, yLabel),
  );
  let path = '';
  let gap = true;
  points.forEach(([x, y]) => {
    if (y === null) { gap = true; return; }
    path += gap ? `M${atX(x)} ${atY(y)}` : steps ? `H${atX(x)}V${atY(y)}` : `L${atX(x)} ${atY(y)}`;
    gap = false;
  });
  svg.append(axis, sv('path', { class: 'curve', d: path }));
  const radius = Math.max(1.5, Math.min(5.5, (0.4 * (width - margin.left - margin.right)) / points.length));
  if (pick || known.length <= 60) {
    points.forEach(([x, y], i) => {
      if (y === null) return;
      const text = tellOf ? tellOf(i) : `${plain(x)}: ${plain(y)}`;
      const clickable = pick && i > 0;
      const dot = sv('circle', {
        class: clickable ? 'dot pick' : 'dot', cx: atX(x), cy: atY(y), r: clickable ? radius : Math.min(radius, 3.5),
        // the table's buttons are there for keys
        ...(clickable ? { tabindex: points.length <= 60 ? 0 : -1, role: 'button', 'aria-label': text } : {}),
      });
      if (clickable) {
        dot.addEventListener('click', () => pick(i));
        dot.addEventListener('keydown', (event) => {
          if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); pick(i); }
        });
      }
      svg.append(tells(dot, text));
    });
  }
  return svg;
}
