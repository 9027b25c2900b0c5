"""Data whose length changes from epoch to epoch, is only an estimate, or is other data than in the run before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from signalfire import CombinedData, DataError, Engine, Events, ReloadedData, Update
from signalfire.handlers import GradientAccumulation, LimitBatches
from signalfire.tuning import find_learning_rate
from tests.kit import build, evaluator_of, linear

SLOW = partial(torch.optim.SGD, lr=1e-6)
ROWS = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.ones(12, 1))


class Buckets:
    """As many batches as epochs were set, and two more."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 + self.epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * place, 2 * place + 1] for place in range(len(self))])


def buckets() -> DataLoader[Any]:
    return DataLoader(ROWS, batch_sampler=Buckets())


def small() -> Engine:
    return build(nn.Sequential(linear(1, 4), nn.Dropout(), linear(4, 1)), optimizer=SLOW)


def iterations(engine: Engine) -> list[tuple[int, int]]:
    """Epoch and iteration of all iterations that are yet to be made."""
    seen: list[tuple[int, int]] = []
    engine.on(Events.ITERATION_COMPLETED)(lambda engine: seen.append((engine.state.epoch, engine.state.iteration)))
    return seen


def in_epochs(*lengths: int) -> list[tuple[int, int]]:
    numbers = itertools.count(1)
    return [(epoch, next(numbers)) for epoch, length in enumerate(lengths, 1) for _ in range(length)]


def test_an_epoch_is_as_long_as_its_sampler_says_once_its_epoch_is_set() -> None:
    engine = small()
    seen, lengths = iterations(engine), []
    engine.on(Events.EPOCH_STARTED)(lambda engine: lengths.append(engine.state.epoch_length))
    engine.run(buckets(), max_epochs=3)
    assert seen == in_epochs(2, 3, 4)
    assert lengths == [2, 3, 4]


def test_windows_close_where_such_epochs_end() -> None:
    engine = build(linear(1, 1), GradientAccumulation(2), optimizer=SLOW)
    ends: list[int] = []
    engine.on(Events.OPTIMIZER_STEP_COMPLETED)(lambda engine: ends.append(engine.state.iteration))
    engine.run(buckets(), max_epochs=3)
    assert ends == [2, 4, 5, 7, 9]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_run_over_them_resumes_inside_each_epoch(cut: int) -> None:
    whole = small()
    whole.run(buckets(), max_epochs=3)
    begun, resumed = small(), small()
    begun.run(buckets(), max_iters=cut)
    resumed.load_state_dict(begun.state_dict())
    seen = iterations(resumed)
    resumed.run(buckets(), max_epochs=3)
    assert seen == in_epochs(2, 3, 4)[cut:]
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)


class Reseeded:
    """An order of its own for each epoch, whose number it keeps under this name."""

    def __init__(self, name: str, kind: Callable[[int], Any]) -> None:
        self.name, self.kind = name, kind
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        setattr(self, self.name, self.kind(epoch))

    def __len__(self) -> int:
        return 3 + int(getattr(self, self.name))

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(int(getattr(self, self.name)))
        return iter(torch.randperm(len(self), generator=generator).tolist())


@pytest.mark.parametrize(("name", "kind"), [("seed", int), ("_epoch", int), ("epoch", torch.tensor)])
@pytest.mark.parametrize("cut", [4, 5, 8])
def test_a_sampler_may_keep_its_epoch_as_it_likes(name: str, kind: Callable[[int], Any], cut: int) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(ROWS, batch_size=1, sampler=Reseeded(name, kind))

    whole = small()
    seen = read(whole)
    whole.run(loader(), max_epochs=3)
    begun, resumed = small(), small()
    begun.run(loader(), max_iters=cut)
    resumed.load_state_dict(begun.state_dict())
    rest = read(resumed)
    resumed.run(loader(), max_epochs=3)
    assert rest == seen[cut:]


