"""Train a GAN to draw the digits of MNIST-1D: two updates, each with its optimizer, and handlers that act on one or both.

    python examples/gan.py                           # about a minute and a half on one core; look at runs/gan/samples.png
    python examples/gan.py --steps 500 --seed 1
    python examples/gan.py --list                    # the wiring: which handler listens to what, in which order

A digit of MNIST-1D is a curve of 40 points. The generator draws one from noise and the digit that is asked for; the
discriminator tells drawn curves from real ones of the same digit. In every iteration the discriminator is updated, and in every
second one the generator. At the end a classifier that has seen real digits only says which digits the drawn ones are.

Source: Goodfellow et al., "Generative Adversarial Networks" (NeurIPS 2014); Radford et al., "Unsupervised Representation
Learning with Deep Convolutional Generative Adversarial Networks" (ICLR 2016); Miyato et al., "Spectral Normalization for
Generative Adversarial Networks" (ICLR 2018), for the loss and the normalisation; Miyato and Koyama, "cGANs with Projection
Discriminator" (ICLR 2018). The data: Greydanus and Kobak, "Scaling Down Deep Learning with MNIST-1D" (ICML 2024).
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from mnist1d.data import get_dataset_args, make_dataset
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import (
    Accuracy,
    DeviceTransfer,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    ProgressBar,
    Seeding,
    TensorBoardLogger,
    UpdateFrequency,
    Validation,
)

STEPS, BATCH, LATENT, DIGITS, N_CRITIC = 4000, 64, 32, 10, 2

Digits = tuple[Tensor, Tensor]


class Generator(nn.Module):
    """Noise and a digit in, a curve of 40 points out: 5 points, doubled three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, LATENT)
        self.layers = nn.Sequential(
            nn.Linear(2 * LATENT, 128 * 5), nn.Unflatten(1, (128, 5)), nn.BatchNorm1d(128), nn.ReLU(),
            nn.ConvTranspose1d(128, 64, 4, stride=2, padding=1), nn.BatchNorm1d(64), nn.ReLU(),
            nn.ConvTranspose1d(64, 32, 4, stride=2, padding=1), nn.BatchNorm1d(32), nn.ReLU(),
            nn.ConvTranspose1d(32, 32, 4, stride=2, padding=1), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 1, 5, padding=2), nn.Flatten(),
        )  # fmt: skip

    def forward(self, digits: Tensor) -> Tensor:
        noise = torch.randn(len(digits), LATENT, device=digits.device)
        curves: Tensor = self.layers(torch.cat([noise, self.embedding(digits)], 1))
        return curves


