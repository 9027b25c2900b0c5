"""What averages and accuracy count, and in which precision, against a loop over the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.text import Perplexity

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    Accuracy,
    Average,
    History,
    Metrics,
    MixedPrecision,
    MovingAverage,
    Predictions,
    TruePrecision,
    Validation,
)
from tests import kit
from tests.kit import linear


def trainer_of(*handlers: Any, model: nn.Module | None = None, loss: Any = F.cross_entropy) -> Engine:
    update = Update.supervised(loss, partial(torch.optim.SGD, lr=0.5))
    engine = Engine(update, model=linear(5, 3) if model is None else model, seed=0)
    engine.attach(*handlers)
    return engine


def batches(sizes: tuple[int, ...] = (8, 8, 3)) -> list[tuple[Tensor, Tensor]]:
    return kit.batches(sizes, targets=(), classes=3)


# ---- values as they were ------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A classifier with a scale, which is trained, and a buffer and a NumPy array that count the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(5, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.array = np.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.array += 1
        return self.logit_scale * self.layer(x)  # type: ignore[no-any-return]


def test_the_mean_of_a_parameter_or_buffer_is_that_of_its_values_as_they_were() -> None:
    model = Scaled()
    metrics = Metrics(
        scale=lambda output, target: model.logit_scale,
        calls=lambda output, target: {"buffer": model.calls, "array": model.array},
    )
    seen: list[float] = []
    engine = trainer_of(metrics, model=model)
    engine.connect(Events.UPDATE_COMPLETED, lambda engine: seen.append(model.logit_scale.item()))
    found = engine.run(batches((4, 4, 4)), max_epochs=1).metrics
    assert found["scale"] == pytest.approx(sum(seen) / 3)
    assert len(set(seen)) == 3
    assert (found["calls/buffer"], found["calls/array"]) == (2.0, 2.0)


def test_an_output_in_memory_that_is_used_again_is_kept_as_it_was() -> None:
    static = torch.zeros(4)  # as a CUDA graph has it

    def forward(engine: Engine, batch: Tensor) -> Tensor:
        return static.copy_(batch)

    def loss(engine: Engine, output: Tensor, batch: Tensor) -> Tensor:
        return output[0]

    engine = Engine(Update(forward, loss))
    cat = CatMetric()
    engine.attach(
        Metrics({"loss": Average(), "first": lambda output: output[0], "all": cat}, inputs=lambda e: (static,)),
        predictions := Predictions(),
    )
    found = engine.run([torch.full((4,), value) for value in (1.0, 2.0, 6.0)]).metrics
    assert (found["loss"], found["first"]) == (3.0, 3.0)
    assert found["all"].tolist() == predictions.outputs.tolist() == [1.0] * 4 + [2.0] * 4 + [6.0] * 4


def test_what_is_logged_is_kept_as_it_was() -> None:
    model = Scaled()
    engine = trainer_of(history := History(), model=model)
    before = model.logit_scale.item()

    @engine.on(Events.ITERATION_STARTED(once=1))
    def log(engine: Engine) -> None:
        engine.log("scale", model.logit_scale)
        engine.state.metrics["array"] = model.array

    metrics = engine.run(batches(), max_epochs=1).metrics
    assert model.logit_scale.item() != before
    assert float(metrics["scale"]) == before
    assert history["scale"] == [before]
    assert (metrics["array"], type(metrics["array"])) == (0.0, float)


# ---- weights ------------------------------------------------------------------------------------------------------


def test_a_batch_of_weight_zero_counts_nothing_even_if_its_value_is_nan() -> None:
    for average, expected in ((Average(), 2.5), (MovingAverage(decay=0.5), (0.5 * 1 + 3) / 1.5)):
        for value, weight in ((1.0, 1), (math.nan, 0), (3.0, 3), (math.inf, 0)):
            average.add(torch.tensor(value), weight)
        assert average.compute() == expected
        average.add(torch.tensor(math.nan), 1)
        assert math.isnan(average.compute())


def counted(batch: Any) -> int:
    return int((batch[1] != -100).sum())


@pytest.mark.parametrize("samples", [None, counted], ids=["by default", "samples="])
@pytest.mark.parametrize("odd", ["empty", "all ignored"])
def test_an_odd_batch_leaves_the_mean_of_the_others(odd: str, samples: Callable[[Any], int] | None) -> None:
    data, model = batches((8, 3)), linear(5, 3)
    loss = sum(F.cross_entropy(model(x), y).item() * len(x) for x, y in data) / 11
    size = 0 if odd == "empty" else 4
    data.insert(1, (torch.ones(size, 5), torch.full((size,), -100)))
    evaluator = Engine(Update.supervised(F.cross_entropy, samples=samples), model=model)
    averages = {"own": Average(), "function": Average(F.cross_entropy), "moving": MovingAverage()}
    evaluator.attach(Metrics({**averages, "dict": lambda o, t: {"a": F.cross_entropy(o, t)}}))
    found = evaluator.run(data).metrics
    if samples is None:
        assert found["own"] == found["function"] == found["dict/a"] == pytest.approx(loss)
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("ignored", [255, 0, -100])
def test_accuracy_ignores_the_class_that_the_loss_ignores(ignored: int) -> None:
    evaluator = Engine(Update.supervised(nn.CrossEntropyLoss(ignore_index=ignored)), model=nn.Identity())
    evaluator.attach(Metrics(followed=Accuracy(), all=Accuracy(ignore_index=None)))
    evaluator.run([(torch.eye(4), torch.tensor([2, 1, ignored, 3]))])
    assert evaluator.state.metrics == {"followed": 2 / 3, "all": 2 / 4}


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(ignore_index=0), partial(F.cross_entropy, ignore_index=0)], ids=["module", "partial"]
)
def test_the_class_that_the_loss_ignores_is_known(loss: Any) -> None:
    model = linear(5, 3)
    evaluator = Engine(Update.supervised(loss), model=model)
    evaluator.attach(Metrics(own=Average(), function=Average(loss)))
    data = [(torch.ones(2, 5), torch.tensor([1, 2])), (torch.ones(2, 5), torch.tensor([0, 0]))]
    found = evaluator.run(data).metrics
    assert found["own"] == found["function"] == F.cross_entropy(model(data[0][0]), data[0][1]).item()


def test_a_loss_that_is_nan_for_another_reason_counts() -> None:
    evaluator = Engine(Update.supervised(F.cross_entropy), model=linear(5, 3))
    evaluator.attach(Metrics(own=Average(), function=Average(F.cross_entropy)))
    x, y = batches((4,))[0]
    found = evaluator.run([(x, y), (x * math.nan, y)]).metrics
    assert math.isnan(found["own"])
    assert math.isnan(found["function"])


# ---- ignored targets ----------------------------------------------------------------------------------------------


def test_targets_that_losses_ignore_do_not_count_in_the_accuracy() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    cases: list[tuple[dict[str, Any], Tensor, Tensor, float]] = [
        ({}, scores, torch.tensor([1, -100, 0, 0]), 2 / 3),
        ({}, scores, torch.tensor([1, -1, 0, -1]), 1.0),  # a function as the loss may ignore any class that cannot be
        ({}, torch.tensor([1, -1, 0]), torch.tensor([1, -1, 1]), 2 / 3),
        ({}, scores.T[None], torch.tensor([[1, -100, -100, 1]]), 1.0),
        ({}, scores.argmax(1), torch.tensor([-100, -100, -100, 0]), 0.0),
        ({"threshold": 0.5}, scores[:, 1], torch.tensor([1, -100, 0, 0]), 2 / 3),
        ({"ignore_index": 0}, scores, torch.tensor([1, 0, 0, 0]), 1.0),
        ({}, torch.tensor([156, 2]).byte(), torch.tensor([156, 1]).byte(), 0.5),  # 156 is -100 as a byte
        ({"ignore_index": None}, scores, torch.tensor([1, -100, 0, 0]), 0.5),
    ]
    for options, output, target, expected in cases:
        accuracy = Accuracy(**options)
        accuracy.update(output, target)
        assert accuracy.compute() == expected, options
    accuracy = Accuracy(ignore_index=0)
    accuracy.update(scores, torch.tensor([1, 0, 0, 1]))
    assert accuracy.most_frequent == (1.0, 2)


def test_batches_and_ranks_count_by_the_targets_that_are_not_ignored() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]])
    accuracy, other = Accuracy(), Accuracy()
    for target in ([1, -100, -100], [-100, -100, -100], [1, 1, 0]):
        accuracy.update(scores, torch.tensor(target))
    assert accuracy.compute() == 3 / 4
    other.merge([accuracy.state_dict(), {"hits": 1, "count": 4}])
    assert other.compute() == 4 / 8
    assert math.isnan(Accuracy().compute())
    with pytest.raises(TypeError, match=r"Accuracy\(ignore_index='pad'\)"):
        Accuracy(ignore_index="pad")  # type: ignore[arg-type]


# ---- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "precision", "dtype"),
    [
        (MixedPrecision, "bf16", torch.bfloat16),
        (TruePrecision, "bf16", torch.bfloat16),
        (TruePrecision, "fp16", torch.float16),
    ],
)
def test_metrics_get_outputs_of_half_precision_in_float32(handler: Any, precision: str, dtype: torch.dtype) -> None:
    weights = torch.tensor([0.3, 0.7, 1.1])
    criterion = nn.CrossEntropyLoss(weight=weights if handler is MixedPrecision else weights.to(dtype))
    evaluator = Engine(Update.supervised(criterion), model=linear(5, 3))
    seen: list[torch.dtype] = []

    def mean(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return output.mean()

    evaluator.attach(handler(precision), Metrics(loss=Average(criterion), mean=mean), predictions := Predictions())
    data = batches((8,))
    found = evaluator.run(data).metrics
    assert seen == [torch.float32]
    assert predictions.outputs.dtype is dtype
    scores = predictions.outputs.float()
    assert found["loss"] == criterion.float()(scores, data[0][1]).item()
    assert found["mean"] == scores.mean().item()


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_training_and_the_evaluations_in_it_measure_in_float32() -> None:
    model = linear(5, 3)
    evaluator = Engine(Update.supervised(F.cross_entropy), model=model)
    evaluator.attach(
        Metrics(
            perplexity=Perplexity(),
            inputs=lambda engine: (engine.state.update.output[None], engine.state.batch[1][None]),
        )
    )
    data = batches((8,))
    trainer = trainer_of(MixedPrecision("bf16"), Metrics(train=Average(F.cross_entropy)), model=model)
    trainer.attach(Validation(evaluator, data, every="1ep"))

    def scores() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return model(data[0][0]).float()  # type: ignore[no-any-return]

    before = F.cross_entropy(scores(), data[0][1]).item()
    found = trainer.run(data, max_epochs=1).metrics
    assert found["train"] == before
    assert found["perplexity"] == Perplexity()(scores()[None], data[0][1][None]).item()


def test_outputs_in_a_nesting_are_converted_and_stay_as_they_are() -> None:
    inner = SimpleNamespace(scores=torch.tensor([0.1, 0.3]).bfloat16(), classes=torch.tensor([1, 2]))
    output = {"heads": (inner, "name"), "wide": torch.ones(2, dtype=torch.float64)}
    seen: list[Any] = []

    def own(output: Any) -> float:
        seen.append(output)
        return 0.0

    evaluator = Engine(Update.prediction(lambda engine, batch: output))
    evaluator.attach(Metrics(own=own, inputs=lambda engine: (engine.state.update.output,)))
    evaluator.run([0])
    (got,) = seen
    found = got["heads"][0]
    assert (found.scores.dtype, found.classes.dtype, got["wide"].dtype) == (torch.float32, torch.int64, torch.float64)
    assert got["heads"][1] == "name"
    assert inner.scores.dtype is torch.bfloat16


def test_an_accuracy_alone_gets_the_scores_themselves_and_rounds_no_threshold() -> None:
    score = torch.tensor([0.3]).bfloat16()  # 0.30078125
    accuracy = Accuracy(threshold=0.3)
    accuracy.update(score, torch.tensor([1]))
    assert accuracy.compute() == 1.0


def test_a_function_with_weights_of_half_precision_fails_with_the_reason() -> None:
    weight = torch.ones(3).bfloat16()
    evaluator = Engine(Update.supervised(F.cross_entropy), model=linear(5, 3))
    evaluator.attach(TruePrecision("bf16"), Metrics(loss=partial(F.cross_entropy, weight=weight)))
    with pytest.raises(RuntimeError, match="expected scalar type") as caught:
        evaluator.run(batches((2,)))
    assert any("receive half-precision tensors as float32" in note for note in caught.value.__notes__)


# ---- values of one number -----------------------------------------------------------------------------------------


class Constant:
    """A metric that computes a given value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def reset(self) -> None:
        pass

    def update(self, *inputs: Any) -> None:
        pass

    def compute(self) -> Any:
        return self.value


