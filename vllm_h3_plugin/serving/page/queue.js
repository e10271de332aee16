// SPDX-License-Identifier: Apache-2.0
// The list of clips. Rows are kept while it changes, so that nobody loses the place where the focus is.

import * as words from "./words.js";

const $ = (id) => document.getElementById(id);
const ASK_AGAIN_MS = 4000;
const rows = new Map();

function element(name, options = {}, ...children) {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
}

function newRow(id, onOpen, onRemove) {
  const title = element("span", { className: "title" });
  const detail = element("span", { className: "hint" });
  const open = element("button", { type: "button", className: "open" }, title, detail);
  const badge = element("span", { className: "badge" });
  const button = element("button", { type: "button" });
  const bar = element("progress", { max: 100 });
  const line = element("li", {}, open, element("span", { className: "side" }, badge, button), bar);
  const row = { title, detail, badge, button, bar, line, job: null, sure: 0 };
  open.addEventListener("click", () => onOpen(id));
  button.addEventListener("click", () => {
    // A clip that is made is asked about once; what is not finished can be ordered again.
    if (words.ended(row.job) && row.job.status === "completed" && Date.now() > row.sure) {
      row.sure = Date.now() + ASK_AGAIN_MS;
      setTimeout(() => showRow(row, row.job), ASK_AGAIN_MS + 50);
      return showRow(row, row.job);
    }
    button.disabled = true;
    onRemove(row.job).finally(() => (button.disabled = false));
  });
  return row;
}

const set = (target, name, value) => {
  if (target[name] !== value) target[name] = value;
};

function showRow(row, job) {
  row.job = job;
  const prompt = job.prompt.trim().split("\n")[0] || "(no prompt)";
  set(row.title, "textContent", prompt);
  const detail = [words.size(job.size), words.seconds(job.seconds), words.clock(job.created_at)];
  set(row.detail, "textContent", detail.join(" · "));
  set(row.badge, "textContent", words.status(job));
  row.badge.dataset.status = job.status;
  const sure = Date.now() <= row.sure;
  const verb = words.ended(job) ? (sure ? "Really delete?" : "Delete") : "Cancel";
  set(row.button, "textContent", verb);
  row.button.className = sure || !words.ended(job) ? "danger" : "quiet";
  row.button.setAttribute("aria-label", `${verb}: ${prompt}`);
  set(row.bar, "value", job.progress);
  row.bar.hidden = job.status !== "in_progress";
  row.bar.setAttribute("aria-label", `Progress of ${prompt}`);
}

/** Show these jobs, the newest first. */
export function showJobs(jobs, chosen, onOpen, onRemove) {
  const list = $("jobs");
  const present = new Set(jobs.map((job) => job.id));
  for (const [id, row] of rows) {
    if (present.has(id)) continue;
    row.line.remove();
    rows.delete(id);
  }
  jobs.forEach((job, place) => {
    if (!rows.has(job.id)) rows.set(job.id, newRow(job.id, onOpen, onRemove));
    const row = rows.get(job.id);
    showRow(row, job);
    row.line.setAttribute("aria-current", String(job.id === chosen));
    row.line.dataset.id = job.id;
    if (list.children[place] !== row.line) list.insertBefore(row.line, list.children[place] ?? null);
  });
  $("empty").hidden = jobs.length > 0;
  const open = jobs.filter((job) => !words.ended(job)).length;
  set($("queue-length"), "textContent", open ? `${open} not finished` : "");
}
