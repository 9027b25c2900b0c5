"""Real processes for tests: forked from this one, so that nothing is imported again, and joined as torchrun joins them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch._dynamo.distributed  # DDP would import it, and 800 modules with it, in every forked process
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from tests.kit import LIMIT

__all__ = ["Failed", "assert_alike", "program", "run_program", "run_together"]


class Failed(AssertionError):
    """One or several of the processes failed; `errors` has what each reported, by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"---- rank {rank}\n{error}" for rank, error in sorted(errors.items())))
        self.errors = errors


def run_together(function: Callable[..., Any], size: int, *args: Any, timeout: float = LIMIT) -> list[Any]:
    """Call ``function(*args)`` in so many processes, and return what each gave, by rank.

    Raises:
        Failed: if one of them raised, was killed, or did not end in time.
    """
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_work, args=(function, args, rank, size, Path(folder))) for rank in range(size)
        ]
        sys.stdout.flush()
        sys.stderr.flush()
        for process in processes:
            process.start()
        # The launcher hosts the store, as torchrun does; but only now, since a process that is forked while the store's threads
        # run may wait for ever for a lock that one of them held.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (Path(folder) / "port.new").write_text(str(store.port))
        (Path(folder) / "port.new").rename(Path(folder) / "port")
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        results, errors = [], {}
        for rank, process in enumerate(processes):
            path = Path(folder) / str(rank)
            kind, value = (
                pickle.loads(path.read_bytes()) if path.exists() else ("error", f"exit code {process.exitcode}")
            )
            if rank in late:
                kind, value = "error", f"did not end within {timeout} seconds"
            if kind == "error":
                errors[rank] = value
            results.append(value)
        if errors:
            # The error would keep the store, whose threads a process that is forked later cannot do with.
            del store
            raise Failed(errors)
        return results


def _work(function: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, folder: Path) -> None:
    # Garbage of the tests before is not collected here: a store among it would wait for its threads, which are not forked.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell
    while not (folder / "port").exists():
        time.sleep(0.002)
    port = (folder / "port").read_text()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip
    torch.set_num_threads(1)
    try:
        reported = ("result", function(*args))
    except BaseException:
        reported = ("error", traceback.format_exc())
    (folder / f"{rank}.new").write_bytes(pickle.dumps(reported))
    (folder / f"{rank}.new").rename(folder / str(rank))
    if reported[0] == "result" and dist.is_initialized():
        with suppress(RuntimeError):  # another one has failed, and says so itself
            dist.barrier()
    sys.stdout.flush()
    os._exit(0 if reported[0] == "result" else 1)


def run_program(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What has become of a script, or of a module after ``-m``, in a process that is forked from this one.

    What this process has imported is not imported again, which takes most of the time of a small program.
    """
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("output", "errors")]
        process = program(*arguments, cwd=cwd, outputs=outputs)
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in outputs))


def program(*arguments: Any, cwd: Path, outputs: Sequence[Path]) -> multiprocessing.process.BaseProcess:
    """The process of `run_program`, to be started: in a session of its own, and with what it writes in these two files."""
    sys.stdout.flush()
    sys.stderr.flush()
    given = [str(argument) for argument in arguments]
    return multiprocessing.get_context("fork").Process(target=_become, args=(given, cwd, outputs))


def _become(program: list[str], cwd: Path, outputs: Sequence[Path]) -> None:
    """In the child: never returns."""
    status = 1
    try:
        gc.freeze()
        os.setsid()
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # of the process that was forked
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(cwd)
        warnings.resetwarnings()
        warnings.simplefilter("default")
        if program[0] == "-m":
            sys.argv, sys.path[:0] = program[1:], [str(cwd)]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = program, [str(Path(cwd, program[0]).parent)]
            runpy.run_path(str(Path(cwd, program[0])), run_name="__main__")
        status = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def assert_alike(results: Sequence[Any]) -> Any:
    """That all processes ended with the same; what it is."""
    for rank, result in enumerate(results):
        _assert_same(results[0], result, f"rank {rank}")
    return results[0]


def _assert_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), where
        for key in one:
            _assert_same(one[key], other[key], f"{where}: {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for place, pair in enumerate(zip(one, other, strict=True)):
            _assert_same(*pair, f"{where}: {place}")
    else:
        assert one == other, f"{where}: {one} is not {other}"
