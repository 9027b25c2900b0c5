"""Ten exercises of a book, each a notebook with the book's loop and an Engine: the same numbers.

Source: Zhang, Lipton, Li and Smola, "Dive into Deep Learning" (d2l.ai), written anew by meaning. The notebooks compare by
themselves.
"""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .outcomes import Outcome, judged

__all__ = ["NOTEBOOKS", "of_d2l"]

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "d2l").glob("*.ipynb"))


def of_d2l() -> list[Outcome]:
    """Each notebook, cell by cell."""
    return [judged(notebook.stem, partial(run, notebook)) for notebook in NOTEBOOKS]


def run(notebook: Path) -> str | None:
    """Run the cells of a notebook; an AssertionError is that its numbers differ."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), str(notebook), "exec"), names)
    return None if "Engine" in names else "it has no Engine"
