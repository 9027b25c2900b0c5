"""ElasticDataParallel in real processes: the same bits for any number of them, and those of a plain loop over the shards."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # as in the test of DDP: once here instead of in every process that is forked
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import MulticlassF1Score

from signalfire import Engine, Events, Handler, Update, allow, on
from signalfire.authoring import derived_seed
from signalfire.distributed.shards import shard_seed
from signalfire.handlers import (
    EMA,
    L1,
    L2,
    SWA,
    Accuracy,
    Average,
    ChannelsLast,
    Checkpoint,
    CSVLogger,
    Distillation,
    EarlyStopping,
    ElasticDataParallel,
    GradientAccumulation,
    GradientClipping,
    GradientNoise,
    Guards,
    LabelSmoothing,
    Lookahead,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixedPrecision,
    MixUp,
    MovingAverage,
    NonFiniteGuard,
    Penalty,
    Rewindable,
    SharpnessAwareMinimization,
    TruncatedBPTT,
    Validation,
)
from tests.kit import digest, linear
from tests.processes import assert_alike, run_together

pytestmark = pytest.mark.filterwarnings("ignore:C41")  # of processes that wait

SHARDS = 8
ADAM = partial(torch.optim.AdamW, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=0.1)
Batch = tuple[Tensor, Tensor]
Grads = list[Tensor]


# ---- three jobs, and a plain loop for all of them ----------------------------------------------------------------------


class Images(Dataset[Batch]):
    """Images that are shifted at random as they are read."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index + 1000 * self.seed)
        image = torch.randn(1, 8, 8, generator=generator).roll(int(torch.randint(0, 3, ())), 2)
        return image, torch.tensor(index % 3)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layer(self.embedding(tokens)).mean(1))


def table(seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(75, 6, generator=generator), torch.randint(0, 3, (75,), generator=generator))
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def texts(seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randint(0, 11, (96, 5), generator=generator), torch.arange(96) % 3)
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


def images(seed: int = 0) -> DataLoader[Any]:
    return DataLoader(Images(seed), batch_size=2, num_workers=1)


@dataclass
class Job:
    model: Callable[[], nn.Module]
    data: Callable[..., DataLoader[Any]]
    handlers: Callable[[], list[Handler]]
    mixes: bool = False
    autocast: bool = False
    window: int = 1
    clip: float | None = None
    epochs: int = 2


JOBS = {
    "mlp": Job(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)),
        table,
        lambda: [MixUp(0.4)],
        mixes=True,
    ),
    "cnn": Job(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        images,
        list,
    ),
    "transformer": Job(
        Transformer,
        texts,
        lambda: [
            MixedPrecision("bf16"),
            GradientAccumulation(4),
            GradientClipping(max_norm=0.1),
            EMA(0.9),
        ],
        autocast=True,
        window=4,
        clip=0.1,
    ),
}


def built(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return job.model()


def read(job: Job) -> list[list[Batch]]:
    """The batches of each epoch, as a single process reads them."""
    epochs: list[list[Batch]] = []
    engine = Engine(Update.supervised(F.cross_entropy, ADAM), model=built(job), seed=0)
    engine.connect(Events.EPOCH_STARTED, lambda engine: epochs.append([]))
    engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: epochs[-1].append(engine.state.batch))
    engine.run(job.data(), max_epochs=job.epochs)
    return epochs


