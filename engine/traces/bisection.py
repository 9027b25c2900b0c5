"""What made two runs differ: the iterations at the first difference of their traces are repeated, and looked at closely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from signalfire import Engine

from ..authoring.markup import preformatted
from ..authoring.randomness import random_state, set_random_state
from ..checkpoints import Files, find, load
from ..checkpoints.manifest import read_manifest_or_none
from ..core.words import listed
from .comparison import Comparison, compare
from .differences import in_words
from .recording import Operation, Operations, Step, record_operations, record_steps
from .scripts import Look, Script

__all__ = ["Bisection", "bisect"]

T = TypeVar("T")
Build = Callable[[], Any]
Run = Callable[[Engine], object]
StrPath = str | PathLike[str]


@dataclass(frozen=True)
class Bisection:
    """The cause of the difference between two runs; ``print`` shows it.

    Attributes:
        compared: The comparison of the traces; None without traces.
        begun: The checkpoint path that the repeated runs started from; None for the start.
        iteration: The iteration of the first difference; None if the repeated runs do not differ.
        event: The event of the first difference.
        things: The things that differ first, such as "parameters/model.0.weight".
        cause: The cause of the difference: a receiver, the part of the step between two events, a module or an operation.
        receiver: The receiver at fault, such as "ema.update"; None if no receiver is.
        operation: The torch operation at fault; None if no operation is.
        module: The path of the module that computes it; empty for none.
    """

    compared: Comparison | None
    begun: str | None
    iteration: int | None = None
    event: str = ""
    things: tuple[str, ...] = ()
    cause: str = ""
    receiver: str | None = None
    operation: str | None = None
    module: str = ""

    def __str__(self) -> str:
        begun = "from the start" if self.begun is None else f"from {self.begun}"
        lines = [] if self.compared is None else [str(self.compared)]
        if self.iteration is None:
            lines.append(f"when repeated {begun}, the runs do not differ")
            if self.compared is not None:
                lines.append(
                    "  so the cause is outside the repeated code: for example, a different script, seed or number of "
                    "processes, different data, or a process setting such as PYTHONHASHSEED"
                )
            return "\n".join(lines)
        things = listed([in_words(one) for one in self.things], most=3)
        lines.append(f"repeated {begun}; first difference: iteration {self.iteration}, {self.event}: {things}")
        lines.append(f"  {self.cause}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(self)


class _Side(NamedTuple):
    """One of the two runs, which can be made as often as it is looked at."""

    name: str
    build: Build | Script
    run: Run | None
    begun: str | None
    random: dict[str, Any]

    def see(self, look: Look[T]) -> T:
        """What a look at the run finds; it is repeated, from where it begins."""
        look = partial(_seen_from, self.name, self.begun, look)
        if isinstance(self.build, Script):
            try:
                return self.build.see(look, self.random)
            except ValueError as error:
                raise ValueError(f"bisect(): run {self.name!r}: {error}") from None
        set_random_state(self.random)
        built = self.build()
        engine, run = built if isinstance(built, tuple) and len(built) == 2 else (built, self.run)
        if not isinstance(engine, Engine):
            raise TypeError(f"bisect(build_{self.name}=...) returned {engine!r}; expected an Engine or (engine, run)")
        if not callable(run):
            raise TypeError(
                f"bisect(run={run!r}): expected a function run(engine), or build functions that return (engine, run)"
            )
        return look(engine, run)


def _seen_from(name: str, begun: str | None, look: Look[T], engine: Engine, run: Run) -> T:
    """What a look at a run finds that begins at a checkpoint, or at the start."""
    if engine.dry_run:  # which it has been since it was repeated
        raise ValueError(
            f"bisect(build_{name}=...) returned an engine that has already run; build a new engine in each call"
        )
    if engine.processes.distributed:
        raise ValueError(
            "bisect() can only repeat single-process runs; if the run uses shards, repeat it in a single process, "
            "which gives the same results"
        )
    if begun is not None:
        state = _state_in(begun)
        saved = state["handlers"].keys()
        engine.load_state_dict(state, allow=sorted(saved ^ engine.handlers.keys()))
    return look(engine, run)


def _state_in(checkpoint: str) -> Any:
    return load(Path(checkpoint), name=None, where="bisect(checkpoints=)", files=Files())


def _fits(checkpoint: str, engine: Engine, run: Run) -> bool:
    """Whether a checkpoint has the states of all handlers; else the run has to begin at the start."""
    saved = _state_in(checkpoint)["handlers"]
    return all(handler.writes or name in saved for name, handler in engine.handlers.items())


def bisect(
    build_a: Build | Script,
    build_b: Build | Script | None = None,
    *,
    traces: Sequence[StrPath] = (),
    run: Run | None = None,
    checkpoints: StrPath | None = None,
    until: int | None = None,
) -> Bisection:
    """Find the receiver, module or operation that makes two runs diverge.

    The traces give the first iteration that differs. Both runs are repeated up to it, from the newest checkpoint before it, and
    everything is compared after each receiver. If no receiver but the engine's work between two events, such as the forward,
    causes the difference, torch operations are compared, too. Handlers that write files are disabled.

    With one build, the run is repeated twice, to find where a run that should be reproducible is not.

    Args:
        build_a: Function without arguments that builds the first engine. It may return ``(engine, run)`` instead. Or a `Script`.
        build_b: Function that builds the second engine; None uses ``build_a`` again.
        traces: The paths of the two traces. Without them, the runs are compared from their start.
        run: Function that trains an engine, if the builds return no function: ``lambda engine: engine.run(loader,
            max_epochs=1)``.
        checkpoints: A folder of checkpoints of either run.
        until: The last iteration to compare, if no traces are given.

    Returns:
        The result; its `iteration` is None if the repeated runs do not differ.

    Raises:
        TypeError, ValueError: For a build that returns no engine, for traces that are equal, and in several processes.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import GradientClipping
        >>> data = [(torch.ones(4, 2), torch.ones(4, 1))] * 3
        >>> def build(norm):
        ...     torch.manual_seed(0)
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        ...     engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        ...     engine.attach(GradientClipping(max_norm=norm))
        ...     return engine, lambda engine: engine.run(data, max_epochs=1)
        >>> found = bisect(lambda: build(0.02), lambda: build(0.01))
        >>> found.iteration, found.event, found.receiver
        (1, 'GRADIENTS_READY', 'gradient_clipping.clip')
    """
    if until is not None and until < 1:
        raise ValueError(f"bisect(until={until!r}): expected an iteration number of 1 or more")
    compared = None
    since, last = 0, 10**9 if until is None else until
    if traces:
        compared = _compared(traces)
        since, last = compared.equal_until, compared.first.iteration if compared.first is not None else last
    random = random_state()
    sides = [_Side(name, build, run, None, random) for name, build in (("a", build_a), ("b", build_b or build_a))]
    try:
        return _made_again(compared, *_placed(sides, checkpoints, since), since, last)
    finally:
        set_random_state(random)


def _compared(traces: Sequence[StrPath]) -> Comparison:
    """The comparison of two traces that differ."""
    compared = compare(*traces)
    if compared.first is None:
        raise ValueError(f"bisect(traces={[str(one) for one in traces]}): the traces do not differ: {compared}")
    return compared


def _placed(sides: list[_Side], checkpoints: StrPath | None, since: int) -> tuple[_Side, _Side]:
    """The runs, from where they begin."""
    begun = _beginning(checkpoints, since)
    if begun is not None and all(side.see(partial(_fits, begun)) for side in sides):
        sides = [side._replace(begun=begun) for side in sides]
    return sides[0], sides[1]


def _beginning(checkpoints: StrPath | None, since: int) -> str | None:
    """The newest checkpoint of an iteration that is not after one."""
    files, found = Files(), list[tuple[int, Path]]()
    for _, path in [] if checkpoints is None else find(Path(checkpoints), files):
        manifest = read_manifest_or_none(path, files)
        if manifest is not None and manifest["kind"] == "state" and manifest["iteration"] <= since:
            found.append((manifest["iteration"], path))
    return str(max(found)[1].absolute()) if found else None  # a script may change the working directory


def _made_again(compared: Comparison | None, a: _Side, b: _Side, since: int, last: int) -> Bisection:
    """What is found when both runs are repeated, and looked at from one iteration to another."""
    seen = [side.see(partial(record_steps, since=since, until=last)) for side in (a, b)]
    failed = [f"run {side.name!r} ended with {one.error}" for side, one in zip((a, b), seen, strict=True) if one.error]
    if not all(any(step.event == "ITERATION_COMPLETED" for step in one.steps) for one in seen):
        why = f": {'; '.join(failed)}" if failed else ""
        raise ValueError(f"bisect(): a repeated run ended before any iteration could be compared{why}")
    found, result = _first(seen[0].steps, seen[1].steps), Bisection(compared, a.begun)
    if found is not None:
        at = replace(result, iteration=found.at.iteration, event=found.at.event, things=found.things)
        return _explained(at, found, a, b)
    if failed:
        raise ValueError(f"bisect(): {'; '.join(failed)}; up to this error, the runs do not differ")
    return result


class _First(NamedTuple):
    """The first step after which two runs differ.

    Attributes:
        at: The step.
        things: What differs; if `alone` made it, what that has changed.
        before: The last step that is equal; None if there is none.
        alone: A step between the two that only one run has, and that has changed something.
        of: The name of that run.
    """

    at: Step
    things: tuple[str, ...]
    before: Step | None
    alone: Step | None = None
    of: str = ""


def _first(ours: list[Step], theirs: list[Step]) -> _First | None:
    """The first step after which two runs differ; receivers that one of them has alone are passed over."""
    places = {step.key: place for place, step in enumerate(theirs)}
    before, behind = None, (0, 0)
    for place, step in enumerate(ours):
        there = places.get(step.key)
        if there is None:
            continue
        things = tuple(sorted(_differing(step, theirs[there]), key=_importance))
        if things:
            for name, steps, begin, end in (("a", ours, behind[0], place), ("b", theirs, behind[1], there)):
                for one in range(max(begin, 1), end):
                    if changed := _differing(steps[one], steps[one - 1]):
                        return _First(step, tuple(sorted(changed, key=_importance)), before, steps[one], name)
            return _First(step, things, before)
        before, behind = step, (place + 1, there + 1)
    return None


def _differing(one: Step, other: Step) -> list[str]:
    return [name for name, value in one.digests.items() if other.digests.get(name, value) != value]


_THINGS = (
    "batch",
    "random",
    "output",
    "loss",
    "gradients",
    "parameters",
    "buffers",
    "optimizer",
    "metrics",
    "handlers",
)


def _importance(thing: str) -> int:
    return _THINGS.index(thing.partition("/")[0])


def _explained(found: Bisection, first: _First, a: _Side, b: _Side) -> Bisection:
    """What made the difference."""
    if first.alone is not None:
        name = first.alone.receiver
        cause = f"caused by {name}, which only run {first.of!r} calls here"
        if name is None:
            cause = f"only run {first.of!r} reaches {first.alone.event} here"
        return replace(found, event=first.alone.event, receiver=name, cause=cause)
    if first.at.receiver is not None:
        return replace(
            found, receiver=first.at.receiver, cause=f"caused by {first.at.receiver}, which both runs call here"
        )
    if first.before is None:
        return replace(found, cause="the runs differ from the start")
    begin, end = first.before, first.at
    part = _PARTS.get(begin.event, "code that runs outside the engine, such as a hook or a thread")
    found = replace(found, cause=f"caused between {begin.event} and {end.event}: {part}")
    if begin.event not in _PARTS:
        return found
    return _by_operations(found, a, b, begin, end)


def _by_operations(found: Bisection, a: _Side, b: _Side, begin: Step, end: Step) -> Bisection:
    """The first operation of torch between two steps that the runs do not have alike."""
    look = partial(record_operations, begin=begin, end=end)
    ours, theirs = a.see(look), b.see(look)
    # Some operations differ from themselves in what nothing reads; of two equal builds, they may be what is looked for.
    again = ours if a.build == b.build else a.see(look)
    for place, (one, other, itself) in enumerate(zip_longest(ours.found, theirs.found, again.found), 1):
        if _is_unknown(one, other, itself):
            continue
        if one is None or not one.same(other):
            return _of_operation(found, place, one, other)
    for side, seen in ((a, ours), (b, theirs)):
        if (explained := _by_memory(found, seen, side, look)) is not None:
            return explained
    return replace(found, cause=f"{found.cause}; comparing each of its operations finds no difference")


def _by_memory(found: Bisection, seen: Operations, side: _Side, look: partial[Operations]) -> Bisection | None:
    """The first operation that reads memory of ``torch.empty``, which has whatever was in it; None if nothing depends on it."""
    try:
        other, again = (side.see(partial(look, byte=_OTHER_BYTE)) for _ in range(2))
    except Exception:  # what is in the memory may be an index
        return None
    differs_from_itself = other.left != again.left  # whatever is in the memory
    reader = _reader_of_memory(seen, other)
    if reader is None or differs_from_itself or seen.left == other.left:
        return None
    place, one = reader
    what = "reads" if one.kind == "computes" else "returns"
    memory = f"operation {place}, {one.name}{_in(one)}, {what} uninitialized memory from torch.empty"
    return replace(found, operation=one.name, module=one.module, cause=f"{found.cause}; {memory}")


_OTHER_BYTE = 0x3F  # 0.75 in float32


def _reader_of_memory(seen: Operations, other: Operations) -> tuple[int, Operation] | None:
    """The first operation that computes something else with another byte in the memory, else the one that returns it."""
    pairs = enumerate(zip(seen.found, other.found, strict=False), 1)
    differing = [(place, one) for place, (one, two) in pairs if one.result != two.result]
    computing = (pair for pair in differing if pair[1].kind == "computes")
    return next(computing, differing[-1] if differing else None)


def _is_unknown(one: Operation | None, other: Operation | None, itself: Operation | None) -> bool:
    """Whether an operation has other arguments or results when the same run makes it again."""
    return one is not None and other is not None and one != itself


_PARTS = {
    "GET_BATCH_STARTED": "the data",
    "FORWARD_STARTED": "the forward pass",
    "FORWARD_COMPLETED": "the loss function",
    "BACKWARD_STARTED": "the backward pass",
    "BACKWARD_COMPLETED": "the reduction of the gradients",
    "OPTIMIZER_STEP_STARTED": "the optimizer's step",
}


def _of_operation(found: Bisection, place: int, one: Operation | None, other: Operation | None) -> Bisection:
    """That an operation is what differs first."""
    if one is None or other is None or one.name != other.name:
        names = [("none" if each is None else each.name) for each in (one, other)]
        known = one or other
        assert known is not None
        return replace(
            found,
            operation=known.name,
            module=known.module,
            cause=f"{found.cause}; operation {place} is {names[0]} in a and {names[1]} in b{_in(known)}",
        )
    why = "has the same arguments but a different result" if one.given == other.given else "has different arguments"
    return replace(
        found,
        operation=one.name,
        module=one.module,
        cause=f"{found.cause}; operation {place}, {one.name}{_in(one)}, {why}",
    )


def _in(operation: Operation) -> str:
    return f" in {operation.module}" if operation.module else ""
