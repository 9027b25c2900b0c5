"""RemoteLogger: what a service has in the end, however it behaves meanwhile, and that the run never waits for it."""

from __future__ import annotations

import json
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from signalfire import Engine, Events, Phase
from signalfire.findings import FindingWarning
from signalfire.handlers import (
    Checkpoint,
    DistributedDataParallel,
    FastDevRun,
    RemoteLogger,
    TensorBoardLogger,
    Throughput,
    Validation,
)
from signalfire.handlers.remote_logger import Item
from tests.kit import build, evaluator_of, finished, linear, same, wait_until
from tests.processes import run_together
from tests.remote import DATA, Service, ServiceLogger, go_back_once, rows_of_csv, trainer


def run_of(service: Service, logger: RemoteLogger) -> list[Any]:
    return service.numbers(logger.remote_id)


def save_at(engine: Engine, iteration: int, states: list[Any]) -> None:
    """Take the state of a run, as a checkpoint does."""
    event = Events.ITERATION_COMPLETED(once=iteration)
    engine.connect(event, lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST)


def by_iteration(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: row[1])


def test_the_service_gets_the_rows_of_the_csv_logger_value_for_value(tmp_path: Path) -> None:
    service = Service()
    logger = ServiceLogger(service, tmp_path, every="1it")
    trainer(logger, folder=tmp_path).run(DATA, max_epochs=2)
    assert run_of(service, logger) == rows_of_csv(tmp_path / "log.csv")
    assert len([row for row in run_of(service, logger) if row[:2] == ("train/even", 6)]) == 2
    assert service.statuses == {logger.remote_id: ("FINISHED", None)}
    assert not logger.path.exists()
    assert len(service.threads) == 1
    assert threading.get_ident() not in service.threads


def test_what_is_logged_and_hyperparameters_are_sent(tmp_path: Path) -> None:
    service = Service()

    class Seeing(ServiceLogger):
        def send(self, items: Any) -> None:
            super().send(items)
            seen.extend(items)

    seen: list[Item] = []
    logger = Seeing(service, tmp_path)
    engine = build(linear(5, 1), logger)
    engine.log.hyperparameters(lr=0.1)

    def log(engine: Engine) -> None:
        figure = Figure(figsize=(1, 1))
        engine.log.image("image", torch.zeros(3, 2, 2))
        engine.log.figure("figure", figure)
        engine.log.text("text", "hello")
        engine.log.histogram("histogram", [1.0, 2.0])
        engine.log.hyperparameters(width=3)

    engine.connect(Events.ITERATION_COMPLETED(once=2), log)
    engine.run(DATA, max_epochs=1)
    assert service.parameters[logger.remote_id] == {"lr": 0.1, "width": 3}
    found = {name: (item.kind, value) for item in seen for name, value in item.values.items()}
    assert found["train/text"] == ("text", "hello")
    assert found["train/image"][0] == found["train/figure"][0] == "image"
    assert found["train/image"][1].startswith(b"\x89PNG")
    kind, (counts, edges) = found["train/histogram"]
    assert (kind, sum(counts), len(edges)) == ("histogram", 2, len(counts) + 1)


@pytest.mark.moderate
def test_a_figure_that_cannot_be_drawn_is_reported_by_each_logger_and_the_run_goes_on(tmp_path: Path) -> None:
    service = Service()
    engine = build(linear(5, 1), logger := ServiceLogger(service, tmp_path), TensorBoardLogger(tmp_path / "board"))
    broken = Figure(figsize=(1, 1))
    broken.text(0, 0, "$\\frac{$")

    def log(engine: Engine) -> None:
        engine.log.figure("broken", broken)
        engine.log.text("empty", "")
        engine.log("large", 1e300)
        engine.log("odd", float("nan"))

    engine.connect(Events.ITERATION_COMPLETED(once=[2, 3]), log)
    with pytest.warns(FindingWarning, match=r"cannot write 'broken': ValueError") as caught:
        engine.run(DATA, max_epochs=1)
    assert [str(one.message).partition("'")[2].partition("'")[0] for one in caught] == ["service_logger", "tensorboard"]
    assert ("train/large", 2, 1e300) in [row[:3] for row in run_of(service, logger)]
    (events,) = (tmp_path / "board").iterdir()
    assert events.read_bytes().count(b"train/empty") == 2