def tree(leaves: Sequence[Grads | None]) -> Grads | None:
    """The sum of 2**n leaves, of which some may be missing."""
    if len(leaves) == 1:
        return leaves[0]
    left, right = tree(leaves[: len(leaves) // 2]), tree(leaves[len(leaves) // 2 :])
    return (left or right) if left is None or right is None else [a + b for a, b in zip(left, right, strict=True)]


def loss_of(job: Job, model: nn.Module, batch: Batch, step: int, shard: int) -> Tensor:
    inputs, targets = batch
    if not job.mixes:
        with torch.autocast("cpu", torch.bfloat16) if job.autocast else nullcontext():
            loss: Tensor = F.cross_entropy(model(inputs), targets)
            return loss
    generator = torch.Generator().manual_seed(derived_seed(0, "mixup", step, *([shard] if shard else [])))
    first, second = torch._standard_gamma(torch.full((2,), 0.4, dtype=torch.float64), generator=generator).tolist()
    partner = torch.randperm(len(inputs), generator=generator)
    share = first / (first + second)
    output = model(inputs * share + inputs[partner] * (1 - share))
    mixed: Tensor = F.cross_entropy(output, targets) * share + F.cross_entropy(output, targets[partner]) * (1 - share)
    return mixed


def plain(job: Job, epochs: Sequence[Sequence[Batch]]) -> dict[str, Any]:
    """A plain loop: seeds by shard, backwards one by one, a tree, one step."""
    model = built(job)
    parameters, buffers = list(model.parameters()), list(model.buffers())
    optimizer, step, losses = ADAM(parameters), 0, []
    for data in epochs:
        rounds = [data[start : start + SHARDS] for start in range(0, len(data), SHARDS)]
        held, weight = None, 0.0
        for place, batches in enumerate(rounds, 1):
            step, before = step + 1, [b.clone() for b in buffers]
            leaves: list[Any] = []
            own: list[Any] = []
            total = sum(len(x) for x, _ in batches)
            for shard, batch in enumerate(batches):
                if shard == 1:
                    after = [b.clone() for b in buffers]
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
                torch.manual_seed(shard_seed(0, step, shard))
                optimizer.zero_grad()
                share = len(batch[0]) * SHARDS / total
                loss = loss_of(job, model, batch, step, shard)
                (loss * share if share != 1 else loss).backward()
                leaves.append([p.grad for p in parameters])
                own.append([torch.tensor([float(loss.detach()) * share, share], dtype=torch.float64)])
                weight += share
            for buffer, value in zip(buffers, after, strict=True):
                buffer.copy_(value)
            missing = [None] * (SHARDS - len(batches))
            of_step, (reported,) = tree(leaves + missing), tree(own + missing) or []
            losses.append(float((reported[0] / reported[1]).float()))
            held = of_step if held is None else [a + b for a, b in zip(held, of_step or [], strict=True)]
            if place % job.window == 0 or place == len(rounds):
                for parameter, gradient in zip(parameters, held or [], strict=True):
                    parameter.grad = gradient / weight
                if job.clip is not None:
                    nn.utils.clip_grad_norm_(parameters, job.clip)
                optimizer.step()
                held, weight = None, 0.0
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "losses": losses}


def trained(name: str) -> dict[str, Any]:
    """What a process has after the job."""
    job = JOBS[name]
    engine = Engine(Update.supervised(F.cross_entropy, ADAM), model=built(job), seed=0)
    engine.attach(ElasticDataParallel(shards=SHARDS), *job.handlers())
    losses: list[float] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(float(engine.loss)))
    engine.run(job.data(), max_epochs=job.epochs)
    return {
        "model": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict()["state"],
        "losses": losses,
        "handlers": {
            handler.name: handler.state_dict() for handler in job.handlers() for handler in [engine[type(handler)]]
        },
    }


NAMES = ["mlp", *(pytest.param(name, marks=pytest.mark.moderate) for name in ("cnn", "transformer"))]
SIZES = [2, pytest.param(3, marks=pytest.mark.moderate), *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]


@pytest.mark.parametrize("name", NAMES)
def test_one_process_is_a_plain_loop_over_the_shards(name: str) -> None:
    expected, found = plain(JOBS[name], read(JOBS[name])), trained(name)
    assert len(found["losses"]) > 3
    for part, value in expected.items():
        assert digest(found[part]) == digest(value), part


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_processes_ends_with_the_bits_of_one(name: str, size: int) -> None:
    assert digest(assert_alike(run_together(trained, size, name))) == digest(trained(name))


