"""Attaching, connecting, and arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from signalfire import Engine, EventEnum, Events, Handler, Phase, Update, on
from signalfire.findings import Findings
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    EarlyStopping,
    GradientClipping,
    History,
    Metrics,
    MixedPrecision,
    ProgressBar,
    Validation,
)
from signalfire.testing import check_handler
from tests.kit import SGD, batches, build, digest, evaluator_of, linear, mlp
from tests.mistakes.registry import comes_right, mistake


def one_epoch(engine: Engine) -> Engine:
    engine.run(batches(2), max_epochs=1)
    return engine


# ---- handlers of one's own --------------------------------------------------------------------------------------------


@mistake("W41")
def a_handler_whose_methods_lack_on(right: bool) -> None:
    class Counter(Handler):
        def count(self, engine: Engine) -> None: ...

    class Subscribed(Handler):
        @on(Events.ITERATION_COMPLETED)
        def count(self, engine: Engine) -> None: ...

    one_epoch(build(linear(5, 1), Subscribed() if right else Counter()))


@mistake("W41")
def a_method_named_after_an_event_as_a_callback(right: bool) -> None:
    class Wrong(Handler):
        @on(Events.STARTED)
        def start(self, engine: Engine) -> None: ...

        def on_epoch_completed(self, engine: Engine) -> None: ...

    class Right(Handler):
        @on(Events.EPOCH_COMPLETED)
        def on_epoch_completed(self, engine: Engine) -> None: ...

    one_epoch(build(linear(5, 1), Right() if right else Wrong()))


@mistake(AssertionError, "has no method decorated with @on")
def check_handler_on_an_empty_handler(right: bool) -> None:
    class Empty(Handler):
        def count(self, engine: Engine) -> None: ...

    check_handler(lambda: build(linear(5, 1)), History if right else Empty, batches(1), max_epochs=2)


@mistake("W47")
def a_state_that_is_saved_and_cannot_be_loaded(right: bool) -> None:
    class Counter(Handler):
        steps = 0

        @on(Events.ITERATION_COMPLETED)
        def count(self, engine: Engine) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

    class Loading(Counter):
        def load_state_dict(self, state: Any) -> None:
            self.steps = state["steps"]

    one_epoch(build(linear(5, 1), Loading() if right else Counter()))


@mistake("W47")
def a_state_with_an_object_that_torch_refuses_to_load(right: bool, folder: Path) -> None:
    class Recent(Handler):
        def __init__(self) -> None:
            super().__init__()
            self.losses: Any = [] if right else deque()

        @on(Events.ITERATION_COMPLETED)
        def keep(self, engine: Engine) -> None:
            self.losses.append(float(engine.state.update.loss or 0.0))

        def state_dict(self) -> dict[str, Any]:
            return {"losses": self.losses}

        def load_state_dict(self, state: Any) -> None:
            self.losses = state["losses"]

    one_epoch(build(linear(5, 1), Recent(), Checkpoint(folder)))


@mistake(ValueError, "declared with this event twice")
def one_event_declared_twice(right: bool) -> None:
    class Counter(Handler):
        @on(Events.EPOCH_COMPLETED)
        @on(Events.EPOCH_STARTED if right else Events.EPOCH_COMPLETED)
        def count(self, engine: Engine) -> None: ...


@mistake(TypeError, "function, not an event")
def a_declaration_without_its_event(right: bool) -> None:
    class Counter(Handler):
        @(on(Events.EPOCH_COMPLETED) if right else on)  # type: ignore[arg-type, untyped-decorator]
        def count(self, engine: Engine) -> None: ...


@mistake(TypeError, "Counter.count at .* cannot be called with only the engine")
def a_method_that_takes_no_engine(right: bool) -> None:
    class Counter(Handler):
        @on(Events.EPOCH_COMPLETED)
        def count(self) -> None: ...

    class Right(Handler):
        @on(Events.EPOCH_COMPLETED)
        def count(self, engine: Engine) -> None: ...

    one_epoch(build(linear(5, 1), Right() if right else Counter()))


@comes_right
def an_own_event_that_nobody_registered(right: bool) -> int:
    class Own(EventEnum):
        PING = "ping"

    class Listening(Handler):
        heard = 0

        @on(Own.PING)
        def listen(self, engine: Engine) -> None:
            self.heard += 1

    listening, engine = Listening(), build(linear(5, 1))
    if right:
        engine.register_events(Own)
    engine.attach(listening)
    engine.fire(Own.PING)
    return listening.heard


# ---- attaching --------------------------------------------------------------------------------------------------------


@comes_right
def one_history_for_two_folds(right: bool) -> Any:
    handlers = [History(), EMA(0.5), EarlyStopping("loss", patience=2, mode="min")]
    for _ in range(1 if right else 2):
        engine = build(linear(5, 1), Metrics(loss=Average()))
        with engine.attach(*handlers):
            engine.run(batches(2), max_epochs=2)
            state = digest(engine.state_dict()["handlers"])
    return state


@mistake(TypeError, "pass an instance")
def a_class_attached_instead_of_an_instance(right: bool) -> None:
    build(linear(5, 1)).attach(History() if right else History)  # type: ignore[arg-type]


@mistake(ValueError, "the name is taken by .*rename the handler")
def two_handlers_of_one_name(right: bool) -> None:
    build(linear(5, 1), History(), History(name="again") if right else History())


@mistake(ValueError, "attached to a different engine")
def one_handler_on_two_engines_at_once(right: bool) -> None:
    history = History()
    first = build(linear(5, 1), history)
    if right:
        first.detach(history)
    build(linear(5, 1), history)


@mistake(KeyError, "did you mean 'history'")
def a_misspelt_name_of_a_handler(right: bool) -> None:
    build(linear(5, 1), History()).handlers["history" if right else "historry"]


@mistake(AttributeError, r"find a handler by its name, engine\['ema'\]")
def a_handler_as_an_attribute(right: bool) -> None:
    handlers = build(linear(5, 1), EMA()).handlers
    handlers["ema"] if right else handlers.ema


@mistake("W45")
def without_that_is_not_entered(right: bool) -> None:
    engine = build(linear(5, 1), EMA())
    if right:
        with engine.without("ema"):
            one_epoch(engine)
    else:
        engine.without("ema")
        one_epoch(engine)


@mistake(TypeError, "enabled = 'no': expected True or False")
def disabled_with_a_word(right: bool) -> None:
    build(linear(5, 1), EMA()).handlers["ema"].enabled = False if right else "no"  # type: ignore[assignment]


# ---- connecting -------------------------------------------------------------------------------------------------------


@mistake(TypeError, "function, not an event")
def a_decorator_without_its_event(right: bool) -> None:
    engine = build(linear(5, 1))

    @(engine.on(Events.EPOCH_COMPLETED) if right else engine.on)  # type: ignore[arg-type, untyped-decorator]
    def log(engine: Engine) -> None: ...


@mistake("W48")
def a_decorator_without_its_at_sign(right: bool) -> None:
    engine = build(linear(5, 1))
    decorate = engine.on(Events.EPOCH_COMPLETED)

    def log(engine: Engine) -> None: ...

    if right:
        decorate(log)
    del decorate
    one_epoch(engine)


@mistake(TypeError, "is a class")
def a_class_as_a_receiver(right: bool) -> None:
    class Log:
        def __init__(self, engine: Engine) -> None: ...

        def __call__(self, engine: Engine) -> None: ...

    engine = build(linear(5, 1))
    engine.connect(Events.EPOCH_COMPLETED, Log(engine) if right else Log)


@mistake(TypeError, "takes self but is not bound to an object")
def a_method_of_a_class_without_an_object(right: bool) -> None:
    class Log:
        def write(self) -> None: ...

        def write_to(self, engine: Engine) -> None: ...

    build(linear(5, 1)).connect(Events.EPOCH_COMPLETED, Log().write_to if right else Log.write)


@mistake(TypeError, r"has no parameter self; declare it as count\(self, engine\)")
def a_method_of_a_handler_without_self(right: bool) -> None:
    class Right(Handler):
        @on(Events.EPOCH_COMPLETED)
        def count(self, engine: Engine) -> None: ...

    class Wrong(Handler):
        @on(Events.EPOCH_COMPLETED)
        def count() -> None: ...  # type: ignore[misc]

    build(linear(5, 1)).attach(Right() if right else Wrong())


@mistake(TypeError, "None is not callable")
def a_function_called_where_it_is_connected(right: bool) -> None:
    def log(engine: Engine) -> None: ...

    engine = build(linear(5, 1))
    engine.connect(Events.EPOCH_COMPLETED, log if right else log(engine))  # type: ignore[func-returns-value, arg-type]


@mistake(TypeError, "attach a handler with engine.attach")
def a_handler_connected_as_a_function(right: bool) -> None:
    engine, history = build(linear(5, 1)), History()
    engine.attach(history) if right else engine.connect(Events.EPOCH_COMPLETED, history)  # type: ignore[arg-type]


@mistake(TypeError, "rank='first': expected an int")
def a_rank_in_words(right: bool) -> None:
    rank: Any = -1 if right else "first"
    build(linear(5, 1)).connect(Events.EPOCH_COMPLETED, lambda engine: None, rank=rank)


@mistake(ValueError, "expected one of Phase.PREPARE.*did you mean 'RECORD'")
def a_phase_by_its_name(right: bool) -> None:
    phase: Any = Phase.RECORD if right else "record"
    build(linear(5, 1)).connect(Events.EPOCH_COMPLETED, lambda engine: None, phase=phase)


@mistake(AttributeError, "did you mean 'EPOCH_COMPLETED'")
def a_misspelt_event(right: bool) -> None:
    getattr(Events, "EPOCH_COMPLETED" if right else "EPOCH_COMPLETE")


@mistake(TypeError, "each=2 is not a filter; available filters: every=")
def a_misspelt_filter(right: bool) -> None:
    options: dict[str, Any] = {"every" if right else "each": 2}
    Events.EPOCH_COMPLETED(**options)


def notebook(runs: int, changed: str = "") -> Engine:
    """An engine that a notebook's cell has connected a function to, each time that it was run."""
    engine = build(linear(5, 1))
    cell = "@engine.on(Events.EPOCH_COMPLETED)\ndef log(engine):\n    count = 1\n"
    scope = {"engine": engine, "Events": Events, "__name__": "__main__"}
    for number in range(runs):
        exec(compile(cell + changed * number, f"<cell {number}>", "exec"), scope)
    return one_epoch(engine)