@pytest.mark.moderate
@pytest.mark.parametrize("first", [1, 5], ids=["from the start", "later"])
def test_a_service_that_refuses_costs_one_warning_and_no_row(tmp_path: Path, first: int) -> None:
    service = Service()
    logger = ServiceLogger(service, tmp_path, every="1it", capacity=10)
    engine = trainer(logger, folder=tmp_path)

    def fail(engine: Engine) -> None:
        wait_until(lambda: first == 1 or bool(service.numbers(logger.remote_id)))
        service.fails = ConnectionError("no route")

    def tried(engine: Engine) -> None:
        before = service.requests
        wait_until(lambda: service.requests > before + 2)

    def recover(engine: Engine) -> None:
        assert logger.path.exists()
        service.fails = None

    engine.connect(Events.STARTED if first == 1 else Events.ITERATION_COMPLETED(once=first), fail)
    engine.connect(Events.ITERATION_COMPLETED(once=first + 1), tried)
    engine.connect(Events.ITERATION_COMPLETED(once=50), recover)
    with pytest.warns(UserWarning, match="remote|service_logger") as warned:
        engine.run(DATA, max_epochs=10)
    assert [str(one.message) for one in warned] == [
        f"'service_logger': the rows of run '{logger.remote_id}' cannot be sent: ConnectionError: no route; training "
        "continues, the rows are kept, and the handler retries"
    ]
    assert run_of(service, logger) == rows_of_csv(tmp_path / "log.csv")
    assert not logger.path.exists()
    alone = trainer()
    alone.run(DATA, max_epochs=10)
    assert same(engine.model, alone.model)


def test_the_file_is_used_again_and_again(tmp_path: Path) -> None:
    """Whenever the service is slow, it fills; once it has caught up, it is removed; no row is lost in between."""
    service = Service()
    logger = ServiceLogger(service, tmp_path, every="1it", capacity=2)
    engine = trainer(logger, folder=tmp_path)
    seen: list[bool] = []

    def hang(engine: Engine) -> None:
        wait_until(lambda: not logger.path.exists())
        service.gate.clear()

    def answer(engine: Engine) -> None:
        seen.append(logger.path.exists())
        service.gate.set()

    engine.connect(Events.EPOCH_STARTED, hang)
    engine.connect(Events.EPOCH_COMPLETED, answer)
    engine.run(DATA, max_epochs=5)
    assert seen == [True] * 5
    assert run_of(service, logger) == rows_of_csv(tmp_path / "log.csv")
    assert not logger.path.exists()


@pytest.mark.parametrize("capacity", [1000, 3])
def test_a_service_that_hangs_holds_nothing_up_and_its_rows_can_be_sent_later(tmp_path: Path, capacity: int) -> None:
    service = Service()
    service.gate.clear()
    logger = ServiceLogger(service, tmp_path, every="1it", capacity=capacity, timeout=0.05)
    engine = trainer(logger, folder=tmp_path)
    with pytest.warns(UserWarning, match="could not be closed") as warned:
        engine.run(DATA, max_epochs=2)
    (message,) = [str(one.message) for one in warned]
    rows = rows_of_csv(tmp_path / "log.csv")
    lines = logger.path.read_text().splitlines()
    assert f"could not be closed within 0.05 s; {len(lines) - 1} unsent rows are in {str(logger.path)!r}" in message
    assert "resume the run, or call ServiceLogger(...).send_kept()" in message
    assert [item["number"] for item in map(json.loads, lines[1:])] == list(range(1, len(lines)))
    service.gate.set()
    wait_until(lambda: not any(thread.name == "service_logger" for thread in threading.enumerate()))
    again = ServiceLogger(service, tmp_path)
    assert again.send_kept() == len(lines) - 1
    assert run_of(service, logger) == rows
    assert service.statuses[logger.remote_id] == ("FINISHED", None)
    assert not logger.path.exists()
    assert again.send_kept() == 0


def test_an_answer_that_is_lost_doubles_nothing(tmp_path: Path) -> None:
    service = Service()
    service.answers_lost = 3
    logger = ServiceLogger(service, tmp_path, every="1it")
    engine = trainer(logger, folder=tmp_path)

    def ask_again(engine: Engine) -> None:
        wait_until(lambda: service.lost_at and service.requests > service.lost_at[0])  # by then the failure is noted

    engine.connect(Events.EPOCH_COMPLETED(once=1), ask_again)
    with pytest.warns(UserWarning, match="the answer was lost"):
        engine.run(DATA, max_epochs=3)
    assert run_of(service, logger) == rows_of_csv(tmp_path / "log.csv")


