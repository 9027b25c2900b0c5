"""What a batch is made of."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from signalfire.authoring.batches import map_leaves, tensors_in


class Pair(NamedTuple):
    inputs: Any
    targets: Any


@dataclass
class Sample:
    inputs: Any
    label: str


def doubled(leaf: Any) -> Any:
    return leaf * 2 if isinstance(leaf, Tensor) else leaf


def test_leaves_are_mapped_in_all_containers_which_keep_their_type() -> None:
    one = torch.ones(1)
    batch: dict[str, Any] = {
        "tuple": (one, [one, "text"]),
        "named": Pair(one, None),
        "data": Sample(one, "cat"),
        "ordered": OrderedDict(b=one, a=3),
        "default": defaultdict(int, x=one),
    }
    mapped = map_leaves(doubled, batch)
    assert mapped["tuple"] == (2, [2, "text"])
    assert mapped["named"] == Pair(torch.tensor([2.0]), None)
    assert mapped["data"] == Sample(torch.tensor([2.0]), "cat")
    assert (type(mapped["ordered"]), list(mapped["ordered"])) == (OrderedDict, ["b", "a"])
    assert mapped["default"]["new"] == 0
    assert [tensor.item() for tensor in tensors_in(mapped)] == [2.0] * 6
    assert [tensor.item() for tensor in tensors_in(batch)] == [1.0] * 6, "the batch itself is not changed"


def test_what_can_be_moved_is_a_leaf_also_where_it_is_a_tuple() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    seen: list[Any] = []
    map_leaves(seen.append, [packed, 3])
    assert seen == [packed, 3]
