// Draws the report from the data in the page. Charts are SVG, drawn again when the
// width of their place changes; colors are those of the style sheet.

const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["--a", "--b", "--c", "--d", "--e", "--f"].map((name) => `var(${name})`);
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "12 4", "4 2"];
const dashOf = (series, i) => (series[i].dashed ? "4 3" : DASHES[series.slice(0, i).filter((line) => !line.dashed).length % DASHES.length]);

// ---- elements and numbers -----------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

function show(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e12 || (size < 1e-4 && size > 0)) return value.toExponential(digits - 2);
  if (size < 1e4) return String(Number(value.toPrecision(Math.max(digits, Number.isInteger(value) ? 5 : 0))));
  return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, digits - Math.ceil(Math.log10(size))) });
}

const pen = document.createElement("canvas").getContext("2d");

/** The width of a text in a chart, in pixels. */
function measure(text) {
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

/** Cuts the middle of a text until it fits. */
function fit(text, width) {
  let most = String(text).length;
  while (most > 3 && measure(cut(text, most)) > width) most--;
  return cut(text, most);
}

function cut(text, most = 22) {
  text = String(text);
  if (text.length <= most) return text;
  const end = Math.floor((most - 1) / 2);
  return text.slice(0, most - 1 - end) + "…" + text.slice(text.length - end);
}

/** Shows ticks so that neighbors differ. */
function showTicks(marks) {
  const size = Math.max(...marks.map(Math.abs), 0), step = marks.length > 1 ? marks[1] - marks[0] : size;
  if (size < 1e4) return marks.map((mark) => show(mark, 6));
  const unit = 10 ** (3 * Math.floor(Math.log10(size) / 3));
  const digits = Math.min(9, Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  const format = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: digits });
  return marks.map((mark) => format.format(mark));
}

const finite = (values) => values.filter((value) => Number.isFinite(value));

function span(values, always = []) {
  const all = finite([...values, ...always]);
  let low = Infinity, high = -Infinity;
  for (const value of all) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
    const pad = Math.abs(low) / 10 || 1;
    return [low - pad, high + pad];
  }
  return [low, high];
}

