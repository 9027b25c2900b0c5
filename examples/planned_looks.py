"""What do the handlers of `main.py` that change the training contribute? Twenty seeds
at most, looked at four times.

    # at most 80 runs of 400 steps in two processes: some minutes
    python examples/planned_looks.py
    python examples/planned_looks.py --steps 1000

The convolutional network of `main.py` is trained with a one-cycle schedule. Gradient
accumulation, gradient clipping and the schedule are disabled one at a time; without
accumulation, a step sees a batch of 25 samples instead of 100. The seed draws the
initial weights. The report compares after 7, 10, 14 and 20 seeds; a variant that is
found to differ at one of these looks needs no more runs. Over all looks and variants, a
difference that does not exist is found in at most 5 % of such studies.

With the defaults, two variants are decided at the first look, so that 54 of 80 runs are
made. Without accumulation the accuracy falls by 15.6 percentage points (95 % interval
13.0 to 18.4). Without the schedule it rises by 4.0 (0.6 to 7.3): 400 steps are few, and
one cycle ends with small rates. Clipping at a norm of 5 never acts.

Source: Greydanus and Kobak, "Scaling Down Deep Learning with MNIST-1D" (ICML 2024),
https://arxiv.org/abs/2011.14439
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import main as example  # type: ignore[import-not-found]  # examples/main.py, in this folder
from torch.utils.data import DataLoader

from signalfire import Engine
from signalfire.ablation import LeaveOneOut, Study

LOOKS, STEPS = [7, 10, 14, 20], 400


@cache
def load_data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The data of `main.py`, made once per process."""
    loaders: tuple[DataLoader[Any], DataLoader[Any]] = example.load_data()
    return loaders


def build(
    seed: int, *, steps: int = STEPS
) -> tuple[Engine, Callable[[Engine], object]]:
    """The trainer of `main.py` for one seed, and a function that runs it. What writes
    files is disabled by the study.
    """
    train_data, test_data = load_data()
    trainer = example.build(
        "cnn",
        seed=seed,
        folder=Path("runs"),
        schedule="onecycle",
        evaluate_every=steps,
        test_data=test_data,
    )
    return trainer, lambda engine: engine.run(train_data, max_steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Leave out the handlers of main.py, with planned looks."
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"optimizer steps of a run (default: {STEPS})",
    )
    parser.add_argument(
        "--looks",
        type=int,
        nargs="+",
        default=LOOKS,
        help="numbers of seeds at each look",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="number of worker processes (default: 2)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs") / "planned_looks",
        help="folder of the results",
    )
    arguments = parser.parse_args()
    for name in ("steps", "workers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: expected at least 1")

    study = Study(
        partial(build, steps=arguments.steps),
        metric="val_accuracy",
        mode="max",
        looks=arguments.looks,
        store=arguments.folder / "runs.jsonl",
    )
    design = LeaveOneOut(
        ["gradient_accumulation", "gradient_clipping", "lr_scheduling"]
    )
    print(study.plan(design))

    report = study.run(design, workers=arguments.workers)
    print(f"\n{report}\n")
    print(*report.sentences(), sep="\n")
    planned = len(report.rows) * arguments.looks[-1]
    print(f"\n{len(report.results)} of {planned} runs were made")
    picture = arguments.folder / "planned_looks.png"
    report.plot(picture)
    print(f"  {picture}")


if __name__ == "__main__":
    main()
