"""What the tests of trainers share: samples that draw, and lives of a training that end in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Result", "Samples", "Tick", "kill_and_resume", "life", "nothing"]

Tick = Callable[[], None]
Result = dict[str, str]
"""A digest of each part of the state that a training ends with."""


def nothing() -> None:
    """The tick of a training that lives to its end."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw from every global generator, or none."""

    def __init__(self, draws: bool = True) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(3) + random.random() + float(np.random.rand()) if self.draws else torch.zeros(3)
        return torch.arange(3.0) * index / 22 + 0.1 * noise, torch.tensor([index / 22])


def life(train: Callable[..., Result], folder: Path, after: int | None = None, **options: Any) -> Result | None:
    """A training in a process of its own, which kills itself after so many ticks: then None."""
    folder.mkdir(parents=True, exist_ok=True)
    process = os.fork()
    if process == 0:
        ticks = 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            if after is not None and ticks > after:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with redirect_stdout(StringIO()):
                result = train(folder, tick, **options)
            (folder / "result.json").write_text(json.dumps([result, ticks]))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return None
    assert os.WEXITSTATUS(status) == 0
    found: Result = json.loads((folder / "result.json").read_text())[0]
    return found


def kill_and_resume(train: Callable[..., Result], folder: Path, cuts: Iterable[int], **options: Any) -> None:
    """Kill a training after so many ticks and start it again, for each of the cuts; assert that it ends as if it never was."""

    def ticks_of(name: str) -> int:
        return int(json.loads((folder / name / "result.json").read_text())[1])

    whole = life(train, folder / "whole", **options)
    assert whole is not None
    for cut in cuts:
        assert life(train, folder / str(cut), cut, **options) is None
        assert life(train, folder / str(cut), **options) == whole, f"killed after tick {cut}"
        assert ticks_of(str(cut)) <= ticks_of("whole") - cut + 3, "it began anew"
