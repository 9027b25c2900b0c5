"""Digests: one bit anywhere changes them, and how a value lies in memory does not."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from signalfire.authoring.versions import TORCH
from signalfire.traces import Digests, digests

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Batch:
    inputs: Tensor
    names: list[str]


@pytest.fixture(params=["as on the CPU", "as on a device"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small tensors of the CPU are hashed; those of a device are summed, and here those of the CPU, too."""
    if request.param == "as on a device":
        monkeypatch.setattr(digests, "_is_near", lambda tensor: False)
    return str(request.param)


def digest(value: Any) -> str:
    found = Digests()
    found.add("value", value)
    return found.read()["value"]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)


KNOWN: dict[str, tuple[Callable[[], Any], tuple[str, str]]] = {
    "one dtype": (
        lambda: {"weight": torch.arange(6.0).reshape(2, 3).t(), "bias": torch.arange(3.0) - 1},
        ("7dba9a805f0a9650", "1f1ec05e126f0e92"),
    ),
    "dtypes": (
        lambda: {
            "weight": torch.arange(6.0).reshape(2, 3).t(),
            "bias": torch.arange(3.0) - 1,
            "steps": torch.tensor(7),
            "half": torch.arange(4).to(torch.bfloat16),
        },
        ("2c52e01dbb7a8e9b", "2b5b89963de5a8d0"),
    ),
    "nested": (
        lambda: [(torch.ones(2), 3), {"key": None, "on": True}, np.arange(3)],
        ("0aa1932b3f3699f6", "7ef8db4b1a4f595b"),
    ),
    "large": (lambda: [torch.arange(20000.0), torch.arange(20000)], ("2465c05c15f6a462",) * 2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_digest_stays_that_of_earlier_traces(name: str, way: str) -> None:
    make, known = KNOWN[name]
    assert digest(make()) == known[way == "as on a device"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, 2**14 + 1, 2**20 + 3])
def test_one_bit_anywhere_changes_a_digest(dtype: torch.dtype, count: int) -> None:
    tensor = drawn(count, dtype=dtype)
    before = digest(tensor)
    for place in (0, count // 2, count - 1):
        other = tensor.clone()
        other[place] = torch.nextafter(tensor[place], torch.tensor(torch.inf, dtype=dtype))
        assert digest(other) != before


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128])
def test_a_negated_tensor_has_another_digest(dtype: torch.dtype) -> None:
    for count in (1, 2, 3, 4, 1000, 2**14 + 2):
        tensor = drawn(count, dtype=dtype)
        assert digest(-tensor) != digest(tensor)
        if not dtype.is_complex:  # of which torch leaves some zeros as they are
            assert digest(torch.zeros(count, dtype=dtype)) != digest(-torch.zeros(count, dtype=dtype))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_negated_booleans_and_sparse_tensors_have_other_digests() -> None:
    flags = drawn(64) > 0
    assert digest(~flags) != digest(flags)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        sparse = drawn(4, 4).to_sparse(layout=layout)
        assert digest(sparse) == digest(sparse.clone())
        assert len({digest(one) for one in (sparse, -sparse, sparse.to_dense())}) == 3
    places = torch.tensor([[0, 2]])
    zero, other = (torch.sparse_coo_tensor(places, torch.tensor([1.0, value]), (4,)) for value in (0.0, -0.0))
    assert digest(zero) != digest(other)


def test_swapped_rows_chunks_and_neighbors_have_other_digests() -> None:
    rows = drawn(6, 5)
    assert digest(rows[[0, 2, 1, 3, 4, 5]]) != digest(rows)
    large = drawn(3 * 2**20)
    first, second, third = large.split(2**20)
    orders = [(first, second, third), (second, first, third), (first, third, second), (third, second, first)]
    assert len({digest(torch.cat(one)) for one in orders}) == 4
    assert digest([first, second]) != digest([second, first])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64]
)
def test_how_a_tensor_lies_in_memory_makes_no_difference(dtype: torch.dtype) -> None:
    square = drawn(200, 200, dtype=dtype)
    views: list[Callable[[Tensor], Tensor]] = [
        Tensor.t,
        lambda one: one[::2, 3:],
        lambda one: one[:, 0],
        lambda one: one[::7].flatten()[::3],
    ]
    for view in views:
        assert digest(view(square)) == digest(view(square).contiguous().clone())
    expanded = square[:1, :1].expand(7, 9)
    assert digest(expanded) == digest(expanded.contiguous())


