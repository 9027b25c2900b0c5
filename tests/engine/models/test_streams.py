"""Separate streams: what one part of a run draws shifts nothing for another; shared ones are those of a plain loop."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from signalfire import Engine, Events, Handler, Phase, Update, allow, seed_everything
from signalfire.authoring.randomness import derived_seed, mixed
from signalfire.handlers import (
    EMA,
    Average,
    CutMix,
    Cutout,
    GradientAccumulation,
    GradientNoise,
    Metrics,
    MicroBatching,
    MixUp,
    SharpnessAwareMinimization,
    TruncatedBPTT,
    Validation,
)
from signalfire.testing import fingerprint
from tests.kit import build, quick, spread

cross_entropy = nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Streams = Literal["shared", "separate"]


class Masks(nn.Module):
    """Dropout that draws from all three global generators, and remembers what it drew in which iteration and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None
        self.drawn: dict[tuple[int, int], list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = torch.rand(x.shape)
        if self.engine is not None:
            state = self.engine.state
            whole = torch.cat([mask, torch.tensor([[random.random(), np.random.rand()]]).expand(len(x), 2)], 1)
            self.drawn.setdefault((state.iteration, state.update.evaluation), []).append(whole)
        return x * (mask > 0.3)


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(22, 1, 8, generator=generator)
    return TensorDataset(x, torch.randint(3, (22,), generator=generator), torch.arange(22))


def shuffled() -> DataLoader[Any]:
    return DataLoader(make_dataset(), batch_size=6, shuffle=True)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6), Masks(), nn.Tanh(), nn.Linear(6, 3))


def make_engine(*handlers: Handler, streams: Streams = "separate", optimizer: Any = SGD) -> Engine:
    return build(make_model(), *handlers, loss=cross_entropy, optimizer=optimizer, streams=streams)


class Recorded:
    """The order of the data, the model's draws, and the seeds of every handler's draws, in one run."""

    def __init__(self, *handlers: Handler, without: str | None = None, streams: Streams = "separate") -> None:
        engine = make_engine(*handlers, streams=streams)
        masks = engine.model[3]
        masks.engine = engine
        self.order: list[list[int]] = []
        self.seeds: dict[str, list[tuple[int, int]]] = {}
        for handler in handlers:
            self.watch(handler)
        if without is not None:
            engine.handlers[without].enabled = False
        engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: self.order.append(engine.state.batch[2].tolist()))
        seed_everything(3)
        engine.run(shuffled(), max_epochs=3)
        first = {iteration: drawn for (iteration, evaluation), drawn in masks.drawn.items() if evaluation == 0}
        self.first_masks = {iteration: drawn[0] for iteration, drawn in first.items()}
        self.masks = {iteration: torch.cat(drawn) for iteration, drawn in first.items()}

    def watch(self, handler: Handler) -> None:
        draws, own = self.seeds.setdefault(handler.name, []), handler.generator

        def generator(engine: Engine, *args: Any, **options: Any) -> torch.Generator:
            made = own(engine, *args, **options)
            draws.append((engine.state.iteration, made.initial_seed()))
            return made

        vars(handler)["generator"] = generator


