"""Cut at every iteration and epoch end, and gone on in new processes from what was written to disk, a run of two, three or four
processes ends as if it had never been stopped; and each part of the state of a process that is left out is noticed.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.distributed  # which torch's DDP imports late: here once, and not in every process
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, Phase, Update, allow, seed_everything
from signalfire.authoring.versions import NO_SYNC_OF_BUFFERS
from signalfire.distributed import process_group
from signalfire.handlers import (
    EMA,
    Accuracy,
    Average,
    Checkpoint,
    CSVLogger,
    DistributedDataParallel,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    Validation,
)
from signalfire.testing import fingerprint
from tests.kit import MEMORY, cleaned_up, quick
from tests.processes import Failed, run_together

State = dict[str, Any]

WITHIN = "within"  # in front of the parts of a part that differs; see differences.py

WIDTH = 24
EPOCHS, SAMPLES, BATCH, BATCHES = 2, 34, 4, 9  # the last batch of an epoch has two samples


class Net(nn.Module):
    """Registers its layers in the order of their use, so that DDP orders its buckets anew after the first backward.

    It draws from each of the global generators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(5, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * (1 + 0.2 * random.random()) + 0.2 * float(np.random.rand())
        hidden = self.dropout(torch.tanh(self.norm(self.lift(x))))
        for layer in (self.first, self.second, self.third):
            hidden = torch.tanh(layer(hidden))
        scores: Tensor = self.head(hidden)
        return scores


class Distributed(DistributedDataParallel):
    """With buckets of 2 KiB, so that a small model has several."""

    def __init__(self) -> None:
        super().__init__(timeout=120, name="distributed")
        self.options |= {"bucket_cap_mb": 2 / 1024}  # type: ignore[dict-item]


class Augmented(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples with noise from each of the global generators, and their indices."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 5, generator=generator)
        self.y = torch.randint(3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.randn(5) + float(np.random.randn()) + random.gauss(0, 1)
        return self.x[index] + 0.3 * noise, self.y[index], index


@dataclass(frozen=True)
class Setting:
    """A run: of how many processes, with how many workers each, and how its checkpoints are written."""

    size: int = 2
    workers: int = 0
    asynchronous: bool = False
    distributed: type[Distributed] = Distributed
    epochs: int = EPOCHS
    patience: int = 20
    batch: int = BATCH

    def loader(self) -> DataLoader[Any]:
        return DataLoader(Augmented(), self.batch, shuffle=True, num_workers=self.workers)

    def build(self, folder: Path) -> Engine:
        torch.manual_seed(0)
        model = Net()
        evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=model)
        evaluator.attach(Metrics(loss=Average(), accuracy=Accuracy()))
        adam = partial(torch.optim.Adam, lr=1e-3)
        engine = Engine(Update.supervised(nn.functional.cross_entropy, adam), model=model, seed=0)
        engine.attach(
            self.distributed(),
            Metrics(train_loss=Average(), train_accuracy=Accuracy(), name="train_metrics"),
            GradientAccumulation(2),
            GradientClipping(max_norm=0.5),
            LRScheduling(partial(CosineAnnealingLR, T_max=8)),
            EMA(0.9),
            Validation(evaluator, DataLoader(Augmented(11), BATCH), every="0.5ep"),
            EarlyStopping("loss", patience=self.patience),
            CSVLogger(folder / "log.csv", every="1it"),
            Checkpoint(folder, every="1it", keep=100, asynchronous=self.asynchronous, name="every"),
            Checkpoint(folder, every="1ep", keep=100, asynchronous=self.asynchronous, name="epoch", filename="end-{epoch}"),
            Checkpoint(folder / "best", monitor="loss", keep=2, asynchronous=self.asynchronous, name="best"),
            History(),
        )  # fmt: skip
        return engine


@dataclass(frozen=True)
class Left:
    """What a run left behind: in a process, and (on rank 0) on the disk."""

    parts: dict[str, str]
    metrics: dict[str, Any]
    iteration: int
    steps: int
    stop_reason: str | None
    kept: dict[str, list[tuple[str, float | None]]] = field(default_factory=dict)
    rows: str = ""
    seen: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # by iteration: the epoch, and which samples
    reported: tuple[str, ...] = ()  # the warnings

    def differences(self, other: Left) -> list[str]:
        names = self.parts.keys() | other.parts.keys()
        different = sorted(name for name in names if self.parts.get(name) != other.parts.get(name))
        return different + [
            part
            for part in ("metrics", "iteration", "steps", "stop_reason", "kept", "rows")
            if getattr(self, part) != getattr(other, part)
        ]


def run(setting: Setting, folder: Path, path: Path | None, edit: Callable[[State], None] | None, seed: int) -> Left:
    """In one of the processes: train to the end, from a checkpoint if there is one."""
    engine = setting.build(folder)
    seen: dict[int, tuple[int, list[int]]] = {}

    def note(engine: Engine) -> None:
        batch, state = engine.state.batch, engine.state
        seen[state.iteration] = state.epoch, [] if batch is None else batch[2].tolist()

    engine.connect(Events.ITERATION_COMPLETED, note, phase=Phase.RECORD)
    rank = engine.processes.rank
    seed_everything(seed + rank)
    if path is not None:
        state = Checkpoint.load(path)
        if edit is not None:
            edit(state)
        engine.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state_of_run = engine.run(setting.loader(), max_epochs=setting.epochs)
    checkpoints = [one for one in engine.handlers.values() if isinstance(one, Checkpoint)]
    parts: dict[str, str] = fingerprint(engine)
    return Left(
        parts,
        dict(state_of_run.metrics),
        state_of_run.iteration,
        engine.updates[0].steps,
        state_of_run.stop_reason,
        {one.name: one.kept for one in checkpoints},
        (folder / "log.csv").read_text() if rank == 0 else "",
        seen,
        tuple(str(one.message) for one in caught),
    )


FOLDER = Path(tempfile.mkdtemp(dir=MEMORY))
_clean_up = cleaned_up(FOLDER)


def a_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=FOLDER))


