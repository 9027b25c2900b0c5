"""States that are taken inside an event, and events that an error cuts short."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.checkpoints import Files
from signalfire.core.events import AnyEvent, EventEnum
from signalfire.handlers import (
    Average,
    Checkpoint,
    DistributedDataParallel,
    EarlyStopping,
    GradientAccumulation,
    History,
    LRScheduling,
    Metrics,
    Rewindable,
    Validation,
)
from tests import kit
from tests.processes import run_together

BATCHES = kit.batches(4, 3, 1, seed=0)
HELD_OUT = kit.batches(2, 3, 1, seed=5)
SGD = partial(torch.optim.SGD, lr=0.2)


def interrupt_at(engine: Engine, event: AnyEvent, *, phase: Phase = Phase.RECORD, times: int = 1) -> None:
    """Interrupt a run, as Ctrl-C does."""
    calls: list[int] = []

    def interrupt(engine: Engine) -> None:
        calls.append(1)
        if len(calls) <= times:
            raise KeyboardInterrupt

    engine.connect(event, interrupt, phase=phase)


def make_trainer(*handlers: Handler, every: str = "2it", **options: Any) -> tuple[Engine, Engine]:
    model = kit.linear(3, 1, seed=0)
    trainer, evaluator = kit.build(model, optimizer=SGD), kit.evaluator_of(model)
    plateau = partial(ReduceLROnPlateau, patience=0, threshold=0.5, factor=0.1)
    trainer.attach(Validation(evaluator, HELD_OUT, every=every, **options), LRScheduling(plateau, monitor="loss"))
    trainer.attach(*handlers)
    return trainer, evaluator


def train_twice(trainer: Engine, **bounds: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, **bounds)
    trainer.run(BATCHES, **bounds)


def rate(engine: Engine) -> float:
    optimizer = engine.updates[0].optimizer
    assert optimizer is not None
    value: float = optimizer.param_groups[0]["lr"]
    return value


# ---- states that are taken inside an event --------------------------------------------------------------------------


def by_hand(iterations: int) -> tuple[nn.Linear, float]:
    """The training of `make_trainer` as a plain loop; the model and its last rate."""
    model = kit.linear(3, 1, seed=0)
    optimizer = SGD(model.parameters())
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.1)
    for iteration in range(1, iterations + 1):
        x, y = BATCHES[(iteration - 1) % len(BATCHES)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if iteration % 2 == 0:
            with torch.no_grad():
                losses = [nn.functional.mse_loss(model(x), y).item() * len(x) for x, y in HELD_OUT]
            schedule.step(sum(losses) / sum(len(x) for x, _ in HELD_OUT))
    return model, optimizer.param_groups[0]["lr"]


def test_a_checkpoint_at_an_evaluation_holds_what_follows_from_it(tmp_path: Path) -> None:
    trainer, _ = make_trainer(Checkpoint(tmp_path, every=Events.EVALUATION_COMPLETED, keep=9))
    trainer.run(BATCHES, max_epochs=2)
    plain, its_rate = by_hand(8)
    assert rate(trainer) == its_rate < 0.2
    versions = sorted(tmp_path.iterdir())
    assert [one.name[-2:] for one in versions] == ["02", "04", "06", "08"]
    for version in versions[:3]:
        resumed, _ = make_trainer(Checkpoint(tmp_path / "again", every=Events.EVALUATION_COMPLETED))
        resumed.load_state_dict(Checkpoint.load(version))
        resumed.run(BATCHES, max_epochs=2)
        assert rate(resumed) == its_rate
        assert torch.equal(resumed.model.weight, plain.weight)


class Own(EventEnum):
    REACHED = "reached"


@pytest.mark.parametrize(
    ("fired_at", "expected"),
    [
        (Events.EPOCH_STARTED, [0, 4]),
        (Events.ITERATION_COMPLETED(once=3), [3]),
        (Events.GET_BATCH_STARTED(once=3), [3]),  # the state after the iteration that was under way
        (Events.GRADIENTS_READY(once=3), [3]),
        (Events.EPOCH_COMPLETED, [4, 8]),
        (Events.COMPLETED, [8]),
    ],
    ids=str,
)
def test_a_checkpoint_at_an_event_of_ones_own_is_that_of_the_event_around_it(
    tmp_path: Path, fired_at: AnyEvent, expected: list[int]
) -> None:
    trainer, _ = make_trainer(Checkpoint(tmp_path, every=Own.REACHED, keep=9), EarlyStopping("loss", patience=9))
    trainer.connect(fired_at, lambda engine: engine.fire(Own.REACHED), phase=Phase.PREPARE)
    trainer.run(BATCHES, max_epochs=2)
    states = [Checkpoint.load(one) for one in sorted(tmp_path.iterdir())]
    assert [state["engine"]["iteration"] for state in states] == expected
    assert [int(one.name[-8:]) for one in sorted(tmp_path.iterdir())] == expected
    waited = [state["handlers"]["early_stopping"]["monitor"]["seen"] for state in states]
    assert waited == [one // 2 for one in expected]


def test_an_evaluation_between_two_runs_is_saved_at_once(tmp_path: Path) -> None:
    trainer, evaluator = make_trainer(Checkpoint(tmp_path, every=Events.EVALUATION_COMPLETED(once=[1, 3])))
    trainer.run(BATCHES, max_epochs=1)
    assert [one.name[-2:] for one in tmp_path.iterdir()] == ["02"]
    trainer.evaluate(evaluator, HELD_OUT)
    assert sorted(one.name[-2:] for one in tmp_path.iterdir()) == ["02", "04"]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            Events.EVALUATION_COMPLETED(once=1),
            "EVALUATION_COMPLETED inside .*ITERATION_COMPLETED, before lr_sche",
        ),
        (Events.ITERATION_COMPLETED(once=2), r"at Events\.ITERATION_COMPLETED, before lr_scheduling\.step"),
    ],
    ids=str,
)
def test_a_state_that_is_taken_before_the_end_of_its_event_is_reported(event: AnyEvent, said: str) -> None:
    trainer, _ = make_trainer()
    trainer.connect(event, lambda engine: engine.state_dict())
    with pytest.warns(UserWarning, match=said):
        trainer.run(BATCHES, max_epochs=1)


def test_a_state_that_lacks_nothing_is_not_reported() -> None:
    trainer, _ = make_trainer(EarlyStopping("loss", patience=9))
    states: list[Any] = []
    trainer.connect(
        Events.ITERATION_COMPLETED(once=1), lambda engine: states.append(engine.state_dict())
    )  # no new value
    trainer.connect(Events.EPOCH_COMPLETED, lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST)
    trainer.connect(Events.EPOCH_COMPLETED, lambda engine: None, phase=Phase.RECORD)
    trainer.connect(Events.COMPLETED, lambda engine: states.append(engine.state_dict()))
    trainer.run(BATCHES, max_epochs=1)
    assert len(states) == 3


# ---- events that an error cuts short --------------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["2it", "1ep", "0.5ep", "2st"])
def test_a_validation_that_was_interrupted_is_made_as_the_run_continues(tmp_path: Path, every: str) -> None:
    def build(folder: Path) -> tuple[Engine, Engine, History]:
        last = Checkpoint(folder, every=Events.EVALUATION_COMPLETED, keep=9, name="last")
        best = Checkpoint(folder, monitor="loss", keep=9, name="best")
        trainer, evaluator = make_trainer(last, best, history := History(), every=every)
        return trainer, evaluator, history

    whole, _, expected = build(tmp_path / "whole")
    whole.run(BATCHES, max_epochs=2)
    trainer, evaluator, history = build(tmp_path / "cut")
    interrupt_at(evaluator, Events.ITERATION_COMPLETED(once=2), times=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=2)
    train_twice(trainer, max_epochs=2)  # it is interrupted again
    assert torch.equal(trainer.model.weight, whole.model.weight)
    assert rate(trainer) == rate(whole)
    assert history.records == expected.records
    files = [sorted(one.name for one in (tmp_path / name).iterdir()) for name in ("cut", "whole")]
    assert files[0] == files[1]


def test_of_several_data_sets_only_the_rest_is_evaluated() -> None:
    model = kit.linear(3, 1, seed=0)
    trainer, evaluator = kit.build(model, optimizer=SGD), kit.evaluator_of(model)
    trainer.attach(Validation(evaluator, {"a": HELD_OUT, "b": HELD_OUT[:1]}), history := History())
    starts: list[int] = []
    trainer.connect(Events.EVALUATION_STARTED(every=2), lambda engine: starts.append(engine.state.epoch))
    interrupt_at(evaluator, Events.ITERATION_COMPLETED, phase=Phase.PREPARE)
    evaluator.signal(Events.ITERATION_COMPLETED).is_muted = True
    trainer.connect(
        Events.EVALUATION_COMPLETED(once=1),
        lambda engine: setattr(evaluator.signal(Events.ITERATION_COMPLETED), "is_muted", False),
    )
    train_twice(trainer, max_epochs=2)
    assert [len(history["a/loss"]), len(history["b/loss"])] == [2, 2]
    assert starts == [1, 1, 2]  # the start that was cut short, and those that count


@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED(once=3), Events.EPOCH_COMPLETED, Events.EPOCH_STARTED])
@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.CONTROL])
def test_receivers_that_an_interrupt_kept_from_being_called_are_called_once(event: AnyEvent, phase: Phase) -> None:
    seen: dict[str, list[tuple[str, int, bool]]] = {}

    def build(name: str) -> Engine:
        trainer, _ = make_trainer(Metrics(train_loss=Average()))
        seen[name] = []
        for one in Phase:
            for plain in (Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
                trainer.connect(plain, partial(note, name, f"{plain} {one.name}"), phase=one)
        return trainer

    def note(name: str, label: str, engine: Engine) -> None:
        seen[name].append((label, engine.state.iteration, engine.state.batch is None))

    whole, trainer = build("whole"), build("cut")
    whole.run(BATCHES, max_epochs=1)
    interrupt_at(trainer, event, phase=phase)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=1)
    with pytest.warns(UserWarning, match="interrupt was cut short by KeyboardInterrupt at .*, and is not called again"):
        trainer.run(BATCHES, max_epochs=1)
    assert [one[:2] for one in seen["cut"]] == [one[:2] for one in seen["whole"]]
    batches = [one for one in seen["cut"] if one[0].startswith("Events.ITERATION")]
    assert not any(missing for *_, missing in batches)
    assert torch.equal(trainer.model.weight, whole.model.weight)


def test_a_run_that_was_interrupted_at_its_end_completes_it() -> None:
    trainer, evaluator = make_trainer(every="1ep")
    interrupt_at(evaluator, Events.STARTED)
    train_twice(trainer, max_epochs=1)  # there is something to do, which is no iteration
    assert trainer.state.metrics["loss"] > 0
    assert trainer.state.iteration == 4


def test_a_stop_that_was_decided_takes_effect() -> None:
    trainer, _ = make_trainer(EarlyStopping("loss", patience=1, min_delta=9.0, relative=True))
    interrupt_at(trainer, Events.ITERATION_COMPLETED(once=4), phase=Phase.PERSIST)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=3)
    with pytest.warns(UserWarning, match="interrupt was cut short"):
        trainer.run(BATCHES, max_epochs=3)
    assert trainer.state.iteration == 4
    assert str(trainer.state.stop_reason).startswith("loss has not improved")


def test_a_save_that_failed_is_made_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, every="2it", keep=9)
    trainer = kit.build(kit.linear(3, 1, seed=0), checkpoint, optimizer=SGD)
    trainer.run(BATCHES, max_iters=3)
    checkpoint.files = Full()
    with pytest.raises(OSError, match="No space left"):
        trainer.run(BATCHES, max_epochs=2)
    checkpoint.files = Files()
    trainer.run(BATCHES, max_epochs=2)
    assert [int(one.name[-8:]) for one in sorted(tmp_path.iterdir())] == [2, 4, 6, 8]
    assert [name for name, _ in checkpoint.kept] == sorted(one.name for one in tmp_path.iterdir())


class Full(Files):
    """A disk without room."""

    def write(self, path: Path, content: Any) -> None:
        raise OSError(28, "No space left on device")


def window_gradients(cut: Callable[[Engine], None] | None) -> list[float]:
    """The gradients of each step over windows of four, in a run that is interrupted."""
    model = nn.Linear(1, 1, bias=False)
    trainer = kit.build(model, GradientAccumulation(4), loss=lambda output, _: output.sum(), optimizer=SGD)
    gradients: list[float] = []
    trainer.connect(Events.GRADIENTS_READY, lambda engine: gradients.append(float(model.weight.grad or 0)))
    data = [(torch.full((1, 1), float(n)), torch.zeros(1, 1)) for n in range(1, 7)]
    if cut is not None:
        cut(trainer)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(data, max_epochs=1)
    trainer.run(data, max_epochs=1)
    return gradients


EXACT = [(1 + 2 + 3 + 4) / 4, (5 + 6) / 2]


@pytest.mark.parametrize(
    "event",
    [Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED],
)
def test_an_interrupt_between_the_batches_of_a_window_leaves_it_open(event: Events) -> None:
    assert window_gradients(lambda engine: interrupt_at(engine, event(once=3))) == window_gradients(None) == EXACT


def test_a_window_whose_gradients_may_be_spoilt_is_discarded_and_reported() -> None:
    said = "gradients of the earlier 2 batches in the accumulation window of update 'main' are discarded"
    with pytest.warns(UserWarning, match=said):
        found = window_gradients(lambda engine: interrupt_at(engine, Events.BACKWARD_COMPLETED(once=3)))
    assert found == [(3 + 4 + 5 + 6) / 4]


def test_the_first_batch_of_a_window_loses_nothing() -> None:
    assert window_gradients(lambda engine: interrupt_at(engine, Events.BACKWARD_COMPLETED(once=1))) == EXACT


def test_a_batch_that_may_count_twice_is_reported() -> None:
    trainer = kit.build(kit.linear(3, 1, seed=0), optimizer=SGD)
    interrupt_at(trainer, Events.OPTIMIZER_STEP_COMPLETED(once=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=1)
    with pytest.warns(UserWarning, match="iteration 2 is repeated, although the step of update 'main' had begun"):
        trainer.run(BATCHES, max_epochs=1)


def test_what_a_forward_that_is_made_again_has_changed_is_reported() -> None:
    trainer = kit.build(kit.mlp(3, 4, 1, nn.BatchNorm1d(4), nn.Dropout(0.2)), optimizer=SGD)
    interrupt_at(trainer, Events.FORWARD_COMPLETED(once=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=1)
    said = (
        "iteration 2 is repeated, but the changes from its first forward pass are not undone: random numbers for "
        "dropout, running statistics of norm"
    )
    with pytest.warns(UserWarning, match=said):
        trainer.run(BATCHES, max_epochs=1)
    assert trainer.model[1].num_batches_tracked == len(BATCHES) + 1


@pytest.mark.parametrize("how", ["load", "reset"])
def test_another_run_completes_nothing(how: str) -> None:
    trainer, evaluator = make_trainer()
    trainer.run(BATCHES, max_iters=1, check=False)
    state = trainer.state_dict()
    interrupt_at(evaluator, Events.ITERATION_COMPLETED(once=1))
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=1)
    evaluations: list[int] = []
    trainer.connect(Events.EVALUATION_COMPLETED, lambda engine: evaluations.append(engine.state.iteration))
    if how == "load":
        trainer.load_state_dict(state)
    else:
        trainer.reset()
    trainer.run(BATCHES, max_epochs=1)
    assert evaluations == [2, 4]


def test_a_state_of_an_interrupted_event_is_reported() -> None:
    trainer, evaluator = make_trainer()
    interrupt_at(evaluator, Events.ITERATION_COMPLETED(once=1))
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=1)
    with pytest.warns(
        UserWarning, match=r"validation\.validate, lr_scheduling\.step.* were not called\. A run that resumes"
    ):
        trainer.state_dict()


def test_what_was_cut_inside_an_event_inside_it_is_reported() -> None:
    trainer, _ = make_trainer(History())
    interrupt_at(trainer, Events.EVALUATION_COMPLETED(once=1), phase=Phase.PREPARE)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=2)
    said = "history.record was not called at .*EVALUATION_COMPLETED inside .*validation.validate was cut short"
    with pytest.warns(UserWarning, match=said):
        trainer.run(BATCHES, max_epochs=2)
    assert rate(trainer) == by_hand(8)[1]


class Sum(Handler):
    """Adds up in two phases, of which the first one can be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE, repeatable=True)
    def prepare(self, engine: Engine) -> None:
        self.calls.append("prepare")
        if len(self.calls) == 1:
            raise KeyboardInterrupt

    @on(Events.EPOCH_COMPLETED)
    def add(self, engine: Engine) -> None:
        self.calls.append("add")


