"""The collectives: of a single process, of two real ones, and after one of two has gone."""

from __future__ import annotations

import io
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from signalfire.distributed import SINGLE_PROCESS, lost_another, process_group
from signalfire.distributed import processes as collectives
from signalfire.distributed.processes import BROADCAST_AT_ONCE, GATHERED_AT_ONCE
from signalfire.handlers import DistributedDataParallel
from tests.kit import wait_until
from tests.processes import assert_alike, run_together

TIMEOUT = 60.0


class Pair(NamedTuple):
    first: Tensor
    second: Any


def test_a_single_process_is_a_group_of_one() -> None:
    one, value = SINGLE_PROCESS, Pair(torch.zeros(2, 3), "text")
    assert (one.rank, one.world_size, one.distributed, one.is_rank_zero) == (0, 1, False, True)
    assert (one.sum(1, 2.5), one.any(False), one.any(True)) == ([1.0, 2.5], False, True)
    assert (one.gather("here"), one.collect("here"), one.broadcast("here")) == (["here"], ["here"], "here")
    assert one.gather_samples(value) is value
    assert one.watch(lambda: "STARTED") is None
    assert repr(one) == "<rank 0 of 1>"


def test_before_they_join_the_launched_ranks_know_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DistributedDataParallel().processes is SINGLE_PROCESS
    launched = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    processes = DistributedDataParallel().processes
    assert (processes.rank, processes.local_rank, processes.world_size) == (1, 1, 4)
    assert (processes.distributed, processes.is_rank_zero) == (True, False)
    with pytest.raises(RuntimeError, match="rank 1 of 4 has not joined the process group yet; attach the handler"):
        processes.barrier()


def test_a_single_process_prints_without_its_number() -> None:
    out = io.StringIO()
    SINGLE_PROCESS.print("once", 2, file=out, sep="-")
    SINGLE_PROCESS.print("each", all=True, file=out, end="")
    assert out.getvalue() == "once-2\neach"


def _printed() -> str:
    out = io.StringIO()
    processes = process_group(timeout=TIMEOUT)
    processes.print("once", file=out)
    processes.print("each", all=True, file=out)
    return out.getvalue()


def test_rank_0_prints_and_with_all_every_rank_with_its_number() -> None:
    assert run_together(_printed, 2) == ["once\n[rank 0] each\n", "[rank 1] each\n"]


def _collectives(folder: Path) -> tuple[Any, Any]:
    """What has to be alike on all ranks, and what is each one's own."""
    processes = process_group(timeout=TIMEOUT)
    rank = processes.rank
    if rank == 1:
        time.sleep(0.2)
        (folder / "there").touch()
    processes.barrier()
    alike = {
        "waited": (folder / "there").exists(),
        "sum": processes.sum(0.1 * (rank + 1), 2**40 + rank, rank),
        "any": (processes.any(rank == 1), processes.any(False)),
        "gather": processes.gather({"rank": rank}),
        "broadcast": processes.broadcast(f"of rank {rank}"),
        "once": process_group(timeout=1.0) is processes,
    }
    return alike, (processes.collect(rank), repr(processes), processes.timeout)


def test_what_the_ranks_gather_is_alike_on_all(tmp_path: Path) -> None:
    found = run_together(_collectives, 2, tmp_path)
    assert assert_alike([alike for alike, _ in found]) == {
        "waited": True,
        "sum": [0.1 + 0.2, 2**41 + 1.0, 1.0],
        "any": (True, False),
        "gather": [{"rank": 0}, {"rank": 1}],
        "broadcast": "of rank 0",
        "once": True,
    }
    assert [own for _, own in found] == [([0, 1], "<rank 0 of 2>", TIMEOUT), ([], "<rank 1 of 2>", TIMEOUT)]


SIZES = sorted({size + near for size in (0, GATHERED_AT_ONCE, BROADCAST_AT_ONCE, 10**6) for near in range(-24, 24, 3)})
"""Of texts, so that pickled they are a little shorter, exactly as long, and a little longer than what one collective sends."""


