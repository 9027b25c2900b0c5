"""Published methods whose scripts look like mistakes, each beside the mistake: the code is reported there only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, TensorDataset

from signalfire import Engine, Events, ReloadedData, Update
from signalfire.handlers import Average, GradientAccumulation, Guards, Validation

from .test_ordinary_scripts import SLOW, Script, X, Y, classifier, loader, reported, trainer

Step = Callable[[Engine, Any], Any]


def stepped(step: Step, data: Any = None, model: nn.Module | None = None) -> None:
    engine = Engine(Update.from_function(step, SLOW), model=model or classifier(), seed=0)
    engine.run(loader() if data is None else data, max_epochs=1)


# ---- scales and sizes ----------------------------------------------------------------------------------------------------


def seasonal(factor: float) -> None:
    """A slow series, of which an evaluation reads a part; both normalized with what was trained, times a factor."""
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    series = 8 * torch.sin(torch.arange(2000) / 365 * 6.2832) + 0.5 * noise
    windows = ((series - series[:1500].mean()) / series[:1500].std()).unfold(0, 15, 1)

    def part(values: Tensor, *, shuffle: bool) -> Any:
        return DataLoader(TensorDataset(values[:, :14], values[:, 14:]), 32, shuffle=shuffle)

    engine = trainer(F.mse_loss, nn.Linear(14, 1))
    engine.attach(Validation(part(windows[1500:] * factor, shuffle=False), mae=Average(F.l1_loss)))
    engine.run(part(windows[:1480], shuffle=True), max_epochs=1)


def discrepancy(engine: Engine, batch: Any) -> Any:
    """The maximum mean discrepancy of two sets of samples, by the distances of all pairs."""
    first, second = engine.model(batch[0]), batch[0][:, :3]
    squares = first.pow(2).sum(1, keepdim=True) + second.pow(2).sum(1) - 2 * first @ second.T
    return (-squares).exp().mean()


def energy(engine: Engine, batch: Any) -> Any:
    """The energy distance of two samples of numbers."""
    first, second = engine.model(batch[0])[:, 0], batch[0][:, 0]
    return 2 * (first - second[:, None]).abs().mean() - (first[:, None] - first).abs().mean()


FREQUENCIES = torch.linspace(0.1, 3, 10)


def physics(engine: Engine, batch: Any) -> Any:
    """The residual of an equation at points that the step draws, as many as there are frequencies."""
    points = torch.rand(10, 1).requires_grad_()
    values = engine.model((points * FREQUENCIES).sin())
    (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    return (slope + values).pow(2).mean()


def by_row(engine: Engine, batch: Any) -> Any:
    return (engine.model(batch[0])[:, :1] - batch[1].float()).pow(2).mean()


def bags(lengths: list[int]) -> None:
    """Lists of instances with a label each, or pictures with a label each, one after the other."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Conv1d(1, 4, 5)
            self.last = nn.Linear(4, 1)

        def forward(self, bag: Tensor) -> Tensor:
            score: Tensor = self.last(self.read(bag.transpose(0, 1).flatten(1)[None]).amax(2))[0, 0]
            return score

    data = [(torch.randn(length, 1, 32), torch.tensor(length % 2.0)) for length in lengths]
    trainer(F.binary_cross_entropy_with_logits, Pooled()).run(data, max_epochs=1)


# ---- targets and terms ---------------------------------------------------------------------------------------------------

TOKENS = torch.randint(8, (32, 12), generator=torch.Generator().manual_seed(0))


