"""Steps that are not made, or not made with what they seem to be made with, and what they leave untrained."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Findings, Update
from signalfire.handlers import (
    Checkpoint,
    DistributedDataParallel,
    GradientAccumulation,
    Guards,
    LRScheduling,
    MixedPrecision,
    NonFiniteGuard,
    Preemption,
    Summary,
    TruePrecision,
)
from tests.kit import SGD, batches, build, linear, mlp
from tests.mistakes.registry import comes_right, mistake

ADAM = partial(torch.optim.Adam, lr=0.01)


@mistake("W10")
def a_forgotten_optimizer(right: bool) -> None:
    engine = Engine(Update.supervised(mse_loss, SGD if right else None), model=mlp(5, 8, 1))
    engine.run(batches(), max_epochs=2)


@mistake("C08")
def a_layer_replaced_after_the_optimizer_was_built(right: bool) -> None:
    model = mlp(5, 8, 2)
    if right:
        model[1] = nn.Linear(8, 1)
    optimizer = ADAM(model.parameters())
    if not right:
        model[1] = nn.Linear(8, 1)
    Engine(Update.supervised(mse_loss, optimizer), model=model).run(batches(), max_epochs=1)


class LateLayer(nn.Module):
    """Makes its head in the first forward, when it knows the number of features."""

    def __init__(self, right: bool) -> None:
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.head: Any = nn.Linear(8, 1) if right else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.head is None:
            self.head = nn.Linear(hidden.shape[1], 1)
        return self.head(hidden)  # type: ignore[no-any-return]


@mistake("W11")
def a_layer_made_in_the_first_forward(right: bool) -> None:
    build(LateLayer(right)).run(batches(), max_epochs=1)


@mistake("W11")
def a_head_swapped_between_epochs(right: bool) -> None:
    engine = build(mlp(5, 8, 1))

    def swap(engine: Engine) -> None:
        head = nn.Linear(8, 1)
        if right:
            engine.model[1].load_state_dict(head.state_dict())
        else:
            engine.model[1] = head

    engine.connect(Events.EPOCH_STARTED(once=2), swap)
    engine.run(batches(), max_epochs=2)


@mistake("W11")
def a_run_over_unsized_data_that_ends_within_an_epoch_with_a_late_layer(right: bool) -> None:
    build(LateLayer(right)).run(iter(batches()), max_iters=3)


@mistake("W92")
def a_forward_that_closes_over_an_older_model(right: bool) -> None:
    model = old = mlp(5, 8, 1)
    if not right:
        model = copy.deepcopy(old)
    update = Update(lambda engine, batch: old(batch[0]), lambda engine, output, batch: mse_loss(output, batch[1]), SGD)
    Engine(update, model=model).run(batches(), max_epochs=1)


@mistake("W12")
def one_of_two_updates_uses_the_wrong_network(right: bool) -> None:
    models = {"one": linear(5, 1), "two": linear(5, 1)}

    def update(name: str, used: str) -> Update:
        return Update.from_function(
            lambda engine, batch: mse_loss(engine.modules[used](batch[0]), batch[1]),
            SGD,
            name=name,
            parameters=lambda engine: engine.modules[name].parameters(),
        )

    Engine([update("one", "one"), update("two", "two" if right else "one")], model=models).run(batches(), max_epochs=1)


@mistake("W92")
def a_fused_optimizer_over_an_older_model(right: bool) -> None:
    model = old = mlp(5, 8, 1)
    if not right:
        model = copy.deepcopy(old)
    update = Update(
        lambda engine, batch: old(batch[0]),
        lambda engine, output, batch: mse_loss(output, batch[1]),
        partial(torch.optim.SGD, lr=0.1, fused=True),
    )
    Engine(update, model=model).run(batches(), max_epochs=1)


class Backbone(nn.Module):
    """Features and a head; the features may be cut off from the gradient."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.features, self.head, self.detached = nn.Linear(5, 8), nn.Linear(8, 1), detached

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        return self.head(hidden.detach() if self.detached else hidden)  # type: ignore[no-any-return]


@mistake("W13")
def features_that_are_detached(right: bool) -> None:
    build(Backbone(detached=not right)).run(batches(), max_epochs=1)


@mistake("W13")
def features_computed_without_gradients_in_an_optimizer_of_everything(right: bool) -> None:
    model = Backbone(detached=True)
    if right:
        model.features.requires_grad_(False)
    build(model, optimizer=ADAM).run(batches(), max_epochs=1)


