"""Handlers that other packages announce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from signalfire.__main__ import main
from signalfire.authoring.plugins import find_handler, handlers_of_packages
from signalfire.testing import check_handler
from tests import kit

MODULE = """
from signalfire import Events, Handler, on


class Counting(Handler):
    \"\"\"Counts iterations.\"\"\"

    def __init__(self, *, name=None):
        super().__init__(name=name)
        self.count = 0

    @on(Events.ITERATION_COMPLETED)
    def add(self, engine):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state.get("count", 0)


class Other:
    pass
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str = "counting", **entries: str) -> None:
    (folder / f"{package}_handlers.py").write_text(MODULE)
    info = folder / f"{package}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    lines = [f"{name} = {package}_handlers:{value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[signalfire.handlers]", *lines, ""]))
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.moderate
def test_a_handler_of_another_package_is_found_listed_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["handlers"]) == 0
    before = capsys.readouterr().out
    assert "GradientClipping: " in before
    assert "from installed packages (entry points in the group 'signalfire.handlers'): none" in before
    install(tmp_path, monkeypatch, count_iterations="Counting", broken="Missing", wrong="Other")
    assert set(handlers_of_packages()) == {"count_iterations", "broken", "wrong"}
    assert find_handler("count_iterations").__name__ == "Counting"
    data = kit.batches(2)
    report = check_handler(lambda: kit.build(kit.linear(5, 1)), "count_iterations", data, max_epochs=2)
    assert report.startswith("counting: 14 runs")
    assert main(["handlers"]) == 0
    out = capsys.readouterr().out
    assert "count_iterations: Counts iterations.  [counting 1.5, counting_handlers:Counting]" in out
    assert "broken: cannot be loaded (AttributeError: " in out
    assert "wrong: cannot be loaded (TypeError: " in out
    with pytest.raises(
        LookupError, match=r"no installed package has an entry point 'count_iteration'.*count_iterations"
    ):
        check_handler(lambda: kit.build(kit.linear(5, 1)), "count_iteration", data, max_epochs=2)
    with pytest.raises(TypeError, match=r"expected a class derived from signalfire\.Handler"):
        find_handler("wrong")


def test_two_packages_with_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("one", "two"):
        (tmp_path / package).mkdir()
        install(tmp_path / package, monkeypatch, package, counting="Counting")
    assert set(handlers_of_packages()) == {"one.counting", "two.counting"}
    found: Any = find_handler("two.counting")
    assert found.__module__ == "two_handlers"
