"""Studies: the same training with some handlers off or replaced, over the same seeds."""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from signalfire import Engine
from signalfire.authoring.checks import check_bool, check_choice, check_int
from signalfire.authoring.monitor import find_mode, find_name
from signalfire.authoring.randomness import unchanged_random_state

from .arguments import check_build, check_handlers, check_seeds, check_workers
from .beginnings import Beginnings, report_equal_runs
from .designs import Design, Factories, baseline_of, factories_of, variants_of
from .factors import with_arguments
from .identity import Identity
from .lines import check_stored, differences, no_direction, no_metric, to_line
from .looks import Looks
from .plan import Plan, PlannedRun
from .planned import planned_runs, stored_looks, stored_results, task_of
from .provenance import composition
from .pruning import Halving, Pruned, Pruning, check_prune
from .repeated import Built
from .results import BASELINE, Result, Variant
from .rows import Runs, sequence, spread
from .runs import Build, Run, Task, beginnings_of, compose, one_thread
from .shared import SharedError
from .store import Store, StoreError
from .tasks import Ends, check_scores, check_task, joined_plan, task_builds
from .trial import candidates, start, try_all
from .verdicts import check_margin
from .workers import outcomes

if TYPE_CHECKING:
    from .report import Report

__all__ = ["Study"]


