"""GarbageCollection against Python's own, by what `gc.callbacks` reports."""

from __future__ import annotations

import gc
import io
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    Average,
    Checkpoint,
    DistributedDataParallel,
    GarbageCollection,
    Metrics,
    Profiler,
    Validation,
)
from tests import kit
from tests.kit import mlp, quick
from tests.processes import assert_alike, run_together


def build() -> Engine:
    return kit.build(mlp(5, 8, 1, torch.nn.Tanh()), optimizer=partial(torch.optim.SGD, lr=0.1))


batches = kit.batches
Seen = list[tuple[int, int]]
"""The iteration of each collection, and its generation."""


@contextmanager
def watched(engine: Engine) -> Iterator[Seen]:
    """Lists all collections, also the automatic ones."""
    seen: Seen = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append((engine.state.iteration, info["generation"]))

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


class Cyclic:
    """Freed by a collection only."""

    def __init__(self) -> None:
        self.itself = self


def leave_cycles(engine: Engine) -> None:
    for _ in range(1000):
        Cyclic()


def settings() -> tuple[Any, ...]:
    return gc.isenabled(), gc.get_freeze_count(), gc.get_threshold(), len(gc.callbacks)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The tests' own process collects as before, also if one fails."""
    gc.unfreeze()  # what was frozen for all tests
    before = settings()
    yield
    gc.unfreeze()
    gc.enable()
    after = settings()
    gc.freeze()
    assert after == before


def counted(engine: Engine, epochs: int, **options: Any) -> Seen:
    engine.attach(GarbageCollection(**options))
    engine.connect(Events.ITERATION_STARTED, leave_cycles)
    with watched(engine) as seen:
        engine.run(batches(6), max_epochs=epochs)
    return seen[seen.index((0, 2)) :]  # before the handler begins, Python collects whenever it likes


@pytest.mark.moderate
def test_garbage_is_collected_at_the_interval_and_at_the_end_of_an_epoch_and_at_no_other_time() -> None:
    assert counted(build(), 2, every="4it") == [(0, 2), (4, 1), (6, 2), (8, 1), (12, 1), (12, 2)]


def test_without_it_python_collects_whenever_it_likes() -> None:
    engine = build()
    engine.connect(Events.ITERATION_STARTED, leave_cycles)
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # the usual one up to Python 3.12
    with watched(engine) as seen:
        engine.run(batches(6), max_epochs=2)
    gc.set_threshold(*before)
    assert len(seen) > 12


