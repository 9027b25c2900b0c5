"""The README tells the truth: its example runs as it stands, and its pictures and commands are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_first_example_has_25_lines() -> None:
    assert len(PYTHON[0].splitlines()) == 25


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_an_example_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    # Later examples go on from the first one.
    code = PYTHON[number] if number == 0 else PYTHON[0] + "\n" + PYTHON[number]
    script = tmp_path / "example.py"
    script.write_text("import torch\ntorch.set_num_threads(1)\n" + code)
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stderr
    shown = re.search(r"^prints\n+```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert shown is not None
    if number == 0:  # other processors round otherwise: the figures are compared, not their last digits
        reported, real = (
            re.findall(r"^epoch (\d+): ([\d.]+)% of the test digits$", text, re.M) for text in (shown[1], result.stdout)
        )
        assert [epoch for epoch, _ in reported] == [epoch for epoch, _ in real] == ["2", "4", "6", "8", "10"]
        assert [float(share) for _, share in reported] == pytest.approx([float(share) for _, share in real], abs=4)


def test_the_two_commands_are_there_for_the_continuous_integration_to_run() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3.11 -m venv .venv && ")]
    assert len(commands) == 2
    assert commands[0].endswith("examples/main.py")
    assert commands[1].endswith("-m pytest")


def test_what_the_readme_points_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
