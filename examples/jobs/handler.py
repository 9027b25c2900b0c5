"""A handler of your own; the test beside it, test_handler.py, trains with it and checks
what every handler guarantees.
"""

from collections.abc import Mapping
from typing import Any, Literal

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Claim


class PlateauRestart(Handler):
    """Goes back to the best weights, at a smaller learning rate, once a metric has not
    improved for `patience` epochs.
    """

    trains = True

    def __init__(
        self,
        monitor: str,
        mode: Literal["min", "max"] = "min",
        patience: int = 2,
        factor: float = 0.5,
    ) -> None:
        self.monitor, self.mode, self.patience, self.factor = (
            monitor,
            mode,
            patience,
            factor,
        )
        self.best, self.waited, self.restarts = 0.0, 0, 0
        self.weights: dict[
            str, Any
        ] = {}  # those of the best value; none before the first

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(
            Claim("the learning rate", rehearsed=False), by=self
        )  # no schedule beside this handler

    @on(
        Events.EPOCH_COMPLETED,
        phase=Phase.CONTROL,
        reads=["metrics", "weights"],
        writes=["weights", "rates", "metrics"],
    )
    def look(self, engine: Engine) -> None:
        value = float(engine.state.metrics[self.monitor])
        self.waited += 1
        if not self.weights or (
            value < self.best if self.mode == "min" else value > self.best
        ):
            self.best, self.waited = value, 0
            self.weights = {
                name: tensor.clone()
                for name, tensor in engine.model.state_dict().items()
            }
        elif self.waited >= self.patience:
            engine.model.load_state_dict(self.weights)
            for group in engine.optimizer.param_groups:
                group["lr"] *= self.factor
            self.waited, self.restarts = 0, self.restarts + 1
        engine.log("restarts", self.restarts)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "waited": self.waited,
            "restarts": self.restarts,
            "weights": self.weights,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
