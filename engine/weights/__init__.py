"""Weights in files that others read and write: reading them for a warm start, averaging and exporting them."""

from .averages import check_average, find_averaging
from .averaging import average_weights
from .naming import plain_name
from .onnx_program import needs_onnx
from .program import export_program
from .reading import WeightFile, needs_safetensors, read_weights
from .writing import export_weights

__all__ = [
    "WeightFile",
    "average_weights",
    "check_average",
    "export_program",
    "export_weights",
    "find_averaging",
    "needs_onnx",
    "needs_safetensors",
    "plain_name",
    "read_weights",
]
