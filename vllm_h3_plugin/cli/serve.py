# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 serve``: the one way to start the server, in a container or out of it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_h3_plugin.errors import AdapterError, SettingsError, UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.checkpoint.inventory import Inventory
    from vllm_h3_plugin.serving.profile import Profile


def serve(
    ctx: typer.Context,
    target: str = typer.Argument(
        ..., metavar="PROFILE|CKPT", help="A launch profile (spark, h200, ascend-4, my.toml) or a checkpoint folder."
    ),
    checkpoint: Path | None = typer.Option(
        None, "--checkpoint", "-c", help="Checkpoint folder, where TARGET is a profile: the FL2VA or Ref2VA folder."
    ),
    recipe: str | None = typer.Option(None, help="Precision recipe: a name from quant/ or a path to a JSON file."),
    address: str | None = typer.Option(None, help="Address to listen on. [default: the profile's, 127.0.0.1]"),
    port: int | None = typer.Option(None, min=1, max=65535, help="TCP port. [default: the profile's, 8000]"),
    task: str | None = typer.Option(None, help="auto, t2va, fl2va, ref2va or combined. [default: auto]"),
    executor: str | None = typer.Option(
        None, help="auto, uni (one process), mp (one a device) or ray (one a node). [default: auto]"
    ),
    attention: str | None = typer.Option(None, help="Attention backend by name. [default: the platform's choice]"),
    resident: str | None = typer.Option(
        None, help="Weights on the device between stages: all, or stage (those of the one that runs). [default: all]"
    ),
    lora: Path | None = typer.Option(
        None, help="Adapter to load at start: a Turbo, FlashGen, PEFT or FastH3 file or folder. [default: H3_LORA]"
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check everything, print the command, start nothing."),
    as_json: bool = typer.Option(False, "--json", help="End with one JSON line."),
) -> None:
    """Start the video server from a profile or a checkpoint.

    Checks settings, host version, checkpoint, recipe and port first, prints the exact `vllm serve` command, runs it,
    and proves over HTTP that the plugin is active in it. Arguments after `--` go to `vllm serve` as they are.

    \b
    vllm-h3 serve spark -c /models/MiniMax-H3/FL2VA
    H3_REFERENCE=1 vllm-h3 serve ./tiny/FL2VA --recipe bf16 --port 8123
    vllm-h3 serve reference -c ./tiny/FL2VA --dry-run
    """
    from vllm_h3_plugin.cli.console import emit_json, stderr
    from vllm_h3_plugin.serving.command import server_command
    from vllm_h3_plugin.serving.ranks import wait_with_ranks
    from vllm_h3_plugin.serving.server import Server, check_port_free

    name, profile = _profile(
        target,
        {
            "checkpoint": checkpoint,
            "recipe": recipe,
            "address": address,
            "port": port,
            "task": task,
            "executor": executor,
            "attention": attention,
            "resident": resident,
            "lora": lora,
        },
    )
    _check_licence(profile)
    profile = decide_partitions(profile)
    partition = check_before_start(profile, name)
    _take_api_key()
    check_port_free(profile.address, profile.port)
    console = stderr()
    with tempfile.TemporaryDirectory(prefix="vllm-h3-") as folder:
        run_dir = None if dry_run else Path(folder)
        command = server_command(profile, partition, run_dir=run_dir, environ=os.environ, extra=ctx.args)
        console.print(str(command), markup=False)
        if dry_run:
            if as_json:
                emit_json(True, argv=command.printable, environment=command.environment, url=command.url)
            return
        server = Server(command)
        stop_on_sigterm()
        with server:
            info = server.wait_ready(profile.ready_timeout_s)
            worker = info["workers"][0]
            console.print(
                f"ready after {server.ready_s:.1f} s: {command.url}  plugin {info['plugin']}, "
                f"recipe {worker['recipe']}, backend {worker['backend']}, attention {worker['attention']}",
                markup=False,
            )
            code = wait_with_ranks(server, info["workers"], say=lambda text: console.print(text, markup=False))
        if as_json:
            emit_json(code == 0, exit_code=code, url=command.url)
        sys.exit(code if code >= 0 else 128 - code)


def _profile(target: str, flags: dict[str, object]) -> tuple[str, Profile]:
    """Name and profile, with the flags in it."""
    from vllm_h3_plugin import settings
    from vllm_h3_plugin.cli.console import stderr
    from vllm_h3_plugin.pins import installed_host
    from vllm_h3_plugin.serving.profile import load_profile, profile_names

    values = settings.load()
    name = target
    if target not in profile_names() and Path(target).is_dir():
        name = "reference" if values.reference else "ascend-1" if installed_host().name == "ascend" else "spark"
        stderr().print(f"profile: {name} (none was named)", markup=False)
        profile = load_profile(name).model_copy(update={"checkpoint": Path(target)})
    else:
        profile = load_profile(target)
    chosen = {key: value for key, value in flags.items() if value is not None}
    if values.recipe is not None:
        chosen.setdefault("recipe", values.recipe)
    if values.lora is not None:
        chosen.setdefault("lora", values.lora)
    if values.resident == "stage":
        chosen.setdefault("resident", "stage")
    if values.reference:
        chosen["reference"] = True
    return name, profile.with_flags(chosen)


def decide_partitions(profile: Profile) -> Profile:
    """Both partitions of a root or one, told on stderr; a profile that names a task or one folder stays as it is."""
    import psutil

    from vllm_h3_plugin import settings
    from vllm_h3_plugin.cli.console import stderr
    from vllm_h3_plugin.preflight import probe
    from vllm_h3_plugin.preflight.machine import LocalMachine
    from vllm_h3_plugin.preflight.partitions import with_partitions

    floor = settings.load().memory_floor_gib
    decided, reason = with_partitions(profile, lambda: probe.gpus(LocalMachine()), psutil.virtual_memory().total, floor)
    if reason is not None:
        stderr().print(reason, markup=False)
    return decided


def check_before_start(profile: Profile, name: str = "") -> Path:
    """Everything that can be known to be wrong before the server starts; cards first, before any file is read.

    Args:
        name: the profile's, for messages.

    Returns:
        The partition folder to serve.

    Raises:
        H3Error: of the class that fits; nothing has been started and no weight has been read.
    """
    from vllm_h3_plugin.checkpoint.inventory import take_inventory
    from vllm_h3_plugin.checkpoint.layout import linear_layers
    from vllm_h3_plugin.cli.console import stderr
    from vllm_h3_plugin.pins import installed_host
    from vllm_h3_plugin.quantization.plan import plan
    from vllm_h3_plugin.quantization.recipe import load_recipe
    from vllm_h3_plugin.serving.cards import check_cards, check_method_of, check_room_on_cards

    host = installed_host()
    check_cards(profile, name, os.environ, host.name)
    check_method_of(profile, name)
    if profile.checkpoint is None:
        raise UsageError(
            "no checkpoint was named",
            why="the profile has none",
            fix="Give its folder: `vllm-h3 serve PROFILE --checkpoint CKPT/FL2VA`.",
        )
    # Absolute: the host finds a partition by its folder's name, which "." does not have.
    checkpoint = Path(os.path.abspath(profile.checkpoint))
    inventory = take_inventory(checkpoint, None if profile.task == "auto" else profile.task).require_clean()
    for partition in inventory.partitions:
        assert partition.dit is not None and partition.text is not None  # the inventory is clean
        plan(load_recipe(profile.recipe), linear_layers(partition.dit, partition.text))
    _check_adapter(profile, name, inventory)
    for line in check_room_on_cards(profile, inventory):
        stderr().print(line, markup=False)
    _check_settings(inventory)
    return checkpoint


def _check_adapter(profile: Profile, name: str, inventory: Inventory) -> None:
    """The adapter that is to be loaded at start, against the model and the recipe.

    Raises:
        AdapterError: there is none and the profile is for one, it is of another kind, or it does not fit.
    """
    from vllm_h3_plugin.quantization.recipe import Adaln, load_recipe
    from vllm_h3_plugin.serving.adapters import AdapterRules

    who = f"profile {name}" if name else "this profile"
    if profile.lora is None:
        if profile.adapter is not None:
            raise AdapterError(
                f"{who} needs a {profile.adapter} adapter and none was named",
                why="its steps are those of that adapter; with the base model alone they give noise",
                fix="Name it: `vllm-h3 serve PROFILE --lora PATH`, or H3_LORA=PATH.",
            )
        return
    rules = AdapterRules.of(inventory, tables=load_recipe(profile.recipe).adaln is Adaln.TABLE)
    found = rules.check(Path(os.path.abspath(profile.lora)), at_start=True)
    if profile.adapter not in (None, found.kind):
        raise AdapterError(
            f"adapter {found.path}",
            why=f"it is a {found.kind} adapter, and {who} is for {profile.adapter}",
            fix="Name another adapter, or another profile.",
        )


def _check_settings(inventory: Inventory) -> None:
    """What the server's own processes would refuse only after a minute of imports."""
    from vllm_h3_plugin import settings
    from vllm_h3_plugin.checkpoint.checksums import digests_for
    from vllm_h3_plugin.memory.guard import Thresholds

    values = settings.load()
    Thresholds.from_settings(values)
    if values.verify_checksums is not None:
        digests_for(values.verify_checksums, inventory)
    cache = values.cache_dir.expanduser()
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if values.snapshot != "off" and not nearest.is_dir():
        raise SettingsError(
            f"H3_CACHE_DIR={values.cache_dir}",
            why=f"{nearest} is a file",
            fix="Name a folder, or set H3_SNAPSHOT=off.",
        )


def _check_licence(profile: Profile) -> None:
    """Refuse the real model to somebody who has said no; compose can ask for an answer, not for the right one."""
    from vllm_h3_plugin import settings

    if not profile.reference and os.environ.get("H3_ACCEPT_LICENSE") and not settings.load().accept_license:
        raise SettingsError(
            "H3_ACCEPT_LICENSE says no",
            why="the weights of MiniMax-H3 may only be used under their licence",
            fix="Read it; if you accept it and it lets you: H3_ACCEPT_LICENSE=yes.",
        )


def _take_api_key() -> None:
    """Hand the key of ``H3_API_KEY_FILE`` to the server in its environment: a command line is read by every user."""
    from vllm_h3_plugin import settings
    from vllm_h3_plugin.serving.api_key import read_api_key

    path = settings.load().api_key_file
    if path is not None:
        os.environ["VLLM_API_KEY"] = read_api_key(path)


def stop_on_sigterm() -> None:
    """Pass SIGTERM on as a clean stop (a container's stop), like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command(name="serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(serve)
