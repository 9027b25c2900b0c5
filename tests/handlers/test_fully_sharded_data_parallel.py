"""Fully sharded data parallelism, in real processes over gloo: the weights of one process, and checkpoints that move."""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import signalfire.distributed.sharded as sharded
from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.distributed import is_sharded, whole_tensor
from signalfire.distributed.watch import Watch
from signalfire.handlers import (
    EMA,
    SWA,
    ActivationCheckpointing,
    AdaptiveGradientClipping,
    Checkpoint,
    DistributedDataParallel,
    EarlyStopping,
    Freezing,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientClipping,
    GradientNoise,
    GradientNorms,
    MicroBatching,
    MixedPrecision,
    NonFiniteGuard,
    ParameterScheduling,
    SharpnessAwareMinimization,
    Validation,
)
from signalfire.testing import check_handler
from tests.kit import LIMIT, free_port, needs_torch, quick, spread, wait_until

pytestmark = needs_torch(2, 13, why="FullyShardedDataParallel")

ADAM = partial(torch.optim.Adam, lr=1e-2)

# What several processes compute is the mean of their own means, where one process takes the mean over all samples at once: the
# same numbers in another order. Of float32 each sum is off by some 1e-7 of its size; Adam's first steps divide by the gradient's
# size, so that weights, which are of size 0.1 to 1 here, move apart by rounding alone: after 12 steps 2e-7 to 2e-6 was seen.
CLOSE = 2e-5


class Model(nn.Module):
    """Layers of sizes that neither two nor three processes share evenly, one smaller than the number of processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.last(x)
        return out


def dataset(samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def make(*handlers: Handler, optimizer: Any = ADAM, seed: int = 0, model: nn.Module | None = None) -> Engine:
    torch.manual_seed(seed)
    update = Update.supervised(nn.functional.mse_loss, optimizer)
    engine = Engine(update, model=model or Model(), seed=0)
    engine.attach(*handlers)
    return engine


def full(engine: Engine) -> dict[str, Tensor]:
    return {key: whole_tensor(value).detach().clone() for key, value in engine.model.state_dict().items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=0.0, atol=CLOSE)


def loader(size: int, samples: int = 24) -> DataLoader[Any]:
    return DataLoader(dataset(samples), batch_size=size)


# ---- several processes --------------------------------------------------------------------------------------------


def start(number: int, function: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    port = free_port()
    context = get_context("fork")
    processes, ends = [], []

    def child(rank: int, end: Any) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(number), LOCAL_WORLD_SIZE=str(number),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(LIMIT / 2)
        try:
            end.send_bytes(pickle.dumps((True, function(*args))))  # by value: tensors are shared otherwise
        except BaseException:
            end.send_bytes(pickle.dumps((False, traceback.format_exc())))
        finally:
            end.close()
            os._exit(0)

    for rank in range(number):
        here, there = context.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process has threads: none of them holds a lock of ours
            process = context.Process(target=child, args=(rank, there))
            process.start()
        there.close()
        processes.append(process)
        ends.append(here)
    return processes, ends


def together(number: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function returns in each of so many processes."""
    processes, ends = start(number, function, *args)
    results = []
    try:
        for end in ends:
            assert end.poll(LIMIT), "a process hangs"
            results.append(pickle.loads(end.recv_bytes()))
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [f"rank {rank}: {reported}" for rank, (well, reported) in enumerate(results) if not well]
    assert not failures, "\n".join(failures)
    return [reported for _, reported in results]


def trained(
    size: int, handlers: Callable[[], list[Handler]], bounds: dict[str, Any], samples: int = 24, seeds: bool = False
) -> Any:
    sharding = FullyShardedDataParallel()
    seed = int(os.environ.get("RANK", 0)) if seeds else 0
    engine = make(*handlers(), sharding, seed=seed)
    engine.run(loader(size, samples), **bounds)
    if engine.processes.distributed:
        assert all(is_sharded(p) for p in engine.model.parameters())
        assert all(is_sharded(p) for p in engine.updates[0].parameters)
    return full(engine), dict(engine.state.metrics), engine.updates[0].steps


@pytest.mark.parametrize("number", quick([2, 3], 2))
def test_trains_to_the_weights_of_one_process(number: int) -> None:
    one, _, steps = trained(12, list, {"max_epochs": 6})
    for weights, _, own_steps in together(number, trained, 12 // number, list, {"max_epochs": 6}):
        assert_close(weights, one)
        assert own_steps == steps == 12


@pytest.mark.slow
def test_starts_from_the_weights_of_rank_0() -> None:
    one, *_ = trained(12, list, {"max_epochs": 2})
    for weights, *_ in together(2, partial(trained, seeds=True), 6, list, {"max_epochs": 2}):
        assert_close(weights, one)


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Noted(Handler):
    """Notes a number of another handler after each step."""

    def __init__(self, read: Callable[[Engine], Any]) -> None:
        super().__init__(name="noted")
        self.read = read
        self.seen: list[float] = []

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.RECORD)
    def note(self, engine: Engine) -> None:
        self.seen.append(float(self.read(engine)))


