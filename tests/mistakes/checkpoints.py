"""Checkpoints and resuming: other compositions than those that saved, states that do not fit, folders that are none."""

from __future__ import annotations

from contextlib import nullcontext, redirect_stderr
from copy import deepcopy
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Findings, Handler, Phase, Update, allow, on
from signalfire.handlers import (
    EMA,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    MixedPrecision,
)
from tests.kit import batches, mlp
from tests.mistakes.registry import comes_right, mistake, said


def engine_of(*handlers: Any, lr: float = 0.1, optimizer: Any = SGD, hidden: int = 8) -> Engine:
    engine = Engine(Update.supervised(mse_loss, partial(optimizer, lr=lr)), model=mlp(5, hidden, 1))
    engine.attach(*handlers)
    return engine


def saved(*handlers: Any) -> dict[str, Any]:
    engine = engine_of(*handlers)
    engine.run(batches(4), max_epochs=1)
    return engine.state_dict()


def resumed(engine: Engine, state: dict[str, Any], **options: Any) -> Engine:
    engine.load_state_dict(state, **options)
    engine.run(batches(4), max_epochs=2)
    return engine


@mistake("W31")
def an_old_folder_from_which_a_new_experiment_goes_on(right: bool, folder: Path) -> Findings:
    engine_of(Checkpoint(folder / "one")).run(batches(4), max_epochs=1)
    engine = engine_of(Checkpoint(folder / ("two" if right else "one"), resume=True))
    engine.run(batches(4), max_epochs=2)
    return engine.findings.of_run()


@mistake("W32")
def a_resume_with_another_learning_rate(right: bool) -> None:
    resumed(engine_of(lr=0.1 if right else 0.5), saved())


@mistake("W32")
def a_resume_without_the_clipping(right: bool) -> None:
    resumed(engine_of(*[GradientClipping(max_norm=1.0)] * right), saved(GradientClipping(max_norm=1.0)))


@mistake("W32")
def a_resume_with_a_longer_accumulation_window(right: bool) -> None:
    resumed(engine_of(GradientAccumulation(2 if right else 4)), saved(GradientAccumulation(2)))


@mistake("W32")
def a_resume_with_another_decay_of_the_rate(right: bool) -> None:
    def handler(gamma: float) -> LRScheduling:
        return LRScheduling(partial(ExponentialLR, gamma=gamma))

    resumed(engine_of(handler(0.9 if right else 0.5)), saved(handler(0.9)))


@mistake("W32")
def a_resume_without_the_precision_of_the_run(right: bool) -> None:
    resumed(engine_of(*[MixedPrecision("bf16")] * right), saved(MixedPrecision("bf16")))


@mistake("W32")
def a_resume_in_double_precision(right: bool) -> None:
    engine = engine_of()
    state = saved()
    data = batches(4)
    if not right:
        engine.model.double()
        data = [(one.double(), other.double()) for one, other in data]
    engine.load_state_dict(state)
    engine.run(data, max_epochs=2)


@mistake("W32")
def a_resume_after_layers_were_frozen(right: bool) -> None:
    engine = engine_of()
    engine.model[0].requires_grad_(right)
    with allow("C09"):
        resumed(engine, saved())


@mistake("W32")
def a_resume_with_another_seed(right: bool) -> None:
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=mlp(5, 8, 1), seed=0)
    engine.run(batches(4), max_epochs=1)
    other = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=mlp(5, 8, 1), seed=0 if right else 1)
    resumed(other, engine.state_dict())


@mistake("W32")
def a_resume_without_shuffling(right: bool) -> None:
    def loader(shuffle: bool) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(16, 5), torch.randn(16, 1)), 4, shuffle=shuffle)

    engine = engine_of()
    engine.run(loader(True), max_epochs=1)
    other = engine_of()
    other.load_state_dict(engine.state_dict())
    other.run(loader(right), max_epochs=2)


@mistake("W32")
def a_resume_in_the_folder_of_an_experiment_with_other_hyperparameters(right: bool, folder: Path) -> None:
    engine_of(Checkpoint(folder, hyperparameters={"width": 8})).run(batches(4), max_epochs=1)
    options = {"width": 8 if right else 16}
    engine_of(Checkpoint(folder, hyperparameters=options, resume=True)).run(batches(4), max_epochs=2)


