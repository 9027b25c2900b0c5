"""What one handler at a time overrides: claims, functions in place of the loop's, and both given back."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Update, UpdateState
from signalfire.core.overrides import GRADIENTS_PER_STEP, Claim, Override
from signalfire.handlers import GradientClipping
from tests import kit
from tests.kit import assert_same, mlp

Batch = tuple[Tensor, Tensor]
mse = nn.functional.mse_loss
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_data(batches: int = 6) -> list[Batch]:
    return kit.batches(batches, 3, 2, seed=1)


def make_model() -> nn.Module:
    return mlp(3, 5, 2, nn.Tanh(), seed=0)


def make_trainer(*updates: Update) -> Engine:
    return Engine(updates or Update.supervised(mse, SGD), model=make_model(), seed=0)


# ---- claims ---------------------------------------------------------------------------------------------------------


class Own(Enum):
    PALETTE = "the palette"


def test_what_is_claimed_for_one_target_stays_free_for_another() -> None:
    trainer = make_trainer()
    overrides = trainer.overrides
    one, other = Handler(name="one"), Handler(name="other")
    overrides.claim(Own.PALETTE, by=one, target="of update 'a'")
    overrides.claim(Own.PALETTE, by=one, target="of update 'a'")
    overrides.claim(Own.PALETTE, by=other, target="of update 'b'")
    with pytest.raises(ValueError, match="both 'one' and 'other' control the palette of update 'a'; detach one"):
        overrides.claim(Own.PALETTE, by=other, target="of update 'a'")
    assert overrides.owned_by(one) == overrides.owned_by("other") == {Own.PALETTE}


@pytest.mark.parametrize("targets", [(None, "of update 'a'"), ("of update 'a'", None), (None, None)], ids=str)
def test_what_is_claimed_for_all_targets_is_free_for_none(targets: tuple[str | None, str | None]) -> None:
    trainer = make_trainer()
    overrides, one, other = trainer.overrides, Handler(name="one"), Handler(name="other")
    overrides.claim(Own.PALETTE, by=one, target=targets[0])
    named = "the palette" + (" of update 'a'" if any(targets) else "")
    with pytest.raises(ValueError, match=f"both 'one' and 'other' control {named}; detach one of the two"):
        overrides.claim(Own.PALETTE, by=other, target=targets[1])
    overrides.claim(Own.PALETTE, by=one, target=targets[1])
    overrides.release(one)
    overrides.claim(Own.PALETTE, by=other, target=targets[1])


def test_what_a_handler_releases_another_may_claim() -> None:
    trainer = make_trainer()
    overrides = trainer.overrides
    one, other = Handler(name="one"), Handler(name="other")
    overrides.claim(Claim("the learning rate"), by=one)
    overrides.claim(Claim("seeding"), by=other)
    overrides.release(one)
    overrides.claim(Claim("the learning rate"), by=other)
    assert overrides.owned_by("one") == set()
    assert overrides.owned_by("other") == {Claim("the learning rate"), Claim("seeding")}


# ---- functions in place of the loop's -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [one for one in Override if one is not Override.WINDOW])
def test_a_function_is_in_place_until_its_handler_gives_it_back(what: Override) -> None:
    trainer, handler = make_trainer(), Handler(name="one")
    overrides = trainer.overrides

    def function(*_: Any) -> None:
        pass

    overrides.replace(what, function, by=handler)
    assert overrides.replaced() == {what.name.lower(): function}
    assert overrides.owned_by(handler) == {what}
    overrides.release(handler)
    assert overrides.replaced() == {}


def test_a_window_may_be_that_of_one_update_alone() -> None:
    trainer = make_trainer(*(Update.supervised(mse, SGD, name=name) for name in ("a", "b")))
    one, other = Handler(name="one"), Handler(name="other")

    def three(epoch: int) -> int:
        return 3

    trainer.overrides.replace(Override.WINDOW, three, by=one, update="b")
    assert trainer.overrides.replaced() == {"window of b": three}
    trainer.overrides.replace(Override.WINDOW, lambda epoch: 2, by=other, update="a")
    with pytest.raises(ValueError, match=r"both 'one' and 'other' .* accumulation window of update 'b'"):
        trainer.overrides.replace(Override.WINDOW, lambda epoch: 2, by=other)
    trainer.overrides.release(other)
    assert trainer.overrides.replaced() == {"window of b": three}


def test_a_window_that_is_replaced_in_an_epoch_has_its_length_from_there_and_one_once_it_is_released() -> None:
    trainer, handler = make_trainer(), Handler(name="one")
    steps: list[int] = []
    trainer.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: steps.append(engine.state.iteration))
    replace = partial(trainer.overrides.replace, Override.WINDOW, lambda epoch: 3 * epoch, by=handler)
    trainer.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: replace())
    trainer.connect(Events.ITERATION_COMPLETED(once=5), lambda engine: engine.overrides.release(handler))
    trainer.run(make_data(7), max_epochs=1)
    assert steps == [1, 2, 5, 6, 7]


def test_a_step_that_computes_its_gradients_again_keeps_the_batches_of_its_window_as_long_as_it_is_in_place() -> None:
    trainer, handler = make_trainer(), Handler(name="one")
    window = trainer.updates[0].window
    trainer.overrides.replace(Override.STEP, lambda engine, update, step: step(), by=handler, again=True)
    assert window.kept == []
    assert trainer.overrides.owned_by(handler) == {Override.STEP, GRADIENTS_PER_STEP}
    trainer.overrides.release(handler)
    assert window.kept is None


class HalvedGradients(Handler):
    """Replaces the gradient computation: the usual one, then halved."""

    calls = 0

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.GRADIENTS, self.halve, by=self)

    def halve(self, engine: Engine, update: UpdateState, compute: Callable[[], None]) -> None:
        self.calls += 1
        compute()
        for p in update.parameters:
            if p.grad is not None:
                p.grad.mul_(0.5)


class DoubleStep(Handler):
    """Replaces the step: makes it twice."""

    calls = 0

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.STEP, self.twice, by=self)

    def twice(self, engine: Engine, update: UpdateState, step: Callable[[], None]) -> None:
        self.calls += 1
        step()
        step()


def plain_loop(data: Sequence[Batch], *, factor: float = 1.0, steps: int = 1) -> nn.Module:
    model = make_model()
    optimizer = SGD(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(factor)
        for _ in range(steps):
            optimizer.step()
    return model


def test_a_handler_may_replace_the_gradients() -> None:
    data, handler = make_data(), HalvedGradients()
    trainer = make_trainer()
    trainer.attach(handler)
    trainer.run(data, max_epochs=1)
    assert handler.calls == 6
    assert_same(trainer.model, plain_loop(data, factor=0.5))


def test_a_handler_may_replace_the_step() -> None:
    data, handler = make_data(), DoubleStep()
    trainer = make_trainer()
    trainer.attach(handler)
    trainer.run(data, max_epochs=1)
    assert handler.calls == 6
    assert trainer.updates[0].steps == 6
    assert_same(trainer.model, plain_loop(data, steps=2))


def test_two_handlers_may_replace_different_acts() -> None:
    data = make_data()
    trainer = make_trainer()
    trainer.attach(DoubleStep(), HalvedGradients())
    trainer.run(data, max_epochs=1)
    assert_same(trainer.model, plain_loop(data, factor=0.5, steps=2))


@pytest.mark.parametrize("kind", [DoubleStep, HalvedGradients])
def test_a_second_replacer_is_an_error_that_names_both_and_changes_nothing(
    kind: type[DoubleStep] | type[HalvedGradients],
) -> None:
    data, first, second = make_data(), kind(name="first"), kind(name="second")
    trainer = make_trainer()
    trainer.attach(first)
    with pytest.raises(
        ValueError, match=r"both 'first' and 'second' .* (the optimizer step|the computation of gradients)"
    ):
        trainer.attach(second)
    assert list(trainer.handlers) == ["first"]
    assert second.engine is None
    trainer.run(data, max_epochs=1)
    assert (first.calls, second.calls) == (6, 0)


@pytest.mark.parametrize("kind", [DoubleStep, HalvedGradients])
@pytest.mark.parametrize("how", ["detached", "disabled", "without"])
def test_detaching_or_disabling_a_replacer_restores_the_act(
    kind: type[DoubleStep] | type[HalvedGradients], how: str
) -> None:
    data, handler = make_data(), kind(name="replacer")
    trainer = make_trainer()
    trainer.attach(handler)
    with contextlib.ExitStack() as stack:
        if how == "detached":
            trainer.detach(handler)
        elif how == "disabled":
            handler.enabled = False
        else:
            stack.enter_context(trainer.without("replacer"))
        trainer.run(data, max_epochs=1)
    assert handler.calls == 0
    assert_same(trainer.model, plain_loop(data))


def test_after_the_first_replacer_has_left_another_may_come() -> None:
    trainer = make_trainer()
    first, second = DoubleStep(name="first"), DoubleStep(name="second")
    trainer.attach(first).detach()
    trainer.attach(second)
    trainer.run(make_data(2), max_epochs=1)
    assert (first.calls, second.calls) == (0, 2)


def test_a_replaced_step_is_not_made_when_it_is_skipped() -> None:
    handler = DoubleStep()
    trainer = make_trainer()
    trainer.attach(handler)
    trainer.connect(Events.GRADIENTS_READY(once=2), lambda engine: engine.state.update.skip("on purpose"))
    trainer.run(make_data(3), max_epochs=1)
    assert handler.calls == 2
    assert trainer.updates[0].steps == 2


def test_an_act_that_does_not_exist_is_not_replaced() -> None:
    class Wrong(Handler):
        def attached(self, engine: Engine) -> None:
            engine.overrides.replace(Claim("seeding"), print, by=self)  # type: ignore[arg-type]

    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"expected one of Override\.WINDOW, Override\.GRADIENTS"):
        trainer.attach(Wrong())
    assert trainer.handlers == {}


def test_the_gradients_of_an_engine_that_computes_none_are_not_replaced() -> None:
    class Wrong(Handler):
        def attached(self, engine: Engine) -> None:
            engine.overrides.replace(Override.GRADIENTS, lambda engine, update, compute: compute(), by=self)

    evaluator = make_trainer(Update.supervised(mse))
    with pytest.raises(ValueError, match="replaces the gradient computation, but this engine only evaluates"):
        evaluator.attach(Wrong())
    assert evaluator.handlers == {}


# ---- claims of other packages ---------------------------------------------------------------------------------------

THEIR_HANDLERS = '''
from signalfire.authoring import Claim, Handler


class Tides(Handler):
    """Claims something that no handler of Signalfire does."""

    def attached(self, engine):
        engine.overrides.claim(Claim("the phase of the moon"), by=self)


class TheirClipping(Handler):
    """Claims what a handler of Signalfire does, by its noun alone."""

    def attached(self, engine):
        engine.overrides.claim(Claim("gradient clipping"), by=self, target="of update 'main'")
'''


def test_a_handler_of_another_package_claims_something_new_and_collides_with_an_included_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "__init__.py").write_text(THEIR_HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("their_package")
    engine = make_trainer()
    engine.attach(theirs.Tides())
    with pytest.raises(ValueError, match="both 'tides' and 'second' control the phase of the moon; detach one"):
        engine.attach(theirs.Tides(name="second"))
    engine.attach(GradientClipping(1.0))
    with pytest.raises(
        ValueError, match="both 'gradient_clipping' and 'their_clipping' control gradient clipping of update"
    ):
        engine.attach(theirs.TheirClipping())
    engine.detach("gradient_clipping")
    engine.attach(theirs.TheirClipping())
