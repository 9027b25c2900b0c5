"""Tensor parallelism in real processes over gloo: the weights of one process, alike on all ranks, in checkpoints that move."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from signalfire import Engine, Events, Handler, Update
from signalfire.distributed import is_sharded, whole_tensor
from signalfire.handlers import (
    EMA,
    ActivationCheckpointing,
    AdaptiveGradientClipping,
    AutoClip,
    Average,
    Checkpoint,
    DistributedDataParallel,
    Freezing,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientCentralization,
    GradientClipping,
    GradientNoise,
    GradientNorms,
    Lookahead,
    Metrics,
    MicroBatching,
    MixedPrecision,
    NonFiniteGuard,
    Predictions,
    Seeding,
    SharpnessAwareMinimization,
    StochasticDepth,
    TensorParallel,
    TruncatedBPTT,
    Validation,
)
from tests.kit import needs_torch, quick
from tests.processes import Failed, run_together

ADAM = partial(torch.optim.AdamW, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)  # does not divide by what is zero but for rounding
PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

# Sums over a dimension that is split come out in another order: of float32, off by some 1e-7 of their size.
CLOSE = 1e-6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return out


class Model(nn.Module):
    """Layers to be split between layers that are not; the last one is split unevenly, and gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


UNEVEN = PLAN | {"last": ColwiseParallel(output_layouts=Replicate())}


def dataset(samples: int = 48, seed: int = 1) -> TensorDataset:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].sin())


def loader() -> DataLoader[Any]:
    """Shuffled by a generator that each rank seeds otherwise: all use the order of rank 0."""
    return DataLoader(dataset(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3 + rank()))


def make(
    *handlers: Handler, optimizer: Any = ADAM, model: nn.Module | None = None, plan: Any = UNEVEN, loss: Any = None
) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(loss or nn.functional.mse_loss, optimizer), model=model or Model(), seed=0)
    engine.attach(TensorParallel(plan, timeout=60.0), *handlers)
    torch.manual_seed(7 + rank())  # as of a script that seeds its ranks differently, or not at all
    return engine


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def full(engine: Engine) -> dict[str, Tensor]:
    return {key: whole_tensor(value).detach().clone() for key, value in engine.model.state_dict().items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], close: float = CLOSE) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=0.0, atol=close, msg=partial("{}: {}".format, key))


# ---- as one process -----------------------------------------------------------------------------------------------


def usual() -> dict[str, Any]:
    """50 steps with clipping, averages and accumulation, shuffled data and dropout."""
    clipping = GradientClipping(0.2)
    engine = make(clipping, EMA(0.9), GradientAccumulation(2), GradientNorms(), Metrics(loss=Average()))
    engine.run(loader(), max_steps=50)
    clipped = clipping.total_norm
    assert clipped is not None
    assert clipped > 0.2
    averages = {key: whole_tensor(value).clone() for key, value in engine.find(EMA).parameter_copies().items()}
    metrics = engine.state.metrics
    return {
        "weights": full(engine),
        "averages": averages,
        "metrics": {key: torch.as_tensor(metrics[key], dtype=torch.float64) for key in ("loss", "gradient_norm")},
        "iterations": {"all": torch.tensor(engine.state.iteration)},
    }


def composed(handlers: Callable[[], list[Handler]], optimizer: Any = ADAM) -> dict[str, Any]:
    engine = make(*handlers(), optimizer=optimizer)
    engine.run(loader(), max_iters=12)
    assert engine.state.update.steps == 12
    return {"weights": full(engine)}


COMPOSED: dict[str, Callable[[], list[Handler]]] = {
    "SharpnessAwareMinimization": lambda: [SharpnessAwareMinimization(0.05)],
    "SharpnessAwareMinimization, adaptive": lambda: [SharpnessAwareMinimization(0.5, adaptive=True)],
    "ActivationCheckpointing": lambda: [ActivationCheckpointing("blocks.*")],
    "AdaptiveGradientClipping": lambda: [AdaptiveGradientClipping(0.02)],
    "clipping by value": lambda: [GradientClipping(max_value=0.01)],
    "GradientCentralization": lambda: [GradientCentralization()],
    "StochasticDepth": lambda: [StochasticDepth("blocks.*", rate=0.5)],
    "AutoClip": lambda: [AutoClip()],
    "Lookahead": lambda: [Lookahead()],
    "GradientNoise": lambda: [GradientNoise(0.01)],
    "MicroBatching": lambda: [MicroBatching(pieces=2)],
    "NonFiniteGuard": lambda: [NonFiniteGuard()],
    "Seeding": lambda: [Seeding(5)],
    "GradientClipping, p = 3": lambda: [GradientClipping(0.2, norm_type=3.0)],
}


