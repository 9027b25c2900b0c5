"""Split layers within sharded data parallelism: four processes as a mesh of two by two, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, Metric

from signalfire import Engine, Events, Handler, Update
from signalfire.distributed import is_sharded, whole_tensor
from signalfire.handlers import (
    EMA,
    AdaptiveGradientClipping,
    Average,
    Checkpoint,
    DistributedDataParallel,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientClipping,
    GradientNorms,
    Metrics,
    NonFiniteGuard,
    Predictions,
    TensorParallel,
    Validation,
)
from tests.kit import quick
from tests.processes import run_together

from .test_tensor_parallel import ADAM, CLOSE, PLAN, SGD, Block, assert_close, dataset, full, rank


class Model(nn.Module):
    """Layers to be split between layers that are not."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(8, 3)
        for block in self.blocks:
            block.dropout.p = dropout  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def loader(size: int = 8, samples: int = 48) -> DataLoader[Any]:
    """Shuffled by a generator that each rank seeds otherwise: all use the order of rank 0."""
    order = torch.Generator().manual_seed(3 + rank())
    return DataLoader(dataset(samples), batch_size=size, shuffle=True, generator=order)


def make(
    *handlers: Handler,
    optimizer: Any = ADAM,
    model: nn.Module | None = None,
    plan: Any = PLAN,
    first: bool = True,
    size: int = 2,
    units: Any = Block,
    **options: Any,
) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model or Model(), seed=0)
    split = TensorParallel(plan, size=size, timeout=60.0)
    sharded = FullyShardedDataParallel(units=units, timeout=60.0, **options)
    engine.attach(*((split, sharded) if first else (sharded, split)), *handlers)
    torch.manual_seed(7 + rank())
    return engine


# ---- as one process -----------------------------------------------------------------------------------------------


def plain(steps: int, accumulate: int) -> dict[str, Any]:
    """A plain loop over the batches of both groups together: clipping, averages, accumulation."""
    torch.manual_seed(0)
    model = Model()
    optimizer = ADAM(model.parameters())
    average: list[Tensor] = []
    data, made, norms = loader(16), 0, []
    while made < steps:
        for place, (x, y) in enumerate(data, 1):
            last = place == len(data)
            length = accumulate if place <= len(data) // accumulate * accumulate else len(data) % accumulate
            (nn.functional.mse_loss(model(x), y) / length).backward()
            if place % accumulate and not last:
                continue
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
            optimizer.step()
            optimizer.zero_grad()
            made += 1
            with torch.no_grad():
                if made == 1:
                    average = [p.detach().clone() for p in model.parameters()]
                else:
                    torch._foreach_lerp_(average, list(model.parameters()), 0.1)
            if made == steps:
                break
    names = [key for key, _ in model.named_parameters()]
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return {"weights": weights, "averages": dict(zip(names, average, strict=True)), "norm": norms[-1]}


def usual(first: bool, **options: Any) -> dict[str, Any]:
    clipping = GradientClipping(0.2)
    handlers = [clipping, EMA(0.9), GradientAccumulation(2), GradientNorms(), Metrics(loss=Average())]
    engine = make(*handlers, first=first, **options)
    placed: dict[str, str] = {}

    def look(engine: Engine) -> None:
        for key, p in engine.model.named_parameters():
            assert is_sharded(p)
            assert p.grad is None or p.grad.placements == p.placements
            placed[key] = str([str(one) for one in p.placements])

    engine.connect(Events.GRADIENTS_READY, look)
    engine.run(loader(), max_steps=20)
    averages = {key: whole_tensor(value).clone() for key, value in engine.find(EMA).parameter_copies().items()}
    assert clipping.total_norm is not None
    before = engine.processes.waited
    engine.group.data.gather("here")
    assert engine.group.data.waited == engine.processes.waited > before
    return {
        "weights": full(engine),
        "averages": {key.removeprefix("model."): value for key, value in averages.items()},
        "norm": clipping.total_norm,
        "placed": placed,
        "read": engine.group.data.rank,
    }


