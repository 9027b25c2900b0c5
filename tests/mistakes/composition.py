"""Compositions that cannot do what they are meant to, which `Engine.check` finds before anything runs."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from signalfire import Engine, Events, Findings, Handler, Phase, Update, on
from signalfire.handlers import (
    EMA,
    SWA,
    AdaptiveGradientClipping,
    Average,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    Freezing,
    GradientAccumulation,
    GradientClipping,
    History,
    LabelSmoothing,
    LRScheduling,
    Metrics,
    MixedPrecision,
    SpikeGuard,
    UpdateFrequency,
    Validation,
)
from tests.kit import SGD, batches, build, evaluator_of, linear, mlp
from tests.mistakes.registry import mistake, said


def net() -> nn.Sequential:
    return mlp(5, 8, 1)


def loader(samples: int = 24, batch_size: int = 4, seed: int = 0, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 5, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(data, batch_size, **({"shuffle": True} | options))


def scheduled(
    factory: Any, *handlers: Handler, every: str | None = None, epochs: int = 10, length: int = 20
) -> Findings:
    engine = build(net(), LRScheduling(factory, every=every), *handlers)
    return engine.check(batches(length), max_epochs=epochs)


# ---- metrics ----------------------------------------------------------------------------------------------------------


@mistake("C01")
def a_misspelt_monitor(right: bool, folder: Path) -> Findings:
    model = net()
    validation = Validation(evaluator_of(model), batches(2, seed=1), prefix="val_")
    engine = build(model, validation, Checkpoint(folder, monitor="val_loss" if right else "valid_loss", mode="min"))
    return engine.check(batches(), max_epochs=3)


@mistake("C01")
def a_monitor_without_validation(right: bool) -> Findings:
    model = net()
    handlers = [Validation(evaluator_of(model), batches(2, seed=1))] if right else []
    return build(model, EarlyStopping("loss", mode="min"), *handlers).check(batches(), max_epochs=9)


@mistake("C01")
def a_plateau_whose_metric_lost_its_prefix(right: bool) -> Findings:
    model = net()
    validation = Validation(evaluator_of(model), {"dev": batches(2, seed=1)})
    plateau = LRScheduling(lr_scheduler.ReduceLROnPlateau, monitor="dev/loss" if right else "loss")
    return build(model, validation, plateau).check(batches(), max_epochs=9)


@mistake("C01")
def a_metric_of_a_handler_that_is_disabled(right: bool) -> Findings:
    model = net()
    engine = build(model, Validation(evaluator_of(model), batches(2, seed=1)), EarlyStopping("loss", mode="min"))
    engine.handlers["validation"].enabled = right
    return engine.check(batches(), max_epochs=9)


@mistake("C02")
def metrics_that_nobody_reads(right: bool) -> Findings:
    return build(net(), Metrics(loss=Average()), *([History()] if right else [])).check(batches(), max_epochs=3)


@mistake("C20")
def an_evaluator_without_metrics(right: bool) -> Findings:
    model = net()
    evaluator = Engine(Update.supervised(mse_loss), model=model)
    if right:
        evaluator.attach(Metrics(loss=Average()))
    return build(model, Validation(evaluator, batches(2, seed=1))).check(batches(), max_epochs=3)


# ---- receivers --------------------------------------------------------------------------------------------------------


class Halving(Handler):
    """Halves the gradients."""

    @on(Events.GRADIENTS_READY, rank=5, reads=["gradients"], writes=["gradients"])
    def halve(self, engine: Engine) -> None:
        for parameter in engine.state.update.parameters:
            assert parameter.grad is not None
            parameter.grad /= 2


class Adding(Handler):
    """Adds weight decay to the gradients."""

    @on(Events.GRADIENTS_READY, rank=5, reads=["weights"], writes=["gradients"])
    def add(self, engine: Engine) -> None:
        for parameter in engine.state.update.parameters:
            assert parameter.grad is not None
            parameter.grad += 0.1 * parameter.detach()


class AddingLater(Handler):
    """Adds weight decay to the gradients after whoever else changes them."""

    @on(Events.GRADIENTS_READY, rank=6, reads=["weights"], writes=["gradients"])
    def add(self, engine: Engine) -> None: ...


class Measuring(Handler):
    """Measures the gradients."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self.norms: list[float] = []

    @on(Events.GRADIENTS_READY, reads=["gradients"], writes=[])
    def measure(self, engine: Engine) -> None: ...


