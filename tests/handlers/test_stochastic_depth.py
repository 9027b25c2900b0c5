"""Stochastic depth against a plain loop over a model that drops its blocks itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from signalfire import Engine, Events, Update
from signalfire.authoring.randomness import derived_seed, mixed
from signalfire.handlers import GradientAccumulation, MixedPrecision, StochasticDepth, Validation
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same, average_gradients, batches, same, windows

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(5, 7), nn.Linear(7, 5)

    def residual(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(torch.relu(self.layer(x)))
        return output

    def forward(self, x: Tensor) -> Tensor:
        return x + self.residual(x)


class Net(nn.Module):
    """Four residual blocks."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.again = again
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        output: Tensor = self.head(x)
        return output


class Dropping(Net):
    """The same, which drops its blocks itself."""

    key = 0
    rates = (0.0, 0.0, 0.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if self.training and self.rates[place] > 0:
                keep = 1 - self.rates[place]
                kept = torch.rand(len(x), generator=torch.Generator().manual_seed(mixed(self.key, place))) < keep
                y = block(x)
                rows = [torch.where(kept[n], x[n] + (y[n] - x[n]) / keep, x[n]) for n in range(len(x))]
                x = torch.stack(rows)
            else:
                x = block(x)
        output: Tensor = self.head(x)
        return output


def build(*handlers: Any, model: nn.Module | None = None) -> Engine:
    return kit.build(model or Net(), *handlers, optimizer=SGD, seed=7)


def plain_loop(
    rates: Callable[[int], Any], *, window: int = 1, scaled: bool = False, skipped: int | None = None
) -> nn.Module:
    """The rates by number of steps."""
    model = Dropping()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    iteration = steps = 0
    for _ in range(2):
        for chunk in windows(batches(6), window):
            for x, y in chunk:
                iteration += 1
                generator = torch.Generator().manual_seed(derived_seed(7, "stochastic_depth", iteration))
                model.key = int(torch.randint(2**62, (), generator=generator))
                model.rates = rates(steps)
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    loss = nn.functional.mse_loss(model(x), y)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            if iteration != skipped:
                scaler.step(optimizer)
                steps += 1
            scaler.update()
            optimizer.zero_grad()
    return model


def linear(steps: int) -> list[float]:
    return [1.0 * 0.5 * (place / 4) for place in (1, 2, 3, 4)]


@pytest.mark.moderate
@pytest.mark.parametrize(("window", "scaled"), [(1, False), (4, False), (2, True)])
def test_weights_equal_a_plain_loop_over_a_model_that_drops_its_blocks_itself(window: int, scaled: bool) -> None:
    engine = build(StochasticDepth("blocks.*", 0.5), GradientAccumulation(window))
    if scaled:
        engine.attach(MixedPrecision("fp16", init_scale=1024.0))
    engine.run(batches(6), max_epochs=2)
    assert_same(engine.model, plain_loop(linear, window=window, scaled=scaled))
    assert not same(engine.model, plain_loop(lambda steps: [0.0] * 4, window=window, scaled=scaled))


@pytest.mark.moderate
def test_all_alike_and_some_of_the_blocks() -> None:
    engine = build(StochasticDepth(["blocks.1", "blocks.[3-9]"], 0.25, depth="uniform"))
    with_seed = plain_loop(lambda steps: [0.0, 0.25, 0.0, 0.25])
    engine.run(batches(6), max_epochs=2)
    handler = engine.find(StochasticDepth)
    assert handler.rates(0) == {"blocks.1": 0.25, "blocks.3": 0.25}
    assert not same(engine.model, with_seed)  # the second of two blocks has another number than the fourth of four
    everywhere = build(StochasticDepth("blocks.*", 0.25, depth="uniform"))
    everywhere.run(batches(6), max_epochs=2)
    assert_same(everywhere.model, plain_loop(lambda steps: [0.25] * 4))


@pytest.mark.moderate
def test_a_schedule_counts_steps_that_were_made() -> None:
    def factor(step: int) -> float:
        return min(1.0, step / 5)

    engine = build(StochasticDepth("blocks.*", 0.5, schedule=factor))
    engine.connect(Events.GRADIENTS_READY(once=3), lambda engine: engine.state.update.skip("for a test"))
    engine.run(batches(6), max_epochs=2)
    expected = plain_loop(lambda steps: [factor(steps) * 0.5 * (place / 4) for place in (1, 2, 3, 4)], skipped=3)
    assert_same(engine.model, expected)
    off = build(StochasticDepth("blocks.*", 0.5, schedule=lambda step: 0))
    off.run(batches(6), max_epochs=2)
    assert_same(off.model, plain_loop(lambda steps: [0.0] * 4))


def test_a_block_that_is_computed_again_in_the_backward_has_the_same_mask() -> None:
    engine = build(StochasticDepth("blocks.*", 0.5), model=Net(again=True))
    engine.run(batches(6), max_epochs=2)
    assert_same(engine.model, plain_loop(linear))


def test_evaluations_and_calls_outside_of_an_update_see_all_blocks() -> None:
    model = Net()
    evaluator = kit.evaluator_of(model)
    outputs: list[Tensor] = []
    clean: list[Tensor] = []
    evaluator.connect(Events.FORWARD_COMPLETED, lambda engine: outputs.append(engine.state.update.output.clone()))
    engine = build(StochasticDepth("blocks.*", 0.9), Validation(evaluator, batches(1), every="1it"), model=model)

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine: Engine) -> None:
        assert not any(block._forward_hooks for block in model.blocks)
        assert model.training
        clean.append(model(batches(1)[0][0]).detach())

    engine.run(batches(4), max_epochs=1)
    assert len(outputs) == 4
    assert all(torch.equal(one, other) for one, other in zip(outputs, clean, strict=True))


