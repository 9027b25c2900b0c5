"""Predictions against a plain loop in eval mode."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from signalfire import Engine, Events, Update
from signalfire.handlers import Average, DeviceTransfer, FastDevRun, Metrics, MixedPrecision, Predictions, Validation
from signalfire.testing import check_handler
from tests import kit
from tests.kit import mlp

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    return mlp(5, 8, 2, nn.BatchNorm1d(8), nn.Dropout(0.5))


def batches() -> Batches:
    return kit.batches((4, 4, 3), targets=2)


def predictor(model: nn.Module | None, *handlers: Any, forward: Callable[[Engine, Any], Any] | None = None) -> Engine:
    engine = Engine(Update.prediction(forward), model=model)
    engine.attach(*handlers)
    return engine


def plain_loop_predictions(model: nn.Module) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        outputs = [model(inputs) for inputs, _ in batches()]
    model.train()
    return outputs


def test_batches_without_targets_are_predicted_as_those_with_them() -> None:
    model = network()
    handler = Predictions(inputs=True)
    engine = predictor(model, handler)
    for kind in (lambda x: x, lambda x: (x,), lambda x: [x]):
        engine.run([kind(inputs) for inputs, _ in batches()])
        assert torch.equal(handler.outputs, torch.cat(plain_loop_predictions(model)))
        assert torch.equal(handler.inputs, torch.cat([inputs for inputs, _ in batches()]))


@pytest.mark.parametrize("order", [1, -1])
def test_outputs_inputs_and_targets_are_joined_over_the_batches(order: int) -> None:
    model = network()
    handler = Predictions(inputs=True, targets=True)
    predictor(model, *[handler, DeviceTransfer("cpu")][::order]).run(batches())
    assert torch.equal(handler.outputs, torch.cat(plain_loop_predictions(model)))
    assert torch.equal(handler.inputs, torch.cat([inputs for inputs, _ in batches()]))
    assert torch.equal(handler.targets, torch.cat([targets for _, targets in batches()]))
    assert not handler.outputs.requires_grad
    assert handler.files == []


def test_under_mixed_precision_it_takes_what_the_forward_gives() -> None:
    model = network()
    handler = Predictions()
    predictor(model, handler, MixedPrecision("bf16")).run(batches())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cat(plain_loop_predictions(model))
    assert handler.outputs.dtype == torch.bfloat16
    assert torch.equal(handler.outputs, expected)


def test_with_a_folder_every_batch_is_a_file_and_nothing_stays_in_memory(tmp_path: Path) -> None:
    model = network()
    handler = Predictions(tmp_path / "out", targets=True)
    predictor(model, handler).run(batches())
    assert [path.name for path in handler.files] == [f"predictions-0000000{n}.pt" for n in (1, 2, 3)]
    assert sorted((tmp_path / "out").iterdir()) == handler.files
    for path, output, (_, targets) in zip(handler.files, plain_loop_predictions(model), batches(), strict=True):
        found = torch.load(path, weights_only=True)
        assert set(found) == {"outputs", "targets"}
        assert torch.equal(found["outputs"], output)
        assert torch.equal(found["targets"], targets)
    assert handler._collected == {"outputs": [], "targets": []}
    with pytest.raises(RuntimeError, match=r"'predictions': the outputs are on disk"):
        _ = handler.outputs


def test_a_new_run_replaces_the_files_of_the_one_before_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "predictions-notes.pt").write_text("mine")
    handler, other = Predictions(tmp_path), Predictions(tmp_path, name="predictions-0")
    engine = predictor(network(), handler, other)
    engine.run(batches())
    engine.detach(other)
    engine.run(batches()[:1])
    names = {path.name for path in tmp_path.iterdir()}
    others = {f"predictions-0-0000000{n}.pt" for n in (1, 2, 3)}
    assert names == {"predictions-notes.pt", "predictions-00000001.pt"} | others
    assert len(handler.files) == 1


def test_an_output_that_cannot_be_written_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    handler = Predictions(tmp_path)
    engine = predictor(None, handler, forward=lambda engine, batch: lambda: None)
    with pytest.raises(Exception, match=r"pickle|local"):
        engine.run(batches())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda engine, batch: batch[0].sum(), lambda data: torch.stack([inputs.sum() for inputs, _ in data])),
        (lambda engine, batch: len(batch[0]), lambda data: [4, 4, 3]),
        (lambda engine, batch: torch.ones(2, len(batch[0])), None),
    ],
    ids=["scalars", "numbers", "ragged"],
)
def test_outputs_of_other_forms(forward: Any, expected: Any) -> None:
    handler = Predictions()
    predictor(None, handler, forward=forward).run(batches())
    if expected is None:
        assert [tuple(output.shape) for output in handler.outputs] == [(2, 4), (2, 4), (2, 3)]
    elif isinstance(found := handler.outputs, Tensor):
        assert torch.equal(found, expected(batches()))
    else:
        assert found == expected(batches())


def test_nested_outputs_are_one_item_a_batch_and_share_nothing_with_the_forwards() -> None:
    buffer = torch.zeros(2)

    def forward(engine: Engine, batch: Any) -> Any:
        buffer.add_(1)
        return {"parts": [buffer, (buffer, "text")]}

    handler = Predictions()
    predictor(None, handler, forward=forward).run(batches())
    parts = handler.outputs["parts"]
    assert [first.tolist() for first, _ in parts] == [[1, 1], [2, 2], [3, 3]]
    assert parts[1][1][1] == "text"


@dataclass
class Output:
    logits: Tensor
    label: str


class Heads(NamedTuple):
    digits: Tensor
    parity: tuple[Tensor, ...]


HEADS: list[Callable[[Tensor], Any]] = [
    lambda x: {"digits": x, "loss": x.sum(), "text": "a", "parity": (x[:, 0], None)},
    lambda x: {"digits": x, "loss": x.sum(), "text": "a", "parity": (x[:, :1], None), "more": {"x": x}},
    lambda x: (x, {"parity": x[:, 0]}),
    lambda x: Heads(x, (x[:, 0],)),
    lambda x: Output(x, "text"),
    lambda x: OrderedDict(last_hidden_state=x, hidden_states=(x, x)),  # as the classes of Hugging Face
]


@pytest.mark.parametrize("forward", HEADS)
def test_the_outputs_of_several_heads_are_joined_by_key_and_by_place(forward: Callable[[Tensor], Any]) -> None:
    def same(found: Any, whole: Any, parts: list[Any]) -> None:
        """What was found is what the forward gives for all samples at once, apart from what is one value a batch."""
        if dataclasses.is_dataclass(whole) and not isinstance(whole, dict):
            whole, parts = (dataclasses.asdict(whole), [dataclasses.asdict(one) for one in parts])  # type: ignore[arg-type]
        if isinstance(whole, dict):
            assert list(found) == list(whole)
            for key in whole:
                same(found[key], whole[key], [one[key] for one in parts])
        elif isinstance(whole, tuple):
            assert isinstance(found, tuple)
            for place, one in enumerate(whole):
                same(found[place], one, [part[place] for part in parts])
        elif isinstance(whole, Tensor):
            assert torch.equal(found, whole if whole.dim() else torch.stack(parts))
        else:
            assert found == parts

    handler = Predictions()
    predictor(None, handler, forward=lambda engine, batch: forward(batch[0])).run(batches())
    inputs = [inputs for inputs, _ in batches()]
    same(handler.outputs, forward(torch.cat(inputs)), [forward(one) for one in inputs])


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: {"digits": x} if len(x) == 4 else {"others": x},
        lambda x: (x,) * len(x),
        lambda x: list(x),
        lambda x: {},
        lambda x: x if len(x) == 4 else {"digits": x},
    ],
    ids=["other keys", "other lengths", "lists", "empty", "other kinds"],
)
def test_outputs_of_different_forms_are_one_item_a_batch(forward: Callable[[Tensor], Any]) -> None:
    handler = Predictions()
    predictor(None, handler, forward=lambda engine, batch: forward(batch[0])).run(batches())
    assert [type(one) for one in handler.outputs] == [type(forward(inputs)) for inputs, _ in batches()]


def test_outputs_of_other_classes_are_kept_as_they_were() -> None:
    static, names = torch.zeros(2), np.array(["a"])

    def forward(engine: Engine, batch: int) -> SimpleNamespace:
        names[0] = str(batch)
        return SimpleNamespace(x=static.fill_(batch), names=names)

    engine = Engine(Update.prediction(forward))
    engine.attach(predictions := Predictions())
    engine.run([1, 2])
    assert predictions.outputs["x"].tolist() == [1, 1, 2, 2]
    assert [one.tolist() for one in predictions.outputs["names"]] == [["1"], ["2"]]


def test_outputs_that_are_dataclasses_are_written_in_a_form_that_loads_safely(tmp_path: Path) -> None:
    handler = Predictions(tmp_path)
    predictor(None, handler, forward=lambda engine, batch: Output(batch[0], "text")).run(batches())
    output = torch.load(handler.files[0], weights_only=True)["outputs"]
    assert torch.equal(output["logits"], batches()[0][0])
    assert output["label"] == "text"


def test_outputs_of_numpys_types_are_written_as_tensors_and_numbers(tmp_path: Path) -> None:
    handler = Predictions(tmp_path)
    scores = np.ones((2, 3))
    predictor(None, handler, forward=lambda engine, batch: [scores, np.float32(0.5)]).run(batches())
    array, number = torch.load(handler.files[0], weights_only=True)["outputs"]
    assert torch.equal(array, torch.ones(2, 3, dtype=torch.float64))
    assert number == 0.5
    with_arrays = Predictions(name="in_memory")
    predictor(None, with_arrays, forward=lambda engine, batch: scores).run(batches())
    assert with_arrays.outputs.shape == (6, 3)


def test_functions_say_where_inputs_and_targets_are() -> None:
    data = [{"x": inputs, "y": targets} for inputs, targets in batches()]
    handler = Predictions(inputs=lambda batch: batch["x"], targets=lambda batch: batch["y"])
    predictor(network(), handler, forward=lambda engine, batch: engine.model(batch["x"])).run(data)
    assert torch.equal(handler.targets, torch.cat([targets for _, targets in batches()]))


def test_every_run_begins_anew_also_inside_a_training() -> None:
    model = network()
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.05))
    evaluator = Engine(update.evaluation(), model=model)
    handler = Predictions()
    evaluator.attach(Metrics(loss=Average()), handler)
    engine = Engine(update, model=model, seed=0)
    engine.attach(Validation(evaluator, batches()))
    engine.run(batches(), max_epochs=3)
    assert torch.equal(handler.outputs, torch.cat(plain_loop_predictions(model)))


def test_a_dry_run_writes_no_file_but_collects_in_memory(tmp_path: Path) -> None:
    written, collected = Predictions(tmp_path / "out", name="written"), Predictions()
    engine = predictor(network(), written, collected, FastDevRun(2))
    engine.run(batches())
    assert list(tmp_path.iterdir()) == []
    assert collected.outputs.shape == (8, 2)
    assert written.enabled


def test_what_was_not_collected_is_an_error_that_says_what_to_do() -> None:
    handler = Predictions()
    with pytest.raises(RuntimeError, match=r"no outputs were collected; run the engine"):
        _ = handler.outputs
    predictor(network(), handler).run(batches())
    with pytest.raises(RuntimeError, match=r"no targets were collected; pass targets=True"):
        _ = handler.targets


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Predictions\(inputs=3\.5\)"):
        Predictions(inputs=3.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Predictions\(folder=3\): expected a path"):
        Predictions(3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"Predictions\(folder="):
        Predictions(tmp_path / "file")
    trainer = Engine(Update.supervised(nn.functional.mse_loss, torch.optim.SGD), model=network())
    with pytest.raises(ValueError, match=r"'predictions': this engine is for training"):
        trainer.attach(Predictions())
    with pytest.raises(ValueError, match=r"single function"):
        Engine(Update.from_function(lambda engine, batch: None)).attach(Predictions())
    two = Engine([Update.prediction(name="a"), Update.prediction(name="b")], model=network())
    with pytest.raises(ValueError, match=r"several updates \(a, b\)"):
        two.attach(Predictions())
    two.attach(Predictions(update="b"))
    two.run(batches())


@pytest.mark.moderate
def test_it_keeps_its_promises(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "out"):
        check_handler(
            lambda: predictor(network()),
            lambda folder=folder: Predictions(folder, inputs=True),  # type: ignore[misc]
            batches(),
            per_run=["files", "_collected", "_iterations", "_number"],
            changes_training=False,
            max_epochs=2,
        )


def test_it_sees_what_others_made_of_the_output() -> None:
    handler = Predictions()
    engine = predictor(network(), handler)

    @engine.on(Events.FORWARD_COMPLETED)
    def classify(engine: Engine) -> None:
        engine.state.update.output = engine.state.update.output.argmax(1)

    engine.run(batches())
    assert handler.outputs.dtype == torch.int64
    assert handler.outputs.shape == (11,)


def test_outputs_of_shuffled_data_are_reported_unless_something_identifies_them() -> None:
    dataset = TensorDataset(torch.ones(8, 5), torch.ones(8, 1))
    for data, handler, reported in (
        (DataLoader(dataset, shuffle=True), Predictions(), True),
        (DataLoader(dataset, sampler=DistributedSampler(dataset, 1, 0)), Predictions(), True),
        (DataLoader(dataset, sampler=DistributedSampler(dataset, 1, 0, shuffle=False)), Predictions(), False),
        (DataLoader(dataset, shuffle=True), Predictions(inputs=True), False),
        (DataLoader(dataset), Predictions(), False),
    ):
        engine = predictor(network(), handler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.run(data)
        assert [str(one.message)[:3] for one in caught] == (["W54"] if reported else [])
