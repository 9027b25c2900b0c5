"""The micro-step: skips, missing losses, regions, transformed values and weights, in training and in evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import GradientAccumulation
from tests import kit
from tests.kit import assert_same, mlp

Batch = tuple[Tensor, Tensor]
mse = nn.functional.mse_loss
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_data(batches: int = 6) -> list[Batch]:
    return kit.batches(batches, 3, 2, seed=1)


def make_model() -> nn.Module:
    return mlp(3, 5, 2, nn.Tanh(), seed=0)


def make_trainer(update: Update | None = None) -> Engine:
    return Engine(update or Update.supervised(mse, SGD), model=make_model(), seed=0)


def plain_loop(windows: Iterable[Sequence[Batch]]) -> nn.Module:
    """A plain loop: one step for each window, with the gradient of the window's mean loss."""
    model = make_model()
    optimizer = SGD(model.parameters())
    for window in windows:
        optimizer.zero_grad()
        for x, y in window:
            mse(model(x), y).backward()
        if len(window) > 1:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(len(window))
        optimizer.step()
    return model


def windows_of(data: Sequence[Batch], *batches: Sequence[int]) -> list[list[Batch]]:
    """Batches are counted from 1, as iterations are."""
    return [[data[number - 1] for number in window] for window in batches]


def forward(engine: Engine, batch: Batch) -> Tensor:
    output: Tensor = engine.model(batch[0])
    return output


def loss_of(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
    return mse(output, batch[1])


def make_evaluator(forward_function: Any = None) -> Engine:
    """An engine without an optimizer, whose updates are performed by a function of their own."""
    return make_trainer(Update(forward_function or forward, loss_of))


def raising_engine(where: str, *, trains: bool = True) -> Engine:
    """An engine that fails at this place in its second iteration."""

    def fail(engine: Engine, place: str) -> None:
        if place == where and engine.state.iteration == 2:
            raise ArithmeticError("on purpose")

    def failing_forward(engine: Engine, batch: Batch) -> Tensor:
        fail(engine, "forward")
        return forward(engine, batch)

    def failing_loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
        fail(engine, "loss")
        return loss_of(engine, output, batch)

    engine = make_trainer(Update(failing_forward, failing_loss, SGD if trains else None))
    if where in Events.__members__:
        engine.connect(Events[where], lambda engine: fail(engine, where), phase=Phase.RECORD)
    return engine


# ---- skipping -------------------------------------------------------------------------------------------------------


SKIPPABLE = [
    Events.UPDATE_STARTED,
    Events.FORWARD_STARTED,
    Events.FORWARD_COMPLETED,
    Events.LOSS_COMPUTED,
    Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED,
    Events.GRADIENTS_READY,
    Events.OPTIMIZER_STEP_STARTED,
]


@pytest.mark.parametrize("event", SKIPPABLE, ids=str)
def test_a_skip_makes_no_step_and_its_reason_is_visible(event: Events) -> None:
    data = make_data()
    trainer = make_trainer()
    reported: list[tuple[int, str | None, int]] = []

    @trainer.on(event(once=[2, 5]))
    def skip(engine: Engine) -> None:
        engine.state.update.skip("a bad batch")
        engine.state.update.skip("another reason")  # the first one stays

    @trainer.on(Events.OPTIMIZER_STEP_COMPLETED)
    def record(engine: Engine) -> None:
        update = engine.state.update
        reported.append((engine.state.iteration, update.skipped, update.steps))

    trainer.run(data, max_epochs=1)
    assert reported == [
        (1, None, 1),
        (2, "a bad batch", 1),
        (3, None, 2),
        (4, None, 3),
        (5, "a bad batch", 3),
        (6, None, 4),
    ]
    assert_same(trainer.model, plain_loop(windows_of(data, [1], [3], [4], [6])))
    assert trainer.updates[0].steps == 4
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("event", "left_out"),
    [
        (Events.UPDATE_STARTED, ["FORWARD_STARTED", "LOSS_COMPUTED", "BACKWARD_STARTED", "GRADIENTS_READY"]),
        (Events.LOSS_COMPUTED, ["BACKWARD_STARTED", "GRADIENTS_READY"]),
        (Events.GRADIENTS_READY, []),
    ],
    ids=str,
)
def test_a_skip_leaves_out_what_has_not_been_done_yet(event: Events, left_out: list[str]) -> None:
    trainer = make_trainer()
    seen: list[str] = []
    watched = [Events[name] for name in ("FORWARD_STARTED", "LOSS_COMPUTED", "BACKWARD_STARTED", "GRADIENTS_READY",
                                         "OPTIMIZER_STEP_COMPLETED", "UPDATE_COMPLETED", "ITERATION_COMPLETED")]  # fmt: skip
    for one in watched:
        trainer.connect(one, lambda engine, one=one: seen.append(one.name))
    trainer.connect(event, lambda engine: engine.state.update.skip("on purpose"))
    trainer.run(make_data(1), max_epochs=1)
    assert seen == [one.name for one in watched if one.name not in left_out]