def test_lazily_conjugated_and_negated_tensors_are_digested_as_what_they_are() -> None:
    number = drawn(9, dtype=torch.complex64) + 1j
    assert digest(number.conj()) == digest(number.conj().resolve_conj()) != digest(number)
    assert digest(number.conj().imag) == digest(-number.imag)


def test_another_dtype_or_shape_or_kind_has_another_digest() -> None:
    zeros = [
        torch.zeros(4, dtype=dtype)
        for dtype in (*DTYPES, torch.int32, torch.int16, torch.complex64, torch.uint8, torch.bool)
    ]
    shapes = [
        torch.zeros(2, 2),
        torch.zeros(4, 1),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(4, 2),
        torch.zeros(()),
    ]
    assert len({digest(one) for one in zeros + shapes}) == len(zeros) + len(shapes)
    assert digest(torch.zeros(4, dtype=torch.complex64)) != digest(torch.zeros(4, 2))


def test_a_nan_with_another_payload_has_another_digest() -> None:
    one, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert one.isnan().all()
    assert other.isnan().all()
    assert digest(one) != digest(other)


RARE = [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*RARE, *([torch.float4_e2m1fn_x2] if TORCH >= (2, 10) else [])])
def test_tensors_of_rare_dtypes_have_digests(dtype: torch.dtype) -> None:
    one, other = (torch.tensor([1, 2, 3, 4, 5, 6, 7, last], dtype=torch.uint8).view(dtype) for last in (8, 9))
    assert digest([one, one]) == digest([one.clone(), one]) != digest([one, other])


def test_nested_tensors_have_digests_of_their_rows() -> None:
    def nested(last: float) -> Tensor:
        return torch.nested.nested_tensor([drawn(2, 3), torch.full((4, 3), last)], layout=torch.jagged)

    assert digest(nested(1.0)) == digest(nested(1.0)) != digest(nested(2.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2), (1, 1.0), (1, True), (0.0, -0.0), ("1", 1), ("ab", "ba"), (b"1", 1), (None, 0), ([b"a;b"], [b"a", b"b"]),
        ([1, [2]], [[1], 2]),
        ([1], (1,)), (np.float32(1), np.float32(2)), (np.int64(1), np.int64(2)), (np.arange(3), np.arange(3)[::-1]),
        (np.array([1, "a"], dtype=object), np.array([2, "a"], dtype=object)), ({1, 2}, {1, 3}), (Color.RED, Color.BLUE),
        (torch.float32, torch.float16), (torch.Size([1]), torch.Size([2])), (range(3), range(4)),
        ({"a": 1}, {"b": 1}), ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (Batch(torch.ones(2), ["a"]), Batch(torch.ones(2), ["b"])),
        (Batch(torch.ones(2), ["a"]), Batch(torch.zeros(2), ["a"])),
    ],
)  # fmt: skip
def test_other_values_have_other_digests(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_objects_of_other_classes_are_the_same_in_another_process() -> None:
    assert digest([object()]) == digest([object()])
    assert digest({object(): 1}) == digest({object(): 1})


def test_what_is_added_may_change_before_it_is_read_and_numbers_are_exact() -> None:
    tensor = drawn(5)
    found, expected = Digests(), digest(tensor)
    found.add("value", tensor)
    found.add_number("loss", torch.tensor(0.1, requires_grad=True))
    found.add_number("other", 0.1)
    tensor.zero_()
    assert found.read() == {"value": expected}
    assert found.numbers == {"loss": float(torch.tensor(0.1)), "other": 0.1}


def test_much_is_hashed_at_once_with_the_digests_of_little(way: str) -> None:
    tensors = {str(number): torch.full((2**14,), float(number)) for number in range(2**6 + 2)}
    expected = {name: digest(one) for name, one in tensors.items()}
    found = Digests()
    for name, one in tensors.items():
        found.add(name, one)
        one.zero_()
    if way == "as on the CPU":
        kept = sum(isinstance(one, tuple) for one in found._contents.values())
        assert kept == 2**6  # 2**20 elements
    assert found.read() == found.read() == expected
