"""Cross-validation: one training per fold, each sample predicted by the run that has not seen it."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from signalfire import Engine
from signalfire.authoring.checks import check_int
from signalfire.authoring.markup import preformatted

from .arguments import check_workers
from .lines import to_line, to_result
from .out_of_fold import Predict, Predicting, decoded, out_of_fold
from .plan import PlannedRun
from .provenance import Provenance, digest_code
from .results import Result, Variant, finished_value
from .runs import Outcome, Run, Task
from .statistics import mean_of, sd_of
from .store import Store
from .workers import outcomes

__all__ = ["Folds", "KFold"]

Fold = tuple[tuple[int, ...], tuple[int, ...]]
BuildFold = Callable[[int, Sequence[int], Sequence[int]], Engine | tuple[Engine, Run]]


class KFold:
    """Trains one model per fold, each from the start, and reports the metric over the folds.

    Each finished fold is a line in the store, as with `Study`: an interrupted cross-validation resumes, and may run in worker
    processes or over an executor.

    Args:
        build: Called as ``build(seed, train, test)`` with the indices of the samples to train on and to evaluate on; returns a
            new ``Engine(..., seed=seed)`` and a function that runs it.
        splitter: An object with ``split(X, y)``, such as scikit-learn's ``StratifiedKFold(5)``. Give one that shuffles a
            ``random_state``, so that it splits alike each time.
        data: Passed to ``split`` as its arguments: ``X``, or a tuple ``(X, y)`` or ``(X, y, groups)``; ``()`` if it needs none.
        metric: Name of the metric: its last value in ``engine.state.metrics``.
        predict: Called as ``predict(engine, test)`` at the end of each run, in evaluation mode and without gradients; returns a
            prediction for each of the samples ``test``, as a tensor or an array of shape ``(len(test), ...)``. They are in the
            store, and by sample in `Folds.predictions`.
        seed: Seed of all folds.
        store: File for the finished folds; None keeps them in memory.
        config: As for `Study`.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: if the splitter gives no folds, or others when it is asked again.

    Example:
        >>> import numpy as np
        >>> class Halves:
        ...     def split(self, X, y=None):
        ...         yield np.array([0, 1]), np.array([2, 3])
        ...         yield np.array([2, 3]), np.array([0, 1])
        >>> build = lambda seed, train, test: None
        >>> KFold(build, Halves(), np.zeros((4, 2)), metric="loss").folds[1]
        ((2, 3), (0, 1))
    """

    def __init__(
        self,
        build: BuildFold,
        splitter: Any,
        data: Any,
        *,
        metric: str,
        predict: Predict | None = None,
        seed: int = 0,
        store: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        _check_arguments(build, splitter, metric, predict)
        self.build, self.metric, self.predict = build, metric, predict
        self.seed = check_int("KFold", "seed", seed, least=0)
        self.config = dict(config or {})
        self.store = Store(store)
        arguments = data if isinstance(data, tuple) else (data,)
        self.folds = _split(splitter, arguments)
        if self.folds != _split(splitter, arguments):
            raise ValueError(
                f"KFold(splitter={splitter!r}): the splitter returns different folds on each call; set its "
                "random_state, such as random_state=0"
            )
        self.samples = _samples(arguments, self.folds)
        is_stored = store is not None
        self._provenance = Provenance(
            build=digest_code(build, "build", config=self.config, is_stored=is_stored),
            run="" if predict is None else digest_code(predict, "predict", config=self.config, is_stored=is_stored),
            config=digest_code(self.config, "config", config={}, is_stored=True),
            composition="",
            streams="kfold",
        )
        self._keys = [
            digest_code((self._provenance.key, self.seed, train, test), "fold", config={}, is_stored=True)
            for train, test in self.folds
        ]

    def run(
        self, *, folds: Iterable[int] | None = None, workers: int | Executor = 0, retry_failed: bool = False
    ) -> Folds:
        """Train the folds that are not in the store, and report on all.

        Args:
            folds: Numbers of the folds to train, from 0; by default all.
            workers: As for `Study.run`.
            retry_failed: Whether to train failed folds again.
        """
        workers = check_workers("run", workers)
        wanted = list(range(len(self.folds)) if folds is None else folds)
        for one in wanted:
            if not isinstance(one, int) or not 0 <= one < len(self.folds):
                raise ValueError(f"run(folds=[{one!r}]): expected numbers from 0 to {len(self.folds) - 1}")
        with self.store.writing():
            lines = self.store.read()
            missing = [
                one
                for one in wanted
                if (line := lines.get(self._keys[one])) is None or (retry_failed and line["error"] is not None)
            ]
            tasks = [self._task(one) for one in missing]
            try:
                for place, outcome in outcomes(tasks, workers):
                    self.store.append(self._line(missing[place], outcome))
            finally:
                self.store.settle()
        return self.results()

    def results(self) -> Folds:
        """The report on the folds in the store; trains none."""
        lines = self.store.read()
        found = {
            one: to_result(f"fold {one}", lines[key], self.metric) for one, key in enumerate(self._keys) if key in lines
        }
        predicted = {
            one: decoded(packed)
            for one, key in enumerate(self._keys)
            if (packed := lines.get(key, {}).get("predictions")) is not None
        }
        return Folds(self.metric, self.folds, found, predicted, self.samples)

    def _task(self, fold: int) -> Task:
        train, test = self.folds[fold]
        predict = None if self.predict is None else Predicting(self.predict, test)
        return Task(_Fold(self.build, train, test), None, None, False, self.seed, predict=predict)

    def _line(self, fold: int, outcome: Outcome) -> dict[str, Any]:
        run = PlannedRun(Variant(f"fold {fold}"), self.seed, self._keys[fold], "missing", True, None)
        line = to_line(run, outcome, self._provenance, config=self.config, metric=self.metric, mode=None)
        predictions = {} if outcome.predictions is None else {"predictions": outcome.predictions}
        return {**line, **predictions, "fold": fold}


@dataclass(frozen=True)
class _Fold:
    """The build of one fold."""

    build: BuildFold
    train: tuple[int, ...]
    test: tuple[int, ...]

    def __call__(self, seed: int) -> Engine | tuple[Engine, Run]:
        return self.build(seed, self.train, self.test)


@dataclass(frozen=True)
class Folds:
    """The results of a cross-validation; ``print`` shows them.

    Attributes:
        metric: Name of the metric.
        folds: Indices to train on and to evaluate on, for each fold.
        results: Results of the folds that were trained, by number.
        predicted: Predictions of the folds that were trained, by number, in the order of their indices.
        samples: Number of samples.
    """

    metric: str
    folds: tuple[Fold, ...]
    results: Mapping[int, Result]
    predicted: Mapping[int, Tensor] = field(default_factory=dict)
    samples: int = 0

    @property
    def predictions(self) -> Tensor:
        """The prediction of each sample by a run that has not seen it, shape (samples, ...), in the order of the data.

        A sample that several folds predict gets the mean; one that none has predicted, NaN. See `out_of_fold`.
        """
        return out_of_fold(self.predicted, [test for _, test in self.folds], self.samples)

    @property
    def values(self) -> dict[int, float]:
        """The metric of each finished fold, by number."""
        values = {one: finished_value(result) for one, result in self.results.items()}
        return {one: value for one, value in values.items() if value is not None}

    @property
    def mean(self) -> float:
        """Mean over the finished folds; NaN without any."""
        return mean_of(self.values.values())

    @property
    def sd(self) -> float:
        """Standard deviation over the finished folds; NaN for fewer than two."""
        return sd_of(self.values.values())

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The corrected interval of Student's t for the mean: the folds train on much the same samples, so their results depend
        on each other, and the plain interval is too narrow.

        Source: Nadeau and Bengio, Inference for the Generalization Error, Machine Learning 52, 2003: the variance is multiplied
        by 1 / k + n_test / n_train in place of 1 / k.
        """
        from scipy import stats

        k = len(self.values)
        if k < 2:
            return math.nan, math.nan
        ratio = statistics.fmean(len(self.folds[one][1]) / len(self.folds[one][0]) for one in self.values)
        half = float(stats.t.ppf((1 + level) / 2, k - 1)) * self.sd * math.sqrt(1 / k + ratio)
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        low, high = self.interval()
        lines = [
            f"{self.metric}: {self.mean:.4g} +- {self.sd:.2g} (mean and standard deviation of {len(self.values)}/"
            f"{len(self.folds)} folds; corrected 95 % interval {low:.4g} to {high:.4g})",
            "The folds train on overlapping samples, so their results are not independent. The interval is "
            "corrected for this with the method of Nadeau and Bengio.",
        ]
        for one in range(len(self.folds)):
            result = self.results.get(one)
            if result is None:
                lines.append(f"! fold {one}: not trained yet")
            elif one not in self.values:
                why = (result.error or f"{self.metric} is {result.value}").strip().splitlines()[-1]
                lines.append(f"! fold {one} failed: {why}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(self)


def _check_arguments(build: object, splitter: object, metric: object, predict: object) -> None:
    for name, value, is_valid, expected in (
        (
            "build",
            build,
            callable(build) and not isinstance(build, Engine),
            "a function that takes a seed and two lists of indices",
        ),
        ("splitter", splitter, callable(getattr(splitter, "split", None)),
         "an object with split(X, y), such as StratifiedKFold(5)"),
        ("metric", metric, isinstance(metric, str) and metric, "the name of a metric, such as 'accuracy'"),
        ("predict", predict, predict is None or callable(predict),
         "a function that takes the engine and the indices of the samples"),
    ):  # fmt: skip
        if not is_valid:
            raise TypeError(f"KFold({name}={value!r}): expected {expected}")


def _samples(arguments: tuple[Any, ...], folds: Sequence[Fold]) -> int:
    """The number of samples: that of the data, or of the indices for a splitter that needs no data."""
    data: Any = arguments[0] if arguments else None
    if (shape := getattr(data, "shape", None)) is not None:  # sparse matrices have no length
        return int(shape[0])
    return len(data) if isinstance(data, Sized) else 1 + max(one for fold in folds for part in fold for one in part)


def _split(splitter: Any, arguments: tuple[Any, ...]) -> tuple[Fold, ...]:
    found = tuple(
        (tuple(int(one) for one in train), tuple(int(one) for one in test))
        for train, test in splitter.split(*arguments)
    )
    if not found:
        raise ValueError(f"KFold(splitter={splitter!r}): the splitter returned no folds for this data")
    for place, (train, test) in enumerate(found):
        if not train or not test or set(train) & set(test):
            raise ValueError(
                f"KFold(splitter={splitter!r}): expected separate training and test samples in each fold, but fold "
                f"{place} has {len(train)} training and {len(test)} test samples, with "
                f"{len(set(train) & set(test))} samples in both"
            )
    return found
