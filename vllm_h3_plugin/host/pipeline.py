# SPDX-License-Identifier: Apache-2.0
"""The H3 pipeline of this plugin: the host's own, with the recipe, the loader and the checks put in.

Registered under the host's architecture and class name: TeaCache, Cache-DiT, regional compile and LoRA key on names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline

from vllm_h3_plugin import __version__, settings
from vllm_h3_plugin.attention.low_bit import MAX_TOKENS
from vllm_h3_plugin.checkpoint.shared_base import SharedBase
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.host import decoder_operators, reference_media, run_state
from vllm_h3_plugin.host.adaln import AdalnTables
from vllm_h3_plugin.host.adaln_modules import adaln_from_tables
from vllm_h3_plugin.host.adapters import CheckedAdapters, rules_at_start
from vllm_h3_plugin.host.attention import install
from vllm_h3_plugin.host.cancel import Cancellation
from vllm_h3_plugin.host.clips import EncodesClips, chosen_encoder, get_minimax_h3_post_process_func
from vllm_h3_plugin.host.dit import plugin_branch, plugin_dit
from vllm_h3_plugin.host.fused_adapter import release
from vllm_h3_plugin.host.hot_stages import keep_stages, plain_weights
from vllm_h3_plugin.host.measured import after_request, measured_memory
from vllm_h3_plugin.host.memory_watch import MemoryWatch
from vllm_h3_plugin.host.parts import file_digests, read_options
from vllm_h3_plugin.host.placed_parts import parts_on_cards
from vllm_h3_plugin.host.progress import IDLE, Progress
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.schedules import (
    default_schedule,
    evaluations,
    refuse_too_many_tokens,
    refuse_what_tables_cannot_serve,
    schedule_of,
)
from vllm_h3_plugin.host.session import Session, give_dit_config, model_configs, open_session
from vllm_h3_plugin.host.snapshots import require_snapshot
from vllm_h3_plugin.host.step import Step
from vllm_h3_plugin.host.tiles import TileBatches, room_on
from vllm_h3_plugin.host.vae_loading import streamed_vaes
from vllm_h3_plugin.host.weights import Loaded, WeightLoading, summary
from vllm_h3_plugin.memory.hot_cache import HotCache
from vllm_h3_plugin.memory.operations import step_flops
from vllm_h3_plugin.memory.weights import predict_resident
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.quantization.recipe import Adaln

# The registry resolves the post-process function in the module that it finds the class in (diffusion/registry.py:834).
__all__ = ["MiniMaxH3Pipeline", "get_minimax_h3_post_process_func"]

logger = init_logger(__name__)


def refuse_what_the_loader_skips(pipeline: Any) -> None:
    """Stop where the host was asked for something that happens inside its own ``load_weights``.

    Raises:
        UsageError: an AdaLN sidecar, which it binds to the weights.
    """
    for name in pipeline._dit_modules:
        if getattr(getattr(pipeline, name), "_adaln_sidecar_candidate", None) is not None:
            raise UsageError(
                "an AdaLN sidecar was given in the host's cache config",
                why="this plugin's loader does not bind the host's precomputed AdaLN to the weights",
                fix="Leave minimax_h3_adaln_cache_path and minimax_h3_ref_adaln_cache_path out.",
            )


def _evaluations(kwargs: Mapping[str, Any]) -> int:
    """DiT evaluations of a request, from what the host hands to ``diffuse``."""
    return evaluations(int(kwargs["num_steps"]), pinned=kwargs.get("base_schedule") is not None)


def _tile_decoder(video_vae: Any) -> torch.nn.Module | None:
    """What a video VAE runs once for each tile, where its code, which comes with the checkpoint, calls it so."""
    decoder = getattr(getattr(video_vae, "model", None), "decoder", None)
    return decoder if isinstance(decoder, torch.nn.Module) else None


class MiniMaxH3Pipeline(CheckedAdapters, EncodesClips, host_pipeline.MiniMaxH3Pipeline):
    """MiniMax-H3 with online quantization by recipe and an exact loader.

    Raises (from ``__init__``, before the DiT and the text encoder are read):
        CheckpointError, RecipeError, BackendError, UsageError, SettingsError: see :func:`open_session`.
        AdapterError: the adapter of ``--lora-path`` does not fit.
    """

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        session = open_session(od_config)
        adapters = rules_at_start(od_config, session)
        if adapters.own is not None and adapters.own.fused:
            session = replace(session, fused=adapters.own)
        tables = session.plan.recipe.adaln is Adaln.TABLE
        if tables:
            refuse_what_tables_cannot_serve(od_config)
        # The host's override hook cannot see which model it builds for, so the config is replaced here, before the
        # layers ask for it. None is what the host has for an unquantized model.
        give_dit_config(od_config, session.inventory)
        quantized = bool(session.plan.quantized)
        od_config.quantization_config = H3QuantizationConfig(session.plan, session.backend) if quantized else None
        device, values, progress = get_local_device(), settings.load(), Progress()
        reference_media.install(values.cache_dir)
        encoder = chosen_encoder(values)
        plain_weights(session.backend, values)
        watch = MemoryWatch.for_session(session, device)
        watch.check_start(predict_resident(session.inventory, session.plan).load_peak_bytes + adapters.own_bytes)
        require_snapshot(session, values)
        operators = decoder_operators.offer(device)
        with (
            streamed_vaes(
                session.inventory.partitions,
                device,
                progress=progress.loading,
                options=read_options(values, device),
                file_digests=file_digests(values, session.inventory),
            ) as vaes,
            adaln_from_tables() if tables else nullcontext(),
            plugin_dit(),
            parts_on_cards(values, device) as beside,
        ):
            super().__init__(od_config=od_config, prefix=prefix)
        self._session: Session = session
        self.adapter_rules = adapters
        self._settings = values
        self._progress = progress
        self._watch = watch
        self._cancel = Cancellation(device)
        self._encoder = encoder
        self._vaes = vaes
        self._beside = beside
        self._tables: Mapping[str, AdalnTables] = {}
        self._base: SharedBase | None = None
        for name in self._dit_modules:
            dit = getattr(self, name)
            progress.watch(dit)
            watch.install(dit)
            self._cancel.install(dit)
        self._cancel.install_local(_tile_decoder(self.video_vae))
        self._decoder_steps = decoder_operators.install(self.video_vae, operators)
        logger.info("the video VAE's decoder runs with %s", self._decoder_steps)
        self._tiles = TileBatches(
            self.video_vae,
            most=values.decode_batch,
            room=room_on(device, watch.system, watch.thresholds.floor),
            streaming=installed_host().vllm_omni != "0.28.0",
        )
        refuse_what_the_loader_skips(self)
        self._attention = {
            name: install(
                getattr(self, name),
                precision=session.plan.recipe.attention,
                folder=values.cache_dir.expanduser() / "attention",
                batched=od_config.max_num_seqs > 1,
            )
            for name in self._dit_modules
        }
        self._step = Step.of(self, session.backend, values)

    def setup_compile(self) -> None:
        """Called by the host's runner once the weights are in, in the place of its own torch.compile."""
        self._step.make_ready(self)
        # A phase that stays would be a request that never moves, to whoever watches.
        self._progress.phase(IDLE)

    def _prepare_tables(self) -> None:
        """Make the tables of ``H3_PREPARE_STEPS`` ready; the default schedule's is in use afterwards."""
        for name, tables in self._tables.items() if self._settings.prepare_steps else ():
            for steps in (*self._settings.prepare_steps, None):
                tables.activate(default_schedule(self, name, steps), self._progress.loading("building table"))
        self._progress.phase(IDLE)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill all parts from the inventory's files; the host's own (memory-mapped, lazy) iterator is left untouched.

        Returns:
            Names of the filled parameters, prefixed by part, as the host's loader wants to hear them.

        Raises:
            CheckpointError, LoadError: a file that changed or a parameter that is not filled exactly once.
        """
        del weights
        loading = WeightLoading(
            self,
            self._session,
            self._settings,
            self._progress,
            rank=int(os.environ.get("RANK", "0")),
            default_schedule={name: default_schedule(self, name) for name in self._dit_modules},
        )
        loaded = loading.load()
        self._tables = loading.tables
        self._base = loading.base
        self._hot: HotCache | None = None
        for name in self._dit_modules:
            getattr(self, name).post_load_weights()
        release(self._fasth3)
        filled = set(loaded.filled)
        for part in ("video_vae", "audio_vae"):
            # Filled by the host in __init__ (pipeline_minimax_h3.py:1061); named, so that its loader misses nothing.
            module = getattr(self, part)
            if module is not None:
                filled |= {f"{part}.{name}" for name, _ in module.named_parameters()}
        # Here and not in setup_compile, which the host does not call where nothing is to be compiled.
        self._prepare_tables()
        self._report(loaded)
        return filled

    def _report(self, loaded: Loaded) -> None:
        session = self._session
        rank = int(os.environ.get("RANK", "0"))
        logger.info(
            "H3 loaded from %s: %.2f GiB read in %.1f s, recipe %s, layers %s",
            loaded.origin,
            loaded.nbytes / 2**30,
            loaded.seconds["total"],
            session.plan.recipe.name,
            loaded.layers,
        )
        self._facts: dict[str, Any] = {
            "plugin": __version__,
            "pipeline": f"{type(self).__module__}.{type(self).__qualname__}",
            "rank": rank,
            "pid": os.getpid(),
            "recipe": session.plan.recipe.name,
            "adaln": session.plan.recipe.adaln.value,
            "backend": session.backend.name if session.backend else None,
            "backend_reason": session.backend_reason,
            "weight_format": getattr(session.backend, "weight_format", None),
            "beside": {part: str(where) for part, where in self._beside.items()},
            "layers": loaded.layers,
            "attention": self.transformer.blocks[0].attn.attention.attn_backend.__name__,
            "most_tokens": MAX_TOKENS.get(session.plan.recipe.attention),
            "step": self._step.facts(),
            "step_flops": asdict(step_flops(model_configs(session.inventory)[0])),
            "decode": self._decode_facts(),
            "encoder": None if self._encoder is None else self._encoder.as_dict(),
            "load": {**summary(loaded), "vaes": [asdict(vae) for vae in self._vaes]},
            "memory": measured_memory(self),
            "supported_tasks": sorted(self.supported_tasks),
            "pinned_steps": self._pinned_steps(),
            "adapters": None if self.adapter_rules is None else self.adapter_rules.as_dict(),
        }
        self._publish()

    def _decode_facts(self) -> dict[str, Any]:
        return {**self._tiles.facts(), "steps": self._decoder_steps}

    def _pinned_steps(self) -> int | None:
        """Denoise evaluations of a checkpoint that is distilled to one number of them."""
        task = "t2va" if "t2va" in self.supported_tasks else "ref2va"
        positions = self._base_schedule_for_task(task)
        return None if positions is None else int(positions.num_inference_steps)

    def _publish(self) -> None:
        self._facts["stages"] = self._hot.facts() if self._hot else None
        self._facts["decode"] = self._decode_facts()
        self._facts["attention_choice"] = {name: installed.facts() for name, installed in self._attention.items()}
        run_state.write(f"worker-{self._facts['rank']}.json", self._facts)

    def _build_denoise_inputs(self, **kwargs: Any) -> Any:
        """The host's; the table of its schedule is made ready before the first step."""
        with plugin_branch():
            inputs = super()._build_denoise_inputs(**kwargs)
        refuse_too_many_tokens(self._session.plan.recipe, inputs["branch"].seq_len)
        self._progress.tokens(int(inputs["branch"].seq_len))
        dit = (
            "transformers_ref" if self._transformer_for_task(kwargs["task"]) is not self.transformer else "transformer"
        )
        tables = self._tables.get(dit)
        if tables is not None:
            self._progress.phase("building table")
            tables.activate(schedule_of(inputs), self._progress.loading("building table"))
            self._progress.phase("denoising", steps=_evaluations(kwargs))
        return inputs

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """The host's, announced."""
        self._cancel.check()
        self._progress.phase("encoding text")
        encoded = super().encode_prompt(*args, **kwargs)
        self._cancel.check()
        return encoded

    def diffuse(self, **kwargs: Any) -> Any:
        """The host's, with its steps counted."""
        self._progress.phase("denoising", steps=_evaluations(kwargs))
        self._watch.expect(kwargs)
        try:
            return super().diffuse(**kwargs)
        finally:
            for name in self._dit_modules:
                getattr(self, name).forget_request()

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """The host's, announced."""
        self._progress.phase("decoding")
        self._watch.check()
        self._cancel.check()
        self._tiles.begin(args[0] if args else kwargs["video_latent"])
        decoded = super().decode(*args, **kwargs)
        self._cancel.check()
        return decoded

    def decode_to_mp4(self, *args: Any, **kwargs: Any) -> Any:
        """0.30: decode and encode, announced."""
        self._progress.phase("decoding and encoding")
        self._watch.check()
        self._cancel.check()
        self._tiles.begin(args[0] if args else kwargs["video_latent"])
        return super().decode_to_mp4(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The host's, watched for memory, with its end announced whether it succeeds, fails or is stopped."""
        request = str(getattr(args[0] if args else kwargs.get("request"), "request_id", ""))
        self._progress.begin(request)
        self._tiles.forget()
        try:
            if self._base is not None:
                self._base.check()
            if self._hot is None:
                # Not at the load: the host still works on the weights of its own linear layers after that.
                self._hot = keep_stages(self, self._settings, self._base)
            with self._watch.request(), self._cancel.request(request):
                return super().forward(*args, **kwargs)
        finally:
            self._facts["memory"] = after_request(self._facts["memory"], self)
            self._publish()
            self._progress.end(peak_memory_bytes=self._facts["memory"]["peak_bytes"], decode=self._tiles.told())
