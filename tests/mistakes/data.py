"""Data that is not what it seems: forgotten returns, other data, generators, workers, samples in place of batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from signalfire import DataError, Engine, Events, Finding, Findings, RereadingWarning, Update
from signalfire.handlers import DeviceTransfer, DistributedDataParallel, ElasticDataParallel
from tests.kit import SGD, batches, build, linear, mlp
from tests.mistakes.registry import comes_right, mistake, silent
from tests.processes import run_together


def pairs(count: int = 8) -> TensorDataset:
    inputs, targets = batches(1)[0]
    return TensorDataset(inputs.repeat(count // 4, 1), targets.repeat(count // 4, 1))


# ---- forgotten returns ----


class Model(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.layer, self.returns = linear(5, 1), returns

    def forward(self, inputs: Tensor) -> Any:
        output = self.layer(inputs)
        return output if self.returns else None


@mistake("W29")
def a_forward_without_return(right: bool) -> None:
    build(Model(right)).run(batches(), max_epochs=2)


@mistake("W29")
def a_forward_without_return_in_a_part_of_an_epoch(right: bool) -> None:
    build(Model(right)).run(batches(), max_iters=3)


@mistake("W29")
def a_loss_without_return(right: bool) -> None:
    def loss(engine: Engine, output: Tensor, batch: Any) -> Any:
        value = mse_loss(output, batch[1])
        return value if right else None

    forward = lambda engine, batch: engine.model(batch[0])  # noqa: E731
    Engine(Update(forward, loss, SGD), model=linear(5, 1)).run(batches(), max_epochs=1)


@mistake("W29")
def a_step_function_without_return(right: bool) -> None:
    def step(engine: Engine, batch: Any) -> Any:
        loss = mse_loss(engine.model(batch[0]), batch[1])
        return loss if right else None

    Engine(Update.from_function(step, SGD), model=linear(5, 1)).run(batches(), max_epochs=1)


@mistake("W29")
def a_collate_function_without_return(right: bool) -> None:
    def collate(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return batch if right else None

    build(linear(5, 1)).run(DataLoader(pairs(), 4, collate_fn=collate), max_epochs=1)


# ---- a position that does not apply ----


def resumed(first: Any, second: Any) -> None:
    engine, other = build(linear(5, 1)), build(linear(5, 1))
    engine.run(first, max_iters=1)
    other.load_state_dict(engine.state_dict())
    other.run(second, max_epochs=1)


@mistake(ValueError, "24 samples.*has 32")
def a_resume_inside_an_epoch_after_data_was_added(right: bool) -> None:
    resumed(DataLoader(pairs(24), 4), DataLoader(pairs(24 if right else 32), 4))


@mistake(ValueError, "4 samples per batch.*has 8")
def a_resume_inside_an_epoch_with_a_larger_batch(right: bool) -> None:
    resumed(DataLoader(pairs(24), 4), DataLoader(pairs(24), 4 if right else 8))


@mistake(ValueError, "6 batches.*has 4")
def a_resume_inside_an_epoch_over_a_shorter_list(right: bool) -> None:
    resumed(batches(6), batches(6 if right else 4))


# ---- random numbers ----


class Noisy(Dataset[Any]):
    def __init__(self, own: bool) -> None:
        self.rng = np.random.default_rng(0) if own else np.random

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((5,), float(self.rng.normal())), torch.ones(1)


@mistake("W24")
def a_generator_of_the_data_set_in_workers(right: bool) -> None:
    loader = DataLoader(Noisy(not right), 4, num_workers=1, multiprocessing_context="fork")
    build(linear(5, 1)).run(loader, max_epochs=1)


@comes_right
def a_generator_of_the_data_set_in_a_resumed_run(right: bool) -> Any:
    engine = build(linear(5, 1))
    if right:
        engine.run(DataLoader(Noisy(True), 2), max_epochs=3)
    else:
        first = build(linear(5, 1))
        first.run(DataLoader(Noisy(True), 2), max_iters=6)
        engine.load_state_dict(first.state_dict())
        engine.run(DataLoader(Noisy(True), 2), max_epochs=3)
    return engine.modules["model"].weight.tolist()  # type: ignore[operator]


class Shuffled:
    """Shuffles by a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        data = batches()
        yield from self.rng.sample(data, 6)

    def batches_from(self, start: int) -> Iterator[Any]:
        return itertools.islice(iter(self), start, None)


