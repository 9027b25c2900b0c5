"""True precision: converts the modules and the batches to float16, bfloat16 or float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from signalfire import Engine, Events, Finding, Handler, Phase, on
from signalfire.authoring import Capture, DeviceFeature, check_choice, map_leaves, refusal
from signalfire.findings.model_rules import half_precision_finding

from ._common.claims import PRECISION
from ._common.ranks import CONVERT

__all__ = ["TruePrecision"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_OTHER_NAMES: dict[Any, str] = {
    torch.bfloat16: "bf16", "bfloat16": "bf16", "bf16-true": "bf16",
    torch.float16: "fp16", "float16": "fp16", "half": "fp16", "16-true": "fp16", "fp16-true": "fp16",
    torch.float64: "fp64", "float64": "fp64", "double": "fp64", "64-true": "fp64", "fp64-true": "fp64", "64": "fp64", 64: "fp64",
}  # fmt: skip


class TruePrecision(Handler):
    """Trains in pure float16, bfloat16 or float64: converts the modules and every batch to one dtype.

    Half precision takes half the memory of float32, even for optimizer states, but lacks the safety of autocast: small steps are
    lost to rounding, and float16 overflows, because nothing is scaled. `MixedPrecision` keeps float32 weights. "fp64" is for
    checking numerics. The modules are converted before optimizers are built; parameters stay the same objects, so an optimizer
    built earlier keeps working.

    The conversion rounds the weights. Neither the end of the run nor detaching undoes it; `restore` converts the tensors back to
    their original dtypes. Tensors created in the forward must have the dtype of its input.

    Args:
        precision: Data type: "bf16", "fp16" or "fp64"; also a dtype, such as torch.float64, its name, or Lightning's "bf16-true",
            "16-true" and "64-true". An evaluator that the trainer runs (`Validation`, `Engine.evaluate`) inherits it; one that is
            run directly needs its own TruePrecision for its batches.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(TruePrecision("bf16"))
        >>> @engine.on(Events.BACKWARD_COMPLETED)
        ... def show(engine):
        ...     weight = engine.model.weight
        ...     print(engine.state.batch[0].dtype, weight.dtype, weight.grad.dtype)
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1)
        torch.bfloat16 torch.bfloat16 torch.bfloat16
    """

    by_shard = True
    capture = Capture.INSIDE
    device_features = frozenset({DeviceFeature.FLOAT64})

    def __init__(
        self, precision: Literal["bf16", "fp16", "fp64"] | str | torch.dtype, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        if isinstance(precision, str) and precision.endswith("-mixed"):
            raise ValueError(
                f"TruePrecision(precision={precision!r}): names that end in '-mixed' mean autocast, but "
                f"TruePrecision converts the weights; use MixedPrecision({precision!r}) instead"
            )
        if isinstance(precision, str | torch.dtype | int):
            precision = _OTHER_NAMES.get(precision, precision)
        self.dtype = _DTYPES[check_choice(self, "precision", precision, tuple(_DTYPES))]
        if self.dtype is not torch.float64:
            self.device_features = frozenset()
        self._before: dict[tuple[str, str], torch.dtype] = {}  # original dtypes by names of module and tensor

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(PRECISION, by=self)

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report weights that will be trained in float16."""
        trained = [p for root in engine.modules.values() for p in root.parameters() if p.requires_grad]
        if engine.training and self.dtype is torch.float16 and any(p.dtype is not torch.float16 for p in trained):
            yield half_precision_finding(f"{self.name!r} converts the weights to float16", [self.name])

    @on(
        Events.MODEL_SETUP,
        phase=Phase.PREPARE,
        rank=CONVERT,
        reads=["device", "modules", "optimizer"],
        writes=["precision"],
    )
    def convert(self, engine: Engine) -> None:
        """Convert parameters and buffers in place, and the states of optimizers that were built earlier."""
        converted = False
        if (refused := refusal(engine.device, *self.device_features)) is not None:  # before torch's error
            raise ValueError(f"{self.name!r}: {refused}")
        for name, module in engine.modules.items():
            for key, tensor in _tensors_of(module).items():
                if tensor.is_complex():
                    raise ValueError(
                        f"{self.name!r}: {key!r} of the model {name!r} is complex and cannot be converted to "
                        f"{self.dtype}; store the real and imaginary parts separately, or use MixedPrecision"
                    )
                if tensor.is_floating_point() and tensor.dtype != self.dtype:
                    self._before.setdefault((name, key), tensor.dtype)
                    converted = True
            module.to(self.dtype)
        if converted:  # an evaluator that inherits this handler has no optimizers
            _convert_optimizers(self.engine or engine)

    @on(Events.GET_BATCH_COMPLETED, phase=Phase.PREPARE, reads=["batch"], writes=["precision"])
    def convert_batch(self, engine: Engine) -> None:
        """Convert the batch's floating-point tensors, before or after they are moved to a device."""
        engine.state.batch = map_leaves(self._converted, engine.state.batch)

    def restore(self, engine: Engine) -> None:
        """Convert modules and optimizers back to their original dtypes; the rounding stays.

        Raises:
            RuntimeError: During a run.
        """
        if engine.running:
            raise RuntimeError(f"{self.name!r}: restore() was called during a run; call it after the run")
        for name, module in engine.modules.items():
            for key, tensor in _tensors_of(module).items():
                if (before := self._before.get((name, key))) is not None:
                    tensor.data = tensor.data.to(before)
                    if tensor.grad is not None:
                        tensor.grad = tensor.grad.to(before)
        self._before.clear()
        _convert_optimizers(engine)

    def _converted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if isinstance(value, PackedSequence):
            return value.to(self.dtype) if value.data.is_floating_point() else value
        return value


def _tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _convert_optimizers(engine: Engine) -> None:
    for update in engine.updates:
        if update.optimizer is not None and update.optimizer.state:
            update.optimizer.load_state_dict(
                update.optimizer.state_dict()
            )  # loading converts to the parameters' dtypes
