"""ActivationCheckpointing against training without it: the same bits, and less that is kept for the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from signalfire import Engine, Events, Handler, Update
from signalfire.handlers import (
    EMA,
    ActivationCheckpointing,
    DistributedDataParallel,
    MicroBatching,
    MixedPrecision,
    SharpnessAwareMinimization,
    TruncatedBPTT,
)
from tests.kit import assert_same, batches, build, evaluator_of, mlp, quick
from tests.processes import assert_alike, run_together

Make = Callable[[], ActivationCheckpointing]
WIDTH = 16
WAYS: dict[str, Make] = {
    "pattern": lambda: ActivationCheckpointing("blocks.*"),
    "list of modules": lambda: ActivationCheckpointing("blocks"),
    "class": lambda: ActivationCheckpointing(Block),
    "kept": lambda: ActivationCheckpointing(Block, keep_operations=["addmm"]),
    "every": lambda: ActivationCheckpointing(every=2),
}


class Block(nn.Module):
    """With everything that a second computation could change: statistics, and random numbers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
        )  # fmt: skip

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        result: Tensor = x + scale * self.layers(x)
        return result


class Network(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        scores: Tensor = self.head(x)
        return scores


def data(count: int = 10) -> list[tuple[Tensor, Tensor]]:
    return batches(count, WIDTH)


ADAM = partial(torch.optim.Adam, lr=1e-2)


def trained(*handlers: Handler, epochs: int = 10, optimizer: Any = ADAM, model: nn.Module | None = None) -> nn.Module:
    model = model or Network()
    engine = build(model, *handlers, optimizer=optimizer)
    torch.manual_seed(0)
    engine.run(data(), max_epochs=epochs)
    return model


def plain_loop(epochs: int = 10) -> nn.Module:
    model = Network()
    optimizer = ADAM(model.parameters())
    torch.manual_seed(0)
    for inputs, targets in data() * epochs:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.moderate
@pytest.mark.parametrize("way", quick(["pattern", "every", "kept", "class"], "pattern"))
def test_a_hundred_steps_give_the_same_bits_also_of_dropout_and_statistics(way: str) -> None:
    model, random = trained(WAYS[way]()), torch.get_rng_state()
    assert_same(model, plain_loop())
    assert model.get_buffer("blocks.1.layers.1.num_batches_tracked") == 100
    assert torch.equal(random, torch.get_rng_state())


class Plain(nn.Sequential):
    """Eight blocks, of which each keeps what is four times as wide as its input."""

    def __init__(self, width: int = 32) -> None:
        torch.manual_seed(3)
        block = partial(nn.Linear, width, 4 * width), nn.GELU, partial(nn.Linear, 4 * width, width)
        super().__init__(*(nn.Sequential(*(part() for part in block)) for _ in range(8)))


def saved_bytes(engine: Engine, inputs: Tensor) -> int:
    """What the forward of an iteration keeps for the backward: each storage once, and no weights."""
    weights = {p.untyped_storage().data_ptr() for p in engine.modules["model"].parameters()}
    sizes: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no later one takes its place in memory
        return tensor

    def count(engine: Engine) -> None:
        engine.regions.enter(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))

    engine.connect(Events.FORWARD_STARTED, count)
    engine.run([(inputs, torch.zeros_like(inputs))], max_epochs=1)
    return sum(sizes.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ActivationCheckpointing("?"),
        lambda: ActivationCheckpointing([str(place) for place in range(8)]),
        lambda: ActivationCheckpointing(every=2),
        lambda: ActivationCheckpointing(every=1),
    ],
)
def test_at_most_half_the_bytes_are_kept(make: Make) -> None:
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    plain = saved_bytes(build(Plain()), inputs)
    assert plain > 8 * inputs.nbytes * 5
    assert saved_bytes(build(Plain(), make()), inputs) <= plain / 2


