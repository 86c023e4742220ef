// The live page: asks its own server on localhost, which asks the agent's control socket.
"use strict";

const POLL_MS = 2000;
const ENERGY_POLL_MS = 30000;
const MAX_LIVE = 1800; // an hour of samples
const key = new URLSearchParams(location.hash.slice(1)).get("key") || "";
const at = (id) => document.getElementById(id);
const live = { time: [], watts: [], celsius: [] };
const loss = { job: null, step: [], value: [] };
const plots = {};
let ledgerSteps = [];

async function ask(path) {
  const answer = await fetch(path, { headers: { Authorization: "Bearer " + key }, cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error || "status " + answer.status);
  return body;
}

function tile(value, label, mark) {
  return element("div", { class: "tile" }, element("b", mark ? { class: mark } : {}, value), element("span", {}, label));
}

const known = (value, unit, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits || 0) + " " + unit);

function showState(status) {
  const names = { training: "Training", paused: "Paused", waiting: "Waiting", idle: "Idle", leaving: "Leaving", starting: "Starting" };
  at("state").textContent = names[status.state] || status.state;
  document.title = (names[status.state] || status.state) + " – PORT agent";
  at("reasons").replaceChildren(...status.reasons.map((reason) => element("li", {}, reason)));
  const energy = status.energy || {};
  const facts = status.facts || {};
  const tiles = [];
  if (status.energy) {
    const label = !energy.kind ? "no source" : energy.kind === energy.source ? energy.kind : energy.kind + " by " + energy.source;
    tiles.push(tile(energy.watts === null ? "–" : formatWatts(energy.watts), "power, " + label, energy.watts === null ? "error" : ""));
    tiles.push(tile(energy.job_gross_joules === null ? "–" : formatJoules(energy.job_gross_joules), "this job since the agent started"));
    if (energy.last_step_joules !== null) {
      const plan = energy.last_step_planned_joules;
      tiles.push(tile(formatJoules(energy.last_step_joules), "last step" + (plan === null ? "" : ", planned " + formatJoules(plan))));
    }
  }
  tiles.push(tile(known(facts.temperature_c, "°C"), facts.throttled === "yes" ? "throttled" : "temperature", facts.throttled === "yes" ? "error" : ""));
  tiles.push(tile(facts.battery_percent === null ? facts.power : known(facts.battery_percent, "%"), facts.battery_percent === null ? "power source" : "battery, " + facts.power));
  const budget = status.flash_budget_bytes ? " of " + formatBytes(status.flash_budget_bytes) : "";
  tiles.push(tile(formatBytes(status.flash_written_today_bytes), "written to flash today" + budget));
  at("tiles").replaceChildren(...tiles);
}

function showJob(job) {
  at("job-section").hidden = !job;
  if (!job) {
    const newest = ledgerSteps[ledgerSteps.length - 1];
    if (newest && loss.job === null) seedLoss(newest.job, Infinity);
    return;
  }
  const total = job.total_steps;
  at("job-name").textContent = "Job " + job.id + ": " + job.name + (job.owner ? ", program of " + job.owner : "");
  const parts = ["step " + job.step + (total ? " of " + total : "")];
  if (job.loss !== null) parts.push("loss " + job.loss.toPrecision(4));
  if (job.step_s) parts.push(formatSeconds(job.step_s) + " per step");
  if (job.eta_s !== null && job.eta_s !== undefined) parts.push("about " + formatSeconds(job.eta_s) + " to go");
  if (job.plans > 1) parts.push("plan " + (job.plan + 1) + " of " + job.plans);
  if (job.peak_rss_bytes) parts.push("memory " + formatBytes(job.peak_rss_bytes) + (job.memory_limit_bytes ? " of " + formatBytes(job.memory_limit_bytes) : ""));
  at("job-text").textContent = parts.join(", ");
  at("job-bar").style.width = (total ? Math.min((100 * job.step) / total, 100) : 0) + "%";
  if (job.loss === null || job.loss === undefined) return;
  if (loss.job !== String(job.id)) seedLoss(String(job.id), job.step);
  if (!loss.step.length || job.step > loss.step[loss.step.length - 1]) {
    loss.step.push(job.step);
    loss.value.push(job.loss);
  }
}

// The other jobs that have a worker: those of boards.
function showBeside(runs) {
  showList("beside", runs.map((run) => ({
    job: run.id + " " + run.name, phase: run.waits_for ? "waits: " + run.waits_for : run.phase,
    step: run.step + (run.total_steps ? " / " + run.total_steps : ""), loss: run.loss === null ? null : run.loss.toPrecision(3) })));
}

