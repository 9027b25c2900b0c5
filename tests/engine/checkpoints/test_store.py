"""Generations on disk: damage is found and named, whatever the machine loses in a crash, and nobody removes what is another's."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from signalfire import Engine, Events, Phase, allow
from signalfire.checkpoints import Content, Files, Taken, clean, commit, encode, read_manifest
from signalfire.checkpoints.manifest import NewVersion
from signalfire.checkpoints.state_file import SerializedState
from signalfire.distributed.liveness import identity, is_alive
from signalfire.handlers import Checkpoint
from tests.kit import LIMIT, build, linear, quick, spread

DATA = [(torch.ones(2, 2) * i, torch.ones(2, 1)) for i in range(1, 4)]
DISK = Files()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of syncs would wait for a disk."""
    root = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")
    path = root / f"generations-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def engine_of(*handlers: Any) -> Engine:
    return build(linear(2, 1, seed=0), *handlers, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9))


def trained(folder: Path, iterations: int = 3, **options: Any) -> list[Path]:
    """The generations that a short run leaves, the oldest first."""
    handler = Checkpoint(folder, every="1it", **{"keep": 9, **options})
    engine_of(handler).run(DATA, max_iters=iterations)
    return [folder / name for name, _ in handler.kept]


def iteration(path: Path) -> int:
    found: int = Checkpoint.load(path)["engine"]["iteration"]
    return found


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def hidden(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


# ---- what is in one -----------------------------------------------------------------------------------------------


def test_a_generation_holds_the_state_and_a_manifest_that_describes_it(folder: Path) -> None:
    handler = Checkpoint(
        folder, monitor="score", mode="max", hyperparameters={"lr": 0.01, "sizes": [2, 1]}, name="best"
    )
    engine = engine_of(handler)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=0.5))
    engine.run(DATA, max_epochs=1)
    assert handler.best is not None
    assert sorted(os.listdir(handler.best)) == ["manifest.json", "state.pt"]
    manifest = json.loads((handler.best / "manifest.json").read_text())
    content = (handler.best / "state.pt").read_bytes()
    assert manifest["files"] == {"state.pt": {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    assert manifest["name"] == handler.best.name == "best-epoch0001-iter00000003"
    assert {key: manifest[key] for key in ("epoch", "iteration", "steps", "monitor", "value", "hyperparameters")} == {
        "epoch": 1,
        "iteration": 3,
        "steps": {"main": 3},
        "monitor": "score",
        "value": 0.5,
        "hyperparameters": {"lr": 0.01, "sizes": [2, 1]},
    }
    environment = manifest["environment"]
    assert (environment["torch"], environment["threads"], environment["device"]) == (torch.__version__, 1, "cpu")
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    first, second, *others = (handler.best / "manifest.json").read_bytes().splitlines(keepends=True)
    assert second == f' "sha256": "{manifest["sha256"]}",\n'.encode()
    assert manifest["sha256"] == hashlib.sha256(first + b"".join(others)).hexdigest()
    assert torch.load(handler.best / "state.pt", weights_only=True)["engine"]["iteration"] == 3


# ---- which is loaded ----------------------------------------------------------------------------------------------


def test_a_generation_is_loaded_by_its_folder_or_the_file_in_it_and_a_folder_gives_the_newest(folder: Path) -> None:
    paths = trained(folder)
    assert [iteration(path) for path in paths] == [1, 2, 3]
    assert [iteration(path / "state.pt") for path in paths] == [1, 2, 3]
    assert iteration(folder) == 3
    assert iteration(Path(os.path.relpath(folder))) == 3


def test_the_newest_is_known_by_the_manifest_and_not_by_name_or_time(folder: Path) -> None:
    trained(folder, filename="z-{iteration}", iterations=11)
    for name in sorted(os.listdir(folder), reverse=True):
        os.utime(folder / name, (0, 0))
    assert iteration(folder) == 11


def test_the_end_of_an_epoch_is_newer_than_its_last_iteration(folder: Path) -> None:
    engine_of(Checkpoint(folder, every="1it", name="z"), Checkpoint(folder, name="a")).run(DATA, max_epochs=1)
    assert Checkpoint.load(folder)["engine"]["epoch_open"] is False


def test_of_a_folder_with_several_the_handler_may_be_named(folder: Path) -> None:
    engine_of(Checkpoint(folder, every="1it", name="often"), Checkpoint(folder, every="2it", name="seldom")).run(
        DATA, max_iters=3
    )
    assert Checkpoint.load(folder, name="often")["engine"]["iteration"] == 3
    assert Checkpoint.load(folder, name="seldom")["engine"]["iteration"] == 2
    with pytest.raises(FileNotFoundError, match="contains no checkpoint of 'never'"):
        Checkpoint.load(folder, name="never")


def test_what_is_not_there_or_something_else_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere'\): no such checkpoint"):
        Checkpoint.load(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match="contains no checkpoint"):
        Checkpoint.load(folder)
    (folder / "plots").mkdir()
    (folder / "plots" / "loss.png").write_text("")
    (folder / "events.out").write_text("")
    with pytest.raises(FileNotFoundError, match="contains no checkpoint"):
        Checkpoint.load(folder)
    (folder / "state.txt").write_text("")
    with pytest.raises(ValueError, match=r"state\.txt.*not a checkpoint.*torch\.load"):
        Checkpoint.load(folder / "state.txt")


# ---- damage -------------------------------------------------------------------------------------------------------


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def zero(content: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(content))
    end = min(len(content), begin + 1 + chance.randrange(4096))
    return content[:begin] + bytes(end - begin) + content[end:]


def lengthen(content: bytes, chance: random.Random) -> bytes:
    return content + bytes(chance.randrange(256) for _ in range(1 + chance.randrange(9)))


def edit(content: bytes, chance: random.Random) -> bytes:
    """Another value of one entry; the manifest's own sha256 as it was, missing, made up, or made right again."""
    manifest = json.loads(content)
    how = chance.randrange(4)
    # What the manifest alone records may be changed by anyone who makes its sha256 right again; the rest shows.
    key = chance.choice(
        ["epoch", "iteration", "files", *([] if how == 3 else ["value", "name", "run", "hyperparameters"])]
    )
    if key == "files":
        which = chance.choice(["size", "sha256"])
        manifest["files"]["state.pt"][which] = {"size": chance.randrange(10**6), "sha256": chance.randbytes(32).hex()}[
            which
        ]
    else:
        manifest[key] = chance.choice([chance.randrange(100, 10**6), "something else"]) if how < 3 else 10**6
    if how == 1:
        del manifest["sha256"]
    elif how == 2:
        manifest["sha256"] = chance.randbytes(32).hex()
    elif how == 3:
        made_right: bytes = encode(manifest)
        return made_right
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


CASES = 2100


@pytest.mark.slow
def test_no_damage_is_ever_loaded_and_the_next_good_one_is_taken(folder: Path) -> None:
    older, newer, newest = trained(folder)
    chance = random.Random(20240607)
    content = {
        path: path.read_bytes() for gen in (older, newer, newest) for path in (gen / "state.pt", gen / "manifest.json")
    }
    kinds: list[tuple[str, Callable[[bytes, random.Random], bytes] | None, tuple[str, ...]]] = [
        ("flip", flip, ("state.pt", "manifest.json")),
        ("flip", flip, ("state.pt",)),
        ("cut", cut, ("state.pt", "manifest.json")),
        ("zero", zero, ("state.pt", "manifest.json")),
        ("lengthen", lengthen, ("state.pt", "manifest.json")),
        ("edit", edit, ("manifest.json",)),
        ("swap", None, ("state.pt", "manifest.json")),
        ("remove", None, ("state.pt", "manifest.json")),
    ]
    seen: dict[str, int] = {}
    while sum(seen.values()) < CASES:
        kind, change, files = chance.choice(kinds)
        path = newest / chance.choice(files)
        if kind == "remove":
            path.unlink()
        else:
            if change is None:
                other = chance.choice([older, newer]) / path.name
                changed = content[other]
                other.write_bytes(content[path])  # so that the other one is damaged, too
            else:
                changed = change(content[path], chance)
            if changed == content[path]:
                continue
            path.write_bytes(changed)
        seen[kind] = seen.get(kind, 0) + 1
        with pytest.raises(ValueError, match=r"the checkpoint is damaged: (state\.pt|manifest\.json)") as caught:
            Checkpoint.load(newest)
        assert newest.name in str(caught.value)
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            taken = iteration(folder)
        assert taken in ((2, 1) if kind == "swap" else (2,)), (kind, path)
        named = [str(one.message) for one in reported if one.category is RuntimeWarning]
        # Where two manifests were exchanged, the other folder is the one that says it holds the newest.
        assert any((newest.name in text or kind == "swap") and "damaged" in text for text in named), (kind, named)
        for file, whole in content.items():
            if kind in ("swap", "remove") or file == path:
                file.write_bytes(whole)
    assert min(seen.values()) > 100, seen
    assert iteration(folder) == iteration(newest) == 3, "nothing was renamed or removed by looking"
    assert visible(folder) == [older.name, newer.name, newest.name]


def test_if_none_is_whole_the_error_lists_each(folder: Path) -> None:
    first, second = trained(folder, 2)
    (first / "state.pt").unlink()
    (second / "manifest.json").write_text("{}")
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(ValueError, match="all checkpoints in the folder are damaged") as caught,
    ):
        Checkpoint.load(folder)
    assert f"{first.name}: state.pt is missing" in str(caught.value)
    assert f"{second.name}: manifest.json has changed since it was written" in str(caught.value)


def test_a_folder_that_a_crash_emptied_is_named(folder: Path) -> None:
    _, second = trained(folder, 2)
    for name in os.listdir(second):
        (second / name).unlink()
    with pytest.warns(RuntimeWarning, match=rf"{second.name}.*manifest.json is missing"):
        assert iteration(folder) == 1


def test_one_that_was_renamed_as_a_whole_is_loaded_and_the_warning_names_it(folder: Path) -> None:
    (path,) = trained(folder, 1)
    path.rename(folder / "mine")
    with pytest.warns(RuntimeWarning, match=rf"folder 'mine' contains a checkpoint .* the name '{path.name}'"):
        assert iteration(folder / "mine") == 1


def test_a_resumed_run_sets_a_damaged_one_aside_and_writes_it_anew(folder: Path) -> None:
    _, second, third = trained(folder, keep=3)
    (third / "state.pt").write_bytes(b"")
    handler = Checkpoint(folder, every="1it", keep=3)
    engine = engine_of(handler)
    with pytest.warns(RuntimeWarning, match="damaged"):
        state = Checkpoint.load(folder)
    assert visible(folder)[-1] == third.name, "looking changes nothing"
    engine.load_state_dict(state)
    engine.run(DATA, max_iters=4)
    assert [name[-1] for name, _ in handler.kept] == ["2", "3", "4"]
    assert f"{third.name}.damaged" in visible(folder)
    assert iteration(folder) == 4
    assert iteration(third) == 3
    assert iteration(second) == 2


# ---- crashes ------------------------------------------------------------------------------------------------------


class Recorded(Files):
    """Notes every operation that changes something."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.log.append(("make_folder", path))

    def write(self, path: Path, content: Content) -> None:
        super().write(path, content)
        self.log.append(("write", path, path.read_bytes()))

    def sync(self, path: Path) -> None:
        super().sync(path)
        self.log.append(("sync", path))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.log.append(("rename", old, new))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.log.append(("remove", path))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.log.append(("remove", path))


class Node:
    """A file or folder of the modelled disk: as programs see it, and as it is known to be on the disk."""

    def __init__(self, is_folder: bool) -> None:
        self.is_folder = is_folder
        self.entries: dict[str, Node] = {}
        self.safe_entries: dict[str, Node] = {}
        self.content = b""
        self.safe_content: bytes | None = None


class Disk:
    """A disk that promises nothing but what was synced: content of files, entries of folders, each by itself."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Node(True)

    def node(self, path: Path) -> Node:
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def apply(self, operation: tuple[Any, ...]) -> None:
        kind, path = operation[:2]
        if kind == "make_folder":
            self.node(path.parent).entries[path.name] = Node(True)
        elif kind == "write":
            file = self.node(path.parent).entries[path.name] = Node(False)
            file.content = operation[2]
        elif kind == "rename":
            self.node(operation[2].parent).entries[operation[2].name] = self.node(path.parent).entries.pop(path.name)
        elif kind == "remove":
            del self.node(path.parent).entries[path.name]
        else:
            node = self.node(path)
            node.safe_entries, node.safe_content = dict(node.entries), node.content

    def left(self, into: Path, survives: Callable[[], bool], spoil: Callable[[bytes], bytes]) -> None:
        """Write what a power cut leaves: of what was not synced, what survives, and files as they are spoiled."""

        def lay(node: Node, path: Path) -> None:
            if not node.is_folder:
                path.write_bytes(spoil(node.content) if node.safe_content is None else node.safe_content)
                return
            path.mkdir(exist_ok=True)
            entries = {}
            for name in node.entries | node.safe_entries:
                before, now = node.safe_entries.get(name), node.entries.get(name)
                if (kept := now if before is now or survives() else before) is not None:
                    entries[name] = kept
            for name, one in entries.items():
                lay(one, path / name)

        lay(self.top, into)


SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "lost": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeroed": lambda content: bytes(len(content)),
    "there": lambda content: content,
}