def test_a_method_that_declares_it_is_repeated() -> None:
    trainer = kit.build(kit.linear(3, 1, seed=0), handler := Sum(), optimizer=SGD)
    train_twice(trainer, max_epochs=1)
    assert handler.calls == ["prepare", "prepare", "add"]


def test_what_was_detached_since_is_not_called() -> None:
    trainer = kit.build(kit.linear(3, 1, seed=0), handler := Sum(), optimizer=SGD)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(BATCHES, max_epochs=1)
    trainer.detach(handler)
    trainer.run(BATCHES, max_epochs=1)
    assert handler.calls == ["prepare"]


def test_a_state_that_is_to_be_put_back_is_put_back() -> None:
    def train(interrupted: bool) -> tuple[list[int], torch.Tensor]:
        trainer = kit.build(kit.linear(3, 1, seed=0), Rewindable(every="2it", keep=3), optimizer=SGD)
        seen: list[int] = []

        def go_back(engine: Engine) -> None:
            if seen.count(5) == 1:
                engine.rewind(3, leave_out=1)

        trainer.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.iteration))
        trainer.connect(Events.ITERATION_COMPLETED(once=5), go_back)
        if interrupted:
            interrupt_at(trainer, Events.ITERATION_COMPLETED(once=5))
            with pytest.raises(KeyboardInterrupt):
                trainer.run(BATCHES, max_epochs=2)
        trainer.run(BATCHES, max_epochs=2)
        return seen, trainer.model.weight

    (whole, expected), (cut, weight) = train(False), train(True)
    assert whole == cut
    assert whole.count(5) == 2
    assert torch.equal(weight, expected)


