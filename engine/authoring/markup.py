"""HTML for notebooks: what a table or a text prints, so that ``_repr_html_`` shows it in a cell."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["preformatted", "table"]


def preformatted(text: object) -> str:
    """A text as it prints, in letters of one width.

    Example:
        >>> preformatted("a < b")
        '<pre>a &lt; b</pre>'
    """
    return f"<pre>{html.escape(str(text))}</pre>"


def table(rows: Sequence[Sequence[object]]) -> str:
    """A table; the first row is its header.

    Example:
        >>> table([["epoch", "loss"], [1, 0.5]])
        '<table><thead><tr><th>epoch</th><th>loss</th></tr></thead><tbody><tr><td>1</td><td>0.5</td></tr></tbody></table>'
    """
    header, *body = ["".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)
                     for tag, row in zip(["th"] + ["td"] * (len(rows) - 1), rows, strict=True)]  # fmt: skip
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in body)}</tbody></table>"
