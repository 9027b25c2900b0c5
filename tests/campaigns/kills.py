"""Kills a training process at random moments, also inside of saves, resumes it, and compares the end with a run that was not.

    python tests/campaigns/kills.py [--kills 1000] [--seed 0] [--minutes 10] [--pair apart]
                                    [--folder FOLDER] [--json FILE]
    python tests/campaigns/kills.py --last

A parent that has imported everything forks the trials. Each is a process that resumes from `Checkpoint.load(folder)`, or begins
anew where there is none, and is ended by SIGKILL; once one comes to the end of its run, that is compared and the next run
begins, until the number of kills is reached. Most moments are drawn uniformly over the time that a run takes, or over half of
it. Two fifths are aimed: at an operation of a save on the disk, drawn by chance, as soon as it begins. Where a process was when
it died is read from memory that it shared with its parent.

A failure is
- an end that differs from that of a run that was never killed, in one bit of weights, optimizer, schedule, averages, random
  states, history, log, or in which checkpoints are kept and what is in them;
- a checkpoint that was reported as saved and is not there to resume from, or a damaged one: SIGKILL leaves none;
- anything that dead processes left in the folder, but for the kind in RESTS; any error, and any warning.

Controls follow, each broken in its own way, to show that it is noticed: each has to end in a failure.

What this cannot show: power cuts (tests/engine/checkpoints/test_store.py enumerates those), several processes, GPUs. With 0
failures in n kills the rate is below 3/n with 95 % confidence.
"""

from __future__ import annotations

import collections
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from signalfire import Engine, Events, Phase, seed_everything
from signalfire.checkpoints import Content, Files
from signalfire.handlers import (
    Checkpoint,
    History,
    JSONLinesLogger,
)
from signalfire.testing import fingerprint

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.campaigns.killing import (  # noqa: E402
    Augmented,
    attach_company,
    different_parts,
    ended,
    engine_of,
    environment,
    kept,
    options_of,
    show,
    wait,
)

RESULT = Path(__file__).parent / "results" / "kills.json"
SAMPLES, BATCH, EPOCHS = 44, 4, 4
"""Eleven batches an epoch: its last window, of two, is a short one."""

EVERY = "3it"
"""How often a checkpoint is written: about half of the time is then spent in saves."""

AIMED = 0.4
PAIRS = {
    "apart": (partial(Checkpoint, every=EVERY, keep=2), partial(Checkpoint, keep=2)),
    "one event": (
        partial(Checkpoint, every="1ep", keep=1, filename="last"),
        partial(Checkpoint, keep=1, filename="best"),
    ),
    "asynchronous": (
        partial(Checkpoint, every="1ep", keep=1, filename="last", asynchronous=True),
        partial(Checkpoint, keep=1, filename="best", asynchronous=True),
    ),
}
"""How the two checkpoints of a run save: the last ones and the best ones by themselves, or both at the end of an epoch."""

LIVES = (1.0, 0.5)
"""Over which part of a run's time the moments are drawn: a run whose processes do not live long is killed more often."""

MOST_TRIALS = 200
"""Of one run; more means that it does not get on."""

BROKEN = ("no position in the data", "no random states", "saved in place")
"""The controls, of which each has to end in a failure; the last one overwrites the only checkpoint that it has."""

CONTROL_KILLS = 40
"""After so many without a failure, a control is given up."""

RESTS = {
    "superseded checkpoint": "a process that resumes and writes no more removes none; the next save does",
}
"""What dead processes may leave at the end of a run; it does not count as a failure, and is reported."""

# ---- where a process is -----------------------------------------------------------------------------------------------

BEFORE, TRAINING = "before the first iteration", "between saves"
SAVES = (
    "gathering the state",
    "make the hidden folder",
    "write state.pt",
    "sync state.pt",
    "write manifest.json",
    "sync manifest.json",
    "sync the hidden folder",
    "rename into place",
    "sync the parent folder",
    "rename the superseded",
    "remove the superseded",
)
DISK = SAVES[1:]
PLACES = (BEFORE, TRAINING, *SAVES)


