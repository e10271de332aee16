# SPDX-License-Identifier: Apache-2.0
"""The page at ``/h3`` in a real headless Chromium, against a real server that wants a key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import chromium
from tests.server.clients.conftest import KEY, Keyed
from tests.server.conftest import MOST_STEPS
from vllm_h3_plugin.pins import HostPin

pytestmark = [
    pytest.mark.browser,
    pytest.mark.only_host("nvidia", reason="the page is the same, and asks what the other tests ask both hosts"),
]

WAIT_MS = 180_000
WITH_KEY = f"sessionStorage.setItem('h3-key', '{KEY}')"
LONG, SHORT = str(MOST_STEPS), "3"
HURRY = "const later = setTimeout; window.setTimeout = (act, ms) => later(act, ms / 10);"
"""The page's pauses are a tenth, so that it looks often enough at a clip that is soon there."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=["--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Any, keyed: Keyed) -> Iterator[Callable[..., Any]]:
    """Opens the page in a browser that has never seen it. At the end nothing may have gone wrong in any of them."""
    contexts, wrong = [], []

    def said(message: Any) -> None:
        # Chromium reports each answer above 399, and those are what some tests are about.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            wrong.append(message.text)

    def open_page(*, key: bool = True, hurry: bool = False, **options: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", said)
        page.on("request", lambda request: wrong.extend(_elsewhere(request.url, keyed.url)))
        if key:
            page.add_init_script(WITH_KEY)
        if hurry:
            page.add_init_script(HURRY)
        page.goto(f"{keyed.url}/h3")
        if key:
            page.locator("#ratios button").first.wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def _elsewhere(url: str, server: str) -> list[str]:
    return [] if url.startswith((server, "blob:", "data:")) else [f"asked for {url}"]


def ask(page: Any, *, steps: str = SHORT, size: str = "64x64", prompt: str = "a red kite") -> None:
    """Fill the form and send it."""
    for name, value in {"prompt": prompt, "size": size, "seconds": "4", "num_inference_steps": steps}.items():
        page.fill(f"#{name}", value)
    page.click("#make")


def watched(page: Any) -> list[float]:
    """Where the bar stood, in the order seen, until the clip can be played."""
    seen: list[float] = []
    deadline = time.monotonic() + WAIT_MS / 1000
    while time.monotonic() < deadline:
        percent, ready = page.evaluate(
            "() => [document.querySelector('#progress').value, document.querySelector('#video').readyState]"
        )
        if not seen or seen[-1] != percent:
            seen.append(percent)
        if ready >= 2:
            return seen
        time.sleep(0.05)
    raise AssertionError(f"no clip: {page.text_content('#stage')}, {seen}")


def test_a_key_is_asked_for_and_another_one_is_not_taken(opened: Any, keyed: Keyed) -> None:
    page = opened(key=False)
    page.locator("#key-dialog[open]").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#key-dialog[open]").is_visible()
    for key, said in (("wrong", "does not accept this key"), ("with space", "without spaces")):
        page.fill("#key", key)
        page.click("text=Unlock")
        page.locator("#key-fault", has_text=said).wait_for()
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.locator("#server", has_text="fp8").wait_for()
    assert page.locator("#key-dialog[open]").count() == 0
    page.reload()
    page.locator("#server", has_text="fp8").wait_for()
    assert KEY not in page.content() and KEY not in page.url
    page.click("#forget")
    page.locator("#key-dialog[open]").wait_for()


def test_a_clip_is_ordered_watched_played_and_downloaded(opened: Any, keyed: Keyed, tmp_path: Path) -> None:
    page = opened()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    ask(page, steps=LONG, size="100x70")
    seen = watched(page)
    assert seen == sorted(seen)
    assert sum(0 < percent < 100 for percent in seen) >= 3
    played = page.evaluate("""async () => {
        const video = document.querySelector("#video");
        video.muted = true;
        await video.play();
        await new Promise((resolve) => video.addEventListener("timeupdate", resolve, { once: true }));
        video.currentTime = 3;
        await new Promise((resolve) => video.addEventListener("seeked", resolve, { once: true }));
        return [video.videoWidth, video.videoHeight, Math.round(video.duration * 24), video.currentTime >= 3];
    }""")
    assert played == [96, 64, 107, True]
    (job,) = keyed.http.get("/v1/videos").json()["data"]
    assert (asked.count("events"), asked.count(job["id"])) == (1, 1), "its events were enough"
    snaps = page.locator("#snaps").inner_text()
    assert "size 100x70 became 96x64" in snaps and "length 4 s became 4.4583 s" in snaps
    assert str(job["seed"]) in page.locator("#facts").inner_text()
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == f"{job['id']}.mp4"
    download.value.save_as(tmp_path / "clip.mp4")
    assert (tmp_path / "clip.mp4").read_bytes() == keyed.http.get(f"/v1/videos/{job['id']}/content").content
    page.click("#again")
    assert page.input_value("#seed") == str(job["seed"])
    page.get_by_role("button", name="Delete: a red kite").click()
    assert page.locator("#jobs li").count() == 1
    page.get_by_role("button", name="Really delete?: a red kite").click()
    page.locator("#empty").wait_for()
    assert keyed.http.get("/v1/videos").json()["data"] == []
    assert page.locator("#video").is_hidden()


def test_what_runs_and_what_waits_is_cancelled(opened: Any, keyed: Keyed) -> None:
    page = opened()
    ask(page, steps=LONG, size="256x256", prompt="the first")
    page.locator("#phase", has_text="Denoising, step").wait_for()
    ask(page, steps=LONG, size="256x256", prompt="the second")
    page.locator("#stage-status", has_text="waits, place 1").wait_for()
    page.locator("#queue-length", has_text="2 not finished").wait_for()
    page.get_by_role("button", name="Cancel: the first").click()
    page.locator("#phase", has_text="Denoising, step").wait_for()
    assert [job["prompt"] for job in keyed.http.get("/v1/videos").json()["data"]] == ["the second"]
    page.click("#stop")
    page.locator("#empty").wait_for()
    assert keyed.http.get("/v1/videos").json()["data"] == []
    page.locator("#phase", has_text="No clip is chosen").wait_for()


def test_each_fault_stands_at_its_field(opened: Any, keyed: Keyed, tmp_path: Path, host_pin: HostPin) -> None:
    page = opened()
    (tmp_path / "first.png").write_bytes(b"no picture")
    page.set_input_files("#input_reference", tmp_path / "first.png")
    for name, value in {"size": "16x16", "seconds": "99", "num_inference_steps": "0", "seed": "abc"}.items():
        page.fill(f"#{name}", value)
    page.click("#make")
    for name, said in {
        "prompt": "",
        "size": "at least 32 pixels",
        "seconds": "4 to 15",
        "num_inference_steps": "1 to 199" if host_pin.vllm_omni == "0.28.0" else "1 to 200",
        "seed": "whole number",
        "input_reference": "text",
    }.items():
        field = page.locator(f"#{name}")
        page.locator(f"#{name}[aria-invalid=true]").wait_for()
        assert f"{name}-fault" in str(field.get_attribute("aria-describedby"))
        assert said in page.locator(f"#{name}-fault").inner_text()
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    page.click("text=Use 32x32")
    assert page.input_value("#size") == "32x32"
    assert page.locator("#size").get_attribute("aria-invalid") is None
    assert keyed.http.get("/v1/videos").json()["data"] == []


def test_a_first_frame_is_shown_and_used(opened: Any, keyed: Keyed, pictures: tuple[Path, Path]) -> None:
    page = opened()
    page.set_input_files("#input_reference", pictures[0])
    page.locator("#preview").wait_for()
    assert page.evaluate("async () => { await preview.decode(); return preview.naturalWidth; }") == 256
    ask(page, size="256x256")
    watched(page)
    assert [job["task"] for job in keyed.http.get("/v1/videos").json()["data"]] == ["fl2va"]


def test_without_events_the_job_is_asked_for(opened: Any) -> None:
    page = opened(hurry=True)
    page.route("**/events", lambda route: route.abort())
    ask(page, steps=LONG)
    seen = watched(page)
    assert sum(0 < percent < 100 for percent in seen) >= 2


def test_a_download_that_breaks_goes_on_where_it_broke(opened: Any, keyed: Keyed) -> None:
    page = opened()
    asked: list[str | None] = []

    def half(route: Any) -> None:
        asked.append(route.request.headers.get("range"))
        if len(asked) > 1:
            return route.continue_()
        whole = route.fetch().body()
        route.fulfill(status=200, content_type="video/mp4", body=whole[: len(whole) // 2])

    page.route("**/content", half)
    ask(page)
    watched(page)
    (job,) = keyed.http.get("/v1/videos").json()["data"]
    assert asked == [None, f"bytes={job['bytes'] // 2}-"]


def test_a_server_that_is_gone_is_said_and_found_again(opened: Any) -> None:
    page = opened()

    def lost(route: Any) -> None:
        # The order arrives, and its answer does not.
        if route.request.method == "POST":
            route.fetch()
        route.abort()

    page.route("**/v1/**", lost)
    ask(page)
    page.locator("#order-fault", has_text="did not answer").wait_for()
    page.locator("#offline", has_text="does not answer").wait_for()
    page.unroute("**/v1/**")
    page.click("#make")
    watched(page)
    page.locator("#offline").wait_for(state="hidden")
    assert page.locator("#jobs li").count() == 1


def test_a_key_that_is_no_longer_taken_is_asked_for_and_the_job_goes_on(opened: Any) -> None:
    page = opened()
    ask(page, steps=LONG)
    page.locator("#phase", has_text="Denoising, step").wait_for()
    page.evaluate("() => sessionStorage.setItem('h3-key', 'another')")
    page.locator("#key-fault", has_text="does not accept this key").wait_for()
    page.fill("#key", KEY)
    page.click("text=Unlock")
    watched(page)


def test_an_answer_to_the_key_before_does_not_drop_the_new_one(opened: Any, keyed: Keyed) -> None:
    page, held = opened(), []
    page.evaluate("() => sessionStorage.setItem('h3-key', 'another')")
    page.route("**/v1/videos?*", lambda route: held.append(route), times=1)
    with page.expect_request("**/v1/videos?*"):
        page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    ask(page)
    page.locator("#key-fault", has_text="does not accept this key").wait_for()
    page.fill("#key", KEY)
    page.click("text=Unlock")
    page.locator("#key-dialog").wait_for(state="hidden")
    with page.expect_response(lambda answer: answer.status == 401):
        held[0].continue_()
    page.click("#make")
    watched(page)
    assert page.locator("#key-dialog[open]").count() == 0
    assert page.evaluate("() => sessionStorage.getItem('h3-key')") == KEY


def test_a_chosen_clip_survives_a_reload(opened: Any) -> None:
    page = opened()
    ask(page)
    watched(page)
    page.reload()
    watched(page)
    assert page.locator("#jobs li[aria-current=true]").count() == 1


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_fits_a_phone_and_every_control_has_a_name(opened: Any, scheme: str) -> None:
    page = opened(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme=scheme)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(14, 17, 23)") == (scheme == "dark")
    nameless = page.evaluate("""() => {
        const named = (control) => control.labels?.length || control.ariaLabel || control.textContent.trim();
        const controls = [...document.querySelectorAll("input, textarea, button, progress, video, a")];
        return controls.filter((control) => !named(control)).map((control) => control.id);
    }""")
    assert nameless == []
