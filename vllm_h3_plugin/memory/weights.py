# SPDX-License-Identifier: Apache-2.0
"""Resident bytes of each part of the model, from configs, VAE headers and a precision plan. Imports no torch.

What the allocator rounds up, the CUDA context and the processes themselves are not in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vllm_h3_plugin.checkpoint.inventory import Inventory, PartitionInventory
from vllm_h3_plugin.checkpoint.layout import DitConfig, LinearSpec, TextEncoderConfig, linear_layers
from vllm_h3_plugin.checkpoint.locate import FOLDERS
from vllm_h3_plugin.errors import CheckpointError, UsageError
from vllm_h3_plugin.memory.table import TableSize, default_table
from vllm_h3_plugin.quantization.footprint import GIB, linear_bytes, other_weights
from vllm_h3_plugin.quantization.plan import PrecisionPlan
from vllm_h3_plugin.quantization.precision import Precision

PARTS: dict[str, str] = {
    "dit": "linear layers of the DiT's blocks",
    "refiner": "the DiT's token refiner, projections and norms",
    "adaln": "AdaLN projections, or the table in their place",
    "text_encoder": "decoder layers and token embedding of the text encoder",
    "vision": "the text encoder's vision tower",
    "video_vae": "video VAE, FP32",
    "audio_vae": "audio VAE, FP32",
    "vaes": "both VAEs together, FP32",
    "transformer_ref": "the second DiT, where both partitions are served",
    "adapter": "factors of an adapter that is loaded beside the weights",
}
"""Every part that a prediction can name, and what it holds."""

TRUE_VAE_BYTES = round(10.24 * GIB)
"""Both VAEs of the real model, 2.75 B parameters, FP32: a computed total of the published files. Where the host's
optimized VAE operators resolve (CUDA), the video decoder's linears become FP16 and this is an upper bound."""

_FP32_BYTES = 4
# Split along their inputs, so that scales and bias stay whole (vLLM-Omni 0.30.0 minimax_h3_transformer.py, encoder.py).
_ROW_PARALLEL = (".attn.out_proj", ".mlp.fc2", ".self_attn.o_proj", ".mlp.down_proj", "time_embedder.proj_out")


@dataclass(frozen=True)
class ModelShapes:
    """What a prediction needs to know of a model.

    Attributes:
        vaes: part name -> bytes resident on the device.
        second_dit: whether both partitions are served, and so a DiT of the same shape lies beside the first.
        name: the checkpoint's path, or ``true size``.
        references_alone: whether it is Ref2VA by itself.
        adapter_bytes: of an adapter beside the weights; counted whole on every rank, which is an upper bound.
    """

    dit: DitConfig = field(default_factory=DitConfig)
    text: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    vaes: Mapping[str, int] = field(default_factory=lambda: {"vaes": TRUE_VAE_BYTES})
    second_dit: bool = False
    name: str = "true size"
    references_alone: bool = False
    adapter_bytes: int = 0


@dataclass(frozen=True)
class Resident:
    """Predicted bytes that stay on one device from the server's start on.

    Attributes:
        parts: part -> bytes, in the order of :data:`PARTS`; without empty ones.
        largest_layer_bytes: of the largest tensor that is read in BF16 and does not stay so: while it is quantized, or
            streamed through the device for the table, it lies beside what is resident.
        table: the AdaLN table in ``adaln``; None where the projections are resident.
        tp: tensor-parallel size; the bytes are those of one rank.
    """

    parts: Mapping[str, int]
    largest_layer_bytes: int
    table: TableSize | None
    tp: int

    @property
    def nbytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def gib(self) -> float:
        """The sum in GiB (2^30)."""
        return self.nbytes / GIB

    @property
    def load_peak_bytes(self) -> int:
        """Most that the device holds during the load, buffers apart: everything resident and one BF16 layer."""
        return self.nbytes + self.largest_layer_bytes


