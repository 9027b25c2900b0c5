"""Handlers in company: equal to the plain PyTorch loop, in whatever order they are attached, and gone without a trace."""

from __future__ import annotations

import hashlib
import io
import itertools
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Handler, Update, seed_everything
from signalfire.handlers import (
    Accuracy,
    Average,
    Checkpoint,
    DeviceTransfer,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    MixedPrecision,
    ProgressBar,
    Seeding,
    TensorBoardLogger,
    Validation,
)
from signalfire.testing import fingerprint
from tests.kit import MEMORY, assert_same, mlp, quick

EPOCHS = 2


def make_model() -> nn.Module:
    return mlp(4, 8, 3, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), seed=0)


def make_data() -> tuple[DataLoader[Any], list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(56, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    train = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=8, shuffle=True)
    return train, [(x[40:50], y[40:50]), (x[50:], y[50:])]


def make_update() -> Update:
    return Update.supervised(nn.functional.cross_entropy, partial(torch.optim.Adam, lr=1e-2))


def handlers_of(model: nn.Module, folder: Path) -> dict[str, Callable[[], Handler]]:
    """The handlers that change training or decide about it, each to be made anew."""
    evaluator = Engine(make_update().evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average(), accuracy=Accuracy()))
    return {
        "accumulation": lambda: GradientAccumulation(2),
        "clipping": lambda: GradientClipping(max_norm=0.5),
        "scaling": lambda: MixedPrecision("fp16", init_scale=2.0**30, growth_interval=2),
        "schedule": lambda: LRScheduling(partial(OneCycleLR, max_lr=0.1, total_steps=50)),
        "validation": lambda: Validation(evaluator, make_data()[1]),
        "stopping": lambda: EarlyStopping("loss", patience=1),
        "checkpoint": lambda: Checkpoint(folder, monitor="loss", keep=2),
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of synced checkpoints would wait for a disk."""
    path = Path(tempfile.mkdtemp(dir=MEMORY))
    yield path
    shutil.rmtree(path)


def outcome(order: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Everything that a run leaves behind, files included, when handlers are attached in this order."""
    model = make_model()
    engine = Engine(make_update(), model=model, seed=0)
    made = handlers_of(model, folder)
    engine.attach(*(made[name]() for name in order))
    seed_everything(0)
    engine.run(make_data()[0], max_epochs=EPOCHS)
    left: dict[str, str] = fingerprint(engine)
    for generation in sorted(folder.iterdir()):
        # Its manifest also records which of all runs wrote it.
        left[f"file {generation.name}"] = hashlib.sha256((generation / "state.pt").read_bytes()).hexdigest()
        shutil.rmtree(generation)
    return left


NAMES = tuple(handlers_of(nn.Linear(1, 1), Path()))


def williams(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Orders in which every two names stand side by side equally often: a design of E. J. Williams (1949)."""
    count = len(names)
    first = [0]
    for step in range(1, count):
        first.append((first[-1] + (step if step % 2 else -step)) % count)
    rows = [[(place + shift) % count for place in first] for shift in range(count)]
    rows += [row[::-1] for row in rows] if count % 2 else []
    return [tuple(names[place] for place in row) for row in rows]


def test_the_orders_tried_have_every_two_handlers_side_by_side_twice() -> None:
    orders = williams(NAMES)
    assert len(orders) == 14
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert Counter(pair for order in orders for pair in itertools.pairwise(order)) == dict.fromkeys(
        itertools.permutations(NAMES, 2), 2
    )


@pytest.mark.parametrize("orders", quick(["a Williams design", "at random"], "a Williams design"))
@pytest.mark.filterwarnings("ignore:C06:signalfire.FindingWarning")
def test_every_order_of_attaching_gives_one_result_kept_files_included(orders: str, folder: Path) -> None:
    expected = outcome(NAMES, folder)
    assert sum(part.startswith("file ") for part in expected) >= 1
    draw = random.Random(0)
    at_random = (tuple(draw.sample(NAMES, len(NAMES))) for _ in range(300))
    for order in williams(NAMES) if orders == "a Williams design" else at_random:
        assert outcome(order, folder) == expected, order


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:C06:signalfire.FindingWarning")
def test_any_subset_in_any_order_gives_one_result_and_detaching_leaves_no_trace(data: Any, tmp_path: Path) -> None:
    monitored = {"stopping", "checkpoint"}
    chosen = data.draw(st.sets(st.sampled_from(NAMES)).map(lambda s: s | {"validation"} if s & monitored else s))
    one = tuple(data.draw(st.permutations(sorted(chosen))))
    other = tuple(data.draw(st.permutations(sorted(chosen))))
    expected = outcome(one, tmp_path)
    assert outcome(other, tmp_path) == expected

    # The rest is attached as well, and some of it detached, some disabled: as if it had never been there.
    model = make_model()
    engine = Engine(make_update(), model=model, seed=0)
    made = handlers_of(model, tmp_path)
    rest = [name for name in NAMES if name not in chosen]
    everything = {name: made[name]() for name in data.draw(st.permutations(NAMES))}
    engine.attach(*everything.values())
    disabled = set(data.draw(st.sets(st.sampled_from(rest)))) if rest else set()
    for name in data.draw(st.permutations(rest)):
        if name in disabled:
            everything[name].enabled = False
        else:
            engine.detach(everything[name])
    seed_everything(0)
    engine.run(make_data()[0], max_epochs=EPOCHS)
    found = fingerprint(engine)
    files = {part for part in expected if part.startswith("file ")}
    assert {file.name for file in tmp_path.iterdir()} == {part.removeprefix("file ") for part in files}
    kept = {part: digest for part, digest in expected.items() if part not in files}
    assert {part: found[part] for part in kept} == kept
    for generation in tmp_path.iterdir():
        shutil.rmtree(generation)


def test_supervised_training_without_handlers_is_the_plain_loop() -> None:
    model = make_model()
    engine = Engine(make_update(), model=model, seed=0)
    seed_everything(0)
    engine.run(make_data()[0], max_epochs=EPOCHS)

    plain_model = make_model()
    optimizer = torch.optim.Adam(plain_model.parameters(), lr=1e-2)
    loader = make_data()[0]
    seed_everything(0)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain_model(x), y).backward()
            optimizer.step()
    assert_same(model, plain_model)
    assert torch.equal(torch.get_rng_state(), torch_state_after(EPOCHS))


def torch_state_after(epochs: int) -> Tensor:
    """The torch generator's state after the plain loop: the engine draws nothing of its own."""
    model, loader = make_model(), make_data()[0]
    seed_everything(0)
    for _ in range(epochs):
        for x, _ in loader:
            model(x)
    return torch.get_rng_state()


def test_training_with_all_first_handlers_is_the_plain_loop(tmp_path: Path) -> None:
    model = make_model()
    engine = Engine(make_update(), model=model, seed=0)
    evaluator = Engine(make_update().evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average(), accuracy=Accuracy()))
    history = History()
    engine.attach(
        ProgressBar(file=io.StringIO()),
        TensorBoardLogger(tmp_path / "events", every="1it"),
        Checkpoint(tmp_path, monitor="accuracy", mode="max"),
        EarlyStopping("loss", patience=2),
        LRScheduling(partial(OneCycleLR, max_lr=0.1)),
        MixedPrecision("fp16", init_scale=2.0**10),
        GradientClipping(max_norm=0.5),
        GradientAccumulation(2),
        Validation(evaluator, make_data()[1]),
        Metrics(train_loss=Average()),
        DeviceTransfer("cpu"),
        history,
        Seeding(),
    )
    engine.run(make_data()[0], max_epochs=EPOCHS)

    plain_model = make_model()
    optimizer = torch.optim.Adam(plain_model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loader, validation = make_data()
    seed_everything(0)
    steps_an_epoch = 3  # five batches by two
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=steps_an_epoch * EPOCHS)
    losses = []
    for _ in range(EPOCHS):
        plain_model.train()
        batches = list(loader)
        for first in range(0, len(batches), 2):
            window = batches[first : first + 2]
            for x, y in window:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(plain_model(x), y)
                scaler.scale(loss).backward()
            # The gradients are summed over the window and divided once; (loss / 2).backward() would round elsewhere.
            for parameter in plain_model.parameters():
                assert parameter.grad is not None
                parameter.grad /= len(window)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        plain_model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):  # the evaluator inherits it
            sums = [nn.functional.cross_entropy(plain_model(x), y).item() * len(x) for x, y in validation]
        losses.append(sum(sums) / 16)
    assert_same(model, plain_model)
    assert history["loss"] == losses