def both_orders() -> list[dict[str, Any]]:
    return [usual(True), usual(False), usual(True, reshard_after_forward=False, reduce_every_batch=True)]


@pytest.mark.slow
def test_two_by_two_ranks_train_as_a_plain_loop_over_all_batches_whatever_is_attached_first() -> None:
    expected = plain(20, 2)
    results = run_together(both_orders, 4)
    assert [one["read"] for one, *_ in results] == [0, 0, 1, 1]
    for result in results:
        for one in result:
            assert_close(one["weights"], expected["weights"])
            assert_close(one["averages"], expected["averages"])
            assert one["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for one, same in zip(result, results[0], strict=True):
            assert_close(one["weights"], same["weights"], close=0.0)
        assert_close(result[0]["weights"], result[1]["weights"], close=0.0)
    placed = results[0][0]["placed"]
    assert placed["blocks.0.norm.weight"] == "['S(0)', 'R']"
    assert placed["blocks.0.down.weight"] == "['S(0)', 'S(1)']"
    assert placed["blocks.0.up.weight"].startswith("['_S(0")


# ---- with what it meets --------------------------------------------------------------------------------------------


def uneven(samples: int) -> dict[str, Any]:
    """Epochs whose last batches are unequal: a smaller one for a group, or none."""
    engine = make(optimizer=SGD)
    engine.run(loader(samples=samples), max_epochs=3)
    return {"weights": full(engine)}


def uneven_alone(samples: int) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=Model(), seed=0)
    engine.run(loader(16, samples), max_epochs=3)
    return {"weights": full(engine)}


def guarded(alone: bool) -> dict[str, Any]:
    handlers = [AdaptiveGradientClipping(0.02), NonFiniteGuard()]
    if alone:
        torch.manual_seed(0)
        engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=Model(), seed=0)
        engine.attach(*handlers)
    else:
        engine = make(*handlers, optimizer=SGD)
    engine.run(loader(16 if alone else 8), max_iters=12)
    return {"weights": full(engine)}


