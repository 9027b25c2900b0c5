"""What `Guards` sees in a run."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss

from signalfire import Engine, Events, Finding, FindingError, Findings, Update
from signalfire.handlers import DistributedDataParallel, Guards, LRScheduling
from tests.kit import SGD, batches, build, linear, mlp
from tests.mistakes.registry import mistake
from tests.processes import run_together


def guarded(model: nn.Module, data: Any = None, *, every: str = "5it", epochs: int = 1, **options: Any) -> Engine:
    """A run that is watched."""
    engine = build(model, Guards(every=every), **options)
    engine.run(batches() if data is None else data, max_epochs=epochs)
    return engine


class Detached(nn.Module):
    """Features that may be cut off from the gradient."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.features, self.head, self.detached = nn.Linear(5, 8), nn.Linear(8, 1), detached

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        return self.head(hidden.detach() if self.detached else hidden)  # type: ignore[no-any-return]


@mistake("G01")
def detached_features_within_two_iterations(right: bool) -> None:
    build(Detached(detached=not right), Guards()).run(iter(batches()), max_iters=2)


@mistake("G01")
def a_loss_of_a_copy_of_the_model(right: bool) -> None:
    model, copy = linear(5, 1), linear(5, 1)
    update = Update.from_function(lambda engine, batch: mse_loss((model if right else copy)(batch[0]), batch[1]), SGD)
    engine = Engine(update, model=model)
    engine.attach(Guards())
    engine.run(iter(batches()), max_iters=1)


@mistake("G02")
def cross_entropy_of_a_single_logit(right: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        positive = (target > 0).float()
        if right:
            return nn.functional.binary_cross_entropy_with_logits(output, positive)
        return cross_entropy(output, torch.zeros(len(output), dtype=torch.long))

    guarded(mlp(5, 8, 1), loss=loss)


@mistake("G02")
def a_loss_that_is_multiplied_by_zero(right: bool) -> None:
    guarded(mlp(5, 8, 1), loss=lambda output, target: (0.5 if right else 0.0) * mse_loss(output, target))


@mistake("G03")
def weights_too_coarse_for_the_learning_rate(right: bool) -> None:
    model, dtype = mlp(5, 8, 1), torch.float32 if right else torch.bfloat16
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches()]
    guarded(model.to(dtype), data, optimizer=partial(torch.optim.SGD, lr=1e-6))


@mistake("G03")
def an_optimizer_whose_step_writes_to_copies(right: bool) -> None:
    class Mine(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    (p if right else p.clone()).sub_(0.1 * p.grad)

    guarded(mlp(5, 8, 1), optimizer=partial(Mine, lr=0.1))


@mistake("G04")
def a_schedule_that_is_zero_from_its_second_step(right: bool) -> None:
    factor = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0 if right else float(step < 1))
    engine = build(mlp(5, 8, 1), Guards(), LRScheduling(factor))
    engine.run(batches(), max_epochs=1)


@mistake("G05")
def a_layer_made_in_the_first_forward(right: bool) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 8)
            self.head: Any = nn.Linear(8, 1) if right else None

        def forward(self, x: Tensor) -> Tensor:
            self.head = nn.Linear(8, 1) if self.head is None else self.head
            return self.head(self.body(x))  # type: ignore[no-any-return]

    build(Late(), Guards()).run(iter(batches()), max_iters=2)


@mistake("G05")
def a_head_replaced_between_optimizer_and_engine(right: bool) -> None:
    model = mlp(5, 8, 3)
    head = nn.Linear(8, 1)
    if right:
        model[1] = head
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = head
    engine = Engine(Update.supervised(mse_loss, optimizer), model=model)
    engine.attach(Guards())
    engine.run(iter(batches()), max_iters=2)


@mistake("G06")
def a_look_at_the_output_in_eval_mode(right: bool) -> None:
    engine = build(mlp(5, 8, 1, nn.Dropout(0.1)), Guards())

    def look(engine: Engine) -> None:
        engine.model.eval()
        engine.model(batches(1)[0][0])
        engine.model.train(right)

    engine.connect(Events.ITERATION_COMPLETED(once=1), look)
    engine.run(iter(batches()), max_iters=2)


