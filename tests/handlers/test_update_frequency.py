"""UpdateFrequency against a Wasserstein GAN's plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.authoring.planning import steps_to_come
from signalfire.handlers import (
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    MixedPrecision,
    TruncatedBPTT,
    UpdateFrequency,
)
from signalfire.testing import check_handler
from tests.kit import quick, spread

CRITIC, GENERATOR = partial(torch.optim.RMSprop, lr=2e-2), partial(torch.optim.RMSprop, lr=1e-2)
LATENT = 3


def make_models() -> dict[str, nn.Module]:
    torch.manual_seed(2)
    return {
        "critic": nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        "generator": nn.Sequential(nn.Linear(LATENT, 8), nn.Tanh(), nn.Linear(8, 2)),
    }


def make_data(count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [1 + torch.randn(5, 2, generator=generator) for _ in range(count)]


def noise(like: Tensor) -> Tensor:
    """The same for the same real samples, so that order and number of draws do not matter."""
    return torch.randn(5, LATENT, generator=torch.Generator().manual_seed(int(like.sum().item() * 1e4)))


def critic_loss(models: Any, real: Tensor) -> Tensor:
    fake = models["generator"](noise(real)).detach()
    loss: Tensor = models["critic"](fake).mean() - models["critic"](real).mean()
    return loss


def generator_loss(models: Any, real: Tensor) -> Tensor:
    loss: Tensor = -models["critic"](models["generator"](noise(real))).mean()
    return loss


def updates() -> list[Update]:
    return [
        Update.from_function(
            lambda engine, real: critic_loss(engine.modules, real),
            CRITIC,
            name="critic",
            parameters=lambda engine: engine.modules["critic"].parameters(),
        ),
        Update.from_function(
            lambda engine, real: generator_loss(engine.modules, real),
            GENERATOR,
            name="generator",
            parameters=lambda engine: engine.modules["generator"].parameters(),
        ),
    ]


def make_trainer(*handlers: Handler) -> Engine:
    trainer = Engine(updates(), model=make_models(), seed=0)
    trainer.attach(*handlers)
    return trainer


LOSSES = {"critic": critic_loss, "generator": generator_loss}
OPTIMIZERS = {"critic": CRITIC, "generator": GENERATOR}


def train_in_plain_loop(
    turns: dict[str, set[int]], *, windows: dict[str, int] | None = None, count: int = 8, epochs: int = 2
) -> dict[str, nn.Module]:
    """Each network is updated in its iterations; its windows count those, and end with the epoch's last of them."""
    windows = windows or {}
    models = make_models()
    optimizers = {name: OPTIMIZERS[name](model.parameters()) for name, model in models.items()}
    held = dict.fromkeys(models, 0)
    iteration = 0
    for epoch in range(epochs):
        for real in make_data(count):
            iteration += 1
            for name, model in models.items():
                if iteration not in turns[name]:
                    continue
                gradients = torch.autograd.grad(LOSSES[name](models, real), list(model.parameters()))
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p.grad = gradient if p.grad is None else p.grad + gradient
                held[name] += 1
                last = max(turn for turn in turns[name] if turn <= (epoch + 1) * count)
                if held[name] == windows.get(name, 1) or iteration == last:
                    for p in model.parameters():
                        assert p.grad is not None
                        p.grad /= held[name]
                    optimizers[name].step()
                    optimizers[name].zero_grad()
                    held[name] = 0
    return models


def equal(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b)
        for name in ("critic", "generator")
        for a, b in zip(one[name].parameters(), other[name].parameters(), strict=True)
    )


EVERY = set(range(1, 100))


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("handler", "turns"),
    [
        (lambda: UpdateFrequency({"generator": 5}), {5, 10, 15}),
        (lambda: UpdateFrequency(generator=5), {5, 10, 15}),
        (lambda: UpdateFrequency(generator=5, offset={"generator": 1}), {1, 6, 11, 16}),
        (lambda: UpdateFrequency(generator=3, offset={"generator": 8}), {2, 5, 8, 11, 14}),
        (lambda: UpdateFrequency(generator=1), EVERY),
    ],
)
def test_n_critic_equals_a_plain_loop(handler: Any, turns: set[int]) -> None:
    trainer = make_trainer(handler())
    trainer.run(make_data(), max_epochs=2)
    assert equal(trainer.modules, train_in_plain_loop({"critic": EVERY, "generator": turns}))
    assert [update.steps for update in trainer.updates] == [16, len(turns & set(range(1, 17)))]


