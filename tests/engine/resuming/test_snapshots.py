"""A state that is put back in place, inside the process: the run continues bit for bit as it did from where it was taken."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import DataError, Engine, Events, FindingWarning, Handler, Phase, Update, on
from signalfire.handlers import (
    EMA,
    Average,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    MixedPrecision,
    SharpnessAwareMinimization,
    TruncatedBPTT,
)
from tests.kit import batches, build, linear

EPOCHS, BATCHES = 3, 5


def make_samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(BATCHES * 4, 3, generator=generator), torch.arange(BATCHES * 4) % 2)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


def make_engine(*handlers: Any, optimizer: Any = None) -> Engine:
    update = Update.supervised(cross_entropy, optimizer or partial(Adam, lr=1e-2))
    engine = Engine(update, model=make_model(), seed=0)
    engine.attach(*handlers)
    return engine


class Sequences:
    """Batches of sequences, whose hidden state is carried from one time chunk to the next."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(4)
        for _ in range(BATCHES):
            yield torch.randn(2, 6, 3, generator=generator), torch.randn(2, 6, 4, generator=generator)


def make_recurrent_engine() -> Engine:
    def forward(engine: Engine, batch: Any) -> Tensor:
        output, engine.state.update.hidden = engine.model(batch[0], engine.state.update.hidden)
        return output  # type: ignore[no-any-return]

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])

    torch.manual_seed(1)
    update = Update(forward, loss, partial(Adam, lr=1e-2))
    engine = Engine(update, model=nn.GRU(3, 4, batch_first=True), seed=0)
    engine.attach(TruncatedBPTT(2), GradientAccumulation(2))
    return engine


def loader(workers: int = 0, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(make_samples(), batch_size=4, shuffle=shuffle, num_workers=workers)


def drawing_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Unsized data that draws from all global generators as it is read."""
    for _ in range(BATCHES):
        noise = torch.randn(4, 3) + random.random() + float(np.random.rand())
        yield noise, torch.arange(4) % 2


class Drawing:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return drawing_batches()


CASES: dict[str, tuple[Callable[[], Engine], Callable[[], Any]]] = {
    "plain": (make_engine, loader),
    "accumulation": (lambda: make_engine(GradientAccumulation(3)), loader),
    "averages, clipping, schedule": (
        lambda: make_engine(
            EMA(0.9), GradientClipping(max_norm=0.1), LRScheduling(partial(OneCycleLR, max_lr=0.1)), GradientAccumulation(2)
        ),
        loader,
    ),
    "time chunks": (make_recurrent_engine, Sequences),
    "LBFGS": (lambda: make_engine(GradientAccumulation(2), optimizer=partial(LBFGS, max_iter=3)), loader),
    "SAM": (lambda: make_engine(SharpnessAwareMinimization(), GradientAccumulation(2)), loader),
    "scaling for float16": (
        lambda: make_engine(MixedPrecision("fp16"), GradientAccumulation(2), optimizer=partial(SGD, lr=0.1)), loader,
    ),
    "a loader with workers": (lambda: make_engine(GradientAccumulation(2)), partial(loader, 2)),
    "data that draws": (make_engine, Drawing),
    "separate streams": (lambda: separate(make_engine()), loader),
    "history": (lambda: make_engine(History()), loader),
}  # fmt: skip


def separate(engine: Engine) -> Engine:
    engine.streams = "separate"
    return engine


def digest(value: Any) -> Any:
    """A state in values that compare by equality, bit for bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: digest(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [digest(item) for item in value]
    return value


def recorded(engine: Engine) -> list[tuple[int, int, list[Any]]]:
    """What every completed iteration comes to: epoch, iteration, weights."""
    seen: list[tuple[int, int, list[Any]]] = []

    def record(engine: Engine) -> None:
        seen.append((engine.state.epoch, engine.state.iteration, digest(list(engine.modules["model"].parameters()))))

    engine.connect(Events.ITERATION_COMPLETED, record, phase=Phase.RECORD)
    return seen


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("taken_at", [2, 5, 7])
def test_a_run_that_goes_back_repeats_itself_bit_for_bit(case: str, taken_at: int) -> None:
    make, data = CASES[case]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = make()
    straight = recorded(expected)
    expected.run(data(), max_epochs=EPOCHS)

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    engine = make()
    seen = recorded(engine)
    taken: list[dict[str, Any]] = []
    loads: list[int] = []
    engine.connect(
        Events.ITERATION_COMPLETED(once=taken_at),
        lambda engine: taken.append(engine.snapshots.take()),
        phase=Phase.PERSIST,
    )

    @engine.on(Events.ITERATION_COMPLETED(once=11), phase=Phase.CONTROL)
    def go_back(engine: Engine) -> None:
        if not loads:
            random.random()  # whatever happens on the detour leaves no trace
            engine.snapshots.restore(taken[0])

    engine.connect(Events.CHECKPOINT_LOADED, lambda engine: loads.append(engine.state.iteration))
    engine.run(data(), max_epochs=EPOCHS)
    assert loads == [taken_at]
    assert seen[:11] == straight[:11]
    assert seen[11:] == straight[taken_at:]
    assert digest(engine.state_dict()) == digest(expected.state_dict())


def test_a_snapshot_may_be_put_back_more_than_once_and_from_a_later_epoch() -> None:
    engine = make_engine(GradientAccumulation(2))
    seen = recorded(engine)
    taken: list[dict[str, Any]] = []
    engine.connect(
        Events.EPOCH_COMPLETED(once=1), lambda engine: taken.append(engine.snapshots.take()), phase=Phase.PERSIST
    )
    times: list[int] = []

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.CONTROL)
    def go_back(engine: Engine) -> None:
        if engine.state.epoch == 2 and len(times) < 2:
            times.append(engine.state.iteration)
            engine.snapshots.restore(taken[0])

    engine.run(loader(), max_epochs=EPOCHS)
    second_epochs = [seen[start : start + BATCHES] for start in (5, 10, 15)]
    assert second_epochs[0] == second_epochs[1] == second_epochs[2]
    assert engine.state.epoch == EPOCHS
    assert len(seen) == (EPOCHS + 2) * BATCHES


def test_data_that_cannot_go_back_is_refused() -> None:
    engine = make_engine()
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.snapshots.restore(engine.state_dict()))
    with pytest.raises(DataError, match="is an iterator, which cannot be rewound"):
        engine.run(iter(list(loader())), max_epochs=1)


