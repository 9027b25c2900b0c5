"""Checkpoint: which files are kept, that each continues the run bit for bit, and that none is ever half written."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Phase, Update, on, seed_everything
from signalfire.checkpoints import Content, Files
from signalfire.handlers import (
    EMA,
    Accuracy,
    Average,
    Checkpoint,
    CSVLogger,
    DistributedDataParallel,
    EarlyStopping,
    Export,
    GradientAccumulation,
    History,
    LRScheduling,
    Metrics,
    Validation,
)
from signalfire.testing import fingerprint
from tests.kit import LIMIT, batches, build, content_of, evaluator_of, linear, mlp, quick, spread
from tests.processes import run_together


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 3))


def dataset(count: int = 44) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def engine_of(*handlers: Any) -> Engine:
    return build(network(), *handlers, loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.Adam, lr=0.02))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def scored(folder: Path, scores: Sequence[float], **options: Any) -> tuple[Engine, Checkpoint]:
    """A run that produced one of these scores in each epoch, of two iterations."""
    handler = Checkpoint(folder, monitor="score", **{"mode": "min", **options})
    engine = engine_of(handler)

    @engine.on(Events.EPOCH_COMPLETED)
    def score(engine: Engine) -> None:
        engine.state.metrics["score"] = scores[engine.state.epoch - 1]

    engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=len(scores))
    return engine, handler


# ---- which files are kept ---------------------------------------------------------------------------------------------


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path / "made" / "here", keep=2)
    engine_of(handler).run(list(DataLoader(dataset(), batch_size=22)), max_epochs=5)
    expected = ["checkpoint-epoch0004-iter00000008", "checkpoint-epoch0005-iter00000010"]
    assert files(tmp_path / "made" / "here") == expected
    assert [name for name, _ in handler.kept] == expected


def test_two_last_ones_or_one_best_are_kept_by_default(tmp_path: Path) -> None:
    engine_of(Checkpoint(tmp_path, name="last")).run(list(DataLoader(dataset(), batch_size=22)), max_epochs=3)
    assert files(tmp_path) == ["last-epoch0002-iter00000004", "last-epoch0003-iter00000006"]
    scored(tmp_path / "best", [2.0, 1.0, 3.0])
    assert files(tmp_path / "best") == ["checkpoint-epoch0002-iter00000004"]


@pytest.mark.parametrize(
    ("every", "iterations"), [("3it", [3, 6, 9]), ("2ep", [8]), ("4st", [8]), (Events.EPOCH_COMPLETED(once=1), [4])]
)
def test_the_interval_says_when(tmp_path: Path, every: Any, iterations: list[int]) -> None:
    engine = engine_of(Checkpoint(tmp_path, every=every, keep=9), GradientAccumulation(2))
    engine.run(list(DataLoader(dataset(), batch_size=11)), max_iters=9)
    assert [int(name[-8:]) for name in files(tmp_path)] == iterations


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("min", [(4, 1.0), (6, 2.0)]), ("max", [(1, 5.0), (5, 4.0)])],
)
def test_the_best_are_kept(tmp_path: Path, mode: Any, expected: list[tuple[int, float]]) -> None:
    _, handler = scored(tmp_path, [5.0, 3.0, 3.5, 1.0, 4.0, 2.0], mode=mode, keep=2)
    assert [(int(name[16:20]), value) for name, value in handler.kept] == expected
    assert files(tmp_path) == sorted(name for name, _ in handler.kept)


def test_it_acts_once_for_each_new_value(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, monitor="score", mode="min", keep=9)
    engine = engine_of(handler)
    engine.connect(Events.EPOCH_COMPLETED(every=2), lambda engine: engine.state.metrics.update(score=1.0))
    engine.state.metrics["score"] = 3.0
    engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=5)
    assert [int(name[16:20]) for name in files(tmp_path)] == [1, 2, 4]


@pytest.mark.filterwarnings("ignore:C01:signalfire.FindingWarning")
def test_a_missing_metric_is_an_error_that_names_those_there_are(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, monitor="acuracy"), Metrics(accuracy=Accuracy()))
    with pytest.raises(KeyError, match=r"Checkpoint.*'acuracy'.*did you mean 'accuracy'"):
        engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=2)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-epoch0099-iter00000099").write_text("of an earlier run")
    engine_of(Checkpoint(tmp_path, keep=1)).run(list(DataLoader(dataset(), batch_size=22)), max_epochs=2)
    assert files(tmp_path) == [
        "checkpoint-epoch0002-iter00000004",
        "checkpoint-epoch0099-iter00000099",
        "notes.txt",
    ]


# ---- what is in them --------------------------------------------------------------------------------------------------


def full_engine(folder: Path, keep: int) -> tuple[Engine, History]:
    """Everything that has a state: a schedule, patience, windows, metrics, validation with a model that is shared."""
    engine = engine_of(
        GradientAccumulation(3),
        LRScheduling(partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1)),
        EarlyStopping("loss", patience=50),
        Metrics(train_loss=Average(), train_accuracy=Accuracy()),
    )
    evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=engine.modules)
    evaluator.model = engine.model
    evaluator.attach(Metrics(loss=Average()))
    history = History()
    engine.attach(
        Validation(evaluator, list(DataLoader(dataset(20), batch_size=8)), every="5it"),
        history,
        Checkpoint(folder, every="7it", keep=keep),
        Checkpoint(folder, every="1ep", keep=keep, name="epochs"),
        Checkpoint(folder, monitor="loss", keep=2, name="best"),
    )
    return engine, history


def loader(own_generator: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5) if own_generator else None
    return DataLoader(dataset(), batch_size=4, shuffle=True, generator=generator)  # 11 batches


@pytest.mark.moderate
@pytest.mark.parametrize("own_generator", quick([False, True], True), ids=["global random state", "own generator"])
def test_every_file_continues_the_run_bit_for_bit(tmp_path: Path, own_generator: bool) -> None:
    seed_everything(1)
    whole, history = full_engine(tmp_path / "whole", keep=99)
    whole.run(loader(own_generator), max_epochs=3)
    next_draw = torch.rand(5)
    kept = whole.handlers["best"].state_dict()["kept"]
    written = [path for path in sorted((tmp_path / "whole").iterdir()) if not path.name.startswith("best")]
    # 7, 14, 21 and 28 are inside of epochs of 11, and all but 14 and 28 inside of windows.
    assert [int(path.name[-8:]) for path in written] == [7, 14, 21, 28, 11, 22, 33]
    for number, path in enumerate(written[:-1]):
        state = torch.load(path / "state.pt", weights_only=True)
        seed_everything(1000 + number)  # whatever the new process would have drawn
        other, other_history = full_engine(tmp_path / f"other{number}", keep=99)
        other.load_state_dict(state)
        other.run(loader(own_generator), max_epochs=3)
        for (name, a), b in zip(whole.model.state_dict().items(), other.model.state_dict().values(), strict=True):
            assert torch.equal(a, b), f"{path.name}: {name}"
        assert other_history.records == history.records, path.name
        assert other.updates[0].steps == whole.updates[0].steps
        assert other.handlers["best"].state_dict()["kept"] == kept
        assert torch.equal(torch.rand(5), next_draw)


@pytest.mark.moderate
def test_a_finished_run_is_continued_with_larger_bounds_from_its_file(tmp_path: Path) -> None:
    def build(folder: Path) -> Engine:
        return engine_of(Checkpoint(folder), GradientAccumulation(3))

    seed_everything(1)
    whole = build(tmp_path / "whole")
    whole.run(loader(False), max_epochs=4)
    seed_everything(1)
    first = build(tmp_path / "first")
    first.run(loader(False), max_epochs=2)
    seed_everything(77)
    second = build(tmp_path / "second")
    second.load_state_dict(Checkpoint.load(tmp_path / "first" / "checkpoint-epoch0002-iter00000022"))
    second.run(loader(False), max_epochs=4)
    for a, b in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_file_is_read_back_without_running_code(tmp_path: Path) -> None:
    engine, _ = full_engine(tmp_path, keep=1)
    engine.run(loader(False), max_epochs=1)
    path = tmp_path / "epochs-epoch0001-iter00000011"
    with_weights_only, by_load = torch.load(path / "state.pt", weights_only=True), Checkpoint.load(path)
    assert with_weights_only["engine"] == by_load["engine"]
    assert by_load["engine"]["iteration"] == 11
    assert by_load["engine"]["epoch_open"] is False
    assert torch.equal(by_load["modules"]["model"]["0.weight"], engine.model[0].weight)


@pytest.mark.moderate
@pytest.mark.parametrize("checkpoint_first", [True, False])
def test_the_saved_state_sees_what_the_same_epoch_decided(tmp_path: Path, checkpoint_first: bool) -> None:
    deciders: list[Handler] = [
        LRScheduling(partial(torch.optim.lr_scheduler.StepLR, step_size=1), every="1ep"),
        EarlyStopping("train_loss", patience=9, min_delta=1e6),  # nothing improves after the first value
        Metrics(train_loss=Average()),
    ]
    savers: list[Handler] = [
        Checkpoint(tmp_path, keep=9),
        Checkpoint(tmp_path, monitor="train_loss", keep=9, name="best"),
    ]
    engine = engine_of(*(savers + deciders if checkpoint_first else deciders + savers))
    engine.run(loader(False), max_epochs=3)
    for epoch in (1, 2, 3):
        for name in ("checkpoint", "best"):
            state = Checkpoint.load(tmp_path / f"{name}-epoch{epoch:04d}-iter{11 * epoch:08d}")
            handlers = state["handlers"]
            assert handlers["lr_scheduling"]["scheduler"]["last_epoch"] == epoch
            assert handlers["early_stopping"]["waited"] == epoch - 1
            assert len(handlers["checkpoint"]["kept"]) == len(handlers["best"]["kept"]) == epoch
            assert state["updates"]["main"]["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.02 * 0.1**epoch)


class Counted(Handler):
    """Counts how often the whole state is gathered."""

    gathered = 0

    def state_dict(self) -> dict[str, Any]:
        self.gathered += 1
        return {}


@pytest.mark.filterwarnings("ignore:W47")
def test_several_checkpoints_share_one_snapshot_of_an_event(tmp_path: Path) -> None:
    counted = Counted()
    engine = engine_of(
        counted,
        Checkpoint(tmp_path, name="one", every="2it", keep=99),
        Checkpoint(tmp_path, name="two", every="2it", keep=99),
        Checkpoint(tmp_path, name="three", every="4it", keep=99),
    )
    before = counted.gathered
    engine.run(list(DataLoader(dataset(), batch_size=11)), max_epochs=2)
    assert len(files(tmp_path)) == 4 + 4 + 2
    assert counted.gathered - before == 4
    for iteration in (4, 8):
        one, three = (
            Checkpoint.load(next(tmp_path.glob(f"{name}-*-iter{iteration:08d}"))) for name in ("one", "three")
        )
        assert one["engine"] == three["engine"]


class Odd(nn.Module):
    """Weights that are views of something larger, tied, in another order, or repeated."""

    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(100_000)
        self.part = nn.Parameter(whole[:6])
        self.strided = nn.Parameter(whole[10:70:10])
        self.tied = self.part
        self.turned = nn.Parameter(torch.randn(3, 6).t())
        self.register_buffer("spread", torch.ones(1).expand(500))
        self.register_buffer("same", self.turned.detach())

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.part + x * self.strided) @ self.turned + self.tied.sum() + self.spread[:3]


def spelled_out(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: spelled_out(item) for key, item in value.items()}
    return [spelled_out(item) for item in value] if isinstance(value, list | tuple) else value


def test_what_is_written_at_once_is_what_a_copy_of_the_state_is(tmp_path: Path) -> None:
    seed_everything(0)
    update = Update.supervised(nn.functional.cross_entropy, partial(torch.optim.Adam, lr=0.02))
    engine = Engine(update, model=Odd(), seed=0)
    handler = Checkpoint(tmp_path, every="1it", keep=99)
    engine.attach(handler, EMA(0.9), GradientAccumulation(3), Metrics(loss=Average()))
    copies: list[dict[str, Any]] = []
    engine.connect(
        Events.ITERATION_COMPLETED,
        lambda engine: copies.append(engine.snapshots.take()),
        phase=Phase.PERSIST,
        rank=10**6,
    )
    engine.run(list(DataLoader(dataset(), batch_size=11)), max_epochs=1)
    written = sorted(tmp_path.iterdir())
    assert len(copies) == len(written) == 4
    own = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    for path, copy in zip(written, copies, strict=True):
        state = torch.load(path / "state.pt", weights_only=True)
        for each in (state, copy):  # what is kept is known once it is written
            del each["handlers"]["checkpoint"]
        del copy["unsaved"]  # what only this process can use
        assert spelled_out(state) == spelled_out(copy)
        assert (path / "state.pt").stat().st_size < 40_000
        tensors = [
            *copy["modules"]["model"].values(),
            *(g for g in (copy["updates"]["main"]["window"] or {}).get("gradients", [])),
        ]
        assert not own & {tensor.untyped_storage().data_ptr() for tensor in tensors}, "a copy shares nothing"
    assert [copy["updates"]["main"]["window"] is None for copy in copies] == [False, False, True, True]
    one, two = (state["modules"]["model"]["part"] for state in copies[1:3])
    assert not torch.equal(one, two)


def test_a_checkpoint_after_one_that_was_reported_has_the_weights_as_they_are_then(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, name="one"), Checkpoint(tmp_path, name="two"))

    @engine.on(Events.CHECKPOINT_SAVED(once=1))
    def change(engine: Engine) -> None:
        with torch.no_grad():
            engine.model.get_parameter("0.bias").fill_(7)
        engine.state.metrics["changed"] = 1.0

    engine.run(list(DataLoader(dataset(), batch_size=11)), max_epochs=1)
    states = {name: Checkpoint.load(next(tmp_path.glob(f"{name}-*"))) for name in ("one", "two")}
    reported = {
        name: (state["engine"]["metrics"]["values"], state["modules"]["model"]["0.bias"][0])
        for name, state in states.items()
    }
    assert reported["one"] != ({"changed": 1.0}, 7)
    assert reported["two"] == ({"changed": 1.0}, 7), "of one moment"


def test_the_snapshot_of_an_iteration_is_not_taken_for_that_of_the_epoch(tmp_path: Path) -> None:
    engine = engine_of(
        Checkpoint(tmp_path, name="inner", every="4it", keep=9), Checkpoint(tmp_path, name="outer", keep=9)
    )
    engine.run(list(DataLoader(dataset(), batch_size=11)), max_epochs=2)
    inner = Checkpoint.load(tmp_path / "inner-epoch0002-iter00000008")
    outer = Checkpoint.load(tmp_path / "outer-epoch0002-iter00000008")
    assert (inner["engine"]["epoch_open"], outer["engine"]["epoch_open"]) == (True, False)
    # Each iteration's own weights, not those of an earlier snapshot.
    earlier = Checkpoint.load(tmp_path / "inner-epoch0001-iter00000004")
    assert not torch.equal(earlier["modules"]["model"]["0.weight"], inner["modules"]["model"]["0.weight"])
    assert torch.equal(inner["modules"]["model"]["0.weight"], engine.model[0].weight)


@pytest.mark.moderate
def test_checkpoints_do_not_change_the_training(tmp_path: Path) -> None:
    weights = []
    for handlers in ([], [Checkpoint(tmp_path, every="1it", keep=3)]):
        seed_everything(1)
        engine = engine_of(*handlers)
        engine.run(loader(False), max_epochs=2)
        weights.append(engine.model.state_dict())
    for a, b in zip(weights[0].values(), weights[1].values(), strict=True):
        assert torch.equal(a, b)


def test_a_resumed_run_removes_the_files_of_the_run_before_in_turn(tmp_path: Path) -> None:
    data = list(DataLoader(dataset(), batch_size=22))
    engine_of(Checkpoint(tmp_path, keep=2)).run(data, max_epochs=3)
    engine = engine_of(Checkpoint(tmp_path, keep=2))
    engine.load_state_dict(Checkpoint.load(tmp_path / "checkpoint-epoch0003-iter00000006"))
    engine.run(data, max_epochs=4)
    assert files(tmp_path) == ["checkpoint-epoch0003-iter00000006", "checkpoint-epoch0004-iter00000008"]


# ---- nothing half written ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_ones_and_no_rest(tmp_path: Path) -> None:
    script = """
        import resource, sys
        from functools import partial
        import torch
        from signalfire import Engine, Events, Update
        from signalfire.handlers import Checkpoint
        update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.Adam, lr=0.1))
        engine = Engine(update, model=torch.nn.Linear(50, 50), seed=0)
        engine.attach(Checkpoint(sys.argv[1]))
        @engine.on(Events.EPOCH_STARTED(once=2))
        def fill(engine):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            engine.run([(torch.ones(2, 50), torch.ones(2, 50))], max_epochs=3)
        except (OSError, RuntimeError) as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert any("earlier checkpoints are unchanged" in note for note in error.__notes__), error.__notes__
            print("refused")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout.strip() == "refused", done.stderr
    assert files(tmp_path) == ["checkpoint-epoch0001-iter00000001"]
    assert Checkpoint.load(tmp_path / "checkpoint-epoch0001-iter00000001")["engine"]["epoch"] == 1