@pytest.mark.parametrize("mode", ["min", "max", "cycle"])
def test_combined_data_is_as_long_as_its_parts_in_each_epoch(mode: Any) -> None:
    engine = Engine(
        Update.from_function(lambda engine, batch: engine.model(batch["part"][0]).sum(), SLOW),
        model=linear(1, 1),
        seed=0,
    )
    seen = iterations(engine)
    engine.run(CombinedData({"part": buckets()}, mode=mode), max_epochs=3)
    assert seen == in_epochs(2, 3, 4)


def test_reloaded_data_as_a_part_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"ReloadedData\(lambda epoch: CombinedData"):
        CombinedData({"a": ReloadedData(lambda epoch: [epoch]), "b": [1]}, mode="min")


def test_a_receiver_of_the_start_of_an_epoch_may_change_its_data() -> None:
    loader = DataLoader(ROWS, batch_size=6)
    engine = small()
    seen = iterations(engine)

    @engine.on(Events.EPOCH_STARTED)
    def smaller(engine: Engine) -> None:
        loader.batch_sampler.batch_size = 6 // engine.state.epoch  # type: ignore[union-attr]

    engine.run(loader, max_epochs=2)
    assert seen == in_epochs(2, 4)


def test_reloaded_data_under_a_limit_resumes_in_a_later_epoch() -> None:
    def data() -> ReloadedData:
        return ReloadedData(lambda epoch: DataLoader(ROWS, batch_size=3 - epoch, shuffle=True))

    def engine() -> Engine:
        made = small()
        made.attach(LimitBatches(5))
        return made

    whole = engine()
    whole.run(data(), max_epochs=3)
    assert whole.state.iteration == 4 + 5 + 5
    begun, resumed = engine(), engine()
    begun.run(data(), max_iters=6)
    resumed.load_state_dict(begun.state_dict())
    resumed.run(data(), max_epochs=3)
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)


class Estimated(IterableDataset[Any]):
    """Says that it has five batches, and has these."""

    def __init__(self, *counts: int) -> None:
        self.counts = itertools.cycle(counts)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return (ROWS[slice(place, place + 1)] for place in range(next(self.counts)))


@pytest.mark.parametrize("data", [lambda: Estimated(3), lambda: DataLoader(Estimated(3), batch_size=None)])
def test_data_with_an_estimated_length_trains_as_the_message_says(data: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match=r"has length 5 but ended after 3 batches.*run\(epoch_length=3\)"):
        small().run(data(), max_epochs=2)
    with pytest.raises(
        DataError, match=r"epoch_length=3\), because epoch_length=5 equals the length and keeps each epoch to one pass"
    ):
        small().run(data(), max_epochs=2, epoch_length=5)
    engine = small()
    seen = iterations(engine)
    engine.run(data(), max_epochs=2, epoch_length=3)
    assert seen == in_epochs(3, 3)


def test_with_an_epoch_length_each_pass_is_as_long_as_it_is() -> None:
    engine = small()
    seen, passes = iterations(engine), []
    engine.on(Events.DATA_EXHAUSTED)(lambda engine: passes.append(engine.state.iteration))
    engine.run(Estimated(3, 1, 4), max_epochs=2, epoch_length=4)
    assert seen == in_epochs(4, 4)
    assert passes == [3, 4]


def test_an_evaluation_ends_where_such_data_does() -> None:
    evaluator = evaluator_of(linear(1, 1))
    with pytest.warns(UserWarning, match=r"W21.*has length 5, but it yielded 3 batches"):
        state = evaluator.run(Estimated(3))
    assert state.epoch_iteration == 3


# ---- other data than in the run before ------------------------------------------------------------------------------------


def numbers(*first: int) -> list[Any]:
    return [(torch.full((1, 1), float(value)), torch.ones(1, 1)) for value in first]