class Dropping(nn.Module):
    """Dropout by the function, which has to be given the mode."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.layer, self.right = linear(5, 1), right

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(dropout(x, 0.5, training=self.training if self.right else True))  # type: ignore[no-any-return]


def evaluated(model: nn.Module, change: Any = None) -> None:
    engine = Engine(Update.supervised(mse_loss), model=model)
    engine.attach(Guards())
    if change is not None:
        engine.connect(Events.STARTED, change)
    engine.run(batches())


@mistake("G07")
def a_dropout_function_without_the_mode(right: bool) -> None:
    evaluated(Dropping(right=right))


@mistake("G07")
def a_receiver_that_puts_the_evaluated_model_into_train_mode(right: bool) -> None:
    evaluated(mlp(5, 8, 1, nn.Dropout(0.5)), lambda engine: engine.model.train(not right))


@mistake("G08")
def batch_statistics_that_move_in_the_evaluation(right: bool) -> None:
    evaluated(mlp(5, 8, 1, nn.BatchNorm1d(8)), lambda engine: engine.model[1].train(not right))


def _on_two_ranks(right: bool) -> list[str]:
    engine = build(mlp(5, 8, 1), DistributedDataParallel(timeout=60), Guards())

    def drift(engine: Engine) -> None:
        with torch.no_grad():
            engine.modules["model"].get_parameter("0.bias").add_(1.0 if right else engine.processes.rank)

    engine.connect(Events.ITERATION_COMPLETED(once=1), drift)
    engine.run(batches(), max_epochs=1)
    return [found.code for found in engine.findings.of_run().at_least("warning")]


@mistake("G09")
def a_receiver_that_changes_the_weights_of_each_rank(right: bool) -> Findings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in the two processes, whose findings come back
        codes = run_together(_on_two_ranks, 2, right)
    assert codes[0] == codes[1]
    return Findings(Finding(code, "of both ranks", "see there") for code in codes[0])


@mistake("G10")
def a_second_backward_that_leaves_gradients(right: bool) -> None:
    model = mlp(5, 8, 1)
    engine = build(model, Guards())

    def measure(engine: Engine) -> None:
        x, y = batches(1)[0]
        if right:
            torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
        else:
            mse_loss(model(x), y).backward()

    engine.connect(Events.ITERATION_COMPLETED, measure)
    engine.run(iter(batches()), max_iters=2)


@mistake("G11")
def a_dataset_that_always_gives_its_first_batch(right: bool) -> None:
    data = batches()
    guarded(mlp(5, 8, 1), data if right else [(data[0][0].clone(), data[0][1]) for _ in data])


@mistake("G12")
def labels_counted_from_one(right: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        known = nn.functional.one_hot(target, 4)[:, :3].float()
        return -(known * output.log_softmax(1)).sum(1).mean()

    data = batches(targets=(), classes=3)
    guarded(mlp(5, 8, 3), data if right else [(x, y + 1) for x, y in data], loss=loss)


@mistake("G13")
def pixels_that_are_not_normalized(right: bool) -> Findings:
    data = [(x if right else x * 60 + 128, y) for x, y in batches()]
    model = nn.Sequential(nn.BatchNorm1d(5), *mlp(5, 8, 1))
    return guarded(model, data).findings.of_run()


@mistake("G14")
def nan_in_a_sample_of_the_second_batch(right: bool) -> None:
    data = batches()
    if not right:
        data[1][0][0, 0] = float("nan")
    build(mlp(5, 8, 1), Guards()).run(iter(data), max_iters=2)


@mistake(FindingError, "G14.*the loss of update 'main' in iteration 2 is inf")
def an_infinite_loss_that_stops_the_run(right: bool) -> None:
    data = batches()
    if not right:
        data[1][1][0, 0] = float("inf")
    build(mlp(5, 8, 1), Guards(error=["G14"])).run(iter(data), max_iters=2)


@mistake("G15")
def data_sorted_by_class(right: bool) -> None:
    data = batches(targets=(), classes=3)
    if not right:
        data = [(x, torch.full_like(y, place // 2)) for place, (x, y) in enumerate(data)]
    guarded(mlp(5, 8, 3), data, loss=cross_entropy)


@mistake("G15")
def labels_that_are_all_zero(right: bool) -> Findings:
    data = [(x, y if right else y * 0) for x, y in batches(targets=(), classes=3)]
    return guarded(mlp(5, 8, 3), data, loss=cross_entropy).findings.of_run()


@mistake("G16")
def an_input_that_the_forward_does_not_use(right: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x if right else torch.ones_like(x))  # type: ignore[no-any-return]

    guarded(Model())


@mistake("G16")
def a_relu_as_the_last_layer_that_is_dead(right: bool) -> None:
    model = nn.Sequential(linear(5, 1), nn.Identity() if right else nn.ReLU())
    with torch.no_grad():
        model.get_parameter("0.bias").fill_(-50.0)
    guarded(model, optimizer=partial(torch.optim.SGD, lr=1e-3))


@mistake("G17")
def a_loss_of_the_rounded_output(right: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        squashed = output.clamp(-1, 1) if right else output.clamp(1e6, 1e7)
        return (squashed - (target if right else 0)).square().mean()

    guarded(mlp(5, 8, 1), loss=loss)


@mistake("G18")
def a_schedule_meant_in_epochs_that_moves_by_steps(right: bool) -> None:
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)
    engine = build(mlp(5, 8, 1), Guards(every="1it"), LRScheduling(step, every="1ep" if right else "1st"))
    engine.run(batches(), max_epochs=4)


@mistake("G19")
def a_learning_rate_at_which_the_gradients_explode(right: bool) -> None:
    guarded(linear(5, 1), every="1it", epochs=3, optimizer=partial(torch.optim.SGD, lr=0.1 if right else 10.0))


@mistake("G20")
def a_ported_loop_that_still_calls_step(right: bool) -> None:
    engine = build(mlp(5, 8, 1), Guards())
    if not right:
        engine.connect(Events.GRADIENTS_READY, lambda engine: engine.state.update.optimizer.step())
    engine.run(iter(batches()), max_iters=1)


@mistake("G21")
def a_frozen_backbone_whose_statistics_move(right: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model[:2].requires_grad_(False)
    engine = build(model, Guards())
    if right:
        engine.connect(Events.STARTED, lambda engine: engine.model[1].eval())
    engine.run(iter(batches()), max_iters=1)


@mistake("G24")
def labels_that_have_nothing_to_do_with_a_model_that_is_reset(right: bool) -> Findings:
    model = mlp(5, 8, 3)
    with torch.no_grad():
        model.get_parameter("1.weight").mul_(1.0 if right else 1e-3)
        model.get_parameter("1.bias").mul_(1.0 if right else 0.0)
    data = batches(targets=(), classes=3)
    sgd = partial(torch.optim.SGD, lr=1e-4)
    return guarded(model, data, every="1it", loss=cross_entropy, optimizer=sgd).findings.of_run()