def of_the_guide() -> dict[str, Any]:
    """The transformer that the page shows, with its plan."""
    page = Path(__file__).parents[2] / "examples" / "guide" / "tensor_parallel.md"
    fences = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    names: dict[str, Any] = {"ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel}
    exec(next(fence for fence in fences if "transformer_plan = " in fence), names)
    torch.manual_seed(0)
    tokens = torch.randint(50, (48, 16), generator=torch.Generator().manual_seed(1))
    update = Update.supervised(
        lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()), SGD
    )
    engine = Engine(update, model=names["Transformer"](), seed=0)
    engine.attach(TensorParallel(names["transformer_plan"], timeout=60.0), GradientClipping(0.5))
    engine.run(DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=8), max_epochs=3)
    return {"weights": full(engine)}


@pytest.mark.slow
def test_the_transformer_of_the_guide_trains_over_two_and_four_processes_as_over_one() -> None:
    expected = of_the_guide()["weights"]
    for size in (2, 4):
        for found in run_together(of_the_guide, size):
            assert_close(found["weights"], expected)


class Recurrent(nn.Module):
    """Layers that are not split, but list or use their parameters in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.tied, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.again = nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x[:, None].expand(-1, 4, -1))
        x, _ = self.attention(x, x, x)
        x = self.down(torch.tanh(self.up(x))) * self.scale
        out: Tensor = self.last(self.again(torch.tanh(self.tied(x))).mean(1))
        return out


def recurrent() -> dict[str, Any]:
    engine = make(model=Recurrent(), plan={"up": ColwiseParallel(), "down": RowwiseParallel()}, optimizer=SGD)
    engine.run(loader(), max_iters=12)
    assert engine.model.tied.weight is engine.model.again.weight
    return {"weights": full(engine)}


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.up, self.down = nn.RNN(5, 8, batch_first=True), nn.Linear(8, 12), nn.Linear(12, 1)

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        out, hidden = self.cell(x, hidden)
        return self.down(torch.tanh(self.up(out))), hidden


def chunked() -> dict[str, Any]:
    def forward(engine: Engine, batch: Any) -> Tensor:
        output: Tensor
        output, engine.state.update.hidden = engine.model(batch[0], engine.state.update.hidden)
        return output

    torch.manual_seed(0)
    update = Update(forward, lambda engine, output, batch: nn.functional.mse_loss(output, batch[1]), ADAM)
    engine = Engine(update, model=Chunked(), seed=0)
    engine.attach(TensorParallel({"up": ColwiseParallel(), "down": RowwiseParallel()}), TruncatedBPTT(3))
    x = torch.randn(4, 6, 9, 5, generator=torch.Generator().manual_seed(1))
    engine.run([(one, one.sum(2, keepdim=True).sin()) for one in x], max_epochs=3)
    return {"weights": full(engine)}


class Sequence(nn.Module):
    """A norm that is split by positions, whose parameters get a part of their gradient on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.arange(1.0, 5.0)[:, None]
        out: Tensor = self.last(self.norm(self.first(x))).mean(1)
        return out


SEQUENCE = {
    "first": ColwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def sequence() -> dict[str, Any]:
    engine = make(GradientClipping(0.1), model=Sequence(), plan=SEQUENCE)
    engine.run(loader(), max_iters=12)
    return {"weights": full(engine)}


def evaluated() -> dict[str, Any]:
    """The trainer sees each batch on all ranks, and a validation each sample once."""
    model = Model()
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(Metrics(loss=Average()), Predictions(targets=True))
    engine = make(Validation(evaluator, DataLoader(dataset(20, seed=2), batch_size=8)), EMA(0.9), model=model)
    seen: list[Tensor] = []
    engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: seen.append(engine.state.batch[0].clone()))
    engine.run(loader(), max_epochs=2)
    predictions = evaluator.find(Predictions)
    return {
        "weights": full(engine),
        "batches": {"all": torch.cat(seen)},
        "outputs": {"all": predictions.outputs, "targets": predictions.targets},
        "loss": {"all": torch.as_tensor(evaluator.state.metrics["loss"], dtype=torch.float64)},
    }


