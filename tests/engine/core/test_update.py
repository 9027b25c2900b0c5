"""The update: how it is written, several in one engine, and flags that it reads together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import GradientAccumulation
from tests import kit
from tests.kit import assert_same, mlp

Batch = tuple[Tensor, Tensor]
mse = nn.functional.mse_loss
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_data(batches: int = 6) -> list[Batch]:
    return kit.batches(batches, 3, 2, seed=1)


def make_model() -> nn.Module:
    return mlp(3, 5, 2, nn.Tanh(), seed=0)


def make_trainer(update: Update | None = None) -> Engine:
    return Engine(update or Update.supervised(mse, SGD), model=make_model(), seed=0)


def plain_loop(data: Iterable[Batch]) -> nn.Module:
    model = make_model()
    optimizer = SGD(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return model


def forward(engine: Engine, batch: Batch) -> Tensor:
    output: Tensor = engine.model(batch[0])
    return output


def loss_of(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
    return mse(output, batch[1])


def test_a_supervised_update_is_the_plain_loop() -> None:
    data = make_data()
    trainer = make_trainer()
    trainer.run(data, max_epochs=2)
    assert_same(trainer.model, plain_loop(data * 2))
    assert trainer.updates[0].steps == 12


@pytest.mark.parametrize("of", ["class", "object"])
def test_an_optimizer_with_a_zero_grad_of_its_own_clears_its_gradients_itself(of: str) -> None:
    cleared: list[int] = []

    class Zeroing(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            cleared.append(1)
            super().zero_grad(set_to_none=False)

    def own(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        if of == "class":
            return Zeroing(parameters, lr=0.1, momentum=0.9)
        optimizer = SGD(parameters)
        original = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            cleared.append(1)
            original(set_to_none=False)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        return optimizer

    trainer = make_trainer(Update(forward, loss_of, own))

    data = make_data(3)
    trainer.run(data, max_epochs=1)
    assert len(cleared) >= 3
    assert all(p.grad is not None and not p.grad.any() for p in trainer.model.parameters())
    assert_same(trainer.model, plain_loop(data))


# ---- several updates ----------------------------------------------------------------------------------------------


def make_gan() -> tuple[dict[str, nn.Module], list[Tensor]]:
    torch.manual_seed(4)
    models: dict[str, nn.Module] = {
        "generator": nn.Linear(3, 2),
        "critic": nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)),
    }
    return models, list(torch.randn(6, 5, 2).unbind())


def noise(iteration: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(iteration))


def critic_loss(models: Any, real: Tensor, iteration: int) -> Tensor:
    fake = models["generator"](noise(iteration)).detach()
    loss: Tensor = (models["critic"](fake) - models["critic"](real)).mean() + models["critic"](real).square().mean()
    return loss


def generator_loss(models: Any, iteration: int) -> Tensor:
    loss: Tensor = -models["critic"](models["generator"](noise(iteration))).mean()
    return loss


CRITIC_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
GENERATOR_SGD = partial(torch.optim.SGD, lr=0.02)


def gan_updates() -> list[Update]:
    return [
        Update.from_function(
            lambda engine, batch: critic_loss(engine.modules, batch, engine.state.iteration),
            CRITIC_SGD,
            name="critic",
            parameters=lambda engine: engine.modules["critic"].parameters(),
        ),
        Update.from_function(
            lambda engine, batch: generator_loss(engine.modules, engine.state.iteration),
            GENERATOR_SGD,
            name="generator",
            parameters=lambda engine: engine.modules["generator"].parameters(),
        ),
    ]


def plain_gan_loop(critic_in: Iterable[int], generator_in: Iterable[int]) -> dict[str, nn.Module]:
    """The loop of every GAN tutorial: each optimizer's gradients are cleared before its own backward."""
    models, data = make_gan()
    critic, generator = CRITIC_SGD(models["critic"].parameters()), GENERATOR_SGD(models["generator"].parameters())
    for iteration, real in enumerate(data, 1):
        if iteration in critic_in:
            critic.zero_grad()
            critic_loss(models, real, iteration).backward()
            critic.step()
        if iteration in generator_in:
            generator.zero_grad()
            generator_loss(models, iteration).backward()
            generator.step()
    return models


