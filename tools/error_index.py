# SPDX-License-Identifier: Apache-2.0
"""Every error that the code can raise and every line that preflight can say, read from the source itself."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.environment import ROOT
from vllm_h3_plugin import errors

PACKAGE = ROOT / "vllm_h3_plugin"
BLANK = "…"
_CLASSES = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.H3Error)
}
_CHECKS = {"failed": "fail", "warned": "warn"}


@dataclass(frozen=True)
class Message:
    """One place in the code that says something to a user; values are ``…``.

    Attributes:
        kind: an error class, or ``fail`` and ``warn`` of preflight.
        room: the part of the package that says it.
    """

    kind: str
    room: str
    what: str
    why: str
    fix: str


Names = Mapping[str, str]


def template(node: ast.expr | None, names: Names) -> str:
    """The text of an expression, with ``…`` for what only a run can know; alternatives are joined by " / ".

    Args:
        names: texts of the variables that hold the same text wherever they are read.
    """
    match node:
        case None:
            return ""
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value, names) for value in values)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name):
            return names.get(name, BLANK)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, names) + template(right, names)
        case ast.IfExp(body=body, orelse=other):
            return " / ".join(text for text in (template(body, names), template(other, names)) if text.strip(BLANK))
        case _:
            return BLANK


def _texts(scope: ast.AST, outer: Names) -> Names:
    """Variables of a scope that are set once, to a text."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1:
            found.setdefault(node.targets[0].id, []).append(template(node.value, outer))
    return {**outer, **{name: texts[0] if len(texts) == 1 else BLANK for name, texts in found.items()}}


def _messages(path: Path) -> Iterator[Message]:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    module = ast.parse(path.read_text(encoding="utf-8"))
    constants = _texts(ast.Module([node for node in module.body if isinstance(node, ast.Assign)], []), {})
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        names = _texts(function, constants)
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (message := _message(node, room, names)) is not None:
                yield message


def _message(node: ast.Call, room: str, names: Names) -> Message | None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    given = {word.arg: word.value for word in node.keywords if word.arg}
    if name in _CLASSES and node.args:
        why, fix = template(given.get("why"), names), template(given.get("fix"), names)
        return Message(name, room, template(node.args[0], names), why, fix)
    if room == "preflight" and name in _CHECKS and len(node.args) == 3:
        return Message(_CHECKS[name], room, template(node.args[1], names), "", template(node.args[2], names))
    return None


def all_messages() -> list[Message]:
    """In the order of the tree of errors, then of the text. What is nothing but values is left out."""
    order = [*_CHECKS.values(), *_CLASSES]
    found = {message for path in sorted(PACKAGE.rglob("*.py")) for message in _messages(path)}
    told = [message for message in found if len(message.what.replace(BLANK, "").strip(" :;,.()'")) > 3]
    return sorted(told, key=lambda said: (order.index(said.kind), said.room, said.what, said.why, said.fix))


def errors_document() -> str:
    """``docs/ERRORS.md``."""

    def cell(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

    messages = all_messages()
    lines = [
        "# Errors",
        "",
        "Every error of this project, read from its code: what is printed after `error:`, `why:` and `fix:`, where `…`",
        "stands for a name, a number or a sentence that only the machine knows. For causes that need more than a line,",
        "and for what the host says, see [TROUBLESHOOTING](TROUBLESHOOTING.md).",
        "",
    ]
    for kind, title in [("fail", "Preflight: fail"), ("warn", "Preflight: warn")]:
        lines += [f"## {title}", "", "| It says | What to do |", "| --- | --- |"]
        lines += [f"| {cell(m.what)} | {cell(m.fix)} |" for m in messages if m.kind == kind]
        lines.append("")
    for name, error in _CLASSES.items():
        rows = [message for message in messages if message.kind == name]
        if rows:
            summary = (inspect.getdoc(error) or "").splitlines()[0]
            lines += [f"## {name}: exit code {error.exit_code}, HTTP {error.http_status}", "", summary, ""]
            lines += ["| Error | Why | Fix | Room |", "| --- | --- | --- | --- |"]
            lines += [f"| {cell(m.what)} | {cell(m.why)} | {cell(m.fix)} | {m.room} |" for m in rows]
            lines.append("")
    return "\n".join(lines)