class MeasuringAfterwards(Measuring):
    """Measures the gradients once they are clipped."""

    @on(Events.GRADIENTS_READY, rank=1, reads=["gradients"], writes=[])
    def measure(self, engine: Engine) -> None: ...


@mistake("C03")
def two_handlers_of_ones_own_change_gradients_in_no_order(right: bool) -> Findings:
    return build(net(), Halving(), AddingLater() if right else Adding()).check(batches())


@mistake("C03")
def a_measurement_at_the_rank_of_the_clip(right: bool) -> Findings:
    measuring = MeasuringAfterwards() if right else Measuring()
    return build(net(), GradientClipping(max_norm=1.0), measuring).check(batches())


@mistake("C04")
def gradients_clipped_by_a_function_and_by_a_handler(right: bool) -> Findings:
    engine = build(net(), GradientClipping(max_norm=1.0))

    @engine.on(Events.GRADIENTS_READY)
    def clip(engine: Engine) -> None:
        if not right:
            return
        return

    def clip_again(engine: Engine) -> None:
        nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)

    if not right:
        engine.connect(Events.GRADIENTS_READY, clip_again)
    return engine.check(batches())


@mistake("C04")
def two_ways_of_clipping(right: bool) -> Findings:
    clips = [GradientClipping(max_norm=1.0)] if right else [AdaptiveGradientClipping(), GradientClipping(max_norm=1.0)]
    return build(net(), *clips).check(batches())


@mistake("C25")
def gradients_clipped_by_a_function_while_they_are_scaled(right: bool) -> Findings:
    def clip(engine: Engine) -> None:
        nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)

    engine = build(net(), MixedPrecision("fp16"))
    engine.connect(Events.GRADIENTS_READY if right else Events.BACKWARD_COMPLETED, clip)
    return engine.check(batches())


# ---- schedules --------------------------------------------------------------------------------------------------------


@mistake("C05")
def step_lr_meant_in_epochs(right: bool) -> Findings:
    factory = partial(lr_scheduler.StepLR, step_size=30)
    return scheduled(factory, every="1ep" if right else None, epochs=90, length=10)


@mistake("C05")
def an_exponential_decay_by_steps(right: bool) -> Findings:
    factory = partial(lr_scheduler.ExponentialLR, gamma=0.9)
    return scheduled(factory, every="1ep" if right else "1st", epochs=10)


@mistake("C05")
def milestones_in_epochs(right: bool) -> Findings:
    factory = partial(lr_scheduler.MultiStepLR, milestones=[4, 8])
    return scheduled(factory, every="1ep" if right else "1st", epochs=10)


@mistake("C05")
def a_cosine_over_epochs_that_is_stepped_after_each_step(right: bool) -> Findings:
    factory = partial(lr_scheduler.CosineAnnealingLR, T_max=10)
    return scheduled(factory, every="1ep" if right else "1st", epochs=10)


@mistake("C05")
def a_total_in_batches_under_accumulation(right: bool) -> Findings:
    factory = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=50 if right else 200)
    return scheduled(factory, GradientAccumulation(4), epochs=10, length=20)


@mistake("C06")
def a_cosine_of_an_earlier_experiment(right: bool) -> Findings:
    return scheduled(partial(lr_scheduler.CosineAnnealingLR, T_max=10 if right else 50), every="1ep", epochs=10)


@mistake("C06")
def a_cosine_that_rises_again(right: bool) -> Findings:
    return scheduled(partial(lr_scheduler.CosineAnnealingLR, T_max=10 if right else 6), every="1ep", epochs=10)


@mistake("C06")
def a_warmup_longer_than_the_run(right: bool) -> Findings:
    return scheduled(partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=20 if right else 1000), epochs=2)


@mistake("C06")
def a_second_part_that_begins_after_the_end(right: bool) -> Findings:
    def factory(optimizer: Any) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5 if right else 30])

    return scheduled(factory, every="1ep", epochs=10)


