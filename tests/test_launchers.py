"""Started by others than one torchrun: srun, Ray Train, Ray Tune, and a torchrun on each of two machines, which here are one."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import stat
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from runpy import run_path

import pytest

from signalfire import Events
from signalfire.handlers import History
from tests.kit import free_port, needs
from tests.processes import Failed, run_program, run_together

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = re.compile(r"^2 process\(es\), (\d+) steps: accuracy ([\d.]+) %.* weights ([0-9a-f]{12})$", re.M)
LIMIT = 300  # seconds

SRUN = """#!{python}
'''As srun does: starts the command of the line once for each task, with the number of the task in the environment.'''
import os, subprocess, sys
tasks = [
    subprocess.Popen(sys.argv[1:], env=os.environ | {{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}})
    for task in range(int(os.environ["SLURM_NTASKS"]))
]
sys.exit(max(task.wait() for task in tasks))
"""


def trained_by(command: list[str], environment: dict[str, str], folder: Path) -> tuple[str, ...]:
    """The steps, the accuracy and the weights that the example of several processes has printed."""
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    found = PRINTED.findall(ended.stdout)
    assert len(found) == 1, ended.stdout
    return tuple(found[0])


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("torchrun")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    return trained_by([*command, str(EXAMPLES / "distributed.py"), "--epochs", "2"], dict(os.environ), folder)


@pytest.mark.slow
def test_srun_starts_the_processes_as_the_script_says(under_torchrun: tuple[str, ...], tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for name, text in {
        "srun": SRUN.format(python=sys.executable),
        "scontrol": "#!/bin/sh\nprintf '127.0.0.1\\nnode2\\n'\n",
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": str(free_port()),
    }
    command = ["bash", str(EXAMPLES / "slurm.sh"), "--epochs", "2"]
    assert trained_by(command, environment, tmp_path) == under_torchrun


@pytest.mark.slow
@pytest.mark.parametrize(("status", "requeued"), [(143, True), (139, False), (0, False)])
def test_a_job_that_was_preempted_is_queued_again_and_no_other(status: int, requeued: bool, tmp_path: Path) -> None:
    for name, text in {
        "srun": f"#!/bin/sh\nexit {status}\n",
        "scontrol": f"#!/bin/sh\necho node1\necho $* >> {tmp_path}/asked\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": "7"
    }  # fmt: skip
    ended = subprocess.run(["bash", str(EXAMPLES / "slurm.sh")], env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == status
    assert ("requeue 7" in (tmp_path / "asked").read_text()) is requeued


@pytest.mark.slow
def test_a_torchrun_on_each_of_two_machines_trains_the_same_weights(
    under_torchrun: tuple[str, ...], tmp_path: Path
) -> None:
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    common += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "signalfire"]
    common += [str(EXAMPLES / "distributed.py"), "--epochs", "2", "--folder", str(tmp_path / "shared")]
    launchers = [
        subprocess.Popen(common, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [launcher.communicate(timeout=LIMIT) for launcher in launchers]
    assert all(launcher.returncode == 0 for launcher in launchers), ended[0][1] + ended[1][1]
    (found,) = PRINTED.findall(ended[0][0] + ended[1][0])
    assert tuple(found) == under_torchrun


def code_of_the_page_up_to(text: str) -> str:
    """The code of "Custom handlers", without its sessions, up to the block that has the text."""
    page = (EXAMPLES / "guide" / "writing_a_handler.md").read_text()
    blocks = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if not block.startswith(">>>")]
    (last,) = (place for place, block in enumerate(blocks) if text in block)
    return "\n".join(blocks[: last + 1])


def printed_by(script: Path) -> str:
    """What a script prints that runs in this process, one of several, as it would under torchrun."""
    with redirect_stdout(io.StringIO()) as printed:
        run_path(str(script), run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
def test_the_test_of_a_handler_in_the_guide_runs_in_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "test_mine.py"
    script.write_text(code_of_the_page_up_to("def test_ranks_agree"))
    run_together(printed_by, 2, script)
    script.write_text(script.read_text().replace("one == weights[0]", "one != weights[0]"))
    with pytest.raises(Failed, match="AssertionError"):
        run_together(printed_by, 2, script)


NOISY = """
from signalfire.handlers import FullyShardedDataParallel

