"""Out-of-memory reports: a table of the memory's content, and on CUDA a snapshot for PyTorch's memory viewer."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import check_int, tensors_in
from signalfire.checkpoints.names import numbered
from signalfire.distributed import local_part
from signalfire.models.explain import is_out_of_memory
from signalfire.models.modules import bare_name

from ._common.folders import check_folder
from ._common.process_memory import peak, resident
from ._common.ranks import BEFORE_ALL

__all__ = ["MemorySnapshot"]

KINDS = ("parameters", "buffers", "gradients", "optimizer", "batch and output", "other tensors")


class MemorySnapshot(Handler):
    """On an out-of-memory error, writes a report of what the CPU or GPU memory holds.

    The error is raised as usual, with a note that names the file. The text file lists the bytes of parameters, gradients,
    optimizer states and other tensors on each device, the memory of the process, and the largest tensors with their purpose,
    while the gradients and the tensors of the running functions still exist. Tensors that only autograd holds for the backward
    are not Python objects and are not listed. On CUDA, the allocator's history is recorded during the run, and a ``.pickle`` for
    https://pytorch.org/memory_viz is written beside the text file.

    A batch that `MicroBatching` retries in smaller pieces does not count as an error. If the files cannot be written, the note
    says so.

    Args:
        folder: Folder of the files ``memory-<iteration>.txt``, with the rank if there are several; created when needed. An
            existing file is not replaced: the next one gets a number.
        largest: Number of largest tensors to list.
        history: Number of allocations and frees that the CUDA allocator remembers, with their stacks.

    Source:
        https://docs.pytorch.org/docs/stable/torch_cuda_memory.html

    Example:
        >>> import tempfile
        >>> import torch
        >>> from pathlib import Path
        >>> from signalfire import Engine, Update
        >>> def loss(output, target):
        ...     raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        >>> update = Update.supervised(loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = engine.attach(MemorySnapshot(folder))
        ...     try:
        ...         _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1)
        ...     except torch.OutOfMemoryError:
        ...         print(Path(folder, "memory-1.txt").read_text().splitlines()[:2])
        ['Out of memory in epoch 1, iteration 1.', 'OutOfMemoryError: tried to allocate 20 GiB']
    """

    writes = True

    def __init__(
        self, folder: str | os.PathLike[str], *, largest: int = 20, history: int = 100_000, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.largest = check_int(self, "largest", largest)
        self.history = check_int(self, "history", history)
        self.folder = check_folder(self, folder)
        self._records = False
        self._reported: BaseException | None = None

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["device"], writes=[])
    def begin(self, engine: Engine) -> None:
        """Record the history of the CUDA allocator, unless it is being recorded already."""
        self._reported = None
        if engine.device.type == "cuda" and not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(max_entries=self.history)
            self._records = True

    @on(Events.UPDATE_STARTED, phase=Phase.PREPARE, rank=BEFORE_ALL, reads=[], writes=[])
    def watch(self, engine: Engine) -> None:
        """Wait for an error until the update is complete."""
        engine.regions.enter(self._watched(engine))

    @on(Events.EXCEPTION_RAISED, reads=["error"], writes=["error", "files"])
    def catch(self, engine: Engine) -> None:
        """Report an error that was raised outside an update, such as in an evaluation."""
        if engine.state.exception is not None:
            self._report(engine, engine.state.exception)

    @on(Events.ENDED, reads=[], writes=[])
    def end(self, engine: Engine) -> None:
        """Stop recording."""
        self._reported = None
        if self._records:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._records = False

    @contextmanager
    def _watched(self, engine: Engine) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._report(engine, error)
            raise

    def _report(self, engine: Engine, error: BaseException) -> None:
        if error is self._reported or not is_out_of_memory(error):
            return
        self._reported = error
        try:
            text = "\n".join(_lines(engine, error, self.largest)) + "\n"
            path = self._free_path(engine)
            path.write_text(text)
            if engine.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
            error.add_note(f"{self.name!r}: the memory report is in {path}")
        except Exception as problem:  # whatever goes wrong here, the error is the one that matters
            error.add_note(f"{self.name!r}: the memory report was not written: {type(problem).__name__}: {problem}")

    def _free_path(self, engine: Engine) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = f"-rank{engine.processes.rank}" if engine.processes.distributed else ""
        stem = f"memory-{engine.state.iteration}{rank}"
        paths = (self.folder / f"{name}.txt" for name in numbered(stem))
        return next(path for path in paths if not path.exists())


def _lines(engine: Engine, error: BaseException, largest: int) -> Iterator[str]:
    state = engine.state
    yield f"Out of memory in epoch {state.epoch}, iteration {state.iteration}."
    yield f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    yield ""
    known = _known(engine)
    tensors = _live(tensor for tensor, _, _ in known.values())
    bytes_of: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    for key, tensor in tensors.items():
        bytes_of[str(tensor.device)][known[key][1] if key in known else KINDS[-1]] += _bytes(tensor)
    yield f"{'MiB':<18}" + "".join(f"{device:>14}" for device in bytes_of)
    for kind in KINDS:
        yield f"{kind:<18}" + "".join(f"{by_kind[kind] / 2**20:>14,.1f}" for by_kind in bytes_of.values())
    yield f"{'in total':<18}" + "".join(f"{sum(by_kind.values()) / 2**20:>14,.1f}" for by_kind in bytes_of.values())
    yield ""
    yield f"Process memory: {_in_mib(resident())} now, {_in_mib(peak())} at its peak."
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        yield f"Allocated on cuda:{index}: {torch.cuda.memory_allocated(index) / 2**20:,.1f} MiB."
    yield ""
    yield "The largest tensors:"
    yield f"{'MiB':>10}  {'device':<8}  {'dtype':<10}  {'shape':<24}  what it is"
    for key, tensor in sorted(tensors.items(), key=lambda one: -_bytes(one[1]))[:largest]:
        what = known[key][2] if key in known else "another tensor"
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = str(tuple(tensor.shape))
        yield f"{_bytes(tensor) / 2**20:>10,.1f}  {tensor.device!s:<8}  {dtype:<10}  {shape:<24}  {what}"


_Key = tuple[str, int]
"""The memory of a tensor: its device and address, which views share."""


def _known(engine: Engine) -> dict[_Key, tuple[Tensor, str, str]]:
    """The tensors of the run by their memory, each with its kind and its name."""
    found: dict[_Key, tuple[Tensor, str, str]] = {}

    def add(tensor: object, kind: str, name: str) -> None:
        if isinstance(tensor, Tensor) and not tensor.is_meta and (key := _key(tensor)) is not None:
            found.setdefault(key, (local_part(tensor), kind, name))

    names: dict[int, str] = {}
    for root, module in engine.modules.items():
        for name, parameter in module.named_parameters(prefix=root):
            names[id(parameter)] = bare_name(name)
            add(parameter, "parameters", bare_name(name))
            add(parameter.grad, "gradients", f"gradient of {bare_name(name)}")
        for name, buffer in module.named_buffers(prefix=root):
            add(buffer, "buffers", bare_name(name))
    for update in engine.updates:
        for place, trained in enumerate(update.parameters):
            name = names.get(id(trained), f"parameter {place} of update {update.name!r}")
            add(trained, "parameters", name)
            add(trained.grad, "gradients", f"gradient of {name}")
            states = {} if update.optimizer is None else update.optimizer.state.get(trained, {})
            for key, value in states.items():
                add(value, "optimizer", f"{key} of {name}")
        for tensor in tensors_in(update.output):
            add(tensor, "batch and output", f"output of update {update.name!r}")
    for tensor in tensors_in(engine.state.batch):
        add(tensor, "batch and output", "batch")
    return found


def _live(known: Iterable[Tensor]) -> dict[_Key, Tensor]:
    """All tensors in this process, the largest view for each memory."""
    found = {key: tensor for tensor in known if (key := _key(tensor)) is not None}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):  # isinstance would call what lazy objects define as their class
            with suppress(Exception):
                if (key := _key(one)) is not None:
                    found.setdefault(key, local_part(one))
    return found


def _key(tensor: Tensor) -> _Key | None:
    """None for a tensor without memory, such as one that is sparse or on the meta device."""
    with suppress(RuntimeError, NotImplementedError):
        storage = local_part(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr():
            return str(tensor.device), storage.data_ptr()
    return None


def _in_mib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:,.1f} MiB"


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
