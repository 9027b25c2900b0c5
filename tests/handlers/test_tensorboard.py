"""TensorBoardLogger: what it wrote is read back with TensorBoard's own reader."""

from __future__ import annotations

import io
import os
import shutil
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups
from tensorboard.plugins.hparams import backend_context as hparams_context
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import (
    Average,
    Checkpoint,
    GradientAccumulation,
    Histograms,
    LRScheduling,
    Metrics,
    TensorBoardLogger,
    Validation,
)
from tests import kit
from tests.kit import build, evaluator_of, linear, quick

Scalars = dict[str, list[tuple[int, float]]]


batches = partial(kit.batches, targets=2)


def engine_of(*handlers: Any, model: nn.Module | None = None) -> Engine:
    return build(model or linear(5, 2), *handlers)


def read(folder: Path) -> Scalars:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def float32(values: list[float]) -> list[float]:
    """As TensorBoard stores them."""
    return torch.tensor(values).tolist()


def plain_loop(epochs: int, *, window: int = 1) -> tuple[list[float], list[float]]:
    """The loss of every batch, and the rate of every step, under OneCycleLR."""
    torch.manual_seed(3)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches()
    scheduler = OneCycleLR(optimizer, max_lr=0.5, total_steps=epochs * (len(data) // window))
    losses: list[float] = []
    rates: list[float] = []
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(data, start=1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            loss.backward()
            if number % window == 0:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.div_(window)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return losses, rates


@pytest.mark.parametrize("logger_first", [True, False])
def test_losses_and_the_rates_that_were_used_are_written_every_few_iterations(
    tmp_path: Path, logger_first: bool
) -> None:
    handlers: list[Any] = [TensorBoardLogger(tmp_path, every="2it"), LRScheduling(partial(OneCycleLR, max_lr=0.5))]
    engine = engine_of(*(handlers if logger_first else reversed(handlers)))
    engine.run(batches(), max_epochs=2)
    losses, rates = plain_loop(2)
    scalars = read(tmp_path)
    assert set(scalars) == {"train/loss", "lr"}
    assert [step for step, _ in scalars["train/loss"]] == [2, 4, 6, 8, 10, 12]
    assert [value for _, value in scalars["train/loss"]] == float32(losses[1::2])
    assert scalars["lr"] == list(zip(range(2, 13, 2), float32(rates[1::2]), strict=True))
    assert len(set(rates)) > 6


def test_within_a_window_the_rate_is_that_of_the_step_to_come(tmp_path: Path) -> None:
    engine = engine_of(
        TensorBoardLogger(tmp_path, every="1it"),
        LRScheduling(partial(OneCycleLR, max_lr=0.5)),
        GradientAccumulation(3),
    )
    engine.run(batches(), max_epochs=2)
    losses, rates = plain_loop(2, window=3)
    scalars = read(tmp_path)
    assert [value for _, value in scalars["train/loss"]] == float32(losses)
    assert [value for _, value in scalars["lr"]] == float32(rates)


def test_metrics_are_written_as_they_come(tmp_path: Path) -> None:
    model = nn.Linear(5, 2)
    evaluator = evaluator_of(model)
    engine = engine_of(
        TensorBoardLogger(tmp_path, every="100it"),
        Validation(evaluator, batches(2), every="4it", at_start=True),
        Metrics(train_loss=Average()),
        model=model,
    )
    found: Scalars = {"val/loss": [], "train/train_loss": []}

    def note(engine: Engine, name: str) -> None:
        found[f"{'val' if name == 'loss' else 'train'}/{name}"].append(
            (engine.state.iteration, float32([engine.state.metrics[name]])[0])
        )

    engine.connect(Events.EVALUATION_COMPLETED, lambda engine: note(engine, "loss"))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: note(engine, "train_loss"))
    engine.run(batches(), max_epochs=2)
    assert read(tmp_path) == found
    assert [step for step, _ in found["val/loss"]] == [0, 4, 8, 12]
    assert [step for step, _ in found["train/train_loss"]] == [6, 12]


def test_a_run_that_continues_from_a_file_gives_one_clean_curve(tmp_path: Path) -> None:
    def build(log: Path, saved: Path) -> Engine:
        return engine_of(
            TensorBoardLogger(log, every="1it"),
            LRScheduling(partial(ExponentialLR, gamma=0.9)),
            Metrics(train_loss=Average()),
            Checkpoint(saved, every="4it", keep=9),
        )

    whole = build(tmp_path / "whole", tmp_path / "w")
    whole.run(batches(), max_epochs=2)
    first = build(tmp_path / "log", tmp_path / "saved")
    first.run(batches(), max_epochs=1)  # up to iteration 6; the last checkpoint was written at 4
    second = build(tmp_path / "log", tmp_path / "again")
    second.load_state_dict(Checkpoint.load(tmp_path / "saved" / "checkpoint-epoch0001-iter00000004"))
    second.run(batches(), max_epochs=2)
    assert len(list((tmp_path / "log").iterdir())) == 2
    scalars, expected = read(tmp_path / "log"), read(tmp_path / "whole")
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, 13))
    assert scalars == expected


