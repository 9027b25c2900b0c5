"""Weights that functions load or change beside the engine: the model's own, not copied, and those of a run that continues."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..authoring.devices import widened
from ..authoring.functions import is_users
from ..core.events import Events
from ..core.part import Reference
from ..distributed.sharded import is_sharded, local_part

if TYPE_CHECKING:
    from ..core.connection import Connection
    from ..core.signals import Signal
    from ..engine import Engine

__all__ = ["OwnLoads", "note_taken", "watch_started"]


class OwnLoads:
    """Looks at what is loaded into the modules of an engine during a run.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        reference, taken = Reference(engine), _Taken()
        self._hooks: list[Any] = []
        roots = engine.modules.values() if engine.training else ()
        for root in (one for one in roots if not isinstance(one, torch.jit.ScriptModule)):  # which refuses hooks
            look = partial(_look_safely, reference, taken)
            self._hooks.append(root.register_load_state_dict_pre_hook(look))
            self._hooks.append(root._register_state_dict_hook(partial(note_taken, reference, taken)))

    def stop(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()


class _Taken:
    """The tensors of the states that were taken in this iteration; copied with the hooks of the model, it knows none."""

    def __init__(self) -> None:
        self._iteration = -1
        self._tensors: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def at(self, engine: Engine) -> weakref.WeakValueDictionary[int, Tensor]:
        """Those of the present iteration, by id."""
        if self._iteration != engine.state.iteration:
            self._tensors.clear()
        self._iteration = engine.state.iteration
        return self._tensors

    def holds(self, engine: Engine, tensors: Iterable[Tensor]) -> bool:
        """Whether all of the tensors were taken in the present iteration."""
        taken = self.at(engine)
        return all(taken.get(id(one)) is one for one in tensors)

    def __reduce__(self) -> tuple[type[_Taken], tuple[()]]:
        return _Taken, ()


def note_taken(reference: Reference, taken: _Taken, module: nn.Module, state: Mapping[str, Any], *rest: Any) -> None:
    """Note what a state holds that is taken of a module: a hook of its ``state_dict``."""
    if (engine := reference()) is not None:
        taken.at(engine).update((id(one), one) for one in state.values() if isinstance(one, Tensor))


def _look_safely(
    reference: Reference, taken: _Taken, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any
) -> None:
    if (engine := reference()) is not None:
        engine.findings.look(_look, engine, taken, module, state, prefix)


def _look(engine: Engine, taken: _Taken, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    own = {prefix + name: one for name, one in module.named_parameters() if not is_sharded(one) and not one.is_meta}
    given = {name: state[name] for name in own if isinstance(state.get(name), Tensor)}
    # As of own = model.state_dict(), entries may be changed in place, or replaced, before it is loaded.
    if taken.holds(engine, given.values()) or any(one.is_meta or is_sharded(one) for one in given.values()):
        return
    if all(one.data_ptr() == own[name].data_ptr() for name, one in given.items() if one.numel()):
        engine.findings.report(
            "W67",
            "load_state_dict() received the model's own tensors. state_dict() returns references instead of "
            "copies, so these tensors have changed with the model",
            "keep a copy: copy.deepcopy(model.state_dict()); or attach EarlyStopping(restore_best=True), or a Checkpoint",
        )


def watch_started(engine: Engine) -> None:
    """Have functions looked at that change the weights at the start of a run that continues an earlier one."""
    if engine.training and engine.state.iteration > 0 and not engine.snapshots.has_loaded_state:
        signal = engine.signal(Events.STARTED)
        for one in signal.connections:
            if is_users(one.receiver) and one.owner is None:
                _watch(signal, one)
        signal.replan()


def _watch(signal: Signal, connection: Connection) -> None:
    plain = connection.call
    own, of = weakref.ref(connection), weakref.ref(signal)  # they hold what follows

    def call(engine: Engine, **kwargs: Any) -> Any:
        connection, signal = own(), of()
        if connection is not None and signal is not None and connection.call is call:
            connection.call = plain
            signal.replan()
        before = engine.findings.look(_sums, engine)
        returned = plain(engine, **kwargs)
        engine.findings.look(_report_changed, engine, repr(connection), before)
        return returned

    connection.call = call


def _report_changed(engine: Engine, function: str, before: dict[Tensor, tuple[float, float]]) -> None:
    now = _sums(engine)
    both = [(before[one], now[one]) for one in before.keys() & now.keys()]  # a new layer replaces what it was made of
    if any(abs(one - other) > _ROUNDING * size for (one, size), (other, _) in both):
        engine.findings.report(
            "W68",
            f"the run continues after iteration {engine.state.iteration}, and a function connected to STARTED "
            f"({function}) overwrites the trained weights",
            "initialize the weights before the first run(), because each run() emits STARTED",
            key=function,
        )


_ROUNDING = 1e-6


def _sums(engine: Engine) -> dict[Tensor, tuple[float, float]]:
    """The sum of the values of each parameter that an optimizer trains, and of their sizes."""
    found: dict[Tensor, tuple[float, float]] = {}
    for parameter in (p for update in engine.updates for p in update.parameters if not p.is_meta):
        own = local_part(parameter.detach())
        values = widened(torch.view_as_real(own) if own.is_complex() else own).nan_to_num()
        found[parameter] = float(values.sum()), float(values.abs().sum())
    return found
