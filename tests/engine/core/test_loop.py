"""The loop: the order of events is the catalogue's, bounds hold, a run continues where it was."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, Update, allow, on, seed_everything
from signalfire.handlers import GradientAccumulation
from signalfire.testing import fingerprint, trace
from tests import kit
from tests.kit import build, mlp

Triple = tuple[str, int, int]
Batch = tuple[Tensor, Tensor]


def make_data(batches: int = 3) -> list[Batch]:
    return kit.batches(batches, 3, 2, seed=0)


def make_engine() -> Engine:
    model = mlp(3, 8, 2, nn.ReLU(), nn.Dropout(0.3), seed=0)
    return build(model, optimizer=partial(torch.optim.Adam, lr=1e-2))


def catalogue(
    *, epochs: int, batches: int, window: int, loaded: bool, forward: bool = True, train: bool = True
) -> list[Triple]:
    """What the pseudocode in the catalogue's docstring says is emitted, by interpreting that pseudocode."""
    block = re.search(r"```\n(.*?)```", Events.__doc__ or "", re.DOTALL)
    assert block is not None
    lines = [line.split("#")[0].rstrip() for line in block[1].splitlines()]
    program = [(len(line) - len(line.lstrip()), line.strip()) for line in lines if line.strip()]
    assert {text for _, text in program if not text.endswith(":")} < set(Events.__members__), "an unknown event"
    triples: list[Triple] = []

    def body(start: int) -> int:
        end = start
        while end < len(program) and program[end][0] >= program[start][0]:
            end += 1
        return end

    def run(start: int, end: int, epoch: int, batch: int) -> None:
        place, training = start, train
        while place < end:
            text = program[place][1]
            if text.endswith(":"):
                last = body(place + 1)
                if text == "for each epoch:":
                    for number in range(1, epochs + 1):
                        run(place + 1, last, number, 0)
                elif text == "for each batch:":
                    for number in range(1, batches + 1):
                        run(place + 1, last, epoch, number)
                elif text == "for each update:":
                    run(place + 1, last, epoch, batch)
                else:
                    assert text == "if the window is complete:"
                    if train and (batch % window == 0 or batch == batches):
                        run(place + 1, last, epoch, batch)
                place = last
                continue
            skipped = (text == "CHECKPOINT_LOADED" and not loaded) or (text == "FORWARD_COMPLETED" and not forward)
            skipped = skipped or (text.startswith("BACKWARD") and not training)
            if not skipped:
                iteration = (epoch - 1) * batches + batch if epoch else 0
                after_all = text in ("COMPLETED", "ENDED")
                at_end = text == "EPOCH_COMPLETED"
                triple_epoch = epochs if after_all else epoch
                triple_iteration = epochs * batches if after_all else epoch * batches if at_end else iteration
                if text == "GET_BATCH_STARTED":
                    triple_iteration -= 1
                triples.append((text, triple_epoch, triple_iteration))
            place += 1

    run(0, len(program), 0, 0)
    return triples


def test_the_real_order_of_events_is_the_catalogues_pseudocode() -> None:
    engine = make_engine()
    engine.attach(GradientAccumulation(2))
    seen = trace(engine)
    engine.run(make_data(3), max_epochs=2)
    assert seen == catalogue(epochs=2, batches=3, window=2, loaded=False)
    assert ("OPTIMIZER_STEP_COMPLETED", 1, 2) in seen
    assert ("OPTIMIZER_STEP_COMPLETED", 1, 3) in seen
    assert ("OPTIMIZER_STEP_COMPLETED", 1, 1) not in seen


def test_the_order_of_events_of_an_engine_that_evaluates_is_the_catalogues() -> None:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(nn.functional.mse_loss), model=nn.Linear(3, 2))
    seen = trace(engine)
    engine.run(make_data(3))
    assert seen == catalogue(epochs=1, batches=3, window=1, loaded=False, train=False)


