"""Kills trainings of elastic data parallelism, starts them again with other numbers of processes, and compares their ends.

    python tests/campaigns/elastic.py [--jobs 100] [--seed 0] [--json FILE]
    python tests/campaigns/elastic.py --last

Each job draws a recipe: an MLP with dropout and MixUp, a CNN with BatchNorm and augmentation, or a transformer with bf16,
clipping, accumulation and averages. All of its processes are ended by SIGKILL at a moment that is drawn by chance; then they are
started again, as many as are drawn from 1 to 8, up to six times, and at last until the end. Checkpoints are written every second
iteration, also inside windows. A failure is an end that differs from that of one undisturbed process in one bit of weights,
optimizer, averages, metrics or rows of the log, or a start that ends with an error without having been killed.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.campaigns.killing import environment, show  # noqa: E402
from tests.handlers.test_elastic_data_parallel import JOBS, lived  # noqa: E402
from tests.kit import digest  # noqa: E402
from tests.processes import Failed, run_together  # noqa: E402

RESULT = Path(__file__).parent / "results" / "elastic.json"
MOST_PROCESSES, MOST_KILLS = 8, 6
SOONEST, LATEST = 0.3, 2.0
"""The seconds after its start between which the processes of a job are killed."""


def run_job(draw: random.Random, folder: Path) -> dict[str, Any]:
    """Run a job to its end, and return what became of it."""
    name = draw.choice(sorted(JOBS))
    sizes: list[int] = []
    kills = draw.randint(1, MOST_KILLS)
    killed = 0
    while True:
        sizes.append(draw.randint(1, MOST_PROCESSES))
        limit = draw.uniform(SOONEST, LATEST) if killed < kills else 120.0
        try:
            ended = run_together(lived, sizes[-1], folder, None, name, timeout=limit)
        except Failed as error:
            late = [message for message in error.errors.values() if message.startswith("did not end within")]
            if not late or killed == kills:
                return {"recipe": name, "sizes": sizes, "kills": killed, "error": str(error)}
            killed += 1
            continue
        ends = [digest(one | {"rows": ended[0]["rows"]}) for one in ended]
        return {"recipe": name, "sizes": sizes, "kills": killed, "ends": sorted(set(ends))}


def campaign(jobs: int, seed: int) -> dict[str, Any]:
    """The result of so many jobs."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = {
            name: digest(run_together(lived, 1, Path(folder) / name, None, name)[0]) for name in sorted(JOBS)
        }
    found: list[dict[str, Any]] = []
    for number in range(jobs):
        with tempfile.TemporaryDirectory() as folder:
            found.append(run_job(random.Random(f"{seed} {number}"), Path(folder)))
        found[-1]["equal"] = found[-1].get("ends") == [undisturbed[found[-1]["recipe"]]]
        print(number, found[-1]["recipe"], found[-1]["sizes"], found[-1]["equal"], file=sys.stderr)
    sizes = collections.Counter(size for job in found for size in job["sizes"])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
        "seed": seed,
        "jobs": jobs,
        "equal": sum(job["equal"] for job in found),
        "kills": sum(job["kills"] for job in found),
        "starts": {str(size): count for size, count in sorted(sizes.items())},
        "failed": [job for job in found if not job["equal"]],
    }


def summary(found: Mapping[str, Any]) -> str:
    """The result in a few lines."""
    starts = ", ".join(f"{count} with {size}" for size, count in found["starts"].items())
    return (
        f"{found['date']}: {found['equal']} of {found['jobs']} jobs ended bit for bit as one undisturbed process, after "
        f"{found['kills']} kills\n  starts by processes: {starts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default=str(RESULT))
    parser.add_argument("--last", action="store_true", help="print the last result and end")
    options = parser.parse_args()
    if options.last:
        print(summary(json.loads(RESULT.read_text())))
        return
    torch.set_num_threads(1)
    found = campaign(options.jobs, options.seed)
    show(found, options.json, summary)
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
