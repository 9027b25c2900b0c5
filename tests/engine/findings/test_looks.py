"""What only looks for mistakes never ends a run, and never changes one: whatever the batches are, and whatever fails in it."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.overrides import _get_current_function_mode_stack

from signalfire import Engine, Events, FindingError, FindingWarning, Handler, Update
from signalfire.findings import calls, data_checks, dropout, epoch_checks, first_steps, watch
from signalfire.findings.watch import AT_START
from signalfire.handlers import (
    Average,
    DeviceStatistics,
    GradientNorms,
    Guards,
    History,
    Metrics,
    NonFiniteGuard,
    OptimizerStatistics,
    ParameterStatistics,
    ProgressBar,
    Summary,
    Throughput,
    Validation,
)
from tests.kit import assert_same, needs_torch

EYE = torch.eye(4, 3)
SGD = partial(torch.optim.SGD, lr=0.1)


class Subclass(Tensor):
    """A tensor of a user's own class."""


class Model(nn.Module):
    """One layer, behind what makes a plain tensor of the inputs."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(torch.ones(3, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product(inputs, self.weight)


def after(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda inputs, weight: convert(inputs).float() @ weight


def of_parts(inputs: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([part @ weight for part in inputs.unbind()])


def of_numbers(inputs: Tensor, weight: Tensor) -> Tensor:
    return (inputs @ weight.to(inputs.dtype)).abs()


KINDS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "coo": (EYE.to_sparse, torch.sparse.mm),
    "csr": (EYE.to_sparse_csr, torch.sparse.mm),
    "csc": (EYE.to_sparse_csc, after(Tensor.to_dense)),
    "bsr": (partial(torch.eye(4, 4).to_sparse_bsr, (2, 2)), after(lambda inputs: inputs.to_dense()[:, :3])),
    "quantized": (partial(torch.quantize_per_tensor, EYE, 0.1, 0, torch.quint8), after(Tensor.dequantize)),
    "nested": (lambda: torch.nested.nested_tensor([EYE[:2], EYE[2:]]), of_parts),
    "jagged": (lambda: torch.nested.nested_tensor([EYE[:2], EYE[2:]], layout=torch.jagged), of_parts),
    "mkldnn": (EYE.to_mkldnn, after(Tensor.to_dense)),
    "float8_e4m3fn": (partial(EYE.to, torch.float8_e4m3fn), after(Tensor.float)),
    "float8_e5m2": (partial(EYE.to, torch.float8_e5m2), after(Tensor.float)),
    "float16": (EYE.half, after(Tensor.float)),
    "uint16": (partial(EYE.to, torch.uint16), after(Tensor.float)),
    "uint32": (partial(EYE.to, torch.uint32), after(Tensor.float)),
    "uint64": (partial(EYE.to, torch.uint64), after(Tensor.float)),
    "bool": (EYE.bool, after(Tensor.float)),
    "complex": (partial(EYE.to, torch.complex64), of_numbers),
    "conjugate": (EYE.to(torch.complex64).conj, of_numbers),
    "empty": (partial(torch.empty, 4, 0, 3), lambda inputs, weight: (inputs @ weight).sum(1)),
    "0-d": (partial(torch.tensor, 1.0), lambda inputs, weight: (inputs * weight).sum().expand(4, 1)),
    "meta": (partial(torch.empty, 4, 3, device="meta"), lambda inputs, weight: torch.ones(4, 3) @ weight),
    "subclass": (partial(EYE.as_subclass, Subclass), torch.matmul),
}


def lookers() -> list[Handler]:
    """Handlers that only show, measure and look."""
    evaluator = Engine(Update.supervised(mse_loss), model=nn.Linear(3, 1))
    evaluator.attach(Metrics(loss=Average(mse_loss)))
    return [
        Guards(every="1it"), ProgressBar(file=io.StringIO()), Summary(file=io.StringIO()), Throughput(every="1it", warmup=1),
        Metrics(training_loss=Average(mse_loss)), GradientNorms(every="1step"), ParameterStatistics(every="1step"),
        OptimizerStatistics(every="1step"), NonFiniteGuard(), DeviceStatistics(), History(),
        Validation(evaluator, [(torch.ones(4, 3), torch.ones(4, 1))]),
    ]  # fmt: skip


WITH: dict[str, Callable[[], list[Handler]]] = {"alone": list, "guards": lambda: [Guards(every="1it")], "all": lookers}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantiz:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("handlers", WITH)
def test_batches_of_every_kind_of_tensor_are_trained_on(kind: str, handlers: str) -> None:
    make, product = KINDS[kind]
    data = [(make(), torch.zeros(4, 1)) for _ in range(3)]
    engine = Engine(Update.supervised(mse_loss, SGD), model=Model(product), seed=0, allow=["G02", "G11", "W51", "W84"])
    engine.attach(*WITH[handlers]())
    if handlers == "guards":
        engine.check(data)
    engine.run(data, max_epochs=1)
    model = Model(product)
    optimizer = SGD(model.parameters())
    for inputs, targets in data:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert_same(engine.model, model)
    assert not engine.findings.of_run().of("W09")


LOOKS: list[tuple[Any, str]] = [
    (calls.FirstCalls, "_see"),
    (calls.FirstCalls, "found"),
    (first_steps, "samples_of"),
    (first_steps, "leaves_of"),
    (first_steps, "problems_of"),
    (first_steps, "note_scale"),
    (epoch_checks.EpochChecks, "begin_epoch"),
    (epoch_checks.EpochChecks, "end_epoch"),
    (epoch_checks.EpochChecks, "finish"),
    (data_checks, "_report_samples"),
    (data_checks, "report_workers"),
    (data_checks, "_versions"),
    (data_checks, "check_steps"),
    *(
        (watch, name)
        for name in (
            *(
                "watch_started",
                "note_batches",
                "report_composition",
                "EpochChecks",
                "OwnSchedulers",
                "OwnLoads",
            ),
            *(
                "LateScores",
                "WorkerBatches",
                "FirstLosses",
                "report_left_in_training",
                "report_random_samples",
                "check_steps",
                "note_run",
            ),
        )
    ),
    (Guards, "_note_start"),
    (Guards, "_check_losses"),
    (Guards, "_check_batch"),
    (Guards, "_check_model"),
    (Guards, "_check_left_over"),
    (Guards, "_see_loss"),
    (Guards, "_see_gradients"),
    (Guards, "_see_before_step"),
    (Guards, "_see_step"),
    (Guards, "_check_end"),
]


def train(*handlers: Handler) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(mse_loss, SGD), model=nn.Linear(3, 1), seed=0)
    engine.attach(*handlers)
    engine.run([(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)], max_epochs=2)
    return engine


@pytest.mark.parametrize(("owner", "name"), LOOKS)
def test_a_look_that_raises_is_said_once_and_changes_nothing(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = train(Guards(every="1it"))
    called = []

    def fail(*arguments: Any, **options: Any) -> Any:
        called.append(name)
        raise LookupError("this cannot be read")

    monkeypatch.setattr(owner, name, fail)
    engine = train(Guards(every="1it"))
    assert called == [name]
    found = engine.findings.of_run().of("W09")
    assert [one.severity for one in found] == ["info"]
    assert "LookupError: this cannot be read" in found[0].sentence
    assert_same(engine.model, calm.model)


@pytest.mark.parametrize("place", range(len(AT_START)), ids=[look.__name__ for look in AT_START])
def test_a_look_at_the_start_that_raises_is_said_once_and_changes_nothing(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = train()

    def fail(engine: Engine) -> None:
        raise LookupError("this cannot be read")

    monkeypatch.setattr(watch, "AT_START", (*AT_START[:place], fail, *AT_START[place + 1 :]))
    engine = train()
    assert [one.severity for one in engine.findings.of_run().of("W09")] == ["info"]
    assert_same(engine.model, calm.model)


class Unreadable:
    """A batch that only the user's functions can use."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def refuse(self, *arguments: Any) -> Any:
        raise LookupError("not yours")

    __eq__ = __len__ = __bool__ = __iter__ = __getattr__ = refuse
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("handlers", WITH)
@pytest.mark.parametrize("place", ["batch", "input", "target", "output"])
def test_what_raises_when_it_is_looked_at_is_left_to_the_users_functions(handlers: str, place: str) -> None:
    x, y = torch.ones(4, 3), torch.zeros(4, 1)

    def forward(engine: Engine, batch: Any) -> Any:
        inputs = batch.inputs if place == "batch" else batch[0].inputs if place == "input" else batch[0]
        output = engine.model(inputs)
        return Unreadable(output) if place == "output" else output

    def loss(engine: Engine, output: Any, batch: Any) -> Tensor:
        targets = y if place == "batch" else batch[1].inputs if place == "target" else batch[1]
        return mse_loss(output.inputs if place == "output" else output, targets)

    inputs, targets = (Unreadable(one) if place == where else one for one, where in ((x, "input"), (y, "target")))
    batch = Unreadable(x) if place == "batch" else (inputs, targets)
    engine = Engine(Update(forward, loss, SGD), model=nn.Linear(3, 1), seed=0, allow=["G11", "W51"])
    model = copy.deepcopy(engine.model)
    attached = [one for one in WITH[handlers]() if not isinstance(one, Metrics)]  # which reads outputs and targets
    engine.attach(*attached)
    engine.run([batch] * 3, max_epochs=1)
    optimizer = SGD(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    assert_same(engine.model, model)


class Counted(Mapping[str, Any]):
    """A mapping for which it matters that it is read, such as one that loads."""

    reads = 0

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        self.reads += 1
        return self.content[key]

    def __iter__(self) -> Any:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


def test_batches_of_other_classes_are_not_read_before_they_are_due() -> None:
    data = [Counted({"x": torch.ones(4, 3), "y": torch.zeros(4, 1)}) for _ in range(3)]
    engine = Engine(Update.supervised(mse_loss, SGD, input="x", target="y"), model=nn.Linear(3, 1))
    seen: list[int] = []
    engine.connect(Events.EPOCH_STARTED, lambda engine: seen.extend(one.reads for one in data))
    engine.run(data, max_epochs=1)
    assert seen == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int64])