def measured() -> dict[str, Any]:
    """Metrics of another library, in training and in a validation that is shared out."""
    model = Model()
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(Metrics(mse=MeanSquaredError(num_outputs=3)))
    validation = Validation(evaluator, DataLoader(dataset(20, seed=2), batch_size=8))
    engine = make(validation, Metrics(train_mse=MeanSquaredError()), model=model)
    engine.run(loader(), max_epochs=2)
    found = {"training": engine.state.metrics["train_mse"], "validation": evaluator.state.metrics["mse"]}
    return {"weights": full(engine), "metrics": {key: torch.as_tensor(value) for key, value in found.items()}}


def frozen() -> dict[str, Any]:
    """What is frozen stays so; torch's SequenceParallel would train it."""
    model = Sequence()
    model.norm.weight.requires_grad_(False)
    engine = make(Freezing("first"), model=model, plan=SEQUENCE)
    engine.run(loader(), max_iters=6)
    trained = {key: torch.tensor(p.requires_grad) for key, p in engine.model.named_parameters()}
    assert not trained["norm.weight"]
    return {"weights": full(engine), "trained": trained}


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "usual": usual,
    "recurrent": recurrent,
    "chunked": chunked,
    "sequence": sequence,
    "evaluated": evaluated,
    "frozen": frozen,
    "measured": measured,
    **{name: partial(composed, handlers) for name, handlers in COMPOSED.items()},
    "MixedPrecision": partial(composed, lambda: [MixedPrecision("bf16")], SGD),
    "MixedPrecision, fp16": partial(composed, lambda: [MixedPrecision("fp16", init_scale=64.0)], SGD),
}


def all_scenes(names: list[str]) -> dict[str, Any]:
    return {name: SCENES[name]() for name in names}