@mistake("W34")
def a_log_that_was_left_behind(right: bool, folder: Path) -> None:
    state = saved(CSVLogger(folder / "log.csv", every="1it"))
    resumed(engine_of(CSVLogger(folder / ("log.csv" if right else "new.csv"), every="1it")), state)


@mistake("W35")
def weights_that_are_loaded_after_the_state(right: bool) -> None:
    engine = engine_of()
    pretrained = mlp(5, 8, 1).state_dict()
    if right:
        engine.model.load_state_dict(pretrained)
    engine.load_state_dict(saved())
    if not right:
        engine.model.load_state_dict(pretrained)
    engine.run(batches(4), max_epochs=2)


@comes_right
def a_state_that_is_kept_while_the_training_goes_on(right: bool) -> Any:
    engine = engine_of()
    engine.run(batches(4), max_epochs=1)
    state = engine.state_dict()
    state = deepcopy(state) if right else state
    engine.run(batches(4), max_epochs=2)
    return str(state["modules"])


@comes_right
def the_whole_state_in_place_of_the_weights(right: bool) -> Any:
    engine = engine_of()
    state = saved()
    engine.load_weights(state["modules"] if right else state)
    return str(engine.weights())


@mistake(ValueError, "a directory|state of a Signalfire engine")
def a_path_in_place_of_the_state(right: bool, folder: Path) -> None:
    engine_of(Checkpoint(folder)).run(batches(4), max_epochs=1)
    engine = engine_of(Checkpoint(folder))
    engine.load_state_dict(Checkpoint.load(folder) if right else folder)  # type: ignore[arg-type]
    engine.run(batches(4), max_epochs=2)


@mistake(TypeError, "neither copied nor pickled")
def the_engine_itself_in_a_file(right: bool, folder: Path) -> None:
    torch.save(engine_of().state_dict() if right else engine_of(), folder / "engine.pt")


@mistake("W33")
def a_link_to_an_archive_that_was_moved(right: bool, folder: Path) -> None:
    if not right:
        (folder / "checkpoint-best").symlink_to(folder / "archive" / "gone")
    engine_of(Checkpoint(folder)).run(batches(4), max_epochs=1)


@mistake(ValueError, r"\[8, 5\] in the state, \[16, 5\] in the model")
def a_state_of_a_smaller_model(right: bool) -> None:
    resumed(engine_of(hidden=8 if right else 16), saved())


@mistake(ValueError, "used the optimizer SGD, but now uses Adam")
def a_state_of_another_optimizer(right: bool) -> None:
    resumed(engine_of(optimizer=SGD if right else Adam), saved())


@mistake(ValueError, r"load_state_dict\(state, allow=\['ema'\]\)")
def a_handler_with_a_state_that_was_added_since(right: bool) -> None:
    resumed(engine_of(EMA(0.5)), saved(), **({"allow": ["ema"]} if right else {}))


@mistake(ValueError, "expected the state of a Signalfire engine")
def the_weights_in_place_of_the_state(right: bool) -> None:
    engine = engine_of()
    engine.run(batches(4), max_epochs=1)
    resumed(engine_of(), engine.state_dict() if right else engine.weights())


@mistake(ValueError, "resume=True, weights_only=True")
def weights_only_checkpoints_to_resume_from(right: bool, folder: Path) -> None:
    engine_of(Checkpoint(folder, weights_only=not right, resume=True)).run(batches(4), max_epochs=1)


@mistake(ValueError, "s3://")
def a_bucket_in_place_of_a_folder(right: bool, folder: Path) -> None:
    engine_of(Checkpoint(folder if right else "s3://bucket/run")).run(batches(4), max_epochs=1)


@mistake(NotADirectoryError, "not a folder")
def a_file_in_place_of_a_folder(right: bool, folder: Path) -> None:
    (folder / "model.pt").write_text("")
    engine_of(Checkpoint(folder if right else folder / "model.pt")).run(batches(4), max_epochs=1)