@mistake("C06")
def milestones_after_the_end(right: bool) -> Findings:
    return scheduled(
        partial(lr_scheduler.MultiStepLR, milestones=[5, 8] if right else [30, 60]), every="1ep", epochs=10
    )


@mistake("C23")
def a_schedule_for_one_of_two_optimizers(right: bool) -> Findings:
    models = {"one": linear(5, 1), "other": linear(5, 1)}

    def update(name: str) -> Update:
        return Update(
            lambda engine, batch: engine.modules[name](batch[0]),
            lambda engine, output, batch: mse_loss(output, batch[1]),
            SGD,
            name=name,
            parameters=lambda engine: engine.modules[name].parameters(),
        )

    updates = [update(name) for name in models]
    engine = Engine(updates, model=models, seed=0)
    for name in models if right else ["one"]:
        engine.attach(
            LRScheduling(partial(lr_scheduler.ExponentialLR, gamma=0.99), every="1ep", update=name, name=f"lr_{name}")
        )
    return engine.check(batches(), max_epochs=3)


# ---- parameters -------------------------------------------------------------------------------------------------------


@mistake("C07")
def an_optimizer_with_parameters_of_a_module_outside(right: bool) -> Findings:
    model, centers = net(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *centers.parameters()], lr=0.1)
    modules = {"model": model, "centers": centers} if right else {"model": model}

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return mse_loss(centers(output), batch[1])

    update = Update(lambda engine, batch: engine.modules["model"](batch[0]), loss, optimizer)
    return Engine(update, model=modules, seed=0).check(batches())


@mistake("C08")
def an_optimizer_of_the_body_alone(right: bool) -> Findings:
    model = net()
    optimizer = torch.optim.SGD(model.parameters() if right else model[0].parameters(), lr=0.1)
    return Engine(Update.supervised(mse_loss, optimizer), model=model).check(batches())


@mistake("C08")
def a_factory_for_the_body_alone(right: bool) -> None:
    model = net()
    update = Update.supervised(mse_loss, SGD, parameters=lambda engine: (model if right else model[0]).parameters())
    Engine(update, model=model).run(batches(), max_epochs=1)


@mistake("C08")
def a_factory_that_leaves_out_a_model(right: bool) -> None:
    models = {"body": net(), "head": linear(1, 1)}
    names = ["body", "head"] if right else ["body"]
    update = Update.from_function(
        lambda engine, batch: mse_loss(models["head"](models["body"](batch[0])), batch[1]),
        SGD,
        parameters=lambda engine: [one for name in names for one in models[name].parameters()],
    )
    Engine(update, model=models).run(batches(), max_epochs=1)


@mistake("C08")
def a_layer_replaced_after_the_optimizer_was_built(right: bool) -> Findings:
    model = net()
    if right:
        model[1] = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not right:
        model[1] = nn.Linear(8, 1)
    return Engine(Update.supervised(mse_loss, optimizer), model=model).check(batches())


@mistake("C09")
def the_head_is_frozen(right: bool) -> Findings:
    model = net()
    model[0 if right else 1].requires_grad_(False)
    return build(model).check(batches())


@mistake("C09")
def the_head_is_frozen_and_the_freezing_handler_would_say_so(right: bool) -> Findings:
    model = net()
    if not right:
        model[1].requires_grad_(False)
    return build(model, *([Freezing(["1"], unfreeze_at=2)] if right else [])).check(batches())


@mistake("C21")
def a_last_batch_of_one_sample(right: bool) -> Findings:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return build(model).check(loader(13, 4, drop_last=right), max_epochs=2)


@mistake("C22")
def a_window_longer_than_an_epoch(right: bool) -> Findings:
    return build(net(), GradientAccumulation(3 if right else 16)).check(batches(6), max_epochs=2)


# ---- files ------------------------------------------------------------------------------------------------------------


@mistake("C10")
def trainer_and_evaluator_log_to_one_file(right: bool, folder: Path) -> Findings:
    model = net()
    evaluator = evaluator_of(model)
    evaluator.attach(CSVLogger(folder / ("val.csv" if right else "log.csv")))
    engine = build(model, CSVLogger(folder / "log.csv"), Validation(evaluator, batches(2, seed=1)))
    return engine.check(batches(), max_epochs=2)


