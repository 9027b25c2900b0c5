"""An update: forward, loss and optimizer of one training step, and its state in an engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .batches import samples_in
from .window import ONE, Window

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["NO_GRADIENT", "Update", "UpdateState", "loss_module", "needs_closure", "read_together"]

Forward = Callable[["Engine", Any], Any]
Loss = Callable[["Engine", Any, Any], Tensor | None]
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]

NO_GRADIENT = "the window holds no gradient"
"""Why a step is skipped where no micro-batch of its window gave a loss."""


@dataclass(frozen=True)
class Update:
    """The training step of one optimizer: forward, loss, and optimizer.

    Supervised learning has one update, a GAN has two; each runs in every iteration. An update without an optimizer only
    evaluates. The object is immutable, and engines can share it.

    Args:
        forward: Called as ``forward(engine, batch)``; returns the output.
        loss: Called as ``loss(engine, output, batch)``; returns a scalar tensor, the mean over the batch, or None to skip
            the batch. Without ``loss``, the update only predicts.
        optimizer: An optimizer, or a factory such as ``partial(torch.optim.Adam, lr=1e-2)``, which is called with the parameters
            once the model is set up.
        name: Name under which the update is found and its optimizer is saved.
        parameters: For a factory, called as ``parameters(engine)``; returns the parameters or parameter groups to optimize. By
            default, all parameters of the engine's modules.
        function: One function ``function(engine, batch) -> loss`` instead of forward and loss; see `from_function`.
        samples: Called as ``samples(batch)``; returns the number of samples, by which averages weight a batch. By default
            `batches.samples_in` finds it; needed for batches of classes that do not say how many they hold.

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
    samples: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        if (self.forward is None) == (self.function is None):
            raise TypeError(f"Update {self.name!r}: pass either forward= (and loss=) or function=")
        if self.function is not None and self.loss is not None:
            raise TypeError(f"Update {self.name!r}: function= returns the loss itself; omit loss=")
        for argument in ("forward", "loss", "optimizer", "parameters", "function", "samples"):
            value = getattr(self, argument)
            if value is not None and not callable(value) and not isinstance(value, Optimizer):
                raise TypeError(f"Update {self.name!r}: {argument}={value!r} is not callable")
        for argument, places in (("forward", 2), ("loss", 3), ("function", 2)):
            if (value := getattr(self, argument)) is not None:
                _check_signature(f"Update {self.name!r}: {argument}", value, places)
        if self.optimizer is not None and self.loss is None and self.function is None:
            raise TypeError(f"Update {self.name!r}: an optimizer needs a loss; pass loss=")
        if isinstance(self.optimizer, type):
            _check_signature(f"Update {self.name!r}: optimizer", self.optimizer, 1)
        if isinstance(self.optimizer, Optimizer) and self.parameters is not None:
            raise TypeError(
                f"Update {self.name!r}: parameters= requires an optimizer factory, but optimizer= is already built"
            )

    @classmethod
    def supervised(
        cls,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | OptimizerFactory | None = None,
        *,
        name: str = "main",
        parameters: Callable[[Engine], Iterable[Any]] | None = None,
        samples: Callable[[Any], int] | None = None,
    ) -> Update:
        """An update for batches of (input, target), with the loss ``loss(model(input), target)``.

        A loss that is a module with trainable parameters, such as class centres, is trained, moved and saved with the model.

        Example:
            >>> Update.supervised(torch.nn.functional.cross_entropy, torch.optim.SGD).name
            'main'
        """
        _check_signature(f"Update {name!r}: loss", loss, 2)

        def supervised_loss(engine: Engine, output: Any, batch: Any) -> Tensor:
            return loss(output, batch[1])

        vars(supervised_loss)["loss"] = loss  # where `loss_module` finds it
        return cls(_model_of_input, supervised_loss, optimizer, name, parameters, samples=samples)

    @classmethod
    def from_function(
        cls,
        function: Callable[[Engine, Any], Tensor | None],
        optimizer: Optimizer | OptimizerFactory | None = None,
        *,
        name: str = "main",
        parameters: Callable[[Engine], Iterable[Any]] | None = None,
        samples: Callable[[Any], int] | None = None,
    ) -> Update:
        """An update made of a single function ``(engine, batch) -> loss``; without output, FORWARD_COMPLETED is not emitted."""
        return cls(None, None, optimizer, name, parameters, function, samples)

    @classmethod
    def prediction(cls, forward: Forward | None = None, *, name: str = "main") -> Update:
        """An update with only a forward, ``model(batch[0])`` by default: no loss and no gradients."""
        return cls(forward or _model_of_input, None, None, name)

    def evaluation(self) -> Update:
        """A copy without the optimizer, for an engine that evaluates."""
        return replace(self, optimizer=None, parameters=None)