def check_crashes(root: Path, log: list[tuple[Any, ...]]) -> int:
    """Cut the power after every prefix of the operations; the newest that was ever reported as saved, or a newer one, loads."""
    disk, states, committed = Disk(root), 0, 0
    renamed = None
    chance = random.Random(3)
    for operation in log:
        disk.apply(operation)
        if operation[0] == "rename" and not operation[2].name.startswith("."):
            renamed = int(operation[2].name[-1])
        if operation == ("sync", root) and renamed is not None:
            committed, renamed = max(committed, renamed), None
        for (_, spoil), survival in itertools.product(SPOILS.items(), ("none", "all", "some", "some")):
            into = root.with_name(f"{root.name}-crashed")
            survives = {"none": lambda: False, "all": lambda: True, "some": lambda: chance.random() < 0.5}[survival]
            disk.left(into, survives, spoil)
            states += 1
            if committed:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    assert iteration(into) >= committed, (operation, survival)
            shutil.rmtree(into)
    assert committed == 4
    return states


@pytest.mark.moderate
@pytest.mark.parametrize("asynchronous", quick([False, True], True))
@pytest.mark.parametrize("keep", quick([1, 2], 2))
def test_whatever_a_power_cut_leaves_the_newest_that_was_saved_loads(
    keep: int, asynchronous: bool, folder: Path
) -> None:
    root = folder / "run"
    root.mkdir()
    handler = Checkpoint(root, every="1it", keep=keep, asynchronous=asynchronous)
    handler.files = recorded = Recorded()
    engine_of(handler).run(DATA, max_iters=4)
    assert check_crashes(root, recorded.log) > 500


