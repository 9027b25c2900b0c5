"""Formats the numbers, lists and tables of a report as text."""

from __future__ import annotations

import math
import re
import statistics as plain
import textwrap
from collections.abc import Sequence
from typing import Any

__all__ = [
    "WIDTH",
    "aligned",
    "count",
    "decimals",
    "escaped_latex",
    "escaped_markdown",
    "latex_number",
    "listed",
    "looks_p_text",
    "named_value",
    "number_text",
    "numbers_in_words",
    "p_text",
    "seeds_in_words",
    "short_text",
    "size_text",
    "without_nan",
]

WIDTH = 120
"""Maximum width of a table, in characters."""


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def seeds_in_words(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {listed([str(seed) for seed in seeds])}"


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Numbers as "0 to 7" if they follow each other, else as a list; "none" without any."""
    if not numbers:
        return "none"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    return listed([str(one) for one in numbers])


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def decimals(spreads: Sequence[float], values: Sequence[float]) -> int | None:
    """Number of decimals that shows two digits of the typical spread; None for numbers too small or too large for decimals."""
    largest = max((abs(value) for value in values), default=0.0)
    positive = [spread for spread in spreads if spread > 0 and math.isfinite(spread)]
    unit = plain.median(positive) if positive else largest / 100
    digits = 1 - math.floor(math.log10(unit)) if unit > 0 else 1
    return max(0, digits) if digits <= 6 and largest < 1e5 else None


def number_text(number: float, digits: int | None) -> str:
    if math.isnan(number):
        return "-"
    if digits is None or abs(number) >= 1e6:
        return f"{number:.3g}"
    text = f"{number:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text  # no "-0.00"


def p_text(p: float | None, equals: str = "") -> str:
    if p is None:
        return "-"
    if p >= 0.001:
        return f"{equals}{p:.3f}"
    return "< 0.001" if equals else "<0.001"


def looks_p_text(p: float, alpha: float) -> str:
    """A p-value over planned looks: what is known of it is on which side of alpha it is."""
    return f"{'<=' if p <= alpha else '>'}{alpha:g}"


def short_text(number: float, *, whole: bool = False) -> str:
    if math.isnan(number):
        return "-"
    if number >= 1e7:
        return f"{number:.2e}"
    return f"{number:.0f}" if whole or number >= 100 else f"{number:.1f}"


def size_text(memory: int) -> str:
    if not memory:
        return "-"
    return f"{memory / 1e6:.0f} MB" if memory < 1e10 else f"{memory / 1e9:.1f} GB"


def aligned(table: Sequence[Sequence[str]]) -> str:
    """The table in aligned columns, at most `WIDTH` wide: long names wrap, excess columns go into a second part below."""
    widths = [max(len(line[column]) for line in table) for column in range(1, len(table[0]))]
    longest = max(len(line[0]) for line in table)
    parts, room = _parts(widths, min(longest, 16))
    first = max(min(longest, room), 8)
    text = []
    for part in parts:
        for number, line in enumerate(table):
            names = textwrap.wrap(line[0], first, subsequent_indent="  ") or [""]
            cells = "".join(f"  {line[column + 1]:>{widths[column]}}" for column in part)
            text.append(f"{names[0]:<{first}}{cells}"[:WIDTH].rstrip())
            text += names[1:]
            if number == 0:
                text.append("-" * min(WIDTH, first + sum(widths[column] + 2 for column in part)))
        text.append("")
    return "\n".join(text).rstrip()


def _parts(widths: Sequence[int], least: int) -> tuple[list[range], int]:
    """The columns of each part of a table, and the room that is left for the names: at least so much, if there is a way."""
    for split in (len(widths), 5, 3, 1):  # maximum number of columns side by side
        parts = [range(start, min(start + split, len(widths))) for start in range(0, len(widths), split)]
        room = WIDTH - max(sum(widths[column] + 2 for column in part) for part in parts)
        if room >= least:
            break
    return parts, room


def escaped_markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", " ".join(text.split()))


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


def escaped_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def latex_number(cell: str) -> str:
    if cell == "-":
        return "--"
    return re.sub(r"-(?=[\d.])", "$-$", escaped_latex(cell))


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def named_value(value: Any) -> str | None:
    """How a value is called in the name of a variant: a number or text itself, a function or class by its name; else None."""
    plain = str | int | float | bool
    if value is None or isinstance(value, plain):
        return str(value)
    if isinstance(value, tuple | list) and all(isinstance(one, plain) for one in value):
        return str(value)
    own = getattr(value, "__name__", None)
    return own if isinstance(own, str) and own != "<lambda>" else None
