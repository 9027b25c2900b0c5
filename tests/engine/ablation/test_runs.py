"""Single runs of a study: their results, where they are made, and what is refused before any is made."""

from __future__ import annotations

import random
import re
import sys
import types
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from signalfire import Engine, Events
from signalfire.ablation import LeaveOneOut
from signalfire.ablation.runs import Outcome, Task, compose, exchange, make
from signalfire.ablation.workers import outcomes
from signalfire.handlers import EMA, GradientNoise
from tests.engine.ablation import builds
from tests.engine.ablation.builds import ROOT, make_study
from tests.kit import finished


def task(build: Any = builds.build, run: Any = None, *, seed: int = 1, **options: Any) -> Task:
    return Task(build, run, "separate", False, seed, **options)


@pytest.mark.slow
def test_a_process_that_dies_costs_its_own_run_alone(tmp_path: Path) -> None:
    study = make_study(builds.dying, store=tmp_path / "store.jsonl")
    study.run(LeaveOneOut(["ema"]), workers=2)
    results = study.results(study.plan(LeaveOneOut(["ema"])))
    assert len(results) == 4
    assert {result.seed for result in results if result.value is None} == {1}
    assert all("the process of this run died" in (result.error or "") for result in results if result.seed == 1)


class Losing(Executor):
    """Makes runs as they are submitted, and loses some of them, by their places."""

    def __init__(self, *lost: int, takes: int = 100) -> None:
        self.lost, self.takes, self.given = lost, takes, 0

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.given == self.takes:
            raise OSError("the queue is full")
        future: Future[Any] = Future()
        if self.given in self.lost:
            future.set_exception(OSError("no connection"))
        else:
            future.set_result(Outcome(metrics={"val_loss": 1.0}))
        self.given += 1
        return future


@pytest.mark.parametrize(
    ("executor", "made", "message"),
    [
        (Losing(0), 6, "no connection"),
        (Losing(3), 6, "no connection"),
        (Losing(6), 6, "no connection"),
        (Losing(0, 2, 5), 4, "no connection"),
        (Losing(*range(7)), 0, "no connection"),
        (Losing(takes=3), 3, "the queue is full"),
        (Losing(1, takes=3), 2, "the queue is full"),
    ],
    ids=["first", "middle", "last", "three", "all", "refused", "refused and lost"],
)
def test_of_the_runs_of_an_executor_all_are_kept_but_those_that_it_loses(
    executor: Losing, made: int, message: str
) -> None:
    found: list[tuple[int, Outcome]] = []
    with pytest.raises(OSError, match=message) as caught:
        found.extend(outcomes([task(seed=seed) for seed in range(7)], executor))
    assert len(found) == made
    expected = f"did not complete {7 - made} of 7 runs of the study. The other {made} runs are in"
    assert expected in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda seed: None, "returned None; expected an Engine"),
        (lambda seed: builds.composed(seed), "returned only an engine"),
        (lambda seed: (builds.composed(seed), 3), "expected an Engine, or a tuple of an Engine and a function"),
        (lambda seed: (builds.composed(9), builds.train), "with seed=9; create the engine with Engine(..., seed=seed)"),
    ],
)
def test_a_build_that_is_no_use_is_refused(build: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        compose(build, None, "separate", False, 1)


def test_what_a_process_could_not_import_is_refused_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"build is .*lambda.*cannot be pickled.*workers=0"):
        outcomes([task(lambda seed: builds.build(seed))], 2)
    with pytest.raises(TypeError, match=r"run is .*lambda.*cannot be pickled"):
        outcomes([task(run=lambda engine: None)], 2)
    with pytest.raises(TypeError, match=r"the alternative to 'ema' is .*cannot be pickled"):
        outcomes([task(), task(swaps=(("ema", lambda: EMA(0.9)),))], 2)
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(builds.build, "__module__", "__main__")
    main.build = builds.build  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="defined in an interactive session"):
        outcomes([task()], 2)


@pytest.mark.slow
def test_a_script_without_its_main_guard_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from signalfire.ablation import LeaveOneOut, Study\nfrom tests.engine.ablation.builds import build\n"
        "Study(build, metric='val_loss', mode='min', seeds=[0]).run(LeaveOneOut(['ema']), workers=1)\n"
    )
    ended = finished(script)
    assert ended.returncode == 1
    assert 'under `if __name__ == "__main__":`' in ended.stderr


