"""What the engine knows of its data between two runs and at the beginning of an epoch."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Sampler, TensorDataset

from signalfire import Engine, Events, Phase, ReloadedData, Update
from signalfire.testing import trace
from tests.kit import build, idle_engine, linear, quick


class ByEpoch(Sampler[int]):
    """Draws its order from the epoch that it was set to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def make() -> tuple[Engine, DataLoader[Any], list[list[float]]]:
    seen: list[list[float]] = []

    def function(engine: Engine, batch: Any) -> Tensor:
        seen.append(batch[0].flatten().tolist())
        return engine.model(batch[0]).sum()  # type: ignore[no-any-return]

    engine = Engine(Update.from_function(function, partial(SGD, lr=0.1)), model=nn.Linear(1, 1), seed=0)
    data = TensorDataset(torch.arange(6.0).reshape(6, 1))
    return engine, DataLoader(data, batch_size=2, sampler=ByEpoch(6)), seen


def test_a_state_taken_as_an_epoch_of_a_continued_run_begins_has_the_order_of_that_epoch() -> None:
    engine, data, seen = make()
    engine.run(data, max_epochs=1)
    states: list[dict[str, Any]] = []
    with engine.connect(Events.EPOCH_STARTED(once=2), lambda engine: states.append(engine.state_dict())):
        engine.run(data, max_epochs=3)
    resumed, data, seen_again = make()
    resumed.load_state_dict(states[0])
    resumed.run(data, max_epochs=3)
    assert seen_again == seen[3:]
    assert len(seen_again) == 6


# ---- an epoch ends as a `for` loop does ----------------------------------------------------------------------------


class ShuffledByPasses:
    """Sized data whose order depends on how often it was iterated to its end."""

    def __init__(self, count: int = 5) -> None:
        self.count = count
        self.passes = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.passes).sample(range(self.count), self.count)
        self.passes += 1


def read_by(engine: Engine) -> list[Any]:
    read: list[Any] = []
    engine.connect(Events.ITERATION_STARTED, lambda engine: read.append(engine.state.batch))
    return read


def trainer() -> Engine:
    """Trains one number; each batch is a number."""
    model = nn.Linear(1, 1, bias=False)
    step = Update.from_function(lambda engine, batch: engine.model.weight.sum() * batch, partial(SGD, lr=0.1))
    return Engine(step, model=model, seed=0)


def test_what_follows_the_last_yield_runs_before_the_epoch_is_completed() -> None:
    plain = ShuffledByPasses()
    expected = [batch for _ in range(3) for batch in plain]
    data, engine = ShuffledByPasses(), trainer()
    read, passes = read_by(engine), []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: passes.append(data.passes))
    engine.run(data, max_epochs=3)
    assert read == expected
    assert passes == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
@pytest.mark.parametrize("cut", range(1, 15))
def test_a_run_resumed_anywhere_reads_the_end_of_its_epochs_as_well(cut: int) -> None:
    whole = trainer()
    read = read_by(whole)
    whole.run(ShuffledByPasses(), max_epochs=3)
    first, second = trainer(), trainer()
    before, after = read_by(first), read_by(second)
    first.run(ShuffledByPasses(), max_iters=cut)
    second.load_state_dict(first.state_dict())
    data = ShuffledByPasses()
    data.passes = cut // 5  # of which no engine can know
    second.run(data, max_epochs=3)
    assert before + after == read


