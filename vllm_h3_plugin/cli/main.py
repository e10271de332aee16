# SPDX-License-Identifier: Apache-2.0
"""Dispatch of ``vllm-h3 VERB``: lazy import of the verb, one way to report errors, one exit code each."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import typer

from vllm_h3_plugin import __version__
from vllm_h3_plugin.errors import H3Error, one_line

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it."""

# Verb -> (module, summary). The module holds a function named like the verb, or a Typer app named `app` for a verb
# with sub-commands. Order is the order in `--help`: from a checkpoint to a clip.
VERBS: dict[str, tuple[str, str]] = {
    "synth": ("vllm_h3_plugin.cli.synth", "Write a small random checkpoint of the real layout."),
    "synth-lora": ("vllm_h3_plugin.cli.synth_lora", "Write a random adapter (Turbo, FastH3, …) for a checkpoint."),
    "inspect": ("vllm_h3_plugin.cli.inspect", "Check a checkpoint's files before any weight is read."),
    "checksums": ("vllm_h3_plugin.cli.checksums", "Write or check the SHA-256 of every shard of a checkpoint."),
    "recipe": ("vllm_h3_plugin.cli.recipe", "Show what a precision recipe does to every linear layer."),
    "memory": ("vllm_h3_plugin.cli.memory", "Predict what a checkpoint and a request need, and what fits."),
    "snapshot": ("vllm_h3_plugin.cli.snapshot", "List, verify and remove quantized snapshots."),
    "preflight": ("vllm_h3_plugin.cli.preflight", "Check this machine before anything is built or started."),
    "up": ("vllm_h3_plugin.cli.up", "Check this machine, start the server's container, wait until it is ready."),
    "status": ("vllm_h3_plugin.cli.status", "Say what a server is and does, with time left, memory and versions."),
    "logs": ("vllm_h3_plugin.cli.logs", "Show the server's log without noise, or only its error."),
    "down": ("vllm_h3_plugin.cli.down", "Wait for the job, stop the container, see the memory come back."),
    "serve": ("vllm_h3_plugin.cli.serve", "Start the video server from a profile or a checkpoint."),
    "health": ("vllm_h3_plugin.cli.health", "Tell a running server that works from one that is dead or stuck."),
    "doctor": ("vllm_h3_plugin.cli.doctor", "Check host, plugin and the five contracts in this environment."),
    "provenance": ("vllm_h3_plugin.cli.provenance", "Say what this installation is made of; write its SBOM."),
    "smoke": ("vllm_h3_plugin.cli.smoke", "Make two clips through the running server and verify them."),
    "verify": ("vllm_h3_plugin.cli.verify", "Check a clip: streams, every frame, sound, length, checksum."),
    "compare": ("vllm_h3_plugin.cli.compare", "Say how far two clips are apart, in picture and sound."),
    "bench": ("vllm_h3_plugin.cli.bench", "Measure loading, restart and table build on this machine."),
    "demo": ("vllm_h3_plugin.cli.demo", "Make and verify two clips on this machine, with or without a GPU."),
}


def _app() -> typer.Typer:
    return typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"vllm-h3 {__version__}")
        raise typer.Exit()


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    """MiniMax-H3 on hardware that is too small for it: from a checkpoint to a verified clip.

    `vllm-h3 VERB --help` teaches each verb. Every verb takes --json and then ends with one JSON line.
    """


def overview() -> typer.Typer:
    """The root app with every verb's summary and none of its code: `--help` imports no torch, vLLM or PyAV."""
    app = _app()
    app.callback()(_root)
    for name, (_, summary) in VERBS.items():

        def stub() -> None:
            raise AssertionError("main() dispatches verbs before this app is asked")

        app.command(name=name, help=summary)(stub)
    return app


def verb_app(name: str) -> typer.Typer:
    """Import a verb's module and return its Typer app."""
    module = import_module(VERBS[name][0])
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name=name)(getattr(module, name))
    return app


def _check_settings() -> None:
    """A misspelt ``H3_*`` variable stops every verb, not only those that would have read it."""
    from vllm_h3_plugin.settings import check_names

    check_names()


def _emit(exc: H3Error) -> None:
    from vllm_h3_plugin.cli.console import emit_json

    emit_json(False, error=exc.as_dict())


def _fail(exc: H3Error, args: list[str]) -> NoReturn:
    if "--json" in args:
        _emit(exc)
    print(exc.report(), file=sys.stderr)
    sys.exit(exc.exit_code)


def _own_fault(exc: Exception) -> H3Error:
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if "vllm_h3_plugin" in frame.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside of this project's code"
    return H3Error(
        f"a fault of vllm-h3-plugin itself: {one_line(exc)}",
        why=f"nothing foresees this, at {where}",
        fix="Report it with the command and `vllm-h3 provenance`.",
        traceback=traceback.format_exception(exc),
    )


def main(argv: list[str] | None = None) -> NoReturn:
    """Console script. Exits with the code of the error tree; never with 0 after a failure."""
    args = sys.argv[1:] if argv is None else argv
    try:
        if args and args[0] in VERBS:
            if "--help" not in args:
                _check_settings()
            verb_app(args[0])(args=args[1:], prog_name=f"vllm-h3 {args[0]}")
        else:
            overview()(args=args, prog_name="vllm-h3")
    except H3Error as exc:
        _fail(exc, args)
    except OSError as exc:
        # What a verb did not foresee: a folder that may not be read, a full or read-only disk.
        what = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
        _fail(H3Error(what, why="the system refused it", fix="Check the path, its rights and the free space."), args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as exc:  # noqa: BLE001  # what nobody foresaw is told like the rest, and where it happened
        _fail(_own_fault(exc), args)
    except SystemExit as exc:
        if exc.code == 2 and "--json" in args:
            _emit(H3Error("the arguments are wrong", why="stderr has the reason", fix="See --help."))
        raise
    sys.exit(0)
