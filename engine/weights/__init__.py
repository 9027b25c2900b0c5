"""Weights in files that others read and write: reading them for a warm start, averaging and exporting them."""

from .reading import WeightFile, read_weights

__all__ = ["WeightFile", "read_weights"]