def test_the_model_of_the_disk_finds_an_order_that_is_not_safe(folder: Path) -> None:
    class Careless(Recorded):
        def sync(self, path: Path) -> None:
            if path.name != "state.pt":
                super().sync(path)

    root = folder / "run"
    root.mkdir()
    handler = Checkpoint(root, every="1it", keep=1)
    handler.files = recorded = Careless()
    engine_of(handler).run(DATA, max_iters=4)
    with pytest.raises((AssertionError, ValueError, FileNotFoundError)):
        check_crashes(root, recorded.log)


class Dying(Files):
    """Ends the process, as SIGKILL would, before its n-th operation."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _live(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def make_folder(self, path: Path) -> None:
        self._live()
        super().make_folder(path)

    def write(self, path: Path, content: Content) -> None:
        self._live()
        super().write(path, content)

    def sync(self, path: Path) -> None:
        self._live()
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self._live()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._live()
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._live()
        super().remove_folder(path)


def begin_child(act: Callable[[], object]) -> int:
    """Run something in a process of its own: it ends with 0, or 1 after an error."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def in_child(act: Callable[[], object]) -> int:
    """As `begin_child`; the status that it ended with."""
    return os.waitpid(begin_child(act), 0)[1]


@pytest.mark.moderate
@pytest.mark.parametrize("at", spread(range(1, 14), 5))
def test_a_run_that_was_killed_goes_on_and_leaves_what_the_other_leaves(at: int, folder: Path) -> None:
    def die() -> None:
        handler = Checkpoint(folder / "killed", every="1it", keep=1)
        engine = engine_of(handler)
        engine.run(DATA, max_iters=3)
        handler.files = Dying(at)
        engine.run(DATA, max_iters=6)

    assert in_child(die) == signal.SIGKILL
    state = Checkpoint.load(folder / "killed")
    assert state["engine"]["iteration"] in (3, 4)
    handler = Checkpoint(folder / "killed", every="1it", keep=1)
    engine = engine_of(handler)
    engine.load_state_dict(state)
    engine.run(DATA, max_iters=6)
    (expected,) = trained(folder / "whole", 6, keep=1)
    source = os.path.basename(state["origin"]["path"])
    assert [name for name, _ in handler.kept] == [expected.name]
    assert visible(folder / "killed") == sorted([source, expected.name])
    assert hidden(folder / "killed") == []
    one, other = (Checkpoint.load(path) for path in (folder / "killed" / expected.name, expected))
    assert torch.equal(one["modules"]["model"]["weight"], other["modules"]["model"]["weight"])
    assert one["handlers"] == other["handlers"]


