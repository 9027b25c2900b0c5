"""Values that the forward changes and no state holds are reported where a state is saved; caches are not."""

from __future__ import annotations

import io
import time
import warnings
from collections import defaultdict, deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from signalfire import Engine, Events, FindingWarning, Handler, Update, on
from signalfire.findings.unsaved_handlers import marks_of_handlers
from signalfire.handlers import (
    Average,
    Checkpoint,
    EarlyStopping,
    GradientClipping,
    History,
    Metrics,
    Rewindable,
)
from signalfire.tuning import find_learning_rate
from tests import kit
from tests.kit import quick

BATCHES = kit.batches(4, 4, (1,))


class Model(nn.Module):
    scale: Tensor
    table: Tensor
    lazy: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("lazy", None, persistent=False)
        self.calls = 0
        self.mask: Tensor | None = None
        self.recent: list[float] = []
        self.shown: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.rng = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.lazy is None:
            self.lazy = torch.ones(1)
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), 1)
        if self.training:
            self.scores = x.softmax(1)
            x = x + self.scores.detach()
        self.last = self.linear(x + self.table) * self.lazy * self.mask
        self.shown.append(len(x))
        self.by_name["last"] = x
        self.auxiliary = 0.0
        self.auxiliary += self.last.detach().mean()
        changed: Tensor = self.last * self.change()
        return changed

    def change(self) -> Any:
        return 1.0

    def plot(self) -> Any:
        return self.last, self.scores, self.auxiliary, self.shown, self.by_name


class Buffer(Model):
    def change(self) -> Any:
        self.scale = self.scale * 0.9
        return self.scale


class Counter(Model):
    def change(self) -> Any:
        self.calls += 1
        return 0.9**self.calls


class Hidden(Model):
    def change(self) -> Any:
        if not hasattr(self, "hidden"):
            self.hidden = torch.ones(1)
        self.hidden = self.hidden * 0.9
        return self.hidden


class Memory(Model):
    def change(self) -> Any:
        self.recent.append(1.0)
        return len(self.recent)


class Draws(Model):
    def change(self) -> Any:
        return torch.rand(1, generator=self.rng)


