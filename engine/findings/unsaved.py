"""What the forward changes and no saved state holds: buffers that are not persistent, and attributes such as a counter.

Within the process they are put back (`changeable`). A run that resumes from a file begins with what the model is built with.
Values are compared with those after the first forward, so that caches, which are filled once, are not reported.
"""

from __future__ import annotations

import dis
import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..core.words import listed
from ..data.held_generators import state_of
from ..resuming.changeable import ATOMS, CONTAINERS, GENERATORS, Holder, holders, unsaved_buffers
from ..resuming.iterators import is_iterator, place_of
from .own_weights import note_taken
from .reports import Finding, finding

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Code", "Marks", "lacking", "mark_of", "marks_of"]

Marks = Mapping[str, Hashable]
"""A mark of each value by its place, such as "model.calls"; equal for equal values."""

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_READS = {"LOAD_ATTR", "LOAD_METHOD"}
_RECORDS = {"add", "append", "appendleft", "extend", "insert", "update"}
_METRICS = {"torchmetrics", "torcheval"}  # whose states are those of an epoch
_MOST_ITEMS = 1000
_MOST_BYTES = 2**24
_DEPTH = 3


def marks_of(engine: Engine) -> dict[str, Hashable]:
    """Marks of all that the forward may carry from one batch to the next, and that the modules do not save."""
    every = list(holders(engine))
    every_kind: set[Any] = {type(one.item) for one in every}
    read, written = (set[str]().union(*(_names(kind)[place] for kind in every_kind)) for place in (2, 3))
    shown = written - read  # each forward writes them before anything reads them
    buffers = [(name, buffer) for name, buffer in unsaved_buffers(engine) if name.rpartition(".")[2] not in shown]
    marks: dict[str, Hashable] = {f"buffer {name}": mark_of(buffer) for name, buffer in buffers}
    found = [one for one in every if not _saves_more(one.item)]
    kinds: set[Any] = {type(one.item) for one in found}
    carried, used, held = (set[str]().union(*(_names(kind)[place] for kind in kinds)) for place in range(3))
    for holder in found:
        marks |= _marks_in(holder, carried, used, held)
    return marks


def lacking(engine: Engine, before: Marks) -> Iterator[Finding]:
    """The finding that a saved state lacks what has changed since the first forward, if anything has.

    It warns of buffers. Attributes, and buffers of another shape, may be counters that are only shown, or caches: those are
    information.
    """
    now = marks_of(engine)
    changed = [name for name, mark in before.items() if name in now and now[name] != mark]
    if not changed:
        return
    is_caching = not any(_has_shape_of(now[one], before[one]) for one in changed if one.startswith("buffer "))
    buffers = [name.removeprefix("buffer ") for name in changed if name.startswith("buffer ")]
    attributes = [name for name in changed if not name.startswith("buffer ")]
    what, ways_out = [], []
    if buffers:
        of_models = all(name.partition(".")[0] in engine.modules for name in buffers)
        what.append(f"the buffers {listed(buffers)}")
        ways_out.append(
            "register the buffers with persistent=True"
            if of_models
            else "pass the loss to the engine: Engine(Update(lambda engine, batch: engine.model['model'](batch[0]), "
            "...), model={'model': model, 'criterion': loss})"
        )
    if attributes:
        what.append(f"the attributes {listed(attributes)}")
        ways_out.append(
            "make each attribute a buffer of a module (register_buffer), or let the module save it with get_extra_state "
            "and set_extra_state"
        )
    yield finding(
        "W47",
        f"{' and '.join(what)} change during training, but no saved state contains them. A resumed run starts without "
        "these changes",
        f"{'; '.join(ways_out)}; allow W47 if the results do not depend on these values",
        severity="info" if is_caching else "warning",
    )


def _has_shape_of(mark: Hashable, other: Hashable) -> bool:
    return isinstance(mark, tuple) and isinstance(other, tuple) and mark[:2] == other[:2]


def _saves_more(item: Any) -> bool:
    """Whether a module saves more than parameters and buffers, or is a metric."""
    kind = type(item)
    if any(base.__module__.partition(".")[0] in _METRICS for base in kind.__mro__):
        return True
    if not isinstance(item, nn.Module):
        return False
    own = ("get_extra_state", "_save_to_state_dict", "state_dict")
    hooked = any(getattr(hook, "func", None) is not note_taken for hook in item._state_dict_hooks.values())
    return hooked or any(getattr(kind, name) is not getattr(nn.Module, name) for name in own)


def _marks_in(holder: Holder, carried: set[str], used: set[str], held: set[str]) -> Iterator[tuple[str, Hashable]]:
    for key, value in holder.attributes.items():
        kind: Any = type(holder.item)
        if isinstance(value, Tensor) and key in _names(kind)[3]:
            continue  # its own forward stores it, such as a loss for the module around it, before it is read
        if key in _compared(holder, value, carried, used, held) and (mark := mark_of(value)) is not None:
            yield f"{holder.name}.{key}", mark


def _compared(holder: Holder, value: Any, carried: set[str], used: set[str], held: set[str]) -> Iterable[str]:
    """The attributes that are compared if they hold a value such as this."""
    changes = isinstance(value, (*CONTAINERS, *GENERATORS, np.ndarray))  # in place
    if isinstance(holder.item, FunctionType):
        return () if changes else holder.attributes  # its containers may be records
    if changes or is_iterator(value):
        return used
    return held if isinstance(value, Tensor) else carried


_NUMBERS: Mapping[type, str] = {int: "number", float: "number"}  # 0 and 0.0 are the same


