"""The benchmark beside other frameworks compares the same work: Signalfire ends with the weights of the plain PyTorch loop."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.kit import quick

BENCHMARKS = Path(__file__).parent / "benchmarks"


@pytest.mark.moderate
@pytest.mark.parametrize("name", quick(["empty", "tiny", "full", "real"], "empty", "tiny", "full"))
def test_an_item_ends_with_the_weights_of_the_bare_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    item = importlib.import_module("adapters.items").ITEMS[name]
    iterations = 2 * item.short
    bare, mine = (importlib.import_module(f"adapters.{one}").make(item)(iterations) for one in ("bare", "signalfire_"))
    assert len(bare) == len(mine) > 0 or name == "empty"
    assert all(weight.equal(other) for weight, other in zip(bare, mine, strict=True))
    start = [] if name == "empty" else list(item.model().parameters())
    assert not any(weight.equal(other) for weight, other in zip(bare, start, strict=True)), "nothing was trained"