def test_the_old_file_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, keep=1))
    around: list[list[str]] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: around.append(files(tmp_path)), phase=Phase.PERSIST, rank=-1)
    engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=3)
    # CONTROL has decided by now which file goes, but it goes only once the new one is written.
    assert around == [[], ["checkpoint-epoch0001-iter00000002"], ["checkpoint-epoch0002-iter00000004"]]


class Full(Files):
    """A disk that has no room for the content of a file."""

    def write(self, path: Path, content: Content) -> None:
        super().write(path, content_of(content)[: len(content_of(content)) // 2])
        raise OSError(28, "No space left on device")


DATA = list(DataLoader(dataset(), batch_size=22))


# ---- names ------------------------------------------------------------------------------------------------------------


def test_the_template_names_the_position_and_metrics(tmp_path: Path) -> None:
    template = "{name}_{epoch}-{iteration:03d}-{step}-{score:.2f}-{val/loss:.0e}"
    handler = Checkpoint(tmp_path, monitor="score", mode="max", keep=2, filename=template, name="best")
    engine = engine_of(handler, GradientAccumulation(2))

    @engine.on(Events.EPOCH_COMPLETED)
    def score(engine: Engine) -> None:
        engine.state.metrics.update({"score": 1 / engine.state.epoch, "val/loss": torch.tensor(0.00123)})

    engine.run(DATA, max_epochs=2)
    assert files(tmp_path) == ["best_1-002-1-1.00-1e-03", "best_2-004-2-0.50-1e-03"]
    assert handler.best == tmp_path / "best_1-002-1-1.00-1e-03"
    assert handler.last == tmp_path / "best_2-004-2-0.50-1e-03"


def test_a_name_without_a_position_is_the_newest_if_one_is_kept(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, keep=1, filename="latest")
    engine = engine_of(handler)
    around: list[list[str]] = []
    engine.connect(Events.CHECKPOINT_SAVED, lambda engine: around.append(files(tmp_path)))
    engine.run(DATA, max_epochs=3)
    assert around == [["latest"], ["latest"], ["latest"]]
    assert Checkpoint.load(tmp_path / "latest")["engine"]["iteration"] == 6
    other = engine_of(Checkpoint(tmp_path, keep=2, filename="latest"))
    other.load_state_dict(Checkpoint.load(tmp_path))
    other.run(DATA, max_epochs=5)
    assert sorted(Checkpoint.load(tmp_path / name)["engine"]["iteration"] for name in files(tmp_path)) == [6, 8, 10]


def test_a_run_that_is_restarted_again_and_again_has_its_newest_state_under_the_fixed_name(tmp_path: Path) -> None:
    for life in (1, 2, 3):
        engine = engine_of(Checkpoint(tmp_path, keep=1, filename="last", resume=True))
        engine.run(DATA, max_epochs=2 * life)
        assert files(tmp_path) == ["last"]
        assert Checkpoint.load(tmp_path / "last")["engine"]["epoch"] == 2 * life
    another = engine_of(Checkpoint(tmp_path, keep=1, filename="last"))
    another.run(DATA, max_epochs=1)
    assert files(tmp_path) == ["last", "last-2"], "that of another run is never replaced"
    assert Checkpoint.load(tmp_path / "last")["engine"]["epoch"] == 6


def test_a_name_without_a_position_takes_that_of_no_newer_one_and_of_none_that_was_moved(tmp_path: Path) -> None:
    engine_of(Checkpoint(tmp_path, every="2it", filename="latest")).run(DATA, max_iters=4)
    engine = engine_of(Checkpoint(tmp_path, every="1it", filename="latest"))
    engine.load_state_dict(Checkpoint.load(tmp_path / "latest"))  # the older one
    engine.run(DATA, max_iters=3)
    iterations = {name: Checkpoint.load(tmp_path / name)["engine"]["iteration"] for name in files(tmp_path)}
    assert iterations == {"latest": 2, "latest-2": 4, "latest-3": 3}

    handler = Checkpoint(tmp_path / "moved", every="1it", filename="latest")
    engine = engine_of(handler)
    engine.run(DATA, max_iters=1)
    (tmp_path / "moved" / "latest").rename(tmp_path / "elsewhere")
    engine.run(DATA, max_iters=2)
    assert [name for name, _ in handler.kept] == ["latest", "latest-2"]


def test_equal_metrics_in_names_do_not_take_each_others_place(tmp_path: Path) -> None:
    _, handler = scored(tmp_path, [0.911, 0.912, 0.913], keep=3, mode="max", filename="best-{score:.1f}")
    assert [value for _, value in handler.kept] == [0.913, 0.912, 0.911]
    assert len(files(tmp_path)) == 3


def test_a_second_value_in_one_iteration_under_another_name_takes_the_place_of_the_first(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, monitor="score", mode="min", keep=2, filename="{iteration}-{score:.0f}")
    engine = engine_of(handler)
    for event, score in ((Events.ITERATION_COMPLETED(once=2), 5.0), (Events.EPOCH_COMPLETED(once=1), 4.0)):
        engine.connect(event, lambda engine, score=score: engine.state.metrics.update(score=score))
    engine.run(DATA, max_epochs=1)
    assert files(tmp_path) == ["2-4"]
    assert handler.kept == [("2-4", 4.0)]


def test_a_template_with_an_unknown_metric_is_refused_at_the_first_look(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, every="1it", filename="{acuracy:.2f}"), Metrics(accuracy=Accuracy()))
    with pytest.raises(
        KeyError,
        match=r"no value is named 'acuracy'; available names: accuracy, epoch, iteration, name, step; did you mean",
    ):
        engine.run(DATA, max_epochs=2)
    assert engine.state.iteration == 0
    # Where code of the user may write it, at the end of the first epoch at the latest: before it would be in a name.
    engine = engine_of(Checkpoint(tmp_path, every="3ep", filename="{epcoh}"))
    engine.connect(Events.STARTED, lambda engine: None)
    with pytest.raises(KeyError, match=r"no value is named 'epcoh'.*did you mean 'epoch'"):
        engine.run(DATA, max_epochs=3)
    assert engine.state.epoch == 1


def test_a_template_with_a_field_that_nobody_can_write_is_refused_as_the_run_starts(tmp_path: Path) -> None:
    engine = build(linear(5, 1), Checkpoint(tmp_path, filename="{epok}"))
    with pytest.raises(KeyError, match=r"\(filename='{epok}'\): no value is named 'epok'.*did you mean 'epoch'"):
        engine.run(batches(1), max_epochs=1)
    assert engine.state.iteration == 0
    other = build(linear(5, 1), Checkpoint(tmp_path, filename="{epok}"))
    other.connect(Events.EPOCH_COMPLETED, lambda engine: engine.log("epok", 1.0), phase=Phase.PREPARE)
    other.run(batches(1), max_epochs=1)
    assert files(tmp_path) == ["1.0"]


def test_in_a_working_folder_that_was_removed_an_absolute_folder_still_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    for epochs in (1, 2):
        engine = build(linear(5, 1), Checkpoint(tmp_path / "runs", resume=True))
        engine.run(batches(1), max_epochs=epochs)
    assert engine.state.epoch == 2


def test_a_metric_that_is_announced_and_has_no_value_yet_is_nan(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="1it", filename="{iteration}-{accuracy:.1f}", keep=9)
    engine_of(handler, Metrics(accuracy=Accuracy())).run(DATA, max_epochs=2)
    assert [name[2:5] == "nan" for name, _ in handler.kept] == [True, True, False, False]


# ---- by the clock -----------------------------------------------------------------------------------------------------


def test_an_interval_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    handler = Checkpoint(tmp_path, every="15min", keep=9)
    engine = engine_of(handler)

    @engine.on(Events.ITERATION_COMPLETED, phase=Phase.PREPARE)
    def pass_time(engine: Engine) -> None:
        nonlocal now
        now += 400.0

    engine.run(DATA, max_iters=8)  # 15 minutes are 900 seconds
    assert [int(name[-8:]) for name, _ in handler.kept] == [3, 6]
    state = engine.state_dict()
    now += 10_000.0  # between two runs no time passes
    engine.run(DATA, max_iters=10)
    assert [int(name[-8:]) for name, _ in handler.kept] == [3, 6]
    assert not any(isinstance(value, float) for value in state["handlers"]["checkpoint"].values()), "it is not saved"


# ---- weights, hyperparameters -----------------------------------------------------------------------------------------


def test_weights_only_are_those_that_are_to_be_used(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="2it", weights_only=True, name="weights")
    engine = engine_of(handler, EMA(decay=0.5))
    exported: list[dict[str, Any]] = []
    engine.connect(
        Events.ITERATION_COMPLETED(every=2),
        lambda engine: exported.append(engine.weights()),
        phase=Phase.PERSIST,
        rank=5,
    )
    engine.run(DATA, max_iters=4)
    assert handler.last is not None
    loaded = Checkpoint.load(handler.last)
    assert list(loaded) == ["model"]
    other = engine_of()
    other.load_weights(loaded)
    for (name, mine), theirs in zip(other.model.state_dict().items(), exported[-1]["model"].values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert not torch.equal(engine.model[0].weight, loaded["model"]["0.weight"]), "the averages, not the raw weights"
    assert torch.load(handler.last / "state.pt", weights_only=True).keys() == loaded.keys()
    with pytest.raises(ValueError, match="expected the state of a Signalfire engine"):
        other.load_state_dict(loaded)


def test_full_states_come_before_newer_weights_in_a_folder(tmp_path: Path) -> None:
    engine_of(
        Checkpoint(tmp_path, every="3it"), Checkpoint(tmp_path, every="1it", weights_only=True, name="weights")
    ).run(DATA, max_iters=4)
    assert Checkpoint.load(tmp_path)["engine"]["iteration"] == 3
    assert list(Checkpoint.load(tmp_path, name="weights")) == ["model"]


HYPERPARAMETERS = {
    "lr": 0.1,
    "layers": [8, 8],
    "optimizer": {"name": "adam", "betas": [0.9, 0.999]},
    "note": None,
    "amp": False,
}


def test_hyperparameters_come_back_as_they_were_and_may_be_overridden(tmp_path: Path) -> None:
    engine_of(Checkpoint(tmp_path, hyperparameters=HYPERPARAMETERS)).run(DATA, max_epochs=1)
    path = tmp_path / "checkpoint-epoch0001-iter00000002"
    for where in (tmp_path, path, path / "state.pt"):
        assert Checkpoint.hyperparameters(where) == HYPERPARAMETERS
    assert Checkpoint.hyperparameters(path, lr=0.2, note="twice") == {**HYPERPARAMETERS, "lr": 0.2, "note": "twice"}
    with pytest.raises(
        ValueError, match=r"no stored hyperparameter 'layer'; stored hyperparameters: amp, layers, lr, note, optimizer"
    ):
        Checkpoint.hyperparameters(path, layer=[4])
    engine_of(Checkpoint(tmp_path / "none")).run(DATA, max_epochs=1)
    with pytest.raises(ValueError, match="contains no hyperparameters; write the checkpoint with"):
        Checkpoint.hyperparameters(tmp_path / "none")


# ---- when the run ends by an error ------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("event", "count", "expected"),
    spread(
        [
            (Events.FORWARD_STARTED, 8, 7),
            (Events.BACKWARD_COMPLETED, 9, 8),
            (Events.OPTIMIZER_STEP_COMPLETED, 9, 8),
            (Events.UPDATE_COMPLETED, 12, 11),
            (Events.ITERATION_COMPLETED, 8, 7),
            (Events.GET_BATCH_STARTED, 12, 11),
            (Events.EPOCH_COMPLETED, 1, 11),
            (Events.EPOCH_STARTED, 2, 11),
        ],
        2,
    ),
    ids=str,
)
def test_a_run_that_an_error_ended_goes_on_bit_for_bit(
    event: Events, count: int, expected: int, error: type[BaseException], asynchronous: bool, tmp_path: Path
) -> None:
    def build(folder: Path) -> tuple[Engine, History]:
        engine, history = full_engine(folder, keep=2)
        engine.attach(Checkpoint(folder, every="5it", on_exception=True, asynchronous=asynchronous, name="safe"))
        return engine, history

    seed_everything(1)
    whole, history = build(tmp_path / "whole")
    whole.run(loader(False), max_epochs=2)
    seed_everything(1)
    cut, _ = build(tmp_path / "cut")

    def fail(engine: Engine) -> None:
        raise error("on purpose")

    cut.connect(event(once=count), fail)
    with pytest.raises(error):
        cut.run(loader(False), max_epochs=2)
    (path,) = (tmp_path / "cut").glob("safe-*-exception")
    state = Checkpoint.load(path)
    assert (state["engine"]["iteration"], path.name[5:14]) == (expected, "epoch0001")
    seed_everything(2)
    other, continued = build(tmp_path / "cut")
    other.load_state_dict(state)
    other.run(loader(False), max_epochs=2)
    for a, b in zip(whole.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert continued.records == history.records
    for name in ("checkpoint", "epochs", "best", "safe"):
        mine, theirs = other.handlers[name], whole.handlers[name]
        assert isinstance(mine, Checkpoint)
        assert isinstance(theirs, Checkpoint)
        assert mine.kept == theirs.kept, name


def test_before_the_first_iteration_is_complete_there_is_nothing_to_write(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, on_exception=True))

    def fail(engine: Engine) -> None:
        raise ArithmeticError

    with engine.connect(Events.FORWARD_STARTED(once=1), fail), pytest.raises(ArithmeticError):
        engine.run(DATA, max_epochs=1)
    assert files(tmp_path) == []
    engine.run(DATA, max_epochs=1)
    assert files(tmp_path) == ["checkpoint-epoch0001-iter00000002"]


@pytest.mark.moderate
def test_what_an_error_left_goes_once_a_later_run_does_not_need_it(tmp_path: Path) -> None:
    def run(until: int, fails_at: int | None) -> None:
        engine = engine_of(Checkpoint(tmp_path, every="1it", keep=1, on_exception=True))
        if files(tmp_path):
            engine.load_state_dict(Checkpoint.load(tmp_path))

        def fail(engine: Engine) -> None:
            raise ArithmeticError

        if fails_at is None:
            engine.run(DATA, max_iters=until)
            return
        engine.connect(Events.FORWARD_STARTED(once=fails_at), fail)
        with pytest.raises(ArithmeticError):
            engine.run(DATA, max_iters=until)

    run(20, 4)
    run(20, 8)
    run(20, 12)
    run(20, None)
    iterations = {int(re.findall(r"iter(\d+)", name)[0]) for name in files(tmp_path)}
    assert iterations == {11, 20}
    run(22, None)
    assert all("exception" not in name for name in files(tmp_path))


@pytest.mark.filterwarnings("ignore:C17:signalfire.FindingWarning")
def test_an_error_while_writing_for_an_error_is_reported_and_the_first_one_leaves(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="9it", on_exception=True)
    engine = engine_of(handler)

    def fail(engine: Engine) -> None:
        handler.files = Full()
        raise ArithmeticError("the first")

    engine.connect(Events.FORWARD_STARTED(once=3), fail)
    with pytest.raises(ArithmeticError, match="the first") as caught:
        engine.run(DATA, max_epochs=2)
    assert any("another error: OSError" in note and "exception" in note for note in caught.value.__notes__)
    assert files(tmp_path) == []


# ---- asynchronously ---------------------------------------------------------------------------------------------------


class Gated(Files):
    """Lets nothing on the disk before the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.log: list[str] = []
        self.error: OSError | None = None

    def write(self, path: Path, content: Content) -> None:
        self.reached.set()
        assert self.gate.wait(LIMIT)
        if self.error is not None:
            raise self.error
        super().write(path, content)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.log.append("committed" if old.name.endswith(".new") else "removed")


@pytest.mark.moderate
def test_written_in_a_thread_the_training_and_the_files_are_the_same(tmp_path: Path) -> None:
    seen = []
    for asynchronous in (False, True):
        seed_everything(1)
        engine, history = full_engine(tmp_path / str(asynchronous), keep=2)
        for handler in list(engine.handlers.values()):
            if isinstance(handler, Checkpoint):
                engine.detach(handler)
                options: dict[str, Any] = {"keep": handler.keep, "name": handler.name, "asynchronous": asynchronous}
                if handler.monitor is not None:
                    options["monitor"] = handler.monitor.metric
                else:
                    options["every"] = handler.every
                engine.attach(Checkpoint(tmp_path / str(asynchronous), **options))
        engine.run(loader(False), max_epochs=3)
        seen.append((fingerprint(engine), history.records, files(tmp_path / str(asynchronous))))
    assert seen[0] == seen[1]
    for name in seen[0][2]:
        one, other = (Checkpoint.load(tmp_path / str(asynchronous) / name) for asynchronous in (False, True))
        assert one["handlers"] == other["handlers"]
        assert torch.equal(one["random"]["torch"], other["random"]["torch"])
        for a, b in zip(one["modules"]["model"].values(), other["modules"]["model"].values(), strict=True):
            assert torch.equal(a, b)


def test_nothing_is_reported_as_saved_before_the_disk_has_it(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="2it", keep=1, asynchronous=True)
    engine = engine_of(handler)
    saved: list[int] = []
    engine.connect(Events.CHECKPOINT_SAVED, lambda engine: saved.append(engine.state.iteration))
    engine.run(DATA, max_iters=2)
    (first,) = handler.kept
    handler.files = gated = Gated()
    states: list[Any] = []

    @engine.on(Events.ITERATION_STARTED(once=5))
    def look(engine: Engine) -> None:  # that of iteration 4 is under way
        assert gated.reached.wait(LIMIT)
        assert handler.kept == [first]
        assert handler.last == tmp_path / first[0]
        assert saved == [2]
        assert files(tmp_path)[-1] == first[0]
        states.append(handler.state_dict()["kept"])
        gated.gate.set()

    engine.run(DATA, max_iters=5)
    assert saved[0] == 2
    assert len(saved) == 2
    assert states == [[["checkpoint-epoch0002-iter00000004", None, 4]]], "what a resumed run has to know"
    assert files(tmp_path) == [name for name, _ in handler.kept] == ["checkpoint-epoch0002-iter00000004"]
    assert gated.log == ["committed", "removed"]


def test_a_second_write_waits_for_the_first(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="1it", keep=9, asynchronous=True)
    handler.files = gated = Gated()
    engine = engine_of(handler)
    alive: list[int] = []

    @engine.on(Events.ITERATION_STARTED)
    def count(engine: Engine) -> None:
        alive.append(sum(thread.name == "signalfire checkpoint" for thread in threading.enumerate()))

    threading.Timer(0.3, gated.gate.set).start()
    engine.run(DATA, max_iters=6)
    assert max(alive) == 1
    assert [int(name[-8:]) for name, _ in handler.kept] == [1, 2, 3, 4, 5, 6]
    assert gated.log == ["committed"] * 6
    assert not any(thread.name == "signalfire checkpoint" for thread in threading.enumerate())


def test_a_second_write_waits_at_any_event(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every=Events.EPOCH_STARTED, keep=9, asynchronous=True)
    handler.files = gated = Gated()
    engine = engine_of(handler)
    threading.Timer(0.3, gated.gate.set).start()
    engine.run(DATA, max_epochs=5)
    assert [int(name[-8:]) for name, _ in handler.kept] == [0, 2, 4, 6, 8]


class Slow(Files):
    def write(self, path: Path, content: Content) -> None:
        time.sleep(0.02)
        super().write(path, content)


@pytest.mark.moderate
def test_no_saved_state_depends_on_how_often_something_was_saved(tmp_path: Path) -> None:
    """Nor on how quick a thread is: a state cannot contain its own duration."""
    counts = []
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        handler = Checkpoint(folder, every="1it", asynchronous=asynchronous, name="b")
        handler.files = Slow()
        engine_of(Checkpoint(folder, every="1it", keep=9, name="a"), handler).run(DATA, max_iters=4)
        counts.append([Checkpoint.load(path)["engine"]["fired"] for path in sorted(folder.glob("a-*"))])
    assert counts[0] == counts[1]
    assert len(counts[0]) == 4
    assert not any("CHECKPOINT_SAVED" in event for one in counts[0] for event in one)


def test_an_error_of_the_thread_leaves_the_run_at_the_next_boundary(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="2it", keep=2, asynchronous=True)
    engine = engine_of(handler)
    engine.run(DATA, max_iters=2)
    handler.files = gated = Gated()
    gated.error = OSError(28, "No space left on device")

    @engine.on(Events.ITERATION_STARTED(once=5))
    def fail(engine: Engine) -> None:
        gated.gate.set()
        while any(thread.name == "signalfire checkpoint" for thread in threading.enumerate()):
            time.sleep(0.001)

    with pytest.raises(OSError, match="No space left") as caught:
        engine.run(DATA, max_iters=99)
    assert engine.state.iteration == 5
    assert any("iter00000004" in note and "unchanged" in note for note in caught.value.__notes__)
    assert [int(name[-8:]) for name, _ in handler.kept] == [2]
    assert files(tmp_path) == [name for name, _ in handler.kept]
    assert [one[2] for one in handler.state_dict()["kept"]] == [2]
    handler.files = Files()
    engine.run(DATA, max_iters=6)
    assert [int(name[-8:]) for name, _ in handler.kept] == [2, 6]


def test_an_error_of_the_last_write_leaves_the_run(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="2it", asynchronous=True)
    handler.files = Full()
    engine = engine_of(handler)
    with pytest.raises(OSError, match="No space left"):
        engine.run(DATA, max_iters=2)
    assert handler.kept == []
    assert files(tmp_path) == []


def test_the_end_waits_and_what_listens_to_it_finds_the_last_one(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="2it", asynchronous=True)
    handler.files = gated = Gated()
    engine = engine_of(handler)
    found: list[Any] = []
    engine.connect(Events.COMPLETED, lambda engine: found.append(handler.last and Checkpoint.load(handler.last)))
    threading.Timer(0.2, gated.gate.set).start()
    engine.run(DATA, max_iters=2)
    assert found[0]["engine"]["iteration"] == 2


def test_an_error_of_training_waits_too(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, every="2it", asynchronous=True)
    handler.files = gated = Gated()
    engine = engine_of(handler)

    def fail(engine: Engine) -> None:
        threading.Timer(0.2, gated.gate.set).start()
        raise ArithmeticError

    engine.connect(Events.ITERATION_STARTED(once=3), fail)
    with pytest.raises(ArithmeticError):
        engine.run(DATA, max_iters=9)
    assert files(tmp_path) == [name for name, _ in handler.kept] == ["checkpoint-epoch0001-iter00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("monitored", [False, True])
def test_a_state_taken_while_one_is_written_goes_on_to_the_same_files(monitored: bool, tmp_path: Path) -> None:
    scores = [5.0, 3.0, 4.0, 1.0, 2.0, 6.0, 0.5, 7.0]

    def build(folder: Path, asynchronous: bool) -> tuple[Engine, Checkpoint]:
        options: dict[str, Any] = {"monitor": "score", "mode": "min"} if monitored else {"every": "1it"}
        handler = Checkpoint(folder, keep=2, asynchronous=asynchronous, **options)
        engine = engine_of(handler)
        engine.connect(
            Events.ITERATION_COMPLETED,
            lambda engine: engine.state.metrics.update(score=scores[engine.state.iteration - 1]),
        )
        return engine, handler

    whole, uninterrupted = build(tmp_path / "whole", False)
    expected: list[dict[str, Any]] = []
    whole.connect(Events.ITERATION_COMPLETED, lambda e: expected.append(e.state_dict()), phase=Phase.PERSIST, rank=5)
    whole.run(DATA, max_iters=8)
    engine, _ = build(tmp_path / "asynchronous", True)
    states: list[dict[str, Any]] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda e: states.append(e.state_dict()), phase=Phase.PERSIST, rank=5)
    engine.run(DATA, max_iters=8)
    assert [one["handlers"] for one in states] == [one["handlers"] for one in expected]
    for number, state in enumerate(states[:-1]):
        other, handler = build(tmp_path / str(number), True)
        other.load_state_dict(state)
        other.run(DATA, max_iters=8)
        assert handler.state_dict() == uninterrupted.state_dict()


def test_once_the_run_has_ended_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    for name, event in (("a", None), ("b", Events.COMPLETED), ("c", Events.EPOCH_COMPLETED)):
        engine_of(Checkpoint(tmp_path, every=event, asynchronous=True, name=name)).run(DATA, max_epochs=2)
    assert threading.active_count() == before
    assert [name[0] for name in files(tmp_path)] == ["a", "a", "b", "c", "c"]


# ---- arguments --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="not a folder"):
        Checkpoint(tmp_path / "file")
    with pytest.raises(
        NotADirectoryError, match=r"Checkpoint\(folder='.*/file/below/it'\): '.*/file' is a file, not a "
    ):
        Checkpoint(tmp_path / "file" / "below" / "it")
    with pytest.raises(
        NotADirectoryError, match=r"CSVLogger\(path='.*/file/log.csv'\): '.*/file' is a file, not a folder"
    ):
        CSVLogger(tmp_path / "file" / "log.csv")


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"keep": 0}),
        (TypeError, {"keep": 1.5}),
        (TypeError, {"keep": True}),
        (ValueError, {"monitor": "loss", "every": "1ep"}),
        (ValueError, {"monitor": "loss", "mode": "least"}),
        (TypeError, {"monitor": 3}),
        (ValueError, {"every": "often"}),
        (TypeError, {"every": 3}),
        (ValueError, {"name": "a/b"}),
        (TypeError, {"filename": 3}),
        (TypeError, {"weights_only": 1}),
        (TypeError, {"asynchronous": "yes"}),
        (TypeError, {"on_exception": None}),
        (ValueError, {"on_exception": True, "weights_only": True}),
        (TypeError, {"hyperparameters": [1]}),
        (TypeError, {"hyperparameters": {"sizes": b"ab"}}),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(tmp_path: Path, error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error, match="Checkpoint"):
        Checkpoint(tmp_path, **options)


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path))
    with pytest.raises(ValueError, match="name="):
        engine.attach(Checkpoint(tmp_path, monitor="loss"))


def test_switched_off_nothing_is_written(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path / "off"))
    with engine.without("checkpoint"):
        engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=2)
    assert not (tmp_path / "off").exists()


class Noted(Handler):
    """A user's handler with a state of its own is saved without being listed anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    @on(Events.ITERATION_COMPLETED)
    def see(self, engine: Engine) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


def test_a_handler_of_ones_own_is_saved_too(tmp_path: Path) -> None:
    engine_of(Checkpoint(tmp_path), Noted()).run(loader(False), max_epochs=1)
    noted = Noted()
    engine = engine_of(Checkpoint(tmp_path), noted)
    engine.load_state_dict(Checkpoint.load(tmp_path / "checkpoint-epoch0001-iter00000011"))
    engine.run(loader(False), max_epochs=2)
    assert noted.seen == 22


def test_new_values_of_other_metrics_are_no_new_value(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, monitor="score", mode="min", keep=9))
    engine.connect(Events.EPOCH_COMPLETED(once=1), lambda engine: engine.state.metrics.update(score=1.0))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.state.metrics.update(other=2.0))
    engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=3)
    assert [int(name[16:20]) for name in files(tmp_path)] == [1]


