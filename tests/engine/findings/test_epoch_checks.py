"""What is compared at the ends of epochs: what is trained as it is meant raises no alarm. The mistakes are in tests/mistakes."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, FindingWarning, Handler, Update, allow
from signalfire.findings.epoch_checks import has_nan, shown
from signalfire.handlers import (
    EMA,
    DistributedDataParallel,
    Freezing,
    FullyShardedDataParallel,
    GradientAccumulation,
    Guards,
    LRScheduling,
    MicroBatching,
    MixedPrecision,
    NonFiniteGuard,
    SharpnessAwareMinimization,
    cosine_with_warmup,
)
from tests.kit import SGD, batches, build, linear, mlp, quick
from tests.processes import run_together

ADAM = partial(torch.optim.Adam, lr=0.01)


@pytest.fixture(autouse=True)
def no_finding_is_reported() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FindingWarning)
        yield


class TwoHeads(nn.Module):
    """A body with a head that is used, and a small one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(5, 8), nn.Linear(8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def test_an_unused_head_is_listed_and_no_warning() -> None:
    engine = build(TwoHeads())
    engine.run(batches(), max_epochs=2)
    [found] = engine.findings.of_run().of("W13")
    assert found.severity == "info"
    assert "'unused.weight', 'unused.bias'" in found.sentence


@pytest.mark.parametrize("make", [
    lambda: Freezing("0"),
    lambda: Freezing({"0": 2}),
    lambda: GradientAccumulation(4),
    lambda: MicroBatching(2),
    lambda: SharpnessAwareMinimization(0.05),
    lambda: MixedPrecision("fp16", init_scale=2.0**40, growth_interval=3),
    lambda: EMA(0.5),
    lambda: LRScheduling(cosine_with_warmup(warmup=2)),
])  # fmt: skip
@pytest.mark.parametrize("optimizer", [SGD, ADAM, partial(torch.optim.Adam, lr=0.01, fused=True)])
def test_what_changes_a_training_on_purpose_is_no_mistake(make: Callable[[], Handler], optimizer: Any) -> None:
    engine = build(mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.1)), make(), optimizer=optimizer)
    engine.run(batches(), max_epochs=3)
    assert not engine.findings.of_run().at_least("warning")


