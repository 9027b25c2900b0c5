"""What the runs of a study share although each has to have its own: handlers, engines, and what an earlier run has trained."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from signalfire import Engine, Handler
from signalfire.data.loading import generators_of
from signalfire.update import loss_module

__all__ = ["Left", "SharedError", "check_new", "check_not_left"]

_MOST = 2**16  # elements of a tensor that are compared


class SharedError(ValueError):
    """Raised for a study whose ``build`` returns something that an earlier run of it has used."""


class _ByIdentity:
    """Notes about objects, by their identity, for as long as they exist."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Any], str]] = {}

    def note(self, thing: Any, text: str) -> None:
        key = id(thing)
        self._notes[key] = weakref.ref(thing, lambda _: self._notes.pop(key, None)), text

    def of(self, thing: Any) -> str | None:
        found = self._notes.get(id(thing))
        return None if found is None or found[0]() is not thing else found[1]


_used = _ByIdentity()
"""The handlers and engines of earlier runs."""

_left = _ByIdentity()
"""What earlier runs have changed, each with a digest of how they left it."""


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
            f"{what} returned {named} for a second run: what a run changes in it would be left to the next; make a new one in "
            "each call, inside of the function"
        )
    _used.note(thing, "used")


def _engines_in(engine: Engine) -> Iterator[Engine]:
    """The evaluators that the handlers of an engine hold."""
    for handler in engine.handlers.values():
        yield from (value for value in vars(handler).values() if isinstance(value, Engine))


def check_not_left(engine: Engine, what: str) -> None:
    """Raise SharedError for a model or an optimizer that is still as an earlier run has left it."""
    for name, (thing, digest) in _stateful(engine).items():
        if _left.of(thing) == digest:
            raise SharedError(
                f"{what} returned {name} of an earlier run, as that run has left it: the runs of the study would depend on each "
                "other; make the model, its optimizer and its data in each call, inside of the function"
            )


class Left:
    """Notes what a run leaves behind in what its engine holds.

    Args:
        engine: The engine, before the run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = {id(thing): digest for thing, digest in _stateful(engine).values()}

    def started(self) -> None:
        """Check the data of the run, which is known now."""
        what = f"build({self._engine.seed})"
        for generator in _generators(self._engine):
            digest = _digest([generator.get_state()])
            if _left.of(generator) == digest:
                raise SharedError(
                    f"{what} returned a run over data whose generator an earlier run has left as it is, so that their orders "
                    "depend on each other; make the DataLoader and its generator in each call, inside of the function"
                )
            self._before[id(generator)] = digest

    def note(self) -> None:
        """Note what has changed."""
        things = [*_stateful(self._engine).values()]
        things += [(one, _digest([one.get_state()])) for one in _generators(self._engine)]
        for thing, digest in things:
            if self._before.get(id(thing)) not in (None, digest):
                _left.note(thing, digest)


def _stateful(engine: Engine) -> Mapping[str, tuple[Any, str]]:
    """The tensors of models and losses, and the optimizers that were given built, each by its name with a digest."""
    roots = dict(engine.modules)
    losses = {f"the loss of {update.name}": loss_module(update.spec) for update in engine.updates}
    roots |= {name: loss for name, loss in losses.items() if loss is not None}
    found: dict[str, tuple[Any, str]] = {}
    for name, root in roots.items():
        for key, tensor in (*root.named_parameters(prefix=name), *root.named_buffers(prefix=name)):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                found[f"the tensor {key!r}"] = tensor, _digest([tensor])
    for update in engine.updates:
        if update.spec.optimizer is update.optimizer and update.optimizer is not None:
            found[f"the optimizer of {update.name!r}"] = update.optimizer, _digest_of_optimizer(update.optimizer)
    return found


def _digest_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    state = [value for one in optimizer.state.values() for value in one.values()]
    options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return _digest([*state, *options])


def _generators(engine: Engine) -> list[torch.Generator]:
    """Those that the order of the data or the numbers of its workers are drawn from."""
    return [] if engine.feed.source is None else generators_of(engine.feed.source.given, that_matter=True)


def _digest(values: list[Any]) -> str:
    """A digest of plain values and of the beginnings of tensors."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            part = value.detach().flatten()[:_MOST].cpu().contiguous()
            found.update(f"{part.dtype} {tuple(value.shape)}".encode())
            found.update(part.view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:16]
