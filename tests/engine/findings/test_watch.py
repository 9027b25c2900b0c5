"""All that looks wrong is looked for by one service of the engine, which is detached like any handler."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, FindingWarning, Handler, Update, on
from signalfire.findings.codes import CODES
from signalfire.handlers import GradientAccumulation, Rewindable
from tests.kit import SGD, assert_same, batches, build, evaluator_of, mlp


def divided(output: Tensor, target: Tensor) -> Tensor:
    """A loss that looks wrong beside accumulation: W74."""
    return mse_loss(output, target) / 4


def suspicious(**options: Any) -> Engine:
    engine = Engine(Update.supervised(divided, SGD), model=mlp(5, 8, 1), seed=0, **options)
    engine.attach(GradientAccumulation(4))
    return engine


class Remarks(Handler):
    """Reports something of its own."""

    @on(Events.EPOCH_COMPLETED)
    def remark(self, engine: Engine) -> None:
        engine.findings.report("W10", "a handler has seen something", "look", self.name)


def test_detached_it_looks_at_nothing_and_the_weights_are_the_same() -> None:
    reported, silent = suspicious(), suspicious()
    with pytest.warns(FindingWarning, match="W74"):
        reported.run(batches(8), max_epochs=2)
    silent.detach("findings")
    silent.attach(Remarks())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silent.run(batches(8), max_epochs=2)
        assert list(silent.findings.of_run()) == []
    assert_same(silent.model, reported.model)
    with pytest.raises(KeyError, match="no handler 'findings' is attached"):
        silent.detach("findings")


def test_without_it_a_block_reports_nothing_and_the_next_run_does() -> None:
    engine = suspicious()
    with engine.without("findings"), warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(batches(8), max_epochs=1)
    with pytest.warns(FindingWarning, match="W74"):
        engine.run(batches(8), max_epochs=2)


def test_run_check_false_leaves_out_the_look_at_the_composition_alone() -> None:
    engine = suspicious()
    with pytest.warns(FindingWarning, match="W74"):
        engine.run(batches(8), max_epochs=1, check=False)
    assert not engine.findings.checked


def test_services_are_found_by_name_and_listed_nowhere() -> None:
    engine = build(nn.Linear(5, 1))
    assert len(engine.handlers) == 0
    assert list(engine.handlers) == []
    assert "findings" not in engine.handlers
    assert engine.handlers["findings"].name == "findings"
    assert all(signal.connections == () and not signal.receivers for signal in engine.signals.all())
    assert engine.signal(Events.STARTED).send(engine) == []
    printed = str(engine.wiring())
    assert not any(name in printed for name in ("findings", "resuming", "environment", "error_hints", "random_streams"))
    engine.run(batches(2), max_epochs=1)
    assert engine.state_dict()["handlers"] == {}


@pytest.mark.parametrize(
    "name", ["findings", "resuming", "random_streams", "environment", "error_hints", "data_refusals"]
)
def test_a_handler_may_not_take_the_name_of_a_service(name: str) -> None:
    with pytest.raises(ValueError, match=f"the name '{name}' belongs to a service of the engine"):
        build(nn.Linear(5, 1)).attach(Remarks(name=name))


@pytest.mark.parametrize("name", ["resuming", "random_streams", "environment", "data_refusals"])
def test_what_a_run_depends_on_is_neither_disabled_nor_detached(name: str) -> None:
    engine = build(nn.Linear(5, 1))
    sentence = (
        f"'{name}' is a service that every run depends on, .* the only services that you can "
        "disable or detach are 'error_hints', 'findings'"
    )
    with pytest.raises(ValueError, match=sentence):
        engine.detach(name)
    with pytest.raises(ValueError, match=sentence), engine.without(name):
        pass
    engine.detach("error_hints")
    assert engine.run(batches(2), max_epochs=1).iteration == 2


def test_an_error_of_a_receiver_names_no_service() -> None:
    def fail(engine: Engine) -> None:
        raise LookupError("on purpose")

    engine = build(nn.Linear(5, 1))
    engine.connect(Events.STARTED, fail)
    with pytest.raises(LookupError) as caught:
        engine.run(batches(2), max_epochs=1)
    assert [note for note in caught.value.__notes__ if note.startswith("raised by")] == [
        "raised by fail at Events.STARTED, epoch 0, iteration 0"
    ]


def calls_between(engine: Engine, first: int, last: int) -> int:
    """How many Python functions are called from the end of one iteration to that of another."""
    calls = 0
    seen: list[int] = []

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    class Note(Handler):  # a function would be looked at, too
        @on(Events.ITERATION_COMPLETED(once=(first, last)))
        def note(self, engine: Engine) -> None:
            seen.append(calls)

    engine.attach(Note())
    sys.setprofile(profile)
    try:
        engine.run(batches(last), max_epochs=1)
    finally:
        sys.setprofile(None)
    return seen[1] - seen[0]


def test_a_later_iteration_costs_the_same_with_and_without_it() -> None:
    engine, silent = build(nn.Linear(5, 1)), build(nn.Linear(5, 1))
    silent.detach("findings")
    assert calls_between(engine, 10, 20) == calls_between(silent, 10, 20)


def test_an_evaluator_of_an_engine_without_findings_reports_nothing() -> None:
    model = mlp(5, 8, 1)
    engine, evaluator = build(model), evaluator_of(model)
    engine.detach("findings")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.evaluate(evaluator, batches(2)))  # W: no metric
        engine.run(batches(4), max_epochs=1)


def test_what_is_refused_stays_refused() -> None:
    engine = suspicious()
    engine.detach("findings")
    with pytest.raises(ValueError, match=r"both .* control"):
        engine.attach(GradientAccumulation(3, name="second"))
    with pytest.raises(ValueError, match="expected an int of 1 or more"):
        engine.run(batches(4), max_epochs=-1)
    with pytest.raises(TypeError, match="the data is a dict, so iterating over it yields its keys"):
        engine.run({"train": batches(4)}, max_epochs=1)
    other = suspicious()
    with torch.no_grad(), pytest.warns(FindingWarning):
        other.run(batches(4), max_epochs=1)
    state = other.state_dict()
    state["modules"]["model"] = {}
    engine.load_state_dict(state)
    with pytest.raises(ValueError, match="model"):
        engine.run(batches(4), max_epochs=2)


def test_no_code_of_an_error_is_silenced_with_it() -> None:
    assert [code for code, (severity, _) in CODES.items() if severity == "error"] == []


def hooks_of(engine: Engine) -> int:
    return sum(len(p._backward_hooks or {}) for p in engine.modules["model"].parameters())


@pytest.mark.parametrize("how", ["skip", "weight", "error"])
def test_no_hook_stays_on_a_parameter_whose_backward_was_not_made(how: str) -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(4))

    def disturb(engine: Engine) -> None:
        if engine.state.iteration in (1, 3) and how == "skip":
            engine.state.update.skip("on purpose")
        elif engine.state.iteration in (1, 3) and how == "weight":
            engine.state.update.weight = 0

    def fail(engine: Engine) -> None:
        if engine.state.iteration == 2 and how == "error":
            raise LookupError("on purpose")

    engine.connect(Events.LOSS_COMPUTED, disturb)
    engine.connect(Events.BACKWARD_STARTED, fail)
    try:
        engine.run(batches(8), max_epochs=1)
    except LookupError:
        assert how == "error"
    assert hooks_of(engine) == 0


def test_what_was_detached_can_be_attached_again_and_reports() -> None:
    engine = suspicious()
    service = engine.handlers["findings"]
    engine.detach("findings")
    engine.attach(service)
    assert list(engine.handlers) == ["gradient_accumulation"]
    with pytest.warns(FindingWarning, match="W74"):
        engine.run(batches(8), max_epochs=1)


def test_a_run_without_findings_leaves_none_of_the_run_before() -> None:
    engine = suspicious()
    with pytest.warns(FindingWarning, match="W74"):
        engine.run(batches(8), max_epochs=1)
    with engine.without("findings"):
        engine.run(batches(8), max_epochs=2)
    assert list(engine.findings.of_run()) == []


def test_a_run_that_first_goes_back_is_looked_at_from_there() -> None:
    engine = build(mlp(5, 8, 1), Rewindable())
    reached: list[str] = []

    @engine.on(Events.LOSS_COMPUTED)
    def double(engine: Engine) -> None:
        assert engine.state.update.raw_loss is not None
        engine.state.update.raw_loss = engine.state.update.raw_loss * 2

    @engine.on(Events.ITERATION_COMPLETED(once=9))
    def go_back(engine: Engine) -> None:
        if not reached:
            reached.append("back")
            engine.rewind(3)

    @engine.on(Events.ITERATION_COMPLETED(once=9))
    def fail(engine: Engine) -> None:
        if len(reached) == 1:
            reached.append("failed")
            raise LookupError("on purpose")

    with pytest.raises(LookupError), pytest.warns(FindingWarning, match="W80"):
        engine.run(batches(9), max_epochs=1)
    with pytest.warns(FindingWarning, match="W80"):
        engine.run(batches(9), max_epochs=1)
