"""The number of Python and C calls that an iteration makes, which is what noise cannot move, is held fast."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from signalfire.authoring.versions import TORCH
from signalfire.handlers import Throughput
from tests.kit import finished

pytestmark = pytest.mark.skipif(
    (sys.version_info[:2], TORCH) != ((3, 11), (2, 13)), reason="calls are counted with Python 3.11 and torch 2.13"
)


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
        return importlib.import_module("loop")


def test_an_empty_step_makes_three_calls_over_the_bare_loop_and_one_more_for_each_handler(loop: ModuleType) -> None:
    bare = loop.calls(loop.bare_empty)
    assert bare == pytest.approx(1, abs=0.05)
    none, one, ten = (loop.calls(loop.empty(n)) for n in (0, 1, 10))
    print(bare, none, one, ten)
    assert none == pytest.approx(4, abs=0.05)
    assert ten - one == pytest.approx(9, abs=0.05)


def test_a_tiny_step_makes_fewer_calls_than_the_bare_loop(loop: ModuleType) -> None:
    bare, none, ten = (loop.calls(variant) for variant in (loop.bare_tiny(), loop.tiny(0), loop.tiny(10)))
    print(bare, none, ten)
    assert none < bare, "clearing the gradients costs less than optimizer.zero_grad()"
    assert ten == pytest.approx(none, abs=0.05), "handlers whose filters do not pass cost no call"


COUNTED = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from adapters import items, process
item = items.ITEMS["full"]
print(*(process.calls(importlib.import_module(f"adapters.{one}").make(item), item) for one in ("bare", "signalfire_")))
"""
"""In a process of its own: what other tests have imported adds calls to both loops."""


@pytest.mark.moderate
def test_a_full_stack_makes_few_calls_more_than_the_plain_loop() -> None:
    ended = finished("-c", COUNTED, Path(__file__).parent / "benchmarks", cwd=Path(__file__).parents[1])
    assert ended.returncode == 0, ended.stderr
    bare, mine = map(float, ended.stdout.split())
    print(bare, mine)
    assert mine - bare <= 10.4, "of accumulation, clipping, schedule, running loss, stopping, checkpoint and log"


def test_throughput_makes_one_call_as_an_idle_handler_does(loop: ModuleType) -> None:
    idle, mine = (
        loop.calls(loop.tiny_with(handler)) for handler in (loop.Idle(), Throughput(every="1000000it", warmup=1))
    )
    print(idle, mine)
    assert mine == pytest.approx(idle, abs=0.05)


def test_the_same_tiny_steps_come_to_the_same_weights(loop: ModuleType) -> None:
    models = [variant(20) for variant in (loop.bare_tiny(), loop.tiny(0), loop.tiny(10))]
    for model in models[1:]:
        assert models[0].weight.equal(model.weight)
