"""`engine.log`: what users log reaches metrics and loggers at the iteration at which it came."""

from __future__ import annotations

import csv
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.authoring.log import Entry, Histogram, as_pixels
from signalfire.findings import FindingWarning
from signalfire.handlers import Average, CSVLogger, EarlyStopping, History, Metrics, Validation
from tests import kit
from tests.kit import build, evaluator_of, mlp

batches = kit.batches


def rows(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Iteration and value of each row, by name."""
    found = defaultdict(list)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            found[row["name"]].append((int(row["iteration"]), float(row["value"])))
    return found


def test_a_number_of_each_iteration_is_sampled_and_a_rarer_one_is_written_always(tmp_path: Path) -> None:
    engine = build(mlp(5, 8, 1), CSVLogger(tmp_path / "log.csv", every="10it"), history := History())

    @engine.on(Events.ITERATION_COMPLETED)
    def log(engine: Engine) -> None:
        iteration = engine.state.iteration
        engine.log("kl", torch.tensor(iteration / 2))
        if iteration % 4 == 1:
            engine.log("rare", iteration)

    engine.run(batches(25), max_epochs=1)
    found = rows(tmp_path / "log.csv")
    assert found["train/kl"] == [(10, 5.0), (20, 10.0)]
    assert found["train/rare"] == [(i, float(i)) for i in range(1, 26, 4)]
    assert history["kl"] == [i / 2 for i in range(1, 26)]


@pytest.mark.parametrize(
    ("measured", "written"),
    [
        ({1, 2, 3, 4, 5, 6}, [2, 4, 6]),
        ({1, 3, 5}, [1, 3, 5]),  # in no two iterations in a row
        ({1, 4, 5, 6}, [1, 4, 6]),
        ({3, 4, 5}, [4]),
        ({6}, [6]),
        ({5, 7}, [5, 7]),  # of the last iteration
    ],
)
def test_rows_of_several_iterations_are_those_of_the_interval(
    measured: set[int], written: list[int], tmp_path: Path
) -> None:
    engine = build(mlp(5, 8, 1), CSVLogger(tmp_path / "log.csv", every="2it"))

    @engine.on(Events.ITERATION_COMPLETED)
    def log(engine: Engine) -> None:
        if engine.state.iteration in measured:
            engine.log("x", torch.tensor(float(engine.state.iteration)))

    engine.run(batches(7), max_epochs=1)
    found = rows(tmp_path / "log.csv")
    assert found["train/x"] == [(one, float(one)) for one in written]
    assert [iteration for iteration, _ in found["train/loss"]] == [2, 4, 6]


def test_values_of_an_evaluation_are_written_at_once(tmp_path: Path) -> None:
    model = mlp(5, 8, 1)
    trainer = build(
        model, Validation(evaluator_of(model), batches(1), every="3it"), CSVLogger(tmp_path / "log.csv", every="2it")
    )
    seen: list[Any] = []

    @trainer.on(Events.ITERATION_COMPLETED(once=3), phase=Phase.PERSIST)
    def read(engine: Engine) -> None:
        seen.extend(rows(tmp_path / "log.csv"))

    trainer.run(batches(4), max_epochs=1)
    assert "val/loss" in seen


@pytest.mark.moderate
def test_a_resumed_run_samples_at_the_same_iterations(tmp_path: Path) -> None:
    def engine_of(path: Path) -> Engine:
        engine = build(mlp(5, 8, 1), CSVLogger(path, every="4it"))

        @engine.on(Events.ITERATION_COMPLETED)
        def log(engine: Engine) -> None:
            iteration = engine.state.iteration
            engine.log("kl", iteration / 2)
            if iteration in (2, 3, 5, 7, 8, 9):
                engine.log("odd", iteration)

        return engine

    saved: list[dict[str, Any]] = []
    engine = engine_of(tmp_path / "whole.csv")
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: saved.append(engine.state_dict()), phase=Phase.PERSIST)
    engine.run(batches(10), max_epochs=1)
    whole = (tmp_path / "whole.csv").read_text()
    assert rows(tmp_path / "whole.csv")["train/odd"] == [(5, 5.0), (8, 8.0)]
    for moment, state in enumerate(saved[:-1]):
        path = tmp_path / f"{moment}.csv"
        path.write_text(whole)
        engine = engine_of(path)
        engine.load_state_dict(state)
        engine.run(batches(10), max_epochs=1)
        assert path.read_text() == whole, moment


@pytest.mark.parametrize(
    "event", [Events.EPOCH_STARTED, Events.LOSS_COMPUTED, Events.GRADIENTS_READY, Events.EPOCH_COMPLETED]
)
def test_it_can_be_called_at_any_event(event: Events, tmp_path: Path) -> None:
    engine = build(mlp(5, 8, 1), CSVLogger(tmp_path / "log.csv", every="1it"))
    at = []

    @engine.on(event)
    def log(engine: Engine) -> None:
        at.append(engine.state.iteration)
        engine.log("value", engine.state.iteration + 0.5)

    engine.run(batches(3), max_epochs=2)
    assert rows(tmp_path / "log.csv")["train/value"] == [(i, i + 0.5) for i in at]


def test_a_tensor_that_is_changed_in_place_afterwards_is_written_as_it_was(tmp_path: Path) -> None:
    engine = build(mlp(5, 8, 1), CSVLogger(tmp_path / "log.csv", every="1it"), history := History())
    total = torch.zeros(())

    @engine.on(Events.ITERATION_COMPLETED)
    def log(engine: Engine) -> None:
        engine.log("total", total.add_(1))

    engine.run(batches(4), max_epochs=1)
    assert history["total"] == [1.0, 2.0, 3.0, 4.0]
    assert rows(tmp_path / "log.csv")["train/total"] == [(i, float(i)) for i in range(1, 5)]


def test_a_monitor_knows_what_is_logged_and_no_handlers_metric_can_be_written() -> None:
    engine = build(mlp(5, 8, 1), EarlyStopping("score", patience=1, mode="max"), Metrics(train_loss=Average()))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.log("score", 1.0))
    engine.state.metrics.announce("user", ["score"])
    assert engine.run(batches(3), max_epochs=9).epoch == 2

    engine = build(mlp(5, 8, 1), Metrics(train_loss=Average()))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.log("train_loss", 1.0))
    with pytest.raises(ValueError, match="both 'metrics' and 'user' write the metric 'train_loss'"):
        engine.run(batches(3), max_epochs=1)


@pytest.mark.parametrize("value", [torch.ones(3), np.ones((2, 2)), "1", None, [1.0], 1j])
def test_what_is_no_number_is_refused_with_the_way_out(value: Any) -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log("kl", value))
    with pytest.raises(
        TypeError, match=r"log\('kl', ...\): a .* is not a single number; log its mean, or call log.histogram"
    ):
        engine.run(batches(1), max_epochs=1)


def test_several_numbers_are_logged_by_name() -> None:
    engine = build(mlp(5, 4, 1))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log({"kl": 0.5, "entropy": torch.tensor(2.0)}))
    metrics = engine.run(batches(1), max_epochs=1).metrics
    assert metrics["kl"] == 0.5
    assert metrics["entropy"] == 2.0
    with pytest.raises(TypeError, match=r"expected a name and a number, or a mapping from names to numbers"):
        engine.log({"kl": 0.5}, 3)  # type: ignore[call-overload]


def test_outside_a_run_nothing_is_lost_silently() -> None:
    engine = build(mlp(5, 8, 1))
    for call in (
        partial(engine.log, "a", 1.0),
        partial(engine.log.text, "a", "b"),
        partial(engine.log.image, "a", torch.ones(2, 2)),
    ):
        with pytest.raises(RuntimeError, match="called outside a run"):
            call()
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log("", 1.0))
    with pytest.raises(TypeError, match="expected a name"):
        engine.run(batches(1), max_epochs=1)


def test_what_nobody_writes_is_reported_once_and_not_converted() -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log.image("a", torch.ones(2, 2)))
    with pytest.warns(FindingWarning, match=r"log.image\('a'\) was called, but no attached handler receives") as caught:
        engine.run(batches(3), max_epochs=1)
    assert len(caught) == 1


def entries(engine: Engine) -> list[Entry]:
    """What is logged, as a receiver of a user's own gets it."""
    found: list[Entry] = []

    def receive(engine: Engine) -> None:
        assert engine.log.entry is not None
        found.append(engine.log.entry)

    for event in (Events.IMAGE_LOGGED, Events.FIGURE_LOGGED, Events.TEXT_LOGGED, Events.HISTOGRAM_LOGGED):
        engine.connect(event, receive)
    return found


def test_images_figures_and_texts_are_events_with_a_payload() -> None:
    engine = build(mlp(5, 8, 1))
    found = entries(engine)
    figure, drawn = Figure(), pyplot.figure()

    @engine.on(Events.EPOCH_COMPLETED)
    def log(engine: Engine) -> None:
        engine.log.image("samples", torch.full((1, 2, 3), 0.5))
        engine.log.figure("curve", figure)
        engine.log.figure("drawn", drawn)
        engine.log.text("notes", "*hello*")
        engine.log.text("group/notes", "b")

    engine.run(batches(2), max_epochs=1)
    assert [one.tag for one in found] == ["train/samples", "train/curve", "train/drawn", "train/notes", "group/notes"]
    assert np.array_equal(found[0].value, np.full((2, 3, 3), 128, np.uint8))
    assert found[1].value is figure
    assert found[3].value == "*hello*"
    assert not pyplot.fignum_exists(drawn.number)  # pyplot would keep it for ever
    assert engine.log.entry is None


def test_what_an_evaluation_logs_goes_to_the_loggers_of_the_trainer(tmp_path: Path) -> None:
    model = mlp(5, 8, 1)
    evaluator = evaluator_of(model)

    @evaluator.on(Events.COMPLETED)
    def log(engine: Engine) -> None:
        engine.log("spread", 2.0)
        engine.log.text("sample", "x")
        engine.log.text("some/sample", "y")

    trainer = build(
        model,
        Validation(evaluator, batches(2), every="1ep", sanity=1),
        CSVLogger(tmp_path / "log.csv"),
        Metrics(loss_t=Average()),
    )
    found = entries(trainer)
    trainer.run(batches(3), max_epochs=2)
    assert [(one.tag, one.value) for one in found] == [
        ("val/sample", "x"),
        ("val/some/sample", "y"),
    ] * 2  # not of the sanity check
    assert rows(tmp_path / "log.csv")["val/spread"] == [(3, 2.0), (6, 2.0)]
    assert {"val/loss", "train/loss_t"} <= rows(tmp_path / "log.csv").keys()


@pytest.mark.parametrize(
    ("image", "layout", "shape"),
    [
        (torch.rand(4, 6), None, (4, 6, 3)),
        (torch.rand(3, 4, 6), None, (4, 6, 3)),
        (torch.rand(4, 6, 1), "HWC", (4, 6, 3)),
        (torch.rand(5, 3, 4, 6), None, (4, 30, 3)),
        (np.zeros((2, 4, 6, 3), np.uint8), "NHWC", (4, 12, 3)),
        (torch.ones(4, 6, dtype=torch.bool), None, (4, 6, 3)),
        (torch.rand(3, 4, 6, dtype=torch.bfloat16), None, (4, 6, 3)),
    ],
)
def test_images_come_in_many_forms(image: Any, layout: str | None, shape: tuple[int, ...]) -> None:
    assert as_pixels(image, layout)[0].shape == shape


def test_an_image_has_the_values_of_its_pixels() -> None:
    image = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(torch.uint8)
    side_by_side = torch.cat([image[0], image[1]], dim=2).permute(1, 2, 0)
    assert np.array_equal(as_pixels(image, None)[0], side_by_side.numpy())
    assert np.array_equal(as_pixels(image.float() / 255, None)[0], side_by_side.numpy())


X = torch.tensor([[-1.0, 0.25], [0.5, 3.0]])
RANGE = r"log.image\('x'\): its values range from .*\(x - x.min\(\)\) / \(x.max\(\) - x.min\(\)\)"


@pytest.mark.parametrize(
    ("image", "options", "pixels", "problem"),
    [
        (X, {}, [[0, 64], [128, 255]], RANGE),
        (X.bfloat16(), {}, [[0, 64], [128, 255]], RANGE),
        (X * 100, {}, [[0, 255], [255, 255]], RANGE),
        (torch.tensor([[0.5, torch.nan], [torch.inf, -torch.inf]]), {}, [[128, 0], [255, 0]], "are NaN"),
        (torch.tensor([[torch.inf, -torch.inf]]), {}, [[255, 0]], RANGE),
        (torch.tensor([[300, -4]]), {}, [[255, 0]], RANGE),
        (torch.rand(4, 6, 3), {}, None, "not logged: an image of 6 x 3 pixels with 4 channels"),
        (torch.rand(4, 6, 3), {"layout": "NCHW"}, None, "one letter for each dimension"),
        (torch.rand(4), {}, None, "one letter for each dimension"),
        (torch.rand(3, 0, 4), {}, None, "0 x 4"),
        (
            torch.rand(2, 2, dtype=torch.complex64),
            {},
            None,
            "complex numbers cannot be shown; pass a tensor or an array of real numbers",
        ),
        (torch.eye(3).to_sparse(), {}, None, "not logged"),
        ([[1.0, 2.0], [3.0]], {}, None, "not logged: expected sequence of length 2"),
        ("a.png", {}, None, "not logged: a str cannot be read as pixels .*; pass a tensor or an array"),
    ],
)
def test_what_cannot_be_shown_as_it_is_is_reported_and_the_run_goes_on(
    image: Any, options: Any, pixels: list[list[int]] | None, problem: str
) -> None:
    engine = build(mlp(5, 8, 1))
    found = entries(engine)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log.image("x", image, **options))
    with pytest.warns(FindingWarning, match=problem) as caught:
        engine.run(batches(2), max_epochs=1)
    assert len(caught) == 1
    assert [one.value[:, :, 0].tolist() for one in found] == ([] if pixels is None else [pixels] * 2)


