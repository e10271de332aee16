# SPDX-License-Identifier: Apache-2.0
"""Adapters in the worker: held against the model before the host reads them, at start and for a request.

The host runs an adapter beside the linear layer that it names. Where AdaLN is a table that layer does not exist, which
the host refuses without a way out. The embedder's layers exist and are never called: there the host says nothing, and
the clip would be neither the base model's nor the adapter's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm_omni.errors import OmniClientError

from vllm_h3_plugin.checkpoint.adapter import Adapter
from vllm_h3_plugin.checkpoint.adapter_layout import behind_table, parse_turbo_name
from vllm_h3_plugin.errors import AdapterError, UsageError
from vllm_h3_plugin.host.adaln_modules import uses_tables
from vllm_h3_plugin.host.adapter_shapes import loaders_for
from vllm_h3_plugin.host.schedules import evaluations
from vllm_h3_plugin.host.session import Session
from vllm_h3_plugin.quantization.recipe import Adaln
from vllm_h3_plugin.serving.adapters import NO_EMBEDDER, RESIDENT_HINT, AdapterRules

logger = init_logger(__name__)


def rules_at_start(od_config: Any, session: Session) -> AdapterRules:
    """What decides about adapters on this server, with the one of ``--lora-path`` in it, checked.

    Args:
        od_config: the host's ``OmniDiffusionConfig``.

    Raises:
        AdapterError: the adapter does not fit the model or the server. No weight has been read.
    """
    rules = AdapterRules.of(session.inventory, tables=session.plan.recipe.adaln is Adaln.TABLE)
    path, scale = _asked(od_config)
    if path is None:
        return rules
    own = rules.check(path, at_start=True)
    how = "fused while the weights load" if own.fused else f"beside the weights at scale {scale:g}"
    logger.info("H3 adapter %s: %s, rank %d, %d layers, %s", own.file, own.kind, own.rank, own.layers, how)
    return replace(rules, own=own, scale=scale)


def _asked(od_config: Any) -> tuple[str | None, float]:
    """Path and scale of the host's flags."""
    paths, scale = getattr(od_config, "lora_path", None), getattr(od_config, "lora_scale", None)
    if str(getattr(od_config, "lora_backend", "peft")).rpartition(".")[2].lower() == "distill":
        raise AdapterError(
            "--lora-backend distill",
            why="the host's H3 has no such adapters",
            fix="Leave the flag out; a FastH3 adapter is fused without it.",
        )
    paths = [paths] if isinstance(paths, str | Path) else list(paths or ())
    if len(paths) > 1:
        raise AdapterError(
            f"--lora-path names {len(paths)} adapters", why="one can be loaded at start", fix="Name one, and others "
            "in the `lora` of requests.",
        )  # fmt: skip
    if isinstance(scale, list | tuple):
        scale = scale[0] if scale else None
    return (str(paths[0]) if paths else None), 1.0 if scale is None else float(scale)


def refuse_adapter_of_adaln(path: str | Path, names: Iterable[str]) -> None:
    """Stop where an adapter changes what a table holds.

    Args:
        path: of the adapter, for the message.
        names: of its tensors or of the modules that it names, in either layout, with any prefix.

    Raises:
        OmniClientError: it does, with the first such name and the way out.
    """
    adaln, embedder = behind_table(names)
    if adaln is None and embedder is None:
        return
    error = UsageError(
        f"adapter {path} changes {adaln or embedder}",
        why="AdaLN is kept as a table made from the base weights",
        # Beside the embedder's FP32 layers the host's BF16 low-rank path fails (lora/layers/base_linear.py).
        fix=NO_EMBEDDER if embedder else RESIDENT_HINT,
    )
    raise OmniClientError(str(error)) from error


class CheckedAdapters:
    """For the pipeline: asks before an adapter is loaded and when it is bound. Stands before the host's class."""

    adapter_rules: AdapterRules | None = None
    """None: adapters are left to the host, but for what a table holds."""

    @property
    def own_adapter(self) -> Adapter | None:
        """The adapter that was loaded at start."""
        return self.adapter_rules.own if self.adapter_rules is not None else None

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str | Path, dtype: Any) -> Any:
        """The host's, given the shape of this model; an adapter that does not fit is refused before it is read."""
        rules, own = self.adapter_rules, None
        if rules is not None:
            try:
                own = rules.check(lora_path)
            except AdapterError as error:
                raise OmniClientError(str(error)) from error
            self._known_adapters()[lora_request.lora_int_id] = own
        host: Any = super()
        with loaders_for(rules.dit, own) if rules is not None and own is not None else nullcontext():
            return host._load_diffusion_lora_adapter(lora_request=lora_request, lora_path=lora_path, dtype=dtype)

    def _validate_diffusion_lora_binding(self, *, lora_model: Any, bound_lora_names: frozenset[str]) -> None:
        """The host's, and whatever kind of file the adapter came from, it must not name AdaLN beside a table."""
        if self._has_tables():
            refuse_adapter_of_adaln(lora_model.id, lora_model.loras)
        missing = sorted(set(lora_model.loras) - bound_lora_names)
        if missing or not lora_model.loras:
            # 0.28 warns and goes on with what it could bind (lora/manager.py).
            what = f"adapter {lora_model.id}: {len(missing)} of {len(lora_model.loras)} layers found no place"
            raise OmniClientError(str(AdapterError(what, why=f"first {missing[:1]}", fix="Use another adapter.")))
        host: Any = super()
        host._validate_diffusion_lora_binding(lora_model=lora_model, bound_lora_names=bound_lora_names)

    def _validate_turbo_sampling(self, sampling: Any, *spec: Any) -> None:
        """The host's; on 0.28, which knows the contract of one file, this file's own."""
        host: Any = super()
        adapter = self._known_adapters().get(sampling.lora_request.lora_int_id)
        if spec or adapter is None:
            host._validate_turbo_sampling(sampling, *spec)
            return
        name = parse_turbo_name(adapter.file.name)
        assert name is not None  # the host has found it to be a Turbo file
        extra, pipeline = sampling.extra_args or {}, self
        asked: dict[str, tuple[float, float]] = {
            "num_inference_steps": (evaluations(int(sampling.num_inference_steps or 0)), name.steps)
        }
        for key, made_for in (("flow_shift", name.video_shift), ("audio_flow_shift", name.audio_shift)):
            default: Any = getattr(pipeline, f"default_{'video' if key == 'flow_shift' else 'audio'}_shift")
            asked[key] = (float(extra.get(key, default)), made_for)
        for key, (found, wanted) in asked.items():
            if not math.isclose(found, wanted):
                raise OmniClientError(f"{adapter.file.name} was distilled at {key}={wanted:g}, got {found:g}")

    def _known_adapters(self) -> dict[int, Adapter]:
        """By the host's number of each."""
        known: dict[int, Adapter] = self.__dict__.setdefault("_h3_adapters", {})
        return known

    def _has_tables(self) -> bool:
        pipeline: Any = self
        return any(uses_tables(getattr(pipeline, name)) for name in pipeline._dit_modules)
