"""SpikeGuard against plain loops and runs that never see the batches that it leaves out."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    CSVLogger,
    DistributedDataParallel,
    EarlyStopping,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientClipping,
    Histograms,
    History,
    JSONLinesLogger,
    LRScheduling,
    Metrics,
    NonFiniteGuard,
    Preemption,
    SharpnessAwareMinimization,
    SpikeGuard,
    TensorBoardLogger,
    TruncatedBPTT,
    Validation,
)
from signalfire.testing import fingerprint
from tests import kit
from tests.handlers.test_tensorboard import shown
from tests.kit import digest, needs_torch
from tests.processes import run_program, run_together

Batch = tuple[Tensor, Tensor]
ADAM = partial(torch.optim.Adam, lr=1e-3)
WINDOW = 16


def data_of(count: int, poisoned: int | None = None, scale: float = 100.0) -> list[Batch]:
    """Batches of a smooth function; the targets of the poisoned one, counted from 1, are scaled."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(1, count + 1):
        inputs = torch.randn(16, 5, generator=generator)
        targets = inputs.sin().sum(1, keepdim=True)
        found.append((inputs, targets * (scale if number == poisoned else 1.0)))
    return found


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def build(*handlers: Any, optimizer: Any = ADAM, streams: Any = "separate", model: nn.Module | None = None) -> Engine:
    model = network() if model is None else model
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model, seed=0, streams=streams)
    engine.attach(*handlers)
    return engine


