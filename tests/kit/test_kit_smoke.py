# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 smoke`` against servers that misbehave: no fault becomes a clip, no job is lost, nothing is made twice."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.kit.misbehaving import Fault, Handler, Misbehaving, cut, endless, stall, trickle
from tests.unit.video.conftest import ClipMaker
from vllm_h3_plugin.cli import smoke as smoke_verb
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
from vllm_h3_plugin.serving.clip_maker import Made, make_clip
from vllm_h3_plugin.serving.clip_order import Order
from vllm_h3_plugin.serving.limits import Deadline, Limits
from vllm_h3_plugin.serving.watching import Watch
from vllm_h3_plugin.video.promote import promote

COMMAND = [str(Path(sys.executable).parent / "vllm-h3")]
# 96 frames are asked for, and this is what H3 makes of it.
FRAMES = 107


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    make = ClipMaker(tmp_path_factory.mktemp("clips"))
    return {
        "64x64": make("64.mp4", frames=FRAMES),
        "256x256": make("256.mp4", frames=FRAMES, size=(256, 256)),
        "mute": make("mute.mp4", frames=FRAMES, sound=None),
        "short": make("short.mp4", frames=56),
    }


@pytest.fixture
def server(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Misbehaving]:
    for name in ("H3_API_KEY_FILE", "VLLM_API_KEY", "H3_FFMPEG"):
        monkeypatch.delenv(name, raising=False)
    # A proxy that would answer in the server's place.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    made = Misbehaving({size: clips[size].read_bytes() for size in ("64x64", "256x256")})
    made.start()
    yield made
    made.over.set()
    made.stop()


@dataclass(frozen=True)
class Smoke:
    """Runs the verb in this process."""

    server: Misbehaving
    out: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *args: str, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as caught:
            main(self.argv(*args)[1:])
        out, err = self.capsys.readouterr()
        assert caught.value.code == code, err
        return out, err

    def argv(self, *args: str) -> list[str]:
        """One small clip from a prompt, unless the arguments say otherwise."""
        small = () if "--only" in args or "--request" in args else ("--only", "t2va", "--size", "64x64")
        return [*COMMAND, "smoke", "--url", self.server.url, "--out", str(self.out), *small, *args]

    def files(self) -> list[str]:
        return sorted(os.listdir(self.out)) if self.out.exists() else []

    def record(self, name: str = "smoke-t2va") -> dict[str, Any]:
        return dict(json.loads((self.out / f"{name}.json").read_text()))