def same(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


COMPOSITIONS: dict[str, Callable[[], list[Handler]]] = {
    "mixup": lambda: [MixUp(), Cutout(2), GradientNoise(), SharpnessAwareMinimization(), EMA(0.9)],
    "cutmix": lambda: [CutMix(), Cutout(2), GradientNoise(), SharpnessAwareMinimization(), GradientAccumulation(2)],
}
CASES = [(name, handler.name) for name, make in COMPOSITIONS.items() for handler in make()]


@pytest.mark.moderate
@pytest.mark.parametrize(("composition", "off"), CASES, ids=["-".join(case) for case in CASES])
def test_switching_a_handler_off_moves_no_mask_no_order_and_no_other_handlers_draw(composition: str, off: str) -> None:
    make = COMPOSITIONS[composition]
    whole, without = Recorded(*make()), Recorded(*make(), without=off)
    assert same(whole.masks, without.masks)
    assert whole.order == without.order
    assert sorted(index for batch in whole.order[:4] for index in batch) == list(range(22))
    assert whole.order[:4] != whole.order[4:8]
    for name, seeds in whole.seeds.items():
        there = dict(without.seeds[name])  # without accumulation, noise is drawn in every iteration
        assert there == {} if name == off else all(there[iteration] == seed for iteration, seed in seeds)
    assert sum(map(len, whole.seeds.values())) > 12


def test_micro_batches_draw_in_pieces_what_the_whole_batch_draws_and_shift_nothing_behind() -> None:
    handlers: Callable[[], list[Handler]] = lambda: [MicroBatching(3), Cutout(2), GradientNoise()]  # noqa: E731
    whole, pieces = Recorded(*handlers(), without="micro_batching"), Recorded(*handlers())
    assert whole.order == pieces.order
    assert whole.seeds == pieces.seeds
    for iteration, mask in whole.masks.items():
        piece = pieces.first_masks[iteration]
        assert len(piece) < len(mask)
        assert torch.equal(piece[:, :6], mask[: len(piece), :6])


def test_with_shared_streams_the_same_handlers_shift_masks_and_order() -> None:
    make = COMPOSITIONS["mixup"]
    name = "sharpness_aware_minimization"
    whole = Recorded(*make(), streams="shared")
    without = Recorded(*make(), without=name, streams="shared")
    assert not same(whole.masks, without.masks)
    assert whole.order != without.order


def test_every_evaluation_time_chunk_iteration_and_update_draws_anew() -> None:
    engine = make_engine(SharpnessAwareMinimization())
    masks = engine.model[3]
    masks.engine = engine

    def twice(engine: Engine) -> None:
        engine.state.plan = [*engine.state.plan, *engine.state.plan]

    engine.connect(Events.ITERATION_STARTED, twice)
    engine.run(shuffled(), max_iters=3)
    drawn = [mask for masks in masks.drawn.values() for mask in masks]
    assert len(drawn) == 3 * 2 * 2  # iterations, micro-steps, evaluations
    assert len({mask[0, 0].item() for mask in drawn}) == len(drawn)
    assert len({mask[0, -2].item() for mask in drawn}) == len(drawn), "Python's generator"
    assert len({mask[0, -1].item() for mask in drawn}) == len(drawn), "NumPy's generator"


@pytest.mark.parametrize("event", [Events.GRADIENTS_READY, Events.UPDATE_COMPLETED, Events.ITERATION_COMPLETED])
def test_what_a_user_draws_between_two_forwards_shifts_no_mask_of_either_evaluation(event: Events) -> None:
    def masks(*, draws: bool) -> dict[tuple[int, int], list[Tensor]]:
        engine = make_engine(SharpnessAwareMinimization())
        engine.model[3].engine = engine
        if draws:
            engine.connect(event, lambda engine: (torch.rand(3), random.random(), np.random.rand()))
        engine.run(shuffled(), max_epochs=2)
        drawn: dict[tuple[int, int], list[Tensor]] = engine.model[3].drawn
        return drawn

    plain, drawing = masks(draws=False), masks(draws=True)
    assert plain.keys() == drawing.keys()
    assert len(plain) == 8 * 2
    assert all(torch.equal(plain[key][0], drawing[key][0]) for key in plain)


def test_time_chunks_shift_no_later_draw() -> None:
    def chunks(*handlers: Handler) -> dict[int, Tensor]:
        def forward(engine: Engine, batch: Any) -> Tensor:
            drawn.setdefault(engine.state.iteration, torch.rand(4))
            output: Tensor = engine.model(batch[0])
            return output

        drawn: dict[int, Tensor] = {}
        update = Update(forward, lambda engine, output, batch: output.square().mean(), SGD)
        engine = Engine(update, model=nn.Linear(1, 1), seed=0, streams="separate")
        engine.attach(*handlers)
        engine.run([(torch.ones(2, 6, 1),)] * 3, max_epochs=2)
        return drawn

    assert same(chunks(), chunks(TruncatedBPTT(2)))


def plain_loop(streams: Streams, epochs: int = 3) -> nn.Sequential:
    """A plain loop; with separate streams, it reseeds before each epoch's data and each forward."""

    def reseed(seed: int) -> None:
        if streams == "separate":
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)

    model = make_model()
    optimizer = SGD(model.parameters())
    loader, iteration, key = shuffled(), 0, derived_seed(0, "model", "main", 0)
    seed_everything(3)
    for epoch in range(1, epochs + 1):
        reseed(derived_seed(0, "data", epoch, 0, 0))
        for x, y, _ in loader:
            iteration += 1
            reseed(mixed(key, iteration))
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("streams", ["shared", "separate"])
def test_a_run_is_that_of_a_plain_loop_that_draws_alike(streams: Streams) -> None:
    model = plain_loop(streams)
    drawn = torch.rand(3), random.random(), np.random.rand()
    engine = make_engine(streams=streams)
    seed_everything(3)
    engine.run(shuffled(), max_epochs=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), engine.model.parameters(), strict=True))
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1:] == (random.random(), np.random.rand())