def test_a_run_that_is_called_again_goes_on_with_the_curve(tmp_path: Path) -> None:
    engine = engine_of(TensorBoardLogger(tmp_path, every="2it"), Metrics(train_loss=Average()))
    engine.run(batches(), max_epochs=1)
    engine.run(batches(), max_epochs=2)
    scalars = read(tmp_path)
    assert [step for step, _ in scalars["train/loss"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in scalars["train/train_loss"]] == [6, 12]


def test_an_error_leaves_a_complete_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, every="1it")
    engine = engine_of(logger)

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    engine.connect(Events.ITERATION_STARTED(once=4), fail)
    with pytest.raises(ArithmeticError):
        engine.run(batches(), max_epochs=1)
    assert logger.writer is None
    assert [step for step, _ in read(tmp_path)["train/loss"]] == [1, 2, 3]


def test_the_writer_is_there_for_entries_of_ones_own(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, every="2it")
    engine = engine_of(logger)

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def write(engine: Engine) -> None:
        writer: Any = logger.writer
        writer.add_scalar("mine", 7.0, engine.state.iteration)

    engine.run(batches(), max_epochs=1)
    assert read(tmp_path)["mine"] == [(3, 7.0)]


def test_the_writer_is_there_from_the_first_batch(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, every="100it")
    engine = engine_of(logger)
    there: list[bool] = []
    engine.connect(Events.ITERATION_STARTED(once=1), lambda engine: there.append(logger.writer is not None))
    engine.run(batches(), max_epochs=1)
    assert there == [True]
    assert logger.writer is None


@pytest.mark.filterwarnings("ignore:C08:signalfire.FindingWarning")
def test_groups_and_updates_have_tags_of_their_own(tmp_path: Path) -> None:
    models = {"a": nn.Linear(5, 2), "b": nn.Linear(5, 2)}

    def update(name: str, rates: list[float]) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            return nn.functional.mse_loss(models[name](batch[0]), batch[1])

        def groups(engine: Engine) -> list[dict[str, Any]]:
            return [
                {"params": [parameter], "lr": rate}
                for parameter, rate in zip(models[name].parameters(), rates, strict=False)
            ]

        return Update.from_function(function, partial(torch.optim.SGD, lr=0.1), name=name, parameters=groups)

    engine = Engine([update("a", [0.5]), update("b", [0.25, 0.125])], model=models, seed=0)
    engine.attach(TensorBoardLogger(tmp_path, every="3it"))
    engine.run(batches(), max_epochs=1)
    scalars = read(tmp_path)
    assert {tag for tag in scalars if "loss" in tag} == {"train/loss/a", "train/loss/b"}
    assert {tag: values for tag, values in scalars.items() if tag.startswith("lr")} == {
        "lr/a": [(3, 0.5), (6, 0.5)],
        "lr/b/group0": [(3, 0.25), (6, 0.25)],
        "lr/b/group1": [(3, 0.125), (6, 0.125)],
    }


def test_the_training_is_not_changed(tmp_path: Path) -> None:
    weights = []
    for handlers in ([], [TensorBoardLogger(tmp_path, every="1it")]):
        engine = engine_of(*handlers)
        state = torch.get_rng_state()
        engine.run(batches(), max_epochs=2)
        assert torch.equal(torch.get_rng_state(), state)
        weights.append(engine.model.weight)
    assert torch.equal(weights[0], weights[1])