@mistake("W14")
def a_receiver_that_evaluates_and_leaves_the_model_in_eval_mode(right: bool) -> None:
    engine = build(mlp(5, 8, 1, nn.Dropout(0.5)))

    def evaluate(engine: Engine) -> None:
        engine.model.eval()
        with torch.no_grad():
            engine.model(batches(1)[0][0])
        if right:
            engine.model.train()

    engine.connect(Events.EPOCH_COMPLETED, evaluate)
    engine.run(batches(), max_epochs=2)


@mistake("W91")
def a_receiver_that_evaluates_the_model_as_it_is(right: bool) -> None:
    engine = build(mlp(5, 8, 1, nn.Dropout(0.5)))

    def evaluate(engine: Engine) -> None:
        if right:
            engine.model.eval()
        with torch.no_grad():
            engine.model(batches(1)[0][0])
        engine.model.train()

    engine.connect(Events.EPOCH_COMPLETED, evaluate)
    engine.run(batches(8), max_epochs=2)


@mistake("W14")
def an_encoder_left_in_eval_mode_within_an_epoch(right: bool) -> None:
    model = nn.Sequential(mlp(5, 8, 4, nn.Dropout(0.5)), nn.Linear(4, 1))
    engine = build(model)

    def look(engine: Engine) -> None:
        was = model[0].training
        model[0].eval()
        model[0](batches(1)[0][0])
        if right:
            model[0].train(was)

    engine.connect(Events.ITERATION_COMPLETED(once=2), look)
    engine.run(batches(), max_epochs=1)


@mistake("W15")
def nan_in_an_input(right: bool) -> None:
    data = batches()
    if not right:
        data[2][0][0, 0] = float("nan")
    build(mlp(5, 8, 1)).run(data, max_epochs=1)


@mistake("W15")
def a_square_root_at_zero(right: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        masked = (output - target) * torch.tensor([[1.0], [1.0], [0.0], [1.0]])
        return (masked.square() + (1e-6 if right else 0.0)).sqrt().mean()

    build(mlp(5, 8, 1), loss=loss).run(batches(), max_epochs=1)


@mistake("W19")
def bad_batches_that_a_guard_leaves_out(right: bool) -> None:
    data = batches()
    if not right:
        data[2][0][0, 0] = float("nan")
    build(mlp(5, 8, 1), NonFiniteGuard()).run(data, max_epochs=1)


@mistake("W16")
def zero_grad_by_the_user_in_an_accumulation_window(right: bool) -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(2))
    if not right:
        engine.connect(Events.ITERATION_STARTED, lambda engine: engine.updates[0].optimizer.zero_grad())
    engine.run(batches(), max_epochs=1)


