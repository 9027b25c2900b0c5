"""Right models and losses whose calls look like mistakes: nothing is said of them. The mistakes are in `tests/mistakes`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, FindingWarning, Update
from signalfire.handlers import Average, Metrics
from tests.kit import SGD, batches, build, linear
from tests.mistakes.calls import Forward, language_model, of_tokens, sequences, tokens, train

CLASSES = batches(3, targets=(), classes=10)


class Prototypes(nn.Module):
    """The cosines between samples and one vector for each class, as in face recognition."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(10, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(F.normalize(inputs), F.normalize(self.vectors))


# ---- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaled", [lambda x: 64 * x, lambda x: x / 0.015, lambda x: (64 * x).view(-1, 2, 5).flatten(1)]
)
def test_scores_that_are_scaled_on_purpose_may_be_large_at_first(scaled: Callable[[Tensor], Tensor]) -> None:
    def with_margin(cosines: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scaled(cosines - 0.5 * F.one_hot(target, 10)), target)

    train(Prototypes(), CLASSES, with_margin)


def test_a_model_that_is_sure_of_other_classes_is_not_said_to_be_initialised_wrongly() -> None:
    model = linear(5, 10)
    with torch.no_grad():
        model.bias.copy_(torch.where(torch.arange(10) < 5, 40.0, 0.0))
    with pytest.warns(FindingWarning, match="W97: .* if the weights were pretrained on different classes, allow W97"):
        train(model, [(inputs, target % 5 + 5) for inputs, target in CLASSES])


def masked(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (losses * (target != 0)).sum() / (target != 0).sum()


@pytest.mark.parametrize("loss", [masked, of_tokens(weight=torch.tensor([0.0] + [1.0] * 8))])
def test_padding_that_a_mask_or_a_weight_leaves_out_is_not_trained(loss: Any) -> None:
    train(language_model(padding_idx=0), tokens(), loss)


def test_targets_of_one_class_may_equal_an_input_of_zeros() -> None:
    zeros = torch.zeros(6, 7, dtype=torch.long)
    update = Update(
        lambda engine, batch: engine.model(batch["ids"] + batch["types"]).transpose(1, 2),
        lambda engine, output, batch: F.cross_entropy(output, batch["labels"]),
        SGD,
    )
    data = [{"ids": inputs, "types": zeros, "labels": zeros.clone()} for inputs, _ in tokens()]
    Engine(update, model=language_model(), seed=0).run(data, max_epochs=1)


def test_the_first_token_of_a_sequence_may_be_its_target() -> None:
    data = [(ids := torch.randint(9, (16, 6)), ids[:, 0]) for _ in range(3)]
    train(language_model(), data, lambda output, target: F.cross_entropy(output.mean(1), target))


def steps_of_a_quantizer(layers: Any, inputs: Tensor) -> Tensor:
    size = layers["head"].bias[0].abs() + 0.1
    size = (size - 0.9 * size).detach() + 0.9 * size  # its gradient is scaled
    return layers["head"](inputs) / size  # type: ignore[no-any-return]


def returns_of_an_actor(layers: Any, inputs: Tensor) -> Tensor:
    values = layers["head"](inputs)
    target = (values[0, 0].detach() * 0.9 + values[0, 0]).detach()
    return values - target  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [steps_of_a_quantizer, returns_of_an_actor])
def test_a_number_without_a_gradient_that_is_added_elsewhere_is_no_term_of_the_loss(forward: Any) -> None:
    train(Forward(forward, head=nn.Linear(5, 1)), batches(3), F.mse_loss)


