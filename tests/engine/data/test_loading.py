"""Where a run stands in its data: resumed after any iteration it gets the batches that the uninterrupted run got."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from signalfire import Engine, Events, Phase, RereadingWarning, Update, seed_everything
from signalfire.handlers import GradientAccumulation, LimitBatches, OverfitBatches, Validation
from signalfire.testing import fingerprint
from tests.kit import needs, quick, spread

SAMPLES, BATCH = 22, 4


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from all three global generators, as augmentations draw it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 3, generator=generator)
        self.fetched = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fetched += 1
        noise = torch.randn(3) + float(np.random.randn()) + random.gauss(0, 1)
        return self.x[index] + 0.3 * noise, self.x[index].sum().reshape(1)


class FetchedAtOnce(Augmented):
    """Has a way of its own to fetch a batch."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        noise = torch.randn(len(indices), 3)
        return [(self.x[i] + noise[n], self.x[i].sum().reshape(1)) for n, i in enumerate(indices)]


class WholeBatches(Augmented):
    """Gives whole batches by their numbers."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index * BATCH : (index + 1) * BATCH]
        return x + torch.randn(x.shape), x.sum(1, keepdim=True)


def plain() -> TensorDataset:
    x = Augmented().x
    return TensorDataset(x, x.sum(1, keepdim=True))


def noisy_collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return x + torch.randn(x.shape), y


def own(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Counting(IterableDataset[tuple[Tensor, Tensor]]):
    """An iterable dataset that keeps its own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begin, self.at = self.at, 0
        for place in range(begin, 6):
            self.at = place + 1
            x = torch.randn(BATCH, 3, generator=own(place))
            yield x, x.sum(1, keepdim=True)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class BeginsAnywhere:
    """Data that can be asked for its batches from one on."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches_from(0)

    def batches_from(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for place in range(start, 5):
            x = torch.randn(BATCH, 3, generator=own(place))
            yield x, x.sum(1, keepdim=True)


class Drawn(Sampler[int]):
    """An order drawn from Python's or NumPy's global generator."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter([int(index) for index in self.draw(SAMPLES)])


class Rotated(RandomSampler):
    """torch's sampler, and a little more than it."""

    def __iter__(self) -> Iterator[int]:
        first = int(np.random.randint(SAMPLES))
        return iter([(index + first) % SAMPLES for index in super().__iter__()])


class DrawnBatches(BatchSampler):
    """torch's batches in an order of their own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(list(super().__iter__()), len(self)))


class Unsized(Sampler[list[int]]):
    """Batches of which nobody knows how many they are."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(SAMPLES).view(-1, 2).tolist())


def in_pythons_order(n: int) -> list[int]:
    return random.sample(range(n), n)


WEIGHTS = torch.linspace(0.1, 1, SAMPLES).tolist()

# Each makes data anew, as a new process does.


