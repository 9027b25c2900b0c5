"""EarlyStopping against a plain implementation of the definition of patience."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, FindingWarning, Phase, Update
from signalfire.handlers import Checkpoint, EarlyStopping, Validation
from signalfire.testing import check_handler
from tests import kit
from tests.kit import evaluator_of, same, spread

BATCHES = [(torch.ones(2, 3), torch.ones(2, 1))] * 2


def engine_of(scores: Sequence[float], *handlers: Any, every: int = 1) -> Engine:
    """An engine that produces these scores, one every so many epochs."""
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.01))
    engine = Engine(update, model=nn.Linear(3, 1), seed=0)
    engine.attach(*handlers)

    @engine.on(Events.EPOCH_COMPLETED(every=every))
    def score(engine: Engine) -> None:
        engine.state.metrics["score"] = scores[engine.state.epoch // every - 1]

    return engine


def stops_at(scores: Sequence[float], **options: Any) -> int:
    """The epoch in which the run ends."""
    engine = engine_of(scores, EarlyStopping("score", **{"mode": "min", **options}))
    return engine.run(BATCHES, max_epochs=len(scores)).epoch


@pytest.mark.parametrize(("patience", "epoch"), [(1, 3), (2, 6), (3, 7), (4, 8)])
def test_it_stops_at_the_patience_th_value_in_a_row_without_improvement(patience: int, epoch: int) -> None:
    scores = [5.0, 4.0, 4.5, 3.0, 3.1, 3.0, 3.2, 3.3, 3.4]  # equal is no improvement
    assert stops_at(scores, patience=patience) == epoch


def test_without_a_plateau_it_does_not_stop() -> None:
    handler = EarlyStopping("score", mode="min", patience=1)
    engine = engine_of([4.0, 3.0, 2.0, 1.0], handler)
    state = engine.run(BATCHES, max_epochs=4)
    assert (state.epoch, state.stop_reason) == (4, None)
    assert (handler.best, handler.waited) == (1.0, 0)


def test_the_greatest_is_best_in_mode_max() -> None:
    assert stops_at([1.0, 2.0, 3.0, 3.0, 2.5, 9.0], mode="max", patience=2) == 5


def test_the_reason_is_reported_and_the_run_completes() -> None:
    engine = engine_of([1.0, 2.0, 2.0, 2.0], EarlyStopping("score", mode="min", patience=2))
    reported: list[str] = []
    for event in (Events.TERMINATED, Events.COMPLETED):
        engine.connect(event, lambda engine, event=event: reported.append(event.name))
    state = engine.run(BATCHES, max_epochs=4)
    assert state.epoch == 3
    assert state.stop_reason is not None
    assert "score" in state.stop_reason
    assert "1.0" in state.stop_reason
    assert reported == ["TERMINATED", "COMPLETED"]


def test_an_improvement_has_to_exceed_min_delta() -> None:
    scores = [1.0, 0.75, 0.5, 0.25]  # each is better than the one before by exactly 0.25
    assert stops_at(scores, patience=1, min_delta=0.25) == 2
    assert stops_at(scores, patience=1, min_delta=0.2) == 4
    # Small steps add up: the comparison is with the best, not with the value before.
    assert stops_at([1.0, 0.9, 0.8, 0.7, 0.6], patience=3, min_delta=0.25) == 5


@pytest.mark.parametrize(
    ("mode", "scores", "epoch"),
    [
        ("min", [-10.0, -10.5, -10.5], 2),  # 5 % better is not enough
        ("min", [-10.0, -11.5, -13.5], 3),
        ("max", [-10.0, -9.5, -9.5], 2),
        ("max", [-10.0, -8.5, -7.0], 3),
        ("min", [10.0, 9.5, 9.5], 2),
        ("max", [10.0, 11.5, 13.5], 3),
    ],
)
def test_a_relative_min_delta_works_for_negative_scores(mode: Any, scores: list[float], epoch: int) -> None:
    assert stops_at(scores, mode=mode, patience=1, min_delta=0.1, relative=True) == epoch


def test_nan_is_never_an_improvement() -> None:
    assert stops_at([math.nan] * 5, patience=3, check_finite=False) == 3
    assert stops_at([2.0, math.nan, math.nan, 1.0], patience=2, check_finite=False) == 3
    handler = EarlyStopping("score", mode="min", patience=3, check_finite=False)
    engine_of([math.nan, 2.0, math.nan, 1.0, 3.0], handler).run(BATCHES, max_epochs=5)
    assert (handler.best, handler.waited) == (1.0, 1)


def test_a_recovery_takes_back_a_stop_that_min_epochs_holds() -> None:
    scores = [1.0, 2.0, 2.0, 0.5, 0.6, 0.4, 0.5, 0.5]
    engine = engine_of(scores, EarlyStopping("score", mode="min", patience=2))
    assert engine.run(BATCHES, max_epochs=8, min_epochs=5).epoch == 8
    engine = engine_of(scores, EarlyStopping("score", mode="min", patience=2))
    assert engine.run(BATCHES, max_epochs=8).epoch == 3


def test_without_a_recovery_it_stops_as_soon_as_min_epochs_allow() -> None:
    engine = engine_of([1.0] * 8, EarlyStopping("score", mode="min", patience=2))
    assert engine.run(BATCHES, max_epochs=8, min_epochs=5).epoch == 5


def test_it_acts_once_for_each_new_value() -> None:
    handler = EarlyStopping("score", mode="min", patience=3)
    engine = engine_of([1.0] * 5, handler, every=2)
    engine.state.metrics.announce("user", ["score"])  # it is not there yet when the first epoch ends
    assert engine.run(BATCHES, max_epochs=10).epoch == 8  # values at 2, 4, 6, 8: one best and three that are not
    assert handler.waited == 3


def test_the_same_number_written_again_is_a_new_value() -> None:
    assert stops_at([1.0, 1.0, 1.0], patience=1) == 2


@pytest.mark.filterwarnings("ignore:W84")
@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
@pytest.mark.filterwarnings("ignore:C28")
def test_validation_every_second_epoch_counts_once_each() -> None:
    model = nn.Linear(3, 1)
    evaluator = evaluator_of(model)
    engine = Engine(
        Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=1e-30)), model=model, seed=0
    )  # no step can change a weight: the loss never improves
    handler = EarlyStopping("loss", patience=2)
    engine.attach(handler, Validation(evaluator, BATCHES, every="2ep"))
    assert engine.run(BATCHES, max_epochs=20).epoch == 6


def test_a_metric_that_comes_inside_the_epoch_stops_there() -> None:
    engine = engine_of([9.0] * 9, EarlyStopping("inner", mode="min", patience=2))

    @engine.on(Events.ITERATION_COMPLETED)
    def inner(engine: Engine) -> None:
        engine.state.metrics["inner"] = 1.0

    state = engine.run(BATCHES * 3, max_epochs=5)
    assert (state.epoch, state.iteration) == (1, 3)


def test_a_missing_metric_is_an_error_that_names_those_there_are() -> None:
    engine = engine_of([1.0] * 4, EarlyStopping("scor", mode="min"))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(accuracy=0.5))
    with pytest.raises(KeyError, match=r"EarlyStopping.*'scor'.*accuracy, score.*did you mean 'score'"):
        engine.run(BATCHES, max_epochs=4)
    assert engine.state.epoch == 1


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_an_announced_metric_that_comes_later_is_no_error() -> None:
    model = nn.Linear(3, 1)
    evaluator = evaluator_of(model)
    engine = Engine(Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.01)), model=model, seed=0)
    engine.attach(EarlyStopping("loss"), Validation(evaluator, BATCHES, every="3ep"))
    assert engine.run(BATCHES, max_epochs=4).epoch == 4
    engine.attach(EarlyStopping("los", name="misspelt"))
    with pytest.raises(KeyError, match="did you mean 'loss'"):
        engine.run(BATCHES, max_epochs=5)


def test_a_metric_that_is_no_number_is_refused() -> None:
    engine = engine_of([1.0], EarlyStopping("vector", mode="min"))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(vector=torch.ones(3)))
    with pytest.raises(TypeError, match=r"EarlyStopping.*'vector'.*\(3,\)"):
        engine.run(BATCHES, max_epochs=1)


def test_a_saved_run_stops_where_the_whole_run_does() -> None:
    scores = [3.0, 2.0, 2.5, 2.4, 2.3, 2.2, 2.1]
    whole = engine_of(scores, EarlyStopping("score", mode="min", patience=4))
    saved: list[dict[str, Any]] = []
    whole.connect(Events.ITERATION_COMPLETED(once=8), lambda engine: saved.append(engine.state_dict()))
    assert whole.run(BATCHES, max_epochs=7).epoch == 6
    handler = EarlyStopping("score", mode="min", patience=4)
    other = engine_of(scores, handler)
    other.load_state_dict(saved[0])
    assert other.run(BATCHES, max_epochs=7).epoch == 6
    assert (handler.best, handler.waited) == (2.0, 4)


def test_larger_bounds_go_on_after_a_stop() -> None:
    engine = engine_of([1.0] * 9, EarlyStopping("score", mode="min", patience=2))
    assert engine.run(BATCHES, max_epochs=5).epoch == 3
    # The next value is again no improvement.
    assert engine.run(BATCHES, max_epochs=9).epoch == 4


@pytest.mark.parametrize("way", ["without", "disabled", "detached"])
def test_switched_off_nothing_stops(way: str) -> None:
    handler = EarlyStopping("score", mode="min", patience=1)
    engine = engine_of([1.0] * 4, handler)
    if way == "without":
        with engine.without("early_stopping"):
            engine.run(BATCHES, max_epochs=4)
    else:
        if way == "disabled":
            handler.enabled = False
        else:
            engine.detach(handler)
        engine.run(BATCHES, max_epochs=4)
    assert engine.state.epoch == 4
    assert handler.best is None


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"patience": 0}),
        (TypeError, {"patience": 1.5}),
        (TypeError, {"patience": True}),
        (ValueError, {"mode": "greatest"}),
        (ValueError, {"min_delta": -1.0}),
        (ValueError, {"min_delta": math.nan}),
        (ValueError, {"min_delta": math.inf}),
        (TypeError, {"monitor": 3}),
        (TypeError, {"threshold": "0.5"}),
        (TypeError, {"divergence": True}),
        (ValueError, {"threshold": math.nan}),
        (ValueError, {"divergence": math.inf}),
        (ValueError, {"threshold": 2.0, "divergence": 1.0, "mode": "min"}),
        (ValueError, {"threshold": 1.0, "divergence": 2.0, "mode": "max"}),
        (TypeError, {"after": 5}),
        (ValueError, {"after": "5min"}),
        (TypeError, {"after": Events.EPOCH_COMPLETED}),
        (TypeError, {"relative": 1}),
        (TypeError, {"check_finite": "yes"}),
        (TypeError, {"restore_best": 1}),
        (ValueError, {"after": "0.5ep"}),
        (TypeError, {"monitor": ""}),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"EarlyStopping.*{next(iter(options))}|EarlyStopping: the monitored metric"):
        EarlyStopping(**{"monitor": "score", **options})


def test_tensors_are_judged_as_numbers() -> None:
    scores: list[Any] = [torch.tensor(2.0), torch.tensor([1.0]), torch.tensor(1.5)]
    handler = EarlyStopping("score", mode="min")
    engine_of(scores, handler).run(BATCHES, max_epochs=3)
    assert (handler.best, handler.waited) == (1.0, 1)
    assert not isinstance(handler.best, Tensor)


# ---- good enough, past help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "scores", "threshold", "epoch"),
    [
        ("min", [3.0, 2.0, 1.0, 0.5], 1.0, 3),  # reached exactly
        ("min", [3.0, 1.5, 0.5, 0.1], 1.0, 3),
        ("max", [0.5, 0.9, 0.95, 0.99], 0.9, 2),
        ("max", [-3.0, -1.0, 0.0], -2.0, 2),
        ("max", [0.95, 0.99], 0.9, 1),  # the first value already
        ("min", [3.0, 2.0, 1.5], 1.0, 3),  # never reached
    ],
)
def test_it_stops_at_a_value_at_least_as_good_as_the_threshold(
    mode: Any, scores: list[float], threshold: float, epoch: int
) -> None:
    assert stops_at(scores, mode=mode, threshold=threshold) == epoch


@pytest.mark.parametrize(
    ("mode", "scores", "divergence", "epoch"),
    [
        ("min", [3.0, 10.0, 11.0, 3.0], 10.0, 3),  # just as bad is not worse
        ("max", [0.5, 0.1, 0.05, 0.5], 0.1, 3),
        ("min", [11.0, 1.0], 10.0, 1),
        ("min", [3.0, 4.0, 2.0], 10.0, 3),
    ],
)
def test_it_stops_at_a_value_worse_than_the_divergence(
    mode: Any, scores: list[float], divergence: float, epoch: int
) -> None:
    assert stops_at(scores, mode=mode, divergence=divergence, patience=9) == epoch


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_it_stops_at_once_at_a_value_that_is_not_finite(value: float) -> None:
    assert stops_at([3.0, value, 2.0, 1.0], patience=9) == 2
    assert stops_at([3.0, value, 2.0, 1.0], patience=9, check_finite=False) == 4
    handler = EarlyStopping("score", mode="min")
    engine_of([3.0, value], handler).run(BATCHES, max_epochs=2)
    assert (handler.best, handler.waited) == (3.0, 1)  # infinitely small is not the best


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([2.0, 0.5], ["score", "0.5", "threshold=0.75"]),
        ([2.0, 9.0], ["score", "9.0", "divergence=8.0"]),
        ([2.0, math.nan], ["score", "nan", "not finite"]),
        ([2.0, 3.0, 3.0], ["score", "2.0", "2 values"]),
    ],
)
def test_the_reason_names_the_metric_and_the_values(scores: list[float], message: list[str]) -> None:
    engine = engine_of(scores, EarlyStopping("score", mode="min", patience=2, threshold=0.75, divergence=8.0))
    reason = engine.run(BATCHES, max_epochs=9).stop_reason
    assert reason is not None
    assert engine.state.epoch == len(scores)
    assert [part for part in message if part not in reason] == []


@pytest.mark.parametrize(
    ("scores", "options"),
    [
        ([2.0, math.nan, 1.5, 1.0, 0.9, 0.8], {}),
        ([2.0, 9.0, 1.5, 1.0, 0.9, 0.8], {"divergence": 8.0}),
        ([2.0, 0.5, 1.5, 1.4, 1.3, 1.2], {"threshold": 0.75}),
    ],
)
def test_every_stop_that_min_epochs_holds_back_is_decided_anew(scores: list[float], options: dict[str, Any]) -> None:
    assert (
        engine_of(scores, EarlyStopping("score", patience=9, **{"mode": "min", **options}))
        .run(BATCHES, max_epochs=6)
        .epoch
        == 2
    )
    engine = engine_of(scores, EarlyStopping("score", patience=9, **{"mode": "min", **options}))
    state = engine.run(BATCHES, max_epochs=6, min_epochs=4)
    assert (state.epoch, state.stop_reason) == (6, None)


def test_a_stop_that_is_held_back_reports_its_latest_reason() -> None:
    engine = engine_of([2.0, 3.0, 9.0, 9.5], EarlyStopping("score", mode="min", patience=1, divergence=8.0))
    reason = engine.run(BATCHES, max_epochs=4, min_epochs=3).stop_reason
    assert reason is not None
    assert "divergence" in reason


@pytest.mark.parametrize(("after", "epoch"), [(None, 3), ("1ep", 4), ("4ep", 7), ("8it", 7), ("9it", 7), ("8st", 7)])
def test_values_up_to_the_end_of_the_warm_up_are_not_judged(after: str | None, epoch: int) -> None:
    """Each epoch has two iterations and steps; without a warm-up the values 2 and 3 are worse than the first."""
    handler = EarlyStopping("score", mode="min", patience=2, after=after)
    scores = [1.0, 5.0, 6.0, 7.0, 3.0, 4.0, 4.0, 1.0, 1.0]
    assert engine_of(scores, handler).run(BATCHES, max_epochs=9).epoch == epoch


# ---- the best weights ---------------------------------------------------------------------------------------------


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def build() -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    engine = kit.build(model, optimizer=partial(torch.optim.Adam, lr=0.05))
    scores = [3.0, 1.0, 2.0, 2.5, 0.5, 3.0, 4.0]
    engine.connect(
        Events.EPOCH_COMPLETED,
        lambda engine: engine.state.metrics.update(score=scores[engine.state.epoch - 1]),
    )
    return engine


def data() -> list[tuple[Tensor, Tensor]]:
    return kit.batches(3, 3, seed=0)


def plain_loop(epochs: int) -> dict[str, Tensor]:
    model = build().model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for inputs, targets in data() * epochs:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize(("patience", "stopped_in", "best_in"), [(2, 4, 2), (9, 6, 5)])
def test_the_modules_get_the_weights_of_the_best_value_back(patience: int, stopped_in: int, best_in: int) -> None:
    engine = build()
    engine.attach(EarlyStopping("score", mode="min", patience=patience, restore_best=True))
    last: list[dict[str, Tensor]] = []
    engine.connect(Events.COMPLETED, lambda engine: last.append(weights_of(engine)), phase=Phase.PREPARE)
    assert engine.run(data(), max_epochs=6).epoch == stopped_in
    assert same(weights_of(engine), plain_loop(best_in))
    assert same(last[0], plain_loop(stopped_in))


def test_without_the_option_the_last_weights_stay() -> None:
    engine = build()
    engine.attach(EarlyStopping("score", mode="min", patience=2))
    engine.run(data(), max_epochs=6)
    assert same(weights_of(engine), plain_loop(4))


def test_what_is_put_back_is_what_the_best_checkpoint_holds(tmp_path: Any) -> None:
    engine = build()
    checkpoint = Checkpoint(tmp_path, monitor="score", mode="min")
    engine.attach(checkpoint, EarlyStopping("score", mode="min", patience=2, restore_best=True))
    # A decision of the same event that comes after the judgement, and before anything is written.
    engine.connect(Events.EPOCH_COMPLETED, change_a_weight, phase=Phase.CONTROL, rank=50)
    engine.run(data(), max_epochs=6)
    saved = Checkpoint.load(tmp_path / checkpoint.kept[0][0])
    assert same(weights_of(engine), saved["modules"]["model"])
    assert same(saved["handlers"]["early_stopping"]["weights"]["model"], saved["modules"]["model"])


def change_a_weight(engine: Engine) -> None:
    with torch.no_grad():
        next(engine.model.parameters()).mul_(0.5)


def test_a_later_run_goes_on_from_the_best_weights_with_the_optimizer_of_the_end() -> None:
    engine = build()
    engine.attach(EarlyStopping("score", mode="min", patience=2, restore_best=True))
    engine.run(data(), max_epochs=6)
    model = build().model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    kept = None
    for epoch in range(1, 6):
        if epoch == 5:
            assert kept is not None
            model.load_state_dict(kept)
        for inputs, targets in data():
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 2:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
    assert engine.run(data(), max_epochs=7).epoch == 7  # the value of the fifth epoch is the best of all
    assert same(weights_of(engine), model.state_dict())


def test_an_error_leaves_the_last_weights() -> None:
    engine = build()
    engine.attach(EarlyStopping("score", mode="min", patience=9, restore_best=True))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    engine.connect(Events.EPOCH_COMPLETED(once=3), fail)
    with pytest.raises(ArithmeticError):
        engine.run(data(), max_epochs=6)
    assert same(weights_of(engine), plain_loop(3))


def test_two_that_restore_refuse_each_other() -> None:
    engine = build()
    engine.attach(
        EarlyStopping("score", mode="min", restore_best=True, name="one"),
        EarlyStopping("score", mode="min", name="two"),
    )
    with pytest.raises(ValueError, match="both 'one' and 'three'"):
        engine.attach(EarlyStopping("score", mode="min", restore_best=True, name="three"))


@pytest.mark.moderate
@pytest.mark.parametrize("options", spread([{}, {"threshold": 0.75, "after": "1ep"}], 1), ids=str)
def test_it_keeps_its_promises(options: dict[str, Any]) -> None:
    check_handler(
        build,
        lambda: EarlyStopping("score", mode="min", patience=2, restore_best=True, **options),
        data(),
        changes_training=True,
        per_run=("_unsaved",),
        max_epochs=6,
    )


def test_a_min_delta_is_compared_with_all_values_also_in_a_resumed_run() -> None:
    scores = [4.0, 1.0, 0.008, 0.007, 0.006]
    assert stops_at(scores, patience=2, min_delta=0.01) == 5  # nothing is better than 0.008 by that much
    handler, resumed = (EarlyStopping("score", mode="min", patience=2, min_delta=0.01) for _ in range(2))
    first = engine_of(scores, handler)
    first.run(BATCHES, max_epochs=3)
    second = engine_of(scores, resumed)
    second.load_state_dict(first.state_dict())
    assert second.run(BATCHES, max_epochs=5).epoch == 5
    assert [one.code for one in second.findings.of_run() if one.code == "W08"] == []


def step_that_logs(engine: Engine, batch: Any) -> Tensor:
    loss = nn.functional.mse_loss(engine.model(batch[0]), batch[1])
    engine.log("score", float(loss.detach()))
    return loss


@pytest.mark.parametrize("monitor", ["val_loss", "loss"])
@pytest.mark.parametrize("every", ["1it", "0.5ep", Events.ITERATION_COMPLETED(every=1)], ids=str)
def test_a_patience_that_several_values_of_an_epoch_exhaust_is_not_said_to_be_too_long(
    every: Any, monitor: str
) -> None:
    stopping = EarlyStopping(monitor, patience=3)
    engine = engine_of([0.0] * 3, Validation([(torch.zeros(2, 3), torch.ones(2, 1))], every=every), stopping)
    assert not engine.check(BATCHES, max_epochs=3).of("C19")
    engine.run(BATCHES, max_epochs=3)
    assert not {"W07", "C19"} & {one.code for one in engine.findings.of_run()}


def test_how_often_code_of_the_users_writes_a_metric_is_not_assumed() -> None:
    logging = Engine(Update.from_function(step_that_logs, partial(torch.optim.SGD, lr=0.01)), model=nn.Linear(3, 1))
    connected = engine_of([0.0] * 3)
    connected.connect(Events.ITERATION_COMPLETED, lambda engine: engine.log("score", 1.0), phase=Phase.PREPARE)
    for engine in (logging, connected):
        engine.attach(EarlyStopping("score", mode="min", patience=5))
        assert not engine.check(BATCHES, max_epochs=3).of("C19")


def test_a_patience_that_is_too_long_leaves_the_stop_at_nan() -> None:
    engine = engine_of([1.0, math.nan, 1.0], EarlyStopping("score", mode="min", patience=9))
    assert engine.run(BATCHES, max_epochs=3).stop_reason == "score is nan, which is not finite"
    (found,) = engine.findings.of_run().of("C19")
    assert "cannot stop the run by its patience" in str(found)


def test_a_min_delta_above_all_values_is_only_a_doubt() -> None:
    for mode, min_delta in (("min", 0.5), ("max", 1.0)):
        engine = engine_of([0.2] * 3, EarlyStopping("score", mode=mode, patience=2, min_delta=min_delta))  # type: ignore[arg-type]
        with pytest.warns(
            FindingWarning, match="W08.*may be too large for 'score', whose values so far are at most 0.2"
        ):
            engine.run(BATCHES, max_epochs=3)
    engine = engine_of([0.2] * 3, EarlyStopping("score", mode="max", patience=2, min_delta=0.5))
    engine.run(BATCHES, max_epochs=3)
    assert not engine.findings.of_run().of("W08")
