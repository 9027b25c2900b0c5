"""How often a SpikeGuard raises a false alarm and finds a poisoned batch; how often replays name the sample, or a passing fault.

Everything is trained on MNIST-1D with a CNN (Adam, 1e-2, batches of 100), with the guard as it is by default:

- false alarms: 20 seeds of 6,000 steps each without any poison;
- batches: the same seeds, the inputs of one batch scaled by 100 at a random step, or its labels permuted;
- samples: 100 runs in which the inputs of one sample are scaled by 1,000 at a random step; of those in which the guard acts, how
  often `Replay.rank_samples` names the sample first;
- faults: 100 runs in which one exponent bit of one gradient is flipped at a random step, once, and 100 with a bad batch; of those
  in which the guard acts, how often `Replay.run` tells which it was.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mnist1d.data import get_dataset_args, make_dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import SpikeGuard

ADAM = partial(torch.optim.Adam, lr=1e-2)
BATCH = 100


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """MNIST-1D, of which some samples are scaled when they are fetched for the given time."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels
        self.scale: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] * self.scale.get(index, 1.0), self.labels[index]


def load_data() -> Samples:
    """The 4,000 training samples of MNIST-1D."""
    made = make_dataset(get_dataset_args())
    return Samples(torch.tensor(made["x"]).float().unsqueeze(1), torch.tensor(made["y"]))


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv1d(1, 25, 5, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(125, 10),
    )  # fmt: skip


def engine_of(seed: int, policy: Any) -> tuple[Engine, SpikeGuard]:
    engine = Engine(Update.supervised(nn.functional.cross_entropy, ADAM), model=network(seed), seed=seed, allow=["W19"])
    guard = SpikeGuard(policy)
    engine.attach(guard)
    return engine, guard


def run(engine: Engine, data: Any, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(data, max_iters=steps, check=False)


def loader_of(samples: Samples, seed: int) -> DataLoader[Any]:
    return DataLoader(samples, BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed))


def alarms(samples: Samples, seeds: int, steps: int) -> dict[str, Any]:
    """False alarms of clean runs, and whether a batch of scaled inputs, or one of permuted labels, is found at its step."""
    false, found = 0, {"scaled": 0, "permuted": 0}
    for seed in range(seeds):
        engine, guard = engine_of(seed, "skip")
        run(engine, loader_of(samples, seed), steps)
        false += len(guard.actions)
        at = int(np.random.default_rng(seed).integers(200, steps))
        order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(seed))
        for kind in found:
            engine, guard = engine_of(seed, "skip")

            def poison(engine: Engine, kind: str = kind, order: Tensor = order) -> None:
                inputs, labels = engine.state.batch
                engine.state.batch = (inputs * 100.0, labels) if kind == "scaled" else (inputs, labels[order])

            engine.connect(Events.GET_BATCH_COMPLETED(once=at), poison)
            run(engine, loader_of(samples, seed), at)
            found[kind] += any(action["iteration"] == at for action in guard.actions)
    return {"seeds": seeds, "steps": steps, "false alarms": false, "batches found": found}


def named(samples: Samples, runs: int) -> dict[str, Any]:
    """Of runs with one poisoned sample: in how many the guard acts at its step, and in how many of these it is named first."""
    acted = first = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        sample = int(rng.integers(len(samples)))
        samples.scale = {}
        engine, guard = engine_of(seed, "stop")
        run(engine, loader_of(samples, seed), 200)  # clean until the window is full
        samples.scale = {sample: 1000.0}
        run(engine, engine.feed.current.given, 240)
        if guard.actions:
            acted += 1
            first += engine.replay(guard.actions[-1]["iteration"]).rank_samples()[0].sample == sample
        samples.scale = {}
    return {"runs": runs, "acted": acted, "named": first}


def flip_exponent_bit(engine: Engine, rng: np.random.Generator) -> None:
    """Flip the highest exponent bit of a gradient's element, which multiplies a small one by 2 ** 128."""
    gradients = [p.grad for p in engine.model.parameters()]
    gradient = gradients[int(rng.integers(len(gradients)))]
    place = int(rng.integers(gradient.numel()))
    bits = gradient.flatten()[place : place + 1].view(torch.int32)
    gradient.view(-1)[place] = (bits ^ (1 << 30)).view(torch.float32).item()


def told_apart(samples: Samples, runs: int) -> dict[str, Any]:
    """Of runs with a flipped bit, and of runs with a bad batch: in how many the guard acts, and what replays then say."""
    counts: dict[str, Any] = {}
    for kind, expected in (("fault", "transient"), ("batch", "persistent")):
        acted = right = 0
        for seed in range(runs):
            rng = np.random.default_rng(seed)
            engine, guard = engine_of(seed, "stop")
            at = int(rng.integers(150, 240))
            once: list[int] = []

            def disturb(engine: Engine, kind: str = kind, rng: Any = rng, once: list[int] = once) -> None:
                if kind == "batch":
                    inputs, labels = engine.state.batch
                    engine.state.batch = inputs * 100.0, labels
                elif not once:
                    once.append(1)
                    flip_exponent_bit(engine, rng)

            event: Callable[..., Any] = Events.GET_BATCH_COMPLETED if kind == "batch" else Events.BACKWARD_COMPLETED
            engine.connect(event(once=at), disturb, phase=Phase.CHANGE)
            run(engine, loader_of(samples, seed), at)
            if guard.actions and guard.actions[-1]["iteration"] == at:
                acted += 1
                right += engine.replay(at).run().verdict == expected
        counts[kind] = {"runs": runs, "acted": acted, "right": right}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="clean runs, and runs with a poisoned batch")
    parser.add_argument("--steps", type=int, default=6000, help="steps of each of them")
    parser.add_argument("--runs", type=int, default=100, help="runs with a poisoned sample, a fault, or a bad batch")
    parser.add_argument("--json", help="where to write the result; - for the standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples = load_data()
    result = {
        "alarms": alarms(samples, options.seeds, options.steps),
        "samples": named(samples, options.runs),
        "faults": told_apart(samples, options.runs),
    }
    text = json.dumps(result, indent=1)
    if options.json in (None, "-"):
        print(text)
    else:
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
