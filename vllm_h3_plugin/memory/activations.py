# SPDX-License-Identifier: Apache-2.0
"""What a request needs on top of the weights, phase by phase. Imports no torch.

Read from vLLM-Omni 0.30.0 ``minimax_h3/`` and from this plugin's blocks (eager). Letters: S rows of the packed
sequence, h hidden, d heads x head width, f FFN width, L text rows, all BF16 (2 bytes) unless said otherwise. d and f
are divided by the tensor-parallel size.

*Text encoding.* One decoder layer at its widest: residual, normed input and its copy (3 h), ``gate_up`` (2 f) and the
activation (f); or at the attention: 3 h, q/k/v and rotated q/k, output and its contiguous copy. An FP8 layer also holds
its input in FP8 and one FP32 scale a row. With pictures, the vision tower on 4 patches a token: pixel values, hidden,
``fc1`` and its activation, or q/k/v and rotated q/k; and the DeepStack features until the end.

*Denoise.* Live through all blocks: the embedded rows (``decoder_input``) and the previous block's output
(``hidden``), which the block's residual is at first. In a quantized block (``host/fused_block.py``) at its widest, one
of

- attention: FP8 input h, fused qkv 3 d (q and k are rotated in place), output d, FP32 log-sum-exp;
- MLP, at the activation: residual h, FP8 input h, ``fc1`` output 2 f, FP8 activation f;
- MLP, at ``fc2``: residual h, FP8 activation f, output h;
- at the end: residual, output and sum h each, FP8 input of the next block h;

in a BF16 block, which the host computes, one of

- attention, at ``out_proj``: 2 h held outside, normed input h, fused qkv 3 d (v is a view of it), q and k after norm
  and RoPE 2 d, attention output d, FP32 log-sum-exp (4 bytes a head and row), the projection's output h;
- MLP, at ``SiluAndMul``: 2 h held outside, residual h, normed input h, ``fc1`` output 2 f, activation f;

and in both

- embedding, before the blocks: FP32 patch projection (4 bytes) and its BF16 copy over h, and the rows themselves;
- heads, after the blocks: h twice, normed h, its FP32 copy (4 bytes), FP32 logits.

Beside it: latent rows in FP32 (current, cloned, model input, velocity, x0, next), positions in FP64, indices, masks and
the BF16 cos/sin table; attention without a mask (the kernels that the pins choose need none).

*VAE decode.* The result on the device: the uint8 frames, which the streaming decoder fills, and their channels-last
copy; where it does not stream (0.28, or a VAE without that method) the FP32 frames and one copy of them stand instead.
One temporal clip at full size in FP16, the part of it that goes to the next clip, and its FP32 copy; one tile's
activations, and those of the tiles that are decoded with it. Whether a request fits is asked of one tile at a time;
:func:`tiles_at_once` says how many then do.

*Encode.* Frames on the host, as uint8 arrays: the worker's, the one in transit and the API's.

*References.* One picture at a time through the VAE's FP32 encoder; before the other phases, and in no phase with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_h3_plugin.checkpoint.configs import TextEncoderConfig
from vllm_h3_plugin.memory.coefficients import DEFAULT, Coefficients
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.memory.table import TableSize
from vllm_h3_plugin.memory.weights import ModelShapes
from vllm_h3_plugin.quantization.footprint import GIB

_FP8, _BF16, _FP16, _FP32, _FP64, _INT64 = 1, 2, 2, 4, 8, 8
_FP8_SCALE = 4  # FP32, one a row
_RGB = 3
_PATCHES_PER_TOKEN = 4  # the vision tower's spatial merge


@dataclass(frozen=True)
class Phase:
    """Bytes that one phase of a request takes beyond what is resident.

    Attributes:
        name: ``references``, ``text``, ``denoise``, ``decode`` or ``encode``.
        device: name of a term -> bytes on the device.
        host: name of a term -> bytes in host memory.
    """

    name: str
    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Sum on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Sum in host memory."""
        return sum(self.host.values())

    @property
    def nbytes(self) -> int:
        """Both: what it takes of unified memory."""
        return self.device_bytes + self.host_bytes