class DataSGD(torch.optim.Optimizer):
    """An optimizer of the old style, whose writes torch does not count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    "optimizer", [DataSGD, partial(torch.optim.LBFGS, max_iter=2), torch.optim.Adagrad, torch.optim.Rprop]
)
def test_every_kind_of_optimizer_is_seen_to_train(optimizer: Any) -> None:
    build(mlp(5, 8, 1), optimizer=optimizer).run(batches(), max_epochs=2)


def test_an_optimizer_of_ones_own_that_changes_nothing_is_reported() -> None:
    old = mlp(5, 8, 1)
    update = Update(
        lambda engine, batch: old(batch[0]), lambda engine, output, batch: mse_loss(output, batch[1]), DataSGD
    )
    with allow("W92"), pytest.warns(FindingWarning, match="W12"):
        Engine(update, model=copy.deepcopy(old)).run(batches(), max_epochs=1)


def test_an_optimizer_of_the_head_alone_is_no_mistake() -> None:
    update = Update.supervised(mse_loss, SGD, parameters=lambda engine: engine.model[1].parameters())
    Engine(update, model=mlp(5, 8, 1)).run(batches(), max_epochs=2)


def test_parameters_of_a_loss_are_no_leftovers() -> None:
    scale = nn.Parameter(torch.ones(()))
    model = mlp(5, 8, 1)
    update = Update.supervised(
        lambda output, target: mse_loss(output * scale, target),
        SGD,
        parameters=lambda engine: [*model[1].parameters(), scale],
    )
    Engine(update, model=model).run(batches(), max_epochs=2)


def test_a_layer_that_is_added_to_the_optimizer_as_well_is_no_mistake() -> None:
    engine = build(mlp(5, 8, 1))

    def grow(engine: Engine) -> None:
        new = nn.Linear(1, 1)
        engine.model.append(new)
        engine.updates[0].optimizer.add_param_group({"params": list(new.parameters())})  # type: ignore[union-attr]

    engine.connect(Events.EPOCH_STARTED(once=2), grow)
    engine.run(batches(), max_epochs=3)


def test_a_discriminator_with_an_update_of_its_own_is_no_mistake() -> None:
    models = {"generator": linear(5, 3), "critic": linear(3, 1)}

    def critic(engine: Engine, batch: Any) -> Tensor:
        return engine.modules["critic"](engine.modules["generator"](batch[0]).detach()).mean()  # type: ignore[no-any-return]

    def generator(engine: Engine, batch: Any) -> Tensor:
        return -engine.modules["critic"](engine.modules["generator"](batch[0])).mean()  # type: ignore[no-any-return]

    def own(name: str) -> Callable[[Engine], Any]:
        return lambda engine: engine.modules[name].parameters()

    updates = [Update.from_function(critic, SGD, name="c", parameters=own("critic")),
               Update.from_function(generator, SGD, name="g", parameters=own("generator"))]  # fmt: skip
    Engine(updates, model=models).run(batches(), max_epochs=2)


def test_statistics_frozen_within_an_epoch_are_no_mistake() -> None:
    engine = build(mlp(5, 8, 1, nn.BatchNorm1d(8)))
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: engine.modules["model"].get_submodule("1").eval())
    engine.run(batches(), max_epochs=2)


def test_a_model_put_into_eval_mode_as_the_run_starts_is_no_mistake() -> None:
    engine = build(mlp(5, 8, 1, nn.Dropout(0.1)))
    engine.connect(Events.STARTED, lambda engine: engine.model.eval())
    engine.run(batches(), max_epochs=2)


def test_a_step_that_puts_the_model_into_training_mode_itself_is_no_mistake() -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        engine.model.train()
        return mse_loss(engine.model(batch[0]), batch[1])

    engine = Engine(Update.from_function(step, SGD), model=mlp(5, 8, 1, nn.Dropout(0.1)), seed=0)
    engine.connect(Events.ITERATION_COMPLETED(every=2), lambda engine: engine.model.eval() and None)
    engine.run(batches(), max_epochs=2)


def test_a_window_that_is_resumed_in_its_middle_is_not_taken_for_a_cleared_one() -> None:
    saved = io.BytesIO()

    def save(engine: Engine) -> None:
        torch.save(engine.state_dict(), saved)

    def fresh() -> Engine:
        return build(mlp(5, 8, 1), GradientAccumulation(4))

    engine = fresh()
    engine.connect(Events.ITERATION_COMPLETED(once=3), save)
    engine.run(batches(), max_epochs=1)
    resumed = fresh()
    saved.seek(0)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    resumed.run(batches(), max_epochs=2)


def test_gradients_replaced_by_masked_ones_are_not_taken_for_cleared_ones() -> None:
    model = mlp(5, 8, 1)
    engine = build(model, GradientAccumulation(3))

    @engine.on(Events.BACKWARD_COMPLETED)
    def mask(engine: Engine) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * (parameter.grad > 0)

    engine.run(batches(), max_epochs=1)


def test_steps_that_the_guard_skipped_leave_nothing_more_to_report() -> None:
    data = batches()
    data[1][0][0, 0] = float("nan")
    engine = build(mlp(5, 8, 1), NonFiniteGuard(), optimizer=ADAM)
    with allow("W19"):
        engine.run(data, max_epochs=2)
    assert engine.updates[0].steps == 10  # of 12


def _in_two_processes(kind: str) -> list[str]:
    handler = DistributedDataParallel() if kind == "ddp" else FullyShardedDataParallel()
    engine = build(mlp(5, 8, 1), handler, GradientAccumulation(2), optimizer=ADAM)
    engine.run(batches(8), max_epochs=2)
    return [str(found) for found in engine.findings.of_run()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick(["ddp", "fsdp"], "fsdp"))
def test_two_processes_have_nothing_to_report(kind: str) -> None:
    assert run_together(_in_two_processes, 2, kind) == [[], []]


def test_evaluation_is_not_checked() -> None:
    model = mlp(5, 8, 1)
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(float("nan"))
    Engine(Update.supervised(mse_loss), model=model).run(batches(), max_epochs=1)


def test_nan_is_found_in_any_dtype_and_names_are_cut_short() -> None:
    good = [torch.ones(3, dtype=torch.float16), torch.ones(2), torch.arange(3), torch.empty(0)]
    assert not has_nan(good)
    assert has_nan([*good, torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)])
    assert not has_nan([torch.tensor([float("inf")])])
    names = {p: f"p{i}" for i, p in enumerate(good)}
    assert shown(good, names) == "'p0', 'p1', 'p2' and 1 more"


class FrozenTrunk(nn.Module):
    """Puts its frozen trunk, with its dropout, into eval mode in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)).requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.trunk.eval()(inputs))  # type: ignore[no-any-return]