@pytest.mark.parametrize("event", SKIPPABLE[:-2], ids=str)
def test_a_skip_discards_what_the_window_holds(event: Events) -> None:
    data = make_data(8)
    trainer = make_trainer()
    trainer.attach(GradientAccumulation(4))
    trainer.connect(event(once=2), lambda engine: engine.state.update.skip("on purpose"))
    trainer.run(data, max_epochs=1)
    # The window keeps its place: its other batches count over how many they are.
    assert_same(trainer.model, plain_loop(windows_of(data, [3, 4], [5, 6, 7, 8])))
    assert trainer.updates[0].steps == 2


@pytest.mark.parametrize("event", [*SKIPPABLE[:-2], Events.GRADIENTS_READY], ids=str)
def test_a_skip_in_the_last_batch_of_a_window_discards_the_window(event: Events) -> None:
    data = make_data(8)
    trainer = make_trainer()
    trainer.attach(GradientAccumulation(4))
    skipped: list[tuple[int, str | None]] = []
    trainer.connect(event(once=4), lambda engine: engine.state.update.skip("on purpose"))
    trainer.connect(
        Events.OPTIMIZER_STEP_COMPLETED,
        lambda engine: skipped.append((engine.state.iteration, engine.state.update.skipped)),
    )
    trainer.run(data, max_epochs=1)
    assert skipped == [(4, "on purpose"), (8, None)]
    assert_same(trainer.model, plain_loop(windows_of(data, [5, 6, 7, 8])))
    assert trainer.updates[0].steps == 1


def test_the_loss_of_an_update_that_was_skipped_before_its_forward_is_none() -> None:
    trainer = make_trainer()
    losses: list[bool] = []
    trainer.connect(Events.UPDATE_STARTED(once=2), lambda engine: engine.state.update.skip("on purpose"))
    trainer.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.update.loss is None))
    trainer.run(make_data(3), max_epochs=1)
    assert losses == [False, True, False]


# ---- nothing to learn from a batch ----------------------------------------------------------------------------------


def without(iterations: set[int], what: str) -> tuple[Update, Callable[[list[Batch]], list[Any]]]:
    """An update that has no loss, or no output, in these iterations; or data that has no batch there."""

    def maybe_forward(engine: Engine, batch: Batch) -> Tensor | None:
        return None if what == "output" and engine.state.iteration in iterations else forward(engine, batch)

    def maybe_loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor | None:
        return None if what == "loss" and engine.state.iteration in iterations else loss_of(engine, output, batch)

    def function(engine: Engine, batch: Batch) -> Tensor | None:
        return None if engine.state.iteration in iterations else loss_of(engine, forward(engine, batch), batch)

    def data(batches: list[Batch]) -> list[Any]:
        return [None if what == "batch" and n in iterations else batch for n, batch in enumerate(batches, 1)]

    return Update.from_function(function, SGD) if what == "function" else Update(maybe_forward, maybe_loss, SGD), data


