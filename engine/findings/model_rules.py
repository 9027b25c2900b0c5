"""The rules of `check` about what a model holds without registering it, and about options of optimizers."""

from __future__ import annotations

import dis
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..authoring.devices import is_readable
from ..authoring.functions import called_by, codes_of, is_users, names_reached
from ..core.update import UpdateState
from ..distributed.sharded import is_sharded
from ..updates.optimizers import optimizers_of
from .codes import Severity
from .composition import Composition
from .other_optimizers import held_by_none
from .reports import Finding, finding

__all__ = ["OF_MODELS", "half_precision_finding"]


def unregistered_parts(it: Composition) -> Iterator[Finding]:
    """Trainable tensors and layers in attributes where PyTorch does not find them."""
    for path, part in it.engine.modules.parts():
        for name, value in vars(part).items():
            if not name.startswith("_") and (problem := _unregistered(value, name, part, it)) is not None:
                code, what, way_out = problem
                yield finding(code, f"{path}.{name} is {what}", way_out)


def _unregistered(value: Any, name: str, part: nn.Module, it: Composition) -> tuple[str, str, str] | None:
    """The code, what an attribute is that should be registered, and the fix; None for others."""
    if isinstance(value, Tensor) and (made_of := _made_of(value, it)) and not _is_computed_again(part, name):
        return (
            "C27",
            f"computed from a parameter of shape {made_of} that is not part of the model, so the parameter is not "
            "trained, moved or saved with it. A second backward pass also fails, because the first one frees the graph",
            f"assign the parameter itself, self.{name} = nn.Parameter(...), and compute with it in the forward pass",
        )
    hidden = held_by_none(one for one in _trainable_in(value, it) if one not in it.parameters)
    if hidden and isinstance(value, Tensor):
        what = "a tensor that requires gradients but is not a parameter, so it is not trained, moved or saved with the model"
        return "C27", what, "if it should train, wrap the tensor in nn.Parameter(...)"
    if hidden:
        return (
            "C27",
            f"a {type(value).__name__} of layers with {len(hidden)} trainable parameters that are not part of the "
            "model, so they are not trained, moved or saved with it",
            "use nn.ModuleList or nn.ModuleDict; or call requires_grad_(False) on layers that should not train",
        )
    return None


def _is_computed_again(part: nn.Module, name: str) -> bool:
    """Whether a method other than ``__init__`` stores an attribute, as a forward stores what it computes."""
    methods = [one for one in _methods(type(part).__mro__) if one.__name__ != "__init__"]
    return any(one.opname == "STORE_ATTR" and one.argval == name for one in _instructions(*methods))


def _made_of(value: Tensor, it: Composition) -> list[int] | None:
    """The shape of a parameter that a tensor was computed from and that the model does not hold; None if there is none."""
    nodes: list[Any] = [] if value.is_leaf else [value.grad_fn]
    for node in islice(nodes, _MOST_NODES):  # grows meanwhile
        own = getattr(node, "variable", None)
        if isinstance(own, nn.Parameter) and own not in it.parameters and own not in it.optimized:
            return list(own.shape)
        nodes += [child for child, _ in node.next_functions if child is not None]
    return None


_MOST_NODES = 16


def _trainable_in(value: Any, it: Composition) -> list[Tensor]:
    """The tensors to train that an attribute holds; not those of a hidden teacher, target network or template."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad and value.is_leaf else []
    if type(value) is dict:
        value = list(value.values())
    if type(value) not in (list, tuple, set) or len(value) > _MOST_LAYERS:
        return []
    layers: Iterable[nn.Module] = [one for one in value if isinstance(one, nn.Module)]
    own = [parameter for layer in layers if layer.training for parameter in layer.parameters()]
    is_copy = bool(own) and all(one.is_meta or any(_are_equal(one, other) for other in it.parameters) for one in own)
    return [] if is_copy else [parameter for parameter in own if parameter.requires_grad]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return not other.is_meta and one.shape == other.shape and torch.equal(one, other)


_MOST_LAYERS = 10_000


def attributes_without_effect(it: Composition) -> Iterator[Finding]:
    """Attributes that were set on a module and that PyTorch reads of parameters only."""
    for part, name in it.modules.items() if it.engine.training else ():
        value = vars(part).get("requires_grad")
        if value is not None and any(p.requires_grad != value for p in part.parameters()) and not _reads_it(part):
            yield finding(
                "C35",
                f"{name or 'the model'}.requires_grad = {value} has no effect, because only parameters "
                "have this attribute, not modules",
                "call module.requires_grad_(False), which freezes all of its parameters, or attach Freezing",
            )


def _reads_it(part: nn.Module) -> bool:
    """Whether a class of the user's reads an attribute ``requires_grad``."""
    own = [base for base in type(part).__mro__ if not base.__module__.startswith("torch.")]
    return any(one.argval == "requires_grad" and one.opname in _READING for one in _instructions(*_methods(own)))


