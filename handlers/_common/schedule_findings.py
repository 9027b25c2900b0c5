"""Findings about a torch scheduler in a run of known length, for `Engine.check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import lr_scheduler

from signalfire import Engine, Finding, UpdateState
from signalfire.authoring import last_epoch, last_iteration
from signalfire.findings import finding
from signalfire.findings.codes import Severity

__all__ = ["ScheduledRun", "schedule_findings"]

_SLACK = 1.02
"""Totals that differ by less than 2 %, or by two steps, are taken for equal: a schedule may leave out a warm-up's last step."""

_TINY = 1e-6


@dataclass(frozen=True)
class ScheduledRun:
    """The run of a schedule.

    Attributes:
        handler: name of the handler.
        unit: unit of the scheduler's steps: "st" for optimizer steps, "ep" for epochs.
        total: how many times it is stepped in the run; of a part, such as what follows a warm-up, how many times that one is.
        epochs, batches: length of the run; None if unknown.
        accumulates: whether it counts optimizer steps, each of which may take several batches.
    """

    handler: str
    unit: str
    total: int
    epochs: int | None
    batches: int | None
    accumulates: bool = False

    @classmethod
    def of(cls, engine: Engine, handler: str, unit: str, total: int, update: UpdateState) -> ScheduledRun:
        """The run of an engine, for the schedule of one update."""
        accumulates = unit == "st" and update.window.length_of is not None
        return cls(handler, unit, total, last_epoch(engine), last_iteration(engine), accumulates)

    @property
    def counted(self) -> str:
        """The unit in words."""
        return "epochs" if self.unit == "ep" else "optimizer steps"


def schedule_findings(scheduler: Any, run: ScheduledRun) -> Iterator[Finding]:
    """The findings about a scheduler that does not fit its run."""
    inner = getattr(scheduler, "_schedulers", None)
    if inner is None:
        yield from _of_one(scheduler, run)
        return
    starts = _starts_of(inner, scheduler)
    ends = [*starts[1:], run.total] if len(set(starts)) > 1 else [run.total] * len(starts)
    for part, start, end in zip(inner, starts, ends, strict=True):
        if start >= run.total and start:
            yield _length(
                run, f"its {_name(part)} begins at {start}, after the end of the run", "start this scheduler earlier"
            )
            return
        if not isinstance(part, lr_scheduler.ConstantLR):  # it holds a rate for as long as it is followed
            yield from schedule_findings(part, replace(run, total=min(end, run.total) - start))


