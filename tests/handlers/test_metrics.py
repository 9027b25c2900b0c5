"""Metrics against the same quantities computed at once over all samples."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassF1Score

from signalfire import Engine, Events, FindingWarning, Update
from signalfire.handlers import (
    Accuracy,
    Average,
    Checkpoint,
    GradientAccumulation,
    Metric,
    Metrics,
    TruncatedBPTT,
    Validation,
)
from tests import kit
from tests.kit import linear

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Linear:
    return linear(5, 3)


def batches(sizes: tuple[int, ...] = (8, 8, 8, 3)) -> Batches:
    return kit.batches(sizes, targets=(), classes=3)


def all_at_once(model: nn.Module, data: Batches) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return torch.cat([model(inputs) for inputs, _ in data]), torch.cat([targets for _, targets in data])


def evaluator_of(model: nn.Module, *handlers: Any) -> Engine:
    engine = Engine(Update.supervised(nn.functional.cross_entropy), model=model)
    engine.attach(*handlers)
    return engine


def trainer_of(model: nn.Module, *handlers: Any) -> Engine:
    update = Update.supervised(nn.functional.cross_entropy, partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=model, seed=0)
    engine.attach(*handlers)
    return engine


def test_the_average_loss_counts_samples_and_not_batches() -> None:
    model, data = network(), batches()
    metrics = evaluator_of(model, Metrics(loss=Average())).run(data).metrics
    losses = [nn.functional.cross_entropy(model(inputs), targets).item() for inputs, targets in data]
    sizes = [len(targets) for _, targets in data]
    assert metrics["loss"] == sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    outputs, targets = all_at_once(model, data)
    # Close, not equal: torch sums 27 float32 losses in an order of its own.
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6)
    assert metrics["loss"] != pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_an_average_folds_many_values_to_the_same_sum() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(2500, generator=generator).tolist()
    average = Average()
    total = weight = 0.0
    for number, value in enumerate(values):
        average.add(torch.tensor(value), 1 + number % 7)
        total += torch.tensor(value).double().item() * (1 + number % 7)
        weight += 1 + number % 7
        if number == 1500:
            assert average.compute() == pytest.approx(total / weight, rel=1e-12)
    assert average.compute() == pytest.approx(total / weight, rel=1e-12)
    average.reset()
    assert math.isnan(average.compute())


def test_an_average_holds_no_graph() -> None:
    average = Average()
    average.add(torch.ones(()).requires_grad_() * 2, 1)
    assert average.compute() == 2.0
    assert not any(isinstance(value, Tensor) and value.requires_grad for value, *_ in average._pending)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    average = Average()
    average.add(torch.ones(3), 1)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        average.compute()


def test_accuracy_is_the_share_of_correct_samples() -> None:
    model, data = network(), batches()
    metrics = evaluator_of(model, Metrics(accuracy=Accuracy())).run(data).metrics
    outputs, targets = all_at_once(model, data)
    assert metrics["accuracy"] == (outputs.argmax(1) == targets).sum().item() / 27
    assert 0 < metrics["accuracy"] < 1


def test_accuracy_takes_scores_classes_pictures_and_thresholds() -> None:
    cases: list[tuple[Accuracy, Tensor, Tensor, float]] = [
        (Accuracy(), torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]), 0.5),
        (Accuracy(), torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 1, 1]), 0.75),
        (Accuracy(), torch.tensor([[[[0.9, 0.1]], [[0.1, 0.9]]]]), torch.tensor([[[0, 0]]]), 0.5),
        (Accuracy(threshold=0.0), torch.tensor([-1.0, 0.0, 2.0, 3.0]), torch.tensor([0, 0, 1, 0]), 0.75),
        (Accuracy(threshold=0.5), torch.tensor([[0.4], [0.6]]), torch.tensor([[0.0], [1.0]]), 1.0),
    ]
    for accuracy, output, target, expected in cases:
        accuracy.update(output, target)
        assert accuracy.compute() == expected
    assert math.isnan(Accuracy().compute())
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(5,\)"):
        Accuracy().update(torch.randn(4, 3), torch.zeros(5, dtype=torch.long))


def test_a_function_is_averaged_over_the_samples() -> None:
    model, data = network(), batches()

    def margin(output: Tensor, target: Tensor) -> Tensor:
        return output.gather(1, target[:, None]).mean()

    metrics = evaluator_of(model, Metrics(margin=margin, always=lambda output, target: 2.5)).run(data).metrics
    outputs, targets = all_at_once(model, data)
    assert metrics["margin"] == pytest.approx(margin(outputs, targets).item(), rel=1e-6)
    assert metrics["always"] == 2.5


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_a_torchmetrics_metric_equals_the_direct_computation(average: Any) -> None:
    model, data = network(), batches()
    metrics = evaluator_of(model, Metrics(f1=MulticlassF1Score(3, average=average))).run(data).metrics
    assert metrics["f1"] == MulticlassF1Score(3, average=average)(*all_at_once(model, data)).item()


def test_torchmetrics_metrics_are_metrics_and_so_are_ours() -> None:
    assert all(isinstance(metric, Metric) for metric in (MulticlassF1Score(3), MeanMetric(), Accuracy(), Average()))


def test_each_epoch_is_measured_by_itself() -> None:
    model = network()
    engine = trainer_of(model, Metrics(loss=Average(), accuracy=Accuracy(), f1=MulticlassF1Score(3)))
    found: list[tuple[float, ...]] = []
    engine.connect(
        Events.EPOCH_COMPLETED,
        lambda engine: found.append(tuple(float(engine.state.metrics[name]) for name in ("loss", "accuracy", "f1"))),
    )
    engine.run(batches(), max_epochs=3)

    plain_model = network()
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    expected: list[tuple[float, ...]] = []
    for _ in range(3):
        total, hits, f1 = 0.0, 0, MulticlassF1Score(3)
        for inputs, targets in batches():
            output = plain_model(inputs)
            loss = nn.functional.cross_entropy(output, targets)
            total += loss.item() * len(targets)
            hits += int((output.argmax(1) == targets).sum())
            f1.update(output.detach(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        expected.append((total / 27, hits / 27, float(f1.compute())))
    assert found == expected
    assert torch.equal(model.weight, plain_model.weight)


def test_the_loss_is_measured_undivided_under_accumulation() -> None:
    model = network()
    engine = trainer_of(model, GradientAccumulation(4, weight=lambda engine: 3.0), Metrics(loss=Average()))
    before = [nn.functional.cross_entropy(model(inputs), targets).item() for inputs, targets in batches()]
    engine.run(batches(), max_epochs=1)  # one window: the weights do not change before it ends
    assert engine.state.metrics["loss"] == sum(n * loss for n, loss in zip((8, 8, 8, 3), before, strict=True)) / 27


def test_running_values_can_be_had_within_the_epoch() -> None:
    engine = evaluator_of(network(), Metrics(accuracy=Accuracy(), loss=Average()))
    running: list[tuple[float | None, float | None]] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine: Engine) -> None:
        values = engine.state.metrics.running
        assert "accuracy" not in engine.state.metrics
        running.append((values["accuracy"](), values["loss"]()))

    engine.run(batches())
    model = network()
    for count in range(1, 5):
        outputs, targets = all_at_once(model, batches()[:count])
        accuracy, loss = running[count - 1]
        assert accuracy == (outputs.argmax(1) == targets).float().mean().item() or accuracy == pytest.approx(
            (outputs.argmax(1) == targets).double().mean().item()
        )
        assert loss == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6)
    # Asking in between changed nothing.
    fresh = evaluator_of(network(), Metrics(accuracy=Accuracy(), loss=Average()))
    fresh.run(batches())
    assert fresh.state.metrics["loss"] == engine.state.metrics["loss"]
    assert fresh.state.metrics["accuracy"] == engine.state.metrics["accuracy"]


def test_running_values_go_with_the_handler() -> None:
    engine = evaluator_of(network())
    with engine.attach(Metrics(loss=Average())):
        engine.run(batches())
        assert "loss" in engine.state.metrics.running
    assert engine.state.metrics.running == {}
    assert engine.state.metrics.owners == {}


def test_two_that_write_the_same_metric_are_refused_naming_both() -> None:
    engine = trainer_of(network(), Metrics(loss=Average()))
    with pytest.raises(ValueError, match=r"metrics.*second.*'loss'"):
        engine.attach(Metrics(loss=Average(), name="second"))
    assert list(engine.handlers) == ["metrics"]
    engine.attach(Metrics(other_loss=Average(), name="second"))
    engine.run(batches(), max_epochs=1)
    assert engine.state.metrics["loss"] == engine.state.metrics["other_loss"]


@pytest.mark.parametrize("metrics_first", [True, False])
def test_training_and_validation_of_the_same_name_are_refused_before_the_first_batch(metrics_first: bool) -> None:
    model = network()
    handlers = [Metrics(loss=Average()), Validation(evaluator_of(model, Metrics(loss=Average())), batches())]
    engine = trainer_of(model, *(handlers if metrics_first else reversed(handlers)))
    with pytest.raises(ValueError, match=r"(metrics.*validation|validation.*metrics).*prefix="):
        engine.run(batches(), max_epochs=1)
    assert engine.state.iteration == 0


def test_a_single_function_shows_no_output_to_measure() -> None:
    def function(engine: Engine, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(engine.model(batch[0]), batch[1])

    engine = Engine(Update.from_function(function), model=network())
    with pytest.raises(ValueError, match=r"accuracy.*single function.*forward="):
        engine.attach(Metrics(accuracy=Accuracy()))
    assert engine.handlers == {}
    engine.attach(Metrics(loss=Average()))  # the loss is there, though
    engine.run(batches())
    reference = evaluator_of(network(), Metrics(loss=Average())).run(batches()).metrics["loss"]
    assert engine.state.metrics["loss"] == reference


def test_an_update_that_only_predicts_is_measured_after_its_forward() -> None:
    model, data = network(), batches()
    engine = Engine(Update.prediction(), model=model)
    engine.attach(Metrics(accuracy=Accuracy(), f1=MulticlassF1Score(3)))
    engine.run(data)
    outputs, targets = all_at_once(model, data)
    assert engine.state.metrics["accuracy"] == (outputs.argmax(1) == targets).sum().item() / 27
    assert engine.state.metrics["f1"] == MulticlassF1Score(3)(outputs, targets).item()


@pytest.mark.parametrize("more", [{}, {"accuracy": Accuracy()}], ids=["alone", "beside another"])
def test_the_loss_of_an_update_that_has_none_is_refused(more: dict[str, Any]) -> None:
    engine = Engine(Update.prediction(), model=network())
    with pytest.raises(ValueError, match="no loss"):
        engine.attach(Metrics(loss=Average(), **more))


@pytest.mark.filterwarnings("ignore:W18")
def test_a_batch_in_time_chunks_is_measured_once_as_a_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    data = [
        (torch.randn(4, 10, 3, generator=generator), torch.randint(5, (4, 10), generator=generator)) for _ in range(3)
    ]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(-1) == target).double().mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    for training in (True, False):
        measured = []
        for handlers in ([], [TruncatedBPTT(4)]):  # chunks of 4, 4 and 2
            optimizer = partial(torch.optim.SGD, lr=0.0) if training else None
            engine = Engine(Update.supervised(loss, optimizer), model=model)
            engine.attach(Metrics(loss=Average(), accuracy=accuracy))
            engine.attach(*handlers)
            engine.run(data, max_epochs=1)
            measured.append((engine.state.metrics["loss"], engine.state.metrics["accuracy"]))
        assert measured[0] == pytest.approx(measured[1], rel=1e-6)


def test_inputs_of_ones_own() -> None:
    model = network()

    def forward(engine: Engine, batch: Any) -> dict[str, Tensor]:
        return {"scores": engine.model(batch["x"])}

    def loss(engine: Engine, output: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output["scores"], batch["y"])

    engine = Engine(Update(forward, loss), model=model)
    engine.attach(
        Metrics(
            loss=Average(),
            accuracy=Accuracy(),
            inputs=lambda engine: (engine.state.update.output["scores"], engine.state.batch["y"]),
        )
    )
    engine.run([{"x": inputs, "y": targets} for inputs, targets in batches()])
    reference = evaluator_of(model, Metrics(loss=Average(), accuracy=Accuracy())).run(batches()).metrics
    assert dict(engine.state.metrics) == dict(reference)


def test_metrics_hold_no_graph_and_give_no_gradient() -> None:
    model = network()
    seen: list[bool] = []

    def probe(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.requires_grad or torch.is_grad_enabled())
        return output.mean()

    plain = network()
    trainer_of(plain).run(batches(), max_epochs=2)
    trainer_of(model, Metrics(probe=probe, accuracy=Accuracy(), f1=MulticlassF1Score(3))).run(batches(), max_epochs=2)
    assert seen == [False] * 8
    assert torch.equal(model.weight, plain.weight)


def test_a_batch_to_be_skipped_is_not_measured() -> None:
    data: list[Any] = [batches()[0], None, batches()[1]]
    engine = evaluator_of(network(), Metrics(loss=Average(), accuracy=Accuracy()))
    engine.run(data)
    whole = evaluator_of(network(), Metrics(loss=Average(), accuracy=Accuracy())).run(batches()[:2]).metrics
    assert dict(engine.state.metrics) == dict(whole)


def test_a_run_saved_within_an_epoch_measures_the_whole_epoch() -> None:
    def build() -> Engine:
        return trainer_of(
            nn.Linear(5, 3),
            Metrics(loss=Average(), accuracy=Accuracy(), margin=lambda output, target: output.max(), f1=f1()),
        )

    def f1() -> MulticlassF1Score:
        return MulticlassF1Score(3)

    torch.manual_seed(3)
    whole = build()
    saved: list[dict[str, Any]] = []
    whole.connect(Events.ITERATION_COMPLETED(once=6), lambda engine: saved.append(engine.state_dict()))
    whole.run(batches(), max_epochs=2)
    other = build()
    other.load_state_dict(saved[0])
    other.run(batches(), max_epochs=2)
    assert {name: float(value) for name, value in other.state.metrics.items()} == {
        name: float(value) for name, value in whole.state.metrics.items()
    }
    assert torch.equal(other.model.weight, whole.model.weight)


def test_a_state_is_saved_and_loaded_from_a_file(tmp_path: Any) -> None:
    engine = trainer_of(network(), Metrics(f1=MulticlassF1Score(3)), Checkpoint(tmp_path, every="2it"))
    engine.run(batches(), max_iters=2)
    state = Checkpoint.load(next(tmp_path.iterdir()))
    other = trainer_of(network(), Metrics(f1=MulticlassF1Score(3)), Checkpoint(tmp_path, every="2it"))
    other.load_state_dict(state)
    other.run(batches(), max_epochs=1)
    whole = trainer_of(network(), Metrics(f1=MulticlassF1Score(3)))
    whole.run(batches(), max_epochs=1)
    assert other.state.metrics["f1"] == whole.state.metrics["f1"]


def test_a_state_is_a_copy() -> None:
    engine = trainer_of(network(), Metrics(f1=MulticlassF1Score(3)))
    states: list[dict[str, Any]] = []
    engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: states.append(engine.state_dict()))
    engine.run(batches(), max_iters=1)
    before = {key: value.clone() for key, value in states[0]["handlers"]["metrics"]["f1"][""]["state"].items()}
    engine.run(batches(), max_epochs=1)
    after = states[0]["handlers"]["metrics"]["f1"][""]["state"]
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Metrics()
    with pytest.raises(TypeError, match=r"expected an instance; write Accuracy\(\)"):
        Metrics(accuracy=Accuracy)
    with pytest.raises(TypeError, match="accuracy=3"):
        Metrics(accuracy=3)
    with pytest.raises(TypeError, match="Average"):
        Average(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Accuracy\(threshold='half'\): expected a finite number"):
        Accuracy(threshold="half")  # type: ignore[arg-type]


def test_names_that_are_no_identifiers_go_into_a_mapping() -> None:
    handler = Metrics({"top-1": Accuracy()}, loss=Average())
    assert handler.names == ["top-1", "loss"]
    metrics = evaluator_of(network(), handler).run(batches()).metrics
    assert list(metrics) == ["top-1", "loss"]


def test_switched_off_nothing_is_measured() -> None:
    engine = evaluator_of(network(), Metrics(loss=Average()))
    with engine.without("metrics"):
        engine.run(batches())
    assert dict(engine.state.metrics) == {}


def test_a_run_that_ends_within_an_epoch_and_continues_measures_the_whole_epoch() -> None:
    engine = trainer_of(network(), Metrics(loss=Average(), accuracy=Accuracy()))
    engine.run(batches(), max_iters=2)
    assert dict(engine.state.metrics) == {}
    engine.run(batches(), max_epochs=1)
    whole = trainer_of(network(), Metrics(loss=Average(), accuracy=Accuracy()))
    whole.run(batches(), max_epochs=1)
    assert dict(engine.state.metrics) == dict(whole.state.metrics)


def test_a_torchmetrics_metric_beside_the_loss_is_updated() -> None:
    model, data = network(), batches()
    metrics = evaluator_of(model, Metrics(loss=Average(), f1=MulticlassF1Score(3))).run(data).metrics
    assert metrics["f1"] == MulticlassF1Score(3)(*all_at_once(model, data)).item()


def cosine(output: Tensor, target: Tensor) -> Tensor:
    return (1 - output * target).mean()


def own_logits(output: Tensor, target: Tensor) -> Tensor:
    return 2 * nn.functional.binary_cross_entropy_with_logits(output, target)


@pytest.mark.parametrize(
    ("loss", "severity"),
    [
        (nn.functional.mse_loss, "info"),
        (cosine, "info"),
        (nn.BCEWithLogitsLoss(), "warning"),
        (own_logits, "warning"),
        (partial(nn.functional.binary_cross_entropy_with_logits, pos_weight=torch.ones(1)), "warning"),
    ],
)
def test_a_threshold_of_a_half_is_wrong_for_logits_and_may_be_right_for_other_scores(loss: Any, severity: str) -> None:
    evaluator = Engine(Update.supervised(loss), model=nn.Identity())
    evaluator.attach(Metrics(accuracy=Accuracy(threshold=0.5)))
    with pytest.warns(FindingWarning, match="W05") if severity == "warning" else nullcontext():
        evaluator.run([(torch.tensor([[-0.5], [0.7]]), torch.tensor([[0.0], [1.0]]))])
    assert [one.severity for one in evaluator.findings.of_run().of("W05")] == [severity]


@pytest.mark.parametrize(("weight", "severity"), [(None, "warning"), (torch.tensor([1.0, 3.0]), "info")])
def test_an_accuracy_below_that_of_the_most_frequent_class_is_only_listed_for_weighted_classes(
    weight: Tensor | None, severity: str
) -> None:
    model = linear(5, 2)
    loss = nn.CrossEntropyLoss(weight=weight)
    evaluator = Engine(Update.supervised(loss), model=model)
    evaluator.attach(Metrics(accuracy=Accuracy()))
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 3.0]))
        model.weight.zero_()
    targets = (torch.arange(240) % 4 == 0).long()
    trainer = Engine(Update.supervised(loss, partial(torch.optim.SGD, lr=1e-6)), model=model, seed=0)
    data = [(torch.randn(240, 5, generator=torch.Generator().manual_seed(1)), targets)]
    trainer.attach(Validation(evaluator, data, prefix="train_"))
    with pytest.warns(FindingWarning, match="W64") if severity == "warning" else nullcontext():
        trainer.run(data, max_epochs=4)
    [found] = trainer.findings.of_run().of("W64")
    assert found.severity == severity
    assert "has not exceeded 0.25 (now: 0.25); always predicting the most frequent class gives 0.75" in found.sentence


class Graph:
    """A batch of one sample."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


