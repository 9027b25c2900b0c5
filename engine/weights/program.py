"""Exports a model as a program, of `torch.export` or as ONNX, which runs without the code of the model."""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..authoring.batches import map_leaves
from ..authoring.checks import check_int, did_you_mean
from ..authoring.randomness import unchanged_random_state
from ..checkpoints import Files
from ..distributed.sharded import is_sharded
from ..runs.restore import Buffers, Modes
from .averages import averages_in_place, check_average
from .onnx_program import needs_onnx, onnx_bytes, open_onnx
from .placing import check_target, place_on_rank_zero

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ..engine import Engine

__all__ = ["export_program"]

_WHERE = "export_program"
Made = TypeVar("Made")


def export_program(
    engine: Engine,
    path: str | os.PathLike[str],
    example: Any,
    *,
    average: str | Literal[False] | None = None,
    model: str | None = None,
    sizes: Sequence[int] = (1, 2, 3, 7),
    files: Files | None = None,
) -> Path:
    """Export the model as a program in eval mode (`torch.export` or ONNX), and compare it with the model.

    The suffix of the path selects the format: ``.pt2`` for `torch.export`, ``.onnx`` for ONNX Runtime and others.

    Before the file is put in place, the program is read back and run on batches of several sizes, built from the example's rows;
    each output must equal the model's, within the tolerances of `torch.testing.assert_close`. The batch size is the first
    dimension of the example's first tensor, and every tensor with this first dimension is a batch; all other sizes are fixed. So
    choose a batch size that no other dimension has.

    Weights, modes, buffers and random generators do not change. `torch.export.load` reads a ``.pt2``, and executes code in it:
    load only files that you wrote. An ``.onnx`` takes the example's tensors in order, and returns the output's tensors in order.

    Args:
        engine: The engine, during a run or not. In distributed runs every rank must call this; rank 0 writes.
        path: The file, ending with ".pt2" or ".onnx"; its folder is created if necessary.
        example: Input of the model: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
        average: Name of the handler whose averages are written, as for `export_weights`.
        model: Name of the model; required if the engine has several.
        sizes: Batch sizes that the program is tested with.
        files: File-system operations, for tests.

    Returns:
        The path.

    Raises:
        ValueError: If the model cannot be exported, naming the operation; if the program's outputs differ from the model's; for a
            sharded model; for wrong arguments.
        ImportError: For ONNX without its packages: ``pip install signalfire[onnx]``.
        OSError: If the file cannot be written. The previous one, if any, is unchanged.

    Example:
        >>> from signalfire import Engine, Update
        >>> engine = Engine(Update.prediction(), model=torch.nn.Linear(2, 1))
        >>> path = export_program(engine, "runs/model.pt2", torch.zeros(4, 2))  # doctest: +SKIP
        >>> torch.export.load(path).module()(torch.zeros(9, 2)).shape  # doctest: +SKIP
        torch.Size([9, 1])
    """
    target = check_target(_WHERE, path, ".pt2", ".onnx")
    as_onnx = target.suffix == ".onnx"
    if as_onnx:
        needs_onnx(f"{_WHERE}()")
    average = check_average(_WHERE, average)
    sizes = [check_int(_WHERE, "sizes", size) for size in sizes]
    root = _find_model(engine, model)
    if any(is_sharded(parameter) for parameter in root.parameters()):
        raise ValueError(
            f"{_WHERE}(): the model is sharded; export its weights with export_weights, load the weights in a single "
            "process, and export the program from that process"
        )
    device = next((one.device for one in [*root.parameters(), *root.buffers()]), torch.device("cpu"))
    inputs = _Inputs(example, device)

    def write(file: BinaryIO) -> None:
        exported = _export(root, inputs)
        if as_onnx:
            file.write(_of_model(root, lambda: onnx_bytes(exported)))
        else:
            torch.export.save(exported, file)

    def check(written: Path) -> None:
        program = open_onnx(written) if as_onnx else _open_export(written)
        for size in sizes:
            _compare(root, program, inputs, size)

    with averages_in_place(engine, average, f"{_WHERE}()"), _resting(root):
        place_on_rank_zero(engine, target, write, check, Files() if files is None else files)
    return target


def _open_export(path: Path) -> nn.Module:
    with open(path, "rb") as file:
        return torch.export.load(file).module()


def _find_model(engine: Engine, name: str | None) -> nn.Module:
    models = engine.modules.models
    if name is not None and name not in models:
        raise ValueError(f"{_WHERE}(model={name!r}): the engine has no such model{did_you_mean(name, models)}")
    if not models or (name is None and len(models) > 1):
        raise ValueError(f"{_WHERE}(): the engine has several models: {list(models)}; choose one with model=")
    found = models[next(iter(models)) if name is None else name]
    inner = getattr(found, "_orig_mod", None)  # of torch.compile
    return inner if isinstance(inner, nn.Module) else found


