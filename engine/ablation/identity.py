"""Which stored runs are those of a study: their keys, and why other stored runs are not used."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .designs import Factories
from .provenance import Provenance, combined, digest_code
from .results import Variant

__all__ = ["Identity"]


class Identity:
    """What the runs of a study are made of; the key of a run follows from it.

    The functions are digested when the study is made: later, runs may have changed what they refer to.

    Args:
        build, run, config, streams: Arguments of the study.
        is_stored: Whether the runs outlive the study.
        task: Name of the task, in a study of several.
    """

    def __init__(
        self,
        build: object,
        run: object,
        config: Mapping[str, Any],
        streams: str | None,
        *,
        is_stored: bool,
        task: str = "",
    ) -> None:
        self._config, self._is_stored, self._task = config, is_stored, task
        self._build = digest_code(build, "build", config=config, is_stored=is_stored)
        self._run = digest_code(run, "run", config=config, is_stored=is_stored)
        try:
            encoded = json.dumps(config, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Study(config={config!r}): expected a dict that maps names to plain values ({error})"
            ) from None
        self._plain = hashlib.sha256(encoded.encode()).hexdigest()
        self._streams = str(streams)
        self._alternatives: dict[tuple[str, str], str] = {}
        self._depends_on_seed: set[str] | None = None
        self.provenance = Provenance(self._build, self._run, self._plain, "", self._streams, task=task)

    @property
    def needs_two(self) -> bool:
        """Whether a second composition, of another seed, is still needed to know what depends on the seed."""
        return self._depends_on_seed is None

    def look_at(self, parts: Mapping[str, str], others: Mapping[str, str] | None = None) -> None:
        """Take the composition into account, without what differs between two seeds.

        Args:
            parts: Digests of its parts; see `composition`.
            others: Those of another seed.
        """
        if others is not None:
            self._depends_on_seed = {name for name in {*parts, *others} if parts.get(name) != others.get(name)}
        made_of = combined(parts, self._depends_on_seed or ())
        self.provenance = Provenance(self._build, self._run, self._plain, made_of, self._streams, task=self._task)

    def look_at_alternatives(self, factories: Factories) -> None:
        """Digest the factories of alternatives."""
        self._alternatives = {
            names: digest_code(
                factory, f"the alternative {names[1]!r} to {names[0]!r}", config=self._config, is_stored=self._is_stored
            )
            for names, factory in factories.items()
        }

    def key(self, variant: Variant, seed: int) -> str:
        """The key of a run in the store."""
        swapped = [[*names, self._alternatives.get(names)] for names in sorted(variant.swapped)]
        identity: list[Any] = [self.provenance.key, sorted(variant.off), swapped, seed]
        if variant.arguments:
            identity.append([[name, self._argument(variant, name, value)] for name, value in sorted(variant.arguments)])
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def _argument(self, variant: Variant, name: str, value: object) -> str:
        what = f"the argument {name!r} of {variant.name!r}"
        return digest_code(value, what, config=self._config, is_stored=self._is_stored)

    def notes(
        self,
        variants: Sequence[Variant],
        seeds: Sequence[int],
        lines: Mapping[str, Mapping[str, Any]],
        old: Iterable[Mapping[str, Any]],
    ) -> tuple[str, ...]:
        """Why stored runs of these variants and seeds are not used."""
        planned = {_place(sorted(one.off), dict(one.swapped), seed) for one in variants for seed in seeds}
        own = {self.key(variant, seed) for variant in variants for seed in seeds}
        others = [line for key, line in lines.items() if key not in own and _place_of(line) in planned]
        reasons = Counter(filter(None, map(self._differing, others)))
        notes = [
            f"{_stored(count)} recorded with a different "
            f"{' and a different '.join(_WORDS.get(part, part) for part in parts)}, so {_is(count)} not used"
            for parts, count in sorted(reasons.items())
        ]
        if count := sum(_place_of(line) in planned for line in old):
            notes.append(
                f"{_stored(count)} written by version 0.1, which recorded neither code nor arguments, so {_is(count)} "
                "not used"
            )
        return tuple(notes)

    def _differing(self, line: Mapping[str, Any]) -> tuple[str, ...]:
        """In what a stored run differs from one of this study; empty for one that is never used here."""
        parts = tuple(self.provenance.differing(line.get("provenance", {})))
        if "until" in line and not parts:  # ended early, to decide what is pruned: never a run of the report
            return ()
        if {"config", "task"} & {*parts}:  # another config= is meant to be another study
            return ()
        return parts or ("alternative",)


_WORDS = {
    "build": "build (its code, or something that it uses)",
    "run": "run (its code, or something that it uses)",
    "composition": "setup (handlers, updates or modules)",
    "python": "Python version",
    "torch": "torch version",
    "signalfire": "Signalfire version",
}


def _stored(count: int) -> str:
    runs, were = ("runs", "were") if count > 1 else ("run", "was")
    return f"{count} stored {runs} with these variants and seeds {were}"


def _is(count: int) -> str:
    return "they are" if count > 1 else "it is"


def _place(off: Sequence[str], swapped: Mapping[str, str], seed: int) -> tuple[Any, ...]:
    return tuple(off), tuple(sorted(swapped.items())), seed


def _place_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return _place(line["off"], line["swapped"], line["seed"])
