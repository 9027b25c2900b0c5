"""Losses and their gradients: what people bring along with a loop that they port, and what fits neither model nor targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from signalfire import Engine, Events, Update
from signalfire.handlers import Average, GradientAccumulation, LabelSmoothing, Metrics
from tests.kit import SGD, batches, build, mlp
from tests.mistakes.registry import comes_right, mistake

Loss = Callable[[Tensor, Tensor], Any]


def network(outputs: int, *last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, outputs), *last)


def classes(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(inputs, torch.arange(len(inputs)) % count) for inputs, _ in batches(8)]


def trained(
    loss: Loss,
    model: nn.Module | None = None,
    data: list[tuple[Tensor, Tensor]] | None = None,
    window: int = 1,
    **receivers: Callable[[Engine], Any],
) -> Engine:
    """Trains with a loss, and with functions connected to the events that they are named after."""
    engine = Engine(Update.supervised(loss, SGD), model=model or network(1), seed=0)
    if window > 1:
        engine.attach(GradientAccumulation(window))
    for event, receiver in receivers.items():
        engine.connect(getattr(Events, event), receiver)
    engine.run(data or batches(8), max_epochs=1)
    return engine


def stepped(function: Callable[[Engine, Any], Any], model: nn.Module | None = None) -> Engine:
    engine = Engine(Update.from_function(function, SGD), model=model or network(1), seed=0)
    engine.run(batches(8), max_epochs=1)
    return engine


# ---- probabilities and logits -----------------------------------------------------------------------------------------


@mistake("W90")
def a_cross_entropy_with_a_minus(right: bool) -> None:
    sign = 1 if right else -1
    trained(lambda output, target: sign * nn.functional.cross_entropy(output, target), network(3), classes())


@mistake("W72")
def a_softmax_before_cross_entropy(right: bool) -> None:
    trained(F.cross_entropy, network(3) if right else network(3, nn.Softmax(-1)), classes())


@mistake("W72")
def a_sigmoid_before_cross_entropy(right: bool) -> None:
    trained(F.cross_entropy, network(3) if right else network(3, nn.Sigmoid()), classes())


@mistake("W72")
def a_softmax_before_a_smoothed_cross_entropy(right: bool) -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    trained(loss, network(3) if right else network(3, nn.Softmax(-1)), classes())


@mistake("W72")
def logits_in_nll_loss(right: bool) -> None:
    trained(F.nll_loss, network(3, nn.LogSoftmax(-1)) if right else network(3), classes())


@mistake("W72")
def probabilities_in_nll_loss(right: bool) -> None:
    trained(F.nll_loss, network(3, nn.LogSoftmax(-1) if right else nn.Softmax(-1)), classes())


@mistake("W72")
def a_sigmoid_before_a_loss_with_logits(right: bool) -> None:
    data = [(inputs, (targets > 0).float()) for inputs, targets in batches(8)]
    trained(F.binary_cross_entropy_with_logits, network(1) if right else network(1, nn.Sigmoid()), data)


@mistake("W72")
def two_softmaxes(right: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.softmax(-1), F.one_hot(target, 3).float())

    trained(loss, network(3) if right else network(3, nn.Softmax(-1)), classes())


@mistake(RuntimeError, "between 0 and 1")
def logits_in_binary_cross_entropy(right: bool) -> None:
    data = [(inputs, (targets > 0).float()) for inputs, targets in batches(8)]
    trained(F.binary_cross_entropy, network(1, nn.Sigmoid()) if right else network(1), data)


@mistake("W79")
def a_cross_entropy_over_one_output(right: bool) -> None:
    data = [(inputs, targets % 2 if right else targets * 0) for inputs, targets in classes()]
    trained(F.cross_entropy, network(2 if right else 1), data)


@comes_right
def a_log_softmax_before_cross_entropy(right: bool) -> Any:
    engine = trained(F.cross_entropy, network(3) if right else network(3, nn.LogSoftmax(-1)), classes())
    return [[round(value, 4) for value in p.flatten().tolist()] for p in engine.model.parameters()]


# ---- shapes and ranges ------------------------------------------------------------------------------------------------


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@mistake("W73")
def targets_without_their_last_dimension_in_a_loss_of_ones_own(right: bool) -> None:
    trained(squared, data=batches(8) if right else [(one, other[:, 0]) for one, other in batches(8)])


@mistake("W73")
def outputs_without_their_last_dimension_in_a_loss_of_ones_own(right: bool) -> None:
    trained(lambda output, target: (output if right else output.squeeze(-1)).sub(target).abs().mean())


@mistake(UserWarning, "different to the input size")
def targets_without_their_last_dimension_in_mse_loss(right: bool) -> None:
    trained(F.mse_loss, data=batches(8) if right else [(one, other[:, 0]) for one, other in batches(8)])


@mistake("W77")
def a_relu_behind_the_last_layer(right: bool) -> None:
    data = [(inputs, -targets.abs() - 1) for inputs, targets in batches(8)]
    last = nn.Linear(8, 1)
    nn.init.ones_(last.bias)  # so that the units are not dead from the start
    trained(F.mse_loss, nn.Sequential(nn.Linear(5, 8), last, *([] if right else [nn.ReLU()])), data)


@mistake("W77")
def a_tanh_for_prices(right: bool) -> None:
    data = [(inputs, 5 + targets.abs()) for inputs, targets in batches(8)]
    trained(F.smooth_l1_loss, network(1) if right else network(1, nn.Tanh()), data)


@mistake(RuntimeError, "does not depend on any parameter")
def an_accuracy_as_the_loss(right: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) if right else (output.argmax(-1) != target).float().mean()

    trained(loss, network(3), classes())


# ---- what the engine does itself --------------------------------------------------------------------------------------


@mistake("W74")
def a_loss_divided_by_the_window(right: bool) -> None:
    trained(lambda output, target: F.mse_loss(output, target) / (1 if right else 4), window=4)


@mistake("W74")
def a_loss_multiplied_by_the_inverse_of_the_window(right: bool) -> None:
    trained(lambda output, target: F.mse_loss(output, target) * (1.0 if right else 1 / 4), window=4)


@mistake("W74")
def a_loss_divided_by_the_window_in_a_receiver(right: bool) -> None:
    def divide(engine: Engine) -> None:
        update = engine.state.update
        update.backward_loss = update.backward_loss / (1 if right else 2)

    trained(F.mse_loss, window=2, LOSS_COMPUTED=divide)


@mistake("W80")
def a_penalty_added_to_the_reported_loss_alone(right: bool) -> None:
    def penalize(engine: Engine) -> None:
        update = engine.state.update
        penalty = 0.1 * engine.model[0].weight.square().sum()
        update.loss = update.backward_loss + penalty
        if right:
            update.backward_loss = update.backward_loss + penalty

    trained(F.mse_loss, LOSS_COMPUTED=penalize)


@mistake("W75")
def a_backward_in_the_function(right: bool) -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        loss = F.mse_loss(engine.model(batch[0]), batch[1])
        if not right:
            loss.backward(retain_graph=True)
        return loss

    stepped(step)


@mistake("W75")
def a_backward_in_a_receiver(right: bool) -> None:
    def again(engine: Engine) -> None:
        if not right:
            engine.state.update.backward_loss.backward(retain_graph=True)

    trained(F.mse_loss, LOSS_COMPUTED=again)


@comes_right
def gradients_that_a_look_at_the_model_left(right: bool) -> Any:
    model = network(1)
    if not right:
        model(torch.ones(2, 5)).sum().backward()
    return str(trained(F.mse_loss, model).weights())


@mistake(RuntimeError, "does not depend on any parameter")
def a_whole_loop_in_the_function(right: bool) -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        loss = F.mse_loss(engine.model(batch[0]), batch[1])
        if right:
            return loss
        optimizer = engine.updates[0].optimizer
        assert optimizer is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    stepped(step)


@mistake(AttributeError, "return a scalar tensor")
def a_number_as_the_loss(right: bool) -> None:
    trained(lambda output, target: F.mse_loss(output, target) if right else F.mse_loss(output, target).item())


@mistake(AttributeError, "return a scalar tensor")
def a_dictionary_as_the_loss(right: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        value = F.mse_loss(output, target)
        return value if right else {"loss": value}

    trained(loss)


@mistake(RuntimeError, "return a scalar, such as its mean")
def a_loss_for_each_sample(right: bool) -> None:
    trained(lambda output, target: F.mse_loss(output, target, reduction="mean" if right else "none"))


@mistake("C26")
def clipping_after_the_step(right: bool) -> None:
    def clip(engine: Engine) -> None:
        clip_grad_norm_(engine.model.parameters(), 1.0)

    receivers: Any = {"GRADIENTS_READY" if right else "ITERATION_COMPLETED": clip}
    trained(F.mse_loss, **receivers)


@mistake("C26")
def clipping_each_part_of_a_window(right: bool) -> None:
    def clip(engine: Engine) -> None:
        clip_grad_norm_(engine.model.parameters(), 1.0)

    receivers: Any = {"GRADIENTS_READY" if right else "BACKWARD_COMPLETED": clip}
    trained(F.mse_loss, window=2, **receivers)


# ---- what is kept, and what is drawn ----------------------------------------------------------------------------------


@mistake("W76")
def a_running_loss_with_its_graph(right: bool) -> None:
    total = [torch.zeros(())]

    def add(engine: Engine) -> None:
        loss = engine.state.update.raw_loss
        assert loss is not None
        total[0] = total[0] + (loss.detach() if right else loss)

    trained(F.mse_loss, LOSS_COMPUTED=add)


@mistake("W76")
def outputs_kept_with_their_graphs(right: bool) -> None:
    kept: list[Tensor] = []

    def keep(engine: Engine) -> None:
        output = engine.state.update.output
        kept.append(output.detach() if right else output)

    trained(F.mse_loss, ITERATION_COMPLETED=keep)


@mistake("W78")
def a_seed_in_each_iteration(right: bool) -> None:
    model = mlp(5, 8, 1, nn.Dropout(0.5))

    def step(engine: Engine, batch: Any) -> Tensor:
        if not right:
            torch.manual_seed(0)
        return F.mse_loss(engine.model(batch[0]), batch[1])

    stepped(step, model)


@comes_right
def gradients_switched_off_around_the_run(right: bool) -> Any:
    engine = Engine(Update.supervised(F.mse_loss, SGD), model=network(1), seed=0)
    with torch.set_grad_enabled(right):
        engine.run(batches(8), max_epochs=1)
    return str(engine.weights())


@comes_right
def a_zero_grad_after_each_iteration(right: bool) -> Any:
    engine = Engine(Update.supervised(F.mse_loss, SGD), model=network(1), seed=0)

    def clear(engine: Engine) -> None:
        optimizer = engine.updates[0].optimizer
        assert optimizer is not None
        optimizer.zero_grad()

    if not right:
        engine.connect(Events.ITERATION_COMPLETED, clear)
    engine.run(batches(8), max_epochs=1)
    return str(engine.weights())


# ---- targets, sums and divergences that a loss does not expect ---------------------------------------------------------


def binary(low: float, high: float) -> list[tuple[Tensor, Tensor]]:
    return [(inputs, torch.where(inputs[:, :1] > 0, high, low)) for inputs, _ in batches(8)]


@mistake("W77")
def targets_of_minus_one_in_a_binary_cross_entropy(right: bool) -> None:
    trained(F.binary_cross_entropy_with_logits, data=binary(0.0 if right else -1.0, 1.0))


@mistake("W77")
def targets_of_one_and_two_in_a_binary_cross_entropy(right: bool) -> None:
    trained(nn.BCEWithLogitsLoss(), data=binary(*((0.0, 1.0) if right else (1.0, 2.0))))


@mistake("W77")
def targets_of_zero_in_a_loss_of_margins(right: bool) -> None:
    trained(F.soft_margin_loss, data=binary(-1.0 if right else 0.0, 1.0))


@mistake("W72")
def a_log_softmax_over_the_batch(right: bool) -> None:
    trained(F.nll_loss, network(3, nn.LogSoftmax(1 if right else 0)), classes())


@mistake("W72")
def probabilities_in_a_divergence(right: bool) -> None:
    data = [(inputs, F.one_hot(targets, 3).float()) for inputs, targets in classes()]
    trained(nn.KLDivLoss(reduction="batchmean"), network(3, nn.LogSoftmax(1) if right else nn.Softmax(1)), data)


@mistake("W72")
def logits_in_a_divergence(right: bool) -> None:
    data = [(inputs, F.one_hot(targets, 3) * 0.7 + 0.1) for inputs, targets in classes()]
    loss = partial(F.kl_div, reduction="batchmean")
    trained(loss, network(3, nn.LogSoftmax(1)) if right else network(3), data)


@mistake("W83")
def a_sum_over_the_batch_in_a_window(right: bool) -> None:
    loss = partial(F.cross_entropy, reduction="mean" if right else "sum")
    trained(loss, network(3), classes(), window=2)


@mistake("W83")
def a_sum_of_ones_own_over_the_batch_in_a_window(right: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        squares = (output - target).square()
        return squares.mean() if right else squares.sum() * 0.01

    trained(loss, window=2)


@mistake("W04")
def a_mean_of_losses_that_are_sums(right: bool) -> None:
    loss = nn.CrossEntropyLoss(reduction="mean" if right else "sum")
    engine = Engine(Update.supervised(loss), model=network(3))
    engine.attach(Metrics(loss=Average()))
    engine.run(classes())


@mistake(TypeError, "label smoothing needs a cross-entropy loss over classes")
def labels_smoothed_that_are_no_classes(right: bool) -> None:
    data = [(inputs, F.one_hot(targets, 3).float()) for inputs, targets in classes()]
    loss = F.cross_entropy if right else F.binary_cross_entropy_with_logits
    build(network(3), LabelSmoothing(0.1), loss=loss).run(data, max_epochs=1)


@mistake("W84")  # one batch that is ignored is in order, and all of them leave the weights as they are
def a_loss_that_ignores_every_label(right: bool) -> None:
    data = [(inputs, targets * 0) for inputs, targets in classes()]
    trained(partial(F.cross_entropy, ignore_index=2 if right else 0), network(3), data)


@mistake("W85")
def a_loss_that_a_function_returns(right: bool) -> None:
    def penalize(engine: Engine) -> Any:
        update = engine.state.update
        penalized = update.backward_loss + 0.01 * sum(p.square().sum() for p in update.parameters)
        if right:
            update.backward_loss = penalized
            return None
        return penalized

    engine = build(mlp(5, 8, 1))
    engine.connect(Events.LOSS_COMPUTED, penalize)
    engine.run(batches(8), max_epochs=1)


@mistake("W85")
def a_batch_that_a_function_returns(right: bool) -> None:
    def normalize(engine: Engine) -> Any:
        inputs, targets = engine.state.batch
        batch = (inputs / 2, targets)
        if right:
            engine.state.batch = batch
        return batch

    engine = build(mlp(5, 8, 1))
    engine.connect(Events.GET_BATCH_COMPLETED, normalize)
    engine.run(batches(8), max_epochs=1)
