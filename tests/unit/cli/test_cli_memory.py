# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 memory``: what it prints, how it compares with a server, and how it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, write_checkpoint
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.errors import ServerError, UsageError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def h3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``vllm-h3 memory`` in this process; returns (exit code, stdout, stderr)."""
    for name in ("VLLM_API_KEY", "H3_MEMORY_FLOOR_GIB"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["memory", *(str(arg) for arg in args)])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli-memory") / "H3"
    write_checkpoint(root, SynthSpec(partition="both", dit=tiny_dit(layers=1)))
    return root


class Info(BaseHTTPRequestHandler):
    """``/v1/h3/info`` of a server that wants the key ``s3cret`` if ``key`` says so."""

    answer: Any = None
    status = 200
    key: str | None = None

    def do_GET(self) -> None:
        refused = self.key is not None and self.headers.get("Authorization") != f"Bearer {self.key}"
        body = json.dumps(type(self).answer).encode()
        self.send_response(401 if refused or self.path != "/v1/h3/info" else self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def info() -> Iterator[tuple[type[Info], str]]:
    """The handler, whose answer a test sets, and the server's URL."""

    class Handler(Info):
        pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield Handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_real_model_needs_no_checkpoint(h3: Run) -> None:
    code, out, _ = h3("--true-size")
    assert code == 0
    for word in ("text_encoder", "table of 99 rows", "55.20", "denoise", "768x448", "119 GiB"):
        assert word in out


def test_json_is_one_line_with_parts_phases_and_fits(h3: Run) -> None:
    code, out, _ = h3("--true-size", "--gib", 96, "--size", "1344x770", "--seconds", 4, "--json")
    answer = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert answer["resident"]["bytes"] == sum(answer["resident"]["parts"].values())
    assert (answer["request"]["height"], answer["request"]["frames"]) == (768, 107)
    assert [phase["name"] for phase in answer["request"]["phases"]] == ["text", "denoise", "decode", "encode"]
    assert {fit["size"] for fit in answer["fits"]} == {"768x448", "1344x768"}
    assert all(fit["memory_gib"] == 96 and fit["seconds"] > 15 for fit in answer["fits"] if fit["size"] == "768x448")


def test_a_checkpoint_is_predicted_in_mib_with_both_dits_of_a_root(h3: Run, checkpoint: Path) -> None:
    _, one, _ = h3(checkpoint / "FL2VA", "--json")
    code, both, _ = h3(checkpoint, "--json")
    assert code == 0
    more, less = (json.loads(text)["resident"] for text in (both, one))
    assert more["bytes"] - less["bytes"] == more["parts"]["transformer_ref"] > 0
    _, out, _ = h3(checkpoint / "FL2VA")
    assert "MiB" in out and "GiB" in out


def test_two_partitions_of_the_real_model(h3: Run) -> None:
    _, one, _ = h3("--true-size", "--json")
    code, both, _ = h3("--true-size", "--both", "--json")
    assert code == 0
    more, less = (json.loads(text)["resident"] for text in (both, one))
    # The second DiT's table is of requests with pictures: 149 rows and not 99.
    extra = less["parts"]["dit"] + less["parts"]["refiner"] + less["parts"]["adaln"] * 149 // 99
    assert more["parts"]["transformer_ref"] == more["bytes"] - less["bytes"] == extra


def test_an_adapter_beside_the_weights_is_counted_and_a_fused_one_is_not(
    h3: Run, checkpoint: Path, tmp_path: Path
) -> None:
    for kind in ("turbo", "fasth3"):
        with pytest.raises(SystemExit):
            main(["synth-lora", str(checkpoint / "FL2VA"), str(tmp_path), "--kind", kind])
    turbo, fused = next(tmp_path.glob("*turbo*")), tmp_path / "adapter_model.safetensors"
    h3("--true-size")  # what synth-lora printed is read away
    counted = {
        path: json.loads(h3(checkpoint / "FL2VA", "--lora", path, "--json")[1])["resident"] for path in (turbo, fused)
    }
    assert 0 < counted[turbo]["parts"]["adapter"] <= turbo.stat().st_size
    assert counted[turbo]["bytes"] - counted[fused]["bytes"] == counted[turbo]["parts"]["adapter"]
    assert "adapter" not in counted[fused]["parts"]
    picture = tmp_path / "memory.png"
    code, out, err = h3(checkpoint / "FL2VA", "--lora", turbo, "--picture", picture)
    assert code == 0 and " L  adapter" in out and picture.is_file(), err


