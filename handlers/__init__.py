"""The handlers included in Signalfire, one feature in each file."""

if __name__ != "signalfire.handlers":
    raise ImportError(
        f"this package is installed as 'signalfire.handlers', but was imported as {__name__!r}; "
        "write `from signalfire.handlers import ...` (after `pip install -e .`)"
    )

from .adaptive_gradient_clipping import AdaptiveGradientClipping
from .checkpoint import Checkpoint
from .csv_logger import CSVLogger
from .cutmix import CutMix
from .cutout import Cutout
from .device_statistics import DeviceStatistics
from .device_transfer import DeviceTransfer
from .distributed_data_parallel import DistributedDataParallel
from .early_stopping import EarlyStopping
from .ema import EMA
from .fast_dev_run import FastDevRun
from .freezing import Freezing, discriminative_rates
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .garbage_collection import GarbageCollection
from .gradient_accumulation import GradientAccumulation
from .gradient_clipping import GradientClipping
from .gradient_noise import GradientNoise
from .gradient_norms import GradientNorms
from .guards import Guards
from .histograms import Histograms
from .history import History
from .json_lines_logger import JSONLinesLogger
from .label_smoothing import LabelSmoothing
from .limit_batches import LimitBatches
from .lr_scheduling import LRScheduling
from .metrics import Accuracy, Average, Metric, Metrics, MovingAverage
from .micro_batching import MicroBatching
from .mixed_precision import MixedPrecision
from .mixup import MixUp
from .mlflow_logger import MLflowLogger
from .non_finite_guard import NonFiniteGuard
from .optimizer_statistics import OptimizerStatistics
from .overfit_batches import OverfitBatches
from .parameter_scheduling import ParameterScheduling
from .parameter_statistics import ParameterStatistics
from .predictions import Predictions
from .preemption import Preemption
from .profiler import Profiler, Timing
from .progress_bar import ProgressBar
from .pruning import Pruning
from .remote_logger import RemoteLogger
from .rewindable import Rewindable
from .schedules import cosine_with_warmup, one_cycle, piecewise, polynomial, warmup, warmup_stable_decay
from .seeding import Seeding
from .sharpness_aware_minimization import SharpnessAwareMinimization
from .spike_guard import SpikeGuard
from .straggler_detection import StragglerDetection
from .summary import ModelSummary, ModuleSummary, Summary, summary
from .swa import SWA
from .tensor_parallel import TensorParallel
from .tensorboard import TensorBoardLogger
from .throughput import Throughput
from .trackio_logger import TrackioLogger
from .true_precision import TruePrecision
from .truncated_bptt import TruncatedBPTT
from .update_frequency import UpdateFrequency
from .validation import Validation
from .wandb_logger import WandbLogger

__all__ = [
    "EMA",
    "SWA",
    "Accuracy",
    "AdaptiveGradientClipping",
    "Average",
    "CSVLogger",
    "Checkpoint",
    "CutMix",
    "Cutout",
    "DeviceStatistics",
    "DeviceTransfer",
    "DistributedDataParallel",
    "EarlyStopping",
    "FastDevRun",
    "Freezing",
    "FullyShardedDataParallel",
    "GarbageCollection",
    "GradientAccumulation",
    "GradientClipping",
    "GradientNoise",
    "GradientNorms",
    "Guards",
    "Histograms",
    "History",
    "JSONLinesLogger",
    "LRScheduling",
    "LabelSmoothing",
    "LimitBatches",
    "MLflowLogger",
    "Metric",
    "Metrics",
    "MicroBatching",
    "MixUp",
    "MixedPrecision",
    "ModelSummary",
    "ModuleSummary",
    "MovingAverage",
    "NonFiniteGuard",
    "OptimizerStatistics",
    "OverfitBatches",
    "ParameterScheduling",
    "ParameterStatistics",
    "Predictions",
    "Preemption",
    "Profiler",
    "ProgressBar",
    "Pruning",
    "RemoteLogger",
    "Rewindable",
    "Seeding",
    "SharpnessAwareMinimization",
    "SpikeGuard",
    "StragglerDetection",
    "Summary",
    "TensorBoardLogger",
    "TensorParallel",
    "Throughput",
    "Timing",
    "TrackioLogger",
    "TruePrecision",
    "TruncatedBPTT",
    "UpdateFrequency",
    "Validation",
    "WandbLogger",
    "cosine_with_warmup",
    "discriminative_rates",
    "one_cycle",
    "piecewise",
    "polynomial",
    "summary",
    "warmup",
    "warmup_stable_decay",
]
