"""Retention: which versions a handler keeps, the last or the best ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..distributed import Processes
from .names import is_numbered

__all__ = ["Entry", "Retention"]


class Entry(NamedTuple):
    """A version that is kept.

    Attributes:
        base: Name of the version, without the number that is appended if the name is taken.
        value: Value of the monitored metric; None without one.
        iteration: Iteration in which it was selected.
    """

    base: str
    value: float | None
    iteration: int


class Retention:
    """Tracks the kept versions, both as planned and as written to disk.

    A save is selected at one point of an iteration and written later, possibly in a thread. `planned` holds the versions that
    are kept once every selected save is written, `written` those that are on disk now. The two are equal whenever no save is
    selected or being written: `saved` updates `written`; `failed` and `restart` reset `planned`. Neither list has two entries of
    the same iteration, or more than ``keep`` entries. A superseded version is removed after the save that supersedes it.

    Args:
        keep: Number of versions to keep.

    Attributes:
        planned: Entries kept after the pending save, the best or the oldest first; part of a saved state.
        written: Entries kept on disk.
        names: Names on disk of the written entries, by iteration; not part of a saved state, because the folder has them.
        superseded: Names of further versions to remove after the next save.
        held: Superseded versions that stay on disk for now, because the run may go back to before they were: for each, the
            iteration since which it is superseded, and its name.
        selected: Entry to write next; None if there is none.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.planned: list[Entry] = []
        self.written: list[Entry] = []
        self.names: dict[int, str] = {}
        self.superseded: list[str] = []
        self.held: list[tuple[int, str]] = []
        self.selected: Entry | None = None

    @property
    def has_abandoned(self) -> bool:
        """Whether versions are on disk that were written after the iteration to which the run has gone back."""
        return any(since == 0 for since, _ in self.held)

    @property
    def kept(self) -> list[tuple[str, Entry]]:
        """The entries on disk, with their names."""
        return [(self.names[one.iteration], one) for one in self.written if one.iteration in self.names]

    # ---- selecting

    def select_last(self, entry: Entry) -> None:
        """Select an entry that replaces the oldest one."""
        self.planned = [*self._others(entry.iteration), entry][-self.keep :]
        self.selected = entry

    def selecting(self, entry: Entry) -> Entry:
        """As `select_last`, of an entry that is written at once."""
        self.select_last(entry)
        self.selected = None
        return entry

    def place(self, value: float, iteration: int, better: Callable[[float, float | None], bool]) -> int | None:
        """The rank of a value among the kept ones, 0 being the best; None if it is not among the best, or NaN."""
        others = self._others(iteration)
        place = next((i for i, one in enumerate(others) if better(value, one.value)), len(others))
        return place if place < self.keep and value == value else None

    def select_best(self, entry: Entry, place: int) -> None:
        """Select an entry that is among the best, at its `place`."""
        others = self._others(entry.iteration)
        self.planned = [*others[:place], entry, *others[place:]][: self.keep]
        self.selected = entry

    def drop(self, iteration: int) -> None:
        """Remove the entry of an iteration from the plan: a second, worse value in one iteration replaces the first."""
        self.planned = self._others(iteration)

    def move(self, entry: Entry, to: Entry) -> Entry:
        """Let a selected entry be that of a later iteration, since its state is taken there; returns the new one."""
        self.planned = [to if one is entry else one for one in self._others(to.iteration)]
        return to

    @contextmanager
    def selected_until_written(self, entry: Entry) -> Iterator[None]:
        """Leave an entry selected if its write fails, for the run that continues there; in any other `restart` forgets it."""
        planned = self.planned
        try:
            yield
        except BaseException:
            if entry not in self.written:
                self.planned, self.selected = planned, entry
            raise

    def _others(self, iteration: int) -> list[Entry]:
        return [one for one in self.planned if one.iteration != iteration]

    def take_selected(self) -> Entry | None:
        """Return the selected entry and clear the selection."""
        entry, self.selected = self.selected, None
        return entry

    # ---- writing

    def superseded_by(self, entry: Entry, oldest: int | None = None) -> list[str]:
        """The names of the versions to remove once a planned entry is written.

        Args:
            entry: The entry.
            oldest: The earliest iteration to which the run may go back; None if it cannot.
        """
        if oldest is None and not self.held:
            # A second entry of an iteration replaces the first.
            stays = {one.iteration for one in self.planned} - {entry.iteration}
            return [name for iteration, name in self.names.items() if iteration not in stays] + self.superseded
        gone = [name for since, name in self._held_after(entry, self.planned) if oldest is None or since <= oldest]
        return gone + self.superseded

    def _held_after(self, entry: Entry, planned: list[Entry]) -> list[tuple[int, str]]:
        """Those that are held, with those that an entry supersedes."""
        stays = {one.iteration for one in planned} - {entry.iteration}
        return self.held + [(entry.iteration, name) for iteration, name in self.names.items() if iteration not in stays]

    def other_names(self, entry: Entry) -> frozenset[str]:
        """The names of the other entries, which a new version must not use; a single one is replaced by the new one."""
        stays = set() if len(self.planned) == 1 else set(self.names)
        stays -= {entry.iteration}
        return frozenset(name for iteration, name in self.names.items() if iteration in stays)

    def saved(
        self, entry: Entry, name: str, planned: list[Entry], left: list[str], removed: Iterable[str] | None = None
    ) -> None:
        """Note that an entry is on disk, and that the versions it supersedes are removed.

        Args:
            entry: The written entry.
            name: Name of its version on disk.
            planned: Kept entries including this one, as planned when it was selected.
            left: Names of superseded versions that could not be removed; the next save tries again.
            removed: Names of the superseded versions to remove; all by default.
        """
        held = [] if removed is None else self._held_after(entry, planned)
        self.held = [one for one in held if one[1] != name and one[1] not in (removed or ())]
        self.written, self.superseded = planned, left
        stays = {one.iteration for one in planned}
        self.names = {iteration: name for iteration, name in self.names.items() if iteration in stays}
        self.names[entry.iteration] = name

    def failed(self, tried: Iterable[str] = ()) -> None:
        """Note that a save failed: the versions on disk are unchanged.

        Args:
            tried: Names under which the version may exist nevertheless, if removing it also failed.
        """
        self.restart()
        self.superseded = self.superseded + [name for name in tried if name not in self.names.values()]

    def share(self, processes: Processes) -> None:
        """Broadcast rank 0's view of the disk: after an error only rank 0 knows whether a pending write finished."""
        known = self.written, self.names, self.superseded, self.held
        self.written, self.names, self.superseded, self.held = processes.broadcast(known)

    def restart(self) -> None:
        """Reset the plan to the versions on disk."""
        self.selected = None
        self.planned = list(self.written)

    # ---- saved states

    def load(self, entries: Iterable[Entry]) -> None:
        """Load the entries of a saved state; `look_up` then finds their names."""
        self.planned = list(entries)
        self.written = list(self.planned)
        self.names, self.superseded, self.held = {}, [], []

    def look_up(
        self,
        manifests: Mapping[str, Mapping[str, Any]],
        iteration: int,
        *,
        oldest: int | None = None,
        reached: int | None = None,
    ) -> None:
        """Find the names of the entries on disk, and mark the run's other versions up to an iteration as superseded.

        Args:
            manifests: Manifests of the versions that the run owns, by name.
            iteration: Iteration at which the run resumes.
            oldest: The earliest iteration to which it may go back; None if it cannot.
            reached: The iteration from which it went back, inside the process: the versions up to there are superseded, too.
        """
        past = {name: manifest for name, manifest in manifests.items() if manifest["iteration"] <= iteration}
        self._find_names(past)
        if (missing := self.missing(iteration)) is not None:
            self.written = [one for one in self.planned if one is not missing]
        kept = set(self.names.values())
        others = [name for name in past if name not in kept]
        self.superseded, self.held = (others, []) if oldest is None else ([], [(iteration, name) for name in others])
        if reached is not None:  # of what the run went back behind, nothing is needed any more
            self.held += [(0, name) for name, one in manifests.items() if iteration < one["iteration"] <= reached]

    def _find_names(self, manifests: Mapping[str, Mapping[str, Any]]) -> None:
        for one in self.planned:
            names = [name for name, manifest in manifests.items() if _is_version_of(one, name, manifest)]
            if names:
                self.names[one.iteration] = max(names, key=lambda name: (len(name), name))

    def missing(self, iteration: int) -> Entry | None:
        """The planned entry of an iteration, if it is not on disk."""
        return next((one for one in self.planned if one.iteration == iteration and iteration not in self.names), None)


def _is_version_of(entry: Entry, name: str, manifest: Mapping[str, Any]) -> bool:
    value = manifest["value"]
    same_value = (value is None) is (entry.value is None) and (value is None or float(value) == entry.value)
    return manifest["iteration"] == entry.iteration and same_value and is_numbered(name, entry.base)
