"""ProgressBar: lines in a file, bars in a terminal, and nothing left behind."""

from __future__ import annotations

import fcntl
import gc
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm
from tqdm.std import tqdm as StandardBar

from signalfire import Engine, Events, Phase
from signalfire.handlers import Average, GradientAccumulation, Metrics, ProgressBar, Validation
from signalfire.handlers._common.displays import View, fitted
from tests.kit import build, evaluator_of, idle_engine, linear, needs
from tests.processes import program

ROOT = Path(__file__).parent.parent.parent

BATCHES = [(torch.full((2, 3), float(n)), torch.ones(2, 1)) for n in range(4)]


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def lines_on(file: io.StringIO) -> list[str]:
    """What is left on this terminal, which starts a line at the left as the driver of one does."""
    written = re.sub(r"\x1b\]8;;.*?\x1b\\", "", file.getvalue())  # links are not seen
    return [line for line in screen(written.replace("\n", "\r\n"), 200) if line]


def engine_of(*handlers: Any, model: nn.Module | None = None) -> Engine:
    return build(model or linear(3, 1), *handlers, optimizer=partial(torch.optim.SGD, lr=0.01))


def test_a_file_gets_a_line_for_each_epoch() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(file=file, line_interval=0.0), Metrics(loss=Average()))
    losses: list[float] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: losses.append(engine.state.metrics["loss"]))
    engine.run(BATCHES, max_epochs=3)
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    for number, (line, loss) in enumerate(zip(lines, losses, strict=True), start=1):
        rates = r"[\d.]+ it/s  [\d.]+ samples/s" + (r"  \d\d:\d\d left" if number < 3 else "")
        time = r"\d+\.\ds" + (" in total" if number == 3 else "")
        pattern = rf"epoch {number}/3  iteration {4 * number}  {time}  {rates}  loss {re.escape(f'{loss:.4g}')}"
        assert re.fullmatch(pattern, line), line


def test_lines_come_no_faster_than_asked_and_the_last_one_always() -> None:
    file = io.StringIO()
    engine_of(ProgressBar(file=file, line_interval=1000.0)).run(BATCHES, max_epochs=5)
    lines = file.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("epoch 5/5  iteration 20")


def test_the_last_line_comes_also_when_the_run_is_stopped_within_an_epoch() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(file=file, line_interval=0.0))
    engine.connect(Events.ITERATION_COMPLETED(once=6), lambda engine: engine.terminate("enough"))
    engine.run(BATCHES, max_epochs=5)
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["epoch 1/5", "iteration 4"], ["epoch 2/5", "iteration 6"]]


def test_without_metrics_the_last_batchs_loss_is_shown() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(file=file))
    engine.run(BATCHES, max_iters=3)
    assert engine.state.update.loss is not None
    line = file.getvalue()
    assert line.startswith("epoch 1  iteration 3  ")
    assert line.rstrip().endswith(f"loss {engine.state.update.loss.item():.4g}")


def test_chosen_metrics_alone_are_shown() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(["second"], file=file), Metrics(loss=Average()))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(first=1.0, second=2.5))
    engine.run(BATCHES, max_epochs=1)
    assert file.getvalue().rstrip().endswith("s  second 2.5")


def test_a_second_run_shows_its_last_epoch_too() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(file=file, line_interval=1000.0))
    engine.run(BATCHES, max_epochs=1)
    engine.run(BATCHES, max_epochs=2)
    assert [line.split("  ")[0] for line in file.getvalue().splitlines()] == ["epoch 1/1", "epoch 2/2"]


def test_a_terminal_gets_a_bar_for_each_epoch() -> None:
    file = Terminal()
    engine_of(ProgressBar(file=file, interval=0.0), Metrics(loss=Average())).run(BATCHES, max_epochs=2)
    drawn = file.getvalue()
    assert "epoch 1/2:" in drawn
    assert "epoch 2/2:" in drawn
    assert "4/4" in drawn
    assert "100%" in drawn
    assert "loss=" in drawn
    assert "iteration" not in drawn  # no plain line


@pytest.mark.parametrize("names", [["x", "tensor", "text"], None])
@pytest.mark.parametrize("event", [None, Events.STARTED, Events.EPOCH_STARTED], ids=str)
def test_values_of_a_users_functions_are_shown(event: Events | None, names: list[str] | None) -> None:
    engine = engine_of(ProgressBar(names, line_interval=0, file=(lines := io.StringIO())))
    engine.attach(ProgressBar(names, interval=0, file=(file := Terminal()), name="bar"))

    def add(engine: Engine) -> None:
        running: Any = engine.state.metrics.running
        running.update(x=lambda: engine.state.iteration / 8, tensor=lambda: torch.tensor(0.25), text=lambda: "much")

    add(engine) if event is None else engine.connect(event, add)
    engine.run([(torch.ones(4, 3), torch.zeros(4, 1))] * 2, max_epochs=1)
    assert lines.getvalue().strip().endswith("x 0.25  tensor 0.25")
    assert "x=0.125, tensor=0.25" in file.getvalue()
    assert "x=0.25, tensor=0.25" in file.getvalue()


