"""The learning-rate finder: against plain PyTorch loops, and that it leaves no trace, however it ends."""

from __future__ import annotations

import hashlib
import io
import math
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Phase, Update, allow, seed_everything
from signalfire.handlers import (
    EMA,
    Accuracy,
    Checkpoint,
    CSVLogger,
    DistributedDataParallel,
    EarlyStopping,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixUp,
    NonFiniteGuard,
    Validation,
)
from signalfire.testing import fingerprint
from signalfire.tuning import LearningRateCurve, find_learning_rate
from tests import kit
from tests.kit import digest, interruptible, quick
from tests.processes import run_together
from tests.test_invariants import CASES, FOLDER, build_evaluator, make_data

Batch = tuple[Tensor, Tensor]


def batches(count: int) -> list[Batch]:
    return kit.batches(count, 4, (), classes=3)


def build(*handlers: Handler, lr: float = 0.1, **options: Any) -> Engine:
    optimizer = partial(torch.optim.SGD, lr=lr)
    return kit.build(model(), *handlers, loss=F.cross_entropy, optimizer=optimizer, **options)


def model() -> nn.Module:
    return kit.mlp(4, 8, 3, nn.ReLU())


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))


def parabola(curvature: float, **options: Any) -> Engine:
    """Trains l / 2 w^2 from w = 1 with SGD: stable for rates below 2 / l."""

    def loss(engine: Engine, batch: Any) -> Tensor:
        return curvature / 2 * engine.model.w**2  # type: ignore[no-any-return]

    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Engine(Update.from_function(loss, optimizer=optimizer), model=Weight(), seed=0, **options)


def plain_sweep(curvature: float, rates: Sequence[float]) -> list[float]:
    """The losses of the plain loop, up to where the last three and their smoothed value exceed four times its smallest one.

    The smallest one is looked for from the fifth on.
    """
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    smoothed: list[float] = []
    mean = 0.0
    for count, rate in enumerate(rates, 1):
        loss = curvature / 2 * model.w**2
        losses.append(loss.item())
        mean = 0.98 * mean + (1 - 0.98) * losses[-1]
        smoothed.append(mean / (1 - 0.98**count))
        if count > 5 and min(smoothed[-1], *losses[-3:]) > 4 * min(smoothed[4:]):
            break
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return losses


RATES = [1e-5 * (10.0 / 1e-5) ** (step / 99) for step in range(100)]


@pytest.mark.parametrize(
    ("curvature", "suggested", "ended"), [(10, 0.00705, 7.56), (100, 0.000756, 0.175), (1000, 7.05e-5, 0.0756)]
)
def test_the_losses_are_those_of_a_plain_loop_and_the_suggestion_scales_with_the_problem(
    curvature: int, suggested: float, ended: float
) -> None:
    curve = find_learning_rate(parabola(curvature), [0] * 100, low=1e-5, high=10.0)
    assert list(curve.losses) == plain_sweep(curvature, RATES)
    assert list(curve.rates) == pytest.approx(RATES[: len(curve)], rel=1e-12)
    assert curve.diverged
    assert curve.rates[-1] == pytest.approx(ended, rel=5e-3)
    assert curve.suggestion(smoothing=0) == pytest.approx(suggested, rel=5e-3)
    assert curve.suggestion(smoothing=0) < 2 / curvature
    assert curve.suggestion("minimum") < 2 / curvature


def test_a_linear_sweep_has_equal_distances() -> None:
    curve = find_learning_rate(parabola(1), [0] * 10, low=0.1, high=1.0, steps=10, spacing="linear")
    assert curve.rates == pytest.approx([0.1 * place for place in range(1, 11)])
    assert not curve.diverged


# ---- without a trace --------------------------------------------------------------------------------------------------


def loader(count: int = 24, seed: int = 3) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(
        torch.randn(count * 4, 4, generator=generator), torch.randint(0, 3, (count * 4,), generator=generator)
    )
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


