"""Adaptive gradient clipping (AGC): bounds each unit's gradient norm relative to its weight norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import Capture, Claim, check_name, check_number
from signalfire.distributed import local_part
from signalfire.distributed.norms import unit_norms

from ._common.parameters import all_names, check_matches, longest_match, norms
from ._common.ranks import CLIP_ADAPTIVELY
from ._common.updates import selected_updates

__all__ = ["AdaptiveGradientClipping"]


class AdaptiveGradientClipping(Handler):
    """Adaptive gradient clipping (AGC): clips the gradient norm of each unit to at most ``clipping * max(norm(W), eps)``.

    W stands for the weights of the unit. A step that is large relative to the weights destabilizes training, so each unit has
    its own bound. A unit is a row of a weight: an output unit of a linear layer, or an output channel of a convolution.
    Vectors and scalars are clipped as a whole. Clipping runs once per optimizer step, on unscaled gradients, before
    `GradientClipping`.

    Args:
        clipping: Largest ratio of a unit's gradient norm to its weight norm.
        eps: Lower bound on the weight norm, so that weights initialized to zero can be trained.
        exclude: Parameters not to clip, such as the last layer, which the paper recommends: the path of a module or parameter
            such as ``"head"``, a name pattern such as ``"*.bias"``, an iterable of these, or a function
            ``(name, parameter) -> bool``. Names are those of ``named_parameters()``; with several modules, they start with the
            module's name: ``"generator.0.weight"``.
        update: Name of the update to clip; all by default.

    Raises:
        ValueError: At the start of a run, if a pattern matches no parameter.
        TypeError: If a gradient is sparse.

    Source:
        Brock, De, Smith and Simonyan, "High-Performance Large-Scale Image Recognition Without Normalization" (ICML 2021). A
        unit is always an index of the first dimension, even in transposed convolutions, whose first dimension holds the
        inputs.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=1.0)
        >>> def train(*handlers):
        ...     model = torch.nn.Linear(1, 2, bias=False)
        ...     model.weight.data = torch.tensor([[1.0], [10.0]])
        ...     engine = Engine(update, model=model, seed=0)
        ...     _ = engine.attach(handlers)
        ...     _ = engine.run([(torch.ones(1, 1), torch.tensor([[-3.0, 6.0]]))], max_epochs=1)
        ...     return [round(one, 2) for one in model.weight.flatten().tolist()]
        >>> # Gradients of 4 and 4 are clipped to 0.1 and 1.
        >>> train(), train(AdaptiveGradientClipping(0.1))
        ([-3.0, 6.0], [0.9, 9.0])
    """

    capture = Capture.INSIDE
    trains = True
    clips_gradients = True
    decides_alike = True

    def __init__(
        self,
        clipping: float = 0.01,
        *,
        eps: float = 1e-3,
        exclude: str | Iterable[str] | Callable[[str, Tensor], bool] = (),
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.exclude: tuple[str, ...] | Callable[[str, Tensor], bool]
        if callable(exclude):
            self.exclude = exclude
        else:
            is_collection = isinstance(exclude, Iterable) and not isinstance(exclude, str)
            patterns: tuple[Any, ...] = tuple(exclude) if is_collection else (exclude,)
            if not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(
                    f"AdaptiveGradientClipping(exclude={exclude!r}): expected parameter name patterns, "
                    "or a function (name, parameter) -> bool"
                )
            self.exclude = patterns
        self.clipping = check_number(self, "clipping", clipping, above=0)
        self.eps = check_number(self, "eps", eps, above=0)
        self.update = check_name(self, "update", update)
        self._excluded: list[Tensor] = []
        self._clipped: dict[
            str, tuple[list[Tensor], list[Tensor]]
        ] = {}  # by update: all of its parameters, and those clipped

    def attached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(Claim("adaptive gradient clipping"), by=self, target=f"of update {update.name!r}")

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["modules"], writes=[])
    def find_excluded(self, engine: Engine) -> None:
        """Find the parameters that are not clipped."""
        named = all_names(engine.modules)
        exclude = self.exclude
        if not callable(exclude):
            known_names = [name for names in named.values() for name in names]
            check_matches(f"{self.name!r}: exclude=", exclude, known_names)
        self._excluded = [
            parameter
            for parameter, names in named.items()
            if (exclude(names[0], parameter) if callable(exclude) else longest_match(names, exclude) is not None)
        ]
        self._clipped = {}

    @on(Events.GRADIENTS_READY, rank=CLIP_ADAPTIVELY, reads=["gradients", "weights", "optimizer"], writes=["gradients"])
    def clip(self, engine: Engine) -> None:
        """Clip the gradients of the accumulation window."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        parameters = [p for p in self._parameters(update) if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return
        try:
            factors = _unit_norms(parameters)
            norms = _unit_norms(gradients)
        except RuntimeError as error:
            if any(gradient.is_sparse for gradient in gradients):
                raise TypeError(
                    f"{self.name!r}: a gradient of update {update.name!r} is sparse, so it cannot be clipped unit by "
                    "unit; add its parameter to exclude=, or build the embedding with sparse=False"
                ) from error
            raise
        torch._foreach_clamp_min_(factors, self.eps)
        torch._foreach_mul_(factors, self.clipping)
        torch._foreach_div_(factors, norms)  # infinite for a zero gradient; the next line clamps it to 1
        torch._foreach_clamp_max_(factors, 1.0)
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], factors)

    def _parameters(self, update: UpdateState) -> list[Tensor]:
        """The clipped parameters of an update; recomputed when the optimizer gets more parameters."""
        parameters = update.parameters
        cached = self._clipped.get(update.name)
        if cached is None or cached[0] is not parameters:
            excluded = {id(parameter) for parameter in self._excluded}
            cached = self._clipped[update.name] = (parameters, [p for p in parameters if id(p) not in excluded])
        return cached[1]

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to parameters."""
        self._excluded, self._clipped = [], {}


def _unit_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each row of a tensor, in a shape that broadcasts with it; vectors and scalars have one norm.

    Of a tensor that is sharded by rows, the result has the norms of this rank's rows.
    """
    vectors = iter(norms([t.detach() for t in tensors if t.dim() <= 1], 2.0))
    return [unit_norms(t.detach()) if t.dim() > 1 else next(vectors) for t in tensors]
