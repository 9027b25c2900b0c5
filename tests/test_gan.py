"""A GAN, two updates with an optimizer each, against a plain PyTorch loop: alone and with the handlers it meets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from signalfire import Engine, Events, Handler, Phase, Update
from signalfire.handlers import GradientAccumulation, GradientClipping, LRScheduling, MixedPrecision, UpdateFrequency
from signalfire.testing import check_handler
from tests import kit

ADAM = {
    "discriminator": partial(torch.optim.Adam, lr=2e-2, betas=(0.5, 0.999)),
    "generator": partial(torch.optim.Adam, lr=1e-2, betas=(0.5, 0.999)),
}
NAMES = tuple(ADAM)
LATENT, SAMPLES, BATCHES = 3, 6, 7

bce = nn.functional.binary_cross_entropy_with_logits


def make_models() -> dict[str, nn.Module]:
    torch.manual_seed(2)
    return {
        "discriminator": nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        "generator": nn.Sequential(nn.Linear(LATENT, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
    }


def make_data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SAMPLES, 4, generator=generator) * 0.3 + 1 for _ in range(BATCHES)]


def discriminate(models: Any, real: Tensor) -> tuple[Tensor, Tensor]:
    noise = torch.randn(SAMPLES, LATENT)  # from the global stream, as models draw
    fake = models["generator"](noise).detach()
    return models["discriminator"](real), models["discriminator"](fake)


def discriminator_loss(output: tuple[Tensor, Tensor]) -> Tensor:
    real, fake = output
    return bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))


def generate(models: Any, real: Tensor) -> Tensor:
    judged: Tensor = models["discriminator"](models["generator"](torch.randn(SAMPLES, LATENT)))
    return judged


def generator_loss(judged: Tensor) -> Tensor:
    return bce(judged, torch.ones_like(judged))


FORWARDS: dict[str, Callable[[Any, Tensor], Any]] = {"discriminator": discriminate, "generator": generate}
LOSSES: dict[str, Callable[[Any], Tensor]] = {"discriminator": discriminator_loss, "generator": generator_loss}


def make_update(name: str) -> Update:
    def forward(engine: Engine, real: Tensor) -> Any:
        return FORWARDS[name](engine.modules, real)

    def loss(engine: Engine, output: Any, real: Tensor) -> Tensor:
        return LOSSES[name](output)

    return Update(
        forward, loss, ADAM[name], name=name, parameters=lambda engine: engine.modules[name].parameters()
    )  # fmt: skip


def make_trainer(*handlers: Handler) -> Engine:
    trainer = Engine([make_update(name) for name in NAMES], model=make_models(), seed=0)
    trainer.attach(*handlers)
    return trainer


def trained(*handlers: Handler, epochs: int = 2) -> Engine:
    trainer = make_trainer(*handlers)
    torch.manual_seed(9)
    trainer.run(make_data(), max_epochs=epochs)
    return trainer


def train_in_plain_loop(
    *,
    epochs: int = 2,
    n_critic: int = 1,
    windows: dict[str, int] | None = None,
    max_norm: dict[str, float] | None = None,
    scaled: bool = False,
    schedules: dict[str, Callable[[Any], Any]] | None = None,
) -> tuple[dict[str, nn.Module], dict[str, torch.amp.GradScaler]]:
    """The discriminator in every iteration, the generator in every n_critic-th; each accumulates, clips and scales by itself."""
    windows, max_norm, schedules = windows or {}, max_norm or {}, schedules or {}
    models = make_models()
    optimizers = {name: ADAM[name](models[name].parameters()) for name in NAMES}
    schedulers = {name: factory(optimizers[name]) for name, factory in schedules.items()}
    scalers = {
        name: torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3, enabled=scaled) for name in NAMES
    }
    torch.manual_seed(9)
    iteration = 0
    for epoch in range(epochs):
        held = dict.fromkeys(NAMES, 0)
        for real in make_data():
            iteration += 1
            for name in NAMES:
                every = n_critic if name == "generator" else 1
                if iteration % every:
                    continue
                parameters = list(models[name].parameters())
                with torch.autocast("cpu", torch.float16, enabled=scaled):
                    loss = LOSSES[name](FORWARDS[name](models, real))
                gradients = torch.autograd.grad(scalers[name].scale(loss), parameters)
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient if p.grad is None else p.grad + gradient
                held[name] += 1
                if held[name] < windows.get(name, 1) and iteration + every <= (epoch + 1) * BATCHES:
                    continue
                for p in parameters:
                    assert p.grad is not None
                    p.grad /= held[name]
                held[name] = 0
                if scaled:
                    scalers[name].unscale_(optimizers[name])
                if name in max_norm:
                    nn.utils.clip_grad_norm_(parameters, max_norm[name])
                if scaled:
                    scalers[name].step(optimizers[name])
                    scalers[name].update()
                else:
                    optimizers[name].step()
                optimizers[name].zero_grad()
                if name in schedulers:
                    schedulers[name].step()
    return models, scalers


def assert_same(trainer: Engine, models: dict[str, nn.Module]) -> None:
    for name in NAMES:
        kit.assert_same(trainer.modules[name], models[name])


def frequency(n_critic: int) -> list[Handler]:
    return [UpdateFrequency(generator=n_critic)] if n_critic > 1 else []


@pytest.mark.moderate
@pytest.mark.parametrize("n_critic", [1, 2, 5])
def test_alone_and_with_n_critic(n_critic: int) -> None:
    trainer = trained(*frequency(n_critic))
    assert_same(trainer, train_in_plain_loop(n_critic=n_critic)[0])
    assert [update.steps for update in trainer.updates] == [14, 14 // n_critic]


@pytest.mark.moderate
@pytest.mark.parametrize("n_critic", [1, 2])
@pytest.mark.parametrize(
    "windows", [{"discriminator": 3}, {"generator": 2}, {"discriminator": 2, "generator": 3}], ids=str
)
def test_with_accumulation_for_one_or_both(windows: dict[str, int], n_critic: int) -> None:
    handlers = [GradientAccumulation(n, update=name, name=f"for_{name}") for name, n in windows.items()]
    trainer = trained(*handlers, *frequency(n_critic))
    assert_same(trainer, train_in_plain_loop(windows=windows, n_critic=n_critic)[0])


@pytest.mark.moderate
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [1, 2])
def test_with_clipping_for_one_update(name: str, window: int) -> None:
    trainer = trained(GradientClipping(max_norm=0.01, update=name), GradientAccumulation(window))
    windows = dict.fromkeys(NAMES, window)
    assert_same(trainer, train_in_plain_loop(max_norm={name: 0.01}, windows=windows)[0])
    unclipped, _ = train_in_plain_loop(windows=windows)
    with pytest.raises(AssertionError):
        assert_same(trainer, unclipped)


@pytest.mark.moderate
@pytest.mark.parametrize("n_critic", [1, 2])
def test_with_fp16_each_update_has_a_scaler_of_its_own(n_critic: int) -> None:
    scaling = MixedPrecision("fp16", init_scale=2.0**14, growth_interval=3)
    trainer = trained(scaling, GradientClipping(max_norm=0.5), *frequency(n_critic))
    models, scalers = train_in_plain_loop(scaled=True, max_norm=dict.fromkeys(NAMES, 0.5), n_critic=n_critic)
    assert_same(trainer, models)
    scales = {name: scaler.get_scale() for name, scaler in scaling.scalers.items()}
    assert scales == {name: scaler.get_scale() for name, scaler in scalers.items()}
    assert n_critic == 1 or scales["discriminator"] != scales["generator"]


def test_an_overflow_of_one_update_skips_its_step_alone() -> None:
    scaling = MixedPrecision("fp16", init_scale=2.0**8)
    trainer = make_trainer(scaling)
    skipped: list[tuple[int, str]] = []

    def overflow(engine: Engine) -> None:
        if engine.state.update.name == "generator":
            engine.state.update.backward_loss = engine.state.update.backward_loss * float("inf")

    def note(engine: Engine) -> None:
        if engine.state.update.skipped is not None:
            skipped.append((engine.state.iteration, engine.state.update.name))

    trainer.connect(Events.LOSS_COMPUTED(once=3), overflow)
    trainer.connect(Events.OPTIMIZER_STEP_COMPLETED, note, phase=Phase.RECORD)
    trainer.run(make_data(), max_epochs=1)
    assert skipped == [(3, "generator")]
    assert [update.steps for update in trainer.updates] == [7, 6]
    assert [scaler.get_scale() for scaler in scaling.scalers.values()] == [2.0**8, 2.0**7]


def test_with_a_schedule_for_each_optimizer() -> None:
    schedules: dict[str, Any] = {
        "discriminator": partial(ExponentialLR, gamma=0.9),
        "generator": partial(OneCycleLR, max_lr=0.05, total_steps=8),
    }
    handlers: list[Handler] = [
        LRScheduling(schedules["discriminator"], update="discriminator", name="discriminator_schedule"),
        LRScheduling(schedules["generator"], update="generator", name="generator_schedule"),
        GradientAccumulation(2, update="discriminator"),
    ]
    trainer = trained(*handlers, *frequency(2))
    reference, _ = train_in_plain_loop(schedules=schedules, windows={"discriminator": 2}, n_critic=2)
    assert_same(trainer, reference)


@pytest.mark.slow
def test_all_at_once_in_any_order() -> None:
    def handlers() -> list[Handler]:
        return [
            UpdateFrequency(generator=2),
            GradientAccumulation(2),
            MixedPrecision("fp16", init_scale=2.0**14, growth_interval=3),
            GradientClipping(max_norm=0.05, update="generator"),
            LRScheduling(partial(ExponentialLR, gamma=0.8), update="generator"),
        ]

    reference, _ = train_in_plain_loop(
        n_critic=2,
        windows=dict.fromkeys(NAMES, 2),
        max_norm={"generator": 0.05},
        scaled=True,
        schedules={"generator": partial(ExponentialLR, gamma=0.8)},
    )
    for shift in range(5):
        for order in (1, -1):
            new = handlers()[::order]
            assert_same(trained(*new[shift:], *new[:shift]), reference)


@pytest.mark.parametrize("window", [1, 3])
def test_each_update_leaves_the_other_networks_gradients_and_weights_untouched(window: int) -> None:
    """Those of the discriminator, which the generator's gradient flows through, above all."""
    trainer = make_trainer(GradientAccumulation(window))
    before: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
    compared = {"weights": 0, "gradients held": 0, "no gradients": 0}

    def others(engine: Engine) -> list[nn.Parameter]:
        name = next(name for name in NAMES if name != engine.state.update.name)
        return list(engine.modules[name].parameters())

    @trainer.on(Events.UPDATE_STARTED, phase=Phase.PREPARE)
    def keep(engine: Engine) -> None:
        kept = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in others(engine)]
        before[engine.state.update.name] = kept

    @trainer.on(Events.BACKWARD_COMPLETED | Events.UPDATE_COMPLETED, phase=Phase.RECORD)
    def compare(engine: Engine) -> None:
        for p, (weight, gradient) in zip(others(engine), before[engine.state.update.name], strict=True):
            assert torch.equal(p, weight)
            compared["weights"] += 1
            if gradient is None:
                assert p.grad is None
                compared["no gradients"] += 1
            else:
                assert p.grad is not None
                assert torch.equal(p.grad, gradient)
                compared["gradients held"] += 1

    trainer.run(make_data(), max_epochs=1)
    assert compared["weights"]
    assert compared["no gradients"]
    assert bool(compared["gradients held"]) == (window > 1), "inside a window the other network's gradients wait"


@pytest.mark.slow
def test_a_gan_resumes_after_any_iteration() -> None:
    def build() -> Engine:
        return make_trainer(
            GradientAccumulation(2),
            MixedPrecision("fp16", init_scale=2.0**14, growth_interval=3),
            GradientClipping(max_norm=0.05, update="generator"),
            LRScheduling(partial(ExponentialLR, gamma=0.8), update="generator"),
        )

    check_handler(build, lambda: UpdateFrequency(generator=2), make_data(), max_epochs=2)
