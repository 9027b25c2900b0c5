"""What `Trace` costs: steps with it beside the same engine without it, and the bytes that it writes.

    python tests/benchmarks/trace.py [--rounds 40]

An engine and a plain loop take turns, iteration by iteration in one thread, as in watching.py; a round has 100 iterations. The
ratio is that of the engine with the trace over the engine without it, each over the plain loop of its own rounds: the median over
the rounds, with the quartiles. The models are the convolutional network of examples/main.py with 100 samples, and a layer of 10.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from pathlib import Path

import figures
import torch
from watching import ROUND, cnn, rounds, tiny, with_nothing

from signalfire import Engine
from signalfire.handlers import Trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    count = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'':<22}{'ratio  [quartiles]':<26}{'bytes per 1,000 iterations':>28}")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (("CNN", cnn), ("tiny", tiny)):
            without = statistics.median(one for one, _ in rounds(make, count, with_nothing))
            for every in ("10it", "1it"):
                path = Path(folder) / f"{name}{every}.jsonl"

                def attach(engine: Engine, path: Path = path, every: str = every) -> None:
                    engine.attach(Trace(path, every=every))

                ratios = [one / without for one, _ in rounds(make, count, attach)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                written = path.stat().st_size / (ROUND * (count + 2)) * 1000
                print(f"{name}, every={every:<12}{middle:6.3f}  [{low:.3f}, {high:.3f}]{written:>28,.0f}", flush=True)


if __name__ == "__main__":
    figures.run(main)
