"""What is written when the memory of a process with a limit runs out."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, Events
from signalfire.handlers import MemorySnapshot, MicroBatching
from signalfire.testing import check_handler
from tests.kit import batches, build, finished, mlp

PROGRAM = """
import resource, sys, traceback
from functools import partial
import torch
from torch import nn
from signalfire import Engine, Events, Update
from signalfire.handlers import MemorySnapshot

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024, bias=False)  # 4 MiB

    def forward(self, x):
        hidden = self.layer(x)
        if engine.state.iteration == 3 and {where!r} == "forward":
            scratch = torch.ones(8, 2**20)  # 32 MiB
            huge = torch.empty(2**33)
        return hidden

update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.Adam, lr=1e-3))
engine = Engine(update, model=Model(), seed=0)
engine.attach(MemorySnapshot(sys.argv[1]))
x = torch.zeros(256, 1024)  # 1 MiB

@engine.on(Events.GRADIENTS_READY(once=3))
def grow(engine):
    if {where!r} == "step":
        torch.empty(2**33)

@engine.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    if {where!r} == "epoch":
        torch.empty(2**33)

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
try:
    engine.run([(x, x.clone())] * 4, max_epochs=1)
except RuntimeError as error:
    print(type(error).__name__, str(error).splitlines()[0])
    print(*error.__notes__, sep="\\n")
print(engine.updates[0].steps)
"""

ROW = r"^{} +([\d.,]+)$"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")


def of_kind(text: str, kind: str) -> float:
    """The MiB of a kind."""
    found = re.search(ROW.format(kind), text, re.MULTILINE)
    assert found is not None, text
    return float(found[1].replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "forward", "epoch"])
def test_a_process_that_runs_out_of_memory_writes_what_it_held_and_ends_with_the_same_error(
    tmp_path: Path, where: str
) -> None:
    done = finished("-c", PROGRAM.format(where=where), tmp_path / "made" / "here")
    assert done.returncode == 0, done.stderr
    iteration = 4 if where == "epoch" else 3
    path = tmp_path / "made" / "here" / f"memory-{iteration}.txt"
    assert "can't allocate memory: you tried to allocate 34359738368 bytes" in done.stdout
    assert f"'memory_snapshot': the memory report is in {path}" in done.stdout
    assert done.stdout.splitlines()[-1] == ("4" if where == "epoch" else "2")
    text = path.read_text()
    assert text.startswith(f"Out of memory in epoch 1, iteration {iteration}.\nRuntimeError: ")
    assert of_kind(text, "parameters") == 4.0
    assert of_kind(text, "optimizer") == pytest.approx(8.0, abs=0.1)
    assert of_kind(text, "buffers") == 0.0
    assert of_kind(text, "gradients") == (4.0 if where == "step" else 0.0)
    assert of_kind(text, "batch and output") >= 2.0
    assert re.search(r"^ +4\.0  cpu +float32 +\(1024, 1024\) +model\.layer\.weight$", text, re.MULTILINE)
    assert re.search(r"^ +4\.0  cpu +float32 +\(1024, 1024\) +exp_avg_sq of model\.layer\.weight$", text, re.MULTILINE)
    assert re.search(r"^ +1\.0  cpu +float32 +\(256, 1024\) +batch$", text, re.MULTILINE)
    assert bool(re.search(r"gradient of model\.layer\.weight$", text, re.MULTILINE)) == (where == "step")
    scratch = re.search(r"^ +32\.0  cpu +float32 +\(8, 1048576\) +another tensor$", text, re.MULTILINE)
    assert (scratch is not None) == (where == "forward")
    assert re.search(r"^Process memory: [\d,.]+ MiB now, [\d,.]+ MiB at its peak\.$", text, re.MULTILINE)


def failing(folder: Path, error: BaseException, model: nn.Module | None = None, **options: Any) -> Engine:
    engine = build(model or mlp(5, 8, 1), MemorySnapshot(folder, **options))

    def fail(engine: Engine) -> None:
        raise error

    engine.connect(Events.BACKWARD_STARTED(once=2), fail)
    return engine


def test_files_are_numbered_and_as_long_as_was_asked_for(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            failing(tmp_path, torch.OutOfMemoryError("no memory"), largest=2).run(batches(), max_epochs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory-2-2.txt", "memory-2-3.txt", "memory-2.txt"]
    assert f"'memory_snapshot': the memory report is in {tmp_path / 'memory-2-3.txt'}" in caught.value.__notes__
    assert len((tmp_path / "memory-2.txt").read_text().partition("what it is\n")[2].splitlines()) == 2


def test_other_errors_and_pieces_that_are_computed_again_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="another error"):
        failing(tmp_path / "none", RuntimeError("another error")).run(batches(), max_epochs=1)
    engine = build(mlp(5, 8, 1), MemorySnapshot(tmp_path / "none"), MicroBatching())

    @engine.on(Events.FORWARD_STARTED)
    def spike(engine: Engine) -> None:
        if engine.state.iteration == 3 and len(engine.state.batch[0]) > 2:
            raise torch.OutOfMemoryError

    engine.run(batches(), max_epochs=1)
    assert not (tmp_path / "none").exists()


def held() -> float:
    """The MiB that the tensors of other tests in this process take."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    near = [one for one in found if one.device.type == "cpu" and one.layout is torch.strided]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in near}.values()) / 2**20


