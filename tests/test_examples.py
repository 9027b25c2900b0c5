"""Every example runs, and the main one reaches what it promises."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from signalfire.handlers import Checkpoint
from tests.kit import LIMIT, needs
from tests.neutral.exercises import NOTEBOOKS
from tests.neutral.exercises import run as run_notebook
from tests.processes import run_program

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str, folder: Path) -> str:
    """What an example prints. Its process is forked from this one, which imports once what most examples import."""
    for module in ("matplotlib.backends.backend_agg", "mnist1d.data", "signalfire.ablation", "sklearn.datasets"):
        importlib.import_module(module)
    result = run_program(EXAMPLES / script, *arguments, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "FindingWarning" not in result.stderr, result.stderr
    return result.stdout


def check_main(folder: Path) -> None:
    output = run("main.py", "--steps", "1500", folder=folder)  # a quarter of the paper's steps
    row = re.search(r"^cnn +94 +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert row is not None, output
    assert float(row[1]) >= 88
    left = folder / "runs" / "mnist1d-cnn"
    (best,) = left.glob("best-*")
    assert Checkpoint.load(best)["engine"]["metrics"]["values"]["val_accuracy"] == pytest.approx(
        float(row[2]) / 100, abs=5e-4
    )
    events = EventAccumulator(str(left))
    events.Reload()
    assert [event.step for event in events.Scalars("val/accuracy")] == list(range(1000, 6001, 1000))
    assert (left / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def is_picture(path: Path) -> bool:
    content = path.read_bytes()
    return content.startswith(b"\x89PNG") and len(content) > 10_000


def check_gan(folder: Path) -> None:
    output = run("gan.py", "--steps", "800", folder=folder)  # less than half of the steps
    real, drawn = (float(share) for share in re.findall(r"(?:real|drawn) ([\d.]+) %", output))
    real_spread, spread = (float(number) for number in re.findall(r"(?:real|drawn) (0\.\d+)", output)[-2:])
    assert real > 97
    assert drawn >= 95
    assert spread >= 0.27 > real_spread / 2, "digits that are all alike would be recognized, too"
    assert is_picture(folder / "runs" / "gan" / "samples.png")
    assert is_picture(folder / "runs" / "gan" / "recognized.png")


def check_character_gru(folder: Path) -> None:
    output = run("character_gru.py", "--steps", "300", folder=folder)  # half of the steps
    found = re.search(r"held-out text: ([\d.]+) bits per character", output)
    assert found is not None, output
    assert float(found[1]) <= 2.4
    assert is_picture(folder / "runs" / "character-gru" / "learning_curve.png")


def check_fine_tuning(folder: Path) -> None:
    output = run("fine_tuning.py", folder=folder)
    reached = {
        way: float(last) for way, last in re.findall(r"^([^\d\n]+?) {2,}([\d.]+) +[\d.]+$", output, re.MULTILINE)
    }
    assert reached["gradual unfreezing, rates by layer"] > reached["from scratch"] + 10
    assert reached["all layers fine-tuned at once"] > reached["from scratch"] + 10
    assert is_picture(folder / "runs" / "fine_tuning" / "fine_tuning.png")


def check_lbfgs(folder: Path) -> None:
    output = run("lbfgs.py", folder=folder)
    rows = re.findall(r"^(\S+) +(\d+) +(\d+) +([\d.e-]+) +([\d.e-]+)", output, re.MULTILINE)
    above = {name: float(excess) for name, _, _, excess, _ in rows}
    assert above["L-BFGS"] < 1e-7 < 1e-6 < min(above["SGD"], above["Adam"])
    assert is_picture(folder / "runs" / "lbfgs" / "convergence.png")


def check_distributed(folder: Path) -> None:
    output = run("distributed.py", "--epochs", "4", folder=folder)  # as one process; as two in test_torchrun.py
    found = re.fullmatch(r"1 process\(es\), 88 steps: accuracy ([\d.]+) %, loss [\d.]+, weights [0-9a-f]{12}\n", output)
    assert found is not None, output
    assert float(found[1]) >= 90
    left = folder / "runs" / "distributed" / "1"
    assert Checkpoint.load(left)["engine"]["iteration"] == 80
    assert (left / "log.csv").exists()


def check_ablation(folder: Path) -> None:
    output = run("ablation.py", "--seeds", "2", "--epochs", "2", folder=folder)
    assert "12 of 12 runs pending" in output
    for handler in ("gradient_clipping", "lr_scheduling", "ema", "mixup", "label_smoothing"):
        assert re.search(
            rf"^Without {handler}, 2 seeds are too few to say in which direction val_accuracy changes",
            output,
            re.MULTILINE,
        ), output
    assert is_picture(folder / "runs" / "ablation" / "ablation.png")


def check_distillation(folder: Path) -> None:
    output = run("distillation.py", "--seeds", "2", "--epochs", "2", "--teacher-epochs", "4", folder=folder)
    found = re.match(r"teacher: accuracy ([\d.]+) %\n", output)
    assert found is not None, output
    assert float(found[1]) > 20, "it has learned something"
    assert "4 of 4 runs pending" in output
    assert re.search(
        r"^Without distillation, 2 seeds are too few to say in which direction val_accuracy changes",
        output,
        re.MULTILINE,
    ), output
    assert is_picture(folder / "runs" / "distillation" / "distillation.png")


def check_tabular_tasks(folder: Path) -> None:
    output = run("tabular_tasks.py", "--seeds", "2", "--epochs", "10", folder=folder)
    assert "2 variants x 3 tasks x 2 seeds: 12 of 12 runs pending" in output
    (mean,) = re.findall(r"^baseline +([\d.]+) \[", output, re.MULTILINE)
    assert float(mean) > 0.5, "it has learned something in all tasks"
    assert re.search(
        r"^With sharpness_aware_minimization, 2 seeds are too few to say in which direction score changes",
        output,
        re.MULTILINE,
    ), output
    for task in ("digits", "wine", "cancer"):
        assert re.search(rf"^{task}: \+ sharpness_aware_minimization +2/2 .* undecided$", output, re.MULTILINE), output
    assert is_picture(folder / "runs" / "tabular_tasks" / "profiles.png")
    assert is_picture(folder / "runs" / "tabular_tasks" / "aggregates.png")


def check_factorial(folder: Path) -> None:
    output = run("factorial.py", "--seeds", "2", "--epochs", "5", folder=folder)
    assert "4 variants x 2 seeds: 8 of 8 runs pending" in output
    for effect in ("label_smoothing", "mixup", "label_smoothing x mixup"):
        assert re.search(rf"^{effect} +2/2 ", output, re.MULTILINE), output
    assert "2 seeds are too few to say in which direction val_accuracy changes" in output
    assert is_picture(folder / "runs" / "factorial" / "factorial.png")


def check_planned_looks(folder: Path) -> None:
    output = run("planned_looks.py", "--steps", "5", "--looks", "7", "8", folder=folder)
    assert "looks at 7, 8 seeds: a variant gets no further runs once it is found to differ" in output
    found = re.search(r"^(\d+) of 32 runs were made$", output, re.MULTILINE)
    assert found is not None, output
    assert 28 <= int(found[1]) <= 32
    for handler in ("gradient_accumulation", "gradient_clipping", "lr_scheduling"):
        assert re.search(rf"^Without {handler}, val_accuracy ", output, re.MULTILINE), output
    assert is_picture(folder / "runs" / "planned_looks" / "planned_looks.png")


def check_finders(folder: Path) -> None:
    output = run("finders.py", "--rates", "0.1", "1", folder=folder)
    assert re.match(r"learning rates from 1e-05, \d+ steps, ended at 1: suggestion [\d.]+\n", output), output
    assert len(re.findall(r"^ +(\d+)  yes ", output, re.MULTILINE)) == 6, output
    slow, suggested = map(float, re.findall(r"1000 steps: accuracy ([\d.]+) %", output))
    assert suggested >= 85
    assert suggested > slow
    assert is_picture(folder / "learning_rate.png")


def check_configured(folder: Path) -> None:
    output = run("configured.py", "--hidden", "32", "--epochs", "3", folder=folder)
    found = re.search(r"accuracy ([\d.]+)% with (.*)", output)
    assert found is not None, output
    assert float(found[1]) >= 85
    stored = Checkpoint.hyperparameters(folder / "runs" / "configured")
    assert (stored["hidden"], stored["epochs"], stored["folder"]) == ([32], 3, "runs/configured")
    output = run("configured.py", "--continue-from", "runs/configured", "--folder", "runs/again", folder=folder)
    assert Checkpoint.hyperparameters(folder / "runs" / "again") == stored | {"folder": "runs/again"}


def check_hydra(folder: Path) -> None:
    needs("neutral", "hydra", "omegaconf")
    output = run("hydra_config.py", "optimizer.lr=0.1", "epochs=3", "hidden=[48]", folder=folder)
    found = re.search(r"accuracy ([\d.]+)%, max_lr 0.1, hidden \[48\]", output)
    assert found is not None, output
    assert float(found[1]) >= 85
    (left,) = folder.glob("outputs/*/*/checkpoints")
    assert Checkpoint.hyperparameters(left)["optimizer"]["momentum"] == 0.9


def check_sklearn(folder: Path) -> None:
    output = run("sklearn_estimator.py", folder=folder)
    found = re.search(
        r"accuracy ([\d.]+)% on 450 held-out digits\n(\d+) of (\d+) of scikit-learn's checks pass", output
    )
    assert found is not None, output
    assert float(found[1]) >= 96
    assert int(found[2]) >= int(found[3]) - 1, "one is skipped: it needs an environment variable"


def check_text_classification(folder: Path) -> None:
    needs("neutral", "transformers")
    output = run("text_classification.py", "--epochs", "4", folder=folder)  # half of the epochs
    found = re.search(r"^848 passages of 5 topics: accuracy ([\d.]+)% on 212 others$", output, re.MULTILINE)
    assert found is not None, output
    assert float(found[1]) >= 65


def check_graphs(folder: Path) -> None:
    needs("neutral", "torch_geometric")
    output = run("graphs.py", "--epochs", "20", folder=folder)
    found = re.search(r"^600 graphs: accuracy ([\d.]+)% on 200 others$", output, re.MULTILINE)
    assert found is not None, output
    assert float(found[1]) >= 95


CHECKS: dict[str, Callable[[Path], None]] = {
    "main.py": check_main,
    "gan.py": check_gan,
    "character_gru.py": check_character_gru,
    "fine_tuning.py": check_fine_tuning,
    "lbfgs.py": check_lbfgs,
    "distributed.py": check_distributed,
    "ablation.py": check_ablation,
    "distillation.py": check_distillation,
    "tabular_tasks.py": check_tabular_tasks,
    "factorial.py": check_factorial,
    "planned_looks.py": check_planned_looks,
    "finders.py": check_finders,
    "configured.py": check_configured,
    "hydra_config.py": check_hydra,
    "sklearn_estimator.py": check_sklearn,
    "text_classification.py": check_text_classification,
    "graphs.py": check_graphs,
}


@pytest.mark.slow
@pytest.mark.parametrize("script", CHECKS)
def test_an_example_runs_and_reaches_what_it_promises(script: str, tmp_path: Path) -> None:
    CHECKS[script](tmp_path)


def test_the_main_example_says_what_it_does_before_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('this is the import of torch')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(EXAMPLES / "main.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=LIMIT)
    first, _, rest = result.stderr.partition("\n")
    assert first == "Importing PyTorch and making the data; training begins in a few seconds."
    assert rest == "this is the import of torch\n"


@pytest.mark.slow
def test_the_main_example_shows_progress_within_ten_seconds_of_work(tmp_path: Path) -> None:
    """Seconds of the processor, since other processes may keep this one waiting."""
    command = [sys.executable, str(EXAMPLES / "main.py")]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        seconds = {}
        for line in process.stderr:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            seconds[line] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            if "iteration" in line:
                break
        process.kill()
    first, begins, *_, progress = seconds
    assert first.startswith("Importing PyTorch")
    assert seconds[first] < 1
    assert begins == "Training cnn on 4,000 digits, 6,000 steps of 100.\n"
    assert "train_loss" in progress
    assert seconds[begins] < 10
    assert seconds[progress] < 20, (
        "the bar prints into a pipe every two epochs, but not before five seconds have passed"
    )


def test_every_example_is_checked() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == {
        *CHECKS,
        "ray_train.py",
        "ray_tune.py",
    }  # those of Ray: test_launchers.py


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
@pytest.mark.filterwarnings("error::signalfire.findings.FindingWarning")
def test_an_exercise_of_the_book_ends_with_its_numbers(notebook: Path) -> None:
    assert len(NOTEBOOKS) == 10
    assert run_notebook(notebook) is None


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.rglob("*.ipynb")), ids=lambda file: file.stem)
def test_notebooks_are_stored_without_outputs(notebook: Path) -> None:
    content = json.loads(notebook.read_text())
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile("".join(cell["source"]), notebook.name, "exec")
    assert set(content["metadata"]) == {"kernelspec", "language_info"}, "nothing of the machine it was written on"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["logistic", "mlp", "gru"])
def test_the_main_example_trains_every_model_and_does_without_handlers(model: str, tmp_path: Path) -> None:
    without = "gradient_accumulation,gradient_clipping,best,early_stopping,progress_bar"
    output = run("main.py", "--model", model, "--steps", "100", "--without", without, folder=tmp_path)
    assert "100 optimizer steps" in output
    assert not list(tmp_path.glob("runs/*/*/state.pt"))
    assert list(tmp_path.glob("runs/*/events*"))


@pytest.mark.slow
def test_the_main_example_lists_its_wiring_without_what_is_off(tmp_path: Path) -> None:
    wiring = run("main.py", "--list", "--without", "gradient_clipping", folder=tmp_path)
    assert "GET_BATCH_COMPLETED\n  PREPARE   device_transfer.move_batch" in wiring
    assert "gradient_clipping.clip" not in wiring
    assert "disabled: gradient_clipping" in wiring
    assert not (tmp_path / "runs").exists(), "listing writes nothing"


@pytest.mark.slow
def test_the_main_example_names_the_handlers_there_are_if_one_is_misspelt(tmp_path: Path) -> None:
    result = run_program(EXAMPLES / "main.py", "--without", "clipping", cwd=tmp_path)
    assert result.returncode == 2
    assert "gradient_clipping" in result.stderr
