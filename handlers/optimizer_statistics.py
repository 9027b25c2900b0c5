"""Learning rates, momenta and weight decays as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from signalfire import Engine, Events, Handler, Interval, Phase, UpdateState, on
from signalfire.authoring import check_every, check_name

from ._common.ranks import RECORD_GROUPS
from ._common.updates import selected_updates

__all__ = ["OptimizerStatistics"]


class OptimizerStatistics(Handler):
    """Records learning rate, momentum and weight decay as metrics, as schedules have set them.

    The metrics in ``state.metrics`` are "learning_rate", "momentum" (for Adam and its relatives, the first beta), "beta2" (the
    second) and "weight_decay", if the optimizer has them. With several parameter groups, the names end in "/group0" and so on;
    with several updates they are "learning_rate/generator" and "learning_rate/generator/group0". `History` records these
    metrics. Loggers write these metrics in addition to their own learning rates, "lr" or "lr/group0", so learning rates appear
    twice.

    Skipped steps are not recorded. A hyperparameter that is a tensor, such as the learning rate of a capturable optimizer, is
    recorded as a tensor, so nothing waits for the device.

    Args:
        every: Interval between two records, in optimizer steps of each update.
        update: Name of the update to record; all by default.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import History, LRScheduling
        >>> update = Update.supervised(
        ...     torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.4, momentum=0.5
        ... )
        >>> engine, history = Engine(update, model=torch.nn.Linear(2, 1), seed=0), History()
        >>> halved = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
        >>> schedule = LRScheduling(halved, every="1step")
        >>> _ = engine.attach(schedule, OptimizerStatistics(every="1st"), history)
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=1)
        >>> history["learning_rate"], history["momentum"]
        ([0.4, 0.2, 0.1], [0.5, 0.5, 0.5])
    """

    trains = True
    decides_alike = True

    def __init__(self, *, every: str | Interval = "100st", update: str | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every, units=["st"])
        self.update = check_name(self, "update", update)

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["rates", "groups", "optimizer"], writes=["metrics"])
    def announce_metrics(self, engine: Engine) -> None:
        """Announce the names of the metrics."""
        names = [name for update in selected_updates(engine, self.update) for name in _values(engine, update)]
        engine.state.metrics.announce(self.name, names)

    @on(
        Events.OPTIMIZER_STEP_COMPLETED,
        phase=Phase.PREPARE,
        rank=RECORD_GROUPS,
        reads=["step", "rates", "groups", "optimizer"],
        writes=["metrics"],
    )
    def record(self, engine: Engine) -> None:
        """Record the values that the step has used, before schedules change them."""
        update = engine.state.update
        made = update.skipped is None and update.steps % int(self.every.value) == 0
        if made and self.update in (None, update.name):
            engine.state.metrics.update(_values(engine, update))


def _values(engine: Engine, update: UpdateState) -> dict[str, Any]:
    """The hyperparameters of an update's optimizer by the names of their metrics."""
    groups = [] if update.optimizer is None else update.optimizer.param_groups
    suffix = "" if len(engine.updates) == 1 else f"/{update.name}"
    places = [suffix] if len(groups) == 1 else [f"{suffix}/group{i}" for i in range(len(groups))]
    return {
        f"{kind}{place}": value.detach().clone() if isinstance(value, Tensor) else float(value)
        for place, group in zip(places, groups, strict=True)
        for kind, value in _of_group(group).items()
        if value is not None  # Adafactor finds its rates itself
    }


def _of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    betas = tuple(group.get("betas") or ())
    return {
        "learning_rate": group.get("lr"),
        "momentum": betas[0] if betas else group.get("momentum"),
        "beta2": betas[1] if len(betas) > 1 else None,
        "weight_decay": group.get("weight_decay"),
    }
