# SPDX-License-Identifier: Apache-2.0
"""The container files, read as text and as YAML: no engine is needed to know whether a container could be unsafe."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from vllm_h3_plugin.pins import load_pins
from vllm_h3_plugin.placement import visible
from vllm_h3_plugin.serving.cards import check_cards
from vllm_h3_plugin.serving.profile import load_profile, profile_names
from vllm_h3_plugin.settings import known_variables

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ("compose.yaml", "compose.ascend.yaml")
CLUSTER = "compose.cluster.yaml"
EVERY = (*COMPOSE, CLUSTER)
_JOINED = {"H3_CLUSTER_ADDRESS", "H3_CLUSTER_BIND", "VLLM_H3_CLUSTER_TOKEN_FILE"}
REQUIRED = {
    CLUSTER: {"H3_ACCEPT_LICENSE", "VLLM_H3_CHECKPOINT", *_JOINED},
    "compose.yaml": {"H3_ACCEPT_LICENSE", "VLLM_H3_CHECKPOINT"},
    "compose.ascend.yaml": {"H3_ACCEPT_LICENSE", "VLLM_H3_CHECKPOINT", "VLLM_H3_MEMORY_LIMIT"},
}
SET = {
    "H3_ACCEPT_LICENSE": "yes",
    "VLLM_H3_CHECKPOINT": "/models/Mini Max",
    "VLLM_H3_MEMORY_LIMIT": "64g",
    "H3_CLUSTER_ADDRESS": "192.0.2.1:6379",
    "H3_CLUSTER_BIND": "192.0.2.2",
    "VLLM_H3_CLUSTER_TOKEN_FILE": "./ray token",
}
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<how>:[-?+])(?P<word>[^}]*))?\}")


class RefusedError(Exception):
    """A required variable is missing; the text is what compose would print."""


def interpolate(text: str, values: Mapping[str, str]) -> str:
    """What compose makes of ``${NAME}``, ``:-``, ``:?`` and ``:+``."""

    def one(found: re.Match[str]) -> str:
        value = values.get(found["name"], "")
        if found["how"] == ":?" and not value:
            raise RefusedError(f"{found['name']}: {found['word']}")
        if found["how"] == ":+":
            return found["word"] if value else ""
        return value or (found["word"] if found["how"] == ":-" else "")

    return _VARIABLE.sub(one, text)


def services(file: str, values: Mapping[str, str] = SET) -> dict[str, dict[str, Any]]:
    """Services of a compose file after interpolation, which compose does on values and never on structure."""

    def deep(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: deep(value) for key, value in node.items()}
        if isinstance(node, list):
            return [deep(value) for value in node]
        return interpolate(node, values) if isinstance(node, str) else node

    found: dict[str, dict[str, Any]] = deep(yaml.safe_load((ROOT / file).read_text()))["services"]
    return found


def running(file: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services(file).items() if name.startswith("server")}


def variables(file: str) -> dict[str, str | None]:
    """Name -> default of every variable in the file; None where it has none."""
    return {
        found["name"]: found["word"] if found["how"] == ":-" else None
        for line in (ROOT / file).read_text().splitlines()
        if not line.lstrip().startswith("#")
        for found in _VARIABLE.finditer(line)
    }


def example() -> dict[str, str]:
    """Name -> value of every variable in .env.example, commented ones included."""
    return dict(re.findall(r"^#?([A-Z][A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.M))


# --- Dockerfile


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()


def test_every_base_is_named_by_digest_and_none_is_written_down() -> None:
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", dockerfile(), re.M)
    names = {name for _, name in stages if name}
    foreign = [base for base, _ in stages if base not in names]
    assert foreign and set(foreign) == {"${BASE_NAME}@${BASE_DIGEST}"}
    for pin in load_pins().hosts:
        assert pin.image.reference not in dockerfile() and pin.vllm not in dockerfile()
    # No default: a build that was not told its base fails instead of taking some.
    assert re.findall(r"^ARG (BASE_\w+)(=.*)?$", dockerfile(), re.M) == [("BASE_NAME", ""), ("BASE_DIGEST", "")] * 3


def test_no_pip_may_touch_what_the_host_brings() -> None:
    installs = re.findall(r"pip (?:install|wheel) [^&\n]*", dockerfile())
    assert len(installs) == 4
    for command in installs:
        assert "--no-deps" in command or "--dry-run" in command, command
        assert "--require-hashes" in command or "--no-index" in command, command


def test_the_contracts_stand_between_the_installation_and_the_image() -> None:
    text = dockerfile()
    last = text[text.rindex("\nFROM ") :]
    assert "vllm-h3 doctor --reference" in text[: text.rindex("\nFROM ")]
    assert "--mount=type=bind,from=checked" in last  # an engine that skips unused stages cannot skip this one


def test_the_image_runs_as_a_plain_user_and_starts_serve() -> None:
    users = re.findall(r"^USER (\S+)$", dockerfile(), re.M)
    assert users[-1] == "10001:10001"
    assert 'ENTRYPOINT ["vllm-h3", "serve"]' in dockerfile()


def test_labels_name_version_commit_base_and_lock() -> None:
    for label in ("image.version", "image.revision", "image.created", "image.base.name", "image.base.digest"):
        assert f"org.opencontainers.{label}=" in dockerfile()
    assert "vllm-h3.image-lock.sha256=" in dockerfile()


def test_only_what_the_wheel_is_made_of_enters_the_build() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert allowed == {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "quant",
        "launch",
        "vllm_h3_plugin",
        "requirements",
        "requirements/image.txt",
        "requirements/cluster.txt",
    }
    # All of it is used, and nothing that is used is kept out.
    copied = {word for found in re.findall(r"^COPY (?!--)(.*) \S+$", dockerfile(), re.M) for word in found.split()}
    mounted = set(re.findall(r"source=(requirements/\S+?),", dockerfile()))
    assert copied | {"requirements", *mounted} == allowed


# --- what is added to the image


def locked(file: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> (version, hashes) of a lock file."""
    text = (ROOT / "requirements" / file).read_text().replace("\\\n", " ")
    return {
        found[1]: (found[2], frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", found[3])))
        for found in re.finditer(r"^([a-z0-9-]+)(?:\[[^]]*\])?==([^ ;]+)(.*)$", text, re.M)
    }


@pytest.mark.parametrize("file", ["image.txt", "cluster.txt"])
@pytest.mark.parametrize("host", ["nvidia.txt", "ascend.txt"])
def test_additions_are_those_of_the_host_locks_hash_by_hash(host: str, file: str) -> None:
    additions, whole = locked(file), locked(host)
    assert additions
    assert additions == {name: whole[name] for name in additions}


@pytest.mark.host
def test_additions_are_exactly_what_the_host_does_not_bring() -> None:
    plugin = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    host = closure({"vllm", "vllm-omni"})
    assert closure({Requirement(text).name for text in plugin}) - host == set(locked("image.txt"))


@pytest.mark.host
def test_ray_is_added_with_exactly_what_host_and_plugin_do_not_bring() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = (Requirement(text) for text in project["optional-dependencies"]["cluster"])
    assert closure({"ray"}) - closure({"vllm", "vllm-omni"}) - set(locked("image.txt")) == set(locked("cluster.txt"))
    assert asked.specifier.contains(locked("cluster.txt")["ray"][0])


def test_a_single_machines_image_holds_no_ray() -> None:
    assert "ray" not in locked("image.txt")
    # Named by the build alone: an empty CLUSTER adds neither the lock nor the extra.
    assert "${CLUSTER:+/cluster.txt}" in dockerfile() and "${CLUSTER:+[cluster]}" in dockerfile()
    assert re.findall(r"^ARG CLUSTER(.*)$", dockerfile(), re.M) == [""]


def closure(roots: set[str]) -> set[str]:
    """Names of packages and all that they need in this environment, extras that something asks for included."""
    from importlib.metadata import requires

    from packaging.utils import canonicalize_name

    seen: set[tuple[str, str]] = set()
    pending = [(canonicalize_name(name), "") for name in roots]
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                pending.extend((canonicalize_name(needed.name), wanted) for wanted in ("", *needed.extras))
    return {name for name, _ in seen}


# --- compose


@pytest.mark.parametrize("file", EVERY)
def test_every_variable_is_explained_in_the_example(file: str) -> None:
    assert set(variables(file)) <= set(example())


def test_the_example_has_no_variable_that_nothing_reads() -> None:
    assert set(example()) == set().union(*(variables(file) for file in EVERY))


def test_the_example_shows_the_true_defaults() -> None:
    from vllm_h3_plugin.settings import Settings

    shown = example()
    for name, default in {**variables(CLUSTER), **variables("compose.yaml")}.items():
        if default and not name.endswith("API_KEY_FILE"):
            assert shown[name] == default, name
    for name in set(shown) & set(known_variables()):
        default = Settings.model_fields[name.removeprefix("H3_").lower()].default
        if isinstance(default, (bool, int, float)) and name != "H3_ACCEPT_LICENSE":
            assert float(shown[name]) == float(default), name


@pytest.mark.parametrize("file", EVERY)
def test_settings_that_reach_the_container_are_settings(file: str) -> None:
    """A misspelt one would stop the server; one that is missing could not be set. Four belong to the image itself,
    one follows from the profile, one from the mounts, and those of a cluster are for a cluster."""
    of_clusters = set() if file == CLUSTER else {name for name in known_variables() if name.startswith("H3_CLUSTER_")}
    for service in services(file).values():
        passed = {name for name in service["environment"] if name.startswith("H3_")}
        assert passed == set(known_variables()) - {
            *("H3_REFERENCE", "H3_RUN_DIR", "H3_FFMPEG", "H3_CACHE_DIR"),
            *("H3_PARTS_ON", "H3_CLUSTER_CHECKPOINT"),
            *of_clusters,
        }


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in EVERY for name in sorted(REQUIRED[file])])
def test_a_missing_variable_stops_compose_with_a_sentence(file: str, name: str) -> None:
    with pytest.raises(RefusedError, match=rf"{name}: .* \.env"):
        services(file, {key: value for key, value in SET.items() if key != name})


