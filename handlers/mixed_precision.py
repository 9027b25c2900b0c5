"""Mixed precision: autocast to bfloat16 or float16, the latter with gradient scaling."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import Capture, DeviceFeature, check_choice, check_int, check_number
from signalfire.core.update import needs_closure

from ._common.claims import PRECISION
from ._common.ranks import READ_FLAGS

__all__ = ["MixedPrecision"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OTHER_NAMES: dict[Any, str] = {
    torch.bfloat16: "bf16", "bfloat16": "bf16", "bf16-mixed": "bf16",
    torch.float16: "fp16", "float16": "fp16", "half": "fp16", "16-mixed": "fp16", "fp16-mixed": "fp16",
}  # fmt: skip


class MixedPrecision(Handler):
    """Mixed-precision training (AMP): autocast to bfloat16 or float16, the latter with gradient scaling.

    The forward and the loss run under autocast. With float16, each update has its own GradScaler, which keeps small gradients
    from underflowing and is updated once per accumulation window. A step with non-finite gradients is skipped, at the cost of
    one synchronization with the device per window, shared with `NonFiniteGuard`. Gradients are unscaled before they are clipped
    and measured. An evaluator uses only autocast, and inherits it from a trainer that runs the evaluator (`Validation`,
    `Engine.evaluate`). The modules keep their dtype; `TruePrecision` converts them.

    Autocast computes losses such as cross_entropy in float32. For a custom loss, disable autocast inside the loss: ``with
    torch.autocast(output.device.type, enabled=False): return my_loss(output.float(), target)``.

    Scaled and unscaled gradients cannot be mixed in one accumulation window, so a window left open between two runs is discarded
    when "fp16" is attached, detached or toggled.

    If a handler computes the gradients of a step several times, as `SharpnessAwareMinimization` does, all of them are unscaled,
    and the step is skipped if one is not finite. Optimizers with a closure, such as LBFGS, raise an error with "fp16", because
    their step cannot be interrupted; use "bf16" with them.

    Args:
        precision: Data type of autocast: "bf16" or "fp16", the dtype torch.bfloat16 or torch.float16, its name, or Lightning's
            "bf16-mixed" and "16-mixed". bfloat16 has float32's range and needs no scaling. CUDA GPUs older than Ampere emulate
            bfloat16, which is slow; use "fp16" there. If a GPU cannot even emulate it, torch raises an error at the first
            forward.
        init_scale: Initial scale; for fp16 only, like the arguments below.
        growth_factor: Factor that the scale is multiplied by after ``growth_interval`` windows without a skipped step.
        backoff_factor: Factor that the scale is multiplied by after a step that is skipped because of its gradients.
        growth_interval: Number of windows without a skipped step before the scale grows.

    Source:
        Micikevicius et al., "Mixed Precision Training" (ICLR 2018); ``torch.autocast`` and ``torch.amp.GradScaler``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(MixedPrecision("bf16"))
        >>> @engine.on(Events.BACKWARD_COMPLETED)
        ... def show(engine):
        ...     weight = engine.model.weight
        ...     print(engine.state.update.output.dtype, weight.dtype, weight.grad.dtype)
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1)
        torch.bfloat16 torch.float32 torch.float32
    """

    by_shard = True
    decides_alike = True
    device_features = frozenset({DeviceFeature.AUTOCAST, DeviceFeature.SCALER})

    other_names = {
        "dtype": 'precision="bf16"',
        "mixed_precision": 'precision="bf16"',
    }

    def __init__(
        self,
        precision: Literal["bf16", "fp16"] | str | torch.dtype = "bf16",
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(precision, str) and precision.endswith("-true"):
            raise ValueError(
                f"MixedPrecision(precision={precision!r}): names that end in '-true' stand for converted weights, "
                f"but MixedPrecision keeps the weights' dtype; use TruePrecision({precision!r}) instead"
            )
        if isinstance(precision, str | torch.dtype):
            precision = _OTHER_NAMES.get(precision, precision)
        precision = check_choice(self, "precision", precision, tuple(_DTYPES))
        self.dtype = _DTYPES[precision]
        # Whether the step is made depends on flags that are read from the device.
        self.capture = Capture.FORBIDDEN if self.dtype is torch.float16 else Capture.INSIDE
        self.scaler_options = {
            "init_scale": float(check_number(self, "init_scale", init_scale, above=0)),
            "growth_factor": float(check_number(self, "growth_factor", growth_factor, above=1)),
            "backoff_factor": float(check_number(self, "backoff_factor", backoff_factor, above=0, below=1)),
            "growth_interval": check_int(self, "growth_interval", growth_interval),
        }
        self.scalers: dict[str, torch.amp.GradScaler] = {}
        scaled = precision == "fp16"
        if not scaled:
            self.device_features -= {DeviceFeature.SCALER}
        self.loss_event = Events.LOSS_COMPUTED if scaled else None
        self.gradients_event = Events.GRADIENTS_READY if scaled else None
        self.step_event = Events.OPTIMIZER_STEP_COMPLETED if scaled else None
        self._autocast: torch.autocast | None = None
        self._device = "cpu"

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(PRECISION, by=self)
        if self.loss_event is not None and engine.training:
            _discard_windows(engine)

    def detached(self, engine: Engine) -> None:
        if self.loss_event is not None:
            _discard_windows(engine)

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["device", "optimizer", "scale"], writes=[])
    def prepare(self, engine: Engine) -> None:
        """Create the autocast for the device, and a scaler for each update."""
        self._device = device = engine.device.type
        self._autocast = torch.autocast(device, dtype=self.dtype)
        if self.loss_event is not None and engine.training:
            for update in engine.updates:
                if update.optimizer is not None and needs_closure(update.optimizer):
                    kind = type(update.optimizer).__name__
                    raise ValueError(
                        f"{self.name!r}: the {kind} of update {update.name!r} computes gradients inside its step, with "
                        "a closure, but gradient scaling does not support closures; use MixedPrecision('bf16')"
                    )
                if update.name not in self.scalers:
                    scaler = torch.amp.GradScaler(device, **self.scaler_options)  # type: ignore[arg-type]
                    # A scaler raises an error if it unscales before it has scaled a loss; a rank without a batch has no loss,
                    # and gets its gradients from the other ranks.
                    scaler.scale(torch.zeros((), device=engine.device))
                    self.scalers[update.name] = scaler

    @on(Events.FORWARD_STARTED, reads=[], writes=["precision"])
    def autocast(self, engine: Engine) -> None:
        """Autocast until the loss is computed; the backward runs in the dtypes of the forward."""
        if engine is not self.engine or self._autocast is None or torch.is_autocast_enabled(self._device):
            # In an evaluation: the training may be in its own autocast now, which cannot be entered twice, or not have begun.
            engine.regions.enter(torch.autocast(engine.device.type, dtype=self.dtype))
            return
        engine.regions.enter(self._autocast)

    @on("loss_event", phase=Phase.FINALIZE, reads=["loss"], writes=["loss", "scale"])
    def scale(self, engine: Engine) -> None:
        """Scale the loss that the backward starts from; the reported loss stays unscaled."""
        if engine.training:
            update = engine.state.update
            update.backward_loss = self.scalers[update.name].scale(update.backward_loss)

    @on(
        "gradients_event", phase=Phase.PREPARE, reads=["scale", "gradients", "optimizer"], writes=["gradients", "scale"]
    )
    def unscale(self, engine: Engine) -> None:
        """Unscale the window's gradients before they are measured or clipped."""
        update = engine.state.update
        assert update.optimizer is not None
        if update.evaluation:  # the gradients were computed before in this step, and were finite
            self.scalers[update.name]._per_optimizer_states.clear()
        self.scalers[update.name].unscale_(update.optimizer)

    @on("gradients_event", phase=Phase.FINALIZE, reads=["scale", "optimizer"], writes=["flags"])
    def check_overflow(self, engine: Engine) -> None:
        """Skip the step if its gradients overflowed, as soon as the flags are read."""
        update = engine.state.update
        update.read_later(partial(_skip_overflow, update), *self._found(update).values())

    @on("gradients_event", phase=Phase.FINALIZE, rank=READ_FLAGS, reads=["processes", "flags"], writes=["step"])
    def read_flags(self, engine: Engine) -> None:
        """Read all flags from the device: the window's only synchronization."""
        engine.state.update.read_flags()

    @on("step_event", phase=Phase.PREPARE, reads=["optimizer"], writes=["scale"])
    def update_scale(self, engine: Engine) -> None:
        """Update the scale, even after a skipped step."""
        update = engine.state.update
        if self._found(update):
            self.scalers[update.name].update()
        else:  # no parameter had a gradient in this window, so the scale stays
            self.scalers[update.name]._per_optimizer_states.clear()

    def _found(self, update: UpdateState) -> Mapping[Any, Any]:
        assert update.optimizer is not None
        found: Mapping[Any, Any] = self.scalers[update.name]._found_inf_per_device(update.optimizer)
        return found

    @on(Events.ENDED, reads=[], writes=["scale"])
    def clear_scalers(self, engine: Engine) -> None:
        """Clear scalers that still expect an update, after a run that ended inside a window."""
        for scaler in self.scalers.values():
            scaler._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any]:
        return {name: scaler.state_dict() for name, scaler in self.scalers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            self.scalers = {}
        if state and set(state) != set(self.scalers):
            raise ValueError(
                f"{self.name!r}: the saved state has gradient scalers for the updates {sorted(state)}, but this run "
                f"has gradient scalers for {sorted(self.scalers)}; resume with the precision of the saved run"
            )
        for name, saved in state.items():
            self.scalers[name].load_state_dict(dict(saved))


def _skip_overflow(update: UpdateState, *overflowed: bool) -> None:
    if any(overflowed):
        update.skip("the scaled gradients are not finite")


def _discard_windows(engine: Engine) -> None:
    """Discard open windows: a step on scaled and unscaled gradients together would ruin the weights."""
    for update in engine.updates:
        if update.window.filled:
            update.discard()
