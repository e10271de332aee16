# SPDX-License-Identifier: Apache-2.0
"""launch/image.lock is the one place for pins: locks agree with it, and other versions of a host are refused."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.environment import BOOT_LOCK, ROOT
from vllm_h3_plugin import pins
from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.pins import HostPin, host_for, installed_host, load_pins, parse_pins

HOSTS = load_pins().hosts
LOCKED_LINE = re.compile(r"^(?P<requirement>[A-Za-z0-9][^\\]*?) \\$")
HASH_LINE = re.compile(r"^    --hash=sha256:(?P<sha256>[0-9a-f]{64})( \\)?$")


def read_lock(text: str) -> dict[str, tuple[list[Requirement], set[str]]]:
    """Name -> (locked requirements, hashes). Any line that is neither one of these nor a comment is a fault."""
    locked: dict[str, tuple[list[Requirement], set[str]]] = {}
    hashes: set[str] = set()
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if found := HASH_LINE.match(line):
            hashes.add(found["sha256"])
            continue
        found = LOCKED_LINE.match(line)
        assert found, f"neither a locked requirement nor a hash: {line!r}"
        requirement = Requirement(found["requirement"])
        requirements, hashes = locked.setdefault(canonicalize_name(requirement.name), ([], set()))
        requirements.append(requirement)
    return locked


@pytest.fixture(params=HOSTS, ids=lambda pin: pin.name)
def pin(request: pytest.FixtureRequest) -> HostPin:
    return request.param


def test_the_default_host_comes_first_and_every_image_with_a_digest_is_pinned() -> None:
    assert [host.name for host in HOSTS] == ["nvidia", "ascend"]
    assert load_pins().host("nvidia").image.pinned == (
        f"{load_pins().host('nvidia').image.reference}@{load_pins().host('nvidia').image.digest}"
    )
    for host in HOSTS:
        assert host.image.digest is None or re.fullmatch(r"sha256:[0-9a-f]{64}", host.image.digest)
        assert host.image.reference.endswith(f":v{host.vllm_omni}")


def test_the_ascend_image_has_no_digest_so_nothing_can_take_the_tag_for_a_pin() -> None:
    assert load_pins().host("ascend").image.pinned is None


def test_a_lock_file_pins_the_hosts_wheels(pin: HostPin) -> None:
    locked = read_lock((ROOT / pin.requirements).read_text())
    for name, wanted in (("vllm", pin.vllm), ("vllm-omni", pin.vllm_omni)):
        requirements, hashes = locked[name]
        assert [str(requirement.specifier) for requirement in requirements] == [f"=={wanted}"]
        wheels = [wheel for wheel in pin.wheels if wheel.file.startswith(f"{name.replace('-', '_')}-{wanted}-")]
        assert wheels
        assert {wheel.sha256 for wheel in wheels} <= hashes


def test_a_host_has_a_wheel_for_each_architecture(pin: HostPin) -> None:
    for architecture in ("x86_64", "aarch64"):
        assert any(
            wheel.file.startswith("vllm-") and wheel.file.endswith(f"{architecture}.whl") for wheel in pin.wheels
        )


@pytest.mark.parametrize("path", [*(host.requirements for host in HOSTS), str(BOOT_LOCK.relative_to(ROOT))])
def test_every_locked_requirement_is_exact_and_hashed_and_names_no_index(path: str) -> None:
    text = (ROOT / path).read_text()
    assert "://" not in text
    locked = read_lock(text)
    assert locked
    for name, (requirements, hashes) in locked.items():
        assert hashes, f"{name} has no hash"
        assert all(str(requirement.specifier).startswith("==") for requirement in requirements), name


def test_a_requirement_without_a_hash_is_seen() -> None:
    assert read_lock("thing==1.0 \\\n    --hash=sha256:" + "a" * 64 + "\nother==2 \\\n")["other"][1] == set()
    with pytest.raises(AssertionError, match="other==2"):
        read_lock("other==2\n")


def test_the_locks_satisfy_what_the_project_asks_for(pin: HostPin) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    tools = [line for line in (ROOT / "requirements" / "test.in").read_text().splitlines() if line[:1].isalpha()]
    locked = read_lock((ROOT / pin.requirements).read_text())
    for text in (*project, *tools):
        wanted = Requirement(text)
        found = locked.get(canonicalize_name(wanted.name))
        assert found, f"{wanted.name} is not in {pin.requirements}: run `make lock`"
        for requirement in found[0]:
            version = str(requirement.specifier).removeprefix("==")
            assert wanted.specifier.contains(version), f"{requirement} does not fit {wanted}: run `make lock`"


def test_digests_and_wheel_hashes_stand_in_no_second_place() -> None:
    pinned = [host.image.digest for host in HOSTS if host.image.digest]
    pinned += [wheel.sha256 for host in HOSTS for wheel in host.wheels]
    allowed = {ROOT / "launch" / "image.lock", *(ROOT / host.requirements for host in HOSTS)}
    sources = [path for folder in ("vllm_h3_plugin", "tools", "launch", ".ci") for path in (ROOT / folder).rglob("*")]
    for path in [*sources, ROOT / "Makefile", ROOT / "pyproject.toml"]:
        if path.is_file() and path.resolve() not in allowed and path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [digest for digest in pinned if digest in text], f"{path} repeats a pin of launch/image.lock"


def test_the_pinned_pairs_are_accepted(pin: HostPin) -> None:
    assert host_for(pin.vllm, pin.vllm_omni) is pin


def test_a_local_build_of_the_pinned_version_is_accepted(pin: HostPin) -> None:
    assert host_for(f"{pin.vllm}+cu130", pin.vllm_omni) is pin


@pytest.mark.parametrize(
    ("vllm", "omni"), [("0.26.0", "0.26.0"), ("0.30.0", "0.28.0"), ("0.30.0.post1", "0.30.0"), ("0.30.0rc1", "0.30.0")]
)
def test_another_host_is_refused_with_both_named(vllm: str, omni: str) -> None:
    with pytest.raises(HostError) as caught:
        host_for(vllm, omni)
    message = str(caught.value)
    assert f"vLLM {vllm} + vLLM-Omni {omni}" in message
    for host in HOSTS:
        assert f"vLLM {host.vllm} + vLLM-Omni {host.vllm_omni}" in message
    assert "make setup" in message


def test_a_missing_host_names_the_package_and_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(pins, "version", version)
    with pytest.raises(HostError, match=r"vllm is not installed.*make setup"):
        installed_host()


def test_an_unknown_host_name_lists_the_known_ones() -> None:
    with pytest.raises(HostError, match=r"unknown host 'amd'.*nvidia, ascend"):
        load_pins().host("amd")


def test_a_default_that_is_no_host_is_a_broken_file() -> None:
    with pytest.raises(KeyError):
        parse_pins('default = "nobody"\n')


@pytest.mark.host
def test_this_environment_holds_a_pinned_host() -> None:
    assert installed_host() in HOSTS
