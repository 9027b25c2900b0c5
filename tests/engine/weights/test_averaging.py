"""Averages of checkpoints against the mean by hand, and sources that do not fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire.handlers import Checkpoint, WarmStart
from signalfire.weights import average_weights
from tests.kit import assert_same, batches, build, mlp


def states(count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    models = [mlp(5, 4, 1, nn.BatchNorm1d(4), seed=seed).to(dtype) for seed in range(count)]
    for place, model in enumerate(models):
        for _ in range(place + 1):
            model(torch.randn(8, 5, generator=torch.Generator().manual_seed(place)).to(dtype))
    return [model.state_dict() for model in models]


def by_hand(given: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.stack([one[name].double() for one in given]).mean(0).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in given[-1].items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_mean_is_that_of_float64_and_counters_are_those_of_the_last(dtype: torch.dtype, tmp_path: Path) -> None:
    given = states(3, dtype)
    before = [{name: value.clone() for name, value in one.items()} for one in given]
    assert_same(average_weights(given), by_hand(given))
    assert average_weights(given)["1.num_batches_tracked"] == 3
    for one, kept in zip(given, before, strict=True):
        assert_same(one, kept)
    files = [tmp_path / f"{place}.pt" for place in range(3)]
    for state, file in zip(given, files, strict=True):
        torch.save({f"_orig_mod.{name}": value for name, value in state.items()}, file)
    assert_same(average_weights(files), by_hand(given))


def test_kept_checkpoints_are_averaged_and_start_another_run(tmp_path: Path) -> None:
    engine = build(mlp(5, 4, 1), Checkpoint(tmp_path, keep=3))
    engine.run(batches(2), max_epochs=4)
    checkpoint = engine.find(Checkpoint)
    versions = [tmp_path / name for name, _ in checkpoint.kept]
    assert len(versions) == 3
    expected = by_hand([Checkpoint.load(one)["modules"]["model"] for one in versions])
    found = average_weights(versions)
    assert_same(found, expected)
    assert WarmStart(found).compare(mlp(5, 4, 1)).refused == []


def changed(**tensors: Tensor | None) -> list[dict[str, Tensor]]:
    one, other = states(2)
    other = {name: value for name, value in other.items() if tensors.get(name, value) is not None}
    return [one, other | {name: value for name, value in tensors.items() if value is not None}]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (changed(extra=torch.ones(2)), r"cannot be averaged: extra is only in 'source 2'"),
        (changed(**{"0.bias": None}), r"cannot be averaged: 0.bias is only in 'source 1'"),
        (changed(**{"0.bias": torch.ones(3)}), r"0.bias has shapes \[4\] and \[3\]"),
        (changed(**{"0.bias": torch.ones(4).half()}), r"0.bias has dtypes torch.float32 and torch.float16"),
        (states(1), r"expected at least two sources, got 1"),
        ([], r"expected at least two sources, got 0"),
    ],
    ids=["unexpected", "missing", "shape", "dtype", "one", "none"],
)
def test_what_differs_is_named(sources: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        average_weights(sources)


def test_a_single_path_is_not_several_sources() -> None:
    with pytest.raises(TypeError, match=r"average_weights\('x.pt'\): expected several sources"):
        average_weights("x.pt")
