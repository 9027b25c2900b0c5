"""The rules of `Engine.check` that depend on details; each code has a case in `tests.mistakes.composition`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, TensorDataset

from signalfire import Engine, Events, Update
from signalfire.handlers import EarlyStopping, Freezing, GradientAccumulation, Guards, TruncatedBPTT, Validation
from tests.kit import SGD, batches, build, evaluator_of, mlp


def codes(engine: Engine, *data: Any, **bounds: Any) -> dict[str, str]:
    return {one.code: one.severity for one in engine.check(*data, **bounds)}


class Unsized(BatchSampler):
    """Batches in an order of their own, whose number is not known."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_batch_sampler_of_ones_own_shuffles_as_it_likes() -> None:
    samples = TensorDataset(torch.randn(8, 5), torch.randn(8, 1))
    own = DataLoader(samples, batch_sampler=Unsized(SequentialSampler(samples), 4, drop_last=False))
    assert codes(build(mlp(5, 8, 1)), own) == {}
    assert codes(build(mlp(5, 8, 1)), DataLoader(samples, 4)) == {"C13": "info"}


def test_adapters_between_frozen_layers_are_only_listed() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(4)), nn.Linear(5, 1))
    for place in (0, 2, 4):
        model[place].requires_grad_(False)
    assert codes(build(model)) == {"C09": "info"}


class Distilling(nn.Module):
    def __init__(self, *, copied: bool) -> None:
        super().__init__()
        self.student = mlp(5, 8, 1, nn.BatchNorm1d(8))
        self.teacher = copy.deepcopy(self.student) if copied else mlp(5, 16, 1)
        self.teacher.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.student(inputs)
        return output


def test_a_teacher_is_frozen_and_comes_after_nothing() -> None:
    """One that is built like its student, or a part of a ModuleDict, of which the order says nothing."""
    assert codes(build(Distilling(copied=True))) == {"C09": "info"}
    assert codes(build(Distilling(copied=False))) == {"C09": "warning"}  # nobody knows that it is no head
    parts = nn.ModuleDict(dict(Distilling(copied=False).named_children()))
    assert codes(build(parts)) == {"C09": "info"}
    engine = build(Distilling(copied=True), Guards(every="1it"))  # whose statistics follow the batches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(batches(4), max_epochs=2)


def test_what_the_freezing_handler_freezes_is_meant() -> None:
    model = mlp(5, 8, 1)
    model[1].requires_grad_(False)
    assert codes(build(model, Freezing(["0"], unfreeze_at=2))) == {"C09": "info"}


def test_parameters_that_an_update_leaves_out_are_meant() -> None:
    model = mlp(5, 8, 1)
    update = Update.supervised(nn.functional.mse_loss, SGD, parameters=lambda engine: model[1].parameters())
    assert codes(Engine(update, model=model)) == {"C08": "info"}


class WithTarget(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.head = mlp(5, 8, 1), mlp(5, 8, 1), nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.online(inputs))
        return output


@pytest.mark.parametrize(("left_out", "severity"), [("target", "info"), ("head", "warning"), ("online", "info")])
def test_a_factory_may_leave_out_a_target_network_or_the_trunk_but_not_the_head(left_out: str, severity: str) -> None:
    model = WithTarget()
    if left_out != "target":
        model.target.requires_grad_(False)
    update = Update.supervised(
        nn.functional.mse_loss,
        SGD,
        parameters=lambda engine: [p for name, p in model.named_parameters() if not name.startswith(left_out)],
    )
    assert codes(Engine(update, model=model))["C08"] == severity