function remember(status) {
  live.time.push(status.time);
  live.watts.push(status.energy ? status.energy.watts : null);
  live.celsius.push(status.facts ? status.facts.temperature_c : null);
  for (const values of Object.values(live)) if (values.length > MAX_LIVE) values.shift();
}

function draw(id, data, make) {
  if (plots[id]) plots[id].setData(data);
  else if (data[0].length > 1) plots[id] = make(at(id));
  else empty(at(id), "Nothing to draw yet.");
}

function drawCharts() {
  draw("loss", [loss.step, loss.value], (box) => lineChart(box, loss.step, [["loss", "#2b5ea8", loss.value]],
    (value) => value.toPrecision(3), { range: (plot, low, high) => [low - (high - low || 1) * 0.1, high + (high - low || 1) * 0.1] }));
  draw("live-power", [live.time, live.watts], (box) =>
    lineChart(box, live.time, [["power", "#d55e00", live.watts]], formatWatts, { time: true }));
  if (live.celsius.every((value) => value === null)) return empty(at("temperature"), "No temperature sensor.");
  draw("temperature", [live.time, live.celsius], (box) => lineChart(box, live.time, [["hottest zone", "#b3261e", live.celsius]],
    (value) => value.toFixed(0) + " °C", { time: true, range: (plot, low, high) => [Math.floor((low || 20) - 2), Math.ceil((high || 40) + 2)] }));
}

function showHealth(items) {
  if (!items.length) return empty(at("health"), "Nothing is wrong.");
  at("health").replaceChildren(element("ul", { class: "plain" }, ...items.map((item) => element("li", {},
    element("b", { class: item.severity }, item.title || item.code), element("br"), item.text + (item.remedy ? " – " + item.remedy : "")))));
}

function showJobs(jobs) {
  if (!jobs.length) return empty(at("jobs"), "No jobs.");
  table(at("jobs"), ["~job", "~state", "step", "loss", "to go"], jobs.map((job) => [
    job.id + " " + job.name, job.state.replace("_", " ") + (job.reason ? ": " + job.reason : ""),
    job.step + (job.total_steps ? " / " + job.total_steps : ""), job.loss === null ? "–" : job.loss.toPrecision(3), formatSeconds(job.eta_s)]));
}

function showWhy(entries) {
  if (!entries.length) return empty(at("why"), "Nothing is known of the last day.");
  const clock = { weekday: "short", hour: "2-digit", minute: "2-digit", hour12: false };
  table(at("why"), ["~from", "~what"], entries.map((entry) => [new Date(entry.at * 1000).toLocaleString([], clock), entry.text]));
}

// Lists that only some agents have; each entry shows what it holds.
function showList(id, entries) {
  at(id + "-section").hidden = !entries || !entries.length;
  if (!entries || !entries.length) return;
  const columns = Object.keys(entries[0]).filter((name) => entries.some((entry) => entry[name] !== null && typeof entry[name] !== "object"));
  table(at(id), columns.map((name) => "~" + name.replaceAll("_", " ")), entries.map((entry) => columns.map((name) => entry[name] ?? "–")));
}

async function poll() {
  try {
    const status = await ask("/api/status");
    remember(status);
    showState(status);
    showJob(status.job);
    showBeside((status.running || []).filter((run) => run.id !== status.job.id));
    showHealth(status.health || []);
    showList("mcus", status.mcus);
    showList("peers", status.peers);
    drawCharts();
    showJobs((await ask("/api/jobs")).jobs);
    at("foot").textContent = "Updated " + new Date().toLocaleTimeString() + ". Charts: uPlot (MIT, Leon Sorokin).";
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    at("state").textContent = "No answer";
    at("reasons").replaceChildren(element("li", { class: "error" }, error.message));
    document.documentElement.dataset.ready = "failed";
  }
  setTimeout(poll, POLL_MS);
}

async function pollEnergy() {
  try {
    const report = await ask("/api/energy?since=" + (Date.now() / 1000 - 86400));
    ledgerSteps = report.steps;
    powerChart(at("power"), report.power, report.gaps);
    showWhy((await ask("/api/why")).entries);
    document.documentElement.dataset.energy = "yes";
  } catch (error) {
    empty(at("power"), error.message);
  }
  setTimeout(pollEnergy, ENERGY_POLL_MS);
}

// What the ledger knows of a job's loss, so that the curve does not begin when the page is opened.
function seedLoss(job, step) {
  const rows = ledgerSteps.filter((row) => row.job === job && row.loss !== null && row.last_step < step);
  Object.assign(loss, { job, step: rows.map((row) => row.last_step), value: rows.map((row) => row.loss) });
}

pollEnergy().then(poll);