@pytest.mark.parametrize("guards", [False, True])
def test_a_frozen_part_may_be_in_eval_mode_with_all_that_is_in_it(guards: bool) -> None:
    build(FrozenTrunk(), *([Guards(every="1it")] if guards else [])).run(batches(4), max_epochs=1)


class Descent(torch.optim.Optimizer):
    """Gradient descent in an optimizer of the user's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


def hinge(output: Tensor, target: Tensor) -> Tensor:
    return torch.relu(1 - output * target).mean()


def test_a_loss_that_has_fallen_to_zero_changes_nothing_more() -> None:
    side = torch.tensor([[1.0], [-1.0]]).repeat(2, 1)
    engine = build(linear(5, 1), loss=hinge, optimizer=partial(Descent, lr=1.0))
    engine.run([(10 * side.expand(4, 5), side)], max_epochs=4)
    assert float(engine.updates[0].raw_loss) == 0.0  # type: ignore[arg-type]
    assert not engine.findings.of_run().of("W12")


def test_two_updates_that_share_an_optimizer_make_all_of_its_steps() -> None:
    model = linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def forward(engine: Engine, batch: Any) -> Any:
        return engine.model(batch[0])

    def error(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return mse_loss(output, batch[1])

    def size(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return output.square().mean()

    updates = [Update(forward, error, optimizer, name="error"), Update(forward, size, optimizer, name="size")]
    engine = Engine(updates, model=model, seed=0)
    engine.attach(Guards(every="1it"))
    engine.run(batches(3), max_epochs=2)
    assert not engine.findings.of_run().of("W17")
    assert not engine.findings.of_run().of("G20")


def test_a_last_batch_whose_targets_are_all_ignored_is_no_loss_that_went_wrong() -> None:
    first, last = (torch.randn(4, 5), torch.tensor([0, 1, 2, 0])), (torch.randn(4, 5), torch.full((4,), -100))
    engine = build(linear(5, 3), loss=nn.functional.cross_entropy)
    engine.run([first, last], max_epochs=1)
    assert not engine.findings.of_run().of("W15")
    assert all(bool(p.isfinite().all()) for p in engine.model.parameters())
    broken = build(linear(5, 3), loss=lambda output, target: nn.functional.cross_entropy(output, target) * float("nan"))
    with pytest.warns(FindingWarning, match="W15"):
        broken.run([first], max_epochs=1)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("guards", [False, True])
def test_a_layer_that_is_unfrozen_and_in_no_optimizer_is_reported_as_that(held: bool, guards: bool) -> None:
    model = mlp(5, 8, 1)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if held or p.requires_grad], lr=0.1)
    engine = Engine(Update.supervised(mse_loss, optimizer), model=model, seed=0)
    engine.attach(*([Guards(every="1it")] if guards else []))

    @engine.on(Events.EPOCH_STARTED(once=2))
    def unfreeze(engine: Engine) -> None:
        model[0].requires_grad_(True)

    message = "G05: .*or unfrozen after" if guards else "W11: .*because requires_grad was set to True after"
    with pytest.warns(FindingWarning, match=message) if not held else contextlib.nullcontext():
        engine.run(batches(3), max_epochs=3)


def test_a_head_of_zeros_is_the_only_part_that_the_first_step_moves() -> None:
    layers = [layer for _ in range(11) for layer in (nn.Linear(5, 5), nn.Tanh())]
    head = nn.Linear(5, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    engine = build(nn.Sequential(*layers, head, nn.Linear(1, 1)))
    nn.init.zeros_(engine.model[-1].weight)
    engine.run(batches(1), max_epochs=1)
    assert not engine.findings.of_run().of("W84")


@pytest.mark.parametrize("trained_by", ["its group", "an optimizer of the user's", "averaging"])
def test_a_layer_of_a_later_epoch_that_something_trains_is_not_said_to_be_untrained(trained_by: str) -> None:
    engine = build(nn.Sequential(linear(5, 8), linear(8, 1)))

    def add(engine: Engine) -> None:
        layer = linear(8, 1)
        if trained_by == "its group":
            engine.model[1] = layer
            engine.optimizer.param_groups[0]["params"] = list(engine.model.parameters())
        else:
            engine.model[1].register_module("other", layer)

    def train(engine: Engine) -> None:
        other = getattr(engine.model[1], "other", None)
        if other is not None and trained_by == "averaging":
            with torch.no_grad():
                other.weight.lerp_(engine.model[1].weight, 0.1)
                other.bias.lerp_(engine.model[1].bias, 0.1)
        elif other is not None:
            other(torch.ones(1, 8)).mean().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()

    engine.connect(Events.EPOCH_STARTED(once=2), add)
    engine.connect(Events.ITERATION_COMPLETED, train)
    engine.run(batches(), max_epochs=3)
    assert not {"W11", "W13"} & {one.code for one in engine.findings.of_run()}


def test_of_what_was_added_and_what_was_unfrozen_both_is_said() -> None:
    model = nn.Sequential(linear(5, 8).requires_grad_(False), linear(8, 1))
    engine = build(model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))  # type: ignore[arg-type]

    def change(engine: Engine) -> None:
        model[0].requires_grad_(True)
        model[1].register_module("other", linear(2, 2))

    engine.connect(Events.EPOCH_STARTED(once=2), change)
    with pytest.warns(FindingWarning, match="W11.*because layers were created, replaced or unfrozen"):
        engine.run(batches(), max_epochs=2)


class Teacher(nn.Module):
    """A student, and a teacher that is in eval mode from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = linear(5, 1), nn.Sequential(nn.Dropout(0.5), linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.eval()
        return self.student(x) + self.teacher(x).detach()  # type: ignore[no-any-return]


def test_eval_mode_of_what_no_optimizer_holds_or_what_knows_no_modes_is_no_mistake() -> None:
    model = Teacher()
    build(model, optimizer=torch.optim.SGD(model.student.parameters(), lr=0.1), allow=["C08"]).run(  # type: ignore[arg-type]
        batches(), max_epochs=2
    )
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.model.eval() and None)
    engine.run(batches(), max_epochs=2)


def test_a_loss_that_is_nan_within_an_epoch_is_said_to_be_that() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output[target[:, 0] > 1e9]).mean()

    engine = build(linear(5, 1), loss=loss, allow=["W12"])
    with pytest.warns(FindingWarning) as caught:
        engine.run(batches(), max_iters=3)
    (said,) = [str(one.message) for one in caught if "W15" in str(one.message)]
    assert "after iteration 3, the loss of update 'main' is NaN; look for NaN in the data" in said
    assert "NonFiniteGuard(check='both') skips the steps of such losses" in said
