"""Cross-validation: each sample is validated once, by a training that is the plain one, however the folds are made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold as PlainKFold
from sklearn.model_selection import PredefinedSplit, RepeatedKFold, StratifiedKFold
from torch import nn

from signalfire import Engine, Update, seed_everything
from signalfire.ablation import KFold
from signalfire.handlers import Accuracy, Metrics, Validation
from tests.engine.ablation.test_study import apart_from_timings

X, Y = load_digits(return_X_y=True)
X, Y = X[:300] / 16, Y[:300]
SPLITTER = StratifiedKFold(5, shuffle=True, random_state=0)
cross_entropy = nn.functional.cross_entropy


def rows(indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = torch.tensor(X[list(indices)], dtype=torch.float32), torch.tensor(Y[list(indices)])
    return list(zip(x.split(50), y.split(50), strict=True))


def build(seed: int, train: Sequence[int], test: Sequence[int]) -> Any:
    model = nn.Linear(64, 10)
    update = Update.supervised(cross_entropy, partial(torch.optim.SGD, lr=0.5))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(accuracy=Accuracy()))
    engine = Engine(update, model=model, seed=seed)
    engine.attach(Validation(evaluator, rows(test)))
    return engine, lambda engine: engine.run(rows(train), max_epochs=3)


def failing(seed: int, train: Sequence[int], test: Sequence[int]) -> Any:
    if 0 in test:
        raise ValueError("no luck with this fold")
    return build(seed, train, test)


def plain(train: Sequence[int], test: Sequence[int]) -> float:
    seed_everything(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        for x, y in rows(train):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in rows(test))
    return right / len(test)


def validation(**options: Any) -> KFold:
    return KFold(**{"build": build, "splitter": SPLITTER, "data": (X, Y), "metric": "accuracy"} | options)


@pytest.mark.moderate
def test_each_sample_is_validated_once_and_each_fold_is_the_plain_training() -> None:
    one = validation()
    found = one.run()
    assert sorted(index for _, test in one.folds for index in test) == list(range(300))
    assert found.values == pytest.approx({fold: plain(*one.folds[fold]) for fold in range(5)}, rel=1e-12)
    assert len(set(found.values.values())) > 1


@pytest.mark.moderate
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_folds_in_any_order_leave_the_same_store(workers: int, tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    whole = validation(predict=predict, store=one).run()
    assert validation(predict=predict, store=other).run(folds=[2]).values == {2: whole.values[2]}
    assert "! fold 0: not trained yet" in str(validation(predict=predict, store=other).results())
    validation(predict=predict, store=other).run(folds=[4, 1], workers=workers)
    assert validation(predict=predict, store=other).run().values == whole.values
    assert apart_from_timings(one) == apart_from_timings(other)
    found = validation(predict=predict, store=other).results().predictions
    assert torch.equal(found, whole.predictions)
    before = one.read_bytes()
    validation(predict=predict, store=one).run()
    assert one.read_bytes() == before
    assert validation(predict=predict, store=one, seed=1).results().values == {}  # another cross-validation


@pytest.mark.moderate
def test_a_fold_that_fails_is_one_of_five_with_its_reason() -> None:
    found = validation(build=failing).run()
    assert len(found.values) == 4
    assert "4/5 folds" in str(found)
    assert "failed: ValueError: no luck with this fold" in str(found)
    assert "Traceback" in (next(one.error for one in found.results.values() if one.error) or "")


@pytest.mark.moderate
def test_the_interval_is_the_corrected_one() -> None:
    found = validation().run()
    values = np.array(list(found.values.values()))
    half = stats.t.ppf(0.975, 4) * np.sqrt((1 / 5 + 60 / 240) * values.var(ddof=1))
    assert found.interval() == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-12)
    assert "overlapping samples" in str(found)


def predict(engine: Engine, test: Sequence[int]) -> Any:
    return engine.model(torch.cat([x for x, _ in rows(test)])).softmax(1)


def with_dropout(seed: int, train: Sequence[int], test: Sequence[int]) -> Any:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))
    engine = Engine(Update.supervised(cross_entropy, partial(torch.optim.SGD, lr=0.5)), model=model, seed=seed)
    evaluator = Engine(Update.supervised(cross_entropy).evaluation(), model=model)
    evaluator.attach(Metrics(accuracy=Accuracy()))
    engine.attach(Validation(evaluator, rows(test)))
    return engine, lambda engine: engine.run(rows(train), max_epochs=1)


def plain_predictions(train: Sequence[int], test: Sequence[int]) -> torch.Tensor:
    seed_everything(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        for x, y in rows(train):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    found: torch.Tensor = model(torch.cat([x for x, _ in rows(test)])).detach().softmax(1)
    return found


@pytest.mark.moderate
def test_each_sample_is_predicted_by_a_run_that_has_not_seen_it(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    one = validation(predict=predict, store=path)
    found = one.run().predictions
    expected = torch.full((300, 10), float("nan"))
    for train, test in one.folds:
        expected[list(test)] = plain_predictions(train, test)
    assert torch.equal(found, expected)
    assert torch.equal(validation(predict=predict, store=path).results().predictions, expected)  # from the store
    assert (found.argmax(1).numpy() == Y).mean() == pytest.approx(one.results().mean, rel=1e-12)  # folds of equal size
    # Runs without predictions are not taken for those with them.
    assert validation(store=path).results().values == {}


@pytest.mark.moderate
def test_a_fold_that_fails_leaves_its_samples_without_a_prediction() -> None:
    one = validation(build=failing, predict=predict)
    found = one.run().predictions
    (failed,) = (test for _, test in one.folds if 0 in test)
    assert set(found.isnan().any(1).nonzero().flatten().tolist()) == set(failed)
    some = validation(predict=predict)
    assert int((~some.run(folds=[1]).predictions.isnan().any(1)).sum()) == 60


@pytest.mark.moderate
def test_several_predictions_of_a_sample_are_averaged() -> None:
    one = validation(predict=predict, splitter=RepeatedKFold(n_splits=2, n_repeats=2, random_state=0))
    found = one.run()
    expected = torch.zeros(300, 10)
    for fold, (_, test) in enumerate(one.folds):
        expected[list(test)] += found.predicted[fold]
    assert torch.equal(found.predictions, expected / 2)


def test_predictions_are_made_in_evaluation_mode() -> None:
    modes: list[tuple[bool, bool]] = []

    def noting(engine: Engine, test: Sequence[int]) -> Any:
        modes.append((engine.model.training, torch.is_grad_enabled()))
        return predict(engine, test)

    found = validation(build=with_dropout, predict=noting).run(folds=[0])
    assert modes == [(False, False)]
    assert not found.predicted[0].requires_grad


@pytest.mark.moderate
def test_classes_are_whole_numbers_of_which_each_sample_needs_one() -> None:
    def classes(engine: Engine, test: Sequence[int]) -> Any:
        return predict(engine, test).argmax(1).numpy()

    one = validation(predict=classes)
    with pytest.raises(
        ValueError, match="240 samples have no prediction and 0 have several, but integer predictions cannot be"
    ):
        one.run(folds=[0]).predictions  # noqa: B018
    found = one.run()
    assert found.predictions.dtype == torch.int64
    assert (found.predictions.numpy() == Y).mean() == pytest.approx(found.mean)
    with pytest.raises(ValueError, match=r"no fold has predictions; set KFold\(predict=...\)"):
        validation().run(folds=[0]).predictions  # noqa: B018


def test_data_may_be_sparse_or_none_where_the_splitter_needs_none() -> None:
    fixed = PredefinedSplit(np.arange(300) % 2)
    for splitter, data in ((PlainKFold(2), csr_matrix(X)), (fixed, ()), (fixed, (None, None))):
        assert validation(splitter=splitter, data=data).samples == 300


def test_whole_numbers_may_be_unsigned() -> None:
    one = validation(splitter=PlainKFold(2), predict=lambda engine, test: (np.asarray(test) % 2).astype(np.uint16))
    found = one.run().predictions
    assert found.to(torch.int64).tolist() == [0, 1] * 150


def test_predictions_of_another_shape_are_refused() -> None:
    def short(engine: Engine, test: Sequence[int]) -> Any:
        return predict(engine, test)[1:]

    assert "returned predictions of shape (59, 10) for 60 samples; expected one row for each" in str(
        validation(predict=short).run(folds=[0])
    )

    def words(engine: Engine, test: Sequence[int]) -> Any:
        return ["one"] * len(test)

    assert "returned list; expected a tensor or an array of numbers" in str(validation(predict=words).run(folds=[0]))
    with pytest.raises(TypeError, match=r"KFold\(predict=3\): expected a function that takes the engine"):
        validation(predict=3)


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(TypeError, match=r"KFold\(build=3\)"):
        validation(build=3)
    with pytest.raises(TypeError, match=r"KFold\(splitter=5\): expected an object with split"):
        validation(splitter=5)
    with pytest.raises(TypeError, match=r"KFold\(metric=None\)"):
        validation(metric=None)
    with pytest.raises(ValueError, match="the splitter returns different folds on each call; set its random_state"):
        validation(splitter=PlainKFold(5, shuffle=True))
    with pytest.raises(ValueError, match=r"run\(folds=\[5\]\): expected numbers from 0 to 4"):
        validation().run(folds=[5])
    with pytest.raises(TypeError, match=r"run\(workers='2'\)"):
        validation().run(workers="2")  # type: ignore[arg-type]
