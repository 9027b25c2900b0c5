"""The short form of tests/campaigns/kills_together.py: one of several is killed again and again."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

from tests.kit import MEMORY, campaign, last_of_campaign

KILLS = 5
CONTROLS = ["no random states of rank 1"]


@pytest.fixture(scope="module", params=["replicated", "sharded"])
def found(request: pytest.FixtureRequest) -> Any:
    options = ["--processes", 2, 3, "--kills", KILLS, "--seed", 1, "--folder", MEMORY or tempfile.gettempdir()]
    options += ["--sharded"] if request.param == "sharded" else []
    return campaign("kills_together", *options, "--controls", *CONTROLS)


@pytest.mark.campaign
@pytest.mark.parametrize("processes", ["2", "3"])
def test_killed_at_random_moments_all_end_as_if_none_had_been(found: Any, processes: str) -> None:
    one = found["processes"][processes]
    assert one["failures"] == 0, one["failed"]
    assert one["kills"] == KILLS
    assert one["jobs"] == one["finished_with_status_0"] >= 1


@pytest.mark.campaign
@pytest.mark.parametrize("processes", ["2", "3"])
def test_every_kill_was_noticed_by_all_of_the_others(found: Any, processes: str) -> None:
    one = found["processes"][processes]
    assert sum(one["statuses_of_others"].values()) == KILLS * (int(processes) - 1)
    assert set(one["statuses_of_others"]) <= {"0", "1"}
    assert sum(times["kills"] for times in one["noticed_seconds"].values()) == KILLS


@pytest.mark.campaign
@pytest.mark.parametrize("broken", CONTROLS)
def test_what_is_broken_is_noticed(found: Any, broken: str) -> None:
    assert found["controls"][broken]["failures"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "result", "kills"),
    [([], "kills_together", 300), (["--sharded"], "kills_sharded", 70)],
    ids=["replicated", "sharded"],
)
def test_the_last_result_of_the_long_form_is_printed(options: list[str], result: str, kills: int) -> None:
    printed, last = last_of_campaign("kills_together", *options, result=result)
    for size, one in last["processes"].items():
        assert f"{size} processes: {one['kills']} kills " in printed
        assert f"  {one['failures']} failures" in printed
        assert one["failures"] == 0
        assert one["kills"] >= kills
    assert all(one["failures"] > 0 for one in last["controls"].values())
