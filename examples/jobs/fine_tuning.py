"""Train on the digits 0 to 4; then fine-tune on few of the digits 5 to 9, with a
backbone that is frozen for two epochs.

Prints for each epoch the learning rates of backbone and head, whether the backbone is
trained, and the validation metrics.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Update, seed_everything
from signalfire.handlers import (
    Accuracy,
    Checkpoint,
    CSVLogger,
    Freezing,
    History,
    LRScheduling,
    Validation,
    WarmStart,
    cosine_with_warmup,
    discriminative_rates,
)

images, digits = load_digits(return_X_y=True)
x, y = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits)
old, new = TensorDataset(x[y < 5], y[y < 5]), TensorDataset(x[y >= 5], y[y >= 5] - 5)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(512, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


seed_everything(0)
update = Update.supervised(nn.functional.cross_entropy, torch.optim.AdamW, lr=1e-3)
trainer = Engine(update, Network(), seed=0)
trainer.attach(Checkpoint("runs/pretrained", weights_only=True))
trainer.run(DataLoader(old, batch_size=64, shuffle=True), max_epochs=5)

seed_everything(0)
update = Update.supervised(
    nn.functional.cross_entropy,
    torch.optim.AdamW,
    parameters=lambda engine: discriminative_rates(
        engine.model, {"backbone": 1e-4}, default=3e-3
    ),
)
trainer = Engine(update, Network(), seed=0)
trainer.attach(
    WarmStart("runs/pretrained", include="backbone"),
    Freezing("backbone", unfreeze_at=3),
    LRScheduling(cosine_with_warmup(warmup=0.1)),
    Validation([new[100:]], accuracy=Accuracy()),
    History(print_epochs=True),
    CSVLogger("runs/log.csv", every="1it"),
)


@trainer.on(Events.EPOCH_COMPLETED)
def show_rates(engine: Engine) -> None:
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    print(engine.state.epoch, rates, engine.model.backbone[0].weight.requires_grad)


few = TensorDataset(*new[:100])
trainer.run(DataLoader(few, batch_size=20, shuffle=True), max_epochs=6)
trainer[History].plot("runs/history.png")