def test_wrong_arguments_of_an_image_are_refused() -> None:
    engine = build(mlp(5, 8, 1))
    found = entries(engine)
    engine.connect(Events.COMPLETED, lambda engine: engine.log.image("x", X, layout="XYZ"))
    with pytest.raises(ValueError, match=r"log.image\('x', layout='XYZ'\): expected one of 'CHW'"):
        engine.run(batches(1), max_epochs=1)
    assert not found


@pytest.mark.parametrize(("values", "why"), [(torch.eye(3).to_sparse(), ".*sparse"), ("values", ".*'str'")])
def test_a_histogram_of_what_cannot_be_counted_is_reported_and_the_run_goes_on(values: Any, why: str) -> None:
    engine = build(mlp(5, 8, 1))
    found = entries(engine)
    engine.connect(Events.COMPLETED, lambda engine: engine.log.histogram("x", values))
    with pytest.warns(FindingWarning, match=rf"log\.histogram\('x'\): no histogram is logged: {why}"):
        engine.run(batches(1), max_epochs=1)
    assert not found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_histogram_counts_as_numpy_does(dtype: torch.dtype) -> None:
    values = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    found = Histogram.of(values)
    exact = values.double().numpy()
    counts, edges = np.histogram(exact, 64)
    assert sum(found.counts) == 1000
    assert np.abs(np.array(found.counts) - counts).sum() <= 4
    assert np.allclose(found.edges, edges)
    assert found.total == pytest.approx(exact.sum())
    assert found.squares == pytest.approx((exact**2).sum())


