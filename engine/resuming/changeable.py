"""What training can change in an engine beside the ``state_dict()`` of its modules: the one list of it.

These are trained tensors that are in no module, buffers that are not saved or change their shape, and attributes of the user's
classes, such as a counter or a hidden state. Whatever goes back inside the process puts them back (`Unsaved`), averages and best
weights include the trained tensors (`own_parameters`), and `findings.unsaved` reports what no checkpoint holds.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.blame import warn
from ..data.held_generators import set_state, state_of
from ..updates.spec import loss_module
from .iterators import Position, is_iterator
from .keys import OWN_PARAMETERS, UNSAVED

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = [
    "ATOMS",
    "CONTAINERS",
    "GENERATORS",
    "Holder",
    "Unsaved",
    "attributes_of",
    "buffer_names",
    "copy_of",
    "given_parameters",
    "going_back",
    "holders",
    "is_of_user",
    "is_own_parameter",
    "own_name",
    "own_parameters",
    "unchanged_attributes",
    "unsaved_buffers",
]

ATOMS = (bool, int, float, complex, str, bytes, type(None))
_DICTIONARIES = (dict, OrderedDict, defaultdict, Counter)
CONTAINERS = (list, tuple, set, deque, *_DICTIONARIES)
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)

_OF_MODULES = frozenset(vars(nn.Module()))
_OF_OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "signalfire"}
_OWN = "parameter "
_DEPTH = 6  # of containers in containers
_DEPTH_OF_OBJECTS = 4  # of objects in objects
_MOST_ITEMS = 10_000
_MOST_BYTES = 2**26  # of an array; a larger one is data, rather than what a forward changes


def own_parameters(engine: Engine, of_modules: Iterable[Tensor] | None = None) -> dict[str, Tensor]:
    """The trained tensors that are in no module, such as a temperature in ``parameters=``, by update and place among them.

    It is empty until the optimizers are built.

    Args:
        engine: The engine.
        of_modules: The parameters of its modules, where they are known.
    """
    known = set(map(id, engine.modules.parameters() if of_modules is None else of_modules))
    found: dict[str, Tensor] = {}
    for update in engine.updates:
        own = [parameter for parameter in update.parameters if id(parameter) not in known]
        known.update(map(id, own))
        found |= {own_name(update.name, place): one for place, one in enumerate(own)}
    return found


def own_name(update: str, place: int) -> str:
    """The name of a trained tensor in no module, by its place among those of an update."""
    return f"{_OWN}{place} of update {update!r}"


def given_parameters(
    engine: Engine, weights: Mapping[str, Any], state: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """The trained tensors in no module, with their values among weights, or in a whole state.

    Raises:
        ValueError: for values of another shape.
    """
    values = weights.get(OWN_PARAMETERS) or {
        own_name(update, place): value
        for update, part in state.get("updates", {}).items()
        for place, (_, value) in enumerate(sorted(part.get(OWN_PARAMETERS, {}).items()))
    }
    if not engine.training or not values:
        return []
    trained = own_parameters(engine)
    if missing := sorted(values.keys() - trained.keys()):
        warn(
            f"load_weights(): these parameters were not loaded: {', '.join(missing)}. They are in no module, and no "
            "optimizer holds them yet. If a factory builds the optimizer when the run begins, load the weights at "
            "STARTED, or pass a complete state to load_state_dict()"
        )
    for name in values.keys() & trained.keys():
        if values[name].shape != trained[name].shape:
            raise ValueError(
                f"load_weights(): {name} has shape {list(values[name].shape)} in the weights, but shape "
                f"{list(trained[name].shape)} in this engine"
            )
    return [(trained[name], values[name]) for name in values.keys() & trained.keys()]


def is_own_parameter(name: str) -> bool:
    """Whether it is a name that `own_parameters` gives; those of modules have no spaces."""
    return name.startswith(_OWN)


def _losses(engine: Engine) -> dict[str, nn.Module]:
    """The losses that are modules, but not the engine's, since they have nothing to train: no state holds their buffers."""
    losses = {f"{update.name}_loss": loss_module(update.spec) for update in engine.updates}
    own = {module for _, module in engine.modules.parts()}
    return {name: loss for name, loss in losses.items() if loss is not None and loss not in own}