@mistake("C10")
def two_checkpoints_with_one_name_for_their_files(right: bool, folder: Path) -> Findings:
    last = Checkpoint(folder, filename="last", name="last")
    other = Checkpoint(folder, every="2ep", filename="often" if right else "last", name="often")
    return build(net(), last, other).check(batches(), max_epochs=4)


@mistake("C11")
def a_best_checkpoint_that_keeps_the_last(right: bool, folder: Path) -> Findings:
    model = net()
    monitor = {"monitor": "loss", "mode": "min"} if right else {}
    best = Checkpoint(folder, name="best", **monitor)  # type: ignore[arg-type]
    return build(model, best, Validation(evaluator_of(model), batches(2, seed=1))).check(batches(), max_epochs=2)


# ---- data and evaluations ---------------------------------------------------------------------------------------------


@mistake("C12")
def batches_that_stay_where_they_are(right: bool) -> Findings:
    data = [(x, y) if right else (x.to("meta"), y.to("meta")) for x, y in batches()]
    return build(net()).check(data)


@said("C13: the training data is not shuffled, so each epoch reads dataset")
def training_data_in_order(right: bool) -> None:
    build(net()).run(loader(shuffle=right), max_epochs=2)


@mistake("C14")
def validation_on_the_training_loader(right: bool) -> Findings:
    model, data = net(), loader()
    engine = build(
        model, Validation(evaluator_of(model), loader(seed=1) if right else data), EarlyStopping("loss", mode="min")
    )
    return engine.check(data, max_epochs=9)


@mistake("C14")
def validation_on_the_training_data_that_nothing_monitors(right: bool) -> None:
    model, data = net(), batches()
    build(model, Validation(evaluator_of(model), batches(2, seed=1) if right else data)).run(data, max_epochs=1)


@mistake("C14")
def batches_of_a_list_that_are_held_out_and_trained_with(right: bool) -> None:
    model, data = net(), batches()
    trained = data[:-2] if right else data
    build(model, Validation(evaluator_of(model), data[-2:])).run(trained, max_epochs=1)


@mistake("C14")
def another_loader_of_the_training_set(right: bool) -> Findings:
    model, data = net(), loader()
    other = loader(seed=1) if right else DataLoader(data.dataset, 8)
    engine = build(model, Validation(evaluator_of(model), other), EarlyStopping("loss", mode="min"))
    return engine.check(data, max_epochs=9)


@mistake("C14")
def a_copy_of_the_training_data(right: bool) -> Findings:
    model = net()
    engine = build(model, Validation(evaluator_of(model), batches(seed=1 if right else 11)))
    return engine.check(batches(), max_epochs=2)


@mistake("C15")
def an_evaluator_with_a_model_of_its_own(right: bool) -> Findings:
    model = net()
    engine = build(model, Validation(evaluator_of(model if right else net()), batches(2, seed=1)))
    return engine.check(batches(), max_epochs=2)