def test_two_updates_run_in_order_each_with_its_own_optimizer() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)
    order: list[tuple[int, str]] = []
    trainer.connect(
        Events.OPTIMIZER_STEP_COMPLETED,
        lambda engine: order.append((engine.state.iteration, engine.state.update.name)),
    )
    trainer.run(data[:2], max_epochs=1)
    assert order == [(1, "critic"), (1, "generator"), (2, "critic"), (2, "generator")]
    critic, generator = trainer.updates
    assert critic.parameters == list(models["critic"].parameters())
    assert generator.parameters == list(models["generator"].parameters())
    assert (critic.steps, generator.steps) == (2, 2)


def test_two_updates_train_a_gan_as_a_plain_loop_does() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)
    trainer.run(data, max_epochs=1)
    expected = plain_gan_loop(range(1, 7), range(1, 7))
    for name in models:
        assert_same(models[name], expected[name])


def test_an_update_may_go_on_from_what_an_earlier_one_computed() -> None:
    # As in PyTorch's DCGAN tutorial: the images are made once, for the critic and for the generator.
    models, data = make_gan()
    made: dict[str, Tensor] = {}

    def critic_first(engine: Engine, real: Tensor) -> Tensor:
        made["fake"] = engine.modules["generator"](noise(engine.state.iteration))
        judge = engine.modules["critic"]
        loss: Tensor = (judge(made["fake"].detach()) - judge(real)).mean() + judge(real).square().mean()
        return loss

    def then_generator(engine: Engine, real: Tensor) -> Tensor:
        loss: Tensor = -engine.modules["critic"](made["fake"]).mean()
        return loss

    critic, generator = gan_updates()
    updates = [replace(critic, function=critic_first), replace(generator, function=then_generator)]
    Engine(updates, model=models, seed=0).run(data, max_epochs=1)
    expected = plain_gan_loop(range(1, 7), range(1, 7))
    for name in models:
        assert_same(models[name], expected[name])


def test_the_plan_of_an_iteration_may_be_changed() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)
    critic, generator = trainer.updates

    @trainer.on(Events.ITERATION_STARTED)
    def every_third(engine: Engine) -> None:
        assert engine.state.plan == (critic, generator)  # of this iteration only
        if engine.state.iteration % 3:
            engine.state.plan = [critic]

    trainer.run(data, max_epochs=1)
    assert (critic.steps, generator.steps) == (6, 2)
    expected = plain_gan_loop(range(1, 7), (3, 6))
    for name in models:
        assert_same(models[name], expected[name])


def test_an_update_may_stand_in_the_plan_twice_or_not_at_all() -> None:
    data = make_data(2)
    trainer = make_trainer()

    @trainer.on(Events.ITERATION_STARTED)
    def change(engine: Engine) -> None:
        engine.state.plan = engine.updates * 2 if engine.state.iteration == 1 else ()

    trainer.run(data, max_epochs=1)
    assert trainer.updates[0].steps == 2
    assert_same(trainer.model, plain_loop([data[0], data[0]]))


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
@pytest.mark.parametrize("times", [0, 2])
def test_a_plan_holds_for_its_iteration_alone(names: list[str], times: int) -> None:
    made: list[tuple[int, str]] = []

    def note(engine: Engine, batch: Batch) -> None:
        made.append((engine.state.iteration, engine.state.update.name))

    evaluator = Engine([Update.from_function(note, name=name) for name in names])

    def plan_once(engine: Engine) -> None:
        engine.state.plan = engine.updates[:1] * times
        planning.detach()  # so that nobody listens to the iterations that follow

    planning = evaluator.connect(Events.ITERATION_STARTED(once=2), plan_once)
    evaluator.run(make_data(3))
    every = {1: names, 2: ["a"] * times, 3: names}
    assert made == [(iteration, name) for iteration, planned in every.items() for name in planned]


def test_a_window_of_one_update_leaves_the_other_as_it_is() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)
    trainer.attach(GradientAccumulation(3, update="critic"))
    steps: list[tuple[int, str]] = []
    trainer.connect(
        Events.OPTIMIZER_STEP_COMPLETED,
        lambda engine: steps.append((engine.state.iteration, engine.state.update.name)),
    )
    trainer.run(data, max_epochs=1)
    assert [iteration for iteration, name in steps if name == "critic"] == [3, 6]
    assert [iteration for iteration, name in steps if name == "generator"] == [1, 2, 3, 4, 5, 6]

    expected, _ = make_gan()
    critic, generator = CRITIC_SGD(expected["critic"].parameters()), GENERATOR_SGD(expected["generator"].parameters())
    held: list[list[Tensor]] = []
    for iteration, real in enumerate(data, 1):
        loss = critic_loss(expected, real, iteration)
        held.append(list(torch.autograd.grad(loss, list(expected["critic"].parameters()))))
        if iteration % 3 == 0:
            for p, *gradients in zip(expected["critic"].parameters(), *held, strict=True):
                p.grad = (gradients[0] + gradients[1] + gradients[2]) / 3
            critic.step()
            held.clear()
        generator.zero_grad()
        generator_loss(expected, iteration).backward()
        generator.step()
    for name in models:
        assert_same(models[name], expected[name])


