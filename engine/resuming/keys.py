"""Keys of a loaded state that several rooms read."""

from __future__ import annotations

__all__ = ["BASE", "OWN_PARAMETERS", "STEP_SHARDS", "UNSAVED"]

BASE = "base"
"""What a state leaves out: the "sha256" of each frozen parameter by its name. In the manifest of a checkpoint as well."""

UNSAVED = "unsaved"
"""What a state of this process has beside what is written; see `changeable.Unsaved`."""

OWN_PARAMETERS = "own_parameters"
"""Trained tensors in no module: among weights by name, in the part of an update by their places in the optimizer."""

STEP_SHARDS = "step_shards"
"""Of how many shards each step consists; absent where each process computes what is its own."""
