// Charts shared by the energy report and the live page. Figures come with their units in the names of the fields.
"use strict";

const PHASE_COLOURS = {
  idle: "#a3adb8", static: "#c8b273", forward: "#4a90d9", backward: "#2b5ea8", update: "#7d5bbe", recompute: "#e69f00",
  page_in: "#2ba37b", page_out: "#0c6b50", packing: "#cc79a7", stall: "#d55e00", other: "#7c8794",
};
const PHASE_NAMES = {
  idle: "idle", static: "static (idle power during jobs)", forward: "forward", backward: "backward", update: "update",
  recompute: "recompute", page_in: "page in", page_out: "page out", packing: "packing", stall: "stall",
  other: "other work of jobs",
};

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function scaled(value, steps, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  let [factor, unit] = steps[0];
  for (const [f, u] of steps) if (Math.abs(value) >= f) [factor, unit] = [f, u];
  return (value / factor).toPrecision(digits || 3).replace(/e\+?(-?\d+)/, "·10^$1") + " " + unit;
}
// Energy, bytes and durations read as they do on the command line: port_planner/base/units.py.
function formatJoules(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const [factor, unit] = size < 1 ? [1e-3, "mJ"] : size < 1e3 ? [1, "J"] : size < 3.6e5 ? [1e3, "kJ"] : [3.6e6, "kWh"];
  return (value / factor).toFixed(2) + " " + unit;
}
const formatWatts = (value) => (value === 0 ? "0 W" : scaled(value, [[1e-3, "mW"], [1, "W"], [1e3, "kW"]]));
function formatBytes(value) {
  if (value === null || value === undefined) return "–";
  let power = 0;
  while (Math.abs(value) >= 1024 && power < 4) [value, power] = [value / 1024, power + 1];
  return value.toFixed(power ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}
function formatSeconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return (value * 1000).toFixed(0) + " ms";
  if (value < 60) return value.toFixed(1) + " s";
  const seconds = Math.round(value);
  const minutes = Math.floor(seconds / 60);
  const two = (number) => String(number).padStart(2, "0");
  return minutes < 60 ? minutes + " min " + two(seconds % 60) + " s" : Math.floor(minutes / 60) + " h " + two(minutes % 60) + " min";
}
const formatYears = (value) => (value > 100 ? "> 100 years" : value.toPrecision(2) + " years");
// Times read as on the command line, whatever the browser's language: local, 24 hours, the day before the month.
function formatMoment(unix, parts) {
  return new Date(unix * 1000).toLocaleString("en-GB", parts);
}
const CLOCK = { hour: "2-digit", minute: "2-digit" };
const formatClock = (unix) => formatMoment(unix, CLOCK);
const formatClockSeconds = (unix) => formatMoment(unix, { ...CLOCK, second: "2-digit" });
const formatDay = (unix) => formatMoment(unix, { day: "numeric", month: "short" });
const formatWeekday = (unix) => [formatMoment(unix, { weekday: "short" }), formatDay(unix), formatClock(unix)].join(" ");
const formatTime = (unix) => formatMoment(unix, { dateStyle: "medium", timeStyle: "short" });

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  for (const child of children) node.append(child);
  return node;
}

// A chart fills its box and follows it when the phone is turned.
function chart(box, options, data) {
  box.replaceChildren();
  const height = options.height || 240;
  const plot = new uPlot({ ...options, width: Math.max(box.clientWidth, 200), height }, data, box);
  new ResizeObserver(() => plot.setSize({ width: Math.max(box.clientWidth, 200), height })).observe(box);
  return plot;
}

function axis(format, more) {
  return { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 },
    font: "12px system-ui, sans-serif", values: format ? (plot, splits) => labels(splits, format) : undefined, ...more };
}

// Marks that lie close together get more digits, until no two read the same.
function labels(splits, format) {
  let found = splits.map((value) => format(value));
  for (let digits = 4; digits <= 8 && new Set(found).size < found.length; digits++)
    found = splits.map((value) => format(value, digits));
  return found;
}

