"""What looks wrong with data is noticed as a run begins; the single cases are among the mistakes."""

from __future__ import annotations

import itertools

import pytest

from signalfire.handlers import DistributedDataParallel
from tests.kit import batches, build, linear
from tests.processes import run_together


def on_data_of_another_length() -> str:
    distributed = DistributedDataParallel()
    engine = build(linear(5, 1), distributed)
    with pytest.raises(ValueError, match="sharded") as caught:
        engine.run(batches(4 + distributed.processes.rank), max_epochs=1)
    return str(caught.value)


def test_ranks_with_data_of_different_lengths_are_refused_on_all_of_them() -> None:
    one, other = run_together(on_data_of_another_length, 2)
    assert one == other
    assert "differs in length: rank 0: 4 batches, rank 1: 5 batches; give all ranks the same data" in one


def test_an_endless_iterator_is_trained_on_within_bounds() -> None:
    engine = build(linear(5, 1))
    engine.run(itertools.cycle(batches()), max_iters=8)
    assert engine.updates[0].steps == 8
    engine = build(linear(5, 1))
    engine.run(itertools.cycle(batches()), max_epochs=2, epoch_length=4)
    assert engine.updates[0].steps == 8
