"""``python -m signalfire bisect``: scripts and builds are made again, and what made the difference is printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from signalfire.__main__ import main

SCRIPT = """
import sys
from pathlib import Path

import torch
from torch import nn

from signalfire import Engine, Events, Update
from signalfire.handlers import EMA, Trace

NAME, CHANGED = "{name}", {changed}


def build():
    torch.manual_seed(0)
    engine = Engine(Update.supervised(nn.functional.mse_loss, torch.optim.SGD, lr=0.1), model=nn.Linear(2, 1), seed=0)
    engine.attach(EMA(0.9), Trace(NAME + ".jsonl", every="2it"))

    @engine.on(Events.BACKWARD_COMPLETED(once=5))
    def scale(engine):
        engine.model.weight.grad *= 1.01 if CHANGED else 1.0

    data = [(torch.ones(4, 2), torch.ones(4, 1))] * 3
    return engine, lambda engine: engine.run(data, max_epochs=3)


if __name__ == "__main__":
    evaluator = Engine(Update.supervised(nn.functional.mse_loss).evaluation(), model=nn.Linear(2, 1))
    evaluator.run([(torch.ones(4, 2), torch.ones(4, 1))])
    engine, run = build()
    run(engine)
    Path(NAME + ".done").touch()
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two scripts that have run in this folder, of which one changes a gradient."""
    monkeypatch.chdir(tmp_path)
    names = []
    for name, changed in (("first", False), ("second", True)):
        Path(f"{name}.py").write_text(SCRIPT.format(name=name, changed=changed))
        exec(compile(Path(f"{name}.py").read_text(), f"{name}.py", "exec"), {"__name__": "__main__"})
        Path(f"{name}.done").unlink()
        names.append(f"{name}.py")
    return names


@pytest.mark.moderate
def test_two_scripts_are_made_again(scripts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    files = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    assert main(["bisect", "first.jsonl", "second.jsonl", "--script", *scripts]) == 1
    printed = capsys.readouterr().out
    assert "first difference: iteration 6, LOSS_COMPUTED: the output" in printed
    assert "from the start; first difference: iteration 5, BACKWARD_COMPLETED: the gradients (model.weight)" in printed
    assert "caused by scale, which both runs call here" in printed
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == files


@pytest.mark.moderate
def test_a_difference_that_is_not_made_again_is_said(scripts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "first.jsonl", "second.jsonl", "--script", "first.py"]) == 2
    assert "the cause is outside the repeated code" in capsys.readouterr().out


def test_a_build_that_repeats_itself(scripts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "--build", "first.py:build", "--until", "4"]) == 0
    assert "the runs do not differ" in capsys.readouterr().out


WITH_ARGUMENTS = """
import argparse

import torch
from torch import nn

from rates import RATE
from signalfire import Engine, Update

parser = argparse.ArgumentParser()
parser.add_argument("--factor", type=float, default=1.0)
factor = parser.parse_args().factor
torch.manual_seed(0)
update = Update.supervised(nn.functional.mse_loss, torch.optim.SGD, lr=RATE * factor)
Engine(update, model=nn.Linear(2, 1), seed=0).run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=1)
"""


@pytest.mark.moderate
def test_scripts_have_their_arguments_and_the_modules_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a", 0.1), ("b", 0.2)):
        Path(name).mkdir()
        Path(name, "train.py").write_text(WITH_ARGUMENTS)
        Path(name, "rates.py").write_text(f"RATE = {rate}")
    assert main(["bisect", "--script", "a/train.py", "b/train.py"]) == 1
    assert "the optimizer's state or options (lr of group 0 (update 'main'))" in capsys.readouterr().out
    assert main(["bisect", "--script", "a/train.py --factor 2", "b/train.py"]) == 0
    assert "rates" not in sys.modules


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["first.jsonl", "--script", "first.py"], "takes either two traces or none, but got 1"),
        (["first.jsonl", "second.jsonl"], "needs --script train.py or --build train:build"),
        (["--script", "missing.py"], "run 'a': 'missing.py': FileNotFoundError"),
        (["--script", "empty.py"], "ends without a training"),
        (["--script", "done.py"], "ended before a training run, with exit status 0"),
        (["first.jsonl", "missing.jsonl", "--script", "first.py"], "missing.jsonl"),
        (["--build", "first.py:biuld"], "did you mean 'build'"),
    ],
)
def test_what_cannot_be_made_again_is_said_in_a_sentence(
    arguments: list[str], message: str, scripts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.py").write_text("x = 1")
    Path("done.py").write_text("import sys; sys.exit(0)")
    assert main(["bisect", *arguments]) == 2
    assert message in capsys.readouterr().err


SETTINGS = """
import torch
from torch import nn

from signalfire import Engine, Events, Update

torch.manual_seed(0)
{before}
model = nn.Linear(2, 1)
engine = Engine(Update.supervised(nn.functional.mse_loss, torch.optim.SGD, lr=0.1), model=model, seed=0)


@engine.on(Events.BACKWARD_COMPLETED(once=2))
def late(engine):
    {at_two}


{around}
    engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=1)
"""
USUAL = {"before": "", "at_two": "pass", "around": "if True:"}


def scripts_with(folder: Path, changed: dict[str, str]) -> list[str]:
    """A script, and another one that is the same but for one place."""
    for name, values in (("a", USUAL), ("b", USUAL | changed)):
        (folder / f"{name}.py").write_text(SETTINGS.format(**values))
    return [str(folder / "a.py"), str(folder / "b.py")]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ({"around": "with torch.autocast('cpu', dtype=torch.bfloat16):"}, 1, "caused between FORWARD_STARTED and"),
        ({"before": "torch.set_default_dtype(torch.float64)"}, 1, "the runs differ from the start"),
        (
            {"at_two": "engine.model.weight.grad *= 2; engine.stop = 1 / 0"},
            2,
            "b.py:15: ZeroDivisionError: division by",
        ),
        ({"at_two": "import os; os._exit(3)"}, 2, "run 'b': '{b}': the process ended with exit status 3"),
        ({"before": "1 / 0"}, 2, "run 'b': '{b}': {b}:8: ZeroDivisionError: division by zero"),
        ({"before": "import nothing_of_this_name"}, 2, "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ],
)
def test_a_script_is_looked_at_where_it_trains_in_a_process_of_its_own(
    changed: dict[str, str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = scripts_with(tmp_path, changed)
    default = torch.get_default_dtype()
    for first, second in ((a, b), (b, a)):
        assert main(["bisect", "--script", first, second]) == code
        shown = capsys.readouterr()
        named = message if first == a else message.replace("run 'b'", "run 'a'")
        assert named.format(b=b) in (shown.out if code == 1 else shown.err)
    assert torch.get_default_dtype() is default


@pytest.mark.moderate
def test_a_run_that_fails_later_does_not_hide_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = scripts_with(tmp_path, {"before": "torch.rand(1)", "at_two": "1 / 0"})
    assert main(["bisect", "--script", a, b]) == 1
    assert "the runs differ from the start" in capsys.readouterr().out
