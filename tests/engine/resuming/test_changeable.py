"""What a forward changes beside the state of its modules: whatever goes back inside the process puts it back."""

from __future__ import annotations

import io
import itertools
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, FindingWarning, Handler, Phase, Update
from signalfire.handlers import EMA, SWA, Checkpoint, EarlyStopping, Lookahead, Rewindable, SpikeGuard
from signalfire.resuming.changeable import copy_of, own_parameters
from signalfire.tuning import find_batch_size, find_learning_rate
from signalfire.weights import export_weights
from tests.kit import digest, quick

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator)
BATCHES = list(zip(X.split(4), Y.split(4), strict=True))


class Meter:
    def __init__(self) -> None:
        self.count = 0


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


class Outer:
    """Holds an object that holds a list of others."""

    def __init__(self) -> None:
        self.inner = Meter()
        self.inner.others = {"one": [Meter()], Unshown(): Meter()}  # type: ignore[attr-defined]


class Unshown:
    """A key that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("nobody asks for it")


def counting() -> Callable[[], int]:
    """A function that counts its calls in a variable that it closes over."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Slotted:
    __slots__ = ("count", "since")

    def __init__(self) -> None:
        self.count = 0


class Changing(nn.Module):
    """Its output depends on how often it was called, by what `KINDS` says."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.change = change
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(1, 4), persistent=False)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0
        self.hidden: Tensor | None = None
        self.recent: deque[float] = deque(maxlen=3)
        self.by_name: dict[str, Any] = {"scales": [1.0]}
        self.pair = torch.ones(1), torch.ones(1)
        self.meter = Meter()
        self.rng = np.random.default_rng(0)
        self.array = np.ones(2)
        self.tally = Counter[str]()
        self.named: dict[str, dict[str, float]] = defaultdict(lambda: {"scale": 1.0})
        self.ordered = OrderedDict(first=1.0, second=2.0)
        self.slotted = Slotted()
        self.meters = [Meter(), Meter()]
        self.outer = Outer()
        self.steps = itertools.count(1)
        self.factors = itertools.cycle([0.9, 0.8, 0.7])
        self.drawn = map(abs, iter([-1.0, -0.9, -0.8, -0.7] * 100))
        self.count = counting()
        self.call = Counted().count

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.change(self)
        return scaled


def in_place(model: Any) -> Any:
    model.scale *= 0.9
    return model.scale


def through_data(model: Any) -> Any:
    model.scale.data.mul_(0.9)
    return model.scale


def another_buffer(model: Any) -> Any:
    model.scale = model.scale.double() * 0.9
    return model.scale.float()


def none_first(model: Any) -> Any:
    model.late = torch.ones(1) if model.late is None else model.late * 0.9
    return model.late


def growing(model: Any) -> Any:
    model.seen = torch.cat([model.seen, torch.ones(1)])
    return 1 / len(model.seen)


def registered_late(model: Any) -> Any:
    if not hasattr(model, "own"):
        model.register_buffer("own", torch.ones(1))
    model.own *= 0.9
    return model.own


def expanded(model: Any) -> Any:
    model.wide = model.wide * 0.9
    return model.wide[:, :1]


def counter(model: Any) -> Any:
    model.calls += 1
    return 0.9**model.calls


def hidden_state(model: Any) -> Any:
    model.hidden = torch.ones(1) if model.hidden is None else model.hidden * 0.9
    return model.hidden


def with_a_graph(model: Any) -> Any:
    model.hidden = model.linear.bias * (1.0 if model.hidden is None else model.hidden.detach())
    return model.hidden + 1


def containers(model: Any) -> Any:
    model.recent.append(0.1 + len(model.recent))
    model.by_name["scales"][0] *= 0.9
    model.by_name["calls"] = model.by_name.get("calls", 0) + 1
    model.pair[1].mul_(0.9)
    model.pair = model.pair[0] * 0.9, model.pair[1]
    return sum(model.recent) * model.by_name["scales"][0] * model.by_name["calls"] * model.pair[0] * model.pair[1]


def object_held(model: Any) -> Any:
    model.meter.count += 1
    return 0.9**model.meter.count


def array(model: Any) -> Any:
    model.array[0] *= 0.9
    return model.array[0]


def counters_of_python(model: Any) -> Any:
    model.tally["calls"] += 1
    model.named["here"]["scale"] *= 0.9
    model.ordered.move_to_end(next(iter(model.ordered)))
    return 0.9 ** model.tally["calls"] * model.named["here"]["scale"] * next(iter(model.ordered.values()))


def slots(model: Any) -> Any:
    model.slotted.count += 1
    model.slotted.since = getattr(model.slotted, "since", 1.0) * 0.9
    return 0.9**model.slotted.count * model.slotted.since


def object_in_a_list(model: Any) -> Any:
    model.meters[1].count += 1
    return 0.9 ** model.meters[1].count


def object_far_inside(model: Any) -> Any:
    innermost = model.outer.inner.others["one"][0]
    innermost.count += 1
    return 0.9**innermost.count


def own_generator(model: Any) -> Any:
    return model.rng.normal()


def iterators(model: Any) -> Any:
    return 0.9 ** next(model.steps) * next(model.factors) * next(model.drawn)


def functions_held(model: Any) -> Any:
    return 0.9 ** model.count() * 0.9 ** model.call()


KINDS = [
    in_place, through_data, another_buffer, none_first, growing, registered_late, expanded, counter, hidden_state,
    with_a_graph, containers, object_held, array, counters_of_python, slots, object_in_a_list, object_far_inside, own_generator,
    iterators, functions_held,
]  # fmt: skip


def build(change: Callable[[Any], Any], *handlers: Handler) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.01)), model=Changing(change), seed=0)
    engine.attach(*handlers)
    return engine


def weights(engine: Engine) -> list[float]:
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()]).tolist()


def plain(change: Callable[[Any], Any]) -> list[float]:
    """The weights after a plain loop over the batches."""
    torch.manual_seed(0)
    model = Changing(change)
    optimizer = SGD(model.parameters(), lr=0.01)
    for x, y in BATCHES:
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def loader(size: int) -> Any:
    return DataLoader(TensorDataset(X, Y), size)


@pytest.mark.parametrize("change", quick(KINDS, growing, counter))
def test_a_search_puts_everything_back_that_a_forward_changes(change: Callable[[Any], Any]) -> None:
    engine = build(change)
    find_learning_rate(engine, BATCHES, steps=4, high=0.1)
    engine.run(BATCHES, max_iters=3)
    find_learning_rate(engine, BATCHES, steps=4, high=0.1)
    engine.run(BATCHES, max_epochs=1)
    assert weights(engine) == plain(change)


@pytest.mark.moderate
@pytest.mark.parametrize("change", [in_place, counter])
def test_trials_of_batch_sizes_put_it_back_as_well(change: Callable[[Any], Any]) -> None:
    engine = build(change)
    find_batch_size(engine, loader, maximum=2)
    engine.run(BATCHES, max_epochs=1)
    assert weights(engine) == plain(change)


def once(act: Callable[[Engine], Any]) -> Callable[[Engine], None]:
    done: list[int] = []

    def receive(engine: Engine) -> None:
        if not done:
            done.append(1)
            act(engine)

    return receive


@pytest.mark.parametrize("change", quick(KINDS, in_place, growing))
def test_a_run_goes_back_to_everything_that_a_forward_changes(change: Callable[[Any], Any]) -> None:
    engine, states = build(change, Rewindable(every="2it")), []
    engine.connect(Events.ITERATION_COMPLETED(once=3), once(lambda engine: states.append(engine.state_dict())))
    engine.connect(Events.ITERATION_COMPLETED(once=5), once(lambda engine: engine.rewind(2)))
    engine.connect(Events.ITERATION_COMPLETED(once=7), once(lambda engine: engine.snapshots.restore(states[0])))
    engine.run(BATCHES, max_epochs=1)
    assert weights(engine) == plain(change)


@pytest.mark.parametrize("change", quick(KINDS, counter))
def test_an_iteration_is_made_again_with_what_the_forward_had(change: Callable[[Any], Any]) -> None:
    engine = build(change, SpikeGuard("stop"))
    engine.run(BATCHES, max_epochs=1)
    assert engine.replay(4).run().verdict == "persistent"
    assert weights(engine) == plain(change)


class Centerd(nn.Module):
    """A loss that has nothing to train, and depends on how often it was called."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.center = self.center * 0.9 + 0.1 * output.detach().mean()
        return mse_loss(output - self.center, target) * 0.9**self.calls