def test_values_of_one_number_are_numbers() -> None:
    evaluator = Engine(Update.supervised(F.cross_entropy), model=linear(5, 3))
    values = {
        "tensor": torch.tensor(0.25),
        "scalar": np.float32(0.25),
        "array": np.array(0.25),
        "several": {"a": torch.tensor(0.25)},
        "vector": torch.tensor([0.25]),
    }
    evaluator.attach(
        Metrics({name: Constant(value) for name, value in values.items()}),
        Metrics(all=MetricCollection({"mean": MeanMetric()}), inputs=lambda engine: (torch.tensor(0.25),), name="more"),
    )
    found = evaluator.run(batches((2,))).metrics
    assert found.pop("vector").shape == (1,)
    assert {name: (type(value), value) for name, value in found.items()} == dict.fromkeys(
        ["tensor", "scalar", "array", "several/a", "all/mean"], (float, 0.25)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("options", [{}, {"ignore_index": 2}, {"threshold": 0.5}])
def test_accuracy_takes_labels_of_every_integer_type(dtype: torch.dtype, options: dict[str, Any]) -> None:
    scores, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 1, 0, 1])
    output, target = (scores[:, 0], labels % 2) if "threshold" in options else (scores, labels)
    expected, found, predicted = Accuracy(**options), Accuracy(**options), Accuracy()
    expected.update(output, target)
    found.update(output, target.to(dtype))
    assert found.compute() == expected.compute()
    predicted.update(scores.argmax(1).to(dtype), labels)
    assert predicted.compute() == (scores.argmax(1) == labels).double().mean().item()
