"""Data made of data: side by side, or made anew every few epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from signalfire import CombinedData, Engine, Events, Phase, ReloadedData, Update, seed_everything
from signalfire.testing import fingerprint
from tests.kit import quick

A, B = [10, 11, 12, 13, 14], [20, 21]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("mode", "plain_loop"),
    [
        ("min", lambda: list(zip(A, B, strict=False))),
        ("max", lambda: list(zip_longest(A, B))),
        ("cycle", lambda: list(zip(A, cycle(B), strict=False))),
    ],
)
def test_batches_are_those_of_a_plain_loop(mode: Any, plain_loop: Callable[[], Any]) -> None:
    data = CombinedData([A, B], mode=mode)
    assert list(data) == plain_loop()
    assert len(data) == len(plain_loop())
    assert list(CombinedData({"a": A, "b": B}, mode=mode)) == [{"a": a, "b": b} for a, b in plain_loop()]
    for start in range(len(data) + 1):
        assert list(data.batches_from(start)) == plain_loop()[start:]


def test_a_stream_without_a_length_goes_along_with_what_has_one() -> None:
    class Numbers:
        def __iter__(self) -> Iterator[int]:
            return iter(range(1000))

    assert list(CombinedData([B, Numbers()], mode="min")) == [(20, 0), (21, 1)]
    with pytest.raises(TypeError, match=r"parts\[1\].*the Numbers has none; use mode='min'"):
        CombinedData([B, Numbers()], mode="cycle")
    with pytest.raises(TypeError, match="no part has a length"):
        CombinedData([Numbers()], mode="min")


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), float(index)) / 10 + torch.randn(3) / 10, torch.ones(1)


class Unskippable:
    """Draws its batches from the global generators, and cannot begin in its middle."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(3):
            yield torch.randn(4, 3), torch.zeros(4, 1)


def make_data(mode: Any, generator: bool) -> CombinedData:
    x = torch.arange(15.0).reshape(5, 3)
    return CombinedData(
        {
            "noisy": DataLoader(Noisy(23), 4, shuffle=True),
            "plain": DataLoader(
                TensorDataset(x, x[:, :1]),
                2,
                shuffle=True,
                generator=torch.Generator().manual_seed(4) if generator else None,
            ),
            "unskippable": Unskippable(),
        },
        mode=mode,
    )


def loss(engine: Engine, batch: dict[str, Any]) -> Tensor:
    losses = [
        nn.functional.mse_loss(engine.model(x), y) for x, y in (pair for pair in batch.values() if pair is not None)
    ]
    return torch.stack(losses).mean()


def build() -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    return Engine(Update.from_function(loss, partial(torch.optim.Adam, lr=0.01)), model=model, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", quick(["min", "max", "cycle"], "cycle"))
@pytest.mark.parametrize("generator", quick([False, True], True))
def test_a_run_resumed_anywhere_goes_on_in_every_part(mode: str, generator: bool) -> None:
    saved: list[dict[str, Any]] = []
    whole = build()
    whole.connect(
        Events.ITERATION_COMPLETED | Events.EPOCH_STARTED, lambda engine: saved.append(engine.state_dict()),
        phase=Phase.PERSIST,
    )  # fmt: skip
    seed_everything(0)
    whole.run(make_data(mode, generator), max_epochs=3)
    for state in saved:
        resumed = build()
        resumed.load_state_dict(state)
        seed_everything(9)
        resumed.run(make_data(mode, generator), max_epochs=3)
        assert fingerprint(resumed) == fingerprint(whole), state["engine"]["iteration"]


def test_a_part_draws_what_it_draws_whatever_the_others_are() -> None:
    def batches(*others: Any) -> list[Tensor]:
        seed_everything(0)
        return [batch[0][0] for batch in CombinedData([DataLoader(Noisy(9), 4, shuffle=True), *others], mode="min")]

    alone, together = batches(), batches(Unskippable(), DataLoader(Noisy(9), 2, shuffle=True))
    assert len(alone) == len(together) == 3
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_passes_of_a_shorter_part_differ() -> None:
    data = CombinedData([DataLoader(Noisy(40), 4), DataLoader(Noisy(8), 4, shuffle=True)], mode="cycle")
    seed_everything(0)
    seen = [batch[1][0] for batch in data]
    assert not torch.equal(seen[0], seen[2])


def test_parts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(TypeError, match="non-empty"):
        CombinedData([])
    with pytest.raises(TypeError, match=r"parts\['a'\]=3"):
        CombinedData({"a": 3})
    with pytest.raises(TypeError, match="iterated repeatedly"):
        CombinedData([A, iter(B)])
    with pytest.raises(ValueError, match="the data is empty"):
        CombinedData([A, []])
    with pytest.raises(ValueError, match=r"CombinedData\(mode='longest'\): expected 'min', 'max' or 'cycle'"):
        CombinedData([A], mode="longest")  # type: ignore[arg-type]


def test_data_is_made_anew_every_few_epochs_and_may_change_its_length() -> None:
    loaded: list[int] = []

    def load(epoch: int) -> list[int]:
        loaded.append(epoch)
        return [epoch] * (epoch + 1)

    seen: list[tuple[int, int | None]] = []

    def note(engine: Engine, batch: int) -> None:
        seen.append((batch, engine.state.epoch_length))

    def make() -> Engine:
        model = nn.Linear(1, 1)
        return Engine(Update.from_function(note, partial(torch.optim.SGD, lr=0.1)), model=model, allow=["W29"])

    engine = make()
    engine.run(ReloadedData(load, every=2), max_epochs=4)
    assert seen == [(0, 1)] * 2 + [(2, 3)] * 6
    assert loaded == [0, 2]

    seen.clear()
    cut = make()
    cut.run(ReloadedData(load, every=2), max_iters=6)
    resumed = make()
    resumed.load_state_dict(cut.state_dict())
    resumed.run(ReloadedData(load, every=2), max_epochs=4)
    assert seen == [(0, 1)] * 2 + [(2, 3)] * 6


def test_what_loads_data_has_to_be_a_function() -> None:
    with pytest.raises(TypeError, match="a function that takes the epoch number"):
        ReloadedData([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every=0"):
        ReloadedData(lambda epoch: [1], every=0)


def test_reloaded_data_that_is_an_iterator_is_loaded_for_each_pass() -> None:
    data = ReloadedData(lambda epoch: iter([epoch] * 2), every=2)
    assert [list(data.of_pass(epoch)) for epoch in (0, 0, 1, 2)] == [[0, 0], [0, 0], [0, 0], [2, 2]]
    loaded: list[int] = []

    def load(epoch: int) -> list[int]:
        loaded.append(epoch)
        return [epoch]

    listed = ReloadedData(load, every=2)
    assert [listed.of_pass(epoch) for epoch in (0, 0, 1, 2)] == [[0], [0], [0], [2]]
    assert loaded == [0, 2]