class Seen(Metric):
    """The number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.count += len(output)  # type: ignore[operator]

    def compute(self) -> Tensor:
        count: Tensor = self.count  # type: ignore[assignment]
        return count


def evaluated(alone: bool) -> dict[str, Any]:
    """Metrics, torchmetrics and predictions of 5 batches, of which one group has 3 and the other 2."""
    predictions = Predictions()
    if alone:
        torch.manual_seed(0)
        engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=Model(), seed=0)
    else:
        engine = make(optimizer=SGD)
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=engine.modules["model"])
    evaluator.attach(Metrics(loss=Average(), error=MeanSquaredError(), seen=Seen()), predictions)
    engine.attach(Validation(evaluator, DataLoader(dataset(37, seed=2), batch_size=8)))
    engine.run(loader(16 if alone else 8), max_epochs=2)
    names = ("loss", "error", "seen")
    return {
        "metrics": {key: torch.as_tensor(engine.state.metrics[key], dtype=torch.float64) for key in names},
        "predictions": {"all": predictions.outputs},
    }


SCENES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]] = {
    "a smaller last batch": (lambda: uneven(44), lambda: uneven_alone(44)),
    "no last batch": (lambda: uneven(40), lambda: uneven_alone(40)),
    "clipping by unit, and a guard": (lambda: guarded(False), lambda: guarded(True)),
    "an evaluation": (lambda: evaluated(False), lambda: evaluated(True)),
}


def all_scenes() -> dict[str, Any]:
    return {name: scene() for name, (scene, _) in SCENES.items()}


@pytest.mark.slow
def test_with_what_it_meets_four_ranks_come_to_what_one_process_does() -> None:
    results = run_together(all_scenes, 4)
    for name, (_, alone) in SCENES.items():
        expected = alone()
        for part, values in expected.items():
            for found in results[:1] if part == "predictions" else results:  # rank 0 has those of all
                assert_close(found[name][part], values)


def dropping() -> tuple[dict[str, Tensor], Tensor]:
    """The local parts of the copies after a run with dropout, and what the first block let through in the first forward."""
    engine = make(model=Model(dropout=0.5), optimizer=SGD)
    kept: list[Tensor] = []
    engine.model.blocks[0].dropout.register_forward_hook(lambda module, args, output: kept.append(output.detach() != 0))
    engine.run(loader(), max_iters=12)
    local = {
        key: p.to_local().detach().clone()
        for key, p in engine.model.named_parameters()
        if p.placements[-1].is_replicate()
    }
    return local, kept[0]


@pytest.mark.slow
def test_the_ranks_of_a_group_draw_alike_and_the_groups_do_not() -> None:
    (first, kept), (second, kept_beside), (_, kept_elsewhere), _ = run_together(dropping, 4)
    assert len(first) > 6
    assert_close(first, second, close=0.0)
    assert torch.equal(kept, kept_beside)
    assert not torch.equal(kept, kept_elsewhere)


def made_plain() -> list[dict[str, Tensor]]:
    engine = make(optimizer=SGD)
    engine.run(loader(), max_epochs=1)
    found = [full(engine)]
    with pytest.raises(RuntimeError, match=r"call unshard\(engine\) on FullyShardedDataParallel first"):
        engine.find(TensorParallel).unsplit(engine)
    engine.find(FullyShardedDataParallel).unshard(engine)
    engine.find(TensorParallel).unsplit(engine)
    assert not any(is_sharded(p) for p in engine.model.parameters())
    modules = list(engine.model.modules())
    assert not any(hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks))
    engine.model(torch.ones(2, 5)).sum().backward()
    engine.model.zero_grad()
    found.append(full(engine))
    engine.run(loader(), max_epochs=2)  # it is split and sharded again
    assert is_sharded(engine.model.first.weight)
    engine.run(loader(), max_epochs=3)
    found.append(full(engine))
    engine.find(FullyShardedDataParallel).unshard(engine)
    engine.run(loader(), max_epochs=4)  # without unsplit() as well
    assert all(map(is_sharded, engine.model.parameters()))
    return found


@pytest.mark.slow
def test_it_is_made_plain_by_both_handlers_and_split_and_sharded_by_a_further_run() -> None:
    results = run_together(made_plain, 4)
    for before, plain_again, _ in results:
        assert_close(plain_again, before, close=0.0)
    for _, _, ended in results:
        assert_close(ended, results[0][2], close=0.0)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def train(folder: Path, iterations: int, resumed: bool, batch_size: int) -> dict[str, Any]:
    checkpoint = Checkpoint(folder, every="4it", resume=resumed)
    engine = make(EMA(0.9), checkpoint, GradientClipping(0.2))
    engine.run(loader(batch_size), max_iters=iterations)
    averages = {key: whole_tensor(value).clone() for key, value in engine.find(EMA).parameter_copies().items()}
    return {"weights": full(engine), "averages": averages}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), quick([(4, 1), (4, 4), (1, 4), (4, 8)], (4, 1)))
@pytest.mark.filterwarnings("ignore:.*world size:RuntimeWarning", "ignore:.*processes.*when saved:RuntimeWarning")
def test_a_checkpoint_moves_to_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    def run(ranks: int, folder: Path, iterations: int, resumed: bool = False) -> list[dict[str, Any]]:
        batch_size = 32 // max(2, ranks)  # 16 samples an iteration with one, two and four groups
        if ranks == 1:
            return [train(folder, iterations, resumed, 16)]
        return run_together(train, ranks, folder, iterations, resumed, batch_size)

    whole = run(before if before == after else 1, tmp_path / "whole", 11)[0]
    run(before, tmp_path / "parts", 9)
    for result in run(after, tmp_path / "parts", 11, True):
        assert_close(result["weights"], whole["weights"], CLOSE if before != after else 0.0)
        assert_close(result["averages"], whole["averages"], CLOSE if before != after else 0.0)


def sharded_over_all(folder: Path) -> None:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=Model(), seed=0)
    engine.attach(FullyShardedDataParallel(units=Block), Checkpoint(folder, every="4it"))
    engine.run(loader(4), max_iters=4)  # epochs of 3 iterations of 16 samples


def split_afterwards(folder: Path) -> int:
    """The iterations of 8 samples that are left of the second epoch."""
    engine = make(Checkpoint(folder, every="100it", resume=True), optimizer=SGD)
    made: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: made.append(engine.state.epoch))
    with pytest.warns(RuntimeWarning, match="the number of data shards changes from 4 to 2. The resume is not exact"):
        engine.run(loader(4), max_epochs=2)
    return len(made)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:W32")
def test_of_ranks_that_read_other_data_than_before_the_place_in_the_data_is_converted(tmp_path: Path) -> None:
    run_together(sharded_over_all, 4, tmp_path)
    assert run_together(split_afterwards, 4, tmp_path) == [4] * 4


# ---- what is refused -----------------------------------------------------------------------------------------------


def refused(build: Callable[[], Engine]) -> str:
    steps: list[int] = []
    try:
        engine = build()
        engine.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: steps.append(1))
        engine.run(loader(), max_iters=2)
    except ValueError as error:
        return f"{len(steps)} steps: {error}"
    return "no error"


def beside(*handlers: Handler, size: int = 2) -> Engine:
    engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=Model(), seed=0)
    engine.attach(TensorParallel(PLAN, size=size, timeout=60.0), *handlers)
    return engine


class Partial(nn.Module):
    """A parameter outside of the plan that is used with a part of the features on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(5, 12), nn.PReLU(), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 1.0 * self.down(self.act(self.up(x)))
        return out


