# SPDX-License-Identifier: Apache-2.0
"""Which room of the package may import which: the one-way flow of docs/DESIGN.md as a table, and its checker.

Imports are read from source, those inside functions and under ``TYPE_CHECKING`` included: a lazy import has a direction
too. A name given to ``import_module`` or ``__import__`` as a literal counts as an import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "vllm_h3_plugin"

_BASE = frozenset({"errors", "data", "settings", "pins"})
# Data flows from files to clips in this order; a room imports only rooms before it.
_FLOW = ("checkpoint", "quantization", "conditioning", "attention", "memory", "placement", "serving")
_ROOMS = frozenset({*_BASE, *_FLOW, "preflight", "kit", "video", "host", "cli"})

ALLOWED: dict[str, frozenset[str]] = {
    # The package's own __init__ holds the version and the entry points, which lead into host/ when the host calls them.
    "": frozenset({"errors", "settings", "host"}),
    "errors": frozenset(),
    "data": frozenset({"errors"}),
    "settings": frozenset({"errors"}),
    "pins": frozenset({"errors", "data"}),
    "video": _BASE,
    **{room: _BASE | frozenset(_FLOW[:position]) for position, room in enumerate(_FLOW)},
    # Judges a machine before anything is built on it: it may predict, and may not load or serve.
    "preflight": _BASE | {"checkpoint", "quantization", "memory", "serving"},
    # Drives a container engine from outside; what it shares with a server is what the server says over HTTP.
    "kit": _BASE | {"memory", "serving", "preflight"},
    "host": _ROOMS - {"cli", "preflight", "kit"},
    "cli": _ROOMS,
}
# A served clip is probed and promoted by video/, which imports nothing back.
ALLOWED["serving"] |= {"video"}

# Only this room may import the host's packages.
HOST_ROOM = "host"
HOST_PACKAGES = frozenset({"vllm", "vllm_omni"})

# Rooms whose modules must load without these: `vllm-h3 --help` and verbs that need no tensors stay light.
LIGHT_ROOMS = frozenset({"", *_BASE, "video", "serving", "preflight", "kit", "cli"})
HEAVY_PACKAGES = frozenset({"torch", "transformers", "diffusers", "safetensors", "triton"})


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: where it stands, what it names, and whether it runs when the module is imported."""

    file: str
    line: int
    room: str
    target: str
    at_import: bool


@dataclass(frozen=True, slots=True)
class Violation:
    """An import that the rules forbid, and the rule."""

    where: Import
    rule: str

    def __str__(self) -> str:
        return f"{self.where.file}:{self.where.line}: imports {self.where.target}: {self.rule}"


def room_of(parts: tuple[str, ...]) -> str:
    """Room of a module path below the package, e.g. ``("host", "register.py")`` -> ``host``."""
    first = parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def _targets(node: ast.AST, package_parts: tuple[str, ...]) -> Iterator[str]:
    """Dotted names that a node imports; ``package_parts`` is the package that the module lies in."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package_parts[: len(package_parts) - node.level + 1] if node.level else ()
        module = ".".join((*base, *([node.module] if node.module else [])))
        # `from package import name` may name a module, which decides the room.
        yield from (f"{module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
            yield node.args[0].value


def _walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        yield child, at_import
        yield from _walk(child, at_import and not lazy and not typing_only)


def read_imports(package: Path) -> Iterator[Import]:
    """Every import of every module below a package folder."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        package_parts = (package.name, *parts[:-1])
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node, at_import in _walk(tree, True):
            for target in _targets(node, package_parts):
                file = str(path.relative_to(package.parent))
                yield Import(file, getattr(node, "lineno", 0), room_of(parts), target, at_import)


def _broken_rule(found: Import, package: Path) -> str | None:
    head, *rest = found.target.split(".")
    if head in HOST_PACKAGES and found.room != HOST_ROOM:
        return f"only {HOST_ROOM}/ may import {head}"
    if head in HEAVY_PACKAGES and found.room in LIGHT_ROOMS and found.at_import:
        return f"{found.room or 'the package'} must load without {head}: import it in the function that needs it"
    if head != package.name or not rest:
        return None
    room = rest[0]
    if not (package / room).is_dir() and not (package / f"{room}.py").is_file():
        return None  # a name of the package's own __init__, e.g. __version__
    if room == found.room or (found.room in ALLOWED and room in ALLOWED[found.room]):
        return None
    return f"{found.room or 'the package'} may import {', '.join(sorted(ALLOWED.get(found.room, ()))) or 'no room'}"


def check_imports(package: Path) -> list[Violation]:
    """Every import that breaks a rule, and every room that has no rule."""
    found = []
    for statement in read_imports(package):
        rule = _broken_rule(statement, package)
        if rule:
            found.append(Violation(statement, rule))
    for entry in sorted(package.iterdir()):
        is_module = entry.suffix == ".py" or (entry.is_dir() and any(entry.rglob("*.py")))
        if is_module and room_of((entry.name,)) not in ALLOWED:
            missing = Import(f"{package.name}/{entry.name}", 1, entry.name, "", False)
            found.append(Violation(missing, "this room has no rule in tools/import_rules.py"))
    return found