# Each with one that is compared besides the weights.
COMPANIES: dict[str, tuple[Callable[[], list[Handler]], Callable[[Engine], Any]]] = {
    "clipping": (
        lambda: [GradientClipping(max_norm=0.05, max_value=0.01), GradientNorms(per_parameter=True)],
        lambda e: e.handlers["gradient_clipping"].total_norm,  # type: ignore[attr-defined]
    ),
    "clipping by the largest": (
        lambda: [GradientClipping(max_norm=0.05, norm_type=torch.inf), GradientNorms(norm_type=torch.inf)],
        lambda e: e.state.metrics["gradient_norm"],
    ),
    "adaptive": (lambda: [AdaptiveGradientClipping(0.02), GradientNorms()], lambda e: e.state.metrics["gradient_norm"]),
    "noise": (lambda: [GradientNoise(0.01), NonFiniteGuard()], lambda e: e.updates[0].steps),
    "SAM": (lambda: [SharpnessAwareMinimization(0.1), GradientClipping(max_norm=1.0)], lambda e: e.updates[0].steps),
    "ASAM, accumulation": (
        lambda: [SharpnessAwareMinimization(0.3, adaptive=True), GradientAccumulation(2)],
        lambda e: e.updates[0].steps,
    ),
    "checkpointed activations": (
        lambda: [ActivationCheckpointing("blocks.*"), GradientClipping(max_norm=0.05)],
        lambda e: e.handlers["gradient_clipping"].total_norm,  # type: ignore[attr-defined]
    ),
    "freezing": (
        lambda: [Freezing({"first": None, "blocks.0": 3}), ParameterScheduling("momentum", lambda n: 0.9 - 0.01 * n)],
        lambda e: e.updates[0].steps,
    ),
}


def in_company(size: int, company: str, replicas: int = 1) -> Any:
    handlers, read = COMPANIES[company]
    noted = Noted(read)
    engine = make(*handlers(), noted, FullyShardedDataParallel(replicas=replicas), optimizer=SGD)
    engine.run(loader(size), max_epochs=4)
    return full(engine), noted.seen


@pytest.mark.moderate
@pytest.mark.parametrize("company", spread(COMPANIES, 1))
def test_handlers_do_with_shards_what_they_do_with_whole_tensors(company: str) -> None:
    one, seen = in_company(12, company)
    for weights, own in together(3, in_company, 4, company):
        assert_close(weights, one)
        assert own == pytest.approx(seen, rel=1e-4)


@pytest.mark.parametrize("company", spread(COMPANIES, 0))
def test_copies_of_a_sharded_model_train_as_one(company: str) -> None:
    """HSDP: two groups of two ranks, each with a copy."""
    one, seen = in_company(12, company)
    for weights, own in together(4, in_company, 3, company, 2):
        assert_close(weights, one)
        assert own == pytest.approx(seen, rel=1e-4)


