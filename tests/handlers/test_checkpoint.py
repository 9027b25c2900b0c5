"""Checkpoint: which files are kept, that each continues the run bit for bit, and that none is ever half written."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Phase, Update, on, seed_everything
from signalfire.handlers import (
    Accuracy,
    Average,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    History,
    LRScheduling,
    Metrics,
    Validation,
)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 3))


def dataset(count: int = 44) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def engine_of(*handlers: Any) -> Engine:
    update = Update.supervised(nn.functional.cross_entropy, partial(torch.optim.Adam, lr=0.02))
    engine = Engine(update, model=network(), seed=0)
    engine.attach(*handlers)
    return engine


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def scored(folder: Path, scores: Sequence[float], **options: Any) -> tuple[Engine, Checkpoint]:
    """A run that produced one of these scores in each epoch, of two iterations."""
    handler = Checkpoint(folder, monitor="score", **options)
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
    expected = ["checkpoint-epoch0004-iter00000008.pt", "checkpoint-epoch0005-iter00000010.pt"]
    assert files(tmp_path / "made" / "here") == expected
    assert [name for name, _ in handler.kept] == expected


def test_one_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    engine_of(Checkpoint(tmp_path, name="last")).run(list(DataLoader(dataset(), batch_size=22)), max_epochs=3)
    assert files(tmp_path) == ["last-epoch0003-iter00000006.pt"]


@pytest.mark.parametrize(
    ("every", "iterations"), [("3it", [3, 6, 9]), ("2ep", [8]), ("4st", [8]), (Events.EPOCH_COMPLETED(once=1), [4])]
)
def test_the_interval_says_when(tmp_path: Path, every: Any, iterations: list[int]) -> None:
    engine = engine_of(Checkpoint(tmp_path, every=every, keep=9), GradientAccumulation(2))
    engine.run(list(DataLoader(dataset(), batch_size=11)), max_iters=9)
    assert [int(name[-11:-3]) for name in files(tmp_path)] == iterations


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("min", [(4, 1.0), (6, 2.0)]), ("max", [(1, 5.0), (5, 4.0)])],
)
def test_the_best_are_kept(tmp_path: Path, mode: Any, expected: list[tuple[int, float]]) -> None:
    _, handler = scored(tmp_path, [5.0, 3.0, 3.5, 1.0, 4.0, 2.0], mode=mode, keep=2)
    assert [(int(name[16:20]), value) for name, value in handler.kept] == expected
    assert files(tmp_path) == sorted(name for name, _ in handler.kept)


def test_of_equal_values_the_earlier_one_stays(tmp_path: Path) -> None:
    _, handler = scored(tmp_path, [2.0, 1.0, 1.0, 2.0, 1.0], keep=2)
    assert [(int(name[16:20]), value) for name, value in handler.kept] == [(2, 1.0), (3, 1.0)]


def test_nan_is_never_kept(tmp_path: Path) -> None:
    _, handler = scored(tmp_path, [math.nan, math.nan], keep=2)
    assert files(tmp_path) == []
    _, handler = scored(tmp_path, [math.nan, 3.0, math.nan, 2.0, math.nan], keep=3)
    assert [value for _, value in handler.kept] == [2.0, 3.0]


def test_infinity_is_kept_until_something_is_better(tmp_path: Path) -> None:
    _, handler = scored(tmp_path, [math.inf, 3.0], keep=2)
    assert [value for _, value in handler.kept] == [3.0, math.inf]


def test_it_acts_once_for_each_new_value(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, monitor="score", keep=9)
    engine = engine_of(handler)
    engine.connect(Events.EPOCH_COMPLETED(every=2), lambda engine: engine.state.metrics.update(score=1.0))
    engine.state.metrics["score"] = 3.0
    engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=5)
    assert [int(name[16:20]) for name in files(tmp_path)] == [1, 2, 4]


def test_a_missing_metric_is_an_error_that_names_those_there_are(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, monitor="acuracy"), Metrics(accuracy=Accuracy()))
    with pytest.raises(KeyError, match=r"Checkpoint.*'acuracy'.*did you mean 'accuracy'"):
        engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=2)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-epoch0099-iter00000099.pt").write_text("of an earlier run")
    engine_of(Checkpoint(tmp_path)).run(list(DataLoader(dataset(), batch_size=22)), max_epochs=2)
    assert files(tmp_path) == [
        "checkpoint-epoch0002-iter00000004.pt",
        "checkpoint-epoch0099-iter00000099.pt",
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


@pytest.mark.parametrize("own_generator", [False, True], ids=["global random state", "own generator"])
def test_every_file_continues_the_run_bit_for_bit(tmp_path: Path, own_generator: bool) -> None:
    seed_everything(1)
    whole, history = full_engine(tmp_path / "whole", keep=99)
    whole.run(loader(own_generator), max_epochs=3)
    next_draw = torch.rand(5)
    kept = whole.handlers["best"].state_dict()["kept"]
    written = [path for path in sorted((tmp_path / "whole").iterdir()) if not path.name.startswith("best")]
    # 7, 14, 21 and 28 are inside of epochs of 11, and all but 14 and 28 inside of windows.
    assert [int(path.name[-11:-3]) for path in written] == [7, 14, 21, 28, 11, 22, 33]
    for number, path in enumerate(written[:-1]):
        state = torch.load(path, weights_only=True)
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
    second.load_state_dict(Checkpoint.load(tmp_path / "first" / "checkpoint-epoch0002-iter00000022.pt"))
    second.run(loader(False), max_epochs=4)
    for a, b in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_file_is_read_back_without_running_code(tmp_path: Path) -> None:
    engine, _ = full_engine(tmp_path, keep=1)
    engine.run(loader(False), max_epochs=1)
    path = tmp_path / "epochs-epoch0001-iter00000011.pt"
    with_weights_only, by_load = torch.load(path, weights_only=True), Checkpoint.load(path)
    assert with_weights_only["engine"] == by_load["engine"]
    assert by_load["engine"]["iteration"] == 11
    assert by_load["engine"]["epoch_open"] is False
    assert torch.equal(by_load["modules"]["model"]["0.weight"], engine.model[0].weight)


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
            state = Checkpoint.load(tmp_path / f"{name}-epoch{epoch:04d}-iter{11 * epoch:08d}.pt")
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
            Checkpoint.load(next(tmp_path.glob(f"{name}-*-iter{iteration:08d}.pt"))) for name in ("one", "three")
        )
        assert one["engine"] == three["engine"]


def test_the_snapshot_of_an_iteration_is_not_taken_for_that_of_the_epoch(tmp_path: Path) -> None:
    engine = engine_of(
        Checkpoint(tmp_path, name="inner", every="4it", keep=9), Checkpoint(tmp_path, name="outer", keep=9)
    )
    engine.run(list(DataLoader(dataset(), batch_size=11)), max_epochs=2)
    inner = Checkpoint.load(tmp_path / "inner-epoch0002-iter00000008.pt")
    outer = Checkpoint.load(tmp_path / "outer-epoch0002-iter00000008.pt")
    assert (inner["engine"]["epoch_open"], outer["engine"]["epoch_open"]) == (True, False)
    # Each iteration's own weights, not those of an earlier snapshot.
    earlier = Checkpoint.load(tmp_path / "inner-epoch0001-iter00000004.pt")
    assert not torch.equal(earlier["modules"]["model"]["0.weight"], inner["modules"]["model"]["0.weight"])
    assert torch.equal(inner["modules"]["model"]["0.weight"], engine.model[0].weight)


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
    engine.load_state_dict(Checkpoint.load(tmp_path / "checkpoint-epoch0003-iter00000006.pt"))
    engine.run(data, max_epochs=4)
    assert files(tmp_path) == ["checkpoint-epoch0003-iter00000006.pt", "checkpoint-epoch0004-iter00000008.pt"]


# ---- nothing half written ---------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_put_in_place_leaves_the_old_ones_and_no_rest(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-epoch0002-iter00000004.pt").mkdir()  # it cannot be renamed over a folder
    engine = engine_of(Checkpoint(tmp_path))
    with pytest.raises(OSError, match="epoch0002") as caught:
        engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=3)
    assert any("the earlier ones are untouched" in note for note in caught.value.__notes__)
    assert files(tmp_path) == ["checkpoint-epoch0001-iter00000002.pt", "checkpoint-epoch0002-iter00000004.pt"]
    assert Checkpoint.load(tmp_path / "checkpoint-epoch0001-iter00000002.pt")["engine"]["epoch"] == 1


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
            assert any("the earlier ones are untouched" in note for note in error.__notes__), error.__notes__
            print("refused")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "refused", done.stderr
    assert files(tmp_path) == ["checkpoint-epoch0001-iter00000001.pt"]
    assert Checkpoint.load(tmp_path / "checkpoint-epoch0001-iter00000001.pt")["engine"]["epoch"] == 1


def test_the_old_file_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path))
    around: list[list[str]] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: around.append(files(tmp_path)), phase=Phase.PERSIST, rank=-1)
    engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=3)
    # CONTROL has decided by now which file goes, but it goes only once the new one is written.
    assert around == [[], ["checkpoint-epoch0001-iter00000002.pt"], ["checkpoint-epoch0002-iter00000004.pt"]]


def test_a_decision_that_could_not_be_written_is_not_remembered_as_kept(tmp_path: Path) -> None:
    blocked = tmp_path / "checkpoint-epoch0002-iter00000004.pt"
    blocked.mkdir()
    handler = Checkpoint(tmp_path)
    engine = engine_of(handler)
    data = list(DataLoader(dataset(), batch_size=22))
    with pytest.raises(OSError, match="epoch0002"):
        engine.run(data, max_epochs=3)
    blocked.rmdir()
    engine.run(data, max_epochs=3)
    # The file that the failed write should have superseded goes now.
    assert files(tmp_path) == ["checkpoint-epoch0003-iter00000006.pt"]


# ---- arguments --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="no folder"):
        Checkpoint(tmp_path / "file")
    engine = engine_of(Checkpoint(tmp_path / "file" / "below"))
    with pytest.raises(NotADirectoryError):
        engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=1)
    assert engine.state.iteration == 0


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
    engine.load_state_dict(Checkpoint.load(tmp_path / "checkpoint-epoch0001-iter00000011.pt"))
    engine.run(loader(False), max_epochs=2)
    assert noted.seen == 22


def test_new_values_of_other_metrics_are_no_new_value(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, monitor="score", keep=9))
    engine.connect(Events.EPOCH_COMPLETED(once=1), lambda engine: engine.state.metrics.update(score=1.0))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.state.metrics.update(other=2.0))
    engine.run(list(DataLoader(dataset(), batch_size=22)), max_epochs=3)
    assert [int(name[16:20]) for name in files(tmp_path)] == [1]