def test_what_is_no_state_is_refused() -> None:
    engine = make_engine()
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.snapshots.restore({"weights": 1}))
    with pytest.raises(ValueError, match=r"restore\(\): expected the state of a Signalfire engine"):
        engine.run(loader(), max_epochs=1)


def test_outside_a_run_it_is_put_in_place_at_the_next_one() -> None:
    engine = make_engine()
    engine.run(loader(), max_epochs=1)
    state = engine.state_dict()
    engine.run(loader(), max_epochs=2)
    after = digest(engine.state_dict())
    engine.snapshots.restore(state)
    engine.run(loader(), max_epochs=2)
    assert digest(engine.state_dict()) == after


def snapshot_at(engine: Engine, event: Any) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    engine.connect(event, lambda engine: taken.append(engine.state_dict()), phase=Phase.PERSIST)
    return taken


def go_back_once(
    engine: Engine, iteration: int, taken: list[dict[str, Any]], also: Callable[[], object] | None = None
) -> None:
    done: list[int] = []

    @engine.on(Events.ITERATION_COMPLETED(once=iteration))
    def go_back(engine: Engine) -> None:
        if not done:
            done.append(1)
            engine.snapshots.restore(taken[0])
            if also is not None:
                also()


@pytest.mark.moderate
@pytest.mark.parametrize("event", [Events.STARTED, Events.EPOCH_STARTED(once=1)])
@pytest.mark.parametrize("epoch_length", [None, 4, 7])
def test_it_goes_back_to_before_the_first_batch_also_where_data_continues_across_epochs(
    event: Any, epoch_length: int | None
) -> None:
    def run(*, back: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        engine = make_engine(GradientAccumulation(2))
        seen = recorded(engine)
        taken = snapshot_at(engine, event)
        if back:
            go_back_once(engine, 9, taken)
        engine.run(loader(), max_epochs=4, epoch_length=epoch_length)
        return seen, digest(engine.state_dict())

    straight, end = run(back=False)
    seen, end_again = run(back=True)
    assert seen == straight[:9] + straight
    assert end_again == end


def test_a_state_of_before_the_first_run_is_refused() -> None:
    engine = make_engine()
    state = engine.state_dict()
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: engine.snapshots.restore(state))
    with pytest.raises(ValueError, match=r"restore\(\): the state was taken before the first run"):
        engine.run(loader(), max_epochs=1)


