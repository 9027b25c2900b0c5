"""Activation checkpointing: recomputes activations in the backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, Claim, check_int

from ._common.module_patterns import check_modules, find_modules, named_modules, outermost
from ._common.ranks import RECOMPUTE

__all__ = ["ActivationCheckpointing"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Operation = torch._ops.OpOverload
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class ActivationCheckpointing(Handler):
    """Saves memory by recomputing the activations of chosen modules in the backward pass (gradient checkpointing).

    Only the inputs of the chosen modules are kept for the backward pass. This saves memory, but a step typically takes a third
    longer. Weights, dropout masks and BatchNorm statistics stay bit-identical, because the random state is restored for the
    recomputation, and only the first computation updates the statistics. Parameter names and evaluations do not change.

    Choose expensive modules that are called one after the other, such as transformer blocks. The forward and the hooks of a
    chosen module run twice in each iteration, so the forward must not change any buffers except the statistics of
    normalization layers. `Compile` does not compile the chosen modules, because not every backend computes the same result
    twice.

    Args:
        modules: Modules to recompute: a path such as "blocks.0", a pattern such as "blocks.*", a class, or a list of these. If
            matches are nested, the outermost module is used. A ModuleList stands for its items.
        every: Alternative to ``modules``: the number of consecutive layers to recompute together in each outermost
            ``nn.Sequential``.
        keep_operations: Operations whose results are kept, such as matrix products, which take longest to recompute. Give names,
            such as "mm", "addmm" and "convolution", or torch operators, such as ``torch.ops.aten.mm.default``.

    Raises:
        ValueError: If a pattern matches no module, or if ``every`` finds no Sequential.
        RuntimeError: In the first iteration, if the forward of a chosen module changes other buffers, such as those of
            spectral norm.

    Source:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The implementation is ``torch.utils.checkpoint``, in
        its non-reentrant variant.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> def count(*handlers):
        ...     inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        ...     model = torch.nn.Sequential(inner, torch.nn.Linear(2, 1))
        ...     engine, calls = Engine(update, model=model, seed=0), []
        ...     _ = model[0][0].register_forward_pre_hook(lambda *_: calls.append(1))
        ...     _ = engine.attach(handlers)
        ...     _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=3)
        ...     return len(calls)
        >>> count(), count(ActivationCheckpointing("0"))  # calls in three iterations
        (3, 6)
    """

    capture = Capture.INSIDE
    trains = True

    def __init__(
        self,
        modules: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        *,
        every: int | None = None,
        keep_operations: Iterable[str | Operation] = (),
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.modules = None if modules is None else check_modules(self, modules)
        self.every = None if every is None else check_int(self, "every", every)
        self.keep_operations = _check_operations(keep_operations)
        self._replaced: list[tuple[nn.Module, _Recomputed | _Grouped]] = []  # only during a run
        if (modules is None) == (every is None):
            raise ValueError(
                f"ActivationCheckpointing(modules={modules!r}, every={every!r}): pass one of the two: "
                "modules=, such as modules='blocks.*', or every=, such as every=2 for a model built from nn.Sequential"
            )

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("which activations are kept"), by=self)

    def settings(self) -> dict[str, Any]:
        """None: the weights do not depend on it."""
        return {}

    @on(Events.STARTED, phase=Phase.FINALIZE, rank=RECOMPUTE, reads=["modules"], writes=["modules"])
    def begin(self, engine: Engine) -> None:
        """Replace the modules' forwards with ones that recompute."""
        named = named_modules(engine)
        chosen = self._sequentials(named) if self.modules is None else find_modules(self.name, named, self.modules)
        for path, module in chosen.items():
            self._replaced.append((module, _replace_forward(module, path, self.every, self.keep_operations)))

    @on(Events.ENDED, phase=Phase.FINALIZE, rank=-RECOMPUTE, reads=[], writes=["modules"])
    def end(self, engine: Engine) -> None:
        """Restore the forwards."""
        while self._replaced:
            _restore_forward(*self._replaced.pop())

    def _sequentials(self, named: dict[str, nn.Module]) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {
            path: module
            for path, module in named.items()
            if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0
        }
        if not found:
            raise ValueError(
                f"{self.name!r}: every={self.every} groups the layers of nn.Sequential modules, but the model has no "
                "nn.Sequential; pass the modules instead, such as modules='blocks.*'"
            )
        return outermost(found)


# ---- in place of a module's forward -------------------------------------------------------------------------------


