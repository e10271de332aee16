# SPDX-License-Identifier: Apache-2.0
"""Tiles decoded in batches are the tiles decoded one by one, through the host's adapter; and what happens when not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_h3_plugin.checkpoint.synthetic import tiny_vit
from vllm_h3_plugin.checkpoint.synthetic.vaes import write_vaes
from vllm_h3_plugin.checkpoint.synthetic.vit_vae import PREFIX, VitVae
from vllm_h3_plugin.host.cancel import Cancellation, RequestCancelledError
from vllm_h3_plugin.host.job_worker import JobWorker
from vllm_h3_plugin.pins import installed_host

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("single_precision")
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vae")
    write_vaes(root, tiny_vit(tile=64, overlap=16))
    return root / "video_vae"


@pytest.fixture(scope="module")
def vae(folder: Path) -> Any:
    from vllm_h3_plugin.host.bench.decode import build

    return build(folder, CPU)


def latent(width: int, height: int, steps: int) -> torch.Tensor:
    return torch.randn(1, 24, steps, height // 16, width // 16, generator=torch.Generator().manual_seed(3))


def decoded(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """In bytes, ``[1, 3, T, H, W]``."""
    with torch.autocast("cpu", torch.float16):
        frames = vae.decode_latent(z)
    return frames if frames.dtype is torch.uint8 else (frames * 255).round().to(torch.uint8)


@contextmanager
def batches(vae: Any, most: int | None = None, room: int = 100 * GIB) -> Iterator[Any]:
    from vllm_h3_plugin.host.tiles import TileBatches

    tiles = TileBatches(vae, most=most, room=lambda: room, streaming=True)
    try:
        yield tiles
    finally:
        tiles.remove()


@contextmanager
def failing(decoder: torch.nn.Module, above: int, error: Callable[[], RuntimeError]) -> Iterator[list[int]]:
    """The decoder runs out of memory over more than so many tiles; yields the batches that it was given."""
    seen: list[int] = []

    def look(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0].shape[0])
        if args[0].shape[0] > above:
            raise error()

    hook = decoder.register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("made", [tiny_vit(), VitVae()], ids=["tiny", "true width"])
def test_names_and_shapes_are_those_of_diffusers(made: VitVae) -> None:
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3

    with torch.device("meta"):
        theirs = AutoencoderKLMiniMaxH3(**made.config()["network"]).state_dict()
    ours = {plan.spec.name.removeprefix(PREFIX): plan.spec.shape for plan in made.plans("vae")}
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.items()}


def test_true_width_is_the_default_of_diffusers() -> None:
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3

    defaults = inspect.signature(AutoencoderKLMiniMaxH3.__init__).parameters
    for name, value in VitVae().config()["network"].items():
        default = defaults[name].default
        assert value == (list(default) if isinstance(default, tuple) else default), name


@pytest.mark.parametrize("steps", [5, 7, 12, 13])
def test_the_hosts_decode_of_it_is_diffusers_own(vae: Any, steps: int) -> None:
    """Clips, overlaps, padding and tiles of the interface on top come out as the class below does them."""
    z = latent(96, 64, steps)
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        model = vae.model
        theirs = model.processor.revert_tensor(super(type(model), model)._decode(z).float())
    theirs = (theirs * 255).round().to(torch.uint8)
    ours = decoded(vae, z)
    assert ours.shape == theirs.shape == (1, 3, 17 * (-(-(steps - 2) // 5)) + 5 - padding(steps), 64, 96)
    # 0.30 denormalizes in the decoded type, this line in FP32.
    assert (ours.int() - theirs.int()).abs().max() <= 1


def padding(steps: int) -> int:
    """Frames that are cut off where the latents are no whole number of clips."""
    missing = -(steps + 3) % 5
    return sum(1 if (steps + k) % 5 == 0 else 4 for k in range(missing))


@pytest.mark.parametrize(
    ("width", "height", "steps", "most", "calls"),
    [
        (64, 64, 7, None, 1),  # one tile, one clip
        (160, 96, 7, None, 1),  # six tiles, one clip
        (160, 96, 17, None, 3),  # six tiles, three clips
        (160, 96, 7, 4, 2),  # six tiles by at most four: three and three
        (256, 160, 7, 4, 4),  # fifteen: four, four, four and a ragged three
        (256, 160, 13, 7, 9),  # padded to three clips: five, five, five
    ],
)
def test_a_batch_decodes_what_one_tile_after_the_other_does(
    vae: Any, width: int, height: int, steps: int, most: int | None, calls: int
) -> None:
    z = latent(width, height, steps)
    want = decoded(vae, z)
    with batches(vae, most) as tiles:
        tiles.begin(z)
        got = decoded(vae, z)
        told = tiles.told()
    count = vae._decoder_tile_count(z)
    clips = -(-(steps + 3) // 5) - 1
    assert told == {"tiles": count, "batch": min(count, most or count), "calls": calls, "tiles_done": count * clips} | {
        "reduced": 0
    }
    assert got.equal(want)
    assert decoded(vae, z).equal(want), "the host's own way is back"


def test_seams_are_no_worse_than_the_rest(vae: Any) -> None:
    from vllm_h3_plugin.host.bench.apart import compare

    z = latent(256, 160, 12)
    want = decoded(vae, z)[0]
    with batches(vae):
        got = decoded(vae, z)[0]
    seams = torch.zeros(160, 256, dtype=torch.bool)
    for side, length in ((0, 160), (1, 256)):
        starts, lengths, _ = vae.model.split_tiles(length, True)
        for start, before in zip(starts[1:], starts, strict=False):
            seams.narrow(side, start, before + lengths[0] - start).fill_(True)
    apart = compare(want, got, seams)
    assert apart.seams <= apart.elsewhere + 0.01
    # What a seam looks like to this measure: one tile's worth of pixels that belong elsewhere.
    wrong = want.clone()
    wrong[..., :64, 48:64] = want[..., :64, 0:16]
    assert compare(want, wrong, seams).seams > 1


def test_tiles_in_another_order_would_be_noticed(vae: Any) -> None:
    z = latent(160, 96, 7)
    want = decoded(vae, z)
    with batches(vae):
        run = vae.model._run_tile_tasks
        vae.model._run_tile_tasks = lambda *given: run(*given)[::-1]
        got = decoded(vae, z)
    assert (got.int() - want.int()).abs().max() > 20


@pytest.mark.only_host("nvidia", reason="0.28 does not decode in pieces")
def test_pieces_for_the_encoder_are_the_same(vae: Any) -> None:
    z = latent(160, 96, 12)

    def pieces() -> torch.Tensor:
        found: list[torch.Tensor] = []
        with torch.autocast("cpu", torch.float16):
            vae.decode_with_chunks(z, on_chunk=found.append)
        return torch.cat(found, dim=2)

    want = pieces()
    with batches(vae) as tiles:
        tiles.begin(z)
        got = pieces()
        assert tiles.told()["batch"] == 6 and tiles.told()["calls"] == 2
    assert got.equal(want)


@pytest.mark.parametrize(
    "error",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        lambda: RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_running_out_of_memory_costs_another_try_and_not_the_clip(
    vae: Any, error: Callable[[], RuntimeError], caplog: pytest.LogCaptureFixture
) -> None:
    z = latent(256, 160, 7)
    want = decoded(vae, z)
    with batches(vae) as tiles, failing(vae.model.decoder, 4, error) as seen:
        got = decoded(vae, z)
        told = tiles.told()
    assert seen == [15, 5, *[2] * 7, 1], "half of 15 in even batches is five, half of that two"
    assert (told["batch"], told["reduced"], told["tiles_done"]) == (2, 2, 15)
    assert got.equal(want)


def test_running_out_over_a_single_tile_and_other_faults_are_told(vae: Any) -> None:
    z = latent(160, 96, 7)
    with batches(vae), failing(vae.model.decoder, 0, lambda: torch.OutOfMemoryError("out of memory")) as seen:
        with pytest.raises(torch.OutOfMemoryError):
            decoded(vae, z)
        assert seen == [6, 3, 1]
    with batches(vae), failing(vae.model.decoder, 0, lambda: RuntimeError("a broken kernel")) as seen:
        with pytest.raises(RuntimeError, match="a broken kernel"):
            decoded(vae, z)
        assert seen == [6]
    assert decoded(vae, z).shape == (1, 3, 22, 96, 160), "the next clip is decoded"


def test_the_batch_follows_the_room_and_is_one_where_nothing_more_fits(vae: Any) -> None:
    z = latent(256, 160, 7)
    seen = {}
    for room in (-GIB, 0, 2 * GIB + GIB // 4, 100 * GIB):
        with batches(vae, room=room) as tiles:
            tiles.begin(z)
            decoded(vae, z)
            seen[room] = tiles.told()["batch"]
    assert list(seen.values())[:2] == [1, 1] and 1 < seen[2 * GIB + GIB // 4] < 15 and seen[100 * GIB] == 15


def test_room_is_asked_once_a_clip_and_not_for_what_cannot_grow(vae: Any) -> None:
    from vllm_h3_plugin.host.tiles import TileBatches

    asked = []
    tiles = TileBatches(vae, most=None, room=lambda: asked.append(1) or 100 * GIB, streaming=True)  # type: ignore[func-returns-value]
    try:
        for clip in (latent(160, 96, 12), latent(160, 96, 12), latent(64, 64, 12)):
            tiles.begin(clip)
            assert tiles.told() is None
            decoded(vae, clip)
    finally:
        tiles.remove()
    assert len(asked) == 2


def test_ranks_that_share_the_tiles_need_not_agree_on_a_batch(vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    z = latent(256, 160, 7)
    model, want = vae.model, decoded(vae, z)
    state = vae._native_parallel_state()
    own: dict[int, list[torch.Tensor]] = {}
    monkeypatch.setattr(model, "parallel_tiling", True)
    for rank, most in ((0, 3), (1, 8)):
        with monkeypatch.context() as patch:
            patch.setitem(state, "sp_rank", rank)
            patch.setitem(state, "sp_size", 2)

            def gather(tasks: list[torch.Tensor], count: int, rank: int = rank) -> list[torch.Tensor]:
                own[rank] = tasks
                if len(own) < 2:
                    return [tasks[0]] * count
                return [own[index % 2][index // 2] for index in range(count)]

            patch.setattr(model, "_all_gather_tiled_results", gather)
            with batches(vae, most) as tiles:
                got = decoded(vae, z)
                told = tiles.told()
            assert (told["tiles"], told["batch"]) == ((8, 3), (7, 7))[rank]
    assert got.equal(want)


def test_a_job_is_stopped_between_two_batches(vae: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
    cancellation, calls = Cancellation(), []

    def stop(*given: Any) -> None:
        calls.append(1)
        JobWorker().stop("video_gen_1")

    before = vae.model.decoder.register_forward_hook(stop)
    handles = set(vae.model.decoder._forward_pre_hooks)
    cancellation.install_local(vae.model.decoder)
    try:
        with batches(vae, 2), pytest.raises(RequestCancelledError), cancellation.request("video_gen_1-abc"):
            decoded(vae, latent(160, 96, 7))
    finally:
        before.remove()
        for key in set(vae.model.decoder._forward_pre_hooks) - handles:
            del vae.model.decoder._forward_pre_hooks[key]
    assert calls == [1]


def test_pictures_are_encoded_by_the_checkpoints_own_loop(vae: Any) -> None:
    from PIL import Image

    picture = Image.new("RGB", (96, 64), (200, 40, 90))
    want = vae.encode_image(picture)
    with batches(vae) as tiles:
        assert vae.encode_image(picture).equal(want) and tiles.told() is None
        ran = vae.model._run_tile_tasks([torch.ones(1)] * 3, [2, 0], lambda tile: tile * 2, False, None)
        assert [int(tile) for tile in ran] == [2, 2] and tiles.told() is None


class Model:
    """A VAE's model of some other shape."""

    def __init__(self, run: Any, **attributes: Any) -> None:
        self._run_tile_tasks = run
        self.decode = lambda z: z
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (SimpleNamespace(), "no _run_tile_tasks and decode"),
        (
            Model(
                lambda tiles, indices: [],
            ),
            "takes tiles, indices",
        ),
        (
            Model(
                lambda tiles, tile_indices, forward_fn, stack_tiling, more: [],
            ),
            "stack_tiling, more",
        ),
        (Model(lambda tiles, tile_indices, forward_fn, stack_tiling: [], decoder_parallel=True), "ranks share each"),
        (None, "no video VAE on this rank"),
    ],
)
def test_code_of_another_shape_is_left_alone_and_the_reason_kept(model: Any, words: str) -> None:
    from vllm_h3_plugin.host.tiles import TileBatches

    run = getattr(model, "_run_tile_tasks", None)
    tiles = TileBatches(SimpleNamespace(model=model), most=None, room=lambda: 0, streaming=True)
    facts = tiles.facts()
    assert words in facts["reason"] and facts["most"] == 1 and facts["last"] is None
    assert getattr(model, "_run_tile_tasks", None) is run


