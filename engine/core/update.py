"""An update at work in an engine: its optimizer, its window, and what its last forward gave."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .window import ONE, Window

__all__ = ["NO_GRADIENT", "UpdateState", "kind_of", "needs_closure", "read_together"]

NO_GRADIENT = "no micro-batch in the window produced a gradient"
"""Why a step is skipped where no micro-batch of its window gave a loss."""


class UpdateState:
    """One update at work in one engine; ``engine.state.update`` is the one that runs now.

    Attributes:
        name: the update's name.
        spec: the `Update` that it was created from.
        optimizer: the optimizer; None before OPTIMIZER_SETUP, and on an engine that only evaluates.
        options: the options that the optimizer was built with, such as lr, for each of its groups.
        window: the accumulation window.
        output: the output of the forward, perhaps transformed at FORWARD_COMPLETED.
        raw_loss: the loss as the loss function returned it, with its graph.
        backward_loss: the loss that the backward starts from, perhaps scaled or with penalties added at LOSS_COMPUTED.
        weight: the weight of this loss in its window, such as its number of tokens; set it at LOSS_COMPUTED.
        skipped: the reason why the step is skipped; None if it is not.
        last_skip: the reason for the last skipped step; None if no step was skipped since the engine was built or reset.
        steps: the number of optimizer steps taken, without skipped ones.
        evaluation: the number of times this step's gradients have been recomputed; 0 in the first pass.
        again: inside a step that a handler overrides with ``again=True``, a function that recomputes the gradients of the whole
            window and returns its mean loss.
        hidden: the hidden state that the forward passes from one time chunk of a batch to the next; None before the first.
        more: whether this iteration has further micro-steps of this update, such as time chunks.
        one_step_per_batch: whether each batch is one micro-step; a handler that changes that sets it to False.
        sync_gradients: with several ranks, whether this micro-step closes its window; only then are gradients reduced.
        omitted_in: at ITERATION_COMPLETED, the number of the iteration if it ran without this update, by its plan or for a stop;
            a different number if not.
        share: with several ranks, the weight of this rank's batch; see `Feed.share`.
        kind: the name of the optimizer's class; None without one.
        can_skip: whether the step can still be skipped.
    """

    __slots__ = (
        "_asked",
        "_lists",
        "_parameters",
        "_sizes",
        "again",
        "backward_loss",
        "can_skip",
        "evaluation",
        "forward",
        "function",
        "hidden",
        "kind",
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

    def __init__(self, spec: Any, *, training: bool) -> None:
        self.spec = spec
        self.name: str = spec.name
        self.forward: Any = spec.forward
        self.loss_function: Any = spec.loss
        self.function: Any = spec.function
        self.optimizer = spec.optimizer if training and isinstance(spec.optimizer, Optimizer) else None
        self.options = _options(self.optimizer)
        self.kind = None if self.optimizer is None else kind_of(self.optimizer)
        self.window = Window()
        self.again: Callable[[], Tensor] = _not_again
        self.one_step_per_batch = True
        self.sync_gradients = True
        self.share: float = ONE
        self._parameters: list[Tensor] = []
        self._lists: list[Any] = []  # of the groups, whose tensors these are, with their sizes
        self._sizes: list[int] = []
        self._asked: list[tuple[Callable[..., None], tuple[Tensor, ...], bool]] = []
        self.restart()

    def restart(self) -> None:
        """Restart, with the same optimizer."""
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
        """Restart; an optimizer that a factory built is rebuilt."""
        if not isinstance(self.spec.optimizer, Optimizer):
            self.take_optimizer(None)
        self.restart()

    def abandon(self) -> None:
        """Discard the open window, and everything that belongs to the current micro-step."""
        self.discard()
        self.window.filled = 0
        self.end_micro_step()

    def end_micro_step(self) -> None:
        """Discard everything that belongs to the current micro-step; an open window is unchanged."""
        self.skipped: str | None = None
        self.evaluation = 0
        self.hidden: Any = None
        self.more = False
        self._asked = []  # after an error, flags may be left that were not read

    def discard(self) -> None:
        """Discard the content of the open window."""
        self.window.discard(self.optimizer)

    def end_run(self, *, failed: bool) -> None:
        """Free the graph of the last micro-step; after an error, also undo leftover changes."""
        self.output, self.backward_loss, self.loss = None, None, self.loss
        if failed:
            self.weight, self.can_skip = ONE, True

    def take_optimizer(self, optimizer: Any) -> None:
        """Take the optimizer that the factory built; None rebuilds it.

        Raises:
            TypeError: if it is not a torch optimizer.
        """
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"update {self.name!r}: the optimizer factory returned {optimizer!r}, which is not a torch optimizer"
            )
        self.optimizer = optimizer
        self.options = _options(optimizer)
        self.kind = None if optimizer is None else kind_of(optimizer)
        self._sizes = []

    @property
    def loss(self) -> Tensor | None:
        """The reported loss, detached: not divided by the window's length, not weighted, and not scaled."""
        return self.raw_loss.detach() if isinstance(self.raw_loss, Tensor) else self.raw_loss

    @loss.setter
    def loss(self, value: Tensor | None) -> None:
        self.raw_loss = value

    @property
    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters, over all of its groups."""
        if self.optimizer is None:
            return []
        groups = self.optimizer.param_groups
        pairs = zip_longest(groups, self._lists, fillvalue={"params": ()})
        sizes = [len(group["params"]) if group["params"] is known else -1 for group, known in pairs]
        if sizes != self._sizes:  # a group was added, as gradual unfreezing does, or has another list
            several = getattr(self.optimizer, "parameters", None)  # of several that step together
            self._parameters = several if several is not None else [p for group in groups for p in group["params"]]
            self._lists = [group["params"] for group in groups]
            self._sizes = [len(one) for one in self._lists]
        return self._parameters

    def order_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Put the parameters of several optimizers in the order of the model."""
        if (order := getattr(self.optimizer, "order_like", None)) is not None:
            order(parameters)
            self._sizes = []

    def samples_in(self, batch: Any) -> int:
        """The number of samples in a batch; see `Update.samples_in`."""
        return self.spec.samples_in(batch)  # type: ignore[no-any-return]

    def output_in(self, output: Any) -> Any:
        """The output within the forward's return value; see `Update.output_in`."""
        return self.spec.output_in(output)

    def input_in(self, batch: Any) -> Any:
        """The inputs of a batch; see `Update.input_in`."""
        return self.spec.input_in(batch)

    def target_in(self, batch: Any) -> Any:
        """The targets of a batch; see `Update.target_in`."""
        return self.spec.target_in(batch)

    def skip(self, reason: str) -> None:
        """Skip the step, or the whole update if its forward has not run yet; the first reason is kept.

        This applies to the current iteration, or to the current time chunk of a batch. The window's content is discarded.
        Schedules, averages and step counters do not advance. After the step, the call has no effect.
        """
        if self.skipped is None and self.can_skip:
            self.skipped = self.last_skip = reason

    def read_later(self, then: Callable[..., None], *flags: Tensor) -> None:
        """Read flags on a device together with those of other handlers: the next `read_flags` calls ``then(*values)``.

        Each read waits for the device. Flags given at GRADIENTS_READY, in Phase.FINALIZE, are read at once.

        Args:
            then: function called with a bool for each flag, in the order of the calls.
            flags: tensors of one element; a nonzero element is True.
        """
        self._asked.append((lambda *values: then(*map(bool, values)), flags, False))

    def read_numbers_later(self, then: Callable[..., None], *numbers: Tensor) -> None:
        """Like `read_later`, for numbers: ``then`` is called with a float for each."""
        self._asked.append((then, numbers, True))

    def read_flags(self) -> None:
        """Read all requested flags and numbers in one synchronization with the device, and report the values."""
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
    raise RuntimeError("again(): the gradients of a step can be recomputed only inside the step")


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


def kind_of(optimizer: Optimizer) -> str:
    """The name of an optimizer's class; of several that step together, the names of theirs."""
    return getattr(optimizer, "kind", None) or type(optimizer).__name__


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether this optimizer evaluates the loss inside its step, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
