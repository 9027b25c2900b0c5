"""What each handler adds, in one order or averaged over all orders: cumulative ablation and Shapley values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from signalfire.authoring.checks import check_int

from .designs import Design, check_names
from .results import BASELINE, Variant

__all__ = ["Cumulative", "Shapley"]

Weights = dict[str, dict[str, Fraction]]
"""For each contribution, by name, the weight of each variant."""

EXACT_UP_TO = 6
"""Maximum number of handlers of which all subsets are run."""


class Cumulative(Design):
    """Handlers are added one after the other to none of them, and removed one after the other from all of them.

    What a handler adds depends on which others are there: `Report.contributions` gives the difference that each step makes, in
    both directions. The baseline has all of them on.

    Args:
        handlers: Names of the handlers, in the order in which they are added and removed.

    Example:
        >>> [variant.name for variant in Cumulative(["ema", "mixup", "clip"]).variants([])]
        ['baseline', '- ema', '- ema - mixup', '- ema - mixup - clip', '- mixup - clip', '- clip']
    """

    def __init__(self, handlers: Iterable[str]) -> None:
        self.handlers = check_names(self, "handlers", handlers)
        if len(self.handlers) < 2:
            raise ValueError(f"Cumulative(handlers={list(self.handlers)}): expected at least two handlers")

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        removed = [self.handlers[:count] for count in range(len(self.handlers) + 1)]
        added = [self.handlers[count:] for count in range(1, len(self.handlers))]
        return [_without(off, self.handlers) for off in (*removed, *added)]

    def weights(self) -> Weights:
        """The weight of each variant in each contribution."""
        found = {}
        for place, name in enumerate(self.handlers):
            before, after = self.handlers[place:], self.handlers[place + 1 :]
            there = list(self.handlers[:place])
            what = f"{name} added to {' + '.join(there) or 'none'}"
            found[what] = _step(after, before, self.handlers)
        for place, name in enumerate(self.handlers):
            left = list(self.handlers[place + 1 :])
            what = f"{name} beside {' + '.join(left) or 'none'}"
            found[what] = _step(self.handlers[:place], self.handlers[: place + 1], self.handlers)
        return found


class Shapley(Design):
    """Subsets of handlers, for the Shapley value of each: what it adds, averaged over all orders of adding them.

    The values add up to the difference between all handlers and none, whatever their interactions. Up to 6 handlers all subsets
    are run and the values are exact; above, those along random orders, each of which is followed by its reverse. The baseline has
    all of them on.

    Args:
        handlers: Names of the handlers.
        orders: Number of random orders; only for more than 6 handlers.
        seed: Seed of the random orders.

    Source: Shapley, A Value for n-Person Games, 1953; Castro, Gomez and Tejada, Polynomial Calculation of the Shapley Value Based
    on Sampling, Computers and Operations Research 36, 2009, doi:10.1016/j.cor.2008.04.004 (sampled orders).

    Example:
        >>> design = Shapley(["ema", "mixup"])
        >>> [variant.name for variant in design.variants([])]
        ['baseline', '- mixup', '- ema', '- ema - mixup']
        >>> {name: str(weight) for name, weight in sorted(design.weights()["ema"].items())}
        {'- ema': '-1/2', '- ema - mixup': '-1/2', '- mixup': '1/2', 'baseline': '1/2'}
    """

    def __init__(self, handlers: Iterable[str], *, orders: int | None = None, seed: int = 0) -> None:
        self.handlers = check_names(self, "handlers", handlers)
        if len(self.handlers) < 2:
            raise ValueError(f"Shapley(handlers={list(self.handlers)}): expected at least two handlers")
        self.seed = check_int(self, "seed", seed, least=0)
        self.exact = len(self.handlers) <= EXACT_UP_TO
        if self.exact and orders is not None:
            raise ValueError(
                f"Shapley(orders={orders!r}): with {len(self.handlers)} handlers, all subsets are run, so orders= does "
                "not apply; omit orders="
            )
        if not self.exact and orders is None:
            raise ValueError(
                f"Shapley(handlers=...): {len(self.handlers)} handlers have {2 ** len(self.handlers)} subsets, which "
                "is too many to run; set the number of random orders, such as orders=20"
            )
        self.orders = self._orders() if orders is None else self._sampled(check_int(self, "orders", orders, least=2))

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        subsets: dict[frozenset[str], None] = {}
        if self.exact:
            for on in itertools.product((True, False), repeat=len(self.handlers)):
                subsets[frozenset(name for name, one in zip(self.handlers, on, strict=True) if not one)] = None
        else:
            for order in self.orders:
                subsets |= dict.fromkeys(frozenset(order[count:]) for count in reversed(range(len(order) + 1)))
        return [_without([name for name in self.handlers if name in off], self.handlers) for off in subsets]

    def weights(self) -> Weights:
        """The weight of each variant in the value of each handler."""
        return {name: self._average([self.of_order(order)[name] for order in self.orders]) for name in self.handlers}

    def of_order(self, order: Sequence[str]) -> Weights:
        """The weights of what each handler adds in one order."""
        return {name: _step(order[place + 1 :], order[place:], self.handlers) for place, name in enumerate(order)}

    def of_pairs(self, name: str) -> Weights:
        """The weights of what a handler adds, averaged over a sampled order and its reverse, for each such pair."""
        pairs = zip(self.orders[::2], self.orders[1::2], strict=True)
        return {
            str(place): self._average([self.of_order(order)[name] for order in pair])
            for place, pair in enumerate(pairs)
        }

    def _average(self, weights: Sequence[Mapping[str, Fraction]]) -> dict[str, Fraction]:
        total: dict[str, Fraction] = {}
        for one in weights:
            for name, weight in one.items():
                total[name] = total.get(name, Fraction(0)) + weight / len(weights)
        return total

    def _orders(self) -> list[tuple[str, ...]]:
        return list(itertools.permutations(self.handlers))

    def _sampled(self, count: int) -> list[tuple[str, ...]]:
        generator = random.Random(self.seed)
        orders: dict[tuple[str, ...], None] = {}
        while len(orders) < min(count, math.factorial(len(self.handlers))):
            order = tuple(generator.sample(self.handlers, len(self.handlers)))
            orders |= {order: None, order[::-1]: None}
        return list(orders)


def _without(off: Iterable[str], handlers: Sequence[str]) -> Variant:
    names = [name for name in handlers if name in set(off)]
    return Variant(" ".join(f"- {name}" for name in names) or BASELINE, frozenset(names))


def _step(off: Sequence[str], before: Sequence[str], handlers: Sequence[str]) -> dict[str, Fraction]:
    """The step from the variant without the handlers ``before`` to that without the handlers ``off``."""
    return {_without(off, handlers).name: Fraction(1), _without(before, handlers).name: Fraction(-1)}