@pytest.mark.parametrize("file", EVERY)
def test_every_service_is_hardened(file: str) -> None:
    for name, service in services(file).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["init"] is True and service["pids_limit"] > 0
        assert service["mem_limit"] == service["memswap_limit"] and service["oom_score_adj"] > 0
        assert service["shm_size"] and service["logging"]["options"].keys() >= {"max-size", "max-file"}
        # A cluster's ranks speak to the fabric, which only the machine's own network reaches.
        shared = {"privileged", "network_mode", "ipc", "pid", "user"} & service.keys()
        assert shared == ({"network_mode"} if file == CLUSTER else set())
        assert service["pull_policy"] == "never"
        assert "size=" in service["tmpfs"][0] and "nosuid" in service["tmpfs"][0]


@pytest.mark.parametrize("file", EVERY)
def test_the_checkpoint_is_read_only_its_path_may_have_spaces_and_nothing_is_created_for_it(file: str) -> None:
    for service in services(file).values():
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert mounts["/checkpoint"]["source"] == "/models/Mini Max"
        for mount in mounts.values():
            if mount["type"] == "bind":
                assert mount["read_only"] is True and mount["bind"] == {"create_host_path": False}
        writable = {target for target, mount in mounts.items() if mount["type"] == "volume"}
        assert writable == {"/var/cache/vllm-h3", "/var/lib/vllm-h3/clips", "/var/lib/vllm-h3/home"}
        # Made in the image with the user's rights: a new volume takes them over.
        assert all(f" {target}" in dockerfile() for target in writable)