@pytest.mark.parametrize(
    "values", [torch.tensor([]), torch.tensor([1.0, float("nan"), float("inf")]), [1 + 1j], [3.0, 3.0]]
)
def test_strange_tensors_have_a_histogram_or_a_warning_with_their_name(values: Any) -> None:
    engine = build(mlp(5, 8, 1))
    found = entries(engine)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log.histogram("h", values))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run(batches(2), max_epochs=1)
    finite = [one for one in np.abs(np.asarray(values)) if np.isfinite(one)]
    assert [sum(one.value.counts) for one in found] == ([len(finite)] * 2 if finite else [])
    assert ["log.histogram('h')" in str(one.message) for one in caught] == [True] * (len(finite) < max(len(values), 1))


def test_of_complex_values_the_magnitudes_are_counted() -> None:
    assert Histogram.of(torch.tensor([3 + 4j, 5 + 12j])).total == pytest.approx(18)


def test_hyperparameters_are_flat_and_plain() -> None:
    engine = build(mlp(5, 8, 1))
    told = []
    engine.connect(Events.HYPERPARAMETERS_LOGGED, lambda engine: told.append(dict(engine.log.given)))
    engine.log.hyperparameters(
        {"optimizer": {"lr": 0.1}, "betas": (0.9, 0.99)}, depth=np.int64(3), path=Path("a"), bias=True
    )
    assert engine.log.given == {"optimizer/lr": 0.1, "betas": "(0.9, 0.99)", "depth": 3, "path": "a", "bias": True}
    assert type(engine.log.given["depth"]) is int
    assert told == [engine.log.given]
    with pytest.raises(TypeError, match="expected a mapping"):
        engine.log.hyperparameters([1])


