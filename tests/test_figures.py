"""The README and the guide quote what benchmarks have printed, as the file of figures has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FIGURES: dict[str, Any] = json.loads((ROOT / "tests" / "benchmarks" / "figures.json").read_text())
PAGES = {
    "frameworks": "costs.md",
    "loop": "costs.md",
    "costs": "costs.md",
    "checkpoint": "resuming.md",
    "processes": "processes.md",
}
ROWS = {
    "empty": "an empty step",
    "tiny": "a tiny supervised step",
    "full": "the same with accumulation, clipping, a schedule, early stopping, checkpoints and a log",
    "real": "a convolutional network on MNIST-1D",
}


def cell(item: str, name: str) -> str:
    """Microseconds of an iteration, and the ratio to the plain loop where that is more than nothing."""
    found = FIGURES["frameworks"]["items"][item][name]
    digits = 2 if found["us"] < 1 else 1 if found["us"] < 10 else 0
    time = f"{found['us']:,.{digits}f} us"
    return time if item == "empty" or name == "bare" else f"{time} ({found['ratio']:.2f} x)"


def test_each_benchmark_that_was_recorded_is_quoted() -> None:
    assert FIGURES.keys() == PAGES.keys()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_quotes_what_a_benchmark_has_printed(name: str) -> None:
    printed = "\n".join(FIGURES[name]["printed"])
    assert f"```\n{printed}\n```" in (ROOT / "examples" / "guide" / PAGES[name]).read_text()


@pytest.mark.parametrize("item", ROWS)
def test_the_readme_quotes_the_comparison_of_frameworks(item: str) -> None:
    cells = " | ".join(cell(item, name) for name in ("bare", "signalfire", "ignite", "lightning"))
    assert f"| {ROWS[item]} | {cells} |" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "examples/guide/costs.md"])
def test_a_page_says_when_it_was_measured(page: str) -> None:
    assert f"on {FIGURES['frameworks']['date']}" in (ROOT / page).read_text().replace("\n", " ")
