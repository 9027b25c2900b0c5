"""What the runs of a study share although each has to have its own: handlers, engines, and what an earlier run has changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Handler
from signalfire.data.loading import generators_of
from signalfire.resuming.changeable import is_of_user, own_parameters
from signalfire.updates.spec import loss_module

from .contents import Content, contents, digest_of

__all__ = ["Left", "SharedError", "check_new", "check_not_left"]


class SharedError(ValueError):
    """Raised for a study whose ``build`` returns something that an earlier run of it has used."""


class _ByIdentity:
    """Notes about objects, by their identity, for as long as they exist."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[Callable[[], Any], Any]] = {}

    def note(self, thing: Any, what: Any) -> None:
        key = id(thing)
        try:
            refer: Callable[[], Any] = weakref.ref(thing, lambda _: self._notes.pop(key, None))
        except TypeError:  # what nothing can refer to weakly, such as a generator before torch 2.13, is kept

            def refer() -> Any:
                return thing

        self._notes[key] = refer, what

    def of(self, thing: Any) -> Any:
        found = self._notes.get(id(thing))
        return None if found is None or found[0]() is not thing else found[1]


_used = _ByIdentity()
"""The handlers and engines of earlier runs."""

_left = _ByIdentity()
"""What earlier runs have changed, each with a digest of how they left it."""

_left_values = _ByIdentity()
"""The objects whose attributes earlier runs have changed, each with these attributes as they left them."""


def check_new(thing: Engine | Handler, what: str) -> None:
    """Raise SharedError for a handler, or for an engine with its handlers, that an earlier run of a study had; note it.

    Args:
        thing: The handler or the engine.
        what: Who made it, for messages.
    """
    for one in [*_engines_in(thing), thing] if isinstance(thing, Engine) else [thing]:
        handlers = list(one.handlers.values()) if isinstance(one, Engine) else [one]
        for handler in handlers:
            _check_unused(handler, what, f"the handler {handler.name!r} ({type(handler).__name__})")
        if isinstance(one, Engine):
            _check_unused(one, what, "the same evaluator" if one is not thing else "the same engine")


def _check_unused(thing: Any, what: str, named: str) -> None:
    if _used.of(thing) is not None:
        raise SharedError(
            f"{what} returned {named} for a second run, so the second run would start with the changes from the "
            "first run; create a new object inside the function in each call"
        )
    _used.note(thing, "used")


def _engines_in(engine: Engine) -> Iterator[Engine]:
    """The evaluators that the handlers of an engine hold, also in lists and mappings."""
    for handler in engine.handlers.values():
        yield from _engines_among(vars(handler).values(), depth=3)


def _engines_among(values: Iterable[Any], depth: int) -> Iterator[Engine]:
    for value in values:
        if isinstance(value, Engine):
            yield value
        elif depth and isinstance(value, list | tuple | dict | set):
            yield from _engines_among(value.values() if isinstance(value, dict) else value, depth - 1)


def check_not_left(engine: Engine, what: str) -> None:
    """Raise SharedError for what is still as an earlier run has left it: tensors, optimizers, attributes, generators."""
    for name, (thing, digest) in _stateful(engine).items():
        _check_changed_back(thing, digest, name, what)
    _check_held(contents({"engine": engine}), what)


def _check_changed_back(thing: Any, digest: str, name: str, what: str) -> None:
    if _left.of(thing) == digest:
        raise SharedError(
            f"{what} returned {name}, already modified by an earlier run, so the runs of the study would not be "
            "independent; create the model, its optimizer and its data inside the function, each time it is called"
        )


def _check_held(found: Mapping[str, Content], what: str) -> None:
    """Check the generators of loaders, and the attributes of data sets, losses and other objects of the user."""
    for generator in _generators(found):
        if _left.of(generator) == digest_of([generator.get_state()]):
            raise SharedError(
                f"{what} returned data whose generator an earlier run has advanced, so the order of the samples "
                "depends on the earlier run; create the DataLoader and its generator inside the function in each call"
            )
    for name, content in _changeable(found).items():
        for key, left in (_left_values.of(content.thing) or {}).items():
            if content.values.get(key) == left:
                raise SharedError(
                    f"{what} returned {name.removeprefix('engine.')} ({type(content.thing).__name__}), whose {key!r} "
                    "was changed by an earlier run, so the runs of the study would depend on each other; create a new "
                    "object inside the function in each call, or reset the attribute in the function"
                )


