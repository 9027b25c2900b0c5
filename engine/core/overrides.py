"""What a handler may override, exclusively: functions of the loop, and what else it claims for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from .part import Part
from .update import needs_closure

if TYPE_CHECKING:
    from .handler import Handler
    from .kernel import Kernel
    from .update import UpdateState

__all__ = ["GRADIENTS_PER_STEP", "Claim", "Override", "Overrides"]


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that only one handler at a time may do. Two claims with the same noun are the same claim.

    Attributes:
        value: the noun; it completes the sentence "both control ...".
        inherited: whether evaluators inherit what the handler does at MODEL_SETUP and FORWARD_STARTED; see `inherited`.
        of_step: whether it affects the step, so that a rehearsal needs the handler.
        rehearsed: whether a handler that claims it takes part in rehearsals at all.
    """

    value: str
    inherited: bool = field(default=False, compare=False)
    of_step: bool = field(default=True, compare=False)
    rehearsed: bool = field(default=True, compare=False)


class Override(Enum):
    """The functions of the loop that only one handler at a time may replace; see `Overrides.replace` for their signatures.

    For anything else that only one handler may do, the handler declares a `Claim`.
    """

    WINDOW = "the length of the accumulation window"
    GRADIENTS = "the computation of gradients"
    STEP = "the optimizer step"
    DATA = "the data that a run iterates over"
    EVALUATION_DATA = "the evaluation data"
    TRIAL = "how much of the data a trial run iterates over"
    REDUCTION = "the reduction of gradients over ranks"

    @property
    def inherited(self) -> bool:
        return False

    @property
    def rehearsed(self) -> bool:
        return True

    @property
    def of_step(self) -> bool:
        return self not in (Override.EVALUATION_DATA, Override.TRIAL)


GRADIENTS_PER_STEP = Claim("how often a step computes its gradients")


What = Claim | Enum


