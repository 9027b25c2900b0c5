"""Checks for the authors of handlers: fingerprints, traces, and guarantees that are found broken."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, on, seed_everything
from signalfire.handlers import GradientClipping, History
from signalfire.testing import check_handler, fingerprint, trace
from tests import kit
from tests.kit import linear

Batch = tuple[Tensor, Tensor]


def make_data() -> list[Batch]:
    return kit.batches(3, 3, 1)


def build() -> Engine:
    return kit.build(linear(3, 1), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


# ---- fingerprints and traces ----------------------------------------------------------------------------------------


def trained(*handlers: Handler) -> Engine:
    engine = build()
    engine.attach(*handlers)
    seed_everything(0)
    engine.run(make_data(), max_epochs=1)
    return engine


def test_equal_runs_have_equal_fingerprints() -> None:
    assert fingerprint(trained(History())) == fingerprint(trained(History()))


def momentum(engine: Engine) -> None:
    optimizer = engine.updates[0].optimizer
    assert optimizer is not None
    optimizer.state[engine.model.bias]["momentum_buffer"] += 1e-6


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda engine: engine.model.weight.data[0, 0].add_(1e-6), "modules.model"),
        (momentum, "updates.main"),
        (lambda engine: engine.state.metrics.update(new=1.0), "engine"),
        (lambda engine: random.random(), "random"),
        (lambda engine: engine.find(History).records.update(new=[]), "handlers.history"),
    ],
    ids=["weight", "momentum", "metric", "draw", "handler"],
)
def test_a_difference_shows_in_its_part_alone(change: Callable[[Engine], object], part: str) -> None:
    engine = trained(History())
    before = fingerprint(engine)
    change(engine)
    after = fingerprint(engine)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {part}
    assert fingerprint(engine, handlers=False) == {k: v for k, v in after.items() if not k.startswith("handlers.")}


class Holding(Handler):
    """Has a given state."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        ({"a": 1}, {"b": 1}),
        (1, 1.0),
        (1, "1"),
    ],
    ids=["shape", "dtype", "sign of zero", "key", "kind of number", "text"],
)
def test_what_is_equal_by_chance_or_by_value_alone_has_another_fingerprint(one: Any, other: Any) -> None:
    first, second, again = (fingerprint(engine_with(value))["handlers.holding"] for value in (one, other, one))
    assert first == again != second


def engine_with(value: Any) -> Engine:
    engine = build()
    engine.attach(Holding(value))
    return engine


def test_tensors_without_memory_order_or_number_are_fingerprinted_by_their_values() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    nans = [torch.tensor([float("nan")]), torch.tensor([float("nan")])]
    for one, other in (
        (matrix, matrix.T.contiguous().T),
        nans,
        (torch.zeros(0), torch.zeros(0)),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
    ):
        assert fingerprint(engine_with(one)) == fingerprint(engine_with(other))


def test_a_trace_has_every_event_with_its_place() -> None:
    engine, data = build(), make_data()[:1]
    engine.run(data, max_epochs=1)
    seen = trace(engine)
    engine.run(data, max_epochs=2)
    assert seen[:4] == [("MODEL_SETUP", 1, 1), ("OPTIMIZER_SETUP", 1, 1), ("STARTED", 1, 1), ("EPOCH_STARTED", 2, 1)]
    assert seen[-3:] == [("EPOCH_COMPLETED", 2, 2), ("COMPLETED", 2, 2), ("ENDED", 2, 2)]


# ---- guarantees -----------------------------------------------------------------------------------------------------


