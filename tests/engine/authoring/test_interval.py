"""Intervals: how they are written, when they are due in a real run, and bounds in time and steps."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Interval, Update, on
from signalfire.authoring.interval import check_every, unfiltered
from signalfire.handlers import GradientAccumulation
from tests.kit import Clock


class Recorder(Handler):
    """Notes where the run stands at every interval."""

    def __init__(self, every: Any, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every)
        self.seen: list[tuple[int, int, int]] = []

    @on("every")
    def note(self, engine: Engine) -> None:
        self.seen.append((engine.state.epoch, engine.state.iteration, engine.updates[0].steps))


def loss(engine: Engine, batch: Tensor | None) -> Tensor:
    value: Tensor = engine.model(torch.ones(1, 2)).sum()
    return value


def make_trainer() -> Engine:
    torch.manual_seed(0)
    return Engine(Update.from_function(loss, partial(torch.optim.SGD, lr=0.01)), model=torch.nn.Linear(2, 1), seed=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that runs and intervals read."""
    clock = Clock()
    for module in ("distributed.group", "authoring.interval"):
        monkeypatch.setattr(f"signalfire.{module}.time", clock)
    return clock


# ---- how they are written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ep", 10, "ep"),
        ("1it", 1, "it"),
        ("2000st", 2000, "st"),
        ("15min", 15.0, "min"),
        ("0.05s", 0.05, "s"),
        ("90s", 90.0, "s"),
        ("1.5h", 1.5, "h"),
        ("3 ep", 3, "ep"),
        ("  7it ", 7, "it"),
        ("0.25ep", 0.25, "ep"),
        ("1.5ep", 1.5, "ep"),
    ],
)
def test_an_interval_is_a_number_and_a_unit(text: str, value: float, unit: str) -> None:
    assert Interval.parse(text) == Interval(value, unit)


