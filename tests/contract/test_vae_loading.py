# SPDX-License-Identifier: Apache-2.0
"""The VAEs are streamed to the device and are those that the host would have built, or are built in the host's way."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.inventory import PartInventory, PartitionInventory, take_inventory
from vllm_h3_plugin.checkpoint.page_cache import cached_share
from vllm_h3_plugin.checkpoint.safetensors_header import read_header
from vllm_h3_plugin.checkpoint.synthetic import write_checkpoint
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec, tiny_dit
from vllm_h3_plugin.errors import CheckpointError

CPU = torch.device("cpu")
MOST_CACHED = 0.02
ADAPTERS = {"video_vae": "MiniMaxH3VideoVAE", "audio_vae": "MiniMaxH3AudioVAE"}

CODE = """
import json
import os
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn


class Network(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("window", torch.kaiser_window(width), persistent=False)
{init}

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale * self.window


class Vae(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    @classmethod
    def from_pretrained(cls, path):
        file = str(Path(path) / "weights.safetensors")
        model = Network(*json.loads(Path(path, "config.json").read_text())["wide_and_deep"])
{load}
        return cls(model)
"""
LOAD_FILE = "model.load_state_dict(load_file(file))"


@pytest.fixture(scope="module", autouse=True)
def _world(device: torch.device, one_thread: None) -> None:
    """The host's modules ask for a distributed world when they are imported or built."""


@pytest.fixture(autouse=True)
def _single_precision(_world: None) -> Iterator[None]:
    """A VAE's parameters are FP32, whatever the default dtype of the contract tests."""
    outside = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(outside)


@pytest.fixture(scope="module")
def host_vae(device: torch.device) -> Any:
    from vllm_omni.diffusion.models.minimax_h3 import vae

    return vae


@pytest.fixture(scope="module")
def synthetic(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vaes") / "H3"
    return write_checkpoint(root, SynthSpec(dit=tiny_dit(layers=1))).partitions[0]


def trust(function: Any) -> dict[str, bool]:
    return {"trust_remote_code": True} if "trust_remote_code" in inspect.signature(function).parameters else {}


def adapter(host_vae: Any, folder: Path, **options: Any) -> Any:
    cls = getattr(host_vae, ADAPTERS[folder.name])
    return cls(str(folder), device=CPU, load_device=CPU, **trust(cls), **options)


def sync(folder: Path) -> None:
    """Pages that are still to be written cannot be dropped from the page cache."""
    for path in folder.glob("**/*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    tensors = [{**dict(vae.named_parameters()), **dict(vae.named_buffers())} for vae in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert not tensor.is_meta and tensor.dtype is tensors[1][name].dtype, name
        assert torch.equal(tensor, tensors[1][name]), name


class MadeVae:
    """A VAE with code of its own in a folder, loaded by the host's function."""

    def __init__(
        self, host_vae: Any, folder: Path, *, load: str = LOAD_FILE, init: str = "", width: int = 32, depth: int = 2
    ) -> None:
        folder.mkdir(parents=True)
        self.host_vae = host_vae
        self.folder = folder
        self.config = {"auto_map": {"AutoModel": f"{folder.name}.Vae"}, "wide_and_deep": [width, depth]}
        (folder / "config.json").write_text(json.dumps(self.config))
        code = CODE.format(init=indent(dedent(init), " " * 8), load=indent(dedent(load), " " * 8))
        (folder / f"{folder.name}.py").write_text(code)

    def write(self, tensors: dict[str, torch.Tensor], name: str = "weights.safetensors") -> MadeVae:
        safetensors.torch.save_file(tensors, self.folder / name)
        sync(self.folder)
        return self

    @property
    def partition(self) -> PartitionInventory:
        headers = [read_header(path, FaultLog()) for path in sorted(self.folder.glob("*.safetensors"))]
        files = tuple(header for header in headers if header is not None)
        tensors = tuple(tensor for file in files for tensor in file.tensors)
        part = PartInventory("video_vae", self.folder, files, tensors)
        return PartitionInventory("FL2VA", self.folder.parent, (), (part,), None, None)

    def by_host(self) -> nn.Module:
        load = self.host_vae._load_remote_component
        with torch.random.fork_rng():
            return load(str(self.folder), self.config, **trust(load)).float()

    def streamed(self) -> tuple[nn.Module, Any]:
        from vllm_h3_plugin.host.vae_loading import streamed_vaes

        options = trust(self.host_vae._load_remote_component)
        with streamed_vaes([self.partition], CPU) as loads:
            module = self.host_vae._load_remote_component(str(self.folder), self.config, **options)
        assert [load.part for load in loads] == ["video_vae"]
        return module.float(), loads[0]

    def cached(self) -> float:
        return cached_share(self.folder.glob("*.safetensors"))


def plain_tensors(width: int = 32, depth: int = 2) -> dict[str, torch.Tensor]:
    """Tensors of the plain ``Network``."""
    random = torch.Generator().manual_seed(1)
    tensors = {"scale": torch.rand(width, generator=random)}
    for layer in range(depth):
        tensors[f"layers.{layer}.weight"] = torch.randn(width, width, generator=random)
        tensors[f"layers.{layer}.bias"] = torch.randn(width, generator=random)
    return tensors


@pytest.fixture
def made(host_vae: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., MadeVae]]:
    count = iter(range(100))
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)
    yield lambda **options: MadeVae(host_vae, tmp_path / f"vae_{name}_{next(count)}", **options)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_synthetic_vae_is_the_host_s_bit_for_bit(host_vae: Any, synthetic: Path, name: str) -> None:
    from vllm_h3_plugin.host.vae_loading import streamed_vaes

    folder = synthetic / name
    sync(folder)
    expected = adapter(host_vae, folder)
    inventory = take_inventory(synthetic).require_clean()
    with streamed_vaes(inventory.partitions, CPU) as loads:
        vae = adapter(host_vae, folder)
    assert [(load.part, load.streamed, load.reason) for load in loads] == [(name, True, "")]
    assert loads[0].nbytes == inventory.partitions[0].part(name).nbytes and loads[0].seconds > 0
    assert cached_share(folder.glob("*.safetensors")) <= MOST_CACHED
    assert_same_state(vae, expected)
    shape = (1, 24, 6, 4, 6) if name == "video_vae" else (2, 32, 40)
    latents = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(vae.decode_latent(latents), expected.decode_latent(latents))


@pytest.mark.only_host("nvidia", reason="0.28 has no half VAEs")
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_decode_only_vae_keeps_its_decoder(host_vae: Any, synthetic: Path, name: str) -> None:
    from vllm_h3_plugin.host.vae_loading import streamed_vaes

    with streamed_vaes(take_inventory(synthetic).partitions, CPU) as loads:
        vae = adapter(host_vae, synthetic / name, decode_only=True)
    assert loads[0].streamed and not hasattr(vae.model, "encoder")
    assert_same_state(vae, adapter(host_vae, synthetic / name, decode_only=True))


@pytest.mark.only_host("nvidia", reason="0.28 has no half VAEs")
def test_an_encode_only_vae_reads_its_encoder_alone(made: Callable[..., MadeVae], host_vae: Any) -> None:
    from vllm_h3_plugin.host.vae_loading import streamed_vaes

    init = """
        self.encoder, self.quant_conv = nn.Linear(width, width), nn.Linear(width, width)
        self.decoder, self.post_quant_conv = nn.Linear(width, width), nn.Linear(width, width)
        del self.layers
    """
    vae = made(init=init)
    code = vae.folder / f"{vae.folder.name}.py"
    code.write_text(
        code.read_text()
        + dedent("""
            class Source(Network):
                load_config = classmethod(lambda cls, path: {})
                from_config = classmethod(lambda cls, config, **kwargs: (cls(), {}))

            _SOURCE_CLASSES = {"Source": Source}
        """)
    )
    halves = ("encoder", "quant_conv", "decoder", "post_quant_conv")
    shapes = {"weight": (32, 32), "bias": (32,)}
    vae.write({f"{half}.{kind}": torch.rand(shape) for half in halves for kind, shape in shapes.items()})
    names: tuple[str, ...] = (
        "clip_length",
        "token_drop",
        "encoder_tiling",
        "decoder_tiling",
        "parallel_tiling",
        "tile_size",
    )
    names += ("tile_overlap_min", "encoder_parallel", "decoder_parallel", "chunk_dim")
    config = {**vae.config, **{f"vae_{name}": 0 for name in names}, "source_class_name": "Source", "source_path": "."}
    config["source_safetensors_path"] = "weights.safetensors"
    # The buffer is no part of either half in a real VAE; here it would be missing from the file.
    code.write_text(code.read_text().replace('self.register_buffer("scale", torch.ones(width))', "self.scale = 1"))
    expected = host_vae._load_video_vae_encoder(str(vae.folder), config)
    with streamed_vaes([vae.partition], CPU) as loads:
        half = host_vae._load_video_vae_encoder(str(vae.folder), config)
    assert loads[0].streamed, loads[0].reason
    assert_same_state(half, expected)


WAYS_TO_READ = {
    "load_file, imported by name": LOAD_FILE,
    "load_file of the module": "model.load_state_dict(safetensors.torch.load_file(file, device='cpu'))",
    "safe_open, imported by name": """
        with safe_open(file, framework="pt", device="cpu") as opened:
            assert opened.metadata() is None
            model.load_state_dict({name: opened.get_tensor(name) for name in opened.keys()}, strict=True)
    """,
    "safe_open of the module": """
        with safetensors.safe_open(file, "pt") as opened:
            model.load_state_dict({name: opened.get_tensor(name) for name in opened.offset_keys()})
    """,
    "slices": """
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
        assert slices["scale"].get_shape() == [32] and slices["scale"].get_dtype() == "F32"
        model.load_state_dict({name: part[:] for name, part in slices.items()})
    """,
    "load_model": "safetensors.torch.load_model(model, file)",
    "renamed": """
        tensors = {"model." + name: tensor for name, tensor in load_file(file).items()}
        wrapped = cls(model)
        wrapped.load_state_dict(tensors)
    """,
}


@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_every_way_of_reading_safetensors_is_streamed(made: Callable[..., MadeVae], way: str) -> None:
    vae = made(load=WAYS_TO_READ[way]).write(plain_tensors())
    for _ in range(2):  # the second time the VAE's code is imported already
        module, load = vae.streamed()
        assert load.streamed, load.reason
        assert_same_state(module, vae.by_host())
        x = torch.ones(1, 32)
        assert torch.equal(module.model(x), vae.by_host().model(x))


@pytest.mark.parametrize("norm", ["nn.utils.weight_norm", "nn.utils.parametrizations.weight_norm"])
@pytest.mark.parametrize("removed", [False, True])
def test_weight_norm_is_streamed(made: Callable[..., MadeVae], norm: str, removed: bool) -> None:
    init = f"self.layers = nn.ModuleList({norm}(layer) for layer in self.layers)"
    after = "for layer in model.layers: nn.utils.remove_weight_norm(layer)"
    if "parametrizations" in norm:
        after = "for layer in model.layers: nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
    vae = made(init=init, load=LOAD_FILE + ("\n" + after if removed else ""))
    tensors = plain_tensors()
    for layer in range(2):
        tensors[f"layers.{layer}.weight_v"] = tensors.pop(f"layers.{layer}.weight")
        tensors[f"layers.{layer}.weight_g"] = torch.rand(32, 1)
    vae.write(tensors)
    module, load = vae.streamed()
    assert load.streamed, load.reason
    assert_same_state(module, vae.by_host())
    x = torch.ones(1, 32)
    assert torch.equal(module.model(x), vae.by_host().model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_file_of_another_dtype_is_rounded_as_by_the_host(made: Callable[..., MadeVae], dtype: torch.dtype) -> None:
    vae = made(init="self.layers[1].to(torch.float16); self.scale = self.scale.bfloat16()")
    vae.write({name: tensor.to(dtype) for name, tensor in plain_tensors().items()})
    module, load = vae.streamed()
    assert load.streamed, load.reason
    assert_same_state(module, vae.by_host())


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_diffusers_own_loading_is_streamed(
    made: Callable[..., MadeVae], low_cpu_mem_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = f"model = Mixed.from_pretrained(path, low_cpu_mem_usage={low_cpu_mem_usage}, use_safetensors=True)"
    vae = made(load=load)
    code = vae.folder / f"{vae.folder.name}.py"
    code.write_text(
        code.read_text()
        + dedent("""
            from diffusers import ConfigMixin, ModelMixin
            from diffusers.configuration_utils import register_to_config

            class Mixed(ModelMixin, ConfigMixin):
                config_name = "config.json"

                @register_to_config
                def __init__(self):
                    super().__init__()
                    self.network = Network()
        """)
    )
    vae.write({f"network.{k}": v for k, v in plain_tensors().items()}, "diffusion_pytorch_model.safetensors")
    module, result = vae.streamed()
    assert result.streamed, result.reason
    assert_same_state(module, vae.by_host())


FALLBACKS = {
    "open and frombuffer": (
        "",
        """
        data = bytearray(open(file, "rb").read())
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        model.load_state_dict({
            name: torch.frombuffer(data, dtype=torch.float32, offset=start + entry["data_offsets"][0],
                                   count=(entry["data_offsets"][1] - entry["data_offsets"][0]) // 4)
            .view(entry["shape"])
            for name, entry in header.items() if name != "__metadata__"
        })
        """,
        "does not read its weights through safetensors",
    ),
    "a value in the constructor": ("self.level = float(self.layers[0].weight.sum())", LOAD_FILE, "RuntimeError"),
    "a tensor from a value": ("self.level = self.layers[0].weight.abs().max()", LOAD_FILE, "model.level was computed"),
    "copies into parameters": (
        "",
        """
        for name, tensor in load_file(file).items():
            model.state_dict()[name].copy_(tensor)
        """,
        "model.layers.0.weight got no value",
    ),
    "an error": ("if self.layers[0].weight.is_meta: raise OSError('not\\nlike this')", LOAD_FILE, "OSError: not"),
    "a parameter that is not in the file": (
        "self.gain = nn.Parameter(torch.ones(width))",
        "model.load_state_dict(load_file(file), strict=False)",
        "model.gain got no value",
    ),
    "a tensor from elsewhere": (
        "",
        """
        tensors = {}
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys() if name != "scale"}
        model.load_state_dict(tensors, strict=False)
        """,
        "tensor scale was not read",
    ),
}


@pytest.mark.parametrize("what", FALLBACKS)
def test_a_vae_that_cannot_be_streamed_is_built_in_the_host_s_way(made: Callable[..., MadeVae], what: str) -> None:
    init, load, reason = FALLBACKS[what]
    vae = made(init=init, load=load).write(plain_tensors(width=256), "weights.safetensors")
    vae = _widened(vae, 256)
    module, result = vae.streamed()
    assert not result.streamed and reason in result.reason and "\n" not in result.reason
    if what not in {"a parameter that is not in the file"}:
        assert_same_state(module, vae.by_host())
    assert not any(tensor.is_meta for tensor in module.state_dict().values())


def _widened(vae: MadeVae, width: int) -> MadeVae:
    vae.config["wide_and_deep"] = [width, 2]
    (vae.folder / "config.json").write_text(json.dumps(vae.config))
    return vae


def test_pages_are_dropped_after_the_host_s_way_too(made: Callable[..., MadeVae]) -> None:
    vae = made(width=512, init="float(self.layers[0].weight[0, 0])").write(plain_tensors(512))
    vae.by_host()
    assert vae.cached() > 0.5
    _, load = vae.streamed()
    assert not load.streamed and vae.cached() <= MOST_CACHED


def test_an_error_of_the_vae_s_own_is_raised_as_by_the_host(made: Callable[..., MadeVae]) -> None:
    vae = made(init="raise OSError('the ninth planet')").write(plain_tensors())
    with pytest.raises(OSError, match="the ninth planet"):
        vae.streamed()


@pytest.mark.parametrize("load", [LOAD_FILE, f"try: {LOAD_FILE}\nexcept Exception: pass"])
def test_a_file_that_changed_is_an_error_whatever_the_vae_s_code_makes_of_it(
    made: Callable[..., MadeVae], load: str
) -> None:
    from vllm_h3_plugin.host.vae_loading import streamed_vaes

    vae = made(load=load).write(plain_tensors())
    partition = vae.partition
    file = vae.folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    build = vae.host_vae._load_remote_component
    with pytest.raises(CheckpointError, match=r"weights\.safetensors") as caught, streamed_vaes([partition], CPU):
        vae.host_vae._load_remote_component(str(vae.folder), vae.config, **trust(build))
    assert "start again" in caught.value.fix


WAYS_TO_VERIFY = [LOAD_FILE, WAYS_TO_READ["safe_open, imported by name"], FALLBACKS["open and frombuffer"][1]]


@pytest.mark.parametrize("load", WAYS_TO_VERIFY, ids=["load_file", "safe_open", "the host's way"])
def test_every_file_is_held_against_its_digest_however_it_is_read(made: Callable[..., MadeVae], load: str) -> None:
    from vllm_h3_plugin.host.vae_loading import streamed_vaes

    vae = made(load=load).write(plain_tensors())
    file = vae.folder / "weights.safetensors"
    build = vae.host_vae._load_remote_component
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with streamed_vaes([vae.partition], CPU, file_digests={file: digest}):
        module = vae.host_vae._load_remote_component(str(vae.folder), vae.config, **trust(build))
    assert_same_state(module.float(), vae.by_host())
    with (
        pytest.raises(CheckpointError, match=r"weights\.safetensors") as caught,
        streamed_vaes([vae.partition], CPU, file_digests={file: "0" * 64}),
    ):
        vae.host_vae._load_remote_component(str(vae.folder), vae.config, **trust(build))
    assert caught.value.fix


@pytest.mark.parametrize("init", ["", "raise OSError('no')"])
def test_nothing_stays_replaced(made: Callable[..., MadeVae], init: str) -> None:
    import accelerate.utils

    vae = made(init=init).write(plain_tensors())

    def globals_now() -> list[Any]:
        return [
            nn.Module.register_parameter,
            nn.Module._load_from_state_dict,
            nn.Module.load_state_dict,
            safetensors.safe_open,
            safetensors.torch.safe_open,
            safetensors.torch.load_file,
            accelerate.utils.set_module_tensor_to_device,
            vae.host_vae._load_remote_component,
        ]

    before = globals_now()
    try:
        vae.streamed()
    except OSError:
        assert init
    assert all(now is then for now, then in zip(globals_now(), before, strict=True))
    code = next(module for name, module in sys.modules.items() if name.endswith(f".{vae.folder.name}"))
    assert code.safe_open is safetensors.safe_open and code.load_file is safetensors.torch.load_file


def test_a_vae_that_is_not_in_the_inventory_is_the_host_s_own(made: Callable[..., MadeVae]) -> None:
    from vllm_h3_plugin.host.vae_loading import streamed_vaes

    one, other = made().write(plain_tensors()), made().write(plain_tensors())
    options = trust(one.host_vae._load_remote_component)
    with streamed_vaes([other.partition], CPU) as loads:
        module = one.host_vae._load_remote_component(str(one.folder), one.config, **options)
    assert loads == []
    assert_same_state(module.float(), one.by_host())


def test_progress_counts_the_bytes_of_the_part(made: Callable[..., MadeVae]) -> None:
    from vllm_h3_plugin.host.vae_loading import streamed_vaes

    vae = made(load=WAYS_TO_READ["safe_open, imported by name"]).write(plain_tensors())
    seen: list[tuple[str, int, int]] = []
    options = trust(vae.host_vae._load_remote_component)
    with streamed_vaes(
        [vae.partition], CPU, progress=lambda name: lambda done, total: seen.append((name, done, total))
    ) as loads:
        vae.host_vae._load_remote_component(str(vae.folder), vae.config, **options)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("loading video_vae", loads[0].nbytes, loads[0].nbytes)


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def growth_over(build: Callable[[], nn.Module]) -> tuple[nn.Module, int]:
    """The module and by how much this process was larger at its largest than before, resident tensors left out."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept would count as room for what comes
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status_bytes("VmRSS")
    module = build()
    resident = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    return module, status_bytes("VmHWM") - before - resident


def test_a_large_vae_takes_no_second_copy_in_host_memory(
    made: Callable[..., MadeVae], record_property: Callable[[str, object], None]
) -> None:
    """25 layers of 16 MiB: the host's way has random numbers, mapped pages and the tensors; this one the tensors."""
    vae = made(width=2048, depth=25).write(plain_tensors(2048, 25))
    size = vae.partition.parts[0].nbytes
    shares = {}
    for name, build in (("streamed", lambda: vae.streamed()[0]), ("host", vae.by_host)):
        module, growth = growth_over(build)
        shares[name] = growth / size
        if name == "streamed":
            assert vae.cached() <= MOST_CACHED
            on_disk = safetensors.torch.load_file(vae.folder / "weights.safetensors")
            assert all(torch.equal(tensor, on_disk[key]) for key, tensor in module.model.state_dict().items())
        del module
    record_property("vae_host_peak_over_resident", shares)
    assert shares["streamed"] < 0.25 < shares["host"], shares
