"""The update: skips, batches without a loss, regions, transformed values, replaced acts, several updates, and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, Update, UpdateState
from signalfire.acts import Override
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


def test_a_supervised_update_is_the_plain_loop() -> None:
    data = make_data()
    trainer = make_trainer()
    trainer.run(data, max_epochs=2)
    assert_same(trainer.model, plain_loop([[batch] for batch in data * 2]))
    assert trainer.updates[0].steps == 12


@pytest.mark.parametrize("of", ["class", "object"])
def test_an_optimizer_with_a_zero_grad_of_its_own_clears_its_gradients_itself(of: str) -> None:
    cleared: list[int] = []

    class Zeroing(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            cleared.append(1)
            super().zero_grad(set_to_none=False)

    def own(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        if of == "class":
            return Zeroing(parameters, lr=0.1, momentum=0.9)
        optimizer = SGD(parameters)
        original = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            cleared.append(1)
            original(set_to_none=False)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        return optimizer

    trainer = make_trainer(Update(forward, loss_of, own))

    data = make_data(3)
    trainer.run(data, max_epochs=1)
    assert len(cleared) >= 3
    assert all(p.grad is not None and not p.grad.any() for p in trainer.model.parameters())
    assert_same(trainer.model, plain_loop([[batch] for batch in data]))


# ---- skipping -----------------------------------------------------------------------------------------------------

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


# ---- nothing to learn from a batch --------------------------------------------------------------------------------


def forward(engine: Engine, batch: Batch) -> Tensor:
    output: Tensor = engine.model(batch[0])
    return output


def loss_of(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
    return mse(output, batch[1])


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
    reason = "the window holds no gradient"
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
    assert skipped == [(4, None), (8, None), (12, "the window holds no gradient")]
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


# ---- regions ------------------------------------------------------------------------------------------------------


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


def make_evaluator(forward_function: Any = None) -> Engine:
    """An engine without an optimizer, whose updates are performed by a function of their own."""
    return make_trainer(Update(forward_function or forward, loss_of))


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
    trainer.run(make_data(3), max_epochs=1)
    assert seen == [1, 1, 1]
    assert trainer.updates[0].steps == steps


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


def test_a_region_of_the_run_closes_after_ended() -> None:
    trainer = make_trainer()
    log: list[str] = []
    trainer.connect(Events.STARTED, lambda engine: engine.regions.enter(region(log, "run")))
    trainer.connect(Events.EPOCH_STARTED, lambda engine: engine.regions.enter(region(log, "epoch")))
    trainer.connect(Events.ENDED, lambda engine: log.append("ENDED"))
    trainer.run(make_data(1), max_epochs=1)
    assert log == ["open run", "open epoch", "ENDED", "close epoch", "close run"]


def test_enter_gives_what_the_region_gives_and_refuses_where_none_is_open() -> None:
    trainer = make_trainer()
    given: list[str] = []
    trainer.connect(Events.STARTED, lambda engine: given.append(engine.regions.enter(contextlib.nullcontext("value"))))
    trainer.run(make_data(1), max_epochs=1)
    assert given == ["value"]
    with pytest.raises(RuntimeError, match="no region is open outside a run"):
        trainer.regions.enter(contextlib.nullcontext())


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


# ---- transformed values -------------------------------------------------------------------------------------------


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


# ---- replaced acts ------------------------------------------------------------------------------------------------


class HalvedGradients(Handler):
    """Replaces the gradient computation: the usual one, then halved."""

    calls = 0

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.GRADIENTS, self.halve, by=self)

    def halve(self, engine: Engine, update: UpdateState, compute: Callable[[], None]) -> None:
        self.calls += 1
        compute()
        for p in update.parameters:
            if p.grad is not None:
                p.grad.mul_(0.5)


class DoubleStep(Handler):
    """Replaces the step: makes it twice."""

    calls = 0

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.STEP, self.twice, by=self)

    def twice(self, engine: Engine, update: UpdateState, step: Callable[[], None]) -> None:
        self.calls += 1
        step()
        step()


def plain_loop_replaced(data: Sequence[Batch], *, factor: float = 1.0, steps: int = 1) -> nn.Module:
    model = make_model()
    optimizer = SGD(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(factor)
        for _ in range(steps):
            optimizer.step()
    return model


def test_a_handler_may_replace_the_gradients() -> None:
    data, handler = make_data(), HalvedGradients()
    trainer = make_trainer()
    trainer.attach(handler)
    trainer.run(data, max_epochs=1)
    assert handler.calls == 6
    assert_same(trainer.model, plain_loop_replaced(data, factor=0.5))


def test_a_handler_may_replace_the_step() -> None:
    data, handler = make_data(), DoubleStep()
    trainer = make_trainer()
    trainer.attach(handler)
    trainer.run(data, max_epochs=1)
    assert handler.calls == 6
    assert trainer.updates[0].steps == 6
    assert_same(trainer.model, plain_loop_replaced(data, steps=2))


def test_two_handlers_may_replace_different_acts() -> None:
    data = make_data()
    trainer = make_trainer()
    trainer.attach(DoubleStep(), HalvedGradients())
    trainer.run(data, max_epochs=1)
    assert_same(trainer.model, plain_loop_replaced(data, factor=0.5, steps=2))


@pytest.mark.parametrize("kind", [DoubleStep, HalvedGradients])
def test_a_second_replacer_is_an_error_that_names_both_and_changes_nothing(
    kind: type[DoubleStep] | type[HalvedGradients],
) -> None:
    data, first, second = make_data(), kind(name="first"), kind(name="second")
    trainer = make_trainer()
    trainer.attach(first)
    with pytest.raises(
        ValueError, match=r"both 'first' and 'second' .* (the optimizer step|the computation of gradients)"
    ):
        trainer.attach(second)
    assert list(trainer.handlers) == ["first"]
    assert second.engine is None
    trainer.run(data, max_epochs=1)
    assert (first.calls, second.calls) == (6, 0)


@pytest.mark.parametrize("kind", [DoubleStep, HalvedGradients])
@pytest.mark.parametrize("how", ["detached", "disabled", "without"])
def test_detaching_or_disabling_a_replacer_restores_the_act(
    kind: type[DoubleStep] | type[HalvedGradients], how: str
) -> None:
    data, handler = make_data(), kind(name="replacer")
    trainer = make_trainer()
    trainer.attach(handler)
    with contextlib.ExitStack() as stack:
        if how == "detached":
            trainer.detach(handler)
        elif how == "disabled":
            handler.enabled = False
        else:
            stack.enter_context(trainer.without("replacer"))
        trainer.run(data, max_epochs=1)
    assert handler.calls == 0
    assert_same(trainer.model, plain_loop([[batch] for batch in data]))


def test_after_the_first_replacer_has_left_another_may_come() -> None:
    trainer = make_trainer()
    first, second = DoubleStep(name="first"), DoubleStep(name="second")
    trainer.attach(first).detach()
    trainer.attach(second)
    trainer.run(make_data(2), max_epochs=1)
    assert (first.calls, second.calls) == (0, 2)


def test_a_replaced_step_is_not_made_when_it_is_skipped() -> None:
    handler = DoubleStep()
    trainer = make_trainer()
    trainer.attach(handler)
    trainer.connect(Events.GRADIENTS_READY(once=2), lambda engine: engine.state.update.skip("on purpose"))
    trainer.run(make_data(3), max_epochs=1)
    assert handler.calls == 2
    assert trainer.updates[0].steps == 2


def test_an_act_that_does_not_exist_is_not_replaced() -> None:
    class Wrong(Handler):
        def attached(self, engine: Engine) -> None:
            engine.overrides.replace(Override.SEEDING, print, by=self)

    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"expected one of Override\.WINDOW, Override\.GRADIENTS"):
        trainer.attach(Wrong())
    assert trainer.handlers == {}


def test_the_gradients_of_an_engine_that_computes_none_are_not_replaced() -> None:
    class Wrong(Handler):
        def attached(self, engine: Engine) -> None:
            engine.overrides.replace(Override.GRADIENTS, lambda engine, update, compute: compute(), by=self)

    evaluator = make_evaluator()
    with pytest.raises(ValueError, match="replaces the computation of gradients, but this engine only evaluates"):
        evaluator.attach(Wrong())
    assert evaluator.handlers == {}


# ---- several updates ----------------------------------------------------------------------------------------------


def make_gan() -> tuple[dict[str, nn.Module], list[Tensor]]:
    torch.manual_seed(4)
    models: dict[str, nn.Module] = {
        "generator": nn.Linear(3, 2),
        "critic": nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)),
    }
    return models, list(torch.randn(6, 5, 2).unbind())


def noise(iteration: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(iteration))


def critic_loss(models: Any, real: Tensor, iteration: int) -> Tensor:
    fake = models["generator"](noise(iteration)).detach()
    loss: Tensor = (models["critic"](fake) - models["critic"](real)).mean() + models["critic"](real).square().mean()
    return loss


def generator_loss(models: Any, iteration: int) -> Tensor:
    loss: Tensor = -models["critic"](models["generator"](noise(iteration))).mean()
    return loss


CRITIC_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
GENERATOR_SGD = partial(torch.optim.SGD, lr=0.02)


def gan_updates() -> list[Update]:
    return [
        Update.from_function(
            lambda engine, batch: critic_loss(engine.modules, batch, engine.state.iteration),
            CRITIC_SGD,
            name="critic",
            parameters=lambda engine: engine.modules["critic"].parameters(),
        ),
        Update.from_function(
            lambda engine, batch: generator_loss(engine.modules, engine.state.iteration),
            GENERATOR_SGD,
            name="generator",
            parameters=lambda engine: engine.modules["generator"].parameters(),
        ),
    ]


def plain_gan_loop(critic_in: Iterable[int], generator_in: Iterable[int]) -> dict[str, nn.Module]:
    """The loop of every GAN tutorial: each optimizer's gradients are cleared before its own backward."""
    models, data = make_gan()
    critic, generator = CRITIC_SGD(models["critic"].parameters()), GENERATOR_SGD(models["generator"].parameters())
    for iteration, real in enumerate(data, 1):
        if iteration in critic_in:
            critic.zero_grad()
            critic_loss(models, real, iteration).backward()
            critic.step()
        if iteration in generator_in:
            generator.zero_grad()
            generator_loss(models, iteration).backward()
            generator.step()
    return models


