"""Power cuts: of everything that a disk may be left with at any moment, nothing that was reported as saved is missing or wrong.

A recording layer under the real Checkpoint notes the operations of real runs. A model of a disk, which keeps nothing but what was
synced, is cut off after each of them; each state that it may have is laid into a folder and read as a restarted process would.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.checkpoints import Content, Files, clean, find, read_manifest
from signalfire.handlers import Checkpoint
from tests.kit import content_of, spread

PAGE = 4096  # what a disk writes at once: of a file that was not synced, any of them may be missing
BOUND = 1024  # up to so many combinations of what survives are all tried; beyond, each alone, all and none
RESTARTS = 8  # of those states, so many are gone on from, to be cut again
DATA = [(torch.ones(2, 64) * i, torch.ones(2, 32)) for i in range(1, 4)]

Tree = Mapping[str, bytes | None]
"""What is in a folder: the content of each file by its path, None for a folder."""
Order = tuple[int, int, bool]
"""Which of two generations is newer: epoch, iteration, whether the epoch was completed."""


# ---- a disk that keeps nothing but what was synced ----------------------------------------------------------------


class Change(NamedTuple):
    """Of a folder's entries: one that goes, one that comes, or, in a rename, both at once."""

    goes: str | None
    comes: str | None
    node: Node | None


