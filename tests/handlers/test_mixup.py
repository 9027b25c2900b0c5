"""MixUp against plain PyTorch loops that draw the same numbers."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Handler, Update
from signalfire.authoring.randomness import derived_seed
from signalfire.core.overrides import Override
from signalfire.handlers import (
    Accuracy,
    Cutout,
    GradientAccumulation,
    GradientClipping,
    LabelSmoothing,
    Metrics,
    MicroBatching,
    MixedPrecision,
    MixUp,
    SharpnessAwareMinimization,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import average_gradients, same, windows

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Pair = namedtuple("Pair", ["image", "label"])


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 3)
    )


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return kit.batches([8] * (count - 1) + [5], (2, 5, 5), (), classes=3)


def build(model: nn.Module | None = None, optimizer: Any = SGD) -> Engine:
    return kit.build(model or network(), loss=F.cross_entropy, optimizer=optimizer, seed=7)


def trained(*handlers: Any, optimizer: Any = SGD) -> Engine:
    engine = build(optimizer=optimizer)
    engine.attach(*handlers)
    torch.manual_seed(5)
    engine.run(batches(), max_epochs=2)
    return engine


def draws(iteration: int, alpha: float, size: int) -> tuple[float, Tensor]:
    generator = torch.Generator().manual_seed(derived_seed(7, "mixup", iteration))
    one, other = torch._standard_gamma(torch.tensor([alpha, alpha], dtype=torch.float64), generator=generator)
    return (one / (one + other)).item(), torch.randperm(size, generator=generator)


def expected_cut(images: Tensor, iteration: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(derived_seed(7, "cutout", iteration))
    rows = torch.randint(images.shape[2], (1, len(images)), generator=generator)[0]
    columns = torch.randint(images.shape[3], (1, len(images)), generator=generator)[0]
    images = images.clone()
    for image, row, column in zip(images, rows.tolist(), columns.tolist(), strict=True):
        top, left = max(row - length // 2, 0), max(column - length // 2, 0)
        image[:, top : row - length // 2 + length, left : column - length // 2 + length] = 0
    return images


def plain_loop(
    alpha: float | None,
    *,
    window: int = 1,
    smoothing: float = 0.0,
    cutout: int = 0,
    max_norm: float = math.inf,
    scaled: bool = False,
    pieces: int = 1,
) -> tuple[nn.Sequential, list[float]]:
    model = network()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    data, iteration, losses = batches(), 0, []
    torch.manual_seed(5)
    for _ in range(2):
        for chunk in windows(data, window):
            for x, y in chunk:
                iteration += 1
                lam, perm = draws(iteration, alpha, len(x)) if alpha is not None else (1.0, torch.arange(len(x)))
                mixed = lam * x + (1 - lam) * x[perm]
                if cutout:
                    mixed = expected_cut(mixed, iteration, cutout)
                for part in torch.arange(len(x)).tensor_split(pieces):
                    with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                        output = model(mixed[part])
                        loss = F.cross_entropy(output, y[part])
                        if alpha is not None:
                            loss = lam * loss + (1 - lam) * F.cross_entropy(output, y[perm][part])
                    if smoothing:
                        uniform = -output.float().log_softmax(1).mean()
                        loss = (1 - smoothing) * loss + smoothing * uniform
                    losses.append(loss.item())
                    scaler.scale(loss * (len(part) / len(x)) if pieces > 1 else loss).backward()
            average_gradients(model, len(chunk))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, losses


@pytest.mark.moderate
@pytest.mark.parametrize("alpha", [0.2, 1.0, 4])
@pytest.mark.parametrize("window", [1, 4])
def test_weights_and_reported_losses_equal_a_plain_loop(alpha: float, window: int) -> None:
    losses: list[float] = []

    class Note(Handler):
        def attached(self, engine: Engine) -> None:
            engine.connect(Events.UPDATE_COMPLETED, lambda engine: losses.append(engine.state.update.loss.item()))

    engine = trained(MixUp(alpha), GradientAccumulation(window), Note())
    reference, plain = plain_loop(alpha, window=window)
    assert same(engine.model, reference)
    assert losses == plain
    assert not same(engine.model, plain_loop(None, window=window)[0])


@pytest.mark.slow
def test_with_smoothing_cutout_accumulation_clipping_and_fp16_in_many_orders() -> None:
    reference, _ = plain_loop(0.4, window=4, smoothing=0.1, cutout=3, max_norm=0.5, scaled=True)
    for order in itertools.islice(itertools.permutations(range(6)), 0, None, 31):
        handlers = [
            MixUp(0.4),
            Cutout(3),
            LabelSmoothing(0.1),
            GradientAccumulation(4),
            GradientClipping(max_norm=0.5),
            MixedPrecision("fp16", init_scale=1024.0),
        ]
        assert same(trained(*(handlers[place] for place in order)).model, reference), order


def test_the_data_and_the_targets_stay_as_they_are() -> None:
    data = batches()
    engine = build()
    engine.attach(MixUp(1.0), Metrics(accuracy=Accuracy()))
    seen: list[Tensor] = []
    engine.connect(Events.ITERATION_STARTED, lambda engine: seen.append(engine.state.batch[1]))
    engine.run(data, max_epochs=1)
    assert all(torch.equal(one, y) for one, (_, y) in zip(seen, data, strict=True))
    assert all(torch.equal(x, unchanged) for (x, _), (unchanged, _) in zip(data, batches(), strict=True))
    assert 0 <= engine.state.metrics["accuracy"] <= 1


@pytest.mark.filterwarnings("ignore:W18")
@pytest.mark.slow
def test_lam_is_distributed_as_beta() -> None:
    engine = Engine(Update.supervised(F.mse_loss, partial(torch.optim.SGD, lr=0.0)), model=nn.Linear(1, 1), seed=0)
    handler = MixUp(0.5)
    engine.attach(handler)
    lams: list[float] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: lams.append(handler.lam or 0.0))
    engine.run([(torch.zeros(2, 1), torch.zeros(2, 1))], max_epochs=1000)
    numbers = torch.tensor(lams)
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)) = 1/8; five standard errors of 1,000 draws.
    assert numbers.mean().item() == pytest.approx(0.5, abs=5 * math.sqrt(0.125 / 1000))
    assert numbers.var().item() == pytest.approx(0.125, rel=0.1)
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() <= 1


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["list", "dict", "namedtuple", "triple", "negative"])
def test_batches_of_other_kinds(kind: str) -> None:
    def as_kind(x: Tensor, y: Tensor) -> Any:
        return {
            "list": [x, y],
            "dict": {"image": x, "label": y, "id": "kept"},
            "namedtuple": Pair(x, y),
            "triple": (y, "kept", x),
            "negative": ("kept", x, y),
        }[kind]

    places: tuple[Any, Any] = {"dict": ("image", "label"), "triple": (2, 0), "negative": (-2, -1)}.get(kind, (0, 1))

    def forward(engine: Engine, batch: Any) -> Any:
        assert type(batch) is type(as_kind(torch.empty(0), torch.empty(0)))
        assert kind not in ("dict", "triple", "negative") or "kept" in (batch.values() if kind == "dict" else batch)
        return engine.model(batch[places[0]])

    def loss(engine: Engine, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[places[1]])

    engine = Engine(Update(forward, loss, SGD), model=network(), seed=7)
    engine.attach(MixUp(0.4, input=places[0], target=places[1]))
    torch.manual_seed(5)
    engine.run([as_kind(*pair) for pair in batches()], max_epochs=2)
    assert same(engine.model, plain_loop(0.4)[0])


def test_a_batch_of_none_is_passed_over() -> None:
    engine = build()
    engine.attach(MixUp())
    engine.run([batches()[0], None], max_epochs=1)
    assert engine.updates[0].steps == 1


@pytest.mark.parametrize("window", [1, 2])
def test_steps_that_compute_their_gradients_again_find_the_targets_of_every_batch(window: int) -> None:
    # Each batch is the same object, so that what was mixed must be known by more than the object.
    batch = batches()[0]
    optimizer = partial(torch.optim.LBFGS, lr=0.1, max_iter=4)
    model = network().eval()
    engine = Engine(
        Update.supervised(lambda output, target: F.cross_entropy(output, target), optimizer), model=model, seed=7
    )
    engine.connect(Events.EPOCH_STARTED, lambda engine: model.eval())
    engine.attach(MixUp(1.0), GradientAccumulation(window))
    engine.run([batch] * window, max_epochs=1)

    reference = network().eval()
    plain = optimizer(reference.parameters())
    mixed = []
    for iteration in range(1, window + 1):
        lam, perm = draws(iteration, 1.0, 8)
        mixed.append((lam * batch[0] + (1 - lam) * batch[0][perm], lam, perm))

    def closure() -> Tensor:
        plain.zero_grad()
        losses = []
        for x, lam, perm in mixed:
            output = reference(x)
            loss = lam * F.cross_entropy(output, batch[1]) + (1 - lam) * F.cross_entropy(output, batch[1][perm])
            loss.backward()
            losses.append(loss.detach())
        if window > 1:
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(window)
        return torch.stack(losses).sum() / window

    plain.step(closure)
    assert same(model, reference)


@pytest.mark.moderate
@pytest.mark.parametrize("resumed", [True, False])
def test_an_open_window_that_is_computed_again_survives_the_end_of_a_run(resumed: bool) -> None:
    def make() -> Engine:
        engine = build()
        engine.attach(MixUp(1.0), SharpnessAwareMinimization(), GradientAccumulation(3))
        return engine

    whole, parts = make(), make()
    torch.manual_seed(5)
    whole.run(batches(), max_epochs=1)
    torch.manual_seed(5)
    parts.run(batches(), max_iters=2)
    if resumed:
        file = io.BytesIO()
        torch.save(parts.state_dict(), file)
        parts = make()
        parts.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    parts.run(batches(), max_epochs=1)
    assert parts.updates[0].steps == 2
    assert same(parts.model, whole.model)
    assert parts.state_dict()["handlers"]["mixup"] == {}
    copy.deepcopy(parts.handlers["mixup"])


def test_switched_off_it_shifts_no_other_number() -> None:
    handler = MixUp()
    engine = build()
    engine.attach(handler)
    handler.enabled = False
    torch.manual_seed(5)
    engine.run(batches(), max_epochs=2)
    assert same(engine.model, plain_loop(None)[0])


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(build, lambda: MixUp(0.4), batches(3), max_epochs=2)


def test_an_update_that_is_a_single_function_is_refused_before_the_first_batch() -> None:
    update = Update.from_function(lambda engine, batch: engine.model(batch[0]).sum(), SGD)
    engine = Engine(update, model=network(), seed=0)
    engine.attach(MixUp())
    with pytest.raises(ValueError, match=r"'mixup': update 'main' is a single function.*Update\(forward, loss"):
        engine.run(batches(), max_epochs=1)
    assert engine.state.iteration == 0


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_pieces_of_a_mixed_batch_equal_a_plain_loop(first: bool, window: int) -> None:
    handlers = [MixUp(0.4), MicroBatching(pieces=3)]
    engine = trained(*(handlers if first else reversed(handlers)), GradientAccumulation(window))
    assert same(engine.model, plain_loop(0.4, window=window, pieces=3)[0])


@pytest.mark.moderate
def test_pieces_and_a_step_that_computes_its_gradients_again() -> None:
    """The second computation finds the targets of every piece of every batch, too."""
    one = trained(MixUp(0.4), MicroBatching(pieces=1), SharpnessAwareMinimization())
    assert same(one.model, trained(MixUp(0.4), SharpnessAwareMinimization()).model)
    trained(MixUp(0.4), MicroBatching(pieces=2), SharpnessAwareMinimization(), GradientAccumulation(2))


def test_pieces_that_are_copies_are_refused() -> None:
    def split(batch: Any, pieces: int) -> list[Any]:
        indices = torch.arange(len(batch[0])).tensor_split(pieces)
        return [tuple(part[index] for part in batch) for index in indices]

    with pytest.raises(RuntimeError, match=r"'mixup': the targets of the batch were replaced.*instead of copying"):
        trained(MixUp(), MicroBatching(4, split=split))


class Halves(Handler):
    """Computes gradients from two halves of the batch."""

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.GRADIENTS, self.compute, by=self)

    def compute(self, engine: Engine, update: Any, compute: Any) -> None:
        whole = engine.state.batch
        for half in (slice(0, 4), slice(4, 8)):
            engine.state.batch = tuple(part[half] for part in whole)
            compute()
        engine.state.batch = whole


@pytest.mark.parametrize("first", [True, False])
def test_gradients_of_parts_of_the_batch_are_refused_before_the_first_batch(first: bool) -> None:
    engine = build()
    engine.attach(*([MixUp(), Halves()] if first else [Halves(), MixUp()]))
    with pytest.raises(ValueError, match="'mixup' mixes samples across the whole batch, but <Halves 'halves'>"):
        engine.run(batches(), max_epochs=1)
    assert engine.state.iteration == 0


def test_targets_that_are_replaced_after_the_mixing_are_an_error() -> None:
    engine = build()
    engine.attach(MixUp())

    @engine.on(Events.ITERATION_STARTED)
    def half(engine: Engine) -> None:
        x, y = engine.state.batch
        engine.state.batch = (x[:4], y[:4].clone())

    with pytest.raises(RuntimeError, match="'mixup': the targets of the batch were replaced after samples were mixed"):
        engine.run(batches(), max_epochs=1)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ((torch.zeros(4, 2, dtype=torch.long), torch.zeros(4)), {}, "the inputs have dtype torch.int64"),
        ((torch.zeros(4, 2), torch.zeros(3)), {}, r"shape \(4, 2\) and targets of shape \(3,\)"),
        ((torch.zeros(4, 2), "cat"), {}, r"a tuple of length 2, has no tensor at 1.*MixUp\(target=\)"),
        (torch.zeros(4, 2), {}, r"a tensor of shape .*has no tensor at 0.*MixUp\(input=\)"),
        ({"x": torch.zeros(4, 2)}, {"input": "x", "target": "y"}, r"no tensor at 'y'"),
        ((torch.zeros(4, 2),), {}, r"no tensor at 1"),
    ],
)
def test_batches_that_cannot_be_mixed_are_refused_by_name(batch: Any, options: dict[str, Any], message: str) -> None:
    engine = build()
    engine.attach(MixUp(**options))
    with pytest.raises((TypeError, ValueError), match=f"'mixup': .*{message}"):
        engine.run([batch], max_epochs=1)


def test_samples_are_mixed_once_in_each_way_and_only_where_there_is_training() -> None:
    with pytest.raises(ValueError, match="both 'mixup' and 'other' control the mixing of samples by MixUp"):
        build().attach(MixUp(), MixUp(0.4, name="other"))
    with pytest.raises(ValueError, match="mixup"):
        Engine(Update.supervised(F.cross_entropy), model=network()).attach(MixUp())


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"alpha": 0}, ValueError, "alpha=0"),
        ({"alpha": math.nan}, ValueError, "alpha=nan"),
        ({"alpha": "1"}, TypeError, "alpha='1'"),
        ({"input": 1.5}, TypeError, "input=1.5"),
        ({"target": 1.5}, TypeError, "target=1.5"),
        ({"input": 1, "target": 1}, ValueError, "input=1, target=1"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"MixUp\({message}\)"):
        MixUp(**options)
