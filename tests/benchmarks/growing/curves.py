"""What is measured: each curve is a cost over a size, with a line for each way of doing the same."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import checkpoint
import torch
from loop import Idle, Rare, nothing, tiny_batch, tiny_model
from resume import BATCH, seconds_to_the_first_batch, state_in_the_middle
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from signalfire import Engine, EventEnum, Events, Handler, Phase, Update, on
from signalfire.handlers import (
    EMA,
    Average,
    EarlyStopping,
    GradientClipping,
    GradientNorms,
    History,
    LRScheduling,
    Metrics,
)

__all__ = ["CURVES", "Curve", "Lines"]

Measure = Callable[[], float]
"""Gives the cost once, in seconds."""

Lines = dict[str, Measure]

ITERATIONS, STRETCHES, STEPS, ELEMENTS, DECAY, BOUNDARIES = 100, 7, 5, 1_000, 0.999, 15

IN_AN_ITERATION = (
    Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.UPDATE_STARTED,
    Events.FORWARD_STARTED, Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED, Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED, Events.OPTIMIZER_STEP_COMPLETED,
    Events.UPDATE_COMPLETED, Events.ITERATION_COMPLETED,
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """How a cost grows with a size.

    Attributes:
        title: which cost.
        size: what the sizes count.
        unit: of the cost: "ns", "us" or "ms".
        sizes: at which it is measured, from the smallest.
        lines: called with a size; gives what measures the cost, by line. Names of plain loops begin with
            "plain PyTorch".
        per: the table shows what so many more of the size cost.
        log: which axes are logarithmic: "xy", "x" or "".
    """

    title: str
    size: str
    unit: str
    sizes: tuple[float, ...]
    lines: Callable[[Any], Lines]
    per: int = 1
    log: str = "xy"


# ---- what is attached, and what it listens to ---------------------------------------------------------------------


class Clocked:
    """Sized data that costs next to nothing, and takes the time of some stretches of batches: no more of a run is measured."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __len__(self) -> int:
        return ITERATIONS * STRETCHES + 1

    def __iter__(self) -> Iterator[int]:
        self.times.append(time.perf_counter())
        for _ in range(STRETCHES):
            yield from range(ITERATIONS)
            self.times.append(time.perf_counter())
        yield ITERATIONS


def between(times: list[float]) -> float:
    """The median, since of what else the machine does some stretches are hit and most are not."""
    return statistics.median(after - before for before, after in pairwise(times))


def an_iteration(engine: Engine) -> Measure:
    def measure() -> float:
        data = Clocked()
        engine.run(data, max_iters=engine.state.iteration + len(data) if engine.training else None)
        return between(data.times) / ITERATIONS

    return measure


def of_handlers(number: int) -> Lines:
    def empty(kind: type[Handler]) -> Measure:
        engine = Engine(Update.from_function(nothing))
        engine.attach(*(kind(name=f"handler{i}") for i in range(number)))
        return an_iteration(engine)

    return {"called in every iteration": empty(Idle), "every=10**6 on three events: not called": empty(Rare)}


class Listener(Handler):
    """A handler that is called at one event and does nothing."""

    def __init__(self, event: EventEnum, *, name: str) -> None:
        super().__init__(name=name)
        self.event = event

    @on("event")
    def act(self, engine: Engine) -> None:
        pass


class Still:
    """A loss without anything to compute."""

    def backward(self) -> None:
        pass

    def detach(self) -> Still:
        return self


def still_optimizer(parameters: Any) -> Optimizer:
    optimizer = SGD(parameters)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    return optimizer


def of_events(number: int) -> Lines:
    """A training step whose every act is empty, so that it goes through all events and nothing hides what they cost."""

    def step(events: list[EventEnum]) -> Measure:
        loss: Any = Still()
        update = Update(lambda engine, batch: batch, lambda engine, output, batch: loss, still_optimizer)
        engine = Engine(update, model=nn.Linear(1, 1))
        engine.attach(*(Listener(event, name=f"listener{i}") for i, event in enumerate(events)))
        return an_iteration(engine)

    return {
        "a receiver on each of so many events": step(list(IN_AN_ITERATION[:number])),
        "so many receivers on one event": step([Events.ITERATION_COMPLETED] * number),
    }


# ---- parameters ---------------------------------------------------------------------------------------------------


def parameters(tensors: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(ELEMENTS)) for _ in range(tensors)]


def loss_of(values: list[Tensor]) -> Tensor:
    return torch.cat(values).square().mean()


