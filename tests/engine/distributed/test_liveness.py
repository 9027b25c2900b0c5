"""Processes of this machine: alone, ended but not collected, named in odd ways; and identities, of which no two are alike."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from signalfire.distributed import liveness
from signalfire.distributed.liveness import Process, boot_id, find_process, identity, is_alive, machine_name
from tests.processes import run_together

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def test_this_process_is_found_and_one_that_never_was_is_not() -> None:
    own = find_process(os.getpid())
    assert own is not None
    assert own.started > 0
    assert not own.defunct
    assert find_process(2**22 + 1) is None  # above the largest id that Linux gives


def test_a_process_that_nobody_has_collected_is_defunct_and_counts_as_ended() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # until it has ended; it stays as it is
    found = find_process(child.pid)
    assert found is not None
    assert found.defunct
    machine, _, _ = identity().split("~")
    name = f"{machine}~{child.pid}~{found.started}"
    assert is_alive(name) is False, "it writes no more, though its parent has not asked for its status"
    child.wait()
    assert find_process(child.pid) is None
    assert is_alive(name) is False


def test_a_process_is_read_right_whatever_its_name_is() -> None:
    script = "printf 'a) Z 1 (b)' > /proc/self/comm; echo; read line"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert Path(f"/proc/{child.pid}/comm").read_text() == "a) Z 1 (b)\n"
        found, own = find_process(child.pid), find_process(os.getpid())
        child.communicate(b"\n")
    assert found is not None
    assert own is not None
    assert found == Process(started=found.started, defunct=False)
    assert own.started <= found.started < own.started + 10**7


def test_an_identity_is_this_processs_as_long_as_it_lives() -> None:
    machine, pid, started = identity().split("~")
    assert (int(pid), is_alive(identity())) == (os.getpid(), True)
    assert is_alive(f"{machine}~{pid}~{int(started) - 1}") is False, "another one had this id before"
    assert is_alive(f"{'0' * len(machine)}~{pid}~{started}") is None, "on another machine"


def test_hosts_of_one_name_are_told_apart_by_their_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pid, started = identity().split("~")
    here = identity()
    monkeypatch.setattr(liveness, "boot_id", lambda: "2f1c0a9e-0000-4000-8000-000000000000")
    monkeypatch.setattr(liveness, "_identities", {})
    there = identity()
    assert is_alive(there) is True
    assert is_alive(here) is None, "a process of another host of this name"
    assert is_alive(f"{here.split('~')[0]}~{pid}~{int(started) - 1}") is None, "as well as one that has no process here"


def test_an_identity_without_the_boot_is_known_only_while_its_process_is_found() -> None:
    _, pid, started = identity().split("~")
    earlier = hashlib.sha256(machine_name().encode()).hexdigest()[:8]  # as 0.2.0 wrote it
    assert is_alive(f"{earlier}~{pid}~{started}") is True
    assert is_alive(f"{earlier}~{pid}~{int(started) - 1}") is None, "it may run on another host of this name"


def test_a_process_that_was_forked_has_an_identity_of_its_own() -> None:
    identity()  # known before the fork
    [child] = run_together(identity, 1)
    assert child.split("~")[0] == identity().split("~")[0]
    assert child.split("~")[1] != str(os.getpid())
    assert is_alive(child) is False


def test_the_machine_and_its_boot_are_those_that_linux_names() -> None:
    host, namespace = machine_name().rsplit(" ", 1)
    assert host == os.uname().nodename
    assert namespace == os.readlink("/proc/self/ns/pid")
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