@pytest.mark.parametrize("what", ["loss", "output", "batch", "function"])
def test_without_a_loss_there_is_no_step(what: str) -> None:
    batches = make_data()
    update, data = without({1, 4}, what)
    trainer = make_trainer(update)
    skipped: list[str | None] = []
    steps: list[int] = []
    losses: list[bool] = []
    trainer.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: skipped.append(engine.state.update.skipped))
    trainer.connect(Events.ITERATION_COMPLETED, lambda engine: steps.append(engine.state.update.steps))
    trainer.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.update.loss is not None))
    trainer.run(data(batches), max_epochs=1)
    reason = "no micro-batch in the window produced a gradient"
    assert skipped == [reason, None, None, reason, None, None]
    assert steps == [0, 1, 2, 2, 3, 4]
    assert losses == [False, True, True, False, True, True]
    assert_same(trainer.model, plain_loop(windows_of(batches, [2], [3], [5], [6])))


@pytest.mark.parametrize("what", ["loss", "output", "batch", "function"])
def test_without_a_loss_a_window_steps_on_what_it_holds(what: str) -> None:
    batches = make_data(12)
    update, data = without({2, 8, 9, 10, 11, 12}, what)
    trainer = make_trainer(update)
    trainer.attach(GradientAccumulation(4))
    skipped: list[tuple[int, str | None]] = []
    trainer.connect(
        Events.OPTIMIZER_STEP_COMPLETED,
        lambda engine: skipped.append((engine.state.iteration, engine.state.update.skipped)),
    )
    trainer.run(data(batches), max_epochs=1)
    assert skipped == [(4, None), (8, None), (12, "no micro-batch in the window produced a gradient")]
    assert_same(trainer.model, plain_loop(windows_of(batches, [1, 3, 4], [5, 6, 7])))
    assert trainer.updates[0].steps == 2


def test_without_a_loss_its_events_do_not_come() -> None:
    update, _ = without({1}, "loss")
    trainer = make_trainer(update)
    seen: list[str] = []
    for event in (Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED, Events.BACKWARD_STARTED, Events.GRADIENTS_READY):
        trainer.connect(event, lambda engine, event=event: seen.append(f"{event.name} {engine.state.iteration}"))
    trainer.run(make_data(2), max_epochs=1)
    assert seen == ["FORWARD_COMPLETED 1", "FORWARD_COMPLETED 2", "LOSS_COMPUTED 2", "BACKWARD_STARTED 2",
                    "GRADIENTS_READY 2"]  # fmt: skip


# ---- regions --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def region(log: list[str], name: str) -> Iterator[None]:
    log.append(f"open {name}")
    try:
        yield
    except BaseException as error:
        log.append(f"close {name} by {type(error).__name__}")
        raise
    else:
        log.append(f"close {name}")


def test_regions_close_at_their_ends_last_in_first_out() -> None:
    trainer = make_trainer()
    log: list[str] = []
    for event, names in (
        (Events.UPDATE_STARTED, ["update 1", "update 2"]),
        (Events.FORWARD_STARTED, ["forward 1", "forward 2"]),
        (Events.FORWARD_COMPLETED, ["forward 3"]),
        (Events.GRADIENTS_READY, ["update 3"]),
    ):
        for name in names:
            trainer.connect(event, lambda engine, name=name: engine.regions.enter(region(log, name)))
    for event in (Events.LOSS_COMPUTED, Events.BACKWARD_STARTED, Events.OPTIMIZER_STEP_COMPLETED, Events.UPDATE_COMPLETED,
                  Events.ITERATION_COMPLETED):  # fmt: skip
        trainer.connect(event, lambda engine, event=event: log.append(event.name))
    trainer.run(make_data(1), max_epochs=1)
    assert log == [
        "open update 1", "open update 2", "open forward 1", "open forward 2", "open forward 3", "LOSS_COMPUTED",
        "close forward 3", "close forward 2", "close forward 1", "BACKWARD_STARTED", "open update 3",
        "OPTIMIZER_STEP_COMPLETED", "UPDATE_COMPLETED", "close update 3", "close update 2", "close update 1",
        "ITERATION_COMPLETED",
    ]  # fmt: skip


