"""What MixUp, label smoothing, an average of the weights and a schedule contribute:
each left out once, over five seeds.

Prints the plan of the study, its report as a table, in sentences and in Markdown, and
its methods.
"""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.ablation import LeaveOneOut, Study
from signalfire.handlers import (
    EMA,
    Accuracy,
    LabelSmoothing,
    LRScheduling,
    MixUp,
    Seeding,
    Validation,
    cosine_with_warmup,
)

images, digits = load_digits(return_X_y=True)
x, y = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits)
train = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=50, shuffle=True)
val = DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=200)


def build(seed: int) -> tuple[Engine, Callable[[Engine], object]]:
    """The trainer of one run, and a function that runs it."""
    seed_everything(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 10),
    )  # fmt: skip
    update = Update.supervised(nn.functional.cross_entropy, torch.optim.AdamW, lr=3e-3)
    trainer = Engine(update, model, seed=seed)
    trainer.attach(
        Seeding(),
        MixUp(0.4),
        LabelSmoothing(0.1),
        EMA(0.9),
        LRScheduling(cosine_with_warmup(warmup=0.1)),
        Validation(val, accuracy=Accuracy(), every="5ep"),
    )
    return trainer, lambda engine: engine.run(train, max_epochs=5)


if __name__ == "__main__":
    study = Study(
        build, metric="val_accuracy", seeds=range(5), store="runs/study.jsonl"
    )
    design = LeaveOneOut(["mixup", "label_smoothing", "ema", "lr_scheduling"])
    print(study.plan(design))
    report = study.run(design, workers=0)
    print(report, *report.sentences(), report.markdown(), report.methods(), sep="\n")
    report.plot("runs/study.png")
    report.html("runs/study.html")
