"""Programs for ONNX Runtime against the model in eval mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Update
from signalfire.handlers import EMA, Export
from signalfire.weights import export_program
from tests.engine.weights.test_program import Branching, Several, idle, network, samples
from tests.kit import batches, build, needs

pytestmark = pytest.mark.slow

needs("onnx", "onnx", "onnxscript", "onnxruntime")

import onnxruntime  # noqa: E402


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    feeds = {name: one.numpy() for name, one in zip(names, inputs, strict=True)}
    return [torch.from_numpy(one) for one in session.run(None, feeds)]


def test_the_program_gives_what_the_model_gives_for_any_number_of_samples(tmp_path: Path) -> None:
    path = export_program(idle(network()), tmp_path / "x.onnx", samples(4, 5))
    model = network().eval()
    for size in (1, 2, 7, 64):
        (found,) = run(path, samples(size, 5))
        torch.testing.assert_close(found, model(samples(size, 5)))
    assert [one.name for one in tmp_path.iterdir()] == ["x.onnx"]


@pytest.mark.parametrize("named", [False, True])
def test_inputs_and_outputs_are_in_their_order(named: bool, tmp_path: Path) -> None:
    example: Any = (samples(4, 5), torch.ones(2))
    if named:
        example = {"x": samples(4, 5), "weight": torch.ones(2), "scale": 2.0, "mask": samples(4)}
    path = export_program(idle(Several()), tmp_path / "x.onnx", example)
    weight, mask = torch.tensor([2.0, 3.0]), samples(9)
    found = run(path, samples(9, 5), weight, *([mask] if named else []))
    expected = Several()(samples(9, 5), weight, **({"scale": 2.0, "mask": mask} if named else {}))
    for one, other in zip(found, expected.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_handler_writes_averages_at_the_end(tmp_path: Path) -> None:
    model = network()
    engine = build(
        model, EMA(0.5), Export(tmp_path / "x.onnx"), loss=lambda output, target: (output - target).square().mean()
    )
    engine.run(batches(4), max_epochs=1)
    averaged = network()
    averaged.load_state_dict(engine.weights()["model"])
    (found,) = run(tmp_path / "x.onnx", samples(3, 5))
    torch.testing.assert_close(found, averaged.eval()(samples(3, 5)))
    assert not torch.allclose(found, model.eval()(samples(3, 5)))


class Unused(nn.Module):
    """Of an input that does nothing, of which a program would not know."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2


class Complex(nn.Module):
    """An operation that ONNX lacks."""

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = torch.linalg.eigvals(x @ x.mT).real
        return values


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (Branching(), samples(4, 5), "Branching cannot be exported: .*data-dependent"),
        (Complex(), samples(4, 5, 5), "Complex cannot be exported"),
    ],
)
def test_what_cannot_be_written_is_an_error_and_leaves_the_old_file(
    model: nn.Module, example: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=message):
        export_program(Engine(Update.prediction(), model=model), path, example)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_input_that_does_nothing_may_be_left_in(tmp_path: Path) -> None:
    path = export_program(idle(Unused()), tmp_path / "x.onnx", (samples(4, 5), samples(4, 3)))
    (found,) = run(path, samples(6, 5), samples(6, 3))
    assert torch.equal(found, samples(6, 5) * 2)