# ---- resuming with another number ---------------------------------------------------------------------------------------


class Lost(Exception):
    """The processes are lost."""


def lose(engine: Engine, until: int | None) -> None:
    if engine.state.iteration == until:
        raise Lost


def lived(folder: Path, until: int | None, name: str = "mlp") -> dict[str, Any]:
    """What a process has after it has resumed from the newest checkpoint and gone on until an iteration."""
    job = JOBS[name]
    engine = Engine(Update.supervised(F.cross_entropy, ADAM), model=built(job), seed=0)
    engine.attach(
        ElasticDataParallel(shards=SHARDS),
        *([GradientAccumulation(3), EMA(0.9)] if job.window == 1 else []),
        *job.handlers(),
        Metrics(loss=Average(), accuracy=Accuracy()),
        Validation(job.data(1), accuracy=Accuracy(), f1=MulticlassF1Score(3), every="4it"),
        EarlyStopping("val_loss", patience=50),
        LRScheduling(
            lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), monitor="val_loss"
        ),
        CSVLogger(folder / "log.csv"),
        Checkpoint(folder, every="2it", resume=True),
    )
    engine.connect(Events.UPDATE_STARTED, lambda engine: lose(engine, until))
    with pytest.raises(Lost) if until is not None else nullcontext():
        engine.run(job.data(), max_epochs=job.epochs * 2)
    rows = (folder / "log.csv").read_text() if (folder / "log.csv").exists() else ""
    return {
        "model": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict()["state"],
        "metrics": dict(engine.state.metrics),
        "ema": engine["ema"].state_dict(),
        "rows": rows if until is None and engine.processes.is_rank_zero else "",
    }


def swept(folder: Path, until: int | None) -> dict[str, Any]:
    """As `lived`, with steps that compute their gradients twice, over batches that a state inside a window has to hold."""
    engine = classifier(SGD)
    engine.attach(
        ElasticDataParallel(shards=SHARDS),
        SharpnessAwareMinimization(),
        GradientAccumulation(3),
        Checkpoint(folder, every="1it", keep=2, resume=True),
    )
    engine.connect(Events.UPDATE_STARTED, lambda engine: lose(engine, until))
    with pytest.raises(Lost) if until is not None else nullcontext():
        engine.run(numbers(missing=[3, 17]), max_epochs=3)
    return dict(engine.model.state_dict())


@pytest.mark.moderate
def test_a_state_inside_a_window_has_the_batches_of_all_shards(tmp_path: Path) -> None:
    undisturbed = swept(tmp_path / "undisturbed", None)
    for size, until in ((2, 2), (1, 3), (3, 7)):
        run_together(swept, size, tmp_path / "moved", until)
    assert digest(run_together(swept, 2, tmp_path / "moved", None)[1]) == digest(undisturbed)


@pytest.mark.moderate
def test_a_run_goes_on_with_any_number_of_processes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    undisturbed = lived(tmp_path / "undisturbed", None)
    for size, until in ((2, 3), (1, 6), (3, 10), (4, 11)):
        run_together(lived, size, tmp_path / "moved", until)
    first, *others = run_together(lived, 2, tmp_path / "moved", None)
    assert undisturbed["rows"].count("\n") > 10
    assert digest(first) == digest(undisturbed)
    assert digest([other | {"rows": ""} for other in others]) == digest([first | {"rows": ""}])


# ---- one process makes a step of several again ---------------------------------------------------------------------------


def kept(folder: Path, until: int, window: int = 1) -> tuple[Engine, dict[int, tuple[float, str]]]:
    """A training that keeps states, and of its iterations the loss and the gradients."""
    engine, seen = classifier(), dict[int, tuple[float, str]]()
    engine.attach(
        ElasticDataParallel(shards=SHARDS),
        Rewindable(every="2it"),
        Checkpoint(folder, every="5it", resume=True),
        GradientAccumulation(window),
    )

    @engine.on(Events.GRADIENTS_READY)
    def look(engine: Engine) -> None:
        gradients = b"".join(p.grad.numpy().tobytes() for p in engine.model.parameters() if p.grad is not None)
        seen[engine.state.iteration] = float(engine.loss or 0), hashlib.sha256(gradients).hexdigest()

    engine.run(table(), max_iters=until)
    return engine, seen


