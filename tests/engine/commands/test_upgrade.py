"""`python -m signalfire upgrade`: names of earlier versions in files, with those of today."""

from __future__ import annotations

import json
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
    assert err == "1 outdated names\n"
    assert main(["upgrade", str(tmp_path / "b.py")]) == 0
    assert main(["upgrade", str(tmp_path / "none.py")]) == 2
    (tmp_path / "c.py").write_text("def\n")
    assert main(["upgrade", str(tmp_path / "c.py")]) == 2


OLD = "from signalfire.monitor import Monitor\n"


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"a": b"def\n", "b": OLD.encode(), "c": b"x = 1\0", "d": b"# coding: nothing\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_bytes(text)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing")
    (tmp_path / "x.py").mkdir()
    (tmp_path / "x.py" / "in.py").write_text(OLD)
    assert main(["upgrade", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert [line.split(":")[0] for line in out.splitlines()] == [
        str(tmp_path / "b" / "train.py"),
        str(tmp_path / "x.py" / "in.py"),
    ]
    *sentences, last = err.splitlines()
    assert [line.split(":")[0] for line in sentences] == [
        str(tmp_path / name) for name in ("gone.py", "a/train.py", "c/train.py", "d/train.py")
    ]
    assert last == "2 outdated names; 4 files could not be read"


def test_what_is_hidden_or_installed_is_left_out_unless_it_is_named(tmp_path: Path) -> None:
    for name in (".venv", "env", "conda", ".git", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(OLD)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "conda" / "conda-meta").mkdir()
    assert [one.path.parent.name for one in upgrade([tmp_path])[0]] == ["mine"]
    assert [one.path.parent.name for one in upgrade([tmp_path / ".venv"])[0]] == [".venv"]


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbf" + OLD.encode(),
        b"# -*- coding: latin-1 -*-\n# \xe9\n" + OLD.encode(),
        "# \u00e9 \u4f60\n".encode() + OLD.encode(),
        b"x = '\\d'\n" + OLD.encode(),
    ],
    ids=["a mark of UTF-8", "latin-1", "UTF-8", "an escape that Python warns of"],
)
def test_each_file_that_python_compiles_is_read(source: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(source)
    found, unread = upgrade([tmp_path])
    assert ([one.old for one in found], unread) == (["from signalfire.monitor import"], [])


def notebook(*cells: str | list[str]) -> bytes:
    code = [{"cell_type": "code", "source": source} for source in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "from x"}, *code]}).encode()


def test_the_cells_of_notebooks_are_read_in_folders_too(tmp_path: Path) -> None:
    cells = (
        ["%matplotlib inline\n", "!pip install x\n", OLD],
        "%%bash\nls | wc\n",
        "%%time\n" + OLD,
        "await f('a'\n% 3)\n",
        "files = !ls\nfiles?\n" + OLD,
    )
    (tmp_path / "a.ipynb").write_bytes(notebook(*cells))
    found, unread = upgrade([tmp_path])
    assert [(one.cell, one.line) for one in found] == [(2, 3), (4, 2), (6, 3)]
    assert not unread
    assert found[0].shown().startswith(f"{tmp_path / 'a.ipynb'}:cell 2:3: from signalfire.monitor import -> ")


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"{", b'{"cells": [3]}', b"\xff", notebook("def")])
def test_what_is_no_notebook_is_no_all_clear(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_bytes(text)
    found, (sentence,) = upgrade([path])
    assert not found
    assert sentence.startswith(f"{path}:")


def test_the_sources_of_the_package_have_no_old_name() -> None:
    root = Path(__file__).parents[3]
    assert upgrade([root / "engine", root / "handlers", root / "examples"]) == ([], [])
