"""The engine: what it is made of, what it refuses, and how it begins anew."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Update, on
from signalfire.handlers import EMA, GradientClipping, History
from tests import kit
from tests.kit import build, linear

Batch = tuple[Tensor, Tensor]
mse = nn.functional.mse_loss
SGD = partial(torch.optim.SGD, lr=0.1)


def make_data() -> list[Batch]:
    return kit.batches(3, 3, 2)


def make_engine(**options: Any) -> Engine:
    return build(linear(3, 2), **options)


# ---- what it is made of ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [None, [], print, "main", [Update.prediction(), print]])
def test_an_engine_takes_updates_only(update: Any) -> None:
    with pytest.raises(TypeError, match="is neither an Update nor a sequence of updates"):
        Engine(update)


def test_updates_of_one_engine_have_different_names() -> None:
    with pytest.raises(ValueError, match=r"the update names \['main', 'main'\] are not unique"):
        Engine([Update.prediction(), Update.prediction()])


def test_to_train_every_update_has_an_optimizer() -> None:
    with pytest.raises(ValueError, match="'judge' has no optimizer"):
        Engine([Update.supervised(mse, SGD), Update.prediction(name="judge")], model=linear(3, 2))


def test_engines_are_not_copied_and_a_copied_handler_is_attached_to_nothing() -> None:
    engine = make_engine()
    clipping = GradientClipping(max_norm=1.0)
    engine.attach(clipping)
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            copying(engine)
    for twin in (copy.deepcopy(clipping), pickle.loads(pickle.dumps(clipping))):
        assert twin.engine is None
        make_engine().attach(twin)


def test_several_modules_are_found_by_name_and_as_one_model() -> None:
    a, b = linear(3, 2), linear(2, 1)
    engine = Engine(Update.prediction(lambda engine, batch: None), model={"a": a, "b": b})
    assert engine.modules == {"a": a, "b": b}
    assert dict(engine.model.named_children()) == {"a": a, "b": b}
    single = Engine(Update.prediction(), model=a)
    assert (single.modules, single.model) == ({"model": a}, a)


@pytest.mark.parametrize("model", ["resnet", nn.Linear, {"a": 3}, [nn.Identity()]], ids=str)
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"Engine: model=.* is neither a torch module nor a mapping from names"):
        Engine(Update.prediction(), model=model)


def test_its_device_is_that_of_the_first_parameter_and_the_cpu_without_one() -> None:
    assert make_engine().device == torch.device("cpu")
    assert build(linear(3, 2).to("meta")).device == torch.device("meta")
    assert Engine(Update.prediction(), model={"a": nn.Identity(), "b": linear(1, 1).to("meta")}).device.type == "meta"
    assert Engine(Update.prediction()).device == torch.device("cpu")


def test_without_a_seed_it_takes_torchs_initial_one() -> None:
    torch.manual_seed(2**40 + 1)  # more than a seed that is given may be
    assert (Engine(Update.prediction()).seed, Engine(Update.prediction(), seed=3).seed) == (2**40 + 1, 3)
    with pytest.raises(ValueError, match=r"Engine\(seed=-1\): expected an int with 0 <= seed < 2\*\*32"):
        make_engine(seed=-1)


def test_it_trains_if_an_update_has_an_optimizer_unless_it_is_told_not_to() -> None:
    engine, evaluator = make_engine(), make_engine(training=False)
    before = evaluator.model.weight.clone()
    evaluator.run(make_data())
    assert torch.equal(evaluator.model.weight, before)
    assert (repr(engine), repr(evaluator)) == (
        "<Engine trains main; 0 handlers>",
        "<Engine evaluates main; 0 handlers>",
    )


def test_updates_are_found_by_name_and_the_first_without_one() -> None:
    engine = Engine([Update.prediction(name="a"), Update.prediction(name="b")])
    assert (engine.find_update(), engine.find_update("b")) == engine.updates


def test_the_optimizer_and_the_loss_of_the_only_update_are_the_engines() -> None:
    engine = build(linear(5, 1))
    assert engine.loss is None
    with pytest.raises(
        AttributeError,
        match=r"engine\.optimizer: there is no optimizer, because the optimizer is built when a run begins",
    ):
        _ = engine.optimizer
    engine.run(kit.batches(2), max_epochs=1)
    assert engine.optimizer is engine.updates[0].optimizer
    loss, expected = engine.loss, engine.updates[0].loss
    assert isinstance(loss, Tensor)
    assert isinstance(expected, Tensor)
    assert torch.equal(loss, expected)
    assert not loss.requires_grad
    with pytest.raises(AttributeError, match="there is no optimizer, because this engine only evaluates"):
        _ = Engine(Update.prediction(), model=linear(5, 1)).optimizer
    several = Engine([Update.from_function(lambda engine, batch: None, name=name) for name in ("d", "g")])
    for attribute in ("optimizer", "loss"):
        with pytest.raises(
            AttributeError, match=rf"several updates: 'd', 'g'; write engine\.find_update\('d'\)\.{attribute}"
        ):
            getattr(several, attribute)


def test_handlers_are_attached_from_lists_and_found_by_name_or_class() -> None:
    ema, history, clipping = EMA(0.5), History(), GradientClipping(max_norm=1.0)
    engine = build(linear(5, 1))
    with engine.attach([ema, history], clipping):
        assert engine["ema"] is engine[EMA] is ema
        assert [*engine.handlers] == ["ema", "history", "gradient_clipping"]
    assert [*engine.handlers] == []
    with pytest.raises(KeyError, match="no handler 'ema' is attached"):
        _ = engine["ema"]
    with pytest.raises(TypeError, match=r"engine\[0\]: expected the name or the class of a handler"):
        _ = engine[0]  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="separate arguments, or in a single list"):
        engine.attach({"ema": ema})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="already attached"):
        engine.attach([history, history])
    assert [*engine.handlers] == []


def test_only_what_does_not_train_evaluates() -> None:
    engine = make_engine()
    others: list[Any] = [make_engine(), engine.model, None]
    for other in others:
        with pytest.raises(ValueError, match=r"the evaluator must not train; build it with update\.evaluation\(\)"):
            engine.evaluate(other, make_data())


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_reset_begins_anew_with_the_weights_kept() -> None:
    class Counting(Handler):
        count = 0

        @on(Events.ITERATION_COMPLETED)
        def increase(self, engine: Engine) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    engine = make_engine()
    counting = Counting()
    engine.attach(counting)
    engine.run(make_data(), max_epochs=2)
    weights = [p.clone() for p in engine.model.parameters()]
    optimizer = engine.updates[0].optimizer
    engine.reset()
    assert (engine.state.epoch, engine.state.iteration, engine.updates[0].steps, counting.count) == (0, 0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.model.parameters(), strict=True))
    engine.run(make_data(), max_epochs=1)
    assert counting.count == 3
    assert engine.updates[0].optimizer is not optimizer


def test_an_engine_that_evaluates_starts_anew_in_every_run() -> None:
    engine = Engine(Update.supervised(mse), model=linear(3, 2))
    for _ in range(2):
        assert engine.run(make_data()).iteration == 3


@pytest.mark.parametrize(
    "inside", [lambda engine: engine.reset(), lambda engine: engine.run(max_iters=1)], ids=["reset", "run"]
)
def test_a_run_is_neither_reset_nor_run_again_from_inside(inside: Any) -> None:
    engine = make_engine()
    engine.connect(Events.ITERATION_COMPLETED(once=1), inside)
    with pytest.raises(RuntimeError, match=r"\(\) was called during a run"):
        engine.run(make_data(), max_epochs=1)
    assert not engine.running


def test_it_is_running_from_the_setup_of_the_model_to_the_end_also_of_a_run_that_failed() -> None:
    engine, seen = make_engine(), list[bool]()
    engine.connect(Events.MODEL_SETUP | Events.ENDED, lambda engine: seen.append(engine.running))
    assert not engine.running
    engine.run(make_data(), max_epochs=1)
    assert not engine.running
    with pytest.raises(RuntimeError):
        engine.run([(torch.ones(1, 7), torch.ones(1, 2))], max_epochs=2)
    assert not engine.running
    assert seen == [True] * 4


def test_in_a_dry_run_those_who_write_files_take_no_part() -> None:
    class Writer(Handler):
        writes = True

        @on(Events.ITERATION_COMPLETED)
        def write(self, engine: Engine) -> None:
            written.append(engine.state.iteration)

    written: list[int] = []
    engine = make_engine()
    engine.attach(Writer())
    engine.dry_run = True
    engine.run(make_data(), max_epochs=1)
    engine.dry_run = False
    engine.run(make_data(), max_epochs=2)
    assert written == [4, 5, 6]


def test_an_error_in_a_property_of_a_subclass_is_the_error() -> None:
    class Own(Engine):
        @property
        def width(self) -> int:
            return self.model.wdth  # type: ignore[no-any-return]

    engine = Own(Update.prediction(), model=linear(3, 2))
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'wdth'"):
        _ = engine.width


def test_what_looks_at_every_attribute_finds_an_engine_without_an_optimizer() -> None:
    engine = Engine([Update.prediction(name="a"), Update.prediction(name="b")])
    assert not hasattr(engine, "optimizer")
    assert getattr(engine, "loss", None) is None
    assert "handlers" in dict(inspect.getmembers(engine))


def test_handlers_are_attached_from_any_iterable_and_found_with_in() -> None:
    engine = Engine(Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1), model=linear(5, 1))
    engine.attach(one for one in [EMA(0.5)])
    engine.attach({"a": History()}.values(), {GradientClipping(max_norm=1.0)})
    assert all(one in engine for one in ("ema", EMA, "history", History, GradientClipping, Handler))
    assert not any(one in engine for one in ("lookahead", int, 3, None))
    with pytest.raises(TypeError, match="'Engine' object is not iterable"):
        list(engine)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="expected a Handler"):
        engine.attach({"a": History(name="other")})  # type: ignore[dict-item]
