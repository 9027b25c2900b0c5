"""Signalfire without what only Linux has: nothing asks for it where it is imported, and a run is made without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import builtins, importlib, io, multiprocessing, os, pkgutil, signal, subprocess, sys, sysconfig

import torch
import torch.distributed, torch.utils.data, torch.utils.tensorboard  # of Linux, as they are
import tqdm, tensorboardX, tempfile, shutil

torch.set_num_threads(1)
sysconfig.get_config_vars()
platform = sys.argv[1]
hidden = {"darwin": ["/proc"], "win32": ["/proc"]}[platform]
modules = {"darwin": [], "win32": ["resource", "fcntl", "termios", "pwd", "grp"]}[platform]
names = {"darwin": [], "win32": ["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGALRM", "SIGQUIT", "pthread_sigmask", "setitimer"]}
functions = {"darwin": ["sched_getaffinity"], "win32": ["fork", "register_at_fork", "pread", "pwrite", "getuid", "geteuid",
    "getpgid", "killpg", "setsid", "sched_getaffinity", "uname", "getloadavg", "mkfifo", "O_NONBLOCK", "O_DIRECTORY"]}
for name in modules:
    sys.modules[name] = None
for name in names[platform]:
    delattr(signal, name)
for name in functions[platform]:
    delattr(os, name)


def hides(function):
    def called(path, *args, **options):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **options)
    return called


builtins.open = io.open = hides(open)
os.listdir, os.readlink, os.stat = hides(os.listdir), hides(os.readlink), hides(os.stat)
sys.platform = platform
if platform == "win32":

    def kill(pid, number):
        raise AssertionError(f"os.kill({pid}, {number}) ends a process on Windows")

    os.kill = kill

    opened = os.open

    def open_file(path, flags, *args, **options):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *args, **options)

    os.open = open_file
"""

TRAINS = """
import signalfire
from signalfire import Engine, Update
from signalfire.handlers import (
    Checkpoint, CSVLogger, DeviceStatistics, EarlyStopping, GarbageCollection, History, MemorySnapshot, Preemption, ProgressBar,
    Reporting, TensorBoardLogger, Throughput, Trace, Validation,
)

for found in pkgutil.walk_packages(signalfire.__path__, "signalfire."):
    of_others = found.name.startswith("signalfire.exact.")  # the loops of other packages, which import these
    if not found.name.endswith("__main__") and ".project" not in found.name and not of_others:
        importlib.import_module(found.name)

folder = sys.argv[2]


def made(seed):
    torch.manual_seed(seed)
    update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
    return Engine(update, model=torch.nn.Linear(2, 1), seed=seed), [(torch.ones(4, 2), torch.ones(4, 1))] * 3


def run(epochs):
    engine, data = made(0)
    engine.attach(
        Validation(data), Checkpoint(folder + "/saved", resume=True), CSVLogger(folder + "/log.csv"), History(), ProgressBar(),
        DeviceStatistics(every="1it"), GarbageCollection(), MemorySnapshot(folder), Preemption(), Throughput(),
        TensorBoardLogger(folder + "/events"), Trace(folder + "/trace.jsonl", every="1it"), EarlyStopping("val_loss", patience=5),
    )
    engine.run(data, max_epochs=epochs)
    return engine


run(1)
engine = run(2)
print("iteration", engine.state.iteration, sorted(name for name in engine.state.metrics if name.startswith("process")))
from signalfire.ablation import LeaveOneOut, Study

def build(seed):
    engine, data = made(seed)
    engine.attach(Validation(data), EarlyStopping("val_loss", patience=1))
    return engine, lambda engine: engine.run(data, max_epochs=2)

study = Study(build, metric="val_loss", mode="min", seeds=range(2), store=folder + "/study.jsonl")
report = study.run(LeaveOneOut(), workers=0)
print(type(report).__name__)
"""


@pytest.mark.moderate
@pytest.mark.parametrize(("platform", "known"), [("darwin", "['process_peak_mib']"), ("win32", "[]")])
def test_all_is_imported_and_a_run_is_made_without_what_only_linux_has(
    platform: str, known: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITHOUT + TRAINS)
    command = [sys.executable, "-W", "error::DeprecationWarning", str(program), platform, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"iteration 6 {known}" in done.stdout
    assert (tmp_path / "study.jsonl").exists()