function ticks([low, high], most) {
  const rough = (high - low) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 50; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

// ---- charts -------------------------------------------------------------------------

/** Returns a card with a title and a chart, which `paint(width)` draws as SVG. */
function card(title, paint, { wide = false, legend = null, table = null, label = title } = {}) {
  const place = make("div");
  const element = make("div", { className: wide ? "card wide" : "card" },
    make("h3", {}, title), place, legend, table);
  let width = 0;
  const repaint = (force) => {
    const now = Math.floor(place.clientWidth);
    if (now > 0 && (force || now !== width)) {
      width = now;
      const svg = paint(width);
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", label);
      place.replaceChildren(svg);
    }
  };
  new ResizeObserver(() => repaint(false)).observe(place);
  element.repaint = () => repaint(true);
  return element;
}

function frame(width, height, xs, ys, spec) {
  const rows = ticks(ys, 5), shown = showTicks(rows);
  const left = 26 + Math.max(...shown.map((text) => measure(text)), 8), right = 12, top = 8, bottom = 40;
  const x = (v) => left + ((v - xs[0]) / (xs[1] - xs[0])) * (width - left - right);
  const y = (v) => height - bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (height - top - bottom);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  rows.forEach((tick, i) => svg.append(
    draw("line", { class: "axis", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
    draw("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, shown[i])));
  const named = spec.x_names, marks = named ? named.map((_, i) => i) : ticks(xs, Math.min(7, width / 75));
  const texts = named ? named.map((name) => fit(name, (width - left) / named.length - 6)) : showTicks(marks);
  marks.forEach((tick, i) => svg.append(
    draw("text", { x: x(tick), y: height - bottom + 16, "text-anchor": "middle" }, texts[i], named ? draw("title", {}, named[tick]) : null)));
  svg.append(
    draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, fit(spec.x_label ?? "", width - left)),
    draw("text", { transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" },
      fit(spec.y_label ?? "", height - bottom)),
  );
  if (spec.diagonal) {
    const low = Math.max(xs[0], ys[0]), high = Math.min(xs[1], ys[1]);
    if (low < high) svg.append(draw("line", { class: "guide", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }));
  }
  if (spec.level != null) {
    svg.append(draw("line", { class: "guide", x1: left, x2: width - right, y1: y(spec.level), y2: y(spec.level) }));
  }
  return { svg, x, y };
}

function path(xs, ys, x, y) {
  let text = "", command = "M";
  xs.forEach((value, i) => {
    if (Number.isFinite(ys[i])) { text += `${command}${x(value).toFixed(1)} ${y(ys[i]).toFixed(1)}`; command = "L"; }
    else command = "M";
  });
  return text;
}

function paintLines(spec, width) {
  const height = Math.min(300, 160 + width / 4);
  const every = spec.series.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]);
  const { range } = spec, xs = range ?? span(spec.x), ys = range ?? span(every, spec.zero ? [0] : []);
  const { svg, x, y } = frame(width, height, xs, ys, spec);
  spec.series.forEach((line, i) => {
    const stroke = COLORS[i % COLORS.length];
    if (line.low) {
      const back = [...spec.x.keys()].reverse();
      const points = [...spec.x.map((v, j) => [v, line.high[j]]), ...back.map((j) => [spec.x[j], line.low[j]])];
      svg.append(draw("polygon", { points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(" "), fill: stroke, opacity: 0.18 }));
    }
    svg.append(draw("path", { d: path(spec.x, line.y, x, y), fill: "none", stroke, "stroke-width": 2,
      "stroke-dasharray": dashOf(spec.series, i) }));
    if (line.dots || spec.x.length === 1) {
      spec.x.forEach((v, j) => Number.isFinite(line.y[j]) && svg.append(draw("circle", { cx: x(v), cy: y(line.y[j]), r: 3.5, fill: stroke })));
    }
  });
  if (spec.mark) {
    const at = x(spec.mark.x), end = at > width * 0.6;
    svg.append(draw("line", { class: "guide", x1: at, x2: at, y1: 8, y2: height - 40 }),
      draw("text", { class: "strong", x: at + (end ? -5 : 5), y: 18, "text-anchor": end ? "end" : "start" }, spec.mark.text));
  }
  return svg;
}

function paintIntervals(spec, width) {
  const height = Math.min(300, 160 + width / 4);
  const all = [...spec.y, ...spec.low, ...spec.high];
  const { range } = spec;
  const xs = range ?? span(spec.x), ys = range ?? span(all, spec.level != null ? [spec.level] : []);
  const { svg, x, y } = frame(width, height, xs, ys, spec);
  spec.x.forEach((v, i) => {
    svg.append(
      draw("line", { x1: x(v), x2: x(v), y1: y(spec.low[i]), y2: y(spec.high[i]), stroke: COLORS[0], "stroke-width": 2 }),
      draw("circle", { cx: x(v), cy: y(spec.y[i]), r: 4, fill: COLORS[0] },
        draw("title", {}, `${show(v)}: ${show(spec.y[i])} (${show(spec.low[i])} to ${show(spec.high[i])})`)),
    );
  });
  return svg;
}

/** The look of a point by the rank of a value; without a rank it is hollow. */
const look = (share) => share == null ? { fill: "none", stroke: "var(--soft)" }
  : { fill: `color-mix(in oklab, var(--b) ${Math.round(share * 100)}%, var(--a))` };

function paintPoints(spec, width) {
  const height = Math.min(300, 170 + width / 4);
  let xs = span(spec.x), ys = span(spec.y);
  if (spec.diagonal) xs = ys = span([...spec.x, ...spec.y]);
  if (spec.x_names) xs = [-0.5, spec.x_names.length - 0.5];
  const { svg, x, y } = frame(width, height, xs, ys, spec);
  spec.x.forEach((v, i) => {
    if (v == null || spec.y[i] == null) return;
    svg.append(draw("circle", { cx: x(v).toFixed(1), cy: y(spec.y[i]).toFixed(1), r: 2.6, opacity: 0.6,
      ...(spec.shares ? look(spec.shares[i]) : { fill: COLORS[0] }) }));
  });
  return svg;
}

function paintBars(spec, width) {
  const label = Math.min(width * 0.46, 14 + Math.max(...spec.labels.map((name) => measure(name)), 20)), line = 24, bottom = 40;
  const height = spec.labels.length * line + bottom;
  const error = spec.error ?? spec.values.map(() => 0);
  const xs = span([...spec.values.map((v, i) => v - error[i]), ...spec.values.map((v, i) => v + error[i])], [0, spec.level ?? 0]);
  const x = (v) => label + ((v - xs[0]) / (xs[1] - xs[0])) * (width - label - 58);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  drawAxis(svg, xs, x, width, height, bottom, spec.x_label ?? "", label);
  if (spec.level) svg.append(draw("line", { class: "guide", x1: x(spec.level), x2: x(spec.level), y1: 0, y2: height - bottom }));
  spec.labels.forEach((name, i) => {
    const value = spec.values[i], low = Math.min(0, value), high = Math.max(0, value), middle = i * line + line / 2;
    svg.append(
      draw("text", { class: "strong", x: label - 8, y: middle + 4, "text-anchor": "end" }, spec.ends ? fit(name.slice(0, -spec.ends[i].length), label - 10 - measure(spec.ends[i])) + spec.ends[i] : fit(name, label - 8), draw("title", {}, name)),
      draw("rect", { x: x(low), y: middle - 8, width: Math.max(0.5, x(high) - x(low)), height: 16, rx: 2,
        fill: spec.signs && value < 0 ? COLORS[0] : spec.signs ? COLORS[1] : COLORS[0], opacity: 0.85 }),
      draw("text", { x: x(Math.max(high, value + error[i])) + 5, y: middle + 4 }, (spec.signs && value > 0 ? "+" : "") + show(value, 3)),
    );
    if (error[i]) {
      svg.append(draw("line", { x1: x(value - error[i]), x2: x(value + error[i]), y1: middle, y2: middle, stroke: "var(--ink)", "stroke-width": 1.5 }));
    }
  });
  return svg;
}

/** Draws the ticks and the label of a horizontal axis below bars. */
function drawAxis(svg, xs, x, width, height, bottom, text, left) {
  const marks = ticks(xs, (width - left) / 90), shown = showTicks(marks);
  marks.forEach((tick, i) => svg.append(
    draw("line", { class: tick === 0 ? "guide" : "axis", x1: x(tick), x2: x(tick), y1: 0, y2: height - bottom + 3 }),
    draw("text", { x: x(tick), y: height - bottom + 17, "text-anchor": "middle" }, shown[i])));
  svg.append(draw("text", { x: width - 4, y: height - 5, "text-anchor": "end" }, fit(text, width - 8)));
}

/** A region that scrolls sideways, with a name for screen readers. */
const scroll = (label, ...children) => make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": label }, ...children);

function tableOf(headings, rows, label) {
  return scroll(label, make("table", {},
    make("thead", {}, make("tr", {}, ...headings.map((text) => (text ? make("th", { scope: "col" }, text) : make("td"))))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) =>
      make("td", {}, cell instanceof Node ? cell : show(cell))))))));
}

