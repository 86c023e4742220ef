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

async function ask(path, method) {
  const answer = await fetch(path, { method: method || "GET", headers: { Authorization: "Bearer " + key }, cache: "no-store" });
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
    const planned = status.job && status.job.planned_joules !== null ? ", " + formatJoules(status.job.planned_joules) + " as planned so far" : "";
    tiles.push(tile(formatJoules(energy.job_net_joules), "used by this job" + planned));
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
  const budget = job.memory_limit_bytes || job.planned_peak_bytes;
  at("memory-text").textContent = "Memory: " + (job.peak_rss_bytes ? "peak " + formatBytes(job.peak_rss_bytes) : "no figure yet") +
    (budget ? " of " + formatBytes(budget) + (job.memory_limit_bytes ? ", its limit" : " planned") : "") +
    (job.memory_limit_bytes && job.planned_peak_bytes ? "; " + formatBytes(job.planned_peak_bytes) + " planned" : "");
  at("memory-bar").style.width = (budget ? Math.min((100 * (job.peak_rss_bytes || 0)) / budget, 100) : 0) + "%";
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
  draw("loss", [loss.step, loss.value], (box) => lineChart(box, loss.step, [["loss", css("--accent"), loss.value]],
    (value, digits) => value.toPrecision(digits || 3), { range: (plot, low, high) => [low - (high - low || 1) * 0.1, high + (high - low || 1) * 0.1] }));
  draw("live-power", [live.time, live.watts], (box) =>
    lineChart(box, live.time, [["power", "#d55e00", live.watts]], formatWatts, { time: true }));
  if (live.celsius.every((value) => value === null)) return empty(at("temperature"), "No temperature sensor.");
  draw("temperature", [live.time, live.celsius], (box) => lineChart(box, live.time, [["hottest zone", css("--bad"), live.celsius]],
    (value) => value.toFixed(0) + " °C", { time: true, range: (plot, low, high) => [Math.floor((low || 20) - 2), Math.ceil((high || 40) + 2)] }));
}

function showHealth(items) {
  if (!items.length) return empty(at("health"), "Nothing is wrong.");
  at("health").replaceChildren(element("ul", { class: "plain" }, ...items.map((item) => element("li", {},
    element("b", { class: item.severity }, item.title || item.code), element("br"), item.text + (item.remedy ? " – " + item.remedy : "")))));
}

// A wish of the user: what it does is told by what the page shows next.
function wish(text, path) {
  const button = element("button", { type: "button" }, text);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await ask(path, "POST");
      await look();
    } catch (error) {
      at("reasons").append(element("li", { class: "error" }, error.message));
    }
    button.disabled = false;
  });
  return button;
}

// What happens next and when, as far as it is known: windows and pauses by the clock, jobs by the training they still need.
function nextThings(status) {
  const due = (job) => (job.deadline_at ? ", due " + formatWeekday(job.deadline_at) : "");
  const things = [];
  if ((status.codes || []).includes("user")) things.push(status.paused_until ? "The pause ends " + formatWeekday(status.paused_until) + "." : "The pause lasts until you resume.");
  if (status.next_window) things.push("The next time window opens " + formatWeekday(status.next_window) + ".");
  for (const run of status.running || []) {
    const left = run.eta_s === null || run.eta_s === undefined ? "its end is not known yet" : "about " + formatSeconds(run.eta_s) + " of training left";
    things.push("Job " + run.id + " (" + run.name + "): " + left + due(run) + ".");
  }
  (status.waiting || []).forEach((job, i) => {
    const first = i === 0 && !(status.running || []).length;
    const again = job.retry_in_s === null || job.retry_in_s === undefined ? "" : ", again in " + formatSeconds(Math.round(job.retry_in_s));
    const left = job.eta_s === null || job.eta_s === undefined ? "" : ", about " + formatSeconds(job.eta_s) + " of training";
    if (i < 5) things.push((first ? "First job " : "Then job ") + job.id + " (" + job.name + ")" + again + left + due(job) + ".");
  });
  if (status.sleep) things.push("Sleep is " + status.sleep + ".");
  return things;
}