def training(values: list[Tensor], optimizer: Any) -> Engine:
    return Engine(
        Update.from_function(lambda engine, batch: loss_of(values), optimizer), model=nn.ParameterList(values)
    )


def at(event: EventEnum, tensors: int, handler: Handler) -> Measure:
    """What happens at an event of a real step, without the step."""
    engine = training(parameters(tensors), partial(SGD, lr=1e-3))
    engine.attach(handler)
    times: list[float] = []
    for phase, rank in ((Phase.PREPARE, -1000), (Phase.PERSIST, 1000)):
        engine.connect(event, lambda engine: times.append(time.perf_counter()), phase=phase, rank=rank)

    def measure() -> float:
        times.clear()
        engine.run(max_iters=engine.state.iteration + STEPS)
        return statistics.median(after - before for before, after in zip(times[::2], times[1::2], strict=True))

    return measure


def plain_loop(values: list[Tensor], act: Callable[[], object], *, after_step: bool = False) -> Measure:
    """The same in a plain PyTorch loop."""
    optimizer = SGD(values, lr=1e-3)

    def step() -> float:
        loss_of(values).backward()
        if after_step:
            optimizer.step()
        began = time.perf_counter()
        act()
        seconds = time.perf_counter() - began
        if not after_step:
            optimizer.step()
        optimizer.zero_grad()
        return seconds

    return lambda: statistics.median(step() for _ in range(STEPS))


def of_norms(tensors: int) -> Lines:
    values = parameters(tensors)
    return {
        "GradientNorms": at(Events.GRADIENTS_READY, tensors, GradientNorms()),
        "plain PyTorch: get_total_norm": plain_loop(
            values, lambda: nn.utils.get_total_norm([value.grad for value in values if value.grad is not None])
        ),
    }


def of_clipping(tensors: int) -> Lines:
    values = parameters(tensors)
    return {
        "GradientClipping": at(Events.GRADIENTS_READY, tensors, GradientClipping(max_norm=1e-3)),
        "plain PyTorch: clip_grad_norm_": plain_loop(values, lambda: nn.utils.clip_grad_norm_(values, 1e-3)),
    }


def of_ema(tensors: int) -> Lines:
    values = parameters(tensors)
    averages = [value.detach().clone() for value in values]

    @torch.no_grad()
    def average() -> None:
        torch._foreach_lerp_(averages, values, 1 - DECAY)

    return {
        "EMA": at(Events.OPTIMIZER_STEP_COMPLETED, tensors, EMA(DECAY)),
        "plain PyTorch: _foreach_lerp_": plain_loop(values, average, after_step=True),
    }


def of_fused_step(tensors: int) -> Lines:
    values = parameters(tensors)
    optimizer = Adam(values, lr=1e-3, fused=True)
    engine = training(parameters(tensors), partial(Adam, lr=1e-3, fused=True))
    times: list[float] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: times.append(time.perf_counter()))

    def loop() -> None:
        for _ in range(STEPS + 1):
            loss_of(values).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())

    def a_step(run: Callable[[], object]) -> float:
        times.clear()
        run()
        return between(times)

    return {
        "Signalfire": lambda: a_step(lambda: engine.run(max_iters=engine.state.iteration + STEPS + 1)),
        "plain PyTorch": lambda: a_step(loop),
    }


# ---- data, checkpoints, epochs ------------------------------------------------------------------------------------


def loader_of(samples: int) -> DataLoader[Any]:
    """Of a dataset whose samples cost nothing, and are known to draw no random number that would have to be seeded."""
    dataset: Any = [(torch.ones(4), torch.ones(1))] * samples
    return DataLoader(dataset, BATCH, shuffle=True)


def of_resume(samples: int) -> Lines:
    taken = samples // BATCH // 2
    loader = loader_of(samples)

    def data() -> DataLoader[Any]:
        return loader

    state = state_in_the_middle(data, taken)

    def read_again() -> float:
        began = time.perf_counter()
        batches = iter(loader)
        for _ in range(taken + 1):
            next(batches)
        return time.perf_counter() - began

    return {
        "in the middle of an epoch": lambda: seconds_to_the_first_batch(data, state),
        "at the start of an epoch": lambda: seconds_to_the_first_batch(data, None),
        "plain PyTorch: next(), once for each batch": read_again,
    }


