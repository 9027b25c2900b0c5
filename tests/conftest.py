"""What every test runs under: one thread, and the tier that was asked for.

The quick tier runs by default: of each test the first case and the last, unless it is marked `whole`. `--moderate` adds what is
marked `moderate`, `--full` all cases and what is marked `slow` as well; `--rest` runs what `--full` adds to `--moderate`, and no
more. What is marked `campaign` or `neutral` runs by that name alone, as in `-m campaign`. A test that is named by its id runs
whatever its marks are. GPUs are hidden, and what needs one is skipped, unless `--cuda` is given.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# torch.distributed looks up the name of each address that connects to a store. A name server that does not answer holds up the
# whole store for as long as the resolver waits, 5 s by default: longer than many a timeout in these tests.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# On a small shared machine, two threads are many times slower, and sums come out otherwise: also in programs that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of programs that tests start would compile the package again, which takes each of them a second; and each session and
# each of its workers would rewrite the asserts of all tests again, which takes ten.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the slow tests as well: all but the campaigns")
    parser.addoption(
        "--moderate", action="store_true", help="run the moderate tests as well, of 0.15 s to some seconds"
    )
    parser.addoption("--rest", action="store_true", help="run what --full adds to --moderate, and no more")
    parser.addoption(
        "--cuda", action="store_true", help="let the tests see the GPUs: for tests/test_cuda.py and the like"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--cuda"):  # processes that are forked could not use them, and would expect one each
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if left := not_installed():
        raise pytest.UsageError(
            f"{left[0]} ({len(left)} such files) is not in the installed package, since it is newer than the installation: "
            "pip install -e . again"
        )
    # In memory, where there is such a folder: thousands of synced checkpoints would wait for a disk.
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


def not_installed() -> list[str]:
    """Files of the package that `import signalfire` does not find: an installation with -e links those there were."""
    installed = find_spec("signalfire")
    if installed is None or not installed.submodule_search_locations:
        return []
    (folder,) = installed.submodule_search_locations
    if "site-packages" in folder:
        return []  # a copy, of this version or another
    places = {"engine": Path(folder), "handlers": Path(folder, "handlers")}
    return [
        f"{source}/{name}"
        for source, place in places.items()
        if place.exists()  # not where an import hook maps the package to these folders
        for file in sorted((ROOT / source).rglob("*.py"))
        if not (place / (name := file.relative_to(ROOT / source).as_posix())).exists() and "project/" not in name
    ]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"an address in the id of a test differs from process to process: {unstable[0]}")
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    tier = next((name for name in ("full", "rest", "moderate") if config.getoption(f"--{name}")), "quick")
    kept = _of_tier("full" if tier == "rest" else tier, items)
    if tier == "rest":
        kept -= _of_tier("moderate", items)
    if left_out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def _of_tier(tier: str, items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases that the quick, the moderate or the full tier runs."""
    off = {"campaign", "neutral"} | {"quick": {"slow", "moderate"}, "moderate": {"slow"}, "full": set()}[tier]
    kept = [item for item in items if not any(mark.name in off for mark in item.iter_markers())]
    return set(kept) if tier == "full" else set(kept).difference(_beyond(kept))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Forget what a test has compiled: where anything is, some checks of later ones would be off."""
    yield
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and dynamo.cached_backends:
        torch._dynamo.reset()


def pytest_collection_finish() -> None:
    gc.freeze()  # torch, and thousands of collected tests, are gone through once less for each garbage collection


def _beyond(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of each test that the full tier alone runs: those between the first and the last."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("whole") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    return [case for cases in tests.values() for case in cases[1:-1]]
