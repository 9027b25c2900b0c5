"""The short form of tests/campaigns/bisections.py: what made two runs differ is named."""

from __future__ import annotations

import pytest

from tests.kit import campaign, last_of_campaign


@pytest.mark.campaign
def test_changes_that_are_drawn_are_found() -> None:
    found = campaign("bisections", "--plants", 4, "--epochs", 2, "--every", 1, 10, "--seed", 1)
    assert [(one["events"], one["makers"]) for one in found["results"]] == [(4, 4), (4, 4)], found["failed"]


@pytest.mark.slow
def test_the_last_result_of_the_long_form_is_printed() -> None:
    printed, last = last_of_campaign("bisections")
    for one in last["results"]:
        assert f"of {one['events']} and of {one['makers']} of {one['plants']} changes" in printed
        assert one["events"] == one["plants"] >= 200
        assert one["makers"] >= 0.95 * one["plants"]