def test_an_interval_is_returned_as_it_is_and_shows_as_it_is_written() -> None:
    interval = Interval(5, "ep")
    assert Interval.parse(interval) is interval
    assert [str(Interval.parse(text)) for text in ("1st", "1 step", "20steps")] == ["1step", "1step", "20steps"]
    assert [Interval.parse(text).unit for text in ("1epoch", "2epochs", "3iterations", "1iter")] == [
        "ep",
        "ep",
        "it",
        "it",
    ]
    assert [str(Interval.parse(text)) for text in ("5ep", "500it", "0.5s", "15min")] == [
        "5ep",
        "500it",
        "0.5s",
        "15min",
    ]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("5", ValueError, "'5' is not an interval"),
        ("ep", ValueError, "'ep' is not an interval"),
        ("", ValueError, "'' is not an interval"),
        ("-1ep", ValueError, "'-1ep' is not an interval"),
        ("5EP", ValueError, "'5EP' is not an interval"),
        ("5ep 3it", ValueError, "'5ep 3it' is not an interval"),
        ("1e3it", ValueError, "'1e3it' is not an interval"),
        ("5days", ValueError, "the unit 'days'"),
        ("3 weeks", ValueError, "the unit 'weeks'"),
        ("0it", ValueError, "0it: expected a number greater than 0"),
        ("0.0s", ValueError, "greater than 0"),
        ("1.5it", ValueError, "1.5it: expected an int, without a decimal point"),
        ("0.0ep", ValueError, "greater than 0"),
        ("2.0st", ValueError, "without a decimal point"),
        (5, TypeError, "5 is not an interval"),
        (None, TypeError, "None is not an interval"),
        (0.5, TypeError, "0.5 is not an interval"),
    ],
    ids=repr,
)
def test_what_is_no_interval_is_refused_with_the_value_and_the_forms(
    text: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        Interval.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "unit", "message"),
    [
        (0, "ep", "greater than 0"),
        (-3, "s", "greater than 0"),
        (2.0, "it", "decimal point"),
        (3, "days", "'days'"),
        (1, "", "''"),
    ],
)
def test_an_interval_cannot_be_made_wrong_either(value: float, unit: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Interval(value, unit)


def test_time_is_measured_in_seconds_and_only_of_times() -> None:
    assert [Interval.parse(text).time("here") for text in ("90s", "1.5min", "2h")] == [90.0, 90.0, 7200.0]
    with pytest.raises(ValueError, match="here: 5ep is not a wall-clock time"):
        Interval.parse("5ep").time("here")


def test_an_interval_of_epochs_or_iterations_is_an_event() -> None:
    assert Interval.parse("2ep").event() == Events.EPOCH_COMPLETED(every=2)
    assert Interval.parse("500it").event() == Events.ITERATION_COMPLETED(every=500)
    assert unfiltered("7st") == Events.ITERATION_COMPLETED | Events.ITERATION_COMPLETED
    assert unfiltered("2ep").members == (Events.EPOCH_COMPLETED,)  # type: ignore[union-attr]


def test_a_wrong_interval_is_refused_by_the_handler_that_it_is_given_to() -> None:
    with pytest.raises(ValueError, match=r"Recorder\(every='5days'\): .*'days'"):
        Recorder("5days")
    with pytest.raises(TypeError, match=r"Recorder\(every=5\): 5 is not an interval"):
        Recorder(5)


# ---- when they are due --------------------------------------------------------------------------------------------


def test_epochs_are_due_when_every_nth_is_completed() -> None:
    recorder = Recorder("2ep")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.run(max_epochs=5, epoch_length=3)
    assert recorder.seen == [(2, 6, 6), (4, 12, 12)]


def test_iterations_are_due_across_epochs() -> None:
    recorder = Recorder("5it")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.run(max_epochs=4, epoch_length=3)
    assert [iteration for _, iteration, _ in recorder.seen] == [5, 10]


def test_a_large_interval_is_due_exactly_where_it_says() -> None:
    recorder = Recorder("500it")
    engine = Engine(Update.from_function(lambda engine, batch: None))
    engine.attach(recorder)
    engine.run(max_iters=1200)
    assert [iteration for _, iteration, _ in recorder.seen] == [500, 1000]


def test_steps_are_those_that_really_happened() -> None:
    recorder = Recorder("7st")
    trainer = make_trainer()
    trainer.attach(recorder)

    @trainer.on(Events.GRADIENTS_READY(every=2))
    def skip(engine: Engine) -> None:
        engine.state.update.skip("every second step is left out")

    trainer.run(max_iters=30)
    assert [(iteration, steps) for _, iteration, steps in recorder.seen] == [(13, 7), (27, 14)]


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_steps_under_accumulation_are_due_once_for_every_n_real_steps(every: int) -> None:
    recorder = Recorder(f"{every}st")
    trainer = make_trainer()
    trainer.attach(recorder, GradientAccumulation(4))
    trainer.run(max_epochs=3, epoch_length=40)
    assert trainer.updates[0].steps == 30
    assert [steps for _, _, steps in recorder.seen] == list(range(every, 31, every))
    assert [iteration for _, iteration, _ in recorder.seen] == list(range(4 * every, 121, 4 * every))


def test_steps_under_accumulation_count_a_short_last_window() -> None:
    recorder = Recorder("2st")
    trainer = make_trainer()
    trainer.attach(recorder, GradientAccumulation(4))
    trainer.run(max_epochs=2, epoch_length=10)  # windows end in 4, 8, 10, 14, 18, 20
    assert recorder.seen == [(1, 8, 2), (2, 14, 4), (2, 20, 6)]


def test_steps_go_on_over_two_runs() -> None:
    recorder = Recorder("4st")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.run(max_epochs=2, epoch_length=3)
    trainer.run(max_epochs=5, epoch_length=3)
    assert [steps for _, _, steps in recorder.seen] == [4, 8, 12]


def test_a_handler_attached_in_the_middle_counts_steps_from_the_beginning() -> None:
    recorder = Recorder("4st")
    trainer = make_trainer()

    @trainer.on(Events.ITERATION_COMPLETED(once=6))
    def join(engine: Engine) -> None:
        engine.attach(recorder)

    trainer.run(max_iters=13)
    assert [steps for _, _, steps in recorder.seen] == [8, 12]


def test_two_handlers_with_the_same_interval_of_steps_do_not_disturb_each_other() -> None:
    one, two = Recorder("3st", name="one"), Recorder("3st", name="two")
    trainer = make_trainer()
    trainer.attach(one, two)
    trainer.run(max_iters=7)
    assert one.seen == two.seen == [(1, 3, 3), (1, 6, 6)]


def test_seconds_are_due_at_the_first_iteration_after_them(clock: Clock) -> None:
    recorder = Recorder("5s")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.connect(Events.ITERATION_STARTED, lambda engine: clock.sleep(2))
    trainer.run(max_iters=20)
    assert [iteration for _, iteration, _ in recorder.seen] == [3, 6, 9, 12, 15, 18]


def test_each_iteration_that_takes_longer_than_the_seconds_is_due_once(clock: Clock) -> None:
    recorder = Recorder("5s")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.connect(Events.ITERATION_STARTED(after=3), lambda engine: clock.sleep(11))
    trainer.run(max_iters=6)
    assert [iteration for _, iteration, _ in recorder.seen] == [4, 5, 6]


def test_a_long_time_is_not_due() -> None:
    recorder = Recorder("1h")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.run(max_iters=20)
    assert recorder.seen == []


def test_an_event_may_stand_in_the_place_of_an_interval() -> None:
    recorder = Recorder(Events.ITERATION_COMPLETED(once=2) | Events.EPOCH_COMPLETED)
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.run(max_epochs=2, epoch_length=3)
    assert [iteration for _, iteration, _ in recorder.seen] == [2, 3, 6]


# ---- bounds -------------------------------------------------------------------------------------------------------


def test_max_time_ends_a_run_between_iterations(clock: Clock) -> None:
    trainer = make_trainer()
    trainer.connect(Events.ITERATION_STARTED, lambda engine: clock.sleep(1))
    seen: list[str] = []
    trainer.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append("completed"))
    trainer.connect(Events.COMPLETED, lambda engine: seen.append("end"))
    state = trainer.run(max_time="9.5s", epoch_length=10**6)
    assert state.iteration == 10
    assert seen == ["completed"] * state.iteration + ["end"]
    assert state.max_seconds == 9.5
    assert state.stop_reason is None


