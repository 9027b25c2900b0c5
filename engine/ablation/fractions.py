"""Fractions of factorial designs: fewer runs than combinations, at the price of confounded effects (aliases).

With k factors on and off, a regular fraction runs 2**(k - p) of the 2**k combinations: p of the factors are on where the
number of others that are off is even. Effects whose contrasts are then the same are aliases: only their sum can be
estimated. The defining relation, I = A x B x C x D, says which: two effects are aliases if their product is one of its
words. The shortest word gives the resolution: with III, main effects are aliases of interactions of two factors, with IV of
three, with V of four; with IV, interactions of two factors are aliases of each other.

Source: Box and Hunter, The 2^(k-p) Fractional Factorial Designs, Technometrics 3, 1961; Fries and Hunter, Minimum Aberration
2^(k-p) Designs, Technometrics 22, 1980 (which of the fractions of one size and resolution)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from signalfire.authoring.checks import check_int
from signalfire.authoring.markup import preformatted

from .designs import Design, Groups, check_names, handlers_of
from .factors import contrasts_of, factors_of, has_levels
from .results import BASELINE, Result, Variant
from .statistics import Effect, finished_values, make_effects, split_seeds

__all__ = ["FractionalFactorial", "aliased_effects", "is_fraction"]

MOST = 15
"""Maximum number of factors."""

SEARCHED_UP_TO = 128
"""Maximum number of runs of the fractions that are searched by their resolution: above, that takes minutes."""

_ROMAN = dict(
    enumerate(["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII", "XIII", "XIV", "XV"], 1)
)


class FractionalFactorial(Design):
    """A regular fraction of all combinations of factors on and off, with its aliases.

    ``print(design)`` shows which effects are aliases. The baseline has all factors on. The report of the study estimates
    main effects and interactions of two factors, each as the sum of the effect and its aliases, which it names.

    Args:
        factors: Names of handlers, or groups of handler names by factor name.
        resolution: The fraction with the fewest runs whose resolution is at least this, and of these one of minimum aberration.
        generators: In place of the resolution, the factors that are generated, with the other factors that each is the product
            of: ``{"D": ["A", "B", "C"]}`` for D = ABC.
        limit: Maximum number of runs per seed.

    Attributes:
        factors: Names of the handlers that each factor switches.
        generators: The generated factors.
        words: The defining relation, without I, the shortest words first.
        resolution: Number of factors in the shortest word.

    Raises:
        ValueError: if no fraction of this resolution is within the limit, or the generators make two factors equal.

    Example:
        >>> design = FractionalFactorial(["A", "B", "C", "D"], resolution=4)
        >>> [variant.name for variant in design.variants([])][:4]
        ['baseline', '- C - D', '- B - D', '- B - C']
        >>> print(design)
        2^(4-1) fraction of resolution IV: 8 of 16 combinations
        D = A x B x C
        I = A x B x C x D
        A + B x C x D
        B + A x C x D
        C + A x B x D
        D + A x B x C
        A x B + C x D
        A x C + B x D
        A x D + B x C
    """

    def __init__(
        self,
        factors: Iterable[str] | Groups,
        *,
        resolution: int | None = None,
        generators: Mapping[str, Iterable[str]] | None = None,
        limit: int = 64,
    ) -> None:
        self.factors = handlers_of(self, factors)
        names = list(self.factors)
        if not 3 <= len(names) <= MOST:
            raise ValueError(
                f"FractionalFactorial(factors=...): expected 3 to {MOST} factors, got {len(names)}; for fewer factors, "
                "use Factorial"
            )
        if (resolution is None) == (generators is None):
            raise ValueError(
                "FractionalFactorial(): pass either resolution=, such as 4, or generators=, such as "
                "{'D': ['A', 'B', 'C']}"
            )
        self.limit = check_int(self, "limit", limit)
        if generators is not None:
            self.generators = _checked(self, names, generators)
        else:
            self.generators = self._searched(names, check_int(self, "resolution", resolution, least=3))
        masks = _masks(names)
        words = _products([_mask(masks, [name, *of]) for name, of in self.generators.items()])
        self.words = tuple(_names(names, word) for word in sorted(words, key=_by_order))
        self.resolution = len(self.words[0])
        if self.resolution < 3:
            raise ValueError(
                f"FractionalFactorial(generators=...): {' and '.join(self.words[0])} would always be on or off "
                "together; generate them from different products"
            )
        if (runs := 2 ** (len(names) - len(self.generators))) > self.limit:
            raise ValueError(
                f"FractionalFactorial(generators=...): the design needs {runs} runs per seed, more than "
                f"limit={limit}; list more of the factors in generators=, or raise the limit"
            )

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        base = [name for name in self.factors if name not in self.generators]
        made = []
        for levels in itertools.product((True, False), repeat=len(base)):
            on = dict(zip(base, levels, strict=True))
            on |= {name: not sum(not on[one] for one in of) % 2 for name, of in self.generators.items()}
            without = [name for name in self.factors if not on[name]]
            off = frozenset().union(*(self.factors[name] for name in without))
            level = tuple((name, on[name]) for name in self.factors)
            made.append(Variant(" ".join(f"- {name}" for name in without) or BASELINE, off, level=level))
        return made

    def aliases(self, order: int = 2) -> dict[str, tuple[str, ...]]:
        """What each effect that can be estimated is the sum of: its name, and those of all its aliases.

        Args:
            order: Maximum number of factors in the effects; aliases have any number.

        Example:
            >>> FractionalFactorial(["A", "B", "C"], resolution=3).aliases()
            {'A': ('B x C',), 'B': ('A x C',), 'C': ('A x B',)}
        """
        names = list(self.factors)
        words = [_mask(_masks(names), word) for word in self.words]
        return {
            " x ".join(_names(names, first)): tuple(" x ".join(_names(names, one)) for one in others)
            for first, *others in _chains(len(names), words, order)
        }

    def __str__(self) -> str:
        k, p = len(self.factors), len(self.generators)
        lines = [
            f"2^({k}-{p}) fraction of resolution {_ROMAN[self.resolution]}: {2 ** (k - p)} of {2**k} combinations",
            *(f"{name} = {' x '.join(of)}" for name, of in self.generators.items()),
            " = ".join(["I", *(" x ".join(word) for word in self.words)]),
            *(" + ".join([name, *others]) for name, others in self.aliases().items()),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __repr__(self) -> str:
        generators = {name: list(of) for name, of in self.generators.items()}
        return f"FractionalFactorial({list(self.factors)}, generators={generators})"

    def _searched(self, names: Sequence[str], resolution: int) -> dict[str, tuple[str, ...]]:
        k = len(names)
        if resolution > k:
            raise ValueError(
                f"FractionalFactorial(resolution={resolution}): a fraction with {k} factors has a resolution of "
                f"at most {k}; lower the resolution, or use Factorial"
            )
        for base in range(2, k):
            if 2**base > min(self.limit, SEARCHED_UP_TO):
                what = f"limit={self.limit}" if self.limit < SEARCHED_UP_TO else f"{SEARCHED_UP_TO}"
                raise ValueError(
                    f"FractionalFactorial(resolution={resolution}): {k} factors need more than {what} runs per seed; "
                    "lower the resolution, combine factors into groups, or set generators= and limit="
                )
            if (found := _least_aberrant(k, base, resolution)) is not None:
                return {names[base + place]: _names(names, of) for place, of in enumerate(found)}
        raise AssertionError("half of all combinations have the resolution k")


def is_fraction(variants: Sequence[Variant]) -> bool:
    """Whether the variants are a regular fraction of the combinations of factors on and off, of resolution III or more."""
    factors = factors_of(variants[0])
    if not 0 < len(factors) <= MOST or any(factors_of(one) != factors for one in variants) or has_levels(variants):
        return False
    cells = {_cell(variant) for variant in variants}
    if not (1 < len(cells) == len(variants) < 2 ** len(factors) and _is_closed(cells)):
        return False
    short = (one for one in range(1, 2 ** len(factors)) if one.bit_count() < 3)
    return not any(_is_word(one, cells) for one in short)


def aliased_effects(results: Sequence[Result], variants: Sequence[Variant], order: int, level: float) -> list[Effect]:
    """The effects of a regular fraction, each the sum of the effect that it is named after and of its aliases.

    The scale is that of a full factorial design: 2 / N times the signed sum over the N runs of a seed. A seed counts only if
    all of its runs finished.

    Args:
        results: Results of all variants and seeds.
        variants: The fraction; see `is_fraction`.
        order: Maximum number of factors in the effects that the sums are named after.
        level: Confidence level of the intervals.
    """
    names = factors_of(variants[0])
    values = finished_values(results)
    cells = {variant.name: _cell(variant) for variant in variants}
    complete, left_out = split_seeds(results, cells, values)
    words = [word for word in range(1, 2 ** len(names)) if _is_word(word, cells.values())]
    chains = _chains(len(names), words, order)
    share = Fraction(2, len(cells))
    signs = [{name: share * _sign(first, cell) for name, cell in cells.items()} for first, *_ in chains]
    contrasts = contrasts_of(signs, values, complete)
    found = make_effects([_names(names, first) for first, *_ in chains], contrasts, left_out, level)
    return [
        replace(effect, aliases=tuple(_names(names, other) for other in others))
        for effect, (_, *others) in zip(found, chains, strict=True)
    ]


# ---- effects and combinations as numbers whose bits are the factors -------------------------------------------------


def _masks(names: Sequence[str]) -> dict[str, int]:
    return {name: 1 << place for place, name in enumerate(names)}


def _mask(masks: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(masks[name] for name in names)


def _names(names: Sequence[str], mask: int) -> tuple[str, ...]:
    return tuple(name for place, name in enumerate(names) if mask >> place & 1)


def _cell(variant: Variant) -> int:
    """Which factors are off."""
    return sum(1 << place for place, (_, on) in enumerate(variant.level) if not on)


def _sign(effect: int, cell: int) -> int:
    """The sign of a run in the contrast of an effect."""
    return -1 if (effect & cell).bit_count() % 2 else 1


def _is_word(effect: int, cells: Collection[int]) -> bool:
    """Whether an effect is a word of the defining relation: its sign is that of the mean in all runs."""
    return all(_sign(effect, cell) > 0 for cell in cells)


def _is_closed(cells: Collection[int]) -> bool:
    """Whether the product of any two combinations is one of them, and all factors are on in one."""
    return 0 in cells and all(one ^ other in cells for one, other in itertools.combinations(cells, 2))


def _by_order(effect: int) -> tuple[int, list[int]]:
    """Main effects first, then interactions of two factors and so on, each in the order of the factors."""
    return effect.bit_count(), [place for place in range(effect.bit_length()) if effect >> place & 1]


def _products(generators: Sequence[int]) -> list[int]:
    """The defining relation without I: the products of some or all of the generators."""
    words = [0]
    for one in generators:
        words += [word ^ one for word in words]
    return words[1:]


def _chains(factors: int, words: Sequence[int], order: int) -> list[list[int]]:
    """Each effect of up to ``order`` factors with its aliases; an effect is listed once, under its first name."""
    effects = sorted((one for one in range(1, 2**factors) if one.bit_count() <= order), key=_by_order)
    seen: set[int] = {0, *words}  # aliases of the mean
    chains = []
    for effect in effects:
        if effect not in seen:
            chain = [effect, *(effect ^ word for word in words)]
            chains.append(sorted(chain, key=_by_order))
            seen.update(chain)
    return chains


def _checked(
    owner: Design, names: Sequence[str], generators: Mapping[str, Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    what = "FractionalFactorial(generators="
    if not isinstance(generators, Mapping) or not generators:
        raise TypeError(
            f"{what}{generators!r}): expected a dict that maps factors to products, such as {{'D': ['A', 'B', 'C']}}"
        )
    found = {name: check_names(owner, f"generators[{name!r}]", of) for name, of in generators.items()}
    for name, of in found.items():
        for one in (name, *of):
            if one not in names:
                raise ValueError(f"{what}...): {one!r} is not a factor; the factors are {', '.join(names)}")
            if one in found and one != name:
                raise ValueError(
                    f"{what}...): the generator of {name!r} uses {one!r}, which has a generator itself; use only "
                    "base factors"
                )
        if len(of) < 2 or name in of:
            raise ValueError(f"{what}{{{name!r}: {list(of)}}}): expected a product of two or more different factors")
    return found


def _least_aberrant(factors: int, base: int, resolution: int) -> list[int] | None:
    """The products that generate the factors after the first ``base``, with the fewest words of each length, the shortest first.

    None if no fraction of this size has the resolution.
    """
    columns = [one for one in range(2**base) if one.bit_count() >= resolution - 1]
    columns.sort(key=_by_order)
    best: tuple[tuple[int, ...], list[int]] | None = None

    def extend(chosen: list[int], words: list[int], lengths: tuple[int, ...], start: int) -> None:
        nonlocal best
        if best is not None and lengths >= best[0]:  # further words only add to it
            return
        if len(chosen) == factors - base:
            best = lengths, chosen
            return
        for place in range(start, len(columns)):
            new = columns[place] | 1 << (base + len(chosen))
            more = [word ^ new for word in words]
            counted = list(lengths)
            for word in more:
                counted[word.bit_count()] += 1
            if not any(counted[:resolution]):
                extend([*chosen, columns[place]], words + more, tuple(counted), place + 1)

    if math.comb(len(columns), factors - base):
        extend([], [0], (0,) * (factors + 1), 0)
    return None if best is None else best[1]