def test_a_frozen_network_among_several_updates_stays_as_it_is() -> None:
    models, data = make_gan()
    models["critic"].requires_grad_(False)
    models["critic"][2].requires_grad_(True)  # type: ignore[index]
    before = {name: value.clone() for name, value in models["critic"].state_dict().items()}
    trainer = Engine(gan_updates(), model=models, seed=0)
    trainer.run(data, max_epochs=1)
    same = {name: torch.equal(value, before[name]) for name, value in models["critic"].state_dict().items()}
    assert same == {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False}


def test_a_skip_concerns_its_own_update_only() -> None:
    models, data = make_gan()
    trainer = Engine(gan_updates(), model=models, seed=0)

    @trainer.on(Events.GRADIENTS_READY)
    def skip(engine: Engine) -> None:
        if engine.state.update.name == "critic":
            engine.state.update.skip("on purpose")

    trainer.run(data, max_epochs=1)
    assert [update.steps for update in trainer.updates] == [0, 6]


# ---- constructors -------------------------------------------------------------------------------------------------


async def coroutine(engine: Engine, batch: Batch) -> Tensor:
    return torch.zeros(())


BUILT = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass either forward= .* or function="),
        ({"forward": forward, "function": forward}, "pass either forward= .* or function="),
        ({"function": forward, "loss": loss_of}, "omit loss="),
        ({"forward": 3}, "forward=3 is not callable"),
        ({"forward": forward, "loss": "mse"}, "loss='mse' is not callable"),
        (
            {"forward": forward, "loss": loss_of, "optimizer": 0.1},
            r"optimizer=0.1 is not callable; pass the optimizer's class",
        ),
        ({"function": forward, "optimizer": SGD, "parameters": 3}, r"parameters=3; expected the name of a module"),
        ({"forward": forward, "optimizer": SGD}, "an update with an optimizer needs a loss"),
        ({"forward": forward, "loss": loss_of, "optimizer": BUILT, "parameters": list}, "optimizer= is already built"),
        ({"forward": lambda batch: None}, r"forward=.* must accept \(engine, batch\)"),
        ({"function": lambda: None}, r"function=.* must accept \(engine, batch\)"),
        ({"forward": forward, "loss": lambda output, batch: None}, r"loss=.* must accept \(engine, output, batch\)"),
        ({"function": coroutine}, "function=.* is a coroutine function"),
    ],
    ids=[
        "nothing",
        "forward and function",
        "function and loss",
        "forward is a number",
        "loss is a name",
        "optimizer is a number",
        "parameters is a number",
        "optimizer without loss",
        "optimizer is built",
        "forward of one argument",
        "function of none",
        "loss of two",
        "function is a coroutine",
    ],
)
def test_an_update_that_makes_no_sense_is_refused_where_it_is_written(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"Update 'generator': .*{message}"):
        Update(**arguments, name="generator")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.SGD, lr=0.1)])
def test_an_optimizer_in_place_of_the_loss_is_refused(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"Update.supervised\(.*SGD.*\): got an optimizer as the loss; write"):
        Update.supervised(optimizer, torch.nn.functional.cross_entropy)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [torch.nn.MSELoss, partial(torch.nn.MSELoss, reduction="sum")])
def test_a_class_in_place_of_a_loss_is_refused(loss: Any) -> None:
    with pytest.raises(TypeError, match=r"Update.supervised\(.*MSELoss.*\): .* pass an instance: MSELoss\(\.\.\.\)$"):
        Update.supervised(loss)


def test_a_supervised_loss_takes_two_arguments() -> None:
    with pytest.raises(TypeError, match=r"Update 'main': loss=.*must accept \(output, target\)"):
        Update.supervised(loss_of)  # type: ignore[arg-type]


def test_one_update_serves_several_engines() -> None:
    data, update = make_data(), Update.supervised(mse, SGD)
    one, two = make_trainer(update), make_trainer(update)
    one.run(data, max_epochs=1)
    two.run(data, max_epochs=1)
    assert_same(one.model, two.model)
    assert one.updates[0].optimizer is not two.updates[0].optimizer


