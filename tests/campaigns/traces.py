"""Proves that `signalfire.traces.compare` names the right record, and that runs which should be equal have equal traces.

    python tests/campaigns/traces.py [--plants 200] [--pairs 50] [--kills 30] [--seed 0] [--json FILE]
    python tests/campaigns/traces.py --last

Planted: a perceptron with dropout, BatchNorm, clipping, averages and a schedule is trained for 6,000 steps, with a trace of each
iteration, and with one of each tenth. A second run that is the same is forked at drawn events, and in the fork one thing is
changed: a weight by one bit in its last place, one draw of a generator, two samples of a batch, the state of a handler, ... The
fork goes on for some iterations. Beside `Trace`, a receiver of the campaign takes a sha256 of all bytes of the same things, by
code of its own; its first record that differs is what `compare` has to name, with all things that differ in it, and the record
before it as the last equal one. A change that no record sees is not counted, and `compare` has to find no difference.

Equal: pairs of runs, each in interpreters of their own, that differ in what must not matter: the order of attaching, folders,
the number of workers, the seed of Python's hashes, loggers beside, which iterations are recorded and in which detail, and a
resume in the middle. A failure is a pair in which `compare` finds a difference. As a control, a run that draws one more number
is beside one that does not.

Kills: a training that resumes from its checkpoints is ended by SIGKILL at drawn moments, and started again until it is done. Its
trace has to have the same records as that of an undisturbed one, each once.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Phase, Update, seed_everything
from signalfire.handlers import (
    EMA,
    Accuracy,
    Average,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    History,
    JSONLinesLogger,
    LRScheduling,
    Metrics,
    ProgressBar,
    Throughput,
    Trace,
    Validation,
)
from signalfire.handlers._common.ranks import RECORD_TRACE
from signalfire.traces import Comparison, TraceFile, compare

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.campaigns.killing import ended, environment, show, wait  # noqa: E402
from tests.kit import MEMORY  # noqa: E402

RESULT = Path(__file__).parent / "results" / "traces.json"

EPOCHS, EPOCH, BATCH = 60, 100, 16
"""Of the planted runs; a shorter form has fewer epochs."""

GOES_ON = 25
"""Iterations that a fork makes after its change: two that are recorded, where each tenth is."""

SPARE = 1.6
"""Changes are drawn for each that is to count, since some are in no record."""

# ---- the oracle -------------------------------------------------------------------------------------------------------

_KEPT = ("parameters", "buffers", "optimizer", "random", "handlers", "metrics")
THINGS = {
    "STARTED": ("parameters", "buffers", "optimizer", "random", "handlers"),
    "GET_BATCH_COMPLETED": ("batch",),
    "LOSS_COMPUTED": ("output", "loss"),
    "GRADIENTS_READY": ("gradients",),
    "ITERATION_COMPLETED": _KEPT,
    "EPOCH_COMPLETED": _KEPT,
}
"""What a trace records at which event, as its docstring says."""

Found = dict[str, bytes]
"""A sha256 by thing, such as "handlers/ema"."""

Place = tuple[int, str]
"""The iteration and the event."""


def sha256(value: Any) -> bytes:
    """Of all bytes of a value."""
    found = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            copy = value.detach().clone()
            found.update(f"{copy.dtype}{tuple(copy.shape)}".encode() + copy.numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, one in value.items():
                found.update(pickle.dumps(key))
                feed(one)
        elif isinstance(value, list | tuple):
            found.update(f"{len(value)}[".encode())
            for one in value:
                feed(one)
        else:
            found.update(pickle.dumps(value))

    feed(value)
    return found.digest()


def contents(engine: Engine, thing: str) -> dict[str, Any]:
    """What a thing is, by the names that a trace has for it."""
    model, update = engine.model, engine.updates[0]
    if thing == "random":
        name, words, *rest = np.random.get_state()
        kinds = {"python": random.getstate(), "numpy": [name, np.asarray(words).tobytes(), *rest]}
        return {f"random/{kind}": value for kind, value in (kinds | {"torch": torch.get_rng_state()}).items()}
    if thing == "handlers":
        every = engine.handlers.items()
        return {f"handlers/{name}": handler.state_dict() for name, handler in every if not handler.writes}
    if thing == "metrics":
        return {f"metrics/{name}": value for name, value in engine.state.metrics.items()}
    one: Callable[[], Any] = {
        "batch": lambda: engine.state.batch,
        "output": lambda: update.output,
        "loss": lambda: [update.loss, update.backward_loss],
        "gradients": lambda: [p.grad for p in model.parameters()],
        "parameters": lambda: list(model.parameters()),
        "buffers": lambda: list(model.buffers()),
        "optimizer": lambda: engine.optimizer.state_dict(),
    }[thing]
    return {thing: one()}


class Oracle:
    """Takes the sha256 of the same things as `Trace`, at the same events and right before it.

    Attributes:
        records: In the order in which they were made.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.records: list[tuple[Place, Found]] = []

    def connect(self, engine: Engine) -> None:
        for name, things in THINGS.items():
            event = Events[name] if name in ("STARTED", "EPOCH_COMPLETED") else Events[name](every=self.every)
            take = partial(self.take, name, things)
            engine.connect(event, take, phase=Phase.PERSIST, rank=RECORD_TRACE - 1)

    def take(self, event: str, things: Sequence[str], engine: Engine) -> None:
        values = {name: value for thing in things for name, value in contents(engine, thing).items()}
        self.records.append(((engine.state.iteration, event), {name: sha256(one) for name, one in values.items()}))


