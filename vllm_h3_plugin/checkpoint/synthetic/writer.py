# SPDX-License-Identifier: Apache-2.0
"""Write a synthetic checkpoint so that it is either complete or not there.

Everything goes to ``DIR.part`` beside the target and is renamed at the end. An interrupted run takes its ``.part``
away; one that was killed leaves it, and the next run replaces it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.checkpoint.synthetic.plan import TensorPlan, dit_plans, text_plans
from vllm_h3_plugin.checkpoint.synthetic.shards import write_part
from vllm_h3_plugin.checkpoint.synthetic.side_files import model_index, write_json, write_side_files
from vllm_h3_plugin.checkpoint.synthetic.spec import Partition, SynthSpec
from vllm_h3_plugin.checkpoint.synthetic.vaes import write_vaes
from vllm_h3_plugin.errors import UsageError

# The VAEs, tokenizers and configs of a partition, rounded up.
_SIDE_BYTES = 1 << 20
_MARKER = ".vllm-h3-synth"


@dataclass(frozen=True)
class SynthResult:
    """What was written.

    Attributes:
        root: the folder that was asked for.
        partitions: the folders to serve, ``root/FL2VA`` and ``root/Ref2VA``.
        dit_parameters: parameters of one DiT, its RoPE buffer included.
        text_parameters: parameters of the text encoder.
        bytes: size of all files.
    """

    root: Path
    partitions: tuple[Path, ...]
    dit_parameters: int
    text_parameters: int
    bytes: int


def _plans(spec: SynthSpec, partition: Partition) -> tuple[list[TensorPlan], list[TensorPlan]]:
    # The partitions of a release differ in their DiT and share their text encoder.
    scope = f"{partition.folder}.transformer"
    dit = dit_plans(spec.dit, layout=spec.layout, scope=scope, outliers=spec.outliers)
    return dit, text_plans(spec.text, outliers=spec.outliers)


def planned_bytes(spec: SynthSpec) -> int:
    """Bytes of tensor data that :func:`write_checkpoint` will write, the small codecs' apart."""
    vae = [] if spec.video_vae is None else spec.video_vae.plans("video_vae")
    parts = [part for partition in spec.partitions for part in (*_plans(spec, partition), vae)]
    return sum(plan.spec.nbytes for part in parts for plan in part)


def _check_target(root: Path, needed: int) -> None:
    if root.is_symlink() and not root.exists():
        raise UsageError(f"{root} is a link to nothing", fix="Name a folder, or make the one that the link names.")
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file", why="a folder is to be written there", fix="Name a folder.")
    if root.is_dir() and any(root.iterdir()):
        raise UsageError(
            f"{root} is not empty",
            why="nothing is overwritten",
            fix="Name a folder that does not exist or is empty.",
            path=str(root),
        )
    parent = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed + needed // 50:
        raise UsageError(
            f"{root} needs {needed / 2**30:.2f} GiB and {parent} has {free / 2**30:.2f} GiB free",
            why="the checkpoint would not fit",
            fix="Name a folder on another disk, or ask for fewer --layers and --text-layers.",
            needed_bytes=needed,
            free_bytes=free,
        )


@contextmanager
def _whole_or_nothing(root: Path) -> Iterator[Path]:
    part = root.with_name(root.name + ".part")
    if part.exists():
        if not (part / _MARKER).is_file():
            raise UsageError(
                f"{part} is in the way", why="it is no leftover of this command", fix="Move it or name another folder."
            )
        shutil.rmtree(part)
    part.mkdir(parents=True)
    (part / _MARKER).touch()
    try:
        yield part
        (part / _MARKER).unlink()
        if root.is_dir():
            # The caller's own empty folder stays: its owner, its mode, a mount, a shell that stands in it.
            for child in part.iterdir():
                shutil.move(child, root / child.name)
            part.rmdir()
        else:
            part.rename(root)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_checkpoint(
    root: Path, spec: SynthSpec, progress: Callable[[int], None] = lambda written: None
) -> SynthResult:
    """Write ``root/FL2VA`` and/or ``root/Ref2VA``; with both, also ``root/model_index.json``.

    Args:
        progress: called with the number of bytes just written; they add up to :func:`planned_bytes`.

    Raises:
        UsageError: ``root`` exists and is not empty, or its disk has no room for it.
    """
    root = Path(root).absolute()
    _check_target(root, planned_bytes(spec) + _SIDE_BYTES * len(spec.partitions))
    dit_parameters = text_parameters = 0
    with _whole_or_nothing(root) as part:
        for partition in spec.partitions:
            folder = part / partition.folder
            dit, text = _plans(spec, partition)
            dit_parameters = sum(plan.spec.numel for plan in dit)
            text_parameters = sum(plan.spec.numel for plan in text)
            for name, stem, plans in (
                ("transformer", "diffusion_pytorch_model", dit),
                ("text_encoder", "model", text),
            ):
                write_part(folder / name, stem, plans, seed=spec.seed, limit=spec.shard_bytes, progress=progress)
            write_vaes(folder, spec.video_vae, seed=spec.seed, progress=progress)
            write_side_files(folder, partition, spec)
        if len(spec.partitions) > 1:
            write_json(part / "model_index.json", model_index(None, spec))
    return SynthResult(
        root=root,
        partitions=tuple(root / partition.folder for partition in spec.partitions),
        dit_parameters=dit_parameters,
        text_parameters=text_parameters,
        bytes=sum(file.stat().st_size for file in root.rglob("*") if file.is_file()),
    )
