"""A framework in a process of its own, which trains, counts and measures on request."""

from __future__ import annotations

import cProfile
import gc
import importlib
import importlib.metadata
import multiprocessing
import pstats
import time
import traceback
from typing import Any

import torch

from .items import ITEMS, Item, Run

__all__ = ["Framework"]


class Framework:
    """One framework in a process of its own: some change torch, or one another, as soon as they are imported."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(name, other), daemon=True)
        self.process.start()

    def __call__(self, order: str, *arguments: Any) -> Any:
        self.pipe.send((order, *arguments))
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve(name: str, pipe: Any) -> None:
    """Do in this process what is asked for."""
    torch.set_num_threads(1)
    adapter, item, run = None, ITEMS["tiny"], None
    while True:
        try:
            order, *arguments = pipe.recv()
        except EOFError:  # all is measured
            return
        try:
            if order == "load":
                adapter = importlib.import_module(f".{name}{'_' if name == 'signalfire' else ''}", __package__)
                answer: Any = importlib.metadata.version(adapter.PACKAGE)
            elif order == "make":
                item = ITEMS[arguments[0]]
                run = adapter.make(item)  # type: ignore[union-attr]
                answer = run is not None
            elif order == "calls":
                answer = calls(run, item)  # type: ignore[arg-type]
            elif order == "weights":
                answer = [weight.detach().numpy() for weight in run(*arguments)]  # type: ignore[misc]
            else:
                answer = seconds(run, *arguments)  # type: ignore[arg-type]
        except Exception as error:  # it is raised where it was asked for
            if order != "load":
                traceback.print_exc()
            answer = RuntimeError(f"{name}: {type(error).__name__}: {error}")
        pipe.send(answer)


def calls(run: Run, item: Item) -> float:
    """Python and C calls an iteration, without what a run costs once."""

    def total(iterations: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(run, iterations)
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]

    run(item.short)  # what is worked out once
    return (total(2 * item.short) - total(item.short)) / item.short


def seconds(run: Run, iterations: int) -> float:
    gc.collect()
    began = time.perf_counter()
    run(iterations)
    return time.perf_counter() - began