def test_a_separate_run_depends_on_its_seed_and_not_on_the_global_one() -> None:
    found = []
    for seed, outside in ((0, 1), (0, 2), (5, 1)):
        engine = Engine(Update.supervised(cross_entropy, SGD), model=make_model(), seed=seed, streams="separate")
        seed_everything(outside)
        engine.run(shuffled(), max_epochs=2)
        found.append(fingerprint(engine)["modules.model"])
    assert found[0] == found[1] != found[2]


def test_shared_is_the_default_and_streams_are_set_outside_a_run_alone() -> None:
    update = Update.supervised(cross_entropy, SGD)
    engine = Engine(update, model=make_model(), seed=0)
    assert engine.streams == "shared"
    with pytest.raises(ValueError, match=r"Engine\(streams='own'\): expected 'shared' or 'separate'"):
        Engine(update, model=make_model(), streams="own")  # type: ignore[arg-type]

    def change(engine: Engine) -> None:
        engine.streams = "shared"

    engine.streams = "separate"
    engine.connect(Events.ITERATION_COMPLETED, change)
    with pytest.raises(RuntimeError, match="streams='shared' was set during a run"):
        engine.run(shuffled(), max_iters=1)
    other = make_engine()
    other.run(shuffled(), max_iters=1)
    assert fingerprint(other)["modules.model"] == fingerprint(engine)["modules.model"]


# ---- data that draws as it is read -------------------------------------------------------------------------------------


class Drawing:
    """Data that draws each batch from the global generators as it is read, and whose batches build on one another."""

    def __init__(self, length: int | None, *, stops: int = 4) -> None:
        self.length = length
        self.stops = stops

    def __iter__(self) -> Iterator[Any]:
        place = torch.zeros(6, 1, 8)
        for _ in range(self.stops):
            place = place + torch.rand(6, 1, 8) + np.random.rand() + random.random()
            yield place, torch.randint(3, (6,))


class Sized(Drawing):
    def __len__(self) -> int:
        return self.stops


class Indexed:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index >= 4:
            raise IndexError
        return torch.rand(6, 1, 8) + index, torch.randint(3, (6,))


def noisy(samples: list[Any]) -> Any:
    x, y, _ = default_collate(samples)
    return x + torch.rand(len(x), 1, 1), y


DATA: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "own generator": lambda: DataLoader(make_dataset(), 6, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "collates at random": lambda: DataLoader(make_dataset(), 6, shuffle=True, collate_fn=noisy),
    "unsized": lambda: Drawing(None),
    "sized": lambda: Sized(4),
    "indexed": Indexed,
}


@pytest.mark.parametrize("data", DATA)
def test_what_the_data_draws_does_not_depend_on_how_often_the_model_draws(data: str) -> None:
    def batches(*handlers: Handler) -> list[Tensor]:
        seen: list[Tensor] = []
        engine = make_engine(*handlers)
        engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: seen.append(engine.state.batch[0].clone()))
        engine.run(DATA[data](), max_epochs=2)
        return seen

    plain, sharp = batches(), batches(SharpnessAwareMinimization())
    assert len(plain) == len(sharp) == 8
    assert all(torch.equal(a, b) for a, b in zip(plain, sharp, strict=True))
    assert not torch.equal(plain[0], plain[4])


