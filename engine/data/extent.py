"""How much data there is: a position inside an epoch applies only to data of the same extent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["check_same_extent", "extent_of"]

_WORDS = {"samples": "samples", "batch_size": "samples in a batch", "batches": "batches"}


def extent_of(data: Any) -> dict[str, Any]:
    """What is known of ``samples``, ``batch_size``, ``batches`` and ``sampler`` of data, before it is sharded over ranks."""
    if data is None:
        return {}
    batch_sampler = getattr(data, "batch_sampler", None)
    size = getattr(data, "batch_size", None) or getattr(batch_sampler, "batch_size", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(data, "sampler", None)
    known = {"samples": _length(sampler), "batch_size": size, "batches": _length(data)}
    found: dict[str, Any] = {name: value for name, value in known.items() if isinstance(value, int)}
    return found if sampler is None else found | {"sampler": type(sampler).__name__}


def _length(data: Any) -> int | None:
    try:
        return None if data is None else len(data)
    except (TypeError, NotImplementedError):
        return None


def check_same_extent(saved: Mapping[str, Any], data: Any, place: str) -> None:
    """Raise ValueError for data of another extent than that of the saved run.

    Args:
        saved: What `extent_of` returned then.
        data: The data of this run.
        place: Where the saved run stood, such as "epoch 2, iteration 7".
    """
    now = extent_of(data)
    for name, words in _WORDS.items():
        if name in saved and name in now and saved[name] != now[name]:
            raise ValueError(
                f"the loaded state was saved inside an epoch ({place}) over data with {saved[name]} {words}, but this data "
                f"({type(data).__name__}) has {now[name]}, so that its position does not apply: resume with the data of that "
                "run, load a state saved at the end of an epoch, or take the weights alone with engine.load_weights(state)"
            )
