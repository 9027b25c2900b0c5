"""Cutout against boxes that a plain PyTorch loop cuts at the same places."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Phase, Update
from signalfire.authoring.randomness import derived_seed
from signalfire.handlers import Cutout, GradientAccumulation, MixedPrecision
from signalfire.testing import check_handler
from tests import kit
from tests.kit import average_gradients, windows

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Batches = list[tuple[Tensor, Tensor]]


def network(shape: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(2 * math.prod(shape), 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    )


def batches(shape: tuple[int, ...], count: int = 5) -> Batches:
    return kit.batches([6] * count, (2, *shape), (), classes=3)


def build(shape: tuple[int, ...] = (6, 7)) -> Engine:
    return kit.build(network(shape), loss=F.cross_entropy, optimizer=SGD, seed=7)


def expected_cut(x: Tensor, iteration: int, lengths: list[int], holes: int, fill: float) -> Tensor:
    """Sample by sample, hole by hole."""
    generator = torch.Generator().manual_seed(derived_seed(7, "cutout", iteration))
    centers = [torch.randint(size, (holes, len(x)), generator=generator) for size in x.shape[2:]]
    x = x.clone()
    for sample in range(len(x)):
        for hole in range(holes):
            box: list[Any] = [sample, slice(None)]
            for center, length in zip(centers, lengths, strict=True):
                begin = int(center[hole, sample]) - length // 2
                box.append(slice(max(begin, 0), max(begin + length, 0)))
            x[tuple(box)] = fill
    return x


OPTIONS: list[tuple[tuple[int, ...], Any, int, float]] = [
    ((9,), 4, 1, 0.0),
    ((6, 7), 3, 1, 0.0),
    ((6, 7), [2, 5], 2, 0.5),
    ((4, 5, 3), 2, 3, -1),
    ((4, 5, 3), (1, 9, 2), 1, 0.0),
]


@pytest.mark.parametrize(("shape", "length", "holes", "fill"), OPTIONS, ids=str)
@pytest.mark.parametrize(("window", "scaled"), [(1, False), (2, True)])
def test_weights_equal_a_plain_loop(
    shape: tuple[int, ...], length: Any, holes: int, fill: float, window: int, scaled: bool
) -> None:
    engine = build(shape)
    engine.attach(Cutout(length, holes=holes, fill=fill), GradientAccumulation(window))
    if scaled:
        engine.attach(MixedPrecision("fp16", init_scale=1024.0))
    engine.run(batches(shape), max_epochs=2)

    lengths = [length] * len(shape) if isinstance(length, int) else list(length)
    model = network(shape)
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    data, iteration = batches(shape), 0
    for _ in range(2):
        for chunk in windows(data, window):
            for x, y in chunk:
                iteration += 1
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    loss = F.cross_entropy(model(expected_cut(x, iteration, lengths, holes, fill)), y)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for one, other in zip(engine.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_each_sample_has_its_own_box_in_all_channels_and_the_data_stays_as_it_is() -> None:
    engine = build((20, 20))
    engine.attach(Cutout(5, fill=9.0))
    data = batches((20, 20))
    seen: list[Tensor] = []
    engine.connect(Events.ITERATION_STARTED, lambda engine: seen.append(engine.state.batch[0]))
    engine.run(data, max_epochs=1)
    covered = torch.cat(seen) == 9.0
    assert torch.equal(covered[:, 0], covered[:, 1])
    sizes = covered[:, 0].sum((1, 2))
    assert sizes.max() == 25
    assert sizes.min() >= 9  # in a corner, the box begins 2 before its center and ends 2 after it
    assert len({tuple(one.flatten().tolist()) for one in covered[:, 0]}) > 20
    assert all(torch.equal(x, unchanged) for (x, _), (unchanged, _) in zip(data, batches((20, 20)), strict=True))
    assert not any(torch.equal(x, cut) for (x, _), cut in zip(data, seen, strict=True))


def test_other_kinds_of_batches_whole_numbers_and_updates_of_one_function() -> None:
    def function(engine: Engine, batch: Any) -> Tensor:
        assert batch["image"].dtype == torch.uint8
        assert int((batch["image"] == 255).sum()) > 0
        assert batch["id"] == 3
        loss: Tensor = engine.model(batch["image"].float()).sum()
        return loss

    engine = Engine(Update.from_function(function, SGD), model=network((6, 7)), seed=0)
    engine.attach(Cutout(3, fill=255, input="image"))
    engine.run([{"image": torch.zeros(4, 2, 6, 7, dtype=torch.uint8), "id": 3}, None], max_epochs=1)
    assert engine.updates[0].steps == 1


def test_it_cuts_after_the_batch_was_prepared() -> None:
    engine = build()
    engine.attach(Cutout(3, fill=5.0))

    @engine.on(Events.GET_BATCH_COMPLETED, phase=Phase.PREPARE)
    def double(engine: Engine) -> None:
        engine.state.batch = (engine.state.batch[0] * 2, engine.state.batch[1])

    @engine.on(Events.ITERATION_STARTED)
    def look(engine: Engine) -> None:
        assert bool((engine.state.batch[0] == 5.0).any())

    engine.run(batches((6, 7)), max_epochs=1)
    assert engine.updates[0].steps == 5


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(build, lambda: Cutout(3), batches((6, 7), 3), max_epochs=2)


def test_two_refuse_each_other_and_an_engine_that_evaluates() -> None:
    with pytest.raises(ValueError, match="both 'one' and 'two' control cutting parts out of samples"):
        build().attach(Cutout(3, name="one"), Cutout(3, name="two"))
    with pytest.raises(ValueError, match="cutout"):
        Engine(Update.supervised(F.cross_entropy), model=network((6, 7))).attach(Cutout(3))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), r"shape \(4, 2\) have 0 spatial dimensions"),
        ((torch.zeros(4), torch.zeros(4)), r"shape \(4,\) have 0 spatial dimensions"),
        ((torch.zeros(4, 2, 3), torch.zeros(3)), r"have 1 spatial dimensions.*length=\(3, 3\)"),
        (["cat", 1], r"a list of length 2, has no tensor at 0.*Cutout\(input=\)"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused_by_name(batch: Any, message: str) -> None:
    engine = build()
    engine.attach(Cutout((3, 3)))
    with pytest.raises((TypeError, ValueError), match=f"'cutout': .*{message}"):
        engine.run([batch], max_epochs=1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"length": 0}, ValueError, "length=0"),
        ({"length": 1.5}, TypeError, "length=1.5"),
        ({"length": [3, 0]}, ValueError, r"length\[1\]=0"),
        ({"length": []}, ValueError, r"length=\[\]"),
        ({"length": 3, "holes": 0}, ValueError, "holes=0"),
        ({"length": 3, "fill": "mean"}, TypeError, "fill='mean'"),
        ({"length": 3, "input": None}, TypeError, "input=None"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"Cutout\({message}\)"):
        Cutout(**options)
