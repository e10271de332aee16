# SPDX-License-Identifier: Apache-2.0
"""A ``.env`` file means what compose takes it to mean, and what others would misread is named by its line."""

from __future__ import annotations

import pytest

from vllm_h3_plugin.preflight.dotenv import parse_env


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"A=/models/H3", "/models/H3"),
        (b"A=/my models/H3", "/my models/H3"),
        (b"A=", ""),
        (b"A='/my models/H3'", "/my models/H3"),
        (b'A="/my models/H3"', "/my models/H3"),
        (b"A='$HOME # x'", "$HOME # x"),
        (b'A="$WHO/x"', "me/x"),
        (b"A=a#b", "a#b"),
        (b'A="a\\nb"', "a\nb"),
        (b"A=a=b", "a=b"),
    ],
)
def test_a_plain_line_is_read_without_a_word(line: bytes, value: str) -> None:
    found = parse_env(b"# a comment\n\n" + line + b"\n", environ={"WHO": "me"})
    assert found.values == {"A": value}
    assert found.oddities == ()
    assert found.lines == {"A": 3}


@pytest.mark.parametrize(
    ("raw", "value", "line", "word", "fatal"),
    [
        (b"X=1\r\nA=v\r\n", "v", 0, "lines 1 to 2 (2) end in CRLF", True),
        (b"A=v\r\n", "v", 0, "line 1 ends in CRLF", True),
        (b"\xef\xbb\xbfA=v\n", "v", 1, "byte-order mark", True),
        (b"X=1\nA=v  \n", "v", 2, "spaces stand after", False),
        (b"export A=v\n", "v", 1, "`export`", False),
        (b"A= v\n", "v", 1, "a space stands before", False),
        (b"A =v\n", "v", 1, "followed by a space", False),
        (b"A: v\n", "v", 1, "`:`", False),
        (b"A=v # why\n", "v", 1, "a comment stands after", False),
        (b"A=$WHO/v\n", "me/v", 1, "replaces what follows `$`", False),
        (b"A=${NO:-v}\n", "v", 1, "replaces what follows `$`", False),
        (b"A=' v'\n", " v", 1, "begins or ends with a space", False),
        (b"A=1\nA=v\n", "v", 2, "was set on line 1", False),
        (b"A='x\ny'\n", "x\ny", 1, "spans 2 lines", False),
        (b"WHO\nA=v\n", "v", 1, "takes the caller's", False),
        (b"A='v\n", None, 1, "never closed", True),
        (b"A='v'w\n", "v", 1, "follows the closing quote", True),
        (b"A=v'\n", "v'", 1, "never opened", True),
        (b"two words=1\nA=v\n", "v", 1, "no variable's name", True),
        (b"A=v\nB=\xff\n", None, 2, "not UTF-8", True),
    ],
)
def test_what_readers_take_differently_is_named(
    raw: bytes, value: str | None, line: int, word: str, fatal: bool
) -> None:
    found = parse_env(raw, name="my.env", environ={"WHO": "me"})
    assert found.values.get("A") == value
    odd = found.oddities[0]
    assert (odd.line, odd.fatal) == (line, fatal)
    assert word in odd.what
    assert odd.remedy


def test_crlf_is_named_once_and_not_as_spaces_on_every_line() -> None:
    found = parse_env(b"A='v'\r\nB=w\r\n\r\n# x\r\n")
    assert (found.values, len(found.oddities)) == ({"A": "v", "B": "w"}, 1)


def test_a_message_never_holds_a_value() -> None:
    raw = (
        b"\xef\xbb\xbfexport A= s3cret \r\nB='s3cret\nC=s3cret'w\nD=s3cret # s3cret\nE: $s3cret\nF=s3cret'\n"
        b'F="s3cret" s3cret\nG=\'s3cret\n'
    )
    found = parse_env(raw)
    assert len(found.oddities) > 6
    assert not any("s3cret" in f"{odd}{odd.remedy}" for odd in found.oddities)


def test_a_name_alone_takes_the_callers_value_and_quotes_are_known() -> None:
    found = parse_env(b"WHO\nA='x'\n", environ={"WHO": "me"})
    assert found.values == {"WHO": "me", "A": "x"}
    assert found.quoted == ("A",)