@pytest.mark.slow
def test_several_ranks_save_at_an_evaluation_and_report_what_an_interrupt_has_cost(tmp_path: Path) -> None:
    for rates, states, said in run_together(_on_a_rank, 2, tmp_path):
        assert len(states) == 3
        assert rates == [rates[0]] * 4
        assert "validation.validate was cut short" in said
        assert "lr_scheduling.step_on_metric, checkpoint.save were not called" in said


def _on_a_rank(folder: Path) -> tuple[list[float], list[str], str]:
    def build(name: str) -> tuple[Engine, Engine]:
        checkpoint = Checkpoint(folder / name, every=Events.EVALUATION_COMPLETED, keep=9)
        return make_trainer(DistributedDataParallel(), checkpoint)

    whole, _ = build("whole")
    whole.run(BATCHES * 2, max_epochs=2)
    versions = sorted((folder / "whole").iterdir())[:3]
    rates = [rate(whole)]
    for version in versions:
        resumed, _ = build(f"after {version.name}")
        resumed.load_state_dict(Checkpoint.load(version))
        resumed.run(BATCHES * 2, max_epochs=2)
        rates.append(rate(resumed))
    cut, evaluator = build("cut")
    interrupt_at(evaluator, Events.ITERATION_COMPLETED(once=1))
    with pytest.raises(KeyboardInterrupt):
        cut.run(BATCHES * 2, max_epochs=2)
    with pytest.warns(UserWarning, match="the run continues after") as caught:
        cut.run(BATCHES * 2, max_epochs=2)
    return rates, [one.name for one in versions], str(caught[0].message)
