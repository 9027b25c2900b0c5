"""What waits for the end of an iteration: stops that are asked for, held back and withdrawn, ends of epochs, preemption."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.handlers import GradientAccumulation
from signalfire.testing import trace
from tests import kit
from tests.kit import build, digest, linear

Batch = tuple[Tensor, Tensor]


def make_data(batches: int = 10) -> list[Batch]:
    return kit.batches(batches, 3, 1, seed=0)


def make_engine(**options: Any) -> Engine:
    return build(linear(3, 1, seed=0), **options)


def make_noting_engine(updates: int) -> tuple[Engine, list[Any]]:
    """An engine with so many updates, and the batches that were worked on, once for each."""
    seen: list[Any] = []

    def note(engine: Engine, batch: Any) -> Tensor:
        seen.append(batch)
        loss: Tensor = engine.model(torch.ones(1)).sum()
        return loss

    specs = [Update.from_function(note, partial(torch.optim.SGD, lr=0.1), name=f"{n}") for n in range(updates)]
    return Engine(specs, model=nn.Linear(1, 1), seed=0), seen


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_it_sleeps_while_nobody_asks_for_anything_and_after_the_run() -> None:
    engine, awake = make_engine(), dict[int, bool]()
    engine.connect(
        Events.UPDATE_STARTED, lambda engine: awake.update({engine.state.iteration: engine.boundary.is_awake})
    )
    engine.connect(Events.ITERATION_STARTED(once=2), lambda engine: engine.boundary.wake())
    engine.run(make_data(4), max_epochs=1)
    assert awake == {1: False, 2: True, 3: False, 4: False}
    assert not engine.boundary.is_awake


@pytest.mark.parametrize("bound", [{"max_steps": 2}, {"max_time": "1h", "max_iters": 2}])
def test_bounds_that_only_it_can_notice_keep_it_awake_until_the_end_of_the_run(bound: dict[str, Any]) -> None:
    engine, awake = make_engine(), list[bool]()
    engine.connect(Events.UPDATE_STARTED, lambda engine: awake.append(engine.boundary.is_awake))
    engine.run(make_data(), **bound)
    assert awake == [True, True]
    assert not engine.boundary.is_awake


# ---- stops ----------------------------------------------------------------------------------------------------------


def test_terminate_lets_the_other_receivers_run_and_ends_with_terminated_and_completed() -> None:
    engine = make_engine()
    ran: list[str] = []

    @engine.on(Events.ITERATION_COMPLETED(once=2), phase=Phase.PREPARE)
    def stop(engine: Engine) -> None:
        engine.terminate("enough")

    @engine.on(Events.ITERATION_COMPLETED(once=2), phase=Phase.PERSIST)
    def other(engine: Engine) -> None:
        ran.append("other")

    seen = trace(engine)
    state = engine.run(make_data(3), max_epochs=5)
    assert (state.epoch, state.iteration, state.stop_reason) == (1, 2, "enough")
    assert ran == ["other"]
    assert [name for name, _, _ in seen[-4:]] == ["ITERATION_COMPLETED", "TERMINATED", "COMPLETED", "ENDED"]


def test_terminate_in_started_ends_the_run_before_the_first_batch() -> None:
    engine = make_engine()

    @engine.on(Events.STARTED)
    def stop(engine: Engine) -> None:
        engine.terminate("not today")

    seen = trace(engine)
    assert engine.run(make_data(), max_epochs=2).iteration == 0
    assert [name for name, _, _ in seen][-3:] == ["TERMINATED", "COMPLETED", "ENDED"]
    assert ("EPOCH_STARTED", 1, 0) not in seen


def test_terminate_outside_a_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not running"):
        make_engine().terminate("why")


def test_a_stop_without_a_reason_is_refused() -> None:
    engine = make_engine()
    engine.connect(Events.STARTED, engine.terminate)
    with pytest.raises(TypeError, match="expected a short reason"):
        engine.run(make_data(), max_epochs=1)


@pytest.mark.parametrize(
    ("event", "steps", "iteration"),
    [
        (Events.GET_BATCH_STARTED, 2, 2),
        (Events.GET_BATCH_COMPLETED, 2, 2),
        (Events.ITERATION_STARTED, 2, 2),
        (Events.UPDATE_STARTED, 2, 3),
        (Events.LOSS_COMPUTED, 2, 3),
        (Events.GRADIENTS_READY, 2, 3),
        (Events.OPTIMIZER_STEP_COMPLETED, 3, 3),
        (Events.ITERATION_COMPLETED, 3, 3),
    ],
)
def test_a_stop_skips_the_step_that_was_not_made_yet(event: Events, steps: int, iteration: int) -> None:
    engine = make_engine()
    skipped: list[Any] = []
    engine.connect(event(once=3), lambda engine: engine.terminate("the loss is not finite"))
    engine.connect(
        Events.OPTIMIZER_STEP_COMPLETED, lambda engine: skipped.append(engine.state.update.skipped), phase=Phase.CONTROL
    )
    state = engine.run(make_data(), max_epochs=1)
    assert (engine.updates[0].steps, state.iteration, state.stop_reason) == (steps, iteration, "the loss is not finite")
    assert skipped[:steps] == [None] * steps

    plain_model = make_engine().model
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    for x, y in make_data()[:steps]:
        optimizer.zero_grad()
        nn.functional.mse_loss(plain_model(x), y).backward()
        optimizer.step()
    assert torch.equal(plain_model.weight, engine.model.weight)


@pytest.mark.parametrize("updates", [1, 2])
def test_an_iteration_whose_batch_asked_for_a_stop_as_it_was_read_is_not_made(updates: int) -> None:
    seen: list[int] = []

    def see(engine: Engine, batch: Batch) -> None:
        seen.append(engine.state.iteration)

    engine = Engine([Update.from_function(see, name=f"update {number}") for number in range(updates)])

    def batches() -> Iterator[int]:
        for number in range(5):
            if number == 2:
                engine.terminate("the source has run dry")
            yield number

    state = engine.run(batches())
    assert (state.iteration, state.stop_reason) == (2, "the source has run dry")
    assert seen == [1] * updates + [2] * updates


@pytest.mark.parametrize("updates", [1, 2])
def test_a_stop_asked_for_before_a_batch_is_read_leaves_it_to_the_next_run(updates: int) -> None:
    seen: list[int] = []
    engine = Engine([Update.from_function(lambda _, batch: seen.append(batch), name=f"{n}") for n in range(updates)])
    engine.connect(Events.GET_BATCH_STARTED(once=3), lambda engine: engine.terminate("enough"))
    batches = iter(range(5))
    state = engine.run(batches)
    assert (state.iteration, state.stop_reason, seen) == (2, "enough", [0] * updates + [1] * updates)
    assert next(batches) == 2


# ---- stops that are held back or withdrawn --------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "ended"), [({"min_epochs": 2}, 6), ({"min_iters": 5}, 5), ({}, 1)])
def test_minimum_bounds_hold_a_stop_back(held: dict[str, Any], ended: int) -> None:
    engine = make_engine()

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def stop(engine: Engine) -> None:
        engine.terminate("early")

    assert engine.run(make_data(3), max_epochs=4, **held).iteration == ended


def test_a_stop_that_is_held_back_can_be_withdrawn() -> None:
    engine = make_engine()

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def stop(engine: Engine) -> None:
        engine.terminate("early", by="me")

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def withdraw(engine: Engine) -> None:
        engine.boundary.withdraw(by="me")

    state = engine.run(make_data(3), max_epochs=3, min_iters=4)
    assert (state.iteration, state.stop_reason) == (9, None)


BEFORE_THE_STEP = [
    Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED,
]  # fmt: skip


@pytest.mark.parametrize("event", [*BEFORE_THE_STEP, Events.UPDATE_COMPLETED, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize("training", [True, False])
def test_a_stop_that_is_withdrawn_at_once_leaves_the_run_as_it_was(event: Events, training: bool) -> None:
    engine = make_engine() if training else make_engine(training=False)

    @engine.on(event(once=1))
    def change_of_mind(engine: Engine) -> None:
        engine.terminate("early", by="me")
        engine.boundary.withdraw(by="me")

    batches = make_data(6)
    seen = []
    engine.on(Events.ITERATION_COMPLETED)(lambda engine: seen.append(engine.state.batch))
    state = engine.run(iter(batches), max_epochs=1)  # what is taken from an iterator and not used would be lost
    assert (state.iteration, state.stop_reason, seen) == (6, None, batches)
    assert not training or engine.updates[0].steps == 6


@pytest.mark.parametrize("event", [*BEFORE_THE_STEP, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize("listened", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("data", [list, iter])  # one would be begun anew, of the other a batch would be lost
def test_a_handler_that_stops_the_run_and_is_switched_off_takes_its_stop_along(
    event: Events, listened: bool, updates: int, data: Any
) -> None:
    class Stopping(Handler):
        @on(event(once=1 if event is Events.EPOCH_STARTED else 2))
        def stop(self, engine: Engine) -> None:
            engine.terminate("early", by=self.name)
            self.enabled = False

    engine, seen = make_noting_engine(updates)
    engine.attach(Stopping())
    if listened:
        engine.on(Events.GET_BATCH_STARTED)(lambda engine: None)
    state = engine.run(data([1, 2, 3, 4]), max_epochs=1)
    assert (state.iteration, state.stop_reason) == (4, None)
    assert seen == [batch for batch in (1, 2, 3, 4) for _ in range(updates)]


@pytest.mark.parametrize("event", [*BEFORE_THE_STEP[1:], Events.UPDATE_STARTED, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_stop_in_the_last_iteration_that_has_to_be_made_waits_for_its_end(
    event: Events, again: bool, updates: int
) -> None:
    engine, seen = make_noting_engine(updates)

    @engine.on(event(after=2) if again else event(once=3))
    def stop(engine: Engine) -> None:
        engine.terminate("enough")

    state = engine.run(iter([1, 2, 3, 4, 5]), max_epochs=1, min_iters=3)
    assert (state.iteration, state.stop_reason) == (3, "enough")
    assert seen == [batch for batch in (1, 2, 3) for _ in range(updates)]


@pytest.mark.parametrize("listened", [False, True])
def test_a_stop_asked_for_at_the_start_holds_beside_a_loaded_state(listened: bool) -> None:
    first = make_engine()
    first.run(make_data(4), max_epochs=1)
    engine = make_engine()
    engine.load_state_dict(first.state_dict())
    engine.on(Events.STARTED)(lambda engine: engine.terminate("not today"))
    if listened:
        engine.on(Events.GET_BATCH_STARTED)(lambda engine: None)
    state = engine.run(make_data(4), max_epochs=2)
    assert (state.iteration, state.stop_reason) == (4, "not today")


def test_a_stop_withdrawn_before_the_updates_skips_none_of_them() -> None:
    engine, seen = make_noting_engine(2)

    @engine.on(Events.ITERATION_STARTED(once=2))
    def change_of_mind(engine: Engine) -> None:
        engine.terminate("early")
        engine.boundary.withdraw()

    engine.run([1, 2, 3], max_epochs=1)
    assert seen == [1, 1, 2, 2, 3, 3]


def test_of_two_stops_the_one_that_is_not_withdrawn_holds() -> None:
    engine = make_engine()

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def stop(engine: Engine) -> None:
        engine.terminate("early", by="me")
        engine.terminate("early, too", by="another")
        engine.boundary.withdraw(by="me")

    state = engine.run(make_data(3), max_epochs=3)
    assert (state.iteration, state.stop_reason) == (2, "early, too")


# ---- ends of epochs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, Events.ITERATION_STARTED])
@pytest.mark.parametrize("bounds", [{"max_iters": 3}, {"max_steps": 3}], ids=str)
def test_epochs_that_all_end_before_their_first_iteration_are_an_error(event: Events, bounds: dict[str, Any]) -> None:
    engine = build(linear(3, 1))
    # Without an error the run would never end.
    engine.connect(Events.EPOCH_STARTED(once=100), lambda engine: engine.terminate("the test gives up"))
    engine.connect(event, lambda engine: engine.terminate_epoch("enough"))
    with pytest.raises(
        RuntimeError, match=r"10 epochs in a row ended before their first iteration \(reason: 'enough'\)"
    ):
        engine.run(kit.batches(4, inputs=3), **bounds)


def test_some_epochs_may_end_before_their_first_iteration() -> None:
    engine = build(linear(3, 1))
    few = Events.EPOCH_STARTED(when=lambda engine: engine.state.epoch % 10)
    engine.connect(few, lambda engine: engine.terminate_epoch("enough"))
    assert engine.run(kit.batches(4, inputs=3), max_iters=6).epoch == 20
    engine = build(linear(3, 1))
    engine.connect(Events.EPOCH_STARTED, lambda engine: engine.terminate_epoch("enough"))
    assert engine.run(kit.batches(4, inputs=3), max_epochs=15).epoch == 15


def test_terminate_epoch_ends_the_epoch_and_the_next_begins() -> None:
    engine = make_engine()

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def stop(engine: Engine) -> None:
        engine.terminate_epoch("enough of this one")

    seen = trace(engine)
    state = engine.run(make_data(3), max_epochs=2)
    assert (state.epoch, state.iteration) == (2, 5)
    assert ("EPOCH_COMPLETED", 1, 2) in seen
    assert ("EPOCH_STARTED", 2, 2) in seen


@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED, Events.STARTED])
def test_there_is_no_epoch_to_end_between_two(event: Events) -> None:
    engine = make_engine()
    engine.connect(event, lambda engine: engine.terminate_epoch("why"))
    with pytest.raises(RuntimeError, match="no epoch is under way"):
        engine.run(make_data(), max_epochs=2)


# ---- stopped runs ---------------------------------------------------------------------------------------------------


def test_a_stopped_engine_stays_stopped_until_it_is_given_larger_bounds() -> None:
    engine = make_engine()

    @engine.on(Events.EPOCH_COMPLETED(once=1))
    def stop(engine: Engine) -> None:
        engine.terminate("early")

    engine.run(make_data(), max_epochs=5)
    with pytest.warns(UserWarning, match="stopped \\(early\\)"):
        engine.run(make_data(), max_epochs=5)
    assert engine.state.epoch == 1
    resumed = make_engine()
    resumed.load_state_dict(engine.state_dict())
    with pytest.warns(UserWarning, match="stopped \\(early\\)"):
        resumed.run(make_data(), max_epochs=5)
    assert resumed.state.epoch == 1
    assert resumed.run(make_data(), max_epochs=6).epoch == 6


def test_a_run_stopped_under_a_bound_of_time_goes_on_under_another() -> None:
    engine = make_engine()
    with engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: engine.terminate("enough")):
        engine.run(make_data(), max_time="1h")
    assert engine.run(make_data(), max_time="2h", max_epochs=1).iteration == 10


@pytest.mark.parametrize("asked", ["stop", "epoch"])
def test_what_was_asked_for_and_has_not_taken_effect_is_saved_and_takes_effect_after_loading(asked: str) -> None:
    states: list[dict[str, Any]] = []

    def ask(engine: Engine) -> None:
        if asked == "stop":
            engine.terminate("early")
        else:
            engine.terminate_epoch("enough of this one")
        states.append(engine.state_dict())

    whole = make_engine()
    whole.connect(Events.ITERATION_COMPLETED(once=2), ask)
    bounds: dict[str, Any] = {"max_epochs": 2, "min_iters": 3}
    expected = whole.run(make_data(4), **bounds)
    assert (expected.iteration, expected.stop_reason) == ((3, "early") if asked == "stop" else (6, None))
    resumed = make_engine()
    resumed.load_state_dict(states[0])
    state = resumed.run(make_data(4), **bounds)
    assert (state.iteration, state.epoch, state.stop_reason) == (
        expected.iteration,
        expected.epoch,
        expected.stop_reason,
    )


class Unsized:
    """Data whose end is known once it is reached."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(make_data(3))


