# SPDX-License-Identifier: Apache-2.0
"""The numbers in the prediction that no shape gives, each with where it comes from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

UNMEASURED = "unmeasured"

_MIB = 2**20


def _from(source: str, default: float) -> Any:
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True)
class Coefficients:
    """Constants of the activation model; ``sources()`` says where each comes from.

    Attributes:
        allocator_factor: bytes that the allocator reserves over bytes that tensors have.
        workspace_bytes: of GEMM and attention kernels, whatever the request.
        decode_clip_frames: frames that the VAE's decoder makes at a time.
        decode_tile_bytes: activations of the VAE's decoder on one spatial tile of one clip, its FP16 copies of weights
            included.
        decode_more_tile_bytes: what each further tile of a batch adds to them.
        encoder_bytes_per_pixel: activations of the VAE's encoder for one pixel of one picture, FP32.
        audio_encoder_bytes_per_second: activations of the audio VAE's encoder.
        host_frame_copies: uint8 copies of all frames that the host holds at once while it encodes.
        mp4_bytes: the encoder's own memory and the file.
        process_bytes: what the server's processes and the device's context take beside weights and requests.
    """

    allocator_factor: float = _from(UNMEASURED, 1.1)
    workspace_bytes: int = _from(UNMEASURED, 256 * _MIB)
    decode_clip_frames: int = _from(
        "diffusers 0.40 autoencoder_kl_minimax_h3.py: 17 frames a clip and 3 tokens dropped make 5 + 2 latent frames, "
        "of 4 frames each",
        28,
    )
    decode_tile_bytes: int = _from(UNMEASURED, 1536 * _MIB)
    decode_more_tile_bytes: int = _from(
        "the same file: 7 x 16 x 16 + 5 tokens of width 2048 with an MLP of 8192, at the widest place of a block under "
        f"FP16 autocast (residual FP32, input, gate and up, activation, product in FP16); {UNMEASURED}",
        (7 * 16 * 16 + 5) * (2048 * (4 + 2) + 8192 * (2 * 2 + 2 + 2)),
    )
    encoder_bytes_per_pixel: int = _from(
        f"128 channels x 4 live FP32 maps, a usual CNN encoder's first level: {UNMEASURED}", 2048
    )
    audio_encoder_bytes_per_second: int = _from(UNMEASURED, 32 * _MIB)
    host_frame_copies: int = _from(
        "0.30.0: the worker's array, the one in transit, the API's (media_utils.py np.stack); one process has two",
        3,
    )
    mp4_bytes: int = _from(UNMEASURED, 128 * _MIB)
    process_bytes: int = _from(
        f"1.4 GiB RSS seen with a tiny model on the CPU; the device's context on top {UNMEASURED}", 2048 * _MIB
    )

    @classmethod
    def sources(cls) -> dict[str, str]:
        """Name -> source."""
        return {item.name: item.metadata["source"] for item in fields(cls)}


DEFAULT = Coefficients()
