"""The data of a run: sized, unsized, infinite or none; epochs of another length; and data that does not hold its word."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from signalfire import DataError, Engine, Events, Update
from signalfire.handlers import GradientAccumulation
from tests.kit import quick

Triple = tuple[int, int, int]


class Unsized:
    """Can be iterated again and again, and has no length."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        yield from range(self.batches)


class Resetting:
    """Its own iterator, which begins again once it has ended, as loaders of NVIDIA DALI do."""

    def __init__(self, batches: int) -> None:
        self.batches, self.place = batches, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.place == self.batches:
            self.place = 0
            raise StopIteration
        self.place += 1
        return self.place - 1


class SizedResetting(Resetting):
    def __len__(self) -> int:
        return self.batches


class ResettingInIter(Resetting):
    def __iter__(self) -> Iterator[int]:
        self.place = 0
        return self

    def __next__(self) -> int:
        if self.place == self.batches:
            raise StopIteration
        return super().__next__()


class Forever(Resetting):
    """Has a length, but never ends."""

    def __len__(self) -> int:
        return 3

    def __next__(self) -> int:
        self.place += 1
        return self.place - 1


class Once(ResettingInIter):
    def __iter__(self) -> Iterator[int]:
        return self


OWN_ITERATORS = [Resetting, SizedResetting, ResettingInIter]


class Sized(Unsized):
    """Says a length that may be wrong."""

    def __init__(self, batches: int, says: int) -> None:
        super().__init__(batches)
        self.says = says

    def __len__(self) -> int:
        return self.says


class ByIndex:
    """The old protocol of sequences: no ``__iter__``."""

    def __getitem__(self, index: int) -> int:
        if index >= 3:
            raise IndexError
        return index


class Shrinking(Unsized):
    """Gives fewer batches each time it is iterated."""

    def __iter__(self) -> Iterator[int]:
        self.batches -= 1
        return super().__iter__()


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(10.0))


class SizedStream(Stream):
    """Says more than it has."""

    def __len__(self) -> int:
        return 12


def make_engine(*, trains: bool = False) -> tuple[Engine, list[Triple]]:
    """An engine that does nothing, and the (epoch, iteration, batch) of all that it did."""
    seen: list[Triple] = []

    def note(engine: Engine, batch: Any) -> Tensor | None:
        seen.append(
            (engine.state.epoch, engine.state.iteration, int(torch.as_tensor(batch).sum()) if batch is not None else -1)
        )
        return None

    if trains:
        step = Update.from_function(note, partial(torch.optim.SGD, lr=0.1))
        return Engine(step, model=torch.nn.Linear(1, 1), allow=["W29"]), seen
    return Engine(Update.from_function(note)), seen


def made_of(data: Any, *, trains: bool = False, **bounds: Any) -> list[Triple]:
    engine, seen = make_engine(trains=trains)
    engine.run(data, **bounds)
    return seen


# ---- kinds of data ------------------------------------------------------------------------------------------------

TWICE_THREE = [(1, 1, 0), (1, 2, 1), (1, 3, 2), (2, 4, 0), (2, 5, 1), (2, 6, 2)]


@pytest.mark.parametrize(
    "data",
    [[0, 1, 2], (0, 1, 2), range(3), Unsized(3), Sized(3, 3), ByIndex(), torch.arange(3), {0: "a", 1: "b", 2: "c"}],
    ids=["list", "tuple", "range", "unsized", "sized", "by index", "tensor", "dict"],
)
def test_every_epoch_iterates_the_data_anew(data: Any) -> None:
    assert made_of(data, max_epochs=2) == TWICE_THREE


@pytest.mark.parametrize(
    ("data", "length"), [([0, 1, 2], 3), (Unsized(3), None), (Sized(3, 3), 3)], ids=["list", "unsized", "sized"]
)
def test_the_epochs_length_is_known_where_the_data_has_it(data: Any, length: int | None) -> None:
    engine, _ = make_engine()
    lengths: list[int | None] = []
    engine.connect(Events.EPOCH_STARTED, lambda engine: lengths.append(engine.state.epoch_length))
    engine.run(data, max_epochs=2)
    assert lengths == [length, length]


