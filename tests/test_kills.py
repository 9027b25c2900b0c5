"""The short form of tests/campaigns/kills.py: a training process that is killed again and again ends as one that was not."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

from tests.kit import MEMORY, campaign, last_of_campaign

KILLS = 25


@pytest.fixture(scope="module")
def found() -> Any:
    return campaign("kills", "--kills", KILLS, "--seed", 1, "--folder", MEMORY or tempfile.gettempdir())


@pytest.mark.campaign
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(found: Any) -> None:
    assert found["failures"] == 0, found["failed"]
    assert found["kills"] == KILLS
    assert found["runs"] >= 1


@pytest.mark.campaign
def test_some_were_killed_inside_a_save(found: Any) -> None:
    assert found["inside_saves"] >= found["writing"] > 0
    assert found["places"]["before the first iteration"] + found["places"]["between saves"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize("broken", ["no position in the data", "no random states", "saved in place"])
def test_what_is_broken_is_noticed(found: Any, broken: str) -> None:
    assert found["controls"][broken]["failures"] > 0


@pytest.mark.slow
def test_the_last_result_of_the_long_form_is_printed() -> None:
    printed, last = last_of_campaign("kills")
    assert printed.startswith(f"{last['kills']} kills ")
    assert last["failures"] == 0
