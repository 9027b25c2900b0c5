"""TruncatedBPTT against plain PyTorch loops that split the sequences, carry the hidden state and detach it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from signalfire import Engine, Events, FindingWarning, Handler, Phase, Update, allow, on
from signalfire.authoring.planning import steps_to_come
from signalfire.core.overrides import Override
from signalfire.handlers import (
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    MixedPrecision,
    TruncatedBPTT,
    UpdateFrequency,
)
from signalfire.testing import check_handler
from tests.kit import quick

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LENGTH, STEPS = 10, 4  # chunks of 4, 4 and 2
CUTS = [(0, 4), (4, 8), (8, 10)]


class Recurrent(nn.Module):
    """An LSTM with a value read out at every step; outputs and the hidden state."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lstm = nn.LSTM(3, 6, num_layers=2, batch_first=batch_first)
        self.readout = nn.Linear(6, 2)

    def forward(self, x: Any, hidden: Any = None) -> tuple[Any, Any]:
        states, hidden = self.lstm(x, hidden)
        if isinstance(states, PackedSequence):
            return states._replace(data=self.readout(states.data)), hidden
        return self.readout(states), hidden


Batch = tuple[Tensor, Tensor]


def make_data(count: int = 3, *, length: int = LENGTH, samples: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator)
    return [(draw(samples, length, 3), draw(samples, length, 2)) for _ in range(count)]


def forward(engine: Engine, batch: Any) -> Any:
    update = engine.state.update
    output, hidden = engine.model(batch[0], update.hidden)
    if update.more:
        update.hidden = hidden
    return output


def loss(engine: Engine, output: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(output, batch[1])


def make_trainer(model: nn.Module, *handlers: Handler, optimizer: Any = SGD, **functions: Any) -> Engine:
    spec = {"forward": forward, "loss": loss} | functions
    trainer = Engine(Update(optimizer=optimizer, **spec), model=model, seed=0)
    trainer.attach(*handlers)
    return trainer


def detached(hidden: Any) -> Any:
    return tuple(h.detach() for h in hidden)


def same(hidden: Any) -> Any:
    return hidden


def chunks_of(data: Sequence[Batch]) -> list[list[Batch]]:
    return [[(x[:, a:b], y[:, a:b]) for a, b in CUTS] for x, y in data]


def train_in_plain_loop(
    model: nn.Module,
    batches: Sequence[Sequence[Any]],
    *,
    epochs: int = 2,
    window: int = 1,
    between: Callable[[Any], Any] = detached,
    compute_loss: Callable[[Any, Any], Tensor] = lambda output, chunk: nn.functional.mse_loss(output, chunk[1]),
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    make_optimizer: Any = SGD,
) -> list[list[Tensor]]:
    """Train on batches that were split beforehand; returns the losses of the last epoch's chunks."""
    optimizer = make_optimizer(model.parameters())
    for _ in range(epochs):
        losses: list[list[Tensor]] = []
        held, last = 0, sum(map(len, batches))
        for done, (first, chunk) in enumerate(((batch[0], chunk) for batch in batches for chunk in batch), 1):
            if chunk is first:
                hidden = None
                losses.append([])
            output, hidden = model(chunk[0], None if hidden is None else between(hidden))
            loss = compute_loss(output, chunk)
            losses[-1].append(loss.detach())
            loss.backward(retain_graph=between is same)
            held += 1
            if held == window or done == last:
                if held > 1:
                    for p in model.parameters():
                        assert p.grad is not None
                        p.grad.div_(held)
                before_step()
                optimizer.step()
                optimizer.zero_grad()
                after_step()
                held = 0
    return losses


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.moderate
def test_batch_first_tensors_equal_a_plain_loop() -> None:
    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS))
    trainer.run(make_data(), max_epochs=2)
    train_in_plain_loop(reference, chunks_of(make_data()))
    assert equal(model, reference)
    assert trainer.updates[0].steps == 2 * 3 * 3
    assert trainer.state.iteration == 6, "a batch stays one iteration"


@pytest.mark.moderate
def test_time_first_tensors_equal_a_plain_loop() -> None:
    data = [(x.transpose(0, 1), y.transpose(0, 1)) for x, y in make_data()]
    model, reference = Recurrent(batch_first=False), Recurrent(batch_first=False)
    make_trainer(model, TruncatedBPTT(STEPS, dim=0)).run(data, max_epochs=2)
    train_in_plain_loop(reference, [[(x[a:b], y[a:b]) for a, b in CUTS] for x, y in data])
    assert equal(model, reference)


@pytest.mark.moderate
def test_lists_of_time_steps_equal_a_plain_loop() -> None:
    data = [([*x.unbind(1)], [*y.unbind(1)]) for x, y in make_data()]

    def forward_list(engine: Engine, batch: Any) -> Tensor:
        assert isinstance(batch[0], list)
        output: Tensor = forward(engine, (torch.stack(batch[0], 1),))
        return output

    def loss_list(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, torch.stack(batch[1], 1))

    model, reference = Recurrent(), Recurrent()
    make_trainer(model, TruncatedBPTT(STEPS), forward=forward_list, loss=loss_list).run(data, max_epochs=2)
    train_in_plain_loop(reference, chunks_of(make_data()))
    assert equal(model, reference)


