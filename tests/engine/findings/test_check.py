"""Checking a composition before it runs: what is found, when it is reported, and that it leaves no trace."""

from __future__ import annotations

import copy
import io
import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, Finding, FindingWarning, Handler, Phase, Update
from signalfire.authoring.randomness import random_state
from signalfire.findings import finding
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    FastDevRun,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    Metrics,
    MixUp,
    ProgressBar,
    Validation,
)
from tests.kit import assert_same, batches, build, digest, evaluator_of, mlp


class Drawing(Dataset[Any]):
    """Samples with noise of every generator that there is; counts what is read."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)
        self.read: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        noise = random.random() + float(np.random.rand()) + float(self.own.random()) + float(torch.rand(()))
        return torch.full((5,), noise), torch.zeros(1)


def rich(folder: Path) -> tuple[Engine, DataLoader[Any], Drawing]:
    """A composition with much to read: BatchNorm, dropout, schedule, averages, files; data that draws."""
    model = mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.5))
    drawing = Drawing()
    data = DataLoader(drawing, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    engine = build(
        model,
        GradientAccumulation(2),
        GradientClipping(max_norm=1.0),
        EMA(0.5),
        LRScheduling(partial(CosineAnnealingLR)),
        Validation(evaluator_of(model), batches(2, seed=1)),
        EarlyStopping("loss", mode="min", patience=9),
        CSVLogger(folder / "log.csv"),
        Checkpoint(folder / "run"),
    )
    return engine, data, drawing


def test_nothing_is_changed(tmp_path: Path) -> None:
    engine, data, drawing = rich(tmp_path)
    engine.model[0].eval()
    weights, modes = copy.deepcopy(engine.model.state_dict()), [part.training for part in engine.model.modules()]
    state, randoms = copy.deepcopy(engine.state_dict()), digest(random_state())
    bounds = {name: getattr(engine.state, name) for name in ("max_epochs", "max_iters", "max_steps", "epoch_length")}
    order, own = data.generator.get_state().clone(), copy.deepcopy(drawing.own.bit_generator.state)
    wiring = str(engine)
    for _ in range(2):
        engine.check(data, max_epochs=3)
    assert digest(random_state()) == randoms
    assert torch.equal(data.generator.get_state(), order)
    assert drawing.own.bit_generator.state == own
    assert digest(engine.state_dict()) == digest(state)
    assert_same(engine.model.state_dict(), weights)
    assert [part.training for part in engine.model.modules()] == modes
    assert {name: getattr(engine.state, name) for name in bounds} == bounds
    assert engine.updates[0].optimizer is None
    assert str(engine) == wiring
    assert not list(tmp_path.iterdir())


@pytest.mark.moderate
def test_a_run_after_a_check_is_the_run_without_it(tmp_path: Path) -> None:
    weights = []
    for checked in (False, True):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        engine, data, _ = rich(tmp_path / str(checked))
        if checked:
            engine.check(data, max_epochs=2)
        engine.run(data, max_epochs=2, check=checked)
        weights.append(engine.model)
    assert_same(*weights)


def test_one_batch_at_most_is_read(tmp_path: Path) -> None:
    engine, data, drawing = rich(tmp_path)
    engine.check(data, max_epochs=3)
    assert len(drawing.read) == 4
    engine.check()
    assert len(drawing.read) == 4


def test_the_start_of_a_run_reads_no_batch_ahead(tmp_path: Path) -> None:
    engine, data, drawing = rich(tmp_path)
    read: list[int] = []
    engine.connect(Events.EPOCH_STARTED, lambda engine: read.append(len(drawing.read)))
    engine.run(data, max_epochs=1)
    assert read == [0]


def once_read() -> Iterator[Any]:
    raise AssertionError("it was read")
    yield


def test_an_iterator_is_not_read() -> None:
    assert not build(mlp(5, 8, 1)).check(once_read(), max_epochs=1)


def test_a_check_of_a_good_composition_finds_nothing(tmp_path: Path) -> None:
    engine, data, _ = rich(tmp_path)
    found = engine.check(data, max_epochs=30)
    assert not found, str(found)
    engine.run(data, max_epochs=1)


def doubtful() -> Engine:
    return build(mlp(5, 8, 1), EMA(0.5, start=1000), Metrics(loss=Average()))


def test_what_is_found_is_a_table_and_json() -> None:
    found = doubtful().check(batches(), max_epochs=2)
    assert str(found).splitlines()[-2:] == [
        "C18  warning  'ema' starts averaging after 1000 optimizer steps, but the run takes only 12 [ema]",
        "              -> start earlier, train longer, or continue the training in a later run()",
    ]
    assert {one["code"] for one in json.loads(found.json())} == {"C02", "C18"}


def test_the_first_run_reports_warnings_once_and_keeps_the_rest() -> None:
    engine = doubtful()
    with pytest.warns(FindingWarning, match="C18") as caught:
        engine.run(batches(), max_epochs=1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert {one.code for one in engine.findings.of_run()} == {"C02", "C18"}
    engine.run(batches(), max_epochs=2)


def test_a_run_without_the_check_reports_nothing() -> None:
    engine = doubtful()
    engine.run(batches(), max_epochs=1, check=False)
    assert not engine.findings.of_run()


def test_a_code_is_silenced_in_check_and_in_run() -> None:
    model = mlp(5, 8, 1)
    engine = build(model, EMA(0.5, start=1000), allow=["C18"])
    assert not engine.check(batches(), max_epochs=2)
    engine.run(batches(), max_epochs=2)


def test_an_evaluator_is_checked_once_however_often_it_runs() -> None:
    model = mlp(5, 8, 1)
    checked: list[str] = []

    class Asked(Handler):
        def findings(self, engine: Engine) -> list[Finding]:
            checked.append("asked")
            return []

    evaluator = evaluator_of(model)
    evaluator.attach(Asked())
    build(model, Validation(evaluator, batches(2, seed=1), every="1it")).run(batches(), max_epochs=2)
    assert checked == ["asked"]


def test_a_handler_adds_findings_of_its_own() -> None:
    class Hungry(Handler):
        def findings(self, engine: Engine) -> list[Finding]:
            return [finding("C17", f"{self.name!r} needs {engine.state.max_epochs} meals", "cook", [self.name])]

    engine = build(mlp(5, 8, 1), Hungry())
    found = engine.check(batches(), max_epochs=3)
    assert [one.sentence for one in found] == ["'hungry' needs 3 meals"]
    with engine.without("hungry"):
        assert not engine.check(batches(), max_epochs=3)


def test_a_check_inside_a_run_is_refused() -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.check())
    with pytest.raises(RuntimeError, match=r"check\(\) was called during a run; call it before"):
        engine.run(batches(), max_epochs=1)


def test_a_dry_run_of_a_few_batches_is_not_measured_by_its_length() -> None:
    model = mlp(5, 8, 1)
    handlers = (
        Validation(evaluator_of(model), batches(2, seed=1), every="5ep"),
        EMA(0.5, start=100),
        GradientAccumulation(4),
    )
    engine = build(model, *handlers, FastDevRun(1))
    assert not engine.check(batches(), max_epochs=100).at_least("warning")
    engine.run(batches(), max_epochs=100)


def test_without_bounds_nothing_is_said_of_the_length(tmp_path: Path) -> None:
    engine = build(mlp(5, 8, 1), EMA(0.5, start=1000), Checkpoint(tmp_path, every="10ep"))
    assert not engine.check(batches())
    assert {one.code for one in engine.check(batches(), max_iters=50)} == {"C17", "C18"}


def test_the_check_at_the_start_of_a_run_makes_few_calls(tmp_path: Path) -> None:
    engine, data, _ = rich(tmp_path)
    engine.attach(MixUp(), ProgressBar(file=io.StringIO()))
    calls: list[int] = []

    def begin(engine: Engine) -> None:
        sys.setprofile(lambda frame, event, argument: calls.append(1) if event == "call" else None)

    def end(engine: Engine) -> None:
        sys.setprofile(None)

    engine.connect(Events.STARTED, begin, phase=Phase.PERSIST, rank=10**9)
    engine.connect(Events.EPOCH_STARTED, end, phase=Phase.PREPARE, rank=-(10**9))
    engine.run(data, max_epochs=1)
    assert len(calls) < 4000, "about 1 ms"


def test_a_loader_that_fails_says_that_the_first_batch_was_read() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            raise OSError("no such picture")

    with pytest.raises(OSError, match="no such picture") as caught:
        build(mlp(5, 8, 1)).check(DataLoader(Broken(), 4, shuffle=True))
    assert caught.value.__notes__ == ["check() read the first batch of the data, as a run would"]


def test_a_composition_of_users_functions_is_left_alone() -> None:
    model = mlp(5, 8, 1)

    def function(engine: Engine, batch: Any) -> Any:
        engine.state.metrics["score"] = 1.0
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    engine = Engine(Update.from_function(function, partial(torch.optim.SGD, lr=0.1)), model=model)
    engine.attach(EarlyStopping("score", mode="max", patience=2))
    assert [one.severity for one in engine.check(batches(), max_epochs=9)] == ["info"]
    engine.run(batches(), max_epochs=1)
