"""Type checkers and editors find the package and its types in a project beside it, whichever way it was installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from functools import partial
from pathlib import Path

import pytest

from signalfire.__main__ import main
from tests.kit import needs

ROOT = Path(__file__).parent.parent
# mypy follows the imports of this package and of torch alone. The clients of other services that may be installed here are three
# times as much code.
OWN_TYPES = "[mypy]\nfollow_imports = skip\n[mypy-signalfire.*,torch.*]\nfollow_imports = normal\n"
WRONG = """from signalfire.handlers import EMA

EMA(decay='much')
reveal_type(EMA(0.9).count)
from signalfire.handlers import Emma
"""


@pytest.fixture(scope="module", params=[[], ["-e"]], ids=["plain", "editable"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A project that `python -m signalfire new` wrote, and the Python of an environment with the package."""
    folder = tmp_path_factory.mktemp("editors")
    source = folder / "source"  # building leaves files
    for name in ("engine", "handlers", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name)
        else:
            shutil.copy(ROOT / name, source / name)
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "tests.pth").write_text("\n".join(others))  # torch, mypy
    python = folder / "venv" / "bin" / "python"
    options: list[str] = [
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--ignore-installed",
    ]
    command = [str(python), "-m", "pip", "install", *options, *map(str, request.param), str(source)]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert installed.returncode == 0, installed.stderr
    where = subprocess.run(
        [python, "-c", "import signalfire; print(signalfire.__file__)"], capture_output=True, text=True
    )
    assert str(folder) in where.stdout, "the package of the environment that runs this test was imported"
    assert main(["new", str(folder / "mine")]) == 0
    return folder / "mine", python


@pytest.mark.slow
def test_mypy_finds_the_types(project: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, python = project
    wrong = folder.parent / "wrong.py"
    wrong.write_text(WRONG)
    configuration = folder.parent / "mypy.ini"
    configuration.write_text(OWN_TYPES)
    cache = tmp_path_factory.getbasetemp() / "mypy"  # of torch
    options = ["--strict", "--config-file", str(configuration), "--cache-dir", str(cache)]
    check = [str(python), "-m", "mypy", *options, ".", str(wrong)]
    found = subprocess.run(check, cwd=folder, capture_output=True, text=True, timeout=500).stdout
    assert 'wrong.py:3: error: Argument "decay" to "EMA" has incompatible type "str"' in found
    assert 'wrong.py:4: note: Revealed type is "int"' in found
    assert 'wrong.py:5: error: Module "signalfire.handlers" has no attribute "Emma"' in found
    assert "Found 2 errors in 1 file (checked 5 source files)" in found


@pytest.mark.slow
def test_pyright_finds_the_types(project: tuple[Path, Path]) -> None:
    needs("editors", "pyright")
    folder, python = project
    (folder.parent / "wrong.py").write_text(WRONG)
    check = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python]
    run = partial(subprocess.run, cwd=folder, capture_output=True, text=True, timeout=300)
    checked = run([*check, "."])
    if not checked.stdout.startswith("{"):  # it fetches its program when it first runs
        pytest.skip(f"pyright does not start here: {checked.stderr.strip()[-200:]}")
    assert json.loads(checked.stdout)["generalDiagnostics"] == []
    found = [
        (one["severity"], one["message"])
        for one in json.loads(run([*check, "../wrong.py"]).stdout)["generalDiagnostics"]
    ]
    assert [severity for severity, _ in found] == ["error", "information", "error"]
    assert 'parameter "decay" of type "float"' in found[0][1]
    assert found[1][1] == 'Type of "EMA(0.9).count" is "int"'
    assert found[2][1] == '"Emma" is unknown import symbol'