def of_shuffling(samples: int) -> Lines:
    loader = loader_of(samples)
    engine = Engine(Update.from_function(nothing))
    times: list[float] = []

    def note(engine: Engine) -> None:
        times.append(time.perf_counter())

    engine.connect(Events.EPOCH_STARTED, note, phase=Phase.PERSIST)
    engine.connect(Events.GET_BATCH_COMPLETED, note, phase=Phase.PREPARE)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch("one batch is enough"))

    def measure() -> float:
        times.clear()
        engine.run(loader, max_epochs=2)
        return times[3] - times[2]  # of the second epoch, so that nothing is there that only a run begins with

    def plain() -> float:
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        return time.perf_counter() - began

    return {"from EPOCH_STARTED to the first batch": measure, "plain PyTorch: iter() and next()": plain}


def of_checkpoints(megabytes: float) -> Lines:
    """Ten tensors of together so many megabytes; what was written before is synced each time."""
    model = nn.ParameterList(torch.randn(round(megabytes * 25_000)) for _ in range(10))
    folder = Path(mkdtemp())

    def blocked(variant: checkpoint.Variant) -> Measure:
        def measure() -> float:
            os.sync()
            return variant()[0]

        return measure

    return {
        "Checkpoint": blocked(checkpoint.Run(model, folder / "synchronous", asynchronous=False).save),
        "Checkpoint(asynchronous=True)": blocked(checkpoint.Run(model, folder / "thread", asynchronous=True).save),
        "plain PyTorch: torch.save": blocked(checkpoint.plain(model, folder / "plain.pt", sync=False)),
        "plain PyTorch: torch.save and fsync": blocked(checkpoint.plain(model, folder / "synced.pt", sync=True)),
    }


def of_boundaries(epochs: int) -> Lines:
    """What is done between an epoch's last ITERATION_COMPLETED and the next one's first GET_BATCH_STARTED."""
    batch = tiny_batch()

    def boundary(*handlers: Handler) -> Measure:
        engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=1e-3)), model=tiny_model())
        engine.attach(*handlers)
        ends: list[float] = []
        begins: list[float] = []
        engine.connect(
            Events.ITERATION_COMPLETED, lambda engine: ends.append(time.perf_counter()), phase=Phase.PERSIST, rank=1000
        )
        engine.connect(
            Events.GET_BATCH_STARTED, lambda engine: begins.append(time.perf_counter()), phase=Phase.PREPARE, rank=-1000
        )

        def measure() -> float:
            ends.clear()
            begins.clear()
            engine.reset()
            engine.run([batch], max_epochs=epochs + BOUNDARIES)
            last = zip(ends[epochs - 1 : -1], begins[epochs:], strict=True)
            return statistics.median(begin - end for end, begin in last)

        return measure

    usual = (
        GradientClipping(max_norm=1.0),
        LRScheduling(partial(StepLR, step_size=10), every="1ep"),
        Metrics(loss=Average()),
        EarlyStopping("loss", patience=10**6),
        History(),
    )
    return {
        "no handlers": boundary(),
        "clipping, schedule, metrics, stopping, history": boundary(*usual),
    }


TENSORS = (1, 3, 10, 30, 100, 300, 1_000)
SAMPLES = (1_000, 10_000, 100_000, 1_000_000)

CURVES = {
    "handlers": Curve(
        "An iteration with an empty step", "handlers attached", "ns", (0, 1, 2, 5, 10, 20, 30, 40, 50), of_handlers,
        log="",
    ),
    "events": Curve(
        "A training iteration whose acts are empty", "events listened to, of an iteration's 14", "ns",
        (0, 1, 2, 4, 6, 8, 10, 12, 14), of_events, log="",
    ),
    "norms": Curve("Gradient norm, a step", "parameter tensors", "us", TENSORS, of_norms),
    "clipping": Curve("Clipping by norm, a step", "parameter tensors", "us", TENSORS, of_clipping),
    "ema": Curve("Moving average of the weights, a step", "parameter tensors", "us", TENSORS, of_ema),
    "fused": Curve(
        "A whole step with Adam(fused=True)", "parameter tensors", "us", TENSORS, of_fused_step
    ),
    "resume": Curve("From run() to the first batch", "samples, shuffled", "ms", SAMPLES, of_resume, per=1_000_000),
    "shuffling": Curve("Beginning an epoch", "samples, shuffled", "ms", SAMPLES, of_shuffling, per=1_000_000),
    "checkpoint": Curve(
        "Training blocked by a checkpoint", "megabytes of weights", "ms", (0.01, 0.1, 1, 10, 100), of_checkpoints
    ),
    "boundary": Curve(
        "An epoch boundary", "epochs made before", "us", (1, 10, 100, 1_000), of_boundaries,
        log="x",
    ),
}  # fmt: skip