def test_unsized_epochs_are_completed_where_the_data_ends() -> None:
    engine, _ = make_engine()
    seen: list[tuple[int, int]] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: seen.append((engine.state.epoch, engine.state.iteration)))
    data = Unsized(3)
    engine.run(data, max_epochs=3)
    assert seen == [(1, 3), (2, 6), (3, 9)]
    assert data.begun == 3


def test_unsized_epochs_may_differ_in_length() -> None:
    assert [epoch for epoch, _, _ in made_of(Shrinking(4), max_epochs=3)] == [1, 1, 1, 2, 2, 3]


def test_infinite_data_needs_no_epochs() -> None:
    assert made_of(itertools.count(), max_iters=4) == [(1, 1, 0), (1, 2, 1), (1, 3, 2), (1, 4, 3)]


def test_infinite_data_goes_on_across_epochs_of_a_given_length() -> None:
    expected = [(1, 1, 0), (1, 2, 1), (2, 3, 2), (2, 4, 3), (3, 5, 4), (3, 6, 5)]
    assert made_of(itertools.count(), max_epochs=3, epoch_length=2) == expected


def test_a_run_without_data_has_batches_of_none() -> None:
    assert made_of(None, max_epochs=2, epoch_length=2) == [(1, 1, -1), (1, 2, -1), (2, 3, -1), (2, 4, -1)]
    assert made_of(None, max_iters=3) == [(1, 1, -1), (1, 2, -1), (1, 3, -1)]


def test_a_run_without_data_needs_a_length_or_a_number_of_iterations() -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match="epoch_length=, or pass max_iters="):
        engine.run(max_epochs=3)


def test_a_batch_of_none_is_counted_and_skipped_and_without_data_it_is_not() -> None:
    assert made_of([0, None, 2], max_epochs=1) == [(1, 1, 0), (1, 3, 2)]
    engine, _ = make_engine()
    assert engine.run([None, None]).iteration == 2


def test_a_data_loader_over_an_iterable_dataset_has_no_length() -> None:
    loader: DataLoader[Tensor] = DataLoader(Stream(), batch_size=4)
    engine = Engine(Update.from_function(lambda engine, batch: None))
    sizes: list[tuple[int, int]] = []
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: sizes.append((engine.state.epoch, len(engine.state.batch)))
    )
    engine.run(loader, max_epochs=2)
    assert engine.state.epoch_length is None
    assert sizes == [(1, 4), (1, 4), (1, 2), (2, 4), (2, 4), (2, 2)]


def test_a_shuffling_data_loader_gives_what_it_gives_in_a_plain_loop() -> None:
    def loader() -> DataLoader[tuple[Tensor, ...]]:
        torch.manual_seed(3)
        return DataLoader(TensorDataset(torch.arange(10)), batch_size=3, shuffle=True)

    plain_loader = loader()
    plain = [batch[0].tolist() for _ in range(3) for batch in plain_loader]
    seen: list[list[int]] = []
    engine = Engine(Update.from_function(lambda engine, batch: seen.append(batch[0].tolist())))
    engine.run(loader(), max_epochs=3)
    assert seen == plain


