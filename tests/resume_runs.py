"""Runs of the recipes, whole or resumed from a cut as by a new process, and what is left of each."""

from __future__ import annotations

import copy
import io
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from signalfire import Engine, Events, Handler, Phase, seed_everything
from signalfire.handlers import Checkpoint, MixedPrecision
from signalfire.testing import fingerprint
from tests.kit import MEMORY, digest
from tests.resume_corners import CORNERS
from tests.resume_recipes import RECIPES, Recipe

Saved = dict[str, Any]

FIRST_PROCESS, SECOND_PROCESS = 0, 99
FOLDER = Path(tempfile.mkdtemp(dir=MEMORY))


def a_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=FOLDER))


@dataclass(frozen=True)
class Cut:
    """Where a run was cut: its state as a file, and its folder as it was then."""

    epoch: int
    iteration: int
    within: int
    open: bool
    file: bytes
    folder: Path | None

    def state(self) -> Saved:
        return copy.deepcopy(loaded(self.file))

    def __str__(self) -> str:
        if not self.open:
            return f"at the end of epoch {self.epoch}"
        return f"after iteration {self.iteration}" if self.within else f"at the start of epoch {self.epoch}"


@cache
def loaded(file: bytes) -> Saved:
    """What is in a file, as a new process reads it. Reading takes longer than the rest of such a short run."""
    state: Saved = torch.load(io.BytesIO(file), weights_only=True)
    return state


@dataclass(frozen=True)
class Left:
    """What a run leaves: the losses of each iteration, and a digest of every part of the rest."""

    losses: dict[int, list[tuple[str, str]]]
    parts: dict[str, str]
    last: int

    def differences(self, other: Left, cut: Cut) -> set[str]:
        """What of this one, which resumed from a cut, differs from the other, which was not stopped."""
        names = self.parts.keys() | other.parts.keys()
        different = {name for name in names if self.parts.get(name) != other.parts.get(name)}
        ahead = {at: losses for at, losses in other.losses.items() if at > cut.iteration}
        return different | ({"losses"} if self.losses != ahead else set())


def run(
    recipe: Recipe,
    folder: Path,
    state: Saved | None = None,
    *,
    process: int = SECOND_PROCESS,
    watch: Callable[[Engine], None] | None = None,
) -> Left:
    """Run to the end in what might be another process: nothing is taken over from an earlier run but the state."""
    seed_everything(process)
    engine = recipe.build(folder)
    losses: dict[int, list[tuple[str, str]]] = {}

    def note(engine: Engine) -> None:
        update = engine.state.update
        reported = "none" if update.loss is None else float(update.loss).hex()
        losses.setdefault(engine.state.iteration, []).append((update.name, reported))

    engine.connect(Events.UPDATE_COMPLETED, note, phase=Phase.RECORD)
    if watch is not None:
        watch(engine)
    if state is not None:
        engine.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"run\(\): nothing to do")
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")  # of one whose sums are left out
        engine.run(recipe.data(), **recipe.bounds)
    parts: dict[str, str] = fingerprint(engine)
    parts["exported"] = digest(engine.weights())
    if recipe.writes:
        parts |= logs_in(folder)
        if state is None or "origin" in state:  # in one without, the owner of the files is unknown
            parts |= kept_of(engine)
    return Left(losses, parts, engine.state.iteration)


def logs_in(folder: Path) -> dict[str, str]:
    """What those who read the logs find in them."""
    found = {name: (folder / name).read_text() for name in ("log.csv", "log.jsonl") if (folder / name).exists()}
    if (folder / "events").exists():
        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports everything that a resumed run cuts off
        reader = EventAccumulator(str(folder / "events"))
        reader.Reload()
        scalars = {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
        found["scalars"] = repr(sorted(scalars.items()))
    return found


def kept_of(engine: Engine) -> dict[str, str]:
    """What each Checkpoint has kept: the values and the content, in its order, whatever the files are called."""
    found = {}
    for name, handler in engine.handlers.items():
        if isinstance(handler, Checkpoint):
            states = [Checkpoint.load(handler.folder / one) for one, _ in handler.kept]
            contents = [digest({key: part for key, part in state.items() if key != "origin"}) for state in states]
            found[f"kept by {name}"] = repr(
                [(value, one) for (_, value), one in zip(handler.kept, contents, strict=True)]
            )
    return found


@dataclass(frozen=True)
class Whole:
    """A run that was never stopped, with the cuts at which others resume from it."""

    left: Left
    cuts: list[Cut]
    checkpoints: list[
        tuple[str, Cut]
    ]  # each that was there to be loaded at a cut: when it was new, and when it was about to go
    with_state: set[type[Handler]]
    reported: set[str]  # why steps were skipped, and how the scale moved


def copied(folder: Path) -> Path:
    """A copy of a folder, without the files that a thread of a logger removes meanwhile, since it has sent what is in them."""

    def copy(source: str, target: str) -> str:
        with suppress(FileNotFoundError):
            shutil.copy2(source, target)
        return target

    return Path(shutil.copytree(folder, a_folder(), copy_function=copy, dirs_exist_ok=True))


@cache
def whole(name: str) -> Whole:
    recipe, folder = (RECIPES | CORNERS)[name], a_folder()
    cuts: list[Cut] = []
    checkpoints: list[tuple[str, Cut]] = []
    with_state: set[type[Handler]] = set()
    reported: set[str] = set()

    def save(engine: Engine) -> None:
        buffer, state, saved = io.BytesIO(), engine.state, engine.state_dict()
        torch.save(saved, buffer)
        there = copied(folder) if recipe.writes else None
        cut = Cut(state.epoch, state.iteration, state.epoch_iteration, state.epoch_open, buffer.getvalue(), there)
        cuts.append(cut)
        with_state.update(type(one) for key, one in engine.handlers.items() if saved["handlers"][key])
        for one in engine.handlers.values():
            if isinstance(one, Checkpoint) and not one.weights_only:
                checkpoints.extend((f"{one.name}/{kept}", cut) for kept, _ in one.kept)

    def watch(engine: Engine) -> None:
        engine.connect(
            Events.EPOCH_STARTED | Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED,
            save,
            phase=Phase.PERSIST,
            rank=1000,
        )
        engine.connect(Events.OPTIMIZER_STEP_COMPLETED, look, phase=Phase.RECORD)
        engine.connect(Events.TERMINATED, lambda engine: reported.add(f"stopped: {engine.state.stop_reason}"))

    scales: dict[str, float] = {}

    def look(engine: Engine) -> None:
        update = engine.state.update
        if update.skipped is not None:
            reported.add(update.skipped)
        for one in engine.handlers.values():
            if isinstance(one, MixedPrecision) and one.scalers:
                scale = one.scalers[update.name].get_scale()
                before = scales.setdefault(update.name, scale)
                reported.update(
                    {"the scale grew"} if scale > before else {"the scale shrank"} if scale < before else ()
                )
                scales[update.name] = scale

    left = run(recipe, folder, process=FIRST_PROCESS, watch=watch)
    there = dict(reversed(checkpoints)).items() | dict(checkpoints).items()
    return Whole(left, cuts, sorted(there, key=lambda one: (one[0], one[1].iteration)), with_state, reported)


def resumed(name: str, cut: Cut, state: Saved | None = None) -> Left:
    """What is left of a run that resumes from a cut, with the state as it was saved or another in its place."""
    folder = a_folder()
    if cut.folder is not None:
        shutil.copytree(cut.folder, folder, dirs_exist_ok=True)
    try:
        return run((RECIPES | CORNERS)[name], folder, cut.state() if state is None else state)
    finally:
        shutil.rmtree(folder)