@pytest.mark.moderate
def test_a_handler_that_gives_its_guarantees_passes() -> None:
    check_handler(build, History, make_data(), max_epochs=2, changes_training=False)


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a function that returns a new handler on each call"):
        check_handler(build, History(), make_data(), max_epochs=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a function that builds a new, identical engine on each call"):
        check_handler(build(), History, make_data(), max_epochs=2)  # type: ignore[arg-type]

    def unseeded() -> Engine:
        return kit.build(nn.Linear(3, 1))

    torch.manual_seed(8)  # a state that no run of the check ends with
    with pytest.raises(AssertionError, match=r"so build\(\) or the data is not deterministic; .*: modules\.model"):
        check_handler(unseeded, History, make_data(), max_epochs=2)


class Counting(Handler):
    """Adds to a weight in each iteration, the more the more of its kind there were before."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.number = self.made

    @on(Events.ITERATION_COMPLETED)
    def count(self, engine: Engine) -> None:
        engine.model.weight.data += self.number


class Staying(Handler):
    """Leaves a receiver behind where it is switched off, and none where it was never switched off."""

    def attached(self, engine: Engine) -> None:
        self.handle = engine.connect(Events.ENDED, lambda engine: None)

    def detached(self, engine: Engine) -> None:
        if self.enabled:
            self.handle.detach()


class Swallowing(Handler):
    """Has the engine's run swallow errors."""

    def attached(self, engine: Engine) -> None:
        run = engine.run

        def quietly(*args: Any, **options: Any) -> Any:
            try:
                return run(*args, **options)
            except Exception:
                return engine.state

        vars(engine)["run"] = quietly


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counting, "counting: two runs with the same seed differ: modules.model"),
        (Staying, "staying: it leaves receivers behind while disabled: signal Events.ENDED"),
        (Swallowing, r"swallowing: an error in another receiver did not propagate out of run\(\)"),
    ],
    ids=["repeated", "disabled", "error"],
)
def test_a_broken_guarantee_is_named_with_what_differs(kind: type[Handler], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_handler(build, kind, make_data(), max_epochs=2)


class Mute(Handler):
    """Has methods, none of which is declared with `on`."""

    def epoch_done(self, engine: Engine) -> None:
        raise AssertionError


class Misdeclared(Handler):
    """Subscribes to one event, and has the name of another."""

    @on(Events.STARTED)
    def start(self, engine: Engine) -> None: ...

    def on_epoch_completed(self, engine: Engine) -> None:
        raise AssertionError


class Hoarding(Handler):
    """Counts its runs, and neither saves nor restores the count, which matters from the second one on."""

    runs = 0

    @on(Events.STARTED)
    def count(self, engine: Engine) -> None:
        engine.model.weight.data += self.runs
        self.runs += 1


class Late(Handler):
    """Has a receiver for an iteration that short runs do not reach, and one for an event that they do not emit."""

    @on(Events.ITERATION_COMPLETED(every=100))
    def save(self, engine: Engine) -> None: ...

    @on(Events.PREEMPTED)
    def leave(self, engine: Engine) -> None: ...


class Forgetful(Handler):
    """Counts, and changes nothing with it; one count is its state, the other is not."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.forgotten, self.began = 0, 0, 0.0

    @on(Events.STARTED)
    def begin(self, engine: Engine) -> None:
        self.began = time.perf_counter()

    @on(Events.ITERATION_COMPLETED)
    def count(self, engine: Engine) -> None:
        self.kept += 1
        self.forgotten += 1

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept, self.forgotten = state.get("kept", 0), 0


class Wrong(Forgetful):
    """Restores another count than it saved."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = state.get("kept", 0) // 2


@pytest.mark.moderate
def test_a_receiver_that_the_runs_do_not_reach_is_named() -> None:
    message = (
        r"late: some methods were never .*: save \(Events.ITERATION_COMPLETED\(every=100\)\); choose data and bounds"
    )
    with pytest.raises(AssertionError, match=message):
        check_handler(build, Late, make_data(), max_epochs=2)
    report = check_handler(build, Late, make_data(), max_epochs=2, uncalled=["save"])
    assert "- every receiver whose event is emitted is called; not emitted: leave (Events.PREEMPTED)\n" in report


class Returning(Handler):
    """Writes a count that is back at 0 after the last iteration, and does not save it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @on(Events.ITERATION_COMPLETED, phase=Phase.PREPARE)
    def write(self, engine: Engine) -> None:
        self.count = (self.count + 1) % 3
        engine.log("count", self.count)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = 0


class Collecting(Handler):
    """Appends to a list that it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    @on(Events.ITERATION_COMPLETED)
    def see(self, engine: Engine) -> None:
        self.seen.append(7)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = []


@pytest.mark.moderate
def test_a_resumed_run_is_compared_after_each_iteration_and_lists_by_their_length_too() -> None:
    message = r"after iteration 1 differs in iteration 2: engine.metrics.* \(uninterrupted 2; resumed 1\)"
    with pytest.raises(AssertionError, match=message):
        check_handler(build, Returning, make_data(), max_epochs=2)
    with pytest.raises(AssertionError, match=r"seen.length \(uninterrupted 6; resumed 2\)"):
        check_handler(build, Collecting, make_data(), max_epochs=2)


@pytest.mark.moderate
def test_what_a_handler_keeps_without_saving_it_is_named_with_both_values() -> None:
    message = r"not restored when a run resumes after iteration 4; .*: forgotten \(uninterrupted 6; resumed 2\)$"
    with pytest.raises(AssertionError, match=message):
        check_handler(build, Forgetful, make_data(), max_epochs=2)
    check_handler(build, Forgetful, make_data(), max_epochs=2, per_run=["forgotten"])
    with pytest.raises(
        AssertionError,
        match=r"after iteration 1 differs in iteration 2: handlers.wrong.kept \(uninterrupted 2; resumed 1\)$",
    ):
        check_handler(build, Wrong, make_data(), max_epochs=2)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Mute, "Mute has no method decorated with @on"),
        (
            Misdeclared,
            "Misdeclared.on_epoch_completed has the name of an event but .*put @on.Events.EPOCH_COMPLETED. above the method",
        ),
        (Hoarding, "hoarding: after a run on a different engine, the handler does not start in .*modules.model"),
    ],
    ids=["no subscription", "a forgotten one", "keeps what it counted"],
)
def test_a_handler_that_is_never_called_or_keeps_what_it_saw_fails(kind: type[Handler], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_handler(build, kind, make_data(), max_epochs=2)


@pytest.mark.moderate
def test_the_check_says_what_held_and_takes_one_thread() -> None:
    threads = []

    class Observing(Handler):
        @on(Events.STARTED)
        def start(self, engine: Engine) -> None:
            threads.append(torch.get_num_threads())

    before = torch.get_num_threads()
    report = check_handler(build, Observing, make_data(), max_epochs=2, changes_training=False)
    assert report.splitlines()[0] == "observing: 16 runs"
    assert "resumed after iterations 1, 2, 3, 4, 5, 6, the run equals an uninterrupted run" in report
    assert set(threads) == {1}
    assert torch.get_num_threads() == before
    report = check_handler(build, Observing, make_data(), max_epochs=2)  # it may change training, and does not
    assert "seed are equal, and end with the same weights as without" in report
    report = check_handler(build, partial(GradientClipping, 1e-3), make_data(), max_epochs=2)
    assert "seed are equal\n" in report
