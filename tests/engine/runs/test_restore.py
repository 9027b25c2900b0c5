"""Buffers and modes that are put back, and an attempt that runs out of memory and leaves no trace."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from signalfire import Engine, Events, Update
from signalfire.runs.restore import Buffers, Modes, attempt


def test_buffers_are_put_back_in_value_and_identity() -> None:
    norm = nn.BatchNorm1d(2)
    before = norm.running_mean
    assert before is not None
    with Buffers([nn.Sequential(norm)]).unchanged():
        norm(torch.randn(8, 2))
        norm.running_mean = torch.full((2,), 7.0)  # a forward may put another tensor in its place
    assert norm.running_mean is before
    assert before.equal(torch.zeros(2))
    assert norm.num_batches_tracked == torch.tensor(0)


def test_buffers_that_are_none_stay_so() -> None:
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    with Buffers([norm]).unchanged():
        pass
    assert norm.running_mean is None


def test_modes_are_put_back_module_by_module() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    model[1].eval()
    modes = Modes([model])
    model.train()
    modes.put_back()
    assert [module.training for module in model.modules()] == [True, True, False]


def make_engine() -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=model, seed=0)
    engine.run([(torch.randn(4, 2), torch.randn(4, 1))], max_epochs=1)
    return engine


def test_an_attempt_that_runs_out_of_memory_is_reported_and_undone() -> None:
    engine = make_engine()
    update, model = engine.updates[0], engine.model
    for parameter in update.parameters:
        parameter.grad = torch.ones_like(parameter)
    retried: list[int] = []
    engine.connect(Events.UPDATE_RETRIED, lambda engine: retried.append(1))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    drawn = torch.get_rng_state()

    def compute() -> None:
        model(torch.randn(4, 2)).sum().backward()
        update.window.held += 1
        raise torch.OutOfMemoryError("no memory")

    assert attempt(engine, update, compute) is False
    assert retried == [1]
    assert update.window.held == 0
    gradients = [parameter.grad for parameter in update.parameters if parameter.grad is not None]
    assert [gradient.unique().tolist() for gradient in gradients] == [[1.0]] * len(update.parameters)
    assert all(buffer.equal(buffers[name]) for name, buffer in model.named_buffers())
    assert torch.get_rng_state().equal(drawn)


def test_an_attempt_that_succeeds_stays() -> None:
    engine = make_engine()
    update, done = engine.updates[0], []
    assert attempt(engine, update, lambda: done.append(1)) is True
    assert done == [1]


def test_an_expanded_buffer_is_put_back_though_it_cannot_be_changed_in_place() -> None:
    model = nn.Module()
    model.register_buffer("wide", torch.ones(1).expand(3), persistent=False)
    with Buffers([model]).unchanged():
        model.wide = torch.zeros(3)
    assert model.wide.tolist() == [1.0] * 3
