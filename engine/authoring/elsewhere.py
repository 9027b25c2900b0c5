"""What other engines call things that have another name here: errors about a name that nobody knows say the one that is meant."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ..core.words import did_you_mean

__all__ = [
    "BOUNDS",
    "CLASSES",
    "CONSTRUCTOR",
    "ENGINE",
    "HANDLERS",
    "RUN",
    "install",
    "instead",
    "missing_attribute",
    "misuse",
    "unknown_name",
]

ENGINE = {
    "add_callback": "engine.attach(handler)",
    "add_event_handler": "engine.connect(event, function), or @engine.on(event)",
    "add_handler": "engine.attach(handler)",
    "callback_metrics": "engine.state.metrics",
    "callbacks": "engine.handlers",
    "compile": "engine.attach(Compile())",
    "cpu": 'engine.attach(DeviceTransfer("cpu"))',
    "cuda": 'engine.attach(DeviceTransfer("cuda"))',
    "current_epoch": "engine.state.epoch",
    "epoch": "engine.state.epoch",
    "fire_event": "engine.fire(event)",
    "fit": "engine.run(data, max_epochs=...)",
    "freeze": "engine.attach(Freezing(parts))",
    "global_rank": "engine.processes.rank",
    "global_step": "engine.state.iteration, or engine.updates[0].steps",
    "has_event_handler": "engine.has(function, event)",
    "is_global_zero": "engine.processes.rank == 0",
    "iteration": "engine.state.iteration",
    "load": "engine.attach(Checkpoint(folder, resume=True)), or engine.load_weights(path)",
    "load_checkpoint": "engine.attach(Checkpoint(folder, resume=True)), or engine.load_weights(path)",
    "local_rank": "engine.processes.local_rank",
    "log_dict": "engine.log({name: value})",
    "logger": "engine[CSVLogger], once one is attached",
    "loggers": "engine.handlers",
    "logged_metrics": "engine.state.metrics",
    "lr_find": "find_learning_rate, in signalfire.tuning",
    "max_epochs": "engine.state.max_epochs",
    "metrics": "engine.state.metrics",
    "optimizers": "engine.optimizer, or engine.updates",
    "predict": "engine.attach(Predictions())",
    "remove_event_handler": "engine.detach(function)",
    "remove_handler": "engine.detach(handler)",
    "resume": "engine.attach(Checkpoint(folder, resume=True))",
    "save": "engine.attach(Checkpoint(folder)), or torch.save(engine.state_dict(), path)",
    "save_checkpoint": "engine.attach(Checkpoint(folder)), or torch.save(engine.state_dict(), path)",
    "save_model": "engine.attach(Checkpoint(folder, weights_only=True)), or engine.weights()",
    "should_stop": "engine.terminate(reason)",
    "step": "engine.updates[0].steps",
    "stop": "engine.terminate(reason)",
    "to": "engine.attach(DeviceTransfer(device))",
    "train": "engine.run(data, max_epochs=...)",
    "tune": "find_learning_rate or find_batch_size, in signalfire.tuning",
    "validate": "engine.attach(Validation(data)), or engine.test(data)",
    "world_size": "engine.processes.world_size",
}
"""Attributes of an engine."""

RUN = {
    "accelerator": "attach DeviceTransfer(device)",
    "batch_size": "set it in your DataLoader",
    "callbacks": "attach the handlers: engine.attach(...)",
    "accumulate_grad_batches": "attach GradientAccumulation(steps)",
    "check_val_every_n_epoch": 'attach Validation(data, every="2ep")',
    "ckpt_path": "attach Checkpoint(folder, resume=True)",
    "dataloader": "pass the data as the first argument: run(data, ...)",
    "epochs": "write max_epochs=",
    "device": "attach DeviceTransfer(device)",
    "devices": "attach DistributedDataParallel()",
    "fast_dev_run": "attach FastDevRun()",
    "gradient_accumulation_steps": "attach GradientAccumulation(steps)",
    "gradient_clip_val": "attach GradientClipping(max_norm)",
    "iterations": "write max_iters=",
    "limit_train_batches": "attach LimitBatches(...), or write epoch_length=",
    "limit_val_batches": "attach LimitBatches(...)",
    "loader": "pass the data as the first argument: run(data, ...)",
    "logger": "attach a logger, such as CSVLogger(path)",
    "max_grad_norm": "attach GradientClipping(max_norm)",
    "max_iterations": "write max_iters=",
    "max_steps_per_epoch": "write epoch_length=",
    "n_epochs": "write max_epochs=",
    "num_epochs": "write max_epochs=",
    "num_steps": "write max_steps=",
    "num_train_epochs": "write max_epochs=",
    "overfit_batches": "attach OverfitBatches(...)",
    "precision": "attach MixedPrecision(), or TruePrecision()",
    "resume": "attach Checkpoint(folder, resume=True)",
    "resume_from_checkpoint": "attach Checkpoint(folder, resume=True)",
    "steps": "write max_steps=",
    "strategy": "attach DistributedDataParallel(), or FullyShardedDataParallel()",
    "steps_per_epoch": "write epoch_length=",
    "train_dataloader": "pass the data as the first argument: run(data, ...)",
    "train_dataloaders": "pass the data as the first argument: run(data, ...)",
    "train_loader": "pass the data as the first argument: run(data, ...)",
    "val_check_interval": 'attach Validation(data, every="0.5ep")',
    "val_data": "attach Validation(data)",
    "val_dataloader": "attach Validation(data)",
    "val_dataloaders": "attach Validation(data)",
    "val_loader": "attach Validation(data)",
    "validation_data": "attach Validation(data)",
    "verbose": "attach ProgressBar()",
}
"""Arguments of `Engine.run`."""

CONSTRUCTOR = {
    "accelerator": "attach DeviceTransfer(device)",
    "callbacks": "attach the handlers: engine.attach(...)",
    "criterion": "pass it to the update: Update.supervised(loss, optimizer)",
    "data": "pass the data to run: engine.run(data, ...)",
    "device": "attach DeviceTransfer(device)",
    "gradient_clip_val": "attach GradientClipping(max_norm)",
    "handlers": "attach the handlers: engine.attach(...)",
    "logger": "attach a logger, such as CSVLogger(path)",
    "loss": "pass it to the update: Update.supervised(loss, optimizer)",
    "loss_fn": "pass it to the update: Update.supervised(loss, optimizer)",
    "lr": "pass it to the update: Update.supervised(loss, optimizer, lr=...)",
    "module": "write model=",
    "net": "write model=",
    "network": "write model=",
    "optimizer": "pass it to the update: Update.supervised(loss, optimizer)",
    "optimizers": "pass it to the update: Update.supervised(loss, optimizer)",
    "precision": "attach MixedPrecision(), or TruePrecision()",
    "random_state": "write seed=",
    "train": "write training=",
    "updates": "write update=",
}
"""Arguments of `Engine`; those of `Engine.run` are known from there."""

CLASSES = {
    "Callback": "Handler",
    "CheckpointCallback": "Checkpoint",
    "create_supervised_trainer": "Engine(Update.supervised(loss, optimizer), model=model)",
    "Learner": "Engine",
    "LightningModule": "Update",
    "Trainer": "Engine",
    "TrainerCallback": "Handler",
    "manual_seed": "seed_everything",
    "set_seed": "seed_everything",
    "TrainingArguments": "arguments of engine.run(data, max_epochs=...), and handlers",
}
"""Classes and functions of the package."""

BOUNDS = ("max_epochs", "max_iters", "max_steps", "max_time", "min_epochs", "min_iters", "epoch_length")
"""The bounds of `Engine.run`, which `Engine.check` takes, too."""

HANDLERS = {
    "AMP": "MixedPrecision",
    "BackboneFinetuning": "Freezing",
    "create_supervised_evaluator": "Validation",
    "DDP": "DistributedDataParallel",
    "DeviceStatsMonitor": "DeviceStatistics",
    "EarlyStoppingCallback": "EarlyStopping",
    "EMAHandler": "EMA",
    "ExponentialMovingAverage": "EMA",
    "FSDP": "FullyShardedDataParallel",
    "GradientAccumulationScheduler": "GradientAccumulation",
    "GradientClip": "GradientClipping",
    "LRScheduler": "LRScheduling",
    "LearningRateMonitor": "a logger such as CSVLogger, which writes the learning rates",
    "LearningRateScheduler": "LRScheduling",
    "ModelCheckpoint": "Checkpoint",
    "ModelEMA": "EMA",
    "Precision": "MixedPrecision, or TruePrecision",
    "ReduceLROnPlateau": "LRScheduling, with torch's ReduceLROnPlateau",
    "RichProgressBar": "ProgressBar",
    "StochasticWeightAveraging": "SWA",
    "TQDMProgressBar": "ProgressBar",
    "TensorBoard": "TensorBoardLogger",
    "TerminateOnNaN": "NonFiniteGuard",
    "TerminateOnNan": "NonFiniteGuard",
    "Timer": "run(..., max_time=)",
    "WandbCallback": "WandbLogger",
}
"""Classes of handlers."""


def misuse(call: str, unnamed: Sequence[Any], unknown: Iterable[str], own: Iterable[str]) -> str:
    """The error about arguments that a run, its check or an engine does not take.

    Args:
        call: What was called.
        unnamed: Positional arguments after those that it takes.
        unknown: Names of keyword arguments.
        own: Those that it takes.

    Example:
        >>> misuse("run()", [], ["epochs"], [])
        "run() got an unexpected keyword argument 'epochs'; write max_epochs="
    """
    if unnamed and isinstance(unnamed[0], int | float):
        return f"{call} takes only the data by position; pass the bound by keyword, such as max_epochs={unnamed[0]}"
    if unnamed:
        return f"{call} takes only the training data by position; to evaluate on other data, attach Validation(data)"
    name = next(iter(unknown))
    table = CONSTRUCTOR if call == "Engine()" else RUN
    hint = f"; {table[name]}" if name in table else did_you_mean(name, own)
    if call == "Engine()" and (name in RUN or name in BOUNDS) and name not in table:
        hint = f"; it is an argument of run: {RUN.get(name, f'engine.run(data, {name}=...)')}"
    return f"{call} got an unexpected keyword argument {name!r}{hint}"


_PACKAGES = ("signalfire", "signalfire.handlers", "signalfire.authoring")


def unknown_name(package: str, name: str) -> str:
    """The end of an error about a name that a package does not have: what it is called here, and which package has it.

    Example:
        >>> unknown_name("signalfire", "Checkpoint")
        '; it is in signalfire.handlers'
        >>> unknown_name("signalfire", "ModelCheckpoint")
        '; use Checkpoint, in signalfire.handlers'
    """
    if name.startswith("_"):
        return ""
    # Imported by name: a room knows nothing of those above it, but for the words of an error.
    names: dict[str, Sequence[str]] = {one: import_module(one).__all__ for one in (package, *_PACKAGES)}
    for place, there in names.items():
        if name in there:
            return f"; it is in {place}" if place != package else ""
    if name in CLASSES | HANDLERS:
        return _other_name(package, name, names)
    for place, there in names.items():
        if meant := did_you_mean(name, there):
            return meant if place == package else f"{meant} It is in {place}"
    return ""


def _other_name(package: str, name: str, names: dict[str, Sequence[str]]) -> str:
    new = (CLASSES | HANDLERS)[name].split(",")[0]
    place = next((place for place, there in names.items() if new in there), package)
    return instead(name, CLASSES | HANDLERS) + (f", in {place}" if place != package else "")


def missing_attribute(package: str, name: str) -> AttributeError:
    """The error about a name that a package does not have; given the name, Python adds no suggestion of its own."""
    hint = f"; it is a module: import {package}.{name}" if _is_module(package, name) else unknown_name(package, name)
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name)


def _is_module(package: str, name: str) -> bool:
    with suppress(ImportError):  # of the finder below
        return not name.startswith("_") and find_spec(f"{package}.{name}") is not None
    return False


class _Names(MetaPathFinder):
    """Asked for what no other finder has found, as by ``from signalfire import Trainer``: the error says the name here.

    It is raised from here since Python replaces an AttributeError of the module by an ImportError of its own.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package in _PACKAGES and (hint := unknown_name(package, name)):
            raise ImportError(f"cannot import name {name!r} from {package!r}{hint}", name=fullname)
        return None


def install() -> None:
    """Have imports of unknown names say what is meant."""
    if not any(type(finder).__qualname__ == _Names.__qualname__ for finder in sys.meta_path):
        sys.meta_path.append(_Names())


def instead(name: str, table: dict[str, str]) -> str:
    """The end of an error about a name of another engine; empty for other names.

    Example:
        >>> instead("fit", ENGINE)
        '; use engine.run(data, max_epochs=...)'
    """
    return f"; use {table[name]}" if name in table else ""
