"""The spec of an update: forward, loss and optimizer of one training step, and where things are in its batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..authoring.batches import samples_in
from .arguments import parameters_named, with_options
from .from_model import loss_in_output, model_by_keyword
from .optimizers import joined
from .places import Place, PlaceError, check_place, described, value_at

if TYPE_CHECKING:
    from ..core.kernel import Kernel

__all__ = ["Update", "loss_module"]

Forward = Callable[["Any", Any], Any]
Loss = Callable[["Any", Any, Any], Tensor | None]
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
OneOptimizer = Optimizer | OptimizerFactory
AnyOptimizer = OneOptimizer | Mapping[str, Any] | Sequence[Optimizer]
Parameters = str | Sequence[str] | Callable[[Any], Any]

_ARGUMENTS = ("name", "parameters", "samples", "input", "output", "target")


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
            once the model is set up. Several, in a mapping from names, or built ones in a list, step together: their gradients
            are clipped, scaled and skipped as one.
        name: Name under which the update is found and its optimizer is saved.
        parameters: For a factory, what it optimizes: the name of one of the engine's modules, or the path of a part of its only
            model, or several of them; by default, or as "all", all parameters. Or a function ``parameters(engine)`` that returns
            the parameters or parameter groups; for several factories those of each by name, as `groups` does.
        function: One function ``function(engine, batch) -> loss`` instead of forward and loss; see `from_function`.
        samples: Called as ``samples(batch)``; returns the number of samples, by which averages weight a batch. By default
            `batches.samples_in` finds it; needed for batches of classes that do not say how many they hold. An index, key or
            name gives the place of the number, or of a tensor whose first dimension it is.
        input, target: Where the inputs and the targets are in a batch: an index, a key of a mapping, the name of an attribute,
            or a function of the batch. By default the first and the second element.
        output: Where the output is in what the forward returns, such as "logits"; by default that is all of it. `Metrics`,
            `Predictions`, `LabelSmoothing` and `Distillation` read it there; ``update.output`` is all that was returned.

    Example:
        >>> def forward(engine, batch):
        ...     return engine.model(batch[0])
        >>> def loss(engine, output, batch):
        ...     return torch.nn.functional.mse_loss(output, batch[1])
        >>> import torch
        >>> from functools import partial
        >>> Update(forward, loss, partial(torch.optim.SGD, lr=0.1)).name
        'main'
    """

    forward: Forward | None = None
    loss: Loss | None = None
    optimizer: AnyOptimizer | None = None
    name: str = "main"
    parameters: Parameters | None = None
    function: Callable[[Any, Any], Tensor | None] | None = None
    samples: Place | None = None
    input: Place | None = None
    output: Place | None = None
    target: Place | None = None

    def __post_init__(self) -> None:
        where = f"Update {self.name!r}"
        if (self.forward is None) == (self.function is None):
            raise TypeError(f"{where}: pass either forward= (and loss=) or function=")
        if self.function is not None and self.loss is not None:
            raise TypeError(f"{where}: function= returns the loss itself; omit loss=")
        optimizer = joined(where, self.optimizer, with_parameters=self.parameters is not None)
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "parameters", parameters_named(where, self.parameters))
        for argument in ("samples", "input", "output", "target"):
            check_place(f"{where}: {argument}", getattr(self, argument))
        self._check_functions(where)
        if self.optimizer is not None and self.loss is None and self.function is None:
            raise TypeError(f"{where}: an update with an optimizer needs a loss; pass loss=")
        if isinstance(self.optimizer, type):
            _check_signature(f"{where}: optimizer", self.optimizer, 1)
        if isinstance(self.optimizer, Optimizer) and self.parameters is not None:
            raise TypeError(f"{where}: parameters= requires an optimizer factory, but optimizer= is already built")

    def _check_functions(self, where: str) -> None:
        for argument in ("forward", "loss", "optimizer", "parameters", "function"):
            value = getattr(self, argument)
            if value is not None and not callable(value) and not isinstance(value, Optimizer):
                hint = "; pass the optimizer's class, such as torch.optim.SGD" if argument == "optimizer" else ""
                raise TypeError(f"{where}: {argument}={value!r} is not callable{hint}")
        for argument, places in (("forward", 2), ("loss", 3), ("function", 2)):
            if (value := getattr(self, argument)) is not None:
                _check_signature(f"{where}: {argument}", value, places)

    def samples_in(self, batch: Any) -> int:
        """The number of samples in a batch, by the spec's ``samples`` if it has one.

        Raises:
            TypeError: if that does not return a number.
        """
        if self.samples is None:
            return samples_in(batch)
        given = self.samples
        count = self._at(batch, given, "samples")
        if isinstance(count, Tensor) and not callable(given):
            count = count.shape[0] if count.dim() else int(count)
        elif isinstance(count, Tensor) and count.numel() == 1:
            count = int(count)
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
            raise TypeError(
                f"update {self.name!r}: samples= returned {count!r}; expected the number of samples in the batch"
            )
        return int(count)

    def output_in(self, output: Any) -> Any:
        """The output itself in what the forward returned, by the spec's ``output``.

        Raises:
            TypeError: if there is none, saying what there is.
        """
        place = self.output
        if place is None or (isinstance(output, Tensor) and not callable(place)):
            return output
        return self._at(output, place, "output")

    @property
    def _predicts(self) -> bool:
        """Whether this update has only a forward, so that a batch needs no target."""
        return self.loss is None and self.function is None

    def input_in(self, batch: Any) -> Any:
        """The inputs of a batch, by the spec's ``input``; see `output_in`."""
        if self.input is None and self._predicts and isinstance(batch, Tensor):
            return batch
        return self._at(batch, 0 if self.input is None else self.input, "input")

    def target_in(self, batch: Any) -> Any:
        """The targets of a batch, by the spec's ``target``; see `output_in`."""
        return self._at(batch, 1 if self.target is None else self.target, "target")

    def _at(self, value: Any, place: Place, argument: str) -> Any:
        try:
            return value_at(value, place)
        except PlaceError as error:
            what = "the value that its forward function returned" if argument == "output" else "the batch"
            raise TypeError(
                f"update {self.name!r} found no {argument} in {what}: {error}; tell Update where to find it: "
                f"Update(..., {argument}=)"
            ) from None

    @classmethod
    def supervised(
        cls,
        loss: Callable[[Any, Any], Tensor],
        optimizer: AnyOptimizer | None = None,
        *,
        name: str = "main",
        parameters: Parameters | None = None,
        samples: Place | None = None,
        input: Place | None = None,
        output: Place | None = None,
        target: Place | None = None,
        **options: Any,
    ) -> Update:
        """An update for batches of (input, target), with the loss ``loss(model(input), target)``.

        Further keyword arguments are those of the optimizer's class: ``Update.supervised(loss, torch.optim.AdamW, lr=1e-3)``.
        A loss that is a module with trainable parameters, such as class centers, is trained, moved and saved with the model.
        ``input``, ``target`` and ``output`` say where these are in other batches and outputs; see `Update`.

        Example:
            >>> import torch
            >>> Update.supervised(
            ...     torch.nn.functional.cross_entropy,
            ...     torch.optim.SGD,
            ...     lr=0.1,
            ...     input="image",
            ...     target="label",
            ... ).name
            'main'
        """
        kind = getattr(loss, "func", loss)  # of a partial
        if isinstance(kind, Optimizer) or (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise TypeError(
                f"Update.supervised({loss!r}): got an optimizer as the loss; write Update.supervised(loss, optimizer)"
            )
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            raise TypeError(
                f"Update.supervised({loss!r}): got a class as the loss; pass an instance: {kind.__name__}(...)"
            )
        _check_signature(f"Update {name!r}: loss", loss, 2)
        optimizer = with_options("Update.supervised", optimizer, options, _ARGUMENTS)
        places: dict[str, Any] = {"samples": samples, "input": input, "output": output, "target": target}
        if input is None and output is None and target is None:

            def supervised_loss(engine: Kernel, output: Any, batch: Any) -> Tensor:
                return loss(output, batch[1])

        else:

            def supervised_loss(engine: Kernel, output: Any, batch: Any) -> Tensor:
                update = engine.state.update
                return loss(update.output_in(output), update.target_in(batch))

        vars(supervised_loss)["loss"] = loss  # where `loss_module` finds it
        forward = _model_of_input if input is None else _model_of_place
        return cls(forward, supervised_loss, optimizer, name, parameters, **places)

    @classmethod
    def from_model(
        cls,
        optimizer: AnyOptimizer | None = None,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        name: str = "main",
        parameters: Parameters | None = None,
        samples: Place | None = None,
        input: Place | None = None,
        output: Place | None = "logits",
        target: Place | None = "labels",
        **options: Any,
    ) -> Update:
        """An update for models that take the batch by keyword and return their loss, as those of Hugging Face do.

        The forward is ``model(**batch)``. A batch is a mapping of any class, or an object with fields: a dataclass, named tuple,
        class of attrs or pydantic, or a graph of PyTorch Geometric. The loss is the output's ``loss``, the first element of a
        tuple, or the output itself.

        Args:
            optimizer: As for `Update`; None for an update that evaluates.
            loss: Computes the loss from the output and the targets, ``loss(output, target)``, in place of the model's own.
                `MixUp` and `CutMix` need it, since they compute the loss of an output for other targets.
            name, parameters, samples, input, output, target: As for `Update`.
            options: Keyword arguments of the optimizer's class.

        Raises:
            ValueError: In training, for a model that returns no loss, as Hugging Face's do for a batch without labels.
            TypeError: For a batch without names.

        Example:
            >>> import torch
            >>> from types import SimpleNamespace
            >>> from signalfire import Engine
            >>> class Model(nn.Linear):
            ...     def forward(self, x, labels):
            ...         logits = super().forward(x)
            ...         return SimpleNamespace(
            ...             loss=nn.functional.cross_entropy(logits, labels), logits=logits
            ...         )
            >>> update = Update.from_model(torch.optim.AdamW, lr=1e-3)
            >>> trainer = Engine(update, model=Model(4, 3), seed=0)
            >>> state = trainer.run(
            ...     [{"x": torch.ones(2, 4), "labels": torch.tensor([0, 1])}], max_epochs=1
            ... )
        """
        optimizer = with_options("Update.from_model", optimizer, options, ("loss", *_ARGUMENTS))
        if loss is not None:
            made = cls.supervised(loss, optimizer, name=name, parameters=parameters, output=output, target=target)
            return replace(made, forward=model_by_keyword, samples=samples, input=input)
        places: dict[str, Any] = {"samples": samples, "input": input, "output": output, "target": target}
        return cls(model_by_keyword, loss_in_output, optimizer, name, parameters, **places)

    @classmethod
    def from_function(
        cls,
        function: Callable[[Any, Any], Tensor | None],
        optimizer: AnyOptimizer | None = None,
        *,
        name: str = "main",
        parameters: Parameters | None = None,
        samples: Place | None = None,
        **options: Any,
    ) -> Update:
        """An update made of a single function ``(engine, batch) -> loss``; without output, FORWARD_COMPLETED is not emitted.

        ``options`` are keyword arguments of the optimizer's class.
        """
        optimizer = with_options("Update.from_function", optimizer, options, _ARGUMENTS[:3])
        return cls(None, None, optimizer, name, parameters, function, samples)

    @classmethod
    def prediction(
        cls,
        forward: Forward | None = None,
        *,
        name: str = "main",
        input: Place | None = None,
        output: Place | None = None,
    ) -> Update:
        """An update with only a forward: no loss and no gradients.

        By default, the forward is ``model(input)``, where the input is the batch if this is a tensor, else its first element.
        """
        default = _model_of_input_alone if input is None else _model_of_place
        return cls(forward or default, None, None, name, input=input, output=output)

    def evaluation(self) -> Update:
        """A copy without the optimizer, for an engine that evaluates."""
        return replace(self, optimizer=None, parameters=None)


def loss_module(update: Update) -> nn.Module | None:
    """The module that computes an update's loss, also behind a partial or a bound method; None if a plain function does."""
    loss = getattr(update.loss, "loss", None) or update.loss
    while not isinstance(loss, nn.Module) and (inner := getattr(loss, "func", None) or getattr(loss, "__self__", None)):
        loss = inner
    return loss if isinstance(loss, nn.Module) else None


def _model_of_input(engine: Kernel, batch: Any) -> Any:
    kind = batch.__class__
    if (
        kind is not tuple
        and kind is not list
        and (
            isinstance(batch, Tensor | Mapping)  # batch[0] of a tensor would silently be its first sample
            or not hasattr(kind, "__getitem__")
        )
    ):
        update = engine.state.update
        if update.spec._predicts:
            raise TypeError(
                f"update {update.name!r} expects each batch to be a tensor or (input, ...), but this batch is "
                f"{described(batch)}; tell Update where to find the input: Update.prediction(input='image'), or pass "
                "forward(engine, batch) to Update.prediction"
            )
        raise TypeError(
            f"update {update.name!r} expects each batch to be (input, target), but this batch is {described(batch)}; "
            "for other batches, tell Update where to find the input and the target: Update.supervised(..., "
            "input='image', target='label'), or pass forward(engine, batch) and loss(engine, output, batch) to Update"
        )
    return engine.model(batch[0])


def _model_of_input_alone(engine: Kernel, batch: Any) -> Any:
    """As `_model_of_input`, for batches without a target: a tensor is the input."""
    return engine.model(batch) if isinstance(batch, Tensor) else _model_of_input(engine, batch)


def _model_of_place(engine: Kernel, batch: Any) -> Any:
    return engine.model(engine.state.update.input_in(batch))


def _check_signature(where: str, function: Callable[..., Any], places: int) -> None:
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{where}={function!r} is a coroutine function; pass a plain function")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a built-in without a signature
        return
    try:
        signature.bind(*[None] * places)
    except TypeError as error:
        two = "(output, target)" if where.endswith(" loss") else "(engine, batch)"
        wanted = {1: "(parameters)", 2: two, 3: "(engine, output, batch)"}[places]
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"{where}={name}{signature} must accept {wanted}: {error}") from None