class Numbered(Dataset[Any]):
    """A dataset that nobody can compare."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((1,), float(self.first + index)), torch.ones(1)


def read(engine: Engine) -> list[int]:
    """The batches that are yet to be read."""
    seen: list[int] = []
    engine.on(Events.ITERATION_STARTED)(lambda engine: seen.append(int(engine.state.batch[0].sum())))
    return seen


A = numbers(*range(10))


@pytest.mark.parametrize(
    ("data", "batches"),
    [
        (numbers(20, 21, 22), [20, 21, 22, 20]),
        (numbers(*range(20, 30)), [20, 21, 22, 23]),
        (DataLoader(ROWS, batch_size=1), [0, 1, 2, 3]),
        (iter(numbers(*range(20, 30))), [20, 21, 22, 23]),
        (A, [5, 6, 7, 8]),
        (numbers(*range(10)), [5, 6, 7, 8]),
    ],
    ids=["shorter", "as long", "of another kind", "iterator", "the same", "equal"],
)
def test_a_second_run_reads_other_data_from_its_beginning(data: Any, batches: list[int]) -> None:
    engine = small()
    engine.run(A, max_iters=5)
    seen, completed = read(engine), iterations(engine)
    engine.run(data, max_iters=9)
    assert seen == batches
    assert [iteration for _, iteration in completed] == [6, 7, 8, 9]


def test_the_open_epoch_ends_with_the_other_data() -> None:
    engine = small()
    engine.run(A, max_iters=5)
    seen, lengths = iterations(engine), []
    engine.on(Events.EPOCH_COMPLETED)(lambda engine: lengths.append(engine.state.epoch_length))
    engine.run(numbers(20, 21, 22), max_epochs=2)
    assert seen == [(1, 6), (1, 7), (1, 8), (2, 9), (2, 10), (2, 11)]
    assert lengths == [8, 3]


@pytest.mark.parametrize("cut", [6, 7, 8, 9])
def test_a_run_over_the_other_data_resumes_exactly(cut: int) -> None:
    other = partial(DataLoader, ROWS, batch_size=4, shuffle=True)

    def begun(bound: dict[str, Any]) -> Engine:
        engine = small()
        engine.run(A, max_iters=5)
        engine.run(other(), **bound)
        return engine

    whole, resumed = begun({"max_epochs": 2}), small()
    resumed.load_state_dict(begun({"max_iters": cut}).state_dict())
    seen = iterations(resumed)
    resumed.run(other(), max_epochs=2)
    assert seen == [(1, 6), (1, 7), (1, 8), (2, 9), (2, 10), (2, 11)][cut - 5 :]
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)


SOME, OTHERS = range(6), range(6, 12)
OTHER_DATA: dict[str, tuple[Any, Any, int]] = {
    "lists of numbers": ([0, 1, 2, 3], [20, 21, 22, 23], 20),
    "lists of arrays": ([np.array(n) for n in range(4)], [np.array(n) for n in range(20, 24)], 20),
    "equal at both ends": (numbers(0, 1, 2, 3), numbers(0, 8, 2, 3), 0),
    "other samples": (
        DataLoader(ROWS, sampler=SubsetRandomSampler(SOME)),
        DataLoader(ROWS, sampler=SubsetRandomSampler(OTHERS)),
        -1,
    ),
    "another order": (DataLoader(ROWS, sampler=list(SOME)), DataLoader(ROWS, sampler=list(OTHERS)), 6),
}


@pytest.mark.parametrize("kind", OTHER_DATA)
def test_data_that_differs_a_little_is_other_data(kind: str) -> None:
    def value(batch: Any) -> float:
        return float(torch.as_tensor(batch[0] if isinstance(batch, tuple | list) else batch).sum())

    seen: list[float] = []

    def step(engine: Engine, batch: Any) -> Tensor:
        seen.append(value(batch))
        return engine.model(torch.ones(1, 1)).sum()  # type: ignore[no-any-return]

    one, other, first = OTHER_DATA[kind]
    engine = Engine(Update.from_function(step, SLOW), model=linear(1, 1), seed=0)
    engine.run(one, max_iters=2)
    engine.run(other, max_epochs=1)
    assert len(seen) == 2 + len(other)
    assert first in (-1, seen[2])


def test_a_new_loader_over_the_same_dataset_goes_on() -> None:
    engine = small()
    engine.run(DataLoader(ROWS, batch_size=1), max_iters=5)
    seen = read(engine)
    engine.run(DataLoader(ROWS, batch_size=1), max_iters=7)
    assert seen == [5, 6]


@pytest.mark.parametrize("made", [8, 12], ids=["inside an epoch", "between epochs"])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_run_that_has_nothing_to_do_leaves_the_position_to_the_next(made: int, loaded: bool) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(ROWS, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(4))

    whole = small()
    whole.run(loader(), max_epochs=3)
    engine, data = small(), loader()
    engine.run(data, max_iters=made)
    if loaded:
        state, engine, data = engine.state_dict(), small(), loader()
        engine.load_state_dict(state)
    with pytest.warns(UserWarning, match="nothing to do"):
        engine.run(data, max_iters=made)
    engine.run(data, max_epochs=3)
    assert torch.equal(engine.model[0].weight, whole.model[0].weight)


def test_where_nobody_can_tell_the_run_says_that_it_begins_with_the_first_batch() -> None:
    engine = small()
    engine.run(DataLoader(Numbered(0), batch_size=2), max_iters=3)
    seen = read(engine)
    with pytest.warns(UserWarning, match="partway through epoch 1, after 3 iterations.*pass the same data object"):
        engine.run(DataLoader(Numbered(50), batch_size=2), max_iters=5)
    assert seen == [101, 105]


def test_the_next_epoch_of_other_data_draws_from_its_own_generator() -> None:
    def loader(seed: int) -> DataLoader[Any]:
        return DataLoader(ROWS, batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(seed))

    rows = TensorDataset(ROWS.tensors[0] + 100, ROWS.tensors[1])
    engine = small()
    engine.run(loader(1), max_epochs=1)
    seen = read(engine)
    engine.run(DataLoader(rows, batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(2)), max_epochs=2)
    plain = DataLoader(rows, batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(2))
    assert seen == [int(x) for x, _ in plain]


@pytest.mark.parametrize("iterations_before", [3, 12])
def test_a_finder_sweeps_over_other_data_than_the_run_before_it(iterations_before: int) -> None:
    engine = small()
    loader = DataLoader(ROWS, batch_size=1, shuffle=True, generator=torch.Generator())
    engine.run(loader, max_iters=iterations_before)
    weights = engine.model[0].weight.clone()
    found = find_learning_rate(engine, numbers(*range(8)), steps=8, diverges=None)
    assert len(found.losses) == 8
    assert torch.equal(engine.model[0].weight, weights)
    seen = read(engine)
    engine.run(loader, max_iters=iterations_before + 2)
    assert len(seen) == 2


# ---- data without an end -----------------------------------------------------------------------------------------------


ENDLESS: dict[str, Callable[[], Any]] = {
    "cycle": lambda: itertools.cycle(A),
    "repeat": lambda: itertools.repeat(A[0]),
    "count": itertools.count,
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_data_without_an_end_runs_until_a_receiver_stops_it(kind: str) -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        return engine.model(torch.ones(1, 1)).sum()  # type: ignore[no-any-return]

    engine = Engine(Update.from_function(step, SLOW), model=linear(1, 1), seed=0)
    engine.on(Events.ITERATION_COMPLETED(once=7))(lambda engine: engine.terminate("enough"))
    engine.run(ENDLESS[kind](), max_epochs=1)
    assert engine.state.iteration == 7


@pytest.mark.parametrize("kind", ["cycle", "repeat"])
def test_a_run_over_it_that_nothing_could_stop_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="never ends, so the first epoch would never end"):
        small().run(ENDLESS[kind](), max_epochs=1)
