"""Checks that ``build`` gives the same run however often it was called, by calling it twice or more for one seed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from signalfire import Engine, Events

from .contents import Content, are_times, contents, joined
from .runs import Run
from .shared import SharedError

__all__ = ["Built", "RepeatError"]


class RepeatError(SharedError):
    """Raised for a study whose ``build`` makes another run in each call for one seed."""


class Built:
    """What one call of ``build`` made; of the engine nothing is kept.

    Args:
        engine: The engine, which is about to be started.
        run: The function that runs it.
    """

    def __init__(self, engine: Engine, run: Run) -> None:
        self._seed = engine.seed
        self._things: dict[str, tuple[Any, Content]] = {}
        self._note(contents({"engine": engine, "run": run}))
        self._started = engine.connect(Events.STARTED, self._note_start)

    def _note_start(self, engine: Engine) -> None:
        """Note what is known once the engine has started: the data, and the bounds of the run."""
        data = None if engine.feed.source is None else engine.feed.source.given
        state = engine.state
        bounds = {name: getattr(state, name) for name in ("max_epochs", "max_iters", "max_steps", "max_seconds")}
        self._note(contents({"data": data, "bounds": bounds | {"epoch_length": state.epoch_length}}))
        self._started.detach()

    def _note(self, found: dict[str, Content]) -> None:
        for name, content in found.items():
            self._things[name] = _reference(content.thing), content._replace(thing=None)

    def difference(self, again: Built) -> str:
        """In what another call of build made something else; empty if it did not.

        Of what both calls returned, only the tensors are compared: what else a run changes there is noticed after the run.
        """
        shared = frozenset(self._shared_with(again))
        for name in sorted(self._things.keys() ^ again._things.keys()):
            if not _is_inside(name, shared):
                return f"{_plain(name)} is in only one of the runs"
        for name in (name for name in self._things if name in again._things):
            first, second = self._things[name][1].values, again._things[name][1].values
            for key in sorted(first.keys() | second.keys()):
                where = joined(name, key)
                if _differ(first.get(key), second.get(key), is_shared=_is_inside(where, shared)):
                    return (
                        f"{_plain(where)} was {_short(first.get(key))} in one call and {_short(second.get(key))} in "
                        "the next"
                    )
        return ""

    def check(self, again: Callable[[], Built], found: Built) -> None:
        """Raise RepeatError for a build that makes another run in each call.

        Args:
            again: Calls build once more. What is made in the first call and kept often makes that call another one, so that
                the second call is compared with a third one.
            found: The second call.
        """
        if self.difference(found) and (what := found.difference(again())):
            raise RepeatError(
                f"two calls to build({self._seed}) produced different runs: {what}. The results would depend on how "
                "often build is called; build must depend only on the seed and its other arguments, and must not "
                "modify anything outside build"
            )

    def _shared_with(self, again: Built) -> Iterator[str]:
        """The places of what both calls returned: the same things and containers."""
        for name in self._things.keys() & again._things.keys():
            (reference, content), (other_reference, other) = self._things[name], again._things[name]
            if reference is not None and other_reference is not None and reference() is other_reference():
                yield name
            for key, container in content.containers.items():
                if container is other.containers.get(key):
                    yield joined(name, key)


def _differ(first: str | None, second: str | None, *, is_shared: bool) -> bool:
    if first == second or are_times(first, second) or _are_of_generators(first, second):
        return False
    # What both calls returned may count its uses; its tensors are what runs are made of.
    return not is_shared or (_is_of_tensor(first) and _is_of_tensor(second))


def _reference(thing: Any) -> Any:
    try:
        return weakref.ref(thing)
    except TypeError:
        return None


def _are_of_generators(*texts: str | None) -> bool:
    """Whether values are generators of Python or NumPy, which begin with entropy of the system unless they are seeded."""
    return all(text is not None and text.startswith("a generator ") for text in texts)


def _is_inside(name: str, places: frozenset[str]) -> bool:
    """Whether something is at one of some places, or inside of what is there."""
    return name in places or any(name[:end] in places for end, sign in enumerate(name) if sign in ".[")


def _is_of_tensor(text: str | None) -> bool:
    return text is not None and text.startswith(("Tensor ", "Parameter ", "ndarray "))


def _plain(name: str) -> str:
    return name.removeprefix("engine.")


def _short(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= 60 else f"{text[:60]}..."
