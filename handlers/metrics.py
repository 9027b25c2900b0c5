"""Metrics over an epoch: averages weighted by batch size, accuracy, torchmetrics metrics and custom functions."""

from __future__ import annotations

from ._common.measures import Accuracy, Average, MovingAverage
from ._common.metrics import Metric, Metrics

__all__ = ["Accuracy", "Average", "Metric", "Metrics", "MovingAverage"]
