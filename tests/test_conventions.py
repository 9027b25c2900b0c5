"""Conventions of other libraries, each by the number that it has in the list of what was not met."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from signalfire import Engine, Events, Handler, Update
from signalfire.authoring.batches import map_leaves, samples_in
from signalfire.authoring.plain import plain_mapping
from signalfire.core.overrides import Override
from signalfire.handlers import (
    Average,
    Checkpoint,
    DeviceTransfer,
    DistributedDataParallel,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    Metrics,
    MixedPrecision,
    OptimizerStatistics,
    Validation,
)
from signalfire.testing import fingerprint
from tests import kit

DATA = kit.batches(6)
SGD = partial(torch.optim.SGD, lr=0.1)


def resumed(build: Any, data: Any = DATA, cut: int = 8, epochs: int = 3) -> tuple[Engine, Engine]:
    """A run in one piece, and one that a state of its middle continues."""
    whole = build()
    whole.run(data, max_epochs=epochs)
    states: list[Any] = []
    first = build()
    first.connect(Events.ITERATION_COMPLETED(once=cut), lambda engine: states.append(engine.state_dict()))
    first.run(data, max_epochs=epochs)
    again = build()
    again.load_state_dict(states[0])
    again.run(data, max_epochs=epochs)
    return whole, again


def test_f1_a_loss_with_parameters_is_trained() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output * self.scale, target)

    engine = kit.build(kit.linear(5, 1), loss=Scaled())
    engine.run(DATA, max_epochs=1)
    loss = engine.modules["loss"]
    assert isinstance(loss, Scaled)
    assert loss.scale.item() != 1


class MomentaByName(torch.optim.SGD):
    """A state_dict of a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": {str(i): s["momentum_buffer"] for i, s in enumerate(self.state.values())}}

    def load_state_dict(self, state: Any) -> None:
        for i, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter]["momentum_buffer"] = state["momenta"][str(i)].clone()


def test_f3_a_state_of_a_form_of_its_own_is_saved_and_loaded_as_the_optimizer_gives_it() -> None:
    def build() -> Engine:
        return kit.build(kit.linear(5, 1), optimizer=partial(MomentaByName, lr=0.1, momentum=0.9))

    whole, again = resumed(build)
    assert fingerprint(again) == fingerprint(whole)


def test_f4_a_url_is_refused() -> None:
    with pytest.raises(ValueError, match="a URL is not a path"):
        Checkpoint("s3://bucket/run")


class MovedInPlace:
    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair = pair

    def to(self, device: Any) -> None:
        self.pair = (self.pair[0].to(device), self.pair[1].to(device))

    def __getitem__(self, place: int) -> Tensor:
        return self.pair[place]

    def __len__(self) -> int:
        return len(self.pair[0])


def test_f5_a_batch_that_moves_in_place_is_taken() -> None:
    engine = kit.build(kit.linear(5, 1), DeviceTransfer("cpu"))
    engine.run([MovedInPlace(pair) for pair in DATA], max_epochs=1)
    expected = kit.build(kit.linear(5, 1))
    expected.run(DATA, max_epochs=1)
    kit.assert_same(engine.model, expected.model)


def test_f12_labels_of_texts_are_no_padding() -> None:
    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embedding = nn.Embedding(20, 4, padding_idx=0)
            self.head = nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Any:
            return self.head(self.embedding(tokens).mean(1))

    tokens = torch.arange(1, 17).reshape(4, 4)
    engine = kit.build(Texts(), loss=F.cross_entropy)  # a warning is an error here: most labels are 0
    engine.run([(tokens, torch.tensor([0, 0, 0, 1]))] * 2, max_epochs=1)


@attrs.define
class Attrs:
    x: Tensor
    y: Tensor


def test_f6_f7_batches_of_attrs_are_moved_and_counted() -> None:
    batch: Any = Attrs(torch.ones(3, 2), torch.ones(3))  # type: ignore[call-arg,unused-ignore]
    moved = map_leaves(lambda leaf: leaf.to("meta"), batch)
    assert (type(moved), moved.x.device.type) == (Attrs, "meta")
    assert samples_in(batch) == 3
    assert samples_in(SimpleNamespace(num_graphs=7)) == 7


def test_f9_the_number_of_processes_is_known_before_the_handler_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert DistributedDataParallel().processes.world_size == 4


