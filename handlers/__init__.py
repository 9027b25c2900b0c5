"""The handlers included in Signalfire, one feature in each file."""

if __name__ != "signalfire.handlers":
    raise ImportError(
        f"this package is installed as 'signalfire.handlers', but was imported as {__name__!r}; "
        "write `from signalfire.handlers import ...` (after `pip install -e .`)"
    )

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from signalfire.authoring.elsewhere import missing_attribute

if TYPE_CHECKING:
    from .activation_checkpointing import ActivationCheckpointing
    from .activation_statistics import ActivationStatistics
    from .adaptive_gradient_clipping import AdaptiveGradientClipping
    from .auto_clip import AutoClip
    from .benchmark import Benchmark
    from .channels_last import ChannelsLast
    from .checkpoint import Checkpoint
    from .compile import Compile
    from .csv_logger import CSVLogger
    from .cutmix import CutMix
    from .cutout import Cutout
    from .deterministic import Deterministic
    from .device_statistics import DeviceStatistics
    from .device_transfer import DeviceTransfer
    from .distillation import Distillation
    from .distributed_data_parallel import DistributedDataParallel
    from .early_stopping import EarlyStopping
    from .elastic_data_parallel import ElasticDataParallel
    from .ema import EMA
    from .export import Export
    from .fast_dev_run import FastDevRun
    from .freezing import Freezing, discriminative_rates
    from .fully_sharded_data_parallel import FullyShardedDataParallel
    from .garbage_collection import GarbageCollection
    from .gradient_accumulation import GradientAccumulation
    from .gradient_centralization import GradientCentralization
    from .gradient_clipping import GradientClipping
    from .gradient_noise import GradientNoise
    from .gradient_norms import GradientNorms
    from .guards import Guards
    from .histograms import Histograms
    from .history import History
    from .json_lines_logger import JSONLinesLogger
    from .l1 import L1
    from .l2 import L2
    from .label_smoothing import LabelSmoothing
    from .limit_batches import LimitBatches
    from .lookahead import Lookahead
    from .lr_scheduling import LRScheduling
    from .memory_snapshot import MemorySnapshot
    from .metrics import Accuracy, Average, Metric, Metrics, MovingAverage
    from .micro_batching import MicroBatching
    from .mixed_precision import MixedPrecision
    from .mixup import MixUp
    from .mlflow_logger import MLflowLogger
    from .model_summary import ModelSummary, ModuleSummary, Summary, summary
    from .neftune import NEFTune
    from .non_finite_guard import NonFiniteGuard
    from .optimizer_statistics import OptimizerStatistics
    from .optuna_pruning import OptunaPruning
    from .overfit_batches import OverfitBatches
    from .parameter_scheduling import ParameterScheduling
    from .parameter_statistics import ParameterStatistics
    from .penalty import Penalty
    from .perplexity import Perplexity
    from .precision32 import Precision32
    from .predictions import Predictions
    from .preemption import Preemption
    from .profiler import Profiler, Timing
    from .progress_bar import ProgressBar
    from .progressive_resizing import ProgressiveResizing
    from .pruning import Pruning
    from .random_erasing import RandomErasing
    from .remote_logger import RemoteLogger
    from .reporting import Reporting
    from .rewindable import Rewindable
    from .schedules import cosine_with_warmup, one_cycle, piecewise, polynomial, warmup, warmup_stable_decay
    from .seeding import Seeding
    from .sequence_length_warmup import SequenceLengthWarmup
    from .sharpness_aware_minimization import SharpnessAwareMinimization
    from .spike_guard import SpikeGuard
    from .stochastic_depth import StochasticDepth
    from .straggler_detection import StragglerDetection
    from .swa import SWA
    from .tensor_parallel import TensorParallel
    from .tensorboard import TensorBoardLogger
    from .throughput import Throughput
    from .trace import Trace
    from .trackio_logger import TrackioLogger
    from .true_precision import TruePrecision
    from .truncated_bptt import TruncatedBPTT
    from .update_frequency import UpdateFrequency
    from .validation import Validation
    from .wandb_logger import WandbLogger
    from .warm_start import WarmStart