class Language(nn.Module):
    """Reads tokens, and those before them only if it shifts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.first = nn.Embedding(9, 8), nn.Parameter(torch.zeros(8))
        self.read, self.last = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.how == "masks":
            tokens = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, 8)
        steps = self.embed(tokens)
        if self.how == "shifts":
            steps = torch.cat([self.first.expand(len(tokens), 1, -1), steps[:, :-1]], 1)
        scores: Tensor = self.last(self.read(steps)[0])
        return scores.transpose(1, 2)


def language(how: str, reduction: str = "mean") -> None:
    def step(engine: Engine, tokens: Tensor) -> Any:
        return F.cross_entropy(engine.model(tokens), tokens, reduction=reduction).mean()

    data: Any = TOKENS
    stepped(step, DataLoader(data, 8, shuffle=True), Language(how))


def consistent(engine: Engine, batch: Any) -> Any:
    """Virtual adversarial training: the divergence from an answer without gradients, as a cross entropy less an entropy."""
    with torch.no_grad():
        answer = engine.model(batch[0]).softmax(1)
    other = engine.model(batch[0] + 0.1).log_softmax(1)
    divergence = (answer * answer.log()).sum(1).mean() - (answer * other).sum(1).mean()
    return F.cross_entropy(engine.model(batch[0]), batch[1]) + divergence


def straight_through(engine: Engine, batch: Any) -> Any:
    penalty = engine.model(batch[0]).pow(2).mean()
    return F.cross_entropy(engine.model(batch[0]), batch[1]) + (penalty - penalty.detach())


def cut_off(engine: Engine, batch: Any) -> Any:
    with torch.no_grad():
        penalty = engine.model(batch[0]).pow(2).mean()
    return F.cross_entropy(engine.model(batch[0]), batch[1]) + penalty


def half(loss: Callable[..., Tensor]) -> None:
    engine = trainer(lambda output, target: 0.5 * loss(output, F.one_hot(target, 3).float()))
    engine.attach(GradientAccumulation(2))
    engine.run(loader(), max_epochs=1)


# ---- what is trained -----------------------------------------------------------------------------------------------------


def two_parts(first: str, last: str) -> None:
    """A trained part before a frozen one."""
    model = nn.Sequential()
    model.add_module(first, nn.Linear(10, 8))
    model.add_module(last, nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).requires_grad_(False))
    trainer(model=model).run(loader(), max_epochs=1)


def evolved(*, changes: bool) -> None:
    """An evolution strategy, which needs no optimizer; or a step that only measures."""

    def step(engine: Engine, batch: Any) -> None:
        weights = parameters_to_vector(engine.model.parameters())
        if changes:
            vector_to_parameters(weights + 0.01 * torch.randn_like(weights), engine.model.parameters())

    def measure(engine: Engine, batch: Any) -> None:
        engine.log("fitness", engine.model(batch[0]).mean())

    Engine(Update.from_function(step if changes else measure), model=classifier(), seed=0).run(loader(), max_epochs=3)


def perturbed(*, changes: bool) -> None:
    """Free adversarial training: a perturbation that a function changes by its gradient; or one that nothing changes."""
    noise = torch.zeros(8, 10, requires_grad=True)
    update = Update.from_function(lambda engine, batch: F.cross_entropy(engine.model(batch[0] + noise), batch[1]), SLOW)
    engine = Engine(update, model=classifier(), seed=0)

    @engine.on(Events.BACKWARD_COMPLETED)
    def ascend(engine: Engine) -> None:
        assert noise.grad is not None
        if changes:
            with torch.no_grad():
                noise.add_(0.1 * noise.grad.sign())

    engine.run(loader(), max_epochs=1)


def from_the_image(*, frozen: bool) -> None:
    """Style transfer: an image that an optimizer changes, and a model that only looks at it."""
    image, model = torch.rand(1, 10).requires_grad_(), classifier().requires_grad_(not frozen)
    update = Update.from_function(lambda engine, batch: engine.model(image).pow(2).mean(), Adam([image], lr=0.1))
    Engine(update, model=model, seed=0).run(range(6), max_epochs=1)


def hidden(make: Callable[[nn.Linear], nn.Module], *, trains: bool = False) -> None:
    """A network that a list hides from the optimizer on purpose; or layers that are forgotten in a list."""

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(10, 3)
            self.hidden = [make(self.own)]

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.set_grad_enabled(trains):
                other = functional_call(self.hidden[0], dict(self.own.named_parameters()), (inputs,))
            scores: Tensor = self.own(inputs) + other
            return scores

    trainer(model=Student()).run(loader(), max_epochs=1)


def at_an_optimum(optimizer: Any) -> None:
    """The temperature of scores, which a line search finds in the first step; or an optimizer that changes nothing."""
    temperature = nn.Parameter(torch.zeros(()))
    scores = 2 * F.one_hot(Y, 3) + torch.randn(32, 3, generator=torch.Generator().manual_seed(1))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = temperature

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs / self.temperature.exp()

    engine = Engine(Update.supervised(F.cross_entropy, optimizer), model=Scaled(), seed=0)
    engine.attach(Guards(every="1it"))
    engine.run([(scores, Y)], max_epochs=5)


class Still(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Forget to change anything."""


def picture(largest: float) -> None:
    """An image that is trained, with values up to this one."""

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pixels = nn.Parameter(torch.rand(3, 8, 8) * largest)

    def step(engine: Engine, batch: Any) -> Any:
        return (engine.model.pixels / largest - 0.5).pow(2).mean()

    Engine(Update.from_function(step, partial(Adam, lr=2.0)), model=Image(), seed=0).run(range(4), max_epochs=1)


# ---- data ----------------------------------------------------------------------------------------------------------------


