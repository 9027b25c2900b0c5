"""Evaluators, what they inherit from the trainer, averages of weights, and short trial runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from signalfire import Engine, Events, Findings, ReloadedData, Update, seed_everything
from signalfire.handlers import (
    EMA,
    SWA,
    Average,
    FastDevRun,
    LimitBatches,
    LRScheduling,
    Metrics,
    MixedPrecision,
    MixUp,
    OverfitBatches,
    Predictions,
    TruePrecision,
    Validation,
    cosine_with_warmup,
    warmup,
)
from tests.kit import SGD, batches, build, evaluator_of, mlp
from tests.mistakes.registry import comes_right, mistake, said


def net(*between: nn.Module) -> nn.Sequential:
    return mlp(5, 8, 1, *between)


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(8, 5), torch.zeros(8, 1)), batch_size=4, **options)


# ---- what is measured ---------------------------------------------------------------------------------------------


@mistake("W51")
def an_evaluator_over_another_model(right: bool) -> None:
    model = net()
    evaluator = evaluator_of(model if right else net())
    build(model, Validation(evaluator, batches(2))).run(batches(), max_epochs=1)


@mistake("W51")
def an_evaluator_over_a_copy_of_the_model(right: bool) -> None:
    model = net()
    evaluator = evaluator_of(copy.deepcopy(model))
    engine = build(model)

    @engine.on(Events.EVALUATION_STARTED)
    def copy_the_weights(engine: Engine) -> None:
        if right:
            evaluator.load_weights(engine.weights())

    @engine.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        engine.evaluate(evaluator, batches(2))

    engine.run(batches(), max_epochs=2)


@mistake("W51")
def a_test_of_a_new_model_after_training(right: bool) -> None:
    model = net()
    engine = build(model)
    engine.run(batches(), max_epochs=1)
    engine.evaluate(evaluator_of(model if right else net()), batches(2))


@mistake("C20")
def metrics_on_the_trainer_that_the_evaluator_needs(right: bool) -> None:
    model = net()
    evaluator = Engine(Update.supervised(mse_loss), model=model)
    engine = build(model, Validation(evaluator, batches(2), prefix="val_"))
    (evaluator if right else engine).attach(Metrics(loss=Average()))
    engine.run(batches(), max_epochs=1)


@mistake("W53")
def an_evaluation_in_a_receiver_that_measures_nothing(right: bool) -> None:
    model = net()
    evaluator = Engine(Update.supervised(mse_loss), model=model)
    if right:
        evaluator.attach(Metrics(loss=Average()))
    engine = build(model)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.evaluate(evaluator, batches(2)) and None)
    engine.run(batches(), max_epochs=1)


@mistake("W54")
def predictions_over_shuffled_data(right: bool) -> None:
    engine = Engine(Update.prediction(), model=net())
    engine.attach(Predictions())
    engine.run(shuffled(shuffle=not right))


@mistake("W54")
def predictions_for_a_submission_with_a_sampler_of_training(right: bool) -> None:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)
    engine = Engine(Update.prediction(), model=net())
    engine.attach(Predictions(targets=right), LimitBatches(validation=1))
    engine.run(shuffled(sampler=sampler))


@mistake("W57")
def a_receiver_that_leaves_dropout_on_in_an_evaluation(right: bool) -> None:
    model = net(nn.Dropout())
    evaluator = evaluator_of(model)

    @evaluator.on(Events.EPOCH_STARTED)
    def begin(engine: Engine) -> None:
        if not right:
            model.train()

    build(model, Validation(evaluator, batches(2))).run(batches(), max_epochs=1)


class Training(nn.Module):
    """A model whose forward puts it in training mode."""

    def __init__(self, right: bool) -> None:
        super().__init__()
        self.right = right
        self.layers = net(nn.BatchNorm1d(8))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.right:
            self.train()
        result: Tensor = self.layers(inputs)
        return result


@mistake("W57")
def a_forward_that_calls_train(right: bool) -> None:
    evaluator_of(Training(right)).run(batches(2))


@mistake("W59")
def an_evaluation_that_drops_its_last_samples(right: bool) -> Findings:
    evaluator = evaluator_of(net())
    data = TensorDataset(torch.zeros(9, 5), torch.zeros(9, 1))
    evaluator.run(DataLoader(data, batch_size=4, drop_last=not right))
    return evaluator.findings.of_run()


# ---- the state of a trainer ---------------------------------------------------------------------------------------


def trained(model: nn.Module, *handlers: Any) -> Engine:
    engine = build(model, *handlers)
    engine.run(batches(), max_epochs=2, max_iters=9)
    return engine


@comes_right
def the_state_of_a_trainer_in_its_evaluator(right: bool) -> Any:
    model = net()
    trainer = trained(model, Metrics(loss=Average()))
    state = trainer.state_dict()
    evaluator = evaluator_of(net())
    if right:
        evaluator.load_weights(state)
    else:
        evaluator.load_state_dict(state)
    return dict(evaluator.run(batches(3)).metrics)


@comes_right
def a_model_that_is_used_after_a_load_without_a_run(right: bool) -> Any:
    state = trained(net()).state_dict()
    model = net()
    engine = build(model)
    if right:
        engine.load_weights(state)
    else:
        engine.load_state_dict(state)
    return model(torch.ones(1, 5)).item()


@comes_right
def an_evaluation_after_a_load_without_a_run(right: bool) -> Any:
    model = net()
    before = trained(model, EMA(0.5))
    state = before.state_dict()
    if not right:
        model = net()
        before = build(model, EMA(0.5))
        before.load_state_dict(state)
    return before.evaluate(evaluator_of(model), batches(3))


@mistake("W56")
def a_test_of_a_state_that_holds_averages(right: bool) -> None:
    trainer = trained(net(), EMA(0.5))
    evaluator_of(net()).load_weights(trainer.weights() if right else trainer.state_dict())


@mistake("W56")
def a_test_of_loaded_weights_in_place_of_the_averages_beside_them(right: bool) -> None:
    before = trained(net(), EMA(0.5))
    trainer = build(net(), EMA(0.5), Validation(batches(3)))
    trainer.load_weights(before.weights() if right else before.state_dict())
    trainer.test(batches(3))


@mistake("W56")
def the_state_of_a_trainer_with_averages_in_its_evaluator(right: bool) -> None:
    trainer = trained(net(), *([] if right else [EMA(0.5)]))
    evaluator_of(net()).load_state_dict(trainer.state_dict())


# ---- what an evaluator inherits -----------------------------------------------------------------------------------


def with_precision(right: bool, make: Any) -> Any:
    model = net()
    evaluator = evaluator_of(model)
    if right:
        evaluator.attach(make())
    engine = build(model, make(), Validation(evaluator, batches(3)))
    engine.run(batches(), max_epochs=1)
    return engine.state.metrics["loss"]


@comes_right
def mixed_precision_on_the_trainer_alone(right: bool) -> Any:
    return with_precision(right, MixedPrecision)


@comes_right
def true_precision_on_the_trainer_alone(right: bool) -> Any:
    return with_precision(right, partial(TruePrecision, "bf16"))


@mistake(RuntimeError, "the batch has dtype torch.float32 and the model has dtype torch.bfloat16; attach TruePrecision")
def a_test_in_another_precision_than_the_model(right: bool) -> None:
    model = net()
    engine = build(model, TruePrecision("bf16"))
    engine.run(batches(), max_epochs=1)
    evaluator = evaluator_of(model)
    if right:
        engine.evaluate(evaluator, batches(2))
    else:
        evaluator.run(batches(2))


@mistake(ValueError, "is for training")
def mixup_on_the_evaluator(right: bool) -> None:
    engine = build(net()) if right else evaluator_of(net())
    engine.attach(MixUp())


# ---- the data of an evaluation ------------------------------------------------------------------------------------


@mistake(ValueError, "Validation.data=.*the data is empty")
def a_validation_set_that_drop_last_empties(right: bool) -> None:
    model = net()
    data = DataLoader(TensorDataset(torch.zeros(3, 5), torch.zeros(3, 1)), batch_size=4, drop_last=not right)
    engine = build(model, Validation(evaluator_of(model), data))
    engine.connect(Events.ITERATION_COMPLETED, check_that_it_is_validated) if not right else None
    engine.run(batches(), max_epochs=1)


def check_that_it_is_validated(engine: Engine) -> None:
    raise AssertionError("the mistake is noticed only after training has begun")


class Stream:
    """Data without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from batches(3)


