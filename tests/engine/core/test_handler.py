"""Handlers: declared, named, attached, toggled inside and outside a run, found again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, EventEnum, Events, Handler, Phase, Update, on
from signalfire.handlers import DeviceTransfer, EarlyStopping, GradientAccumulation, GradientClipping
from signalfire.testing import fingerprint
from tests import kit
from tests.kit import build, linear

Batch = tuple[Tensor, Tensor]


def make_data(batches: int = 6) -> list[Batch]:
    return kit.batches(batches, 3, 2, seed=0)


def make_engine() -> Engine:
    return build(linear(3, 2, seed=0))


class Recorder(Handler):
    """Remembers which events it received and when."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self.seen: list[tuple[str, int]] = []

    @on(Events.STARTED)
    def started(self, engine: Engine) -> None:
        self.seen.append(("started", engine.state.iteration))

    @on(Events.EPOCH_STARTED)
    def epoch_started(self, engine: Engine) -> None:
        self.seen.append(("epoch", engine.state.iteration))

    @on(Events.ITERATION_STARTED)
    def iteration_started(self, engine: Engine) -> None:
        self.seen.append(("before", engine.state.iteration))

    @on(Events.ITERATION_COMPLETED)
    def iteration_completed(self, engine: Engine) -> None:
        self.seen.append(("after", engine.state.iteration))

    @on(Events.ENDED)
    def ended(self, engine: Engine) -> None:
        self.seen.append(("ended", engine.state.iteration))


# ---- declarations ---------------------------------------------------------------------------------------------------


def test_the_wiring_can_be_read_off_the_class() -> None:
    found = [(one.method, one.event, one.phase, one.rank) for one in GradientClipping.subscriptions]
    assert found == [("clip", Events.GRADIENTS_READY, Phase.CHANGE, 0)]


def test_a_subclass_inherits_subscriptions_and_an_overriding_method_stays_subscribed() -> None:
    class Louder(Recorder):
        def started(self, engine: Engine) -> None:
            self.seen.append(("STARTED", engine.state.iteration))

        @on(Events.ITERATION_COMPLETED(every=3))
        def iteration_completed(self, engine: Engine) -> None:
            self.seen.append(("every third", engine.state.iteration))

    engine, louder = make_engine(), Louder()
    engine.attach(louder)
    engine.run(make_data(3), max_epochs=1)
    expected = [
        ("STARTED", 0),
        ("epoch", 0),
        ("before", 1),
        ("before", 2),
        ("before", 3),
        ("every third", 3),
        ("ended", 3),
    ]
    assert louder.seen == expected


def test_one_method_may_have_several_subscriptions_and_events_of_ones_own() -> None:
    class Own(EventEnum):
        PING = "ping"

    class Several(Handler):
        count = 0

        @on(Own.PING(every=2))
        @on(Events.EPOCH_STARTED | Events.EPOCH_COMPLETED)
        def act(self, engine: Engine) -> None:
            self.count += 1

    engine, several = make_engine(), Several()
    with pytest.raises(ValueError, match="register_events"):
        engine.fire(Own.PING)
    engine.attach(several)  # which registers the events that it subscribes to
    engine.run(make_data(), max_epochs=1)
    assert several.count == 2
    for _ in range(4):
        engine.fire(Own.PING)
    assert several.count == 4


def test_a_declaration_names_an_attribute_and_none_there_means_no_subscription() -> None:
    class Optional(Handler):
        def __init__(self, every: Any) -> None:
            super().__init__()
            self.every = every
            self.seen: list[int] = []

        @on("every")
        def act(self, engine: Engine) -> None:
            self.seen.append(engine.state.iteration)

    for every, expected in (("2it", [2, 4, 6]), (Events.ITERATION_COMPLETED(once=5), [5]), ("1ep", [6]), (None, [])):
        engine, optional = make_engine(), Optional(every)
        engine.attach(optional)
        engine.run(make_data(), max_epochs=1)
        assert optional.seen == expected


def test_on_refuses_what_is_no_event_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="not an event"):
        on(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="9"):
        on(Events.STARTED, phase=9)  # type: ignore[arg-type]


