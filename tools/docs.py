# SPDX-License-Identifier: Apache-2.0
"""The generated parts of ``docs/``: ``python -m tools.docs`` writes them, ``--check`` fails where they have drifted.

``CLI.md``, ``SETTINGS.md`` and ``ERRORS.md`` are wholly generated, from every verb's ``--help``, from ``settings.py``
and from the code's own errors.
``RESULTS.md`` has tables made from ``docs/results/*.json`` between two markers; the words above are written by hand.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from tools.environment import ROOT
from tools.error_index import errors_document
from tools.results import load_results, render_all
from vllm_h3_plugin.errors import H3Error, UsageError
from vllm_h3_plugin.settings import Settings, known_variables

DOCS = ROOT / "docs"
WIDTH = 100
BEGIN = "<!-- tables: made by `make docs` from docs/results/, do not edit below -->"
END = "<!-- end of tables -->"
NOTICE = "<!-- Made by `make docs`; do not edit. -->"


def _help_blocks(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """(command line, help text) of a command and of its sub-commands."""
    context = command.make_context(name, [], resilient_parsing=True, terminal_width=WIDTH)
    yield name, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    for sub_name, sub_command in getattr(command, "commands", {}).items():
        yield from _help_blocks(sub_command, f"{name} {sub_name}")


def cli_document() -> str:
    """``docs/CLI.md``: the help of ``vllm-h3`` and of each verb.

    Raises:
        UsageError: a verb has no module; names both.
    """
    from typer.main import get_command

    from vllm_h3_plugin.cli.main import VERBS, overview, verb_app

    root = get_command(overview())
    context = root.make_context("vllm-h3", [], resilient_parsing=True, terminal_width=WIDTH)
    blocks = [("vllm-h3", "\n".join(line.rstrip() for line in root.get_help(context).splitlines()))]
    for verb, (module, _) in VERBS.items():
        if find_spec(module) is None:
            raise UsageError(
                f"vllm-h3 {verb}: no module {module}", fix="Write it, or take the verb out of cli/main.py."
            )
        blocks.extend(_help_blocks(get_command(verb_app(verb)), f"vllm-h3 {verb}"))
    sections = "\n\n".join(f"## {name}\n\n```text\n{text}\n```" for name, text in blocks)
    return f"{NOTICE}\n# Command line\n\nWhat `--help` says, for reading and searching.\n\n{sections}\n"


# Variables of others that this project reads or sets; tests/unit/project holds the names to the code.
OTHERS = {
    "VLLM_API_KEY": "Key that callers of `/v1` must send, where no `H3_API_KEY_FILE` is named. Other users of the "
    "machine may see it in the process list's environment; a file is better.",
    "VLLM_OMNI_VIDEO_SYNC_TIMEOUT": "Least time that a job has, in seconds, unless `H3_JOB_TIMEOUT_S` says how long: "
    "what its own steps predict, twice, if that is longer. Unset or empty: the profile's `request_timeout_s`.",
    "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT": "Seconds after which the `mp` executor ends its workers. Unset or empty: 600 more "
    "than `H3_JOB_TIMEOUT_S`, without that a week; a worker that does not move is found by its steps.",
    "VLLM_PLUGINS": "The host's allow-list of plugins. `vllm-h3 serve` adds its own to what is there.",
    "HF_HUB_OFFLINE": "1 unless set: nothing is looked up on a hub.",
    "HUMMING_DISABLE_PARALLEL_BUILD": "1 unless set: the host's import starts no background compilers.",
    "VLLM_HOST_IP": "Set in each rank of several machines: its address on `H3_CLUSTER_INTERFACE`. So are "
    "`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`, with `H3_CLUSTER_HCA` `NCCL_IB_HCA`, and `LOCAL_WORLD_SIZE`.",
    "CUDA_VISIBLE_DEVICES": "Which NVIDIA devices there are. Read; set only in a rank that takes over a device.",
    "ASCEND_RT_VISIBLE_DEVICES": "Which Ascend cards there are. Read; set as CUDA_VISIBLE_DEVICES is.",
    "ASCEND_VISIBLE_DEVICES": "The same, as container runtimes name it. Read, never set.",
    "VLLM_LOGGING_LEVEL": "The host's. `vllm-h3 doctor` and the benchmarks quieten it unless it is set.",
    "VLLM_LOGGING_STREAM": "The host's. `vllm-h3 doctor` and the benchmarks send its log to stderr unless it is set.",
    "SOURCE_DATE_EPOCH": "Time that `vllm-h3 provenance --sbom FILE` writes, in seconds since 1970.",
}


def settings_document() -> str:
    """``docs/SETTINGS.md``: every ``H3_*`` variable, and those of others that matter here."""
    rows = []
    for (variable, description), field in zip(known_variables().items(), Settings.model_fields.values(), strict=True):
        default = "unset" if field.default is None else f"`{field.default}`".lower()
        rows.append(f"| `{variable}` | {default} | {description} |")
    table = "\n".join(["| Variable | Default | Meaning |", "| --- | --- | --- |", *rows])
    return (
        f"{NOTICE}\n# Settings\n\nEnvironment variables that the plugin and `vllm-h3` read. An `H3_*` variable that is "
        f"not listed here is refused with the nearest known name, so that a typo cannot mean the default.\n\n{table}\n"
        "\n## Variables of others\n\n| Variable | Meaning |\n| --- | --- |\n"
        + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in OTHERS.items())
        + "\nThe compose files read further ones (`VLLM_H3_*`, `ASCEND_*`), each explained in "
        "[.env.example](../.env.example).\n"
    )


def fill_tables(current: str) -> str:
    """The text of ``docs/RESULTS.md`` with its tables made again.

    Raises:
        UsageError: the markers are missing.
    """
    head, begin, rest = current.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError("docs/RESULTS.md: markers are missing", fix=f"It needs the lines {BEGIN} and {END}.")
    return f"{head}{BEGIN}\n\n{render_all(load_results(DOCS / 'results'))}\n\n{END}{tail}"


def results_document() -> str:
    """``docs/RESULTS.md``: the words that stand there, and tables from ``docs/results/``."""
    return fill_tables((DOCS / "RESULTS.md").read_text(encoding="utf-8"))


DOCUMENTS: dict[str, Callable[[], str]] = {
    "CLI.md": cli_document,
    "SETTINGS.md": settings_document,
    "ERRORS.md": lambda: f"{NOTICE}\n{errors_document()}",
    "RESULTS.md": results_document,
}


def main(argv: Sequence[str]) -> int:
    """Write or check the generated documents."""
    check = "--check" in argv
    drifted = False
    try:
        for name, make in DOCUMENTS.items():
            path = DOCS / name
            wanted = make()
            found = path.read_text(encoding="utf-8") if path.exists() else ""
            if found == wanted:
                continue
            if not check:
                path.write_text(wanted, encoding="utf-8")
                print(f"docs/{name}: written")
                continue
            drifted = True
            difference = difflib.unified_diff(
                found.splitlines(), wanted.splitlines(), f"docs/{name}", "generated", lineterm="", n=1
            )
            print("\n".join(difference), file=sys.stderr)
    except H3Error as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    if drifted:
        print("docs have drifted: run `make docs` and commit the result", file=sys.stderr)
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
