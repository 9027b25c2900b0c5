"""Digests of functions and values: equal for what makes the same runs, other for what may make others."""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import importlib
import io
import os
import pathlib
import random
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from signalfire import Engine

from .bytecode import Names, instructions, names_in
from .composition import parts_of
from .outside import Reads, reads_of
from .packages import file_digest, is_installed, version_of

__all__ = ["Fingerprint", "NotDigestibleError", "fingerprint"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, type(Ellipsis), type(NotImplemented))
_NOTHING = (
    type(threading.Lock()),
    type(threading.RLock()),
    weakref.ReferenceType,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)
"""What says nothing about a run."""

_OF_A_CLASS = {
    "__annotations_cache__",
    "__doc__",
    "__module__",
    "__dict__",
    "__weakref__",
    "__firstlineno__",
    "__slotnames__",
    "__static_attributes__",
    "_abc_impl",
    "_value2member_map_",
}
"""What says nothing about a class, or what Python adds to it as it is used."""

_OF_A_MODULE = {
    "__builtins__",
    "__cached__",
    "__doc__",
    "__file__",
    "__loader__",
    "__name__",
    "__spec__",
    "__warningregistry__",
}
_STREAMS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, io.IOBase)
_IN_MEMORY = (io.BytesIO, io.StringIO)


class NotDigestibleError(TypeError):
    """Raised for a value whose content cannot be compared with that of stored runs; ``trail`` says where it is."""

    def __init__(self, trail: Iterable[str], value: object, why: str = "") -> None:
        self.trail, self.value = tuple(trail), value
        where = ", in ".join(reversed(self.trail))
        what = "os.environ" if value is os.environ else _short(value)
        super().__init__(
            f"{where}: the content of {what} cannot be compared with the content in stored runs{why and f' ({why})'}"
        )


def fingerprint(value: object, what: str, *, strict: bool = True, structure: bool = False) -> str:
    """A digest of a function or value, and of all that it depends on.

    Functions and classes that are not of an installed package count with their bytecode, default values, closures, and the
    globals and modules that they use; comments, docstrings and line numbers do not count. Those of installed packages count with
    name and version. Other objects count with their class and their state. Variables of the environment, the command line and
    files count with their content where the code of a function names them.

    Args:
        value: The value.
        what: What it is, for the error.
        strict: Whether a value that cannot be digested is an error; otherwise it counts with its type.
        structure: Whether tensors count with shape and dtype only, and random states not at all.

    Raises:
        NotDigestibleError: for generators, open files and other values whose content cannot be read.

    Example:
        >>> from functools import partial
        >>> fingerprint(partial(print, (4, 4)), "build") == fingerprint(
        ...     partial(print, (4, 4)), "build"
        ... )
        True
        >>> fingerprint(partial(print, (4, 4)), "build") == fingerprint(
        ...     partial(print, (4, 8)), "build"
        ... )
        False
    """
    made = Fingerprint(strict=strict, structure=structure)
    made.add(value, what)
    return made.hexdigest()