@comes_right
def an_iterable_that_shuffles_by_its_own_generator_in_a_resumed_run(right: bool) -> Any:
    engine, first = build(linear(5, 1)), build(linear(5, 1))
    if not right:
        first.run(Shuffled(), max_iters=8)
        engine.load_state_dict(first.state_dict())
    engine.run(Shuffled(), max_epochs=3)
    return engine.modules["model"].weight.tolist()  # type: ignore[operator]


@comes_right
def numpy_augmentation_in_workers_draws_other_numbers_in_each(right: bool) -> Any:
    engine, seen = build(linear(5, 1)), set()
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.update(engine.state.batch[0][:, 0].tolist()))
    workers: dict[str, Any] = {} if right else {"num_workers": 2, "multiprocessing_context": "fork"}
    engine.run(DataLoader(Noisy(False), 2, **workers), max_epochs=1)
    return sorted(seen)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(5), torch.ones(1))] * 4)


class Divided(Stream):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        yield from [(torch.ones(5), torch.ones(1))] * (4 // (1 if worker is None else worker.num_workers))


@mistake("W26")
def an_iterable_data_set_that_each_worker_reads_in_full(right: bool) -> None:
    loader = DataLoader(Divided() if right else Stream(), 2, num_workers=2, multiprocessing_context="fork")
    build(linear(5, 1)).run(loader, max_epochs=1)


# ---- what is given as data ----


@mistake("W23")
def a_data_set_in_place_of_a_loader(right: bool) -> None:
    build(linear(5, 1)).run(DataLoader(pairs(), 4) if right else pairs(), max_epochs=1)  # type: ignore[arg-type]


@mistake("W23")
def inputs_and_targets_in_place_of_batches(right: bool) -> None:
    def loss(engine: Engine, batch: Any) -> Tensor:
        return engine.model(batch[0] if right else batch[:, :5]).sum()  # type: ignore[no-any-return]

    whole = torch.ones(4, 5), torch.ones(4, 5)
    Engine(Update.from_function(loss, SGD), model=linear(5, 1)).run([whole] if right else whole, max_epochs=1)


@mistake(TypeError, r"yields its keys instead of batches.*data\['train'\]")
def a_dictionary_of_loaders(right: bool) -> None:
    data: dict[str, Any] = {"train": batches(), "test": batches(2)}
    build(linear(5, 1)).run(data["train"] if right else data, max_epochs=1)


@mistake(TypeError, "the data is the string 'train.csv'")
def the_name_of_a_file(right: bool) -> None:
    build(linear(5, 1)).run(batches() if right else "train.csv", max_epochs=1)


@mistake(ValueError, "cycle.* never ends")
def a_cycle_without_bounds(right: bool) -> None:
    build(linear(5, 1)).run(batches() if right else itertools.cycle(batches()), max_epochs=2)


@mistake(DataError, "empty|cannot be iterated again")
def one_generator_for_several_epochs(right: bool) -> None:
    build(linear(5, 1)).run(batches() if right else (batch for batch in batches()), max_epochs=2)


@mistake(DataError, "cannot be iterated again|ended after 6")
def an_epoch_longer_than_a_generator(right: bool) -> None:
    build(linear(5, 1)).run((batch for batch in batches(9 if right else 6)), max_epochs=1, epoch_length=9)


@mistake(DataError, "is empty")
def a_loader_that_drops_everything(right: bool) -> None:
    build(linear(5, 1)).run(DataLoader(pairs(), 4 if right else 16, drop_last=True), max_epochs=1)


@mistake(TypeError, "cannot be iterated")
def a_function_that_makes_a_loader(right: bool) -> None:
    build(linear(5, 1)).run(batches() if right else batches, max_epochs=1)  # type: ignore[arg-type]


# ---- batches ----


class Boxed:
    def __init__(self, pair: Any) -> None:
        self.inputs, self.targets = pair


class Movable(Boxed):
    def to(self, device: Any) -> None:
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)