def refused(replicas: int) -> str:
    with pytest.raises(ValueError, match="replicas") as caught:
        make(FullyShardedDataParallel(replicas=replicas))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_groups_that_are_not_equal_or_shard_nothing_are_refused(replicas: int) -> None:
    for said in together(2, refused, replicas):
        assert f"replicas={replicas} does not split 2 ranks into equal groups of two or more" in said
        assert ("use DistributedDataParallel" in said) is (replicas == 2)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def part(
    folder: Path, size: int, epochs: int, load: bool = False, replicas: int = 1, sharded: bool = True, **options: Any
) -> Any:
    """A part of a run, with averages and best weights in its state."""
    engine = make(
        EMA(0.5), EarlyStopping("loss_seen", mode="min", patience=100, restore_best=True),
        *([FullyShardedDataParallel(replicas=replicas)] if sharded else []),
        Checkpoint(folder, keep=2, **options),
    )  # fmt: skip

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE)
    def measure(engine: Engine) -> None:
        engine.state.metrics["loss_seen"] = 1.0 / engine.state.epoch  # ever better: the last weights are the best

    if load:
        engine.load_state_dict(Checkpoint.load(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the number of processes is another, and bits differ
        engine.run(loader(size), max_epochs=epochs)
    averages: Any = engine.handlers["ema"]
    values = {key: whole_tensor(value).clone() for key, value in averages._averages.values.items()}
    optimizer: Any = engine.updates[0].optimizer
    slots = enumerate(optimizer.state.values())
    state = {f"{key} {i}": whole_tensor(value) for i, slot in slots for key, value in slot.items()}
    return full(engine), values, state, engine.handlers["checkpoint"].kept  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_moves_from_two_processes_to_one_and_to_three(tmp_path: Path, asynchronous: bool) -> None:
    options: dict[str, Any] = {"asynchronous": asynchronous}
    whole = part(tmp_path / "whole", 12, 6)
    two = together(2, partial(part, **options), tmp_path / "moving", 6, 2)
    assert [kept for *_, kept in two] == [whole_kept(2)] * 2
    files = {path.name for path in (tmp_path / "moving" / whole_kept(2)[-1][0]).iterdir()}
    assert files == {"state.pt", "manifest.json", ".metadata", "__0_0.distcp", "__1_0.distcp"}
    one = part(tmp_path / "moving", 12, 4, load=True, **options)
    assert one[3] == whole_kept(4)
    for three in together(3, partial(part, load=True, **options), tmp_path / "moving", 4, 6):
        for found, expected in zip(three[:3], whole[:3], strict=True):
            assert_close(found, expected)
        assert three[3] == whole_kept(6)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_goes_on_in_one_without_the_handler(tmp_path: Path) -> None:
    whole = part(tmp_path / "whole", 12, 4, sharded=False)
    together(2, part, tmp_path / "moving", 6, 2)
    engine = make(EMA(0.5))
    engine.load_state_dict(Checkpoint.load(tmp_path / "moving"), allow=["early_stopping", "checkpoint"])
    assert not any(p.is_meta for p in (*engine.model.parameters(), *engine.weights()["model"].values()))
    one = part(tmp_path / "moving", 12, 4, load=True, sharded=False)
    for found, expected in zip(one[:3], whole[:3], strict=True):
        assert_close(found, expected)


@pytest.mark.slow
def test_a_checkpoint_moves_from_copies_of_a_sharded_model_to_one_and_back(tmp_path: Path) -> None:
    whole = part(tmp_path / "whole", 12, 6)
    together(4, partial(part, replicas=2, asynchronous=True), tmp_path / "moving", 3, 2)
    part(tmp_path / "moving", 12, 4, load=True)
    for found in together(4, partial(part, load=True, replicas=2), tmp_path / "moving", 3, 6):
        for mine, expected in zip(found[:3], whole[:3], strict=True):
            assert_close(mine, expected)


def whole_kept(epoch: int) -> list[tuple[str, None]]:
    return [(f"checkpoint-epoch{e:04d}-iter{2 * e:08d}", None) for e in (epoch - 1, epoch)]


def killed_while_saving(folder: Path, size: int) -> None:
    engine = make(FullyShardedDataParallel(), Checkpoint(folder, keep=1), optimizer=SGD)
    original = os.fsync

    def die(descriptor: int) -> None:
        if (
            engine.state.epoch == 3
            and os.environ["RANK"] == "1"
            and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp")
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        original(descriptor)

    os.fsync = die  # type: ignore[assignment]
    engine.run(loader(size), max_epochs=4)


@pytest.mark.slow
def test_a_process_that_is_killed_during_a_save_leaves_the_older_checkpoint_whole(tmp_path: Path) -> None:
    processes, ends = start(2, killed_while_saving, tmp_path, 6)
    try:
        assert ends[0].poll(LIMIT)
        well, reported = pickle.loads(ends[0].recv_bytes())
        assert not well
        assert "Connection" in reported or "closed" in reported  # the other notices, and does not wait for ever
    finally:
        for process in processes:
            process.kill()
            process.join()
    state = Checkpoint.load(tmp_path)
    assert state["engine"]["epoch"] == 2
    one = make(FullyShardedDataParallel(), Checkpoint(tmp_path, keep=1), optimizer=SGD)
    one.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the number of processes is another
        one.run(loader(12), max_epochs=4)
    whole = make(optimizer=SGD)
    whole.run(loader(12), max_epochs=4)
    assert_close(full(one), full(whole))


def full_disk(folder: Path, asynchronous: bool) -> Any:
    """The disk of rank 1 is full when it writes its shards for the second time."""
    engine = make(FullyShardedDataParallel(), Checkpoint(folder, asynchronous=asynchronous))
    original = os.fsync

    def fail(descriptor: int) -> None:
        if engine.state.epoch == 2 and os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        original(descriptor)

    os.fsync = fail  # type: ignore[assignment]
    try:
        engine.run(loader(6), max_epochs=6)
    except (OSError, RuntimeError) as error:
        reported = str(error)
    finally:
        os.fsync = original
    engine.run(loader(6), max_epochs=8)  # the group is as good as before
    return reported, engine.handlers["checkpoint"].kept  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_one_process_cannot_write_is_an_error_of_all(tmp_path: Path, asynchronous: bool) -> None:
    for reported, kept in together(2, full_disk, tmp_path, asynchronous):
        assert "rank 1: " in reported
        assert "No space left on device" in reported
        assert kept[-1][0].startswith("checkpoint-epoch0008")
    assert {path.name for path in tmp_path.iterdir()} == {name for name, _ in kept}


@pytest.mark.slow
def test_a_damaged_shard_is_named_and_the_older_checkpoint_taken(tmp_path: Path) -> None:
    together(2, part, tmp_path, 6, 2)
    newest = tmp_path / whole_kept(2)[-1][0]
    content = bytearray((newest / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "__1_0.distcp").write_bytes(content)
    with pytest.raises(ValueError, match=r"__1_0\.distcp has changed since it was written: its sha256 differs"):
        Checkpoint.load(newest)
    with pytest.warns(RuntimeWarning, match="is damaged and is skipped"):
        assert Checkpoint.load(tmp_path)["engine"]["epoch"] == 1
    (newest / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata is missing"):
        Checkpoint.load(newest)


def nearly_nothing_held(rate: float) -> list[str]:
    """The codes of what a run warns of in which rank 0 holds the whole of a small model."""
    model = nn.Linear(2, 1)
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=rate))
    engine = Engine(update, model=model, seed=0)
    engine.attach(FullyShardedDataParallel())
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 6, max_epochs=1)
    return [str(one.message)[:3] for one in given]


@pytest.mark.slow
def test_a_rank_that_holds_nothing_of_the_model_does_not_miss_changes() -> None:
    assert together(2, nearly_nothing_held, 0.1) == [[], []]
    assert "W12" in together(2, nearly_nothing_held, 1e-30)[0], "rank 0 holds the weights, and they stay as they are"


def exporting(folder: Path, size: int) -> Any:
    engine = make(EMA(0.5), FullyShardedDataParallel(), Checkpoint(folder, keep=1, weights_only=True))
    engine.run(loader(size), max_epochs=2)
    return {key: whole_tensor(value) for key, value in engine.weights()["model"].items()}


def importing(folder: Path, plain: dict[str, Any]) -> Any:
    engine = make(FullyShardedDataParallel(), seed=5)
    engine.run(loader(4), max_epochs=1)
    engine.load_weights(Checkpoint.load(folder))
    assert all(is_sharded(p) for p in engine.model.parameters())
    first = full(engine)
    engine.load_weights(plain)  # those of one process
    return first, full(engine)


@pytest.mark.slow
def test_weights_alone_move_too(tmp_path: Path) -> None:
    averages = together(2, exporting, tmp_path, 6)[0]
    one = make(seed=3)
    one.load_weights(Checkpoint.load(tmp_path))
    for key, value in full(one).items():
        assert torch.equal(value, averages[key])
    plain = make(seed=4).weights()
    for first, second in together(3, importing, tmp_path, plain):
        assert all(torch.equal(first[key], averages[key]) for key in averages)
        assert all(torch.equal(second[key], plain["model"][key]) for key in averages)


def going_on_from_one(state: dict[str, Any]) -> Any:
    engine = make(EMA(0.5), FullyShardedDataParallel())
    engine.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(loader(4), max_epochs=6)
    return full(engine)


@pytest.mark.slow
def test_the_state_of_one_process_is_shared_out_to_three() -> None:
    whole = make(EMA(0.5))
    whole.run(loader(12), max_epochs=3)
    state = whole.state_dict()
    whole.run(loader(12), max_epochs=6)
    for weights in together(3, going_on_from_one, state):
        assert_close(weights, full(whole))


# ---- windows, and those who have nothing to learn from ------------------------------------------------------------


def counted(every_batch: bool) -> Any:
    import torch.distributed as dist

    engine = make(GradientAccumulation(3), FullyShardedDataParallel(reduce_every_batch=every_batch))
    original, seen = dist.reduce_scatter_single, []

    def count(*args: Any, **options: Any) -> Any:
        seen.append(1)
        return original(*args, **options)

    dist.reduce_scatter_single = count
    engine.run(loader(2), max_epochs=1)
    # 12 batches for 2 processes are 6 for each: 2 windows; a unit for each of the 4 layers, none for what is left.
    return len(seen), full(engine)


@pytest.mark.slow
def test_a_window_is_reduced_once() -> None:
    one = make(GradientAccumulation(3))
    one.run(loader(4), max_epochs=1)
    for number, weights in together(2, counted, False):
        assert number == 2 * 4
        assert_close(weights, full(one))
    for number, weights in together(2, counted, True):
        assert number == 6 * 4
        assert_close(weights, full(one))


def saving_inside_a_window(folder: Path, every_batch: bool) -> Any:
    def build() -> Engine:
        return make(
            GradientAccumulation(4),
            FullyShardedDataParallel(reduce_every_batch=every_batch),
            Checkpoint(folder, every="3it", keep=9),
        )

    whole = build()
    try:
        whole.run(loader(2), max_epochs=2)
    except RuntimeError as error:
        return str(error)
    resumed = build()
    resumed.load_state_dict(Checkpoint.load(folder / "checkpoint-epoch0001-iter00000003"))
    resumed.run(loader(2), max_epochs=2)
    first, second = full(whole), full(resumed)
    return all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_an_open_window_is_refused_unless_every_batch_is_reduced(tmp_path: Path) -> None:
    for message in together(2, saving_inside_a_window, tmp_path / "refused", False):
        assert "cannot be saved; save at the end of a window" in message
        assert "reduce_every_batch=True" in message
    assert together(2, partial(saving_inside_a_window, every_batch=True), tmp_path / "saved") == [True, True]


@pytest.mark.moderate
@pytest.mark.parametrize("window", quick([1, 2], 2))
@pytest.mark.parametrize("number", quick([2, 3], 2))
def test_a_process_without_a_batch_takes_part(number: int, window: int) -> None:
    """28 samples are 7 batches of 4: the last turn of two or three processes is short of one or two."""

    def handlers() -> list[Handler]:
        return [GradientAccumulation(window), GradientClipping(max_norm=0.5), GradientNorms()]

    def plain_loop(number: int) -> dict[str, Tensor]:
        engine = make(optimizer=ADAM)
        batches = list(loader(4, 28))
        turns = [batches[i : i + number] for i in range(0, len(batches), number)]
        joined = [(torch.cat([x for x, _ in turn]), torch.cat([y for _, y in turn])) for turn in turns]
        engine.attach(GradientAccumulation(window), GradientClipping(max_norm=0.5))
        engine.run(joined, max_epochs=3)
        return full(engine)

    expected = plain_loop(number)
    for weights, metrics, steps in together(number, trained, 4, handlers, {"max_epochs": 3}, 28):
        assert_close(weights, expected)
        assert metrics["gradient_norm"] > 0
        assert steps == 3 * math.ceil(math.ceil(7 / number) / window)


TIMEOUT = LIMIT


def interrupted(folder: Path) -> Any:
    """Ctrl-C comes in rank 0 while each process looks at what it has written."""
    engine = make(FullyShardedDataParallel(timeout=TIMEOUT), Checkpoint(folder, every="2it"))

    def interrupt(path: Path) -> str:
        raise KeyboardInterrupt

    heard, broken = folder.parent / "heard", Watch._broken

    def hear(self: Watch) -> bool:
        found = broken(self)
        if found:
            heard.touch()
        return found

    if engine.processes.is_rank_zero:
        sharded.sha256_of = interrupt
    else:
        Watch._broken = hear  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        engine.run(loader(6), max_epochs=2)
    except BaseException as error:
        seconds = time.monotonic() - began
        if engine.processes.is_rank_zero:
            wait_until(heard.exists)  # it has the store, and lives on for a while, as a notebook does
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())]), seconds
    return None


