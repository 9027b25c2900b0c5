"""Benchmark: cuDNN's flag inside a run and after it."""

from __future__ import annotations

import pytest
import torch

from signalfire.handlers import Benchmark, Deterministic
from tests.kit import build, linear
from tests.process_state import changed_by


@pytest.mark.moderate
@pytest.mark.parametrize("fails", [None, "error", "interrupt", "setup"])
def test_the_flag_is_set_inside_the_run_and_restored(fails: str | None) -> None:
    expected = {} if fails == "setup" else {"cudnn.benchmark": (False, True)}
    assert changed_by(Benchmark, fails) == expected


@pytest.mark.moderate
def test_a_flag_that_was_set_before_stays_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert changed_by(Benchmark) == {}


@pytest.mark.parametrize("deterministic_first", [True, False])
def test_deterministic_beside_it_is_refused_by_name(deterministic_first: bool) -> None:
    both = [Deterministic(), Benchmark()]
    names = "'deterministic' and 'benchmark'" if deterministic_first else "'benchmark' and 'deterministic'"
    with pytest.raises(ValueError, match=f"both {names} control how algorithms are chosen"):
        build(linear(5, 1), *(both if deterministic_first else reversed(both)))
