# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 synth-lora CKPT DIR``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_h3_plugin.errors import CheckpointError, UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class KindChoice(StrEnum):
    """What to write."""

    TURBO = "turbo"
    FASTH3 = "fasth3"
    FLASHGEN = "flashgen"
    PEFT = "peft"


class BreakChoice(StrEnum):
    """What is to be wrong with it."""

    OTHER_WIDTH = "other-width"
    OTHER_MODEL = "other-model"
    MISSING_PAIR = "missing-pair"
    MISSING_LAYER = "missing-layer"
    WRONG_DTYPE = "wrong-dtype"
    TRUNCATED = "truncated"
    NAN = "nan"
    INF = "inf"
    WRONG_RANK = "wrong-rank"


@app.command(name="synth-lora")
def synth_lora(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="Checkpoint that it is for: its FL2VA or Ref2VA folder.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into.")],
    kind: Annotated[KindChoice, typer.Option(help="Which published kind to write.")] = KindChoice.TURBO,
    steps: Annotated[int, typer.Option(help="Denoise steps in a Turbo file's name.")] = 8,
    strength: Annotated[
        float, typer.Option(help="Length of what it adds to a layer's output, over its input's.")
    ] = 0.5,
    broken: Annotated[
        BreakChoice | None, typer.Option(help="Make it one that must be refused.", show_default="none")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed and options, same bytes.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Write a random adapter for a checkpoint, of any kind that people use with H3.

    turbo: LightX2V's Turbo LoRA, named as published. fasth3: a FastH3 v1 adapter, which is fused while the weights
    load. flashgen: a FlashGen LoRA, which changes AdaLN. peft: a small PEFT folder. Names and shapes are those of the
    checkpoint; the numbers are random, so its clips show nothing.

    \b
    Examples:
      vllm-h3 synth-lora /tmp/h3/FL2VA /tmp/lora                 an 8-step Turbo file
      vllm-h3 synth-lora /tmp/h3/FL2VA /tmp/lora --kind fasth3   adapter_model.safetensors
      vllm-h3 synth-lora /tmp/h3/FL2VA /tmp/bad --broken nan     a file that a server must refuse
    """
    from vllm_h3_plugin.checkpoint.inventory import ANY_TASK, take_inventory
    from vllm_h3_plugin.checkpoint.synthetic.adapters import AdapterSpec, write_adapter
    from vllm_h3_plugin.cli.console import emit_json, stdout

    if steps < 1 or not 0 < strength < 100:
        raise UsageError(
            f"--steps {steps} --strength {strength}",
            why="too small or too large",
            fix="Use at least one step, and a strength above 0 and below 100.",
        )
    inventory = take_inventory(checkpoint, ANY_TASK)
    shapes = [partition for partition in inventory.partitions if partition.dit is not None]
    if not shapes:
        inventory.require_clean()
        raise CheckpointError(f"{checkpoint} has no DiT", why="its config could not be read", fix="Name another.")
    dit, name = shapes[0].dit, shapes[0].name
    assert dit is not None
    spec = AdapterSpec(
        kind=kind.value,
        dit=dit,
        steps=steps,
        task="ref2v" if name == "Ref2VA" else "fl2v",
        strength=strength,
        broken=None if broken is None else broken.value,
        seed=seed,
    )
    path = write_adapter(directory.absolute(), spec)
    size = path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())
    stdout().print(str(path), markup=False)
    if as_json:
        emit_json(True, path=str(path), kind=kind.value, bytes=size, broken=broken and broken.value, seed=seed)
