"""Names of metrics that have changed since a state was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["renamed_metrics"]


def renamed_metrics(engine: Engine, saved: Mapping[str, Any]) -> dict[str, str]:
    """What metrics of a saved state are called now, if they are called otherwise.

    "val/loss" and "val_loss" are one metric. What a validation measured as "loss" may be its "val_loss" now.
    """
    then, owners = saved["engine"]["metrics"], engine.state.metrics.owners
    spelled = {name.replace("/", "_"): name for name in owners}
    found: dict[str, str] = {}
    for name in {*then["serials"], *then.get("evaluated", ())} - owners.keys():
        plain = name.replace("/", "_")
        now = spelled.get(plain)
        if now is None and (now := spelled.get(f"val_{plain}")) and not _was_evaluated(name, owners[now], saved):
            now = None
        if now is not None and now not in then["serials"]:
            found[name] = now
    return found


def _was_evaluated(name: str, owner: str, saved: Mapping[str, Any]) -> bool:
    """Whether a validation measured a metric; states of versions before 0.3 only tell whether they had this validation."""
    if "composition" in saved:
        return name in saved["engine"]["metrics"].get("evaluated", ())
    return owner in saved["handlers"]