def test_two_updates_run_in_order_each_with_its_own_optimizer() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)
    order: list[tuple[int, str]] = []
    trainer.connect(
        Events.OPTIMIZER_STEP_COMPLETED,
        lambda engine: order.append((engine.state.iteration, engine.state.update.name)),
    )
    trainer.run(data[:2], max_epochs=1)
    assert order == [(1, "critic"), (1, "generator"), (2, "critic"), (2, "generator")]
    critic, generator = trainer.updates
    assert critic.parameters == list(models["critic"].parameters())
    assert generator.parameters == list(models["generator"].parameters())
    assert (critic.steps, generator.steps) == (2, 2)


def test_two_updates_train_a_gan_as_a_plain_loop_does() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)
    trainer.run(data, max_epochs=1)
    expected = plain_gan_loop(range(1, 7), range(1, 7))
    for name in models:
        assert_same(models[name], expected[name])


def test_an_update_may_go_on_from_what_an_earlier_one_computed() -> None:
    # As in PyTorch's DCGAN tutorial: the images are made once, for the critic and for the generator.
    models, data = make_gan()
    made: dict[str, Tensor] = {}

    def critic_first(engine: Engine, real: Tensor) -> Tensor:
        made["fake"] = engine.modules["generator"](noise(engine.state.iteration))
        judge = engine.modules["critic"]
        loss: Tensor = (judge(made["fake"].detach()) - judge(real)).mean() + judge(real).square().mean()
        return loss

    def then_generator(engine: Engine, real: Tensor) -> Tensor:
        loss: Tensor = -engine.modules["critic"](made["fake"]).mean()
        return loss

    critic, generator = gan_updates()
    updates = [replace(critic, function=critic_first), replace(generator, function=then_generator)]
    Engine(updates, model=models, seed=0).run(data, max_epochs=1)
    expected = plain_gan_loop(range(1, 7), range(1, 7))
    for name in models:
        assert_same(models[name], expected[name])


