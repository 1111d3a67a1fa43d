// The page: asks the API every second, and shows what it says. Names come from jobs, so everything is written as text, never as HTML.

const LINES = ["requested", "rounding", "awaiting_free", "stranded", "releasable", "private", "outside", "other_processes", "driver", "free"];
const STATES = ["critical", "at_risk", "watch", "ok"];
const SEVERITIES = ["critical", "warning", "info"];
const INTERVAL_MS = 1000;
const LONGEST_PAUSE_MS = 15000;
const TIMEOUT_MS = 10000;
const MOST_PAGES = 10;
const CAPTURES_SHOWN = 20;
const ADVICE_SHOWN = 10;
const USERS_SHOWN = 4;

// words and figures

const words = (name) => name.replaceAll("_", " ");

// Figures are written as allocscope.model.figures writes them.

const NOT_KNOWN = "–";
const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const DURATIONS = [["d", 86400], ["h", 3600], ["min", 60]];

const isKnown = (value) => value !== null && value !== undefined;

// toFixed rounds what lies exactly between two numbers away from 0, Python to the even one.
function decimal(value, places) {
  const away = value.toFixed(places);
  const isBetween = Math.abs(value * 2 ** (places + 1)) % 2 === 1;
  return isBetween && /[13579]$/.test(away) ? (value - Math.sign(value) * 10 ** -(places + 1)).toFixed(places) : away;
}

function size(bytes) {
  if (!isKnown(bytes)) return NOT_KNOWN;
  const unit = UNITS.find(([, unitBytes]) => Math.abs(bytes) >= unitBytes);
  if (unit) return `${decimal(bytes / unit[1], 2)} ${unit[0]}`;
  return bytes === 1 ? "1 byte" : `${bytes} bytes`;
}

function duration(seconds) {
  if (!isKnown(seconds)) return NOT_KNOWN;
  const unit = DURATIONS.find(([, unitSeconds]) => seconds >= 2 * unitSeconds);
  if (unit) return `${decimal(seconds / unit[1], 0)} ${unit[0]}`;
  return `${seconds >= 10 ? decimal(seconds, 0) : decimal(seconds, 1).replace(/\.0$/, "")} s`;
}

const percent = (ratio) => (isKnown(ratio) ? `${decimal(100 * ratio, 1)} %` : NOT_KNOWN);

const number = (value) => (isKnown(value) ? value.toLocaleString("en") : NOT_KNOWN);

const count = (value, one) => `${number(value)} ${one}${value === 1 ? "" : "s"}`;

// In UTC, as the headings say.
const moment = (us) => (isKnown(us) ? new Date(us / 1000).toISOString().slice(0, 19).replace("T", " ") : NOT_KNOWN);

// elements