def _starts_of(parts: Sequence[Any], scheduler: Any) -> list[int]:
    """The step from which on each scheduler in a chain is stepped."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        return [0, *scheduler._milestones]
    warmed_up = getattr(scheduler, "steps", 0)  # of `schedules.warmup`, which steps the other one afterwards
    return [warmed_up if isinstance(warmed_up, int) else 0] * len(parts)


def _of_one(scheduler: Any, run: ScheduledRun) -> Iterator[Finding]:
    total = run.total
    name = _name(scheduler)
    if (left := _rate_left(scheduler, total)) is not None and left < _TINY:
        yield _decays(scheduler, run, left)
    milestones = sorted(getattr(scheduler, "milestones", None) or ())
    if milestones and milestones[0] > total:
        yield _length(run, f"its first milestone is {milestones[0]}", "use smaller milestones", "info")
    elif milestones and _in_epochs(run, milestones[-1], total):
        yield _unit(run, f"the milestones of {name} ({', '.join(map(str, milestones))})")
    elif isinstance(scheduler, lr_scheduler.StepLR) and scheduler.step_size > total:
        yield _length(run, f"the step_size of {name} is {scheduler.step_size}", "use a smaller step_size", "info")
    elif (cycle := _first_cycle(scheduler, run)) is not None and _in_epochs(run, cycle, total):
        yield _unit(run, f"the first cycle of {name} ({cycle})")
    if type(scheduler).__module__ == lr_scheduler.__name__:  # of others it is not known what they do at their end
        yield from _of_total(scheduler, run, total)


def _decays(scheduler: Any, run: ScheduledRun, left: float) -> Finding:
    return finding(
        "C05",
        f"{run.handler!r}: {_name(scheduler)} counts {run.counted} ({run.total} in this run), and only "
        f"{left:.0e} of the initial learning rate is left after them",
        "step the scheduler once per epoch with LRScheduling(..., every='1ep'), or specify its arguments in optimizer "
        "steps"
        if run.unit == "st"
        else _SLOWER[hasattr(scheduler, "step_size")],
        [run.handler],
    )


def _first_cycle(scheduler: Any, run: ScheduledRun) -> int | None:
    """The number of steps after which a scheduler first restarts; None also if it is that of whole epochs."""
    if not isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts) or not run.epochs:
        return None
    return None if scheduler.T_0 * run.epochs % run.total == 0 else int(scheduler.T_0)


def _of_total(scheduler: Any, run: ScheduledRun, total: int) -> Iterator[Finding]:
    name = _name(scheduler)
    for argument, repeats in (("T_max", True), ("total_steps", True), ("total_iters", False)):
        given = getattr(scheduler, argument, None)
        if not isinstance(given, int) or isinstance(given, bool):
            continue
        what = f"{argument}={given} of {name}"
        if _exceeds(given, total):
            if run.accumulates and given == run.batches:
                yield _unit(run, what, "batches")
            else:
                yield _length(
                    run,
                    f"{what} is greater than this number, so the schedule does not reach its end",
                    _FILLED if repeats else _SHORTENED,
                )
        elif _exceeds(total, given) and (repeats or isinstance(scheduler, lr_scheduler.PolynomialLR)):
            if _in_epochs(run, given, total):
                yield _unit(run, what)
            else:
                way_out = _FILLED if repeats else _CORRECTED
                yield _length(run, f"{what} is less than this number, so {_RESTS[argument]}", way_out)


def _exceeds(one: int, other: int) -> bool:
    """Whether a number of steps is larger than another by more than rounding explains."""
    return one > other * _SLACK and one > other + 2


_SLOWER = "use a larger gamma", "use a larger gamma, or a larger step_size"
_FILLED = (
    "omit this argument to let LRScheduling fill in the length of the run, or correct its value; keep it if a later run() "
    "continues this run to that length"
)
_CORRECTED = "set this argument to the number of scheduler steps in the run"
_SHORTENED = "set this argument to at most the number of scheduler steps in the run"
_RESTS = {
    "T_max": "the learning rate rises again",
    "total_steps": "PyTorch raises an error at the next step",
    "total_iters": "the learning rate is 0 for the rest of the run",
}


def _in_epochs(run: ScheduledRun, given: int, total: int) -> bool:
    """Whether a number counts epochs, although the scheduler is stepped more often; not a share of the run."""
    return (
        isinstance(given, int)
        and run.unit == "st"
        and run.epochs is not None
        and given <= run.epochs
        and total >= 3 * run.epochs
    )


def _unit(run: ScheduledRun, what: str, counted: str = "epochs") -> Finding:
    way_out = (
        "step the scheduler once per epoch with LRScheduling(..., every='1ep'), or"
        if counted == "epochs"
        else "count each accumulation window as one step, and"
    )
    return finding(
        "C05",
        f"{run.handler!r}: the unit of {what} seems to be {counted}, but the scheduler counts {run.counted} and is "
        f"stepped {run.total} times",
        f"{way_out} specify the number in {run.counted}",
        [run.handler],
    )


def _length(run: ScheduledRun, problem: str, way_out: str, severity: Severity | None = None) -> Finding:
    sentence = f"{run.handler!r}: this schedule is stepped {run.total} times in the run, but {problem}"
    return finding("C06", sentence, way_out, [run.handler], severity)


def _rate_left(scheduler: Any, total: int) -> float | None:
    """The factor that a scheduler has multiplied the rate by at the end; None if the scheduler does more than decay."""
    if isinstance(scheduler, lr_scheduler.StepLR):
        return float(scheduler.gamma ** (total // scheduler.step_size))
    if isinstance(scheduler, lr_scheduler.ExponentialLR):
        return float(scheduler.gamma**total)
    return None


def _name(scheduler: Any) -> str:
    return type(scheduler).__name__