function showNext(status) {
  const things = nextThings(status);
  at("next").replaceChildren(...(things.length ? things : ["Nothing waits."]).map((text) => element("li", {}, text)));
  const paused = (status.codes || []).includes("user");
  if (at("wishes").dataset.paused === String(paused)) return; // a button that is being pressed stays
  at("wishes").dataset.paused = String(paused);
  at("wishes").replaceChildren(paused ? wish("Resume", "/api/resume") : wish("Not now, for 2 hours", "/api/not-now"));
}

function showJobs(jobs) {
  if (!jobs.length) return empty(at("jobs"), "No jobs.");
  const over = ["finished", "failed", "cancelled", "set aside"];
  table(at("jobs"), ["~job", "~state", "step", "loss", "to go", ""], jobs.map((job) => [
    job.id + " " + job.name, job.state.replace("_", " ") + (job.reason ? ": " + job.reason : ""),
    job.step + (job.total_steps ? " / " + job.total_steps : ""), job.loss === null ? "–" : job.loss.toPrecision(3), formatSeconds(job.eta_s),
    over.includes(job.state) ? "" : wish("Run now", "/api/run-now/" + job.id)]));
}

const KINDS = { training: "training", free: "free to train, no job", held: "held back", asleep: "asleep", off: "the agent was off" };
function kindOf(entry) {
  if (entry.text === "training") return "training";
  if (entry.text.startsWith("free to train")) return "free";
  if (entry.text.startsWith("the machine slept")) return "asleep";
  return entry.text === "the agent stopped" ? "off" : "held";
}

// The day as a strip, from 24 hours ago to now.
function showNight(entries) {
  const now = Date.now() / 1000, begin = now - 86400;
  const spans = entries.map((entry, i) => [Math.max(entry.at, begin), i + 1 < entries.length ? entries[i + 1].at : now, entry]);
  const shown = spans.filter(([from, to]) => to > from && to > begin);
  const before = shown.length ? shown[0][0] - begin : 86400;
  const segment = (kind, seconds, title) => element("i", { class: kind, style: "flex:" + seconds, title });
  at("night").replaceChildren(segment("unknown", before, "no records"), ...shown.map(([from, to, entry]) => segment(kindOf(entry), to - from, entry.text)));
  at("hours").replaceChildren(...[0, 6, 12, 18, 24].map((hours) => element("span", {}, formatClock(begin + 3600 * hours))));
  at("night-keys").replaceChildren(...Object.entries(KINDS).map(([kind, text]) => {
    const seconds = Math.round(shown.filter(([, , entry]) => kindOf(entry) === kind).reduce((sum, [from, to]) => sum + to - from, 0));
    return element("span", {}, element("i", { class: kind }), text + (seconds ? " " + formatSeconds(seconds) : ""));
  }));
}

function showWhy(entries) {
  showNight(entries);
  if (!entries.length) return empty(at("why"), "There are no records of the last day.");
  table(at("why"), ["~from", "~what"], entries.map((entry) => [formatWeekday(entry.at), entry.text]));
}

// Lists that only some agents have; each entry shows what it holds.
function showList(id, entries) {
  at(id + "-section").hidden = !entries || !entries.length;
  if (!entries || !entries.length) return;
  const columns = Object.keys(entries[0]).filter((name) => entries.some((entry) => entry[name] !== null && typeof entry[name] !== "object"));
  table(at(id), columns.map((name) => "~" + name.replaceAll("_", " ")), entries.map((entry) => columns.map((name) => entry[name] ?? "–")));
}

async function look() {
  try {
    const status = await ask("/api/status");
    remember(status);
    showState(status);
    showNext(status);
    showJob(status.job);
    showBeside((status.running || []).filter((run) => run.id !== status.job.id));
    showHealth(status.health || []);
    showList("mcus", status.mcus);
    showList("peers", status.peers);
    drawCharts();
    showJobs((await ask("/api/jobs")).jobs);
    at("foot").textContent = "Updated " + formatClockSeconds(Date.now() / 1000) + ". Charts: uPlot (MIT, Leon Sorokin).";
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    at("state").textContent = "No answer";
    at("reasons").replaceChildren(element("li", { class: "error" }, error.message));
    document.documentElement.dataset.ready = "failed";
  }
}

async function poll() {
  await look();
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