@pytest.mark.slow
def test_an_interrupt_while_shards_are_written_ends_all_processes(tmp_path: Path) -> None:
    (first, _, _), (second, reported, seconds) = together(2, interrupted, tmp_path / "saved")
    assert first == "KeyboardInterrupt"
    assert second == "RuntimeError"
    assert "rank 0 " in reported
    assert "failed with KeyboardInterrupt at ITERATION_COMPLETED, epoch 1, iteration 2" in reported
    assert seconds < TIMEOUT / 2, "long before the collective would time out"


@pytest.mark.slow
def test_a_window_computed_again_counts_each_batch_by_the_samples_of_its_own_turn() -> None:
    """22 samples are turns of 4 + 4, 4 + 4 and 4 + 2, which make one window."""

    def handlers() -> list[Handler]:
        return [GradientAccumulation(3), SharpnessAwareMinimization(0.1)]

    joined = [tuple(tensor[i : i + 8] for tensor in dataset(22).tensors) for i in range(0, 22, 8)]
    one = make(*handlers())
    one.run(joined, max_epochs=4)
    for weights, _, steps in together(2, trained, 4, handlers, {"max_epochs": 4}, 22):
        assert_close(weights, full(one))
        assert steps == 4


class Dropping(Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(5, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.dropout(x)))