@pytest.mark.parametrize("file", COMPOSE)
def test_the_port_is_on_the_loopback_address_unless_asked(file: str) -> None:
    for service in running(file).values():
        assert service["ports"] == ["127.0.0.1:8000:8000"]
    asked = services(file, {**SET, "VLLM_H3_BIND": "0.0.0.0", "VLLM_H3_PORT": "9000"})
    assert {tuple(each["ports"]) for each in asked.values() if "ports" in each} == {("0.0.0.0:9000:8000",)}


@pytest.mark.parametrize("file", EVERY)
def test_a_key_is_a_secret_file_and_there_is_none_unless_named(file: str) -> None:
    for service in services(file).values():
        assert service["environment"]["H3_API_KEY_FILE"] == ""
    for service in services(file, {**SET, "VLLM_H3_API_KEY_FILE": "/keys/one"}).values():
        assert service["environment"]["H3_API_KEY_FILE"] == "/run/secrets/api_key"
    declared = yaml.safe_load((ROOT / file).read_text())["secrets"]["api_key"]["file"]
    assert interpolate(declared, {"VLLM_H3_API_KEY_FILE": "/keys/one"}) == "/keys/one"
    assert (ROOT / interpolate(declared, {})).is_file()


@pytest.mark.parametrize("file", COMPOSE)
def test_a_refused_start_ends_and_a_stop_has_time(file: str) -> None:
    everything = services(file)
    for name, service in running(file).items():
        assert service["restart"] == "on-failure:3"
        (check,) = service["depends_on"]
        assert service["depends_on"][check]["condition"] == "service_completed_successfully"
        assert everything[check]["restart"] == "no"
        # The check is the same command, and starts nothing.
        assert everything[check]["command"] == [*service["command"], "--dry-run"], name
        assert int(service["stop_grace_period"].removesuffix("s")) > 20
        assert service["healthcheck"]["test"][:3] == ["CMD", "vllm-h3", "health"]


