"""What shows that two processes belong to different jobs, and all in which those of one job may differ."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest

from signalfire.distributed import job

IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_HET_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")


def described(monkeypatch: pytest.MonkeyPatch, *, argv: tuple[str, ...] = ("train.py",), **variables: str) -> Any:
    """What a process with these arguments and variables knows of its job."""
    for name in (*IDS, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", list(argv))
    return job.describe()


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, "SLURM_JOB_ID is 7 in this process, but 8 in the"),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b"}, "TORCHELASTIC_RUN_ID is a in this process, but b"),
        (
            {"PBS_JOBID": "7", "argv": ("a.py",)},
            {"PBS_JOBID": "8", "argv": ("b.py",)},
            "PBS_JOBID is 7 in this process, but 8 in the other process",
        ),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "8"},
         "SLURM_JOB_ID is 7"),
        ({"argv": ("a/train.py",)}, {"argv": ("a/tune.py",)}, "runs 'train', but the other process runs 'tune'"),
        ({"argv": ("train.py",), "SLURM_JOB_ID": "7"}, {"argv": ("tune.py",)}, "this process runs 'train'"),
    ],
)  # fmt: skip
def test_different_jobs(one: Any, other: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = job.difference(described(monkeypatch, **one), described(monkeypatch, **other))
    assert found is not None
    assert said in found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"SLURM_JOB_ID": "7", "argv": ("a.py",)}, {"SLURM_JOB_ID": "7", "argv": ("b.py",)}),
        ({"SLURM_JOB_ID": "7"}, {}),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7"}),
        ({"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "7"}, {"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "8"}),
        ({"argv": ("/one/train.py", "--node_rank=0")}, {"argv": ("/other/train.py", "--node_rank=1", "--verbose")}),
        ({"argv": ("/opt/bin/train",)}, {"argv": ("train.py",)}),
        ({"argv": ("-c",)}, {"argv": ("train.py",)}),
        ({"argv": ()}, {"argv": ("train.py",)}),
    ],
)
def test_one_job(one: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.difference(described(monkeypatch, **one), described(monkeypatch, **other)) is None


def _describe(rank: str, local_rank: str, call: Call, connection: Connection) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if call.folder:
            patch.chdir(call.folder)
        connection.send(described(patch, argv=call.argv, RANK=rank, LOCAL_RANK=local_rank, **call.variables))


def _spawn(ranks: list[tuple[str, str]], call: Call, connection: Connection) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_describe, args=(*rank, call, connection)) for rank in ranks]
    for child in children:
        child.start()
        child.join()


class Call(NamedTuple):
    """How a program is called."""

    argv: tuple[str, ...] = ("train.py",)
    folder: str = ""
    variables: dict[str, str] = {}


def spawned(*ranks: tuple[str, str], call: Call = Call()) -> list[Any]:  # noqa: B008 - it cannot be changed
    """What the processes know that one process has started for these ranks, each with its local rank."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    parent = multiprocessing.get_context("fork").Process(target=_spawn, args=(list(ranks), call, sending))
    parent.start()
    found = [receiving.recv() for _ in ranks]
    parent.join()
    return found


@pytest.mark.moderate
def test_ranks_of_two_scripts_that_spawn_them_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    first, second = spawned(("0", "0"), ("1", "1"))
    _, other = spawned(("0", "0"), ("1", "1"))
    assert job.difference(first, second) is None
    found = job.difference(first, other)
    starters = first["spawner"][2], other["spawner"][2]
    assert found == f"process {starters[0]} started this process, but process {starters[1]} started the other process"
    [node] = spawned(("2", "0"))
    assert job.difference(first, node) is None, "a node of its own, though on this machine"


CALL = ("train.py", "--lr", "0.1", "--rank", "0", "device=cuda:0", "0")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        (Call(CALL), Call(("train.py", "--lr", "0.2", *CALL[3:])), False),
        (Call(CALL), Call((*CALL, "model=large")), False),
        (Call(CALL), Call(CALL, "/"), False),
        (Call(CALL), Call(("train.py", "--lr", "0.1", "--rank=1", "--device", "cuda:1", "1")), True),
        (Call(CALL, "/", {"SLURM_JOB_ID": "7"}), Call(("train.py",), "", {"SLURM_JOB_ID": "7"}), True),
    ],
)
def test_without_an_id_two_calls_by_two_parents_are_two_jobs(one: Call, other: Call, is_one: bool) -> None:
    # As parts of one job, such as two nodes, they may have two parents on one machine.
    first, same = spawned(("0", "0"), ("1", "1"), call=one)
    (second,) = spawned(("2", "0"), call=other)
    found = job.difference(first, second)
    assert (found is None) == is_one
    expected = (
        f"process {second['starter'][1]} started the other process with different arguments or in a different folder"
    )
    assert is_one or expected in str(found)
    assert job.difference(first, same | {"call": "elsewhere"}) is None  # of one parent
