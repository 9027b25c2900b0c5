"""Keys of a loaded state that several rooms read."""

from __future__ import annotations

__all__ = ["BASE"]

BASE = "base"
"""What a state leaves out: the "sha256" of each frozen parameter by its name. In the manifest of a checkpoint as well."""
