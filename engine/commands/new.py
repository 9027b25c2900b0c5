"""A small new project: a script, a handler with its test, a study."""

from __future__ import annotations

import keyword
import re
from importlib.metadata import distribution
from pathlib import Path

from ..authoring.checks import check_local

__all__ = ["new_project"]

TEMPLATE = Path(__file__).parent / "project"


def new_project(folder: str) -> list[Path]:
    """Write the files of a project, named after its folder; returns them.

    Args:
        folder: The folder; created, or there already and empty.

    Raises:
        ValueError: if its name cannot be that of a package, or is that of one that the project needs.
        FileExistsError: if there is something in it.
    """
    check_local("new", "folder", folder)
    path = Path(folder).expanduser()
    name = path.resolve().name
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name) or keyword.iskeyword(name):
        raise ValueError(
            f"new {folder!r}: {name!r} is not a valid name for a Python package; use ASCII letters, digits and "
            "underscores, start with a letter, and do not end with an underscore"
        )
    if name.lower() in _taken():
        raise ValueError(
            f"new {folder!r}: {name!r} is the name of a package or module that the project needs; choose a different "
            "name"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"new {folder!r}: the folder already exists; choose a different name, or an empty folder")
    path.mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(TEMPLATE.iterdir()):
        if source.is_file():
            target = path / source.name
            target.write_text(source.read_text(encoding="utf-8").replace("my_project", name), encoding="utf-8")
            written.append(target)
    return written


def _taken() -> set[str]:
    """Names that would replace or hide what a project needs: packages that it is installed and run with, and its own files."""
    required = [
        re.split(r"[^\w.-]", one)[0] for one in distribution("signalfire").requires or () if "extra ==" not in one
    ]
    own = [source.stem for source in TEMPLATE.glob("*.py")]
    names = {"signalfire", "pytest", "pip", "setuptools", *required, *own}
    return {name.lower().replace("-", "_") for name in names}
