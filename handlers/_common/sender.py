"""The thread of a remote logger: it alone calls the service, and the run never waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from .kept_file import Item, KeptFile

__all__ = ["Sender", "Service", "Status", "Stored"]

Status = Literal["FINISHED", "FAILED", "KILLED", "RUNNING"]

Stored = tuple[str, int, float | None]
"""A value that a service has: its name, its iteration, and the number, or None for other values."""

_BATCH = 200
_LOOK = 0.5  # seconds between two looks at what a client has written


class Service(Protocol):
    """The methods that a sender needs from a logger; `RemoteLogger` documents each of them."""

    name: str
    backoff: ClassVar[tuple[float, float]]
    keep_different: bool
    capacity: int

    def open(self, run_id: str, hyperparameters: Mapping[str, Any]) -> None: ...
    def stored(self, run_id: str, after: int) -> Iterable[Stored]: ...
    def send(self, items: Sequence[Item]) -> None: ...
    def confirmed(self) -> int | None: ...
    def close_run(self, status: Status, error: str | None) -> None: ...
    def as_sent(self, item: Item) -> Item: ...
    def is_measured(self, name: str) -> bool: ...


class _Differs(Exception):
    """The service has a different value in the place of this one."""


class Sender(threading.Thread):
    """Delivers items in their order, each exactly once, with as many attempts as needed.

    A run that is opened, or opened again after an error, may already have items, from a killed process or from a request whose
    answer was lost. They are read, and not sent again. If the service has different values there, the run went back and diverged.
    It then continues as a new remote run that has a copy of the earlier items.

    Args:
        service: the logger.
        kept: the file for undelivered items; it may already hold some. Its header names the run, how often it has continued as a
            new remote run, and its hyperparameters.
        position: the iteration that the run begins after; the service may have later values, of a process that was killed.

    Attributes:
        problem: what failed last, for a warning; None if nothing did.
        done: set once everything was delivered and the run is closed.
    """

    def __init__(self, service: Service, kept: KeptFile, position: int) -> None:
        super().__init__(name=service.name, daemon=True)
        self.service, self.kept = service, kept
        self.run_id, self.forks = kept.header["run"], kept.header["forks"]
        self.problem: str | None = None
        self.done = threading.Event()
        self._wake = threading.Condition()
        self._queue: deque[Item] = deque()
        self._in_file = kept.size > 0  # whether new items wait in the file, behind others
        self._offset = 0
        self._kept_up_to = 0  # items up to this index are in the file already
        self._last = 0  # index of the last item that was taken to be sent
        self._taken: list[Item] = []  # to be sent now
        self._sent: list[Item] = []  # accepted by the client, which may still lose them
        self._sent_before = 0  # how many were sent before these since the run was opened
        self._there: dict[tuple[str, int], list[float | None]] | None = None  # what the run has already; None: not read
        self._position = position  # the iteration after which what is there may be of another way
        self._found: set[tuple[str, int, int]] = set()  # what came after it, by name, iteration and place
        self._opened = False
        self._parameters, self._new_parameters = dict(kept.header["hyperparameters"]), False
        self._back: int | None = None
        self._end: tuple[Status, str | None] | None = None
        self._abandoned = False

    # ---- called by the run ----------------------------------------------------------------------------------------

    @property
    def remote_id(self) -> str:
        """The id of the remote run."""
        return f"{self.run_id}-{self.forks}" if self.forks else self.run_id

    def put(self, item: Item) -> None:
        """Take an item; where memory has no room for it, it is written to the file."""
        with self._wake:
            if self._in_file or len(self._queue) >= self.service.capacity:
                try:
                    self.kept.append([item])
                    self._in_file = True
                except OSError as error:
                    if not self._in_file:  # the order would be lost
                        self._queue.append(item)
                    self.problem = f"the file of unsent rows cannot be written: {error}"
            else:
                self._queue.append(item)
            self._wake.notify()

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Send hyperparameters."""
        with self._wake:
            self._parameters, self._new_parameters = dict(parameters), True
            self._wake.notify()

    def keep(self) -> None:
        """Write to the file all items that might be lost with the process, so a saved state may refer to them."""
        with self._wake:
            items = [item for item in self._waiting() if item.number > self._kept_up_to]
            if items:
                try:
                    self.kept.append(items)
                except OSError as error:
                    self.problem = f"the file of unsent rows cannot be written: {error}"
                    return
                self._kept_up_to = items[-1].number

    def _waiting(self) -> list[Item]:
        """The items in memory whose delivery is not certain."""
        earlier = [*self._sent, *self._taken]
        if self._back is not None:
            earlier = [item for item in earlier if item.number <= (self._back or 0)]
        return [*earlier, *self._queue]

    def go_back(self, index: int, iteration: int) -> None:
        """The run went back to where it had this many items: drop those that came afterwards and were not sent."""
        with self._wake:
            self._queue = deque(item for item in self._queue if item.number <= index)
            if self.kept.size:
                _, items = KeptFile.load(self.kept.path)
                self.kept.replace(item for item in items if item.number <= index)
                self._offset = 0
            self._kept_up_to = min(self._kept_up_to, index)
            self._back, self._position = index, iteration
            self._wake.notify()

    def finish(self, status: Status, error: str | None, timeout: float) -> int:
        """Close the run once all is delivered; returns how many items stay in the file because delivery takes too long."""
        with self._wake:
            self._end = status, error
            self._wake.notify()
        self.done.wait(timeout)
        with self._wake:
            if self.done.is_set():
                return 0
            self._abandoned = True
            self._wake.notify()
            items = {item.number: item for item in self._waiting()}
            taken = self._last if self._back is None else min(self._last, self._back)
            if self.kept.size:
                items |= {item.number: item for item in KeptFile.load(self.kept.path)[1] if item.number > taken}
            self.kept.header |= {"forks": self.forks, "status": status, "error": error}
            try:
                self.kept.replace(items[number] for number in sorted(items))
            except OSError as problem:  # such as a full disk
                self.problem = f"the file of unsent rows cannot be written: {problem}"
            return len(items)

    # ---- the thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Deliver until the run is closed or abandoned; after a failure wait, twice as long each time."""
        delay, most = self.service.backoff
        while not self._abandoned:
            try:
                if self._deliver():
                    self.done.set()
                    return
                delay = self.service.backoff[0]
            except Exception as error:  # whatever a client raises: a logger never ends a run
                self.problem = f"{type(error).__name__}: {error}"
                with self._wake:
                    self._taken = [*self._sent, *self._taken]
                    self._forget_connection()
                    self._wake.wait_for(lambda: self._abandoned, timeout=delay)
                delay = min(2 * delay, most)

    def _forget_connection(self) -> None:
        self._sent, self._sent_before, self._opened, self._there = [], 0, False, None

    def _deliver(self) -> bool:
        """One round: open the run, send waiting items, and wait if there are none; returns whether the run is closed."""
        if not self._opened:
            self.service.open(self.remote_id, self._parameters)
            self._opened, self._there = True, None
        self._go_back()
        if self._new_parameters:
            self._new_parameters = False
            self.service.open(self.remote_id, self._parameters)
        if not self._taken:
            self._take()
        if self._taken and not self._abandoned:
            self._send()
        self._note_confirmed()
        return self._rest()

    def _go_back(self) -> None:
        """Have the client write its items before items after a return are compared."""
        with self._wake:
            index, self._back = self._back, None
            if index is None:
                return
            self._taken = [item for item in self._taken if item.number <= index]
            self._sent = [item for item in self._sent if item.number <= index]
            self._last = min(self._last, index)
            self._found = set()
        self._reopen()

    def _reopen(self) -> None:
        self.service.close_run("RUNNING", None)
        with self._wake:
            self._forget_connection()
        self.service.open(self.remote_id, self._parameters)
        self._opened = True

    def _take(self) -> None:
        """The next items, from memory or from the file."""
        with self._wake:
            if self._back is not None or self._abandoned:
                return
            if self._queue:
                items = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            elif self._in_file:
                lines, self._offset = self.kept.read(self._offset, _BATCH)
                items = [item for item in KeptFile.decoded(lines) if item.number > self._last]
                self._in_file = bool(lines)
            else:
                return
            self._taken = items
            self._last = items[-1].number if items else self._last

    def _send(self) -> None:
        items = [self.service.as_sent(item) for item in self._taken]
        try:
            new = self._new(items, self.remote_id)
        except _Differs:
            self._fork(items)
            return
        if new:
            self.service.send(new)
        with self._wake:
            self._taken = []
            self._sent += new

    def _new(self, items: Sequence[Item], remote_id: str) -> list[Item]:
        """The part of these items that the run does not have.

        Raises:
            _Differs: if the run has a different value in the place of one of them.
        """
        if self._there is None:
            self._there = {}
            for name, iteration, value in self.service.stored(remote_id, items[0].iteration):
                self._there.setdefault((name, iteration), []).append(value)
        if not self._there:
            self._found = set()
            return list(items)
        new = []
        for item in items:
            missing = {name: value for name, value in item.values.items() if not self._has(item, name, value)}
            if missing:
                new.append(item._replace(values=missing))
        self._found |= {(name, item.iteration, item.before.get(name, 0)) for item in items for name in item.values}
        if items[-1].iteration > max(iteration for _, iteration in self._there):
            self._there = {}
        return new

    def _has(self, item: Item, name: str, value: Any) -> bool:
        assert self._there is not None
        there = self._there.get((name, item.iteration), ())
        place = item.before.get(name, 0)
        if place >= len(there):
            return False
        stored = there[place]
        differs = item.kind == "numbers" and stored is not None and not _equal(stored, value)
        if differs and not self.service.keep_different and not self.service.is_measured(name):
            raise _Differs
        return True

    def _fork(self, items: Sequence[Item]) -> None:
        """Continue as a new remote run with a copy of the items before the first that differs."""
        first, old, forks = self._first_that_differs(items), self.remote_id, self.forks + 1
        went_back = f"the run went back to iteration {self._position}"
        why = f"{went_back} and logged different values from iteration {first.iteration} onward"
        self.service.close_run("KILLED", f"{why}, so it continues as {self.run_id}-{forks}")
        earlier = list(_copies(self.service.stored(old, 0), self._is_of_this_way))
        while True:
            new = f"{self.run_id}-{forks}"
            self.service.open(new, self._parameters)
            self._there = None
            try:
                missing = self._new([*earlier, first], new)
                break
            except _Differs:  # an earlier process has taken another way from here
                self.service.close_run("RUNNING", None)
                forks += 1
        missing = [one for one in missing if one.number != first.number]
        for begin in range(0, len(missing), _BATCH):
            self.service.send(missing[begin : begin + _BATCH])
        with self._wake:
            self.forks = self.kept.header["forks"] = forks
        self._reopen()  # so that the client writes the copies

    def _is_of_this_way(self, name: str, iteration: int, place: int) -> bool:
        return iteration <= self._position or (name, iteration, place) in self._found

    def _first_that_differs(self, items: Sequence[Item]) -> Item:
        for item in items:
            try:
                for name, value in item.values.items():
                    self._has(item, name, value)
            except _Differs:
                return item
        raise AssertionError("none differs")

    def _note_confirmed(self) -> None:
        """Forget items that can no longer be lost."""
        count = self.service.confirmed() if self._sent else None
        with self._wake:
            safe = len(self._sent) if count is None else max(0, count - self._sent_before)
            del self._sent[:safe]
            self._sent_before += safe

    def _rest(self) -> bool:
        """Wait until there is something to do; returns whether the run was closed."""
        with self._wake:
            if self._abandoned or self._taken or self._queue or self._in_file:
                return False
            if self._new_parameters or self._back is not None:
                return False
            end = self._end
            if end is None:
                if not self._sent and self.kept.size:
                    self.kept.remove()
                    self._offset = 0
                self._wake.wait(_LOOK if self._sent else None)
                return False
        self.service.close_run(*end)
        with self._wake:
            if not self._abandoned:
                self.kept.remove()
        return True


def _equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _copies(points: Iterable[Stored], belongs: Callable[[str, int, int], bool]) -> Iterator[Item]:
    """Numbers of a run as items for a different run; a second value of a name in one iteration is a separate item."""
    rows: dict[int, list[dict[str, float]]] = {}
    places: Counter[tuple[str, int]] = Counter()
    for name, iteration, value in points:
        place = places[name, iteration]
        places[name, iteration] += 1
        if value is None or not belongs(name, iteration, place):
            continue
        at = rows.setdefault(iteration, [])
        at += [{} for _ in range(place + 1 - len(at))]
        at[place][name] = value
    now = time.time()
    for iteration in sorted(rows):
        for place, values in enumerate(rows[iteration]):
            if values:
                yield Item(-1, 0, iteration, 0, now, "numbers", values, dict.fromkeys(values, place))