def test_the_plan_of_an_iteration_may_be_changed() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)
    critic, generator = trainer.updates

    @trainer.on(Events.ITERATION_STARTED)
    def every_third(engine: Engine) -> None:
        assert engine.state.plan == (critic, generator)  # of this iteration only
        if engine.state.iteration % 3:
            engine.state.plan = [critic]

    trainer.run(data, max_epochs=1)
    assert (critic.steps, generator.steps) == (6, 2)
    expected = plain_gan_loop(range(1, 7), (3, 6))
    for name in models:
        assert_same(models[name], expected[name])


def test_an_update_may_stand_in_the_plan_twice_or_not_at_all() -> None:
    data = make_data(2)
    trainer = make_trainer()

    @trainer.on(Events.ITERATION_STARTED)
    def change(engine: Engine) -> None:
        engine.state.plan = engine.updates * 2 if engine.state.iteration == 1 else ()

    trainer.run(data, max_epochs=1)
    assert trainer.updates[0].steps == 2
    assert_same(trainer.model, plain_loop(windows_of(data, [1], [1])))


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
@pytest.mark.parametrize("times", [0, 2])
def test_a_plan_holds_for_its_iteration_alone(names: list[str], times: int) -> None:
    made: list[tuple[int, str]] = []

    def note(engine: Engine, batch: Batch) -> None:
        made.append((engine.state.iteration, engine.state.update.name))

    evaluator = Engine([Update.from_function(note, name=name) for name in names])

    def plan_once(engine: Engine) -> None:
        engine.state.plan = engine.updates[:1] * times
        planning.detach()  # so that nobody listens to the iterations that follow

    planning = evaluator.connect(Events.ITERATION_STARTED(once=2), plan_once)
    evaluator.run(make_data(3))
    every = {1: names, 2: ["a"] * times, 3: names}
    assert made == [(iteration, name) for iteration, planned in every.items() for name in planned]