# ---- data that is empty or ends ------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", quick([3, 4], 4))
@pytest.mark.parametrize("sampled", quick([True, False], True))
def test_a_generator_of_its_own_gives_the_order_of_a_plain_loop_in_every_epoch(
    workers: int, batch: int, sampled: bool
) -> None:
    """RandomSampler draws from it once more when it is exhausted."""

    def loader() -> DataLoader[Any]:
        samples, generator = TensorDataset(torch.arange(12)), torch.Generator().manual_seed(3)
        sampler = RandomSampler(samples, generator=generator) if sampled else None
        return DataLoader(
            samples, batch, shuffle=None if sampled else True, sampler=sampler, num_workers=workers,
            generator=None if sampled else generator,
        )  # fmt: skip

    torch.manual_seed(0)
    plain = loader()
    expected = [[x.tolist() for (x,) in plain] for _ in range(4)]
    torch.manual_seed(0)
    seen: list[Any] = []
    data, weight = loader(), nn.Parameter(torch.ones(()))

    def train(engine: Engine, batch: Any) -> Tensor:
        seen.append(batch[0].tolist())
        return weight * 1.0

    engine = Engine(Update.from_function(train, torch.optim.SGD([weight], lr=0.1)))
    engine.run(data, max_epochs=2)
    engine.run(data, max_epochs=4)
    assert seen == [x for epoch in expected for x in epoch]
    assert len({str(epoch) for epoch in expected}) == 4


@pytest.mark.parametrize(
    ("data", "name"),
    [([], "list"), (range(0), "range"), (Sized(3, 0), "Sized"), ({}, "dict")],
    ids=["list", "range", "sized", "dict"],
)
def test_empty_data_that_has_a_length_is_refused_before_the_run(data: Any, name: str) -> None:
    engine, _ = make_engine()
    started: list[str] = []
    engine.connect(Events.STARTED, lambda engine: started.append("started"))
    with pytest.raises(DataError, match=f"{name}.*is empty: it has length 0"):
        engine.run(data, max_epochs=1)
    assert started == []
    assert not engine.running


@pytest.mark.filterwarnings("ignore:C24:signalfire.FindingWarning")
@pytest.mark.parametrize("bounds", [{"max_epochs": 2}, {"max_epochs": 2, "epoch_length": 3}], ids=str)
def test_an_empty_generator_is_an_error(bounds: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"the data \(generator\) is empty: it yielded no batch"):
        made_of((n for n in range(0)), **bounds)
    with pytest.raises(DataError, match=r"the data \(Unsized\) .*yielded no batch"):
        made_of(Unsized(0), **bounds)


@pytest.mark.filterwarnings("ignore:C24:signalfire.FindingWarning")
def test_a_generator_that_is_exhausted_in_the_second_epoch_is_an_error_that_says_so() -> None:
    engine, seen = make_engine()
    with pytest.raises(DataError, match="cannot be iterated again; pass an iterable, not an iterator"):
        engine.run((n for n in range(3)), max_epochs=2)
    assert seen == [(1, 1, 0), (1, 2, 1), (1, 3, 2)]


@pytest.mark.whole
@pytest.mark.parametrize("kind", OWN_ITERATORS)
@pytest.mark.parametrize("training", [False, True])
def test_data_that_is_its_own_iterator_and_begins_again_is_read_in_each_epoch(kind: Any, training: bool) -> None:
    assert made_of(kind(3), trains=training, max_epochs=2) == TWICE_THREE
    engine, seen = make_engine()
    data = kind(3)
    for _ in range(3):
        engine.run(data, max_epochs=1)
        engine.reset()
    assert seen == TWICE_THREE[:3] * 3


@pytest.mark.filterwarnings("ignore::signalfire.data.streamed.RereadingWarning")
@pytest.mark.parametrize("kind", OWN_ITERATORS)
def test_a_resumed_run_goes_on_in_data_that_is_its_own_iterator(kind: Any) -> None:
    states: list[Any] = []
    engine, _ = make_engine(trains=True)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()))
    engine.run(kind(3), max_epochs=2)
    for iteration in (2, 3, 4, 5):
        resumed, seen = make_engine(trains=True)
        resumed.load_state_dict(states[iteration - 1])
        resumed.run(kind(3), max_epochs=2)
        assert seen == TWICE_THREE[iteration:]


def test_an_iterator_that_goes_on_after_its_length_loses_no_batch() -> None:
    assert [number for _, _, number in made_of(Forever(3), max_epochs=2)] == [0, 1, 2, 3, 4, 5]