def seen_by_each(folder: Path, window: int) -> dict[int, tuple[float, str]]:
    return kept(folder, 11, window)[1]


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 2])
def test_a_step_of_several_processes_is_made_again_by_one(window: int, tmp_path: Path) -> None:
    seen = run_together(seen_by_each, 2, tmp_path, window)[1]
    engine, _ = kept(tmp_path, 11, window)
    for iteration in (9, 11):
        made, again = engine.replay(iteration).run().times
        assert made == again
        if window == 1:
            assert (made.loss, made.gradients) == seen[iteration]
    closing = max(seen)
    assert engine.replay(closing).run().times[0].gradients == seen[closing][1]


@pytest.mark.moderate
def test_the_samples_of_a_step_are_those_of_all_its_shards() -> None:
    engine, taken = classifier(), list[Tensor]()
    engine.attach(ElasticDataParallel(shards=2), Rewindable(every="2it"))
    data = table()
    inputs = data.dataset[:][0]
    engine.connect(Events.GET_BATCH_COMPLETED(once=5), lambda engine: taken.append(engine.state.batch[0].clone()))
    engine.run(data, max_iters=6)
    samples = engine.replay(5).samples
    assert torch.equal(torch.cat(taken[:2]), inputs[samples])  # those after it are of the replay
    inputs[samples[6]] *= 100  # of the second shard
    assert engine.replay(5).rank_samples()[0].sample == samples[6]


# ---- what it needs -------------------------------------------------------------------------------------------------------


def peak_of(shards: int, layers: int, width: int) -> float:
    """The largest memory that a run allocates at once, as a multiple of the gradients."""
    layered = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    engine = Engine(Update.supervised(F.mse_loss, SGD), model=layered, seed=0)
    engine.attach(ElasticDataParallel(shards=shards))
    data = [(torch.randn(1, width), torch.randn(1, width))] * shards * 2
    engine.run(data, max_epochs=1, check=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        engine.run(data, max_epochs=2, check=False)
    recorded = found.profiler.kineto_results.events()
    events = sorted((one for one in recorded if one.name() == "[memory]"), key=lambda one: int(one.start_ns()))
    return max(accumulate(int(one.nbytes()) for one in events)) / sum(4 * p.numel() for p in layered.parameters())


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_one_process_holds_as_many_gradients_as_the_tree_is_high(shards: int) -> None:
    assert math.log2(shards) + 1 <= peak_of(shards, 1, 500) < math.log2(shards) + 1.1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_hold_a_few_buckets_besides(size: int) -> None:
    layers, width = 20, 1500
    held = 2 * 5  # copies of a bucket in an exchange; torch's threads may still hold those of the one before
    buckets = held * 25 * 2**20 / (4 * layers * width**2)
    assert max(run_together(peak_of, size, SHARDS, layers, width)) < math.log2(SHARDS / size) + 1 + buckets


# ---- beside other handlers, and other data ------------------------------------------------------------------------------


def numbers(*, spoilt: int | None = None, missing: Sequence[int] = ()) -> list[Batch | None]:
    """30 batches, of which one is NaN, and some are missing."""
    generator = torch.Generator().manual_seed(0)
    data: list[Batch | None] = [
        (torch.randn(3, 6, generator=generator), torch.randint(0, 3, (3,), generator=generator)) for _ in range(30)
    ]
    for place in missing:
        data[place] = None
    if spoilt is not None and (batch := data[spoilt]) is not None:
        data[spoilt] = batch[0] * math.nan, batch[1]
    return data


class Unsized:
    def __iter__(self) -> Iterator[Any]:
        return iter(numbers())


def pair_of_players() -> Engine:
    """A generator and a discriminator, which draw noise."""
    torch.manual_seed(0)

    def noise(engine: Engine, batch: Batch) -> Tensor:
        fake: Tensor = engine.modules["generator"](torch.randn(len(batch[0]), 4))
        return fake

    def generate(engine: Engine, batch: Batch) -> Tensor:
        return F.softplus(-engine.modules["discriminator"](noise(engine, batch))).mean()

    def discriminate(engine: Engine, batch: Batch) -> Tensor:
        judge = engine.modules["discriminator"]
        return (F.softplus(-judge(batch[0])) + F.softplus(judge(noise(engine, batch).detach()))).mean()

    updates = [
        Update.from_function(generate, ADAM, name="generate", parameters="generator"),
        Update.from_function(discriminate, ADAM, name="discriminate", parameters="discriminator"),
    ]
    return Engine(updates, model={"generator": nn.Linear(4, 6), "discriminator": nn.Linear(6, 1)}, seed=0)


def classifier(optimizer: Any = ADAM) -> Engine:
    return Engine(Update.supervised(F.cross_entropy, optimizer), model=built(JOBS["mlp"]), seed=0)


def convolutions() -> Engine:
    """Images in channels-last layout, and a buffer that the forward replaces."""

    class Smoothed(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            return x - self.mean

    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), Smoothed(), nn.Flatten(), nn.Linear(64, 3)]
    return Engine(Update.supervised(F.cross_entropy, ADAM), model=nn.Sequential(*layers), seed=0)


