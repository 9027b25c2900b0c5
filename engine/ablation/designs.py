"""Designs of ablation studies: which variants of a composition are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from signalfire import Handler
from signalfire.authoring.checks import check_int

from .results import BASELINE, Variant

__all__ = [
    "Design",
    "Factorial",
    "LeaveOneOut",
    "OneAtATime",
    "Swap",
    "baseline_of",
    "check_names",
    "factories_of",
    "handlers_of",
    "variants_of",
]

Factory = Callable[[], Handler]
Factories = Mapping[tuple[str, str], Factory]
"""What makes each alternative, by the names of the handler and of the alternative."""
Groups = Mapping[str, Iterable[str]]


class Design:
    """Defines which variants a study compares; subclass it and override `variants` for your own.

    One of the variants must be named "baseline"; the others are compared with it.

    Attributes:
        factories: For each replaced handler, by name, the factories of its alternatives, by name.
        facts: Sentences for the paragraph on methods: how the variants were made.
        limits: What limits the conclusions, for the warnings of the report.
    """

    factories: Mapping[str, Mapping[str, Factory]] = {}
    facts: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        """The variants to compare.

        Args:
            candidates: Names of the handlers to switch if the design does not name its own.
        """
        raise NotImplementedError

    def baseline_arguments(self) -> tuple[tuple[str, Any], ...]:
        """Pairs of an argument of ``build`` and its value in the baseline, if the design sets any."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Switches(Design):
    """A design that switches handlers, or groups of handlers, on and off."""

    def __init__(self, handlers: Iterable[str] | None = None, *, groups: Groups | None = None) -> None:
        self.handlers = None if handlers is None else check_names(self, "handlers", handlers)
        self.groups = _groups(self, "groups", groups or {})

    def switches(self, candidates: Sequence[str]) -> dict[str, frozenset[str]]:
        """The handlers that each handler name or group switches; no handler may be in two."""
        grouped = set().union(*self.groups.values())
        single = self.handlers
        if single is None:
            single = tuple(name for name in candidates if name not in grouped)
        return _disjoint(self, {name: frozenset([name]) for name in single}, self.groups)


class LeaveOneOut(_Switches):
    """The baseline has every handler on; each other variant switches one handler or group off.

    Args:
        handlers: Names of the handlers; by default all candidates of the study that are in no group.
        groups: Names of handlers to switch off together, by group name.

    Example:
        >>> [variant.name for variant in LeaveOneOut(["ema", "mixup"]).variants([])]
        ['baseline', '- ema', '- mixup']
        >>> LeaveOneOut([], groups={"averaging": ["ema", "swa"]}).variants([])[1].name
        '- averaging'
    """

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        switches = self.switches(candidates)
        return [Variant(BASELINE), *(Variant(f"- {name}", off) for name, off in switches.items())]


class OneAtATime(_Switches):
    """The baseline has all of these handlers off; each other variant switches one handler or group on.

    Args:
        handlers: Names of the handlers; by default all candidates of the study that are in no group.
        groups: Names of handlers to switch on together, by group name.

    Example:
        >>> [
        ...     (variant.name, sorted(variant.off))
        ...     for variant in OneAtATime(["ema", "mixup"]).variants([])
        ... ]
        [('baseline', ['ema', 'mixup']), ('+ ema', ['mixup']), ('+ mixup', ['ema'])]
    """

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        switches = self.switches(candidates)
        every = frozenset().union(*switches.values())
        return [Variant(BASELINE, every), *(Variant(f"+ {name}", every - on) for name, on in switches.items())]


class Factorial(Design):
    """Every combination of factors on and off, which separates main effects from interactions.

    The baseline has all factors on. With k factors there are 2**k variants.

    Args:
        factors: Names of handlers, or groups of handler names by factor name.
        limit: Maximum number of runs per seed.

    Raises:
        ValueError: if the design has more than ``limit`` runs per seed.

    Example:
        >>> for variant in Factorial(["ema", "mixup"]).variants([]):
        ...     print(variant.name, dict(variant.level))
        baseline {'ema': True, 'mixup': True}
        - mixup {'ema': True, 'mixup': False}
        - ema {'ema': False, 'mixup': True}
        - ema - mixup {'ema': False, 'mixup': False}
    """

    def __init__(self, factors: Iterable[str] | Groups, *, limit: int = 64) -> None:
        self.factors = handlers_of(self, factors)
        if not self.factors:
            raise ValueError("Factorial(factors=[]): expected at least one factor")
        self.limit = check_int(self, "limit", limit)
        if (runs := 2 ** len(self.factors)) > self.limit:
            raise ValueError(
                f"Factorial(factors=...): {len(self.factors)} factors need {runs} runs per seed, more than limit={limit}; "
                "use fewer factors, combine some into a group, raise the limit, or use FractionalFactorial or LeaveOneOut"
            )

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        made = []
        for levels in itertools.product((True, False), repeat=len(self.factors)):
            level = tuple(zip(self.factors, levels, strict=True))
            without = [name for name, on in level if not on]
            off = frozenset().union(*(self.factors[name] for name in without))
            made.append(Variant(" ".join(f"- {name}" for name in without) or BASELINE, off, level=level))
        return made


