"""History: every new value once, with its epoch and iteration; the table and the plot."""

from __future__ import annotations

import io
import itertools
import math
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, Events
from signalfire.handlers import Average, Checkpoint, History, Metrics, Validation
from tests import kit
from tests.kit import build, evaluator_of, needs

BATCHES = [(torch.full((2, 3), float(n)), torch.ones(2, 1)) for n in range(4)]


def engine_of(*handlers: Any, model: nn.Module | None = None) -> Engine:
    return build(model or nn.Linear(3, 1), *handlers, optimizer=partial(torch.optim.SGD, lr=0.01))


def scored(history: History, epochs: int = 3) -> Engine:
    """A run with a score in every epoch and an odd one in every second."""
    engine = engine_of(history)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=10.0 * engine.state.epoch))
    engine.connect(Events.EPOCH_COMPLETED(every=2), lambda engine: engine.state.metrics.update(odd=torch.tensor(0.5)))
    engine.run(BATCHES, max_epochs=epochs)
    return engine


def test_every_new_value_is_recorded_once_with_its_place() -> None:
    history = History()
    scored(history)
    assert history.records == {"score": [(1, 4, 10.0), (2, 8, 20.0), (3, 12, 30.0)], "odd": [(2, 8, 0.5)]}
    assert history["score"] == [10.0, 20.0, 30.0]
    assert history.latest == {"score": 30.0, "odd": 0.5}
    assert sorted(history.names) == ["odd", "score"]
    assert not isinstance(history["odd"][0], torch.Tensor)


def test_the_same_number_written_again_is_recorded_again() -> None:
    history = History()
    engine = engine_of(history)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=1.0))
    engine.run(BATCHES, max_epochs=3)
    assert history["score"] == [1.0, 1.0, 1.0]


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
@pytest.mark.parametrize("history_first", [True, False])
def test_validations_are_recorded_where_they_happen(history_first: bool) -> None:
    model = nn.Linear(3, 1)
    evaluator = evaluator_of(model)
    history = History()
    validation = Validation(evaluator, BATCHES, every="3it", at_start=True)
    handlers: list[Any] = [history, validation, Metrics(train_loss=Average())]
    engine = engine_of(*(handlers if history_first else reversed(handlers)), model=model)
    engine.run(BATCHES, max_epochs=2)
    places = {name: [record[:2] for record in records] for name, records in history.records.items()}
    assert places == {"loss": [(1, 0), (1, 3), (2, 6)], "train_loss": [(1, 4), (2, 8)]}
    assert history["loss"][-1] == engine.state.metrics["loss"]


def test_a_run_that_continues_goes_on_with_its_records() -> None:
    history = History()
    engine = scored(history)
    engine.run(BATCHES, max_epochs=4)
    assert history["score"] == [10.0, 20.0, 30.0, 40.0]
    assert history["odd"] == [0.5, 0.5]


def test_the_table_has_a_row_for_each_epoch() -> None:
    history = History()
    assert history.table() == "epoch"
    scored(history)
    lines = [line.split() for line in history.table().splitlines()]
    assert sorted(lines[0]) == ["epoch", "odd", "score"]
    column = lines[0].index("score")
    assert [line[0] for line in lines[1:]] == ["1", "2", "3"]
    assert lines[2][column] == "20"
    assert len(lines[1]) == 2  # nothing odd in epoch 1
    assert len({len(line) for line in history.table().splitlines()}) == 1


@pytest.mark.moderate
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = History()
    with pytest.raises(ValueError, match="nothing was recorded"):
        history.plot(tmp_path / "none.png")
    scored(history)
    history.plot(tmp_path / "all.png")
    history.plot(tmp_path / "one.png", "score,odd")
    for name in ("all.png", "one.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyError, match="loss"):
        history.plot(tmp_path / "missing.png", "loss")


def test_a_metric_that_was_not_recorded_is_an_error_that_names_those_there_are() -> None:
    history = History()
    with pytest.raises(KeyError, match="none"):
        history["loss"]
    scored(history)
    with pytest.raises(KeyError, match=r"'loss'.*score"):
        history["loss"]


def test_a_metric_that_is_not_one_number_is_left_out() -> None:
    history = History()
    engine = engine_of(history)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(matrix=torch.ones(2, 2), one=1))
    engine.run(BATCHES, max_epochs=1)
    assert "matrix" not in history.names
    assert history["one"] == [1.0]


