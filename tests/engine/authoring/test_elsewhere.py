"""What people of other engines type first is an error that says the name here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import signalfire
from signalfire import Engine, EventEnum, Events, Update, handlers
from signalfire.authoring.elsewhere import CONSTRUCTOR, ENGINE, HANDLERS, RUN
from tests.kit import batches, build, linear


@pytest.mark.parametrize("name", ENGINE)
def test_an_attribute_of_other_engines(name: str) -> None:
    assert not hasattr(Engine, name)
    with pytest.raises(AttributeError) as error:
        getattr(build(linear(5, 1)), name)
    assert str(error.value) == f"Engine has no attribute {name!r}; use {ENGINE[name]}"


def test_a_slip_in_an_attribute_and_a_private_one() -> None:
    engine = build(linear(5, 1))
    with pytest.raises(AttributeError, match=r"Engine has no attribute 'atach'; did you mean 'attach'\?"):
        engine.atach  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"^Engine has no attribute '_runn'$"):
        engine._runn  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", RUN)
def test_an_argument_of_run(name: str) -> None:
    arguments: dict[str, Any] = {name: 3}
    with pytest.raises(TypeError) as error:
        build(linear(5, 1)).run(batches(1), **arguments)
    assert str(error.value) == f"run() got an unexpected keyword argument {name!r}; {RUN[name]}"


def test_a_slip_in_an_argument_of_run() -> None:
    arguments: dict[str, Any] = {"max_epoch": 3}
    with pytest.raises(
        TypeError, match=r"run\(\) got an unexpected keyword argument 'max_epoch'; did you mean 'max_epochs'\?"
    ):
        build(linear(5, 1)).run(batches(1), **arguments)


@pytest.mark.parametrize("name", HANDLERS)
def test_a_class_of_handlers(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute {name!r}; use ") as error:
        getattr(handlers, name)
    assert HANDLERS[name] in str(error.value)
    first = HANDLERS[name].split(",")[0].split()[0]
    assert first in handlers.__all__ or not first[0].isupper(), first


IMPORTS = {
    "from signalfire.handlers import ModelCheckpoint": "use Checkpoint",
    "from signalfire.handlers import Engine": "it is in signalfire",
    "from signalfire.handlers import Trainer": "use Engine, in signalfire",
    "from signalfire.handlers import Precision": "use MixedPrecision, or TruePrecision",
    "from signalfire.handlers import Chekpoint": "did you mean 'Checkpoint'?",
    "from signalfire import Checkpoint": "it is in signalfire.handlers",
    "from signalfire import Engine, ProgressBar": "it is in signalfire.handlers",
    "from signalfire import EarlyStopping": "it is in signalfire.handlers",
    "from signalfire import ModelCheckpoint": "use Checkpoint, in signalfire.handlers",
    "from signalfire import Trainer": "use Engine",
    "from signalfire import Callback": "use Handler",
    "from signalfire import set_seed": "use seed_everything",
    "from signalfire import create_supervised_trainer": ("use Engine(Update.supervised(loss, optimizer), model=model)"),
    "from signalfire import TrainingArguments": "use arguments of engine.run(data, max_epochs=...), and handlers",
    "from signalfire import EMAHandler": "use EMA, in signalfire.handlers",
    "from signalfire.handlers import ModelEMA": "use EMA",
    "from signalfire import WandbCallback": "use WandbLogger, in signalfire.handlers",
    "from signalfire import Claim": "it is in signalfire.authoring",
    "from signalfire import Chekpoint": "did you mean 'Checkpoint'? It is in signalfire.handlers",
    "from signalfire.authoring import Checkpoint": "it is in signalfire.handlers",
}


@pytest.mark.parametrize(("line", "hint"), IMPORTS.items())
def test_an_import_says_where_a_name_is_or_what_it_is_called_here(line: str, hint: str) -> None:
    package, name = line.split()[1], line.split()[-1]
    with pytest.raises(ImportError) as error:
        exec(line)
    assert str(error.value) == f"cannot import name {name!r} from {package!r}; {hint}"
    module = import_module(package)
    assert not hasattr(module, name)
    if package != "signalfire.authoring":
        with pytest.raises(AttributeError) as missing:
            getattr(module, name)
        assert str(missing.value) == f"module {package!r} has no attribute {name!r}; {hint}"


def test_other_names_are_errors_of_python() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'xyzzy' from 'signalfire' \("):
        exec("from signalfire import xyzzy")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'signalfire\.handlers\.xyzzy'$"):
        import_module("signalfire.handlers.xyzzy")
    with pytest.raises(AttributeError, match=r"^module 'signalfire' has no attribute 'exact'; it is a module: import "):
        vars(signalfire)["__getattr__"]("exact")


EVENTS = {
    "BATCH_END": "ITERATION_COMPLETED",
    "STEP_END": "ITERATION_COMPLETED",
    "ITERATION_END": "ITERATION_COMPLETED",
    "ITERATION_BEGIN": "ITERATION_STARTED",
    "BATCH_STARTED": "ITERATION_STARTED",
    "EPOCH_BEGIN": "EPOCH_STARTED",
    "EPOCH_END": "EPOCH_COMPLETED",
    "EPOCH_FINISHED": "EPOCH_COMPLETED",
    "TRAIN_END": "COMPLETED",
    "FIT_END": "COMPLETED",
    "VALIDATION_START": "EVALUATION_STARTED",
    "TEST_END": "EVALUATION_COMPLETED",
    "UPDATE_END": "UPDATE_COMPLETED",
    "BACKWARD_BEGIN": "BACKWARD_STARTED",
    "OPTIMIZER_STEP_END": "OPTIMIZER_STEP_COMPLETED",
    "on_train_batch_end": "ITERATION_COMPLETED",
    "ON_FIT_START": "STARTED",
}


@pytest.mark.parametrize(("name", "event"), EVENTS.items())
def test_an_event(name: str, event: str) -> None:
    with pytest.raises(AttributeError, match=rf"Events has no event {name!r}; did you mean '{event}'") as error:
        getattr(Events, name)
    assert event in Events.__members__, error


def test_an_event_of_a_catalogue_that_ends_its_names_otherwise() -> None:
    class Steps(EventEnum):
        STEP_STARTED = "started"
        STEP_ENDED = "ended"

    with pytest.raises(AttributeError, match=r"Steps has no event 'STEP_END'; did you mean 'STEP_ENDED'\?"):
        Steps.STEP_END  # noqa: B018


def test_the_filter_of_another_engine() -> None:
    arguments: dict[str, Any] = {"event_filter": bool}
    with pytest.raises(TypeError, match=r"event_filter=.* is not a filter; .*; did you mean 'when'\?"):
        Events.STARTED(**arguments)


def test_what_is_given_to_run_by_position() -> None:
    run: Any = build(linear(5, 1)).run
    with pytest.raises(
        TypeError, match=r"^run\(\) takes only the data by position; pass the bound by keyword, such as max_epochs=2$"
    ):
        run(batches(1), 2)
    with pytest.raises(TypeError, match=r"^run\(\) takes only the training data .* attach Validation\(data\)$"):
        run(batches(1), batches(2))


@pytest.mark.parametrize(
    ("name", "hint"), {"epochs": "write max_epochs=", "max_iter": "did you mean 'max_iters'?"}.items()
)
def test_an_argument_of_check(name: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        build(linear(5, 1)).check(batches(1), **{name: 2})
    assert str(error.value) == f"check() got an unexpected keyword argument {name!r}; {hint}"


CONSTRUCTED = CONSTRUCTOR | {
    "max_epochs": "it is an argument of run: engine.run(data, max_epochs=...)",
    "val_loader": "it is an argument of run: attach Validation(data)",
    "sed": "did you mean 'seed'?",
}


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_an_argument_of_an_engine(name: str) -> None:
    arguments: dict[str, Any] = {name: 3}
    with pytest.raises(TypeError) as error:
        Engine(Update.supervised(nn.functional.mse_loss, torch.optim.SGD), **arguments)
    assert str(error.value) == f"Engine() got an unexpected keyword argument {name!r}; {CONSTRUCTED[name]}"


OTHER_NAMES = [
    (kind, name, here)
    for public in handlers.__all__
    if isinstance(kind := getattr(handlers, public), type) and issubclass(kind, signalfire.Handler)
    for name, here in kind.other_names.items()
]


@pytest.mark.parametrize(("kind", "name", "here"), OTHER_NAMES)
def test_an_argument_of_a_handler(kind: Any, name: str, here: str) -> None:
    with pytest.raises(TypeError) as error:
        kind(**{name: 3})
    assert str(error.value) == f"{kind.__name__}() got an unexpected keyword argument {name!r}; use {here}"


def test_arguments_of_other_libraries() -> None:
    """Of the table above, those that are typed most: none of them is missing."""
    known = {(kind.__name__, name) for kind, name, _ in OTHER_NAMES}
    assert known >= {
        ("CSVLogger", "every_n_steps"),
        ("Checkpoint", "save_best_only"),
        ("Checkpoint", "save_last"),
        ("Checkpoint", "score_function"),
        ("LRScheduling", "gamma"),
        ("LRScheduling", "step_size"),
        ("LabelSmoothing", "smoothing"),
        ("MixedPrecision", "dtype"),
        ("SWA", "swa_lrs"),
    }


@pytest.mark.parametrize(
    "kind", [*dict.fromkeys(kind for kind, *_ in OTHER_NAMES), handlers.JSONLinesLogger, handlers.L1, handlers.L2]
)
def test_an_error_about_arguments_names_the_class_that_is_written(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__}\.__init__\(\) takes .* positional arguments? but 10 were given$"
    ):
        kind(*range(9))


def test_a_slip_in_an_argument_of_a_handler() -> None:
    arguments: dict[str, Any] = {"decya": 0.5}
    with pytest.raises(TypeError, match=r"EMA\(\) got an unexpected keyword argument 'decya'; did you mean 'decay'\?"):
        handlers.EMA(**arguments)
