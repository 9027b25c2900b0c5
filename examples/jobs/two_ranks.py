"""Train on two processes, with metrics of the whole validation set: torchrun
--nproc-per-node=2 examples/jobs/two_ranks.py.

Prints once the number of processes and the metrics, the same ones as of a single
process with these weights.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassF1Score

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import (
    Accuracy,
    Checkpoint,
    CSVLogger,
    DistributedDataParallel,
    ProgressBar,
    Validation,
)

images, digits = load_digits(return_X_y=True)
x, y = torch.tensor(images).float() / 16, torch.tensor(digits)
train = DataLoader(
    TensorDataset(x[:1203], y[:1203]), batch_size=50, shuffle=True
)  # 50 on each process
val = DataLoader(TensorDataset(x[1203:], y[1203:]), batch_size=64)

seed_everything(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
update = Update.supervised(nn.functional.cross_entropy, torch.optim.AdamW, lr=1e-2)
trainer = Engine(update, model, seed=0)
trainer.attach(
    DistributedDataParallel(),
    Validation(val, f1=MulticlassF1Score(10, average="macro"), accuracy=Accuracy()),
    Checkpoint("runs/checkpoints"),
    CSVLogger("runs/log.csv"),
    ProgressBar(),
)
state = trainer.run(train, max_epochs=3)
trainer.processes.print(trainer.processes.world_size, state.metrics)