@cache
def whole(setting: Setting) -> tuple[list[Left], Path]:
    """A run that was not stopped, and its folder."""
    folder = a_folder()
    return run_together(run, setting.size, setting, folder, None, None, 0), folder


def cuts(folder: Path) -> list[Path]:
    """The checkpoints of each iteration and each epoch's end, by their age."""
    return sorted([*folder.glob("every-*"), *folder.glob("end-*")], key=lambda one: one.stat().st_mtime_ns)


def resumed_from_all(
    setting: Setting, folder: Path, paths: list[Path], edit: Callable[[State], None] | None
) -> list[Left]:
    """In one of the processes: resume from each of the checkpoints, one after the other, each in a folder as it was then."""
    processes = process_group()
    left = []
    for path in paths:
        there = Path(processes.broadcast(str(as_it_was(folder, path)) if processes.is_rank_zero else None))
        left.append(run(setting, there, there / path.name, edit, 100))
        if processes.is_rank_zero:
            shutil.rmtree(there)
    return left


def as_it_was(folder: Path, path: Path) -> Path:
    """A copy of the folder. What was written after the checkpoint is there, too: a resumed run deals with it."""
    return Path(shutil.copytree(folder, a_folder(), dirs_exist_ok=True))


def resumed(setting: Setting, paths: list[Path], edit: Callable[[State], None] | None = None) -> list[list[Left]]:
    """What is left of the runs that resume from these checkpoints in new processes: for each, by rank."""
    by_rank = run_together(resumed_from_all, setting.size, setting, paths[0].parent, paths, edit)
    return [list(one) for one in zip(*by_rank, strict=True)]


def wrong_ones(
    setting: Setting, paths: list[Path], edit: Callable[[State], None] | None = None
) -> dict[str, list[str]]:
    """What differs from the run that was not stopped, by the checkpoint from which a run resumed and the rank."""
    expected, _ = whole(setting)
    return {
        f"{path.name}, rank {rank}": different
        for path, ranks in zip(paths, resumed(setting, paths, edit), strict=True)
        for rank, left in enumerate(ranks)
        if (different := left.differences(expected[rank]))
    }


SETTINGS = {
    "2 processes": Setting(2),
    "2 processes, checkpoints in a thread": Setting(2, asynchronous=True),
    "2 processes, 2 workers": Setting(2, workers=2),
    "2 processes, stopped early": Setting(2, epochs=4, patience=2),
    "3 processes": Setting(3),
    "3 processes, checkpoints in a thread": Setting(3, asynchronous=True),
    "4 processes": Setting(4),
}


