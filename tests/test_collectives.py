"""How many collectives an iteration makes with several ranks: as many as plain DDP, whatever is attached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Update
from signalfire.handlers import (
    EMA,
    Accuracy,
    Average,
    Checkpoint,
    DistributedDataParallel,
    EarlyStopping,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    NonFiniteGuard,
    Validation,
)
from tests.processes import assert_alike, run_together

EPOCH = 8
SGD = partial(torch.optim.SGD, lr=0.1)


def collectives() -> int:
    """How many collectives this process has begun, in all groups."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def samples(count: int) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(count, 3), torch.randint(0, 2, (count,)))


def plain(wrap: Callable[[Any], nn.Module]) -> int:
    """The collectives of an iteration of a plain loop, once DDP's buckets are as they stay."""
    model = wrap(make_model())
    optimizer = SGD(model.parameters())
    seen = []
    for x, y in DataLoader(samples(4 * EPOCH), batch_size=4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append(collectives())
    return seen[-1] - seen[-2]


def sharded(model: Any, *, keep: bool) -> nn.Module:
    """The second layer is a unit; the first one belongs to the whole model, which torch keeps after its forward by default."""
    for part in (model[2], model):
        fully_shard(part, reshard_after_forward=False if keep else None)
    return model  # type: ignore[no-any-return]


def validation(model: nn.Module, folder: Path) -> Handler:
    evaluator = Engine(Update.supervised(F.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average(), accuracy=Accuracy()))
    return Validation(evaluator, DataLoader(samples(8), batch_size=2), every="1ep")


def usual(model: nn.Module, folder: Path) -> list[Handler]:
    return [
        validation(model, folder),
        EMA(0.9),
        GradientClipping(max_norm=1.0),
        NonFiniteGuard(),
        LRScheduling(lambda optimizer: StepLR(optimizer, 2)),
        EarlyStopping("loss", patience=5),
        Checkpoint(folder, monitor="loss", keep=1),
        History(),
        Metrics(seen=Average()),
    ]


STACKS: dict[str, Callable[[nn.Module, Path], list[Handler]]] = {
    "nothing": lambda model, folder: [],
    "accumulation": lambda model, folder: [GradientAccumulation(4)],
    "the usual handlers": usual,
    "both": lambda model, folder: [GradientAccumulation(4), *usual(model, folder)],
    "without clipping": lambda model, folder: [
        EMA(0.9), LRScheduling(lambda optimizer: StepLR(optimizer, 2)), Checkpoint(folder), History(), Metrics(seen=Average()),
    ],
}  # fmt: skip
SHARDED = ["nothing", "without clipping"]  # norms of shards need a collective of their own, as in a plain loop


def counted(stack: str, folder: Path, shard: bool = False, keep: bool = False) -> tuple[int, list[int]]:
    """The collectives of an iteration of a plain loop, and those of each iteration of the engine in its second epoch."""
    model = make_model()
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=model, seed=0)
    by_shards = FullyShardedDataParallel(units="2", reshard_after_forward=not keep, timeout=60.0)
    engine.attach(by_shards if shard else DistributedDataParallel(timeout=60.0))
    found = plain(partial(sharded, keep=keep) if shard else TorchDDP)
    engine.attach(*STACKS[stack](model, folder))
    seen: list[int] = []
    engine.connect(Events.ITERATION_STARTED, lambda engine: seen.append(collectives()))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(collectives()))
    size = engine.processes.world_size
    engine.run(DataLoader(samples(4 * size * EPOCH), batch_size=4, shuffle=True), max_epochs=2)
    second = seen[2 * EPOCH :]
    assert len(second) == 2 * EPOCH
    # From the end of one iteration to the end of the next, so that what lies between iterations counts, too.
    return found, [
        second[1] - second[0],
        *(after - before for before, after in zip(second[1::2], second[3::2], strict=False)),
    ]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.filterwarnings("ignore")
def test_an_iteration_makes_the_collectives_of_plain_ddp(stack: str, tmp_path: Path) -> None:
    of_plain, of_engine = assert_alike(run_together(counted, 2, stack, tmp_path))
    assert of_plain >= 1
    window = 4 if stack in ("accumulation", "both") else 1
    assert of_engine == ([0] * (window - 1) + [of_plain]) * (EPOCH // window)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stack", SHARDED)
@pytest.mark.filterwarnings("ignore")
def test_an_iteration_makes_the_collectives_of_plain_fsdp(stack: str, keep: bool, tmp_path: Path) -> None:
    of_plain, of_engine = assert_alike(run_together(counted, 2, stack, tmp_path, True, keep))
    # The weights of two modules are gathered, the unit's again for its backward, and two gradients are reduced.
    assert of_plain == (4 if keep else 5)
    # A notice has no bucket to travel in: it is one small collective, sent before the backward and read after it.
    assert of_engine == [of_plain + 1] * EPOCH


def counted_between_epochs(shuffled: bool) -> int:
    """The collectives from the last iteration of an epoch to the first one of the next."""
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=make_model(), seed=0)
    engine.attach(DistributedDataParallel(timeout=60.0))
    seen: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(collectives()))
    engine.connect(Events.GET_BATCH_STARTED, lambda engine: seen.append(collectives()))
    loader = DataLoader(samples(8 * EPOCH), batch_size=4, shuffle=shuffled)
    engine.run(loader if shuffled else list(loader), max_epochs=2)
    return max(after - before for before, after in zip(seen[1:-1:2], seen[2::2], strict=True))


@pytest.mark.moderate
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_ranks_agree_once_between_epochs_and_share_an_order_that_is_drawn(shuffled: bool) -> None:
    found = assert_alike(run_together(counted_between_epochs, 2, shuffled))
    assert found == (2 if shuffled else 1), "one for the state of the generators"


# ---- evaluations -----------------------------------------------------------------------------------------------------------


def counted_evaluation(batches: int, several: bool) -> list[int]:
    """The collectives of an evaluation over the ranks, whose data has a length: between its forwards, and after the last."""
    model = make_model()
    evaluator = Engine(Update.supervised(F.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average()))
    if several:
        evaluator.attach(Metrics(accuracy=Accuracy(), again=Accuracy(), name="more"))
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=model, seed=0)
    validation = Validation(evaluator, DataLoader(samples(2 * batches), batch_size=2), every="1ep")
    engine.attach(DistributedDataParallel(timeout=60.0), validation)
    seen: list[int] = []
    evaluator.connect(Events.FORWARD_STARTED, lambda engine: seen.append(collectives()))
    engine.connect(Events.EVALUATION_COMPLETED, lambda engine: seen.append(collectives()))
    engine.run(DataLoader(samples(8 * EPOCH), batch_size=4), max_epochs=1)
    assert len(seen) == batches // 2 + 1
    return [seen[-2] - seen[0], seen[-1] - seen[-2]]


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("batches", [4, 16])
@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_makes_one_reduction_at_its_end(batches: int, several: bool) -> None:
    between, at_the_end = assert_alike(run_together(counted_evaluation, 2, batches, several))
    assert between == 0
    assert at_the_end == 1 + several, "one of each Metrics"