def mark_of(value: Any, depth: int = 0) -> Hashable:
    """A mark of a value; None for one that is not compared."""
    if type(value) in ATOMS:
        return _NUMBERS.get(type(value), type(value).__name__), repr(value).removesuffix(".0")
    if isinstance(value, Tensor):
        return _mark_of_tensor(value)
    if isinstance(value, GENERATORS):
        state = state_of(value)
        return _mark_of_tensor(state) if isinstance(state, Tensor) else repr(state)
    if isinstance(value, np.ndarray):
        large = value.dtype.hasobject or value.nbytes > _MOST_BYTES
        return None if large else (str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).digest())
    if is_iterator(value):
        return place_of(value)
    return _mark_of_container(value, depth)


def _mark_of_container(value: Any, depth: int) -> Hashable:
    if type(value) not in CONTAINERS or depth == _DEPTH or len(value) > _MOST_ITEMS:
        return None
    return type(value).__name__, tuple(mark_of(item, depth + 1) for item in _items_of(value))


def _items_of(container: Any) -> Iterable[Any]:
    """What a container holds, in an order that equal ones share."""
    if isinstance(container, dict):
        return chain.from_iterable(container.items())
    return sorted(container, key=repr) if isinstance(container, set) else container


def _mark_of_tensor(tensor: Tensor) -> Hashable:
    kind = str(tensor.dtype), tuple(tensor.shape)
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    if tensor.numel() * tensor.element_size() > _MOST_BYTES:
        return *kind, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return *kind, hashlib.sha256(content.numpy().tobytes()).digest()


@lru_cache(maxsize=256)
def _names(kind: type) -> tuple[frozenset[str], ...]:
    """Attributes that the code of a class reads before it stores them; all that it reads; those that it reads before any store,
    and those that it stores before any read.

    Of a module it is the code of its forward, and of what that calls; of other classes that of all methods.
    """
    functions = {
        name: function
        for base in reversed(kind.__mro__)
        if base is not nn.Module
        for name, function in vars(base).items()
        if isinstance(function, FunctionType)
    }
    waiting = ["forward"] if issubclass(kind, nn.Module) else [name for name in functions if name != "__init__"]
    seen: set[str] = set()
    first_read: set[str] = set()
    read: set[str] = set()
    stored: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        code = Code(functions[name].__code__)
        first_read |= code.first_read
        read |= code.read
        stored |= code.stored
        waiting += read - seen
    return frozenset(first_read & stored), frozenset(read), frozenset(first_read), frozenset(stored - first_read)


class Code:
    """The attributes that a function and those inside of it use.

    Args:
        code: The code of the function.
        of: Name of the variable whose attributes are meant, such as "self"; None for those of anything.

    Attributes:
        read: Those that it reads.
        stored: Those that it stores.
        first_read: Those that it may read before it has stored them.
    """

    def __init__(self, code: CodeType, of: str | None = None) -> None:
        instructions = list(dis.get_instructions(code))
        jumps = [(one.offset, one.argval) for one in instructions if one.opcode in _JUMPS]
        used = [(_use_of(instructions, place, of), one) for place, one in enumerate(instructions)]
        stores = [(one.offset, one.argval) for use, one in used if use == "store"]
        reads: list[tuple[float, str]] = [(one.offset, one.argval) for use, one in used if use == "read"]
        inner = [Code(constant, of) for constant in code.co_consts if isinstance(constant, CodeType)]
        reads += [(math.inf, name) for one in inner for name in one.read]

        def is_stored_before(place: float, name: str) -> bool:
            """Whether a store comes before, over which nothing jumps."""
            return any(
                at < place and not any(jump < at < target <= place for jump, target in jumps)
                for at, stored in stores
                if stored == name
            )

        self.read: set[str] = {name for _, name in reads}
        self.stored: set[str] = {name for _, name in stores}.union(*(one.stored for one in inner))
        self.first_read: set[str] = {name for place, name in reads if not is_stored_before(place, name)}


def _use_of(instructions: Sequence[dis.Instruction], place: int, of: str | None) -> Literal["store", "read"] | None:
    """Whether an instruction stores or reads an attribute, if it is one of the variable ``of``."""
    own = instructions[place]
    if own.opcode in _JUMPS or (of is not None and not _is_of(of, instructions, place)):
        return None
    cleared = of is not None and _calls(instructions[place + 1 : place + 2], {"clear"})
    if own.opname == "STORE_ATTR" or cleared:  # which is as good as another one in its place
        return "store"
    return "read" if own.opname in _READS and not _records(instructions[place + 1 : place + 3]) else None


def _is_of(name: str, instructions: Sequence[dis.Instruction], place: int) -> bool:
    """Whether an instruction comes right after a variable is loaded, as it does for an attribute of that variable.

    In ``self.count += 1`` the variable is copied, and its attribute stored once the sum has been swapped with it.
    """
    before = instructions[place - 1] if place else None
    if before is not None and before.opname in ("COPY", "DUP_TOP"):
        before = instructions[place - 2]
    elif before is not None and before.opname in ("SWAP", "ROT_TWO"):
        return True
    if before is None or not before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return False
    loaded = before.argval
    return bool(name == (loaded[-1] if isinstance(loaded, tuple) else loaded))


def _calls(following: Sequence[dis.Instruction], methods: set[str]) -> bool:
    """Whether what comes after an attribute is read is one of these methods of it."""
    return bool(following) and following[0].opname in _READS and following[0].argval in methods


def _records(following: Sequence[dis.Instruction]) -> bool:
    """Whether what comes after an attribute is read only adds to it, as in ``self.seen.append(x)`` and ``self.seen[key] = x``."""
    if _calls(following, _RECORDS):
        return True
    return len(following) == 2 and following[0].opname.startswith("LOAD_") and following[1].opname == "STORE_SUBSCR"