def test_f11_a_state_dict_of_the_data_that_raises_is_reported_once_and_the_run_goes_on() -> None:
    class Prepared(list[Any]):
        def state_dict(self) -> Any:
            raise AttributeError("'DataLoader' object has no attribute 'state_dict'")

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    engine = kit.build(kit.linear(5, 1))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.state_dict())
    with pytest.warns(UserWarning, match=r"cannot save its position, because its state_dict\(\) raised") as caught:
        engine.run(Prepared(DATA), max_epochs=1)
    assert len(caught) == 1


class Total:
    """A schedule that takes the length of the run under another library's name of it."""

    def __init__(self, optimizer: Any, total: int) -> None:
        self.optimizer, self.total, self.count = optimizer, total, 0
        self.base = optimizer.param_groups[0]["lr"]

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.base / (1 + self.count / self.total)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def linear_hf(optimizer: Any, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1) -> Total:
    return Total(optimizer, num_training_steps - num_warmup_steps)


def stable_hf(
    optimizer: Any, num_warmup_steps: int, num_training_steps: int | None = None, num_stable_steps: int | None = None
) -> Total:
    assert (num_training_steps is None) != (num_stable_steps is None)
    return Total(optimizer, num_training_steps or 100)


def cosine_timm(optimizer: Any, t_initial: int, lr_min: float = 0.0) -> Total:
    return Total(optimizer, t_initial)


def test_f13_the_length_of_the_run_is_filled_in_by_the_names_of_other_libraries() -> None:
    for factory, total in (
        (partial(linear_hf, num_warmup_steps=2), 16),
        (partial(stable_hf, num_warmup_steps=0), 18),
        (partial(stable_hf, num_warmup_steps=0, num_stable_steps=3), 100),
        (partial(cosine_timm, lr_min=0.1), 18),
    ):
        engine = kit.build(kit.linear(5, 1), LRScheduling(factory))
        engine.run(DATA, max_epochs=3)
        assert engine.find(LRScheduling).scheduler.total == total


