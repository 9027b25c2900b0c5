"""Loss-spike detection: skips the step, stops the run, or rolls back and leaves out the batches around the spike."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from signalfire import Engine, Events, Finding, Handler, Interval, Phase, UpdateState, on
from signalfire.authoring import Capture, Claim, check_choice, check_int, check_number, steps_to_come, warn
from signalfire.distributed.norms import joined, norm_parts
from signalfire.findings import finding
from signalfire.resuming.past import Place

from ._common.parameters import gradients_of, total_norm
from ._common.ranks import CHECK_SPIKES, HOLD_STATE, MEASURE_GRADIENTS, READ_FLAGS

__all__ = ["SpikeGuard"]

_MOST_IN_A_ROW = 20  # steps that are left out before what they have is taken as usual
_LEAST = 0.1  # in logarithms: whatever the deviation, less than 10 % above the mean is no spike


class SpikeGuard(Handler):
    """Detects spikes of the loss or gradient norm, and skips the step, stops the run, or rolls back (rewinds).

    A value is a spike if its logarithm is more than ``sigmas`` standard deviations above the mean of the last ``window`` steps.
    The guard acts before the optimizer step. Spikes do not enter the window, nor do infinite values and NaN, which
    `NonFiniteGuard` handles. Nothing counts as a spike before the window is full. The loss is the mean over an accumulation
    window, and the norm is measured before clipping. With several ranks, the loss is the mean over all ranks, so all ranks
    decide alike.

    - "skip" omits the step. After 20 in a row, the guard accepts the new level as normal, and reports this (W19).
    - "stop" omits the step and stops the run. `Engine.replay` then shows whether the spike recurs, and which sample causes it.
    - "rewind" returns, inside the process, to the state ``rewind`` iterations ago, and continues without the batches seen since
      then. Weights, optimizers, schedules, averages, metrics, logs and generators are as if those batches had never been seen.

    For "stop" and "rewind", states are kept in main memory, as by `Rewindable`, and a checkpoint includes the oldest one.

    W19 reports every rewind; of the other actions, it reports the first, the 10th, the 100th and so on.

    Args:
        policy: Action at a spike: "skip", "stop" or "rewind".
        window: Number of recent steps that define the normal range.
        sigmas: Threshold in standard deviations of the logarithm. `alarms` counts how many recorded losses exceed it.
        rewind: Number of iterations that the run goes back, which is also the interval between states and the number of batches
            that are left out. For "rewind", it must be less than an epoch.
        keep: Number of states to keep in memory.
        at_most: Maximum number of rewinds; one more spike raises an error.
        watch: Values to watch: "loss", "gradient_norm", or both.

    Attributes:
        actions: The actions taken, in order: dicts with ``iteration``, ``reason`` and ``batches``, a list of epoch and index
            (from 0) of the batches that were not trained on. Part of every checkpoint; `export` writes it as JSON.

    Errors:
        RuntimeError: at a spike after ``at_most`` rewinds, naming the batches that were left out.

    Source:
        Chowdhery et al., "PaLM", 2022, section 5.1 (going back before a spike and leaving out the batches around it); the
        threshold is that of OLMo's ``SkipStepOptimizer``, but in logarithms and on windows without the spikes.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> engine = Engine(update, model=model, allow=["W19"])  # without the warning
        >>> _ = torch.nn.init.ones_(engine.model.weight)
        >>> guard = SpikeGuard("skip", window=8)
        >>> _ = engine.attach(guard)
        >>> inputs = [torch.ones(4, 1)] * 10 + [torch.full((4, 1), 100.0)] + [torch.ones(4, 1)]
        >>> _ = engine.run([(x, torch.zeros(4, 1)) for x in inputs], max_epochs=1)
        >>> # Epoch and index of the batch.
        >>> [(action["iteration"], action["batches"]) for action in guard.actions]
        [(11, [[1, 10]])]
        >>> engine.state.update.steps
        11
    """

    capture = Capture.FORBIDDEN
    trains = True
    decides_alike = True

    def __init__(
        self,
        policy: Literal["skip", "stop", "rewind"] = "skip",
        *,
        window: int = 128,
        sigmas: float = 6.0,
        rewind: int = 20,
        keep: int = 4,
        at_most: int = 3,
        watch: str | Sequence[str] = ("loss", "gradient_norm"),
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.policy = check_choice(self, "policy", policy, ("skip", "stop", "rewind"))
        self.window = check_int(self, "window", window, least=8)
        self.sigmas = check_number(self, "sigmas", sigmas, above=0)
        self.rewind = check_int(self, "rewind", rewind)
        self.keep = check_int(self, "keep", keep)
        if policy == "rewind" and self.keep < 2:
            raise ValueError(
                f"SpikeGuard(policy='rewind', keep={keep}): when a spike occurs, a single saved state may be less than "
                f"rewind={rewind} iterations old; set keep=2 or more"
            )
        self.at_most = check_int(self, "at_most", at_most)
        watched = [watch] if isinstance(watch, str) else list(watch) if isinstance(watch, Iterable) else []
        if not watched:
            raise ValueError(f"SpikeGuard(watch={watch!r}): expected 'loss', 'gradient_norm', or both")
        self.watch = [check_choice(self, "watch", one, ("loss", "gradient_norm")) for one in watched]
        keeps = policy != "skip"
        self.loss_event = Events.LOSS_COMPUTED if "loss" in self.watch else None
        self.start_event = Events.STARTED if keeps else None
        self.load_event = Events.CHECKPOINT_LOADED if keeps else None
        self.hold_event = Interval(self.rewind, "it") if keeps else None
        self.actions: list[dict[str, Any]] = []
        self._usual: dict[str, _Window] = {}  # by update and what is watched
        self._losses: dict[str, list[tuple[int, Tensor, float]]] = {}  # iteration, loss and weight, of the open window
        self._norms: list[Tensor] = []  # of the gradients that are ready
        self._in_a_row: dict[str, int] = {}  # steps that were left out, by update
        self._goes_back_to: int | None = None  # from the spike to the end of its iteration
        self._told = False  # that a loss has no logarithm

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("the response to loss spikes", rehearsed=False), by=self)
        if self.policy != "skip":
            engine.past.keep_states(every=self.rewind, keep=self.keep, by=self)

    def detached(self, engine: Engine) -> None:
        if self.policy != "skip":
            engine.past.forget()

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report a window that the run does not fill."""
        for update in engine.updates:
            to_come = steps_to_come(engine, update)
            if engine.state.max_steps is not None and update is not engine.updates[0]:
                continue  # which are the steps of the first update, and this one may take more
            if to_come is not None and (steps := update.steps + to_come) <= self.window:
                yield finding(
                    "C39",
                    f"{self.name!r} detects no spikes in the first window={self.window} steps, but update "
                    f"{update.name!r} takes only {steps} step{'' if steps == 1 else 's'}",
                    "use a smaller window=, but at least 8" if steps > 8 else f"omit {self.name!r} in runs this short",
                    [self.name],
                )

    # ---- finding spikes -------------------------------------------------------------------------------------------

    @on("loss_event", phase=Phase.RECORD, reads=["loss", "loss_weight", "window"], writes=[])
    def record_loss(self, engine: Engine) -> None:
        """Keep the loss on its device until the window is complete."""
        update = engine.state.update
        if update.evaluation == 0 and (loss := update.loss) is not None:
            losses = self._losses.setdefault(update.name, [])
            if update.window.held == 0:  # a new window, possibly after a discarded one
                losses.clear()
            losses.append((engine.state.iteration, loss.detach(), float(update.weight)))

    @on(
        Events.GRADIENTS_READY, phase=Phase.PREPARE, rank=MEASURE_GRADIENTS, reads=["gradients", "optimizer"], writes=[]
    )
    def measure_norm(self, engine: Engine) -> None:
        """Measure the norm, before anything clips the gradients."""
        update = engine.state.update
        if "gradient_norm" in self.watch and update.evaluation == 0:
            self._norms = norm_parts(gradients_of(update))

    @on(Events.GRADIENTS_READY, phase=Phase.FINALIZE, rank=CHECK_SPIKES, reads=[], writes=["flags"])
    def ask(self, engine: Engine) -> None:
        """Request that the values are read together with the flags of other handlers."""
        update = engine.state.update
        if update.evaluation > 0 or self._goes_back_to is not None:  # the latter for an earlier step of this iteration
            return
        losses, norms = self._losses.pop(update.name, []), self._norms
        self._norms = []
        numbers = [*(loss for _, loss, _ in losses), *norms]

        def decide(*values: float) -> None:
            self._decide(engine, update, losses, list(values))

        update.read_numbers_later(decide, *numbers)

    @on(
        Events.GRADIENTS_READY,
        phase=Phase.FINALIZE,
        rank=READ_FLAGS,
        reads=["loss", "bounds", "gradients", "optimizer", "processes", "flags"],
        writes=["step", "stop"],
    )
    def read(self, engine: Engine) -> None:
        """Read the values from the device."""
        engine.state.update.read_flags()

    def _decide(
        self, engine: Engine, update: UpdateState, losses: list[tuple[int, Tensor, float]], values: list[float]
    ) -> None:
        found = self._measured(engine, losses, values)
        if update.skipped is not None:
            return
        if found.get("gradient norm") == math.inf:
            # The sum of squares overflows long before an element does; the largest element is less than the norm.
            found["gradient norm"] = total_norm(gradients_of(update), math.inf).item()
        if not all(map(math.isfinite, found.values())):
            return
        if found.get("loss", 1.0) <= 0:
            self._report_no_logarithm(engine, found.pop("loss"))
        logarithms = {what: math.log(value) for what, value in found.items() if value > 0}
        reasons = self._reasons(update, found, logarithms)
        if reasons and not self._is_new_level(engine, update, reasons):
            first = losses[0][0] if losses else engine.state.iteration
            self._act(engine, update, "; ".join(reasons), range(first, engine.state.iteration + 1))
            return
        self._in_a_row.pop(update.name, None)
        for what, value in logarithms.items():
            self._usual[f"{update.name}: {what}"].add(value)

    def _measured(
        self, engine: Engine, losses: list[tuple[int, Tensor, float]], values: list[float]
    ) -> dict[str, float]:
        """The mean loss and the norm of this step, as far as they are watched; the past keeps them."""
        found: dict[str, float] = {}
        if norms := values[len(losses) :]:
            found["gradient norm"] = joined(norms)
        if "loss" in self.watch:
            weights = [weight for *_, weight in losses]
            total = sum([value * weight for value, weight in zip(values, weights, strict=False) if weight])
            weight = sum(weights)
            if engine.processes.distributed:
                total, weight = engine.processes.sum(total, weight)
            if weight:
                found["loss"] = total / weight
        if self.policy != "skip":
            recorded = {what.replace(" ", "_"): value for what, value in found.items()}
            engine.past.recorded[engine.state.iteration] = recorded
        return found

    def _reasons(self, update: UpdateState, found: dict[str, float], logarithms: dict[str, float]) -> list[str]:
        """The values that are spikes, and by how much."""
        reasons = []
        for what, value in logarithms.items():
            key = f"{update.name}: {what}"
            if key not in self._usual:
                self._usual[key] = _Window(self.window)
            usual = self._usual[key]
            if (deviations := usual.exceeds(value, self.sigmas)) is not None:
                reasons.append(
                    f"the {what} of {found[what]:.4g} is {deviations:.1f} standard deviations above its usual value of "
                    f"{math.exp(usual.mean):.4g}"
                )
        return reasons

    def _is_new_level(self, engine: Engine, update: UpdateState, reasons: list[str]) -> bool:
        """Whether enough consecutive steps are above the normal range to make this the new normal; the windows then restart."""
        count = self._in_a_row[update.name] = self._in_a_row.get(update.name, 0) + 1
        if self.policy != "skip" or count <= _MOST_IN_A_ROW:
            return False
        for key in self._usual:
            if key.startswith(f"{update.name}: "):
                self._usual[key] = _Window(self.window)
        if engine.processes.is_rank_zero:
            engine.findings.report(
                "W19",
                f"{self.name!r} has skipped {_MOST_IN_A_ROW} steps of update {update.name!r} in a row "
                f"({'; '.join(reasons)}); from iteration {engine.state.iteration} on, it accepts the new level as "
                "normal",
                "check the data and the learning rate in these iterations",
                self.name,
                key=f"level {engine.state.iteration}",
            )
        return True

    def _report_no_logarithm(self, engine: Engine, loss: float) -> None:
        if not self._told and engine.processes.is_rank_zero:
            self._told = True
            watched = (
                "only the gradient norm is watched" if "gradient_norm" in self.watch else "the loss is not watched"
            )
            warn(
                f"{self.name!r}: the loss is {loss:.4g}, which has no logarithm; while the loss is not positive, "
                f"{watched}"
            )

    # ---- acting ---------------------------------------------------------------------------------------------------

    def _act(self, engine: Engine, update: UpdateState, reason: str, iterations: range) -> None:
        now = engine.state.iteration
        update.skip(reason)
        if self.policy == "rewind":
            self._rewind(engine, update, reason)
            return
        self._note(now, reason, engine.past.places_of(iterations))
        self._report(engine, f"has skipped {_step(len(self.actions))} of update {update.name!r}: {reason}")
        if self.policy == "stop":
            engine.terminate(f"iteration {now}: {reason}", by=self.name)

    def _rewind(self, engine: Engine, update: UpdateState, reason: str) -> None:
        now = engine.state.iteration
        self._check_length(engine)
        if len(self.actions) >= self.at_most:
            left_out = "; ".join(_named(action["batches"]) for action in self.actions)
            raise RuntimeError(
                f"{self.name!r}: iteration {now}: {reason}, but the limit of at_most={self.at_most} rewinds has been "
                f"reached; skipped so far: {left_out}. Check these batches and the learning rate, or increase at_most="
            )
        to = max(now - self.rewind, 0)
        if (oldest := engine.past.oldest) is not None and oldest > to:
            raise RuntimeError(
                f"{self.name!r}: iteration {now}: {reason}. rewind={self.rewind} goes back to iteration {to}, but the "
                f"oldest of the keep={self.keep} states is from iteration {oldest}, because spikes are close together; "
                "increase keep="
            )
        self._note(now, reason, engine.past.places_of(range(to + 1, now + 1)))
        self._go_back(engine, to)
        self._report(
            engine,
            f"goes back from iteration {now} to iteration {to} and skips {_named(self.actions[-1]['batches'])} "
            f"(rewind {len(self.actions)} of {self.at_most}): {reason}",
        )

    def _go_back(self, engine: Engine, to: int) -> None:
        """Go back at the end of this iteration, without the batches of the last action; states saved until then record it."""
        self._goes_back_to = to
        places = [Place(epoch, batch) for epoch, batch in self.actions[-1]["batches"]]
        engine.past.rewind(to, leave_out=places, changes={self.name: {"actions": list(self.actions)}})

    def _check_length(self, engine: Engine) -> None:
        length = engine.state.epoch_length
        if length is not None and self.rewind >= length:
            raise ValueError(
                f"{self.name!r}: rewind={self.rewind} would skip a whole epoch of {length} batches; use a smaller "
                "rewind="
            )

    def _note(self, iteration: int, reason: str, places: Sequence[Place]) -> None:
        self.actions.append({"iteration": iteration, "reason": reason, "batches": [list(place) for place in places]})

    def _report(self, engine: Engine, what: str) -> None:
        """Report the first action, the 10th, the 100th and so on, and each rewind."""
        count = len(self.actions)
        if engine.processes.is_rank_zero and (self.policy == "rewind" or str(count).rstrip("0") == "1"):
            engine.findings.report(
                "W19",
                f"{self.name!r} {what}",
                "if this is unexpected, check these batches and the learning rate",
                self.name,
                key=count,
            )

    def alarms(self, values: Iterable[float]) -> list[int]:
        """The indices, from 0, of the recorded losses or norms that this guard would treat as spikes."""
        usual, found = _Window(self.window), []
        for place, value in enumerate(values):
            if not math.isfinite(value) or value <= 0:
                continue
            if usual.exceeds(math.log(value), self.sigmas) is None:
                usual.add(math.log(value))
            else:
                found.append(place)
        return found

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write `actions` to a JSON file."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.actions, file, indent=1)

    # ---- keeping states -------------------------------------------------------------------------------------------

    @on("start_event", phase=Phase.PERSIST, rank=HOLD_STATE, reads=["state"], writes=[])
    def begin(self, engine: Engine) -> None:
        """Keep the initial state."""
        if self.policy == "rewind":
            steps = steps_to_come(engine, engine.updates[0])
            if steps is None or steps > self.window:  # in a shorter run nothing can be a spike
                self._check_length(engine)
        if not engine.snapshots.has_loaded_state:
            engine.past.begin_run()

    @on("load_event", phase=Phase.PERSIST, rank=HOLD_STATE, reads=["state"], writes=[])
    def resume(self, engine: Engine) -> None:
        """Keep the loaded state, unless an older one came with it; go back if the run that saved it was about to."""
        if engine.past.reached is None:
            engine.past.begin_run()
            if self._goes_back_to is not None:
                self._go_back(engine, self._goes_back_to)

    @on("hold_event", phase=Phase.PERSIST, rank=HOLD_STATE, reads=["state"], writes=[])
    def hold(self, engine: Engine) -> None:
        """Keep the state of this iteration."""
        engine.past.hold()

    @on(Events.ENDED, reads=["window"], writes=[])
    def clear_losses(self, engine: Engine) -> None:
        """Drop the losses, unless a window stays open for the next run."""
        if not any(update.window.filled for update in engine.updates):
            self._losses = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "actions": [dict(action) for action in self.actions],
            "usual": {key: usual.state_dict() for key, usual in sorted(self._usual.items())},
            "losses": {name: [list(one) for one in several] for name, several in sorted(self._losses.items())},
            "in_a_row": dict(self._in_a_row),
            "goes_back_to": self._goes_back_to,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.actions = [dict(action) for action in state["actions"]]
        self._goes_back_to = state["goes_back_to"]
        self._in_a_row = dict(state.get("in_a_row", {}))  # a state of 0.2.0 has none
        self._usual = {key: _Window.of(self.window, usual) for key, usual in state["usual"].items()}
        self._losses = {
            name: [(i, loss, weight) for i, loss, weight in several] for name, several in state["losses"].items()
        }


