# SPDX-License-Identifier: Apache-2.0
"""The H3 pipeline of this plugin: the host's own, with the recipe, the loader and the checks put in.

Registered under the host's architecture and class name: TeaCache, Cache-DiT, regional compile and LoRA key on names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline

from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint.loader import LoadReport
from vllm_h3_plugin.checkpoint.reader import WeightSource
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.host import loading, run_state
from vllm_h3_plugin.host.progress import Progress
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.session import Session, open_session
from vllm_h3_plugin.pins import installed_host

# The registry resolves the post-process function in the module that it finds the class in (diffusion/registry.py:834).
get_minimax_h3_post_process_func = host_pipeline.get_minimax_h3_post_process_func

logger = init_logger(__name__)


def evaluations(num_steps: int) -> int:
    """DiT evaluations that a request of ``num_steps`` costs: N on 0.30, N - 1 on 0.28 (time_request.py of each)."""
    return num_steps if installed_host().vllm_omni != "0.28.0" else max(1, num_steps - 1)


def refuse_what_the_loader_skips(pipeline: Any) -> None:
    """Stop where the host was asked for something that happens inside its own ``load_weights``.

    Raises:
        UsageError: a FastH3 adapter, which the host fuses into the stream of weights, or an AdaLN sidecar, which it
            binds to them.
    """
    if getattr(pipeline, "_fasth3", None) is not None:
        raise UsageError(
            "a FastH3 adapter was given with --lora-path",
            why="this version of the plugin does not fuse adapters into weights while it loads them",
            fix="Serve without the adapter, or use the Turbo LoRA, which stays beside the weights.",
        )
    for name in pipeline._dit_modules:
        if getattr(getattr(pipeline, name), "_adaln_sidecar_candidate", None) is not None:
            raise UsageError(
                "an AdaLN sidecar was given in the host's cache config",
                why="this plugin's loader does not bind the host's precomputed AdaLN to the weights",
                fix="Leave minimax_h3_adaln_cache_path and minimax_h3_ref_adaln_cache_path out.",
            )


class MiniMaxH3Pipeline(host_pipeline.MiniMaxH3Pipeline):
    """MiniMax-H3 with online quantization by recipe and an exact loader.

    Raises (from ``__init__``, before the DiT and the text encoder are read; an adapter that is refused costs the VAEs):
        CheckpointError, RecipeError, BackendError, UsageError, SettingsError: see :func:`open_session`.
    """

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        session = open_session(od_config)
        # The host's override hook cannot see which model it builds for, so the config is replaced here, before the
        # layers ask for it. None is what the host has for an unquantized model.
        quantized = bool(session.plan.quantized)
        od_config.quantization_config = H3QuantizationConfig(session.plan, session.backend) if quantized else None
        super().__init__(od_config=od_config, prefix=prefix)
        self._session: Session = session
        self._progress = Progress()
        for name in self._dit_modules:
            self._progress.watch(getattr(self, name))
        refuse_what_the_loader_skips(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill all parts from the inventory's files; the host's own (memory-mapped, lazy) iterator is left untouched.

        Returns:
            Names of the filled parameters, prefixed by part, as the host's loader wants to hear them.

        Raises:
            CheckpointError, LoadError: a file that changed or a parameter that is not filled exactly once.
        """
        del weights
        started = time.perf_counter()
        loaded: set[str] = set()
        counts: dict[str, dict[str, int]] = {}
        total = 0
        for source in self.weights_sources:
            part = source.prefix.rstrip(".")
            report = self._load_part(part, Path(source.model_or_path) / (source.subfolder or ""))
            loaded |= {f"{source.prefix}{name}" for name in report.params}
            total += report.nbytes
            module = getattr(self, part)
            plan_part = "text_encoder" if part == "text_encoder" else "transformer"
            counts[part] = loading.check_precisions(module, plan_part, self._session.plan)
        for part in ("video_vae", "audio_vae"):
            # Filled by the host in __init__ (pipeline_minimax_h3.py:1061); named, so that its loader misses nothing.
            module = getattr(self, part)
            if module is not None:
                loaded |= {f"{part}.{name}" for name, _ in module.named_parameters()}
        self._report(counts, total, time.perf_counter() - started)
        return loaded

    def _load_part(self, module_name: str, folder: Path) -> LoadReport:
        """Fill one module of the pipeline (``transformer``, ``transformers_ref``, ``text_encoder``) from its folder."""
        partition = next(p for p in self._session.inventory.partitions if p.path.samefile(folder.parent))
        part = partition.part(folder.name)
        names = [tensor.name for tensor in part.tensors if tensor.name not in part.ignored]
        source = WeightSource(part, progress=self._progress.loading(f"loading {module_name}"))
        if module_name == "text_encoder":
            return loading.load_text_encoder(self.text_encoder, names, source)
        dit = getattr(self, module_name)
        assert partition.dit is not None  # the inventory is clean
        report = loading.load_dit(dit, names, source, config=partition.dit, diffusers=part.layout == "diffusers")
        dit.post_load_weights()
        return report

    def _report(self, counts: dict[str, dict[str, int]], nbytes: int, seconds: float) -> None:
        session = self._session
        rank = int(os.environ.get("RANK", "0"))
        logger.info(
            "H3 loaded: %.2f GiB read in %.1f s, recipe %s, layers %s",
            nbytes / 2**30,
            seconds,
            session.plan.recipe.name,
            counts,
        )
        run_state.write(
            f"worker-{rank}.json",
            {
                "plugin": __version__,
                "pipeline": f"{type(self).__module__}.{type(self).__qualname__}",
                "rank": rank,
                "pid": os.getpid(),
                "recipe": session.plan.recipe.name,
                "backend": session.backend.name if session.backend else None,
                "backend_reason": session.backend_reason,
                "layers": counts,
                "attention": self.transformer.blocks[0].attn.attention.attn_backend.__name__,
                "read_bytes": nbytes,
                "load_s": round(seconds, 3),
                "supported_tasks": sorted(self.supported_tasks),
            },
        )

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """The host's, announced."""
        self._progress.phase("encoding text")
        return super().encode_prompt(*args, **kwargs)

    def diffuse(self, **kwargs: Any) -> Any:
        """The host's, with its steps counted."""
        self._progress.phase("denoising", steps=evaluations(int(kwargs["num_steps"])))
        return super().diffuse(**kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """The host's, announced."""
        self._progress.phase("decoding")
        return super().decode(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The host's, with its end announced whether it succeeds or fails."""
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._progress.phase("idle")