class Discriminator(nn.Module):
    """A curve and a digit in, a score out: high for real curves of this digit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 40)),
            spectral_norm(nn.Conv1d(1, 32, 5, padding=2)), nn.LeakyReLU(0.1),
            spectral_norm(nn.Conv1d(32, 64, 4, stride=2, padding=1)), nn.LeakyReLU(0.1),
            spectral_norm(nn.Conv1d(64, 128, 4, stride=2, padding=1)), nn.LeakyReLU(0.1),
            spectral_norm(nn.Conv1d(128, 128, 4, stride=2, padding=1)), nn.LeakyReLU(0.1),
            nn.Flatten(),
        )  # fmt: skip
        self.score = spectral_norm(nn.Linear(128 * 5, 1))
        self.embedding = spectral_norm(nn.Embedding(DIGITS, 128 * 5))

    def forward(self, curves: Tensor, digits: Tensor) -> Tensor:
        features = self.layers(curves)
        scores: Tensor = self.score(features).squeeze(1) + (self.embedding(digits) * features).sum(1)
        return scores


def discriminate(engine: Engine, batch: Digits) -> tuple[Tensor, Tensor]:
    """The scores of real curves, and of as many drawn ones of the same digits."""
    curves, digits = batch
    drawn = engine.modules["generator"](digits).detach()
    scores = engine.modules["discriminator"](torch.cat([curves, drawn]), torch.cat([digits, digits]))
    real, fake = scores.chunk(2)
    return real, fake


def discriminator_loss(engine: Engine, scores: tuple[Tensor, Tensor], batch: Digits) -> Tensor:
    real, fake = scores
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def generate(engine: Engine, batch: Digits) -> Tensor:
    """The scores of curves that are drawn for it."""
    digits = torch.randint(DIGITS, batch[1].shape, device=batch[1].device)
    scores: Tensor = engine.modules["discriminator"](engine.modules["generator"](digits), digits)
    return scores


def generator_loss(engine: Engine, scores: Tensor, batch: Digits) -> Tensor:
    return -scores.mean()


def load_data() -> tuple[Digits, Digits]:
    """4,000 training samples and 1,000 test samples."""
    data = make_dataset(get_dataset_args())
    train, test = (
        (torch.tensor(data[f"x{part}"], dtype=torch.float32), torch.tensor(data[f"y{part}"])) for part in ("", "_test")
    )
    return train, test


def build_classifier() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 40)),
        nn.Conv1d(1, 32, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv1d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, DIGITS),
    )  # fmt: skip


def train_classifier(train: Digits, test: Digits) -> tuple[nn.Module, float]:
    """A judge that has seen real digits only, and its accuracy on real ones that it has not seen."""
    model = build_classifier()
    update = Update.supervised(F.cross_entropy, partial(torch.optim.AdamW, lr=1e-2, weight_decay=1e-2))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(accuracy=Accuracy()))
    trainer = Engine(update, model=model, seed=0)
    loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True, generator=torch.Generator().manual_seed(0))
    trainer.attach(
        Seeding(),
        LRScheduling(partial(LinearLR, start_factor=1.0, end_factor=0.01, total_iters=800)),
        Validation(evaluator, [test], every="20ep"),
    )
    trainer.run(loader, max_epochs=20)
    return model, trainer.state.metrics["accuracy"]


def judge(engine: Engine, batch: Digits) -> Tensor:
    """What the classifier takes drawn curves for."""
    logits: Tensor = engine.modules["classifier"](engine.modules["generator"](batch[0]))
    return logits


def build(*, seed: int, steps: int, folder: Path, classifier: nn.Module) -> Engine:
    """Compose the trainer. The order in which handlers are attached does not matter."""
    seed_everything(seed)
    models = {"discriminator": Discriminator(), "generator": Generator()}
    adam = partial(torch.optim.Adam, betas=(0.5, 0.999))
    updates = [
        Update(
            discriminate, discriminator_loss, partial(adam, lr=4e-4), name="discriminator",
            parameters=lambda engine: engine.modules["discriminator"].parameters(),
        ),
        Update(
            generate, generator_loss, partial(adam, lr=4e-4), name="generator",
            parameters=lambda engine: engine.modules["generator"].parameters(),
        ),
    ]  # fmt: skip

    evaluator = Engine(
        Update.prediction(judge), model={"generator": models["generator"], "classifier": classifier}, seed=seed
    )
    evaluator.attach(Metrics(recognised=Accuracy()), DeviceTransfer())
    asked = torch.arange(DIGITS).repeat(100)

    trainer = Engine(updates, model=models, seed=seed)
    trainer.attach(
        Seeding(),
        DeviceTransfer(),
        UpdateFrequency(generator=N_CRITIC),
        GradientClipping(max_norm=20.0),
        LRScheduling(decay(steps), name="discriminator_schedule"),
        LRScheduling(decay(steps // N_CRITIC), update="generator", name="generator_schedule"),
        Validation(evaluator, [(asked, asked)], every=f"{max(1, steps // 16)}it"),
        History(),
        TensorBoardLogger(folder, every="50it"),
        ProgressBar(["recognised"]),
    )
    return trainer


def decay(steps: int) -> Any:
    """The rate as it is for the first half of the steps, then down to a twentieth."""
    return partial(LambdaLR, lr_lambda=lambda step: min(1.0, max(0.05, 2 * (1 - step / max(1, steps)))))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN that draws the digits of MNIST-1D.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the discriminator (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs") / "gan", help="where results go (default: runs/gan)"
    )
    parser.add_argument("--list", action="store_true", help="print the wiring and stop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    if arguments.list:
        print(build(seed=arguments.seed, steps=arguments.steps, folder=arguments.folder, classifier=build_classifier()))
        return
    began = time.perf_counter()
    train, test = load_data()
    classifier, accuracy = train_classifier(train, test)
    trainer = build(seed=arguments.seed, steps=arguments.steps, folder=arguments.folder, classifier=classifier)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    data = TensorDataset(*train)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, generator=torch.Generator())
    trainer.run(loader, max_steps=arguments.steps)
    report(trainer, test, accuracy, arguments.folder, time.perf_counter() - began)


def report(trainer: Engine, test: Digits, accuracy: float, folder: Path, seconds: float) -> None:
    """Print how many drawn digits are recognised, and save pictures."""
    history = trainer.handlers["history"]
    assert isinstance(history, History)
    made = ", ".join(f"{update.steps} steps of the {update.name}" for update in trainer.updates)
    print(f"\n{made} in {seconds:.0f} s")
    print(f"recognised by a classifier that was trained on real digits: real {100 * accuracy:.1f} %, "
          f"drawn {100 * history['recognised'][-1]:.1f} %")  # fmt: skip
    history.plot(folder / "recognised.png", "recognised")
    draw_samples(trainer.modules["generator"], test, folder / "samples.png")
    for path in sorted(folder.iterdir()):
        print(f"  {path}")


def draw_samples(generator: nn.Module, test: Digits, path: Path, *, rows: int = 4) -> None:
    """Real digits in the upper rows, drawn ones in the lower: a column for each digit, none of them chosen by hand."""
    curves, digits = test
    real = torch.stack([curves[digits == digit][:rows] for digit in range(DIGITS)])
    generator.eval()
    with torch.no_grad():
        drawn = generator(torch.arange(DIGITS).repeat_interleave(rows)).reshape(DIGITS, rows, -1)
    figure, axes = plt.subplots(2 * rows, DIGITS, figsize=(12, 1.1 * 2 * rows), sharex=True, sharey=True)
    for digit in range(DIGITS):
        axes[0, digit].set_title(str(digit))
        for row in range(2 * rows):
            curve, colour = (real[digit, row], "black") if row < rows else (drawn[digit, row - rows], "tab:red")
            axes[row, digit].plot(curve, color=colour, linewidth=1.2)
            axes[row, digit].set(xticks=[], yticks=[])
    for row, label in ((0, "real"), (rows, "drawn")):
        axes[row, 0].set_ylabel(label)
    figure.tight_layout(pad=0.5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