@mistake(ValueError, "'limit_batches': validation=0.5 is a fraction of the data's length")
def a_share_of_validation_data_without_a_length(right: bool) -> None:
    model = net()
    limit = LimitBatches(validation=2 if right else 0.5)
    engine = build(model, Validation(evaluator_of(model), Stream()), limit)
    engine.connect(Events.ITERATION_COMPLETED, check_that_it_is_validated) if not right else None
    engine.run(batches(), max_epochs=1)


@comes_right
def reloaded_data_in_a_validation(right: bool) -> Any:
    loaded: list[int] = []

    def load(epoch: int) -> Any:
        loaded.append(epoch)
        return batches(2) if right else iter(batches(2))

    model = net()
    build(model, Validation(evaluator_of(model), ReloadedData(load))).run(batches(), max_epochs=3)
    return loaded


@mistake(ValueError, "both 'validation' and 'testing' write the metric 'loss'")
def two_validations_with_one_prefix(right: bool) -> None:
    model = net()
    testing = Validation(evaluator_of(model), batches(2), prefix="test_" if right else "", name="testing")
    build(model, Validation(evaluator_of(model), batches(2)), testing).run(batches(), max_epochs=1)


@mistake(ValueError, "must be an Engine that does not train")
def an_evaluator_that_trains(right: bool) -> None:
    update = Update.supervised(mse_loss, SGD)
    Validation(Engine(update, model=net(), training=not right), batches(2))


