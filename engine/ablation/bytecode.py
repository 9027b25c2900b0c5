"""Code objects as plain values that stay the same when comments, docstrings, formatting and line numbers change."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import CodeType

__all__ = ["Names", "instructions", "names_in", "nested"]

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_WITHOUT_MEANING = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME"}
_DESCRIPTIVE = {"__doc__", "__firstlineno__", "__module__", "__qualname__", "__static_attributes__"}
"""What the body of a class stores about itself, and no run depends on."""

_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}
_OWN_GLOBALS = {"eval", "exec", "globals"}
_DYNAMIC = {*_OWN_GLOBALS, "__import__", "getattr", "import_module", "locals", "vars"}


@dataclass
class Names:
    """The names that a code object and those inside of it use.

    Attributes:
        globals: Names that are looked up in the module.
        all: All names, attributes included.
        imports: Modules that are imported where the code runs: name, level, and the names taken from it.
        dynamic: Whether attributes may be used whose names are not in the code, as with ``getattr``.
        own_globals: Whether the globals of the module may be used without their names, as with ``eval``.
    """

    globals: set[str] = field(default_factory=set)
    all: set[str] = field(default_factory=set)
    imports: set[tuple[str, int, tuple[str, ...]]] = field(default_factory=set)
    dynamic: bool = False
    own_globals: bool = False


def names_in(code: CodeType) -> Names:
    """The names that a code object and those inside of it use."""
    found = Names()
    for one in nested(code):
        found.all.update(one.co_names)
        constants: list[object] = []
        for instruction in dis.get_instructions(one):
            if instruction.opname in _GLOBALS:
                found.globals.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                level, names = constants[-2:]
                taken = names if isinstance(names, tuple) else ()
                found.imports.add((instruction.argval, level if isinstance(level, int) else 0, taken))
            if instruction.opname.startswith("LOAD_"):
                constants.append(instruction.argval)
    found.dynamic = bool(_DYNAMIC & found.all)
    found.own_globals = bool(_OWN_GLOBALS & found.globals)
    return found


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def instructions(code: CodeType) -> list[tuple[object, ...]]:
    """The instructions of a code object, with constants and names in place of their numbers, and its table of exceptions.

    Two functions that differ in comments, docstrings, formatting or line numbers have the same instructions.
    """
    raw = list(dis.get_instructions(code))
    kept = _without_descriptions([one for one in raw if one.opname not in _WITHOUT_MEANING])
    places: dict[int, int] = {}
    place = 0
    for one in raw:
        places[one.offset] = place
        place += place < len(kept) and one is kept[place]
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x2AC)
    made: list[tuple[object, ...]] = [(*arguments, code.co_varnames[: sum(arguments[:3:2])], code.co_freevars)]
    for one in kept:
        made.append((one.opname, places.get(one.argval, -1) if one.opcode in _JUMPS else one.argval))
    for entry in vars(dis.Bytecode(code))["exception_entries"]:  # unknown to stubs
        ends = (places.get(where, place) for where in (entry.start, entry.end, entry.target))
        made.append(("except", *ends, entry.depth, entry.lasti))
    return made


def _without_descriptions(raw: list[dis.Instruction]) -> list[dis.Instruction]:
    """The instructions without those with which the body of a class describes itself."""
    described = {
        place
        for place, (one, after) in enumerate(pairwise(raw))
        if after.opname == "STORE_NAME" and after.argval in _DESCRIPTIVE and one.opname.startswith("LOAD_")
    }
    return [one for place, one in enumerate(raw) if place not in described and place - 1 not in described]
