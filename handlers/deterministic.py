"""Deterministic algorithms only: repeated runs are bit-identical, or an error names the operation that prevents it."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from signalfire import Engine, Events, Handler, Phase, Signal, on
from signalfire.authoring import check_bool
from signalfire.core.step import Step

from ._common.claims import ALGORITHMS
from ._common.ranks import AFTER_ALL, BEFORE_ALL

__all__ = ["Deterministic"]

_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")
"""The values of the variable with which cuBLAS is deterministic."""

_SETTINGS: Any = (
    torch.utils.deterministic
)  # a module that is replaced by an object, of which a type checker does not know

_STAGES = {
    Step.compute_loss.__code__: "in the forward or the loss, after FORWARD_STARTED",
    Step.compute_gradients.__code__: "in the backward, after BACKWARD_STARTED",
    Step.close_window.__code__: "in the optimizer's step, after OPTIMIZER_STEP_STARTED",
}
"""What the methods of the training step do besides calling receivers."""


class Deterministic(Handler):
    """Allows only deterministic algorithms, so repeated runs on one machine are bit-identical.

    An operation without a deterministic algorithm raises torch's RuntimeError, whose notes name the handler and the event.
    With ``warn_only``, the operation runs, and a warning names the handler and the event. `Seeding` controls random numbers.
    cuDNN's benchmark mode is off during the run, so attaching `Benchmark` as well raises an error. Some operations become
    slower.

    Matrix products on a GPU are deterministic only with the environment variable ``CUBLAS_WORKSPACE_CONFIG``, which CUDA reads
    when it starts. The handler sets it if CUDA has not started. Unlike in torch's default deterministic mode, memory from
    ``torch.empty`` is not filled with NaN. All settings are restored after the run, even if it fails.

    Args:
        warn_only: Whether an operation without a deterministic algorithm produces a warning instead of an error.

    Raises:
        RuntimeError: At the start of a run, if CUDA was started without the variable. Set it in the shell, or build the model on
            the CPU and let `DeviceTransfer` move it. Not raised with ``warn_only``.

    Source:
        "Reproducibility" in PyTorch's documentation.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> def loss(output, target):
        ...     # Torch has no deterministic algorithm for put.
        ...     return output.put(torch.tensor([0]), torch.zeros(1)).mean()
        >>> update = Update.supervised(loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(Deterministic())
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1)
        Traceback (most recent call last):
            ...
        RuntimeError: put_ does not have a deterministic implementation...
        >>> torch.are_deterministic_algorithms_enabled()  # as before the run
        False
    """

    def __init__(self, *, warn_only: bool = False, name: str | None = None) -> None:
        super().__init__(name=name)
        self.warn_only = check_bool(self, "warn_only", warn_only)
        self._before: _Flags | None = None  # only during a run
        self._show: Any = None  # what shows warnings outside of the run

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(ALGORITHMS, by=self)

    @on(Events.MODEL_SETUP, phase=Phase.PREPARE, rank=BEFORE_ALL, reads=[], writes=[])
    def begin(self, engine: Engine) -> None:
        """Set the flags, before a handler starts CUDA."""
        before = _Flags.now()
        if torch.cuda.is_available() and before.workspace not in _WORKSPACES:
            self._set_workspace()
        self._before = before
        torch.use_deterministic_algorithms(True, warn_only=self.warn_only)
        _SETTINGS.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        if self.warn_only:
            self._show, warnings.showwarning = warnings.showwarning, self._show_with_place

    def _set_workspace(self) -> None:
        if torch.cuda.is_initialized() and _VARIABLE not in _started_with:
            if self.warn_only:
                return  # torch warns of each matrix product
            raise RuntimeError(
                f"{self.name!r}: CUDA was initialized before {_VARIABLE} was set, so matrix products are not "
                f"deterministic; run `export {_VARIABLE}={_WORKSPACES[0]}` before you start the script, or keep the "
                "model on the CPU before run() and attach DeviceTransfer()"
            )
        _started_with[_VARIABLE] = os.environ[_VARIABLE] = _WORKSPACES[0]

    @on(Events.ENDED, phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def end(self, engine: Engine) -> None:
        """Restore the flags."""
        if self._before is None:
            return
        self._before.restore()
        if self._show is not None and warnings.showwarning == self._show_with_place:
            warnings.showwarning = self._show
        self._before = self._show = None

    def _show_with_place(self, message: Any, category: type[Warning], *place: Any, **options: Any) -> None:
        """Show a warning; one of a missing deterministic algorithm with the event and the receiver that led to it."""
        engine = self.engine
        if engine is not None and category is UserWarning and "deterministic" in str(message):
            state = engine.state
            where = f"{_stage()}, epoch {state.epoch}, iteration {state.iteration}"
            message = UserWarning(f"{message}\n{self.name!r}: {where}")
        self._show(message, category, *place, **options)


_started_with: dict[str, str] = {}  # variables that were set before CUDA has started in this process


@dataclass(frozen=True)
class _Flags:
    """The settings of the process that the handler changes."""

    enabled: bool
    warn_only: bool
    fills: bool
    benchmark: bool
    workspace: str | None

    @classmethod
    def now(cls) -> _Flags:
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            _SETTINGS.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
            os.environ.get(_VARIABLE),
        )

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self.enabled, warn_only=self.warn_only)
        _SETTINGS.fill_uninitialized_memory = self.fills
        torch.backends.cudnn.benchmark = self.benchmark
        os.environ.pop(_VARIABLE, None)
        if self.workspace is not None:
            os.environ[_VARIABLE] = self.workspace


def _stage() -> str:
    """The innermost receiver that is being called, with its event, or the stage of the training step."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is Signal.emit.__code__:
            signal, plan, receiver = (frame.f_locals[name] for name in ("self", "plan", "receiver"))
            return f"in {plan.connection(receiver)!r} at {signal.event}"
        if frame.f_code in _STAGES:
            return _STAGES[frame.f_code]
        frame = frame.f_back
    return "outside the training step"