TURNS = {size: -(-BATCHES // size) for size in (1, 2, 3, 4)}


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("name", "every"), quick([("2 processes", 5), *((name, 1) for name in SETTINGS)], ("2 processes", 5))
)
def test_a_run_resumed_from_any_checkpoint_ends_as_the_one_that_was_not_stopped(name: str, every: int) -> None:
    """From each of them, or from every fifth."""
    setting = SETTINGS[name]
    ranks, folder = whole(setting)
    paths = cuts(folder)
    if "stopped" in name:
        assert ranks[0].stop_reason is not None
        assert ranks[0].iteration < setting.epochs * TURNS[setting.size]
    else:
        assert ranks[0].iteration == EPOCHS * TURNS[setting.size]
        assert len(paths) == EPOCHS * (TURNS[setting.size] + 1)
    assert any(loaded(path)["updates"]["main"]["window"] for path in paths)
    assert not wrong_ones(setting, paths[every // 2 :: every])
    weights = {(one.parts["modules.model"], one.parts["updates.main"], one.parts["engine"]) for one in ranks}
    assert len(weights) == 1


@cache
def loaded(path: Path) -> State:
    return Checkpoint.load(path)


# ---- controls ---------------------------------------------------------------------------------------------------------


class NotAsBefore(Distributed):
    """Lets DDP order its buckets anew after the first backward of each run."""

    def _wrap(self, root: str, module: nn.Module, parameters: list[nn.Parameter], *, carries: bool) -> Any:
        wrapped = super()._wrap(root, module, parameters, carries=carries)
        wrapped.ddp = TorchDDP(wrapped.ddp.module, **NO_SYNC_OF_BUFFERS, **self.options)  # type: ignore[arg-type]
        return wrapped


@pytest.mark.slow
def test_the_model_does_not_hide_the_order_of_the_buckets() -> None:
    """With buckets that are ordered anew after the first backward, three processes do not resume exactly."""
    setting = Setting(3, distributed=NotAsBefore)
    paths = cuts(whole(setting)[1])
    wrong = wrong_ones(setting, paths)
    # The first window is two iterations long: before its end nothing was reduced, and a new run is as good as the old one.
    going_on = [path for path in paths if 1 < loaded(path)["engine"]["iteration"] < EPOCHS * TURNS[3]]
    assert {reported.split(",")[0] for reported in wrong} == {path.name for path in going_on}


def without(*path: str) -> Callable[[State], None]:
    """Leave a part of what differs in rank 1 out: then it has that of rank 0."""

    def edit(state: State) -> None:
        part: Any = state["ranks"]["1"]
        for key in path[:-1]:
            if part is not None and part[0] == WITHIN:
                part = part[1].get(key)
        if part is not None and part[0] == WITHIN:
            part[1].pop(path[-1], None)

    return edit


def parts_in(difference: Any, *path: str) -> set[tuple[str, ...]]:
    """The parts of the state that differ, at most four names deep."""
    kind, inner = difference
    if kind != WITHIN or len(path) == 4:
        return {path}
    return set().union(*(parts_in(part, *path, str(key)) for key, part in inner.items()))


# The parts of rank 1's state, and in what of a run it is noticed that they are left out.
CONTROLS: dict[tuple[str, ...], set[str]] = {
    ("random", "python"): {"modules.model"},
    ("random", "numpy"): {"modules.model"},
    ("random", "torch"): {"modules.model"},
    ("updates", "main", "window", "gradients"): {"modules.model"},
    ("handlers", "train_metrics", "train_loss"): {"handlers.history"},
    ("handlers", "train_metrics", "train_accuracy"): {"handlers.history"},
}
# Parts that differ, too, but on which nothing depends.
WITHOUT_EFFECT = {
    ("handlers", "csv_logger"): "rank 0 alone writes",
    ("modules", "model", "norm.running_mean"): "rank 0's are taken before anything uses them",
    ("modules", "model", "norm.running_var"): "rank 0's are taken before anything uses them",
}


def at_most_four(part: tuple[str, ...]) -> bool:
    return any(part[: len(known)] == known for known in (*CONTROLS, *WITHOUT_EFFECT))


@pytest.mark.moderate
def test_there_is_a_control_for_each_part_that_differs_between_processes() -> None:
    found = set().union(*(parts_in(loaded(path)["ranks"]["1"]) for path in cuts(whole(Setting(2))[1])))
    assert {known for known in (*CONTROLS, *WITHOUT_EFFECT) if any(p[: len(known)] == known for p in found)} == {
        *CONTROLS,
        *WITHOUT_EFFECT,
    }
    assert not {part for part in found if not at_most_four(part)}


@pytest.mark.slow
@pytest.mark.parametrize("part", CONTROLS, ids=".".join)
def test_a_part_of_the_state_of_rank_1_that_is_left_out_is_noticed(part: tuple[str, ...]) -> None:
    setting = Setting(2)
    paths = [path for path in cuts(whole(setting)[1]) if differs(loaded(path)["ranks"]["1"], part)]
    wrong = wrong_ones(setting, paths, without(*part))
    last = EPOCHS * TURNS[2]  # in which rank 1 has no batch
    for path in paths:
        at = loaded(path)["engine"]
        if at["epoch_open"] if part[0] == "handlers" else at["iteration"] < last - 1:
            for rank in (0, 1):
                assert CONTROLS[part] <= set(wrong.get(f"{path.name}, rank {rank}", ())), path.name


def differs(difference: Any, part: tuple[str, ...]) -> bool:
    return any(found[: len(part)] == part for found in parts_in(difference))


@pytest.mark.slow
def test_all_of_the_state_of_rank_1_has_a_part_in_the_run() -> None:
    """Without any of it, rank 1 learns that it has none."""
    setting = Setting(2)
    path = cuts(whole(setting)[1])[2]
    errors = errors_of(resumed_from_all, 2, setting, path.parent, [path], lambda state: state["ranks"].clear())
    assert "only the part of rank 0, not the part of rank 1" in errors[1]
    assert errors.keys() == {0, 1}


# ---- another number of processes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", quick(["inside an epoch", "in the next epoch", "at the end of an epoch"], "inside an epoch")
)
@pytest.mark.parametrize(("before", "after"), quick([(2, 1), (1, 2), (2, 3), (3, 2)], (1, 2)))
def test_with_another_number_of_processes_no_batch_is_left_out(before: int, after: int, where: str) -> None:
    ranks, folder = whole(Setting(before))
    turns = TURNS[before]
    iteration = {"inside an epoch": 2, "in the next epoch": turns + 2, "at the end of an epoch": turns}[where]
    name = "end-1" if "end" in where else f"every-epoch{1 + iteration // turns:04d}-iter{iteration:08d}"
    setting = replace(Setting(after), epochs=EPOCHS + 1)
    (left,) = zip(*resumed_as(setting, [folder / name]), strict=True)

    epoch = 1 + (iteration // turns)
    taken = 0 if "end" in where else (iteration - (epoch - 1) * turns) * before // after  # turns that count as taken
    expected = iteration + (TURNS[after] - taken) + (setting.epochs - epoch) * TURNS[after]
    for rank, one in enumerate(left):
        assert one.iteration == expected
        assert max(one.seen.values())[0] == setting.epochs
        assert (
            len(
                [
                    reported
                    for reported in one.reported
                    if f"world size {before}, and the run resumes with world size {after}" in reported
                ]
            )
            == 1
        ), rank
        assert {part: one.parts[part] for part in ("modules.model", "updates.main", "engine")} == {
            part: left[0].parts[part] for part in ("modules.model", "updates.main", "engine")
        }
    order = [ranks[turn % before].seen[(epoch - 1) * turns + turn // before + 1][1] for turn in range(BATCHES)]
    for number in range(epoch, setting.epochs + 1):
        seen = [
            left[rank].seen[at][1]
            for at in sorted(left[0].seen)
            if left[0].seen[at][0] == number
            for rank in range(after)
        ]
        batches = [batch for batch in seen if batch]
        if number == epoch and taken * after < BATCHES and "end" not in where:
            assert batches == order[taken * after :]  # the same order, from where it was cut, or a little before
        else:
            assert sorted(chain.from_iterable(batches)) == list(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_with_another_number_of_processes_and_steps_of_the_same_size_no_sample_is_left_out(
    before: int, after: int
) -> None:
    setting = Setting(before, batch=BATCH // before)
    ranks, folder = whole(setting)
    steps, cut = BATCHES, BATCHES + 5  # five steps into the second epoch
    (left,) = zip(
        *resumed_as(replace(setting, size=after, batch=BATCH // after), [folder / f"every-epoch0002-iter{cut:08d}"]),
        strict=True,
    )

    def order(of: Sequence[Left], first: int) -> list[int]:
        return [index for at in range(first, EPOCHS * steps + 1) for one in of for index in one.seen[at][1]]

    assert [one.iteration for one in left] == [EPOCHS * steps] * after
    assert order(left, cut + 1) == order(ranks, cut + 1)
    assert len(order(left, cut + 1)) == SAMPLES - 5 * BATCH


def resumed_as(setting: Setting, paths: list[Path]) -> list[list[Left]]:
    """As `resumed`, in another number of processes than the run that was cut."""
    return run_together(resumed_from_all, setting.size, setting, paths[0].parent, paths, None)


# ---- what is refused ---------------------------------------------------------------------------------------------------


def errors_of(function: Callable[..., Any], size: int, *args: Any) -> dict[int, str]:
    """The processes' errors if they fail. The exception is dropped: no process forked later may free what its frames hold."""
    try:
        run_together(function, size, *args)
    except Failed as failed:
        return failed.errors
    return {}


def with_a_state_of_rank_1(folder: Path) -> None:
    setting = Setting(2)
    states: list[State] = []
    engine = setting.build(folder)

    def save(engine: Engine) -> None:
        states[:] = engine.processes.gather(engine.state_dict())

    engine.connect(Events.ITERATION_COMPLETED(once=3), save, phase=Phase.PERSIST)
    with allow("W50"):  # it is validated with samples that are augmented
        engine.run(setting.loader(), max_iters=3, check=False)
    other = setting.build(folder)
    other.load_state_dict(states[1])
    other.run(setting.loader(), max_epochs=EPOCHS)


def fails_alike(folder: Path, fails: bool) -> list[int]:
    """Where a script begins that resumes from what is there; all of its processes fail at the same place."""
    torch.manual_seed(0)
    engine = Engine(
        Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)), model=nn.Linear(2, 1), seed=0
    )
    engine.attach(DistributedDataParallel(timeout=120), Checkpoint(folder, every="2it", keep=3, resume=True))
    begun: list[int] = []
    engine.connect(Events.CHECKPOINT_LOADED, lambda engine: begun.append(engine.state.iteration))

    @engine.on(Events.BACKWARD_COMPLETED(once=5))
    def fail(engine: Engine) -> None:
        if fails:
            raise ValueError("this sample is broken")

    with suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it resumes from an older one
        engine.run([(torch.ones(2, 2), torch.ones(2, 1))] * 12, max_epochs=1)
    return begun


@pytest.mark.slow
def test_a_start_of_which_all_processes_fail_alike_counts_as_one_run() -> None:
    folder = a_folder()
    begun = [run_together(fails_alike, 2, folder, True)[0] for _ in range(5)]
    assert begun == [[], [4], [4], [4], [2]], (
        "three runs failed from the fourth iteration on, and the next passes it over"
    )


def ends_early() -> str:
    engine = Engine(
        Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)), model=nn.Linear(2, 1), seed=0
    )
    engine.attach(DistributedDataParallel(timeout=120))
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 4
    engine.run(data, max_epochs=1)
    if engine.processes.rank == 1:
        dist.destroy_process_group()  # or it would wait for the other before it ends
        return ""
    with pytest.raises(RuntimeError) as raised:
        engine.run(data, max_epochs=2)
    return "\n".join(raised.value.__notes__)


@pytest.mark.moderate
def test_a_run_that_a_process_does_not_begin_any_more_says_so() -> None:
    reported, _ = run_together(ends_early, 2)
    assert "Call run() and evaluate() either on all ranks" in reported


@pytest.mark.slow
def test_the_state_of_rank_1_alone_is_refused_by_rank_0() -> None:
    errors = errors_of(with_a_state_of_rank_1, 2, a_folder())
    assert errors.keys() == {0, 1}
    assert "the loaded state contains only the part of rank 1, not the part of rank 0" in errors[0]


def with_different_checkpoints(folder: Path, paths: list[Path]) -> None:
    setting = Setting(2)
    engine = setting.build(folder)
    engine.load_state_dict(Checkpoint.load(paths[engine.processes.rank]))
    engine.run(setting.loader(), max_epochs=EPOCHS)


@pytest.mark.moderate
@pytest.mark.parametrize(
    "names",
    [
        ("every-epoch0001-iter00000003", "every-epoch0001-iter00000004"),
        (
            "every-epoch0001-iter00000005",
            "end-1",
        ),  # the same iteration, before the epoch's end was emitted and after it
    ],
)
def test_processes_that_loaded_different_checkpoints_are_refused(names: tuple[str, str]) -> None:
    folder = whole(Setting(2))[1]
    errors = errors_of(with_different_checkpoints, 2, a_folder(), [folder / name for name in names])
    assert errors.keys() == {0, 1}
    for error in errors.values():
        assert "the ranks have loaded different states" in error


@pytest.mark.slow
def test_processes_that_loaded_checkpoints_of_different_runs_are_refused() -> None:
    """They were at the same position, but not the same run."""
    folders = [whole(setting)[1] for setting in (Setting(2), Setting(3))]
    paths = [folder / "every-epoch0001-iter00000003" for folder in folders]
    errors = errors_of(with_different_checkpoints, 2, a_folder(), paths)
    assert errors.keys() == {0, 1}
    for error in errors.values():
        assert "the ranks have loaded different states" in error
