"""The short form of tests/campaigns/kills.py: a training process that is killed again and again ends as one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = Path(__file__).parent / "campaigns" / "kills.py"
KILLS = 25


@pytest.fixture(scope="module")
def found() -> Any:
    """What a short campaign has found, in memory where there is such a folder."""
    command = [sys.executable, str(CAMPAIGN), "--kills", str(KILLS), "--seed", "1", "--json", "-"]
    if os.path.isdir("/dev/shm"):
        command += ["--folder", "/dev/shm"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.stdout, finished.stderr
    return json.loads(finished.stdout)


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
    command = [sys.executable, str(CAMPAIGN), "--last"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    last = json.loads((CAMPAIGN.parent / "results" / "kills.json").read_text())
    assert finished.stdout.startswith(f"{last['kills']} kills ")
    assert last["failures"] == 0