def test_logging_changes_nothing_of_the_training() -> None:
    def log(engine: Engine) -> None:
        output = engine.state.update.output
        assert isinstance(output, Tensor)
        engine.log("mean", output.mean())
        engine.log.histogram("outputs", output)
        engine.log.image("outputs", output.sigmoid())

    digests = []
    for logged in (False, True):
        engine = build(mlp(5, 8, 1, torch.nn.Dropout(0.5)))
        entries(engine)
        if logged:
            engine.connect(Events.LOSS_COMPUTED, log)
        engine.run(batches(5), max_epochs=2)
        digests.append((kit.digest(engine.model.state_dict()), torch.get_rng_state().sum().item()))
    assert digests[0] == digests[1]


def test_the_tensor_of_a_metric_holds_no_graph() -> None:
    engine = Engine(
        Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)), model=mlp(5, 8, 1)
    )
    engine.connect(Events.LOSS_COMPUTED, lambda engine: engine.log("mine", engine.state.update.loss))
    engine.run(batches(2), max_epochs=1)
    assert not engine.state.metrics["mine"].requires_grad


def test_an_array_of_one_number_is_a_number_and_a_complex_one_is_not() -> None:
    engine = kit.build(kit.linear(5, 1))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log("one", np.array(3.0)))
    assert engine.run(kit.batches(2), max_epochs=1, check=False).metrics["one"] == 3.0
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log("two", torch.tensor(1j)))
    with pytest.raises(TypeError, match="is complex; log its real part"):
        engine.run(kit.batches(2), max_epochs=2, check=False)


