"""Exponential moving average of the weights: smoother than the weights themselves, and used in their place for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Interval, Phase, check_every, on

from .ranks import AVERAGE

__all__ = ["EMA"]


class EMA(Handler):
    """Keeps an exponential moving average of the weights, and puts it in their place for evaluation and export.

    After each optimizer step that happened, once for each accumulation window: ``average = decay * average + (1 - decay) *
    weights``. The first average is a copy of the weights; before it, evaluation sees the weights themselves.

    Evaluations that the trainer starts (`Validation`, `Engine.evaluate`) and `Engine.weights` see the averages, copied into
    the modules in place; afterwards the weights are back, bit for bit, also after an error. An evaluator therefore has to share
    the trainer's modules. What is saved to resume from (`Engine.state_dict`) holds the weights, and the averages as this
    handler's state. After training ``engine.load_weights(engine.weights())`` makes the averages the weights.

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
        >>> from functools import partial
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
        >>> trainer = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = trainer.attach(EMA(0.9))
        >>> _ = trainer.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=3)
        >>> torch.equal(trainer.weights()["model"]["weight"], trainer.model.weight)
        False
    """

    trains = True

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
        super().__init__(name=name)
        if isinstance(decay, bool) or not isinstance(decay, int | float):
            raise TypeError(f"EMA(decay={decay!r}): it has to be a number")
        if not 0 <= decay < 1:
            raise ValueError(f"EMA(decay={decay!r}): it has to be at least 0 and less than 1, such as 0.999")
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            every = Interval(every, "st")
        interval = check_every(self, every)  # type: ignore[arg-type]
        if not isinstance(interval, Interval) or interval.unit != "st":
            raise ValueError(f"EMA(every={every!r}): averages follow optimizer steps; write '1st', '10st' or 10")
        if isinstance(start, bool) or not isinstance(start, int):
            raise TypeError(f"EMA(start={start!r}): it has to be an int, a number of optimizer steps")
        if start < 0:
            raise ValueError(f"EMA(start={start!r}): it has to be 0 or more optimizer steps")
        if not isinstance(warmup, bool):
            raise TypeError(f"EMA(warmup={warmup!r}): it has to be True or False")
        if buffers not in ("copy", "average"):
            raise ValueError(f"EMA(buffers={buffers!r}): it has to be 'copy' or 'average'")
        self.decay = decay
        self.every = interval
        self.start = start
        self.warmup = warmup
        self.update = update
        self._averages = _Averages(average_buffers=buffers == "average")

    @property
    def count(self) -> int:
        return self._averages.count

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)
        engine.claim("the weights used for evaluation", by=self)

    @on(Events.STARTED)
    def look(self, engine: Engine) -> None:
        """Find the parameters and buffers, now that the model is set up."""
        self._averages.bind(engine, self.name)

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.PREPARE, rank=AVERAGE)
    def average(self, engine: Engine) -> None:
        """Move the average after a step that happened."""
        update = engine.state.update
        if (
            update is engine.find_update(self.update)
            and update.skipped is None
            and update.steps > self.start
            and update.steps % self.every.value == 0
        ):
            count = self._averages.count
            decay = min(self.decay, (1 + count) / (10 + count)) if self.warmup else self.decay
            self._averages.update(1 - decay)

    @on(Events.EVALUATION_STARTED | Events.CHECKPOINT_SAVING, phase=Phase.PREPARE)
    def swap(self, engine: Engine) -> None:
        """Put the averages in place of the weights until the evaluation, or the export, is over."""
        if not engine.running:
            self._averages.bind(engine, self.name)
        engine.enter(self._averages.in_place())

    @on(Events.ENDED)
    def let_go(self, engine: Engine) -> None:
        """Hold nothing of the model beyond the run."""
        self._averages.release()

    def state_dict(self) -> dict[str, Any]:
        return self._averages.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages.load_state_dict(state)
        if state["count"] and self.engine is not None and self.engine.running:
            self._averages.bind(self.engine, self.name)


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
