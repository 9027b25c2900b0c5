"""What the runs of a study are made of: the key under which the store finds them again."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import signalfire
from signalfire import Engine

from .composition import parts_of
from .fingerprint import NotDigestibleError, fingerprint

__all__ = ["Provenance", "combined", "composition", "digest_code"]


@dataclass(frozen=True)
class Provenance:
    """What the runs of a study are made of, apart from variant and seed; each part is a digest or a version.

    Attributes:
        build, run: Digests of the functions, with their arguments and all that they use; see `fingerprint`.
        config: The study's ``config``, as a digest.
        composition: Digest of the handlers with their arguments, the updates and the structure of the modules.
        streams: The study's ``streams``.
        task: Name of the task; empty, and then no part of the key, in a study without tasks.
        python: Minor version of Python, on which bytecode depends.
        torch, signalfire: Versions.
    """

    build: str
    run: str
    config: str
    composition: str
    streams: str
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch: str = str(torch.__version__)
    signalfire: str = vars(signalfire)["__version__"]
    task: str = ""

    @property
    def key(self) -> str:
        """The digest of all parts."""
        return hashlib.sha256(json.dumps(self._there(), sort_keys=True).encode()).hexdigest()

    def parts(self) -> dict[str, str]:
        """The parts by name, shortened for the store."""
        return {name: value[:16] for name, value in self._there().items()}

    def differing(self, stored: Mapping[str, str]) -> list[str]:
        """The names of the parts in which stored runs differ from these."""
        return [
            name for name, value in (self.parts() | {"task": self.task[:16]}).items() if stored.get(name, "") != value
        ]

    def _there(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if name != "task" or value}


def digest_code(value: object, argument: str, *, config: Mapping[str, Any], is_stored: bool) -> str:
    """The digest of a function that a study was given.

    Args:
        value: The function.
        argument: Name of the argument, for the error.
        config: The study's config. Given, it says what cannot be digested.
        is_stored: Whether the runs outlive the study.

    Raises:
        TypeError: if a part of it cannot be digested, and there is no config.
    """
    try:
        return fingerprint(value, argument, strict=is_stored and not config)
    except NotDigestibleError as error:
        raise TypeError(
            f"Study({argument}=...): {error}; describe the value with config={{'data': 'v1'}}, and change the "
            "description whenever the content changes"
        ) from None


def composition(engine: Engine) -> dict[str, str]:
    """A digest of each part of a composition, by what it is.

    Tensors count with their shapes, so that the digests depend on the seed only if build makes other compositions of it.
    Values that cannot be digested count with their types: what they are made of is in the code of build.
    """
    return {what: fingerprint(part, what, strict=False, structure=True) for what, part in parts_of(engine).items()}


def combined(digests: Mapping[str, str], without: Collection[str] = ()) -> str:
    """One digest of several, in their order."""
    kept = [[name, digest] for name, digest in digests.items() if name not in without]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()
