"""The package: what is installed is what is here, every example in a docstring runs, and nobody's `engine` is shadowed."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import signalfire
import signalfire.handlers
from tests import kit
from tests.processes import run_program

ROOT = Path(__file__).parent.parent


def modules() -> list[str]:
    found = pkgutil.walk_packages([*signalfire.__path__], "signalfire.")
    handlers = pkgutil.walk_packages([*signalfire.handlers.__path__], "signalfire.handlers.")
    return sorted({"signalfire", "signalfire.handlers", *(one.name for one in [*found, *handlers])})


# Modules for users of another library, which import it and are imported by none of ours.
OF_OTHERS = {"signalfire.exact.huggingface": "transformers", "signalfire.exact.lightning": "lightning"}


# Those of loggers with clients are run as the guide shows them, in processes of their own.
@pytest.mark.parametrize("name", [name for name in modules() if name not in kit.CLIENTS])
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    if name in OF_OTHERS:
        kit.needs("migration", OF_OTHERS[name])
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


@pytest.mark.slow
def test_nothing_imports_what_only_users_of_another_library_need() -> None:
    program = (
        "import sys, signalfire.exact\nfrom signalfire.handlers import *\n"
        f"print({set(OF_OTHERS.values())} & sys.modules.keys())"
    )
    result = kit.finished("-c", program)
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.parametrize("package", ["", ".ablation", ".exact", ".handlers", ".testing", ".tuning", ".weights"])
def test_no_public_name_is_a_module_however_often_it_is_asked_for(package: str) -> None:
    module = importlib.import_module(f"signalfire{package}")
    for name in module.__all__:
        getattr(module, name)  # a name that is looked up late may be hidden by the module that was imported for it
        assert not inspect.ismodule(getattr(module, name)), name


# Runs in a process that is forked from this one, where torch is there already.
ADDED = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("signalfire", "tensorboardX")]:
    del sys.modules[name]
import signalfire
before = set(sys.modules)
from signalfire.handlers import EarlyStopping
print(*sorted(set(sys.modules) - before))
"""


def test_a_handler_is_imported_without_the_others(tmp_path: Path) -> None:
    (tmp_path / "added.py").write_text(ADDED)
    ended = run_program("added.py", cwd=tmp_path)
    added = ended.stdout.split()
    assert "signalfire.handlers.early_stopping" in added, ended.stderr
    assert len(added) <= 10, added


@pytest.mark.parametrize("package", ["signalfire.ablation", "signalfire.handlers"])
def test_what_is_imported_on_first_use_is_what_type_checkers_see(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(package)
    body = ast.parse(inspect.getsource(module)).body
    (shown,) = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [(node.module, alias.name) for node in ast.walk(shown) if isinstance(node, ast.ImportFrom)
               for alias in node.names]  # fmt: skip
    assert {name for _, name in imports} <= set(module.__all__)
    for source, name in imports:
        monkeypatch.delitem(vars(module), name, raising=False)  # it may have been used before
        assert getattr(module, name) is getattr(importlib.import_module(f"{package}.{source}"), name), name


def test_the_handlers_list_what_an_import_of_all_of_them_would_bind() -> None:
    files = {file.stem for file in (ROOT / "handlers").glob("[!_]*.py")}
    assert set(vars(signalfire.handlers)["_MODULES"]) == set(signalfire.handlers.__all__)
    assert files & set(signalfire.handlers.__all__) == set(), "a module would hide what has its name"
    assert {name for name in dir(signalfire.handlers) if not name.startswith("__")} == {
        "_common", *files, *signalfire.handlers.__all__
    }  # fmt: skip
    assert all(inspect.ismodule(getattr(signalfire.handlers, name)) for name in ("_common", *files))


def test_an_unknown_handler_is_an_error_that_names_the_nearest_one() -> None:
    for unknown, meant in {"EarlyStoping": "EarlyStopping", "Ema": "EMA", "Summery": "Summary"}.items():
        assert not hasattr(signalfire.handlers, unknown)
        with pytest.raises(AttributeError, match=f"has no attribute '{unknown}'; did you mean '{meant}'"):
            getattr(signalfire.handlers, unknown)
    with pytest.raises(ImportError, match="cannot import name 'EarlyStoping' from"):
        exec("from signalfire.handlers import EarlyStoping")


def test_every_public_class_and_handler_has_an_example_or_is_simple() -> None:
    missing = []
    for name in signalfire.handlers.__all__:
        public = getattr(signalfire.handlers, name)
        if ">>>" not in (public.__doc__ or "") and name != "Metric":
            missing.append(name)
    assert missing == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from a source distribution, as a registry gives it to those who have no clone."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"  # building leaves files, of which a later wheel would have the old ones
    for name in ("engine", "handlers", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "files"))
    for file in [one for one in ROOT.iterdir() if one.is_file() and not one.name.startswith(".")]:
        shutil.copy(file, source)
    built = kit.finished(
        "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})", cwd=source
    )
    assert built.returncode == 0, built.stderr
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    assert {one.name for one in unpacked.iterdir()} == {
        *("engine", "handlers", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"),
        *("CITATION.cff", "constraints.txt", "PKG-INFO", "signalfire.egg-info"),
    }
    options = ["-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", folder]
    built = kit.finished("-m", "pip", "wheel", *options, ".", cwd=unpacked)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_of_a_source_distribution_holds_exactly_the_package(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, package in (("engine", "signalfire"), ("handlers", "signalfire/handlers"))
        for file in (ROOT / folder).rglob("*.py")
    }
    project = {f"signalfire/commands/project/{name}" for name in ("README.md", "pyproject.toml")}
    assert inside == expected | project | {"signalfire/py.typed"}


@pytest.mark.slow
def test_what_a_registry_shows_has_no_picture_that_is_not_there(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        shown = message_from_string(files.read(name).decode())
    assert shown["Description-Content-Type"] == "text/markdown"
    assert shown["License-Expression"] == "MIT" or "MIT" in shown["License"]
    text = shown.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# Signalfire")
    assert [place for place in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text) if not place.startswith("https://")] == []


@pytest.mark.slow
def test_without_the_clone_the_package_trains_and_writes_a_project_that_trains(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    # Torch and what else it needs: the path of a folder alone makes nothing of what is installed there editably.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*arguments: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run([python, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(packages) in run("-c", "import signalfire; print(signalfire.__file__)")
    assert "Next: python -m signalfire new my_project" in run("-m", "signalfire")
    run("-m", "signalfire", "new", "mine")
    run("train.py", cwd=tmp_path / "mine")
    assert list((tmp_path / "mine").rglob("*best*"))


@pytest.mark.parametrize("folder", ["engine", "handlers"])
def test_the_folders_refuse_to_be_imported_as_packages_of_their_own(folder: str) -> None:
    result = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "installed as 'signalfire" in result.stderr


@pytest.mark.moderate
def test_no_handler_names_another_and_the_engine_names_none() -> None:
    handlers = {file.stem for file in (ROOT / "handlers").glob("*.py")} - {"__init__", "schedules"}
    for file in (ROOT / "handlers").rglob("*.py"):
        if file.stem != "__init__":
            text = file.read_text()
            assert not [
                other for other in handlers if re.search(rf"(from \.\.?|signalfire\.handlers\.){other}\b", text)
            ], file
    for file in (ROOT / "engine").rglob("*.py"):
        if ROOT / "engine" / "commands" in file.parents:
            continue  # they only use the engine and the handlers, as a script does
        assert not re.search(r"^(from|import) signalfire\.handlers", file.read_text(), re.MULTILINE), file