def test_the_run_puts_a_row_into_a_queue_and_calls_nothing_else(tmp_path: Path) -> None:
    """What a row costs is measured in tests/benchmarks; here: the run never enters the service, nor opens a file."""
    service = Service()
    service.gate.clear()
    logger = ServiceLogger(service, tmp_path, every="1it", timeout=0)
    engine = trainer(logger)
    engine.connect(Events.COMPLETED, lambda engine: wait_until(lambda: service.requests))
    engine.connect(Events.COMPLETED, lambda engine: sizes.append(logger.path.exists()))
    sizes: list[bool] = []
    with pytest.warns(UserWarning, match="could not be closed"):
        engine.run(DATA, max_epochs=20)
    assert sizes == [False]
    assert service.requests == 1
    service.gate.set()


def state_at(iteration: int, folder: Path, service: Service, **options: Any) -> tuple[Any, ServiceLogger]:
    """The state of a run at an iteration, and its logger; the run goes on for some iterations, and fails."""
    logger = ServiceLogger(service, folder, every="1it", **options)
    engine = trainer(logger)
    states: list[Any] = []
    save_at(engine, iteration, states)

    def fail(engine: Engine) -> None:
        raise RuntimeError("out of power")

    engine.connect(Events.ITERATION_COMPLETED(once=9), fail)
    with pytest.raises(RuntimeError, match="out of power"):
        engine.run(DATA, max_epochs=2)
    return states[0], logger


@pytest.mark.parametrize("iteration", [1, 4, 6, 8])
def test_a_resumed_run_continues_the_same_remote_run_and_doubles_nothing(tmp_path: Path, iteration: int) -> None:
    service = Service()
    state, first = state_at(iteration, tmp_path, service)
    assert service.statuses[first.remote_id] == ("FAILED", "RuntimeError: out of power")
    logger = ServiceLogger(service, tmp_path, every="1it")
    engine = trainer(logger)
    engine.load_state_dict(state)
    engine.run(DATA, max_epochs=2)
    trainer(folder=tmp_path).run(DATA, max_epochs=2)
    assert logger.remote_id == first.remote_id
    assert list(service.runs) == [first.remote_id]
    assert run_of(service, logger) == rows_of_csv(tmp_path / "log.csv")
    assert service.statuses[logger.remote_id] == ("FINISHED", None)


@pytest.mark.parametrize("capacity", [1000, 2])
def test_rows_that_were_not_sent_when_the_state_was_saved_are_sent_by_the_resumed_run(
    tmp_path: Path, capacity: int
) -> None:
    service = Service()
    service.gate.clear()
    with pytest.warns(UserWarning, match="could not be closed"):
        state, _ = state_at(4, tmp_path, service, capacity=capacity, timeout=0)
    service.gate.set()
    wait_until(lambda: not any(thread.name == "service_logger" for thread in threading.enumerate()))
    logger = ServiceLogger(service, tmp_path, every="1it")
    engine = trainer(logger)
    engine.load_state_dict(state)
    engine.run(DATA, max_epochs=2)
    trainer(folder=tmp_path).run(DATA, max_epochs=2)
    assert run_of(service, logger) == rows_of_csv(tmp_path / "log.csv")
    assert not logger.path.exists()


