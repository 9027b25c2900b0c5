"""Published silent errors of training, by meaning: those of the TrainCheck study (OSDI 2025) that run on a CPU.

Of its 18 cases, 7 are here. The other 11 need what is not here: several GPUs or a fault of a GPU, a driver or an interconnect
(baichuan2-86, pytorch-84803, pytorch-96600), training with DeepSpeed (deepspeed-1801,
deepspeed-5794), a compiler whose bug is mended (pytorch-115607, lightning-thunder-725), or a version of another library that has
the error in its own code, outside of any training loop (mmpretrain-702, transformers-17877, transformers-23723,
transformers-34204).
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, Finding, Findings, Update
from signalfire.handlers import DistributedDataParallel, Guards
from tests.kit import SGD, batches, build, linear, mlp
from tests.mistakes.registry import comes_right, mistake
from tests.processes import Failed, run_together


@mistake("G23")
def pytorch_51800_spectral_norm_is_evaluated_before_it_was_trained(right: bool) -> None:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 1))
    if right:
        model(batches(1)[0][0])
    engine = Engine(Update.supervised(mse_loss), model=model)
    engine.attach(Guards())
    engine.run(batches(1))


@mistake("G22")
def pytorch_forum_84911_the_head_is_frozen(right: bool) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    model[3].requires_grad_(right)
    build(model, Guards()).run(iter(batches()), max_iters=1)


class TwoNetworks(nn.Module):
    """One that the engine trains, and a critic that the user steps."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.critic = linear(5, 1), linear(5, 1)


@mistake("G10")
def stackoverflow_60335387_zero_grad_is_missing_in_a_step_of_ones_own(right: bool) -> None:
    model = TwoNetworks()
    optimizer = torch.optim.SGD(model.critic.parameters(), lr=1e-4)

    def function(engine: Engine, batch: Any) -> Tensor:
        x, y = batch
        if right:
            optimizer.zero_grad()
        mse_loss(model.critic(x), y).backward()
        optimizer.step()
        return mse_loss(model.main(x), y)

    engine = Engine(Update.from_function(function, SGD, parameters=lambda engine: model.main.parameters()), model=model)
    engine.attach(Guards())
    engine.run(iter(batches()), max_iters=2)


@comes_right
def stackoverflow_60335387_zero_grad_is_missing_in_the_engine_s_step(right: bool) -> Any:
    """The engine clears the gradients of what its optimizers hold after every step."""
    engine = build(mlp(5, 8, 1))
    if right:
        engine.connect(Events.UPDATE_STARTED, lambda engine: engine.state.update.optimizer.zero_grad())
    engine.run(batches(), max_epochs=1)
    return [p.tolist() for p in engine.model.parameters()]


def _in_two_processes(kind: str, right: bool) -> tuple[list[str], list[Any]]:
    """The codes of the findings of a run on this rank, and the weights that it ends with."""
    model = mlp(5, 8, 1)

    def forward(engine: Engine, batch: Any) -> Any:
        wrapped = kind != "wrapped in part" or right or engine.state.iteration % 2 == 0
        return (engine.model if wrapped else model)(batch[0])

    update = Update(forward, lambda engine, output, batch: mse_loss(output, batch[1]), SGD)
    engine = Engine(update, model=model, seed=0)
    engine.attach(DistributedDataParallel(timeout=60), Guards())
    if kind == "converted" and not right:
        engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: model.double().float())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings come back
        engine.run(batches(8), max_epochs=1)
    return [found.code for found in engine.findings.of_run().at_least("warning")], [
        p.tolist() for p in model.parameters()
    ]


@mistake(Failed, match="finished reduction in the prior iteration")
def pytorch_104336_a_conversion_to_and_fro_ends_the_reduction_of_gradients(right: bool) -> Findings:
    codes = run_together(partial(_in_two_processes, "converted", right), 2)[0][0]
    return Findings(Finding(code, "of rank 0", "see there") for code in codes)


@comes_right
def x_jxmnop_ddp_out_of_sync_the_model_is_used_with_and_without_its_wrapper(right: bool) -> Any:
    """The gradients of a window are reduced whichever of the two the forward calls: all ranks end alike."""
    (codes, weights), (_, others) = run_together(partial(_in_two_processes, "wrapped in part", right), 2)
    assert weights == others
    return codes, weights


class Attention(nn.Module):
    """Calls dropout as a function, with a rate of its own that knows no mode."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.layer, self.right = linear(5, 1), right

    def forward(self, x: Tensor) -> Tensor:
        rate = 0.1 if self.training or not self.right else 0.0
        return self.layer(dropout(x, rate, training=True) if rate else x)  # type: ignore[no-any-return]


@mistake("G07")
def transformers_33844_dropout_is_active_in_evaluation(right: bool) -> None:
    engine = Engine(Update.supervised(mse_loss), model=Attention(right=right))
    engine.attach(Guards())
    engine.run(batches(1))


class Augmented(Dataset[Tensor]):
    """Noise from NumPy's global generator."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(np.random.rand())])


@comes_right
def stackoverflow_67180955_workers_draw_the_same_numpy_augmentation(right: bool) -> Any:
    """Each sample has a seed of its own, whichever worker fetches it: all draws differ."""
    seen: list[float] = []
    engine = Engine(Update.from_function(lambda engine, batch: None), seed=0, allow=["W50"])
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.extend(engine.state.batch.flatten().tolist()))

    def seeded(worker: int) -> None:
        np.random.seed(worker)

    loader = DataLoader(Augmented(), batch_size=2, num_workers=2, worker_init_fn=seeded if right else None)
    engine.run(loader)
    return len(set(seen))
