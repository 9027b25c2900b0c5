"""Variants on trial: each is run up to STARTED, and leaves no trace, whatever comes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from signalfire import Engine, Events
from signalfire.ablation import LeaveOneOut, Variant
from signalfire.ablation.trial import start, try_out
from signalfire.handlers import (
    EMA,
    Average,
    CSVLogger,
    GradientClipping,
    GradientNorms,
    Guards,
    History,
    Metrics,
    Preemption,
    ProgressBar,
)
from tests.engine.ablation import builds
from tests.engine.ablation.builds import make_study


@pytest.mark.moderate
def test_candidates_take_part_in_the_training(tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        engine = builds.composed(seed)
        off = GradientClipping(max_norm=1.0, name="off")
        off.enabled = False
        engine.attach(
            History(), ProgressBar(), CSVLogger(tmp_path / "log.csv"), Preemption(), Guards(), GradientNorms(), off
        )
        return engine, builds.train

    variants = make_study(build).plan(LeaveOneOut()).variants
    assert [variant.name for variant in variants] == ["baseline", "- gradient_clipping", "- gradient_noise", "- ema"]
    assert not os.listdir(tmp_path)  # nothing is written to plan
    own = make_study(build, handlers=["preemption"]).plan(LeaveOneOut()).variants
    assert [variant.name for variant in own] == ["baseline", "- preemption"]


def test_a_monitor_whose_metric_is_gone_is_refused() -> None:
    def build(seed: int) -> Any:
        engine, run = builds.stopping(seed)
        engine.attach(Metrics(loss=Average()))
        return engine, run

    with pytest.raises(
        ValueError, match=r"'val_loss', which 'early_stopping' monitors, does not exist without 'validation'"
    ):
        make_study(build, metric="loss").plan(LeaveOneOut(["validation"]))


def test_it_is_said_who_announces_each_metric_and_nothing_is_trained() -> None:
    engine = builds.composed(1)
    engine.attach(Metrics(loss=Average()))
    fired: list[Any] = []
    engine.connect(Events.EPOCH_STARTED, fired.append)
    assert start(engine, builds.train, "the composition") == {"val_loss": "validation", "loss": "metrics"}
    assert (fired, engine.dry_run, engine.state.epoch) == ([], False, 0)


def test_a_run_that_catches_exceptions_ends_at_its_start_all_the_same() -> None:
    passed: list[str] = []

    def careful(engine: Engine) -> None:
        try:
            builds.train(engine)
        except Exception:
            passed.append("caught")
        passed.append("went on")

    start(builds.composed(1), careful, "the composition")
    assert passed == []


def test_a_run_of_another_engine_is_noticed() -> None:
    with pytest.raises(RuntimeError, match=r"did not run the engine that build\(1\) returned"):
        start(builds.composed(1), lambda engine: builds.train(builds.composed(1)), "the composition")


def test_an_error_says_what_was_on_trial_and_leaves_the_engine_as_it_was() -> None:
    engine = builds.composed(1)

    @engine.on(Events.STARTED)
    def fail(engine: Engine) -> None:
        raise LookupError("nothing there")

    variant = Variant("v", frozenset({"gradient_noise"}), (("ema", "slow"), ("gradient_clipping", "other")))
    factories: dict[tuple[str, str], Any] = {
        ("ema", "slow"): lambda: EMA(0.9, name="slow"),
        ("gradient_clipping", "other"): lambda: GradientClipping(max_norm=1.0, name="other"),
    }
    before = dict(engine.handlers)
    with pytest.raises(LookupError) as caught:
        try_out(engine, builds.train, variant, factories, {}, "val_loss")
    assert caught.value.__notes__[-1] == "raised while checking the variant 'v' by running it up to STARTED"
    assert dict(engine.handlers) == before
    assert all(handler.enabled for handler in before.values())
    assert not engine.dry_run


def test_a_variant_that_works_gives_the_handlers_that_it_has_and_leaves_the_engine_as_it_was() -> None:
    engine = builds.composed(1)
    before = dict(engine.handlers)
    factories: dict[tuple[str, str], Any] = {("ema", "slow"): lambda: EMA(0.9, name="slow")}
    variant = Variant("v", frozenset({"gradient_noise"}), (("ema", "slow"),))
    reference = start(engine, builds.train, "the composition")
    enabled = try_out(engine, builds.train, variant, factories, reference, "val_loss")
    assert enabled == ["gradient_clipping", "slow", "validation"]
    assert dict(engine.handlers) == before


def test_what_build_has_switched_off_is_no_variant() -> None:
    engine = builds.composed(1)
    engine.handlers["ema"].enabled = False
    with pytest.raises(ValueError, match=r"the handler 'ema' is already switched off by build; enable it in build$"):
        try_out(engine, builds.train, Variant("- ema", frozenset({"ema"})), {}, {}, "val_loss")