class Swap(Design):
    """The baseline is the composition as built; each other variant replaces one handler by an alternative.

    The alternative is attached last, under the name that its factory gives it.

    Args:
        alternatives: For each handler, by name, the factories of its alternatives, by a name for each. With worker processes
            the factories must be picklable: a class, a module-level function, or ``functools.partial`` of one.

    Example:
        >>> from functools import partial
        >>> from signalfire.handlers import CutMix
        >>> design = Swap({"mixup": {"cutmix": CutMix, "cutmix 0.2": partial(CutMix, alpha=0.2)}})
        >>> [variant.name for variant in design.variants([])]
        ['baseline', 'mixup = cutmix', 'mixup = cutmix 0.2']
    """

    def __init__(self, alternatives: Mapping[str, Mapping[str, Factory]]) -> None:
        if not isinstance(alternatives, Mapping) or not alternatives:
            raise TypeError(
                f"Swap(alternatives={alternatives!r}): expected a dict such as {{'mixup': {{'cutmix': CutMix}}}}"
            )
        for name, factories in alternatives.items():
            if not isinstance(factories, Mapping) or not factories:
                raise TypeError(
                    f"Swap(alternatives={{{name!r}: {factories!r}}}): expected a dict that maps names to alternatives, "
                    f"such as {{{name!r}: {{'cutmix': CutMix}}}}"
                )
            for alternative, factory in factories.items():
                if not callable(factory) or isinstance(factory, Handler):
                    raise TypeError(
                        f"Swap(alternatives={{{name!r}: {{{alternative!r}: {factory!r}}}}}): each run needs a new "
                        "handler, so pass a class or a functools.partial of a class instead of an instance"
                    )
        self.factories = {name: dict(factories) for name, factories in alternatives.items()}

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        pairs = [(name, alternative) for name, factories in self.factories.items() for alternative in factories]
        swaps = [Variant(f"{name} = {alternative}", swapped=((name, alternative),)) for name, alternative in pairs]
        return [Variant(BASELINE), *swaps]


def baseline_of(designs: Sequence[Design]) -> Variant:
    """The baseline with its arguments of build, if a design changes any."""
    given = [design.baseline_arguments() for design in designs]
    return Variant(BASELINE, arguments=next((arguments for arguments in given if arguments), ()))


def variants_of(designs: Sequence[Design], candidates: Sequence[str]) -> list[Variant]:
    """The variants of all designs, each once."""
    if not designs:
        raise TypeError("expected at least one design, such as LeaveOneOut()")
    found: dict[str, Variant] = {}
    for design in designs:
        if not isinstance(design, Design):
            hint = f"{design.__name__}()" if isinstance(design, type) else "such as LeaveOneOut()"
            raise TypeError(f"{design!r} is not a design; pass an instance, {hint}")
        for variant in design.variants(candidates):
            other = found.setdefault(variant.name, variant)
            if (other.off, other.swapped, other.arguments) != (variant.off, variant.swapped, variant.arguments):
                raise ValueError(
                    f"two designs contain different variants that are both named {variant.name!r}; run each design in "
                    "a separate study"
                )
    if BASELINE not in found:
        raise ValueError(
            f"every comparison is made with the baseline, but no variant is named {BASELINE!r}; the variants are "
            f"{', '.join(found)}"
        )
    if len(found) == 1:
        raise ValueError(
            "the design has no variant to compare with the baseline. Handlers that affect training: "
            f"{', '.join(candidates) or 'none'}. To switch off other handlers, name them in Study(handlers=[...])"
        )
    return list(found.values())


def factories_of(designs: Sequence[Design]) -> dict[tuple[str, str], Factory]:
    """The factories of all designs, by the names of the handler and of the alternative."""
    return {
        (name, alternative): factory
        for design in designs
        for name, factories in design.factories.items()
        for alternative, factory in factories.items()
    }


def handlers_of(owner: object, factors: Iterable[str] | Groups) -> dict[str, frozenset[str]]:
    """The handlers that each factor switches, by its name."""
    if isinstance(factors, Mapping):
        return _disjoint(owner, _groups(owner, "factors", factors))
    return {name: frozenset([name]) for name in check_names(owner, "factors", factors)}


def check_names(owner: object, argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple; an error if they are not names, or one is there twice."""
    kind = type(owner).__name__
    if isinstance(names, str):
        raise TypeError(f"{kind}({argument}={names!r}): expected a list of names, such as [{names!r}]")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{kind}({argument}=[{name!r}]): expected handler names, such as 'ema'")
    if len(set(found)) < len(found):
        raise ValueError(f"{kind}({argument}={list(found)}): a name appears more than once; list each name only once")
    return found


def _groups(owner: object, argument: str, groups: Groups) -> dict[str, frozenset[str]]:
    kind = type(owner).__name__
    if not isinstance(groups, Mapping):
        raise TypeError(
            f"{kind}({argument}={groups!r}): expected a dict that maps group names to lists of handler names"
        )
    made = {group: frozenset(check_names(owner, f"{argument}[{group!r}]", names)) for group, names in groups.items()}
    for group, names in made.items():
        if not names:
            raise ValueError(f"{kind}({argument}={{{group!r}: []}}): the group is empty; list at least one handler")
    return made


def _disjoint(owner: object, *mappings: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """All switches in one mapping; an error if a handler is in two of them, or two have the same name."""
    kind = type(owner).__name__
    made: dict[str, frozenset[str]] = {}
    seen: dict[str, str] = {}
    for switches in mappings:
        for switch, names in switches.items():
            if switch in made:
                raise ValueError(f"{kind}: a handler and a group are both named {switch!r}; rename the group")
            made[switch] = names
            for name in sorted(names):
                if (other := seen.setdefault(name, switch)) != switch:
                    raise ValueError(
                        f"{kind}: {name!r} is toggled by both {other!r} and {switch!r}; remove it from one of them"
                    )
    return made