function legendOf(series) {
  if (series.length < 2) return null;
  return make("div", { className: "legend" }, ...series.map((line, i) => make("span", {},
    draw("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, draw("line", { x1: 0, x2: 24, y1: 4, y2: 4, stroke: COLORS[i % COLORS.length],
      "stroke-width": 3, "stroke-dasharray": dashOf(series, i) })), line.name)));
}

function matrixCard(spec) {
  const body = spec.cells.map((row, i) => {
    const total = row.reduce((a, b) => a + b, 0);
    return make("tr", {}, make("th", { scope: "row" }, cut(spec.labels[i])), ...row.map((cell) => make("td", {
      style: `background: color-mix(in oklab, var(--a) ${total ? Math.round((40 * cell) / total) : 0}%, var(--card))`,
      title: total ? `${show(100 * cell / total, 3)} % of the class` : "" }, show(cell))));
  });
  return make("div", { className: spec.wide ? "card wide" : "card" }, make("h3", {}, spec.title),
    make("p", { className: "note" }, "Rows: true class. Columns: predicted class. Cells: weight of rows; colors: share of the true class."),
    scroll("Confusion", make("table", { className: "matrix" },
      make("thead", {}, make("tr", {}, make("td"), ...spec.labels.map((name) => make("th", { scope: "col" }, cut(name, 12))))),
      make("tbody", {}, ...body))));
}

function chart(spec) {
  if (spec.type === "matrix") return matrixCard(spec);
  const paint = { lines: paintLines, intervals: paintIntervals, points: paintPoints, bars: paintBars }[spec.type];
  const numbers = spec.type === "lines"
    ? [[spec.x_label, ...spec.series.map((line) => line.name)], spec.x.map((v, i) => [v, ...spec.series.map((line) => line.y[i])])]
    : spec.type === "intervals" ? [[spec.x_label, spec.y_label, "low", "high"], spec.x.map((v, i) => [v, spec.y[i], spec.low[i], spec.high[i]])]
    : spec.type === "bars" ? [["", spec.x_label], spec.labels.map((name, i) => [name, spec.values[i]])] : null;
  const table = numbers && make("details", {}, make("summary", {}, "Numbers"), tableOf(...numbers, spec.title));
  return card(spec.title, (width) => paint(spec, width),
    { wide: spec.wide, legend: spec.series && legendOf(spec.series), table });
}

// ---- how good, what it uses ---------------------------------------------------------

const section = (name) => document.getElementById(name);
const grid = (...children) => make("div", { className: "grid" }, ...children);
const pair = (...children) => make("div", { className: "grid pair" }, ...children);
const nameOf = (feature) => data.features[feature].name;