@dataclass(eq=False)
class Node:
    """A file or folder: as programs see it, what is certain to be on the disk, and what is under way to it."""

    content: bytes | None  # None: a folder
    safe_content: bytes | None = None
    entries: dict[str, Node] = field(default_factory=dict)
    safe_entries: dict[str, Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def change(self, *changes: Change) -> None:
        self.changes += changes
        for change in changes:
            change_entries(self.entries, change)

    def sync(self) -> None:
        self.safe_content, self.safe_entries, self.changes = self.content, dict(self.entries), []

    def contents(self) -> list[bytes]:
        """What a cut may leave of a file, except for holes: the whole, nothing, a part, zeros, what it was before."""
        assert self.content is not None
        whole, before = self.content, self.safe_content
        if whole == before:
            return [whole]
        return [whole, b"", whole[: len(whole) // 2], bytes(len(whole)), *([] if before is None else [before])]

    def holed(self) -> list[bytes]:
        """A file of which one page was not written."""
        assert self.content is not None
        whole = self.content
        pages = [] if whole == self.safe_content else range(0, len(whole), PAGE)
        return [whole[:at] + bytes(len(whole[at : at + PAGE])) + whole[at + PAGE :] for at in pages]


def change_entries(entries: dict[str, Node], change: Change) -> None:
    if change.goes is not None:
        entries.pop(change.goes, None)
    if change.comes is not None and change.node is not None:
        entries[change.comes] = change.node


class Disk:
    """A disk that may lose each change by itself, in any order, until its file or folder was synced.

    Syncing a file says nothing about its entry in the folder, syncing a folder nothing about what its files hold.

    Args:
        root: the folder that it stands for.
        tree: what is in it, and safe.
        torn: whether of a rename one half may be lost: the old name gone and the new one not there, or both there.
    """

    def __init__(self, root: Path, tree: Tree, *, torn: bool = False) -> None:
        self.root, self.torn, self.top = root, torn, Node(None)
        for name in sorted(tree):
            parent, _, last = name.rpartition("/")
            self.node(root / parent).change(Change(None, last, Node(tree[name])))
        for node in self.nodes():
            node.sync()

    def node(self, path: Path) -> Node:
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def apply(self, kind: str, path: Path, more: Any) -> None:
        """Let a program do something."""
        folder = self.top if path == self.root else self.node(path.parent)
        if kind == "sync":
            self.node(path).sync()
        elif kind == "write":
            self.node(path).content = more
        elif kind == "make":
            folder.change(Change(None, path.name, Node(more)))
        elif kind == "remove":
            folder.change(Change(path.name, None, None))
        elif kind == "rename":
            node, other = self.node(path), self.node(more.parent)
            if self.torn or folder is not other:
                other.change(Change(None, more.name, node))
                folder.change(Change(path.name, None, None))
            else:
                folder.change(Change(path.name, more.name, node))
        else:
            raise AssertionError(kind)

    def nodes(self) -> list[Node]:
        """All that may be there."""
        found, ahead = dict[Node, None](), [self.top]
        while ahead:
            if (node := ahead.pop()) not in found:
                found[node] = None
                ahead += [*node.entries.values(), *node.safe_entries.values()]
                ahead += [change.node for change in node.changes if change.node is not None]
        return list(found)

    def states(self) -> Iterator[Tree]:
        """What a power cut now may leave; some of them several times."""
        nodes = self.nodes()
        changes = [(node, change) for node in nodes for change in node.changes]
        files = [node for node in nodes if node.content is not None]
        contents = [node.contents() for node in files]
        survivals: list[Sequence[bool]] = [[True] * len(changes), [False] * len(changes)]
        fates: list[Sequence[bytes]]
        if 2 ** len(changes) * math.prod(map(len, contents)) <= BOUND:
            survivals = list(itertools.product([True, False], repeat=len(changes)))
            fates = list(itertools.product(*contents))
        else:
            survivals += [
                [(i == alone) is kept for i in range(len(changes))]
                for alone in range(len(changes))
                for kept in (True, False)
            ]
            worst = max(map(len, contents), default=0)
            fates = [[options[min(fate, len(options) - 1)] for options in contents] for fate in range(worst)]
            fates += [
                [options[fate if i == alone else 0] for i, options in enumerate(contents)]
                for alone, of_one in enumerate(contents)
                for fate in range(1, len(of_one))
            ]
        for survives, fate in itertools.product(survivals, fates):
            yield self._left(changes, survives, dict(zip(files, fate, strict=True)))
        whole = {node: node.content or b"" for node in files}
        for file in files:
            for holed in file.holed():
                yield self._left(changes, [True] * len(changes), whole | {file: holed})

    def _left(
        self, changes: list[tuple[Node, Change]], survives: Sequence[bool], contents: Mapping[Node, bytes]
    ) -> Tree:
        entries = dict[Node, dict[str, Node]]()
        for (node, change), kept in zip(changes, survives, strict=True):
            if kept:
                change_entries(entries.setdefault(node, dict(node.safe_entries)), change)
        tree = dict[str, bytes | None]()

        def lay(node: Node, path: str) -> None:
            for name, one in entries.get(node, node.safe_entries).items():
                tree[path + name] = None if one.content is None else contents[one]
                if one.content is None:
                    lay(one, f"{path}{name}/")

        lay(self.top, "")
        return tree


# ---- what is recorded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportedSaves:
    """What the run has said to be saved: the newest, and by their paths in the root those that it has not removed."""

    newest: Order | None = None
    generations: Mapping[str, Order] = field(default_factory=dict)


Operation = tuple[str, Path, Any]


class Recorded(Files):
    """Does what it is asked to, and notes it."""

    def __init__(self) -> None:
        self.log: list[Operation | ReportedSaves] = []
        self.lock = threading.RLock()  # so that two threads are noted in the order in which they acted

    def make_folder(self, path: Path) -> None:
        with self.lock:
            super().make_folder(path)
            self.log.append(("make", path, None))

    def write(self, path: Path, content: Content) -> None:
        with self.lock:
            super().write(path, content)
            self.log += [("make", path, b""), ("write", path, path.read_bytes())]

    def sync(self, path: Path) -> None:
        with self.lock:
            super().sync(path)
            self.log.append(("sync", path, None))

    def rename(self, old: Path, new: Path) -> None:
        with self.lock:
            super().rename(old, new)
            self.log.append(("rename", old, new))

    def remove(self, path: Path) -> None:
        with self.lock:
            super().remove(path)
            self.log.append(("remove", path, None))

    def remove_folder(self, path: Path) -> None:
        with self.lock:
            super().remove_folder(path)
            self.log.append(("remove", path, None))


class Place:
    """Where a sequence of runs writes, and what they did there."""

    def __init__(self, root: Path, files: Recorded) -> None:
        self.root, self.files = root, files
        self.folder = root / "runs" / "a"
        self.scores: Sequence[float] = [5.0, 3.0, 4.0, 1.0, 2.0, 2.5, 0.5]

    def engine_of(self, *options: Mapping[str, Any]) -> Engine:
        """An engine with a Checkpoint for each of these, whose layer is recorded."""
        torch.manual_seed(0)
        update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.01))
        engine = Engine(update, model=nn.Linear(64, 32), seed=0)
        for one in options:
            handler = Checkpoint(self.folder, **one)
            handler.files = self.files
            engine.attach(handler)
        engine.connect(
            Events.ITERATION_COMPLETED,
            lambda engine: engine.state.metrics.update(score=self.scores[engine.state.iteration - 1]),
        )
        engine.connect(Events.CHECKPOINT_SAVED, self.note_saved)
        return engine

    def note_saved(self, engine: Engine) -> None:
        """Note what is there when it is reported as saved."""
        visible = [(name, path) for name, path in find(self.folder, self.files) if name == path.name]
        orders = {str(path.relative_to(self.root)): order_of(read_manifest(path, self.files)) for _, path in visible}
        kept = [name for one in engine.handlers.values() if isinstance(one, Checkpoint) for name, _ in one.kept]
        assert kept
        assert {str((self.folder / name).relative_to(self.root)) for name in kept} <= orders.keys()
        self.files.log.append(ReportedSaves(max(orders.values()), orders))

    def run(self, iterations: int, *options: Mapping[str, Any], resumed: bool = False) -> None:
        engine = self.engine_of(*options)
        source = None
        if resumed:
            state = Checkpoint.load(self.folder)
            source = state["origin"]["path"]
            engine.load_state_dict(state)
        engine.run(DATA, max_iters=iterations)
        assert source is None or os.path.exists(source), "the one that a run was resumed from stays"


def order_of(position: Mapping[str, Any]) -> Order:
    return position["epoch"], position["iteration"], not position["epoch_open"]


# ---- what is found after a cut ------------------------------------------------------------------------------------


@dataclass
class Found:
    """What became of the states.

    Attributes:
        states: how many there were, each with what was reported by then.
        lost: those in which something is missing that was reported as saved.
        wrong: those of which content was loaded that nobody wrote.
        errors: those from before the first save whose loading said something else than that there is none.
    """

    states: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{self.states} states, {len(self.lost)} lost, {len(self.wrong)} wrong, {len(self.errors)} errors"
        return "\n".join([counts, *self.lost[:3], *self.wrong[:3], *self.errors[:3]])

    @property
    def bad(self) -> int:
        return len(self.lost) + len(self.wrong) + len(self.errors)


class Outcome(NamedTuple):
    order: Order | None  # of what was loaded
    problem: str  # if nothing was
    whole: bool = True


class Reader:
    """Reads what a cut has left, each state once.

    Args:
        space: where to lay it.
        known: the states that were written.
    """

    def __init__(self, space: Path, known: Sequence[Mapping[str, Any]]) -> None:
        self.space, self.known = space, known
        self.outcomes: dict[tuple[str, frozenset[tuple[str, bytes | None]]], tuple[Outcome, ...]] = {}

    def read(self, tree: Tree, path: str, *, cleaned: bool = False) -> tuple[Outcome, ...]:
        """What `load` says; with cleaned, also once a run that begins there has cleaned the folder."""
        key = path, frozenset(tree.items())
        if key not in self.outcomes:
            lay(tree, self.space)
            outcomes = [self.load(self.space / path)]
            if cleaned and (self.space / path).is_dir():
                clean(self.space / path, Files())
                if (after := taken(self.space)) != tree:
                    outcomes += self.read(after, path)
            shutil.rmtree(self.space, ignore_errors=True)
            self.outcomes[key] = tuple(outcomes)
        return self.outcomes[key]

    def load(self, path: Path) -> Outcome:
        try:
            state = Checkpoint.load(path)
        except (FileNotFoundError, ValueError) as error:
            none_yet = isinstance(error, FileNotFoundError)
            return Outcome(None, "" if none_yet else f"{type(error).__name__}: {error}")
        del state["origin"]
        return Outcome(order_of(state["engine"]), "", any(same(state, one) for one in self.known))


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Let torch load the same bytes once: most states differ in what no load looks at, and this takes most of the time."""
    load, loaded = torch.load, dict[bytes, Any]()

    def load_once(file: BinaryIO, **options: Any) -> Any:
        assert options == {"map_location": "cpu", "weights_only": True}
        content = file.read()
        if content not in loaded:
            loaded[content] = load(BytesIO(content), **options)
        return loaded[content]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", load_once)
        yield


def lay(tree: Tree, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name in sorted(tree):
        path = os.path.join(root, name)
        if (content := tree[name]) is None:
            os.mkdir(path)
        else:
            with open(path, "wb") as file:
                file.write(content)


def taken(root: Path) -> Tree:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Cut(NamedTuple):
    """A state that may be left, and what was reported before.

    Attributes:
        where: after which operation.
        tree: the state.
        reported: what was reported; its generations are those that no operation has touched since, which have to be there.
    """

    where: str
    tree: Tree
    reported: ReportedSaves


NOTHING = Cut("", {}, ReportedSaves())


def cuts(place: Place, before: Cut = NOTHING, *, torn: bool = False, kept: bool = False) -> list[Cut]:
    """The states after each operation in the place's log, each once for all that was reported.

    Args:
        place: where the runs were.
        before: what was there, and safe.
        torn: as in `Disk`.
        kept: whether nothing of what was done is lost, as when a process is killed and the machine lives on.
    """
    folder, disk, reported = (
        str(place.folder.relative_to(place.root)),
        Disk(place.root, before.tree, torn=torn),
        before.reported,
    )
    found = dict[tuple[Any, ...], Cut]()
    for number, step in enumerate([None, *place.files.log]):
        where = f"at the beginning{before.where}"
        if isinstance(step, ReportedSaves):
            reported, where = step, f"{number}: reported"
        elif step is not None:
            kind, path, more = step
            disk.apply(kind, path, more)
            if kept:
                moved = [path.parent, more.parent] if kind == "rename" else [path.parent]
                for one in moved if kind == "remove" or kind == "rename" else [path, *moved]:
                    if one.is_relative_to(place.root):
                        disk.apply("sync", one, None)
            where = f"{number}: {kind} {path.relative_to(place.root)}"
            for one in (path, more) if isinstance(more, Path) else (path,):
                if kind != "sync" and one.is_relative_to(place.folder) and one != place.folder:
                    name = f"{folder}/{one.relative_to(place.folder).parts[0]}"
                    reported = ReportedSaves(
                        reported.newest, {key: order for key, order in reported.generations.items() if key != name}
                    )
        for tree in disk.states():
            key = (frozenset(tree.items()), reported.newest, frozenset(reported.generations))
            found.setdefault(key, Cut(where, tree, reported))
    return list(found.values())


def written(*places: Place) -> list[bytes]:
    """The states that were written."""
    steps = [step for place in places for step in place.files.log if not isinstance(step, ReportedSaves)]
    return [more for kind, path, more in steps if kind == "write" and path.name == "state.pt"]


@remembered()
def check(place: Place, left: Sequence[Cut], contents: Sequence[bytes]) -> Found:
    """Read each state as a restarted process does, and once more when it has cleaned the folder.

    Args:
        place: where the runs were.
        left: the states.
        contents: what was written.
    """
    known = [torch.load(BytesIO(content), map_location="cpu", weights_only=True) for content in contents]
    reader = Reader(place.root.with_name(f"{place.root.name}-cut"), known)
    folder, found = str(place.folder.relative_to(place.root)), Found(len(left))
    for where, tree, reported in left:
        lost, wrong, errors = list[str](), list[str](), list[str]()
        for after, outcome in enumerate(reader.read(tree, folder, cleaned=True)):
            text = (
                f"{where}{' and cleaned' if after else ''}: {reported.newest} was reported, {outcome} of {sorted(tree)}"
            )
            if not outcome.whole:
                wrong.append(text)
            elif reported.newest is not None and (outcome.order is None or outcome.order < reported.newest):
                lost.append(text)
            elif outcome.problem:
                errors.append(text)
        for name, order in reported.generations.items():
            alone = {part: content for part, content in tree.items() if f"{name}/".startswith(f"{part}/")}
            alone |= {part: content for part, content in tree.items() if part.startswith(f"{name}/")}
            (outcome,) = reader.read(alone, name)
            if not outcome.whole:
                wrong.append(f"{where}: {name} is {outcome}")
            elif outcome.order != order:
                lost.append(f"{where}: {name} is {outcome}")
        found.lost += lost[:1]
        found.wrong += wrong[:1]
        found.errors += errors[:1]
    return found


# ---- sequences of saves -------------------------------------------------------------------------------------------


def last(keep: int, **more: Any) -> dict[str, Any]:
    return {"every": "1it", "keep": keep, "name": "last", **more}


def best(keep: int, **more: Any) -> dict[str, Any]:
    return {"monitor": "score", "mode": "min", "keep": keep, "name": "best", **more}


TWICE = {"every": Events.ITERATION_COMPLETED(every=3) | Events.EPOCH_COMPLETED, "keep": 1, "name": "last"}
"""Writes the third iteration twice: the second takes the first one's name."""


def resumed(place: Place) -> None:
    place.run(2, last(1))
    place.run(4, last(1), resumed=True)
    place.run(5, last(1), resumed=True)


def gone_back(place: Place) -> None:
    """A run that resumes from an older one writes the newer names again."""
    place.run(3, last(3))
    engine = place.engine_of(last(3))
    engine.load_state_dict(Checkpoint.load(next(place.folder.glob("*iter00000001"))))
    engine.run(DATA, max_iters=4)


def failing(place: Place) -> None:
    engine = place.engine_of(last(1, on_exception=True))

    def fail(engine: Engine) -> None:
        raise KeyError("on purpose")

    engine.connect(Events.ITERATION_STARTED(once=3), fail)
    with pytest.raises(KeyError, match="on purpose"):
        engine.run(DATA, max_iters=4)


SEQUENCES: dict[str, Callable[[Place], None]] = {
    "keep 1": lambda place: place.run(4, last(1)),
    "keep 2": lambda place: place.run(4, last(2)),
    "best 1": lambda place: place.run(6, best(1)),
    "best 2": lambda place: place.run(6, best(2)),
    "last and best": lambda place: place.run(4, last(1), best(1)),
    "resumed": resumed,
    "asynchronous, keep 1": lambda place: place.run(4, last(1, asynchronous=True)),
    "asynchronous, keep 2": lambda place: place.run(4, last(2, asynchronous=True)),
    "written twice": lambda place: place.run(4, TWICE),
    "written twice, asynchronous": lambda place: place.run(4, {**TWICE, "asynchronous": True}),
    "gone back": gone_back,
    "on_exception": failing,
}


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of syncs would wait for a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as path:
        (Path(path) / "root").mkdir()
        yield Path(path) / "root"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What is damaged is reported in warnings, thousands of them here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


# ---- the real writer ----------------------------------------------------------------------------------------------


def ran(root: Path, sequence: Callable[[Place], None], files: Recorded | None = None) -> Place:
    place = Place(root, files or Recorded())
    sequence(place)
    return place


@pytest.mark.moderate
@pytest.mark.parametrize("sequence", spread(SEQUENCES, 2))
def test_whatever_a_power_cut_leaves_what_was_reported_as_saved_loads(sequence: str, root: Path) -> None:
    place = ran(root, SEQUENCES[sequence])
    found = check(place, cuts(place), written(place))
    assert found.states > 50
    assert not found.bad, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_syncs_a_killed_process_loses_nothing(asynchronous: bool, root: Path) -> None:
    place = ran(root, lambda place: place.run(4, last(1, sync_files=False, asynchronous=asynchronous)))
    acts = [step[0] for step in place.files.log if not isinstance(step, ReportedSaves)]
    assert "sync" not in acts[acts.index("write") :]  # before that, the folder itself was made
    found = check(place, cuts(place, kept=True), written(place))
    assert found.states > 20
    assert not found.bad, str(found)
    assert check(place, cuts(place), written(place)).bad, "a power cut may take it all: that is what the syncs are for"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sequence", spread([name for name in SEQUENCES if not name.startswith(("written twice", "gone back"))], 2)
)
def test_where_no_name_is_written_twice_a_rename_may_even_tear(sequence: str, root: Path) -> None:
    """POSIX does not say that a crash leaves both halves of a rename or none; the usual file systems do."""
    place = ran(root, SEQUENCES[sequence])
    found = check(place, cuts(place, torn=True), written(place))
    assert found.states > 50
    assert not found.bad, str(found)


