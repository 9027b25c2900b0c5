"""The short form of tests/campaigns/kills_together.py: one of several is killed again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = Path(__file__).parent / "campaigns" / "kills_together.py"
KILLS = 5
CONTROLS = ["no random states of rank 1"]


@pytest.fixture(scope="module")
def found() -> Any:
    """What a short campaign has found, in memory where there is such a folder."""
    command = [sys.executable, str(CAMPAIGN), "--processes", "2", "3", "--kills", str(KILLS), "--seed", "1"]
    command += ["--json", "-", "--controls", *CONTROLS]
    if os.path.isdir("/dev/shm"):
        command += ["--folder", "/dev/shm"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.stdout, finished.stderr
    return json.loads(finished.stdout)


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
def test_the_last_result_of_the_long_form_is_printed() -> None:
    command = [sys.executable, str(CAMPAIGN), "--last"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    last = json.loads((CAMPAIGN.parent / "results" / "kills_together.json").read_text())
    for size, one in last["processes"].items():
        assert f"{size} processes: {one['kills']} kills " in finished.stdout
        assert f"  {one['failures']} failures" in finished.stdout
        assert one["failures"] == 0
        assert one["kills"] >= 300
    assert all(one["failures"] > 0 for one in last["controls"].values())
