"""Data that ends too early, too late, or is not what it seems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.kit import batches, build, mlp
from tests.mistakes.registry import mistake


class Sized:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(5))


@mistake("W21")
def a_length_that_is_too_small(right: bool) -> None:
    build(mlp(5, 8, 1)).run(Sized(5 if right else 4), max_epochs=2)
