"""Precision32: the settings of torch inside a run and after it, and what they do to a product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from signalfire import Engine, Events, Update
from signalfire.authoring.versions import precisions_of_products
from signalfire.handlers import Precision32
from tests.kit import batches, build, linear, mlp, needs_torch
from tests.process_state import changed_by, process_state

BACKENDS: Any = torch.backends
PRECISIONS = {
    "high": {"matmul precision": "high", "cuda.matmul": "tf32", "cuda.matmul.allow_tf32": True, "mkldnn.matmul": "tf32"},
    "medium": {"matmul precision": "medium", "cuda.matmul": "tf32", "cuda.matmul.allow_tf32": True, "mkldnn.matmul": "bf16"},
    "highest": {"cuda.matmul": "ieee", "mkldnn.matmul": "ieee"},
}  # fmt: skip


@pytest.fixture
def own_settings() -> Iterator[None]:
    """The settings of this test are not those of later ones."""
    before = [(one, one.fp32_precision) for one in precisions_of_products().values()]
    general = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(general)
    for one, precision in before:
        one.fp32_precision = precision


@needs_torch(2, 9, why="precisions of each backend")
@pytest.mark.moderate
@pytest.mark.parametrize("fails", [None, "error", "interrupt", "setup"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_setting_holds_inside_the_run_and_nothing_of_it_stays(precision: str, fails: str | None) -> None:
    changed = changed_by(lambda: Precision32(precision), fails)  # type: ignore[arg-type]
    assert {key: inside for key, (_, inside) in changed.items()} == ({} if fails == "setup" else PRECISIONS[precision])


@pytest.mark.moderate
@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize("before", ["high", "medium", "highest"])
def test_what_the_user_has_set_is_restored(before: str) -> None:
    torch.set_float32_matmul_precision(before)
    assert changed_by(lambda: Precision32("medium" if before == "high" else "high"))


def error_of_product() -> float:
    """The largest error of a float32 product of 256 x 256 matrices, compared with float64."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(256, 256, generator=generator) for _ in range(2))
    return ((one @ other).double() - one.double() @ other.double()).abs().max().item()


@pytest.mark.usefixtures("own_settings")
def test_medium_rounds_products_inside_the_run_only() -> None:
    before = error_of_product()
    torch.set_float32_matmul_precision("medium")
    rounded = error_of_product()
    torch.set_float32_matmul_precision("highest")
    if rounded == before:
        pytest.skip("this CPU multiplies in float32 whatever is allowed")
    for one in precisions_of_products().values():
        one.fp32_precision = "none"
    engine, inside = build(linear(5, 1), Precision32("medium")), []
    engine.connect(Events.FORWARD_STARTED(once=1), lambda engine: inside.append(error_of_product()))
    engine.run(batches(1), max_epochs=1)
    assert inside == [rounded]
    assert error_of_product() == before < 1e-4


@needs_torch(2, 9, why="the newer interface")
@pytest.mark.moderate
@pytest.mark.usefixtures("own_settings")
def test_the_newer_interface_of_torch_is_refused_with_what_was_set() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    engine = build(linear(5, 1), Precision32("high"))
    before = process_state()
    with pytest.raises(
        RuntimeError, match=r"'precision32': this process has set fp32_precision in .*cuda.matmul: 'tf32'"
    ):
        engine.run(batches(1), max_epochs=1)
    assert process_state() == before


def test_the_setting_follows_the_handler_that_joins_leaves_or_is_disabled() -> None:
    engine, handler = build(mlp(5, 8, 1)), Precision32("high")
    seen: dict[int, str] = {}

    @engine.on(Events.ITERATION_STARTED)
    def act(engine: Engine) -> None:
        iteration = engine.state.iteration
        seen[iteration] = torch.get_float32_matmul_precision()
        if iteration == 1:
            engine.attach(handler)
        if iteration in (2, 3):
            handler.enabled = iteration == 3
        if iteration == 4:
            engine.detach(handler)

    engine.run(batches(6), max_epochs=1)
    assert list(seen.values()) == ["highest", "high", "highest", "high", "highest", "highest"]


def test_an_evaluation_inside_the_run_has_the_setting_too() -> None:
    seen: list[str] = []

    def forward(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return batch[0]

    evaluator = Engine(Update(forward), allow=["W53"])
    engine = build(linear(5, 1), Precision32("high"))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.evaluate(evaluator, batches(1)))
    engine.run(batches(1), max_epochs=1)
    assert seen == ["high"]


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Precision32\(precision='tf32'\): expected 'highest', 'high' or 'medium'"):
        Precision32("tf32")  # type: ignore[arg-type]


def test_a_second_one_is_refused() -> None:
    with pytest.raises(ValueError, match="'precision32' and 'other' control the precision of float32 matrix products"):
        build(linear(5, 1), Precision32("high"), Precision32("medium", name="other"))