class Shared:
    """What a process reports while it lives, in memory that its parent can read after its death."""

    def __init__(self) -> None:
        self._slots = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")

    @property
    def place(self) -> str:
        return PLACES[self._slots[0]]

    @place.setter
    def place(self, place: str) -> None:
        self._slots[0] = PLACES.index(place)

    @property
    def reported(self) -> int:
        """The newest position, as `order` gives it, that was reported as saved; 0 before the first."""
        return self._slots[1]

    @reported.setter
    def reported(self, order: int) -> None:
        self._slots[1] = order

    @property
    def saving(self) -> float:
        """Seconds that were spent in saves."""
        return self._slots[2] / 1e9

    @saving.setter
    def saving(self, seconds: float) -> None:
        self._slots[2] = int(seconds * 1e9)


class Watched(Files):
    """Reports each operation of a save before it begins."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    def make_folder(self, path: Path) -> None:
        if path.suffix == ".new":
            self.shared.place = "make the hidden folder"
        super().make_folder(path)

    def write(self, path: Path, content: Content) -> None:
        self.shared.place = f"write {path.name}"
        super().write(path, content)

    def sync(self, path: Path) -> None:
        if self.shared.place != BEFORE:
            folder = "the hidden folder" if path.suffix == ".new" else "the parent folder"
            self.shared.place = f"sync {path.name if path.name in ('state.pt', 'manifest.json') else folder}"
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        if old.suffix == ".new":
            self.shared.place = "rename into place"
        elif self.shared.place != BEFORE:
            self.shared.place = "rename the superseded"
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        if self.shared.place != BEFORE:
            self.shared.place = "remove the superseded"
        super().remove(path)


def order(epoch_open: bool, iteration: int) -> int:
    """Positions of a run in the order in which they are reached."""
    return 2 * iteration + (not epoch_open)


# ---- the training -----------------------------------------------------------------------------------------------------


class Noise(nn.Module):
    """Draws from Python's and NumPy's global generators, as some layers of users do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand()) if self.training else x


