"""What looks wrong about an evaluation, and what does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

from signalfire import Engine, Events, FindingWarning, Update
from signalfire.handlers import EMA, EarlyStopping, Validation
from tests.kit import SGD, batches, build, evaluator_of, linear, mlp


def network(*between: nn.Module) -> nn.Sequential:
    return mlp(5, 8, 1, *between)


def run_with(model: nn.Module, other: nn.Module, copying: Callable[[], object], **options: Any) -> Engine:
    engine = build(model, Validation(evaluator_of(other), batches(2), **options))
    engine.connect(Events.EVALUATION_STARTED, lambda engine: copying() and None)
    engine.run(batches(), max_epochs=2)
    return engine


def test_an_evaluator_over_another_model_is_reported_once_a_run() -> None:
    with pytest.warns(FindingWarning, match="W51: the evaluator .* shares no parameters") as caught:
        run_with(network(), network(), lambda: None)
    assert len(caught) == 1


def test_weights_that_are_copied_or_averaged_by_the_user_are_fine() -> None:
    model, other = network(), network()
    run_with(model, other, lambda: other.load_state_dict(model.state_dict()))

    def average() -> None:  # as many loops keep an average: without a trace in the tensors' versions
        for one, weight in zip(other.parameters(), model.parameters(), strict=True):
            one.data.mul_(0.9).add_(weight.data, alpha=0.1)

    run_with(model, other, average, at_start=True)


def test_a_part_of_the_model_a_wrapped_one_and_one_without_weights_are_fine() -> None:
    model = network()
    run_with(model, nn.Sequential(model[0], nn.Linear(8, 1)), lambda: None)
    run_with(model, nn.Sequential(model, nn.Identity()), lambda: None)
    run_with(model, nn.AdaptiveAvgPool1d(1), lambda: None)


def test_a_copy_that_is_made_before_the_training_is_reported_with_its_first_later_evaluation() -> None:
    model = network()
    with pytest.warns(FindingWarning, match="W51"):
        run_with(model, copy.deepcopy(model), lambda: None, at_start=True)


def test_an_evaluator_that_something_listens_to_measures_something() -> None:
    model = network()
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    engine = build(model)
    with pytest.warns(FindingWarning, match="W53: the evaluator .* measures nothing"):
        engine.evaluate(evaluator, batches(2))
    with evaluator.connect(Events.LOSS_COMPUTED, lambda engine: None):
        engine.evaluate(evaluator, batches(2))
    own = Engine(Update.from_function(lambda engine, batch: None), model=model)
    engine.evaluate(own, batches(2))


def averaged() -> tuple[Engine, Engine]:
    model = network()
    engine = build(model, EMA(0.5))
    engine.run(batches(), max_epochs=1)
    return engine, evaluator_of(model)


def test_averages_that_are_left_out_are_reported() -> None:
    engine, evaluator = averaged()
    with pytest.warns(FindingWarning, match=r"W56: run\(\) on an evaluator measures .*'ema'.*trainer.evaluate"):
        evaluator.run(batches(2))
    assert engine.handlers["ema"].enabled


@pytest.mark.parametrize("way", ["detached", "disabled", "gone", "loaded", "copied", "inside", "another model"])
def test_averages_that_do_not_count_are_not(way: str) -> None:
    engine, evaluator = averaged()
    if way == "detached":
        engine.detach("ema")
    elif way == "disabled":
        engine.handlers["ema"].enabled = False
    elif way == "gone":
        del engine
    elif way == "loaded":
        engine.load_weights(engine.weights())
    elif way == "copied":
        engine.model.load_state_dict(engine.weights()["model"])
    elif way == "inside":
        engine.evaluate(evaluator, batches(2))
        return
    elif way == "another model":
        evaluator = evaluator_of(network())
    evaluator.run(batches(2))


def test_averages_of_weights_that_were_trained_further_by_another_engine_do_not_count() -> None:
    engine, evaluator = averaged()
    build(engine.model).run(batches(), max_epochs=1)
    evaluator.run(batches(2))
    assert engine.handlers["ema"].enabled


@pytest.mark.parametrize(("size", "drop_last", "dropped"), [(101, True, 1), (8, True, 0), (9, False, 0)])
def test_samples_that_a_loader_leaves_out_are_listed(size: int, drop_last: bool, dropped: int) -> None:
    evaluator = evaluator_of(network())
    data = TensorDataset(torch.zeros(size, 5), torch.zeros(size, 1))
    evaluator.run(DataLoader(data, batch_size=4, drop_last=drop_last))
    found = [one.sentence for one in evaluator.findings.of_run()]
    assert len(found) == bool(dropped)
    assert all(f"the last {dropped} of {size} samples" in one for one in found)


def test_the_best_weights_that_are_put_back_are_not_averages_that_are_left_out() -> None:
    model = network()
    stopping = EarlyStopping("loss", mode="min", patience=1, restore_best=True)
    engine = build(model, EMA(0.5), stopping, Validation(evaluator_of(model), batches(2)))
    engine.run(batches(), max_epochs=2)
    evaluator_of(model).run(batches(2))


def test_training_mode_in_an_evaluation_names_the_modules() -> None:
    model = network(nn.Dropout())
    evaluator = evaluator_of(model)
    evaluator.connect(Events.FORWARD_STARTED, lambda engine: model[1].train() and None)
    with pytest.warns(FindingWarning, match=r"W57: the module 'model.1' was in training mode"):
        evaluator.run(batches(2))
    assert model[1].training  # as before the run


def test_an_evaluator_reports_to_the_trainer_that_runs_it() -> None:
    model = network(nn.Dropout())
    evaluator = evaluator_of(model)
    evaluator.connect(Events.FORWARD_STARTED, lambda engine: model.train() and None)
    engine = build(model, Validation(evaluator, batches(2)), allow=["W57"])
    engine.run(batches(), max_epochs=2)
    assert engine.state.iteration == 12


class Drawing(Dataset[Any]):
    """Draws its samples from NumPy's generator."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.random.randn(5)).float(), torch.zeros(1)


