// Graphs as SVG: drawings of a place, and panes in which a whole graph is moved and zoomed.

const MARKS = {
  matched: 'what the rule matched',
  removed: 'is not there after',
  added: 'was not there before',
  rewired: 'computes the same of other operands',
};

function legend(names) {
  const entries = names.map((name) => el('li', {}, el('span', { class: name }), MARKS[name]));
  return [...entries, el('li', {}, el('span', { class: 'free' }), 'works on weights alone, when compiling')];
}

let arrows = 0;

// [svg, group, node elements, edge elements] of a drawing (as drawing.py makes it)
function drawn(drawing, label) {
  const arrow = `arrow-${arrows += 1}`;
  const marker = sv(
    'marker', { id: arrow, viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: 'userSpaceOnUse', orient: 'auto' },
    sv('path', { class: 'arrow', d: 'M0 0L8 4L0 8z' }),
  );
  const group = sv('g');
  const edges = drawing.edges.map(([from, to, points]) => {
    const edge = sv('path', { class: 'edge', d: curve(points), 'marker-end': `url(#${arrow})` });
    group.append(edge);
    return { from, to, edge };
  });
  const nodes = drawing.nodes.map(([x, y, width, height, name, second, kind, mark, text]) => {
    const box = sv(
      'g', { class: `node ${kind} ${mark}`, transform: `translate(${x - width / 2} ${y - height / 2})` },
      sv('rect', { width, height, rx: kind === 'op' || kind === 'free' ? 4 : height / 2 }),
      sv('text', { x: width / 2, y: second ? height / 2 - 3 : height / 2 + 4 }, name),
      second ? sv('text', { class: 'second', x: width / 2, y: height / 2 + 11 }, second) : null,
    );
    group.append(tells(box, text));
    return box;
  });
  const svg = sv('svg', { role: 'img', 'aria-label': label }, sv('defs', {}, marker), group);
  return { svg, nodes, edges };
}

// through the points, upright at each
function curve(points) {
  let path = `M${points[0]} ${points[1]}`;
  for (let i = 2; i < points.length; i += 2) {
    const [x0, y0, x1, y1] = points.slice(i - 2, i + 2);
    const middle = (y0 + y1) / 2;
    path += x0 === x1 ? `V${y1}` : `C${x0} ${middle} ${x1} ${middle} ${x1} ${y1}`;
  }
  return path;
}

// a place in a graph, at its own size
function place(drawing, title) {
  const { svg } = drawn(drawing, title);
  const [width, height] = [drawing.width + 8, drawing.height + 8];
  fill(svg, { width, height, viewBox: `-4 -4 ${width} ${height}` }, []);
  const more = drawing.left_out ? el('p', { class: 'note' }, `${drawing.left_out} more neighbours are not drawn.`) : null;
  return el('figure', {}, el('h3', {}, title), el('div', { class: 'canvas', tabindex: 0, role: 'region', 'aria-label': title }, svg), more);
}

