"""Precision of float32 matrix products: full float32, or faster TensorFloat-32 (TF32) or bfloat16."""

from __future__ import annotations

from typing import Literal

import torch

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Claim, check_choice
from signalfire.authoring.versions import precisions_of_products

from ._common.ranks import AFTER_ALL, BEFORE_ALL

__all__ = ["Precision32"]


class Precision32(Handler):
    """Sets the precision of float32 matrix products during the run: full float32, or faster TensorFloat-32 (TF32) or bfloat16.

    Weights and activations stay in float32; only the products inside a matrix multiplication are rounded. With "high", Ampere
    and later GPUs multiply in TensorFloat-32 (10 bits of mantissa instead of 23), which is several times faster. "medium" also
    allows bfloat16 (7 bits), which CPUs with bfloat16 instructions use. "highest" is full float32, torch's default. cuDNN
    convolutions are not affected; they use TensorFloat-32 unless ``torch.backends.cudnn.conv.fp32_precision`` is set.

    The setting applies to the whole process, including evaluations inside the run and other engines. It is restored after the
    run, even if the run fails, and all of torch's getters return their earlier values.

    Args:
        precision: Precision of the products: "high", "medium" or "highest", as in ``torch.set_float32_matmul_precision``.

    Raises:
        RuntimeError: At the start of a run, if the process has already set ``fp32_precision`` of ``torch.backends``. The two
            torch interfaces exclude each other: ``torch.get_float32_matmul_precision``, which torch.compile calls, would then
            raise an error.

    Source:
        "TensorFloat-32 (TF32) on Ampere (and later) devices" in PyTorch's documentation.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(Precision32("high"))
        >>> precisions = [torch.get_float32_matmul_precision()]
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def look(engine):
        ...     precisions.append(torch.get_float32_matmul_precision())
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1)
        >>> [*precisions, torch.get_float32_matmul_precision()]
        ['highest', 'high', 'highest']
    """

    def __init__(self, precision: Literal["high", "medium", "highest"], *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.precision = check_choice(self, "precision", precision, ("highest", "high", "medium"))
        self._before: tuple[str, dict[str, str]] | None = None  # only during a run

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("the precision of float32 matrix products"), by=self)

    @on(Events.STARTED, phase=Phase.PREPARE, rank=BEFORE_ALL, reads=[], writes=[])
    def begin(self, engine: Engine) -> None:
        """Set the precision."""
        backends = precisions_of_products()
        try:
            general = torch.get_float32_matmul_precision()
        except RuntimeError as error:
            found = ", ".join(f"{name}: {one.fp32_precision!r}" for name, one in backends.items())
            raise RuntimeError(
                f"{self.name!r}: this process has set fp32_precision in torch.backends ({found}), which "
                "conflicts with torch.set_float32_matmul_precision; remove the line that sets fp32_precision, or detach "
                f"{self.name!r}"
            ) from error
        self._before = general, {name: one.fp32_precision for name, one in backends.items()}
        torch.set_float32_matmul_precision(self.precision)

    @on(Events.ENDED, phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def end(self, engine: Engine) -> None:
        """Restore the precision."""
        if self._before is None:
            return
        general, precisions = self._before
        self._before = None
        # The first call leaves "ieee" behind where nothing was set before.
        torch.set_float32_matmul_precision(general)
        for name, one in precisions_of_products().items():
            one.fp32_precision = precisions[name]
