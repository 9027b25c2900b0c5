"""Weights that functions load or change beside the engine: the model's own, not copied, and those of a run that continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..distributed.sharded import is_sharded
from ..events import Events
from ..part import Reference
from .function_rules import is_users

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["OwnLoads", "watching_starts"]


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


@contextmanager
def watching_starts(engine: Engine) -> Iterator[None]:
    """Report functions that change the weights inside the ``with`` block, at the start of a run that continues an earlier one."""
    functions = [one for one in engine.signal(Events.STARTED).connections if is_users(one) and one.owner is None]
    continues = engine.training and engine.state.iteration > 0 and not engine.snapshots.has_loaded_state
    before = _versions(engine) if continues and functions else None
    yield
    if before is not None and before != _versions(engine):
        engine.findings.report(
            "W68",
            f"the run continues after iteration {engine.state.iteration}, and a function at STARTED ({functions[0]!r}) changes "
            "the weights that were trained",
            "initialise the weights before the first run(); STARTED comes at the start of each",
        )


def _versions(engine: Engine) -> list[int]:
    return [one._version for root in engine.modules.values() for one in root.parameters()]
