# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 bench step``: one denoise step on the stock host, on the plugin, and its floor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_h3_plugin.cli.bench_shared import (
    check_output,
    check_positive,
    figures_table,
    host_environment,
    show,
    table_of,
    write_outcome,
)
from vllm_h3_plugin.cli.console import stdout
from vllm_h3_plugin.errors import UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.host.bench.step_cells import Found, Options
    from vllm_h3_plugin.memory.requests import RequestSize

SIZES = tuple(f"{size}x{frames}" for size in ("768x448", "1344x768") for frames in (56, 124, 362))
_TINY = ("64x64x22",)
_COLUMNS = ("stock-bf16", "stock-fp8", "stock-sdpa", "plugin", "floor", "lowbit")


def step(
    sizes: Annotated[
        str | None,
        typer.Option(help="WIDTHxHEIGHTxFRAMES, comma-separated.", show_default="768x448 and 1344x768, 56, 124, 362"),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help=f"Columns, comma-separated: {', '.join(_COLUMNS)}.", show_default="all")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="DiT blocks that are built and timed, of 50.",
            show_default="8 below 10 000 tokens, 4 up to 40 000, then 2",
        ),
    ] = None,
    text_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 60,
    repeat: Annotated[int, typer.Option(help="Rounds in which all columns take turns, every other one backwards.")] = 2,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile the stock host's blocks.")] = False,
    attention: Annotated[str, typer.Option(help="Of the column lowbit: fp8 or int8.")] = "fp8",
    dram: Annotated[
        bool, typer.Option("--dram", help="Also count bytes of device memory, through NVIDIA's ncu. Minutes.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG of milliseconds a step against frames.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; written anew after every size.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Measure one denoise step: the stock host, the plugin, and the floor of the kernels that neither can do without.

    Models of the real width with random weights are made on the device; no file is read. Columns take turns, and
    figures are medians. stock-bf16 and stock-fp8 are the host's own DiT, compiled as its server does it; stock-sdpa is
    stock-fp8 on the attention that the host falls back to; plugin is what this plugin serves; floor is the matrix
    multiplications and the attention alone, replayed as one CUDA graph; lowbit compares attention in FP8 or INT8 with
    cuDNN's in BF16. Times are milliseconds: of the blocks alone, of a whole step, of a step without blocks, and of
    kernels by group (one profiled step).

    On a GPU it takes minutes and up to 60 GiB for all sizes; on the CPU set H3_REFERENCE=1 to try the code at tiny
    width. A column that fails is a row that says so. Exit code 1 if the plugin's or the floor's did.

    \b
    Examples:
      vllm-h3 bench step --output step.json --plot step.png
      vllm-h3 bench step --sizes 768x448x56 --only plugin,floor
      H3_REFERENCE=1 vllm-h3 bench step --json
    """
    check_output(output)
    check_positive(layers=layers, repeat=repeat, text_tokens=text_tokens)
    columns = _chosen(only)
    clips = None if sizes is None else [_clip(text, text_tokens) for text in sizes.split(",")]
    if attention not in ("fp8", "int8"):
        raise UsageError(f"--attention {attention}", why="there are two that are not exact", fix="Use fp8 or int8.")
    if plot is not None:
        from vllm_h3_plugin.cli.line_chart import check_target

        check_target(plot)
    host_environment()
    given = {"sizes": sizes, "only": only, "layers": layers, "text-tokens": text_tokens, "repeat": repeat}
    words = [f"--{name} {value}" for name, value in given.items() if value is not None]
    words += ["--eager"] * eager + [f"--attention {attention}"] * (attention != "fp8") + ["--dram"] * dram
    options = _options(clips, columns, layers, text_tokens, repeat, eager, attention)
    found, outcome = _measure(options, dram, output, " ".join(["vllm-h3 bench step", *words]))
    from vllm_h3_plugin.cli.console import emit_json
    from vllm_h3_plugin.host.bench.step_report import failures, figures

    show(figures_table(figures(found)))
    if plot is not None:
        from vllm_h3_plugin.cli.bench_step_chart import draw

        draw(found, plot)
    failed = failures(found)
    if as_json:
        emit_json(not failed, errors=failed, **outcome)
    sys.exit(1 if failed else 0)


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows of one size: what they share as a title, notes as lines below."""
    if not rows:
        return
    apart = {"Clip", "Tokens", "Blocks", "Note"}
    first = rows[0]
    title = f"{first['Clip']}: {first['Tokens']} tokens, {first['Blocks']} blocks"
    columns = [{name: value for name, value in row.items() if name not in apart} for row in rows]
    show(table_of(columns, title=title))
    for row in rows:
        if row.get("Note"):
            stdout().print(f"  {row['Column']}: {row['Note']}", markup=False)
    stdout().print()


def _chosen(only: str | None) -> tuple[str, ...]:
    if only is None:
        return _COLUMNS
    asked = [name.strip() for name in only.split(",")]
    for name in asked:
        if name not in _COLUMNS:
            raise UsageError(f"--only {name}", why="there is no such column", fix=f"Known: {', '.join(_COLUMNS)}.")
    return tuple(name for name in _COLUMNS if name in asked)


def _clip(text: str, text_tokens: int) -> RequestSize:
    from vllm_h3_plugin.memory.requests import RequestSize

    try:
        width, height, frames = map(int, text.strip().lower().split("x"))
    except ValueError:
        raise UsageError(
            f"--sizes {text}", why="a size is three numbers", fix="Write WIDTHxHEIGHTxFRAMES, such as 768x448x56."
        ) from None
    return RequestSize(width, height, frames, text_tokens=text_tokens)


def _options(
    clips: list[RequestSize] | None,
    columns: tuple[str, ...],
    layers: int | None,
    text_tokens: int,
    repeat: int,
    eager: bool,
    attention: str,
) -> Options:
    import torch

    from vllm_h3_plugin.checkpoint.configs import DitConfig
    from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
    from vllm_h3_plugin.host.bench.step_cells import Options
    from vllm_h3_plugin.quantization.recipe import AttentionPrecision

    cuda = torch.cuda.is_available()
    return Options(
        config=DitConfig() if cuda else tiny_dit(),
        sizes=clips or [_clip(text, text_tokens) for text in (SIZES if cuda else _TINY)],
        layers=layers or (None if cuda else 2),
        columns=columns,
        rounds=repeat,
        eager=eager,
        low_bit=AttentionPrecision(attention),
    )


def _measure(options: Options, dram: bool, output: Path | None, command: str) -> tuple[Found, dict[str, Any]]:
    from vllm_h3_plugin.cli.console import stderr
    from vllm_h3_plugin.host.bench.step import Bench
    from vllm_h3_plugin.host.bench.step_dram import measure_dram
    from vllm_h3_plugin.host.bench.step_report import result, rows
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    console = stderr()
    outcome: dict[str, Any] = {}
    shown = 0
    with console.status("starting") as status:

        def ends(found: Found) -> None:
            nonlocal shown
            outcome.update(result(found, command=command))
            write_outcome(output, outcome)
            new = rows(found)[shown:]
            shown += len(new)
            _show(new)

        register()
        bench = None
        try:
            with single_rank() as device:
                bench = Bench(options, device, starts=status.update, ends=ends)
                bench.run()
        except RuntimeError:
            # Taking the rank down fails with the device; what was measured before stands.
            if bench is None or not bench.found.lost:
                raise
        found = bench.found
        if dram:
            measure_dram(found, options.sizes[0], starts=status.update)
            outcome.update(result(found, command=command))
            write_outcome(output, outcome)
    return found, outcome
