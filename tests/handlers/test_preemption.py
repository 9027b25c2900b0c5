"""Preemption: real signals to real processes, and what is resumed ends bit-identical to what was never stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Phase, Update, allow, seed_everything
from signalfire.handlers import Average, Checkpoint, GradientAccumulation, LRScheduling, Metrics, Preemption, Validation
from signalfire.testing import check_handler, fingerprint, trace
from tests.kit import LIMIT, python, spread

EPOCHS = 3


@pytest.fixture(autouse=True)
def previous_handlers() -> Iterator[None]:
    """Whatever a test does, the signals' handlers are the same after it."""
    before = [(one, signal.getsignal(one)) for one in (signal.SIGTERM, signal.SIGUSR1)]
    yield
    for one, handler in before:
        found = signal.getsignal(one)
        signal.signal(one, handler)
        assert found == handler


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(28, 3, generator=generator), torch.randn(28, 2, generator=generator))
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))


def build(folder: Path, *handlers: Any, pause: float = 0.0) -> Engine:
    """Windows of 3 over epochs of 7 batches, so that nearly every iteration is inside one; dropout, a schedule, metrics."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(Metrics(loss=Average()))
    engine = Engine(Update.supervised(nn.functional.mse_loss, partial(torch.optim.Adam, lr=1e-2)), model=model, seed=0)
    engine.attach(
        GradientAccumulation(3),
        LRScheduling(partial(StepLR, step_size=2)),
        Metrics(train_loss=Average()),
        Validation(evaluator, [(torch.ones(2, 3), torch.ones(2, 2))], every="2it", prefix="val_"),
        Checkpoint(folder, every="5it"),
        *handlers,
    )
    if pause:
        engine.connect(Events.ITERATION_STARTED, lambda engine: time.sleep(pause))
    return engine


def uninterrupted(folder: Path) -> dict[str, str]:
    engine = build(folder)
    engine.run(loader(), max_epochs=EPOCHS)
    return fingerprint(engine)


def resumed(folder: Path) -> dict[str, str]:
    engine = build(folder)
    engine.load_state_dict(Checkpoint.load(folder))
    engine.run(loader(), max_epochs=EPOCHS)
    return fingerprint(engine)


def forked(main: Callable[[], object]) -> int:
    """Run something in a child process; its number."""
    process = os.fork()
    if process:
        return process
    try:
        main()
        os._exit(0)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 99)
    except BaseException:
        traceback.print_exc()  # into what is captured: the parent sees the status alone
        os._exit(98)


def ended(process: int) -> int:
    """The exit status of a child; negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_at(event: Any, *signals: signal.Signals) -> Callable[[Engine], None]:
    """Send signals to this process when an event comes."""

    def connect(engine: Engine) -> None:
        def kill(engine: Engine) -> None:
            for one in signals:
                os.kill(os.getpid(), one)

        engine.connect(event, kill)

    return connect


@pytest.mark.moderate
@pytest.mark.parametrize("iteration", spread(range(1, 7 * EPOCHS + 1), 5))
def test_stopped_in_any_iteration_and_resumed_the_run_ends_the_same(tmp_path: Path, iteration: int) -> None:
    expected = uninterrupted(tmp_path / "whole")
    engine = build(tmp_path / "run", Preemption(exit_status=None))
    kill_at(Events.FORWARD_STARTED(once=iteration), signal.SIGTERM)(engine)
    engine.run(loader(), max_epochs=EPOCHS)
    assert engine.state.iteration == iteration  # it was made whole
    assert engine.state.stop_reason == "preempted by SIGTERM"
    assert len(list((tmp_path / "run").glob(f"*iter{iteration:08d}-preempted"))) == 1
    assert resumed(tmp_path / "run") == expected


@pytest.mark.moderate
@pytest.mark.parametrize(
    "event",
    spread(
        [
            Events.STARTED,
            Events.EPOCH_STARTED(once=1),
            Events.EPOCH_STARTED(once=2),
            Events.GET_BATCH_STARTED(once=5),
            Events.ITERATION_STARTED(once=5),
            Events.OPTIMIZER_STEP_COMPLETED(once=6),
            Events.EVALUATION_STARTED(once=2),
            Events.EVALUATION_COMPLETED(once=3),
            Events.CHECKPOINT_SAVED(once=1),
            Events.EPOCH_COMPLETED(once=1),
            Events.EPOCH_COMPLETED(once=EPOCHS),
        ],
        4,
    ),
    ids=str,
)
def test_a_signal_at_any_event_saves_a_state_from_which_the_run_goes_on(tmp_path: Path, event: Any) -> None:
    expected = uninterrupted(tmp_path / "whole")
    engine = build(tmp_path / "run", Preemption(exit_status=None))
    kill_at(event, signal.SIGUSR1)(engine)
    engine.run(loader(), max_epochs=EPOCHS)
    assert engine.state.stop_reason == "preempted by SIGUSR1"
    with pytest.warns(UserWarning, match="nothing to do") if event == Events.EPOCH_COMPLETED(once=EPOCHS) else _quiet():
        assert resumed(tmp_path / "run") == expected