LOADER = DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), batch_size=4, shuffle=True)


@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
@pytest.mark.parametrize("data", [make_data(3), Unsized(), LOADER, None], ids=["list", "unsized", "loader", "none"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("iteration", [2, 3, 6])
def test_a_stop_at_any_iteration_leaves_a_resumed_run_with_what_was_still_to_come(
    iteration: int, window: int, data: Any
) -> None:
    """At the last iteration of an epoch this is EPOCH_COMPLETED, with its validations and best checkpoints."""

    def make() -> tuple[Engine, list[Any]]:
        engine = make_engine() if data is not None else make_noting_engine(1)[0]
        engine.attach(GradientAccumulation(window))
        engine.connect(
            Events.ITERATION_COMPLETED(once=iteration), lambda engine: engine.terminate("enough"), phase=Phase.CONTROL
        )
        return engine, trace(engine)

    states: list[tuple[int, dict[str, Any]]] = []
    whole, seen = make()

    def save(engine: Engine) -> None:
        states.append((len(seen), engine.state_dict()))

    whole.connect(Events.ITERATION_COMPLETED, save, phase=Phase.PERSIST)
    bounds: dict[str, Any] = {"max_epochs": 3, "epoch_length": None if data is not None else 3}
    whole.run(data, **bounds)
    assert len(states) == iteration
    for place, saved in states:
        resumed, again = make()
        resumed.load_state_dict(saved)
        resumed.run(data, **bounds)
        began = next(n for n, (name, *_) in enumerate(again) if name == "CHECKPOINT_LOADED") + 1
        assert again[began:] == seen[place:]
        assert digest(resumed.state_dict()) == digest(whole.state_dict())


def test_a_stop_that_an_error_kept_from_taking_effect_does_so_in_the_next_run() -> None:
    engine = make_engine()
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.terminate("early"))

    def fail(engine: Engine) -> None:
        raise LookupError

    with engine.connect(Events.ITERATION_COMPLETED(once=2), fail, phase=Phase.PERSIST), pytest.raises(LookupError):
        engine.run(make_data(4), max_epochs=1)
    assert engine.boundary.stops == {"user": "early"}
    state = engine.run(make_data(4), max_epochs=1)
    assert (state.iteration, state.stop_reason, engine.boundary.stops) == (2, "early", {})


# ---- preemption -----------------------------------------------------------------------------------------------------


def test_a_preemption_does_not_wait_for_the_least_of_a_run_and_finishes_its_iteration() -> None:
    engine, seen = make_engine(), list[tuple[str, int]]()
    for event in (Events.PREEMPTED, Events.TERMINATED, Events.COMPLETED):
        engine.connect(event, lambda engine, event=event: seen.append((event.name, engine.updates[0].steps)))
    engine.connect(Events.FORWARD_STARTED(once=2), lambda engine: engine.boundary.preempt("the node goes away"))
    state = engine.run(make_data(), max_epochs=3, min_epochs=2)
    assert (state.iteration, state.stop_reason) == (2, "the node goes away")
    assert seen == [("PREEMPTED", 2), ("TERMINATED", 2), ("COMPLETED", 2)]
    with pytest.raises(RuntimeError, match=r"preempt\('too late'\): the engine is not running"):
        engine.boundary.preempt("too late")


@pytest.mark.moderate
@pytest.mark.parametrize(
    "worked_on", ["_set_due", "wait", "_replan", "_select", "attend", "wake", "_sleep_if_nothing_recurs"]
)
def test_a_preemption_is_heard_whatever_the_bus_was_doing(worked_on: str) -> None:
    """As a handler of SIGTERM calls it: between any two instructions of the function, the run ends with that iteration."""

    def run(place: int) -> tuple[bool, Engine]:
        """A run that is preempted at one place in its second iteration, and whether there was such a place."""
        engine = Engine(Update.from_function(lambda engine, batch: None))
        places = itertools.count()
        found = False

        def trace(frame: FrameType, what: str, _: Any) -> Any:
            nonlocal found
            if frame.f_code.co_name != worked_on or engine.state.iteration != 2:
                return None
            frame.f_trace_opcodes = True
            if what == "opcode" and next(places) == place:
                found = True
                engine.boundary.preempt("SIGTERM")
            return trace

        @engine.on(Events.UPDATE_COMPLETED(every=2))
        def change(engine: Engine) -> None:
            engine.updates[0].skip("on purpose")
            engine.connect(Events.ITERATION_COMPLETED(every=1000), rare := lambda engine: None)
            engine.signal(Events.ITERATION_COMPLETED).disconnect(rare)

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            engine.run(range(10))
        finally:
            sys.settrace(before)
        return found, engine

    for place in itertools.count():
        found, engine = run(place)
        if not found:
            break
        assert engine.state.stop_reason == "SIGTERM", f"place {place}"
        assert engine.state.iteration in (2, 3), f"place {place}"  # 3: once the boundary had looked
    assert place > 10
