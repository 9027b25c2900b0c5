"""What looks wrong with data is noticed as a run begins; the single cases are among the mistakes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from signalfire import Engine, Events
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


def test_a_run_whose_every_step_is_skipped_on_purpose_is_no_loss_that_was_forgotten() -> None:
    def skip(engine: Engine) -> None:
        engine.state.update.skip("warming up")

    engine = build(linear(5, 1))
    engine.connect(Events.UPDATE_STARTED, skip)
    engine.run(batches(), max_epochs=2)
    assert "W29" not in [one.code for one in engine.findings.of_run()]


def test_a_run_that_resumes_where_only_the_end_of_an_epoch_is_left_made_no_iteration_to_judge() -> None:
    def skip(engine: Engine) -> None:
        engine.state.update.skip("warming up")

    states: list[dict[str, Any]] = []
    engine, other = build(linear(5, 1)), build(linear(5, 1))
    engine.connect(Events.UPDATE_STARTED, skip)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()))
    engine.run(batches(), max_epochs=1)
    other.load_state_dict(states[-1])
    other.run(batches(), max_epochs=1)
    assert other.state.iteration == engine.state.iteration
    assert "W29" not in [one.code for one in other.findings.of_run()]