@pytest.mark.parametrize(("lengths", "reported"), [([1, 1], False), ([2], False), ([2, 2], False), ([2, 1], True)])
def test_batches_whose_samples_cannot_be_counted_are_reported_once_their_lengths_differ(
    lengths: list[int], reported: bool
) -> None:
    evaluator = Engine(
        Update(lambda engine, batch: batch.inputs, lambda engine, output, batch: output.mean()), model=nn.Identity()
    )
    evaluator.attach(Metrics(loss=Average()))
    with pytest.warns(FindingWarning, match="W03") if reported else nullcontext():
        evaluator.run([Graph(torch.ones(length, 3)) for length in lengths])


@dataclass
class Unset:
    """A batch with a field that has no value yet."""

    inputs: Tensor
    kept: Tensor = field(init=False)


class Closed(tuple[Tensor, ...]):
    """A batch that does not say how many items it has."""

    def __len__(self) -> int:
        raise RuntimeError("closed")


@pytest.mark.parametrize("batch_of", [Unset, lambda inputs: Closed([inputs])])
def test_a_batch_that_cannot_be_looked_into_does_not_end_a_run(batch_of: Any) -> None:
    update = Update(
        lambda engine, batch: tuple.__getitem__(batch, 0) if isinstance(batch, Closed) else batch.inputs,
        lambda engine, output, batch: output.mean(),
    )
    evaluator = Engine(update, model=nn.Identity())
    evaluator.attach(Metrics(loss=Average()))
    evaluator.run([batch_of(torch.ones(2, 1)), batch_of(torch.zeros(1, 1))])
    counted = 2 / 3 if batch_of is Unset else 1 / 2  # two samples and one
    assert evaluator.state.metrics["loss"] == pytest.approx(counted)


