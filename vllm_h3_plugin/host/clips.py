# SPDX-License-Identifier: Apache-2.0
"""Clips are encoded by the worker that decodes them, and leave it as MP4 files.

0.30: chunk by chunk, while the VAE decodes the next one. Its request must say ``preencode_mp4``, which
:mod:`.video_request` sees to. 0.28 has neither; there all frames are decoded first, the clip is encoded where it would
have returned them, and a few pixels stand in for them until :meth:`EncodesClips.forward` puts the file in their place.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline
from vllm_omni.platforms import current_omni_platform

from vllm_h3_plugin.errors import ClipError
from vllm_h3_plugin.host.cancel import Cancellation
from vllm_h3_plugin.host.planes import on_host, yuv420p
from vllm_h3_plugin.host.progress import Progress
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.serving.jobs.progress import ENCODING_VIDEO
from vllm_h3_plugin.settings import Settings
from vllm_h3_plugin.video.encode import ClipEncoder, ClipFormat, Sound, Stopped
from vllm_h3_plugin.video.encoders import Encoder, choose
from vllm_h3_plugin.video.geometry import FPS

logger = init_logger(__name__)

CHUNK = 17
"""Frames that are converted and handed on at once: what the VAE decodes at a time."""

FRAMES_PER_LATENT = 4
"""The most."""


def chosen_encoder(values: Settings) -> Encoder | None:
    """The encoder of this worker, told once; None: it encodes nothing, because another rank or the host does.

    Raises:
        BackendError: see :func:`~vllm_h3_plugin.video.encoders.choose`.
    """
    if values.encoder == "host" or not _returns_output():
        return None
    encoder = choose(values.encoder, values.encode_preset)
    logger.info("clips are encoded with %s %s: %s", encoder.codec, dict(encoder.options), encoder.reason)
    return encoder


def _returns_output() -> bool:
    """The executor takes the answer of the first rank alone."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def post_process(output: Any, output_type: str = "np") -> Any:
    """The host's, which also lets encoded clips through (0.30's own does). Crosses processes by its name."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], list):
        return {
            "video": output[0],
            "audio": [None] * len(output[0]),
            "audio_sample_rate": host_pipeline.MINIMAX_H3_AUDIO_SAMPLE_RATE,
            "fps": host_pipeline.MINIMAX_H3_FPS,
        }
    return host_pipeline._minimax_h3_post_process(output, output_type)


def get_minimax_h3_post_process_func(od_config: Any) -> Any:
    """What the host's registry asks for by this name, in the module that it finds the pipeline in."""
    del od_config
    return post_process


class EncodesClips:
    """Mixed into the pipeline before the host's class.

    Attributes:
        _settings, _encoder, _progress, _cancel: set by the pipeline.
    """

    _settings: Settings
    _encoder: Encoder | None
    _progress: Progress
    _cancel: Cancellation

    def decode_to_mp4(
        self, video_latent: torch.Tensor, audio_latent: torch.Tensor, *, height: int, width: int, **options: Any
    ) -> bytes:
        """0.30: a clip from its latents. Ranks that do not return it give nothing.

        Raises:
            ClipError: it could not be encoded.
            RequestCancelledError: someone asked for that.
        """
        if self._settings.encoder == "host":
            theirs: Any = super()
            return theirs.decode_to_mp4(video_latent, audio_latent, height=height, width=width, **options)
        pipeline: Any = self
        with pipeline._component_on_device(pipeline.audio_vae):
            audio = pipeline.audio_vae.decode_latent(audio_latent)
        vae = pipeline.video_vae
        pipeline._release_stage_cache()
        with self._recording(audio, height, width, FRAMES_PER_LATENT * int(video_latent.shape[2])) as recording:
            with (
                pipeline._component_on_device(vae.decoder_component),
                current_omni_platform.create_autocast_context(
                    device_type=pipeline.device.type, dtype=torch.float16, enabled=True
                ),
            ):
                # A VAE whose code, which comes with the checkpoint, cannot decode in pieces is decoded whole.
                if callable(getattr(vae.model, "_adaptive_decode", None)):
                    vae.decode_with_chunks(video_latent, on_chunk=recording.add)
                else:
                    recording.add(vae.decode_latent(video_latent))
            return self._finished(recording)

    def decode(
        self, video_latent: torch.Tensor, audio_latent: torch.Tensor, *, height: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The host's; on 0.28 the clip is encoded here."""
        pipeline: Any = super()
        video, audio = pipeline.decode(video_latent, audio_latent, height=height, width=width)
        if self._settings.encoder == "host" or installed_host().vllm_omni != "0.28.0":
            return video, audio
        with self._recording(audio, height, width, int(video.shape[2])) as recording:
            recording.add(video)
            stand_in = video[:, :, :1, :2, :2].clone()
            del video
            self._clips.append(self._finished(recording))
        return stand_in, audio

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The host's, with files in the place of what stands in for them."""
        self._clips: list[bytes] = []
        pipeline: Any = super()
        return self._with_clips(pipeline.forward(*args, **kwargs))

    def post_decode(self, *args: Any, **kwargs: Any) -> Any:
        """The same for requests that run step by step."""
        self._clips = []
        pipeline: Any = super()
        return self._with_clips(pipeline.post_decode(*args, **kwargs))

    def _with_clips(self, output: Any) -> Any:
        if self._clips:
            output.output, output.post_process_func = (self._clips, None), post_process
            self._clips = []
        return output

    def _recording(self, audio: torch.Tensor, height: int, width: int, frames: int) -> Recording:
        encoder = None
        if self._encoder is not None:
            samples = audio.detach().float().cpu().numpy()
            sound = Sound(samples.reshape(-1, samples.shape[-1]), host_pipeline.MINIMAX_H3_AUDIO_SAMPLE_RATE)
            clip = ClipFormat(width, height, FPS, frames, sound)
            encoder = ClipEncoder(clip, self._encoder, stopped=self._cancel.asked)
        return Recording(encoder, height, width)

    def _finished(self, recording: Recording) -> bytes:
        self._progress.phase(ENCODING_VIDEO)
        data, failure = b"", None
        try:
            data = recording.finish()
        except (ClipError, Stopped) as exc:
            failure = exc
        # Every rank comes by here before one of them fails: one that failed before would leave the others waiting.
        self._cancel.check()
        if failure is not None:
            raise failure
        return data


class Recording:
    """The frames of one clip on their way to its encoder, if this rank has one."""

    def __init__(self, encoder: ClipEncoder | None, height: int, width: int) -> None:
        self._encoder = encoder
        self._size = (height, width)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._encoder is not None:
            self._encoder.__exit__(None, None, None)

    def add(self, chunk: torch.Tensor) -> None:
        """Take ``[1, 3, T, H, W]`` frames. Raises nothing that the encoder does: see :meth:`EncodesClips._finished`."""
        height, width = self._size
        for frames in chunk[0, :, :, :height, :width].split(CHUNK, dim=1):
            if self._encoder is None or self._encoder.failed:
                return
            self._encoder.push(on_host(yuv420p(frames)))

    def finish(self) -> bytes:
        return b"" if self._encoder is None else self._encoder.finish()
