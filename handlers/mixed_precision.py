"""Mixed precision: autocast to bfloat16 or float16, the latter with gradient scaling."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.acts import Override
from signalfire.checks import check_choice, check_int, check_number

from ._common.ranks import LOOK

__all__ = ["MixedPrecision"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision(Handler):
    """Runs the forward and the loss under autocast; with float16 the loss is scaled so that small gradients survive.

    Each update has a GradScaler of its own. Its scale moves once for each complete window, and a step whose gradients are
    not finite is skipped, which costs one synchronisation with the device for each window, together with `NonFiniteGuard`.
    Clipping and measuring happen on unscaled gradients. On an engine that evaluates there is only the autocast. The modules
    stay in their own type; `TruePrecision` converts them.

    The scaling cannot begin or end inside an accumulation window: what one holds that was left open between two runs is
    discarded when "fp16" is attached, detached or toggled there.

    A scale belongs to one computation of the gradients: "fp16" refuses optimizers and handlers that compute those of a step
    several times, such as LBFGS; "bf16" works with them.

    Args:
        precision: "bf16" or "fp16". bfloat16 has float32's range and needs no scaling.
        init_scale: the first scale; for fp16 only, like the rest.
        growth_factor: by what the scale grows after ``growth_interval`` windows without a skipped step.
        backoff_factor: by what it shrinks after a step that was skipped for its gradients.
        growth_interval: see growth_factor.

    Source:
        Micikevicius et al., "Mixed Precision Training" (ICLR 2018); ``torch.autocast`` and ``torch.amp.GradScaler``.

    Example:
        >>> MixedPrecision("bf16").dtype
        torch.bfloat16
    """

    decides_alike = True

    def __init__(
        self,
        precision: Literal["bf16", "fp16"] = "bf16",
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.dtype = _DTYPES[check_choice(self, "precision", precision, tuple(_DTYPES))]
        self.scaler_options = {
            "init_scale": float(check_number(self, "init_scale", init_scale, above=0)),
            "growth_factor": float(check_number(self, "growth_factor", growth_factor, above=1)),
            "backoff_factor": float(check_number(self, "backoff_factor", backoff_factor, above=0, below=1)),
            "growth_interval": check_int(self, "growth_interval", growth_interval),
        }
        self.scalers: dict[str, torch.amp.GradScaler] = {}
        scaled = precision == "fp16"
        self.scaling = Events.LOSS_COMPUTED if scaled else None
        self.unscaling = Events.GRADIENTS_READY if scaled else None
        self.updating = Events.OPTIMIZER_STEP_COMPLETED if scaled else None
        self._autocast: torch.autocast | None = None

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Override.PRECISION, by=self)
        if self.scaling is not None and engine.training:
            engine.overrides.compute_gradients_once(by=self)
            _discard_windows(engine)

    def detached(self, engine: Engine) -> None:
        if self.scaling is not None:
            _discard_windows(engine)

    @on(Events.STARTED, phase=Phase.PREPARE)
    def prepare(self, engine: Engine) -> None:
        """Choose the device's autocast, and give each update its scaler."""
        device = engine.device.type
        self._autocast = torch.autocast(device, dtype=self.dtype)
        if self.scaling is not None and engine.training:
            for update in engine.updates:
                if update.window.kept is not None:
                    raise ValueError(
                        f"{self.name!r}: the {type(update.optimizer).__name__} of update {update.name!r} computes its gradients "
                        "several times in a step, which their scaling for fp16 does not allow; use MixedPrecision('bf16')"
                    )
                if update.name not in self.scalers:
                    scaler = torch.amp.GradScaler(device, **self.scaler_options)  # type: ignore[arg-type]
                    # A scaler refuses to unscale before it has scaled something; but of several processes, one may have nothing
                    # to learn from at first, and gets its gradients from the others.
                    scaler.scale(torch.zeros((), device=engine.device))
                    self.scalers[update.name] = scaler

    @on(Events.FORWARD_STARTED)
    def cast(self, engine: Engine) -> None:
        """Autocast until the loss is computed; the backward runs in the types that the forward chose."""
        assert self._autocast is not None
        engine.regions.enter(self._autocast)

    @on("scaling", phase=Phase.FINALIZE)
    def scale(self, engine: Engine) -> None:
        """Scale the loss that the backward starts from; the reported one stays as it is."""
        if engine.training:
            update = engine.state.update
            update.backward_loss = self.scalers[update.name].scale(update.backward_loss)

    @on("unscaling", phase=Phase.PREPARE)
    def unscale(self, engine: Engine) -> None:
        """Unscale the window's gradients before anybody measures or clips them."""
        update = engine.state.update
        assert update.optimizer is not None
        self.scalers[update.name].unscale_(update.optimizer)

    @on("unscaling", phase=Phase.FINALIZE)
    def veto(self, engine: Engine) -> None:
        """Skip a step whose gradients overflowed, once it is known."""
        update = engine.state.update
        update.ask(partial(_veto, update), *self._found(update).values())

    @on("unscaling", phase=Phase.FINALIZE, rank=LOOK)
    def look(self, engine: Engine) -> None:
        """Read what was asked. This is the window's one synchronisation."""
        engine.state.update.look()

    @on("updating", phase=Phase.PREPARE)
    def adapt(self, engine: Engine) -> None:
        """Let the scale follow, also when somebody skipped the step."""
        update = engine.state.update
        if self._found(update):
            self.scalers[update.name].update()
        else:  # no parameter of the window had a gradient: there is nothing to adapt to
            self.scalers[update.name]._per_optimizer_states.clear()

    def _found(self, update: UpdateState) -> Mapping[Any, Any]:
        assert update.optimizer is not None
        found: Mapping[Any, Any] = self.scalers[update.name]._found_inf_per_device(update.optimizer)
        return found

    @on(Events.ENDED)
    def finish(self, engine: Engine) -> None:
        """A run that ended inside a window leaves scalers that still wait for their update."""
        for scaler in self.scalers.values():
            scaler._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any]:
        return {name: scaler.state_dict() for name, scaler in self.scalers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            self.scalers = {}
        if state and set(state) != set(self.scalers):
            raise ValueError(
                f"{self.name!r}: the state has gradient scalers for {sorted(state)}, but here there are scalers for "
                f"{sorted(self.scalers)}; go on with the precision of the saved run"
            )
        for name, saved in state.items():
            self.scalers[name].load_state_dict(dict(saved))


def _veto(update: UpdateState, *overflowed: bool) -> None:
    if any(overflowed):
        update.skip("the scaled gradients are not finite")


def _discard_windows(engine: Engine) -> None:
    """What an open window holds is scaled, or it is not; a step on gradients of both kinds would ruin the weights."""
    for update in engine.updates:
        if update.window.filled:
            update.discard()