def test_nan_is_recorded_as_it_is() -> None:
    history = History()
    engine = engine_of(history)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=math.nan))
    engine.run(BATCHES, max_epochs=1)
    assert math.isnan(history["score"][0])


def test_a_saved_run_has_the_whole_history(tmp_path: Path) -> None:
    def build(folder: Path) -> tuple[Engine, History]:
        history = History()
        engine = engine_of(history, Metrics(loss=Average()), Checkpoint(folder, every="6it", keep=9))
        return engine, history

    torch.manual_seed(0)
    whole, history = build(tmp_path / "whole")
    whole.run(BATCHES, max_epochs=4)
    for path in sorted((tmp_path / "whole").iterdir()):
        other, continued = build(tmp_path / "other")
        other.load_state_dict(Checkpoint.load(path))
        other.run(BATCHES, max_epochs=4)
        assert continued.records == history.records, path.name


def measured(keep: int | None, iterations: int, folder: Path | None = None) -> Engine:
    """A run with a value in each iteration."""
    engine = engine_of(History(keep=keep), *([] if folder is None else [Checkpoint(folder, every="7it", keep=99)]))
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: engine.state.metrics.update(score=float(engine.state.iteration))
    )
    if folder is None or not folder.exists():
        engine.run(BATCHES, max_iters=iterations)
    return engine


@pytest.mark.moderate
def test_the_older_half_is_thinned_out_and_the_newest_is_complete() -> None:
    whole, limited = (measured(keep, 100).find(History) for keep in (None, 16))
    assert whole["score"] == list(map(float, range(1, 101)))
    assert whole.dropped == {}
    values = limited["score"]
    assert 8 < len(values) <= 16
    assert values[0] == 1.0
    assert values[-8:] == list(map(float, range(93, 101)))
    gaps = [after - before for before, after in itertools.pairwise(values)]
    assert gaps == sorted(gaps, reverse=True), "the older, the fewer are left"
    assert limited.dropped == {"score": 100 - len(values)}
    assert all(record in whole.records["score"] for record in limited.records["score"])


@pytest.mark.slow
def test_a_resumed_run_thins_out_at_the_same_places(tmp_path: Path) -> None:
    whole = measured(8, 42, tmp_path / "runs").find(History)
    for path in sorted((tmp_path / "runs").iterdir()):
        engine = measured(8, 42, tmp_path / "runs")
        engine.load_state_dict(Checkpoint.load(path))
        if path.name.endswith("42"):
            continue
        engine.run(BATCHES, max_iters=42)
        assert engine.find(History).state_dict() == whole.state_dict()


def test_a_longer_history_that_is_loaded_is_thinned_out_at_once() -> None:
    whole, limited = measured(None, 40).find(History), History(keep=4)
    limited.load_state_dict(whole.state_dict())
    assert len(limited["score"]) <= 4
    assert limited["score"][0] == 1.0
    assert limited["score"][-2:] == [39.0, 40.0]


@pytest.mark.slow
def test_the_state_of_a_long_run_is_small() -> None:
    history = measured(200, 4_000).find(History)
    assert len(pickle.dumps(history.state_dict())) < 6_000
    assert len(history["score"]) + history.dropped["score"] == 4_000


def test_reset_forgets() -> None:
    history = History()
    engine = scored(history)
    engine.reset()
    assert history.records == {}
    engine.run(BATCHES, max_epochs=1)
    assert history["score"] == [10.0]


def test_switched_off_nothing_is_recorded() -> None:
    history = History()
    engine = engine_of(history, Metrics(loss=Average()))
    with engine.without("history"):
        engine.run(BATCHES, max_epochs=1)
    assert history.records == {}


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_validations_at_the_start_are_recorded_in_their_order() -> None:
    model = nn.Linear(3, 1)
    evaluator = evaluator_of(model)
    history = History()
    engine = engine_of(Validation(evaluator, BATCHES, at_start=True), history, model=model)
    engine.run(BATCHES, max_epochs=2)
    assert [place[:2] for place in history.records["loss"]] == [(1, 0), (1, 4), (2, 8)]
    assert history["loss"][0] > history["loss"][-1]


