"""How much data there is: a position inside an epoch applies only to data of the same extent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DataError", "check_same_extent", "extent_of", "known_length", "length_of"]

_WORDS = {"samples": "samples", "batch_size": "samples per batch", "batches": "batches"}


class DataError(ValueError):
    """The data is empty, shorter than its length, or cannot be iterated again."""


def length_of(data: Any) -> int | None:
    """Number of batches of data; None if it has no length.

    Raises:
        TypeError: for what cannot be iterated.
        DataError: for empty data.
    """
    if data is None:
        return None
    try:
        iter_ = type(data).__iter__
    except AttributeError:
        iter_ = getattr(type(data), "__getitem__", None)
    if iter_ is None:
        raise TypeError(
            f"the data {data!r} cannot be iterated; pass an iterable of batches, such as a DataLoader or a list; for a "
            "run without data, pass None and epoch_length="
        )
    length = known_length(data)
    if length == 0:
        raise DataError(f"the data ({type(data).__name__}) is empty: it has length 0")
    return length


def extent_of(data: Any) -> dict[str, Any]:
    """What is known of ``samples``, ``batch_size``, ``batches`` and ``sampler`` of data, before it is sharded over ranks."""
    if data is None:
        return {}
    batch_sampler = getattr(data, "batch_sampler", None)
    size = getattr(data, "batch_size", None) or getattr(batch_sampler, "batch_size", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(data, "sampler", None)
    known = {"samples": known_length(sampler), "batch_size": size, "batches": known_length(data)}
    found: dict[str, Any] = {name: value for name, value in known.items() if isinstance(value, int)}
    return found if sampler is None else found | {"sampler": type(sampler).__name__}


def known_length(data: Any) -> int | None:
    """The length of data or of a sampler; None if it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # a DataLoader over an IterableDataset has a __len__ that raises
        return None


def check_same_extent(saved: Mapping[str, Any], now: Mapping[str, Any], place: str, kind: str) -> None:
    """Raise ValueError for data of another extent than that of the saved run.

    Args:
        saved: What `extent_of` returned then.
        now: What it returns for the data of this run.
        place: Where the saved run stood, such as "epoch 2, iteration 7".
        kind: The class of the data.
    """
    for name, words in _WORDS.items():
        if name in saved and name in now and saved[name] != now[name]:
            raise ValueError(
                f"the loaded state was saved partway through an epoch ({place}). The data had {saved[name]} {words} "
                f"then, but this data ({kind}) has {now[name]}, so the saved position does not apply; resume with the "
                "data of the saved run, load a state saved at the end of an epoch, or load only the weights with "
                "engine.load_weights(state)"
            )