class Fingerprint:
    """A digest to which values are added, one after the other; for the arguments see `fingerprint`."""

    def __init__(self, *, strict: bool = True, structure: bool = False) -> None:
        self._hash = hashlib.sha256()
        self._strict, self._structure = strict, structure
        self._seen: dict[int, tuple[int, object]] = {}  # the objects are kept, so that no other one gets their id
        self._trail: list[str] = []

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: object, what: str) -> None:
        """Add a value, which an error calls ``what``."""
        self._trail.append(what)
        try:
            self._value(value)
        except RecursionError:
            self._refuse(value, "it is nested too deeply")
        finally:
            self._trail.pop()

    def _say(self, *words: object) -> None:
        for word in words:
            encoded = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self._hash.update(struct.pack("<q", len(encoded)) + encoded)

    def _refuse(self, value: object, why: str = "") -> None:
        if self._strict:
            raise NotDigestibleError(self._trail, value, why)
        self._say("unknown", type(value).__qualname__)

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._say(kind.__name__, value if isinstance(value, bytes) else repr(value))
        elif kind in (tuple, torch.Size):
            self._say("tuple", len(value))
            for place, item in enumerate(value):
                self.add(item, f"item {place}")
        elif kind in (set, frozenset):
            self._say("set", *sorted(self._apart(item) for item in value))
        elif id(value) in self._seen:
            self._say("again", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            for kinds, method in _METHODS:
                if isinstance(value, kinds):
                    method(self, value)
                    return
            self._object(value)

    def _apart(self, value: object) -> str:
        return fingerprint(
            value, "an item of " + (self._trail or ["a set"])[-1], strict=self._strict, structure=self._structure
        )

    # ---- containers and tensors ----------------------------------------------------------------------------------

    def _list(self, value: list[Any]) -> None:
        if type(value) is not list:
            self._object(value)
            return
        self._say("list", len(value))
        for place, item in enumerate(value):
            self.add(item, f"item {place}")

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        if type(value) not in (dict, types.MappingProxyType):
            self._object(value)
            return
        self._say("dict", len(value))
        for key, item in list(value.items()):
            self.add(key, "a key")
            self.add(item, repr(key)[:40])

    def _tensor(self, value: Tensor) -> None:
        self._say("tensor", type(value).__qualname__, value.dtype, tuple(value.shape), value.requires_grad)
        if self._structure or value.device.type == "meta":
            return
        if value.layout is not torch.strided or type(value) not in (Tensor, nn.Parameter):
            self._refuse(value)
            return
        self._hash.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    def _array(self, value: Any) -> None:
        self._say("array", value.dtype, value.shape)
        if self._structure:
            return
        if value.dtype.hasobject:
            self.add(value.tolist(), "its items")
        else:
            self._hash.update(value.tobytes())

    def _generator(self, value: torch.Generator) -> None:
        if value is not torch.default_generator and not self._structure:
            self.add(value.get_state(), "its state")

    def _module_of_torch(self, value: nn.Module) -> None:
        self._class(type(value))
        for name, item in list(vars(value).items()):
            # Hooks are kept by numbers that count all hooks of the process.
            self.add(list(item.values()) if "_hooks" in name and isinstance(item, dict) else item, name)

    # ---- code ----------------------------------------------------------------------------------------------------

    def _function(self, value: types.FunctionType) -> None:
        installed = is_installed(value.__module__, value.__code__.co_filename)
        if installed:
            self._say("function", value.__module__, value.__qualname__, version_of(value.__module__))
        else:
            self._say("own function")
            self._code(value.__code__)
            self.add(value.__defaults__, "its default values")
            self.add(value.__kwdefaults__, "its default values")
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                self.add(cell.cell_contents, f"the variable {name!r} of {value.__qualname__}()")
            except ValueError:  # a variable that is not set
                self._say("unset", name)
        for name, item in list(vars(value).items()):
            if not name.startswith("_signalfire"):
                self.add(item, f"the attribute {name!r} of {value.__qualname__}()")
        if not installed:
            self._outside(reads_of(value.__code__, value.__globals__), value)
            self._names(names_in(value.__code__), value.__globals__, value.__qualname__)

    def _code(self, code: types.CodeType) -> None:
        self._say("code")
        for instruction in instructions(code):
            self.add(instruction, "its code")

    def _outside(self, reads: Reads, user: types.FunctionType) -> None:
        """What a function reads from outside of the program, as it is now."""
        if reads.any_variable:
            why = f"{user.__qualname__}() reads environment variables whose names do not appear in its code"
            self._refuse(os.environ, why)
        for name in sorted(reads.variables):
            self._say("environment", name, repr(os.environ.get(name)))
        if reads.arguments:
            self._say("command line", *sys.argv[1:])
        for path in sorted(reads.files):
            self._say("file", path.name, file_digest(str(path)))

    def _names(self, names: Names, module: Mapping[str, Any], user: str) -> None:
        used = set(module) if names.own_globals else names.globals & set(module)
        for name in sorted(used - _OF_A_MODULE):
            self._say("global", name)
            if module[name] is os.environ or module[name] is sys.argv:  # it counts by what is read of it
                continue
            if isinstance(module[name], types.ModuleType):
                self._used_module(module[name], names)
            else:
                self.add(module[name], f"the variable {name!r}, which {user}() uses")
        for name, level, taken in sorted(names.imports):
            full = importlib.util.resolve_name("." * level + name, module.get("__package__") or "") if level else name
            self._imported(full, taken, names)

    def _imported(self, name: str, taken: tuple[str, ...], names: Names) -> None:
        self._say("import", name)
        if is_installed(name):
            self._say(version_of(name))
            return
        try:
            found = importlib.import_module(name)
        except Exception as error:  # as it will be in the run
            self._say("failed", type(error).__name__)
            return
        for one in taken:
            if not hasattr(found, one) or isinstance(getattr(found, one), types.ModuleType):
                self._imported(f"{name}.{one}", (), names)
        self._used_module(found, names)

    def _used_module(self, module: types.ModuleType, names: Names) -> None:
        """A module as code uses it: those of its variables whose names are in the code."""
        if names.dynamic or is_installed(module.__name__, getattr(module, "__file__", None)):
            self.add(module, f"the module {module.__name__}")
            return
        self._say("module")
        for name in sorted(names.all & set(vars(module))):
            value = vars(module)[name]
            if isinstance(value, types.ModuleType):
                if id(value) not in self._seen:
                    self._seen[id(value)] = len(self._seen), value
                    self._used_module(value, names)
            else:
                self.add(value, f"{module.__name__}.{name}")

    def _module(self, value: types.ModuleType) -> None:
        path = getattr(value, "__file__", None)
        if is_installed(value.__name__, path):
            self._say("module", value.__name__, version_of(value.__name__))
        elif path is not None and not path.endswith(".py"):
            self._say("module", value.__name__, file_digest(path))
        else:
            self._say("own module")
            for name, item in sorted(vars(value).items()):
                if not (name.startswith("__") and name.endswith("__")):
                    self.add(item, f"{value.__name__}.{name}")

    def _class(self, value: type) -> None:
        if is_installed(value.__module__, None):
            self._say("class", value.__module__, value.__qualname__, version_of(value.__module__))
            return
        self._say("own class")
        self.add(value.__bases__, f"the bases of {value.__qualname__}")
        for name, item in list(vars(value).items()):
            descriptor = isinstance(item, types.GetSetDescriptorType | types.MemberDescriptorType)
            empty = name == "__annotations__" and not item  # Python makes them as they are read
            if name not in _OF_A_CLASS and not descriptor and not empty:
                self._say(name)
                self.add(item, f"{value.__qualname__}.{name}")

    def _builtin(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        module = getattr(value, "__module__", None)
        self._say("builtin", module, getattr(value, "__qualname__", value))
        if isinstance(owner, types.ModuleType) or module is not None:
            name = str(module or getattr(owner, "__name__", ""))
            file = getattr(sys.modules.get(name), "__file__", None)
            if not is_installed(name, file):
                self._say(file_digest(file) if file else "")
        elif owner is not None and not _is_global_generator(owner):
            self.add(owner, "its object")

    def _partial(self, value: functools.partial[Any]) -> None:
        self._say("partial")
        self.add(value.func, "the function of the partial")
        for place, item in enumerate(value.args):
            self.add(item, f"argument {place} of the partial")
        for name, item in sorted(value.keywords.items()):
            self._say(name)
            self.add(item, f"the argument {name!r} of the partial")

    def _method(self, value: types.MethodType) -> None:
        self._say("method")
        self.add(value.__func__, "its function")
        if not _is_global_generator(value.__self__):
            self.add(value.__self__, "its object")

    def _wrapped(self, value: Any) -> None:
        self._say("wrapper", type(value).__qualname__)
        for name in ("__wrapped__", "__func__", "fget", "fset", "fdel"):
            if (function := getattr(value, name, None)) is not None:
                self.add(function, f"the function of the {type(value).__name__}")

    # ---- objects -------------------------------------------------------------------------------------------------

    def _engine(self, value: Engine) -> None:
        for name, part in parts_of(value).items():
            self.add(part, name)

    def _enum(self, value: enum.Enum) -> None:
        self.add(type(value), "its class")
        self._say(value.name)

    def _stream(self, value: object) -> None:
        if isinstance(value, _IN_MEMORY):
            self.add(value.getvalue(), "its content")
        else:
            self._refuse(value)

    def _object(self, value: Any) -> None:
        """An object of any other class: the class, and the state that a copy would get."""
        kind = type(value)
        try:
            reduced = _reduced(value)
        except Exception as error:
            if is_installed(kind.__module__, None) and callable(value) and hasattr(value, "__name__"):
                self._say("callable", kind.__module__, value.__name__, version_of(kind.__module__))
            else:
                self._refuse(value, f"{error}")
            return
        self._say("object")
        self.add(kind, f"the class {kind.__qualname__}")
        if isinstance(reduced, str):
            self._say(reduced)
            return
        function, arguments, *rest = reduced
        self.add(function, "the function that creates it")
        self.add(arguments, f"{kind.__qualname__} object")
        for part in rest:
            items = (
                part if part is None or isinstance(part, dict | tuple) else list(part) if _is_iterator(part) else part
            )
            self.add(items, f"a {kind.__qualname__} object")


def _reduced(value: Any) -> Any:
    """What copies an object; its class stays as it was, without the names of slots that copyreg notes there."""
    kind = type(value)
    reduce = copyreg.dispatch_table.get(kind)
    noted = "__slotnames__" in vars(kind)
    try:
        return value.__reduce_ex__(2) if reduce is None else reduce(value)
    finally:
        if not noted and "__slotnames__" in vars(kind):
            type.__delattr__(kind, "__slotnames__")


def _is_iterator(value: object) -> bool:
    return hasattr(value, "__next__")


def _is_global_generator(value: object) -> bool:
    """Whether this is a generator that each run seeds before it builds anything."""
    numpy = sys.modules.get("numpy.random.mtrand")
    return value is getattr(random, "_inst", None) or (numpy is not None and value is getattr(numpy, "_rand", None))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


_METHODS: tuple[tuple[Any, Callable[[Fingerprint, Any], None]], ...] = (
    (list, Fingerprint._list),
    ((dict, types.MappingProxyType), Fingerprint._mapping),
    (Tensor, Fingerprint._tensor),
    (numpy.ndarray, Fingerprint._array),
    (torch.Generator, Fingerprint._generator),
    (nn.Module, Fingerprint._module_of_torch),
    (Engine, Fingerprint._engine),
    (types.FunctionType, Fingerprint._function),
    (types.CodeType, Fingerprint._code),
    (types.ModuleType, Fingerprint._module),
    (type, Fingerprint._class),
    (functools.partial, Fingerprint._partial),
    (types.MethodType, Fingerprint._method),
    (
        (
            types.BuiltinFunctionType,
            types.MethodDescriptorType,
            types.WrapperDescriptorType,
            types.MethodWrapperType,
            types.ClassMethodDescriptorType,
        ),
        Fingerprint._builtin,
    ),
    ((classmethod, staticmethod, property, functools._lru_cache_wrapper), Fingerprint._wrapped),
    (enum.Enum, Fingerprint._enum),
    (pathlib.PurePath, lambda self, value: self._say("path", value)),
    (_NOTHING, lambda self, value: self._say(type(value).__qualname__)),
    (_STREAMS, Fingerprint._stream),
)
