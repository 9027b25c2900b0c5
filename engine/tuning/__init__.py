"""LR finder and batch-size finder: short trial runs that leave no trace."""

from .batch_size import BatchSizes, Trial, find_batch_size
from .curve import LearningRateCurve
from .learning_rate import find_learning_rate

__all__ = ["BatchSizes", "LearningRateCurve", "Trial", "find_batch_size", "find_learning_rate"]
