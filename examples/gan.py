"""Train a conditional GAN on handwritten digits: two updates with an optimizer each,
and handlers for one or both of them.

    python examples/gan.py  # under a minute on one core; writes runs/gan/samples.png
    python examples/gan.py --steps 800 --seed 1
    python examples/gan.py --list  # the wiring: the handlers of each event, in order

The data are 1,797 images of 8x8 pixels from scikit-learn. The generator draws a digit
from noise and a class label; the discriminator distinguishes drawn digits from real
ones of the same class. The discriminator is updated in every iteration, the generator
in every second one. A classifier trained on real digits measures the fraction of drawn
digits that it recognizes. To detect mode collapse, which this fraction does not show,
the spread of the drawn digits is compared with that of the real ones.

Source: Goodfellow et al., "Generative Adversarial Networks" (NeurIPS 2014), for the
losses; Radford et al., "Unsupervised Representation Learning with Deep Convolutional
Generative Adversarial Networks" (ICLR 2016), for the networks; Miyato and Koyama,
"cGANs with Projection Discriminator" (ICLR 2018). The data: Alpaydin and Kaynak,
"Optical Recognition of Handwritten Digits" (UCI Machine Learning Repository, 1998),
https://doi.org/10.24432/C50P49
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
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

STEPS, BATCH, LATENT, DIGITS, N_CRITIC = 2000, 64, 32, 10, 2

# Images of shape (N, 1, 8, 8), from -1 (paper) to 1 (ink), and their class labels of
# shape (N,).
Digits = tuple[Tensor, Tensor]


class Generator(nn.Module):
    """Maps noise and class labels to images, by upsampling 2x2 pixels twice."""

    def __init__(self) -> None:
        super().__init__()
        # The label is one-hot: with an embedding as long as the noise, drawn digits of
        # one class hardly differed.
        self.layers = nn.Sequential(
            nn.Linear(LATENT + DIGITS, 96 * 4), nn.Unflatten(1, (96, 2, 2)),
            nn.BatchNorm2d(96), nn.ReLU(),
            nn.ConvTranspose2d(96, 48, 4, stride=2, padding=1),
            nn.BatchNorm2d(48), nn.ReLU(),
            nn.ConvTranspose2d(48, 24, 4, stride=2, padding=1),
            nn.BatchNorm2d(24), nn.ReLU(),
            nn.Conv2d(24, 1, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, numbers: Tensor) -> Tensor:
        noise = torch.randn(len(numbers), LATENT, device=numbers.device)
        pictures: Tensor = self.layers(
            torch.cat([noise, F.one_hot(numbers, DIGITS)], 1)
        )
        return pictures


class Discriminator(nn.Module):
    """Maps images and class labels to scores, which are high for real images of the
    class.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Flatten(),
        )  # fmt: skip
        self.score, self.embedding = nn.Linear(64 * 4, 1), nn.Embedding(DIGITS, 64 * 4)

    def forward(self, pictures: Tensor, numbers: Tensor) -> Tensor:
        features = self.layers(pictures)
        scores: Tensor = self.score(features).squeeze(1) + (
            self.embedding(numbers) * features
        ).sum(1)
        return scores


def discriminate(engine: Engine, batch: Digits) -> tuple[Tensor, Tensor]:
    """The scores of real images, and of drawn images of the same classes."""
    pictures, numbers = batch
    drawn = engine.modules["generator"](numbers).detach()
    scores = engine.modules["discriminator"](
        torch.cat([pictures, drawn]), torch.cat([numbers, numbers])
    )
    real, fake = scores.chunk(2)
    return real, fake


def discriminator_loss(
    engine: Engine, scores: tuple[Tensor, Tensor], batch: Digits
) -> Tensor:
    """Binary cross-entropy: -log sigmoid(real) - log(1 - sigmoid(fake))."""
    real, fake = scores
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generate(engine: Engine, batch: Digits) -> Tensor:
    """The scores of newly drawn images of random classes."""
    numbers = torch.randint(DIGITS, batch[1].shape, device=batch[1].device)
    scores: Tensor = engine.modules["discriminator"](
        engine.modules["generator"](numbers), numbers
    )
    return scores


def generator_loss(engine: Engine, scores: Tensor, batch: Digits) -> Tensor:
    return F.softplus(-scores).mean()


def load_data() -> tuple[Digits, Digits]:
    """1,297 training samples and 500 test samples."""
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    numbers = torch.tensor(data.target)
    test, train = torch.randperm(
        len(numbers), generator=torch.Generator().manual_seed(0)
    ).tensor_split([500])
    return (pictures[train], numbers[train]), (pictures[test], numbers[test])


def build_classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 16, DIGITS),
    )  # fmt: skip


def train_classifier(train: Digits, test: Digits) -> tuple[nn.Module, float]:
    """A classifier trained on real digits, and its test accuracy."""
    seed_everything(0)
    model, epochs = build_classifier(), 20
    update = Update.supervised(
        F.cross_entropy, torch.optim.AdamW, lr=2e-3, weight_decay=1e-2
    )
    trainer = Engine(update, model=model, seed=0)
    trainer.attach(
        Seeding(), Validation([test], accuracy=Accuracy(), every=f"{epochs}ep")
    )
    trainer.run(
        DataLoader(
            TensorDataset(*train), BATCH, shuffle=True, generator=torch.Generator()
        ),
        max_epochs=epochs,
    )
    return model, trainer.state.metrics["val_accuracy"]


def draw(engine: Engine, batch: Digits) -> Tensor:
    drawn: Tensor = engine.modules["generator"](batch[1])
    return drawn