# ---- planted ----------------------------------------------------------------------------------------------------------

EVENTS = (
    *("GET_BATCH_COMPLETED", "FORWARD_STARTED", "FORWARD_COMPLETED", "LOSS_COMPUTED", "BACKWARD_COMPLETED"),
    *("GRADIENTS_READY", "OPTIMIZER_STEP_COMPLETED", "UPDATE_COMPLETED", "ITERATION_COMPLETED", "EPOCH_COMPLETED"),
)
"""At which something is changed."""


def nudge(draw: random.Random, tensors: Sequence[Tensor | None]) -> None:
    """Change one element of one of these tensors in its last place, unseen by autograd."""
    there = [one.data for one in tensors if one is not None and one.is_floating_point()]
    if there:
        flat = draw.choice(there).view(-1)
        place = draw.randrange(flat.numel())
        flat[place] = torch.nextafter(flat[place], torch.tensor(math.inf if draw.random() < 0.5 else -math.inf))


def nudge_average(draw: random.Random, engine: Engine) -> None:
    nudge(draw, list(engine.handlers["ema"].state_dict()["averages"].values()))


def nudge_moment(draw: random.Random, engine: Engine) -> None:
    states = engine.optimizer.state.values()
    nudge(draw, [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")])


def nudge_rate(draw: random.Random, engine: Engine) -> None:
    group = engine.optimizer.param_groups[0]
    group["lr"] = math.nextafter(group["lr"], 1.0)


def swap_samples(draw: random.Random, engine: Engine) -> None:
    one, other = draw.sample(range(BATCH), 2)
    for tensor in engine.state.batch:
        tensor.data[[one, other]] = tensor.data[[other, one]]


def count_schedule(draw: random.Random, engine: Engine) -> None:
    engine.handlers["lr_scheduling"].scheduler.last_epoch += 1  # type: ignore[attr-defined]


def count_patience(draw: random.Random, engine: Engine) -> None:
    engine.handlers["early_stopping"].waited += 1  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[random.Random, Engine], object]] = {
    "a weight": lambda draw, engine: nudge(draw, list(engine.model.parameters())),
    "a buffer": lambda draw, engine: nudge(draw, list(engine.model.buffers())),
    "a gradient": lambda draw, engine: nudge(draw, [p.grad for p in engine.model.parameters()]),
    "a moment of the optimizer": nudge_moment,
    "the learning rate": nudge_rate,
    "an average": nudge_average,
    "a draw of torch": lambda draw, engine: torch.rand(1),
    "a draw of numpy": lambda draw, engine: np.random.random_sample(),
    "a draw of python": lambda draw, engine: random.random(),
    "two samples": swap_samples,
    "the counter of the schedule": count_schedule,
    "the patience": count_patience,
}


def engine_to_plant(path: Path, every: int) -> tuple[Engine, Oracle, DataLoader[Any]]:
    """An engine, always the same, and its data."""
    seed_everything(0)
    model = nn.Sequential(
        nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 3)
    )  # a row of inputs, and how it is classified
    engine = Engine(Update.supervised(F.cross_entropy, partial(torch.optim.AdamW, lr=0.003)), model=model, seed=0)
    engine.attach(
        EMA(0.99),
        GradientClipping(1.0),
        LRScheduling(CosineAnnealingLR),
        Metrics(train_loss=Average()),
        EarlyStopping("train_loss", patience=1000),
        Trace(path, every=f"{every}it"),
    )
    oracle = Oracle(every)
    oracle.connect(engine)
    return engine, oracle, DataLoader(TensorDataset(*samples(EPOCH * BATCH, 12)), BATCH, shuffle=True)


