"""Versions of torch: what needs a newer one is refused by name, and a store is opened twice in each."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from signalfire import Engine, Update
from signalfire.authoring import versions
from signalfire.authoring.versions import NEEDED, check_torch, clone_of, keys_of, memory_of, precisions_of_products
from signalfire.handlers import DistributedDataParallel, FullyShardedDataParallel
from tests.kit import free_port
from tests.processes import run_together


def test_a_handler_that_needs_a_newer_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "TORCH", (2, 12))
    with pytest.raises(
        RuntimeError, match=r"^FullyShardedDataParallel needs torch 2\.13 or newer, but torch .* is installed.*install"
    ):
        check_torch(FullyShardedDataParallel())
    check_torch(DistributedDataParallel())


def refused_by_an_older_torch() -> str:
    vars(versions)["TORCH"] = (2, 12)
    update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
    engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
    engine.attach(FullyShardedDataParallel(timeout=60.0))
    with pytest.raises(RuntimeError) as caught:
        engine.run([(torch.ones(2, 2), torch.ones(2, 1))], max_epochs=1)
    return str(caught.value)


@pytest.mark.moderate
def test_several_processes_refuse_it_before_the_first_step() -> None:
    for message in run_together(refused_by_an_older_torch, 2):
        assert message.startswith("FullyShardedDataParallel needs torch 2.13 or newer")


def test_each_handler_that_needs_a_newer_torch_is_one() -> None:
    import signalfire.handlers

    assert set(NEEDED) <= set(signalfire.handlers.__all__)


def connected(kind: str, folder: Path) -> Callable[[], Any]:
    """What connects to one store as often as it is called."""
    if kind == "file":
        return lambda: dist.FileStore(str(folder / "store"), 1)  # type: ignore[attr-defined]
    port = free_port()
    servers: list[Any] = []

    def connect() -> Any:
        store: Any = dist.TCPStore("127.0.0.1", port, None, not servers, timedelta(seconds=60))  # type: ignore[attr-defined]
        servers.append(store)
        return store if kind == "tcp" else dist.PrefixStore("a", store)  # type: ignore[attr-defined]

    return connect


@pytest.mark.parametrize("kind", ["tcp", "prefix", "file"])
@pytest.mark.parametrize("old", [False, True])
def test_clones_of_a_store_are_read_while_the_main_thread_waits_in_it(
    kind: str, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes: list[Any] = [getattr(dist, name) for name in ("Store", "TCPStore", "PrefixStore", "FileStore")]
    for one in [one for one in classes if old and "clone" in vars(one)]:
        monkeypatch.delattr(one, "clone")
    connect = connected(kind, tmp_path)
    store = connect()
    waiting = threading.Thread(target=store.wait, args=(["come"],), daemon=True)
    waiting.start()
    clones = clone_of(store), clone_of(store)
    clones[0].set("word", "said")
    assert clones[1].get("word") == b"said"
    assert waiting.is_alive()
    connect().set("come", "now")
    waiting.join(60)
    assert not waiting.is_alive()


def test_what_a_newer_torch_tells_is_told() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60))  # type: ignore[attr-defined]
    store.set("a", "b")
    assert ("a" in keys_of(store)) == (versions.TORCH >= (2, 13))
    assert len(precisions_of_products()) == (2 if versions.TORCH >= (2, 9) else 0)
    assert callable(memory_of(torch.device("cuda")).max_memory_allocated)


ROOT = Path(__file__).parents[3]


def test_the_guide_has_the_pairs_that_the_script_tries_and_what_needs_a_newer_torch() -> None:
    page = (ROOT / "examples" / "guide" / "versions.md").read_text()
    script = (ROOT / "tests" / "versions.sh").read_text()
    (pairs,) = re.findall(r"^PAIRS=\(\n(.*)\n\)$", script, re.MULTILINE)
    tried = [tuple(pair.split()[:2]) for pair in re.findall(r'"([^"]+)"', pairs)]
    (table,) = re.findall(r"<!-- pairs -->\n((?:\|.*\n)+)", page)
    shown = [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in table.splitlines()[2:]]
    assert shown == tried
    for name, needed in NEEDED.items():
        assert re.search(rf"^\| `{name}`.*\| {'.'.join(map(str, needed.torch))} \|", page, re.MULTILINE), name
    required = re.search(r"^    torch>=(.*)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert required is not None
    assert f"PyTorch {required[1]} or newer" in page