// The clock below each mark, and the day where one begins; days alone where marks are further apart.
function timeAxis() {
  const label = (plot, marks, index, space, step) => marks.map((unix, i) => {
    const day = formatDay(unix);
    if (step >= 86400) return day;
    const clock = step < 60 ? formatClockSeconds(unix) : formatClock(unix);
    return i && formatDay(marks[i - 1]) === day ? clock : clock + "\n" + day;
  });
  return axis(null, { values: label });
}

// The first readings lie seconds apart: without this, several marks would show the same second.
const atLeastAMinute = (plot, from, to) => [Math.min(from, to - 60), to];

function empty(box, text) {
  box.replaceChildren(element("p", { class: "hint" }, text));
}

// Stacked areas by phase. Painted from the highest sum down, so that each covers the part below it.
function powerChart(box, curve, gaps) {
  const phases = Object.keys(PHASE_COLOURS).filter((phase) => phase in curve.watts);
  if (!curve.start_unix.length || !phases.length) return empty(box, "No figures in this time.");
  const sums = [];
  let below = curve.start_unix.map(() => 0);
  for (const phase of phases) {
    below = below.map((sum, i) => (sum === null || curve.watts[phase][i] === null ? null : sum + curve.watts[phase][i]));
    sums.push(below);
  }
  // The last stretch needs an end, or the steps would stop at its beginning.
  const times = [...curve.start_unix, curve.start_unix[curve.start_unix.length - 1] + curve.period_s];
  const ended = (values) => [...values, values[values.length - 1]];
  const order = phases.map((phase, i) => i).reverse();
  const series = order.map((i) => ({
    label: PHASE_NAMES[phases[i]], fill: PHASE_COLOURS[phases[i]], stroke: PHASE_COLOURS[phases[i]], width: 0,
    paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
    value: (plot, sum, s, index) => (index === null ? "" : formatWatts(ended(curve.watts[phases[i]])[index])),
  }));
  const hatch = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = css("--bad");
    ctx.globalAlpha = 0.13;
    for (const gap of gaps || []) {
      const left = Math.max(plot.valToPos(gap.start_unix, "x", true), bbox.left);
      const right = Math.min(plot.valToPos(gap.end_unix, "x", true), bbox.left + bbox.width);
      if (right > left) ctx.fillRect(left, bbox.top, Math.max(right - left, 2), bbox.height);
    }
    ctx.restore();
  };
  keys(box.previousElementSibling, phases.map((phase) => [PHASE_COLOURS[phase], PHASE_NAMES[phase]]), (gaps || []).length);
  return chart(box, {
    height: 300, series: [{ value: (plot, unix) => (unix === null ? "" : formatTime(unix)) }, ...series],
    scales: { y: { range: (plot, low, high) => [0, (high || 1) * 1.08] } },
    axes: [timeAxis(), axis((value) => value + " W", { size: 62 })],
    legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } }, hooks: { draw: [hatch] },
  }, [times, ...order.map((i) => ended(sums[i]))]);
}

function keys(box, pairs, gaps) {
  if (!box || !box.classList.contains("keys")) return;
  box.replaceChildren(...pairs.map(([colour, name]) =>
    element("span", {}, element("i", { style: "background:" + colour }), name)));
  if (gaps) box.append(element("span", {}, element("i", { style: "background:#b3261e55" }), "not measured"));
}

