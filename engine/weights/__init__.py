"""Weights in files that others read and write: reading them for a warm start, averaging and exporting them."""

from .averages import check_average, find_averaging
from .naming import plain_name
from .program import export_program
from .reading import WeightFile, read_weights
from .writing import export_weights

__all__ = [
    "WeightFile",
    "check_average",
    "export_program",
    "export_weights",
    "find_averaging",
    "plain_name",
    "read_weights",
]
