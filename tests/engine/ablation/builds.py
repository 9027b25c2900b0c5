"""What the studies of the tests are made of: tiny trainings that new processes can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, Update
from signalfire.ablation import LeaveOneOut, Study
from signalfire.handlers import EMA, Average, EarlyStopping, GradientClipping, GradientNoise, Metrics, Validation

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:  # for this process and those that it starts: they import this module
    sys.path.insert(0, str(ROOT))


def data(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3, 4, 2, generator=generator)
    return [(one, one.sum(dim=1, keepdim=True)) for one in inputs]


def composed(seed: int) -> Engine:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 1))
    update = Update.supervised(mse_loss, partial(torch.optim.SGD, lr=0.1))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average(mse_loss)))
    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(
        Validation(evaluator, data(1000), prefix="val_"),
        GradientClipping(max_norm=0.5),
        GradientNoise(0.1),
        EMA(0.5),
    )
    return trainer


def train(engine: Engine) -> None:
    engine.run(data(0), max_epochs=2)


def build(seed: int) -> Any:
    """The usual one."""
    return composed(seed), train


def noted(seed: int, *, folder: str, pause: float = 0.0) -> Any:
    """Writes down each run that is made, and takes its time.

    The last one of so many that the file most.txt names ends with its parent.
    """
    engine = composed(seed)

    def run(engine: Engine) -> None:
        @engine.on(Events.EPOCH_STARTED(once=1))
        def note(engine: Engine) -> None:
            parent = os.getppid()
            off = [name for name, handler in sorted(engine.handlers.items()) if not handler.enabled]
            with open(Path(folder) / "made.txt", "a") as file:
                file.write(f"{seed} {' '.join(off)}\n")
            time.sleep(pause)
            most = Path(folder) / "most.txt"
            last = int(most.read_text()) if most.exists() else 10**6
            while (Path(folder) / "made.txt").read_text().count("\n") >= last and os.getppid() == parent:
                time.sleep(0.01)

        train(engine)

    return engine, run


def failing(seed: int, *, folder: str) -> Any:
    """The run of seed 1 without noise fails, until there is a file that says that it is mended."""
    engine = composed(seed)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def fail(engine: Engine) -> None:
        if seed == 1 and not engine.handlers["gradient_noise"].enabled and not (Path(folder) / "mended").exists():
            raise ValueError(f"no luck with {object()}")

    return engine, train


def dying(seed: int) -> Any:
    """The process of seed 1 is killed."""
    engine = composed(seed)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def die(engine: Engine) -> None:
        if seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return engine, train


def stopping(seed: int) -> Any:
    """One with a handler that needs the validation."""
    engine = composed(seed)
    engine.attach(EarlyStopping("val_loss", mode="min", patience=5))
    return engine, train


def make_study(build: Any = build, **options: Any) -> Study:
    return Study(build, **{"metric": "val_loss", "mode": "min", "seeds": range(2)} | options)


def study_of(folder: str, pause: float) -> Study:
    build = partial(noted, folder=folder, pause=pause)
    return make_study(build, seeds=range(3), store=Path(folder) / "store.jsonl")


if __name__ == "__main__":
    study_of(sys.argv[1], float(sys.argv[3])).run(LeaveOneOut(), workers=int(sys.argv[2]))
