"""What shows that two processes belong to different jobs, and all in which those of one job may differ."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

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


def _describe(rank: str, local_rank: str, connection: Connection) -> None:
    with pytest.MonkeyPatch.context() as patch:
        connection.send(described(patch, RANK=rank, LOCAL_RANK=local_rank))


def _spawn(ranks: list[tuple[str, str]], connection: Connection) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_describe, args=(*rank, connection)) for rank in ranks]
    for child in children:
        child.start()
        child.join()


def spawned(*ranks: tuple[str, str]) -> list[Any]:
    """What the processes know that one process has started for these ranks, each with its local rank."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    parent = multiprocessing.get_context("fork").Process(target=_spawn, args=(list(ranks), sending))
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