def run(engine: Engine, data: Any, **bounds: Any) -> list[str]:
    """Run, and return what was reported."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run(data, **(bounds or {"max_epochs": 1}))
    return [str(one.message) for one in caught]


def weights(engine: Engine) -> str:
    states = [update.optimizer.state_dict() for update in engine.updates if update.optimizer is not None]
    return digest({"model": engine.model.state_dict(), "optimizers": states})


# ---- skip ----------------------------------------------------------------------------------------------------------


def test_a_poisoned_batch_is_left_out_as_in_a_plain_loop_without_it() -> None:
    guard = SpikeGuard(window=WINDOW)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    engine = build(guard, model=model)
    said = run(engine, data_of(60, poisoned=40))
    assert [action["iteration"] for action in guard.actions] == [40]
    assert guard.actions[0]["batches"] == [[1, 39]]
    assert any("W19: 'spike_guard' has skipped 1 step of update 'main': " in one for one in said)

    plain = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    plain.load_state_dict(start)
    optimizer = ADAM(plain.parameters())
    for number, (inputs, targets) in enumerate(data_of(60, poisoned=40), start=1):
        if number != 40:
            nn.functional.mse_loss(plain(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.moderate
def test_what_is_watched_is_the_loss_the_norm_or_both() -> None:
    for watch in ("loss", "gradient_norm", ["loss", "gradient_norm"]):
        guard = SpikeGuard(window=WINDOW, watch=watch)
        run(build(guard), data_of(60, poisoned=40))
        assert [action["iteration"] for action in guard.actions] == [40]
        reason = guard.actions[0]["reason"]
        assert ("loss" in reason, "gradient norm" in reason) == ("loss" in watch, "gradient_norm" in watch)


def test_the_norm_is_that_before_clipping() -> None:
    guard = SpikeGuard(window=WINDOW, watch="gradient_norm")
    run(build(guard, GradientClipping(max_norm=0.01)), data_of(60, poisoned=40))
    assert [action["iteration"] for action in guard.actions] == [40]


def test_a_window_counts_with_its_mean_loss_and_is_left_out_as_a_whole() -> None:
    guard = SpikeGuard(window=WINDOW, watch="loss")
    engine = build(guard, GradientAccumulation(2))
    run(engine, data_of(80, poisoned=51))
    assert [(action["iteration"], action["batches"]) for action in guard.actions] == [(52, [[1, 50], [1, 51]])]
    assert engine.updates[0].steps == 39


def test_the_losses_of_a_discarded_window_do_not_count() -> None:
    guard = SpikeGuard("stop", window=WINDOW, watch="loss")
    engine = build(guard, GradientAccumulation(2))
    losses: dict[int, float] = {}

    @engine.on(Events.LOSS_COMPUTED)
    def note(engine: Engine) -> None:
        assert engine.state.update.loss is not None
        losses[engine.state.iteration] = engine.state.update.loss.item()

    engine.connect(Events.BACKWARD_COMPLETED(once=5), lambda engine: engine.state.update.skip("a bad batch"))
    run(engine, data_of(9))
    recorded = engine.past.recorded
    windows = {2: (1, 2), 4: (3, 4), 6: (6,), 8: (7, 8), 9: (9,)}
    assert recorded.keys() == windows.keys()
    for end, window in windows.items():
        assert recorded[end]["loss"] == pytest.approx(sum(losses[one] for one in window) / len(window))


def test_two_bad_batches_in_a_row_are_both_found() -> None:
    data = data_of(60, poisoned=40)
    data[40] = data[40][0], data[40][1] * 50
    guard = SpikeGuard(window=WINDOW)
    run(build(guard), data)
    assert [action["iteration"] for action in guard.actions] == [40, 41]


def test_what_is_not_finite_is_left_to_the_other_guard() -> None:
    guard, other = SpikeGuard(window=WINDOW), NonFiniteGuard(check="both")
    run(build(other, guard), data_of(60, poisoned=40, scale=float("inf")))
    assert guard.actions == []
    assert other.skipped == {"main": 1}


def test_a_loss_without_a_logarithm_is_told_once_and_the_norm_is_watched() -> None:
    guard = SpikeGuard(window=WINDOW)

    def negative(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) - 1e6

    engine = Engine(Update.supervised(negative, ADAM), model=network(), seed=0, allow=["W90"])
    engine.attach(guard)
    said = run(engine, data_of(60, poisoned=40))
    assert (
        sum(
            "has no logarithm; while the loss is not positive, only the gradient norm is watched" in one for one in said
        )
        == 1
    )
    assert [action["iteration"] for action in guard.actions] == [40]


def test_spikes_do_not_enter_the_window_and_recorded_values_can_be_judged() -> None:
    guard = SpikeGuard(window=8, sigmas=6)
    calm = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9]
    assert guard.alarms([*calm, 50.0, 50.0, 50.0, 1.0, 50.0]) == [8, 9, 10, 12]
    assert guard.alarms([*calm, float("nan"), 0.0, 1.0, 1.2]) == []
    assert guard.alarms([1.0] * 8 + [1.05, 1.2]) == [9]  # without any deviation, 10 % is the least
    assert guard.alarms([*calm[:7], 50.0]) == []  # the window is not full


# ---- stop ----------------------------------------------------------------------------------------------------------


def test_a_stop_names_the_iteration_and_the_reason() -> None:
    guard = SpikeGuard("stop", window=WINDOW)
    engine = build(guard)
    run(engine, data_of(60, poisoned=40))
    assert engine.state.iteration == 40
    assert engine.updates[0].steps == 39
    assert engine.state.stop_reason is not None
    assert engine.state.stop_reason.startswith("iteration 40: the gradient norm ")


# ---- rewind --------------------------------------------------------------------------------------------------------


def lacking(data: list[Batch], *numbers: int) -> list[Batch]:
    """The data without the batches of these numbers, counted from 1."""
    return [batch for number, batch in enumerate(data, start=1) if number not in numbers]


@pytest.mark.moderate
def test_a_rewind_ends_as_a_run_that_never_sees_these_batches() -> None:
    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    engine = build(guard, EMA(0.9), LRScheduling(partial(OneCycleLR, max_lr=1e-2, total_steps=200)))
    said = run(engine, data_of(60, poisoned=40))
    assert any(
        "goes back from iteration 40 to iteration 34 and skips batches 34 to 39 of epoch 1 (rewind 1 of 3)" in one
        for one in said
    )
    other = build(EMA(0.9), LRScheduling(partial(OneCycleLR, max_lr=1e-2, total_steps=200)))
    run(other, lacking(data_of(60, poisoned=40), *range(35, 41)))
    assert engine.state.iteration == other.state.iteration == 54
    assert weights(engine) == weights(other)
    assert digest(engine.find(EMA).state_dict()) == digest(other.find(EMA).state_dict())


class Samples(Dataset[Batch]):
    """Samples that are augmented at random."""

    def __init__(self, poisoned: int | None) -> None:
        self.poisoned = poisoned

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(5, generator=generator)
        targets = inputs.sin().sum(0, keepdim=True)
        return inputs + 0.01 * torch.randn(5), targets * (100.0 if index == self.poisoned else 1.0)


@pytest.mark.moderate
@pytest.mark.parametrize("workers", kit.quick([0, 2], 0))
def test_a_shuffled_loader_leaves_out_batches_by_epoch_and_index(workers: int) -> None:
    def loader() -> DataLoader[Batch]:
        order = torch.Generator().manual_seed(5)
        return DataLoader(Samples(137), batch_size=4, shuffle=True, generator=order, num_workers=workers)

    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    engine = build(guard)
    used: dict[int, Tensor] = {}  # of an iteration that was made twice, the last counts

    def note(engine: Engine, into: dict[int, Tensor] = used) -> None:
        into[engine.state.iteration] = engine.state.batch[0]

    engine.connect(Events.ITERATION_COMPLETED, note, phase=Phase.RECORD)
    run(engine, loader(), max_epochs=2)
    assert [len(action["batches"]) for action in guard.actions] == [6, 6]  # in each epoch
    # What is trained on is everything but these batches, each batch as an undisturbed run draws it.
    everything: dict[int, Tensor] = {}
    other = build()
    other.connect(Events.ITERATION_COMPLETED, partial(note, into=everything))
    run(other, loader(), max_epochs=2)
    gone = {(epoch - 1) * 50 + index + 1 for action in guard.actions for epoch, index in action["batches"]}
    kept = [batch for number, batch in everything.items() if number not in gone]
    assert list(used) == list(range(1, 89))
    assert all(torch.equal(a, b) for a, b in zip(used.values(), kept, strict=True))


@pytest.mark.moderate
def test_a_spike_at_the_beginning_of_an_epoch_leaves_out_batches_of_two() -> None:
    data = data_of(40)
    model = network()

    class Poisoning:
        """Data whose third batch is poisoned in the second epoch."""

        passes = 0

        def __len__(self) -> int:
            return len(data)

        def __iter__(self) -> Iterator[Batch]:
            self.passes += 1
            for index, (inputs, targets) in enumerate(data):
                yield inputs, targets * (100.0 if (self.passes, index) == (2, 2) else 1.0)

    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    engine = build(guard, model=model)
    lengths = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: lengths.append(engine.state.epoch_iteration))
    run(engine, Poisoning(), max_epochs=3)
    assert guard.actions[0]["batches"] == [[1, 37], [1, 38], [1, 39], [2, 0], [2, 1], [2, 2]]
    assert lengths == [40, 37, 37, 40]  # the first epoch is completed twice


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3])
def test_logs_metrics_checkpoints_and_validations_are_those_of_a_run_without_these_batches(
    tmp_path: Path, window: int
) -> None:
    def engine_of(folder: Path, *handlers: Any) -> Engine:
        model = network()
        evaluator = kit.evaluator_of(model)
        return build(
            *handlers,
            Metrics(train_loss=Average()),
            Validation(evaluator, data_of(3), every="7it", prefix="val_"),
            CSVLogger(folder / "log.csv", every="1it"),
            TensorBoardLogger(folder / "events", every="1it"),
            Histograms(every="7it"),
            History(),
            GradientAccumulation(window),
            Checkpoint(folder / "best", monitor="val_loss", mode="min", keep=2, name="best"),
            Checkpoint(folder / "last", every="9it", keep=1, name="last"),
            model=model,
        )

    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    engine = engine_of(tmp_path / "guarded", guard)
    run(engine, data_of(80, poisoned=60))
    assert len(guard.actions) == 1
    start = guard.actions[0]["iteration"] - 6
    other = engine_of(tmp_path / "other")
    run(other, lacking(data_of(80, poisoned=60), *range(start + 1, start + 7)))
    assert (tmp_path / "guarded" / "log.csv").read_text() == (tmp_path / "other" / "log.csv").read_text()
    assert engine.find(History).records == other.find(History).records
    assert shown(tmp_path / "guarded" / "events") == shown(tmp_path / "other" / "events")
    for folder in ("best", "last"):
        names = [sorted(path.name for path in (tmp_path / one / folder).iterdir()) for one in ("guarded", "other")]
        assert names[0] == names[1]
        for name in names[0]:
            states = [Checkpoint.load(tmp_path / one / folder / name)["modules"] for one in ("guarded", "other")]
            assert digest(states[0]) == digest(states[1])


def spoiled_at(engine: Engine, *places: tuple[int, int]) -> None:
    """Make the loss of these batches, by epoch and index, far too large."""

    @engine.on(Events.LOSS_COMPUTED)
    def spoil(engine: Engine) -> None:
        update = engine.state.update
        if engine.past.places_of([engine.state.iteration])[0] in places and update.loss is not None:
            update.loss = update.loss * 1e4


@pytest.mark.moderate
def test_a_spike_after_a_rewind_may_reach_back_into_the_epoch_before() -> None:
    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    engine = build(guard)
    spoiled_at(engine, (2, 9), (2, 10))
    run(engine, data_of(40), max_epochs=2)
    assert [action["batches"] for action in guard.actions] == [
        [[2, index] for index in range(4, 10)],
        [[1, 39], *([2, index] for index in range(4)), [2, 10]],
    ]
    assert engine.state.iteration == 80 - 12


@pytest.mark.moderate
@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED(once=41), Events.EPOCH_COMPLETED(once=1)])
def test_a_resumed_run_reaches_back_into_the_epoch_before(event: Any) -> None:
    saved: list[bytes] = []

    def save(engine: Engine) -> None:
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
        saved.append(file.getvalue())

    ends = []
    for resumed in (False, True):
        guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
        engine = build(guard)
        spoiled_at(engine, (2, 2))
        if resumed:
            engine.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True))
        else:
            engine.connect(event, save, phase=Phase.PERSIST, rank=50)
        run(engine, data_of(40), max_epochs=3)
        ends.append((guard.actions, weights(engine)))
    assert ends[0] == ends[1]
    assert ends[0][0][0]["batches"] == [[1, 37], [1, 38], [1, 39], [2, 0], [2, 1], [2, 2]]


def test_too_many_rewinds_are_an_error_that_names_the_batches() -> None:
    data = data_of(100)
    for number in (40, 50, 60):
        data[number - 1] = (data[number - 1][0], data[number - 1][1] * 100)
    guard = SpikeGuard("rewind", window=WINDOW, rewind=4, at_most=2)
    engine = build(guard)
    with pytest.raises(
        RuntimeError, match=r"at_most=2 rewinds has been reached; skipped so far: batches 36 to 39 of epoch 1; "
    ):
        run(engine, data)


def test_a_rewind_as_long_as_an_epoch_and_data_that_cannot_go_back_are_refused() -> None:
    data = data_of(10)
    data[5] = (data[5][0], data[5][1] * 100)
    engine = build(SpikeGuard("rewind", window=8, rewind=20))
    engine.connect(Events.EPOCH_STARTED(once=1), lambda engine: None)
    with pytest.raises(ValueError, match="rewind=20 would skip a whole epoch of 10 batches"):
        run(engine, data_of(10), max_epochs=5)
    engine = build(SpikeGuard("rewind", window=8, rewind=5))
    with pytest.raises(ValueError, match=r"is an iterator, which cannot be rewound"):
        engine.run(iter(data_of(10)), max_epochs=1)


def saved_at_each(engine: Engine, data: Any, **bounds: Any) -> list[tuple[int, bytes]]:
    """Run, and save at each iteration, in its last phase."""
    saved: list[tuple[int, bytes]] = []

    def save(engine: Engine) -> None:
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
        saved.append((engine.state.iteration, file.getvalue()))

    engine.connect(Events.ITERATION_COMPLETED, save, phase=Phase.PERSIST, rank=50)
    run(engine, data, **bounds)
    return saved


@pytest.mark.slow
def test_resumed_from_any_iteration_before_in_or_after_a_rewind_it_ends_alike() -> None:
    def engine_of() -> tuple[Engine, SpikeGuard]:
        guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
        return build(guard, EMA(0.9), Metrics(train_loss=Average()), History()), guard

    data = data_of(60, poisoned=40)
    whole, guard = engine_of()
    saved = saved_at_each(whole, data)
    expected = weights(whole), guard.actions, whole.find(History).records
    assert len(guard.actions) == 1
    for iteration, state in saved[18:]:
        engine, other = engine_of()
        engine.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        run(engine, data)
        assert (weights(engine), other.actions, engine.find(History).records) == expected, iteration


class Occurrences(Handler):
    """The iterations at which an interval comes up; those that are made again count once."""

    def __init__(self, every: str, name: str) -> None:
        super().__init__(name=name)
        self.every, self.iterations = every, list[int]()

    @on("every", phase=Phase.RECORD, reads=[], writes=[])
    def note(self, engine: Engine) -> None:
        self.iterations.append(engine.state.iteration)

    def state_dict(self) -> dict[str, Any]:
        return {"iterations": list(self.iterations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iterations = list(state["iterations"])


def data_with_a_spike(length: int, at: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 3, generator=generator) for _ in range(length)]
    return [(x, x.sum(1, keepdim=True).sin() * (1000 if i == at else 1)) for i, x in enumerate(inputs, start=1)]


def with_intervals(guard: SpikeGuard, intervals: Sequence[str], window: int = 1) -> Engine:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    occurrences = [Occurrences(every, name=f"occurrences_{i}") for i, every in enumerate(intervals)]
    validation = Validation(kit.evaluator_of(model), data_with_a_spike(1, 0), every=intervals[0], prefix="val_")
    handlers = [guard, *occurrences, validation, History(), GradientAccumulation(window)]
    return build(*handlers, optimizer=partial(torch.optim.SGD, lr=1e-2), model=model, streams="shared")


def outcome(engine: Engine) -> Any:
    occurrences = {name: one.iterations for name, one in engine.handlers.items() if isinstance(one, Occurrences)}
    return occurrences, weights(engine), engine.find(SpikeGuard).actions, engine.find(History).records


def test_a_resumed_run_that_goes_back_further_has_the_same_events() -> None:
    """The straight run goes back to iteration 4, the resumed one, which has only the oldest state, to its start."""
    intervals, data = ["0.5ep", "1ep", "0.3ep", "3it", "2 steps"], data_with_a_spike(10, 9)

    def engine_of() -> Engine:
        return with_intervals(SpikeGuard("rewind", window=8, rewind=4), intervals)

    straight = engine_of()
    saved = dict(saved_at_each(straight, data, max_epochs=1))
    assert [action["batches"] for action in straight.find(SpikeGuard).actions] == [[[1, 5], [1, 6], [1, 7], [1, 8]]]
    found = outcome(straight)[0]
    assert list(found.values()) == [[5, 6], [6], [3, 6], [3, 6], [2, 4, 6]]
    resumed = engine_of()
    resumed.load_state_dict(torch.load(io.BytesIO(saved[5]), weights_only=True))
    run(resumed, data, max_epochs=1)
    assert outcome(resumed) == outcome(straight)


def test_an_iteration_that_becomes_the_last_of_its_epoch_is_made_again_as_such() -> None:
    """It closes the window, and ends what counts in parts of an epoch, as in a run over the data without the spike."""
    data = data_with_a_spike(12, 12)
    engine = with_intervals(SpikeGuard("rewind", window=8, rewind=2), ["1ep", "0.5ep"])
    run(engine, data, max_epochs=1)
    assert engine.find(SpikeGuard).actions[0]["batches"] == [[1, 10], [1, 11]]
    assert outcome(engine)[0] == {"occurrences_0": [10], "occurrences_1": [6, 10]}
    other = with_intervals(SpikeGuard("rewind", window=8, rewind=2), ["1ep", "5it"])
    run(other, data[:10], max_epochs=1)
    assert weights(engine) == weights(other)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_whichever_state_is_put_back_the_events_are_the_same(seed: int) -> None:
    """Spikes, intervals, accumulation and epochs at random; resumed after every iteration and every epoch."""
    draw = random.Random(seed)
    length, epochs, window = draw.choice([10, 12, 14]), draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 3])
    intervals = draw.sample(["0.5ep", "1ep", "0.3ep", "3it", "2 steps", "0.25ep", "1.5ep", "2ep", "0.1ep", "1it"], 4)
    data = data_with_a_spike(length, draw.randint(1, length))
    options: dict[str, Any] = {"rewind": draw.choice([2, 3, 4, 5]), "keep": draw.choice([2, 4]), "at_most": 9}

    def engine_of() -> Engine:
        return with_intervals(SpikeGuard("rewind", window=8, **options), intervals, window)

    straight = engine_of()
    saved = saved_at_each(straight, data, max_epochs=epochs)
    for iteration, state in saved:
        resumed = engine_of()
        resumed.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        run(resumed, data, max_epochs=epochs)
        assert str(outcome(resumed)) == str(outcome(straight)), iteration


@pytest.mark.moderate
@pytest.mark.parametrize("policy", ["skip", "rewind"])
@pytest.mark.parametrize("event", [Events.FORWARD_STARTED, Events.GRADIENTS_READY, Events.ITERATION_COMPLETED])
def test_preempted_in_the_iteration_of_a_spike_it_ends_alike(policy: Any, event: Any, tmp_path: Path) -> None:
    def engine_of(*handlers: Handler) -> tuple[Engine, SpikeGuard]:
        guard = SpikeGuard(policy, window=WINDOW, rewind=6)
        return build(guard, Metrics(train_loss=Average()), History(), *handlers), guard

    data = data_of(60, poisoned=40)
    whole, guard = engine_of()
    run(whole, data)
    spike = guard.actions[0]["iteration"]
    preempted, _ = engine_of(Checkpoint(tmp_path), Preemption(exit_status=None))
    preempted.connect(event(once=spike), lambda engine: os.kill(os.getpid(), signal.SIGTERM))
    run(preempted, data)
    assert preempted.state.stop_reason == "preempted by SIGTERM"
    resumed, other = engine_of(Checkpoint(tmp_path, resume=True), Preemption(exit_status=None))
    run(resumed, data)
    ended = weights(whole), guard.actions, whole.find(History).records
    assert (weights(resumed), other.actions, resumed.find(History).records) == ended


def test_the_actions_are_exported(tmp_path: Path) -> None:
    guard = SpikeGuard(window=WINDOW)
    run(build(guard), data_of(60, poisoned=40))
    guard.export(tmp_path / "actions.json")
    assert json.loads((tmp_path / "actions.json").read_text()) == guard.actions


def test_switched_off_nothing_is_called() -> None:
    engine = build(SpikeGuard("rewind", window=WINDOW))
    calls: Callable[[], int] = lambda: sum(len(signal.receivers) for signal in engine.signals.all())  # noqa: E731
    with engine.without("spike_guard"):
        assert calls() == 0


@pytest.mark.moderate
@pytest.mark.parametrize("policy", ["skip", "stop", "rewind"])
def test_a_run_without_spikes_is_not_changed(policy: Any) -> None:
    digests = []
    for handlers in ([], [SpikeGuard(policy, window=WINDOW, rewind=6)]):
        engine = build(*handlers, streams="shared")
        run(engine, data_of(40), max_epochs=2)
        digests.append((weights(engine), torch.get_rng_state().sum().item()))
    assert digests[0] == digests[1]


@pytest.mark.moderate
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_from_before_is_still_there_once_a_better_one_is_rewound(tmp_path: Path, asynchronous: bool) -> None:
    data = data_of(60, poisoned=40)

    def engine_of(folder: Path, *handlers: Any) -> Engine:
        best = Checkpoint(folder, monitor="score", mode="max", keep=1, asynchronous=asynchronous)
        engine = build(*handlers, best)
        engine.state.metrics.announce("user", ["score"])

        @engine.on(Events.ITERATION_COMPLETED)
        def score(engine: Engine) -> None:
            for number, value in ((12, 1.0), (38, 2.0)):
                if torch.equal(engine.state.batch[0], data[number - 1][0]):
                    engine.log("score", value)

        return engine

    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    run(engine_of(tmp_path / "guarded", guard), data)
    run(engine_of(tmp_path / "other"), lacking(data, *range(35, 41)))
    assert len(guard.actions) == 1
    names = [sorted(path.name for path in (tmp_path / one).iterdir()) for one in ("guarded", "other")]
    assert names[0] == names[1]
    assert len(names[0]) == 1
    states = [Checkpoint.load(tmp_path / one / names[0][0])["modules"] for one in ("guarded", "other")]
    assert digest(states[0]) == digest(states[1])


@pytest.mark.moderate
def test_a_resumed_run_keeps_the_best_from_before_as_well(tmp_path: Path) -> None:
    data = data_of(60, poisoned=40)

    def engine_of() -> tuple[Engine, SpikeGuard]:
        guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
        engine = build(
            guard,
            Checkpoint(tmp_path / "best", monitor="score", mode="max", keep=1, name="best"),
            Checkpoint(tmp_path / "last", every="1it", keep=1, resume=True, name="last"),
        )
        engine.state.metrics.announce("user", ["score"])

        @engine.on(Events.ITERATION_COMPLETED)
        def score(engine: Engine) -> None:
            for number, value in ((12, 1.0), (38, 2.0), (39, 3.0)):
                if torch.equal(engine.state.batch[0], data[number - 1][0]):
                    engine.log("score", value)

        return engine, guard

    def fail(engine: Engine) -> None:
        raise ArithmeticError

    failing, _ = engine_of()
    failing.connect(Events.ITERATION_STARTED(once=39), fail)
    with pytest.raises(ArithmeticError):
        run(failing, data)
    engine, guard = engine_of()
    run(engine, data)
    assert [action["iteration"] for action in guard.actions] == [40]
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["best-epoch0001-iter00000012"]


PROGRAM = """
import os, sys, warnings
from pathlib import Path
import torch
torch.set_num_threads(1)
warnings.simplefilter("ignore")
from tests.handlers.test_spike_guard import *