function valueOf(feature, value) {
  const { levels, codes } = data.features[feature];
  if (value == null || Number.isNaN(value)) return "missing";
  return levels ? levels[codes.indexOf(value)] ?? "another" : show(value, 5);
}

function targetOf(target) {
  return (data.quality.num_classes && data.classes?.[target]) || show(target, 6);
}

function showQuality() {
  const { kind, numbers, charts } = data.quality;
  section("quality").append(
    make("p", { className: "note" }, `Kind of targets: ${kind}.`),
    make("ul", { className: "tiles" }, ...numbers.map(([name, value]) => make("li", {}, make("b", {}, show(value)), make("span", {}, name)))),
    ...(data.warnings.length ? [make("div", { className: "card" }, make("h3", {}, "Worth a look"),
      make("ul", { className: "plain" }, ...data.warnings.map((text) => make("li", {}, text))))] : []),
    grid(...data.curves.map(chart), ...charts.map(chart)));
}

/** Ranks of the values of a feature; categories have none. */
const ranksOf = (feature, values) => (data.features[feature].levels ? values.map(() => null) : rank(values));

/** Ranks of values from 0 to 1; null for missing values and constant columns. */
function rank(values) {
  const order = values.map((value, i) => [value, i]).filter(([value]) => value != null).sort((a, b) => a[0] - b[0]);
  const found = values.map(() => null);
  if (!order.length || order[0][0] === order[order.length - 1][0]) return found;
  for (let i = 0; i < order.length;) {
    let end = i;
    while (end < order.length && order[end][0] === order[i][0]) end++;
    for (let j = i; j < end; j++) found[order[j][1]] = (i + end - 1) / 2 / (order.length - 1);
    i = end;
  }
  return found;
}

function paintSwarms(score, width) {
  const { top, values, shap } = data.explained;
  const label = Math.min(width * 0.34, 14 + Math.max(...top.map((f) => measure(nameOf(f))))), line = 34, bottom = 40, height = top.length * line + bottom;
  const xs = span(shap[score].flat(), [0]);
  const x = (v) => label + 8 + ((v - xs[0]) / (xs[1] - xs[0])) * (width - label - 20);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  drawAxis(svg, xs, x, width, height, bottom, "SHAP value: change of the score", label);
  top.forEach((feature, place) => {
    const middle = place * line + line / 2, taken = new Map();
    const shares = ranksOf(feature, values[place]);
    svg.append(draw("text", { class: "strong", x: label, y: middle + 4, "text-anchor": "end" }, fit(nameOf(feature), label - 4), draw("title", {}, nameOf(feature))));
    shap[score][place].forEach((v, i) => {
      const bin = Math.round(x(v) / 3), number = taken.get(bin) ?? 0;
      taken.set(bin, number + 1);
      const shift = Math.min(13, Math.ceil(number / 2) * 2.2) * (number % 2 ? -1 : 1);
      svg.append(draw("circle", { cx: x(v).toFixed(1), cy: (middle + shift).toFixed(1), r: 2.2, opacity: 0.75, ...look(shares[i]) }));
    });
  });
  return svg;
}

function dependence(place, score) {
  const { top, values, shap, partners } = data.explained;
  const feature = top[place], { levels, codes } = data.features[feature];
  const partner = partners[place] != null && !data.features[top[partners[place]]].levels ? partners[place] : null;
  if (levels && levels.length > 6) return meansByCategory(feature, values[place], shap[score][place]);
  const spec = { x: values[place].map((v) => (levels && v != null ? codes.indexOf(v) : v)), y: shap[score][place], x_label: nameOf(feature), y_label: "SHAP value", x_names: levels, level: 0,
    shares: partner == null ? null : rank(values[partner]) };
  const text = partner == null ? null : make("div", { className: "legend" }, `Color: ${nameOf(top[partner])}, from blue (low) to orange (high); hollow: missing`);
  return card(nameOf(feature), (width) => paintPoints(spec, width),
    { legend: text, label: `SHAP values by ${nameOf(feature)}` });
}

/** Bars of the mean SHAP value of the most frequent categories of the sample. */
function meansByCategory(feature, values, shap) {
  const sums = new Map();
  values.forEach((value, i) => {
    const [sum, count] = sums.get(value) ?? [0, 0];
    sums.set(value, [sum + shap[i], count + 1]);
  });
  const frequent = [...sums].sort((a, b) => b[1][1] - a[1][1]).slice(0, 12).sort((a, b) => b[1][0] / b[1][1] - a[1][0] / a[1][1]);
  return chart({ type: "bars", signs: true, title: nameOf(feature), labels: frequent.map(([value]) => valueOf(feature, value)),
    values: frequent.map(([, [sum, count]]) => sum / count),
    x_label: `mean SHAP value${sums.size > 12 ? `, ${sums.size - 12} rarer left out` : ""}` });
}