__all__ = [
    "EMA",
    "L1",
    "L2",
    "SWA",
    "Accuracy",
    "ActivationCheckpointing",
    "ActivationStatistics",
    "AdaptiveGradientClipping",
    "AutoClip",
    "Average",
    "Benchmark",
    "CSVLogger",
    "ChannelsLast",
    "Checkpoint",
    "Compile",
    "CutMix",
    "Cutout",
    "Deterministic",
    "DeviceStatistics",
    "DeviceTransfer",
    "Distillation",
    "DistributedDataParallel",
    "EarlyStopping",
    "ElasticDataParallel",
    "Export",
    "FastDevRun",
    "Freezing",
    "FullyShardedDataParallel",
    "GarbageCollection",
    "GradientAccumulation",
    "GradientCentralization",
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
    "Lookahead",
    "MLflowLogger",
    "MemorySnapshot",
    "Metric",
    "Metrics",
    "MicroBatching",
    "MixUp",
    "MixedPrecision",
    "ModelSummary",
    "ModuleSummary",
    "MovingAverage",
    "NEFTune",
    "NonFiniteGuard",
    "OptimizerStatistics",
    "OptunaPruning",
    "OverfitBatches",
    "ParameterScheduling",
    "ParameterStatistics",
    "Penalty",
    "Perplexity",
    "Precision32",
    "Predictions",
    "Preemption",
    "Profiler",
    "ProgressBar",
    "ProgressiveResizing",
    "Pruning",
    "RandomErasing",
    "RemoteLogger",
    "Reporting",
    "Rewindable",
    "Seeding",
    "SequenceLengthWarmup",
    "SharpnessAwareMinimization",
    "SpikeGuard",
    "StochasticDepth",
    "StragglerDetection",
    "Summary",
    "TensorBoardLogger",
    "TensorParallel",
    "Throughput",
    "Timing",
    "Trace",
    "TrackioLogger",
    "TruePrecision",
    "TruncatedBPTT",
    "UpdateFrequency",
    "Validation",
    "WandbLogger",
    "WarmStart",
    "cosine_with_warmup",
    "discriminative_rates",
    "one_cycle",
    "piecewise",
    "polynomial",
    "summary",
    "warmup",
    "warmup_stable_decay",
]

# Names that are not those of their modules, by these.
_OF_OTHER_NAMES = {
    "freezing": ["discriminative_rates"],
    "metrics": ["Accuracy", "Average", "Metric", "MovingAverage"],
    "model_summary": ["ModuleSummary", "Summary", "summary"],
    "profiler": ["Timing"],
    "schedules": ["cosine_with_warmup", "one_cycle", "piecewise", "polynomial", "warmup", "warmup_stable_decay"],
    "tensorboard": ["TensorBoardLogger"],
}
_ELSEWHERE = {name: module for module, names in _OF_OTHER_NAMES.items() for name in names}
_BY_LETTERS = {module.name.replace("_", ""): module.name for module in iter_modules(__path__)}
# Where each name is defined: its module is imported when the name is first used, since all of them take long to import.
_MODULES = {name: _ELSEWHERE.get(name) or _BY_LETTERS[name.lower()] for name in __all__}
_SUBMODULES = {"_common", *_MODULES.values()}

if not TYPE_CHECKING:  # type checkers would accept any name of a module that has a __getattr__

    def __getattr__(name: str) -> object:
        """Import a public name, or a submodule, when it is first used."""
        if name in _SUBMODULES:
            return import_module(f".{name}", __name__)
        if name not in _MODULES:
            raise missing_attribute(__name__, name)
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value  # found without this function from now on
        return value

    def __dir__() -> list[str]:
        return [*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))]
