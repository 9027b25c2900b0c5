"""Non-finite guard: skips steps with NaN or infinity in gradients or losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import Capture, Claim, check_choice, check_int, check_name
from signalfire.core.window import ONE, counts_nothing
from signalfire.distributed import local_part

from ._common.parameters import gradients_of, named_parameters, norms
from ._common.ranks import CHECK_FINITE, READ_FLAGS, RECORD_LOSS
from ._common.updates import selected_updates

__all__ = ["NonFiniteGuard"]

_NON_FINITE = Claim("what happens to non-finite losses and gradients", rehearsed=False)
_NAMED = 5  # most parameters to name in a reason; one NaN often spreads to all of them


class NonFiniteGuard(Handler):
    """Skips optimizer steps with NaN or infinite gradients or losses, and optionally stops the run.

    The check runs once per accumulation window, right before the step, and costs one synchronization with the device, shared with
    a gradient scaler. The whole window is discarded, whichever of its batches was bad. A skipped step does not advance schedules,
    averages or step counters. A warning (W19) reports the first skipped step, the 10th, the 100th and so on.

    Under `MixedPrecision("fp16")`, the gradient scaler skips steps whose gradients overflow. These are not counted here, but
    ``check="both"`` still detects a non-finite loss.

    Args:
        check: Values to check: "gradients", "loss", or "both".
        action: Action after ``patience`` consecutive bad steps, besides skipping them: none ("skip"), stop the run ("stop"), or
            raise a FloatingPointError ("raise"). The reason names the parameters; clipping by norm spreads one NaN to all
            parameters.
        patience: Number of consecutive bad steps for "stop" and "raise"; 1 by default.
        update: Name of the update to guard; by default all, each with a separate count.

    Attributes:
        skipped: Number of steps that the guard skipped, by the update's name.

    Errors:
        FloatingPointError: With ``action="raise"``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> engine = Engine(update, model=model, allow=["W19"])  # without the warning
        >>> _ = torch.nn.init.ones_(engine.model.weight)
        >>> guard = NonFiniteGuard()
        >>> _ = engine.attach(guard)
        >>> inputs = [torch.ones(4, 1), torch.full((4, 1), float("nan")), torch.ones(4, 1)]
        >>> _ = engine.run([(x, torch.zeros(4, 1)) for x in inputs], max_epochs=1)
        >>> # Two steps, each of which halves the weight.
        >>> engine.model.weight.item(), guard.skipped
        (0.25, {'main': 1})
    """

    capture = Capture.FORBIDDEN  # the flags are read from the device
    trains = True
    decides_alike = True

    def __init__(
        self,
        *,
        check: Literal["gradients", "loss", "both"] = "gradients",
        action: Literal["skip", "stop", "raise"] = "skip",
        patience: int | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.check = check_choice(self, "check", check, ("gradients", "loss", "both"))
        self.action = check_choice(self, "action", action, ("skip", "stop", "raise"))
        self.patience = 1 if patience is None else check_int(self, "patience", patience)
        if patience is not None and action == "skip":
            raise ValueError(
                f"NonFiniteGuard(patience={patience}): patience= has no effect with action='skip'; omit it, or use "
                "action='stop' or action='raise'"
            )
        self.update = check_name(self, "update", update)
        self.skipped: dict[str, int] = {}
        self.loss_event = Events.LOSS_COMPUTED if check != "gradients" else None
        self._in_a_row: dict[str, int] = {}
        self._losses: dict[str, list[tuple[int, Tensor]]] = {}  # iteration and loss, of the open window

    def attached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(_NON_FINITE, by=self, target=f"of update {update.name!r}")

    @on("loss_event", phase=Phase.FINALIZE, rank=RECORD_LOSS, reads=["loss", "loss_weight", "window"], writes=[])
    def record_loss(self, engine: Engine) -> None:
        """Keep the loss on its device until the window is complete, because reading it now would synchronize."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.evaluation > 0:
            return
        losses = self._losses.setdefault(update.name, [])
        if update.window.held == 0:  # a new window, possibly after a discarded one
            losses.clear()
        if update.weight is not ONE and counts_nothing(update.weight):
            return
        losses.append((engine.state.iteration, update.backward_loss.detach()))

    @on(
        Events.GRADIENTS_READY,
        phase=Phase.FINALIZE,
        rank=CHECK_FINITE,
        reads=["loss", "gradients", "optimizer", "step"],
        writes=["flags"],
    )
    def check_finite(self, engine: Engine) -> None:
        """Request the flags: whether the window's losses and gradients are finite."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.evaluation > 0:
            return
        losses = self._losses.pop(update.name, [])
        suspects = {"loss": [loss for _, loss in losses]}
        if update.skipped is None and self.check != "loss":
            # The max norm is NaN or infinite only if an element is; a sum could overflow with finite elements.
            suspects["gradients"] = norms(gradients_of(update), math.inf)
        flags = {what: _any_not_finite(values) for what, values in suspects.items() if values}
        update.read_later(
            lambda *bad: self._decide(engine, update, losses, dict(zip(flags, bad, strict=True))), *flags.values()
        )

    @on(
        Events.GRADIENTS_READY,
        phase=Phase.FINALIZE,
        rank=READ_FLAGS,
        reads=["loss", "gradients", "modules", "optimizer", "processes", "flags"],
        writes=["step", "stop"],
    )
    def read_flags(self, engine: Engine) -> None:
        """Read all flags from the device, those of the gradient scaler included."""
        engine.state.update.read_flags()

    def _decide(
        self, engine: Engine, update: UpdateState, losses: list[tuple[int, Tensor]], bad: Mapping[str, bool]
    ) -> None:
        """Skip the step if a loss or a gradient is not finite; the gradients of an already skipped step do not count."""
        finite = not bad.get("loss") and (update.skipped is not None or not bad.get("gradients"))
        # Reduced gradients are the same on all ranks, losses are not.
        if finite if self.check == "gradients" else not engine.processes.any(not finite):
            if update.skipped is None:
                self._recover(engine, update)
            return
        reasons = engine.processes.gather("" if finite else self._reason(engine, update, losses))
        reason = next(filter(None, reasons))
        self.skipped[update.name] = self.skipped.get(update.name, 0) + 1
        in_a_row = self._in_a_row[update.name] = self._in_a_row.get(update.name, 0) + 1
        update.skip(reason)
        if self.action == "skip" or in_a_row < self.patience:
            self._report(engine, update, reason)
            return
        if in_a_row > 1:
            reason = f"{reason} ({in_a_row} steps in a row)"
        if self.action == "raise":
            raise FloatingPointError(f"{self.name!r}: update {update.name!r}: {reason}")
        engine.terminate(reason, by=self.name)

    def _report(self, engine: Engine, update: UpdateState, reason: str) -> None:
        """Warn at the first skipped step, the 10th, the 100th and so on, with their number."""
        count = self.skipped[update.name]
        if str(count).rstrip("0") != "1" or not engine.processes.is_rank_zero:
            return
        steps = "1 step" if count == 1 else f"{count} steps"
        engine.findings.report(
            "W19",
            f"{self.name!r} has skipped {steps} of update {update.name!r}: {reason}",
            "if this is unexpected, check this iteration's data and the learning rate; to raise an error instead "
            "of skipping steps, use action='raise'",
            self.name,
            key=(update.name, count),
        )

    def _recover(self, engine: Engine, update: UpdateState) -> None:
        if self._in_a_row.pop(update.name, 0) < self.patience:
            return
        # The run still continues, so `min_epochs` or `min_iters` delay the stop; another update may still require it.
        if all(number < self.patience for number in self._in_a_row.values()):
            engine.boundary.withdraw(by=self.name)

    def _reason(self, engine: Engine, update: UpdateState, losses: list[tuple[int, Tensor]]) -> str:
        """What is not finite, and where; called only after a bad step."""
        found = []
        if bad := [(iteration, loss.item()) for iteration, loss in losses if not math.isfinite(loss.item())]:
            found.append("the loss is not finite: " + ", ".join(f"{value} in iteration {i}" for i, value in bad))
        if self.check != "loss":
            names = {id(parameter): name for name, parameter in named_parameters(engine).items()}
            worst = [
                names.get(id(parameter), f"parameter {place} of the optimizer")
                for place, parameter in enumerate(update.parameters)
                if parameter.grad is not None and _any_not_finite(norms([local_part(parameter.grad)], math.inf)).item()
            ]
            if worst:
                more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
                found.append(f"the gradients are not finite in {', '.join(worst[:_NAMED])}{more}")
        return "; ".join(found)

    @on(Events.ENDED, reads=["window"], writes=[])
    def clear_losses(self, engine: Engine) -> None:
        """Drop the losses, unless a window stays open for the next run."""
        if not any(update.window.filled for update in engine.updates):
            self._losses = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "skipped": dict(sorted(self.skipped.items())),
            "in_a_row": dict(sorted(self._in_a_row.items())),
            "losses": {name: [list(one) for one in several] for name, several in sorted(self._losses.items())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped, self._in_a_row = dict(state["skipped"]), dict(state["in_a_row"])
        self._losses = {name: [(i, loss) for i, loss in several] for name, several in state["losses"].items()}


def _any_not_finite(scalars: list[Tensor]) -> Tensor:
    device = scalars[0].device
    return ~torch.stack([one.reshape(()).to(device) for one in scalars]).isfinite().all()