def test_the_order_of_events_of_a_single_function_lacks_only_forward_completed() -> None:
    model = nn.Linear(3, 2)

    def function(engine: Engine, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    engine = Engine(Update.from_function(function, partial(torch.optim.SGD, lr=0.1)), model=model)
    seen = trace(engine)
    engine.run(make_data(3), max_epochs=1)
    assert seen == catalogue(epochs=1, batches=3, window=1, loaded=False, forward=False)


def test_a_loaded_state_is_applied_after_started_and_reported_by_checkpoint_loaded() -> None:
    first = make_engine()
    first.run(make_data(3), max_epochs=1)
    second = make_engine()
    second.load_state_dict(first.state_dict())
    seen = trace(second)
    second.run(make_data(3), max_epochs=2)
    names = [name for name, _, _ in seen]
    assert names[:5] == ["MODEL_SETUP", "OPTIMIZER_SETUP", "STARTED", "CHECKPOINT_LOADED", "EPOCH_STARTED"]
    assert seen[2] == ("STARTED", 0, 0)
    assert seen[3] == ("CHECKPOINT_LOADED", 1, 3)
    assert seen[4] == ("EPOCH_STARTED", 2, 3)


def test_a_handlers_receivers_run_by_phase_then_rank_then_connection() -> None:
    seen: list[str] = []

    class Several(Handler):
        @on(Events.ITERATION_COMPLETED, phase=Phase.PERSIST)
        def last(self, engine: Engine) -> None:
            seen.append("last")

        @on(Events.ITERATION_COMPLETED, phase=Phase.CONTROL, rank=5)
        def fourth(self, engine: Engine) -> None:
            seen.append("fourth")

        @on(Events.ITERATION_COMPLETED, phase=Phase.CONTROL, rank=-5)
        def third(self, engine: Engine) -> None:
            seen.append("third")

        @on(Events.ITERATION_COMPLETED)
        def second(self, engine: Engine) -> None:
            seen.append("second")

        @on(Events.ITERATION_COMPLETED, phase=Phase.PREPARE)
        def first(self, engine: Engine) -> None:
            seen.append("first")

    engine = make_engine()
    engine.attach(Several())
    engine.run(make_data(), max_iters=1)
    assert seen == ["first", "second", "third", "fourth", "last"]


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("bounds", "epoch", "iteration"),
    [
        ({"max_epochs": 2}, 2, 6),
        ({"max_iters": 4}, 2, 4),
        ({"max_iters": 6}, 2, 6),
        ({"max_epochs": 1, "max_iters": 100}, 1, 3),
        ({"max_steps": 5}, 2, 5),
        ({"max_epochs": 2, "epoch_length": 2}, 2, 4),
        ({"max_time": "0.2s"}, None, None),
    ],
)
def test_a_run_ends_at_the_first_bound_it_reaches(
    bounds: dict[str, Any], epoch: int | None, iteration: int | None
) -> None:
    engine = make_engine()
    state = engine.run(make_data(3), **bounds)
    if epoch is not None:
        assert (state.epoch, state.iteration) == (epoch, iteration)
    assert state.iteration > 0
    assert state.stop_reason is None


# ---- continuing -----------------------------------------------------------------------------------------------------


def test_run_continues_up_to_larger_bounds_as_if_it_had_not_ended() -> None:
    whole, parts = make_engine(), make_engine()
    seed_everything(0)
    whole.run(make_data(), max_epochs=4)
    seed_everything(0)
    for bound in (1, 2, 4):
        parts.run(make_data(), max_epochs=bound)
    assert fingerprint(whole) == fingerprint(parts)


@pytest.mark.moderate
def test_run_continues_inside_an_epoch_and_a_window_as_if_it_had_not_ended() -> None:
    for cut in range(1, 12):
        whole, parts = make_engine(), make_engine()
        seed_everything(0)
        whole.attach(GradientAccumulation(4))
        whole.run(make_data(6), max_iters=12)
        seed_everything(0)
        parts.attach(GradientAccumulation(4))
        parts.run(make_data(6), max_iters=cut)
        parts.run(make_data(6), max_iters=12)
        assert fingerprint(whole) == fingerprint(parts), f"cut after iteration {cut}"


def test_a_finished_engine_says_so_and_names_the_two_ways_on() -> None:
    engine = make_engine()
    engine.run(make_data(), max_epochs=2)
    before = fingerprint(engine)
    with pytest.warns(UserWarning, match=r"larger bounds .* engine\.reset\(\)"):
        engine.run(make_data(), max_epochs=2)
    assert fingerprint(engine) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.run(make_data(), max_epochs=3).epoch == 3


# ---- state ----------------------------------------------------------------------------------------------------------


class Noisy:
    """Unsized data that draws its batches from the global generator."""

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(5):
            yield torch.randn(4, 3), torch.randn(4, 2)


@pytest.mark.parametrize("kind", ["list", "unsized", "shuffled", "own generator", "longer epochs"])
@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
def test_a_run_resumed_after_any_iteration_ends_as_the_uninterrupted_one(kind: str) -> None:
    def data() -> Any:
        if kind == "unsized":
            return Noisy()
        if kind in ("list", "longer epochs"):
            return make_data(5)
        x, y = (torch.cat(part) for part in zip(*make_data(5), strict=True))
        generator = torch.Generator().manual_seed(3) if kind == "own generator" else None
        dataset = torch.utils.data.TensorDataset(x, y)
        return torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)

    def build() -> Engine:
        engine = make_engine()
        engine.attach(GradientAccumulation(2))
        return engine

    bounds: dict[str, Any] = {"max_epochs": 3} | ({"epoch_length": 7} if kind == "longer epochs" else {})
    states: list[dict[str, Any]] = []
    whole = build()
    whole.connect(
        Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED,
        lambda engine: states.append(engine.state_dict()),
        phase=Phase.PERSIST,
    )
    seed_everything(0)
    whole.run(data(), **bounds)
    for state in states[:-1]:
        resumed = build()
        resumed.load_state_dict(state)
        seed_everything(99)
        resumed.run(data(), **bounds)
        place = (state["engine"]["epoch"], state["engine"]["iteration"], state["engine"]["epoch_open"])
        assert fingerprint(resumed) == fingerprint(whole), f"{kind}: resumed from {place}"