def full_engine(folder: Path) -> Engine:
    """Dropout, momentum, and handlers of all phases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    update = Update.supervised(F.cross_entropy, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    engine = Engine(update, model=model, seed=1)
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(accuracy=Accuracy()))
    engine.attach(
        GradientAccumulation(2),
        GradientClipping(1.0),
        MixUp(0.2),
        EMA(0.9),
        LRScheduling(partial(StepLR, step_size=5, gamma=0.9)),
        Validation(evaluator, loader(4, seed=4)),
        EarlyStopping("accuracy", patience=10),
        History(),
        CSVLogger(folder / "log.csv"),
        Checkpoint(folder / "checkpoints", sync_files=False),
        NonFiniteGuard(),
    )
    return engine


def receivers(engine: Engine) -> list[str]:
    return [f"{signal.event} {one!r}" for signal in engine.signals.all() for one in signal.connections]


def everything(engine: Engine, data: DataLoader[Any], folder: Path) -> list[Any]:
    """All that a finder must not change."""
    written = io.BytesIO()
    torch.save(engine.state_dict(), written)
    files = {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return [
        digest(engine.state_dict()),
        hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        data.generator.get_state().tolist(),
        sorted(receivers(engine)),
        files,
        [(p.requires_grad, p.grad is None) for p in engine.model.parameters()],
        [module.training for module in engine.model.modules()],
        repr(engine.state),
        engine.updates[0].optimizer is None,
        [group["lr"] for group in engine.updates[0].optimizer.param_groups] if engine.updates[0].optimizer else [],
    ]


class Interrupted(Exception):
    pass


def at(iteration: int, error: type[BaseException]) -> Callable[[Engine], None]:
    started: list[int] = []

    def interrupt(engine: Engine) -> None:
        started.append(1)
        if len(started) == iteration:
            raise error

    return interrupt


@pytest.mark.moderate
@pytest.mark.parametrize("trained", [False, True], ids=["new", "after an epoch and a half"])
def test_everything_is_as_before_and_the_run_that_follows_is_the_same(trained: bool, tmp_path: Path) -> None:
    found = []
    for sweeps in (0, 1, 2):
        folder = tmp_path / str(sweeps)
        folder.mkdir()
        engine, data = full_engine(folder), loader()
        if trained:
            engine.run(data, max_iters=36, check=False)
        before = everything(engine, data, folder)
        curves = [find_learning_rate(engine, data, steps=10, low=1e-4, high=1.0) for _ in range(sweeps)]
        assert everything(engine, data, folder) == before
        assert len(set(curves)) <= 1
        engine.run(data, max_epochs=3)
        found.append((digest(engine.state_dict()), engine.find(History).table()))
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("iteration", quick(range(1, 30), 1, 2, 17))
def test_an_interrupt_at_any_iteration_leaves_no_trace(
    iteration: int, error: type[BaseException], tmp_path: Path
) -> None:
    engine, data = full_engine(tmp_path), loader()
    engine.run(data, max_iters=7, check=False)  # inside an open window
    before = everything(engine, data, tmp_path)
    with engine.connect(Events.ITERATION_COMPLETED, at(iteration, error)), pytest.raises(error):
        find_learning_rate(engine, data, steps=15, low=1e-4, high=1.0, diverges=None)
    assert everything(engine, data, tmp_path) == before
    engine.run(data, max_iters=20, check=False)
    assert digest(engine.model.state_dict()) == run_on_without_a_sweep()


@cache
def run_on_without_a_sweep() -> str:
    with TemporaryDirectory() as folder:
        engine, data = full_engine(Path(folder)), loader()
        for bound in (7, 20):
            engine.run(data, max_iters=bound, check=False)
        return digest(engine.model.state_dict())


@pytest.mark.moderate
def test_a_loaded_state_is_swept_from_and_still_loaded_afterwards(tmp_path: Path) -> None:
    data = loader()
    first = full_engine(tmp_path / "first")
    first.run(data, max_iters=30, check=False)
    state = first.state_dict()
    ends = []
    for sweep in (False, True):
        folder = tmp_path / str(sweep)
        engine, data = full_engine(folder), loader()
        engine.findings.allowed |= {"W34"}  # each run continues in a folder of its own
        engine.load_state_dict(state)
        if sweep:
            weights = digest(engine.model.state_dict())
            find_learning_rate(engine, data, steps=5, low=1e-4, high=1e-3)
            assert digest(engine.model.state_dict()) == weights
            assert digest(engine.state_dict()) == digest(state)
        engine.run(data, max_epochs=2)
        ends.append(digest(engine.state_dict()["modules"]))
    assert ends[0] == ends[1]


def test_what_does_not_make_the_step_takes_no_part(tmp_path: Path) -> None:
    engine, data = full_engine(tmp_path), loader()
    called: list[Any] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: called.append("recorded"), phase=Phase.RECORD)
    engine.connect(
        Events.STARTED, lambda engine: called.append([n for n, one in engine.handlers.items() if one.enabled])
    )
    find_learning_rate(engine, data, steps=5, low=1e-4, high=1e-3)
    assert called == [["gradient_accumulation", "gradient_clipping", "mixup", "find_learning_rate"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:find_learning_rate", "ignore:[CW][0-9][0-9]")
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize(
    "case", quick([name for name, one in CASES.items() if one.build is not build_evaluator], "TruePrecision")
)
def test_no_shipped_handler_shows_a_trace(case: str, trained: bool) -> None:
    ends = []
    for sweep in (True, False):
        seed_everything(3)
        engine, data = CASES[case].build(), make_data()
        engine.attach(CASES[case].make())
        if trained:
            engine.run(data, max_epochs=2)
        if sweep:
            before = fingerprint(engine)
            find_learning_rate(engine, data, steps=5, low=1e-4, high=1.0, update="main")
            assert fingerprint(engine) == before
        engine.run(data, max_epochs=4)
        ends.append(fingerprint(engine))
        shutil.rmtree(FOLDER)
        FOLDER.mkdir()
    assert ends[0] == ends[1]


def test_what_a_function_freezes_in_the_sweep_is_trained_afterwards() -> None:
    engine = build()
    engine.connect(Events.EPOCH_STARTED, lambda engine: engine.model[0].requires_grad_(False) and None)
    find_learning_rate(engine, batches(10), steps=5, low=1e-4, high=1e-3)
    assert all(p.requires_grad for p in engine.model.parameters())


# ---- windows, groups, updates, processes ------------------------------------------------------------------------------


@pytest.mark.moderate
def test_a_point_of_accumulated_batches_is_their_mean() -> None:
    data = batches(400)
    read: list[int] = []
    engine = build(GradientAccumulation(4))
    engine.connect(Events.ITERATION_STARTED, lambda engine: read.append(engine.state.iteration))
    curve = find_learning_rate(engine, data, diverges=None)
    joined = [tuple(map(torch.cat, zip(*data[start : start + 4], strict=True))) for start in range(0, 400, 4)]
    whole = find_learning_rate(build(), joined, diverges=None)
    assert len(read) == 400
    assert len(curve) == 100
    assert curve.losses == pytest.approx(whole.losses, abs=1e-6, rel=1e-5)


def test_pieces_of_a_batch_count_by_their_samples() -> None:
    data = kit.batches([5] * 20, 4, (), classes=3)
    curve = find_learning_rate(build(MicroBatching(3)), data, steps=20, low=1e-4, high=1e-1)
    whole = find_learning_rate(build(), data, steps=20, low=1e-4, high=1e-1)
    assert curve.losses == pytest.approx(whole.losses, rel=1e-5)


def test_groups_keep_their_ratios() -> None:
    def parameters(engine: Engine) -> list[dict[str, Any]]:
        first, _, last = engine.model
        return [{"params": first.parameters(), "lr": 0.01}, {"params": last.parameters()}]

    update = Update.supervised(F.cross_entropy, partial(torch.optim.SGD, lr=0.1), parameters=parameters)
    engine = Engine(update, model=model(), seed=0)
    seen: list[list[float]] = []
    engine.connect(
        Events.OPTIMIZER_STEP_COMPLETED,
        lambda engine: seen.append([group["lr"] for group in engine.updates[0].optimizer.param_groups]),
    )
    curve = find_learning_rate(engine, batches(20), steps=20, low=1e-4, high=1e-1)
    assert len(seen) == len(curve) == 20
    for rate, (small, large) in zip(curve.rates, seen, strict=True):
        assert large == pytest.approx(rate, rel=1e-12)
        assert small / large == pytest.approx(0.1, rel=1e-12)


def two_updates() -> Engine:
    torch.manual_seed(0)
    models = {"first": nn.Linear(4, 3), "second": nn.Linear(4, 3)}

    def update(name: str) -> Update:
        def loss(engine: Engine, batch: Batch) -> Tensor:
            return F.cross_entropy(engine.modules[name](batch[0]), batch[1])

        return Update.from_function(
            loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            name=name,
            parameters=lambda engine: engine.modules[name].parameters(),
        )

    return Engine([update("first"), update("second")], model=models, seed=0)


def test_of_several_updates_one_is_named_and_the_other_trains_at_its_own_rate() -> None:
    engine = two_updates()
    with pytest.raises(ValueError, match=r"several updates: 'first', 'second'; choose one with update="):
        find_learning_rate(engine, batches(10), steps=5)
    rates: list[float] = []
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: rates.append(engine.updates[0].optimizer.param_groups[0]["lr"])
    )
    curve = find_learning_rate(engine, batches(10), steps=5, low=1e-3, high=1e-1, update="second")
    assert curve.update == "second"
    assert rates == [0.1] * 5


def of_uneven() -> tuple[float, ...]:
    engine = build(DistributedDataParallel(timeout=60.0))
    return find_learning_rate(engine, kit.batches([4, 2] * 10, 4, (), classes=3), steps=10, low=1e-4, high=1e-1).losses


@pytest.mark.moderate
def test_batches_of_ranks_count_by_their_samples() -> None:
    found = run_together(of_uneven, 2)
    data = kit.batches([4, 2] * 10, 4, (), classes=3)
    joined = [tuple(map(torch.cat, zip(*data[start : start + 2], strict=True))) for start in range(0, 20, 2)]
    curve = find_learning_rate(build(), joined, steps=10, low=1e-4, high=1e-1)
    assert found[0] == found[1] == pytest.approx(curve.losses, rel=1e-5)


def of_two(kind: type[Handler]) -> tuple[Any, ...]:
    data, ends = batches(20), []
    for sweeps in (1, 0):
        engine = build(kind(timeout=60.0))  # type: ignore[call-arg]
        engine.run(data[:4], max_epochs=1, check=False)
        for _ in range(sweeps):
            before = fingerprint(engine)
            curve = find_learning_rate(engine, data, steps=10, low=1e-4, high=1e-1)
            assert fingerprint(engine) == before
        engine.run(data, max_epochs=2, check=False)
        ends.append(fingerprint(engine))
    assert ends[0] == ends[1]
    new = build(kind(timeout=60.0))  # type: ignore[call-arg]
    return curve.rates, curve.losses, curve.suggestion(), find_learning_rate(new, data, steps=10, low=1e-4, high=1e-1)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", quick([DistributedDataParallel, FullyShardedDataParallel], DistributedDataParallel))
def test_two_processes_get_one_curve_and_leave_no_trace(kind: type[Handler]) -> None:
    found = run_together(of_two, 2, kind)
    assert found[0] == found[1]
    data = batches(20)
    joined = [tuple(map(torch.cat, zip(*data[start : start + 2], strict=True))) for start in range(0, 20, 2)]
    curve = find_learning_rate(build(), joined, steps=10, low=1e-4, high=1e-1)
    assert found[0][3].losses == pytest.approx(curve.losses, rel=1e-5)


def test_less_data_than_points_goes_round_and_says_so() -> None:
    with pytest.warns(UserWarning, match="than the sweep needs, so the sweep made 3 passes"):
        curve = find_learning_rate(build(), batches(4), steps=10, low=1e-4, high=1e-2)
    assert len(curve) == 10
    assert curve.passes == 3


# ---- losses that are not finite, and suggestions ----------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_sweep_and_is_left_out_of_the_suggestion() -> None:
    data = [(x, y, math.nan if place == 20 else 1.0) for place, (x, y) in enumerate(batches(60))]

    def loss(engine: Engine, batch: tuple[Tensor, Tensor, float]) -> Tensor:
        return F.cross_entropy(engine.model(batch[0]), batch[1]) * batch[2]

    def sweep(diverges: float | None) -> LearningRateCurve:
        engine = Engine(Update.from_function(loss, optimizer=partial(torch.optim.SGD, lr=0.1)), model=model(), seed=0)
        clean = engine.connect(
            Events.GRADIENTS_READY, lambda engine: [p.grad.nan_to_num_() for p in engine.model.parameters()] and None
        )
        with clean:
            return find_learning_rate(engine, data, steps=60, low=1e-3, high=1.0, diverges=diverges)

    curve, whole = sweep(4.0), sweep(None)
    assert [place for place, one in enumerate(whole.losses) if math.isnan(one)] == [20]
    assert (len(curve), curve.diverged) == (21, True)
    assert (len(whole), whole.diverged) == (60, False)
    assert whole.suggestion() in whole.rates
    assert whole.rates[20] != whole.suggestion()


def noisy(seed: int) -> tuple[Engine, list[Batch]]:
    """A regression whose losses vary six-fold between batches of 8, and whose rate may not exceed about 0.5."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(800, 4, generator=generator), torch.randn(800, 1, generator=generator)
    torch.manual_seed(seed)
    update = Update.supervised(F.mse_loss, partial(torch.optim.SGD, lr=0.1))
    return Engine(update, model=nn.Linear(4, 1), seed=0), list(zip(x.split(8), y.split(8), strict=True))


