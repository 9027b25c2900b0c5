"""The promises that every handler makes, checked for every handler that is shipped, and the cells in which they meet."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations, count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import signalfire.handlers
from signalfire import Engine, Events, Handler, Phase, Update, on, seed_everything
from signalfire.handlers import (
    EMA,
    L1,
    L2,
    SWA,
    Accuracy,
    ActivationCheckpointing,
    ActivationStatistics,
    AdaptiveGradientClipping,
    AutoClip,
    Average,
    Benchmark,
    ChannelsLast,
    Checkpoint,
    Compile,
    CSVLogger,
    CutMix,
    Cutout,
    Deterministic,
    DeviceStatistics,
    DeviceTransfer,
    Distillation,
    DistributedDataParallel,
    EarlyStopping,
    ElasticDataParallel,
    Export,
    FastDevRun,
    Freezing,
    FullyShardedDataParallel,
    GarbageCollection,
    GradientAccumulation,
    GradientCentralization,
    GradientClipping,
    GradientNoise,
    GradientNorms,
    Guards,
    Histograms,
    History,
    JSONLinesLogger,
    LabelSmoothing,
    LimitBatches,
    Lookahead,
    LRScheduling,
    MemorySnapshot,
    Metrics,
    MicroBatching,
    MixedPrecision,
    MixUp,
    MLflowLogger,
    NEFTune,
    NonFiniteGuard,
    OptimizerStatistics,
    OptunaPruning,
    OverfitBatches,
    ParameterScheduling,
    ParameterStatistics,
    Penalty,
    Precision32,
    Predictions,
    Preemption,
    Profiler,
    ProgressBar,
    ProgressiveResizing,
    Pruning,
    RandomErasing,
    RemoteLogger,
    Reporting,
    Rewindable,
    Seeding,
    SequenceLengthWarmup,
    SharpnessAwareMinimization,
    SpikeGuard,
    StochasticDepth,
    StragglerDetection,
    Summary,
    TensorBoardLogger,
    TensorParallel,
    Throughput,
    Trace,
    TrackioLogger,
    TruePrecision,
    TruncatedBPTT,
    UpdateFrequency,
    Validation,
    WandbLogger,
    WarmStart,
)
from signalfire.testing import check_handler, fingerprint
from tests import kit
from tests.kit import cleaned_up, quick, shipped
from tests.remote import in_memory

# A case is made without the engine, so that its evaluator has a model of its own; a handler is alone, so that nothing saves.
pytestmark = [pytest.mark.filterwarnings("ignore:W51"), pytest.mark.filterwarnings("ignore:C31")]

Batch = tuple[Tensor, Tensor]

FOLDER = Path(tempfile.mkdtemp())
_clean_up = cleaned_up(FOLDER)

ADAM = partial(torch.optim.Adam, lr=1e-2)


def make_data() -> list[Batch]:
    """Sequences: 35 samples with 2 features over 6 points in time, in ragged batches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(35, 2, 6, generator=generator)
    y = (x[:, 0].sum(1) > 0).long()
    return [(x[i : i + 8], y[i : i + 8]) for i in range(0, 35, 8)]


