# SPDX-License-Identifier: Apache-2.0
"""One look at one machine: each answer is asked for once, and only when a check wants it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path

from vllm_h3_plugin import settings as known_settings
from vllm_h3_plugin.checkpoint.checksums import Verdicts, compare, release_root
from vllm_h3_plugin.checkpoint.hash_files import Hashed, hash_files
from vllm_h3_plugin.checkpoint.inventory import Inventory, ShardFile, take_inventory
from vllm_h3_plugin.checkpoint.locate import holds_both
from vllm_h3_plugin.checkpoint.snapshot_store import list_snapshots
from vllm_h3_plugin.errors import CheckpointError, H3Error
from vllm_h3_plugin.pins import load_pins
from vllm_h3_plugin.preflight import probe
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.dotenv import EnvFile
from vllm_h3_plugin.preflight.expected import Kind
from vllm_h3_plugin.preflight.facts import Docker, Gpu, Image, Room
from vllm_h3_plugin.preflight.machine import Machine, Memory
from vllm_h3_plugin.preflight.need import Need, need_of
from vllm_h3_plugin.preflight.partitions import with_partitions
from vllm_h3_plugin.preflight.wanted import Wanted

MOUNT = Path("/checkpoint")
"""Where the compose files mount the release's folder."""

CACHE_VOLUMES = {Kind.ASCEND: "vllm-h3-ascend_cache"}
"""Volume of the cache, by the names in the compose files, where it is not ``vllm-h3_cache``."""