_READING = ("LOAD_ATTR", "LOAD_CONST")  # the latter for getattr(self, "requires_grad")


def layers_without_effect(it: Composition) -> Iterator[Finding]:
    """Layers of a `Sequential` that add nothing to the one before: another linear map, or the same object once more."""
    for part, name in it.modules.items():
        if not isinstance(part, nn.Sequential | nn.ModuleList):
            continue
        layers = list(part._modules.values())
        if (places := _most_places(layers)) > 1:
            yield finding(
                "C36",
                f"{name or 'the model'} ({type(part).__name__}) uses the same layer object in {places} places, so "
                "these places share its weights",
                "if they should not share them, build a layer for each place: nn.Sequential(*[make_layer() for _ in "
                "range(n)]); [layer] * n repeats one object",
            )
        if (chain := _longest_chain(layers)) > 2 and _is_called_as_a_whole(part, it):
            yield finding(
                "C37",
                f"in {name or 'the model'}, {chain} Linear layers follow each other without an activation between "
                "them, so together they are one linear map",
                "put an activation between them, such as nn.ReLU()",
            )


def _is_called_as_a_whole(part: nn.Module, it: Composition) -> bool:
    """Whether a `Sequential` applies its layers one after the other: a module may also apply them itself, and others between."""
    if not isinstance(part, nn.Sequential) or type(part).forward is not nn.Sequential.forward:
        return False
    if part in it.engine.modules.values():
        return all(map(_calls_as_a_whole, it.engine.updates))
    places = [(type(one), name) for one in it.modules for name, child in one._modules.items() if child is part]
    return all(_calls(kind, name) for kind, name in places)


def _calls_as_a_whole(update: UpdateState) -> bool:
    """Whether an update calls ``engine.model`` itself, and not its layers, so far as its functions are the user's."""
    functions = [one for one in (update.spec.forward, update.spec.function) if one is not None and is_users(one)]
    return all(any(one.argval == "model" and _is_of_call(one) for one in _instructions(own)) for own in functions)


def _calls(kind: type, attribute: str) -> bool:
    """Whether a class calls a part, as in ``self.layers(inputs)``; what is in a list or a dict of modules others call."""
    if kind.__module__.startswith("torch.nn."):
        return kind not in (nn.ModuleList, nn.ModuleDict)
    return any(one.argval == attribute and _is_of_call(one) for one in _instructions(*_methods(kind.__mro__)))


def _methods(kinds: Iterable[type]) -> list[FunctionType]:
    """The functions that classes define."""
    return [value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]


def _instructions(*functions: Any) -> Iterator[dis.Instruction]:
    """The instructions of functions, and of those inside of them."""
    return (one for code in codes_of(*functions) for one in dis.get_instructions(code))


def _is_of_call(instruction: dis.Instruction) -> bool:
    """Whether an instruction loads what is called next, as a method: LOAD_ATTR says so from Python 3.12 on."""
    loads = instruction.opname == "LOAD_ATTR" and sys.version_info >= (3, 12)
    return instruction.opname == "LOAD_METHOD" or (loads and bool((instruction.arg or 0) & 1))


def _most_places(layers: Iterable[nn.Module | None]) -> int:
    """At how many places the layer with parameters stands that stands at most of them."""
    shared = [one for one in layers if one is not None and not isinstance(one, nn.PReLU)]  # an activation
    return max(Counter(id(one) for one in shared if next(one.parameters(), None) is not None).values(), default=0)


