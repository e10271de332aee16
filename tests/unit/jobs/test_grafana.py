# SPDX-License-Identifier: Apache-2.0
"""The dashboard asks for metrics that the server has."""

from __future__ import annotations

import json
import re

from vllm_h3_plugin.data import data_path

_NAMED = re.compile(r"\bh3_[a-z_]+")
_SUFFIX = re.compile(r"_(bucket|sum|count|total)$")


def test_every_panel_asks_for_metrics_that_the_server_has() -> None:
    dashboard = json.loads((data_path("launch") / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {_SUFFIX.sub("", name) for expression in expressions for name in _NAMED.findall(expression)}
    source = (data_path("launch").resolve().parent / "vllm_h3_plugin" / "host" / "job_metrics.py").read_text()
    assert asked == set(re.findall(r'"(h3_[a-z_]+)"', source))
