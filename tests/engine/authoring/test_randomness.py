"""Seeds that depend on their parts alone, and the global generators: seeded, saved and restored together."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from signalfire import seed_everything
from signalfire.authoring.randomness import (
    derived_seed,
    device_generators,
    mixed,
    packed,
    random_state,
    reseed,
    set_random_state,
    unchanged_random_state,
)

Draw = tuple[float, float, float]


def draw() -> Draw:
    """One number from each global generator."""
    return random.random(), np.random.rand(), torch.rand(()).item()


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with unchanged_random_state():
        yield


# ---- derived seeds --------------------------------------------------------------------------------------------------


def test_derived_seeds_are_the_same_in_every_version_and_process() -> None:
    # Saved runs resume with these draws: another value would change how they continue.
    assert derived_seed(0, "mixup", 12) == 528473380058832160
    assert mixed(0, 1) == 0xE220A8397B1DCDAF >> 1, "the first number of SplitMix64 from 0"
    assert mixed(0, 2) == 0x6E789E6AA1B965F4 >> 1, "the second"


def test_seeds_of_different_parts_differ_also_where_their_texts_joined_do_not() -> None:
    parts: list[tuple[object, ...]] = [(1, 23), (12, 3), (123,), ("1", "2", "3"), (1, 23, ""), ()]
    assert len({derived_seed(*one) for one in parts}) == len(parts)


def test_seeds_have_63_bits_of_which_each_is_drawn() -> None:
    for seeds in ([derived_seed(n) for n in range(200)], [mixed(7, n) for n in range(200)]):
        assert len(set(seeds)) == 200
        ones = [sum(seed >> bit & 1 for seed in seeds) for bit in range(64)]
        assert ones[63] == 0
        assert all(60 < count < 140 for count in ones[:63])


# ---- seeding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1])
def test_seeding_at_the_lowest_cost_draws_what_everybody_else_seeds(seed: int) -> None:
    own = torch.Generator()
    reseed(seed, [own])
    fast = draw()
    seed_everything(seed)
    assert draw() == fast
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    assert draw() == fast
    assert own.initial_seed() == seed


def test_of_a_seed_of_more_than_32_bits_numpy_takes_the_low_ones() -> None:
    seed = 5 + 2**40
    reseed(seed)
    python, numpy, _ = draw()
    assert (python, numpy) == (random.Random(seed).random(), np.random.RandomState(5).rand())
    assert torch.initial_seed() == seed


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, None])
def test_a_seed_that_some_generator_does_not_take_seeds_none(seed: Any) -> None:
    seed_everything(0)
    expected = draw()
    seed_everything(0)
    with pytest.raises(ValueError, match=r"seed_everything\(seed=.*\): expected an int with 0 <= seed < 2\*\*32"):
        seed_everything(seed)
    assert draw() == expected


def test_the_cpu_has_no_generator_of_an_accelerator() -> None:
    assert device_generators([torch.device("cpu"), torch.device("meta")]) == []


# ---- saving and restoring -------------------------------------------------------------------------------------------


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(packed(state), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("through", [lambda state: state, packed, saved_and_loaded], ids=["as it is", "packed", "file"])
def test_restored_generators_draw_what_came_next(through: Any) -> None:
    random.gauss()
    np.random.randn()  # both keep the second of a pair of normal numbers
    state = random_state()
    expected = [random.gauss(), np.random.randn(), draw(), draw()]
    saved = through(state)
    seed_everything(99)
    set_random_state(saved)
    assert [random.gauss(), np.random.randn(), draw(), draw()] == expected


def test_a_state_is_packed_once_and_one_without_python_not_at_all() -> None:
    state = packed(random_state())
    assert isinstance(state["python"][1], bytes)
    assert packed(state) == state
    only = {"torch": state["torch"]}
    assert packed(only) is only


def test_generators_that_a_state_does_not_have_go_on() -> None:
    seed_everything(1)
    first = {"torch": random_state()["torch"]}
    before = draw()
    after = draw()
    seed_everything(1)
    draw()
    set_random_state(first)
    assert draw() == (*after[:2], before[2])


def test_whatever_is_drawn_in_a_block_and_however_it_ends_the_generators_are_as_before() -> None:
    own, expected = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    seed_everything(2)
    following = draw()
    seed_everything(2)

    def fail() -> None:
        with unchanged_random_state(own, None):
            draw()
            torch.rand(3, generator=own)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert draw() == following
    assert torch.rand(1, generator=own) == torch.rand(1, generator=expected)