def build(folder: Path, shared: Shared, broken: str, pair: str) -> tuple[Engine, History]:
    """The engine, with everything that has a state."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), Noise(), nn.Dropout(0.3), nn.Linear(16, 3))
    engine = engine_of(model)
    history = attach_company(engine, JSONLinesLogger(folder / "log.jsonl", every="1it"), window=3, held_out=16)
    if broken == "saved in place":
        engine.connect(Events.ITERATION_COMPLETED(every=int(EVERY[:-2])), partial(save_in_place, folder, shared))
        return engine, history
    make_last, make_best = PAIRS[pair]
    last, best = make_last(folder, name="last"), make_best(folder, monitor="loss", name="best")
    last.files = best.files = Watched(shared)
    engine.attach(last, best)
    return engine, history


def save_in_place(folder: Path, shared: Shared, engine: Engine) -> None:
    """How it is not done: the only checkpoint is overwritten."""
    shared.place = "write state.pt"
    torch.save(engine.state_dict(), folder / "state.pt")
    shared.place = TRAINING


def watch(engine: Engine, shared: Shared) -> None:
    """Let the process report where it is."""
    began = 0.0

    def go_on(engine: Engine) -> None:
        shared.place = TRAINING

    def begin(engine: Engine) -> None:
        nonlocal began
        began = time.perf_counter()
        if any(isinstance(one, Checkpoint) and one.retention.selected is not None for one in engine.handlers.values()):
            shared.place = SAVES[0]

    def end(engine: Engine) -> None:
        shared.saving += time.perf_counter() - began
        shared.place = TRAINING

    def report_save(engine: Engine) -> None:
        open_epoch, iteration = engine.state.epoch_open, engine.state.iteration
        both = [one for one in engine.handlers.values() if isinstance(one, Checkpoint)]
        if any(one.asynchronous for one in both):  # reported later, while both are written at the ends of epochs alone
            open_epoch, iteration = False, max(iteration for one in both for iteration in one.retention.names)
        shared.reported = max(shared.reported, order(open_epoch, iteration))

    engine.connect(Events.ITERATION_STARTED, go_on, phase=Phase.PREPARE)
    engine.connect(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, begin, phase=Phase.PERSIST, rank=-1000)
    engine.connect(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, end, phase=Phase.PERSIST, rank=1000)
    engine.connect(Events.CHECKPOINT_SAVED, report_save, phase=Phase.PERSIST)


def load(folder: Path, broken: str) -> dict[str, Any] | None:
    """The state to resume from, if there is one."""
    if broken == "saved in place":
        path = folder / "state.pt"
        return dict(torch.load(path, weights_only=True)) if path.exists() else None
    try:
        state = Checkpoint.load(folder)
    except FileNotFoundError:
        return None
    if broken == "no position in the data":
        state["data"] = None
    return state


def train(folder: Path, shared: Shared, seed: int, broken: str, pair: str) -> dict[str, Any]:
    """Resume the run in the folder to its end, and report what it has left."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"run\(\): nothing to do")  # it was killed when it was over
    state = load(folder, broken)
    found = 0 if state is None else order(state["engine"]["epoch_open"], state["engine"]["iteration"])
    if found < shared.reported:
        raise AssertionError(
            f"position {shared.reported / 2} was reported as saved, and position {found / 2} was found"
        )
    seed_everything(0 if state is None else seed)  # whatever a new process would draw
    engine, history = build(folder, shared, broken, pair)
    watch(engine, shared)
    if state is not None:
        engine.load_state_dict(state)
    if broken == "no random states":
        engine.connect(Events.CHECKPOINT_LOADED, lambda engine: seed_everything(seed), phase=Phase.PREPARE)
    engine.run(DataLoader(Augmented(SAMPLES), BATCH, shuffle=True), max_epochs=EPOCHS)
    shared.place = TRAINING
    return {
        "parts": fingerprint(engine)
        | {"history": hashlib.sha256(repr(history.records).encode()).hexdigest()}
        | {"log": hashlib.sha256((folder / "log.jsonl").read_bytes()).hexdigest()},
        "kept": kept(engine),
        "left": left(engine, folder, state),
        "superseded": sorted(
            name for one in engine.handlers.values() if isinstance(one, Checkpoint) for name in one.retention.superseded
        ),
    }


def left(engine: Engine, folder: Path, state: Mapping[str, Any] | None) -> list[str]:
    """What is in the folder besides what is kept, the log, and what the last process resumed from, which stays."""
    known = {name for one in engine.handlers.values() if isinstance(one, Checkpoint) for name, _ in one.kept}
    known |= {"log.jsonl", "state.pt"}
    if state is not None and "origin" in state:
        known.add(Path(state["origin"]["path"]).name)
    return sorted(set(os.listdir(folder)) - known)


# ---- killing ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What is counted over a campaign."""

    killed: collections.Counter[str] = field(default_factory=collections.Counter)
    runs: int = 0
    trials: int = 0
    anew: int = 0
    most_kills_of_a_run: int = 0
    rests: collections.Counter[str] = field(default_factory=collections.Counter)
    places: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.killed.total()

    @property
    def inside(self) -> int:
        return sum(self.places[place] for place in SAVES)

    @property
    def writing(self) -> int:
        return sum(self.places[place] for place in DISK)


