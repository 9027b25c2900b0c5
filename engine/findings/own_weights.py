"""Weights that functions load or change beside the engine: the model's own, not copied, and those of a run that continues."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..core.events import Events
from ..core.part import Reference
from ..distributed.sharded import is_sharded
from .function_rules import is_users

if TYPE_CHECKING:
    from ..core.connection import Connection
    from ..engine import Engine

__all__ = ["OwnLoads", "changed_at_start", "versions_before_start"]


class OwnLoads:
    """Looks at what is loaded into the modules of an engine during a run.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        look = partial(_look_safely, Reference(engine))
        roots = engine.modules.values() if engine.training else ()
        self._hooks = [root.register_load_state_dict_pre_hook(look) for root in roots]

    def stop(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()


def _look_safely(reference: Reference, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    if (engine := reference()) is not None:
        engine.findings.look(_look, engine, module, state, prefix)


def _look(engine: Engine, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    own = {prefix + name: one for name, one in module.named_parameters() if not is_sharded(one) and not one.is_meta}
    given = {name: state[name] for name in own if isinstance(state.get(name), Tensor)}
    if not given or any(one.is_meta or is_sharded(one) for one in given.values()):
        return
    if all(one.data_ptr() == own[name].data_ptr() for name, one in given.items() if one.numel()):
        engine.findings.report(
            "W67",
            "load_state_dict() is given the model's own weights: what state_dict() returned earlier is not a copy, and has "
            "changed with the model",
            "keep a copy: copy.deepcopy(model.state_dict()); or attach EarlyStopping(restore_best=True), or a Checkpoint",
        )


def versions_before_start(engine: Engine) -> list[int] | None:
    """The versions of the weights before STARTED, for `changed_at_start`; None where functions may change them."""
    continues = engine.training and engine.state.iteration > 0 and not engine.snapshots.has_loaded_state
    return _versions(engine) if continues and _functions(engine) else None


def changed_at_start(engine: Engine, before: list[int] | None) -> None:
    """Report functions that change the weights at the start of a run that continues an earlier one."""
    if before is not None and before != _versions(engine):
        engine.findings.report(
            "W68",
            f"the run continues after iteration {engine.state.iteration}, and a function at STARTED ({_functions(engine)[0]!r}) "
            "changes the weights that were trained",
            "initialise the weights before the first run(); STARTED comes at the start of each",
        )


def _functions(engine: Engine) -> list[Connection]:
    return [one for one in engine.signal(Events.STARTED).connections if is_users(one) and one.owner is None]


def _versions(engine: Engine) -> list[int]:
    return [one._version for one in engine.modules.parameters()]