def test_one_that_is_written_again_is_never_missing(folder: Path) -> None:
    """The second of one iteration takes the first one's name; killed between the two renames, the first is still there."""

    def run(files: Files) -> Checkpoint:
        handler = Checkpoint(folder / "run", every=Events.ITERATION_COMPLETED(every=3) | Events.EPOCH_COMPLETED, keep=1)
        engine = engine_of(handler)
        with allow("W37"):
            engine.run(DATA, max_iters=2)
        handler.files = files
        engine.run(DATA, max_epochs=1)
        return handler

    recorded = Recorded()
    ((name, _),) = run(recorded).kept
    renames = [i for i, one in enumerate(recorded.log, start=1) if one[0] == "rename"]
    assert [one[1].name.endswith(".new") for one in recorded.log if one[0] == "rename"] == [True, False, True]
    shutil.rmtree(folder / "run")
    assert in_child(lambda: run(Dying(renames[-1]))) == signal.SIGKILL
    assert visible(folder / "run") == []
    assert iteration(folder / "run") == 3
    clean(folder / "run", DISK)
    assert visible(folder / "run") == [name]
    assert hidden(folder / "run") == []


# ---- whose they are -----------------------------------------------------------------------------------------------


def test_leftovers_of_the_dead_are_cleaned_and_those_of_the_living_are_not(folder: Path) -> None:
    machine, _, _ = identity().split("~")

    def began(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

    parent = os.getppid()
    living = f".a.{machine}~{parent}~{began(parent)}~0.new"
    stays = [living, f".a.{'f' * 8}~{parent}~1~0.new", ".notes", ".a.new"]
    goes = [
        f".b.{machine}~{parent}~{began(parent) - 1}~0.new",  # an earlier process with the same id
        f".b.{machine}~{2**22 + 1}~5~0.old",
        f".b.{identity()}~99999.new",  # one that this process could not remove
        f".c.{'f' * 8}~1~1~0.new",  # of another machine, two days ago
    ]
    for name in stays + goes:
        (folder / name).mkdir()
        (folder / name / "state.pt").write_text("half")
    os.utime(folder / goes[-1], (time.time() - 2 * 86400,) * 2)
    trained(folder)
    assert hidden(folder) == sorted(stays)
    assert is_alive(identity()) is True


def test_a_run_leaves_what_another_wrote_alone_and_takes_other_names(folder: Path) -> None:
    first = trained(folder, 3, keep=2)
    before = {path: path.read_bytes() for one in first for path in one.iterdir()}
    second = trained(folder, 4, keep=2)
    assert [path.name for path in second] == [f"{first[1].name}-2", "checkpoint-epoch0002-iter00000004"]
    assert {path: path.read_bytes() for path in before} == before
    assert visible(folder) == sorted(path.name for path in first + second)
    third = trained(folder, 4, keep=2)
    assert [path.name[-2:] for path in third] == ["-3", "-2"]


def test_a_run_that_is_called_again_and_one_that_is_reset(folder: Path) -> None:
    handler = Checkpoint(folder, every="1it", keep=2)
    engine = engine_of(handler)
    engine.run(DATA, max_iters=2)
    engine.run(DATA, max_iters=3)
    assert [name[-1] for name in visible(folder)] == ["2", "3"]
    engine.reset()
    engine.run(DATA, max_iters=3)
    assert [name.partition("iter")[2] for name in visible(folder)] == [
        "00000002",
        "00000002-2",
        "00000003",
        "00000003-2",
    ]


def test_a_state_that_is_put_back_in_the_same_engine_writes_the_same_names_again(folder: Path) -> None:
    handler = Checkpoint(folder, every="1it", keep=2)
    engine = engine_of(handler)
    engine.run(DATA, max_iters=3)
    state = engine.state_dict()
    engine.run(DATA, max_iters=5)
    engine.load_state_dict(state)
    engine.run(DATA, max_iters=5)
    assert [name[-1] for name, _ in handler.kept] == ["4", "5"]
    assert visible(folder) == [name for name, _ in handler.kept]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", quick([False, True], True))
def test_two_processes_in_one_folder_at_the_same_time(asynchronous: bool, folder: Path) -> None:
    def run(me: str, other: str) -> None:
        handler = Checkpoint(folder / "both", every="1it", keep=3, asynchronous=asynchronous)
        engine = engine_of(handler)
        (folder / f"ready{me}").write_text("")
        while not (folder / f"ready{other}").exists():
            time.sleep(0.001)
        engine.run(DATA, max_epochs=40)
        (folder / me).write_text(json.dumps([name for name, _ in handler.kept]))

    children = [begin_child(partial(run, "1", "2")), begin_child(partial(run, "2", "1"))]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    kept = [json.loads((folder / me).read_text()) for me in ("1", "2")]
    assert [len(names) for names in kept] == [3, 3]
    assert visible(folder / "both") == sorted(kept[0] + kept[1]), "each has its own, and nothing else is left"
    assert hidden(folder / "both") == []
    for names in kept:
        manifests = [read_manifest(folder / "both" / name, DISK) for name in names]
        assert len({one["run"] for one in manifests}) == 1
        assert [iteration(folder / "both" / name) for name in names] == [118, 119, 120]


def test_a_name_that_is_taken_at_the_last_moment_is_not_overwritten(folder: Path) -> None:
    class Slow(Files):
        """Another run is quicker, after this one has looked."""

        def rename(self, old: Path, new: Path) -> None:
            if old.name.endswith(".new") and new.name == "a":
                new.mkdir()
                (new / "state.pt").write_text("of another")
            super().rename(old, new)

    with pytest.raises(Taken):
        commit(folder, "a", NewVersion(SerializedState({}), {}), files=Slow(), may_replace=lambda path: False)
    assert visible(folder) == ["a"]
    assert hidden(folder) == []
    assert (folder / "a" / "state.pt").read_text() == "of another"

    handler = Checkpoint(folder / "run", every="1it", filename="a")
    handler.files = Slow()
    engine_of(handler).run(DATA, max_iters=1)
    assert handler.kept == [("a-2", None)]
    assert iteration(folder / "run" / "a-2") == 1


# ---- resuming -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:C17:signalfire.FindingWarning")
@pytest.mark.parametrize("cut", range(1, 8))
def test_kept_after_a_resume_is_what_the_uninterrupted_run_keeps(cut: int, folder: Path) -> None:
    scores = [5.0, 3.0, 4.0, 1.0, 2.0, 6.0, 0.5, 7.0]

    def build(where: Path) -> Engine:
        engine = engine_of(
            Checkpoint(where, every="1it", keep=2, name="last"),
            Checkpoint(where, every="3it", keep=1, name="third"),
            Checkpoint(where, monitor="score", mode="min", keep=2, name="best"),
        )
        engine.connect(
            Events.ITERATION_COMPLETED,
            lambda engine: engine.state.metrics.update(score=scores[engine.state.iteration - 1]),
        )
        return engine

    def kept(engine: Engine) -> dict[str, list[tuple[str, float | None]]]:
        return {name: one.kept for name, one in engine.handlers.items() if isinstance(one, Checkpoint)}

    whole = build(folder / "whole")
    whole.run(DATA, max_iters=8)
    build(folder / "cut").run(DATA, max_iters=cut)
    state = Checkpoint.load(folder / "cut")
    other = build(folder / "cut")
    other.load_state_dict(state)
    other.run(DATA, max_iters=8)
    assert kept(other) == kept(whole)
    source = os.path.basename(state["origin"]["path"])
    assert set(visible(folder / "cut")) == {*visible(folder / "whole"), source}
    for name in visible(folder / "whole"):
        one, two = Checkpoint.load(folder / "whole" / name), Checkpoint.load(folder / "cut" / name)
        assert one["handlers"] == two["handlers"]
        assert torch.equal(one["modules"]["model"]["weight"], two["modules"]["model"]["weight"])


# ---- places that cannot be written --------------------------------------------------------------------------------


def test_a_folder_that_is_removed_during_the_run_is_an_error_that_names_it(folder: Path) -> None:
    handler = Checkpoint(folder / "run", every="1it")
    engine = engine_of(handler)
    engine.connect(Events.ITERATION_STARTED(once=3), lambda engine: shutil.rmtree(folder / "run"))
    with pytest.raises(FileNotFoundError, match="run") as caught:
        engine.run(DATA, max_iters=5)
    assert any("while writing the checkpoint" in note for note in caught.value.__notes__)
    engine.run(DATA, max_iters=5)  # STARTED makes it again
    assert [name[-1] for name in visible(folder / "run")] == ["4", "5"]


def test_a_folder_that_becomes_read_only_is_an_error_and_the_earlier_ones_stay(folder: Path) -> None:
    def run() -> None:
        handler = Checkpoint(folder / "run", every="1it")
        engine = engine_of(handler)

        def forbid(engine: Engine) -> None:
            os.chmod(folder / "run", 0o555)
            if os.geteuid() == 0:  # who may write anywhere
                os.seteuid(65534)

        engine.connect(Events.ITERATION_STARTED(once=3), forbid)
        with pytest.raises(PermissionError) as caught:
            engine.run(DATA, max_iters=5)
        assert caught.value.__notes__[0].startswith("while writing the checkpoint")
        assert [name[-1] for name, _ in handler.kept] == ["1", "2"]

    assert in_child(run) == 0
    os.chmod(folder / "run", 0o755)
    assert [name[-1] for name in visible(folder / "run")] == ["1", "2"]
    assert hidden(folder / "run") == []
    assert iteration(folder / "run") == 2


@pytest.mark.moderate
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [0, 100, 5000])
def test_a_disk_that_is_full_is_an_oserror_and_the_run_can_go_on(limit: int, asynchronous: bool, folder: Path) -> None:
    def run() -> None:
        handler = Checkpoint(folder / "run", every="1it", asynchronous=asynchronous)
        engine = engine_of(handler)
        engine.run(DATA, max_iters=3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large") as caught:
            engine.run(DATA, max_iters=6)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert any("earlier checkpoints are unchanged" in note for note in caught.value.__notes__)
        assert [name[-1] for name, _ in handler.kept] == ["2", "3"]
        assert visible(folder / "run") == [name for name, _ in handler.kept]
        assert hidden(folder / "run") == []
        assert iteration(folder / "run") == 3
        engine.run(DATA, max_iters=8)
        assert visible(folder / "run") == [name for name, _ in handler.kept]
        assert [name[-1] for name, _ in handler.kept] == ["7", "8"]

    assert in_child(run) == 0


FULL = """
import shutil, sys
from pathlib import Path
from signalfire.handlers import Checkpoint, CSVLogger
import torch
from functools import partial
from signalfire import Engine, Update
torch.set_num_threads(1)
folder = Path(sys.argv[1])
data = [(torch.ones(2, 64), torch.ones(2, 32))] * 9
update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.Adam, lr=0.1))
engine = Engine(update, model=torch.nn.Linear(64, 32), seed=0)
handler = Checkpoint(folder / "run", every="1it", keep=2)
engine.attach(handler)
engine.run(data, max_iters=3)
free = shutil.disk_usage(folder).free
(folder / "ballast").write_bytes(bytes(free - 20_000))  # less than a checkpoint takes
try:
    engine.run(data, max_iters=6)
except OSError as error:
    print(error.errno, error.__notes__[0], [name[-1] for name, _ in handler.kept])
print(Checkpoint.load(folder / "run")["engine"]["iteration"], sorted(path.name[-1] for path in (folder / "run").iterdir()))
(folder / "ballast").unlink()
engine.run(data, max_iters=8)
print(Checkpoint.load(folder / "run")["engine"]["iteration"], [name[-1] for name, _ in handler.kept])
"""


@pytest.mark.slow
def test_a_small_disk_that_is_really_full_is_an_oserror_and_the_run_can_go_on(tmp_path: Path) -> None:
    """A file system of its own, in memory, of 600 kB, which this process alone mounts."""
    mounted = 'mount -t tmpfs -o size=600k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted, "sh", str(tmp_path), sys.executable, FULL]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if found.returncode and ("unshare" in found.stderr or "mount" in found.stderr):
        pytest.skip(f"no file system can be mounted here: {found.stderr.strip()}")
    lines = found.stdout.splitlines()
    assert len(lines) == 3, found.stderr
    assert lines[0].startswith("28 while writing the checkpoint")
    assert lines[0].endswith("['2', '3']")
    assert lines[1] == "3 ['2', '3']"
    assert lines[2] == "8 ['7', '8']"


# ---- what else is in the folder -----------------------------------------------------------------------------------


def test_links_that_lead_nowhere_are_passed_over_by_name(folder: Path) -> None:
    trained(folder)
    (folder / "moved-iter00000009").symlink_to(folder / "archive")
    (folder / "loop").symlink_to("loop")
    with pytest.warns(RuntimeWarning) as caught:
        assert iteration(folder) == 3
    assert {name for name in ("moved-iter00000009", "loop") for one in caught if name in str(one.message)} == {
        "moved-iter00000009",
        "loop",
    }
    with pytest.warns(UserWarning, match="W33") as caught:
        assert [path.name[-1] for path in trained(folder, 4, keep=1)] == ["4"]
    assert len(caught) == 2


def test_a_folder_without_permission_is_passed_over_by_name(folder: Path) -> None:
    class Forbidding(Files):
        def list(self, path: Path) -> list[str]:
            if path.name == "lost+found":
                raise PermissionError(13, "Permission denied", str(path))
            return super().list(path)

    trained(folder)
    (folder / "lost+found").mkdir()
    handler = Checkpoint(folder, every="1it")
    handler.files = Forbidding()
    engine = engine_of(handler)
    engine.connect(Events.EPOCH_STARTED, lambda engine: seen.extend(engine.findings.of_run().of("W33")))
    seen: list[Any] = []
    with pytest.warns(UserWarning, match=r"lost\+found"):
        engine.run(DATA, max_epochs=1)
    assert len(seen) == 1, "known before the first batch"


def test_a_name_that_goes_away_while_one_looks_is_no_error(folder: Path) -> None:
    class Vanishing(Files):
        """Another run removes the oldest version after the folder was listed, or after its manifest was read."""

        def __init__(self, when: str) -> None:
            self.when, self.gone = when, False

        def remove_it(self, when: str) -> None:
            if when == self.when and not self.gone:
                self.gone = True
                shutil.rmtree(max(path for path in folder.iterdir()))

        def list(self, path: Path) -> list[str]:
            names = super().list(path)
            if path == folder:
                self.remove_it("listed")
            return names

        def open(self, path: Path, *arguments: Any, **options: Any) -> Any:
            if path.name == "state.pt":
                self.remove_it("manifest read")
            return super().open(path, *arguments, **options)

    for when in ("listed", "manifest read"):
        trained(folder)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setattr(Checkpoint, "files", Vanishing(when))
            assert iteration(folder) in (2, 3)
        shutil.rmtree(folder)
        folder.mkdir()


@pytest.mark.parametrize("when", ["listed", "looked at", "manifest read", "state read"])
def test_a_resume_finds_the_state_of_a_run_that_saves_and_removes_meanwhile(when: str, folder: Path) -> None:
    runs, later = folder / "runs", folder / "later"
    first, second = trained(runs, 2)
    second.rename(later)

    class Saving(Files):
        """Another run saves its second version and removes its first one, just after this point."""

        def reached(self, point: str) -> None:
            if point == when and later.exists():
                later.rename(second)
                shutil.rmtree(first)

        def list(self, path: Path) -> list[str]:
            names = super().list(path)
            self.reached("listed" if path == runs else "looked at")
            return names

        def open(self, path: Path, *arguments: Any, **options: Any) -> Any:
            file = super().open(path, *arguments, **options)
            self.reached("state read" if path.name == "state.pt" else "manifest read")
            return file

    engine = engine_of(Checkpoint(runs, every="9it", resume=True))
    began: list[int] = []
    engine.connect(Events.CHECKPOINT_LOADED, lambda engine: began.append(engine.state.iteration))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "files", Saving())
        engine.run(DATA, max_iters=3)
    assert began == [1 if when == "state read" else 2]