def test_bars_show_running_values_within_the_epoch() -> None:
    file = Terminal()
    engine = engine_of(ProgressBar(file=file, interval=0.0), Metrics(loss=Average()))
    running: list[str] = []
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: running.append(f"{engine.state.metrics.running['loss']():.4g}")
    )
    engine.run(BATCHES, max_epochs=1)
    assert f"loss={running[0]}" in file.getvalue()
    assert f"loss={running[-1]}" in file.getvalue()
    assert len(set(running)) == 4


def test_a_run_that_was_interrupted_within_an_epoch_goes_on_with_its_bar() -> None:
    file = Terminal()
    engine = engine_of(ProgressBar(file=file, interval=0.0))

    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    with engine.connect(Events.ITERATION_COMPLETED(once=2), interrupt), pytest.raises(KeyboardInterrupt):
        engine.run(BATCHES, max_epochs=2)
    before = len(file.getvalue())
    engine.run(BATCHES, max_epochs=2)
    drawn = file.getvalue()[before:]
    assert "epoch 1/2:  50%" in drawn
    assert "3/4" in drawn
    assert "epoch 2/2:" in drawn


def test_a_resumed_run_draws_its_open_epoch_once() -> None:
    first, file = engine_of(), Terminal()
    first.run(BATCHES, max_iters=2)
    engine = engine_of(ProgressBar(file=file, interval=0.0, leave=True))
    engine.run(BATCHES, max_iters=1)
    engine.load_state_dict(first.state_dict())
    before = len(file.getvalue())
    engine.run(BATCHES, max_epochs=1)
    drawn = file.getvalue()[before:]
    assert "0/4" not in drawn
    assert drawn.count("\n") == 1


@pytest.mark.parametrize("leave", [True, False])
def test_the_last_bar_stays_and_the_others_if_asked(leave: bool) -> None:
    file = Terminal()
    engine_of(ProgressBar(file=file, leave=leave)).run(BATCHES, max_epochs=3)
    # What stays ends in a new line; what goes is overwritten with blanks.
    assert file.getvalue().count("\n") == (3 if leave else 1)
    *others, last = file.getvalue().rstrip("\n").split("\n")
    assert "s in total" in last
    assert not any("in total" in one for one in others)


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_at_an_early_stop_the_time_of_the_run_is_shown_and_none_is_left(kind: type[io.StringIO]) -> None:
    file, clock = kind(), Clock()
    engine = timed(ProgressBar(file=file, interval=0.0, line_interval=0.0, leave=True, clock=clock), 0.25)
    engine.connect(Events.EPOCH_COMPLETED(once=3), lambda engine: engine.terminate("enough"))
    engine.run(BATCHES, max_epochs=9)
    *others, last = [line.split("\r")[-1] for line in file.getvalue().rstrip("\n").split("\n")]
    assert "3.0s in total" in last
    assert "left" not in last
    # A line says how much was left when its epoch ended; beside a bar that stays it would say something else later.
    assert ["left" in one for one in others] == [kind is io.StringIO] * 2


def test_the_line_of_an_epoch_comes_also_when_an_error_ends_the_run_after_it() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(file=file, line_interval=0.0))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    engine.connect(Events.EPOCH_COMPLETED, fail, phase=Phase.CONTROL)
    with pytest.raises(ArithmeticError):
        engine.run(BATCHES, max_epochs=2)
    assert re.fullmatch(r"epoch 1/2  iteration 4  \d+\.\ds  .*\n", file.getvalue())


def test_unsized_data_has_a_bar_without_an_end() -> None:
    class Unsized:
        def __iter__(self) -> Any:
            return iter(BATCHES)

    file = Terminal()
    engine_of(ProgressBar(file=file, interval=0.0)).run(Unsized(), max_epochs=1)
    within = [one for one in drawings(file) if "in total" not in one]
    assert not any("%" in one for one in within)
    assert "4it" in within[-1]
    assert "100%" in drawings(file)[-1], "now the length is known"


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_an_error_closes_the_bar(kind: type[io.StringIO]) -> None:
    open_before = len(tqdm._instances)  # type: ignore[attr-defined]
    file = kind()
    bar = ProgressBar(file=file, interval=0.0)
    engine = engine_of(bar)

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    engine.connect(Events.ITERATION_COMPLETED(once=2), fail)
    with pytest.raises(ArithmeticError):
        engine.run(BATCHES, max_epochs=2)
    assert bar._bar is None
    assert len(tqdm._instances) == open_before  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_validation_within_an_epoch_draws_no_second_bar() -> None:
    model = nn.Linear(3, 1)
    evaluator = evaluator_of(model)
    file = Terminal()
    engine_of(
        ProgressBar(file=file, interval=0.0, leave=True), Validation(evaluator, BATCHES, every="2it"), model=model
    ).run(BATCHES, max_epochs=1)
    assert file.getvalue().count("\n") == 1
    assert "loss=" in file.getvalue()


def test_the_training_is_not_changed() -> None:
    weights = []
    for handlers in ([], [ProgressBar(file=Terminal(), interval=0.0)]):
        engine = engine_of(*handlers)
        engine.run(BATCHES, max_epochs=2)
        weights.append(engine.model.weight)
    assert torch.equal(weights[0], weights[1])


def test_switched_off_nothing_is_drawn() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(file=file, line_interval=0.0))
    with engine.without("progress_bar"):
        engine.run(BATCHES, max_epochs=2)
    assert file.getvalue() == ""