def restarted(folder: Path, *, fails_at: int | None = None) -> Engine:
    """What a script that is started again builds."""
    torch.manual_seed(0)
    update = Update.supervised(nn.functional.cross_entropy, partial(torch.optim.Adam, lr=1e-2))
    engine = Engine(update, model=nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), seed=0)
    engine.attach(Checkpoint(folder, every="2it", keep=3, resume=True), GradientAccumulation(3))
    if fails_at is not None:

        def fail(engine: Engine) -> None:
            raise ArithmeticError("as it does each time")

        engine.connect(Events.FORWARD_STARTED(once=fails_at), fail)
    return engine


def few_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.randint(0, 2, (4,), generator=generator)) for _ in range(10)]


def test_a_script_that_is_started_again_goes_on_by_itself(tmp_path: Path) -> None:
    seed_everything(0)
    whole = restarted(tmp_path / "whole")
    whole.run(few_batches(), max_epochs=2)
    seed_everything(0)
    for fails_at in (8, 17):
        with pytest.raises(ArithmeticError):
            restarted(tmp_path / "again", fails_at=fails_at).run(few_batches(), max_epochs=2)
    again = restarted(tmp_path / "again")
    begun: list[int] = []
    again.connect(Events.CHECKPOINT_LOADED, lambda engine: begun.append(engine.state.iteration))
    again.run(few_batches(), max_epochs=2)
    assert begun == [16]
    for key, value in whole.modules["model"].state_dict().items():
        assert torch.equal(value, again.modules["model"].state_dict()[key])
    again.run(few_batches(), max_epochs=3)  # a run that continues is not set back
    assert begun == [16]
    assert again.state.iteration == 30