def test_one_by_one_can_be_asked_for(vae: Any) -> None:
    with batches(vae, 1) as tiles:
        assert tiles.facts() == {"most": 1, "reason": "H3_DECODE_BATCH=1", "last": None}
        assert "_run_tile_tasks" not in vars(vae.model)


def test_tiles_that_differ_in_size_are_not_stacked() -> None:
    from vllm_h3_plugin.host.tiles import TileBatches

    seen: list[tuple[int, ...]] = []

    class Ragged:
        def _run_tile_tasks(self, tiles: Any, tile_indices: Any, forward_fn: Any, stack_tiling: Any) -> Any:
            raise AssertionError("batched")

        def decode(self, z: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(z.shape))
            return z * 2

    model = Ragged()
    tiles = TileBatches(SimpleNamespace(model=model), most=8, room=lambda: 100 * GIB, streaming=True)
    tiles.begin(torch.zeros(1, 24, 2, 4, 6))
    given = [torch.full((1, 24, 2, 4, width), float(width)) for width in (4, 4, 2, 4)]
    done = model._run_tile_tasks(given, [0, 1, 2, 3], model.decode, False)
    assert seen == [(2, 24, 2, 4, 4), (1, 24, 2, 4, 2), (1, 24, 2, 4, 4)]
    assert all(out.equal(tile * 2) for out, tile in zip(done, given, strict=True))


