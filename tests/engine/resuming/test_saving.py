"""What a saved state holds, what a run that is cut and continued comes to, and what is not lost on the way."""

from __future__ import annotations

import io
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, seed_everything
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    GradientNorms,
    LimitBatches,
    Metrics,
    MixedPrecision,
    ProgressBar,
)
from tests import kit
from tests.kit import LIMIT, build, linear

SGD = partial(torch.optim.SGD, lr=0.1)


def make_data() -> list[tuple[Tensor, Tensor]]:
    return kit.batches(5, 3, 1, seed=0)


DATA = make_data()


def make_engine(optimizer: Any = SGD) -> Engine:
    return build(linear(3, 1, seed=0), optimizer=optimizer)


# ---- what a saved state holds -------------------------------------------------------------------------------------


def always_the_same(engine: Engine) -> None:
    engine.state.metrics["m"] = 1.0


def test_a_stop_that_was_asked_for_when_the_state_was_saved_holds(tmp_path: Path) -> None:
    def build() -> Engine:
        engine = make_engine()
        engine.attach(EarlyStopping("m", mode="min", patience=2), Checkpoint(tmp_path))
        engine.connect(Events.EPOCH_COMPLETED, always_the_same, phase=Phase.PREPARE)
        return engine

    assert build().run(DATA, max_epochs=20).epoch == 3
    for _ in range(2):
        resumed = build()
        resumed.load_state_dict(Checkpoint.load(tmp_path))
        resumed.run(DATA, max_epochs=20)
        assert resumed.state.epoch == 3
    assert resumed.state.stop_reason is not None


@pytest.mark.parametrize("how", ["terminate", "terminate_epoch"])
def test_a_run_resumed_from_the_event_of_a_stop_ends_where_the_other_ends(how: str) -> None:
    saved: list[dict[str, Any]] = []

    def build() -> Engine:
        engine = make_engine()

        def stop(engine: Engine) -> None:
            getattr(engine, how)("enough")

        engine.connect(Events.ITERATION_COMPLETED(once=2), stop)
        engine.connect(
            Events.ITERATION_COMPLETED(once=2), lambda engine: saved.append(engine.state_dict()), phase=Phase.PERSIST
        )
        return engine

    whole = build().run(DATA, max_epochs=3, min_epochs=2)
    resumed = build()
    resumed.load_state_dict(saved[0])
    state = resumed.run(DATA, max_epochs=3, min_epochs=2)
    assert (state.epoch, state.iteration, state.stop_reason) == (whole.epoch, whole.iteration, whole.stop_reason)


def test_numpys_numbers_are_saved_as_plain_ones_and_its_arrays_are_refused() -> None:
    engine = make_engine(partial(torch.optim.SGD, lr=np.logspace(-3, -1, 3)[1]))
    engine.run(DATA, max_epochs=1)
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    engine.state.metrics["confusion"] = np.eye(3)
    with pytest.raises(TypeError, match=r"NumPy array of shape \(3, 3\).*torch.from_numpy"):
        engine.state_dict()


@pytest.mark.parametrize("python", [torch.tensor, list])
def test_random_states_of_earlier_files_are_still_read(python: Callable[[list[int]], Any]) -> None:
    engine = make_engine()
    engine.run(DATA, max_epochs=1)
    state = engine.state_dict()
    expected = random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()
    for kind in ("python", "numpy"):
        words = state["random"][kind][1]
        assert isinstance(words, bytes)
        numbers = np.frombuffer(words, dtype="<u4").tolist()
        state["random"][kind][1] = torch.tensor(numbers) if kind == "numpy" else python(numbers)
    other = make_engine()
    other.load_state_dict(state)
    found: list[tuple[float, ...]] = []
    other.connect(
        Events.CHECKPOINT_LOADED,
        lambda engine: found.append(
            (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item())
        ),
    )
    other.run(DATA, max_epochs=2)
    assert found == [expected]


def test_a_state_saved_before_the_first_run_is_where_a_run_begins() -> None:
    engine, other = make_engine(), make_engine()
    other.load_state_dict(engine.state_dict())
    assert other.run(DATA, max_epochs=1).iteration == len(DATA)


def test_a_state_of_another_optimizer_is_refused() -> None:
    engine, other = make_engine(partial(torch.optim.Adam, lr=0.1)), make_engine()
    engine.run(DATA, max_epochs=1)
    other.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match="used the optimizer Adam, but now uses SGD"):
        other.run(DATA, max_epochs=2)


def test_the_metrics_of_a_state_can_be_pickled() -> None:
    engine = make_engine()
    engine.state.metrics["m"] = 1.0
    assert pickle.loads(pickle.dumps(engine.state.metrics)) == {"m": 1.0}