def without_loss(function: bool, dropout: bool) -> Any:
    """Rank 1 has no loss in the second iteration, and skips one in the third and fourth."""
    rank = int(os.environ["RANK"])

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor | None:
        if rank == 1 and engine.state.iteration == 2:
            return None
        return nn.functional.mse_loss(output, batch[1])

    def both(engine: Engine, batch: Any) -> Tensor | None:
        return loss(engine, engine.model(batch[0]), batch)

    update = Update.from_function(both, SGD) if function else Update(lambda e, b: e.model(b[0]), loss, SGD)
    torch.manual_seed(0)
    engine = Engine(update, model=Dropping() if dropout else Model(), seed=0)
    engine.attach(FullyShardedDataParallel())
    seen, streams = [], []

    @engine.on(Events.FORWARD_STARTED(once=3))
    def skip_before(engine: Engine) -> None:
        if rank == 1:
            engine.state.update.skip("not here")

    @engine.on(Events.UPDATE_STARTED(once=4))
    def skip_at_once(engine: Engine) -> None:
        if rank == 1:
            engine.state.update.skip("not at all")

    @engine.on(Events.UPDATE_COMPLETED, phase=Phase.RECORD)
    def see(engine: Engine) -> None:
        seen.append(engine.state.update.skipped)
        streams.append(torch.get_rng_state())

    engine.run(loader(4), max_iters=6)
    return full(engine), seen, streams


@pytest.mark.slow
@pytest.mark.parametrize("function", quick([False, True], True))
def test_a_process_without_a_loss_or_with_a_skip_takes_part(function: bool) -> None:
    one = make(optimizer=SGD)
    batches = list(loader(4))
    pairs = [batches[i : i + 2] for i in (0, 2, 4)]
    steps = [
        pairs[0],
        pairs[1][:1],
        pairs[1],
        pairs[2],
    ]  # the 2nd has one loss; the 3rd and 4th are skipped; then a new epoch
    del steps[2:]
    joined = [(torch.cat([x for x, _ in w]), torch.cat([y for _, y in w])) for w in [*steps, pairs[1], pairs[2]]]
    one.run(joined, max_epochs=1)
    for weights, seen, _ in together(2, without_loss, function, False):
        assert seen == [None, None, "not here (rank 1)", "not at all (rank 1)", None, None]
        assert_close(weights, full(one))


@pytest.mark.slow
def test_a_stand_in_leaves_no_trace_in_buffers_or_random_streams() -> None:
    (weights, _, streams), (others, _, own) = together(2, without_loss, False, True)
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    assert not torch.equal(streams[2], streams[3])  # dropout drew in the fourth iteration
    assert torch.equal(own[2], own[3])  # as it did not where there was only a stand-in


def going_on(folder: Path) -> Any:
    """Runs that were cut in several ways, and resumed."""

    def build(*handlers: Handler) -> Engine:
        accumulation = GradientAccumulation(2)
        return make(accumulation, EMA(0.5), FullyShardedDataParallel(), *handlers, optimizer=SGD, model=Dropping())

    def run(engine: Engine, epochs: int) -> dict[str, Tensor]:
        engine.run(loader(2), max_epochs=epochs)
        return full(engine)

    torch.manual_seed(0)
    model = Dropping().state_dict()
    results = {}

    def begin(*handlers: Handler) -> Engine:
        engine = build(*handlers)
        engine.load_weights({"model": model})
        torch.manual_seed(1)
        return engine

    results["whole"] = run(begin(Checkpoint(folder, keep=9)), 3)
    resumed = build(Checkpoint(folder, keep=9))
    resumed.load_state_dict(Checkpoint.load(folder / "checkpoint-epoch0001-iter00000006"))
    results["resumed"] = run(resumed, 3)
    engine = begin()
    run(engine, 1)
    results["in two runs"] = run(engine, 3)
    engine = begin()
    engine.run(loader(2), max_iters=5)  # the window is left open, in this process
    results["in two runs with an open window"] = run(engine, 3)

    # What an error, or a stop, leaves in the middle of a window is of no consequence afterwards.
    for how in ("error", "stop"):
        engine = begin()

        def fail(engine: Engine, how: str = how) -> None:
            if how == "error":
                raise ArithmeticError
            engine.terminate("enough")

        event = Events.FORWARD_COMPLETED(once=4) if how == "error" else Events.ITERATION_COMPLETED(once=3)
        with engine.connect(event, fail), suppress(ArithmeticError):
            engine.run(loader(2), max_epochs=1)
        engine.reset()
        engine.load_weights({"model": model})
        engine.updates[0].optimizer = None
        torch.manual_seed(1)
        results[how] = run(engine, 3)
    return results


