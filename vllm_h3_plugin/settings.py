# SPDX-License-Identifier: Apache-2.0
"""Every ``H3_*`` environment variable, in one typed place.

A variable that starts with ``H3_`` and is not listed here is refused with the nearest known name: a typo in a
variable must not silently mean "default".
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vllm_h3_plugin.errors import SettingsError

PREFIX = "H3_"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def reference_requested(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``H3_REFERENCE`` asks for the CPU reference platform.

    Raises:
        SettingsError: the value is neither a true nor a false word.
    """
    raw = (os.environ if environ is None else environ).get("H3_REFERENCE", "")
    word = raw.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise SettingsError(
        f"H3_REFERENCE={raw!r}", why="it is a switch", fix="Set it to 1 for the CPU reference platform, or unset it."
    )


def _split(value: object) -> object:
    """``4,8`` as a list."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


class Settings(BaseModel):
    """Settings of the plugin and its command line, read from ``H3_*`` variables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: bool = Field(
        default=False,
        description="Run on the CPU reference platform. For development and tests; real clips would take days.",
    )
    accept_license: bool = Field(
        default=False,
        description="`yes` says that you have read and accept the licence of the MiniMax-H3 weights, which excludes "
        "the United States, the European Union, the United Kingdom and the Republic of Korea and restricts showing "
        "outputs there. `vllm-h3 preflight` fails without it.",
    )
    recipe: str | None = Field(
        default=None,
        description="Precision recipe: a name from `quant/` (`fp8`, `bf16`, …) or a path to a JSON file. "
        "Unset: the profile's; without `vllm-h3 serve`, `fp8` under `--quantization fp8`, else `bf16`.",
    )
    run_dir: Path | None = Field(
        default=None,
        description="Folder in which the server's processes leave their state for `/v1/h3/info`. "
        "`vllm-h3 serve` makes one and sets it.",
    )
    ffmpeg: Path | None = Field(
        default=None,
        description="The ffmpeg program. Unset: the one on PATH, else the one that imageio-ffmpeg carries.",
    )
    api_key_file: Path | None = Field(
        default=None,
        description="File with the key that callers of `/v1` must send. `vllm-h3 serve` gives it to the server, "
        "`vllm-h3 health`, `status` and `smoke` send it. An empty file is refused.",
    )
    cache_dir: Path = Field(
        default=Path("~/.cache/vllm-h3"),
        description="Folder of this project's own files: quantized snapshots, AdaLN tables and which attention kernel "
        "was the fastest. Nothing else is written there, and everything in it can be made again.",
    )
    snapshot: Literal["auto", "require", "off"] = Field(
        default="auto",
        description="Quantized snapshot. `auto`: load it if it fits, else load the checkpoint and write one. "
        "`require`: refuse to start without one that fits. `off`: neither read nor write.",
    )
    shared_base: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="One read-only copy of the quantized weights for all ranks of the machine, mapped from the "
        "snapshot. `auto`: where there is more than one rank. `on`: for a single rank too.",
    )
    resident: Literal["all", "stage"] = Field(
        default="all",
        description="Which weights stay on the device between stages. `all`: all of them. `stage`: those of the stage "
        "that runs (text encoder, DiT, VAEs); they come back from host memory. `vllm-h3 serve` sets it from the "
        "profile.",
    )
    resident_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB of weights that may be on the device at once with H3_RESIDENT=stage. Unset: as many as the "
        "largest stage has.",
    )
    verify_checksums: Path | None = Field(
        default=None,
        description="File that `vllm-h3 checksums` wrote. Every shard is held against its SHA-256 while it is read.",
    )
    read_threads: int = Field(default=4, ge=1, le=64, description="Threads that read weights from disk.")
    read_buffer_mib: int = Field(
        default=1024, ge=64, description="MiB of buffers (page-locked on CUDA) that weights are read into."
    )
    adaln_device_gib: float = Field(
        default=1.5,
        gt=0,
        description="GiB of AdaLN tables kept on the device. The table in use is kept even if it is larger.",
    )
    prepare_steps: Annotated[tuple[Annotated[int, Field(ge=1, le=200)], ...], BeforeValidator(_split)] = Field(
        default=(),
        description="Numbers of steps, comma-separated (`4,8`), whose AdaLN tables are made ready at the start beside "
        "the default schedule's. Without, the first request of a schedule waits for its table, once.",
    )
    adaln_disk_gib: float = Field(
        default=20.0,
        ge=0,
        description="GiB of AdaLN tables kept in the cache folder; the least recently used go first.",
    )
    compile: bool = Field(
        default=False,
        description="Let the host compile its own DiT blocks (torch.compile) instead of running the plugin's fused "
        "kernels. The first request of a server then takes some 25 s longer. Refused with several ranks.",
    )
    parts_on: str | None = Field(
        default=None,
        description="Parts that are built on another card of the same process (`text_encoder=1`), comma-separated. "
        "`vllm-h3 serve` sets it from the profile's role map.",
    )
    memory_guard: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Refuse and cancel requests before the machine runs out of memory. `auto`: on where CPU and device "
        "share memory.",
    )
    memory_floor_gib: float = Field(
        default=6.0,
        ge=0,
        le=4096,
        description="GiB of MemAvailable that must remain at a request's predicted peak; else 503.",
    )
    memory_hard_floor_gib: float = Field(
        default=3.0, ge=0, le=4096, description="GiB of MemAvailable under which a running request is cancelled."
    )
    memory_retry_s: int = Field(default=30, ge=1, description="Seconds that a 503 for memory asks the client to wait.")
    decode_batch: int | None = Field(
        default=None,
        ge=1,
        description="Tiles of a clip that the video VAE decodes at once, at most. Unset: as many as the memory "
        "prediction allows; 1: one after the other, as the host does.",
    )
    encoder: Literal["auto", "software", "nvenc", "host"] = Field(
        default="auto",
        description="What makes H.264 of the frames. `auto`: NVENC where the card and its driver really encode with "
        "it, else x264 on the CPU. `software`: x264 without asking the card. `nvenc`: refuse to start without it. "
        "`host`: the host's own encoder, after all frames are decoded; byte for byte its clips.",
    )
    encode_preset: Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium"] = Field(
        default="ultrafast",
        description="Preset of x264, always at CRF 18. `ultrafast` is the host's; slower ones make smaller files.",
    )
    max_queue: int = Field(
        default=16,
        ge=0,
        description="Clips that may wait while one is made; the next one is answered with 429 and when to ask again.",
    )
    job_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Longest that one clip may take, in seconds from its start; it is stopped then. Unset: the "
        "profile's `request_timeout_s`, or twice what the clip's own steps predict where that is longer.",
    )
    clip_ttl_s: int | None = Field(
        default=None,
        ge=1,
        description="Seconds that a job and its clip are kept after its end. Unset: what the host's "
        "`VLLM_OMNI_SERVER_STORAGE__FILE_TTL` says, else without end.",
    )
    clip_quota_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB of finished clips that are kept; the oldest go first. Unset: whatever the disk holds.",
    )
    replica: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]{1,16}$",
        description="Name of this server among several behind one balancer, 1 to 16 lower-case letters and digits. "
        "Ids of its jobs carry it (`video_gen_NAME_…`), so that a balancer finds a job's server by them; see "
        "docs/CLUSTER.md.",
    )
    stuck_factor: float = Field(
        default=20.0,
        ge=2,
        description="A denoise step that takes this many times what one takes here (and two minutes at least) counts "
        "as stuck: `/health` answers 503 then.",
    )
    exit_when_stuck: bool = Field(
        default=True,
        description="End the server when its worker is stuck or gone, so that its supervisor can start it again.",
    )
    reference_hosts: Annotated[tuple[str, ...], BeforeValidator(_split)] = Field(
        default=(),
        description="Hosts that references may be fetched from by URL, comma-separated: `cdn.example.com`, "
        "`*.example.com` for all below it, `media.example.com:8443`, `http://old.example.com` without TLS, `*` for "
        "any. Unset: no URL is fetched. Private, link-local, loopback and other addresses that are not public are "
        "refused in any case, at first and after each redirect.",
    )
    reference_timeout_s: float = Field(
        default=30.0, gt=0, le=600, description="Seconds that fetching one reference may take, redirects included."
    )
    max_pixels: int = Field(
        default=1920 * 1088,
        ge=32 * 32,
        description="Largest area of a clip's frame, width times height; a request for more is refused with 400. H3 "
        "was made for 1344x768.",
    )
    lora: Path | None = Field(
        default=None,
        description="Adapter that `vllm-h3 serve` loads at start, as its `--lora`: a safetensors file or its folder.",
    )
    cluster_address: str | None = Field(
        default=None,
        description="Address of the Ray cluster's head (`192.0.2.1:6379`), where ranks run on several machines. Unset: "
        "the Ray that runs on the server's machine.",
    )
    cluster_interface: str | None = Field(
        default=None,
        description="Network interface that the ranks talk over (`enp1s0f0np0`). Unset: the one with the machine's "
        "address in Ray. A node where it has another name sets its own before `ray start`.",
    )
    cluster_hca: str | None = Field(
        default=None,
        description="RDMA devices that NCCL uses between machines (`rocep1s0f0,roceP2p1s0f0`), as its NCCL_IB_HCA. "
        "Unset: NCCL's choice. A node may set its own.",
    )
    cluster_checkpoint: Path | None = Field(
        default=None,
        description="Folder of the checkpoint on a node where it is not the server's path. Set before `ray start`.",
    )
    cluster_start_s: float = Field(
        default=180.0,
        gt=0,
        description="Seconds that each step of a start on several machines may take: nodes that join, their checks, "
        "the import of the host, the ranks' meeting. Loading the model has no deadline but the profile's.",
    )
    cluster_on_loss: Literal["exit", "restart"] = Field(
        default="exit",
        description="What follows the loss of a rank or its machine, which fails the request that runs. `exit`: the "
        "server ends for its supervisor. `restart`: it starts its ranks again as soon as the nodes are there; a "
        "process with the host imported waits beside each rank for that.",
    )
    cluster_bind: str | None = Field(
        default=None,
        description="Address of this machine on the cluster's private network: Ray knows the node by it.",
    )
    lora_dir: Path | None = Field(
        default=None,
        description="Folder in which the adapter of a request's `lora` must lie. Unset: wherever the server reads.",
    )


def known_variables() -> dict[str, str]:
    """Name -> description of every variable that is honoured."""
    fields = Settings.model_fields
    return {PREFIX + name.upper(): (field.description or "") for name, field in fields.items()}


def check_names(environ: Mapping[str, str] | None = None) -> None:
    """Refuse ``H3_*`` variables that nothing reads.

    Raises:
        SettingsError: names the unknown variable and the closest known one.
    """
    known = known_variables()
    for name in sorted(os.environ if environ is None else environ):
        if not name.startswith(PREFIX) or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        fix = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(known))}."
        raise SettingsError(f"unknown setting {name}", why="nothing reads it", fix=fix, variable=name)


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check all settings.

    Raises:
        SettingsError: an unknown name or a value of the wrong type; the message names the variable.
    """
    source = dict(os.environ if environ is None else environ)
    check_names(source)
    values = {
        name: source[PREFIX + name.upper()]
        for name in Settings.model_fields
        if source.get(PREFIX + name.upper(), "").strip() != ""
    }
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = PREFIX + str(first["loc"][0]).upper() if first["loc"] else PREFIX
        raise SettingsError(
            f"{name}={source.get(name, '')!r}", why=str(first["msg"]), fix=known_variables().get(name, "")
        ) from exc
