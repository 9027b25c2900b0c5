"""Sharded tensors on two ranks: shards and whole tensors, norms, modules that are whole for a while, and files of shards."""

from __future__ import annotations

import hashlib
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from signalfire.distributed import (
    SHARDS,
    ShardFiles,
    discard_unreduced,
    is_sharded,
    local_part,
    norms_over_ranks,
    process_group,
    reshard,
    sha256_of,
    split_shards,
    spread_like,
    unsharded,
    whole_tensor,
)
from signalfire.distributed import sharded as sharding
from signalfire.distributed.sharded import read_shards
from tests.kit import assert_same, mlp, needs_torch
from tests.processes import assert_alike, run_together

TIMEOUT = 60.0
CPU = torch.device("cpu")


def whole() -> Tensor:
    """Five rows, which two ranks cannot share evenly."""
    return torch.arange(10.0).reshape(5, 2)


def sharded(tensor: Tensor) -> Tensor:
    process_group(timeout=TIMEOUT)
    return distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)])


def test_plain_tensors_are_left_as_they_are() -> None:
    tensor, norms = whole(), torch.ones(1)
    assert not is_sharded(tensor)
    assert not is_sharded(nn.Parameter(tensor))
    assert not is_sharded("text")
    assert local_part(tensor) is whole_tensor(tensor) is spread_like(tensor, torch.ones(1)) is tensor
    assert spread_like(3, tensor) == 3
    assert norms_over_ranks(norms, [tensor], 2.0) is norms
    state = {"a": [tensor]}
    assert split_shards(state) == (state, {})
    assert read_shards(state, parameters=[], device=CPU) is state


def _shards() -> dict[str, Any]:
    own, rank = sharded(whole()), process_group().rank
    part = local_part(own)
    part[0, 0] = 100.0 + rank  # the memory of the shard
    flat, spread = torch.zeros(3), spread_like(whole(), own)
    values = [sharded(torch.tensor([3.0, 4.0])), torch.tensor([5.0]), sharded(torch.tensor([1.0, float("nan")]))]

    def norms(p: float) -> list[float]:
        locally = torch.stack([torch.linalg.vector_norm(local_part(value), p) for value in values])
        return norms_over_ranks(locally, values, p).tolist()

    return {
        "own": (is_sharded(own), part.tolist(), is_sharded(spread), local_part(spread).tolist()),
        "whole": (whole_tensor(own).tolist(), spread_like(own, torch.zeros(5, 2)).tolist()),
        "another shape": spread_like(flat, own) is flat,
        "norms": {p: str(norms(p)) for p in (1.0, 2.0, torch.inf)},
    }