class Campaign:
    """Run after run of a training that is killed again and again.

    Args:
        folder: where the runs write.
        seed: of everything that is drawn by chance but for where exactly a process is at a moment.
        broken: one of `BROKEN`; it is given up with its first failure.
        pair: one of `PAIRS`.
        measured: how many runs that are not killed are timed and compared; the quickest counts.
    """

    def __init__(
        self, folder: Path, *, seed: int, broken: str = "", pair: str = "one event", measured: int = 1
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.broken = broken
        self.pair = pair
        self.aims = ("write state.pt",) if broken == "saved in place" else DISK
        self.draw = random.Random(seed)
        self.shared = Shared()
        self.tally = Tally()
        self.expected = self._uninterrupted(folder / "expected")
        self.seconds = self.saving = float("inf")
        for number in range(measured):
            began = time.perf_counter()
            again = self._uninterrupted(folder / f"again{number}")
            seconds = time.perf_counter() - began
            if problem := ", ".join(again["left"]) or different(self.expected, again):
                raise RuntimeError(f"two runs that were not killed differ: {problem}")
            if seconds < self.seconds:  # the machine may have been busy with something else
                self.seconds, self.saving = seconds, self.shared.saving

    def _uninterrupted(self, folder: Path) -> dict[str, Any]:
        self.shared.saving, self.shared.reported = 0.0, 0
        report = folder.with_suffix(".json")
        found = outcome(wait(self._fork(folder, report)), report)
        if isinstance(found, str):
            raise RuntimeError(f"a run that was not killed failed: {found}")
        return found

    def _fork(self, folder: Path, report: Path) -> int:
        """Begin a trial in a process of its own; it writes its report, or its error, and ends with 0."""
        seed = self.draw.randrange(1, 2**31)
        self.shared.place = BEFORE
        process = os.fork()
        if process:
            return process
        try:
            try:
                found: Any = train(folder, self.shared, seed, self.broken, self.pair)
            except BaseException:
                found = traceback.format_exc()
            report.write_text(json.dumps(found))
            os._exit(0)
        finally:
            os._exit(1)

    def run(self, kills: int, deadline: float) -> None:
        """Run after run, until there were so many kills or the time is over."""
        while self.tally.kills < kills and time.monotonic() < deadline:
            folder = self.folder / f"run{self.tally.runs}"
            before = self.tally.kills
            problem = self._run(folder, kills)
            self.tally.runs += 1
            self.tally.most_kills_of_a_run = max(self.tally.most_kills_of_a_run, self.tally.kills - before)
            if problem:
                self.tally.failures.append(f"run {self.tally.runs}: {problem}")
                if self.broken:
                    return
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folder: Path, kills: int) -> str:
        """Kill and resume until the run is over; says what went wrong."""
        lives = self.draw.choice(LIVES) * self.seconds
        report = folder.with_suffix(".json")
        self.shared.reported = 0
        begun_anew = 0
        for _ in range(MOST_TRIALS):
            anew = not (folder.exists() and any(not name.startswith((".", "log")) for name in os.listdir(folder)))
            begun_anew += anew
            self.tally.trials += 1
            self.tally.anew += anew
            process = self._fork(folder, report)
            status, kind = self._kill(process, lives) if self.tally.kills < kills else (wait(process), "")
            if status == -signal.SIGKILL and kind:
                self.tally.killed[kind] += 1
                self.tally.places[self.shared.place] += 1
                continue
            found = outcome(status, report)
            if isinstance(found, str):
                return found
            aside = [name for name in found["left"] if re.fullmatch(r"log\.\d+\.jsonl", name)]
            superseded = set(found["left"]) & set(found["superseded"])
            self.tally.rests.update(dict(zip(RESTS, (len(superseded),), strict=True)))
            rest = sorted(set(found["left"]) - set(aside) - superseded)
            if rest or len(aside) >= begun_anew:
                return f"left in the folder: {', '.join(rest or aside)}"
            return different(self.expected, found)
        return f"it did not come to its end in {MOST_TRIALS} trials"

    def _kill(self, process: int, lives: float) -> tuple[int, str]:
        """Kill the process at a moment drawn by chance; how it ended, and "even" or "aimed", or "" if it was over before."""
        aim = self.draw.choice(self.aims) if self.draw.random() < AIMED else None
        # What is aimed at may take a while to come.
        moment = time.perf_counter() + self.draw.uniform(0, lives if aim is None else lives / 2)
        while (left := moment - time.perf_counter()) > 0:
            if (status := ended(process)) is not None:
                return status, ""
            time.sleep(min(0.002, left))
        while aim is not None and self.shared.place != aim:
            if (status := ended(process)) is not None:
                return status, ""
            time.sleep(0)
        os.kill(process, signal.SIGKILL)  # it is there, if only to be waited for
        return wait(process), "even" if aim is None else "aimed"


