"""The short form of tests/campaigns/elastic.py: trainings are killed, and started again with other numbers of processes."""

from __future__ import annotations

import pytest

from tests.kit import campaign, last_of_campaign


@pytest.mark.campaign
def test_killed_and_started_with_any_number_of_processes_all_end_as_one_undisturbed_process() -> None:
    found = campaign("elastic", "--jobs", 3, "--seed", 1)
    assert found["equal"] == found["jobs"] == 3, found["failed"]
    assert found["kills"] > 0


@pytest.mark.slow
def test_the_last_result_of_the_long_form_is_printed() -> None:
    printed, last = last_of_campaign("elastic")
    assert f"{last['equal']} of {last['jobs']} jobs ended bit for bit" in printed
    assert last["equal"] == last["jobs"] >= 100
    assert last["kills"] >= 100
