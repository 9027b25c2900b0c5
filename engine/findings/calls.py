"""What the first forward and loss of an update call: some arguments of torch's functions are hardly ever meant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..authoring.batches import tensors_in
from ..authoring.devices import is_readable
from .dropout import EagerMode, LookingHook
from .loss_graph import Problem, note_operands
from .loss_nodes import are_scaled, is_term_of, note_factor
from .target_counts import Mean, is_among, mean_over, rows_of

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["FirstCalls"]

_SAMPLES = 64  # of a batch whose values are looked at
_PADDED = 0.05  # share of targets from which on they are padding, and not a class
_ABOVE_GUESSING = 5.0
_PADDING = "the last step of the longest sequence, which is padding in the shorter sequences"


@dataclass(frozen=True)
class _Sequence:
    """What a recurrent layer returned for each step.

    Attributes:
        output: the tensor.
        samples_first: whether its first dimension is that of the samples.
        kind: "forward", "both" for two directions, or what its last step is.
        hidden: the hidden states that the layer returned with it.
        taken: the steps that were taken out of it by their index, whole; -1 for any other use of it or of the hidden states.
    """

    output: Tensor
    samples_first: bool
    kind: str
    hidden: list[Tensor]
    taken: set[int] = field(default_factory=set)

    @property
    def length(self) -> int:
        return self.output.shape[int(self.samples_first)]


class FirstCalls(EagerMode):
    """Looks at the calls of torch's functions inside the ``with`` block.

    Args:
        engine: the engine.
        samples: the number of samples of the batch; None if it is not known.
        counts_targets: whether to note what its cross entropies are means over.

    Attributes:
        problems: what looked wrong.
        means: what its cross entropies are means over, with their values.
        points: by what derivatives were taken, such as the inputs of a differential equation.
    """

    def __init__(self, engine: Engine, samples: int | None, *, counts_targets: bool = False) -> None:
        super().__init__()
        self.problems: list[Problem] = []
        self.means: list[tuple[Mean, Tensor]] = []
        self.points: list[Tensor] = []
        self._engine = engine
        self._counts_targets = counts_targets
        self._samples = samples
        self._recurrent: list[_Sequence] = []
        self._hidden: list[Tensor] = []  # of the latest recurrent layer
        self._targets: list[Tensor] = []  # of its cross entropies
        self._buffers: set[int] = set()
        self._given_a_dimension: list[Tensor] = []  # as y[:, None] is, which is meant to meet all
        self._given: list[Tensor] = []  # to the models
        self._constant: list[tuple[Tensor, float, int]] = []  # sums of numbers, with a summand that has no gradient
        self._shifts = False  # whether the model leaves out, moves or masks steps of its input
        self._cut_off: dict[int, Tensor] = {}  # by id: computed from what requires a gradient, and without one
        self._origins: dict[int, set[int]] = {}  # by id: what of it was cut off first
        self._met: set[int] = set()  # of these, what also meets something with a gradient
        self._hooks = ExitStack()
        self._failed = False

    def __enter__(self) -> FirstCalls:
        for _, part in self._engine.modules.parts():
            self._buffers.update(id(one) for one in part._buffers.values() if one is not None)
            if isinstance(part, nn.RNNBase):
                self._hooks.callback(part.register_forward_hook(LookingHook(self._see_recurrent)).remove)
        note = LookingHook(partial(self._engine.findings.look, self._note_given))
        for root in (one for one in self._engine.modules.values() if not isinstance(one, torch.jit.ScriptModule)):
            self._hooks.callback(root.register_forward_pre_hook(note, with_kwargs=True).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if self._failed or torch.compiler.is_compiling():
            return result
        try:
            self._see(getattr(func, "__name__", ""), args, named, result)
        except Exception as error:
            self._failed = True
            self._engine.findings.look_failed("FirstCalls", error)
        return result

    def _see(self, name: str, args: Any, named: Any, result: Any) -> None:
        """Look at one call and at what it returned."""
        if not all(_has_values(one) for one in tensors_in((args, named, result))):
            return
        self._note_sequences(name, args, result)
        self._note_shifts(name, args, result)
        note_factor(args, result)
        if (look := _LOOKS.get(name)) is not None:
            self.problems += look(self, args, named, result)
        elif name == "grad":
            self.points += tensors_in(_argument(args, named, 1, "inputs"))
        if self._may_meet_targets(name, args, result):
            note_operands(args, result)
        self._follow(args, named, result)

    def _may_meet_targets(self, name: str, args: Any, result: Any) -> bool:
        """Whether operands may be an output and its targets; not frequencies, or y[:, None], which are meant to meet all."""
        if name == "__getitem__" and result.dim() > args[0].dim():
            self._given_a_dimension.append(result)
        meant = self._buffers.union(map(id, self._given_a_dimension))
        return meant.isdisjoint(map(id, args)) and self._has_targets and not any(map(_is_parameter, args))

    @cached_property
    def _has_targets(self) -> bool:
        """Whether the batch has tensors, which may be targets."""
        return bool(tensors_in(self._engine.state.batch))

    def _follow(self, args: Any, named: Any, result: Any) -> None:
        """Note what is cut off from the parameters: by detach, data, no_grad, or a gradient without its graph."""
        given = tensors_in((args, named))
        if not any(one.requires_grad or id(one) in self._cut_off for one in given):
            return
        origins = set[int]().union(*(self._origins.get(id(one), ()) for one in given))
        for one in tensors_in(result):
            if one.is_floating_point() and not one.requires_grad:
                self._cut_off[id(one)], self._origins[id(one)] = one, origins or {id(one)}
            elif one.dim():
                self._met |= origins

    def _note_shifts(self, name: str, args: Any, result: Any) -> None:
        """Note what leaves out, moves or masks steps of an input, as a model that predicts the next step may do inside."""
        strided = [one for one in tensors_in(args) if not one.is_nested] if name in _MOVES | _MASKS else []
        for one, given in product(strided, self._given):
            if name in _MASKS:
                self._shifts |= one.shape == given.shape and not one.is_floating_point()
            elif one.dim() > 1 and one.shape[:2] == given.shape[:2]:
                self._shifts |= name == "roll" or result.shape[:2] != one.shape[:2]

    def _note_sequences(self, name: str, args: Any, result: Any) -> None:
        """Note sequences that are padded, or put back in their order, and what uses them otherwise than by their steps."""
        if name == "_pad_packed_sequence" and len(set(result[1].tolist())) > 1:
            self._recurrent.append(_Sequence(result[0], bool(args[2]), _PADDING, self._hidden))
        elif name == "index_select":
            found = [one for one in self._recurrent if one.output is args[0]]
            self._recurrent += [_Sequence(result, one.samples_first, one.kind, one.hidden) for one in found]
        else:
            self._note_uses(name, args, result)

    def _note_uses(self, name: str, args: Any, result: Any) -> None:
        """Note what uses the output of a recurrent layer otherwise than by its steps, or the hidden states."""
        if not self._recurrent or not any(one.is_floating_point() for one in tensors_in(result)):
            return
        given = {id(one) for one in tensors_in(args)}
        for one in self._recurrent:
            used = one.hidden if name in ("__getitem__", "select") else [one.output, *one.hidden]
            if not given.isdisjoint(map(id, used)):
                one.taken.add(-1)

    def found(self, loss: Tensor | None) -> list[Problem]:
        """What looked wrong on the way to this loss."""
        steps = [problem for one in self._recurrent for problem in _steps_without_others(one)]
        constant = [
            value for total, value, one in self._constant if loss is not None and self._is_cut(total, one, loss)
        ]
        terms = [_term_without_gradient(value) for value in constant[:1]]
        state = self._engine.state
        return [
            *self.problems,
            *steps,
            *terms,
            *self._targets_given(),
            *_targets_among_inputs(state.batch, state.update),
        ]

    def _is_cut(self, total: Tensor, constant: int, loss: Tensor) -> bool:
        """Whether a constant is a term of a loss, and not a part of a formula whose other terms use what it is computed from."""
        return is_term_of(total, loss) and self._origins[constant].isdisjoint(self._met)

    # ---- losses ---------------------------------------------------------------------------------------------------

    def _divergence(self, args: Any, named: Any, result: Any) -> Iterator[Problem]:
        """A Kullback-Leibler divergence, whose graph shows nothing of its input."""
        given = _argument(args, named, 0, "input")
        largest = float(given[:_SAMPLES].detach().float().max()) if given.numel() and given.dim() else 0.0
        # Without a reduction, the sums that make a divergence of intensities may be added.
        if largest > 1e-3 and named.get("reduction") != "none":
            yield (
                "W72",
                f"kl_div expects log-probabilities, which are at most 0, but its input reaches {largest:.3g}",
                "pass log_softmax(logits, dim=1)",
            )

    def _cross_entropy(self, args: Any, named: Any, result: Any) -> Iterator[Problem]:
        scores, target = _argument(args, named, 0, "input"), _argument(args, named, 1, "target")
        if target.is_floating_point() or scores.dim() < 2 or target.numel() == 0 or not result.requires_grad:
            return
        reduction = named.get("reduction", "mean")
        if reduction != "none":  # what a mask may leave out
            yield from self._padding(target, int(named.get("ignore_index", -100)), scores.shape[1], named.get("weight"))
            self._targets.append(target)
        self._note_mean(args, named, result)
        if reduction == "mean" and result.dim() == 0 and self._engine.state.iteration == 1:
            yield from self._too_large(float(result.detach()), scores)

    @staticmethod
    def _too_large(value: float, scores: Tensor) -> Iterator[Problem]:
        """A first cross entropy far above that of guessing."""
        classes = scores.shape[1]
        guessing = math.log(max(classes, 2))
        if value > _ABOVE_GUESSING * guessing and not are_scaled(scores):
            yield (
                "W97",
                f"the first cross-entropy loss is {value:.3g}, but guessing among {classes} classes gives "
                f"{guessing:.3g}. This usually means that the first outputs are far too large",
                "normalize the inputs, and use PyTorch's default initialization or smaller initial weights; divide "
                "dot products by the square root of the vectors' dimension, or by a temperature; if the weights were "
                "pretrained on different classes, allow W97",
            )

    def _targets_given(self) -> Iterator[Problem]:
        """Targets that the batch has among its inputs as well."""
        if not self._shifts and any(is_among(self._given, one) for one in self._targets):
            yield (
                "W98",
                "the targets are equal to an input of the model, so a model that copies this input, and neither shifts nor "
                "masks it, has a loss of zero",
                "in a language model, the targets are the next tokens: use inputs[:, :-1] as inputs and inputs[:, 1:] "
                "as targets; for a model that should reconstruct its inputs, allow W98",
            )

    def _padding(self, target: Tensor, ignored: int, classes: int, weight: Tensor | None) -> Iterator[Problem]:
        """Targets that are padding, where the classes are the tokens of an embedding; in a classifier of texts they are not."""
        padding = {
            part.padding_idx
            for _, part in self._engine.modules.parts()
            if isinstance(part, nn.Embedding) and part.padding_idx is not None and part.num_embeddings == classes
        }
        rows = rows_of(target, self._engine.state.batch)
        for index in padding - {ignored}:
            if weight is not None and not weight[index]:
                continue
            ends = rows.eq(index).flip(-1).cumprod(-1).sum(-1)  # a single one may be the end of a sentence
            share = int(ends[ends > 1].sum()) / target.numel()
            if share > _PADDED:
                yield (
                    "W95",
                    f"{share:.0%} of the targets are {index} at the ends of sequences. This is the padding_idx of the "
                    "model's embedding, so the model learns to predict the padding",
                    f"leave the padding out of the loss: ignore_index={index}",
                )

    def _nll_loss(self, args: Any, named: Any, result: Any) -> Iterator[Problem]:
        """What it averages over, and targets that are padding; its graph shows the rest."""
        self._note_mean(args, named, result)
        scores, target = _argument(args, named, 0, "input"), _argument(args, named, 1, "target")
        if scores.dim() > 1 and target.numel() and named.get("reduction", "mean") != "none" and result.requires_grad:
            yield from self._padding(target, int(named.get("ignore_index", -100)), scores.shape[1], named.get("weight"))

    def _note_mean(self, args: Any, named: Any, result: Any) -> None:
        if self._counts_targets and (mean := mean_over(args, named, result)) is not None:
            self.means.append((mean, result))

    def _sum(self, args: Any, named: Any, result: Any) -> Iterator[Problem]:
        """A sum with a number that has no gradient, which may be a term of the loss."""
        terms = [one for one in args[:2] if isinstance(one, Tensor) and one.dim() == 0]
        constant = [one for one in terms if id(one) in self._cut_off]
        if len(terms) == 2 and len(constant) == 1:
            value, other = (float(one.detach()) for one in sorted(terms, key=attrgetter("requires_grad")))
            if value not in (0.0, other):  # as in a - a.detach()
                self._constant.append((result, value, id(constant[0])))
        yield from ()

    # ---- what is mixed up -----------------------------------------------------------------------------------------

    def _softmax(self, args: Any, named: Any, result: Any) -> Iterator[Problem]:
        dimension = named.get("dim", args[1] if len(args) > 1 else None)
        shape = list(result.shape)
        if (
            dimension == 0
            and len(shape) > 1
            and shape[0] == self._samples
            and shape[0] > 1
            and shape[0] not in shape[1:]
            and math.prod(shape[1:]) > 1  # one score for each sample is no score of classes
            and not isinstance(args[0], nn.Parameter)
        ):
            yield (
                "W93",
                f"a softmax is applied over dimension 0 of a tensor of shape {shape}, so the samples of a batch "
                "compete with each other",
                "apply the softmax over the classes, or over the positions of each sample: dim=-1; if the samples "
                "should compete, allow W93",
            )

    def _reshape(self, args: Any, named: Any, result: Any) -> Iterator[Problem]:
        before, after = list(args[0].shape), list(result.shape)
        if len(before) < 3 or before[:1] != after[:1] or self._samples not in (None, before[0]):
            return
        if sorted(before) == sorted(after) and _moves(before, after):
            yield (
                "W93",
                f"a tensor of shape {before} is reshaped to {after}, but a reshape keeps the values in order, so it "
                "mixes the dimensions instead of swapping them",
                "to swap dimensions, use transpose or permute",
            )

    def _note_given(self, model: Any, args: Any, named: Any) -> None:
        self._given += [one for one in tensors_in((args, named)) if not one.is_nested]

    def _see_recurrent(self, layer: Any, given: Any, returned: Any) -> None:
        output = returned[0] if isinstance(returned, tuple) and returned else None
        self._hidden = tensors_in(returned[1:]) if isinstance(returned, tuple) else []
        if isinstance(output, Tensor) and output.dim() == 3:
            kind = "both" if layer.bidirectional else "forward"
            if kind == "forward" or layer.num_layers == 1:  # in a second layer, each step has seen all of the first
                self._recurrent.append(_Sequence(output, layer.batch_first, kind, self._hidden))

    def _step(self, args: Any, named: Any, result: Any) -> Iterator[Problem]:
        """One step of what a recurrent layer returned."""
        for one in self._recurrent:
            if one.output is args[0]:
                place = _place(args, one.samples_first)
                one.taken.add(-1 if place is None else place % one.length)
        yield from ()


_LOOKS: dict[str, Callable[[FirstCalls, Any, Any, Any], Iterator[Problem]]] = {
    "kl_div": FirstCalls._divergence,
    "cross_entropy": FirstCalls._cross_entropy,
    "nll_loss": FirstCalls._nll_loss,
    **dict.fromkeys(("softmax", "log_softmax"), FirstCalls._softmax),
    **dict.fromkeys(("view", "reshape"), FirstCalls._reshape),
    **dict.fromkeys(("__getitem__", "select"), FirstCalls._step),
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "__sub__", "__isub__"), FirstCalls._sum),
}
"""What looks at a call, by the name of torch's function."""