def test_regions_of_an_evaluation_close_at_their_ends_too() -> None:
    evaluator = make_evaluator()
    log: list[str] = []
    for event, name in (
        (Events.UPDATE_STARTED, "update"),
        (Events.FORWARD_STARTED, "forward"),
        (Events.FORWARD_COMPLETED, "loss"),
    ):
        evaluator.connect(event, lambda engine, name=name: engine.regions.enter(region(log, name)))
    for event in (Events.LOSS_COMPUTED, Events.UPDATE_COMPLETED, Events.ITERATION_COMPLETED):
        evaluator.connect(event, lambda engine, event=event: log.append(event.name))
    evaluator.run(make_data(1))
    assert log == [
        "open update", "open forward", "open loss", "LOSS_COMPUTED", "close loss", "close forward", "UPDATE_COMPLETED",
        "close update", "ITERATION_COMPLETED",
    ]  # fmt: skip


@pytest.mark.parametrize("listening", [False, True])
def test_a_region_that_the_forward_of_an_evaluation_enters_closes_before_the_next(listening: bool) -> None:
    log: list[str] = []

    def entering_forward(engine: Engine, batch: Batch) -> Tensor:
        engine.regions.enter(region(log, str(engine.state.iteration)))
        return forward(engine, batch)

    evaluator = make_evaluator(entering_forward)
    if listening:
        evaluator.connect(Events.UPDATE_STARTED(once=2), lambda engine: engine.regions.enter(region(log, "update")))
        evaluator.connect(Events.LOSS_COMPUTED(once=2), lambda engine: log.append("loss"))
    evaluator.run(make_data(3))
    second = ["open 2", "close 2"]
    if listening:
        second = ["open update", "open 2", "loss", "close 2", "close update"]
    assert log == ["open 1", "close 1", *second, "open 3", "close 3"]


@pytest.mark.parametrize(
    "where", ["forward", "loss", "UPDATE_STARTED", "FORWARD_STARTED", "LOSS_COMPUTED", "UPDATE_COMPLETED"]
)
def test_an_error_of_an_evaluation_closes_its_regions_and_says_where_it_came(where: str) -> None:
    evaluator = raising_engine(where, trains=False)
    log: list[str] = []
    evaluator.connect(Events.UPDATE_STARTED(once=2), lambda engine: engine.regions.enter(region(log, "update")))
    with pytest.raises(ArithmeticError) as caught:
        evaluator.run(make_data(3))
    assert log == ["open update", "close update by ArithmeticError"]
    notes = "\n".join(caught.value.__notes__)
    act = {"FORWARD_STARTED": "forward", "LOSS_COMPUTED": "loss"}.get(where, where)
    assert (f"in the {act} of update" in notes) == (act in ("forward", "loss"))
    assert where in Events.__members__ or "iteration 2" in notes


def test_autocast_entered_at_the_forward_covers_the_loss_and_not_the_backward() -> None:
    trainer = make_trainer()
    seen: dict[str, bool] = {}
    trainer.connect(
        Events.FORWARD_STARTED, lambda engine: engine.regions.enter(torch.autocast("cpu", dtype=torch.bfloat16))
    )
    for event in (Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED, Events.BACKWARD_STARTED, Events.UPDATE_COMPLETED):
        trainer.connect(event, lambda engine, e=event: seen.update({e.name: torch.is_autocast_enabled("cpu")}))
    trainer.run(make_data(1), max_epochs=1)
    assert seen == {
        "FORWARD_COMPLETED": True,
        "LOSS_COMPUTED": True,
        "BACKWARD_STARTED": False,
        "UPDATE_COMPLETED": False,
    }