def stateful_loader(*arguments: Any, **options: Any) -> Any:
    needs("interop", "torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*arguments, **options)


SKIPPED: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(plain(), BATCH),
    "shuffled": lambda: DataLoader(plain(), BATCH, shuffle=True),
    "shuffled, generator": lambda: DataLoader(plain(), BATCH, shuffle=True, generator=own()),
    "shuffled, last dropped": lambda: DataLoader(plain(), BATCH, shuffle=True, drop_last=True),
    "augmented": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "augmented, 2 workers": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "augmented, persistent workers": lambda: DataLoader(
        Augmented(), BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "augmented subset": lambda: DataLoader(Subset(Augmented(), range(3, 20)), BATCH, shuffle=True),
    "fetched at once": lambda: DataLoader(FetchedAtOnce(), BATCH, shuffle=True),
    "whole batches": lambda: DataLoader(WholeBatches(), batch_size=None, shuffle=True),
    "noise in collate": lambda: DataLoader(Augmented(), BATCH, shuffle=True, collate_fn=noisy_collate),
    "sampler, generator": lambda: DataLoader(plain(), BATCH, sampler=RandomSampler(plain(), generator=own())),
    "with replacement": lambda: DataLoader(
        plain(), BATCH, sampler=RandomSampler(plain(), replacement=True, num_samples=40, generator=own())
    ),
    "weighted": lambda: DataLoader(plain(), BATCH, sampler=WeightedRandomSampler(WEIGHTS, 30)),
    "weighted, generator": lambda: DataLoader(
        plain(), BATCH, sampler=WeightedRandomSampler(WEIGHTS, 30, generator=own())
    ),
    "some samples": lambda: DataLoader(plain(), BATCH, sampler=SubsetRandomSampler(range(17))),
    "batch sampler": lambda: DataLoader(plain(), batch_sampler=BatchSampler(RandomSampler(plain()), 3, drop_last=True)),
    "order from Python": lambda: DataLoader(plain(), BATCH, sampler=Drawn(in_pythons_order)),
    "order from NumPy": lambda: DataLoader(plain(), BATCH, sampler=Drawn(lambda n: np.random.permutation(n))),
    "order from NumPy, batch sampler": lambda: DataLoader(
        plain(), batch_sampler=BatchSampler(Drawn(lambda n: np.random.permutation(n)), 3, drop_last=False)
    ),
    "order from torch and NumPy": lambda: DataLoader(plain(), BATCH, sampler=Rotated(plain())),
    "unsized batch sampler": lambda: DataLoader(plain(), batch_sampler=Unsized()),
    "order of the batches from Python": lambda: DataLoader(
        plain(), batch_sampler=DrawnBatches(RandomSampler(plain()), BATCH, drop_last=False)
    ),
    "distributed": lambda: DataLoader(
        plain(), BATCH, sampler=DistributedSampler(plain(), num_replicas=2, rank=1, seed=3)
    ),
    "limited": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "list": lambda: [(x, x.sum(1, keepdim=True)) for x in Augmented().x.split(BATCH)],
    "begins anywhere": BeginsAnywhere,
    "keeps its position": Counting,
    "keeps its position, windows": Counting,
    "stateful loader": lambda: stateful_loader(plain(), BATCH, shuffle=True),
    "stateful loader, 2 workers": lambda: stateful_loader(Counting(), batch_size=None, num_workers=1),
}
READ_AGAIN: dict[str, Callable[[], Any]] = {
    "iterable dataset": lambda: DataLoader(_Squares(), batch_size=None),
    "iterable dataset, worker": lambda: DataLoader(_Squares(), batch_size=None, num_workers=1),
}


class _Squares(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(5):
            x = torch.randn(BATCH, 3)
            yield x, x.square().sum(1, keepdim=True)


def build(kind: str = "") -> Engine:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))  # dropout draws between the batches
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.Adam, lr=0.01))
    engine = Engine(update, model=model, seed=0)
    if kind == "limited":
        engine.attach(LimitBatches(3))
    if kind == "keeps its position, windows":
        engine.attach(GradientAccumulation(2))
    return engine


def cut_and_resume(kind: str, make: Callable[[], Any], **bounds: Any) -> None:
    saved: list[bytes] = []

    def save(engine: Engine) -> None:
        buffer = io.BytesIO()
        torch.save(engine.state_dict(), buffer)
        saved.append(buffer.getvalue())

    whole = build(kind)
    whole.connect(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED | Events.EPOCH_STARTED, save, phase=Phase.PERSIST)
    seed_everything(0)
    whole.run(make(), **bounds)
    assert len(saved) > 8
    for state in saved[:-1]:
        resumed = build(kind)
        resumed.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        seed_everything(99)
        resumed.run(make(), **bounds)
        position = torch.load(io.BytesIO(state), weights_only=True)["engine"]
        assert fingerprint(resumed) == fingerprint(whole), f"from {position['epoch'], position['iteration']}"


