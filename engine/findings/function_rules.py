"""The rules of `check` about functions that users connect, by the names that their code uses."""

from __future__ import annotations

import dis
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ..authoring.functions import called_by, code_of, is_users, names_in, names_reached, plain_function, variables_of
from ..core.connection import Connection
from ..core.events import Events
from .composition import Composition, in_training
from .reports import Finding, finding

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["OF_FUNCTIONS", "may_store"]

_CLIPS = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"}


def two_clips(it: Composition) -> Iterator[Finding]:
    clipping = [handler for handler in it.handlers if getattr(handler, "clips_gradients", False)]
    of_all = [one for one in clipping if len(it.engine.updates) == 1 or getattr(one, "update", None) is None]
    for one in _own_clips(it) if of_all else ():
        yield finding(
            "C04",
            f"the function {one!r} and the handler {of_all[0].name!r} both clip the gradients",
            "remove one of the two",
            [of_all[0].name],
        )
    yield from _two_handlers(clipping)


def _two_handlers(clipping: Sequence[Any]) -> Iterator[Finding]:
    """Handlers that clip the same gradients."""
    for handler, other in itertools.combinations(clipping, 2):
        names = getattr(handler, "update", None), getattr(other, "update", None)
        if None in names or names[0] == names[1]:
            yield finding(
                "C04",
                f"{handler.name!r} and {other.name!r} clip the same gradients, one after the other",
                "detach one of the two, unless both bounds are intended",
                [handler.name, other.name],
                "info",
            )


def _own_clips(it: Composition, but: Set[str] = frozenset()) -> list[Connection]:
    """Functions of the user's that clip gradients of the engine, and name nothing that is excepted."""
    own = [one for one in it.connections if is_users(one.receiver) and _clips(one.receiver, it)]
    return [one for one in own if not but & names_reached(one.receiver)]


_OF_SCALES = {"get_scale", "unscale_", "_scale"}


def clips_of_scaled_gradients(it: Composition) -> Iterator[Finding]:
    ready = it.engine.signal(Events.GRADIENTS_READY).connections
    clips = _own_clips(it, but=_OF_SCALES)
    for unscale in (one for one in ready if "scale" in (one.writes or ())):
        before = [one for one in ready if (one.phase, one.rank) < (unscale.phase, unscale.rank)]
        for one in [*it.engine.signal(Events.BACKWARD_COMPLETED).connections, *before]:
            if one in clips:
                what = f"the function {one!r} clips gradients that {unscale.owner!r} has scaled"
                way_out = (
                    "attach GradientClipping, or clip at GRADIENTS_READY in Phase.CHANGE, where the gradients are "
                    "unscaled"
                )
                yield finding("C25", what, way_out, [str(unscale.owner)])


def may_store(evaluator: Engine) -> bool:
    """Whether a function, a loss, a module or a hook of the user's may store what an evaluator computes."""
    parts = [part for root in evaluator.modules.values() for part in root.modules()]
    hooks = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    own = any(update.spec.function is not None and is_users(update.spec.function) for update in evaluator.updates)
    return own or hooks or any(map(_keeps_something, called_by(evaluator))) or _observes(evaluator)


def _observes(evaluator: Engine) -> bool:
    """Whether a module measures in its forward, as observers of a quantization do: it stores, or changes its buffers."""
    parts = [part for root in evaluator.modules.values() for part in root.modules() if part._buffers]
    return any(_CHANGES & names_in(type(part).forward) for part in parts if is_users(type(part).forward))


def _keeps_something(function: Any) -> bool:
    """Whether a function of the user's stores, logs or prints what it computes."""
    if not is_users(function):
        return False
    own = plain_function(function)
    code = code_of(own)
    stores = code is not None and any(one.opname in _STORES for one in dis.get_instructions(code))
    return stores or bool(_KEEPS & names_reached(function)) or any(map(_may_record, variables_of(own).values()))


def _may_record(held: Any) -> bool:
    """Whether something that a function uses may be a record: a container, or an object of a class of the user's."""
    if isinstance(held, list | dict | set | bytearray):
        return True
    return is_users(type(held)) and type(held).__module__ != "builtins" and not isinstance(held, nn.Module)


_CHANGES = {"copy_", "fill_", "add_", "lerp_", "mul_", "clamp_", "aminmax", "_aminmax"}
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_DEREF")
_KEEPS = {
    *("add", "append", "extend", "info", "log", "log_metric"),
    *("metrics", "print", "record", "save", "update", "write"),
}


