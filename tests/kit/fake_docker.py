# SPDX-License-Identifier: Apache-2.0
"""A program that answers like ``docker``: what it is told is kept in a folder, and so is what it was asked.

Run as ``docker WORDS``. ``state.json`` beside it: ``containers`` (as ``docker inspect`` has them), ``log``, ``fail``
(verb -> [exit code, message]). ``up`` starts its containers, ``down`` removes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(words: list[str]) -> int:
    """Answer one command."""
    with (HERE / "asked.jsonl").open("a", encoding="utf-8") as asked:
        asked.write(json.dumps(words) + "\n")
    state = json.loads((HERE / "state.json").read_text(encoding="utf-8"))
    verb = next((word for word in words if word in ("up", "down", "stop")), words[0])
    if verb in state["fail"]:
        code, message = state["fail"][verb]
        print(message, file=sys.stderr)
        return int(code)
    running = state["containers"] if state["up"] else []
    if verb == "ps":
        print("\n".join(one["Id"] for one in running))
    elif verb == "inspect":
        print(json.dumps([one for one in running if one["Id"] in words]))
    elif verb == "logs":
        # As docker does it: what the container printed to each stream goes to that stream.
        for number, line in enumerate(state["log"]):
            print(line, file=sys.stderr if number % 2 else sys.stdout, flush=True)
    elif verb == "top":
        print("PID")
    elif verb in ("up", "down"):
        state["up"] = verb == "up"
        (HERE / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
