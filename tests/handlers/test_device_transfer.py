"""DeviceTransfer: batches of every form, and models before their optimizers are built."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from signalfire import Engine, Events, Update
from signalfire.findings import FindingWarning
from signalfire.handlers import DeviceTransfer
from signalfire.runs.evaluation import prepare_batch

META = torch.device("meta")  # a second device that every machine has: it shows what moved


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclass
class Sample:
    inputs: Tensor
    label: str
    parts: list[Tensor] = field(default_factory=list)
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = len(self.inputs)


@dataclass(frozen=True)
class Frozen:
    inputs: Tensor


class Movable:
    """Has a ``to`` of its own, as graph batches do."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> Movable:
        return Movable(self.tensor.to(device))


class Plain:
    """Has nothing that could be moved."""


def moved(batch: Any, device: str = "meta") -> Any:
    """The batch as a run without a model sees it."""
    seen: list[Any] = []
    engine = Engine(Update.prediction(lambda engine, batch: seen.append(batch)))
    engine.attach(DeviceTransfer(device))
    engine.run([batch])
    return seen[0]


def test_tensors_are_moved_in_all_containers() -> None:
    batch: dict[str, Any] = {"a": torch.ones(2), "b": [torch.ones(3), (torch.ones(1), {"c": torch.ones(4)})]}
    found = moved(batch)
    assert found["a"].device == META
    assert isinstance(found["b"], list)
    assert isinstance(found["b"][1], tuple)
    assert [found["b"][0].device, found["b"][1][0].device, found["b"][1][1]["c"].device] == [META] * 3
    assert found["b"][1][1]["c"].shape == (4,)
    assert batch["a"].device.type == "cpu"  # the data's own batch is not changed


def test_named_tuples_keep_their_type() -> None:
    found = moved(Pair(torch.ones(2), torch.zeros(1)))
    assert type(found) is Pair
    assert (found.inputs.device, found.targets.device) == (META, META)


def test_dataclasses_keep_their_type_and_other_fields() -> None:
    found = moved(Sample(torch.ones(2), "cat", [torch.ones(1)]))
    assert type(found) is Sample
    assert (found.inputs.device, found.parts[0].device, found.label, found.size) == (META, META, "cat", 2)
    assert moved(Frozen(torch.ones(2))).inputs.device == META


def test_packed_sequences_are_moved() -> None:
    found = moved(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]))
    assert isinstance(found, PackedSequence)
    assert found.data.device == META


def test_what_has_a_way_of_its_own_uses_it() -> None:
    found = moved([Movable(torch.ones(2))])
    assert found[0].tensor.device == META


def test_what_cannot_be_moved_stays_as_it_is() -> None:
    plain = Plain()
    batch = ("text", 3, 2.5, None, plain, Plain, {1, 2}, torch.Size([2, 3]), range(3))
    found = moved(batch)
    assert found == batch
    assert found[4] is plain


def test_a_batch_that_moves_itself_in_place_is_trained_on() -> None:
    class InPlace:
        def __init__(self) -> None:
            self.tensor = torch.ones(2)

        def to(self, device: torch.device) -> None:
            self.tensor = self.tensor.to(device)

    batch = InPlace()
    assert moved([batch])[0] is batch
    assert moved(batch).tensor.device == META


class WithFields:
    """What attrs and pydantic make of a class, as far as it matters here."""

    def __init__(self, inputs: Tensor, label: str) -> None:
        self.inputs, self.label = inputs, label


class Attrs(WithFields):
    __attrs_attrs__ = SimpleNamespace(name="inputs"), SimpleNamespace(name="label")


class Pydantic(WithFields):
    __pydantic_fields__: ClassVar[dict[str, Any]] = {"inputs": None, "label": None}

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise AttributeError("frozen")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [Attrs, Pydantic, SimpleNamespace])
def test_classes_with_known_fields_are_moved(kind: type) -> None:
    batch = kind(inputs=torch.ones(2), label="cat")
    found = moved({"sample": batch})["sample"]
    assert type(found) is kind
    assert (found.inputs.device, found.label) == (META, "cat")  # type: ignore[attr-defined]
    assert batch.inputs.device.type == "cpu"