def test_weights_alone_cannot_be_gone_on_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume=True, weights_only=True"):
        Checkpoint(tmp_path, resume=True, weights_only=True)


# ---- two handlers that save at one event ---------------------------------------------------------------------------


class DyingFiles(Files):
    """The process ends at the n-th operation from when ``left`` is set."""

    left = -1

    def count(self) -> None:
        self.left -= self.left >= 0
        if self.left == 0:
            os._exit(9)

    def make_folder(self, path: Path) -> None:
        self.count()
        super().make_folder(path)

    def write(self, path: Path, content: Content) -> None:
        self.count()
        super().write(path, content)

    def sync(self, path: Path) -> None:
        self.count()
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self.count()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self.count()
        super().remove(path)


def usual_pair(folder: Path, *, asynchronous: bool = False) -> Engine:
    """The last state in every epoch, and the best by a loss that improves in every other epoch; in folders of their own."""
    model = mlp(5, 8, 1)
    best = Checkpoint(folder / "best", monitor="score", mode="min", asynchronous=asynchronous, name="z_best")
    engine = build(model, Checkpoint(folder / "last", asynchronous=asynchronous, name="a_last"), best)

    def score(engine: Engine) -> None:
        engine.state.metrics["score"] = 10.0 - engine.state.epoch + 3 * (engine.state.epoch % 2)

    engine.state.metrics.announce("user", ["score"])
    engine.connect(Events.EPOCH_COMPLETED, score)
    return engine


