"""A run that resumes without some part of its state ends elsewhere: each control leaves one part out of the saved state.

The recipes and their cuts are those of `test_resume`.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from signalfire import Engine, Events, FindingWarning, Phase
from tests.kit import cleaned_up, digest, spread
from tests.resume_recipes import RECIPES
from tests.resume_runs import FOLDER, Cut, Saved, Whole, a_folder, loaded, resumed, run, whole

_clean_up = cleaned_up(FOLDER)

Forget = Callable[[Saved, Saved], None]
Where = Callable[[Cut, Saved, Whole], bool]

TRAINING = ("losses", "modules")


@dataclass(frozen=True)
class Control:
    """A part of the state that is left out before a run resumes.

    Attributes:
        recipe: which run.
        forget: called with a saved state, which it changes, and that of an engine which has just begun.
        where: at which cuts it has to be noticed; or at how many, where that depends on the numbers of the run.
        shows: in which parts of what is left it is noticed; the part itself is none.
    """

    recipe: str
    forget: Forget
    where: Where | int
    shows: tuple[str, ...] = TRAINING


def as_new(*paths: str) -> Forget:
    """What is there at these paths is as in an engine that has just begun."""

    def forget(saved: Saved, new: Saved) -> None:
        for path in paths:
            *outer, last = path.split(".")
            there, instead = saved, new
            for key in outer:
                there, instead = there[key], instead[key]
            there[last] = copy.deepcopy(instead[last])

    return forget


def instead(path: str, value: Any) -> Forget:
    """Something else is there at this path."""

    def forget(saved: Saved, new: Saved) -> None:
        *outer, last = path.split(".")
        for key in outer:
            saved = saved[key]
        saved[last] = value

    return forget


def tensors(of: str, *endings: str) -> Forget:
    """The tensors of a module with these endings are as in a new one."""

    def forget(saved: Saved, new: Saved) -> None:
        for key in saved["modules"][of]:
            if key.endswith(endings):
                saved["modules"][of][key] = new["modules"][of][key]

    return forget


def order(saved: Saved, new: Saved) -> None:
    """A position in the data without what its order was drawn from."""
    if "random" in saved["data"]:
        saved["data"]["random"] = new["random"]


def loader_generator(saved: Saved, new: Saved) -> None:
    """A loader's generator is as it was built."""
    for key in ("generators", "generators_now"):
        if key in saved["data"]:
            saved["data"][key] = new["data"]["generators_now"]


def sampler_epoch(saved: Saved, new: Saved) -> None:
    """A sampler did not receive the epoch."""
    for key in ("epochs", "epochs_now"):
        if key in saved["data"]:
            saved["data"][key] = new["data"]["epochs_now"]


def window_without(part: str, of: str = "main") -> Forget:
    """A window that was saved without a part of it; the gradients are those that there are without any."""

    def forget(saved: Saved, new: Saved) -> None:
        window = saved["updates"][of]["window"]
        if window is not None:
            value = window[part]
            window[part] = [None] * len(value) if part == "gradients" else [] if isinstance(value, list) else 0

    return forget


