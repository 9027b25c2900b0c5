"""What a run resumes from, and how its composition differs from the one that saved the state."""

from __future__ import annotations

from collections.abc import Mapping
from operator import length_hint
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..authoring.functions import called_by, names_in
from ..core.events import Events
from ..core.words import listed
from ..data.held_generators import draws_in_workers
from ..data.loading import draws_nothing
from ..data.streamed import inner, keeps_position
from ..models.modules import bare_name
from ..resuming.state_parts import composition, frozen_names

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["report_frozen", "report_resume", "say_left_out"]


def report_resume(engine: Engine, saved: Mapping[str, Any], allowed: frozenset[str], seed: int, changed: bool) -> None:
    """Report where a run resumes, and what differs from the run that saved the state.

    Args:
        engine: with the state in place.
        saved: the state.
        allowed: names of handlers that may differ.
        seed: the engine's own, before the state's took its place.
        changed: whether the weights were changed after they had been loaded.
    """
    if changed:
        engine.findings.report(
            "W35",
            "the weights were changed after load_state_dict(), but the weights in the loaded state will overwrite "
            "these changes",
            "to start from different weights, do not load the state; to change weights in a resumed run, change them "
            "at CHECKPOINT_LOADED",
        )
    position, origin = saved["engine"], saved.get("origin")
    source = "a loaded state" if origin is None else f"the checkpoint {origin['path']!r}"
    engine.findings.report(
        "W31",
        f"the run resumes from {source}: epoch {position['epoch']}, iteration {position['iteration']}",
        "to start a new run with the saved weights, call engine.load_weights(state)",
    )
    before = saved.get("composition", {})
    differences = [
        *_different_options(engine, before.get("options", {})),
        *_different_handlers(engine, before.get("handlers"), allowed),
        *_different_settings(engine, before.get("settings", {}), allowed),
        *_different_types(engine, saved["modules"]),
        *_different_data(engine, saved),
    ]
    if engine.seed_given and seed != engine.seed:
        differences.append(f"seed={seed} is not used, because the state has seed={engine.seed}")
    for update in engine.updates:  # what was saved is what applies from now on
        update.options = before.get("options", {}).get(update.name, update.options)
    if differences:
        _report_differences(
            engine,
            differences,
            "use the same setup; to change an optimizer option, set it in optimizer.param_groups at CHECKPOINT_LOADED; "
            "or start a new run with the saved weights: engine.load_weights(state)",
            meant=_functions_follow(engine),
        )
    _report_draws_in_workers(engine, saved)


def _report_differences(
    engine: Engine, differences: list[str], way_out: str, *, meant: bool, key: str | None = None
) -> None:
    """Report what differs in a resumed run; as information if functions of the user's may change it before it matters."""
    engine.findings.report(
        "W32",
        "before your functions run, " * meant
        + f"the setup differs from the setup of the run that saved the state: {'; '.join(differences)}",
        way_out,
        key=key,
        severity="info" if meant else None,
    )


def _functions_follow(engine: Engine) -> bool:
    """Whether functions of the user's may change the setup before the first batch of a resumed run."""
    events = Events.CHECKPOINT_LOADED, Events.EPOCH_STARTED
    return any(one.owner is None for event in events for one in engine.signal(event).connections)


def _toggles(engine: Engine) -> bool:
    """Whether the step freezes and unfreezes parameters, as of a critic while the generator is trained."""
    return any({"requires_grad", "requires_grad_"} & names_in(one) for one in called_by(engine))