def test_it_would_be_noticed_if_every_update_were_made_in_every_iteration() -> None:
    reference = train_in_plain_loop({"critic": EVERY, "generator": {5, 10, 15}})
    assert not equal(reference, train_in_plain_loop({"critic": EVERY, "generator": EVERY}))


def test_updates_may_take_turns() -> None:
    trainer = make_trainer(UpdateFrequency(critic=2, generator=2, offset={"critic": 1}))
    trainer.run(make_data(), max_epochs=2)
    odd, even = set(range(1, 17, 2)), set(range(2, 17, 2))
    assert equal(trainer.modules, train_in_plain_loop({"critic": odd, "generator": even}))


def test_it_filters_the_plan_that_others_made() -> None:
    trainer = make_trainer(UpdateFrequency(generator=2))

    @trainer.on(Events.ITERATION_STARTED, phase=Phase.PREPARE)
    def twice(engine: Engine) -> None:
        critic, generator = engine.updates
        engine.state.plan = [generator, critic, critic]

    made: list[tuple[int, str]] = []
    trainer.connect(
        Events.UPDATE_COMPLETED, lambda engine: made.append((engine.state.iteration, engine.state.update.name))
    )
    trainer.run(make_data(2), max_epochs=1)
    assert made == [(1, "critic"), (1, "critic"), (2, "generator"), (2, "critic"), (2, "critic")]


# ---- accumulation -------------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("window", [2, 3, 8])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_windows_count_how_often_the_update_is_made_and_none_is_lost_at_the_end_of_an_epoch(
    window: int, every: int
) -> None:
    turns = set(range(every, 17, every))
    accumulation = GradientAccumulation(window, update="generator")
    trainer = make_trainer(UpdateFrequency(generator=every), accumulation)
    trainer.run(make_data(), max_epochs=2)
    reference = train_in_plain_loop({"critic": EVERY, "generator": turns}, windows={"generator": window})
    assert equal(trainer.modules, reference)
    first = len([turn for turn in turns if turn <= 8])
    assert trainer.updates[1].steps == -(-first // window) + -(-(len(turns) - first) // window)
    assert trainer.updates[1].window.length == window


def test_windows_of_the_update_that_is_made_always_are_not_touched() -> None:
    trainer = make_trainer(UpdateFrequency(generator=3), GradientAccumulation(3, update="critic"))
    trainer.run(make_data(), max_epochs=2)
    turns = {"critic": EVERY, "generator": set(range(3, 17, 3))}
    assert equal(trainer.modules, train_in_plain_loop(turns, windows={"critic": 3}))


@pytest.mark.moderate
@pytest.mark.parametrize("weights", [1, 2])
def test_both_updates_accumulate(weights: int) -> None:
    trainer = make_trainer(UpdateFrequency(generator=3), GradientAccumulation(2))
    trainer.run(make_data(), max_epochs=2)
    turns = {"critic": EVERY, "generator": set(range(3, 17, 3))}
    assert equal(trainer.modules, train_in_plain_loop(turns, windows={"critic": 2, "generator": 2}))


class Unsized:
    def __iter__(self) -> Iterator[Tensor]:
        return iter(make_data())


@pytest.mark.moderate
def test_over_data_without_a_length_it_works_and_windows_need_one() -> None:
    trainer = make_trainer(UpdateFrequency(generator=5))
    trainer.run(Unsized(), max_epochs=2)
    assert equal(trainer.modules, train_in_plain_loop({"critic": EVERY, "generator": {5, 10, 15}}))

    trainer = make_trainer(UpdateFrequency(generator=5), GradientAccumulation(2, update="generator"))
    with pytest.raises(ValueError, match=r"'generator' accumulates gradients.*epoch_length= to run"):
        trainer.run(Unsized(), max_epochs=2)
    assert trainer.state.iteration == 0
    trainer.reset()
    trainer.run(Unsized(), max_epochs=2, epoch_length=8)
    reference = train_in_plain_loop({"critic": EVERY, "generator": {5, 10, 15}}, windows={"generator": 2})
    assert equal(trainer.modules, reference)


# ---- with other handlers ------------------------------------------------------------------------------------------


def test_a_schedule_follows_the_steps_that_are_made_and_learns_that_their_number_is_not_known() -> None:
    trainer = make_trainer(
        UpdateFrequency(generator=5), LRScheduling(partial(StepLR, step_size=1, gamma=0.5), update="generator")
    )
    trainer.run(make_data(), max_epochs=2)
    optimizer = trainer.updates[1].optimizer
    assert optimizer is not None
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 2**3

    schedule = LRScheduling(partial(OneCycleLR, max_lr=0.1), update="generator")
    trainer = make_trainer(UpdateFrequency(generator=5), schedule)
    with pytest.raises(ValueError, match=r"total_steps.*not known"):
        trainer.run(make_data(), max_epochs=2)
    trainer.detach("update_frequency")
    assert steps_to_come(trainer, trainer.updates[1]) == 16


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.gru, self.out = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        states, hidden = self.gru(x, hidden)
        output: Tensor = self.out(states)
        return output, hidden


@pytest.mark.moderate
@pytest.mark.parametrize("order", [1, -1])
def test_with_time_chunks_the_update_is_chosen_first_and_then_made_for_each_chunk(order: int) -> None:
    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(3, 6, 2, generator=generator) for _ in range(5)]
    models = {"often": Recurrent(), "seldom": Recurrent()}

    def part(name: str) -> Update:
        def function(engine: Engine, batch: Tensor) -> Tensor:
            update = engine.state.update
            output, update.hidden = models[name](batch, update.hidden)
            loss: Tensor = output.square().mean()
            return loss

        optimizer = partial(torch.optim.SGD, lr=0.1)
        return Update.from_function(
            function, optimizer, name=name, parameters=lambda engine: engine.modules[name].parameters()
        )

    trainer = Engine([part("often"), part("seldom")], model=models, seed=0)
    handlers = [UpdateFrequency(seldom=2), TruncatedBPTT(2), GradientAccumulation(4, update="seldom")]
    trainer.attach(*handlers[::order])
    trainer.run(data, max_epochs=1)
    assert [update.steps for update in trainer.updates] == [15, 2]  # six chunks of the rare one: windows of 4 and 2

    reference = Recurrent()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    held = 0
    for batch in (data[1], data[3]):
        hidden: Tensor | None = None
        for begin in (0, 2, 4):
            output, hidden = reference(batch[:, begin : begin + 2], None if hidden is None else hidden.detach())
            output.square().mean().backward()
            held += 1
            if held == 4 or (batch is data[3] and begin == 4):
                for p in reference.parameters():
                    assert p.grad is not None
                    p.grad /= held
                optimizer.step()
                optimizer.zero_grad()
                held = 0
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), models["seldom"].parameters(), strict=True))
    trainer.detach("truncated_bptt")
    trainer.attach(LRScheduling(partial(OneCycleLR, max_lr=0.1), update="seldom"))
    with pytest.raises(ValueError, match="not known"):  # it is still the update frequency's word
        trainer.run(data, max_epochs=2)