@mistake("W16")
def zero_grad_of_the_model_in_the_loss(right: bool) -> None:
    model = mlp(5, 8, 1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if not right:
            model.zero_grad()
        return mse_loss(output, target)

    build(model, GradientAccumulation(3), loss=loss).run(batches(), max_epochs=1)


class _OnlyLinear(Tensor):
    """A tensor that supports a linear layer and little else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (nn.functional.linear, Tensor.as_subclass) and "get" not in func.__name__:
            raise TypeError(f"{func} is not supported")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@mistake("W09")
def a_look_for_mistakes_that_cannot_read_the_data(right: bool) -> Findings:
    model = nn.Linear(3, 1)

    def function(engine: Engine, batch: Any) -> Tensor:
        return mse_loss(model(batch).as_subclass(Tensor), torch.zeros(4, 1))

    inputs = torch.randn(4, 3).as_subclass(Tensor if right else _OnlyLinear)
    engine = Engine(Update.from_function(function, SGD), model=model)
    engine.attach(Guards())
    engine.run([inputs], max_epochs=1)
    return engine.findings.of_run()


@mistake("W16")
def zero_grad_after_each_backward_of_a_window(right: bool) -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(2))
    if not right:
        engine.connect(Events.BACKWARD_COMPLETED, lambda engine: engine.updates[0].optimizer.zero_grad())
    engine.run(batches(), max_epochs=1)


@mistake("W16")
def gradients_set_to_zero_after_each_backward_of_a_window(right: bool) -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(2))
    if not right:
        engine.connect(Events.BACKWARD_COMPLETED, lambda engine: engine.model.zero_grad(set_to_none=False))
    engine.run(batches(), max_epochs=1)


@mistake("W16")
def gradients_set_to_zero_between_the_batches_of_a_window(right: bool) -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(3))
    if not right:
        engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.model.zero_grad(set_to_none=False))
    engine.run(batches(), max_epochs=1)


@mistake("W17")
def a_step_of_a_functions_own_after_each_backward(right: bool) -> None:
    engine = build(mlp(5, 8, 1))
    if not right:
        engine.connect(Events.BACKWARD_COMPLETED, lambda engine: engine.updates[0].optimizer.step())
    engine.run(batches(), max_epochs=1)


@mistake("W17")
def a_step_of_the_optimizer_that_the_script_has_built(right: bool) -> None:
    model = mlp(5, 8, 1)
    sgd, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    engine = Engine(Update.supervised(mse_loss, sgd), model=model)
    stepped = other if right else sgd
    engine.connect(Events.BACKWARD_COMPLETED, lambda engine: stepped.step() and None)
    engine.run(batches(), max_epochs=1)


@mistake("W17")
def a_receiver_that_calls_the_optimizer_as_well(right: bool) -> None:
    engine = build(mlp(5, 8, 1), optimizer=ADAM)
    if not right:
        engine.connect(Events.GRADIENTS_READY, lambda engine: engine.state.update.optimizer.step())
    engine.run(batches(), max_epochs=1)


@mistake("W18")
def a_warm_up_by_epochs_that_starts_from_zero(right: bool) -> None:
    warm_up = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: min(1.0, (epoch + right) / 3))
    build(mlp(5, 8, 1), LRScheduling(warm_up, every="1ep")).run(batches(), max_epochs=2)


@mistake("W18")
def a_learning_rate_of_zero(right: bool) -> None:
    build(mlp(5, 8, 1), optimizer=partial(torch.optim.SGD, lr=0.1 if right else 0.0)).run(batches(), max_epochs=1)


@comes_right
def a_zero_grad_before_each_iteration_out_of_habit(right: bool) -> Any:
    engine = build(mlp(5, 8, 1))
    if not right:
        engine.connect(Events.ITERATION_STARTED, lambda engine: engine.updates[0].optimizer.zero_grad())
    engine.run(batches(), max_epochs=1)
    return [p.tolist() for p in engine.model.parameters()]


@mistake("W71")
def two_updates_that_were_not_given_their_own_parameters(right: bool) -> None:
    def step_of(name: str) -> Callable[[Engine, Any], Tensor]:
        return lambda engine, batch: mse_loss(engine.modules[name](batch[0]), batch[1])

    modules = {"one": linear(5, 1), "other": linear(5, 1)}
    everything = [parameter for module in modules.values() for parameter in module.parameters()]

    def update_of(name: str) -> Update:
        return Update.from_function(
            step_of(name), SGD([*modules[name].parameters()] if right else everything), name=name
        )

    Engine([update_of("one"), update_of("other")], model=modules).run(batches(), max_epochs=1)


# ---- weights that cannot move, or not as meant -------------------------------------------------------------------------


@mistake("W84")
def steps_too_small_for_the_precision_of_the_weights(right: bool) -> None:
    rate = partial(SGD, lr=1e-1 if right else 1e-7)
    build(mlp(5, 8, 1), TruePrecision("bf16"), optimizer=rate).run(batches(8), max_epochs=1)


@mistake("C32")
def weights_in_float16(right: bool) -> None:
    model = mlp(5, 8, 1) if right else mlp(5, 8, 1).half()
    data = [tuple(one if right else one.half() for one in batch) for batch in batches(8)]
    build(model).run(data, max_epochs=1)


@mistake("C32")
def weights_converted_to_float16(right: bool) -> None:
    precision = MixedPrecision("bf16") if right else TruePrecision("fp16")
    build(mlp(5, 8, 1), precision).run(batches(8), max_epochs=1)


@mistake("C33")
def weights_that_begin_as_a_constant(right: bool) -> None:
    model = mlp(5, 8, 1)
    for parameter in model.parameters():
        if not right or parameter.dim() == 1:
            nn.init.constant_(parameter, 0.1)
    build(model).run(batches(8), max_epochs=1)


@mistake("C33")
def weights_that_all_begin_as_zeros(right: bool) -> None:
    model = mlp(5, 8, 2)
    for number, parameter in enumerate(model.parameters()):
        if not right or number >= 2:  # a last layer of zeros is usual
            nn.init.zeros_(parameter)
    build(model).run(batches(8, targets=2), max_epochs=1)


@mistake("C33")
def a_share_that_is_kept_in_place_of_one_that_is_dropped(right: bool) -> None:
    build(mlp(5, 8, 1, nn.Dropout(0.0 if right else 1.0))).run(batches(8), max_epochs=1)


@mistake("C34")
def statistics_with_the_momentum_of_another_library(right: bool) -> None:
    build(mlp(5, 8, 1, nn.BatchNorm1d(8, momentum=0.01 if right else 0.99))).run(batches(8), max_epochs=1)


@mistake("C34")
def statistics_that_never_move(right: bool) -> None:
    build(mlp(5, 8, 1, nn.BatchNorm1d(8, momentum=0.1 if right else 0.0))).run(batches(8), max_epochs=1)


@mistake("W18")
def a_schedule_that_falls_below_zero(right: bool) -> None:
    schedule = partial(LambdaLR, lr_lambda=lambda step: 1 - step / (100 if right else 4))
    build(mlp(5, 8, 1), LRScheduling(schedule)).run(batches(8), max_epochs=1)


@mistake("W86")
def a_scheduler_that_nobody_steps(right: bool) -> None:
    model = mlp(5, 8, 1)
    optimizer = SGD(model.parameters())
    scheduler = StepLR(optimizer, 1)
    engine = Engine(Update.supervised(mse_loss, optimizer), model=model)
    if right:
        engine.connect(Events.EPOCH_COMPLETED, lambda engine: scheduler.step())
    engine.run(batches(8), max_epochs=2)


@mistake("W87")
def a_scheduler_of_ones_own_that_no_checkpoint_holds(right: bool, folder: Path) -> None:
    model = mlp(5, 8, 1)
    optimizer = SGD(model.parameters())
    engine = Engine(Update.supervised(mse_loss, optimizer), model=model)
    engine.attach(Checkpoint(folder))
    if right:
        engine.attach(LRScheduling(partial(StepLR, step_size=1), every="1ep"))
    else:
        scheduler = StepLR(optimizer, 1)
        engine.connect(Events.EPOCH_COMPLETED, lambda engine: scheduler.step())
    engine.run(batches(8), max_epochs=2)


@mistake("W89")
def a_rate_that_is_set_beside_its_schedule(right: bool) -> None:
    engine = build(mlp(5, 8, 1), LRScheduling(partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step))))

    def lower(engine: Engine) -> None:
        optimizer = engine.updates[0].optimizer
        assert optimizer is not None
        for group in optimizer.param_groups:
            group["weight_decay" if right else "lr"] = 1e-4

    engine.connect(Events.EPOCH_STARTED(once=2), lower)
    engine.run(batches(8), max_epochs=3)


@mistake(ValueError, "state.epoch was changed from 1 to 0.*terminate")
def an_epoch_that_a_function_sets(right: bool) -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: None if right else setattr(engine.state, "epoch", 0))
    engine.run(batches(8), max_epochs=3)


@mistake(ValueError, "state.iteration was changed from 8 to 0")
def an_iteration_that_a_function_sets(right: bool) -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: None if right else setattr(engine.state, "iteration", 0))
    engine.run(batches(8), max_epochs=3)


@mistake(RuntimeError, r"torch.inference_mode\(\); call run\(\) outside")
def a_run_in_inference_mode(right: bool) -> None:
    engine = build(mlp(5, 8, 1))
    with torch.inference_mode(not right):
        engine.run(batches(8), max_epochs=1)


@mistake(ValueError, r"run\(\): parameters of 'model' are not initialized yet: 0.weight, 0.bias. Lazy modules")
def a_lazy_module_that_no_batch_has_initialized(right: bool) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 1))
    if right:
        with torch.no_grad():
            model(next(iter(batches(8)))[0])
    build(model, Summary(file=io.StringIO())).run(batches(8), max_epochs=1)


# ---- layers and what they take -----------------------------------------------------------------------------------------


class OfSequences(nn.Module):
    """A layer over sequences, of shape [samples, steps, features], and one output for each of them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        output: Tensor = self.head((x[0] if isinstance(x, tuple) else x)[:, -1])
        return output


def sequences(features: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(24, 6, features), torch.randn(24, 1)), 4, shuffle=True)


