"""Mistakes that people make are noticed, and the same programs done right stay silent."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import signalfire
from signalfire.findings import Findings, FindingWarning
from signalfire.findings.codes import CODES
from tests import mistakes
from tests.kit import spread
from tests.mistakes.registry import MISTAKES, Mistake

for module in pkgutil.iter_modules(mistakes.__path__):
    importlib.import_module(f"tests.mistakes.{module.name}")

IDS = [f"{one.program.__module__.rpartition('.')[2]}-{one.program.__name__}" for one in MISTAKES]


def run(one: Mistake, right: bool, folder: Path) -> tuple[Any, BaseException | None, list[BaseException]]:
    """What a twin returns, the error that it ends with, and its warnings."""
    return run_and_read(one, right, folder)[:3]


def run_and_read(one: Mistake, right: bool, folder: Path) -> tuple[Any, BaseException | None, list[BaseException], str]:
    """What a twin returns, the error that it ends with, its warnings, and what it prints on stderr."""
    arguments = [right, folder] if len(inspect.signature(one.program).parameters) > 1 else [right]
    with warnings.catch_warnings(record=True) as caught, redirect_stderr(StringIO()) as printed:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)  # Python's own, of programs that fork
        try:
            result, error = one.program(*arguments), None
        except Exception as problem:
            result, error = None, problem
    messages: list[BaseException] = [
        warning.message for warning in caught if isinstance(warning.message, BaseException)
    ]
    return result, error, messages, printed.getvalue()


def codes_in(result: Any, error: BaseException | None, messages: list[BaseException]) -> set[str]:
    found = {message.finding.code for message in messages if isinstance(message, FindingWarning)}
    if isinstance(result, Findings):
        found |= {finding.code for finding in result}
    if isinstance(error, signalfire.FindingError):
        found.add(error.finding.code)
    return found


@pytest.mark.whole
@pytest.mark.parametrize("one", spread(MISTAKES, len(MISTAKES) // 3, pytest.mark.moderate), ids=IDS)
def test_a_mistake_is_noticed(one: Mistake, tmp_path: Path) -> None:
    result, error, messages, printed = run_and_read(one, right=False, folder=tmp_path)
    if one.outcome == "said":
        assert error is None, error
        assert not messages
        assert len([line for line in printed.splitlines() if re.search(one.match, line)]) == 1, printed
    elif one.outcome == "right":
        assert error is None
        assert result is not None
        assert result == run(one, right=True, folder=tmp_path / "right")[0]
    elif one.outcome == "silent":
        assert one.why
        assert error is None
        assert not messages
    elif one.code is not None:
        assert one.code in codes_in(result, error, messages), (result, error, messages)
    else:
        assert one.error is not None
        texts = [
            " ".join([str(seen), *getattr(seen, "__notes__", [])])
            for seen in [error, *messages]
            if isinstance(seen, one.error)
        ]
        assert any(re.search(one.match, text) for text in texts), (error, messages)


NOTICED = [one for one in MISTAKES if one.outcome != "silent"]


@pytest.mark.whole
@pytest.mark.parametrize(
    "one",
    spread(NOTICED, len(NOTICED) // 3),
    ids=[name for name, one in zip(IDS, MISTAKES, strict=True) if one in NOTICED],
)
def test_the_same_done_right_stays_silent(one: Mistake, tmp_path: Path) -> None:
    result, error, messages, printed = run_and_read(one, right=True, folder=tmp_path)
    assert error is None, error
    assert not messages
    assert printed == "" or one.outcome != "said", printed
    if isinstance(result, Findings):
        assert not result.at_least("warning"), str(result)


def test_hardly_any_mistake_is_silent() -> None:
    assert len(set(IDS)) == len(IDS)
    assert sum(one.outcome == "silent" for one in MISTAKES) <= 5


def test_each_code_has_a_case() -> None:
    assert {one.code for one in MISTAKES if one.code is not None} >= set(CODES)