@pytest.mark.moderate
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("operation", spread(range(1, 27), 9))
def test_a_version_that_a_dying_process_did_not_write_is_written_on_resume(
    tmp_path: Path, operation: int, asynchronous: bool
) -> None:
    whole = usual_pair(tmp_path / "whole", asynchronous=asynchronous)
    whole.run(batches(), max_epochs=6)
    if not (child := os.fork()):
        files = Checkpoint.files = DyingFiles()
        first = usual_pair(tmp_path / "cut", asynchronous=asynchronous)
        first.connect(Events.EPOCH_COMPLETED(once=4), lambda engine: setattr(files, "left", operation))
        first.run(batches(), max_epochs=6)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    again = usual_pair(tmp_path / "cut", asynchronous=asynchronous)
    again.load_state_dict(Checkpoint.load(tmp_path / "cut" / "last"))
    mine, theirs = (engine.handlers["z_best"] for engine in (again, whole))
    assert isinstance(mine, Checkpoint)
    assert isinstance(theirs, Checkpoint)
    best: list[bool] = []
    again.connect(Events.EPOCH_STARTED, lambda engine: best.append(mine.best is not None and mine.best.is_dir()))
    again.run(batches(), max_epochs=6)
    assert asynchronous or best[0]  # in threads, a newer best may be on disk before the state that knows of it
    assert mine.kept == theirs.kept
    assert sorted(os.listdir(mine.folder)) == sorted(os.listdir(theirs.folder))
    assert fingerprint(again) == fingerprint(whole)


