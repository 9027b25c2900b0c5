"""The tables of the guide for those who come from elsewhere: nothing of theirs is left out, what they name of ours is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import signalfire
from signalfire import Engine, Events, Update, handlers
from tests.kit import batches, build, mlp, needs

GUIDE = Path(__file__).parent.parent / "examples" / "guide"
PAGES = [*sorted(file.stem for file in GUIDE.glob("from_*.md")), "timm"]
SPAN = re.compile(r"`([^`]+)`")


def rows(page: str) -> list[tuple[str, str]]:
    """What is theirs, and what is ours, of each row."""
    lines = [line for line in (GUIDE / f"{page}.md").read_text().splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
    assert all(len(row) == 2 for row in cells), [row for row in cells if len(row) != 2]
    return [(theirs, ours) for theirs, ours in cells if ours != "here"]


def named(page: str) -> set[str]:
    """The names of theirs that the page has a row for."""
    spans = [span for theirs, _ in rows(page) for span in SPAN.findall(theirs)]
    return {re.split(r"[=(]", span)[0].split(".")[-1] for span in spans}


def test_each_argument_of_timms_program_has_one_row_and_nine_of_ten_about_training_a_place() -> None:
    text = (GUIDE / "timm.md").read_text()
    trains, absent, theirs = (
        [span for line in part.splitlines() if line.startswith("| `") for span in SPAN.findall(line.split(" | ")[0])]
        for part in text.split("\n## ")[1:]
    )
    assert len({*trains, *absent, *theirs}) == len([*trains, *absent, *theirs]) == 175
    assert len(trains) >= 0.9 * len([*trains, *absent])
    counts = f"Of the {len([*trains, *absent])} arguments that concern training, {len(trains)} have an equivalent"
    words = " ".join(text.split())
    assert f"{counts} and {len(absent)} have none. Another {len(theirs)} are arguments" in words


# ---- ours, without them ------------------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("page", PAGES)
def test_every_row_has_an_answer_and_a_reason_where_it_is_no(page: str) -> None:
    for theirs, ours in rows(page):
        assert not re.match(r"(not|no|none)\b|unsupported(?!: )", ours), f"{theirs}: {ours}"
        assert len(ours) > 3, theirs


@pytest.mark.whole
@pytest.mark.parametrize("page", PAGES)
def test_what_a_table_names_of_ours_is_there(page: str) -> None:
    engine = Engine(Update.prediction())
    for _, ours in rows(page):
        for span in SPAN.findall(ours):
            for call in calls_in(span):
                function = found(call.func, engine)
                if function is not None:
                    accepted = inspect.signature(function).parameters
                    unknown = {one.arg for one in call.keywords} - {*accepted}
                    any_name = any(one.kind is one.VAR_KEYWORD for one in accepted.values())
                    assert any_name or not unknown, f"{span}: there are {', '.join(accepted)}"
            for name in attributes_in(span):
                found(name, engine)


def calls_in(span: str) -> list[ast.Call]:
    return [node for node in ast.walk(parsed(span)) if isinstance(node, ast.Call)]


def attributes_in(span: str) -> list[ast.Attribute]:
    return [node for node in ast.walk(parsed(span)) if isinstance(node, ast.Attribute)]


def parsed(span: str) -> ast.AST:
    """A piece of code; ``max_epochs=`` in it stands for any value."""
    try:
        return ast.parse(re.sub(r"=(?=[,)])", "=0", span).replace("...", "*rest").removeprefix("@").removesuffix(":"))
    except SyntaxError:
        return ast.Module([], [])


def found(node: ast.expr, engine: Engine) -> Callable[..., Any] | None:
    """What a name of ours stands for; None for names of others."""
    if isinstance(node, ast.Name):
        for module in (handlers, signalfire):
            if node.id in module.__all__:
                one: Callable[..., Any] = getattr(module, node.id)
                return one
        return None
    names = ast.unparse(node).split(".")
    if names[0] == "signalfire":
        return getattr(importlib.import_module(".".join(names[:-1])), names[-1])  # type: ignore[no-any-return]
    owner: Any = {
        "engine": engine,
        "schedules": importlib.import_module("signalfire.handlers.schedules"),
        "Update": Update,
        "History": handlers.History,
    }.get(names[0])
    for name in names[1:] if owner is not None else ():
        assert hasattr(owner, name), f"{'.'.join(names)}: there is no {name}"
        owner = getattr(owner, name)
    return owner if callable(owner) else None


# ---- theirs ------------------------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(function).parameters} - {"self", "kwargs"}


def methods(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def subclasses(package: str, base: str, but: str = "") -> set[str]:
    """The names of all classes below a base, read from the sources: many modules need clients of services to be imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    bases: dict[str, set[str]] = {}
    for file in Path(spec.submodule_search_locations[0]).rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and file.stem != but:
                bases[node.name] = {ast.unparse(one).rpartition(".")[2] for one in node.bases}
    found, size = {base}, 0
    while size < len(found):
        size = len(found)
        found |= {name for name, of in bases.items() if of & found}
    return {name for name in found - {base} if not name.startswith("_")}


