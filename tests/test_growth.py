"""The benchmark of growth runs, and gives every curve as numbers and in a picture. No time that it takes is judged here."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parent / "benchmarks" / "growth.py"
CURVES = ["handlers", "events", "norms", "clipping", "ema", "fused", "resume", "shuffling", "checkpoint", "boundary"]


@pytest.mark.slow
def test_every_curve_is_measured_written_and_drawn(tmp_path: Path) -> None:
    scratch, numbers, picture = tmp_path / "scratch", tmp_path / "growth.json", tmp_path / "growth.png"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, COMMAND, "--rounds", "1", "--sizes", "2", "--json", numbers, "--plot", picture],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    curves = json.loads(numbers.read_text())["curves"]
    assert list(curves) == CURVES
    for name, curve in curves.items():
        assert f"\n{name}: " in done.stdout
        assert len(curve["sizes"]) == 2
        assert curve["sizes"] == sorted(curve["sizes"])
        assert len(curve["lines"]) >= 2
        for line, sizes in curve["lines"].items():
            assert line in done.stdout
            assert [len(rounds) for rounds in sizes] == [1, 1]
            assert all(0 < cost < math.inf for rounds in sizes for cost in rounds), (name, line, sizes)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(scratch.iterdir()), "what the curves wrote is still there"


def test_a_curve_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(COMMAND.parent))
    monkeypatch.setattr(sys, "argv", ["growth.py", "--curves", "handlers,nonsense"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("growth").main()
    said = capsys.readouterr().err
    assert "nonsense" in said
    assert all(name in said for name in CURVES)
