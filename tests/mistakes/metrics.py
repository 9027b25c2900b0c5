"""Metrics that are not what they seem, and monitors and logs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, mse_loss

from signalfire import Engine, Events, Findings, Update
from signalfire.handlers import (
    Accuracy,
    Average,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    Metrics,
    ProgressBar,
    TensorBoardLogger,
    Validation,
)
from tests.kit import SGD, batches, build, evaluator_of, mlp
from tests.mistakes.registry import mistake, said


def classifier(*handlers: Any, classes: int = 3) -> Engine:
    return build(mlp(5, 8, classes), *handlers, loss=cross_entropy)


CLASSES = batches(4, 5, (), classes=3)


@mistake("W01")
def an_accuracy_that_is_minimized(right: bool, folder: Path) -> None:
    monitored = Checkpoint(folder, monitor="accuracy", mode=None if right else "min")
    classifier(Metrics(accuracy=Accuracy()), monitored).run(CLASSES, max_epochs=1)


@mistake(ValueError, "it is not known whether smaller or greater values are better")
def a_metric_whose_direction_nobody_knows(right: bool) -> None:
    own = Metrics(margin=Average(lambda output, batch: output.max()))
    classifier(own, EarlyStopping("margin", mode="max" if right else None)).run(CLASSES, max_epochs=1)


@mistake("W02")
def a_monitored_metric_that_is_nan(right: bool, folder: Path) -> None:
    engine = build(mlp(5, 8, 1), Checkpoint(folder, monitor="score", mode="max"))
    engine.connect(
        Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=1.0 if right else float("nan"))
    )
    engine.run(batches(), max_epochs=2)


class Bag:
    """A batch of a class that says neither how many samples it has, nor what is in it."""

    def __init__(self, batch: Any) -> None:
        self.inputs, self.targets = batch


@mistake("W03")
def a_batch_whose_samples_nobody_can_count(right: bool) -> None:
    update = Update(
        lambda engine, bag: engine.model(bag.inputs),
        lambda engine, output, bag: mse_loss(output, bag.targets),
        SGD,
        samples=(lambda bag: len(bag.inputs)) if right else None,
    )
    engine = Engine(update, model=mlp(5, 8, 1))
    engine.attach(Metrics(loss=Average()))
    engine.run([Bag(batch) for batch in batches([4, 4, 2])], max_epochs=1)


@mistake("W04")
def a_count_in_place_of_a_mean(right: bool) -> None:
    def in_range(output: Any, batch: Any) -> Any:
        hits = output.argmax(1) < 3
        return hits.float().mean() if right else hits.sum()

    classifier(Metrics(accuracy=Average(in_range))).run(CLASSES, max_epochs=2)


@mistake("W05")
def a_threshold_for_probabilities_on_logits(right: bool) -> None:
    model = mlp(5, 8, 1)
    with torch.no_grad():
        next(model.parameters()).mul_(20)
    data = [(x, (y > 0).float()) for x, y in batches(4)]
    accuracy = Accuracy(threshold=0.0 if right else 0.5)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    build(model, Metrics(accuracy=accuracy), loss=loss).run(data, max_epochs=1)


@mistake("W06")
def a_training_loss_that_is_monitored_beside_a_validation(right: bool) -> Findings:
    model = mlp(5, 8, 1)
    stopping = EarlyStopping("val_loss" if right else "loss")
    engine = build(
        model, Metrics(loss=Average()), Validation(evaluator_of(model), batches(2, seed=1), prefix="val_"), stopping
    )
    engine.run(batches(), max_epochs=2)
    return engine.findings.of_run()


@said("W06: Checkpoint monitors 'distance', which is measured on the training data; monitor 'val_loss'")
def a_best_checkpoint_by_the_training_loss(right: bool, folder: Path) -> None:
    model = mlp(5, 8, 1)
    best = Checkpoint(folder, monitor="val_loss" if right else "distance", mode="min")
    validation = Validation(evaluator_of(model), batches(2, seed=1), prefix="val_")
    build(model, Metrics(distance=Average()), validation, best).run(batches(), max_epochs=2)


@mistake("W01")
def a_stop_at_the_smallest_score_of_a_function(right: bool) -> None:
    engine = build(mlp(5, 8, 1), EarlyStopping("val_accuracy", mode="max" if right else "min", patience=9))
    engine.connect(
        Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(val_accuracy=1 - 0.5**engine.state.epoch)
    )
    engine.run(batches(), max_epochs=2)


@mistake("W07")
def a_patience_longer_than_the_run(right: bool) -> Findings:
    engine = build(mlp(5, 8, 1), Metrics(loss=Average()), EarlyStopping("loss", patience=1 if right else 10))
    engine.run(batches(), max_epochs=4)
    return engine.findings.of_run()


@mistake(KeyError, "did you mean 'accuracy'")
def a_misspelt_monitor(right: bool) -> None:
    classifier(Metrics(accuracy=Accuracy()), EarlyStopping("accuracy" if right else "acuracy")).run(
        CLASSES, max_epochs=1
    )


@mistake("W61")
def a_misspelt_metric_in_the_bar(right: bool) -> None:
    with open("/dev/null", "w") as file:
        engine = build(mlp(5, 8, 1), ProgressBar(["score" if right else "scor"], file=file))
        engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=1.0))
        engine.run(batches(), max_epochs=2)


@mistake("W62")
def a_logger_on_the_evaluator(right: bool, folder: Path) -> None:
    model = mlp(5, 8, 1)
    evaluator = evaluator_of(model)
    engine = build(model, Validation(evaluator, batches(2, seed=1)))
    (engine if right else evaluator).attach(CSVLogger(folder / "log.csv"))
    engine.run(batches(), max_epochs=2)


@mistake("W63")
def a_log_whose_interval_is_longer_than_the_run(right: bool, folder: Path) -> Findings:
    engine = build(mlp(5, 8, 1), TensorBoardLogger(folder, every="1it" if right else "500it"))
    engine.run(batches(), max_epochs=1)
    return engine.findings.of_run()


@mistake("W08")
def a_min_delta_in_percent(right: bool) -> None:
    engine = build(mlp(5, 8, 1), EarlyStopping("share", mode="max", patience=2, min_delta=0.01 if right else 1.0))
    engine.connect(
        Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(share=1 - 0.5**engine.state.epoch)
    )
    engine.run(batches(8), max_epochs=4)


@mistake("W39")
def an_image_that_no_logger_writes(right: bool, folder: Path) -> None:
    engine = build(mlp(5, 8, 1), (TensorBoardLogger if right else CSVLogger)(folder / "log"))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.log.image("samples", torch.zeros(2, 2)))
    engine.run(batches(), max_epochs=1)


@mistake("W39")
def hyperparameters_that_no_logger_writes(right: bool, folder: Path) -> None:
    engine = build(mlp(5, 8, 1), (TensorBoardLogger if right else CSVLogger)(folder / "log"))
    engine.log.hyperparameters(lr=0.1)
    engine.run(batches(), max_epochs=1)


@mistake("W39")
def hyperparameters_of_a_run_that_no_logger_writes(right: bool, folder: Path) -> None:
    engine = build(mlp(5, 8, 1), (TensorBoardLogger if right else CSVLogger)(folder / "log"))
    engine.connect(Events.EPOCH_STARTED, lambda engine: engine.log.hyperparameters(lr=0.1))
    engine.run(batches(), max_epochs=1)


@mistake("W40")
def a_histogram_of_values_of_which_one_is_not_a_number(right: bool, folder: Path) -> None:
    engine = build(mlp(5, 8, 1), TensorBoardLogger(folder))
    values = torch.tensor([1.0, 0.0 if right else float("nan")])
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.log.histogram("ratio", values))
    engine.run(batches(), max_epochs=1)
