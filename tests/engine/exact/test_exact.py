"""What a loop of one's own uses for an exact resume: a plain loop, killed at a hundred points, ends as if it never was."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from signalfire.checkpoints import Content, Files
from signalfire.exact import CheckpointFolder, ResumableData, random_state, restore_random_state
from tests import kit

EPOCHS = 3
ACCUMULATED = 3


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw from every global generator."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(3) + random.random() + float(np.random.rand())
        return torch.arange(3.0) * index / 22 + 0.1 * noise, torch.tensor([index / 22])


def loader(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)


Tick = Callable[[str], None]


def nothing(place: str) -> None:
    pass


class Killing(Files):
    """Calls a function before each operation that changes the file system."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick

    def write(self, path: Path, content: Content) -> None:
        self.tick("write")
        super().write(path, content)

    def rename(self, old: Path, new: Path) -> None:
        self.tick("rename")
        super().rename(old, new)

    def sync(self, path: Path) -> None:
        self.tick("sync")
        super().sync(path)


def train(folder: Path | None, tick: Tick = nothing, workers: int = 0) -> nn.Module:
    """A plain loop with dropout, shuffling, augmentation, momentum, a schedule, and windows over batches."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    data = ResumableData(loader(workers))
    step = 0
    checkpoints = None if folder is None else CheckpointFolder(folder, sync=False, files=Killing(tick))
    if checkpoints is not None and (newest := checkpoints.newest()) is not None:
        step, state = newest.step, newest.state
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        data.load_state_dict(state["data"])
        for parameter, gradient in zip(model.parameters(), state["gradients"], strict=True):
            parameter.grad = gradient
        restore_random_state(state["random"])
    while data.epoch < EPOCHS:
        for x, y in data:
            tick("batch")
            F.mse_loss(model(x), y).div(ACCUMULATED).backward()
            tick("backward")
            step += 1
            if step % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            tick("step")
            if checkpoints is not None:
                checkpoints.save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(),
                        "data": data.state_dict(),
                        "gradients": [parameter.grad for parameter in model.parameters()],
                        "random": random_state(),
                    },
                    step=step,
                )
    return model


def killed(folder: Path, after: int, workers: int) -> bool:
    """One life of the training in a process of its own, which kills itself at a tick; whether it was killed."""
    process = os.fork()
    if process == 0:
        ticks = 0

        def tick(place: str) -> None:
            nonlocal ticks
            ticks += 1
            if ticks > after:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            train(folder, tick, workers)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("points", [3, pytest.param(100, marks=pytest.mark.campaign)])
def test_a_plain_loop_that_is_killed_again_and_again_ends_with_the_same_weights(tmp_path: Path, points: int) -> None:
    whole = train(None)
    draw = random.Random(1)
    lives = deaths = 0
    while deaths < points:
        folder = tmp_path / str(lives)
        lives += 1
        while deaths < points and killed(folder, draw.randrange(60), 0):
            deaths += 1
        if deaths < points:
            kit.assert_same(train(folder), whole)
    kit.assert_same(train(folder), whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_it_continues_after_every_batch(tmp_path: Path, workers: int) -> None:
    class Stop(Exception):
        pass

    whole = train(None, workers=workers)
    for cut in range(1, EPOCHS * len(loader()), 1 if workers == 0 else 4):
        seen = 0

        def tick(place: str, cut: int = cut) -> None:
            nonlocal seen
            seen += place == "batch"
            if seen > cut:
                raise Stop

        folder = tmp_path / f"{workers}-{cut}"
        with pytest.raises(Stop):
            train(folder, tick, workers)
        kit.assert_same(train(folder, workers=workers), whole)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(7)


@pytest.mark.parametrize("cut", range(1, 8))
def test_lists_and_streams_continue_where_they_were(cut: int) -> None:
    for data in ([*range(7)], DataLoader(Stream(), batch_size=None)):
        first, again = ResumableData(data), ResumableData(data)
        for place, _ in enumerate(first, 1):
            if place == cut:
                break
        again.load_state_dict(first.state_dict())
        rest = [*range(cut, 7)]
        if (isinstance(data, DataLoader) and rest) or isinstance(data, DataLoader):
            with pytest.warns(UserWarning, match="cannot skip batches"):
                found = list(again)
        else:
            found = list(again)
        assert [int(one) for one in found] == rest
        assert again.epoch == 1
        assert [int(one) for one in again] == [*range(7)]


def test_a_damaged_version_is_named_and_the_newest_good_one_is_taken(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3, 4):
        folder.save({"x": torch.tensor(step), "n": np.float64(0.5)}, step=step)
    assert folder.versions() == [f"step-{step:012d}" for step in (2, 3, 4)]
    file = tmp_path / "step-000000000004" / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="'step-000000000004' is damaged and is skipped"):
        newest = folder.newest()
    assert newest is not None
    assert (newest.step, newest.state) == (3, {"x": torch.tensor(3), "n": 0.5})
    folder.save({"x": torch.tensor(7)}, step=3)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        newest = folder.newest()
    assert newest is not None
    assert newest.state["x"] == 7
    assert CheckpointFolder(tmp_path / "none").newest() is None


def test_mistakes_are_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(TypeError, match=r"state\['model'\].*rejects a Linear"):
        folder.save({"model": nn.Linear(1, 1)}, step=1)
    with pytest.raises(TypeError, match="expected a mapping"):
        folder.save([1], step=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"step=-1"):
        folder.save({}, step=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        CheckpointFolder(tmp_path / "file")
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointFolder(tmp_path, keep=0)
    with pytest.raises(TypeError, match="an iterator can be read only once"):
        ResumableData(iter([1]))
    with pytest.raises(ValueError, match="expected a state from ResumableData"):
        ResumableData([1]).load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match="expected a state from random_state"):
        restore_random_state({"torch": torch.get_rng_state()})
    data = ResumableData(loader())
    next(iter(data))
    other = ResumableData(DataLoader(Augmented(), batch_size=3, shuffle=True))
    with pytest.raises(ValueError, match="batch"):
        other.load_state_dict(data.state_dict())


def test_iter_alone_draws_nothing_and_a_pass_begins_with_the_generators_it_was_given() -> None:
    torch.manual_seed(0)
    numbers: Any = [*range(8)]
    data = ResumableData(DataLoader(numbers, batch_size=2, shuffle=True))
    before = random_state()
    iter(data)
    assert torch.equal(before["torch"], torch.get_rng_state())
    first = torch.cat(list(data)).tolist()
    data.begin_with(before)
    torch.manual_seed(5)
    assert torch.cat(list(data)).tolist() == first
    assert torch.cat(list(data)).tolist() != first


def test_a_folder_takes_the_state_of_an_engine_after_a_run(tmp_path: Path) -> None:
    folder, straight = CheckpointFolder(tmp_path), kit.build(kit.linear(5, 1))
    straight.run(kit.batches(3), max_epochs=1)
    folder.save({"engine": straight.state_dict(), "note": "mine"}, step=1)
    straight.run(kit.batches(3), max_epochs=2)
    resumed = kit.build(kit.linear(5, 1))
    saved = folder.newest()
    assert saved is not None
    resumed.load_state_dict(saved.state["engine"])
    resumed.run(kit.batches(3), max_epochs=2)
    assert torch.equal(resumed.model.weight, straight.model.weight)