def spread(pictures: Tensor, numbers: Tensor) -> Tensor:
    """The root mean square, over pixels and classes, of the standard deviation within a
    class; 0 if all images are equal.
    """
    return (
        torch.stack(
            [pictures[numbers == number].var(0).mean() for number in range(DIGITS)]
        )
        .mean()
        .sqrt()
    )


def build(*, seed: int, steps: int, folder: Path, classifier: nn.Module) -> Engine:
    """Compose the trainer. The order of attaching handlers does not matter."""
    seed_everything(seed)
    models = {"discriminator": Discriminator(), "generator": Generator()}
    adam = partial(torch.optim.Adam, betas=(0.5, 0.999))
    updates = [
        Update(
            discriminate,
            discriminator_loss,
            partial(adam, lr=5e-4),
            name="discriminator",
            parameters="discriminator",
        ),
        Update(
            generate,
            generator_loss,
            partial(adam, lr=1e-3),
            name="generator",
            parameters="generator",
        ),
    ]

    def recognized(drawn: Tensor, numbers: Tensor) -> Tensor:
        right: Tensor = classifier(drawn).argmax(1) == numbers
        return right.float().mean()

    modules = {"generator": models["generator"], "classifier": classifier}
    evaluator = Engine(Update.prediction(draw), model=modules, seed=seed)
    evaluator.attach(Metrics(recognized=recognized, spread=spread), DeviceTransfer())
    labels = torch.arange(DIGITS).repeat(100)

    decay = partial(LinearLR, start_factor=1.0, end_factor=0.05)
    trainer = Engine(updates, model=models, seed=seed)
    trainer.attach(
        Seeding(),
        DeviceTransfer(),
        UpdateFrequency(generator=N_CRITIC),
        GradientClipping(max_norm=5.0),
        LRScheduling(
            partial(decay, total_iters=steps),
            update="discriminator",
            name="discriminator_schedule",
        ),
        LRScheduling(
            partial(decay, total_iters=steps // N_CRITIC),
            update="generator",
            name="generator_schedule",
        ),
        Validation(evaluator, [(labels, labels)], every=f"{max(1, steps // 20)}it"),
        History(),
        TensorBoardLogger(folder, every="50it"),
        ProgressBar(["recognized", "spread"]),
    )
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a GAN that draws handwritten digits."
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"steps of the discriminator (default: {STEPS})",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs") / "gan",
        help="folder of the results (default: runs/gan)",
    )
    parser.add_argument("--list", action="store_true", help="print the wiring and exit")
    arguments = parser.parse_args()
    if arguments.steps < N_CRITIC:
        parser.error(
            f"--steps {arguments.steps}: expected at least {N_CRITIC}, for one step of "
            "the generator"
        )
    torch.set_num_threads(1)

    if arguments.list:
        print(
            build(
                seed=arguments.seed,
                steps=arguments.steps,
                folder=arguments.folder,
                classifier=build_classifier(),
            )
        )
        return
    began = time.perf_counter()
    train, test = load_data()
    classifier, accuracy = train_classifier(train, test)
    trainer = build(
        seed=arguments.seed,
        steps=arguments.steps,
        folder=arguments.folder,
        classifier=classifier,
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    data = TensorDataset(*train)
    loader = DataLoader(
        data, BATCH, shuffle=True, drop_last=True, generator=torch.Generator()
    )
    trainer.run(loader, max_steps=arguments.steps)
    report(trainer, test, accuracy, arguments.folder, time.perf_counter() - began)


def report(
    trainer: Engine, test: Digits, accuracy: float, folder: Path, seconds: float
) -> None:
    """Print the fraction of recognized digits and the spread, and save plots."""
    history = trainer[History]
    made = ", ".join(
        f"{update.steps} steps of the {update.name}" for update in trainer.updates
    )
    print(f"\n{made} in {seconds:.0f} s")
    print(
        "recognized by a classifier trained on real digits: "
        f"real {100 * accuracy:.1f} %, drawn {100 * history['recognized'][-1]:.1f} %"
    )
    print(
        f"spread within a digit: real {spread(*test):.2f}, "
        f"drawn {history['spread'][-1]:.2f}"
    )
    history.plot(folder / "recognized.png", "recognized", "spread")
    draw_samples(trainer, test, folder / "samples.png")
    for path in sorted(folder.iterdir()):
        print(f"  {path}")


def draw_samples(trainer: Engine, test: Digits, path: Path, *, rows: int = 5) -> None:
    """Plot real digits in the upper rows and drawn ones in the lower: one column per
    digit, without selection.
    """
    pictures, numbers = test
    real = torch.stack(
        [pictures[numbers == number][:rows] for number in range(DIGITS)], 1
    )
    with trainer.evaluating():
        drawn = trainer.modules["generator"](
            torch.arange(DIGITS, device=trainer.device).repeat(rows)
        )
    drawn = drawn.cpu().view(rows, DIGITS, 1, 8, 8)
    figure = Figure(figsize=(8, 8.4), layout="constrained")
    for place, (label, grid) in enumerate(
        {"real": real, "drawn": drawn}.items(), start=1
    ):
        axes = figure.add_subplot(2, 1, place)
        framed = F.pad(grid[:, :, 0], (1, 1, 1, 1), value=-1.0)
        axes.imshow(
            framed.transpose(1, 2).reshape(10 * rows, 10 * DIGITS).numpy(),
            cmap="gray_r",
            vmin=-1,
            vmax=1,
        )
        axes.set(title=label, xticks=[], yticks=[])
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
