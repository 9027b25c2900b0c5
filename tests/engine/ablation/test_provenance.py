"""Stored runs are used again for the same code and arguments, and never for others."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signalfire.ablation import LeaveOneOut, StoreError, Swap
from signalfire.ablation.fingerprint import fingerprint
from signalfire.handlers import EMA
from tests.engine.ablation import builds
from tests.engine.ablation.builds import make_study
from tests.kit import finished, python

DESIGN = LeaveOneOut(["ema"])

HEAD = """
from functools import partial
import torch
from torch import nn
from tests.engine.ablation import builds
"""
BUILD = (
    HEAD
    + """
RATE = 0.5
LAYERS = [2, 2]

class Doubled(nn.Module):
    factor = 2.0
    def forward(self, x):
        return self.factor * x

def helper(engine):
    engine.handlers["ema"].decay = RATE
    return len(LAYERS)

def build(seed):
    engine = builds.composed(seed)
    helper(engine)
    Doubled()
    return engine, builds.train
"""
)
numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[..., types.ModuleType]]:
    """Modules with a text, which count as the user's."""
    made: list[str] = []

    def make(text: str, name: str | None = None, **others: str) -> types.ModuleType:
        folder = tmp_path / f"folder{next(numbers)}"
        folder.mkdir()
        sys.path.insert(0, str(folder))
        for other, content in others.items():
            (folder / f"{other}.py").write_text(content)
            sys.modules.pop(other, None)
            made.append(other)
        name = name or f"user_{next(numbers)}"
        (folder / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        new = importlib.util.module_from_spec(spec)
        sys.modules[name] = new
        made.append(name)
        importlib.invalidate_caches()
        spec.loader.exec_module(new)
        sys.path.remove(str(folder))
        sys.path.insert(0, str(folder))
        return new

    before = list(sys.path)
    yield make
    sys.path[:] = before
    for name in made:
        sys.modules.pop(name, None)


def with_width(seed: int, *, width: Any) -> Any:
    return builds.composed(seed), builds.train


def with_option(width: Any) -> Callable[[int], Any]:
    def build(seed: int) -> Any:
        assert width
        return builds.composed(seed), builds.train

    return build


class Builder:
    def __init__(self, width: Any) -> None:
        self.width = width

    def __call__(self, seed: int) -> Any:
        return builds.composed(seed), builds.train


class Bound(Builder):
    def build(self, seed: int) -> Any:
        return self(seed)


def with_tensor(seed: int, *, data: torch.Tensor) -> Any:
    return builds.composed(seed), builds.train


def longer(engine: Any) -> None:
    engine.run(builds.data(0), max_epochs=1)


ONE = "epochs = 1\n"
TWO = "epochs = 2\n"
IMPORTS = HEAD + "import settings\ndef build(seed):\n    settings.epochs\n    return builds.build(seed)\n"
INSIDE = HEAD + "def build(seed):\n    from settings import epochs\n    return builds.build(seed)\n"
DYNAMIC = (
    HEAD + "import settings\ndef build(seed):\n    getattr(settings, 'epo' + 'chs')\n    return builds.build(seed)\n"
)


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def values() -> list[Any]:
    """Pairs of builds, each of which a name and plain arguments do not tell apart."""
    return [
        pytest.param(partial(with_width, width=(4, 4)), partial(with_width, width=(4, 8)), id="a tuple"),
        pytest.param(partial(with_width, width=[4, 4]), partial(with_width, width=[4, 8]), id="a list"),
        pytest.param(partial(with_width, width=(4, 4)), partial(with_width, width=[4, 4]), id="a tuple or a list"),
        pytest.param(partial(with_width, width={"a": 1}), partial(with_width, width={"a": 2}), id="a dict"),
        pytest.param(partial(with_width, width=1), partial(with_width, width=1.0), id="a number's type"),
        pytest.param(partial(with_width, width={3, 4}), partial(with_width, width={3, 5}), id="a set"),
        pytest.param(partial(with_width, width=nn.ReLU), partial(with_width, width=nn.GELU), id="a class"),
        pytest.param(partial(with_width, width=nn.ReLU()), partial(with_width, width=nn.GELU()), id="a module"),
        pytest.param(partial(with_width, width=nn.Dropout(0.1)), partial(with_width, width=nn.Dropout(0.2)), id="p"),
        pytest.param(with_option((4, 4)), with_option((4, 8)), id="a closure"),
        pytest.param(lambda seed: builds.build(seed), lambda seed: builds.build(seed + 0), id="a lambda"),
        pytest.param(partial(with_width, width=lambda: 4), partial(with_width, width=lambda: 8), id="a lambda inside"),
        pytest.param(Builder((4, 4)), Builder((4, 8)), id="an object"),
        pytest.param(Bound((4, 4)).build, Bound((4, 8)).build, id="a method"),
        pytest.param(
            partial(with_tensor, data=torch.zeros(3)),
            partial(with_tensor, data=torch.tensor([0.0, 0, 1])),
            id="a tensor",
        ),
        pytest.param(
            partial(with_width, width=functools.cache(with_option(1))),
            partial(with_width, width=functools.cache(with_option(2))),
            id="behind a decorator of the library",
        ),
        pytest.param(
            torch.no_grad()(with_option(1)), torch.no_grad()(with_option(2)), id="behind a decorator of torch"
        ),
    ]


@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize(("first", "second"), values())
def test_other_arguments_have_other_digests(first: Any, second: Any) -> None:
    assert fingerprint(first, "build") == fingerprint(first, "build") != fingerprint(second, "build")


END_TO_END = [
    pytest.param(*one.values, id=one.id, marks=() if one.id in ("a tuple", "a closure") else pytest.mark.slow)
    for one in values()
]


@pytest.mark.moderate
@pytest.mark.parametrize(("first", "second"), END_TO_END)
def test_other_arguments_are_other_runs(first: Any, second: Any, tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    make_study(first, seeds=[0], store=store).run(DESIGN, workers=0)
    assert make_study(first, seeds=[0], store=store).plan(DESIGN).to_make == ()
    plan = make_study(second, seeds=[0], store=store).plan(DESIGN)
    assert [run.status for run in plan.runs] == ["missing", "missing"]
    assert "2 stored runs with these variants and seeds were recorded with a different build" in str(plan)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RATE = 0.5", "RATE = 0.6"),
        ("LAYERS = [2, 2]", "LAYERS = [2, 3]"),
        ("factor = 2.0", "factor = 3.0"),
        ("self.factor * x", "self.factor + x"),
        ("len(LAYERS)", "sum(LAYERS)"),
        ("    helper(engine)\n", ""),
        ("def helper(engine):", "def helper(engine, more=1):"),
        ("class Doubled(nn.Module)", "class Doubled(nn.ReLU)"),
        ("builds.train\n", "lambda engine: builds.train(engine)\n"),
    ],
)
def test_other_code_is_another_build(old: str, new: str, module: Any) -> None:
    one, other = module(BUILD), module(changed(BUILD, old, new))
    assert fingerprint(one.build, "build") != fingerprint(other.build, "build")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def build(seed):\n", "\n\n# What a run is.\n\ndef build(seed):\n    # builds it\n\n"),
        ("def build(seed):\n", 'def build(seed):\n    """A run: its engine, and what runs it."""\n'),
        ("def helper(engine):\n", 'def helper(engine):\n    "Says more."\n'),
        ("class Doubled(nn.Module):\n", 'class Doubled(nn.Module):\n    """Twice\n    as much."""\n'),
        ("def forward(self, x):\n", 'def forward(self, x):\n        """Of a method."""\n'),
        ("    return len(LAYERS)\n", "    return (\n        len(\n            LAYERS\n        )\n    )\n"),
        ("\nRATE = 0.5\n", "\nUNUSED = 7\n\n\ndef other():\n    return UNUSED\n\n\nRATE = 0.5\n"),
    ],
)
def test_comments_docstrings_and_what_is_not_used_do_not_count(old: str, new: str, module: Any) -> None:
    one, other = module(BUILD), module(changed(BUILD, old, new))
    assert fingerprint(one.build, "build") == fingerprint(other.build, "build")


