"""The states of all ranks in one: whatever differs comes back to each rank as it was, and only that is kept twice."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from signalfire.distributed import SINGLE_PROCESS, process_group
from signalfire.distributed.differences import for_rank, of_all
from tests.processes import run_together

TIMEOUT = 60.0
State = dict[str, Any]


def unlike() -> dict[str, tuple[Any, Any]]:
    """What rank 0 has, and what rank 1 has, of which nothing is alike."""
    ones = torch.ones(2, 3)
    return {
        "a value": (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-45])),
        "a sign": (torch.tensor(0.0), torch.tensor(-0.0)),
        "a type of the same bits": (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
        "a shape": (ones, ones.T),
        "a shape of nothing": (torch.zeros(0, 2), torch.zeros(2, 0)),
        "half of the precision": (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.5, dtype=torch.bfloat16)),
        "a type of number": (1, 1.0),
        "a number and a truth": (1, True),
        "a number and a word": (1, "1"),
        "nothing": (None, torch.zeros(1)),
        "a key": ({"a": 1}, {"a": 1, "b": 2}),
        "a length": ([ones, 1], [ones]),
        "inside": ({"a": [ones, {"b": (ones, 1)}]}, {"a": [ones, {"b": (ones, 2)}]}),
        "a pair and a list": ((1, 2), [1, 2]),
        "a container": ({"a": 1}, "text"),
    }


def alike() -> dict[str, Any]:
    return {
        "weights": torch.arange(6.0).reshape(2, 3).T,  # also where the memory is in another order
        "nan": torch.tensor([float("nan")]),
        "deep": {"list": [torch.ones(2), ("text", None)], "numbers": [1, 2.5, True]},
    }


def equal(one: Any, other: Any) -> bool:
    """The same bits, types and containers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        bits = [value.contiguous().flatten().view(torch.uint8).tolist() for value in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and bits[0] == bits[1]
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def state_of(rank: int) -> State:
    contiguous = alike()
    contiguous["weights"] = contiguous["weights"].contiguous() if rank else contiguous["weights"]
    meta = {"sharded": torch.empty(3, device="meta")}
    return {"alike": contiguous, "unlike": {name: pair[rank] for name, pair in unlike().items()}, "meta": meta}


def _merged() -> bytes:
    processes = process_group(timeout=TIMEOUT)
    file = io.BytesIO()
    torch.save(of_all(state_of(processes.rank), processes), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def merged() -> list[State]:
    """What each of two ranks got, written and read as a checkpoint is."""
    return [torch.load(io.BytesIO(written), weights_only=True) for written in run_together(_merged, 2)]


@pytest.mark.moderate
def test_each_rank_gets_back_what_it_had(merged: list[State]) -> None:
    for rank in range(2):
        found, expected = for_rank(merged[0], rank), state_of(rank)
        assert equal(found["alike"], expected["alike"])
        for name, value in expected["unlike"].items():
            assert equal(found["unlike"][name], value), name
        assert (found["rank"], found["processes"]) == (rank, 2)
        assert "ranks" not in found


def test_only_what_differs_is_kept_twice(merged: list[State]) -> None:
    [difference] = merged[0]["ranks"].values()
    kind, parts = difference
    assert (kind, list(parts)) == ("within", ["unlike"])
    kind, parts = parts["unlike"]
    assert list(parts) == list(unlike())
    assert parts["inside"] == ["within", {"a": ["within", {1: ["within", {"b": ["within", {1: ["is", 2]}]}]}]}]


def test_the_other_ranks_keep_their_own(merged: list[State]) -> None:
    assert equal({**merged[1], "meta": None}, {**state_of(1), "meta": None, "processes": 2, "rank": 1, "ranks": {}})


def test_a_rank_that_was_not_there_gets_what_the_one_that_saved_had(merged: list[State]) -> None:
    found = for_rank(merged[0], 2)
    assert found["rank"] == 0
    assert equal(found["unlike"], state_of(0)["unlike"])


def test_a_single_process_has_nothing_to_merge() -> None:
    state = state_of(0)
    assert of_all(state, SINGLE_PROCESS) is state
    assert for_rank({"step": 3}, 1) == {"step": 3, "rank": 0}
