"""What a DataLoader gives a run is what it gives a loop: batches, indices, workers, its own methods and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info, random_split

from signalfire import CombinedData, Engine, Events, RereadingWarning, Update
from signalfire.exact import ResumableData
from signalfire.handlers import LimitBatches
from tests.kit import build

SAMPLES = 8


class Whole(Dataset[Any]):
    """Returns finished batches of the kind that ``make`` makes of rows."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.rows = torch.arange(SAMPLES * 2.0).reshape(SAMPLES, 2)
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(self.rows[index])

    def __getitems__(self, indices: Any) -> Any:
        return self.make(self.rows[indices])


def as_mapping(rows: Tensor) -> dict[str, Tensor]:
    return {"x": rows, "y": rows.sum(-1, keepdim=True)}


def as_tensor(rows: Tensor) -> Tensor:
    return rows


def as_pair(rows: Tensor) -> tuple[Tensor, list[float]]:
    return rows, rows.sum(-1).tolist()


def unchanged(samples: Any) -> Any:
    return samples


def noting(note: Callable[[Engine, Any], None], evaluate: bool = False) -> Engine:
    """An engine that calls a function with each batch."""
    with torch.random.fork_rng():
        model = nn.Linear(1, 1)
    update = Update.from_function(note) if evaluate else Update.from_function(note, partial(torch.optim.SGD, lr=0.1))
    return Engine(update, model=model, seed=0, allow=["W29"])


def taken(data: Any, epochs: int = 1, evaluate: bool = False) -> list[Any]:
    """The batches that a run over data gets."""
    seen: list[Any] = []

    def note(engine: Engine, batch: Any) -> None:
        seen.append(batch)

    noting(note, evaluate).run(data, max_epochs=epochs, check=False)
    return seen


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def limited(data: Any) -> list[Any]:
    seen: list[Any] = []

    def note(engine: Engine, batch: Any) -> None:
        seen.append(batch)

    engine = noting(note)
    engine.attach(LimitBatches(2))
    engine.run(data, max_epochs=1, check=False)
    return seen


