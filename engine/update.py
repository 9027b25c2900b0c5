"""What is trained: an update's forward, loss and optimizer, and the one function that performs it.

`updater` gives the whole training step. It acts; handlers change how: they wrap its regions, transform its values, skip its
step, or replace the gradient computation or the step (`Engine.replace`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .batches import tensors_in
from .bus import Bus, Signal, SignalGroup
from .events import Events
from .randomness import cuda_generators, derived_seed, mixed, reseed

if TYPE_CHECKING:
    from .distributed.processes import Processes
    from .engine import Engine

__all__ = ["Update", "UpdateState", "needs_closure"]

Forward = Callable[["Engine", Any], Any]
Loss = Callable[["Engine", Any, Any], Tensor | None]
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]


@dataclass(frozen=True)
class Update:
    """One training step to be made in every iteration: a forward, a loss, and an optimizer.

    Supervised learning has one update, a GAN two. An update without an optimizer only evaluates. The object holds nothing
    that changes, so that one may serve several engines.

    Args:
        forward: called as ``forward(engine, batch)``; returns the output.
        loss: called as ``loss(engine, output, batch)``; returns a scalar tensor, the mean over the batch, or None for
            "nothing to learn from this batch". None instead of a function for an update that only predicts.
        optimizer: a factory that is called with the parameters once the model is set up, such as
            ``partial(torch.optim.Adam, lr=1e-2)``; or an optimizer that is already built.
        name: by which the update is found, and its optimizer saved.
        parameters: for a factory, called as ``parameters(engine)``: the parameters or parameter groups to be optimized;
            all of the engine's modules' by default.
        function: instead of forward and loss, one function ``function(engine, batch) -> loss``; see `from_function`.

    Example:
        >>> def forward(engine, batch):
        ...     return engine.model(batch[0])
        >>> def loss(engine, output, batch):
        ...     return torch.nn.functional.mse_loss(output, batch[1])
        >>> from functools import partial
        >>> Update(forward, loss, partial(torch.optim.SGD, lr=0.1)).name
        'main'
    """

    forward: Forward | None = None
    loss: Loss | None = None
    optimizer: Optimizer | OptimizerFactory | None = None
    name: str = "main"
    parameters: Callable[[Engine], Iterable[Any]] | None = None
    function: Callable[[Engine, Any], Tensor | None] | None = None

    def __post_init__(self) -> None:
        if (self.forward is None) == (self.function is None):
            raise TypeError(f"Update {self.name!r}: give either forward= (and loss=) or function=")
        if self.function is not None and self.loss is not None:
            raise TypeError(f"Update {self.name!r}: function= returns the loss itself; leave out loss=")
        for argument in ("forward", "loss", "optimizer", "parameters", "function"):
            value = getattr(self, argument)
            if value is not None and not callable(value) and not isinstance(value, Optimizer):
                raise TypeError(f"Update {self.name!r}: {argument}={value!r} is not callable")
        for argument, places in (("forward", 2), ("loss", 3), ("function", 2)):
            if (value := getattr(self, argument)) is not None:
                _check_signature(f"Update {self.name!r}: {argument}", value, places)
        if self.optimizer is not None and self.loss is None and self.function is None:
            raise TypeError(f"Update {self.name!r}: an optimizer needs a loss to work on; give loss=")
        if isinstance(self.optimizer, type):
            _check_signature(f"Update {self.name!r}: optimizer", self.optimizer, 1)
        if isinstance(self.optimizer, Optimizer) and self.parameters is not None:
            raise TypeError(
                f"Update {self.name!r}: parameters= goes with an optimizer factory; this one is built already"
            )

    @classmethod
    def supervised(
        cls,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | OptimizerFactory | None = None,
        *,
        name: str = "main",
        parameters: Callable[[Engine], Iterable[Any]] | None = None,
    ) -> Update:
        """Batches of (input, target): the loss is ``loss(model(input), target)``.

        Example:
            >>> Update.supervised(torch.nn.functional.cross_entropy, torch.optim.SGD).name
            'main'
        """
        _check_signature(f"Update {name!r}: loss", loss, 2)

        def supervised_loss(engine: Engine, output: Any, batch: Any) -> Tensor:
            return loss(output, batch[1])

        return cls(_model_of_input, supervised_loss, optimizer, name, parameters)

    @classmethod
    def from_function(
        cls,
        function: Callable[[Engine, Any], Tensor | None],
        optimizer: Optimizer | OptimizerFactory | None = None,
        *,
        name: str = "main",
        parameters: Callable[[Engine], Iterable[Any]] | None = None,
    ) -> Update:
        """A single function ``(engine, batch) -> loss``. It emits no FORWARD_COMPLETED, as there is no output to see."""
        return cls(None, None, optimizer, name, parameters, function)

    @classmethod
    def prediction(cls, forward: Forward | None = None, *, name: str = "main") -> Update:
        """A forward alone, ``model(batch[0])`` by default: no loss, no gradient."""
        return cls(forward or _model_of_input, None, None, name)

    def evaluation(self) -> Update:
        """The same forward and loss without the optimizer, for an engine that evaluates."""
        return replace(self, optimizer=None, parameters=None)


def _model_of_input(engine: Engine, batch: Any) -> Any:
    kind = batch.__class__
    if kind is Tensor or kind is dict:  # a tensor would be taken apart by its samples, and nobody would notice
        raise TypeError(
            f"update {engine.state.update.name!r} takes batches of (input, target), but this one is a "
            f"{type(batch).__name__}; for other batches give Update a forward(engine, batch) and a loss(engine, output, batch)"
        )
    return engine.model(batch[0])


def _check_signature(where: str, function: Callable[..., Any], places: int) -> None:
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{where}={function!r} is a coroutine function; give a plain one")
    try:
        inspect.signature(function).bind(*[None] * places)
    except ValueError:  # a built-in that does not tell its signature
        return
    except TypeError as error:
        wanted = {1: "(parameters)", 2: "two arguments", 3: "(engine, output, batch)"}[places]
        raise TypeError(f"{where}={function!r} has to accept {wanted}: {error}") from None


class UpdateState:
    """One update at work in one engine; ``engine.state.update`` is the one whose turn it is.

    Attributes:
        name: the update's name.
        optimizer: the optimizer; None before OPTIMIZER_SETUP, and when only evaluating.
        output: what the forward returned, perhaps transformed at FORWARD_COMPLETED.
        backward_loss: what the backward starts from, perhaps scaled or with penalties added at LOSS_COMPUTED.
        weight: how much this loss counts in its window, such as its number of tokens; set it at LOSS_COMPUTED.
        skipped: why the step is skipped, or None.
        steps: the optimizer steps that really happened.
        window: over how many would-be steps gradients are accumulated in this epoch.
        filled: how many would-be steps of the open window were made.
        held: how many of them gave a gradient.
        evaluation: how often the gradients of this step were computed before, by a closure or a handler that needs that.
        hidden: what the forward carries from one time chunk of a batch to the next; None in front of the first.
        more: whether this iteration has further would-be steps of this update, such as further time chunks.
        regular: whether each batch is one would-be step; whoever changes that says so here.
        completes: with several processes, whether this would-be step completes its window, which is known before its forward:
            the gradients of others need not be reduced.
        left_out: at ITERATION_COMPLETED it is the number of the iteration if that was made without this update, by its plan or
            for a stop, and another number if it was not.
        share: with several processes, how much the batch counts beside those that the others were dealt with it: 1, unless
            they differ in their number of samples; see `Engine.share`.
    """

    __slots__ = (
        "_asked", "_parameters", "_parameters_of", "_weight", "again", "backward_loss", "completes", "evaluation", "extra_weight",
        "filled", "forward", "function", "held", "hidden", "kept", "left_out", "loss_function", "more", "name", "optimizer",
        "output", "raw_loss", "regular", "share", "skipped", "spec", "steps", "undecided", "unsettled", "window", "window_of",
    )  # fmt: skip

    def __init__(self, spec: Update, *, training: bool) -> None:
        self.spec = spec
        self.name = spec.name
        self.forward: Any = spec.forward
        self.loss_function: Any = spec.loss
        self.function: Any = spec.function
        self.optimizer = spec.optimizer if training and isinstance(spec.optimizer, Optimizer) else None
        self.window = 1
        self.window_of: Callable[[int], int] | None = None  # the window's length in an epoch; see Engine.replace
        self.kept: list[Kept] | None = None  # what the window was computed from, if it may have to be computed again
        self.again: Callable[[], Tensor] = _not_again
        self.regular = True
        self.completes = True
        self.share: float = ONE
        self._parameters: list[Tensor] = []
        self._parameters_of: list[int] = []
        self._asked: list[tuple[Callable[..., None], tuple[Tensor, ...]]] = []
        self.restart()

    def restart(self) -> None:
        self.output: Any = None
        self.raw_loss: Tensor | None = None
        self.backward_loss: Any = None
        self._weight: Any = ONE
        self.skipped: str | None = None
        self.undecided = True  # whether the step can still be skipped
        self.unsettled = False  # whether an evaluation's end has to see to a skip, a region or a weight
        self.evaluation = 0
        self.hidden: Any = None
        self.more = False
        self.left_out = 0
        self.steps = 0
        self.discard()
        self.filled = 0

    def discard(self) -> None:
        """Forget what the open window holds."""
        self.held = 0
        self.extra_weight: Any = ZERO  # by how much the sum of the window's weights exceeds `held`
        if self.kept:
            self.kept.clear()
        if self.optimizer is not None:
            _clear_gradients(self.optimizer)

    def fill(self, engine: Engine, iteration: int) -> bool:
        """Count one more would-be step; whether it completes the window, which is known before its forward."""
        self.filled += 1
        if self.filled < self.window and (self.more or iteration < engine.epoch_end or not engine.on_last_batch()):
            return False
        self.filled = 0
        return True

    @property
    def loss(self) -> Tensor | None:
        """The loss to be reported, detached: neither divided by the window's length, nor weighted, nor scaled."""
        return self.raw_loss.detach() if isinstance(self.raw_loss, Tensor) else self.raw_loss

    @loss.setter
    def loss(self, value: Tensor | None) -> None:
        self.raw_loss = value

    @property
    def weight(self) -> Any:
        return self._weight

    @weight.setter
    def weight(self, value: Any) -> None:
        self._weight, self.unsettled = value, True

    @property
    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters, over all of its groups."""
        if self.optimizer is None:
            return []
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != self._parameters_of:  # a group was added, as gradual unfreezing does
            self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._parameters_of = sizes
        return self._parameters

    def skip(self, reason: str) -> None:
        """Do without the step, or without the whole update if its forward was not made yet; the first reason stays.

        It holds for this iteration, or for this time chunk, of a batch that comes in several. What the window holds is discarded.
        Schedules, averages and step counters do not move. Once the step was made it is too late, and nothing happens.
        """
        if self.skipped is None and self.undecided:
            self.skipped, self.unsettled = reason, True

    def ask(self, then: Callable[..., None], *flags: Tensor) -> None:
        """Have flags that are on a device read with those of others: the next `look` calls ``then(*values)``.

        Each reading waits for the device. Those who ask at GRADIENTS_READY, in Phase.FINALIZE, wait for it once together.

        Args:
            then: called with a bool for each flag; after those who asked before.
            flags: tensors of one element; true where it is not zero.
        """
        self._asked.append((then, flags))

    def look(self) -> None:
        """Read all flags that were asked for, in one synchronisation with the device, and tell their values."""
        asked, self._asked = self._asked, []
        flags = [flag for _, several in asked for flag in several]
        values = []
        if flags:
            device = flags[0].device
            values = torch.stack([flag.detach().reshape(()).to(device, torch.bool) for flag in flags]).tolist()
        for then, several in asked:
            then(*values[: len(several)])
            del values[: len(several)]

    def forget_questions(self) -> None:
        """Ask for nothing any more: an error left questions that nobody answered."""
        self._asked = []

    def __repr__(self) -> str:
        return f"UpdateState({self.name!r}, steps={self.steps}, loss={self.loss}, skipped={self.skipped!r})"


# What a window was computed from, if that may have to be done again: batch, mean loss, weight and share of each would-be step.
Kept = tuple[Any, Tensor, Any, float]


def _clear_gradients(optimizer: Optimizer) -> None:
    """What ``optimizer.zero_grad()`` does, unless somebody gave it one of its own.

    torch's opens a region for the profiler and one without compilation around it: of the 150 us of a tiny step, 6.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in optimizer.__dict__:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _keep(update: UpdateState, batch: Any) -> None:
    assert update.kept is not None
    if update.raw_loss is not None:
        weight = update.held + update.extra_weight - sum((weight for _, _, weight, _ in update.kept), start=ZERO)
        update.kept.append((batch, update.backward_loss.detach(), weight, update.share))