function element(tag, { text, title, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (title) made.title = title;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const cell = (text, kind = "") => element("td", { text, class: kind });
const badge = (state) => element("span", { text: words(state), class: `state ${state}` });

function bar(bill) {
  if (!bill) return element("div", { class: "bar unknown", role: "img", "aria-label": "where the bytes are is not known" });
  const shown = LINES.map((line) => [line, total(bill.lines, line)]).filter(([, bytes]) => bytes > 0);
  const said = shown.map(([line, bytes]) => `${words(line)} ${size(bytes)}`).join(", ");
  const made = element("div", { class: "bar", role: "img", "aria-label": `${said}, of ${size(bill.total_bytes)}`, title: said });
  for (const [line, bytes] of shown) {
    const part = element("span", { class: line, title: `${words(line)}: ${size(bytes)}` });
    part.style.width = `${(100 * bytes) / bill.total_bytes}%`;
    made.append(part);
  }
  return made;
}

function total(lines, line) {
  return lines.filter((one) => one.line === line).reduce((sum, one) => sum + one.bytes, 0);
}

// A button that is pressed just now stays, or the press would be of nothing; one that has the focus keeps it.
function fill(id, rows) {
  if (document.querySelector(`#${id} :is(button, summary):active`)) return;
  const focused = document.activeElement?.closest(`#${id}`) ? document.activeElement : null;
  const [name, value] = Object.entries(focused?.dataset ?? {})[0] ?? [];
  document.querySelector(`#${id} tbody`).replaceChildren(...rows);
  if (name !== undefined) document.querySelector(`#${id} [data-${name}="${CSS.escape(value)}"]`)?.focus();
  document.querySelector(`#${id}`).hidden = rows.length === 0;
  document.querySelector(`[data-for="${id}"]`).hidden = rows.length !== 0;
}

// what is shown

const rank = (order, value) => (order.includes(value) ? order.indexOf(value) : order.length);

function alertRow(alert) {
  const labels = alert.labels;
  const where = [labels.job, labels.rank && `rank ${labels.rank}`, labels.node, labels.gpu && `GPU ${labels.gpu}`].filter(Boolean);
  return element(
    "tr",
    {},
    element("td", {}, badge(alert.severity)),
    element("th", { text: alert.name, scope: "row", title: alert.description }),
    cell(where.join(", "), "name"),
    cell(moment(alert.at_us), "when"),
    element("td", { class: "name" }, alert.summary, ...(alert.advice ? [element("div", { text: alert.advice, class: "advised" })] : [])),
  );
}

// A forecast is told of at each severity up to its own, once a job: the gravest says it all.
function gravest(alerts) {
  const seen = new Set();
  return alerts.filter((alert) => {
    if (!alert.cause) return true;
    if (seen.has(alert.job)) return false;
    seen.add(alert.job);
    return true;
  });
}

function jobRow(job) {
  const worst = job.worst;
  const forecast = job.live && worst ? worst.forecast : null;
  const where = worst ? [worst.node, worst.gpu === null ? null : `GPU ${worst.gpu}`, job.allocators_live > 1 ? `worst of ${job.allocators_live}` : null] : [];
  const name = element("th", { scope: "row", class: "name" });
  name.append(element("a", { text: job.job, href: `api/v1/jobs/${encodeURIComponent(job.job_id)}` }));
  const about = element("div", { text: where.filter(Boolean).join(", "), class: "faint" });
  if (job.live) about.append(" ", element("button", { text: "capture", title: CAPTURE, "data-job": job.job_id }));
  name.append(about);
  const state = job.live ? (forecast ? forecast.state : "unknown") : "gone";
  return element(
    "tr",
    job.live ? {} : { class: "gone" },
    element("td", {}, badge(state)),
    name,
    element("td", { text: forecast && forecast.cause ? words(forecast.cause) : NOT_KNOWN, title: forecast ? forecast.summary : "" }),
    element("td", { class: "wide" }, bar(job.live && worst ? worst.bill : null)),
    cell(size(forecast ? forecast.headroom_bytes : null), "number"),
    cell(size(forecast ? forecast.request_bytes : null), "number"),
    cell(percent(forecast ? forecast.margin_ratio : null), "number"),
    cell(duration(forecast ? forecast.seconds_to_oom : null), "number"),
  );
}

function captureRow(capture) {
  const whose = [capture.job, capture.rank === null ? null : `rank ${capture.rank}`, capture.node, capture.gpu === null ? null : `GPU ${capture.gpu}`];
  const taken = capture.time_us ?? capture.ordered_us;
  const file = element("td", { class: "name" });
  if (capture.file_name) file.append(element("a", { text: capture.file_name, href: `api/v1/captures/${capture.capture_id}` }));
  if (capture.problem) file.append(element("div", { text: capture.problem, class: "faint" }));
  return element(
    "tr",
    {},
    element("td", {}, badge(capture.state)),
    element("th", { text: whose.filter(Boolean).join(", "), scope: "row", class: "name" }),
    cell(capture.reason),
    cell(moment(taken), "when"),
    cell(number(capture.history_entries), "number"),
    cell(size(capture.snapshot_bytes), "number"),
    file,
  );
}

// As `allocscope devices` has it.
function whose(owner) {
  if (!owner) return "";
  const container = owner.container ? ` (${owner.container})` : "";
  const pod = owner.pod ? `pod ${owner.namespace}/${owner.pod}${container}` : owner.pod_uid ? `pod ${owner.pod_uid}${container}` : null;
  const slurm = owner.slurm_job ? `Slurm ${owner.slurm_job}${owner.slurm_step ? `.${owner.slurm_step}` : ""}` : null;
  const place = pod ?? (owner.container_id ? `container ${owner.container_id.slice(0, 12)}` : null);
  return [place, slurm, owner.user ? `user ${owner.user}` : null].filter(Boolean).join(", ");
}

function userLine(process) {
  const job = process.job === null ? null : process.rank === null ? process.job : `${process.job} rank ${process.rank}`;
  const name = job ?? process.name ?? (process.pid === null ? "a process" : `pid ${process.pid}`);
  const probe = process.process_id === null ? "no probe" : null;
  const about = [probe, whose(process.owner)].filter(Boolean).join(", ");
  const text = `${name} ${size(process.used_bytes)}`;
  return element("div", { text, title: [process.name, process.pid === null ? null : `pid ${process.pid}`].filter(Boolean).join(", ") }, element("span", { text: about ? ` ${about}` : "", class: "faint" }));
}

function usersCell(processes) {
  const largest = [...processes].sort((a, b) => (b.used_bytes ?? -1) - (a.used_bytes ?? -1));
  const made = element("td", { class: "name" }, ...largest.slice(0, USERS_SHOWN).map(userLine));
  if (largest.length > USERS_SHOWN) made.append(element("div", { text: `and ${largest.length - USERS_SHOWN} more`, class: "faint" }));
  return made;
}

// What was tried, and what came of it. A row is made anew each second: which are open is remembered.
const opened = new Set();

function trialRow(trial, at) {
  const calls = trial.num_device_alloc + trial.num_device_free;
  return element(
    "tr",
    trial.blocked ? { class: "gone", title: trial.blocked } : {},
    element("th", { text: `${trial.conf || "default"}${at === 0 ? " (as recorded)" : ""}`, scope: "row", class: "name" }),
    cell(trial.change ?? "", "name"),
    cell(trial.failed_at === null ? "served" : `runs out at ${number(trial.failed_at)}`, "name"),
    ...[trial.needed_bytes, trial.reserved_peak_bytes, trial.stranded_peak_bytes].map((bytes) => cell(size(bytes), "number")),
    cell(number(trial.num_alloc_retries), "number"),
    cell(number(calls), "number"),
    cell(trial.blocked ? `not advised: ${trial.blocked}` : "", "name"),
  );
}

const TRIALS = ["Settings", "Change", "End", "Needs", "Reserved", "Stranded", "Retries", "Driver calls", ""];

function trials(advice) {
  const id = `${advice.capture_id} ${advice.uuid}`;
  const made = element("details", opened.has(id) ? { open: "" } : {});
  made.addEventListener("toggle", () => (made.open ? opened.add(id) : opened.delete(id)));
  const by = advice.torch_version ? `, by the rules of PyTorch ${advice.torch_version}` : "";
  const sure = advice.exactness || (advice.is_exact ? "exact" : "an estimate");
  const heading = `${count(advice.trials.length, "replay")} of ${count(advice.requests, "request")}${by}; ${sure}`;
  const head = element("tr", {}, ...TRIALS.map((text) => element("th", { text, scope: "col" })));
  made.append(element("summary", { text: heading, "data-advice": id }), element("table", {}, element("thead", {}, head), element("tbody", {}, ...advice.trials.map(trialRow))));
  return made;
}

function adviceRow(advice) {
  const whose = [advice.job, advice.rank === null ? null : `rank ${advice.rank}`, advice.node, advice.gpu === null ? null : `GPU ${advice.gpu}`];
  const said = element("td", { class: "name" }, advice.summary);
  for (const [phrases, what] of [[advice.gains, "gains"], [advice.costs, "costs"], [advice.hazards, "to be known"]]) {
    if (phrases.length) said.append(element("div", { text: `${what}: ${phrases.join("; ")}`, class: "faint" }));
  }
  if (advice.trials.length) said.append(trials(advice));
  return element(
    "tr",
    {},
    element("td", {}, badge(advice.kind)),
    element("th", { text: whose.filter(Boolean).join(", "), scope: "row", class: "name" }),
    cell(moment(advice.made_us), "when"),
    said,
  );
}

function deviceRow(device) {
  return element(
    "tr",
    {},
    element("th", { text: device.node, scope: "row", class: "name" }),
    element("td", { text: device.gpu, class: "number", title: device.uuid }),
    cell(device.model ?? NOT_KNOWN, "name"),
    element("td", { class: "wide" }, bar(device.bill)),
    cell(size(device.free_bytes), "number"),
    cell(size(device.bill ? total(device.bill.lines, "stranded") : null), "number"),
    cell(size(device.total_bytes), "number"),
    usersCell(device.processes),
    cell(device.problem ?? (device.from_nvml ? "" : "NVML is not read; from what jobs know"), "faint name"),
  );
}

function show({ fleet, jobs, devices, alerts, captures, advice }) {
  const gravity = (job) => (job.live ? rank(STATES, job.state) : STATES.length + 1);
  const margin = (job) => job.worst?.forecast?.margin_ratio ?? Infinity;
  jobs.sort((a, b) => gravity(a) - gravity(b) || margin(a) - margin(b) || a.job.localeCompare(b.job));
  devices.sort((a, b) => a.node.localeCompare(b.node) || a.gpu - b.gpu);
  alerts.sort((a, b) => rank(SEVERITIES, a.severity) - rank(SEVERITIES, b.severity) || b.at_us - a.at_us);
  fill("alerts", gravest(alerts).map(alertRow));
  fill("jobs", jobs.map(jobRow));
  fill("devices", devices.map(deviceRow));
  fill("captures", captures.items.map(captureRow));
  fill("advice", advice.items.map(adviceRow));
  const counts = [count(fleet.nodes_connected, "node"), count(fleet.devices, "device"), count(fleet.jobs_live, "live job")].join(", ");
  const text = `${counts}, ${size(fleet.device_total_bytes)} of device memory, ${size(fleet.bill.stranded ?? 0)} of it stranded`;
  const line = document.querySelector("#fleet");
  if (line.textContent !== text) line.textContent = text;
}

function lost(text) {
  const banner = document.querySelector("#lost");
  banner.hidden = text === null;
  if (text !== null && banner.textContent !== text) banner.textContent = text;
}

function legend() {
  const items = LINES.map((line) => element("li", {}, element("i", { class: line, "aria-hidden": "true" }), words(line)));
  document.querySelector("#legend").replaceChildren(...items);
}

// asking

async function ask(path, more = {}) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS), headers: { accept: "application/json" }, ...more });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error ? said.error.message : `the collector answered ${answer.status}`);
  return said;
}