def in_a_row(*others: Tensor) -> None:
    """Samples in an order that their last tensor counts: it is what is learnt, or the number of a series."""
    data = DataLoader(TensorDataset(X, *others, torch.arange(32) // 8), 8)
    trainer(lambda output, target: F.cross_entropy(output, Y[:8])).run(data, max_epochs=2)


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return X[0], Y[0]


def repeated(data: Any) -> None:
    engine = trainer()
    engine.attach(Guards(every="1it"))
    engine.run(data, max_iters=6)


def full_batch() -> Iterator[Any]:
    while True:
        yield X, Y


def measured(size: int) -> None:
    """The root of the mean of squares of each picture, or of all pictures of a batch."""

    def rmse(output: Tensor, target: Tensor) -> Tensor:
        return (output - F.one_hot(target, 3)).pow(2).mean().sqrt()

    engine = trainer()
    engine.attach(Validation(DataLoader(TensorDataset(X, Y), size), rmse=Average(rmse)))
    engine.run(loader(), max_epochs=1)


def hinge(*, learns: bool) -> None:
    """A hinge loss that all samples satisfy after a while, or a loss that is multiplied by 0."""
    model = nn.Linear(10, 1)
    inputs = X.sign() * X.abs().clamp(min=0.5)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.relu(0.1 - target * (output if learns else 0 * output)).mean()

    with torch.no_grad():
        model.weight.zero_()[0, 0] = 0.0 if learns else 1.0
    engine = Engine(Update.supervised(loss, partial(SGD, lr=5.0)), model=model, seed=0)
    engine.attach(Guards(every="2it"))
    engine.run([(inputs, inputs[:, :1].sign())] * 60, max_epochs=1)


FORGOTTEN = partial(hidden, lambda own: nn.Linear(10, 3), trains=True)

CASES: dict[str, tuple[str, Script, Script]] = {
    "a season": ("W60", partial(seasonal, 1.0), partial(seasonal, 100.0)),
    "distances of all pairs": ("W73", partial(stepped, discrepancy), partial(stepped, by_row)),
    "frequencies": ("W73", partial(stepped, physics, range(5)), partial(stepped, by_row)),
    "bags": ("W23", partial(bags, [3, 5, 4, 6]), partial(bags, [3, 3, 3, 3])),
    "a model that shifts": ("W98", partial(language, "shifts"), partial(language, "reads")),
    "a model that masks": ("W98", partial(language, "masks"), partial(language, "reads")),
    "a loss of selected tokens": ("W98", partial(language, "reads", "none"), partial(language, "reads")),
    "a divergence": ("W99", partial(stepped, consistent), partial(stepped, cut_off)),
    "a value less itself": ("W99", partial(stepped, straight_through), partial(stepped, cut_off)),
    "half a smooth loss": ("W74", partial(half, F.smooth_l1_loss), partial(half, F.binary_cross_entropy_with_logits)),
    "a projector": ("C09", partial(two_parts, "projector", "lm"), partial(two_parts, "first", "rest")),
    "an encoder": ("C09", partial(two_parts, "encoder", "generator"), partial(two_parts, "first", "rest")),
    "a hidden teacher": ("C27", partial(hidden, lambda own: nn.Linear(10, 3).eval()), FORGOTTEN),
    "a hidden target network": ("C27", partial(hidden, copy.deepcopy), FORGOTTEN),
    "a template": ("C27", partial(hidden, lambda own: nn.Linear(10, 3, device="meta")), FORGOTTEN),
    "all pairs": ("W73", partial(stepped, energy), partial(stepped, by_row)),
    "an evolution strategy": ("W10", partial(evolved, changes=True), partial(evolved, changes=False)),
    "a perturbation": ("W92", partial(perturbed, changes=True), partial(perturbed, changes=False)),
    "numbers of series": ("C13", partial(in_a_row, Y), in_a_row),
    "a full batch": ("G11", partial(repeated, full_batch()), partial(repeated, DataLoader(Broken(), 8))),
    "an optimum": (
        "G03",
        partial(at_an_optimum, partial(torch.optim.LBFGS, lr=0.5, max_iter=30)),
        partial(at_an_optimum, partial(Still, lr=0.1)),
    ),
    "pixels": ("C28", partial(picture, 255.0), partial(picture, 1.0)),
    "samples one by one": ("W04", partial(measured, 1), partial(measured, 8)),
    "a satisfied hinge": ("G02", partial(hinge, learns=True), partial(hinge, learns=False)),
}


@pytest.mark.whole
@pytest.mark.parametrize(("code", "right", "wrong"), CASES.values(), ids=CASES)
def test_a_code_is_reported_where_something_is_wrong_only(code: str, right: Script, wrong: Script) -> None:
    assert code not in reported(right)
    assert code in reported(wrong)


def test_a_function_that_yields_new_batches_is_looked_at() -> None:
    engine = trainer()
    engine.attach(Guards(every="1it"))
    engine.run(((X + step, Y) for step in range(6)), max_iters=6)
    assert not {"W09", "G11"} & {one.code for one in engine.findings.of_run()}


def test_a_frozen_model_may_look_at_what_an_optimizer_of_ones_own_changes() -> None:
    from_the_image(frozen=True)
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        from_the_image(frozen=False)


class Rollouts:
    """Data that moves on with each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter([(X + self.passes, Y)] * 2)


@pytest.mark.parametrize(
    "made",
    [lambda: ReloadedData(lambda epoch: [(torch.randn(8, 10), Y[:8]) for _ in range(4)]), Rollouts],
    ids=["reloaded", "rollouts"],
)
def test_a_check_reads_nothing_that_the_run_would_read_otherwise(made: Callable[[], Any]) -> None:
    losses = []
    for checks in (False, True):
        torch.manual_seed(0)
        engine, data = trainer(), made()
        if checks:
            engine.check(data, max_epochs=2)
        engine.run(data, max_epochs=2)
        losses.append(engine.loss)
    assert losses[0] == losses[1]