def _not_again() -> Tensor:
    raise RuntimeError("again(): the gradients of a step can be computed again inside the step alone")


def updater(engine: Engine) -> Callable[[UpdateState, Any, int, bool], None]:
    """The function that performs an engine's updates, with what it needs in every iteration at hand.

    It is called with the update, the batch, the iteration, and whether anybody listens. Training takes the batch from the state:
    who replaces the gradients puts its parts there.

    It is made once for each run: in its scope a name costs one instruction, where an attribute of the engine would cost three.
    """
    state, signals, regions = engine.state, engine.iteration_signals, engine.regions
    one_update = len(engine.updates) == 1
    several = engine.processes.several
    begin_stream = _model_streams(engine) if engine.streams == "separate" else None

    def train(update: UpdateState, batch: Any, iteration: int, listened: bool) -> None:
        """One would-be step: the gradients of this batch and, if they complete the window, the optimizer's step."""
        outside = regions.depth
        try:
            if listened and signals.started.due <= iteration:
                signals.started.emit(engine, iteration)
            window_complete = update.window == 1 or update.fill(engine, iteration)
            if several:
                update.completes, update.share = window_complete, ONE if state.batch is None else engine.share()
            if update.skipped is not None:
                update.output, update.raw_loss, update._weight = None, None, ONE
            elif engine.replaced_gradients is None:
                compute_gradients(update, iteration, listened)
            else:
                compute = partial(compute_gradients, update, iteration, listened)
                engine.replaced_gradients(engine, update, compute)
            if update.skipped is not None:
                update.discard()
            elif update.kept is not None:
                _keep(update, state.batch)
            if window_complete:
                if several:
                    _average_together(engine, update)
                elif update.held == 0:
                    update.skip("the window holds no gradient")
                elif update.held != 1 or update.extra_weight is not ZERO:
                    _average(update)
                if update.skipped is None and listened and signals.gradients_ready.due <= iteration:
                    signals.gradients_ready.emit(engine, iteration)
                if listened and signals.step_started.due <= iteration:
                    signals.step_started.emit(engine, iteration)
                if several and engine.asks_to_skip and engine.processes.any(update.skipped is not None):
                    _skip_together(engine, update)
                update.undecided = False
                if update.skipped is None:
                    if engine.replaced_step is None and update.kept is None:
                        assert update.optimizer is not None
                        update.optimizer.step()
                    else:
                        _special_step(engine, update, partial(compute_again, update, iteration))
                    update.steps += 1
                if listened and signals.step_completed.due <= iteration:
                    signals.step_completed.emit(engine, iteration)
                update.discard()
            if listened and signals.completed.due <= iteration:
                signals.completed.emit(engine, iteration)
            if update.skipped is not None:
                engine.attend_to_skips()
            update.undecided = True
        except BaseException as error:
            regions.close(outside, error)
            raise
        if regions.depth > outside:
            regions.close(outside)

    def compute_gradients(update: UpdateState, iteration: int, listened: bool) -> None:
        """Forward, loss and backward of ``state.batch``; the gradients are added to those that the window holds."""
        batch = state.batch
        if batch is None and engine.has_data:
            update.output, update.raw_loss, update._weight = None, None, ONE
            return
        outside = regions.depth
        act = "forward"
        try:
            if listened and signals.forward_started.due <= iteration:
                signals.forward_started.emit(engine, iteration)
            if update.forward is None:
                loss = update.function(engine, batch)
            else:
                update.output = output = update.forward(engine, batch)
                if listened and signals.forward_completed.due <= iteration:
                    signals.forward_completed.emit(engine, iteration)
                    output = update.output
                act = "loss"
                no_loss = output is None or update.loss_function is None
                loss = None if no_loss else update.loss_function(engine, output, batch)
            update.raw_loss = loss
            if loss is not None:
                update.backward_loss = loss
                if listened and signals.loss_computed.due <= iteration:
                    signals.loss_computed.emit(engine, iteration)
            if regions.depth > outside:
                regions.close(outside)
            if loss is None or update.skipped is not None:
                update._weight = ONE
                return
            act = "backward"
            if listened and signals.backward_started.due <= iteration:
                signals.backward_started.emit(engine, iteration)
            if one_update and update._weight is ONE:
                update.backward_loss.backward()
            else:
                _backward(update, alone=one_update)
            update.held += 1
            if listened and signals.backward_completed.due <= iteration:
                signals.backward_completed.emit(engine, iteration)
        except BaseException as error:
            _leave(engine, error, outside, update, act)
            raise

    def evaluate(update: UpdateState, batch: Any, iteration: int, listened: bool) -> None:
        """Forward and loss of this batch for an engine that does not train: as part of `train` they cost a third more."""
        outside = regions.depth
        act: str | None = "forward"
        try:
            if listened:
                signals = engine.iteration_signals
                update.unsettled = True
                if signals.started.due <= iteration:
                    act = None
                    signals.started.emit(engine, iteration)
                    act = "forward"
                batch, inside = engine.state.batch, regions.depth
            if update.skipped is not None or (batch is None and engine.has_data):
                update.output = update.raw_loss = None
            else:
                if listened and signals.forward_started.due <= iteration:
                    signals.forward_started.emit(engine, iteration)
                function = update.function
                if function is not None:
                    loss = function(engine, batch)
                else:
                    update.output = output = update.forward(engine, batch)
                    if listened and signals.forward_completed.due <= iteration:
                        signals.forward_completed.emit(engine, iteration)
                        output = update.output
                    act = "loss"
                    no_loss = output is None or update.loss_function is None
                    loss = None if no_loss else update.loss_function(engine, output, batch)
                update.raw_loss = loss
                if loss is not None:
                    update.backward_loss = loss
                    if listened and signals.loss_computed.due <= iteration:
                        signals.loss_computed.emit(engine, iteration)
            if update.unsettled:
                update._weight, update.unsettled = ONE, False
                if listened:
                    if regions.depth > inside:
                        regions.close(inside)
                    act = None
                    if signals.completed.due <= iteration:
                        signals.completed.emit(engine, iteration)
                if regions.depth > outside:
                    regions.close(outside)
                if update.skipped is not None:
                    engine.attend_to_skips()
        except BaseException as error:
            _leave(engine, error, outside, update, act)
            raise

    def compute_again(update: UpdateState, iteration: int) -> Tensor:
        """The window's gradients at the weights as they are now, and its mean loss; the first evaluation stays what is seen."""
        assert update.kept is not None
        window: list[Any] = list(update.kept)
        own = len(window)
        if several and engine.replaced_gradients is not None and engine.has_data:
            # Whoever replaces the act may have to agree with the others, as often as they do.
            window += [_NO_BATCH] * (max(engine.processes.gather(own)) - own)
        seen = state.batch, update.output, update.raw_loss, update.backward_loss, update.hidden
        update.held, update.extra_weight = 0, ZERO
        assert update.optimizer is not None
        _clear_gradients(update.optimizer)
        update.evaluation += 1
        if begin_stream is not None:
            begin_stream(update, iteration)
        losses = []
        with signals.without_recording():
            listened = signals.due <= iteration
            for place, (batch, _, weight, share) in enumerate(window, 1):
                state.batch = batch
                if several:
                    update.completes, update.share = place == own, share
                compute = partial(compute_gradients, update, iteration, listened)
                if engine.replaced_gradients is None:
                    compute()
                else:
                    engine.replaced_gradients(engine, update, compute)
                if update.raw_loss is not None:
                    losses.append((batch, update.backward_loss.detach(), weight, share))
            if not losses and not several:
                raise RuntimeError(
                    f"update {update.name!r} gave no loss in evaluation {update.evaluation} of a step, though it gave one in the "
                    "first; forward and loss have to do the same each time that a step computes its gradients"
                )
            if several:
                _average_together(engine, update)
            elif update.held != 1 or update.extra_weight is not ZERO:
                _average(update)
            if listened and signals.gradients_ready.due <= iteration:
                signals.gradients_ready.emit(engine, iteration)
        state.batch, update.output, update.raw_loss, update.backward_loss, update.hidden = seen
        return _mean_loss(losses, engine.processes)

    run_update = train if engine.training else evaluate
    if begin_stream is None:
        return run_update

    def run_update_with_its_stream(update: UpdateState, batch: Any, iteration: int, listened: bool) -> None:
        begin_stream(update, iteration)
        run_update(update, batch, iteration, listened)

    return run_update_with_its_stream