def test_switched_off_nothing_is_written(tmp_path: Path) -> None:
    engine = engine_of(TensorBoardLogger(tmp_path / "log", every="1it"), Metrics(train_loss=Average()))
    with engine.without("tensorboard"):
        engine.run(batches(), max_epochs=2)
    assert not (tmp_path / "log").exists()


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for every in ("1ep", "5st", "often"):
        with pytest.raises(ValueError, match="TensorBoardLogger"):
            TensorBoardLogger(tmp_path, every=every)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="not a folder"):
        TensorBoardLogger(tmp_path / "file")


def test_an_epochs_end_that_is_emitted_again_is_written_once(tmp_path: Path) -> None:
    def build(saved: Path) -> Engine:
        return engine_of(
            TensorBoardLogger(tmp_path / "log", every="1it"),
            Metrics(train_loss=Average()),
            Checkpoint(saved, every="6it", keep=9),
        )

    build(tmp_path / "saved").run(batches(), max_epochs=1)
    second = build(tmp_path / "again")
    # It was saved after the epoch's last iteration, before the epoch's end was emitted.
    second.load_state_dict(Checkpoint.load(tmp_path / "saved" / "checkpoint-epoch0001-iter00000006"))
    second.run(batches(), max_epochs=2)
    scalars = read(tmp_path / "log")
    assert [step for step, _ in scalars["train/train_loss"]] == [6, 12]
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, 13))


def with_metrics_of_every_kind(folder: Path, every: str) -> Engine:
    model = nn.Linear(5, 2)
    evaluator = evaluator_of(model)
    engine = engine_of(
        TensorBoardLogger(folder, every=every),
        LRScheduling(partial(ExponentialLR, gamma=0.9)),
        GradientAccumulation(2),
        Metrics(train_loss=Average()),
        Validation(evaluator, batches(2), every="4it", prefix="val_", at_start=True),
        model=model,
    )

    @engine.on(Events.ITERATION_COMPLETED(every=3))
    def measure(engine: Engine) -> None:  # new at iteration 3, written at 4
        engine.state.metrics["mine"] = float(engine.state.iteration)

    return engine


def seeded(folder: Path, every: str = "1it") -> Engine:
    torch.manual_seed(3)
    return with_metrics_of_every_kind(folder, every)


@pytest.mark.moderate
@pytest.mark.parametrize("every", quick(["1it", "4it", "100it"], "4it"))
def test_resumed_at_any_moment_no_step_is_lost_or_doubled(tmp_path: Path, every: str) -> None:
    saved: list[bytes] = []

    def save(engine: Engine) -> None:
        buffer = io.BytesIO()
        torch.save(engine.state_dict(), buffer)
        saved.append(buffer.getvalue())

    engine = seeded(tmp_path / "whole", every)
    for event in (Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
        engine.connect(event, save, phase=Phase.PERSIST)
    engine.run(batches(), max_epochs=2)
    expected = read(tmp_path / "whole")
    assert {"val/loss", "train/train_loss", "train/mine"} <= set(expected)
    for moment, file in enumerate(saved[:-1]):
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "whole", folder)  # the stopped run had gone on to the end
        engine = seeded(folder, every)
        engine.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        engine.run(batches(), max_epochs=2)
        assert read(folder) == expected, moment


