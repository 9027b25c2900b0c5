"""The jobs of a newcomer: each runs as it stands, ends with the recorded numbers, and stays as short as it is."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from signalfire.handlers import Checkpoint
from tests.kit import finished, needs
from tests.processes import run_program

JOBS = Path(__file__).parents[2] / "examples" / "jobs"

STATEMENTS = {
    "tabular": 31,
    "images": 34,
    "language_model": 58,
    "actor_critic": 52,
    "fine_tuning": 36,
    "two_ranks": 27,
    "handler": 30,
    "test_handler": 46,
    "ablation": 31,
    "search": 25,
    "ported": 37,
}
"""The most statements of each: those of the same job before there were short forms."""
MOST_IN_ALL = 345


def about(value: float) -> Any:
    """A number at the end of a training: processors round differently, and the training carries that on."""
    return pytest.approx(value, rel=1e-2)


def share(count: int, total: int) -> Any:
    """A share of samples at the end of a training; one that is near the boundary may fall on the other side."""
    return pytest.approx(count / total, abs=1e-2)


def run(job: str, folder: Path) -> str:
    """What a job prints, in a process of its own."""
    ended = run_program(JOBS / f"{job}.py", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "FindingWarning" not in ended.stderr, ended.stderr
    return ended.stdout


def metrics_in(line: str) -> dict[str, float]:
    """The metrics that a line shows, as a dict is printed."""
    found: dict[str, float] = ast.literal_eval(line[line.index("{") : line.index("}") + 1])
    return found


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def check_tabular(folder: Path) -> None:
    stopped, test = run("tabular", folder).splitlines()
    found = re.fullmatch(
        r"stopped: val_f1 has not improved on ([\d.]+) in the last 5 values \(greater is better\) at epoch 7", stopped
    )
    assert found is not None, stopped
    assert float(found[1]) == share(71, 74)
    assert metrics_in(test) == {"loss": about(0.4591265), "f1": share(23, 24)}
    assert "val/f1" in (folder / "runs" / "log.csv").read_text()


def check_images(folder: Path) -> None:
    printed = run("images", folder)
    assert printed.startswith("192 {")
    assert metrics_in(printed) == {"val_accuracy": share(559, 597), "val_loss": about(0.4185263)}
    assert list((folder / "runs" / "tensorboard").glob("events*"))
    assert run("images", folder) == printed, "it resumes from its last checkpoint, two iterations before the end"


def check_language_model(folder: Path) -> None:
    nothing, *samples, end = run("language_model", folder).splitlines()
    assert nothing == "nothing was found"
    assert [sample[:12] for sample in samples] == [f"[{iteration}] b'The " for iteration in (200, 400, 600, 800)]
    metrics = metrics_in(end)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]), rel=1e-6)
    if zlib.crc32("".join(topics[name] for name in sorted(topics)).encode()) == 3328411364:  # those of Python 3.11.7
        assert metrics["val_loss"] == about(2.884469)


def check_actor_critic(folder: Path) -> None:
    found = re.fullmatch(r"return: ([\d.]+)\n", run("actor_critic", folder))
    assert found is not None
    assert float(found[1]) == about(5.772562)


def check_fine_tuning(folder: Path) -> None:
    printed = run("fine_tuning", folder)
    shown = re.findall(r"^(\d) \[(\S+), (\S+)\] (True|False)$", printed, re.MULTILINE)
    assert [(epoch, trained) for epoch, _, _, trained in shown] == [(str(n), str(n >= 3)) for n in range(1, 7)]
    rates = [9.865224e-05, 8.431208e-05, 5.868241e-05, 3.019601e-05, 8.225609e-06, 0.0]
    assert [float(backbone) for _, backbone, _, _ in shown] == pytest.approx(rates, rel=1e-4)
    assert [float(head) for _, _, head, _ in shown] == pytest.approx([30 * rate for rate in rates], rel=1e-4)
    rows = re.findall(r"^ +\d +(0\.\d+) +(0\.\d+)$", printed, re.MULTILINE)
    assert [float(accuracy) for accuracy, _ in rows] == [share(n, 796) for n in (594, 671, 704, 709, 711, 711)]
    assert [float(loss) for _, loss in rows] == [about(n) for n in (0.9363, 0.5506, 0.3967, 0.3557, 0.3443, 0.3419)]
    assert is_picture(folder / "runs" / "history.png")


def check_two_ranks(folder: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = finished(*launcher, JOBS / "two_ranks.py", cwd=folder, start_new_session=True)
    assert ended.returncode == 0, ended.stderr
    (printed,) = ended.stdout.splitlines()
    assert printed.startswith("2 {")
    measured = {"val_accuracy": share(519, 594), "val_f1": about(0.8731390), "val_loss": about(0.4713940)}
    assert metrics_in(printed) == measured

    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images[1203:]).float() / 16, torch.tensor(digits[1203:])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model.load_state_dict(Checkpoint.load(folder / "runs" / "checkpoints")["modules"]["model"])
    with torch.no_grad():
        output = model(x)
    measured_again = (output.argmax(1) == y).double().mean().item()
    assert measured_again == pytest.approx(metrics_in(printed)["val_accuracy"]), "the whole set, each sample once"
    assert nn.functional.cross_entropy(output, y).item() == pytest.approx(metrics_in(printed)["val_loss"], rel=1e-6)


def check_handler(folder: Path) -> None:
    for name in ("handler.py", "test_handler.py"):
        shutil.copy(JOBS / name, folder)
    ended = finished("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", cwd=folder)
    assert ended.returncode == 0, ended.stdout
    assert "plateau_restart: 22 runs" in ended.stdout
    assert "2 passed" in ended.stdout


def check_ablation(folder: Path) -> None:
    printed = run("ablation", folder)
    assert "25 of 25 runs pending" in printed
    assert "Without ema, 5 seeds are too few to say in which direction val_accuracy changes" in printed
    recorded = {
        "": [437, 463, 448, 445, 464],
        "mixup": [447, 459, 454, 463, 479],
        "label_smoothing": [437, 460, 450, 445, 462],
        "ema": [442, 463, 449, 446, 461],
        "lr_scheduling": [453, 475, 484, 479, 477],
    }
    runs = [json.loads(line) for line in (folder / "runs" / "study.jsonl").read_text().splitlines()]
    found: Mapping[tuple[str, int], float] = {
        ("".join(one["off"]), one["seed"]): one["metrics"]["val_accuracy"] for one in runs
    }
    assert found == {(off, seed): share(n, 597) for off, counts in recorded.items() for seed, n in enumerate(counts)}
    assert is_picture(folder / "runs" / "study.png")
    assert (folder / "runs" / "study.html").exists()


def check_search(folder: Path) -> None:
    needs("search", "optuna")
    printed = run("search", folder)
    assert printed.startswith("7 pruned {")
    assert metrics_in(printed) == {"lr": about(0.004430375), "batch_size": 16}
    assert float(printed.split()[-1]) == share(548, 597)


def check_ported(folder: Path) -> None:
    assert metrics_in(run("ported", folder)) == {"loss": about(0.3020372), "acc": share(273, 300)}
    assert len(list((folder / "runs" / "best").iterdir())) == 3
    assert Checkpoint.hyperparameters(folder / "runs" / "best") == {"lr": 1e-3, "max_epochs": 12}


CHECKS: dict[str, Callable[[Path], None]] = {
    "tabular": check_tabular,
    "images": check_images,
    "language_model": check_language_model,
    "actor_critic": check_actor_critic,
    "fine_tuning": check_fine_tuning,
    "two_ranks": check_two_ranks,
    "handler": check_handler,
    "ablation": check_ablation,
    "search": check_search,
    "ported": check_ported,
}


@pytest.mark.slow
@pytest.mark.parametrize("job", CHECKS)
def test_a_job_ends_with_the_recorded_numbers(job: str, tmp_path: Path) -> None:
    CHECKS[job](tmp_path)


def test_each_job_is_as_short_as_the_short_forms_allow() -> None:
    counts = Counter[str]()
    for file in JOBS.glob("*.py"):
        counts[file.stem] = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(file.read_text())))
    assert set(counts) == set(STATEMENTS) == {*CHECKS, "test_handler"}
    assert {name: count for name, count in counts.items() if count > STATEMENTS[name]} == {}
    assert counts.total() <= MOST_IN_ALL
