"""Models that take the batch by keyword and return their loss, and batches and outputs of any kind."""

from __future__ import annotations

import sys
from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Update
from signalfire.authoring.batches import map_leaves
from signalfire.handlers import (
    Accuracy,
    Average,
    CutMix,
    DeviceTransfer,
    Distillation,
    GradientAccumulation,
    LabelSmoothing,
    Metrics,
    MixUp,
    Predictions,
    Throughput,
)
from tests import kit

ADAM = partial(torch.optim.AdamW, lr=1e-2)


@dataclass
class Output:
    """What Hugging Face's models return."""

    logits: Tensor
    loss: Tensor | None = None


class Classifier(nn.Module):
    """Takes its batch by keyword, and returns the loss where there are labels."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(x)
        return Output(logits, None if labels is None else F.cross_entropy(logits, labels))


PAIRS = kit.batches([4, 4, 4, 3], 5, (), classes=3)
MAPPINGS = [{"x": x, "labels": y} for x, y in PAIRS]


def plain_loop(model: nn.Module, epochs: int = 3, smoothing: float = 0.0) -> list[float]:
    optimizer = ADAM(model.parameters())
    losses = []
    torch.manual_seed(1)
    model.train()
    for _ in range(epochs):
        for batch in MAPPINGS:
            output = model(**batch)
            losses.append(output.loss.item())
            (
                F.cross_entropy(output.logits, batch["labels"], label_smoothing=smoothing) if smoothing else output.loss
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def run(engine: Engine, data: Any, epochs: int = 3) -> Engine:
    torch.manual_seed(1)
    engine.run(data, max_epochs=epochs)
    return engine


def trainer(*handlers: Any, **options: Any) -> Engine:
    engine = Engine(Update.from_model(ADAM, **options), model=Classifier(), seed=0)
    engine.attach(*handlers)
    return engine


@attrs.define
class Attrs:
    x: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    labels: Tensor


Named = namedtuple("Named", ["x", "labels"])


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict and moves itself, as BatchEncoding is."""

    def __getitem__(self, key: Any) -> Any:
        return self.data[key] if isinstance(key, str) else [value[key] for value in self.data.values()]

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


KINDS: dict[str, Callable[[Mapping[str, Tensor]], Any]] = {
    "dict": dict,
    "user dict": Encoding,
    "read-only mapping": MappingProxyType,
    "dataclass": lambda one: Frozen(**one),
    "attrs": lambda one: Attrs(**one),
    "named tuple": lambda one: Named(**one),
    "namespace": lambda one: SimpleNamespace(**one),
}


@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_f12_a_model_that_returns_its_loss_trains_as_in_a_plain_loop_on_batches_of_any_kind(kind: str) -> None:
    theirs = Classifier()
    losses = plain_loop(theirs)
    engine = trainer(DeviceTransfer("cpu"), Metrics(loss=Average(), accuracy=Accuracy()), Throughput(every="2it"))
    run(engine, [KINDS[kind](one) for one in MAPPINGS])
    kit.assert_same(engine.model, theirs)
    last = torch.tensor(losses[-4:], dtype=torch.float64)
    weighted = (last * torch.tensor([4.0, 4, 4, 3], dtype=torch.float64)).sum() / 15
    assert engine.state.metrics["loss"] == pytest.approx(weighted.item(), rel=1e-7)
    assert 0 <= engine.state.metrics["accuracy"] <= 1


def test_the_loss_is_also_taken_from_a_mapping_a_tuple_or_the_output_itself() -> None:
    class Returning(Classifier):
        kind: Callable[[Any], Any]

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return type(self).kind(super().forward(x, labels))

    theirs = Classifier()
    plain_loop(theirs)
    for kind in (lambda o: {"loss": o.loss, "logits": o.logits}, lambda o: (o.loss, o.logits), lambda o: o.loss):
        Returning.kind = staticmethod(kind)
        engine = Engine(Update.from_model(ADAM), model=Returning(), seed=0)
        kit.assert_same(run(engine, MAPPINGS).model, theirs)


