"""The one file of figures that the README and the guide quote: what benchmarks have printed, with date, machine and commit.

A benchmark that is run with ``--record`` puts its output there; `tests/test_figures.py` compares the pages with the file.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).parent / "figures.json"


class Copied(io.StringIO):
    """What is written to it goes to the terminal, too."""

    def write(self, text: str) -> int:
        assert sys.__stdout__ is not None
        sys.__stdout__.write(text)
        return super().write(text)

    def flush(self) -> None:
        assert sys.__stdout__ is not None
        sys.__stdout__.flush()


def run(main: Callable[[], dict[str, Any] | None]) -> None:
    """Run a benchmark; with ``--record``, its output and what it returns replace what was recorded before."""
    if "--record" not in sys.argv:
        main()
        return
    sys.argv.remove("--record")
    described = description()
    with redirect_stdout(Copied()) as output:
        values = main() or {}
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    printed = [line.rstrip() for line in output.getvalue().strip("\n").splitlines()]
    found[Path(sys.argv[0]).stem] = {**described, **values, "printed": printed}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def description() -> dict[str, Any]:
    """Date, commit and machine."""
    commit = ["git", "rev-parse", "--short", "HEAD"]
    machine = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return {
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(commit, cwd=FILE.parent, capture_output=True, text=True, check=True).stdout.strip(),
        "machine": machine,
    }