@pytest.mark.parametrize("seed", quick(range(10), 0, 7))
def test_noise_of_small_batches_is_no_divergence_and_a_divergence_is_one(seed: int) -> None:
    engine, data = noisy(seed)
    curve = find_learning_rate(engine, data, high=0.1)
    assert (len(curve), curve.diverged) == (100, False)
    assert max(curve.losses) > 4 * min(curve.losses)
    found = find_learning_rate(engine, data)
    assert found.diverged
    assert 0.1 < found.rates[-1] < 3
    at_once = find_learning_rate(engine, data, low=10.0, high=100.0)
    assert at_once.diverged
    assert len(at_once) < 10


@pytest.mark.parametrize("seed", quick(range(1, 6), 1))
def test_batches_with_outliers_are_no_divergence_and_a_divergence_is_one(seed: int) -> None:
    engine, data = noisy(seed)
    generator = torch.Generator().manual_seed(seed)
    data = [(x, torch.where(torch.rand(y.shape, generator=generator) < 0.01, 20 * y, y)) for x, y in data]
    curve = find_learning_rate(engine, data, high=0.05)
    assert (len(curve), curve.diverged) == (100, False)
    found = find_learning_rate(engine, data)
    assert found.diverged
    assert 0.05 < found.rates[-1] < 3


