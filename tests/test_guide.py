"""The guide is true: what its pages show is run in order, and what they say is printed is printed."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest

from signalfire import FindingWarning, Handler, handlers
from tests.kit import CLIENTS, finished, needs

needs("docs", "sybil", "sphinx", "furo", "myst_parser", "lightning", "ignite")

from sybil import Sybil  # noqa: E402 (after the check that it is installed)
from sybil.parsers.myst import PythonCodeBlockParser  # noqa: E402

GUIDE = Path(__file__).parent.parent / "examples" / "guide"
WRITTEN = (
    "index",
    "start",
    "from_a_plain_loop",
    "from_lightning",
    "from_ignite",
    "from_huggingface",
    "from_fastai",
    "from_pytorch_accelerated",
    "timm",
    "loop",
    "by_purpose",
    "recipes",
    "examples",
    "ecosystem",
    "symptoms",
    "reproducibility",
    "writing_a_handler",
    "publishing",
    "contributing",
    "processes",
    "elastic",
    "compare",
    "costs",
    "checks",
    "resuming",
    "validation",
    "logging",
    "spikes",
    "weights",
    "finders",
    "ablation",
    "performance",
    "pictures",
    "tensor_parallel",
    "versions",
    "stable",
    "changelog",
)
RECIPES = (
    "recipe_images",
    "recipe_lora",
    "recipe_language_model",
    "recipe_gan",
    "recipe_reinforcement",
    "recipe_folds",
    "recipe_search",
    "recipe_nodes",
)
PEERS = {
    "from_huggingface": ("transformers", "accelerate"),
    "from_fastai": ("fastai",),
    "from_pytorch_accelerated": ("pytorch_accelerated",),
}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(%?)")


def test_every_page_is_in_the_contents_and_has_been_looked_at_here() -> None:
    trees = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", (GUIDE / "index.md").read_text(), re.DOTALL)
    listed = " ".join(trees).split()
    made = {"handlers/index", "things", "codes", "errors", "interface", "parts"}
    assert len(listed) == len({*listed})
    assert {*listed} == {*WRITTEN, *made} - {"index"}
    recipes = (GUIDE / "recipes.md").read_text()
    (linked,) = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", recipes, re.DOTALL)
    assert linked.split() == [*RECIPES]
    assert [page for page in RECIPES if f"({page}.md)" not in recipes] == []


def test_each_page_for_those_who_come_from_elsewhere_compares_the_weights_of_both_trainings() -> None:
    """Whether they are equal is what running the page shows."""
    pages = sorted(GUIDE.glob("from_*.md"))
    assert {page.stem for page in pages} <= {*WRITTEN}
    for page in pages:
        code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
        assert re.search(r"^assert all\(torch\.equal\(one, other\) for one, other in zip\(", code, re.MULTILINE), (
            page.stem
        )


def test_every_handler_is_in_the_table_by_purpose() -> None:
    table = (GUIDE / "by_purpose.md").read_text()
    kinds = [getattr(handlers, name) for name in handlers.__all__]
    bases = {"Average", "Accuracy", "RemoteLogger"}  # what Metrics is given, and what a logger of one's own begins with
    public = {one.__name__ for one in kinds if isinstance(one, type) and issubclass(one, Handler)} - bases
    assert {name for name in public if f"[`{name}`]" not in table} == set()


@pytest.mark.moderate
def test_the_page_of_errors_has_each_module_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GUIDE))
    modules = re.findall(r"^## (.*)$", importlib.import_module("pages").errors_page(), re.MULTILINE)
    assert {"signalfire.core.registry", "signalfire.handlers.validation"} <= {*modules}
    assert len(modules) == len({*modules})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")  # as ignite is imported
@pytest.mark.parametrize("page", [*WRITTEN, *RECIPES])
def test_what_a_page_shows_runs_and_prints_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page in PEERS:
        needs("fastai" if page == "from_fastai" else "migration", *PEERS[page])
        warnings.simplefilter("ignore")  # what they warn of is theirs
        warnings.simplefilter("error", FindingWarning)
    if page == "recipe_search":
        needs("search", "optuna")
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS
    sybil = Sybil([PythonCodeBlockParser(doctest_optionflags=flags)])
    document = sybil.parse(GUIDE / f"{page}.md")
    examples = list(document.examples())
    for example in examples:
        example.evaluate()
    fences = (GUIDE / f"{page}.md").read_text().count("```python\n")
    assert fences == 0 or len(examples) >= fences, "a fence was not run"
    if page in RECIPES:
        shown = "".join(
            re.findall(r"^```text\n(.*?)^```", (GUIDE / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
        )
        compare_printed(shown, capsys.readouterr().out)


def compare_printed(shown: str, printed: str) -> None:
    """Words and the number of lines are the same, numbers nearly: processors round differently."""
    assert NUMBER.sub("0", shown) == NUMBER.sub("0", printed)
    for one, other in zip(NUMBER.finditer(shown), NUMBER.finditer(printed), strict=True):
        values = [float(found[0].strip("%").replace(",", "")) for found in (one, other)]
        near = pytest.approx(values[1], abs=8.0) if one[1] else pytest.approx(values[1], rel=0.25, abs=0.02)
        assert values[0] == near, f"{one[0]} is shown, {other[0]} is printed"


def test_the_first_steps_begin_with_the_script_that_a_new_project_has() -> None:
    script = (GUIDE.parent.parent / "engine" / "commands" / "project" / "train.py").read_text()
    page = (GUIDE / "start.md").read_text()
    assert page.partition("```py\n")[2].startswith(f"{script}```\n")
    printed = re.findall(r'print\(f"([^{"]+)', script)
    assert [line.partition(": ")[0] for line in page.partition("ends with:\n\n```\n")[2].splitlines()[:3]] == [
        one.partition(": ")[0] for one in printed
    ]


@pytest.mark.slow
def test_the_pictures_are_those_that_the_page_draws(tmp_path: Path) -> None:
    """What times do not change is alike; where they do, the picture has the same size."""
    from PIL import Image, ImageChops, ImageStat

    names = re.findall(r"!\[[^\]]+\]\(pictures/([\w.]+)\)", (GUIDE / "pictures.md").read_text())
    assert {path.name for path in (GUIDE / "pictures").iterdir()} == {*names}
    done = finished(GUIDE / "pictures.py", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in names:
        stored, drawn = (Image.open(folder / name).convert("L") for folder in (GUIDE / "pictures", tmp_path))
        if name not in ("timeline.png", "profile.png"):
            assert stored.size == drawn.size, name
            assert ImageStat.Stat(ImageChops.difference(stored, drawn)).mean[0] < 4, (
                f"{name}: run examples/guide/pictures.py"
            )
        assert ImageStat.Stat(stored).stddev[0] > 10, f"{name} is empty"


SHOWN = [name for name in handlers.__all__ if ">>>" in (getattr(handlers, name).__doc__ or "")]


def as_pasted(name: str) -> str:
    """The docstring of a handler as its page shows it, with the imports that its example needs."""
    one = getattr(handlers, name)
    lines = (inspect.getdoc(one) or "").splitlines()
    importlib.import_module("pasted").insert_imports(None, "class", name, one, None, lines)
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHOWN if getattr(handlers, name).__module__ not in CLIENTS])
def test_an_example_runs_as_it_is_pasted_from_a_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GUIDE))
    test = doctest.DocTestParser().get_doctest(as_pasted(name), {}, name, None, 0)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHOWN if getattr(handlers, name).__module__ in CLIENTS])
def test_an_example_of_a_logger_runs_as_it_is_pasted_from_a_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as the clients read their settings when they are imported."""
    needs("loggers", *CLIENTS[getattr(handlers, name).__module__])
    monkeypatch.syspath_prepend(str(GUIDE))
    (tmp_path / "example.txt").write_text(as_pasted(name))
    result = finished("-m", "doctest", "-o", "ELLIPSIS", "example.txt", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