class Rests(nn.Module):
    """Predicts the next of 9 notes, of which the vector of the rest is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.notes, self.head = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 9)

    def forward(self, notes: Tensor) -> Tensor:
        return self.head(self.notes(notes))  # type: ignore[no-any-return]


def flat(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def melodies(*rests: int) -> list[tuple[Tensor, Tensor]]:
    notes = torch.arange(1, 9).repeat(4, 2)
    notes[:, list(rests)] = 0
    return [(notes[:, :-1], notes[:, 1:])] * 3


@pytest.mark.parametrize("data", [melodies(2, 3, 8, 9, 12), melodies(-1)], ids=["rests", "an end"])
def test_a_token_inside_or_once_at_the_end_is_no_padding(data: Any) -> None:
    train(Rests(), data, flat)


def test_padding_of_flat_targets_is_known_by_the_inputs() -> None:
    with pytest.warns(FindingWarning, match="W95: .* 27% of the targets are 0 at the ends of sequences"):
        train(Rests(), melodies(-1, -2, -3, -4), flat)


def test_classes_of_sequences_are_no_tokens() -> None:
    data = [(torch.randint(1, 9, (18, 5)), torch.arange(18) % 9 // 8 * 8)] * 3
    train(Rests(), data, lambda output, target: F.cross_entropy(output.mean(1), target))


def intensities(output: Tensor, target: Tensor) -> Tensor:
    return (F.kl_div(output, target, reduction="none") - target + output.exp()).mean()


def test_a_divergence_of_intensities_takes_their_logarithms() -> None:
    model = linear(5, 1)
    nn.init.constant_(model.bias, 3.0)
    train(model, [(inputs, target.abs()) for inputs, target in batches(3)], intensities)


def columns(engine: Engine, output: Tensor, batch: Any) -> Tensor:
    _, exposure, target = batch
    return F.mse_loss(output.squeeze(-1) * exposure, target)


def raters(engine: Engine, output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1]) + F.cross_entropy(output, batch[2])


@pytest.mark.parametrize("target", [None, 2])
def test_a_column_that_is_given_beside_the_inputs_is_no_target(target: Any) -> None:
    inputs = torch.rand(16, 5)
    update = Update(lambda engine, batch: engine.model(batch[0]), columns, SGD, target=target)
    batch = inputs, inputs[:, 2].clone(), torch.randn(16)
    Engine(update, model=linear(5, 1), seed=0).run([batch] * 3, max_epochs=1)


def test_two_targets_may_agree() -> None:
    update = Update(lambda engine, batch: engine.model(batch[0]), raters, SGD)
    labels = torch.arange(32).view(2, 4, 4) % 2
    batch = torch.randn(2, 1, 4, 4), labels, labels.clone()
    Engine(update, model=nn.Conv2d(1, 2, 1), seed=0).run([batch] * 3, max_epochs=1)


def test_a_constant_that_is_weighted_by_a_parameter_trains_it() -> None:
    model = linear(5, 1)
    model.register_parameter("weight_of_loss", nn.Parameter(torch.ones(())))

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        constant = output.detach().square().mean()
        return model.weight_of_loss.exp() * (F.mse_loss(output, target) + constant) - model.weight_of_loss  # type: ignore[operator]

    build(model, loss=weighted).run(batches(3), max_epochs=1)


# ---- what is mixed up -------------------------------------------------------------------------------------------------

RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "a dimension of one value": lambda x: x[:, :, :1].reshape(6, 1, 5).transpose(1, 2),
    "pairs of steps that are joined": lambda x: x[:, :4, :2].reshape(6, 2, 4),
    "the heads of sequences whose steps come first": lambda x: x.transpose(0, 1).repeat(1, 1, 8).reshape(5, 24, 6),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_a_reshape_that_mixes_no_values_of_samples_is_right(name: str) -> None:
    def forward(layers: Any, inputs: Tensor) -> Tensor:
        return layers["head"](RESHAPES[name](inputs).reshape(6, -1)[:, :5])  # type: ignore[no-any-return]

    train(Forward(forward, head=nn.Linear(5, 2)), sequences())


SOFTMAXES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scores of the documents of a query": lambda layers, x: F.log_softmax(layers["one"](x[:, 0]), 0) * torch.ones(2),
    "attention over the instances of a bag": lambda layers, x: layers["two"](
        x[:, 0] + (F.softmax(layers["one"](x[:, 0]), 0) * x[:, 0]).sum(0)
    ),
    "weights of layers": lambda layers, x: layers["two"](x[:, 0] * F.softmax(layers["mix"].weight, 0).sum(0)),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_a_softmax_over_the_samples_may_be_meant_where_no_classes_are(name: str) -> None:
    layers = {"one": nn.Linear(3, 1), "two": nn.Linear(3, 2), "mix": nn.Linear(3, 6, bias=False)}
    used = {key: layer for key, layer in layers.items() if key in SOFTMAXES[name].__code__.co_consts}
    train(Forward(SOFTMAXES[name], **used), sequences(), lambda output, _: output.square().mean())


STEPS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "all, one after the other": (False, lambda x: torch.stack([x[:, step] for step in range(5)]).sum(0)),
    "all of both directions": (True, lambda x: torch.stack([x[:, step] for step in range(5)]).sum(0)),
    "both ends of their own direction": (True, lambda x: torch.cat([x[:, -1, :4], x[:, 0, 4:]], 1)),
    "both ends, and then their halves": (
        True,
        lambda x: torch.cat([(last := x[:, -1])[:, :4], (first := x[:, 0])[:, 4:]], 1) + 0 * (last + first),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_a_recurrent_layer_that_are_used_beside_others_are_right(name: str) -> None:
    both, use = STEPS[name]

    def forward(layers: Any, inputs: Tensor) -> Tensor:
        return layers["head"](use(layers["rnn"](inputs)[0]))  # type: ignore[no-any-return]

    rnn = nn.GRU(3, 4, batch_first=True, bidirectional=both)
    train(Forward(forward, rnn=rnn, head=nn.Linear(8 if both else 4, 2)), sequences())


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention with the last output": lambda output, _: (output * output[:, -1:]).sum(1) + output[:, -1],
    "the last output beside the hidden state": lambda output, hidden: output[:, -1] + torch.cat([*hidden], 1),
    "a head of the first output beside one of all": lambda output, _: output[:, 0] + output.tanh().sum(1),
}


@pytest.mark.parametrize("name", USES)
def test_a_step_beside_other_uses_of_the_output_or_the_hidden_state_is_right(name: str) -> None:
    def forward(layers: Any, inputs: Tensor) -> Tensor:
        return layers["head"](USES[name](*layers["rnn"](inputs)))  # type: ignore[no-any-return]

    both = "first" not in name
    rnn = nn.GRU(3, 4, batch_first=True, bidirectional=both)
    train(Forward(forward, rnn=rnn, head=nn.Linear(8 if both else 4, 2)), sequences())


# ---- pairs of samples -------------------------------------------------------------------------------------------------


def at_risk(output: Tensor, target: Tensor) -> Tensor:
    risk, time = output.squeeze(-1), target.squeeze(-1)
    later = (time[None] >= time[:, None]).float()
    return -(risk - (risk.exp() * later).sum(1).log()).mean()


def at_risk_in_logarithms(output: Tensor, target: Tensor) -> Tensor:
    risk, time = output.squeeze(-1), target.squeeze(-1)
    return -(risk - (risk + torch.where(time[None] >= time[:, None], 0.0, -1e9)).logsumexp(1)).mean()


@pytest.mark.parametrize("loss", [at_risk, at_risk_in_logarithms])
def test_a_mask_of_pairs_is_no_target_that_is_broadcast(loss: Any) -> None:
    build(linear(5, 1), loss=loss).run(batches(3), max_epochs=1)


class Frequencies(nn.Module):
    """As many fixed frequencies as a batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 1), nn.Linear(4, 1)
        self.register_buffer("frequencies", torch.arange(1.0, 5.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head((self.layer(inputs) * self.frequencies).sin())  # type: ignore[no-any-return]


def test_each_sample_may_meet_all_values_of_a_buffer() -> None:
    build(Frequencies()).run(batches(3), max_epochs=1)


def concordance(output: Tensor, target: Tensor) -> Tensor:
    scores, times = output.squeeze(-1), target.squeeze(-1)
    return ((scores.unsqueeze(1) - scores) * (times.unsqueeze(1) - times) >= 0).float().mean()


def ranked(output: Tensor, target: Tensor) -> Tensor:
    scores = output.squeeze(-1)
    return (scores[:2][:, None] > scores[2:].clone()).float().mean()


@pytest.mark.parametrize("concordance", [concordance, ranked])
def test_a_metric_of_pairs_compares_a_tensor_with_itself_or_unsqueezes_it(concordance: Any) -> None:
    model = linear(5, 1)
    evaluator = Engine(Update.supervised(F.mse_loss), model=model)
    evaluator.attach(Metrics(concordance=Average(concordance)))
    evaluator.run(batches(2), max_epochs=1)


def written_and_read(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read: nn.Module = torch.load(file, weights_only=False)
    return read


@pytest.mark.parametrize("duplicate", [copy.deepcopy, written_and_read], ids=["copied", "pickled"])
def test_a_step_may_copy_its_model(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    copies: list[nn.Module] = []

    def step(engine: Engine, batch: Any) -> Tensor:
        copies.append(duplicate(engine.model))
        loss: Tensor = engine.model(batch[0])[0].pow(2).mean() + copies[-1](batch[0])[0].pow(2).mean()
        return loss

    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.LSTM(4, 3))
    engine = Engine(Update.from_function(step, SGD), model=model, seed=0)
    engine.run([(torch.randn(8, 5), torch.zeros(8))] * 3, max_epochs=1)
    assert len(copies) == 3
    assert not engine.findings.of_run().of("W09")