@pytest.mark.slow
def test_all_is_collected_after_many_collections_of_young_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signalfire.handlers.garbage_collection.LIMIT", 3)
    found = counted(build(), 1, every="1it")
    assert found == [(0, 2), (1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (6, 1), (6, 2)]


@pytest.mark.slow
def test_all_is_collected_before_an_evaluation(tmp_path: Any) -> None:
    engine = build()
    evaluator = Engine(Update.supervised(torch.nn.functional.mse_loss), model=engine.modules["model"])
    evaluator.attach(Metrics(loss=Average()))
    engine.attach(Validation(evaluator, batches(2), every="3it"), Checkpoint(tmp_path))
    assert [one for one in counted(engine, 1, every="100it") if one[1] == 2] == [(0, 2), (3, 2), (6, 2), (6, 2)]


@pytest.mark.slow
def test_only_what_was_made_in_the_run_is_looked_at() -> None:
    engine, frozen = build(), []
    engine.attach(GarbageCollection())
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: frozen.append((gc.isenabled(), gc.get_freeze_count() > 0))
    )
    engine.run(batches(2), max_epochs=1)
    assert frozen == [(False, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", quick(["completed", "failed", "interrupted", "disabled", "detached"], "failed", "disabled")
)
@pytest.mark.parametrize("enabled", [True, False])
def test_pythons_collection_is_as_before_however_the_run_ends(how: str, enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    engine, collector, after = build(), GarbageCollection(), []
    engine.attach(collector)
    before = settings()

    def act(engine: Engine) -> None:
        if how == "failed":
            raise ValueError("for the test")
        if how == "interrupted":
            raise KeyboardInterrupt
        if how == "disabled":
            collector.enabled = False
        if how == "detached":
            engine.detach(collector)

    engine.connect(Events.LOSS_COMPUTED(once=2), act)
    engine.connect(Events.ITERATION_COMPLETED(once=4), lambda engine: after.append(settings()[:2]))
    if how in ("failed", "interrupted"):
        with pytest.raises((ValueError, KeyboardInterrupt)):
            engine.run(batches(6), max_epochs=1)
    else:
        engine.run(batches(6), max_epochs=1)
    assert settings() == before
    if how in ("disabled", "detached"):
        assert after == [before[:2]]


def test_what_was_frozen_before_stays_so_and_nothing_is_added() -> None:
    engine = build()
    engine.attach(GarbageCollection())
    gc.freeze()
    later = Cyclic()
    engine.run(batches(2), max_epochs=1)
    known = {id(one) for one in gc.get_objects()}  # without what is frozen
    assert id(engine) not in known
    assert id(later) in known


def longest_pause(collect: str | None, kept: int = 6_000) -> int:
    """In objects that a collection goes through; of a run whose iterations make many cyclic ones, which live on for some."""
    engine, alive, pauses = build(), deque[Cyclic](maxlen=kept), [0]
    if collect is not None:
        engine.attach(GarbageCollection(every=collect))
    engine.connect(Events.ITERATION_STARTED, lambda engine: alive.extend(Cyclic() for _ in range(200)))

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and 0 < engine.state.iteration < 1000:  # at the end of an epoch nobody waits
            pauses[0] = max(pauses[0], sum(len(gc.get_objects(age)) for age in range(info["generation"] + 1)))

    gc.callbacks.append(note)
    try:
        engine.run(batches(1000), max_epochs=1)
    finally:
        gc.callbacks.remove(note)
    return pauses[0]


@pytest.mark.slow
def test_pauses_are_short() -> None:
    assert longest_pause("10it") < longest_pause("500it") / 4
    assert longest_pause("10it") < longest_pause(None)


@pytest.mark.moderate
def test_what_it_took_is_counted_and_shown_by_the_profiler() -> None:
    engine, collector, profiler = build(), GarbageCollection(every="2it"), Profiler(file=io.StringIO())
    engine.attach(profiler, collector)
    engine.run(batches(6), max_epochs=1)
    assert collector.collections == 5
    assert 0 < collector.longest_pause < collector.seconds
    (row,) = [timing for timing in profiler.timings if timing.name == "garbage_collection.collect"]
    assert row.calls == 3


class Asking(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor([float(gc.isenabled())])


@pytest.mark.slow
def test_a_forked_worker_collects_on_its_own() -> None:
    seen: list[float] = []
    model = mlp(1, 2, 1, torch.nn.Tanh())

    def loss(engine: Engine, batch: Tensor) -> Tensor:
        seen.extend(batch.flatten().tolist())
        total: Tensor = engine.model(batch).sum()
        return total

    engine = Engine(Update.from_function(loss, partial(torch.optim.SGD, lr=0.1)), model=model)
    engine.attach(GarbageCollection())
    engine.run(DataLoader(Asking(), batch_size=2, num_workers=1, multiprocessing_context="fork"), max_epochs=1)
    assert seen == [1.0] * 4


def collections_of_ranks() -> Seen:
    engine = build()
    engine.attach(DistributedDataParallel(timeout=60.0))
    if engine.processes.rank == 1:  # its collections would come more often
        engine.connect(Events.ITERATION_STARTED, leave_cycles)
    engine.attach(GarbageCollection(every="2it"))
    with watched(engine) as seen:
        engine.run(batches(12), max_epochs=2)
    return seen


@pytest.mark.slow
def test_all_ranks_collect_at_the_same_iterations() -> None:
    found = assert_alike(run_together(collections_of_ranks, 2))
    assert [one for one in found if one[0] > 0] == [(2, 1), (4, 1), (6, 1), (6, 2), (8, 1), (10, 1), (12, 1), (12, 2)]


def test_a_second_one_is_refused() -> None:
    engine = build()
    engine.attach(GarbageCollection())
    with pytest.raises(ValueError, match="control when garbage is collected"):
        engine.attach(GarbageCollection(name="another"))
