"""cuDNN benchmark mode: tries the convolution algorithms and uses the fastest."""

from __future__ import annotations

import torch

from signalfire import Engine, Events, Handler, Phase, on

from ._common.claims import ALGORITHMS
from ._common.ranks import AFTER_ALL, BEFORE_ALL

__all__ = ["Benchmark"]


class Benchmark(Handler):
    """Turns on cuDNN's autotuner (``torch.backends.cudnn.benchmark``), so that convolutions use the fastest algorithm.

    Each new input shape requires new trials, so this pays off if all batches have the same shape. To drop a smaller last
    batch, use ``DataLoader(drop_last=True)``. The fastest algorithm, and therefore the results, may differ between runs, so
    attaching `Deterministic` as well raises an error. On a CPU, the handler does nothing. The flag is restored after the run,
    even if the run fails.

    Source:
        "Performance Tuning Guide" of PyTorch, "Enable cuDNN auto-tuner".

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(Benchmark())
        >>> @engine.on(Events.ITERATION_COMPLETED)
        ... def show(engine):
        ...     print("during the run:", torch.backends.cudnn.benchmark)
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1)
        during the run: True
        >>> torch.backends.cudnn.benchmark
        False
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._before: bool | None = None  # only during a run

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(ALGORITHMS, by=self)

    @on(Events.STARTED, phase=Phase.PREPARE, rank=BEFORE_ALL, reads=[], writes=[])
    def begin(self, engine: Engine) -> None:
        """Set the flag."""
        self._before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True

    @on(Events.ENDED, phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def end(self, engine: Engine) -> None:
        """Restore the flag."""
        if self._before is not None:
            torch.backends.cudnn.benchmark = self._before
            self._before = None