class _Recomputed:
    """The forward of a module that is computed again in the backward.

    Args:
        path: Path of the module, for errors.
        forward: What it replaces.
        parts: The modules inside, whose statistics are updated once.
        kept: Operations whose results are kept.
    """

    def __init__(
        self, path: str, forward: Callable[..., Any], parts: Iterable[nn.Module], kept: list[Operation]
    ) -> None:
        self.active = True
        self.before: Any = None  # what the module had in its own dictionary
        self.path = path
        self.forward = forward
        self.kept = kept
        modules = list(dict.fromkeys(part for one in parts for part in one.modules()))
        self.norms = [one for one in modules if isinstance(one, _NormBase) and one.running_mean is not None]
        self.buffers = [
            (one, key) for one in modules if one not in self.norms for key, buffer in one.named_buffers(recurse=False)
        ]
        # Random states of the arguments' devices are kept: without these, not where all arguments are on the CPU or in objects.
        devices = dict.fromkeys(p.device for one in modules for p in one.parameters(recurse=False))
        self.anchors = [torch.empty(0, device=one) for one in devices if one.type not in ("cpu", "meta")]
        update_wrapper(self, forward)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not (self.active and torch.is_grad_enabled()):
            return self.forward(*inputs, **options)
        return (
            _outside_of_graphs(self, inputs, options)
            if torch.compiler.is_compiling()
            else self.compute(inputs, options)
        )

    def compute(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The forward, whose activations are not kept."""
        before = self._versions()
        values = (*self.anchors, *inputs, *options.values())
        run = partial(self._run, len(self.anchors), len(inputs), tuple(options))
        result = checkpoint(run, *values, use_reentrant=False, context_fn=self._contexts)
        for (module, key), old, new in zip(self.buffers, before, self._versions(), strict=True):
            if old != new:
                raise RuntimeError(
                    f"the forward of {self.path!r} changes the buffer {key!r} of {type(module).__name__}, so "
                    "recomputing the forward would change the buffer a second time in each iteration; leave this "
                    "module out of ActivationCheckpointing(modules=)"
                )
        return result

    def _run(self, anchors: int, count: int, names: tuple[str, ...], *values: Any) -> Any:
        inputs, options = values[anchors : anchors + count], values[anchors + count :]
        return self.forward(*inputs, **dict(zip(names, options, strict=True)))

    def _versions(self) -> list[tuple[int, int]]:
        found = []
        for module, key in self.buffers:
            buffer = module._buffers[key]
            found.append((id(buffer), 0 if buffer is None else buffer._version))
        return found

    def _contexts(self) -> Contexts:
        first, second = create_selective_checkpoint_contexts(self.kept) if self.kept else (nullcontext(), nullcontext())
        if not self.norms:
            return first, second
        return first, _both(_held(self.norms), second)


@_disable_dynamo
def _outside_of_graphs(module: _Recomputed, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The forward in a model that is compiled: in a graph, some backends draw other random numbers the second time, silently."""
    return module.compute(inputs, options)


@contextmanager
def _both(*managers: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


@contextmanager
def _held(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Statistics that are updated meanwhile are copies."""
    places = [(one._buffers, key) for one in norms for key in _STATISTICS if one._buffers.get(key) is not None]
    buffers: list[Tensor | None] = [own[key] for own, key in places]
    try:
        for own, key in places:
            buffer = own[key]
            assert buffer is not None
            own[key] = buffer.clone()
        yield
    finally:
        for (own, key), buffer in zip(places, buffers, strict=True):
            own[key] = buffer


class _Grouped:
    """The forward of a Sequential whose layers are computed again in groups."""

    def __init__(self, groups: list[_Recomputed], forward: Callable[..., Any]) -> None:
        self.active = True
        self.before: Any = None
        self.groups = groups
        self.forward = forward
        update_wrapper(self, forward)

    def __call__(self, value: Any) -> Any:
        if not self.active:
            return self.forward(value)
        for group in self.groups:
            value = group(value)
        return value


def _in_turn(layers: Sequence[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def _replace_forward(module: nn.Module, path: str, size: int | None, kept: list[Operation]) -> _Recomputed | _Grouped:
    """Let a module compute its forward twice: as a whole, or its layers in groups of a size."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{path!r} is a ScriptModule, whose forward cannot be replaced; leave this module out of modules="
        )
    own, before = module.forward, vars(module).get("forward")
    replacement: _Recomputed | _Grouped
    if size is None:
        replacement = _Recomputed(path, own, [module], kept)
    else:
        layers = list(module.children())
        groups = [layers[place : place + size] for place in range(0, len(layers), size)]
        replacement = _Grouped([_Recomputed(path, partial(_in_turn, group), group, kept) for group in groups], own)
    replacement.before = before
    vars(module)["forward"] = replacement
    return replacement


def _restore_forward(module: nn.Module, replacement: _Recomputed | _Grouped) -> None:
    replacement.active = False  # where another function was put around it, which restores it later
    if vars(module).get("forward") is replacement:
        del vars(module)["forward"]
        if replacement.before is not None:
            vars(module)["forward"] = replacement.before


def _check_operations(operations: Any) -> list[Operation]:
    where = f"ActivationCheckpointing(keep_operations={operations!r})"
    if isinstance(operations, str) or not isinstance(operations, list | tuple | set | frozenset):
        raise TypeError(f"{where}: expected a list of operations, such as ['mm', torch.ops.aten.convolution.default]")
    found: list[Operation] = []
    for one in operations:
        packet = getattr(torch.ops.aten, one.removeprefix("aten."), None) if isinstance(one, str) else one
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found += [getattr(packet, overload) for overload in packet.overloads()]
        elif isinstance(packet, Operation):
            found.append(packet)
        elif isinstance(one, str):
            raise ValueError(
                f"{where}: torch has no operation aten.{one.removeprefix('aten.')}; write the name of an operation in "
                "torch.ops.aten, such as 'mm'"
            )
        else:
            raise TypeError(f"{where}: {one!r} is neither an operation name nor a torch operator")
    return found