folder, killed = Path(sys.argv[1]), int(sys.argv[2])
guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
engine = build(
    guard, EMA(0.9), Metrics(train_loss=Average()), History(), CSVLogger(folder / "log.csv", every="1it"),
    Checkpoint(folder / "saved", every="5it", keep=2, resume=True),
)
made = []

def die(engine):
    made.append(1)
    if len(made) == killed:
        os.kill(os.getpid(), 9)

engine.connect(Events.LOSS_COMPUTED, die)
engine.run(data_of(60, poisoned=40), max_epochs=1)
print(weights(engine), len(guard.actions))
"""


def _run(folder: Path, name: str, *, killed: int = 0) -> subprocess.CompletedProcess[str]:
    """A training whose process is killed at its n-th loss, or never."""
    (folder / "program.py").write_text(PROGRAM)
    return run_program("program.py", name, killed, cwd=folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the training prints that is not killed, and its log."""
    folder = tmp_path_factory.mktemp("whole")
    ended = _run(folder, "whole")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, (folder / "whole" / "log.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", [3, 41, 47, *[pytest.param(at, marks=pytest.mark.campaign) for at in (36, 39, 43, 60)]]
)
def test_killed_before_in_or_after_a_rewind_it_ends_alike(tmp_path: Path, whole: tuple[str, str], killed: int) -> None:
    died = _run(tmp_path, "killed", killed=killed)
    assert died.returncode == -9, died.stderr
    resumed = _run(tmp_path, "killed")
    assert (resumed.stdout, (tmp_path / "killed" / "log.csv").read_text()) == whole, resumed.stderr
    assert resumed.stdout.endswith(" 1\n")


