# SPDX-License-Identifier: Apache-2.0
"""A pipeline's weights come from a snapshot as they came from the checkpoint, to the bit, and no fault leaves a half.

The host's own DiT and text encoder, filled by ``WeightLoading`` as the pipeline does it, from a small checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.models.minimax_h3.encoder import MiniMaxH3Qwen3VLEncoder
from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import _SingleRankEncoderGroup

from tests.unit.checkpoint.snapshot_kit import kill_self, killed
from vllm_h3_plugin.checkpoint.atomic import temporaries
from vllm_h3_plugin.checkpoint.checksums import weight_files, write_manifest
from vllm_h3_plugin.checkpoint.hash_files import hash_files
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.page_cache import cached_share
from vllm_h3_plugin.checkpoint.snapshot_store import OK, list_snapshots
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, write_checkpoint
from vllm_h3_plugin.conditioning import store as table_store
from vllm_h3_plugin.conditioning.schedule import Roles, schedule
from vllm_h3_plugin.errors import CheckpointError, SnapshotError
from vllm_h3_plugin.host import parts
from vllm_h3_plugin.host.progress import Progress
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.session import make_session
from vllm_h3_plugin.host.standalone import build_dit
from vllm_h3_plugin.host.weights import Loaded, WeightLoading
from vllm_h3_plugin.quantization.recipe import Adaln, load_recipe
from vllm_h3_plugin.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")

SIGMAS = (1.0, 0.75, 0.5, 0.25, 0.0)
DEFAULT = schedule(SIGMAS, SIGMAS, Roles())
OTHER = schedule(SIGMAS, SIGMAS, Roles(image=True))
LAYOUTS = [
    "native",
    pytest.param(
        "diffusers", marks=pytest.mark.only_host("nvidia", reason="0.28 reads no DiT in the Diffusers layout")
    ),
]


class Subject:
    """One checkpoint and one cache folder; each :meth:`load` is a start of its own."""

    def __init__(self, checkpoint: Path, cache: Path, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.cache = cache
        self.device = device

    def loading(self, recipe: str = "fp8", **values: Any) -> tuple[SimpleNamespace, WeightLoading]:
        """The modules that the host's pipeline would have built, unfilled, and what fills them."""
        inventory = take_inventory(self.checkpoint).require_clean()
        session = make_session(load_recipe(recipe), inventory, self.device)
        config = H3QuantizationConfig(session.plan, session.backend) if session.plan.quantized else None
        dit_config = inventory.partitions[0].dit
        assert dit_config is not None
        with self.device:
            encoder = MiniMaxH3Qwen3VLEncoder(
                str(self.checkpoint / "text_encoder"),
                device=self.device,
                load_model=True,
                encoder_group=_SingleRankEncoderGroup(rank=0),
                quant_config=config,
            )
        pipeline = SimpleNamespace(
            device=self.device,
            transformer=build_dit(dit_config, config, self.device, tables=session.plan.recipe.adaln is Adaln.TABLE),
            text_encoder=encoder,
            weights_sources=[
                SimpleNamespace(prefix=f"{name}.", model_or_path=str(self.checkpoint), subfolder=name)
                for name in ("transformer", "text_encoder")
            ],
        )
        settings = Settings(cache_dir=self.cache, **values)
        loading = WeightLoading(
            pipeline, session, settings, Progress(), rank=0, default_schedule={"transformer": DEFAULT}
        )
        return pipeline, loading

    def load(self, recipe: str = "fp8", **values: Any) -> tuple[Loaded, dict[str, torch.Tensor]]:
        """Fill them; every byte that is resident then, by name."""
        pipeline, loading = self.loading(recipe, **values)
        loaded = loading.load()
        state = {
            f"{part}.{name}": tensor.detach()
            for part in ("transformer", "text_encoder")
            for name, tensor in (*getattr(pipeline, part).named_parameters(), *getattr(pipeline, part).named_buffers())
        }
        for name, tables in loading.tables.items():
            assert tables.active is not None
            state[f"table of {name}"] = tables.active.values
        return loaded, state

    def shard(self, part: str = "transformer") -> Path:
        """A weight file of a part with several tensors that is read once: the timestep embedder's is read twice."""
        files = take_inventory(self.checkpoint).partitions[0].part(part).files
        return next(
            file.path
            for file in files
            if len(file.tensors) > 3 and not any(record.name.startswith("time_embedder") for record in file.tensors)
        )

    def assert_nothing_half_done(self, snapshots: int) -> None:
        """So many snapshots, all whole, and no temporary."""
        found = list_snapshots(self.cache)
        assert [info.state for info in found] == [OK] * snapshots
        for folder in ("snapshots", "tables"):
            assert temporaries(self.cache / folder) == ()