def test_the_gpu_computes_and_has_its_video_engines() -> None:
    (server,) = running("compose.yaml").values()
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert {"gpu", "compute", "utility", "video"} <= set(device["capabilities"])
    assert server["environment"]["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility,video"
    assert server["command"][0] in profile_names()


def test_an_ascend_role_has_as_many_cards_as_its_name_says() -> None:
    for cards in (1, 2, 4):
        service = running("compose.ascend.yaml")[f"server-{cards}"]
        assert [path for path in service["devices"] if re.fullmatch(r"/dev/davinci\d+", path)] == [
            f"/dev/davinci{number}" for number in range(cards)
        ]
        assert service["profiles"] == [f"cards-{cards}"] and service["command"][0] == f"ascend-{cards}"


def _container(service: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Names in ``/dev`` and variables that a process of a service sees."""
    nodes = [Path(path).name for path in service.get("devices", [])]
    return ["null", "shm", *nodes], {name: value for name, value in service["environment"].items() if value}


@pytest.mark.parametrize("cards", [1, 2, 4])
def test_the_check_of_an_ascend_role_sees_its_cards(cards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses a start for which another number of cards is visible: without the devices, every start."""
    everything = services("compose.ascend.yaml", {**SET, "ASCEND_CARD_0": "6"})
    for name in (f"check-{cards}", f"server-{cards}"):
        nodes, environ = _container(everything[name])
        monkeypatch.setattr(visible, "device_nodes", lambda nodes=nodes: nodes)
        profile = everything[name]["command"][0]
        check_cards(load_profile(profile), profile, environ, "ascend")
    assert everything[f"check-{cards}"]["devices"] == everything[f"server-{cards}"]["devices"]


def test_two_cards_have_both_published_roles() -> None:
    everything = services("compose.ascend.yaml", {**SET, "ASCEND_2_PROFILE": "ascend-2-resident"})
    assert {everything[name]["command"][0] for name in ("check-2", "server-2")} == {"ascend-2-resident"}
    assert load_profile("ascend-2-resident").devices == 2


def test_the_check_of_a_spark_needs_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device that the engine adds is no node of the file; the server counts it itself."""
    check = services("compose.yaml")["check"]
    nodes, environ = _container(check)
    monkeypatch.setattr(visible, "device_nodes", lambda: nodes)
    check_cards(load_profile(check["command"][0]), check["command"][0], environ, "nvidia")