def test_deques_are_moved_and_keep_their_length() -> None:
    found = moved(deque([torch.ones(2), torch.ones(1)], maxlen=2))
    assert isinstance(found, deque)
    assert ([tensor.device for tensor in found], found.maxlen) == ([META, META], 2)


def test_a_class_that_cannot_be_moved_is_reported_once_a_run() -> None:
    class Boxed:
        def __init__(self) -> None:
            self.inputs = torch.ones(2)

    with pytest.warns(FindingWarning, match="a batch holds a Boxed, whose tensors are not moved to meta") as caught:
        moved([Boxed(), Boxed()])
    assert len(caught) == 1


def test_ordered_dicts_keep_their_type() -> None:
    found = moved(OrderedDict(b=torch.ones(1), a=torch.ones(2)))
    assert type(found) is OrderedDict
    assert list(found) == ["b", "a"]
    assert found["a"].device == META


def test_a_tensor_that_is_there_already_is_the_same_object() -> None:
    tensor = torch.ones(2)
    assert moved([tensor], "cpu")[0] is tensor


def test_a_skipped_batch_stays_skipped() -> None:
    engine = Engine(Update.prediction(lambda engine, batch: batch))
    engine.attach(DeviceTransfer("cpu"))
    seen: list[Any] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.batch))
    engine.run([None, torch.ones(1)])
    assert seen[0] is None


def trainer_of(model: nn.Module, *handlers: Any, lr: float = 0.1) -> Engine:
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=lr))
    engine = Engine(update, model=model, seed=0)
    engine.attach(*handlers)
    return engine


