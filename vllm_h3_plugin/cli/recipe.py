# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 recipe``: what a precision recipe does to every linear layer, and what the model then weighs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_h3_plugin.cli.console import emit_json, stdout
from vllm_h3_plugin.errors import CheckpointError

if TYPE_CHECKING:
    from vllm_h3_plugin.checkpoint.inventory import PartitionInventory
    from vllm_h3_plugin.quantization.footprint import Weight
    from vllm_h3_plugin.quantization.recipe import Recipe

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

_VAES = ("video_vae", "audio_vae")
# Both VAEs of the real model, FP32, which the host keeps resident (a computed total; 2.75 B parameters).
_REAL_VAE_GIB = 10.24


@app.callback()
def _group() -> None:
    """Show what a precision recipe does to every linear layer."""


@app.command("list")
def list_recipes(
    as_json: bool = typer.Option(False, "--json", help="End with one JSON line on stdout instead of the list."),
) -> None:
    """List the packaged recipes.

    A recipe of your own is a JSON file of the same form; give its path where a name is asked.
    """
    from vllm_h3_plugin.quantization.recipe import load_recipe, recipe_names

    recipes = [load_recipe(name) for name in recipe_names()]
    if as_json:
        emit_json(True, recipes=[_recipe_fields(recipe) for recipe in recipes])
        return
    rows = [(recipe.name, _flag(recipe), recipe.description) for recipe in recipes]
    _print_table(("recipe", "goes with", "what it does"), rows, numeric=())