WAYS: dict[str, Callable[[Any], list[Any]]] = {
    "training": taken,
    "evaluation": partial(taken, evaluate=True),
    "limited": limited,
    "combined": lambda data: [batch["part"] for batch in taken(CombinedData({"part": data}))],
    "resumable": lambda data: list(ResumableData(data)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [as_mapping, as_tensor, as_pair])
def test_what_the_dataset_makes_of_a_batch_reaches_the_run_as_it_is(make: Callable[[Tensor], Any], way: str) -> None:
    loader = DataLoader(Whole(make), batch_size=4, collate_fn=unchanged)
    assert same(WAYS[way](loader), list(loader))


def test_a_part_of_such_a_dataset_gives_its_batches_too() -> None:
    part, _ = random_split(Whole(as_mapping), [6, 2], generator=torch.Generator().manual_seed(0))
    loader = DataLoader(part, batch_size=3, collate_fn=unchanged)
    assert same(taken(loader), list(loader))


@pytest.mark.moderate
def test_such_batches_come_from_workers_too() -> None:
    loader = DataLoader(Whole(as_mapping), batch_size=4, collate_fn=unchanged, num_workers=1)
    assert same(taken(loader), list(loader))


class Items:
    """A batch sampler of these very items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Places:
    """An index of a kind of its own."""

    def __init__(self, *places: int) -> None:
        self.places = places


class Asked(Whole):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__(as_tensor)
        self.asked: list[Any] = []

    def __getitems__(self, indices: Any) -> Any:
        self.asked.append(indices)
        return super().__getitems__(list(indices.places) if isinstance(indices, Places) else indices)


ITEMS = [torch.tensor([0, 2]), slice(2, 6), np.array([1, 3]), range(2), (0, 1), [4, 5], Places(6, 7)]


def test_the_dataset_gets_the_very_objects_of_the_batch_sampler() -> None:
    data = Asked()
    taken(DataLoader(data, batch_sampler=Items(*ITEMS), collate_fn=unchanged))
    assert len(data.asked) == len(ITEMS)
    assert all(one is given for one, given in zip(data.asked, ITEMS, strict=True))


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_augmentation_of_a_whole_batch_does_not_depend_on_how_its_indices_are_written(item: Any) -> None:
    class Noisy(Asked):
        def __getitems__(self, indices: Any) -> Any:
            return super().__getitems__(indices) + torch.rand(())

    def data() -> Any:
        return DataLoader(Noisy(), batch_sampler=Items(item, item), collate_fn=unchanged)

    torch.manual_seed(1)
    first = taken(data())
    torch.manual_seed(2)  # the global generators do not matter
    assert same(taken(data()), first)


def test_a_batch_sampler_that_draws_as_its_iteration_begins_draws_as_in_a_plain_loop() -> None:
    class Drawn(Items):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.randperm(SAMPLES).reshape(4, 2).tolist())

    x = torch.arange(SAMPLES * 1.0)
    loader = DataLoader(TensorDataset(x), batch_sampler=Drawn(*range(4)))
    torch.manual_seed(3)
    plain = [list(loader), list(loader)]
    torch.manual_seed(3)
    assert same(taken(loader, epochs=2), plain[0] + plain[1])


class Doubling(DataLoader[Any]):
    """Makes another batch of each, in an iterator of its own."""

    passes = 0

    def _get_iterator(self) -> Any:
        self.passes += 1
        return ((batch, batch) for batch in super()._get_iterator())


class Lazy(DataLoader[Any]):
    """Its iterator begins with the first batch."""

    def _get_iterator(self) -> Any:
        for batch in super()._get_iterator():
            yield batch, "lazy"


class Backwards(DataLoader[Any]):
    """Chooses the order of indices by itself."""

    @property
    def _index_sampler(self) -> Any:
        return [*super()._index_sampler][::-1]


class Chosen(DataLoader[Any]):
    """Finds its collate function when it is asked for."""

    @property
    def collate_fn(self) -> Any:
        return lambda samples: ("chosen", samples)

    @collate_fn.setter
    def collate_fn(self, function: Any) -> None:
        """It has one."""


OVERRIDING: list[type[DataLoader[Any]]] = [Doubling, Lazy, Backwards, Chosen]


@pytest.mark.parametrize("kind", OVERRIDING)
def test_a_loader_that_overrides_its_iteration_iterates_as_it_says(kind: type[DataLoader[Any]]) -> None:
    loader = kind(TensorDataset(torch.arange(8.0)), batch_size=4)
    assert same(taken(loader), list(loader))
    assert same(taken(loader, evaluate=True), list(loader))


def test_its_own_attributes_are_those_that_the_run_changes() -> None:
    loader = Doubling(TensorDataset(torch.ones(4, 1)), batch_size=2)
    taken(loader, epochs=3)
    assert loader.passes == 3


@pytest.mark.parametrize("kind", [Doubling, Lazy])
def test_a_run_over_it_resumes_exactly_by_reading_again(kind: type[DataLoader[Any]]) -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            return index + torch.rand(2)

    def engine() -> Engine:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(), nn.Linear(4, 1))
        step = Update.from_function(
            lambda engine, batch: engine.model(batch[0]).sum(), partial(torch.optim.SGD, lr=0.1)
        )
        return Engine(step, model=model, seed=0)

    whole = engine()
    whole.run(kind(Noisy(), batch_size=2, shuffle=True), max_epochs=2)
    for cut in (2, 5):
        begun = engine()
        begun.run(kind(Noisy(), batch_size=2, shuffle=True), max_iters=cut)
        state, resumed = begun.state_dict(), engine()
        resumed.load_state_dict(state)
        with pytest.warns(RereadingWarning, match="cannot skip batches"):
            resumed.run(kind(Noisy(), batch_size=2, shuffle=True), max_epochs=2)
        assert torch.equal(resumed.model[0].weight, whole.model[0].weight), cut


class Opened(Whole):
    """Needs a handle that each worker opens."""

    handle = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return self.handle, type(info.dataset).__name__, info.seed

    __getitems__ = None  # type: ignore[assignment]


def open_handle(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Subset)
    info.dataset.dataset.handle = 7 + worker  # type: ignore[attr-defined]


@pytest.mark.moderate
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_see_the_users_dataset_and_torchs_seeds(persistent: bool) -> None:
    loader = DataLoader(
        Subset(Opened(as_tensor), range(4)),
        batch_size=2,
        num_workers=2,
        worker_init_fn=open_handle,
        collate_fn=unchanged,
        persistent_workers=persistent,
    )
    torch.manual_seed(5)
    plain = list(DataLoader(loader.dataset, 2, num_workers=2, worker_init_fn=open_handle, collate_fn=unchanged))
    torch.manual_seed(5)
    got = taken(loader)
    assert got == plain
    assert [handle for batch in got for handle, *_ in batch] == [7, 7, 8, 8]
    assert loader._iterator is None  # the loader itself is as it was


def test_an_attribute_that_a_receiver_assigns_takes_effect_with_the_next_epoch() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, collate_fn=lambda rows: ("before", len(rows)))
    seen: list[Any] = []
    engine = noting(lambda engine, batch: seen.append(batch))

    @engine.on(Events.EPOCH_COMPLETED)
    def change(engine: Engine) -> None:
        loader.collate_fn = lambda rows: ("after", len(rows))

    engine.run(loader, max_epochs=2, check=False)
    assert seen == [("before", 2)] * 2 + [("after", 2)] * 2


def test_a_failing_sampler_leaves_the_loader_as_it_was() -> None:
    class Failing(Items):
        def __iter__(self) -> Iterator[Any]:
            raise OSError("no index")

    loader = DataLoader(Whole(as_tensor), batch_sampler=Failing(1))
    before = dict(vars(loader))
    with pytest.raises(OSError, match="no index"):
        taken(loader)
    assert vars(loader) == before


def test_a_batch_that_fails_to_collate_leaves_the_random_states_as_in_a_plain_loop() -> None:
    def fail(samples: Any) -> Any:
        raise ValueError("no batch of these")

    def states_after(read: Callable[[Any], object]) -> tuple[Any, ...]:
        torch.manual_seed(0)
        np.random.seed(0)
        with pytest.raises(ValueError, match="no batch of these"):
            read(DataLoader(Whole(as_tensor), batch_size=2, collate_fn=fail))
        return torch.get_rng_state().tolist(), repr(np.random.get_state())

    assert states_after(taken) == states_after(list)


def test_a_loader_over_tensors_trains_as_in_a_plain_loop() -> None:
    """Order, dropout and weights, with the global generator that all of them draw from."""
    x, y = torch.randn(12, 5), torch.randn(12, 1)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Dropout(), nn.Linear(4, 1))

    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for a, b in DataLoader(TensorDataset(x, y), 4, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(plain(a), b).backward()
            optimizer.step()
    trained = build(model())
    trained.run(DataLoader(TensorDataset(x, y), 4, shuffle=True), max_epochs=2)
    assert all(map(torch.equal, plain.parameters(), trained.model.parameters()))