def of_lightning() -> set[str]:
    from lightning.pytorch import Trainer, callbacks

    return parameters(Trainer) | {*callbacks.__all__}


def of_ignite() -> set[str]:
    import ignite.handlers

    return {*ignite.handlers.__all__}


def of_huggingface() -> set[str]:
    import transformers.integrations.integration_utils as integrations
    from transformers import Trainer, TrainerCallback, TrainingArguments, trainer_callback

    callbacks = {
        name
        for module in (trainer_callback, integrations)
        for name, one in vars(module).items()
        if inspect.isclass(one) and issubclass(one, TrainerCallback) and one is not TrainerCallback
    }
    arguments = {one.name for one in fields(TrainingArguments)}
    return arguments | parameters(Trainer.__init__) | callbacks - {"CallbackHandler"}  # which calls the others


def of_fastai() -> set[str]:
    from fastai.learner import Learner

    return parameters(Learner.__init__) | subclasses("fastai", "Callback", but="test_utils")


def of_pytorch_accelerated() -> set[str]:
    from pytorch_accelerated import Trainer

    arguments = parameters(Trainer.__init__) | parameters(Trainer.train)
    return arguments | subclasses("pytorch_accelerated", "TrainerCallback") | methods(Trainer) - {"train"}


THEIRS: dict[str, Callable[[], set[str]]] = {
    "from_lightning": of_lightning,
    "from_ignite": of_ignite,
    "from_huggingface": of_huggingface,
    "from_fastai": of_fastai,
    "from_pytorch_accelerated": of_pytorch_accelerated,
}
PACKAGES = {
    "from_lightning": ("lightning",),
    "from_ignite": ("ignite",),
    "from_huggingface": ("transformers", "accelerate"),
    "from_fastai": ("fastai",),
    "from_pytorch_accelerated": ("pytorch_accelerated",),
}


def test_every_page_for_those_who_come_from_elsewhere_is_compared() -> None:
    assert {*PAGES} == {*THEIRS, "from_a_plain_loop", "timm"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of theirs, as they are imported
@pytest.mark.parametrize("page", THEIRS)
def test_nothing_of_theirs_is_left_out(page: str) -> None:
    needs("fastai" if page == "from_fastai" else "migration", *PACKAGES[page])
    there = THEIRS[page]()
    assert len(there) > 20
    assert there - named(page) == set(), "add a row: ours, or `unsupported: ` and why"


def test_the_events_of_a_run_are_listed_in_their_order() -> None:
    page = (GUIDE / "loop.md").read_text()
    block = re.search(r"```text\n(MODEL_SETUP.*?)```", page, re.DOTALL)
    assert block
    listed = [name for name in re.findall(r"\b[A-Z_]{2,}\b", block[1]) if name != "TERMINATED"]
    engine = build(mlp(5, 4, 1))
    met: list[str] = []
    for event in Events:
        engine.connect(event, lambda engine, name=event.name: met.append(name))
    engine.run(batches(1), max_epochs=1)
    assert listed == met
