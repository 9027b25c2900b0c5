"""Which modules belong to installed packages, whose code is known by their version."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

__all__ = ["file_digest", "is_installed", "version_of"]


@cache
def _folders() -> tuple[str, ...]:
    """The folders of installed packages and of the standard library."""
    paths = sysconfig.get_paths()
    library = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    library += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__)]
    return tuple({os.path.join(os.path.realpath(path), "") for path in library})


@cache
def is_installed(module: str | None, file: str | None = None) -> bool:
    """Whether a module is of an installed package, of the standard library, or of Signalfire.

    Args:
        module: Its name, which decides if there is no file.
        file: The file of its code.
    """
    top = (module or "").partition(".")[0]
    if top == "signalfire":
        return True
    if file is None or file.startswith("<"):
        if not top or top == "__main__":
            return False
        if top in sys.stdlib_module_names or top in sys.builtin_module_names:
            return True
        file = _file_of(module or "", top)
    return file is not None and _is_inside(file)


def _file_of(module: str, top: str) -> str | None:
    found = sys.modules.get(module) or sys.modules.get(top)
    file: str | None = getattr(found, "__file__", None)
    if file is not None:
        return file
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


@cache
def _is_inside(file: str) -> bool:
    path = os.path.realpath(file)
    parts = {"site-packages", "dist-packages"}
    return path.startswith(_folders()) or bool(parts & set(Path(path).parts)) or file.startswith("<frozen")


@cache
def version_of(module: str) -> str:
    """The version of the package that has a module; that of Python for its standard library, which counts elsewhere."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return ""
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        pass
    version = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(version, str):
        return version
    of = importlib.metadata.packages_distributions().get(top, [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(of))


def file_digest(path: str) -> str:
    """A digest of the bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