def _model_streams(engine: Engine) -> Callable[[UpdateState, int], None]:
    """What lets a would-be step, and each further evaluation of it, draw from a stream of its own.

    The stream depends on the run's seed, the update's name, the iteration and the rank; then on which would-be step of the
    update in this iteration it is (time chunks), and on which evaluation. However much is drawn from one, the others stay.
    """
    keys = {one.name: derived_seed(engine.seed, "model", one.name, engine.processes.rank) for one in engine.updates}
    turns = dict.fromkeys(keys, (0, 0))  # of each update the last iteration, and which would-be step of it was the last
    devices = {p.device for module in engine.modules.values() for p in module.parameters()}
    on_devices = cuda_generators(devices)

    def begin_stream(update: UpdateState, iteration: int) -> None:
        name = update.name
        last, turn = turns[name]
        if update.evaluation == 0:
            turn = turn + 1 if last == iteration else 0
            turns[name] = iteration, turn
        seed = mixed(keys[name], iteration)
        if turn or update.evaluation:
            seed = mixed(mixed(seed, turn), update.evaluation)
        reseed(seed, on_devices)

    return begin_stream


def _special_step(engine: Engine, update: UpdateState, compute_again: Callable[[], Tensor]) -> None:
    """A step that a handler replaces, or that computes the gradients more than once."""
    assert update.optimizer is not None
    step: Callable[[], Any] = update.optimizer.step
    update.again = compute_again
    if update.kept is not None and needs_closure(update.optimizer):
        losses = [_mean_loss(update.kept, engine.processes)]

        def closure() -> Tensor:
            # The first evaluation is the one that was made to see whether there is to be a step.
            return losses.pop() if losses else compute_again()

        step = partial(update.optimizer.step, closure)
    try:
        if engine.replaced_step is None:
            step()
        else:
            engine.replaced_step(engine, update, step)
    finally:
        update.again = _not_again
        update.evaluation = 0