def _longest_chain(layers: Iterable[nn.Module | None]) -> int:
    """How many Linear layers follow each other, each of which could be multiplied into the next; a bottleneck could not."""
    longest = length = 0
    before: nn.Linear | None = None
    for one in layers:
        if type(one) is nn.Linear and not one._forward_hooks:  # which may be activations
            joins = before is not None and before.out_features >= min(before.in_features, one.out_features)
            length, before = length + 1 if joins else 1, one
            longest = max(longest, length)
        elif not isinstance(one, _WITHOUT_EFFECT):
            length, before = 0, None
    return longest


_WITHOUT_EFFECT = (nn.Identity, nn.Flatten, nn.Unflatten, _DropoutNd)


def unusual_options(it: Composition) -> Iterator[Finding]:
    """Options with which no optimizer converges."""
    is_changed = _sets_rates(it)
    for update in it.engine.updates:
        groups = _groups(update)
        most = max((_begins(group) for _, group in groups), default=0.0)
        if 0 < most < _LEAST_RATE and not is_changed:
            yield finding("C28", f"the optimizer of update {update.name!r}: {_tiny(most, groups[0][0])}",
                          "use a larger learning rate, such as 0.1 for SGD or 1e-3 for Adam")  # fmt: skip
        scaled = is_changed and not _is_scheduled(groups)  # a rate of 1 may be that of a schedule's factors
        for kind, group in groups:
            for what, way_out in _unusual(kind, group, scaled):
                yield finding("C28", f"the optimizer of update {update.name!r}: {what}", way_out)


def _sets_rates(it: Composition) -> bool:
    """Whether a schedule, or a function of the user's, sets the learning rates."""
    own = any(is_users(one) and "param_groups" in names_reached(one) for one in called_by(it.engine))
    return own or it.names_any({"param_groups"}) or any("rates" in (one.writes or ()) for one in it.connections)