async function all(path) {
  const items = [];
  let cursor = null;
  for (let page = 0; page < MOST_PAGES; page += 1) {
    const query = new URLSearchParams({ limit: "200", ...(cursor ? { cursor } : {}) });
    const said = await ask(`${path}${path.includes("?") ? "&" : "?"}${query}`);
    items.push(...said.items);
    cursor = said.next_cursor;
    if (!cursor) break;
  }
  return items;
}

// A whole snapshot of the rank that is nearest to running out; the command can ask for more: allocscope capture.
const CAPTURE = "Keep a whole snapshot of the rank that is nearest to running out of memory, to look into with PyTorch's viewer or allocscope inspect";

async function order(button) {
  const line = document.querySelector("#ordered");
  const job = button.dataset.job;
  try {
    const body = { method: "POST", headers: { "content-type": "application/json" }, body: "{}" };
    await ask(`api/v1/jobs/${encodeURIComponent(job)}/captures`, body);
    line.textContent = `A capture of ${job} is on order.`;
  } catch (error) {
    line.textContent = `No capture of ${job}: ${error.message}`;
  }
  line.hidden = false;
}

async function follow() {
  let failures = 0;
  let since = null;
  for (;;) {
    try {
      const [fleet, jobs, devices, alerts, captures, advice] = await Promise.all([
        ask("api/v1/fleet"),
        all("api/v1/jobs"),
        all("api/v1/devices"),
        all("api/v1/alerts?state=firing"),
        ask(`api/v1/captures?limit=${CAPTURES_SHOWN}`),
        ask(`api/v1/advice?limit=${ADVICE_SHOWN}`),
      ]);
      show({ fleet, jobs, devices, alerts, captures, advice });
      failures = 0;
      since = null;
      lost(null);
    } catch (error) {
      failures += 1;
      since ??= moment(1000 * Date.now());
      lost(`Connection lost since ${since} UTC: ${error.message}. What is shown is from before; trying again.`);
    }
    const pause = Math.min(INTERVAL_MS * 2 ** Math.min(failures, 10), LONGEST_PAUSE_MS);
    await new Promise((resolve) => setTimeout(resolve, failures ? pause : INTERVAL_MS));
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}

document.querySelector("#jobs").addEventListener("click", (event) => {
  if (event.target instanceof HTMLButtonElement) order(event.target);
});
legend();
follow();
