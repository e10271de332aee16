// SPDX-License-Identifier: Apache-2.0
// The one clip that is looked at: how far it is, and then the clip itself.

import { clip, events, read, Refusal } from "./api.js";
import { ended, bytes, left, phase, seconds, size, snap, status } from "./words.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const NEWS = { queued: "The clip waits.", in_progress: "The clip is being made.", completed: "The clip is there.",
  failed: "The clip was not made." };
let watching = new AbortController();
let shown = null;
let url = null;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const item = (text) => Object.assign(document.createElement("li"), { textContent: text });

function fact(name, value) {
  const box = document.createElement("div");
  box.append(Object.assign(document.createElement("dt"), { textContent: name }));
  box.append(Object.assign(document.createElement("dd"), { textContent: value }));
  return box;
}

function dropClip() {
  if (url) URL.revokeObjectURL(url);
  url = null;
  $("video").removeAttribute("src");
  $("video").load();
  $("video").hidden = $("download").hidden = true;
  $("wait").hidden = false;
}

/** Show nothing. */
export function clearStage() {
  watching.abort();
  shown = null;
  dropClip();
  $("stage-status").textContent = $("stage-prompt").textContent = $("left").textContent = "";
  $("snaps").replaceChildren();
  $("facts").replaceChildren();
  $("phase").textContent = "No clip is chosen.";
  for (const id of ["progress", "again", "stop"]) $(id).hidden = true;
}

/** The job that is shown; null: none. */
export const current = () => shown;

function show(job) {
  const first = shown?.id !== job.id;
  // Said aloud where there is news, and not at each step.
  if (first || shown.status !== job.status) $("news").textContent = NEWS[job.status];
  shown = job;
  $("stage-status").textContent = status(job);
  $("stage-status").dataset.status = job.status;
  $("phase").textContent = phase(job);
  $("left").textContent = left(job);
  $("progress").value = job.progress;
  $("progress").hidden = job.status !== "in_progress";
  $("stop").hidden = ended(job);
  $("again").hidden = false;
  if (!first && !ended(job)) return;
  $("stage-prompt").textContent = job.prompt;
  $("snaps").replaceChildren(...(job.snapped ?? []).map((one) => item(snap(one))));
  const took = job.inference_time_s === null ? [] : [fact("Took", seconds(job.inference_time_s))];
  const file = job.bytes === null ? [] : [fact("File", bytes(job.bytes))];
  $("facts").replaceChildren(
    fact("Size", size(job.size)),
    fact("Length", `${seconds(job.seconds)}, ${job.num_frames} frames`),
    fact("Steps", job.num_inference_steps),
    fact("Seed", job.seed),
    ...took,
    ...file,
  );
}

async function fetchClip(job, signal) {
  const blob = await clip(job, signal, (percent) => ($("left").textContent = `${percent} %`));
  if (signal.aborted) return;
  url = URL.createObjectURL(blob);
  $("video").src = url;
  $("download").href = url;
  $("download").download = job.file_name;
  $("video").hidden = $("download").hidden = false;
  $("wait").hidden = true;
}

/** A job until its end: by its events, and by asking for it where they do not come. */
async function follow(job, signal, onMove) {
  let streams = true;
  while (!ended(job)) {
    if (streams) {
      // Where none comes, something between holds them back, and will go on to.
      streams = false;
      try {
        for await (job of events(job.id, signal)) {
          if (signal.aborted) return null;
          streams = true;
          onMove(job);
        }
      } catch (error) {
        if (signal.aborted) return null;
        if (error instanceof Refusal) throw error;
      }
    }
    if (ended(job)) break;
    await pause(POLL_MS);
    if (signal.aborted) return null;
    try {
      job = await read(`videos/${job.id}`, { signal });
      onMove(job);
    } catch (error) {
      if (signal.aborted) return null;
      if (error instanceof Refusal) throw error;
    }
  }
  return job;
}

/** Show a job and stay with it. `onMove` is told each move; raises what the server refuses. */
export async function openStage(job, onMove) {
  watching.abort();
  watching = new AbortController();
  const { signal } = watching;
  dropClip();
  shown = null;
  show(job);
  const last = await follow(job, signal, (moved) => {
    show(moved);
    onMove(moved);
  });
  if (last === null || signal.aborted) return;
  show(last);
  if (last.status !== "completed") return;
  try {
    await fetchClip(last, signal);
  } catch (error) {
    if (signal.aborted) return;
    if (error.status === 401) throw error;
    $("phase").textContent = `The clip cannot be fetched: ${error.message}`;
    $("left").textContent = "";
  }
}
