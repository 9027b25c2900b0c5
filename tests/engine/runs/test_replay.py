"""An iteration that is replayed is the iteration of the run; nothing is changed, and samples and faults are identified."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    EMA,
    CSVLogger,
    GradientAccumulation,
    GradientClipping,
    LabelSmoothing,
    NonFiniteGuard,
    Rewindable,
    SpikeGuard,
)
from signalfire.resuming.past import Place
from tests import kit
from tests.kit import campaign, digest

ADAM = partial(torch.optim.Adam, lr=1e-2)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Points of two classes, of which some are scaled."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 2, (160,), generator=generator)
        self.inputs = torch.randn(160, 6, generator=generator) + self.labels.unsqueeze(1)
        self.scale: dict[int, float] = {}

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] * self.scale.get(index, 1.0), self.labels[index]


def loader_of(samples: Samples, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples, 8, shuffle=True, generator=torch.Generator().manual_seed(1), **options)


def build(*handlers: Any) -> Engine:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    engine = Engine(Update.supervised(nn.functional.cross_entropy, ADAM), model=model, seed=0)
    engine.attach(*handlers)
    return engine


def run(engine: Engine, data: Any, **bounds: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(data, **bounds)


def seen_in(engine: Engine) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step, as the run comes to them."""
    seen: dict[int, tuple[float, float]] = {}

    def see(engine: Engine) -> None:
        update = engine.state.update
        assert update.loss is not None
        norm = torch.nn.utils.get_total_norm([p.grad for p in update.parameters if p.grad is not None])
        seen[engine.state.iteration] = update.loss.item(), norm.item()

    engine.connect(Events.GRADIENTS_READY, see, rank=-1000)
    return seen


@pytest.mark.moderate
@pytest.mark.parametrize("workers", kit.quick([0, 2], 0))
def test_it_is_the_iteration_of_the_run(workers: int) -> None:
    engine = build(Rewindable(every="6it", keep=3), GradientClipping(0.5), LabelSmoothing(0.1), EMA(0.9))
    recorded = seen_in(engine)
    run(engine, loader_of(Samples(), num_workers=workers), max_iters=47)
    seen = dict(recorded)
    for iteration in (37, 40, 41, 43, 47):
        remade = engine.replay(iteration).run()
        assert remade.verdict == "not recorded"
        loss, norm = seen[iteration]
        assert remade.times[0].loss == loss
        assert remade.times[0].gradient_norm == pytest.approx(norm, rel=1e-6)  # added up in another order
        assert remade.times[0] == remade.times[1]


@pytest.mark.moderate
@pytest.mark.parametrize("generator", [torch.Generator().manual_seed(1), None])
def test_its_samples_are_those_of_its_batch(generator: torch.Generator | None) -> None:
    engine = build(Rewindable(every="6it", keep=9))
    batches: dict[int, Tensor] = {}
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: batches.update({engine.state.iteration: engine.state.batch[0]})
    )
    samples = Samples()
    torch.manual_seed(2)  # draws the order where the loader has no generator
    run(engine, DataLoader(samples, 8, shuffle=True, generator=generator), max_iters=47)
    for iteration in (1, 19, 20, 21, 47):
        replay = engine.replay(iteration)
        assert torch.equal(torch.stack([samples[index][0] for index in replay.samples]), batches[iteration])
        assert replay.place == Place((iteration - 1) // 20 + 1, (iteration - 1) % 20)


def test_of_other_data_the_batch_is_named() -> None:
    engine = build(Rewindable(every="6it"))
    run(engine, list(loader_of(Samples())), max_iters=22)
    with pytest.raises(TypeError, match=r"the data \(list\) is not a DataLoader .* the batch is batch 1 of epoch 2"):
        print(engine.replay(22).samples)
    assert engine.replay(22).rank_samples()[0].sample in range(8)


@pytest.mark.slow
def test_nothing_of_the_engine_is_changed(tmp_path: Any) -> None:
    def weights(engine: Engine) -> str:
        return digest(engine.state_dict() | {"handlers": {}})

    engine = build(SpikeGuard("stop", window=16, rewind=6), EMA(0.9), CSVLogger(tmp_path / "log.csv", every="1it"))
    loader = loader_of(Samples())
    run(engine, loader, max_iters=30)
    before, log, random = weights(engine), (tmp_path / "log.csv").read_text(), torch.get_rng_state()
    generator = loader.generator
    assert generator is not None
    order = generator.get_state()
    replay = engine.replay(28)
    replay.run(3)
    replay.rank_samples()
    print(replay.samples, replay.place)
    assert weights(engine) == before
    assert (tmp_path / "log.csv").read_text() == log
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(generator.get_state(), order)
    run(engine, loader, max_iters=40)
    other = build(EMA(0.9))
    run(other, loader_of(Samples()), max_iters=30)
    run(other, other.feed.current.given, max_iters=40)
    assert digest(engine.model.state_dict()) == digest(other.model.state_dict())


@pytest.mark.moderate
def test_a_poisoned_sample_is_named_first() -> None:
    samples = Samples()
    engine = build(SpikeGuard("stop", window=16, rewind=6))
    run(engine, loader_of(samples), max_iters=60)
    assert engine.find(SpikeGuard).actions == []
    samples.scale[77] = -1000.0
    run(engine, engine.feed.current.given, max_iters=100)
    (action,) = engine.find(SpikeGuard).actions
    replay = engine.replay(action["iteration"])
    assert 77 in replay.samples
    ranked = replay.rank_samples()
    assert ranked[0].sample == 77
    assert ranked[0].influence > 2 * ranked[1].influence
    assert sorted(one.sample for one in ranked) == sorted(replay.samples)


@pytest.mark.moderate
def test_a_sample_that_is_not_finite_is_named_first_and_its_nan_is_reproducible() -> None:
    samples = Samples()
    samples.scale[42] = float("nan")
    engine = build(NonFiniteGuard(action="stop"), Rewindable())
    data = loader_of(samples)
    run(engine, data, max_epochs=1)
    replay = engine.replay(engine.state.iteration)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that weights become NaN in a replay says nothing of the run
        assert replay.run().verdict == "not recorded"  # and not "not reproducible", though NaN differs from NaN
        first, *others = replay.rank_samples()
    assert (first.sample, first.influence) == (42, math.inf)
    assert math.isfinite(first.loss)
    assert {one.influence for one in others} == {0}


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["fault", "batch", "random"])
def test_a_fault_does_not_repeat_and_bad_data_does(kind: str) -> None:
    engine = build(SpikeGuard("stop", window=16, rewind=6))
    once: list[int] = []

    def disturb(engine: Engine) -> None:
        gradient = engine.model[0].weight.grad
        if kind == "batch":
            engine.state.batch = engine.state.batch[0] * -100, engine.state.batch[1]
        elif kind == "fault" and not once:
            once.append(1)
            gradient[0, 0] += 50.0
        elif kind == "random":
            gradient[0, 0] += 50.0 * (1 + len(once))
            once.append(1)

    engine.connect((Events.GET_BATCH_COMPLETED if kind == "batch" else Events.BACKWARD_COMPLETED)(once=50), disturb)
    run(engine, loader_of(Samples()), max_iters=60)
    assert engine.state.iteration == 50
    remade = engine.replay(50).run()
    assert remade.verdict == {"fault": "transient", "batch": "persistent", "random": "not reproducible"}[kind]
    assert str(remade).startswith(f"iteration 50: {remade.verdict}\n")
    assert "in the run" in str(remade)


