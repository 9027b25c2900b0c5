"""Going back inside a run: what follows is what a run comes to that was never further."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from signalfire import Engine, Events, Phase, Update
from signalfire.data import DataError
from signalfire.data.left_out import LeftOut
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    DistributedDataParallel,
    GradientAccumulation,
    History,
    LimitBatches,
    Metrics,
    Rewindable,
)
from signalfire.resuming.past import Place
from tests import kit
from tests.kit import digest, mlp
from tests.processes import Failed, run_together

ADAM = partial(torch.optim.Adam, lr=1e-2)
Batch = tuple[Tensor, Tensor]


def build(*handlers: Any, streams: Any = "separate") -> Engine:
    torch.manual_seed(1)
    model = mlp(5, 8, 1, nn.Dropout(0.2))
    engine = Engine(Update.supervised(nn.functional.mse_loss, ADAM), model=model, seed=0, streams=streams)
    engine.attach(*handlers)
    return engine


def run(engine: Engine, data: Any, **bounds: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(data, **bounds)


def weights(engine: Engine) -> str:
    states = [update.optimizer.state_dict() for update in engine.updates if update.optimizer is not None]
    return digest({"model": engine.model.state_dict(), "optimizers": states})


def rewinding(engine: Engine, at: int, to: int, leave_out: int = 0) -> list[Place]:
    """Have the engine go back once, at the end of an iteration; the batches that are left out appear in the list."""
    places: list[Place] = []
    done: list[int] = []

    def rewind(engine: Engine) -> None:
        if not done:
            done.append(1)
            places.extend(engine.rewind(to, leave_out=leave_out))

    engine.connect(Events.ITERATION_COMPLETED(once=at), rewind)
    return places


class Streaming(IterableDataset[Batch]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(3)
        for _ in range(40):
            inputs = torch.randn(5, generator=generator)
            yield inputs, inputs.sum(0, keepdim=True)


def samples() -> TensorDataset:
    inputs = torch.randn(43, 5, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


KINDS: dict[str, tuple[Any, dict[str, int]]] = {
    "list": (lambda: kit.batches(11), {"max_epochs": 3}),
    "shuffled": (
        lambda: DataLoader(samples(), 4, shuffle=True, generator=torch.Generator().manual_seed(0)),
        {"max_epochs": 3},
    ),
    "of workers": (lambda: DataLoader(samples(), 4, shuffle=True, num_workers=2), {"max_epochs": 2}),
    "of persistent workers": (
        lambda: DataLoader(samples(), 4, shuffle=True, num_workers=2, persistent_workers=True),
        {"max_epochs": 2},
    ),
    "unsized": (lambda: DataLoader(Streaming(), 4), {"max_epochs": 3}),
    "across epochs": (lambda: kit.batches(11), {"max_epochs": 4, "epoch_length": 8}),
    "none": (lambda: None, {"max_iters": 25, "epoch_length": 10}),
}


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", kit.quick([kind for kind in KINDS if kind != "none"], "shuffled", "across epochs"))
def test_going_back_and_on_again_changes_nothing(kind: str, window: int) -> None:
    make, bounds = KINDS[kind]
    plain = build(Metrics(train_loss=Average()), History(), EMA(0.9), GradientAccumulation(window), streams="shared")
    torch.manual_seed(7)
    run(plain, make(), **bounds)
    engine = build(
        Rewindable(every="4it", keep=3), Metrics(train_loss=Average()), History(), EMA(0.9), GradientAccumulation(window),
        streams="shared",
    )  # fmt: skip
    rewinding(engine, at=18, to=10)
    torch.manual_seed(7)
    made: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: made.append(engine.state.iteration), phase=Phase.RECORD)
    run(engine, make(), **bounds)
    assert weights(engine) == weights(plain)
    assert engine.find(History).records == plain.find(History).records
    assert digest(engine.find(EMA).state_dict()) == digest(plain.find(EMA).state_dict())
    assert made == [*range(1, 19), *range(9, plain.state.iteration + 1)]


def test_a_run_without_data_goes_back_as_well() -> None:
    def step(engine: Engine, batch: None) -> Tensor:
        output: Tensor = engine.model(torch.ones(3, 5))
        return output.square().mean()

    def engine_of() -> Engine:
        torch.manual_seed(1)
        return Engine(Update.from_function(step, ADAM), model=mlp(5, 8, 1, nn.Dropout(0.2)), seed=0)

    plain, engine = engine_of(), engine_of()
    torch.manual_seed(7)
    run(plain, None, max_iters=25, epoch_length=10)
    engine.attach(Rewindable(every="4it"))
    rewinding(engine, at=18, to=9)
    torch.manual_seed(7)
    run(engine, None, max_iters=25, epoch_length=10)
    assert weights(engine) == weights(plain)


LEFT_OUT = [(kind, False) for kind in KINDS if kind not in ("none", "of workers")]
LEFT_OUT += [(kind, True) for kind, _ in LEFT_OUT if kind != "across epochs"]  # an epoch there has fewer than 9 batches


@pytest.mark.moderate
@pytest.mark.parametrize(("kind", "limited"), LEFT_OUT)
def test_the_batches_left_out_are_those_that_follow_and_no_others(kind: str, limited: bool) -> None:
    make, bounds = KINDS[kind]
    limits = [[LimitBatches(9)], [LimitBatches(9)]] if limited else [[], []]
    plain, engine = build(*limits[0]), build(Rewindable(every="4it"), *limits[1])
    everything: list[tuple[int, str]] = []

    def see(engine: Engine, into: list[tuple[int, str]] = everything) -> None:
        into.append((engine.state.iteration, digest(engine.state.batch[0])))

    plain.connect(Events.ITERATION_COMPLETED, see)
    run(plain, make(), **bounds)
    used: list[tuple[int, str]] = []
    engine.connect(Events.ITERATION_COMPLETED, partial(see, into=used), phase=Phase.RECORD)
    places = rewinding(engine, at=17, to=13, leave_out=3)
    lengths: list[int] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: lengths.append(engine.state.epoch_iteration))
    run(engine, make(), **bounds)
    final = dict(used)  # of an iteration that was made twice, the last counts
    kept = [one for number, one in everything if number not in (14, 15, 16)]
    across = kind == "across epochs"
    assert len(places) == 3
    assert list(final.values())[: len(kept)] == kept[: len(final)]
    assert engine.state.iteration == len(everything) - (0 if across else 3)
    assert list(final) == list(range(1, len(final) + 1)), "iterations have no gaps"


def test_a_second_run_and_a_reset_know_what_was_left_out() -> None:
    engine = build(Rewindable(every="2it"))
    places = rewinding(engine, at=6, to=2, leave_out=3)
    run(engine, kit.batches(10), max_iters=6)
    assert places == [Place(1, 2), Place(1, 3), Place(1, 4)]
    seen: list[str] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(digest(engine.state.batch[0])))
    run(engine, kit.batches(10), max_epochs=1)
    assert seen == [digest(kit.batches(10)[9][0])]  # of the ten, six were used and three left out
    run(engine, kit.batches(10), max_epochs=2)
    assert engine.state.iteration == 17  # the next epoch is whole
    engine.reset()
    run(engine, kit.batches(10), max_epochs=1)
    assert engine.state.iteration == 10


@pytest.mark.moderate
@pytest.mark.parametrize("after", [7, 12, 19])
def test_a_resumed_run_leaves_out_the_same_and_can_go_back_as_far(after: int) -> None:
    saved: list[bytes] = []

    def save(engine: Engine) -> None:
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
        saved.append(file.getvalue())

    def engine_of(*, back: bool = True) -> Engine:
        engine = build(Rewindable(every="4it"))
        if back:
            rewinding(engine, at=9, to=5, leave_out=2)
        return engine

    whole = engine_of()
    rewinding(whole, at=22, to=18)
    whole.connect(Events.ITERATION_COMPLETED(once=after), save, phase=Phase.PERSIST, rank=50)
    run(whole, kit.batches(12), max_epochs=3)
    resumed = engine_of(back=after < 9)
    rewinding(resumed, at=22, to=18)
    resumed.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True))
    run(resumed, kit.batches(12), max_epochs=3)
    assert weights(resumed) == weights(whole)


def test_memory_holds_no_more_states_than_asked_for() -> None:
    engine = build(Rewindable(every="2it", keep=3))
    most: list[tuple[int | None, int | None, int]] = []
    engine.connect(
        Events.ITERATION_COMPLETED,
        lambda engine: most.append((engine.past.oldest, engine.past.newest, len(engine.past._states))),
        phase=Phase.PERSIST,
    )
    run(engine, kit.batches(11), max_epochs=1)
    assert most[0] == (0, 0, 1)
    assert max(count for *_, count in most) == 3
    assert most[-1] == (6, 10, 3)
    rewinding(engine, at=19, to=15)
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: newest.append((engine.state.iteration, engine.past.newest))
    )
    newest: list[tuple[int, int | None]] = []
    run(engine, kit.batches(11), max_epochs=2)
    assert newest[8:11] == [(15, 14), (16, 14), (17, 16)]  # again, after 19; what was further is gone


def _rewind(engine: Engine, to: int, leave_out: int = 0) -> None:
    engine.rewind(to, leave_out=leave_out)


def test_other_data_may_follow_once_all_that_is_not_left_out_was_used() -> None:
    engine = build(Rewindable(every="2it"))
    rewinding(engine, at=6, to=2, leave_out=3)
    saved: list[dict[str, Any]] = []  # before the end of the epoch
    engine.connect(
        Events.ITERATION_COMPLETED(once=7), lambda engine: saved.append(engine.state_dict()), phase=Phase.PERSIST
    )
    run(engine, kit.batches(10), max_iters=7)
    resumed = build(Rewindable(every="2it"))
    resumed.load_state_dict(saved[0])
    run(resumed, kit.batches(12), max_epochs=2)
    assert resumed.state.iteration == 9 + 12  # the open epoch has two batches more


def test_a_state_of_another_run_replaces_what_was_kept() -> None:
    other = build()
    run(other, kit.batches(11), max_iters=9)
    engine = build(Rewindable(every="2it", keep=9))
    run(engine, kit.batches(11), max_iters=7)
    engine.load_state_dict(other.state_dict(), allow=["rewindable"])
    kept: list[int | None] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: kept.append(engine.past.oldest))
    run(engine, kit.batches(11), max_iters=11)
    assert kept == [9, 9]


def test_mistakes_name_the_way_out() -> None:
    engine = build()
    with pytest.raises(RuntimeError, match=r"rewind\(to=3\): the engine is not running"):
        engine.rewind(3)
    engine.connect(Events.ITERATION_COMPLETED(once=5), partial(_rewind, to=2))
    with pytest.raises(
        RuntimeError, match="no states are stored; attach a handler that stores states, such as Rewindable"
    ):
        run(engine, kit.batches(8), max_epochs=1)
    for to, leave_out, problem in (
        (9, 0, "a completed iteration, from 0 to 4"),
        (-1, 0, "from 0 to 4"),
        (2, -1, "number of batches"),
    ):
        engine = build(Rewindable(every="2it"))
        engine.connect(Events.ITERATION_COMPLETED(once=5), partial(_rewind, to=to, leave_out=leave_out))
        with pytest.raises(ValueError, match=problem):
            run(engine, kit.batches(8), max_epochs=1)
    engine = build(Rewindable(every="2it", keep=2))
    engine.connect(Events.ITERATION_COMPLETED(once=7), partial(_rewind, to=1))
    with pytest.raises(RuntimeError, match="iteration 2 cannot be repeated: the oldest stored state is from it"):
        run(engine, kit.batches(8), max_epochs=1)
    with pytest.raises(DataError, match="is an iterator, which cannot be rewound"):
        run(build(Rewindable()), iter(kit.batches(3)), max_epochs=1)
    engine = build(Rewindable())
    with pytest.raises(ValueError, match="both 'rewindable' and 'other' control which earlier states are kept"):
        engine.attach(Rewindable(name="other"))


def test_batches_left_out_count_as_read() -> None:
    left_out = LeftOut({1: [0, 3, 4]})
    assert [left_out.read(1, used) for used in range(5)] == [0, 2, 3, 6, 7]
    assert [left_out.read(0, used) for used in range(3)] == [0, 1, 2]
    assert list(left_out.without(1, iter(range(3, 8)), 3)) == [5, 6, 7]
    assert left_out.plus([(2, 5), (1, 1)]).state_dict() == {1: [0, 1, 3, 4], 2: [5]}


def test_a_run_that_fails_after_it_went_back_resumes_on_the_new_way(tmp_path: Path) -> None:
    """A checkpoint of the way that was left is the newest when the run goes back."""

    def engine_of(*, goes_back: bool, fails_at: int | None = None) -> Engine:
        engine = kit.build(
            mlp(5, 8, 1), Rewindable(every="2it"), Checkpoint(tmp_path, every="4it", keep=2, resume=True)
        )
        gone: list[int] = []

        def go_back(engine: Engine) -> None:
            if goes_back and not gone:
                gone.append(engine.state.iteration)
                engine.rewind(13, leave_out=3)

        def fail(engine: Engine) -> None:
            if gone:
                raise ArithmeticError

        engine.connect(Events.ITERATION_COMPLETED(once=17), go_back)
        if fails_at is not None:
            engine.connect(Events.ITERATION_COMPLETED(once=fails_at), fail)
        return engine

    with pytest.raises(ArithmeticError):
        engine_of(goes_back=True, fails_at=15).run(kit.batches(30), max_epochs=1)
    resumed = engine_of(goes_back=False)
    run(resumed, kit.batches(30), max_epochs=1)
    assert resumed.state.iteration == 27
    whole = kit.build(mlp(5, 8, 1), Rewindable(every="2it"))
    rewinding(whole, at=17, to=13, leave_out=3)
    run(whole, kit.batches(30), max_epochs=1)
    assert weights(resumed) == weights(whole)


def test_the_best_of_a_way_that_was_left_is_not_resumed_from(tmp_path: Path) -> None:
    """The metric is not measured where the run goes back to, so that nothing is written there: what is newer is removed."""
    best = Checkpoint(tmp_path, monitor="count", mode="max", keep=2)
    engine = kit.build(mlp(5, 8, 1), Rewindable(every="2it"), best)
    rewinding(engine, at=17, to=13, leave_out=3)
    engine.connect(Events.ITERATION_COMPLETED(every=4), lambda engine: engine.log("count", engine.state.iteration))
    kept: list[list[str]] = []
    engine.connect(
        Events.CHECKPOINT_LOADED,
        lambda engine: kept.append(sorted(os.listdir(tmp_path))),
        phase=Phase.PERSIST,
        rank=10**6,
    )
    run(engine, kit.batches(30), max_epochs=1)
    assert [name[-2:] for name in kept[0]] == [
        "04",
        "08",
        "12",
    ]  # not 16; 4 is held, since the run could go back further
    assert [name[-2:] for name in sorted(os.listdir(tmp_path))] == ["20", "24"]


def _went_back_together(folder: str) -> tuple[int, list[str], str]:
    engine = kit.build(
        mlp(5, 8, 1),
        Rewindable(every="2it"),
        Checkpoint(folder, every="4it", keep=2),
        DistributedDataParallel(timeout=60.0),
    )
    rewinding(engine, at=17, to=13, leave_out=3)
    kept: list[str] = []
    engine.connect(
        Events.CHECKPOINT_LOADED,
        lambda engine: kept.extend(sorted(os.listdir(folder))),
        phase=Phase.PERSIST,
        rank=10**6,
    )
    run(engine, kit.batches(60), max_epochs=1)
    return engine.state.iteration, kept, weights(engine)


@pytest.mark.moderate
def test_ranks_that_go_back_write_where_they_are_together(tmp_path: Path) -> None:
    one, other = run_together(_went_back_together, 2, str(tmp_path))
    assert one == other
    iteration, kept, _ = one
    assert iteration == 27
    # Not 16, of the way that was left; 4 is held while the run can go back to before 12 was written.
    assert [name[-2:] for name in kept] == ["04", "08", "12"]


def _go_back_alone() -> None:
    engine = kit.build(mlp(5, 8, 1), Rewindable(every="2it"), DistributedDataParallel(timeout=4.0))
    engine.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: engine.processes.rank and engine.rewind(3))
    run(engine, kit.batches(60), max_epochs=1)


@pytest.mark.slow
def test_a_rank_that_goes_back_alone_is_told_that_all_have_to() -> None:
    with pytest.raises(Failed) as raised:
        run_together(_go_back_alone, 2)
    assert "rewind() and restore() must be called on all ranks in the same iteration" in raised.value.errors[1]
    assert "rank 1 (pid" in raised.value.errors[0]
    assert "at ITERATION_COMPLETED, epoch 1, iteration 7" in raised.value.errors[0]


def test_going_back_for_ever_is_an_error() -> None:
    engine = build(Rewindable(every="2it"))
    engine.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: engine.rewind(3) and None)
    with pytest.raises(RuntimeError, match="goes back from iteration 7 for the 11th time without leaving out a batch"):
        run(engine, kit.batches(9), max_epochs=1)


@pytest.mark.parametrize("leave_out", ["3", [(1, 3)]])
def test_what_is_left_out_has_to_be_places(leave_out: Any) -> None:
    engine = build(Rewindable(every="2it"))
    engine.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: engine.rewind(3, leave_out=leave_out) and None)
    with pytest.raises(TypeError, match="expected a number of batches, or a list of places"):
        run(engine, kit.batches(9), max_epochs=1)