@contextmanager
def _resting(root: nn.Module) -> Iterator[None]:
    """Put a model in eval mode without gradients; afterwards all is as before."""
    modes, buffers = Modes([root]), Buffers([root])
    try:
        with torch.no_grad(), unchanged_random_state(), buffers.unchanged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own deprecations
            root.eval()
            yield
    finally:
        modes.put_back()


class _Inputs:
    """The input of a model, with any number of samples.

    Args:
        example: A tensor, a sequence of arguments, or a mapping of keyword arguments.
        device: Device of the model.
    """

    def __init__(self, example: Any, device: torch.device) -> None:
        args = () if isinstance(example, Mapping) else example if isinstance(example, tuple | list) else (example,)
        kwargs = dict(example) if isinstance(example, Mapping) else {}
        self.args, self.kwargs = map_leaves(
            lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, (tuple(args), kwargs)
        )
        tensors = [leaf for leaf in _pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        first = next((tensor for tensor in tensors if tensor.dim() > 0), None)
        if first is None or first.shape[0] == 0:
            raise ValueError(
                f"{_WHERE}(example=...): expected a model input that contains a tensor with at least one sample, such "
                f"as batch[0]; got a {type(example).__name__} with {len(tensors)} tensors"
            )
        self.size = int(first.shape[0])

    def is_batch(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.size

    def of_size(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with so many samples: the example's rows, again from the first where they do not suffice."""

        def resized(leaf: Any) -> Any:
            if not self.is_batch(leaf):
                return leaf
            return leaf.index_select(0, torch.arange(size, device=leaf.device) % self.size)

        args, kwargs = _pytree.tree_map(resized, (self.args, self.kwargs))
        return args, kwargs

    def dynamic_shapes(self, root: nn.Module) -> dict[str, Any]:
        """Which dimensions may have another size, by argument of the forward."""
        batch = torch.export.Dim("batch")

        def shape(leaf: Any) -> Any:
            return {0: batch} if self.is_batch(leaf) else None

        bound = inspect.signature(root.forward).bind(*self.args, **self.kwargs)
        return {name: _pytree.tree_map(shape, value) for name, value in bound.arguments.items()}


def _export(root: nn.Module, inputs: _Inputs) -> ExportedProgram:
    """Trace the model; with two samples at least, since torch takes a size of one for a constant."""
    args, kwargs = inputs.of_size(max(2, inputs.size))
    return _of_model(
        root,
        lambda: torch.export.export(
            root, args, kwargs or None, dynamic_shapes=inputs.dynamic_shapes(root), strict=False
        ),
    )


def _of_model(root: nn.Module, make: Callable[[], Made]) -> Made:
    """What a function makes of the model, or a ValueError that says where in the model it failed."""
    try:
        return make()
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        place = _place_in_model(error)
        raise ValueError(
            f"{_WHERE}(): {type(root).__name__} cannot be exported: {' '.join(lines[:2]) or type(error).__name__}"
            + (f" (at {place})" if place else "")
        ) from error


def _place_in_model(error: BaseException) -> str:
    """The last line of code in the traceback that is neither torch's nor ours."""
    ours = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    places = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((*ours, "<"))]
    return f"{places[-1].filename}:{places[-1].lineno}: {places[-1].line}" if places else ""


def _compare(root: nn.Module, program: Callable[..., Any], inputs: _Inputs, size: int) -> None:
    """Raise ValueError if the program gives something else than the model."""
    args, kwargs = inputs.of_size(size)
    try:
        expected, structure = _pytree.tree_flatten(root(*args, **kwargs))
    except Exception as error:
        raise ValueError(
            f"{_WHERE}(): the model {type(root).__name__} itself fails for a batch of {size} samples: {error}. Every "
            f"tensor in the example whose first dimension is {inputs.size} is treated as a batch"
        ) from error
    try:
        found, other = _pytree.tree_flatten(program(*args, **kwargs))
        if not isinstance(program, nn.Module):  # of ONNX, which knows tensors only
            expected = [leaf.cpu() for leaf in expected if isinstance(leaf, Tensor)]
        elif other != structure:
            raise AssertionError(f"the output has the structure {other}, not {structure}")
        torch.testing.assert_close(found, expected, equal_nan=True)
    except Exception as error:
        raise ValueError(
            f"{_WHERE}(): for a batch of {size} samples, the output of the exported program of {type(root).__name__} "
            f"differs from that of the model, so the program was not written: {' '.join(str(error).split())[:400]}"
        ) from error
