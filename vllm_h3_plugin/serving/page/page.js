// SPDX-License-Identifier: Apache-2.0
// The page: puts the form, the clip that is looked at and the list of clips together, and asks for a key.

import { forgetKey, hasKey, keepKey, read, Refusal } from "./api.js";
import { clearFault, fillFrom, remove, setLimits, showFault, startForm } from "./form.js";
import { showJobs } from "./queue.js";
import { clearStage, current, openStage } from "./stage.js";
import { ended } from "./words.js";

const $ = (id) => document.getElementById(id);
const BUSY_MS = 2000, IDLE_MS = 10000;
const PAGE = 20, MOST = 100;
let jobs = [];
let limit = PAGE;
let timer = 0;
let known = false;

function failed(error) {
  if (error instanceof Refusal && error.status === 401) return askKey();
  $("offline").textContent =
    error instanceof Refusal ? error.message : "The server does not answer. Trying again.";
  $("offline").hidden = false;
  clearTimeout(timer);
  timer = setTimeout(refresh, BUSY_MS);
}

function askKey() {
  if ($("key-dialog").open) return;
  if (hasKey()) showFault("key", "The server does not accept this key.");
  forgetKey();
  $("forget").hidden = true;
  $("key-dialog").showModal();
}

async function refresh() {
  clearTimeout(timer);
  try {
    if (!known) await introduce();
    const list = await read(`videos?limit=${limit}`);
    $("offline").hidden = true;
    jobs = list.data;
    $("more").hidden = !list.has_more || limit >= MOST;
    draw();
  } catch (error) {
    failed(error);
  }
  // A page that nobody sees asks rarely.
  const busy = !document.hidden && (!$("offline").hidden || jobs.some((job) => !ended(job)));
  if (!$("key-dialog").open) timer = setTimeout(refresh, busy ? BUSY_MS : IDLE_MS);
}

async function introduce() {
  const info = await read("h3/info");
  setLimits(info.limits);
  const recipe = info.workers[0]?.recipe;
  $("server").textContent = [`plugin ${info.plugin}`, recipe, `vLLM-Omni ${info.host["vllm-omni"]}`].filter(Boolean).join(" · ");
  $("forget").hidden = !hasKey();
  known = true;
  const wanted = location.hash.slice(1);
  if (wanted) open(wanted);
}

function draw() {
  showJobs(jobs, current()?.id, open, end);
  const now = current();
  document.title = now?.status === "in_progress" ? `${now.progress} % · MiniMax-H3` : "MiniMax-H3";
}

function moved(job) {
  const place = jobs.findIndex((other) => other.id === job.id);
  if (place >= 0) jobs[place] = job;
  draw();
}

async function open(id) {
  try {
    const job = await read(`videos/${encodeURIComponent(id)}`);
    history.replaceState(null, "", `#${job.id}`);
    const watched = openStage(job, moved);
    draw();
    await watched;
    draw();
  } catch (error) {
    if (error.status === 404) return gone(id);
    failed(error);
  }
}

/** Of a job that is no longer there. */
function gone(id) {
  jobs = jobs.filter((job) => job.id !== id);
  if (current()?.id === id || location.hash.slice(1) === id) {
    clearStage();
    history.replaceState(null, "", location.pathname);
  }
  draw();
}

async function end(job) {
  try {
    await remove(job.id);
  } catch (error) {
    if (error.status !== 404) return failed(error);
  }
  gone(job.id);
  await refresh();
}

function created(job) {
  jobs = [job, ...jobs.filter((other) => other.id !== job.id)];
  open(job.id);
  // On a narrow screen the clip is below the form.
  $("stage").scrollIntoView({ block: "nearest" });
  refresh();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  clearFault("key");
  const key = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) return showFault("key", "A key is printable ASCII without spaces.");
  keepKey(key);
  known = false;
  $("key").value = "";
  $("key-dialog").close();
  refresh();
});
// Without a key nothing can be shown, so there is nothing to go back to.
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("forget").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
$("more").addEventListener("click", () => {
  limit = Math.min(MOST, limit + PAGE);
  refresh();
});
$("again").addEventListener("click", () => fillFrom(current()));
$("stop").addEventListener("click", () => end(current()));
document.addEventListener("visibilitychange", () => document.hidden || refresh());
startForm(created, failed);
refresh();