def test_a_version_is_loaded_by_its_name_while_it_is_replaced_and_after_a_crash_in_between(folder: Path) -> None:
    trained(folder, 3, keep=1, filename="last")
    (folder / "last").rename(folder / f".last.{identity()}~7.replaced")
    assert iteration(folder / "last") == 3
    assert iteration(folder / "last" / "state.pt") == 3
    assert [path.name for path in trained(folder, 4, keep=1, filename="last")] == ["last-2"], "of another run"
    assert iteration(folder / "last") == 3


def test_of_a_link_only_the_link_is_removed(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "precious").write_text("data")
    (folder / f".old.{identity()}~99.old").symlink_to(archive)
    handler = Checkpoint(folder, every="1it", keep=1)
    engine = engine_of(handler)
    moved: list[Path] = []

    def move(engine: Engine) -> None:
        """Put a version into the archive, and a link in its place."""
        assert handler.last is not None
        moved.append(handler.last.rename(archive / handler.last.name))
        (folder / moved[0].name).symlink_to(moved[0])

    engine.connect(Events.ITERATION_COMPLETED(once=2), move, phase=Phase.PERSIST, rank=9)
    engine.run(DATA, max_iters=3)
    assert os.listdir(folder) == [handler.kept[0][0]], "both links have gone"
    assert (archive / "precious").read_text() == "data"
    assert iteration(moved[0]) == 2


