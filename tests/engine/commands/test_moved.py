"""Modules that have moved are found under their old names, with a warning that has the new one."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from signalfire.commands.moved import MOVED, install


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_gives_the_module_and_names_the_new_one(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(
        DeprecationWarning, match=rf"{old} has moved to {MOVED[old]}, .* 0\.4\.0; import from "
    ) as caught:
        module = import_module(old)
    assert module is import_module(MOVED[old])
    assert len(caught) == 1
    monkeypatch.delitem(sys.modules, old)


def test_the_warning_is_at_the_line_that_has_the_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "signalfire.checks", raising=False)
    with pytest.warns(DeprecationWarning, match="import from signalfire.authoring") as caught:
        exec(compile("from signalfire.checks import check_int", "their_handler.py", "exec"), {})
    assert caught[0].filename == "their_handler.py"
    monkeypatch.delitem(sys.modules, "signalfire.checks")


def test_a_name_that_never_was_is_not_found_and_the_finder_is_installed_once() -> None:
    finders = len(sys.meta_path)
    install()
    assert len(sys.meta_path) == finders
    with pytest.raises(ModuleNotFoundError, match=r"signalfire\.never"):
        import_module("signalfire.never")
