"""What receivers declare to read and write: that it is known, and that the shipped ones do what they declare."""

from __future__ import annotations

import warnings
from operator import attrgetter
from pathlib import Path

import pytest

from signalfire import Engine, Events, Handler, on
from signalfire.declarations import THINGS
from tests.kit import shipped
from tests.processes import run_together
from tests.reading import MORE, TOGETHER, read_by
from tests.watching import COMPOSITIONS, UNSEEN, Place, declared, watch

NAME = attrgetter("__name__")


def test_a_handler_says_what_it_reads_and_writes() -> None:
    class Scaling(Handler):
        @on(Events.GRADIENTS_READY, reads=["rates"], writes=["gradients"])
        def scale(self, engine: Engine) -> None: ...

        @on(Events.EPOCH_STARTED)
        def undeclared(self, engine: Engine) -> None: ...

        @on(Events.ENDED, writes=["files"])
        def half(self, engine: Engine) -> None: ...

    scale, undeclared, half = Scaling.subscriptions
    assert (scale.reads, scale.writes) == (frozenset({"rates"}), frozenset({"gradients"}))
    assert (undeclared.reads, undeclared.writes) == (None, None)
    assert (half.reads, half.writes) == (frozenset(), frozenset({"files"}))


def test_an_unknown_thing_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match=r"on\(writes\): 'gradient' is not one of batch, device"):
        on(Events.GRADIENTS_READY, writes=["gradient"])
    with pytest.raises(TypeError, match=r"on\(reads\)='gradients' is one string; write \['gradients'\]"):
        on(Events.GRADIENTS_READY, reads="gradients")


@pytest.mark.parametrize("kind", sorted(shipped(), key=NAME), ids=NAME)
def test_every_receiver_that_is_shipped_declares_what_it_uses(kind: type[Handler]) -> None:
    declared(kind)


def test_every_thing_is_used_by_a_handler_that_is_shipped() -> None:
    used = {thing for kind in shipped() for one in declared(kind).values() for thing in one[0] | one[1]}
    assert used == set(THINGS)


ALL = {place: things for kind in shipped() for place, things in declared(kind).items()}

# Receivers that write what they declare in none of these runs, with the reason.
NOT_IN_THESE_RUNS = {
    ("DeviceTransfer", "move_model"): "there is one device",
    ("DeviceTransfer", "move_batch"): "there is one device",
    ("Distribution", "set_weight"): "there is one process",
    ("Distribution", "sync_buffers"): "there is one process",
    ("DistributedDataParallel", "broadcast_weights"): "there is one process",
    ("DistributedDataParallel", "wrap"): "there is one process",
    ("DistributedDataParallel", "unwrap"): "there is one process",
    ("FullyShardedDataParallel", "shard"): "there is one process",
    ("FullyShardedDataParallel", "set_gradient_sync"): "there is one process",
    ("FullyShardedDataParallel", "sync_open_window"): "there is one process",
    ("FullyShardedDataParallel", "gather_weights"): "there is one process",
    ("FullyShardedDataParallel", "release"): "there is one process",
    ("Profiler", "begin"): "it calls receivers through functions of its own, as the test does",
    ("Profiler", "report"): "it calls receivers through functions of its own, as the test does",
    ("Checkpoint", "wait_for_write"): "files that a thread writes change at any moment",
    ("Checkpoint", "write_missing"): "only where the run that saved the state died between two handlers' saves",
    ("FastDevRun", "rehearse_all"): "what it writes is what other handlers rehearse",
    ("Freezing", "find_parts"): "gradients are there already only where an optimizer was given",
    ("Freezing", "apply"): "gradients are there already only where an optimizer was given",
    ("TruncatedBPTT", "check"): "it is set when the handler is attached; another one that leaves may reset it",
    ("TruncatedBPTT", "finish"): "only in a run that stops between the chunks of a batch",
    ("UpdateFrequency", "mark_updates"): "it is set when the handler is attached; another one that leaves may reset it",
    ("TextLogger", "resume"): "the file is that of the checkpoint",
    ("TextLogger", "close"): "closing writes no byte that was not written",
    ("ProgressBar", "resume"): "a bar is there only in an epoch that is resumed",
}


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
    unwritten = {place for place, (_, writes) in ALL.items() if writes - changed.get(place, set()) - UNSEEN}
    assert unwritten == set(NOT_IN_THESE_RUNS)


# What is read within the call of a receiver, but not by it.
NOT_BY_ITSELF = {
    ("DeviceTransfer", "move_model"): {"gradients", "weights"},  # moved with their values
    ("TruePrecision", "convert"): {"gradients", "weights"},  # converted with their values
    ("Metrics", "publish"): {"batch", "loss"},  # tensors that the metrics have kept
    ("Validation", "validate"): {"trainable"},  # by the checks of the evaluator's first run
    ("Validation", "sanity_check"): {"trainable"},
    ("FastDevRun", "rehearse_all"): {"trainable"},
}

# Things that are read in none of these runs, or not through what is recorded.
NOT_RECORDED = {
    ("Checkpoint", "write_missing"): {"files", "state"},  # only after a death between two handlers' saves
    ("FullyShardedDataParallel", "gather_weights"): {"processes", "weights"},  # by FSDP2 itself
}


def _read_together(folder: str) -> dict[Place, set[str]]:
    warnings.simplefilter("ignore")
    return read_by(TOGETHER, Path(folder))


@pytest.mark.slow
def test_receivers_read_what_they_declare_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "together").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = read_by(COMPOSITIONS | MORE, tmp_path / "alone")
    for of_rank in run_together(_read_together, 2, str(tmp_path / "together")):
        for place, things in of_rank.items():
            seen[place] = seen.get(place, set()) | things
    undeclared, unread, unused = {}, {}, {}
    for place, (reads, writes) in ALL.items():
        read = seen.get(place, set())
        if "state" not in reads | writes and read - reads - writes:  # the state is everything
            undeclared[place] = read - reads - writes
        if reads - read:
            unread[place] = reads - read
        if (writes & UNSEEN) - read:  # nothing shows that it is written, but something that it is used
            unused[place] = (writes & UNSEEN) - read
    assert undeclared == NOT_BY_ITSELF
    assert unread == NOT_RECORDED
    assert unused == {}