@pytest.mark.moderate
def test_a_killed_process_and_its_resume_give_one_whole_curve(tmp_path: Path) -> None:
    seeded(tmp_path / "whole").run(batches(), max_epochs=2)
    folder, state = tmp_path / "log", tmp_path / "state.pt"
    process = os.fork()
    if process == 0:
        engine = seeded(folder)
        engine.connect(
            Events.ITERATION_COMPLETED(once=7),
            lambda engine: torch.save(engine.state_dict(), state),
            phase=Phase.PERSIST,
        )
        engine.connect(Events.ITERATION_STARTED(once=9), lambda engine: os.kill(os.getpid(), signal.SIGKILL))
        engine.run(batches(), max_epochs=2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    (file,) = folder.iterdir()
    with open(file, "ab") as torn:
        torn.write(b"\x20\x00\x00")  # killed while a record was written
    engine = seeded(folder)
    engine.load_state_dict(torch.load(state, weights_only=True))
    engine.run(batches(), max_epochs=2)
    assert read(folder) == read(tmp_path / "whole")


def test_a_training_that_begins_anew_takes_the_place_of_the_earlier_curve(tmp_path: Path) -> None:
    seeded(tmp_path).run(batches(), max_epochs=2)
    engine = seeded(tmp_path)
    logger: Any = engine.handlers["tensorboard"]
    engine.connect(Events.STARTED, lambda engine: logger.writer.add_scalar("mine", 1.0, 0), phase=Phase.PERSIST)
    engine.run(batches(), max_epochs=1)
    scalars = read(tmp_path)
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert scalars["mine"] == [(0, 1.0)]


def test_the_loss_of_an_update_that_was_not_made_is_not_written(tmp_path: Path) -> None:
    models = {name: nn.Linear(5, 2) for name in "ab"}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            return nn.functional.mse_loss(models[name](batch[0]), batch[1])

        return Update.from_function(
            function, partial(torch.optim.SGD, lr=0.1), name=name, parameters=lambda engine: models[name].parameters()
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(TensorBoardLogger(tmp_path, every="1it"))

    @engine.on(Events.ITERATION_STARTED)
    def choose(engine: Engine) -> None:
        engine.state.plan = engine.updates if engine.state.iteration % 2 == 0 else engine.updates[:1]

    engine.run(batches(), max_epochs=1)
    assert [step for step, _ in read(tmp_path)["train/loss/b"]] == [2, 4, 6]


def test_steps_are_in_order_though_the_clock_was_set_back_before_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for life, clock in enumerate((1_700_000_000.5, 1_699_999_999.5, 1_600_000_000.0), start=1):
        monkeypatch.setattr("time.time_ns", lambda clock=clock: int(clock * 10**9))
        log = TensorBoardLogger(tmp_path / "log", every="1it")
        engine_of(log, Checkpoint(tmp_path / "run", resume=True)).run(batches(), max_epochs=life)
        assert [step for step, _ in read(tmp_path / "log")["train/loss"]] == list(range(1, 6 * life + 1))


# ---- what is more than a number --------------------------------------------------------------------------------------


def read_all(folder: Path) -> EventAccumulator:
    guidance = {"scalars": 0, "images": 0, "histograms": 0, "compressedHistograms": 0, "tensors": 0}
    return EventAccumulator(str(folder), size_guidance=guidance).Reload()


def contents(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Step and content of everything but scalars, by tag."""
    events = read_all(folder)
    tags: dict[str, Any] = events.Tags()
    found: dict[str, list[tuple[int, Any]]] = {}
    for tag in tags["images"]:
        found[tag] = [(one.step, one.encoded_image_string) for one in events.Images(tag)]
    for tag in tags["histograms"]:
        found[tag] = [(one.step, one.histogram_value) for one in events.Histograms(tag)]
    for tag in tags["tensors"]:
        found[tag] = [(one.step, one.tensor_proto.SerializeToString()) for one in events.Tensors(tag)]
    return found


def shown(folder: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Step and content of everything, by tag, as the server of TensorBoard reads it."""
    events = plugin_event_accumulator.EventAccumulator(
        str(folder), size_guidance={plugin_event_accumulator.TENSORS: 0}
    ).Reload()
    return {
        tag: [(one.step, one.tensor_proto.SerializeToString()) for one in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def showing(folder: Path, *handlers: Any, every: str = "2it") -> Engine:
    """An engine that logs something of each kind at the iterations 3, 6, 9, 12."""
    engine = seeded(folder, every)
    engine.attach(Histograms(every="3it"), *handlers)
    engine.log.hyperparameters(lr=0.1, optimizer={"name": "SGD", "nesterov": False})

    @engine.on(Events.ITERATION_COMPLETED(every=3))
    def show(engine: Engine) -> None:
        iteration = engine.state.iteration
        engine.log.image("samples", torch.full((3, 4, 5), iteration / 20))
        figure = Figure(figsize=(1, 1))
        figure.add_subplot().plot([0, iteration])
        engine.log.figure("curve", figure)
        engine.log.text("notes", f"iteration **{iteration}**")

    return engine


@pytest.mark.moderate
def test_images_figures_texts_and_histograms_are_read_back_as_they_were_logged(tmp_path: Path) -> None:
    engine = showing(tmp_path)
    engine.run(batches(), max_epochs=2)
    found = contents(tmp_path)
    for tag in ("train/samples", "train/curve", "train/notes/text_summary"):
        assert [step for step, _ in found[tag]] == [3, 6, 9, 12]
    for step, content in found["train/samples"]:
        picture = np.asarray(Image.open(io.BytesIO(content)))
        assert picture.shape == (4, 5, 3)
        assert (picture == round(step / 20 * 255)).all()
    curve = np.asarray(Image.open(io.BytesIO(found["train/curve"][0][1])))
    assert curve.shape == (100, 100, 3)
    assert len(np.unique(curve.reshape(-1, 3), axis=0)) > 2
    assert b"iteration **9**" in found["train/notes/text_summary"][2][1]
    (step, histogram) = found["weights/weight"][-1]
    exact = engine.model.weight.detach().double()
    assert step == 12
    assert histogram.num == 10
    assert histogram.sum == pytest.approx(exact.sum().item())
    assert histogram.sum_squares == pytest.approx((exact**2).sum().item())
    assert [one for one, _ in found["gradients/weight"]] == [4, 8, 10]


def test_the_values_of_a_row_are_one_event(tmp_path: Path) -> None:
    engine = engine_of(TensorBoardLogger(tmp_path, every="2it"))

    @engine.on(Events.ITERATION_COMPLETED)
    def log(engine: Engine) -> None:
        for number in range(50):
            engine.log(f"value{number:02}", number / engine.state.iteration)

    engine.run(batches(), max_epochs=1)
    (file,) = os.listdir(tmp_path)
    rows = [
        (one.step, len(one.summary.value)) for one in EventFileLoader(str(tmp_path / file)).Load() if one.summary.value
    ]
    assert rows == [(2, 50), (2, 2), (4, 50), (4, 2), (6, 50), (6, 2)]


@pytest.mark.moderate
def test_hyperparameters_and_the_last_metrics_are_one_session_in_the_same_file(tmp_path: Path) -> None:
    engine = showing(tmp_path / "run")
    engine.run(batches(), max_epochs=2)
    assert len(os.listdir(tmp_path / "run")) == 1
    assert hyperparameters_of(tmp_path) == [
        ({"lr": 0.1, "optimizer/name": "SGD", "optimizer/nesterov": False}, "STATUS_SUCCESS", {
            tag: values[-1][1]
            for tag, values in read(tmp_path / "run").items()
            if tag != "train/mine" and not tag.startswith("lr")
        })
    ]  # fmt: skip


def hyperparameters_of(folder: Path) -> list[tuple[dict[str, Any], str, dict[str, float]]]:
    """The sessions that TensorBoard's HPARAMS tab shows: hyperparameters, status, and the last values of the metrics."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    context = hparams_context.Context(TBContext(data_provider=provider))
    request_context = RequestContext()
    experiment = get_experiment.Handler(request_context, context, "", api_pb2.GetExperimentRequest()).run()
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        aggregation_type=api_pb2.AGGREGATION_AVG,
        allowed_statuses=[
            api_pb2.STATUS_SUCCESS,
            api_pb2.STATUS_UNKNOWN,
            api_pb2.STATUS_RUNNING,
            api_pb2.STATUS_FAILURE,
        ],
        col_params=[{"metric": one.name} for one in experiment.metric_infos],
    )
    groups = list_session_groups.Handler(request_context, context, "", request).run().session_groups
    found = []
    for group in groups:
        (session,) = group.sessions
        values = {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()}
        metrics = {f"{one.name.group}{'/' if one.name.group else ''}{one.name.tag}".removeprefix("./"): one.value
                   for one in session.metric_values}  # fmt: skip
        found.append(
            (
                values,
                api_pb2.Status.Name(session.status),
                {tag.removeprefix("run/"): one for tag, one in metrics.items()},
            )
        )
    return found


@pytest.mark.slow
def test_resumed_at_any_moment_all_that_is_shown_is_there_once(tmp_path: Path) -> None:
    saved: list[bytes] = []

    def save(engine: Engine) -> None:
        buffer = io.BytesIO()
        torch.save(engine.state_dict(), buffer)
        saved.append(buffer.getvalue())

    engine = showing(tmp_path / "whole")
    engine.connect(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, save, phase=Phase.PERSIST)
    engine.run(batches(), max_epochs=2)
    expected = shown(tmp_path / "whole")
    assert {"train/loss", "train/samples", "train/notes/text_summary", "gradients/weight"} <= expected.keys()
    for moment, file in enumerate(saved[:-1]):
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "whole", folder / "run")  # the stopped run had gone on to the end
        engine = showing(folder / "run")
        engine.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        engine.run(batches(), max_epochs=2)
        assert shown(folder / "run") == expected, moment
        assert len(hyperparameters_of(folder)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", range(2, 12, 3))
def test_killed_and_resumed_all_that_is_shown_is_there_once(tmp_path: Path, killed: int) -> None:
    showing(tmp_path / "whole").run(batches(), max_epochs=2)
    folder, saved = tmp_path / "log", tmp_path / "saved"
    process = os.fork()
    if process == 0:
        engine = showing(folder, Checkpoint(saved, every="3it"))
        engine.connect(Events.LOSS_COMPUTED(once=killed), lambda engine: os.kill(os.getpid(), signal.SIGKILL))
        engine.run(batches(), max_epochs=2)
    os.waitpid(process, 0)
    engine = showing(folder, Checkpoint(saved, every="3it", resume=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing was saved before the third iteration
        engine.run(batches(), max_epochs=2)
    assert shown(folder) == shown(tmp_path / "whole")


def test_hyperparameters_that_come_too_late_are_reported(tmp_path: Path) -> None:
    engine = engine_of(TensorBoardLogger(tmp_path))
    engine.log.hyperparameters(lr=0.1)
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.log.hyperparameters(depth=3))
    with pytest.warns(UserWarning, match="shows only the hyperparameters that are logged when a run starts"):
        engine.run(batches(), max_epochs=1)


class Drawing(nn.Module):
    """A model with all that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        output: Tensor = self.last(self.dropout(self.norm(self.first(inputs))))
        return output + 0 * torch.rand(())  # drawn in eval mode as well


@pytest.mark.moderate
def test_the_graph_is_drawn_without_a_trace_in_the_training(tmp_path: Path) -> None:
    digests = []
    for graph in (False, True):
        torch.manual_seed(3)
        engine = engine_of(TensorBoardLogger(tmp_path / str(graph), graph=graph), model=Drawing())
        modes = [(one, one.training) for one in engine.model.modules()]
        engine.run(batches(), max_epochs=2)
        assert [(one, one.training) for one in engine.model.modules()] == modes
        assert not engine.model._forward_pre_hooks
        digests.append((kit.digest(engine.model.state_dict()), torch.get_rng_state().sum().item()))
    assert digests[0] == digests[1]
    assert not read_all(tmp_path / "False").Tags()["graph"]
    nodes = {node.name.split("/")[1] for node in read_all(tmp_path / "True").Graph().node if node.name.count("/") > 1}
    assert {"Linear[first]", "BatchNorm1d[norm]", "Dropout[dropout]", "Linear[last]"} <= nodes


def test_a_graph_that_cannot_be_traced_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    class Branching(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if torch._C._get_tracing_state() is not None:
                raise RuntimeError("not to be traced")
            return super().forward(inputs)

    engine = engine_of(TensorBoardLogger(tmp_path, graph=True), model=Branching(5, 2))
    with pytest.warns(UserWarning, match="could not write the graph of the model: RuntimeError: not to be traced"):
        engine.run(batches(), max_epochs=1)
    assert engine.state.iteration == 6


def test_one_graph_is_drawn_of_one_model(tmp_path: Path) -> None:
    engine = build(nn.ModuleDict({"a": linear(5, 2)}))
    both = Engine(engine.updates[0].spec, model={"a": linear(5, 2), "b": linear(5, 2)})
    with pytest.raises(
        ValueError,
        match="TensorBoard shows only one graph, so graph=True does not work for an engine with several modules",
    ):
        both.attach(TensorBoardLogger(tmp_path, graph=True))
