"""The rules of `Engine.check` that depend on details; each code has a case in `tests.mistakes.composition`."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    Average,
    Checkpoint,
    EarlyStopping,
    FastDevRun,
    Freezing,
    GradientAccumulation,
    Guards,
    Metrics,
    TruncatedBPTT,
    Validation,
)
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
    def __init__(self, *, copied: bool, name: str = "other") -> None:
        super().__init__()
        self.student = mlp(5, 8, 1, nn.BatchNorm1d(8))
        frozen = copy.deepcopy(self.student) if copied else mlp(5, 16, 1)
        self.add_module(name, frozen.requires_grad_(False))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.student(inputs)
        return output


def test_a_teacher_is_frozen_and_comes_after_nothing() -> None:
    """One that is built like its student, is named so, or is a part of a ModuleDict, of which the order says nothing."""
    assert codes(build(Distilling(copied=True))) == {"C09": "info"}
    assert codes(build(Distilling(copied=False))) == {"C09": "warning"}  # nobody knows that it is no head
    assert codes(build(Distilling(copied=False, name="teacher"))) == {"C09": "info"}
    assert codes(build(Distilling(copied=False, name="perceptual_loss"))) == {"C09": "info"}
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

    assert "contains 4 samples of the training data" in sentences(first, both)[0]
    assert "contains 8 samples" in sentences(whole, last)[0]
    assert "contains 12 samples" in sentences(first, whole)[0]
    assert "contains 2 samples" in sentences(first, Subset(both, [2, 3, 4, 5]))[0]
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
    assert "cannot compute a variance" not in finding.sentence


def test_batch_norm_behind_a_convolution_over_time_has_a_variance() -> None:
    signals = TensorDataset(torch.randn(5, 1, 6), torch.randn(5, 1))
    behind = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 1))
    [finding] = build(behind).check(DataLoader(signals, 2, shuffle=True)).of("C21")
    assert finding.severity == "info"
    build(behind).run(DataLoader(signals, 2, shuffle=True), max_epochs=1)
    pooled = [nn.Conv1d(1, 2, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.BatchNorm1d(2), nn.Linear(2, 1)]
    for layers in ([nn.Flatten(), nn.Linear(6, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)], pooled):
        [finding] = build(nn.Sequential(*layers)).check(DataLoader(signals, 2, shuffle=True)).of("C21")
        assert finding.severity == "warning"


def test_batch_norm_that_a_handler_may_freeze_is_only_listed() -> None:
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    engine = build(model, Freezing(["1"]))
    data = DataLoader(TensorDataset(torch.randn(5, 5), torch.randn(5, 1)), 2, shuffle=True)
    assert [one.severity for one in engine.check(data).of("C21")] == ["info"]
    engine.run(data, max_epochs=1)


def masked(mask: str) -> Any:
    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output[batch[mask]], batch["y"][batch[mask]])

    return loss


def forward(engine: Engine, batch: Any) -> Any:
    return engine.model(batch["x"])


def test_one_graph_is_trained_and_evaluated_with_masks() -> None:
    model, trained = mlp(5, 8, 1), torch.arange(8) < 4
    graph = {"x": torch.randn(8, 5), "y": torch.randn(8, 1), "train": trained, "val": ~trained}
    evaluator = Engine(Update(forward, masked("val")), model=model)
    evaluator.attach(Metrics(loss=Average()))
    for data, evaluated in (([graph], [graph]), ([graph], None)):
        trainer = Engine(Update(forward, masked("train"), SGD), model=model)
        trainer.attach(Validation(evaluator, data if evaluated is None else evaluated))
        assert "C14" not in codes(trainer, data, max_epochs=3)


def test_a_frozen_model_that_is_evaluated_beside_the_trained_one_is_meant() -> None:
    teacher = Validation(evaluator_of(mlp(5, 8, 1).requires_grad_(False)), batches(2, seed=1), prefix="teacher_")
    assert codes(build(mlp(5, 8, 1), teacher), batches(), max_epochs=1)["C15"] == "info"


def test_a_forward_of_the_users_may_store_what_it_computes() -> None:
    outputs: list[Any] = []
    model = mlp(5, 8, 1)
    evaluator = Engine(Update(lambda engine, batch: outputs.append(engine.model(batch[0]))), model=model)
    assert "C20" not in codes(build(model, Validation(evaluator, batches(2, seed=1))), batches(), max_epochs=1)


def test_a_checkpoint_at_a_condition_of_the_users_may_be_the_best(tmp_path: Path) -> None:
    best = Checkpoint(tmp_path, name="best", every=Events.EPOCH_COMPLETED(when=lambda engine: engine.state.epoch == 2))
    assert "C11" not in codes(build(mlp(5, 8, 1), best), batches(), max_epochs=3)
    often = Checkpoint(tmp_path, name="best", every=Events.EPOCH_COMPLETED(every=2))
    assert "C11" in codes(build(mlp(5, 8, 1), often), batches(), max_epochs=4)


def test_lengths_in_ascending_order_are_no_classes() -> None:
    lengths = torch.arange(1, 5).repeat_interleave(4)
    assert codes(build(mlp(5, 8, 1)), DataLoader(TensorDataset(torch.randn(16, 5), lengths), 4)) == {"C13": "info"}
    assert codes(build(mlp(5, 8, 1)), DataLoader(TensorDataset(torch.randn(16, 5), lengths - 1), 4)) == {
        "C13": "warning"
    }


class Moving(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.to(self.weight.device))


def moving_step(engine: Engine, batch: Any) -> Tensor:
    inputs, targets = (part.to(engine.device) for part in batch)
    return nn.functional.mse_loss(engine.model(inputs), targets)


def test_batches_on_another_device_are_no_mistake_where_the_step_or_the_model_moves_them() -> None:
    data = [(torch.ones(4, 5, device="meta"), torch.ones(4, 1, device="meta"))] * 3
    loss, sgd = nn.functional.mse_loss, torch.optim.SGD
    supervised = Update.supervised(loss, sgd, lr=0.1)
    for model in (nn.Linear(5, 1), nn.Sequential(nn.Linear(5, 1))):
        assert "C12" in codes(Engine(supervised, model), data)
    for model in (Moving(5, 1), nn.Sequential(nn.Flatten(), Moving(5, 1))):
        assert "C12" not in codes(Engine(supervised, model), data)
    assert "C12" not in codes(Engine(Update.from_function(moving_step, sgd, lr=0.1), nn.Linear(5, 1)), data)


class Logging(nn.Module):
    """Writes a metric in its forward, to the engine that it is given."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.layer(input)
        self.engine.log("score", output.mean())
        return output


