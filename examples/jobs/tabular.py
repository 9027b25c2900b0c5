"""Tumours from 30 measurements each: stop once the F1 score no longer improves, then
measure the best weights on new samples.

Prints why and when the training stopped, and the loss and the F1 score of the test
samples.
"""

from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryF1Score

from signalfire import Engine, Update
from signalfire.handlers import (
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    LRScheduling,
    ProgressBar,
    Validation,
    cosine_with_warmup,
)

x, y = load_breast_cancer(return_X_y=True)
x_train, x_rest, y_train, y_rest = train_test_split(
    x, y, test_size=0.4, random_state=0, stratify=y
)
x_val, x_test, y_val, y_test = train_test_split(
    x_rest, y_rest, test_size=0.5, random_state=0, stratify=y_rest
)
scaler = StandardScaler().fit(x_train)


def batches(x: Any, y: Any, *, shuffle: bool = False) -> DataLoader[Any]:
    data = TensorDataset(
        torch.tensor(scaler.transform(x)).float(), torch.tensor(y).float()
    )
    return DataLoader(data, batch_size=32, shuffle=shuffle)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1), nn.Flatten(0)
)
loss = nn.functional.binary_cross_entropy_with_logits
update = Update.supervised(loss, torch.optim.AdamW, lr=3e-3, weight_decay=1e-2)
trainer = Engine(update, model, seed=0)
trainer.attach(
    LRScheduling(cosine_with_warmup(warmup=0.1)),
    Validation(batches(x_val, y_val), f1=BinaryF1Score()),
    EarlyStopping("val_f1", patience=5),
    Checkpoint("runs/best", monitor="val_f1"),
    CSVLogger("runs/log.csv"),
    ProgressBar(),
)
state = trainer.run(batches(x_train, y_train, shuffle=True), max_epochs=30)
print("stopped:", state.stop_reason, "at epoch", state.epoch)
print("test:", trainer.test(batches(x_test, y_test), weights="best"))
