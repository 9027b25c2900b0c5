"""Cut at every iteration, epoch start and epoch end, and gone on in a new process, a run ends as if it had never been stopped.

The recipes are a stated set that has every handler with a state in company with others. Each is run once without a stop, with its
state taken at every cut. From each cut a new engine with new handlers and new data, in another random state, runs to the end:
its losses, the whole fingerprint, what it exports, its logs and kept files have to be those of the run that was not stopped,
bit for bit. That this finds what is forgotten is shown by `test_resume_controls`.
"""

from __future__ import annotations

import shutil
from functools import cache

import pytest

from signalfire import Handler
from signalfire.handlers import Checkpoint
from tests.kit import DISTRIBUTING, cleaned_up, quick, shipped, spread
from tests.resume_corners import CORNERS
from tests.resume_recipes import RECIPES
from tests.resume_runs import FIRST_PROCESS, FOLDER, Cut, a_folder, resumed, run, whole

_clean_up = cleaned_up(FOLDER)


@pytest.mark.moderate
@pytest.mark.parametrize("name", spread(RECIPES, 2))
def test_taking_the_state_changes_nothing(name: str) -> None:
    assert run(RECIPES[name], a_folder(), process=FIRST_PROCESS) == whole(name).left


@pytest.mark.parametrize("name", quick([*RECIPES, *CORNERS], "windows"))
def test_a_run_resumed_from_any_cut_ends_as_the_one_that_was_not_stopped(name: str) -> None:
    expected, cuts = whole(name).left, whole(name).cuts
    wrong = {}
    for cut in cuts:
        different = resumed(name, cut).differences(expected, cut)
        different -= {part for part in expected.parts if part.startswith("kept by ")}
        if different:
            wrong[str(cut)] = sorted(different)
    assert not wrong


@cache
def kept_and_logged(name: str) -> int:
    """Resume from every checkpoint that was there at every cut; returns how many that were."""
    recipe, expected, tried = RECIPES[name], whole(name).left, 0
    wrong = {}
    for path, cut in whole(name).checkpoints:
        folder = a_folder()
        assert cut.folder is not None
        shutil.copytree(cut.folder, folder, dirs_exist_ok=True)
        state = Checkpoint.load(folder / path)
        at = state["engine"]
        from_there = Cut(at["epoch"], at["iteration"], 0, at["epoch_open"], b"", None)
        different = run(recipe, folder, state).differences(expected, from_there)
        if different:
            wrong[f"{path}, as it was there {cut}"] = sorted(different)
        shutil.rmtree(folder)
        tried += 1
    assert not wrong
    return tried


@pytest.mark.slow
@pytest.mark.parametrize("name", quick([name for name, recipe in RECIPES.items() if recipe.writes], "stopping"))
def test_a_run_resumed_from_any_checkpoint_keeps_and_logs_the_same(name: str) -> None:
    """Also from an older one, in front of which the stopped run had gone on, and had written others."""
    assert kept_and_logged(name) >= 8
    assert any(part.startswith("kept by ") for part in whole(name).left.parts)


@pytest.mark.slow
def test_every_handler_that_has_a_state_is_in_a_recipe_that_gives_it_one() -> None:
    # Those that distribute have a state in several processes alone: `test_resume_together` and their own tests resume such runs.
    able = {one for one in shipped() if one.state_dict is not Handler.state_dict and one.__name__ not in DISTRIBUTING}
    given = set().union(*(whole(name).with_state for name in RECIPES))
    assert able <= given, f"no recipe gives a state to {sorted(one.__name__ for one in able - given)}"


@pytest.mark.slow
def test_the_recipes_do_what_they_are_there_for() -> None:
    """Scales shrink and grow, steps are skipped, stops come or are held back, windows are cut open."""
    reported = {name: whole(name).reported for name in RECIPES}
    for name in ("windows", "two updates"):
        assert {"the scale grew", "the scale shrank"} <= reported[name], name
    for name in ("stopping", "averages", "two updates", "around the data"):
        assert any(one.startswith("stopped") for one in reported[name]), name
    assert any("loss is not finite" in one for one in reported["sharpness"])
    held_back = [cut for cut in whole("stopping").cuts if cut.state()["engine"]["stops"]]
    assert held_back
    for name in RECIPES.keys() - {"augmentation", "a seed of its own"}:  # these accumulate nothing
        states = [cut.state() for cut in whole(name).cuts]
        assert any(update["window"] for state in states for update in state["updates"].values()), name