@app.command("show")
def show(
    checkpoint: Path | None = typer.Argument(
        None,
        metavar="CKPT",
        help="Checkpoint folder (the one that holds transformer/ and text_encoder/); only its configs and the "
        "VAEs' headers are read. Left out: the real model's sizes.",
        show_default=False,
    ),
    recipe: str = typer.Option("fp8", "--recipe", metavar="NAME|PATH", help="A packaged recipe or a JSON file."),
    every: bool = typer.Option(False, "--all", help="One line per layer instead of one per group of alike layers."),
    as_json: bool = typer.Option(False, "--json", help="End with one JSON line on stdout instead of tables."),
) -> None:
    """Show every layer's precision and size, and totals by part and by precision.

    Sizes are what one card keeps without tensor parallelism: weights, scales and biases, not activations. GiB are
    2^30 bytes. Exit code 4 means that the recipe does not fit the model; the message names rule and layer.

    \b
    Examples:
      vllm-h3 recipe show                            the real model with the default FP8 recipe
      vllm-h3 recipe show --recipe bf16
      vllm-h3 recipe show /models/H3/FL2VA --recipe ./mine.json --all
      vllm-h3 recipe show /models/H3/FL2VA --json | jq .total.gib
    """
    from vllm_h3_plugin.checkpoint.layout import DitConfig, TextEncoderConfig, linear_layers
    from vllm_h3_plugin.memory.table import DEFAULT_STEPS, default_table
    from vllm_h3_plugin.quantization.footprint import GIB, Weight, grouped, linear_weights, other_weights, total_of
    from vllm_h3_plugin.quantization.plan import plan
    from vllm_h3_plugin.quantization.precision import Precision
    from vllm_h3_plugin.quantization.recipe import load_recipe

    chosen = load_recipe(recipe)
    notes = []
    if checkpoint is None:
        dit, text = DitConfig(), TextEncoderConfig()
        nbytes = round(_REAL_VAE_GIB * GIB)
        vaes = [Weight("video_vae and audio_vae", "vae", Precision.FP32, None, 2, nbytes // 4, nbytes)]
        notes.append(f"No checkpoint given: the real model's sizes, its VAEs taken as {_REAL_VAE_GIB} GiB.")
    else:
        partition = _partition(checkpoint)
        assert partition.dit is not None and partition.text is not None
        dit, text = partition.dit, partition.text
        vaes = _vae_weights(partition)
        absent = sorted(set(_VAES) - {vae.label for vae in vaes})
        notes += [f"{name} has no readable weights (see `vllm-h3 inspect`) and is not counted." for name in absent]
    linears = linear_layers(dit, text)
    given = plan(chosen, linears)
    layers = linear_weights(given, linears)
    weights = [*layers, *other_weights(dit, text, given.vision), *vaes]
    unit, size = ("GiB", GIB) if total_of(weights).nbytes >= GIB else ("MiB", 2**20)
    table = default_table(chosen, dit)
    if table is not None:
        notes.append(
            f"AdaLN's weights stay on disk. In their place {table.nbytes / size:.2f} {unit} of table for a prompt of "
            f"{DEFAULT_STEPS} steps come on top: `vllm-h3 memory` adds it all up."
        )
    parts = {name: [w for w in weights if w.part == name] for name in dict.fromkeys(w.part for w in weights)}
    precisions = {p.value: [w for w in weights if w.precision is p] for p in Precision}
    shown = layers if every else grouped(layers)
    if as_json:
        emit_json(
            True,
            recipe=_recipe_fields(chosen),
            checkpoint=None if checkpoint is None else str(checkpoint),
            layers=[_weight_fields(weight) for weight in shown],
            parts={name: _total_fields(group) for name, group in parts.items()},
            precisions={name: _total_fields(group) for name, group in precisions.items() if group},
            total=_total_fields(weights),
            adaln_table=table and {"rows": table.rows, "bytes": table.nbytes, "gib": round(table.nbytes / GIB, 3)},
            notes=notes,
        )
        return
    console = stdout()
    console.print(f"{chosen.name}: {chosen.description}", markup=False)
    console.print(
        f"{chosen.source}; goes with {_flag(chosen)}; AdaLN {chosen.adaln.value}; attention {chosen.attention.value}\n",
        markup=False,
    )

    def line(group: Iterable[Weight]) -> tuple[str, str]:
        total = total_of(group)
        return _parameters(total.parameters), f"{total.nbytes / size:.2f}"

    _print_table(
        ("linear layers", "count", "precision", "rule", "parameters", unit),
        [(w.label, str(w.count), w.precision.value, str(w.rule), *line([w])) for w in shown],
        numeric=(1, 3, 4, 5),
    )
    console.print()
    for number, rule in enumerate(chosen.rules, 1):
        console.print(f"rule {number}: {rule.match} -> {rule.precision.value}. {rule.why}", markup=False)
    console.print()
    rows = [(name, *line(group)) for name, group in parts.items()]
    _print_table(("part, all tensors", "parameters", unit), [*rows, ("total", *line(weights))], numeric=(1, 2))
    console.print()
    rows = [(name, *line(group)) for name, group in precisions.items() if group]
    _print_table(("precision, all tensors", "parameters", unit), rows, numeric=(1, 2))
    for note in notes:
        console.print(f"\n{note}", markup=False)


def _partition(folder: Path) -> PartitionInventory:
    """The one partition in a checkpoint folder. Its weights may be missing: configs are enough."""
    from vllm_h3_plugin.checkpoint.inventory import take_inventory

    inventory = take_inventory(folder, "any")
    if not inventory.partitions:
        inventory.require_clean()
    if len(inventory.partitions) > 1:
        paths = " or ".join(str(partition.path) for partition in inventory.partitions)
        raise CheckpointError(f"{folder} holds more than one checkpoint", fix=f"Use {paths}.", path=str(folder))
    partition = inventory.partitions[0]
    if partition.dit is None or partition.text is None:
        part = partition.path / ("transformer" if partition.dit is None else "text_encoder")
        places = (part / "config.json", part)  # the file at fault, or the folder that is not there
        fault = min((f for f in inventory.faults if f.path in places), key=lambda f: places.index(f.path))
        raise CheckpointError(fault.what, why=fault.why, fix=fault.fix, code=fault.code, path=str(fault.path))
    return partition


def _vae_weights(partition: PartitionInventory) -> list[Weight]:
    """Sizes of the VAEs from their files' headers. The host keeps them in FP32, whatever the files hold."""
    from vllm_h3_plugin.quantization.footprint import Weight
    from vllm_h3_plugin.quantization.precision import Precision

    vaes = [part for part in partition.parts if part.name in _VAES and part.tensors]
    return [
        Weight(vae.name, "vae", Precision.FP32, None, len(vae.tensors), vae.parameters, 4 * vae.parameters)
        for vae in vaes
    ]


def _recipe_fields(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "description": recipe.description,
        "method": recipe.method,
        "adaln": recipe.adaln.value,
        "attention": recipe.attention.value,
        "source": recipe.source,
        "rules": [{"match": rule.match, "precision": rule.precision.value, "why": rule.why} for rule in recipe.rules],
    }


def _weight_fields(weight: Weight) -> dict[str, Any]:
    return {
        "path": weight.label,
        "part": weight.part,
        "precision": weight.precision.value,
        "rule": weight.rule,
        "count": weight.count,
        "parameters": weight.parameters,
        "bytes": weight.nbytes,
    }


def _total_fields(weights: Iterable[Weight]) -> dict[str, Any]:
    from vllm_h3_plugin.quantization.footprint import total_of

    total = total_of(weights)
    return {"parameters": total.parameters, "bytes": total.nbytes, "gib": round(total.gib, 3)}


def _flag(recipe: Recipe) -> str:
    return f"--quantization {recipe.method}" if recipe.method else "no --quantization"


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3f} B" if count >= 10**9 else f"{count / 1e6:.3f} M"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[int]) -> None:
    """Aligned columns, never wrapped: the lines are for pipes as much as for eyes."""
    console = stdout()
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [
            f"{cell:>{w}}" if i in numeric else f"{cell:<{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        console.print("  ".join(cells).rstrip(), markup=False, style="bold" if row is header else None)