class Seeding(Drawing):
    """Seeds the generator for each sample, which is the same each time."""

    def __getitem__(self, index: int) -> Any:
        np.random.seed(index)
        return super().__getitem__(index)


@pytest.mark.parametrize(("data", "reported"), [(Drawing(), True), (Seeding(), False)])
def test_samples_of_a_data_set_that_seeds_numpy_itself_are_no_random_ones(data: Dataset[Any], reported: bool) -> None:
    evaluator = evaluator_of(network())
    with pytest.warns(FindingWarning, match="W50: reading .* draws random numbers") if reported else nullcontext():
        evaluator.run(DataLoader(data, 2))


@pytest.mark.parametrize("kind", ["teacher", "average"])
def test_another_model_that_is_evaluated_on_purpose_is_listed(kind: str) -> None:
    model = network()
    other = network().requires_grad_(False) if kind == "teacher" else AveragedModel(model)
    engine = run_with(model, other, lambda: None, prefix=f"{kind}_")
    assert {one.severity for one in engine.findings.of_run().of("W51")} == {"info"}


class Lazy(nn.Module):
    """Makes a layer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(5, 5)
        self.second: nn.Module | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.second is None:
            self.second = linear(5, 1)
        return self.second(self.first(inputs))  # type: ignore[no-any-return]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs if self.training else 2 * inputs)  # type: ignore[no-any-return]


def test_layers_that_know_no_mode_may_be_in_either_in_an_evaluation() -> None:
    evaluator_of(Lazy()).run(batches(2))
    for model, effect in ((network(nn.ReLU()), None), (network(nn.BatchNorm1d(8)), "batch statistics were used"),
                          (network(nn.Dropout()), "dropout was active"), (Branching(), "training-mode code ran")):  # fmt: skip
        evaluator = evaluator_of(model)
        evaluator.connect(Events.EPOCH_STARTED, lambda engine: engine.model.train() and None)
        with nullcontext() if effect is None else pytest.warns(FindingWarning, match=f"so {effect}"):
            evaluator.run(batches(2))


class Measured(TorchFunctionMode):
    """How often a quantile is taken."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is Tensor.quantile
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("evaluates", [False, True])
def test_first_inputs_are_measured_once_and_only_for_an_evaluation(evaluates: bool) -> None:
    data, held_out = ([(torch.randn(32, 4), torch.zeros(32, 1))] for _ in range(2))
    engine = build(linear(4, 1))
    if evaluates:
        engine.attach(Validation(evaluator_of(engine.model), held_out))
    with Measured() as measured:
        engine.run(data, max_epochs=1)
    assert measured.count == 2 * evaluates, "the first inputs of the training, and of the evaluation"