def test_labels_of_every_integer_type_are_looked_at(dtype: torch.dtype) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return -(output.log_softmax(1) * (target.long()[:, None] == torch.arange(3))).sum()

    engine = Engine(Update.supervised(loss, SGD), model=nn.Linear(3, 3), seed=0)
    engine.attach(Guards(every="1it", error=["G12"]))
    with pytest.raises(FindingError, match="G12: labels range from 1 to 3, but 3 classes"):
        engine.run([(torch.randn(4, 3), torch.tensor([1, 2, 3, 1]).to(dtype))], max_epochs=1)


class Refusing(Tensor):
    """A tensor whose class refuses what the user's functions do not need."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("is_complex", "numel"):
            raise LookupError("not yours")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("error", [[], ["G13"]])
def test_a_look_that_fails_is_a_warning_where_it_was_to_stop_the_run(error: list[str]) -> None:
    engine = Engine(Update.supervised(mse_loss, SGD), model=nn.Linear(3, 1), seed=0)
    engine.attach(Guards(every="1it", error=error))
    data = [((1e3 * torch.randn(4, 3)).as_subclass(Refusing), torch.zeros(4, 1)) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        engine.run(data, max_epochs=1)
    found = [one for one in engine.findings.of_run().of("W09") if one.severity == "warning"]
    assert ["may go undetected despite error=['G13']" in one.sentence for one in found] == [True] * bool(error)


def test_complex_parameters_are_looked_at() -> None:
    class Ignored(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    model = nn.Linear(3, 1, dtype=torch.complex64)
    engine = Engine(Update.supervised(lambda output, target: (output - target).abs().square().mean(), partial(Ignored, lr=0.1)),
                    model=model, allow=["W84"])  # fmt: skip
    engine.attach(Guards(every="1it", error=["G03"]))
    with pytest.raises(FindingError, match="G03"):
        engine.run([(torch.randn(4, 3, dtype=torch.complex64), torch.zeros(4, 1)) for _ in range(4)], max_epochs=1)


def test_a_finding_that_is_to_stop_the_run_still_does() -> None:
    engine = Engine(Update.supervised(mse_loss, SGD), model=nn.Sequential(nn.Linear(3, 1), nn.Dropout()), seed=0)
    engine.attach(Guards(every="1it", error=["G06"]))
    engine.connect(Events.ITERATION_STARTED, lambda engine: engine.model.eval())
    with pytest.raises(FindingError, match="G06"):
        engine.run([(torch.randn(4, 3), torch.randn(4, 1))] * 3, max_epochs=1)


class CompilesItself(nn.Module):
    """A model that compiles a part of its forward when it is first called, and notes the graphs."""

    def __init__(self, fullgraph: bool) -> None:
        super().__init__()
        self.layer, self.fullgraph = nn.Linear(3, 1), fullgraph
        self.graphs: list[int] = []
        self.compiled: Any = None

    def forward(self, inputs: Tensor) -> Any:
        if self.compiled is None:
            self.compiled = torch.compile(self.body, backend=self.note, fullgraph=self.fullgraph)
        return self.compiled(inputs)

    def body(self, inputs: Tensor) -> Tensor:
        return nn.functional.dropout(torch.sigmoid(self.layer(inputs)), 0.5, self.training)

    def note(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(len(graph.graph.nodes))
        return graph.forward


def graphs_of_a_plain_loop(fullgraph: bool, trains: bool, data: list[Any]) -> list[int]:
    torch._dynamo.reset()
    model = CompilesItself(fullgraph).train(trains)
    optimizer = SGD(model.parameters())
    for inputs, targets in data:
        with torch.set_grad_enabled(trains):
            loss = mse_loss(model(inputs), targets)
        if trains:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch._dynamo.reset()
    return model.graphs


@needs_torch(2, 9, why="a mode that leaves before something is compiled")
@pytest.mark.moderate
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
def test_a_function_that_compiles_itself_has_the_graphs_of_a_plain_loop(
    fullgraph: bool, trains: bool, guarded: bool
) -> None:
    data = [(torch.ones(4, 3), torch.zeros(4, 1)) for _ in range(3)]
    expected = graphs_of_a_plain_loop(fullgraph, trains, data)
    model = CompilesItself(fullgraph)
    update = Update.supervised(mse_loss, SGD)
    engine = Engine(update if trains else update.evaluation(), model=model, seed=0, allow=["G11"])
    engine.attach(*([Guards(every="1it")] if guarded else []), Metrics(loss=Average(mse_loss)))
    engine.run(data, max_epochs=1 if trains else None)
    assert model.graphs == expected
    assert len(expected) == 1


def test_a_mode_leaves_from_between_others_when_something_is_compiled() -> None:
    below, mode, above = dropout.ActiveDropout(), dropout.EagerMode(), dropout.ActiveDropout()
    with below, mode, above:
        mode._leave(None)
        assert _get_current_function_mode_stack() == [below, above]
        nn.functional.dropout(torch.ones(3), 0.5)
    assert _get_current_function_mode_stack() == []
    assert below.seen
    assert above.seen