def test_a_window_of_one_update_leaves_the_other_as_it_is() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)
    trainer.attach(GradientAccumulation(3, update="critic"))
    steps: list[tuple[int, str]] = []
    trainer.connect(
        Events.OPTIMIZER_STEP_COMPLETED,
        lambda engine: steps.append((engine.state.iteration, engine.state.update.name)),
    )
    trainer.run(data, max_epochs=1)
    assert [iteration for iteration, name in steps if name == "critic"] == [3, 6]
    assert [iteration for iteration, name in steps if name == "generator"] == [1, 2, 3, 4, 5, 6]

    expected, _ = make_gan()
    critic, generator = CRITIC_SGD(expected["critic"].parameters()), GENERATOR_SGD(expected["generator"].parameters())
    held: list[list[Tensor]] = []
    for iteration, real in enumerate(data, 1):
        loss = critic_loss(expected, real, iteration)
        held.append(list(torch.autograd.grad(loss, list(expected["critic"].parameters()))))
        if iteration % 3 == 0:
            for p, *gradients in zip(expected["critic"].parameters(), *held, strict=True):
                p.grad = (gradients[0] + gradients[1] + gradients[2]) / 3
            critic.step()
            held.clear()
        generator.zero_grad()
        generator_loss(expected, iteration).backward()
        generator.step()
    for name in models:
        assert_same(models[name], expected[name])