function showUses() {
  const place = section("uses"), { shuffled, explained } = data;
  if (shuffled && shuffled.order.length) {
    place.append(chart({ type: "bars", wide: true, title: "Rise of the loss when a column is shuffled", labels: shuffled.order.map(nameOf),
      values: shuffled.values, error: shuffled.error, x_label: `rise of the mean loss, and its standard deviation (${shuffled.rows} rows)` }));
  }
  if (typeof explained === "string") { place.append(make("p", { className: "note" }, explained)); return; }
  const count = explained.shap.length;
  if (!shuffled) {
    place.append(chart({ type: "bars", wide: true, title: "Mean |SHAP value|", labels: explained.top.map(nameOf),
      values: explained.top.map((f) => explained.size[f]), error: explained.top.map((f) => explained.error[f]), x_label: "mean |SHAP value|, 95 % interval" }));
  }
  const charts = make("div");
  const paint = (score) => charts.replaceChildren(
    card("SHAP values of some rows: blue where the feature is low, orange where it is high, hollow for categories and missing values", (width) => paintSwarms(score, width), { wide: true }),
    make("h3", { style: "margin-top:1.2rem" }, "How the score depends on each feature"),
    grid(...explained.top.slice(0, 6).map((_, i) => dependence(i, score))));
  if (count > 1) {
    place.append(make("div", { className: "bar controls" }, make("label", {}, "Score ", make("select", {
      onchange: (event) => paint(Number(event.target.value)) },
      ...explained.shap.map((_, k) => make("option", { value: k }, data.classes?.[k] ?? String(k))))),
      data.model.num_scores > count ? make("span", { className: "note" }, `and ${data.model.num_scores - count} more scores`) : null));
  }
  paint(0);
  place.append(charts, make("h3", { style: "margin-top:1.2rem" }, "Single rows"), grid(...explained.examples.map(example)));
}

function example(row, i) {
  const half = data.explained.examples.length / 2, by = row.loss == null ? "score" : "loss";
  const which = i < half ? "highest" : "lowest";
  const score = data.model.num_scores > 1 ? `score ${data.classes?.[row.number] ?? row.number}` : "score";
  const ends = row.features.map((f, j) => ` = ${cut(valueOf(f, row.values[j]), 14)}`);
  const spec = { labels: row.features.map((f, j) => nameOf(f) + ends[j]), ends, values: row.shap, signs: true, x_label: `change of the ${score}` };
  const text = `Target ${targetOf(row.target)}; ${score}: ${show(row.score)}` + (row.loss == null ? "" : `; loss ${show(row.loss)}`)
    + `. The mean score is ${show(row.base)}` + (row.offset ? `, the offset ${show(row.offset)}.` : ".");
  return card(`Row ${row.row}: ${which} ${by}`, (width) => paintBars(spec, width), { legend: make("p", { className: "note" }, text) });
}

// ---- what if ------------------------------------------------------------------------

function outputNames() {
  const { link, num_scores, single } = data.model;
  if (link && link.names.length) return link.names.map((name) => (/^\d+$/.test(name) && data.classes?.[Number(name)]) || name);
  if (data.quality.num_classes === 2 && num_scores === 1 && link && link.body !== "return [s[0]];") {
    return [`probability of ${data.classes?.[1] ?? "class 1"}`];
  }
  return single || num_scores === 1 ? ["prediction"] : Array.from({ length: num_scores }, (_, k) => data.classes?.[k] ?? String(k));
}

