"""The package: what is installed is what is here, every example in a docstring runs, and nobody's `engine` is shadowed."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import signalfire
import signalfire.ablation
import signalfire.handlers

ROOT = Path(__file__).parent.parent

# What several handlers share; each of them may import it.
SHARED = (
    "averages",
    "batches",
    "distribution",
    "folders",
    "generations",
    "mixing",
    "parameters",
    "ranks",
    "scalars",
    "schedules",
    "text_logs",
    "torch_schedulers",
    "updates",
)


def modules() -> list[str]:
    found = ["signalfire", "signalfire.handlers", "signalfire.ablation"]
    for package in (signalfire, signalfire.handlers, signalfire.ablation):
        found += [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    return sorted(set(found))


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_every_public_class_and_handler_has_an_example_or_is_simple() -> None:
    missing = []
    for name in signalfire.handlers.__all__:
        public = getattr(signalfire.handlers, name)
        if ">>>" not in (public.__doc__ or "") and name != "Metric":
            missing.append(name)
    assert missing == []


def test_the_wheel_holds_exactly_the_package(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {f"signalfire/{file.name}" for file in (ROOT / "engine").iterdir() if file.suffix == ".py"}
    expected |= {f"signalfire/handlers/{file.name}" for file in (ROOT / "handlers").iterdir() if file.suffix == ".py"}
    expected |= {
        f"signalfire/ablation/{file.name}" for file in (ROOT / "engine" / "ablation").iterdir() if file.suffix == ".py"
    }
    assert inside == expected | {"signalfire/py.typed"}


@pytest.mark.parametrize("folder", ["engine", "handlers"])
def test_the_folders_refuse_to_be_imported_as_packages_of_their_own(folder: str) -> None:
    result = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "installed as 'signalfire" in result.stderr


def test_no_handler_names_another_and_the_engine_names_none() -> None:
    handlers = {file.stem for file in (ROOT / "handlers").glob("*.py")} - {"__init__", *SHARED}
    for file in (ROOT / "handlers").glob("*.py"):
        if file.stem != "__init__":
            text = file.read_text()
            assert not [
                other for other in handlers if f"from .{other}" in text or f"signalfire.handlers.{other}" in text
            ], file
    for file in (ROOT / "engine").glob("*.py"):
        assert "signalfire.handlers" not in file.read_text().replace("installed as 'signalfire.handlers'", ""), file