def loss_module(update: Update) -> nn.Module | None:
    """The module that computes an update's loss, also behind a partial or a bound method; None if a plain function does."""
    loss = getattr(update.loss, "loss", None) or update.loss
    while not isinstance(loss, nn.Module) and (inner := getattr(loss, "func", None) or getattr(loss, "__self__", None)):
        loss = inner
    return loss if isinstance(loss, nn.Module) else None


def _model_of_input(engine: Engine, batch: Any) -> Any:
    kind = batch.__class__
    if kind is Tensor or kind is dict:  # batch[0] of a tensor would silently be its first sample
        raise TypeError(
            f"update {engine.state.update.name!r} takes batches of (input, target), but this one is a "
            f"{type(batch).__name__}; for other batches pass forward(engine, batch) and loss(engine, output, batch) to Update"
        )
    return engine.model(batch[0])


def _check_signature(where: str, function: Callable[..., Any], places: int) -> None:
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{where}={function!r} is a coroutine function; pass a plain function")
    try:
        inspect.signature(function).bind(*[None] * places)
    except ValueError:  # a built-in without a signature
        return
    except TypeError as error:
        wanted = {1: "(parameters)", 2: "two arguments", 3: "(engine, output, batch)"}[places]
        raise TypeError(f"{where}={function!r} must accept {wanted}: {error}") from None


