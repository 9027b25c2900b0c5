"""What handlers declare about CUDA graphs, against the operations that their steps make.

A graph replays the same operations with the same shapes and Python numbers, and cannot wait for the device. All of this can be
seen on a CPU: each operation of a step is recorded with its arguments, and the steps are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from signalfire import Engine, Events, Handler, Phase, Update
from signalfire.authoring.capture import Capture
from signalfire.handlers import Average, Metrics
from tests.engine.core.test_step import SKIPPABLE
from tests.kit import quick, shipped
from tests.test_invariants import CASES, Case, Classifier, kind

ORDER = list(Capture)
STEP = SKIPPABLE[1:]
"""The events within a step: what a graph would record lies between the forward and the optimizer's step."""
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "lift_fresh"}
"""Operations that read a value of the device, or copy one to it."""
READS = {"tolist", "numpy", "item", "cpu", "__bool__", "__float__", "__int__", "__index__"}
"""Functions that read a value; on the CPU, some of them look into the memory, and make no operation."""

# What is declared more strictly than a step in one process shows, and why.
STRICTER = {
    "Compile": "its eager backend makes the operations of the model",
    "DistributedDataParallel": "one process exchanges nothing",
    "Freezing": "steps of different epochs differ",
    "FullyShardedDataParallel": "one process exchanges nothing",
    "ParameterScheduling": "the parameter has reached its last value",
    "SequenceLengthWarmup": "the lengths have reached their end in the steps that are compared",
    "StragglerDetection": "one process has no stragglers",
    "TensorParallel": "one process exchanges nothing",
}


class Recorder(TorchDispatchMode):
    """The operations that are made, with all but the values of their tensors; and what rules out a graph of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, ...]] = []
        self.obstacles: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name, *_ = str(func).split(".")
        if namespace != "profiler":
            self.operations.append((namespace, name, described(args), described(kwargs)))
        if name in WAITS:
            self.obstacles.add(name)
        if any(isinstance(one, Generator) for one in (*args, *kwargs.values())):
            self.obstacles.add("a generator of its own")
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __init__(self, obstacles: set[str]) -> None:
        super().__init__()
        self.obstacles = obstacles

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.obstacles.add(name)
        return func(*args, **(kwargs or {}))


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(described, value))
    if isinstance(value, dict):
        return tuple((key, described(one)) for key, one in sorted(value.items()))
    return repr(value)


def steps_of(make: Callable[[], Handler] | None) -> list[Recorder]:
    """The steps of the last two of three epochs, from forward to update; in the first, the engine itself looks at them."""
    torch.manual_seed(0)
    update = Update.supervised(
        nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), weight_decay=0.01, fused=True)
    )
    engine = Engine(update, model=Classifier(), seed=0)
    engine.attach(Metrics(train_loss=Average(), name="train_metrics"))
    if make is not None:
        engine.attach(make())
    found: list[Recorder] = []
    recording = ExitStack()  # what an update begins without ending it is closed as the next one begins

    def begin(engine: Engine) -> None:
        recording.close()
        found.append(recording.enter_context(Recorder()))
        recording.enter_context(_Functions(found[-1].obstacles))

    def end(engine: Engine) -> None:
        recording.close()

    engine.connect(Events.UPDATE_STARTED, begin, phase=list(Phase)[-1], rank=10**6)
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, end, phase=next(iter(Phase)), rank=-(10**6))
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, 2, 6, generator=generator), torch.arange(5) % 2) for _ in range(4)]
    with recording, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of short runs, about which this is not
        engine.run(data, max_epochs=3)
    return found[len(data) :]


@cache
def plain_step() -> Recorder:
    return steps_of(None)[-1]


def shown(make: Callable[[], Handler]) -> Capture:
    """What the steps with a handler show it to be."""
    plain, steps = plain_step(), steps_of(make)
    assert steps, "the run is too short"
    if any(step.obstacles for step in steps) or any(step.operations != steps[0].operations for step in steps):
        return Capture.FORBIDDEN
    return Capture.OUTSIDE if steps[0].operations == plain.operations else Capture.INSIDE


def acts_within_a_step(case: Case) -> bool:
    """Whether a handler has receivers at the events of a step."""
    handler, engine = case.make(), case.build()
    with engine.attach(handler):
        connections = [one for event in STEP for one in engine.signal(event).connections]
        return any(one.owner == handler.name for one in connections)


TRIED = [case for case in CASES if kind(case) not in ("Predictions", "UpdateFrequency", "FastDevRun")]


def test_the_steps_of_a_plain_engine_can_be_captured() -> None:
    steps = steps_of(None)
    assert len(steps) == 8
    assert all(step.operations == steps[0].operations and not step.obstacles for step in steps)


@pytest.mark.moderate
def test_every_handler_that_acts_within_a_step_declares_what_it_is_to_a_graph() -> None:
    assert {kind(case) for case in CASES} == {one.__name__ for one in shipped()}
    silent = [case for case, one in CASES.items() if one.make().capture is None and acts_within_a_step(one)]
    assert silent == []


@pytest.mark.moderate
@pytest.mark.parametrize("case", quick(TRIED, "GradientClipping", "GradientNoise", "EMA"))
def test_what_a_handler_declares_is_what_its_steps_show(case: str) -> None:
    declared = CASES[case].make().capture or Capture.OUTSIDE
    found = shown(CASES[case].make)
    if kind(case) in STRICTER:
        assert ORDER.index(found) <= ORDER.index(declared), found
    else:
        assert found is declared