@mistake("W44")
def a_cell_that_is_run_twice(right: bool) -> None:
    notebook(1 if right else 2)


@mistake("W44")
def a_cell_that_is_changed_and_run_again(right: bool) -> None:
    notebook(1 if right else 2, changed="    count += 1\n")


@mistake("W44")
def one_function_in_two_phases(right: bool) -> None:
    def log(engine: Engine) -> None: ...

    engine = build(linear(5, 1))
    engine.connect(Events.EPOCH_COMPLETED, log)
    if not right:
        engine.connect(Events.EPOCH_COMPLETED, log, phase=Phase.RECORD)
    engine.connect(Events.ITERATION_COMPLETED(every=100), log)
    engine.connect(Events.ITERATION_COMPLETED(once=1), log)


@mistake("W44")
def lambdas_in_a_loop_that_all_see_its_last_value(right: bool) -> None:
    engine, seen = build(linear(5, 1)), []

    def of(factor: int) -> Callable[[Engine], None]:
        return lambda engine: seen.append(factor)

    for factor in range(3):
        engine.connect(Events.EPOCH_COMPLETED, of(factor) if right else lambda engine: seen.append(factor))  # noqa: B023


@mistake("W44")
def connected_anew_in_every_epoch(right: bool) -> None:
    engine = build(linear(5, 1))

    def begin(engine: Engine) -> None:
        handle = engine.connect(Events.ITERATION_COMPLETED, lambda engine: None)
        if right:
            engine.connect(Events.EPOCH_COMPLETED(once=engine.state.epoch), lambda engine: handle.detach())

    engine.connect(Events.EPOCH_STARTED, begin)
    engine.run(batches(2), max_epochs=2)


