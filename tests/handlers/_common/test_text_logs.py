"""What CSVLogger and JSONLinesLogger promise alike: after any stop and a resume, the file of a run that was never stopped."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from signalfire import Engine, Events, FindingWarning, Phase, Update
from signalfire.checkpoints import Files
from signalfire.handlers import (
    Average,
    Checkpoint,
    CSVLogger,
    GradientAccumulation,
    JSONLinesLogger,
    LRScheduling,
    Metrics,
    Validation,
)
from tests import kit
from tests.kit import evaluator_of, linear, quick

Logger = Callable[..., Any]


@pytest.fixture(params=[CSVLogger, JSONLinesLogger])
def kind(request: pytest.FixtureRequest) -> Logger:
    logger: Logger = request.param
    return logger


def batches() -> list[tuple[Tensor, Tensor]]:
    return kit.batches(5, targets=2)


def engine_of(*handlers: Any) -> Engine:
    """Trains with a schedule and a window that is ragged at the epoch's end; has metrics of every kind of moment."""
    model = linear(5, 2)
    evaluator = evaluator_of(model)
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=model, seed=0)
    engine.attach(
        GradientAccumulation(2),
        LRScheduling(partial(ExponentialLR, gamma=0.9)),
        Metrics(train_loss=Average()),
        Validation(evaluator, batches()[:2], every="3it", prefix="val_", at_start=True),
        *handlers,
    )

    @engine.on(Events.ITERATION_COMPLETED(every=2))
    def measure(engine: Engine) -> None:  # new at iteration 2, written at 3
        engine.state.metrics["mine"] = float(engine.state.iteration)

    return engine


