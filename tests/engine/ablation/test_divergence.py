"""Where two runs part: at the event, in the iteration and with the parameter that the difference begins with."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Phase, Update, on, seed_everything
from signalfire.ablation.divergence import Divergence, divergence
from signalfire.authoring.randomness import random_state
from signalfire.handlers import (
    EMA,
    Accuracy,
    Average,
    Checkpoint,
    CSVLogger,
    Cutout,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    History,
    LabelSmoothing,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixUp,
    Preemption,
    Seeding,
    SharpnessAwareMinimization,
    Throughput,
    Validation,
)
from tests.kit import spread

cross_entropy = nn.functional.cross_entropy
Adam = partial(torch.optim.Adam, lr=1e-2)
Build = Callable[[], Engine]


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(22, 1, 8, generator=generator), torch.randint(3, (22,), generator=generator))


def make_engine(*handlers: Handler, seed: int = 0, dropout: float = 0.2, optimizer: Any = Adam) -> Engine:
    seed_everything(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 3)
    )
    engine = Engine(Update.supervised(cross_entropy, optimizer), model=model, seed=seed)
    engine.attach(*handlers)
    return engine


def train(engine: Engine) -> None:
    engine.run(DataLoader(make_dataset(), batch_size=6, shuffle=True), max_epochs=3)


def found(*handlers: Handler, other: tuple[Handler, ...] = (), run: Any = train, **options: Any) -> Divergence | None:
    """Where a run with these handlers parts from one with the others."""
    return divergence(lambda: make_engine(*handlers), lambda: make_engine(*other), run=run, **options)


def place(divergence: Divergence | None) -> tuple[str, int, str, str]:
    assert divergence is not None
    return divergence.event, divergence.iteration, divergence.kind, divergence.name


class After(Handler):
    """Does something at the end of an iteration."""

    def __init__(self, act: Callable[[Engine], object], iteration: int) -> None:
        super().__init__()
        self.act = act
        self.iteration = iteration

    @on(Events.ITERATION_COMPLETED)
    def do(self, engine: Engine) -> None:
        if engine.state.iteration == self.iteration:
            self.act(engine)


# ---- runs that are the same --------------------------------------------------------------------------------------------


def everything() -> list[Handler]:
    return [Seeding(), MixUp(), Cutout(2), GradientClipping(max_norm=1.0), SharpnessAwareMinimization(), EMA(0.9)]


@pytest.mark.moderate
def test_runs_that_are_built_alike_never_part() -> None:
    kinds = ("parameters", "gradients", "optimizer", "random", "batch", "loss")
    assert found(*everything(), other=tuple(everything()), watch=kinds) is None


@pytest.mark.slow
def test_a_build_that_does_not_seed_begins_in_both_runs_with_the_callers_random_states() -> None:
    def build() -> Engine:
        return Engine(
            Update.supervised(cross_entropy, Adam), model=nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), seed=0
        )

    assert divergence(build, build, run=train) is None


@pytest.mark.slow
def test_handlers_that_change_no_training_do_not_part_the_runs() -> None:
    assert found(EMA(0.9), Metrics(accuracy=Accuracy())) is None

    def validated() -> Engine:
        engine = make_engine()
        evaluator = Engine(Update.supervised(cross_entropy), model=engine.model)
        evaluator.attach(Metrics(accuracy=Accuracy()))
        engine.attach(EMA(0.5), Validation(evaluator, DataLoader(make_dataset(), 6, shuffle=True), every="3it"))
        return engine

    assert divergence(validated, make_engine, run=train) is None


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_both_may_train_on_one_data_loader(own: bool) -> None:
    generator = torch.Generator().manual_seed(1) if own else None
    loader = DataLoader(make_dataset(), batch_size=6, shuffle=True, generator=generator)
    run: Any = lambda engine: engine.run(loader, max_epochs=3)  # noqa: E731
    assert found(run=run) is None
    assert place(found(GradientClipping(max_norm=1e-3), run=run))[0] == "GRADIENTS_READY"


@pytest.mark.slow
def test_several_runs_in_a_row_are_compared_to_the_end() -> None:
    def twice(engine: Engine) -> None:
        engine.run([(torch.ones(4, 1, 8), torch.zeros(4, dtype=torch.long))] * 2, max_epochs=1)
        engine.run([(torch.ones(4, 1, 8), torch.ones(4, dtype=torch.long))] * 2, max_epochs=2)

    def late() -> Engine:
        return make_engine(GradientClipping(max_norm=1e-3))

    assert divergence(make_engine, make_engine, run=twice) is None
    assert place(divergence(make_engine, late, run=twice))[:2] == ("GRADIENTS_READY", 1)


# ---- runs that part ----------------------------------------------------------------------------------------------------


def test_clipping_parts_the_gradients_when_they_are_ready() -> None:
    parted = found(GradientClipping(max_norm=1e-3))
    assert place(parted) == ("GRADIENTS_READY", 1, "gradients", "model.1.weight")
    assert parted is not None
    assert parted.others == 5, "the gradients of the other parameters"
    assert parted.difference is not None
    assert re_found(parted.difference) < 1
    assert str(parted) == (
        "The runs diverge at GRADIENTS_READY, epoch 1, iteration 1: the gradient of model.1.weight differs by up to "
        f"{parted.difference:.3g}; 5 other values differ at this event."
    )


def re_found(difference: float) -> float:
    """The difference, which is as large as the gradient that was clipped away."""
    engine = make_engine()
    seen: list[Tensor] = []

    def look(engine: Engine) -> None:
        gradient = engine.model[1].weight.grad
        total = torch.cat([p.grad.flatten() for p in engine.model.parameters()]).norm()
        seen.append((gradient - gradient * min(1.0, 1e-3 / (total.item() + 1e-6))).abs().max())

    engine.connect(Events.GRADIENTS_READY(once=1), look)
    train(engine)
    assert seen[0].item() == pytest.approx(difference, rel=1e-5)
    return seen[0].item()


def test_label_smoothing_parts_the_loss_and_then_the_gradients() -> None:
    parted = found(LabelSmoothing(0.2))
    assert place(parted)[:3] == ("BACKWARD_COMPLETED", 1, "gradients")
    watching = found(LabelSmoothing(0.2), watch=("loss", "gradients"))
    assert place(watching) == ("LOSS_COMPUTED", 1, "loss", "of update 'main'")


def test_mixed_samples_part_the_batch_first() -> None:
    assert place(found(MixUp(), watch="batch")) == ("GET_BATCH_COMPLETED", 1, "batch", "tensor 0")
    # Batch statistics are those of the mixed samples.
    assert place(found(MixUp()))[:3] == ("FORWARD_COMPLETED", 1, "parameters")


def test_another_seed_parts_the_runs_at_the_start() -> None:
    parted = divergence(make_engine, lambda: make_engine(seed=1), run=train)
    assert place(parted) == ("MODEL_SETUP", 0, "parameters", "model.1.weight")
    assert "before the first epoch: the parameter or buffer model.1.weight differs by up to" in str(parted)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda engine: torch.rand(1), "torch"),
        (lambda engine: random.random(), "python"),
        (lambda engine: np.random.rand(), "numpy"),
    ],
)
def test_an_extra_draw_parts_the_random_states(draw: Callable[[Engine], object], name: str) -> None:
    parted = found(After(draw, 7))
    assert place(parted) == ("ITERATION_COMPLETED", 7, "random", name)
    assert parted is not None
    assert str(parted) == (
        f"The runs diverge at ITERATION_COMPLETED, epoch 2, iteration 7: the random state of {name} differs."
    )


@pytest.mark.slow
def test_draws_that_change_nothing_else_are_passed_over_where_random_states_are_not_watched() -> None:
    watch = ("parameters", "gradients", "optimizer")
    assert found(After(lambda engine: random.random(), 7), watch=watch) is None
    assert place(found(After(lambda engine: torch.rand(1), 6), watch=watch))[:3] == (
        "BACKWARD_COMPLETED",
        7,
        "gradients",
    )


def test_a_schedule_parts_the_optimizers_rate() -> None:
    schedule = LRScheduling(partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5))
    parted = found(schedule, watch=("parameters", "optimizer"))
    assert parted is not None
    assert parted.kind == "optimizer"
    assert "lr of group 0 (update 'main')" in parted.name


@pytest.mark.moderate
def test_a_changed_buffer_and_a_changed_moment_are_named() -> None:
    def change_buffer(engine: Engine) -> None:
        engine.model[2].running_var.add_(0.5)

    def change_moment(engine: Engine) -> None:
        assert engine.updates[0].optimizer is not None
        engine.updates[0].optimizer.state[engine.model[5].bias]["exp_avg"].add_(0.25)

    buffer, moment = found(After(change_buffer, 3)), found(After(change_moment, 3))
    assert place(buffer) == ("ITERATION_COMPLETED", 3, "parameters", "model.2.running_var")
    assert buffer is not None
    assert buffer.difference == pytest.approx(0.5)
    assert place(moment) == ("ITERATION_COMPLETED", 3, "optimizer", "exp_avg of model.5.bias")


@pytest.mark.moderate
def test_events_of_one_run_alone_are_passed_over() -> None:
    # Without accumulation the step is made at once; up to there the two are the same.
    assert place(found(GradientAccumulation(2)))[:3] == ("UPDATE_COMPLETED", 1, "parameters")
    # Of two evaluations the first is compared, and then what the step made of the second.
    assert place(found(SharpnessAwareMinimization()))[:2] == ("OPTIMIZER_STEP_COMPLETED", 1)


@pytest.mark.moderate
def test_values_that_differ_by_rounding_are_the_same_up_to_a_tolerance() -> None:
    def build(*handlers: Handler) -> Build:
        def built() -> Engine:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
            engine = Engine(Update.supervised(cross_entropy, partial(torch.optim.SGD, lr=0.1)), model=model, seed=0)
            engine.attach(*handlers)
            return engine

        return built

    # Sums over parts of a batch are rounded otherwise: a few units of 6e-8 for each of 12 steps.
    exact = divergence(build(), build(MicroBatching(2)), run=train)
    assert place(exact)[:3] == ("GRADIENTS_READY", 1, "gradients")
    assert divergence(build(), build(MicroBatching(2)), run=train, rtol=1e-4) is None
    assert divergence(build(), build(GradientClipping(max_norm=1e-2)), run=train, rtol=1e-4) is not None


@pytest.mark.moderate
def test_a_run_that_ends_earlier_parts_there() -> None:
    def stop(engine: Engine) -> None:
        engine.terminate("enough")

    parted = found(After(stop, 5))
    assert place(parted)[:3] == ("COMPLETED", 5, "length")
    assert str(parted) == (
        "The runs diverge at COMPLETED, epoch 2, iteration 5: run 'a' ends (enough), while run 'b' continues."
    )


@pytest.mark.slow
@pytest.mark.parametrize("value", spread([float("nan"), float("inf")], 1))
@pytest.mark.filterwarnings("ignore:W15")
def test_what_is_not_finite_parts_the_runs_under_any_tolerance_unless_both_have_it(value: float) -> None:
    def spoil(engine: Engine) -> None:
        with torch.no_grad():
            engine.model[5].bias[0] = value

    parted = found(After(spoil, 12), rtol=0.5)
    assert place(parted) == ("ITERATION_COMPLETED", 12, "parameters", "model.5.bias")
    assert parted is not None
    assert parted.difference is not None
    assert not np.isfinite(parted.difference)
    assert found(After(spoil, 2), other=(After(spoil, 2),)) is None


def test_models_that_are_built_otherwise_part_by_name_and_by_shape() -> None:
    def build(width: int, *more: nn.Module) -> Build:
        def built() -> Engine:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Flatten(), nn.Linear(8, width), *more)
            return Engine(Update.supervised(cross_entropy, Adam), model=model, seed=0)

        return built

    wide = divergence(build(3), build(4), run=train)
    assert place(wide) == ("MODEL_SETUP", 0, "parameters", "model.1.weight")
    assert "shapes (3, 8) and (4, 8)" in str(wide)
    more = divergence(build(3), build(3, nn.Linear(3, 3)), run=train)
    assert place(more) == ("MODEL_SETUP", 0, "parameters", "model.2.weight")
    assert "only run 'b' has one" in str(more)


# ---- around it ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_caller_gets_its_random_states_back_and_no_thread_is_left() -> None:
    threads = threading.active_count()
    before = random_state()
    assert found(GradientClipping(max_norm=1e-3)) is not None
    assert found() is None
    after = random_state()
    assert before["python"] == after["python"]
    assert torch.equal(before["torch"], after["torch"])
    assert before["numpy"] == after["numpy"]
    assert threading.active_count() == threads


@pytest.mark.slow
def test_a_run_beside_another_is_that_run_alone() -> None:
    engines: list[Engine] = []

    def build() -> Engine:
        engines.append(make_engine(*everything()))
        return engines[-1]

    alone = build()
    train(alone)
    assert divergence(build, build, run=train) is None
    weights = [[p.detach() for p in engine.model.parameters()] for engine in engines]
    for others in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], others, strict=True))


def test_an_error_of_one_run_leaves_and_says_whose_it_is() -> None:
    def fail(engine: Engine) -> None:
        raise ArithmeticError("no")

    threads = threading.active_count()
    with pytest.raises(ArithmeticError, match="no") as raised:
        found(other=(After(fail, 2),))
    assert "in run 'b' of divergence()" in raised.value.__notes__
    assert any("after.do at Events.ITERATION_COMPLETED" in note for note in raised.value.__notes__)
    assert threading.active_count() == threads


@pytest.mark.moderate
def test_builds_may_bring_their_own_run_and_write_no_files(tmp_path: Path) -> None:
    def build() -> tuple[Engine, Any]:
        return make_engine(Checkpoint(tmp_path, every="1it")), train

    assert divergence(build, build) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:W08")
def test_what_stops_by_a_metric_is_compared_up_to_its_stop() -> None:
    def build() -> Engine:
        return make_engine(Metrics(accuracy=Accuracy()), EarlyStopping("accuracy", min_delta=1.0, patience=1))

    assert divergence(build, build, run=train) is None


def test_what_cannot_be_compared_is_refused() -> None:
    engine = make_engine()
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (make_engine, make_engine, None, TypeError, r"divergence\(run=None\): expected a function run\(engine\)"),
        (make_engine, lambda: 3, train, TypeError, r"divergence\(build_b=...\) returned 3; expected an Engine"),
        (lambda: engine, lambda: engine, train, ValueError, "both builds use the same engine"),
    ]
    for build, other, run, error, message in cases:
        with pytest.raises(error, match=message):
            divergence(build, other, run=run)
    model = make_engine().model

    def shared() -> Engine:
        return Engine(Update.supervised(cross_entropy, Adam), model=model, seed=0)

    with pytest.raises(
        ValueError, match=r"both builds use the same parameter 'model\.1\.weight'; create a separate one in each build"
    ):
        divergence(shared, shared, run=train)
    with pytest.raises(RuntimeError, match=r"'preemption': Python delivers signals to the main thread only"):
        found(Preemption())
    with pytest.raises(TypeError, match=r"divergence\(build_a=5\): expected a function"):
        divergence(5, found)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"divergence\(watch=\('weights',\)\): expected one or more of parameters"):
        found(watch="weights")
    with pytest.raises(ValueError, match=r"divergence\(rtol=-1\): expected a number with 0 <= rtol < 1"):
        found(rtol=-1)


def test_what_is_looked_at_is_what_all_receivers_have_made_of_the_event() -> None:
    class Late(Handler):
        @on(Events.GRADIENTS_READY, phase=Phase.PERSIST, rank=1000)
        def change(self, engine: Engine) -> None:
            for p in engine.updates[0].parameters:
                assert p.grad is not None
                p.grad.mul_(2)

    assert place(found(Late()))[0] == "GRADIENTS_READY"


# ---- what handlers keep, metrics and files -----------------------------------------------------------------------------


def evaluated(decay: float | None) -> Build:
    """A training whose evaluations use the averages, if there are any."""

    def build() -> Engine:
        engine = make_engine()
        evaluator = Engine(Update.supervised(cross_entropy), model=engine.model)
        evaluator.attach(Metrics(loss=Average()))
        engine.attach(Validation(evaluator, DataLoader(make_dataset(), 6), every="3it", prefix="val_"))
        if decay is not None:
            engine.attach(EMA(decay))
        return engine

    return build


@pytest.mark.slow
def test_averages_and_the_metrics_measured_with_them_part_the_runs() -> None:
    averages = divergence(evaluated(0.9), evaluated(0.5), run=train)
    assert place(averages)[1:3] == (2, "handlers")
    assert averages is not None
    assert averages.name.startswith("ema: ")
    assert "the state of handler ema: " in str(averages)
    metrics = divergence(evaluated(0.9), evaluated(None), run=train)
    assert place(metrics) == ("ITERATION_COMPLETED", 3, "metrics", "val_loss")
    assert "the metric val_loss differs by up to " in str(metrics)
    training = ("parameters", "gradients", "optimizer", "random")
    assert divergence(evaluated(0.9), evaluated(0.5), run=train, watch=training) is None
    assert divergence(evaluated(0.9), evaluated(0.9), run=train) is None


@pytest.mark.moderate
def test_metrics_of_time_do_not_part_the_runs() -> None:
    def timed() -> Engine:
        return make_engine(Throughput(), History())

    assert divergence(timed, timed, run=train) is None


@pytest.mark.slow
def test_files_are_compared_where_each_run_has_its_folder(tmp_path: Path) -> None:
    def logged(folder: str, text: str) -> Build:
        (tmp_path / folder).mkdir(exist_ok=True)

        def build() -> Engine:
            engine = make_engine(Metrics(accuracy=Accuracy()), CSVLogger(tmp_path / folder / "log.csv"))
            (tmp_path / folder / "note.txt").write_text(text)
            return engine

        return build

    folders = (tmp_path / "a", tmp_path / "b")
    assert divergence(logged("a", "x"), logged("b", "x"), run=train, files=folders) is None
    assert (tmp_path / "a" / "log.csv").read_bytes() == (tmp_path / "b" / "log.csv").read_bytes() != b""
    parted = divergence(logged("a", "x"), logged("b", "y!"), run=train, files=folders)
    assert place(parted)[0::2] == ("COMPLETED", "files")
    assert str(parted).endswith("the file note.txt differs (1 and 2 bytes).")
    (tmp_path / "b" / "more.txt").touch()
    parted = divergence(logged("a", "x"), logged("b", "x"), run=train, files=folders)
    assert str(parted).endswith("the file more.txt differs (only run 'b' has this file).")


@pytest.mark.parametrize(
    ("files", "options", "error", "message"),
    [
        ("a", {}, TypeError, r"divergence\(files='a'\): expected two folders"),
        (("a", "./a"), {}, ValueError, "expected a separate folder for each run"),
        (("a", "b"), {"watch": "loss"}, ValueError, "add 'files' to watch, or omit files="),
    ],
)
def test_folders_that_cannot_be_compared_are_refused(files: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        divergence(make_engine, make_engine, run=train, files=files, **options)
