"""A position inside an epoch applies only to data of the same length and batch size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from signalfire import Engine
from signalfire.data.extent import extent_of
from tests.kit import batches, build


def loader(samples: int = 24, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 5), torch.ones(samples, 1)), batch_size, **options)


def stopped_at(iteration: int, data: Any) -> dict[str, Any]:
    engine = build(nn.Linear(5, 1))
    engine.run(data, max_iters=iteration)
    return engine.state_dict()


def resumed(state: dict[str, Any], data: Any, **options: Any) -> Engine:
    engine = build(nn.Linear(5, 1))
    engine.load_state_dict(state)
    engine.run(data, max_epochs=3, **options)
    return engine


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (loader(28), "24 samples .* has 28"),
        (loader(24, 6), "4 samples per batch .* has 6"),
        (loader(24, sampler=RandomSampler(range(20))), "24 samples .* has 20"),
        (batches(7), "6 batches .* has 7"),
    ],
    ids=["samples", "batch size", "sampler", "batches"],
)
def test_a_resume_inside_an_epoch_over_other_data_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"epoch 2, iteration 9.*{words}.*load_weights"):
        resumed(stopped_at(9, loader()), data)


def test_nothing_is_changed_by_a_refused_state() -> None:
    engine = build(nn.Linear(5, 1))
    before = engine.modules["model"].weight.detach().clone()  # type: ignore[operator]
    engine.load_state_dict(stopped_at(4, loader()))
    with pytest.raises(ValueError, match="24 samples"):
        engine.run(loader(28), max_epochs=3)
    assert torch.equal(engine.modules["model"].weight, before)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:W32")
@pytest.mark.parametrize("iteration", [6, 12])
def test_a_state_saved_at_the_end_of_an_epoch_goes_on_with_other_data(iteration: int) -> None:
    assert resumed(stopped_at(iteration, loader()), loader(28)).state.iteration == iteration + 7 * (3 - iteration // 6)


def test_a_pass_that_continues_across_epochs_is_not_applied_to_other_data() -> None:
    engine = build(nn.Linear(5, 1))
    engine.run(loader(), max_epochs=1, epoch_length=4)
    with pytest.raises(ValueError, match="24 samples"):
        resumed(engine.state_dict(), loader(28), epoch_length=4)


def test_the_same_extent_is_resumed_and_states_without_one_as_well() -> None:
    state = stopped_at(9, loader())
    assert resumed(state, loader()).state.iteration == 18
    del state["data"]["extent_now"]
    assert resumed(state, loader()).state.iteration == 18


def test_what_is_known_of_data() -> None:
    sequential = {"sampler": "SequentialSampler"}
    assert extent_of(loader(10, 4)) == {"samples": 10, "batch_size": 4, "batches": 3} | sequential
    assert extent_of([1, 2]) == {"batches": 2}
    assert extent_of(iter([1])) == extent_of(None) == {}
