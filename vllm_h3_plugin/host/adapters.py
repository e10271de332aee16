# SPDX-License-Identifier: Apache-2.0
"""Adapters that a table of modulations cannot take: those that change AdaLN or the timestep embedder before it.

The host runs an adapter beside the linear layer that it names. Where AdaLN is a table that layer does not exist, which
the host refuses without a way out. The embedder's layers exist and are never called: there the host says nothing, and
the clip would be neither the base model's nor the adapter's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm_omni.errors import OmniClientError

from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.host.adaln_modules import uses_tables
from vllm_h3_plugin.host.schedules import RESIDENT_HINT

_ADALN = (".adaln_proj.", ".norm_out.linear.")
_EMBEDDER = (".time_embedder.",)
"""In names of both layouts."""


def refuse_adapter_of_adaln(path: str | Path, names: Iterable[str]) -> None:
    """Stop where an adapter changes what a table holds.

    Args:
        path: of the adapter, for the message.
        names: of its tensors or of the modules that it names, in either layout, with any prefix.

    Raises:
        OmniClientError: it does, with the first such name and the way out.
    """
    found = sorted(name for name in names if any(part in f".{name}." for part in (*_ADALN, *_EMBEDDER)))
    if not found:
        return
    adaln = [name for name in found if any(part in f".{name}." for part in _ADALN)]
    error = UsageError(
        f"adapter {path} changes {(adaln or found)[0]}",
        why=f"AdaLN is kept as a table made from the base weights, and {len(found)} names of the adapter are behind it",
        # Beside the embedder's FP32 layers the host's BF16 low-rank path fails (lora/layers/base_linear.py).
        fix=RESIDENT_HINT if len(adaln) == len(found) else "Use an adapter that leaves the timestep embedder alone.",
    )
    raise OmniClientError(str(error)) from error


def adapter_names(path: str | Path) -> list[str]:
    """Names of the tensors of an adapter: a safetensors file, or a folder with some. Others are left to the host."""
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    names: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names += tensors.keys()
        except (OSError, SafetensorError):
            continue
    return names


class AdaptersBesideTables:
    """For the pipeline: asks both before an adapter is loaded and when it is bound. Stands before the host's class."""

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str | Path, dtype: Any) -> Any:
        """The host's; an adapter of AdaLN is refused from its names, before its tensors are read."""
        if self._has_tables():
            refuse_adapter_of_adaln(lora_path, adapter_names(lora_path))
        host: Any = super()
        return host._load_diffusion_lora_adapter(lora_request=lora_request, lora_path=lora_path, dtype=dtype)

    def _validate_diffusion_lora_binding(self, *, lora_model: Any, bound_lora_names: frozenset[str]) -> None:
        """The host's, and whatever kind of file the adapter came from, it must not name AdaLN."""
        if self._has_tables():
            refuse_adapter_of_adaln(lora_model.id, lora_model.loras)
        host: Any = super()
        host._validate_diffusion_lora_binding(lora_model=lora_model, bound_lora_names=bound_lora_names)

    def _has_tables(self) -> bool:
        pipeline: Any = self
        return any(uses_tables(getattr(pipeline, name)) for name in pipeline._dit_modules)