def test_a_batch_that_is_a_list_of_tensors_as_from_a_loader_is_no_sequence_of_steps() -> None:
    data = [[x, x[:, :, :2]] for x, _ in make_data()]  # input and target, as a DataLoader gives them
    model, reference = Recurrent(), Recurrent()
    make_trainer(model, TruncatedBPTT(STEPS)).run(data, max_epochs=1)
    train_in_plain_loop(reference, [[(x[:, a:b], y[:, a:b]) for a, b in CUTS] for x, y in data], epochs=1)
    assert equal(model, reference)


def test_what_has_no_time_dimension_is_given_to_every_chunk() -> None:
    class Sample(NamedTuple):
        inputs: Tensor
        others: dict[str, Any]

    x = torch.randn(4, LENGTH, 3)
    others = {
        "label": torch.arange(4),
        "mask": torch.ones(4, LENGTH),
        "features": torch.ones(4, 7),
        "names": ["a", "b"],
    }
    seen: list[Sample] = []

    def look(engine: Engine, batch: Sample) -> Tensor:
        seen.append(batch)
        output: Tensor = engine.model(batch.inputs)[0].mean()
        return output

    trainer = Engine(Update.from_function(look, SGD), model=Recurrent(), seed=0, allow=["W69"])
    trainer.attach(TruncatedBPTT(STEPS))
    trainer.run([Sample(x, others)], max_epochs=1)
    assert [type(one) for one in seen] == [Sample] * 3
    for (a, b), one in zip(CUTS, seen, strict=True):
        assert torch.equal(one.inputs, x[:, a:b])
        assert one.others["mask"].shape == (4, b - a)
        assert one.others["label"] is others["label"]
        assert one.others["features"] is others["features"]
        assert one.others["names"] == ["a", "b"]


def test_batches_that_are_dataclasses_or_mappings_are_split_too() -> None:
    @dataclass(frozen=True)
    class Sample:
        inputs: Mapping[str, Tensor]
        label: int

    x = torch.randn(4, LENGTH, 3)
    seen: list[Sample] = []

    def look(engine: Engine, batch: Sample) -> Tensor:
        seen.append(batch)
        output: Tensor = engine.model(batch.inputs["x"])[0].mean()
        return output

    trainer = Engine(Update.from_function(look, SGD), model=Recurrent(), seed=0, allow=["W69"])
    trainer.attach(TruncatedBPTT(STEPS))
    trainer.run([Sample(MappingProxyType({"x": x}), 3)], max_epochs=1)
    assert all(torch.equal(one.inputs["x"], x[:, a:b]) for (a, b), one in zip(CUTS, seen, strict=True))
    assert [one.label for one in seen] == [3] * 3


@pytest.mark.moderate
def test_a_label_for_the_whole_sequence_trains_as_in_a_plain_loop() -> None:
    data = [(x, y[:, 0]) for x, y in make_data()]  # (N, 2): no dimension of the sequence's length

    def last_step(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output[:, -1], batch[1])

    model, reference = Recurrent(), Recurrent()
    make_trainer(model, TruncatedBPTT(STEPS), loss=last_step).run(data, max_epochs=2)
    train_in_plain_loop(
        reference,
        [[(x[:, a:b], y) for a, b in CUTS] for x, y in data],
        compute_loss=lambda output, chunk: nn.functional.mse_loss(output[:, -1], chunk[1]),
    )
    assert equal(model, reference)


# ---- packed sequences ---------------------------------------------------------------------------------------------

LENGTHS = [7, 10, 3, 4]  # those of 3 and of 4 end with the first chunk of 4, that of 7 with the second


def packed_loss(engine: Engine, output: PackedSequence, batch: Any) -> Tensor:
    return nn.functional.mse_loss(output.data, batch[1].data)


def packed_chunks(x: Tensor, y: Tensor, lengths: list[int]) -> list[tuple[PackedSequence, PackedSequence, list[int]]]:
    """For each chunk the sequences that still run, longest first, packed; and which of the chunk before they are."""
    chunks = []
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for a, b in CUTS:
        runs = [i for i in longest_first if lengths[i] > a]
        inside = [min(lengths[i], b) - a for i in runs]
        pack = partial(pack_padded_sequence, lengths=inside, batch_first=True)
        chunks.append((pack(x[runs, a:b]), pack(y[runs, a:b]), list(range(len(runs)))))
    return chunks


