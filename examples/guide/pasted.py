"""What an example of a docstring needs besides itself to be pasted into a prompt: the imports of the names of its module."""

from __future__ import annotations

import ast
import builtins
import doctest
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import signalfire
import signalfire.handlers

__all__ = ["example_of", "imports_for", "insert_imports"]


def example_of(text: str) -> str:
    """The code of a docstring."""
    return "".join(example.source for example in doctest.DocTestParser().get_examples(text))


def imports_for(code: str, home: ModuleType) -> list[str]:
    """Lines that import what the code uses and its module has: public names from where users import them."""
    given, used = set(dir(builtins)), []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            given |= {node.id} if isinstance(node.ctx, ast.Store) else set()
            used += [node.id] if isinstance(node.ctx, ast.Load) else []
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            given.add(node.name)
        elif isinstance(node, ast.arg):
            given.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            given |= {(one.asname or one.name).partition(".")[0] for one in node.names}
    missing = [name for name in dict.fromkeys(used) if name not in given and hasattr(home, name)]
    return sorted(_lines(missing, home), key=lambda line: (line.startswith("from signalfire"), line))


def _lines(names: Iterable[str], home: ModuleType) -> list[str]:
    lines, by_module = [], dict[str, list[str]]()
    for name in names:
        value: Any = getattr(home, name)
        if isinstance(value, ModuleType):
            parent, _, last = value.__name__.rpartition(".")
            if value.__name__ == name:
                lines.append(f"import {name}")
            elif last == name:
                lines.append(f"from {parent} import {name}")
            else:
                lines.append(f"import {value.__name__} as {name}")
            continue
        places = (module for module in (signalfire.handlers, signalfire) if name in module.__all__)
        module = next((place.__name__ for place in places), None) or str(getattr(value, "__module__", home.__name__))
        by_module.setdefault(module, []).append(name)
    return [*lines, *(f"from {module} import {', '.join(sorted(names))}" for module, names in by_module.items())]


def insert_imports(app: Any, what: str, name: str, one: Any, options: Any, lines: list[str]) -> None:
    """Begin each example with the imports that it needs."""
    home = sys.modules.get(getattr(one, "__module__", None) or "")
    first = next((place for place, line in enumerate(lines) if line.lstrip().startswith(">>>")), None)
    if home is None or first is None:
        return
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    lines[first:first] = [f"{indent}>>> {line}" for line in imports_for(example_of("\n".join(lines)), home)]