function showWhatIf(trees, changed) {
  const place = section("whatif"), { features, model } = data, count = features.length;
  const order = typeof data.explained === "string" ? features.map((_, i) => i) : data.explained.order;
  const used = order.filter((f) => features[f].used && (features[f].levels || features[f].low != null));
  const rows = Array.from(model.starts, (_, i) => Array.from(trees.rows.subarray(i * count, (i + 1) * count)));
  const offsets = rows.map((_, i) => Array.from(trees.offset.subarray(i * model.num_scores, (i + 1) * model.num_scores)));
  let number = 0, row = rows[0].slice(), touched = used[0];
  if (!used.length) { place.append(make("p", { className: "note" }, "No tree uses a feature that has values in these rows.")); return; }
  const names = outputNames(), answer = make("div", { className: "answer" }), setters = [];
  const spoken = make("p", { className: "spoken", "aria-live": "polite" });
  let timer = 0;

  const along = card("Along one feature", (width) => {
    const { levels, codes, name } = features[touched], own = row[touched];
    const [low, high] = span([features[touched].low, features[touched].high, own]);
    const xs = levels ? codes : Array.from({ length: 121 }, (_, i) => low + ((high - low) * i) / 120);
    const found = xs.map((v) => { const other = row.slice(); other[touched] = v; return trees.predict(other, offsets[number]); });
    legend.replaceChildren();
    if (levels) return paintCategories(touched, found, trees.predict(row, offsets[number]), own, width);
    const shown = names.slice(0, 6);
    const spec = { x: xs, series: shown.map((text, k) => ({ name: text, y: found.map((each) => each[k]) })),
      x_label: name, y_label: shown.length === 1 ? shown[0] : "predictions", mark: Number.isFinite(own) ? { x: own, text: "this row" } : null };
    legend.replaceChildren(legendOf(spec.series) ?? "", names.length > 6 ? `and ${names.length - 6} more` : "");
    return xs.length > 1 ? paintLines(spec, width) : draw("svg");
  }, { legend: make("div") });
  const legend = along.lastElementChild;

  /** Bars of the greatest prediction of the row, by category; the widest apart of many. */
  function paintCategories(feature, found, now, own, width) {
    const k = now.indexOf(Math.max(...now)), { levels, codes } = features[feature];
    const far = codes.map((_, i) => i).sort((a, b) => Math.abs(found[b][k] - now[k]) - Math.abs(found[a][k] - now[k]));
    const kept = far.slice(0, 20).sort((a, b) => found[b][k] - found[a][k]);
    return paintBars({ labels: kept.map((i) => (codes[i] === own ? `▸ ${levels[i]}` : levels[i])), values: kept.map((i) => found[i][k]),
      x_label: `${names[k]} by ${nameOf(feature)}${levels.length > 20 ? ", 20 levels" : ""}`, level: now[k] }, width);
  }

  function update() {
    const now = trees.predict(row, offsets[number]), before = trees.predict(rows[number], offsets[number]);
    const lines = names.map((name, k) => [name, now[k], before[k], now[k] - before[k]]);
    answer.replaceChildren(tableOf(["", "now", "change", "at the start"], lines.slice(0, 30).map(([name, after, first, change]) =>
      [name, show(after, 6), show(change, 4), show(first, 6)]), "Predictions"), names.length > 30 ? `and ${names.length - 30} more` : "");
    clearTimeout(timer);
    timer = setTimeout(() => { spoken.textContent = `${names[0]} is ${show(now[0])}`; }, 500);
    along.repaint();
    changed(row);
  }

  function reset() {
    row = rows[number].slice();
    setters.forEach((set) => set());
    update();
  }

  const select = make("select", { id: "start", onchange: (event) => { number = Number(event.target.value); reset(); } },
    ...Array.from(model.starts, (start, i) => make("option", { value: i }, `row ${start}`)));
  const asks = used.map((f) => ask(f, () => row[f], (value) => { row[f] = value; touched = f; update(); }, setters));
  place.append(
    make("div", { className: "bar controls" }, make("label", {}, "Start from ", select), make("button", { type: "button", onclick: reset }, "Reset")),
    pair(make("div", { className: "card" }, make("h3", {}, "The row"), make("div", { className: "asks" }, ...asks)),
      make("div", { className: "card" }, make("h3", {}, "The prediction"), answer, spoken, make("div", { style: "height:.8rem" }), along)));
  if (!model.link) place.append(make("p", { className: "note" }, "The inverse link of this loss cannot be computed here; these are raw scores."));
  reset();
}

/** The inputs of one feature: a slider and a number, or the categories. */
function ask(feature, read, write, setters) {
  const { name, levels, codes, low, high, whole } = data.features[feature], id = `f${feature}`;
  const gap = make("input", { type: "checkbox", id: `${id}g`, "aria-label": `${name} is missing`, onchange: () => write(gap.checked ? NaN : chosen()) });
  const label = make("label", { className: "gap", htmlFor: `${id}g` }, gap, " missing");
  if (levels) {
    const select = make("select", { id, onchange: () => { gap.checked = false; write(chosen()); } },
      ...levels.map((text, i) => make("option", { value: codes[i] }, text)));
    const chosen = () => Number(select.value);
    setters.push(() => { const value = read(); gap.checked = Number.isNaN(value); select.value = codes.includes(value) ? value : codes[0]; });
    return make("div", { className: "ask" }, make("label", { htmlFor: id }, name), select, label);
  }
  const step = whole ? 1 : "any";
  const slider = make("input", { type: "range", id, min: low, max: high, step: whole ? 1 : (high - low) / 1000 || 1 });
  const box = make("input", { type: "number", step, "aria-label": `${name}, number` });
  const chosen = () => { if (box.value === "") box.value = slider.value; return Number(box.value); };
  slider.addEventListener("input", () => { box.value = Number(Number(slider.value).toPrecision(6)); gap.checked = false; write(chosen()); });
  box.addEventListener("input", () => { gap.checked = box.value === ""; if (!gap.checked) slider.value = box.value; write(gap.checked ? NaN : Number(box.value)); });
  setters.push(() => {
    const value = read();
    gap.checked = Number.isNaN(value);
    box.value = gap.checked ? "" : Number(value.toPrecision(6));
    slider.value = gap.checked ? low : value;
  });
  return make("div", { className: "ask" }, make("label", { htmlFor: id }, name), slider, box, label);
}