@pytest.mark.slow
def test_a_run_that_is_cut_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for results in together(2, going_on, tmp_path):
        whole = results.pop("whole")
        for how, weights in results.items():
            assert all(torch.equal(weights[key], whole[key]) for key in whole), how


def two_modules(size: int) -> Any:
    torch.manual_seed(0)
    modules = {"body": Model(), "scale": nn.Linear(1, 1)}

    def forward(engine: Engine, batch: Any) -> Tensor:
        output: Tensor = engine.model["scale"](engine.model["body"](batch[0]))
        return output

    update = Update(forward, lambda engine, output, batch: nn.functional.mse_loss(output, batch[1]), SGD)
    engine = Engine(update, model=modules, seed=0)
    engine.attach(FullyShardedDataParallel(units=["body.blocks.*", nn.Linear]), GradientNorms(per_parameter=True))
    engine.run(loader(size), max_epochs=2)
    return {
        f"{root}.{key}": whole_tensor(v).clone()
        for root, m in engine.modules.items()
        for key, v in m.state_dict().items()
    }


@pytest.mark.slow
def test_several_modules_are_sharded_each() -> None:
    one = two_modules(12)
    for weights in together(2, two_modules, 6):
        assert_close(weights, one)


# ---- evaluation, precision ----------------------------------------------------------------------------------------


def evaluated(size: int) -> Any:
    """Averages, evaluated with a number of batches that the processes cannot share evenly."""
    engine = make(EMA(0.5), FullyShardedDataParallel(units=()), model=None)
    update = Update.supervised(nn.functional.mse_loss)
    evaluator = Engine(update, model=engine.model)
    losses: list[float] = []

    @evaluator.on(Events.LOSS_COMPUTED)
    def note(evaluator: Engine) -> None:
        assert evaluator.state.update.loss is not None
        losses.append(evaluator.state.update.loss.item())

    engine.attach(Validation(evaluator, loader(4, 20), every="1ep", prefix="train_"))
    engine.run(loader(size), max_epochs=2)
    return full(engine), losses


