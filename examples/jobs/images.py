"""Handwritten digits: MixUp, label smoothing, an average of the weights, and pictures
of filters and inputs for TensorBoard.

Prints the iterations, the metrics of the averaged weights, and a digest of the weights.
Interrupted and started again, the script resumes from its last checkpoint and prints
the same.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Update, seed_everything
from signalfire.handlers import (
    EMA,
    Accuracy,
    Checkpoint,
    CSVLogger,
    LabelSmoothing,
    LRScheduling,
    MixUp,
    ProgressBar,
    Seeding,
    TensorBoardLogger,
    Validation,
    cosine_with_warmup,
)
from signalfire.testing import fingerprint

images, digits = load_digits(return_X_y=True)
x, y = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits)
train = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=50, shuffle=True)
val = DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=200)

seed_everything(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 16, 10),
)  # fmt: skip
update = Update.supervised(nn.functional.cross_entropy, torch.optim.AdamW, lr=3e-3)
trainer = Engine(update, model, seed=0)
trainer.attach(
    Seeding(),
    MixUp(0.4),
    LabelSmoothing(0.1),
    EMA(0.99),
    LRScheduling(cosine_with_warmup(warmup=0.1)),
    Validation(val, accuracy=Accuracy()),
    Checkpoint("runs/last", every="10it", resume=True),
    TensorBoardLogger("runs/tensorboard"),
    CSVLogger("runs/log.csv", every="1it"),
    ProgressBar(),
)


@trainer.on(Events.EPOCH_COMPLETED(every=2))
def log_filters(engine: Engine) -> None:
    filters = next(engine.model.parameters()).detach()
    engine.log.image(
        "first_filters", (filters - filters.min()) / (filters.max() - filters.min())
    )


@trainer[Validation].evaluator.on(Events.ITERATION_COMPLETED(once=1))
def log_inputs(engine: Engine) -> None:
    engine.log.image("inputs", engine.state.batch[0][:16])


state = trainer.run(train, max_epochs=8)
print(state.iteration, state.metrics, fingerprint(trainer)["modules.model"][:12])
