"""Adaptive gradient clipping: each unit's gradient is bounded by the size of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.acts import Override
from signalfire.checks import check_number
from signalfire.distributed import local_part

from ._common.parameters import all_names, longest_match, matches, norms, unmatched
from ._common.ranks import CLIP_ADAPTIVELY
from ._common.updates import updates_meant

__all__ = ["AdaptiveGradientClipping"]


class AdaptiveGradientClipping(Handler):
    """Scales a unit's gradient G down to ``clipping * max(norm(W), eps)`` where its norm is greater; W are the unit's weights.

    A learning rate says how far a step goes relative to the gradient; what unsettles training is a step that is large relative
    to the weights. So the bound follows them, unit by unit: each row of a weight (an output unit of a linear layer, an output
    channel of a convolution) on its own, and vectors and scalars as a whole. It acts once for each optimizer step, on unscaled
    gradients, before `GradientClipping`.

    Args:
        clipping: the largest ratio of a unit's gradient norm to its weight norm; the smaller, the more is clipped.
        eps: the least weight norm that is reckoned with, so that weights that begin at zero can move.
        exclude: the parameters to leave alone, which the paper advises for the last layer: the path of a module or parameter
            such as ``"head"``, a pattern of their names such as ``"*.bias"``, several of these, or a function ``(name,
            parameter) -> bool``. Names are those of the model's ``named_parameters()``; of several modules, with the module's
            name in front: ``"generator.0.weight"``.
        update: the name of the update whose gradients are clipped; all by default.

    Errors:
        ValueError: at the start of a run, for a pattern that no parameter's name matches.
        TypeError: for sparse gradients.

    Source:
        Brock, De, Smith and Simonyan, "High-Performance Large-Scale Image Recognition Without Normalization" (ICML 2021).
        A unit is the first dimension throughout, also where a transposed convolution keeps its inputs.

    Example:
        >>> AdaptiveGradientClipping(0.02, exclude="head.*").clipping
        0.02
    """

    trains = True
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
            several = isinstance(exclude, Iterable) and not isinstance(exclude, str)
            patterns: tuple[Any, ...] = tuple(exclude) if several else (exclude,)
            if not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(
                    f"AdaptiveGradientClipping(exclude={exclude!r}): give patterns of parameter names, "
                    "or a function (name, parameter) -> bool"
                )
            self.exclude = patterns
        self.clipping = check_number(self, "clipping", clipping, above=0)
        self.eps = check_number(self, "eps", eps, above=0)
        self.update = update
        self._excluded: list[Tensor] = []
        self._clipped: dict[str, tuple[list[Tensor], list[Tensor]]] = {}  # by update: all of its parameters, and ours

    def attached(self, engine: Engine) -> None:
        for update in updates_meant(engine, self.update):
            engine.overrides.claim(Override.ADAPTIVE_CLIPPING, by=self, target=f"of update {update.name!r}")

    @on(Events.STARTED, phase=Phase.PREPARE)
    def choose(self, engine: Engine) -> None:
        """Find the parameters to leave alone."""
        named = all_names(engine.modules)
        exclude = self.exclude
        if not callable(exclude):
            there = [name for names in named.values() for name in names]
            for pattern in exclude:
                if not any(matches(name, pattern) for name in there):
                    raise ValueError(f"{self.name!r}: exclude={unmatched(pattern, there)}")
        self._excluded = [
            parameter
            for parameter, names in named.items()
            if (exclude(names[0], parameter) if callable(exclude) else longest_match(names, exclude) is not None)
        ]
        self._clipped = {}

    @on(Events.GRADIENTS_READY, rank=CLIP_ADAPTIVELY)
    def clip(self, engine: Engine) -> None:
        """Clip the gradients of the complete window."""
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
                    f"{self.name!r}: a gradient of update {update.name!r} is sparse, which has no norm of each unit; "
                    "give exclude= its parameter, or sparse=False to the embedding"
                ) from error
            raise
        torch._foreach_clamp_min_(factors, self.eps)
        torch._foreach_mul_(factors, self.clipping)
        torch._foreach_div_(factors, norms)  # infinite for a gradient of zero, which the next line turns into one
        torch._foreach_clamp_max_(factors, 1.0)
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], factors)

    def _parameters(self, update: UpdateState) -> list[Tensor]:
        """The parameters of an update that are clipped, chosen anew when the optimizer is given more of them."""
        every = update.parameters
        known = self._clipped.get(update.name)
        if known is None or known[0] is not every:
            excluded = {id(parameter) for parameter in self._excluded}
            known = self._clipped[update.name] = (every, [p for p in every if id(p) not in excluded])
        return known[1]

    @on(Events.ENDED)
    def forget(self, engine: Engine) -> None:
        """Let go of the parameters."""
        self._excluded, self._clipped = [], {}


def _unit_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each row of a tensor, in a shape that broadcasts with it; of a vector or a scalar as a whole.

    Of a sharded tensor, those of the rows that this process holds: it is sharded by rows.
    """
    vectors = iter(norms([t.detach() for t in tensors if t.dim() <= 1], 2.0))
    return [
        torch.linalg.vector_norm(local_part(t.detach()), dim=tuple(range(1, t.dim())), keepdim=True)
        if t.dim() > 1
        else next(vectors)
        for t in tensors
    ]