def test_a_method_whose_signature_does_not_fit_is_refused_when_attached() -> None:
    class Wrong(Handler):
        @on(Events.STARTED)
        def act(self) -> None: ...

    engine = make_engine()
    with pytest.raises(TypeError, match=r"Wrong\.act at Events\.STARTED.*act\(self, engine\)"):
        engine.attach(Wrong())
    assert engine.handlers == {}


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("GradientClipping", "gradient_clipping"),
        ("EMA", "ema"),
        ("LRScheduling", "lr_scheduling"),
        ("A", "a"),
        ("MyH2O", "my_h2_o"),
    ],
)
def test_a_handler_is_named_after_its_class(kind: str, name: str) -> None:
    assert type(kind, (Handler,), {})().name == name


@pytest.mark.parametrize("name", ["", "two words", "a/b", 3])
def test_a_name_that_could_not_be_used_in_files_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"name={name!r}")):
        Recorder(name=name)


@pytest.mark.parametrize(
    ("attach", "error", "message"),
    [
        (
            lambda engine: engine.attach(Recorder()),
            ValueError,
            "the name is taken by .*name='...'.*, or detach the other one first: engine.detach.'recorder'",
        ),
        (
            lambda engine: engine.attach(engine.handlers["recorder"]),
            ValueError,
            "is already attached; detach it first: engine.detach.'recorder'",
        ),
        (
            lambda engine: make_engine().attach(engine.handlers["recorder"]),
            ValueError,
            "attached to a different engine",
        ),
        (lambda engine: engine.attach(Recorder), TypeError, r"pass an instance: Recorder\(...\)"),
        (lambda engine: engine.attach(print), TypeError, "engine.on"),
        (lambda engine: engine.attach("recorder"), TypeError, "expected a Handler"),
        (lambda engine: engine.detach("recoder"), KeyError, "attached handlers: recorder"),
        (lambda engine: engine.detach(print), ValueError, "not connected"),
        (lambda engine: engine.find_update("other"), KeyError, "the updates are main"),
    ],
)
def test_bad_attachments_fail_at_once(attach: Callable[[Engine], object], error: type[Exception], message: str) -> None:
    engine = make_engine()
    engine.attach(Recorder())
    with pytest.raises(error, match=message):
        attach(engine)
    assert list(engine.handlers) == ["recorder"]


def test_if_one_of_several_cannot_be_attached_none_is() -> None:
    engine = make_engine()
    with pytest.raises(TypeError):
        engine.attach(Recorder(), GradientClipping(max_norm=1.0), Recorder)  # type: ignore[arg-type]
    assert engine.handlers == {}
    assert engine.signal(Events.GRADIENTS_READY).connections == ()


def test_a_handler_for_training_is_refused_by_an_engine_that_evaluates() -> None:
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="for training"):
        evaluator.attach(EarlyStopping("loss"))


# ---- attaching and detaching ----------------------------------------------------------------------------------------


def test_handles_detach_and_work_as_context_managers() -> None:
    engine = make_engine()
    handle = engine.attach(Recorder(), GradientClipping(max_norm=1.0))
    assert engine.has("recorder")
    assert engine.has("gradient_clipping", Events.GRADIENTS_READY)
    assert not engine.has("gradient_clipping", Events.STARTED)
    handle.detach()
    handle.detach()
    assert engine.handlers == {}
    recorder = Recorder()
    with engine.attach(recorder):
        assert engine.has(recorder)
        assert recorder.engine is engine
    assert not engine.has(recorder)
    assert recorder.engine is None
    seen: list[int] = []

    def function(engine: Engine) -> None:
        seen.append(engine.state.iteration)

    with engine.connect(Events.ITERATION_COMPLETED, function):
        assert engine.has(function)
        engine.run(make_data(2), max_epochs=1)
    assert not engine.has(function)
    engine.on(Events.STARTED | Events.ENDED)(function)
    engine.detach(function)
    engine.run(make_data(2), max_epochs=2)
    assert seen == [1, 2]


def test_disabled_outside_a_run_is_at_once_and_equal_to_detached() -> None:
    engine, recorder = make_engine(), Recorder()
    engine.attach(recorder)
    with engine.without("recorder"):
        assert not recorder.enabled
        assert engine.has("recorder")
        engine.run(make_data(), max_epochs=1)
    assert recorder.seen == []
    assert recorder.enabled
    recorder.enabled = False
    engine.run(make_data(), max_epochs=2)
    recorder.enabled = True
    engine.run(make_data(2), max_iters=13)
    assert [what for what, _ in recorder.seen] == ["started", "epoch", "before", "after", "ended"]
    with pytest.raises(KeyError, match="attached handlers: recorder"), engine.without("recoder"):
        pass