def mixed_batch(samples: list[Batch]) -> Batch:
    """A batch that is mixed as it is collated."""
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    return inputs + torch.rand(()) * inputs[torch.randperm(len(inputs))], targets


def collated() -> DataLoader[Any]:
    return DataLoader(table().dataset, batch_size=4, collate_fn=mixed_batch)


def z_loss(engine: Engine) -> Tensor:
    loss: Tensor = engine.state.update.output.logsumexp(1).square().mean()
    return loss


class Drawn:
    """Batches that are drawn as they are read by their index."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Batch:
        return torch.randn(3, 6), torch.arange(3)


def stopped() -> Engine:
    engine = classifier()
    engine.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: engine.terminate("enough"))
    return engine


LBFGS = partial(torch.optim.LBFGS, lr=0.01, max_iter=3)
CASES: dict[str, tuple[Callable[[], Engine], Callable[[], Any], Callable[[], list[Handler]]]] = {
    "a step is computed twice": (classifier, table, lambda: [SharpnessAwareMinimization(), GradientAccumulation(2)]),
    "a closure": (partial(classifier, LBFGS), table, list),
    "two updates": (pair_of_players, table, list),
    "a skipped step": (classifier, partial(numbers, spoilt=13), lambda: [NonFiniteGuard()]),
    "missing batches": (classifier, partial(numbers, missing=[3, 9, 8, 28]), list),
    "other handlers": (classifier, table, lambda: [L2(1e-2), LabelSmoothing(0.1), Lookahead(k=2), GradientNoise(0.1)]),
    "averages": (classifier, table, lambda: [SWA(start=2), L1(1e-3)]),
    "pieces": (classifier, table, lambda: [MicroBatching(2, halve_on_oom=False), GradientAccumulation(2)]),
    "terms of the loss": (classifier, table, lambda: [Penalty(z_loss, 1e-2), Distillation(built(JOBS["mlp"]))]),
    "layouts and buffers": (convolutions, images, lambda: [ChannelsLast(), GradientClipping(max_norm=0.05)]),
    "a collate function that draws": (classifier, collated, list),
    "an index that draws": (classifier, Drawn, list),
    "a stop": (stopped, table, lambda: [Metrics(loss=Average())]),
    "no length": (classifier, Unsized, list),
}


def composed(case: str) -> dict[str, Any]:
    build, data, handlers = CASES[case]
    engine = build()
    engine.attach(ElasticDataParallel(shards=SHARDS, shard_policy="round_robin"), *handlers())
    losses: list[Any] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append([one.loss for one in engine.updates]))
    with allow("W19"):  # of the step that is skipped
        engine.run(data(), max_epochs=3)
    modules = {name: module.state_dict() for name, module in engine.modules.items()}
    steps = [update.steps for update in engine.updates]
    return {"modules": modules, "losses": losses, "steps": steps, "metrics": dict(engine.state.metrics)}


@pytest.mark.moderate
@pytest.mark.parametrize("case", CASES)
def test_compositions_end_with_the_same_bits_on_one_two_and_three_processes(case: str) -> None:
    alone = composed(case)
    assert alone["steps"][0] >= 6
    for size in (2, 3):
        assert {digest(one) for one in run_together(composed, size, case)} == {digest(alone)}


def test_a_skipped_step_is_skipped_by_all_and_a_missing_shard_adds_nothing() -> None:
    engine = classifier()
    engine.attach(ElasticDataParallel(shards=2), guard := NonFiniteGuard())
    with allow("W19"):
        engine.run(numbers(spoilt=13), max_epochs=1)
    assert (guard.skipped, engine.updates[0].steps) == ({"main": 1}, 14)
    given, missing = (Engine(Update.supervised(F.cross_entropy, SGD), model=linear(6, 3), seed=0) for _ in range(2))
    for one in (given, missing):
        one.attach(ElasticDataParallel(shards=2))
    batch = numbers()[0]
    given.run([batch, batch], max_epochs=1)
    missing.run([batch, None], max_epochs=1)
    assert digest(given.model.state_dict()) == digest(missing.model.state_dict())


# ---- what is refused, by name -------------------------------------------------------------------------------------------


class Counting(Handler):
    """Counts forwards, on the process that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @on(Events.FORWARD_COMPLETED, reads=["output"], writes=[])
    def add(self, engine: Engine) -> None:
        self.count += 1


