"""Warnings name the user's line."""

from __future__ import annotations

import warnings
from pathlib import Path

from tests.kit import batches, build, linear


def test_a_warning_names_the_line_of_the_user_however_deep_it_comes_from(tmp_path: Path) -> None:
    engine = build(linear(5, 1))
    engine.run(batches(2), max_epochs=1)
    script = tmp_path / "script.py"
    script.write_text("\n\nengine.run(data, max_epochs=1)\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(
            compile(script.read_text(), str(script), "exec"), {"engine": engine, "data": batches(2), "__name__": "user"}
        )
    (warning,) = caught
    assert "nothing to do" in str(warning.message)
    assert (warning.filename, warning.lineno) == (str(script), 3)