class UpdateState:
    """One update at work in one engine; ``engine.state.update`` is the one that runs now.

    Attributes:
        name: the update's name.
        spec: the `Update` that it was made from.
        optimizer: the optimizer; None before OPTIMIZER_SETUP, and on an engine that only evaluates.
        options: the options that it was built with, such as lr, for each of its groups.
        window: the accumulation window.
        output: what the forward returned, perhaps transformed at FORWARD_COMPLETED.
        raw_loss: the loss as the loss function returned it, with its graph.
        backward_loss: what the backward starts from, perhaps scaled or with penalties added at LOSS_COMPUTED.
        weight: how much this loss counts in its window, such as its number of tokens; set it at LOSS_COMPUTED.
        skipped: why the step is skipped; None if it is not.
        last_skip: why the last step that was skipped was skipped; None if none was since the engine was built or reset.
        steps: the optimizer steps that really happened.
        evaluation: how many times this step's gradients have been recomputed; 0 in the first pass.
        again: inside a step that a handler overrides with ``again=True``, recomputes the gradients of the whole window and
            returns its mean loss.
        hidden: what the forward carries from one time chunk of a batch to the next; None before the first.
        more: whether this iteration has further micro-steps of this update, such as time chunks.
        one_step_per_batch: whether each batch is one micro-step; a handler that changes that sets it to False.
        sync_gradients: with several ranks, whether this micro-step closes its window; only then are gradients reduced.
        omitted_in: at ITERATION_COMPLETED, the number of the iteration if it was made without this update, by its plan or for a
            stop; another number if not.
        share: with several ranks, the weight of this rank's batch; see `Feed.share`.
        can_skip: whether the step can still be skipped.
    """

    __slots__ = (
        "_asked",
        "_parameters",
        "_parameters_of",
        "again",
        "backward_loss",
        "can_skip",
        "evaluation",
        "forward",
        "function",
        "hidden",
        "last_skip",
        "loss_function",
        "more",
        "name",
        "omitted_in",
        "one_step_per_batch",
        "optimizer",
        "options",
        "output",
        "raw_loss",
        "share",
        "skipped",
        "spec",
        "steps",
        "sync_gradients",
        "weight",
        "window",
    )  # fmt: skip

    def __init__(self, spec: Update, *, training: bool) -> None:
        self.spec = spec
        self.name = spec.name
        self.forward: Any = spec.forward
        self.loss_function: Any = spec.loss
        self.function: Any = spec.function
        self.optimizer = spec.optimizer if training and isinstance(spec.optimizer, Optimizer) else None
        self.options = _options(self.optimizer)
        self.window = Window()
        self.again: Callable[[], Tensor] = _not_again
        self.one_step_per_batch = True
        self.sync_gradients = True
        self.share: float = ONE
        self._parameters: list[Tensor] = []
        self._parameters_of: list[int] = []
        self._asked: list[tuple[Callable[..., None], tuple[Tensor, ...], bool]] = []
        self.restart()

    def restart(self) -> None:
        """Begin as new, with the same optimizer."""
        self.output: Any = None
        self.raw_loss: Tensor | None = None
        self.backward_loss: Any = None
        self.weight: Any = ONE
        self.can_skip = True
        self.omitted_in = 0
        self.steps = 0
        self.last_skip: str | None = None
        self.abandon()

    def reset(self) -> None:
        """Begin as new; an optimizer that a factory built is built again."""
        if not isinstance(self.spec.optimizer, Optimizer):
            self.take_optimizer(None)
        self.restart()

    def abandon(self) -> None:
        """Forget the open window, and all that belongs to the micro-step under way."""
        self.discard()
        self.window.filled = 0
        self.skipped: str | None = None
        self.evaluation = 0
        self.hidden: Any = None
        self.more = False
        self._asked = []  # after an error, flags may be left that were not read

    def discard(self) -> None:
        """Forget what the open window holds."""
        self.window.discard(self.optimizer)

    def end_run(self, *, failed: bool) -> None:
        """Free the graph of the last micro-step; after an error, also undo what it may have left."""
        self.output, self.backward_loss, self.loss = None, None, self.loss
        if failed:
            self.weight, self.can_skip = ONE, True

    def take_optimizer(self, optimizer: Any) -> None:
        """Take the optimizer that the factory built; None to have it built again.

        Raises:
            TypeError: if it is no torch optimizer.
        """
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"update {self.name!r}: the optimizer factory returned {optimizer!r}, which is no torch optimizer"
            )
        self.optimizer = optimizer
        self.options = _options(optimizer)
        self._parameters_of = []

    @property
    def loss(self) -> Tensor | None:
        """The loss to be reported, detached: neither divided by the window's length, nor weighted, nor scaled."""
        return self.raw_loss.detach() if isinstance(self.raw_loss, Tensor) else self.raw_loss

    @loss.setter
    def loss(self, value: Tensor | None) -> None:
        self.raw_loss = value

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

    def samples_in(self, batch: Any) -> int:
        """The number of samples in a batch, by the spec's ``samples`` if it has one.

        Raises:
            TypeError: if that does not return a number.
        """
        if self.spec.samples is None:
            return samples_in(batch)
        count = self.spec.samples(batch)
        if isinstance(count, Tensor) and count.numel() == 1:
            count = int(count)
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
            raise TypeError(
                f"update {self.name!r}: samples= returned {count!r}; expected the number of samples in the batch"
            )
        return int(count)

    def skip(self, reason: str) -> None:
        """Skip the step, or the whole update if its forward was not made yet; the first reason is kept.

        It holds for this iteration, or for this time chunk of a batch that comes in several. What the window holds is discarded.
        Schedules, averages and step counters do not move. Once the step was made it is too late, and nothing happens.
        """
        if self.skipped is None and self.can_skip:
            self.skipped = self.last_skip = reason

    def read_later(self, then: Callable[..., None], *flags: Tensor) -> None:
        """Have flags on a device read together with those of others: the next `read_flags` calls ``then(*values)``.

        Each reading waits for the device. Flags that are given at GRADIENTS_READY, in Phase.FINALIZE, are read at once.

        Args:
            then: called with a bool for each flag, in the order of the calls.
            flags: tensors of one element; true where it is not zero.
        """
        self._asked.append((lambda *values: then(*map(bool, values)), flags, False))

    def read_numbers_later(self, then: Callable[..., None], *numbers: Tensor) -> None:
        """As `read_later`, for numbers: ``then`` is called with a float for each."""
        self._asked.append((then, numbers, True))

    def read_flags(self) -> None:
        """Read all that was asked for, in one synchronization with the device, and report the values."""
        asked, self._asked = self._asked, []
        if len(asked) == 1 and asked[0][2]:
            then, several, _ = asked[0]
            then(*read_together(several))
            return
        given = [one for _, several, _ in asked for one in several]
        values = []
        if given:
            device = given[0].device
            values = torch.stack([one.detach().reshape(()).to(device, torch.float32) for one in given]).tolist()
        for then, several, numbers in asked:
            # On a CPU a number costs nothing to read, and keeps its precision.
            own = read_together(several) if numbers and several and several[0].device.type == "cpu" else values
            then(*own[: len(several)])
            del values[: len(several)]

    def __repr__(self) -> str:
        return f"UpdateState({self.name!r}, steps={self.steps}, loss={self.loss}, skipped={self.skipped!r})"


def read_together(tensors: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one element, in one synchronization with their device, there in single precision."""
    if not tensors or tensors[0].device.type == "cpu":
        return [one.item() for one in tensors]
    device = tensors[0].device
    return torch.stack([one.detach().reshape(()).to(device, torch.float32) for one in tensors]).tolist()


def _not_again() -> Tensor:
    raise RuntimeError("again(): the gradients of a step can be computed again inside the step only")


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether this optimizer evaluates the loss inside its step, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _options(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """The plain values among the options of an optimizer's groups."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [{key: _plain(value) for key, value in group.items() if _is_plain(_plain(value))} for group in groups]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)