def test_findings_about_weights_that_are_put_back_are_not_reported() -> None:
    engine, data = noisy(0)
    curve = find_learning_rate(engine, data[:50], high=1e6, steps=50, diverges=None)
    assert math.isnan(curve.losses[-1])
    find_learning_rate(engine, data[:20], low=1e-30, high=1e-20, steps=20)  # too small to change a weight
    update = Update.supervised(F.mse_loss, partial(torch.optim.SGD, lr=1e-30))
    with allow("C28"), pytest.warns(UserWarning, match="W84"):
        Engine(update, model=engine.model, seed=0).run(data[:20], max_epochs=1)


@pytest.mark.parametrize(
    ("losses", "way_out"),
    [
        (
            (math.nan, math.nan, 1.0, 2.0),
            "only 2 of the 4 losses in the sweep are finite, .*; set low= below 0.1, or increase steps=",
        ),
        (
            (1.0, 2.0, 3.0, 4.0),
            "the loss never falls between the learning rates 0.1 and 100; set high= above 100 or low= below 0.1",
        ),
    ],
)
def test_a_curve_without_an_answer_says_what_to_change(losses: tuple[float, ...], way_out: str) -> None:
    curve = LearningRateCurve((0.1, 1.0, 10.0, 100.0), losses, low=0.1, high=100.0)
    with pytest.raises(ValueError, match=way_out):
        curve.suggestion(smoothing=0)
    assert "no suggestion" in str(curve)