def _is_scheduled(groups: Iterable[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether a schedule was built for an optimizer, and has noted its rate."""
    return any("initial_lr" in group for _, group in groups)


def _tiny(rate: float, kind: str) -> str:
    return f"lr={rate:g} hardly changes any weight" + " unless its gradient is very large" * (kind not in _ADAPTIVE)


def _unusual(kind: str, group: Mapping[str, Any], scaled: bool) -> Iterator[tuple[str, str]]:
    """What is unusual about the options of a group, and what to write. ``scaled``: whether a schedule changes the rate."""
    lr, decay, momentum = (_number(group.get(key)) for key in ("lr", "weight_decay", "momentum"))
    lr = 0.0 if scaled else min(lr, _begins(group))
    if kind in _ADAPTIVE and _is_large(lr, group):
        yield f"lr={lr:g} moves each weight by about {lr:g} in every step", "use a learning rate such as 1e-3"
    if decay >= 0.1 and kind in _ADAPTIVE - {"AdamW"} and not group.get("decoupled_weight_decay"):
        yield (
            f"weight_decay={decay:g} is added to the gradients and may outweigh them",
            "use AdamW, which applies the decay directly to the weights, or weight_decay=1e-4",
        )
    if momentum >= 1:
        yield (
            f"with momentum={momentum:g}, past gradients never decay, so the steps grow without bound",
            "use a momentum below 1, such as 0.9",
        )
    if lr * decay > _MOST_DECAY and kind in ("SGD", "AdamW"):
        yield (
            f"lr={lr:g} and weight_decay={decay:g} shrink each weight by {min(1.0, lr * decay):.0%} in every step",
            "use a smaller weight_decay, such as 1e-4 for SGD or 1e-2 for AdamW",
        )


def _groups(update: UpdateState) -> list[tuple[str, Mapping[str, Any]]]:
    """The name of the optimizer's class and the options of each group; before it is built, those of its `partial`."""
    factory = update.spec.optimizer
    if update.optimizer is None:
        return [(factory.func.__name__, factory.keywords)] if isinstance(factory, partial) else []
    return [(type(one).__name__, group) for one in optimizers_of(update.optimizer) for group in one.param_groups]


def _is_large(lr: float, group: Mapping[str, Any]) -> bool:
    """Whether steps of this size are large, also beside the parameters, which may be those of an image."""
    sizes = [float(one.detach().abs().mean()) for one in group.get("params", ()) if lr >= 1 and _is_readable(one)]
    return lr >= 1 and lr > 0.1 * max(sizes, default=0.0)


def _is_readable(parameter: Tensor) -> bool:
    return not is_sharded(parameter) and is_readable(parameter) and parameter.numel() > 0


def _begins(group: Mapping[str, Any]) -> float:
    """The learning rate of a group before a schedule has changed it."""
    return _number(group.get("initial_lr", group.get("lr")))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


_ADAPTIVE = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"}
_MOST_DECAY = 0.05
_LEAST_RATE = 1e-7


def weights_in_half_precision(it: Composition) -> Iterator[Finding]:
    """Weights that round small steps away, with gradients that become zero."""
    trained = [one for one in it.parameters if one in it.optimized or one in it.trained_by_user]
    half = [it.parameters[one] for one in trained if one.requires_grad and one.dtype is torch.float16]
    if half:
        yield half_precision_finding(f"{len(half)} trained parameters are float16, such as {half[0]!r}")


def half_precision_finding(what: str, handlers: Sequence[str] = ()) -> Finding:
    """The finding about weights that are trained in float16."""
    return finding(
        "C32",
        f"{what}, so gradients below 3e-8 become zero, steps below about 1/4000 of a weight are rounded away, and an "
        "optimizer's eps of 1e-8 becomes 0",
        "keep the weights in float32, and attach MixedPrecision('fp16') or MixedPrecision('bf16')",
        handlers,
    )


def statistics_that_do_not_average(it: Composition) -> Iterator[Finding]:
    """Normalization layers whose momentum is that of the other convention, the share of the old statistics."""
    for part, name in it.modules.items():
        if not isinstance(part, _NormBase) or part.running_mean is None or part.momentum is None or not part.training:
            continue
        if not 0 < part.momentum < 0.9 and not _is_put_in_eval_mode(part, name, it):
            keeps = "stay as they are" if part.momentum <= 0 else "come almost only from the last batch"
            yield finding(
                "C34",
                f"the running statistics of the layer {name!r} {keeps}, because momentum={part.momentum:g}",
                "in PyTorch, momentum is the weight of the new batch, so use a value such as 0.1 (a momentum of 0.99 "
                "in other libraries is 0.01 in PyTorch); to freeze the statistics, put the layer in eval mode",
            )


def _is_put_in_eval_mode(part: nn.Module, name: str, it: Composition) -> bool:
    """Whether a handler that freezes, or a ``train()`` of the user's, may keep a part in eval mode in the run."""
    parts = [getattr(handler, "parts", {}) for handler in it.handlers if getattr(handler, "freezes", False)]
    frozen = [path for one in parts for path, epoch in one.items() if epoch is None]
    if it.names_any(_OF_STATISTICS):
        return True
    outer = [one for one in it.modules if type(one).train is not nn.Module.train]
    return any(fnmatchcase(f"{name}.", f"{path}.*") for path in frozen) or any(part in one.modules() for one in outer)


_OF_STATISTICS = {"eval", "momentum", "update_bn"}


def layers_that_cannot_learn(it: Composition) -> Iterator[Finding]:
    """Dropout of everything, and units that begin alike and get the same gradients for ever."""
    for part, name in it.modules.items():
        if isinstance(part, _DropoutNd) and part.p > _MOST_DROPPED and part.training:
            yield finding(
                "C33",
                f"the layer {name!r} drops {part.p:.0%} of its inputs",
                "p is the fraction that is dropped, not the fraction that is kept; use a value such as 0.1",
            )
    yield from _units_that_begin_alike(it)


def _effect_of_units_alike(it: Composition) -> str:
    """What becomes of units that begin alike, as far as it is known: other layers may read them, or dropout part them."""
    drops = any(isinstance(part, _DropoutNd) and part.p > 0 for part in it.modules)
    return (
        "So they"
        if _is_chain(it) and not drops
        else "Unless another layer reads them or dropout makes them differ, they"
    )


_STAY = {True: "differ only in their biases", False: "get the same gradients and stay equal"}


def _units_that_begin_alike(it: Composition) -> Iterator[Finding]:
    # The units of a convolution in groups see other inputs each.
    layers = {part: name for part, name in it.modules.items() if isinstance(part, nn.Linear | _ConvNd)}
    weights = {name: part.weight for part, name in layers.items() if _is_plain(part)}
    if any(map(is_sharded, weights.values())):  # to read one whole, all ranks would have to look
        return
    if (found := _first_alike(it, weights)) is None:
        return
    bias = any(_differ(part.bias) for part, name in layers.items() if name == found)
    yield finding(
        "C33",
        f"all units of the layer {found!r} start with the same incoming weights, and with the same outgoing weights in the "
        f"next registered layer. "
        f"{_effect_of_units_alike(it)} {_STAY[bias]}",
        "initialize weights at random, and use constants only for biases",
        severity=_severity_for(it, weights, found),
    )


def _is_plain(layer: nn.Module) -> bool:
    """Whether the units of a layer see the same inputs, and its weight is there, and not computed as by spectral norm."""
    return getattr(layer, "groups", 1) == 1 and not is_parametrized(layer) and not is_lazy(cast(Tensor, layer.weight))


def _first_alike(it: Composition, weights: Mapping[str, Tensor]) -> str | None:
    """The first layer whose units begin alike; None without one."""
    # The units of the last layer get other gradients each, and layers that end a branch often begin with zeros.
    ends = _ends(it, list(weights.values()))
    hidden = {
        name: one for name, one in weights.items() if not any(one is end for end in ends) and _has_units_alike(one)
    }
    alike = {name: one for name, one in hidden.items() if not _come_apart(name, weights)}
    constant = [name for name, one in alike.items() if bool(one.detach().flatten()[:1].any())]
    if constant or any(map(_is_nonzero, weights.values())):
        return next(iter(constant), None)
    return next(iter(alike), None)


def _come_apart(name: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether the next layer weights units differently, whose gradients differ then; also where it is not known to follow."""
    names, units = list(weights), weights[name].shape[0]
    after = weights[names[names.index(name) + 1]]
    flattens = weights[name].dim() > 2 == after.dim()  # a unit of a convolution becomes several inputs
    if after.is_meta or after.shape[1] % units or (after.shape[1] != units and not flattens):
        return True
    seen = after.detach()[:8].reshape(min(8, len(after)), units, -1)  # a flattened unit has several places
    return bool((seen != seen[:, :1]).any())


_MOST_DROPPED = 0.8


def _ends(it: Composition, weights: list[Tensor]) -> list[Tensor]:
    """The weights of the last layer, and in no sequence of those right before it that are as large, and may be beside it."""
    ends = weights[-1:]
    if not _is_chain(it):
        ends += itertools.takewhile(lambda one: one.shape == weights[-1].shape, reversed(weights[:-1]))
    return ends


def _severity_for(it: Composition, weights: Mapping[str, Tensor], name: str) -> Severity | None:
    """Information for a layer of zeros that reads as many inputs as the last one: it may be a head beside that."""
    *_, last = weights.values()
    beside = not (_is_chain(it) or _is_nonzero(weights[name])) and weights[name].shape[1:] == last.shape[1:]
    return "info" if beside else None


def _is_chain(it: Composition) -> bool:
    return all(isinstance(root, nn.Sequential) for root in it.engine.modules.values())


def _is_nonzero(weight: Tensor) -> bool:
    return not weight.is_meta and bool(weight.detach().any())


def _differ(bias: Tensor | None) -> bool:
    return bias is not None and not bias.is_meta and bool((bias != bias[:1]).any())


def _has_units_alike(weight: Tensor) -> bool:
    """Whether the units of a plain weight that is trained begin alike."""
    if type(weight) is not nn.Parameter or not weight.requires_grad or weight.is_meta or weight.shape[0] < 2:
        return False
    units = weight.detach()[:8].flatten(1)[:, :64]
    return bool((units == units[:1]).all())


OF_MODELS: Sequence[Callable[[Composition], Iterator[Finding]]] = (
    unregistered_parts,
    attributes_without_effect,
    layers_without_effect,
    unusual_options,
    weights_in_half_precision,
    layers_that_cannot_learn,
    statistics_that_do_not_average,
)
