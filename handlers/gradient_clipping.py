"""Gradient clipping, by global norm and by value."""

from __future__ import annotations

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, UpdateState, on
from signalfire.authoring import Capture, check_name, check_number
from signalfire.distributed import local_part

from ._common.claims import CLIPPING
from ._common.parameters import alike, any_sharded, gradients_of, norm_of_all
from ._common.updates import selected_updates

__all__ = ["GradientClipping"]


class GradientClipping(Handler):
    """Clips gradients by their global norm, by value, or both: once per optimizer step, on unscaled gradients.

    Args:
        max_norm: Maximum global norm; if the norm of all gradients together is greater, they are scaled down to it.
        max_value: Maximum absolute value of each element, applied before ``max_norm`` if both are given.
        norm_type: p of the p-norm; ``math.inf`` for the maximum norm.
        update: Name of the update to clip; by default all, each separately.

    Attributes:
        total_norm: Global norm before the last clipping, as a tensor; None before the first.

    Source:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks" (ICML 2013);
        the arithmetic is that of ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=1.0)
        >>> def train(*handlers):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     _ = torch.nn.init.zeros_(model.weight)
        ...     engine = Engine(update, model=model, seed=0)
        ...     _ = engine.attach(handlers)
        ...     _ = engine.run([(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.5]]))], max_epochs=1)
        ...     return [round(one, 2) for one in model.weight.flatten().tolist()]
        >>> # The gradient is (-3, -4), whose norm is 5.
        >>> train(), train(GradientClipping(max_norm=1.0))
        ([3.0, 4.0], [0.6, 0.8])
        >>> # A function instead clips each parameter group by its own norm.
        >>> model = torch.nn.Linear(1, 1)
        >>> limits = [
        ...     {"params": [model.weight], "max_norm": 1.0},
        ...     {"params": [model.bias], "max_norm": 5.0},
        ... ]
        >>> optimizer = torch.optim.SGD(limits, lr=0.1)
        >>> update = Update.supervised(torch.nn.functional.mse_loss, optimizer)
        >>> engine = Engine(update, model=model, seed=0)
        >>> @engine.on(Events.GRADIENTS_READY)
        ... def clip_groups(engine):
        ...     for group in engine.optimizer.param_groups:
        ...         torch.nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
        ...     print([round(parameter.grad.item(), 2) for parameter in model.parameters()])
        >>> _ = engine.run([(torch.ones(4, 1), torch.full((4, 1), 9.0))], max_epochs=1)
        [-1.0, -5.0]
    """

    capture = Capture.INSIDE
    trains = True
    clips_gradients = True
    decides_alike = True

    other_names = {
        "gradient_clip_val": "max_norm=",
        "max_grad_norm": "max_norm=",
        "clip_value": "max_value=",
        "clip_norm": "max_norm=",
        "value": "max_norm= or max_value=",
    }

    def __init__(
        self,
        max_norm: float | None = None,
        *,
        max_value: float | None = None,
        norm_type: float = 2.0,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if max_norm is None and max_value is None:
            raise ValueError("GradientClipping(): pass max_norm=, max_value= or both")
        self.max_norm = None if max_norm is None else check_number(self, "max_norm", max_norm, above=0, infinite=True)
        self.max_value = (
            None if max_value is None else check_number(self, "max_value", max_value, above=0, infinite=True)
        )
        self.norm_type = check_number(self, "norm_type", norm_type, above=0, infinite=True)
        self.update = check_name(self, "update", update)
        self.total_norm: Tensor | None = None

    def attached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(CLIPPING, by=self, target=f"of update {update.name!r}")

    @on(Events.GRADIENTS_READY, reads=["gradients", "trainable", "optimizer"], writes=["gradients"])
    def clip(self, engine: Engine) -> None:
        """Clip the gradients of the accumulation window."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        if self.max_value is not None and gradients_of(update):  # without any, torch's function raises an error
            torch.nn.utils.clip_grad_value_(update.parameters, self.max_value)
        if self.max_norm is not None:
            self.total_norm = self._clip_norm(update, self.max_norm)

    def _clip_norm(self, update: UpdateState, max_norm: float) -> Tensor:
        gradients = gradients_of(update)
        sharded = any_sharded(update.parameters)
        if not gradients or not (sharded or alike(gradients)):
            return torch.nn.utils.clip_grad_norm_(update.parameters, max_norm, self.norm_type)
        # The same arithmetic as torch's, on this rank's shards. For gradients of one device and dtype it saves torch's two
        # groupings by device and dtype: half of its 30 us for two gradients, a quarter of its 4 ms for a thousand.
        total = norm_of_all(gradients, self.norm_type)
        parts = [local_part(gradient) for gradient in gradients] if sharded else gradients
        torch._foreach_mul_(parts, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))
        return total