@pytest.mark.moderate
@pytest.mark.parametrize(
    "kind",
    quick(
        SKIPPED,
        "shuffled, generator",
        "batch sampler",
        "order from NumPy",
        "unsized batch sampler",
    ),
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_run_resumed_anywhere_skips_to_its_place(kind: str) -> None:
    cut_and_resume(kind, SKIPPED[kind], max_epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick(["shuffled", "augmented", "with replacement", "list"], "augmented"))
def test_so_does_one_whose_epochs_are_longer_than_its_data(kind: str) -> None:
    cut_and_resume(kind, SKIPPED[kind], epoch_length=8, max_epochs=2)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", spread(READ_AGAIN, 1))
@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
def test_other_data_is_read_again(kind: str) -> None:
    cut_and_resume(kind, READ_AGAIN[kind], max_epochs=2)


def test_reading_again_says_what_it_costs_and_what_would_not() -> None:
    engine = build()
    engine.run(READ_AGAIN["iterable dataset"](), max_iters=3)
    resumed = build()
    resumed.load_state_dict(engine.state_dict())
    with pytest.warns(RereadingWarning, match=r"3 batches are read again.*batches_from.*load_state_dict"):
        resumed.run(READ_AGAIN["iterable dataset"](), max_epochs=1)


def test_what_is_skipped_is_not_fetched() -> None:
    engine = build()
    engine.run(SKIPPED["augmented"](), max_iters=4)
    resumed = build()
    resumed.load_state_dict(engine.state_dict())
    data = SKIPPED["augmented"]()
    resumed.run(data, max_epochs=1)
    assert data.dataset.fetched == SAMPLES - 4 * BATCH


@pytest.mark.moderate
def test_augmentation_is_the_same_for_any_number_of_workers_and_differs_from_epoch_to_epoch() -> None:
    def batches(workers: int) -> list[Tensor]:
        engine = build()
        seen: list[Tensor] = []
        engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: seen.append(engine.state.batch[0].clone()))
        seed_everything(0)
        loader = DataLoader(Augmented(), BATCH, num_workers=workers, collate_fn=noisy_collate)
        engine.run(loader, max_epochs=2)
        return seen

    alone = batches(0)
    assert not torch.equal(alone[0], alone[6])
    for workers in (1, 2):
        for one, other in zip(alone, batches(workers), strict=True):
            assert torch.equal(one, other), workers


def test_augmentation_in_the_main_process_moves_no_other_draw() -> None:
    def drawn(data: Any) -> list[float]:
        engine = build()
        seen: list[float] = []
        seed_everything(0)

        @engine.on(Events.ITERATION_COMPLETED)
        def draw(engine: Engine) -> None:
            seen.extend((torch.rand(()).item(), float(np.random.rand()), random.random()))

        engine.run(data, max_epochs=1)
        return seen

    quiet = DataLoader(Subset(plain(), range(SAMPLES)), BATCH)
    assert drawn(DataLoader(Augmented(), BATCH)) == drawn(quiet)


def test_an_error_while_fetching_leaves_the_generators_as_they_were() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise LookupError(super().__getitem__(index))

    engine = build()
    seed_everything(3)
    expected = [torch.rand(2), np.random.rand(2), random.random()]
    seed_everything(3)
    with pytest.raises(LookupError):
        engine.run(DataLoader(Broken(), BATCH, generator=own()), max_epochs=1)
    found = [torch.rand(2), np.random.rand(2), random.random()]
    assert all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in zip(expected, found, strict=True))


@pytest.mark.moderate
def test_a_worker_finds_its_dataset() -> None:
    def begin(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        assert dataset.fetched == 0
        dataset.x = torch.zeros_like(dataset.x)  # what a worker_init_fn opens or sets is the dataset's own

    engine = build()
    targets: list[Tensor] = []
    engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: targets.append(engine.state.batch[1]))
    engine.run(DataLoader(Augmented(), BATCH, num_workers=1, worker_init_fn=begin), max_epochs=1)
    assert not any(target.any() for target in targets)


