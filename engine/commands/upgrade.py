"""``python -m signalfire upgrade FILE...`` lists names of earlier versions in files and notebooks, each with the one of today."""

from __future__ import annotations

import ast
import json
import os
import re
import warnings
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


_MAGIC = re.compile(r"^(\s*)([%!?].*|\w+\s*=\s*[%!].*|.*\?)$", re.MULTILINE)
"""A line of a notebook that IPython reads, and Python does not."""


class OldName(NamedTuple):
    """A name of an earlier version in a file.

    Attributes:
        path: the file.
        line: its line, from 1.
        old: the name there.
        new: what to write.
        cell: the cell of a notebook, from 1, in which the line is; 0 for other files.
    """

    path: Path
    line: int
    old: str
    new: str
    cell: int = 0

    def shown(self) -> str:
        """The line that the command prints."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.path}:{cell}{self.line}: {self.old} -> {self.new}"


def upgrade(paths: Iterable[Path]) -> tuple[list[OldName], list[str]]:
    """`old_names` of files and of all files in folders, and a sentence on each file that could not be read."""
    found: list[OldName] = []
    unread: list[str] = []
    for file in _files(paths, unread):
        try:
            found += old_names(file)
        except SyntaxError as error:
            unread.append(f"{file}:{error.lineno or 1}: not valid Python: {error.msg}")
        except OSError as error:
            unread.append(f"{file}: cannot be read: {error.strerror}")
        except (ValueError, RecursionError, MemoryError) as error:
            unread.append(f"{file}: cannot be read: {error or 'the code is nested too deeply'}")
    return found, unread


def _files(paths: Iterable[Path], unread: list[str]) -> Iterator[Path]:
    """Files, and those in folders: neither what is hidden nor what is installed, such as ``.venv``, is the user's own."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, inner, names in os.walk(path, onerror=lambda error: unread.append(f"cannot be read: {error}")):
            inner[:] = sorted(name for name in inner if not _is_installed(Path(folder, name)))
            yield from (Path(folder, name) for name in sorted(names) if name.endswith((".py", ".ipynb")))


def _is_installed(folder: Path) -> bool:
    return folder.name.startswith(".") or (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir()


def old_names(path: Path) -> list[OldName]:
    """The names of earlier versions in a file or a notebook, by line; nothing is changed.

    Raises:
        OSError: for a file that cannot be read.
        SyntaxError, ValueError: for one that is no Python, or no notebook.
    """
    cells = _cells(path) if path.suffix == ".ipynb" else [(0, _parsed(path.read_bytes()))]
    found = (OldName(path, node.lineno, old, new, cell) for cell, tree in cells for node, old, new in _found(tree))
    return sorted(found, key=lambda one: (one.cell, one.line))


def _parsed(source: str | bytes) -> ast.Module:
    """Of bytes, since Python finds their encoding itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the user's strings, say, which is no matter here
        return ast.parse(source)


def _cells(path: Path) -> Iterator[tuple[int, ast.Module]]:
    """The cells of a notebook that hold Python, with their numbers."""
    try:
        cells = json.loads(path.read_bytes())["cells"]
        code = [(k, "".join(cell["source"])) for k, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
    except (LookupError, TypeError, ValueError):
        raise ValueError("not a notebook in nbformat 4; convert it with jupyter nbconvert --to notebook") from None
    for number, source in code:
        try:
            yield number, _parsed(source)
        except SyntaxError:
            try:
                yield number, _parsed(_MAGIC.sub(r"\1pass", source))
            except SyntaxError as error:
                if not source.lstrip().startswith("%%"):  # such a cell may be in another language
                    raise SyntaxError(f"{error.msg}, on line {error.lineno} of cell {number}") from None


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