def _waited(folder: Path) -> float:
    """Rank 1 lets 5 seconds pass, on a clock of the test, once rank 0 has begun to wait."""
    processes = process_group(timeout=TIMEOUT)
    processes.barrier()
    processes.waited = 0.0

    def clock() -> float:
        now = 5.0 if (folder / "passed").exists() else 0.0
        (folder / f"read by {processes.rank}").touch()
        return now

    collectives.perf_counter = clock  # type: ignore[attr-defined]
    if processes.rank == 1:
        wait_until((folder / "read by 0").exists)
        (folder / "passed").touch()
    processes.any(False)
    return processes.waited


@pytest.mark.slow
def test_the_time_that_a_rank_waits_for_others_in_a_collective_is_counted(tmp_path: Path) -> None:
    assert SINGLE_PROCESS.waited == 0
    assert run_together(_waited, 2, tmp_path) == [5.0, 0.0]


def _values_of_any_size() -> list[bool]:
    processes = process_group(timeout=TIMEOUT)
    rank = processes.rank
    right = []
    for place, size in enumerate(map(partial(max, 0), SIZES)):
        sizes = [size, max(0, SIZES[-1 - place])] if place % 2 else [size, size]
        right.append(
            processes.gather(sizes[rank] * str(rank)) == [length * str(one) for one, length in enumerate(sizes)]
        )
        right.append(processes.broadcast(size * "a" if rank == 0 else None) == size * "a")
    return right


@pytest.mark.moderate
def test_values_of_any_size_are_gathered_and_broadcast() -> None:
    assert all(assert_alike(run_together(_values_of_any_size, 2)))


def _samples() -> dict[str, Any]:
    processes = process_group(timeout=TIMEOUT)
    rank = processes.rank
    uneven = torch.arange(4.0 * rank).reshape(-1, 2)[:, :1] + 10 * rank  # a view, with nothing on rank 0
    errors = []
    for wrong in (torch.zeros(1, 2 + rank), torch.zeros([1] * (1 + rank)), torch.zeros(())):
        with pytest.raises(ValueError, match="cannot be concatenated along the first dimension") as caught:
            processes.gather_samples(wrong)
        errors.append(str(caught.value))
    return {
        "nested": processes.gather_samples({"a": [uneven, "text"], "b": (torch.full((1 + rank,), rank),)}),
        "pair": processes.gather_samples(Pair(torch.full((1, 2), float(rank)), None)),
        "none": processes.gather_samples(torch.zeros(0, 2, requires_grad=True)),
        "text": processes.gather_samples(["text"]),
        "errors": errors,
    }


def test_samples_are_concatenated_in_the_order_of_the_ranks_without_padding() -> None:
    found = assert_alike(run_together(_samples, 2))
    assert found["nested"]["a"][0].tolist() == [[10.0], [12.0]]
    assert found["nested"]["a"][1] == "text"
    assert found["nested"]["b"][0].tolist() == [0, 1, 1]
    assert isinstance(found["pair"], Pair)
    assert found["pair"].first.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert found["none"].shape == (0, 2)
    assert not found["none"].requires_grad
    assert found["text"] == ["text"]
    assert "[(1, 2), (1, 3)]" in found["errors"][0]
    assert "[(1,), (1, 1)]" in found["errors"][1]
    assert "[(), ()]" in found["errors"][2]


def _left_alone() -> bool | None:
    processes = process_group(timeout=TIMEOUT)
    if processes.rank == 1:
        dist.destroy_process_group()
        return None
    with pytest.raises(RuntimeError) as caught:
        processes.sum(1)
    return lost_another(caught.value)


def test_an_error_of_a_collective_without_the_other_is_told_from_others() -> None:
    assert run_together(_left_alone, 2) == [True, None]
    assert not lost_another(RuntimeError("the labels are out of range"))
    assert lost_another(dist.DistBackendError("the other has gone"))
