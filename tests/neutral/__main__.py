"""Print the tables: ``python -m tests.neutral [suite ...]``."""

from __future__ import annotations

import sys

import torch

from . import estimators, exercises, metrics, optimizers, programs, recipes, schedulers
from .outcomes import table

SUITES = {
    "optimizers of torch.optim": optimizers.of_torch,
    "optimizers of pytorch_optimizer": optimizers.of_pytorch_optimizer,
    "schedulers of torch": schedulers.of_torch,
    "schedulers of transformers": schedulers.of_transformers,
    "schedulers of timm": schedulers.of_timm,
    "classes of torchmetrics": metrics.of_torchmetrics,
    "classes of torchmetrics, two ranks": metrics.of_torchmetrics_on_two,
    "checks of scikit-learn, examples/sklearn_estimator.py": estimators.of_example,
    "checks of scikit-learn, skorch": estimators.of_skorch,
    "programs of pytorch/examples": programs.of_pytorch_examples,
    "exercises of d2l.ai": exercises.of_d2l,
    "recipe of nanoGPT": recipes.of_nanogpt,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, suite in SUITES.items():
        if len(sys.argv) == 1 or any(word in name for word in sys.argv[1:]):
            print(table(name, suite()), flush=True)
            if suite is recipes.of_nanogpt:
                print(
                    f"  time of the Engine over the plain loop's, in turns: {recipes.time_of_nanogpt():.3f}", flush=True
                )
