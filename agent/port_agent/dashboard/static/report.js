// Fills the energy report from the figures in the page itself.
"use strict";

const report = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const perStep = (value, row) => (value === null ? null : value / (row.last_step - row.first_step + 1));
const sum = (items, key) => items.reduce((total, item) => total + (item[key] || 0), 0);
const money = (value) => (value === null ? "–" : value.toPrecision(3) + " " + (report.options.currency || ""));
const grams = (value) => (value === null ? "–" : value >= 1000 ? (value / 1000).toPrecision(3) + " kg" : value.toPrecision(3) + " g");

function tile(value, label) {
  return element("div", { class: "tile" }, element("b", {}, value), element("span", {}, label));
}

function fillTiles() {
  const tiles = [];
  for (const amount of report.total) {
    tiles.push(tile(formatJoules(amount.gross_joules), amount.kind + ", all of it"));
    tiles.push(tile(formatJoules(sum(report.jobs.filter((job) => job.name && job.kind === amount.kind), "gross_joules")),
      amount.kind + ", during jobs"));
    if (amount.cost !== null) tiles.push(tile(money(amount.cost), "at " + [report.options.price_per_kwh, report.options.currency].join(" ").trim() + " per kWh"));
    if (amount.co2_grams !== null) tiles.push(tile(grams(amount.co2_grams), "CO₂ at " + report.options.co2_grams_per_kwh + " g/kWh"));
    tiles.push(tile(formatSeconds(amount.unmeasured_s), "not measured of " + formatSeconds(amount.seconds)));
  }
  const years = report.wear_outlook.years_left;
  if (years !== null) tiles.push(tile(formatYears(years), "flash left at this rate"));
  at("tiles").replaceChildren(...tiles);
}

function fillTables() {
  const named = (name) => report.labels[name] || name || "(idle)";
  const heads = ["energy", "above idle", "time", "not measured"];
  const priced = report.options.price_per_kwh !== null || report.options.co2_grams_per_kwh !== null;
  const cost = (amount) => (priced ? [money(amount.cost), grams(amount.co2_grams)] : []);
  const more = priced ? ["cost", "CO₂"] : [];
  const fill = (id, columns, amounts, name, cells) => {
    const badges = mark(at(id), amounts.map((amount) => amount.kind));
    table(at(id), columns, amounts.map((amount) => [
      badges ? element("span", {}, name(amount) + " ", badge(amount.kind)) : name(amount), ...cells(amount)]));
  };
  const figures = (amount) => [formatJoules(amount.gross_joules), formatJoules(amount.net_joules),
    formatSeconds(amount.seconds), formatSeconds(amount.unmeasured_s)];
  fill("jobs", ["~job", ...heads, "steps", ...more], report.jobs, (job) => named(job.name),
    (job) => [...figures(job), job.steps === null ? "–" : job.steps, ...cost(job)]);
  fill("days", ["~day", ...heads, ...more], report.days, (day) => day.name, (day) => [...figures(day), ...cost(day)]);
  const phases = report.phases.filter((amount) => amount.name !== "unmeasured");
  const whole = sum(phases, "gross_joules") || 1;
  fill("phases", ["~phase", "energy", "share", "time"], phases, (phase) => PHASE_NAMES[phase.name] || phase.name, (phase) =>
    [formatJoules(phase.gross_joules), ((100 * phase.gross_joules) / whole).toFixed(1) + " %", formatSeconds(phase.seconds)]);
  const none = Object.keys(PHASE_NAMES).filter((name) => !phases.some((phase) => phase.name === name));
  at("no-phases").textContent = none.length ? "Nothing for: " + none.map((name) => PHASE_NAMES[name]).join(", ") + "." : "";
  noteList(at("gaps"), report.gaps.slice(-50).reverse(), "No gaps.");
  noteList(at("events"), report.events.slice(-50).reverse(), "None.");
}

function fillCharts() {
  powerChart(at("power"), report.power, report.gaps);
  const several = new Set(report.epochs.map((epoch) => epoch.job)).size > 1;
  at("epochs-text").textContent += several ? " Below each bar: job : epoch." : " Below each bar: the epoch.";
  barChart(at("epochs"), report.epochs.map((epoch) => (several ? epoch.job + ":" : "") + epoch.epoch), [
    ["all the machine drew", "#9fc3ea", report.epochs.map((epoch) => epoch.gross_joules)],
    ["above idle", "#2b5ea8", report.epochs.map((epoch) => epoch.net_joules)],
  ], [["planned", "#d55e00", report.epochs.map((epoch) => epoch.planned_joules)]], formatJoules);
  const steps = report.steps;
  const order = steps.map((row, i) => i);
  lineChart(at("step-joules"), order, [
    ["measured", "#2b5ea8", steps.map((row) => perStep(row.gross_joules, row))],
    ["planned", "#d55e00", steps.map((row) => perStep(row.planned_joules, row)), [6, 4]],
  ], formatJoules);
  lineChart(at("step-seconds"), order, [
    ["measured", "#2b5ea8", steps.map((row) => perStep(row.wall_s, row))],
    ["planned", "#d55e00", steps.map((row) => perStep(row.planned_s, row)), [6, 4]],
  ], formatSeconds);
  const budget = report.options.flash_bytes_per_day;
  barChart(at("wear"), report.wear.map((day) => new Date(day.day_unix * 1000).toISOString().slice(5, 10)), [
    ["whole machine", "#c3cad3", report.wear.map((day) => day.machine_bytes)],
    ["agent", "#0c6b50", report.wear.map((day) => day.agent_bytes)],
  ], budget === null ? [] : [["agent's daily budget", "#d55e00", report.wear.map(() => budget)]], formatBytes);
}

function fillWords() {
  const since = report.since_unix === null ? "since the ledger began" : "since " + formatTime(report.since_unix);
  at("about").textContent = "Made " + formatTime(report.generated_unix) + ", " + since + ".";
  at("sources").replaceChildren(...report.sources.map((source) => {
    const idle = report.baselines_watts[source.name];
    return element("li", {}, badge(source.kind), " " + source.name + ": " + source.covers + ". " +
      (source.resolution_watts === null ? "" : "Steps of " + formatWatts(source.resolution_watts) + ", ") +
      "read every " + source.period_s + " s." + (idle === undefined ? " Idle power not measured yet." : " Idle power " + formatWatts(idle) + "."));
  }));
  const view = report.wear_outlook;
  const life = view.years_left === null
    ? "How long the device lasts is not known; energy.flash_endurance_bytes can tell."
    : "Endurance " + formatBytes(view.endurance_bytes) +
      (view.assumed ? " (assumed: 1000 cycles; set energy.flash_endurance_bytes if you know better)" : "") + ": " + formatYears(view.years_left) + " at this rate.";
  const used = report.flash_used_life === null ? "" : " The device itself says " + Math.round(report.flash_used_life * 100) + " % of its life is used.";
  at("wear-text").textContent = formatBytes(view.bytes_per_day) + " per day. " + life + used;
}

fillWords();
fillTiles();
fillTables();
fillCharts();
document.documentElement.dataset.ready = "yes"; // for tests: everything above ran
