"""Changes one phase, rank, read or write of a shipped handler's declarations, and counts how many changes the tests notice.

    python tests/campaigns/declarations.py [--count 60] [--seed 0] [--only HANDLER] [--json FILE]
    python tests/campaigns/declarations.py --last

Each mutant runs in a process of its own, in which the declaration is changed before the tests are collected: first the tests of
the handler itself, then those that try handlers together; for a read or a write those that record what receivers read and write
in runs. A mutant that no test notices is listed. Left out as equivalent are changes of a phase or rank that move a receiver past
none whose order could matter (see `Met.disturbs`), reads of what the receiver also writes, what only happens where the tests of
declarations say, such as on a second device, and those in `EQUIVALENT`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "declarations.json"
VARIABLE = "SIGNALFIRE_MUTANT"
DECLARED = "tests/engine/core/test_declarations.py"
TOGETHER = (
    "tests/test_recipes.py",
    "tests/test_composition.py",
    "tests/test_resume.py",
    "tests/test_invariants.py",
    DECLARED,
)
LIMIT = 900.0  # seconds for the tests of one mutant

OF_SEVERAL = frozenset({"metrics", "files", "stop", "step", "flags", "processes", "signals", "error"})
"""Things of which each receiver writes entries, files or requests of its own, in any order."""

_PLAN = "chunks and left-out updates are told apart by the names of the updates: both orders give the same plan"
_LATER = "what it prepares is first used in the forward, or later"
_ONE = "a Checkpoint selects either the last versions or the best"
_CHECK = "it raises an error before the first batch, wherever it stands"
_NOTES = "it notes what the backward did, which is asked once all receivers of the event have run"
EQUIVALENT = {
    "TruncatedBPTT.split_batch[1] phase PREPARE": _PLAN,
    "UpdateFrequency.select_updates[2] phase FINALIZE": _PLAN,
    "UpdateFrequency.select_updates[2] rank 0": _PLAN,
    "UpdateFrequency.select_updates[2] rank 10": _PLAN,
    "Metrics.claim_metrics[1] phase CHANGE": _LATER,
    "Metrics.publish_running[4]": _LATER,
    "History.begin[0] phase CONTROL": _LATER,
    "CSVLogger.begin[0] phase CONTROL": _LATER,
    "TensorBoardLogger.begin[0] phase CONTROL": _LATER,
    "FullyShardedDataParallel.reset_progress[7] phase CHANGE": _LATER,
    "FullyShardedDataParallel.sync_open_window[10] phase CHANGE": "gradients of an open window are next used with the next batch",
    "Checkpoint.select_last[7] rank 0": _ONE,
    "Checkpoint.select_last[7] rank -10": _ONE,
    "Checkpoint.select_best[8] rank 0": _ONE,
    "Checkpoint.select_best[8] rank -10": _ONE,
    "Metrics.check_mergeable[0]": _CHECK,
    "ProgressBar.check_metrics[1]": _CHECK,
    "EarlyStopping.check_metric_exists[6]": "it raises an error, and no best is saved by a metric that does not exist",
    "Checkpoint.check_metric_exists[9]": "no version is selected by a metric that does not exist",
    "LRScheduling.step_on_epoch[4] phase RECORD": "nothing reads rates between the two, and SWA(lr=) excludes it",
    "DistributedDataParallel.set_gradient_sync[9] phase CHANGE": _LATER,
    "FullyShardedDataParallel.set_gradient_sync[8] phase CHANGE": _LATER,
    "DistributedDataParallel.record_backward[10]": _NOTES,
    "FullyShardedDataParallel.record_backward[9]": _NOTES,
    "DistributedDataParallel.stop_watch[4]": "an error at ENDED is not explained by the watch any more, before or after its end",
    "Guards.look_at_evaluation[4]": _LATER,
}
"""Further mutants that change nothing that anybody could see, and why; without a kind, wherever a receiver is moved to."""


@dataclass(frozen=True)
class Mutant:
    """A declaration that is changed.

    Attributes:
        handler: a class that declares it; in others that inherit it, it is changed as well.
        place: which of its subscriptions.
        method: its method, to be read.
        kind: "phase", "rank", "read" or "write".
        value: the phase or rank that it gets, or the thing that all subscriptions of the method lose.
    """

    handler: str
    place: int
    method: str
    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.subscription} {self.kind} {self.value}"

    @property
    def subscription(self) -> str:
        return f"{self.handler}.{self.method}[{self.place}]"


def mutants() -> Iterator[Mutant]:
    """Every phase to its neighbors, every rank to none and to its opposite, every read and write left out."""
    from signalfire import Phase
    from tests.kit import shipped
    from tests.watching import declared, place_of

    subscriptions, methods = set(), set()  # those of a base are met again in its other classes
    for kind in sorted(shipped(), key=lambda one: one.__name__):
        for place, one in enumerate(kind.subscriptions):
            method = place_of(kind, one.method)
            if (method, one) not in subscriptions:
                subscriptions.add((method, one))
                for phase in (one.phase - 1, one.phase + 1):
                    if phase in list(Phase):
                        yield Mutant(kind.__name__, place, one.method, "phase", Phase(phase).name)
                for rank in sorted({0, -one.rank} - {one.rank}):
                    yield Mutant(kind.__name__, place, one.method, "rank", str(rank))
            if method not in methods:
                methods.add(method)
                reads, writes = declared(kind)[method]
                for read in sorted(reads - writes):
                    yield Mutant(kind.__name__, place, one.method, "read", read)
                for write in sorted(writes):
                    yield Mutant(kind.__name__, place, one.method, "write", write)


@dataclass(frozen=True)
class Met:
    """A receiver that a case of the invariants has at an event."""

    event: str
    phase: int
    rank: int
    handler: str
    method: tuple[str, str]
    reads: frozenset[str]
    writes: frozenset[str]

    def disturbs(self, other: Met) -> bool:
        """Whether the order of the two can matter: to what a handler keeps for itself, to the saved state, to a shared thing."""
        own = self.method[0] == other.method[0] or self.handler == other.handler
        saves = "state" in self.reads | self.writes | other.reads | other.writes
        read = self.writes & other.reads or other.writes & self.reads
        return own or saves or bool(read or (self.writes & other.writes) - OF_SEVERAL)


def receivers() -> set[Met]:
    """Every receiver that the cases of the invariants have."""
    from signalfire import Phase
    from tests.test_invariants import CASES, cells_of
    from tests.watching import declared, place_of

    found = set()
    for case in CASES.values():
        kind = type(case.make())
        things = declared(kind)
        for (event, phase), methods in cells_of(case).items():
            for name, rank in methods.items():
                method = place_of(kind, name)
                found.add(Met(event, Phase[phase], rank, kind.__name__, method, *things[method]))
    return found


def is_equivalent(mutant: Mutant, met: set[Met]) -> bool:
    """Whether a mutant changes nothing that anybody could see, such as one that moves a receiver past none that it disturbs."""
    from signalfire import Phase
    from tests.engine.core.test_declarations import NOT_IN_THESE_RUNS, NOT_RECORDED
    from tests.kit import shipped
    from tests.watching import place_of

    if str(mutant) in EQUIVALENT or (mutant.kind in ("phase", "rank") and mutant.subscription in EQUIVALENT):
        return True
    (kind,) = (one for one in shipped() if one.__name__ == mutant.handler)
    before = kind.subscriptions[mutant.place]
    method = place_of(kind, before.method)
    if mutant.kind in ("read", "write"):
        return method in (NOT_RECORDED if mutant.kind == "read" else NOT_IN_THESE_RUNS)
    phase = Phase[mutant.value] if mutant.kind == "phase" else before.phase
    rank = int(mutant.value) if mutant.kind == "rank" else before.rank

    def order(one: Met, other: Met) -> int:
        return ((one.phase, one.rank) > (other.phase, other.rank)) - ((one.phase, one.rank) < (other.phase, other.rank))

    moved = [one for one in met if one.method == method and (one.phase, one.rank) == (before.phase, before.rank)]
    return bool(moved) and not any(
        other.event == one.event
        and other.method != one.method
        and order(one, other) != order(replace(one, phase=phase, rank=rank), other)
        and one.disturbs(other)
        for one in moved
        for other in met
    )


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of pytest: change the declaration that the environment names."""
    from signalfire import Phase
    from tests.kit import shipped
    from tests.watching import place_of

    mutant = Mutant(**json.loads(os.environ[VARIABLE]))
    (kind,) = (one for one in shipped() if one.__name__ == mutant.handler)
    before = kind.subscriptions[mutant.place]
    assert before.method == mutant.method
    owner = place_of(kind, before.method)

    def changed(one: Any) -> Any:
        if mutant.kind == "read":
            return replace(one, reads=(one.reads or frozenset()) - {mutant.value})
        if mutant.kind == "write":
            return replace(one, writes=(one.writes or frozenset()) - {mutant.value})
        if one != before:
            return one
        if mutant.kind == "phase":
            return replace(one, phase=Phase[mutant.value])
        return replace(one, rank=int(mutant.value))

    for other in shipped():
        of_method = [
            one.method == before.method and place_of(other, one.method) == owner for one in other.subscriptions
        ]
        other.subscriptions = tuple(
            changed(one) if same else one for one, same in zip(other.subscriptions, of_method, strict=True)
        )


