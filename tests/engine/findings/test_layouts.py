"""Layers that take the samples of a batch for steps of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update
from tests.kit import SGD


class Last(nn.Module):
    """One class for each sequence: of its last step."""

    def __init__(self, *, batch_first: bool, transposed: bool = False) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=batch_first)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.layer(x.transpose(0, 1) if self.transposed else x)[0]
        return states[-1] if self.transposed else states[:, -1]


def trained(model: nn.Module, data: Iterable[Any]) -> None:
    Engine(Update.supervised(nn.functional.cross_entropy, SGD), model=model).run(data, max_epochs=1)


def data(steps: int = 6, samples: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(samples, steps, 3), torch.arange(samples) % 4)] * 3


def test_one_target_for_each_sample_tells_the_samples() -> None:
    with pytest.warns(
        match=r"W88: the layer 'model.layer' \(GRU\) reads inputs of shape \[4, 6, 3\] as 4 time steps of 6"
    ):
        trained(Last(batch_first=False), data())


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (Last(batch_first=True), data()),
        (Last(batch_first=False, transposed=True), data()),
        (Last(batch_first=True), DataLoader(TensorDataset(torch.randn(8, 6, 3), torch.arange(8) % 4), 4, shuffle=True)),
    ],
    ids=["batch first", "transposed", "a loader"],
)
def test_other_layouts_are_fine(model: nn.Module, batches: Iterable[Any]) -> None:
    trained(model, batches)


def test_steps_first_as_language_models_have_them_are_fine() -> None:
    """Tokens of shape [steps, samples], and a target for each of them."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(5, 3), nn.GRU(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            states: Tensor = self.layer(self.embedding(x))[0]
            return states.flatten(0, 1)

    tokens = torch.randint(0, 5, (7, 4))
    engine = Engine(
        Update.supervised(lambda output, target: nn.functional.cross_entropy(output, target.flatten()), SGD),
        model=Language(),
    )
    engine.run([(tokens, tokens)] * 3, max_epochs=1)


def test_a_batch_may_be_one_sequence_with_a_target_for_each_step() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(len(x), 1, -1))[0][:, 0]  # type: ignore[no-any-return]

    trained(Tagger(), [(torch.randn(steps, 3), torch.randint(4, (steps,))) for steps in (5, 4, 6)])


def test_samples_of_one_step_that_are_taken_for_one_sequence_are_reported() -> None:
    class Unsqueezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.unsqueeze(1))[0].squeeze(1)  # type: ignore[no-any-return]

    samples = TensorDataset(torch.randn(8, 3), torch.randint(4, (8,)))
    trained(Unsqueezed(), DataLoader(samples, 4))  # as of one long series, in its order
    with pytest.warns(UserWarning, match="W88"):
        trained(Unsqueezed(), DataLoader(samples, 4, shuffle=True))


def test_samples_that_come_second_beside_others_are_fine() -> None:
    """Attention along the columns of pictures, and recurrent layers over the words of all sentences."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            words = x.view(20, 4, 3).transpose(0, 1)  # 4 words in each of 5 sentences of 4 samples
            return self.layer(words)[0][-1].view(4, 5, 4).mean(1)  # type: ignore[no-any-return]

    trained(Words(), [(torch.randn(4, 5, 4, 3), torch.arange(4))] * 3)


def test_a_list_of_times_tells_no_samples_where_these_come_second() -> None:
    class Timed(nn.GRU):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0].sum(2)

    update = Update.supervised(nn.functional.mse_loss, SGD, target=2)
    batch = torch.randn(12, 5, 3), torch.linspace(0, 1, 12), torch.randn(12, 5)
    Engine(update, model=Timed(3, 4)).run([batch] * 3, max_epochs=1)


def test_no_hook_is_left() -> None:
    model = Last(batch_first=True)
    trained(model, data())
    assert not model.layer._forward_pre_hooks