@pytest.mark.parametrize(("factor", "shift", "reported"), [(1.0, 0.0, False), (100.0, 0.0, True), (1.0, 200.0, True)])
def test_few_large_inputs_are_not_taken_for_another_scale(factor: float, shift: float, reported: bool) -> None:
    model = linear(4, 1)
    trained, evaluated = (torch.randn(32, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    evaluated[0, 0] = 500.0
    engine = build(model, Validation(evaluator_of(model), [(factor * evaluated + shift, torch.zeros(32, 1))]))
    with pytest.warns(FindingWarning, match="W60") if reported else nullcontext():
        engine.run([(trained, torch.zeros(32, 1))], max_epochs=1)


def test_the_scale_of_sparse_inputs_is_not_measured() -> None:
    data = [(torch.eye(8).to_sparse(), torch.ones(8, 1))]

    def step(engine: Engine, batch: Any) -> Tensor:
        return nn.functional.mse_loss(engine.model(batch[0].to_dense()), batch[1])

    engine = Engine(Update.from_function(step, SGD), model=linear(8, 1))
    engine.run(data, max_epochs=1)
    assert not engine.findings.of_run().of("W09")


def test_modes_that_the_first_forward_does_not_have_are_not_reported() -> None:
    model = network(nn.Dropout(), nn.BatchNorm1d(8))

    def forward(engine: Engine, batch: Any) -> Tensor:  # as a hand-written loop does
        engine.model.eval()
        output: Tensor = engine.model(batch[0])
        engine.model.train()
        return output

    Engine(Update(forward), model=model).run(batches(2))
    evaluator = evaluator_of(model)
    evaluator.connect(Events.EPOCH_COMPLETED, lambda engine: model.train() and None)
    evaluator.run(batches(2))
    evaluator = evaluator_of(network(nn.BatchNorm1d(8, track_running_stats=False)))
    evaluator.connect(Events.EPOCH_STARTED, lambda engine: engine.model.train() and None)
    evaluator.run(batches(2))


class Sampled(nn.Dropout):
    """Stays in training mode."""

    def train(self, mode: bool = True) -> Sampled:
        return super().train(True)


@pytest.mark.parametrize("kind", [nn.Dropout, Sampled])
def test_dropout_that_is_put_in_training_mode_for_the_forward_alone_or_stays_in_it_is_listed(kind: Any) -> None:
    model = network(kind())

    def sample(engine: Engine, batch: Any) -> Tensor:
        model[1].train()
        outputs = torch.stack([engine.model(batch[0]) for _ in range(3)])
        model[1].eval()
        return outputs.mean(0)

    evaluator = Engine(Update(sample), model=model)
    evaluator.run(batches(2))
    [found] = evaluator.findings.of_run().of("W57")
    assert found.severity == "info"
    assert found.sentence.startswith("the module 'model.1' was in training mode in the first batch of an evaluation")


def test_an_evaluator_that_calls_the_trained_model_measures_it() -> None:
    generator = linear(5, 1)
    engine = build(generator)
    judge = Engine(Update(lambda engine, batch: engine.model(generator(batch[0]))), model=linear(1, 1))
    judge.connect(Events.ITERATION_COMPLETED, lambda engine: None)
    engine.attach(Validation(judge, batches(2), prefix="judged_"))
    engine.run(batches(), max_epochs=2)
    assert not engine.findings.of_run().of("W51")


STORED: list[Tensor] = []


def storing_loss(output: Tensor, target: Tensor) -> Tensor:
    STORED.append(output)
    return nn.functional.mse_loss(output, target)


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def test_a_hook_or_a_loss_of_the_users_own_may_store_what_it_sees() -> None:
    model = network()
    engine = build(model)
    engine.evaluate(Engine(Update.supervised(storing_loss), model=model), batches(2))
    with pytest.warns(FindingWarning, match="W53: .* measures nothing, because"):
        engine.evaluate(Engine(Update.supervised(plain_loss), model=model), batches(2))
    hook = model[0].register_forward_hook(lambda module, inputs, output: None)
    engine.evaluate(Engine(Update.supervised(plain_loss), model=model), batches(2))
    hook.remove()


def test_only_averages_of_what_is_evaluated_count() -> None:
    model = network(nn.ReLU())
    model[0].requires_grad_(False)
    engine = build(model, EMA(0.5))
    engine.run(batches(), max_epochs=1)
    Engine(Update.prediction(), model=model[:2]).run(batches(2))
    with pytest.warns(FindingWarning, match="W56"):
        Engine(Update.prediction(), model=model[1:]).run([torch.randn(4, 8)])
    assert engine.handlers["ema"].enabled


@pytest.mark.parametrize(("shuffle", "what"), [(True, "leaves out 4 of 84"), (False, "leaves out the last 4 of 84")])
def test_a_shuffled_loader_leaves_out_other_samples_than_the_last(shuffle: bool, what: str) -> None:
    evaluator = evaluator_of(network())
    data = TensorDataset(torch.zeros(84, 5), torch.zeros(84, 1))
    with pytest.warns(FindingWarning, match=what):
        evaluator.run(DataLoader(data, batch_size=8, shuffle=shuffle, drop_last=True))
    engine = build(linear(5, 1))
    engine.run(DataLoader(data, batch_size=80, shuffle=shuffle, drop_last=True), max_epochs=1)
    assert not engine.findings.of_run().of("W59")
    engine.run(DataLoader(data, batch_size=70, shuffle=shuffle, drop_last=True), max_epochs=2)
    [found] = engine.findings.of_run().of("W59")
    assert found.sentence.startswith(f"each epoch {what.replace('4 of 84', '14 of 84')} samples")


@pytest.mark.parametrize(("place", "reported"), [("x", False), ("time", True)])
def test_the_scale_of_inputs_is_that_of_the_place_where_they_are(place: str, reported: bool) -> None:
    def part(begin: float) -> Any:
        return [{"time": torch.rand(16, 5) + begin, "x": torch.randn(16, 5), "y": torch.zeros(16, 1)}]

    update = Update.supervised(nn.functional.mse_loss, torch.optim.SGD, lr=1e-6, input=place, target="y")
    engine = Engine(update, model=linear(5, 1), seed=0)
    engine.attach(Validation(part(100.0)))
    with pytest.warns(FindingWarning, match="but the first training inputs") if reported else nullcontext():
        engine.run(part(0.0), max_epochs=1)
