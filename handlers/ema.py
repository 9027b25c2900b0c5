"""Exponential moving average (EMA) of the weights, used for evaluation and export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from signalfire import Engine, Events, Finding, Interval, Phase, on
from signalfire.authoring import check_bool, check_choice, check_every, check_int, check_number, steps_to_come
from signalfire.findings import finding

from ._common.averages import AveragedWeights
from ._common.ranks import AVERAGE
from ._common.updates import made_step

__all__ = ["EMA"]


class EMA(AveragedWeights):
    """Keeps an exponential moving average (EMA) of the weights, and evaluates and exports with it.

    After each optimizer step that is not skipped, ``average = decay * average + (1 - decay) * weights``. The first average is
    a copy of the weights; until there is one, evaluations use the weights.

    Evaluations started by the trainer (`Validation`, `Engine.evaluate`) and `Engine.weights` use the averages, copied into the
    modules in place; afterwards the weights are restored bit for bit, even after an error. The evaluator must therefore share
    the trainer's modules. `Engine.state_dict`, from which runs resume, contains the weights, and the averages as part of this
    handler's state. After training, ``engine.load_weights(engine.weights())`` replaces the weights with the averages. Weights
    loaded by `Engine.load_weights`, or restored by `EarlyStopping`, are used unchanged until the next update of
    the average.

    The averages take memory for one more copy of the weights. They are kept in float32 for float16 and bfloat16 weights, so
    small changes are not lost to rounding.

    Args:
        decay: Weight of the previous average, 0 <= decay < 1.
        every: Interval between updates of the average in optimizer steps, such as "1step" or 10.
        start: Number of optimizer steps before averaging starts.
        warmup: Whether to ramp up the decay: the smaller of ``decay`` and ``(1 + n) / (10 + n)``, where n is the number of
            updates of the average so far.
        buffers: "copy" copies the buffers at each update of the average; "average" averages floating-point buffers like weights.
            Integer buffers, and buffers whose shape or type has changed, are always copied.
        evaluate: Whether evaluations and exports use the average. If several handlers keep averages, only one can do this;
            ``with handler.in_place():`` uses the averages of a different one.
        trained_only: Whether to leave out frozen parameters, which saves memory. Frozen parameters are used unchanged; a
            parameter that is unfrozen later is averaged from its first step. Do not use this for parameters that something
            other than the optimizer changes, such as those of a target network. To load averages saved with
            ``trained_only=True``, use the same setting.
        update: Name of the update whose steps count; the first by default. All modules are averaged, and so are trained tensors
            outside the modules, such as a temperature in ``parameters=``.

    Attributes:
        count: Number of updates of the average.

    Source:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992); the same arithmetic as
        ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> trainer = Engine(update, model=model, seed=0)
        >>> ema = EMA(0.9)
        >>> _ = trainer.attach(ema)
        >>> # The weights are 0.5 and 0.75, so the average is 0.9 * 0.5 + 0.1 * 0.75.
        >>> _ = trainer.run([(torch.ones(4, 1), torch.ones(4, 1))], max_epochs=2)
        >>> trainer.model.weight.item(), round(trainer.weights()["model"]["weight"].item(), 3)
        (0.75, 0.525)
        >>> with ema.in_place():  # as evaluations do
        ...     round(trainer.model.weight.item(), 3)
        0.525
    """

    interval_matters = True

    other_names = {
        "beta": "decay=",
        "momentum": "decay=",
        "update_every": "every=",
    }

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every: str | Interval | int = "1step",
        start: int = 0,
        warmup: bool = False,
        buffers: Literal["copy", "average"] = "copy",
        evaluate: bool = True,
        trained_only: bool = False,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        average_buffers = check_choice(self, "buffers", buffers, ("copy", "average")) == "average"
        check_bool(self, "trained_only", trained_only)
        super().__init__(
            average_buffers=average_buffers, evaluate=evaluate, trained_only=trained_only, update=update, name=name
        )
        self.decay = check_number(self, "decay", decay, least=0, below=1)
        self.every = check_every(
            self, f"{check_int(self, 'every', every)}st" if isinstance(every, int) else every, units=["st"]
        )
        self.start = check_int(self, "start", start, least=0)
        self.warmup = check_bool(self, "warmup", warmup)
        self._has_reported = False

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report averaging that starts after the run's last step."""
        update = engine.find_update(self.update)
        to_come = steps_to_come(engine, update)
        if self.start and to_come is not None and update.steps + to_come <= self.start:
            yield finding(
                "C18",
                f"{self.name!r} starts averaging after {self.start} optimizer steps, but the run takes only "
                f"{update.steps + to_come}",
                "start earlier, train longer, or continue the training in a later run()",
                [self.name],
            )

    @on(
        Events.STARTED | Events.CHECKPOINT_LOADED,
        phase=Phase.RECORD,
        reads=["step", "window", "bounds"],
        writes=[],
    )
    def check_decay(self, engine: Engine) -> None:
        """Report a run that is too short for the decay: the average then consists mostly of its initial value."""
        update = engine.find_update(self.update)
        to_come = None if engine.snapshots.has_loaded_state else steps_to_come(engine, update, planned=True)
        self._has_reported = self._has_reported and engine.state.iteration > 0
        if to_come is None or not self._may_lag():
            return
        every = int(self.every.value)
        first = max(update.steps, self.start)
        averages = self.count + (update.steps + to_come) // every - first // every
        begun = self.start if self.count else first
        if averages > 0 and (share := self.decay ** (averages - 1)) > 0.5:
            self._has_reported = True  # not again where the run is continued
            engine.findings.report(
                "W55",
                f"EMA(decay={self.decay:g}): after {averages} updates, at the end of this run, {share:.1%} of the "
                f"average still comes from the {f'weights after step {begun}' if begun else 'initial weights'}",
                "use a smaller decay, or warmup=True, which starts with a smaller decay",
                self.name,
            )

    def _may_lag(self) -> bool:
        """Whether evaluations use an average that may lag far behind, and this was not reported before."""
        return self.evaluate and not self.warmup and self.decay >= 0.99 and not self._has_reported

    @on(
        Events.OPTIMIZER_STEP_COMPLETED,
        phase=Phase.PREPARE,
        rank=AVERAGE,
        reads=["step", "trainable", "weights", "buffers"],
        writes=[],
    )
    def average(self, engine: Engine) -> None:
        """Update the average after a step that was not skipped."""
        if made_step(engine, self.update, self.every) and engine.state.update.steps > self.start:
            n = self.count
            self._averages.update(1 - (min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay))
