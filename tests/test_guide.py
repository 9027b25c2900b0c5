"""The guide is true: what its pages show is run in order, and what they say is printed is printed."""

from __future__ import annotations

import doctest
import html
import inspect
import re
from pathlib import Path

import pytest

from signalfire import Handler, handlers
from signalfire.codes import CODES
from tests.kit import finished, needs

needs("docs", "sybil", "sphinx", "furo", "myst_parser", "lightning", "ignite")

from sybil import Sybil  # noqa: E402 (after the check that it is installed)
from sybil.parsers.myst import PythonCodeBlockParser  # noqa: E402

GUIDE = Path(__file__).parent.parent / "examples" / "guide"
FIRST = re.findall(r"^```python\n(.*?)^```", (GUIDE.parent.parent / "README.md").read_text(), re.DOTALL | re.MULTILINE)[
    0
]
CONTINUED = ("checks", "resuming", "logging", "spikes", "weights", "finders", "ablation")  # the example of the README
WRITTEN = (
    "index",
    "start",
    "from_a_plain_loop",
    "from_lightning",
    "from_ignite",
    "loop",
    "by_purpose",
    "ecosystem",
    "symptoms",
    "writing_a_handler",
    "processes",
    "costs",
)


def test_every_page_is_in_the_contents_and_has_been_looked_at_here() -> None:
    listed = re.search(r"```\{toctree\}\n:maxdepth: 1\n\n(.*?)```", (GUIDE / "index.md").read_text(), re.DOTALL)
    assert listed is not None
    assert {*listed[1].split()} == {*WRITTEN, *CONTINUED, "handlers/index", "codes", "errors", "interface"} - {"index"}


def test_every_handler_is_in_the_table_by_purpose() -> None:
    table = (GUIDE / "by_purpose.md").read_text()
    kinds = [getattr(handlers, name) for name in handlers.__all__]
    bases = {"Average", "Accuracy", "RemoteLogger"}  # what Metrics is given, and what a logger of one's own begins with
    public = {one.__name__ for one in kinds if isinstance(one, type) and issubclass(one, Handler)} - bases
    assert {name for name in public if f"[`{name}`]" not in table} == set()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")  # as ignite is imported
@pytest.mark.parametrize("page", [*WRITTEN, *CONTINUED])
def test_what_a_page_shows_runs_and_prints_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS
    sybil = Sybil([PythonCodeBlockParser(doctest_optionflags=flags)])
    document = sybil.parse(GUIDE / f"{page}.md")
    if page in CONTINUED:
        exec(compile(FIRST, "README.md", "exec"), document.namespace)
    examples = list(document.examples())
    for example in examples:
        example.evaluate()
    fences = (GUIDE / f"{page}.md").read_text().count("```python\n")
    assert fences == 0 or len(examples) >= fences, "a fence was not run"


@pytest.mark.slow
def test_the_guide_is_built_without_a_warning_and_has_a_page_for_each_handler_and_code(tmp_path: Path) -> None:
    built = finished("-m", "sphinx", "-q", "-W", "-n", "-E", "-d", tmp_path / "trees", GUIDE, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    for name in handlers.__all__:
        kind = getattr(handlers, name)
        if isinstance(kind, type) and issubclass(kind, Handler):
            page = (tmp_path / "site" / "handlers" / f"{name}.html").read_text()
            assert f'id="signalfire.handlers.{name}"' in page, name
            assert all(f">{one}<" in page for one in inspect.signature(kind).parameters), name
            assert "Example" in page, name
    codes = (tmp_path / "site" / "codes.html").read_text()
    assert [code for code in CODES if f">{code}<" not in codes] == []
    errors = html.unescape(re.sub(r"<[^>]+>", "", (tmp_path / "site" / "errors.html").read_text()))
    assert "; detach one of the two" in errors
    assert "expected at least one factor" in errors
    texts = (tmp_path / "site" / "llms-full.txt").read_text()
    contents = (tmp_path / "site" / "llms.txt").read_text()
    for page in [*WRITTEN, *CONTINUED]:
        assert (GUIDE / f"{page}.md").read_text() in texts, page
        assert f"({page}.html)" in contents, page
    for file in (tmp_path / "site").rglob("*.html"):
        for link in re.findall(r'href="([^"#:?]+)(?:#[^"]*)?"', file.read_text()):
            assert (file.parent / link).exists(), f"{file.name} points to {link}"
