"""Where progress is drawn: a bar by tqdm or rich in a terminal, one updated output in a notebook.

A display has two methods: ``show`` draws a `View` in place of the previous one, and ``close`` ends the display.
"""

from __future__ import annotations

import html
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TextIO

from tqdm import tqdm
from tqdm.utils import disp_len, disp_trim

from .aside import StepAside

__all__ = [
    "Display",
    "NotebookDisplay",
    "RichDisplay",
    "TqdmDisplay",
    "View",
    "WidgetDisplay",
    "fitted",
    "in_notebook",
    "is_drawing",
    "of_notebook",
    "printable",
]

NARROWEST_BAR = 6

_aside = StepAside()


@dataclass(frozen=True)
class View:
    """The contents of a progress display.

    Attributes:
        title: The current stage, such as "epoch 1/3".
        fraction: The completed share, between 0 and 1; None if it is not known.
        count: The same as a count: "120/500".
        rate, samples, left: Iterations and samples per second, and the time left; empty if not known.
        values: Metrics by name; the first matters most.
        lesser: Names of values that are left out right after the rates.
        note: Something that happens meanwhile, such as "evaluating".
    """

    title: str
    fraction: float | None = None
    count: str = ""
    rate: str = ""
    samples: str = ""
    left: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    lesser: Sequence[str] = ()
    note: str = ""


class Display(Protocol):
    """Draws progress."""

    def show(self, view: View) -> None:
        """Draw a view in place of the previous one."""

    def close(self, *, keep: bool = False) -> None:
        """Draw nothing more; ``keep`` leaves the last drawing on the terminal."""


class Fitted(NamedTuple):
    """A view that fits into a line.

    Attributes:
        before, after: The texts before and after the bar.
        bar: Whether there is a bar.
        omitted: How much was left out.
        done: The fraction that the bar shows.
    """

    before: str
    after: str = ""
    bar: bool = False
    omitted: int = 0
    done: float = 0.0


def fitted(view: View, width: int | None, omit: int = 0) -> Fitted:
    """Fit a view into a line; the least important parts are left out first.

    Args:
        view: The view to draw.
        width: Number of columns; None for any number.
        omit: Least number of parts to leave out, so the parts do not change with the length of a number.

    Example:
        >>> texts = "35/100", "12.0 it/s", "384 samples/s", "00:12 left"
        >>> view = View("epoch 1/3", 0.35, *texts, {"loss": "0.512"})
        >>> fitted(view, None)[:2]
        ('epoch 1/3:  35%|', '| 35/100 [12.0 it/s, 384 samples/s, 00:12 left, loss=0.512]')
        >>> fitted(view, 60)[:2]
        ('epoch 1/3:  35%|', '| 35/100 [00:12 left, loss=0.512]')
        >>> fitted(view, 40)[:2]
        ('epoch 1/3:  35%|', '| [loss=0.512]')
    """
    parts = _parts_of(view)
    least_first = _least_first(view)
    share = "" if view.fraction is None else f" {100 * view.fraction:3.0f}%"
    bar, count = view.fraction is not None, view.count
    for number, least in enumerate(["", *least_first]):
        if least == "bar":
            bar, share = False, "" if view.fraction == 1 else share
        count = "" if least == "count" and share else count
        parts.pop(least, None)
        after = " ".join(filter(None, (count, f"[{', '.join(parts.values())}]" if parts else "")))
        before = f"{view.title}:{share}"
        before, after = (f"{before}|", f"| {after}") if bar else (f"{before} {after}".rstrip(), "")
        taken = disp_len(before) + disp_len(after) + (NARROWEST_BAR if bar else 0)
        if width is None or (taken <= width and number >= omit):
            return Fitted(before, after, bar, number, view.fraction or 0.0)
    return Fitted(disp_trim(before, width or 0), omitted=len(least_first))


def _least_first(view: View) -> list[str]:
    """The parts to leave out one after the other if a line is too long."""
    lesser = [f"={name}" for name in view.values if name in view.lesser]
    first, *others = [f"={name}" for name in view.values if name not in view.lesser] or ["note"]
    others.reverse()
    others = ["bar", *others] if view.fraction == 1 else [*others, "bar"]  # a full bar says less than a value
    return ["samples", "rate", *reversed(lesser), "count", "left", *others, first, "note"]


def _parts_of(view: View) -> dict[str, str]:
    """The parts in brackets after the bar, by kind; a value has the key ``=name``."""
    known = {"rate": view.rate, "samples": view.samples, "left": view.left, "note": view.note}
    parts = {key: text for key, text in known.items() if text}
    return parts | {f"={name}": f"{printable(name)}={value}" for name, value in view.values.items()}