def samples(count: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Planting:
    """Forks a run at drawn events, and changes something in the fork.

    Args:
        plants: For each place, the numbers of those that are drawn there.
        trace: The file that the run writes.
        undisturbed: The trace of a run that is the same.
        expected: What the oracle has taken in that run.
    """

    def __init__(
        self,
        plants: Mapping[Place, Sequence[tuple[int, str]]],
        trace: Path,
        undisturbed: Path,
        expected: Sequence[tuple[Place, Found]],
        seed: int,
    ) -> None:
        self.plants, self.trace, self.undisturbed, self.seed = plants, trace, undisturbed, seed
        self.expected = dict(expected)
        self.before = {place: earlier for (earlier, _), (place, _) in itertools.pairwise(expected)}
        self.oracle = Oracle(1)  # of the run; `connect` is called with it
        self.found: list[dict[str, Any]] = []
        self.ends_at: int | None = None  # in a fork
        self.number, self.change, self.place, self.taken = 0, "", (0, ""), 0

    def connect(self, engine: Engine, oracle: Oracle) -> None:
        self.oracle = oracle
        for name in EVENTS:
            engine.connect(Events[name], partial(self.plant, name))
        for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED):
            engine.connect(event, partial(self.end, event), phase=Phase.PERSIST, rank=10**6)

    @property
    def forked(self) -> bool:
        return self.ends_at is not None

    def plant(self, event: str, engine: Engine) -> None:
        """Change what is to be changed here, in a fork; in the run itself, nothing happens."""
        place = engine.state.iteration, event
        if self.forked:
            return
        for number, change in self.plants.get(place, ()):
            state = random.getstate()
            if process := os.fork():
                status = wait(process)
                result = self._result(number)
                error = {"error": f"the fork ended with {status}"}
                self.found.append(json.loads(result.read_text()) if status == 0 else error)
                continue
            random.setstate(state)  # which Python seeds anew in a fork
            self.number, self.change, self.place = number, change, place
            self.ends_at, self.taken = place[0] + GOES_ON, len(self.oracle.records)
            self._write_elsewhere()
            CHANGES[change](random.Random(f"{self.seed} {number}"), engine)
            return

    def _result(self, number: int) -> Path:
        return self.trace.with_name(f"{number}.json")

    def _write_elsewhere(self) -> None:
        """Let `Trace` append to a copy of its file from here on."""
        copy = self.trace.with_name(f"{self.number}.jsonl")
        shutil.copyfile(self.trace, copy)
        for link in list(Path("/proc/self/fd").iterdir()):
            if os.path.exists(link) and os.path.samefile(link, self.trace):
                file = os.open(copy, os.O_WRONLY | os.O_APPEND)
                os.dup2(file, int(link.name))
                os.close(file)
        self.trace = copy

    def end(self, event: Events, engine: Engine) -> None:
        """End the fork when it has gone on long enough, with its result written."""
        over = event is Events.COMPLETED or engine.state.iteration >= (self.ends_at or 0)
        if self.forked and over and (event is not Events.EPOCH_COMPLETED or self.place[1] != "EPOCH_COMPLETED"):
            result = self.result()
            self._result(self.number).write_text(json.dumps(result))
            self.trace.unlink()
            os._exit(0)

    def result(self) -> dict[str, Any]:
        """What the oracle and what `compare` has found."""
        first: tuple[Place, list[str]] | None = None
        for place, taken in self.oracle.records[self.taken :]:
            if things := [name for name, one in taken.items() if self.expected[place].get(name) != one]:
                first = place, things
                break
        found = compare(self.undisturbed, self.trace)
        named = None if found.first is None else [found.first.iteration, found.first.event, found.first.thing]
        expected = None if first is None else [*first[0], first[1][0]]
        right = named == expected
        if first is not None and found.first is not None:
            with_it = [found.first.thing, *found.first.others] == first[1]
            right = right and with_it and found.last_equal == self.before[first[0]]
        return {
            "number": self.number,
            "change": self.change,
            "planted": list(self.place),
            "expected": expected,
            "named": named,
            "right": right,
            "compared": str(found),
        }