class Drawing:
    """Unsized data that draws from the global generator."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(5):
            yield torch.randn(4, 3), torch.randn(4, 1)


@pytest.mark.parametrize("cut", [1, 3, 5, 7])
@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
def test_a_bound_inside_an_epoch_of_unsized_data_shifts_no_draw(cut: int) -> None:
    def weights(*bounds: dict[str, Any]) -> Tensor:
        engine, data = make_engine(), Drawing()
        seed_everything(0)
        for bound in bounds:
            engine.run(data, **bound)
        weight: Tensor = next(engine.model.parameters())
        return weight.clone()

    assert weights({"max_iters": cut}, {"max_epochs": 3}).equal(weights({"max_epochs": 3}))


# ---- skips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.UPDATE_STARTED])
def test_a_skip_asked_for_before_the_update_holds_for_this_iteration(event: Events) -> None:
    engine, reported = make_engine(), []
    engine.connect(event(once=2), lambda engine: engine.state.update.skip("not this one"))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: reported.append(engine.state.update.skipped))
    engine.run(DATA, max_epochs=1)
    assert reported == [None, "not this one", *[None] * (len(DATA) - 2)]
    assert engine.updates[0].steps == len(DATA) - 1


# ---- handlers -----------------------------------------------------------------------------------------------------


def test_a_batch_whose_update_was_interrupted_is_measured_once() -> None:
    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    engine = make_engine()
    engine.attach(Metrics(loss=Average()))
    with engine.connect(Events.BACKWARD_STARTED(once=2), interrupt), pytest.raises(KeyboardInterrupt):
        engine.run(DATA, max_epochs=1)
    metrics = engine.handlers["metrics"]
    assert isinstance(metrics, Metrics)
    engine.run(DATA, max_epochs=1)
    assert metrics.metrics["loss"].state_dict()["weight"] == sum(len(x) for x, _ in DATA)


def test_a_progress_bar_goes_on_in_a_resumed_epoch() -> None:
    engine, resumed, file = make_engine(), make_engine(), io.StringIO()
    engine.run(DATA, max_iters=2)
    resumed.attach(ProgressBar(file=file))
    resumed.load_state_dict(engine.state_dict())
    resumed.run(DATA, max_epochs=1)
    seconds = re.search(r"([\d.]+)s", file.getvalue())
    assert seconds is not None
    assert float(seconds[1]) < 100


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.pt").write_text("not a checkpoint")
    with pytest.raises(ValueError, match=r"no\.pt.*not a checkpoint"):
        Checkpoint.load(tmp_path / "no.pt")


FULL_DISK = """
import resource, signal, sys, torch
from functools import partial
from signalfire import Engine, Update
from signalfire.handlers import Checkpoint, TensorBoardLogger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = torch.nn.Linear(3, 1)
engine = Engine(Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)), model=model)
handler = {"checkpoint": lambda: Checkpoint(sys.argv[1], keep=3),
           "tensorboard": lambda: TensorBoardLogger(sys.argv[1], every="1it")}[sys.argv[2]]()
engine.attach(handler)
data = [(torch.ones(2, 3), torch.ones(2, 1))] * 5
engine.run(data, max_epochs=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    engine.run(data, max_epochs=400)
except OSError as error:
    print("OSError", getattr(handler, "kept", ""))
"""


@pytest.mark.slow
@pytest.mark.parametrize("handler", ["checkpoint", "tensorboard"])
def test_a_full_disk_is_an_error_and_no_end_of_waiting(handler: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), handler]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert result.stdout.startswith("OSError"), result.stderr
    if handler == "checkpoint":
        (file,) = tmp_path.iterdir()
        assert file.name in result.stdout
        assert "epoch0002" not in result.stdout, "what could not be written is not kept"


# ---- windows --------------------------------------------------------------------------------------------------------


def test_a_window_made_with_a_handler_that_is_not_here_is_discarded_and_said_so() -> None:
    engine = make_engine()
    engine.attach(GradientAccumulation(4), MixedPrecision("fp16"))
    engine.run(DATA, max_iters=2)
    state = engine.state_dict()

    resumed = make_engine()
    resumed.attach(GradientAccumulation(4))
    resumed.load_state_dict(state, allow=["mixed_precision"])
    with pytest.warns(UserWarning, match="window of update 'main' are discarded, .* 'mixed_precision'"):
        resumed.run(DATA, max_epochs=1)
    plain = nn.Linear(3, 1)
    plain.load_state_dict(state["modules"]["model"])
    optimizer = SGD(plain.parameters())
    for x, y in DATA[2:]:  # the rest of the epoch makes a window of three
        (nn.functional.mse_loss(plain(x), y) / 3).backward()
    optimizer.step()
    torch.testing.assert_close(resumed.model.weight, plain.weight)


@pytest.mark.parametrize(
    "observer",
    [lambda: Metrics(loss=Average(), name="gone"), lambda: EMA(0.9, name="gone"), lambda: GradientNorms(name="gone")],
)
@pytest.mark.filterwarnings("ignore:C17:signalfire.FindingWarning")
def test_what_has_no_hand_in_the_gradients_costs_no_window_if_it_is_not_here(observer: Callable[[], Handler]) -> None:
    engine = make_engine()
    engine.attach(GradientAccumulation(4), observer())
    engine.run(DATA, max_iters=2)
    resumed = make_engine()
    resumed.attach(GradientAccumulation(4))
    resumed.load_state_dict(engine.state_dict(), allow=["gone"])
    resumed.run(DATA, max_epochs=1)
    engine.run(DATA, max_epochs=1)
    assert torch.equal(engine.model.weight, resumed.model.weight)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_kept_batches_that_would_not_load_safely_are_refused_by_name() -> None:
    engine = make_engine(partial(torch.optim.LBFGS, max_iter=2))
    engine.attach(GradientAccumulation(2))
    data = [Pair(x, y) for x, y in DATA]
    engine.run(data, max_iters=1)
    with pytest.raises(TypeError, match=r"keeps batches that contain a Pair.*save at the end of a window"):
        engine.state_dict()
    engine.run(data, max_iters=2)
    assert engine.state_dict()["updates"]["main"]["window"] is None


def test_a_limit_before_the_loaded_position_is_reported() -> None:
    engine = make_engine()
    engine.run(DATA, max_iters=4)
    resumed = make_engine()
    resumed.attach(LimitBatches(2))
    resumed.load_state_dict(engine.state_dict(), allow=["limit_batches"])
    with pytest.raises(
        ValueError, match="had read 4 batches of its epoch, but a handler limits this data to its first 2 batches"
    ):
        resumed.run(DATA, max_epochs=2)