def test_weights_that_are_lost_end_the_sweep() -> None:
    curve = find_learning_rate(build(), batches(300), low=1.0, high=1e30, steps=300, diverges=1e9)
    assert curve.diverged
    assert len(curve) < 300


# ---- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.0}, r"find_learning_rate\(low=0.0\): expected a learning rate above 0"),
        ({"low": 1.0, "high": 0.1}, r"low=1.0, high=0.1\): low must be smaller"),
        ({"high": math.inf}, r"high=inf"),
        ({"steps": 2}, r"steps=2\): expected an int of 3 or more"),
        ({"spacing": "log"}, r"spacing='log'\): expected 'exponential' or 'linear'"),
        ({"diverges": 1.0}, r"diverges=1.0\): expected a factor above 1"),
        ({"update": "other"}, "no update is named 'other'"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, KeyError), match=message):
        find_learning_rate(build(), batches(5), **options)


def test_an_engine_that_does_not_train_and_data_that_is_used_up_are_refused() -> None:
    with pytest.raises(ValueError, match="does not train"):
        find_learning_rate(Engine(Update.supervised(F.cross_entropy), model=model()), batches(5))
    with pytest.raises(
        TypeError, match="a generator, which this call would exhaust; pass data that can be iterated again"
    ):
        find_learning_rate(build(), (batch for batch in batches(5)))
    engine = build()
    engine.connect(Events.STARTED, lambda engine: find_learning_rate(engine, batches(5)))
    with pytest.raises(RuntimeError, match="was called during a run"):
        engine.run(batches(5), max_epochs=1)