def test_switched_off_within_an_epoch_the_bar_is_closed() -> None:
    file = Terminal()
    bar = ProgressBar(file=file, interval=0.0)
    engine = engine_of(bar)
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: setattr(bar, "enabled", False))
    lengths: list[int] = []
    engine.connect(Events.ITERATION_STARTED(after=2), lambda engine: lengths.append(len(file.getvalue())))
    engine.run(BATCHES, max_epochs=2)
    assert bar._bar is None
    assert len(set(lengths)) == 1
    assert len(file.getvalue()) == lengths[0]


@pytest.mark.parametrize("ends", ["completed", "error", "detached", "disabled"])
def test_the_standard_streams_are_left_as_they_were(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Terminal(), Terminal()]
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    bar = ProgressBar(interval=0.0)
    engine = engine_of(bar)
    watched: list[bool] = []

    def end(engine: Engine) -> None:
        watched.extend("write" in vars(one) for one in streams)
        if ends == "error":
            raise KeyboardInterrupt
        if ends == "detached":
            engine.detach(bar)
        if ends == "disabled":
            bar.enabled = False

    engine.connect(Events.ITERATION_COMPLETED(once=6), end)
    with suppress(KeyboardInterrupt):
        engine.run(BATCHES, max_epochs=2)
    assert watched[:2] == [True, True]
    assert not any("write" in vars(one) for one in streams)


@contextmanager
def one_terminal() -> Iterator[Terminal]:
    """A terminal that is both standard output and standard error."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        patch.setattr("sys.stdout", terminal)
        patch.setattr("sys.stderr", terminal)
        yield terminal


def left_by(act: Callable[[Engine], None], *, style: str = "tqdm") -> list[str]:
    """The lines on the terminal after a run in which this is called after the second iteration."""
    with one_terminal() as terminal:
        engine = engine_of(ProgressBar(interval=0.0, style=style))
        engine.connect(Events.ITERATION_COMPLETED(once=2), act)
        engine.run(BATCHES, max_epochs=1)
    return lines_on(terminal)


def print_in_colours(engine: Engine) -> None:
    print("\x1b[31mone\x1b[0m", end="")
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: print("\x1b[1mtwo\n\x1b[0m", end=""))


def print_a_link(engine: Engine) -> None:
    print("\x1b]8;;https://example.org\x1b\\one\x1b]8;;\x1b\\", end="")
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: print("two"))


def print_after_a_bar(engine: Engine, leave: bool) -> None:
    for _ in tqdm(range(3), leave=leave, mininterval=0, desc="its own"):
        pass
    print("one")
    print("two")


def print_beside_a_bar(engine: Engine) -> None:
    inner = tqdm(total=3, leave=False, mininterval=0)
    for text in ("one", "two"):
        inner.update()
        print(text)
    inner.close()


def print_parts(engine: Engine) -> None:
    print("\ro", end="")
    print("\ron", "e", sep="", end="")
    print()
    print("two")


STYLES = ["tqdm", pytest.param("rich", marks=pytest.mark.skipif(find_spec("rich") is None, reason="needs rich"))]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "act",
    [print_in_colours, print_a_link, partial(print_after_a_bar, leave=False), print_beside_a_bar, print_parts],
    ids=["colors", "link", "after a bar", "beside a bar", "parts"],
)
def test_each_text_has_a_line_of_its_own_above_the_bar(act: Callable[[Engine], None], style: str) -> None:
    one, two, bar = left_by(act, style=style)
    assert (one, two) == ("one", "two")
    assert bar.startswith("epoch 1/1: 100%")


def test_text_after_a_bar_that_stays_begins_below_it() -> None:
    own, one, two, bar = left_by(partial(print_after_a_bar, leave=True))
    assert own.startswith("its own: 100%")
    assert (one, two) == ("one", "two")
    assert bar.startswith("epoch 1/1: 100%")


def test_a_bar_around_the_run_stays_beside_what_is_printed() -> None:
    with one_terminal() as terminal:
        engine = engine_of(ProgressBar(interval=0.0))
        engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: print("one"))
        shown: list[list[str]] = []
        engine.connect(
            Events.ITERATION_COMPLETED(once=3),
            lambda engine: shown.append(lines_on(terminal)),
            phase=Phase.CONTROL,
        )
        with tqdm(total=2, desc="seeds", leave=False) as seeds:
            engine.run(BATCHES, max_epochs=1)
            seeds.update()
    text, outer, inner = shown[0][:3]
    assert text == "one"
    assert outer.startswith("seeds:   0%")
    assert inner.startswith("epoch 1/1:  75%")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("when", ["before", "within"])
def test_messages_of_logging_appear_above_the_bar(when: str, style: str) -> None:
    logger = logging.Logger("one that has its own handlers")
    streams: list[Any] = []

    def speak(engine: Engine) -> None:
        if when == "within":
            logger.addHandler(logging.StreamHandler())
        streams.append(logger.handlers[0].stream)  # type: ignore[attr-defined]
        logger.warning("one")
        logger.warning("two")

    with one_terminal() as terminal:
        if when == "before":
            logger.addHandler(logging.StreamHandler())
        engine = engine_of(ProgressBar(interval=0.0, style=style))
        engine.connect(Events.ITERATION_COMPLETED(once=2), speak)
        engine.run(BATCHES, max_epochs=1)
    one, two, bar = lines_on(terminal)
    assert (one, two) == ("one", "two")
    assert bar.startswith("epoch 1/1: 100%")
    assert streams == [terminal]


class PrintsWhenFree:
    """A lock that lets another thread print each time the first one has released it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._first = threading.get_ident()
        self.texts: list[str] = []

    def acquire(self, *args: Any, **keywords: Any) -> bool:
        acquired = self._lock.acquire(*args, **keywords)
        self._depth += acquired
        return acquired

    def release(self) -> None:
        self._depth -= 1
        free = self._depth == 0
        self._lock.release()
        if free and threading.get_ident() == self._first:
            self.texts.append(f"text {len(self.texts)}")
            thread = threading.Thread(target=sys.stdout.write, args=[f"{self.texts[-1]}\n"])
            thread.start()
            thread.join()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


