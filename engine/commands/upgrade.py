"""``python -m signalfire upgrade FILE...`` lists names of earlier versions in files, each with the one of today."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .moved import MOVED

__all__ = ["CLAIMS", "MODULES", "OldName", "old_names", "upgrade"]

_ROOMS = {
    "core": "blame boundary bus connection declarations events handler loop part regions registry settings setup signals state "
    "step update window",
    "updates": "from_model optimizer_modes optimizers places spec",
    "models": "explain fit modules streams",
    "distributed": "group norms notice",
    "resuming": "changeable copies frozen keys loads past saving snapshots unfinished",
    "runs": "evaluation interrupts rehearsal replay restore wiring",
    "findings": "codes",
    "authoring": "batches capture checks devices interval log markup monitor plain planning plugins randomness",
}
MODULES = (
    {f"signalfire.{name}": f"signalfire.{room}.{name}" for room, names in _ROOMS.items() for name in names.split()}
    | {"signalfire.handlers.summary": "signalfire.handlers.model_summary"}
    | MOVED
)
"""The module of today by that of version 0.2.0."""

ARGUMENTS = {("Freezing", "until"): "unfreeze_at"}
"""The argument of today by the callable and the earlier name."""

ATTRIBUTES = {"loop": "current_run"}
"""The attribute of today of what is called engine, trainer or evaluator."""
_ENGINES = ("engine", "trainer", "evaluator")

CLAIMS = {
    "ALGORITHMS": '"how algorithms are chosen"',
    "CLIPPING": '"gradient clipping"',
    "COMPILATION": '"what is compiled"',
    "CUTOUT": '"cutting parts out of samples"',
    "EVALUATED_WEIGHTS": '"the weights used for evaluation", rehearsed=False',
    "FILE": '"the file", of_step=False',
    "LEARNING_RATE": '"the learning rate", rehearsed=False',
    "PRECISION": '"the precision", inherited=True',
    "TIME_CHUNKS": '"the time chunks"',
}
"""The arguments of the claim of today by the member of the earlier `Override`, of those that several handlers share."""


class OldName(NamedTuple):
    """A name of an earlier version in a file.

    Attributes:
        path: the file.
        line: its line, from 1.
        old: the name there.
        new: what to write.
    """

    path: Path
    line: int
    old: str
    new: str

    def shown(self) -> str:
        """The line that the command prints."""
        return f"{self.path}:{self.line}: {self.old} -> {self.new}"


def old_names(path: Path) -> list[OldName]:
    """The names of earlier versions in a file, by line; nothing is changed.

    Raises:
        OSError: for a file that cannot be read.
        SyntaxError: for one that is no Python.
    """
    found = (OldName(path, node.lineno, old, new) for node, old, new in _found(ast.parse(path.read_text(), str(path))))
    return sorted(found, key=lambda one: one.line)


def upgrade(paths: Iterable[Path]) -> list[OldName]:
    """`old_names` of files, and of all files in folders."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [one for file in files for one in old_names(file)]


Found = Iterator[tuple[ast.expr | ast.stmt | ast.keyword, str, str]]


def _found(tree: ast.Module) -> Found:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from _imported_from(node, node.module)
        elif isinstance(node, ast.Import):
            old = [one.name for one in node.names if one.name in MODULES]
            yield from ((node, f"import {name}", f"import {MODULES[name]}") for name in old)
        elif isinstance(node, ast.Call):
            yield from _arguments(node)
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES and _name_of(node.value) in _ENGINES:
            name = _name_of(node.value)
            yield node, f"{name}.{node.attr}", f"{name}.{ATTRIBUTES[node.attr]}"
        elif isinstance(node, ast.Attribute) and node.attr in CLAIMS and _name_of(node.value) == "Override":
            yield node, f"Override.{node.attr}", f"Claim({CLAIMS[node.attr]})"


def _imported_from(node: ast.ImportFrom, module: str) -> Found:
    if module in MODULES:
        yield node, f"from {module} import", f"from {MODULES[module]} import"
    for alias in node.names:
        if module == "signalfire" and (new := MODULES.get(f"signalfire.{alias.name}")) is not None:
            package, _, name = new.rpartition(".")
            yield node, f"from {module} import {alias.name}", f"from {package} import {name}"


def _arguments(node: ast.Call) -> Found:
    name = _name_of(node.func)
    for keyword in node.keywords:
        if (new := ARGUMENTS.get((name, keyword.arg or ""))) is not None:
            yield keyword, f"{name}({keyword.arg}=)", f"{name}({new}=)"


def _name_of(node: ast.expr) -> str:
    """The last name of an expression: that of a function, a method or a variable."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