@pytest.mark.moderate
@pytest.mark.parametrize("sort", [False, True])
def test_packed_sequences_equal_a_plain_loop_whose_hidden_state_is_narrowed(sort: bool) -> None:
    lengths = sorted(LENGTHS, reverse=True) if sort else LENGTHS
    pack = partial(pack_padded_sequence, lengths=lengths, batch_first=True, enforce_sorted=sort)
    data = [(pack(x), pack(y)) for x, y in make_data()]
    assert (data[0][0].sorted_indices is None) == sort
    model = Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS), loss=packed_loss)
    trainer.run(data, max_epochs=2)

    reference = Recurrent()
    optimizer = SGD(reference.parameters())
    for _ in range(2):
        for x, y in make_data():
            hidden: Any = None
            losses, elements = [], []
            for inputs, targets, runs in packed_chunks(x, y, lengths):
                if hidden is not None:
                    hidden = tuple(h.detach()[:, runs] for h in hidden)
                output, hidden = reference(inputs, hidden)
                loss = nn.functional.mse_loss(output.data, targets.data)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                elements.append(len(inputs.data))
    assert equal(model, reference)
    assert elements == [4 + 4 + 4 + 3, 4 + 3, 2]
    expected = torch.stack([one * n for one, n in zip(losses, elements, strict=True)]).sum() / sum(elements)
    assert trainer.updates[0].loss is not None
    assert torch.equal(trainer.updates[0].loss, expected)


@pytest.mark.parametrize("sort", [False, True])
def test_chunks_of_a_packed_batch_are_those_sequences_that_still_run_in_their_order(sort: bool) -> None:
    lengths = sorted(LENGTHS, reverse=True) if sort else LENGTHS
    sequences = [torch.arange(length) + 100 * i for i, length in enumerate(lengths)]
    seen: list[list[list[int]]] = []

    def look(engine: Engine, batch: Any) -> None:
        unpacked = nn.utils.rnn.unpack_sequence(batch["x"])
        seen.append([sequence.tolist() for sequence in unpacked])

    engine = Engine(Update.from_function(look))
    engine.attach(TruncatedBPTT(STEPS))
    engine.run([{"x": pack_sequence(sequences, enforce_sorted=sort)}])
    cut = [[s[a:b].tolist() for s in sequences if len(s) > a] for a, b in CUTS]
    assert seen == cut


# ---- a split of one's own -----------------------------------------------------------------------------------------


@pytest.mark.moderate
def test_a_split_of_ones_own_equals_a_plain_loop() -> None:
    cuts = [(0, 1), (1, 7), (7, 10)]

    def split(batch: Batch) -> list[Batch]:
        return [(batch[0][:, a:b], batch[1][:, a:b]) for a, b in cuts]

    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(split=split))
    shapes: list[tuple[int, ...]] = []
    trainer.connect(Events.ITERATION_COMPLETED, lambda engine: shapes.append(engine.state.update.output.shape))
    trainer.run(make_data(), max_epochs=2)
    losses = train_in_plain_loop(reference, [split(batch) for batch in make_data()])
    assert equal(model, reference)
    expected = torch.stack([one * n for one, n in zip(losses[-1], (1, 6, 3), strict=True)]).sum() / 10
    assert trainer.updates[0].loss is not None
    assert torch.equal(trainer.updates[0].loss, expected)
    assert set(shapes) == {(4, 10, 2)}


@pytest.mark.filterwarnings("ignore:W84")
def test_chunks_of_unknown_length_count_the_same_and_their_outputs_are_not_joined() -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        output: Tensor = engine.model(torch.full((1, 1, 3), batch["value"]))[0]
        return output

    def mean(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        loss: Tensor = output.mean() * 0 + batch["value"]
        return loss

    def split(batch: Any) -> list[Any]:
        return [{"value": value} for value in batch["values"]]

    trainer = make_trainer(Recurrent(), TruncatedBPTT(split=split), forward=step, loss=mean)
    shapes: list[tuple[int, ...]] = []
    trainer.connect(Events.ITERATION_COMPLETED, lambda engine: shapes.append(engine.state.update.output.shape))
    with allow("W69"):
        trainer.run([{"values": [1.0, 2.0, 6.0]}], max_epochs=1)
    assert shapes == [(1, 1, 2)]
    assert trainer.updates[0].loss is not None
    assert trainer.updates[0].loss.item() == 3.0


# ---- the hidden state ---------------------------------------------------------------------------------------------


def test_it_would_be_noticed_if_the_hidden_state_were_not_carried() -> None:
    model, reference = Recurrent(), Recurrent()
    make_trainer(model, TruncatedBPTT(STEPS)).run(make_data(), max_epochs=1)
    train_in_plain_loop(reference, chunks_of(make_data()), epochs=1, between=lambda hidden: None)
    assert not equal(model, reference)


def test_it_would_be_noticed_if_gradients_flowed_from_chunk_to_chunk() -> None:
    model, whole = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS), GradientAccumulation(3))
    trainer.run(make_data(), max_epochs=1)
    train_in_plain_loop(whole, chunks_of(make_data()), epochs=1, window=3, between=same)
    assert not equal(model, whole)
    reference = Recurrent()
    train_in_plain_loop(reference, chunks_of(make_data()), epochs=1, window=3)
    assert equal(model, reference)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "nested"])