@pytest.mark.moderate
def test_a_docstring_does_not_start_a_study_anew(module: Any, tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    make_study(module(BUILD, "mine").build, store=store).run(DESIGN, workers=0)
    text = changed(BUILD, "def build(seed):\n", '# First.\ndef build(seed):\n    """A run."""\n')
    assert make_study(module(text, "mine").build, store=store).plan(DESIGN).to_make == ()
    text = changed(BUILD, "RATE = 0.5", "RATE = 0.4")
    assert len(make_study(module(text, "mine").build, store=store).plan(DESIGN).to_make) == 4


@pytest.mark.moderate
def test_the_same_name_in_another_module_is_another_build(module: Any, tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    one = module(HEAD + "def build(seed):\n    return builds.composed(seed), builds.train\n")
    two = module(HEAD + "def build(seed):\n    return builds.composed(seed), lambda engine: builds.train(engine)\n")
    make_study(one.build, seeds=[0], store=store).run(DESIGN, workers=0)
    assert len(make_study(two.build, seeds=[0], store=store).plan(DESIGN).to_make) == 2


@pytest.mark.whole
@pytest.mark.parametrize("text", [IMPORTS, INSIDE, DYNAMIC], ids=["imported", "imported inside", "by getattr"])
def test_modules_of_the_user_count_by_what_is_used_of_them(text: str, module: Any) -> None:
    digests = [
        fingerprint(module(text, settings=settings).build, "build")
        for settings in (ONE, TWO, ONE + "# a comment\n", ONE + "unused = 3\n")
    ]
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]
    assert (digests[0] == digests[3]) == (text is not DYNAMIC)  # there, any attribute may be used


def test_another_run_is_another_study(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    make_study(builds.composed, run=builds.train, seeds=[0], store=store).run(DESIGN, workers=0)
    plan = make_study(builds.composed, run=longer, seeds=[0], store=store).plan(DESIGN)
    assert len(plan.to_make) == 2
    assert "recorded with a different run (its code, or something that it uses)" in str(plan)


def test_other_arguments_of_an_alternative_are_other_runs(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    design, other = (Swap({"ema": {"slow": partial(EMA, decay)}}) for decay in (0.3, 0.4))
    make_study(seeds=[0], store=store).run(design, workers=0)
    plan = make_study(seeds=[0], store=store).plan(other)
    assert [run.variant.name for run in plan.to_make] == ["ema = slow"]
    assert "recorded with a different alternative" in str(plan)


@pytest.mark.slow
def test_what_build_reads_from_a_file_shows_in_the_handlers_and_the_model(tmp_path: Path) -> None:
    file, store = tmp_path / "options.json", tmp_path / "store.jsonl"

    def build(seed: int) -> Any:
        options = json.loads(file.read_text())
        engine = builds.composed(seed)
        engine.attach(EMA(options["decay"], name="second", evaluate=False))
        assert engine.model is not None
        engine.model.add_module("more", nn.Dropout(options["p"]))
        return engine, builds.train

    for options in ({"decay": 0.5, "p": 0.1}, {"decay": 0.6, "p": 0.1}, {"decay": 0.6, "p": 0.2}):
        file.write_text(json.dumps(options))
        study = make_study(build, store=store)
        assert len(study.plan(DESIGN).to_make) == 4, options
        study.run(DESIGN, workers=0)
    assert "recorded with a different setup (handlers, updates or modules)" in str(study.plan(DESIGN))
    assert make_study(build, store=store, seeds=range(3)).plan(DESIGN).to_make[0].seed == 2


@pytest.mark.moderate
def test_what_depends_on_the_seed_does_not_count(tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        engine = builds.composed(seed)
        engine.attach(EMA(0.5 + seed / 100, name="second", evaluate=False))
        return engine, builds.train

    store = tmp_path / "store.jsonl"
    make_study(build, store=store).run(DESIGN, workers=0)
    assert make_study(build, store=store, seeds=[1, 0]).plan(DESIGN).to_make == ()


@pytest.mark.moderate
def test_other_data_or_weights_of_a_stored_seed_are_noticed(tmp_path: Path) -> None:
    file, store = tmp_path / "weights.pt", tmp_path / "store.jsonl"

    def build(seed: int) -> Any:
        engine = builds.composed(seed)
        assert engine.model is not None
        saved = torch.load(file)
        engine.model[1].load_state_dict(saved["model"])
        return engine, lambda engine: engine.run(saved["data"], max_epochs=1)

    first = {"model": nn.Linear(2, 1).state_dict(), "data": builds.data(0)}
    torch.save(first, file)
    make_study(build, store=store).run(DESIGN, workers=0)
    assert make_study(build, store=store).plan(DESIGN).to_make == ()
    for name, value in (("model", nn.Linear(2, 1).state_dict()), ("data", builds.data(1))):
        torch.save(first | {name: value}, file)
        what = "weights" if name == "model" else "data"
        with pytest.raises(ValueError, match=rf"'baseline' with seed 0 began with different {what} than .*set config="):
            make_study(build, store=store).plan(DESIGN)
    assert len(make_study(build, store=store, config={"data": 2}).plan(DESIGN).to_make) == 4


def test_what_cannot_be_digested_is_named_and_asks_for_config(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    reader = (number for number in range(3))
    message = (
        r"Study\(build=\.\.\.\): the variable 'reader' of .*build\(\), in build: the content of <generator .* cannot "
        r"be compared with the content in stored runs; describe the value with config="
    )

    def build(seed: int) -> Any:
        assert reader is not None
        return builds.build(seed)

    with pytest.raises(TypeError, match=message):
        make_study(build, store=store)
    with pytest.raises(TypeError, match=r"the alternative 'slow' to 'ema'"):
        make_study(store=store).plan(Swap({"ema": {"slow": partial(EMA, decay=reader)}}))  # type: ignore[arg-type]
    with open(__file__) as file, pytest.raises(TypeError, match="TextIOWrapper"):
        make_study(partial(with_width, width=file), store=store)
    make_study(build, store=store, config={"data": "v1"})
    make_study(build)  # in memory, no other study uses the runs


@pytest.mark.slow
def test_the_digest_is_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(BUILD)
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from signalfire.ablation.fingerprint import fingerprint\n"
        "import user\nfrom functools import partial\n"
        "print(fingerprint(partial(user.build, width={'a', 'b', 'c'}, where=(1, {2, 3})), 'build'))\n"
    )
    found = set()
    for seed in ("1", "2"):  # of the hashes of strings
        with python("-c", program, tmp_path, builds.ROOT, env={"PYTHONHASHSEED": seed}, stdout=-1) as process:
            found.add(process.communicate()[0])
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


@pytest.mark.slow
def test_a_script_and_the_module_that_it_is_make_the_same_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        BUILD + "\nif __name__ == '__main__':\n    from signalfire.ablation.fingerprint import fingerprint\n"
        "    import script\n    print(fingerprint(build, 'b') == fingerprint(script.build, 'b'))\n"
    )
    ended = finished("script.py", cwd=tmp_path, env={"PYTHONPATH": str(builds.ROOT)})
    assert (ended.stdout, ended.stderr) == ("True\n", "")


@pytest.mark.moderate
def test_what_a_run_leaves_behind_does_not_make_the_study_another_one(tmp_path: Path) -> None:
    seen: list[int] = []

    def build(seed: int) -> Any:
        seen.append(seed)
        return builds.build(seed)

    study = make_study(build, store=tmp_path / "store.jsonl")
    study.run(DESIGN, workers=0)
    assert seen
    assert study.plan(DESIGN).to_make == ()


# ---- verify ---------------------------------------------------------------------------------------------------------


@pytest.mark.moderate
def test_stored_runs_are_made_again_and_are_the_same(tmp_path: Path) -> None:
    made: list[int] = []

    def build(seed: int) -> Any:
        engine = builds.composed(seed)

        def run(engine: Any) -> None:
            made.append(seed)
            builds.train(engine)

        return engine, run

    study = make_study(build, seeds=range(3), store=tmp_path / "store.jsonl")
    study.run(DESIGN, workers=0)
    before = (tmp_path / "store.jsonl").read_bytes()
    made.clear()
    done = study.verify(4, DESIGN, workers=0)
    assert len(done) == 4
    assert {run.variant.name for run in done} == {"baseline", "- ema"}
    assert len(study.verify(100, DESIGN, workers=0)) == 6
    assert (tmp_path / "store.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="no finished run"):
        make_study(seeds=[7]).verify(1, DESIGN)
    with pytest.raises(ValueError, match=r"verify\(k=0\)"):
        study.verify(0, DESIGN)


@pytest.mark.moderate
def test_a_run_that_comes_to_another_number_is_named_with_both(tmp_path: Path) -> None:
    file = tmp_path / "factor"
    file.write_text("1.0")

    def build(seed: int) -> Any:
        engine = builds.composed(seed)

        def run(engine: Any) -> None:
            builds.train(engine)
            engine.state.metrics["val_loss"] *= float(file.read_text())

        return engine, run

    study = make_study(build, seeds=[0], store=tmp_path / "store.jsonl")
    study.run(DESIGN, workers=0)
    values = [result.value or 0.0 for result in study.results(study.plan(DESIGN))]
    file.write_text("1.0000000000000002")  # the next number
    with pytest.raises(StoreError) as caught:
        study.verify(2, DESIGN, workers=0)
    repeated = values[0] * 1.0000000000000002
    stored = f"'baseline' with seed 0: val_loss is {values[0]!r} in the store"
    assert f"{stored}, but {repeated!r} in the repeated run" in str(caught.value)
    assert "2 of 2 repeated runs" in str(caught.value)