def test_accumulation_over_mappings_weights_each_window_as_in_a_plain_loop() -> None:
    theirs = Classifier()
    optimizer = ADAM(theirs.parameters())
    torch.manual_seed(1)
    for window in kit.windows(MAPPINGS, 3):
        for batch in window:
            theirs(**batch).loss.backward()
        kit.average_gradients(theirs, len(window))
        optimizer.step()
        optimizer.zero_grad()
    kit.assert_same(run(trainer(GradientAccumulation(3)), MAPPINGS, 1).model, theirs)


def test_predictions_and_metrics_find_output_inputs_and_targets() -> None:
    model = Classifier()
    evaluator = Engine(Update.from_model(input="x"), model=model)
    evaluator.attach(Predictions(inputs=True, targets=True), Metrics(accuracy=Accuracy(), loss=Average()))
    metrics = evaluator.run(MAPPINGS).metrics
    found = evaluator.find(Predictions)
    inputs, targets = (torch.cat(parts) for parts in zip(*PAIRS, strict=True))
    with torch.no_grad():
        logits = torch.cat([model.eval()(x).logits for x, _ in PAIRS])
    assert torch.equal(found.outputs, logits)
    assert torch.equal(found.inputs, inputs)
    assert torch.equal(found.targets, targets)
    assert metrics["accuracy"] == pytest.approx((logits.argmax(1) == targets).double().mean().item())
    without = Engine(Update.from_model(), model=model)  # predicts where there are no labels
    without.attach(Predictions(inputs="x"))
    without.run([{"x": x} for x, _ in PAIRS])
    assert torch.equal(without.find(Predictions).outputs, logits)
    assert torch.equal(without.find(Predictions).inputs, inputs)


def test_label_smoothing_equals_a_plain_loop() -> None:
    theirs = Classifier()
    plain_loop(theirs, smoothing=0.1)
    engine = run(trainer(LabelSmoothing(0.1)), MAPPINGS)
    for ours, other in zip(engine.model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours, other, atol=1e-6)  # the same sum in another order


@pytest.mark.parametrize("kind", ["dict", "user dict", "dataclass"])
def test_mixup_over_mappings_trains_as_over_tuples(kind: str) -> None:
    expected = Engine(Update.supervised(F.cross_entropy, ADAM), model=Classifier().inner, seed=0)
    expected.attach(MixUp(0.4, name="mixup"))
    engine = trainer(MixUp(0.4, input="x"), loss=F.cross_entropy)
    run(expected, PAIRS)
    run(engine, [KINDS[kind](one) for one in MAPPINGS])
    kit.assert_same(engine.model.inner, expected.model)


def test_cutmix_over_mappings_trains_as_over_tuples() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.inner = nn.Sequential(nn.Flatten(), nn.Linear(2 * 6 * 6, 3))

        def forward(self, pixel_values: Tensor, labels: Tensor) -> Output:
            return Output(self.inner(pixel_values))

    pairs = kit.batches(4, (2, 6, 6), (), classes=3)
    engine = Engine(Update.from_model(ADAM, loss=F.cross_entropy), model=Images(), seed=0)
    engine.attach(CutMix(input="pixel_values"))
    expected = Engine(Update.supervised(F.cross_entropy, ADAM), model=Images().inner, seed=0)
    expected.attach(CutMix())
    run(engine, [{"pixel_values": x, "labels": y} for x, y in pairs])
    run(expected, pairs)
    kit.assert_same(engine.model.inner, expected.model)