# ---- as a frame, a printed table and a plot ---------------------------------------------------------------------------


def columns_without_pandas(history: History, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "pandas", None)
    return history.frame()


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_the_frame_has_a_row_for_each_iteration_in_which_something_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(3, 1)
    history = History()
    engine = engine_of(
        history, Validation(evaluator_of(model), BATCHES, every="3it"), Metrics(train_loss=Average()), model=model
    )
    engine.run(BATCHES, max_epochs=2)
    columns = columns_without_pandas(history, monkeypatch)
    assert list(columns) == ["epoch", "iteration", "loss", "train_loss"]
    assert columns["epoch"] == [1, 1, 2, 2]
    assert columns["iteration"] == [3, 4, 6, 8]
    assert columns["loss"] == [history["loss"][0], None, history["loss"][1], None]
    assert columns["train_loss"] == [None, history["train_loss"][0], None, history["train_loss"][1]]


def test_with_pandas_the_frame_is_one_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("interop", "pandas")
    history = History()
    scored(history)
    frame = history.frame()
    columns = columns_without_pandas(history, monkeypatch)
    assert list(frame.columns) == list(columns)
    assert frame.notna().sum().to_dict() == {"epoch": 3, "iteration": 3, "score": 3, "odd": 1}
    assert [None if math.isnan(value) else value for value in frame["odd"]] == columns["odd"]
    assert str(frame["iteration"].dtype) == "int64"


def test_a_history_without_values_has_an_empty_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    assert columns_without_pandas(History(), monkeypatch) == {"epoch": [], "iteration": []}


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_a_row_is_printed_as_each_epoch_completes_below_one_header() -> None:
    model = nn.Linear(3, 1)
    file = io.StringIO()
    history = History(print_epochs=True, file=file)
    validation = Validation(evaluator_of(model), BATCHES, every="2ep", prefix="validation/")
    engine = engine_of(Metrics(train_loss=Average()), history, validation, model=model)
    lengths: list[int] = []
    engine.connect(Events.EPOCH_STARTED, lambda engine: lengths.append(len(file.getvalue().splitlines())))
    engine.run(BATCHES, max_epochs=3)
    assert lengths == [0, 2, 3], "as they complete"
    header, *rows = file.getvalue().splitlines()
    assert header.split() == ["epoch", "train_loss", "validation/loss"]
    assert [row.split() for row in rows] == [row.split() for row in history.table().splitlines()[1:]]
    assert {len(line) for line in (header, *rows)} == {len(header)}
    assert rows[0][: -len("validation/loss")].split() == ["1", f"{history['train_loss'][0]:.4g}"], "columns are aligned"


def test_a_metric_that_is_new_brings_the_header_again_and_a_part_of_an_epoch_a_row() -> None:
    file = io.StringIO()
    engine = engine_of(History(print_epochs=True, file=file))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=1.0))
    engine.connect(
        Events.ITERATION_COMPLETED(once=10), lambda engine: engine.state.metrics.update(odd=torch.tensor(0.5))
    )
    engine.run(BATCHES, max_iters=10)
    assert [line.split() for line in file.getvalue().splitlines()] == [
        ["epoch", "score"], ["1", "1"], ["2", "1"], ["epoch", "score", "odd"], ["3", "0.5"],
    ]  # fmt: skip


def test_nothing_is_printed_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    scored(History())
    assert capsys.readouterr().out == ""
    scored(History(print_epochs=True))
    assert capsys.readouterr().out.startswith("epoch")


def with_records(**lengths: int) -> History:
    history = History()
    records = {
        name.replace("__", "/"): [[1, i + 1, 1 / (i + 1)] for i in range(count)] for name, count in lengths.items()
    }
    history.load_state_dict({"records": records, "seen": {}})
    return history


