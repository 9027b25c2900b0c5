"""Train a logistic regression to its optimum with L-BFGS, which evaluates the loss
several times per step, SGD and Adam.

    python examples/lbfgs.py                         # half a minute on one core
    python examples/lbfgs.py --penalty 1e-4
    python examples/lbfgs.py --list  # the wiring of the trainer with L-BFGS

The objective is the mean cross-entropy on MNIST-1D's 4,000 training samples plus an L2
penalty in the loss function. It is strictly convex in the weights, so there is one
optimum, which SciPy computes for comparison. L-BFGS needs the full-batch gradient, and
gets it by gradient accumulation over all batches of an epoch. Convergence is plotted
against passes over the data, including the repeated evaluations of the line search.

Sources: Liu and Nocedal, "On the limited memory BFGS method for large scale
optimization" (1989); the data are those of Greydanus and Kobak, "Scaling Down Deep
Learning with MNIST-1D" (ICML 2024), https://arxiv.org/abs/2011.14439
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from mnist1d.data import get_dataset_args, make_dataset
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Phase, Update, on, seed_everything
from signalfire.handlers import (
    GradientAccumulation,
    LRScheduling,
    Seeding,
    cosine_with_warmup,
)

EPOCHS, TOLERANCE = 160, 1e-5
# By default torch's LBFGS ends a step when the loss changes by less than 1e-9. The
# learning rates of SGD and Adam are the best of a coarse grid, with cosine decay to
# zero.
LBFGS = partial(
    torch.optim.LBFGS,
    max_iter=8,
    history_size=20,
    tolerance_change=0.0,
    tolerance_grad=0.0,
    line_search_fn="strong_wolfe",
)
OPTIMIZERS: dict[str, Any] = {
    "L-BFGS": LBFGS,
    "SGD": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.05),
}


def objective(model: nn.Module, x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """The mean cross-entropy plus ``penalty / 2`` times the squared norm of the
    weights, without the biases.
    """
    loss: Tensor = (
        F.cross_entropy(model(x), y)
        + penalty / 2 * model.get_parameter("weight").square().sum()
    )
    return loss


class Convergence(Handler):
    """Counts passes over the data, computes the objective on all of it after each
    epoch, and stops at the optimum.

    Args:
        x: Inputs of shape (samples, features).
        y: Targets of shape (samples,).
        penalty: L2 penalty of the objective.
        tolerance: Norm of the gradient below which the run stops.
    """

    def __init__(
        self, x: Tensor, y: Tensor, *, penalty: float, tolerance: float
    ) -> None:
        super().__init__()
        self.x, self.y = x, y
        self.penalty = penalty
        self.tolerance = tolerance
        self.samples = 0
        self.curve: list[
            tuple[float, float, float]
        ] = []  # passes, objective, norm of its gradient

    @on(Events.BACKWARD_COMPLETED)
    def count(self, engine: Engine) -> None:
        """Count the samples of every evaluation: the event is emitted for each one
        within a step.
        """
        self.samples += len(engine.state.batch[0])

    @on(Events.STARTED | Events.EPOCH_COMPLETED, phase=Phase.RECORD)
    def measure(self, engine: Engine) -> None:
        with torch.enable_grad():
            loss = objective(engine.model, self.x, self.y, self.penalty)
            gradients = torch.autograd.grad(loss, list(engine.model.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        self.curve.append(
            (self.samples / len(self.x), float(loss.detach()), float(norm))
        )

    @on(Events.EPOCH_COMPLETED, phase=Phase.CONTROL)
    def stop(self, engine: Engine) -> None:
        if (norm := self.curve[-1][2]) < self.tolerance:
            engine.terminate(f"the norm of the gradient is {norm:.0e}")


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """4,000 training and 1,000 test samples with 40 features, in double precision."""
    data = make_dataset(get_dataset_args())
    x, x_test = (
        torch.tensor(data["x"], dtype=torch.float64),
        torch.tensor(data["x_test"], dtype=torch.float64),
    )
    return x, torch.tensor(data["y"]), x_test, torch.tensor(data["y_test"])


def build(
    kind: str, x: Tensor, y: Tensor, *, penalty: float, seed: int
) -> tuple[Engine, DataLoader[Any]]:
    """The trainer and its data: L-BFGS makes one step per epoch, SGD and Adam one per
    batch.
    """
    seed_everything(seed)
    model = nn.Linear(x.shape[1], 10, dtype=torch.float64)

    def function(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        return objective(engine.model, *batch, penalty)

    full = kind == "L-BFGS"
    loader = DataLoader(
        TensorDataset(x, y),
        batch_size=1000 if full else 250,
        shuffle=not full,
        generator=torch.Generator(),
    )
    trainer = Engine(
        Update.from_function(function, OPTIMIZERS[kind]), model=model, seed=seed
    )
    trainer.attach(
        Seeding(),
        Convergence(x, y, penalty=penalty, tolerance=TOLERANCE),
        GradientAccumulation(len(loader))
        if full
        else LRScheduling(cosine_with_warmup(warmup=0.05)),
    )
    return trainer, loader


def scipys_optimum(x: Tensor, y: Tensor, penalty: float) -> float:
    """The minimum of the objective, computed by SciPy's L-BFGS-B."""
    model = nn.Linear(x.shape[1], 10, dtype=torch.float64)

    def value_and_gradient(
        flat: np.ndarray[Any, np.dtype[np.float64]],
    ) -> tuple[float, Any]:
        nn.utils.vector_to_parameters(torch.from_numpy(flat), model.parameters())
        loss = objective(model, x, y, penalty)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return loss.item(), torch.cat(
            [gradient.flatten() for gradient in gradients]
        ).numpy()

    start = np.zeros(sum(p.numel() for p in model.parameters()))
    options = {"maxiter": 5000, "maxfun": 10_000, "ftol": 0.0, "gtol": 1e-9}
    return float(
        minimize(
            value_and_gradient, start, jac=True, method="L-BFGS-B", options=options
        ).fun
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Logistic regression to its optimum by L-BFGS, SGD and Adam."
    )
    parser.add_argument(
        "--penalty", type=float, default=1e-3, help="weight of the L2 penalty"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=EPOCHS,
        help="maximum number of epochs of each run",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs") / "lbfgs", help="folder of the plot"
    )
    parser.add_argument("--list", action="store_true", help="print the wiring and exit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    x, y, x_test, y_test = load_data()
    if arguments.list:
        print(build("L-BFGS", x, y, penalty=arguments.penalty, seed=arguments.seed)[0])
        return
    optimum = scipys_optimum(x, y, arguments.penalty)
    print(f"SciPy's optimum: {optimum:.10f}\n")
    print(
        f"{'':<8}{'passes':>8}{'steps':>8}{'loss - optimum':>16}{'|gradient|':>12}"
        f"{'test %':>8}{'seconds':>9}"
    )
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for kind in OPTIMIZERS:
        trainer, loader = build(
            kind, x, y, penalty=arguments.penalty, seed=arguments.seed
        )
        began = time.perf_counter()
        trainer.run(loader, max_epochs=arguments.epochs)
        seconds = time.perf_counter() - began
        curves[kind] = trainer[Convergence].curve
        passes, loss, norm = curves[kind][-1]
        with torch.no_grad():
            accuracy = (
                100 * (trainer.model(x_test).argmax(1) == y_test).double().mean().item()
            )
        steps = trainer.updates[0].steps
        print(
            f"{kind:<8}{passes:>8.0f}{steps:>8}{loss - optimum:>16.1e}{norm:>12.1e}"
            f"{accuracy:>8.1f}{seconds:>9.1f}"
        )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / "convergence.png"
    draw(curves, optimum, path)
    print(f"\n  {path}")


def draw(
    curves: dict[str, list[tuple[float, float, float]]], optimum: float, path: Path
) -> None:
    """Plot the distance of each optimizer from the optimum against passes over the
    data.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for kind, curve in curves.items():
        # The last differences are rounding errors, also of SciPy's value.
        axes.plot(
            [p for p, _, _ in curve],
            [max(loss - optimum, 1e-15) for _, loss, _ in curve],
            ".-",
            label=kind,
        )
    axes.set(xlabel="passes over the data", ylabel="loss - optimum", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