class Stateful:
    """Data that keeps its own position, in the very dict that it is given."""

    def __init__(self) -> None:
        self.state = {"i": 0}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.state["i"], BATCHES):
            self.state["i"] = index + 1
            yield torch.full((2, 3), float(index)), torch.arange(2)
        self.state["i"] = 0

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Extra(nn.Linear):
    """A module whose extra state is the very dict that it is given."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls = {"n": 0}

    def forward(self, input: Tensor) -> Tensor:
        self.calls["n"] += 1
        return super().forward(input)

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state


def test_what_is_put_back_twice_is_not_changed_by_what_it_was_put_into() -> None:
    torch.manual_seed(1)
    model = Extra()
    engine = Engine(Update.supervised(cross_entropy, partial(SGD, lr=0.1)), model=model, seed=0)
    seen = recorded(engine)
    taken = snapshot_at(engine, Events.ITERATION_COMPLETED(once=2))
    times: list[int] = []

    @engine.on(Events.ITERATION_COMPLETED(once=4))
    def go_back(engine: Engine) -> None:
        if len(times) < 2:
            times.append(model.calls["n"])
            engine.snapshots.restore(taken[0])

    engine.run(Stateful(), max_epochs=2)
    assert times == [4, 4]
    assert [iteration for _, iteration, _ in seen] == [1, 2, 3, 4, 3, 4, 3, 4, 5, 6, 7, 8, 9, 10]
    assert seen[2:4] == seen[4:6] == seen[6:8]


class Late(Handler):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[int] = []

    @on(Events.ITERATION_COMPLETED)
    def count(self, engine: Engine) -> None:
        self.called.append(engine.state.iteration)


def test_a_handler_that_is_attached_or_detached_in_the_iteration_joins_or_leaves_all_the_same() -> None:
    engine, late = make_engine(), Late()
    taken = snapshot_at(engine, Events.ITERATION_COMPLETED(once=2))
    go_back_once(engine, 4, taken, also=lambda: engine.attach(late))
    engine.run(loader(), max_epochs=1)
    assert late.called == [3, 4, 5]
    engine, late = make_engine(), Late()
    engine.attach(late)
    taken = snapshot_at(engine, Events.ITERATION_COMPLETED(once=2))
    go_back_once(engine, 4, taken, also=lambda: engine.detach(late))
    engine.run(loader(), max_epochs=1)
    assert late.called == [1, 2, 3, 4]
    assert not engine.has(late)


def test_a_stop_that_is_asked_for_in_the_same_iteration_stops_the_run_at_the_restored_state() -> None:
    engine = make_engine()
    taken = snapshot_at(engine, Events.ITERATION_COMPLETED(once=2))
    go_back_once(engine, 4, taken, also=lambda: engine.terminate("enough"))
    state = engine.run(loader(), max_epochs=2)
    assert (state.iteration, state.stop_reason) == (2, "enough")


def test_preempted_in_the_same_iteration_the_restored_state_is_saved() -> None:
    engine = make_engine()
    taken = snapshot_at(engine, Events.ITERATION_COMPLETED(once=2))
    saved = snapshot_at(engine, Events.PREEMPTED)
    go_back_once(engine, 4, taken, also=lambda: engine.boundary.preempt("moved"))
    engine.run(loader(), max_epochs=2)
    assert saved[0]["engine"]["iteration"] == 2
    assert digest(saved[0]["modules"]) == digest(taken[0]["modules"])


@pytest.mark.parametrize("event", [Events.COMPLETED, Events.ENDED])
def test_after_the_last_iteration_it_is_refused(event: Any) -> None:
    engine = make_engine()
    taken = snapshot_at(engine, Events.ITERATION_COMPLETED(once=2))
    engine.connect(event, lambda engine: engine.snapshots.restore(taken[0]))
    with pytest.raises(RuntimeError, match=r"restore\(\) was called after the last iteration of a run"):
        engine.run(loader(), max_epochs=1)


def test_a_handler_that_the_state_does_not_know_is_refused_where_restore_is_called() -> None:
    engine = make_engine()
    engine.run(loader(), max_epochs=1)
    state = engine.state_dict()
    engine.attach(EMA(0.9))
    engine.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: engine.snapshots.restore(state))
    with pytest.raises(ValueError, match="handlers only in this engine: ema") as caught:
        engine.run(loader(), max_epochs=3)
    assert any("raised by <lambda> at Events.ITERATION_COMPLETED" in note for note in caught.value.__notes__)


def test_a_state_of_a_stopped_run_continues_under_larger_bounds() -> None:
    engine = make_engine()
    with engine.connect(Events.ITERATION_COMPLETED(once=4), lambda engine: engine.terminate("first")):
        engine.run(loader(), max_epochs=1)
    state = engine.state_dict()
    assert state["engine"]["stop_reason"] == "first"
    go_back_once(engine, 7, [state])
    engine.reset()
    engine.run(loader(), max_epochs=2)
    assert (engine.state.iteration, engine.state.stop_reason) == (10, None)


def test_receivers_with_a_filter_are_called_again_where_the_run_goes_back() -> None:
    engine, called = make_engine(), list[int]()
    engine.connect(Events.ITERATION_COMPLETED(every=3), lambda engine: called.append(engine.state.iteration))
    taken = snapshot_at(engine, Events.ITERATION_COMPLETED(once=2))
    go_back_once(engine, 4, taken)
    engine.run(loader(), max_epochs=2)
    assert called == [3, 3, 6, 9]


# ---- a loaded state before the next run ---------------------------------------------------------------------------


def evaluator_of(engine: Engine) -> Engine:
    evaluator = Engine(Update.supervised(cross_entropy), model=engine.model)
    evaluator.attach(Metrics(loss=Average(), name="measured"))
    return evaluator


@pytest.mark.parametrize("until", [{"max_iters": 3}, {"max_epochs": 1}], ids=["within an epoch", "at its end"])
def test_an_evaluator_takes_the_weights_of_a_trainers_state_and_evaluates_all_of_its_data(until: Any) -> None:
    engine = make_engine(EMA(0.9), History(), Metrics(loss=Average()))
    engine.run(loader(), **until)
    state = engine.state_dict()
    engine.detach("ema")
    expected = dict(evaluator_of(engine).run(loader(shuffle=False)).metrics)
    fresh = make_engine()
    evaluator = evaluator_of(fresh)
    with pytest.warns(FindingWarning, match="W56: the state contains the weight averages"):
        evaluator.load_state_dict(state)
    found = evaluator.run(loader(shuffle=False))
    assert (found.epoch, found.iteration) == (1, BATCHES)
    assert dict(found.metrics) == expected
    with pytest.raises(ValueError, match="differs in"):
        Engine(Update.supervised(cross_entropy), model=nn.Linear(3, 2)).load_state_dict(state)


@pytest.mark.parametrize("taken", ["inside", "after"])
def test_an_evaluation_with_a_state_of_its_own_begins_with_the_first_batch(taken: str) -> None:
    evaluator, states = evaluator_of(make_engine()), list[dict[str, Any]]()

    @evaluator.on(Events.ITERATION_COMPLETED(once=2), phase=Phase.PERSIST)
    def stop(engine: Engine) -> None:
        if taken == "inside":
            engine.terminate("enough")
            states.append(engine.state_dict())

    expected = dict(evaluator.run(loader(shuffle=False)).metrics)
    evaluator.detach(stop)
    if taken == "after":
        states.append(evaluator.state_dict())
    else:
        expected = dict(evaluator.run(loader(shuffle=False)).metrics)
    evaluator.load_state_dict(states[0])
    found = evaluator.run(loader(shuffle=False))
    assert (found.epoch, found.iteration, found.stop_reason) == (1, BATCHES, None)
    assert dict(found.metrics) == expected


@pytest.mark.filterwarnings("ignore:W35")
def test_loaded_weights_are_in_place_at_once_and_the_next_run_is_the_same() -> None:
    whole = make_engine(EMA(0.9), MixedPrecision("bf16"))
    whole.run(loader(), max_iters=7)
    state = copy.deepcopy(whole.state_dict())
    whole.run(loader(), max_epochs=3)
    ends = []
    for use in (False, True):
        engine = make_engine(EMA(0.9), MixedPrecision("bf16"))
        begun_with = digest(engine.model.state_dict())
        engine.load_state_dict(state)
        assert digest(engine.model.state_dict()) == digest(state["modules"]["model"])
        if use:
            engine.model(torch.ones(2, 3))
            engine.evaluate(evaluator_of(engine), loader(shuffle=False))
            with torch.no_grad():
                engine.model[0].weight.zero_()
        seen: list[str] = []
        engine.connect(Events.STARTED, lambda engine, seen=seen: seen.append(digest(engine.model.state_dict())))
        engine.run(loader(), max_epochs=3)
        assert seen == [begun_with]  # what a receiver measures there is the same, loaded or not
        ends.append(digest(engine.state_dict()))
    assert ends == [digest(whole.state_dict())] * 2


def test_an_evaluation_after_a_load_is_that_of_the_averages() -> None:
    engine = make_engine(EMA(0.5))
    engine.run(loader(), max_epochs=1)
    expected = engine.evaluate(evaluator_of(engine), loader(shuffle=False))
    resumed = make_engine(EMA(0.5))
    resumed.load_state_dict(engine.state_dict())
    assert resumed.evaluate(evaluator_of(resumed), loader(shuffle=False)) == expected
    assert digest(resumed.weights()) == digest(engine.weights())


def test_a_state_that_does_not_fit_changes_nothing_before_it_is_refused() -> None:
    engine, other = make_engine(), make_engine()
    engine.run(loader(), max_epochs=1)
    state = engine.state_dict()
    other.attach(EMA(0.9))
    before = digest(other.model.state_dict())
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="handlers only in this engine: ema"):
        other.run(loader(), max_epochs=2)
    assert digest(other.model.state_dict()) == before
    smaller = Engine(Update.supervised(cross_entropy, partial(SGD, lr=0.1)), model=nn.Linear(3, 2))
    before = digest(smaller.model.state_dict())
    smaller.load_state_dict(state)
    assert digest(smaller.model.state_dict()) == before
    with pytest.raises(ValueError, match="module 'model' differs"):
        smaller.run(loader(), max_epochs=1)


def test_a_reset_after_a_load_keeps_the_weights_that_were_loaded() -> None:
    engine = make_engine()
    engine.run(loader(), max_epochs=1)
    other = make_engine()
    other.load_state_dict(engine.state_dict())
    other.reset()
    seen: list[str] = []
    other.connect(Events.STARTED, lambda engine: seen.append(digest(engine.model.state_dict())))
    assert other.run(loader(), max_epochs=1).iteration == BATCHES
    assert seen == [digest(engine.model.state_dict())]


def test_no_state_is_taken_once_the_setup_of_the_model_has_failed() -> None:
    engine = build(linear(5, 1))
    engine.run(batches(2), max_epochs=1)
    state = engine.state_dict()
    refused: list[str] = []

    def fail(engine: Engine) -> None:
        raise LookupError("on purpose")

    def load(engine: Engine) -> None:
        with pytest.raises(RuntimeError, match="was called during a run"):
            engine.load_state_dict(state)
        refused.append("load")

    engine.connect(Events.MODEL_SETUP, fail)
    engine.connect(Events.EXCEPTION_RAISED, load)
    with pytest.raises(LookupError):
        engine.run(batches(2), max_epochs=2)
    assert refused == ["load"]