_NOT_READ_AGAIN = [("shared", "unsized"), ("shared", "sized")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
@pytest.mark.parametrize("epoch_length", quick([None, 3], None))
@pytest.mark.parametrize(
    ("streams", "data"),
    # With shared streams, batches that build on earlier draws are not read again alike, as the model drew in between.
    spread(
        [
            (streams, data)
            for streams in ("shared", "separate")
            for data in DATA
            if (streams, data) not in _NOT_READ_AGAIN
        ],
        2,
    ),
)
def test_a_run_resumed_at_any_cut_ends_as_if_it_had_not_been_stopped(
    streams: Streams, data: str, epoch_length: int | None
) -> None:
    check_resume(streams, DATA[data], [SharpnessAwareMinimization, partial(GradientAccumulation, 2)], epoch_length)


HANDLERS: list[list[Callable[[], Handler]]] = [
    [MixUp, GradientNoise],
    [partial(MicroBatching, 2), partial(Cutout, 2)],
    [],
]


@pytest.mark.slow
@pytest.mark.parametrize("handlers", spread(HANDLERS, 1))
def test_a_run_with_handlers_that_draw_resumes_exactly(handlers: list[Callable[[], Handler]]) -> None:
    check_resume("separate", shuffled, handlers, None)


def check_resume(
    streams: Streams, data: Callable[[], Any], handlers: list[Callable[[], Handler]], epoch_length: int | None
) -> None:
    bounds: dict[str, Any] = {"max_epochs": 3, "epoch_length": epoch_length}
    saved: list[bytes] = []

    def save(engine: Engine) -> None:
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
        saved.append(file.getvalue())

    engine = make_engine(*[make() for make in handlers], streams=streams)
    for event in (Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
        engine.connect(event, save, phase=Phase.PERSIST)
    seed_everything(3)
    engine.run(data(), **bounds)
    whole = fingerprint(engine)
    assert len(saved) > 20
    for file in saved:
        resumed = make_engine(*[make() for make in handlers], streams=streams)
        resumed.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        seed_everything(7)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"run\(\): nothing to do")  # saved as the last epoch ended
            resumed.run(data(), **bounds)
        assert fingerprint(resumed) == whole


# ---- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", ["shared", "separate"])
def test_validation_changes_nothing(streams: Streams) -> None:
    def trained(*, validated: bool) -> dict[str, str]:
        engine = make_engine(streams=streams)
        if validated:
            evaluator = Engine(Update.supervised(cross_entropy), model=engine.model)
            evaluator.attach(Metrics(loss=Average()))
            engine.attach(Validation(evaluator, shuffled(), every="3it"))
        seed_everything(3)
        with allow("C14"):
            engine.run(shuffled(), max_epochs=3)
        assert ("loss" in engine.state.metrics) == validated
        found = fingerprint(engine, handlers=False)
        del found["engine"]  # the metrics
        return found

    assert trained(validated=True) == trained(validated=False)


def test_the_order_of_validation_data_does_not_depend_on_how_often_the_model_draws() -> None:
    def order(*handlers: Handler) -> list[list[int]]:
        seen: list[list[int]] = []
        engine = make_engine(*handlers)
        evaluator = Engine(Update.supervised(cross_entropy), model=engine.model)
        evaluator.connect(Events.GET_BATCH_COMPLETED, lambda engine: seen.append(engine.state.batch[2].tolist()))
        evaluator.attach(Metrics(loss=Average()))
        engine.attach(Validation(evaluator, shuffled(), every="3it"))
        with allow("C14"):
            engine.run(shuffled(), max_epochs=2)
        return seen

    plain = order()
    assert plain == order(SharpnessAwareMinimization())
    assert plain[:4] != plain[4:8]


@pytest.mark.parametrize("event", [Events.ENDED, Events.UPDATE_STARTED])
def test_streams_begin_as_usual_where_the_receivers_of_an_event_are_muted(event: Events) -> None:
    def trained(*muted: Events) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=model, seed=0, streams="separate")
        data = [(torch.ones(4, 5), torch.ones(4, 1))] * 3
        for epochs in (1, 2):
            signals = [engine.signal(one) for one in muted]
            for signal in signals:
                signal.is_muted = True
            engine.run(data, max_epochs=epochs)
            for signal in signals:
                signal.is_muted = False
        return model.state_dict()

    plain, muted = trained(), trained(event)
    assert all(torch.equal(plain[name], muted[name]) for name in plain)


@pytest.mark.parametrize("streams", ["shared", "separate"])
def test_a_run_that_goes_back_by_one_iteration_makes_it_as_before(streams: Streams) -> None:
    def trained(*, goes_back: bool) -> dict[str, str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(), nn.Linear(16, 3))
        engine = Engine(Update.supervised(cross_entropy, SGD), model=model, seed=0, streams=streams)
        states: list[dict[str, Any]] = []

        def go_back(engine: Engine) -> None:
            if engine.state.iteration == 2 and not states:
                states.append(engine.state_dict())
            elif engine.state.iteration == 3 and goes_back and len(states) == 1:
                states.append({})
                engine.snapshots.restore(states[0])

        engine.connect(Events.ITERATION_COMPLETED, go_back)
        generator = torch.Generator().manual_seed(0)
        data = [(torch.randn(4, 6, generator=generator), torch.arange(4) % 3) for _ in range(5)]
        engine.run(data, max_epochs=1)
        return fingerprint(engine)

    assert trained(goes_back=True) == trained(goes_back=False)