def noticed_by(mutant: Mutant) -> str | None:
    """The first test that fails with a mutant; None if all pass."""
    own = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests" / "handlers").glob("test_*.py")
        if mutant.handler.lower().startswith(path.stem.removeprefix("test_").replace("_", ""))
    ]
    files = [DECLARED] if mutant.kind in ("read", "write") else [*own, *TOGETHER]
    environment = os.environ | {VARIABLE: json.dumps(asdict(mutant))}
    for file in files:
        command = [sys.executable, "-m", "pytest", "--full", "-x", "-p", "tests.campaigns.declarations", file]
        try:
            run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"{file}: not ended after {LIMIT:g} s"
        if run.returncode not in (0, 5):
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.M)
            return failed[0] if failed else f"{file}: exit code {run.returncode}"
    return None


def drawn(count: int, seed: int, only: str | None) -> list[Mutant]:
    """Mutants to try, those left out that are equivalent; a change of a handler changes which others are drawn by one at most."""
    names = {name for mutant in mutants() for name in (str(mutant), mutant.subscription)}
    if stale := EQUIVALENT.keys() - names:
        raise ValueError(f"no mutant is called {', '.join(sorted(stale))} any more")
    met = receivers()
    known = [one for one in mutants() if only in (None, one.handler) and not is_equivalent(one, met)]
    return sorted(known, key=lambda one: hashlib.sha256(f"{seed} {one}".encode()).digest())[:count]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="mutants of this class alone")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--last", action="store_true", help="show what was measured last")
    options = parser.parse_args(arguments)
    if not options.last:
        several = drawn(options.count, options.seed, options.only)
        found: dict[str, str | None] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            running = {pool.submit(noticed_by, mutant): mutant for mutant in several}
            for done in as_completed(running):
                found[str(running[done])] = test = done.result()
                print(f"{running[done]}: {test or 'NOTICED BY NO TEST'}", flush=True)
        options.json.write_text(json.dumps({"seed": options.seed, "mutants": found}, indent=1) + "\n")
    result = json.loads(options.json.read_text())
    unnoticed = [name for name, test in result["mutants"].items() if test is None]
    print(f"{len(result['mutants']) - len(unnoticed)} of {len(result['mutants'])} changes are noticed")
    print("\n".join(unnoticed))
    return len(unnoticed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
