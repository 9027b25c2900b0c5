"""The suites as tests, run by -m neutral: at least 97 % of each pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit import needs
from tests.neutral import estimators, metrics, optimizers, programs, recipes, schedulers
from tests.neutral.outcomes import Outcome, table

pytestmark = pytest.mark.neutral

SUITES: dict[str, tuple[Callable[[], list[Outcome]], int]] = {
    "optimizers of torch.optim": (optimizers.of_torch, 15),
    "schedulers of torch": (schedulers.of_torch, 16),
    "classes of torchmetrics": (metrics.of_torchmetrics, 180),
    "classes of torchmetrics, two ranks": (metrics.of_torchmetrics_on_two, 180),
}


def passes(name: str, outcomes: list[Outcome], least: int) -> None:
    text = table(name, outcomes)
    assert len(outcomes) >= least, text
    assert sum(one.reason is None for one in outcomes) >= 0.97 * len(outcomes), text


@pytest.mark.parametrize("name", SUITES)
def test_what_torch_and_torchmetrics_have_passes(name: str) -> None:
    suite, least = SUITES[name]
    passes(name, suite(), least)


def test_the_optimizers_of_pytorch_optimizer_pass() -> None:
    needs("neutral", "pytorch_optimizer", "einops")
    passes("optimizers of pytorch_optimizer", optimizers.of_pytorch_optimizer(), 128)


def test_the_schedulers_of_transformers_pass() -> None:
    needs("neutral", "transformers")
    passes("schedulers of transformers", schedulers.of_transformers(), 12)


def test_at_least_as_many_checks_of_scikit_learn_pass_as_with_skorch() -> None:
    ours = estimators.of_example()
    passes("checks of scikit-learn, examples/sklearn_estimator.py", ours, 50)
    needs("neutral", "skorch")
    theirs = estimators.of_skorch()
    assert len(theirs) >= 50
    assert sum(one.reason is None for one in ours) >= sum(one.reason is None for one in theirs) > 0


def test_the_programs_of_pytorch_examples_have_the_same_bits() -> None:
    needs("neutral", "mlxtend")
    passes("programs of pytorch/examples", programs.of_pytorch_examples(), 7)


def test_the_recipe_of_nanogpt_has_the_same_bits() -> None:
    passes("recipe of nanoGPT", recipes.of_nanogpt(), 1)


def test_a_thing_that_differs_is_counted_and_named() -> None:
    found = table("things", [Outcome("one"), Outcome("two", "differs")])
    assert found == "things: 1 of 2 (50.0%)\n  two: differs"