def test_an_iterator_that_does_not_begin_again_is_an_error_that_says_so() -> None:
    engine, seen = make_engine()
    with pytest.raises(DataError, match="cannot be iterated again; pass an iterable, not an iterator"):
        engine.run(Once(3), max_epochs=2)
    assert seen == TWICE_THREE[:3]


def test_a_generator_suffices_for_one_epoch() -> None:
    assert made_of((n for n in range(3)), max_epochs=1) == TWICE_THREE[:3]


def test_a_generator_that_is_exhausted_inside_an_epoch_of_a_given_length_is_an_error() -> None:
    engine, seen = make_engine()
    with pytest.raises(DataError, match="cannot be iterated again"):
        engine.run((n for n in range(3)), max_epochs=1, epoch_length=5)
    assert len(seen) == 3


@pytest.mark.parametrize("bounds", [{}, {"epoch_length": 5}], ids=str)
def test_sized_data_that_ends_early_is_an_error_that_names_both_lengths(bounds: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"the data \(Sized\) has length 5 but ended after 3 batches"):
        made_of(Sized(3, 5), trains=True, max_epochs=2, **bounds)


def test_sized_data_that_ends_early_in_the_second_epoch_is_an_error_too() -> None:
    class Tiring(Sized):
        def __iter__(self) -> Iterator[int]:
            return itertools.islice(super().__iter__(), 3 - self.begun)

    with pytest.raises(DataError, match="has length 3 but ended after 2 batches"):
        made_of(Tiring(3, 3), trains=True, max_epochs=3)


def test_an_iterable_dataset_that_ends_early_is_an_error_that_names_both_lengths() -> None:
    loader: DataLoader[Tensor] = DataLoader(SizedStream(), batch_size=2)
    engine, _ = make_engine(trains=True)
    with pytest.raises(DataError, match=r"DataLoader.* length 6 but ended after 5 batches"):
        engine.run(loader, max_epochs=1)


def test_sized_data_that_ends_early_inside_a_window_makes_no_step_of_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    trainer = Engine(
        Update.from_function(
            lambda engine, batch: engine.model(torch.ones(1, 1)).sum(), partial(torch.optim.SGD, lr=1)
        ),
        model=model,
    )
    trainer.attach(GradientAccumulation(4))
    before = model.weight.detach().clone()
    with pytest.raises(DataError, match="length 5 but ended after 3"):
        trainer.run(Sized(3, 5), max_epochs=1)
    assert torch.equal(model.weight, before)
    assert trainer.updates[0].window.filled == 3


# ---- epochs of another length --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [[0, 1, 2], Unsized(3)], ids=["sized", "unsized"])
def test_an_epoch_longer_than_the_data_starts_it_again_and_says_so(data: Any) -> None:
    engine, seen = make_engine()
    exhausted: list[tuple[int, int]] = []
    engine.connect(Events.DATA_EXHAUSTED, lambda engine: exhausted.append((engine.state.epoch, engine.state.iteration)))
    engine.run(data, max_epochs=2, epoch_length=5)
    assert [batch for _, _, batch in seen] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert [epoch for epoch, _, _ in seen] == [1] * 5 + [2] * 5
    assert exhausted == [(1, 3), (2, 6), (2, 9)]


@pytest.mark.parametrize("data", [[0, 1, 2, 3, 4], Unsized(5)], ids=["sized", "unsized"])
def test_an_epoch_shorter_than_the_data_goes_on_where_the_data_was(data: Any) -> None:
    engine, seen = make_engine()
    exhausted: list[int] = []
    engine.connect(Events.DATA_EXHAUSTED, lambda engine: exhausted.append(engine.state.iteration))
    engine.run(data, max_epochs=4, epoch_length=2)
    assert [(epoch, batch) for epoch, _, batch in seen] == [
        (1, 0),
        (1, 1),
        (2, 2),
        (2, 3),
        (3, 4),
        (3, 0),
        (4, 1),
        (4, 2),
    ]
    assert exhausted == [5]