@dataclass(frozen=True)
class Peak:
    """What a request takes at most beyond what is resident, by phase in order of time."""

    request: RequestSize
    phases: tuple[Phase, ...]

    @property
    def device_bytes(self) -> int:
        """Highest phase on the device."""
        return max(phase.device_bytes for phase in self.phases)

    @property
    def unified_bytes(self) -> int:
        """Highest phase where device and host share memory."""
        return max(phase.nbytes for phase in self.phases)

    @property
    def widest(self) -> Phase:
        """The phase that sets :attr:`unified_bytes`."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def gib(self) -> float:
        """:attr:`unified_bytes` in GiB (2^30)."""
        return self.unified_bytes / GIB


def predict_peak(
    model: ModelShapes,
    request: RequestSize,
    *,
    quantized: bool = True,
    streaming_decode: bool = True,
    decode_batch: int = 1,
    vision_fp32: bool = False,
    new_table: TableSize | None = None,
    tp: int = 1,
    coefficients: Coefficients = DEFAULT,
) -> Peak:
    """Peak of one request, by phase.

    Args:
        quantized: whether linears take FP8 inputs.
        streaming_decode: whether the video VAE writes uint8 frames as it goes (0.30 with the real VAE).
        decode_batch: tiles that the video VAE decodes at once.
        vision_fp32: whether the vision tower computes in FP32.
        new_table: AdaLN table that the request's schedule needs and that is not resident yet.
        tp: tensor-parallel size; bytes are those of one rank.
    """
    phases = [_text(model.text, request, quantized, vision_fp32, tp), _denoise(model, request, quantized, tp)]
    phases.append(_decode(request, streaming_decode, decode_batch, coefficients))
    phases.append(_encode(request, coefficients))
    if request.roles:
        phases.insert(0, _references(request, coefficients))
    if new_table is not None:
        phases = [
            Phase(phase.name, {**phase.device, "AdaLN table of a new schedule": new_table.nbytes}, phase.host)
            for phase in phases
        ]
    return Peak(request, tuple(_with_slack(phase, coefficients) for phase in phases))


def tiles_at_once(
    request: RequestSize,
    room: int,
    *,
    tiles: int,
    streaming: bool = True,
    coefficients: Coefficients = DEFAULT,
) -> int:
    """The most tiles that the video VAE may decode at once.

    Args:
        room: bytes that decoding may take, on the device.
        tiles: of one temporal clip; more are never decoded at once.
        streaming: whether the VAE writes uint8 frames as it goes.

    Returns:
        At least 1: the host takes one at a time whatever there is.
    """

    def taken(batch: int) -> int:
        return _with_slack(_decode(request, streaming, batch, coefficients), coefficients).device_bytes

    return next((batch for batch in range(tiles, 1, -1) if taken(batch) <= room), 1)


def _with_slack(phase: Phase, coefficients: Coefficients) -> Phase:
    slack = round(phase.device_bytes * (coefficients.allocator_factor - 1)) + coefficients.workspace_bytes
    return Phase(phase.name, {**phase.device, "allocator and kernel workspaces": slack}, phase.host)


def _text(config: TextEncoderConfig, request: RequestSize, quantized: bool, vision_fp32: bool, tp: int) -> Phase:
    rows, hidden, ffn = request.text_rows, config.hidden_size, config.intermediate_size // tp
    query = config.num_attention_heads * config.head_dim // tp
    key_value = config.num_key_value_heads * config.head_dim // tp
    attention = 3 * hidden + 2 * query + 3 * key_value + 2 * query
    mlp = 3 * hidden + 3 * ffn
    device = {
        "decoder layer": rows * max(attention, mlp) * _BF16,
        "FP8 inputs": rows * (ffn + _FP8_SCALE) if quantized else 0,
        "vision tower": _vision_values(config, request) * (_FP32 if vision_fp32 else _BF16),
    }
    return _phase("text", device, {"token states": rows * hidden * _BF16})


def _vision_values(config: TextEncoderConfig, request: RequestSize) -> int:
    vision, tokens = config.vision, request.images * request.frame_tokens
    patches = _PATCHES_PER_TOKEN * tokens
    pixel_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    attention = 2 * vision.hidden_size + 3 * vision.hidden_size + 3 * vision.hidden_size
    mlp = 2 * vision.hidden_size + 2 * vision.intermediate_size
    features = (1 + len(vision.deepstack_visual_indexes)) * vision.out_hidden_size
    return patches * (pixel_values + max(attention, mlp)) + tokens * features


def _denoise(model: ModelShapes, request: RequestSize, quantized: bool, tp: int) -> Phase:
    dit, rows = model.dit, request.tokens
    hidden, inner, ffn = dit.hidden_size, dit.inner_size // tp, dit.ffn_hidden_size // tp
    outside = 2 * hidden * _BF16
    lse = dit.num_attention_heads // tp * _FP32
    if quantized:
        attention = hidden * _FP8 + 4 * inner * _BF16 + lse + _FP8_SCALE
        mlp = hidden * (_BF16 + _FP8) + 2 * ffn * _BF16 + ffn * _FP8 + 2 * _FP8_SCALE
        end = 3 * hidden * _BF16 + hidden * _FP8 + _FP8_SCALE
        block = max(attention, mlp, end)
    else:
        block = max((2 * hidden + 6 * inner) * _BF16 + lse, (2 * hidden + 3 * ffn) * _BF16)
    embedding = hidden * (_FP32 + _BF16 + _BF16) - outside  # nothing else is live yet
    heads = hidden * (_BF16 + _FP32) + (dit.video_row + dit.audio_latents_dim) * _FP32
    latent_row = request.video_rows * dit.video_row + request.audio_rows * dit.audio_latents_dim
    rope = 6 * dit.rope_inv_freq_len * _BF16
    device = {
        "rows held across blocks": rows * outside,
        "widest place of a block": rows * max(block, embedding, heads),
        "latent rows": 6 * latent_row * _FP32,
        "positions, indices, RoPE": rows * (3 * _FP64 + 4 * _INT64 + rope),
        "text states": request.text_rows * (model.text.hidden_size + 4 * hidden) * _BF16,
    }
    return _phase("denoise", device, {"initial noise": latent_row * _FP32})


def _decode(request: RequestSize, streaming: bool, batch: int, coefficients: Coefficients) -> Phase:
    values, picture = _RGB * request.pixels, _RGB * request.width * request.height
    clip = min(coefficients.decode_clip_frames, request.frames + 3) * picture
    device = {
        "frames": values * (2 if streaming else 2 * _FP32),
        "one temporal clip": clip * (2 * _FP16 + _FP32),
        "one tile's activations": coefficients.decode_tile_bytes,
        "further tiles of a batch": (batch - 1) * coefficients.decode_more_tile_bytes,
    }
    return _phase("decode", device, {})


def _encode(request: RequestSize, coefficients: Coefficients) -> Phase:
    values = _RGB * request.pixels
    host = {"frames as arrays": coefficients.host_frame_copies * values, "MP4": coefficients.mp4_bytes}
    return _phase("encode", {"frames": values}, host)


def _references(request: RequestSize, coefficients: Coefficients) -> Phase:
    picture = request.width * request.height if request.images else 0
    device = {
        "VAE encoder": picture * coefficients.encoder_bytes_per_pixel,
        "audio VAE encoder": round(request.audio_seconds * coefficients.audio_encoder_bytes_per_second),
    }
    return _phase("references", device, {"pictures": request.images * picture * _RGB * (1 + _FP32)})


def _phase(name: str, device: dict[str, int], host: dict[str, int]) -> Phase:
    return Phase(
        name, {term: size for term, size in device.items() if size}, {term: size for term, size in host.items() if size}
    )