class Study:
    """Ablation study: compares variants of one training setup over the same seeds, and stores every finished run.

    Runs with the same seed share their random numbers: the global generators are seeded before ``build``, and the engines use
    ``streams="separate"``, so switching a handler off changes no other random numbers. Each run uses one thread, so results do
    not depend on where the runs take place or how many run in parallel.

    Args:
        build: Function called as ``build(seed)`` in each run. It returns a new ``Engine(..., seed=seed)`` with everything
            attached, and a function that runs it: ``return trainer, lambda engine: engine.run(loader, max_epochs=5)``. None if
            each task has its own function.
        metric: Name of the metric to compare, by its last value in ``engine.state.metrics``.
        mode: "max" if greater is better, "min" if smaller is better; by default the metric's own direction, which `plan` and
            `run` find.
        seeds: Distinct ints of 0 or more; by default 0 to 7, or as many as the last of the looks.
        store: File for the finished runs, such as "runs/ablation.jsonl"; studies may share it. None keeps them in memory.
        handlers: Names of the handlers that designs switch if they do not name their own. By default all enabled handlers that
            affect the training: with receivers in the phases CHANGE, FINALIZE or CONTROL, or an override. Handlers that write or
            show something, set up the model (devices, precision, processes), or announce metrics are omitted.
        run: Function that runs the engine, if ``build`` returns only an engine.
        config: Plain values by name, such as ``{"width": 64}``, that distinguish these runs from others in the store. Included
            automatically are the code of ``build``, ``run`` and everything they use outside installed packages, their arguments
            and closures, the handlers with their arguments, the structure of the model, and the versions of Python, torch and
            this package. If any of it changes, the runs are repeated; comments and docstrings do not count. The environment
            variables, the command line and the files that this code names count with their content. Add anything that this
            misses, such as data in a file with a computed name.
        streams: Value for ``engine.streams``; None leaves it unchanged.
        files: Whether handlers that write files, such as `Checkpoint`, or show something are enabled. All variants are built
            identically, so those of the same seed use the same file names.
        margin: Largest negligible difference, in the unit of the metric; None tests no equivalence. See `Report`.
        looks: Planned numbers of seeds at each look (interim analysis), such as ``[7, 10, 14, 20]``: `run` compares after each of
            them, stops running a variant that is found to differ, and keeps the probability of any false finding at 5 % over all
            looks. Without it, all seeds are run, and adding seeds later is reported as a further look.
        prune: Plan of successive halving, such as ``Halving([1, 3])``: the worst variants after these epochs are not trained to
            the end, for all of their seeds; the report states no effect of them. Not together with ``looks``.
        tasks: Several tasks, such as data sets; every variant runs on each with every seed. Give arguments of ``build`` by name
            of the task, as in ``{"digits": {"data": load_digits}, "wine": {"data": load_wine}}``; or, without ``build``, a
            function per task. The report is a `TasksReport`; the study ``study.tasks["digits"]`` has the runs of one task. Not
            together with ``looks`` or ``prune``.
        scores: With tasks, the values of the metric that map to a score of 0 and of 1 in each task, such as ``{"digits": (0.1,
            1.0), "wine": (1 / 3, 1.0)}`` (chance and perfection); or one pair for all. The scores of the tasks are averaged, so
            these values decide how much each task weighs. ``margin`` is then in units of the score.

    Raises:
        TypeError: for an argument of the wrong type; and, if the runs are stored without a ``config``, for a ``build`` that uses
            something whose content cannot be digested, such as an open file.
        ValueError: from `plan` and `run`, for an invalid variant, or stored runs that began with other weights or data.
        StoreError: if another study is writing the store.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.ablation import LeaveOneOut, Study
        >>> from signalfire.handlers import Average, GradientClipping, Metrics
        >>> def build(seed):
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        ...     trainer = Engine(update, model=torch.nn.Linear(2, 1), seed=seed)
        ...     trainer.attach(GradientClipping(max_norm=1.0), Metrics(loss=Average()))
        ...     return trainer, lambda engine: engine.run(
        ...         [(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=2
        ...     )
        >>> study = Study(build, metric="loss", seeds=range(3))
        >>> print(study.plan(LeaveOneOut()))
        variant              finished  failed  pending  off or replaced
        baseline                    0       0        3  -
        - gradient_clipping         0       0        3  gradient_clipping
        power: with 3 seeds, no effect can be significant (smallest possible p = 0.25); use 6 or more seeds
        2 variants x 3 seeds: 6 of 6 runs pending, estimated time if run sequentially: unknown
    """

    def __init__(
        self,
        build: Build | None = None,
        *,
        metric: str,
        mode: Literal["min", "max"] | None = None,
        seeds: Iterable[int] | None = None,
        store: str | os.PathLike[str] | None = None,
        handlers: Iterable[str] | None = None,
        run: Run | None = None,
        config: Mapping[str, Any] | None = None,
        streams: Literal["shared", "separate"] | None = "separate",
        files: bool = False,
        margin: float | None = None,
        looks: Sequence[int] | None = None,
        prune: Halving | None = None,
        tasks: Mapping[str, Build | Mapping[str, Any]] | None = None,
        scores: Mapping[str, Ends] | Ends | None = None,
    ) -> None:
        builds = task_builds(build, tasks, looks=looks, prune=prune)
        build = next(iter(builds.values()), build)
        self.build = check_build(build, run, metric)
        self.metric = metric
        if mode is not None:
            check_choice(self, "mode", mode, ("min", "max"))
        self.mode: Literal["min", "max"] | None = mode
        self.looks = None if looks is None else Looks(looks)
        last = 8 if self.looks is None else self.looks.sizes[-1]
        self._seeds = check_seeds("Study", range(last) if seeds is None else seeds)
        if self.looks is not None:
            self.looks.check(self._seeds)
        self.margin = check_margin("Study", margin)
        self.prune = check_prune(prune, looks)
        self.store = Store(store)
        self.handlers = None if handlers is None else check_handlers("Study", handlers)
        if streams is not None:
            check_choice(self, "streams", streams, ("shared", "separate"))
        self.streams: Literal["shared", "separate"] | None = streams
        self.own_run, self.files = run, check_bool(self, "files", files)
        self.config = dict(config or {})
        self._identity = Identity(build, run, self.config, streams, is_stored=store is not None)
        self._is_repeatable = False
        self.task, self.scores = "", check_scores(scores, builds)
        self.tasks: Mapping[str, Study] = {name: self._of_task(name, one) for name, one in builds.items()}

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of every variant. For different seeds, build a second study, which may share the store."""
        return self._seeds

    def plan(self, *designs: Design, retry_failed: bool = False) -> Plan:
        """Plan the runs that `run` would start, with their estimated duration. Nothing is trained.

        The setup is built twice for the first seed, to detect a ``build`` that differs between calls. There, each variant runs up
        to STARTED, without files, to detect invalid ones. It is built once for the second seed, to find what depends on the seed.

        Args:
            designs: As for `run`.
            retry_failed: As for `run`.

        Raises:
            ValueError: for names of handlers that are not attached; for invalid variants, which switch off a handler that a
                different one requires or that measures the metric; for a metric of unknown direction, without mode=.
            RepeatError, if two calls of ``build`` give different runs; SharedError, for objects that an earlier run has used or
                changed.
        """
        check_bool("plan", "retry_failed", retry_failed)
        if self.tasks:
            return self._plan_of_tasks(designs, retry_failed)
        factories = factories_of(designs)
        self._identity.look_at_alternatives(factories)
        usual = baseline_of(designs)
        first = None if self._is_repeatable else self._built(usual)
        with self._composed(self.seeds[0], usual) as (engine, run):
            parts, begins, again = composition(engine), beginnings_of(engine), Built(engine, run)
            reference = start(engine, run, "the composition as built")
            if first is not None:
                first.check(lambda: self._built(usual), again)
            self._is_repeatable = True
            self._look_at(parts, usual)
            self._find_metric(engine)
            self.mode = find_mode(engine, self.metric, self.mode, by="Study")
            if self.mode is None:
                raise no_direction(self.metric, reference)
            variants = variants_of(designs, candidates(engine, reference, self.handlers))

            def composed(variant: Variant) -> contextlib.AbstractContextManager[tuple[Engine, Run]]:
                if variant.arguments == usual.arguments:
                    return contextlib.nullcontext((engine, run))
                return self._composed(self.seeds[0], variant)

            enabled = try_all(variants, composed, factories, reference, self.metric)
        lines = self.store.read()
        self._check_stored(lines, variants, enabled, begins, usual)
        return self._planned(variants, lines, retry_failed)

    def _find_metric(self, engine: Engine) -> None:
        """Find the name under which the metric is written."""
        self.metric = find_name(engine, self.metric, by="Study")

    def run(self, *designs: Design, workers: int | Executor = 1, retry_failed: bool = False) -> Report:
        """Run everything that is not in the store, and report on all runs.

        Each run is stored as soon as it finishes: called again after an interruption, the study resumes. A failed run is stored
        with its traceback and repeated only with ``retry_failed``.

        Args:
            designs: One or more designs; variants with the same name must be identical.
            workers: Number of worker processes; or an ``Executor``, such as Dask's ``client.get_executor()``, loky's or
                submitit's, whose workers can import ``build``; or 0 to run in this process, as needed in a notebook. With worker
                processes, ``build`` and the factories of alternatives must be module-level functions.
            retry_failed: Whether to repeat failed runs.

        Raises:
            KeyError: if a run ends without the metric, and neither a handler announced it nor a different run has it.
        """
        workers = check_workers("run", workers)
        if self.tasks:
            self.plan(*designs)  # an invalid variant of the last task is an error before the first one runs
            options: dict[str, Any] = {"workers": workers, "retry_failed": retry_failed}
            return self._of_tasks({name: one.run(*designs, **options) for name, one in self.tasks.items()})
        with self.store.writing():
            plan = self.plan(*designs, retry_failed=retry_failed)
            try:
                self._make_stages(plan, factories_of(designs), workers, retry_failed)
            finally:
                self.store.settle()
        return self.report(*designs, plan=plan)

    def verify(self, k: int, *designs: Design, workers: int | Executor = 0) -> tuple[PlannedRun, ...]:
        """Repeat stored runs and compare them with the store, bit for bit; the store does not change.

        Args:
            k: Number of runs to repeat, spread evenly over the finished ones; with tasks, for each task.
            designs: As for `run`.
            workers: As for `run`.

        Returns:
            The repeated runs, all of them equal to those in the store.

        Raises:
            StoreError: if a run gives different numbers; both are named.
            ValueError: if the store has no finished run of these designs.
        """
        check_int("verify", "k", k)
        if self.tasks:
            return tuple(run for one in self.tasks.values() for run in one.verify(k, *designs, workers=workers))
        plan = self.plan(*designs)
        lines = self.store.read()
        stored = [run for run in plan.runs if run.status == "finished"]
        if not stored:
            raise ValueError("verify(): the store has no finished runs for these designs; call run() first")
        count = min(k, len(stored))
        chosen = [stored[round(i * (len(stored) - 1) / max(1, count - 1))] for i in range(count)]
        problems = []
        for place, outcome in outcomes(self._tasks(chosen, factories_of(designs)), check_workers("verify", workers)):
            if found := differences(lines[chosen[place].key], outcome):
                problems.append(f"- {chosen[place].variant.name!r} with seed {chosen[place].seed}: {found}")
        if problems:
            raise StoreError(
                f"{len(problems)} of {count} repeated runs produced different results than the runs in the store:\n"
                + "\n".join(sorted(problems))
            )
        return tuple(chosen)

    def report(self, *designs: Design, plan: Plan | None = None) -> Report:
        """Report on the runs in the store, without running anything.

        Args:
            designs: As for `run`.
            plan: Return value of `plan` for these designs, if available.
        """
        from .report import Report

        if self.tasks:
            return self._of_tasks({name: one.report(*designs) for name, one in self.tasks.items()})
        plan = plan or self.plan(*designs)
        if self.mode is None:
            raise no_direction(self.metric, ())
        results = self.results(plan)
        report_equal_runs(results)
        return Report(
            results,
            plan.variants,
            metric=self.metric,
            mode=self.mode,
            seeds=plan.seeds,
            margin=self.margin,
            looks=self.looks,
            seen=stored_looks(plan.runs, self.store.read()),
            pruned=self._pruned(plan.variants),
            facts=[fact for design in designs for fact in design.facts],
            limits=[limit for design in designs for limit in design.limits],
        )

    def results(self, plan: Plan) -> list[Result]:
        """The stored results of a plan, variant by variant, without those of pruned variants.

        Raises:
            ValueError: if the study has tasks: each has its own results.
        """
        if self.tasks:
            raise ValueError(
                "results(): the study has several tasks; call plan() and results() on a single task, "
                f"such as study.tasks[{next(iter(self.tasks))!r}]"
            )
        pruned = {one.variant.name for one in self._pruned(plan.variants)}
        kept = [variant for variant in plan.variants if variant.name not in pruned]
        runs = [run for variant in kept for run in plan.runs if run.variant is variant]
        return stored_results(runs, self.store.read(), self.metric)

    def _pruning(self, variants: Sequence[Variant]) -> Pruning | None:
        if self.prune is None or self.mode is None:
            return None
        return Pruning(self.prune, variants, self.seeds, self._identity.key, metric=self.metric, mode=self.mode)

    def _pruned(self, variants: Sequence[Variant]) -> tuple[Pruned, ...]:
        pruning = self._pruning(variants)
        return () if pruning is None else pruning.decide(self.store.read()).pruned

    def _of_task(self, name: str, build: Build) -> Study:
        """The study of one task, with the same store."""
        one = copy.copy(self)
        one.build, one.task, one.tasks, one.scores = build, name, {}, {}
        is_stored = self.store.path is not None
        one._identity = Identity(build, self.own_run, self.config, self.streams, is_stored=is_stored, task=name)
        if self.margin is not None:
            zero, full = self.scores[name]
            one.margin = self.margin * abs(full - zero)
        return one

    def _of_tasks(self, reports: Mapping[str, Report]) -> Report:
        from .task_report import TasksReport

        return TasksReport(reports, self.scores, margin=self.margin)

    # ---- planning -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _composed(self, seed: int, variant: Variant) -> Iterator[tuple[Engine, Run]]:
        with unchanged_random_state(), one_thread():
            yield compose(with_arguments(self.build, variant), self.own_run, self.streams, self.files, seed)

    def _built(self, usual: Variant) -> Built:
        with self._composed(self.seeds[0], usual) as (engine, run):
            built = Built(engine, run)
            start(engine, run, "the composition as built")
            return built

    def _look_at(self, parts: Mapping[str, str], usual: Variant) -> None:
        """Take the composition into the keys of the runs."""
        if len(self.seeds) > 1 and self._identity.needs_two:
            try:
                with self._composed(self.seeds[1], usual) as (other, _):
                    self._identity.look_at(parts, composition(other))
                return
            except Exception as error:  # the runs of that seed will fail, and say why
                if isinstance(error, SharedError):
                    raise
        self._identity.look_at(parts)

    def _plan_of_tasks(self, designs: Sequence[Design], retry_failed: bool) -> Plan:
        plans = {name: one.plan(*designs, retry_failed=retry_failed) for name, one in self.tasks.items()}
        for name, one in self.tasks.items():
            check_task(name, one.build, plans[name].variants, self.scores[name], one.mode)
        return joined_plan(plans)

    def _check_stored(
        self,
        lines: Mapping[str, Any],
        variants: Sequence[Variant],
        enabled: Mapping[str, Sequence[str]],
        begins: Sequence[str],
        usual: Variant,
    ) -> None:
        """Check that the stored runs had the handlers of their variants, and began alike where the seed is that of the plan."""
        pruning = self._pruning(variants)
        for variant in variants:
            for seed in self.seeds:
                comparable = seed == self.seeds[0] and variant.arguments == usual.arguments
                for key in (self._identity.key(variant, seed), *(pruning.keys(variant, seed) if pruning else ())):
                    check_stored(lines.get(key), variant.name, enabled[variant.name], begins if comparable else [])

    def _planned(self, variants: Sequence[Variant], lines: Mapping[str, Any], retry_failed: bool) -> Plan:
        runs = planned_runs(
            variants,
            self.seeds,
            self._identity,
            lines,
            metric=self.metric,
            pruned={one.variant.name for one in self._pruned(variants)},
            retry_failed=retry_failed,
        )
        return Plan(
            tuple(variants),
            self.seeds,
            runs,
            self._identity.notes(variants, self.seeds, lines, self.store.old()),
            self.metric,
            spread(stored_results(runs, lines, self.metric)),
            () if self.looks is None else self.looks.sizes,
            () if (pruning := self._pruning(variants)) is None else pruning.description(lines),
        )

    # ---- running --------------------------------------------------------------------------------------------------

    def _make_stages(self, plan: Plan, factories: Factories, workers: int | Executor, retry_failed: bool) -> None:
        """Make the runs of all looks, or of as many as it takes to decide on all variants; with pruning, stage by stage."""
        if (pruning := self._pruning(plan.variants)) is not None:
            for runs in pruning.stages(self.store, retry_failed=retry_failed):
                self._make(plan, runs, len(self.seeds), factories, workers)
            plan = self._planned(plan.variants, self.store.read(), retry_failed)
        if self.looks is None:
            self._make(plan, plan.to_make, len(self.seeds), factories, workers)
            return
        assert self.mode is not None
        left = list(plan.to_make)
        while left:
            made = sequence(Runs(self.results(plan), plan.variants, BASELINE, self.seeds, self.mode), self.looks)
            if made.next is None:
                return
            names = {BASELINE, *made.undecided}
            runs = [run for run in left if run.seed in self.seeds[: made.next] and run.variant.name in names]
            self._make(plan, runs, made.next, factories, workers)
            left = [run for run in left if run not in runs] if runs else []

    def _tasks(self, runs: Sequence[PlannedRun], factories: Factories) -> list[Task]:
        task = Task(self.build, self.own_run, self.streams, self.files, 0, nonce=secrets.token_hex(8))
        return [task_of(run, task, factories) for run in runs]

    def _make(
        self, plan: Plan, runs: Sequence[PlannedRun], look: int, factories: Factories, workers: int | Executor
    ) -> None:
        tasks = self._tasks(runs, factories)
        has_metric = any(run.status == "finished" for run in plan.runs)
        beginnings = Beginnings()
        made = outcomes(tasks, workers)
        # No bar without a terminal, where it would fill the log. Stored runs count as done, but not towards the speed.
        with tqdm(
            total=len(plan.runs) - len(plan.to_make) + len(runs),
            initial=len(plan.runs) - len(plan.to_make),
            desc="study",
            unit="run",
            disable=None,
            smoothing=0,
        ) as bar:
            try:
                for place, outcome in made:
                    has_metric |= self.metric in outcome.metrics
                    beginnings.note_last_values(self.metric, outcome.last_values)
                    if runs[place].variant.arguments == plan.variants[0].arguments:
                        beginnings.compare(runs[place].seed, outcome.begins, outcome.composed)
                    if outcome.error is None and not has_metric and self.metric not in outcome.announced:
                        raise KeyError(no_metric(self.metric, runs[place].variant.name, outcome.announced))
                    line = to_line(
                        runs[place],
                        outcome,
                        self._identity.provenance,
                        config=self.config,
                        metric=self.metric,
                        mode=self.mode,
                    )
                    self.store.append({**line, "look": look})
                    bar.update()
            finally:
                if (close := getattr(made, "close", None)) is not None:
                    close()