class _Window:
    """Mean and standard deviation of the last values."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)
        self.size = size
        self.sums = 0.0, 0.0  # of the values and of their squares

    @property
    def mean(self) -> float:
        return self.sums[0] / len(self.values)

    def exceeds(self, value: float, sigmas: float) -> float | None:
        """By how many standard deviations a value exceeds the mean, if this makes it a spike; otherwise None."""
        if len(self.values) < self.size:
            return None
        mean = self.sums[0] / self.size
        deviation = math.sqrt(max(self.sums[1] / self.size - mean * mean, 0.0))
        excess = value - mean
        return excess / max(deviation, _LEAST / sigmas) if excess > max(sigmas * deviation, _LEAST) else None

    def add(self, value: float) -> None:
        total, squares = self.sums
        if len(self.values) == self.size:
            oldest = self.values[0]
            total, squares = total - oldest, squares - oldest * oldest
        self.values.append(value)
        self.sums = total + value, squares + value * value

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values), "sums": list(self.sums)}

    @classmethod
    def of(cls, size: int, state: Mapping[str, Any]) -> _Window:
        window = cls(size)
        if len(state["values"]) <= size:
            window.values.extend(state["values"])
            window.sums = tuple(state["sums"])
        else:  # of a larger window
            for value in state["values"][-size:]:
                window.add(value)
        return window


def _step(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _named(batches: Sequence[Sequence[int]]) -> str:
    """Batches in words: "batches 480 to 499 of epoch 1"."""
    parts = []
    for epoch in sorted({one for one, _ in batches}):
        indices = [index for one, index in batches if one == epoch]
        what = f"batch {indices[0]}" if len(indices) == 1 else f"batches {indices[0]} to {indices[-1]}"
        parts.append(f"{what} of epoch {epoch}")
    return " and ".join(parts) or "no batch"