def shapes_of(inventory: Inventory) -> ModelShapes:
    """What the inventory of a sound checkpoint says about the model.

    Raises:
        CheckpointError: the inventory has a fault, or its two partitions hold DiTs of different shapes.
    """
    partitions = inventory.require_clean().partitions
    first = partitions[0]
    assert first.dit is not None and first.text is not None  # a clean inventory has both
    for other in partitions[1:]:
        if other.dit != first.dit:
            raise CheckpointError(
                f"{first.path} and {other.path} hold DiTs of different shapes",
                why="a server of both tasks builds two DiTs of one shape",
                fix="Give one of the two folders.",
            )
    alone = first.name == FOLDERS["ref2va"]
    return ModelShapes(first.dit, first.text, _vaes(first), len(partitions) > 1, str(inventory.path), alone)


def predict_resident(
    model: Inventory | ModelShapes, plan: PrecisionPlan, *, table: TableSize | None = None, tp: int = 1
) -> Resident:
    """Bytes that stay on one device, by part.

    Args:
        model: a checkpoint, or shapes; ``ModelShapes()`` is the real model.
        plan: precision of every linear layer of that model.
        table: AdaLN table that stands in the weights' place. None: the default schedule's if the recipe says
            ``table``, else the weights. It is whole on every rank, as the projection's gathered output is.
        tp: tensor-parallel size of DiT and text encoder. Vision tower and VAEs are whole on every rank.

    Raises:
        CheckpointError: the inventory has a fault.
        UsageError: ``tp`` does not divide heads and widths.
    """
    shapes = shapes_of(model) if isinstance(model, Inventory) else model
    _check_tp(shapes, tp)
    table = table or default_table(plan.recipe, shapes.dit, references=shapes.references_alone)
    linears = linear_layers(shapes.dit, shapes.text)
    parts = dict.fromkeys(PARTS, 0)
    streamed = 0
    for spec in linears:
        part = _part(spec)
        precision = plan[spec.path].precision
        if part == "adaln" and table is not None:
            streamed = max(streamed, linear_bytes(spec, Precision.BF16))
            continue
        parts[part] += linear_bytes(sharded(spec, tp), precision)
        if precision.quantized:
            streamed = max(streamed, linear_bytes(sharded(spec, tp), Precision.BF16))
    if table is not None:
        parts["adaln"] = table.nbytes
    for weight in other_weights(shapes.dit, shapes.text, plan.vision):
        parts["refiner" if weight.part == "transformer" else weight.part] += weight.nbytes
    embedding = shapes.text.vocab_size * shapes.text.hidden_size * 2
    parts["text_encoder"] -= embedding - -(-embedding // tp)  # vocabulary-parallel
    if shapes.second_dit:
        of_references = default_table(plan.recipe, shapes.dit, references=True)
        adaln = parts["adaln"] if of_references is None else of_references.nbytes
        parts["transformer_ref"] = parts["dit"] + parts["refiner"] + adaln
    for name, nbytes in shapes.vaes.items():
        parts[name] += nbytes
    parts["adapter"] = shapes.adapter_bytes
    return Resident({name: size for name, size in parts.items() if size}, streamed, table, tp)


def _part(spec: LinearSpec) -> str:
    if spec.part != "transformer":
        return spec.part
    if spec.path.endswith(".adaln_proj.linear"):
        return "adaln"
    return "dit" if spec.path.startswith("transformer.blocks.") else "refiner"


def sharded(spec: LinearSpec, tp: int) -> LinearSpec:
    """The layer as one rank holds it."""
    if spec.part == "vision":
        return spec
    if spec.path.endswith(_ROW_PARALLEL):
        return replace(spec, in_features=spec.in_features // tp)
    return replace(spec, out_features=spec.out_features // tp)


def _check_tp(shapes: ModelShapes, tp: int) -> None:
    dit, text = shapes.dit, shapes.text
    divided = {
        "attention heads of the DiT": dit.num_attention_heads,
        "FFN width of the DiT": dit.ffn_hidden_size,
        "key/value heads of the text encoder": text.num_key_value_heads,
        "FFN width of the text encoder": text.intermediate_size,
    }
    for name, count in divided.items():
        if tp < 1 or count % tp:
            raise UsageError(
                f"tensor-parallel size {tp}", why=f"it does not divide the {name}, {count}", fix="Use 1, 2, 4 or 8."
            )


def _vaes(partition: PartitionInventory) -> dict[str, int]:
    # FP32 whatever the files hold (vLLM-Omni 0.30.0 vae.py:358 and :1078).
    return {name: _FP32_BYTES * partition.part(name).parameters for name in ("video_vae", "audio_vae")}