class Fit:
    """Fits one view after the other; omitted parts stay omitted while the terminal and the values are the same."""

    def __init__(self) -> None:
        self._omitted = 0
        self._of: tuple[int | None, tuple[str, ...]] = None, ()

    def __call__(self, view: View, width: int | None) -> Fitted:
        now = width, tuple(view.values)
        line = fitted(view, width, self._omitted if self._of == now else 0)
        self._of, self._omitted = now, 0 if view.note else line.omitted
        return line


def width_of(file: Any) -> int | None:
    """The columns of a terminal, less the last, where some terminals wrap; None if they are not known."""
    try:
        columns = os.get_terminal_size(file.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return None
    return columns - 1 if columns > 1 else None


class TqdmDisplay:
    """A bar drawn by tqdm, which keeps apart from other bars of tqdm and from `tqdm.write`.

    Args:
        file: A terminal.
    """

    kind: type[tqdm[Any]] = tqdm

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self._bar: tqdm[Any] | None = None
        self._fit = Fit()

    def show(self, view: View) -> None:
        width = self._width()
        layout = self._layout(self._fit(view, width), width)
        done = 0.0 if view.fraction is None else view.fraction
        with _aside.drawing():
            if self._bar is None:
                file = _aside.direct(self.file)
                self._bar = self.kind(total=1.0, initial=done, bar_format=layout, ncols=width, file=file)
                _aside.add(self._bar)
                return
            self._bar.n, self._bar.bar_format, self._bar.ncols = done, layout, width
            self._bar.refresh(nolock=True)

    def close(self, *, keep: bool = False) -> None:
        if self._bar is None:
            return
        with _aside.drawing():
            self._bar.leave = keep
            # It stays on the first line of all bars, which may be another one than its own.
            self._bar.clear(nolock=True)
            self._bar.close()
            _aside.remove(self._bar)
            self._bar = None

    def _width(self) -> int | None:
        return width_of(self.file)

    def _layout(self, line: Fitted, width: int | None) -> str:
        """The line as a format of tqdm."""
        return _literal(line.before) + ("{bar}" if line.bar else "") + _literal(line.after)


class RichDisplay(TqdmDisplay):
    """A bar that looks as rich draws it; tqdm puts it on the terminal.

    Args:
        file: A terminal.
    """

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        super().__init__(file)
        self._console = Console(file=file, highlight=False)
        self._columns = self._console.width - 1

    def _width(self) -> int:
        return width_of(self.file) or self._columns

    def _layout(self, line: Fitted, width: int | None) -> str:
        from rich.progress_bar import ProgressBar

        if not line.bar or width is None:
            return _literal(line.before + line.after)
        room = width - disp_len(line.before) - disp_len(line.after)
        self._console.width = width
        with self._console.capture() as drawn:
            self._console.print(ProgressBar(1.0, line.done, width=room), end="")
        return _literal(line.before + drawn.get() + line.after)


class NotebookDisplay:
    """One output of a notebook that is updated in place; a single line of text is stored."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._line = ""

    def show(self, view: View) -> None:
        line = fitted(view, None)
        self._line = f"{line.before.removesuffix('|')} {line.after.removeprefix('| ')}".rstrip()
        done = "" if not line.bar else f'<progress max="1" value="{view.fraction:.4f}"></progress> '
        self._draw(f"<code>{done}{html.escape(self._line)}</code>")

    def close(self, *, keep: bool = True) -> None:
        if self._handle is not None:
            self._draw(f"<code>{html.escape(self._line)}</code>")
            self._handle = None

    def _draw(self, page: str) -> None:
        from IPython.display import display

        data = {"text/plain": self._line, "text/html": page}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class WidgetDisplay(TqdmDisplay):
    """A widget drawn by tqdm in a notebook while the run lasts; a line of text takes its place."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm as of_notebooks

        super().__init__(sys.stderr)
        self.kind = of_notebooks
        self._final = NotebookDisplay()
        self._view: View | None = None

    def show(self, view: View) -> None:
        self._view = view
        super().show(view)

    def close(self, *, keep: bool = True) -> None:
        super().close()
        if self._view is not None:
            self._final.show(self._view)
            self._final.close()


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def of_notebook() -> Display:
    """A widget if ipywidgets is installed, otherwise an output that is updated."""
    return WidgetDisplay() if importlib.util.find_spec("ipywidgets") is not None else NotebookDisplay()


def is_drawing() -> bool:
    """Whether a bar is on the terminal now."""
    return not _aside.is_empty()


def printable(text: str) -> str:
    """A text on one line, with control characters and line ends escaped.

    Example:
        >>> print(printable("a\\nb"))
        a\\nb
    """
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: repr(found[0])[1:-1], text)


def _literal(text: str) -> str:
    """A text escaped for a format string."""
    return text.replace("{", "{{").replace("}", "}}")