def expanded(path: Path) -> Path:
    """A path with ``~`` replaced where there is such a user."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def readable_by(path: Path, user: int) -> bool:
    """Whether a user that owns nothing else may read a file, or look into a folder, by its mode; True if unknown."""
    try:
        found = path.stat()
    except OSError:
        return True
    shift = 6 if found.st_uid == user else 3 if found.st_gid == user else 0
    wanted = 0o5 if stat.S_ISDIR(found.st_mode) else 0o4
    return (found.st_mode >> shift) & wanted == wanted


Hasher = Callable[[Iterable[ShardFile]], Mapping[Path, Hashed]]


def _hash(files: Iterable[ShardFile]) -> Mapping[Path, Hashed]:
    return {found.path: found for found in hash_files(files)}


class Survey:
    """Lazy facts about one machine and what is wanted of it."""

    def __init__(self, machine: Machine, wanted: Wanted, hasher: Hasher = _hash) -> None:
        self.machine = machine
        self.wanted = wanted
        self._hasher = hasher

    @cached_property
    def settings(self) -> known_settings.Settings | H3Error:
        """Settings as a server would get them: the caller's environment over the ``.env`` file, as compose has it."""
        known = known_settings.known_variables()
        env_file = self.wanted.env_file
        file = env_file.values if isinstance(env_file, EnvFile) else {}
        try:
            return known_settings.load({**{k: v for k, v in file.items() if k in known}, **self.machine.environ})
        except H3Error as exc:
            return exc

    @cached_property
    def values(self) -> known_settings.Settings:
        """The settings, for checks that run only where they are sound."""
        if isinstance(self.settings, H3Error):
            raise self.settings
        return self.settings

    @cached_property
    def docker(self) -> Docker | Unknown:
        """The engine."""
        return probe.docker(self.machine)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...] | Unknown:
        """NVIDIA devices."""
        return probe.gpus(self.machine)

    @cached_property
    def devices(self) -> tuple[Gpu, ...]:
        """The devices that the profile uses, for checks that run only where there are some."""
        assert not isinstance(self.gpus, Unknown)
        return self.gpus[: max(self.wanted.expected.cards, 1)]

    @cached_property
    def memory(self) -> Memory:
        """Main memory and swap."""
        return self.machine.memory()

    @cached_property
    def image(self) -> Image:
        """The image of the profile's host."""
        pin = load_pins().host(self.wanted.expected.host).image
        return probe.image(self.machine, pin.reference, pin.digest)

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint's folder. Absolute: the host finds a partition by its folder's name, which "." has not."""
        path = self.wanted.profile.checkpoint
        return None if path is None else Path(os.path.abspath(expanded(path)))

    @property
    def recipe(self) -> str:
        """Name or path of the recipe that the server would take; only where the settings are sound."""
        return self.wanted.recipe or self.values.recipe or self.wanted.profile.recipe

    @cached_property
    def served(self) -> tuple[str, str | None]:
        """The host's task type and, where a root was given without one, why it is this one."""
        asked = self.wanted.profile
        if isinstance(self.settings, H3Error):
            return asked.task, None
        profile = asked.model_copy(update={"checkpoint": self.checkpoint, "recipe": self.recipe})
        total, floor = self.memory.total_bytes, self.values.memory_floor_gib
        try:
            decided, reason = with_partitions(profile, lambda: self.gpus, total, floor)
        except (H3Error, OSError):
            return "combined", None  # what is wrong with either is found where both are looked at
        return decided.task, reason

    @cached_property
    def inventory(self) -> Inventory | Unknown:
        """The checkpoint's files, by their headers."""
        path = self.checkpoint
        if path is None:
            return Unknown("none was named")
        task, _ = self.served
        try:
            return take_inventory(path, None if task == "auto" else task)
        except OSError as exc:
            return Unknown(exc.strerror or str(exc))

    def as_mounted(self, user: int) -> tuple[Path, list[Path], list[Path]]:
        """The folder that a container mounts; links below the partition that leave it; what ``user`` may not read."""
        path = self.checkpoint
        assert path is not None
        root = path if holds_both(path) else path.parent
        real = root.resolve()
        leading_out, unreadable = [], []
        for entry in (root, path, *sorted(path.rglob("*"))):
            if entry.is_symlink() and not entry.resolve().is_relative_to(real):
                leading_out.append(entry)
            elif not readable_by(entry, user):
                unreadable.append(entry)
        return root, leading_out, unreadable

    @cached_property
    def need(self) -> Need | H3Error:
        """What the recipe needs; of the real model's sizes where the checkpoint is not sound."""
        found = self.inventory
        try:
            return need_of(self.recipe, found if isinstance(found, Inventory) and not found.faults else None)
        except H3Error as exc:
            return exc

    @property
    def sound_need(self) -> Need:
        """The need, for checks that run only where the recipe is sound."""
        if isinstance(self.need, H3Error):
            raise self.need
        return self.need

    def room(self) -> Room:
        """Disks of images and cache, and whether a snapshot of this recipe lies in the cache.

        In a container the cache is a volume of the engine's, which only root may look into.
        """
        if not self.wanted.expected.containers:
            cache = self.values.cache_dir.expanduser()
            return Room(Unknown("there is no container"), self.machine.disk(cache), self._snapshot_fits(cache))
        if not isinstance(self.docker, Docker):
            unknown = Unknown("the engine does not answer")
            return Room(unknown, unknown, unknown)
        place = self.machine.disk(Path(self.docker.root))
        volume = CACHE_VOLUMES.get(self.wanted.expected.kind, "vllm-h3_cache")
        started = probe.volume_exists(self.machine, volume)
        return Room(place, place, Unknown(f"only root may look into volume {volume}") if started else False)

    def _snapshot_fits(self, cache: Path) -> bool:
        # Its key holds the host that made it: recipe and checkpoint by name are what can be compared from here.
        recipe = self.sound_need.recipe
        try:
            found = list_snapshots(cache)
        except (OSError, H3Error):
            return False
        return any(
            info.usable and info.notes.get("recipe") == recipe and info.notes.get("checkpoint") == str(self.checkpoint)
            for info in found
        )

    def checksums(self) -> Verdicts | H3Error:
        """Every shard against the manifest of ``H3_VERIFY_CHECKSUMS``, or the one that ``vllm-h3 checksums`` wrote."""
        assert isinstance(self.inventory, Inventory)
        try:
            return compare(self._manifest(self.inventory), self.inventory, self._hasher)
        except H3Error as exc:
            return exc

    def _manifest(self, inventory: Inventory) -> Path:
        root = release_root(inventory)
        named = self.values.verify_checksums
        if named is not None:
            inside = self.wanted.expected.containers and named.is_relative_to(MOUNT)
            return root / named.relative_to(MOUNT) if inside else named
        names = dict.fromkeys((f"{root.name}.sha256", f"{inventory.path.resolve().name}.sha256"))
        places = [folder / name for folder in (Path(), root, root.parent) for name in names]
        for place in places:
            if self.machine.exists(place):
                return place
        raise CheckpointError(
            f"no list of checksums for {inventory.path}",
            why=f"H3_VERIFY_CHECKSUMS names none, and no {' or '.join(names)} is here or beside the checkpoint",
            fix=f"If you trust these files now: vllm-h3 checksums {inventory.path}; --deep then compares with it.",
        )
