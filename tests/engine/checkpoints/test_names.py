"""The names of versions: what a template may give, numbers for names that are taken, and hidden names."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from signalfire.checkpoints.names import (
    DEFAULT_FILENAME,
    LONGEST_NAME,
    NameTemplate,
    hidden_name,
    is_numbered,
    match_hidden,
    numbered,
    visible_name,
)
from signalfire.core.state import MetricStore
from signalfire.distributed.liveness import identity


def fill(text: str, **metrics: Any) -> str:
    return NameTemplate(text, "best").fill("best", 3, 120, 60, metrics)


def test_the_default_name_sorts_as_the_run_went() -> None:
    template = NameTemplate(DEFAULT_FILENAME, "last")
    names = [template.fill("last", epoch, iteration, 0, {}) for epoch, iteration in ((1, 9), (2, 10), (10, 100))]
    assert names[0] == "last-epoch0001-iter00000009"
    assert sorted(names) == names


def test_the_metrics_of_a_template_are_listed_once_and_without_the_counters() -> None:
    template = NameTemplate("{name}-{epoch}-{iteration}-{step}-{val/loss:.2f}-{accuracy}-{val/loss:.4f}", "best")
    assert template.metrics == ["accuracy", "val/loss"]


@pytest.mark.parametrize(
    "filename",
    ["", "a/b", "../up", ".hidden", "a b", "{}", "{0}", "{epoch!r}", "{epoch:{step}}", "{epoch", "{name:d}", "{score:d}",
     "x.damaged", "{iteration:0200d}", "a:b", "a\\b", "a\nb", "\u00e9"],
)  # fmt: skip
def test_templates_that_could_never_be_names_are_refused(filename: str) -> None:
    with pytest.raises(ValueError, match=r"Checkpoint\(filename="):
        NameTemplate(filename, "checkpoint")


def test_a_metric_that_is_no_number_is_refused_in_a_name() -> None:
    with pytest.raises(ValueError, match=r"'confusion' is a Tensor, not a scalar"):
        fill("{confusion}", confusion=torch.eye(2))


def test_a_template_that_is_well_may_still_be_given_a_value_that_is_too_long() -> None:
    assert len(fill("{score:.0f}", score=1e100)) == 101
    with pytest.raises(ValueError, match="at most 150 characters, which may be letters, digits"):
        fill("{score:.0f}", score=1e300)


def test_a_metric_that_is_only_announced_is_there() -> None:
    metrics = MetricStore()
    template = NameTemplate("{accuracy:.2f}", "best")
    with pytest.raises(
        KeyError, match=r"no value is named 'accuracy'; available names: epoch, iteration, name, step\W*$"
    ):
        template.require(metrics)
    metrics.announce("metrics", ["accuracy"])
    template.require(metrics)


def test_every_numbered_name_is_known_by_its_base_and_no_other() -> None:
    names = list(itertools.islice(numbered("best-1"), 12))
    assert names[:2] + names[-1:] == ["best-1", "best-1-2", "best-1-12"]
    assert all(is_numbered(name, "best-1") for name in names)
    others = ["best-12", "best-1-", "best-1-2-3", "best-1-exception", "best", "x-best-1"]
    assert not any(is_numbered(name, "best-1") for name in others)


@pytest.mark.parametrize("kind", ["new", "old", "replaced"])
def test_a_hidden_name_tells_what_it_hides_and_who_hides_it(kind: str, tmp_path: Path) -> None:
    name = "a.b-2.new=1e-07"
    one, other = hidden_name(tmp_path, name, kind), hidden_name(tmp_path, name, kind)
    assert one != other
    assert one.parent == tmp_path
    found = match_hidden(one.name)
    assert found is not None
    assert (found["name"], found["owner"], found["kind"]) == (name, identity(), kind)
    assert visible_name(one.name) == visible_name(name) == name


@pytest.mark.parametrize(
    "name", [".a.new", ".notes", "a.0123abcd~1~1~0.new", ".a.0123abcd~1~1~0.gone", ".a.01~1~1~0.old"]
)
def test_what_is_hidden_by_others_is_left_alone(name: str) -> None:
    assert match_hidden(name) is None
    assert visible_name(name) == name


def test_the_longest_name_can_still_be_hidden(tmp_path: Path) -> None:
    longest = "a" * LONGEST_NAME
    assert fill(longest) == longest
    for kind in ("new", "old", "replaced"):
        hidden_name(tmp_path, longest, kind).mkdir()
    with pytest.raises(ValueError, match="is invalid"):
        fill(f"{longest}a")
