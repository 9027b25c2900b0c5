"""How the cost of Signalfire grows: one picture with a panel for each curve, and a table, so that a bend is seen.

    python tests/benchmarks/growth.py [--curves handlers,ema] [--rounds 15] [--sizes N] [--json FILE] [--plot FILE]

The curves (`growing/curves.py`), each beside the plain torch that does the same, where there is such:

    handlers     an iteration, with the number of attached handlers
    events       an iteration, with the number of events that are listened to
    norms        the gradient norm of a step, with the number of parameter tensors of 1,000 elements; likewise
    clipping     clipping by norm,
    ema          the moving average of the weights, and
    fused        a whole step with Adam(fused=True)
    resume       the time to the first batch in the middle of an epoch, with the number of samples
    shuffling    the time to the first batch of an epoch, likewise
    checkpoint   for how long a checkpoint blocks training, with its megabytes
    boundary     what lies between two epochs, with the number of epochs that were made before

All sizes and lines of a curve take turns in many short rounds, so that what else the machine does hits them alike. Costs are
medians over the rounds, with the quartiles as the spread. Below stands by how much each exceeds that of the next smaller size,
for one more of what the size counts: along a straight line this stays the same, and at a bend it changes. It is the median of
the differences within a round; likewise the ratio to the line of plain PyTorch.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import operator
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import figures
import torch
from growing.curves import CURVES, Curve

IN_A_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3}


def measure(curve: Curve, sizes: list[float], rounds: int) -> dict[str, list[list[float]]]:
    """By line and size, what each round gave."""
    variants = [curve.lines(size) for size in sizes]
    costs: dict[str, list[list[float]]] = {line: [[] for _ in sizes] for line in variants[0]}
    gc.collect()
    gc.freeze()  # what is there by now is not looked through again in each round
    for turn in range(rounds + 1):
        gc.collect()
        for place, lines in enumerate(variants):
            for line, seconds in lines.items():
                cost = seconds() * IN_A_SECOND[curve.unit]
                if turn:  # the first round warms up
                    costs[line][place].append(cost)
    gc.unfreeze()
    return costs


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def show(name: str, curve: Curve, sizes: list[float], costs: dict[str, list[list[float]]]) -> None:
    """One table for a curve: a column for each size, and for each line some rows."""

    def row(text: str, values: list[float]) -> None:
        print(f"{text:<56}" + "".join(f"{number(value) if value == value else '':>10}" for value in values))

    reference = next((values for line, values in costs.items() if line.startswith("plain PyTorch")), None)
    print(f"\n{name}: {curve.title}, {curve.unit}, over {curve.size}")
    print(" " * 56 + "".join(f"{size:>10,.10g}" for size in sizes))
    for line, values in costs.items():
        row(line, [statistics.median(rounds) for rounds in values])
        row("    half the distance of the quartiles", [spread(rounds) for rounds in values])
        further = [
            paired(operator.sub, values[i], values[i - 1]) / (sizes[i] - sizes[i - 1]) for i in range(1, len(sizes))
        ]
        row(f"    for {curve.per:,} more", [math.nan, *(curve.per * value for value in further)])
        if reference and values is not reference:
            row("    x plain PyTorch", list(map(partial(paired, operator.truediv), values, reference)))


def spread(values: list[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return (high - low) / 2


def paired(compare: Callable[[float, float], float], these: list[float], others: list[float]) -> float:
    """The median of what a comparison gives within each round."""
    return statistics.median(map(compare, these, others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", default=",".join(CURVES), metavar="NAME[,NAME]")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, metavar="N", help="only the N smallest sizes of each curve")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it")
    arguments = parser.parse_args()
    names = arguments.curves.split(",")
    if unknown := [name for name in names if name not in CURVES]:
        parser.error(f"--curves {unknown[0]}: there is no such one; there are: {', '.join(CURVES)}")

    torch.set_num_threads(1)
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "rounds": arguments.rounds,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    tempfile.tempdir = tempfile.mkdtemp()  # what the curves write goes with it
    measured: dict[str, dict[str, Any]] = {}
    try:
        for name in names:
            curve = CURVES[name]
            sizes = list(curve.sizes[: arguments.sizes])
            costs = measure(curve, sizes, arguments.rounds)
            measured[name] = {"size": curve.size, "unit": curve.unit, "sizes": sizes, "lines": costs}
            show(name, curve, sizes, costs)
            if arguments.json:
                arguments.json.write_text(json.dumps({"machine": machine, "curves": measured}, indent=1))
    finally:
        shutil.rmtree(tempfile.tempdir)
    if arguments.plot:
        from growing.picture import draw  # matplotlib is needed for nothing else

        draw(machine, measured, arguments.plot)


if __name__ == "__main__":
    figures.run(main)
