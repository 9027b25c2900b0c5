"""``python -m signalfire compare``: what is printed, the picture, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from signalfire.__main__ import main
from tests.engine.traces.test_comparison import planted, train


@pytest.mark.moderate
def test_equal_and_different_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = train(tmp_path / "a"), train(tmp_path / "b"), train(tmp_path / "c", plant=planted())
    assert main(["compare", str(a), str(b)]) == 0
    assert "equal: " in capsys.readouterr().out
    assert main(["compare", str(a), str(c), "--picture", str(tmp_path / "apart.png")]) == 1
    assert "first difference: iteration 5" in capsys.readouterr().out
    assert (tmp_path / "apart.png").exists()
    assert main(["compare", str(a), str(train(tmp_path / "d", until=9))]) == 1
    assert "b ends at iteration 9, a at 16" in capsys.readouterr().out


def test_what_is_no_trace_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("no trace\n")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "missing")]) == 2
    assert "is not a trace" in capsys.readouterr().err