def test_a_tensor_is_sharded_gathered_and_measured() -> None:
    first, second = run_together(_shards, 2)
    assert first["own"] == (True, [[100.0, 1.0], [2.0, 3.0], [4.0, 5.0]], True, [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    assert second["own"] == (True, [[101.0, 7.0], [8.0, 9.0]], True, [[6.0, 7.0], [8.0, 9.0]])
    for one in (first, second):
        gathered = whole()
        gathered[0, 0], gathered[3, 0] = 100.0, 101.0
        assert one["whole"] == (gathered.tolist(), gathered.tolist())
        assert one["another shape"]
        assert one["norms"] == {1.0: "[7.0, 5.0, nan]", 2.0: "[5.0, 5.0, nan]", torch.inf: "[4.0, 5.0, nan]"}


def _modules() -> dict[str, Any]:
    processes = process_group(timeout=TIMEOUT)
    model, plain, inputs = mlp(3, 5, 1), mlp(3, 5, 1), torch.ones(2, 3)
    fully_shard(model[0])
    fully_shard(model[1], reshard_after_forward=False)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    found: dict[str, Any] = {}
    with suppress(LookupError), unsharded([model]):
        if processes.is_rank_zero:  # nobody else takes part
            found["alone"] = [torch.equal(model(inputs), plain(inputs)) for _ in range(2)]
        raise LookupError
    found["sharded again"] = all(is_sharded(parameter) for parameter in model.parameters())
    with torch.no_grad():
        model(inputs)
    found["whole as before"] = [not is_sharded(module.weight) for module in model]
    reshard([model])
    found["resharded"] = all(is_sharded(parameter) for parameter in model.parameters())
    model.set_requires_gradient_sync(False)
    model(1000 * inputs).sum().backward()
    discard_unreduced([model])
    model.set_requires_gradient_sync(True)
    model(inputs).sum().backward()
    plain(inputs).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    found["gradients"] = [
        torch.equal(whole_tensor(a.grad), b.grad) for a, b in pairs if a.grad is not None and b.grad is not None
    ]
    return found


@needs_torch(2, 13, why="FullyShardedDataParallel")
@pytest.mark.moderate
def test_modules_are_whole_for_a_while_and_gradients_that_were_not_reduced_are_dropped() -> None:
    first, second = run_together(_modules, 2)
    assert first.pop("alone") == [True, True]
    assert first == second
    assert second == {
        "sharded again": True,
        "whole as before": [False, True],
        "resharded": True,
        "gradients": [True] * 4,
    }


def state() -> dict[str, Any]:
    """A state of sharded and of plain tensors."""
    rows, ints = sharded(whole()), sharded(torch.arange(3))
    return {"modules": {"model": {"a.b": rows, "a": {"b": ints}}}, "list": [rows * 2, (torch.ones(2), "text")]}


def _written(folder: Path) -> dict[str, Any]:
    processes = process_group(timeout=TIMEOUT)
    saved, shards = split_shards(state())
    files = ShardFiles(TIMEOUT)
    found: dict[str, Any] = {"paths": sorted(shards), "meta": [saved["list"][0].is_meta, saved["list"][1][1]]}
    if processes.is_rank_zero:
        entries = files.write(folder, shards)
        (folder / "taken").touch()
        with pytest.raises(OSError, match=r"the shards could not be written to .*taken.*: rank 0: "):
            files.write(folder / "taken", shards)
        files.done(entries)
    else:
        entries = files.assist(shards)
    read = read_shards({**saved, SHARDS: folder}, parameters=[state()["list"][0]], device=CPU)
    tensors = [read["list"][0], *read["modules"]["model"]["a"].values()]
    found["read"] = [(is_sharded(tensor), whole_tensor(tensor).tolist()) for tensor in tensors]
    return found | {"files": entries, "own": (saved, [len(local_part(tensor)) for tensor in tensors])}


@needs_torch(2, 13, why="FullyShardedDataParallel")
@pytest.mark.moderate
def test_shards_are_written_by_all_and_read_by_all_or_by_one_alone(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    found = run_together(_written, 2, folder)
    (saved, first), (_, second) = (one.pop("own") for one in found)
    assert (first, second) == ([3, 2], [2, 1])
    common = assert_alike(found)
    assert common["paths"] == ['["list", 0]', '["modules", "model", "a", "b"]', '["modules", "model", "a.b"]']
    assert common["meta"] == [True, "text"]
    assert common["read"] == [(True, (whole() * 2).tolist()), (True, [0, 1, 2])]
    assert set(common["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for name, entry in common["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    read = read_shards({**saved, SHARDS: folder}, parameters=[], device=CPU)
    assert SHARDS not in read
    assert_same({"rows": read["modules"]["model"]["a.b"]}, {"rows": whole()})
    assert_same({"ints": read["modules"]["model"]["a"]["b"]}, {"ints": torch.arange(3)})
    assert saved["list"][0].is_meta, "what was loaded is not changed"
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"the sharded tensors in '.*shards' cannot be read: "):
        read_shards({**saved, SHARDS: folder}, parameters=[], device=CPU)


class Harmful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harmed"),)


CODE = {
    "object": pickle.dumps(Harmful()),
    "function": pickle.dumps(torch.save),
    "class": pickle.dumps(pickle.Unpickler),
    "imported": b"ctorch.distributed.checkpoint.filesystem\nFuture\n.",  # a class that torch's module only imports
}


@pytest.mark.parametrize("kind", CODE)
def test_metadata_that_would_run_code_is_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(CODE[kind])
    state = {"weights": torch.empty(2, device="meta"), SHARDS: tmp_path}
    with pytest.raises(ValueError, match="the metadata of a checkpoint must not contain a "):
        read_shards(state, parameters=[], device=CPU)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_in_metadata_are_read_whichever_python_has_written_them(module: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(f"c{module}\nPosixPath\n(Vfolder\ntR.".encode())
    assert vars(sharding)["_reader"](tmp_path).read_metadata() == Path("folder")


def test_the_sha256_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 2**12
    (tmp_path / "file").write_bytes(content)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(content).hexdigest()
