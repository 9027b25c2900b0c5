"""Stochastic weight averaging: the mean of the weights at the ends of the last epochs, used in their place for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from signalfire import Engine, Events, Interval, Phase, on
from signalfire.acts import Override
from signalfire.batches import map_leaves
from signalfire.checks import check_choice, check_int, check_number
from signalfire.data import generators_of
from signalfire.distributed import unsharded
from signalfire.evaluation import prepare_batch
from signalfire.interval import check_every
from signalfire.randomness import unchanged_random_state
from signalfire.restore import Modes

from ._common.averages import AveragedWeights
from ._common.batches import check_data
from ._common.ranks import AVERAGE
from ._common.torch_schedulers import restore_rates, step, unwrap_step

__all__ = ["SWA"]


class SWA(AveragedWeights):
    """Averages the weights at the ends of epochs, each counting the same, and evaluates and exports with the average.

    Late in training a high constant rate makes the weights wander around a wide minimum, and their mean is closer to its
    middle than any of them. With ``lr`` the handler anneals the rate to it once averaging has begun, epoch by epoch; the
    annealing is that of ``torch.optim.swa_utils.SWALR``. To schedule the rate before, too, leave out ``lr`` and let
    `LRScheduling`, with ``every="1ep"``, drive one after the other: ``lambda optimizer: SequentialLR(optimizer, [before,
    SWALR(optimizer, swa_lr=0.05)], milestones=[75])``.

    Evaluations that the trainer starts (`Validation`, `Engine.evaluate`) and `Engine.weights` see the average, copied into the
    modules in place; afterwards the weights are back, bit for bit, also after an error. An evaluator therefore has to share
    the trainer's modules. What is saved to resume from (`Engine.state_dict`) holds the weights, and the average as this
    handler's state. After training ``engine.load_weights(engine.weights())`` makes the average the weights. Weights
    that `Engine.load_weights` puts in place, as EarlyStopping does with the best ones, are used as they are until the next
    average.

    The statistics of BatchNorm layers belong to the weights that they were gathered with. They are gathered anew for the average,
    by passing training data through the model without gradients, when the run is complete. The pass calls the update's
    forward, in the modes in which the modules train, without handlers of single batches such as mixed precision; BatchNorm layers
    that are in eval mode, since they are frozen, keep theirs.

    Args:
        start: the first epoch at whose end the weights are averaged.
        every: the interval between two, in epochs from there, such as "1ep".
        lr: the rate to which the update's optimizer is annealed; by default the rate is left alone.
        anneal_epochs: over how many epochs.
        anneal: "cos" or "linear".
        bn_data: training data for the BatchNorm statistics, iterable again each time; a model with BatchNorm needs it.
        bn_batches: how many of its batches are used; all by default. 0 keeps the statistics of the last averaged weights.
        bn_update: when: "end" once the run is complete, "evaluation" also before each evaluation or export with a new average.
        update: the name of the update whose rate is annealed, and whose forward passes the data; the first by default.
            Averaged are all of the engine's modules.

    Attributes:
        count: how many weights were averaged.
        scheduler: what anneals the rate; None without ``lr`` and before the annealing begins.

    Source:
        Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (UAI 2018); the same arithmetic as
        ``torch.optim.swa_utils`` (AveragedModel with ``get_swa_multi_avg_fn()``, SWALR, update_bn).

    Example:
        >>> SWA(75, lr=0.05, anneal_epochs=5).every
        Interval(value=1, unit='ep')
    """

    def __init__(
        self,
        start: int,
        *,
        every: str | Interval = "1ep",
        lr: float | None = None,
        anneal_epochs: int = 10,
        anneal: Literal["cos", "linear"] = "cos",
        bn_data: Iterable[Any] | None = None,
        bn_batches: int | None = None,
        bn_update: Literal["end", "evaluation"] = "end",
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(average_buffers=False, update=update, name=name)
        self.start = check_int(self, "start", start)
        self.every = check_every(self, every, units=["ep"])
        self.lr = None if lr is None else check_number(self, "lr", lr, above=0)
        self.anneal_epochs = check_int(self, "anneal_epochs", anneal_epochs, least=0)
        self.anneal = check_choice(self, "anneal", anneal, ("cos", "linear"))
        if bn_data is not None:
            check_data(f"SWA(bn_data={bn_data!r})", bn_data)
        self.bn_data = bn_data
        self.bn_batches = None if bn_batches is None else check_int(self, "bn_batches", bn_batches, least=0)
        self.bn_update = check_choice(self, "bn_update", bn_update, ("end", "evaluation"))
        self.scheduler: SWALR | None = None
        self.averaging = Events.EPOCH_COMPLETED(after=self.start - 1) if self.start > 1 else Events.EPOCH_COMPLETED
        self.annealing = None if lr is None else self.averaging
        self._frozen: set[tuple[str, str]] = set()  # BatchNorm layers in eval mode when the run was complete
        self._statistics_of = 0  # the count of the average for which BatchNorm statistics were gathered

    def attached(self, engine: Engine) -> None:
        super().attached(engine)
        if self.lr is not None:
            engine.overrides.claim(
                Override.LEARNING_RATE, by=self, target=f"of update {engine.find_update(self.update).name!r}"
            )

    def look(self, engine: Engine) -> None:
        """Find the parameters and buffers, and see that BatchNorm statistics can be gathered."""
        super().look(engine)
        if self.bn_data is None and self.bn_batches != 0 and (norms := _batch_norms(engine)):
            raise ValueError(
                f"{self.name!r}: the model has {len(norms)} BatchNorm layer(s), whose statistics have to be gathered for the "
                "averaged weights; give SWA(bn_data=), the training data, or bn_batches=0 to keep those of the last weights"
            )

    @on("averaging", phase=Phase.PREPARE, rank=AVERAGE)
    def average(self, engine: Engine) -> None:
        """Let the weights at the end of this epoch count."""
        if (engine.state.epoch - self.start) % self.every.value == 0:
            self._averages.update(1 / (self._averages.count + 1))

    @on("annealing", phase=Phase.CONTROL)
    def lower(self, engine: Engine) -> None:
        """Bring the rate closer to ``lr``."""
        if self.scheduler is None:
            self.scheduler = self._annealing_of(engine)
        step(self.scheduler)

    def _annealing_of(self, engine: Engine) -> SWALR:
        # Built when the annealing begins: over 0 epochs it takes effect at once.
        assert self.lr is not None
        optimizer = engine.find_update(self.update).optimizer
        assert optimizer is not None
        scheduler = SWALR(optimizer, self.lr, self.anneal_epochs, self.anneal)  # type: ignore[arg-type]
        unwrap_step(optimizer)
        return scheduler

    @on(Events.COMPLETED, phase=Phase.PREPARE, rank=AVERAGE)
    def complete(self, engine: Engine) -> None:
        """Gather the BatchNorm statistics of the last average."""
        self._frozen = {place for place, norm in _batch_norms(engine).items() if not norm.training}
        self._refresh(engine)

    def swap(self, engine: Engine) -> None:
        """Put the average in place of the weights, with the BatchNorm statistics that belong to it if asked for."""
        if self.bn_update == "evaluation":
            if not engine.running:
                self._averages.bind(engine, self.name)
            self._refresh(engine)
        super().swap(engine)

    def update_bn(self, engine: Engine, data: Iterable[Any] | None = None) -> None:
        """Gather the BatchNorm statistics of the average now. Nothing of the training changes, nor any random stream.

        Args:
            engine: the engine that this handler is attached to.
            data: training data; ``bn_data`` by default.
        """
        if data is not None:
            check_data(f"{self.name!r}: update_bn(data={data!r})", data)
        data = self.bn_data if data is None else data
        if data is None:
            raise ValueError(f"{self.name!r}: update_bn() needs training data; give it, or SWA(bn_data=)")
        if not engine.running:
            self._averages.bind(engine, self.name)
        if self._averages.values:
            with self._averages.in_place(anyway=True):
                self._gather(engine, data)
                self._averages.take_buffers()
        self._statistics_of = self._averages.count

    def _refresh(self, engine: Engine) -> None:
        averages = self._averages
        stale = self._statistics_of != averages.count and not averages.swapped and not averages.overruled
        if stale and self.bn_data is not None and self.bn_batches != 0 and _batch_norms(engine):
            self.update_bn(engine)

    def _gather(self, engine: Engine, data: Iterable[Any]) -> None:
        """Let the BatchNorm layers see the data. They average it with equal weights, as they do without a momentum."""
        update = engine.find_update(self.update)
        forward = update.forward or update.function
        modes = Modes(engine.modules.values())
        if not engine.running:
            for root in engine.modules.values():
                root.train()
            for place in self._frozen:
                _batch_norms(engine)[place].eval()
        norms = [norm for norm in _batch_norms(engine).values() if norm.training]
        momenta = [norm.momentum for norm in norms]
        seen = 0
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None
            with torch.no_grad(), unchanged_random_state(*generators_of(data)), unsharded(engine.modules.values()):
                for batch in islice(data, self.bn_batches) if norms else ():
                    if batch is not None:
                        forward(engine, map_leaves(partial(_on_device, engine.device), prepare_batch(engine, batch)))
                        seen += 1
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            modes.put_back()
        if engine.processes.several:  # what each of them has seen may be in another order
            buffers = [dict(norm.named_buffers(recurse=False)) for norm in norms]
            for own, first in zip(buffers, engine.processes.broadcast(buffers), strict=True):
                for key, buffer in own.items():
                    buffer.copy_(first[key])
        if norms and not seen:
            raise ValueError(f"{self.name!r}: bn_data gave no batch; it has to be iterable again each time")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "statistics_of": self._statistics_of,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._statistics_of = state["statistics_of"]
        if state["scheduler"] is None:
            if self.scheduler is not None:  # begin anew, from the rate that the optimizer was built with
                restore_rates(self.scheduler.optimizer)
            self.scheduler = None
        elif self.lr is not None and self.engine is not None:
            self.scheduler = self.scheduler or self._annealing_of(self.engine)
            self.scheduler.load_state_dict(state["scheduler"])


def _batch_norms(engine: Engine) -> dict[tuple[str, str], _BatchNorm]:
    """The BatchNorm layers that keep statistics, by their places: the module's name, and the path in it."""
    modules = {(root, path): part for root, module in engine.modules.items() for path, part in module.named_modules()}
    return {
        place: part for place, part in modules.items() if isinstance(part, _BatchNorm) and part.running_mean is not None
    }


def _on_device(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if hasattr(leaf, "to") else leaf
