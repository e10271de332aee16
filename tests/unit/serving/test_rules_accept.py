# SPDX-License-Identifier: Apache-2.0
"""A whole request: fields, references and rules together, with nothing left behind where it is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tests.unit.serving.reference_kit import encoded, picture, sound
from vllm_h3_plugin.serving.accept import Admitted, accept
from vllm_h3_plugin.serving.references.load import ReferencePolicy
from vllm_h3_plugin.serving.rules.fingerprint import fingerprint
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.read import Upload

LIMITS = Limits(tasks=("t2va", "fl2va", "ref2va"))


def test_a_picture_makes_a_clip_of_its_shape(tmp_path: Path) -> None:
    file = Upload(io.BytesIO(encoded(picture(300, 600))), "first.png")
    made = accept([("prompt", "a kite"), ("input_reference", file)], LIMITS, ReferencePolicy(folder=tmp_path))
    assert isinstance(made, Admitted)
    assert (made.accepted.task, made.accepted.size, made.accepted.frame_indices) == ("fl2va", "704x1440", (0,))
    assert [image.size for image in made.media.images] == [(300, 600)]
    assert made.accepted.references == made.media.facts


def test_bad_fields_and_bad_references_are_told_in_one_answer_and_no_file_stays(tmp_path: Path) -> None:
    good = Upload(io.BytesIO(sound(tmp_path / "made.wav")), "good.wav")
    (tmp_path / "made.wav").unlink()
    bad = Upload(io.BytesIO(b"<html>"), "bad.png")
    fields = [("fps", "25"), ("input_references", good), ("input_references", bad), ("seeds", "1")]
    faults = accept(fields, LIMITS, ReferencePolicy(folder=tmp_path))
    assert isinstance(faults, list)
    assert {fault.field for fault in faults} == {"seeds", "input_references[1]", "prompt", "fps"}
    assert not list(tmp_path.iterdir())


def test_thirteen_references_are_refused_before_one_is_looked_at(tmp_path: Path) -> None:
    fields = [("prompt", "a kite"), *(("input_references", Upload(io.BytesIO(b""))) for _ in range(13))]
    faults = accept(fields, LIMITS, ReferencePolicy(folder=tmp_path))
    assert isinstance(faults, list) and [fault.allowed for fault in faults] == ["up to 12"]


def test_without_a_policy_no_url_is_fetched() -> None:
    faults = accept([("prompt", "a kite"), ("image_reference", {"image_url": "https://example.com/a.png"})], LIMITS)
    assert isinstance(faults, list)
    assert faults[0].field == "image_reference.image_url" and faults[0].why == "this server fetches no URLs"


def test_equal_requests_have_equal_fingerprints_and_others_have_not() -> None:
    def of(*fields: tuple[str, Any]) -> str:
        return fingerprint(fields)

    def file(data: bytes, name: str = "a.png") -> Upload:
        return Upload(io.BytesIO(data), name)

    one = of(("prompt", "a kite"), ("seed", "1"), ("input_reference", file(b"x")))
    assert one == of(("input_reference", file(b"x", "b.png")), ("seed", "1"), ("prompt", "a kite"))
    others = [
        of(("prompt", "a kite"), ("seed", "2"), ("input_reference", file(b"x"))),
        of(("prompt", "a kite"), ("seed", "1"), ("input_reference", file(b"y"))),
        of(("prompt", "a kite"), ("seed", "1"), ("input_reference", "x")),
        of(("prompt", "a kite"), ("seed", "1")),
        of(("prompt", "a kitese"), ("ed", "1")),
        of(("input_references", file(b"x")), ("input_references", file(b"y"))),
        of(("input_references", file(b"y")), ("input_references", file(b"x"))),
    ]
    assert len({one, *others}) == 8
    kept = file(b"x" * 5)
    of(("input_reference", kept))
    assert kept.file.read() == b"x" * 5
    assert of(("user", "\ud800"))
