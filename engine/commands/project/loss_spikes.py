"""A handler of your own."""

from collections.abc import Mapping
from typing import Any

from signalfire import Engine, Events, Handler, Phase, on


class LossSpikes(Handler):
    """Lists the iterations whose loss is more than ``factor`` times the average of the losses before."""

    def __init__(self, factor: float = 3.0, *, decay: float = 0.9, name: str | None = None) -> None:
        super().__init__(name=name)
        if not factor > 1:
            raise ValueError(f"LossSpikes(factor={factor!r}): expected a number above 1")
        self.factor, self.decay = factor, decay
        self.average: float | None = None
        self.found: list[int] = []

    @on(Events.ITERATION_COMPLETED, phase=Phase.RECORD, reads=["loss"], writes=[])
    def look(self, engine: Engine) -> None:
        """Compare the loss of the iteration with the average so far."""
        if (last := engine.state.update.loss) is None:
            return
        loss = last.item()
        if self.average is not None and loss > self.factor * self.average:
            self.found.append(engine.state.iteration)
        self.average = loss if self.average is None else self.decay * self.average + (1 - self.decay) * loss

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "found": list(self.found)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average, self.found = state["average"], list(state["found"])