@mistake("W88")
def a_recurrent_layer_that_takes_samples_for_steps(right: bool) -> None:
    build(OfSequences(nn.LSTM(5, 8, batch_first=right))).run(sequences(5), max_epochs=1)


@mistake("W88")
def attention_between_the_samples_of_a_batch(right: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=right)
    build(OfSequences(layer)).run(sequences(8), max_epochs=1)


# ---- processes ---------------------------------------------------------------------------------------------------------


@mistake("C30")
def processes_without_a_handler_that_connects_them(right: bool) -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (launched | {"WORLD_SIZE": "1" if right else "2"}).items():
            patch.setenv(name, value)
        build(mlp(5, 8, 1)).run(batches(8), max_epochs=1)


@mistake("C38")
def a_handler_for_several_processes_in_a_notebook(right: bool) -> None:
    shell = SimpleNamespace(
        kernel=None if right else object()
    )  # as IPython has it; tests/test_notebooks.py has a real one
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        build(mlp(5, 8, 1), DistributedDataParallel()).run(batches(8), max_epochs=1)


@mistake("C31")
def a_preemption_that_saves_nothing(right: bool, folder: Path) -> None:
    build(mlp(5, 8, 1), Preemption(), *([Checkpoint(folder)] if right else [])).run(batches(8), max_epochs=1)
