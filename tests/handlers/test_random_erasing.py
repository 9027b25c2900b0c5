"""Random erasing against rectangles that a plain loop cuts sample by sample, by the algorithm of the paper."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Phase
from signalfire.authoring.randomness import derived_seed
from signalfire.handlers import Cutout, GradientAccumulation, MixedPrecision, MixUp, RandomErasing
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same, average_gradients, same, windows

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
pictures = partial(kit.batches, [6] * 5, (2, 8, 9), (), classes=3)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 8 * 9, 8), nn.ReLU(), nn.Linear(8, 3))


def build(*handlers: Any) -> Engine:
    return kit.build(network(), *handlers, loss=F.cross_entropy, optimizer=SGD, seed=7)


def expected(
    x: Tensor,
    iteration: int,
    p: float = 0.5,
    scale: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
    value: Any = 0.0,
    count: int = 1,
) -> Tensor:
    """Sample by sample, as `torchvision.transforms.RandomErasing` does it."""
    generator = torch.Generator().manual_seed(derived_seed(7, "random_erasing", iteration))
    samples, channels, height, width = x.shape
    drawn = torch.rand(samples, generator=generator)
    numbers = torch.rand(4, count, 10, samples, generator=generator)
    if value == "random":
        fill = torch.empty_like(x).normal_(generator=generator)
    else:
        fill = torch.tensor(value).view(-1, 1, 1).expand(samples, channels, height, width)
    x = x.clone()
    for sample in range(samples):
        if drawn[sample] >= p:
            continue
        for one in range(count):
            for attempt in range(10):
                area, shape, row, column = numbers[:, one, attempt, sample]
                erased = height * width * (scale[0] + (scale[1] - scale[0]) * area)
                aspect = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * shape)
                h, w = round(math.sqrt(erased * aspect)), round(math.sqrt(erased / aspect))
                if not (h < height and w < width):
                    continue
                i, j = int(row * (height - h + 1)), int(column * (width - w + 1))
                x[sample, :, i : i + h, j : j + w] = fill[sample, :, i : i + h, j : j + w]
                break
    return x


OPTIONS: list[dict[str, Any]] = [
    {},
    {"p": 1.0, "value": "random"},
    {"p": 0.25, "value": (0.5, -1.0), "count": 3},
    {"p": 1.0, "scale": (0.5, 1.0), "ratio": (0.1, 5.0), "value": 2},
]


@pytest.mark.moderate
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("window", "scaled"), [(1, False), (2, True)])
def test_weights_equal_a_plain_loop(options: dict[str, Any], window: int, scaled: bool) -> None:
    engine = build(RandomErasing(**options), GradientAccumulation(window))
    if scaled:
        engine.attach(MixedPrecision("fp16", init_scale=1024.0))
    engine.run(pictures(), max_epochs=2)
    model = network()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    iteration = 0
    for _ in range(2):
        for chunk in windows(pictures(), window):
            for x, y in chunk:
                iteration += 1
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    loss = F.cross_entropy(model(expected(x, iteration, **options)), y)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(engine.model, model)
    plain = build(GradientAccumulation(window))
    plain.run(pictures(), max_epochs=2)
    assert not same(engine.model, plain.model)


def seen(engine: Engine, data: list[Any]) -> list[Tensor]:
    """The inputs that the model gets."""
    batches: list[Tensor] = []
    engine.connect(Events.ITERATION_STARTED, lambda engine: batches.append(engine.state.batch[0]))
    engine.run(data, max_epochs=1, check=False)
    return batches


def test_shares_and_sizes_are_those_that_were_asked_for() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(40 * 40, 2))
    engine = kit.build(
        model, RandomErasing(0.3, scale=(0.1, 0.2), ratio=(0.5, 2.0), value=9.0), loss=F.cross_entropy, seed=1
    )
    data = [(torch.zeros(1000, 1, 40, 40), torch.zeros(1000).long())]
    erased = seen(engine, data)[0][:, 0] == 9.0
    sizes = erased.flatten(1).sum(1)
    share = (sizes > 0).double().mean().item()
    assert share == pytest.approx(0.3, abs=5 * math.sqrt(0.3 * 0.7 / 1000))
    areas = sizes[sizes > 0] / 1600
    assert 0.09 < areas.min() < 0.11
    assert 0.19 < areas.max() < 0.215
    tall, wide = erased.any(2).sum(1)[sizes > 0], erased.any(1).sum(1)[sizes > 0]
    assert torch.equal(tall * wide, sizes[sizes > 0])  # rectangles
    assert 0.45 < (tall / wide).min() < 0.6
    assert 1.7 < (tall / wide).max() < 2.2
    assert not bool((data[0][0] != 0).any())  # the data stays as it is


def test_samples_are_mixed_first_and_erased_once_the_batch_was_prepared() -> None:
    for order in (1, -1):
        engine = build(*[RandomErasing(1.0, value=5.0), MixUp(0.4)][::order])
        engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: None, phase=Phase.PREPARE)
        assert all(bool((one == 5.0).flatten(1).any(1).all()) for one in seen(engine, pictures()))


def test_of_sequences_a_segment_is_erased() -> None:
    engine = kit.build(
        nn.Sequential(nn.Flatten(), nn.Linear(200, 2)),
        RandomErasing(1.0, scale=(0.2, 0.4), value=(3.0, 4.0)),
        loss=F.cross_entropy,
    )
    found = seen(engine, [(torch.zeros(50, 2, 100), torch.zeros(50).long())])[0]
    for sample in found:
        places = (sample[0] == 3.0).nonzero().flatten()
        assert 20 <= len(places) <= 40
        assert int(places[-1] - places[0]) == len(places) - 1
        assert torch.equal(sample[1] == 4.0, sample[0] == 3.0)
    assert len({tuple(one[0].tolist()) for one in found}) > 40


def test_whole_numbers_take_a_number_and_no_random_ones() -> None:
    data = [{"image": torch.ones(4, 2, 8, 9, dtype=torch.uint8), "y": 1}]
    engine = build()
    engine.attach(handler := RandomErasing(1.0, value=200, input="image"))
    found: list[Any] = []

    @engine.on(Events.ITERATION_STARTED)
    def look(engine: Engine) -> None:
        found.append(engine.state.batch)
        engine.state.batch = pictures()[0]

    engine.run([*data, None], max_epochs=1, check=False)
    assert found[0]["image"].dtype == torch.uint8
    assert set(found[0]["image"].unique().tolist()) == {1, 200}
    engine.detach(handler)
    engine.attach(RandomErasing(value="random", input="image"))
    with pytest.raises(TypeError, match=r"'random_erasing': inputs of dtype torch.uint8 cannot hold random values"):
        engine.run(data, max_epochs=2, check=False)


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({}, (torch.zeros(4, 2), torch.zeros(4)), r"the inputs have shape \(4, 2\); expected \(N, C, H, W\) or"),
        ({"value": (1, 2, 3)}, pictures()[0], r"has 3 numbers, but the inputs have 2 channels"),
        (
            {"input": 3},
            pictures()[0],
            r"no tensor at 3; set RandomErasing\(input=\) to the index or key of a tensor",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused(options: dict[str, Any], batch: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"'random_erasing': .*{message}"):
        build(RandomErasing(**options)).run([batch], max_epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0}, "p=0"),
        ({"p": 1.5}, "p=1.5"),
        ({"scale": (0.5, 0.2)}, r"scale=\(0.5, 0.2\)\): the minimum is larger than the maximum"),
        ({"scale": (0.5, 2)}, r"scale\[1\]=2"),
        ({"scale": 0.5}, "scale=0.5"),
        ({"ratio": (0, 1)}, r"ratio\[0\]=0"),
        ({"value": "pixel"}, "value='pixel'"),
        ({"value": []}, r"value=\[\]"),
        ({"value": ["a"]}, r"value\[0\]='a'"),
        ({"count": 0}, "count=0"),
        ({"input": None}, "input=None"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"RandomErasing\({message}"):
        RandomErasing(**options)


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler_and_two_that_cut_are_refused() -> None:
    check_handler(build, lambda: RandomErasing(0.8, value="random"), pictures()[:3], max_epochs=2)
    with pytest.raises(ValueError, match="both 'cutout' and 'random_erasing' control cutting parts out of samples"):
        build(Cutout(3), RandomErasing())
