"""Deterministic: operations without a deterministic algorithm inside a run and after it; the flags of the process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.handlers import Deterministic, GradientClipping
from tests.kit import SGD, batches, build, linear, mlp
from tests.process_state import changed_by, process_state

FLAGS = {"deterministic": (False, True), "fill_uninitialized_memory": (True, False)}


def put(engine: Engine | None = None) -> None:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


def unpool(engine: Engine | None = None) -> None:
    pooled, indices = nn.functional.max_pool1d(torch.ones(1, 1, 4), 2, return_indices=True)
    nn.MaxUnpool1d(2)(pooled, indices)


@pytest.mark.moderate
@pytest.mark.parametrize("fails", [None, "error", "interrupt", "setup"])
@pytest.mark.parametrize("warn_only", [False, True])
def test_the_flags_are_set_inside_the_run_and_restored(warn_only: bool, fails: str | None) -> None:
    shows = warnings.showwarning
    changed = changed_by(lambda: Deterministic(warn_only=warn_only), fails)
    expected = FLAGS | ({"warn_only": (False, True)} if warn_only else {})
    if torch.cuda.is_available() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        expected["CUBLAS_WORKSPACE_CONFIG"] = (None, ":4096:8")  # type: ignore[assignment]
    assert changed == ({} if fails == "setup" else expected)
    assert warnings.showwarning is shows


@pytest.mark.parametrize("operation", [put, unpool])
def test_an_operation_without_a_deterministic_algorithm_raises_inside_the_run_and_not_after(
    operation: Callable[..., None],
) -> None:
    operation()
    engine = build(linear(5, 1), Deterministic())
    engine.connect(Events.FORWARD_STARTED, operation)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation") as caught:
        engine.run(batches(1), max_epochs=1)
    assert f"raised by {operation.__name__} at Events.FORWARD_STARTED, epoch 1, iteration 1" in caught.value.__notes__
    operation()


@pytest.mark.parametrize("operation", [put, unpool])
def test_with_warn_only_it_warns_with_the_event_and_the_receiver(operation: Callable[..., None]) -> None:
    engine = build(linear(5, 1), Deterministic(warn_only=True))
    engine.connect(Events.ITERATION_COMPLETED(once=2), operation)
    where = rf"\n'deterministic': in {operation.__name__} at Events.ITERATION_COMPLETED, epoch 1, iteration 2$"
    with pytest.warns(UserWarning, match=rf"does not have a deterministic implementation[\s\S]*{where}"):
        engine.run(batches(2), max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operation()


def test_a_warning_of_a_handler_names_the_handler() -> None:
    class Putting(GradientClipping):
        def clip(self, engine: Engine) -> None:
            put()

    engine = build(linear(5, 1), Deterministic(warn_only=True), Putting(1.0, name="putting"))
    with pytest.warns(UserWarning, match=r"in putting.clip at Events.GRADIENTS_READY, epoch 1, iteration 1"):
        engine.run(batches(1), max_epochs=1)


def test_a_warning_of_the_model_names_the_stage() -> None:
    class Putting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            put()
            return super().forward(x)

    engine = build(Putting(5, 1), Deterministic(warn_only=True))
    with pytest.warns(UserWarning, match="in the forward or the loss, after FORWARD_STARTED, epoch 1, iteration 1"):
        engine.run(batches(1), max_epochs=1)


def test_other_warnings_are_shown_as_they_are() -> None:
    engine = build(linear(5, 1), Deterministic(warn_only=True))
    engine.connect(Events.STARTED, lambda engine: warnings.warn("of the user", UserWarning, stacklevel=1))
    with pytest.warns(UserWarning, match="^of the user$"):
        engine.run(batches(1), max_epochs=1)


def test_new_memory_is_not_filled() -> None:
    engine = build(linear(5, 1), Deterministic())
    inside: list[bool] = []

    @engine.on(Events.FORWARD_STARTED(once=1))
    def look(engine: Engine) -> None:
        inside.extend(bool(torch.empty(1000).isnan().all()) for _ in range(3))

    engine.run(batches(1), max_epochs=1)
    assert inside == [False] * 3


@pytest.mark.moderate
def test_what_the_user_has_set_is_restored() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert changed_by(Deterministic) == {"warn_only": (True, False), "fill_uninitialized_memory": (True, False)}
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.moderate
def test_nested_runs_restore_in_turn() -> None:
    seen = []
    inner = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=mlp(5, 8, 1), seed=0)
    inner.attach(Deterministic(warn_only=True))
    outer = build(linear(5, 1), Deterministic())

    @outer.on(Events.ITERATION_COMPLETED)
    def run_inside(engine: Engine) -> None:
        before = process_state()
        inner.run(batches(1), max_epochs=inner.state.epoch + 1)
        seen.append(process_state() == before and before["deterministic"] and not before["warn_only"])

    before = process_state()
    outer.run(batches(2), max_epochs=1)
    assert seen == [True, True]
    assert process_state() == before


@pytest.mark.moderate
@pytest.mark.skipif(torch.cuda.is_available(), reason="it pretends that there is a CUDA device")
def test_cuda_that_has_started_without_the_variable_is_refused_with_the_line_for_the_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("signalfire.handlers.deterministic._started_with", {})
    before = process_state()
    engine = build(linear(5, 1), Deterministic())
    with pytest.raises(RuntimeError, match="`export CUBLAS_WORKSPACE_CONFIG=:4096:8`"):
        engine.run(batches(1), max_epochs=1)
    assert process_state() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="it pretends that there is a CUDA device")
def test_the_variable_is_there_before_cuda_starts_and_removed_after_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr("signalfire.handlers.deterministic._started_with", {})
    engine, seen = build(linear(5, 1), Deterministic()), []
    engine.connect(Events.MODEL_SETUP, lambda engine: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    engine.run(batches(1), max_epochs=1)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # by the first run, with the variable
    engine.run(batches(1), max_epochs=2)
    assert seen == [":4096:8"] * 2