def saving(engine: Engine) -> list[tuple[int, bytes]]:
    """Save at every moment at which a checkpoint may be taken."""
    saved: list[tuple[int, bytes]] = []

    def save(engine: Engine) -> None:
        buffer = io.BytesIO()
        torch.save(engine.state_dict(), buffer)
        saved.append((engine.state.iteration, buffer.getvalue()))

    for event in (Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
        engine.connect(event, save, phase=Phase.PERSIST)
    return saved


def loaded(file: bytes) -> Any:
    return torch.load(io.BytesIO(file), weights_only=True)


def uninterrupted(kind: Logger, path: Path, every: str = "1it") -> tuple[bytes, list[tuple[int, bytes]]]:
    engine = engine_of(kind(path, every=every))
    saved = saving(engine)
    engine.run(batches(), max_epochs=2)
    return path.read_bytes(), saved


@pytest.mark.moderate
@pytest.mark.parametrize("every", quick(["1it", "3it", "100it"], "3it"))
def test_resumed_at_any_moment_the_file_is_the_same_byte_for_byte(kind: Logger, tmp_path: Path, every: str) -> None:
    path = tmp_path / "log"
    whole, saved = uninterrupted(kind, path, every)
    assert len(saved) == 14
    for moment, (_, file) in enumerate(saved[:-1]):  # the last is that of a run that is over
        path.write_bytes(whole)  # the stopped run had gone on to the end of it
        engine = engine_of(kind(path, every=every))
        engine.load_state_dict(loaded(file))
        engine.run(batches(), max_epochs=2)
        assert path.read_bytes() == whole, moment


@pytest.mark.slow
def test_resumed_after_a_kill_at_any_byte_nothing_is_lost_doubled_or_torn(kind: Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole, saved = uninterrupted(kind, path)
    file = next(file for iteration, file in saved if iteration == 4)
    state = loaded(file)
    known = next(one for name, one in state["handlers"].items() if "logger" in name)["file"]["length"]
    for length in range(known, min(known + 250, len(whole))):
        path.write_bytes(whole[:length])
        engine = engine_of(kind(path, every="1it"))
        engine.load_state_dict(loaded(file))
        engine.run(batches(), max_epochs=2)
        assert path.read_bytes() == whole, length
    assert not list(tmp_path.glob("log.*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["ITERATION_STARTED", "UPDATE_COMPLETED", "ITERATION_COMPLETED", "EVALUATION_COMPLETED"]
)
def test_a_killed_process_and_its_resume_leave_the_file_of_one_run(kind: Logger, tmp_path: Path, moment: str) -> None:
    expected, _ = uninterrupted(kind, tmp_path / "whole")
    path, state = tmp_path / "log", tmp_path / "state.pt"
    process = os.fork()
    if process == 0:
        engine = engine_of(kind(path, every="1it"))

        def save(engine: Engine) -> None:
            torch.save(engine.state_dict(), state)

        def die(engine: Engine) -> None:
            if engine.state.iteration >= 8:
                os.kill(os.getpid(), signal.SIGKILL)

        engine.connect(Events.ITERATION_COMPLETED(once=5), save, phase=Phase.PERSIST)
        engine.connect(Events[moment], die, phase=Phase.PERSIST)
        engine.run(batches(), max_epochs=2)
        os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(path.read_bytes()) > len(expected) // 2  # what was written is there
    engine = engine_of(kind(path, every="1it"))
    engine.load_state_dict(torch.load(state, weights_only=True))
    engine.run(batches(), max_epochs=2)
    assert path.read_bytes() == expected


def test_what_a_process_left_that_was_killed_before_its_file_had_a_name_goes(kind: Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    process = os.fork()
    if process == 0:
        os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        engine_of(kind(path, every="1it")).run(batches(), max_epochs=2)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    assert [left.name for left in tmp_path.iterdir()] == [".log.new"]
    engine_of(kind(path, every="1it")).run(batches(), max_epochs=2)
    assert [left.name for left in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("synced_files", [True, False])
def test_what_a_checkpoint_knows_of_is_on_the_disk_before_it_is_written(
    synced_files: bool, kind: Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    synced: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            synced.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    log = kind(path, every="1it")
    engine = engine_of(log)
    checkpoint = Checkpoint(tmp_path / "runs", every="4it", sync_files=synced_files)
    engine.attach(checkpoint)
    known: list[tuple[int, bool]] = []

    class Looking(Files):
        def rename(self, old: Path, new: Path) -> None:
            if new.name.startswith("checkpoint-"):  # it is there from now on
                reported = torch.load(old / "state.pt", weights_only=True)["handlers"][log.name]["file"]["length"]
                known.append((reported, reported in synced))
            super().rename(old, new)

    checkpoint.files = Looking()
    engine.run(batches(), max_epochs=2)
    assert len(known) == 2
    assert [there for _, there in known] == [synced_files] * 2
    assert synced[-1] == path.stat().st_size  # at the end, in any case


@pytest.mark.moderate
def test_a_log_that_cannot_be_synced_costs_no_checkpoint_of_an_error(
    kind: Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if engine.state.iteration >= 6 and os.path.samestat(os.fstat(descriptor), path.stat()):
            raise OSError(28, "No space left on device")
        real(descriptor)

    engine = engine_of(kind(path, every="1it"), Checkpoint(tmp_path / "runs", every="3it", on_exception=True))
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"), pytest.warns(RuntimeWarning, match="could not be synced"):
        engine.run(batches(), max_epochs=2)
    monkeypatch.undo()
    saved = Checkpoint.load(tmp_path / "runs")
    assert saved["engine"]["iteration"] == 5  # the last of which all was done
    assert saved["origin"]["path"].endswith("-exception")


@pytest.mark.moderate
def test_a_file_that_the_checkpoint_does_not_know_is_set_aside_and_its_earlier_records_kept(
    kind: Logger, tmp_path: Path
) -> None:
    path = tmp_path / "log.txt"
    whole, saved = uninterrupted(kind, path)
    file = next(file for iteration, file in saved if iteration == 7)
    changed = whole.replace(b"lr", b"LR", 1)  # edited manually, long before iteration 7
    path.write_bytes(changed)
    engine = engine_of(kind(path, every="1it"))
    engine.load_state_dict(loaded(file))
    with pytest.warns(
        FindingWarning, match="W34.*log.txt' of .* loaded state left off: the last row before iteration 7 is .*6"
    ):
        engine.run(batches(), max_epochs=2)
    assert path.read_bytes() == changed
    assert (tmp_path / "log.1.txt").read_bytes() == changed
    path.write_bytes(b"not a log\n\xff\n" + whole[: len(whole) // 3])  # and torn besides
    engine = engine_of(kind(path, every="1it"))
    engine.load_state_dict(loaded(file))
    with pytest.warns(FindingWarning, match="W34"):
        engine.run(batches(), max_epochs=2)
    assert (tmp_path / "log.2.txt").read_bytes().startswith(b"not a log")
    assert set(path.read_bytes().splitlines()) <= set(whole.splitlines())
    late = [line for line in whole.splitlines()[1:] if kind("x").iteration_of(line.decode()) >= 7]
    assert path.read_bytes().splitlines()[-len(late) :] == late


def test_without_its_file_a_resumed_run_begins_with_what_the_checkpoint_says(kind: Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole, saved = uninterrupted(kind, path)
    file = next(file for iteration, file in saved if iteration == 7)
    engine = engine_of(kind(tmp_path / "elsewhere" / "log", every="1it"))
    engine.load_state_dict(loaded(file))
    with pytest.warns(FindingWarning, match="W34.*the file does not exist"):
        engine.run(batches(), max_epochs=2)
    lines = (tmp_path / "elsewhere" / "log").read_bytes().splitlines(keepends=True)
    header = 1 if kind is CSVLogger else 0
    assert whole.endswith(b"".join(lines[header:]))
    assert lines[:header] == whole.splitlines(keepends=True)[:header]
    assert kind(path).iteration_of(lines[header].decode()) == 7


def test_a_log_that_was_cut_back_by_a_resume_from_an_older_checkpoint_is_not_continued_from_a_newer_one_in_silence(
    kind: Logger, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    _, saved = uninterrupted(kind, path)
    older, newer = (next(file for iteration, file in saved if iteration == place) for place in (4, 9))
    engine = engine_of(kind(path, every="1it"))
    engine.load_state_dict(loaded(older))
    engine.run(batches(), max_iters=6)
    engine = engine_of(kind(path, every="1it"))
    engine.load_state_dict(loaded(newer))
    with pytest.warns(FindingWarning, match="W34.*the last row before iteration 9 is .*6"):
        engine.run(batches(), max_epochs=2)


@pytest.mark.moderate
def test_a_run_that_begins_anew_sets_the_file_of_another_aside(kind: Logger, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    first, _ = uninterrupted(kind, path)
    path.write_bytes(first + b"{torn")
    second, _ = uninterrupted(kind, path)
    assert second == first
    assert (tmp_path / "log.1.txt").read_bytes() == first + b"{torn"
    uninterrupted(kind, path)
    assert (tmp_path / "log.2.txt").read_bytes() == first
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.moderate
def test_a_run_that_is_called_again_goes_on_with_the_file(kind: Logger, tmp_path: Path) -> None:
    whole, _ = uninterrupted(kind, tmp_path / "whole")
    engine = engine_of(kind(tmp_path / "log", every="1it"))
    engine.run(batches(), max_epochs=1)
    engine.run(batches(), max_epochs=2)
    assert (tmp_path / "log").read_bytes() == whole
    engine.reset()
    torch.manual_seed(3)
    engine.run(batches(), max_epochs=1)
    assert (tmp_path / "log.1").read_bytes() == whole


@pytest.mark.moderate
def test_what_is_measured_at_the_start_of_a_resumed_run_is_not_written_again(kind: Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"

    def build() -> Engine:
        engine = engine_of(kind(path, every="1it"))
        evaluator = evaluator_of(engine.model)
        engine.connect(Events.STARTED, lambda engine: engine.evaluate(evaluator, batches(), prefix="first_") and None)
        return engine

    engine = build()
    saved = saving(engine)
    engine.run(batches(), max_epochs=2)
    whole = path.read_bytes()
    assert whole.count(b"first_loss") == 1
    engine = build()
    engine.load_state_dict(loaded(saved[4][1]))
    engine.run(batches(), max_epochs=2)
    assert path.read_bytes() == whole
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.moderate
def test_a_logger_that_the_checkpoint_does_not_know_begins_where_it_is(kind: Logger, tmp_path: Path) -> None:
    whole, _ = uninterrupted(kind, tmp_path / "whole")
    engine = engine_of()
    saved = saving(engine)
    engine.run(batches(), max_epochs=2)
    file = next(file for iteration, file in saved if iteration == 6)
    engine = engine_of(kind(tmp_path / "log", every="1it"))
    engine.load_state_dict(loaded(file))
    engine.run(batches(), max_epochs=2)
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert lines == whole.splitlines()[:1] * (kind is CSVLogger) + [
        line for line in whole.splitlines()[1:] if kind("x").iteration_of(line.decode()) > 6
    ]


FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_text_logs import *
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
engine = engine_of({kind}({path!r}, every="1it"))
try:
    engine.run(batches(), max_epochs=2)
except OSError as error:
    print(error.errno, *error.__notes__)
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_names_the_handler_and_the_earlier_records_stay(
    kind: Logger, tmp_path: Path
) -> None:
    whole, _ = uninterrupted(kind, tmp_path / "whole")
    path = tmp_path / "log"
    limit = len(whole) // 2
    script = FULL.format(folder=str(Path(__file__).parent), limit=limit, kind=kind.__name__, path=str(path))
    reported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert kind.__name__ in reported
    assert str(path) in reported
    text = path.read_bytes()
    assert whole.startswith(text)
    assert text.endswith(b"\n")
    assert limit - 300 < len(text) <= limit


def test_an_error_leaves_a_complete_file_that_is_closed(kind: Logger, tmp_path: Path) -> None:
    whole, _ = uninterrupted(kind, tmp_path / "whole")
    path = tmp_path / "log"
    engine = engine_of(kind(path, every="1it"))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    engine.connect(Events.ITERATION_STARTED(once=6), fail)
    with pytest.raises(ArithmeticError):
        engine.run(batches(), max_epochs=2)
    assert whole.startswith(path.read_bytes())
    assert str(path) not in {os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd")}


def test_the_loss_of_an_update_that_was_not_made_is_not_written(kind: Logger, tmp_path: Path) -> None:
    models = {name: nn.Linear(5, 2) for name in "ab"}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            return nn.functional.mse_loss(models[name](batch[0]), batch[1])

        return Update.from_function(
            function, partial(torch.optim.SGD, lr=0.1), name=name, parameters=lambda engine: models[name].parameters()
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(kind(tmp_path / "log", every="1it"))

    @engine.on(Events.ITERATION_STARTED)
    def choose(engine: Engine) -> None:
        if engine.state.iteration % 2:
            engine.state.plan = engine.updates[:1]

    engine.run(batches(), max_epochs=1)
    text = (tmp_path / "log").read_text()
    assert text.count("loss/a") == 5
    assert text.count("loss/b") == 2


def test_what_one_run_left_out_is_written_in_the_next(kind: Logger, tmp_path: Path) -> None:
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=nn.Linear(5, 2), seed=0)
    engine.attach(kind(tmp_path / "log", every="1it"))
    before = engine.state_dict()
    leaves_out = engine.connect(Events.ITERATION_STARTED(once=3), lambda engine: setattr(engine.state, "plan", []))
    written = []
    for _ in range(2):
        engine.run(batches(), max_epochs=1)
        written.append((tmp_path / "log").read_text().count("loss"))
        leaves_out.detach()
        engine.load_state_dict(before)
    assert written == [4, 5]


def test_two_loggers_of_one_file_are_refused(kind: Logger, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="control the file"):
        engine_of(kind(tmp_path / "log", name="one"), kind(tmp_path / "." / "log", name="two"))


def test_switched_off_nothing_is_written(kind: Logger, tmp_path: Path) -> None:
    engine = engine_of(kind(tmp_path / "logs" / "log", name="log"))
    with engine.without("log"):
        engine.run(batches(), max_epochs=1)
    engine.dry_run = True
    engine.run(batches(), max_epochs=2)
    assert not (tmp_path / "logs").exists()


def test_bad_arguments_are_refused(kind: Logger, tmp_path: Path) -> None:
    name = kind.__name__
    for every in ("1ep", "5st", "often"):
        with pytest.raises(ValueError, match=rf"{name}\(every='{every}'\)"):
            kind(tmp_path / "log", every=every)
    with pytest.raises(TypeError, match=rf"{name}\(time='yes'\)"):
        kind(tmp_path / "log", time="yes")
    with pytest.raises(IsADirectoryError, match=rf"{name}\(path=.*this is a folder"):
        kind(tmp_path)


def test_times_are_written_if_wanted(kind: Logger, tmp_path: Path) -> None:
    engine = engine_of(kind(tmp_path / "log", every="5it", time=True))
    engine.run(batches(), max_epochs=1)
    lines = (tmp_path / "log").read_text().splitlines()
    if kind is CSVLogger:
        times = [float(line.split(",")[3]) for line in lines[1:]]
        assert lines[0] == "epoch,iteration,step,time,name,value"
    else:
        times = [json.loads(line)["time"] for line in lines]
    assert times == sorted(times)
    assert times[0] > 1.7e9


def test_a_log_that_lost_its_end_is_shorter_and_differs_in_no_row(kind: Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole, saved = uninterrupted(kind, path)
    file = next(file for iteration, file in saved if iteration == 7)
    kept = [
        line
        for line in whole.splitlines(keepends=True)
        if kind is CSVLogger or kind("x").iteration_of(line.decode()) < 7
    ]
    path.write_bytes(b"".join(kept[:8] if kind is CSVLogger else kept))
    engine = engine_of(kind(path, every="1it"))
    engine.load_state_dict(loaded(file))
    with pytest.warns(FindingWarning, match="W34.*and the file is shorter than the one .* rows may be missing"):
        engine.run(batches(), max_epochs=2)


def test_a_log_that_is_moved_at_the_end_keeps_its_rows(kind: Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    engine = engine_of(kind(path, every="1it"))
    engine.connect(Events.COMPLETED, lambda engine: path.rename(tmp_path / "final") and None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no row is lost
        engine.run(batches(), max_epochs=1)
    assert len((tmp_path / "final").read_text().splitlines()) >= len(batches())


def test_the_rows_of_an_evaluators_log_have_its_position(kind: Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    model = linear(5, 2)
    evaluator = evaluator_of(model)
    evaluator.attach(kind(path))
    engine = kit.build(model, Validation(evaluator, batches()[:2], every="2it"))
    with pytest.warns(FindingWarning, match="W62.* rows have the epochs and iterations of the evaluator"):
        engine.run(batches(), max_epochs=1)
    rows = [line for line in path.read_text().splitlines(keepends=True) if "loss" in line]
    assert {kind("x").iteration_of(row) for row in rows} == {2}
