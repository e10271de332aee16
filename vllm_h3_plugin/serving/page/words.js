// SPDX-License-Identifier: Apache-2.0
// Jobs in words.

export const ended = (job) => job.status === "completed" || job.status === "failed";
export const cancelled = (job) => job.error?.code === "cancelled";
export const size = (text) => String(text ?? "").replace("x", "×");
export const seconds = (value) => `${Number(Number(value).toFixed(2))} s`;

export function span(value) {
  const whole = Math.max(1, Math.round(value));
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.round(whole / 60)} min`;
  return `${Math.floor(whole / 3600)} h ${Math.round((whole % 3600) / 60)} min`;
}

export function bytes(value) {
  return value < 1e6 ? `${Math.max(1, Math.round(value / 1e3))} kB` : `${(value / 1e6).toFixed(1)} MB`;
}

export function clock(unix) {
  const date = new Date(1000 * unix);
  const today = date.toDateString() === new Date().toDateString();
  const time = { hour: "2-digit", minute: "2-digit" };
  return date.toLocaleString([], today ? time : { ...time, day: "numeric", month: "short" });
}

/** A word or two for a badge. */
export function status(job) {
  if (job.status === "queued") return job.queue_position ? `waits, place ${job.queue_position}` : "waits";
  if (job.status === "in_progress") return `${job.progress} %`;
  return job.status === "failed" ? (cancelled(job) ? "cancelled" : "failed") : "done";
}

/** What happens now, in a line. */
export function phase(job) {
  if (job.status === "queued") {
    return job.queue_position > 1 ? `Waits behind ${job.queue_position - 1} other${job.queue_position > 2 ? "s" : ""}`
      : "Is next in line";
  }
  if (job.status === "failed") return cancelled(job) ? "Cancelled" : job.error?.message || "Failed";
  if (job.status === "completed") return "Fetching the clip";
  const name = job.phase.charAt(0).toUpperCase() + job.phase.slice(1);
  return job.phase === "denoising" && job.steps ? `${name}, step ${job.step} of ${job.steps}` : name;
}

export function left(job) {
  if (job.status !== "in_progress") return "";
  return job.seconds_left === null ? `${job.progress} %` : `${job.progress} %, about ${span(job.seconds_left)} left`;
}

/** What was asked and will be made otherwise. */
export function snap({ field, asked, made, why }) {
  const name = { num_frames: "frames", seconds: "length" }[field] ?? field.replaceAll("_", " ");
  const unit = field === "seconds" ? " s" : "";
  return made === null ? `${name} ${asked}: no effect, ${why}` : `${name} ${asked}${unit} became ${made}${unit}: ${why}`;
}
