"""Model summary: parameters, output shapes and operations of each module, seen in the first iteration."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TextIO

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from signalfire import Attachment, Engine, Events, Handler, Phase, on
from signalfire.authoring import check_int, check_name, check_stream, preformatted
from signalfire.findings.dropout import is_compiled

from ._common.operations import OperationCounter

__all__ = ["ModelSummary", "ModuleSummary", "Summary", "summary"]

_LONGEST = 40  # characters of an output's description


@dataclass(slots=True)
class ModuleSummary:
    """A row of a `ModelSummary`.

    Attributes:
        name: Name of the module within the model, such as "model.features.0".
        kind: Name of its class.
        parameters: Number of its parameters, including those of its submodules, each counted once; None if a lazy module has
            not been initialized.
        trainable: Number of these that require gradients.
        shared: Number of these already counted in earlier rows, except rows of modules that contain this one.
        output: Shape of its last output, such as "32x10", or "(32x8, 2x32x8)"; empty if it was not called.
        calls: Number of calls in the forward.
        flops: Floating-point operations of the forward, including those of its submodules; None if it was not called.

    Example:
        >>> summary(nn.Linear(4, 8)).rows[0].parameters
        40
    """

    name: str
    kind: str
    parameters: int | None
    trainable: int
    shared: int = 0
    output: str = ""
    calls: int = 0
    flops: int | None = None


@dataclass
class ModelSummary:
    """Summary of a model: parameters, memory and operations.

    Attributes:
        rows: One row for each module; a model comes before its submodules.
        parameters: Number of parameters of all models, each counted once; None if a lazy module has not been initialized.
        trainable: Number of these that require gradients.
        weight_bytes, buffer_bytes: Memory of parameters and of buffers.
        gradient_bytes: Memory of the gradients of trainable parameters.
        optimizer_bytes: Memory of the optimizers' state after the first step; None without a run.
        samples: Number of samples of the batch that the shapes and operations belong to; None without a run.
        flops: Floating-point operations of the forward and the loss; None without a run.
        uncounted: Modules with parameters whose operations torch does not count, such as {"LSTM": 1}.

    Example:
        >>> found = summary(nn.Linear(4, 8))
        >>> found.parameters, found.weight_bytes
        (40, 160)
    """

    rows: list[ModuleSummary]
    parameters: int | None
    trainable: int
    weight_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None = None
    samples: int | None = None
    flops: int | None = None
    uncounted: Mapping[str, int] | None = None

    def selected(self, depth: int | None = None, modules: str | None = None) -> list[ModuleSummary]:
        """The rows up to a depth below the models whose names match a pattern such as "*features*"."""
        return [
            row
            for row in self.rows
            if (depth is None or row.name.count(".") <= depth) and (modules is None or fnmatchcase(row.name, modules))
        ]

    def table(self, depth: int | None = None, modules: str | None = None) -> str:
        """The rows as a table, and the totals."""
        rows = self.selected(depth, modules)
        seen = self.flops is not None
        cells = [["module", "type", "parameters", *(["output", "MFLOPs"] if seen else [])]]
        for row in rows:
            indented = "  " * row.name.count(".") + row.name.rpartition(".")[2] if modules is None else row.name
            output = f"{row.output} ({row.calls} calls)" if row.calls > 1 else row.output or "-"
            flops = "-" if row.flops is None else f"{row.flops / 1e6:,.3f}"
            cells.append([indented, row.kind, _counted(row), *([output, flops] if seen else [])])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = (2, 4)
        lines = [
            "  ".join(cell.rjust(width) if place in right else cell.ljust(width)
                      for place, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in cells
        ]  # fmt: skip
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *self._totals()])

    def _totals(self) -> list[str]:
        unknown = self.parameters is None
        total = "?" if self.parameters is None else f"{self.parameters:,}"
        lines = [
            f"parameters: {total}, of which {self.trainable:,} are trainable"
            + ("; lazy modules are initialized in the first forward pass" if unknown else "")
        ]
        memory = f"memory: weights {_size(self.weight_bytes)}, gradients {_size(self.gradient_bytes)}"
        if self.optimizer_bytes is not None:
            memory += f", optimizer {_size(self.optimizer_bytes)}"
        lines.append(memory + (f", buffers {_size(self.buffer_bytes)}" if self.buffer_bytes else ""))
        if self.flops is not None:
            each = f", {self.flops / self.samples / 1e6:,.3f} per sample" if self.samples else ""
            lines.append(f"forward: {self.flops / 1e6:,.3f} MFLOPs for a batch of {self.samples}{each}")
        if self.uncounted:
            found = ", ".join(f"{count} {kind}" for kind, count in self.uncounted.items())
            lines.append(f"not included: {found}, whose operations torch does not count")
        return lines

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return preformatted(self)


def summary(model: nn.Module | Mapping[str, nn.Module]) -> ModelSummary:
    """Count the parameters of a model, or of several by name, without calling them.

    Example:
        >>> print(summary(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))))
        module  type        parameters
        ------------------------------
        model   Sequential          58
          0     Linear              40
          1     Linear              18
        parameters: 58, of which 58 are trainable
        memory: weights 232 B, gradients 232 B
    """
    if not isinstance(model, nn.Module | Mapping):
        raise TypeError(f"summary({model!r}): expected a torch.nn.Module, or a mapping from names to modules")
    roots = {"model": model} if isinstance(model, nn.Module) else dict(model)
    for name, root in roots.items():
        if not isinstance(root, nn.Module):
            raise TypeError(f"summary(): {name!r} is a {type(root).__name__}; expected a torch.nn.Module")
    return _summarized(roots, None)


def _summarized(roots: Mapping[str, nn.Module], watch: _Watch | None) -> ModelSummary:
    parameters = {id(p): p for root in roots.values() for p in root.parameters()}.values()
    buffers = {id(b): b for root in roots.values() for b in root.buffers()}.values()
    trainable = [p for p in parameters if p.requires_grad]
    lazy = any(map(is_lazy, parameters))
    return ModelSummary(
        rows=_rows(roots, watch),
        parameters=None if lazy else sum(p.numel() for p in parameters),
        trainable=sum(map(_count, trainable)),
        weight_bytes=sum(map(_bytes, parameters)),
        buffer_bytes=sum(map(_bytes, buffers)),
        gradient_bytes=sum(map(_bytes, trainable)),
        flops=None if watch is None else watch.total,
        uncounted=None if watch is None else watch.uncounted(roots.values()),
    )


class Summary(Handler):
    """Prints a model summary after the first iteration: parameters, output shapes, FLOPs and memory of each module.

    The handler watches the first forward of training. It runs no extra forward, which would draw random numbers or change
    BatchNorm statistics. The hooks and the counter are removed before the backward, even after an error. Shared parameters are
    counted once, and parameters of sharded models (FSDP) in full. For a compiled model, only parameters are shown.

    Operations are those of matrix products, convolutions and attention in one forward; a multiplication and an addition count as
    two. Modules that torch does not count, such as an LSTM, are listed.

    Args:
        depth: Number of levels of modules to show below the models; None shows all.
        modules: Pattern that selects rows by name, such as "*attention*".
        file: Stream to print the summary to; standard error by default.

    Attributes:
        summary: The summary; None before the first iteration.

    Source:
        Operations: ``torch.utils.flop_counter``.

    Example:
        >>> import sys
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(100, 500), torch.nn.Linear(500, 100))
        >>> engine = Engine(update, model=model, seed=0)
        >>> _ = engine.attach(Summary(file=sys.stdout))
        >>> _ = engine.run([(torch.ones(10, 100), torch.ones(10, 100))], max_epochs=1)
        module  type        parameters  output  MFLOPs
        ----------------------------------------------
        model   Sequential     100,600  10x100   2.000
          0     Linear          50,500  10x500   1.000
          1     Linear          50,100  10x100   1.000
        parameters: 100,600, of which 100,600 are trainable
        memory: weights 393 KiB, gradients 393 KiB, optimizer 0 B
        forward: 2.000 MFLOPs for a batch of 10, 0.200 per sample
    """

    rank_zero_only = True

    def __init__(
        self,
        *,
        depth: int | None = 2,
        modules: str | None = None,
        file: TextIO | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.depth = None if depth is None else check_int(self, "depth", depth, least=0)
        self.modules = check_name(self, "modules", modules)
        self.file: TextIO | None = check_stream(self, "file", file)
        self.summary: ModelSummary | None = None
        self._watch: _Watch | None = None
        self._watched: set[str] = set()  # the updates whose forward was seen
        self._connected: list[Attachment] = []

    @on(Events.STARTED, phase=Phase.RECORD, reads=[], writes=[])
    def watch_first_iteration(self, engine: Engine) -> None:
        """Watch the forwards of the first iteration, and no other."""
        if self.summary is None:
            self._connected = [
                engine.connect(Events.FORWARD_STARTED, self._watch_forward, phase=Phase.RECORD),
                engine.connect(Events.ITERATION_COMPLETED, self._print, phase=Phase.RECORD),
            ]

    @on(Events.ENDED, phase=Phase.RECORD, reads=[], writes=[])
    def stop_watching(self, engine: Engine) -> None:
        """Disconnect from the forward, even if there was none."""
        for one in self._connected:
            one.detach()
        self._connected, self._watch, self._watched = [], None, set()

    def _watch_forward(self, engine: Engine) -> None:
        name = engine.state.update.name
        if name in self._watched or is_compiled(engine):  # a compiled module would be compiled again
            return
        if self._watch is None:
            self._watch = _Watch(engine.modules.values())
        self._watched.add(name)
        engine.regions.enter(self._watch)

    def _print(self, engine: Engine) -> None:
        watch = self._watch
        self.stop_watching(engine)
        self.summary = found = _summarized(engine.modules, watch)
        states = [one for update in engine.updates if update.optimizer is not None
                  for state in update.optimizer.state.values() for one in state.values()]  # fmt: skip
        found.optimizer_bytes = sum(_bytes(one) for one in states if isinstance(one, Tensor))
        if watch is not None and engine.state.batch is not None:
            found.samples = engine.updates[0].samples_in(engine.state.batch)
        print(found.table(self.depth, self.modules), file=self.file or sys.stderr, flush=True)


class _Watch(OperationCounter):
    """What the modules return inside this context, and the operations they compute."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        super().__init__()
        self.outputs: dict[int, str] = {}  # by id of the module
        self.calls: dict[int, int] = {}
        self.flops: dict[int, int] = {}
        self._modules = {id(one): one for root in roots for one in root.modules()}
        self._open: list[int] = []  # the modules that are called now
        self._hooks = ExitStack()

    def __enter__(self) -> _Watch:
        for key, module in self._modules.items():
            begin, end = partial(self._begin, key), partial(self._end, key)
            self._hooks.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
            self._hooks.callback(module.register_forward_hook(end, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def count(self, operations: int) -> None:
        super().count(operations)
        for key in set(self._open):
            self.flops[key] = self.flops.get(key, 0) + operations

    def uncounted(self, roots: Iterable[nn.Module]) -> dict[str, int]:
        """The kinds of modules that multiply by their own weights, but whose operations were not counted."""
        modules = {one for root in roots for one in root.modules() if id(one) in self.calls}
        kinds = [
            type(one).__name__
            for one in modules
            if not self.flops.get(id(one)) and any(p is not None and p.dim() > 1 for p in one._parameters.values())
        ]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds) - {"Embedding", "EmbeddingBag"})}  # these look up

    def _begin(self, key: int, module: nn.Module, inputs: Any) -> None:
        self._open.append(key)

    def _end(self, key: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._open.remove(key)
        self.calls[key] = self.calls.get(key, 0) + 1
        self.outputs[key] = _described(output)


def _rows(roots: Mapping[str, nn.Module], watch: _Watch | None) -> list[ModuleSummary]:
    """A row for each module."""
    rows: list[ModuleSummary] = []
    for root_name, root in roots.items():
        modules = {f"{root_name}.{name}".rstrip("."): one for name, one in root.named_modules(remove_duplicate=False)}
        held = _held(modules)
        seen: set[int] = set()  # the parameters that rows before this one hold themselves
        for name, module in modules.items():
            row = _row(name, module, held[name], seen)
            if watch is not None and id(module) in watch.calls:
                row.calls, row.output = watch.calls[id(module)], watch.outputs[id(module)]
                row.flops = watch.flops.get(id(module), 0)
            rows.append(row)
            seen |= _own(module).keys()
    return rows


def _row(name: str, module: nn.Module, held: Mapping[int, nn.Parameter], seen: set[int]) -> ModuleSummary:
    return ModuleSummary(
        name,
        type(module).__name__,
        None if any(map(is_lazy, held.values())) else sum(map(_count, held.values())),
        sum(_count(p) for p in held.values() if p.requires_grad),
        sum(_count(p) for key, p in held.items() if key in seen),
    )


def _held(modules: Mapping[str, nn.Module]) -> dict[str, dict[int, nn.Parameter]]:
    """The parameters of each module, those of its submodules added in one pass."""
    held: dict[str, dict[int, nn.Parameter]] = {}
    for name, module in modules.items():
        own = _own(module)
        held[name] = dict(own)
        while own and "." in name:
            name = name.rpartition(".")[0]
            held[name] |= own
    return held


def _own(module: nn.Module) -> dict[int, nn.Parameter]:
    return {id(p): p for p in module._parameters.values() if p is not None}


def _described(output: Any) -> str:
    """The shapes in an output, and the structure around them."""
    if isinstance(output, Tensor):
        text = "x".join(map(str, output.shape)) or "scalar"
    elif isinstance(output, Mapping):
        text = "{" + ", ".join(f"{key}: {_described(value)}" for key, value in output.items()) + "}"
    elif isinstance(output, list | tuple):
        text = "(" + ", ".join(map(_described, output)) + ")"
    elif is_dataclass(output) and not isinstance(output, type):
        text = _described({field.name: getattr(output, field.name) for field in fields(output)})
    else:
        text = type(output).__name__.removesuffix("Type")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _counted(row: ModuleSummary) -> str:
    if row.parameters is None:
        return "?"
    return f"{row.parameters:,}" + (f" ({row.shared:,} shared)" if row.shared else "")


def _count(p: Tensor) -> int:
    return 0 if is_lazy(p) else p.numel()


def _bytes(p: Tensor) -> int:
    return 0 if is_lazy(p) else p.numel() * p.element_size()


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
