"""Base of EMA and SWA: averages of the weights, and swapping them in for evaluation and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import check_bool, check_name
from signalfire.distributed import is_sharded, local_part, reshard, spread_like
from signalfire.findings.evaluation_findings import watch_averages
from signalfire.models.modules import bare_name, named_like
from signalfire.resuming.changeable import is_own_parameter, own_parameters
from signalfire.resuming.keys import EVALUATED
from signalfire.runs.interrupts import without_interrupts

from .claims import EVALUATED_WEIGHTS

__all__ = ["AveragedWeights", "Averages"]


class AveragedWeights(Handler):
    """Averages the weights, and swaps the averages in for evaluation and export.

    Args:
        average_buffers: Whether to average floating-point buffers like weights. Otherwise all buffers are copied.
        evaluate: Whether evaluations and exports use the averages; only one of several handlers can.
        trained_only: Whether to leave out frozen parameters.
        update: Name of the update whose steps count; the first by default. All modules of the engine are averaged.

    Attributes:
        count: Number of updates of the averages.
    """

    trains = True

    def __init__(
        self,
        *,
        average_buffers: bool,
        evaluate: bool,
        update: str | None,
        name: str | None,
        trained_only: bool = False,
    ) -> None:
        super().__init__(name=name)
        self.evaluate = check_bool(self, "evaluate", evaluate)
        self.swap_event = Events.EVALUATION_STARTED | Events.CHECKPOINT_SAVING if evaluate else None
        self.update = check_name(self, "update", update)
        self._versions: list[int] | None = None  # of the parameters as the last run ended
        self._averages = Averages(average_buffers=average_buffers, trained_only=trained_only)

    @property
    def count(self) -> int:
        return self._averages.count

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)
        if self.evaluate:
            try:
                engine.overrides.claim(EVALUATED_WEIGHTS, by=self)
            except ValueError as error:
                raise ValueError(f"{error}, or set evaluate=False for one of them") from None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in place of the weights for the ``with`` block, even with ``evaluate=False``.

        Does nothing before the first average, and after weights were loaded.

        Raises:
            RuntimeError: If the handler is not attached.
        """
        if self.engine is None:
            raise RuntimeError(f"{self.name!r}: in_place() needs the modules of an engine; attach the handler first")
        if not self.engine.running:
            self._averages.bind(self.engine, self.name)
        with self._averages.in_place():
            yield

    @on(Events.STARTED, reads=["modules"], writes=[])
    def bind_tensors(self, engine: Engine) -> None:
        """Collect the parameters and buffers, now that the model is set up."""
        self._averages.bind(engine, self.name)
        watch_averages(self)

    @on("swap_event", phase=Phase.PREPARE, reads=["device", "modes", "modules"], writes=["weights", "buffers"])
    def swap(self, engine: Engine) -> None:
        """Swap the averages in until the evaluation, or the export, is complete."""
        if not engine.running or not self._averages.bound:
            if (loaded := engine.snapshots.loaded_state_of(self.name)) is not None:
                self.load_state_dict(loaded)  # before the run that puts it in place, too
            self._averages.bind(engine, self.name)
        engine.regions.enter(self._averages.in_place())

    def differs(self, parameters: set[Tensor] | None = None) -> bool:
        """Whether the engine's weights, or these of them, differ from the averages that an evaluation would use.

        Averages do not count if the weights were changed after the run, by further training or a load.
        """
        engine = self.engine
        if not self.evaluate or engine is None or (not engine.running and self._versions != _versions_of(engine)):
            return False
        return self._averages.differ_from(engine, parameters)

    @on(Events.WEIGHTS_LOADED, reads=[], writes=[])
    def use_loaded_weights(self, engine: Engine) -> None:
        """Evaluate and export with the loaded weights until the next update of the averages."""
        self._averages.overruled = True

    @on(Events.ENDED, reads=["modules"], writes=[])
    def release(self, engine: Engine) -> None:
        """Drop the references to the model after the run."""
        self._averages.release()
        self._versions = _versions_of(engine)

    def parameter_copies(self) -> Mapping[str, Tensor]:
        return self._averages.values

    def evaluated_in(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """The tensors that evaluations used in place of the weights when a state was saved, by name."""
        return state["averages"] if self.evaluate and not state.get("overruled", False) else {}

    def state_dict(self) -> dict[str, Any]:
        return self._averages.state_dict() | ({} if self.evaluate else {EVALUATED: False})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages.load_state_dict(state)
        if state["count"] and self.engine is not None and self.engine.running:
            self._averages.bind(self.engine, self.name)


# A parameter or buffer: its name, and the dict and key that hold it, since a module may replace the tensor.
_Place = tuple[str, Any, str]


class Averages:
    """Averages of the parameters and buffers of an engine's modules, and of trained tensors in no module, by name.

    Buffers may change their shape or type, or be None at times; their average then restarts as a copy.

    Args:
        average_buffers: Whether to average floating-point buffers like weights. Otherwise all buffers are copied.
        trained_only: Whether to average a parameter only once it requires a gradient.

    Attributes:
        values: The averages by name; empty before the first update.
        count: Number of updates.
        swapped: Whether the averages are in place of the tensors now.
        overruled: Whether weights were loaded since the last update, so `in_place` does nothing.
    """

    def __init__(self, *, average_buffers: bool, trained_only: bool) -> None:
        self.average_buffers = average_buffers
        self.trained_only = trained_only
        self.values: dict[str, Tensor] = {}
        self.count = 0
        self.swapped = False
        self.overruled = False
        self.release()

    def release(self) -> None:
        """Drop the references to the modules."""
        self._roots: list[nn.Module] = []
        self._parameters: list[_Place] = []
        self._buffers: list[_Place] = []
        self._frozen: list[_Place] = []  # left out until they are trained
        self._layout: list[Any] | None = None  # shapes and types of the buffers, if `values` has them
        self._moving: list[_Place] = []
        self._copied: list[_Place] = []
        self._direct = False  # no tensor is sharded or of half precision: no conversion, which halves the time

    @property
    def bound(self) -> bool:
        """Whether the tensors of the modules are known: from STARTED until ENDED."""
        return bool(self._roots)

    def bind(self, engine: Engine, owner: str) -> None:
        """Collect the tensors to average and those to copy, and move loaded averages to their devices.

        Args:
            engine: The engine with the modules.
            owner: Name of the handler, for the error.

        Raises:
            ValueError: If loaded averages do not match the modules.
        """
        self.release()
        self._roots = list(engine.modules.values())
        reshard(self._roots)
        self._collect(engine)
        if self.values:
            self._take_loaded(engine, owner)
        self._group()

    def _collect(self, engine: Engine) -> None:
        seen: set[int] = set()
        averaged_before = {bare_name(name) for name in self.values}

        def add_parameter(name: str, holder: Any, key: str) -> None:
            # A frozen one is left out for as long as it does not require a gradient.
            left_out = self.trained_only and name not in averaged_before
            (self._frozen if left_out else self._parameters).append((name, holder, key))

        for root, module in engine.modules.items():
            for path, part in module.named_modules(prefix=root):
                for tensors in (part._parameters, part._buffers):
                    for key, tensor in tensors.items():
                        if tensor is not None and id(tensor) in seen:
                            continue
                        seen.add(id(tensor))
                        name = bare_name(f"{path}.{key}")
                        if tensors is part._buffers:
                            self._buffers.append((name, tensors, key))
                        elif tensor is not None:
                            add_parameter(name, tensors, key)
        own = own_parameters(engine)
        for name in own:
            add_parameter(name, own, name)

    def _take_loaded(self, engine: Engine, owner: str) -> None:
        """Check loaded averages, and move them to the devices of the tensors."""
        buffers = {name: holder.get(key) for name, holder, key in self._buffers}
        parameters = {name: holder[key] for name, holder, key in self._parameters}
        live = {name: tensor for name, tensor in (parameters | buffers).items() if tensor is not None}
        self.values = dict(named_like(live, self.values))
        waiting = self._waiting(engine)
        for name, tensor in parameters.items():
            if is_own_parameter(name):  # of a state that was saved before these were averaged
                self.values.setdefault(name, _wide(tensor).clone())
        different = self._unlike(parameters) | (live.keys() - self.values.keys())
        different |= self.values.keys() - parameters.keys() - buffers.keys() - waiting
        if different:
            raise ValueError(
                f"{owner!r}: the saved averages do not match the modules of this engine in "
                f"{', '.join(sorted(different))}; use the model of the saved run"
            )
        for name, tensor in live.items():
            value = self.values[name].to(tensor.device)
            self.values[name] = spread_like(value, tensor) if value.shape == tensor.shape else value

    def _waiting(self, engine: Engine) -> set[str]:
        """The names of averages of trained tensors in no module, which are not known before all optimizers are built."""
        if all(update.optimizer is not None for update in engine.updates):
            return set()
        return set(filter(is_own_parameter, self.values))

    def _unlike(self, parameters: Mapping[str, Tensor]) -> set[str]:
        """The names of the parameters whose averages have a different shape."""
        averaged = self.values.keys() & parameters.keys()
        return {name for name in averaged if parameters[name].shape != self.values[name].shape}

    def _group(self) -> None:
        """Find which of the current tensors are averaged, and which are copied."""
        self._moving, self._copied = [], []
        for places, averaged in ((self._parameters, True), (self._buffers, self.average_buffers)):
            for name, holder, key in places:
                if (tensor := holder.get(key)) is not None:
                    fractional = tensor.is_floating_point() or tensor.is_complex()
                    (self._moving if averaged and fractional else self._copied).append((name, holder, key))
        tensors = _tensors(self._moving + self._copied + self._frozen)
        self._direct = not any(is_sharded(t) or t.dtype in _HALF for t in tensors)

    def _follow_buffers(self, layout: list[Any]) -> None:
        """Restart with copies of the buffers whose shape or type differs from their averages, or that were None."""
        self._layout = layout
        self._group()
        if not self.values:
            return
        averaged = {name for name, *_ in self._moving}
        for (name, holder, key), kind in zip(self._buffers, layout, strict=True):
            if kind is None:
                self.values.pop(name, None)
                continue
            value, buffer = self.values.get(name), holder[key].detach()
            fitting = _wide(buffer) if name in averaged else buffer
            if value is None or (value.shape, value.dtype) != (fitting.shape, fitting.dtype):
                self.values[name] = fitting.clone()

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Interpolate the averages towards the tensors by ``weight``; the first update copies the tensors."""
        if self._frozen:
            self._begin_trained()
        if self._buffers and (layout := _layout_of(self._buffers)) != self._layout:
            self._follow_buffers(layout)
        if not self.values:
            self._begin()
        else:
            moving, copied = _tensors(self._moving), _tensors(self._copied)
            if moving:
                direct = self._direct and not any(t.dtype in _HALF for t in moving)  # may be converted since `bind`
                followed = moving if direct else [local_part(_wide(t)) for t in moving]
                torch._foreach_lerp_(self._parts(self._moving), followed, weight)
            if copied:
                torch._foreach_copy_(self._parts(self._copied), [local_part(t) for t in copied])
        self.count += 1
        self.overruled = False

    def _begin(self) -> None:
        """Begin with copies of the tensors."""
        self.values = {
            place[0]: _wide(t).clone() for place, t in zip(self._moving, _tensors(self._moving), strict=True)
        }
        copied = zip(self._copied, _tensors(self._copied), strict=True)
        self.values |= {place[0]: t.detach().clone() for place, t in copied}

    def _begin_trained(self) -> None:
        """Average the parameters that now require a gradient, starting from their current values."""
        trained = [place for place in self._frozen if place[1][place[2]].requires_grad]
        if trained:
            self._frozen = [place for place in self._frozen if not place[1][place[2]].requires_grad]
            self._parameters += trained
            self._moving += trained
            if self.values:
                self.values |= {p[0]: _wide(t).clone() for p, t in zip(trained, _tensors(trained), strict=True)}

    def _parts(self, places: list[_Place]) -> list[Tensor]:
        values = self.values
        if self._direct:
            return [values[place[0]] for place in places]
        return [local_part(values[place[0]]) for place in places]

    @contextmanager
    def in_place(self, *, anyway: bool = False) -> Iterator[None]:
        """Swap the averages in for the body, and the tensors back after it.

        Does nothing when nested, before the first update, and when overruled.

        Args:
            anyway: Swap even if overruled.
        """
        if self.swapped or (self.overruled and not anyway) or not self.values:
            yield
            return
        reshard(self._roots)
        places = [place for place in self._parameters + self._buffers if place[0] in self.values]
        held = [holder.get(key) for _, holder, key in places]
        fitting = {
            place[0]: tensor
            for place, tensor in zip(places, held, strict=True)
            if tensor is not None and _takes(tensor, self.values[place[0]])
        }
        kept = [local_part(tensor.detach()).clone() for tensor in fitting.values()]
        self.swapped = True
        try:
            self._put_in(places, fitting)
            yield
        finally:
            with without_interrupts():
                reshard(self._roots)
                for (_, holder, key), tensor in zip(places, held, strict=True):
                    if holder.get(key) is not tensor:
                        holder[key] = tensor
                torch._foreach_copy_([local_part(tensor.data) for tensor in fitting.values()], kept)
                self.swapped = False

    def _put_in(self, places: list[_Place], fitting: Mapping[str, Tensor]) -> None:
        """Copy the averages into the tensors that take them, and put them in place of the others."""
        # Through `data`, autograd does not see a change: a pending backward finds the original values again.
        averages = self._parts([place for place in places if place[0] in fitting])
        torch._foreach_copy_([local_part(tensor.data) for tensor in fitting.values()], averages)
        for name, holder, key in places:
            if name not in fitting:  # such as a buffer that has another shape since the last update
                holder[key] = self.values[name].clone()

    def differ_from(self, engine: Engine, parameters: set[Tensor] | None = None) -> bool:
        """Whether there are averages to swap in, and one of these parameters of the engine is not equal to its average."""
        if self.swapped or self.overruled or not self.values:
            return False
        return any(
            (average := self.values.get(name)) is not None
            and (is_sharded(tensor) or not torch.equal(tensor.detach().to(average), average))
            for name, tensor in _trained(engine).items()
            if parameters is None or tensor in parameters
        )

    @torch.no_grad()
    def take_buffers(self) -> None:
        """Copy the current buffers into the averages."""
        for (name, *_), tensor in zip(self._copied, _tensors(self._copied), strict=True):
            value = self.values.get(name)
            if value is not None and value.shape == tensor.shape:
                value.copy_(tensor)
            else:
                self.values[name] = tensor.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "averages": dict(self.values), "overruled": self.overruled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.overruled = state["count"], bool(state.get("overruled", False))
        self.values = {name: tensor.detach().clone() for name, tensor in state["averages"].items()}

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not bound to the modules."""
        lists: dict[str, Any] = {
            key: [] for key in ("_roots", "_parameters", "_buffers", "_frozen", "_moving", "_copied")
        }
        return vars(self) | lists | {"_layout": None, "swapped": False}


def _versions_of(engine: Engine) -> list[int]:
    """How often each parameter was changed in place; swaps of `Averages.in_place` do not count."""
    return [0 if one.is_inference() else one._version for one in _trained(engine).values()]


def _trained(engine: Engine) -> dict[str, Tensor]:
    """The parameters of the modules, and the trained tensors in none of them."""
    named = {f"{name}.{key}": p for name, root in engine.modules.items() for key, p in root.named_parameters()}
    return named | own_parameters(engine)


def _tensors(places: list[_Place]) -> list[Tensor]:
    return [holder[key] for _, holder, key in places]


def _takes(tensor: Tensor, average: Tensor) -> bool:
    """Whether an average can be copied into a tensor; otherwise the average replaces the tensor in the module."""
    if tensor.shape != average.shape:
        return False
    steps = tensor.stride() if tensor.layout is torch.strided else tensor.shape
    expanded = any(step == 0 and size > 1 for step, size in zip(steps, tensor.shape, strict=True))
    return not expanded and (tensor.dtype == average.dtype or tensor.dtype in _HALF)


def _layout_of(places: list[_Place]) -> list[Any]:
    """Shapes and types of buffers; None for those that do not exist."""
    tensors = [holder.get(key) for _, holder, key in places]
    return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]


_HALF = (torch.float16, torch.bfloat16)


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in _HALF else tensor
