"""Errors leave run() with everything cleaned up and everything said: in the step, in a handler, by Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.handlers import GradientAccumulation, MixedPrecision, TensorBoardLogger
from signalfire.testing import trace
from tests.kit import LIMIT, python

Batch = tuple[Tensor, Tensor]
DATA: list[Batch] = [(torch.ones(4, 3), torch.ones(4, 2))] * 5


def make_engine(*, fail_at: int = 0, error: BaseException | None = None) -> Engine:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def forward(engine: Engine, batch: Batch) -> Tensor:
        if error is not None and engine.state.iteration == fail_at:
            raise error
        output: Tensor = model(batch[0])
        return output

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])

    return Engine(Update(forward, loss, partial(torch.optim.SGD, lr=0.1)), model=model)


class Regions(Handler):
    """Opens a region in every place where one can be opened, and remembers how each was left."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.left: list[tuple[str, str]] = []

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        self.open.append(name)
        try:
            yield
        except BaseException as error:
            self.left.append((name, type(error).__name__))
            raise
        else:
            self.left.append((name, "in peace"))
        finally:
            assert self.open.pop() == name, "not last in, first out"

    @on(Events.STARTED)
    def run(self, engine: Engine) -> None:
        engine.regions.enter(self.region("run"))

    @on(Events.UPDATE_STARTED)
    def update(self, engine: Engine) -> None:
        engine.regions.enter(self.region("update"))

    @on(Events.FORWARD_STARTED)
    def forward(self, engine: Engine) -> None:
        engine.regions.enter(self.region("outer"))
        engine.regions.enter(self.region("inner"))


def names(seen: list[tuple[str, int, int]]) -> list[str]:
    return [name for name, _, _ in seen]


def test_an_error_in_the_step_closes_every_region_and_leaves_with_its_place() -> None:
    engine = make_engine(fail_at=3, error=ArithmeticError("broken step"))
    regions = Regions()
    engine.attach(regions)
    seen = trace(engine)
    with pytest.raises(ArithmeticError, match="broken step") as caught:
        engine.run(DATA, max_epochs=2)
    assert caught.value.__notes__ == ["in the forward of update 'main', epoch 1, iteration 3"]
    assert regions.open == []
    assert regions.left[-4:] == [(name, "ArithmeticError") for name in ("inner", "outer", "update", "run")]
    assert names(seen)[-3:] == ["FORWARD_STARTED", "EXCEPTION_RAISED", "ENDED"]
    assert engine.state.exception is None, "holding the error would hold its frames, and with them the engine"


def test_an_error_in_a_handler_names_handler_event_epoch_and_iteration() -> None:
    class Faulty(Handler):
        @on(Events.BACKWARD_COMPLETED(once=2))
        def act(self, engine: Engine) -> None:
            raise LookupError("broken handler")

    engine = make_engine()
    regions = Regions()
    engine.attach(Faulty(name="my_faulty"), regions)
    with pytest.raises(LookupError) as caught:
        engine.run(DATA, max_epochs=1)
    assert caught.value.__notes__[0] == "raised by my_faulty.act at Events.BACKWARD_COMPLETED, epoch 1, iteration 2"
    assert regions.open == []


def test_every_exception_handler_runs_once_and_the_first_error_leaves() -> None:
    engine = make_engine(fail_at=1, error=ArithmeticError("the error"))
    ran: list[str] = []

    def connect(name: str, event: Events, fails: bool) -> None:
        def receiver(engine: Engine) -> None:
            ran.append(name)
            assert engine.state.exception is not None
            if fails:
                raise LookupError(f"{name} fails")

        engine.connect(event, receiver)

    connect("raised 1", Events.EXCEPTION_RAISED, True)
    connect("raised 2", Events.EXCEPTION_RAISED, False)
    connect("ended 1", Events.ENDED, True)
    connect("ended 2", Events.ENDED, False)
    with pytest.raises(ArithmeticError, match="the error") as caught:
        engine.run(DATA, max_epochs=1)
    assert ran == ["raised 1", "raised 2", "ended 1", "ended 2"]
    notes = "\n".join(caught.value.__notes__)
    assert "another error: LookupError: raised 1 fails" in notes
    assert "another error: LookupError: ended 1 fails" in notes


