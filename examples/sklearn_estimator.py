"""An estimator of scikit-learn over an Engine, which pipelines, grid searches and
scikit-learn's own checks take.

    python examples/sklearn_estimator.py             # seconds on one core

It classifies scikit-learn's digits in a pipeline, searches the width and the learning
rate by cross-validation, and counts how many of scikit-learn's checks of estimators
pass.

Source: the conventions are those of
https://scikit-learn.org/stable/developers/develop.html
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update
from signalfire.handlers import GradientClipping, LRScheduling, cosine_with_warmup


class NetClassifier(ClassifierMixin, BaseEstimator):
    """A small network that is trained by an Engine; every argument is a hyperparameter
    that a search may set.

    Args:
        hidden: units of the hidden layer.
        lr: highest learning rate of Adam, reached after a tenth of the steps and
        decayed to zero by a cosine.
        epochs: passes over the data.
        batch_size: samples of a batch.
        random_state: seed of weights and shuffling, as scikit-learn takes it.
    """

    def __init__(
        self,
        hidden: int = 64,
        lr: float = 0.01,
        epochs: int = 30,
        batch_size: int = 32,
        random_state: Any = 0,
    ) -> None:
        self.hidden = hidden
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> NetClassifier:
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, targets = np.unique(y, return_inverse=True)
        seed = int(check_random_state(self.random_state).randint(2**31))
        with torch.random.fork_rng(
            devices=[]
        ):  # an estimator leaves the global generators alone
            torch.manual_seed(seed)
            self.model_ = nn.Sequential(
                nn.Linear(X.shape[1], self.hidden),
                nn.ReLU(),
                nn.Linear(self.hidden, len(self.classes_)),
            )
            trainer = Engine(
                Update.supervised(F.cross_entropy, torch.optim.Adam, lr=self.lr),
                model=self.model_,
                seed=seed,
            )
            trainer.attach(
                GradientClipping(max_norm=1.0),
                LRScheduling(cosine_with_warmup(warmup=0.1)),
            )
            samples = TensorDataset(
                torch.tensor(X, dtype=torch.float32), torch.tensor(targets)
            )
            if len(self.classes_) > 1:  # with a single class there is nothing to learn
                trainer.run(
                    DataLoader(samples, self.batch_size, shuffle=True),
                    max_epochs=self.epochs,
                )
        return self

    def predict_proba(self, X: Any) -> Any:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        with torch.no_grad():
            return (
                self.model_(torch.tensor(X, dtype=torch.float32)).softmax(dim=1).numpy()
            )

    def predict(self, X: Any) -> Any:
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]


def main() -> None:
    torch.set_num_threads(1)
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, random_state=0)
    pipeline = make_pipeline(StandardScaler(), NetClassifier(epochs=10))
    grid = {"netclassifier__hidden": [16, 64], "netclassifier__lr": [1e-3, 1e-2]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(X, y)
    print(
        f"best of 4: {search.best_params_}, accuracy "
        f"{search.score(X_test, y_test):.1%} on {len(y_test)} held-out digits"
    )
    checks = check_estimator(NetClassifier(), on_fail=None, on_skip=None)
    print(
        f"{sum(one['status'] == 'passed' for one in checks)} of {len(checks)} of "
        "scikit-learn's checks pass"
    )


if __name__ == "__main__":
    main()