@pytest.mark.parametrize("style", STYLES)
def test_another_thread_prints_nothing_into_a_bar(style: str) -> None:
    lock, before = PrintsWhenFree(), StandardBar.get_lock()  # type: ignore[no-untyped-call]
    with one_terminal() as terminal:
        engine = engine_of(ProgressBar(interval=0.0, style=style))
        StandardBar.set_lock(lock)
        try:
            engine.run(BATCHES, max_epochs=2)
        finally:
            StandardBar.set_lock(before)
    lines = lines_on(terminal)
    assert len(lock.texts) > 8
    assert [line for line in lines if not line.startswith("epoch 2/2: 100%")] == lock.texts
    assert len(lines) == len(lock.texts) + 1


class OnlyWrites:
    """An object that stands in for a stream."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


class WritesToTerminal(OnlyWrites):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [OnlyWrites, WritesToTerminal])
def test_a_file_needs_only_to_write(kind: type[OnlyWrites]) -> None:
    file: Any = kind()
    engine_of(ProgressBar(file=file)).run(BATCHES, max_epochs=1)
    assert "epoch 1/1" in file.text


@pytest.mark.parametrize("kind", [OnlyWrites, WritesToTerminal])
def test_standard_output_needs_only_to_write(kind: type[OnlyWrites]) -> None:
    output = kind()
    engine = engine_of(ProgressBar(file=Terminal(), interval=0.0))
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: print("one"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", output)
        engine.run(BATCHES, max_epochs=1)
    assert "one\n" in output.text


def test_without_standard_error_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", None)
        engine_of(ProgressBar(line_interval=0.0)).run(BATCHES, max_epochs=2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_the_bar_of_an_evaluation_by_itself_stays(kind: type[io.StringIO]) -> None:
    file = kind()
    evaluator = evaluator_of(linear(3, 1))
    evaluator.attach(ProgressBar(file=file, interval=0.0))
    evaluator.run(BATCHES)
    (line,) = lines_on(file)
    assert line.startswith("evaluation")
    assert f" loss{'=' if kind is Terminal else ' '}" in line


@pytest.mark.parametrize("raised", [ArithmeticError, KeyboardInterrupt])
def test_the_bar_of_a_run_that_was_cut_short_stays_as_it_was(raised: type[BaseException]) -> None:
    file = Terminal()
    engine = engine_of(ProgressBar(file=file, interval=0.0))

    def fail(engine: Engine) -> None:
        raise raised

    engine.connect(Events.ITERATION_COMPLETED(once=6), fail, phase=Phase.CONTROL)
    with pytest.raises(raised):
        engine.run(BATCHES, max_epochs=3)
    (line,) = lines_on(file)
    assert line.startswith("epoch 2/3:  50%")
    assert "left" not in line


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
@pytest.mark.parametrize("name", ["x\ny", "x\ry", "x\x1b[2Ay", "x\u2028y"])
def test_control_characters_in_a_name_are_escaped(kind: type[io.StringIO], name: str) -> None:
    file = kind()
    engine = engine_of(ProgressBar(file=file, interval=0.0))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log({name: 3.0}))
    engine.run(BATCHES, max_epochs=1)
    (line,) = lines_on(file)
    assert f"{name!r}"[1:-1] in line
    assert name not in file.getvalue()


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    engine_of(ProgressBar()).run(BATCHES, max_epochs=1)
    captured = capsys.readouterr()
    assert captured.err.startswith("epoch 1/1")
    assert captured.out == ""


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"\['accuracy'\]"):
        ProgressBar("accuracy")
    with pytest.raises(ValueError, match="interval=-1"):
        ProgressBar(interval=-1)
    with pytest.raises(TypeError, match="line_interval='5'"):
        ProgressBar(line_interval="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ProgressBar\(smoothing=1\): expected a number of 0 or more and below 1"):
        ProgressBar(smoothing=1)
    with pytest.raises(ValueError, match=r"ProgressBar\(style='x'\): expected 'tqdm' or 'rich'"):
        ProgressBar(style="x")
    with pytest.raises(TypeError, match=r"ProgressBar\(clock=3\): expected a function"):
        ProgressBar(clock=3)  # type: ignore[arg-type]


# ---- the loss, the rates and the time left ----------------------------------------------------------------------------


class Clock:
    """A clock that each iteration moves on."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(bar: ProgressBar, seconds: float = 0.5, **options: Any) -> Engine:
    """An engine whose iterations take so long by the bar's clock."""
    engine = engine_of(bar, **options)
    clock = bar.clock
    assert isinstance(clock, Clock)

    def work(engine: Engine) -> None:
        clock.now += seconds

    engine.connect(Events.ITERATION_STARTED, work)
    return engine