def test_samplers_get_the_epoch_also_after_a_resume() -> None:
    def orders(resume_at: int | None) -> list[Tensor]:
        engine, seen = build(), []
        engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: seen.append(engine.state.batch[0]))
        engine.run(SKIPPED["distributed"](), max_epochs=3, max_iters=resume_at)
        if resume_at is not None:
            resumed = build()
            resumed.connect(Events.GET_BATCH_COMPLETED, lambda engine: seen.append(engine.state.batch[0]))
            resumed.load_state_dict(engine.state_dict())
            resumed.run(SKIPPED["distributed"](), max_epochs=3)
        return seen

    plain_loop_batches: list[Tensor] = []
    loader = SKIPPED["distributed"]()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        plain_loop_batches += [x for x, _ in loader]
    for at in (None, 2, 3, 4, 7):
        assert all(torch.equal(a, b) for a, b in zip(orders(at), plain_loop_batches, strict=True)), at


def test_an_epoch_that_a_user_sets_holds() -> None:
    engine, data = build(), SKIPPED["distributed"]()
    engine.connect(Events.EPOCH_STARTED, lambda engine: data.sampler.set_epoch(engine.state.epoch + 100))
    reported: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: reported.append(data.sampler.epoch))
    engine.run(data, max_epochs=2, max_iters=4)
    state = engine.state_dict()
    other, data = build(), SKIPPED["distributed"]()
    other.connect(Events.ITERATION_COMPLETED, lambda engine: reported.append(data.sampler.epoch))
    other.load_state_dict(state)
    other.run(data, max_iters=5)
    assert reported == [101] * 3 + [102] * 2


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:C20:signalfire.FindingWarning")
def test_persistent_workers_persist_over_epochs_and_evaluations() -> None:
    loader = DataLoader(_Pids(), BATCH, num_workers=1, persistent_workers=True)
    evaluator = Engine(Update.prediction(lambda engine, batch: pids.update(batch[1].flatten().tolist())))
    pids: set[int] = set()
    engine = build()
    engine.attach(Validation(evaluator, loader))
    engine.run(SKIPPED["in order"](), max_epochs=3)
    assert len(pids) == 1


class _Pids(Augmented):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        info = get_worker_info()
        assert info is not None
        return self.x[index], torch.tensor([info.seed])  # drawn anew for each worker that is started


def test_data_of_another_kind_is_refused_by_a_loaded_position() -> None:
    engine = build()
    engine.run(SKIPPED["shuffled, generator"](), max_iters=2)
    resumed = build()
    resumed.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match=r"had 1 random generator\(s\), but this data \(DataLoader\) has 0"):
        resumed.run(SKIPPED["shuffled"](), max_epochs=1)


def test_overfitted_batches_are_skipped_too() -> None:
    engine = build()
    engine.attach(OverfitBatches(3))
    engine.run(SKIPPED["shuffled"](), max_iters=4)
    state = engine.state_dict()
    engine.run(SKIPPED["shuffled"](), max_epochs=3)
    resumed = build()
    resumed.attach(OverfitBatches(3))
    resumed.load_state_dict(state)
    resumed.run(SKIPPED["shuffled"](), max_epochs=3)
    assert torch.equal(engine.model[0].weight, resumed.model[0].weight)


def noisy(batch: list[Any]) -> Any:
    inputs, targets = default_collate(batch)
    return inputs + torch.randn_like(inputs), targets


@pytest.mark.moderate
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_collate_function_draws_is_drawn_again_by_a_resumed_run(workers: int) -> None:
    def trained(state: dict[str, Any] | None = None) -> tuple[Engine, dict[str, Any]]:
        torch.manual_seed(0)
        update = Update.supervised(nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        engine, states = Engine(update, model=nn.Linear(3, 1), seed=0), list[dict[str, Any]]()
        if state is not None:
            engine.load_state_dict(state)
        engine.connect(
            Events.ITERATION_COMPLETED(once=3), lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST
        )
        samples = TensorDataset(torch.ones(20, 3), torch.ones(20, 1))
        engine.run(DataLoader(samples, 4, collate_fn=noisy, shuffle=True, num_workers=workers), max_epochs=2)
        return engine, states[0] if states else {}

    whole, state = trained()
    resumed, _ = trained(state)
    assert torch.equal(whole.model.weight, resumed.model.weight)