def test_max_time_counts_from_the_beginning_of_each_run(clock: Clock) -> None:
    trainer = make_trainer()
    trainer.connect(Events.ITERATION_STARTED, lambda engine: clock.sleep(1))
    assert trainer.run(max_time=Interval(5, "s"), epoch_length=10**6).iteration == 5
    assert trainer.run(max_time=Interval(5, "s"), epoch_length=10**6).iteration == 10


def test_a_start_that_takes_all_of_max_time_is_reported(clock: Clock) -> None:
    trainer = make_trainer()
    trainer.connect(Events.STARTED, lambda engine: clock.sleep(0.05))
    with pytest.warns(
        UserWarning, match=r"nothing to do, because max_time=0\.05 s ran out before the first iteration, at epo"
    ):
        assert trainer.run(max_time="0.05s", epoch_length=3).iteration == 0


def test_the_clock_of_a_run_is_that_of_the_machine() -> None:
    trainer = make_trainer()
    began = time.monotonic()
    trainer.run(max_time="0.02s", epoch_length=10**6)
    assert time.monotonic() - began >= 0.02


@pytest.mark.parametrize("bound", ["5ep", "100", 3, "0s"], ids=repr)
def test_max_time_has_to_be_a_time(bound: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        make_trainer().run(max_time=bound, epoch_length=3)


def test_max_steps_ends_a_run_after_so_many_real_steps() -> None:
    trainer = make_trainer()
    trainer.attach(GradientAccumulation(4))
    state = trainer.run(max_steps=5, epoch_length=10)  # windows end in 4, 8, 10, 14, 18
    assert trainer.updates[0].steps == 5
    assert (state.epoch, state.iteration) == (2, 18)


def test_skipped_steps_do_not_count_for_max_steps() -> None:
    trainer = make_trainer()

    @trainer.on(Events.GRADIENTS_READY(before=4))
    def skip(engine: Engine) -> None:
        engine.state.update.skip("warming up")

    assert trainer.run(max_steps=2, epoch_length=100).iteration == 5


def test_max_steps_at_the_end_of_an_epoch_completes_it() -> None:
    trainer = make_trainer()
    seen: list[int] = []
    trainer.connect(Events.EPOCH_COMPLETED, lambda engine: seen.append(engine.state.epoch))
    trainer.run(max_steps=6, epoch_length=3)
    assert seen == [1, 2]


def test_whichever_bound_is_reached_first_ends_the_run() -> None:
    assert make_trainer().run(max_steps=7, max_iters=5, max_epochs=9, epoch_length=3).iteration == 5
    assert make_trainer().run(max_steps=4, max_iters=5, max_epochs=9, epoch_length=3).iteration == 4
    assert make_trainer().run(max_steps=7, max_iters=8, max_epochs=1, epoch_length=3).iteration == 3
    assert make_trainer().run(max_steps=7, max_time="1h", epoch_length=3).iteration == 7


@pytest.mark.parametrize("bound", ["max_steps", "max_iters", "max_epochs", "epoch_length"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "5"], ids=repr)
def test_a_bound_that_makes_no_sense_is_refused(bound: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"run({bound}={value!r})")):
        make_trainer().run([None], **{bound: value})