@pytest.mark.parametrize("replaced", [False, True])
def test_a_learned_number_beside_the_model_is_listed_and_a_replaced_layer_is_a_warning(replaced: bool) -> None:
    model, scale = mlp(5, 8, 1), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    if replaced:
        model[1] = nn.Linear(8, 1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(scale * output, target)

    found = codes(Engine(Update.supervised(loss, optimizer), model=model))
    assert found == ({"C07": "warning", "C08": "warning"} if replaced else {"C07": "info"})


def test_training_data_that_is_evaluated_beside_other_data_is_meant() -> None:
    model, data = mlp(5, 8, 1), batches()
    both = Validation(evaluator_of(model), {"seen": data, "unseen": batches(2, seed=1)})
    assert "C14" not in codes(build(model, both, EarlyStopping("unseen/loss", mode="min")), data)
    named = Validation(evaluator_of(model), data, prefix="train_")
    assert "C14" not in codes(build(model, named, EarlyStopping("train_loss", mode="min")), data)


def test_a_function_that_may_write_a_metric_makes_an_unknown_one_information() -> None:
    engine = build(mlp(5, 8, 1), EarlyStopping("score", mode="max"))
    assert codes(engine)["C01"] == "warning"
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=1.0))
    assert codes(engine)["C01"] == "info"


def split_engine(held_out: Any) -> Engine:
    model = mlp(5, 8, 1)
    return build(model, Validation(evaluator_of(model), DataLoader(held_out, 4), prefix="val_"))


def test_samples_of_the_training_data_in_the_validation_data_are_counted() -> None:
    whole = TensorDataset(torch.randn(20, 5), torch.randn(20, 1))
    first, both, last = Subset(whole, range(12)), Subset(whole, range(8, 20)), Subset(whole, torch.arange(12, 20))  # type: ignore[arg-type]

    def sentences(trained: Any, held_out: Any) -> list[str]:
        found = split_engine(held_out).check(DataLoader(trained, 4, shuffle=True), max_epochs=1)
        return [one.sentence for one in found if one.code == "C14"]

    assert "has 4 samples of the training data" in sentences(first, both)[0]
    assert "has 8 samples" in sentences(whole, last)[0]
    assert "has 12 samples" in sentences(first, whole)[0]
    assert "has 2 samples" in sentences(first, Subset(both, [2, 3, 4, 5]))[0]
    assert sentences(first, last) == []
    assert sentences(*torch.utils.data.random_split(whole, [12, 8])) == []
    other = torch.Generator().manual_seed(1000)
    assert sentences(first, TensorDataset(torch.randn(20, 5, generator=other), torch.randn(20, 1))) == []


def test_guards_that_look_at_the_first_iterations_do_something_in_a_short_run() -> None:
    assert [one for one in build(mlp(5, 8, 1), Guards()).check(batches(), max_epochs=1) if one.code == "C17"] == []


def test_a_window_of_time_chunks_is_not_compared_with_a_number_of_batches() -> None:
    engine = build(mlp(5, 8, 1), TruncatedBPTT(2), GradientAccumulation(4))
    data = [(torch.randn(2, 8, 5), torch.randn(2, 8, 1)) for _ in range(3)]
    assert [one for one in engine.check(data, max_epochs=1) if one.code == "C22"] == []


class HeadFirst(nn.Module):
    """A frozen trunk, behind which a head is trained that is registered before it."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.trunk = nn.Linear(8, 1), mlp(5, 8, 8).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.trunk(inputs))  # type: ignore[no-any-return]


class Prompted(nn.Module):
    """A frozen model, of whose inputs a shift is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.model = nn.Parameter(torch.zeros(5)), mlp(5, 8, 1).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs + self.shift)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [HeadFirst, Prompted])
def test_what_is_registered_first_need_not_be_the_first_layer(kind: type[nn.Module]) -> None:
    assert codes(build(kind())) == {"C09": "info"}


def test_batch_norm_over_the_places_of_one_picture_has_a_variance() -> None:
    pictures = TensorDataset(torch.randn(5, 1, 4, 4), torch.randn(5, 1))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 1))
    [finding] = build(model).check(DataLoader(pictures, 2, shuffle=True)).of("C21")
    assert finding.severity == "info"
    assert "no variance" not in finding.sentence


def test_lengths_in_ascending_order_are_no_classes() -> None:
    lengths = torch.arange(1, 5).repeat_interleave(4)
    assert codes(build(mlp(5, 8, 1)), DataLoader(TensorDataset(torch.randn(16, 5), lengths), 4)) == {"C13": "info"}
    assert codes(build(mlp(5, 8, 1)), DataLoader(TensorDataset(torch.randn(16, 5), lengths - 1), 4)) == {
        "C13": "warning"
    }