def test_hidden_states_are_detached_however_they_are_nested_and_none_in_front_of_a_batch(kind: str) -> None:
    wraps: dict[str, Callable[[Tensor], Any]] = {
        "tensor": lambda h: h,
        "tuple": lambda h: (h, h + 1),
        "list": lambda h: [h],
        "dict": lambda h: {"h": h, "layers": 2},
        "nested": lambda h: [{"h": (h, None)}],
    }

    def innermost(hidden: Any) -> Tensor:
        while not isinstance(hidden, Tensor):
            hidden = next(iter(hidden.values())) if isinstance(hidden, dict) else hidden[0]
        return hidden

    seen: list[Any] = []

    def function(engine: Engine, batch: Batch) -> Tensor:
        update = engine.state.update
        seen.append(update.hidden)
        carried = 0 if update.hidden is None else innermost(update.hidden)
        value: Tensor = engine.model(batch[0])[0].mean() + carried
        update.hidden = wraps[kind](value)  # whether or not there is more: the next batch does not see it
        return value

    trainer = Engine(Update.from_function(function, SGD), model=Recurrent(), seed=0)
    trainer.attach(TruncatedBPTT(STEPS))
    trainer.run(make_data(2), max_epochs=1)
    assert [one is None for one in seen] == [True, False, False] * 2
    for one in seen:
        if one is not None:
            assert type(one) is type(wraps[kind](torch.zeros(())))
            assert innermost(one).grad_fn is None
            assert not innermost(one).requires_grad
    assert trainer.updates[0].hidden is None, "nothing is kept alive after the batch"


def test_a_state_that_was_left_from_elsewhere_is_not_carried_into_a_batch() -> None:
    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS))
    trainer.updates[0].hidden = (torch.ones(2, 4, 6), torch.ones(2, 4, 6))
    trainer.run(make_data(), max_epochs=1)
    train_in_plain_loop(reference, chunks_of(make_data()), epochs=1)
    assert equal(model, reference)


# ---- what is seen afterwards --------------------------------------------------------------------------------------


def test_after_the_last_chunk_batch_output_and_loss_are_those_of_the_whole_batch() -> None:
    seen: list[tuple[Any, Any, Any, bool]] = []
    data = make_data()
    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS), History())

    @trainer.on(Events.ITERATION_COMPLETED, phase=Phase.RECORD)
    def look(engine: Engine) -> None:
        update = engine.state.update
        seen.append((engine.state.batch, update.output, update.loss, update.more))

    outputs: list[Tensor] = []
    trainer.connect(Events.FORWARD_COMPLETED, lambda engine: outputs.append(engine.state.update.output.detach()))
    trainer.run(data, max_epochs=1)
    losses = train_in_plain_loop(reference, chunks_of(data), epochs=1)
    for i, (batch, output, loss, more) in enumerate(seen):
        assert batch is data[i]
        assert torch.equal(output, torch.cat(outputs[3 * i : 3 * i + 3], 1))
        assert output.grad_fn is None
        assert torch.equal(loss, torch.stack([one * n for one, n in zip(losses[i], (4, 4, 2), strict=True)]).sum() / 10)
        assert not more


def test_an_output_without_the_time_dimension_stays_that_of_the_last_chunk() -> None:
    def last_state(engine: Engine, batch: Any) -> Any:
        output: Tensor = forward(engine, batch)
        return output[:, -1]

    def last_loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1][:, -1])

    for shape, make in (((4, 2), last_state), (None, lambda engine, batch: (last_state(engine, batch),))):
        outputs: list[Any] = []
        compute: Any = last_loss if shape else lambda engine, output, batch: last_loss(engine, output[0], batch)
        trainer = make_trainer(Recurrent(), TruncatedBPTT(STEPS), forward=make, loss=compute)
        trainer.connect(Events.FORWARD_COMPLETED, lambda engine, seen=outputs: seen.append(engine.state.update.output))
        trainer.connect(
            Events.ITERATION_COMPLETED,
            lambda engine, seen=outputs: seen.append(engine.state.update.output),
        )
        trainer.run(make_data(1), max_epochs=1)
        assert len(outputs) == 4
        assert outputs[3] is outputs[2]


def test_a_batch_no_longer_than_a_chunk_is_as_without_the_handler() -> None:
    model, plain = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(LENGTH))
    make_trainer(plain).run(make_data(), max_epochs=2)
    graphs: list[bool] = []
    trainer.connect(Events.UPDATE_COMPLETED, lambda engine: graphs.append(engine.state.update.output.requires_grad))
    trainer.run(make_data(), max_epochs=2)
    assert equal(model, plain)
    assert all(graphs), "the output is the forward's own"


def test_a_chunk_without_a_loss_does_not_count() -> None:
    def sometimes(engine: Engine, output: Tensor, batch: Any) -> Tensor | None:
        return None if output.size(1) == 2 else loss(engine, output, batch)

    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS), loss=sometimes)
    trainer.run(make_data(), max_epochs=1)
    losses = train_in_plain_loop(reference, [chunks[:2] for chunks in chunks_of(make_data())], epochs=1)
    assert equal(model, reference)
    assert trainer.updates[0].loss is not None
    assert torch.equal(trainer.updates[0].loss, torch.stack([one * 4 for one in losses[-1]]).sum() / 8)