@pytest.fixture
def subject(tmp_path: Path, device: torch.device) -> Subject:
    return _subject(tmp_path, device)


def _subject(folder: Path, device: torch.device, **options: Any) -> Subject:
    made = write_checkpoint(folder / "checkpoint", SynthSpec(**options))
    return Subject(made.partitions[0], folder / "cache", device)


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal as bytes."""
    return one.keys() == two.keys() and all(
        a.dtype is b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(one.values(), (two[name] for name in one), strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Through a row: a packed FP8 weight is a transposed view, and a scalar has no last dimension.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", ["fp8", "fp8-tensor", "fp8-text-bf16"])
def test_a_snapshot_fills_the_model_as_the_checkpoint_did(
    recipe: str, layout: str, tmp_path: Path, device: torch.device
) -> None:
    subject = _subject(tmp_path, device, layout=layout, outliers=True)
    first, made = subject.load(recipe)
    second, found = subject.load(recipe)
    assert (first.origin, second.origin) == ("checkpoint", "snapshot")
    assert same(made, found)
    assert first.layers == second.layers and first.filled == second.filled
    quantized = {name.split(".")[0] for name, tensor in made.items() if tensor.dtype is torch.float8_e4m3fn}
    assert quantized == ({"transformer"} if recipe == "fp8-text-bf16" else {"transformer", "text_encoder"})
    subject.assert_nothing_half_done(1)


@pytest.mark.only_host("nvidia", reason="0.28 reads no DiT in the Diffusers layout")
@pytest.mark.parametrize("recipe", ["fp8", "fp8-tensor"])
def test_both_layouts_of_one_model_become_the_same_bytes(recipe: str, tmp_path: Path, device: torch.device) -> None:
    states = []
    for layout in ("native", "diffusers"):
        states.append(_subject(tmp_path / layout, device, layout=layout).load(recipe, snapshot="off")[1])
    assert same(*states)


def test_recipes_have_snapshots_of_their_own_and_one_that_quantizes_nothing_has_none(subject: Subject) -> None:
    for recipe in ("fp8", "fp8-tensor", "bf16", "bf16-table"):
        assert subject.load(recipe)[0].origin == "checkpoint"
    subject.assert_nothing_half_done(2)
    assert subject.load("fp8-tensor")[0].origin == "snapshot"


def test_off_neither_reads_nor_writes(subject: Subject) -> None:
    subject.load(snapshot="off")
    subject.assert_nothing_half_done(0)
    subject.load()
    assert subject.load(snapshot="off")[0].origin == "checkpoint"


def test_require_names_what_is_there_instead(subject: Subject) -> None:
    subject.load()
    times = subject.shard().stat()
    os.utime(subject.shard(), ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    with pytest.raises(SnapshotError, match=r"no snapshot in .*is of source .*H3_SNAPSHOT=auto"):
        subject.load(snapshot="require")
    with pytest.raises(SnapshotError, match=r"bf16 quantizes nothing.*H3_SNAPSHOT=off"):
        subject.load("bf16", snapshot="require")


def test_require_refuses_a_damaged_one_and_leaves_it(subject: Subject) -> None:
    subject.load()
    (snapshot,) = list_snapshots(subject.cache)
    _flip(snapshot.path / "text_encoder.safetensors", -40)
    with pytest.raises(SnapshotError, match=r"text_encoder\.safetensors: tensor .* has BLAKE3") as caught:
        subject.load(snapshot="require")
    assert "snapshot" in caught.value.fix
    assert subject.load()[0].origin == "checkpoint"
    assert subject.load(snapshot="require")[0].origin == "snapshot"


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "no manifest"])
def test_a_damaged_snapshot_is_said_passed_by_and_made_anew(
    damage: str, part: str, subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    _, made = subject.load()
    (snapshot,) = list_snapshots(subject.cache)
    file = snapshot.path / f"{part}.safetensors"
    if damage == "flipped":
        _flip(file, -40)
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size - 40)
    elif damage == "missing":
        file.unlink()
    else:
        (snapshot.path / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        loaded, found = subject.load()
    assert loaded.origin == "checkpoint" and same(made, found)
    assert any(str(snapshot.path) in text and "is not used" in text for text in caplog.messages)
    subject.assert_nothing_half_done(1)
    assert subject.load()[0].origin == "snapshot"


def test_a_full_disk_costs_the_snapshot_and_not_the_load(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, count = os.pwrite, 0

    def full(*args: Any) -> int:
        nonlocal count
        count += 1
        if count > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        loaded, made = subject.load()
    assert loaded.origin == "checkpoint" and "No space left" in loaded.detail
    assert any("H3_CACHE_DIR" in text and "No space left" in text for text in caplog.messages)
    subject.assert_nothing_half_done(0)
    monkeypatch.undo()
    assert same(made, subject.load()[1])
    subject.assert_nothing_half_done(1)


def test_a_cache_folder_that_cannot_be_made_costs_nothing_but_what_it_would_have_kept(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    subject.cache.write_text("a file")
    with caplog.at_level(logging.WARNING):
        loaded, _ = subject.load()
    assert loaded.origin == "checkpoint" and loaded.detail == "no snapshot written"
    assert any("snapshot is not written" in text for text in caplog.messages)
    assert any("tables are not kept on disk" in text for text in caplog.messages)


def test_a_file_system_without_locks_costs_what_would_have_been_kept(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    (subject.cache / "tables").mkdir(parents=True)
    (subject.cache / "tables" / f".table.{'0' * 12}.tmp").touch()  # what a sweep would lock
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING):
        pipeline, loading = subject.loading()
        assert loading.load().detail == "no snapshot written"
        loading.tables["transformer"].activate(OTHER)
    assert sum("has no file locks" in text for text in caplog.messages) == 2
    assert pipeline.transformer.time_embedder.table.schedule == OTHER


def test_a_table_of_one_host_is_not_anothers(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hosts run on the same torch, and nothing says that their projections round alike."""
    for host in ("this", "that", "this"):
        monkeypatch.setattr(parts, "installed_host", lambda host=host: host)
        subject.load(snapshot="off")
    assert len(list((subject.cache / "tables").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("when", ["while it is written", "before it has its name"])
def test_a_server_killed_during_its_snapshot_leaves_what_the_next_one_sweeps(when: str, subject: Subject) -> None:
    def act() -> None:
        write, count = os.pwrite, 0

        def slow_death(*args: Any) -> int:
            nonlocal count
            count += 1
            if count > 8:
                kill_self()
            return write(*args)

        if when == "while it is written":
            os.pwrite = slow_death  # type: ignore[assignment]
        else:
            Path.rename = kill_self  # type: ignore[assignment,method-assign]
        subject.load()

    killed(act)
    assert temporaries(subject.cache / "snapshots") != ()
    loaded, _ = subject.load()
    assert loaded.origin == "checkpoint" and "written" in loaded.detail
    subject.assert_nothing_half_done(1)
    assert subject.load()[0].origin == "snapshot"


@pytest.mark.parametrize("when", ["between two layers", "while its file is written"])
def test_a_server_killed_during_a_table_leaves_what_the_next_one_sweeps(when: str, subject: Subject) -> None:
    subject.load()

    def act() -> None:
        _, loading = subject.loading()
        loading.load()
        tables = loading.tables["transformer"]
        if when == "between two layers":
            layers = tables.begin(OTHER)
            layers.finish = kill_self  # type: ignore[method-assign,assignment]
            tables.begin = lambda schedule: layers  # type: ignore[method-assign,assignment]
        else:

            def save_half(tensors: Any, path: Path, notes: Any) -> None:
                path.write_bytes(b"half")
                kill_self()

            table_store.save_file = save_half  # type: ignore[assignment]
        tables.activate(OTHER)

    killed(act)
    left = temporaries(subject.cache / "tables")
    assert bool(left) is (when == "while its file is written")
    _, loading = subject.loading()
    loading.load()
    tables = loading.tables["transformer"]
    assert tables.built == 0
    tables.activate(OTHER)
    assert tables.built == 1 and tables.store.on_disk(OTHER)
    subject.assert_nothing_half_done(1)


def _at_first_read(monkeypatch: pytest.MonkeyPatch, file: Path, act: Callable[[], object]) -> None:
    """Do something once the first bytes of a file have been read."""
    read, done = os.preadv, False

    def reading(descriptor: int, *args: Any) -> int:
        nonlocal done
        size = read(descriptor, *args)
        if not done and os.readlink(f"/proc/self/fd/{descriptor}") == str(file):
            done = True
            act()
        return size

    monkeypatch.setattr(os, "preadv", reading)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_shard_that_is_replaced_while_it_is_read_is_named_and_no_snapshot_is_made(
    part: str, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = subject.shard(part)
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes())
    _at_first_read(monkeypatch, file, lambda: other.replace(file))
    with pytest.raises(CheckpointError, match="changed while the checkpoint was in use") as caught:
        subject.load()
    assert str(file) in str(caught.value) and "start again" in caught.value.fix
    subject.assert_nothing_half_done(0)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_shard_that_is_cut_off_while_it_is_read_is_named_with_the_byte(
    part: str, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = subject.shard(part)
    end = file.stat().st_size // 2
    _at_first_read(monkeypatch, file, lambda: os.truncate(file, end))
    with pytest.raises(CheckpointError, match=r"ends at byte \d+") as caught:
        subject.load(read_threads=1)
    assert caught.value.details["path"] == str(file) and caught.value.details["offset"] >= end
    subject.assert_nothing_half_done(0)


def _checksums(subject: Subject, manifest: Path) -> Path:
    files = weight_files(take_inventory(subject.checkpoint).require_clean())
    found = {hashed.path: hashed.sha256 for hashed in hash_files(files.values())}
    write_manifest(manifest, {name: found[file.path] for name, file in files.items()})
    assert len(manifest.read_text().splitlines()) == len(files)
    return manifest


def test_checksums_that_fit_let_the_load_pass(subject: Subject, tmp_path: Path) -> None:
    _, made = subject.load(verify_checksums=_checksums(subject, tmp_path / "SHA256SUMS"))
    assert same(made, subject.load(snapshot="off")[1])


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_flipped_byte_that_nothing_else_shows_is_found_by_its_shards_digest(
    part: str, subject: Subject, tmp_path: Path
) -> None:
    manifest, file = _checksums(subject, tmp_path / "SHA256SUMS"), subject.shard(part)
    expected = next(line.split()[0] for line in manifest.read_text().splitlines() if line.endswith(file.name))
    _flip(file, -40)
    subject.load(snapshot="off")
    with pytest.raises(CheckpointError, match=r"has SHA-256 [0-9a-f]{64}: it should have [0-9a-f]{64}") as caught:
        subject.load(verify_checksums=manifest)
    details = caught.value.details
    assert details["path"] == str(file) and details["expected"] == expected != details["found"]
    subject.assert_nothing_half_done(0)


def test_nothing_that_was_read_stays_in_the_page_cache(subject: Subject) -> None:
    files = [file for file in subject.checkpoint.rglob("*.safetensors") if "vae" not in str(file.parent)]
    for file in files:  # pages that wait for the disk cannot be dropped
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    for origin in ("checkpoint", "snapshot"):
        assert subject.load()[0].origin == origin
        assert cached_share(files) <= 0.02
    (snapshot,) = list_snapshots(subject.cache)
    assert cached_share(snapshot.path.glob("*.safetensors")) <= 0.02


def test_what_info_shows_of_a_load_is_json_with_seconds_and_bytes(subject: Subject) -> None:
    from vllm_h3_plugin.host.weights import summary

    facts = json.loads(json.dumps(summary(subject.load()[0])))
    assert facts["nbytes"] > 0 and facts["seconds"]["total"] > 0 and facts["origin"] == "checkpoint"


def _flip(path: Path, offset: int) -> None:
    """Flip one bit and keep size and time of change."""
    times = path.stat()
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