// A whole graph in a pane. Its view is the SVG's viewBox.
function pane(drawing, title) {
  const { svg, nodes, edges } = drawn(drawing, title);
  svg.setAttribute('tabindex', '0');
  const told = el('pre', { class: 'told', 'aria-live': 'polite' }, 'Nothing is chosen.');
  const changed = drawing.nodes.flatMap((node, i) => (node[7] ? [i] : [])).sort((a, b) => drawing.nodes[a][1] - drawing.nodes[b][1]);
  const view = { x: 0, y: 0, scale: 1 };  // the middle, and pixels of the screen for one of the drawing
  let at = -1;

  function show() {
    const [width, height] = [svg.clientWidth || 800, svg.clientHeight || 600];
    svg.setAttribute('viewBox', [view.x - width / view.scale / 2, view.y - height / view.scale / 2, width / view.scale, height / view.scale].join(' '));
  }
  function fit() {
    const [width, height] = [svg.clientWidth || 800, svg.clientHeight || 600];
    Object.assign(view, { x: drawing.width / 2, y: drawing.height / 2 });
    view.scale = Math.min(1.5, width / (drawing.width + 40), height / (drawing.height + 40));
    show();
  }
  function zoom(factor, x = view.x, y = view.y) {
    const scale = Math.min(6, Math.max(0.005, view.scale * factor));
    view.x = x + (view.x - x) * (view.scale / scale);
    view.y = y + (view.y - y) * (view.scale / scale);
    view.scale = scale;
    show();
  }
  function choose(i) {
    nodes.forEach((node, j) => node.classList.toggle('chosen', i === j));
    edges.forEach(({ from, to, edge }) => edge.classList.toggle('chosen', from === i || to === i));
    told.textContent = i === null ? 'Nothing is chosen.' : drawing.nodes[i][8];
  }
  function go(by) {
    at = at < 0 && by < 0 ? changed.length - 1 : (at + by + changed.length) % changed.length;
    const [x, y] = drawing.nodes[changed[at]];
    Object.assign(view, { x, y, scale: Math.max(view.scale, 0.9) });
    show();
    choose(changed[at]);
  }
  function point(event) {
    const box = svg.getBoundingClientRect();
    return [
      view.x + (event.clientX - box.left - box.width / 2) / view.scale,
      view.y + (event.clientY - box.top - box.height / 2) / view.scale,
    ];
  }

  let held = null;
  svg.addEventListener('pointerdown', (event) => {
    held = { x: event.clientX, y: event.clientY, moved: false, target: event.target };
    svg.focus({ preventScroll: true });
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener('pointermove', (event) => {
    if (!held) return;
    const [dx, dy] = [event.clientX - held.x, event.clientY - held.y];
    if (!held.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
    Object.assign(held, { x: event.clientX, y: event.clientY, moved: true });
    view.x -= dx / view.scale;
    view.y -= dy / view.scale;
    tip.hidden = true;
    show();
  });
  const release = (event) => {
    if (held && !held.moved && event.type === 'pointerup') {
      const index = nodes.indexOf(held.target.closest('.node'));
      choose(index < 0 ? null : index);
    }
    held = null;
  };
  svg.addEventListener('pointerup', release);
  svg.addEventListener('pointercancel', release);
  svg.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !svg.contains(document.activeElement)) return;  // the page scrolls
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.0016), ...point(event));
  }, { passive: false });
  svg.addEventListener('keydown', (event) => {
    const far = 60 / view.scale;
    const moves = { ArrowLeft: [-far, 0], ArrowRight: [far, 0], ArrowUp: [0, -far], ArrowDown: [0, far] };
    if (event.key in moves) { view.x += moves[event.key][0]; view.y += moves[event.key][1]; show(); }
    else if (event.key === '+' || event.key === '=') zoom(1.3);
    else if (event.key === '-') zoom(1 / 1.3);
    else if (event.key === '0') fit();
    else return;
    event.preventDefault();
  });

  const press = (text, does, name) => el('button', { type: 'button', 'aria-label': name, title: name, on: { click: does } }, text);
  const bar = el(
    'div', { class: 'bar' },
    press('−', () => zoom(1 / 1.3), 'Zoom out'), press('+', () => zoom(1.3), 'Zoom in'), press('All', fit, 'Show all'),
    ...(changed.length ? [press('‹', () => go(-1), 'Change before'), press('›', () => go(1), 'Next change')] : []),
    el('span', { class: 'note' }, `${drawing.nodes.filter((node) => node[6] === 'op' || node[6] === 'free').length} operators, ${changed.length} changed`),
  );
  new ResizeObserver(show).observe(svg);
  requestAnimationFrame(() => {
    fit();
    if (view.scale >= 0.35) return;  // else nothing could be read
    if (changed.length) { go(1); choose(null); at = -1; } else Object.assign(view, { x: drawing.nodes[0][0], y: 250, scale: 0.8 }), show();
  });
  return el('figure', {}, el('h3', {}, title), bar, el('div', { class: 'pane' }, svg, told));
}