torch.set_num_threads(1)
trained = []
for kind in (DistributedDataParallel, FullyShardedDataParallel):
    engine, parallel = build(), kind()
    engine.attach(parallel, WeightNoise(every=1))
    engine.run(batches * 4, max_epochs=1)
    if kind is FullyShardedDataParallel:
        parallel.unshard(engine)
    trained.append(engine.model.weight.tolist())
assert all(one == trained for one in engine.processes.gather(trained))
engine.processes.print(trained[0] == trained[1])
"""


@pytest.mark.slow
def test_the_handler_of_the_guide_that_changes_weights_does_so_alike_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(code_of_the_page_up_to("class WeightNoise") + NOISY)
    assert run_together(printed_by, 2, script) == ["True\n", ""]


@pytest.mark.slow
def test_the_first_script_of_several_processes_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (EXAMPLES / "guide" / "processes.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    shown = []
    for number, command in enumerate([[], launcher]):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run_program(*command, script, cwd=folder)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout.strip())
    assert re.findall(r"prints `(.*? iterations)`", page) == shown


@pytest.mark.slow
def test_the_command_of_the_guide_trains_its_script_on_two_nodes(tmp_path: Path) -> None:
    page = (EXAMPLES / "guide" / "recipe_nodes.md").read_text()
    (script,), (command,), (shown,) = (
        re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S) for kind in ("python", "bash", "text")
    )
    (tmp_path / "train.py").write_text(script)
    program, *options = command.replace("\\\n", " ").split()
    assert program == "torchrun"
    assert "--nproc-per-node=8" in options
    options = [one.replace("node0:29400", f"127.0.0.1:{free_port()}").replace("node=8", "node=1") for one in options]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ended = [launcher.communicate(timeout=LIMIT) for launcher in launchers]
    assert all(launcher.returncode == 0 for launcher in launchers), ended[0][1] + ended[1][1]
    printed = ended[0][0] + ended[1][0]  # by rank 0 alone
    form = r"(\d+) steps, ([\d.]+)% of the validation digits\n"
    (steps, accuracy), (steps_of_one, accuracy_of_one) = (
        re.fullmatch(form, text).groups()  # type: ignore[union-attr]
        for text in (printed, shown)
    )
    assert steps == steps_of_one
    assert float(accuracy) == pytest.approx(float(accuracy_of_one), abs=4.0)


@pytest.mark.slow
def test_ray_train_starts_the_workers_and_a_second_job_has_nothing_left_to_do(tmp_path: Path) -> None:
    needs("cluster", "ray")
    command = [
        sys.executable,
        str(EXAMPLES / "ray_train.py"),
        "--workers",
        "2",
        "--epochs",
        "5",
        "--folder",
        str(tmp_path),
    ]
    for steps in (40, 40):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        assert ended.returncode == 0, ended.stderr
        assert f"2 workers, {steps} steps: accuracy" in ended.stdout + ended.stderr


@pytest.mark.slow
def test_trials_of_ray_tune_have_the_values_of_the_engines_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("cluster", "ray")
    command = [sys.executable, str(EXAMPLES / "ray_tune.py"), "--folder", str(tmp_path)]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + LIMIT
    while not list(tmp_path.glob("search/*/checkpoint_000001")) and time.monotonic() < limit:
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("search/*/checkpoint_*/step-*")}
    assert done, "killed once a trial had two epochs"
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^6 trials of \d to 9 epochs: 9\d.\d% with ", ended.stdout, re.M), ended.stdout
    assert all(path.stat().st_mtime_ns == time_of for path, time_of in done.items()), "no epoch was trained again"

    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("ray_tune")
    found = list(tmp_path.glob("search/*/result.json"))
    assert len(found) == 6
    for path in found:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        engine = example.build(**rows[0]["config"])
        history = History()
        engine.attach(history)
        engine.run(example.digits(0, 1000, batch_size=50, shuffle=True), max_epochs=len(rows))
        assert {row["training_iteration"]: row["val_accuracy"] for row in rows} == dict(
            enumerate(history["val_accuracy"], 1)
        )

    (path, rows) = max(((path, path.read_text().splitlines()) for path in found), key=lambda one: len(one[1]))
    trial = example.Trial(json.loads(rows[0])["config"])
    trial.load_checkpoint(str(max(path.parent.glob("checkpoint_*"))))
    epochs: list[int] = []
    trial.engine.connect(Events.EPOCH_COMPLETED, lambda engine: epochs.append(engine.state.epoch))
    trial.engine.run(trial.data, max_epochs=10)
    assert epochs == [10], "a trial that is continued begins where it was"