# ---- one run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_run_that_fails_half_way_keeps_what_it_had_come_to(error: type[BaseException]) -> None:
    def build(seed: int) -> Any:
        engine = builds.composed(seed)

        @engine.on(Events.ITERATION_COMPLETED(once=5))
        def fail(engine: Engine) -> None:
            raise error(f"no luck with {object()}")

        return engine, builds.train

    outcome = make(task(build, off=("ema",)))
    assert outcome.error is not None
    assert f"{error.__name__}: no luck with <object object at 0x...>" in outcome.error
    assert outcome.handlers == ("gradient_clipping", "gradient_noise", "validation")
    assert list(outcome.metrics) == ["val_loss"]  # of the first epoch
    assert outcome.steps == 5
    assert outcome.seconds > 0


def test_a_build_that_fails_is_a_failed_run_of_nothing() -> None:
    outcome = make(task(lambda seed: builds.build(seed + 1)))
    assert "ValueError: build(1) returned an engine with seed=2" in (outcome.error or "")
    assert (outcome.handlers, outcome.metrics, outcome.steps, outcome.seconds) == ((), {}, 0, 0.0)


def test_an_interrupt_is_no_failed_run() -> None:
    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(task(builds.composed, run=interrupt))


def test_a_run_uses_one_thread_and_leaves_threads_and_random_states_as_they_were() -> None:
    threads: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(5)
        states = torch.get_rng_state(), random.getstate()
        assert make(task(builds.composed, run=lambda engine: threads.append(torch.get_num_threads()))).error is None
        assert (threads, torch.get_num_threads()) == ([1], 2)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
    finally:
        torch.set_num_threads(before)


def test_a_state_that_is_loaded_where_the_engine_is_built_is_where_a_run_begins() -> None:
    trained = builds.composed(1)
    builds.train(trained)
    state = trained.state_dict()

    def build(seed: int) -> Any:
        engine = builds.composed(seed)
        engine.load_state_dict(state)
        return engine, lambda engine: engine.run(builds.data(0), max_epochs=3)

    outcome = make(task(build))
    assert (outcome.error, outcome.steps) == (None, 9)


def test_an_alternative_is_attached_last_and_making_it_moves_no_random_state() -> None:
    engine = builds.composed(1)

    def factory() -> GradientNoise:
        torch.rand(3)
        return GradientNoise(0.2, name="more")

    torch.manual_seed(5)
    before = torch.get_rng_state()
    handler = exchange(engine, "gradient_noise", factory)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(engine.handlers)[-2:] == ["ema", "more"]
    assert engine.handlers["more"] is handler
    assert "gradient_noise" not in engine.handlers


def test_what_is_no_handler_takes_the_place_of_none() -> None:
    engine = builds.composed(1)
    with pytest.raises(TypeError, match=r"the alternative to 'ema' returned \{\}; expected a Handler"):
        exchange(engine, "ema", cast(Any, dict))
    assert "ema" in engine.handlers


# ---- many runs ------------------------------------------------------------------------------------------------------


def test_in_this_process_each_run_is_made_when_it_is_asked_for() -> None:
    made: list[int] = []
    found = outcomes(
        [task(seed=seed, build=builds.composed, run=lambda engine: made.append(engine.seed or 0)) for seed in (7, 8)], 0
    )
    assert made == []
    assert next(found)[0] == 0
    assert made == [7]
    assert next(found)[0] == 1
    assert made == [7, 8]


@pytest.mark.timeout(300)
def test_what_an_executor_finishes_first_comes_first_and_what_is_no_longer_wanted_is_cancelled() -> None:
    class OnlyTheSecond(Executor):
        futures: list[Future[Any]] = []

        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.futures.append(Future())
            if args[0].seed == 1:
                self.futures[-1].set_result(Outcome("second"))
            return self.futures[-1]

    found = outcomes([task(seed=seed) for seed in range(3)], executor := OnlyTheSecond())
    assert next(found) == (1, Outcome("second"))
    cast(Any, found).close()
    assert [future.cancelled() for future in executor.futures] == [True, False, True]


@pytest.mark.slow
def test_a_worker_that_cannot_import_the_study_says_where_it_searched() -> None:
    module = types.ModuleType("only_here")
    exec("def build(seed):\n    pass", vars(module))
    sys.modules["only_here"] = module
    try:
        with pytest.raises(RuntimeError, match=r"cannot import a function .*No module named 'only_here'.*sys.path"):
            list(outcomes([task(module.build)], 1))
    finally:
        del sys.modules["only_here"]