class ByMetric:
    """Stepped with a metric, and no subclass of ReduceLROnPlateau."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.seen: list[float] = []

    def step(self, metrics: float) -> None:
        self.seen.append(metrics)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + len(self.seen) * metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: Any) -> None:
        self.seen = list(state["seen"])


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_f14_a_scheduler_whose_step_requires_a_metric_is_stepped_with_it() -> None:
    def build() -> Engine:
        model = kit.linear(5, 1)
        engine = kit.build(model, LRScheduling(ByMetric, monitor="loss"))
        engine.attach(Validation(kit.evaluator_of(model), DATA[:2]))
        return engine

    theirs = kit.linear(5, 1)
    optimizer = SGD(theirs.parameters())
    scheduler = ByMetric(optimizer)
    for _ in range(3):
        for x, y in DATA:
            F.mse_loss(theirs(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            scheduler.step(sum(F.mse_loss(theirs(x), y).item() for x, y in DATA[:2]) / 2)
    whole, again = resumed(build)
    assert whole.find(LRScheduling).scheduler.seen == pytest.approx(scheduler.seen, rel=1e-6)
    assert fingerprint(again) == fingerprint(whole)
    for one, message in (
        ({}, "pass the name of the metric as monitor="),
        ({"factory": CosineAnnealingLR}, "omit monitor="),
    ):
        factory = one.get("factory", ByMetric)
        schedule = LRScheduling(factory, **({"monitor": "loss"} if one else {}))  # type: ignore[arg-type]
        engine = kit.build(kit.linear(5, 1), schedule, Metrics(loss=Average()))
        with pytest.raises(ValueError, match=message):
            engine.run(DATA, max_epochs=1)


class Free(torch.optim.SGD):
    """Trains at other weights than those it evaluates: a mean of them, which `eval` puts in place."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["train_mode"], group["k"] = False, 0

    def _swap(self, weight: float, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                group["train_mode"] = train
                for parameter in group["params"]:
                    if "mean" in self.state[parameter]:
                        parameter.data.lerp_(self.state[parameter]["mean"], weight)

    def train(self) -> None:
        self._swap(1 - 1 / 0.1, train=True)

    def eval(self) -> None:
        self._swap(0.9, train=False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("call optimizer.train() first")
        super().step()
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", parameter.detach().clone())
                mean.lerp_(parameter.detach(), 1 / group["k"])


def free() -> Engine:
    model = kit.mlp(5, 8, 1)
    engine = kit.build(model, optimizer=partial(Free, lr=0.1))
    engine.attach(Validation(kit.evaluator_of(model), DATA[:2]))
    return engine


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_f15_optimizers_with_train_and_eval_are_put_in_the_right_mode(tmp_path: Path) -> None:
    theirs = kit.mlp(5, 8, 1)
    optimizer = Free(theirs.parameters(), lr=0.1)
    optimizer.train()
    measured = []
    for _ in range(3):
        for x, y in DATA:
            F.mse_loss(theirs(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = {name: value.clone() for name, value in theirs.state_dict().items()}
        optimizer.eval()
        with torch.no_grad():
            measured.append(sum(F.mse_loss(theirs(x), y).item() for x, y in DATA[:2]) / 2)
        evaluated = {name: value.clone() for name, value in theirs.state_dict().items()}
        optimizer.train()
        theirs.load_state_dict(trained)
    values: list[float] = []
    engine = free()
    engine.connect(Events.EVALUATION_COMPLETED, lambda engine: values.append(engine.state.metrics["loss"]))
    engine.run(DATA, max_epochs=3)
    kit.assert_same(engine.model, theirs)
    assert values == pytest.approx(measured, rel=1e-6)
    kit.assert_same(engine.weights()["model"], evaluated)
    kit.assert_same(engine.model, theirs)
    whole, again = resumed(free)
    assert fingerprint(again) == fingerprint(whole)


@dataclass
class Inner:
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.1


class Kind(Enum):
    SMALL = "small"
    OBJECT = object()


@dataclass
class Config:
    folder: Path = Path("runs")
    optimizer: Inner = field(default_factory=Inner)
    layers: dict[int, str] = field(default_factory=lambda: {1: "a", 2: "b"})
    rate: Any = field(default_factory=lambda: np.float32(0.5))
    seed: Any = field(default_factory=lambda: np.int64(3))
    kind: Kind = Kind.SMALL
    names: set[str] = field(default_factory=lambda: {"b", "a"})
    dtype: Any = torch.bfloat16


PLAIN = {
    "folder": "runs", "optimizer": {"betas": [0.9, 0.999], "decay": 0.1}, "layers": {"1": "a", "2": "b"}, "rate": 0.5, "seed": 3,
    "kind": "small", "names": ["a", "b"], "dtype": "torch.bfloat16",
}  # fmt: skip


def test_f18_configurations_are_stored_and_read_back_as_plain_values(tmp_path: Path) -> None:
    for number, config in enumerate(
        (Config(), argparse.Namespace(**vars(Config())), SimpleNamespace(**vars(Config())))
    ):
        kit.build(kit.linear(5, 1), Checkpoint(tmp_path / str(number), hyperparameters=config)).run(DATA, max_epochs=1)
        (version,) = (tmp_path / str(number)).iterdir()
        assert Checkpoint.hyperparameters(version) == PLAIN
        assert json.loads(json.dumps(PLAIN)) == PLAIN
        engine = kit.build(kit.linear(5, 1))
        engine.log.hyperparameters(config)
        given = engine.log.given
        assert (given["folder"], given["optimizer/decay"], given["layers/1"], given["seed"]) == ("runs", 0.1, "a", 3)
        assert all(type(value) in (bool, int, float, str) for value in given.values())
    assert plain_mapping("f(", {"a": attrs.make_class("A", ["x"])(x=np.arange(3)), "k": Kind.OBJECT, None: nn.Linear}) == {
        "a": {"x": [0, 1, 2]}, "k": "OBJECT", "None": "torch.nn.modules.linear.Linear"
    }  # fmt: skip
    for wrong, message in (
        ({"model": nn.Linear(1, 1)}, r"Checkpoint\(hyperparameters\['model'\]=Linear.*not a plain value"),
        ({"data": np.zeros(5000)}, "ndarray of 5000 numbers.*this is data"),
        ({1: 0, "1": 2}, "two keys become '1' when converted to str"),
        ([1], "expected a mapping, or an object with fields"),
        ({"rate": float("nan")}, "only finite numbers"),
    ):
        with pytest.raises(TypeError, match=message):
            Checkpoint(tmp_path, hyperparameters=wrong)


def test_f19_a_function_may_return_several_values_and_take_its_inputs_by_keyword() -> None:
    engine = kit.build(kit.linear(5, 1))
    engine.attach(
        Metrics(
            m=lambda output, target: {"a": F.mse_loss(output, target).item(), "b": 2.0},
            inputs=lambda engine: {"output": engine.state.update.output, "target": engine.state.batch[1]},
        )
    )
    metrics = engine.run(DATA, max_epochs=1).metrics
    assert metrics["m/b"] == 2.0
    assert metrics["m/a"] > 0


class Relative(torch.optim.SGD):
    """A rate of None, as Adafactor's with relative steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)


def test_f20_a_rate_of_none_is_left_out_by_loggers(tmp_path: Path) -> None:
    from signalfire.handlers import CSVLogger, ProgressBar, TensorBoardLogger

    engine = kit.build(kit.linear(5, 1), optimizer=Relative)
    with open(tmp_path / "bar", "w") as file:
        engine.attach(
            CSVLogger(tmp_path / "log.csv", every="1it"),
            TensorBoardLogger(tmp_path / "board"),
            OptimizerStatistics(every="1step"),
            ProgressBar(file=file),
        )
        engine.run(DATA, max_epochs=1)
    expected = kit.build(kit.linear(5, 1))
    expected.run(DATA, max_epochs=1)
    kit.assert_same(engine.model, expected.model)


def test_a_rate_that_is_a_tensor_trains_is_scheduled_and_resumes() -> None:
    def build() -> Engine:
        optimizer = partial(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False)
        return kit.build(kit.linear(5, 1), LRScheduling(CosineAnnealingLR), optimizer=optimizer)

    theirs = kit.linear(5, 1)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=torch.tensor(0.01), foreach=False)
    schedule = CosineAnnealingLR(optimizer, T_max=18)
    for _ in range(3):
        for x, y in DATA:
            F.mse_loss(theirs(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    whole, again = resumed(build)
    kit.assert_same(whole.model, theirs)
    assert fingerprint(again) == fingerprint(whole)


def test_f21_numbers_of_numpy_and_names_of_precisions_are_accepted() -> None:
    engine = Engine(Update.supervised(F.mse_loss, SGD), model=kit.linear(5, 1), seed=np.int64(3))  # type: ignore[arg-type]
    engine.attach(GradientAccumulation(np.int64(2)))  # type: ignore[arg-type]
    engine.run(DATA, max_epochs=np.int64(1))  # type: ignore[arg-type]
    assert engine.updates[0].steps == 3
    kinds: Any = (torch.bfloat16, "bfloat16", "bf16-mixed")
    assert {MixedPrecision(kind).dtype for kind in kinds} == {torch.bfloat16}


class FunctionalGradients(Handler):
    """Replaces the computation of gradients by torch.func, as the guide says how."""

    trains = True

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.GRADIENTS, self.compute, by=self)

    def compute(self, engine: Engine, update: Any, compute: Any) -> None:
        inputs, targets = engine.state.batch
        parameters = dict(engine.model.named_parameters())

        def loss_of(values: Any) -> Any:
            output = torch.func.functional_call(engine.model, values, (inputs,))
            return F.mse_loss(output, targets), output

        gradients, (loss, output) = torch.func.grad_and_value(loss_of, has_aux=True)(
            {name: value.detach() for name, value in parameters.items()}
        )
        for name, parameter in parameters.items():
            if parameter.grad is None:
                parameter.grad = gradients[name]
            else:
                parameter.grad += gradients[name]
        update.output, update.raw_loss, update.backward_loss = output, loss, loss
        update.window.held += 1


def test_f23_a_handler_that_computes_gradients_by_itself_trains_as_a_plain_loop() -> None:
    theirs = kit.linear(5, 1)
    optimizer = SGD(theirs.parameters())
    for window in kit.windows(DATA, 4):
        for x, y in window:
            F.mse_loss(theirs(x), y).backward()
        kit.average_gradients(theirs, len(window))
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    engine = kit.build(kit.linear(5, 1), FunctionalGradients(), GradientAccumulation(4), GradientClipping(max_norm=0.5))
    engine.run(DATA, max_epochs=1)
    kit.assert_same(engine.model, theirs)
    text = (Path(__file__).parent.parent / "examples" / "guide" / "writing_a_handler.md").read_text()
    assert "update.window.held" in text
