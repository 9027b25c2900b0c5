"""Gradient accumulation: one optimizer step for n batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from signalfire import Engine, Events, Handler, on
from signalfire.authoring import Capture, Override, check_function, check_int, check_name

__all__ = ["GradientAccumulation"]


class GradientAccumulation(Handler):
    """Gradient accumulation: takes one optimizer step every n batches, which makes the effective batch n times larger.

    The step uses the gradient of the mean loss. A window never extends into the next epoch, so the last window of an epoch may
    be shorter; it is averaged over its actual length. The reported loss is the loss of each batch. Gradient clipping,
    schedules and weight averages run once per window.

    If the data has no length, each batch is loaded before the forward of the previous one, to detect the end of the epoch. If
    loading draws random numbers from the global generators, it then draws them before that forward's dropout does. If the data
    has a length, the order is the same as in a plain loop.

    Args:
        steps: Number of batches per window, or a schedule ``{epoch: n}``: each n applies from its epoch on, and n is 1 before the
            first.
        weight: Function that returns the batch's weight, such as its number of tokens; called as ``weight(engine)`` after the
            loss is computed. The step then uses the gradient of the weighted mean loss. By default, all batches have the same
            weight.
        update: Name of the update to accumulate for; all by default.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.5)
        >>> def train(*handlers):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     _ = torch.nn.init.zeros_(model.weight)
        ...     engine = Engine(update, model=model, seed=0)
        ...     _ = engine.attach(handlers)
        ...     data = [(torch.ones(1, 1), torch.full((1, 1), target)) for target in (1.0, 3.0)]
        ...     _ = engine.run(data, max_epochs=1)
        ...     return engine.find_update().steps, model.weight.item()
        >>> # Two steps, to 1 and to 3; or one, on the mean of both losses.
        >>> train(), train(GradientAccumulation(2))
        ((2, 3.0), (1, 2.0))
    """

    by_shard = True
    capture = Capture.FORBIDDEN  # a window has several kinds of steps
    trains = True

    other_names = {
        "accumulate_grad_batches": "the first argument, steps",
        "gradient_accumulation_steps": "the first argument, steps",
        "accumulation_steps": "the first argument, steps",
    }

    def __init__(
        self,
        steps: int | Mapping[int, int],
        *,
        weight: Callable[[Engine], Any] | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(steps, Mapping):
            if not steps:
                raise ValueError(
                    "GradientAccumulation(steps={}): the schedule is empty; pass a dict that maps epochs to numbers "
                    "of batches, such as {1: 4}"
                )
            schedule = {
                check_int(self, "steps: epoch", epoch): check_int(self, f"steps[{epoch!r}]", number)
                for epoch, number in steps.items()
            }
        else:
            schedule = {1: check_int(self, "steps", steps)}
        self.schedule = dict(sorted(schedule.items()))
        self.weight = check_function(self, "weight", weight, "engine", optional=True)
        self.update = check_name(self, "update", update)
        self.weight_event = None if weight is None else Events.LOSS_COMPUTED

    def window(self, epoch: int) -> int:
        """The number of batches per window in this epoch."""
        reached = [steps for start, steps in self.schedule.items() if start <= epoch]
        return reached[-1] if reached else 1

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.WINDOW, self.window, by=self, update=self.update)

    @on("weight_event", reads=["loss", "batch"], writes=["loss_weight"])
    def set_weight(self, engine: Engine) -> None:
        """Set the weight of this batch's loss."""
        assert self.weight is not None
        if self.update in (None, engine.state.update.name):
            engine.state.update.weight = self.weight(engine)
