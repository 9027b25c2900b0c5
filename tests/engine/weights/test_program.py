"""Exported programs against the model in eval mode, on batches of any size, after they were read back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from signalfire import Engine, Update
from signalfire.authoring.randomness import random_state
from signalfire.checkpoints import Files
from signalfire.handlers import EMA
from signalfire.weights import export_program
from tests.kit import batches, build, digest

pytestmark = pytest.mark.slow


def network() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))
    model(torch.randn(6, 5))
    return model


def idle(model: nn.Module) -> Engine:
    return Engine(Update.prediction(), model=model, seed=0)


def samples(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


def compiled(model: nn.Sequential) -> Any:
    return torch.compile(model, backend="eager")


def checkpointed(model: nn.Sequential) -> nn.Module:
    forward = model[0].forward
    model[0].forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    return model


FORMS: dict[str, Any] = {"plain": lambda model: model, "compiled": compiled, "checkpointed": checkpointed}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_the_program_gives_what_the_model_gives_bit_for_bit(form: str, count: int, tmp_path: Path) -> None:
    if form != "plain" and count != 2:
        return
    path = export_program(idle(FORMS[form](network())), tmp_path / "x.pt2", samples(count, 5))
    program, model = torch.export.load(path).module(), network().eval()
    for size in (1, 2, 7, 64):
        assert torch.equal(program(samples(size, 5)), model(samples(size, 5)))


def test_all_is_as_before_and_averages_are_in_the_program(tmp_path: Path) -> None:
    model = network()
    engine = build(model, EMA(0.5), loss=lambda output, target: (output - target).square().mean())
    engine.run(batches(4), max_epochs=1)
    model[1].eval()
    hook = model[0].register_forward_hook(lambda module, inputs, output: None)
    modes = [part.training for part in model.modules()]
    before = digest((model.state_dict(), random_state()))
    program = torch.export.load(export_program(engine, tmp_path / "x.pt2", samples(4, 5))).module()
    assert digest((model.state_dict(), random_state())) == before
    assert [part.training for part in model.modules()] == modes
    assert list(model[0]._forward_hooks) == [hook.id]
    assert all(parameter.requires_grad for parameter in model.parameters())
    averaged = network()
    averaged.load_state_dict(engine.weights()["model"])
    assert torch.equal(program(samples(3, 5)), averaged.eval()(samples(3, 5)))
    assert not torch.equal(program(samples(3, 5)), model.eval()(samples(3, 5)))


class Several(nn.Module):
    """Of two inputs, one of which is no batch, and a mapping of outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(5, 2)

    def forward(
        self, x: Tensor, weight: Tensor, *, scale: float = 1.0, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        y = self.linear(x) * weight * scale
        return {"scores": y if mask is None else y * mask[:, None], "inputs": x}


@pytest.mark.parametrize(
    "example", [(samples(4, 5), torch.ones(2)), {"x": samples(4, 5), "weight": torch.ones(2), "scale": 2.0, "mask": samples(4)}]
)  # fmt: skip
def test_arguments_may_be_several_and_named(example: Any, tmp_path: Path) -> None:
    program = torch.export.load(export_program(idle(Several()), tmp_path / "x.pt2", example)).module()
    args: Any = (samples(9, 5), torch.ones(2)) if isinstance(example, tuple) else ()
    named: Any = {} if args else {"x": samples(9, 5), "weight": torch.ones(2), "scale": 2.0, "mask": samples(9)}
    with torch.no_grad():
        assert digest(program(*args, **named)) == digest(Several()(*args, **named))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # on data
            return x * 2
        return x


class FixedSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, -1).relu()


class Pairs(nn.Module):
    """Takes at least two samples, which its program does not check."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and len(x) < 2:
            raise ValueError("two samples at least")
        return x - x.mean(0)


class Counting(nn.Module):
    """Something else each time, which a program cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return x + next(self.calls)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branching(), r"Branching cannot be exported: .*data-dependent.*test_program.py:\d+: if x.sum\(\) > 0"),
        (FixedSize(), r"FixedSize cannot be exported: Constraints violated \(batch\)"),
        (
            Pairs(),
            r"for a batch of 1 samples: two samples at least. Every tensor in the example whose first dimension is 4",
        ),
        (
            Counting(),
            r"for a batch of 1 samples, the output of the exported program of Counting differs from that of the model",
        ),
    ],
    ids=["branch", "fixed size", "too few", "other output"],
)
def test_what_cannot_be_exported_is_named_and_the_old_file_stays(
    model: nn.Module, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt2"
    path.write_bytes(b"old")
    model.train()
    with pytest.raises(ValueError, match=message):
        export_program(idle(model), path, samples(4, 8))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    assert model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x.pt"}, r"export_program\(path='x.pt'\): expected a file name that ends with '.pt2' or '.onnx'"),
        ({"example": 3}, r"export_program\(example=...\): expected a model input .* got a int with 0 tensors"),
        ({"example": torch.ones(0, 5)}, r"at least one sample"),
        ({"sizes": [0]}, r"export_program\(sizes=0\)"),
        ({"model": "other"}, r"export_program\(model='other'\): the engine has no such model"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        export_program(idle(network()), **{"path": "x.pt2", "example": samples(2, 5), **options})


def test_one_of_several_models_is_named(tmp_path: Path) -> None:
    engine = Engine(Update.prediction(), model={"one": network(), "two": nn.Linear(5, 3)})
    with pytest.raises(ValueError, match=r"the engine has several models: \['one', 'two'\]; choose one"):
        export_program(engine, tmp_path / "x.pt2", samples(2, 5))
    path = export_program(engine, tmp_path / "x.pt2", samples(2, 5), model="two")
    assert torch.export.load(path).module()(samples(4, 5)).shape == (4, 3)


class Truncating(Files):
    def sync(self, path: Path) -> None:
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-100])


def test_a_file_that_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        export_program(idle(network()), tmp_path / "x.pt2", samples(2, 5), files=Truncating())
    assert "is unchanged" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []
