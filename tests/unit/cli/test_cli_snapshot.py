# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 snapshot``: what is there, whether it is right, and how it goes away."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.snapshot_kit import ENTRIES, KEY, flip, folder_of, kill_self, killed, left, pieces, write
from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint.snapshot import open_snapshot
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter
from vllm_h3_plugin.cli.main import main

OLD = replace(KEY, plugin="0.0.1")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path: Path):
    """Run ``vllm-h3 snapshot …`` with tmp_path as the cache folder: (exit code, stdout, stderr)."""
    monkeypatch.setenv("H3_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["snapshot", *args])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def only_json(result: tuple[int, str, str]) -> dict[str, Any]:
    _, out, _ = result
    assert out.count("\n") == 1, out
    return json.loads(out)


def half_written(cache_dir: Path) -> None:
    def child() -> None:
        writer = SnapshotWriter(cache_dir, KEY, ENTRIES)
        writer.put(*list(pieces())[1])
        kill_self()

    killed(child)


def test_an_empty_cache_folder_is_no_fault(run, tmp_path: Path) -> None:
    assert run("list") == (0, f"{tmp_path}: no snapshots\n", "")
    assert only_json(run("list", "--json"))["snapshots"] == []
    assert run("verify", "--all")[0] == 0
    assert run("remove", "--stale")[0] == 0


def test_list_tells_what_a_snapshot_was_made_from(run, tmp_path: Path) -> None:
    write(tmp_path)
    code, out, _ = run("list")
    assert code == 0
    parts = (KEY.id, "  ok\n", "/models/FL2VA", "recipe fp8", "backend reference", "host nvidia 0.30.0", __version__)
    for part in (*parts, "transformer", "text_encoder", "just now", "1 snapshot"):
        assert part in out
    (info,) = only_json(run("list", "--json"))["snapshots"]
    assert info["state"] == "ok" and info["key"]["recipe"] == KEY.recipe and info["part_bytes"]["transformer"] > 4096
    assert info["in_use"] is False and info["created"] and info["last_use"]


def test_opening_is_a_use_and_looking_is_not(run, tmp_path: Path) -> None:
    folder = write(tmp_path)
    lock = folder.with_name(folder.name + ".lock")
    os.utime(lock, (1000, 1000))
    run("verify", "--all")
    assert only_json(run("list", "--json"))["snapshots"][0]["last_use"] == 1000
    open_snapshot(tmp_path, KEY).close()  # type: ignore[union-attr]
    assert only_json(run("list", "--json"))["snapshots"][0]["last_use"] > 1000


def test_list_tells_states_apart(run, tmp_path: Path) -> None:
    (write(tmp_path, replace(KEY, recipe="a")) / "manifest.json").unlink()
    os.truncate(write(tmp_path, replace(KEY, recipe="b")) / "transformer.safetensors", 9)
    write(tmp_path, OLD)
    half_written(tmp_path)
    with SnapshotWriter(tmp_path, replace(KEY, recipe="c"), ENTRIES):
        half_written(tmp_path)
        states = {info["id"]: info["state"] for info in only_json(run("list", "--json"))["snapshots"]}
        out = run("list")[1]
    assert states[replace(KEY, recipe="a").id] == "half-written"
    assert states[replace(KEY, recipe="b").id] == "damaged"
    assert states[OLD.id] == "other version"
    assert sorted(states.values()).count("being written") == 1 and list(states.values()).count("half-written") >= 2
    assert f"plugin 0.0.1, and this is {__version__}" in out and "the manifest says" in out


def test_verify_reads_every_piece_and_tells_the_rate(run, tmp_path: Path) -> None:
    write(tmp_path)
    code, out, _ = run("verify", KEY.id[:5])
    assert code == 0 and f"{KEY.id}: 13 pieces as they were written" in out and "GiB/s" in out
    (result,) = only_json(run("verify", "--all", "--json"))["snapshots"]
    assert result["ok"] and result["pieces"] == 13 and result["bytes"] > 0 and "gib_per_s" in result


def test_verify_names_the_first_damaged_piece_and_exits_3(run, tmp_path: Path) -> None:
    folder = write(tmp_path)
    with open_snapshot(tmp_path, KEY) as snapshot:  # type: ignore[union-attr]
        victim = snapshot.part("transformer").tensors[2]
    flip(victim.file, victim.offset)
    code, out, err = run("verify", KEY.id)
    assert code == 3 and out == ""
    assert "qkv.weight, shard v is damaged" in err and str(folder / "transformer.safetensors") in err
    assert f"vllm-h3 snapshot remove {KEY.id}" in err
    result = run("verify", KEY.id, "--json")
    assert result[0] == 3 and only_json(result)["error"]["parameter"] == "qkv.weight"


def test_verify_all_goes_on_after_a_damaged_one(run, tmp_path: Path) -> None:
    for key in (KEY, OLD):
        (write(tmp_path, key) / "manifest.json").unlink()
    write(tmp_path, replace(KEY, recipe="a"))
    code, out, err = run("verify", "--all")
    assert code == 3 and "13 pieces" in out and KEY.id in err and OLD.id in err and "2 of 3 snapshots" in err
    assert only_json(run("verify", "--all", "--json"))["ok"] is False


def test_remove_asks_first(run, tmp_path: Path, monkeypatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    answers = iter([False, True])
    monkeypatch.setattr("typer.confirm", lambda *args, **kwargs: next(answers))
    code, out, err = run("remove", KEY.id)
    assert code == 0 and out == "nothing was removed\n" and KEY.id in err and folder_of(tmp_path).is_dir()
    code, out, _ = run("remove", KEY.id)
    assert code == 0 and out.startswith(f"removed {KEY.id}, ") and left(tmp_path) == []


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_without_anybody_to_ask_remove_wants_yes(run, tmp_path: Path, monkeypatch, extra: tuple[str, ...]) -> None:
    write(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: bool(extra), raising=False)
    code, _, err = run("remove", KEY.id, *extra)
    assert code == 2 and "--yes" in err and folder_of(tmp_path).is_dir()


def test_remove_stale_leaves_what_can_be_used_or_is_being_written(run, tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, OLD)
    half_written(tmp_path)
    with SnapshotWriter(tmp_path, replace(KEY, recipe="c"), ENTRIES) as writer:
        half_written(tmp_path)
        result = only_json(run("remove", "--stale", "--yes", "--json"))
        assert OLD.id in result["removed"] and KEY.id not in result["removed"]
        for piece in pieces():
            writer.put(*piece)
        writer.commit()
    states = {info["state"] for info in only_json(run("list", "--json"))["snapshots"]}
    assert states == {"ok"} and folder_of(tmp_path).is_dir()


def test_remove_never_takes_one_that_is_in_use(run, tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, OLD)
    with open_snapshot(tmp_path, KEY) as snapshot:  # type: ignore[union-attr]
        assert only_json(run("list", "--json"))["snapshots"][0]["in_use"] is True
        code, _, err = run("remove", KEY.id, "--yes")
        assert code == 10 and KEY.id in err and "in use" in err
        result = run("remove", "--all", "--yes", "--json")
        assert result[0] == 10 and only_json(result)["error"]["removed"] == [OLD.id]
        assert snapshot.folder.is_dir() and not folder_of(tmp_path, OLD).exists()
    assert run("remove", "--all", "--yes")[0] == 0 and left(tmp_path) == []


@pytest.mark.parametrize("verb", ["verify", "remove"])
@pytest.mark.parametrize("args", [(), ("abc", "--all")])
def test_exactly_one_choice_says_which(run, verb: str, args: tuple[str, ...]) -> None:
    code, _, err = run(verb, *args)
    assert code == 2 and "--all" in err and "vllm-h3 snapshot list" in err


def test_an_unknown_id_is_named_with_those_that_exist(run, tmp_path: Path) -> None:
    code, _, err = run("verify", "nothing")
    assert code == 2 and "'nothing'" in err and "There are none" in err
    write(tmp_path)
    code, _, err = run("remove", "nothing", "--yes")
    assert code == 2 and KEY.id in err and str(tmp_path) in err


def test_another_cache_folder_can_be_named(run, tmp_path: Path) -> None:
    write(tmp_path / "other")
    assert "no snapshots" in run("list")[1]
    assert KEY.id in run("list", "--cache-dir", str(tmp_path / "other"))[1]


def test_help_teaches(run) -> None:
    assert "H3_CACHE_DIR" in run("--help")[1]
    for verb in ("list", "verify", "remove"):
        assert "Examples:" in run(verb, "--help")[1]