# ---- inside a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.BACKWARD_COMPLETED, Events.ITERATION_COMPLETED])
def test_attached_inside_a_run_it_joins_at_the_next_boundary_all_at_once(event: Events) -> None:
    engine, recorder = make_engine(), Recorder()
    engine.connect(event(once=2), lambda engine: engine.attach(recorder))
    engine.run(make_data(3), max_epochs=1)
    assert recorder.seen == [("started", 2), ("epoch", 2), ("before", 3), ("after", 3), ("ended", 3)]


@pytest.mark.parametrize("how", ["detach", "disable"])
def test_detached_or_disabled_inside_a_run_it_leaves_at_the_next_boundary_all_at_once(how: str) -> None:
    engine, recorder = make_engine(), Recorder()
    engine.attach(recorder)

    @engine.on(Events.ITERATION_STARTED(once=2), phase=Phase.PREPARE)
    def leave(engine: Engine) -> None:
        if how == "detach":
            engine.detach(recorder)
        else:
            recorder.enabled = False

    engine.run(make_data(4), max_epochs=1)
    expected = [("started", 0), ("epoch", 0), ("before", 1), ("after", 1), ("before", 2), ("after", 2), ("ended", 2)]
    assert recorder.seen == expected
    assert engine.has(recorder) == (how == "disable")


def test_a_toggle_waits_until_no_window_is_open() -> None:
    engine = make_engine()
    accumulation = GradientAccumulation(3)
    engine.attach(accumulation)
    steps: list[int] = []
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: steps.append(engine.state.iteration))

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def off(engine: Engine) -> None:
        accumulation.enabled = False

    @engine.on(Events.ITERATION_COMPLETED(once=5))
    def back_on(engine: Engine) -> None:
        accumulation.enabled = True

    engine.run(make_data(9), max_epochs=1)
    assert steps == [3, 4, 5, 8, 9]


def test_toggled_off_and_on_before_the_boundary_nothing_happens() -> None:
    engine, recorder = make_engine(), Recorder()
    engine.attach(recorder)

    @engine.on(Events.ITERATION_STARTED(once=2))
    def flicker(engine: Engine) -> None:
        recorder.enabled = False
        recorder.enabled = True
        with pytest.raises(RuntimeError, match="during a run"), engine.without("recorder"):
            pass

    engine.run(make_data(3), max_epochs=1)
    assert [what for what, _ in recorder.seen].count("started") == 1
    assert ("after", 2) in recorder.seen


def test_what_sets_up_the_model_cannot_join_or_leave_a_running_engine() -> None:
    engine = make_engine()
    engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: engine.attach(DeviceTransfer("cpu")))
    with pytest.raises(RuntimeError, match="between two runs"):
        engine.run(make_data(), max_epochs=1)
    assert not engine.has("device_transfer")
    transfer = DeviceTransfer("cpu")
    engine = make_engine()
    engine.attach(transfer)
    engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: setattr(transfer, "enabled", False))
    with pytest.raises(RuntimeError, match="between two runs"):
        engine.run(make_data(), max_epochs=1)
    assert transfer.enabled, "what was refused did not happen"


def test_toggled_inside_a_run_is_the_loop_that_clips_in_these_iterations_only() -> None:
    engine = make_engine()
    clipping = GradientClipping(max_norm=0.01)
    engine.attach(clipping)
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: setattr(clipping, "enabled", False))
    engine.connect(Events.ITERATION_COMPLETED(once=4), lambda engine: setattr(clipping, "enabled", True))
    engine.run(make_data(6), max_epochs=1)

    plain = make_engine().model
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, (x, y) in enumerate(make_data(6), start=1):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        if number not in (3, 4):
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
    for mine, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_handler_attached_in_started_takes_part_from_the_first_iteration() -> None:
    engine, recorder = make_engine(), Recorder()
    engine.connect(Events.STARTED, lambda engine: engine.attach(recorder))
    engine.run(make_data(2), max_epochs=1)
    names = [what for what, _ in recorder.seen]
    assert names == ["started", "epoch", "before", "after", "before", "after", "ended"]


def test_a_handler_of_its_own_without_super_init_works() -> None:
    class Bare(Handler):
        def __init__(self) -> None:
            self.count = 0

        @on(Events.ITERATION_COMPLETED)
        def act(self, engine: Engine) -> None:
            self.count += 1

    engine, bare = make_engine(), Bare()
    engine.attach(bare)
    engine.run(make_data(4), max_epochs=1)
    assert bare.count == 4
    bare.enabled = False
    assert fingerprint(engine)