@pytest.fixture
def smoke(server: Misbehaving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Smoke:
    return Smoke(server, tmp_path / "my clips", capsys)


ONE_CLIP = ["smoke-t2va.json", "smoke-t2va.mp4", "smoke-t2va.mp4.sha256"]
LEFT_BEHIND = ["smoke-t2va.json"]


def test_a_clip_lies_beside_its_checksum_and_its_request(smoke: Smoke) -> None:
    out, _ = smoke("--seed", "7")
    assert smoke.files() == ONE_CLIP
    record = smoke.record()
    asked = record["request"]
    assert (asked["seed"], asked["width"], asked["frames"], record["job"]) == (7, 64, 96, "video_1")
    assert (record["state"], record["model"], record["server"]["recipes"]) == ("finished", "H3", ["fp8"])
    assert record["sha256"] in (smoke.out / "smoke-t2va.mp4.sha256").read_text()
    assert out.startswith("smoke-t2va: ") and "seed 7" in out and "generation 1.5 s" in out and record["sha256"] in out


def test_both_clips_are_made_and_the_second_gets_a_picture(smoke: Smoke) -> None:
    out, _ = smoke("--size", "256x256", "--only", "first-frame", "--json")
    line = json.loads(out)
    assert line["ok"] and [clip["name"] for clip in line["clips"]] == ["smoke-first-frame"]
    assert smoke.server.created[0]["form"]["files"] == "1"
    with Image.open(smoke.out / "smoke-first-frame.ref1.png") as picture:
        assert picture.size == (256, 256)


def test_without_options_a_reference_server_is_asked_for_two_small_clips(
    server: Misbehaving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["smoke", "--url", server.url])
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    assert [line.split(":")[0] for line in out.splitlines()] == ["smoke-t2va", "smoke-first-frame"]
    assert {(job["form"]["size"], job["form"]["num_inference_steps"]) for job in server.created} == {("256x256", "8")}
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0 and answer["clips"][0]["path"] == "clips/smoke-first-frame.mp4"


def test_a_picture_of_ones_own_is_sent_and_kept(smoke: Smoke, tmp_path: Path) -> None:
    Image.new("RGB", (300, 300), "red").save(tmp_path / "mine.png")
    options = ("--only", "first-frame", "--size", "256x256", "--first-frame", str(tmp_path / "mine.png"))
    smoke(*options)
    kept = smoke.out / "smoke-first-frame.ref1.png"
    assert kept.read_bytes() == (tmp_path / "mine.png").read_bytes()
    kept.write_bytes(b"other")
    _, err = smoke("--request", str(smoke.out / "smoke-first-frame.json"), code=2)
    assert "smoke-first-frame.ref1.png" in err and "not those that were sent" in err


def test_verify_without_a_file_holds_the_newest_clip_to_its_request(
    smoke: Smoke, clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(code: int) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["verify"])
        _, err = smoke.capsys.readouterr()
        assert caught.value.code == code, err
        return err

    monkeypatch.chdir(tmp_path)
    assert "no clip in" in (err := verify(2)) and "vllm-h3 smoke" in err
    monkeypatch.setattr("vllm_h3_plugin.cli.verify.CLIPS", smoke.out)
    smoke()
    smoke("--again")
    assert "the newest of 2 in" in (err := verify(0)) and "smoke-t2va-2.mp4" in err
    clip = smoke.out / "smoke-t2va-2.mp4"
    clip.write_bytes(clips["256x256"].read_bytes())
    assert "frame size: 256x256, wanted 64x64" in (err := verify(8)) and "checksum" in err


# What a server may do at the clip's address, and what comes of it.


def json_instead(handler: Handler) -> None:
    handler.json(200, {"error": {"message": "no clip today"}})


def away(handler: Handler) -> None:
    handler.head(302, Location=f"http://127.0.0.1:{handler.shop.port}/elsewhere", Content_Length=0)


def said_larger(handler: Handler) -> None:
    handler.send(handler.clip, length=len(handler.clip) + 100)


def said_smaller(handler: Handler) -> None:
    handler.send(handler.clip, length=len(handler.clip) - 3000)


def gigantic(handler: Handler) -> None:
    handler.send(b"", length=1 << 40)


def gone_wrong(handler: Handler) -> None:
    handler.json(500, {"error": {"message": "the disk has died"}})


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (json_instead, (), ["fetching the clip of job video_1 gave HTTP 200, application/json", "no clip today"]),
        (gone_wrong, (), ["HTTP 500", "the disk has died"]),
        (away, (), ["HTTP 302", "/elsewhere", "redirects are not followed"]),
        (cut, (), ["could not be fetched whole in 3 attempts", "the same command"]),
        (said_larger, (), ["could not be fetched whole in 3 attempts"]),
        (stall, ("--stall", "1"), ["could not be fetched whole", "nothing came in time"]),
        (gigantic, (), [f"{1 << 40} bytes", "--max-mib"]),
        (endless, ("--max-mib", "2"), [f"{2 << 20} are allowed", "--max-mib"]),
        (trickle, ("--timeout", "3"), ["was not done after 3 s", "--timeout"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_no_whole_clip_is_shown_and_not_saved_and_the_job_is_kept(
    smoke: Smoke, content: Fault, options: tuple[str, ...], words: list[str]
) -> None:
    smoke.server.content = content
    _, err = smoke(*options, code=ServerError.exit_code)
    assert all(word in err for word in words), err
    assert smoke.files() == LEFT_BEHIND
    smoke.server.content = None
    smoke.server.over.set()
    _, err = smoke()
    assert "picking up job video_1" in err
    assert smoke.files() == ONE_CLIP and len(smoke.server.created) == 1


def test_a_job_that_takes_too_long_is_named_with_where_it_was_last_seen(smoke: Smoke) -> None:
    smoke.server.hold.set()
    _, err = smoke("--timeout", "2", code=ServerError.exit_code)
    assert "job video_1, last seen denoising 3/8, was not done after 2 s" in " ".join(err.split()), err


@pytest.mark.parametrize("fault", ["mute", "short", "cut"])
def test_a_clip_that_is_not_what_was_asked_for_gets_no_name_and_the_next_run_makes_another(
    smoke: Smoke, clips: dict[str, Path], fault: str
) -> None:
    body = None if fault == "cut" else clips[fault].read_bytes()
    smoke.server.content = said_smaller if body is None else lambda handler: handler.send(body)
    _, err = smoke(code=8)
    assert {"mute": "audio stream: none", "short": "56", "cut": "smoke-t2va.mp4.part"}[fault] in err
    assert smoke.files() == ["smoke-t2va.json", "smoke-t2va.mp4.part"]
    assert smoke.record()["state"] == "failed"
    smoke.server.content = None
    smoke()
    assert smoke.files() == ONE_CLIP
    first, second = smoke.server.created
    assert first["form"] == second["form"] and first["key"] != second["key"]


# What a server may do before there is a clip.


def test_a_refused_request_tells_the_servers_words_and_leaves_nothing(smoke: Smoke) -> None:
    smoke.server.create = lambda handler: handler.json(500, {"error": {"message": "aspect_ratio is missing"}})
    _, err = smoke("--only", "first-frame", "--size", "256x256", code=7)
    assert "refused to create a video: HTTP 500" in err and "aspect_ratio is missing" in err
    assert smoke.files() == []


def test_a_busy_server_is_told_apart(smoke: Smoke) -> None:
    smoke.server.create = lambda handler: handler.json(503, {"error": {"message": "no memory"}}, Retry_After=30)
    _, err = smoke(code=10)
    assert "no memory" in err and "Try again in 30 s" in err


def test_an_answer_without_a_job_is_no_job(smoke: Smoke) -> None:
    smoke.server.create = lambda handler: handler.send(b"<html>hello", kind="text/html")
    _, err = smoke(code=7)
    assert "HTTP 200 without a job" in err and "<html>hello" in err and "--url" in err
    assert smoke.files() == []


def test_a_lost_answer_to_create_is_asked_for_again_with_the_same_key(smoke: Smoke) -> None:
    def hang_up(handler: Handler) -> None:
        handler.shop.create = None
        handler.connection.close()

    smoke.server.create = hang_up
    smoke()
    first, second = smoke.server.created
    assert first["key"] and first == second


def test_a_create_that_is_never_answered_keeps_its_key_for_the_next_run(smoke: Smoke) -> None:
    smoke.server.create = lambda handler: handler.connection.close()
    _, err = smoke(code=7)
    assert "no answer" in err
    assert smoke.record()["state"] == "creating"
    smoke.server.create = None
    smoke()
    assert smoke.files() == ONE_CLIP and len({job["key"] for job in smoke.server.created}) == 1


def test_without_a_key_the_fix_names_the_variables_and_with_it_all_is_well(
    smoke: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smoke.server.key = "s3cret"
    _, err = smoke(code=7)
    assert "HTTP 401" in err and "H3_API_KEY_FILE" in err and "VLLM_API_KEY" in err
    (tmp_path / "key").write_text("s3cret\n")
    monkeypatch.setenv("H3_API_KEY_FILE", str(tmp_path / "key"))
    _, err = smoke()
    assert "s3cret" not in err + (smoke.out / "smoke-t2va.json").read_text()


def test_no_server(smoke: Smoke) -> None:
    smoke.server.stop()
    _, err = smoke(code=7)
    assert f"{smoke.server.url}: no answer" in err and "vllm-h3 serve" in err
    assert smoke.files() == []


def test_a_server_without_the_plugin_proves_nothing(smoke: Smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_h3_plugin.serving.server.__version__", "0.0.0")
    _, err = smoke(code=5)
    assert "the server runs H3 without this plugin" in err
    assert smoke.files() == []


@pytest.mark.parametrize(("tasks", "fix"), [(("t2va",), "Give --only t2va"), (("ref2va",), "FL2VA folder")])
def test_a_server_that_makes_other_clips_is_not_asked(smoke: Smoke, tasks: tuple[str, ...], fix: str) -> None:
    smoke.server.tasks = tasks
    _, err = smoke("--only", "first-frame", code=2)
    assert "cannot make a clip of the kind first-frame" in err and ", ".join(tasks) in err and fix in err
    assert smoke.server.created == []


def test_a_failed_job_tells_why_and_the_next_run_asks_for_another(smoke: Smoke) -> None:
    def fail(handler: Handler) -> None:
        error = {"code": 500, "message": "out of memory in step 3"}
        handler.json(500, {"id": "video_1", "status": "failed", "error": error})

    smoke.server.look = fail
    _, err = smoke(code=7)
    assert "job video_1 failed" in err and "out of memory in step 3" in err
    assert smoke.files() == LEFT_BEHIND
    smoke.server.look = None
    smoke()
    assert [job["form"]["seed"] for job in smoke.server.created] == [str(smoke.record()["request"]["seed"])] * 2


@pytest.mark.parametrize("forget", [False, True], ids=["knows the job", "has forgotten it"])
def test_a_server_that_dies_after_the_job_was_created_is_waited_for(smoke: Smoke, forget: bool) -> None:
    smoke.server.hold.set()
    thread = smoke.server.die_and_return(1.5, forget=forget)
    _, err = smoke()
    thread.join()
    assert "lost touch" in err
    assert ("no longer knows job video_1" in err) is forget
    assert smoke.files() == ONE_CLIP and len(smoke.server.created) == 1 + forget


def test_a_server_that_stays_away_is_given_up_and_the_job_kept(smoke: Smoke) -> None:
    smoke.server.hold.set()

    def go_away() -> None:
        assert smoke.server.asked.wait(120)
        smoke.server.stop()

    threading.Thread(target=go_away).start()
    _, err = smoke("--reconnect", "0.4", code=7)
    assert "has not answered about job video_1" in err and "the same command" in err
    assert smoke.record()["state"] == "created"


def test_a_job_that_the_server_deleted_between_two_runs_is_made_anew(smoke: Smoke) -> None:
    smoke.server.hold.set()
    smoke("--timeout", "2", code=7)
    smoke.server.jobs.clear()
    smoke.server.hold.clear()
    _, err = smoke()
    assert "picking up job video_1" in err and "no longer knows job video_1" in err and "asking anew" in err
    assert smoke.files() == ONE_CLIP


def test_a_server_that_forgets_every_job_is_not_asked_for_ever(smoke: Smoke) -> None:
    smoke.server.look = lambda handler: handler.json(404, {"detail": "Video not found"})
    _, err = smoke(code=7)
    assert "forgot 2 jobs" in err and len(smoke.server.created) == 2


# Names, and running it again.


def test_a_taken_name_is_left_alone_and_a_number_added(smoke: Smoke) -> None:
    smoke.out.mkdir()
    (smoke.out / "smoke-t2va.mp4").write_bytes(b"mine")
    (smoke.out / "smoke-t2va-2.json").write_text("mine too")
    smoke()
    assert (smoke.out / "smoke-t2va.mp4").read_bytes() == b"mine"
    assert (smoke.out / "smoke-t2va-2.json").read_text() == "mine too"
    assert (smoke.out / "smoke-t2va-3.mp4").exists()


def test_a_finished_clip_is_not_made_again_unless_it_is_asked_for(smoke: Smoke) -> None:
    smoke()
    out, _ = smoke()
    assert "made and verified before (--again makes another)" in out and len(smoke.server.created) == 1
    smoke("--again")
    assert (smoke.out / "smoke-t2va-2.mp4").exists() and len(smoke.server.created) == 2


@pytest.mark.parametrize("change", ["options", "server", "bytes"])
def test_a_clip_of_another_request_or_server_and_a_changed_one_do_not_count(smoke: Smoke, change: str) -> None:
    smoke("--seed", "1")
    if change == "server":
        smoke.server.recipe = "bf16"
    elif change == "bytes":
        with (smoke.out / "smoke-t2va.mp4").open("ab") as file:
            file.write(b"x")
    smoke("--seed", "2" if change == "options" else "1")
    assert (smoke.out / "smoke-t2va-2.mp4").exists() and len(smoke.server.created) == 2


def test_a_record_makes_its_clip_again(smoke: Smoke) -> None:
    smoke("--seed", "5", "--steps", "3")
    smoke("--request", str(smoke.out / "smoke-t2va.json"))
    assert smoke.server.created[0]["form"] == smoke.server.created[1]["form"]
    assert (smoke.out / "smoke-t2va-2.mp4").exists()


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot be read"), ("{}", "is no record of a clip"), ("[", "is no record of a clip")]
)
def test_a_file_that_is_no_record_is_named(smoke: Smoke, tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    _, err = smoke("--request", str(path), code=2)
    assert f"{path} {words}" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--size", "100"), "--size 100"),
        (("--only", "t2va", "--size", "100x100"), "Use 96x96"),
        (("--only", "first-frame", "--size", "64x64"), "--only t2va"),
        (("--request", "x.json", "--seed", "3"), "--request with seed"),
        (("--url", "127.0.0.1:8000"), "http://127.0.0.1:8000"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_asked(smoke: Smoke, options: tuple[str, ...], words: str) -> None:
    _, err = smoke(*options, code=2)
    assert words in err
    assert smoke.server.created == [] and smoke.files() == []


def test_a_folder_that_cannot_be_made_is_named(smoke: Smoke) -> None:
    smoke.out.write_text("a file")
    _, err = smoke(code=2)
    assert str(smoke.out) in err and "--out" in err


def make(server: Misbehaving, folder: Path, order: Order, limits: Limits | None = None) -> Made:
    with VideoClient(server.url, limits=limits) as client:
        return make_clip(client, order, folder, server={})


def test_two_at_once_make_two_clips(server: Misbehaving, tmp_path: Path) -> None:
    server.hold.set()
    order = Order("smoke-t2va", VideoRequest("a kite", 64, 64, 96, 2, 1))
    made: list[Made] = []
    threads = [threading.Thread(target=lambda: made.append(make(server, tmp_path, order))) for _ in range(2)]
    for thread in threads:
        thread.start()
    patience = time.monotonic() + 120
    while len(server.jobs) < 2:
        assert time.monotonic() < patience
        time.sleep(0.01)
    server.hold.clear()
    for thread in threads:
        thread.join(120)
    assert sorted(clip.name for clip in made) == ["smoke-t2va", "smoke-t2va-2"]
    assert len({job["key"] for job in server.created}) == 2
    names = {"smoke-t2va", "smoke-t2va-2"}
    assert {path.name for path in tmp_path.iterdir()} == {
        n + s for n in names for s in (".mp4", ".json", ".mp4.sha256")
    }


def test_a_full_disk_keeps_the_job_and_the_next_run_fetches_its_clip(
    smoke: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "xb" and path.name.endswith(".part"):
            real_open(path, mode).close()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real_open(path, mode, *args, **kwargs)

    real_open = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        _, err = smoke(code=10)
    assert "No space left on device" in err and "still on the server" in err and "the same command" in err
    assert smoke.files() == LEFT_BEHIND
    smoke()
    assert smoke.files() == ONE_CLIP and len(smoke.server.created) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_run_that_was_ended_is_picked_up_by_the_same_command(smoke: Smoke, number: signal.Signals) -> None:
    smoke.server.hold.set()
    process = subprocess.Popen(
        smoke.argv(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that; a person's Ctrl-C is not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert smoke.server.asked.wait(120)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else smoke_verb.INTERRUPTED)
    assert number == signal.SIGKILL or "The same command picks it up" in err
    smoke.server.hold.clear()
    _, err = smoke()
    assert "picking up job video_1" in err
    assert smoke.files() == ONE_CLIP and len(smoke.server.created) == 1


@pytest.mark.parametrize("before", [True, False], ids=["before the name", "after the name"])
def test_a_run_that_was_ended_between_verifying_and_the_end_asks_the_server_for_nothing(
    smoke: Smoke, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    def end(part: Path, final: Path) -> None:
        if not before:
            promote(part, final)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vllm_h3_plugin.serving.clip_maker.promote", end)
        smoke(code=130)
    assert smoke.record()["state"] == "verified"
    smoke.server.jobs.clear()
    smoke()
    assert smoke.files() == ONE_CLIP and (len(smoke.server.created), smoke.server.downloads) == (1, 1)


# Time.


def test_half_an_hour_is_allowed_and_more_where_the_pace_of_steps_says_so() -> None:
    deadline = Deadline(None)
    assert deadline.left == pytest.approx(1800, abs=1)
    deadline.expect(2000)
    assert deadline.left == pytest.approx(4600, abs=1)
    deadline.expect(10)
    assert deadline.left == pytest.approx(4600, abs=1)


def test_a_time_that_a_person_set_does_not_move() -> None:
    deadline = Deadline(5)
    deadline.expect(2000)
    assert deadline.left == pytest.approx(5, abs=1)


def test_a_stuck_job_earns_no_more_time() -> None:
    from vllm_h3_plugin.serving.watching import _Pace

    pace = _Pace()
    looks = [Watch(t, "in_progress", "denoising", step, 50) for t, step in ((10, 10), (50, 12), (5000, 12))]
    assert [pace.seconds_left({}, look) for look in looks] == [None, 20 * 38, None]
    assert pace.seconds_left({"seconds_left": 12}, looks[0]) == 12


@pytest.mark.parametrize("key", ["two words", "sekrit\r", "schl\u00fcssel"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    smoke: Smoke, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    _, err = smoke(code=2)
    assert "VLLM_API_KEY" in err and key.strip() not in err and key.split()[0] not in err


def test_a_key_that_the_server_echoes_is_not_shown(smoke: Smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sekrit-key")

    def echo(handler: Handler) -> None:
        handler.json(500, {"error": {"message": f"you sent {handler.headers['Authorization']} [/red]\u001b[31m"}})

    smoke.server.create = echo
    _, err = smoke(code=7)
    assert "you sent Bearer ***" in err and "sekrit-key" not in err and "\u001b[31m" not in err


def test_a_password_in_the_address_is_refused_and_not_kept(smoke: Smoke, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["smoke", "--url", "http://me:pass-word@127.0.0.1:1", "--out", str(tmp_path / "new")])
    assert ended.value.code == 2
    assert "pass-word" not in smoke.capsys.readouterr().err and not (tmp_path / "new").exists()


def test_without_an_address_the_container_of_the_env_file_is_asked(
    smoke: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    port = smoke.server.url.rpartition(":")[2]
    Path(".env").write_text(f"VLLM_H3_PORT={port}\nVLLM_H3_BIND=0.0.0.0\n")
    with pytest.raises(SystemExit) as ended:
        main(["smoke", "--only", "t2va", "--size", "64x64"])
    assert ended.value.code == 0 and len(list(Path("clips").glob("*.mp4"))) == 1


def test_a_job_that_ended_in_a_way_of_its_own_is_not_waited_for(smoke: Smoke) -> None:
    smoke.server.look = lambda handler: handler.json(200, {"id": "video_1", "status": "cancelled"})
    _, err = smoke(code=7)
    assert "video_1 cancelled" in err


@pytest.mark.parametrize(
    "job",
    [
        {"progress": [1], "step": "x", "steps": float("inf")},
        {"phase": "upstream [/video] is away", "seconds_left": "soon", "steps": "8"},
        {"phase": "\ud800", "seconds_left": 10**400},
    ],
)
def test_odd_words_about_a_job_are_no_traceback(smoke: Smoke, job: dict[str, Any]) -> None:
    looks = iter(range(3))

    def look(handler: Handler) -> None:
        ended = next(looks, None) is None
        handler.json(200, {"id": "video_1", "status": "completed" if ended else "in_progress", **job})

    smoke.server.look = look
    smoke()


def test_a_key_file_of_the_container_that_holds_no_key_is_named_and_not_shown(
    smoke: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("VLLM_H3_API_KEY_FILE=key\n")
    Path("key").write_text("sekrit words\n")
    with pytest.raises(SystemExit) as ended:
        main(["smoke"])
    err = smoke.capsys.readouterr().err
    assert ended.value.code == 2
    assert "VLLM_H3_API_KEY_FILE" in err and "H3_API_KEY_FILE, or give --url" in err and "sekrit" not in err
