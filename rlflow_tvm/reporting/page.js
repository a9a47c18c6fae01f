// The page's parts, each from its part of the data.

const data = JSON.parse(byId('data').textContent);
const parts = [];

function part(id, there, make) {
  const section = byId(id);
  if (!there) { section.remove(); return; }
  make();
  parts.push(el('li', {}, el('a', { href: `#${id}` }, section.querySelector('h2').textContent)));
}

function head() {
  const { start, end } = data;
  byId('model').textContent = data.model;
  const by = data.agent ? `Best plan of a training (${data.agent}). ` : '';
  byId('told').textContent = `${by}Priced for ${data.target}.`;
  const figure = (name, value, small) => el('div', {}, el('dt', {}, name), el('dd', {}, value, small ? el('small', {}, small) : null));
  const change = (name, before, after, write) => figure(name, write(after), before === after ? 'as before' : `before: ${write(before)}`);
  byId('figures').append(
    change('Cost of a run', start.secs, end.secs, time),
    figure('Gain', data.gain === null ? 'unknown' : `${data.gain.toFixed(3)}×`, 'cost before / cost after'),
    figure('Rewrites', String(data.steps.length)),
    change('Launches', start.kernels, end.kernels, String),
    change('Operations', start.flops, end.flops, (value) => amount(value, 'FLOP')),
    change('Bytes moved', start.bytes_moved, end.bytes_moved, (value) => amount(value, 'B')),
    change('Memory at most', start.peak_bytes, end.peak_bytes, (value) => amount(value, 'B')),
  );
}

function costs() {
  const { steps, start } = data;
  const secs = [start.secs, ...steps.map((step) => step.after)];
  const known = secs.filter((each) => each !== null);
  const most = known.length ? Math.max(...known) : 0;
  const [unit, factor] = most >= 1 ? ['s', 1] : most >= 1e-3 ? ['ms', 1e3] : ['µs', 1e6];
  const rows = stepRows(steps);
  const tellOf = (i) => (i ? `${i}. ${steps[i - 1].rule}\n${time(secs[i - 1])} -> ${time(secs[i])}` : `before the first rewrite: ${time(secs[0])}`);
  if (known.length) {
    byId('cost-chart').append(lineChart({
      points: secs.map((each, i) => [i, each === null ? null : each * factor]), label: 'Cost after each rewrite', xLabel: 'rewrites',
      yLabel: `cost, ${unit}`, whole: true, tellOf, pick: (i) => rows[i - 1].open(true),
    }));
  }
  const failed = [data.start, ...steps.map((step) => step.cost)].flatMap((cost, i) => cost.failed.map((text) => `After ${i} rewrites: ${text}`));
  byId('cost-note').textContent = steps.length
    ? `The sum of the kernels' times after each rewrite. The axis does not begin at nought.${failed.length ? ` ${failed.join(' ')}` : ''}`
    : 'The plan is empty: nothing cheaper was found.';
  const heads = [['', 'number'], ['Rule', ''], ['Equation', ''], ['Before', 'number'], ['After', 'number'], ['Change', 'number'], ['Launches', 'number']];
  byId('steps').append(
    el('thead', {}, el('tr', {}, ...heads.map(([text, kind]) => el('th', { scope: 'col', class: kind || null }, text)))),
    el('tbody', {}, ...rows.flatMap(({ row, detail }) => [row, detail])),
  );
}

function stepRows(steps) {
  return steps.map((step, i) => {
    const detail = el('tr', { class: 'open', id: `step-${i + 1}`, hidden: true });
    const button = el('button', { type: 'button', class: 'rule', 'aria-expanded': 'false', 'aria-controls': detail.id }, step.rule);
    const difference = step.before === null || step.after === null ? null : step.after - step.before;
    const kind = !difference ? '' : difference < 0 ? ' good' : ' bad';
    const sign = difference > 0 ? '+' : '';
    const row = el(
      'tr', {}, el('td', { class: 'number' }, String(i + 1)), el('td', {}, button), el('td', {}, el('code', {}, step.equation), step.when.length ? el('code', { class: 'when' }, `if ${step.when.join(' and ')}`) : null),
      el('td', { class: 'number' }, time(step.before)), el('td', { class: 'number' }, time(step.after)),
      el('td', { class: `number${kind}` }, difference === null ? 'unknown' : `${sign}${time(difference)} (${sign}${percent(difference / step.before)})`),
      el('td', { class: 'number' }, String(step.cost.kernels)),
    );
    function open(wanted) {
      if (wanted && !detail.firstChild) detail.append(el('td', { colspan: 7 }, ...places(step)));
      detail.hidden = !wanted;
      button.setAttribute('aria-expanded', String(wanted));
      if (wanted) row.scrollIntoView({ block: 'nearest' });
    }
    button.addEventListener('click', () => open(detail.hidden));
    return { row, detail, open };
  });
}

function places(step) {
  const { before, after } = step.drawings;
  return [
    el('p', { class: 'note' }, `Family ${step.family}, site ${step.site}. Neighbours are drawn plain.`),
    el('ul', { class: 'legend' }, ...legend(Object.keys(MARKS))),
    el('div', { class: 'pair' }, place(before, 'Before'), place(after, 'After')),
  ];
}

function training() {
  const box = byId('training-charts');
  const chart = (name, xLabel, options) => box.append(el('figure', {}, el('figcaption', {}, name), lineChart({
    label: `${name} by ${xLabel}`, xLabel, yLabel: '', width: 400, height: 220, ...options,
  })));
  if (data.best.length) {
    chart('best cost, ms', 'environment steps', {
      points: data.best.map(([steps, secs]) => [steps, secs * 1e3]), steps: true,
      tellOf: (i) => `after ${data.best[i][0]} steps: ${time(data.best[i][1])}`,
    });
  }
  for (const { name, points, over } of data.curves) chart(name.replaceAll('_', ' '), over, { points });
}

head();
part('cost', true, costs);
part('kernels', true, () => byId('kernel-tables').append(
  kernelTable('Before', data.kernels.before, data.kernels.after, data.start, 'gone'),
  kernelTable('After', data.kernels.after, data.kernels.before, data.end, 'new'),
));
part('graph', true, () => {
  byId('graph-legend').append(...legend(['removed', 'added', 'rewired']));
  byId('graphs').append(pane(data.graphs.before, 'Before'), pane(data.graphs.after, 'After'));
});
part('training', data.curves.length || data.best.length, training);
part('rules', data.rules.rows.length || (data.models && data.models.rows.length), () => {
  if (data.rules.rows.length) byId('heat').append(heatMap(data.rules, 'How often each rule stands at which place of the plan', false));
  if (data.models) byId('heat').append(heatMap(data.models, "How often each rule stands in each model's best plan", true));
});
byId('parts').append(...parts);