def test_a_frozen_network_among_several_updates_stays_as_it_is() -> None:
    models, data = make_gan()
    models["critic"].requires_grad_(False)
    models["critic"][2].requires_grad_(True)  # type: ignore[index]
    before = {name: value.clone() for name, value in models["critic"].state_dict().items()}
    trainer = Engine(gan_updates(), model=models, seed=0)
    trainer.run(data, max_epochs=1)
    same = {name: torch.equal(value, before[name]) for name, value in models["critic"].state_dict().items()}
    assert same == {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False}


def test_a_skip_concerns_its_own_update_only() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)

    @trainer.on(Events.GRADIENTS_READY)
    def skip(engine: Engine) -> None:
        if engine.state.update.name == "critic":
            engine.state.update.skip("on purpose")

    trainer.run(data, max_epochs=1)
    assert [update.steps for update in trainer.updates] == [0, 6]


# ---- constructors -------------------------------------------------------------------------------------------------


async def coroutine(engine: Engine, batch: Batch) -> Tensor:
    return torch.zeros(())


BUILT = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass either forward= .* or function="),
        ({"forward": forward, "function": forward}, "pass either forward= .* or function="),
        ({"function": forward, "loss": loss_of}, "omit loss="),
        ({"forward": 3}, "forward=3 is not callable"),
        ({"forward": forward, "loss": "mse"}, "loss='mse' is not callable"),
        ({"forward": forward, "loss": loss_of, "optimizer": 0.1}, "optimizer=0.1 is not callable"),
        ({"function": forward, "optimizer": SGD, "parameters": []}, r"parameters=\[\] is not callable"),
        ({"forward": forward, "optimizer": SGD}, "an optimizer needs a loss"),
        ({"forward": forward, "loss": loss_of, "optimizer": BUILT, "parameters": list}, "optimizer= is already built"),
        ({"forward": lambda batch: None}, r"forward=.* must accept two arguments"),
        ({"function": lambda: None}, r"function=.* must accept two arguments"),
        ({"forward": forward, "loss": lambda output, batch: None}, r"loss=.* must accept \(engine, output, batch\)"),
        ({"function": coroutine}, "function=.* is a coroutine function"),
    ],
    ids=[
        "nothing",
        "forward and function",
        "function and loss",
        "forward is a number",
        "loss is a name",
        "optimizer is a number",
        "parameters is a list",
        "optimizer without loss",
        "optimizer is built",
        "forward of one argument",
        "function of none",
        "loss of two",
        "function is a coroutine",
    ],
)
def test_an_update_that_makes_no_sense_is_refused_where_it_is_written(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"Update 'generator': .*{message}"):
        Update(**arguments, name="generator")


def test_a_supervised_loss_takes_two_arguments() -> None:
    with pytest.raises(TypeError, match=r"Update 'main': loss=.*must accept two arguments"):
        Update.supervised(loss_of)  # type: ignore[arg-type]


@pytest.mark.parametrize("update", [None, [], forward, "main", [Update.prediction(), forward]])
def test_an_engine_takes_updates_only(update: Any) -> None:
    with pytest.raises(TypeError, match="is not an Update or a sequence of them"):
        Engine(update)


def test_updates_of_one_engine_have_different_names() -> None:
    with pytest.raises(ValueError, match=r"two updates have the same name in \['main', 'main'\]"):
        Engine([Update.prediction(), Update.prediction()])


def test_to_train_every_update_has_an_optimizer() -> None:
    with pytest.raises(ValueError, match="'judge' has no optimizer"):
        Engine([Update.supervised(mse, SGD), Update.prediction(name="judge")], model=make_model())


