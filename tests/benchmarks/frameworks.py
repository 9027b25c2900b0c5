"""What an iteration costs beside the plain PyTorch loop, here and in other frameworks, for the same work.

    python tests/benchmarks/frameworks.py [--items tiny,full] [--frameworks bare,signalfire,ignite] [--rounds 15]
                                          [--json FILE] [--plot FILE] [--record]

The items (`adapters/items.py`): "empty", a step that does nothing; "tiny", a linear layer of 32 units; "full", the same with
accumulation over 4 batches, clipping by norm, a rate that changes with every step, the running loss, early stopping and a
checkpoint of the last epoch, and a row in a log for every 10 iterations; "real", the convolutional network of the MNIST-1D
paper with a shuffled DataLoader. The loop of accelerate is the user's own, so that "empty" is there the bare loop. What is each
framework's own on "full"; the rest is implemented in the adapter, as a function or in a hook:

    framework             accumulation  clipping  schedule  running loss  stopping  checkpoint  log
    signalfire            own           own       own       own           own       own         own
    ignite                adapter       adapter   own       own           own       own         adapter
    lightning             own           own       own       own           own       own         own
    accelerate            own           own       own       adapter       adapter   own         adapter
    pytorch_accelerated   own           adapter   own       own           own       own         adapter
    transformers_trainer  own           own       own       adapter       adapter   own         own (in memory)
    torchtnt              own           own       own       adapter       own       own         own
    skorch                adapter       adapter   adapter   own           own       own         adapter
    fastai                own           own       own       own (smooth)  own       own         adapter

Each is used on one thread of the CPU as its documentation says for speed, without progress bars, in a process of its own. A call
trains a new model for a number of iterations. A round makes two calls of each framework, a short and a long one, and their
difference, divided by the iterations between, is what an iteration costs; what a run costs once drops out of it, and is given
beside it. The frameworks take turns, beginning with another one in each round; medians are over the rounds, with the quartiles
as the spread, and ratios are to the bare loop, which has a turn right before each of the others. All must end with the weights
of the bare loop, bit for bit. The number of Python and C calls an iteration is counted under cProfile: it shows what noise hides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import figures
from adapters.items import ITEMS, Item
from adapters.process import Framework

FRAMEWORKS = (
    "bare", "signalfire", "ignite", "lightning", "accelerate", "pytorch_accelerated", "transformers_trainer", "torchtnt",
    "skorch", "fastai",
)  # fmt: skip


def load(names: list[str]) -> tuple[list[Framework], dict[str, str]]:
    """The frameworks that are there, with their versions; the others are left out, with a line that says so."""
    frameworks, versions = [], {}
    for framework in [Framework(name) for name in names]:
        try:
            versions[framework.name] = framework("load")
            frameworks.append(framework)
        except RuntimeError as error:
            print(f"left out: {error}", file=sys.stderr)
    return frameworks, versions


def measure(item: Item, frameworks: list[Framework], rounds: int) -> dict[str, dict[str, Any]]:
    """Microseconds an iteration, milliseconds a run, calls and the difference in the weights, by framework."""
    frameworks = [framework for framework in frameworks if framework("make", item.name)]
    expected = frameworks[0]("weights", item.long)
    results: dict[str, dict[str, Any]] = {}
    for framework in frameworks:
        pairs = zip(framework("weights", item.long), expected, strict=True)
        if not all((mine == bare).all() for mine, bare in pairs):
            raise SystemExit(f"{framework.name} ends item {item.name!r} with other weights than the bare loop")
        results[framework.name] = {"us": [], "ms_a_run": [], "ratios": [], "calls": framework("calls")}

    def once(framework: Framework) -> float:
        short, long = framework("seconds", item.short), framework("seconds", item.long)
        each: float = (long - short) / (item.long - item.short)
        results[framework.name]["us"].append(each * 1e6)
        results[framework.name]["ms_a_run"].append((short - item.short * each) * 1e3)
        return each

    bare, *others = frameworks
    results[bare.name]["ratios"] = [1.0]
    for turn in range(rounds):
        first = turn % max(1, len(others))
        for framework in others[first:] + others[:first]:
            reference = once(bare)
            results[framework.name]["ratios"].append(once(framework) / reference)
        if not others:
            once(bare)
    return results


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:9.2f} [{low:.2f}, {high:.2f}]"


def show(item: Item, results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{item.name:22}{'us an iteration [quartiles]':30}{'x bare [quartiles]':30}{'calls':>7}{'ms a run':>10}")
    for name, result in results.items():
        line = f"{name:22}{spread(result['us']):30}{spread(result['ratios']):30}{result['calls']:7.1f}"
        print(f"{line}{statistics.median(result['ms_a_run']):10.0f}", flush=True)


def summary(measured: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """The medians of each item, by framework."""
    return {
        item: {
            name: {
                "us": round(statistics.median(one["us"]), 2),
                "ratio": round(statistics.median(one["ratios"]), 3),
                "calls": round(one["calls"], 1),
                "ms_a_run": round(statistics.median(one["ms_a_run"])),
            }
            for name, one in results.items()
        }
        for item, results in measured.items()
    }


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", default=",".join(ITEMS), metavar="NAME[,NAME]")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), metavar="NAME[,NAME]")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it")
    arguments = parser.parse_args()
    items, chosen = arguments.items.split(","), arguments.frameworks.split(",")
    for argument, given, known in (("--items", items, ITEMS), ("--frameworks", chosen, FRAMEWORKS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{argument} {unknown[0]}: there is no such one; there are: {', '.join(known)}")

    frameworks, versions = load(list(dict.fromkeys(["bare", *chosen])))
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": versions,
    }
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    print(
        f"Python {machine['python']}, {machine['cores']} cores, load {machine['load'][0]:.2f}, {arguments.rounds} rounds"
    )
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    for name in items:
        measured[name] = measure(ITEMS[name], frameworks, arguments.rounds)
        show(ITEMS[name], measured[name])
        if arguments.json:
            arguments.json.write_text(json.dumps({"machine": machine, "items": measured}, indent=1))
    if arguments.plot:
        from adapters.picture import draw  # matplotlib is needed for nothing else

        draw(measured, arguments.plot)
    return {"rounds": arguments.rounds, "versions": versions, "items": summary(measured)}


if __name__ == "__main__":
    figures.run(main)
