"""The promises that every handler makes hold in two processes that train together, too, for every case of `test_invariants`.

The data is five batches, the last one short: each epoch has three turns, and in the last one the second process goes without. The
processes draw from random streams of their own.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.distributed  # which torch's DDP imports late: here once, and not in every process

from signalfire import Engine, Events, Handler, Phase, allow, seed_everything
from signalfire.distributed import process_group
from signalfire.handlers import DistributedDataParallel
from signalfire.testing import fingerprint
from tests import test_invariants as invariants
from tests.kit import DISTRIBUTING, quick, spread
from tests.processes import Failed, run_together
from tests.test_invariants import CASES, Case, make_data

EPOCHS, TURNS = 3, 3
CUTS = (1, 4, 8)
"""Iterations after which a run is cut, all of them inside an epoch: behind the first two, accumulation windows are open."""

IN_ONE_GO = 10
"""How many cases run one after the other in one pair of processes."""

# Distribution is attached to every case itself.
TRIED = sorted(case for case in CASES if not case.startswith(DISTRIBUTING))
QUICK_GROUP = ["GradientAccumulation", "Validation, iterations"]
GROUPS = [QUICK_GROUP, *(TRIED[i : i + IN_ONE_GO] for i in range(0, len(TRIED), IN_ONE_GO))]

Parts = dict[str, str]
"""A digest of each part of what a run left behind in one process."""


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(invariants, "FOLDER", tmp_path)


def distributed() -> Handler:
    return DistributedDataParallel(timeout=120)


def built(case: Case, *handlers: Handler, first: bool = False) -> Engine:
    """An engine in one of the processes, the distribution attached in front of everything else or after it."""
    engine = case.build()
    if first:
        before = list(engine.handlers.values())
        for handler in before:
            engine.detach(handler.name)
        engine.attach(distributed(), *before, *handlers)
    else:
        engine.attach(*handlers, distributed())
    return engine


def run(engine: Engine, seed: int = 0) -> Engine:
    seed_everything(seed + engine.processes.rank)
    engine.run(make_data(), max_epochs=EPOCHS)
    return engine


def cut(engine: Engine) -> dict[int, bytes]:
    """The state of all processes, as a file, after some iterations of the run to come; on rank 0 alone it holds all."""
    files: dict[int, bytes] = {}

    def save(engine: Engine) -> None:
        if engine.state.iteration in CUTS:
            buffer = io.BytesIO()
            torch.save(engine.state_dict(), buffer)
            files[engine.state.iteration] = buffer.getvalue()

    engine.connect(Events.ITERATION_COMPLETED, save, phase=Phase.PERSIST)
    return files


def digests(engine: Engine, *, handlers: bool = True) -> Parts:
    parts: Parts = fingerprint(engine, handlers=handlers)
    return parts


def in_every_way(names: list[str]) -> dict[str, dict[str, Parts]]:
    """In one of the processes: what each case left, run in every way that is compared."""
    with allow("W51", "C31"):  # a case is made without the engine: an evaluator has its own model, and nothing saves
        return {name: one_in_every_way(CASES[name]) for name in names}


def one_in_every_way(case: Case) -> dict[str, Parts]:
    left = {"plain": digests(run(built(case)), handlers=False)}
    engine = built(case, case.make())
    files = cut(engine)
    left["whole"] = digests(run(engine))
    # A trace says where each rank's own file ends.
    ranks_alike = [name for name, one in engine.handlers.items() if not one.rank_zero_only and name != "trace"]
    left["alike"] = {
        part: digest
        for part, digest in left["whole"].items()
        if part != "random" and (not part.startswith("handlers.") or part.removeprefix("handlers.") in ranks_alike)
    }
    left["first"] = digests(run(built(case, case.make(), first=True)))
    engine = built(case, handler := case.make())
    handler.enabled = False
    left["disabled"] = digests(run(engine), handlers=False)
    files = process_group().broadcast(files)
    for iteration, file in files.items():
        resumed = built(case, case.make())
        resumed.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        left[f"resumed after iteration {iteration}"] = digests(run(resumed, seed=100))
    return left


def different(one: Parts, other: Parts) -> list[str]:
    return sorted(part for part in one.keys() | other.keys() if one.get(part) != other.get(part))


@pytest.mark.slow
@pytest.mark.parametrize("group", quick(range(len(GROUPS)), 0), ids=lambda group: ", ".join(GROUPS[group]))
def test_two_processes_keep_the_promises(group: int) -> None:
    ranks: list[dict[str, dict[str, Parts]]] = run_together(in_every_way, 2, GROUPS[group])
    wrong: dict[str, Any] = {}
    for name in GROUPS[group]:
        problems: dict[str, Any] = {"ranks differ": different(*(left[name]["alike"] for left in ranks))}
        for rank, left in enumerate(one[name] for one in ranks):
            pairs = {"attached first": ("whole", "first"), "disabled": ("plain", "disabled")}
            pairs |= {way: ("whole", way) for way in left if way.startswith("resumed")}
            problems |= {f"{reported}, rank {rank}": different(left[a], left[b]) for reported, (a, b) in pairs.items()}
            if not CASES[name].changes_training:
                training = {part: left["whole"].get(part, "") for part in left["plain"] if part != "engine"}
                plain = {part: digest for part, digest in left["plain"].items() if part != "engine"}
                problems[f"changes training, rank {rank}"] = different(plain, training)
        wrong |= {f"{name}: {reported}": parts for reported, parts in problems.items() if parts}
    assert not wrong


@pytest.mark.slow
def test_the_check_sees_weights_and_counters_and_metrics() -> None:
    """What is compared as digests: nothing of it is left out."""
    (parts, one), (_, other) = run_together(with_parts, 2)
    assert {"modules.model", "updates.main", "engine", "random", "handlers.train_metrics"} <= parts.keys()
    assert one == other == {"epoch": EPOCHS, "iteration": EPOCHS * TURNS, "metrics": ["train_loss"]}


def with_parts() -> tuple[Parts, dict[str, Any]]:
    engine = run(built(CASES["EMA"]))
    state = engine.state
    reported = {"epoch": state.epoch, "iteration": state.iteration, "metrics": list(state.metrics)}
    return digests(engine), reported


class Spoilt(Exception):
    pass


# Where one of two processes fails, while the other one is on its way to what both do together.
PLACES = (
    Events.FORWARD_STARTED,
    Events.BACKWARD_COMPLETED,
    Events.OPTIMIZER_STEP_COMPLETED,
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.STARTED,
)
OF_EVALUATION = (Events.FORWARD_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED)


def failing(name: str, place: int, failing_rank: int) -> None:
    case = CASES[name]
    engine = built(case, case.make())
    places = PLACES if engine.training else OF_EVALUATION
    event = places[place % len(places)]
    begin = 1 if name == "FastDevRun" else 2  # of its two batches, each process gets one

    def fail(engine: Engine) -> None:
        if engine.state.iteration >= begin or event is Events.STARTED:
            raise Spoilt

    if engine.processes.rank == failing_rank:
        engine.connect(event, fail)
    with allow("C31", "W51"):
        run(engine)


def errors_of(function: Callable[..., Any], size: int, *args: Any) -> dict[int, str]:
    """The processes' errors if they fail. The exception is dropped: no process forked later may free what its frames hold."""
    try:
        run_together(function, size, *args)
    except Failed as failed:
        return failed.errors
    return {}


@pytest.mark.moderate
@pytest.mark.parametrize("name", spread(TRIED, 2))
def test_an_error_in_one_process_ends_both(name: str) -> None:
    place = TRIED.index(name)
    failing_rank = place // len(PLACES) % 2
    errors = errors_of(failing, 2, name, place, failing_rank)
    assert errors.keys() == {0, 1}
    assert "raise Spoilt" in errors[failing_rank]
    assert not any("did not end within" in error for error in errors.values())