def test_distillation_passes_the_batch_to_the_teacher_as_to_the_student() -> None:
    def distilled(update: Update, student: nn.Module, teacher: nn.Module, data: Any) -> Engine:
        engine = Engine(update, model=student, seed=0)
        engine.attach(Distillation(teacher, temperature=2.0))
        return run(engine, data)

    engine = distilled(Update.from_model(ADAM), Classifier(), Classifier(7), MAPPINGS)
    expected = distilled(Update.supervised(F.cross_entropy, ADAM), Classifier().inner, Classifier(7).inner, PAIRS)
    kit.assert_same(engine.model.inner, expected.model)


def test_a_supervised_update_finds_input_and_target_by_key() -> None:
    def build(**places: Any) -> Engine:
        return Engine(Update.supervised(F.cross_entropy, ADAM, **places), model=Classifier().inner, seed=0)

    expected = run(build(), PAIRS)
    keyed = run(build(input="x", target="labels"), MAPPINGS)
    kit.assert_same(keyed.model, expected.model)
    swapped = run(build(input=1, target=0), [(y, x) for x, y in PAIRS])
    kit.assert_same(swapped.model, expected.model)
    found = run(build(input=lambda batch: batch["x"], target=lambda batch: batch["labels"]), MAPPINGS)
    kit.assert_same(found.model, expected.model)


def test_samples_and_tokens_are_counted_at_their_places() -> None:
    now = iter(range(1000))
    engine = trainer(Throughput(every="4it", warmup=1, tokens="x", clock=lambda: next(now)), samples="labels")
    counted = engine.updates[0].samples_in
    assert [counted(one) for one in MAPPINGS] == [4, 4, 4, 3]
    assert counted({"labels": torch.ones(1, 7)}) == 1
    assert Engine(Update.from_model(ADAM, samples="n"), model=Classifier()).updates[0].samples_in({"n": 5}) == 5
    run(engine, MAPPINGS, 1)
    metrics = engine.state.metrics
    assert metrics["tokens_per_second"] == 5 * metrics["samples_per_second"]


class Rows(UserDict[str, Tensor]):
    """A mapping that iterates over its rows, as a TensorDict does."""

    def keys(self) -> Any:
        return self.data.keys()

    def values(self) -> Any:
        return self.data.values()

    def __iter__(self) -> Any:
        return ({key: value[row] for key, value in self.data.items()} for row in range(len(self.data["x"])))


def test_of_a_mapping_that_iterates_over_rows_messages_name_its_keys_and_copies_have_them() -> None:
    batch = Rows({"x": torch.ones(4, 5), "labels": torch.ones(4), "idx": torch.ones(4)})
    with pytest.raises(TypeError) as caught:
        trainer().run([batch], max_epochs=1)
    assert "by keyword: x, labels, idx; remove from" in "".join(caught.value.__notes__)
    with pytest.raises(TypeError, match="but this batch is a Rows with 'x', 'labels', 'idx'; for other"):
        supervised().run([batch], max_epochs=1)
    assert map_leaves(lambda leaf: leaf + 1, batch).data["x"].tolist() == [[2.0] * 5] * 4


def supervised() -> Engine:
    return kit.build(Classifier().inner, loss=F.cross_entropy)


def mixing(**options: Any) -> Engine:
    return trainer(MixUp(input="x"), **options)


def measured(**options: Any) -> Engine:
    return trainer(Metrics(accuracy=Accuracy()), **options)


