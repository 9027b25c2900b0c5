"""Findings: what looks wrong but may be meant. Each has a code, is reported once a run, and can be silenced by its code.

What cannot be meant is an error instead. Parts and handlers report with ``engine.findings.report``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..authoring.markup import preformatted
from ..core import blame
from ..core.part import Part
from .codes import CODES, PRINTED, REPEATS, Severity

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = [
    "Finding",
    "FindingError",
    "FindingWarning",
    "Findings",
    "Reports",
    "allow",
    "check_codes",
    "failed_look",
    "finding",
    "warn",
]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that looks wrong.

    Attributes:
        code: its code, such as "W10"; `codes.CODES` lists them.
        sentence: what is wrong, with names and values.
        way_out: what to do about it.
        handlers: names of the handlers concerned.
        severity: "info", "warning" or "error"; by default that of the code.
    """

    code: str
    sentence: str
    way_out: str
    handlers: tuple[str, ...] = ()
    severity: Severity = "warning"

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}; {self.way_out}"


def finding(
    code: str, sentence: str, way_out: str, handlers: Iterable[str] = (), severity: Severity | None = None
) -> Finding:
    """A finding with its code's severity, unless another one is given."""
    return Finding(code, sentence, way_out, tuple(handlers), CODES[code][0] if severity is None else severity)


def failed_look(name: str, error: Exception) -> Finding:
    """The finding for a look that has raised an error."""
    text = str(error).partition("\n")[0][:200]
    return finding(
        "W09",
        f"the check {name} is skipped, because it raised {type(error).__name__}: {text}",
        "please report the error, and describe your data and model; the run does not depend on the check",
    )


class Findings(Sequence[Finding]):
    """Findings in the order in which they were made; ``print`` shows a table.

    Example:
        >>> print(Findings([Finding("W10", "nothing is trained", "give the Update an optimizer")]))
        W10  warning  nothing is trained
                      -> give the Update an optimizer
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        self._findings = tuple(findings)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> Findings: ...
    def __getitem__(self, index: int | slice) -> Finding | Findings:
        return Findings(self._findings[index]) if isinstance(index, slice) else self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    def __repr__(self) -> str:
        return f"Findings({list(self._findings)!r})"

    def __str__(self) -> str:
        lines = []
        for one in self._findings:
            by = f" [{', '.join(one.handlers)}]" if one.handlers else ""
            lines += [f"{one.code:<4} {one.severity:<8} {one.sentence}{by}", f"{'':<14}-> {one.way_out}"]
        return "\n".join(lines) or "nothing was found"

    def _repr_html_(self) -> str:
        return preformatted(self)

    def of(self, code: str) -> Findings:
        """Those with one code."""
        return Findings(one for one in self._findings if one.code == code)

    def at_least(self, severity: Severity) -> Findings:
        """Those of this severity or a higher one."""
        order = ("info", "warning", "error")
        return Findings(one for one in self._findings if order.index(one.severity) >= order.index(severity))

    def json(self) -> str:
        """The findings as a JSON array of objects with the attributes of `Finding`."""
        return json.dumps([asdict(one) for one in self._findings])


class FindingWarning(UserWarning):
    """The warning by which a finding is reported; ``finding`` has its parts."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class FindingError(RuntimeError):
    """The error by which a finding is reported where it stops the run; ``finding`` has its parts."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


_allowed: ContextVar[frozenset[str]] = ContextVar("signalfire_allowed", default=frozenset())


@contextmanager
def allow(*codes: str) -> Iterator[None]:
    """Silence findings by their codes inside the ``with`` block, in every engine.

    Raises:
        ValueError: for what is not a code.

    Example:
        >>> with allow("W10"):
        ...     pass
    """
    token = _allowed.set(_allowed.get() | check_codes("allow", codes))
    try:
        yield
    finally:
        _allowed.reset(token)


def check_codes(where: str, codes: Iterable[str]) -> frozenset[str]:
    """The codes as a set.

    Raises:
        TypeError: for a single string in place of a sequence.
        ValueError: for what is not a code.
    """
    if isinstance(codes, str):
        raise TypeError(f"{where}: {codes!r} is a single string; write [{codes!r}]")
    if not isinstance(codes, Iterable):
        raise TypeError(f"{where}: {codes!r} is not a sequence of codes, such as ['W10']")
    found = frozenset(codes)
    if unknown := sorted(str(code) for code in found if code not in CODES):
        raise ValueError(
            f"{where}: {unknown[0]!r} is not a finding code, such as 'W10'; signalfire.findings.codes lists them"
        )
    return found


def warn(found: Finding) -> None:
    """Emit a finding as a warning of the line of the user's code that is being run."""
    if found.code not in _allowed.get():
        blame.warn(FindingWarning(found))