def test_flipped_and_big_endian_arrays_are_copied() -> None:
    engine = build(mlp(5, 8, 1))
    found = entries(engine)

    @engine.on(Events.COMPLETED)
    def log(engine: Engine) -> None:
        image = np.zeros((2, 2, 3), np.uint8)
        image[..., 0] = 255
        engine.log.image("image", image[..., ::-1], layout="HWC")
        engine.log.image("other", np.ones((2, 2), ">f4"))
        engine.log.histogram("histogram", np.arange(10.0)[::-1])

    engine.run(batches(1), max_epochs=1)
    assert [entry.name for entry in found] == ["image", "other", "histogram"]
    assert found[0].value[0, 0].tolist() == [0, 0, 255]
    assert found[2].value.total == 45


class Texts(Handler):
    """Receives texts."""

    @on(Events.TEXT_LOGGED)
    def receive(self, engine: Engine) -> None:
        pass


def test_what_a_disabled_handler_would_write_is_not_reported_as_lost() -> None:
    engine = build(mlp(5, 8, 1))
    engine.attach(Texts())
    engine.connect(Events.COMPLETED, lambda engine: engine.log.text("a", "b"))
    with engine.without("texts"):
        engine.run(batches(1), max_epochs=1)
    engine.detach("texts")
    with pytest.warns(FindingWarning, match="W39"):
        engine.run(batches(1), max_epochs=2)