@pytest.mark.parametrize("where", ["forward", "loss", "FORWARD_STARTED", "FORWARD_COMPLETED", "LOSS_COMPUTED"], ids=str)
def test_regions_close_also_when_the_forward_or_the_loss_or_a_receiver_raises(where: str) -> None:
    trainer = raising_engine(where)
    log: list[str] = []
    for event, name in (
        (Events.STARTED, "run"),
        (Events.UPDATE_STARTED(once=2), "update"),
        (Events.FORWARD_STARTED(once=2), "forward 1"),
        (Events.FORWARD_STARTED(once=2), "forward 2"),
    ):
        trainer.connect(event, lambda engine, name=name: engine.regions.enter(region(log, name)))
    trainer.connect(Events.EXCEPTION_RAISED, lambda engine: log.append("EXCEPTION_RAISED"))
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.run(make_data(3), max_epochs=1)
    assert log == [
        "open run", "open update", "open forward 1", "open forward 2", "close forward 2 by ArithmeticError",
        "close forward 1 by ArithmeticError", "close update by ArithmeticError", "EXCEPTION_RAISED",
        "close run by ArithmeticError",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "where", ["BACKWARD_STARTED", "GRADIENTS_READY", "OPTIMIZER_STEP_COMPLETED", "UPDATE_COMPLETED"]
)
def test_a_region_of_the_update_closes_when_a_later_receiver_raises(where: str) -> None:
    trainer = raising_engine(where)
    log: list[str] = []
    trainer.connect(Events.UPDATE_STARTED(once=2), lambda engine: engine.regions.enter(region(log, "update")))
    trainer.connect(Events.FORWARD_STARTED(once=2), lambda engine: engine.regions.enter(region(log, "forward")))
    with pytest.raises(ArithmeticError):
        trainer.run(make_data(3), max_epochs=1)
    assert log == ["open update", "open forward", "close forward", "close update by ArithmeticError"]


def test_a_region_that_swallows_errors_does_not_keep_one_from_leaving() -> None:
    trainer = raising_engine("forward")
    trainer.connect(Events.FORWARD_STARTED, lambda engine: engine.regions.enter(contextlib.suppress(ArithmeticError)))
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.run(make_data(3), max_epochs=1)


def test_all_regions_close_when_closing_one_raises() -> None:
    trainer = make_trainer()
    log: list[str] = []

    class Stubborn(contextlib.AbstractContextManager[None]):
        def __exit__(self, *details: object) -> None:
            raise OSError("it does not close")

    trainer.connect(Events.FORWARD_STARTED, lambda engine: engine.regions.enter(region(log, "outer")))
    trainer.connect(Events.FORWARD_STARTED, lambda engine: engine.regions.enter(Stubborn()))
    trainer.connect(Events.FORWARD_STARTED, lambda engine: engine.regions.enter(region(log, "inner")))
    with pytest.raises(OSError, match="it does not close"):
        trainer.run(make_data(1), max_epochs=1)
    assert log == ["open outer", "open inner", "close inner", "close outer by OSError"]


# ---- evaluation, and who is listened to -----------------------------------------------------------------------------


@pytest.mark.parametrize("listening", [False, True])
def test_who_connects_inside_an_iteration_is_heard_at_once_or_in_the_next_if_nobody_listens(listening: bool) -> None:
    seen: list[tuple[str, int]] = []
    evaluator = make_evaluator()
    if listening:
        evaluator.connect(Events.UPDATE_STARTED, lambda engine: None)

    def connecting_data() -> Iterator[Batch]:
        for place, batch in enumerate(make_data(3), 1):
            if place == 2:
                for event in (Events.UPDATE_COMPLETED, Events.ITERATION_COMPLETED):
                    evaluator.connect(
                        event, lambda engine, event=event: seen.append((event.name, engine.state.iteration))
                    )
            yield batch

    evaluator.run(connecting_data())
    heard_at_once = [("UPDATE_COMPLETED", 2)] if listening else []
    assert seen == [*heard_at_once, ("ITERATION_COMPLETED", 2), ("UPDATE_COMPLETED", 3), ("ITERATION_COMPLETED", 3)]