# ---- two that save at one event -----------------------------------------------------------------------------------------


class _Died(BaseException):
    """In place of the death of the process."""


class Dying(Files):
    """Dies after so many operations, of whichever handler."""

    left = sys.maxsize

    def _count(self) -> None:
        Dying.left -= 1
        if Dying.left < 0:
            raise _Died

    def write(self, path: Path, content: Content) -> None:
        self._count()
        super().write(path, content)

    def rename(self, path: Path, target: Path) -> None:
        self._count()
        super().rename(path, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)


def last_and_best(folder: Path, asynchronous: bool) -> tuple[Engine, Checkpoint, Checkpoint]:
    engine = build(model := mlp(5, 8, 1), Validation(evaluator_of(model), batches(2)))
    last = Checkpoint(folder, every="1ep", keep=1, filename="last", name="last", asynchronous=asynchronous)
    best = Checkpoint(folder, monitor="loss", keep=1, filename="best", name="best", asynchronous=asynchronous)
    last.files = best.files = Dying()
    engine.attach(last, best)
    return engine, last, best


@pytest.mark.moderate
@pytest.mark.filterwarnings(r"ignore:run\(\). nothing to do")  # it died after the last iteration
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", spread(range(12), 1))
def test_deaths_between_the_saves_of_one_event_lose_no_best_and_leave_nothing_behind(
    seed: int, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, *_, expected = last_and_best(tmp_path / "whole", asynchronous)
    whole.run(batches(4), max_epochs=4)
    draw, folder = random.Random(seed), tmp_path / "killed"
    for _ in range(100):
        engine, last, best = last_and_best(folder, asynchronous)
        source = None
        with suppress(FileNotFoundError):  # it died before there was a whole one, which may be on its way to its name
            state = Checkpoint.load(folder)
            source = Path(state["origin"]["path"]).name
            engine.load_state_dict(state)
        monkeypatch.setattr(Dying, "left", draw.randrange(1, 12))
        try:
            engine.run(batches(4), max_epochs=4)
        except _Died:
            continue
        break
    assert fingerprint(engine)["modules.model"] == fingerprint(whole)["modules.model"]
    assert [value for _, value in best.kept] == [value for _, value in expected.kept]
    assert best.best == folder / best.kept[0][0]
    known = {name for one in (last, best) for name, _ in one.kept} | {*last.retention.superseded, source}
    assert set(os.listdir(folder)) <= known | set(best.retention.superseded)


# ---- several machines, here folders of several ranks ---------------------------------------------------------------------


def _in_a_folder_of_its_own(folder: Path, resume: bool) -> str:
    distribution = DistributedDataParallel()
    rank = distribution.processes.rank
    engine = engine_of(distribution, Checkpoint(folder / str(rank), resume=resume))
    with pytest.raises(ValueError, match="the same folder") as caught:
        engine.run(list(DataLoader(dataset(), batch_size=11)), max_epochs=2)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("resume", [False, True])
def test_ranks_that_do_not_see_the_same_folder_are_refused_before_the_first_batch(resume: bool, tmp_path: Path) -> None:
    if resume:
        engine_of(Checkpoint(tmp_path / "0")).run(list(DataLoader(dataset(), batch_size=22)), max_epochs=1)
    before = set(tmp_path.rglob("*"))
    for said in run_together(_in_a_folder_of_its_own, 2, tmp_path, resume):
        assert f"rank 0 writes to '{tmp_path / '0'}'" in said
        assert f"rank 1 cannot find the files from rank 0 in '{tmp_path / '1'}'" in said
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "0"}


