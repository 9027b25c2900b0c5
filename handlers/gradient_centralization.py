"""Gradient centralization (GC): the gradient of each unit's weights has a mean of zero."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import Capture, Claim, check_name
from signalfire.distributed import local_part
from signalfire.distributed.norms import unit_means

from ._common.parameters import all_names, check_matches, check_patterns, longest_match
from ._common.ranks import CENTRALIZE
from ._common.updates import selected_updates

__all__ = ["GradientCentralization"]


class GradientCentralization(Handler):
    """Gradient centralization: subtracts the mean from each unit's gradient, which regularizes and speeds up training.

    A unit is a row of a weight: an output unit of a linear layer, or an output channel of a convolution. Vectors and scalars,
    such as biases, are unchanged. The handler runs once per optimizer step, on unscaled gradients, after noise and before
    clipping; weight decay, which the optimizer adds, is not centralized.

    Args:
        exclude: Parameters that are not centralized: the path of a module or parameter such as ``"embedding"``, a pattern of
            names such as ``"*.head.weight"``, or several of these. Names are those of the model's ``named_parameters()``; with
            several modules, they are prefixed by the module's name.
        update: Name of the update to centralize; all by default.

    Raises:
        ValueError: At the start of a run, if a pattern matches no parameter.
        TypeError: If a gradient is sparse.

    Source:
        Yong, Huang, Hua and Zhang, "Gradient Centralization: A New Optimization Technique for Deep Neural Networks" (ECCV
        2020), Algorithm 1. As in the authors' code, a unit is an index of the first dimension, even in transposed convolutions.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=1.0)
        >>> def train(*handlers):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     _ = torch.nn.init.zeros_(model.weight)
        ...     engine = Engine(update, model=model, seed=0)
        ...     _ = engine.attach(handlers)
        ...     _ = engine.run([(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5]]))], max_epochs=1)
        ...     return model.weight.tolist()
        >>> # The gradient is (-1, -3), and less its mean (1, -1).
        >>> train(), train(GradientCentralization())
        ([[1.0, 3.0]], [[-1.0, 1.0]])
    """

    capture = Capture.INSIDE
    trains = True
    decides_alike = True

    def __init__(
        self, *, exclude: str | Sequence[str] | None = None, update: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.exclude = check_patterns(self, "exclude", exclude)
        self.update = check_name(self, "update", update)
        self._excluded: set[int] = set()
        self._centralized: dict[str, tuple[list[Tensor], list[Tensor]]] = {}  # by update: all parameters, and those

    def attached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(Claim("gradient centralization"), by=self, target=f"of update {update.name!r}")

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["modules"], writes=[])
    def find_excluded(self, engine: Engine) -> None:
        """Find the parameters that are not centralized."""
        named = all_names(engine.modules)
        known = [name for names in named.values() for name in names]
        check_matches(f"{self.name!r}: exclude=", self.exclude or (), known)
        self._excluded = {id(one) for one, names in named.items() if longest_match(names, self.exclude or ())}
        self._centralized = {}

    @on(Events.GRADIENTS_READY, rank=CENTRALIZE, reads=["gradients", "optimizer"], writes=["gradients"])
    def centralize(self, engine: Engine) -> None:
        """Centralize the gradients of the accumulation window."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        for parameter in self._parameters(update):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise TypeError(
                    f"{self.name!r}: a gradient of update {update.name!r} is sparse and cannot be centralized; add its "
                    "parameter to exclude=, or build the embedding with sparse=False"
                )
            local_part(gradient).sub_(unit_means(gradient))

    def _parameters(self, update: UpdateState) -> list[Tensor]:
        """The centralized parameters of an update; recomputed when the optimizer gets more parameters."""
        parameters = update.parameters
        cached = self._centralized.get(update.name)
        if cached is None or cached[0] is not parameters:
            chosen = [one for one in parameters if one.dim() > 1 and id(one) not in self._excluded]
            cached = self._centralized[update.name] = (parameters, chosen)
        return cached[1]

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to parameters."""
        self._excluded, self._centralized = set(), {}
