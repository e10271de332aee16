# SPDX-License-Identifier: Apache-2.0
"""Whatever the OpenAPI description allows, and whatever it forbids, is answered; nothing is an error of the server."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import content_type_conformance, not_a_server_error, response_schema_conformance

from tests.server.conftest import Running, request

OURS = ("/v1/videos", "/v1/h3", "/health", "/ready")
TINY = {"size": "64x64", "num_frames": 96, "num_inference_steps": 2}
"""What a made-up request leaves out, so that none keeps the machine busy for minutes."""
EXAMPLES = {GenerationMode.POSITIVE: 15, GenerationMode.NEGATIVE: 6}
"""For each POST: to think of what is forbidden takes half a second each."""


@pytest.fixture(scope="module")
def description(fp8: Running, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The running server's, with sizes and steps cut to small ones, and a job that there is."""
    made = fp8.client.make(request(steps=2), tmp_path_factory.mktemp("made") / "one.mp4")
    raw = httpx.get(f"{fp8.url}/openapi.json", timeout=60).json()
    raw["paths"] = {path: entry for path, entry in raw["paths"].items() if path.startswith(OURS)}
    return raw, str(made["id"])


def cut(raw: dict[str, Any], job_id: str, mode: GenerationMode) -> dict[str, Any]:
    """The description for one mode. Half of the jobs asked after are the one that there is."""
    cut = deepcopy(raw)
    for path, entry in cut["paths"].items():
        for method, operation in entry.items():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                fields = content["schema"]["properties"]
                if mode is GenerationMode.POSITIVE:
                    fields["size"] = {"enum": ["64x64", "96x64"]}
                    fields["num_inference_steps"] = {"type": "integer", "minimum": 2, "maximum": 3}
                    fields.pop("steps", None)
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path" and method != "delete" and mode is GenerationMode.POSITIVE:
                    known = {"enum": [job_id]}
                    parameter["schema"] = known if path.endswith(("events", "content")) else {
                        "anyOf": [known, {"type": "string", "minLength": 1}]
                    }  # fmt: skip
    return cut


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
def test_every_answer_is_one_that_is_described(
    fp8: Running, description: tuple[dict[str, Any], str], mode: GenerationMode
) -> None:
    raw, job_id = description
    schema = schemathesis.openapi.from_dict(cut(raw, job_id, mode))
    statuses: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # type: ignore[union-attr]
        label = f"{operation.method.upper()} {operation.path}"
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.headers):
            continue
        statuses[label] = set()
        examples(operation, mode, lambda case, seen=statuses[label]: seen.add(_ask(fp8, case)))
    assert any(path.startswith("/v1/videos") for path in raw["paths"])
    created = statuses["POST /v1/videos"]
    assert (200 if mode is GenerationMode.POSITIVE else 400) in created, statuses
    assert all(status < 500 for seen in statuses.values() for status in seen), statuses


def examples(operation: Any, mode: GenerationMode, check: Callable[[Any], object]) -> None:
    """The same examples of an operation in each run."""

    @settings(
        max_examples=EXAMPLES[mode] if operation.method == "post" else 4,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        check(case)

    one()


def _ask(fp8: Running, case: Any) -> int:
    if isinstance(case.body, dict):
        case.body = {**TINY, **case.body}
    answer = case.call(base_url=fp8.url, timeout=60)
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    if case.operation.path == "/health":  # the host's, which answers with nothing and is described as JSON
        checks = checks[:1]
    case.validate_response(answer, checks=checks)
    if case.operation.path == "/v1/videos" and case.method == "POST" and answer.status_code == 200:
        assert httpx.delete(f"{fp8.url}/v1/videos/{answer.json()['id']}", timeout=60).status_code == 200
    return int(answer.status_code)
