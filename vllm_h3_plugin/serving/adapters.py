# SPDX-License-Identifier: Apache-2.0
"""Which adapters a server can take: what its model, its recipe and its host allow, beyond the file being sound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_h3_plugin.checkpoint.adapter import Adapter, check_adapter
from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.checkpoint.inventory import Inventory
from vllm_h3_plugin.errors import AdapterError
from vllm_h3_plugin.pins import installed_host

RESIDENT_HINT = 'Serve with a recipe that has "adaln": "resident" for it; that keeps 24.3 GiB more on the device.'
NO_EMBEDDER = "Use an adapter that leaves the timestep embedder alone."


@dataclass(frozen=True)
class AdapterRules:
    """What decides about an adapter, as the workers reported it.

    Attributes:
        dit: shape of the DiT that adapters change.
        partition: ``fl2va``, ``ref2va`` or ``combined``, as the host calls what it serves.
        tables: AdaLN is kept as a table made from the base weights.
        whole_family: the host's own loader takes every Turbo file; 0.28 needs what the file's metadata say.
        own: the adapter that was loaded at start.
        scale: its strength.
    """

    dit: DitConfig
    partition: str
    tables: bool
    whole_family: bool = True
    own: Adapter | None = None
    scale: float = 1.0

    @property
    def own_bytes(self) -> int:
        """Bytes that the adapter of the start takes beside the weights; none where it becomes a part of them."""
        return 0 if self.own is None or self.own.fused else self.own.nbytes

    @classmethod
    def of(cls, inventory: Inventory, *, tables: bool) -> AdapterRules:
        """Of a clean inventory on the installed host, with no adapter loaded.

        Args:
            tables: whether the recipe keeps AdaLN as a table.
        """
        names = {partition.name.lower() for partition in inventory.partitions}
        dit = inventory.partitions[0].dit
        assert dit is not None  # the inventory is clean
        partition = names.pop() if len(names) == 1 else "combined"
        return cls(dit, partition, tables, installed_host().vllm_omni != "0.28.0")

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "own": None if self.own is None else self.own.as_dict()}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> AdapterRules:
        """What :meth:`as_dict` made, back again."""
        shape = {item.name: facts["dit"][item.name] for item in fields(DitConfig)}
        dit = DitConfig(**{**shape, "patch_size": tuple(shape["patch_size"])})
        own = None if facts["own"] is None else Adapter.from_dict(facts["own"])
        return cls(**{**facts, "dit": dit, "own": own})

    def check(self, path: Path | str, *, at_start: bool = False) -> Adapter:
        """The adapter in a file, if this server can use it.

        Args:
            at_start: it is to be loaded with the weights, and not for one request.

        Raises:
            AdapterError: the file does not fit the model, or the server cannot use what it holds.
        """
        adapter = check_adapter(path, self.dit)
        reason = self._refusal(adapter, at_start)
        if reason is not None:
            raise AdapterError(f"adapter {adapter.path}", why=reason[0], fix=reason[1])
        return adapter

    def _refusal(self, adapter: Adapter, at_start: bool) -> tuple[str, str] | None:
        """(why, fix) where a sound adapter cannot be used here."""
        if self.own is not None and self.own.fused:
            return (
                f"{self.own.path} is fused into this server's weights, and nothing can be put on top of it",
                "Leave `lora` out, or serve without the FastH3 adapter.",
            )
        if adapter.fused and not at_start:
            return (
                "a FastH3 adapter becomes a part of the weights while they load, and cannot be had for one request",
                "Start the server with it: `vllm-h3 serve PROFILE --lora PATH`; or use a Turbo file.",
            )
        serves = ("ref2va",) if self.partition == "ref2va" else ("t2va", "fl2va")
        if adapter.tasks and not set(adapter.tasks) & set(serves):
            made = " and ".join(adapter.tasks)
            # In a `combined` server ref2va runs on a DiT of its own, which the host's loader does not reach.
            fix = "Serve the Ref2VA folder by itself." if "ref2va" in adapter.tasks else "Serve the FL2VA folder."
            return f"it was made for {made}, and this server puts adapters on the DiT of {' and '.join(serves)}", fix
        if "ref2va" in adapter.tasks and not self.whole_family:
            return "vLLM-Omni 0.28 puts no adapter on Ref2VA", "Use the 0.30 host for it."
        if adapter.undeclared and not self.whole_family:
            said = " and ".join(adapter.undeclared)
            return f"its metadata have no {said}, which vLLM-Omni 0.28 asks for", "Use a newer file of the family."
        if adapter.fused or not self.tables or not (adapter.adaln or adapter.embedder):
            return None
        return (
            f"it changes {adapter.adaln or adapter.embedder}, and AdaLN is kept as a table made from the base weights",
            NO_EMBEDDER if adapter.embedder else RESIDENT_HINT,
        )
