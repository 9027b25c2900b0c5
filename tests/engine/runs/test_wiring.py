"""The wiring: who listens to what, in the order in which they run, printed and drawn."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from signalfire import Engine, EventEnum, Events, Handler, Phase, Update, on
from signalfire.handlers import EarlyStopping, GradientAccumulation, GradientClipping, MixedPrecision


def make_engine() -> Engine:
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    return Engine(update, model=nn.Linear(3, 2))


def test_the_wiring_is_printed_by_event_and_phase_in_the_order_of_the_loop() -> None:
    engine = make_engine()

    @engine.on(Events.ITERATION_COMPLETED(every=100))
    def show(engine: Engine) -> None: ...

    engine.attach(GradientClipping(max_norm=1.0), MixedPrecision("fp16"), GradientAccumulation(2))
    with engine.without("gradient_accumulation"):
        text = str(engine)
    assert text.splitlines() == [
        "STARTED",
        "  PREPARE   mixed_precision.prepare",
        "FORWARD_STARTED",
        "  CHANGE    mixed_precision.autocast",
        "LOSS_COMPUTED",
        "  FINALIZE  mixed_precision.scale",
        "GRADIENTS_READY",
        "  PREPARE   mixed_precision.unscale",
        "  CHANGE    gradient_clipping.clip",
        "  FINALIZE  mixed_precision.check_overflow",
        "  FINALIZE  mixed_precision.read_flags",
        "OPTIMIZER_STEP_COMPLETED",
        "  PREPARE   mixed_precision.update_scale",
        "ITERATION_COMPLETED",
        "  CHANGE    show (every=100)",
        "ENDED",
        "  CHANGE    mixed_precision.clear_scalers",
        "inherited by evaluators: mixed_precision.autocast",
        "disabled: gradient_accumulation",
    ]
    assert str(make_engine()) == "nothing is attached"


def test_the_printed_order_is_the_order_in_which_they_run() -> None:
    ran: list[str] = []

    def make(name: str, phase: Phase, rank: int) -> Handler:
        class Emitting(Handler):
            @on(Events.ITERATION_COMPLETED, phase=phase, rank=rank)
            def act(self, engine: Engine) -> None:
                ran.append(f"{self.name}.act")

        return Emitting(name=name)

    engine = make_engine()
    engine.attach(
        make("a", Phase.RECORD, 0), make("b", Phase.PREPARE, 5), make("c", Phase.PREPARE, 1), make("d", Phase.CHANGE, 0)
    )
    engine.run([(torch.ones(1, 3), torch.ones(1, 2))], max_epochs=1)
    assert [line.split()[1] for line in str(engine).splitlines()[1:]] == ran == ["c.act", "b.act", "d.act", "a.act"]


def test_the_wiring_shows_events_of_ones_own_and_is_drawn(tmp_path: Path) -> None:
    class Own(EventEnum):
        PING = "ping"

    engine = make_engine()
    engine.register_events(Own)
    engine.connect(Own.PING, lambda engine: None)
    engine.attach(GradientClipping(max_norm=1.0))
    assert "Own.PING\n  CHANGE    <lambda>" in str(engine)
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        engine.wiring().draw(tmp_path / f"wiring{ending}")
        assert (tmp_path / f"wiring{ending}").read_bytes().startswith(start)


def test_the_picture_has_what_changes_something_and_the_rest_if_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    engine = make_engine()
    engine.attach(EarlyStopping("loss", mode="min", patience=2))
    engine.wiring().draw(tmp_path / "usual.svg")
    engine.wiring().draw(tmp_path / "all.svg", internals=True)
    usual, everything = ((tmp_path / f"{name}.svg").read_text() for name in ("usual", "all"))
    assert "check_patience" in usual
    assert "check_metric_exists" not in usual
    assert "check_metric_exists" in everything
