"""What receivers declare to read and write: that it is known, and that the shipped ones do what they declare."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from signalfire import Engine, Events, Handler, on
from signalfire.declarations import THINGS
from tests.kit import shipped
from tests.watching import COMPOSITIONS, UNSEEN, Place, declared, watch


def test_a_handler_says_what_it_reads_and_writes() -> None:
    class Scaling(Handler):
        @on(Events.GRADIENTS_READY, reads=["rates"], writes=["gradients"])
        def scale(self, engine: Engine) -> None: ...

        @on(Events.EPOCH_STARTED)
        def undeclared(self, engine: Engine) -> None: ...

        @on(Events.ENDED, writes=["files"])
        def half(self, engine: Engine) -> None: ...

    scale, undeclared, half = Scaling.subscriptions
    assert (scale.reads, scale.writes) == ({"rates"}, {"gradients"})
    assert (undeclared.reads, undeclared.writes) == (None, None)
    assert (half.reads, half.writes) == (set(), {"files"})


def test_an_unknown_thing_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match=r"on\(writes\): 'gradient' is not one of batch, device"):
        on(Events.GRADIENTS_READY, writes=["gradient"])
    with pytest.raises(TypeError, match=r"on\(reads\)='gradients' is one string; write \['gradients'\]"):
        on(Events.GRADIENTS_READY, reads="gradients")


@pytest.mark.parametrize("kind", sorted(shipped(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_receiver_that_is_shipped_declares_what_it_uses(kind: type[Handler]) -> None:
    declared(kind)


def test_every_thing_is_used_by_a_handler_that_is_shipped() -> None:
    used = {thing for kind in shipped() for one in declared(kind).values() for thing in one[0] | one[1]}
    assert used == set(THINGS)


ALL = {place: things for kind in shipped() for place, things in declared(kind).items()}

# What is declared and not written in any of the runs, with the reason.
NOT_IN_THESE_RUNS: dict[tuple[str, str, str], str] = {}


@pytest.mark.slow
def test_receivers_write_what_they_declare_and_nothing_else(tmp_path: Path) -> None:
    changed: dict[Place, set[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, recipe in enumerate(COMPOSITIONS.values()):
            (tmp_path / str(number)).mkdir()
            for place, seen in watch(recipe, tmp_path / str(number)).items():
                changed[place] = changed.get(place, set()) | seen
    undeclared = {(*place, thing) for place, seen in changed.items() for thing in seen - ALL[place][1]}
    assert undeclared == set()
    unwritten = {
        (*place, thing) for place, (_, writes) in ALL.items() for thing in writes - changed.get(place, set()) - UNSEEN
    }
    print(sorted(unwritten))
    assert unwritten == set(NOT_IN_THESE_RUNS)
