"""An exact resume for Lightning's Trainer; importing this module imports Lightning."""

from __future__ import annotations

from math import inf
from typing import Any

from lightning.pytorch import Callback

from ..core.blame import warn
from .data import ResumableData
from .random import random_state, restore_random_state

__all__ = ["ExactResume"]

KEY = "signalfire.exact"


class ExactResume(Callback):
    """Lets a fit of Lightning that was killed anywhere end with the weights, optimizers and generators of one that never was.

    By itself, Lightning saves no generators and no gradients. With this callback, and `ResumableData` as the training data, a
    checkpoint continues exactly wherever it was saved: inside an epoch, inside an accumulation window, at the end of an epoch.

    Lightning hides two states: what a module logs with ``on_epoch=True``, so that the value of a resumed epoch is the mean over
    the batches after the checkpoint; and a validation that follows a checkpoint of the same batch, which is not repeated.
    Without a validation and with ``max_epochs=-1``, as ``max_steps`` alone gives it, Lightning trains on a batch too many after
    a checkpoint of an epoch's end: give ``max_epochs``.

    Raises:
        ValueError: as training begins, for data that is no `ResumableData`, or is reloaded, and for several processes.

    Example:
        >>> def fit(module, loader, path):
        ...     trainer = Trainer(
        ...         callbacks=[
        ...             ExactResume(),
        ...             ModelCheckpoint("runs", save_last=True, every_n_train_steps=100),
        ...         ]
        ...     )
        ...     trainer.fit(module, ResumableData(loader), ckpt_path=path)
        >>> ExactResume().state_key
        'ExactResume'
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._data: list[dict[str, Any]] = []
        self._before: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        ended = ready >= trainer.num_training_batches
        gradients = {name: one.grad for name, one in pl_module.named_parameters() if one.grad is not None}
        # With manual optimization only the module knows when it steps, and its window may last over the end of an epoch.
        is_open = not pl_module.automatic_optimization or (not ended and ready % trainer.accumulate_grad_batches)
        checkpoint[KEY] = {"random": random_state(), "gradients": gradients if is_open else {}}
        fit = checkpoint["loops"]["fit_loop"]["state_dict"]
        # Lightning continues with the next epoch, and never reads a pass to its end.
        if ended and "combined_loader" in fit:
            fit["combined_loader"] = [_after(state) for state in fit["combined_loader"]]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get(KEY)
        self._data = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        if self._loaded is None:
            warn("ExactResume: the checkpoint was saved without ExactResume, so the run cannot be resumed exactly")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        data, kind = trainer.train_dataloader, type(trainer.train_dataloader).__name__
        mistakes = (
            (not isinstance(data, ResumableData), f"the data is a {kind}; pass ResumableData(loader) to fit()"),
            (
                trainer.num_training_batches == inf,
                "the data has no length, so the position that Lightning saves is one batch ahead; pass data with a "
                "length",
            ),
            (
                trainer.reload_dataloaders_every_n_epochs,
                "Lightning reloads the data, so its position is lost; set reload_dataloaders_every_n_epochs=0",
            ),
            (trainer.world_size > 1, f"world_size={trainer.world_size}; expected a single process"),
        )
        for made, message in mistakes:
            if made:
                raise ValueError(f"ExactResume: {message}")
        if self._loaded is not None:
            restore_random_state(self._loaded["random"])
            if self._data:  # Lightning loads no position that was saved in on_train_epoch_end
                data.load_state_dict(self._data[0])
            data.begin_with(self._loaded["random"])  # Lightning draws until then, as it sets up the validation
            for name, parameter in pl_module.named_parameters():
                if name in self._loaded["gradients"]:
                    parameter.grad = self._loaded["gradients"][name].to(parameter.device)
            self._loaded = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._before = random_state() if trainer.enable_validation else None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._before is not None:  # a run that is resumed after this validation goes without it
            restore_random_state(self._before)
            self._before = None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._loaded is not None:  # the checkpoint was the last of a complete run
            restore_random_state(self._loaded["random"])
            self._loaded = None


def _after(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"epoch": state["epoch"] + 1, "batch": 0} if state["batch"] else state
