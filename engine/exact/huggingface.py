"""An exact resume for the Trainer of Hugging Face's transformers; importing this module imports it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..core.blame import warn
from ..data.held_generators import held_generators
from .random import as_text, from_text, random_state, restore_random_state
from .samples import SeededSamples
from .seals import fingerprint, newest_sealed, seal

__all__ = ["ExactResume"]


class ExactResume(TrainerCallback, ExportableState):
    """Lets a Trainer that was killed anywhere end with the weights, the optimizer and the generators of one that never was.

    By itself, Trainer continues exactly unless samples or the collator draw random numbers, an evaluation follows a checkpoint of
    the same step, or the order of an epoch is drawn from the global generator. With `SeededSamples` as the data, this callback
    covers the rest, and it seals each checkpoint once it is complete.

    Trainer saves between optimizer steps only: a run that was killed inside an accumulation window repeats the window. It hides
    the loss summed up since the last log, an evaluation that follows a checkpoint of the same step, which is not repeated, and
    generators that the dataset holds. The states of other callbacks need ``restore_callback_states_from_checkpoint=True``.

    Raises:
        ValueError: as training begins, for data other than `SeededSamples`, several processes, ``save_only_model``,
            ``ignore_data_skip`` and ``save_total_limit=1``, and if Trainer loaded other weights than it had saved.

    Example:
        >>> def train(model, arguments, dataset):
        ...     trainer = Trainer(
        ...         model,
        ...         arguments,
        ...         train_dataset=SeededSamples(dataset),
        ...         callbacks=[ExactResume()],
        ...     )
        ...     trainer.train(resume_from_checkpoint=ExactResume.newest(arguments.output_dir))
        >>> ExactResume.newest("runs/not-yet-begun") is None
        True
    """

    def __init__(self) -> None:
        self.begun: str | None = None  # the generators as this epoch began, from which its order may be drawn
        self._model: Any = None
        self._loaded: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None

    @staticmethod
    def newest(output_dir: str | os.PathLike[str]) -> str | None:
        """The newest checkpoint that is complete and intact, for ``resume_from_checkpoint``; None if there is none."""
        found = newest_sealed(output_dir, "checkpoint-")
        return None if found is None else str(found)

    def state(self) -> dict[str, Any]:
        """What Trainer saves of this callback."""
        weights = None if self._model is None else fingerprint(self._model)
        return {"args": {}, "attributes": {"begun": self.begun}, "random": as_text(random_state()), "weights": weights}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        loader = getattr(others["train_dataloader"], "base_dataloader", others["train_dataloader"])
        if not isinstance(loader.dataset, SeededSamples):
            raise ValueError(
                f"ExactResume: train_dataset is a {type(loader.dataset).__name__}; wrap the dataset: "
                "train_dataset=SeededSamples(dataset)"
            )
        unfit = {"save_only_model": True, "ignore_data_skip": True, "save_total_limit": 1}
        wrong = [f"{name}={value}" for name, value in unfit.items() if getattr(args, name) == value]
        if wrong := wrong + [f"world_size={args.world_size}"] * (args.world_size > 1):
            raise ValueError(
                f"ExactResume: with {', '.join(wrong)}, a run cannot be resumed exactly; change these settings"
            )
        if held := held_generators(loader, fetching=True):
            warn(
                f"ExactResume: Trainer does not save the state of the random generators {', '.join(held)}; draw "
                "from the global generators instead"
            )
        loader.collate_fn = loader.dataset.collating(loader.collate_fn)
        loaded = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if state.global_step and loaded is None:
            warn(
                "ExactResume: the checkpoint was saved without ExactResume, so the first epoch after the resume may "
                "differ from that of an uninterrupted run"
            )
        elif loaded is not None and loaded["weights"] != fingerprint(model):
            raise ValueError(
                "ExactResume: the loaded weights differ from the weights that were saved; check that the parameter "
                "names in the checkpoint match the parameter names of the model"
            )
        self._model, self._loaded = model, loaded
        state.stateful_callbacks[type(self).__name__] = self.state()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **others: Any) -> None:
        train_dataloader.dataset.set_epoch(int(state.epoch or 0))
        if self._loaded is not None:  # inside an epoch, its order is drawn again; Trainer restores the rest thereafter
            loaded, self._loaded = self._loaded, None
            restore_random_state(from_text(loaded["attributes"]["begun"] if state.epoch % 1 else loaded["random"]))
        self.begun = as_text(random_state())

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._before = random_state() if control.should_evaluate else None

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._before is not None:  # a run that is resumed after this evaluation goes without it
            restore_random_state(self._before)
            self._before = None

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        seal(Path(args.output_dir, f"checkpoint-{state.global_step}"))
