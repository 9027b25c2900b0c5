"""The global random generators, in a form that files hold."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import torch

from ..authoring import randomness

__all__ = ["as_text", "from_text", "random_state", "restore_random_state"]


def random_state() -> dict[str, Any]:
    """The state of the global generators of Python, NumPy and torch on all devices; ``torch.load(weights_only=True)`` takes it.

    Example:
        >>> import torch
        >>> state = random_state()
        >>> drawn = torch.rand(3)
        >>> restore_random_state(state)
        >>> torch.equal(torch.rand(3), drawn)
        True
    """
    return randomness.packed(randomness.random_state())


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back to what `random_state` returned; those that are not in it stay as they are.

    Raises:
        ValueError: for what is no such state.
    """
    if not isinstance(state, Mapping) or not {"python", "numpy", "torch"} <= state.keys():
        raise ValueError(
            "restore_random_state(): expected a state from random_state(), with the keys python, numpy and torch"
        )
    randomness.set_random_state(dict(state))


def as_text(state: Mapping[str, Any]) -> str:
    """What `random_state` returned, for a file of JSON.

    Example:
        >>> state = random_state()
        >>> torch.equal(from_text(as_text(state))["torch"], state["torch"])
        True
    """
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def from_text(text: str) -> Any:
    """What `as_text` wrote."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
