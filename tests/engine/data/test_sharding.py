"""Data sharded over ranks: which policy it has, which batches each rank reads, and what it has once its own have ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from signalfire import CombinedData, Engine, Events, Handler, Update
from signalfire.authoring.batches import tensors_in
from signalfire.data.sharding import (
    draws_while_read,
    rounds,
    samples_without_padding,
    shard,
    shard_policy,
    until_all_end,
)
from signalfire.distributed import SINGLE_PROCESS, Processes, process_group
from signalfire.handlers import DistributedDataParallel, GradientAccumulation, LimitBatches, OverfitBatches
from tests.kit import SGD, linear, quick
from tests.processes import run_together

TIMEOUT = 60.0


def ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(timeout=TIMEOUT, **options)


class Sized:
    """Data that is iterated, has a length, and draws its order while it is read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        left = list(range(self.length))
        while left:
            yield torch.tensor([left.pop(int(torch.randint(len(left), (1,))))])


class Unsized:
    def __init__(self, length: int) -> None:
        self.sized = Sized(length)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.sized)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for batch in Sized(11):
            yield batch[0]


class Indexed:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Tensor:
        if index >= 7:
            raise IndexError
        return torch.tensor([index])


def numbers(length: int = 22) -> TensorDataset:
    return TensorDataset(torch.arange(length))


