"""The README is true: its examples run as they stand and print what it shows, and its pictures and commands exist."""

from __future__ import annotations

import codeop
import re
from pathlib import Path

import pytest

from tests.processes import run_program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_first_example_has_29_lines_of_88_columns_at_most() -> None:
    assert len(PYTHON[0].splitlines()) == 29
    assert max(map(len, "".join(PYTHON).splitlines())) <= 88


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_an_example_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    # Later examples continue the first one.
    code = PYTHON[number] if number == 0 else PYTHON[0] + "\n" + PYTHON[number]
    script = tmp_path / "example.py"
    script.write_text("import torch\ntorch.set_num_threads(1)\n" + code + "\nprint(trainer)\n")
    result = run_program(script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "FindingWarning" not in result.stderr, result.stderr
    shown = re.search(r"^This prints\n+```\n(.*?)^```.*?^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert shown is not None
    if number == 0:
        expected, real = (
            re.findall(r"^epoch (\d+): ([\d.]+)% of the validation digits$", text, re.M)
            for text in (shown[1], result.stdout)
        )
        assert [epoch for epoch, _ in expected] == [epoch for epoch, _ in real] == ["2", "4", "6", "8", "10"]
        # Processors round differently, so that the last digits may differ.
        assert [float(share) for _, share in expected] == pytest.approx([float(share) for _, share in real], abs=4)
        assert shown[2] in result.stdout, "the listing of print(trainer) is another"


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_an_example_can_be_pasted_into_a_python_prompt(number: int) -> None:
    compile_command = codeop.CommandCompiler()
    statement: list[str] = []
    for line in [*PYTHON[number].splitlines(), ""]:
        statement.append(line)
        if compile_command("\n".join(statement)) is not None:
            statement = []
    assert statement == []


def test_the_two_commands_are_there_for_the_continuous_integration_to_run() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv .venv && ")]
    assert len(commands) == 2
    assert commands[0].endswith("examples/main.py")
    assert commands[1].endswith("-m pytest")


def test_what_the_readme_points_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