class Inside(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counter()

    def change(self) -> Any:
        return self.inner(torch.ones(1, 4))


class Queue(Model):
    """Rows that are written in place, as those of negative samples."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.ones(2)

    def change(self) -> Any:
        changed = self.queue.mean()
        self.queue[0] += 1
        return changed


class Extra(Counter):
    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def build(kind: type[Model], *handlers: Any, **options: Any) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.01)), model=kind(), seed=0, **options)
    engine.attach(*handlers)
    return engine


@pytest.mark.parametrize(
    ("kind", "message"),
    quick(
        [
            (Counter, "the attributes model.calls change during training"),
            (Hidden, "the attributes model.hidden change during training"),
            (Memory, "the attributes model.recent change during training"),
            (Draws, "the attributes model.rng change during training"),
            (Inside, "the attributes model.inner.calls change during training"),
            (Queue, "the attributes model.queue change during training"),
        ],
        (Counter, "the attributes model.calls change during training"),
        (Hidden, "the attributes model.hidden change during training"),
    ),
)
def test_attributes_that_the_first_checkpoint_lacks_are_listed_once(kind: Any, message: str, tmp_path: Path) -> None:
    """As information: they may be counters that are only shown, or caches."""
    engine = build(kind, Checkpoint(tmp_path, sync_files=False))
    engine.run(BATCHES, max_epochs=3)
    (found,) = engine.findings.of_run().of("W47")
    assert found.severity == "info"
    assert message in found.sentence


def test_the_first_checkpoint_that_lacks_a_buffer_warns_of_it_once(tmp_path: Path) -> None:
    engine = build(Buffer, Checkpoint(tmp_path, sync_files=False))
    with pytest.warns(FindingWarning, match=r"W47: .*the buffers model.scale change during training") as reported:
        engine.run(BATCHES, max_epochs=3)
    assert len(reported) == 1


class Rope(nn.Module):
    """A table that grows with the longest batch, a mask by length, and a counter for a log."""

    cos: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("cos", torch.ones(1, 1), persistent=False)
        self.masks: dict[int, Tensor] = {}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if len(self.cos) < len(x):
            self.cos = torch.cos(torch.arange(len(x)))[:, None]
        mask = self.masks.setdefault(len(x), torch.ones(len(x), 1))
        return self.linear(x) * self.cos[: len(x)] * mask  # type: ignore[no-any-return]


def test_caches_that_grow_and_counters_raise_no_warning(tmp_path: Path) -> None:
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.01)), model=Rope(), seed=0)
    engine.attach(Checkpoint(tmp_path, sync_files=False))
    engine.run([(torch.ones(n, 4), torch.ones(n, 1)) for n in (2, 4, 3, 6, 4, 8)], max_epochs=2)


def test_a_state_of_the_user_is_reported_once_it_goes_to_a_file_or_is_resumed_from() -> None:
    engine = build(Buffer)
    engine.run(BATCHES, max_epochs=1)
    state = engine.state_dict()
    with pytest.warns(FindingWarning, match="W47: .* model.scale"):
        torch.save(state, io.BytesIO())
    engine.load_state_dict(state)
    with pytest.warns(FindingWarning, match="W47: .* model.scale"):
        engine.run(BATCHES, max_epochs=2)
    scale = engine.model.scale.clone()
    engine.snapshots.restore(state)
    engine.run(BATCHES, max_epochs=2)
    assert torch.equal(engine.model.scale, scale)


@pytest.mark.parametrize("kind", [Model, Extra])
def test_caches_what_is_only_shown_and_extra_state_are_not_reported(kind: type[Model], tmp_path: Path) -> None:
    engine = build(kind, Checkpoint(tmp_path, sync_files=False))
    engine.run(BATCHES, max_epochs=2)
    engine.state_dict()


def test_what_is_put_back_in_the_process_is_not_reported() -> None:
    engine = build(Counter, Rewindable(every="1it"))
    find_learning_rate(engine, BATCHES, steps=4)
    engine.run(BATCHES, max_epochs=2)
    assert engine.model.calls == 8


def test_the_resumed_run_differs_as_the_finding_says(tmp_path: Path) -> None:
    straight = build(Buffer)
    straight.run(BATCHES, max_epochs=2)
    first = build(Buffer, Checkpoint(tmp_path, sync_files=False), allow=["W47"])
    first.run(BATCHES, max_epochs=1)
    resumed = build(Buffer)
    resumed.load_state_dict(Checkpoint.load(tmp_path), allow=["checkpoint"])
    resumed.run(BATCHES, max_epochs=2)
    assert straight.model.scale.tolist() != resumed.model.scale.tolist() == first.model.scale.tolist()


class Meter:
    """Counts for a handler."""

    def __init__(self) -> None:
        self.seen = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.seen += 1

    def add_up(self, value: float) -> None:
        self.sum += value

    def reset(self) -> None:
        self.sum = 0.0


class Carrying(Handler):
    """Carries one value along, by the name of the test."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.count, self.total, self.last, self.since = 0, 0.0, 0.0, 0.0
        self.window: list[float] = []
        self.seen: list[float] = []
        self.table: dict[int, int] = {}
        self.best: float | None = None
        self.made: list[int] | None = None
        self.rng = torch.Generator().manual_seed(0)
        self.meter, self.summing = Meter(), Meter()
        self.recent: deque[float] = deque(maxlen=3)

    @on(Events.EPOCH_STARTED)
    def begin(self, engine: Engine) -> None:
        if self.what == "total":
            self.total = 0.0

    @on(Events.ITERATION_COMPLETED)
    def carry(self, engine: Engine) -> None:
        now = float(engine.state.iteration)
        getattr(self, f"carry_{self.what}")(engine, now)

    def carry_count(self, engine: Engine, now: float) -> None:
        self.count += 1

    def carry_window(self, engine: Engine, now: float) -> None:
        self.window = [*self.window[-2:], now]

    def carry_best(self, engine: Engine, now: float) -> None:
        if self.best is None or now > self.best:
            self.best = now

    def carry_rng(self, engine: Engine, now: float) -> None:
        torch.rand(1, generator=self.rng)

    def carry_recent(self, engine: Engine, now: float) -> None:
        self.recent.append(now)
        engine.state.metrics["recent"] = sum(self.recent)

    def carry_meter(self, engine: Engine, now: float) -> None:
        self.meter.add(now)

    def carry_summing(self, engine: Engine, now: float) -> None:
        self.summing.add_up(now)

    def carry_total(self, engine: Engine, now: float) -> None:
        self.total += now

    def carry_last(self, engine: Engine, now: float) -> None:
        self.last = now

    def carry_seen(self, engine: Engine, now: float) -> None:
        self.seen.append(now)

    def carry_table(self, engine: Engine, now: float) -> None:
        if engine.state.epoch not in self.table:
            self.table[engine.state.epoch] = engine.state.iteration
        engine.state.metrics["first"] = self.table[engine.state.epoch]

    def carry_made(self, engine: Engine, now: float) -> None:
        if self.made is None:
            self.made = [1, 2]
        engine.state.metrics["made"] = self.made[0]

    def carry_since(self, engine: Engine, now: float) -> None:
        before, self.since = self.since, time.perf_counter()
        engine.state.metrics["seconds"] = self.since - before


def saving_each(interval: str, what: str, folder: Path) -> list[str]:
    engine = kit.build(nn.Linear(4, 1), Checkpoint(folder, every=interval), Carrying(what))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run(BATCHES, max_epochs=3)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("what", ["count", "window", "best", "rng", "recent", "meter"])
def test_what_a_handler_carries_and_does_not_save_is_reported_once(what: str, tmp_path: Path) -> None:
    (found,) = saving_each("1ep", what, tmp_path)
    place = {"meter": "meter.seen"}.get(what, what)
    assert found.startswith(f"W47: 'carrying' changes self.{place}, but its state_dict() does not return these values")
    assert "Carrying.state_dict()" in found


@pytest.mark.whole
@pytest.mark.parametrize("what", ["total", "last", "seen", "table", "made", "since", "summing"])
def test_what_is_made_again_by_a_resumed_run_is_not_reported(what: str, tmp_path: Path) -> None:
    """Sums over an epoch, the last value, records, tables and caches, and times."""
    assert saving_each("1ep", what, tmp_path) == []


def test_a_sum_over_an_epoch_is_missing_inside_the_epoch(tmp_path: Path) -> None:
    (found,) = saving_each("3it", "total", tmp_path)
    assert "changes self.total" in found


def test_included_handlers_save_what_they_carry(tmp_path: Path) -> None:
    engine = kit.build(nn.Linear(4, 1), Checkpoint(tmp_path), EarlyStopping("loss"), Metrics(loss=Average()), History())
    assert not [place for place in marks_of_handlers(engine) if not place.startswith("carrying")]


class Given(Handler):
    """Counts in an object of somebody else."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    @on(Events.ITERATION_COMPLETED)
    def count(self, engine: Engine) -> None:
        self.meter.add(1.0)


def test_an_object_that_a_handler_was_given_is_not_its_own(tmp_path: Path) -> None:
    kit.build(nn.Linear(4, 1), Checkpoint(tmp_path, every="1ep"), Given(Meter())).run(BATCHES, max_epochs=1)


class Saving(Handler):
    """Saves one of the values that it carries, by the name of the test."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.count, self.other = 0, 0

    @on(Events.ITERATION_COMPLETED)
    def carry(self, engine: Engine) -> None:
        self.count += 1
        if self.how != "whole":
            self.other += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


class SavingAll(Saving):
    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


class SavingIndirectly(Saving):
    def saved(self) -> dict[str, Any]:
        return {"count": self.count, "other": self.other}

    def state_dict(self) -> dict[str, Any]:
        return self.saved()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("handler", "lacks"),
    [(Saving("whole"), ""), (Saving("part"), "other"), (SavingAll("part"), ""), (SavingIndirectly("part"), "")],
)
def test_what_a_state_of_its_own_lacks_is_reported(handler: Handler, lacks: str, tmp_path: Path) -> None:
    engine = kit.build(nn.Linear(4, 1), Checkpoint(tmp_path, every="1ep"), handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run(BATCHES, max_epochs=1)
    found = [str(one.message) for one in caught]
    assert len(found) == bool(lacks)
    assert all(f"W47: 'saving' changes self.{lacks}, but its" in one for one in found)


class Shown(nn.Linear):
    """Keeps its last output in a buffer for others, and never reads it."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("last", torch.zeros(4, 1), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        self.last = super().forward(input).detach()
        return super().forward(input)


def test_a_buffer_that_each_forward_writes_before_anything_reads_it_carries_nothing(tmp_path: Path) -> None:
    kit.build(Shown(), Checkpoint(tmp_path)).run(BATCHES, max_epochs=1)


class CountedClipping(GradientClipping):
    clipped = 0

    @on(Events.GRADIENTS_READY)
    def count(self, engine: Engine) -> None:
        self.clipped += 1


def test_a_subclass_of_an_included_handler_is_the_users(tmp_path: Path) -> None:
    engine = kit.build(nn.Linear(4, 1), Checkpoint(tmp_path), CountedClipping(max_norm=1.0))
    with pytest.warns(FindingWarning, match="W47: 'counted_clipping' changes self.clipped"):
        engine.run(BATCHES, max_epochs=1)


class Counting(Handler):
    """Saves a dictionary of a kind that torch.load refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Any = defaultdict(int)

    @on(Events.ITERATION_COMPLETED)
    def count(self, engine: Engine) -> None:
        self.counts[len(engine.state.batch)] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: Any) -> None:
        self.counts.update(state["counts"])