def outcome(status: int, report: Path) -> dict[str, Any] | str:
    """What a trial has left, or its error."""
    if status:
        return f"the process ended with {status}"
    found: dict[str, Any] | str = json.loads(report.read_text())
    return found


def different(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The parts in which the ends of two runs differ."""
    parts = different_parts(expected, found)
    if expected["kept"] != found["kept"]:
        parts.append(f"kept {found['kept']} and not {expected['kept']}")
    return f"it ends elsewhere: {', '.join(parts)}" if parts else ""


# ---- reporting -------------------------------------------------------------------------------------------------------


def result(campaign: Campaign, controls: Sequence[Campaign], seed: int, seconds: float) -> dict[str, Any]:
    """What is written as JSON."""
    tally = campaign.tally
    return {
        "pair": campaign.pair,
        "kills": tally.kills,
        "inside_saves": tally.inside,
        "writing": tally.writing,
        "even": tally.killed["even"],
        "aimed": tally.killed["aimed"],
        "runs": tally.runs,
        "trials": tally.trials,
        "began_anew": tally.anew,
        "most_kills_of_a_run": tally.most_kills_of_a_run,
        "rests": {rest: tally.rests[rest] for rest in RESTS},
        "failures": len(tally.failures),
        "failed": tally.failures[:10],
        "rate_below": None if tally.failures or not tally.kills else 3 / tally.kills,
        "seconds": round(seconds, 1),
        "seconds_of_a_run": round(campaign.seconds, 3),
        "share_in_saves": round(campaign.saving / campaign.seconds, 3),
        "places": {place: tally.places[place] for place in PLACES},
        "controls": {
            one.broken: {
                "kills": one.tally.kills,
                "failures": len(one.tally.failures),
                "failed": [text.strip().splitlines()[-1][:300] for text in one.tally.failures],
            }
            for one in controls
        },
        "seed": seed,
        "environment": environment(),
    }


def summary(found: Mapping[str, Any]) -> str:
    """For people."""
    kills, inside = found["kills"], found["inside_saves"]
    bound = f": below {found['rate_below']:.2%} with 95 % confidence" if found["rate_below"] else ""
    lines = [
        f"{kills} kills ({found['even']} at even moments, {found['aimed']} aimed), {inside} of them inside a save, "
        f"{found['writing']} while it was writing; {found['runs']} runs, {found['seconds']:.0f} s",
        f"{found['failures']} failures{bound}",
        f"a run of {found['seconds_of_a_run']:.2f} s, {found['share_in_saves']:.0%} of it in saves; at most "
        f"{found['most_kills_of_a_run']} kills in one run; {found['began_anew']} of {found['trials']} trials began anew",
        *(f"  {number:5d}  {rest} left: {RESTS[rest]}" for rest, number in found["rests"].items()),
        "where they were killed:",
        *(f"  {number:5d}  {place}" for place, number in found["places"].items()),
        *(f"failed: {one}" for one in found["failed"]),
        *(
            f"control, {broken}: {one['failures']} failure after {one['kills']} kills"
            for broken, one in found["controls"].items()
        ),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__, RESULT)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10, help="no new run begins after that (10)")
    parser.add_argument(
        "--pair", choices=PAIRS, default="one event", help="how the two checkpoints of a run save (one event)"
    )
    options = parser.parse_args(arguments)
    if options.last:
        print(summary(json.loads(RESULT.read_text())))
        return 0
    torch.set_num_threads(1)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=options.folder))
    try:
        with warnings.catch_warnings():  # torch imports much of itself in the first step only
            train(folder / "warm", Shared(), 0, "", options.pair)
        campaign = Campaign(folder / "whole", seed=options.seed, pair=options.pair, measured=3)
        campaign.run(options.kills, began + 60 * options.minutes)
        seconds = time.monotonic() - began
        controls = [Campaign(folder / broken, seed=options.seed, broken=broken) for broken in BROKEN]
        for control in controls:
            control.run(CONTROL_KILLS, float("inf"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = result(campaign, controls, options.seed, seconds)
    show(found, options.json, summary)
    return 1 if found["failures"] or not all(one["failures"] for one in found["controls"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