@pytest.mark.parametrize("listening", [False, True])
def test_an_evaluation_shows_output_and_loss_and_a_skip_holds_for_its_iteration_alone(listening: bool) -> None:
    data = make_data(4)
    model = make_trainer().model
    seen: list[tuple[Any, ...]] = []

    def skipping_forward(engine: Engine, batch: Batch) -> Tensor:
        if engine.state.iteration == 2:
            engine.state.update.skip("while nobody else listens")
        return forward(engine, batch)

    evaluator = make_evaluator(skipping_forward)
    if listening:
        evaluator.connect(Events.UPDATE_STARTED(once=3), lambda engine: engine.state.update.skip("before the forward"))

    @evaluator.on(Events.ITERATION_COMPLETED)
    def see(engine: Engine) -> None:
        update = engine.state.update
        seen.append((update.skipped, update.output, update.loss))

    evaluator.run(data)
    assert [reason for reason, _, _ in seen] == [
        None, "while nobody else listens", "before the forward" if listening else None, None,
    ]  # fmt: skip
    for (x, y), (reason, output, loss) in zip(data, seen, strict=True):
        if reason == "before the forward":
            assert output is None
            assert loss is None
        else:
            assert output.equal(model(x))
            assert loss.equal(nn.functional.mse_loss(model(x), y))


@pytest.mark.parametrize("trains", [True, False])
def test_the_batch_that_a_receiver_puts_in_place_as_the_update_starts_is_the_one_worked_on(trains: bool) -> None:
    data, seen = make_data(3), list[Tensor]()

    def look(engine: Engine, batch: Batch) -> Tensor:
        seen.append(batch[0])
        return mse(engine.model(batch[0]), batch[1])

    engine = make_trainer(Update.from_function(look, SGD if trains else None))
    engine.connect(Events.UPDATE_STARTED(once=2), lambda engine: setattr(engine.state, "batch", data[0]))
    engine.run(data, max_epochs=1)
    assert [next(n for n, (x, _) in enumerate(data) if x is one) for one in seen] == [0, 0, 2]


@pytest.mark.parametrize(
    ("update", "never"),
    [
        (Update.supervised(mse), Events.GRADIENTS_READY),
        (Update.prediction(), Events.LOSS_COMPUTED),
        (Update.from_function(lambda engine, batch: None), Events.FORWARD_COMPLETED),
    ],
    ids=["evaluates", "predicts", "function"],
)
def test_who_waits_for_an_event_that_these_updates_never_emit_costs_no_iteration_a_look(
    update: Update, never: Events
) -> None:
    engine = make_trainer(update)
    idle = engine.iteration_signals.due
    engine.connect(never, lambda engine: None)
    assert engine.iteration_signals.due == idle
    engine.connect(Events.UPDATE_COMPLETED(after=4), lambda engine: None)
    assert engine.iteration_signals.due < idle


# ---- transformed values ---------------------------------------------------------------------------------------------