def test_one_update_serves_several_engines() -> None:
    data, update = make_data(), Update.supervised(mse, SGD)
    one, two = make_trainer(update), make_trainer(update)
    one.run(data, max_epochs=1)
    two.run(data, max_epochs=1)
    assert_same(one.model, two.model)
    assert one.updates[0].optimizer is not two.updates[0].optimizer


def test_the_evaluation_of_an_update_has_its_loss_and_changes_nothing() -> None:
    evaluator = make_trainer(Update.supervised(mse, SGD).evaluation())
    losses: list[Tensor | None] = []
    modes: list[bool] = []
    evaluator.connect(Events.LOSS_COMPUTED, lambda engine: losses.append(engine.state.update.loss))
    evaluator.connect(Events.LOSS_COMPUTED, lambda engine: modes.append(engine.model.training))
    evaluator.connect(Events.BACKWARD_STARTED, lambda engine: pytest.fail("an evaluation has no backward"))
    data = make_data(2)
    evaluator.run(data)
    model = make_model()
    expected = [mse(model(x), y).detach() for x, y in data]
    assert all(loss is not None and torch.equal(loss, one) for loss, one in zip(losses, expected, strict=True))
    assert modes == [False, False]
    assert evaluator.model.training
    assert_same(evaluator.model, model)


# ---- errors that are explained ------------------------------------------------------------------------------------


def notes_of(trainer: Engine, data: Any, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        trainer.run(data, max_epochs=1)
    return "\n".join(caught.value.__notes__)


def test_a_loss_that_is_no_scalar_is_explained() -> None:
    trainer = make_trainer(Update.supervised(partial(mse, reduction="none"), SGD))
    notes = notes_of(trainer, make_data(), RuntimeError)
    assert "in the backward of update 'main', epoch 1, iteration 1" in notes
    assert "has shape (4, 2); return a scalar, such as its mean" in notes


def test_a_loss_that_is_no_tensor_is_explained() -> None:
    trainer = make_trainer(Update.supervised(lambda output, target: 0.5, SGD))  # type: ignore[arg-type, return-value]
    assert "is 0.5; return a scalar tensor or None" in notes_of(trainer, make_data(), AttributeError)


def test_a_loss_without_a_gradient_is_explained() -> None:
    trainer = make_trainer(Update.supervised(lambda output, target: mse(output.detach(), target), SGD))
    notes = notes_of(trainer, make_data(), RuntimeError)
    assert "does not depend on any parameter that requires a gradient" in notes


def test_a_batch_on_another_device_than_the_model_is_explained() -> None:
    data = [(x.to("meta"), y.to("meta")) for x, y in make_data()]
    notes = notes_of(make_trainer(), data, RuntimeError)
    assert "in the forward of update 'main', epoch 1, iteration 1" in notes
    assert "the batch is on meta and the model on cpu; attach DeviceTransfer()" in notes


def test_an_error_that_has_nothing_to_do_with_devices_is_not_explained_by_them() -> None:
    data = [(torch.randn(4, 7), torch.randn(4, 2))]
    notes = notes_of(make_trainer(), data, RuntimeError)
    assert notes == "in the forward of update 'main', epoch 1, iteration 1"


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_an_error_says_in_which_act_it_was_raised(where: str) -> None:
    notes = notes_of(raising_engine(where), make_data(), ArithmeticError)
    assert notes == f"in the {where} of update 'main', epoch 1, iteration 2"


def test_an_optimizer_of_another_model_is_refused() -> None:
    trainer = make_trainer(Update.supervised(mse, SGD(make_model().parameters())))
    with pytest.raises(ValueError, match="update 'main': its SGD holds none of the model's parameters"):
        trainer.run(make_data(), max_epochs=1)


def test_a_built_optimizer_of_the_same_model_trains_as_a_factory_does() -> None:
    data, model = make_data(), make_model()
    trainer = Engine(Update.supervised(mse, SGD(model.parameters())), model=model)
    trainer.run(data, max_epochs=1)
    assert_same(model, plain_loop([[batch] for batch in data]))


def test_a_model_on_the_meta_device_is_refused() -> None:
    trainer = Engine(Update.supervised(mse, SGD), model=make_model().to("meta"))
    with pytest.raises(ValueError, match=r"the model 'model' is on the meta device.*'0.weight'.*to_empty"):
        trainer.run(make_data(), max_epochs=1)


def test_a_factory_that_makes_no_optimizer_is_refused() -> None:
    trainer = make_trainer(Update.supervised(mse, lambda parameters: "SGD"))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="update 'main': the optimizer factory returned 'SGD'"):
        trainer.run(make_data(), max_epochs=1)


