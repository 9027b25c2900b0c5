"""The accumulation window: when it closes, and what its gradients are divided by."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from signalfire.core.window import Window


class Epoch:
    """An epoch of so many iterations; 0 for one of which only the data knows the end."""

    def __init__(self, length: int, ends_at: int | None = None) -> None:
        self.epoch_end = length
        self.ends_at = ends_at
        self.asked: list[int] = []
        self.iteration = 0

    def on_last_batch(self) -> bool:
        self.asked.append(self.iteration)
        return self.iteration >= (self.ends_at or self.epoch_end)


def closings(window: Window, epoch: Epoch, iterations: int) -> list[bool]:
    found = []
    for epoch.iteration in range(1, iterations + 1):
        found.append(window.closes(epoch, epoch.iteration, more=False))
    return found


def test_a_window_closes_after_its_length_and_at_the_end_of_the_epoch() -> None:
    window = Window()
    window.length = 3
    assert closings(window, Epoch(7), 7) == [False, False, True, False, False, True, True]
    assert window.filled == 0


def test_data_without_a_length_is_asked_only_inside_an_open_window() -> None:
    window, epoch = Window(), Epoch(0, ends_at=5)
    window.length = 2
    assert closings(window, epoch, 5) == [False, True, False, True, True]
    assert epoch.asked == [1, 3, 5]


def test_time_chunks_of_the_last_batch_do_not_close_it() -> None:
    window, epoch = Window(), Epoch(1)
    window.length, epoch.iteration = 4, 1
    assert [window.closes(epoch, 1, more=more) for more in (True, True, False)] == [False, False, True]


@pytest.mark.parametrize("weights", [[1, 1, 1], [2, 1, 4], [0.5, 0.25, 3.0]])
def test_the_average_is_the_gradient_of_the_weighted_mean_loss(weights: list[float]) -> None:
    values = [1.0, 5.0, -2.0]
    parameter = nn.Parameter(torch.tensor(1.0))
    window = Window()
    for weight, value in zip(weights, values, strict=True):
        (parameter * value * weight).backward()
        window.held += 1
        window.extra_weight += weight - 1
    assert window.average([parameter])
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(expected, rel=1e-6)


def test_weights_that_add_up_to_zero_give_no_average() -> None:
    parameter = nn.Parameter(torch.tensor(1.0))
    parameter.grad = torch.tensor(3.0)
    window = Window()
    window.held, window.extra_weight = 2, -2
    assert not window.average([parameter])
    assert parameter.grad.item() == 3.0
    window.extra_weight = torch.tensor(-2.0)  # on a device it is not noticed; the gradients are zero then
    parameter.grad = torch.tensor(0.0)
    assert window.average([parameter])
    assert parameter.grad.item() == 0.0


def test_what_is_discarded_is_forgotten_but_not_how_far_the_window_is_filled() -> None:
    parameter = nn.Parameter(torch.tensor(1.0))
    parameter.grad = torch.tensor(3.0)
    window = Window()
    window.kept = []
    window.filled, window.held = 2, 2
    window.keep("batch", torch.tensor(1.0), 1.0)
    window.discard(SGD([parameter], lr=0.1))
    assert (window.filled, window.held, window.extra_weight, window.kept) == (2, 0, 0, [])
    assert parameter.grad is None


def test_its_state_is_put_back() -> None:
    window, other = Window(), Window()
    window.filled, window.held, window.extra_weight = 3, 2, 1.5
    other.load_state_dict(window.state_dict())
    assert other.state_dict() == window.state_dict()


def test_an_epoch_has_the_length_that_a_handler_gives_it() -> None:
    window = Window()
    window.begin_epoch(3)
    assert window.length == 1
    window.length_of = lambda epoch: 2 * epoch
    window.begin_epoch(3)
    assert window.length == 6