def go_on(place: Place) -> None:
    """What a restarted process does: from the newest if there is one, and a little further."""
    engine, iteration = place.engine_of(TWICE), 0
    try:
        state = Checkpoint.load(place.folder)
    except FileNotFoundError:
        pass
    else:
        engine.load_state_dict(state)
        iteration = state["engine"]["iteration"]
    engine.run(DATA, max_iters=iteration + 3)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", ["keep 1", "written twice"])
def test_a_second_power_cut_in_the_run_that_goes_on_after_the_first(sequence: str, root: Path) -> None:
    (root / "0").mkdir()
    first, states = ran(root / "0", SEQUENCES[sequence]), 0
    every = cuts(first)
    for number, cut in enumerate(every[:: max(1, len(every) // RESTARTS)], start=1):
        lay(cut.tree, root / str(number))
        place = ran(root / str(number), go_on)
        found = check(place, cuts(place, cut), written(first, place))
        states += found.states
        assert not found.bad, str(found)
    assert states > 500


@pytest.mark.moderate
def test_after_a_power_cut_between_two_saves_of_one_event_the_best_is_on_the_disk(root: Path) -> None:
    both = last(1), best(1)
    (root / "0").mkdir()
    first = ran(root / "0", lambda place: place.run(4, *both))
    left = cuts(first)
    for number, cut in enumerate(left[:: max(1, len(left) // 60)], start=1):
        lay(cut.tree, root / str(number))
        place = Place(root / str(number), Recorded())
        engine = place.engine_of(*both)
        with contextlib.suppress(FileNotFoundError):
            engine.load_state_dict(Checkpoint.load(place.folder))
        engine.run(DATA, max_iters=5)
        handler = engine.handlers["best"]
        assert isinstance(handler, Checkpoint)
        assert [value for _, value in handler.kept] == [min(place.scores[:5])], cut.where
        assert handler.best is not None
        assert Checkpoint.load(handler.best)["engine"]["iteration"] == 4, cut.where
    assert number > 50


@pytest.mark.moderate
def test_while_a_damaged_one_is_set_aside_and_written_anew_the_one_before_it_loads(root: Path) -> None:
    place = ran(root, SEQUENCES["keep 2"])
    contents = written(place)
    older, newest = sorted(place.folder.iterdir())
    flipped = bytearray((newest / "state.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (newest / "state.pt").write_bytes(flipped)
    order = order_of(read_manifest(older, Files()))
    before = Cut("", taken(root), ReportedSaves(order, {str(older.relative_to(root)): order}))
    place.files.log.clear()
    place.run(5, last(2), resumed=True)
    assert (place.folder / f"{newest.name}.damaged").is_dir()
    found = check(place, cuts(place, before), contents + written(place))
    assert found.states > 50
    assert not found.bad, str(found)


# ---- writers that are not safe, so that the model is known to see it ----------------------------------------------

ASIDE = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}~\d+~\d+~\d+\.new")


class Unsynced(Recorded):
    """Leaves out what is not synced by name: of a file or a folder."""

    def __init__(self, left_out: Callable[[Path], bool]) -> None:
        super().__init__()
        self.left_out = left_out

    def sync(self, path: Path) -> None:
        if not self.left_out(path):
            super().sync(path)


class ManifestFirst(Recorded):
    """Writes the state once the manifest is there and in place, and syncs it before anything is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.held = b""

    def write(self, path: Path, content: Content) -> None:
        if path.name == "state.pt":
            self.held = content_of(content)
        else:
            super().write(path, content)

    def sync(self, path: Path) -> None:
        if path.name != "state.pt":
            super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        if ASIDE.fullmatch(old.name):
            super().write(new / "state.pt", self.held)
            super().sync(new / "state.pt")
            super().sync(new)


class StateLast(ManifestFirst):
    """Writes the manifest before the state, but both aside, and syncs both before the rename: not an error."""

    def sync(self, path: Path) -> None:
        if ASIDE.fullmatch(path.name):
            Recorded.write(self, path / "state.pt", self.held)
            Recorded.sync(self, path / "state.pt")
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        Recorded.rename(self, old, new)


class InPlace(Recorded):
    """Writes under the name itself, over what has it; the syncs are all there."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: Path | None = None

    def place(self, path: Path) -> Path:
        parts = [found["name"] if (found := ASIDE.fullmatch(part)) else part for part in path.parts]
        return Path(*parts)

    def make_folder(self, path: Path) -> None:
        place = self.place(path)
        if place != path:
            self.under_way = place
        if not place.exists():
            super().make_folder(place)

    def write(self, path: Path, content: Content) -> None:
        place = self.place(path)
        with self.lock:
            if not place.exists():
                self.log.append(("make", place, b""))
            place.write_bytes(content_of(content))
            self.log.append(("write", place, place.read_bytes()))

    def sync(self, path: Path) -> None:
        super().sync(self.place(path))

    def rename(self, old: Path, new: Path) -> None:
        if self.place(old) == new:
            self.under_way = None
        else:
            super().rename(old, new)

    def exists(self, path: Path) -> bool:
        return path != self.under_way and super().exists(path)


class PrunedFirst(Recorded):
    """Removes what is there, with care, before it writes the next."""

    def make_folder(self, path: Path) -> None:
        if ASIDE.fullmatch(path.name):
            for name in self.list(path.parent):
                if not name.startswith("."):
                    old = path.parent / f".{name}.old"
                    self.rename(path.parent / name, old)
                    self.sync(path.parent)
                    for file in self.list(old):
                        self.remove(old / file)
                    self.remove_folder(old)
        super().make_folder(path)


CARELESS: dict[str, Callable[[], Recorded]] = {
    "no sync of state.pt": lambda: Unsynced(lambda path: path.name == "state.pt"),
    "no sync of the manifest": lambda: Unsynced(lambda path: path.name == "manifest.json"),
    "no sync of the aside folder": lambda: Unsynced(lambda path: ASIDE.fullmatch(path.name) is not None),
    "no sync of the parent folder": lambda: Unsynced(lambda path: path.name == "a"),
    "no sync of the folders above": lambda: Unsynced(lambda path: path.name in ("root", "runs")),
    "the manifest before the state": ManifestFirst,
    "in place": InPlace,
    "pruned before it is committed": PrunedFirst,
}


def left_by(root: Path, files: Callable[[], Recorded]) -> Found:
    """What becomes of the states of two sequences with such a layer."""
    total = Found()
    sequences: list[Callable[[Place], None]] = [lambda place: place.run(2, last(1)), SEQUENCES["written twice"]]
    for number, sequence in enumerate(sequences):
        (root / str(number)).mkdir()
        place = ran(root / str(number), sequence, files())
        found = check(place, cuts(place), written(place))
        total.states += found.states
        total.lost += found.lost
        total.wrong += found.wrong
        total.errors += found.errors
    return total


@pytest.mark.slow
@pytest.mark.parametrize("careless", spread(CARELESS, 1))
def test_the_model_finds_what_a_careless_writer_loses(careless: str, root: Path) -> None:
    found = left_by(root, CARELESS[careless])
    assert len(found.lost) > 0, str(found)
    assert not found.wrong, "what is verified is never loaded wrong: " + str(found)


@pytest.mark.slow
def test_without_the_checksum_what_is_wrong_is_loaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def update(self, data: bytes) -> None:
            """Of whatever it is."""

        def hexdigest(self) -> str:
            return "0" * 64

    for module in ("manifest", "state_file"):
        constant = SimpleNamespace(sha256=lambda content=b"": Constant())
        monkeypatch.setattr(f"signalfire.checkpoints.{module}.hashlib", constant)
    found = left_by(root, CARELESS["no sync of state.pt"])
    assert len(found.wrong) > 0, str(found)


@pytest.mark.moderate
def test_the_model_finds_nothing_where_there_is_nothing(root: Path) -> None:
    found = left_by(root, StateLast)
    assert not found.bad, str(found)


def put_back(place: Place) -> None:
    """A state that is put back in the same engine writes the same name again."""
    engine = place.engine_of(last(3))
    engine.run(DATA, max_iters=2)
    state = engine.state_dict()
    engine.run(DATA, max_iters=3)
    engine.load_state_dict(state)
    engine.run(DATA, max_iters=3)


@pytest.mark.slow
def test_half_a_removal_never_takes_the_place_of_what_was_replaced_later(root: Path) -> None:
    """Cut while what was replaced is removed, and again while the next run replaces the same name."""

    def again(place: Place) -> None:
        engine = place.engine_of(last(3))
        engine.load_state_dict(Checkpoint.load(next(place.folder.glob("*iter00000002"))))
        engine.run(DATA, max_iters=3)

    (root / "0").mkdir()
    first = ran(root / "0", put_back)
    newest = "runs/a/last-epoch0001-iter00000003"
    left = [cut for cut in cuts(first) if newest in cut.tree and any(".replaced" in name for name in cut.tree)]
    assert len(left) > 3
    for number, cut in enumerate(left, start=1):
        lay(cut.tree, root / str(number))
        place = ran(root / str(number), again)
        found = check(place, cuts(place, cut), written(first, place))
        assert not found.bad, str(found)