def test_data_exhausted_may_be_filtered_by_how_often_it_came() -> None:
    engine, _ = make_engine()
    seen: list[int] = []
    engine.connect(Events.DATA_EXHAUSTED(every=2), lambda engine: seen.append(engine.state.iteration))
    engine.run([0, 1], max_epochs=1, epoch_length=10)
    assert seen == [4, 8]


def test_an_epoch_length_equal_to_the_datas_own_exhausts_nothing() -> None:
    engine, seen = make_engine()
    exhausted: list[int] = []
    engine.connect(Events.DATA_EXHAUSTED, lambda engine: exhausted.append(engine.state.iteration))
    engine.run([0, 1, 2], max_epochs=2, epoch_length=3)
    assert seen == TWICE_THREE
    assert exhausted == []


def test_the_data_goes_on_in_a_second_run_where_the_first_left_it() -> None:
    seen: list[tuple[int, int]] = []

    def note(engine: Engine, batch: int) -> Tensor | None:
        seen.append((engine.state.epoch, batch))
        return None

    model = torch.nn.Linear(1, 1)
    trainer = Engine(Update.from_function(note, partial(torch.optim.SGD, lr=0.1)), model=model, allow=["W29"])
    trainer.run(range(5), max_epochs=1, epoch_length=3)
    trainer.run(range(5), max_epochs=3, epoch_length=3)
    assert [batch for _, batch in seen] == [0, 1, 2, 3, 4, 0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
def test_max_iters_ends_inside_an_epoch_and_a_second_run_goes_on_there() -> None:
    seen: list[tuple[int, int]] = []

    def note(engine: Engine, batch: int) -> Tensor | None:
        seen.append((engine.state.epoch, batch))
        return None

    for data in (range(4), Unsized(4)):
        seen.clear()
        trainer = Engine(
            Update.from_function(note, partial(torch.optim.SGD, lr=0.1)), model=torch.nn.Linear(1, 1), allow=["W29"]
        )
        trainer.run(data, max_iters=2)
        trainer.run(data, max_iters=6)
        assert seen == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)], data


def test_max_iters_takes_no_batch_too_many() -> None:
    # A stream that is read once cannot be read ahead without losing what was read.
    stream = iter(range(100))
    made_of(stream, max_iters=3)
    assert next(stream) == 3


def test_windows_over_unsized_data_end_where_the_data_ends() -> None:
    torch.manual_seed(0)
    trainer = Engine(
        Update.from_function(
            lambda engine, batch: engine.model(torch.ones(1, 1)).sum(), partial(torch.optim.SGD, lr=0.1)
        ),
        model=torch.nn.Linear(1, 1),
    )
    trainer.attach(GradientAccumulation(4))
    steps: list[int] = []
    trainer.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: steps.append(engine.state.iteration))
    trainer.run(Unsized(10), max_epochs=2)
    assert steps == [4, 8, 10, 14, 18, 20]


# ---- what is no data -----------------------------------------------------------------------------------------------


class NotToBeIterated:
    __iter__ = None


@pytest.mark.parametrize(
    "data", [5, object(), lambda: iter([1]), list, NotToBeIterated()], ids=["int", "object", "function", "type", "None"]
)
def test_what_cannot_be_iterated_is_refused(data: Any) -> None:
    engine, _ = make_engine()
    with pytest.raises(TypeError, match="cannot be iterated; pass an iterable of batches"):
        engine.run(data, max_epochs=1)
    assert not engine.running


def test_an_error_of_the_data_leaves_the_run() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise OSError("the disk is gone")

    engine, seen = make_engine()
    ended: list[str] = []
    engine.connect(Events.ENDED, lambda engine: ended.append("ended"))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        engine.run(broken(), max_epochs=1)
    assert seen == [(1, 1, 0)]
    assert ended == ["ended"]
    assert "epoch 1" in caught.value.__notes__[0]
