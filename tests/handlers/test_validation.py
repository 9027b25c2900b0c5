"""Validation: it measures, and leaves no trace in the training around it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Phase, Update, allow, seed_everything
from signalfire.handlers import (
    Accuracy,
    Average,
    CSVLogger,
    EarlyStopping,
    GradientAccumulation,
    History,
    Metrics,
    TensorBoardLogger,
    Validation,
)
from signalfire.testing import check_handler
from tests.kit import batches, build, evaluator_of, mlp, spread

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.5))


trainer_of = partial(build, optimizer=partial(torch.optim.SGD, lr=0.05))


def plain_loop(epochs: int = 2) -> tuple[nn.Sequential, list[float]]:
    """The trained model, and its validation loss after every epoch."""
    model, losses = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seed_everything(1)
    for _ in range(epochs):
        for inputs, targets in batches():
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(measured(model))
    return model, losses


def measured(model: nn.Module) -> float:
    """The loss in eval mode, in a plain PyTorch loop."""
    model.eval()
    with torch.no_grad():
        total = sum(nn.functional.mse_loss(model(inputs), targets).item() * 4 for inputs, targets in batches(3))
    model.train()
    return total / 12


class DrawingData:
    """Data that draws from every global generator."""

    def __iter__(self) -> Iterator[Any]:
        for inputs, targets in batches(3):
            torch.rand(3), random.random(), np.random.rand()
            yield inputs, targets


@pytest.mark.moderate
@pytest.mark.parametrize(
    "every", ["1ep", "2ep", "0.25ep", "1it", "4it", "3st", Events.ITERATION_STARTED(every=2), Events.GRADIENTS_READY]
)
@pytest.mark.parametrize("data", [batches(3), DrawingData()], ids=["list", "drawing"])
def test_the_training_around_it_is_that_of_a_plain_loop(every: Any, data: Any) -> None:
    model = network()
    engine = trainer_of(model, Validation(evaluator_of(model), data, every=every, at_start=True))
    seed_everything(1)
    engine.run(batches(), max_epochs=2)
    after = (torch.rand(2), random.random(), np.random.rand())
    reference, _ = plain_loop()
    for (name, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(after[0], torch.rand(2))
    assert after[1:] == (random.random(), np.random.rand())


def test_it_measures_what_a_plain_loop_measures() -> None:
    model = network()
    engine = trainer_of(model, Validation(evaluator_of(model), batches(3)))
    found: list[float] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: found.append(engine.state.metrics["loss"]))
    seed_everything(1)
    engine.run(batches(), max_epochs=2)
    assert found == plain_loop()[1]


def test_a_shuffling_loader_and_its_workers_seed_draw_nothing() -> None:
    model = network()
    generator = torch.Generator().manual_seed(1)
    data = DataLoader(
        TensorDataset(torch.randn(10, 5, generator=generator), torch.randn(10, 1, generator=generator)),
        batch_size=4,
        shuffle=True,
    )
    engine = trainer_of(model, Validation(evaluator_of(model), data, every="1it"))
    seed_everything(1)
    engine.run(batches(), max_epochs=2)
    reference, _ = plain_loop()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_the_order_of_a_shuffled_training_loader_is_not_moved() -> None:
    orders: list[list[Tensor]] = []
    for handlers in ([], ["validation"]):
        model = network()
        generator = torch.Generator().manual_seed(1)
        data = DataLoader(
            TensorDataset(torch.randn(24, 5, generator=generator), torch.randn(24, 1, generator=generator)),
            batch_size=4,
            shuffle=True,
        )
        engine = trainer_of(model, *([Validation(evaluator_of(model), data, every="4it")] if handlers else []))
        order: list[Tensor] = []
        engine.connect(
            Events.GET_BATCH_COMPLETED, lambda engine, order=order: order.append(engine.state.batch[0].clone())
        )
        seed_everything(1)
        engine.run(data, max_epochs=3)
        orders.append(order)
    assert len(orders[0]) == 18
    assert all(torch.equal(a, b) for a, b in zip(*orders, strict=True))


@pytest.mark.filterwarnings("ignore:C22:signalfire.FindingWarning")
def test_no_gradient_is_made_or_changed() -> None:
    model = network()
    evaluator = evaluator_of(model)
    enabled: list[bool] = []
    evaluator.connect(Events.FORWARD_COMPLETED, lambda engine: enabled.append(engine.state.update.output.requires_grad))
    engine = trainer_of(model, Validation(evaluator, batches(3), every="1it"), GradientAccumulation(3))
    around: list[list[Tensor | None]] = []

    def note(engine: Engine) -> None:
        around.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    engine.connect(Events.EVALUATION_STARTED | Events.EVALUATION_COMPLETED, note)
    engine.connect(Events.EVALUATION_COMPLETED, lambda engine: enabled.append(not torch.is_grad_enabled()))
    engine.run(batches(2), max_iters=2)
    assert enabled == [False] * 8
    before, after = around[0], around[1]
    assert any(gradient is not None for gradient in before)  # inside a window
    for a, b in zip(before, after, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_the_modes_of_submodules_are_put_back_one_by_one() -> None:
    model = network()
    evaluator = evaluator_of(model)
    engine = trainer_of(model, Validation(evaluator, batches(3), every="2it"))
    inside: list[list[bool]] = []
    afterwards: list[list[bool]] = []
    engine.connect(Events.EPOCH_STARTED, lambda engine: model[1].eval())  # a frozen BatchNorm
    evaluator.connect(Events.FORWARD_STARTED, lambda engine: inside.append([m.training for m in model.modules()]))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: afterwards.append([m.training for m in model.modules()]))
    engine.run(batches(4), max_epochs=1)
    assert inside == [[False] * 5] * 6
    assert afterwards == [[True, True, False, True, True]] * 4


@pytest.mark.moderate
def test_the_interval_says_when() -> None:
    def validated_at(every: Any, *handlers: Any, at_start: bool = False) -> list[tuple[int, int]]:
        model = network()
        engine = trainer_of(
            model, Validation(evaluator_of(model), batches(1), every=every, at_start=at_start), *handlers
        )
        found: list[tuple[int, int]] = []
        engine.connect(
            Events.EVALUATION_COMPLETED, lambda engine: found.append((engine.state.epoch, engine.state.iteration))
        )
        engine.run(batches(4), max_epochs=3)
        return found

    assert validated_at("1ep") == [(1, 4), (2, 8), (3, 12)]
    assert validated_at("2ep") == [(2, 8)]
    assert validated_at("3it") == [(1, 3), (2, 6), (3, 9), (3, 12)]
    assert validated_at("2st", GradientAccumulation(2)) == [(1, 4), (2, 8), (3, 12)]
    assert validated_at("3st", GradientAccumulation(2)) == [(2, 6), (3, 12)]
    assert validated_at("100h") == []
    assert validated_at("0.5ep") == [(1, 2), (1, 4), (2, 6), (2, 8), (3, 10), (3, 12)]
    assert validated_at("1.5ep") == [(2, 6), (3, 12)]
    assert validated_at("2ep", at_start=True) == [(1, 0), (2, 8)]
    assert validated_at(Events.EPOCH_COMPLETED(once=3)) == [(3, 12)]


def test_at_start_is_once_and_not_again_when_the_run_continues() -> None:
    model = network()
    untrained = measured(model)
    engine = trainer_of(model, Validation(evaluator_of(model), batches(3), at_start=True))
    found: list[tuple[int, float]] = []
    engine.connect(
        Events.EVALUATION_COMPLETED,
        lambda engine: found.append((engine.state.iteration, engine.state.metrics["loss"])),
    )
    engine.run(batches(), max_epochs=1)
    engine.run(batches(), max_epochs=2)
    assert [iteration for iteration, _ in found] == [0, 6, 12]
    assert found[0][1] == untrained


def test_metrics_come_under_a_prefix() -> None:
    model = network()
    engine = trainer_of(
        model,
        Validation(evaluator_of(model), batches(3), prefix="val_"),
        Validation(evaluator_of(model), batches(5), prefix="test_", name="testing"),
        Metrics(loss=Average()),
    )
    engine.run(batches(), max_epochs=1)
    assert set(engine.state.metrics) == {"val_loss", "test_loss", "loss"}
    assert engine.state.metrics["val_loss"] == measured(model)


def test_two_validations_of_one_name_are_refused_before_the_first_batch() -> None:
    model = network()
    engine = trainer_of(
        model,
        Validation(evaluator_of(model), batches(3)),
        Validation(evaluator_of(model), batches(3), name="testing"),
    )
    with pytest.raises(ValueError, match=r"validation.*testing.*'loss'.*prefix="):
        engine.run(batches(), max_epochs=1)
    assert engine.state.iteration == 0


def test_each_validation_starts_anew() -> None:
    model = network()
    evaluator = evaluator_of(model)
    lengths: list[int] = []
    evaluator.connect(Events.COMPLETED, lambda engine: lengths.append(engine.state.iteration))
    engine = trainer_of(model, Validation(evaluator, batches(3)))
    engine.run(batches(), max_epochs=3)
    assert lengths == [3, 3, 3]


@pytest.mark.parametrize("where", [Events.FORWARD_COMPLETED, Events.COMPLETED])
def test_an_error_inside_leaves_and_the_modes_and_random_streams_are_put_back(where: Events) -> None:
    model = network()
    model[1].eval()
    evaluator = evaluator_of(model)
    engine = trainer_of(model, Validation(evaluator, DrawingData(), every="3it"))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    evaluator.connect(where, fail)
    state: list[Tensor] = []
    modes: list[list[bool]] = []
    engine.connect(Events.EVALUATION_STARTED, lambda engine: state.append(torch.get_rng_state()))
    engine.connect(Events.EXCEPTION_RAISED, lambda engine: modes.append([m.training for m in model.modules()]))
    with allow("W52"), pytest.raises(ArithmeticError, match="on purpose"):
        engine.run(batches(), max_epochs=1)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert modes == [[True] * 5]  # as they were in the training
    assert [m.training for m in model.modules()] == [True, True, False, True, True]  # as they were before the run
    assert torch.is_grad_enabled()
    assert not evaluator.running
    assert not engine.running


def test_a_model_that_is_not_shared_is_measured_as_it_is() -> None:
    model, other = network(), network()
    engine = trainer_of(model, Validation(evaluator_of(other), batches(3)), allow=["W51"])
    engine.run(batches(), max_epochs=1)
    assert engine.state.metrics["loss"] == measured(other) != measured(model)


def test_a_validation_inside_an_evaluator_is_possible() -> None:
    model = network()
    inner, outer = evaluator_of(model), Engine(Update.supervised(nn.functional.mse_loss), model=model)
    outer.attach(Validation(inner, batches(3), prefix="inner_"))
    outer.run(batches(2))
    assert outer.state.metrics["inner_loss"] == measured(model)


def test_bad_arguments_are_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"does not train.*evaluation\(\)"):
        Validation(trainer_of(model), batches(3))
    with pytest.raises(ValueError, match="does not train"):
        Validation(model, batches(3))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="iterable"):
        Validation(evaluator_of(model), 3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="iterator is exhausted"):
        Validation(evaluator_of(model), iter(batches(3)))
    with pytest.raises(ValueError, match=r"Validation\(every='often'\)"):
        Validation(evaluator_of(model), batches(3), every="often")
    with pytest.raises(ValueError, match=r"Validation\(data=\{\}\)"):
        Validation(evaluator_of(model), {})
    with pytest.raises(TypeError, match=r"'late'.*iterator is exhausted"):
        Validation(evaluator_of(model), {"early": batches(3), "late": iter(batches(3))})
    with pytest.raises(TypeError, match=r"'late'.*iterable"):
        Validation(evaluator_of(model), {"early": batches(3), "late": 3})
    with pytest.raises(TypeError, match=r"\[1\] must be non-empty strings"):
        Validation(evaluator_of(model), {1: batches(3)})
    for sanity in (-1, True, 0.5):
        kind = ValueError if type(sanity) is int else TypeError
        with pytest.raises(kind, match=rf"Validation\(sanity={sanity!r}\)"):
            Validation(evaluator_of(model), batches(3), sanity=sanity)  # type: ignore[arg-type]
    evaluator = evaluator_of(model)
    with pytest.raises(ValueError, match="itself"):
        evaluator.attach(Validation(evaluator, batches(3)))
    assert list(evaluator.handlers) == ["metrics"]


@pytest.mark.parametrize("way", ["without", "disabled", "detached"])
def test_switched_off_nothing_is_measured(way: str) -> None:
    model = network()
    handler = Validation(evaluator_of(model), batches(3), at_start=True)
    engine = trainer_of(model, handler)
    if way == "without":
        with engine.without("validation"):
            engine.run(batches(), max_epochs=1)
    else:
        if way == "disabled":
            handler.enabled = False
        else:
            engine.detach(handler)
        engine.run(batches(), max_epochs=1)
    assert dict(engine.state.metrics) == {}
    assert engine.state.metrics.owners == {}


# ---- several, parts of an epoch, a sanity run ---------------------------------------------------------------------


def test_several_data_are_evaluated_under_their_names() -> None:
    model = network()
    history = History()
    data = {"near": batches(3), "far": DrawingData()}
    engine = trainer_of(model, Validation(evaluator_of(model), data, prefix="val_"), history)
    seed_everything(1)
    engine.run(batches(), max_epochs=2)
    reference, losses = plain_loop()
    assert history["val_near/loss"] == losses
    assert history["val_far/loss"] == losses  # the same batches
    assert history.names == ["val_near/loss", "val_far/loss"]
    for a, b in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_one_of_several_may_be_monitored_and_a_misspelt_one_is_noticed() -> None:
    model = network()
    data = {"near": batches(3), "far": batches(2)}
    engine = trainer_of(model, Validation(evaluator_of(model), data), EarlyStopping("far/loss"))
    engine.run(batches(), max_epochs=1)
    engine.attach(EarlyStopping("fer/loss", name="misspelt"))
    with pytest.raises(KeyError, match="did you mean 'far/loss'"):
        engine.run(batches(), max_epochs=2)


class Unsized:
    def __iter__(self) -> Iterator[Any]:
        yield from batches()


def test_a_part_of_an_epoch_of_unknown_length_is_an_error_that_names_the_validation() -> None:
    model = network()
    engine = trainer_of(model, Validation(evaluator_of(model), batches(3), every="0.5ep"))
    with pytest.raises(ValueError, match=r"validation\.validate.*every 0\.5 epochs.*epoch_length="):
        engine.run(Unsized(), max_epochs=1)
    assert engine.state.epoch == 0


@pytest.mark.parametrize("several", [False, True])
def test_a_sanity_run_changes_nothing_and_leaves_no_metric(several: bool, tmp_path: Any) -> None:
    model = network()
    evaluator = evaluator_of(model)
    evaluator.attach(TensorBoardLogger(tmp_path / "events"))
    lengths: list[int] = []
    evaluator.connect(Events.COMPLETED, lambda engine: lengths.append(engine.state.iteration))
    data: Any = {"a": DrawingData(), "b": batches(3)} if several else DrawingData()
    history = History()
    engine = trainer_of(model, Validation(evaluator, data, sanity=2), history)
    engine.connect(Events.ITERATION_STARTED(once=1), check_that_nothing_is_measured)
    engine.connect(Events.ITERATION_STARTED(once=1), lambda engine: lengths.append(len(list(tmp_path.rglob("*")))))
    seed_everything(1)
    engine.run(batches(), max_epochs=2)
    after = torch.rand(2)
    reference, losses = plain_loop()
    assert torch.equal(after, torch.rand(2))
    for a, b in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    times = 2 if several else 1
    assert lengths == [2] * times + [0] + [3] * times * 2  # no file was there after the sanity run
    assert history["a/loss" if several else "loss"] == losses
    assert not evaluator.dry_run
    engine.run(batches(), max_epochs=3)
    assert len(lengths) == 6 * times + 1 - 2 * times  # it is not made again


def check_that_nothing_is_measured(engine: Engine) -> None:
    assert dict(engine.state.metrics) == {}
    assert engine.state.metrics.serial == 0


@pytest.mark.filterwarnings("ignore:C17:signalfire.FindingWarning")
def test_a_shuffled_loader_of_its_own_draws_nothing_in_a_sanity_run() -> None:
    generator = torch.Generator().manual_seed(1)
    data = DataLoader(
        TensorDataset(torch.randn(10, 5), torch.randn(10, 1)), batch_size=4, shuffle=True, generator=generator
    )
    model = network()
    before = generator.get_state()
    trainer_of(model, Validation(evaluator_of(model), data, sanity=1, every="9ep")).run(batches(), max_epochs=1)
    assert torch.equal(generator.get_state(), before)


def test_a_mistake_in_the_evaluation_shows_before_the_first_batch() -> None:
    model = network()
    engine = trainer_of(model, Validation(evaluator_of(model), [(torch.ones(2, 6), torch.ones(2, 1))], sanity=1))
    with pytest.raises(RuntimeError, match="shape") as caught:
        engine.run(batches(), max_epochs=1)
    assert "in the sanity check of 'validation'" in caught.value.__notes__
    assert engine.state.iteration == 0
    assert dict(engine.state.metrics) == {}


@pytest.mark.moderate
@pytest.mark.parametrize(
    "options", spread([{"every": "0.5ep", "sanity": 1}, {"every": "1.5ep", "at_start": True}], 1), ids=str
)
def test_it_keeps_its_promises(options: dict[str, Any]) -> None:
    def validation() -> Validation:
        return Validation(evaluator_of(network()), {"a": batches(2), "b": DrawingData()}, **options)

    # Each engine has a model of its own, so that the evaluator shares none with it.
    check_handler(
        lambda: trainer_of(network(), allow=["W51"]), validation, batches(), changes_training=False, max_epochs=3
    )


class Shown(list[Any]):
    """Data whose text is expensive: it is not made unless it is shown."""

    def __repr__(self) -> str:
        raise LookupError("not asked for")


def test_the_data_is_not_turned_into_text_unless_it_is_wrong() -> None:
    evaluator = Engine(Update.supervised(torch.nn.functional.mse_loss), model=torch.nn.Linear(5, 1))
    for data in (Shown([1]), {"first": Shown([1])}):
        Validation(evaluator, data)
    for wrong, message in (
        ([], r"Validation\(data=\[\]\): the data is empty"),
        ({"a": []}, r"Validation\(data={'a': \[\]}\): the data is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            Validation(evaluator, wrong)


class RefusesLength(list[Any]):
    def __len__(self) -> int:
        raise NotImplementedError


def test_data_that_refuses_to_say_its_length_is_data() -> None:
    evaluator = Engine(Update.supervised(torch.nn.functional.mse_loss), model=torch.nn.Linear(5, 1))
    assert len(Validation(evaluator, RefusesLength([1])).data_sets) == 1


# ---- with an evaluator that it builds --------------------------------------------------------------------------------


def classifying(*handlers: Any, updates: int = 1) -> Engine:
    model = mlp(5, 8, 3, nn.BatchNorm1d(8), nn.Dropout(0.5))
    cross_entropy = nn.functional.cross_entropy
    names = ["main", "other"][:updates]
    specs = [Update.supervised(cross_entropy, torch.optim.SGD, lr=0.05, name=name) for name in names]
    engine = Engine(specs, model=model, seed=0)
    engine.attach(*handlers)
    return engine


def weights_of(engine: Engine) -> list[Any]:
    return [tensor.tolist() for tensor in engine.model.state_dict().values()]


def labelled(count: int, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 5, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(count)]


def test_the_short_form_is_the_long_one_with_another_prefix_bit_for_bit() -> None:
    torch.manual_seed(0)
    long = classifying()
    evaluator = Engine(long.updates[0].spec.evaluation(), model=long.model)
    evaluator.attach(Metrics(accuracy=Accuracy(), loss=Average()))
    long_history, short_history = History(), History()
    long.attach(Validation(evaluator, labelled(3, 1)), long_history)
    torch.manual_seed(0)
    short = classifying(Validation(labelled(3, 1), accuracy=Accuracy()), short_history)
    for engine in (long, short):
        torch.manual_seed(1)
        engine.run(labelled(4), max_epochs=3)
    assert weights_of(long) == weights_of(short)
    for name in ("accuracy", "loss"):
        assert short_history[f"val_{name}"] == long_history[name]
    assert sorted(short.state.metrics) == ["val_accuracy", "val_loss"]


def test_the_evaluator_is_built_for_each_engine_that_it_is_attached_to() -> None:
    validation = Validation(labelled(2), metrics={"accuracy": Accuracy()})
    with pytest.raises(AttributeError, match="'validation' has no evaluator yet; the evaluator is built when"):
        _ = validation.evaluator
    built = []
    for _ in range(2):
        engine = classifying(validation)
        engine.run(labelled(2, 2), max_epochs=1)
        built.append(validation.evaluator)
        assert validation.evaluator.modules["model"] is engine.modules["model"]
        engine.detach(validation)
    assert built[0] is not built[1]
    assert not hasattr(validation, "evaluator")


def test_of_several_updates_one_is_named() -> None:
    with pytest.raises(ValueError, match=r"several updates \(main, other\); pass update= to choose the one that is"):
        classifying(Validation(labelled(2)), updates=2)
    engine = classifying(Validation(labelled(2), update="other"), updates=2)
    assert engine[Validation].evaluator.updates[0].name == "other"


def test_several_data_sets_have_their_names_in_those_of_the_metrics() -> None:
    engine = classifying(Validation({"clean": labelled(2, 1), "noisy": labelled(2, 2)}, accuracy=Accuracy()))
    metrics = engine.run(labelled(2), max_epochs=1).metrics
    assert sorted(metrics) == ["val_clean_accuracy", "val_clean_loss", "val_noisy_accuracy", "val_noisy_loss"]


def test_an_update_without_a_loss_is_measured_by_its_metrics_only() -> None:
    def build_with(**metrics: Any) -> Engine:
        engine = Engine(Update.prediction(), model=mlp(5, 4, 3))
        engine.attach(Validation(labelled(1), **metrics))
        return engine

    with pytest.raises(
        ValueError, match="update 'main' has no loss and Validation has no metrics, so there is nothing"
    ):
        build_with()
    engine = build_with(accuracy=Accuracy())
    assert engine[Validation].metric_names(engine) == ["val_accuracy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"evry": "2ep"},
            r"Validation\(evry='2ep'\): evry= is not an argument, and '2ep' is not a metric; did you mean 'every'\?",
        ),
        ({"at": Events.STARTED}, r"at= is not an argument, and Events.STARTED is not a metric"),
        ({"evaluate": None}, r"evaluate= is not an argument, and None is not a metric; did you mean 'evaluator'\?"),
        ({"accuracy": Accuracy}, r"accuracy=Accuracy\): expected an instance; write Accuracy\(\)"),
        ({"accuracy": 3}, r"accuracy= is not an argument, and 3 is not a metric"),
        (
            {"dataset": [torch.zeros(999)]},
            r"^Validation\(dataset=a list of length 1\): dataset= is not an argument, and a list of length 1 is not a "
            r"metric; did you mean 'data'\?$",
        ),
        ({"val_check_interval": 0.5}, r"and 0\.5 is not a metric; did you mean 'every'\?$"),
        ({"check_val_every_n_epoch": 2}, r"and 2 is not a metric; did you mean 'every'\?$"),
        ({"test": torch.zeros(999)}, r"^Validation\(test=a tensor of shape \(999,\)\): test= is not an argument"),
    ],
)
def test_what_is_neither_an_argument_nor_a_metric_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Validation(labelled(1), **arguments)


@pytest.mark.parametrize("metrics", [Accuracy(), {"accuracy": Accuracy()}])
def test_metrics_by_position_are_told_from_an_evaluator(metrics: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"evaluator=a list of length 2\): .*by position, and metrics by keyword: Validation\(data, accuracy=",
    ):
        Validation(labelled(2), metrics)  # type: ignore[call-overload]


@pytest.mark.parametrize("argument", ["accuracy", "update"])
def test_an_evaluator_that_is_given_has_its_own_metrics(argument: str) -> None:
    value = Accuracy() if argument == "accuracy" else "main"
    with pytest.raises(TypeError, match=rf"Validation\({argument}=\): you passed an evaluator, which measures its own"):
        Validation(evaluator_of(mlp(5, 4, 1)), labelled(1), **{argument: value})  # type: ignore[call-overload]


def test_a_run_that_was_saved_with_the_long_form_continues_with_the_short_one() -> None:
    def build_with(*, short: bool) -> tuple[Engine, EarlyStopping]:
        torch.manual_seed(0)
        stopping = EarlyStopping("val_loss" if short else "loss", patience=50)
        engine = classifying(stopping, History())
        evaluator = Engine(engine.updates[0].spec.evaluation(), model=engine.model)
        evaluator.attach(Metrics(loss=Average()))
        engine.attach(Validation(labelled(3, 1)) if short else Validation(evaluator, labelled(3, 1)))
        return engine, stopping

    whole, expected = build_with(short=True)
    whole.run(labelled(4), max_epochs=6)
    first, _ = build_with(short=False)
    first.run(labelled(4), max_epochs=3)
    saved = first.state_dict()
    second, found = build_with(short=True)
    second.load_state_dict(saved)
    second.run(labelled(4), max_epochs=6)
    assert found.state_dict() == expected.state_dict()
    assert second.state.metrics == whole.state.metrics
    assert second.state.metrics.serials == whole.state.metrics.serials
    assert second[History].state_dict() == whole[History].state_dict()


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_slash_and_an_underscore_spell_one_name() -> None:
    history = History()
    engine = classifying(Validation(labelled(2), accuracy=Accuracy()), EarlyStopping("val/accuracy"), history)
    engine.run(labelled(2), max_epochs=2)
    assert history["val/accuracy"] == history["val_accuracy"]
    assert engine.state.metrics["val/loss"] == engine.state.metrics["val_loss"]
    assert engine[EarlyStopping].monitor.metric == "val_accuracy"
    with pytest.raises(KeyError, match="there is no metric 'val/nothing'"):
        _ = engine.state.metrics["val/nothing"]


@pytest.mark.filterwarnings("default::signalfire.FindingWarning")
def test_a_name_without_the_prefix_is_that_of_the_validation_and_is_said_once(capsys: Any) -> None:
    engine = classifying(Validation(labelled(2), accuracy=Accuracy()), EarlyStopping("accuracy"))
    engine.run(labelled(2, 3), max_epochs=2)
    assert [one.code for one in engine.findings.of_run() if one.code == "C40"] == ["C40"]
    assert engine[EarlyStopping].monitor.metric == "val_accuracy"


def test_a_metric_of_ones_own_with_the_name_that_was_given_is_the_one_that_is_read() -> None:
    engine = classifying(Validation(labelled(2), accuracy=Accuracy()), EarlyStopping("accuracy", mode="max"))

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE)
    def write(engine: Engine) -> None:
        engine.state.metrics["accuracy"] = float(engine.state.epoch)

    engine.run(labelled(2, 3), max_epochs=2)
    assert engine[EarlyStopping].monitor.metric == "accuracy"
    assert not engine.findings.of_run().of("C40")


def test_a_name_that_could_be_that_of_the_training_too_is_refused() -> None:
    engine = classifying(
        Validation(labelled(2), accuracy=Accuracy()), Metrics(train_accuracy=Accuracy()), EarlyStopping("accuracy")
    )
    with pytest.raises(KeyError, match=r"'accuracy', which is ambiguous; write 'val_accuracy' or 'train_accuracy'"):
        engine.run(labelled(2, 3), max_epochs=1)


def test_two_names_of_one_metric_or_of_one_place_in_a_log_are_refused(tmp_path: Any) -> None:
    with pytest.raises(
        ValueError, match=r"'validation' and 'again' write the metric 'val/loss', the same metric as 'val_loss'"
    ):
        classifying(Validation(labelled(2)), Validation(labelled(2), prefix="val/", name="again")).run(
            labelled(2, 3), max_epochs=1
        )
    metrics = Metrics(metrics={"kl": Average(), "train/kl": Average(lambda output, target: output.sum())})
    with pytest.raises(ValueError, match=r"the metrics 'kl' and 'train/kl' are both logged as 'train/kl'"):
        classifying(metrics, CSVLogger(tmp_path / "log.csv")).run(labelled(2), max_epochs=1)
    engine = classifying(Validation(labelled(2)))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update({"val/loss": 1.0}))
    with pytest.raises(ValueError, match=r"'val/loss' and 'val_loss' are the same metric"):
        engine.run(labelled(2, 3), max_epochs=1)


def test_two_data_sets_that_write_the_same_metric_are_refused() -> None:
    data = {"test": batches(1), "test_hard": batches(2)}
    metrics = {"l1": Average(nn.functional.l1_loss), "hard_l1": Average(nn.functional.l1_loss)}
    trainer = trainer_of(network(), Validation(data, metrics=metrics))
    with pytest.raises(ValueError, match=r"'test' and the data 'test_hard' both write the metric 'val_test_hard_l1'"):
        trainer.run(batches(1), max_epochs=1)


def test_an_update_of_a_single_function_has_no_output_to_measure() -> None:
    def whole(engine: Engine, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(engine.model(batch[0]), batch[1])

    engine = Engine(Update.from_function(whole, torch.optim.SGD, lr=0.05), model=mlp(5, 8, 3))
    with pytest.raises(
        ValueError, match=r"'validation': update 'main' is a single function and has no output for accuracy"
    ):
        engine.attach(Validation(labelled(2), accuracy=Accuracy()))
    engine.attach(Validation(labelled(2)))
    assert [*engine.run(labelled(2, 3), max_epochs=1).metrics] == ["val_loss"]


@pytest.mark.parametrize("metric", [Accuracy(), Average(lambda output, target: 1.0, higher_is_better=True)])
def test_the_loss_is_not_replaced_by_a_score(metric: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"loss={type(metric).__name__}\(\).*'loss' is the mean loss of the update.*a different name"
    ):
        Validation(labelled(1), loss=metric)


def test_another_loss_may_be_measured_in_place_of_the_updates() -> None:
    engine = classifying(validation := Validation(labelled(1), loss=nn.functional.cross_entropy))
    assert validation.metric_names(engine) == ["val_loss"]


def test_a_metric_that_is_given_twice_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Validation\(accuracy=\): 'accuracy' is given twice"):
        Validation(labelled(1), metrics={"accuracy": Accuracy()}, accuracy=Accuracy())


def test_an_update_that_reads_another_ones_output_says_that_the_evaluator_has_only_itself() -> None:
    def forward(engine: Engine, batch: Any) -> Tensor:
        output: Tensor = engine.model(batch[0]) + engine.find_update("a").output.detach()
        return output

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    sgd = partial(torch.optim.SGD, lr=0.1)
    updates = [Update.supervised(nn.functional.cross_entropy, sgd, name="a"), Update(forward, loss, sgd, name="b")]
    engine = Engine(updates, model=mlp(5, 4, 3))
    engine.attach(Validation(labelled(1), update="b"))
    with pytest.raises(KeyError) as error:
        engine.run(labelled(1), max_epochs=1)
    notes = " ".join(error.value.__notes__)
    assert "has only the trainer's update 'b'" in notes
    assert "Validation(evaluator, data)" in notes


@pytest.mark.parametrize(
    ("before", "now"), [("val_loss", "val/loss"), ("loss", "val_loss"), ("loss", "val/loss"), ("val_loss", "loss")]
)
def test_a_run_resumes_with_the_other_spelling_of_its_monitor(before: str, now: str) -> None:
    def monitored(name: str) -> Engine:
        return classifying(Validation(labelled(1, 1)), EarlyStopping(name, patience=1, restore_best=False))

    first, second = monitored(before), monitored(now)
    first.run(labelled(1), max_epochs=1)
    second.load_state_dict(first.state_dict())
    second.run(labelled(1), max_epochs=2)
    assert "W32" not in {one.code for one in second.findings.of_run()}


def test_a_metric_may_be_named_as_the_class_of_a_constructor_is() -> None:
    engine = build(network(), Validation(batches(1, seed=1), cls=Average(nn.functional.l1_loss)))
    assert "val_cls" in engine.run(batches(1), max_epochs=1).metrics