@pytest.mark.moderate
@pytest.mark.parametrize("iteration", [50, 49])
def test_within_a_window_loss_and_gradients_are_those_of_the_window(iteration: int) -> None:
    engine = build(SpikeGuard("stop", window=16, rewind=6), GradientAccumulation(2))
    run(engine, loader_of(Samples()), max_iters=60)
    remade = engine.replay(iteration).run()
    assert remade.verdict == ("persistent" if iteration == 50 else "not recorded")


def test_mistakes_name_the_way_out() -> None:
    engine = build()
    run(engine, loader_of(Samples()), max_iters=8)
    with pytest.raises(RuntimeError, match="no states are stored; attach a handler that stores states"):
        engine.replay(3)
    for iteration in (0, 9, True, "3"):
        with pytest.raises(ValueError, match="expected an iteration from 1 to 8"):
            engine.replay(iteration)  # type: ignore[arg-type]
    engine = build(Rewindable(every="4it"))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.replay(1) and None)
    with pytest.raises(RuntimeError, match=r"replay\(1\) was called during a run; call it between runs"):
        run(engine, loader_of(Samples()), max_iters=8)
    engine = build(Rewindable(every="4it"))
    run(engine, [batch[:2] for batch in loader_of(Samples())], max_iters=8)
    with pytest.raises(ValueError, match="times=0"):
        engine.replay(3).run(0)


@pytest.mark.campaign
def test_on_mnist_1d_spikes_are_found_named_and_told_apart() -> None:
    found = campaign("spikes", "--seeds", 2, "--steps", 600, "--runs", 6)
    assert found["alarms"]["false alarms"] == 0
    assert found["alarms"]["batches found"] == {"scaled": 2, "permuted": 2}
    assert found["samples"]["named"] == found["samples"]["acted"] >= 4
    for kind in ("fault", "batch"):
        assert found["faults"][kind]["right"] == found["faults"][kind]["acted"] >= 4


def test_texts_of_a_batch_and_samples_along_another_dimension_are_left_out_too() -> None:
    seen: list[tuple[int, int, int]] = []

    def step(engine: Engine, batch: Any) -> Tensor:
        texts, inputs, labels = batch
        seen.append((len(texts), inputs.shape[1], len(labels)))
        return nn.functional.cross_entropy(engine.model(inputs.mean(0)), labels)

    update = Update.from_function(step, ADAM, samples=lambda batch: len(batch[2]))
    engine = Engine(update, model=kit.linear(6, 2), seed=0)
    engine.attach(Rewindable())
    batch = ["a", "b", "c", "d"], torch.randn(7, 4, 6), torch.tensor([0, 1, 0, 1])
    run(engine, [batch] * 3, max_epochs=1)
    seen.clear()
    assert sorted(one.sample for one in engine.replay(2).rank_samples()) == [0, 1, 2, 3]
    assert {*seen[-1:]} == {(3, 3, 3)}


def test_before_a_run_there_is_no_iteration_to_make_again() -> None:
    with pytest.raises(ValueError, match="the engine has run no iteration"):
        build(Rewindable()).replay(1)