_MOVES = {"__getitem__", "narrow", "roll", "pad", "cat"}
_MASKS = {"where", "masked_fill", "masked_fill_", "__setitem__"}


def _moves(before: list[int], after: list[int]) -> bool:
    """Whether a reshape looks like a move of dimensions; it may join neighbors as well: of 8 steps with 4 features, each 2."""
    if [size for size in before if size > 1] == [size for size in after if size > 1]:
        return False
    places = [place for place, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    least, most = sorted(before[place] for place in (places[0], places[-1]))
    joins = most % least == 0 or most == least + 1  # relative positions are shifted by a reshape of [n, n + 1]
    return len(places) > 2 or places[1] > places[0] + 1 or not joins


def _term_without_gradient(value: float) -> Problem:
    return (
        "W99",
        f"a term of the loss ({value:.3g}) has no gradient, so it has no effect on training",
        "compute the term from the parameters without .data, .detach() or no_grad(); second-order gradients "
        "also need create_graph=True; if the term should be constant, allow W99",
    )


def _steps_without_others(one: _Sequence) -> Iterator[Problem]:
    """The only step that is taken of a recurrent layer, if it has seen no other one, or padding."""
    if one.length < 2 or one.taken != {0 if one.kind == "forward" else one.length - 1}:
        return
    steps = f"of the {one.length} output steps of a"
    if one.kind == "forward":
        what = f"only the first {steps} recurrent layer is used, and it has seen only the first step of the input"
        way_out = "use the last step, output[:, -1], or the hidden state that the layer returns"
    elif one.kind == "both":
        what = (
            f"only the last {steps} bidirectional layer is used, and its backward direction has seen only the last "
            "step of the input"
        )
        way_out = (
            "join the hidden states of both directions: torch.cat([hidden[-2], hidden[-1]], dim=1); an LSTM returns "
            "output, (hidden, cell)"
        )
    else:
        what, way_out = (
            f"the model uses only one step of padded sequences: {one.kind}",
            "use the hidden state that the layer returns",
        )
    yield "W94", what, way_out


def _targets_among_inputs(batch: Any, update: UpdateState) -> Iterator[Problem]:
    """Targets that are a column of the inputs, as of a table whose last column was not cut off."""
    tensors = [] if update.function else tensors_in(batch)  # of which a function uses what it likes
    if update.spec.target is not None:
        tensors = [*tensors[:1], *tensors_in(update.spec.target_in(batch))]
    if len(tensors) != 2 or not all(map(_has_values, tensors)):  # of three, the second may be no target
        return
    if tensors[0].dim() != 2 or tensors[1].numel() != len(tensors[0]):
        return
    if not tensors[0].is_floating_point():  # tokens, which have places, and no columns
        return
    inputs, targets = tensors[0].detach(), tensors[1].detach().reshape(-1, 1).to(tensors[0].dtype)
    same = (inputs == targets).all(0)
    if len(inputs) >= _ENOUGH and inputs.shape[1] > 1 and len(targets.unique()) > 2 and bool(same.any()):
        yield (
            "W98",
            f"the targets are equal to column {int(same.nonzero()[0])} of the inputs, so a model that copies this "
            "column has a loss of zero",
            "remove this column from the inputs",
        )


_ENOUGH = 8  # samples whose values are not equal by chance


def _has_values(one: Tensor) -> bool:
    """Whether a tensor can be read: not one that stands for others, as those of the meta device and of vmap do."""
    return type(one) in _PLAIN and is_readable(one) and not torch._C._functorch.is_functorch_wrapped_tensor(one)


def _is_parameter(one: Any) -> bool:
    return isinstance(one, nn.Parameter)


_PLAIN = (Tensor, nn.Parameter)


def _argument(args: Any, named: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else named[name]


def _place(args: Any, samples_first: bool) -> int | None:
    """The step of time that an index selects for all samples; None if it selects something else."""
    if len(args) > 2:  # select(dimension, index)
        return args[2] if args[1] == int(samples_first) and isinstance(args[2], int) else None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(
        isinstance(one, slice) and one == slice(None) for one in index[1 + samples_first :] if one is not Ellipsis
    ):
        return None  # of some features, such as those of one direction
    wanted = index[1:2] if samples_first and index[0] == slice(None) else () if samples_first else index[:1]
    return wanted[0] if wanted and type(wanted[0]) is int else None
