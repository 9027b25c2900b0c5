"""Copies of states: they share nothing with the state, and their memory is used again only once nobody reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire.resuming.copies import Copies
from tests.kit import assert_same


def state_of(seed: int, size: int = 5) -> dict[str, Any]:
    torch.manual_seed(seed)
    weight = torch.randn(size, 3)
    return {
        "weight": weight,
        "tied": weight,
        "turned": torch.randn(3, size).t(),
        "count": torch.tensor(seed),
        "name": "a",
    }


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def addresses(state: dict[str, Any]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors(state).values()}


def test_a_copy_is_alike_and_shares_nothing_but_what_the_state_shares_itself() -> None:
    state = state_of(1)
    copy = Copies().make(state)
    assert_same(tensors(copy.state), tensors(state))
    assert copy.state["name"] == "a"
    assert copy.state["tied"].data_ptr() == copy.state["weight"].data_ptr()
    assert copy.state["turned"].stride() == state["turned"].stride()
    assert not addresses(copy.state) & addresses(state)
    state["weight"].zero_()
    assert copy.state["weight"].count_nonzero() > 0


def test_the_memory_of_a_copy_is_used_again_once_all_who_share_it_have_released_it() -> None:
    copies = Copies()
    first = copies.make(state_of(1))
    first.users = 2
    first.release()
    second = copies.make(state_of(2))  # while the first is still read by one
    assert not addresses(second.state) & addresses(first.state)
    assert_same(tensors(first.state), tensors(state_of(1)))
    first.release()
    third = copies.make(state_of(3))
    assert addresses(third.state) == addresses(first.state)
    assert_same(tensors(third.state), tensors(state_of(3)))
    assert_same(tensors(second.state), tensors(state_of(2)))


def test_memory_of_another_shape_or_dtype_is_not_used_and_not_kept() -> None:
    copies = Copies()
    for state in (state_of(1), state_of(1, size=4), {"half": torch.ones(5, 3, dtype=torch.half)}):
        copy = copies.make(state)
        copy.users = 1
        assert_same(tensors(copy.state), tensors(state))
        copy.release()
    (kept,) = copies._kept.values()
    assert [tensor.dtype for tensor in kept] == [torch.half]
    copies.free()
    assert not copies._kept


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        nn.Parameter(torch.ones(2)),
        torch.empty(0, 4),
        torch.ones(2, 3)[:, 1],
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["sparse", "meta", "parameter", "empty", "view", "conjugate"],
)
def test_each_kind_of_tensor_is_copied(value: Tensor) -> None:
    copies = Copies()
    for _ in range(2):
        copy = copies.make([value])
        copy.users = 1
        assert copy.state[0].shape == value.shape
        assert copy.state[0].layout == value.layout
        assert value.is_meta or torch.equal(copy.state[0].to_dense(), value.detach().to_dense())
        assert not copy.state[0].requires_grad
        copy.release()


def test_a_conjugate_view_is_no_copy_of_what_it_is_a_view_of() -> None:
    tensor = torch.tensor([1 + 2j])
    copy = Copies().make([tensor, tensor.conj(), tensor.conj().imag])
    assert [part.tolist() for part in copy.state] == [[1 + 2j], [1 - 2j], [-2.0]]