def planted(count: int, every: int, epochs: int, seed: int, folder: Path) -> dict[str, Any]:
    """Plant changes until so many were in a record."""
    began = time.monotonic()
    folder.mkdir(parents=True)
    engine, oracle, data = engine_to_plant(folder / "undisturbed.jsonl", every)
    engine.run(data, max_epochs=epochs)
    seconds = time.monotonic() - began
    draw = random.Random(f"{seed} {every}")
    plants: dict[Place, list[tuple[int, str]]] = collections.defaultdict(list)
    for number in range(round(count * SPARE) + 5):
        event = draw.choice(EVENTS)
        iteration = EPOCH * draw.randint(1, epochs) if event == "EPOCH_COMPLETED" else draw.randint(1, EPOCH * epochs)
        plants[iteration, event].append((number, draw.choice(sorted(CHANGES))))
    planting = Planting(plants, folder / "again.jsonl", folder / "undisturbed.jsonl", oracle.records, seed)
    engine, again, data = engine_to_plant(folder / "again.jsonl", every)
    planting.connect(engine, again)
    process = os.getpid()
    try:
        engine.run(data, max_epochs=epochs)
    except BaseException:
        if os.getpid() == process:
            raise
        traceback.print_exc()
    finally:
        if os.getpid() != process:
            os._exit(1)
    both = compare(folder / "undisturbed.jsonl", folder / "again.jsonl")
    errors = [one["error"] for one in planting.found if "error" in one]
    results = sorted((one for one in planting.found if "error" not in one), key=lambda one: one["number"])
    seen = [one for one in results if one["expected"] is not None][:count]
    unseen = [one for one in results if one["expected"] is None]
    return {
        "planted": len(seen),
        "right": sum(one["right"] for one in seen),
        "in_no_record": len(unseen),
        "equal_then": sum(one["right"] for one in unseen),
        "undisturbed_equal": both.equal and again.records == oracle.records,
        "records": both.compared,
        "changes": dict(sorted(collections.Counter(one["change"] for one in seen).items())),
        "events": {event: sum(one["planted"][1] == event for one in seen) for event in EVENTS},
        "failed": [*errors, *(one for one in [*seen, *unseen] if not one["right"])][:10],
        "seconds_of_a_run": round(seconds, 1),
    }


# ---- equal ------------------------------------------------------------------------------------------------------------

SAMPLES, INPUTS, RUN_EPOCHS = 96, 6, 4
"""Twelve batches an epoch."""


def company() -> list[Handler]:
    """The handlers that have a state."""
    return [
        GradientAccumulation(2),
        GradientClipping(0.5),
        LRScheduling(CosineAnnealingLR),
        EMA(0.9),
        Metrics(train_loss=Average(), train_accuracy=Accuracy()),
        EarlyStopping("val_loss", patience=50),
    ]


def beside(folder: Path) -> dict[str, Callable[[], Handler]]:
    """The handlers that only look."""
    return {
        "ProgressBar": lambda: ProgressBar(file=sys.stdout),
        "CSVLogger": lambda: CSVLogger(folder / "log.csv"),
        "JSONLinesLogger": lambda: JSONLinesLogger(folder / "log.jsonl", every="1it"),
        "History": History,
        "Throughput": Throughput,
    }


