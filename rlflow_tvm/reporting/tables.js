// Tables of kernels, and heat maps of rules.

function kernelTable(title, rows, others, cost, mark) {
  const known = new Set(others.map((row) => row.key));
  const body = rows.map((row) => {
    const own = !known.has(row.key);
    const share = el('td', { class: 'number share' }, row.share === null ? '' : percent(row.share));
    share.style.setProperty('--part', row.share === null ? 0 : row.share);
    return el(
      'tr', { class: own ? mark : null },
      el('td', { class: 'name' }, el('code', {}, row.name), own ? ` (${mark})` : '', el('span', { class: 'shapes' }, row.error || row.shapes)),
      el('td', {}, row.rule),
      el('td', { class: 'number' }, String(row.count)),
      el('td', { class: 'number' }, time(row.each)),
      el('td', { class: 'number' }, time(row.secs)),
      share,
    );
  });
  const heads = [['Kernel', ''], ['Schedule rule', ''], ['Launches', 'number'], ['Each', 'number'], ['Together', 'number'], ['Share', 'number']];
  return el('div', {}, el('h3', {}, title), el(
    'div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': title },
    el(
      'table', {},
      el('caption', {}, `${rows.length} kernels, ${cost.kernels} launches; launching takes ${time(cost.launch_secs)} beside.`),
      el('thead', {}, el('tr', {}, ...heads.map(([text, kind]) => el('th', { scope: 'col', class: kind || null }, text)))),
      el('tbody', {}, ...body),
    ),
  ));
}

function heatMap(table, caption, tall) {
  const most = Math.max(1, ...table.rows.flatMap((row) => row.counts));
  const body = table.rows.map(({ rule, counts }) => {
    const cells = counts.map((count) => {
      const cell = el('td', {}, count ? String(count) : '');
      cell.style.setProperty('--heat', count ? 0.25 + 0.75 * (Math.log1p(count) / Math.log1p(most)) : 0);
      return cell;
    });
    return el('tr', {}, el('th', { scope: 'row' }, rule), ...cells, el('td', {}, String(counts.reduce((a, b) => a + b, 0))));
  });
  const heads = ['Rule', ...table.columns, 'all'].map((text) => el('th', { scope: 'col' }, text));
  return el(
    'div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
    el('table', { class: tall ? 'heat tall' : 'heat' }, el('caption', {}, caption), el('thead', {}, el('tr', {}, ...heads)), el('tbody', {}, ...body)),
  );
}