def test_a_batch_of_none_is_passed_over() -> None:
    data = make_data()
    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS))
    trainer.run([data[0], None, data[1], data[2]], max_epochs=1)
    train_in_plain_loop(reference, chunks_of(data), epochs=1)
    assert equal(model, reference)
    assert trainer.updates[0].steps == 9


# ---- with other handlers ------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("window", [2, 4, 5])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.filterwarnings("ignore:C22:signalfire.FindingWarning")
def test_accumulation_counts_chunks_and_windows_straddle_batches_but_not_epochs(window: int, sized: bool) -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Batch]:
            return iter(make_data())

    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS), GradientAccumulation(window))
    trainer.run(make_data() if sized else Unsized(), max_epochs=2)
    train_in_plain_loop(
        reference, chunks_of(make_data()), window=window
    )  # nine chunks: the last window of an epoch is shorter
    assert equal(model, reference)
    assert trainer.updates[0].steps == 2 * -(-9 // window)


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:C22:signalfire.FindingWarning")
@pytest.mark.parametrize("window", [1, 4])
def test_clipping_acts_once_for_each_window_of_chunks(window: int) -> None:
    model, reference = Recurrent(), Recurrent()
    handlers = [TruncatedBPTT(STEPS), GradientAccumulation(window), GradientClipping(max_norm=0.05)]
    make_trainer(model, *handlers).run(make_data(), max_epochs=2)
    train_in_plain_loop(
        reference,
        chunks_of(make_data()),
        window=window,
        before_step=lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.05),
    )
    assert equal(model, reference)


