"""A guard against NaN and infinity in gradients and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.acts import Override
from signalfire.checks import check_choice, check_int
from signalfire.distributed import local_part

from ._common.parameters import gradients_of, named_parameters, norms
from ._common.ranks import GUARD, LOOK, NOTE_LOSS
from ._common.updates import updates_meant

__all__ = ["NonFiniteGuard"]

_NAMED = 5  # so many parameters are named; one NaN often spreads to all of them


class NonFiniteGuard(Handler):
    """Keeps NaN and infinity out of the weights: a step is skipped if its gradients, or a loss of its window, are not finite.

    It looks once for each window, right before the step, which costs one synchronisation with the device, together with that
    of a gradient scaler. The whole accumulation window is discarded, whichever batch of it was bad; the next begins clean. A
    skipped step is visible: schedules, averages and step counters do not move.

    Under `MixedPrecision("fp16")` the gradient scaler skips steps whose gradients overflow. Those are its own business, and are
    not counted here; ``check="both"`` sees a loss that is not finite all the same.

    Args:
        check: "gradients", "loss", or "both".
        action: what to do once ``patience`` steps in a row were bad, besides skipping them: nothing ("skip"), stop the run, or
            raise a FloatingPointError. The reason names the parameters. A clip by norm spreads one NaN to all parameters, so
            that all of them are named then.
        patience: for "stop" and "raise"; at the first bad step by default.
        update: the name of the update that is guarded; all by default, each counted on its own.

    Attributes:
        skipped: how many steps of each update were skipped here, by the update's name.

    Errors:
        FloatingPointError: if asked for with ``action="raise"``.

    Example:
        >>> NonFiniteGuard(action="stop", patience=3).patience
        3
    """

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
                f"NonFiniteGuard(patience={patience}): every bad step is skipped; give action='stop' or action='raise' "
                "for what comes after that many"
            )
        self.update = update
        self.skipped: dict[str, int] = {}
        self.watching = Events.LOSS_COMPUTED if check != "gradients" else None
        self._in_a_row: dict[str, int] = {}
        self._losses: dict[str, list[tuple[int, Tensor]]] = {}  # of the open window: iteration and loss

    def attached(self, engine: Engine) -> None:
        for update in updates_meant(engine, self.update):
            engine.overrides.claim(Override.NON_FINITE, by=self, target=f"of update {update.name!r}")

    @on("watching", phase=Phase.FINALIZE, rank=NOTE_LOSS)
    def note_loss(self, engine: Engine) -> None:
        """Remember the loss on its device until the window is complete: looking at it now would wait for the device."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.evaluation > 0:
            return
        losses = self._losses.setdefault(update.name, [])
        if update.window.held == 0:  # nothing is left of a window that was discarded
            losses.clear()
        losses.append((engine.state.iteration, update.backward_loss.detach()))

    @on(Events.GRADIENTS_READY, phase=Phase.FINALIZE, rank=GUARD)
    def judge(self, engine: Engine) -> None:
        """Ask whether what the step would be made from is finite."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.evaluation > 0:
            return
        losses = self._losses.pop(update.name, [])
        suspects = {"loss": [loss for _, loss in losses]}
        if update.skipped is None and self.check != "loss":
            # The greatest of a tensor, which is NaN or infinite if any element is; a sum could be so without any.
            suspects["gradients"] = norms(gradients_of(update), math.inf)
        flags = {what: _any_not_finite(values) for what, values in suspects.items() if values}
        update.ask(
            lambda *bad: self._decide(engine, update, losses, dict(zip(flags, bad, strict=True))), *flags.values()
        )

    @on(Events.GRADIENTS_READY, phase=Phase.FINALIZE, rank=LOOK)
    def look(self, engine: Engine) -> None:
        """Read what was asked, here and by the gradient scaler."""
        engine.state.update.look()

    def _decide(
        self, engine: Engine, update: UpdateState, losses: list[tuple[int, Tensor]], bad: Mapping[str, bool]
    ) -> None:
        """Skip the step if the loss, or the gradients, were found to be bad; those of a step that is skipped do not matter."""
        finite = not bad.get("loss") and (update.skipped is not None or not bad.get("gradients"))
        if not engine.processes.any(not finite):  # gradients are the same in all processes, losses are not
            if update.skipped is None:
                self._recover(engine, update)
            return
        reasons = engine.processes.gather("" if finite else self._reason(engine, update, losses))
        reason = next(filter(None, reasons))
        self.skipped[update.name] = self.skipped.get(update.name, 0) + 1
        in_a_row = self._in_a_row[update.name] = self._in_a_row.get(update.name, 0) + 1
        update.skip(reason)
        if self.action == "skip" or in_a_row < self.patience:
            return
        if in_a_row > 1:
            reason = f"{reason} ({in_a_row} steps in a row)"
        if self.action == "raise":
            raise FloatingPointError(f"{self.name!r}: update {update.name!r}: {reason}")
        engine.terminate(reason, by=self.name)

    def _recover(self, engine: Engine, update: UpdateState) -> None:
        if self._in_a_row.pop(update.name, 0) < self.patience:
            return
        # Only a stop that the run's minimum bounds hold back gets here; another update may still want it.
        if all(number < self.patience for number in self._in_a_row.values()):
            engine.boundary.withdraw(by=self.name)

    def _reason(self, engine: Engine, update: UpdateState, losses: list[tuple[int, Tensor]]) -> str:
        """What is not finite, and where; asked only when something is."""
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

    @on(Events.ENDED)
    def forget(self, engine: Engine) -> None:
        """Windows that were left open are discarded."""
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
