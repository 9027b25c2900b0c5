"""Where two runs differ: their traces side by side, up to the first record that is not the same."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any

from ..authoring.markup import preformatted
from .differences import Difference, Row
from .files import Record, TraceFile, read_traces

__all__ = ["Comparison", "Difference", "compare"]

Key = tuple[int, str, str | None, int | None, int]

_ENDS = ("ITERATION_COMPLETED", "EPOCH_COMPLETED")
_NUMBERS = {"loss": "losses", "gradients": "gradient norms", "parameters": "parameter norms"}


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two traces; ``print`` shows it.

    Attributes:
        a, b: The paths.
        unlike: Reasons why the runs cannot be expected to be equal, such as different versions.
        composed: Differences in their setups, which may be the point of the comparison.
        compared: Number of records that both have.
        first: The first difference; None if there is none.
        last_equal: The last record before it that is equal, as (iteration, event); None if there is none.
        rows: The iterations that both have recorded.
        ends: The last iteration of each.
        unseeded: The generators whose states differ at the start of the runs, such as "numpy".
        equal_until: The last iteration whose final state was recorded and is equal; 0 if there is none.
    """

    a: str
    b: str
    unlike: list[str]
    composed: list[str]
    compared: int
    first: Difference | None
    last_equal: tuple[int, str] | None
    rows: list[Row] = field(repr=False)
    ends: tuple[int, int] = (0, 0)
    unseeded: list[str] = field(default_factory=list)
    equal_until: int = 0

    @property
    def equal(self) -> bool:
        """Whether all common records are equal, and at least one exists; a run may have ended earlier (`ends`)."""
        return self.first is None and self.compared > 0

    def __str__(self) -> str:
        paths = f"a: {self.a}", f"b: {self.b}"
        return "\n".join([*paths, *(part for line in self._lines() for part in _wrapped(line))])

    def _lines(self) -> list[str]:
        """What is said of the two traces, a line each."""
        lines: list[str] = []
        lines += [f"not comparable: {one}" for one in self._shortened(self.unlike, 4)]
        lines += [f"different setup: {one}" for one in self._shortened(self.composed, 4)]
        if not self.compared:
            return [
                *lines,
                "the traces have no record in common; record the same iterations in both runs, with the same every=",
            ]
        if self.first is None:
            lines.append(f"equal: {self.compared} records, up to iteration {self.rows[-1].iteration}")
        else:
            if self.unseeded:
                lines.append(f"seeded differently: the random numbers of {', '.join(self.unseeded)}")
            before = "nothing was recorded before this difference"
            if self.last_equal is not None:
                iteration, event = self.last_equal
                before = f"all earlier records are equal, up to {event} of iteration {iteration}"
            lines += [f"first difference: {self.first}", f"  {before}", *self._further(self.first)]
        if self.ends[0] != self.ends[1]:
            longer, shorter = ("a", "b") if self.ends[0] > self.ends[1] else ("b", "a")
            lines.append(f"{shorter} ends at iteration {min(self.ends)}, {longer} at {max(self.ends)}")
        return lines

    @staticmethod
    def _shortened(lines: list[str], most: int) -> list[str]:
        """The first few lines, and how many more there are."""
        return lines if len(lines) <= most else [*lines[: most - 1], f"{len(lines) - most + 1} more"]

    def _further(self, first: Difference) -> Iterator[str]:
        """How the runs went on after the first difference."""
        later = [row for row in self.rows if row.iteration >= first.iteration]
        differ = sum(not row.equal for row in later)
        yield f"  from iteration {first.iteration} on, {differ} of {len(later)} iterations differ"
        far = [
            (words, max((row.apart.get(name, 0.0) for row in later), default=0.0)) for name, words in _NUMBERS.items()
        ]
        if shown := [f"{words} up to {value:.2g}" for words, value in far if value]:
            yield f"  relative differences: {', '.join(shown)}"

    def _repr_html_(self) -> str:
        return preformatted(self)

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Plot the iterations: where the runs are equal, and how far apart losses and norms are.

        Args:
            path: File to save the plot to, such as "apart.png"; None only returns it.

        Returns:
            The matplotlib figure.
        """
        from .picture import draw

        figure = draw(self.rows, self.first)
        if path is not None:
            figure.savefig(path)
        return figure


def compare(a: str | PathLike[str], b: str | PathLike[str]) -> Comparison:
    """Compare two traces written by `handlers.Trace`, and find where the runs diverge.

    Records are compared by iteration, event, update and shard; records of only one run are not a difference. In distributed runs,
    give the file of rank 0: those of the other ranks are read, too. Runs whose steps consist of shards can be compared across any
    numbers of processes; others only with the same number.

    Args:
        a, b: The paths of the traces.

    Raises:
        FileNotFoundError, ValueError: For paths without a trace.

    Example:
        >>> import tempfile, torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import Trace
        >>> folder = tempfile.mkdtemp()
        >>> def train(name):
        ...     torch.manual_seed(0)
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        ...     engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        ...     engine.attach(Trace(f"{folder}/{name}.jsonl", every="1it"))
        ...     engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=1)
        ...     return f"{folder}/{name}.jsonl"
        >>> compare(train("yesterday"), train("today")).equal
        True
    """
    ours, theirs = read_traces(Path(a)), read_traces(Path(b))
    one, other = _records(ours), _records(theirs)
    common = [key for key in one if key in other]
    unseeded, differences = _differences(common, one, other)
    before = list(takewhile(lambda key: key not in differences, common))
    made_in, other_made_in = ours[0].environment, theirs[0].environment
    return Comparison(
        str(a),
        str(b),
        _unlike(made_in, other_made_in),
        list(_compositions(made_in.get("handlers", {}), other_made_in.get("handlers", {}))),
        len(common),
        next(iter(differences.values()), None),
        before[-1][1][:2] if before else None,
        _rows(common, one, other, differences),
        (_last_iteration(one), _last_iteration(other)),
        [name.partition("/")[2] for name in unseeded],
        _last_iteration(key for key in before if key[1][1] in _ENDS),
    )


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 100, subsequent_indent="    ", break_on_hyphens=False, drop_whitespace=True)


Ranked = tuple[int, Key]
"""The rank of a record, and its key; those of shards belong to rank 0, whichever process computes them."""


def _last_iteration(keys: Iterable[Ranked]) -> int:
    return max((key[1][0] for key in keys), default=0)


def _records(files: Sequence[TraceFile]) -> dict[Ranked, Record]:
    """The records of all ranks, in the order in which the run has come to them; of one that was repeated, the last."""
    found: dict[Ranked, Record] = {}
    places: dict[Ranked, tuple[int, ...]] = {}
    for rank, file in enumerate(files):
        common: Counter[int] = Counter()  # records of each iteration that all processes have: shards are between them
        for number, record in enumerate(file.records()):
            sharded = file.environment.get("shards") is not None
            common[record.iteration] += record.shard is None
            if sharded and record.shard is None and rank > 0:
                continue  # as on rank 0
            ranked = 0 if sharded else rank, record.key
            found[ranked] = record
            of_shard = -1 if record.shard is None else record.shard
            places[ranked] = record.iteration, common[record.iteration], of_shard, number if of_shard >= 0 else 0, rank
    return {ranked: found[ranked] for ranked in sorted(found, key=places.__getitem__)}


def _differing(one: Record, other: Record) -> list[str]:
    return [name for name, value in one.digests.items() if other.digests.get(name, value) != value]


def _other_numbers(one: Record, other: Record) -> list[str]:
    """The numbers that differ of what has no digest in common, in traces with other details."""
    shared = {name.split("/")[0] for name in one.digests.keys() & other.digests.keys()}
    names = sorted(one.numbers.keys() & other.numbers.keys() - shared)
    return [name for name in names if _apart(one.numbers[name], other.numbers[name])]


def _unseeded(one: Record, other: Record) -> list[str]:
    """The generators that the runs begin with in other states; what depends on them is compared by itself."""
    return [name for name in _differing(one, other) if name.startswith("random/")]


def _difference(one: Record, other: Record, unseeded: Sequence[str]) -> Difference | None:
    """What two records of the same key have differently."""
    things = [name for name in _differing(one, other) if name not in unseeded]
    things += _other_numbers(one, other)
    if not things:
        return None
    numbers = None
    kind = things[0].split("/")[0]
    if one.numbers.get(kind) != other.numbers.get(kind) and kind in one.numbers and kind in other.numbers:
        numbers = one.numbers[kind], other.numbers[kind]
    return Difference(one.iteration, one.event, one.update, one.shard, things[0], tuple(things[1:]), numbers)


def _differences(
    common: Sequence[Ranked], one: Mapping[Ranked, Record], other: Mapping[Ranked, Record]
) -> tuple[list[str], dict[Ranked, Difference]]:
    """The generators that are not seeded alike, and what differs beside them."""
    unseeded = [name for key in common[:1] for name in _unseeded(one[key], other[key])]
    pairs = ((key, _difference(one[key], other[key], unseeded)) for key in common)
    return unseeded, {key: found for key, found in pairs if found is not None}


def _rows(
    common: Sequence[Ranked],
    one: Mapping[Ranked, Record],
    other: Mapping[Ranked, Record],
    differences: Mapping[Ranked, Difference],
) -> list[Row]:
    """The iterations that both have."""
    equal: dict[int, bool] = {}
    apart: dict[int, dict[str, float]] = {}
    for key in common:
        iteration = key[1][0]
        equal[iteration] = equal.get(iteration, True) and key not in differences
        found, ours, theirs = apart.setdefault(iteration, {}), one[key].numbers, other[key].numbers
        for name in ours.keys() & theirs.keys():
            found[name] = max(found.get(name, 0.0), _apart(ours[name], theirs[name]))
    return [Row(iteration, equal[iteration], apart[iteration]) for iteration in equal]


def _apart(one: float, other: float) -> float:
    if one == other or (one != one and other != other):
        return 0.0
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if math.isfinite(one) and math.isfinite(other) else 1.0


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Why two runs cannot be expected to be equal, by the environments that they were made in."""
    one, other = ({**env, **env.get("flags", {}), "flags": None, "handlers": None} for env in (ours, theirs))
    if one.get("shards") is not None:  # then the number of processes makes no difference
        one["processes"] = other["processes"] = None
    return [f"{key}: {one.get(key)} and {other.get(key)}" for key in one | other if one.get(key) != other.get(key)]


def _compositions(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    for name in {**ours, **theirs}:
        if name not in theirs or name not in ours:
            yield f"{name!r} only in {'a' if name in ours else 'b'}"
        elif ours[name] != theirs[name]:
            yield f"the code of {name!r}"
