"""Regions: what is entered is left at the end of the innermost one, last in, first out, also after errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from signalfire.core.regions import Regions, note_problems


@contextmanager
def entered(log: list[str], name: str, error: BaseException | None = None) -> Iterator[str]:
    log.append(f"enter {name}")
    try:
        yield name
    finally:
        log.append(f"leave {name}")
        if error is not None:
            raise error


def test_what_is_entered_in_a_region_is_left_at_its_end_in_reverse_order() -> None:
    regions, log = Regions(), list[str]()
    with regions.region():
        assert regions.enter(entered(log, "a")) == "a"
        with regions.region():
            regions.enter(entered(log, "b"))
            regions.enter(entered(log, "c"))
        assert log == ["enter a", "enter b", "enter c", "leave c", "leave b"]
    assert log[-1] == "leave a"
    assert regions.depth == 0


def test_nothing_is_entered_outside_a_region() -> None:
    with pytest.raises(RuntimeError, match="no region is open"):
        Regions().enter(entered([], "a"))


def test_an_error_leaves_all_and_problems_of_leaving_are_in_its_notes() -> None:
    regions, log = Regions(), list[str]()

    def fail() -> None:
        with regions.region():
            regions.enter(entered(log, "a"))
            regions.enter(entered(log, "b", LookupError("gone")))
            raise ArithmeticError("first")

    with pytest.raises(ArithmeticError) as caught:
        fail()
    assert log == ["enter a", "enter b", "leave b", "leave a"]
    assert caught.value.__notes__ == ["another error: LookupError: gone"]


def test_an_interrupt_while_leaving_is_not_swallowed() -> None:
    regions = Regions()

    def fail() -> None:
        with regions.region():
            regions.enter(entered([], "a", KeyboardInterrupt()))
            raise ArithmeticError

    with pytest.raises(KeyboardInterrupt):
        fail()


def test_of_several_problems_the_first_is_raised_and_the_others_are_noted() -> None:
    with pytest.raises(LookupError) as caught:
        note_problems([LookupError("one"), ArithmeticError("two")], None)
    assert caught.value.__notes__ == ["another error: ArithmeticError: two ()"]
    note_problems([], None)
