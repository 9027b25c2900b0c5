"""A small project of one's own: a script, a handler with its test, a study."""

from __future__ import annotations

import keyword
from pathlib import Path

from ..authoring.checks import check_local

__all__ = ["new_project"]

TEMPLATE = Path(__file__).parent / "project"


def new_project(folder: str) -> list[Path]:
    """Write the files of a project, named after its folder; returns them.

    Args:
        folder: The folder; created, or there already and empty.

    Raises:
        ValueError: if its name cannot be that of a package: letters, digits and underscores.
        FileExistsError: if there is something in it.
    """
    check_local("new", "folder", folder)
    path = Path(folder).expanduser()
    name = path.resolve().name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"new {folder!r}: the name {name!r} is not one for Python: use letters, digits and underscores"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"new {folder!r}: it is there already; choose another name, or an empty folder")
    path.mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(TEMPLATE.iterdir()):
        if source.is_file():
            target = path / source.name
            target.write_text(source.read_text(encoding="utf-8").replace("my_project", name), encoding="utf-8")
            written.append(target)
    return written