def _average_together(engine: Engine, update: UpdateState) -> None:
    """Let the window be that of all processes: its gradients reduced, and divided by what all hold; skipped if one skips it."""
    processes = engine.processes
    if engine.replaced_reduction is not None:
        engine.replaced_reduction(engine, update)
    own = float(update.held + update.extra_weight)
    held, weight, skipped, unknown = processes.sum(
        update.held, own, update.skipped is not None, isinstance(update.extra_weight, Tensor)
    )
    if skipped:
        _skip_together(engine, update)
    elif held == 0:
        update.skip("the window holds no gradient")
    elif weight == 0:
        # As in one process, where tensors that add up to zero are not noticed: their gradients are zero.
        if not unknown:
            update.skip("the weights of the window add up to zero")
    elif weight != processes.size:  # reduced gradients are a mean over the processes, and so is this
        _divide(update, weight / processes.size)


def _skip_together(engine: Engine, update: UpdateState) -> None:
    reasons = engine.processes.gather(update.skipped)
    rank = next(rank for rank, reason in enumerate(reasons) if reason is not None)
    reason = reasons[rank]
    if update.undecided:  # told alike, also where there is another reason
        update.skipped = reason if all(one == reason for one in reasons) else f"{reason} (rank {rank})"


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether this optimizer evaluates the loss inside its step, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _mean_loss(window: list[Kept], processes: Processes) -> Tensor:
    """The mean loss of a window; of several processes, that of all, since a search along a line has to go alike."""
    if processes.several:
        losses, weights = processes.sum(
            sum(float(loss * weight) for _, loss, weight, _ in window), sum(float(weight) for _, _, weight, _ in window)
        )
        return torch.tensor(losses / weights, dtype=torch.float64)
    if len(window) == 1:
        return window[0][1]
    total = sum((weight for _, _, weight, _ in window), start=ZERO)
    mean: Tensor = torch.stack([loss * weight for _, loss, weight, _ in window]).sum() / total
    return mean