REFUSALS: dict[str, tuple[Callable[[], Engine], str]] = {
    "nobody shards the data": (beside, "'tensor_parallel': size=2 splits layers over only some of the 4 ranks"),
    "whole copies of the model": (
        lambda: beside(DistributedDataParallel()),
        "'distributed_data_parallel' does not support a model whose layers are split across 2 ranks",
    ),
    "three ranks of four": (
        lambda: beside(size=3),
        "'tensor_parallel': size=3 does not divide the number of ranks, 4",
    ),
    "all ranks": (
        lambda: beside(FullyShardedDataParallel(), size=4),
        "both 'tensor_parallel' and 'fully_sharded_data_parallel' control how the model is distributed",
    ),
    "copies of sharded models": (
        lambda: make(replicas=2),
        "'fully_sharded_data_parallel': replicas=2 with layers split across 2 ranks",
    ),
    "data of each rank": (
        lambda: make(shard_policy="own"),
        "'fully_sharded_data_parallel': shard_policy='own' does not work with layers split across 2 ranks",
    ),
    "a parameter that gets a part of its gradient": (
        lambda: make(model=Partial(), plan={"up": ColwiseParallel(), "down": RowwiseParallel()}, units=()),
        "'tensor_parallel': the gradient of 'act.weight' differs between ranks",
    ),
}


def all_refusals() -> dict[str, str]:
    return {name: refused(build) for name, (build, _) in REFUSALS.items()}


@pytest.mark.slow
def test_what_does_not_go_together_is_refused_before_the_first_step() -> None:
    for found in run_together(all_refusals, 4):
        for name, (_, message) in REFUSALS.items():
            assert found[name].startswith(f"0 steps: {message}"), found[name]


def test_a_single_process_does_nothing() -> None:
    engine = make(optimizer=SGD)
    engine.run(loader(16), max_epochs=1)
    assert not any(is_sharded(p) for p in engine.model.parameters())
    torch.manual_seed(0)
    alone = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=Model(), seed=0)
    alone.run(loader(16), max_epochs=1)
    assert_close(full(engine), full(alone), close=0.0)