def test_a_block_in_eval_mode_is_not_dropped() -> None:
    engine = build(StochasticDepth("blocks.*", 0.5))
    engine.connect(Events.UPDATE_STARTED, lambda engine: engine.model.blocks.eval())
    engine.connect(Events.UPDATE_COMPLETED, lambda engine: engine.model.blocks.train())
    engine.run(batches(6), max_epochs=2)
    assert_same(engine.model, plain_loop(lambda steps: [0.0] * 4))


def test_after_an_error_no_hook_is_left_and_detached_the_run_is_the_one_without() -> None:
    engine = build(handler := StochasticDepth("blocks.*", 0.5))
    begin = copy.deepcopy(engine.model)

    def fail(engine: Engine) -> None:
        assert all(block._forward_hooks for block in engine.model.blocks)
        raise ArithmeticError

    handle = engine.connect(Events.BACKWARD_STARTED(once=1), fail)
    with pytest.raises(ArithmeticError):
        engine.run(batches(6), max_epochs=2)
    assert not any(block._forward_hooks for block in engine.model.blocks)
    handle.detach()
    assert_same(engine.model, begin)
    engine.detach(handler)
    engine.run(batches(6), max_epochs=2)
    assert_same(engine.model, plain_loop(lambda steps: [0.0] * 4))


class Tuples(nn.Module):
    """A block as transformers have them: it takes keywords and returns a tuple."""

    def __init__(self, inner: Block) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, scale: float, *, hidden_states: Tensor) -> tuple[Tensor, str]:
        return self.inner(hidden_states) * scale, "more"


class OfTuples(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tuples(block) for block in self.blocks)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, more = block(1.0, hidden_states=x)
            assert more == "more"
        output: Tensor = self.head(x)
        return output


def test_a_block_may_take_keywords_and_return_a_tuple() -> None:
    engine = build(StochasticDepth("blocks.*", 0.5), model=OfTuples())
    engine.run(batches(6), max_epochs=2)
    expected = plain_loop(linear).state_dict()
    ours = {name.replace(".inner", ""): value for name, value in engine.model.state_dict().items()}
    assert_same(ours, dict(expected))


def test_shares_are_those_that_were_asked_for_and_the_mean_stays() -> None:
    model = nn.Sequential(Block(), nn.Linear(5, 1))
    engine = kit.build(model, StochasticDepth("0", 0.3), optimizer=SGD)
    x = torch.ones(1000, 5)
    seen: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    full = model[0](x).detach()
    engine.run([(x, torch.ones(1000, 1))], max_epochs=1, check=False)
    dropped = (seen[0] == x).all(1).double().mean().item()
    assert dropped == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / 1000) ** 0.5)
    assert torch.allclose(seen[0].mean(0), full.mean(0), atol=0.1)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"blocks='layers\.\*' matches no module; available modules: 'blocks', 'blocks\.0'"
    ):
        build(StochasticDepth("layers.*")).run(batches(1), max_epochs=1)
    with pytest.raises(
        ValueError,
        match=r"block 'head' is not residual, because .* \(\(4, 5\) to \(4, 1\)\); leave this block out of blocks=",
    ):
        build(StochasticDepth("head")).run(batches(1), max_epochs=1)
    with pytest.raises(ValueError, match=r"schedule\(0\) returned 2; expected a factor from 0 to 1"):
        build(StochasticDepth("blocks.*", schedule=lambda step: 2)).run(batches(1), max_epochs=1)
    with pytest.raises(ValueError, match="both 'one' and 'two' control which blocks are dropped in update 'main'"):
        build(StochasticDepth("a", name="one"), StochasticDepth("b", name="two"))
    two = [Update.supervised(nn.functional.mse_loss, SGD, name=name) for name in ("a", "b")]
    with pytest.raises(ValueError, match=r"several updates \(a, b\); .* choose the one that blocks= applies to"):
        Engine(two, model=Net(), seed=0).attach(StochasticDepth("blocks.*"))
    net = Net()
    net.spare = Block()
    with pytest.raises(ValueError, match=r"the forward did not call block 'spare', so the block is never dropped"):
        build(StochasticDepth(["blocks.*", "spare"], schedule=lambda step: 0), model=net).run(
            batches(1), max_epochs=1, check=False
        )
    model = Net()
    model.head.compile(backend="eager")
    with pytest.raises(ValueError, match=r"'stochastic_depth': 'model\.head' is compiled"):
        build(StochasticDepth("blocks.*"), model=model).run(batches(1), max_epochs=1)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate=0"),
        ({"rate": 1}, "rate=1"),
        ({"depth": "up"}, "depth='up'"),
        ({"schedule": 5}, "schedule=5"),
        ({"blocks": []}, r"blocks=\[\]"),
        ({"blocks": None}, "blocks=None"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"StochasticDepth\({message}"):
        StochasticDepth(**{"blocks": "a", **options})


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(build, lambda: StochasticDepth("blocks.*", 0.5), batches(3), max_epochs=2)