def test_an_engine_that_evaluates_has_no_steps_to_be_bounded() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        Engine(Update.from_function(loss), model=torch.nn.Linear(2, 1)).run(max_steps=3, epoch_length=3)


# ---- parts of an epoch --------------------------------------------------------------------------------------------


def acted(every: str, length: int, epochs: int) -> list[int]:
    recorder = Recorder(every)
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.run(max_epochs=epochs, epoch_length=length)
    return [iteration for _, iteration, _ in recorder.seen]


@pytest.mark.parametrize(
    ("every", "length", "epochs", "expected"),
    [
        ("0.25ep", 8, 2, [2, 4, 6, 8, 10, 12, 14, 16]),
        ("0.25ep", 10, 2, [3, 5, 8, 10, 13, 15, 18, 20]),  # 2.5, 5, 7.5, 10 iterations, each when it is reached
        ("0.5ep", 7, 2, [4, 7, 11, 14]),
        ("0.1ep", 30, 1, list(range(3, 31, 3))),
        ("0.3ep", 10, 3, [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),
        ("1.5ep", 4, 5, [6, 12, 18]),
        ("2.5ep", 3, 5, [8, 15]),
        ("0.25ep", 2, 2, [1, 2, 3, 4]),  # an iteration that reaches two multiples acts once
        ("0.01ep", 5, 1, [1, 2, 3, 4, 5]),
    ],
)
def test_a_part_of_an_epoch_is_due_in_the_first_iteration_that_reaches_it(
    every: str, length: int, epochs: int, expected: list[int]
) -> None:
    assert acted(every, length, epochs) == expected


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 8, 11])
def test_parts_of_epochs_go_on_over_two_runs(cut: int) -> None:
    recorder = Recorder("0.25ep")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.run(max_iters=cut, epoch_length=10)
    trainer.run(max_epochs=2, epoch_length=10)
    assert [iteration for _, iteration, _ in recorder.seen] == [3, 5, 8, 10, 13, 15, 18, 20]


@pytest.mark.parametrize("cut", [1, 3, 9, 10, 12])
def test_a_loaded_run_goes_on_with_the_parts_of_its_epoch(cut: int) -> None:
    first = make_trainer()
    first.run(max_iters=cut, epoch_length=10)
    recorder = Recorder("0.25ep")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.load_state_dict(first.state_dict())
    trainer.run(max_epochs=2, epoch_length=10)
    expected = [n for n in (3, 5, 8, 10, 13, 15, 18, 20) if n > cut]
    assert [iteration for _, iteration, _ in recorder.seen] == expected


def test_after_an_epoch_that_was_cut_short_the_parts_are_those_of_the_next() -> None:
    recorder = Recorder("0.5ep")
    trainer = make_trainer()
    trainer.attach(recorder)
    trainer.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: engine.terminate_epoch("enough"))
    trainer.run(max_epochs=3, epoch_length=10)
    # What the short epoch did not reach is not made up for: the next begins with parts of its own.
    assert [iteration for _, iteration, _ in recorder.seen] == [8, 13, 18, 23]


def test_a_handler_attached_in_the_middle_acts_at_the_same_parts() -> None:
    recorder = Recorder("0.25ep")
    trainer = make_trainer()
    trainer.connect(Events.ITERATION_COMPLETED(once=6), lambda engine: engine.attach(recorder) and None)
    trainer.run(max_epochs=2, epoch_length=8)
    assert [iteration for _, iteration, _ in recorder.seen] == [8, 10, 12, 14, 16]


@pytest.mark.filterwarnings("ignore:W29")
def test_a_part_of_an_epoch_of_unknown_length_is_an_error_before_the_first_batch_that_names_the_handler() -> None:
    trainer = make_trainer()
    trainer.attach(Recorder("0.25ep", name="watcher"))
    with pytest.raises(ValueError, match=r"watcher\.note \(every 0\.25 epochs\): .*epoch_length="):
        trainer.run((None for _ in range(3)), max_epochs=1)
    assert trainer.state.epoch == 0
    trainer.run((None for _ in range(3)), max_epochs=1, epoch_length=3)