@pytest.mark.slow
@pytest.mark.parametrize("event", [Events.STARTED, Events.CHECKPOINT_LOADED, Events.GET_BATCH_STARTED], ids=str)
def test_stopped_again_as_soon_as_it_goes_on_nothing_is_lost(tmp_path: Path, event: Any) -> None:
    expected = uninterrupted(tmp_path / "whole")
    engine = build(tmp_path / "run", Preemption(exit_status=None))
    kill_at(Events.FORWARD_STARTED(once=11), signal.SIGTERM)(engine)
    engine.run(loader(), max_epochs=EPOCHS)
    again = build(tmp_path / "again", Preemption(exit_status=None))
    kill_at(event, signal.SIGTERM)(again)
    again.load_state_dict(Checkpoint.load(tmp_path / "run"))
    again.run(loader(), max_epochs=EPOCHS)
    assert again.state.iteration == (12 if event is Events.GET_BATCH_STARTED else 11)
    assert resumed(tmp_path / "again") == expected


class _quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


# Of what was saved as the last epoch ended, nothing is left to do.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:run.*nothing to do:UserWarning")
@pytest.mark.parametrize("seed", spread(range(8), 1))
def test_killed_at_random_moments_and_resumed_again_and_again(tmp_path: Path, seed: int) -> None:
    expected = uninterrupted(tmp_path / "whole")
    folder = tmp_path / "run"
    generator = random.Random(seed)
    begun_r, begun_w = os.pipe()

    def main() -> None:
        preemption = Preemption()
        engine = build(folder, preemption, pause=0.004)
        if folder.exists() and any(folder.iterdir()):
            engine.load_state_dict(Checkpoint.load(folder))
        engine.connect(Events.STARTED, lambda engine: os.write(begun_w, b".") and None, phase=Phase.PERSIST)

        begun = count(1)

        def wait_for_the_signal(engine: Engine) -> None:
            """However late the signal comes on a busy machine, at most a third of the run is made before it."""
            while next(begun) > 7 and preemption.preempted is None:
                time.sleep(0.001)

        engine.connect(Events.ITERATION_STARTED, wait_for_the_signal)
        engine.run(loader(), max_epochs=EPOCHS)
        end = {part: digest for part, digest in fingerprint(engine).items() if part != "handlers.preemption"}
        torch.save(end, tmp_path / "end.new")
        os.replace(tmp_path / "end.new", tmp_path / "end.pt")  # a signal may come in between

    stops = 0
    for _ in range(50):
        process = forked(main)
        assert os.read(begun_r, 1)
        time.sleep(generator.uniform(0, 0.05))
        os.kill(process, signal.SIGTERM)  # still there, if only to be waited for
        status = ended(process)
        if status in (0, -signal.SIGTERM):  # it was over before the signal came
            break
        assert status == 143
        assert list(folder.glob("*-preempted"))
        stops += 1
    assert stops >= 2
    if not (tmp_path / "end.pt").exists():
        assert resumed(folder) == expected
    else:
        assert torch.load(tmp_path / "end.pt", weights_only=True) == expected


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_preemption import *
torch.set_num_threads(1)
engine = build(Path({folder!r}), Preemption({arguments}))
@engine.on(Events.ITERATION_COMPLETED(once=2))
def show(engine):
    print("begun", flush=True)
@engine.on(Events.ITERATION_STARTED(once=4))
def wait_for_the_signal(engine):
    while engine.handlers["preemption"].preempted is None:
        time.sleep(0.001)
for event in (Events.PREEMPTED, Events.TERMINATED, Events.COMPLETED, Events.ENDED):
    engine.connect(event, lambda engine, event=event: print(event.name, flush=True))
