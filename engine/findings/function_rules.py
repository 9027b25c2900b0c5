"""The rules of `check` about functions that users connect, by the names that their code uses."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch.optim import Optimizer

from ..core.connection import Connection
from ..core.events import Events
from .composition import Composition, in_training
from .reports import Finding, finding

__all__ = ["OF_FUNCTIONS", "is_users", "names_in"]

_CLIPS = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"}


def two_clips(it: Composition) -> Iterator[Finding]:
    clipping = [handler for handler in it.handlers if getattr(handler, "clips_gradients", False)]
    for one in it.functions:
        if clipping and _clips(one.receiver):
            yield finding(
                "C04",
                f"the function {one!r} and the handler {clipping[0].name!r} both clip the gradients",
                "remove one of the two",
                [clipping[0].name],
            )
    for place, handler in enumerate(clipping):
        for other in clipping[place + 1 :]:
            names = getattr(handler, "update", None), getattr(other, "update", None)
            if None in names or names[0] == names[1]:
                yield finding(
                    "C04",
                    f"{handler.name!r} and {other.name!r} clip the same gradients, one after the other",
                    "detach one of the two, unless both bounds are intended",
                    [handler.name, other.name],
                    "info",
                )


def clips_of_scaled_gradients(it: Composition) -> Iterator[Finding]:
    ready = it.engine.signal(Events.GRADIENTS_READY).connections
    for unscale in (one for one in ready if "scale" in (one.writes or ())):
        before = [one for one in ready if (one.phase, one.rank) < (unscale.phase, unscale.rank)]
        for one in [*it.engine.signal(Events.BACKWARD_COMPLETED).connections, *before]:
            if one.owner is None and _clips(one.receiver):
                what = f"the function {one!r} clips gradients that {unscale.owner!r} has scaled"
                way_out = (
                    "attach GradientClipping, or clip at GRADIENTS_READY in Phase.CHANGE, where the gradients are "
                    "unscaled"
                )
                yield finding("C25", what, way_out, [str(unscale.owner)])


def names_in(function: Any) -> set[str]:
    """The names that a function uses, also in functions inside it."""
    code = _code_of(function)
    codes = [] if code is None else [code]
    for one in codes:  # grows meanwhile
        codes += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return {name for one in codes for name in one.co_names}


def _code_of(function: Any) -> CodeType | None:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _clips(function: Any) -> bool:
    """Whether a function clips gradients; not where its bound is infinite, by which their norm is measured."""
    code = _code_of(function)
    infinite = {"inf", float("inf")} & {one for one in getattr(code, "co_consts", ()) if isinstance(one, str | float)}
    names = names_in(function)
    return bool(_CLIPS & names) and not infinite and "inf" not in names


_WITH_GRADIENTS = {Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED}


def clips_of_no_gradients(it: Composition) -> Iterator[Finding]:
    lengths = [1 if (of := update.window.length_of) is None else of(1) for update in it.engine.updates]
    way_out = "clip at GRADIENTS_READY, where the gradients of a whole window are averaged, or attach GradientClipping"
    for signal in it.engine.signals.all():
        for one in signal.connections:
            if not is_users(one) or not _clips(one.receiver):
                continue
            if signal.event not in _WITH_GRADIENTS:
                what = f"the function {one!r} clips gradients at an event where they do not exist or are incomplete"
                yield finding("C26", what, way_out)
            elif signal.event is Events.BACKWARD_COMPLETED and max(lengths) > 1:
                what = f"the function {one!r} clips gradients after each of the {max(lengths)} batches in a window"
                yield finding("C26", f"{what}, instead of once for the whole step", way_out)


def steps_of_their_own(it: Composition) -> Iterator[Finding]:
    """Functions that call the step of an optimizer, which the engine makes for each window."""
    for one in it.functions:
        if is_users(one) and _steps_an_optimizer(it, one.receiver):
            yield finding(
                "W17",
                f"the function {one!r} calls optimizer.step(), so the engine does not count all steps",
                "remove the call, because the engine calls step() once per accumulation window, before it clears the "
                "gradients",
            )


def _steps_an_optimizer(it: Composition, receiver: Any) -> bool:
    """Whether a function calls ``step`` of an optimizer of the engine: of a variable, or of what it finds in the engine."""
    owner, function = getattr(receiver, "__self__", None), getattr(receiver, "__func__", receiver)
    if not isinstance(function, FunctionType):
        return False
    variables, arguments = inspect.getclosurevars(function), function.__code__.co_varnames
    known = {**variables.globals, **variables.nonlocals} | ({} if owner is None else {arguments[0]: owner})
    engine = arguments[owner is not None :][:1]
    used = [one for one in dis.get_instructions(function) if one.opname.startswith(("LOAD_", "STORE_FAST"))]
    return any(
        _is_own_optimizer(it, used[:place], known, engine)
        for place, one in enumerate(used)
        if one.argval == "step" and one.opname in _ATTRIBUTES
    )


def _is_own_optimizer(
    it: Composition, used: Sequence[dis.Instruction], known: Mapping[str, Any], engine: Sequence[str]
) -> bool:
    """Whether what was loaded last is an optimizer of the engine."""
    if not used:
        return False
    last = used[-1]
    if last.opname not in _ATTRIBUTES:
        optimizer = known.get(last.argval)
    elif last.argval == "optimizer":
        optimizer = _held(known.get(used[-2].argval) if len(used) > 1 else None)
        if optimizer is None:
            return _is_of_engine(it, used[:-1], known, engine)
    else:
        return False
    return any(optimizer is update.optimizer for update in it.engine.updates if update.optimizer is not None)


def _is_of_engine(
    it: Composition, used: Sequence[dis.Instruction], known: Mapping[str, Any], engine: Sequence[str]
) -> bool:
    """Whether what was loaded last is a part of the engine, such as ``engine.updates[0]`` or a variable made of it."""
    of = [one.opname in _ATTRIBUTES or one.opname == "LOAD_CONST" for one in used]
    if False not in of:
        return False
    place = len(of) - 1 - of[::-1].index(False)
    name = used[place].argval
    held = known.get(name)
    if place + 1 < len(used) and held is not None and not isinstance(held, type(it.engine)):
        held = inspect.getattr_static(held, str(used[place + 1].argval), None)
    if name in engine or isinstance(held, type(it.engine)):
        return True
    made = (at for at, one in enumerate(used[:place]) if one.opname == "STORE_FAST" and one.argval == name)
    return any(_is_of_engine(it, used[:at], known, engine) for at in made)


def _held(holder: Any) -> Optimizer | None:
    """The optimizer of an object, such as what trains something beside the model; no property is called."""
    optimizer = None if holder is None else inspect.getattr_static(holder, "optimizer", None)
    return optimizer if isinstance(optimizer, Optimizer) else None


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def is_users(connection: Connection) -> bool:
    """Whether a receiver is a function of the user's, or a method of a handler of the user's."""
    receiver = getattr(connection.receiver, "func", connection.receiver)
    return not str(getattr(receiver, "__module__", "")).startswith("signalfire.")


def losses_that_count_iterations(it: Composition) -> Iterator[Finding]:
    """Losses that read the position of the engine that they are called with, where an evaluator shares them."""
    for one in it.evaluations:
        for update in one.evaluator.updates:
            for function in (update.spec.loss, update.spec.forward, update.spec.function):
                if (position := _position_read_by(function)) is not None:
                    yield finding(
                        "W65",
                        f"in {one.handler.name!r}, the evaluator's update reads engine.state.{position} from the "
                        "engine that is passed to it, which is the evaluator. An evaluator counts from 1 in each "
                        "evaluation, so it computes a different loss than the trainer",
                        "read the position from trainer.state instead",
                        [one.handler.name],
                    )


def _position_read_by(function: Any) -> str | None:
    """Which counter of ``engine.state`` a function reads of its first argument; None if it reads none."""
    code = _code_of(function)
    if code is None or not code.co_varnames:
        return None
    first = code.co_varnames[0]
    steps = [(one.opname, one.argval) for one in dis.get_instructions(code) if not one.opname.startswith("CACHE")]
    for (load, name), (_, state), (_, counter) in zip(steps, steps[1:], steps[2:], strict=False):
        if load.startswith("LOAD_FAST") and (name, state) == (first, "state") and counter in _COUNTERS:
            return str(counter)
    return None


_COUNTERS = {"iteration", "epoch", "epoch_iteration", "completed"}


OF_FUNCTIONS: Sequence[Callable[[Composition], Iterator[Finding]]] = (
    two_clips,
    clips_of_scaled_gradients,
    in_training(clips_of_no_gradients),
    losses_that_count_iterations,
    in_training(steps_of_their_own),
)
