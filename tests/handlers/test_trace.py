"""Trace: equal runs have equal records, also where they are resumed, and nothing of a trace is lost silently."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.findings import FindingWarning
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    DistributedDataParallel,
    ElasticDataParallel,
    GradientAccumulation,
    Metrics,
    MicroBatching,
    SharpnessAwareMinimization,
    Trace,
)
from signalfire.traces import compare
from signalfire.traces.contents import contents_of, digests_of
from signalfire.traces.files import TraceFile, parts_of
from tests.kit import assert_same, batches, build, evaluator_of, mlp
from tests.processes import run_together

ADAM = partial(torch.optim.Adam, lr=0.01)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def engine_of(*handlers: Handler, **options: Any) -> Engine:
    engine = build(mlp(5, 4, 1, nn.Dropout(0.3)), optimizer=ADAM, **options)
    engine.attach(*handlers)
    torch.manual_seed(1)
    return engine


def records(path: Path) -> list[dict[str, Any]]:
    return [one for line in path.read_text().splitlines() if "event" in (one := json.loads(line))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def whole(path: Path, **options: Any) -> Path:
    engine_of(Trace(path, every="1it", **options), Metrics(loss=Average())).run(batches(), max_epochs=3)
    return path


def resumed(folder: Path, path: Path, at: int, **options: Any) -> None:
    engine = engine_of(
        Trace(path, every="1it", **options), Metrics(loss=Average()), Checkpoint(folder, every="4it", keep=9)
    )
    torch.manual_seed(99)
    engine.load_state_dict(Checkpoint.load(next(folder.glob(f"*iter{at:08}"))))
    engine.run(batches(), max_epochs=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [MicroBatching(2, halve_on_oom=False)],
        lambda: [GradientAccumulation(2)],
        lambda: [SharpnessAwareMinimization()],
        lambda: [EMA(0.9), Metrics(loss=Average())],
    ],
)
def test_equal_runs_have_equal_traces_in_any_order_of_attaching(make: Any, tmp_path: Path) -> None:
    engine_of(Trace(tmp_path / "a" / "trace.jsonl", every="1it"), *make()).run(batches(), max_epochs=2)
    engine_of(*reversed(make()), Trace(tmp_path / "b" / "other", every="1it")).run(batches(), max_epochs=2)
    found = compare(tmp_path / "a" / "trace.jsonl", tmp_path / "b" / "other")
    assert found.equal, found
    assert not found.unlike
    assert found.ends == (12, 12)


@pytest.mark.moderate
def test_steps_that_compute_gradients_twice_have_the_records_of_the_first_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        engine = build(
            mlp(5, 4, 1), Trace(tmp_path / name, every="1it"), optimizer=partial(torch.optim.LBFGS, max_iter=3)
        )
        engine.run(batches(), max_epochs=1)
        engine_of(Trace(tmp_path / f"sam {name}", every="1it"), SharpnessAwareMinimization()).run(
            batches(1), max_epochs=1
        )
    assert compare(tmp_path / "a", tmp_path / "b").equal
    assert compare(tmp_path / "sam a", tmp_path / "sam b").equal
    for name in ("a", "sam a"):
        found = [(one["iteration"], one["event"]) for one in records(tmp_path / name)]
        assert len(found) == len(set(found))


def test_an_update_that_is_a_function_has_records_of_batches_and_iterations(tmp_path: Path) -> None:
    engine = Engine(Update.from_function(lambda engine, batch: None))
    engine.attach(Trace(tmp_path / "trace", every="1it"))
    engine.run([{"x": torch.ones(2), "names": ["a", "b"]}, ["c"], "text"], max_epochs=1)
    events = [one["event"] for one in records(tmp_path / "trace")]
    assert events == ["STARTED", *["GET_BATCH_COMPLETED", "ITERATION_COMPLETED"] * 3, "EPOCH_COMPLETED"]


def test_only_the_chosen_iterations_are_recorded_and_compare_with_more(tmp_path: Path) -> None:
    for name, every in (("a", "1it"), ("b", "5it")):
        engine_of(Trace(tmp_path / name, every=every)).run(batches(), max_epochs=2)
    assert {one["iteration"] for one in records(tmp_path / "b")} == {0, 5, 6, 10, 12}
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.equal
    assert found.compared == len(records(tmp_path / "b"))


@pytest.mark.moderate
@pytest.mark.parametrize("at", [4, 8, 12])
@pytest.mark.parametrize("options", [{}, {"detail": "tensor", "part_size": 3000}])
def test_a_trace_of_a_resumed_run_is_that_of_an_undisturbed_one(
    at: int, options: dict[str, Any], tmp_path: Path
) -> None:
    path, folder = tmp_path / "trace.jsonl", tmp_path / "checkpoints"
    saving = Checkpoint(folder, every="4it", keep=9)
    engine_of(Trace(path, every="1it", **options), Metrics(loss=Average()), saving).run(batches(), max_epochs=3)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    for _ in range(2):
        resumed(folder, path, at, **options)
        assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
    found = compare(path, whole(tmp_path / "undisturbed.jsonl", **options))
    assert found.equal, found
    assert found.ends == (18, 18)
    assert len(before) > 3 or not options


@pytest.mark.parametrize("damage", ["missing", "truncated", "replaced"])
def test_a_trace_that_is_not_that_of_the_state_is_kept_and_reported(damage: str, tmp_path: Path) -> None:
    path, folder = tmp_path / "trace.jsonl", tmp_path / "checkpoints"
    saving = Checkpoint(folder, every="4it", keep=9)
    engine_of(Trace(path, every="1it"), Metrics(loss=Average()), saving).run(batches(), max_epochs=3)
    content = path.read_bytes()
    left = {"missing": b"", "truncated": content[:900], "replaced": content.replace(b'"iteration":2', b'"iteration":3')}
    path.write_bytes(left[damage])
    if damage == "missing":
        path.unlink()
    with pytest.warns(FindingWarning, match="W34"):
        resumed(folder, path, 8)
    assert min(one["iteration"] for one in records(path)) == 9
    if damage != "missing":
        assert (tmp_path / "trace.1.jsonl").read_bytes() == left[damage]


def test_a_trace_without_its_first_part_is_reported_and_its_other_parts_are_kept(tmp_path: Path) -> None:
    path, folder = tmp_path / "trace.jsonl", tmp_path / "checkpoints"
    saving = Checkpoint(folder, every="4it", keep=9)
    engine_of(Trace(path, every="1it", part_size=1500), Metrics(loss=Average()), saving).run(batches(), max_epochs=3)
    path.unlink()
    with pytest.warns(FindingWarning, match="W34"):
        resumed(folder, path, 12, part_size=1500)
    assert (tmp_path / "trace.1.part2.jsonl").exists()
    assert records(path)[0]["event"] == "EPOCH_COMPLETED"  # which follows the checkpoint of iteration 12
    assert min(one["iteration"] for one in records(path)[1:]) == 13
    assert compare(path, path).ends == (18, 18)


def test_a_new_run_keeps_the_trace_of_another_one_under_a_name_that_can_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    whole(path, part_size=1500)
    parts = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    whole(path)
    assert len(parts) > 2
    kept = {name.replace("trace", "trace.1", 1): content for name, content in parts.items()}
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if name != "trace.jsonl"} == kept
    assert compare(path, tmp_path / "trace.1.jsonl").equal


def test_two_runs_of_one_engine_have_the_trace_of_one_run(tmp_path: Path) -> None:
    engine = engine_of(Trace(tmp_path / "a", every="1it"))
    engine.run(batches(), max_epochs=1)
    engine.run(batches(), max_epochs=2)
    engine_of(Trace(tmp_path / "b", every="1it")).run(batches(), max_epochs=2)
    assert records(tmp_path / "a") == records(tmp_path / "b")


def test_a_run_after_an_exception_continues_the_trace(tmp_path: Path) -> None:
    engine = engine_of(Trace(tmp_path / "a", every="1it"))

    @engine.on(Events.FORWARD_COMPLETED(once=4))
    def fail(engine: Engine) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        engine.run(batches(), max_epochs=1)
    before = records(tmp_path / "a")
    assert (before[-1]["iteration"], before[-1]["event"]) == (4, "GET_BATCH_COMPLETED")
    engine.detach(fail)
    with pytest.warns(UserWarning, match="iteration 4 is repeated"):
        engine.run(batches(), max_epochs=1)
    found = records(tmp_path / "a")
    assert found[: len(before)] == before
    assert found[-1]["event"] == "EPOCH_COMPLETED"
    assert all(one.get("occurrence", 1) == 1 for one in found)


def test_a_state_after_an_exception_names_the_part_that_its_lines_are_in(tmp_path: Path) -> None:
    for size in range(1000, 3000, 100):
        trace = Trace(tmp_path / f"{size}.jsonl", every="1it", part_size=size)
        engine = engine_of(trace)

        @engine.on(Events.OPTIMIZER_STEP_STARTED(once=3))
        def fail(engine: Engine) -> None:
            raise RuntimeError("planted")

        with pytest.raises(RuntimeError, match="planted"):
            engine.run(batches(), max_epochs=1)
        state = trace.state_dict()
        part = tmp_path / (f"{size}.jsonl" if state["part"] == 1 else f"{size}.part{state['part']}.jsonl")
        assert part.stat().st_size == state["length"]


def test_half_precision_is_recorded_under_autocast_and_norms_do_not_overflow(tmp_path: Path) -> None:
    engine = engine_of(Trace(tmp_path / "a", every="1it"))
    with torch.autocast("cpu", torch.bfloat16):
        engine.run([(x.half(), y.half()) for x, y in batches()], max_epochs=1)
    assert len(records(tmp_path / "a")) > 4
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(1e19)  # whose square is no number of float32
    engine.reset()
    engine.attach(Trace(tmp_path / "b", every="1it", name="second"))
    engine.connect(Events.LOSS_COMPUTED, lambda engine: engine.state.update.skip("planted"))
    engine.run(batches(), max_epochs=1)
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    assert records(tmp_path / "b")[-1]["numbers"]["parameters"] == pytest.approx(1e19 * count**0.5)


def test_an_iteration_is_written_at_once_and_at_the_latest_for_a_state(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "a", every="1it")
    engine = engine_of(trace)
    written: list[int] = []

    def count(engine: Engine) -> None:
        written.append(len(records(tmp_path / "a")))

    for event in (Events.GET_BATCH_COMPLETED, Events.GRADIENTS_READY, Events.ITERATION_COMPLETED):
        engine.connect(event, count, phase=Phase.PERSIST, rank=10**6)
    engine.connect(Events.GRADIENTS_READY(once=3), lambda engine: trace.state_dict(), phase=Phase.PERSIST, rank=10**5)
    engine.run(batches(), max_iters=3)
    assert written == [1, 1, 5, 5, 5, 9, 9, 12, 13]  # the first one is of the start


class Values(NamedTuple):
    tensor: Tensor
    others: list[Tensor]


OTHERS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: [torch.ones(2), {"deep": (torch.ones(3), torch.arange(4))}],
    "list": lambda: [1, 2],
    "dict": lambda: {"a": 1},
    "bytes": lambda: bytearray(b"ab"),
    "array": lambda: np.ones(3),
    "set": lambda: {1, 2},
    "large": lambda: torch.ones(20_000),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "keys": lambda: {torch.ones(2): 1},
    "tuple of its own class": lambda: Values(torch.ones(2), [torch.ones(2)]),
}


def change(value: Any) -> None:
    """Change all that can be changed in a value."""
    if isinstance(value, Tensor):
        value.detach().mul_(3)
    elif isinstance(value, np.ndarray):
        value += 1
    elif isinstance(value, dict | list | tuple):
        for one in (*value, *value.values()) if isinstance(value, dict) else value:
            change(one)
    if isinstance(value, dict):
        value["new"] = 7
    elif isinstance(value, set):
        value.add(7)
    elif isinstance(value, list | bytearray):
        value.append(7)


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("detail", ["step", "tensor"])
def test_a_record_is_of_its_event_whatever_changes_before_it_is_written(
    detail: Any, others: str, tmp_path: Path
) -> None:
    update = Update.supervised(nn.functional.mse_loss, ADAM, input="x", target="y")
    engine = Engine(update, model=mlp(5, 4, 1), seed=0)
    engine.attach(Trace(tmp_path / "a", every="1it", detail=detail))
    engine.detach("findings")  # which reports that batches are changed
    seen: list[tuple[str, dict[str, str]]] = []

    def look(things: list[str], event: Events) -> None:
        """Compute the digests of things at an event, after the trace."""

        def see(engine: Engine) -> None:
            seen.append((event.name, digests_of(contents_of(engine, things), by_tensor=detail == "tensor").read()))

        engine.connect(event, see, phase=Phase.PERSIST, rank=10**6)

    look(["batch"], Events.GET_BATCH_COMPLETED)
    look(["output", "loss"], Events.LOSS_COMPUTED)
    look(["gradients"], Events.GRADIENTS_READY)
    engine.connect(Events.ITERATION_STARTED, lambda engine: change(engine.state.batch))
    engine.connect(
        Events.BACKWARD_COMPLETED, lambda engine: change([engine.state.update.output, engine.state.update.raw_loss])
    )
    engine.connect(Events.OPTIMIZER_STEP_STARTED, lambda engine: change([p.grad for p in engine.model.parameters()]))
    engine.run([{"x": torch.ones(4, 5), "y": torch.ones(4, 1), "others": OTHERS[others]()}], max_epochs=1)
    written = {record["event"]: record["digests"] for record in records(tmp_path / "a")}
    assert len(seen) == 3
    for event, digests in seen:
        assert {name: written[event][name] for name in digests} == digests


def test_a_loss_in_double_precision_is_that_of_its_event(tmp_path: Path) -> None:
    data = [(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1, 20_000, dtype=torch.float64))]  # not copied
    engine = build(nn.Linear(3, 20_000).double(), Trace(tmp_path / "a", every="1it"))
    losses: list[float] = []

    def change(engine: Engine) -> None:
        loss = engine.state.update.raw_loss
        assert loss is not None
        losses.append(loss.item())
        loss.detach().mul_(3)

    engine.connect(Events.BACKWARD_COMPLETED, change)
    engine.run(data, max_epochs=1)
    (found,) = (one["numbers"]["loss"] for one in records(tmp_path / "a") if one["event"] == "LOSS_COMPUTED")
    assert [found] == losses


def test_elements_of_less_than_a_byte_are_recorded(tmp_path: Path) -> None:
    # On the CPU, torch cannot copy elements of less than a byte.
    quarters = torch.arange(4, dtype=torch.uint8).view(torch.uint4)  # type: ignore[attr-defined]
    engine = Engine(Update.from_function(lambda engine, batch: None))
    engine.attach(Trace(tmp_path / "a", every="1it"))
    engine.run([quarters], max_epochs=1)
    assert [one["event"] for one in records(tmp_path / "a")][1] == "GET_BATCH_COMPLETED"


def test_a_run_continues_the_file_whose_last_records_could_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = build(mlp(5, 4, 1), Trace(path, every="1it"))
    engine.run(batches(), max_iters=2)
    state = engine.state_dict()
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resumed = build(mlp(5, 4, 1), Trace(path, every="1it"))
    resumed.load_state_dict(state)

    @resumed.on(Events.BACKWARD_STARTED(once=5))
    def interrupt(engine: Engine) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            resumed.run(batches(), max_epochs=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    resumed.detach(interrupt)
    resumed.run(batches(), max_epochs=1)
    assert [one["iteration"] for one in records(path) if one["event"] == "ITERATION_COMPLETED"] == [1, 2, 3, 4, 5, 6]
    assert names(tmp_path) == ["trace.jsonl"]


def test_a_run_continues_after_a_part_that_could_not_be_created(tmp_path: Path) -> None:
    path, obstacle = tmp_path / "trace.jsonl", tmp_path / "trace.part2.jsonl"
    engine = engine_of(Trace(path, every="1it", part_size=2000))
    engine.connect(Events.ITERATION_STARTED(once=1), lambda engine: (obstacle / "file").mkdir(parents=True))
    with pytest.raises(IsADirectoryError):
        engine.run(batches(), max_epochs=1)
    shutil.rmtree(obstacle)
    engine.run(batches(), max_epochs=1)
    assert obstacle.is_file()
    assert parts_of(path) == list(range(1, len(parts_of(path)) + 1))
    assert [one.iteration for one in TraceFile(path).records()][-1] == 6


def test_records_before_one_that_cannot_be_made_are_written(tmp_path: Path) -> None:
    class Endless(Handler):
        def __init__(self) -> None:
            super().__init__()
            self.state: dict[str, Any] = {}

        @on(Events.ITERATION_STARTED(once=3))
        def close_the_circle(self, engine: Engine) -> None:
            self.state["self"] = self.state

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.state = dict(state)

    engine = engine_of(Trace(tmp_path / "a", every="1it"), Endless())
    with pytest.raises(RecursionError):
        engine.run(batches(), max_epochs=1)
    of_third = [one["event"] for one in records(tmp_path / "a") if one["iteration"] == 3]
    assert of_third == ["GET_BATCH_COMPLETED", "LOSS_COMPUTED", "GRADIENTS_READY"]


def test_a_trace_that_is_disabled_or_detached_writes_nothing(tmp_path: Path) -> None:
    disabled, detached = Trace(tmp_path / "a", detail="tensor"), Trace(tmp_path / "b", name="second")
    engine = engine_of(disabled, detached)
    engine.detach(detached)
    with engine.without("trace"):
        engine.run(batches(), max_epochs=1)
    assert names(tmp_path) == []
    assert not any(one.owner == "second" for signal in engine.signals.all() for one in signal.connections)
    engine.run(batches(), max_epochs=2)
    assert [one["iteration"] for one in records(tmp_path / "a")] == [*[10] * 7, 12]
    assert compare(tmp_path / "a", tmp_path / "a").equal


def test_an_evaluator_has_a_trace(tmp_path: Path) -> None:
    for name in ("a", "b"):
        evaluator = evaluator_of(mlp(5, 4, 1))
        evaluator.attach(Trace(tmp_path / name, every="1it"))
        evaluator.run(batches())
    assert compare(tmp_path / "a", tmp_path / "b").equal
    assert {one["event"] for one in records(tmp_path / "a")} >= {"STARTED", "GET_BATCH_COMPLETED", "LOSS_COMPUTED"}


@pytest.mark.parametrize("detail", ["step", "tensor"])
def test_weights_with_a_trace_are_those_without(detail: Any, tmp_path: Path) -> None:
    def train(*handlers: Handler) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        engine = build(nn.Sequential(layer, nn.Linear(8, 1)), *handlers, optimizer=ADAM)
        with torch.autocast("cpu", torch.bfloat16):
            engine.run(batches(3, (4, 8), (4, 1)), max_epochs=2)
        trained: nn.Module = engine.model
        return trained

    assert_same(train(), train(Trace(tmp_path / "trace", every="1it", detail=detail)))


def test_gradients_that_are_sparse_are_recorded(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()

    for name in ("a", "b"):
        torch.manual_seed(0)
        engine = build(nn.Embedding(7, 3, sparse=True), Trace(tmp_path / name, every="1it"), loss=loss)
        engine.run([(torch.tensor([1, 2]), torch.ones(2))] * 3, max_epochs=1)
    assert compare(tmp_path / "a", tmp_path / "b").equal


# ---- several processes --------------------------------------------------------------------------------------------


def train_together(folder: Path, elastic: bool, at: int, epochs: int, planted: bool) -> None:
    engine = build(mlp(5, 4, 1, nn.Dropout(0.3)), optimizer=ADAM)
    engine.attach(
        ElasticDataParallel(shards=4) if elastic else DistributedDataParallel(),
        Trace(folder / "trace.jsonl", every="1it"),
        Checkpoint(folder / "checkpoints", every="2it", keep=9),
    )
    torch.manual_seed(1)
    if planted:
        engine.attach(Planted())
    if at:
        engine.load_state_dict(Checkpoint.load(next((folder / "checkpoints").glob(f"*iter{at:08}"))))
    engine.run(batches(16), max_epochs=epochs)


class Planted(Handler):
    by_shard = True

    def attached(self, engine: Engine) -> None:
        def change(engine: Engine) -> None:
            if engine.state.iteration == 3 and engine.state.shard == 3:
                engine.state.update.output = engine.state.update.output * 1.5

        engine.connect(Events.FORWARD_COMPLETED, change)


@pytest.mark.moderate
def test_each_of_two_ranks_has_a_file_and_resuming_cuts_both(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        run_together(train_together, 2, folder, False, 0, 1, False)
    assert names(tmp_path / "a") == ["trace.jsonl", "trace.rank1.jsonl"]
    before = [(tmp_path / "a" / name).read_bytes() for name in names(tmp_path / "a")]
    run_together(train_together, 2, tmp_path / "a", False, 4, 1, False)
    assert [(tmp_path / "a" / name).read_bytes() for name in names(tmp_path / "a")] == before
    found = compare(tmp_path / "a" / "trace.jsonl", tmp_path / "b" / "trace.jsonl")
    assert found.equal, found
    assert found.compared == sum(len(records(tmp_path / "b" / name)) for name in names(tmp_path / "b"))


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:C41", "ignore:.*different environment")
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_steps_of_shards_have_the_same_trace_for_any_number_of_processes(
    before: int, after: int, tmp_path: Path
) -> None:
    run_together(train_together, 1, tmp_path / "one", True, 0, 2, False)
    run_together(train_together, before, tmp_path / "two", True, 0, 2, False)
    for _ in range(2):
        found = compare(tmp_path / "one" / "trace.jsonl", tmp_path / "two" / "trace.jsonl")
        assert found.equal, found
        assert not found.unlike
        assert found.compared == len(records(tmp_path / "one" / "trace.jsonl"))
        run_together(train_together, after, tmp_path / "two", True, 2, 2, False)
    if after < before:
        assert max(one["iteration"] for one in records(tmp_path / "two" / f"trace.rank{before - 1}.jsonl")) <= 2
