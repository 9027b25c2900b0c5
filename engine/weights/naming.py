"""Names of tensors without what torch's wrappers put into them."""

from __future__ import annotations

__all__ = ["plain_name"]

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """The name of a tensor as it is without `torch.compile`, checkpointed and sharded wrappers.

    Example:
        >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