@mistake("W22")
def a_batch_class_that_cannot_be_moved(right: bool) -> None:
    seen: list[Any] = []
    engine = Engine(Update.prediction(lambda engine, batch: seen.append(batch)))
    engine.attach(DeviceTransfer("meta"))
    engine.run([(Movable if right else Boxed)(pair) for pair in batches()])


@comes_right
def a_batch_that_moves_itself_in_place(right: bool) -> int:
    def loss(engine: Engine, batch: Boxed) -> Tensor:
        return mse_loss(engine.model(batch.inputs), batch.targets)

    engine = Engine(Update.from_function(loss, SGD), model=linear(5, 1))
    engine.attach(*([] if right else [DeviceTransfer("cpu")]))
    engine.run([Movable(pair) for pair in batches()], max_epochs=1)
    return engine.updates[0].steps


@mistake("W27")
def batch_normalisation_over_single_samples(right: bool) -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, 5, 1)), nn.BatchNorm2d(1), nn.Flatten(), linear(5, 1))
    build(model).run(DataLoader(pairs(), 4 if right else 1), max_epochs=1)


@mistake("W28")
def noise_added_to_the_data_itself(right: bool) -> None:
    def loss(engine: Engine, batch: Any) -> Tensor:
        inputs = batch[0].clone() if right else batch[0]
        inputs += 0.1
        return mse_loss(engine.model(inputs), batch[1])

    Engine(Update.from_function(loss, SGD), model=mlp(5, 4, 1)).run(batches(), max_epochs=2)


class Refusing:
    """As a loader that Accelerate has prepared: there is a state_dict, but not for this loader."""

    def __init__(self, right: bool) -> None:
        self.right = right

    def __iter__(self) -> Iterator[Any]:
        return iter(batches())

    def state_dict(self) -> dict[str, int]:
        if self.right:
            return {}
        raise AttributeError("state_dict")

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@mistake(RereadingWarning, "cannot save its position, because its state_dict.. raised AttributeError")
def a_loader_whose_state_cannot_be_saved(right: bool) -> None:
    engine = build(linear(5, 1))
    engine.run(Refusing(right), max_iters=2)
    engine.state_dict()


@silent("labels in another order than the inputs are as good as any others")
def targets_shuffled_apart_from_the_inputs(right: bool) -> None:
    inputs, targets = batches(1)[0]
    order = partial(torch.arange, 4) if right else partial(torch.randperm, 4)
    build(linear(5, 1)).run([(inputs, targets[order()])], max_epochs=1)


class Sized:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(5))


@mistake("W21")
def a_length_that_is_too_small(right: bool) -> None:
    build(mlp(5, 8, 1)).run(Sized(5 if right else 4), max_epochs=2)


def on_own_data(right: bool) -> list[Finding]:
    """Trains in each of two processes on its own part of the data, as its rank says."""
    distributed = DistributedDataParallel()
    engine = build(linear(5, 1), distributed)
    engine.run(batches(4, seed=11 if right else distributed.processes.rank), max_epochs=1)
    return list(engine.findings.of_run())


def _in_three_processes(right: bool) -> list[Finding]:
    engine = build(linear(5, 1), ElasticDataParallel(shards=4))
    engine.run(batches(8, seed=11), max_epochs=1)
    return list(engine.findings.of_run())


@mistake("C41")
def more_processes_than_can_share_the_shards(right: bool) -> Findings:
    return Findings(run_together(_in_three_processes, 2 if right else 3, right)[0])


def _counting(right: bool) -> list[Finding]:
    engine = build(linear(5, 1), ElasticDataParallel(shards=2))
    losses: list[float] = []
    event = Events.ITERATION_COMPLETED if right else Events.LOSS_COMPUTED
    engine.connect(event, lambda engine: losses.append(float(engine.loss)))
    engine.run(batches(8, seed=11), max_epochs=1)
    return list(engine.findings.of_run())


@mistake("C42")
def a_function_that_counts_the_shards_of_its_process(right: bool) -> Findings:
    return Findings(run_together(_counting, 2, right)[0])


@mistake("W25")
def ranks_that_bring_their_own_part_of_the_data(right: bool) -> Findings:
    return Findings(run_together(on_own_data, 2, right)[0])