def drawings(file: io.StringIO) -> list[str]:
    return [one.strip() for one in re.split(r"[\r\n]", file.getvalue()) if one.strip()]


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_the_smoothed_loss_is_an_exponential_average_with_bias_correction(kind: type[io.StringIO]) -> None:
    file, losses = kind(), []
    engine = engine_of(ProgressBar(file=file, interval=0.0, smoothing=0.9))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.update.loss.item()))
    engine.run(BATCHES, max_epochs=2)
    average = sum(0.1 * 0.9 ** (7 - i) * loss for i, loss in enumerate(losses)) / (1 - 0.9**8)
    assert re.search(rf"smooth_loss[= ]{average:.4g}\W.*loss[= ]{losses[-1]:.4g}\W", drawings(file)[-1] + " ")


def test_losses_are_smoothed_at_most_once_in_an_interval() -> None:
    file, losses = io.StringIO(), []
    engine = timed(ProgressBar(file=file, interval=2.0, smoothing=0.5, clock=Clock()))
    engine.connect(Events.ITERATION_COMPLETED(every=4), lambda engine: None)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.update.loss.item()))
    engine.run(BATCHES, max_epochs=2)
    assert f"smooth_loss {(losses[0] + 2 * losses[4]) / 3:.4g}" in file.getvalue()


def test_after_a_state_is_loaded_and_after_a_reset_the_smoothed_loss_begins_anew() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(file=file, interval=0.0))
    engine.run(BATCHES, max_iters=2)
    engine.load_state_dict(engine.state_dict())
    for bound in (3, 1):
        engine.run(BATCHES, max_iters=bound)
        assert engine.state.update.loss is not None
        assert f"smooth_loss {engine.state.update.loss.item():.4g}  loss" in file.getvalue().splitlines()[-1]
        engine.reset()


def test_a_loss_that_is_not_finite_is_shown_and_leaves_the_smoothed_one_as_it_was() -> None:
    file = io.StringIO()
    broken = [*BATCHES[:2], (torch.full((2, 3), float("inf")), torch.ones(2, 1))]
    engine_of(ProgressBar(file=file, interval=0.0, smoothing=0.0)).run(broken, max_epochs=1)
    smoothed, last = re.findall(r"loss (\S+)", file.getvalue())
    assert float(smoothed) < 1e3
    assert last in ("inf", "nan")


