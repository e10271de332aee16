# SPDX-License-Identifier: Apache-2.0
"""Which partitions of a release's root are served, where nobody says: both if they fit, else FL2VA alone.

The host itself serves FL2VA where a root and ``--task-type auto`` are given (vLLM-Omni 0.30.0
``resolve_minimax_h3_diffusion_model_path``), so that a request with films or sounds would be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.locate import holds_both
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.facts import Gpu
from vllm_h3_plugin.preflight.need import need_of
from vllm_h3_plugin.serving.profile import Profile

GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """What is served of a root.

    Attributes:
        task: ``combined`` or ``fl2va``, as the host's ``--task-type`` has them.
        reason: a sentence for people, with the numbers.
    """

    task: str
    reason: str


Gpus = Callable[[], tuple[Gpu, ...] | Unknown]


def room_of(profile: Profile, gpus: Gpus, memory_bytes: int) -> int:
    """Bytes that one device has for weights and requests.

    Args:
        gpus: asks for the machine's NVIDIA devices; the first counts.
        memory_bytes: of the machine, which a device takes from where it has none of its own.
    """
    if profile.reference:
        return memory_bytes
    if profile.accelerator == "npu":
        return int(profile.card_gib * GIB)
    found = gpus()
    own = None if isinstance(found, Unknown) or not found else found[0].total_bytes
    return memory_bytes if own is None else own


def choose_partitions(root: Path, recipe: str, room_bytes: int, floor_gib: float) -> Choice:
    """Both, if both DiTs and the usual clip leave ``floor_gib`` of ``room_bytes`` free.

    Args:
        root: a folder that holds both partitions, sound.
        recipe: name or path.

    Raises:
        CheckpointError: a partition has a fault, or they hold DiTs of different shapes.
        RecipeError: the recipe cannot be read or does not fit the model.
    """
    both, one = (need_of(recipe, take_inventory(root, task)) for task in ("combined", "fl2va"))
    floor = floor_gib * GIB
    wanted = both.resident + both.clip + floor
    numbers = (
        f"with recipe {both.recipe} both hold {both.resident / GIB:.1f} GiB and FL2VA alone {one.resident / GIB:.1f}; "
        f"a clip takes {both.clip / GIB:.1f} on top, {floor_gib:g} stay free, and there are {room_bytes / GIB:.1f}"
    )
    if wanted <= room_bytes:
        return Choice("combined", f"{root} holds both partitions and both are served: {numbers}")
    return Choice("fl2va", f"{root} holds both partitions and FL2VA alone is served: {numbers}")


def with_partitions(profile: Profile, gpus: Gpus, memory_bytes: int, floor_gib: float) -> tuple[Profile, str | None]:
    """The profile with its task decided, and why; unchanged and None where there is nothing to decide.

    Raises:
        CheckpointError, RecipeError: see :func:`choose_partitions`.
    """
    if profile.task != "auto" or profile.checkpoint is None or not holds_both(profile.checkpoint):
        return profile, None
    choice = choose_partitions(profile.checkpoint, profile.recipe, room_of(profile, gpus, memory_bytes), floor_gib)
    return profile.with_flags({"task": choice.task}), choice.reason