STRANGE: dict[str, Any] = {
    "epoch": True, "iteration": -1, "epoch_open": 1, "kind": "model", "lineage": [1], "value": "much", "handler": None, "run": 5,
    "hyperparameters": [], "environment": [], "name": ["a"], "writer": 7,
}  # fmt: skip


@pytest.mark.parametrize("key", STRANGE)
def test_a_manifest_with_strange_values_and_a_right_seal_is_passed_over(key: str, folder: Path) -> None:
    *_, last = trained(folder)
    manifest = read_manifest(last, DISK)
    (last / "manifest.json").write_bytes(encode({**manifest, key: STRANGE[key]}))
    with pytest.warns(
        RuntimeWarning, match=f"is skipped: manifest.json has changed since it was written; invalid entries: {key}"
    ):
        assert iteration(folder) == 2


@pytest.mark.parametrize(
    "entry",
    [5, {"size": 1}, {"size": -1, "sha256": ""}, {"size": "1", "sha256": ""}, {"size": 2**60, "sha256": "a"}],
)
def test_a_manifest_with_strange_files_and_a_right_seal_is_passed_over(entry: Any, folder: Path) -> None:
    *_, last = trained(folder)
    manifest = read_manifest(last, DISK)
    for files in ({"state.pt": entry}, {**manifest["files"], "/etc/passwd": entry}, {**manifest["files"], "\0": entry}):
        (last / "manifest.json").write_bytes(encode({**manifest, "files": files}))
        with pytest.warns(RuntimeWarning, match="damaged and is skipped"):
            assert iteration(folder) == 2