class Fetches(TorchDispatchMode):
    """Counts values that are fetched from the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.moderate
@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_values_are_fetched_only_when_they_are_drawn(kind: type[io.StringIO]) -> None:
    def fetched(iterations: int) -> tuple[int, int]:
        file = kind()
        options: dict[str, Any] = {"interval": 10.0} if kind is Terminal else {"interval": 0.0, "line_interval": 1000.0}
        engine = timed(ProgressBar(file=file, clock=Clock(), leave=True, **options))
        with Fetches() as mode:
            engine.run(BATCHES * 10, max_iters=iterations)
        return mode.count, len(drawings(file))

    (few, drawn), (many, more) = fetched(20), fetched(40)
    bare = Fetches()
    with bare:
        engine_of().run(BATCHES * 10, max_iters=40)
    assert few > 0
    assert many - bare.count <= 4 * more
    if kind is io.StringIO:
        assert many == few
        assert drawn == more == 1
    assert more < 12, "one drawing in ten seconds, which are 20 iterations"


def test_the_bar_keeps_no_graph_alive() -> None:
    nodes: list[weakref.ref[Any]] = []

    class Probe(torch.autograd.Function):
        """Notes its node in the graph."""

        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
            nodes.append(weakref.ref(ctx))
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0]

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = Probe.apply(nn.functional.mse_loss(output, target))  # type: ignore[no-untyped-call]
        return loss

    engine = build(linear(3, 1), ProgressBar(file=io.StringIO(), interval=0.0), loss=loss_of)
    engine.run(BATCHES, max_epochs=2)
    gc.collect()
    assert len(nodes) == 8
    assert not any(one() is not None for one in nodes[:-1])


def test_iterations_and_samples_are_counted_per_second() -> None:
    file = io.StringIO()
    timed(ProgressBar(file=file, interval=0.0, clock=Clock()), 0.25).run(BATCHES, max_epochs=1)
    assert "  4 it/s  8 samples/s  " in file.getvalue()


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_an_evaluation_is_said_to_be_under_way_and_does_not_slow_the_rates() -> None:
    file, clock = Terminal(), Clock()
    model = linear(3, 1)
    evaluator = evaluator_of(model)
    seen: list[str] = []

    def evaluate(engine: Engine) -> None:
        seen.append(drawings(file)[-1])
        clock.now += 100.0

    evaluator.connect(Events.ITERATION_COMPLETED, evaluate)
    engine = timed(ProgressBar(file=file, interval=0.0, clock=clock), 0.25, model=model)
    engine.attach(Validation(evaluator, BATCHES, every="3it"))
    engine.run(BATCHES, max_epochs=2)
    assert len(seen) == 8
    assert all("evaluating" in one for one in seen)
    assert "evaluating" not in drawings(file)[-1]
    assert "4 it/s, 8 samples/s" in drawings(file)[-1]
    assert file.getvalue().count("\n") == 1, "the last bar's"


class Unsized:
    def __iter__(self) -> Any:
        return iter(BATCHES)


@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize(
    ("bounds", "count", "left"),
    [
        ({"max_epochs": 3}, "2/4", "00:03"),
        ({"max_iters": 14}, "6/14", "00:04"),
        ({"max_steps": 8}, "3/8 steps", "00:05"),
        ({"max_epochs": 3, "max_iters": 7}, "2/3", "00:00"),
        ({"max_epochs": 9, "max_steps": 5}, "2/4", "00:02"),
        ({"max_epochs": 3, "epoch_length": 5}, "1/5", "00:04"),
        ({"max_epochs": 3, "unsized": True}, "2/4", "00:03"),
    ],
)
def test_the_time_left_is_known_for_every_bound(bounds: dict[str, Any], count: str, left: str) -> None:
    """After six iterations of half a second."""
    file = Terminal()
    data = Unsized() if bounds.pop("unsized", False) else BATCHES
    engine = timed(ProgressBar(file=file, interval=0.0, clock=Clock()))
    if "max_steps" in bounds:
        engine.attach(GradientAccumulation(2))
    seen: list[str] = []
    engine.connect(Events.ITERATION_STARTED(once=7), lambda engine: seen.append(drawings(file)[-1]))
    engine.run(data, **bounds)
    assert f" {count} [" in seen[0]
    assert f"{left} left" in seen[0]
    assert "100%" in drawings(file)[-1]


def test_the_time_left_of_a_time_limit_is_what_the_limit_leaves() -> None:
    file = Terminal()
    engine = engine_of(ProgressBar(file=file, interval=0.0))
    engine.connect(Events.ITERATION_STARTED(once=8), lambda engine: engine.terminate("enough"))
    engine.run(BATCHES, max_time="1h")
    assert re.search(r"epoch 2:   0%\|.*\| 6it \[.*59:5\d left", file.getvalue())


@pytest.mark.moderate
def test_epochs_that_are_short_share_one_bar_over_the_run() -> None:
    file = Terminal()
    engine = timed(ProgressBar(file=file, interval=0.1, clock=Clock()), 0.01)
    engine.run(BATCHES, max_epochs=200)
    drawn = drawings(file)
    assert sum("  0%|" in one for one in drawn) <= 3
    assert 60 < len(drawn) < 120, "one in a tenth of eight seconds"
    assert "epoch 200/200: 100%" in drawn[-1]
    assert "800/800" in drawn[-1]


def test_long_epochs_have_bars_of_their_own() -> None:
    file = Terminal()
    timed(ProgressBar(file=file, interval=0.1, clock=Clock()), 1.0).run(BATCHES, max_epochs=3)
    assert [f"epoch {n}/3:   0%|" in file.getvalue() for n in (1, 2, 3)] == [True] * 3
    assert "epoch 3/3:  25%" in file.getvalue()


# ---- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_comes_within_an_epoch_once_a_minute() -> None:
    file = io.StringIO()
    timed(ProgressBar(file=file, clock=Clock()), 10.0).run(BATCHES * 5, max_epochs=1)
    assert [line.split("  ")[1] for line in file.getvalue().splitlines()] == [f"iteration {n}" for n in (6, 12, 18, 20)]


@pytest.mark.moderate
def test_lines_become_rarer_as_the_run_becomes_longer() -> None:
    file = io.StringIO()
    timed(ProgressBar(file=file, clock=Clock()), 10.0).run(BATCHES[:1], max_epochs=400)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("epoch 1/400  ")
    assert lines[-1].startswith("epoch 400/400  ")
    assert 80 < len(lines) < 160


def test_lines_without_a_value_come_once_a_minute() -> None:
    file, clock = io.StringIO(), Clock()
    engine = idle_engine()
    engine.attach(ProgressBar(file=file, clock=clock))

    def work(engine: Engine) -> None:
        clock.now += 5.0

    engine.connect(Events.ITERATION_COMPLETED, work, phase=Phase.PREPARE)
    engine.run([1, 2], max_epochs=12)
    assert [line.split("  ")[0] for line in file.getvalue().splitlines()] == ["epoch 6/12", "epoch 12/12"]


def test_a_run_with_nothing_to_do_prints_no_line() -> None:
    file = io.StringIO()
    engine = engine_of(ProgressBar(file=file))
    engine.run(BATCHES, max_epochs=1)
    before = file.getvalue()
    with pytest.warns(UserWarning, match="nothing to do"):
        engine.run(BATCHES, max_epochs=1)
    assert file.getvalue() == before


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_one_evaluation_after_another_brings_lines_no_faster() -> None:
    file = io.StringIO()
    model = linear(3, 1)
    evaluator = evaluator_of(model)
    evaluator.attach(ProgressBar(file=file, line_interval=1000.0))
    engine_of(Validation(evaluator, BATCHES), model=model).run(BATCHES, max_epochs=12)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("evaluation  iteration 4  ")


# ---- what is shown ----------------------------------------------------------------------------------------------------


def test_learning_rates_are_shown_on_request() -> None:
    file = io.StringIO()
    engine_of(ProgressBar(file=file, learning_rate=True)).run(BATCHES, max_epochs=1)
    assert file.getvalue().rstrip().endswith("  lr 0.01")
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 0.5}]
    file = io.StringIO()
    engine = engine_of(ProgressBar([], file=file, learning_rate=True))
    engine.connect(Events.STARTED, lambda engine: engine.updates[0].optimizer.add_param_group(groups[0]))
    engine.run(BATCHES, max_epochs=1)
    assert file.getvalue().rstrip().endswith(" left  lr 0.01-0.5") or file.getvalue().rstrip().endswith(
        "s  lr 0.01-0.5"
    )


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_the_losses_stay_beside_the_metrics_of_a_validation() -> None:
    file = io.StringIO()
    model = linear(3, 1)
    engine = engine_of(ProgressBar(file=file, line_interval=0.0), Validation(evaluator_of(model), BATCHES), model=model)
    engine.run(BATCHES, max_epochs=2)
    assert engine.state.update.loss is not None
    last, measured = engine.state.update.loss.item(), engine.state.metrics["loss"]
    assert re.search(
        rf"  smooth_loss \S+  batch_loss {last:.4g}  loss {measured:.4g}$", file.getvalue().splitlines()[-1]
    )


def test_rich_draws_on_request() -> None:
    needs("rich", "rich")
    file = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        engine_of(ProgressBar(file=file, interval=0.0, style="rich", leave=True)).run(BATCHES, max_epochs=2)
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "epoch 1/2:  25%|" in drawn
    assert "| 4/4 [" in drawn
    assert "smooth_loss=" in drawn
    assert file.getvalue().count("\n") == 2


def test_rich_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError,
        match=re.escape(
            "ProgressBar(style='rich'): rich is not installed; install the extra: pip install 'signalfire[rich]'"
        ),
    ):
        ProgressBar(style="rich")


# ---- a real terminal --------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from signalfire.handlers import *
from tests.kit import *
model = mlp(5, 8, 1)
evaluator = evaluator_of(model)
if "nested" in sys.argv:
    evaluator.attach(ProgressBar(interval=0.0, style=sys.argv[1]))
bar = ProgressBar(interval=0.0, leave=True, learning_rate=True, style=sys.argv[1])
build(model, bar, Validation(evaluator, batches(3), every="2it")).run(batches(6), max_epochs=2)
print("the end")
"""