def test_rows_that_a_client_would_lose_with_its_process_are_in_the_file(tmp_path: Path) -> None:
    """A client that writes in a thread of its own: what it had not written is sent again, and nothing else is."""
    service = Service()

    class Buffering(ServiceLogger):
        written = 3  # items; those after them are lost

        def send(self, items: Any) -> None:
            buffer.extend(items)
            super().send(buffer[: self.written][len(stored) :])
            stored.extend(buffer[: self.written][len(stored) :])

        def confirmed(self) -> int:
            return len(stored)

    buffer: list[Item] = []
    stored: list[Item] = []
    first = Buffering(service, tmp_path, every="1it", run_id="run", name="service_logger")
    engine = trainer(first)
    states: list[Any] = []
    engine.connect(Events.ITERATION_COMPLETED(once=4), lambda engine: wait_until(lambda: len(buffer) >= 4))
    save_at(engine, 4, states)
    kept: list[bytes] = []
    engine.connect(Events.ITERATION_COMPLETED(once=5), lambda engine: kept.append(first.path.read_bytes()))
    engine.run(DATA, max_epochs=2)
    assert [json.loads(line)["number"] for line in kept[0].splitlines()[1:]] == [4, 5, 6]
    first.path.write_bytes(kept[0])  # as if it had been killed after the fourth iteration
    logger = ServiceLogger(service, tmp_path, every="1it")
    engine = trainer(logger, folder=tmp_path / "again")
    engine.load_state_dict(states[0])
    engine.run(DATA, max_epochs=2)
    trainer(folder=tmp_path / "whole").run(DATA, max_epochs=2)
    assert service.numbers("run") == rows_of_csv(tmp_path / "whole" / "log.csv")


def test_a_run_that_goes_back_and_repeats_itself_doubles_nothing(tmp_path: Path) -> None:
    service = Service()
    logger = ServiceLogger(service, tmp_path, every="1it")
    engine = trainer(logger, folder=tmp_path)
    go_back_once(engine, at=8, to=3)
    engine.run(DATA, max_epochs=2)
    assert list(service.runs) == [logger.remote_id]
    assert run_of(service, logger) == rows_of_csv(tmp_path / "log.csv")


@pytest.mark.parametrize("sent", [True, False], ids=["what came after was sent", "what came after waits"])
def test_a_run_that_goes_back_and_takes_another_way_continues_as_a_new_remote_run(tmp_path: Path, sent: bool) -> None:
    service = Service()
    logger = ServiceLogger(service, tmp_path, every="1it")
    engine = trainer(logger, folder=tmp_path)
    go_back_once(engine, at=8, to=3)

    def change(engine: Engine) -> None:
        engine.updates[0].optimizer.param_groups[0]["lr"] = 0.01  # type: ignore[union-attr]

    def once_more(engine: Engine) -> None:
        engine.log("old", 1.0)

    engine.connect(Events.ITERATION_COMPLETED(once=7), once_more)
    engine.connect(Events.CHECKPOINT_LOADED, change)
    if sent:
        engine.connect(Events.ITERATION_COMPLETED(once=8), lambda engine: wait_until(lambda: all_sent(service)))
    else:
        service.gate.clear()
        engine.connect(Events.CHECKPOINT_LOADED, lambda engine: service.gate.set())
    engine.run(DATA, max_epochs=2)
    rows = rows_of_csv(tmp_path / "log.csv")
    assert by_iteration(run_of(service, logger)) == by_iteration(rows)
    assert service.statuses[logger.remote_id] == ("FINISHED", None)
    if sent:
        old, new = service.runs
        assert new == f"{old}-1" == logger.remote_id
        assert service.statuses[old] == (
            "KILLED",
            "the run went back to iteration 3 and logged different values from iteration 4 onward, "
            f"so it continues as {new}",
        )


def all_sent(service: Service, row: int = 7) -> bool:
    """Whether the first remote run has the last value of a row."""
    return any((name, at) == ("lr", row) for name, at, _ in next(iter(service.runs.values())))


def test_a_run_that_is_resumed_after_it_went_back_finds_its_new_remote_run_again(tmp_path: Path) -> None:
    """Killed after it took another way, and resumed from before: it takes the way again, and joins the run that is there."""
    service = Service()
    states: list[Any] = []

    def make() -> tuple[Engine, ServiceLogger]:
        logger = ServiceLogger(service, tmp_path, every="1it")
        engine = trainer(logger, folder=tmp_path)
        go_back_once(engine, at=8, to=3)

        def change(engine: Engine) -> None:
            if engine.state.iteration == 3:
                engine.updates[0].optimizer.param_groups[0]["lr"] = 0.01  # type: ignore[union-attr]

        engine.connect(Events.CHECKPOINT_LOADED, change)
        save_at(engine, 2, states)
        # Once the row of this iteration is in the queue, so that the first remote run has it each time.
        engine.connect(
            Events.ITERATION_COMPLETED(once=8),
            lambda engine: wait_until(lambda: all_sent(service, row=8)),
            phase=Phase.PERSIST,
            rank=100,
        )
        return engine, logger

    engine, logger = make()
    engine.run(DATA, max_epochs=2)
    ids = list(service.runs)
    before = {one: list(service.runs[one]) for one in ids}
    engine, logger = make()
    engine.load_state_dict(states[0])
    engine.run(DATA, max_epochs=2)
    assert list(service.runs) == ids
    assert service.runs == before
    assert logger.remote_id == ids[-1]