@mistake(TypeError, "pass the evaluator before the data")
def a_validation_with_its_arguments_swapped(right: bool) -> None:
    of_it = (evaluator_of(net()), batches(2))
    Validation(*of_it) if right else Validation(*reversed(of_it))  # type: ignore[arg-type]


# ---- averages of the weights --------------------------------------------------------------------------------------


@mistake("W55")
def an_average_that_hardly_moves(right: bool) -> None:
    build(net(), EMA(0.9999, warmup=right)).run(batches(), max_epochs=3)


@mistake("W55")
def an_average_that_is_updated_too_rarely(right: bool) -> None:
    build(net(), EMA(0.99, every=1 if right else "2st")).run(batches(72), max_epochs=1)


@mistake("W56")
def a_test_of_the_weights_in_place_of_their_average(right: bool) -> None:
    model = net()
    engine = build(model, EMA(0.5))
    engine.run(batches(), max_epochs=2)
    evaluator = evaluator_of(model)
    if right:
        engine.evaluate(evaluator, batches(2))
    else:
        evaluator.run(batches(2))


@mistake("W56")
def predictions_of_the_weights_in_place_of_their_average(right: bool) -> None:
    model = net()
    engine = build(model, SWA(1))
    engine.run(batches(), max_epochs=2)
    if right:
        engine.load_weights(engine.weights())
    predictor = Engine(Update.prediction(), model=nn.Sequential(model, nn.Sigmoid()))
    predictor.attach(Predictions())
    predictor.run(batches(2))