PRINTING = """
import logging, sys, warnings
from tqdm import tqdm
from signalfire import Events
from signalfire.handlers import *
from tests.kit import *
logging.basicConfig(format="%(message)s")  # holds the stream of before the run
streams = sys.stdout, sys.stderr
methods = sys.stdout.write, sys.stderr.write
trainer = build(mlp(5, 8, 1), ProgressBar(interval=0.0, leave="leave" in sys.argv, style=sys.argv[1]))

@trainer.on(Events.ITERATION_COMPLETED)
def speak(engine):
    iteration = engine.state.iteration
    if iteration == 2:
        print("one", end=" ")
        print("two")
        sys.stderr.write("three\\n")
    if iteration == 3:
        print("unfinished", end="")
    if iteration == 4:
        logging.warning("logged")
        tqdm.write("by tqdm")
        print("a\\nb")
        if "error" in sys.argv:
            raise KeyboardInterrupt

try:
    trainer.run(batches(6), max_epochs=2)
except KeyboardInterrupt:
    print("interrupted")
assert (sys.stdout, sys.stderr) == streams
assert (sys.stdout.write, sys.stderr.write) == methods
print("the end")
"""


def on_terminal(folder: Path, columns: int, *arguments: str, text: str = PROGRAM, output: Path | None = None) -> str:
    """What a program writes to a terminal of so many columns; its standard output goes to a file if one is given."""
    (folder / "program.py").write_text(text)
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    terminal = Path(os.ttyname(its))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.delenv("COLUMNS", raising=False)
        process = program(folder / "program.py", *arguments, cwd=ROOT, outputs=[output or terminal, terminal])
        process.start()
    os.close(its)
    written = b""
    with suppress(OSError):  # raised once the program has ended
        while part := os.read(ours, 1 << 16):
            written += part
    process.join()
    os.close(ours)
    assert process.exitcode == 0, written.decode()
    return written.decode()


def screen(written: str, columns: int) -> list[str]:
    """The lines that are left on a terminal that wraps, as far as bars need one."""
    rows, row, column = [[" "] * columns], 0, 0
    for match in re.finditer(r"\x1b\[(\d*)[;\d]*([A-Za-z])|\x1b\[\?25[hl]|([\r\n])|(.)", written):
        number, command, control, letter = match.groups()
        if command == "A":
            row -= int(number or 1)
        elif command == "K":
            rows[row] = [" "] * columns
        elif command == "J":
            rows[row:] = [[*rows[row][:column], *" " * (columns - column)]]
        elif control == "\r":
            column = 0
        elif control == "\n" or letter:
            if control or column == columns:
                row, column = row + 1, column if control else 0
            while row >= len(rows):
                rows.append([" "] * columns)
            if letter:
                rows[row][column] = letter
                column += 1
    return ["".join(one).rstrip() for one in rows]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("tqdm",), ("tqdm", "nested"), ("rich",), ("rich", "nested")], ids=" ".join)