@pytest.fixture(scope="module")
def in_two(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What two processes come to in all scenes that are tested, one after the other."""
    tested = (getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__))
    return run_together(
        all_scenes, 2, [one.params["name"] for one in tested if one and one.params.get("name") in SCENES]
    )


@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize("name", quick(SCENES, "usual"))
def test_two_processes_train_as_one_does_and_end_alike(name: str, in_two: list[dict[str, Any]]) -> None:
    expected = SCENES[name]()
    first, second = (results[name] for results in in_two)
    for part, values in expected.items():
        assert_close(first[part], values, 4e-3 if name.startswith("MixedPrecision") else CLOSE)  # that of bfloat16
        for key, value in first[part].items():
            assert torch.equal(value, second[part][key]), f"{part}: {key}"


# ---- what is split, and what is not -------------------------------------------------------------------------------


def long_run() -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    engine = make(optimizer=SGD)
    placed: dict[str, tuple[str, tuple[int, ...]]] = {}

    def look(engine: Engine) -> None:
        for key, p in engine.model.named_parameters():
            assert is_sharded(p)
            assert p.grad is None or p.grad.placements == p.placements
            placed[key] = str(p.placements[0]), tuple(p.to_local().shape)

    engine.connect(Events.GRADIENTS_READY, look)
    engine.run(loader(), max_steps=200)
    local = {key: p.to_local().detach().clone() for key, p in engine.model.named_parameters()}
    return local, placed


@pytest.mark.slow
def test_after_200_steps_the_copies_are_bit_equal_and_all_parameters_are_dtensors() -> None:
    (first, placed), (second, others) = run_together(long_run, 2)
    assert placed["blocks.0.up.weight"] == ("S(0)", (6, 8))
    assert placed["blocks.1.down.weight"] == ("S(1)", (8, 6))
    assert (placed["last.weight"][1], others["last.weight"][1]) == ((2, 8), (1, 8))
    copies = [key for key, (placement, _) in placed.items() if placement == "R"]
    assert set(copies) == {
        "first.weight", "first.bias",
        *(f"blocks.{n}.{key}" for n in range(2) for key in ("norm.weight", "norm.bias", "down.bias")),
    }  # fmt: skip
    for key in copies:
        assert torch.equal(first[key], second[key]), key


def test_a_single_process_does_nothing() -> None:
    weights: list[dict[str, Tensor]] = []
    for handlers in ([], [TensorParallel(UNEVEN)]):
        torch.manual_seed(0)
        engine = Engine(Update.supervised(nn.functional.mse_loss, ADAM), model=Model(), seed=0)
        engine.attach(*handlers)
        engine.run(loader(), max_iters=8)
        assert not any(map(is_sharded, engine.model.parameters()))
        weights.append(full(engine))
    assert_close(weights[0], weights[1], close=0.0)


def unsplit() -> list[dict[str, Tensor]]:
    engine = make(optimizer=SGD)
    engine.run(loader(), max_iters=4)
    found = [full(engine)]
    handler = engine.find(TensorParallel)
    handler.unsplit(engine)
    handler.unsplit(engine)
    assert type(engine.model.first.weight) is nn.Parameter
    found.append(full(engine))
    modules = list(engine.model.modules())
    assert not any(hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks))
    engine.model(torch.ones(2, 5)).sum().backward()
    engine.model.zero_grad()
    engine.run(loader(), max_iters=8)  # it is split again
    assert is_sharded(engine.model.first.weight)
    return found


@pytest.mark.slow
def test_unsplit_gives_back_plain_modules_with_the_weights_which_a_further_run_splits_again() -> None:
    for before, after in run_together(unsplit, 2):
        assert_close(after, before, close=0.0)


def again() -> dict[str, Tensor]:
    engine = make(optimizer=SGD)
    for epochs in (1, 2):
        engine.run(loader(), max_epochs=epochs)
    return full(engine)


@pytest.mark.slow
def test_a_run_that_continues_keeps_the_model_split() -> None:
    first, second = run_together(again, 2)
    assert_close(first, again())
    assert_close(second, first, close=0.0)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def train(folder: Path, iterations: int, resumed_with: int | None = None) -> dict[str, Any]:
    """A run with checkpoints within epochs of 6 batches; it goes on from one that another number of ranks has written."""
    checkpoint = Checkpoint(folder, every="4it", resume=resumed_with is not None)
    engine = make(EMA(0.9), checkpoint, GradientClipping(0.2), plan=PLAN)
    begun: list[int] = []
    engine.connect(Events.ITERATION_STARTED, lambda engine: begun.append(engine.state.iteration))
    ranks = engine.processes.world_size
    moved = resumed_with not in (None, ranks)
    with (
        pytest.warns(RuntimeWarning, match=f"processes: {resumed_with} when saved, {ranks} now")
        if moved
        else nullcontext()
    ):
        engine.run(loader(), max_iters=iterations)
    assert begun[0] == (1 if resumed_with is None else 9)
    averages = {key: whole_tensor(value).clone() for key, value in engine.find(EMA).parameter_copies().items()}
    return {"weights": full(engine), "averages": averages}


@pytest.mark.moderate
@pytest.mark.parametrize(("before", "after"), quick([(2, 1), (2, 4), (1, 2), (2, 2)], (2, 1)))
def test_a_checkpoint_loads_on_any_number_of_ranks_and_the_run_continues_as_uninterrupted(
    before: int, after: int, tmp_path: Path
) -> None:
    def run(ranks: int, *args: Any) -> list[dict[str, Any]]:
        return [train(*args)] if ranks == 1 else run_together(train, ranks, *args)

    whole = run(before if before == after else 1, tmp_path / "whole", 16)[0]
    run(before, tmp_path / "parts", 9)
    for result in run(after, tmp_path / "parts", 16, before):
        assert_close(result["weights"], whole["weights"], CLOSE if before != after else 0.0)
        assert_close(result["averages"], whole["averages"], CLOSE if before != after else 0.0)


# ---- what is refused ----------------------------------------------------------------------------------------------


def refusal_of(*handlers: Handler, plan: Any = PLAN, model: nn.Module | None = None, **options: Any) -> str:
    """The error of a run, and after how many steps it came."""
    steps: list[int] = []
    try:
        engine = make(*handlers, plan=plan, model=model, **options)
        engine.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: steps.append(1))
        engine.run(loader(), max_iters=3)
    except ValueError as error:
        return f"{len(steps)} steps: {error}"
    return "no error"


class Partial(nn.Module):
    """A parameter outside of the plan that is used with a part of the features on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(5, 12), nn.PReLU(), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


def tied() -> nn.Module:
    model = Model()
    first, second = (block.up for block in model.blocks)
    first.weight = second.weight  # type: ignore[union-attr]
    return model


REFUSALS: dict[str, tuple[Callable[[], str], str]] = {
    "context parallelism around a run": (
        lambda: within_context_parallel(),
        "run(): context parallelism is not supported",
    ),
    "a path that matches nothing": (
        lambda: refusal_of(plan=PLAN | {"block.*.up": ColwiseParallel()}),
        "0 steps: 'tensor_parallel': plan={'block.*.up': ...} matches no module; did you mean 'blocks.",
    ),
    "a path that another one covers": (
        lambda: refusal_of(plan=PLAN | {"blocks.0.up": ColwiseParallel()}),
        "0 steps: 'tensor_parallel': plan={'blocks.0.up': ...} matches 'blocks.0.up', which 'blocks.*.up' already matches",
    ),
    "a style that does not fit": (
        lambda: refusal_of(plan={"blocks.*.norm": ColwiseParallel()}),
        "0 steps: 'tensor_parallel': plan={'blocks.*.norm': ColwiseParallel()} cannot be applied to 'blocks.0.norm', a LayerNorm",
    ),
    "input features that cannot be divided": (
        lambda: refusal_of(plan={"first": RowwiseParallel()}),
        "0 steps: 'tensor_parallel': plan={'first': RowwiseParallel()}: the 5 input features of 'first' cannot be divided",
    ),
    "shared weights": (
        lambda: refusal_of(plan={"blocks.0.up": ColwiseParallel()}, model=tied()),
        "0 steps: 'tensor_parallel': 'blocks.1.up.weight' is the same parameter as 'blocks.0.up.weight'",
    ),
    "a parameter that gets a part of its gradient": (
        lambda: refusal_of(plan={"up": ColwiseParallel(), "down": RowwiseParallel()}, model=Partial()),
        "0 steps: 'tensor_parallel': the gradient of 'act.weight' differs between ranks",
    ),
    "an optimizer with a closure": (
        lambda: refusal_of(optimizer=torch.optim.LBFGS),
        "0 steps: 'tensor_parallel': the LBFGS of update 'main' flattens all parameters",
    ),
    "an optimizer that exists already": (
        lambda: refusal_of(model=(model := Model()), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)),
        "0 steps: 'tensor_parallel': the SGD of update 'main' holds parameters that are replaced when the model",
    ),
    "data parallelism": (
        lambda: refusal_of(DistributedDataParallel()),
        "0 steps: both 'tensor_parallel' and 'distributed_data_parallel' control how the model is distributed",
    ),
    "sharding": (
        lambda: refusal_of(FullyShardedDataParallel()),
        "0 steps: both 'tensor_parallel' and 'fully_sharded_data_parallel' control how the model is distributed "
        "over processes; detach one of the two. To combine TensorParallel with",
    ),
}


