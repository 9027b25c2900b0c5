"""SequenceLengthWarmup against plain PyTorch loops over the same shorter sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Update, seed_everything
from signalfire.findings import FindingWarning
from signalfire.handlers import GradientAccumulation, SequenceLengthWarmup, TruncatedBPTT
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same

SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
Batch = dict[str, Tensor]


def network() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 4), nn.Dropout(0.2), nn.Linear(4, 11))


def data(count: int = 5, length: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for size in range(2, 2 + count):
        tokens = torch.randint(11, (size, length + 1), generator=generator)
        mask = torch.rand(size, length, generator=generator) > 0.3
        made.append(
            {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "mask": mask,
                "scale": torch.ones(9, 2),
            }
        )
    return made


def forward(engine: Engine, batch: Batch) -> Tensor:
    output: Tensor = engine.model(batch["tokens"])
    return output


def loss_of(output: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(output.view(-1, 11), batch["labels"].view(-1), reduction="none")
    mask = batch["mask"].view(-1)
    return (losses * mask).sum() / mask.sum()


def kept(batch: Batch) -> int:
    return int(batch["mask"].sum())


def build(*handlers: Any) -> Engine:
    engine = Engine(Update(forward, lambda engine, output, batch: loss_of(output, batch), SGD), model=network(), seed=0)
    engine.attach(*handlers)
    return engine


def shapes_seen(engine: Engine, *keys: str) -> list[list[tuple[int, ...]]]:
    seen: list[list[tuple[int, ...]]] = []
    engine.connect(
        Events.FORWARD_STARTED, lambda engine: seen.append([tuple(engine.state.batch[key].shape) for key in keys])
    )
    return seen


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"over": "4it", "increment": 1}, [4, 6, 8, 10] + [12] * 6),
        ({"over": "4it", "increment": 4}, [4, 4, 8, 8] + [12] * 6),
        ({"over": "3it", "increment": 5}, [4, 5, 5] + [12] * 7),
        ({"over": "1it"}, [4] + [12] * 9),
        ({"over": "2ep", "increment": 2}, [4] * 5 + [8] * 5),
        ({"over": "4st", "increment": 1}, [4, 4, 6, 6, 8, 10, 10] + [12] * 3),  # windows of two, the last one of an epoch short
        ({"over": "1000it"}, [4] * 10),
    ],
)  # fmt: skip
def test_lengths_are_those_of_the_schedule(options: Any, lengths: list[int]) -> None:
    engine = build(SequenceLengthWarmup(4, 12, **options), GradientAccumulation(2))
    seen = shapes_seen(engine, "tokens", "labels", "mask", "scale")
    engine.run(data(), max_epochs=2, check=False)
    assert [shapes[0][1] for shapes in seen] == lengths
    for tokens, labels, mask, scale in seen:
        assert tokens == labels == mask
        assert scale == (9, 2), "what is no sequence stays"


def test_cut_sequences_with_weighted_windows_equal_a_plain_loop() -> None:
    warmup = SequenceLengthWarmup(4, 12, over="5it", increment=1)
    engine = build(warmup, GradientAccumulation(2, weight=lambda engine: kept(engine.state.batch)))
    seed_everything(1)
    engine.run(data(), max_epochs=2)

    model = network()
    optimizer = SGD(model.parameters())
    seed_everything(1)
    iteration = 0
    for chunk in [*kit.windows(data(), 2), *kit.windows(data(), 2)]:
        total = 0
        for batch in chunk:
            length = 4 + 8 * min(iteration, 5) // 5
            batch = {key: value[:, :length].contiguous() for key, value in batch.items() if key != "scale"}
            (loss_of(model(batch["tokens"]), batch) * kept(batch)).backward()
            total += kept(batch)
            iteration += 1
        for parameter in model.parameters():
            parameter.grad.div_(total)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(engine.model, model)


def test_split_sequences_keep_every_token_in_its_place_in_more_rows() -> None:
    engine = build(SequenceLengthWarmup(3, 12, over="5it", increment=1, mode="split"))
    seen: list[Batch] = []
    engine.connect(Events.FORWARD_STARTED, lambda engine: seen.append(engine.state.batch))
    engine.run(data(), max_epochs=1)
    assert [batch["tokens"].shape[1] for batch in seen] == [
        3,
        4,
        6,
        6,
        6,
    ]  # 3, 4, 6, 8 and 10, as far as they divide 12
    for whole, batch in zip(data(), seen, strict=True):
        for key in ("tokens", "labels", "mask"):
            assert batch[key].numel() == whole[key].numel()
            assert torch.equal(batch[key].reshape(-1, 12), whole[key]), "rows follow each other"
            assert batch[key].is_contiguous()
        assert torch.equal(batch["scale"], whole["scale"])


def test_time_may_be_any_dimension() -> None:
    batches = [(torch.arange(2 * 3 * 8.0).reshape(2, 3, 8), torch.arange(16).reshape(2, 1, 8))]
    for mode, shape in (("cut", (2, 3, 4)), ("split", (4, 3, 4))):
        engine = Engine(
            Update.from_function(lambda engine, batch: engine.model(torch.ones(1)).sum(), SGD),
            model=nn.Linear(1, 1),
            seed=0,
        )
        engine.attach(SequenceLengthWarmup(4, 8, dim=2, mode=mode))  # type: ignore[arg-type]
        seen: list[Any] = []
        engine.connect(Events.ITERATION_STARTED, lambda engine, seen=seen: seen.append(engine.state.batch))
        engine.run(batches, max_epochs=1, check=False)
        (x, y), (whole, targets) = seen[0], batches[0]
        assert x.shape == shape
        assert torch.equal(x[:2] if mode == "cut" else x[::2], whole[..., :4])
        assert torch.equal(y[-1], targets[-1, :, :4] if mode == "cut" else targets[-1, :, 4:])


def test_whole_sequences_are_left_as_they_are() -> None:
    batches = data()
    engine = build(SequenceLengthWarmup(4, 12, over="2it"))
    seen: list[Any] = []
    engine.connect(Events.FORWARD_STARTED, lambda engine: seen.append(engine.state.batch))
    engine.run(batches, max_epochs=1)
    assert [one is other for one, other in zip(seen, batches, strict=True)] == [False, False, True, True, True]
    engine = build(SequenceLengthWarmup(12, 20, over="4it"))
    engine.connect(Events.FORWARD_STARTED, lambda engine: seen.append(engine.state.batch))
    engine.run(batches, max_epochs=1)
    assert all(one is other for one, other in zip(seen[5:], batches, strict=True)), "shorter ones are not cut"


@pytest.mark.moderate
@pytest.mark.parametrize("mode", ["cut", "split"])
@pytest.mark.parametrize("over", ["4it", "3st", "1ep"])
def test_it_keeps_the_promises_of_a_handler(mode: Any, over: str) -> None:
    make = partial(SequenceLengthWarmup, 3, 12, over=over, increment=1, mode=mode)
    check_handler(lambda: build(GradientAccumulation(2)), make, data(3), max_epochs=2)


def test_time_chunks_are_those_of_the_cut_sequences_and_rows_of_parts_are_refused() -> None:
    def recurrent(*handlers: Any) -> Engine:
        def forward(engine: Engine, batch: Any) -> Tensor:
            update = engine.state.update
            output, hidden = engine.model(batch[0], update.hidden)
            update.hidden = hidden if update.more else None
            return output  # type: ignore[no-any-return]

        torch.manual_seed(0)
        engine = Engine(
            Update(forward, lambda engine, output, batch: F.mse_loss(output, batch[1]), SGD),
            model=nn.GRU(2, 2, batch_first=True),
            seed=0,
        )
        engine.attach(*handlers)
        return engine

    batches = kit.batches(2, (8, 2), (8, 2))
    seen: list[int] = []
    engine = recurrent(SequenceLengthWarmup(6, 8, over="1it"), TruncatedBPTT(4))
    engine.connect(Events.FORWARD_STARTED, lambda engine: seen.append(engine.state.batch[0].shape[1]))
    engine.run(batches, max_epochs=1)
    assert seen == [4, 2, 4, 4]
    with pytest.raises(
        ValueError, match="'truncated_bptt' cannot carry a hidden state from one part to the next; use mode='cut'"
    ):
        recurrent(SequenceLengthWarmup(4, 8, mode="split"), TruncatedBPTT(4)).run(batches, max_epochs=1)


def test_a_warmup_that_outlasts_the_run_is_reported() -> None:
    with pytest.warns(
        FindingWarning, match="C17: 'sequence_length_warmup' reaches the full sequence length only after 1000it"
    ):
        build(SequenceLengthWarmup(4, 12)).run(data(), max_epochs=2)


# ---- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.long), {}, "dim=1 is out of range for every tensor in the batch"),
        ({"tokens": torch.zeros(2, 7)}, {"mode": "split"}, r"7 cannot be split .* no length from 4 to 4 divides 7"),
        ({"tokens": torch.zeros(2, 8), "label": torch.zeros(2)}, {"mode": "split"}, r"a tensor of shape \(2,\) with values for"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_shortened_are_refused(batch: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(SequenceLengthWarmup(4, 12, **options)).run([batch], max_epochs=1, check=False)


def test_an_end_before_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SequenceLengthWarmup\(end=3\): expected an int of 4 or more"):
        SequenceLengthWarmup(4, 3)
    with pytest.raises(ValueError, match=r"SequenceLengthWarmup\(dim=0\)"):
        SequenceLengthWarmup(4, 8, dim=0, mode="split")