@mistake(UserWarning, "nothing to do")
def a_finished_run_that_is_resumed(right: bool) -> None:
    engine = engine_of()
    engine.load_state_dict(saved())
    engine.run(batches(4), max_epochs=2 if right else 1)


@mistake(FileNotFoundError, "no ")
def a_folder_without_a_checkpoint(right: bool, folder: Path) -> None:
    if right:
        engine_of(Checkpoint(folder)).run(batches(4), max_epochs=1)
    Checkpoint.load(folder)


@mistake("C10")
def two_checkpoints_with_one_folder_and_one_name(right: bool, folder: Path) -> None:
    other = folder / "other" if right else folder
    one = Checkpoint(folder, filename="model", name="one", keep=1)
    engine_of(one, Checkpoint(other, filename="model", name="two", keep=1)).run(batches(4), max_epochs=1)


@said("contains 1 checkpoint from an earlier run; the newest is 'checkpoint-epoch0001-iter00000004'.*starts at epoch 1")
def a_second_run_in_the_folder_of_the_first(right: bool, folder: Path) -> None:
    engine_of(Checkpoint(folder / "one")).run(batches(4), max_epochs=1)
    engine_of(Checkpoint(folder / ("two" if right else "one"))).run(batches(4), max_epochs=1)


@said("no checkpoint to resume from in '.*digts', so the run starts at epoch 1; checkpoints were found in '.*digits'")
def a_misspelt_folder_to_resume_from(right: bool, folder: Path) -> None:
    engine_of(Checkpoint(folder / "digits")).run(batches(4), max_epochs=1)
    with redirect_stderr(StringIO()) if right else nullcontext():  # where it resumes from
        engine_of(Checkpoint(folder / ("digits" if right else "digts"), resume=True)).run(batches(4), max_epochs=2)


@said("the folder contains checkpoints of handlers named 'last'; to resume from one of these checkpoints, pass the")
def a_handler_of_another_name_to_resume_from(right: bool, folder: Path) -> None:
    engine_of(Checkpoint(folder, name="last")).run(batches(4), max_epochs=1)
    with redirect_stderr(StringIO()) if right else nullcontext():  # where it resumes from
        engine_of(Checkpoint(folder, name="last" if right else "newest", resume=True)).run(batches(4), max_epochs=2)


@said("received a whole state .epoch 1, iteration 4., but loaded only its weights")
def the_weights_of_a_state_that_was_to_be_resumed(right: bool) -> None:
    engine, state = engine_of(), saved()
    engine.load_state_dict(state) if right else engine.load_weights(state)
    engine.run(batches(4), max_epochs=2)


class Counting(Handler):
    """Ends the run after some iterations."""

    def __init__(self) -> None:
        self.count = 0

    @on(Events.ITERATION_COMPLETED)
    def stop(self, engine: Engine) -> None:
        self.count += 1
        if self.count == 7:
            engine.terminate("enough", by=self.name)


class SavedCounting(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


@mistake("W47")
def a_handler_that_counts_and_saves_nothing(right: bool, folder: Path) -> None:
    engine_of(Checkpoint(folder), SavedCounting() if right else Counting()).run(batches(4), max_epochs=2)


def scored(engine: Engine, phase: Phase) -> Engine:
    """Writes a score after each epoch."""
    engine.state.metrics.announce("user", ["score"])
    engine.connect(
        Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=engine.state.epoch), phase=phase
    )
    return engine


@mistake("W41")
def the_best_checkpoint_by_a_score_that_is_written_too_late(right: bool, folder: Path) -> None:
    engine = engine_of(Checkpoint(folder, monitor="score", mode="max"))
    scored(engine, Phase.CHANGE if right else Phase.PERSIST).run(batches(4), max_epochs=2)


@mistake("W41")
def a_stop_by_a_score_of_a_function_that_was_connected_later(right: bool) -> None:
    engine = engine_of(EarlyStopping("score", mode="max", patience=1))
    scored(engine, Phase.PREPARE if right else Phase.CONTROL).run(batches(4), max_epochs=2)
