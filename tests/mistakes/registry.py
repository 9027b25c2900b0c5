"""How a mistake is written down: one function that makes it, or the same thing done right.

    @mistake("W10")
    def a_forgotten_optimizer(right: bool) -> None:
        Engine(Update.supervised(loss, sgd if right else None), model=net()).run(batches(), max_epochs=2)

With ``right=False`` it must be noticed as declared; with ``right=True`` nothing may be noticed. A function that needs a folder
takes ``folder`` as a second argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["MISTAKES", "Mistake", "comes_right", "mistake", "said", "silent"]


@dataclass(frozen=True)
class Mistake:
    """A program, and how its mistake is noticed.

    Attributes:
        program: the function.
        code: the code of the finding; None unless it is noticed by one.
        error: the type of the error, or of another warning, by which it is noticed.
        match: what the text of the error, or of the line, contains.
        outcome: "noticed"; "said", if a line on stderr names it; "right", if what it returns equals what the clean twin returns;
            "silent".
        why: for silent ones, why no engine could know.
    """

    program: Callable[..., Any]
    code: str | None = None
    error: type[BaseException] | None = None
    match: str = ""
    outcome: str = "noticed"
    why: str = ""


MISTAKES: list[Mistake] = []


def mistake(
    noticed_by: str | type[BaseException], match: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The mistake is noticed: by a finding with this code, or an error (or a warning) of this type whose text has ``match``."""
    code, error = (noticed_by, None) if isinstance(noticed_by, str) else (None, noticed_by)
    if error is not None and not match:
        raise TypeError("name what the error says: match=")
    return lambda program: _listed(Mistake(program, code, error, match))


def said(match: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A line on stderr names the mistake, and the clean twin prints none."""
    return lambda program: _listed(Mistake(program, match=match, outcome="said"))


def comes_right(program: Callable[..., Any]) -> Callable[..., Any]:
    """What looks like a mistake gives the right result all the same: both twins return the same."""
    return _listed(Mistake(program, outcome="right"))


def silent(why: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Nobody notices, for this reason."""
    return lambda program: _listed(Mistake(program, outcome="silent", why=why))


def _listed(one: Mistake) -> Callable[..., Any]:
    MISTAKES.append(one)
    return one.program