class Elman(nn.Module):
    """A plain recurrence out of linear layers, which autocast casts on every device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.into, self.around, self.out = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = x.new_zeros(len(x), 6) if hidden is None else hidden
        outputs = []
        for step in x.unbind(1):
            hidden = (self.into(step) + self.around(hidden)).tanh()
            outputs.append(self.out(hidden))
        return torch.stack(outputs, 1), hidden


@pytest.mark.filterwarnings("ignore:C22:signalfire.FindingWarning")
@pytest.mark.parametrize("window", [1, 4])
def test_fp16_scaling_equals_a_plain_loop(window: int) -> None:
    model, reference = Elman(), Elman()
    scaling = MixedPrecision("fp16", init_scale=256.0, growth_interval=3)
    trainer = make_trainer(model, TruncatedBPTT(STEPS), scaling, GradientAccumulation(window))
    trainer.run(make_data(), max_epochs=1)

    optimizer = SGD(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    held = 0
    for batch, chunks in enumerate(chunks_of(make_data())):
        hidden: Tensor | None = None
        for i, (x, y) in enumerate(chunks):
            with torch.autocast("cpu", torch.float16):
                output, hidden = reference(x, None if hidden is None else hidden.detach())
                one = nn.functional.mse_loss(output, y)
            scaler.scale(one).backward()
            held += 1
            if held == window or (batch == 2 and i == 2):
                if held > 1:
                    for p in reference.parameters():
                        assert p.grad is not None
                        p.grad.div_(held)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                held = 0
    assert equal(model, reference)
    assert scaling.scalers["main"].get_scale() == scaler.get_scale() != 256.0 or window == 4


@pytest.mark.parametrize("window", [1, 2])
def test_a_step_that_is_skipped_costs_its_own_chunks_only(window: int) -> None:
    model, reference = Elman(), Elman()
    scaling = MixedPrecision("fp16", init_scale=2.0**20)
    trainer = make_trainer(model, TruncatedBPTT(STEPS), scaling, GradientAccumulation(window))
    trainer.run(make_data(), max_epochs=1)

    optimizer = SGD(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    steps, count = 0, 0
    for chunks in chunks_of(make_data()):
        hidden: Tensor | None = None
        for x, y in chunks:
            with torch.autocast("cpu", torch.float16):
                output, hidden = reference(x, None if hidden is None else hidden.detach())
                one = nn.functional.mse_loss(output, y)
            scaler.scale(one).backward()
            count += 1
            if count % window == 0 or count == 9:
                if window > 1 and count < 9:
                    for p in reference.parameters():
                        assert p.grad is not None
                        p.grad.div_(window)
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                steps += scaler.get_scale() == before
    assert 0 < steps < -(-9 // window), "one has to overflow, and not all"
    assert trainer.updates[0].steps == steps
    assert equal(model, reference)


def test_an_update_that_is_skipped_before_its_first_chunk_is_skipped_for_the_whole_batch() -> None:
    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS))
    trainer.connect(Events.ITERATION_STARTED(once=2), lambda engine: engine.updates[0].skip("not this one"))
    data = make_data()
    trainer.run(data, max_epochs=1)
    train_in_plain_loop(reference, chunks_of([data[0], data[2]]), epochs=1)
    assert equal(model, reference)


@pytest.mark.moderate
def test_a_schedule_with_its_number_of_steps_moves_with_every_chunks_step() -> None:
    model, reference = Recurrent(), Recurrent()
    factory = partial(OneCycleLR, max_lr=0.3, total_steps=18)
    make_trainer(model, TruncatedBPTT(STEPS), LRScheduling(factory)).run(make_data(), max_epochs=2)
    made: list[Any] = []

    def optimizer(parameters: Any) -> Any:
        made.append(SGD(parameters))
        made.append(factory(made[0]))
        return made[0]

    train_in_plain_loop(reference, chunks_of(make_data()), make_optimizer=optimizer, after_step=lambda: made[1].step())
    assert equal(model, reference)


def test_a_schedule_that_needs_the_number_of_steps_learns_that_nobody_knows_it() -> None:
    trainer = make_trainer(Recurrent(), TruncatedBPTT(STEPS), LRScheduling(partial(OneCycleLR, max_lr=0.3)))
    with pytest.raises(ValueError, match=r"total_steps.*not known"):
        trainer.run(make_data(), max_epochs=2)
    trainer.detach("truncated_bptt")
    assert steps_to_come(trainer, trainer.updates[0]) == 6


@pytest.mark.moderate
def test_two_updates_take_their_chunks_one_after_the_other_each_with_its_own_hidden_state() -> None:
    models = {"a": Recurrent(), "b": Recurrent()}
    order: list[tuple[str, int]] = []

    def part(name: str) -> Update:
        def run(engine: Engine, batch: Batch) -> Tensor:
            update = engine.state.update
            order.append((name, batch[0].size(1)))
            output, hidden = models[name](batch[0], update.hidden)
            if update.more:
                update.hidden = hidden
            return nn.functional.mse_loss(output, batch[1])

        return Update.from_function(run, SGD, name=name, parameters=lambda engine: models[name].parameters())

    trainer = Engine([part("a"), part("b")], model=models, seed=0)
    handlers = [TruncatedBPTT(STEPS, update="a"), TruncatedBPTT(5, update="b", name="other")]
    trainer.attach(*handlers)
    trainer.run(make_data(), max_epochs=2)
    assert order[:5] == [("a", 4), ("a", 4), ("a", 2), ("b", 5), ("b", 5)]
    references = Recurrent(), Recurrent()
    train_in_plain_loop(references[0], chunks_of(make_data()))
    train_in_plain_loop(references[1], [[(x[:, a : a + 5], y[:, a : a + 5]) for a in (0, 5)] for x, y in make_data()])
    assert equal(models["a"], references[0])
    assert equal(models["b"], references[1])
    trainer.detach("other")
    order.clear()
    trainer.run(make_data(), max_epochs=3)
    assert order[:4] == [("a", 4), ("a", 4), ("a", 2), ("b", 10)], "an update that is not named sees the whole batch"


# ---- stopping, resuming, cleaning up ------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Events.UPDATE_STARTED, Events.LOSS_COMPUTED, Events.UPDATE_COMPLETED])
def test_a_run_stopped_inside_a_chunk_makes_no_further_one(event: Events) -> None:
    data = make_data()
    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS))
    seen: list[tuple[Any, Any]] = []

    @trainer.on(event(once=2))
    def stop(engine: Engine) -> None:
        if engine.state.update.hidden is not None and engine.running:
            engine.terminate("enough")

    trainer.connect(
        Events.ITERATION_COMPLETED, lambda engine: seen.append((engine.state.batch, engine.state.update.loss))
    )
    trainer.run(data, max_epochs=1)
    # It is asked for in the second chunk of the second batch, or once the first one's step was made (it has left a state).
    made = {Events.UPDATE_STARTED: 1, Events.LOSS_COMPUTED: 0, Events.UPDATE_COMPLETED: 1}[event]
    assert trainer.updates[0].steps == 3 + made
    train_in_plain_loop(
        reference, [chunks_of(data)[0], chunks_of(data)[1][:made]] if made else chunks_of(data)[:1], epochs=1
    )
    assert equal(model, reference)
    assert seen[1][0] is data[1], "the batch is whole again"
    assert trainer.updates[0].hidden is None
    assert not trainer.updates[0].more


def test_an_error_inside_a_chunk_leaves_nothing_behind() -> None:
    model = Recurrent()
    handler = TruncatedBPTT(STEPS)
    trainer = make_trainer(model, handler)

    def fail(engine: Engine) -> None:
        if engine.state.update.hidden is not None:
            raise ArithmeticError

    attachment = trainer.connect(Events.BACKWARD_STARTED(once=2), fail)
    with pytest.raises(ArithmeticError):
        trainer.run(make_data(), max_epochs=1)
    assert trainer.updates[0].hidden is None
    assert not trainer.updates[0].more
    assert handler._whole is None
    assert not handler._chunks
    attachment.detach()
    trainer.detach(handler)
    trainer.reset()
    fresh, plain = Recurrent(), Recurrent()
    model.load_state_dict(fresh.state_dict())
    trainer.run(make_data(), max_epochs=1)
    make_trainer(plain).run(make_data(), max_epochs=1)
    assert equal(model, plain)


class Dropping(nn.Module):
    """With dropout, so that a resumed run has to draw on; and batch norm, so that there are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.dropout, self.norm = Recurrent(), nn.Dropout(0.3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.recurrent(self.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2)), hidden)
        return output, hidden