def test_the_state_shares_no_tensor_with_the_engine() -> None:
    engine = make_engine()
    engine.run(make_data(), max_epochs=1)
    state = engine.state_dict()
    before = {name: value.clone() for name, value in state["modules"]["model"].items()}
    moment = state["updates"]["main"]["optimizer"]["state"][0]["exp_avg"].clone()
    engine.run(make_data(), max_epochs=2)
    assert all(torch.equal(before[name], value) for name, value in state["modules"]["model"].items())
    assert torch.equal(moment, state["updates"]["main"]["optimizer"]["state"][0]["exp_avg"])
    loaded = make_engine()
    loaded.load_state_dict(state)
    loaded.run(make_data(), max_epochs=2)
    assert torch.equal(moment, state["updates"]["main"]["optimizer"]["state"][0]["exp_avg"]), (
        "loading aliased the state"
    )


def test_the_state_may_not_be_taken_inside_an_update() -> None:
    engine = make_engine()
    engine.connect(Events.BACKWARD_COMPLETED, lambda engine: engine.state_dict())
    with pytest.raises(RuntimeError, match="called inside an iteration"):
        engine.run(make_data(), max_epochs=1)


def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed() -> None:
    class Remembering(Handler):
        def state_dict(self) -> dict[str, Any]:
            return {"something": 1}

        def load_state_dict(self, state: Any) -> None:
            assert state == {"something": 1}

    with_handler = make_engine()
    with_handler.attach(Remembering())
    with_handler.run(make_data(), max_epochs=1)
    plain = make_engine()
    weights = [p.clone() for p in plain.model.parameters()]
    plain.load_state_dict(with_handler.state_dict())
    with pytest.raises(ValueError, match="handlers only in the state: remembering"):
        plain.run(make_data(), max_epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain.model.parameters(), strict=True))
    plain.load_state_dict(with_handler.state_dict(), allow=["remembering"])
    assert plain.run(make_data(), max_epochs=2).epoch == 2

    plain = make_engine()
    plain.run(make_data(), max_epochs=1)
    other = make_engine()
    other.attach(Remembering())
    other.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="handlers only in this engine: remembering"):
        other.run(make_data(), max_epochs=2)

    renamed = Engine(
        Update.supervised(nn.functional.mse_loss, partial(torch.optim.Adam, lr=1e-2)),
        model={"net": make_engine().model},
    )
    renamed.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="modules"):
        renamed.run(make_data(), max_epochs=2)

    with pytest.raises(ValueError, match="expected the state of a Signalfire engine"):
        plain.load_state_dict({"model": {}})


def test_a_model_is_trained_in_train_mode_and_left_in_the_mode_it_was_in() -> None:
    engine = make_engine()
    engine.model[2].eval()
    modes: list[bool] = []
    engine.connect(Events.FORWARD_STARTED(once=1), lambda engine: modes.append(engine.model[2].training))
    with allow("W52"):
        engine.run(make_data(), max_epochs=1)
    assert modes == [True]
    assert engine.model.training
    assert not engine.model[2].training


def test_a_region_of_the_run_closes_after_ended() -> None:
    engine = make_engine()
    log: list[str] = []
    for event, name in ((Events.STARTED, "run"), (Events.EPOCH_STARTED, "epoch")):
        region = ExitStack()
        region.callback(log.append, f"close {name}")
        engine.connect(event, lambda engine, region=region: engine.regions.enter(region))
    engine.connect(Events.ENDED, lambda engine: log.append("ENDED"))
    engine.run(make_data(1), max_epochs=1)
    assert log == ["ENDED", "close epoch", "close run"]


@pytest.mark.parametrize("check", [True, False])
def test_a_model_is_copied_and_saved_whole_inside_a_run(check: bool) -> None:
    copies: list[nn.Module] = []

    def copy_it(engine: Engine) -> None:
        copies.append(copy.deepcopy(engine.model))
        file = io.BytesIO()
        torch.save(engine.model, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))

    engine = kit.build(kit.mlp(5, 8, 1))
    engine.connect(Events.EPOCH_COMPLETED, copy_it)
    engine.run(kit.batches(3), max_epochs=1, check=check)
    for one in copies:
        kit.assert_same(one, engine.model)
        one.load_state_dict(engine.model.state_dict())  # its hooks know no engine
        one(torch.ones(2, 5))
