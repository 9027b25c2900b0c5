"""Separate random streams: what one handler draws more or less does not shift what the model and the data draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .randomness import cuda_generators, derived_seed, mixed, reseed

if TYPE_CHECKING:
    from .engine import Engine
    from .update import UpdateState

__all__ = ["STREAMS", "begin_stream", "model_streams"]

STREAMS = ("shared", "separate")


def begin_stream(engine: Engine, *what: object) -> None:
    """With separate streams, reseed the global generators from the run's seed, the rank and ``what``."""
    if engine.streams == "separate":
        devices = {p.device for root in engine.modules.values() for p in root.parameters()}
        reseed(derived_seed(engine.seed, *what, engine.processes.rank), cuda_generators(devices))


def model_streams(engine: Engine) -> Callable[[UpdateState, int], None]:
    """A function that begins the stream of a micro-step, or of a further evaluation of it.

    The stream depends on the run's seed, the update's name, the iteration and the rank; then on which micro-step of the update in
    this iteration it is (time chunks), and on which evaluation. However much one draws, the others stay the same.
    """
    keys = {one.name: derived_seed(engine.seed, "model", one.name, engine.processes.rank) for one in engine.updates}
    places = dict.fromkeys(keys, (0, 0))  # by update: the last iteration, and its last micro-step in it
    devices = {p.device for module in engine.modules.values() for p in module.parameters()}
    on_devices = cuda_generators(devices)

    def begin(update: UpdateState, iteration: int) -> None:
        name = update.name
        last, place = places[name]
        if update.evaluation == 0:
            place = place + 1 if last == iteration else 0
            places[name] = iteration, place
        seed = mixed(keys[name], iteration)
        if place or update.evaluation:
            seed = mixed(mixed(seed, place), update.evaluation)
        reseed(seed, on_devices)

    return begin