class Rewinding:
    """Sized data with a position of its own, which goes back to its start only where it was iterated to its end."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        while self.at < 4:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("cut", range(1, 12))
def test_data_that_rewinds_at_its_end_is_trained_on_in_every_epoch(cut: int) -> None:
    first, second = trainer(), trainer()
    before, after = read_by(first), read_by(second)
    first.run(Rewinding(), max_iters=cut)
    second.load_state_dict(first.state_dict())
    second.run(Rewinding(), max_epochs=3)
    assert before + after == [1, 2, 3, 4] * 3


@pytest.mark.moderate
@pytest.mark.parametrize("persistent", quick([False, True], True))
def test_workers_end_with_the_last_batch_and_persistent_ones_with_the_run(persistent: bool) -> None:
    engine, alive = trainer(), []
    loader = DataLoader(TensorDataset(torch.ones(4)), num_workers=1, persistent_workers=persistent,
                        multiprocessing_context="fork", collate_fn=one_number)  # fmt: skip
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: alive.append(len(multiprocessing.active_children())))
    engine.run(loader, max_epochs=2)
    assert alive == [int(persistent)] * 2
    gc.collect()
    assert not multiprocessing.active_children()
    engine.run(loader, max_iters=9)  # inside an epoch
    gc.collect()
    assert not multiprocessing.active_children()


def one_number(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return samples[0][0]


def test_generators_are_reloaded_in_each_epoch() -> None:
    engine = trainer()
    read = read_by(engine)
    engine.run(ReloadedData(lambda epoch: (10 * epoch + i for i in range(3))), max_epochs=3)
    assert read == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    engine = trainer()
    read = read_by(engine)
    engine.run(ReloadedData(lambda epoch: [10 * epoch + i for i in range(3)]), max_epochs=3, epoch_length=2)
    assert read == [0, 1, 10, 11, 20, 21]


# ---- stops before an iteration is made -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", [Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED], ids=str
)
@pytest.mark.parametrize("whole", [True, False], ids=["run", "epoch"])
def test_a_stop_before_the_updates_does_not_make_the_iteration(event: Events, whole: bool) -> None:
    engine = trainer()

    def stop(engine: Engine) -> None:
        (engine.terminate if whole else engine.terminate_epoch)("enough")

    with engine.connect(event(once=3), stop):
        seen = trace(engine)
        engine.run(range(6), max_epochs=1)
    assert engine.state.iteration == engine.updates[0].steps == 2
    names = [name for name, _, _ in seen if name in ("GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED")]
    assert names.count("ITERATION_COMPLETED") == 2
    assert names.count("ITERATION_STARTED") == (3 if event is Events.ITERATION_STARTED else 2)
    assert names.count("GET_BATCH_COMPLETED") == (2 if event is Events.GET_BATCH_STARTED else 3)


def test_without_data_no_batch_is_requested() -> None:
    engine = idle_engine()
    seen = trace(engine)
    engine.run(max_iters=3)
    assert not [name for name, _, _ in seen if name.startswith("GET_BATCH")]


def test_a_receiver_with_a_filter_is_called_once_where_unsized_data_ends() -> None:
    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    engine = trainer()
    seen: list[int] = []
    all_seen: list[int] = []
    engine.connect(Events.GET_BATCH_STARTED(once=6), lambda engine: seen.append(engine.state.epoch))
    engine.connect(Events.GET_BATCH_STARTED, lambda engine: all_seen.append(engine.state.epoch))
    engine.run(Unsized(), max_epochs=2)
    assert seen == [1]
    assert all_seen == [1] * 6 + [2] * 6


BEFORE_UPDATES = [Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED]
FILTERS: list[dict[str, Any]] = [{"once": 3}, {"every": 3}, {"after": 2, "before": 4}]


def make_cut(event: Events, options: dict[str, Any], seen: list[str]) -> Engine:
    """An engine that ends the epoch before iteration 3 is made, and notes which events call filtered receivers for it."""

    def end(engine: Engine) -> None:
        seen.append("end")
        engine.terminate_epoch("enough")

    engine = trainer()
    engine.connect(event(**options), end, phase=Phase.CONTROL)
    for one in BEFORE_UPDATES:
        engine.connect(one(once=3), partial(lambda label, engine: seen.append(label), one.label))
    return engine


def called_for_a_cut(event: Events) -> list[str]:
    """The filtered receivers that are called for an iteration that is cut at an event, and for the one made in its place."""
    labels = [one.label for one in BEFORE_UPDATES]
    return [*labels[: BEFORE_UPDATES.index(event) + 1], "end", *labels]


@pytest.mark.parametrize("event", BEFORE_UPDATES, ids=str)
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_an_epoch_that_is_ended_before_an_iteration_is_made_is_ended_once(
    event: Events, options: dict[str, Any]
) -> None:
    seen: list[str] = []
    lengths: list[int] = []
    engine = make_cut(event, options, seen)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: lengths.append(engine.state.epoch_iteration))
    engine.run(range(4), max_iters=5)
    assert (engine.state.iteration, lengths) == (5, [2])
    assert seen == called_for_a_cut(event)


@pytest.mark.parametrize("event", BEFORE_UPDATES, ids=str)
def test_a_resumed_run_ends_no_epoch_again_at_an_iteration_that_was_not_made(event: Events) -> None:
    states: list[dict[str, Any]] = []
    before: list[str] = []
    engine = make_cut(event, {"every": 3}, before)
    with engine.connect(Events.EPOCH_COMPLETED, lambda engine: states.append(engine.state_dict())):
        engine.run(range(4), max_epochs=1)
    after: list[str] = []
    resumed = make_cut(event, {"every": 3}, after)
    resumed.load_state_dict(states[0])
    resumed.run(range(4), max_iters=5)
    assert resumed.state.iteration == 5
    assert before + after == called_for_a_cut(event)


def test_what_changes_the_batch_of_an_iteration_that_was_cut_is_called_again_as_it_is_made() -> None:
    data = [(torch.full((1, 1), float(n)), torch.ones(1, 1)) for n in range(4)]

    def doubling() -> Engine:
        engine = build(linear(1, 1))
        engine.connect(
            Events.GET_BATCH_COMPLETED(every=3),
            lambda engine: setattr(engine.state, "batch", [2 * one for one in engine.state.batch]),
        )
        return engine

    whole, engine = doubling(), doubling()
    whole.run(data, max_epochs=2)
    stop = engine.connect(Events.GET_BATCH_COMPLETED(once=3), lambda engine: engine.terminate("enough"))
    with stop:
        engine.run(data, max_epochs=1)
    state, resumed = engine.state_dict(), doubling()
    engine.run(data, max_epochs=2)
    resumed.load_state_dict(state)
    resumed.run(data, max_epochs=2)
    assert torch.equal(engine.model.weight, whole.model.weight)
    assert torch.equal(resumed.model.weight, whole.model.weight)


@pytest.mark.parametrize("event", BEFORE_UPDATES, ids=str)
def test_a_run_that_was_stopped_before_an_iteration_is_made_continues_with_it(event: Events) -> None:
    engine = trainer()
    engine.connect(event(once=3), lambda engine: engine.terminate("enough"))
    assert engine.run(range(4), max_epochs=1).iteration == 2
    assert engine.run(range(4), max_epochs=2).iteration == 8


@pytest.mark.parametrize("event", BEFORE_UPDATES[1:], ids=str)
def test_an_iteration_that_an_error_cut_short_is_begun_again(event: Events) -> None:
    engine = trainer()
    seen: list[int] = []
    engine.connect(event(once=3), lambda engine: seen.append(engine.state.iteration))
    with (
        engine.connect(Events.UPDATE_STARTED(once=3), lambda engine: 1 / 0),
        pytest.raises(ZeroDivisionError),
    ):
        engine.run(range(4), max_epochs=1)
    engine.run(range(4), max_epochs=1)
    assert seen == [3, 3]


def test_every_evaluation_counts_from_the_first_iteration() -> None:
    evaluator = Engine(Update.from_function(lambda engine, batch: None), training=False)
    seen: list[int] = []

    @evaluator.on(Events.ITERATION_STARTED(once=2))
    def end(engine: Engine) -> None:
        seen.append(engine.state.iteration)
        engine.terminate_epoch("enough")

    for _ in range(2):
        evaluator.run(range(4))
    assert seen == [2, 2]


@pytest.mark.parametrize("how", ["stop", "error"])
@pytest.mark.parametrize("epoch_length", [None, 3])
def test_a_batch_of_an_iterator_that_was_not_trained_on_comes_first_in_the_next_run(
    how: str, epoch_length: int | None
) -> None:
    data, engine = iter(range(6)), trainer()
    trained: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: trained.append(engine.state.batch))

    def fail(engine: Engine) -> None:
        if how == "stop":
            engine.terminate("enough")
        else:
            raise ZeroDivisionError

    with engine.connect(Events.ITERATION_STARTED(once=3), fail), suppress(ZeroDivisionError):
        engine.run(data, max_iters=5, epoch_length=epoch_length)
    engine.run(data, max_iters=6, epoch_length=epoch_length)
    assert trained == list(range(6))


# ---- a stop with the last batch of an epoch ------------------------------------------------------------------------


@pytest.mark.parametrize("sized", [True, False])
def test_an_epoch_whose_last_batch_stops_the_run_is_completed(sized: bool) -> None:
    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    engine = trainer()
    seen = trace(engine)
    engine.connect(Events.ITERATION_COMPLETED(once=8), lambda engine: engine.terminate("enough"))
    engine.run(range(4) if sized else Unsized(), max_epochs=5)
    assert [(epoch, iteration) for name, epoch, iteration in seen if name == "EPOCH_COMPLETED"] == [(1, 4), (2, 8)]
    assert not engine.state.epoch_open
    assert engine.state.stop_reason == "enough"
    engine.run(range(4) if sized else Unsized(), max_epochs=6)
    assert engine.state.iteration == 24
