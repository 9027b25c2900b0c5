"""The rules of `check` about what a model holds without registering it, and about options of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from .composition import Composition
from .findings import Finding, finding
from .update import UpdateState

__all__ = ["OF_MODELS"]


def unregistered_parts(it: Composition) -> Iterator[Finding]:
    """Trainable tensors and layers in attributes where PyTorch does not find them."""
    if not it.engine.training:
        return
    for root, module in it.engine.modules.items():
        for path, part in module.named_modules():
            for name, value in vars(part).items():
                if name.startswith("_"):
                    continue
                place = ".".join(filter(None, (root, path, name)))
                hidden = [one for one in _trainable_in(value) if one not in it.parameters and one not in it.optimized]
                if hidden and isinstance(value, Tensor):
                    yield finding(
                        "C27",
                        f"{place} is a tensor that requires a gradient, but no parameter: it is neither trained, moved nor saved",
                        "make it a parameter: nn.Parameter(...)",
                    )
                elif hidden:
                    yield finding(
                        "C27",
                        f"{place} is a {type(value).__name__} of layers with {len(hidden)} trainable parameters, which are no "
                        "part of the model: they are neither trained, moved nor saved",
                        "use nn.ModuleList or nn.ModuleDict; or freeze what is not to be trained: requires_grad_(False)",
                    )


def _trainable_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.requires_grad and value.is_leaf else []
    if type(value) is dict:
        value = list(value.values())
    if type(value) not in (list, tuple, set) or len(value) > _MOST_LAYERS:
        return []
    layers: Iterable[nn.Module] = [one for one in value if isinstance(one, nn.Module)]
    return [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]


_MOST_LAYERS = 10_000


def unusual_options(it: Composition) -> Iterator[Finding]:
    """Options with which no optimizer converges."""
    for update in it.engine.updates:
        for kind, group in _groups(update):
            lr, decay, momentum = (_number(group.get(key)) for key in ("lr", "weight_decay", "momentum"))
            if momentum >= 1:
                what = f"momentum={momentum:g} does not forget: the steps grow without bounds"
                yield _option(update.name, what, "use a momentum below 1, such as 0.9")
            if lr * decay > _MOST_DECAY and kind in ("SGD", "AdamW"):
                what = f"lr={lr:g} and weight_decay={decay:g} take {min(1.0, lr * decay):.0%} off each weight in every step"
                yield _option(update.name, what, "use a smaller weight_decay, such as 1e-4 for SGD or 1e-2 for AdamW")


def _groups(update: UpdateState) -> list[tuple[str, Mapping[str, Any]]]:
    """The name of the optimizer's class and the options of each group; before it is built, those of its `partial`."""
    factory = update.spec.optimizer
    if update.optimizer is None:
        return [(factory.func.__name__, factory.keywords)] if isinstance(factory, partial) else []
    return [(type(update.optimizer).__name__, group) for group in update.optimizer.param_groups]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


_MOST_DECAY = 0.05


def _option(update: str, what: str, way_out: str) -> Finding:
    return finding("C28", f"the optimizer of update {update!r}: {what}", way_out)


OF_MODELS: Sequence[Callable[[Composition], Iterator[Finding]]] = (unregistered_parts, unusual_options)