class OfShards(Counting):
    by_shard = True

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, float]] = []

    @on(Events.FORWARD_STARTED, reads=[], writes=[])
    def draw(self, engine: Engine) -> None:
        self.drawn.append((engine.state.shard, torch.rand((), generator=self.generator(engine)).item()))


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (Counting, "'counting' acts at FORWARD_COMPLETED"),
        (
            partial(MicroBatching, 2),
            r"'micro_batching': halve_on_oom=True does not work with shards, .* halve_on_oom=False",
        ),
        (lambda: TruncatedBPTT(2), "'truncated_bptt' "),
        (Guards, "'guards' reads the batch or the output at"),
        (lambda: Metrics(loss=MovingAverage()), "depends on the order of the batches"),
    ],
)
def test_what_would_depend_on_the_number_of_processes_is_refused_by_name(handler: Any, reason: str) -> None:
    engine = classifier()
    engine.attach(ElasticDataParallel(shards=2), handler())
    with pytest.raises(ValueError, match=reason):
        engine.run(numbers(), max_epochs=1)


def test_a_handler_that_declares_itself_is_called_once_for_each_shard() -> None:
    engine = classifier()
    places: list[tuple[int, int, int]] = []
    engine.attach(ElasticDataParallel(shards=4), counting := OfShards())
    engine.connect(
        Events.GET_BATCH_COMPLETED(every=2),
        lambda engine: places.append((engine.state.iteration, engine.state.shard, len(engine.state.batch[0]))),
    )
    engine.run(numbers()[:10], max_epochs=1)
    assert counting.count == 10  # the last step has two shards
    assert places == [(2, shard, 3) for shard in range(4)]
    assert len({number for _, number in counting.drawn}) == 10
    assert [shard for shard, _ in counting.drawn] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_sampler_of_ranks_and_a_batch_that_is_replaced_for_the_whole_step_are_refused() -> None:
    data = table().dataset
    engine = classifier()
    engine.attach(ElasticDataParallel(shards=2))
    with pytest.raises(ValueError, match="a sampler that splits the data over the ranks"):
        engine.run(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0)), max_epochs=1)
    engine.connect(Events.ITERATION_STARTED, lambda engine: setattr(engine.state, "batch", numbers()[0]))
    with pytest.raises(TypeError, match=r"state\.batch was set to a tuple outside a shard's events"):
        engine.run(numbers(), max_epochs=1)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_batch_that_a_receiver_skips_skips_the_step(shard: int) -> None:
    engine, skipped = classifier(), []

    def skip(engine: Engine) -> None:
        if (engine.state.iteration, engine.state.shard) == (2, shard):
            engine.state.update.skip("too short")

    engine.attach(ElasticDataParallel(shards=2))
    engine.connect(Events.GET_BATCH_COMPLETED, skip)
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: skipped.append(engine.state.update.skipped))
    engine.run(numbers()[:6], max_epochs=1)
    assert (skipped, engine.updates[0].steps) == ([None, "too short", None], 2)


