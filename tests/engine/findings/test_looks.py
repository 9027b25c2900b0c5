"""What only looks for mistakes never ends a run, and never changes one: whatever the batches are, and whatever fails in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, FindingError, Handler, Update
from signalfire.findings import calls, data_checks, epoch_checks, first_steps
from signalfire.handlers import Guards
from tests.kit import assert_same

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


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantiz:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guarded", [False, True])
def test_batches_of_every_kind_of_tensor_are_trained_on(kind: str, guarded: bool) -> None:
    make, product = KINDS[kind]
    data = [(make(), torch.zeros(4, 1)) for _ in range(3)]
    engine = Engine(Update.supervised(mse_loss, SGD), model=Model(product), seed=0, allow=["G02", "G11", "W84"])
    if guarded:
        engine.attach(Guards(every="1it"))
        engine.check(data)
    engine.run(data, max_epochs=1)
    model = Model(product)
    optimizer = SGD(model.parameters())
    for inputs, targets in data:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert_same(engine.model, model)


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
    (data_checks, "_report_workers"),
    (data_checks, "_report_single_samples"),
    (data_checks, "_versions"),
    (data_checks, "check_steps"),
    (Guards, "_check_losses"),
    (Guards, "_check_batch"),
    (Guards, "_check_model"),
    (Guards, "_see_gradients"),
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


class Unreadable:
    """A batch that only the user's functions can use."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def refuse(self, *arguments: Any) -> Any:
        raise LookupError("not yours")

    __eq__ = __len__ = __bool__ = __iter__ = __getattr__ = refuse
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("handlers", [(), (Guards,)], ids=["alone", "guarded"])
def test_a_batch_whose_methods_raise_is_left_to_the_users_functions(handlers: tuple[type[Handler], ...]) -> None:
    def function(engine: Engine, batch: Any) -> Tensor:
        return engine.model(batch.inputs).square().mean()  # type: ignore[no-any-return]

    engine = Engine(Update.from_function(function, SGD), model=nn.Linear(3, 1), seed=0)
    engine.attach(*(make() for make in handlers))
    engine.run([Unreadable(torch.ones(4, 3)) for _ in range(3)], max_epochs=1)
    assert engine.updates[0].steps == 3


def test_a_finding_that_is_to_stop_the_run_still_does() -> None:
    engine = Engine(Update.supervised(mse_loss, SGD), model=nn.Linear(3, 1), seed=0)
    engine.attach(Guards(every="1it", error=["G06"]))
    engine.connect(Events.ITERATION_STARTED, lambda engine: engine.model.eval())
    with pytest.raises(FindingError, match="G06"):
        engine.run([(torch.randn(4, 3), torch.randn(4, 1))] * 3, max_epochs=1)