@pytest.mark.filterwarnings("ignore:W49")
def test_the_evaluation_of_an_update_has_its_loss_and_changes_nothing() -> None:
    evaluator = make_trainer(Update.supervised(mse, SGD).evaluation())
    losses: list[Tensor | None] = []
    modes: list[bool] = []
    evaluator.connect(Events.LOSS_COMPUTED, lambda engine: losses.append(engine.state.update.loss))
    evaluator.connect(Events.LOSS_COMPUTED, lambda engine: modes.append(engine.model.training))
    evaluator.connect(Events.BACKWARD_STARTED, lambda engine: pytest.fail("an evaluation has no backward"))
    data = make_data(2)
    evaluator.run(data)
    model = make_model()
    expected = [mse(model(x), y).detach() for x, y in data]
    assert all(loss is not None and torch.equal(loss, one) for loss, one in zip(losses, expected, strict=True))
    assert modes == [False, False]
    assert evaluator.model.training
    assert_same(evaluator.model, model)


def test_a_factory_that_makes_no_optimizer_is_refused() -> None:
    trainer = make_trainer(Update.supervised(mse, lambda parameters: "SGD"))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="update 'main': the optimizer factory returned 'SGD'"):
        trainer.run(make_data(), max_epochs=1)


# ---- reading flags from a device ----------------------------------------------------------------------------------


def test_flags_are_read_together_and_reported_in_the_order_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = Tensor.tolist

    def counted(self: Tensor) -> Any:
        reads.append(self.numel())
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    update = make_trainer().updates[0]
    reported: list[tuple[Any, ...]] = []
    update.read_later(lambda *values: reported.append(("one", *values)), torch.tensor([0.0]), torch.tensor(2.0))
    update.read_later(lambda *values: reported.append(("none", *values)))
    update.read_later(lambda *values: reported.append(("another", *values)), torch.tensor(True))
    assert reported == []
    update.read_flags()
    assert reported == [("one", False, True), ("none",), ("another", True)]
    assert reads == [3]
    update.read_flags()
    assert len(reported) == 3, "each question is answered once"


def test_who_asked_without_a_flag_is_known_without_reading() -> None:
    update = make_trainer().updates[0]
    reported: list[str] = []
    update.read_later(lambda: reported.append("done"))
    update.read_flags()
    assert reported == ["done"]


def test_what_was_asked_before_an_error_is_not_answered_in_the_next_run() -> None:
    trainer = make_trainer()
    reported: list[int] = []

    @trainer.on(Events.GRADIENTS_READY, phase=Phase.FINALIZE)
    def ask(engine: Engine) -> None:
        iteration = engine.state.iteration
        engine.state.update.read_later(lambda flag: reported.append(iteration), torch.tensor(1))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    failing = trainer.connect(Events.GRADIENTS_READY(once=2), fail, phase=Phase.FINALIZE)

    @trainer.on(Events.GRADIENTS_READY, phase=Phase.FINALIZE, rank=1)
    def look(engine: Engine) -> None:
        engine.state.update.read_flags()

    with pytest.raises(ArithmeticError):
        trainer.run(make_data(), max_epochs=1)
    failing.detach()
    trainer.run(make_data(), max_iters=3)
    assert reported == [1, 2, 3]


def test_decorated_functions_are_checked_as_they_are_called() -> None:
    def inner(output: Any, target: Any, extra: Any) -> Tensor:
        return mse(output, target) * float(extra)

    @wraps(inner)
    def loss(output: Any, target: Any) -> Tensor:
        return inner(output, target, 1)

    def of_group(parameters: Any, group: Any, rate: float) -> Optimizer:
        return torch.optim.SGD(parameters, lr=rate)

    @wraps(of_group)
    def optimizer(parameters: Any, lr: float = 0.1) -> Optimizer:
        return of_group(parameters, None, lr)

    engine = Engine(Update.supervised(loss, optimizer, lr=0.5), model=nn.Linear(5, 1), seed=0)
    engine.run(kit.batches(1), max_epochs=1)
    assert engine.optimizer.param_groups[0]["lr"] == 0.5

    @wraps(mse)
    def needs_more(output: Any, target: Any, weight: Any) -> Tensor: ...  # type: ignore[empty-body]

    refused: Any = needs_more
    with pytest.raises(
        TypeError, match=r"loss=.*must accept \(output, target\): missing a required argument: 'weight'"
    ):
        Update.supervised(refused, SGD)
