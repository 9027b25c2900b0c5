"""Several tasks in one study: what each of them builds, how its metric becomes a score, and the plan of all their runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from .plan import Plan
from .results import Variant
from .statistics import exact

__all__ = ["Ends", "check_scores", "check_task", "ends_in_direction", "joined_plan", "score", "task_builds"]

Ends = tuple[float, float]
"""The values of the metric that map to a score of 0 and of 1."""


def task_builds(
    build: Callable[..., Any] | None,
    tasks: Mapping[str, Callable[..., Any] | Mapping[str, Any]] | None,
    **stages: object,
) -> dict[str, Callable[..., Any]]:
    """The function that builds the runs of each task.

    Args:
        build: The study's ``build``, to which mappings give arguments.
        tasks: For each task, by name, arguments of ``build``, or a function of its own in its place.
        stages: The study's looks and its plan of pruning, which several tasks cannot have.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if tasks is None:
        return {}
    if not isinstance(tasks, Mapping) or not all(isinstance(name, str) and name for name in tasks):
        raise TypeError(f"Study(tasks={tasks!r}): expected a dict that maps task names to arguments of build")
    if len(tasks) < 2:
        raise ValueError(f"Study(tasks={tasks!r}): expected two or more tasks; for a single task, omit tasks=")
    for name, given in stages.items():
        if given is not None:
            raise ValueError(
                f"Study({name}={given!r}): {name}= does not work with several tasks; omit {name}= or tasks="
            )
    return {name: _task_build(name, given, build) for name, given in tasks.items()}


def _task_build(name: str, given: Any, build: Callable[..., Any] | None) -> Callable[..., Any]:
    if isinstance(given, Mapping) and build is not None:
        return functools.partial(build, **given)
    if callable(given) and build is None:
        own: Callable[..., Any] = given
        return own
    expected = (
        "a function that takes a seed, because build= is omitted"
        if build is None
        else "a dict that maps the argument names of build to values"
    )
    raise TypeError(f"Study(tasks={{{name!r}: {given!r}}}): expected {expected}")


def check_scores(scores: Mapping[str, Ends] | Ends | None, tasks: Mapping[str, object]) -> dict[str, Ends]:
    """The values that count as 0 and 1 for each task.

    Raises:
        TypeError, ValueError: if those of a task are missing, or are no two different numbers.
    """
    if not tasks:
        if scores is not None:
            raise ValueError(f"Study(scores={scores!r}): scores= applies only with tasks=; set tasks= or omit scores=")
        return {}
    if scores is None:
        raise TypeError(
            "Study(tasks=...): set scores= to the values of the metric that map to a score of 0 and of 1, either for "
            f"each task, such as {{{next(iter(tasks))!r}: (0.1, 1.0), ...}}, or as one pair for all tasks; these values "
            "determine the weight of each task"
        )
    given = scores if isinstance(scores, Mapping) else dict.fromkeys(tasks, scores)
    if set(given) != set(tasks):
        wrong = ", ".join(sorted({*given} ^ {*tasks}))
        raise ValueError(
            f"Study(scores=...): expected one pair for each of the tasks {', '.join(tasks)}; these names do not match: "
            f"{wrong}"
        )
    return {name: _ends(name, given[name]) for name in tasks}


def ends_in_direction(task: str, ends: Ends, mode: Literal["min", "max"]) -> None:
    """Raise an error for ends of which the one that counts as 1 is the worse one."""
    zero, one = ends
    if (one > zero) != (mode == "max"):
        better = "larger" if mode == "max" else "smaller"
        raise ValueError(
            f"Study(scores={{{task!r}: {ends!r}}}): {better} values are better, so {one:g} cannot count as 1 and "
            f"{zero:g} as 0; expected {(one, zero)!r}"
        )


def check_task(
    task: str, build: Callable[..., Any], variants: Sequence[Variant], ends: Ends, mode: Literal["min", "max"] | None
) -> None:
    """Raise an error for variants that would undo what makes the task, and for scores of the wrong direction."""
    own = build.keywords if isinstance(build, functools.partial) else {}
    for variant in variants:
        if both := sorted({*own} & {name for name, _ in variant.arguments}):
            raise ValueError(
                f"Study(tasks=...): the variant {variant.name!r} would overwrite {', '.join(both)} of the task "
                f"{task!r}; set each argument of build either in the tasks or in the design, not in both"
            )
    if mode is not None:
        ends_in_direction(task, ends, mode)


def score(value: float, ends: Ends) -> Fraction:
    """The score of a value: 0 and 1 at the ends, and linear, also beyond them.

    It is a fraction, so that equal means of scores tie in the tests (:func:`signalfire.ablation.statistics.exact`).

    Example:
        >>> score(0.75, (0.5, 1.0)), score(0.9, (0.1, 1.0))
        (Fraction(1, 2), Fraction(8, 9))
    """
    zero, one = exact(ends[0]), exact(ends[1])
    return (exact(value) - zero) / (one - zero)


def joined_plan(plans: Mapping[str, Plan]) -> Plan:
    """The plan of all tasks.

    Raises:
        ValueError: if the tasks have different variants.
    """
    (name, first), *others = plans.items()
    for other, plan in others:
        _check_same_variants(other, plan, name, first)
    return Plan(
        first.variants,
        first.seeds,
        tuple(run for plan in plans.values() for run in plan.runs),
        tuple(f"{task}: {note}" for task, plan in plans.items() for note in plan.notes),
        first.metric,
        tasks=tuple(plans),
    )


def _check_same_variants(task: str, plan: Plan, first_task: str, first: Plan) -> None:
    names, expected = ([variant.name for variant in one.variants] for one in (plan, first))
    more, fewer = (
        [name for name in ours if name not in theirs] for ours, theirs in ((names, expected), (expected, names))
    )
    if more or fewer:
        raise ValueError(
            f"the tasks {first_task!r} and {task!r} have different variants, because only one of them has "
            f"{', '.join(more or fewer)}; name the handlers to switch off, as in LeaveOneOut(['ema'])"
        )


def _ends(task: str, ends: object) -> Ends:
    if not isinstance(ends, tuple | list) or len(ends) != 2:
        raise TypeError(
            f"Study(scores={{{task!r}: {ends!r}}}): expected the two values of the metric that map to a score of 0 "
            "and of 1, such as (0.1, 1.0)"
        )
    zero, one = ends
    if any(isinstance(end, bool) or not isinstance(end, int | float) or not math.isfinite(end) for end in ends) or (
        zero == one
    ):
        raise ValueError(f"Study(scores={{{task!r}: {ends!r}}}): expected two different finite numbers")
    return float(zero), float(one)
