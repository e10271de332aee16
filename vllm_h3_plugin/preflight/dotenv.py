# SPDX-License-Identifier: Apache-2.0
"""A ``.env`` file read as docker compose reads it, and what in it other readers take differently.

Compose's rules (compose-spec/compose-go, dotenv/parser.go): a byte-order mark and carriage returns are dropped;
``export`` may stand in front; ``=`` or ``:`` separates; single quotes are literal; double quotes and bare values expand
``$NAME``; a bare value ends at ``#`` after a space and loses trailing spaces; a name alone takes the caller's value.
``docker run --env-file``, ``make`` and shells each differ, so what would not mean the same to all is named by its line.

No message here holds a value: the file may hold secrets.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_LONGEST = 32_768
"""Characters of a value, after variables in it are replaced."""
_ESCAPE = re.compile(r"\\([nr\"\\$])")


@dataclass(frozen=True, slots=True)
class Oddity:
    """Something in the file that deserves a word.

    Attributes:
        line: from 1; 0 for the file as a whole.
        fatal: compose refuses it, or readers disagree about the value.
    """

    line: int
    what: str
    remedy: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}" if self.line else self.what


@dataclass(frozen=True, slots=True)
class EnvFile:
    """A parsed file.

    Attributes:
        values: name -> value as compose takes it from the file, the caller's environment left aside.
        lines: name -> line of its last assignment.
        quoted: names whose value stands in quotes; compose and shells drop these, ``docker run --env-file`` does not.
    """

    values: Mapping[str, str]
    lines: Mapping[str, int]
    oddities: tuple[Oddity, ...]
    quoted: tuple[str, ...] = ()


class _Parser:
    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self.name = shlex.quote(name)
        self.environ = environ
        self.values: dict[str, str] = {}
        self.lines: dict[str, int] = {}
        self.oddities: list[Oddity] = []
        self.quotes: dict[str, None] = {}

    def odd(self, line: int, what: str, remedy: str, *, fatal: bool = False) -> None:
        self.oddities.append(Oddity(line, what, remedy, fatal))

    def text(self, raw: bytes) -> str:
        if raw.startswith(_BOM):
            self.odd(
                1,
                "a byte-order mark (BOM) stands before the first name, and readers other than compose take it as part "
                "of that name",
                f"Remove it: sed -i '1s/^\\xEF\\xBB\\xBF//' {self.name}",
                fatal=True,
            )
            raw = raw[len(_BOM) :]
        ends = [number for number, line in enumerate(raw.split(b"\n"), 1) if line.endswith(b"\r")]
        if ends:
            where = f"lines {ends[0]} to {ends[-1]} ({len(ends)}) end" if len(ends) > 1 else f"line {ends[0]} ends"
            self.odd(
                0,
                f"{where} in CRLF, as Windows writes it, and shells and make take the CR as part of the value",
                f"Convert it: sed -i 's/\\r$//' {self.name}",
                fatal=True,
            )
        try:
            return raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as exc:
            line = raw[: exc.start].count(b"\n") + 1
            self.odd(line, "it is not UTF-8", f"Save {self.name} as UTF-8, without a BOM.", fatal=True)
            return ""

    def parse(self, text: str) -> None:
        lines = text.split("\n")
        number = 0
        while number < len(lines):
            line = lines[number]
            number += 1
            stripped = line.strip()
            if stripped and not stripped.startswith("#"):
                number += self.statement(stripped, line, number, lines)

    def statement(self, stripped: str, line: str, number: int, lines: list[str]) -> int:
        """Take one assignment; returns how many further lines its quoted value takes."""
        if re.match(r"export\s", stripped):
            self.odd(
                number,
                "`export` stands before the name; compose drops it, `docker run --env-file` refuses it",
                "Remove `export`.",
            )
            stripped = stripped[len("export") :].lstrip()
        match = re.match(r"([^=:]*)([=:]|$)", stripped)
        assert match is not None  # it matches the empty text too
        name, separator = match[1].rstrip(), match[2]
        if not _NAME.fullmatch(name):
            self.odd(number, "no variable's name stands there", "Write NAME=value.", fatal=True)
            return 0
        if name in self.lines:
            self.odd(number, f"{name} was set on line {self.lines[name]}; the last one counts", "Remove one of them.")
        self.lines[name] = number
        if not separator:
            self.odd(number, f"{name} has no value; compose takes the caller's", f"Write {name}=value.")
            if name in self.environ:
                self.values[name] = self.environ[name]
            return 0
        if separator == ":" or match[1] != name:
            self.odd(
                number,
                f"{name} is followed by {'`:`' if separator == ':' else 'a space'}; other readers refuse it",
                f"Write {name}=value, without spaces around `=`.",
            )
        start = line.index(separator, line.index(name) + len(name)) + 1
        return self.value(name, line[start:], number, lines)

    def value(self, name: str, rest: str, number: int, lines: list[str]) -> int:
        bare = rest.lstrip()
        if bare != rest and bare:
            self.odd(
                number,
                f"a space stands before the value of {name}; compose drops it, shells do not take it",
                "Remove the space after `=`.",
            )
        if bare[:1] in ("'", '"'):
            return self.quoted(name, bare, number, lines)
        trimmed = bare.rstrip()
        if bare != trimmed:
            self.odd(
                number,
                f"spaces stand after the value of {name}; compose drops them, other readers keep them",
                "Remove the spaces at the end of the line.",
            )
        comment = re.search(r"(^|\s)#", trimmed)
        if comment:
            self.odd(
                number,
                f"a comment stands after the value of {name}; compose drops it, `docker run --env-file` does not",
                "Put the comment on a line of its own.",
            )
            trimmed = trimmed[: comment.start()].rstrip()
        if trimmed[-1:] in ("'", '"') and trimmed[-1:] not in trimmed[:-1]:
            self.odd(
                number,
                f"the value of {name} ends in a quote that was never opened, and the quote is part of it",
                "Put quotes at both ends, or none.",
                fatal=True,
            )
        self.values[name] = self.expand(name, trimmed, number)
        return 0

    def quoted(self, name: str, bare: str, number: int, lines: list[str]) -> int:
        quote, text, further = bare[0], bare, 0
        while (end := _closing(text, quote)) < 0:
            if number + further >= len(lines):
                self.odd(
                    number,
                    f"the quote before the value of {name} is never closed; compose refuses the file",
                    f"Close it with {quote} on line {number}.",
                    fatal=True,
                )
                return 0
            text += "\n" + lines[number + further]
            further += 1
        tail = text[end + 1 :].strip()
        if tail and not tail.startswith("#"):
            self.odd(
                number,
                f"text follows the closing quote of {name}, and compose refuses it",
                "Put the whole value between the quotes.",
                fatal=True,
            )
        inner = text[1:end]
        if inner != inner.strip():
            self.odd(
                number,
                f"the quoted value of {name} begins or ends with a space, which is part of it",
                "Remove the space, unless it is meant.",
            )
        if further:
            self.odd(number, f"the value of {name} spans {further + 1} lines", "Write it on one line.")
        if quote == '"':
            inner = self.expand(
                name, _ESCAPE.sub(lambda found: {"n": "\n", "r": "\r"}.get(found[1], found[1]), inner), 0
            )
        self.values[name] = inner
        self.quotes[name] = None
        return further

    def expand(self, name: str, text: str, number: int) -> str:
        def replace(found: re.Match[str]) -> str:
            if found[0] == "$$":
                return "$"
            wanted = found[1] or found[3]
            value = self.environ.get(wanted, self.values.get(wanted, ""))
            return value or (found[2] or "")

        if number and "$" in text:
            self.odd(
                number,
                f"compose replaces what follows `$` in the value of {name}; `docker run --env-file` does not",
                "Put single quotes around a value that holds a `$`.",
            )
        whole = _VARIABLE.sub(replace, text)
        if len(whole) > _LONGEST:
            self.odd(number, f"the value of {name} grows beyond {_LONGEST} characters", "Write it out.", fatal=True)
            return ""
        return whole


def _closing(text: str, quote: str) -> int:
    """Position of the closing quote, -1 without one; an escaped one does not close."""
    position = text.find(quote, 1)
    while position > 0 and text[position - 1] == "\\":
        position = text.find(quote, position + 1)
    return position


def parse_env(raw: bytes, *, name: str = ".env", environ: Mapping[str, str] | None = None) -> EnvFile:
    """Parse the bytes of a file.

    Args:
        name: the file's path, for remedies.
        environ: the caller's environment, for names without a value and for ``$NAME``.
    """
    parser = _Parser(name, environ or {})
    parser.parse(parser.text(raw))
    return EnvFile(parser.values, parser.lines, tuple(parser.oddities), tuple(parser.quotes))