@pytest.mark.moderate
@pytest.mark.parametrize("order", [1, -1])
def test_clipping_and_scaling_act_when_the_update_is_made(order: int) -> None:
    def handlers() -> list[Handler]:
        return [
            UpdateFrequency(generator=3),
            GradientClipping(max_norm=0.05, update="generator"),
            MixedPrecision("fp16", init_scale=64.0, growth_interval=2),
        ][::order]

    trainer = make_trainer(*handlers())
    trainer.run(make_data(), max_epochs=1)
    models = make_models()
    optimizers = {name: OPTIMIZERS[name](model.parameters()) for name, model in models.items()}
    scalers = {name: torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for name in models}
    for iteration, real in enumerate(make_data(), 1):
        for name, model in models.items():
            if name == "generator" and iteration % 3:
                continue
            with torch.autocast("cpu", torch.float16):
                loss = LOSSES[name](models, real)
            scalers[name].scale(loss).backward(inputs=list(model.parameters()))
            scalers[name].unscale_(optimizers[name])
            if name == "generator":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scalers[name].step(optimizers[name])
            scalers[name].update()
            optimizers[name].zero_grad()
    assert equal(trainer.modules, models)
    assert scalers["generator"].get_scale() == 128.0


# ---- promises -----------------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("window", quick([1, 2], 2))
@pytest.mark.parametrize(
    "make",
    spread(
        [
            lambda: UpdateFrequency(critic=2, generator=2, offset={"generator": 1}),
            lambda: UpdateFrequency(generator=3),
        ],
        1,
    ),
)
def test_it_keeps_the_promises_of_a_handler(make: Any, window: int) -> None:
    check_handler(lambda: make_trainer(GradientAccumulation(window)), make, make_data(7), max_epochs=3)


