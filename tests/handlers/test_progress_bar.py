"""ProgressBar: lines in a file, bars in a terminal, and nothing left behind."""

from __future__ import annotations

import io
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from tqdm.auto import tqdm

from signalfire import Engine, Events
from signalfire.handlers import Average, Metrics, ProgressBar, Validation
from tests.kit import build, evaluator_of, linear

BATCHES = [(torch.full((2, 3), float(n)), torch.ones(2, 1)) for n in range(4)]


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


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
        pattern = rf"epoch {number}/3  iteration {4 * number}  \d+\.\ds  loss {re.escape(f'{loss:.4g}')}"
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
def test_finished_bars_stay_if_asked(leave: bool) -> None:
    file = Terminal()
    engine_of(ProgressBar(file=file, leave=leave)).run(BATCHES, max_epochs=2)
    # What stays ends in a new line; what goes is overwritten with blanks.
    assert file.getvalue().count("\n") == (2 if leave else 0)


def test_unsized_data_has_a_bar_without_an_end() -> None:
    class Unsized:
        def __iter__(self) -> Any:
            return iter(BATCHES)

    file = Terminal()
    engine_of(ProgressBar(file=file, interval=0.0)).run(Unsized(), max_epochs=1)
    assert "4it" in file.getvalue()
    assert "%" not in file.getvalue()


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