class Noisy(Dataset[Any]):
    """Adds noise, from a generator of its own or from NumPy's global one."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        noise = np.random if self.generator is None else self.generator
        return torch.full((5,), float(index) + float(noise.uniform(0, 1))), torch.zeros(1)


@mistake("C16")
def augmentation_with_a_generator_of_ones_own(right: bool, folder: Path) -> Findings:
    data = DataLoader(Noisy(None if right else np.random.default_rng(0)), 4, shuffle=True, num_workers=1)
    return build(net(), Checkpoint(folder, resume=True)).check(data, max_epochs=2)


@mistake("C16")
def augmentation_with_a_random_object(right: bool, folder: Path) -> Findings:
    data = DataLoader(Noisy(None if right else random.Random(0)), 4, shuffle=True, num_workers=1)
    return build(net(), Checkpoint(folder)).check(data, max_epochs=2)


@mistake("C17")
def a_checkpoint_every_tenth_epoch_of_four(right: bool, folder: Path) -> Findings:
    return build(net(), Checkpoint(folder, every="2ep" if right else "10ep")).check(batches(), max_epochs=4)


@mistake("C17")
def a_validation_every_thousand_iterations_of_twelve(right: bool) -> Findings:
    model = net()
    validation = Validation(evaluator_of(model), batches(2, seed=1), every="5it" if right else "1000it")
    return build(model, validation).check(batches(), max_epochs=2)


@mistake("C17")
def an_average_every_thousand_steps_of_twelve(right: bool) -> None:
    engine = build(net(), EMA(0.5, every="2st" if right else "1000st"))
    engine.run(batches(), max_epochs=2)


@mistake("C17")
def a_function_for_an_iteration_that_is_never_reached(right: bool) -> Findings:
    engine = build(net())
    engine.connect(Events.ITERATION_COMPLETED(once=5 if right else 500), lambda engine: None)
    return engine.check(batches(), max_iters=12)


@mistake("C18")
def an_average_that_starts_after_the_end(right: bool) -> Findings:
    return build(net(), EMA(0.5, start=2 if right else 1000)).check(batches(), max_epochs=2)


@mistake("C18")
def stochastic_averaging_from_the_75th_epoch_of_ten(right: bool) -> None:
    build(net(), SWA(2 if right else 75)).run(batches(), max_epochs=10)


def alternating(every: int) -> Engine:
    """Two updates, one of which is made in every n-th iteration."""
    models = {"critic": linear(5, 1), "generator": linear(5, 1)}

    def update(name: str) -> Update:
        own = models[name]
        return Update.from_function(
            lambda engine, batch: mse_loss(own(batch[0]), batch[1]),
            SGD,
            name=name,
            parameters=lambda engine: own.parameters(),
        )

    engine = Engine([update("critic"), update("generator")], model=models)
    engine.attach(UpdateFrequency(generator=every))
    return engine


@mistake("C17")
def an_update_that_is_never_due(right: bool) -> None:
    alternating(3 if right else 50).run(batches(), max_epochs=2)


@mistake("C17")
def an_update_that_was_never_due_in_data_without_a_length(right: bool) -> None:
    alternating(3 if right else 50).run((batch for batch in batches()), max_epochs=1)


@said("C19: 'early_stopping' waits for 20 values without improvement, but this run has at most 4 values")
def a_patience_that_cannot_end_this_run(right: bool) -> None:
    engine = build(net(), EarlyStopping("score", mode="max", patience=2 if right else 20))
    engine.connect(
        Events.EPOCH_COMPLETED,
        lambda engine: engine.state.metrics.update(score=engine.state.epoch),
        phase=Phase.PREPARE,
    )
    engine.run(batches(), max_epochs=4)


@said(
    "C17: the function .* is connected to .*ITERATION_COMPLETED.*, which does not occur in this run of at most 2 epochs"
)
def a_function_that_is_never_called(right: bool) -> None:
    engine = build(net())
    engine.connect(Events.ITERATION_COMPLETED(every=4 if right else 100), lambda engine: None)
    engine.run(batches(), max_epochs=2)


@mistake("C19")
def patience_that_outlasts_the_run(right: bool) -> Findings:
    model = net()
    stopping = EarlyStopping("loss", mode="min", patience=2 if right else 20)
    return build(model, stopping, Validation(evaluator_of(model), batches(2, seed=1))).check(batches(), max_epochs=10)


@mistake("C40")
def a_monitor_without_the_prefix_of_the_validation(right: bool) -> Findings:
    stopping = EarlyStopping("val_loss" if right else "loss", patience=9)
    engine = build(net(), stopping, Validation(batches(2, seed=1)))
    engine.run(batches(), max_epochs=1)
    return engine.findings.of_run()


@mistake("C39")
def a_guard_against_spikes_in_a_run_that_is_too_short_for_it(right: bool) -> Findings:
    return build(net(), SpikeGuard(window=8 if right else 128)).check(batches(), max_epochs=10)


@mistake("C24")
def a_generator_for_several_epochs(right: bool) -> Findings:
    data = batches() if right else (batch for batch in batches())
    return build(net()).check(data, max_epochs=3)


@mistake(ValueError, "attached to a different engine")
def a_handler_on_two_engines(right: bool) -> None:
    handler = GradientClipping(max_norm=1.0)
    one = build(net(), handler)
    other = build(net(), GradientClipping(max_norm=1.0) if right else handler)
    assert one is not other


@mistake(ValueError, "both 'gradient_clipping' and 'second' control the gradient's norm|both")
def two_clips_of_one_kind(right: bool) -> None:
    build(net(), GradientClipping(max_norm=1.0), *([] if right else [GradientClipping(max_norm=2.0, name="second")]))


@mistake(TypeError, "did you mean 'max_epochs'")
def a_misspelt_bound_of_check(right: bool) -> Findings:
    return build(net()).check(batches(), **({"max_epochs": 2} if right else {"max_epoch": 2}))


@mistake(ValueError, "'gradient' is not one of")
def a_misspelt_declaration(right: bool) -> None:
    on(Events.GRADIENTS_READY, reads=["gradients" if right else "gradient"])


# ---- models and optimizers --------------------------------------------------------------------------------------------


class Listed(nn.Module):
    """A perceptron whose layers are in a list."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        layers = [nn.Linear(5, 8), nn.Linear(8, 8)]
        self.layers: Any = nn.ModuleList(layers) if registered else layers
        self.last = nn.Linear(8, 1)

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = layer(input).relu()
        output: Tensor = self.last(input)
        return output


