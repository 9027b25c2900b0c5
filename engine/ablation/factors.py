"""Variants of anything that build takes, and the effects of factors with any number of levels."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from signalfire.authoring.checks import check_bool, check_int

from .designs import Design
from .formats import named_value
from .joint import Differences
from .results import BASELINE, Variant

__all__ = ["Variants", "contrasts_of", "factors_of", "has_levels", "level_contrasts", "subsets", "with_arguments"]


class Variants(Design):
    """Variants of the arguments of ``build``: architecture, data, optimizer, an argument of a handler.

    A study with this design calls ``build(seed, **arguments)``. The handlers stay as they are built.

    Args:
        baseline: The arguments of ``build`` in the baseline, by name; those that no variant changes may be left out.
        factorial: Whether to run all combinations, which separates main effects from interactions; by default each variant
            changes one argument.
        limit: Maximum number of runs per seed.
        changes: For each factor, by the name of the argument, the other values: a list, or a mapping of values by their names.

    Raises:
        TypeError, ValueError: for a factor without a value in the baseline, values that have no name of their own, or too many
            runs per seed.

    Example:
        >>> design = Variants({"width": 64, "depth": 2}, width=[32, 128], depth=[3])
        >>> [variant.name for variant in design.variants([])]
        ['baseline', 'width = 32', 'width = 128', 'depth = 3']
        >>> design = Variants({"width": 64, "depth": 2}, factorial=True, width=[32], depth=[3])
        >>> [variant.name for variant in design.variants([])]
        ['baseline', 'depth = 3', 'width = 32', 'width = 32, depth = 3']
    """

    def __init__(
        self,
        baseline: Mapping[str, Any],
        /,
        *,
        factorial: bool = False,
        limit: int = 64,
        **changes: Sequence[Any] | Mapping[str, Any],
    ) -> None:
        if not isinstance(baseline, Mapping) or not all(isinstance(name, str) for name in baseline):
            raise TypeError(
                f"Variants(baseline={baseline!r}): expected a dict that maps the argument names of build to values"
            )
        if not changes:
            raise ValueError("Variants(baseline): expected at least one factor, such as width=[32, 128]")
        self.baseline = dict(baseline)
        self.factorial = check_bool(self, "factorial", factorial)
        self.levels = {name: self._levels(name, values) for name, values in changes.items()}
        check_int(self, "limit", limit)
        runs = math.prod(map(len, self.levels.values()))
        if factorial and runs > limit:
            raise ValueError(
                f"Variants(factorial=True): {len(self.levels)} factors need {runs} runs per seed, more than limit={limit}; use "
                "fewer values, raise the limit, or omit factorial=True to change one argument at a time"
            )

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        names = {name: list(values) for name, values in self.levels.items()}  # the first is that of the baseline
        if self.factorial:
            chosen = [dict(zip(names, those, strict=True)) for those in itertools.product(*names.values())]
        else:
            usual = {name: levels[0] for name, levels in names.items()}
            chosen = [usual, *({**usual, name: one} for name, levels in names.items() for one in levels[1:])]
        return [self._variant(levels) for levels in chosen]

    def baseline_arguments(self) -> tuple[tuple[str, Any], ...]:
        return self.variants([])[0].arguments

    def _variant(self, levels: Mapping[str, str]) -> Variant:
        changed = [f"{name} = {one}" for name, one in levels.items() if one != next(iter(self.levels[name]))]
        arguments = {**self.baseline, **{name: self.levels[name][one] for name, one in levels.items()}}
        level = tuple(levels.items()) if self.factorial else ()
        return Variant(", ".join(changed) or BASELINE, level=level, arguments=tuple(arguments.items()))

    def _levels(self, name: str, values: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
        """The values of a factor by their names, that of the baseline first."""
        if name not in self.baseline:
            raise ValueError(
                f"Variants({name}=...): the baseline has no value for this argument; arguments in the baseline: "
                f"{', '.join(self.baseline) or 'none'}"
            )
        if isinstance(values, str | bytes) or not isinstance(values, Sequence | Mapping) or not values:
            raise TypeError(
                f"Variants({name}={values!r}): expected a list of alternative values, or a dict that maps names to "
                "values"
            )
        own = self.baseline[name]
        named = dict(values) if isinstance(values, Mapping) else {self._text(name, one): one for one in values}
        first = self._text(name, own, unnamed=BASELINE)
        if len(named) < len(values) or first in named:
            raise ValueError(
                f"Variants({name}={values!r}): two values have the same name; name each value, as in {{'name': value}}"
            )
        return {first: own, **named}

    def _text(self, name: str, value: Any, unnamed: str | None = None) -> str:
        own = named_value(value) or unnamed
        if own is None:
            raise TypeError(f"Variants({name}=[{value!r}]): this value has no name; pass it as {{'name': value}}")
        return own


def with_arguments(build: Callable[..., Any], variant: Variant) -> Callable[..., Any]:
    """``build`` with the arguments of a variant."""
    return functools.partial(build, **dict(variant.arguments)) if variant.arguments else build


def factors_of(variant: Variant) -> list[str]:
    """The names of the factors of a cell of a factorial design."""
    return [name for name, _ in variant.level]


def has_levels(variants: Sequence[Variant]) -> bool:
    """Whether the factors of a design have named levels, and are not just on and off."""
    return any(not isinstance(one, bool) for variant in variants for _, one in variant.level)


def subsets(factors: int, order: int) -> list[tuple[int, ...]]:
    """The places of the factors of each effect: main effects first, then interactions of two factors, up to the order."""
    return [places for size in range(1, order + 1) for places in itertools.combinations(range(factors), size)]


def contrasts_of(
    weights: Iterable[Mapping[str, Fraction]], values: Mapping[tuple[str, int], Fraction], seeds: Sequence[int]
) -> list[Differences]:
    """The weighted sum over the variants in each seed, for the weights of each effect."""
    return [
        {seed: sum((weight * values[name, seed] for name, weight in those.items()), Fraction()) for seed in seeds}
        for those in weights
    ]


def level_contrasts(
    values: Mapping[tuple[str, int], Fraction], variants: Sequence[Variant], seeds: Sequence[int], order: int
) -> tuple[list[tuple[str, ...]], list[Differences]]:
    """The names and contrasts of the effects of a full factorial design of factors with any number of levels.

    A main effect is the mean of the runs at a level minus the mean of those at the level of the baseline; an interaction is the
    difference of such differences. They are those of least squares with all interactions and one intercept for each seed.

    Args:
        values: Value of each run, by variant and seed.
        variants: Cells of the design, the baseline first.
        seeds: Seeds of which all runs finished.
        order: Maximum number of factors in an interaction.

    Raises:
        ValueError: if the variants are not a full factorial design.
    """
    cells = {tuple(one for _, one in variant.level): variant.name for variant in variants}
    factors = factors_of(variants[0])
    levels = [list(dict.fromkeys(dict(variant.level)[name] for variant in variants)) for name in factors]
    if len(cells) < len(variants) or set(cells) != set(itertools.product(*levels)):
        raise ValueError(
            "effects(variants=...): this is not a full factorial design, because a combination of levels is missing or "
            "appears twice"
        )
    names: list[tuple[str, ...]] = []
    weights = []
    for places in subsets(len(factors), order):
        for others in itertools.product(*(levels[place][1:] for place in places)):
            compared = dict(zip(places, others, strict=True))
            weights.append({name: _weight(cell, compared, levels) for cell, name in cells.items()})
            names.append(tuple(f"{factors[place]} = {one}" for place, one in compared.items()))
    return names, contrasts_of(weights, values, seeds)


def _weight(cell: Sequence[object], compared: Mapping[int, object], levels: Sequence[Sequence[object]]) -> Fraction:
    """The weight of a cell in the contrast of these levels with those of the baseline, averaged over the other factors."""
    weight = Fraction(1)
    for place, one in enumerate(cell):
        if place in compared:
            weight *= (one == compared[place]) - (one == levels[place][0])
        else:
            weight /= len(levels[place])
    return weight
