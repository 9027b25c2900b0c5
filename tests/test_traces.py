"""Short forms of tests/campaigns/traces.py: what was changed is named, and runs that should be equal have equal traces."""

from __future__ import annotations

import pytest

from tests.kit import campaign, last_of_campaign


@pytest.mark.campaign
def test_the_first_record_that_a_planted_change_is_in_is_named() -> None:
    found = campaign("traces", "--plants", 8, "--epochs", 2, "--pairs", 0, "--kills", 0, "--seed", 1)
    for part in found["parts"].values():
        assert part["undisturbed_equal"]
        assert part["right"] == part["planted"] == 8, part["failed"]
        assert part["equal_then"] == part["in_no_record"] > 0, part["failed"]


@pytest.mark.campaign
def test_runs_that_differ_in_what_must_not_matter_have_equal_traces() -> None:
    part = campaign("traces", "--plants", 0, "--pairs", 3, "--kills", 0, "--seed", 1)["parts"]["equal"]
    assert part["equal"] == part["pairs"] == 3, part["failed"]
    assert part["control"] == "iteration 20, ITERATION_COMPLETED: the random numbers of torch"


@pytest.mark.campaign
def test_the_trace_of_a_killed_training_is_that_of_an_undisturbed_one() -> None:
    part = campaign("traces", "--plants", 0, "--pairs", 0, "--kills", 2, "--seed", 1)["parts"]["kills"]
    assert part["failures"] == 0, part["failed"]
    assert part["kills"] == 2


@pytest.mark.slow
def test_the_last_result_of_the_campaign_is_printed() -> None:
    printed, last = last_of_campaign("traces")
    for name, part in last["parts"].items():
        assert f"{name}:" in printed
        assert not part["failed"]
