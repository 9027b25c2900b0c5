"""The names of checkpoint versions: templates, numbered names for duplicates, and hidden names for unfinished versions."""

from __future__ import annotations

import itertools
import math
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..authoring.checks import did_you_mean
from ..core.state import as_number
from ..distributed.liveness import identity

if TYPE_CHECKING:
    from ..core.state import MetricStore

__all__ = [
    "DEFAULT_FILENAME",
    "LONGEST_NAME",
    "NameTemplate",
    "hidden_name",
    "is_numbered",
    "match_hidden",
    "numbered",
    "visible_name",
]

DEFAULT_FILENAME = "{name}-epoch{epoch:04d}-iter{iteration:08d}"
LONGEST_NAME = 150
"""Maximum length of a version's name, in characters: the longer hidden name must fit into the 255 bytes of a file name."""

_NAME = re.compile(r"[A-Za-z0-9_+=@,-][A-Za-z0-9_.+=@,-]*")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<owner>[0-9a-f]{8}~\d+~\d+)~\d+\.(?P<kind>new|old|replaced)")
_counter = itertools.count()


class NameTemplate:
    """Fills in the names of checkpoint versions, such as ``"{name}-epoch{epoch:04d}-iter{iteration:08d}"``.

    Args:
        text: Argument ``filename`` of `Checkpoint`.
        name: Name of the handler.

    Raises:
        TypeError, ValueError: for a template that can never produce a valid name.
    """

    counters = ("name", "epoch", "iteration", "step")

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.where = f"Checkpoint(filename={text!r})"
        if not isinstance(text, str):
            raise TypeError(f"{self.where}: expected a str, such as {DEFAULT_FILENAME!r}")
        try:
            self.parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None
        fields = [(key, form, conversion) for _, key, form, conversion in self.parts if key is not None]
        for key, form, conversion in fields:
            if not key or key.isdigit() or conversion or "{" in (form or ""):
                raise ValueError(
                    f"{self.where}: {{{key}}}: expected one of {', '.join(self.counters)} or the name of a metric, with an "
                    "optional format, such as {accuracy:.3f}"
                )
        self.metrics = sorted({key for key, _, _ in fields} - set(self.counters))
        self.fill(name, 1, 1, 1, dict.fromkeys(self.metrics, 0.0))  # raises now if every name would be invalid

    def require(self, metrics: MetricStore) -> None:
        """Raise a KeyError for a metric of the template that does not exist and that no handler has announced."""
        for key in self.metrics:
            if key not in metrics and key not in metrics.owners:
                there = sorted({*self.counters, *metrics, *metrics.owners})
                hint = did_you_mean(key, there)
                raise KeyError(f"{self.where}: no value is named {key!r}; available names: {', '.join(there)}{hint}")

    def fill(self, name: str, epoch: int, iteration: int, step: int, metrics: Mapping[str, Any]) -> str:
        """The name for a position in the run; a metric without a value yet is nan."""
        values: dict[str, Any] = {"name": name, "epoch": epoch, "iteration": iteration, "step": step}
        filled = ""
        for literal, key, form, _ in self.parts:
            filled += literal
            if key is None:
                continue
            value = values[key] if key in values else as_number(metrics.get(key, math.nan))
            if value is None:
                raise ValueError(f"{self.where}: the metric {key!r} is a {type(metrics[key]).__name__}, not a scalar")
            try:
                filled += format(value, form or "")
            except ValueError as error:
                raise ValueError(f"{self.where}: {{{key}}}: {error}") from None
        if not _NAME.fullmatch(filled) or filled.endswith(".damaged") or len(filled) > LONGEST_NAME:
            raise ValueError(
                f"{self.where}: the name {filled!r} is invalid; use at most {LONGEST_NAME} characters, which may be "
                "letters, digits, and '_', '-', '.', '+', '=', '@' or ','; the name must not begin with '.' or end "
                "with '.damaged'"
            )
        return filled


def numbered(base: str) -> Iterator[str]:
    """The names to try, in order: ``base``, ``base-2``, ``base-3``, ..."""
    return (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))


def is_numbered(name: str, base: str) -> bool:
    """Whether a name is one of ``numbered(base)``."""
    return name == base or (name.startswith(f"{base}-") and name[len(base) + 1 :].isdigit())


def hidden_name(folder: Path, name: str, kind: str) -> Path:
    """A new hidden path for a version that this process is writing ("new"), removing ("old") or replacing ("replaced")."""
    return folder / f".{name}.{identity()}~{next(_counter)}.{kind}"


def match_hidden(name: str) -> re.Match[str] | None:
    """The match of a hidden name with the groups "name", "owner" (an `identity`) and "kind"; None for any other name."""
    return _HIDDEN.fullmatch(name)


def visible_name(name: str) -> str:
    """The name of a version, given this name or a hidden one."""
    found = match_hidden(name)
    return name if found is None else found["name"]