def _of_two() -> list[tuple[int, list[dict[str, Any]], str]]:
    # Batches of different sizes, which count by them.
    data = [
        (inputs[: 16 - i % 5], targets[: 16 - i % 5]) for i, (inputs, targets) in enumerate(data_of(120, poisoned=80))
    ]
    found = []
    for guarded in (True, False):
        guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
        engine = build(DistributedDataParallel(), *([guard] if guarded else []))
        run(engine, data if guarded else lacking(data, *range(69, 81)))
        found.append((engine.state.iteration, guard.actions, weights(engine)))
    return found


def _of_two_sharded() -> list[tuple[int, str]]:
    found = []
    for guarded in (True, False):
        data = data_of(120, poisoned=80) if guarded else lacking(data_of(120, poisoned=80), *range(69, 81))
        guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
        engine = build(FullyShardedDataParallel(), *([guard] if guarded else []))
        run(engine, data)
        found.append((engine.state.iteration, fingerprint(engine, handlers=False)["modules.model"]))
    return found


@pytest.mark.slow
def test_a_sharded_model_goes_back_each_rank_with_its_part() -> None:
    for guarded, other in run_together(_of_two_sharded, 2):
        assert guarded == other
        assert guarded[0] == 54


@pytest.mark.slow
def test_two_processes_go_back_together() -> None:
    first, second = run_together(_of_two, 2)
    assert first == second
    (iteration, actions, ends), (_, _, without) = first
    assert ends == without
    assert [action["iteration"] for action in actions] == [40]  # the batch of rank 1 in the 40th round
    assert actions[0]["batches"] == [[1, index] for index in range(34, 40)]
    assert iteration == 54