@pytest.mark.parametrize("writer", ["", "a~b~c", "~~~~", f"{identity().split('~')[0]}~{'9' * 50}~1", "x" * 1000])
def test_a_strange_writer_with_a_right_seal_neither_fails_a_run_nor_counts_as_dead(writer: str, folder: Path) -> None:
    *_, last = trained(folder)
    (last / "manifest.json").write_bytes(encode({**read_manifest(last, DISK), "writer": writer}))
    assert is_alive(writer) is None
    engine = engine_of(Checkpoint(folder, every="1it", resume=True))
    engine.run(DATA, max_iters=5)
    assert iteration(folder) == 5


@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_only_regular_files_of_a_plausible_size_are_read(file: str, kind: str, folder: Path) -> None:
    *_, last = trained(folder)
    (last / file).unlink()
    if kind == "pipe":
        os.mkfifo(last / file)
    elif kind == "device":
        (last / file).symlink_to("/dev/zero")
    else:
        with open(last / file, "wb") as opened:
            opened.truncate(2**40)
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert iteration(folder) == 2


def test_a_state_that_is_none_under_a_right_manifest_is_passed_over(folder: Path) -> None:
    *_, last = trained(folder)
    manifest = read_manifest(last, DISK)
    for content in ([1], {"modules": 1}, {"engine": 3}, {"engine": {"epoch": 1}}):
        torch.save(content, last / "state.pt")
        written = (last / "state.pt").read_bytes()
        entry = {"size": len(written), "sha256": hashlib.sha256(written).hexdigest()}
        for kind in ("state",) if isinstance(content, dict) else ("state", "weights"):
            (last / "manifest.json").write_bytes(encode({**manifest, "kind": kind, "files": {"state.pt": entry}}))
            with pytest.raises(ValueError, match="the checkpoint is damaged"):
                Checkpoint.load(last)


@pytest.mark.moderate
def test_the_versions_of_a_process_that_nobody_has_collected_may_be_removed(folder: Path) -> None:
    def die() -> None:
        engine = engine_of(Checkpoint(folder, every="1it", keep=1))
        engine.connect(Events.CHECKPOINT_SAVED(once=3), lambda engine: os._exit(0))
        engine.run(DATA, max_epochs=3)

    child = begin_child(die)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    try:
        engine_of(Checkpoint(folder, every="1it", keep=1, resume=True)).run(DATA, max_iters=6)
        assert [name[-1] for name in visible(folder)] == ["3", "6"], "what it resumed from stays"
        engine_of(Checkpoint(folder, every="1it", keep=1, resume=True)).run(DATA, max_iters=7)
        assert sorted(name[-1] for name in visible(folder)) == ["6", "7"]
    finally:
        os.waitpid(child, 0)