def test_values_that_no_run_repeats_are_left_as_they_are_if_asked(tmp_path: Path) -> None:
    service = Service()
    state, first = state_at(4, tmp_path, service)
    logger = ServiceLogger(service, tmp_path, every="1it", keep_different=True)
    engine = trainer(logger, folder=tmp_path)
    engine.load_state_dict(state)
    engine.connect(Events.CHECKPOINT_LOADED, lambda engine: engine.updates[0].optimizer.param_groups[0].update(lr=0.01))
    before = list(service.runs[first.remote_id])
    engine.run(DATA, max_epochs=2)
    assert list(service.runs) == [first.remote_id]
    rows = run_of(service, logger)
    assert rows[: len(before)] == before
    assert [row[1] for row in rows if row[0] == "train/loss"] == list(range(1, 13))


def test_rates_measured_of_the_machine_are_no_difference(tmp_path: Path) -> None:
    service = Service()

    def make() -> Engine:
        logger = ServiceLogger(service, tmp_path, every="1it", run_id="mine")
        return trainer(logger, Throughput(every="2it", warmup=1))

    engine = make()
    states: list[Any] = []
    save_at(engine, 6, states)
    engine.run(DATA, max_epochs=2)
    engine = make()
    engine.load_state_dict(states[0])
    engine.run(DATA, max_epochs=2)
    assert list(service.runs) == ["mine"]
    names = [row[:2] for row in service.numbers("mine") if row[0] == "train/batches_per_second"]
    assert len(names) == len(set(names))


def test_how_a_run_ends_is_its_status(tmp_path: Path) -> None:
    service = Service()

    def ended(do: Any) -> Any:
        logger = ServiceLogger(service, tmp_path)
        engine = build(linear(5, 1), logger)
        engine.connect(Events.ITERATION_COMPLETED(once=3), do)
        with suppress(KeyboardInterrupt, ZeroDivisionError):
            engine.run(DATA, max_epochs=1)
        return service.statuses[logger.remote_id]

    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    assert ended(lambda engine: None) == ("FINISHED", None)
    assert ended(lambda engine: engine.terminate("enough")) == ("FINISHED", None)
    assert ended(lambda engine: 1 / 0) == ("FAILED", "ZeroDivisionError: division by zero")
    assert ended(interrupt) == ("KILLED", None)
    assert ended(lambda engine: engine.boundary.preempt("SIGTERM")) == ("RUNNING", None)


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_trials_and_sanity_checks_send_nothing(tmp_path: Path) -> None:
    service = Service()
    engine = build(linear(5, 1), ServiceLogger(service, tmp_path / "a"), FastDevRun(2))
    engine.run(DATA, max_epochs=1)
    assert service.requests == 0
    assert not (tmp_path / "a").exists()
    model = linear(5, 1)
    evaluator = evaluator_of(model)
    evaluator.attach(ServiceLogger(service, tmp_path / "b"))
    engine = build(model, Validation(evaluator, DATA[:1], sanity=1))
    engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: engine.terminate("before the validation"))
    engine.run(DATA, max_epochs=1)
    assert service.requests == 0


def test_a_new_run_puts_what_another_one_left_aside(tmp_path: Path) -> None:
    service = Service()
    service.fails = ConnectionError("down")
    logger = ServiceLogger(service, tmp_path, timeout=0, every="3it")
    with pytest.warns(UserWarning, match="2 unsent rows|cannot be sent"):
        build(linear(5, 1), logger).run(DATA, max_epochs=1)
    first = logger.remote_id
    wait_until(lambda: not any(thread.name == "service_logger" for thread in threading.enumerate()))
    service.fails = None
    logger = ServiceLogger(service, tmp_path, every="3it")
    with pytest.warns(UserWarning, match="2 rows of run .* were never sent and are now in .*unsent.1.jsonl"):
        build(linear(5, 1), logger).run(DATA, max_epochs=1)
    assert list(service.runs) == [logger.remote_id]
    assert logger.send_kept(tmp_path / "service_logger-unsent.1.jsonl") == 2
    assert [row[1] for row in service.numbers(first)] == [3, 3, 6, 6]


