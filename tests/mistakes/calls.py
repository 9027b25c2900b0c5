"""Calls of torch's functions that are hardly ever meant: in the forward, in the loss, and in how a model is put together."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Findings, Update
from signalfire.handlers import GradientAccumulation
from tests.kit import SGD, batches, build, mlp
from tests.mistakes.registry import mistake

Data = list[tuple[Tensor, Tensor]]


class Forward(nn.Module):
    """A model of one's own: layers, and a function of them and the inputs."""

    def __init__(self, function: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleDict(layers)

    def forward(self, inputs: Tensor) -> Any:
        return self.function(self.layers, inputs)


def sequences(samples: int = 6, steps: int = 5, features: int = 3) -> Data:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(samples, steps, features, generator=generator), torch.arange(samples) % 2) for _ in range(4)
    ]  # fmt: skip


def tokens(padding: int = 0) -> Data:
    """Sentences of different lengths, padded, and their next tokens."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for first in range(4):
        ids = torch.randint(1, 9, (6, 8), generator=generator)
        for row in range(6):
            ids[row, 2 + (row + first) % 6 :] = padding
        found.append((ids[:, :-1], ids[:, 1:]))
    return found


def train(model: nn.Module, data: Data, loss: Any = F.cross_entropy, *handlers: Any) -> None:
    engine = Engine(Update.supervised(loss, SGD), model=model, seed=0)
    engine.attach(*handlers)
    engine.run(data, max_epochs=1)


def of_tokens(**options: Any) -> Any:
    return lambda output, target: F.cross_entropy(output.transpose(1, 2), target, **options)


def language_model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6, **options), nn.Linear(6, 9))


# ---- losses -----------------------------------------------------------------------------------------------------------


@mistake("W72")
def probabilities_in_a_divergence_inside_a_loss(right: bool) -> None:
    teacher = torch.full((4, 3), 1 / 3)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        student = F.log_softmax(output, dim=1) if right else F.softmax(output, dim=1)
        return F.mse_loss(output, target.expand(-1, 3)) + F.kl_div(student, teacher, reduction="batchmean")

    train(mlp(5, 8, 3), batches(8), loss)


@mistake("W95")
def padding_that_counts_in_the_loss(right: bool) -> None:
    train(language_model(padding_idx=0), tokens(), of_tokens(**({"ignore_index": 0} if right else {})))


@mistake("W96")
def means_of_tokens_that_are_averaged_over_a_window(right: bool) -> None:
    def count(engine: Engine) -> int:
        return int((engine.state.batch[1] != 0).sum())

    handler = GradientAccumulation(2, weight=count if right else None)
    data = [(inputs[place:], targets[place:]) for place, (inputs, targets) in enumerate(tokens())]
    train(language_model(), data, of_tokens(ignore_index=0), handler)


@mistake("W97")
def weights_that_begin_much_too_large(right: bool) -> None:
    model = mlp(5, 64, 4)
    for layer in (one for one in model if isinstance(one, nn.Linear) and not right):
        nn.init.normal_(layer.weight, std=4.0)
    train(model, [(inputs, torch.arange(4)) for inputs, _ in batches(8)])


@mistake("W97")
def inputs_that_are_not_scaled(right: bool) -> None:
    scale = 1.0 if right else 255.0
    train(mlp(5, 64, 4), [(scale * inputs, torch.arange(4)) for inputs, _ in batches(8)])


@mistake("W98")
def a_language_model_whose_target_is_its_input(right: bool) -> None:
    data = tokens(padding=8)
    train(language_model(), data if right else [(inputs, inputs.clone()) for inputs, _ in data], of_tokens())


@mistake("W99")
def a_penalty_of_data(right: bool) -> None:
    model = mlp(5, 8, 1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        penalty = sum((p if right else p.data).square().sum() for p in model.parameters())
        return F.mse_loss(output, target) + 1e-3 * penalty

    train(model, batches(8), loss)


@mistake("W99")
def a_gradient_penalty_without_create_graph(right: bool) -> None:
    def function(engine: Engine, batch: Any) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        output = engine.model(inputs)
        (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=right, retain_graph=True)
        return F.mse_loss(output, batch[1]) + 0.1 * (gradient.norm(dim=1) - 1).square().mean()  # type: ignore[no-any-return]

    engine = Engine(Update.from_function(function, SGD), model=mlp(5, 8, 1), seed=0)
    engine.run(batches(8), max_epochs=1)


@mistake("W92")
def learned_weights_of_two_losses_in_no_optimizer(right: bool) -> None:
    model = mlp(5, 8, 1)
    own = nn.Parameter(torch.zeros(2))
    if right:
        model.register_parameter("own", own)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        losses = torch.stack([F.mse_loss(output, target), F.l1_loss(output, target)])
        return ((-own).exp() * losses + own).sum()

    train(model, batches(8), loss)


@mistake("W92")
def a_tensor_that_requires_a_gradient_in_no_optimizer(right: bool) -> None:
    temperature = torch.ones(1, requires_grad=not right)
    train(mlp(5, 8, 1), batches(8), lambda output, target: F.mse_loss(output * temperature, target))


# ---- what is mixed up -------------------------------------------------------------------------------------------------


@mistake("W93")
def a_reshape_in_place_of_a_transpose(right: bool) -> None:
    def forward(layers: Any, inputs: Tensor) -> Tensor:
        scores = layers["head"](inputs)
        return scores.transpose(1, 2) if right else scores.view(6, 2, 5)  # type: ignore[no-any-return]

    data = [(inputs, torch.zeros(6, 5, dtype=torch.long) + labels[:, None]) for inputs, labels in sequences()]
    train(Forward(forward, head=nn.Linear(3, 2)), data)


@mistake("W93")
def attention_over_the_samples(right: bool) -> None:
    def forward(layers: Any, inputs: Tensor) -> Tensor:
        weights = F.softmax(layers["scores"](inputs), dim=1 if right else 0)
        return layers["head"]((weights * inputs).sum(1))  # type: ignore[no-any-return]

    train(Forward(forward, scores=nn.Linear(3, 1), head=nn.Linear(3, 2)), sequences())


@mistake("W94")
def the_first_step_of_a_recurrent_layer(right: bool) -> None:
    def forward(layers: Any, inputs: Tensor) -> Tensor:
        output, _ = layers["rnn"](inputs)
        return layers["head"](output[:, -1 if right else 0])  # type: ignore[no-any-return]

    train(Forward(forward, rnn=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2)), sequences())


@mistake("W94")
def the_last_step_of_both_directions(right: bool) -> None:
    def forward(layers: Any, inputs: Tensor) -> Tensor:
        output, hidden = layers["rnn"](inputs)
        return layers["head"](torch.cat([hidden[-2], hidden[-1]], 1) if right else output[:, -1])  # type: ignore[no-any-return]

    rnn = nn.GRU(3, 4, batch_first=True, bidirectional=True)
    train(Forward(forward, rnn=rnn, head=nn.Linear(8, 2)), sequences())


@mistake("W94")
def the_last_step_of_padded_sequences(right: bool) -> None:
    def forward(layers: Any, inputs: Tensor) -> Tensor:
        lengths = torch.tensor([5, 4, 3, 5, 2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        output, hidden = layers["rnn"](packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        return layers["head"](hidden[-1] if right else padded[:, -1])  # type: ignore[no-any-return]

    train(Forward(forward, rnn=nn.GRU(3, 4, batch_first=True), head=nn.Linear(4, 2)), sequences())


# ---- how a model is put together --------------------------------------------------------------------------------------


@mistake("C35")
def a_module_that_is_frozen_by_an_attribute(right: bool) -> Findings:
    model = mlp(5, 8, 1)
    if right:
        model[0].requires_grad_(False)
    else:
        model[0].requires_grad = False  # type: ignore[assignment]
    return build(model).check(batches(), max_epochs=1).at_least("warning")


@mistake("C36")
def one_block_at_four_places(right: bool) -> Findings:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    blocks = [block() for _ in range(4)] if right else [block()] * 4
    return build(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), *blocks, nn.Linear(8, 1))).check(batches(), max_epochs=1)


@mistake("C37")
def linear_layers_without_an_activation(right: bool) -> Findings:
    between = nn.ReLU() if right else nn.Dropout(0.1)
    model = nn.Sequential(nn.Linear(5, 8), between, nn.Linear(8, 8), between, nn.Linear(8, 1))
    return build(model).check(batches(), max_epochs=1)


@mistake("C27")
def a_parameter_that_is_used_before_the_forward(right: bool) -> Findings:
    model = nn.Linear(5, 1)
    own = nn.Parameter(torch.ones(1))
    model.factor = own if right else own.unsqueeze(0)
    return build(model).check(batches(), max_epochs=1)


@mistake("C33")
def dropout_by_the_share_that_is_kept(right: bool) -> Findings:
    return build(mlp(5, 8, 1, nn.Dropout(0.1 if right else 0.9))).check(batches(), max_epochs=1)


@mistake("C28")
def weight_decay_of_adamw_given_to_adam(right: bool) -> Findings:
    kind = torch.optim.AdamW if right else torch.optim.Adam
    return build(mlp(5, 8, 1), optimizer=partial(kind, lr=1e-2, weight_decay=1.0)).check(batches(), max_epochs=1)


@mistake("C28")
def a_rate_of_sgd_given_to_adam(right: bool) -> Findings:
    kind = torch.optim.SGD if right else torch.optim.Adam
    return build(mlp(5, 8, 1), optimizer=partial(kind, lr=1.0)).check(batches(), max_epochs=1)