def test_an_object_that_cannot_be_loaded_is_named_with_its_place(tmp_path: Path) -> None:
    engine = kit.build(nn.Linear(4, 1), Checkpoint(tmp_path, every="1ep"), Counting())
    with pytest.warns(FindingWarning, match=r"holds a collections.defaultdict \(handlers.counting.counts\), which"):
        engine.run(BATCHES, max_epochs=1)


class Following(Handler):
    """Sets its count from the position where a run starts."""

    seen = 0

    @on(Events.STARTED | Events.CHECKPOINT_LOADED)
    def begin(self, engine: Engine) -> None:
        self.seen = engine.state.iteration

    @on(Events.ITERATION_COMPLETED)
    def add(self, engine: Engine) -> None:
        self.seen += 1


def test_a_value_that_a_method_sets_again_may_be_that_of_the_resumed_run(tmp_path: Path) -> None:
    engine = kit.build(nn.Linear(4, 1), Checkpoint(tmp_path, every="2it"), Following())
    with pytest.warns(FindingWarning, match=r"changes self.seen, .*\. Unless a method sets them again, a resumed run"):
        engine.run(BATCHES, max_epochs=1)


class Centered(nn.Module):
    """A loss with a moving center."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.center.lerp_(output.mean(0), 0.1)
        return mse_loss(output - self.center, target)


def test_the_way_out_for_the_buffers_of_a_loss_saves_them(tmp_path: Path) -> None:
    model, loss = nn.Linear(4, 1), Centered()
    with pytest.warns(FindingWarning, match=r"engine.model\['model'\]\(batch\[0\]\), ...\), model=\{'model': model"):
        kit.build(model, Checkpoint(tmp_path / "a", every="1ep"), loss=loss).run(BATCHES, max_epochs=1)
    update = Update(lambda engine, batch: engine.model["model"](batch[0]), lambda _, o, batch: loss(o, batch[1]), SGD)
    engine = Engine(update, model={"model": model, "criterion": loss}, seed=0)
    engine.attach(Checkpoint(tmp_path / "b", every="1ep"))
    engine.run(BATCHES, max_epochs=1)
    assert "center" in Checkpoint.load(tmp_path / "b")["modules"]["criterion"]