def _report_draws_in_workers(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Report a resume inside an epoch of data that keeps its own position, whose workers begin with other random numbers."""
    source, position = engine.feed.source, saved["engine"]
    data = None if source is None or not saved["data"] else inner(source.given)
    dataset = getattr(data, "dataset", None)
    if data is None or not (keeps_position(data) and draws_in_workers(data)) or draws_nothing(dataset):
        return
    read = position["iteration"] - position["epoch_start"]
    if not position["epoch_open"] or read in (0, length_hint(data, -1)) or keeps_position(dataset):
        return
    engine.findings.report(
        "W24",
        f"the {type(data).__name__} continues after batch {read} of an epoch, but its {data.num_workers} workers "
        "restart their random numbers, so samples that draw random numbers differ from those of an uninterrupted run",
        "use a DataLoader, in which each sample is seeded separately; or use num_workers=0; or save only at the end of "
        "an epoch",
        key="resumed",
    )


def say_left_out(engine: Engine) -> None:
    """Say that a run begins at epoch 1 with weights of a whole state, of which the rest was left out.

    Where parameters are frozen, or a state is to be loaded, the weights alone are meant.
    """
    position, engine.snapshots.left_out = engine.snapshots.left_out, None
    begins = engine.state.iteration == 0 and not engine.snapshots.has_loaded_state
    if position is None or not begins or not position["iteration"]:
        return
    if all(one.requires_grad for one in engine.modules.parameters()):
        engine.findings.say(
            f"load_weights() received a whole state (epoch {position['epoch']}, iteration {position['iteration']}), "
            "but loaded only its weights. The optimizer is new, and the run starts at epoch 1. To continue the saved "
            "run, call engine.load_state_dict(state)"
        )


def _different_options(engine: Engine, options: Mapping[str, Any]) -> list[str]:
    found = []
    for update in engine.updates:
        before, now = options.get(update.name) or [], update.options or []
        if len(before) != len(now):
            continue
        for number, (then, here) in enumerate(zip(before, now, strict=True)):
            where = f" of group {number}" if len(now) > 1 else ""
            found += [
                f"{key}={here[key]!r}{where} is not used, because the state has {key}={then[key]!r}"
                for key in here
                if key in then and then[key] != here[key]
            ]
    return found


def _different_handlers(engine: Engine, before: Mapping[str, str] | None, allowed: frozenset[str]) -> list[str]:
    now = composition(engine)["handlers"]
    if before is None:
        return []
    left_out = [f"{name!r} ({kind})" for name, kind in before.items() if name not in now and name not in allowed]
    added = [f"{name!r} ({kind})" for name, kind in now.items() if name not in before and name not in allowed]
    other = [
        f"{name!r} is now of class {kind}, but was of class {before[name]}"
        for name, kind in now.items()
        if before.get(name, kind) != kind
    ]
    return [
        *([f"missing in this run: {', '.join(left_out)}"] if left_out else []),
        *([f"new in this run: {', '.join(added)}"] if added else []),
        *other,
    ]


def _different_settings(engine: Engine, before: Mapping[str, Any], allowed: frozenset[str]) -> list[str]:
    found, renamed = [], engine.state.metrics.renamed
    for name, now in composition(engine)["settings"].items():
        then = before.get(name, {}) if name not in allowed else {}
        if "monitor" in then:
            then = then | {"monitor": renamed.get(then["monitor"], then["monitor"])}
        found += [
            f"{name!r} has {key}={_shown(now[key])}, but had {key}={_shown(then[key])}"
            for key in now
            if key in then
            and now[key] != then[key]
            and not (key == "monitor" and _mean_one(engine, now[key], then[key]))
        ]
    return found


def _mean_one(engine: Engine, *monitors: object) -> bool:
    """Whether monitors name one metric: "val/loss" is "val_loss", and so is "loss" where only the validation has one."""
    metrics = engine.state.metrics
    names = [str(monitor).replace("/", "_") for monitor in monitors]
    validated = (f"val_{name}" for name in names if metrics.under(name) not in metrics.owners)
    return len({*names}) == 1 or any(metrics.under(name) in metrics.owners and name in names for name in validated)


def _shown(setting: Any) -> str:
    """A setting as it was written, a partial included."""
    if not isinstance(setting, dict) or "function" not in setting:
        return repr(setting)
    arguments = [repr(one) for one in setting.get("args", ())]
    arguments += [f"{key}={value!r}" for key, value in setting.items() if key not in ("function", "args")]
    return f"partial({', '.join([setting['function'], *arguments])})"


def report_frozen(engine: Engine, before: list[str]) -> None:
    """Report a resumed run that begins its first epoch with other frozen parameters than the state was saved with.

    Args:
        engine: the engine.
        before: the names of those that were frozen.
    """
    if different := _different_frozen(engine, before):
        only_trained = not any(one.startswith("now frozen") for one in different)  # which a new epoch may begin with
        way_out = (
            "freeze and unfreeze parameters before the run, or with Freezing; or do so at every EPOCH_STARTED, based on "
            "the epoch number"
        )
        meant = _toggles(engine) or (only_trained and _functions_follow(engine))
        _report_differences(engine, different, way_out, meant=meant, key="frozen")


def _different_frozen(engine: Engine, before: list[str]) -> list[str]:
    now = frozen_names(engine)
    if now is None:
        return []
    frozen, trained = [one for one in now if one not in before], [one for one in before if one not in now]
    return [f"now {word}: {listed(names, 3)}" for word, names in (("frozen", frozen), ("trained", trained)) if names]


def _different_types(engine: Engine, saved: Mapping[str, Any]) -> list[str]:
    values = {
        (root, bare_name(name)): value
        for root, tensors in saved.items()
        if isinstance(tensors, Mapping)
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }
    types = {
        (parameter.dtype, before.dtype)
        for root, module in engine.modules.items()
        for name, parameter in module.named_parameters()
        if (before := values.get((root, bare_name(name)))) is not None and before.dtype != parameter.dtype
    }
    return [f"weights are {now}, but were {then}" for now, then in sorted(types, key=str)]


def _different_data(engine: Engine, saved: Mapping[str, Any]) -> list[str]:
    source, data = engine.feed.source, saved["data"]
    shares = saved.get("shares", saved.get("processes", 1))
    if source is None or not data or shares != engine.group.data.world_size:
        return []
    if callable(getattr(inner(source.given), "of_epoch", None)):  # it is reloaded
        return []
    before, now = data.get("extent_now") or {}, source.extent_at(data)
    found = [
        f"the data has {now[key]} {key}, but had {before[key]}"
        for key in ("samples", "batches")
        if key in now and key in before and now[key] != before[key]
    ][:1]
    if before.get("sampler", now.get("sampler")) != now.get("sampler"):
        found.append(f"the sampler of the data is a {now.get('sampler')}, but was a {before['sampler']}")
    return found