def test_an_error_inside_the_last_window_leaves_its_length() -> None:
    trainer = make_trainer(UpdateFrequency(generator=5), GradientAccumulation(2))

    def fail(engine: Engine) -> None:
        if engine.state.update.name == "generator":
            raise ArithmeticError

    with trainer.connect(Events.BACKWARD_STARTED(once=5), fail), pytest.raises(ArithmeticError):
        trainer.run(make_data(), max_epochs=1)
    windows: list[int] = []
    trainer.connect(Events.EPOCH_COMPLETED, lambda engine: windows.append(engine.updates[1].window.length))
    trainer.run(make_data(), max_epochs=2)
    assert set(windows) == {2}


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_an_unknown_update_is_refused_when_it_is_attached() -> None:
    with pytest.raises(KeyError, match=r"discriminator.*critic, generator"):
        make_trainer(UpdateFrequency(discriminator=2))


@pytest.mark.parametrize(
    ("handler", "iteration"),
    [
        (lambda: UpdateFrequency(critic=2, generator=2), 1),
        (lambda: UpdateFrequency(critic=2, generator=3, offset={"critic": 1}), 2),
        (lambda: UpdateFrequency(critic=3, generator=3, offset={"critic": 1, "generator": 2}), 3),
    ],
)
def test_frequencies_that_leave_an_iteration_without_an_update_are_refused(handler: Any, iteration: int) -> None:
    with pytest.raises(ValueError, match=f"no update would run in iteration {iteration}"):
        make_trainer(handler())


def test_two_refuse_each_other_since_together_they_could_leave_an_iteration_without_an_update() -> None:
    trainer = make_trainer(UpdateFrequency(generator=2))
    with pytest.raises(ValueError, match=r"both 'update_frequency' and 'second'.*how often each update runs"):
        trainer.attach(UpdateFrequency(critic=2, name="second"))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, ValueError, r"UpdateFrequency\(every={}\)"),
        ({"every": 5}, TypeError, r"UpdateFrequency\(every=5"),
        ({"offset": 5, "generator": 2}, TypeError, r"offset=5"),
        ({"generator": 0}, ValueError, r"UpdateFrequency\(every\['generator'\]=0\)"),
        ({"generator": 2.0}, TypeError, r"UpdateFrequency\(every\['generator'\]=2.0\)"),
        ({"generator": True}, TypeError, r"UpdateFrequency\(every\['generator'\]=True\)"),
        ({"generator": 2, "offset": {"generator": -1}}, ValueError, r"UpdateFrequency\(offset\['generator'\]=-1\)"),
        ({"generator": 2, "offset": {"critic": 1}}, ValueError, r"UpdateFrequency\(offset={'critic': 1}\)"),
        ({"every": {"generator": 2}, "generator": 3}, ValueError, r"given both in every= and as a keyword: generator;"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        UpdateFrequency(**arguments)


class Counting(Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str]] = []

    @on(Events.UPDATE_STARTED)
    def count(self, engine: Engine) -> None:
        self.seen.append((engine.state.iteration, engine.state.update.name))


def test_switched_off_every_update_is_made_again() -> None:
    counting = Counting()
    trainer = make_trainer(UpdateFrequency(generator=4), counting)
    with trainer.without("update_frequency"):
        trainer.run(make_data(4), max_epochs=1)
    assert [iteration for iteration, name in counting.seen if name == "generator"] == [1, 2, 3, 4]
    trainer.run(make_data(4), max_epochs=2)
    assert [iteration for iteration, name in counting.seen if name == "generator"] == [1, 2, 3, 4, 8]


@pytest.mark.parametrize("order", [1, -1])
def test_a_schedule_knows_that_batches_are_not_steps_after_another_handler_has_left(order: int) -> None:
    models: dict[str, nn.Module] = {"often": nn.Linear(2, 1), "seldom": nn.Linear(2, 1)}

    def part(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: models[name](batch).square().mean(),
            partial(torch.optim.SGD, lr=0.1),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([part("often"), part("seldom")], model=models, seed=0)
    handlers = [LRScheduling(partial(CosineAnnealingLR), update="seldom"), UpdateFrequency(seldom=2), TruncatedBPTT(2)]
    engine.attach(*handlers[::order])
    engine.detach("truncated_bptt")
    with pytest.raises(ValueError, match="the number of steps in this run is not known"):
        engine.run(make_data(4), max_epochs=1)
