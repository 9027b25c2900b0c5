"""What code reads from outside of the program: the environment, the command line, and files whose names are in the code."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any

from .bytecode import nested

__all__ = ["Reads", "reads_of"]

_SKIPPED = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"}
_READING = {"get", "setdefault", "pop", "__getitem__", "__contains__"}
_PARSING = {"parse_args", "parse_known_args"}
_OPENING = {"open", "read_bytes", "read_text"}
_WRITING = {"write", "write_bytes", "write_text", "writelines"}
_LOADING = {
    *("open", "load", "loadtxt", "genfromtxt", "fromfile", "load_file"),
    *("read", "read_csv", "read_parquet", "read_table"),
}


@dataclass
class Reads:
    """What a code object and those inside of it read.

    Attributes:
        variables: Names of variables of the environment.
        any_variable: Whether variables are read whose names are not in the code.
        arguments: Whether the command line is read.
        files: Files that there are.
    """

    variables: set[str] = field(default_factory=set)
    any_variable: bool = False
    arguments: bool = False
    files: set[Path] = field(default_factory=set)


def reads_of(code: CodeType, module: Mapping[str, Any]) -> Reads:
    """What code reads from outside.

    Args:
        code: The code object.
        module: The globals that it uses.
    """
    found = Reads()
    for one in nested(code):
        steps = [step for step in dis.get_instructions(one) if step.opname not in _SKIPPED]
        for place in range(len(steps)):
            if _is(steps, place, module, os, "environ"):
                _note_variable(found, steps, place, module)
            elif _is(steps, place, module, os, "getenv"):
                _note_name(found, steps[place + 1 :], module)
            elif _is(steps, place, module, sys, "argv"):
                found.arguments = True
        names = {*one.co_names}
        found.arguments |= bool(_PARSING & names)
        if _OPENING & names and not _WRITING & names:
            found.files |= _files_in(one, module)
        found.files |= _files_read_by(steps, module)
    return found


def _is(steps: Sequence[dis.Instruction], place: int, module: Mapping[str, Any], owner: ModuleType, name: str) -> bool:
    """Whether an instruction loads something of a module, also where that was imported by its name."""
    step = steps[place]
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return module.get(step.argval) is getattr(owner, name)
    if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or step.argval != name or not place:
        return False
    before = steps[place - 1]
    if before.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return module.get(before.argval) is owner
    return before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and before.argval == owner.__name__  # imported inside


def _note_variable(found: Reads, steps: Sequence[dis.Instruction], place: int, module: Mapping[str, Any]) -> None:
    """Note the variable that is read from ``os.environ``; one that is set, or taken out, is not read."""
    after = steps[place + 1 : place + 4]
    if [step.opname for step in after[1:2]] in (["STORE_SUBSCR"], ["DELETE_SUBSCR"]) or _is_update(after):
        return
    if after and after[0].opname == "CONTAINS_OP":
        _note_name(found, steps[_of_owner(steps, place) - 1 : place], module)
    elif after and after[0].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        _note_name(found, after[1:] if after[0].argval in _READING else (), module)
    else:
        _note_name(found, after, module)


def _of_owner(steps: Sequence[dis.Instruction], place: int) -> int:
    return place - 1 if steps[place].opname in ("LOAD_ATTR", "LOAD_METHOD") else place


def _is_update(after: Sequence[dis.Instruction]) -> bool:
    return bool(after) and after[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and after[0].argval == "update"


def _note_name(found: Reads, steps: Sequence[dis.Instruction], module: Mapping[str, Any]) -> None:
    name = _value(steps[0], module) if steps else None
    if isinstance(name, str):
        found.variables.add(name)
    else:
        found.any_variable = True


def _value(step: dis.Instruction, module: Mapping[str, Any]) -> Any:
    """The value that an instruction loads, if it is a constant or a global."""
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return module.get(step.argval)
    return step.argval if step.opname.startswith("LOAD_CONST") else None


def _files_in(code: CodeType, module: Mapping[str, Any]) -> set[Path]:
    """The files that constants and globals of code name; none for code that opens files to write them."""
    values = [*code.co_consts, *(module.get(name) for name in code.co_names)]
    return set() if any(map(_is_mode_to_write, values)) else _existing(values)


def _files_read_by(steps: Sequence[dis.Instruction], module: Mapping[str, Any]) -> set[Path]:
    """The files whose names are arguments of a function that reads, also by way of a local variable, but for those written."""
    steps = [step for step in steps if step.opname != "KW_NAMES"]
    read, written = list[Any](), list[Any]()
    for place, value in _names_in(steps, module):
        if isinstance(value, str | PurePath):
            after = [one for one in steps[place + 1 : place + 4] if not one.opname.startswith("CALL")]
            if _is_written(steps[place + 1 : place + 2], after, module):
                written.append(value)
            elif steps[place - 1].argval in _LOADING or [one.argval for one in after[:1]] in _OPENED:
                read.append(value)
    return _existing(read) - _existing(written)


def _names_in(steps: Sequence[dis.Instruction], module: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """The values that instructions load, and where; of a local variable, the one that was stored in it."""
    named = {after.argval: step for step, after in pairwise(steps) if after.opname == "STORE_FAST"}
    for place, step in enumerate(steps):
        yield place, _value(named.get(step.argval, step) if step.opname.startswith("LOAD_FAST") else step, module)


_OPENED = (["open"], ["read_bytes"], ["read_text"])


def _is_written(
    follows: Sequence[dis.Instruction], method: Sequence[dis.Instruction], module: Mapping[str, Any]
) -> bool:
    """Whether what follows the name of a file writes to it: a mode as the next argument, or a method of its path."""
    called = [one.argval for one in method[:1]]
    mode = method[1:2] if called == ["open"] else follows
    return called in (["write_text"], ["write_bytes"]) or any(_is_mode_to_write(_value(one, module)) for one in mode)


def _is_mode_to_write(value: Any) -> bool:
    return isinstance(value, str) and value[:1] in {*"wax"} and value.strip("waxbt+") == ""


def _existing(values: Iterable[Any]) -> set[Path]:
    paths = [Path(value) for value in values if isinstance(value, str | PurePath) and 0 < len(str(value)) < 256]
    return {path for path in paths if os.path.isfile(path)}
