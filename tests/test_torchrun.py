"""Under a real torchrun: a worker is lost, the job is preempted, or a worker fails; and the example of several processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS = 500
"""After which a job hangs; a lost worker is noticed long before."""

STEP = 8
"""The iteration in which something happens: in the middle of an epoch of five, in an open window, after a checkpoint."""

SCRIPT = f"""
import hashlib, json, os, signal, sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Phase, Update, seed_everything
from signalfire.handlers import (EMA, Average, Checkpoint, CSVLogger, DistributedDataParallel, GradientAccumulation, LRScheduling,
                                 Metrics, Preemption, Validation)

torch.set_num_threads(1)
folder = Path(sys.argv[1])
happens, _, on_rank = os.environ.get("HAPPENS", "nothing").partition(" ")
if happens in ("SIGKILL", "error"):
    # torchrun ends the others by SIGTERM a tenth of a second later; on a busy machine they report afterwards.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
seed_everything(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
update = Update.supervised(nn.functional.cross_entropy, partial(torch.optim.Adam, lr=0.02))
evaluator = Engine(update.evaluation(), model=model)
evaluator.attach(Metrics(loss=Average()))
engine = Engine(update, model=model, seed=0)
engine.attach(distribution := DistributedDataParallel(timeout=120))
processes = distribution.processes
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator))
engine.attach(
    GradientAccumulation(2),
    LRScheduling(partial(torch.optim.lr_scheduler.StepLR, step_size=3)),
    EMA(0.9),
    Metrics(train_loss=Average()),
    Validation(evaluator, [(data.tensors[0][:20], data.tensors[1][:20])]),
    Checkpoint(folder, every="3it", keep=2, resume=True),
    CSVLogger(folder / "log.csv", every="1it"),
    Preemption(),
)
with open(folder / f"starts{{processes.rank}}", "a") as file:
    print(os.environ.get("TORCHELASTIC_RESTART_COUNT"), file=file)


def spoil(engine):
    once = folder / "happened"
    if happens == "error":
        raise ValueError("this sample is broken")
    if not once.exists():
        once.touch()
        os.kill(os.getpid(), getattr(signal, happens))


if happens != "nothing" and processes.rank == int(on_rank):
    engine.connect(Events.BACKWARD_STARTED(when=lambda engine: engine.state.iteration == {STEP}), spoil)
if happens == "SIGTERM":  # the scheduler sends it to all, to some a moment later: here to those that know already
    late = Events.PREEMPTED(when=lambda engine: processes.rank != int(on_rank))
    engine.connect(late, lambda engine: os.kill(os.getpid(), signal.SIGTERM), phase=Phase.PERSIST)
try:
    engine.run(DataLoader(data, batch_size=4, shuffle=True), max_epochs=3)
except SystemExit as left:
    final = {{"status": left.code, "iteration": engine.state.iteration}}
    (folder / f"left{{processes.rank}}.json").write_text(json.dumps(final))
    raise
weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
summary = f"weights {{hashlib.sha256(weights).hexdigest()}} after iteration {{engine.state.iteration}}\\n"
processes.print(summary, end="", all=True)  # in one piece: both write at the same time
"""


@dataclass
class Ended:
    """How a job ended."""

    status: int
    output: str
    errors: str
    folder: Path

    @property
    def weights(self) -> list[str]:
        """What each process printed."""
        return re.findall(r"weights ([0-9a-f]{64} after iteration \d+)$", self.output, re.MULTILINE)

    @property
    def log(self) -> str:
        return (self.folder / "log.csv").read_text()

    @property
    def starts(self) -> list[int]:
        """How often each process was started."""
        return [path.read_text().count("\n") for path in sorted(self.folder.glob("starts*"))]


def run(
    script: Path, *arguments: str, folder: Path, processes: int = 2, restarts: int = 0, happens: str = "nothing"
) -> Ended:
    """Start a script with torchrun, or alone with no processes; of what it has started, nothing is left behind."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
    ]
    command = [sys.executable, *(launcher if processes else ()), str(script), *arguments]
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER"))}
    environment |= {"OMP_NUM_THREADS": "1", "HAPPENS": happens}
    started = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = started.communicate(timeout=SECONDS)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    return Ended(started.returncode, output, errors, folder)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def undisturbed(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(script, str(folder), folder=folder, restarts=3)
    assert ended.status == 0, ended.errors
    assert ended.starts == [1, 1]
    assert len(ended.weights) == 2
    assert len(set(ended.weights)) == 1
    assert ended.weights[0].endswith("after iteration 15")
    assert ended.log.count("\n") > 30
    return ended


def kept(ended: Ended) -> list[str]:
    return sorted(path.name for path in ended.folder.glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_of_which_a_worker_was_killed_ends_as_if_it_had_not_been(
    rank: int, script: Path, undisturbed: Ended, tmp_path: Path
) -> None:
    ended = run(script, str(tmp_path), folder=tmp_path, restarts=3, happens=f"SIGKILL {rank}")
    assert ended.status == 0, ended.errors
    assert ended.starts == [2, 2], "it is started again once, and not after it has finished"
    assert ended.weights == undisturbed.weights
    assert ended.log == undisturbed.log
    assert [path.name for path in tmp_path.glob("*.csv")] == ["log.csv"]
    assert f"rank {rank} (pid " in ended.errors
    assert "died" in ended.errors
    # What it resumed from stays besides the two that are kept.
    assert set(kept(ended)) - set(kept(undisturbed)) == {"checkpoint-epoch0002-iter00000006"}


@pytest.mark.slow
def test_the_same_script_runs_alone(script: Path, tmp_path: Path) -> None:
    ended = run(script, str(tmp_path), folder=tmp_path, processes=0)
    assert ended.status == 0, ended.errors
    assert len(ended.weights) == 1
    assert ended.weights[0].endswith("after iteration 30"), "ten batches an epoch, none for another process"
    assert kept(ended) == ["checkpoint-epoch0003-iter00000027", "checkpoint-epoch0003-iter00000030"]


@pytest.mark.slow
def test_a_signal_to_one_worker_saves_and_stops_all_and_the_next_job_goes_on(
    script: Path, undisturbed: Ended, tmp_path: Path
) -> None:
    ended = run(script, str(tmp_path), folder=tmp_path, happens="SIGTERM 1")
    assert ended.status != 0
    left = [json.loads((tmp_path / f"left{rank}.json").read_text()) for rank in range(2)]
    assert left == [{"status": 128 + signal.SIGTERM, "iteration": STEP + 1}] * 2
    assert not ended.weights
    (preempted,) = tmp_path.glob("*-preempted*")
    assert preempted.name == f"checkpoint-epoch0002-iter{STEP + 1:08d}-preempted"
    again = run(script, str(tmp_path), folder=tmp_path)
    assert again.status == 0, again.errors
    assert again.weights == undisturbed.weights
    assert again.log == undisturbed.log


@pytest.mark.slow
def test_an_error_that_comes_again_ends_the_job_and_every_worker_reports_whose_it_was(
    script: Path, tmp_path: Path
) -> None:
    ended = run(script, str(tmp_path), folder=tmp_path, restarts=1, happens="error 1")
    assert ended.status != 0
    assert ended.starts == [2, 2]
    assert not ended.weights
    failed = (
        r"rank 1 \(pid \d+ on \S+\) failed with ValueError: this sample is broken at (\w+), epoch (\d), iteration (\d+)"
    )
    reported = re.findall(failed, ended.errors)
    assert reported == [("BACKWARD_STARTED", "2", str(STEP))] * 2, ended.errors
    assert ended.errors.count("Traceback") >= 4


@pytest.mark.slow
def test_the_example_of_several_processes_learns(tmp_path: Path) -> None:
    ended = run(EXAMPLES / "distributed.py", "--epochs", "3", folder=tmp_path)
    assert ended.status == 0, ended.errors
    found = re.findall(r"^(\d) process\(es\), (\d+) steps: accuracy ([\d.]+) %", ended.output, re.MULTILINE)
    assert len(found) == 1, ended.output
    assert found[0][:2] == ("2", "66")
    assert float(found[0][2]) > 90