// Bars over names, the first series behind the others; `line` values are drawn as marks.
function barChart(box, names, bars, marks, format) {
  if (!names.length) return empty(box, "No figures in this time.");
  const index = names.map((name, i) => i);
  const width = uPlot.paths.bars({ size: [0.7, 60] });
  // A short thick line across the bar, where it was planned to end; drawn when all bars are there, or they would hide it.
  const drawMarks = (plot) => marks.forEach(([, colour], number) => {
    const { ctx } = plot;
    const half = Math.max(Math.min((plot.bbox.width / (names.length + 0.4)) * 0.38, 34 * devicePixelRatio), 3);
    ctx.save();
    ctx.strokeStyle = colour;
    ctx.lineWidth = 2.5 * devicePixelRatio;
    plot.data[bars.length + 1 + number].forEach((value, i) => {
      if (value === null || value === undefined) return;
      const [x, y] = [plot.valToPos(i, "x", true), plot.valToPos(value, "y", true)];
      ctx.beginPath();
      ctx.moveTo(x - half, y);
      ctx.lineTo(x + half, y);
      ctx.stroke();
    });
    ctx.restore();
  });
  const series = [
    ...bars.map(([label, colour]) => ({ label, fill: colour, stroke: colour, width: 0, paths: width,
      points: { show: false }, value: (plot, value) => format(value) })),
    ...marks.map(([label, colour]) => ({ label, stroke: colour, paths: () => null, points: { show: false },
      value: (plot, value) => format(value) })),
  ];
  keys(box.previousElementSibling, [...bars, ...marks].map(([label, colour]) => [colour, label]));
  const most = Math.max(...[...bars, ...marks].flatMap(([, , values]) => values.map((value) => value || 0)), 1e-9);
  return chart(box, {
    series: [{ label: "", value: (plot, i) => (i === null ? "" : names[i]) }, ...series],
    scales: { x: { time: false, range: [-0.7, names.length - 0.3] }, y: { range: [0, most * 1.12] } },
    axes: [
      axis((i) => (Number.isInteger(i) && names[i] !== undefined ? names[i] : ""), {
        incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500], space: Math.max(...names.map((name) => name.length)) * 7.5 + 14 }),
      axis(format, { size: 72 }),
    ],
    legend: { show: false }, cursor: { y: false }, hooks: { draw: [drawMarks] },
  }, [index, ...bars.map(([, , values]) => values), ...marks.map(([, , values]) => values)]);
}

function lineChart(box, x, lines, format, options) {
  if (!x.length) return empty(box, (options && options.empty) || "No figures in this time.");
  keys(box.previousElementSibling, lines.map(([label, colour]) => [colour, label]));
  const more = options || {};
  return chart(box, {
    height: more.height,
    series: [{ label: "" }, ...lines.map(([label, colour, , dash]) => ({ label, stroke: colour, width: 2, dash,
      points: { show: x.length < 30, size: 5 }, value: (plot, value) => format(value) }))],
    scales: { x: { time: Boolean(more.time), range: more.time ? atLeastAMinute : undefined }, y: { range: more.range || ((plot, low, high) => [Math.min(low, 0), high * 1.1 || 1]) } },
    axes: [more.time ? timeAxis() : axis((value) => (Number.isInteger(value) ? String(value) : "")), axis(format, { size: 72 })],
    legend: { show: false }, cursor: { y: false },
  }, [x, ...lines.map(([, , values]) => values)]);
}

// A badge per row only where kinds differ; else `mark` puts one on the heading.
function mark(box, kinds) {
  const heading = box.parentElement.querySelector("h2");
  const different = [...new Set(kinds)];
  heading.querySelectorAll(".badge").forEach((node) => node.remove());
  if (different.length === 1) heading.append(" ", badge(different[0]));
  return different.length > 1;
}

function table(box, heads, rows) {
  const cell = (tag, value, text) => element(tag, text ? { class: "text" } : {}, value instanceof Node ? value : String(value));
  const textual = heads.map((head) => head.startsWith("~"));
  box.replaceChildren(element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((head, i) => cell("th", head.replace("~", ""), textual[i])))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value, i) => cell("td", value, textual[i]))))))));
}

function noteList(box, notes, none) {
  if (!notes.length) return empty(box, none);
  box.replaceChildren(element("ul", { class: "plain" }, ...notes.map((note) => element("li", {},
    element("span", { class: "soft" }, formatTime(note.start_unix) +
      (note.end_unix > note.start_unix ? ", " + formatSeconds(note.end_unix - note.start_unix) : "") + " – " + note.code),
    element("br"), note.text))));
}

function badge(kind) {
  return element("span", { class: "badge " + kind }, kind);
}