def drawn(history: History, *names: str) -> list[list[str]]:
    """The legends of the panels, or the title of one with a single curve."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
        history.plot("unused.png", *names)
    panels = []
    for axes in figures[0].axes:
        legend = axes.get_legend()
        panels.append([axes.get_title("left")] if legend is None else [text.get_text() for text in legend.get_texts()])
    return panels


def test_what_training_and_validation_measure_shares_a_panel() -> None:
    pytest.importorskip("matplotlib")
    history = with_records(train_loss=9, loss=3, digits__loss=3, val_accuracy=3, scores__f1=3, training=2)
    losses = ["train_loss", "loss", "digits/loss"]
    assert drawn(history) == [losses, ["accuracy"], ["scores/f1"], ["training"]]
    assert drawn(history, "loss", "train_loss") == [losses]
    assert drawn(history, "accuracy") == [["accuracy"]]
    assert drawn(history, "loss,", "train_loss,scores/f1") == [["loss"], ["train_loss", "scores/f1"]]
    assert drawn(with_records(train__loss=2, validation__loss=2)) == [["train/loss", "validation/loss"]]


@pytest.mark.slow
def test_no_text_of_a_plot_is_cut_and_no_legend_covers_a_curve() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    history = with_records(
        train_loss=60, loss=5, **{f"{'long_' * 12}{i}__loss": 5 for i in range(3)}, **{"wide" * 40: 3}
    )
    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
        history.plot("unused.png")
    (figure,) = figures
    figure.draw_without_rendering()
    edges = figure.bbox
    for axes in figure.axes:
        inside = axes.get_tightbbox()
        assert inside is not None
        assert edges.x0 - 1 <= inside.x0 < inside.x1 <= edges.x1 + 1
        assert edges.y0 - 1 <= inside.y0 < inside.y1 <= edges.y1 + 1
        if (legend := axes.get_legend()) is not None:
            assert legend.get_window_extent().x0 >= axes.get_window_extent().x1


def test_bad_arguments_of_the_printed_table_are_refused() -> None:
    with pytest.raises(TypeError, match=r"History\(print_epochs=1\): expected True or False"):
        History(print_epochs=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"History\(file='x'\): expected an open text file"):
        History(file="x")  # type: ignore[arg-type]


def test_a_metric_in_place_of_the_path_and_lists_of_names_are_refused(tmp_path: Path) -> None:
    history = History()
    engine = kit.build(kit.linear(5, 1), history, Metrics(train_loss=Average()))
    engine.run(kit.batches(3), max_epochs=2)
    with pytest.raises(ValueError, match="'train_loss' is a metric name, but the first argument is the path"):
        history.plot("train_loss")
    with pytest.raises(TypeError, match="expected metric names"):
        history.plot(str(tmp_path / "x.png"), ["train_loss"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected metric names separated by commas"):
        history.plot(str(tmp_path / "x.png"), ",")
    history.plot(str(tmp_path / "x.png"), "train_loss, train_loss")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_after_a_load_earlier_records_stand_under_the_name_that_the_metric_has_now() -> None:
    def validated(*, prefix: str) -> tuple[Engine, History]:
        engine = engine_of(history := History(), model=kit.linear(3, 1))
        engine.attach(Validation([(torch.full((2, 3), 9.0), torch.ones(2, 1))], prefix=prefix))
        return engine, history

    whole, expected = validated(prefix="val_")
    whole.run(BATCHES, max_epochs=3)
    first, earlier = validated(prefix="")
    first.run(BATCHES, max_epochs=2)
    assert earlier.names == ["loss"]
    second, history = validated(prefix="val_")
    second.load_state_dict(first.state_dict())
    second.run(BATCHES, max_epochs=3)
    assert history.names == ["val_loss"]
    assert history.records["val_loss"][:2] == earlier.records["loss"]
    assert history.state_dict() == expected.state_dict()


def test_the_best_value_of_a_validation_is_marked_and_a_stage_has_one_color_in_all_panels() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    engine = kit.build(kit.linear(5, 1), history := History(), Metrics(train_loss=Average()))
    engine.attach(Validation(kit.batches(1), score=Average(lambda output, target: output.mean())))
    engine.run(kit.batches(3), max_epochs=3)
    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
        history.plot("unused.png")
    losses, scores = figures[0].axes
    assert losses.get_title("left") == "loss"
    star, curve = (line for line in losses.lines if line.get_color() == "C1")
    best = min(history.records["val_loss"], key=lambda one: one[2])
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (best[1], best[2])
    assert {to_hex(line.get_color()) for line in scores.lines} == {to_hex(curve.get_color())}