def _clips(function: Any, it: Composition) -> bool:
    """Whether a function clips gradients of the engine; not of something else, or of a backward of its own.

    With a bound that is infinite or huge, it measures their norm.
    """
    function = plain_function(function)
    code, names = code_of(function), names_in(function)
    if not _CLIPS & names or {"backward", "grad", "step"} & names or not _concerns(function, it):
        return False
    given = getattr(function, "__defaults__", None) or ()
    constants = (*getattr(code, "co_consts", ()), *given, *variables_of(function).values())
    measures = any(_is_huge(one) for one in constants)
    return not measures and "inf" not in names


_HUGE = 1e6


def _is_huge(one: Any) -> bool:
    return (isinstance(one, str) and one == "inf") or (isinstance(one, int | float) and one >= _HUGE)


def _uses_arguments(code: CodeType) -> bool:
    used = {one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD_FAST")}
    return bool(used & {*code.co_varnames[: code.co_argcount]})


def _concerns(function: Any, it: Composition) -> bool:
    """Whether a function may use the gradients of the engine; not if all it names is something else that is trained."""
    own = getattr(function, "__func__", function)
    if not isinstance(own, FunctionType):
        return True
    variables, code = variables_of(own).values(), own.__code__
    if _OF_ENGINE & {*code.co_names} and _uses_arguments(code):
        return True
    modules = [one for one in variables if isinstance(one, nn.Module)]
    return not modules or any(p in it.parameters for one in modules for p in one.parameters())


_OF_ENGINE = {"model", "modules", "optimizer", "state", "updates"}

_WITH_GRADIENTS = {Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED}


def clips_of_no_gradients(it: Composition) -> Iterator[Finding]:
    least = min(1 if (of := update.window.length_of) is None else of(1) for update in it.engine.updates)
    way_out = "clip at GRADIENTS_READY, where the gradients of a whole window are averaged, or attach GradientClipping"
    for event, one in _users_clips(it):
        code = code_of(plain_function(one.receiver))
        itself = _CLIPS & {*getattr(code, "co_names", ())}  # not in a function that it makes
        if event not in _WITH_GRADIENTS and itself:
            what = f"the function {one!r} clips gradients at an event where they do not exist or are incomplete"
            yield finding("C26", what, way_out)
        elif event is Events.BACKWARD_COMPLETED and least > 1 and one.filter is None and not _decides(code):
            what = f"the function {one!r} clips gradients after each of the {least} batches in a window"
            yield finding("C26", f"{what}, instead of once for the whole step", way_out)


def _decides(code: CodeType | None) -> bool:
    """Whether a function of the user's has a condition, such as for the last batch of a window."""
    return code is not None and any("JUMP" in one.opname and "_IF_" in one.opname for one in dis.get_instructions(code))


def _users_clips(it: Composition) -> Iterator[tuple[Events, Connection]]:
    """Receivers of the user's that clip gradients of the engine, and their events."""
    for signal in it.engine.signals.all():
        if not isinstance(signal.event, Events):  # the user emits it, such as where gradients are ready
            continue
        for one in signal.connections:
            if is_users(one.receiver) and _clips(one.receiver, it):
                yield signal.event, one


def steps_of_their_own(it: Composition) -> Iterator[Finding]:
    """Functions that call the step of an optimizer, which the engine makes for each window."""
    for one in it.functions:
        if is_users(one.receiver) and _steps_an_optimizer(it, one.receiver):
            yield finding(
                "W17",
                f"the function {one!r} calls optimizer.step(), so the engine does not count all steps",
                "remove the call, because the engine calls step() once per accumulation window, before it clears the "
                "gradients",
            )


def _steps_an_optimizer(it: Composition, receiver: Any) -> bool:
    """Whether a function calls ``step`` of an optimizer of the engine: of a variable, or of what it finds in the engine."""
    owner, function = getattr(receiver, "__self__", None), getattr(receiver, "__func__", receiver)
    if not isinstance(function, FunctionType) or "step" not in function.__code__.co_names:
        return False
    outer = variables_of(function)  # by name, and so also those that a local variable shadows
    arguments = function.__code__.co_varnames
    known = {name: one for name, one in outer.items() if name not in arguments}
    known |= {} if owner is None else {arguments[0]: owner}
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
    held = _held_at(it, used, place, known)
    if held is _OF_ANOTHER:
        return False
    if isinstance(held, type(it.engine)):
        return held is it.engine
    if name in engine:
        return True
    made = (at for at, one in enumerate(used[:place]) if one.opname == "STORE_FAST" and one.argval == name)
    return any(_is_of_engine(it, used[:at], known, engine) for at in made)


def _held_at(it: Composition, used: Sequence[dis.Instruction], place: int, known: Mapping[str, Any]) -> Any:
    """The object of a variable, or its attribute; `_OF_ANOTHER` for an argument of a function or an index of a container."""
    before = used[place - 1] if place else None
    if before is not None and before.opname in ("LOAD_GLOBAL", "LOAD_DEREF") and before.argval in known:
        return _OF_ANOTHER
    held = known.get(used[place].argval)
    if place + 1 < len(used) and held is not None and not isinstance(held, type(it.engine)):
        held = inspect.getattr_static(held, str(used[place + 1].argval), None)
    return held


_OF_ANOTHER = object()


def _held(holder: Any) -> Optimizer | None:
    """The optimizer of an object, such as what trains something beside the model; no property is called."""
    optimizer = None if holder is None else inspect.getattr_static(holder, "optimizer", None)
    return optimizer if isinstance(optimizer, Optimizer) else None


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def losses_that_count_iterations(it: Composition) -> Iterator[Finding]:
    """Losses that read the position of the engine that they are called with, where an evaluator shares them."""
    trained = {id(function) for update in it.engine.updates for function in _functions_of(update)}
    for one in it.evaluations:
        shared = [one for update in one.evaluator.updates for one in _functions_of(update) if id(one) in trained]
        for position in filter(None, map(_position_read_by, shared)):
            yield finding(
                "W65",
                f"in {one.handler.name!r}, the evaluator's update reads engine.state.{position} from the engine that is "
                "passed to it, which is the evaluator. An evaluator counts from 1 in each evaluation, so it may compute a "
                "different loss than the trainer",
                "read the position from trainer.state instead, or read it only if engine.training",
                [one.handler.name],
            )


def _functions_of(update: UpdateState) -> tuple[Any, ...]:
    return update.spec.loss, update.spec.forward, update.spec.function


def _position_read_by(function: Any) -> str | None:
    """Which counter of ``engine.state`` a function reads of the engine that it is given; None if it reads none.

    One that asks for the mode is taken to know that it is called in evaluations, and a counter in an f-string, or in a function
    that logs or asserts, to be only shown.
    """
    code = code_of(function)
    if code is None or _SHOWS & {*code.co_names}:
        return None
    engine = next(iter(code.co_varnames[inspect.ismethod(function) :]), None)
    return _counter_read_in(_steps_of(code), engine)


def _counter_read_in(steps: Sequence[tuple[str, Any]], engine: str | None) -> str | None:
    """Which counter of the state of an engine some instructions read, by way of a variable or not, but for a text."""
    states = {"engine.state"}  # and variables that hold it
    loaded = None  # by the instruction before: a variable, or the state
    for (name, argument), (following, _) in itertools.pairwise(steps):
        if name == "STORE_FAST" and loaded in states:
            states.add(argument)
        elif loaded in states and argument in _COUNTERS and not following.startswith("FORMAT"):
            return str(argument)
        of_engine = (loaded, argument) == (engine, "state")
        loaded = argument if name.startswith("LOAD_FAST") else "engine.state" if of_engine else None
    return None


def _steps_of(code: CodeType) -> list[tuple[str, Any]]:
    """The names and the arguments of instructions; one that is for two variables counts as two."""
    steps: list[tuple[str, Any]] = []
    for one in dis.get_instructions(code):
        if "_FAST_" in one.opname and isinstance(one.argval, tuple):
            steps += zip([f"{kind}_FAST" for kind in re.findall("LOAD|STORE", one.opname)], one.argval, strict=True)
        elif one.opname != "CACHE":
            steps.append((one.opname, one.argval))
    return steps


_SHOWS = {
    *("training", "is_grad_enabled", "log", "print", "info", "debug", "save", "AssertionError"),
    *("add_scalar", "add_histogram", "add_image", "add_images", "add_figure"),
}
_COUNTERS = {"iteration", "epoch", "epoch_iteration", "completed"}


OF_FUNCTIONS: Sequence[Callable[[Composition], Iterator[Finding]]] = (
    two_clips,
    clips_of_scaled_gradients,
    in_training(clips_of_no_gradients),
    losses_that_count_iterations,
    in_training(steps_of_their_own),
)