@pytest.mark.moderate
@pytest.mark.parametrize("window", quick([1, 4], 4))
@pytest.mark.filterwarnings("ignore:C22:signalfire.FindingWarning")
def test_it_keeps_the_promises_of_a_handler_and_resumes_after_any_iteration(window: int) -> None:
    def build() -> Engine:
        return make_trainer(Dropping(), GradientAccumulation(window), LRScheduling(partial(StepLR, step_size=5)))

    check_handler(build, lambda: TruncatedBPTT(STEPS), make_data(), max_epochs=2)


@pytest.mark.filterwarnings("ignore:C22:signalfire.FindingWarning")
def test_a_resumed_run_in_a_window_over_two_batches_equals_a_plain_loop() -> None:
    data = make_data()
    first = make_trainer(Recurrent(), TruncatedBPTT(STEPS), GradientAccumulation(4))
    first.run(data, max_iters=2)  # six chunks: two in an open window
    assert first.updates[0].window.filled == 2
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    model, reference = Recurrent(), Recurrent()
    second = make_trainer(model, TruncatedBPTT(STEPS), GradientAccumulation(4))
    second.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    second.run(data, max_epochs=1)
    train_in_plain_loop(reference, chunks_of(data), epochs=1, window=4)
    assert equal(model, reference)


def test_an_engine_that_evaluates_in_chunks_gives_what_it_gives_in_one_piece() -> None:
    model = Recurrent()

    def evaluated(*handlers: Handler) -> tuple[Tensor, Tensor]:
        engine = Engine(Update(forward, loss), model=model)
        engine.attach(*handlers)
        found: list[tuple[Tensor, Tensor]] = []
        engine.connect(
            Events.ITERATION_COMPLETED,
            lambda engine: found.append((engine.state.update.output, engine.state.update.loss)),
        )
        engine.run(make_data(1))
        return found[0]

    # Sums of another order: not bit for bit.
    for one, other in zip(evaluated(), evaluated(TruncatedBPTT(STEPS)), strict=True):
        torch.testing.assert_close(one, other)


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_an_optimizer_with_a_closure_is_refused_before_the_first_batch() -> None:
    trainer = make_trainer(Recurrent(), TruncatedBPTT(STEPS), optimizer=torch.optim.LBFGS)
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(ValueError, match=r"'truncated_bptt'.*LBFGS takes a closure"):
        trainer.run(make_data(), max_epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


class Twice(Handler):
    """As SAM: computes the gradients again inside the step."""

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.STEP, self.step, by=self, again=True)

    def step(self, engine: Engine, update: Any, step: Callable[[], None]) -> None:
        update.again()
        step()


@pytest.mark.parametrize("order", [1, -1])
def test_a_handler_that_computes_gradients_again_is_refused_whoever_comes_first(order: int) -> None:
    trainer = make_trainer(Recurrent(), *[TruncatedBPTT(STEPS), Twice()][::order])
    with pytest.raises(ValueError, match="more than once"):
        trainer.run(make_data(), max_epochs=1)
    assert trainer.state.iteration == 0


def test_a_handler_that_computes_gradients_again_is_refused_when_it_joins_a_running_engine() -> None:
    trainer = make_trainer(Recurrent(), TruncatedBPTT(STEPS))
    trainer.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: engine.attach(Twice()))
    with pytest.raises(ValueError, match="more than once"):
        trainer.run(make_data(), max_epochs=1)
    assert trainer.updates[0].steps == 3


def test_two_for_the_same_update_refuse_each_other() -> None:
    trainer = make_trainer(Recurrent(), TruncatedBPTT(STEPS))
    with pytest.raises(ValueError, match=r"both 'truncated_bptt' and 'second'.*time chunks of update 'main'"):
        trainer.attach(TruncatedBPTT(2, name="second"))
    with pytest.raises(KeyError, match="nobody"):
        make_trainer(Recurrent(), TruncatedBPTT(2, update="nobody"))


def test_a_plan_that_is_changed_too_late_is_an_error() -> None:
    trainer = make_trainer(Recurrent(), TruncatedBPTT(STEPS))

    @trainer.on(Events.ITERATION_STARTED)
    def change(engine: Engine) -> None:
        engine.state.plan = engine.updates

    with pytest.raises(RuntimeError, match=r"state\.plan was changed.*phase=Phase\.PREPARE"):
        trainer.run(make_data(), max_epochs=1)