@pytest.mark.slow
def test_evaluations_see_averages_and_may_be_uneven() -> None:
    one, losses = evaluated(12)
    results = together(2, evaluated, 6)
    found = [
        results[batch % 2][1][(batch // 2) + (3 if batch % 2 == 0 else 2) * epoch]
        for epoch in range(2)
        for batch in range(5)
    ]
    assert found == pytest.approx(losses, abs=1e-4)
    for weights, _ in results:
        assert_close(weights, one)


def trained_beside_evaluations(accumulated: int) -> list[Any]:
    """Evaluations of so many batches, inside windows, too; none in the first run."""
    found = []
    for count in range(2 * int(os.environ["WORLD_SIZE"])):
        engine = make(FullyShardedDataParallel(), GradientAccumulation(accumulated), optimizer=SGD)
        evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=engine.model)
        if count:
            engine.attach(Validation(evaluator, loader(4, 4 * count), every="3it"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the ranks have no equal shares
            engine.run(loader(4, 44), max_epochs=2)
        found.append(full(engine))
    return found


@pytest.mark.moderate
@pytest.mark.parametrize("accumulated", quick([1, 2], 2))
@pytest.mark.parametrize("number", quick([2, 3], 2))
def test_evaluations_of_any_number_of_batches_leave_no_trace(number: int, accumulated: int) -> None:
    """Also of fewer than ranks: torch records forwards without gradients, too, and gathers weights for a backward by them."""
    for alone, *others in together(number, trained_beside_evaluations, accumulated):
        for weights in others:
            assert all(torch.equal(weights[key], alone[key]) for key in alone)


MOMENTS = [
    Events.FORWARD_COMPLETED,
    Events.BACKWARD_COMPLETED,
    Events.GRADIENTS_READY,
    Events.OPTIMIZER_STEP_STARTED,
    Events.OPTIMIZER_STEP_COMPLETED,
    Events.ITERATION_COMPLETED,
]


def called_at_any_moment(units: Any, reshard: bool, accumulated: int) -> list[Any]:
    """The weights of runs in which a receiver calls the model at one moment of each iteration, and what it saw; first without."""
    found = []
    for moment in (None, *MOMENTS):
        handler = FullyShardedDataParallel(units=units, reshard_after_forward=reshard)
        engine = make(handler, GradientAccumulation(accumulated), optimizer=SGD)
        seen: list[Tensor] = []

        def call(engine: Engine, seen: list[Tensor] = seen) -> None:
            with torch.no_grad():
                seen.append(engine.model(torch.ones(1, 5)))

        if moment is not None:
            engine.connect(moment, call)
        engine.run(loader(4, 32), max_epochs=2)
        found.append((full(engine), seen))
    return found


@pytest.mark.moderate
@pytest.mark.parametrize("accumulated", quick([1, 2], 2))
@pytest.mark.parametrize("reshard", quick([True, False], True))
@pytest.mark.parametrize("units", quick([None, (), "blocks.*"], "blocks.*", whole=True), ids=str)
def test_the_model_may_be_called_at_any_moment(units: Any, reshard: bool, accumulated: int) -> None:
    """Weights that a unit has gathered for a forward are not those of the next step."""
    for (alone, _), *others in together(2, called_at_any_moment, units, reshard, accumulated):
        for moment, (weights, seen) in zip(MOMENTS, others, strict=True):
            assert all(torch.equal(weights[key], alone[key]) for key in alone), moment
            assert not torch.equal(seen[0], seen[-1]), moment


def normed(kind: type[Handler]) -> Any:
    """The last round of an epoch has a batch on rank 0 only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
    engine = make(kind(), optimizer=SGD, model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the ranks have no equal shares
        engine.run(loader(4, 4 * (engine.processes.world_size + 1)), max_epochs=3)
    return {key: whole_tensor(value).clone() for key, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("number", quick([2, 3], 2))
def test_batch_norm_may_have_no_batch_on_some_ranks(number: int) -> None:
    """Weights and statistics are those of DDP, whose ranks make no forward without a batch."""
    for weights in together(number, normed, FullyShardedDataParallel):
        for other in together(number, normed, DistributedDataParallel):
            assert_close(weights, other)


def averaged(size: int) -> Any:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    engine = make(SWA(2, bn_data=list(loader(12))), FullyShardedDataParallel(), model=model)
    engine.run(loader(size), max_epochs=4)
    return {key: whole_tensor(value) for key, value in engine.weights()["model"].items()}


@pytest.mark.slow
def test_stochastic_weight_averaging_gathers_its_statistics() -> None:
    results = together(2, averaged, 6)
    for key in results[0]:
        assert torch.equal(results[0][key], results[1][key])
    assert results[0]["1.running_mean"].abs().sum() > 0


def scaled(number: int) -> Any:
    """The gradients of rank 1 overflow once."""
    engine = make(
        MixedPrecision("fp16", init_scale=1024.0),
        FullyShardedDataParallel(),
        GradientClipping(max_norm=1.0),
        optimizer=SGD,
    )

    @engine.on(Events.LOSS_COMPUTED(once=2), phase=Phase.FINALIZE)
    def overflow(engine: Engine) -> None:
        if engine.processes.rank == 1:
            engine.state.update.backward_loss = engine.state.update.backward_loss * float("inf")

    seen = []

    @engine.on(Events.UPDATE_COMPLETED, phase=Phase.RECORD)
    def see(engine: Engine) -> None:
        seen.append(engine.state.update.skipped is not None)

    engine.run(loader(4), max_epochs=2)
    scaler = engine.handlers["mixed_precision"].scalers["main"]  # type: ignore[attr-defined]
    return seen, scaler.get_scale(), full(engine)


@pytest.mark.slow
def test_an_overflow_in_one_process_is_one_of_all() -> None:
    for seen, scale, weights in together(2, scaled, 2):
        assert seen == [False, True, False, False, False, False]
        assert scale == 512.0
        assert all(value.isfinite().all() for value in weights.values())


def mixed(reduce_dtype: Any) -> Any:
    types = []
    torch.manual_seed(0)
    model = Model()
    model.first.register_forward_hook(lambda module, args, output: types.append((module.weight.dtype, output.dtype)))
    engine = make(
        FullyShardedDataParallel(param_dtype="bf16", reduce_dtype=reduce_dtype, reshard_after_forward=False),
        model=model,
    )
    engine.run(loader(6), max_epochs=1)
    return types[0], {p.dtype for p in engine.model.parameters()}, full(engine)


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype", quick(["fp32", "bf16", None], "fp32"))
def test_weights_are_used_in_another_type_than_they_are_kept_in(reduce_dtype: Any) -> None:
    one = make()
    one.run(loader(12), max_epochs=1)
    for types, kept, weights in together(2, mixed, reduce_dtype):
        assert types == (torch.bfloat16, torch.bfloat16)
        assert kept == {torch.float32}
        for key, value in full(one).items():  # two steps of Adam are at most 0.02 away from the start, in either
            torch.testing.assert_close(weights[key], value, rtol=0, atol=0.04)


# ---- joining and leaving ------------------------------------------------------------------------------------------


def unsharding() -> Any:
    handler = FullyShardedDataParallel()
    engine = make(handler, optimizer=SGD)
    plain_types = [type(module) for module in Model().modules()]
    engine.run(loader(4), max_epochs=1)
    expected = full(engine)
    evaluation = engine.model(torch.ones(2, 5)).detach()
    engine.detach(handler)
    try:
        engine.run(loader(4), max_epochs=2)
    except ValueError as error:
        refusal = str(error)
    engine.attach(handler)
    handler.unshard(engine)
    engine.detach(handler)
    model = engine.model
    assert [type(module) for module in model.modules()] == plain_types
    assert not any(is_sharded(p) for p in model.parameters())
    hooks = [key for module in model.modules() for key, hooks in vars(module).items() if "hook" in key and hooks]
    torch.testing.assert_close(model(torch.ones(2, 5)), evaluation)
    found = {key: value.clone() for key, value in model.state_dict().items()}
    copied = Model()
    copied.load_state_dict(found)
    if int(os.environ["RANK"]) == 0:  # it needs nobody any more
        engine.run([next(iter(loader(4)))], max_epochs=2)
        assert engine.updates[0].steps == 4
    again = make(FullyShardedDataParallel(), model=copied)
    again.run(loader(4), max_epochs=1)
    assert all(is_sharded(p) for p in again.model.parameters())
    again.find(FullyShardedDataParallel).unshard(again)
    again.run(loader(4), max_epochs=2)  # it is sharded once more
    assert all(is_sharded(p) for p in again.model.parameters())
    return refusal, hooks, expected, found


@pytest.mark.slow
def test_a_sharded_model_becomes_a_plain_one() -> None:
    for refusal, hooks, expected, found in together(2, unsharding):
        assert "sharded over ranks" in refusal
        assert "unshard(engine)" in refusal
        assert hooks == []
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def refusals() -> Any:
    reported = {}

    def note(name: str, function: Callable[[], object]) -> None:
        try:
            function()
        except (ValueError, TypeError) as error:
            reported[name] = str(error)

    def tied() -> None:
        model = Model()
        model.blocks[1].weight = model.blocks[0].weight
        make(FullyShardedDataParallel(), model=model).run(loader(4), max_epochs=1)

    def several() -> None:
        updates = [Update.supervised(nn.functional.mse_loss, SGD, name=name) for name in ("a", "b")]
        Engine(updates, model=Model()).attach(FullyShardedDataParallel())

    def free() -> None:
        own = nn.Parameter(torch.zeros(1))
        update = Update.supervised(
            nn.functional.mse_loss, SGD, parameters=lambda engine: [*engine.model.parameters(), own]
        )
        engine = Engine(update, model=Model())
        engine.attach(FullyShardedDataParallel())
        engine.run(loader(4), max_epochs=1)

    note("tied", tied)
    note("several", several)
    note("free", free)
    note("pieces", lambda: make(MicroBatching(2), FullyShardedDataParallel()))
    note("units", lambda: make(FullyShardedDataParallel(units="blcks.*")).run(loader(4), max_epochs=1))
    note("list", lambda: make(FullyShardedDataParallel(units="blocks")).run(loader(4), max_epochs=1))
    note(
        "exception",
        lambda: make(FullyShardedDataParallel(), Checkpoint("x", on_exception=True)).run(loader(4), max_epochs=1),
    )
    note("sam", lambda: make(FullyShardedDataParallel(), SharpnessAwareMinimization()).run(loader(4, 20), max_epochs=1))
    engine = make(FullyShardedDataParallel(units=["blocks.*", nn.Linear]))
    engine.run(loader(4), max_epochs=1)
    reported["chosen"] = ", ".join(
        sorted(path for path, m in engine.model.named_modules() if type(m).__name__.startswith("FSDP"))
    )
    return reported


@pytest.mark.slow
def test_what_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reported, other = together(2, refusals)
    assert reported == other
    assert "'blocks.0.weight' is shared with the unit 'blocks.1'" in reported["tied"]
    assert "units=()" in reported["tied"]
    assert "several updates (a, b)" in reported["several"]
    assert "parameter 8" in reported["free"]
    assert "micro_batching" in reported["pieces"]
    assert "units='blcks.*' matches no module; available modules: first, blocks" in reported["units"]
    assert "'blocks' is a ModuleList, which is never called" in reported["list"]
    assert "on_exception=True cannot save a sharded model" in reported["exception"]
    assert "number of batches in this window differs between ranks ([1, 0])" in reported["sam"]
    assert "drop_last=True" in reported["sam"]
    assert reported["chosen"] == ", blocks.0, blocks.1, first, last"


def test_an_optimizer_that_was_built_is_refused_also_alone() -> None:
    model = Model()
    engine = Engine(Update.supervised(nn.functional.mse_loss, torch.optim.Adam(model.parameters())), model=model)
    with pytest.raises(ValueError, match=r"partial\(torch\.optim\.Adam, lr=1e-3\)"):
        engine.attach(FullyShardedDataParallel())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": 3}, "units=3"),
        ({"units": [int]}, "neither a module path nor a module class"),
        ({"param_dtype": "int8"}, "param_dtype='int8'"),
        ({"reduce_dtype": torch.float16}, "reduce_dtype="),
        ({"timeout": 0}, "timeout=0"),
        ({"shard_policy": "all"}, "shard_policy='all'"),
        ({"reduce_every_batch": 1}, "reduce_every_batch=1"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        FullyShardedDataParallel(**options)
    assert message in str(caught.value)
    assert str(caught.value).startswith("FullyShardedDataParallel(")


@pytest.mark.slow
def test_alone_it_does_nothing() -> None:
    engine = make(FullyShardedDataParallel(param_dtype="bf16"), GradientAccumulation(2))
    without = make(GradientAccumulation(2))
    for one in (engine, without):
        one.run(loader(4), max_epochs=2)
    assert all(torch.equal(full(engine)[key], value) for key, value in full(without).items())
    assert not engine.processes.distributed
    assert type(engine.model) is Model
    check_handler(partial(make), FullyShardedDataParallel, list(loader(4)), changes_training=False, max_epochs=2)
