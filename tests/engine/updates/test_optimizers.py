"""Several optimizers that step together, and the split of a model's parameters over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR

from signalfire import Engine, Events, Update, groups
from signalfire.handlers import (
    EMA,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    MixedPrecision,
    NonFiniteGuard,
)
from signalfire.testing import fingerprint
from signalfire.updates.optimizers import JointOptimizer
from tests import kit

ACCUMULATED = 2
RULES: dict[str, Any] = {"matrices": lambda name, p: p.dim() == 2, "rest": "*"}
MUON = partial(getattr(torch.optim, "Muon", SGD), lr=0.02, weight_decay=0.1)  # torch 2.9 is the first with Muon
ADAM = partial(AdamW, lr=3e-3)


def network() -> nn.Sequential:
    # The head comes first: the order of the groups is not that of the model.
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def data(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(count)]


def together(engine: Engine) -> dict[str, list[nn.Parameter]]:
    return groups(engine.model, RULES)


def trainer(model: nn.Module, *handlers: Any) -> Engine:
    update = Update.supervised(F.cross_entropy, {"matrices": MUON, "rest": ADAM}, parameters=together)
    engine = Engine(update, model=model, seed=0)
    engine.attach(*handlers)
    return engine


def schedules() -> LRScheduling:
    return LRScheduling(
        {"matrices": partial(CosineAnnealingLR), "rest": partial(LinearLR, start_factor=0.1, total_iters=30)}
    )


def full_stack(growth: int = 50) -> list[Any]:
    return [
        GradientAccumulation(ACCUMULATED),
        GradientClipping(max_norm=0.5),
        schedules(),
        EMA(0.9),
        MixedPrecision("float16", init_scale=2.0**10, growth_interval=growth),
    ]


def plain_loop(model: nn.Module, steps: int, growth: int) -> tuple[nn.Module, list[float]]:
    """Two optimizers in a loop with accumulation, fp16 scaling, clipping, a schedule for each, and an average."""
    split = groups(model, RULES)
    muon, adam = MUON(split["matrices"]), ADAM(split["rest"])
    cosine, warmup = CosineAnnealingLR(muon, T_max=steps), LinearLR(adam, start_factor=0.1, total_iters=30)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth)
    average = copy.deepcopy(model)
    batches = data()
    rates: list[float] = []
    made = tried = 0
    while made < steps:
        for place in range(ACCUMULATED):
            inputs, targets = batches[(tried * ACCUMULATED + place) % len(batches)]
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
        tried += 1
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(ACCUMULATED)
        scaler.unscale_(muon)
        scaler.unscale_(adam)
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        rates.append(muon.param_groups[0]["lr"] + adam.param_groups[0]["lr"])
        if finite:  # else neither of the two steps
            scaler.step(muon)
            scaler.step(adam)
        scaler.update()
        muon.zero_grad()
        adam.zero_grad()
        if finite:
            made += 1
            cosine.step()
            warmup.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 1 if made == 1 else 1 - 0.9)
    assert tried > made, "the scale has grown until gradients overflowed"
    return average, rates


@pytest.mark.parametrize(("steps", "growth"), kit.quick([(80, 8), (500, 50)], (80, 8)))
def test_clipping_schedules_accumulation_average_and_fp16_scaling_equal_a_plain_loop(steps: int, growth: int) -> None:
    ours, theirs = network(), network()
    engine = trainer(ours, *full_stack(growth))
    rates: list[float] = []
    engine.connect(
        Events.OPTIMIZER_STEP_STARTED,
        lambda engine: rates.append(sum(group["lr"] for group in engine.state.update.optimizer.param_groups)),
    )
    engine.run(data(), max_steps=steps)
    average, expected = plain_loop(theirs, steps, growth)
    assert rates == expected
    kit.assert_same(ours, theirs)
    kit.assert_same(engine.weights()["model"], average)
    assert engine.updates[0].steps == steps


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 7, 30, 61])
def test_a_run_resumed_at_any_iteration_ends_in_the_same_state(cut: int) -> None:
    whole = trainer(network(), *full_stack())
    whole.run(data(), max_steps=40)
    states: list[Any] = []
    first = trainer(network(), *full_stack())
    first.connect(Events.ITERATION_COMPLETED(once=cut), lambda engine: states.append(engine.state_dict()))
    first.run(data(), max_steps=40)
    resumed = trainer(network(), *full_stack())
    resumed.load_state_dict(states[0])
    resumed.run(data(), max_steps=40)
    assert fingerprint(resumed) == fingerprint(whole)


def test_built_optimizers_step_together_and_a_step_that_is_skipped_is_skipped_by_all() -> None:
    ours, theirs = network(), network()
    split = groups(ours, RULES)
    optimizers = [MUON(split["matrices"]), ADAM(split["rest"])]
    engine = Engine(Update.supervised(F.cross_entropy, optimizers), model=ours, seed=0, allow=["W19"])
    engine.attach(NonFiniteGuard())
    batches = data(6)
    batches[2][0][0, 0] = torch.nan
    engine.run(batches, max_epochs=1)
    parts = groups(theirs, RULES)
    plain = [MUON(parts["matrices"]), ADAM(parts["rest"])]
    for inputs, targets in [*batches[:2], *batches[3:]]:
        F.cross_entropy(theirs(inputs), targets).backward()
        for one in plain:
            one.step()
            one.zero_grad()
    kit.assert_same(ours, theirs)


def test_an_optimizer_with_a_state_of_its_own_form_is_saved_as_it_gives_it() -> None:
    class Own(SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"momenta": [self.state[p]["momentum_buffer"] for p in self.param_groups[0]["params"]]}

        def load_state_dict(self, state: Any) -> None:
            for p, momentum in zip(self.param_groups[0]["params"], state["momenta"], strict=True):
                self.state[p]["momentum_buffer"] = momentum

    def build() -> Engine:
        factories: dict[str, Callable[..., Any]] = {"matrices": partial(Own, lr=0.1, momentum=0.9), "rest": ADAM}
        return Engine(Update.supervised(F.cross_entropy, factories, parameters=together), model=network(), seed=0)

    whole, first, resumed = build(), build(), build()
    whole.run(data(4), max_epochs=2)
    first.run(data(4), max_epochs=1)
    state = first.state_dict()
    assert set(state["updates"]["main"]["optimizer"]) == {"optimizers"}
    resumed.load_state_dict(state)
    resumed.run(data(4), max_epochs=2)
    kit.assert_same(whole.model, resumed.model)


def test_a_lambda_for_each_group_schedules_all_optimizers() -> None:
    engine = trainer(
        network(), LRScheduling(lambda optimizer: LambdaLR(optimizer, [lambda n: 1 / (n + 1), lambda n: 0.5]))
    )
    engine.run(data(4), max_epochs=1)
    assert [group["lr"] for group in engine.updates[0].optimizer.param_groups] == [0.02 / 5, 3e-3 / 2]  # type: ignore[union-attr]


@kit.needs_torch(2, 9, why="Muon")
def test_a_state_of_other_optimizers_is_refused() -> None:
    first = trainer(network())
    first.run(data(2), max_epochs=1)
    other = Engine(
        Update.supervised(F.cross_entropy, {"matrices": partial(SGD, lr=0.1), "rest": ADAM}, parameters=together),
        model=network(),
    )
    other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"used the optimizer Muon \+ AdamW, but now uses SGD \+ AdamW"):
        other.run(data(2), max_epochs=2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_embedding_is_in_one_group_only_by_its_first_name() -> None:
    model = Tied()
    split = groups(model, {"matrices": ["hidden.weight", "head.weight"], "rest": "*"})
    assert [id(p) for p in split["matrices"]] == [id(model.hidden.weight)]
    assert [id(p) for p in split["rest"]] == [id(model.embedding.weight), id(model.hidden.bias)]


def test_what_no_rule_matches_and_a_rule_that_matches_nothing_are_errors() -> None:
    with pytest.raises(ValueError, match=r"no rule matches hidden\.bias, .*'rest': '\*'"):
        groups(Tied(), {"matrices": "*weight"})
    with pytest.raises(ValueError, match="no parameter is left for 'convs'"):
        groups(Tied(), {"convs": "conv*", "rest": "*"})
    with pytest.raises(TypeError, match=r"groups\(rest=None\)"):
        groups(Tied(), {"rest": None})


def test_mistakes_are_refused_where_they_are_made() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"pass the parameters of each optimizer: parameters=lambda engine: groups"):
        Update.supervised(F.cross_entropy, {"matrices": MUON, "rest": ADAM})
    with pytest.raises(
        TypeError, match="expected optimizers that are already built, or a mapping from names to factories"
    ):
        Update.supervised(F.cross_entropy, [MUON, ADAM])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="is empty"):
        Update.supervised(F.cross_entropy, {})
    with pytest.raises(ValueError, match="hold the same parameter of shape"):
        Update.supervised(F.cross_entropy, [SGD(model.parameters(), lr=0.1), ADAM(model.parameters())])
    with pytest.raises(ValueError, match=r"'1' \(LBFGS\) computes gradients inside its step"):
        Update.supervised(F.cross_entropy, [ADAM(model[0].parameters()), torch.optim.LBFGS(model[1].parameters())])
    wrong = Update.supervised(F.cross_entropy, {"matrices": MUON, "rest": ADAM}, parameters=lambda engine: {"rest": []})
    with pytest.raises(TypeError, match=r"returned the names rest; expected .* the optimizers \(matrices, rest\) to"):
        Engine(wrong, model=model).run(data(1), max_epochs=1)
    joint = JointOptimizer({"a": ADAM(model.parameters())})
    with pytest.raises(TypeError, match=r"update\.optimizer\.optimizers"):
        joint.add_param_group({"params": []})
    with pytest.raises(TypeError, match="register the hook with one of"):
        joint.register_step_post_hook(lambda *_: None)
    engine = trainer(network(), LRScheduling({"matrix": partial(CosineAnnealingLR)}))
    with pytest.raises(
        ValueError, match="the update has no optimizer with this name; its optimizers are matrices, rest"
    ):
        engine.run(data(2), max_epochs=1)
    single = kit.build(network(), LRScheduling({"rest": partial(CosineAnnealingLR)}), loss=F.cross_entropy)
    with pytest.raises(ValueError, match="this update has a single optimizer, SGD"):
        single.run(data(2), max_epochs=1)
