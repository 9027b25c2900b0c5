"""What other engines call things that have another name here: errors about a name that nobody knows say the one that is meant."""

from __future__ import annotations

__all__ = ["ENGINE", "HANDLERS", "RUN", "instead"]

ENGINE = {
    "add_callback": "engine.attach(handler)",
    "add_event_handler": "engine.connect(event, function), or @engine.on(event)",
    "add_handler": "engine.attach(handler)",
    "callback_metrics": "engine.state.metrics",
    "callbacks": "engine.handlers",
    "current_epoch": "engine.state.epoch",
    "epoch": "engine.state.epoch",
    "fit": "engine.run(data, max_epochs=...)",
    "global_step": "engine.state.iteration, or engine.updates[0].steps",
    "iteration": "engine.state.iteration",
    "log_dict": "engine.log({name: value})",
    "logged_metrics": "engine.state.metrics",
    "metrics": "engine.state.metrics",
    "optimizers": "engine.optimizer, or engine.updates",
    "predict": "engine.attach(Predictions())",
    "save_checkpoint": "engine.attach(Checkpoint(folder)), or torch.save(engine.state_dict(), path)",
    "save_model": "engine.attach(Checkpoint(folder, weights_only=True)), or engine.weights()",
    "should_stop": "engine.terminate(reason)",
    "step": "engine.updates[0].steps",
    "stop": "engine.terminate(reason)",
    "train": "engine.run(data, max_epochs=...)",
    "validate": "engine.attach(Validation(data)), or engine.test(data)",
}
"""Attributes of an engine."""

RUN = {
    "accelerator": "attach DeviceTransfer(device)",
    "callbacks": "attach the handlers: engine.attach(...)",
    "ckpt_path": "attach Checkpoint(folder, resume=True)",
    "dataloader": "give the data first: run(data, ...)",
    "epochs": "write max_epochs=",
    "iterations": "write max_iters=",
    "loader": "give the data first: run(data, ...)",
    "max_iterations": "write max_iters=",
    "max_steps_per_epoch": "write epoch_length=",
    "n_epochs": "write max_epochs=",
    "num_epochs": "write max_epochs=",
    "num_steps": "write max_steps=",
    "num_train_epochs": "write max_epochs=",
    "resume_from_checkpoint": "attach Checkpoint(folder, resume=True)",
    "steps": "write max_steps=",
    "steps_per_epoch": "write epoch_length=",
    "train_dataloader": "give the data first: run(data, ...)",
    "train_dataloaders": "give the data first: run(data, ...)",
    "train_loader": "give the data first: run(data, ...)",
    "val_data": "attach Validation(data)",
    "val_dataloader": "attach Validation(data)",
    "val_dataloaders": "attach Validation(data)",
    "val_loader": "attach Validation(data)",
    "validation_data": "attach Validation(data)",
}
"""Arguments of `Engine.run`."""

HANDLERS = {
    "AMP": "MixedPrecision",
    "BackboneFinetuning": "Freezing",
    "DDP": "DistributedDataParallel",
    "DeviceStatsMonitor": "DeviceStatistics",
    "ExponentialMovingAverage": "EMA",
    "FSDP": "FullyShardedDataParallel",
    "GradientAccumulationScheduler": "GradientAccumulation",
    "GradientClip": "GradientClipping",
    "LRScheduler": "LRScheduling",
    "LearningRateMonitor": "a logger such as CSVLogger, which writes the rates",
    "LearningRateScheduler": "LRScheduling",
    "ModelCheckpoint": "Checkpoint",
    "ReduceLROnPlateau": "LRScheduling, with torch's ReduceLROnPlateau",
    "RichProgressBar": "ProgressBar",
    "StochasticWeightAveraging": "SWA",
    "TQDMProgressBar": "ProgressBar",
    "TensorBoard": "TensorBoardLogger",
    "TerminateOnNaN": "NonFiniteGuard",
    "TerminateOnNan": "NonFiniteGuard",
    "Timer": "run(..., max_time=)",
}
"""Classes of handlers."""


def instead(name: str, table: dict[str, str]) -> str:
    """The end of an error about a name of another engine; empty for other names.

    Example:
        >>> instead("fit", ENGINE)
        '; here it is engine.run(data, max_epochs=...)'
    """
    return f"; here it is {table[name]}" if name in table else ""
