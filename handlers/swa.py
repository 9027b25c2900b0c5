"""Stochastic weight averaging (SWA): evaluates with the mean of the weights at the ends of the last epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from signalfire import Engine, Events, Finding, Interval, Phase, on
from signalfire.authoring import (
    check_choice,
    check_every,
    check_int,
    check_number,
    last_epoch,
    map_leaves,
    unchanged_random_state,
)
from signalfire.data import generators_of
from signalfire.distributed import unsharded
from signalfire.findings import finding
from signalfire.runs.evaluation import prepare_batch
from signalfire.runs.restore import Modes

from ._common.averages import AveragedWeights
from ._common.batches import check_data
from ._common.claims import LEARNING_RATE
from ._common.ranks import AVERAGE
from ._common.torch_schedulers import restore_rates, step, unwrap_step
from ._common.updates import only_update

__all__ = ["SWA"]


class SWA(AveragedWeights):
    """Stochastic weight averaging (SWA): averages the weights at the ends of epochs, and evaluates with the average.

    All epochs count equally. With a high constant learning rate late in training, the weights explore a wide minimum, and their
    mean is closer to its center. With ``lr``, the handler anneals the learning rate epoch by epoch from the start of averaging,
    as ``torch.optim.swa_utils.SWALR`` does. To also schedule the learning rate before that, omit ``lr`` and chain both schedulers
    in `LRScheduling` with ``every="1ep"``:
    ``lambda optimizer: SequentialLR(optimizer, [before, SWALR(optimizer, swa_lr=0.05)], milestones=[75])``.

    Evaluations started by the trainer (`Validation`, `Engine.evaluate`), exports and `Engine.weights` use the average, which is
    copied into the modules in place and swapped out afterwards. The evaluator must therefore share the trainer's modules.
    `Engine.state_dict` holds the weights, and the average as this handler's state. For more about loading and evaluating, see
    `EMA`.

    BatchNorm statistics are valid only for the weights that they were computed with. When the run is complete, they are
    recomputed for the average by passing training data through the update's forward without gradients, with the modules in their
    training modes, but without the handlers of the forward, such as mixed precision. Frozen BatchNorm layers (in eval mode) keep
    their statistics.

    Args:
        start: First epoch at whose end the weights are averaged.
        every: Interval between two averages, in epochs from ``start``, such as "1ep".
        lr: Learning rate that the update's optimizer is annealed to; None does not change the learning rate.
        anneal_epochs: Number of epochs of the annealing.
        anneal: Shape of the annealing: "cos" or "linear".
        bn_data: Training data for the BatchNorm statistics, iterable more than once; required for a model with BatchNorm.
        bn_batches: Number of its batches to use; all by default. 0 keeps the statistics of the last averaged weights.
        bn_update: When to recompute the statistics: "end" when the run is complete, "evaluation" also before each evaluation or
            export with a new average.
        evaluate: Whether evaluations and exports use the average. If several handlers keep averages, only one can do this;
            ``with handler.in_place():`` uses the average of a different one.
        update: Name of the update whose learning rate is annealed and whose forward is called; the first by default, but required
            with ``lr`` if the engine has several. All modules and trained tensors outside the modules are averaged.

    Attributes:
        count: Number of averaged weights.
        scheduler: Scheduler of the annealing; None without ``lr`` and before the annealing starts.

    Source:
        Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (UAI 2018); the arithmetic is that
        of ``torch.optim.swa_utils`` (AveragedModel with ``get_swa_multi_avg_fn()``, SWALR, update_bn).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> engine = Engine(update, model=torch.nn.Linear(1, 1, bias=False))
        >>> _ = torch.nn.init.ones_(engine.model.weight)
        >>> # Averages the weights after the epochs 2 and 3, 0.25 and 0.125.
        >>> _ = engine.attach(SWA(2))
        >>> _ = engine.run([(torch.ones(4, 1), torch.zeros(4, 1))], max_epochs=3)
        >>> engine.model.weight.item(), engine.weights()["model"]["weight"].item()
        (0.125, 0.1875)
    """

    other_names = {
        "annealing_epochs": "anneal_epochs=",
        "annealing_strategy": "anneal=",
        "swa_epoch_start": "start=",
        "swa_lr": "lr=",
        "swa_lrs": "lr=",
        "swa_start": "start=",
    }

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
        evaluate: bool = True,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(average_buffers=False, evaluate=evaluate, update=update, name=name)
        self.start = check_int(self, "start", start)
        self.every = check_every(self, every, units=["ep"])
        self.lr = None if lr is None else check_number(self, "lr", lr, above=0)
        self.anneal_epochs = check_int(self, "anneal_epochs", anneal_epochs, least=0)
        self.anneal = check_choice(self, "anneal", anneal, ("cos", "linear"))
        if bn_data is not None:
            check_data("SWA(bn_data=", bn_data)
        self.bn_data = bn_data
        self.bn_batches = None if bn_batches is None else check_int(self, "bn_batches", bn_batches, least=0)
        self.bn_update = check_choice(self, "bn_update", bn_update, ("end", "evaluation"))
        self.scheduler: SWALR | None = None
        self.average_event = Events.EPOCH_COMPLETED(after=self.start - 1) if self.start > 1 else Events.EPOCH_COMPLETED
        self.anneal_event = None if lr is None else self.average_event
        self._frozen: set[tuple[str, str]] = set()  # BatchNorm layers in eval mode when the run was complete
        self._statistics_of = 0  # `count` of the average that the BatchNorm statistics belong to

    def attached(self, engine: Engine) -> None:
        super().attached(engine)
        if self.lr is not None:
            update = only_update(engine, self.update, by=self, does="lr= applies to")
            engine.overrides.claim(LEARNING_RATE, by=self, target=f"of update {update.name!r}")

    def bind_tensors(self, engine: Engine) -> None:
        """Collect the parameters and buffers, and check that BatchNorm statistics can be recomputed."""
        super().bind_tensors(engine)
        if self.bn_data is None and self.bn_batches != 0 and (norms := _batch_norms(engine)):
            raise ValueError(
                f"{self.name!r}: the model has {len(norms)} BatchNorm layer(s), whose statistics must be recomputed "
                "for the averaged weights; pass the training data as SWA(bn_data=), or set bn_batches=0 to keep the "
                "statistics of the last weights"
            )

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report averaging that starts after the run's last epoch."""
        last = last_epoch(engine)
        if last is not None and last < self.start:
            yield finding(
                "C18",
                f"{self.name!r} averages from epoch {self.start} on, but the run has only {last} epochs",
                "start earlier, train longer, or continue the training in a later run()",
                [self.name],
            )

    @on("average_event", phase=Phase.PREPARE, rank=AVERAGE, reads=["weights", "buffers"], writes=[])
    def average(self, engine: Engine) -> None:
        """Add the weights at the end of this epoch to the average."""
        if (engine.state.epoch - self.start) % self.every.value == 0:
            self._averages.update(1 / (self._averages.count + 1))

    @on("anneal_event", phase=Phase.CONTROL, reads=["optimizer"], writes=["rates"])
    def anneal_lr(self, engine: Engine) -> None:
        """Anneal the learning rate towards ``lr``."""
        if self.scheduler is None:
            self.scheduler = self._annealing_of(engine)
        step(self.scheduler)

    def _annealing_of(self, engine: Engine) -> SWALR:
        # Built when the annealing starts: with anneal_epochs=0 it sets the rate at once.
        assert self.lr is not None
        optimizer = engine.find_update(self.update).optimizer
        assert optimizer is not None
        scheduler = SWALR(optimizer, self.lr, self.anneal_epochs, self.anneal)  # type: ignore[arg-type]
        unwrap_step(optimizer)
        return scheduler

    @on(
        Events.COMPLETED,
        phase=Phase.PREPARE,
        rank=AVERAGE,
        reads=["device", "weights", "buffers", "modes", "modules"],
        writes=[],
    )
    def update_statistics(self, engine: Engine) -> None:
        """Recompute the BatchNorm statistics for the final average."""
        self._frozen = {place for place, norm in _batch_norms(engine).items() if not norm.training}
        self._refresh(engine)

    def swap(self, engine: Engine) -> None:
        """Swap the average in, with its BatchNorm statistics if ``bn_update="evaluation"``."""
        if self.bn_update == "evaluation":
            if not engine.running:
                self._averages.bind(engine, self.name)
            self._refresh(engine)
        super().swap(engine)

    def update_bn(self, engine: Engine, data: Iterable[Any] | None = None) -> None:
        """Recompute the BatchNorm statistics of the average now; weights and random states stay unchanged.

        Args:
            engine: The engine that this handler is attached to.
            data: Training data; None uses ``bn_data``.
        """
        if data is not None:
            check_data(f"{self.name!r}: update_bn(data=", data)
        data = self.bn_data if data is None else data
        if data is None:
            raise ValueError(
                f"{self.name!r}: update_bn() needs training data; pass data= to update_bn(), or use SWA(bn_data=)"
            )
        if not engine.running:
            self._averages.bind(engine, self.name)
        if self._averages.values:
            with self._averages.in_place(anyway=True):
                self._recompute(engine, data)
                self._averages.take_buffers()
        self._statistics_of = self._averages.count

    def _refresh(self, engine: Engine) -> None:
        averages = self._averages
        stale = self._statistics_of != averages.count and not averages.swapped and not averages.overruled
        if stale and self.bn_data is not None and self.bn_batches != 0 and _batch_norms(engine):
            self.update_bn(engine)

    def _recompute(self, engine: Engine, data: Iterable[Any]) -> None:
        modes = Modes(engine.modules.values())
        if not engine.running:
            for root in engine.modules.values():
                root.train()
            for place in self._frozen:
                _batch_norms(engine)[place].eval()
        norms = [norm for norm in _batch_norms(engine).values() if norm.training]
        try:
            with _averaging(norms):
                seen = self._pass_through(engine, data if norms else ())
        finally:
            modes.put_back()
        if engine.processes.distributed:  # each rank may have read the data in another order
            _broadcast_buffers(norms, engine)
        if norms and not seen:
            raise ValueError(
                f"{self.name!r}: bn_data= yielded no batches; pass non-empty data that can be iterated more than once"
            )

    def _pass_through(self, engine: Engine, data: Iterable[Any]) -> int:
        """Pass the data through the model without gradients; the number of its batches."""
        update, seen = engine.find_update(self.update), 0
        forward = update.forward or update.function
        with torch.no_grad(), unchanged_random_state(*generators_of(data)), unsharded(engine.modules.values()):
            for batch in islice(data, self.bn_batches):
                if batch is not None:
                    forward(engine, map_leaves(partial(_on_device, engine.device), prepare_batch(engine, batch)))
                    seen += 1
        return seen

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "statistics_of": self._statistics_of,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._statistics_of = state["statistics_of"]
        if state["scheduler"] is None:
            if (
                self.scheduler is not None and self.engine is not None
            ):  # restart from the optimizer's initial learning rate
                restore_rates(self.scheduler.optimizer)
            self.scheduler = None
        elif self.lr is not None and self.engine is not None:
            self.scheduler = self.scheduler or self._annealing_of(self.engine)
            self.scheduler.load_state_dict(state["scheduler"])


def _batch_norms(engine: Engine) -> dict[tuple[str, str], _BatchNorm]:
    """The BatchNorm layers with running statistics, by the module's name and the path in it."""
    modules = {(root, path): part for root, module in engine.modules.items() for path, part in module.named_modules()}
    return {
        place: part for place, part in modules.items() if isinstance(part, _BatchNorm) and part.running_mean is not None
    }


@contextmanager
def _averaging(norms: list[_BatchNorm]) -> Iterator[None]:
    """Begin the statistics again, and average all batches with equal weights, as momentum None does."""
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _broadcast_buffers(norms: list[_BatchNorm], engine: Engine) -> None:
    buffers = [dict(norm.named_buffers(recurse=False)) for norm in norms]
    for own, first in zip(buffers, engine.processes.broadcast(buffers), strict=True):
        for key, buffer in own.items():
            buffer.copy_(first[key])


def _on_device(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if hasattr(leaf, "to") else leaf