class Classifier(nn.Module):
    """Accepts sequences of any length, so that they may be cut in time; with BatchNorm and dropout, so that it hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).mean(2))
        return scores

    def get_input_embeddings(self) -> nn.Module:
        """What handlers of language models take for the embedding: its output has three dimensions."""
        return self.features


PRETRAINED = {
    f"model.{name}": torch.linspace(-0.5, 0.4, value.numel()).sin().view_as(value)
    for name, value in Classifier().named_parameters()
}


def build(optimizer: Callable[..., torch.optim.Optimizer] = ADAM) -> Engine:
    """A trainer whose training metrics are there to be monitored."""
    torch.manual_seed(0)
    update = Update.supervised(nn.functional.cross_entropy, optimizer)
    engine = Engine(update, model=Classifier(), seed=0)
    engine.attach(Metrics(train_loss=Average(), name="train_metrics"))
    engine.connect(Events.HISTOGRAM_LOGGED, look_at_entry)
    return engine


def look_at_entry(engine: Engine) -> None:
    """Receive what is logged, as a logger does."""
    assert engine.log.entry is not None


def make_teacher() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


def z_loss(engine: Engine) -> Tensor:
    output: Tensor = engine.state.update.output
    return output.logsumexp(1).square().mean()


def build_two() -> Engine:
    """A trainer with a second update, whose module is its own."""
    torch.manual_seed(0)
    models = {"model": Classifier(), "second": Classifier()}

    def forward(engine: Engine, batch: Batch) -> Tensor:
        scores: Tensor = engine.modules["second"](batch[0])
        return scores

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    def parameters(name: str) -> Callable[[Engine], Iterator[nn.Parameter]]:
        return lambda engine: engine.modules[name].parameters()

    def first_forward(engine: Engine, batch: Batch) -> Tensor:
        scores: Tensor = engine.modules["model"](batch[0])
        return scores

    first = Update(first_forward, loss, ADAM, "main", parameters("model"))
    engine = Engine([first, Update(forward, loss, ADAM, "second", parameters("second"))], model=models, seed=0)
    engine.connect(Events.HISTOGRAM_LOGGED, look_at_entry)
    engine.attach(Metrics(train_loss=Average(), update="main", name="train_metrics"))
    return engine


def build_evaluator() -> Engine:
    torch.manual_seed(0)
    return Engine(Update.supervised(nn.functional.cross_entropy), model=Classifier(), allow=["W10"])


def ticks() -> Callable[[], float]:
    """A clock that advances by a second at each reading."""
    return partial(next, map(float, count()))


def validation(every: str) -> Validation:
    torch.manual_seed(1)
    model = Classifier()
    evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=model)
    evaluator.attach(Metrics(test_loss=Average()))
    return Validation(evaluator, make_data(), every=every, at_start=every == "3it")


def build_lbfgs() -> Engine:
    return build(partial(torch.optim.LBFGS, lr=0.1, max_iter=3))


@dataclass(frozen=True)
class Case:
    """How a handler is made; whether it may change what the training comes to; on what engine it is tried."""

    make: Callable[[], Handler]
    changes_training: bool
    build: Callable[[], Engine] = build


# One line for each case; a handler that is shipped and not listed fails `test_every_shipped_handler_is_checked`.
CASES: dict[str, Case] = {
    "ActivationCheckpointing": Case(lambda: ActivationCheckpointing("*head"), False),
    "ActivationCheckpointing, groups": Case(lambda: ActivationCheckpointing(every=2), False),
    "ActivationStatistics": Case(lambda: ActivationStatistics(every="3it", window=2, unit_dim=1), False),
    "AdaptiveGradientClipping": Case(lambda: AdaptiveGradientClipping(0.01), True),
    "AutoClip": Case(lambda: AutoClip(50, window=3), True),
    "Benchmark": Case(lambda: Benchmark(), False),
    "ChannelsLast": Case(lambda: ChannelsLast(), False),
    "Checkpoint, the last": Case(lambda: Checkpoint(FOLDER / "last", every="2it", keep=2), False),
    "Checkpoint, the best": Case(lambda: Checkpoint(FOLDER / "best", monitor="train_loss", keep=2), False),
    "CSVLogger": Case(lambda: CSVLogger(FOLDER / "log.csv", every="2it"), False),
    "Checkpoint, in a thread": Case(
        lambda: Checkpoint(FOLDER / "thread", every="2it", asynchronous=True, on_exception=True), False
    ),
    "Compile": Case(lambda: Compile(backend="eager"), False),
    "CutMix": Case(lambda: CutMix(), True),
    "Cutout": Case(lambda: Cutout(2), True),
    "Deterministic": Case(lambda: Deterministic(), False),
    "DeviceStatistics": Case(lambda: DeviceStatistics(every="2it"), False),
    "DeviceTransfer": Case(lambda: DeviceTransfer("cpu"), False),
    "Distillation": Case(lambda: Distillation(make_teacher(), temperature=2.0), True),
    "DistributedDataParallel": Case(lambda: DistributedDataParallel(), False),
    "ElasticDataParallel": Case(lambda: ElasticDataParallel(shards=2), True),
    "FullyShardedDataParallel": Case(lambda: FullyShardedDataParallel(), False),
    "TensorParallel": Case(lambda: TensorParallel({"*": ColwiseParallel()}), False),
    "EMA": Case(lambda: EMA(0.9), False),
    "EMA, late and warm": Case(lambda: EMA(0.9, every=2, start=2, warmup=True, buffers="average"), False),
    "EarlyStopping": Case(lambda: EarlyStopping("train_loss", patience=1, min_delta=0.5), True),
    "EarlyStopping, back to the best": Case(
        lambda: EarlyStopping("train_loss", patience=1, min_delta=0.5, restore_best=True), True
    ),
    "Export": Case(lambda: Export(FOLDER / "end.safetensors", every="2it"), False),
    "Export, the best": Case(lambda: Export(FOLDER / "best.safetensors", at="best", monitor="train_loss"), False),
    "FastDevRun": Case(lambda: FastDevRun(2), True),
    "Freezing": Case(lambda: Freezing({"*features*": 2}), True),
    # With freeze=, each run would count what is frozen for all tests, which takes a third of a second, and freeze nothing.
    "GarbageCollection": Case(lambda: GarbageCollection(every="2it", freeze=False), False),
    "GradientAccumulation": Case(lambda: GradientAccumulation(2), True),
    "GradientAccumulation, weighted": Case(
        lambda: GradientAccumulation(2, weight=lambda engine: 1.0 + engine.state.iteration % 2), True
    ),
    "GradientAccumulation, scheduled": Case(lambda: GradientAccumulation({1: 3, 2: 2}), True),
    "GradientCentralization": Case(lambda: GradientCentralization(), True),
    "GradientClipping": Case(lambda: GradientClipping(max_norm=0.1), True),
    "GradientNoise": Case(lambda: GradientNoise(0.1), True),
    "GradientNorms": Case(lambda: GradientNorms(per_parameter=True), False),
    "Guards": Case(lambda: Guards(every="2it"), False),
    "Histograms": Case(lambda: Histograms(every="2it"), False),
    "History": Case(lambda: History(print_epochs=True, file=io.StringIO()), False),
    "JSONLinesLogger": Case(lambda: JSONLinesLogger(FOLDER / "log.jsonl", every="2it"), False),
    "Trace": Case(lambda: Trace(FOLDER / "trace.jsonl", every="2it", detail="tensor"), False),
    "L1": Case(lambda: L1(0.01), True),
    "L2": Case(lambda: L2(0.1), True),
    "OptunaPruning": Case(lambda: OptunaPruning(kit.Trial(), "train_loss", mode="min"), False),
    "Reporting": Case(lambda: Reporting(lambda value, step: False, "train_loss"), False),
    "Reporting, stopping": Case(lambda: Reporting(lambda value, step: step == 1, "train_loss"), True),
    "LRScheduling, steps": Case(lambda: LRScheduling(partial(StepLR, step_size=3), update="main"), True),
    "LRScheduling, epochs": Case(lambda: LRScheduling(partial(StepLR, step_size=1), every="1ep", update="main"), True),
    "LRScheduling, plateau": Case(
        lambda: LRScheduling(
            partial(ReduceLROnPlateau, patience=0, threshold=0.5), monitor="train_loss", update="main"
        ),
        True,
    ),
    "LabelSmoothing": Case(lambda: LabelSmoothing(0.1), True),
    "LimitBatches": Case(lambda: LimitBatches(3), True),
    "Lookahead": Case(lambda: Lookahead(2), True),
    "Lookahead, evaluated": Case(lambda: Lookahead(2, evaluate=True), True),
    "MemorySnapshot": Case(lambda: MemorySnapshot(FOLDER / "memory"), False),
    "Metrics": Case(lambda: Metrics(accuracy=Accuracy(), loss=Average(), update="main"), False),
    "MicroBatching": Case(lambda: MicroBatching(3), True),
    "MixUp": Case(lambda: MixUp(0.4), True),
    "MixedPrecision, bf16": Case(lambda: MixedPrecision("bf16"), True),
    "MixedPrecision, fp16": Case(lambda: MixedPrecision("fp16", init_scale=2.0**40, growth_interval=3), True),
    "NEFTune": Case(lambda: NEFTune(), True),
    "NonFiniteGuard": Case(lambda: NonFiniteGuard(check="both"), False),
    "OptimizerStatistics": Case(lambda: OptimizerStatistics(every="2st"), False),
    "OverfitBatches": Case(lambda: OverfitBatches(2), True),
    "ParameterScheduling": Case(lambda: ParameterScheduling("weight_decay", {0: 0.0, 3: 0.1}, update="main"), True),
    "ParameterScheduling, epochs": Case(
        lambda: ParameterScheduling("weight_decay", {0: 0.0, 2: 0.1}, every="1ep", update="main"), True
    ),
    "ParameterStatistics": Case(lambda: ParameterStatistics(every="2st"), False),
    "Penalty": Case(lambda: Penalty(z_loss, 0.1), True),
    "Precision32": Case(lambda: Precision32("medium"), True),
    "Predictions": Case(lambda: Predictions(), False, build_evaluator),
    "Preemption": Case(lambda: Preemption(), False),
    "Profiler": Case(lambda: Profiler(file=io.StringIO()), False),
    "ProgressBar": Case(lambda: ProgressBar(file=io.StringIO(), line_interval=0), False),
    "ProgressiveResizing": Case(lambda: ProgressiveResizing(increment=1), True),
    "Pruning": Case(lambda: Pruning(0.6, end=2, every=1), True),
    "MLflowLogger": Case(lambda: in_memory(MLflowLogger, FOLDER / "remote", every="2it"), False),
    "RandomErasing": Case(lambda: RandomErasing(0.8), True),
    "RemoteLogger": Case(lambda: in_memory(RemoteLogger, FOLDER / "remote", every="2it"), False),
    "TrackioLogger": Case(lambda: in_memory(TrackioLogger, FOLDER / "remote", every="2it"), False),
    "WandbLogger": Case(lambda: in_memory(WandbLogger, FOLDER / "remote", every="2it"), False),
    "WarmStart": Case(lambda: WarmStart(PRETRAINED, allow="*"), True),
    "Rewindable": Case(lambda: Rewindable(every="2it"), False),
    "SWA": Case(lambda: SWA(2, bn_data=make_data()), False),
    "SWA, with its rate": Case(lambda: SWA(2, lr=0.05, anneal_epochs=1, bn_batches=0, update="main"), True),
    "Seeding": Case(lambda: Seeding(5), True),
    "SequenceLengthWarmup": Case(lambda: SequenceLengthWarmup(3, 6, over="4it", increment=1, dim=2), True),
    "SharpnessAwareMinimization": Case(lambda: SharpnessAwareMinimization(0.1), True),
    "StochasticDepth": Case(lambda: StochasticDepth("*features.1", 0.2, update="main"), True),
    "StragglerDetection": Case(lambda: StragglerDetection(every="5it", threshold=1e6), False),
    "SpikeGuard": Case(lambda: SpikeGuard("rewind", window=8, rewind=2), False),
    "Summary": Case(lambda: Summary(file=io.StringIO()), False),
    "TensorBoardLogger": Case(lambda: TensorBoardLogger(FOLDER / "events", every="2it"), False),
    "Throughput": Case(lambda: Throughput(every="2it", warmup=1, waiting=True, flops="count", clock=ticks()), False),
    "TruePrecision": Case(lambda: TruePrecision("fp64"), True),
    "TruncatedBPTT": Case(lambda: TruncatedBPTT(4, dim=2), True),
    "UpdateFrequency": Case(lambda: UpdateFrequency(second=2), True, build_two),
    "Validation, iterations": Case(lambda: validation("3it"), False),
    "Validation, epochs": Case(lambda: validation("1ep"), False),
    "Validation, parts of an epoch": Case(lambda: validation("0.4ep"), False),
}


def kind(case: str) -> str:
    return case.split(",")[0]


FIRST_OF_EACH_KIND = {kind(case): case for case in reversed(CASES)}.values()


# Attributes that begin anew in a resumed run.
PER_RUN = {
    "EarlyStopping": ["_unsaved"],  # buffers that no file has
    "EMA": ["_versions"],  # how often the memory of a weight was written, as torch counts it
    "SWA": ["_versions"],
    "Export": ["written"],
    "GarbageCollection": ["collections"],
    "Metrics": ["_batches"],  # of the last epoch, from where the run began
    "Predictions": ["_collected", "_iterations"],  # likewise
    "Profiler": ["iterations"],
    "Throughput": ["_asked", "_begun"],
    "CSVLogger": ["_seen_loaded"],  # whether this is a run that resumes
    "JSONLinesLogger": ["_seen_loaded"],
    "MLflowLogger": ["_seen_loaded"],
    "RemoteLogger": ["_seen_loaded"],
    "TensorBoardLogger": ["_seen_loaded"],
    "TrackioLogger": ["_seen_loaded"],
    "WandbLogger": ["_seen_loaded"],
}


@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, "few batches") for case in FIRST_OF_EACH_KIND), *quick((case, "many") for case in CASES)],
)
def test_a_handler_keeps_its_promises(case: str, size: str) -> None:
    one = CASES[case]
    data, epochs = (make_data()[-3:], 2) if size == "few batches" else (make_data(), 3)
    per_run = PER_RUN.get(type(one.make()).__name__, ())
    check_handler(
        one.build,
        one.make,
        data,
        max_epochs=epochs,
        changes_training=one.changes_training,
        draws=case == "Seeding",
        per_run=per_run,
    )


# The pairs that are refused, with the errors that they raise. Every other pair of shipped handlers trains.
REFUSED: dict[frozenset[str], str] = {
    frozenset(pair): error
    for pair, error in {
        ("Benchmark", "Deterministic"): "control how algorithms are chosen",
        ("DistributedDataParallel", "FullyShardedDataParallel"): "control how the model is distributed",
        ("ActivationStatistics", "ElasticDataParallel"): "in a step with shards, each shard",
        ("ElasticDataParallel", "Export"): "in a step with shards, each shard",
        ("ElasticDataParallel", "Export, the best"): "in a step with shards, each shard",
        ("ElasticDataParallel", "Guards"): "in a step with shards, each shard",
        ("ElasticDataParallel", "MicroBatching"): "halve_on_oom=True does not work with shards",
        ("ElasticDataParallel", "NonFiniteGuard"): "in a step with shards, each shard",
        ("ElasticDataParallel", "Predictions"): "in a step with shards, each shard",
        ("ElasticDataParallel", "SpikeGuard"): "in a step with shards, each shard",
        ("ElasticDataParallel", "TruncatedBPTT"): "in a step with shards, each shard",
        ("DistributedDataParallel", "ElasticDataParallel"): "control how the model is distributed",
        ("ElasticDataParallel", "FullyShardedDataParallel"): "control how the model is distributed",
        ("ElasticDataParallel", "TensorParallel"): "control how the model is distributed",
        ("ActivationStatistics", "Compile"): "adds hooks during the run",
        ("Compile", "NEFTune"): "adds hooks during the run",
        ("Compile", "StochasticDepth"): "adds hooks during the run",
        ("EMA", "Lookahead, evaluated"): "control the weights used for evaluation",
        ("SWA", "Lookahead, evaluated"): "control the weights used for evaluation",
        ("AutoClip", "GradientClipping"): "control gradient clipping of update",
        ("Cutout", "RandomErasing"): "control cutting parts out of samples",
        ("DistributedDataParallel", "TensorParallel"): "control how the model is distributed",
        ("FullyShardedDataParallel", "TensorParallel"): "control how the model is distributed",
        ("EMA", "SWA"): "control the weights used for evaluation",
        ("LRScheduling", "SWA, with its rate"): "control the learning rate",
        ("LimitBatches", "OverfitBatches"): "control the data that a run iterates over",
        ("MixedPrecision", "TruePrecision"): "control the precision",
        ("Rewindable", "SpikeGuard"): "control which earlier states are kept",
        ("SharpnessAwareMinimization", "TruncatedBPTT"): "hidden states of earlier chunks are no longer available",
        ("LBFGS", "MixedPrecision, fp16"): "gradient scaling does not support closures",
        ("LBFGS", "ParameterScheduling"): "the optimizer has no field 'weight_decay'",
        ("LBFGS", "SharpnessAwareMinimization"): "computes gradients inside its step, with a closure",
        ("LBFGS", "TruncatedBPTT"): "hidden states of earlier chunks are no longer available",
    }.items()
}
LBFGS = "LBFGS"


def refusal(pair: tuple[str, str]) -> str | None:
    """The error of a pair, if it is refused."""
    ways = [(one, kind(one)) for one in pair]
    if "Predictions" in pair and any(getattr(signalfire.handlers, kind(one)).trains for one in pair):
        return "this engine only evaluates"
    return next((REFUSED[key] for a in ways[0] for b in ways[1] if (key := frozenset((a, b))) in REFUSED), None)


Cell = tuple[str, str]
"""An event and a phase in which receivers run."""


def cells_of(case: Case, engine: Engine | None = None) -> dict[Cell, dict[str, int]]:
    """Where the handler of a case has receivers, with their ranks; on this engine, or one of the case's own."""
    handler, engine = case.make(), engine or case.build()
    cells: dict[Cell, dict[str, int]] = defaultdict(dict)
    with engine.attach(handler):
        for signal in engine.signals.values():
            for connection in signal.connections:  # type: ignore[attr-defined]
                if connection.owner == handler.name:
                    cells[signal.name, connection.phase.name][connection.receiver.__name__] = connection.rank
    return cells


