# SPDX-License-Identifier: Apache-2.0
"""The index of errors holds what the code says, values as "…"."""

from __future__ import annotations

import ast

from tools.error_index import Message, all_messages, template


def told(source: str, **names: str) -> str:
    return template(ast.parse(source, mode="eval").body, names)


def test_values_become_dots_alternatives_are_both_told_and_known_texts_are_filled_in() -> None:
    assert told('f"{path} is short by {n:,} bytes"') == "… is short by … bytes"
    assert told('"a " + f"{b}" + "c"') == "a …c"
    assert told('"wait" if busy else f"ask for {size}"') == "wait / ask for …"
    assert told('f"{remedy} Then again."', remedy="Free space.") == "Free space. Then again."
    assert told("str(exc)") == "…"


def test_an_error_of_the_tree_and_a_line_of_preflight_are_in_it_with_their_fix() -> None:
    messages = all_messages()
    assert len(messages) > 150
    assert (
        Message(
            "fail",
            "preflight",
            "VLLM_H3_MEMORY_LIMIT is not set",
            "",
            "Set it in .env, and leave the machine some 8 GiB.",
        )
        in messages
    )
    port = next(message for message in messages if message.what == "cannot listen on …:…")
    assert port.kind == "ServerError" and "--port" in port.fix
