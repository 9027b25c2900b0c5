"""Keys of a loaded state that several rooms read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BASE", "EVALUATED", "OWN_PARAMETERS", "STEP_SHARDS", "UNSAVED", "holds_averages"]

BASE = "base"
"""What a state leaves out: the "sha256" of each frozen parameter by its name. In the manifest of a checkpoint as well."""

UNSAVED = "unsaved"
"""What a state of this process has beside what is written; see `changeable.Unsaved`."""

OWN_PARAMETERS = "own_parameters"
"""Trained tensors in no module: among weights by name, in the part of an update by their places in the optimizer."""

STEP_SHARDS = "step_shards"
"""Of how many shards each step consists; absent where each process computes what is its own."""

EVALUATED = "evaluate"
"""In the part of a handler with averages of the weights: False where evaluations did not use them; absent where they did."""


def holds_averages(part: Any) -> bool:
    """Whether a handler's part of a state has averages of the weights that evaluations used in place of them."""
    used = isinstance(part, Mapping) and part.get(EVALUATED, True) and not part.get("overruled")
    return bool(used and part.get("averages"))