def test_frames_are_bytes_where_they_were_decoded_before_they_leave(vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 bytes a pixel cross over; nothing of a clip is copied from the device in another type."""
    from vllm_h3_plugin.host import clips

    z = latent(160, 96, 12)
    crossed: list[torch.Tensor] = []
    monkeypatch.setattr(clips, "on_host", lambda planes: crossed.append(planes) or (lambda: planes.numpy()))
    pushed: list[Any] = []
    recording = clips.Recording(SimpleNamespace(failed=False, push=pushed.append), 96, 160)  # type: ignore[arg-type]
    moved = moves(monkeypatch)
    if installed_host().vllm_omni == "0.28.0":
        with torch.autocast("cpu", torch.float16):
            recording.add(vae.decode_latent(z))
    else:
        with torch.autocast("cpu", torch.float16):
            vae.decode_with_chunks(z, on_chunk=recording.add)
    assert len(pushed) == len(crossed) and {planes.dtype for planes in crossed} == {torch.uint8}
    assert sum(planes.nbytes for planes in crossed) == 39 * 96 * 160 * 3 // 2
    assert not moved


def moves(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Types of tensors that somebody takes to the CPU from here on."""
    seen: list[torch.dtype] = []
    original = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        seen.append(tensor.dtype)
        return original(tensor, *args, **named)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    return seen
