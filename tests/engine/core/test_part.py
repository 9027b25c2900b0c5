"""The base of an engine's parts: each knows its engine, and does not keep it alive."""

from __future__ import annotations

import gc

import pytest

from signalfire import Engine
from signalfire.core.part import Part
from tests.kit import idle_engine


class Clock(Part[Engine]):
    pass


def test_a_part_knows_its_engine_and_does_not_keep_it_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        engine = idle_engine()
        part = Clock(engine)
        assert part.engine is engine
        del engine
        with pytest.raises(ReferenceError, match="the engine of this Clock no longer exists"):
            part.engine  # noqa: B018
    finally:
        gc.enable()
