"""Export against files of the weights that were recorded during the run: of the end, of the best epoch, of averages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Phase
from signalfire.checkpoints import Files
from signalfire.handlers import EMA, SWA, Checkpoint, EarlyStopping, Export, FastDevRun, FullyShardedDataParallel
from tests.kit import batches, build, mlp, needs
from tests.processes import assert_alike, run_together

needs("safetensors", "safetensors")

from safetensors.torch import load_file  # noqa: E402

SCORES = [0.5, 0.7, 0.7, 0.2, 0.9, 0.1]
"""Of which the second, and then the fifth, is the best so far."""


def scored(
    *handlers: Any, scores: Sequence[float] = SCORES, model: nn.Module | None = None
) -> tuple[Engine, list[Any]]:
    """An engine with a metric of these values, and the weights that it has after each epoch."""
    engine = build(mlp(5, 4, 1) if model is None else model, *handlers)
    weights: list[Any] = []

    def score(engine: Engine) -> None:
        engine.state.metrics["score"] = scores[engine.state.epoch - 1]
        weights.append({key: value.detach().clone() for key, value in engine.modules["model"].state_dict().items()})

    engine.connect(Events.STARTED, lambda engine: engine.state.metrics.announce("user", ["score"]), phase=Phase.PREPARE)
    engine.connect(Events.EPOCH_COMPLETED, score)
    return engine, weights


def holds(path: Path, expected: dict[str, Tensor]) -> bool:
    found = load_file(path)
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_weights_of_the_end_are_written_also_after_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.safetensors"
    engine, weights = scored(Export(path))
    engine.run(batches(3), max_epochs=2)
    assert holds(path, weights[1])
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.terminate("enough"))
    engine.run(batches(3), max_epochs=5)
    assert len(weights) == 3
    assert holds(path, weights[2])
    assert engine.find(Export).written == 2


def test_after_an_error_the_end_is_not_written_but_what_an_interval_wrote_stays(tmp_path: Path) -> None:
    engine, weights = scored(
        Export(tmp_path / "end.safetensors"), Export(tmp_path / "x.safetensors", every="1ep", name="each")
    )

    def fail(engine: Engine) -> None:
        raise RuntimeError("meant")

    engine.connect(Events.EPOCH_STARTED(once=3), fail)
    with pytest.raises(RuntimeError, match="meant"):
        engine.run(batches(3), max_epochs=5)
    assert not (tmp_path / "end.safetensors").exists()
    assert holds(tmp_path / "x.safetensors", weights[1])


def test_the_weights_of_the_best_value_are_written_of_equal_ones_the_first(tmp_path: Path) -> None:
    for epochs, best in ((4, 1), (6, 4)):
        engine, weights = scored(Export(tmp_path / "x.safetensors", at="best", monitor="score", mode="max"))
        engine.run(batches(3), max_epochs=epochs)
        assert holds(tmp_path / "x.safetensors", weights[best])
        assert engine.find(Export).best == SCORES[best]


@pytest.mark.parametrize("monitors", [True, False], ids=["given", "found"])
def test_a_resumed_run_knows_the_best_value(monitors: bool, tmp_path: Path) -> None:
    def handlers() -> list[Any]:
        given: Any = {"monitor": "score", "mode": "max"} if monitors else {}
        stopping = EarlyStopping("score", mode="max", patience=9)
        return [
            Export(tmp_path / "x.safetensors", at="best", **given),
            Checkpoint(tmp_path / "run", resume=True),
            stopping,
        ]

    engine, weights = scored(*handlers())
    engine.run(batches(3), max_epochs=2)
    assert holds(tmp_path / "x.safetensors", weights[1])
    engine, later = scored(*handlers())
    engine.run(batches(3), max_epochs=4)
    assert len(later) == 2, "it was resumed"
    assert engine.find(Export).written == 0
    assert holds(tmp_path / "x.safetensors", weights[1])
    engine.run(batches(3), max_epochs=5)
    assert holds(tmp_path / "x.safetensors", later[2])


def test_the_metric_has_to_be_known(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(
        ValueError, match=r"needs exactly one monitored metric, but the other handlers monitor no metric; pass the name"
    ):
        scored(Export(path, at="best"))[0].run(batches(3), max_epochs=2)
    two = [EarlyStopping("score", mode="max"), EarlyStopping("loss", mode="min", name="other")]
    with pytest.raises(ValueError, match=r"other handlers monitor 'score' and 'loss'"):
        scored(Export(path, at="best"), *two)[0].run(batches(3), max_epochs=2)
    with pytest.raises(KeyError, match=r"Export monitors 'scroe'"):
        scored(Export(path, at="best", monitor="scroe", mode="max"))[0].run(batches(3), max_epochs=2)


def test_averages_are_written_and_two_kinds_are_told_apart_before_the_first_batch(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    engine, weights = scored(Export(path, at="best", monitor="score", mode="max"), EMA(0.5))
    averages: list[Any] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: averages.append(engine.weights()["model"]))
    engine.run(batches(3), max_epochs=3)
    assert holds(path, averages[1])
    assert not holds(path, weights[1])
    engine, weights = scored(Export(path), EMA(0.5), SWA(1, bn_batches=0, evaluate=False))
    with pytest.raises(ValueError, match=r"'export': several handlers .*: 'ema', 'swa'; .*average='ema'"):
        engine.run(batches(3), max_epochs=2)
    assert engine.state.iteration == 0
    engine, weights = scored(Export(path, average=False), EMA(0.5), SWA(1, bn_batches=0, evaluate=False))
    engine.run(batches(3), max_epochs=2)
    assert holds(path, weights[1])


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    engine, _ = scored(Export(tmp_path / "x.safetensors"), FastDevRun(2))
    engine.run(batches(3), max_epochs=2)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_cannot_be_written_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Files):
        def sync(self, path: Path) -> None:
            raise OSError("no space left")

    monkeypatch.setattr(Export, "files", Full())
    engine, _ = scored(Export(tmp_path / "x.safetensors"))
    with pytest.raises(OSError, match="no space left"):
        engine.run(batches(3), max_epochs=1)
    assert list(tmp_path.iterdir()) == []


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output * 2 if output.sum() > 0 else output


@pytest.mark.slow
def test_a_program_is_exported_with_the_current_batch_as_the_example(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    engine, weights = scored(Export(tmp_path / "x.pt2", at="best", monitor="score", mode="max"), model=model)
    engine.run(batches(3), max_epochs=3)
    program = torch.export.load(tmp_path / "x.pt2").module()
    model.load_state_dict(weights[1])
    x = torch.randn(9, 5)
    assert torch.equal(program(x), model.eval()(x))


@pytest.mark.slow
@pytest.mark.parametrize("example", [None, (torch.ones(2, 5),)], ids=["batch", "given"])
def test_training_ends_well_if_the_model_cannot_be_exported(example: Any, tmp_path: Path) -> None:
    engine, weights = scored(Export(tmp_path / "x.pt2", example=example), model=Branching())
    with pytest.warns(
        RuntimeWarning, match=r"export: the program was not exported: .*Branching cannot be exported.*sum\(\) > 0"
    ):
        state = engine.run(batches(3), max_epochs=2)
    assert state.epoch == len(weights) == 2
    assert "data-dependent" in str(engine.find(Export).error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"path": "model.pt"},
            r"Export\(path='model.pt'\): expected a name that ends in '.safetensors' for weights, or",
        ),
        ({"path": ""}, r"Export\(path=''\)"),
        ({"at": "last"}, r"Export\(at='last'\): expected 'end' or 'best'"),
        ({"at": "best", "every": "1ep"}, r"Export\(every='1ep', at=\"best\"\): .* omit every="),
        ({"monitor": "loss"}, r"Export\(monitor='loss'\): monitor= applies only with at=\"best\"; add at=\"best\""),
        ({"example": torch.ones(2)}, r"Export\(example=.*for other paths, omit example="),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Export(**{"path": "x.safetensors", **options})


def export_of_ranks(folder: Path) -> dict[str, Tensor]:
    path = folder / "x.safetensors"
    engine, _ = scored(FullyShardedDataParallel(), EMA(0.5), Export(path, at="best", monitor="score", mode="max"))
    engine.run(batches(4), max_epochs=3)
    if os.environ["RANK"] == "1":
        assert engine.find(Export).written == 2
    return dict(load_file(path))


@pytest.mark.slow
def test_sharded_averages_are_written_whole_by_rank_zero(tmp_path: Path) -> None:
    found = assert_alike(run_together(export_of_ranks, 2, tmp_path))
    model = mlp(5, 4, 1)
    model.load_state_dict(found)