@mistake("W49")
def an_event_of_training_on_an_evaluator(right: bool) -> None:
    engine = evaluator_of(linear(5, 1))
    engine.connect(Events.ITERATION_COMPLETED if right else Events.OPTIMIZER_STEP_COMPLETED, lambda engine: None)
    engine.run(batches(2))


@mistake("W49")
def the_output_of_an_update_that_has_none(right: bool) -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        return mse_loss(engine.model(batch[0]), batch[1])

    engine = Engine(Update.from_function(step, SGD), linear(5, 1))
    engine.connect(Events.LOSS_COMPUTED if right else Events.FORWARD_COMPLETED, lambda engine: None)
    one_epoch(engine)


# ---- modules ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A loss with a learned weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * mse_loss(output, target) + self.weight**2


@mistake("W42")
def a_loss_with_parameters_that_the_optimizer_lacks(right: bool) -> None:
    model, loss = linear(5, 1), Scaled()
    parameters = [*model.parameters(), *(loss.parameters() if right else ())]
    one_epoch(Engine(Update.supervised(loss, SGD(parameters)), model))


@mistake("W43")
def a_loss_that_is_trained_without_being_meant_to(right: bool) -> Findings:
    loss = Scaled().requires_grad_(not right)
    return one_epoch(Engine(Update.supervised(loss, SGD), linear(5, 1))).findings.of_run()


@mistake("W46")
def the_users_own_ddp_over_two_processes(right: bool) -> None:
    model = linear(5, 1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        evaluator_of(model if right else DistributedDataParallel(model)).run(batches(1))
    finally:
        dist.destroy_process_group()


@comes_right
def a_model_that_the_user_wrapped(right: bool) -> list[str]:
    model = mlp(5, 8, 1)
    return list(one_epoch(build(model if right else nn.DataParallel(model))).weights()["model"])


@mistake(TypeError, "pass an instance, not the class")
def a_class_of_models(right: bool) -> None:
    Engine(Update.supervised(mse_loss, SGD), nn.Identity() if right else nn.Identity)  # type: ignore[arg-type]


# ---- arguments --------------------------------------------------------------------------------------------------------


@mistake(TypeError, "is neither an Update")
def model_and_update_in_the_other_order(right: bool) -> None:
    pair: list[Any] = [Update.supervised(mse_loss, SGD), linear(5, 1)]
    Engine(*pair if right else pair[::-1])


@mistake(ValueError, "'W1O' is not a finding code")
def a_misspelt_code(right: bool) -> None:
    Engine(Update.prediction(), linear(5, 1), allow=["W10" if right else "W1O"])


@mistake(TypeError, "pass the bound by keyword, such as max_epochs=1")
def epochs_without_their_name(right: bool) -> None:
    run: Any = build(linear(5, 1)).run
    run(batches(2), max_epochs=1) if right else run(batches(2), 1)


@comes_right
def a_norm_without_its_name(right: bool) -> float | None:
    return (GradientClipping(max_norm=1.0) if right else GradientClipping(1.0)).max_norm


@comes_right
def a_precision_as_others_write_it(right: bool) -> str:
    return str(MixedPrecision("bf16" if right else "bf16-mixed").dtype)


@mistake(TypeError, r"Checkpoint\(every=0\)")
def a_checkpoint_every_0(right: bool, folder: Path) -> None:
    every: Any = "1ep" if right else 0
    Checkpoint(folder, every=every)


@mistake(ValueError, "the data is empty")
def empty_validation_data(right: bool) -> None:
    Validation(evaluator_of(linear(5, 1)), batches(1) if right else [])


@mistake(TypeError, "expected an open text file")
def a_path_for_an_open_file(right: bool) -> None:
    file: Any = None if right else "log.txt"
    ProgressBar(file=file)