class Scaled(nn.Module):
    """A layer, and a scale that is to be learned."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.scale: Any = nn.Parameter(torch.ones(1)) if registered else torch.ones(1, requires_grad=True)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.layer(input) * self.scale
        return output


@mistake("C27")
def layers_in_a_plain_list(right: bool) -> Findings:
    return build(Listed(right)).check(batches(), max_epochs=1)


@mistake("C27")
def a_learned_scale_that_is_no_parameter(right: bool) -> Findings:
    return build(Scaled(right)).check(batches(), max_epochs=1)


@mistake("C28")
def a_weight_decay_meant_for_another_optimizer(right: bool) -> Findings:
    optimizer = partial(torch.optim.SGD, lr=0.1, weight_decay=1e-4 if right else 5.0)
    return build(net(), optimizer=optimizer).check(batches(), max_epochs=1)


@mistake("C28")
def a_rate_that_moves_nothing(right: bool) -> Findings:
    optimizer = partial(torch.optim.SGD, lr=1e-3 if right else 1e-8)
    return build(net(), optimizer=optimizer).check(batches(), max_epochs=1)


@mistake("C28")
def a_momentum_above_one(right: bool) -> Findings:
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9 if right else 1.1)
    return build(net(), optimizer=optimizer).check(batches(), max_epochs=1)


@mistake("C29")
def labels_smoothed_by_the_loss_and_by_a_handler(right: bool) -> Findings:
    loss = nn.CrossEntropyLoss(label_smoothing=0.0 if right else 0.1)
    engine = Engine(Update.supervised(loss, SGD), model=mlp(5, 8, 3))
    engine.attach(LabelSmoothing(0.1))
    return engine.check([(inputs, torch.arange(4) % 3) for inputs, _ in batches()], max_epochs=1)


@mistake("C29")
def labels_smoothed_by_a_partial_loss_and_by_a_handler(right: bool) -> Findings:
    loss = partial(cross_entropy, label_smoothing=0.0 if right else 0.1)
    engine = Engine(Update.supervised(loss, SGD), model=mlp(5, 8, 3))
    engine.attach(LabelSmoothing(0.1))
    return engine.check([(inputs, torch.arange(4) % 3) for inputs, _ in batches()], max_epochs=1)


def split(right: bool, subsets: bool) -> Findings:
    model, whole = net(), loader(24).dataset
    trained: Any = Subset(whole, range(16)) if subsets or right else whole
    held_out = Subset(whole, range(16 if right else 12, 24))
    validation = Validation(evaluator_of(model), DataLoader(held_out, 4), prefix="val_")
    return build(model, validation).check(DataLoader(trained, 4, shuffle=True), max_epochs=1)


@mistake("C14")
def splits_that_overlap(right: bool) -> Findings:
    return split(right, True)


@mistake("C14")
def a_split_for_validation_and_all_of_it_for_training(right: bool) -> Findings:
    return split(right, False)


@mistake("C05")
def warm_restarts_in_epochs(right: bool) -> Findings:
    return scheduled(partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2), every="1ep" if right else "1st")