def test_an_update_that_is_left_out_of_an_iteration_takes_no_chunks() -> None:
    data = make_data()
    model, reference = Recurrent(), Recurrent()
    trainer = make_trainer(model, TruncatedBPTT(STEPS))

    class LeavingOut(Handler):
        @on(Events.ITERATION_STARTED(once=2), phase=Phase.PREPARE)
        def choose(self, engine: Engine) -> None:
            engine.state.plan = []

    trainer.attach(LeavingOut())
    trainer.run(data, max_epochs=1)
    train_in_plain_loop(reference, chunks_of([data[0], data[2]]), epochs=1)
    assert equal(model, reference)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, TypeError, r"TruncatedBPTT\(steps=None, split=None\): pass exactly one"),
        ({"steps": 3, "split": len}, TypeError, "pass exactly one of steps= "),
        ({"steps": 0}, ValueError, r"TruncatedBPTT\(steps=0\)"),
        ({"steps": 2.5}, TypeError, r"TruncatedBPTT\(steps=2.5\)"),
        ({"steps": True}, TypeError, r"TruncatedBPTT\(steps=True\)"),
        ({"steps": 2, "dim": -1}, ValueError, r"TruncatedBPTT\(dim=-1\)"),
        ({"steps": 2, "dim": "time"}, TypeError, r"TruncatedBPTT\(dim='time'\)"),
        ({"split": 3}, TypeError, r"TruncatedBPTT\(split=3\)"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        TruncatedBPTT(**arguments)


@pytest.mark.parametrize("chunks", [[], None])
def test_a_split_that_gives_no_chunks_is_an_error(chunks: Any) -> None:
    trainer = make_trainer(Recurrent(), TruncatedBPTT(split=lambda batch: chunks))
    with pytest.raises(ValueError, match="at least one"):
        trainer.run(make_data(), max_epochs=1)


def test_a_batch_without_a_time_dimension_is_an_error_that_names_the_remedy() -> None:
    trainer = make_trainer(Recurrent(), TruncatedBPTT(STEPS, dim=3))
    with pytest.raises(
        ValueError, match=r"dim=3 is out of range for every tensor in the batch; set TruncatedBPTT\(dim=\)"
    ):
        trainer.run(make_data(), max_epochs=1)


def test_each_update_goes_through_all_chunks_before_the_next_begins() -> None:
    model, made = nn.Linear(5, 1), []

    def update(name: str) -> Update:
        def forward(engine: Engine, batch: Any) -> Tensor:
            made.append(name)
            output: Tensor = model(batch[0])
            return output

        return Update(
            forward,
            lambda engine, output, batch: output.mean(),
            partial(torch.optim.SGD, lr=0.1),
            name,
            lambda engine: model.parameters(),
        )

    engine = Engine([update("one"), update("other")], model=model)
    engine.attach(TruncatedBPTT(2))
    engine.run([(torch.ones(3, 6, 5),)], max_epochs=1)
    assert made == ["one"] * 3 + ["other"] * 3


@pytest.mark.parametrize("order", [1, -1])
def test_a_schedule_knows_that_batches_are_not_steps_after_another_handler_has_left(order: int) -> None:
    models: dict[str, nn.Module] = {"often": nn.Linear(2, 1), "seldom": nn.Linear(2, 1)}

    def part(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: models[name](batch).square().mean(),
            SGD,
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    updates = [part(name) for name in models]
    engine = Engine(updates, model=models, seed=0)
    handlers = [LRScheduling(partial(CosineAnnealingLR), update="seldom"), UpdateFrequency(seldom=2), TruncatedBPTT(2)]
    engine.attach(*handlers[::order])
    engine.detach("update_frequency")
    with pytest.raises(ValueError, match="the number of steps in this run is not known"):
        engine.run([torch.ones(4, 2)] * 4, max_epochs=1)


class Stateful(Recurrent):
    """Carries the hidden state itself, as plain loops do."""

    hidden: Any = None

    def forward(self, x: Any, hidden: Any = None) -> Any:
        hidden = None if self.hidden is None else tuple(one.detach() for one in self.hidden)
        output, self.hidden = super().forward(x, hidden)
        return output


class Forgetful(Recurrent):
    def forward(self, x: Any, hidden: Any = None) -> Any:
        return super().forward(x)[0]


class Remembering(Recurrent):
    """Keeps the hidden state in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Any] = {}

    def forward(self, x: Any, hidden: Any = None) -> Any:
        output, hidden = super().forward(x, self.memory.get("hidden"))
        self.memory["hidden"] = tuple(one.detach() for one in hidden)
        return output


class Cells(nn.Module):
    """Two cells, with a list of their states."""

    def __init__(self, *, carries: bool = True) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(3, 2), nn.LSTMCell(2, 2)])
        self.states: Any = None
        self.carries = carries

    def forward(self, x: Tensor) -> Tensor:
        if self.states is None or not self.carries:
            self.states = [(x.new_zeros(len(x), 2), x.new_zeros(len(x), 2))] * 2
        self.states = [tuple(one.detach() for one in state) for state in self.states]
        outputs = []
        for step in x.unbind(1):
            for place, cell in enumerate(self.cells):
                self.states[place] = cell(step, self.states[place])
                step = self.states[place][0]
            outputs.append(step)
        return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    ("kind", "reported"),
    [
        (Stateful, False),
        (Remembering, False),
        (Cells, False),
        (partial(Cells, carries=False), True),
        (Forgetful, True),
    ],
)
def test_a_model_may_carry_its_hidden_state_itself(kind: Callable[[], nn.Module], reported: bool) -> None:
    model = kind()
    trainer = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=model, seed=0)
    trainer.attach(TruncatedBPTT(2))
    with pytest.warns(FindingWarning, match="W69") if reported else nullcontext():
        trainer.run(make_data(1), max_epochs=1)
    assert not any(part._forward_pre_hooks for part in model.modules())
