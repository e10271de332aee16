# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 provenance``: what this installation is made of, and its bill of materials."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer

from vllm_h3_plugin.errors import UsageError


def provenance(
    recipe: str | None = typer.Option(None, help="Recipe to describe. [default: H3_RECIPE, else fp8]"),
    sbom: Path | None = typer.Option(
        None, metavar="FILE", help="Also write the environment's bill of materials: CycloneDX 1.6 JSON."
    ),
    as_json: bool = typer.Option(False, "--json", help="One line instead of indented JSON."),
) -> None:
    """Print what this installation is made of, as one JSON object.

    Image and its base digest, commit, wheels and their SHA-256, precision recipe, patches, host packages, driver. In a
    container it tells the image's, in a checkout the checkout's. What cannot be known is null, and `unknown` says why.
    `/v1/h3/info` of a server shows the same.

    \b
    vllm-h3 provenance
    vllm-h3 provenance --sbom sbom.cdx.json --json
    """
    from vllm_h3_plugin import settings
    from vllm_h3_plugin.cli.console import emit_json
    from vllm_h3_plugin.serving.provenance import collect

    found = collect(recipe or settings.load().recipe or "fp8")
    if sbom is not None:
        from vllm_h3_plugin.serving.sbom import sbom as bill

        sbom.write_text(json.dumps(bill(_epoch()), indent=1) + "\n", encoding="utf-8")
    if as_json:
        emit_json(True, **found)
    else:
        print(json.dumps(found, indent=2, ensure_ascii=False))


def _epoch() -> int | None:
    raw = os.environ.get("SOURCE_DATE_EPOCH", "")
    if raw and not raw.isdigit():
        raise UsageError(
            f"SOURCE_DATE_EPOCH={raw!r}", why="it is seconds since 1970", fix="Use `git log -1 --format=%ct`."
        )
    return int(raw) if raw else None
