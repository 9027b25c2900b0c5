"""What receivers declare to read and write: that it is known, and that the shipped ones do what they declare."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path

import pytest

from signalfire import Engine, Events, Handler, on
from signalfire.core.declarations import THINGS
from signalfire.distributed import expected_processes
from tests.kit import shipped
from tests.processes import run_together
from tests.reading import MORE, SHARING, THREADED, TOGETHER, place_in, read_by
from tests.resume_recipes import Recipe
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
    with pytest.raises(TypeError, match=r"on\(reads\)='gradients': expected a list of names: \['gradients'\]"):
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
    ("FullyShardedDataParallel", "set_gradient_sync"): "what it sets is kept by FSDP2 itself",
    ("ElasticDataParallel", "broadcast_free"): "only where a trained tensor is in no module",
    ("FullyShardedDataParallel", "sync_open_window"): "only where a rank has no batch inside a window",
    (
        "FullyShardedDataParallel",
        "gather_weights",
    ): "the whole weights are put in place and taken away within its region",
    ("Profiler", "begin"): "it calls receivers through functions of its own, as the test does",
    ("Profiler", "report"): "it calls receivers through functions of its own, as the test does",
    ("MetricReports", "report_value"): "nobody asks for a stop",
    ("EarlyStopping", "print_reason"): "only a line on stderr",
    ("FastDevRun", "report"): "only a line on stderr",
    ("ChannelsLast", "convert"): "only a line on stderr",
    ("Throughput", "report_missing_peak"): "only a line on stderr",
    ("Checkpoint", "wait_for_write"): "files that a thread writes change at any moment",
    ("Freezing", "apply"): "`find_parts` calls it first, and finds all gradients that there are",
    ("TruncatedBPTT", "check"): "it is set when the handler is attached; another one that leaves may reset it",
    ("TruncatedBPTT", "finish"): "only in a run that stops between the chunks of a batch",
    ("UpdateFrequency", "mark_updates"): "it is set when the handler is attached; another one that leaves may reset it",
    ("TextLogger", "close"): "closing writes no byte that was not written",
    ("Trace", "close"): "as above",
    ("Trace", "resume"): "only in a run that resumes after the checkpoint's place",
    ("LRScheduling", "check_total"): "only where a loaded state has no such schedule",
    ("Checkpoint", "save_between_runs"): "only at an event that is emitted between runs",
    ("MemorySnapshot", "catch"): "only where the memory runs out",
    ("Histograms", "log_weights"): "only where something receives what it logs",
    **{
        ("Trace", f"record_{name}"): "written with the end of the iteration; only the first record opens the file"
        for name in ("batch", "output", "loss", "backward", "gradients", "step")
    },
    **{
        ("TensorBoardLogger", name): "events are in a buffer until the file is flushed"
        for name in (
            "write_image",
            "write_figure",
            "write_text",
            "write_hyperparameters",
            "write_graph",
            "end_session",
        )
    },
    **{
        ("RemoteLogger", name): "what it gets its thread sends, to a service in memory here"
        for name in (
            "resume",
            "write_image",
            "write_figure",
            "write_text",
            "write_histogram",
            "write_hyperparameters",
            "close",
        )
    },
}


def merged(several: Iterable[dict[Place, set[str]]]) -> dict[Place, set[str]]:
    found: dict[Place, set[str]] = {}
    for one in several:
        for place, things in one.items():
            found[place] = found.get(place, set()) | things
    return found


def _watched(compositions: Mapping[str, Recipe], folder: str) -> dict[Place, set[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        several = []
        for name, recipe in compositions.items():
            if name not in THREADED:
                place = place_in(Path(folder), name)
                # Of those that share a folder, rank 0 writes, at any moment of the others.
                looks_away = name in SHARING and expected_processes().rank > 0
                several.append(watch(recipe, place, place / "of no rank" if looks_away else None))
        return merged(several)


@pytest.mark.slow
def test_receivers_write_what_they_declare_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "together").mkdir()
    of_ranks = run_together(_watched, 2, TOGETHER, str(tmp_path / "together"))
    changed = merged([_watched(COMPOSITIONS | MORE, str(tmp_path)), *of_ranks])
    nothing: tuple[frozenset[str], frozenset[str]] = (
        frozenset(),
        frozenset(),
    )  # what a receiver connects declares nothing
    undeclared = {(*place, thing) for place, seen in changed.items() for thing in seen - ALL.get(place, nothing)[1]}
    assert undeclared == set()
    unwritten = {place for place, (_, writes) in ALL.items() if writes - changed.get(place, set()) - UNSEEN}
    assert unwritten == set(NOT_IN_THESE_RUNS)


# What is read within the call of a receiver, but not by it.
NOT_BY_ITSELF = {
    ("DeviceTransfer", "move_model"): {"gradients", "weights"},  # moved with their values
    ("TruePrecision", "convert"): {"gradients", "weights"},  # converted with their values
    ("Validation", "validate"): {
        "bounds",
        "trainable",
    },  # by the checks of the evaluator's first run, and by its metrics
    ("Validation", "sanity_check"): {"trainable"},
    ("FastDevRun", "rehearse_all"): {"trainable"},
    ("SpikeGuard", "read"): {"buffers", "metrics", "weights"},  # by the check of the state that is put back
    ("Trace", "begin"): {"metrics"},  # by handlers, for their states
    ("Trace", "record_iteration"): {"loss"},
    ("TensorBoardLogger", "write_graph"): {"gradients", "trainable"},  # by torch, which traces the model
    ("Export", "write"): {"gradients", "trainable"},  # as above
    ("Export", "write_best"): {"gradients", "trainable"},
}

# Things that are read in none of these runs, or not through what is recorded.
NOT_RECORDED = {
    ("FullyShardedDataParallel", "gather_weights"): {"processes"},  # by FSDP2 itself
    ("Export", "write"): {
        "modules",
        "modes",
    },  # by `export_weights` and `export_program`, which are functions of the engine
    ("Export", "write_best"): {"modules", "modes"},
    ("SpikeGuard", "read"): {"gradients", "optimizer", "processes"},  # if the norm overflows; with several ranks
    ("TensorParallel", "compare_gradients"): {"gradients", "processes"},  # with four ranks only
    ("LRScheduling", "check_total"): {"optimizer"},  # only where a loaded state has no such schedule
    ("Checkpoint", "save_between_runs"): {"state"},  # only at an event that is emitted between runs
    # All options of the groups are read at once.
    **{("Trace", name): {"rates", "groups"} for name in ("begin", "record_iteration", "record_epoch")},
    # By receivers that these connect, which are called through the guard of looks.
    ("Guards", "look"): {"gradients", "loss", "output"},
}


def _read(compositions: Mapping[str, Recipe], folder: str) -> dict[Place, set[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_by(compositions, Path(folder))


@pytest.mark.slow
def test_receivers_read_what_they_declare_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "together").mkdir()
    of_ranks = run_together(_read, 2, TOGETHER, str(tmp_path / "together"))
    seen = merged([_read(COMPOSITIONS | MORE, str(tmp_path)), *of_ranks])
    undeclared, unread, unused = {}, {}, {}
    for place, (reads, writes) in ALL.items():
        read = seen.get(place, set())
        if "state" not in reads and read - reads - writes:  # the state is everything
            undeclared[place] = read - reads - writes
        if reads - read:
            unread[place] = reads - read
        if (writes & UNSEEN) - read:  # nothing shows that it is written, but something that it is used
            unused[place] = (writes & UNSEEN) - read
    assert undeclared == NOT_BY_ITSELF
    unread.pop(("Checkpoint", "wait_for_write"), None)  # only if the thread has not finished by then
    assert unread == NOT_RECORDED
    assert unused == {}
