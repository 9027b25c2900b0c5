"""A process group over gloo in which each collective takes a while longer, as over a slow network.

Not for FSDP2, whose device meshes ask for the name of a group, which torch gives to none that is written in Python.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

__all__ = ["SlowGroup", "use"]


class SlowGroup(dist.ProcessGroup):
    """Forwards collectives to gloo, and completes each ``latency`` seconds after it began, or when gloo does, if later.

    Several may be under way: it is their latency that grows, and not what they take of the network.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, latency: float) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.group: Any = ProcessGroupGloo(store, rank, size, timeout)
        self.latency = latency
        self.begun: queue.SimpleQueue[tuple[Any, Any, Any, float]] = queue.SimpleQueue()
        threading.Thread(target=self._end_in_turn, daemon=True).start()

    def _end_in_turn(self) -> None:
        while True:
            work, result, future, due = self.begun.get()
            try:
                work.wait()
                time.sleep(max(0.0, due - time.perf_counter()))
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)

    def later(self, work: Any, result: Any) -> Any:
        future: Any = Future()
        self.begun.put((work, result, future, time.perf_counter() + self.latency))
        return _create_work_from_future(future)

    def getBackendName(self) -> str:
        return "slow"


def _slowed(name: str) -> Callable[..., Any]:
    def collective(group: SlowGroup, *arguments: Any, **options: Any) -> Any:
        return group.later(getattr(group.group, name)(*arguments, **options), arguments[0] if arguments else [])

    return collective


for _name in ("allreduce", "broadcast", "allgather", "gather", "barrier"):
    setattr(SlowGroup, _name, _slowed(_name))


def use(latency: float) -> None:
    """Let all groups of this process be such ones: of the backend "slow", which `torch.distributed` knows from now on.

    Args:
        latency: Seconds that a collective takes at least.
    """
    make: Any = dist.new_group

    def create(store: Any, rank: int, size: int, timeout: Any) -> SlowGroup:
        return SlowGroup(store, rank, size, timeout, latency)

    def new_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return make(*args, backend="slow", **options)

    dist.Backend.register_backend("slow", create, devices=["cpu"])
    dist.new_group = new_group
