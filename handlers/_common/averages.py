"""What EMA and SWA have in common: averages of the weights, and their use in place of the weights. Not a handler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.acts import Override
from signalfire.distributed import is_sharded, local_part, reshard, spread_like

__all__ = ["AveragedWeights", "Averages"]


class AveragedWeights(Handler):
    """Holds averages of the weights, and puts them in place of the weights for evaluation and export.

    Args:
        average_buffers: whether floating-point buffers are averaged like weights; otherwise all of them are copied.
        update: the name of the update that it belongs to; the first by default. Averaged are all of the engine's modules.

    Attributes:
        averages: the averages.
        count: how often they were updated.
    """

    trains = True

    def __init__(self, *, average_buffers: bool, update: str | None, name: str | None) -> None:
        super().__init__(name=name)
        self.update = update
        self._averages = Averages(average_buffers=average_buffers)

    @property
    def count(self) -> int:
        return self._averages.count

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)
        engine.overrides.claim(Override.EVALUATED_WEIGHTS, by=self)

    @on(Events.STARTED)
    def look(self, engine: Engine) -> None:
        """Find the parameters and buffers, now that the model is set up."""
        self._averages.bind(engine, self.name)

    @on(Events.EVALUATION_STARTED | Events.CHECKPOINT_SAVING, phase=Phase.PREPARE)
    def swap(self, engine: Engine) -> None:
        """Put the averages in place of the weights until the evaluation, or the export, is over."""
        if not engine.running:
            self._averages.bind(engine, self.name)
        engine.regions.enter(self._averages.in_place())

    @on(Events.WEIGHTS_LOADED)
    def stand_back(self, engine: Engine) -> None:
        """The weights that were put in place are the ones to be used, until there is another average."""
        self._averages.overruled = True

    @on(Events.ENDED)
    def let_go(self, engine: Engine) -> None:
        """Hold nothing of the model beyond the run."""
        self._averages.release()

    def state_dict(self) -> dict[str, Any]:
        return self._averages.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages.load_state_dict(state)
        if state["count"] and self.engine is not None and self.engine.running:
            self._averages.bind(self.engine, self.name)


# A parameter or buffer: its name, and the module's dict that holds it, since a module may put another tensor in its place.
_Place = tuple[str, Any, str]


class Averages:
    """Averages of all parameters and buffers of an engine's modules, by name.

    Attributes:
        values: the averages; empty before the first update.
        count: the number of updates.
    """

    def __init__(self, *, average_buffers: bool) -> None:
        self.average_buffers = average_buffers
        self.values: dict[str, Tensor] = {}
        self.count = 0
        self.swapped = False
        self.overruled = False  # by weights that were put in place since the last update
        self.release()

    def release(self) -> None:
        """Forget the modules."""
        self._roots: list[nn.Module] = []
        self._moving: list[_Place] = []
        self._copied: list[_Place] = []
        self._direct = False  # whether all can be followed as they are, which spares half of the time

    def bind(self, engine: Engine, owner: str) -> None:
        """Find the tensors to be averaged and those to be copied, and place loaded averages where these are."""
        self.release()
        self._roots = list(engine.modules.values())
        reshard(self._roots)
        live: dict[str, Tensor] = {}
        seen: set[int] = set()
        for root, module in engine.modules.items():
            for path, part in module.named_modules(prefix=root):
                for tensors, averaged in ((part._parameters, True), (part._buffers, self.average_buffers)):
                    for key, tensor in tensors.items():
                        if tensor is None or id(tensor) in seen:
                            continue
                        seen.add(id(tensor))
                        live[f"{path}.{key}"] = tensor
                        fractional = tensor.is_floating_point() or tensor.is_complex()
                        places = self._moving if averaged and fractional else self._copied
                        places.append((f"{path}.{key}", tensors, key))
        if self.values:
            different = sorted(
                name
                for name in live.keys() | self.values.keys()
                if name not in live or name not in self.values or live[name].shape != self.values[name].shape
            )
            if different:
                raise ValueError(
                    f"{owner!r}: its averages do not fit the modules: they differ in {', '.join(different)}"
                )
            self.values = {name: spread_like(self.values[name].to(t.device), t) for name, t in live.items()}
        self._direct = not any(is_sharded(t) or t.dtype in _HALF for t in live.values())

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move the averages towards the tensors by a share ``weight`` of the way; the first time, copy them."""
        moving, copied = _tensors(self._moving), _tensors(self._copied)
        if not self.values:
            self.values = {place[0]: _wide(t).clone() for place, t in zip(self._moving, moving, strict=True)}
            self.values |= {place[0]: t.detach().clone() for place, t in zip(self._copied, copied, strict=True)}
        else:
            if moving:
                direct = self._direct and not any(t.dtype in _HALF for t in moving)  # converted since
                followed = moving if direct else [local_part(_wide(t)) for t in moving]
                torch._foreach_lerp_(self._parts(self._moving), followed, weight)
            if copied:
                torch._foreach_copy_(self._parts(self._copied), [local_part(t) for t in copied])
        self.count += 1
        self.overruled = False

    def _parts(self, places: list[_Place]) -> list[Tensor]:
        values = self.values
        if self._direct:
            return [values[place[0]] for place in places]
        return [local_part(values[place[0]]) for place in places]

    @contextmanager
    def in_place(self, *, anyway: bool = False) -> Iterator[None]:
        """Hold the averages in place of the tensors; inside of itself, before the first update and if overruled, do nothing.

        Args:
            anyway: also if overruled.
        """
        if self.swapped or (self.overruled and not anyway) or not self.values:
            yield
            return
        places = self._moving + self._copied
        reshard(self._roots)
        tensors = _tensors(places)
        kept = [local_part(tensor.detach()).clone() for tensor in tensors]
        self.swapped = True
        try:
            # Through `data`, autograd does not count it as a change: what a backward still needs is back in time.
            torch._foreach_copy_([local_part(tensor.data) for tensor in tensors], self._parts(places))
            yield
        finally:
            reshard(self._roots)
            for (_, holder, key), tensor in zip(places, tensors, strict=True):
                if holder[key] is not tensor:
                    holder[key] = tensor
            torch._foreach_copy_([local_part(tensor.data) for tensor in tensors], kept)
            self.swapped = False

    @torch.no_grad()
    def take_buffers(self) -> None:
        """Take over the buffers as they are now."""
        for name, holder, key in self._copied:
            self.values[name].copy_(holder[key])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "averages": dict(self.values), "overruled": self.overruled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.overruled = state["count"], bool(state.get("overruled", False))
        self.values = {name: tensor.detach().clone() for name, tensor in state["averages"].items()}

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a handler belongs to no model."""
        return vars(self) | {"_roots": [], "_moving": [], "_copied": [], "swapped": False}


def _tensors(places: list[_Place]) -> list[Tensor]:
    return [holder[key] for _, holder, key in places]


_HALF = (torch.float16, torch.bfloat16)


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in _HALF else tensor