class Left:
    """Notes what a run leaves behind in what its engine holds.

    Args:
        engine: The engine, before the run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: dict[int, str] = {}
        self._values: dict[int, Content] = {}
        self._note_before(contents({"engine": engine}))

    def started(self) -> None:
        """Check what is known now: the data of the run, and the tensors of the optimizers that were built."""
        what = f"build({self._engine.seed})"
        for name, (thing, digest) in _stateful(self._engine).items():
            if id(thing) not in self._before:
                _check_changed_back(thing, digest, name, what)
        found = contents({"the data": self._data()})
        _check_held(found, what)
        self._note_before(found)

    def note(self) -> None:
        """Note what has changed."""
        found = contents({"engine": self._engine, "the data": self._data()})
        for thing, digest in self._digested(found):
            if self._before.get(id(thing)) not in (None, digest):
                _left.note(thing, digest)
        for content in _changeable(found).values():
            before = self._values.get(id(content.thing))
            if before is not None and (changed := _changed(before.values, content.values)):
                _left_values.note(content.thing, changed)

    def _digested(self, found: Mapping[str, Content]) -> list[tuple[Any, str]]:
        """What has a state, generators included, each with its digest."""
        generators = [(one, digest_of([one.get_state()])) for one in _generators(found)]
        return [*_stateful(self._engine).values(), *generators]

    def _note_before(self, found: Mapping[str, Content]) -> None:
        for thing, digest in self._digested(found):
            self._before.setdefault(id(thing), digest)
        for content in _changeable(found).values():
            self._values.setdefault(id(content.thing), content)

    def _data(self) -> Any:
        return None if self._engine.feed.source is None else self._engine.feed.source.given


def _changeable(found: Mapping[str, Content]) -> dict[str, Content]:
    """The objects whose attributes runs may depend on: data sets, and those of the user's classes.

    Handlers and engines are not shared at all. `set_epoch` puts a sampler back.
    """
    return {
        name: content
        for name, content in found.items()
        if (isinstance(content.thing, Dataset) or is_of_user(type(content.thing)))
        and not isinstance(content.thing, Handler | Engine)
        and not hasattr(content.thing, "set_epoch")
    }


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The values that a run has changed, as it left them.

    Not what it has added to a cache, or made on first use, and not the tensors of modules, which are compared themselves.
    """
    return {
        key: after.get(key)
        for key, value in before.items()
        if value != after.get(key)
        and value not in _UNSET
        and not key.startswith("(")
        and not _has_grown(key, value, after)
    }


_UNSET = ("None", "False", "True")


def _has_grown(key: str, before: str, after: Mapping[str, str]) -> bool:
    kind, length = before.rpartition(" ")[::2]
    now, length_now = after.get(key, "").rpartition(" ")[::2]
    return kind == now and kind.endswith(" of length") and int(length_now) > int(length)


def _stateful(engine: Engine) -> Mapping[str, tuple[Any, str]]:
    """The tensors of models and losses, other trained ones, and optimizers that were given built, by name with a digest."""
    roots = dict(engine.modules)
    losses = {f"the loss of {update.name}": loss_module(update.spec) for update in engine.updates}
    roots |= {name: loss for name, loss in losses.items() if loss is not None}
    found: dict[str, tuple[Any, str]] = {}
    for name, root in roots.items():
        for key, tensor in (*root.named_parameters(prefix=name), *root.named_buffers(prefix=name)):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                found[f"the tensor {key!r}"] = tensor, digest_of([tensor])
    for name, tensor in own_parameters(engine).items():
        found[f"the {name}"] = tensor, digest_of([tensor])
    for update in engine.updates:
        if update.spec.optimizer is update.optimizer and update.optimizer is not None:
            found[f"the optimizer of {update.name!r}"] = update.optimizer, _digest_of_optimizer(update.optimizer)
    return found


def _digest_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    state = [value for one in optimizer.state.values() for value in one.values()]
    options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return digest_of([*state, *options])


def _generators(found: Mapping[str, Content]) -> list[torch.Generator]:
    """Those that the order of data or the numbers of its workers are drawn from."""
    loaders = [one.thing for name, one in found.items() if name == "the data" or isinstance(one.thing, DataLoader)]
    return [generator for loader in loaders for generator in generators_of(loader, that_matter=True)]
