"""Seeds that are derived from others."""

from __future__ import annotations

import hashlib

__all__ = ["derived_seed"]


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends only on the given parts: the sha256 of their text.

    Example:
        >>> derived_seed(0, "mixup", 12) == derived_seed(0, "mixup", 12) != derived_seed(
        ...     0, "mixup", 13
        ... )
        True
    """
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
