"""The handlers that come with Signalfire: one feature, one file."""

if __name__ != "signalfire.handlers":
    raise ImportError(
        f"this package is installed as 'signalfire.handlers', but was imported as {__name__!r}; "
        "write `from signalfire.handlers import ...` (after `pip install -e .`)"
    )

from .checkpoint import Checkpoint
from .device_transfer import DeviceTransfer
from .early_stopping import EarlyStopping
from .gradient_accumulation import GradientAccumulation
from .gradient_clipping import GradientClipping
from .history import History
from .lr_scheduling import LRScheduling
from .metrics import Accuracy, Average, Metric, Metrics
from .mixed_precision import MixedPrecision
from .progress_bar import ProgressBar
from .seeding import Seeding
from .tensorboard import TensorBoardLogger
from .validation import Validation

__all__ = [
    "Accuracy",
    "Average",
    "Checkpoint",
    "DeviceTransfer",
    "EarlyStopping",
    "GradientAccumulation",
    "GradientClipping",
    "History",
    "LRScheduling",
    "Metric",
    "Metrics",
    "MixedPrecision",
    "ProgressBar",
    "Seeding",
    "TensorBoardLogger",
    "Validation",
]
