"""The built guide: complete, without a dead link, and in a browser readable on a phone, by day and by night."""

from __future__ import annotations

import ast
import html
import inspect
import re
import shutil
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import signalfire
from signalfire import ablation, testing, tuning
from signalfire.findings.codes import CODES
from tests.engine.ablation.reports import WORSE, report
from tests.kit import LIMIT, finished, needs, shipped, wait_until

needs("docs", "sybil", "sphinx", "furo", "myst_parser", "lightning", "ignite")

from tests.test_guide import GUIDE, RECIPES, WRITTEN  # noqa: E402

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 800}
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The site, which is built once, by whichever process is the first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "guide"
    try:
        folder.mkdir()
    except FileExistsError:
        wait_until((folder / "built").exists)
    else:
        built = finished("-m", "sphinx", "-q", "-W", "-n", "-E", "-d", folder / "trees", GUIDE, folder / "site")
        (folder / "built").write_text(built.stderr if built.returncode else "")
    assert (folder / "built").read_text() == ""
    return folder / "site"


class Page(HTMLParser):
    """The places that a page has, and those that it points to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.places, self.links = set[str](), list[str]()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def test_the_guide_is_built_without_a_warning_and_has_a_page_for_each_handler_and_code(site: Path) -> None:
    for kind in shipped():
        name = kind.__name__
        page = (site / "handlers" / f"{name}.html").read_text()
        assert f'id="signalfire.handlers.{name}"' in page, name
        assert all(f">{one}<" in page for one in inspect.signature(kind).parameters), name
    codes = (site / "codes.html").read_text()
    assert [code for code in CODES if f">{code}<" not in codes] == []
    # Of this one the way out is put together from values, and stands in the finding alone.
    rows = {
        code: re.search(rf'<td><p><span id="{code.lower()}">{code}</span></p></td>.*?</tr>', codes, re.DOTALL)
        for code in CODES
    }
    assert {code for code, row in rows.items() if row is None or "the finding says what to change" in row[0]} == {"C06"}
    errors = text_of(site / "errors.html")
    assert "; detach one of the two" in errors
    assert "expected at least one factor" in errors
    texts = (site / "llms-full.txt").read_text()
    contents = (site / "llms.txt").read_text()
    for name in [*WRITTEN, *RECIPES]:
        written = "" if name == "changelog" else (GUIDE / f"{name}.md").read_text()
        parts = re.split(r"^\.\. auto.*\n(?:   :.*\n)*", written, flags=re.MULTILINE)  # docstrings stand in their place
        assert all(part in texts for part in parts), name
        assert f"({name}.html)" in contents, name
    assert (GUIDE.parent.parent / "CHANGELOG.md").read_text() in texts
    for written in (
        "\nsignalfire.ablation.divergence(",  # the function, which a module is named after
        "\nUpdate.supervised(loss:",
        "\nLog.image(",
        "\nsignalfire.authoring.checks.check_int(",
    ):
        assert written in texts
    assert "bool(x) -> bool" not in texts  # the docstring of a value's type


def test_every_public_name_is_in_the_interface_and_every_error_in_the_list_of_errors(site: Path) -> None:
    interface = (site / "interface.html").read_text()
    names = [f"signalfire.{name}" for name in vars(signalfire)["__all__"]]
    names += [f"{module.__name__}.{name}" for module in (ablation, testing, tuning) for name in vars(module)["__all__"]]
    assert [name for name in names if f'id="{name}"' not in interface] == []
    shown = " ".join(text_of(site / "errors.html").split())
    raised = [
        " ".join(node.exc.args[0].value.split())
        for folder in ("engine", "handlers")
        for file in sorted((GUIDE.parent.parent / folder).rglob("*.py"))
        if "project" not in file.parts
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
        and isinstance(node.exc.args[0], ast.Constant) and isinstance(node.exc.args[0].value, str)
    ]  # fmt: skip
    assert len(raised) > 40, "most texts are filled in, and are not looked at here"
    assert [text for text in raised if text not in shown] == []


def text_of(file: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", file.read_text(encoding="utf-8")))


def test_each_handlers_page_has_its_example_with_what_it_prints(site: Path) -> None:
    for kind in shipped():
        page = (site / "handlers" / f"{kind.__name__}.html").read_text(encoding="utf-8")
        blocks = re.findall(r'<div class="highlight"><pre>(.*?)</pre>', page, re.DOTALL)
        shown = html.unescape(re.sub(r"<[^>]+>", "", "\n".join(blocks)))
        lines = [line.strip() for line in (inspect.getdoc(kind) or "").partition("Example:")[2].splitlines()]
        example = [line for line in lines if line]
        assert example, kind.__name__
        assert any(line.startswith(">>>") for line in example), kind.__name__
        prints = not example[-1].startswith((">>>", "..."))
        extra = any("find_spec" in line for line in example)  # one that runs with an extra alone
        assert prints or extra, f"{kind.__name__}: its example prints nothing"
        there = [line.strip() for line in shown.splitlines()]
        assert [line for line in example if line not in there] == [], kind.__name__


def test_no_link_and_no_anchor_is_dead(site: Path) -> None:
    page = cache(Page)
    dead = []
    for file in sorted(site.rglob("*.html")):
        for link in page(file).links:
            if re.match(r"[a-z]+:|//", link) or (file.name == "search.html" and link == "#"):
                continue
            path, anchor = urldefrag(link)
            target = (file.parent / unquote(path.partition("?")[0])).resolve() if path else file
            if not target.exists():
                dead.append(f"{file.relative_to(site)} points to {link}")
            elif anchor and target.suffix == ".html" and unquote(anchor) not in page(target).places:
                dead.append(f"{file.relative_to(site)} points to {link}, which has no such place")
    assert dead == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium without a window."""
    needs("browser", "playwright")
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program)
        yield started
        started.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab as wide as a phone, which must not report anything."""
    opened = browser.new_page(viewport=PHONE)
    said: list[str] = []
    opened.on("console", lambda message: said.append(f"{opened.url}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(f"{opened.url}: {error}"))
    opened.on("requestfailed", lambda request: said.append(f"{opened.url}: {request.url} was not found"))
    yield opened
    opened.close()
    assert said == []


# What sticks out of the window to the right without a scroll bar of its own around it, below that of the article.
TOO_WIDE = """() => {
    const inside = (one) => { for (let p = one.parentElement; p && p.tagName !== 'ARTICLE'; p = p.parentElement) {
        if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return true } return false }
    const wide = [...document.querySelectorAll('article *')].filter(
        (one) => one.getBoundingClientRect().right > window.innerWidth + 1 && !inside(one))
    return [document.documentElement.scrollWidth - window.innerWidth, wide.slice(0, 3).map((one) => one.outerHTML.slice(0, 80))]
}"""

# The smallest contrast of the text of paragraphs, links, code and cells to what is behind it, as WCAG defines it.
CONTRAST = """() => {
    const numbers = (color) => color.match(/[\\d.]+/g).map(Number)
    const light = (color) => numbers(color).slice(0, 3).map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
    const lights = new Map(), backgrounds = new Map()
    const lightOf = (color) => { if (!lights.has(color)) lights.set(color, light(color)); return lights.get(color) }
    const behind = (one) => {
        if (!one) return 'rgb(255, 255, 255)'
        if (!backgrounds.has(one)) {
            const own = getComputedStyle(one).backgroundColor, color = numbers(own)
            backgrounds.set(one, color.length < 4 || color[3] > 0.9 ? own : behind(one.parentElement)) }
        return backgrounds.get(one) }
    let worst = [21, '']
    const texts = ['p', 'a', 'code', 'td', 'th', 'li', 'pre span'].map((one) => 'article ' + one).join(', ')
    for (const one of document.querySelectorAll(texts)) {
        const [a, b] = [lightOf(getComputedStyle(one).color), lightOf(behind(one))].sort((x, y) => y - x)
        if ((a + 0.05) / (b + 0.05) < worst[0] && one.innerText && one.innerText.trim())
            worst = [(a + 0.05) / (b + 0.05), one.outerHTML.slice(0, 120)]
    }
    return worst
}"""


def test_every_page_is_readable_on_a_phone_by_day_and_by_night(site: Path, tab: Any) -> None:
    wrong = []
    for file in sorted(site.rglob("*.html")):
        tab.goto(file.as_uri())
        out, elements = tab.evaluate(TOO_WIDE)
        if out > 0 or elements:
            wrong.append(f"{file.relative_to(site)} is {out} pixels too wide: {elements}")
        behind = []
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            behind.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
            contrast, where = tab.evaluate(CONTRAST)
            if contrast < 4.5:
                wrong.append(f"{file.relative_to(site)}, {scheme}: a contrast of {contrast:.1f} at {where}")
        if behind[0] == behind[1]:
            wrong.append(f"{file.relative_to(site)} is the same by day and by night")
    assert wrong == []


def test_wide_tables_scroll_in_themselves(site: Path, tab: Any) -> None:
    tab.goto((site / "costs.html").as_uri())
    inner = tab.evaluate(
        "[...document.querySelectorAll('.table-wrapper, .highlight pre, .highlight')].filter("
        "(one) => one.scrollWidth > one.clientWidth + 1).map((one) => getComputedStyle(one).overflowX)"
    )
    assert inner
    assert {*inner} <= {"auto", "scroll"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("accumulation", "handlers/GradientAccumulation.html"),
        ("GradientClipping", "handlers/GradientClipping.html"),
        ("resume", "resuming.html"),
        ("W14", "codes.html"),
        ("BatchNorm", "handlers/Freezing.html"),
        ("IterableDataset", "handlers/DistributedDataParallel.html"),
        ("two forwards", "symptoms.html"),
        ("overhead", "symptoms.html"),
        ("confidence interval", "symptoms.html"),
        ("gradient norm per layer", "symptoms.html"),
        ("batch skipped", "symptoms.html"),
        ("freeze backbone", "symptoms.html"),
        ("several gpus", "symptoms.html"),
        ("early stopping", "handlers/EarlyStopping.html"),
        ("unsupported bf16", "symptoms.html"),
        ("several optimizers Muon", "ecosystem.html"),
        ("loss becomes NaN", "symptoms.html"),
        ("largest batch", "finders.html"),
        ("server down", "symptoms.html"),
        ("slow rank", "handlers/StragglerDetection.html"),
        ("ONNX", "weights.html"),
        ("plain DDP", "processes.html"),
        ("object store", "resuming.html"),
        ("short last window", "from_a_plain_loop.html"),
        # What people ask for, in the words of other libraries' documentation and of the titles of their issues.
        ("perplexity", "symptoms.html"),
        ("multi-GPU", "processes.html"),
        ("gradient checkpointing", "symptoms.html"),
        ("transfer learning", "symptoms.html"),
        ("confusion matrix", "symptoms.html"),
        ("actor-critic", "symptoms.html"),
        ("troubleshooting", "symptoms.html"),
        ("FAQ", "symptoms.html"),
        ("quickstart", "start.html"),
        ("LR finder", "finders.html"),
        ("memory leak", "symptoms.html"),
        ("out of memory", "performance.html"),
        ("mixed precision", "handlers/MixedPrecision.html"),
        ("learning rate warmup", "handlers/LRScheduling.html"),
        ("cosine schedule", "recipe_images.html"),
        ("save best model", "resuming.html"),
        ("tensorboard", "handlers/TensorBoardLogger.html"),
        ("wandb", "handlers/WandbLogger.html"),
        ("multi-node", "processes.html"),
        ("torchrun", "processes.html"),
        ("FSDP", "handlers/FullyShardedDataParallel.html"),
        ("tensor parallelism", "tensor_parallel.html"),
        ("hyperparameter search", "recipe_search.html"),
        ("cross-validation", "recipe_folds.html"),
        ("stochastic weight averaging", "handlers/SWA.html"),
        ("label smoothing", "handlers/LabelSmoothing.html"),
        ("torch.compile", "handlers/Compile.html"),
        ("LoRA", "recipe_lora.html"),
        ("GAN", "recipe_gan.html"),
        ("reinforcement learning", "recipe_reinforcement.html"),
        ("language model", "recipe_language_model.html"),
        ("SLURM preemption", "handlers/Preemption.html"),
        ("Ctrl-C", "resuming.html"),
        ("custom metric", "logging.html"),
        ("callback", "from_lightning.html"),
        ("exploding gradients", "symptoms.html"),
        ("reproducibility", "reproducibility.html"),
        ("early stopping patience", "handlers/EarlyStopping.html"),
        ("profiler", "handlers/Profiler.html"),
        ("num_workers", "performance.html"),
        ("Windows macOS", "symptoms.html"),
        ("Hydra", "ecosystem.html"),
    ],
)
def test_the_search_finds_the_page_without_a_server(words: str, expected: str, site: Path, tab: Any) -> None:
    tab.set_viewport_size(DESKTOP)
    tab.goto((site / "index.html").as_uri())
    tab.fill("input[name=q]", words)
    tab.press("input[name=q]", "Enter")
    tab.wait_for_selector("#search-results li a", timeout=1000 * LIMIT)
    # The pages that were found are shown one by one, and only then this line.
    tab.wait_for_function(
        "document.querySelector('.search-summary')?.innerText.startsWith('Search finished')", timeout=1000 * LIMIT
    )
    found = [
        link.get_attribute("href").partition("#")[0].partition("?")[0]
        for link in tab.query_selector_all("#search-results li a")
    ]
    assert expected in found[:10], found[:10]
    assert expected != "codes.html" or found[0] == expected, "the code of a finding leads to what it means"


def test_the_page_of_a_report_is_readable_in_a_window_and_on_a_phone(tmp_path: Path, tab: Any) -> None:
    path = tmp_path / "report.html"
    report({f"- handler_{place}": WORSE for place in range(12)}).html(path)
    tab.goto(path.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert tab.locator("h1").inner_text() == "accuracy: 12 variants, 8 seeds"
    assert re.fullmatch(r"report, \d{4}-\d\d-\d\d", tab.locator("h1 + p").inner_text())
    tab.set_viewport_size({"width": 1300, "height": 900})
    hidden = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert tab.evaluate(hidden) == 0
    picture, tables = tab.locator("svg"), tab.locator("table")
    assert (picture.count(), tables.count()) == (1, 1)
    assert tables.locator("tbody tr").count() == 13
    assert picture.bounding_box()["width"] > 300