def within_context_parallel() -> str:
    mesh = init_device_mesh("cpu", (2,))
    sequences = torch.zeros(1, 1, 8, 4)
    with context_parallel(mesh, buffers=[sequences], buffer_seq_dims=[2]):
        try:
            Engine(Update.supervised(nn.functional.mse_loss, SGD), model=Model()).run(loader(), max_iters=1)
        except RuntimeError as error:
            return str(error)
    return "no error"


def all_refusals() -> dict[str, str]:
    return {name: refuse() for name, (refuse, _) in REFUSALS.items()}


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return run_together(all_refusals, 2)


@needs_torch(2, 9, why="context parallelism on a CPU")
@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_split_is_refused_on_all_ranks_before_the_first_step(
    name: str, refusals: list[dict[str, str]]
) -> None:
    for found in refusals:
        assert found[name].startswith(REFUSALS[name][1])


def smaller() -> None:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(nn.functional.mse_loss, ADAM), model=Model(), seed=0)
    engine.attach(TensorParallel(PLAN, size=3))


def other_data() -> None:
    make(plan=PLAN).run(DataLoader(dataset(48 if rank() == 0 else 40), batch_size=8), max_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (smaller, "size=3 does not divide the number of ranks, 2"),
        (other_data, "the data (DataLoader) is read by each of the ranks, but its length differs between them"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_numbers_of_ranks_and_other_data_on_each_are_refused(function: Callable[[], None], message: str) -> None:
    with pytest.raises(Failed) as caught:
        run_together(function, 2)
    assert all(message in error for error in caught.value.errors.values())


def test_a_mistake_in_the_plan_shows_in_a_single_process_too() -> None:
    with pytest.raises(ValueError, match="matches no module"):
        make(plan={"blcks.0.up": ColwiseParallel()}).run(loader(), max_epochs=1)


@needs_torch(2, 10, why="a style of context parallelism")
def test_context_parallelism_is_no_style_of_a_plan() -> None:
    from torch.distributed.tensor.experimental._attention import _ContextParallel

    with pytest.raises(ValueError, match=r"_ContextParallel\(...\)}\): context parallelism is not supported"):
        TensorParallel({"attention": _ContextParallel(2, _ContextParallel.AttentionType.SDPA)})


@pytest.mark.parametrize(
    "plan", [{}, [], {"up": "colwise"}, {1: ColwiseParallel()}, {"": ColwiseParallel()}], ids=range(5)
)
def test_a_plan_that_is_none_is_refused_at_once(plan: Any) -> None:
    with pytest.raises(TypeError, match=r"TensorParallel\(plan="):
        TensorParallel(plan)