def trained(folder: Path, options: Mapping[str, Any]) -> Engine:
    """An engine that has been trained as the options say."""
    resumes = any((folder / "saved").glob("[!.]*"))
    seed_everything(options.get("seed", 0) if resumes else 0)  # whatever a new process would draw
    model = nn.Sequential(nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    engine = Engine(Update.supervised(F.cross_entropy, partial(torch.optim.AdamW, lr=0.01)), model=model, seed=0)
    evaluator = Engine(Update.supervised(F.cross_entropy), model=model)
    evaluator.attach(Metrics(val_loss=Average()))
    held_out = list(zip(*(all_of.split(8) for all_of in samples(16, INPUTS, seed=1)), strict=True))
    attached = [*company(), Validation(evaluator, held_out)]
    attached.append(Trace(folder / "trace.jsonl", every=options["every"], detail=options["detail"]))
    attached += [beside(folder)[name]() for name in options["beside"]]
    if options["saves"]:
        attached.append(Checkpoint(folder / "saved", every=options["saves"], resume=True, sync_files=False))
    random.Random(options["order"]).shuffle(attached)
    engine.attach(*attached)
    if options.get("stop"):
        stop = options["stop"]
        engine.connect(Events.ITERATION_COMPLETED(once=stop), lambda engine: engine.terminate("as drawn"))
    if options.get("draws"):
        engine.connect(Events.ITERATION_COMPLETED(once=options["draws"]), lambda engine: torch.rand(1))
    data = DataLoader(TensorDataset(*samples(SAMPLES, INPUTS)), 8, shuffle=True, num_workers=options["workers"])
    engine.run(data, max_epochs=options.get("epochs", RUN_EPOCHS))
    return engine


def drawn_options(draw: random.Random) -> dict[str, Any]:
    """What must not matter."""
    names = sorted(beside(Path()))
    iterations = RUN_EPOCHS * SAMPLES // 8
    return {
        "order": draw.randrange(10**6),
        "workers": draw.choice([0, 0, 1, 2]),
        "beside": [name for name in names if draw.random() < 0.4],
        "every": draw.choice(["1it", "1it", "2it", "3it"]),
        "detail": draw.choice(["step", "step", "tensor"]),
        "saves": draw.choice([None, "1it", "5it", "1ep"]),
        "hashes": draw.randrange(1, 1000),
        "stop": draw.randrange(1, iterations) if draw.random() < 0.5 else None,
    }


def in_another_process(folder: Path, options: Mapping[str, Any]) -> None:
    """Train in an interpreter of its own."""
    variables = os.environ | {"PYTHONHASHSEED": str(options["hashes"]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--train", str(folder), json.dumps(dict(options))]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)


def run_as_drawn(folder: Path, options: dict[str, Any]) -> Path:
    """A run, with its resume in another process if one was drawn."""
    folder.mkdir(parents=True)
    if options["stop"]:
        options["saves"] = options["saves"] or "2it"
        in_another_process(folder, options)
        resumes = {"stop": None, "seed": 1, "hashes": options["hashes"] + 1, "order": options["order"] + 1}
        in_another_process(folder, {**options, **resumes})
    else:
        in_another_process(folder, options)
    return folder / "trace.jsonl"


def pair_of(draw: random.Random, folder: Path, draws: int | None = None) -> tuple[dict[str, Any], Comparison]:
    """Two runs that should be equal, unless one makes a draw more."""
    one, other = drawn_options(draw), drawn_options(draw)
    other["draws"] = draws
    paths = run_as_drawn(folder / "one", one), run_as_drawn(folder / draw.choice(["other", "der zweite"]), other)
    return {"one": one, "other": other}, compare(*paths)


def equal(pairs: int, seed: int, folder: Path) -> dict[str, Any]:
    """Pairs of runs, and a control."""
    failed: list[dict[str, Any]] = []
    tally: collections.Counter[str] = collections.Counter()
    records = 0
    for number in range(pairs):
        options, found = pair_of(random.Random(f"{seed} {number}"), folder / str(number))
        records += found.compared
        one, other = options["one"], options["other"]
        tally.update(key for key in ("workers", "every", "detail", "beside", "order") if one[key] != other[key])
        tally["resumed"] += bool(one["stop"] or other["stop"])
        if not found.equal:
            failed.append({**options, "compared": str(found)})
        shutil.rmtree(folder / str(number))
        print(number, found.equal, file=sys.stderr)
    _, control = pair_of(random.Random(f"{seed} control"), folder / "control", draws=20)
    return {
        "pairs": pairs,
        "equal": pairs - len(failed),
        "records": records,
        "differ_in": dict(sorted(tally.items())),
        "control": "equal" if control.first is None else str(control.first),
        "failed": failed[:10],
    }


# ---- kills ------------------------------------------------------------------------------------------------------------

KILLED_EPOCHS = 60
USUAL = {"order": 0, "workers": 0, "beside": [], "every": "2it", "detail": "step", "saves": "5it"}


def kills(count: int, epochs: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill and resume a training until so many kills, and compare its trace with that of an undisturbed one."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    options = {**USUAL, "epochs": epochs}
    trained(folder / "warm", {**USUAL, "epochs": 1})  # torch imports much of itself in the first step only
    began = time.monotonic()
    assert wait(fork(folder / "undisturbed", options)) == 0
    seconds = time.monotonic() - began
    undisturbed = list(TraceFile(folder / "undisturbed" / "trace.jsonl").records())
    killed = runs = trials = longest = resumed = 0
    failed: list[str] = []
    while killed < count:
        runs += 1
        one = folder / str(runs)
        before = killed
        while True:
            trials += 1
            resumed += any((one / "saved").glob("[!.]*"))
            process = fork(one, {**options, "seed": trials})
            moment = time.monotonic() + draw.uniform(0, 3 * seconds / count)
            status = None
            while killed < count and time.monotonic() < moment and (status := ended(process)) is None:
                time.sleep(0.001)
            if status is None and killed < count:
                os.kill(process, signal.SIGKILL)
                status = wait(process)
                if status == -signal.SIGKILL:
                    killed += 1
                    continue
            status = wait(process) if status is None else status
            break
        longest = max(longest, killed - before)
        if status:
            failed.append(f"run {runs}: it ended with {status}")
            continue
        found = compare(folder / "undisturbed" / "trace.jsonl", one / "trace.jsonl")
        records = list(TraceFile(one / "trace.jsonl").records())
        if not found.equal or records != undisturbed:
            failed.append(f"run {runs}: {len(records)} records, and {len(undisturbed)} expected\n{found}")
    return {
        "kills": killed,
        "runs": runs,
        "most_kills_of_a_run": longest,
        "starts": trials,
        "resumed": resumed,
        "records": len(undisturbed),
        "failures": len(failed),
        "failed": failed[:10],
        "seconds_of_a_run": round(seconds, 1),
    }


def fork(folder: Path, options: Mapping[str, Any]) -> int:
    """A process that begins the training, or resumes it."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    if process := os.fork():
        return process
    try:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r"run\(\): nothing to do")  # it was killed when it was over
        warnings.filterwarnings("ignore", ".*CosineAnnealingLR")
        trained(folder, options)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


# ---- the campaign -----------------------------------------------------------------------------------------------------


def parts_of(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if options.plants:
        for every in (1, 10):
            name = f"planted {every}it"
            yield name, planted(options.plants, every, options.epochs, options.seed, folder / name)
    if options.pairs:
        yield "equal", equal(options.pairs, options.seed, folder / "equal")
    if options.kills:
        epochs = max(6, KILLED_EPOCHS * options.kills // 30)
        yield "kills", kills(options.kills, epochs, options.seed, folder / "kills")


def failures(found: Mapping[str, Any]) -> int:
    """How many there are in all parts."""
    count = 0
    for name, part in found["parts"].items():
        count += len(part["failed"])
        if name.startswith("planted"):
            count += (part["right"] < part["planted"]) + (not part["undisturbed_equal"])
        if name == "equal":
            count += "random/torch" not in part["control"] and "the random numbers of torch" not in part["control"]
    return count


def summary(found: Mapping[str, Any]) -> str:
    """The result in a few lines."""
    lines = [found["date"]]
    for name, part in found["parts"].items():
        if name.startswith("planted"):
            lines.append(
                f"{name}: {part['right']} of {part['planted']} changes were named by their first record, of "
                f"{part['records']}; {part['in_no_record']} further ones were in no record"
            )
        elif name == "equal":
            lines.append(
                f"equal: {part['equal']} of {part['pairs']} pairs had equal traces, {part['records']} records; the control: "
                f"{part['control']}"
            )
        else:
            lines.append(
                f"kills: {part['kills']} kills in {part['runs']} run(s) of {part['records']} records, {part['failures']} "
                "failures"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plants", type=int, default=200, help="changes that count, for each of both traces (200)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of the runs with planted changes ({EPOCHS})")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default=str(RESULT))
    parser.add_argument("--last", action="store_true", help="print the last result and end")
    parser.add_argument("--train", nargs=2, metavar=("FOLDER", "OPTIONS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.train:
        warnings.simplefilter("ignore")
        trained(Path(options.train[0]), json.loads(options.train[1]))
        return
    if options.last:
        print(summary(json.loads(RESULT.read_text())))
        return
    warnings.simplefilter("ignore")  # of changed rates, and of workers
    folder = Path(tempfile.mkdtemp(prefix="traces-", dir=MEMORY))
    parts = {}
    began = time.monotonic()
    try:
        for name, part in parts_of(options, folder):
            parts[name] = part
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {"date": time.strftime("%Y-%m-%d"), "environment": environment(), "seed": options.seed, "parts": parts}
    show(found, options.json, summary)
    sys.exit(1 if failures(found) else 0)


if __name__ == "__main__":
    main()
