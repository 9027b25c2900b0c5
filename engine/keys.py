"""Keys of a loaded state that several rooms read."""

from __future__ import annotations

__all__ = ["BASE"]

BASE = "base"
"""What a state leaves out: the "names" and the "sha256" of frozen parameters. In the manifest of a checkpoint as well."""
