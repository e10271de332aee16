# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 bench``: measurements of this machine."""

from __future__ import annotations

import typer

from vllm_h3_plugin.cli.bench_clip import clip
from vllm_h3_plugin.cli.bench_decode import decode
from vllm_h3_plugin.cli.bench_gemm import gemm
from vllm_h3_plugin.cli.bench_load import load
from vllm_h3_plugin.cli.bench_step import step

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine: in this process, through the code that a server runs, or through a server (clip).

    \b
    Examples:
      vllm-h3 bench step                       a denoise step beside its floor: minutes, on a GPU
      vllm-h3 bench decode                     the video VAE, tiles in batches: minutes, on a GPU
      vllm-h3 bench gemm                       is every matrix multiplication served well?  a minute
      H3_REFERENCE=1 vllm-h3 bench load        a minute, without a GPU
      vllm-h3 bench load --true-width          real widths, 20 layers: 34 GB, and 16 GB beside it
      vllm-h3 bench load /models/H3/FL2VA      a checkpoint of your own
      vllm-h3 bench clip --steps 8,50          whole clips through the running server
    """


for verb in (load, gemm, step, decode, clip):
    app.command()(verb)