class Called:
    """As a class that is no module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return mse_loss(output, target) * 0.9**self.calls


def closed_over() -> Callable[[Tensor, Tensor], Tensor]:
    calls, seen = 0, {"scale": 1.0}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        seen["scale"] *= 0.9
        return mse_loss(output, target) * 0.9**calls * seen["scale"]

    return loss


def closed_over_iterators() -> Callable[[Tensor, Tensor], Tensor]:
    steps, factors = itertools.count(), enumerate([0.9, 0.8] * 100)
    return lambda output, target: mse_loss(output, target) * 0.9 ** next(steps) * next(factors)[1]


@pytest.mark.parametrize("kind", [Centerd, Called, closed_over, closed_over_iterators])
def test_a_loss_is_put_back_as_well_and_reported_in_a_file(kind: Any) -> None:
    ends = []
    for goes_back in (False, True):
        torch.manual_seed(0)
        engine = Engine(Update.supervised(kind(), partial(SGD, lr=0.1)), model=nn.Linear(4, 1), seed=0)
        engine.attach(Rewindable(every="2it"))
        if goes_back:
            find_learning_rate(engine, BATCHES, steps=4, high=0.1)
            engine.connect(Events.ITERATION_COMPLETED(once=5), once(lambda engine: engine.rewind(2)))
        engine.run(BATCHES, max_epochs=1)
        ends.append(weights(engine))
    assert ends[0] == ends[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)  # of a buffer it warns, of an attribute it informs
        torch.save(engine.state_dict(), io.BytesIO())
    (found,) = engine.findings.of_run().of("W47")
    assert "main_loss." in found.sentence


def test_a_generator_that_cannot_go_back_is_reported() -> None:
    class Drawing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.factors = (0.9**step for step in range(1000))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(self.factors)

    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=Drawing(), seed=0)
    engine.attach(Rewindable(every="2it"))
    engine.connect(Events.ITERATION_COMPLETED(once=5), once(lambda engine: engine.rewind(2)))
    with pytest.warns(UserWarning, match=r"the generator 'test_a_generator.*genexpr>' .* cannot go back") as caught:
        engine.run(BATCHES, max_epochs=1)
    assert len([one for one in caught if "cannot go back" in str(one.message)]) == 1
    torch.save(engine.state_dict(), io.BytesIO())
    (found,) = engine.findings.of_run().of("W47")
    assert "the attributes model.factors change" in found.sentence


def test_in_a_file_there_is_nothing_of_it() -> None:
    engine = build(counter)
    engine.run(BATCHES, max_epochs=1)
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert not state["unsaved"]
    other = build(counter)
    other.load_state_dict(state)
    other.run(BATCHES, max_epochs=2)
    assert other.model.calls == len(BATCHES)  # and not twice as many


# ---- trained tensors in no module -------------------------------------------------------------------------------------


def with_temperature(*handlers: Handler, built: bool = False) -> tuple[Engine, Tensor]:
    torch.manual_seed(0)
    model, temperature = nn.Linear(4, 1), torch.ones(1, requires_grad=True)

    def loss(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        return mse_loss(engine.model(batch[0]) / temperature, batch[1])

    def parameters(engine: Engine) -> list[Tensor]:
        return [*engine.model.parameters(), temperature]

    optimizer: Any = SGD([*model.parameters(), temperature], lr=0.1) if built else partial(SGD, lr=0.1)
    update = Update.from_function(loss, optimizer=optimizer, parameters=None if built else parameters)
    engine = Engine(update, model=model, seed=0)
    engine.attach(*handlers)
    return engine, temperature


@pytest.mark.moderate
@pytest.mark.parametrize("built", [False, True], ids=["factory", "built"])
def test_a_search_puts_trained_tensors_in_no_module_back(built: bool) -> None:
    engine, temperature = with_temperature(built=built)
    find_learning_rate(engine, BATCHES, steps=8, low=1e-3, high=1.0)
    find_batch_size(engine, loader, maximum=2)
    assert (temperature.tolist(), temperature.grad) == ([1.0], None)
    engine.run(BATCHES, max_epochs=1)
    other, other_temperature = with_temperature(built=built)
    other.run(BATCHES, max_epochs=1)
    assert temperature.tolist() == other_temperature.tolist() != [1.0]
    assert weights(engine) == weights(other)


def test_trained_tensors_in_no_module_have_names() -> None:
    engine, temperature = with_temperature(built=True)
    assert {name: one is temperature for name, one in own_parameters(engine).items()} == {
        "parameter 0 of update 'main'": True
    }


def plain_temperature() -> list[float]:
    """The temperature after each step of a plain loop of three epochs."""
    torch.manual_seed(0)
    model, temperature = nn.Linear(4, 1), torch.ones(1, requires_grad=True)
    optimizer = SGD([*model.parameters(), temperature], lr=0.1)
    seen = []
    for x, y in BATCHES * 3:
        mse_loss(model(x) / temperature, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(temperature.item())
    return seen


def test_the_best_temperature_comes_back_with_the_best_weights() -> None:
    engine, temperature = with_temperature(EarlyStopping("score", mode="max", patience=9, restore_best=True))
    engine.connect(
        Events.EPOCH_COMPLETED,
        lambda engine: engine.log("score", [1.0, 3.0, 2.0][engine.state.epoch - 1]),
        phase=Phase.PREPARE,
    )
    engine.run(BATCHES, max_epochs=3)
    assert temperature.item() == plain_temperature()[15]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (partial(EMA, 0.5), lambda seen: _ema(seen, 0.5)),
        (partial(SWA, start=2), lambda seen: torch.tensor([seen[15], seen[23]]).mean().item()),
        (partial(Lookahead, 24, 0.25, evaluate=True), None),
    ],
    ids=["EMA", "SWA", "Lookahead"],
)
def test_averages_include_the_temperature(make: Any, expected: Any) -> None:
    averaging = make()
    engine, temperature = with_temperature(averaging)
    engine.run(BATCHES, max_epochs=3)
    seen = plain_temperature()
    now = seen[-1] if expected is not None else 1 + 0.25 * (seen[-1] - 1)
    average = expected(seen) if expected is not None else now
    assert temperature.item() == pytest.approx(now, abs=1e-6)
    with averaging.in_place():
        assert temperature.item() == pytest.approx(average, abs=1e-6)
    assert temperature.item() == pytest.approx(now, abs=1e-6)
    engine.load_weights(engine.weights())
    assert temperature.item() == pytest.approx(average, abs=1e-6)


def _ema(values: list[float], decay: float) -> float:
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    return average


def test_an_average_of_the_temperature_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    ends = []
    for resume in (False, True):
        engine, temperature = with_temperature(EMA(0.5), Checkpoint(tmp_path / str(resume), sync_files=False))
        engine.run(BATCHES, max_iters=12 if resume else 24)
        if resume:
            engine, temperature = with_temperature(EMA(0.5), Checkpoint(tmp_path / "True", sync_files=False))
            engine.load_state_dict(Checkpoint.load(tmp_path / "True"))
            assert list(engine.weights()) == ["model"]  # the optimizer is not built yet
            engine.run(BATCHES, max_iters=24)
        ends.append(digest([temperature.detach(), engine.weights()["own_parameters"], engine.find(EMA).state_dict()]))
    assert ends[0] == ends[1]


def test_weights_without_a_place_for_the_temperature_say_so() -> None:
    engine, _ = with_temperature(built=True)
    weights = engine.weights()
    other, _ = with_temperature()
    with pytest.warns(UserWarning, match="not loaded: parameter 0 of update 'main'. They"):
        other.load_weights(weights)
    evaluator = Engine(Update.prediction(), model=nn.Linear(4, 1))
    evaluator.load_weights(weights)  # has no use for it
    weights["own_parameters"]["parameter 0 of update 'main'"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"has shape \[2\] in the weights, but shape \[1\] in this"):
        engine.load_weights(weights)


def test_an_exported_file_of_the_model_lacks_the_temperature_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    engine, _ = with_temperature(built=True)
    with pytest.warns(FindingWarning, match="W39: .* belong to no module of the engine: parameter 0 of update 'main'"):
        export_weights(engine, tmp_path / "model.safetensors")


def test_slow_weights_of_two_updates_keep_their_own_temperatures() -> None:
    temperatures = [torch.full((1,), value, requires_grad=True) for value in (1.0, 2.0)]

    def update(place: int) -> Update:
        return Update.from_function(
            lambda engine, batch: temperatures[place].square().sum(),
            optimizer=SGD([temperatures[place]], lr=0.1),
            name=f"update{place}",
        )

    lookahead = Lookahead(3)
    engine = Engine([update(0), update(1)], seed=0)
    engine.attach(lookahead)
    engine.run([0] * 4, max_epochs=1)
    slow = 1 + 0.5 * (0.8**3 - 1)
    assert [one.item() for one in temperatures] == pytest.approx([0.8 * slow, 1.6 * slow])
    with lookahead.in_place():
        assert [one.item() for one in temperatures] == pytest.approx([slow, 2 * slow])


# ---- buffers of another shape -----------------------------------------------------------------------------------------

SHAPES: list[Callable[[Any], Any]] = [growing, none_first, another_buffer]


@pytest.mark.parametrize("change", quick(SHAPES, growing))
@pytest.mark.parametrize(
    "make", [partial(EMA, 0.5), partial(EMA, 0.5, every=3, buffers="average"), partial(SWA, start=1)]
)
def test_averages_follow_buffers_that_change_their_shape_or_type(change: Callable[[Any], Any], make: Any) -> None:
    averaging = make()
    engine = build(change, averaging)
    engine.run(BATCHES, max_epochs=1)
    assert weights(engine) == plain(change)
    live = dict(engine.model.named_buffers())
    last = len(BATCHES) if averaging.name == "swa" or averaging.every.value == 1 else 6
    with averaging.in_place():
        averaged = dict(engine.model.named_buffers())
        assert {name: one.dtype for name, one in averaged.items()} == {name: one.dtype for name, one in live.items()}
        assert len(engine.model.seen) == (1 + last if change is growing else 1)
    assert all(one is live[name] for name, one in engine.model.named_buffers())
    again = build(change, make(), Rewindable(every="2it"))
    again.connect(Events.ITERATION_COMPLETED(once=7), once(lambda engine: engine.rewind(4)))
    again.run(BATCHES, max_epochs=1)
    assert digest(again.handlers[averaging.name].state_dict()) == digest(averaging.state_dict())


@pytest.mark.parametrize("change", quick(SHAPES, growing))
def test_the_best_weights_come_back_with_the_buffers_of_then(change: Callable[[Any], Any]) -> None:
    engine = build(change, EarlyStopping("score", mode="max", patience=9, restore_best=True))
    states: list[str] = []

    def changed() -> str:
        return digest([dict(engine.model.named_buffers()), engine.model.state_dict()])

    def measure(engine: Engine) -> None:
        engine.log("score", [1.0, 3.0, 2.0][engine.state.epoch - 1])
        states.append(changed())

    engine.connect(Events.EPOCH_COMPLETED, measure, phase=Phase.PREPARE)
    engine.run(BATCHES, max_epochs=3)
    assert changed() == states[1]


def test_a_large_constant_is_copied_once_and_again_once_it_has_changed() -> None:
    table = torch.zeros(2**19)
    first = copy_of(table)
    assert copy_of(table) is first
    table.data.add_(1)  # without a new version
    second = copy_of(table)
    assert second is not first
    assert torch.equal(first, torch.zeros_like(table))
    assert torch.equal(second, table)
