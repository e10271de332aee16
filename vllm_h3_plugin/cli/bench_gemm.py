# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 bench gemm``: every matrix multiplication of the model, by kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_h3_plugin.cli.bench_shared import (
    check_output,
    check_positive,
    host_environment,
    show,
    table_of,
    write_outcome,
)

if TYPE_CHECKING:
    from vllm_h3_plugin.host.bench.gemm import Found

# The clips whose number of tokens is measured where none is given.
_CLIPS = ((768, 448, 124), (1344, 768, 124))


def gemm(
    m: Annotated[
        list[int] | None,
        typer.Option(
            "--m",
            help="Rows: tokens of the packed sequence. May be repeated.",
            show_default="those of 768x448 and 1344x768, 124 frames",
        ),
    ] = None,
    text_tokens: Annotated[int, typer.Option(help="Rows of the refiner and of the text encoder.")] = 60,
    text_encoder: Annotated[bool, typer.Option("--text-encoder", help="Also the text encoder's layers.")] = False,
    repeat: Annotated[int, typer.Option(help="Rounds; kernels of one shape take turns in each.")] = 5,
    output: Annotated[Path | None, typer.Option(help="JSON file; written anew after every shape.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Measure every matrix multiplication of the DiT on each kernel that can compute it.

    What this device can do is measured first: the best large square product for each element type, in TFLOP/s, and a
    copy, in GB/s (10^9 bytes). Each product is then held against the larger of FLOPs over peak and bytes over the
    copy's rate. Operands are given quantized, weights come from memory and not from a cache, and the result is compared
    with plain torch on the same operands. The last column says what is wrong where less than half of that is reached:
    whether another kernel does better, the shape is too small, or nothing here is made for this device.

    A kernel that cannot run is a row with its reason. Exit code 1 if one that ran computed something wrong.

    On a GPU it runs as it is, at true width, in about a minute; on the CPU set H3_REFERENCE=1 to try the code at tiny
    width.

    \b
    Examples:
      vllm-h3 bench gemm
      vllm-h3 bench gemm --m 6016 --text-encoder --output gemm.json
      H3_REFERENCE=1 vllm-h3 bench gemm --json
    """
    check_output(output)
    check_positive(repeat=repeat, text_tokens=text_tokens, **{"m": min(m)} if m else {})
    host_environment()
    found, outcome = _measure(m, text_tokens, text_encoder, repeat, output)
    from vllm_h3_plugin.cli.console import emit_json, stdout
    from vllm_h3_plugin.host.bench.gemm_report import is_wrong, roofline_words, rows

    show(table_of(rows(found), last="What is wrong"))
    stdout().print(f"\n{roofline_words(found)}", markup=False)
    wrong = [f"{cell.shape.layer} on {cell.kernel}" for cell in found.cells if is_wrong(cell)]
    if as_json:
        emit_json(not wrong, wrong=wrong, **outcome)
    sys.exit(1 if wrong else 0)


def _measure(
    m: list[int] | None, text_tokens: int, text_encoder: bool, repeat: int, output: Path | None
) -> tuple[Found, dict[str, Any]]:
    import torch

    from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig
    from vllm_h3_plugin.checkpoint.synthetic import tiny_dit, tiny_text
    from vllm_h3_plugin.cli.console import stderr
    from vllm_h3_plugin.host.bench.gemm import measure, shapes
    from vllm_h3_plugin.host.bench.gemm_report import result
    from vllm_h3_plugin.memory.requests import RequestSize

    cuda = torch.cuda.is_available()
    dit, text = (DitConfig(), TextEncoderConfig()) if cuda else (tiny_dit(), tiny_text())
    sizes = [RequestSize(*clip, text_tokens=text_tokens).tokens for clip in _CLIPS] if cuda else [64]
    wanted = shapes(dit, m or sizes, text_tokens, text if text_encoder else None)
    command = " ".join(
        [
            *("vllm-h3 bench gemm", *(f"--m {rows}" for rows in m or ()), f"--text-tokens {text_tokens}"),
            *["--text-encoder"] * text_encoder,
            f"--repeat {repeat}",
        ]
    )
    console = stderr()
    outcome: dict[str, Any] = {}
    with console.status("starting") as status:

        def ends(found: Found) -> None:
            outcome.update(result(found, command=command))
            if found.cells:
                write_outcome(output, outcome)
                last = found.cells[-1].shape
                console.print(f"{last.layer}, {last.m} x {last.n} x {last.k}: measured", markup=False)

        found = measure(wanted, torch.device("cuda" if cuda else "cpu"), repeat, starts=status.update, ends=ends)
    return found, outcome