@pytest.mark.slow
def test_kept_operations_are_kept() -> None:
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    seen: list[Any] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    counting: Any = Counting

    def products(*handlers: Handler) -> int:
        seen.clear()
        engine = build(Plain(), *handlers)
        engine.connect(Events.UPDATE_STARTED, lambda engine: engine.regions.enter(counting()))
        engine.run([(inputs, torch.zeros_like(inputs))], max_epochs=1)
        return seen.count(torch.ops.aten.addmm.default)

    assert (products(), products(ActivationCheckpointing("?"))) == (16, 24)  # without the last ones of each block
    assert products(ActivationCheckpointing("?", keep_operations=["addmm"])) == 16
    assert products(ActivationCheckpointing("?", keep_operations=[torch.ops.aten.addmm.default])) == 16


@pytest.mark.parametrize(
    ("handlers", "optimizer"),
    [
        (lambda: [MicroBatching(2)], ADAM),
        (lambda: [SharpnessAwareMinimization(0.05)], ADAM),
        (list, partial(torch.optim.LBFGS, lr=0.1, max_iter=3)),
        (lambda: [MixedPrecision("bf16"), EMA(0.9)], ADAM),
        (lambda: [MixedPrecision("fp16")], ADAM),
    ],
    ids=["MicroBatching", "SAM", "LBFGS", "bf16 and EMA", "fp16"],
)
@pytest.mark.slow
def test_beside_what_computes_gradients_otherwise_the_bits_are_the_same(
    handlers: Callable[[], list[Handler]], optimizer: Any
) -> None:
    reference = trained(*handlers(), optimizer=optimizer, epochs=2)
    assert_same(trained(*handlers(), WAYS["pattern"](), optimizer=optimizer, epochs=2), reference)
    assert not torch.equal(reference.get_parameter("head.weight"), Network().head.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.block = Block(5)
        self.cell = nn.GRU(5, 8, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.block(x.flatten(0, 1)).view_as(x)
        output, hidden = self.cell(x, hidden)
        assert hidden is not None
        return self.head(output), hidden


def recurrent(*handlers: Handler) -> nn.Module:
    model = Recurrent()

    def forward(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        update = engine.state.update
        output, update.hidden = engine.model(batch[0], update.hidden)
        assert isinstance(output, Tensor)
        return output

    def loss(engine: Engine, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])

    engine = Engine(Update(forward, loss, ADAM), model=model, seed=0)
    engine.attach(TruncatedBPTT(4), *handlers)
    torch.manual_seed(0)
    engine.run(batches(4, (12, 5), (12, 1)), max_epochs=3)
    return model


@pytest.mark.moderate
def test_with_chunks_of_time_the_bits_are_the_same() -> None:
    assert_same(recurrent(ActivationCheckpointing(["block", "cell", "head"])), recurrent())


def of_ranks(way: str | None) -> dict[str, Tensor]:
    model = Network()
    handlers: list[Handler] = [DistributedDataParallel(timeout=60.0)]
    handlers += [WAYS[way]()] if way is not None else []
    engine = build(model, *handlers, optimizer=ADAM)
    torch.manual_seed(engine.processes.rank)
    engine.run(data(), max_epochs=4)
    return model.state_dict()


@pytest.mark.moderate
@pytest.mark.parametrize("way", ["pattern", pytest.param("every", marks=pytest.mark.slow)])
def test_on_two_ranks_the_bits_are_the_same(way: str) -> None:
    plain, checkpointed = (assert_alike(run_together(of_ranks, 2, one)) for one in (None, way))
    assert_same(plain, checkpointed)


def test_names_stay_and_the_forward_is_as_before_however_the_run_ends() -> None:
    model = Network()
    names, seen = list(model.state_dict()), []
    before = [dict(vars(part)) for part in model.modules()]
    engine = build(model, WAYS["pattern"]())

    @engine.on(Events.LOSS_COMPUTED(once=2))
    def fail(engine: Engine) -> None:
        seen.append([name for name, _ in model.named_parameters()] == list(dict(Network().named_parameters())))
        seen.append(list(model.state_dict()) == names)
        raise ValueError("for the test")

    with pytest.raises(ValueError, match="for the test"):
        engine.run(data(), max_epochs=1)
    assert seen == [True, True]
    assert [vars(part).keys() for part in model.modules()] == [one.keys() for one in before]


def test_a_forward_that_the_user_has_replaced_is_used_and_put_back() -> None:
    model, calls = mlp(5, 8, 1, nn.Tanh()), []
    own = model[0].forward

    def counting(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        result: Tensor = own(x)
        return result

    model[0].forward = counting
    build(model, ActivationCheckpointing(["0", "1"])).run(batches(1), max_epochs=1)
    assert len(calls) == 2
    assert vars(model[0])["forward"] is counting


def test_an_evaluation_computes_once() -> None:
    model, calls = Network(), []
    model.get_submodule("blocks.0.layers.0").register_forward_hook(lambda *given: calls.append(torch.is_grad_enabled()))
    evaluator = evaluator_of(model)
    engine = build(model, WAYS["pattern"]())
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.evaluate(evaluator, data(3)))
    engine.run(data(2), max_epochs=1)
    assert calls == [True] * 4 + [False] * 3


def test_a_buffer_that_the_forward_changes_is_refused_with_its_name() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 5)
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    engine = build(nn.Sequential(Counting(), nn.Linear(5, 1)), ActivationCheckpointing("0"))
    with pytest.raises(
        RuntimeError, match=r"the forward of '0' changes the buffer 'calls' of Counting, .* leave this module out"
    ):
        engine.run(batches(1), max_epochs=1)


@pytest.mark.slow
def test_statistics_of_other_layers_are_updated_once_too() -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.GELU()),
            nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4, momentum=None), nn.GELU()),
            nn.Sequential(nn.Flatten(), nn.Linear(4 * 2, 1)),
        )

    models = []
    for handlers in ([], [ActivationCheckpointing("?")], [ActivationCheckpointing(every=3)]):
        models.append(model())
        build(models[-1], *handlers).run(batches(6, (2, 6)), max_epochs=2)
    assert_same(models[0], models[1])
    assert_same(models[0], models[2])