def test_each_training_has_a_remote_run_and_continues_it(tmp_path: Path) -> None:
    service = Service()
    logger = ServiceLogger(service, tmp_path, every="6it")
    engine = build(linear(5, 1), logger)
    engine.run(DATA, max_epochs=1)
    first = logger.remote_id
    engine.run(DATA, max_epochs=2)
    assert logger.remote_id == first
    assert [row[1] for row in service.numbers(first)] == [6, 6, 12, 12]
    engine.reset()
    engine.run(DATA, max_epochs=1)
    assert logger.remote_id != first
    assert [row[1] for row in service.numbers(first)] == [6, 6, 12, 12]


def test_generators_and_weights_are_those_of_a_run_without_it(tmp_path: Path) -> None:
    def draws(*handlers: Any) -> Any:
        random.seed(1)
        np.random.seed(1)
        engine = trainer(*handlers)
        engine.run(DATA, max_epochs=2)
        return engine.model, (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())

    (one, drawn), (other, drawn_too) = draws(), draws(ServiceLogger(Service(), tmp_path, every="1it"))
    assert same(one, other)
    assert drawn == drawn_too


def send_one_run(folder: str) -> tuple[int, list[Any], list[Any]]:
    """Train in one of several processes; what this one has sent, and what was logged."""
    service = Service()
    engine = trainer(ServiceLogger(service, Path(folder), every="1it"), DistributedDataParallel(), folder=Path(folder))
    engine.run(DATA, max_epochs=1)
    rows = [row for run_id in service.runs for row in service.numbers(run_id)]
    return service.requests, rows, rows_of_csv(Path(folder) / "log.csv")


@pytest.mark.moderate
def test_of_several_processes_the_first_sends_one_run(tmp_path: Path) -> None:
    (asked, rows, logged), (asked_by_other, rows_of_other, _) = run_together(send_one_run, 2, str(tmp_path))
    assert asked > 0
    assert rows == logged
    assert (asked_by_other, rows_of_other) == (0, [])


def test_without_its_package_the_error_names_the_extra(tmp_path: Path) -> None:
    class Absent(ServiceLogger):
        needs = ("no_such_client",), "absent"

    with pytest.raises(
        ImportError,
        match=r"^Absent: no_such_client is not installed; install the extra: pip install signalfire\[absent\]$",
    ):
        Absent(Service(), tmp_path)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RemoteLogger\(run_id='a b'\): expected only letters, digits, '_' and '-'"):
        RemoteLogger(tmp_path, run_id="a b")
    with pytest.raises(ValueError, match=r"RemoteLogger\(capacity=0\)"):
        RemoteLogger(tmp_path, capacity=0)
    with pytest.raises(ValueError, match=r"RemoteLogger\(timeout=-1\)"):
        RemoteLogger(tmp_path, timeout=-1)


def test_a_checkpoint_beside_it_refers_to_rows_that_are_safe(tmp_path: Path) -> None:
    service = Service()
    service.gate.clear()
    logger = ServiceLogger(service, tmp_path, every="1it", timeout=0)
    engine = trainer(logger, Checkpoint(tmp_path / "saved", every="4it"))
    engine.connect(Events.ITERATION_COMPLETED(once=5), lambda engine: kept.append(logger.path.read_text()))
    kept: list[str] = []
    with pytest.warns(UserWarning, match="could not be closed"):
        engine.run(DATA, max_epochs=1)
    assert [json.loads(line)["iteration"] for line in kept[0].splitlines()[1:]] == [1, 2, 2, 3, 4, 4]
    service.gate.set()


@pytest.mark.slow
def test_a_client_is_imported_only_once_a_run_begins() -> None:
    program = """
import sys, tempfile
from signalfire.handlers import MLflowLogger, TrackioLogger, WandbLogger
folder = tempfile.mkdtemp()
for kind in WandbLogger, TrackioLogger, MLflowLogger:
    try:
        kind("x", folder)
    except ImportError as error:
        assert "signalfire[" in str(error)
print(sorted({"mlflow", "wandb", "trackio"} & sys.modules.keys()))
"""
    assert finished("-c", program).stdout == "[]\n"