def going_on(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Iterations are still to come."""
    return cut.iteration < all_of_it.left.last


def begun(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Some iterations were made, and some are still to come."""
    return 0 < cut.iteration < all_of_it.left.last


def made(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Some iterations were made."""
    return cut.iteration > 0


def inside(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Some of an epoch's batches were taken, and some are still to come."""
    return cut.open and cut.within % 5 > 0 and cut.iteration < all_of_it.left.last


def in_epoch(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Some of an epoch's batches were taken, and its end was not emitted."""
    return cut.open and cut.within > 0


def later_epoch(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    return inside(cut, saved, all_of_it) and cut.epoch > 1


def stepped(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Steps were made, and more are to come."""
    return begun(cut, saved, all_of_it) and all(update["steps"] > 0 for update in saved["updates"].values())


def in_window(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """A window is open, and more is to come."""
    return going_on(cut, saved, all_of_it) and next(iter(saved["updates"].values()))["window"] is not None


def has(path: str) -> Where:
    """There is something at this path of the state."""

    def there(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
        value: Any = saved
        for key in path.split("."):
            value = value[key]
        return bool(value)

    return there


COUNTERS = as_new("engine.epoch", "engine.iteration", "engine.epoch_start", "engine.epoch_open")

CONTROLS: dict[str, Control] = {
    # the engine's own
    "weights": Control("windows", tensors("model", "weight", "bias"), going_on),
    "buffers": Control("windows", tensors("model", "running_mean", "running_var"), begun),
    "counters": Control("augmentation", COUNTERS, made),
    "steps": Control("sequences", as_new("updates.main.steps"), stepped),
    "optimizer": Control("windows", as_new("updates.main.optimizer"), stepped),
    "optimizer's moments": Control("windows", instead("updates.main.optimizer.state", {}), stepped),
    "optimizer of LBFGS": Control("closures", as_new("updates.main.optimizer"), stepped),
    "optimizer of the second update": Control("two updates", as_new("updates.generator.optimizer"), 8),
    "own parameters": Control("two updates", as_new("updates.generator.own_parameters"), 8),
    "window": Control("windows", instead("updates.main.window", None), in_window),
    "window's gradients": Control("pieces", window_without("gradients"), in_window),
    "window's count": Control("pieces", window_without("held"), in_window),
    "window of time chunks": Control("sequences", instead("updates.main.window", None), in_window),
    "window of one of two updates": Control("two updates", instead("updates.critic.window", None), 5),
    "window's batches for LBFGS": Control("closures", window_without("kept"), in_window),
    "window's batches for SAM": Control("sharpness", window_without("kept"), 7),
    "metrics": Control("windows", as_new("engine.metrics"), has("engine.metrics.values"), ("handlers.history",)),
    "stops": Control("stopping", instead("engine.stops", {}), 2),
    "stop of the epoch": Control("around the data", instead("engine.epoch_stop", None), has("engine.epoch_stop")),
    "seed": Control("a seed of its own", as_new("engine.seed"), going_on),
    "counts of events": Control("two updates", as_new("engine.fired"), 13),
    # random states
    "Python's random state": Control("windows", as_new("random.python"), going_on),
    "NumPy's random state": Control("windows", as_new("random.numpy"), going_on),
    "torch's random state": Control("windows", as_new("random.torch"), going_on),
    # data
    "position in the data": Control("windows", as_new("data"), inside),
    "what the order is drawn from": Control("windows", order, inside),
    "the loader's generator": Control("augmentation", loader_generator, later_epoch),
    "the epoch of a sampler": Control("sharpness", sampler_epoch, later_epoch),
    "the number of the pass": Control("workers", instead("data.number", 0), 3),
    "the data's own position": Control("unsized", as_new("data"), inside),
    # handlers
    "one cycle": Control("windows", as_new("handlers.lr_scheduling"), 12),
    "schedule of epochs": Control("augmentation", as_new("handlers.lr_scheduling"), 7),
    "warm-up chain": Control("workers", as_new("handlers.lr_scheduling"), 6),
    "warm-up chain of an update": Control("two updates", as_new("handlers.critic_rate"), 3),
    "phases": Control("sequences", as_new("handlers.lr_scheduling"), 12),
    "sequence of schedules": Control("around the data", as_new("handlers.lr_scheduling"), 17),
    "plateau": Control("stopping", as_new("handlers.lr_scheduling"), 3),
    "scaler": Control("windows", as_new("handlers.mixed_precision"), 12),
    "scalers": Control("two updates", as_new("handlers.mixed_precision"), 1),
    "EMA": Control("windows", as_new("handlers.ema"), has("handlers.ema.count"), ("exported",)),
    "SWA": Control("averages", as_new("handlers.swa"), has("handlers.swa.count"), ("exported",)),
    "SWA's annealing": Control("averages", instead("handlers.swa.scheduler", None), 7),
    "patience": Control("stopping", as_new("handlers.early_stopping"), has("handlers.early_stopping.best")),
    "values waited for": Control("stopping", instead("handlers.early_stopping.waited", 0), 6),
    "best weights": Control(
        "stopping", instead("handlers.early_stopping.weights", None), has("handlers.early_stopping.weights")
    ),
    "best checkpoints": Control("stopping", as_new("handlers.best"), 8, ("handlers.best",)),
    "seen values": Control("stopping", as_new("handlers.lr_scheduling.monitor"), 3),
    "partial sums": Control("windows", as_new("handlers.train_metrics"), in_epoch, ("handlers.history",)),
    "a torchmetrics metric": Control(
        "augmentation", as_new("handlers.train_metrics.f1"), in_epoch, ("handlers.history",)
    ),
    "history": Control("windows", as_new("handlers.history"), has("handlers.history.records"), ("handlers.history",)),
    "bad steps in a row": Control("two updates", as_new("handlers.non_finite_guard.in_a_row"), 5),
    "losses of a window": Control("sharpness", as_new("handlers.non_finite_guard.losses"), 1),
    "measured intervals": Control("augmentation", as_new("handlers.gradient_norms"), 9, ("engine",)),
    "mixed targets": Control("sharpness", instead("handlers.mixup", {}), 7),
    "cut and mixed targets": Control("closures", instead("handlers.cutmix", {}), in_window),
    "learned size": Control("pieces", instead("handlers.micro_batching", {}), 15),
    "CSV log": Control("logs", as_new("handlers.csv_logger"), begun, ("log.csv",)),
    "JSON log": Control("logs", as_new("handlers.json_lines_logger"), 1, ("log.jsonl",)),
    "TensorBoard's log": Control("logs", as_new("handlers.tensorboard"), 1, ("scalars",)),
}


class _Begun(Exception):
    pass


@cache
def just_begun(name: str) -> bytes:
    """The state of a new engine, in another process, before its first iteration."""
    buffer = io.BytesIO()

    def save(engine: Engine) -> None:
        torch.save(engine.state_dict(), buffer)
        raise _Begun

    def watch(engine: Engine) -> None:
        engine.connect(Events.EPOCH_STARTED, save, phase=Phase.PERSIST, rank=1000)

    with pytest.raises(_Begun):
        run(RECIPES[name], a_folder(), watch=watch)
    return buffer.getvalue()


def noticed(control: Control) -> tuple[list[Cut], list[Cut]]:
    """The cuts at which it is noticed, of those at which it was tried."""
    all_of_it, new = whole(control.recipe), loaded(just_begun(control.recipe))
    found, tried = [], []
    for cut in all_of_it.cuts:
        saved = cut.state()
        if not isinstance(control.where, int) and not control.where(cut, saved, all_of_it):
            continue
        before = digest(saved)
        control.forget(saved, new)
        if digest(saved) == before:  # there was nothing of it yet
            continue
        tried.append(cut)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FindingWarning)  # the ends of the run are to differ, not its warnings
                different = resumed(control.recipe, cut, saved).differences(all_of_it.left, cut)
        except (RuntimeError, ValueError):  # it cannot even resume
            found.append(cut)
            continue
        if any(part.startswith(control.shows) for part in different):
            found.append(cut)
    return found, tried


@pytest.mark.moderate
@pytest.mark.parametrize("part", spread(CONTROLS, 1))
def test_a_state_without_this_part_ends_elsewhere(part: str) -> None:
    where = CONTROLS[part].where
    found, tried = noticed(CONTROLS[part])
    if isinstance(where, int):
        assert len(found) >= where, f"noticed {', '.join(map(str, found))} alone"
    else:
        assert tried
        assert not [str(cut) for cut in tried if cut not in found]