_NOT_IN_REHEARSALS = ("W15", "W31", "W32", "W34", "W35", "W84")


class Reports(Part["Engine"]):
    """The findings of an engine's runs. An evaluator reports to the engine that runs it.

    Attributes:
        allowed: codes that are never reported.
        checked: whether the composition was checked, as it is at the start of the first run.
        prints: whether this engine's runs print lines; those of studies and searches do not.
        silent: whether nothing is looked at and nothing reported, as while the service "findings" is detached.
    """

    silent = False

    def __init__(self, engine: Engine, allowed: Iterable[str]) -> None:
        super().__init__(engine)
        self.allowed = check_codes("Engine(allow=)", allowed)
        self.checked = False
        self.prints = True
        self._said: set[str] = set()  # the lines that were printed
        self._of_run: dict[tuple[Any, ...], Finding] = {}
        self._failed: set[str] = set()  # names of looks that have raised an error in this run
        self._parent: Reports | None = None

    def begin_run(self) -> None:
        """Forget what was reported in the run before, so that it is reported again."""
        self._failed = set()
        if self._parent is None:
            self._of_run = {}

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Print no line, and report nothing about weights that are put back and about a run that is yet to come."""
        before, self.prints = self.prints, False
        try:
            with allow(*_NOT_IN_REHEARSALS):
                yield
        finally:
            self.prints = before

    @contextmanager
    def within(self, engine: Engine) -> Iterator[None]:
        """Report to another engine, which runs this one inside its own run."""
        before, self._parent = self._parent, engine.findings
        try:
            yield
        finally:
            self._parent = before

    @property
    def is_within(self) -> bool:
        """Whether another engine runs this one inside its own run."""
        return self._parent is not None

    @property
    def parent(self) -> Engine | None:
        """The engine that runs this one inside its own run; None without one."""
        return None if self._parent is None else self._parent.engine

    def report(
        self,
        code: str,
        sentence: str,
        way_out: str,
        *handlers: str,
        key: Any = None,
        severity: Severity | None = None,
    ) -> None:
        """Report a finding once a run: a warning unless it is only information, of which some is printed (`codes.PRINTED`).

        Args:
            code: its code.
            sentence: what is wrong, with names and values.
            way_out: what to do about it.
            handlers: names of the handlers concerned.
            key: what tells findings of one code apart, if not the handlers: each is reported once a run.
            severity: if it differs from the code's.
        """
        self.add(finding(code, sentence, way_out, handlers, severity), key=key)

    def add(self, found: Finding, *, key: Any = None) -> None:
        """Report a finding that was made elsewhere; see `report`."""
        if self.is_allowed(found.code):
            return
        root = self
        while root._parent is not None:
            root = root._parent
        known = (found.code, found.handlers, key)
        if known in root._of_run:
            return
        earlier = {one.code for one in root._of_run.values() if one.severity != "info"}
        if earlier.intersection(REPEATS.get(found.code, ())):
            found = replace(found, severity="info")
        root._of_run[known] = found
        if found.severity != "info":
            warn(found)
        elif found.code in PRINTED:
            root.say(str(found))

    def say(self, line: str) -> None:
        """Print a line about what the run does on stderr, once and on rank 0.

        Evaluations, dry runs, studies and searches print none.
        """
        engine = self.engine
        silent = not self.prints or self._parent is not None or engine.dry_run or not engine.training
        if not silent and line not in self._said:
            self._said.add(line)
            engine.processes.print(line, file=sys.stderr)

    def look(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """Call a function that only looks for mistakes, and must never end a run.

        An error in it is reported once, and the function is not called again in this run: None is returned in its place. Errors
        by which a finding stops the run are raised.
        """
        name = function.__qualname__
        if self.silent or name in self._failed:
            return None
        try:
            return function(*arguments, **options)
        except (FindingError, FindingWarning):
            raise
        except Exception as error:
            self.look_failed(name, error)
            return None

    def has_failed(self, function: Callable[..., Any]) -> bool:
        """Whether a function that looks for mistakes has raised an error in this run."""
        return function.__qualname__ in self._failed

    def look_failed(self, name: str, error: Exception) -> None:
        """Report that a look has raised an error, and skip it for the rest of the run."""
        self._failed.add(name)
        self.add(failed_look(name, error), key=name)

    def is_allowed(self, code: str) -> bool:
        """Whether a code is silenced: by this engine, by the one that runs it, or by `allow`."""
        parent = self._parent is not None and self._parent.is_allowed(code)
        return self.silent or code in self.allowed or code in _allowed.get() or parent

    def of_run(self) -> Findings:
        """What was found in the latest run, information included."""
        return Findings(self._of_run.values())