@pytest.mark.parametrize("columns", [40, 120])
def test_each_bar_stays_on_one_line_of_a_terminal(columns: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    if "rich" in arguments:
        needs("rich", "rich")
    written = on_terminal(tmp_path, columns, *arguments)
    left = screen(written, columns)
    assert [line[:10] for line in left if line] == ["epoch 1/2:", "epoch 2/2:", "the end"], left
    assert max(map(len, left)) < columns
    assert ("100%" in left[0]) is (columns == 120)
    assert "batch_loss=" in left[0]
    assert ("smooth_loss=" in left[0]) is (columns == 120)
    assert ("lr=0.1" in left[0]) is (columns == 120)
    assert ("evaluation:" if "nested" in arguments else "evaluating") in written


@pytest.mark.slow
@pytest.mark.parametrize("leave", [[], ["leave"]], ids=["", "leave"])
@pytest.mark.parametrize("style", ["tqdm", "rich"])
@pytest.mark.parametrize("ends", [[], ["error"]], ids=["", "error"])
def test_what_is_printed_appears_above_the_bar(style: str, leave: list[str], ends: list[str], tmp_path: Path) -> None:
    if style == "rich":
        needs("rich", "rich")
    written = on_terminal(tmp_path, 100, style, *leave, *ends, text=PRINTING)
    lines = [line for line in screen(written, 100) if line]
    texts = ["one two", "three", "unfinished", "logged", "by tqdm", "a", "b"]
    shown = [line for line in lines if not line.startswith("epoch ")]
    assert shown == [*texts, *(["interrupted"] if ends else []), "the end"]
    bars = [line[:9] for line in lines if line.startswith("epoch ")]
    assert bars == (["epoch 1/2"] if ends else ["epoch 1/2"] * bool(leave) + ["epoch 2/2"])


@pytest.mark.slow
def test_two_bars_leave_a_line_each(tmp_path: Path) -> None:
    text = """
from signalfire.handlers import *
from tests.kit import *
build(mlp(5, 8, 1), ProgressBar(interval=0.0), ProgressBar(interval=0.0, name="second")).run(batches(6), max_epochs=2)
print("the end")
"""
    lines = [line for line in screen(on_terminal(tmp_path, 100, text=text), 100) if line]
    assert [line[:10] for line in lines] == ["epoch 2/2:", "epoch 2/2:", "the end"]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["tqdm", "rich"])
def test_what_goes_to_a_file_has_the_same_bytes_with_a_bar(style: str, tmp_path: Path) -> None:
    if style == "rich":
        needs("rich", "rich")
    output = tmp_path / "output"
    output.touch()
    on_terminal(tmp_path, 100, style, text=PRINTING, output=output)
    assert output.read_text() == "one two\nunfinishedby tqdm\na\nb\nthe end\n"


def test_eighty_columns_suffice_for_a_loss_and_the_metrics_of_a_validation() -> None:
    values = {"smooth_loss": "0.9346", "loss": "0.8001", "val_accuracy": "0.5156", "val_loss": "0.7369", "speed": "38"}
    view = View("epoch 1/3", 0.19, "9/48", "12.5 it/s", "100 samples/s", "00:03 left", values, ["smooth_loss", "speed"])
    assert fitted(view, 79)[:2] == ("epoch 1/3:  19%|", "| [loss=0.8001, val_accuracy=0.5156, val_loss=0.7369]")
    assert fitted(view, 60)[:2] == ("epoch 1/3:  19%|", "| [loss=0.8001, val_accuracy=0.5156]")
    last = replace(view, fraction=1.0, left="", note="4.9s in total")
    assert fitted(last, 79).before == "epoch 1/3: [4.9s in total, loss=0.8001, val_accuracy=0.5156, val_loss=0.7369]"


@pytest.mark.parametrize("names", [None, ["speed", "val_loss"]])
def test_what_the_person_chose_stays_longest(names: list[str] | None) -> None:
    engine = engine_of(bar := ProgressBar(names, file=Terminal(), interval=0.0))
    views: list[View] = []

    def measure(engine: Engine) -> None:
        engine.state.metrics.announce("a handler", ["speed"])
        engine.state.metrics.announce("another", ["val_loss"], evaluated=True)
        engine.state.metrics.update(speed=1.0, val_loss=2.0, mine=3.0)

    engine.connect(Events.STARTED, measure, phase=Phase.PREPARE)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: views.append(bar._view), phase=Phase.CONTROL)
    engine.run(BATCHES, max_epochs=1)
    assert list(views[0].lesser) == ([] if names else ["smooth_loss", "speed"])
    assert {"speed", "val_loss"} <= set(views[0].values)


def test_a_metric_of_a_validation_is_found_under_both_of_its_names() -> None:
    engine = build(linear(3, 1), ProgressBar(["val/loss", "val_loss"], file=io.StringIO()))
    data = [(inputs + 0.5, targets) for inputs, targets in BATCHES]
    engine.attach(Validation(evaluator_of(engine.model), data, prefix="val_"))
    engine.run(BATCHES, max_epochs=2)
    assert not engine.findings.of_run().of("W61")