def test_a_run_that_changes_its_working_folder_writes_where_it_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in ("began", "went"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "began")
    checkpoint, others = Checkpoint("runs/last"), [CSVLogger("runs/log.csv"), Export("runs/model.safetensors")]
    engine = build(linear(5, 1), checkpoint, *others, Metrics(loss=Average()))
    engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: monkeypatch.chdir(tmp_path / "went"))
    engine.run(batches(2), max_epochs=2)
    assert not list((tmp_path / "went").iterdir())
    assert {path.name for path in (tmp_path / "began" / "runs").iterdir()} == {"last", "log.csv", "model.safetensors"}
    assert checkpoint.last is not None
    assert checkpoint.last.parent == tmp_path / "began" / "runs" / "last"


@pytest.mark.parametrize(
    "wrong", [np.ones(2), {"a": [np.ones(2)]}, lambda: 1, threading.Lock()], ids=lambda one: type(one).__name__
)
def test_an_error_names_the_metric_that_cannot_be_saved(wrong: Any, tmp_path: Path) -> None:
    engine = build(linear(5, 1), Checkpoint(tmp_path))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(mine=wrong))
    with pytest.raises((TypeError, PicklingError, AttributeError)) as raised:
        engine.run(batches(1), max_epochs=1)
    assert any(
        re.search(r"in the state's entry '(engine\.metrics\.values\.)?mine'", note) for note in raised.value.__notes__
    )