_NO_BATCH = (None, None, 0, 1)

# CPython's small ints are single objects: `is` tells the usual case without comparing a tensor, which would synchronise.
ZERO, ONE = 0, 1


def _backward(update: UpdateState, *, alone: bool) -> None:
    """The backward of a weighted loss, or of one of several updates."""
    loss, weight = update.backward_loss, update._weight
    if weight is not ONE:
        loss = loss * weight
        update.extra_weight = update.extra_weight + (weight - 1)
        update._weight = ONE
    # Of several updates, each leaves gradients with its own parameters only: a generator's goes through the discriminator
    # without a trace there.
    loss.backward(inputs=None if alone else [p for p in update.parameters if p.requires_grad])


def _average(update: UpdateState) -> None:
    # The gradients are those of the weighted sum of the window's losses. Dividing them once is exact for every window,
    # also for a short last one and for weights that were not known before.
    total = update.held + update.extra_weight
    if isinstance(total, Tensor):
        total = total + (total == 0)  # a sum of zero cannot be noticed without synchronising; its gradients are zero
    elif total == 0:
        update.skip("the weights of the window add up to zero")
        return
    _divide(update, total)


def _divide(update: UpdateState, total: Any) -> None:
    torch._foreach_div_([p.grad for p in update.parameters if p.grad is not None], total)