class Overrides(Part["Kernel"]):
    """Records which handler overrides what, and the functions that replace those of the loop.

    Attributes:
        gradients, step, data, evaluation_data, trial, reduction: the function that a handler has put in place of the loop's;
            None if there is none.
    """

    def __init__(self, engine: Kernel) -> None:
        super().__init__(engine)
        self.gradients: Callable[..., None] | None = None
        self.step: Callable[..., None] | None = None
        self.data: Callable[[Any, Any], Any] | None = None
        self.evaluation_data: Callable[[Any, Any], Any] | None = None
        self.trial: Callable[[Any, Any], Any] | None = None
        self.reduction: Callable[[Any, UpdateState], None] | None = None
        self._owners: dict[tuple[What, str | None], str] = {}
        self._given_back: dict[tuple[What, str | None], Callable[[], None]] = {}

    def claim(
        self, what: What, *, by: Handler, target: str | None = None, given_back: Callable[[], None] | None = None
    ) -> None:
        """Reserve this for one handler until it is detached; with two handlers, the result would depend on their order.

        Args:
            what: a `Claim`, or a member of your own enum whose values are noun phrases.
            by: the handler.
            target: which of several is meant; completes the noun phrase, as in ``"of update 'main'"``. None means all of them.
            given_back: called once the handler has released all its claims, in reverse order of the claims.

        Raises:
            ValueError: if another handler has claimed it, naming both.
        """
        for (claimed, place), other in self._owners.items():
            if claimed == what and other != by.name and (place == target or None in (place, target)):
                of = target or place
                noun = what.value if of is None else f"{what.value} {of}"
                raise ValueError(f"both {other!r} and {by.name!r} control {noun}; detach one of the two")
        self._owners[what, target] = by.name
        if given_back is not None:
            self._given_back[what, target] = given_back

    def replace(
        self,
        what: Override,
        function: Callable[..., Any],
        *,
        by: Handler,
        update: str | None = None,
        again: bool = False,
    ) -> None:
        """Replace a part of the loop with a handler's function until the handler is detached.

        - ``WINDOW``: ``function(epoch) -> int``, the number of micro-steps over which gradients are accumulated;
        - ``GRADIENTS``: ``function(engine, update, compute)``, where ``compute()`` runs what is replaced: the forward pass,
          loss and backward pass on ``state.batch``, which add to the window's gradients;
        - ``STEP``: ``function(engine, update, step)``, where ``step()`` is the optimizer's own;
        - ``DATA``: ``function(engine, data) -> data``, which returns what this engine iterates over instead;
        - ``EVALUATION_DATA``: the same for the evaluators that the engine runs; the evaluator is passed as ``engine``;
        - ``TRIAL``: ``function(engine, data) -> data``, for both, called with what the other two functions returned;
        - ``REDUCTION``: ``function(engine, update)``, with several ranks only, called once the gradients of a window are
          complete. It replaces them with their mean over the ranks, even if this rank had no batch, so its backward reduced
          nothing.

        Args:
            what: what is replaced.
            function: the replacement.
            by: the handler.
            update: for ``WINDOW``, the name of the update; all updates by default.
            again: for ``STEP``, whether the function calls ``update.again()``, which recomputes the gradients of the whole
                window at the current weights and returns the window's mean loss. The window's batches are kept for this.

        Raises:
            ValueError: if another handler replaces the same part, naming both; for gradients, if the engine computes none.
        """
        engine = self.engine
        if not isinstance(what, Override):
            raise ValueError(f"{by!r} replaces {what!r}; expected one of {', '.join(map(str, Override))}")
        if what is Override.GRADIENTS and not engine.training:
            raise ValueError(
                f"{by!r} replaces the gradient computation, but this engine only evaluates, so it computes no gradients"
            )
        if what is Override.WINDOW:
            for target in engine.updates if update is None else (engine.find_update(update),):
                self.claim(what, by=by, target=f"of update {target.name!r}")
                target.window.length_of = function
                if engine.running and engine.state.epoch:
                    target.window.length = function(engine.state.epoch)
            return
        self.claim(what, by=by)
        if again:
            self.compute_gradients_once(by=by)
            for target in engine.updates:
                target.window.kept = []
        setattr(self, what.name.lower(), function)

    def data_of(self, engine: Kernel, data: Any) -> Any:
        """What this engine, or an evaluator that it runs, iterates in place of its data."""
        for replacement in (self.data if engine is self.engine else self.evaluation_data, self.trial):
            if replacement is not None:
                data = replacement(engine, data)
        return data

    def compute_gradients_once(self, *, by: Handler) -> None:
        """Reject steps that compute their gradients several times, as closures and SAM do.

        Raises:
            ValueError: if another handler needs such steps, naming both. Optimizers with a closure raise it at the next run.
        """
        self.claim(GRADIENTS_PER_STEP, by=by)

    def owner_of(self, what: What, target: str | None = None) -> str | None:
        """The name of the handler that overrides this; None if there is none."""
        return self._owners.get((what, target))

    def owned_by(self, handler: Handler | str) -> set[What]:
        """What a handler overrides."""
        name = handler if isinstance(handler, str) else handler.name
        return {what for (what, _), owner in self._owners.items() if owner == name}

    def replaced(self) -> dict[str, Callable[..., Any]]:
        """The functions that handlers have put in place, by what they replace."""
        functions = {what.name.lower(): getattr(self, what.name.lower()) for what in [*Override][1:]}
        functions |= {f"window of {update.name}": update.window.length_of for update in self.engine.updates}
        return {name: function for name, function in functions.items() if function is not None}

    def release(self, handler: Handler) -> None:
        """Give back what a handler that takes no part any more has overridden."""
        released = [key for key, owner in self._owners.items() if owner == handler.name]
        for key in released:
            del self._owners[key]
        for what, target in released:
            if what is Override.WINDOW:
                self._release_window(target)
            elif what is GRADIENTS_PER_STEP:
                for update in self.engine.updates:
                    closure = update.optimizer is not None and needs_closure(update.optimizer)
                    update.window.kept = [] if closure else None
            elif isinstance(what, Override):
                setattr(self, what.name.lower(), None)
        for undo in [self._given_back.pop(key) for key in reversed(released) if key in self._given_back]:
            undo()

    def _release_window(self, target: str | None) -> None:
        for update in self.engine.updates:
            if target == f"of update {update.name!r}":
                update.window.length_of = None
                update.window.length = 1
