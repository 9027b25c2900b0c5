"""Arguments are checked where they are given, and the error says whose, what it was, and what is expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from signalfire.ablation.store import Store
from signalfire.authoring.checks import check_bool, check_choice, check_function, check_int, check_local, check_number
from signalfire.commands.new import new_project
from signalfire.exact import CheckpointFolder
from signalfire.handlers import Checkpoint, CSVLogger, Export
from signalfire.weights import average_weights, export_weights, read_weights
from tests.kit import build, linear


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_a_whole_number_that_is_none_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=re.escape(f"Thing(size={value!r}): expected an int of 1 or more")):
        check_int("Thing", "size", value)


def test_whole_numbers_of_numpy_become_pythons() -> None:
    number = check_int("Thing", "size", np.int64(3))
    assert number == 3
    assert type(number) is int
    assert check_int("Thing", "size", 0, least=0) == 0


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0, {"above": 0}, "a number above 0"),
        (-0.1, {"least": 0}, "a number of 0 or more"),
        (1.0, {"below": 1, "least": 0}, "a number of 0 or more and below 1"),
        (1.5, {"above": 0, "most": 1}, "a number above 0 and at most 1"),
        (math.inf, {}, "a finite number"),
        (math.nan, {"infinite": True}, "a number"),
        (math.inf, {"above": 0}, "a number above 0"),
    ],
)
def test_a_number_out_of_bounds_is_refused(value: float, bounds: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Thing(rate={value!r}): expected {message}") + "$"):
        check_number("Thing", "rate", value, **bounds)


@pytest.mark.parametrize("value", ["1", None, True, 1j])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"Thing(rate={value!r})")):
        check_number("Thing", "rate", value)


def test_numbers_keep_their_kind_and_numpys_become_pythons() -> None:
    assert type(check_number("Thing", "rate", 2, above=0)) is int
    assert type(check_number("Thing", "rate", np.float32(0.5), most=1)) is float
    assert check_number("Thing", "rate", math.inf, above=0, infinite=True) == math.inf


def test_words_and_truth_values() -> None:
    assert check_choice("Thing", "mode", "min", ("min", "max")) == "min"
    for value in ("mean", 1, None):
        with pytest.raises(ValueError, match=re.escape(f"Thing(mode={value!r}): expected 'min', 'max' or 'sum'")):
            check_choice("Thing", "mode", value, ("min", "max", "sum"))
    assert check_bool("Thing", "on", False) is False
    with pytest.raises(TypeError, match=re.escape("Thing(on=1): expected True or False")):
        check_bool("Thing", "on", 1)


def test_the_owner_may_be_an_object() -> None:
    class Thing:
        pass

    with pytest.raises(ValueError, match=r"Thing\(size=0\)"):
        check_int(Thing(), "size", 0)


@pytest.mark.parametrize("address", ["s3://bucket/x.safetensors", Path("s3://bucket/x.safetensors")], ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        Checkpoint.load, Checkpoint.hyperparameters, CheckpointFolder, Store, read_weights,
        partial(export_weights, build(linear(5, 1))), lambda path: average_weights([path]), new_project,
    ],
)  # fmt: skip
def test_a_function_that_takes_a_path_refuses_a_url(call: Callable[[Any], Any], address: Any) -> None:
    with pytest.raises(ValueError, match=r"='s3:.*a URL is not a path.*Checkpoints in an object store"):
        call(address)


WRITERS = (Checkpoint, CSVLogger, partial(export_weights, build(linear(5, 1))), CheckpointFolder, Store, new_project)


@pytest.mark.parametrize("call", [*WRITERS, Checkpoint.load, Checkpoint.hyperparameters, read_weights])
def test_an_empty_path_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"=''\): expected a path"):
        call("")


@pytest.mark.parametrize("call", [Checkpoint.load, Checkpoint.hyperparameters])
def test_what_is_no_path_is_refused_by_what_was_called(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=rf"^{call.__qualname__}\(path=None\): expected a path(, got None; .*)?$"):
        call(None)


@pytest.mark.parametrize("call", [CheckpointFolder, Checkpoint, CSVLogger, lambda path: Export(path / "a.pt2")])
def test_a_path_below_a_file_is_refused_where_it_is_given(call: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"\w\(\w+='.*/file/.*'\): '.*/file' is a file, not a folder"):
        call(tmp_path / "file" / "below")


@pytest.mark.parametrize("path", ["C:/runs", "runs:1/x", "a/s3:/b", "./s3:/b", "s3:b", b"s3://b", Path("/tmp/s3://b")])
def test_other_paths_with_a_colon_are_paths(path: Any) -> None:
    check_local("Checkpoint", "folder", path)


def test_a_path_is_absolute_and_knows_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert check_local("Checkpoint", "folder", "runs/a") == tmp_path / "runs/a"
    assert check_local("Checkpoint", "folder", Path("~/runs")) == tmp_path / "home/runs"
    assert check_local("Checkpoint", "folder", tmp_path) == tmp_path


def test_functions_are_refused_that_cannot_be_called_as_they_will_be() -> None:
    function: Any
    for function in (max, print, lambda *values: None, lambda value, step=0: None, partial(print, 1)):
        check_function("Reporting", "report", function, "value", "step")
    call = re.escape("report(value, step)")
    for function in (lambda: None, lambda value: None, lambda value, step, more: None, lambda value, *, step: None):
        with pytest.raises(
            TypeError, match=rf"Reporting\(report=<function .*>\): the function cannot be called as {call}: .*argument"
        ):
            check_function("Reporting", "report", function, "value", "step")
    with pytest.raises(TypeError, match=rf"Reporting\(report=3\): expected a function, called as {call}"):
        check_function("Reporting", "report", 3, "value", "step")


def test_a_decorated_function_is_checked_as_it_is_called_and_not_as_the_one_inside() -> None:
    """`functools.wraps` shows the signature of the function inside, which the decorator may call with more or fewer arguments."""

    def inner(value: Any, step: Any, more: Any) -> None: ...

    @wraps(inner)
    def fills_in(value: Any, step: Any) -> None:
        inner(value, step, 1)

    @wraps(print)
    def needs_more(value: Any, step: Any, more: Any) -> None: ...

    wrapped: Any
    for wrapped in (fills_in, torch.no_grad()(fills_in)):
        assert check_function("Reporting", "report", wrapped, "value", "step") is wrapped
    with pytest.raises(
        TypeError, match=r"the function cannot be called as report\(value, step\): missing a required argument: 'more'"
    ):
        check_function("Reporting", "report", needs_more, "value", "step")


def test_of_a_file_url_the_error_gives_the_path() -> None:
    with pytest.raises(ValueError, match="write '/tmp/my runs'"):
        check_local("Checkpoint", "folder", Path("file:///tmp/my%20runs"))
