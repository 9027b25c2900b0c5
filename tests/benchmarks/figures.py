"""The one file of figures that the README and the guide quote: what benchmarks have measured, with date, machine and commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).parent / "figures.json"


def record(name: str, values: dict[str, Any]) -> None:
    """Replace what a benchmark has measured before."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=FILE.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    machine = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
    }
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    found[name] = {"date": datetime.date.today().isoformat(), "commit": commit, "machine": machine, **values}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
