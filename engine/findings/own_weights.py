"""Weights that functions load or change beside the engine: the model's own, not copied, and those of a run that continues."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..authoring.devices import widened
from ..core.events import Events
from ..core.part import Reference
from ..distributed.sharded import is_sharded, local_part
from .function_rules import is_users

if TYPE_CHECKING:
    from ..core.connection import Connection
    from ..engine import Engine

__all__ = ["OwnLoads", "changed_at_start", "sums_before_start"]


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
            "load_state_dict() received the model's own tensors, because state_dict() returns references instead of "
            "copies, so these tensors have changed with the model",
            "keep a copy: copy.deepcopy(model.state_dict()); or attach EarlyStopping(restore_best=True), or a Checkpoint",
        )


def sums_before_start(engine: Engine) -> list[float] | None:
    """Sums of the weights before STARTED, for `changed_at_start`; None where nothing is to be compared."""
    continues = engine.training and engine.state.iteration > 0 and not engine.snapshots.has_loaded_state
    return _sums(engine) if continues and _functions(engine) else None


def changed_at_start(engine: Engine, before: list[float] | None) -> None:
    """Report functions that change the weights at the start of a run that continues an earlier one."""
    if before is not None and before != _sums(engine):
        engine.findings.report(
            "W68",
            f"the run continues after iteration {engine.state.iteration}, and a function connected to STARTED "
            f"({' or '.join(map(repr, _functions(engine)))}) overwrites the trained weights",
            "initialize the weights before the first run(), because each run() emits STARTED",
        )


def _functions(engine: Engine) -> list[Connection]:
    return [one for one in engine.signal(Events.STARTED).connections if is_users(one) and one.owner is None]


def _sums(engine: Engine) -> list[float]:
    weights = [local_part(p.detach()) for root in engine.modules.values() for p in root.parameters()]
    values = [torch.view_as_real(one) if one.is_complex() else one for one in weights if not one.is_meta]
    return [float(widened(one).nan_to_num().sum()) for one in values]