def pairs_that_meet() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The pairs that share an event, that are refused, or of which one has no receivers and works in the step itself.

    Returns:
        All of them, and those of the quick tier: the refused ones and a few of those that share a phase of an event.
    """
    engines = {
        one: one() for one in {case.build for case in CASES.values()}
    }  # building one for each case takes a second
    cells = {name: set(cells_of(case, engines[case.build])) for name, case in CASES.items()}
    meet, close = [], []
    for a, b in combinations([*CASES, LBFGS], 2):
        if kind(a) == kind(b) or (a, b) == ("Predictions", LBFGS):
            continue
        refused = refusal((a, b)) is not None
        one, other = cells[a], cells.get(b, set())
        if refused or not one or not other or {event for event, _ in one} & {event for event, _ in other}:
            meet.append((a, b))
        if not refused and any(event not in ("started", "ended") for event, _ in one & other):
            close.append((a, b))
    return meet, [pair for pair in meet if refusal(pair) is not None] + close[:: len(close) // 30]


PAIRS, QUICK_PAIRS = pairs_that_meet()


def trained(build: Callable[[], Engine], *handlers: Handler) -> Engine:
    engine = build()
    engine.attach(*handlers)
    seed_everything(0)
    engine.run(make_data(), max_epochs=2)
    return engine


RECORDS = {f"handlers.{name}" for name in ("csv_logger", "history", "json_lines_logger", "tensorboard")}
"""The states that hold what was recorded, or where a log of it ends: what is measured of the machine differs from run to run."""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch, as it compiles
@pytest.mark.filterwarnings("ignore:W06")
@pytest.mark.parametrize(
    ("one", "other"),
    quick(PAIRS, *QUICK_PAIRS),
    ids=[f"{a} x {b}: {'refused' if refusal((a, b)) else 'trains'}" for a, b in PAIRS],
)
def test_two_handlers_that_meet_train_together_in_either_order_or_are_refused(one: str, other: str) -> None:
    pair = one, other
    several = [CASES[one] for one in pair if one in CASES]
    build_both = next((one.build for one in several if one.build is not build), build_lbfgs if LBFGS in pair else build)
    if (reported := refusal(pair)) is not None:
        with pytest.raises(ValueError, match=reported):
            trained(build_both, *(one.make() for one in several))
        return
    measured = "DeviceStatistics" in pair
    ends = []
    for order in (several, several[::-1]):
        shutil.rmtree(FOLDER)  # what earlier runs have left there would be read by each later one
        FOLDER.mkdir()
        engine = trained(build_both, *(one.make() for one in order))
        ends.append({part: one for part, one in fingerprint(engine).items() if not (measured and part in RECORDS)})
        assert all(torch.isfinite(p).all() for root in engine.modules.values() for p in root.parameters())
    assert ends[0] == ends[1]


def test_every_shipped_handler_is_checked() -> None:
    assert {kind(case) for case in CASES} == {one.__name__ for one in shipped()}


class Leaky(Handler):
    """Breaks one promise, chosen by the class attribute: the check has to notice each."""

    broken = ""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def attached(self, engine: Engine) -> None:
        if self.broken == "trace":
            engine.connect(Events.ITERATION_COMPLETED, self.shift)
        if self.broken == "attaching":
            next(engine.model.parameters()).data += 1

    def shift(self, engine: Engine) -> None:
        torch.rand(1)

    @on(Events.ITERATION_COMPLETED)
    def act(self, engine: Engine) -> None:
        self.count += 1
        if self.broken == "state" and self.count % 4 == 0:
            next(engine.model.parameters()).data += 1
        if self.broken in ("observer", "draws"):
            torch.rand(1)


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:W47")
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("trace", "leaves receivers behind"),
        ("attaching", "attaching and detaching it changes the run"),
        ("state", "resumed after iteration"),
        ("observer", "changes training"),
        ("draws", r"leaky: act draws from the global generators.*self\.generator\(engine\)"),
    ],
)
def test_the_check_notices_a_broken_promise(broken: str, message: str) -> None:
    kind = type("Leaky", (Leaky,), {"broken": broken})
    with pytest.raises(AssertionError, match=message):
        check_handler(build, kind, make_data(), max_epochs=3, changes_training=broken != "observer")


COMMUTING = {
    ("MODEL_SETUP", "PREPARE"): "handlers that distribute the model exclude each other",
    ("FORWARD_STARTED", "PREPARE"): "NEFTune and StochasticDepth each begin with random numbers of their own",
    ("UPDATE_COMPLETED", "CHANGE"): "NEFTune and StochasticDepth each check that their modules were called",
    ("UPDATE_RETRIED", "CHANGE"): "each forgets what it noted itself",
    ("GRADIENTS_READY", "CHANGE"): "AutoClip and GradientClipping exclude each other",
    ("OPTIMIZER_STEP_COMPLETED", "PREPARE"): "MixedPrecision changes its scale, AutoClip notes a norm",
    (
        "STARTED",
        "PREPARE",
    ): "each prepares something of its own: a folder, scalers, announced names; Seeding has a rank",
    (
        "STARTED",
        "CHANGE",
    ): "each finds its own parameters, or builds its own schedule; none changes what another one finds",
    ("STARTED", "PERSIST"): "Rewindable and SpikeGuard exclude each other",
    ("CHECKPOINT_LOADED", "PERSIST"): "as in STARTED",
    ("ITERATION_COMPLETED", "PERSIST"): "as in STARTED",
    ("GRADIENTS_READY", "PREPARE"): "GradientNorms and SpikeGuard measure gradients, and change none",
    ("STARTED", "CONTROL"): "each checks the metrics that it reads",
    ("STARTED", "FINALIZE"): "DistributedDataParallel wraps modules; ParameterScheduling sets a field of the groups",
    ("CHECKPOINT_LOADED", "FINALIZE"): "as in STARTED",
    ("CHECKPOINT_LOADED", "CHANGE"): "LRScheduling compares numbers of steps; Freezing sets requires_grad",
    (
        "EPOCH_STARTED",
        "PREPARE",
    ): "Metrics resets its own sums; Validation runs another engine; UpdateFrequency checks",
    ("GET_BATCH_COMPLETED", "PREPARE"): "moving a batch and changing its dtype give the same result in either order",
    ("MODEL_SETUP", "CHANGE"): "handlers that distribute the model exclude each other",
    ("EXCEPTION_RAISED", "PREPARE"): "handlers that distribute the model exclude each other",
    ("INTERRUPTED", "PREPARE"): "handlers that distribute the model exclude each other",
    ("GRADIENTS_READY", "FINALIZE"): "the first to read the flags reads all of them; nothing is left for the second",
    ("LOSS_COMPUTED", "CHANGE"): "of MixUp and CutMix one mixes a batch",
    ("GET_BATCH_COMPLETED", "CHANGE"): "of MixUp and CutMix one mixes a batch",
    (
        "UPDATE_COMPLETED",
        "PREPARE",
    ): "TruncatedBPTT counts chunks; UpdateFrequency resets windows of its updates; penalties write "
    "metrics of their own",
    ("OPTIMIZER_STEP_COMPLETED", "CONTROL"): "LRScheduling sets the rate, ParameterScheduling any other field",
    ("ITERATION_COMPLETED", "PREPARE"): "TruncatedBPTT drops its chunks; Validation runs another engine",
    ("ITERATION_COMPLETED", "CONTROL"): "each moves a schedule or requests a stop, and reads nothing of the others",
    (
        "EPOCH_COMPLETED",
        "PREPARE",
    ): "Metrics and Validation write metrics of different names; the same name is an error",
    ("EPOCH_COMPLETED", "CONTROL"): "as in ITERATION_COMPLETED; LRScheduling and SWA(lr=) exclude each other",
    ("COMPLETED", "PREPARE"): "Checkpoint waits for its thread; Predictions, of an evaluation, joins its outputs",
    ("EVALUATION_STARTED", "PREPARE"): "of several averages one takes the place of the weights",
    ("CHECKPOINT_SAVING", "PREPARE"): "of several averages one takes the place of the weights",
    (
        "ENDED",
        "PERSIST",
    ): "each closes a file of its own; Preemption restores signal handlers, and every receiver still runs",
    ("WEIGHTS_LOADED", "CHANGE"): "each average starts again from the loaded weights",
    ("ENDED", "FINALIZE"): "handlers that distribute the model exclude each other",
    ("CHECKPOINT_LOADED", "PREPARE"): "Checkpoint reads its folder; FastDevRun sets its bounds",
    ("ENDED", "CHANGE"): "each closes something of its own, or restores what it changed",
}
"""Pairs of (event, phase) in which handlers of different classes share a rank, and why their order does not matter. Two handlers
of one class commute (Checkpoints write different files of one snapshot), or exclude each other (`Overrides.claim`)."""


@pytest.mark.moderate
def test_receivers_that_meet_in_a_cell_have_ranks_or_are_known_to_commute() -> None:
    cells: dict[Cell, dict[tuple[str, str], int]] = defaultdict(dict)
    for name, case in CASES.items():
        for cell, receivers in cells_of(case).items():
            if cell[1] != Phase.RECORD.name:
                cells[cell] |= {(kind(name), receiver): rank for receiver, rank in receivers.items()}
    collisions = set()
    for cell, meeting in cells.items():
        ranks: dict[int, set[str]] = defaultdict(set)
        for (of, _), rank in meeting.items():
            ranks[rank].add(of)
        if any(len(kinds) > 1 for kinds in ranks.values()):
            collisions.add((cell[0].upper(), cell[1]))
    assert collisions == set(COMMUTING), (
        "a new meeting wants a rank or a reason; a reason without a meeting wants to go"
    )


def test_a_handlers_own_generator_depends_on_seed_name_and_iteration_alone() -> None:
    class Drawing(Handler):
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.drawn: list[float] = []

        @on(Events.ITERATION_COMPLETED)
        def draw(self, engine: Engine) -> None:
            self.drawn.append(torch.rand((), generator=self.generator(engine)).item())

    def draws(*names: str) -> dict[str, list[float]]:
        engine = build()
        handlers = [Drawing(name) for name in names]
        engine.attach(*handlers)
        engine.run([make_data()[0]], max_epochs=4)
        return {handler.name: handler.drawn for handler in handlers}

    alone, together = draws("one"), draws("two", "one")
    assert alone["one"] == together["one"]
    assert together["one"] != together["two"]
    assert len(set(alone["one"])) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda name: GradientClipping(max_norm=1.0, name=name),
        lambda name: MixedPrecision("bf16", name=name),
        lambda name: LRScheduling(partial(StepLR, step_size=1), name=name),
        lambda name: GradientAccumulation(2, name=name),
        lambda name: Seeding(name=name),
        lambda name: DeviceTransfer("cpu", name=name),
    ],
)
def test_two_handlers_whose_order_would_matter_refuse_each_other_by_name(make: Callable[[str], Handler]) -> None:
    engine = build()
    engine.attach(make("first"))
    with pytest.raises(ValueError, match="both 'first' and 'second'"):
        engine.attach(make("second"))
    assert not engine.has("second")
    with engine.without("first"):
        engine.attach(make("second")).detach()
