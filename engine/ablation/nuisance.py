"""Nuisance tuning: each variant is compared at the learning rate that suits it, not at the one that suits the baseline.

A variant that trains with the hyperparameters of another looks worse than it is. `tune` chooses them for each variant, the
baseline included, by the same budget, and on other seeds than those that are reported: what is chosen on the reported seeds
looks better than it is.

Source: Choi et al., On Empirical Comparisons of Optimizers for Deep Learning, 2019, https://arxiv.org/abs/1910.05446 (tuning
decides who wins); Godbole et al., Deep Learning Tuning Playbook, 2023 (nuisance hyperparameters).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from fractions import Fraction
from typing import Any

from signalfire.authoring.checks import check_int

from .arguments import check_seeds
from .designs import Design, Factory, variants_of
from .formats import count, listed, named_value, numbers_in_words
from .results import BASELINE, Result, Variant
from .statistics import exact
from .study import Study

__all__ = ["Tuned", "tune"]

Values = dict[str, Any]
"""Values of the tuned arguments of build, by name."""

Round = tuple[str, Callable[[str], Values]]
"""What is added to the names of the variants, and the values of each variant."""


class _WithValues(Design):
    """The variants of some designs, each with values of its own for some arguments of build; or several times, in rounds.

    Args:
        designs: The designs.
        rounds: What is added to the names of the variants in each round, nothing in the first, and the values by variant.

    Attributes:
        origins: For each variant that was made, its name in the designs and the number of its round.
    """

    def __init__(self, designs: Sequence[Design], rounds: Sequence[Round]) -> None:
        self.designs, self.rounds = tuple(designs), tuple(rounds)
        self.origins: dict[str, tuple[str, int]] = {}
        merged: dict[str, dict[str, Factory]] = {}
        for design in designs:
            for name, factories in design.factories.items():
                merged.setdefault(name, {}).update(factories)
        self.factories = merged

    def variants(self, candidates: Sequence[str]) -> list[Variant]:
        made = []
        found = variants_of(self.designs, candidates)
        usual = next(dict(one.arguments) for one in found if one.name == BASELINE)
        for number, (label, values) in enumerate(self.rounds):
            for one in found:
                chosen = values(one.name)
                own = [name for name, value in one.arguments if repr(value) != repr(usual.get(name))]
                if both := [name for name in own if name in chosen]:
                    raise ValueError(
                        f"tune(arguments=...): the variant {one.name!r} sets {listed(both)} itself, and "
                        "tuning would overwrite its choice; tune other arguments"
                    )
                arguments = {**dict(one.arguments), **chosen}
                made.append(replace(one, name=one.name + label, arguments=tuple(arguments.items())))
                self.origins[one.name + label] = one.name, number
        return made

    def baseline_arguments(self) -> tuple[tuple[str, Any], ...]:
        own = {name: value for design in self.designs for name, value in design.baseline_arguments()}
        return tuple({**own, **self.rounds[0][1](BASELINE)}.items())


class Tuned(_WithValues):
    """The variants of a study with the arguments that `tune` chose for each; a design for `Study.run`.

    Attributes:
        chosen: The chosen values of each variant, by the names of the variant and of the argument.
        facts: Those of the designs, and what was tuned and how, for the paragraph on methods.
        limits: Likewise, and what limits the choice, such as a value at the edge of those that were tried.
    """

    def __init__(
        self, designs: Sequence[Design], chosen: Mapping[str, Values], facts: Sequence[str], limits: Sequence[str]
    ) -> None:
        super().__init__(designs, [("", self._chosen)])
        self.chosen = {name: dict(values) for name, values in chosen.items()}
        self.facts = (*(one for design in designs for one in design.facts), *facts)
        self.limits = (*(one for design in designs for one in design.limits), *limits)

    def _chosen(self, name: str) -> Values:
        if name not in self.chosen:
            raise ValueError(
                f"the variant {name!r} was not tuned; the tuned variants are {', '.join(self.chosen)}; call tune() "
                "again for the current variants"
            )
        return self.chosen[name]

    def __repr__(self) -> str:
        return f"Tuned({self.chosen})"


def tune(
    study: Study,
    *designs: Design,
    arguments: Mapping[str, Sequence[Any] | Callable[[Any], Any]],
    seeds: Iterable[int],
    trials: int | None = None,
    workers: int | Executor = 1,
) -> Tuned:
    """Choose arguments of build, such as the learning rate, for each variant by the same budget, on seeds of their own.

    Of all values that were tried, a variant takes those whose runs failed least often, and of these the ones with the best
    mean of the metric; of equal ones, the first. The runs are in the store of the study, so that an interrupted search
    resumes.

    Args:
        study: The study; nothing of it is run. Its build takes the arguments by name. Of a study of several tasks, one of them:
            ``study.tasks["digits"]``.
        designs: As for `Study.run`.
        arguments: For each argument of build, a list of values, of which all combinations are tried; or with ``trials``, a
            function of a trial of Optuna, such as ``lambda trial: trial.suggest_float("lr", 1e-3, 1.0, log=True)``.
        seeds: Seeds of the runs; none of them may be one of the study.
        trials: Number of trials of Optuna for each variant, by its sampler TPE; needs ``pip install signalfire[search]``.
        workers: As for `Study.run`.

    Returns:
        A design with the variants and their values: ``study.run(tune(study, LeaveOneOut(), ...))``.

    Raises:
        ImportError: if trials are asked for and Optuna is not installed.
        TypeError, ValueError: for arguments without values or in which the variants differ, seeds that the study reports, or a
            study of several tasks.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.ablation import LeaveOneOut, Study, tune
        >>> from signalfire.handlers import Average, GradientClipping, Metrics
        >>> def build(seed, lr=0.1):
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=lr)
        ...     trainer = Engine(update, model=torch.nn.Linear(2, 1), seed=seed)
        ...     trainer.attach(GradientClipping(max_norm=1.0), Metrics(loss=Average()))
        ...     data = [(torch.ones(4, 2), torch.ones(4, 1))]
        ...     return trainer, lambda engine: engine.run(data, max_epochs=9)
        >>> study = Study(build, metric="loss", seeds=range(3))
        >>> tune(
        ...     study, LeaveOneOut(), arguments={"lr": [0.001, 0.1]}, seeds=[100], workers=0
        ... ).chosen
        {'baseline': {'lr': 0.1}, '- gradient_clipping': {'lr': 0.1}}
    """
    if study.tasks:
        name = next(iter(study.tasks))
        raise ValueError(
            "tune(): the study has several tasks, and each task needs its own values; tune the tasks one at a time, "
            f"as in tune(study.tasks[{name!r}], ...)"
        )
    found = check_seeds("tune", seeds)
    if both := sorted({*found} & {*study.seeds}):
        raise ValueError(
            f"tune(seeds={list(found)}): the study already reports results for the seeds {both}; tune with different "
            "seeds, such as range(100, 103)"
        )
    if not isinstance(arguments, Mapping) or not arguments:
        raise TypeError(
            f"tune(arguments={arguments!r}): expected a dict that maps arguments to values, such as "
            "{'lr': [0.01, 0.1]}"
        )
    search = _grid(arguments) if trials is None else _Search(arguments, check_int("tune", "trials", trials))
    scores: dict[str, list[tuple[tuple[int, Fraction], Values]]] = {}
    for what, rounds in search.batches():
        design = _WithValues(designs, rounds)
        results = _made(study, design, found, what, workers)
        for full_name, (name, number) in design.origins.items():
            score = _score(results[full_name], study.mode or "min")
            scores.setdefault(name, []).append((score, rounds[number][1](name)))
            search.tell(name, score)
    chosen = {name: min(tried, key=lambda pair: pair[0])[1] for name, tried in scores.items()}
    budget = f"{search.budget}, over {count(len(found), 'seed')} ({numbers_in_words(found)}) that are not reported"
    facts = [_fact(study.metric, list(arguments), budget, chosen)]
    return Tuned(designs, chosen, facts, _limits(arguments, scores, chosen))


class _Grid:
    """All combinations of some values, the same for each variant, as one study."""

    def __init__(self, combinations: Sequence[Values], budget: str) -> None:
        self._combinations, self.budget = combinations, budget

    def batches(self) -> Iterator[tuple[str, list[Round]]]:
        rounds: list[Round] = []
        for values in self._combinations:
            label = f" [{', '.join(f'{name} = {named_value(value) or value}' for name, value in values.items())}]"
            rounds.append((label if rounds else "", _always(values)))
        yield ", ".join(self._combinations[0]), rounds

    def tell(self, name: str, score: tuple[int, Fraction]) -> None:
        """A grid learns nothing."""


def _always(values: Values) -> Callable[[str], Values]:
    return lambda name: values


def _grid(arguments: Mapping[str, Any]) -> _Grid:
    for name, values in arguments.items():
        if callable(values):
            raise TypeError(
                f"tune(arguments={{{name!r}: {values!r}}}): to pass a function that suggests values, also set "
                "trials=, such as trials=20"
            )
        if isinstance(values, str | bytes) or not isinstance(values, Sequence) or not values:
            raise TypeError(f"tune(arguments={{{name!r}: {values!r}}}): expected a list of values, such as [0.01, 0.1]")
    combinations = [dict(zip(arguments, values, strict=True)) for values in itertools.product(*arguments.values())]
    listing = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in arguments.items())
    every = "each value" if len(arguments) == 1 else f"each of {len(combinations)} combinations"
    return _Grid(combinations, f"{every} ({listing})")


class _Search:
    """Trials of Optuna, a search of its own for each variant, all with the same sampler and seed."""

    def __init__(self, arguments: Mapping[str, Any], trials: int) -> None:
        for name, suggest in arguments.items():
            if not callable(suggest):
                raise TypeError(
                    f"tune(arguments={{{name!r}: {suggest!r}}}): with trials=, expected a function that takes a trial, "
                    f"such as lambda trial: trial.suggest_float({name!r}, 1e-3, 1.0, log=True)"
                )
        try:
            import optuna
        except ImportError as error:
            raise ImportError("tune(trials=...) needs Optuna: pip install 'signalfire[search]'") from error
        self._optuna: Any = optuna
        self._arguments, self._trials = arguments, trials
        self._studies: dict[str, Any] = {}
        self._asked: dict[str, tuple[Any, Values]] = {}
        self.budget = f"{count(trials, 'trial')} with Optuna's TPE sampler"

    def batches(self) -> Iterator[tuple[str, list[Round]]]:
        for number in range(1, self._trials + 1):
            self._asked = {}
            yield f"{', '.join(self._arguments)}: trial {number}", [("", self._ask)]

    def _ask(self, name: str) -> Values:
        if name not in self._asked:
            if name not in self._studies:
                self._studies[name] = self._optuna.create_study(sampler=self._optuna.samplers.TPESampler(seed=0))
            trial = self._studies[name].ask()
            self._asked[name] = trial, {argument: suggest(trial) for argument, suggest in self._arguments.items()}
        return self._asked[name][1]

    def tell(self, name: str, score: tuple[int, Fraction]) -> None:
        failed, mean = score
        trial, _ = self._asked[name]
        if failed:
            self._studies[name].tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._studies[name].tell(trial, float(mean))


def _made(
    study: Study, design: _WithValues, seeds: tuple[int, ...], what: str, workers: int | Executor
) -> dict[str, list[Result]]:
    """The results by variant; the runs are a study of their own in the same store, which says what they are."""
    inner = Study(
        study.build,
        metric=study.metric,
        mode=study.mode,
        seeds=seeds,
        handlers=study.handlers,
        run=study.own_run,
        config={**study.config, "tuning": what},
        streams=study.streams,
    )
    inner.store = study.store
    inner.run(design, workers=workers)
    study.mode = inner.mode
    found: dict[str, list[Result]] = {}
    for result in inner.results(inner.plan(design)):
        found.setdefault(result.variant, []).append(result)
    return found


def _score(results: Sequence[Result], mode: str) -> tuple[int, Fraction]:
    """The number of failed runs, and the mean of the others, as what is smaller for better values."""
    values = [exact(one.value) for one in results if one.value is not None and math.isfinite(one.value)]
    mean = sum(values, Fraction()) / max(1, len(values))
    return len(results) - len(values), -mean if mode == "max" else mean


def _fact(metric: str, names: Sequence[str], budget: str, chosen: Mapping[str, Values]) -> str:
    by_values: dict[str, list[str]] = {}
    for variant, values in chosen.items():
        by_values.setdefault(", ".join(f"{name} = {_text(one)}" for name, one in values.items()), []).append(
            f'"{variant}"'
        )
    what = f"argument{'s' if len(names) > 1 else ''} {listed(list(names))} of build"
    choice = "; ".join(f"{values} for {listed(variants)}" for values, variants in by_values.items())
    verb = "were" if len(names) > 1 else "was"
    return (
        f"The {what} {verb} tuned for each variant with the same budget, {budget}; the values with the best mean of "
        f"{metric} were chosen: {choice}."
    )


def _limits(
    arguments: Mapping[str, Any],
    scores: Mapping[str, Sequence[tuple[tuple[int, Fraction], Values]]],
    chosen: Mapping[str, Values],
) -> list[str]:
    limits = []
    for name, tried in scores.items():
        if failed := min(score[0] for score, _ in tried):
            limits.append(f'"{name}": {count(failed, "tuning run")} failed even with the best values found by tuning')
    for argument, values in arguments.items():
        if callable(values) or len(values) < 3 or not all(isinstance(one, int | float) for one in values):
            continue
        edges = min(values), max(values)
        if at_edge := [f'"{name}"' for name, own in chosen.items() if own[argument] in edges]:
            limits.append(
                f"the best {argument} of {listed(at_edge)} is at the edge of the range that was tried, so a better "
                "value may lie outside this range"
            )
    return limits


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
