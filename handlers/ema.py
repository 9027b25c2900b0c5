"""Exponential moving average of the weights: smoother than the weights themselves, and used in their place for evaluation."""

from __future__ import annotations

from typing import Literal

from signalfire import Engine, Events, Interval, Phase, on
from signalfire.checks import check_bool, check_choice, check_int, check_number
from signalfire.interval import check_every

from ._common.averages import AveragedWeights
from ._common.ranks import AVERAGE
from ._common.updates import made_step

__all__ = ["EMA"]


class EMA(AveragedWeights):
    """Keeps an exponential moving average of the weights, and puts it in their place for evaluation and export.

    After each optimizer step that happened, once for each accumulation window: ``average = decay * average + (1 - decay) *
    weights``. The first average is a copy of the weights; before it, evaluation sees the weights themselves.

    Evaluations that the trainer starts (`Validation`, `Engine.evaluate`) and `Engine.weights` see the averages, copied into
    the modules in place; afterwards the weights are back, bit for bit, also after an error. An evaluator therefore has to share
    the trainer's modules. What is saved to resume from (`Engine.state_dict`) holds the weights, and the averages as this
    handler's state. After training ``engine.load_weights(engine.weights())`` makes the averages the weights. Weights that
    `Engine.load_weights` puts in place, as EarlyStopping does with the best ones, are used as they are until the next average.

    Averages of float16 and bfloat16 weights are kept in float32, where small changes are not rounded away.

    Args:
        decay: the share of the old average that stays, 0 <= decay < 1.
        every: the interval in optimizer steps between two updates of the average, such as "1st" or 10.
        start: optimizer steps to be made before averaging begins.
        warmup: whether the decay begins low and grows: the smaller of ``decay`` and ``(1 + n) / (10 + n)``, where n is the
            number of updates of the average so far.
        buffers: "copy" takes over the buffers with each update of the average, "average" averages floating-point ones like
            weights. Integer buffers are copied in either case.
        update: the name of the update whose steps count; the first by default. Averaged are all of the engine's modules.

    Attributes:
        count: how often the average was updated.

    Source:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992); the same arithmetic as
        ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
        >>> trainer = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = trainer.attach(EMA(0.9))
        >>> _ = trainer.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=3)
        >>> torch.equal(trainer.weights()["model"]["weight"], trainer.model.weight)
        False
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every: str | Interval | int = "1st",
        start: int = 0,
        warmup: bool = False,
        buffers: Literal["copy", "average"] = "copy",
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        average_buffers = check_choice(self, "buffers", buffers, ("copy", "average")) == "average"
        super().__init__(average_buffers=average_buffers, update=update, name=name)
        self.decay = check_number(self, "decay", decay, least=0, below=1)
        self.every = check_every(
            self, f"{check_int(self, 'every', every)}st" if isinstance(every, int) else every, units=["st"]
        )
        self.start = check_int(self, "start", start, least=0)
        self.warmup = check_bool(self, "warmup", warmup)

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.PREPARE, rank=AVERAGE)
    def average(self, engine: Engine) -> None:
        """Move the average after a step that happened."""
        if made_step(engine, self.update, self.every) and engine.state.update.steps > self.start:
            n = self.count
            self._averages.update(1 - (min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay))