def _leave(engine: Engine, error: BaseException, outside: int, update: UpdateState, act: str | None) -> None:
    """Close what an error leaves open, and say in which act of the update it came."""
    engine.regions.close(outside, error)
    if act is not None:
        state = engine.state
        error.add_note(f"in the {act} of update {update.name!r}, epoch {state.epoch}, iteration {state.iteration}")
        if isinstance(error, Exception):
            _explain(error, act, engine, update)


def _explain(error: Exception, act: str, engine: Engine, update: UpdateState) -> None:
    """Add to an error of torch what it means here."""
    loss = update.backward_loss
    if act == "backward":
        if not isinstance(loss, Tensor):
            error.add_note(f"the loss of update {update.name!r} is {loss!r}; it has to be a scalar tensor or None")
        elif isinstance(update.extra_weight, Tensor) and update.extra_weight.numel() != 1:
            error.add_note(
                f"the weight of update {update.name!r} has shape {tuple(update.extra_weight.shape)}; it has to be one number, "
                "such as the sum of its tokens"
            )
        elif loss.dim() > 0 and loss.numel() != 1:
            error.add_note(
                f"the loss of update {update.name!r} has shape {tuple(loss.shape)}; it has to be a scalar: "
                "take its mean"
            )
        elif not any(p.requires_grad for p in update.parameters):
            error.add_note(
                f"none of the parameters of update {update.name!r} requires a gradient; unfreeze one of them"
            )
        elif not loss.requires_grad:
            error.add_note(
                f"the loss of update {update.name!r} does not depend on any parameter that requires a gradient"
            )
    devices = {str(t.device) for t in tensors_in(engine.state.batch)}
    places = {str(p.device) for module in engine.modules.values() for p in module.parameters()}
    if devices and places and devices != places:
        error.add_note(
            f"the batch is on {', '.join(sorted(devices))} and the model on {', '.join(sorted(places))}; "
            "attach DeviceTransfer() to bring them together"
        )


