"""Proves that `signalfire.traces.bisect` names what made two runs differ.

    python tests/campaigns/bisections.py [--plants 200] [--every 1 10] [--seed 0] [--json FILE]
    python tests/campaigns/bisections.py --last

A perceptron with dropout, averages, clipping and a schedule is trained for 6,000 steps, with checkpoints and a trace of each
iteration, or of each tenth. Then it is trained again, and one thing is changed at a drawn event of a drawn iteration: a
weight by one bit in its last place, one draw of a generator, two samples of a batch, a handler's state, what a handler does,
or what a module computes. The second run ends soon after. A change that no later record shows is drawn anew. `bisect` has to
name the iteration and the event of the change, and the function, the handler or the module that made it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Update, on, seed_everything
from signalfire.handlers import EMA, Accuracy, Checkpoint, GradientClipping, LRScheduling, Metrics, Trace
from signalfire.traces import bisect, compare

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.campaigns.killing import environment, show  # noqa: E402

RESULT = Path(__file__).parent / "results" / "bisections.json"
EPOCHS, EPOCH, BATCH = 60, 100, 8
GOES_ON = 25
"""Iterations that a run makes after its change."""

EVENTS = (
    *("GET_BATCH_COMPLETED", "FORWARD_STARTED", "FORWARD_COMPLETED", "LOSS_COMPUTED", "BACKWARD_COMPLETED"),
    *("GRADIENTS_READY", "OPTIMIZER_STEP_COMPLETED", "UPDATE_COMPLETED", "ITERATION_COMPLETED", "EPOCH_COMPLETED"),
)

Build = Callable[[], tuple[Engine, Callable[[Engine], object]]]
Plant = Callable[[Engine], object]


class Scaled(nn.Module):
    """Multiplies by one, and in one iteration by a little more."""

    at: int | None = None
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scaled: Tensor = x * (1.001 if int(self.calls) == self.at else 1.0)
        return scaled


class Keeping(Handler):
    """Keeps the mean of the loss; from one iteration on, another one."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at
        self.mean = 0.0

    @on(Events.ITERATION_COMPLETED, reads=["loss"], writes=[])
    def keep(self, engine: Engine) -> None:
        """Update the mean."""
        share = 0.2 if engine.state.iteration == self.at else 0.1
        self.mean += share * (float(engine.loss or 0) - self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = state["mean"]


def nudge(engine: Engine) -> None:
    weight = engine.model[0].weight.data
    weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(math.inf))


def draw_once(engine: Engine) -> None:
    torch.rand(())


def swap(engine: Engine) -> None:
    inputs, targets = engine.state.batch
    order = [1, 0, *range(2, len(inputs))]
    engine.state.batch = inputs[order], targets[order]


def disturb(engine: Engine) -> None:
    engine["keeping"].mean += 1e-12


CHANGES: dict[str, Plant] = {
    "a weight, by its last bit": nudge,
    "a draw": draw_once,
    "two samples": swap,
    "a state": disturb,
}