def test_an_error_in_ended_alone_leaves_after_the_others_have_run() -> None:
    engine = make_engine()
    ran: list[str] = []

    @engine.on(Events.ENDED)
    def first(engine: Engine) -> None:
        raise LookupError("cleanup")

    @engine.on(Events.ENDED)
    def second(engine: Engine) -> None:
        ran.append("second")

    with pytest.raises(LookupError, match="cleanup"):
        engine.run(DATA, max_epochs=1)
    assert ran == ["second"]
    assert not engine.running


def test_an_error_while_a_batch_is_read_names_epoch_and_iteration() -> None:
    def batches() -> Iterator[Batch]:
        yield DATA[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        make_engine().run(batches(), max_epochs=1)
    assert "epoch 1" in caught.value.__notes__[0]


def test_keyboard_interrupt_is_emitted_as_interrupted_and_never_swallowed() -> None:
    engine = make_engine(fail_at=2, error=KeyboardInterrupt())
    regions = Regions()
    engine.attach(regions)
    seen = trace(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.run(DATA, max_epochs=1)
    assert regions.open == []
    assert names(seen)[-2:] == ["INTERRUPTED", "ENDED"]
    assert "EXCEPTION_RAISED" not in names(seen)


def test_after_an_error_the_engine_can_run_on() -> None:
    engine = make_engine()
    engine.attach(GradientAccumulation(2), MixedPrecision("fp16"))
    with engine.connect(Events.BACKWARD_COMPLETED(once=3), fail), pytest.raises(ArithmeticError):
        engine.run(DATA, max_epochs=1)
    assert engine.state.iteration == 2, "an iteration that was cut short was not made"
    assert all(p.grad is None for p in engine.model.parameters()), "an open window is discarded"
    state = engine.run(DATA, max_epochs=2)
    assert (state.epoch, state.iteration) == (2, 10)


def fail(engine: Engine) -> None:
    raise ArithmeticError


def test_files_are_complete_after_an_error(tmp_path: Path) -> None:
    engine = make_engine(fail_at=5, error=ArithmeticError())
    logger = TensorBoardLogger(tmp_path, every="1it")
    engine.attach(logger)
    with pytest.raises(ArithmeticError):
        engine.run(DATA, max_epochs=1)
    assert logger.writer is None
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


SCRIPT = """
import sys
sys.modules["tabulate"] = None  # where it is there, torch imports it at exit, and Python forgets that it was interrupted
import torch
from signalfire import Engine, Events, Update
from signalfire.handlers import ProgressBar, TensorBoardLogger
model = torch.nn.Linear(3, 2)
update = Update.supervised(torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1))
engine = Engine(update, model=model)
engine.attach(TensorBoardLogger(sys.argv[1], every="1it"), ProgressBar())
engine.connect(Events.INTERRUPTED, lambda engine: print("interrupted", flush=True))
engine.connect(Events.ENDED, lambda engine: print("ended at", engine.state.iteration, flush=True))
engine.connect(Events.ITERATION_COMPLETED(once=20), lambda engine: print("under way", flush=True))
engine.run([(torch.ones(4, 3), torch.ones(4, 2))], max_epochs=10**9)
"""


@pytest.mark.slow
def test_ctrl_c_in_a_real_process_ends_it_cleanly(tmp_path: Path) -> None:
    with python("-c", SCRIPT, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT)
    assert output.splitlines()[0] == "interrupted"
    last = int(output.splitlines()[1].removeprefix("ended at "))
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert "iteration" in errors
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) in (last, last - 1)


def test_an_error_inside_an_evaluation_names_both_places() -> None:
    trainer = make_engine()
    evaluator = Engine(Update.prediction(lambda engine, batch: batch), model=trainer.model)
    regions = Regions()
    trainer.attach(regions)

    @evaluator.on(Events.ITERATION_COMPLETED(once=2))
    def fail(engine: Engine) -> None:
        raise LookupError("inside")

    @trainer.on(Events.EVALUATION_STARTED)
    def around(engine: Engine) -> None:
        engine.regions.enter(regions.region("evaluation"))

    @trainer.on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE)
    def validate(engine: Engine) -> None:
        engine.evaluate(evaluator, [1, 2, 3])

    with pytest.raises(LookupError) as caught:
        trainer.run(DATA, max_epochs=1)
    notes = "\n".join(caught.value.__notes__)
    assert "fail at Events.ITERATION_COMPLETED, epoch 1, iteration 2" in notes
    assert "validate at Events.EPOCH_COMPLETED, epoch 1, iteration 5" in notes
    assert ("evaluation", "LookupError") in regions.left
    assert regions.open == []
    assert trainer.model.training
