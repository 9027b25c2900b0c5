"""Sums of tensors over ranks: the tree of `TreeSum`, in buckets."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from signalfire.distributed import process_group
from signalfire.distributed.sums import RankSum, TreeSum
from tests.kit import digest
from tests.processes import assert_alike, run_together

RANKS = 4
MILLION = 2**20


def own(rank: int) -> list[Tensor]:
    """Tensors of several kinds: two buckets of at most 25 MB, and one of a large tensor."""
    make = partial(torch.randn, generator=torch.Generator().manual_seed(rank))
    tensors = [make(MILLION), make(3, 5).t(), make(MILLION + 1).bfloat16(), make(7 * MILLION), make(MILLION), make(2)]
    return [*tensors, torch.arange(4, dtype=torch.float64) / (rank + 3)]


def added(has_sum: list[bool]) -> tuple[bool, str, list[tuple[int, ...]]]:
    processes = process_group()
    sums = RankSum(own(processes.rank), processes, flag=processes.rank == 2)
    total = sums.total(has_sum)
    return sums.flagged, digest(total), [one.stride() for one in total]


@pytest.mark.moderate
@pytest.mark.parametrize("has_sum", [[True] * RANKS, [True, False, True, True]])
def test_the_sums_of_ranks_are_those_of_a_tree_on_each_of_them(has_sum: list[bool]) -> None:
    tree = TreeSum()
    for rank, one in enumerate(has_sum):
        tree.add(own(rank) if one else None)
    expected = tree.total()
    assert expected is not None
    assert assert_alike(run_together(added, RANKS, has_sum)) == (
        True,
        digest(expected),
        [one.stride() for one in expected],
    )