def test_a_model_or_a_loss_of_the_users_may_write_a_monitored_metric() -> None:
    assert codes(build(Logging(), EarlyStopping("score", mode="max")))["C01"] == "info"
    engines: list[Engine] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        engines[0].log("score", -output.mean())
        return nn.functional.mse_loss(output, target)

    engines.append(build(mlp(5, 8, 1), EarlyStopping("score", mode="max"), loss=loss))
    assert codes(engines[0])["C01"] == "info"
    engines[0].run(batches(2), max_epochs=2)  # which takes the metric as one of the user's, too
    assert engines[0]["early_stopping"].monitor.seen


class Several(Average):
    """A metric of two values."""

    def compute(self) -> dict[str, float]:
        return {"low": 1.0, "high": 2.0}


def test_one_value_of_a_metric_that_has_several_may_be_monitored() -> None:
    engine = build(mlp(5, 8, 1))
    engine.attach(Validation(batches(2), metrics={"range": Several()}), EarlyStopping("val_range/high", mode="max"))
    assert "C01" not in codes(engine)


def test_a_function_of_the_evaluator_may_show_its_metrics() -> None:
    model = mlp(5, 8, 1)
    evaluator = evaluator_of(model)
    engine = build(model, Validation(evaluator, batches(2)))
    assert "C02" in codes(engine)
    evaluator.connect(Events.EPOCH_COMPLETED, lambda engine: print(engine.state.metrics))
    assert "C02" not in codes(engine)


def test_a_trial_run_is_in_order_with_a_checkpoint(tmp_path: Path) -> None:
    engine = build(mlp(5, 8, 1), FastDevRun(1), Checkpoint(tmp_path))
    assert "C03" not in codes(engine, batches(), max_epochs=2)


def test_a_checkpoint_of_restored_weights_has_the_best(tmp_path: Path) -> None:
    best = Checkpoint(tmp_path, every=Events.COMPLETED, name="best")
    engine = build(mlp(5, 8, 1), Validation(batches(2)), best)
    assert "C11" in codes(engine)
    engine.attach(EarlyStopping("val_loss", restore_best=True))
    assert "C11" not in codes(engine)


def halves(parameters: Any) -> dict[str, list[Any]]:
    first, *rest = parameters
    return {"first": [first], "rest": rest}