// ---- trees --------------------------------------------------------------------------

function showTrees(trees) {
  const place = section("trees"), { num_rounds, num_scores, per_leaf } = data.model, each = num_scores / per_leaf;
  const state = { round: 0, score: 0, depth: 4, row: null };
  const picture = scroll("A tree"), title = make("h3");
  const slider = make("input", { type: "range", min: 0, max: num_rounds - 1, value: 0, "aria-label": "Round", style: "flex:1 1 12rem",
    oninput: () => go(Number(slider.value)) });
  function go(round) {
    state.round = Math.max(0, Math.min(num_rounds - 1, round));
    slider.value = state.round;
    paint();
  }
  function paint() {
    const tree = state.round * each + (each > 1 ? state.score : 0);
    title.textContent = `Round ${state.round} (0 to ${num_rounds - 1})` + (num_scores > 1 ? `, score ${data.classes?.[state.score] ?? state.score}` : "");
    picture.replaceChildren(paintTree(trees, tree, per_leaf > 1 ? state.score : 0, state.depth, state.row));
  }
  const scores = num_scores > 1 ? make("label", {}, "Score ", make("select", { onchange: (e) => { state.score = Number(e.target.value); paint(); } },
    ...Array.from({ length: num_scores }, (_, k) => make("option", { value: k }, data.classes?.[k] ?? String(k))))) : null;
  const depths = make("label", {}, "Levels ", make("select", { onchange: (e) => { state.depth = Number(e.target.value); paint(); } },
    ...[2, 3, 4, 5, 6, 8, 99].map((d) => make("option", { value: d, selected: d === state.depth }, d === 99 ? "all" : String(d)))));
  place.append(make("p", { className: "note" }, "Rows that meet a condition go up. Numbers in parentheses are the weight of the training rows; an arrow shows where missing values go. The heavy line is the path of the row in “What if?”."),
    make("div", { className: "bar controls" }, make("button", { type: "button", onclick: () => go(state.round - 1), "aria-label": "Previous tree" }, "◀"), slider,
      make("button", { type: "button", onclick: () => go(state.round + 1), "aria-label": "Next tree" }, "▶"), scores, depths),
    make("div", { className: "card" }, title, picture));
  paint();
  return (row) => { state.row = row; paint(); };
}

/** The condition of a node, or the value of a leaf. */
function say(trees, node, score, most = 3) {
  const { per_leaf, words, terms } = trees.facts;
  if (trees.left[node] < 0) {
    const k = Math.min(score, per_leaf - 1), value = trees.value[node * per_leaf + k];
    const sloped = terms && trees.term.subarray(node * terms, (node + 1) * terms).some((f) => f >= 0);
    return show(value, 3) + (sloped ? " + slopes" : "");
  }
  const feature = trees.feature[node], name = nameOf(feature), set = trees.set ? trees.set[node] : -1;
  if (set < 0) return trees.threshold[node] === Infinity ? `${name} is known` : `${name} ≤ ${show(trees.threshold[node], 7)}`;
  const { levels, codes, category } = trees.features[feature];
  const left = [], right = [];
  levels.forEach((text, i) => {
    const code = trees.codes[category * trees.facts.levels + codes[i]];
    if (code > 0) (trees.goesLeft(node, code) ? left : right).push(text);
  });
  const [few, word] = left.length <= right.length ? [left, "in"] : [right, "not in"];
  return `${name} ${word} {${few.slice(0, most).join(", ")}${few.length > most ? `, +${few.length - most}` : ""}}`;
}

