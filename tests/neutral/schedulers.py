"""Every scheduler: 100 steps equal to the plain loop, and equal when resumed at step 37."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as torch_schedulers

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import LRScheduling
from tests.handlers.test_lr_scheduling import timm_schedulers

from .outcomes import Outcome, judged, same

STEPS, CUT = 100, 37
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def network() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 1)


def batches() -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(STEPS)]


def engine_of(factory: Any, monitor: str | None) -> Engine:
    engine = Engine(
        Update.supervised(F.mse_loss, SGD),
        model=network(),
        seed=0,
    )
    engine.attach(LRScheduling(factory, monitor=monitor))
    if monitor is not None:
        engine.connect(
            Events.OPTIMIZER_STEP_COMPLETED, lambda engine: engine.log(monitor, engine.state.update.loss.item())
        )
    return engine


def check(factory: Callable[..., Any], monitor: str | None = None, counted: bool = False) -> str | None:
    """Why a scheduler does not pass; None if it does."""
    theirs, expected = network(), []
    optimizer = SGD(theirs.parameters())
    scheduler = factory(optimizer)
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = F.mse_loss(theirs(inputs), targets)
        loss.backward()
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        if counted:
            scheduler.step_update(step)
        elif monitor is not None:
            scheduler.step(loss.item())
        else:
            scheduler.step()
    rates: list[Any] = []
    states: list[Any] = []
    engine = engine_of(factory, monitor)
    engine.connect(
        Events.OPTIMIZER_STEP_STARTED,
        lambda engine: rates.append(engine.updates[0].optimizer.param_groups[0]["lr"]),
    )
    engine.connect(
        Events.ITERATION_COMPLETED(once=CUT), lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST
    )
    engine.run(batches(), max_epochs=1, check=False)
    if rates != expected or not same(engine.model.parameters(), theirs.parameters()):
        return "differs from the plain loop"
    resumed = engine_of(factory, monitor)
    resumed.load_state_dict(states[0])
    resumed.run(batches(), max_epochs=1, check=False)
    return None if same(resumed.model.parameters(), theirs.parameters()) else "resumed, it differs from the plain loop"


def of_torch() -> list[Outcome]:
    """The schedulers of torch.optim.lr_scheduler."""
    s = torch_schedulers
    factories: dict[str, Any] = {
        "ConstantLR": partial(s.ConstantLR, factor=0.5, total_iters=20),
        "CosineAnnealingLR": partial(s.CosineAnnealingLR, T_max=STEPS),
        "CosineAnnealingWarmRestarts": partial(s.CosineAnnealingWarmRestarts, T_0=9, T_mult=2),
        "CyclicLR": partial(s.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=9),
        "ExponentialLR": partial(s.ExponentialLR, gamma=0.98),
        "LRScheduler": None,
        "LambdaLR": partial(s.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        "LinearLR": partial(s.LinearLR, start_factor=0.1, total_iters=30),
        "MultiStepLR": partial(s.MultiStepLR, milestones=[20, 60]),
        "MultiplicativeLR": partial(s.MultiplicativeLR, lr_lambda=lambda step: 0.98),
        "OneCycleLR": partial(s.OneCycleLR, max_lr=0.1, total_steps=STEPS),
        "PolynomialLR": partial(s.PolynomialLR, total_iters=STEPS, power=2),
        "StepLR": partial(s.StepLR, step_size=30),
        "ChainedScheduler": lambda o: s.ChainedScheduler([s.ExponentialLR(o, 0.99), s.StepLR(o, 40)], optimizer=o),
        "SequentialLR": lambda o: s.SequentialLR(
            o, [s.LinearLR(o, 0.1, total_iters=20), s.CosineAnnealingLR(o, 80)], [20]
        ),
        "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=30),
    }
    found = [judged(name, partial(check, factory)) for name, factory in factories.items() if factory is not None]
    plateau = partial(s.ReduceLROnPlateau, patience=3, mode="min")
    return [*found, judged("ReduceLROnPlateau", partial(check, plateau, "own_loss"))]


def of_transformers() -> list[Outcome]:
    """Every kind of transformers.get_scheduler."""
    from transformers import SchedulerType, get_scheduler

    special: dict[str, dict[str, Any]] = {
        "warmup_stable_decay": {"scheduler_specific_kwargs": {"num_decay_steps": 20}},
        "cosine_with_min_lr": {"scheduler_specific_kwargs": {"min_lr": 0.01}},
        "cosine_warmup_with_min_lr": {"scheduler_specific_kwargs": {"min_lr": 0.01}},
    }
    found = []
    for kind in SchedulerType:
        options = {"num_warmup_steps": 10, "num_training_steps": STEPS, **special.get(kind.value, {})}
        monitor = "own_loss" if kind.value in ("reduce_lr_on_plateau", "greedy") else None
        found.append(judged(kind.value, partial(check, partial(get_scheduler, kind.value, **options), monitor)))
    return found


def of_timm() -> list[Outcome]:
    """The schedulers of timm, stepped by updates; its plateau saves no state, and is refused with torch's as the way out."""
    timm = timm_schedulers()
    if timm is None:
        return []
    factories = {
        "CosineLRScheduler": partial(timm.CosineLRScheduler, t_initial=STEPS, warmup_t=10),
        "MultiStepLRScheduler": partial(timm.MultiStepLRScheduler, decay_t=[20, 60]),
        "PolyLRScheduler": partial(timm.PolyLRScheduler, t_initial=STEPS, power=2.0),
        "StepLRScheduler": partial(timm.StepLRScheduler, decay_t=30),
        "TanhLRScheduler": partial(timm.TanhLRScheduler, t_initial=STEPS),
    }
    return [
        judged(name, partial(check, partial(one, t_in_epochs=False), counted=True)) for name, one in factories.items()
    ]
