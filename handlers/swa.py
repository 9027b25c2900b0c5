"""Stochastic weight averaging: the mean of the weights at the ends of the last epochs, used in their place for evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from signalfire import Engine, Events, Handler, Interval, Phase, check_every, on, unchanged_random_state

from .ranks import AVERAGE

__all__ = ["SWA"]


class SWA(Handler):
    """Averages the weights at the ends of epochs, each counting the same, and evaluates and exports with the average.

    Late in training a high constant rate makes the weights wander around a wide minimum, and their mean is closer to its
    middle than any of them. With ``lr`` the handler anneals the rate to it once averaging has begun, epoch by epoch; the
    annealing is that of ``torch.optim.swa_utils.SWALR``. To schedule the rate before, too, leave out ``lr`` and let
    `LRScheduling`, with ``every="1ep"``, drive one after the other: ``lambda optimizer: SequentialLR(optimizer, [before,
    SWALR(optimizer, swa_lr=0.05)], milestones=[75])``.

    Evaluations that the trainer starts (`Validation`, `Engine.evaluate`) and `Engine.weights` see the average, copied into the
    modules in place; afterwards the weights are back, bit for bit, also after an error. An evaluator therefore has to share
    the trainer's modules. What is saved to resume from (`Engine.state_dict`) holds the weights, and the average as this
    handler's state. After training ``engine.load_weights(engine.weights())`` makes the average the weights.

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

    trains = True

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
        super().__init__(name=name)
        for argument, value, least in (
            ("start", start, 1),
            ("anneal_epochs", anneal_epochs, 0),
            ("bn_batches", bn_batches, 0),
        ):
            if value is None and argument == "bn_batches":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"SWA({argument}={value!r}): it has to be an int")
            if value < least:
                raise ValueError(f"SWA({argument}={value!r}): it has to be {least} or more")
        interval = check_every(self, every)
        if not isinstance(interval, Interval) or interval.unit != "ep" or interval.value % 1:
            raise ValueError(f"SWA(every={every!r}): weights are averaged at the ends of epochs; write '1ep' or '5ep'")
        if lr is not None and (isinstance(lr, bool) or not isinstance(lr, int | float)):
            raise TypeError(f"SWA(lr={lr!r}): it has to be a number")
        if lr is not None and not lr > 0:
            raise ValueError(f"SWA(lr={lr!r}): it has to be greater than zero")
        if anneal not in ("cos", "linear"):
            raise ValueError(f"SWA(anneal={anneal!r}): it has to be 'cos' or 'linear'")
        if bn_update not in ("end", "evaluation"):
            raise ValueError(f"SWA(bn_update={bn_update!r}): it has to be 'end' or 'evaluation'")
        if bn_data is not None:
            _check_data(bn_data)
        self.start = start
        self.every = interval
        self.lr = lr
        self.anneal_epochs = anneal_epochs
        self.anneal = anneal
        self.bn_data = bn_data
        self.bn_batches = bn_batches
        self.bn_update = bn_update
        self.update = update
        self.scheduler: SWALR | None = None
        self.averaging = Events.EPOCH_COMPLETED(after=start - 1) if start > 1 else Events.EPOCH_COMPLETED
        self.annealing = None if lr is None else self.averaging
        self._averages = _Averages(average_buffers=False)
        self._statistics_of = 0  # the count of the average for which BatchNorm statistics were gathered

    @property
    def count(self) -> int:
        return self._averages.count

    def attached(self, engine: Engine) -> None:
        update = engine.find_update(self.update)
        engine.claim("the weights used for evaluation", by=self)
        if self.lr is not None:
            engine.claim(f"the learning rate of update {update.name!r}", by=self)

    @on(Events.STARTED)
    def look(self, engine: Engine) -> None:
        """Find the parameters and buffers, now that the model is set up."""
        self._averages.bind(engine, self.name)
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
        with warnings.catch_warnings():  # at its first step torch looks for the wrapper that was taken off
            warnings.filterwarnings("ignore", message=".*optimizer.step.*", category=UserWarning)
            self.scheduler.step()

    def _annealing_of(self, engine: Engine) -> SWALR:
        # Built when the annealing begins: over 0 epochs it takes effect at once.
        assert self.lr is not None
        optimizer = engine.find_update(self.update).optimizer
        assert optimizer is not None
        scheduler = SWALR(optimizer, self.lr, self.anneal_epochs, self.anneal)
        # torch wraps optimizer.step only to warn about a wrong order, which the engine rules out: leave no trace.
        if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
            del optimizer.step
        return scheduler

    @on(Events.COMPLETED, phase=Phase.PREPARE, rank=AVERAGE)
    def complete(self, engine: Engine) -> None:
        """Gather the BatchNorm statistics of the last average."""
        self._refresh(engine)

    @on(Events.EVALUATION_STARTED | Events.CHECKPOINT_SAVING, phase=Phase.PREPARE)
    def swap(self, engine: Engine) -> None:
        """Put the average in place of the weights until the evaluation, or the export, is over."""
        if not engine.running:
            self._averages.bind(engine, self.name)
        if self.bn_update == "evaluation":
            self._refresh(engine)
        engine.enter(self._averages.in_place())

    @on(Events.ENDED)
    def let_go(self, engine: Engine) -> None:
        """Hold nothing of the model beyond the run."""
        self._averages.release()

    def update_bn(self, engine: Engine, data: Iterable[Any] | None = None) -> None:
        """Gather the BatchNorm statistics of the average now. Nothing of the training changes, nor any random stream.

        Args:
            engine: the engine that this handler is attached to.
            data: training data; ``bn_data`` by default.
        """
        if data is not None:
            _check_data(data)
        data = self.bn_data if data is None else data
        if data is None:
            raise ValueError(f"{self.name!r}: update_bn() needs training data; give it, or SWA(bn_data=)")
        if not engine.running:
            self._averages.bind(engine, self.name)
        if self._averages.values:
            with self._averages.in_place():
                self._gather(engine, data)
                self._averages.take_buffers()
        self._statistics_of = self._averages.count

    def _refresh(self, engine: Engine) -> None:
        stale = self._statistics_of != self._averages.count and not self._averages.swapped
        if stale and self.bn_data is not None and self.bn_batches != 0 and _batch_norms(engine):
            self.update_bn(engine)

    def _gather(self, engine: Engine, data: Iterable[Any]) -> None:
        """Let the BatchNorm layers see the data. They average it with equal weights, as they do without a momentum."""
        update = engine.find_update(self.update)
        forward = update.forward or update.function
        modes = [(module, module.training) for root in engine.modules.values() for module in root.modules()]
        if not engine.running:
            for root in engine.modules.values():
                root.train()
        norms = [norm for norm in _batch_norms(engine) if norm.training]
        momenta = [norm.momentum for norm in norms]
        seen = 0
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None
            with torch.no_grad(), unchanged_random_state(getattr(data, "generator", None)):
                for batch in islice(data, self.bn_batches) if norms else ():
                    if batch is not None:
                        forward(engine, _placed(batch, engine.device))
                        seen += 1
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            for module, mode in modes:
                module.training = mode
        if norms and not seen:
            raise ValueError(f"{self.name!r}: bn_data gave no batch; it has to be iterable again each time")

    def state_dict(self) -> dict[str, Any]:
        return self._averages.state_dict() | {
            "statistics_of": self._statistics_of,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages.load_state_dict(state)
        self._statistics_of = state["statistics_of"]
        if state["count"] and self.engine is not None and self.engine.running:
            self._averages.bind(self.engine, self.name)
        if state["scheduler"] is None:
            if self.scheduler is not None:  # begin anew, from the rate that the optimizer was built with
                for group in self.scheduler.optimizer.param_groups:
                    group["lr"] = group.get("initial_lr", group["lr"])
            self.scheduler = None
        elif self.lr is not None and self.engine is not None:
            self.scheduler = self.scheduler or self._annealing_of(self.engine)
            self.scheduler.load_state_dict(state["scheduler"])


def _check_data(data: object) -> None:
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise TypeError(f"SWA(bn_data={data!r}): it has to be iterable, such as the DataLoader of the training")
    if isinstance(data, Iterator):
        raise TypeError(
            f"SWA(bn_data={data!r}): an iterator is used up by the first pass; give an iterable that starts anew each time, "
            "such as a list or a DataLoader"
        )


def _batch_norms(engine: Engine) -> list[_BatchNorm]:
    """The BatchNorm layers that keep statistics."""
    modules: Iterable[nn.Module] = (module for root in engine.modules.values() for module in root.modules())
    return [module for module in modules if isinstance(module, _BatchNorm) and module.running_mean is not None]


def _placed(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_placed(item, device) for item in batch))
    if type(batch) in (tuple, list):
        return type(batch)(_placed(item, device) for item in batch)
    if isinstance(batch, dict):
        return {key: _placed(item, device) for key, item in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


# A parameter or buffer: its name, and the module's dict that holds it, since a module may put another tensor in its place.
_Place = tuple[str, Any, str]


class _Averages:
    """Averages of all parameters and buffers of an engine's modules, by name.

    Attributes:
        values: the averages; empty before the first update.
        count: the number of updates.
    """

    def __init__(self, *, average_buffers: bool) -> None:
        self.average_buffers = average_buffers
        self.values: dict[str, Tensor] = {}
        self.count = 0
        self.swapped = False
        self.release()

    def release(self) -> None:
        """Forget the modules."""
        self._moving: list[_Place] = []
        self._copied: list[_Place] = []

    def bind(self, engine: Engine, owner: str) -> None:
        """Find the tensors to be averaged and those to be copied, and place loaded averages where these are."""
        self.release()
        live: dict[str, Tensor] = {}
        seen: set[int] = set()
        for root, module in engine.modules.items():
            for path, part in module.named_modules(prefix=root):
                for tensors, averaged in ((part._parameters, True), (part._buffers, self.average_buffers)):
                    for key, tensor in tensors.items():
                        if tensor is None or id(tensor) in seen:
                            continue
                        seen.add(id(tensor))
                        live[f"{path}.{key}"] = tensor
                        fractional = tensor.is_floating_point() or tensor.is_complex()
                        places = self._moving if averaged and fractional else self._copied
                        places.append((f"{path}.{key}", tensors, key))
        if self.values:
            different = sorted(
                name
                for name in live.keys() | self.values.keys()
                if name not in live or name not in self.values or live[name].shape != self.values[name].shape
            )
            if different:
                raise ValueError(
                    f"{owner!r}: its averages do not fit the modules: they differ in {', '.join(different)}"
                )
            self.values = {name: self.values[name].to(tensor.device) for name, tensor in live.items()}

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move the averages towards the tensors by a share ``weight`` of the way; the first time, copy them."""
        moving, copied = _tensors(self._moving), _tensors(self._copied)
        if not self.values:
            self.values = {place[0]: _wide(t).clone() for place, t in zip(self._moving, moving, strict=True)}
            self.values |= {place[0]: t.detach().clone() for place, t in zip(self._copied, copied, strict=True)}
        else:
            if moving:
                torch._foreach_lerp_([self.values[place[0]] for place in self._moving], [*map(_wide, moving)], weight)
            if copied:
                torch._foreach_copy_([self.values[place[0]] for place in self._copied], copied)
        self.count += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Hold the averages in place of the tensors; inside of itself, and before the first update, it does nothing."""
        if self.swapped or not self.values:
            yield
            return
        places = self._moving + self._copied
        tensors = _tensors(places)
        kept = [tensor.detach().clone() for tensor in tensors]
        self.swapped = True
        try:
            # Through `data`, autograd does not count it as a change: what a backward still needs is back in time.
            torch._foreach_copy_([tensor.data for tensor in tensors], [self.values[place[0]] for place in places])
            yield
        finally:
            for (_, holder, key), tensor in zip(places, tensors, strict=True):
                if holder[key] is not tensor:
                    holder[key] = tensor
            torch._foreach_copy_([tensor.data for tensor in tensors], kept)
            self.swapped = False

    @torch.no_grad()
    def take_buffers(self) -> None:
        """Take over the buffers as they are now."""
        for name, holder, key in self._copied:
            self.values[name].copy_(holder[key])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "averages": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self.values = {name: tensor.detach().clone() for name, tensor in state["averages"].items()}

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a handler belongs to no model."""
        return vars(self) | {"_moving": [], "_copied": [], "swapped": False}


def _tensors(places: list[_Place]) -> list[Tensor]:
    return [holder[key] for _, holder, key in places]


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