def test_every_part_that_a_prediction_can_name_can_be_drawn() -> None:
    from vllm_h3_plugin.cli.memory_chart import _STYLES
    from vllm_h3_plugin.memory.weights import PARTS

    assert set(PARTS) < set(_STYLES)
    letters = [letter for name, (_, letter) in _STYLES.items() if name != "vaes"]  # in the place of both others
    assert len(set(letters)) == len(letters)


def test_both_is_not_asked_of_a_checkpoint(h3: Run, checkpoint: Path) -> None:
    code, _, err = h3(checkpoint / "FL2VA", "--both")
    assert code == UsageError.exit_code
    assert "--both" in err and "root that holds FL2VA and Ref2VA" in " ".join(err.split())


def test_a_higher_floor_leaves_less_room(h3: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {}
    for floor in ("6", "16"):
        monkeypatch.setenv("H3_MEMORY_FLOOR_GIB", floor)
        _, out, _ = h3("--true-size", "--gib", 80, "--json")
        free[floor] = json.loads(out)["fits"][0]["free_gib"]
    assert free["6"] - free["16"] == pytest.approx(10)


def test_what_does_not_fit_says_how_much_is_missing(h3: Run) -> None:
    code, out, _ = h3("--true-size", "--recipe", "bf16", "--gib", 64)
    assert code == 0
    assert "none: " in out and "GiB short" in out and "does not fit" in out


def test_a_picture_is_a_png_and_is_never_overwritten(h3: Run, tmp_path: Path) -> None:
    target = tmp_path / "bar.png"
    code, out, _ = h3("--true-size", "--picture", target, "--gib", 64)
    assert code == 0 and str(target) in out
    with Image.open(target) as image:
        assert image.format == "PNG"
        colours = image.convert("RGB").getcolors(1 << 16)
    assert len(colours or []) > 5
    before = target.read_bytes()
    code, _, err = h3("--true-size", "--picture", target)
    assert code == UsageError.exit_code
    assert str(target) in err and "nothing is overwritten" in err and "another name" in err
    assert target.read_bytes() == before


@pytest.mark.parametrize(("name", "word"), [("bar.jpg", "ends in .png"), ("no/such/bar.png", "no folder")])
def test_a_picture_that_cannot_be_written_is_refused_first(h3: Run, tmp_path: Path, name: str, word: str) -> None:
    code, _, err = h3("--true-size", "--picture", tmp_path / name)
    assert code == UsageError.exit_code
    assert name in err and word in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ("no model to count", "FL2VA", "--true-size")),
        (("--true-size", "/x"), ("/x", "two models", "Give the checkpoint or --true-size")),
        (("--true-size", "--size", "big"), ("--size 'big'", "768x448")),
        (("--true-size", "--size", "16x448"), ("16x448", "at least 32")),
        (("--true-size", "--frames", "124", "--seconds", "5"), ("--frames 124", "Give one of them")),
        (("--true-size", "--frames", "0"), ("frames=0", "Ask for 1 frame or more")),
        (("--true-size", "--tp", "3"), ("tensor-parallel size 3", "Use 1, 2, 4 or 8")),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_with_the_way_out(
    h3: Run, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, _, err = h3(*args)
    assert code == UsageError.exit_code
    for word in words:
        assert word in err


def test_an_unknown_recipe_is_named_with_the_nearest(h3: Run) -> None:
    code, _, err = h3("--true-size", "--recipe", "fp9")
    assert code == 4
    assert "fp9" in err and "fp8" in err


def test_a_missing_checkpoint_is_named(h3: Run, tmp_path: Path) -> None:
    code, _, err = h3(tmp_path / "nowhere")
    assert code == 3
    assert "nowhere" in err and "fix:" in err


def test_a_faulty_checkpoint_is_refused_with_the_fault(h3: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "H3", SynthSpec(dit=tiny_dit(layers=1)))
    folder = next(path for path in (tmp_path / "H3").rglob("transformer") if path.is_dir())
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    code, out, err = h3(folder.parent, "--json")
    assert code == 3
    assert shard.name in err and json.loads(out)["ok"] is False


def memory_of(parts: dict[str, int], resident: int) -> dict[str, Any]:
    return {"device": "cuda:0", "resident_bytes": resident, "peak_bytes": resident + 1, "load_peak_bytes": resident,
            "rss_bytes": 2**30, "parts": parts}  # fmt: skip


def test_a_server_is_shown_beside_the_prediction_in_percent(h3: Run, info: tuple[type[Info], str]) -> None:
    handler, url = info
    _, out, _ = h3("--true-size", "--json")
    parts = dict(json.loads(out)["resident"]["parts"])
    vaes = parts.pop("vaes")
    measured = {**parts, "video_vae": vaes // 2, "audio_vae": vaes - vaes // 2, "dit": round(parts["dit"] / 1.02)}
    handler.answer = {"workers": [{"memory": memory_of(measured, sum(measured.values()))}, {"pid": 1}]}
    code, out, _ = h3("--true-size", "--server", url)
    assert code == 0
    assert "measured on cuda:0" in out and "+2.00 %" in out and "peak while loading" in out
    _, out, _ = h3("--true-size", "--server", url + "/", "--json")
    (worker,) = json.loads(out)["measured"]
    assert worker["difference_percent"]["dit"] == pytest.approx(2, abs=0.01)
    assert worker["difference_percent"]["vaes"] == 0
    assert 0 < worker["difference_percent"]["total"] < 1


def test_a_part_that_only_the_server_has_is_shown(h3: Run, info: tuple[type[Info], str]) -> None:
    handler, url = info
    handler.answer = {"workers": [{"memory": memory_of({"adapters": 5 * 2**30}, 60 * 2**30)}]}
    _, out, _ = h3("--true-size", "--server", url)
    assert "adapters" in out and "-100.00 %" in out


def test_a_server_with_a_key_gets_it(h3: Run, info: tuple[type[Info], str], monkeypatch: pytest.MonkeyPatch) -> None:
    handler, url = info
    handler.key, handler.answer = "s3cret", {"workers": [{"memory": memory_of({}, 2**30)}]}
    code, _, err = h3("--true-size", "--server", url)
    assert code == ServerError.exit_code and "401" in err and "VLLM_API_KEY" in err
    assert h3("--true-size", "--server", url, "--api-key", "s3cret")[0] == 0
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    code, out, err = h3("--true-size", "--server", url)
    assert code == 0 and "s3cret" not in out + err


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (404, {"detail": "Not Found"}, ("HTTP 404", "without this plugin", "vllm-h3 serve")),
        (200, {"workers": [{"pid": 1}]}, ("reports no memory", "Wait until")),
        (200, [], ("no workers",)),
    ],
)
def test_a_server_that_cannot_say_is_named_with_the_reason(
    h3: Run, info: tuple[type[Info], str], status: int, answer: Any, words: tuple[str, ...]
) -> None:
    handler, url = info
    handler.status, handler.answer = status, answer
    code, _, err = h3("--true-size", "--server", url)
    assert code == ServerError.exit_code
    for word in (url, *words):
        assert word in err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_a_server_that_is_not_there_is_named(h3: Run, url: str) -> None:
    code, _, err = h3("--true-size", "--server", url)
    assert code == ServerError.exit_code
    assert f"{url} does not answer" in err and "--server" in err


@pytest.mark.parametrize("gib", ["inf", "1e300", "nan"])
def test_an_amount_of_memory_that_no_machine_has_is_refused(h3: Run, gib: str) -> None:
    code, _, err = h3("--true-size", "--gib", gib)
    assert code == UsageError.exit_code and "--gib" in err


def test_a_picture_that_does_not_fit_on_the_disk_leaves_nothing(
    h3: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_h3_plugin.cli.memory_chart.os.fsync", full)
    code, _, err = h3("--true-size", "--picture", tmp_path / "bar.png")
    assert code != 0 and str(tmp_path / "bar.png") in err and "No space left" in err
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_for_the_processes_is_said(h3: Run) -> None:
    _, out, _ = h3("--true-size", "--gib", 64)
    assert "2 GiB for the server's processes and 6 GiB left free" in out and "another schedule" in out