def unsaved_buffers(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """The buffers that no state holds: those with ``persistent=False``, and those of losses that have nothing to train."""
    losses = _losses(engine)
    for root, model in (engine.modules | losses).items():
        for path, module in model.named_modules(prefix=root):
            for key, buffer in module._buffers.items():
                unsaved = root in losses or key in module._non_persistent_buffers_set
                if unsaved and isinstance(buffer, Tensor):
                    yield f"{path}.{key}", buffer


def buffer_names(root: nn.Module) -> set[str]:
    """The names of the buffers of a module and those inside of it, also of those that are None."""
    return {
        f"{path}.{key}" if path else key
        for path, module in root.named_modules(remove_duplicate=False)
        for key in module._buffers
    }


class Holder(NamedTuple):
    """An object of a class of the user, whose attributes a forward can change.

    Attributes:
        name: Where it is, such as "model.encoder".
        item: The object.
        attributes: Those that it holds itself, without what makes a module one.
    """

    name: str
    item: Any
    attributes: dict[str, Any]


def holders(engine: Engine) -> list[Holder]:
    """The modules of classes of the user, also losses, and the objects of such classes that they hold.

    Functions that an update calls are among them, with what they close over.
    """
    found: list[Holder] = []
    seen: set[int] = set()
    for root, model in (engine.modules | _losses(engine)).items():
        for path, module in model.named_modules(prefix=root):
            _add_holder(found, seen, path, module, depth=0)
    for update in engine.updates:  # what is called may be an object that is no module
        for part in ("forward", "loss", "function"):
            called = getattr(update.spec, part)
            called = getattr(called, part, None) or called
            _add_holder(found, seen, f"{update.name}_{part}", called, depth=0)
    return found


def _add_holder(found: list[Holder], seen: set[int], name: str, item: Any, depth: int) -> None:
    item = item.__self__ if isinstance(item, MethodType) else item
    if id(item) in seen or len(seen) == _MOST_ITEMS or not _has_attributes(item):
        return
    seen.add(id(item))
    attributes = attributes_of(item)
    found.append(Holder(name, item, attributes))
    if depth == _DEPTH_OF_OBJECTS or isinstance(item, FunctionType):
        return
    for key, value in attributes.items():
        for place, part in _parts_of(value):
            if not isinstance(part, nn.Module | Tensor):
                _add_holder(found, seen, f"{name}.{key}{place}", part, depth + 1)


def _has_attributes(item: Any) -> bool:
    """Whether it is an object of a class of the user, or a function that closes over something."""
    if isinstance(item, FunctionType):
        return item.__closure__ is not None
    return is_of_user(type(item)) and not isinstance(item, type)


def _parts_of(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """A value, or those in a container and the containers in it, each with its place."""
    if type(value) not in CONTAINERS:
        yield "", value
    elif depth < _DEPTH and len(value) <= _MOST_ITEMS:
        for number, (key, one) in enumerate(value.items() if isinstance(value, dict) else enumerate(value)):
            if type(one) not in ATOMS:
                where = f"[{key!r}]" if type(key) in ATOMS else f"[{number}]"
                yield from ((where + place, part) for place, part in _parts_of(one, depth + 1))


def is_of_user(kind: type) -> bool:
    """Whether objects of a class have attributes that code outside of Python, torch, NumPy and this package defines."""
    if issubclass(kind, FunctionType | Enum) or not (kind.__dictoffset__ or _slots(kind)):
        return False
    return any(base.__module__.partition(".")[0] not in _OF_OTHERS for base in kind.__mro__)


def attributes_of(item: Any) -> dict[str, Any]:
    """What an object holds by name, without what makes a module one; of a function, plain values that it closes over."""
    if isinstance(item, FunctionType):
        return {name: cell.cell_contents for name, cell in _cells(item).items()}
    hidden = _OF_MODULES if isinstance(item, nn.Module) else ()
    own = {name: getattr(item, name) for name in _slots(type(item)) if hasattr(item, name)}
    return own | {key: value for key, value in getattr(item, "__dict__", {}).items() if key not in hidden}


def _cells(function: FunctionType) -> dict[str, CellType]:
    """The cells of a function that hold plain values, dictionaries and iterators; its lists may be records, which stay."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    filled = {name: cell for name, cell in pairs if cell != CellType()}
    return {name: cell for name, cell in filled.items() if _is_plain(cell.cell_contents)}


def _is_plain(value: Any) -> bool:
    return type(value) in (*ATOMS, *_DICTIONARIES) or is_iterator(value)


def _slots(kind: type) -> tuple[str, ...]:
    """The attributes of a class that are kept in slots."""
    return tuple(
        name
        for base in kind.__mro__
        if base.__module__.partition(".")[0] not in _OF_OTHERS
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType)
    )


class Unsaved:
    """What an engine's modules hold beside their ``state_dict()``, to be put back in this process.

    It is part of each state that stays in the process. In a file it is empty: there, ``persistent=False`` means what it says.

    Args:
        engine: The engine.
        attributes: Whether to keep attributes as well as buffers.

    Attributes:
        lacking: What to report once the state goes to a file, which lacks what the forward or a handler has changed.
    """

    def __init__(self, engine: Engine, *, attributes: bool = True) -> None:
        self.lacking: list[Any] = []
        self._engine = weakref.ref(engine)
        losses = {module for root in _losses(engine).values() for module in root.modules()}
        modules = {module for _, module in engine.modules.parts()} | losses
        self._buffers = [
            (module, _kept_buffers(module, saved=module not in losses)) for module in modules if module._buffers
        ]
        self._without = [module for module in modules if not module._buffers]
        self._attributes = [
            (one.item, {key: _Kept(value) for key, value in one.attributes.items()})
            for one in (holders(engine) if attributes else ())
        ]

    def belongs_to(self, engine: Engine) -> bool:
        """Whether it is of this engine."""
        return self._engine() is engine

    def put_back(self, engine: Engine) -> None:
        """Put it back, if it is of this engine."""
        if not self.belongs_to(engine):
            return
        for module, kept in self._buffers:
            buffers = {key: one.restored() for key, one in kept.items()}
            module._buffers.clear()
            module._buffers.update(buffers)
        for module in self._without:
            module._buffers.clear()
        for item, kept in self._attributes:
            _put_attributes_back(item, kept)

    def report(self) -> None:
        """Report what the state lacks where it is not put back."""
        engine = self._engine()
        if engine is not None:
            for one in self.lacking:
                engine.findings.add(one, key=UNSAVED)

    def __deepcopy__(self, memo: Any) -> Unsaved:
        return self  # nobody changes it

    def __reduce__(self) -> tuple[type[OrderedDict[Any, Any]], tuple[()]]:
        self.report()
        return OrderedDict, ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unsaved)  # states are compared by what they save

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Unsaved()"


@contextmanager
def unchanged_attributes(item: Any) -> Iterator[None]:
    """Put back what an object holds in its attributes at the end of the ``with`` block."""
    kept = {key: _Kept(value) for key, value in attributes_of(item).items()}
    try:
        yield
    finally:
        _put_attributes_back(item, kept)


def _kept_buffers(module: nn.Module, *, saved: bool) -> dict[str, _Kept]:
    """The buffers themselves, since a forward may put others in their place; and the values of those that are not saved."""
    unsaved = module._non_persistent_buffers_set if saved else module._buffers.keys()
    return {key: _Kept(buffer, content=key in unsaved) for key, buffer in module._buffers.items()}


def _put_attributes_back(item: Any, kept: dict[str, _Kept]) -> None:
    if isinstance(item, FunctionType):
        for name, cell in _cells(item).items():
            if name in kept:
                cell.cell_contents = kept[name].restored()
        return
    for key, value in attributes_of(item).items():
        if key not in kept and isinstance(value, (*ATOMS, *CONTAINERS, Tensor, np.ndarray)):
            object.__delattr__(item, key)
    for key, one in kept.items():
        if not one.is_data:
            continue
        if key in _slots(type(item)):
            object.__setattr__(item, key, one.restored())
        else:
            vars(item)[key] = one.restored()


class _Kept:
    """A value, and what it holds now.

    Attributes:
        is_data: Whether it is a value that can be put back; not a function or class, which handlers may exchange.
    """

    def __init__(self, value: Any, *, content: bool = True, depth: int = 0) -> None:
        self.value = value
        self.is_data = not (isinstance(value, nn.Module | type) or callable(value))
        self._content: Any = None
        if isinstance(value, Tensor):
            graph = value.grad_fn is not None  # it is not held
            self._content = copy_of(value) if content or graph else None
            self.value = self._content if graph else value
        else:
            self._content = _content_of(value, depth)

    def restored(self) -> Any:
        """The value itself with what it held; another one where it cannot be changed in place."""
        value, content = self.value, self._content
        if content is None:
            return value
        if isinstance(value, Tensor):
            return restored(value, content)
        if isinstance(content, Position):
            return content.restored()
        if isinstance(value, GENERATORS):
            set_state(value, content)
        elif isinstance(value, np.ndarray):
            return _restored_array(value, content)
        elif isinstance(value, set):
            value.clear()
            value.update(content)
        elif isinstance(value, dict):
            items = {key: one.restored() for key, one in content.items()}
            value.clear()
            for key, one in items.items():  # a Counter's update would add
                value[key] = one
        else:
            parts = [one.restored() for one in content.values()]
            if isinstance(value, tuple):
                return value if all(a is b for a, b in zip(value, parts, strict=True)) else tuple(parts)
            value.clear()
            value.extend(parts)
        return value


def _content_of(value: Any, depth: int) -> Any:
    """What a value that is no tensor holds now; None for one that cannot change, or cannot be put back."""
    kind = type(value)
    if isinstance(value, GENERATORS):
        return state_of(value)
    if is_iterator(value):
        return Position(value)
    if kind is np.ndarray:
        return value.copy() if value.nbytes <= _MOST_BYTES else None
    if kind not in CONTAINERS or depth == _DEPTH or len(value) > _MOST_ITEMS:
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return set(value) if kind is set else {key: _Kept(one, depth=depth + 1) for key, one in items}


_LARGE = 2**20  # bytes
# Of large tensors, the last copy, which nobody changes.
_COPIES = WeakTensorKeyDictionary()


def copy_of(tensor: Tensor) -> Tensor:
    """A copy; of a large constant in main memory the same one for each state, since comparing costs less than copying.

    A tensor's version does not tell, since changes through ``.data`` do not count.
    """
    constant = tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= _LARGE
    if not constant or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor.detach().clone()
    copy: Tensor | None = _COPIES.get(tensor)
    if copy is None or copy.dtype != tensor.dtype or not torch.equal(copy, tensor):
        copy = tensor.detach().clone()
        _COPIES[tensor] = copy
    return copy


@contextmanager
def going_back(engine: Engine, state: Mapping[str, Any]) -> Iterator[None]:
    """Put back what a state of this process holds beside the modules' own, for a block that puts back the rest; or nothing."""
    if not isinstance(unsaved := state.get(UNSAVED), Unsaved):
        yield
        return
    before = Unsaved(engine)
    try:
        unsaved.put_back(engine)
        yield
    except BaseException:
        before.put_back(engine)
        raise


def _restored_array(array: Any, content: Any) -> Any:
    """An array with its earlier content; a copy of that where the array itself cannot be changed in place."""
    if array.shape != content.shape or array.dtype != content.dtype or not array.flags.writeable:
        return content.copy()
    np.copyto(array, content)
    return array


def restored(tensor: Tensor, content: Tensor) -> Tensor:
    """A tensor with its earlier content; a copy of that where the tensor itself cannot be changed in place."""
    if tensor is content or tensor.shape != content.shape or tensor.dtype != content.dtype:
        return content.clone()
    try:
        with torch.no_grad():
            return tensor.copy_(content)
    except RuntimeError:  # of an expanded tensor, or one of inference mode, which cannot be changed in place
        return content.clone()
