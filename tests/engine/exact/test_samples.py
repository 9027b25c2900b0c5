"""Samples that are seeded by themselves: the same whenever and wherever they are fetched, and the global generators as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from signalfire.exact import SeededSamples, random_state
from tests import kit
from tests.engine.exact.lives import Samples


def read(loader: DataLoader[Any]) -> str:
    return kit.digest([list(batch) for batch in loader])


def masking(samples: Any) -> Any:
    inputs, targets = default_collate(list(samples))
    return inputs * (torch.rand(3) > 0.5), targets


@pytest.mark.moderate
@pytest.mark.parametrize("collate", [None, masking])
def test_batches_depend_on_seed_and_epoch_alone(collate: Callable[[Any], Any] | None) -> None:
    def loader(samples: SeededSamples, workers: int = 0) -> DataLoader[Any]:
        collate_fn = None if collate is None else samples.collating(collate)
        return DataLoader(samples, batch_size=4, num_workers=workers, collate_fn=collate_fn)

    torch.manual_seed(0)
    samples = SeededSamples(Samples(), seed=3)
    assert len(samples) == 22
    first = read(loader(samples))
    torch.manual_seed(1)
    assert read(loader(samples)) == first
    assert read(loader(samples, workers=2)) == first
    samples.set_epoch(1)
    second = read(loader(samples, workers=1))
    assert second != first
    assert read(loader(SeededSamples(Samples(), seed=4))) != first
    samples.set_epoch(0)
    assert read(loader(samples)) == first


@pytest.mark.parametrize("collate", [None, masking])
def test_fetching_leaves_the_global_generators_alone(collate: Callable[[Any], Any] | None) -> None:
    samples = SeededSamples(Samples())
    collate_fn = None if collate is None else samples.collating(collate)
    batches = iter(DataLoader(samples, batch_size=4, collate_fn=collate_fn))
    before = kit.digest(random_state())
    next(batches)
    _ = samples[3]
    assert kit.digest(random_state()) == before


def test_persistent_workers_see_the_epoch() -> None:
    samples = SeededSamples(Samples())
    loader = DataLoader(samples, batch_size=8, num_workers=1, persistent_workers=True)
    first = read(loader)
    samples.set_epoch(1)
    assert read(loader) != first
    samples.set_epoch(0)
    assert read(loader) == first


def test_attributes_of_the_dataset_are_found_and_streams_are_refused() -> None:
    assert SeededSamples(Samples(draws=False)).draws is False

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    with pytest.raises(TypeError, match=r"SeededSamples\(Stream\): .* an iterable dataset have no indices"):
        SeededSamples(Stream())
    with pytest.raises(ValueError, match="seed=-1"):
        SeededSamples([1], seed=-1)