def test_an_update_of_several_optimizers_holds_all_that_they_hold() -> None:
    factories = {"first": SGD, "rest": SGD}
    update = Update.supervised(
        nn.functional.mse_loss, factories, parameters=lambda engine: halves(engine.model.parameters())
    )
    assert "C08" not in codes(Engine(update, model=mlp(5, 8, 1)))


def test_what_an_optimizer_of_the_users_trains_is_not_left_out() -> None:
    model = nn.ModuleDict({"net": mlp(5, 8, 1), "probe": nn.Linear(5, 1)})
    update = Update(
        lambda engine, batch: model["net"](batch[0]),
        lambda engine, output, batch: nn.functional.mse_loss(output, batch[1]),
        SGD,
        parameters=lambda engine: model["net"].parameters(),
    )
    engine = Engine(update, model=model)
    assert "C08" in codes(engine)
    probe = torch.optim.SGD(model["probe"].parameters(), lr=0.1)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: probe.step())
    assert "C08" not in codes(engine)


class Text(nn.Module):
    """A pretrained embedding that is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.words = nn.Linear(3, 1), nn.Embedding(9, 3).requires_grad_(False)


def test_a_frozen_embedding_may_be_registered_last() -> None:
    assert codes(build(Text()))["C09"] == "info"


SAMPLES = TensorDataset(torch.randn(20, 5), torch.randn(20, 1))


@pytest.mark.parametrize(
    "sampler",
    [
        {"sampler": SubsetRandomSampler(range(12))},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(12)), 4, drop_last=False)},
        {"sampler": WeightedRandomSampler([1.0] * 12 + [0.0] * 8, 12)},
    ],
)
def test_samplers_may_split_one_dataset(sampler: Any) -> None:
    options: Any = sampler if "batch_sampler" in sampler else sampler | {"batch_size": 4}
    held_out = DataLoader(SAMPLES, 4, sampler=SubsetRandomSampler(range(12, 20)))
    engine = build(mlp(5, 8, 1), Validation(held_out), EarlyStopping("val_loss"))
    found = codes(engine, DataLoader(SAMPLES, **options), max_epochs=2)
    assert found.keys().isdisjoint({"C13", "C14"})


def test_samples_are_equal_if_all_of_their_tensors_are() -> None:
    drugs, proteins = torch.randn(10, 5), torch.randn(20, 5)
    first = TensorDataset(drugs, proteins[:10], torch.randn(10, 1))
    other = TensorDataset(drugs, proteins[10:], torch.randn(10, 1))
    assert "C14" not in codes(split_engine(other), DataLoader(first, 4, shuffle=True), max_epochs=1)
    assert "C14" in codes(split_engine(first), DataLoader(TensorDataset(*first.tensors), 4, shuffle=True), max_epochs=1)


def test_batches_are_equal_if_their_texts_are() -> None:
    labels = torch.zeros(2, 1)
    ours, others = [(["a", "b"], labels)], [(["c", "d"], labels)]
    assert "C14" not in codes(build(mlp(5, 8, 1), Validation(others)), [*ours, *ours], max_epochs=1)
    again = [(["a", "b"], labels.clone())]
    assert "C14" in codes(build(mlp(5, 8, 1), Validation(again)), [*ours, *ours], max_epochs=1)


def moved(engine: Engine) -> None:
    engine.state.batch = tuple(one.to(engine.device) for one in engine.state.batch)


def test_a_receiver_may_move_the_batches() -> None:
    engine = build(mlp(5, 8, 1).to("meta"))
    assert "C12" in codes(engine, batches())
    engine.connect(Events.GET_BATCH_COMPLETED, moved)
    assert "C12" not in codes(engine, batches())


def views(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples + samples)


def test_batch_norm_gets_the_rows_that_the_batch_has() -> None:
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    last_of_one = Subset(SAMPLES, range(9))
    assert codes(build(model), DataLoader(last_of_one, 4, shuffle=True), max_epochs=1)["C21"] == "warning"
    assert (
        codes(build(model), DataLoader(last_of_one, 4, shuffle=True, collate_fn=views), max_epochs=1)["C21"] == "info"
    )
    assert "C21" not in codes(build(model), DataLoader(last_of_one, 4, shuffle=True), max_epochs=3, max_iters=2)


def test_a_window_that_grows_is_too_long_from_an_epoch_on() -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation({1: 2, 3: 16}))
    [problem] = engine.check(batches(), max_epochs=4).of("C22")
    assert "accumulates 16 batches per step from epoch 3 on" in problem.sentence
