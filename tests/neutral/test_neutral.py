"""The suites as tests, run by -m neutral: at least 97 % of each pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit import needs
from tests.neutral import metrics, optimizers, schedulers
from tests.neutral.outcomes import Outcome, table

pytestmark = pytest.mark.neutral

SUITES: dict[str, tuple[Callable[[], list[Outcome]], int]] = {
    "optimizers of torch.optim": (optimizers.of_torch, 15),
    "schedulers of torch": (schedulers.of_torch, 16),
    "classes of torchmetrics": (metrics.of_torchmetrics, 101),
}


def passes(name: str, outcomes: list[Outcome], least: int) -> None:
    text = table(name, outcomes)
    assert len(outcomes) >= least, text
    assert sum(one.reason is None for one in outcomes) >= 0.97 * len(outcomes), text


@pytest.mark.parametrize("name", SUITES)
def test_what_torch_and_torchmetrics_have_passes(name: str) -> None:
    suite, least = SUITES[name]
    passes(name, suite(), least)


def test_the_schedulers_of_transformers_pass() -> None:
    needs("neutral", "transformers")
    passes("schedulers of transformers", schedulers.of_transformers(), 12)


def test_a_thing_that_differs_is_counted_and_named() -> None:
    found = table("things", [Outcome("one"), Outcome("two", "differs")])
    assert found == "things: 1 of 2 (50.0%)\n  two: differs"
