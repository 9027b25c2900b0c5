"""The group an engine trains in: joined and left, what its ranks agree on, whose clock it is, and who may skip alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.distributed import SINGLE_PROCESS, Processes, process_group
from signalfire.distributed import group as groups
from tests.kit import Clock, batches, build, linear
from tests.processes import run_together

TIMEOUT = 60.0


class Joining(Handler):
    """Takes these processes for the group, and reduces nothing."""

    def __init__(self, processes: Processes, name: str = "joining") -> None:
        super().__init__(name=name)
        self.processes = processes

    def attached(self, engine: Engine) -> None:
        engine.group.join(self.processes, by=self, shard_policy="own")


class OnRankZero(Handler):
    rank_zero_only = True

    def __init__(self) -> None:
        super().__init__()
        self.called = 0

    @on(Events.ITERATION_COMPLETED)
    def count(self, engine: Engine) -> None:
        self.called += 1


def second_rank() -> Processes:
    """The numbers alone: nothing is sent."""
    processes = Processes()
    processes.rank, processes.world_size = 1, 2
    return processes


def test_a_handler_joins_until_it_is_detached() -> None:
    joined, engine = Processes(), build(linear(5, 1))
    engine.attach(Joining(joined))
    assert engine.group.processes is engine.processes is joined
    assert engine.group.shard_policy == "own"
    engine.detach("joining")
    assert engine.group.processes is SINGLE_PROCESS
    assert engine.group.shard_policy == "auto"


def test_handlers_of_rank_0_take_no_part_on_another_rank_until_the_group_is_left() -> None:
    counting = OnRankZero()
    engine = build(linear(5, 1), counting)
    engine.group.use(second_rank(), "auto")
    engine.signal(Events.ITERATION_COMPLETED).send(engine)
    assert counting.called == 0
    engine.group.leave()
    engine.signal(Events.ITERATION_COMPLETED).send(engine)
    assert counting.called == 1


def test_two_handlers_cannot_both_join_and_none_during_a_run() -> None:
    engine = build(linear(5, 1), Joining(Processes()))
    with pytest.raises(ValueError, match="both 'joining' and 'other' control how the model is distributed"):
        engine.attach(Joining(Processes(), name="other"))
    engine = build(linear(5, 1))
    engine.connect(Events.STARTED, lambda engine: engine.attach(Joining(Processes())))
    with pytest.raises(RuntimeError, match=r"join\(<rank 0 of 1>\) was called during a run; call it before run\(\)"):
        engine.run(batches(1), max_epochs=1)
    assert engine.processes is SINGLE_PROCESS


def test_a_single_process_agrees_with_itself() -> None:
    engine = build(linear(5, 1))
    group = engine.group
    engine.seed = 3
    group.begin_run()
    assert engine.seed == 3
    group.agree()
    assert [group.asked, group.sync_skips] == [False, False]
    assert group.gather("mine") == ["mine"]
    before = time.monotonic()
    assert before <= group.now() <= time.monotonic()
    assert group.has_come(before)
    assert not group.has_come(before + 60)


class Skipping(Handler):
    @on(Events.GRADIENTS_READY)
    def look(self, engine: Engine) -> None: ...


class SkippingAlike(Skipping):
    decides_alike = True


CHANGING = [Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED]


def test_only_what_may_skip_on_one_rank_alone_has_the_ranks_agree_on_skips() -> None:
    def syncs(engine: Engine) -> bool:
        engine.group.sum()
        return engine.group.sync_skips

    engine = build(linear(5, 1))
    assert not syncs(engine)
    for event in CHANGING:
        with engine.connect(event, lambda engine: None, phase=Phase.RECORD):
            assert not syncs(engine)
        for phase in (Phase.PREPARE, Phase.CHANGE, Phase.FINALIZE):
            with engine.connect(event, lambda engine: None, phase=phase):
                assert syncs(engine), (event, phase)
    with engine.connect(Events.LOSS_COMPUTED, lambda engine: None):
        assert not syncs(engine)
    engine.attach(SkippingAlike())
    assert not syncs(engine)
    engine.attach(Skipping())
    assert syncs(engine)


def ask(engine: Engine) -> None:
    """Ask for the end of an epoch, as a state does that was saved before it took effect."""
    engine.boundary.load_state_dict(engine.boundary.state_dict() | {"epoch_stop": "on"})


def own_clock() -> Clock:
    """What the group reads as the time in this process, which is forked."""
    clock = groups.time = Clock()  # type: ignore[attr-defined]
    clock.perf_counter = clock.thread_time = clock.monotonic  # type: ignore[attr-defined]
    return clock


def _agreed() -> dict[str, Any]:
    clock = own_clock()
    engine = build(linear(5, 1), Joining(process_group(timeout=TIMEOUT)))
    group, rank = engine.group, engine.processes.rank
    engine.snapshots.begin_lineage(None, f"run of {rank}")
    engine.seed = 10 + rank
    group.begin_run()
    began = engine.snapshots.run_id, engine.seed
    clocks = [group.now()]
    found: dict[str, Any] = {"began": began, "none asks": group.asked}
    clock.sleep(2 if rank else 5)
    clocks.append(group.now())
    group.agree()
    clock.sleep(2 if rank else 5)
    clocks.append(group.now())
    if rank == 1:
        engine.connect(Events.GRADIENTS_READY, lambda engine: None)
        ask(engine)
    found["sums"] = group.sum(rank, 10.0)
    found |= {"one asks": group.asked, "awake": engine.boundary.is_awake, "what": group.gather(("stop", rank))}
    return found | {
        "answered": group.asked,
        "one may skip": group.sync_skips,
        "clocks": [*clocks, group.now()],
    }


@pytest.mark.moderate
def test_ranks_agree_on_the_clock_of_rank_0_and_on_what_any_of_them_asks_for() -> None:
    first, second = run_together(_agreed, 2)
    assert first == second
    assert first.pop("clocks") == [1000, 1000, 1005, 1010]
    assert first == {
        "began": ("run of 0", 10),
        "none asks": False,
        "sums": [1.0, 20.0],
        "one asks": True,
        "awake": True,
        "what": [("stop", 0), ("stop", 1)],
        "answered": False,
        "one may skip": True,
    }


def _noticed() -> list[bool]:
    """What the ranks hear in five windows, of which rank 1 has something to say in the second, third and fifth."""
    engine = build(linear(5, 1), Joining(process_group(timeout=TIMEOUT)))
    group, rank = engine.group, engine.processes.rank
    group.begin_run()
    (update,) = engine.updates
    heard = []
    for turn in range(5):
        update.window.held = update.window.size = 2
        update.skipped = None
        if rank == 1 and turn == 1:
            update.window.held = 1
        if rank == 1 and turn == 2:
            update.skipped = "why"
        if rank == 1 and turn == 4:
            ask(engine)
        if turn % 2:
            group.send_notice(update, computed=True)
        if not group.has_sent:
            group.send_notice(update, computed=True)
        heard.append(group.noticed(update))
    return heard


@pytest.mark.moderate
def test_all_ranks_hear_that_one_lacks_a_gradient_skips_or_asks_for_something() -> None:
    assert run_together(_noticed, 2) == [[False, True, True, False, True]] * 2


def _clock_of_rank_0() -> tuple[bool, bool, bool]:
    clock = own_clock()
    engine = build(linear(5, 1), Joining(process_group(timeout=TIMEOUT)))
    group = engine.group
    group.begin_run()
    (update,) = engine.updates
    moment = group.now() + 5
    before = group.has_come(moment)
    if engine.processes.is_rank_zero:
        clock.sleep(5)
    update.window.held = update.window.size = 1
    group.send_notice(update, computed=True)
    heard = group.noticed(update)
    group.sum()
    return before, heard, group.has_come(moment)


@pytest.mark.moderate
def test_a_moment_comes_on_all_ranks_once_the_clock_of_rank_0_reads_it() -> None:
    assert run_together(_clock_of_rank_0, 2) == [(False, True, True)] * 2
