"""`python -m signalfire upgrade`: names of earlier versions in files, with those of today."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import signalfire
from signalfire.__main__ import main
from signalfire.authoring import Claim
from signalfire.commands.upgrade import CLAIMS, MODULES, old_names, upgrade
from signalfire.handlers._common import claims

SCRIPT = """\
import signalfire.batches
from signalfire import Engine, handler
from signalfire.checks import check_int
from signalfire.handlers import Freezing, summary

trainer = Engine(...)
trainer.attach(Freezing("backbone", until=3))
print(trainer.loop, other.loop, trainer.state.loop)
x = until(until=3)
from .checks import mine
rate, step = Override.LEARNING_RATE, Override.STEP
"""


def test_each_old_name_is_listed_with_its_line_and_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert [(one.line, one.old, one.new) for one in old_names(script)] == [
        (1, "import signalfire.batches", "import signalfire.authoring.batches"),
        (2, "from signalfire import handler", "from signalfire.core import handler"),
        (3, "from signalfire.checks import", "from signalfire.authoring.checks import"),
        (7, "Freezing(until=)", "Freezing(unfreeze_at=)"),
        (8, "trainer.loop", "trainer.current_run"),
        (11, "Override.LEARNING_RATE", 'Claim("the learning rate", rehearsed=False)'),
    ]
    assert script.read_text() == SCRIPT


def test_no_public_name_of_today_has_the_name_of_a_module_of_before() -> None:
    assert not {f"signalfire.{name}" for name in vars(signalfire)["__all__"]} & MODULES.keys()


@pytest.mark.parametrize("old", MODULES)
def test_every_module_of_the_table_is_there_under_its_new_name(old: str) -> None:
    assert import_module(MODULES[old]) is not None


@pytest.mark.parametrize("old", CLAIMS)
def test_a_claim_of_the_table_is_that_of_the_included_handlers(old: str) -> None:
    assert eval(f"Claim({CLAIMS[old]})", {"Claim": Claim}) == getattr(claims, old)


def test_the_command_lists_folders_and_says_by_its_code_whether_there_is_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("from signalfire.monitor import Monitor\n")
    (tmp_path / "b.py").write_text("print(1)\n")
    assert main(["upgrade", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert (
        out
        == f"{tmp_path / 'sub' / 'a.py'}:1: from signalfire.monitor import -> from signalfire.authoring.monitor import\n"
    )
    assert err == "1 names of earlier versions\n"
    assert main(["upgrade", str(tmp_path / "b.py")]) == 0
    assert main(["upgrade", str(tmp_path / "none.py")]) == 2
    (tmp_path / "c.py").write_text("def\n")
    assert main(["upgrade", str(tmp_path / "c.py")]) == 2


def test_the_sources_of_the_package_have_no_old_name() -> None:
    root = Path(__file__).parents[3]
    assert upgrade([root / "engine", root / "handlers", root / "examples"]) == []
