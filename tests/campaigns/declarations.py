"""Changes one phase, rank or write of a shipped handler's declarations at a time, and counts how many changes the tests notice.

    python tests/campaigns/declarations.py [--count 60] [--seed 0] [--only HANDLER] [--json FILE]
    python tests/campaigns/declarations.py --last

Each mutant runs in a process of its own, in which the declaration is changed before the tests are collected: first the tests of
the handler itself, then those that try handlers together and those that compare what receivers write. A mutant that no test
notices is listed. What is declared to be read is not changed: it tells `Engine.check` alone which orders are left to chance.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "declarations.json"
VARIABLE = "SIGNALFIRE_MUTANT"
DECLARED = "tests/engine/test_declarations.py"
TOGETHER = (
    "tests/test_recipes.py",
    "tests/test_composition.py",
    "tests/test_resume.py",
    "tests/test_invariants.py",
    DECLARED,
)
LIMIT = 900.0  # seconds for the tests of one mutant

EQUIVALENT: dict[str, str] = {}
"""Mutants that change nothing that anybody could see, and why."""


@dataclass(frozen=True)
class Mutant:
    """A declaration that is changed.

    Attributes:
        handler: a class that declares it; in others that inherit it, it is changed as well.
        place: which of its subscriptions.
        method: its method, to be read.
        kind: "phase", "rank" or "write".
        value: the phase or rank that it gets, or the write that it loses.
    """

    handler: str
    place: int
    method: str
    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.handler}.{self.method}[{self.place}] {self.kind} {self.value}"


def mutants() -> Iterator[Mutant]:
    """Every phase to its neighbours, every rank to none and to its opposite, every write left out."""
    from signalfire import Phase
    from tests.kit import shipped
    from tests.watching import place_of

    seen = set()
    for kind in sorted(shipped(), key=lambda one: one.__name__):
        for place, one in enumerate(kind.subscriptions):
            if (place_of(kind, one.method), one) in seen:
                continue
            seen.add((place_of(kind, one.method), one))
            for phase in (one.phase - 1, one.phase + 1):
                if phase in list(Phase):
                    yield Mutant(kind.__name__, place, one.method, "phase", Phase(phase).name)
            for rank in sorted({0, -one.rank} - {one.rank}):
                yield Mutant(kind.__name__, place, one.method, "rank", str(rank))
            for write in sorted(one.writes or ()):
                yield Mutant(kind.__name__, place, one.method, "write", write)


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of pytest: change the declaration that the environment names."""
    from signalfire import Phase
    from tests.kit import shipped
    from tests.watching import place_of

    mutant = Mutant(**json.loads(os.environ[VARIABLE]))
    (kind,) = (one for one in shipped() if one.__name__ == mutant.handler)
    before = kind.subscriptions[mutant.place]
    assert before.method == mutant.method
    if mutant.kind == "phase":
        after = replace(before, phase=Phase[mutant.value])
    elif mutant.kind == "rank":
        after = replace(before, rank=int(mutant.value))
    else:
        after = replace(before, writes=(before.writes or frozenset()) - {mutant.value})
    owner = place_of(kind, before.method)
    for other in shipped():
        other.subscriptions = tuple(
            after if one == before and place_of(other, one.method) == owner else one for one in other.subscriptions
        )


def noticed_by(mutant: Mutant) -> str | None:
    """The first test that fails with a mutant; None if all pass."""
    own = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", mutant.handler).lower()
    files = [DECLARED] if mutant.kind == "write" else [f"tests/handlers/test_{own}.py", *TOGETHER]
    environment = os.environ | {VARIABLE: json.dumps(asdict(mutant))}
    for file in files:
        if not (ROOT / file).exists():
            continue
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
    """Mutants to try, those left out that are equivalent."""
    known = [one for one in mutants() if str(one) not in EQUIVALENT and only in (None, one.handler)]
    return random.Random(seed).sample(known, min(count, len(known)))


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
