"""A training as it is written for Lightning, ported: a plateau schedule, early
stopping, the three best checkpoints, a test.

Prints the loss and the accuracy of the best weights on the test digits.
"""

import argparse
from functools import partial

import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import (
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    GradientClipping,
    LRScheduling,
    Metrics,
    ProgressBar,
    Validation,
)


def accuracy() -> torchmetrics.Metric:
    return torchmetrics.Accuracy("multiclass", num_classes=10)


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--max_epochs", type=int, default=12)
args = parser.parse_args()

images, digits = load_digits(return_X_y=True)
data = TensorDataset(
    torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits)
)
train, val, test = random_split(
    data, [1197, 300, 300], torch.Generator().manual_seed(0)
)

seed_everything(42)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10),
)  # fmt: skip
update = Update.supervised(
    nn.functional.cross_entropy, torch.optim.AdamW, lr=args.lr, weight_decay=1e-2
)
trainer = Engine(update, model, seed=42)
trainer.attach(
    Metrics(acc=accuracy()),
    Validation(DataLoader(val, batch_size=64), acc=accuracy()),
    GradientClipping(1.0),
    LRScheduling(
        partial(ReduceLROnPlateau, factor=0.5, patience=2), monitor="val_loss"
    ),
    EarlyStopping("val_loss", patience=5),
    Checkpoint(
        "runs/best",
        monitor="val_acc",
        keep=3,
        filename="{epoch}-{val_acc:.3f}",
        hyperparameters=args,
        name="best",
    ),
    Checkpoint("runs/last", keep=1, name="last"),
    CSVLogger("runs/log.csv"),
    ProgressBar(),
)
trainer.run(DataLoader(train, batch_size=64, shuffle=True), max_epochs=args.max_epochs)
print("test:", trainer.test(DataLoader(test, batch_size=64), weights="best"))