class IterationSignals(SignalGroup):
    """The signals of an iteration's events, up to the completion of its updates.

    Those that these updates never emit are no members of the group: one whose turn never comes would be due for good.
    """

    __slots__ = (
        "backward_completed", "backward_started", "batch_completed", "batch_started", "completed", "forward_completed",
        "forward_started", "gradients_ready", "iteration_started", "loss_computed", "started", "step_completed", "step_started",
    )  # fmt: skip

    def __init__(self, bus: Bus, updates: Iterable[Update], *, training: bool) -> None:
        self.batch_started = bus.of(Events.GET_BATCH_STARTED)
        self.batch_completed = bus.of(Events.GET_BATCH_COMPLETED)
        self.iteration_started = bus.of(Events.ITERATION_STARTED)
        self.started = bus.of(Events.UPDATE_STARTED)
        self.forward_started = bus.of(Events.FORWARD_STARTED)
        self.forward_completed = bus.of(Events.FORWARD_COMPLETED)
        self.loss_computed = bus.of(Events.LOSS_COMPUTED)
        self.backward_started = bus.of(Events.BACKWARD_STARTED)
        self.backward_completed = bus.of(Events.BACKWARD_COMPLETED)
        self.gradients_ready = bus.of(Events.GRADIENTS_READY)
        self.step_started = bus.of(Events.OPTIMIZER_STEP_STARTED)
        self.step_completed = bus.of(Events.OPTIMIZER_STEP_COMPLETED)
        self.completed = bus.of(Events.UPDATE_COMPLETED)
        never: list[Signal] = []
        if not training:
            never += [self.backward_started, self.backward_completed]
            never += [self.gradients_ready, self.step_started, self.step_completed]
        if all(update.forward is None for update in updates):
            never.append(self.forward_completed)
        if all(update.loss is None and update.function is None for update in updates):
            never.append(self.loss_computed)
        signals = [getattr(self, name) for name in self.__slots__]
        super().__init__(*(signal for signal in signals if signal not in never))
