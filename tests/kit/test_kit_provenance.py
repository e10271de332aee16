# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 provenance`` and the bill of materials."""

from __future__ import annotations

import json
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.errors import RecipeError, UsageError
from vllm_h3_plugin.pins import load_pins
from vllm_h3_plugin.serving import provenance
from vllm_h3_plugin.serving.sbom import purl, sbom


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["provenance", *words])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_everything_is_told_or_said_to_be_unknown(tmp_path: Path) -> None:
    found = provenance.collect("fp8", build_record=tmp_path / "none")
    assert found["image"] is None and str(tmp_path / "none") in found["unknown"]["image"]
    assert found["recipe"]["name"] == "fp8" and len(found["recipe"]["sha256"]) == 64
    for name in ("image", "git", "host", "driver", "recipe"):
        assert (found[name] is None) == (name in found["unknown"]), name
    assert provenance.collect(None)["unknown"]["recipe"]


@pytest.mark.host
def test_the_hosts_wheels_and_files_are_named_by_hash() -> None:
    host = provenance.collect("fp8")["host"]
    pin = load_pins().host(host["name"])
    assert host["wheels"] == {wheel.file: wheel.sha256 for wheel in pin.wheels}
    assert all(len(digest) == 64 for digest in host["installed_record_sha256"].values())


@pytest.mark.parametrize("locked", [True, False])
def test_in_an_image_it_tells_the_images_base_and_commit(tmp_path: Path, locked: bool) -> None:
    base = load_pins().hosts[0].image.pinned if locked else "local/base@sha256:" + "0" * 64
    record = tmp_path / "build.json"
    record.write_text(json.dumps({"version": "1", "revision": "0123abc-dirty", "base": base}))
    found = provenance.collect("fp8", build_record=record)
    assert found["image"]["base"] == base and found["image"]["base_is_locked"] is locked
    assert found["git"] == {"commit": "0123abc", "dirty": True}


def test_a_changed_file_changes_the_content_digest_and_a_compiled_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = provenance.content_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_text("x")
    assert provenance.content_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("2")
    assert provenance.content_digest(tmp_path) != before


def test_json_is_one_line_and_an_unknown_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--json")
    assert code == 0 and out.count("\n") == 1 and json.loads(out)["ok"] is True
    code, _, err = run(capsys, "--recipe", "fp9")
    assert code == RecipeError.exit_code and "fp9" in err and "Did you mean fp8?" in err


def package(folder: Path, name: str, version: str, *lines: str) -> Distribution:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("\n".join([f"Name: {name}", f"Version: {version}", *lines, ""]))
    (info / "RECORD").write_text(f"{name}.py,sha256=x,1\n")
    return Distribution.at(info)


def test_the_bill_names_each_package_once_with_what_it_needs(tmp_path: Path) -> None:
    found = [
        package(tmp_path, "Some_Torch", "2.13.0+cu130", "License-Expression: BSD-3-Clause"),
        package(tmp_path, "user", "1.0", "Requires-Dist: some-torch>=2", 'Requires-Dist: absent; extra == "dev"'),
        package(tmp_path / "later", "some-torch", "1.0"),
    ]
    bill = sbom(1_700_000_000, found)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    torch, user = bill["components"]
    assert torch["purl"] == "pkg:pypi/some-torch@2.13.0%2Bcu130"
    assert torch["licenses"] == [{"expression": "BSD-3-Clause"}]
    needs = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert needs[user["bom-ref"]] == [torch["bom-ref"]]


def test_the_bill_of_this_environment_is_the_same_each_time_and_names_nothing_twice() -> None:
    bill = sbom(None)
    assert bill == sbom(None)
    names = [component["purl"].partition("@")[0] for component in bill["components"]]
    assert len(names) == len(set(names))
    assert purl("pydantic", "2").partition("@")[0] in names


def test_the_bill_is_written_and_a_bad_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert run(capsys, "--sbom", str(tmp_path / "sbom.json"))[0] == 0
    assert json.loads((tmp_path / "sbom.json").read_text())["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    code, _, err = run(capsys, "--sbom", str(tmp_path / "other.json"))
    assert code == UsageError.exit_code and "SOURCE_DATE_EPOCH='yesterday'" in err and "git log" in err
