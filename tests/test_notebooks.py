"""Notebooks in a real kernel: the progress bar stores one line, and a cell may be interrupted and run again."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit import LIMIT, needs

needs("notebooks", "nbclient", "nbformat", "ipykernel")

import nbformat  # noqa: E402 (after the check that it is installed)
from nbclient import NotebookClient  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BUILD = """
import torch
from signalfire import Events
from signalfire.handlers import Average, Metrics, ProgressBar
from tests.kit import batches, build, digest, mlp
torch.set_num_threads(1)
data = batches(40)
def state(engine):  # NumPy's random state differs from kernel to kernel
    return digest({**engine.state_dict(), "random": torch.get_rng_state()})
"""


FOUND = {
    "first_model": (r"9\d\.\d% of the held-out digits are recognized", r"epoch \d+: accuracy 9\d\.\d%", r"image/png"),
    "writing_a_handler": (
        r"\[20, 40, 60, 80, 100, 120\]",
        r"- resumed after iterations 1, 2, .*, 10, the run equals an uninterrupted run",
        r"forgetful: a run that resumed after iteration 1 differs in iteration \d+: handlers\.forgetful"
        r".*\(uninterrupted .*; resumed ",
        r"the name is taken by <LossSpikes 'loss_spikes'>; .* detach the other one first: "
        r"engine\.detach\('loss_spikes'\)",
    ),
    "ablation": (
        r"14 of 21 runs pending|21 of 21 runs pending",
        r"^Without gradient_clipping, val_accuracy fell ",
        r"image/png",
    ),
}


def test_every_notebook_is_executed() -> None:
    assert {file.stem for file in (ROOT / "examples").glob("*.ipynb")} == set(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_a_notebook_of_the_examples_runs_and_each_cell_may_be_run_again(name: str) -> None:
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    once = executed(*sources)
    shown = "\n".join(_text(output) for outputs in once for output in outputs)
    for pattern in FOUND[name]:
        assert re.search(pattern, shown, re.MULTILINE), pattern
    assert not [output for outputs in once for output in outputs if output.get("name") == "stderr"]
    executed(*[source for source in sources for _ in range(2)])  # an error in a cell is one here


def _text(output: Any) -> str:
    """All that an output shows, and what kind of picture."""
    data = output.get("data", {})
    return "\n".join(
        [output.get("text", ""), data.get("text/plain", ""), html.unescape(data.get("text/html", "")), *data]
    )


def executed(*cells: str, again: tuple[int, ...] = (), allow_errors: bool = False) -> list[list[Any]]:
    """What each execution of a cell has left as its outputs; those in ``again`` are executed anew at the end."""
    made = [nbformat.v4.new_code_cell(one) for one in cells]
    notebook = nbformat.v4.new_notebook(cells=made)
    client = NotebookClient(
        notebook,
        timeout=LIMIT,
        startup_timeout=LIMIT,
        kernel_name="python3",
        allow_errors=allow_errors,
        coalesce_streams=True,  # a busy kernel sends a line and its end apart
    )
    outputs = []
    with client.setup_kernel(cwd=str(ROOT), env={**os.environ, "PYTHONPATH": str(ROOT)}):
        for place in (*range(len(cells)), *again):
            client.execute_cell(notebook.cells[place], place)
            outputs.append(list(notebook.cells[place].outputs))
    return outputs


def of_bar(outputs: list[Any]) -> list[Any]:
    """The outputs that a bar has left, and not an error or what was printed."""
    return [one for one in outputs if one.output_type == "display_data" or one.get("name") == "stderr"]


@pytest.mark.parametrize("arguments", ["style='rich'", "leave=True, interval=0.0"])
def test_a_run_stores_one_line_for_its_bar(arguments: str) -> None:
    run = f"engine = build(mlp(5, 8, 1), ProgressBar({arguments}), Metrics(train_loss=Average()))"
    _, outputs = executed(BUILD, f"{run}\nengine.run(data, max_epochs=3);")
    (output,) = outputs
    assert output.output_type == "display_data"
    line = output.data["text/plain"]
    assert "\r" not in str(output)
    assert line.count("\n") == 0
    assert line.startswith("epoch 3/3: 100%")
    assert "train_loss=" in line
    assert "<progress" not in output.data["text/html"], "what is stored is no bar that looks as if it moved"


INTERRUPTED = """
engine = build(mlp(5, 8, 1), ProgressBar(interval=0.0))
@engine.on(Events.ITERATION_COMPLETED(once=50))
def interrupt(engine):
    import os, signal, time
    if not interrupted:
        interrupted.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
"""


def test_a_cell_that_was_interrupted_and_is_run_again_ends_as_without() -> None:
    whole = f"{BUILD}\ninterrupted = [True]\n{INTERRUPTED}"
    *_, outputs, printed = executed(whole, "engine.run(data, max_epochs=3);", "print(state(engine))")
    assert len(of_bar(outputs)) == 1
    cells = (
        f"{BUILD}\ninterrupted = []\n{INTERRUPTED}",
        "engine.run(data, max_epochs=3);",
        "print(state(engine))",
    )
    _, first, _, second, ended = executed(*cells, again=(1, 2), allow_errors=True)
    assert [one.ename for one in first if one.output_type == "error"] == ["KeyboardInterrupt"]
    (warned,) = [one for one in second if one.get("name") == "stderr"]
    assert "interrupt was cut short by KeyboardInterrupt" in warned.text
    second.remove(warned)
    for outputs, start in ((first, "epoch 2/3:"), (second, "epoch 3/3: 100%")):
        (output,) = of_bar(outputs)
        assert output.data["text/plain"].startswith(start)
        assert "<progress" not in output.data["text/html"]
    assert ended == printed


def test_several_processes_a_class_defined_anew_and_spawned_workers_are_told_apart_in_a_notebook() -> None:
    define = "class Mine(Handler):\n    pass"
    cells = (
        f"{BUILD}\nfrom signalfire import Handler\nfrom signalfire.handlers import DistributedDataParallel",
        "engine = build(mlp(5, 8, 1), DistributedDataParallel())\nfor one in engine.check(): print(one)",
        define,
        "engine = build(mlp(5, 8, 1), Mine())",
        define,
        "engine.find(Mine)",
        "class Squares(torch.utils.data.Dataset):\n    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.full((5,), float(i)), torch.tensor([float(i)])",
        "loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context='spawn')",
        "build(mlp(5, 8, 1)).run(loader, max_epochs=1)",
    )
    outputs = executed(*cells, allow_errors=True)
    assert "'distributed_data_parallel' has no effect in a notebook" in _text(outputs[1][0])
    (missing,) = outputs[5]
    assert "'mine' is an instance of an earlier definition of Mine; attach" in missing.evalue
    (refused,) = outputs[8]
    assert refused.ename == "ValueError"
    assert "the data's dataset (Squares) was defined in an interactive session" in refused.evalue


def test_outside_of_a_notebook_ipython_is_not_imported() -> None:
    code = f"{BUILD}\nbuild(mlp(5, 8, 1), ProgressBar()).run(data, max_epochs=1)\nimport sys; print('IPython' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr
    assert ended.stderr.startswith("epoch 1/1  iteration 40")
