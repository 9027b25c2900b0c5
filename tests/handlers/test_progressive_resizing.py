"""ProgressiveResizing against plain PyTorch loops that interpolate the same batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Update, seed_everything
from signalfire.handlers import (
    Average,
    CutMix,
    Cutout,
    GradientAccumulation,
    Metrics,
    MicroBatching,
    ProgressiveResizing,
    Validation,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same

Batch = tuple[Tensor, Tensor]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


RAMP = [(8, 6), (8, 6), (9, 7), (10, 7), (11, 8), (12, 9), (12, 9), (13, 10), (14, 10), (15, 11)]
"""A side of 16 and one of 12, from a half upwards in steps of a twentieth, rounded down."""


def network(kind: Any = nn.Conv2d, pool: Any = nn.AdaptiveAvgPool2d) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(kind(1, 3, 3), nn.Tanh(), pool(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(3, 2))


def data(count: int = 5, shape: tuple[int, ...] = (1, 16, 12), size: int = 2) -> list[Batch]:
    return kit.batches([size] * count, shape, (), classes=2)


def build(*handlers: Any, model: nn.Module | None = None) -> Engine:
    return kit.build(model or network(), *handlers, loss=F.cross_entropy, optimizer=SGD)


def sizes_seen(engine: Engine) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    engine.connect(Events.FORWARD_STARTED, lambda engine: seen.append(tuple(engine.state.batch[0].shape[2:])))
    return seen


def test_the_sides_grow_in_the_middle_of_the_run_by_increments() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2))
    engine = build(ProgressiveResizing(initial=0.5, delay=0.5, final=0.2, increment=4), model=model)
    seen = sizes_seen(engine)
    engine.run(data(10, (1, 64, 64), size=1), max_epochs=10)
    sides = [height for height, width in seen]
    assert all(height == width for height, width in seen)
    assert sides[:50] == [32] * 50
    assert sides[80:] == [64] * 20
    assert sides[79] < 64
    assert sides == sorted(sides)
    assert set(sides) == set(range(32, 68, 4))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"initial": 1.0}, [(16, 12)] * 10),
        ({"delay": 0.5, "final": 0.5}, [(8, 4)] * 5 + [(16, 12)] * 5),
        ({"delay": 0.0, "final": 0.0, "increment": 1}, RAMP),
        ({"sizes": {1: 0.5, 2: 1.0}}, [(8, 4)] * 5 + [(16, 12)] * 5),
        ({"sizes": {1: 0.5, 4: 0.7, 7: 10, 8: 99}, "unit": "it", "increment": 1},
         [(8, 6)] * 3 + [(11, 8)] * 3 + [(13, 10)] + [(16, 12)] * 3),
        ({"initial": 0.01}, [(4, 4)] * 7 + [(8, 8)] + [(16, 12)] * 2),
    ],
)  # fmt: skip
def test_sizes_are_those_of_the_schedule(options: Any, expected: list[tuple[int, int]]) -> None:
    engine = build(ProgressiveResizing(**options))
    seen = sizes_seen(engine)
    engine.run(data(), max_epochs=2)
    assert seen == expected


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "area", "nearest"])
def test_weights_equal_those_of_a_plain_loop(mode: Any) -> None:
    engine = build(ProgressiveResizing({1: 0.5, 2: 0.75, 3: 1.0}, mode=mode), GradientAccumulation(2))
    seed_everything(1)
    engine.run(data(), max_epochs=3)

    model = network()
    optimizer = SGD(model.parameters())
    seed_everything(1)
    for size in ((8, 4), (12, 8), None):  # 12 * 0.75 = 9, a multiple of 4 is 8
        for chunk in kit.windows(data(), 2):
            for x, y in chunk:
                if size is not None and mode in ("bilinear", "bicubic"):
                    x = F.interpolate(x, size, mode=mode, antialias=True, align_corners=False)
                elif size is not None:
                    x = F.interpolate(x, size, mode="nearest-exact" if mode == "nearest" else mode)
                F.cross_entropy(model(x), y).backward()
            kit.average_gradients(model, len(chunk))
            optimizer.step()
            optimizer.zero_grad()
    assert_same(engine.model, model)


def test_signals_and_volumes_are_interpolated_too() -> None:
    for shape, kind, pool, sides in (
        ((1, 16), nn.Conv1d, nn.AdaptiveAvgPool1d, (8,)),
        ((1, 8, 16, 8), nn.Conv3d, nn.AdaptiveAvgPool3d, (4, 8, 4)),
    ):
        engine = build(ProgressiveResizing({1: 0.5}), model=network(kind, pool))
        seen = sizes_seen(engine)
        engine.run(data(1, shape), max_epochs=1)
        assert seen == [sides]


def test_whole_images_are_left_as_they_are() -> None:
    batches = data()
    engine = build(ProgressiveResizing({1: 1.0}))
    engine.connect(Events.FORWARD_STARTED, lambda engine: same.append(engine.state.batch))
    same: list[Any] = []
    engine.run(batches, max_epochs=1)
    assert all(one is other for one, other in zip(same, batches, strict=True))


def test_evaluations_see_whole_images() -> None:
    model = network()
    evaluator = Engine(Update.supervised(F.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average()))
    engine = build(ProgressiveResizing({1: 0.5}), Validation(evaluator, data(2)), model=model)
    seen, evaluated = sizes_seen(engine), sizes_seen(evaluator)
    engine.run(data(), max_epochs=1)
    assert set(seen) == {(8, 4)}
    assert set(evaluated) == {(16, 12)}


def test_masks_are_resized_by_nearest_neighbours() -> None:
    masks = torch.arange(2 * 16 * 12).reshape(2, 16, 12)
    found: list[Tensor] = []
    update = Update(lambda engine, batch: engine.model(batch["image"]), lambda engine, output, batch: output.sum(), SGD)
    engine = Engine(update, model=network(), seed=0)
    engine.attach(ProgressiveResizing({1: 0.6}, increment=1, input="image", target="mask"))
    engine.connect(Events.FORWARD_STARTED, lambda engine: found.append(engine.state.batch["mask"]))
    engine.run([{"image": torch.zeros(2, 1, 16, 12), "mask": masks}], max_epochs=1)
    expected = F.interpolate(masks[:, None].double(), (9, 7), mode="nearest-exact")[:, 0].long()
    assert torch.equal(found[0], expected)


def test_batches_are_resized_before_they_are_mixed_cut_out_and_split() -> None:
    ended = []
    for order in (1, -1):
        handlers = [ProgressiveResizing({1: 0.5}), CutMix(), Cutout(2), MicroBatching(1)]
        engine = build(*handlers[::order])
        seen = sizes_seen(engine)
        seed_everything(1)
        engine.run(data(), max_epochs=1)
        assert seen == [(8, 4)] * 10
        ended.append(engine.model)
    assert_same(*ended)
    engine = build(CutMix(), Cutout(2), MicroBatching(1))
    seed_everything(1)
    engine.run([(F.interpolate(x, (8, 4), mode="bilinear", antialias=True), y) for x, y in data()], max_epochs=1)
    assert_same(engine.model, ended[0])


def test_a_run_that_is_extended_does_not_shrink_its_images_again() -> None:
    engine = build(ProgressiveResizing())
    engine.run(data(), max_epochs=2)
    state = engine.state_dict()
    resumed = build(ProgressiveResizing())
    resumed.load_state_dict(state)
    for one in (engine, resumed):
        seen = sizes_seen(one)
        one.run(data(), max_epochs=4)
        assert seen == [(16, 12)] * 10


@pytest.mark.moderate
@pytest.mark.parametrize("options", [{}, {"sizes": {1: 0.5, 3: 0.75, 4: 1.0}, "unit": "it"}])
def test_it_keeps_the_promises_of_a_handler(options: Any) -> None:
    check_handler(build, lambda: ProgressiveResizing(**options), data(3), max_epochs=2)


# ---- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": {2: 0.5}}, r"sizes=\{2: 0.5\}.*starting with the key 1"),
        ({"sizes": {}}, "starting with the key 1"),
        ({"sizes": {1: 1.5}}, r"sizes\[1\]=1.5\): expected a number above 0 and at most 1"),
        ({"sizes": {1: 0}}, r"sizes\[1\]=0\): expected an int of 1 or more"),
        ({"delay": 0.7, "final": 0.4}, r"delay=0.7, final=0.4\): the sum of delay= and final= must be at most 1"),
        ({"input": 1, "target": 1}, "different indices"),
    ],
)
def test_arguments_that_contradict_themselves_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProgressiveResizing(**options)


def test_inputs_that_are_no_images_are_refused() -> None:
    for inputs, error, message in (
        (torch.zeros(2, 3), ValueError, r"inputs of shape \(2, 3\) are not images"),
        (torch.zeros(2, 1, 16, 12, dtype=torch.uint8), TypeError, "only floating-point inputs can be resized"),
    ):
        with pytest.raises(error, match=message):
            build(ProgressiveResizing({1: 0.5})).run([(inputs, torch.zeros(2))], max_epochs=1)
    with pytest.raises(ValueError, match="the targets have shape"):
        build(ProgressiveResizing({1: 0.5}, target=1)).run(data(1), max_epochs=1)
    with pytest.raises(ValueError, match="mode='bicubic' needs inputs of"):
        build(ProgressiveResizing({1: 0.5}, mode="bicubic")).run(data(1, (1, 16)), max_epochs=1)


def test_a_run_of_unknown_length_is_refused_without_sizes() -> None:
    def unsized() -> Any:
        yield from data()

    with pytest.raises(ValueError, match="the number of iterations in the run is not known"):
        build(ProgressiveResizing()).run(unsized(), max_epochs=1)
    build(ProgressiveResizing({1: 0.5})).run(unsized(), max_epochs=1)