MISTAKES: list[tuple[str, Callable[[], Any]]] = [
    (
        "but the output, a Output.*, has no loss.*put the targets into the batch under the name",
        lambda: trainer().run([{"x": torch.ones(2, 5)}], max_epochs=1),
    ),
    (
        r"by keyword, but this batch is a tuple of length 2; .*Update\.supervised",
        lambda: trainer().run(PAIRS, max_epochs=1),
    ),
    ("unexpected keyword argument 'idx'", lambda: trainer().run([{**MAPPINGS[0], "idx": 1}], max_epochs=1)),
    ("takes the loss from the model's output.*loss=cross_entropy", lambda: mixing().run(MAPPINGS, max_epochs=1)),
    (
        r"the batch, a dict with 'x', 'labels', has no tensor at 0; .*MixUp\(input=\)",
        lambda: trainer(MixUp(), loss=F.cross_entropy).run(MAPPINGS, max_epochs=1),
    ),
    (
        "found no target in the batch: there is no 'label' in a dict with 'x', 'labels'; .*target=",
        lambda: measured(target="label").run(MAPPINGS, max_epochs=1),
    ),
    (
        "found no output in the value that its forward function returned: there is no 'scores' in a Output with 'logits', "
        "'loss'",
        lambda: measured(output="scores").run(MAPPINGS, max_epochs=1),
    ),
    (
        r"tell Update where to find the input and the target: Update\.supervised",
        lambda: supervised().run(MAPPINGS, max_epochs=1),
    ),
    (
        r"tell Update where to find the input and the target: Update\.supervised",
        lambda: supervised().run([Encoding(MAPPINGS[0])], max_epochs=1),
    ),
    (r"target=1\.5: expected an index, a key or name", lambda: Update.from_model(ADAM, target=1.5)),  # type: ignore[arg-type]
    (r"Predictions\(inputs=1\.5\)", lambda: Predictions(inputs=1.5)),  # type: ignore[arg-type]
    (r"'predictions': inputs='y': there is no 'y' in a dict", lambda: predicted(inputs="y")),
    (r"found no input in the batch: there is no 0 in a dict .*input=", lambda: predicted(inputs=True)),
    (
        r"cannot replace the targets, because update 'main' uses a function to find them",
        lambda: mixing(loss=F.cross_entropy, target=lambda batch: batch["labels"]).run(MAPPINGS, max_epochs=1),
    ),
    (r"LabelSmoothing\(dim=0\)", lambda: LabelSmoothing(dim=0)),
    (
        "found no samples in the batch: there is no 'n'",
        lambda: trainer(Metrics(loss=Average()), samples="n").run(MAPPINGS, max_epochs=1),
    ),
]


def predicted(**options: Any) -> None:
    engine = Engine(Update.from_model(), model=Classifier())
    engine.attach(Predictions(**options))
    engine.run(MAPPINGS)


@pytest.mark.whole
@pytest.mark.parametrize(("message", "mistake"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_mistake_is_refused_with_the_way_out(message: str, mistake: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        mistake()


def test_what_the_model_does_not_take_is_named() -> None:
    with pytest.raises(TypeError) as error:
        trainer().run([{**MAPPINGS[0], "idx": 1}], max_epochs=1)
    assert any("by keyword: x, labels, idx; remove from the batch" in note for note in error.value.__notes__)


def calls_of(engine: Engine, data: Any) -> int:
    """Python and C calls of a run over 60 batches, less those of one over 20: what 40 iterations cost."""

    def counted(length: int) -> int:
        calls = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        engine.reset()
        sys.setprofile(profile)
        try:
            engine.run((data * 60)[:length], max_epochs=1)
        finally:
            sys.setprofile(None)
        return calls

    counted(20)
    return counted(60) - counted(20)


@pytest.mark.moderate
def test_a_batch_that_is_a_mapping_costs_five_calls_more_than_a_tuple_at_most() -> None:
    def handlers() -> list[Any]:
        return [DeviceTransfer("cpu"), Metrics(loss=Average()), Throughput(every="100it")]

    class Positional(Classifier):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return self.inner(x)

    mapping = Engine(Update.from_model(ADAM), model=Classifier(), seed=0)
    pair = Engine(Update.supervised(F.cross_entropy, ADAM), model=Positional(), seed=0)
    mapping.attach(*handlers())
    pair.attach(*handlers())
    assert calls_of(mapping, MAPPINGS[:1]) <= calls_of(pair, PAIRS[:1]) + 5 * 40  # 336 and 332 calls in an iteration