@mistake("W56")
def an_evaluation_in_a_receiver_beside_the_average(right: bool) -> None:
    model = net()
    evaluator = evaluator_of(model)
    engine = build(model, EMA(0.5))

    @engine.on(Events.EPOCH_COMPLETED)
    def validate(engine: Engine) -> None:
        if right:
            engine.evaluate(evaluator, batches(2))
        else:
            evaluator.run(batches(2))

    engine.run(batches(), max_epochs=1)


# ---- modes --------------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout())
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.backbone(inputs))
        return result


@comes_right
def a_frozen_backbone_in_eval_mode(right: bool) -> Any:
    torch.manual_seed(0)
    model = Frozen()
    model.backbone.requires_grad_(False).eval()
    engine = build(model)
    if right:
        engine.connect(Events.EPOCH_STARTED, lambda engine: model.backbone.eval() and None)
    engine.run(batches(), max_epochs=2)
    return [value.tolist() for value in model.state_dict().values()]


@mistake("W52")
def a_backbone_in_eval_mode_that_is_not_frozen(right: bool) -> Findings:
    model = Frozen()
    if not right:
        model.backbone.eval()
    engine = build(model)
    engine.run(batches(), max_epochs=1)
    return engine.findings.of_run()


# ---- trial runs ---------------------------------------------------------------------------------------------------


@mistake(RuntimeError, "shapes cannot be multiplied")
def a_trial_run_that_is_over_before_its_validation(right: bool) -> None:
    model = net()
    data = batches(2) if right else batches(2, 6)
    build(model, FastDevRun(), Validation(evaluator_of(model), data, every="500it")).run(batches(), max_epochs=9)


@comes_right
def a_trial_run_that_is_shorter_than_the_warmup(right: bool) -> Any:
    schedule = LRScheduling(warmup(0 if right else 30, then=CosineAnnealingLR))
    return build(net(), FastDevRun(), schedule).run(batches(), max_epochs=9).iteration


@mistake(ValueError, "these arguments add up to 80 steps, but the run has only 54")
def a_warmup_that_is_longer_than_the_run_that_is_tried(right: bool) -> None:
    schedule = LRScheduling(cosine_with_warmup(warmup=30 if right else 80))
    build(net(), FastDevRun(), schedule).run(batches(), max_epochs=9)


@mistake("W58")
def a_trial_run_that_was_forgotten(right: bool) -> Findings:
    engine = build(net(), *([] if right else [FastDevRun()]))
    engine.run(batches(), max_epochs=3)
    return engine.findings.of_run()


@said(r"W58: .*OverfitBatches\(2\) trains on at most 2 of the batches")
def batches_to_overfit_that_were_forgotten(right: bool) -> None:
    engine = build(net(), *([] if right else [OverfitBatches(2)]))
    seed_everything(0)
    engine.run(batches(), max_epochs=3)


@said(r"W58: .*LimitBatches\(train=2\) uses only part of")
def a_limit_that_was_forgotten(right: bool) -> None:
    engine = build(net(), *([] if right else [LimitBatches(2)]))
    engine.run(batches(), max_epochs=3)


@mistake("W57")
def a_dropout_function_that_knows_nothing_of_the_mode(right: bool) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            dropped = nn.functional.dropout(inputs, 0.5, training=self.training if right else True)
            output: Tensor = self.layer(dropped)
            return output

    evaluator_of(Dropping()).run(batches(3))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that a training transform would give."""

    def __init__(self, augmented: bool) -> None:
        self.augmented = augmented

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(5) if self.augmented else torch.zeros(5)
        return noise + index / 12, torch.full((1,), index / 12)


@mistake("W50")
def validation_data_that_is_augmented(right: bool) -> None:
    model = mlp(5, 8, 1)
    data = DataLoader(Noisy(augmented=not right), 4)
    build(model, Validation(evaluator_of(model), data)).run(batches(8), max_epochs=1)


@mistake("W50")
def validation_data_that_workers_augment(right: bool) -> None:
    data = DataLoader(Noisy(augmented=not right), 4, num_workers=1)
    evaluator_of(mlp(5, 8, 1)).run(data)