@pytest.mark.moderate
def test_a_spike_that_several_steps_of_an_iteration_see_is_one_rewind() -> None:
    generator = torch.Generator().manual_seed(4)
    data = []
    for number in range(1, 61):
        inputs = torch.randn(4, 8, 3, generator=generator)
        targets = inputs.cumsum(1).mean(2, keepdim=True).expand(-1, -1, 4)
        data.append((inputs, targets * (200.0 if number == 40 else 1.0)))

    def forward(engine: Engine, batch: Batch) -> Tensor:
        output: Tensor
        output, engine.state.update.hidden = engine.model(batch[0], engine.state.update.hidden)
        return output

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])

    torch.manual_seed(1)
    engine = Engine(Update(forward, loss, ADAM), model=nn.GRU(3, 4, batch_first=True), seed=0)
    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    engine.attach(TruncatedBPTT(2), guard)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(data, max_epochs=1)
    assert [action["iteration"] for action in guard.actions] == [40]
    assert engine.state.iteration == 54


def test_two_updates_that_spike_in_one_iteration_are_one_rewind() -> None:
    models = {"a": kit.linear(5, 1), "b": kit.linear(5, 1)}

    def update(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: nn.functional.mse_loss(models[name](batch[0]), batch[1]),
            partial(torch.optim.SGD, lr=0.01),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    engine.attach(guard)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(data_of(60, poisoned=40, scale=1000.0), max_epochs=1)
    assert [action["iteration"] for action in guard.actions] == [40]


def test_a_level_that_stays_is_usual_after_twenty_steps() -> None:
    data = data_of(60) + [(inputs, 30 * targets) for inputs, targets in data_of(60)]
    guard = SpikeGuard(window=WINDOW)
    engine = Engine(Update.supervised(nn.functional.mse_loss, ADAM), model=network(), seed=0)
    engine.attach(guard)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run(data, max_epochs=1)
    reported = [str(one.message) for one in caught if "accepts the new level as normal" in str(one.message)]
    assert len(reported) == 1
    assert "has skipped 20 steps of update 'main' in a row (the " in reported[0]
    assert "; from iteration 81 on, it accepts" in reported[0]
    assert [action["iteration"] for action in guard.actions] == [*range(61, 81)]
    assert engine.updates[0].steps == 100


def test_a_single_state_is_too_few_to_rewind() -> None:
    with pytest.raises(ValueError, match=r"SpikeGuard\(policy='rewind', keep=1\): .* set keep=2 or more"):
        SpikeGuard("rewind", keep=1)


@pytest.mark.moderate
def test_patience_plateaus_averages_histories_and_text_logs_go_back_too(tmp_path: Path) -> None:
    """Their states and files are those of a run that has never seen the batches that are left out."""

    def engine_of(folder: Path, *handlers: Any) -> Engine:
        model = network()
        plateau = partial(ReduceLROnPlateau, patience=1, factor=0.5, threshold=0.02)
        return build(
            *handlers,
            Validation(kit.evaluator_of(model), data_of(3), every="3it", prefix="val_"),
            EarlyStopping("val_loss", patience=4, mode="min", restore_best=True, min_delta=0.001),
            LRScheduling(plateau, monitor="val_loss"),
            JSONLinesLogger(folder / "log.jsonl", every="1it"),
            EMA(0.9),
            History(),
            model=model,
        )

    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    (tmp_path / "guarded").mkdir()
    (tmp_path / "other").mkdir()
    guarded = engine_of(tmp_path / "guarded", guard)
    run(guarded, data_of(80, poisoned=60))
    assert [action["iteration"] for action in guard.actions] == [60]
    other = engine_of(tmp_path / "other")
    run(other, lacking(data_of(80, poisoned=60), *range(55, 61)))
    assert weights(guarded) == weights(other)
    for name in ("early_stopping", "lr_scheduling", "ema", "history"):
        assert digest(guarded.handlers[name].state_dict()) == digest(other.handlers[name].state_dict()), name
    logs = [(tmp_path / folder / "log.jsonl").read_text() for folder in ("guarded", "other")]
    assert logs[0] == logs[1]
    assert len(logs[0].splitlines()) > 70


@pytest.mark.moderate
@pytest.mark.parametrize(
    "way", ["SAM", pytest.param("LBFGS", marks=needs_torch(2, 9, why="an LBFGS whose loss has no spikes of its own"))]
)
def test_steps_that_compute_their_gradients_several_times_go_back_as_well(way: str) -> None:
    def engine_of(*handlers: Any) -> Engine:
        if way == "LBFGS":
            return build(*handlers, optimizer=partial(torch.optim.LBFGS, lr=0.1, max_iter=2))
        return build(*handlers, SharpnessAwareMinimization(0.05))

    guard = SpikeGuard("rewind", window=WINDOW, rewind=6)
    guarded = engine_of(guard)
    run(guarded, data_of(80, poisoned=60))
    assert [action["iteration"] for action in guard.actions] == [60]
    other = engine_of()
    run(other, lacking(data_of(80, poisoned=60), *range(55, 61)))
    assert weights(guarded) == weights(other)


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ({"max_steps": 30}, [("update 'a' takes only 30 steps", "use a smaller window=, but at least 8")]),
        (
            {"max_iters": 1},
            [(f"update {name!r} takes only 1 step", "omit 'spike_guard' in runs this short") for name in "ab"],
        ),
    ],
)
def test_a_run_that_is_too_short_is_reported_for_the_updates_whose_steps_are_known(
    bounds: Any, found: list[tuple[str, str]]
) -> None:
    models = {"a": kit.linear(5, 1), "b": kit.linear(5, 1)}
    updates = [
        Update.from_function(lambda engine, batch: batch[0].sum(), ADAM, name=name, parameters=name) for name in models
    ]
    engine = Engine(updates, model=models)
    engine.attach(SpikeGuard())
    said = [one for one in engine.check([], **bounds) if one.code == "C39"]
    assert [(one.sentence.partition("but ")[2], one.way_out) for one in said] == found


def test_spikes_that_are_too_close_for_the_kept_states_say_what_to_increase() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 8, 3, generator=generator)
    targets = inputs.sum(2, keepdim=True) + 0.1 * torch.randn(40, 8, 1, generator=generator)
    targets[24:26] *= 1000
    torch.manual_seed(0)
    update = Update.supervised(nn.functional.mse_loss, torch.optim.Adam, lr=0.01)
    engine = Engine(update, model=nn.Linear(3, 1), seed=0, allow=["W19", "C13"])
    engine.attach(SpikeGuard("rewind", window=10, rewind=6, keep=2, at_most=9))
    with pytest.raises(RuntimeError, match=r"the oldest of the keep=2 states is from iteration .*; increase keep="):
        engine.run(list(zip(inputs, targets, strict=True)), max_epochs=1)