class FromAnywhere:
    """Data that may begin at any batch, and notes which it has read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def batches_from(self, start: int) -> Iterator[Tensor]:
        for number in range(start, self.length):
            self.read.append(number)
            yield torch.tensor([number])

    def __iter__(self) -> Iterator[Tensor]:
        return self.batches_from(0)


# ---- the policy -----------------------------------------------------------------------------------------------------


def rank_of(rank: int, size: int) -> Processes:
    """The numbers alone: nothing here is sent."""
    processes = Processes()
    processes.rank, processes.world_size = rank, size
    return processes


def sampled(**options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(numbers(), **{"num_replicas": 3, "rank": 1, **options})


OWN: dict[str, Callable[[], Any]] = {
    "sampler": lambda: DataLoader(numbers(), sampler=sampled()),
    "in a batch sampler": lambda: DataLoader(numbers(), batch_sampler=BatchSampler(sampled(), 4, drop_last=False)),
}
SHARED: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.tensor([number]) for number in range(7)],
    "tuple": lambda: tuple(torch.tensor([number]) for number in range(7)),
    "indexed": Indexed,
    "from anywhere": lambda: FromAnywhere(7),
    "loader": lambda: DataLoader(numbers(7)),
}
UNKNOWN: dict[str, Callable[[], Any]] = {
    "Sized": lambda: Sized(3),
    "generator": lambda: (number for number in range(3)),
    "dict": lambda: {0: 1},
    "DataLoader": lambda: DataLoader(Stream(), batch_size=None),
}


def test_data_shows_whether_each_rank_has_its_own() -> None:
    two = rank_of(0, 2)
    assert {shard_policy(make(), two, "auto") for make in OWN.values()} == {"own"}
    assert {shard_policy(make(), two, "auto") for make in SHARED.values()} == {"round_robin"}
    for name, make in UNKNOWN.items():
        with pytest.raises(TypeError, match=rf"\({name}\) cannot be sharded over 2 ranks by index; pass .*='own' if"):
            shard_policy(make(), two, "auto")


def test_a_policy_that_is_wanted_is_taken_and_a_single_process_reads_all() -> None:
    for make in (*OWN.values(), *SHARED.values(), *UNKNOWN.values()):
        assert shard_policy(make(), rank_of(0, 2), "own") == "own"
        assert shard_policy(make(), rank_of(0, 2), "round_robin") == "round_robin"
        assert shard_policy(make(), SINGLE_PROCESS, "own") == "all"
    assert shard_policy(None, rank_of(0, 2), "own") == "all"


def test_what_a_sampler_repeats_is_known() -> None:
    found = [samples_without_padding(DataLoader(numbers(), sampler=sampled(rank=rank))) for rank in range(3)]
    assert found == [8, 7, 7]  # of 22; the sampler gives each rank 8
    assert samples_without_padding(DataLoader(numbers(), sampler=sampled(drop_last=True))) is None
    assert samples_without_padding(DataLoader(numbers(), shuffle=True)) is None


def test_only_data_that_is_read_in_full_may_draw_while_it_is_read() -> None:
    assert not any(draws_while_read(make()) for make in SHARED.values())
    assert all(draws_while_read(make()) for make in UNKNOWN.values())


# ---- which batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "length"), [*((kind, 7) for kind in SHARED), ("list", None), ("from anywhere", None)])
def test_the_ranks_take_turns_from_any_round_on(kind: str, length: int | None) -> None:
    for size, limit, start in itertools.product((2, 3), (None, 1, 5), range(4)):
        ranks = [
            list(shard(SHARED[kind](), start, length, limit, rank_of(rank, size), 0, 0, {})) for rank in range(size)
        ]
        count = min(7, limit or 7)
        left = max(0, rounds(count, rank_of(0, size)) - start)
        assert [len(own) for own in ranks] == [left] * size
        found = [int(tensors_in(batch)[0]) for turn in zip(*ranks, strict=True) for batch in turn if batch is not None]
        assert found == [*range(start * size, count)], (size, limit, start)


def test_a_rank_reads_by_index_what_it_uses_and_begins_where_it_is_told() -> None:
    class Noting(Indexed):
        def __getitem__(self, index: int) -> Tensor:
            read.append(index)
            return super().__getitem__(index)

    read: list[int] = []
    assert list(shard(Noting(), 1, 7, None, rank_of(1, 2), 0, 0, {}))[-1] is None
    assert read == [3, 5]
    data = FromAnywhere(7)
    assert len(list(shard(data, 2, None, 6, rank_of(1, 2), 0, 0, {}))) == 1
    assert data.read == [4, 5]


def test_a_batch_of_a_round_of_different_sizes_weighs_by_its_samples() -> None:
    data = [torch.zeros(size) for size in (2, 2, 3, 1, 4)] + [None, torch.zeros(5)]
    shares: list[dict[int, float]] = [{}, {}]
    for rank in range(2):
        list(shard(data, 0, 7, None, rank_of(rank, 2), 0, 0, shares[rank]))
    assert shares == [{2: 1.5, 4: 2.0, 6: 2.0}, {3: 0.5, 5: 0.0}]  # by their places in the data


def _until_all_end() -> list[list[Any]]:
    processes = process_group(timeout=TIMEOUT)
    lengths = [(1, 3), (2, 2), (0, 1), (0, 0)]
    return [list(until_all_end(iter(range(both[processes.rank])), processes)) for both in lengths]


@pytest.mark.moderate
def test_data_of_ones_own_ends_where_that_of_the_last_rank_does() -> None:
    first, second = run_together(_until_all_end, 2)
    assert first == [[0, None, None], [0, 1], [None], []]
    assert second == [[0, 1, 2], [0, 1], [0], []]


# ---- in a run -------------------------------------------------------------------------------------------------------


def named_data(name: str) -> tuple[Any, list[Handler], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    shuffled: Callable[..., Any] = partial(DataLoader, numbers(), batch_size=3, shuffle=True)
    several = lambda: CombinedData({"a": shuffled(), "b": DataLoader(numbers(9), batch_size=2, shuffle=True)})  # noqa: E731
    made: dict[str, tuple[Callable[[], Any], list[Handler], dict[str, Any]]] = {
        "shuffled": (shuffled, [], {}),
        "workers": (lambda: shuffled(num_workers=2), [], {}),
        "drop_last": (lambda: shuffled(drop_last=True), [], {}),
        "own generator": (lambda: shuffled(generator=generator), [], {}),
        "batch_sampler": (
            lambda: DataLoader(numbers(), batch_sampler=BatchSampler(RandomSampler(numbers()), 4, drop_last=False)), [], {}
        ),
        "no batches": (lambda: DataLoader(numbers(), batch_size=None, shuffle=True), [], {}),
        "list": (lambda: [torch.tensor([number]) for number in range(7)], [], {}),
        "indexed": (Indexed, [], {}),
        "combined": (several, [], {}),
        "limited": (shuffled, [LimitBatches(train=5)], {}),
        "overfit": (shuffled, [OverfitBatches(3)], {}),
        "epochs of a length": (shuffled, [], {"epoch_length": 3}),
        "longer epochs": (lambda: [torch.tensor([number]) for number in range(7)], [], {"epoch_length": 6}),
    }  # fmt: skip
    make, handlers, bounds = made[name]
    return make(), handlers, bounds


IN_ORDER = ["shuffled", "workers", "drop_last", "own generator", "batch_sampler", "no batches", "list", "indexed", "combined",
            "limited", "overfit"]  # fmt: skip
LENGTHS = ["epochs of a length", "longer epochs"]
READ: dict[str, Callable[[], Any]] = {
    "sized": lambda: Sized(11), "unsized": lambda: Unsized(11), "stream": lambda: DataLoader(Stream(), batch_size=None),
    "streaming worker": lambda: DataLoader(Stream(), batch_size=None, num_workers=1),
}  # fmt: skip


def seen_of(
    data: Any, *handlers: Handler, epochs: int = 2, with_ddp: bool | Handler = True, **bounds: Any
) -> list[list[Any]]:
    """The numbers in each batch of each epoch; None without one."""
    seen: list[list[Any]] = []
    model = linear(1, 1)
    torch.manual_seed(7 + process_group(timeout=TIMEOUT).rank)

    def learn(engine: Engine, batch: Any) -> Tensor:
        if engine.processes.rank > 0:
            torch.rand(1)  # what other processes draw does not count
        loss: Tensor = engine.model(torch.ones(1)).sum()
        return loss

    engine = Engine(Update.from_function(learn, SGD), model=model, seed=0)
    if with_ddp:
        engine.attach(with_ddp if isinstance(with_ddp, Handler) else ddp())
    engine.attach(*handlers)
    engine.connect(Events.EPOCH_STARTED, lambda engine: seen.append([]))

    def note(engine: Engine) -> None:
        batch = engine.state.batch
        found = None if batch is None else [int(number) for tensor in tensors_in(batch) for number in tensor.flatten()]
        seen[-1].append(found)

    engine.connect(Events.ITERATION_COMPLETED, note)
    engine.run(data, max_epochs=epochs, **bounds)
    return seen


def in_turn(seen: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """What all processes have seen in each epoch, in the order in which it was distributed."""
    return [[batch for turn in zip(*epochs, strict=True) for batch in turn if batch is not None]
            for epochs in zip(*seen, strict=True)]  # fmt: skip


def _sharded() -> dict[str, Any]:
    reported = {}
    for name in IN_ORDER + LENGTHS:
        data, handlers, bounds = named_data(name)
        reported[name] = seen_of(data, *handlers, **bounds)
    for name, make in READ.items():
        reported[name] = seen_of(make(), with_ddp=ddp(shard_policy="round_robin"))
    reported["windows"] = seen_of(READ["unsized"](), GradientAccumulation(2), with_ddp=ddp(shard_policy="round_robin"))
    return reported


@pytest.mark.slow
@pytest.mark.parametrize("size", quick([2, 3], 2))
def test_batches_are_sharded_in_the_order_that_rank_0_draws(size: int) -> None:
    found = run_together(_sharded, size)
    for name in IN_ORDER:
        data, handlers, bounds = named_data(name)
        assert in_turn([one[name] for one in found]) == seen_of(data, *handlers, with_ddp=False, **bounds), name
    for name in (*READ, "windows"):
        for epoch in in_turn([one[name] for one in found]):
            assert sorted(number for batch in epoch for number in batch) == list(range(11)), name
    # With epochs of a given length the data continues; each pass over it is complete.
    first = in_turn([one["epochs of a length"] for one in found])
    numbers = [number for epoch in first for batch in epoch for number in batch]
    assert len(set(numbers[:22])) == len(numbers[:22])
    longer = [
        number for epoch in in_turn([one["longer epochs"] for one in found]) for batch in epoch for number in batch
    ]
    passes, rest = divmod(12, -(-7 // size))
    assert longer == [*range(7)] * passes + [*range(min(7, rest * size))]


def _own_data() -> dict[str, Any]:
    processes = process_group(timeout=TIMEOUT)
    reported: dict[str, Any] = {}
    lengths = [2, 5, 3][: processes.world_size]
    own = [torch.tensor([100 * processes.rank + number]) for number in range(lengths[processes.rank])]

    def anew() -> Iterator[Tensor]:
        yield from own

    class Anew:
        def __iter__(self) -> Iterator[Tensor]:
            return anew()

    reported["lists"] = seen_of(own, with_ddp=ddp(shard_policy="own"))
    reported["unsized"] = seen_of(Anew(), with_ddp=ddp(shard_policy="own"))
    reported["windows"] = seen_of(Anew(), GradientAccumulation(2), with_ddp=ddp(shard_policy="own"))
    reported["limited"] = seen_of(own, LimitBatches(train=3), with_ddp=ddp(shard_policy="own"))
    sampler: Any = DistributedSampler(numbers())
    reported["sampler"] = seen_of(DataLoader(numbers(), batch_size=3, sampler=sampler))
    try:
        seen_of(Anew())
    except TypeError as error:
        reported["refused"] = str(error)
    return reported


@pytest.mark.slow
def test_each_process_may_have_data_of_its_own() -> None:
    found = run_together(_own_data, 3)
    for name in ("lists", "unsized", "windows"):
        assert [[len(epoch) for epoch in one[name]] for one in found] == [[5, 5]] * 3, name
        for rank, length in enumerate([2, 5, 3]):
            wanted = [[100 * rank + number] for number in range(length)] + [None] * (5 - length)
            assert found[rank][name] == [wanted, wanted], name
    assert [len(one["limited"][0]) for one in found] == [3, 3, 3]
    first, second = in_turn([one["sampler"] for one in found])
    for epoch in (first, second):
        numbers_seen = [number for batch in epoch for number in batch]
        assert len(numbers_seen) == 24  # the sampler repeats two, so that all processes have as many
        assert set(numbers_seen) == set(range(22))
    assert first != second  # it received the epoch
    assert "shard_policy='own'" in found[0]["refused"]
    assert "shard_policy='round_robin'" in found[0]["refused"]
