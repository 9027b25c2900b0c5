"""A state that is put back in place, inside the process: the run continues bit for bit as it did from where it was taken."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import DataError, Engine, Events, Phase, Update
from signalfire.handlers import (
    EMA,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    MixedPrecision,
    SharpnessAwareMinimization,
    TruncatedBPTT,
)

EPOCHS, BATCHES = 3, 5


def make_samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(BATCHES * 4, 3, generator=generator), torch.arange(BATCHES * 4) % 2)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


def make_engine(*handlers: Any, optimizer: Any = None) -> Engine:
    update = Update.supervised(cross_entropy, optimizer or partial(Adam, lr=1e-2))
    engine = Engine(update, model=make_model(), seed=0)
    engine.attach(*handlers)
    return engine


class Sequences:
    """Batches of sequences, whose hidden state is carried from one time chunk to the next."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(4)
        for _ in range(BATCHES):
            yield torch.randn(2, 6, 3, generator=generator), torch.randn(2, 6, 4, generator=generator)


def make_recurrent_engine() -> Engine:
    def forward(engine: Engine, batch: Any) -> Tensor:
        output, engine.state.update.hidden = engine.model(batch[0], engine.state.update.hidden)
        return output  # type: ignore[no-any-return]

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])

    torch.manual_seed(1)
    update = Update(forward, loss, partial(Adam, lr=1e-2))
    engine = Engine(update, model=nn.GRU(3, 4, batch_first=True), seed=0)
    engine.attach(TruncatedBPTT(2), GradientAccumulation(2))
    return engine


def loader(workers: int = 0, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(make_samples(), batch_size=4, shuffle=shuffle, num_workers=workers)


def drawing_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Unsized data that draws from all global generators as it is read."""
    for _ in range(BATCHES):
        noise = torch.randn(4, 3) + random.random() + float(np.random.rand())
        yield noise, torch.arange(4) % 2


class Drawing:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return drawing_batches()


CASES: dict[str, tuple[Callable[[], Engine], Callable[[], Any]]] = {
    "plain": (make_engine, loader),
    "accumulation": (lambda: make_engine(GradientAccumulation(3)), loader),
    "averages, clipping, schedule": (
        lambda: make_engine(
            EMA(0.9), GradientClipping(max_norm=0.1), LRScheduling(partial(OneCycleLR, max_lr=0.1)), GradientAccumulation(2)
        ),
        loader,
    ),
    "time chunks": (make_recurrent_engine, Sequences),
    "LBFGS": (lambda: make_engine(GradientAccumulation(2), optimizer=partial(LBFGS, max_iter=3)), loader),
    "SAM": (lambda: make_engine(SharpnessAwareMinimization(), GradientAccumulation(2)), loader),
    "scaling for float16": (
        lambda: make_engine(MixedPrecision("fp16"), GradientAccumulation(2), optimizer=partial(SGD, lr=0.1)), loader,
    ),
    "a loader with workers": (lambda: make_engine(GradientAccumulation(2)), partial(loader, 2)),
    "data that draws": (make_engine, Drawing),
    "separate streams": (lambda: separate(make_engine()), loader),
    "history": (lambda: make_engine(History()), loader),
}  # fmt: skip


def separate(engine: Engine) -> Engine:
    engine.streams = "separate"
    return engine


def digest(value: Any) -> Any:
    """A state in values that compare by equality, bit for bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: digest(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [digest(item) for item in value]
    return value


def recorded(engine: Engine) -> list[tuple[int, int, list[Any]]]:
    """What every completed iteration comes to: epoch, iteration, weights."""
    seen: list[tuple[int, int, list[Any]]] = []

    def record(engine: Engine) -> None:
        seen.append((engine.state.epoch, engine.state.iteration, digest(list(engine.modules["model"].parameters()))))

    engine.connect(Events.ITERATION_COMPLETED, record, phase=Phase.RECORD)
    return seen


@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("taken_at", [2, 5, 7])
def test_a_run_that_goes_back_repeats_itself_bit_for_bit(case: str, taken_at: int) -> None:
    make, data = CASES[case]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = make()
    straight = recorded(expected)
    expected.run(data(), max_epochs=EPOCHS)

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    engine = make()
    seen = recorded(engine)
    taken: list[dict[str, Any]] = []
    loads: list[int] = []
    engine.connect(
        Events.ITERATION_COMPLETED(once=taken_at),
        lambda engine: taken.append(engine.snapshots.take()),
        phase=Phase.PERSIST,
    )

    @engine.on(Events.ITERATION_COMPLETED(once=11), phase=Phase.CONTROL)
    def go_back(engine: Engine) -> None:
        if not loads:
            random.random()  # whatever happens on the detour leaves no trace
            engine.snapshots.restore(taken[0])

    engine.connect(Events.CHECKPOINT_LOADED, lambda engine: loads.append(engine.state.iteration))
    engine.run(data(), max_epochs=EPOCHS)
    assert loads == [taken_at]
    assert seen[:11] == straight[:11]
    assert seen[11:] == straight[taken_at:]
    assert digest(engine.state_dict()) == digest(expected.state_dict())


def test_a_snapshot_may_be_put_back_more_than_once_and_from_a_later_epoch() -> None:
    engine = make_engine(GradientAccumulation(2))
    seen = recorded(engine)
    taken: list[dict[str, Any]] = []
    engine.connect(
        Events.EPOCH_COMPLETED(once=1), lambda engine: taken.append(engine.snapshots.take()), phase=Phase.PERSIST
    )
    times: list[int] = []

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.CONTROL)
    def go_back(engine: Engine) -> None:
        if engine.state.epoch == 2 and len(times) < 2:
            times.append(engine.state.iteration)
            engine.snapshots.restore(taken[0])

    engine.run(loader(), max_epochs=EPOCHS)
    second_epochs = [seen[start : start + BATCHES] for start in (5, 10, 15)]
    assert second_epochs[0] == second_epochs[1] == second_epochs[2]
    assert engine.state.epoch == EPOCHS
    assert len(seen) == (EPOCHS + 2) * BATCHES


def test_data_that_cannot_go_back_is_refused() -> None:
    engine = make_engine()
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.snapshots.restore(engine.state_dict()))
    with pytest.raises(DataError, match="is an iterator, which cannot go back"):
        engine.run(iter(list(loader())), max_epochs=1)


def test_what_is_no_state_is_refused() -> None:
    engine = make_engine()
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.snapshots.restore({"weights": 1}))
    with pytest.raises(ValueError, match=r"restore\(\): this is not the state of a Signalfire engine"):
        engine.run(loader(), max_epochs=1)


def test_outside_a_run_it_is_put_in_place_at_the_next_one() -> None:
    engine = make_engine()
    engine.run(loader(), max_epochs=1)
    state = engine.state_dict()
    engine.run(loader(), max_epochs=2)
    after = digest(engine.state_dict())
    engine.snapshots.restore(state)
    engine.run(loader(), max_epochs=2)
    assert digest(engine.state_dict()) == after
