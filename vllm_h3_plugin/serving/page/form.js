// SPDX-License-Identifier: Apache-2.0
// The form: its limits, which the server tells, what is sent, and what the server finds wrong, at its field.

import { ask, newKey, read, Refusal } from "./api.js";

const $ = (id) => document.getElementById(id);
const FIELDS = ["prompt", "size", "seconds", "num_inference_steps", "seed", "input_reference"];
// Names under which the server may speak of what one control asks for.
const CONTROL = {
  width: "size", height: "size", aspect_ratio: "size", short_edge: "size",
  num_frames: "seconds", fps: "seconds", steps: "num_inference_steps",
  input_references: "input_reference", image_reference: "input_reference",
};
let limits = null;
let orderKey = newKey();
let preview = null;

export function showFault(name, message, nearest, use) {
  const place = $(`${name || "order"}-fault`);
  const line = document.createElement("span");
  line.textContent = message;
  if (place.childNodes.length) place.append(document.createElement("br"));
  place.append(line);
  $(name)?.setAttribute("aria-invalid", "true");
  if (nearest !== undefined && nearest !== null) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `Use ${nearest}`;
    button.addEventListener("click", () => use(String(nearest)));
    place.append(button);
  }
}

export function clearFault(name) {
  $(`${name || "order"}-fault`).replaceChildren();
  $(name)?.removeAttribute("aria-invalid");
}

function showFaults(faults) {
  for (const fault of faults) {
    const bare = fault.field.replace(/\[\d+\]/g, "").replace(/^extra_params\./, "");
    const name = FIELDS.includes(bare) ? bare : CONTROL[bare] ?? "";
    const reason = fault.why.charAt(0).toUpperCase() + fault.why.slice(1);
    const said = fault.allowed ? `${reason}. Allowed: ${fault.allowed}.` : `${reason}.`;
    showFault(name, name ? said : `${fault.field}: ${said}`, name === bare ? fault.nearest : null, (value) => fill(name, value));
  }
  document.querySelector('#order [aria-invalid="true"]')?.focus();
}

function fill(name, value) {
  $(name).value = value;
  changed(name);
  $(name).focus();
}

function changed(name) {
  clearFault(name);
  clearFault("");
  orderKey = newKey();
  if (name === "size") showRatio();
  if (name === "input_reference") showPreview();
}

function showRatio() {
  const now = $("size").value.trim().replace("×", "x").replaceAll(" ", "");
  for (const button of $("ratios").children) button.setAttribute("aria-pressed", String(button.value === now));
}

function showPreview() {
  const file = $("input_reference").files[0];
  if (preview) URL.revokeObjectURL(preview);
  preview = file ? URL.createObjectURL(file) : null;
  if (preview) $("preview").src = preview;
  $("preview").hidden = $("no-reference").hidden = !file;
  if (file && limits && file.size > limits.picture.max_bytes) {
    showFault("input_reference", `The file is too large. Allowed: up to ${limits.picture.max_bytes >> 20} MiB.`);
  }
}

/** Show what this server accepts. */
export function setLimits(told) {
  limits = told;
  const { size, seconds, num_inference_steps: steps, num_frames: frames, picture } = told;
  const first = Object.values(told.num_frames.default)[0];
  $("prompt").maxLength = told.prompt.max;
  $("size-hint").textContent =
    `Multiples of ${size.multiple}, up to ${size.max_pixels.toLocaleString("en")} pixels`;
  $("seconds-hint").textContent = `${seconds.min} to ${seconds.max}; snapped to ${frames.period}n+${frames.offset} frames`;
  $("seconds").placeholder = Number((first / told.fps).toFixed(2));
  $("num_inference_steps-hint").textContent = `${steps.min} to ${steps.max}`;
  $("num_inference_steps").placeholder = steps.default;
  $("input_reference-hint").textContent =
    `JPEG, PNG or WebP, sides from ${picture.min_side} pixels, up to ${picture.max_bytes >> 20} MiB`;
  if (!told.tasks.includes("fl2va")) $("input_reference-name").textContent = "Reference picture";
  const choices = [["Automatic", ""], ...Object.entries(size.canvases)];
  $("ratios").replaceChildren(...choices.map(([name, value]) => {
    const button = document.createElement("button");
    [button.type, button.value, button.textContent] = ["button", value, name];
    button.addEventListener("click", () => fill("size", value));
    return button;
  }));
  $("sizes").replaceChildren(...choices.slice(1).map(([name, value]) => new Option(name, value)));
  showRatio();
}

/** Ask for what another job was made of. */
export function fillFrom(job) {
  for (const name of ["prompt", "size", "seconds", "num_inference_steps", "seed"]) {
    $(name).value = job[name] ?? "";
    changed(name);
  }
  $("prompt").focus();
}

async function send(onCreated) {
  FIELDS.concat("").forEach(clearFault);
  showPreview();
  if ($("input_reference").getAttribute("aria-invalid")) return $("input_reference").focus();
  const body = new FormData();
  for (const name of FIELDS.slice(0, -1)) {
    const value = $(name).value;
    if (value.trim() || name === "prompt") body.append(name, value);
  }
  const file = $("input_reference").files[0];
  if (file) body.append("input_reference", file);
  $("make").disabled = true;
  try {
    // The key makes one job of an order that is sent twice because its answer was lost.
    const job = await read("videos", { method: "POST", body, headers: { "Idempotency-Key": orderKey } });
    orderKey = newKey();
    onCreated(job);
  } catch (error) {
    if (!(error instanceof Refusal)) showFault("", "The server did not answer. Send it again; it makes one clip of it.");
    else if (error.faults.length) showFaults(error.faults);
    else if (error.status !== 401) showFault("", error.message);
    if (!(error instanceof Refusal) || error.status === 401) throw error;
  } finally {
    $("make").disabled = false;
  }
}

/** Bring the form to life. */
export function startForm(onCreated, onError) {
  for (const name of FIELDS) $(name).addEventListener("input", () => changed(name));
  $("no-reference").addEventListener("click", () => fill("input_reference", ""));
  $("order").addEventListener("submit", (event) => {
    event.preventDefault();
    send(onCreated).catch(onError);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("order").requestSubmit();
  });
}

export const remove = (id) => ask(`videos/${id}`, { method: "DELETE" });
