"""Logs the distributions of weights and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from signalfire import Attachment, Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import Capture, check_bool, check_every
from signalfire.distributed import is_sharded, local_part

from ._common.parameters import check_matches, check_patterns, longest_match, named_parameters
from ._common.ranks import LOG_HISTOGRAMS

__all__ = ["Histograms"]


class Histograms(Handler):
    """Logs histograms of weights and gradients to every attached logger.

    Each parameter and each gradient gets a histogram (``engine.log.histogram``). Weights are logged under "weights/" after
    every n-th iteration. Gradients of the next completed step are logged under "gradients/", as the optimizer sees them after
    clipping. Non-finite values are left out and reported; complex values are represented by their magnitudes. For sharded
    parameters, the histogram covers rank 0's part.

    Args:
        every: Interval in iterations.
        weights, gradients: Whether to log histograms of weights, and of gradients.
        parameters: Name patterns of the parameters, such as ``"backbone"`` or ``["*.weight"]``; all by default.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 3), seed=0)
        >>> _ = engine.attach(Histograms(every="2it", parameters="*weight"))
        >>> @engine.on(Events.HISTOGRAM_LOGGED)  # as TensorBoard does
        ... def show(engine):
        ...     entry = engine.log.entry
        ...     values = sum(entry.value.counts)
        ...     print(f"iteration {engine.state.iteration}: {entry.name}, {values} values")
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 3))] * 4, max_epochs=1)
        iteration 2: weights/weight, 6 values
        iteration 3: gradients/weight, 6 values
        iteration 4: weights/weight, 6 values
    """

    capture = Capture.FORBIDDEN
    trains = True
    rank_zero_only = True

    def __init__(
        self,
        *,
        every: str | Interval = "500it",
        weights: bool = True,
        gradients: bool = True,
        parameters: str | Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every, units=["it"])
        self.weights = check_bool(self, "weights", weights)
        self.gradients = check_bool(self, "gradients", gradients)
        self.parameters = check_patterns(self, "parameters", parameters)
        if not (weights or gradients):
            raise ValueError(
                "Histograms(weights=False, gradients=False): nothing would be logged; set one of them to True"
            )
        self._due: list[str] = []  # names of the updates whose next gradients are to be logged
        self._waiting: Attachment | None = None

    @on(Events.STARTED, phase=Phase.RECORD, reads=["modules"], writes=[])
    def begin(self, engine: Engine) -> None:
        """Check the patterns; gradients that the previous run was about to log are still pending."""
        named = named_parameters(engine)
        check_matches(f"{self.name!r}: parameters=", self.parameters or (), named)
        self._wait(engine, self._due)

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=[], writes=[])
    def resume(self, engine: Engine) -> None:
        """Wait for the step whose gradients the saved run was about to log."""
        self._wait(engine, self._due)

    @on("every", phase=Phase.RECORD, rank=LOG_HISTOGRAMS, reads=["weights", "modules"], writes=["files"])
    def log_weights(self, engine: Engine) -> None:
        """Log the weights, and wait for the next step to log the gradients."""
        if self.weights:
            for name, parameter in self._selected(engine).items():
                engine.log.histogram(f"weights/{name}", _own(parameter))
        if self.gradients:
            self._wait(engine, [update.name for update in engine.updates])

    def _wait(self, engine: Engine, due: list[str]) -> None:
        """Be called at GRADIENTS_READY until the gradients of these updates are logged, and no longer."""
        self._stop_waiting()
        self._due = due
        if due:
            self._waiting = engine.connect(
                Events.GRADIENTS_READY, self._log_gradients, phase=Phase.RECORD, rank=LOG_HISTOGRAMS
            )

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.detach()

    def _log_gradients(self, engine: Engine) -> None:
        """Log the gradients of an update before they are cleared."""
        update = engine.state.update
        if update.name not in self._due or update.skipped is not None:
            return
        own = set(map(id, update.parameters))
        for name, parameter in self._selected(engine).items():
            if parameter.grad is not None and id(parameter) in own:
                engine.log.histogram(f"gradients/{name}", _own(parameter.grad))
        self._wait(engine, [name for name in self._due if name != update.name])

    @on(Events.ENDED, reads=[], writes=[])
    def end(self, engine: Engine) -> None:
        """Stop waiting."""
        self._stop_waiting()

    def _selected(self, engine: Engine) -> dict[str, Tensor]:
        named, patterns = named_parameters(engine), self.parameters
        return {name: one for name, one in named.items() if patterns is None or longest_match([name], patterns)}

    def state_dict(self) -> dict[str, Any]:
        return {"due": list(self._due)} if self._due else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._due = list(state.get("due", ()))


def _own(tensor: Tensor) -> Tensor:
    """The values that this rank has; those of a sparse gradient."""
    tensor = local_part(tensor) if is_sharded(tensor) else tensor
    return tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
