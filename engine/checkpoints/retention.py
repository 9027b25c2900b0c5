"""Which versions a handler keeps: the last ones, or the best ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..distributed import Processes
from .names import is_numbered

__all__ = ["Entry", "Retention"]


class Entry(NamedTuple):
    """A version that is kept.

    Attributes:
        base: its name, to which a number is added if the name is taken.
        value: of the monitored metric; None without one.
        iteration: in which it was selected.
    """

    base: str
    value: float | None
    iteration: int


class Retention:
    """The versions that are kept, as they are planned and as they are on the disk.

    A save is selected at one point of an iteration and written at a later one, perhaps in a thread. `planned` is what is kept
    once every selected save is written, `written` is what is kept on the disk now. The two are equal whenever no save is
    selected or being written: `saved` moves `written` forward, `failed` and `restart` take `planned` back. No list has two
    entries of one iteration, or more than ``keep``. What is superseded is removed after the save that supersedes it.

    Args:
        keep: the number of versions to keep.

    Attributes:
        planned: the entries that are kept after the pending save, the best or the oldest first; part of a saved state.
        written: the entries that are kept on the disk.
        names: the names on the disk of the written entries, by iteration; not part of a saved state, since the folder has them.
        superseded: the names of further versions to be removed after the next save.
        selected: the entry that is to be written; None if there is none.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.planned: list[Entry] = []
        self.written: list[Entry] = []
        self.names: dict[int, str] = {}
        self.superseded: list[str] = []
        self.selected: Entry | None = None

    @property
    def kept(self) -> list[tuple[str, Entry]]:
        """The entries on the disk, with their names."""
        return [(self.names[one.iteration], one) for one in self.written if one.iteration in self.names]

    # ---- selecting

    def select_last(self, entry: Entry) -> None:
        """Select an entry that takes the place of the oldest one."""
        self.planned = [*self._others(entry.iteration), entry][-self.keep :]
        self.selected = entry

    def place(self, value: float, iteration: int, better: Callable[[float, float | None], bool]) -> int | None:
        """The place of a value of the metric among those that are kept; None if it is too bad, or NaN."""
        others = self._others(iteration)
        place = next((i for i, one in enumerate(others) if better(value, one.value)), len(others))
        return place if place < self.keep and value == value else None

    def select_best(self, entry: Entry, place: int) -> None:
        """Select an entry that is one of the best, at its `place`."""
        others = self._others(entry.iteration)
        self.planned = [*others[:place], entry, *others[place:]][: self.keep]
        self.selected = entry

    def drop(self, iteration: int) -> None:
        """Plan without the entry of an iteration: a second, worse value in one iteration replaces the first."""
        self.planned = self._others(iteration)

    def _others(self, iteration: int) -> list[Entry]:
        return [one for one in self.planned if one.iteration != iteration]

    def take_selected(self) -> Entry | None:
        """The entry to be written now; it is selected no longer."""
        entry, self.selected = self.selected, None
        return entry

    # ---- writing

    def superseded_by(self, entry: Entry) -> list[str]:
        """The names of the versions that are removed once an entry is written, which the plan includes."""
        stays = {one.iteration for one in self.planned} - {entry.iteration}  # a second one of an iteration replaces it
        return [name for iteration, name in self.names.items() if iteration not in stays] + self.superseded

    def names_besides(self, entry: Entry) -> frozenset[str]:
        """The names of the other entries, which a new version must not take."""
        return frozenset(name for iteration, name in self.names.items() if iteration != entry.iteration)

    def saved(self, entry: Entry, name: str, planned: list[Entry], left: list[str]) -> None:
        """An entry is on the disk, and what it supersedes is removed.

        Args:
            entry: what was written.
            name: its name on the disk.
            planned: the entries that are kept with it, as planned when it was selected.
            left: names of superseded versions that could not be removed; the next save tries again.
        """
        self.written, self.superseded = planned, left
        stays = {one.iteration for one in planned}
        self.names = {iteration: name for iteration, name in self.names.items() if iteration in stays}
        self.names[entry.iteration] = name

    def failed(self, tried: Iterable[str] = ()) -> None:
        """A save failed: what is on the disk stays as it is.

        Args:
            tried: the names under which it may be there nevertheless, if it could not be undone either.
        """
        self.restart()
        self.superseded = self.superseded + [name for name in tried if name not in self.names.values()]

    def share(self, processes: Processes) -> None:
        """Take over what rank 0 knows of the disk: after an error it alone knows what was still being written."""
        known = self.written, self.names, self.superseded
        self.written, self.names, self.superseded = processes.broadcast(known)

    def restart(self) -> None:
        """Begin with what is on the disk."""
        self.selected = None
        self.planned = list(self.written)

    # ---- saved states

    def load(self, entries: Iterable[Entry]) -> None:
        """Begin with the entries of a saved state, whose names `look_up` finds."""
        self.planned = list(entries)
        self.written = list(self.planned)
        self.names, self.superseded = {}, []

    def look_up(self, manifests: Mapping[str, Mapping[str, Any]], iteration: int) -> None:
        """Find the names of the entries among a run's own versions; its other ones up to an iteration are superseded."""
        for one in self.planned:
            names = [
                name
                for name, manifest in manifests.items()
                if manifest["iteration"] == one.iteration and is_numbered(name, one.base)
            ]
            if names:
                self.names[one.iteration] = max(names, key=lambda name: (len(name), name))
        kept = set(self.names.values())
        self.superseded = [
            name for name, manifest in manifests.items() if name not in kept and manifest["iteration"] <= iteration
        ]
