"""What a saved state has to hold, and what it says about the composition of the run that it was saved in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..core.connection import Phase
from ..core.overrides import Override
from ..models.modules import bare_name

if TYPE_CHECKING:
    from ..core.handler import Handler
    from ..engine import Engine

__all__ = ["check_complete", "composition", "frozen_names"]

_POSITION = (
    *("epoch", "iteration", "epoch_start", "epoch_open", "stop_reason", "seed", "fired", "metrics"),
    *("stops", "epoch_stop", "stopped_bounds"),
)
_UPDATE = ("steps", "optimizer", "kind", "parameters", "own_parameters", "window")
# What a receiver writes if the weights depend on it.
_OF_TRAINING = {
    *("batch", "precision", "output", "loss", "loss_weight", "gradients"),
    *("trainable", "weights", "rates", "groups", "step", "plan", "window"),
}
_PARTS = ("engine", "modules", "updates", "handlers", "data", "random")
_MAPPINGS = ("engine", "modules", "updates", "handlers")


def check_complete(saved: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a state that lacks a part, or a key of its position, before anything is changed."""
    missing = [part for part in _PARTS if part not in saved]
    for part in _MAPPINGS:
        if not isinstance(saved.get(part, {}), Mapping):
            raise ValueError(
                f"{where}: this is not the state of an engine: its entry {part!r} is a {type(saved[part]).__name__}, "
                "not a mapping"
            )
    missing += [f"engine[{key!r}]" for key in _POSITION if key not in saved.get("engine", _POSITION)]
    for name, update in saved.get("updates", {}).items():
        missing += [f"updates[{name!r}][{key!r}]" for key in _UPDATE if key not in update]
    if not missing and not {"values", "serials", "serial"} <= saved["engine"]["metrics"].keys():
        missing += ["engine['metrics']"]
    if missing:
        raise ValueError(
            f"{where}: the loaded state has no {', '.join(missing)}; load a complete state, as returned by "
            "Engine.state_dict(), or pass the weights to load_weights()"
        )


def composition(engine: Engine) -> dict[str, Any]:
    """What a resumed run should have alike, apart from what has a state.

    These are the optimizers' options, the training handlers with their settings, and which parameters are frozen.
    """
    return {
        "options": {update.name: update.options for update in engine.updates},
        **_of_handlers(engine),
        "frozen": frozen_names(engine),
    }


def _of_handlers(engine: Engine) -> dict[str, Any]:
    training = {name: one for name, one in sorted(engine.handlers.items()) if _changes_training(engine, one)}
    return {
        "handlers": {name: type(handler).__name__ for name, handler in training.items()},
        "settings": {name: dict(settings) for name, handler in training.items() if (settings := handler.settings())},
    }


def frozen_names(engine: Engine) -> list[str] | None:
    """Names of the parameters that are not trained; None if a handler freezes some of them itself."""
    kinds: set[Any] = {type(handler) for handler in engine.handlers.values()}
    if any(map(_freezes, kinds)):
        return None
    return [
        f"{root}.{bare_name(name)}"
        for root, module in engine.modules.items()
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    ]


@cache
def _freezes(kind: type[Handler]) -> bool:
    """Whether handlers of a class declare that they freeze parameters."""
    return any("trainable" in (one.writes or ()) for one in kind.subscriptions)


def _changes_training(engine: Engine, handler: Handler) -> bool:
    """Whether the weights depend on a handler, by what it declares to write, or else by its class and phases."""
    owned = engine.overrides.owned_by(handler)
    if handler.writes or Override.TRIAL in owned:
        return False
    if any(isinstance(one, Override) for one in owned):
        return True
    return any(
        handler.trains and one.phase in (Phase.CHANGE, Phase.FINALIZE)
        if one.writes is None
        else one.writes & _OF_TRAINING
        for one in handler.subscriptions
    )