def test_a_graph_in_each_batch_is_a_sample() -> None:
    """Its nodes and its label have different lengths: which of them counts samples is not known."""
    evaluator = Engine(
        Update(lambda engine, batch: batch.inputs, lambda engine, output, batch: output.mean()), model=nn.Identity()
    )
    evaluator.attach(Metrics(loss=Average()))
    graphs = [Graph(torch.ones(nodes, 3)) for nodes in (5, 7)]
    for graph in graphs:
        graph.label = torch.ones(1)  # type: ignore[attr-defined]
    evaluator.run(graphs)


def f1_score(output: Tensor, target: Tensor, **options: Any) -> float:
    return float((output.argmax(-1) == target).float().mean()) + len(options)


def score_of_each(output: Tensor, target: Tensor) -> float:
    return sum(f1_score(*pair) for pair in zip(output, target, strict=True)) / len(output)


@pytest.mark.parametrize(
    "function",
    [
        score_of_each,
        lambda output, target: f1_score(output, target, average="samples"),
        lambda output, target: nn.Parameter(output.mean()).exp(),
        lambda output, target: torch.tensor([3.0, 4.0]).square().sum().sqrt(),
        lambda output, target: -output.square().mean(),
    ],
    ids=["score of each sample", "average=samples", "temperature", "equal in all batches", "negative accuracy"],
)
def test_an_average_that_is_exact_or_of_no_accuracy_is_not_reported(function: Any) -> None:
    evaluator = evaluator_of(network(), Metrics(accuracy_gain=Average(function)))
    evaluator.run(batches())
    assert not evaluator.findings.of_run().of("W04")