def test_views_count_once_and_tensors_without_memory_not_at_all(tmp_path: Path) -> None:
    others = held()
    model = mlp(5, 8, 1)
    view, nothing = torch.zeros(3, 2**20), (torch.empty(2**40, device="meta"), torch.eye(3).to_sparse())
    views = [view[0], view[:, 0], view.T]
    with pytest.raises(torch.OutOfMemoryError):
        failing(tmp_path, torch.OutOfMemoryError("no memory"), model).run(batches(), max_epochs=1)
    text = (tmp_path / "memory-2.txt").read_text()
    assert len(re.findall(r"^ +12\.0  cpu", text, re.MULTILINE)) == 1
    assert of_kind(text, "other tensors") < others + 12 + 8
    assert len(views) == 3
    assert nothing[0].is_meta


def test_a_file_that_cannot_be_written_leaves_the_error_as_it_is(tmp_path: Path) -> None:
    engine = failing(tmp_path / "file", torch.OutOfMemoryError("no memory"))
    (tmp_path / "file").write_text("")
    with pytest.raises(torch.OutOfMemoryError, match="no memory") as caught:
        engine.run(batches(), max_epochs=1)
    assert any("the memory report was not written: FileExistsError" in note for note in caught.value.__notes__)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for options, message in (({"largest": 0}, "largest=0"), ({"history": 1.5}, "history=1.5")):
        with pytest.raises((TypeError, ValueError), match=rf"MemorySnapshot\({message}"):
            MemorySnapshot(tmp_path, **options)
    with pytest.raises(TypeError, match=r"MemorySnapshot\(folder=3\)"):
        MemorySnapshot(3)  # type: ignore[arg-type]


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler(tmp_path: Path) -> None:
    model = mlp(5, 8, 1).state_dict()

    def make() -> Engine:
        net = mlp(5, 8, 1)
        net.load_state_dict(model)
        return build(net)

    check_handler(make, lambda: MemorySnapshot(tmp_path), batches(3), max_epochs=2, changes_training=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_on_a_gpu_the_allocators_history_is_written_and_recorded_no_longer(tmp_path: Path) -> None:
    import pickle

    engine = failing(tmp_path, torch.OutOfMemoryError("no memory"), mlp(5, 8, 1).cuda())
    engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: None)
    data = [(x.cuda(), y.cuda()) for x, y in batches()]
    with pytest.raises(torch.OutOfMemoryError):
        engine.run(data, max_epochs=1)
    snapshot = pickle.loads((tmp_path / "memory-2.pickle").read_bytes())
    assert any(snapshot["device_traces"])
    assert not torch._C._cuda_isHistoryEnabled()
