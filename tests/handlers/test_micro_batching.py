"""MicroBatching against whole batches, against plain PyTorch loops, and against memory that runs out."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, Update, on, seed_everything
from signalfire.handlers import (
    Accuracy,
    Average,
    GradientAccumulation,
    GradientClipping,
    Metrics,
    MicroBatching,
    MixedPrecision,
)
from signalfire.testing import check_handler, fingerprint
from tests import kit
from tests.kit import assert_same, mlp

Batch = tuple[Tensor, Tensor]
cross_entropy = nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_data(sizes: Iterable[int] = (8, 7, 8, 5, 3)) -> list[Batch]:
    return kit.batches(sizes, 4, (), classes=3, seed=0)


def make_model(*, norm: bool = False) -> nn.Sequential:
    return mlp(4, 6, 3, *([nn.BatchNorm1d(6), nn.Dropout(0.3)] if norm else []), nn.Tanh(), seed=0)


def trained(
    *handlers: Handler,
    data: Sequence[Any] | None = None,
    model: nn.Module | None = None,
    update: Update | None = None,
    epochs: int = 2,
    before: Callable[[Engine], object] | None = None,
) -> Engine:
    engine = Engine(update or Update.supervised(cross_entropy, SGD), model=model or make_model(), seed=0)
    engine.attach(*handlers)
    if before is not None:
        before(engine)
    seed_everything(1)
    engine.run(make_data() if data is None else data, max_epochs=epochs)
    return engine


def assert_close(one: nn.Module, other: nn.Module, tolerance: float = 2e-6) -> None:
    # Not bit-equal: the sum over a batch is made in another order. Each of its roundings is at most 6e-8 of numbers of about
    # one, and ten to twenty steps of rate 0.1 add them up; any mistake in a weight would show in the second digit.
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), (name, a, b)


def tokens(engine: Engine) -> int:
    return int((engine.state.batch[1] + 1).sum())


# ---- the same as a whole batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"size": 3}, {"size": 1}, {"pieces": 2}, {"pieces": 100}], ids=str)
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("halve", [True, False])
def test_it_trains_as_whole_batches_do(options: dict[str, Any], window: int, halve: bool) -> None:
    forwards: list[int] = []

    def watch(engine: Engine) -> None:
        engine.connect(Events.FORWARD_STARTED, lambda engine: forwards.append(len(engine.state.batch[0])))

    engine = trained(MicroBatching(**options, halve_on_oom=halve), GradientAccumulation(window), before=watch)
    assert_close(engine.model, trained(GradientAccumulation(window)).model)
    assert sum(forwards) == 2 * 31
    assert len(forwards) > 10
    assert engine.updates[0].steps == 2 * -(-5 // window)


def test_weights_equal_a_plain_loop() -> None:
    data, model = make_data(), make_model()
    optimizer = SGD(model.parameters())
    for _ in range(2):
        for begin in range(0, len(data), 2):
            window = data[begin : begin + 2]
            optimizer.zero_grad()
            for x, y in window:
                for piece in torch.arange(len(x)).tensor_split(-(-len(x) // 3)):
                    loss = cross_entropy(model(x[piece]), y[piece])
                    (loss * (len(piece) / len(x))).backward() if len(piece) < len(x) else loss.backward()
            if len(window) > 1:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.div_(len(window))
            optimizer.step()
    assert_same(trained(MicroBatching(3), GradientAccumulation(2)).model, model)


@pytest.mark.moderate
def test_a_batch_that_is_small_enough_stays_as_it_is() -> None:
    for handler in (MicroBatching(8), MicroBatching(), MicroBatching(pieces=1), MicroBatching(8, halve_on_oom=False)):
        engine = Engine(Update.supervised(cross_entropy, SGD), model=make_model(), seed=0)
        engine.attach(handler)

        @engine.on(Events.UPDATE_COMPLETED)
        def look(engine: Engine) -> None:
            assert engine.state.update.raw_loss is not None
            assert engine.state.update.raw_loss.requires_grad

        engine.run(make_data(), max_epochs=2)
        assert_same(engine.model, trained().model)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("kind", [int, float, torch.tensor], ids=["int", "float", "tensor"])
def test_weights_that_a_receiver_sets_stay_right(window: int, kind: Callable[[Any], Any]) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, weights)  # the mean over the weights, as over tokens

    update = Update.supervised(weighted, SGD)
    losses: dict[bool, list[float]] = {True: [], False: []}

    def run(cut: bool) -> Engine:
        return trained(
            *([MicroBatching(3)] if cut else []),
            GradientAccumulation(window, weight=lambda engine: kind(tokens(engine))),
            update=update,
            before=lambda engine: engine.connect(
                Events.ITERATION_COMPLETED, lambda engine: losses[cut].append(engine.state.update.loss.item())
            ),
        )

    assert_close(run(True).model, run(False).model)
    # The batch's loss is the mean over its tokens, not over the pieces' samples.
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


@pytest.mark.parametrize("halve", [False, True])
@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_piece_without_targets_counts_nothing(kind: Callable[[Any], Any], halve: bool) -> None:
    """Its loss, a mean over no targets, is NaN."""
    inputs, targets = (
        torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, -100, -100, 2, 1]),
    )
    model = make_model()
    plain = SGD(model.parameters())
    losses = []
    for _ in range(2):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        plain.step()
        plain.zero_grad()
        losses.append(loss.item())

    def weigh(engine: Engine) -> None:
        engine.state.update.weight = kind((engine.state.batch[1] != -100).sum().item())

    history: list[float] = []

    def watch(engine: Engine) -> None:
        engine.connect(Events.LOSS_COMPUTED, weigh)
        engine.connect(Events.ITERATION_COMPLETED, lambda engine: history.append(float(engine.state.update.loss)))

    metrics = Metrics(loss=Average())
    engine = trained(
        MicroBatching(2, halve_on_oom=halve), metrics, data=[(inputs, targets)] * 2, epochs=1, before=watch
    )
    assert_close(engine.model, model)
    assert history == pytest.approx(losses, rel=1e-6)
    assert engine.state.metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_the_whole_batch_counts_exactly_once() -> None:
    held: list[tuple[Any, Any]] = []

    def watch(engine: Engine) -> None:
        def note(engine: Engine) -> None:
            held.append((engine.state.update.window.held, engine.state.update.window.extra_weight))

        engine.connect(Events.GRADIENTS_READY, note)

    # Shares of 7, 7, 7, 7 and 6 of 34 do not add up to one in floating point.
    trained(MicroBatching(7), GradientAccumulation(2), data=make_data([34, 34, 34]), epochs=1, before=watch)
    assert held == [(2, 0), (1, 0)]
    assert all(isinstance(extra, int) for _, extra in held)  # nothing was added up, and nothing is divided


def test_a_piece_without_a_loss_has_weight_zero() -> None:
    model, (x, y) = make_model(), make_data([8])[0]

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor | None:
        return None if len(batch[0]) == 2 else cross_entropy(output, batch[1])

    engine = trained(MicroBatching(3), data=[(x, y)], update=Update(lambda e, b: e.model(b[0]), loss, SGD), epochs=1)
    optimizer = SGD(model.parameters())
    cross_entropy(model(x[:6]), y[:6]).backward()
    optimizer.step()
    assert_close(engine.model, model)


@pytest.mark.filterwarnings("ignore:W29")
def test_without_any_loss_there_is_no_step() -> None:
    update = Update(lambda e, b: e.model(b[0]), lambda e, o, b: None, SGD)
    engine = trained(MicroBatching(3), update=update)
    assert engine.updates[0].steps == 0
    assert engine.updates[0].loss is None
    engine = trained(MicroBatching(3), data=[None, *make_data([8])], epochs=1)
    assert engine.updates[0].steps == 1


@pytest.mark.parametrize("event", [Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED, Events.BACKWARD_COMPLETED], ids=str)
def test_a_skip_in_one_piece_skips_the_batch(event: Events) -> None:
    forwards: list[int] = []

    def watch(engine: Engine) -> None:
        engine.connect(Events.FORWARD_STARTED, lambda engine: forwards.append(engine.state.iteration))

        @engine.on(event)
        def skip(engine: Engine) -> None:
            if engine.state.iteration == 2 and forwards.count(2) == 2:
                engine.state.update.skip("on purpose")

    data = make_data([8, 8, 8])
    engine = trained(MicroBatching(3), data=data, epochs=1, before=watch)
    assert forwards == [1, 1, 1, 2, 2, 3, 3, 3]
    assert engine.updates[0].steps == 1 + 1
    assert_same(engine.model, trained(MicroBatching(3), data=[data[0], data[2]], epochs=1).model)


# ---- what is seen --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:W18")
def test_afterwards_the_whole_batch_is_there_again() -> None:
    data = make_data([8, 7])
    whole = trained()
    seen = []

    def watch(engine: Engine) -> None:
        @engine.on(Events.UPDATE_COMPLETED)
        def note(engine: Engine) -> None:
            update = engine.state.update
            seen.append((engine.state.batch, update.output, update.loss, update.backward_loss, update.weight))

    model = make_model()
    still = Update.supervised(cross_entropy, partial(torch.optim.SGD, lr=0.0))
    trained(MicroBatching(3), data=data, epochs=1, model=model, update=still, before=watch)
    assert whole.state.batch is None
    for (batch, output, loss, backward_loss, weight), (x, y) in zip(seen, data, strict=True):
        assert batch[0] is x
        assert weight == 1
        torch.testing.assert_close(output, model(x))
        assert not output.requires_grad
        torch.testing.assert_close(loss, cross_entropy(model(x), y))
        torch.testing.assert_close(backward_loss, cross_entropy(model(x), y))
        assert not backward_loss.requires_grad


@pytest.mark.moderate
def test_metrics_are_those_of_the_whole_batch() -> None:
    def measured(*handlers: Handler) -> list[tuple[float, float]]:
        metrics = Metrics(accuracy=Accuracy(), loss=Average())
        values: list[tuple[float, float]] = []

        def watch(engine: Engine) -> None:
            @engine.on(Events.EPOCH_COMPLETED)
            def note(engine: Engine) -> None:
                values.append((engine.state.metrics["accuracy"], engine.state.metrics["loss"]))

        trained(*handlers, metrics, before=watch, epochs=3)
        return values

    expected = measured()
    assert len({accuracy for accuracy, _ in expected}) > 1
    for halve in (True, False):
        found = measured(MicroBatching(3, halve_on_oom=halve))
        assert [accuracy for accuracy, _ in found] == [accuracy for accuracy, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)


def test_what_records_is_called_for_each_piece_with_that_piece() -> None:
    calls: list[tuple[str, int, int, float]] = []

    def watch(engine: Engine) -> None:
        for event in (Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED(every=2)):
            for phase in (Phase.CHANGE, Phase.RECORD):

                def note(engine: Engine, event: Any = event, phase: Phase = phase) -> None:
                    update = engine.state.update
                    calls.append(
                        (f"{event} {phase.name}", len(engine.state.batch[0]), len(update.output), update.weight)
                    )

                engine.connect(event, note, phase=phase)

    trained(MicroBatching(4), data=make_data([8, 8]), epochs=1, before=watch)
    loss, forward = "Events.LOSS_COMPUTED(every=2)", "Events.FORWARD_COMPLETED"
    assert {key: [row[1:] for row in calls if row[0] == key] for key, *_ in calls} == {
        f"{forward} CHANGE": [(4, 4, 0.5)] * 4,
        f"{forward} RECORD": [(4, 4, 0.5)] * 4,
        f"{loss} CHANGE": [(4, 4, 0.5)] * 2,
        f"{loss} RECORD": [(4, 4, 0.5)] * 2,
    }


Pair = namedtuple("Pair", ["input", "target"])


@dataclass(frozen=True)
class Labelled:
    pair: Pair
    names: list[str]
    temperature: Tensor
    scale: float = 2.0


def labelled(x: Tensor, y: Tensor) -> Labelled:
    return Labelled(Pair(x, {"y": y, "z": y.numpy()}), [f"{n}" for n in y.tolist()], torch.tensor(3.0))


def test_nested_batches_are_cut_and_nested_outputs_are_joined() -> None:
    pieces: list[Labelled] = []
    outputs: list[Any] = []

    def forward(engine: Engine, batch: Labelled) -> Any:
        pieces.append(batch)
        logits = engine.model(batch.pair.input)
        return OrderedDict(logits=logits, parts=Pair(logits.argmax(1), batch.names), loss=logits.mean(), kind="x",
                           n=len(logits), size=logits.shape, padded=torch.zeros(len(logits), len(pieces)))  # fmt: skip

    def loss(engine: Engine, output: Any, batch: Labelled) -> Tensor:
        return cross_entropy(output["logits"], batch.pair.target["y"])

    x, y = make_data([8])[0]
    trained(
        MicroBatching(3), data=[labelled(x, y)], epochs=1, update=Update(forward, loss, SGD),
        before=lambda engine: engine.connect(
            Events.UPDATE_COMPLETED, lambda engine: outputs.append(engine.state.update.output)
        ),
    )  # fmt: skip
    assert [len(piece.names) for piece in pieces] == [3, 3, 2]
    for piece, at in zip(pieces, (slice(0, 3), slice(3, 6), slice(6, 8)), strict=True):
        assert isinstance(piece, Labelled)
        assert isinstance(piece.pair, Pair)
        assert torch.equal(piece.pair.input, x[at])
        assert torch.equal(piece.pair.target["y"], y[at])
        assert np.array_equal(piece.pair.target["z"], y[at].numpy())
        assert piece.names == [f"{n}" for n in y[at].tolist()]
        assert (piece.temperature.item(), piece.scale) == (3.0, 2.0)
    (output,) = outputs
    assert isinstance(output, OrderedDict)
    torch.testing.assert_close(output["logits"], make_model()(x))
    assert output["parts"] == Pair(output["parts"].input, [f"{n}" for n in y.tolist()])
    assert torch.equal(output["parts"].input, output["logits"].argmax(1))
    assert [output[key] for key in ("loss", "kind", "n", "size", "padded")] == [None, "x", None, None, None]


def test_a_split_of_ones_own() -> None:
    data = make_data()
    as_lists = [[(x, y) for x, y in zip(*batch, strict=True)] for batch in data]
    asked: list[tuple[int, int]] = []

    def split(batch: list[Batch], n: int) -> list[list[Batch]]:
        asked.append((len(batch), n))
        return [batch[place::n] for place in range(n)]

    def forward(engine: Engine, batch: list[Batch]) -> Any:
        return engine.model(torch.stack([x for x, _ in batch]))

    def loss(engine: Engine, output: Tensor, batch: list[Batch]) -> Tensor:
        return cross_entropy(output, torch.stack([y for _, y in batch]))

    update = Update(forward, loss, SGD)
    engine = trained(MicroBatching(3, split=split, samples=len), data=as_lists, update=update)
    assert_close(engine.model, trained(data=data).model)
    assert asked == 2 * [(8, 3), (7, 3), (8, 3), (5, 2)]
    with pytest.raises(
        ValueError, match=r"'micro_batching': split= divided a batch of 8 samples into pieces of \[3, 3\]"
    ):
        trained(MicroBatching(3, split=lambda batch, n: split(batch, n)[:2], samples=len), data=as_lists, update=update)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(8, 4), torch.zeros(7)), r"8 samples holds a tensor of shape \(7,\)"),
        ({"scale": 1.0}, "no tensor with a first dimension"),
        (
            (torch.zeros(8, 4), nn.utils.rnn.pack_sequence([torch.zeros(2, 1)] * 8)),
            "first dimension of a PackedSequence mixes its samples",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_an_error(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(MicroBatching(3), data=[batch])


def test_a_run_without_data_is_refused() -> None:
    engine = Engine(Update.from_function(lambda e, b: e.model.weight.sum(), SGD), model=nn.Linear(1, 1), seed=0)
    engine.attach(MicroBatching(3))
    with pytest.raises(ValueError, match="'micro_batching': this run has no data"):
        engine.run(max_iters=2)


def test_a_hidden_state_over_time_chunks_is_refused() -> None:
    def forward(engine: Engine, batch: Batch) -> Any:
        engine.state.update.hidden = engine.model(batch[0])
        return engine.state.update.hidden

    update = Update(forward, lambda e, o, b: cross_entropy(o, b[1]), SGD)
    with pytest.raises(RuntimeError, match=r"'micro_batching': update 'main' sets update\.hidden"):
        trained(MicroBatching(3), update=update)


# ---- together with others ------------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 2])
def test_clipping_sees_the_whole_batch(window: int) -> None:
    def run(*handlers: Handler) -> Engine:
        return trained(*handlers, GradientAccumulation(window), GradientClipping(max_norm=0.2))

    assert_close(run(MicroBatching(3)).model, run().model)
    assert not torch.equal(run().model[0].weight, trained(GradientAccumulation(window)).model[0].weight)


@pytest.mark.moderate
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: Any) -> None:
    def run(*handlers: Handler) -> Engine:
        return trained(*handlers, GradientAccumulation(2), MixedPrecision(precision, init_scale=2.0**10))

    # The pieces' gradients are rounded to 8 or 11 bits each, and a loss near one is a multiple of 1/128 or 1/1024.
    assert_close(run(MicroBatching(3)).model, run().model, tolerance={"bf16": 2e-2, "fp16": 2e-3}[precision])
    engine = run(MicroBatching(3))
    if precision == "fp16":
        assert engine.handlers["mixed_precision"].state_dict()["main"]["scale"] == 2.0**10
    assert engine.updates[0].steps == 6


def test_an_overflow_in_one_piece_skips_the_whole_window() -> None:
    data = make_data([8, 8, 8, 8])
    data[1][0][5] = 1e6  # beyond float16
    engine = trained(
        MicroBatching(3), GradientAccumulation(2), MixedPrecision("fp16", init_scale=4.0), data=data, epochs=1
    )
    assert engine.updates[0].steps == 1
    assert engine.handlers["mixed_precision"].state_dict()["main"]["scale"] == 2.0


def two_updates(*handlers: Handler) -> Engine:
    """A generator and a discriminator that share the batch; each piece's generator goes through the discriminator."""
    torch.manual_seed(0)
    models = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Batch) -> Tensor:
            made: Tensor = models["d"](models["g"](batch[0])).mean()
            return -made if name == "g" else made - models["d"](batch[0]).tanh().mean()

        return Update.from_function(function, SGD, name=name, parameters=lambda engine: models[name].parameters())

    engine = Engine([update("d"), update("g")], model=dict(models.items()), seed=0)
    engine.attach(*handlers)
    engine.run(make_data(), max_epochs=2)
    return engine