def test_whole_numbers_are_not_said_to_be_counts() -> None:
    evaluator = evaluator_of(network(), Metrics(largest=lambda output, target: target.max()))
    with pytest.warns(
        FindingWarning, match="W04.*whole numbers, such as counts, so their mean is not the value over all"
    ):
        evaluator.run(batches())


class Summed(nn.Module):
    """Sums over the values of a sample, and takes the mean over samples."""

    reduction = "sum"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="sum") / len(output)


def test_the_reduction_of_a_loss_of_the_users_is_only_a_doubt() -> None:
    engine = Engine(Update.supervised(Summed()), model=network())
    engine.attach(Metrics(loss=Average()))
    (found,) = engine.check(batches()).of("W04")
    assert (found.severity, "may be a sum over the batch" in found.sentence) == ("info", True)


def test_a_threshold_is_compared_with_the_loss_only_where_it_reads_the_same_output() -> None:
    data = [(inputs, (targets > 0).float()[:, None]) for inputs, targets in batches()]
    loss = nn.functional.binary_cross_entropy_with_logits
    inputs = {"of the loss": None, "other": lambda engine: (10 * engine.state.update.output, engine.state.batch[1])}
    for which, function in inputs.items():
        evaluator = Engine(Update.supervised(loss), model=linear(5, 1))
        evaluator.attach(Metrics(accuracy=Accuracy(threshold=0.5), inputs=function))
        with pytest.warns(FindingWarning, match="W05") if which == "of the loss" else nullcontext():
            evaluator.run(data)
        (found,) = evaluator.findings.of_run().of("W05")
        assert "set threshold=0.0, the logit of this threshold" in found.way_out


def test_the_accuracies_of_two_data_sets_are_compared_each_with_its_own_chance() -> None:
    """One is at that of always giving the most frequent class, as the other is, whose value is lower."""
    model = linear(5, 3)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
        model.weight.zero_()
    inputs = torch.randn(240, 5, generator=torch.Generator().manual_seed(1))
    uneven, even = (torch.arange(240) % 3 == 2).long(), torch.arange(240) % 3
    loss = nn.CrossEntropyLoss()
    trainer = Engine(Update.supervised(loss, partial(torch.optim.SGD, lr=1e-6)), model=model, seed=0)
    trainer.attach(Validation({"a": [(inputs, uneven)], "b": [(inputs, even)]}, accuracy=Accuracy()))
    with pytest.warns(FindingWarning, match="W64"):
        trainer.run([(inputs, even)], max_epochs=4)
    found = [one.sentence for one in trainer.findings.of_run().of("W64")]
    assert [one.partition("exceeded ")[2][:5] for one in found] == ["0.667", "0.333"]
    assert all("with a standard error of 0.03" in one for one in found)
