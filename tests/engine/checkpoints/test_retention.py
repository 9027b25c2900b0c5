"""Retention: which versions stay as the last or the best, whatever of their writing and removing fails."""

from __future__ import annotations

import math
import random

import pytest

from signalfire.authoring.monitor import Monitor
from signalfire.checkpoints import Entry, Retention

better = Monitor("Checkpoint", "score", "min").better


@pytest.fixture
def retention() -> Retention:
    return Retention(2)


def select(retention: Retention, base: str, value: float | None, iteration: int) -> None:
    """Select an entry as the last one, or with a value if it is among the best."""
    if value is None:
        retention.select_last(Entry(base, None, iteration))
    elif (place := retention.place(value, iteration, better)) is not None:
        retention.select_best(Entry(base, value, iteration), place)


def save(retention: Retention) -> list[str]:
    """Save the selected entry, if any, under the name that it asks for; the names of what it supersedes."""
    if (entry := retention.take_selected()) is None:
        return []
    superseded = retention.superseded_by(entry)
    retention.saved(entry, entry.base, list(retention.planned), [])
    return superseded


def kept_of(values: list[float], keep: int) -> list[tuple[str, float | None]]:
    """What is kept of these values, one in each iteration."""
    retention = Retention(keep)
    for iteration, value in enumerate(values, start=1):
        select(retention, str(iteration), value, iteration)
        save(retention)
    return [(name, entry.value) for name, entry in retention.kept]


# ---- the best -----------------------------------------------------------------------------------------------------


def test_of_equal_values_the_earlier_one_stays() -> None:
    assert kept_of([2.0, 1.0, 1.0, 2.0, 1.0], keep=2) == [("2", 1.0), ("3", 1.0)]


def test_nan_is_never_kept() -> None:
    assert kept_of([math.nan, math.nan], keep=2) == []
    assert kept_of([math.nan, 3.0, math.nan, 2.0, math.nan], keep=3) == [("4", 2.0), ("2", 3.0)]


def test_infinity_is_kept_until_something_is_better() -> None:
    assert kept_of([math.inf, 3.0], keep=2) == [("2", 3.0), ("1", math.inf)]
    assert kept_of([math.inf, 3.0], keep=1) == [("2", 3.0)]


def test_a_second_value_of_an_iteration_is_compared_without_the_first(retention: Retention) -> None:
    for iteration, value in ((1, 3.0), (2, 1.0)):
        select(retention, f"{iteration}", value, iteration)
        save(retention)
    assert retention.place(2.0, 3, better) == 1
    assert retention.place(9.0, 3, better) is None
    assert retention.place(9.0, 2, better) == 1, "the place of the first is free"
    retention.drop(2)
    select(retention, "3", 2.0, 3)
    assert save(retention) == ["2"]
    assert [name for name, _ in retention.kept] == ["3", "1"]


# ---- planned and written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [False, True])
def test_whatever_fails_what_is_on_the_disk_is_kept_or_is_removed_by_a_later_save(best: bool) -> None:
    chance = random.Random(5)
    for keep in (1, 2, 3) * 5:
        retention, disk = Retention(keep), set[str]()
        for step in range(60):  # two in each iteration, of one name or of two
            select(retention, chance.choice(["a", "b"]) + str(step // 2), chance.random() if best else None, step // 2)
            if (entry := retention.take_selected()) is None:
                continue
            superseded, outcome = set(retention.superseded_by(entry)) - {entry.base}, chance.random()
            assert superseded <= disk
            if outcome < 0.6:
                left = [name for name in sorted(superseded) if chance.random() < 0.2]
                disk = (disk - superseded) | {entry.base, *left}
                retention.saved(entry, entry.base, list(retention.planned), left)
            elif outcome < 0.8:
                retention.failed()
            else:  # it is there, but that is not certain: the folder could not be synced
                disk.add(entry.base)
                retention.failed([entry.base])
            kept = [name for name, _ in retention.kept]
            assert disk == {*kept, *retention.superseded}
            assert not {*kept} & {*retention.superseded}
            assert retention.planned == retention.written
            assert len(kept) == len({one.iteration for one in retention.written}) <= keep
        assert len(kept) == keep


def test_a_save_that_is_not_finished_changes_what_is_planned_and_not_what_is_kept(retention: Retention) -> None:
    for iteration in (1, 2):
        select(retention, f"{iteration}", None, iteration)
        save(retention)
    select(retention, "3", None, 3)
    assert [one.iteration for one in retention.planned] == [2, 3]
    assert [name for name, _ in retention.kept] == ["1", "2"]
    retention.restart()
    assert [one.iteration for one in retention.planned] == [1, 2]
    assert retention.take_selected() is None, "the next run does not write what the last one had selected"


def test_a_new_version_avoids_the_names_of_the_other_entries(retention: Retention) -> None:
    for iteration in (1, 2):
        select(retention, f"{iteration}", None, iteration)
        save(retention)
    assert retention.other_names(Entry("2", None, 2)) == {"1"}
    assert retention.other_names(Entry("3", None, 3)) == {"1", "2"}


# ---- saved states -------------------------------------------------------------------------------------------------


def test_a_loaded_entry_is_kept_once_its_version_is_found_under_the_last_number(retention: Retention) -> None:
    retention.superseded = ["of the run before"]
    retention.load([Entry("a", 1.0, 4), Entry("gone", 2.0, 6)])
    assert (retention.kept, retention.superseded) == ([], [])
    iterations = {"a": 4, "a-9": 4, "a-10": 4, "a-last": 4, "a-11": 5, "ahead": 7}
    manifests = {name: {"iteration": iteration, "value": 1.0} for name, iteration in iterations.items()}
    retention.look_up(manifests, iteration=6)
    assert retention.kept == [("a-10", Entry("a", 1.0, 4))]
    assert retention.superseded == ["a", "a-9", "a-last", "a-11"], "up to the iteration from which the run resumes"
    select(retention, "b", 0.5, 7)
    assert save(retention) == ["a", "a-9", "a-last", "a-11"]
    assert [name for name, _ in retention.kept] == ["b", "a-10"]