def test_rates_of_zero_are_refused() -> None:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(F.cross_entropy, partial(torch.optim.SGD, lr=0.0)), model=model(), seed=0)
    with pytest.raises(ValueError, match="all parameter groups of update 'main' have a learning rate of 0"):
        find_learning_rate(engine, batches(5))


def test_a_sweep_that_something_else_stops_says_so() -> None:
    engine = build()
    engine.connect(Events.ITERATION_COMPLETED(once=5), lambda engine: engine.terminate("enough for today"))
    with pytest.warns(UserWarning, match="ended after 5 of 10 steps, because the run was stopped: enough for today"):
        curve = find_learning_rate(engine, batches(10), steps=10, low=1e-4, high=1e-2)
    assert len(curve) == 5


def test_a_sweep_without_a_step_ends_with_an_error() -> None:
    def nothing(engine: Engine, batch: Batch) -> None:
        return None

    engine = Engine(Update.from_function(nothing, optimizer=partial(torch.optim.SGD, lr=0.1)), model=model(), seed=0)
    message = "no step ran, either because the update 'main' returned no loss or because every step was skipped"
    with allow("W29"), pytest.raises(RuntimeError, match=message):
        find_learning_rate(engine, batches(10), steps=10)


def test_steps_that_are_skipped_are_made_again_at_the_same_rate() -> None:
    engine = build()
    skipped = Events.GRADIENTS_READY(when=lambda engine: engine.state.iteration in (2, 3, 7))
    engine.connect(skipped, lambda engine: engine.state.update.skip("not this one"))
    curve = find_learning_rate(engine, batches(20), steps=10, low=1e-4, high=1e-2)
    assert len(curve) == 10
    kept = [one for place, one in enumerate(batches(20), 1) if place not in (2, 3, 7)]
    assert curve.losses == find_learning_rate(build(), kept, steps=10, low=1e-4, high=1e-2).losses


# ---- showing ----------------------------------------------------------------------------------------------------------


def curve_of(engine: Engine) -> LearningRateCurve:
    return find_learning_rate(engine, batches(60), steps=60, low=1e-3, high=1e2)


@pytest.mark.moderate
def test_the_curve_is_shown_as_text_table_picture_and_in_notebooks(tmp_path: Path) -> None:
    curve = curve_of(build())
    rows = curve.table().splitlines()
    assert len(rows) == len(curve) + 1
    assert sum(row.endswith("<- suggestion") for row in rows) == 1
    assert f"suggestion {curve.suggestion():.3g}" in str(curve)
    curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in curve._repr_html_()


def test_a_second_ctrl_c_waits_until_everything_is_put_back(tmp_path: Path) -> None:
    engine, data = full_engine(tmp_path), loader()
    engine.run(data, max_iters=7, check=False)
    before = everything(engine, data, tmp_path)
    pressed: list[int] = []

    def press_again(*arguments: Any) -> None:
        if not pressed:
            pressed.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    hook = engine.model.register_load_state_dict_pre_hook(press_again)
    with (
        engine.connect(Events.ITERATION_COMPLETED, at(5, KeyboardInterrupt)),
        pytest.raises(KeyboardInterrupt),
        interruptible(),
    ):
        find_learning_rate(engine, data, steps=15, low=1e-4, high=1.0, diverges=None)
    hook.remove()
    assert pressed
    assert everything(engine, data, tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(1, 1), []), "the first argument is a Linear; expected an Engine, followed by the data"),
        (([], 3), "the first argument is a list; expected an Engine, followed by the data"),
        ((None, []), "the first argument is a NoneType; expected an Engine, followed by the data"),
    ],
)
def test_other_things_in_place_of_the_engine_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        find_learning_rate(*arguments)


def test_no_data_is_named() -> None:
    with pytest.raises(TypeError, match="the data is a NoneType; pass data that yields batches"):
        find_learning_rate(build(), None)  # type: ignore[arg-type]


def test_a_loss_that_is_never_finite_is_not_blamed_on_the_rate() -> None:
    with pytest.raises(
        ValueError, match=r"no loss in the sweep is finite, not even the first .*, so no learning rate can help"
    ):
        LearningRateCurve((0.1, 1.0), (math.nan, math.nan), low=0.1, high=1.0).suggestion()