def build(
    folder: Path, every: int, change: tuple[str, str, int] | None = None, epochs: int = EPOCHS
) -> tuple[Engine, Callable[[Engine], object]]:
    """The engine of a run, and what trains it.

    Args:
        folder: Of the trace and the checkpoints.
        every: Which iterations are recorded.
        change: What is changed, the event and the iteration.
        epochs: Of the whole run.
    """
    seed_everything(3)
    kind, event, iteration = change or ("nothing", "", 0)
    scaled = Scaled()
    scaled.at = iteration if kind == "a module" else None
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), scaled, nn.Dropout(0.1), nn.Linear(12, 3))
    engine = Engine(Update.supervised(F.cross_entropy, partial(torch.optim.AdamW, lr=1e-2)), model=model, seed=0)
    engine.attach(
        EMA(0.9),
        GradientClipping(max_norm=0.5),
        LRScheduling(
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * EPOCH), every="1step"
        ),
        Metrics(accuracy=Accuracy()),
        Keeping(iteration if kind == "a handler" else None),
        Trace(folder / "trace.jsonl", every=f"{every}it"),
        *([] if change else [Checkpoint(folder / "checkpoints", every="50it", keep=1000)]),
    )
    if kind in CHANGES:
        at = (
            Events[event](once=iteration)
            if event != "EPOCH_COMPLETED"
            else Events.EPOCH_COMPLETED(once=iteration // EPOCH)
        )
        engine.connect(at, CHANGES[kind])
    count = EPOCH * BATCH
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    until = iteration + GOES_ON if change else None
    return engine, lambda engine: engine.run(loader, max_epochs=epochs, max_iters=until)


def drawn(draw: random.Random, epochs: int) -> tuple[str, str, int]:
    """A change, the event and the iteration."""
    kind = draw.choice([*CHANGES, "a module", "a handler"])
    event = "GET_BATCH_COMPLETED" if kind == "two samples" else draw.choice(EVENTS)
    event = {"a module": "FORWARD_COMPLETED", "a handler": "ITERATION_COMPLETED"}.get(kind, event)
    iteration = draw.randrange(1, epochs * EPOCH - GOES_ON)
    return kind, event, max(EPOCH, iteration // EPOCH * EPOCH) if event == "EPOCH_COMPLETED" else iteration


def last_before(folder: Path, iteration: int) -> dict[str, Any] | None:
    """The state of the undisturbed run from which the changed one begins, so that each takes seconds.

    At least one iteration is recorded before the change.
    """
    earlier = [path for path in folder.iterdir() if int(path.name[-8:]) < iteration - 11]
    return Checkpoint.load(max(earlier, key=lambda path: path.name[-8:])) if earlier else None


def maker(change: tuple[str, str, int], module: str, receiver: str | None) -> bool:
    """Whether that is what made the change."""
    kind = change[0]
    if kind == "a module":
        return module == "model.2"
    return receiver == ("keeping.keep" if kind == "a handler" else CHANGES[kind].__name__)


def campaign(plants: int, every: int, seed: int, epochs: int) -> dict[str, Any]:
    """The result of so many changes."""
    draw, found, unseen = random.Random(seed), list[dict[str, Any]](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed: Build = partial(build, folder / "a", every, None, epochs)
        engine, run = undisturbed()
        run(engine)
        while len(found) < plants:
            change = drawn(draw, epochs)
            (folder / "b" / "trace.jsonl").unlink(missing_ok=True)
            changed: Build = partial(build, folder / "b", every, change, epochs)
            engine, run = changed()
            if (state := last_before(folder / "a" / "checkpoints", change[2])) is not None:
                engine.load_state_dict(state, allow=["checkpoint"])
            run(engine)
            traces = [folder / one / "trace.jsonl" for one in "ab"]
            if compare(*traces).first is None:
                unseen[change[0]] += 1
                continue
            result = bisect(undisturbed, changed, traces=traces, checkpoints=folder / "a" / "checkpoints")
            at = change[1], change[2]
            found.append(
                {
                    "change": change,
                    "event": (result.event, result.iteration) == at,
                    "maker": maker(change, result.module, result.receiver),
                    "said": str(result).split("repeated", 1)[1],
                }
            )
            print(len(found), change, found[-1]["event"], found[-1]["maker"], file=sys.stderr)
    return {
        "every": every,
        "plants": plants,
        "events": sum(one["event"] for one in found),
        "makers": sum(one["maker"] for one in found),
        "kinds": dict(Counter(one["change"][0] for one in found)),
        "in_no_record": dict(unseen),
        "failed": [one for one in found if not (one["event"] and one["maker"])],
    }


def summary(found: Mapping[str, Any]) -> str:
    """The result in a few lines."""
    lines = [f"{found['date']}: bisect named the event of the change, and what made it"]
    for one in found["results"]:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(one["kinds"].items()))
        lines.append(
            f"  every {one['every']}: of {one['events']} and of {one['makers']} of {one['plants']} changes ({kinds})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plants", type=int, default=200)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default=str(RESULT))
    parser.add_argument("--last", action="store_true", help="print the last result and end")
    options = parser.parse_args()
    if options.last:
        print(summary(json.loads(RESULT.read_text())))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = [campaign(options.plants, every, options.seed, options.epochs) for every in options.every]
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
        "seed": options.seed,
        "results": results,
        "failed": [failure for one in results for failure in one["failed"]],
    }
    show(found, options.json, summary)
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