def test_on_the_cpu_training_equals_a_plain_loop() -> None:
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(n)), torch.ones(4, 1)) for n in range(3)]
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    torch.manual_seed(3)
    reference = nn.Linear(3, 1)
    parameters = list(model.parameters())
    trainer_of(model, DeviceTransfer("cpu")).run(data, max_epochs=2)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for inputs, targets in data * 2:
        nn.functional.mse_loss(reference(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, reference.weight)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_the_model_is_on_its_device_before_the_optimizer_is_built() -> None:
    model = nn.Linear(3, 1)
    engine = trainer_of(model, DeviceTransfer("cpu"))
    order: list[str] = []

    class Noted(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            order.append("moved")
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def factory(parameters: Any) -> torch.optim.Optimizer:
        order.append("built")
        return torch.optim.SGD(parameters, lr=0.1)

    engine = Engine(Update.supervised(nn.functional.mse_loss, factory), model=Noted(3, 1), seed=0)
    engine.attach(DeviceTransfer("cpu"))
    engine.run([(torch.ones(2, 3), torch.ones(2, 1))], max_epochs=1)
    assert order == ["moved", "built"]


def test_a_model_on_the_meta_device_is_refused_before_the_first_batch() -> None:
    model = nn.Linear(3, 1, device="meta")
    engine = trainer_of(model, DeviceTransfer("cpu"))
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        engine.run([(torch.ones(2, 3), torch.ones(2, 1))], max_epochs=1)
    assert engine.state.iteration == 0


def test_it_serves_an_evaluator_too() -> None:
    model = nn.Linear(3, 1)
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(DeviceTransfer("cpu"))
    shapes: list[Any] = []
    evaluator.connect(Events.FORWARD_COMPLETED, lambda engine: shapes.append(engine.state.update.output.shape))
    evaluator.run([(torch.ones(2, 3), torch.ones(2, 1))])
    assert shapes == [(2, 1)]


def test_it_cannot_join_or_leave_a_running_engine() -> None:
    engine = trainer_of(nn.Linear(3, 1))
    engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: engine.attach(DeviceTransfer("cpu")) and None)
    with pytest.raises(RuntimeError, match="between two runs"):
        engine.run([(torch.ones(2, 3), torch.ones(2, 1))] * 2, max_epochs=1)


def test_switched_off_nothing_is_moved() -> None:
    seen: list[Any] = []
    engine = Engine(Update.prediction(lambda engine, batch: seen.append(batch)))
    engine.attach(DeviceTransfer("meta"))
    with engine.without("device_transfer"):
        engine.run([torch.ones(2)])
    assert seen[0].device.type == "cpu"


def test_the_default_is_the_accelerator_that_there_is() -> None:
    available = torch.accelerator.is_available()
    expected = torch.accelerator.current_accelerator() if available else torch.device("cpu")
    assert DeviceTransfer().device == expected


@pytest.mark.parametrize("device", ["gpu", "GPU", "cuda:x", "", True, 1.5])
def test_devices_that_do_not_exist_are_refused_and_the_error_says_what_to_write(device: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^DeviceTransfer\(device={device!r}\): expected a device, such as 'cuda', .* omit "
    ):
        DeviceTransfer(device)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, whose first device it is")
def test_a_number_is_no_device_without_an_accelerator() -> None:
    number: Any = 0
    # A build of torch for CUDA knows a device of this number.
    message = (
        "no CUDA device is available.*" if torch.backends.cuda.is_built() else "expected a device, such as 'cuda', .*"
    )
    with pytest.raises(ValueError, match=rf"^DeviceTransfer\(device=0\): {message}; omit device="):
        DeviceTransfer(number)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_cuda_device_is_refused() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        DeviceTransfer("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_model_and_batches_meet_on_a_cuda_device() -> None:
    engine = trainer_of(nn.Linear(3, 1), DeviceTransfer("cuda"))
    engine.run([(torch.ones(2, 3), torch.ones(2, 1))] * 2, max_epochs=2)
    assert engine.model.weight.device.type == "cuda"
    assert engine.device.type == "cuda"


def test_prefetch_without_a_cuda_device_changes_nothing() -> None:
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(n)), torch.ones(4, 1)) for n in range(3)]
    weights = []
    for prefetch in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        trainer_of(model, DeviceTransfer("cpu", prefetch=prefetch)).run(data, max_epochs=2)
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_prefetch_of_copies_that_block_is_refused() -> None:
    with pytest.raises(ValueError, match="needs non-blocking copies"):
        DeviceTransfer("cpu", prefetch=True, non_blocking=False)
    with pytest.raises(TypeError, match="prefetch=1"):
        DeviceTransfer("cpu", prefetch=1)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_prefetch_copies_on_a_stream_of_its_own_without_waiting_and_trains_the_same() -> None:
    samples = [(torch.randn(512, 64), torch.randn(512, 1)) for _ in range(20)]
    data = [(x.pin_memory(), y.pin_memory()) for x, y in samples]
    weights: list[Tensor] = []
    for prefetch in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 1))
        engine = trainer_of(model, DeviceTransfer("cuda", prefetch=prefetch), lr=1e-3)
        streams: set[int] = set()

        def watch(engine: Engine, streams: set[int] = streams) -> None:
            streams.add(torch.cuda.current_stream().cuda_stream)

        def allow(engine: Engine) -> None:
            torch.cuda.set_sync_debug_mode("default")

        def forbid(engine: Engine) -> None:
            torch.cuda.set_sync_debug_mode("error")

        # The findings read values in the first iterations and at the ends of epochs.
        engine.connect(Events.FORWARD_STARTED, watch)
        engine.connect(Events.ITERATION_COMPLETED(once=[25, 45]), forbid)
        engine.connect(Events.ITERATION_COMPLETED(once=[35, 55]), allow)
        try:
            engine.run(data, max_epochs=3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(streams) == 1, "the model computes on the stream that it always did"
        weights.append(next(model.parameters()))
    assert weights[0].isfinite().all()
    assert torch.equal(*weights)


def test_a_batch_can_be_prepared_outside_of_the_loop() -> None:
    engine = Engine(Update.prediction(lambda engine, batch: None))
    engine.attach(DeviceTransfer("meta"))
    counted: list[int] = []
    engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: counted.append(1))
    engine.state.batch = "as it was"
    prepared = prepare_batch(engine, {"x": torch.ones(2)})
    assert prepared["x"].device == META
    assert engine.state.batch == "as it was"
    assert counted == [], "only what prepares batches is asked"