@pytest.mark.moderate
@pytest.mark.parametrize("which", [None, "g"])
@pytest.mark.parametrize("window", [1, 2])
def test_several_updates(which: str | None, window: int) -> None:
    forwards: list[str] = []
    handler = MicroBatching(3, update=which)
    with pytest.raises(KeyError, match="no update is named 'c'"):
        two_updates(MicroBatching(3, update="c"))

    class Watch(Handler):
        @on(Events.FORWARD_STARTED)
        def note(self, engine: Engine) -> None:
            forwards.append(engine.state.update.name)

    one = two_updates(handler, GradientAccumulation(window), Watch())
    other = two_updates(GradientAccumulation(window))
    for name in ("g", "d"):
        assert_close(one.modules[name], other.modules[name])
    assert forwards.count("g") == 24
    assert forwards.count("d") == (10 if which == "g" else 24)


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("weight", [None, tokens])
def test_an_optimizer_with_a_closure_evaluates_in_pieces(window: int, weight: Any) -> None:
    weights = None if weight is None else torch.tensor([1.0, 2.0, 3.0])
    # In double precision and for one epoch: with each step the line search amplifies what the order of sums changes, ten to a
    # hundred times, and which order that is depends on the processor.
    weights = None if weights is None else weights.double()
    lbfgs = partial(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    update = Update.supervised(lambda output, target: cross_entropy(output, target, weights), lbfgs)
    data = [(x.double(), y) for x, y in make_data()]

    def run(*handlers: Handler) -> nn.Module:
        accumulation, model = GradientAccumulation(window, weight=weight), make_model().double()
        trained(*handlers, accumulation, update=update, data=data, model=model, epochs=1)
        return model

    assert_close(run(MicroBatching(3)), run(), tolerance=1e-10)


# ---- the memory runs out -------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A model in a memory that holds a number of samples only; the memory runs out after half of the forward."""

    def __init__(self, limit: int, *, places: str = "forward", norm: bool = False) -> None:
        super().__init__()
        self.limit = limit
        self.net = make_model(norm=norm)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.places = places
        self.forwards: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.append(len(x))
        self.calls = self.calls + 1  # a buffer that is replaced, not changed in place
        output: Tensor = self.net(x)
        if len(x) > self.limit:
            if self.places == "CPU":
                torch.empty(2**50)  # an error of the CPU's allocator
            if self.places == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory")
            output.register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


def run_out(
    limit: int, handler: Handler, *others: Handler, places: str = "forward", norm: bool = False, **options: Any
) -> tuple[Engine, list[int]]:
    retries: list[int] = []

    def watch(engine: Engine) -> None:
        @engine.on(Events.UPDATE_RETRIED)
        def note(engine: Engine) -> None:
            assert isinstance(handler, MicroBatching)
            assert handler.reduced is not None
            retries.append(handler.reduced)

    options.setdefault("data", make_data([8, 8, 8, 8, 8]))
    engine = trained(handler, *others, model=Small(limit, places=places, norm=norm), before=watch, **options)
    return engine, retries


@pytest.mark.moderate
@pytest.mark.parametrize("places", ["forward", "backward", "CPU"])
@pytest.mark.parametrize("window", [1, 3])
def test_a_retry_leaves_no_trace_in_the_training(places: str, window: int) -> None:
    def others() -> list[Handler]:
        return [GradientAccumulation(window), Metrics(accuracy=Accuracy(), loss=Average())]

    # The third batch is the first that is too large, inside an open window if there is one; BatchNorm's statistics, dropout
    # and the loss that Metrics saw would show it.
    data = make_data([4, 4, 16, 8, 8])
    engine, retries = run_out(4, MicroBatching(), *others(), places=places, norm=True, data=data)
    right, none = run_out(99, MicroBatching(4), *others(), norm=True, data=data)
    assert (retries, none) == ([8, 4], [])
    expected, found = fingerprint(right), fingerprint(engine)
    assert {part for part in expected if expected[part] != found[part]} == {"handlers.micro_batching"}
    assert engine.handlers["micro_batching"].state_dict() == {"reduced": 4}
    assert right.handlers["micro_batching"].state_dict() == {}


def test_memory_that_runs_out_in_a_later_piece_is_recorded_once() -> None:
    losses: list[float] = []

    class Recorder(Handler):
        @on(Events.LOSS_COMPUTED, phase=Phase.RECORD)
        def note(self, engine: Engine) -> None:
            losses.append(engine.state.update.loss.item())  # type: ignore[union-attr]

    class Later(Small):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 4 and self.forwards.count(4) == 1:
                self.forwards.append(4)
                raise torch.OutOfMemoryError("CUDA out of memory")
            output: Tensor = super().forward(x)
            return output

    data = make_data([8])
    engine = trained(MicroBatching(4), Recorder(), data=data, epochs=1, model=Later(99))
    assert engine.model.forwards == [4, 4, 2, 2, 2, 2]
    found, losses[:] = losses[:], []
    right = trained(MicroBatching(2), Recorder(), data=data, epochs=1, model=Small(99))
    assert found == losses
    assert len(found) == 4
    assert_same(engine.model, right.model)


def test_the_smaller_size_is_kept_and_saved() -> None:
    handler = MicroBatching()
    engine, retries = run_out(3, handler, epochs=1)
    assert retries == [4, 2]
    assert engine.model.forwards == [8, 4, *[2] * 20]
    state = engine.state_dict()

    model = Small(3)
    other = Engine(Update.supervised(cross_entropy, SGD), model=model, seed=0)
    other.attach(MicroBatching())
    other.load_state_dict(state)
    other.run(make_data([8, 8, 8, 8, 8]), max_epochs=2)
    engine.run(make_data([8, 8, 8, 8, 8]), max_epochs=2)
    assert model.forwards == [2] * 20
    assert_same(engine.model, other.model)
    other.reset()
    restarted = other.handlers["micro_batching"]
    assert isinstance(restarted, MicroBatching)
    assert restarted.reduced is None


def test_one_sample_that_is_too_much_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        run_out(0, MicroBatching(), data=make_data([3]), epochs=1)
    reported = "\n".join(caught.value.__notes__)
    assert "'micro_batching': out of memory with 1 of the batch's 3 samples" in reported
    assert "a single sample cannot be split further" in reported


def test_without_halving_the_error_leaves_at_once() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_out(3, MicroBatching(4, halve_on_oom=False))
    assert "use a smaller size=, more pieces=" in "\n".join(caught.value.__notes__)


def test_a_split_that_does_not_get_smaller_is_an_error() -> None:
    def split(batch: Batch, n: int) -> list[Batch]:
        return [(batch[0][:7], batch[1][:7]), (batch[0][7:], batch[1][7:])]

    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_out(3, MicroBatching(split=split))
    assert "let split= return smaller pieces when it is asked for more of them" in "\n".join(caught.value.__notes__)


def test_another_error_is_not_retried() -> None:
    class Broken(Small):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        trained(MicroBatching(4), model=Broken(1))


def test_after_an_error_the_weight_of_a_piece_is_forgotten() -> None:
    engine = Engine(Update.supervised(cross_entropy, SGD), model=make_model(), seed=0)
    engine.attach(MicroBatching(4))

    def fail(engine: Engine) -> None:
        raise ArithmeticError

    with engine.connect(Events.LOSS_COMPUTED, fail), pytest.raises(ArithmeticError):
        engine.run(make_data([8]), max_epochs=1)
    assert engine.updates[0].weight == 1
    engine.detach("micro_batching")
    engine.run(make_data([8]), max_iters=1)
    assert_same(engine.model, trained(data=make_data([8]), epochs=1).model)


def test_an_error_of_a_recorder_says_whose_it_was() -> None:
    class Broken(Handler):
        @on(Events.LOSS_COMPUTED, phase=Phase.RECORD)
        def note(self, engine: Engine) -> None:
            raise ArithmeticError

    with pytest.raises(ArithmeticError) as caught:
        trained(MicroBatching(4), Broken())
    assert "raised by broken.note at Events.LOSS_COMPUTED, epoch 1, iteration 1" in caught.value.__notes__


# ---- promises ------------------------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("limit", [99, 3])
def test_it_keeps_its_promises(limit: int) -> None:
    def build() -> Engine:
        engine = Engine(Update.supervised(cross_entropy, SGD), model=Small(limit), seed=0)
        engine.attach(GradientAccumulation(2))
        return engine

    def make() -> Handler:
        return MicroBatching(5)

    if limit == 99:
        check_handler(build, make, make_data([8, 8, 7]), max_epochs=2)
    else:  # without it this engine cannot run
        whole = build()
        whole.attach(make())
        whole.run(make_data([3, 8, 7]), max_epochs=2)
        assert whole.handlers["micro_batching"].state_dict() == {"reduced": 2}


def test_two_of_them_refuse_each_other() -> None:
    engine = Engine(Update.supervised(cross_entropy, SGD), model=make_model(), seed=0)
    engine.attach(MicroBatching(4))
    with pytest.raises(ValueError, match=r"both 'micro_batching' and 'other' .* the computation of gradients"):
        engine.attach(MicroBatching(2, name="other"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"size": 0}, ValueError, r"MicroBatching\(size=0\)"),
        ({"size": 2.0}, TypeError, r"MicroBatching\(size=2.0\)"),
        ({"size": True}, TypeError, r"MicroBatching\(size=True\)"),
        ({"pieces": -1}, ValueError, r"MicroBatching\(pieces=-1\)"),
        ({"pieces": math.inf}, TypeError, r"MicroBatching\(pieces=inf\)"),
        ({"size": 2, "pieces": 2}, ValueError, r"MicroBatching\(size=2, pieces=2\): pass only one of the two"),
        ({"split": 3}, TypeError, r"MicroBatching\(split=3\)"),
        ({"split": max, "samples": 3}, TypeError, r"MicroBatching\(samples=3\)"),
        ({"samples": len}, ValueError, "samples= requires split="),
        ({"halve_on_oom": 1}, TypeError, r"MicroBatching\(halve_on_oom=1\)"),
        ({"halve_on_oom": False}, ValueError, "pass size= or pieces="),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        MicroBatching(**options)