function paintTree(trees, tree, score, most, row) {
  const first = trees.start[tree], nodes = [], column = 178, line = 40;
  const onPath = new Set(row ? trees.route(tree, trees.encode(row)) : []);
  let leaves = 0, deepest = 0;
  const countLeaves = (node) => (trees.left[node] < 0 ? 1 : countLeaves(first + trees.left[node]) + countLeaves(first + trees.left[node] + 1));
  function visit(node, depth) {
    deepest = Math.max(deepest, depth);
    const isLeaf = trees.left[node] < 0, ends = isLeaf || depth >= most, found = { node, depth, isLeaf, y: 0, below: [] };
    nodes.push(found);
    if (ends) found.y = leaves++;
    else {
      found.below = [visit(first + trees.left[node], depth + 1), visit(first + trees.left[node] + 1, depth + 1)];
      found.y = (found.below[0].y + found.below[1].y) / 2;
    }
    return found;
  }
  visit(first, 0);
  const width = (deepest + 1) * column, height = leaves * line + 8;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, style: `width:${width}px;height:${height}px`, role: "img", "aria-label": `Tree ${tree}: ${leaves} leaves shown, the first condition is ${say(trees, first, score)}` });
  const at = (each) => [each.depth * column + 4, each.y * line + line / 2 + 4];
  for (const each of nodes) {
    for (const below of each.below) {
      const [x1, y1] = at(each), [x2, y2] = at(below);
      svg.append(draw("path", { class: onPath.has(below.node) ? "edge path" : "edge", d: `M${x1 + column - 28} ${y1}C${x2 - 8} ${y1} ${x1 + column - 20} ${y2} ${x2} ${y2}` }));
    }
  }
  for (const each of nodes) {
    const [x, y] = at(each), shown = each.isLeaf || each.below.length;
    const text = shown ? say(trees, each.node, score) : `… ${countLeaves(each.node)} leaves`;
    const value = each.isLeaf ? trees.value[each.node * data.model.per_leaf + Math.min(score, data.model.per_leaf - 1)] : 0;
    const weight = trees.weight[each.node], whole = each.isLeaf || !shown ? text : say(trees, each.node, score, 50);
    const gaps = each.below.length ? ` missing ${trees.missing_left[each.node] ? "↑" : "↓"}` : "";
    svg.append(draw("g", { class: onPath.has(each.node) ? "node path" : "node" },
      draw("rect", { x, y: y - 16, width: column - 28, height: 32, rx: 5, style: each.isLeaf ? `fill: color-mix(in oklab, var(${value < 0 ? "--a" : "--b"}) 22%, var(--card))` : null }),
      draw("text", { class: "strong", x: x + 6, y: y - 2 }, fit(text, column - 40), draw("title", {}, whole)),
      draw("text", { x: x + 6, y: y + 12, style: "font-size:10px" }, (Number.isFinite(weight) ? `(${show(weight)})` : "") + gaps)));
  }
  return svg;
}

// ---- what it was trained with -------------------------------------------------------

function spark(counts) {
  const most = Math.max(...counts, 1e-30), shown = counts.slice(0, 24), width = shown.length * 5;
  return draw("svg", { viewBox: `0 0 ${width} 18`, style: `width:${width}px;height:18px;display:inline-block`, "aria-hidden": "true" },
    ...shown.map((count, i) => draw("rect", { x: i * 5, y: 18 - (17 * count) / most, width: 4, height: (17 * count) / most, fill: "var(--soft)" })));
}

function showTrained() {
  const rows = data.features.slice(0, 200).map((f) => {
    const values = f.levels ? `${show(f.num_levels)} categories` : f.low == null ? "all missing" : `${show(f.low)} … ${show(f.middle)} … ${show(f.high)}`;
    return [cut(f.name, 40), values, `${show(100 * f.missing, 3)} %`, f.used ? "yes" : "no", f.counts ? spark(f.counts) : ""];
  });
  const more = data.features.length - rows.length;
  section("trained").append(
    pair(make("div", { className: "card" }, make("h3", {}, "Settings"), tableOf(["name", "value"], data.settings, "Settings")),
      make("div", { className: "card" }, make("h3", {}, "Versions"), tableOf(["name", "version"], data.versions, "Versions")),
      make("div", { className: "card wide" }, make("h3", {}, "Columns of the rows shown"),
        tableOf(["name", "least … median … greatest", "missing", "used", "values"], rows, "Columns"),
        more > 0 ? make("p", { className: "note" }, `and ${more} more`) : null)));
}

// ---- the page -----------------------------------------------------------------------

section("subtitle").textContent = data.subtitle;
showQuality();
showUses();
showTrained();

/** For programs that drive the page: `await report.ready; report.predict(row)`. */
window.report = { ready: null, predict: null };
window.report.ready = (async () => {
  const text = document.getElementById("model").textContent;
  if (!text) {
    for (const name of ["whatif", "trees"]) section(name).append(make("p", { className: "note" }, data.what_if));
    return;
  }
  let arrays;
  try {
    arrays = await unpack(text);
  } catch {
    for (const name of ["whatif", "trees"]) section(name).append(make("p", { className: "note" }, "This browser cannot unpack the trees; a newer one can."));
    return;
  }
  const trees = new Trees(arrays, data.model, data.features);
  window.report.predict = (row, offset) => trees.predict(row, offset);
  const follow = showTrees(trees);
  showWhatIf(trees, follow);
})();