def test_a_pattern_that_matches_nothing_is_refused_as_the_run_starts() -> None:
    engine = build(Network(), ActivationCheckpointing("layers.*"))
    with pytest.raises(ValueError, match=r"modules='layers.\*' matches no module; available modules: 'blocks', 'b"):
        engine.run(data(1), max_epochs=1)


def test_without_a_sequential_every_is_refused() -> None:
    engine = build(nn.Linear(5, 1), ActivationCheckpointing(every=2))
    with pytest.raises(
        ValueError, match=r"groups the layers of nn\.Sequential modules, but the model has no nn\.Sequential"
    ):
        engine.run(batches(1), max_epochs=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"\(modules=None, every=None\): pass one of the two: modules="),
        ({"modules": "x", "every": 2}, r"\(modules='x', every=2\): pass one of the two: modules="),
        ({"modules": []}, r"\(modules=\[\]\): expected at least one module"),
        ({"modules": 3}, r"\(modules=3\): 3 is not a module path"),
        ({"every": 0}, r"\(every=0\): expected an int of 1 or more"),
        ({"every": 2, "keep_operations": ["matmull"]}, "torch has no operation aten.matmull"),
        ({"every": 2, "keep_operations": "mm"}, r"keep_operations='mm'\): expected a list"),
        ({"every": 2, "keep_operations": [3]}, "3 is neither an operation name"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"ActivationCheckpointing.*{message}"):
        ActivationCheckpointing(**given)


def test_a_second_one_is_refused() -> None:
    with pytest.raises(ValueError, match="control which activations are kept"):
        build(Network(), WAYS["pattern"](), ActivationCheckpointing("head", name="other"))
