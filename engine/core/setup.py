"""Before a run starts: building optimizers, and refusing models and windows that cannot be trained."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .update import kind_of, needs_closure

if TYPE_CHECKING:
    from .kernel import Kernel
    from .update import UpdateState

__all__ = ["build_optimizers", "check_initialized", "check_surroundings", "check_windows"]


def check_surroundings(engine: Kernel) -> None:
    """Raise RuntimeError for a run inside of a block of torch's in which nothing can be trained."""
    if engine.training and torch.is_inference_mode_enabled():
        raise RuntimeError("run(): cannot train inside torch.inference_mode(); call run() outside inference mode")
    attention = getattr(nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    if "_context_parallel" in attention:
        raise RuntimeError(
            "run(): context parallelism is not supported: context_parallel() shards the sequences of a single batch in "
            "place, but a run reads many batches; call run() outside the context_parallel() block, and split the model "
            "with TensorParallel or FullyShardedDataParallel"
        )


def check_initialized(engine: Kernel, where: str) -> None:
    """Raise ValueError for lazy modules that no forward has initialized: their parameters can be neither copied nor trained."""
    if not engine.training:
        return
    for root, model in engine.modules.items():
        if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise ValueError(
                f"{where}: parameters of {root!r} are not initialized yet: "
                f"{', '.join(lazy[:4])}{', ...' if lazy[4:] else ''}. Lazy modules take their shapes from the first "
                "batch; call the model with a batch before the run, under torch.no_grad()"
            )


def build_optimizers(engine: Kernel) -> None:
    """Call the optimizer factories, now that the model is set up, and check the optimizers.

    Raises:
        ValueError: for an optimizer without parameters, or with none of the model's.
    """
    for update in engine.updates if engine.training else ():
        if update.optimizer is None:
            update.take_optimizer(update.spec.optimizer(_parameters_of(engine, update)))
        assert update.optimizer is not None
        own = list(dict.fromkeys(p for root in engine.modules.values() for p in root.parameters()))
        update.order_parameters(own)
        if update.window.kept is None and needs_closure(update.optimizer):
            update.window.kept = []
        if any(map(attrgetter("requires_grad"), own)) and set(own).isdisjoint(update.parameters):
            raise ValueError(
                f"update {update.name!r}: its {kind_of(update.optimizer)} holds none of the model's parameters, "
                "because it was built for a different model, or before the model's parameters were replaced; pass a "
                f"factory instead, such as partial(torch.optim.{type(update.optimizer).__name__}, lr=...)"
            )


def _parameters_of(engine: Kernel, update: UpdateState) -> Any:
    """What the factory of an update's optimizer is called with: all parameters, unless the update names its own."""
    parameters: Any
    if update.spec.parameters is None:
        parameters = list(dict.fromkeys(p for root in engine.modules.values() for p in root.parameters()))
    else:
        parameters = update.spec.parameters(engine)
        parameters = parameters if isinstance(parameters, Mapping) else list(parameters)
    if not parameters:
        raise ValueError(
            f"update {update.name!r}: there are no parameters to optimize; pass a model with parameters to "
            "Engine(model=), or parameters= to Update"
        )
    return parameters


def check_windows(engine: Kernel) -> None:
    """Raise ValueError if updates that share parameters accumulate: each would clear the gradients of the other."""
    if len(engine.updates) > 1 and any(update.window.length > 1 for update in engine.updates):
        seen: dict[object, str] = {}
        for update in engine.updates:
            for parameter in update.parameters:
                other = seen.setdefault(parameter, update.name)
                if other != update.name:
                    raise ValueError(
                        f"updates {other!r} and {update.name!r} share parameters, so gradients cannot be accumulated "
                        "for only one of them; give each update its own parameters with Update(..., parameters=), or "
                        "detach GradientAccumulation"
                    )
