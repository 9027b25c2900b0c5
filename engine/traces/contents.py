"""What a trace has digests of, by name."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..authoring.devices import widened
from ..authoring.randomness import random_state
from ..checkpoints.manifest import environment
from ..distributed.sharded import local_part
from ..distributed.shards import OF_SHARDS
from .digests import Digests
from .watched import optimizers_of, parameters_of

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["BY_NAME", "CONTENTS", "Contents", "contents_of", "described_environment", "digests_of"]

Named = Iterable[tuple[str, Any]]
Contents = Mapping[str, dict[str, Any]]


def _batch(engine: Engine) -> Named:
    yield "batch", engine.state.batch


def _random(engine: Engine) -> Named:
    state = random_state()
    version, words, gauss = state["python"]
    # Hashes of integers are the same in each process, and take a tenth of the time of their bytes.
    yield from (state | {"python": [version, hash(words), gauss]}).items()


def _output(engine: Engine) -> Named:
    yield "output", engine.state.update.output


def _loss(engine: Engine) -> Named:
    update = engine.state.update
    yield "reported", update.raw_loss
    yield "backward", update.backward_loss


def _gradients(engine: Engine) -> Named:
    return ((name, p.grad) for name, p in parameters_of(engine))


def _buffers(engine: Engine) -> Named:
    for root, module in engine.modules.items():
        yield from module.named_buffers(prefix=root)


def _handlers(engine: Engine) -> Named:
    for name, handler in engine.handlers.items():
        if handler.enabled and not handler.writes:
            with torch.no_grad():
                state = handler.state_dict()
            yield name, {key: value for key, value in state.items() if key != OF_SHARDS}


def _metrics(engine: Engine) -> Named:
    metrics = engine.state.metrics
    return ((name, value) for name, value in metrics.items() if name not in metrics.unsaved)


CONTENTS: Mapping[str, Callable[[Engine], Named]] = {
    "batch": _batch,
    "random": _random,
    "output": _output,
    "loss": _loss,
    "gradients": _gradients,
    "parameters": parameters_of,
    "buffers": _buffers,
    "optimizer": optimizers_of,
    "handlers": _handlers,
    "metrics": _metrics,
}

BY_NAME = frozenset({"random", "handlers", "metrics"})
"""Of which each value has a digest of its own: the two runs may have different ones."""


def described_environment(engine: Engine) -> dict[str, Any]:
    """What makes runs comparable: versions, the processor, flags of torch, the seed, and the handlers with their code."""
    processes, shards = engine.processes.world_size, engine.group.shards
    kinds: dict[str, Any] = {name: type(handler) for name, handler in sorted(engine.handlers.items())}
    return {
        **environment(engine.device, processes),
        "shards": None if shards is None else shards.world_size,
        "seed": engine.seed,
        "flags": _flags(),
        "handlers": {name: _code_of(kind) for name, kind in kinds.items()},
    }


def _flags() -> dict[str, Any]:
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
    }


@cache
def _code_of(kind: Any) -> str:
    """The name of a class, and a digest of its source."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # typed in an interpreter
        return str(kind.__qualname__)
    return f"{kind.__qualname__} {hashlib.sha256(source.encode()).hexdigest()[:12]}"


def contents_of(engine: Engine, things: Iterable[str]) -> Contents:
    """What a run consists of now: the values of each of these keys of `CONTENTS`, by name."""
    return {thing: _named(CONTENTS[thing](engine), in_order=thing in BY_NAME) for thing in things}


def digests_of(contents: Contents, *, by_tensor: bool = False, measures: bool = False) -> Digests:
    """The digests of what a run consists of, still to be read.

    Args:
        contents: What `contents_of` has returned.
        by_tensor: Whether each tensor has a digest of its own.
        measures: Whether the loss and norms are measured, too.
    """
    found = Digests()
    for thing, values in contents.items():
        in_parts = by_tensor or thing in BY_NAME
        if in_parts:
            for name, value in values.items():
                found.add(f"{thing}/{name}", value)
        joined = None if in_parts else found.add(thing, values)
        if measures:
            _measure(thing, values, joined, found)
    return found


def _measure(thing: str, values: Mapping[str, Tensor | None], joined: Tensor | None, found: Digests) -> None:
    """Add the loss, or the norm of gradients or parameters, of which the elements may have been joined."""
    if thing == "loss" and (loss := values["reported"]) is not None:
        found.add_number(thing, loss)
    elif thing in ("gradients", "parameters"):
        if joined is not None and joined.dtype in _PRECISE and joined.numel() <= _FEW:
            found.add_norm(thing, joined)
        elif (norm := _norm(values)) is not None:
            found.add_number(thing, norm)


def _named(values: Named, *, in_order: bool) -> dict[str, Any]:
    """Values by name: none hides another of the same name; in the order of the names where handlers give them, in any order."""
    pairs = list(values)
    found = dict(pairs)
    if len(found) < len(pairs):
        counts: Counter[str] = Counter()
        found = {}
        for name, value in pairs:
            counts[name] += 1
            found[name if counts[name] == 1 else f"{name} ({counts[name]})"] = value
    return dict(sorted(found.items())) if in_order else found


def _norm(values: Mapping[str, Tensor | None]) -> Tensor | None:
    """The norm of all tensors together, on the device of the first; None for none."""
    tensors = [local_part(one.detach()) for one in values.values() if one is not None and not one.is_meta]
    norms = _norms(tensors) if tensors else []
    if len(norms) > 1:
        norms = [torch.linalg.vector_norm(widened(torch.stack(norms)))]
    return norms[0] if norms else None


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor, on the device of the first; of few elements, their norm together."""
    first = tensors[0]
    alike = len({(one.dtype, one.device, one.layout) for one in tensors}) == 1
    if not alike or first.dtype not in _PRECISE or first.layout is not torch.strided:
        return [_norm_of(one).to(first.device) for one in tensors]
    if not first.is_complex() and sum(one.numel() for one in tensors) <= _FEW:
        return [torch.linalg.vector_norm(widened(torch.cat([one.reshape(-1) for one in tensors])))]
    return list(torch._foreach_norm(tensors))


def _norm_of(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
    if tensor.dtype not in _PRECISE:
        tensor = tensor.float()
    return widened(torch.linalg.vector_norm(tensor))


_FEW = 2**16
"""Elements up to which tensors are joined for their norm, which takes fewer operations."""

_PRECISE = {torch.float32, torch.float64, torch.complex64, torch.complex128}