def plain_loop_transformed(
    data: Sequence[Batch],
    *,
    batch: Callable[[Batch], Batch] = lambda batch: batch,
    output: Callable[[Tensor], Tensor] = lambda output: output,
    loss: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> nn.Module:
    model = make_model()
    optimizer = SGD(model.parameters())
    for one in data:
        x, y = batch(one)
        optimizer.zero_grad()
        loss(mse(output(model(x)), y)).backward()
        optimizer.step()
    return model


def test_the_batch_may_be_transformed_and_several_do_it_in_order() -> None:
    data = make_data()
    trainer = make_trainer()

    def double(engine: Engine) -> None:
        engine.state.batch = (engine.state.batch[0] * 2, engine.state.batch[1])

    def shift(engine: Engine) -> None:
        engine.state.batch = (engine.state.batch[0] + 1, engine.state.batch[1])

    trainer.connect(Events.GET_BATCH_COMPLETED, shift)
    trainer.connect(Events.GET_BATCH_COMPLETED, double, phase=Phase.PREPARE)
    trainer.run(data, max_epochs=1)
    assert_same(trainer.model, plain_loop_transformed(data, batch=lambda batch: (batch[0] * 2 + 1, batch[1])))


def test_the_output_may_be_transformed() -> None:
    data = make_data()
    trainer = make_trainer()

    @trainer.on(Events.FORWARD_COMPLETED)
    def clamp(engine: Engine) -> None:
        engine.state.update.output = engine.state.update.output.clamp(-0.1, 0.1)

    trainer.run(data, max_epochs=1)
    assert_same(trainer.model, plain_loop_transformed(data, output=lambda output: output.clamp(-0.1, 0.1)))


def test_the_backward_loss_may_be_transformed_and_the_reported_one_stays() -> None:
    data = make_data()
    trainer = make_trainer()
    reported: list[Tensor] = []

    @trainer.on(Events.LOSS_COMPUTED)
    def scale(engine: Engine) -> None:
        engine.state.update.backward_loss = engine.state.update.backward_loss * 3

    @trainer.on(Events.ITERATION_COMPLETED)
    def report(engine: Engine) -> None:
        assert engine.state.update.loss is not None
        reported.append(engine.state.update.loss)

    trainer.run(data, max_epochs=1)
    losses: list[Tensor] = []

    def keep_and_scale(loss: Tensor) -> Tensor:
        losses.append(loss.detach())
        return loss * 3

    assert_same(trainer.model, plain_loop_transformed(data, loss=keep_and_scale))
    assert not reported[0].requires_grad
    assert torch.equal(torch.stack(reported), torch.stack(losses))


def test_the_reported_loss_may_be_set_without_changing_the_step() -> None:
    data = make_data()
    trainer = make_trainer()

    @trainer.on(Events.LOSS_COMPUTED)
    def report(engine: Engine) -> None:
        engine.state.update.loss = torch.tensor(42.0)

    trainer.run(data, max_epochs=1)
    assert trainer.updates[0].loss == 42.0
    assert_same(trainer.model, plain_loop([[batch] for batch in data]))


# ---- weights --------------------------------------------------------------------------------------------------------


def test_losses_of_a_window_count_by_their_weights() -> None:
    data, weights = make_data(6), [1.0, 5.0, 2.0, 4.0, 3.0, 1.0]
    trainer = make_trainer()
    trainer.attach(GradientAccumulation(2))

    @trainer.on(Events.LOSS_COMPUTED)
    def weigh(engine: Engine) -> None:
        engine.state.update.weight = weights[engine.state.iteration - 1]

    trainer.run(data, max_epochs=1)
    model = make_model()
    optimizer = SGD(model.parameters())
    for first in (0, 2, 4):
        optimizer.zero_grad()
        total = weights[first] + weights[first + 1]
        for number in (first, first + 1):
            (mse(model(data[number][0]), data[number][1]) * weights[number]).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(total)
        optimizer.step()
    assert_same(trainer.model, model)


def test_a_weight_may_be_a_tensor() -> None:
    trainers = [make_trainer(), make_trainer()]
    for trainer, kind in zip(trainers, (float, torch.tensor), strict=True):
        trainer.attach(GradientAccumulation(3))
        trainer.connect(
            Events.LOSS_COMPUTED,
            lambda engine, kind=kind: setattr(engine.state.update, "weight", kind(float(engine.state.iteration))),
        )
        trainer.run(make_data(), max_epochs=1)
    assert_same(trainers[0].model, trainers[1].model)


@pytest.mark.parametrize("last", ["step", "skip"])
def test_a_weight_holds_for_its_own_batch_only(last: str) -> None:
    trainer = make_trainer()
    seen: list[float] = []

    @trainer.on(Events.LOSS_COMPUTED)
    def weigh(engine: Engine) -> None:
        seen.append(engine.state.update.weight)
        if engine.state.iteration == 1:
            engine.state.update.weight = 7.0
            if last == "skip":
                engine.state.update.skip("on purpose")

    trainer.run(make_data(3), max_epochs=1)
    assert seen == [1, 1, 1]


def test_a_window_of_weight_zero_makes_no_step() -> None:
    data = make_data(3)
    trainer = make_trainer()
    trainer.connect(Events.LOSS_COMPUTED(once=2), lambda engine: setattr(engine.state.update, "weight", 0))
    trainer.run(data, max_epochs=1)
    assert_same(trainer.model, plain_loop(windows_of(data, [1], [3])))


def test_a_weight_that_the_forward_of_an_evaluation_sets_is_that_of_its_batch_alone() -> None:
    def weighing_forward(engine: Engine, batch: Batch) -> Tensor:
        if engine.state.iteration == 1:  # in an iteration that nobody listens to
            engine.state.update.weight = 5
        return forward(engine, batch)

    evaluator = make_evaluator(weighing_forward)
    seen: list[int] = []
    evaluator.connect(Events.LOSS_COMPUTED(once=2), lambda engine: seen.append(engine.state.update.weight))
    evaluator.run(make_data(3))
    assert seen == [1]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("lost", ["skipped", "missing"])
def test_the_weight_of_a_batch_that_is_not_worked_on_is_not_given_to_the_next(lost: str, trains: bool) -> None:
    engine = make_trainer() if trains else make_evaluator()
    seen: list[Any] = []

    def weigh(engine: Engine) -> None:
        engine.state.update.weight = 5
        if lost == "skipped":
            engine.state.update.skip("on purpose")
        else:
            engine.state.batch = None

    engine.connect(Events.GET_BATCH_COMPLETED(once=2), weigh)
    engine.connect(Events.LOSS_COMPUTED, lambda engine: seen.append(engine.state.update.weight))
    engine.run(make_data(3), max_epochs=1)
    assert seen == [1, 1]


@pytest.mark.parametrize("event", [Events.LOSS_COMPUTED, Events.OPTIMIZER_STEP_COMPLETED], ids=str)
def test_an_error_leaves_neither_weight_nor_decision_to_the_next_run(event: Events) -> None:
    trainer = make_trainer()
    seen: list[Any] = []

    def fail(engine: Engine) -> None:
        engine.state.update.weight = 5
        raise ArithmeticError("on purpose")

    trainer.connect(event(once=1), fail, phase=Phase.PERSIST)
    with pytest.raises(ArithmeticError):
        trainer.run(make_data(3), max_epochs=1)
    trainer.signal(event).disconnect(fail)
    trainer.connect(Events.LOSS_COMPUTED, lambda engine: seen.append(engine.state.update.weight))
    steps = trainer.updates[0].steps
    trainer.connect(Events.GRADIENTS_READY, lambda engine: engine.state.update.skip("on purpose"))
    with pytest.warns(UserWarning, match="iteration 1 is repeated, although") if steps else contextlib.nullcontext():
        trainer.run(make_data(3), max_epochs=1)
    assert seen == [1, 1, 1]
    assert trainer.updates[0].steps == steps


def test_an_error_discards_the_window_and_leaves_no_gradient() -> None:
    trainer = raising_engine("BACKWARD_COMPLETED")
    trainer.attach(GradientAccumulation(4))
    with pytest.raises(ArithmeticError):
        trainer.run(make_data(), max_epochs=1)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.updates[0].window.filled == 0