def test_a_parameter_without_a_gradient_is_refused_by_name() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "spare": nn.Linear(1, 1)})
    update = Update(lambda engine, batch: model["used"](batch[0]), lambda engine, output, batch: output.sum(), SGD)
    engine = Engine(update, model=model, seed=0)
    engine.attach(ElasticDataParallel(shards=2))
    with pytest.raises(RuntimeError, match=r"shard 0 computes no gradient for model\.spare\.weight"):
        engine.run(numbers(), max_epochs=1, check=False)


def test_a_parameter_that_the_forward_changes_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=model, seed=0)
    engine.attach(ElasticDataParallel(shards=2))
    with pytest.raises(RuntimeError, match="the forward pass changes the parameter 'weight' of a Embedding"):
        engine.run([(torch.arange(6).view(2, 3), torch.arange(2))] * 4, max_epochs=1)


def test_one_shard_is_a_plain_training_with_numbers_of_its_own() -> None:
    engines = [Engine(Update.supervised(F.cross_entropy, SGD), model=linear(6, 3), seed=0) for _ in range(2)]
    engines[0].attach(ElasticDataParallel(shards=1))
    for engine in engines:
        engine.run(numbers(), max_epochs=1)
    assert digest(engines[0].model.state_dict()) == digest(engines[1].model.state_dict())


@pytest.mark.parametrize("shards", [0, 6, 2.0, True])
def test_the_number_of_shards_is_a_power_of_two(shards: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="shards"):
        ElasticDataParallel(shards=shards)


def test_a_state_of_other_shards_resumes_with_a_warning() -> None:
    first = classifier()
    first.attach(ElasticDataParallel(shards=4))
    first.run(numbers(), max_iters=3)
    for handlers, named in (([ElasticDataParallel(shards=2)], "steps with 2 shards"), ([], "steps without shards")):
        engine = classifier()
        engine.attach(handlers)
        engine.load_state_dict(first.state_dict(), allow=["elastic_data_parallel"] if not handlers else [])
        with allow("W32"), pytest.warns(RuntimeWarning, match=f"steps with 4 shards, and the run resumes with {named}"):
            engine.run(numbers(), max_epochs=1)


def why_idle(shards: int) -> list[str]:
    """What is said in a process about those that wait."""
    engine = classifier()
    engine.attach(ElasticDataParallel(shards=shards))
    engine.run(numbers(), max_iters=1)
    return [one.sentence for one in engine.findings.of_run().of("C41")]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("processes", "shards", "said"),
    [
        (2, 1, "1 of 2 processes is idle, because there are more processes than shards (1)"),
        (3, 4, "1 of 3 processes is idle, because the 4 shards can be divided evenly only among a power-of-two number"),
        (4, 2, "2 of 4 processes are idle, because there are more processes than shards (2)"),
    ],
)
def test_processes_that_wait_are_reported_with_the_reason(processes: int, shards: int, said: str) -> None:
    first, *_ = run_together(why_idle, processes, shards)
    assert len(first) == 1
    assert said in first[0]