engine.run(loader(), max_epochs=EPOCHS)
print("returned", engine.handlers["preemption"].preempted, engine.state.stop_reason)
"""


@pytest.mark.parametrize(
    ("one", "arguments", "status", "last"),
    spread(
        [
            (signal.SIGTERM, "", 143, "ENDED"),
            (signal.SIGUSR1, "", 138, "ENDED"),
            (signal.SIGUSR1, "exit_status=0", 0, "ENDED"),
            (signal.SIGHUP, "['SIGHUP'], exit_status=None", 0, "returned SIGHUP preempted by SIGHUP"),
        ],
        0,
    ),
    ids=str,
)
def test_a_process_leaves_with_the_exit_status_after_everything_was_emitted(
    tmp_path: Path, one: signal.Signals, arguments: str, status: int, last: str
) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run"), arguments=arguments)
    with python("-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(one)
        reported, errors = process.communicate(timeout=LIMIT)
    assert reported.split("\n")[:4] == ["PREEMPTED", "TERMINATED", "COMPLETED", "ENDED"]
    assert reported.rstrip().split("\n")[-1] == last
    assert process.returncode == status
    assert "Traceback" not in errors
    assert resumed(tmp_path / "run") == uninterrupted(tmp_path / "whole")


@pytest.mark.moderate
def test_a_signal_while_a_checkpoint_is_written_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = uninterrupted(tmp_path / "whole")
    engine = build(tmp_path / "run", Preemption(exit_status=None))
    real = os.fsync
    sent: list[int] = []

    def fsync(descriptor: int) -> None:
        if not sent:
            sent.append(engine.state.iteration)
            os.kill(os.getpid(), signal.SIGTERM)
        real(descriptor)

    saving = engine.connect(Events.ITERATION_COMPLETED(once=5), lambda engine: monkeypatch.setattr(os, "fsync", fsync))
    with saving:
        engine.run(loader(), max_epochs=EPOCHS)
    monkeypatch.undo()
    assert sent == [5]
    assert engine.state.iteration == 5
    saved = sorted(path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith("."))
    assert saved == ["checkpoint-epoch0001-iter00000005", "checkpoint-epoch0001-iter00000005-preempted"]
    for name in saved:
        Checkpoint.load(tmp_path / "run" / name)
    assert resumed(tmp_path / "run") == expected


def test_a_second_signal_of_the_same_kind_gets_to_the_previous_handler(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        engine = build(tmp_path, Preemption(exit_status=None, repeat_seconds=0))
        kill_at(Events.FORWARD_STARTED(once=3), signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)(engine)
        engine.run(loader(), max_epochs=1)
        assert came == [signal.SIGUSR1]
        assert engine.state.stop_reason == "preempted by SIGUSR1"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert came == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.moderate
def test_a_second_sigterm_ends_the_process_at_once_unless_it_is_a_repeat(tmp_path: Path) -> None:
    def main(repeat_seconds: float) -> None:
        engine = build(tmp_path / str(repeat_seconds), Preemption(repeat_seconds=repeat_seconds))
        kill_at(Events.FORWARD_STARTED(once=3), signal.SIGTERM, signal.SIGTERM)(engine)
        engine.run(loader(), max_epochs=1)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert ended(forked(partial(main, 0))) == -signal.SIGTERM
    assert ended(forked(partial(main, 60))) == 143
    assert not list((tmp_path / "0").iterdir())
    assert len(list((tmp_path / "60").glob("*-preempted"))) == 1


@pytest.mark.moderate
def test_a_forked_child_is_not_saved_and_dies_of_a_sigterm_but_not_of_what_all_processes_get(tmp_path: Path) -> None:
    engine = build(tmp_path, Preemption())
    statuses: list[int] = []

    @engine.on(Events.FORWARD_STARTED(once=3))
    def fork(engine: Engine) -> None:
        for one in (signal.SIGUSR1, signal.SIGTERM):
            statuses.append(ended(forked(lambda one=one: os.kill(os.getpid(), one))))  # type: ignore[misc]

    engine.run(loader(), max_epochs=1)
    assert statuses == [0, -signal.SIGTERM]
    assert engine.state.stop_reason is None


def test_everything_is_emitted_as_with_terminate_and_the_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    engine = build(tmp_path, preemption := Preemption())
    kill_at(Events.FORWARD_STARTED(once=3), signal.SIGTERM)(engine)
    seen = trace(engine)
    with pytest.raises(SystemExit) as left:
        engine.run(loader(), max_epochs=1)
    assert left.value.code == 143
    assert preemption.preempted == "SIGTERM"
    assert [event for event, _, _ in seen[-6:]] == [
        "ITERATION_COMPLETED", "PREEMPTED", "CHECKPOINT_SAVED", "TERMINATED", "COMPLETED", "ENDED",
    ]  # fmt: skip
    assert signal.getsignal(signal.SIGTERM) is before
    assert not engine.running
    assert all(parameter.grad is None for parameter in engine.model.parameters())  # the window is discarded


@pytest.mark.moderate
def test_minimum_bounds_do_not_hold_it_back_and_a_stop_that_was_asked_for_is_kept(tmp_path: Path) -> None:
    engine = build(tmp_path / "run", Preemption(exit_status=None))
    kill_at(Events.FORWARD_STARTED(once=4), signal.SIGTERM)(engine)
    stop = engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.terminate("enough"))
    engine.run(loader(), max_epochs=3, min_iters=6)
    assert (engine.state.iteration, engine.state.stop_reason) == (4, "preempted by SIGTERM")
    stop.detach()
    again = build(tmp_path / "run")
    again.load_state_dict(Checkpoint.load(tmp_path / "run"))
    again.run(loader(), max_epochs=3, min_iters=6)
    assert (again.state.iteration, again.state.stop_reason) == (6, "enough")


def test_after_an_error_and_when_detached_the_previous_handlers_are_back(tmp_path: Path) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    engine = build(tmp_path, Preemption())

    def fail(engine: Engine) -> None:
        assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] != before
        os.kill(os.getpid(), signal.SIGTERM)
        raise ArithmeticError("on purpose")

    with engine.connect(Events.FORWARD_STARTED(once=3), fail), pytest.raises(ArithmeticError):
        engine.run(loader(), max_epochs=1)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] == before
    found: list[bool] = []
    engine = build(tmp_path / "two", Preemption())
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: engine.detach("preemption"))
    engine.connect(
        Events.ITERATION_STARTED(after=1),
        lambda engine: found.append([signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] == before),
    )
    engine.run(loader(), max_epochs=1)
    assert found == [False, False, True, True, True, True]


def test_what_was_installed_over_it_is_left_alone(tmp_path: Path) -> None:
    def other(number: int, frame: object) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    engine = build(tmp_path, Preemption())
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: signal.signal(signal.SIGTERM, other) and None)
    with allow("W66"):
        engine.run(loader(), max_epochs=1)
    assert signal.getsignal(signal.SIGTERM) is other
    signal.signal(signal.SIGTERM, before)


def test_a_handler_that_calls_the_one_of_the_run_still_saves_it(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    engine = build(tmp_path, Preemption())

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def install(engine: Engine) -> None:
        own: Any = signal.getsignal(signal.SIGTERM)

        def chained(number: int, frame: Any) -> None:
            own(number, frame)

        signal.signal(signal.SIGTERM, chained)

    engine.run(loader(), max_epochs=1)
    signal.signal(signal.SIGTERM, before)
    assert not engine.findings.of_run().of("W66")


def test_outside_of_the_main_thread_a_run_is_refused(tmp_path: Path) -> None:
    engine = build(tmp_path, Preemption())
    errors: list[BaseException] = []

    def run() -> None:
        try:
            engine.run(loader(), max_epochs=1)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    thread.join()
    assert "main thread only, but this run is in 'worker'" in str(errors[0])
    assert engine.state.iteration == 0


@pytest.mark.filterwarnings("ignore:C31")
def test_a_run_that_nothing_saves_says_so() -> None:
    engine = Engine(
        Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)), model=nn.Linear(3, 2), seed=0
    )
    engine.attach(Preemption(exit_status=None))
    kill_at(Events.FORWARD_STARTED(once=2), signal.SIGTERM)(engine)
    with pytest.warns(UserWarning, match="stopped by SIGTERM, but nothing saved it"):
        engine.run(loader(), max_epochs=1)
    saved: list[int] = []
    engine.reset()
    engine.connect(Events.PREEMPTED, lambda engine: saved.append(engine.snapshots.take()["engine"]["iteration"]))
    engine.run(loader(), max_epochs=1)
    assert saved == [2]


@pytest.mark.slow
def test_without_a_signal_it_changes_nothing(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path / "one")
    engine = build(tmp_path / "two", preemption := Preemption())
    engine.run(loader(), max_epochs=EPOCHS)
    assert {part: digest for part, digest in fingerprint(engine).items() if part != "handlers.preemption"} == expected
    assert preemption.preempted is None
    assert not engine.has("preemption", Events.ITERATION_COMPLETED)
    check_handler(lambda: build(tmp_path / "three"), Preemption, list(loader()), changes_training=False, max_epochs=2)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Preemption\(signals='SIGTERM'\): expected a list of signal names"):
        Preemption("SIGTERM")
    for wrong in ("TERM", "SIGNOTHING"):
        with pytest.raises(ValueError, match=f"'{wrong}' is not a signal"):
            Preemption([wrong])
    with pytest.raises(ValueError, match="no process can catch SIGKILL"):
        Preemption(["SIGKILL"])
    with pytest.raises(TypeError, match=r"signals=\(\)"):
        Preemption(())
    for status in (-1, 256):
        with pytest.raises(ValueError, match=rf"Preemption\(exit_status={status}\)"):
            Preemption(exit_status=status)
    with pytest.raises(TypeError, match="exit_status='none'"):
        Preemption(exit_status="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"repeat_seconds=-1"):
        Preemption(repeat_seconds=-1)