def test_nothing_to_optimize_is_an_error() -> None:
    trainer = Engine(Update.from_function(lambda engine, batch: None, SGD))
    with pytest.raises(ValueError, match="there is nothing to optimize"):
        trainer.run(make_data(), max_epochs=1)


def test_parameters_may_be_chosen_and_the_others_stay() -> None:
    model = make_model()
    update = Update.supervised(mse, SGD, parameters=lambda engine: engine.model[2].parameters())
    trainer = Engine(update, model=model)
    trainer.run(make_data(), max_epochs=1)
    before = make_model()
    assert torch.equal(model.get_parameter("0.weight"), before.get_parameter("0.weight"))
    assert not torch.equal(model.get_parameter("2.weight"), before.get_parameter("2.weight"))


def test_an_error_discards_the_window_and_leaves_no_gradient() -> None:
    trainer = raising_engine("BACKWARD_COMPLETED")
    trainer.attach(GradientAccumulation(4))
    with pytest.raises(ArithmeticError):
        trainer.run(make_data(), max_epochs=1)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.updates[0].window.filled == 0


# ---- reading flags from a device ----------------------------------------------------------------------------------


def test_flags_are_read_together_and_reported_in_the_order_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = Tensor.tolist

    def counted(self: Tensor) -> Any:
        reads.append(self.numel())
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    update = make_trainer().updates[0]
    reported: list[tuple[Any, ...]] = []
    update.read_later(lambda *values: reported.append(("one", *values)), torch.tensor([0.0]), torch.tensor(2.0))
    update.read_later(lambda *values: reported.append(("none", *values)))
    update.read_later(lambda *values: reported.append(("another", *values)), torch.tensor(True))
    assert reported == []
    update.read_flags()
    assert reported == [("one", False, True), ("none",), ("another", True)]
    assert reads == [3]
    update.read_flags()
    assert len(reported) == 3, "each question is answered once"


def test_who_asked_without_a_flag_is_known_without_reading() -> None:
    update = make_trainer().updates[0]
    reported: list[str] = []
    update.read_later(lambda: reported.append("done"))
    update.read_flags()
    assert reported == ["done"]


def test_what_was_asked_before_an_error_is_not_answered_in_the_next_run() -> None:
    trainer = make_trainer()
    reported: list[int] = []

    @trainer.on(Events.GRADIENTS_READY, phase=Phase.FINALIZE)
    def ask(engine: Engine) -> None:
        iteration = engine.state.iteration
        engine.state.update.read_later(lambda flag: reported.append(iteration), torch.tensor(1))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    failing = trainer.connect(Events.GRADIENTS_READY(once=2), fail, phase=Phase.FINALIZE)

    @trainer.on(Events.GRADIENTS_READY, phase=Phase.FINALIZE, rank=1)
    def look(engine: Engine) -> None:
        engine.state.update.read_flags()

    with pytest.raises(ArithmeticError):
        trainer.run(make_data(), max_epochs=1)
    failing.detach()
    trainer.run(make_data(), max_iters=3)
    assert reported == [1, 2, 3]
