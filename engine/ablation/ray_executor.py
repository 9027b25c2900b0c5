"""Runs on a Ray cluster: an executor whose calls are tasks of Ray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["RayExecutor"]

T = TypeVar("T")


class RayExecutor(Executor):
    """An executor that makes each run a task of Ray: ``study.run(design, workers=RayExecutor())``.

    The workers import ``build``: ``ray.init(runtime_env={"working_dir": "."})`` sends the folder of a script along. If Ray does
    not run yet, the first task starts it on this machine. Needs ``pip install signalfire[cluster]``.

    Args:
        options: As ``ray.remote`` takes them for a task, such as ``num_cpus=2``, ``num_gpus=0.5`` or ``max_retries=0``.

    Raises:
        ImportError: if Ray is not installed.

    Example:
        >>> from importlib.util import find_spec
        >>> if find_spec("ray"):
        ...     executor = RayExecutor(num_gpus=0.5)  # two runs at a time on each GPU
    """

    def __init__(self, **options: Any) -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("RayExecutor needs Ray: pip install 'signalfire[cluster]'") from error
        self._ray: Any = ray
        self._options = options

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start a task; a future that is cancelled cancels it."""
        remote = self._ray.remote(**self._options) if self._options else self._ray.remote
        reference = remote(_call).remote(fn, *args, **kwargs)
        future: Future[T] = reference.future()

        def cancel(future: Future[T]) -> None:
            if future.cancelled():
                self._ray.cancel(reference)

        future.add_done_callback(cancel)
        return future


def _call(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """What Ray runs: its own decorator takes no callables but functions and classes."""
    return fn(*args, **kwargs)
