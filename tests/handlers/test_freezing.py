"""Freezing against plain PyTorch loops that set requires_grad and eval mode themselves; and rates that differ by part."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update, allow, seed_everything
from signalfire.handlers import (
    Freezing,
    GradientAccumulation,
    GradientClipping,
    MixedPrecision,
    Validation,
    discriminative_rates,
)
from signalfire.testing import check_handler, fingerprint
from tests import kit
from tests.kit import assert_same, evaluator_of, windows

Batches = list[tuple[Tensor, Tensor]]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(
            nn.Linear(5, 8),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8, affine=False),
            nn.Dropout(0.2),
        )
        self.backbone10 = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.backbone10(self.backbone(x)).relu())
        return output


def batches(count: int = 5) -> Batches:
    return kit.batches(count)


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
AdamW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def trainer_of(model: nn.Module, *handlers: Any, optimizer: Any = SGD) -> Engine:
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model, seed=0)
    engine.attach(*handlers)
    return engine


def run(engine: Engine, **bounds: Any) -> Engine:
    seed_everything(1)
    engine.run(batches(), **({"max_epochs": 4} | bounds))
    return engine


def plain_loop(
    freeze: Callable[[Network, int], None], *, optimizer: Any = SGD, window: int = 1, max_norm: float | None = None
) -> Network:
    model = Network()
    made = optimizer(model.parameters())
    seed_everything(1)
    data = batches()
    for epoch in range(1, 5):
        model.train().requires_grad_()
        freeze(model, epoch)
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
            for parameter in model.parameters():
                if parameter.grad is not None and len(chunk) > 1:
                    parameter.grad.div_(len(chunk))
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            made.step()
            made.zero_grad()
    return model


def whole_backbone(model: Network, epoch: int) -> None:
    model.backbone.requires_grad_(False)
    model.backbone[1].eval()
    model.backbone[4].eval()


def gradually(model: Network, epoch: int) -> None:
    if epoch < 3:
        model.backbone.requires_grad_(False)
        model.backbone[4].eval()
    if epoch < 4:
        model.backbone[0].requires_grad_(False)
        model.backbone[1].requires_grad_(False)
        model.backbone[1].eval()


def without_statistics(model: Network, epoch: int) -> None:
    model.backbone.requires_grad_(False)


def biases(model: Network, epoch: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(epoch > 1 or not name.endswith(".bias"))


GRADUAL = {"backbone": 3, "backbone.0": 4, "backbone.1": 4}
CASES: dict[str, tuple[Callable[[], Freezing], Callable[[Network, int], None]]] = {
    "for the whole run": (lambda: Freezing("backbone"), whole_backbone),
    "written with a dot": (lambda: Freezing(["backbone."]), whole_backbone),
    "gradually": (lambda: Freezing(GRADUAL), gradually),
    "the statistics continue": (lambda: Freezing(["backbone"], statistics=False), without_statistics),
    "a pattern": (lambda: Freezing("*.bias", unfreeze_at=2), biases),
}


@pytest.mark.moderate
@pytest.mark.parametrize("optimizer", [SGD, AdamW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("case", CASES)
def test_weights_and_statistics_equal_a_plain_loop(case: str, optimizer: Any) -> None:
    make, freeze = CASES[case]
    engine = run(trainer_of(model := Network(), make(), optimizer=optimizer))
    assert_same(model, plain_loop(freeze, optimizer=optimizer))
    assert all(p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())
    assert engine.updates[0].steps == 20


@pytest.mark.moderate
@pytest.mark.parametrize("freezing_first", [True, False])
def test_with_accumulation_and_clipping_it_equals_a_plain_loop(freezing_first: bool) -> None:
    handlers = [Freezing(GRADUAL), GradientAccumulation(4), GradientClipping(max_norm=0.2)]
    run(trainer_of(model := Network(), *(handlers if freezing_first else reversed(handlers))))
    assert_same(model, plain_loop(gradually, window=4, max_norm=0.2))


def test_under_fp16_scaling_frozen_weights_do_not_move() -> None:
    run(trainer_of(model := Network(), Freezing("backbone"), MixedPrecision("fp16")))
    initial = Network().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, initial[name]) == name.startswith("backbone."), name


@pytest.mark.moderate
@pytest.mark.parametrize("optimizer", [SGD, AdamW], ids=["SGD", "AdamW"])
def test_frozen_again_weights_stand_still_in_spite_of_momentum_and_decay(optimizer: Any) -> None:
    model = Network()
    engine = run(trainer_of(model, optimizer=optimizer), max_epochs=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = engine.updates[0].optimizer
    assert first is not None
    remembered = {key: value.clone() for key, value in first.state[model.get_parameter("backbone.0.weight")].items()}
    with engine.attach(Freezing("backbone")):
        run(engine, max_epochs=4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("backbone."), name
    # What the optimizer remembers stands still, too, and is where training would resume.
    for key, value in first.state[model.get_parameter("backbone.0.weight")].items():
        assert torch.equal(value, remembered[key]), key
    run(engine, max_epochs=5)
    assert not torch.equal(model.get_parameter("backbone.0.weight"), before["backbone.0.weight"])


def test_a_path_is_not_mistaken_for_another_that_begins_like_it() -> None:
    seen: set[str] = set()
    engine = trainer_of(model := Network(), Freezing("backbone"))

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine: Engine) -> None:
        seen.update(name for name, p in model.named_parameters() if p.requires_grad)

    run(engine)
    assert seen == {"backbone10.weight", "backbone10.bias", "head.weight", "head.bias"}


@pytest.mark.moderate
def test_a_validation_inside_leaves_what_is_frozen_as_it_is() -> None:
    model = Network()
    evaluator = evaluator_of(model)
    run(trainer_of(model, Freezing(GRADUAL), Validation(evaluator, batches(2), every="2it")))
    assert_same(model, plain_loop(gradually))


def test_what_the_user_froze_stays_frozen_and_comes_back_as_it_was() -> None:
    model = Network()
    model.backbone[0].requires_grad_(False)
    model.backbone[1].eval()
    before = model.get_parameter("backbone.0.weight").clone()
    with allow("W52"):
        run(trainer_of(model, Freezing("backbone", unfreeze_at=2)))
    assert torch.equal(model.get_parameter("backbone.0.weight"), before)
    assert not model.get_parameter("backbone.0.weight").requires_grad
    assert model.backbone[3].weight.requires_grad
    assert not model.backbone[1].training
    assert model.backbone[4].training


@pytest.mark.parametrize("way", ["error", "detached inside", "disabled inside"])
def test_everything_is_put_back(way: str) -> None:
    model, handler = Network(), Freezing("backbone")
    engine = trainer_of(model, handler)
    flags: list[tuple[bool, bool]] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def act(engine: Engine) -> None:
        flags.append((model.get_parameter("backbone.0.weight").requires_grad, model.backbone[1].training))
        if engine.state.iteration == 3:
            if way == "error":
                raise RuntimeError("on purpose")
            if way == "detached inside":
                engine.detach(handler)
            else:
                handler.enabled = False

    if way == "error":
        with pytest.raises(RuntimeError, match="on purpose"):
            run(engine)
    else:
        run(engine)
        assert flags[3] == (True, True)
    assert flags[0] == (False, False)
    assert all(p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())


@pytest.mark.moderate
@pytest.mark.parametrize("iteration", [3, 5, 10, 12, 17])
def test_a_saved_run_goes_on_bit_for_bit(iteration: int) -> None:
    engine, files = trainer_of(Network(), Freezing(GRADUAL), GradientAccumulation(2)), []

    @engine.on(Events.ITERATION_COMPLETED(once=iteration))
    def save(engine: Engine) -> None:
        torch.save(engine.state_dict(), buffer := io.BytesIO())
        files.append(buffer.getvalue())

    run(engine)
    other = trainer_of(Network(), Freezing(GRADUAL), GradientAccumulation(2))
    other.load_state_dict(torch.load(io.BytesIO(files[0]), weights_only=True))
    run(other)
    assert fingerprint(other) == fingerprint(engine)


def test_a_run_that_continues_inside_an_epoch_goes_on_frozen() -> None:
    engine = run(trainer_of(model := Network(), Freezing(GRADUAL)), max_iters=12)
    engine.run(batches(), max_epochs=4)
    assert_same(model, plain_loop(gradually))


def test_gradients_of_an_open_window_do_not_move_what_is_frozen_from_now_on() -> None:
    model = Network()
    engine = run(trainer_of(model, GradientAccumulation(4)), max_iters=2)
    before = model.get_parameter("backbone.0.weight").clone()
    assert model.get_parameter("backbone.0.weight").grad is not None
    engine.attach(Freezing("backbone"))
    run(engine)
    assert torch.equal(model.get_parameter("backbone.0.weight"), before)


def test_in_an_engine_with_several_modules_paths_begin_with_the_modules_name() -> None:
    torch.manual_seed(0)
    models = {"first": nn.Linear(5, 5), "second": nn.Linear(5, 1)}

    def step(engine: Engine, batch: Any) -> Tensor:
        return nn.functional.mse_loss(models["second"](models["first"](batch[0])), batch[1])

    engine = Engine(Update.from_function(step, SGD), model=models, seed=0)
    engine.attach(Freezing("first.weight"))
    before = {name: {key: p.clone() for key, p in module.named_parameters()} for name, module in models.items()}
    run(engine)
    for name, module in models.items():
        for key, p in module.named_parameters():
            assert torch.equal(p, before[name][key]) == ((name, key) == ("first", "weight"))


@pytest.mark.moderate
@pytest.mark.parametrize(
    "make", [lambda: Freezing("backbone"), lambda: Freezing({"backbone": 2, "backbone.0": 3})], ids=["whole", "gradual"]
)
def test_it_keeps_the_promises_of_a_handler(make: Callable[[], Freezing]) -> None:
    check_handler(lambda: trainer_of(Network()), make, batches(), max_epochs=3)


@pytest.mark.parametrize("pattern", ["backbon", "backbone.9", "*.wait", "head.weight.0"])
def test_a_pattern_that_matches_nothing_is_refused_before_the_first_batch(pattern: str) -> None:
    engine = trainer_of(model := Network(), Freezing({"head": None, pattern: 2}))
    with pytest.raises(ValueError, match="matches no parameter") as caught:
        run(engine)
    assert f"'freezing': {pattern!r} matches no parameter; the parameters are 'backbone.0.weight'" in str(caught.value)
    assert "(10 in total)" in str(caught.value)
    assert all(p.requires_grad for p in model.parameters())
    assert engine.state.iteration == 0


class Shared(nn.Module):
    """A weight and a normalization layer that belong to two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.decoder = nn.Sequential(nn.Linear(5, 5), self.encoder[1])
        self.decoder[0].weight = self.encoder[0].weight
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.decoder(self.encoder(x)))
        return output


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_what_two_parts_share_is_frozen_with_either_of_them(part: str) -> None:
    model = Shared()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer_of(model, Freezing(part)).run(batches(), max_epochs=2)
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {"head.weight", "head.bias", f"{'decoder' if part == 'encoder' else 'encoder'}.0.bias"}
    groups = discriminative_rates(model, {part: 0.1})
    assert {id(p) for p in groups[0]["params"]} == {id(p) for p in model.get_submodule(part).parameters()}


def test_a_layer_without_parameters_can_be_named_for_its_statistics() -> None:
    run(trainer_of(model := Network(), Freezing("backbone.4")))
    assert model.state_dict()["backbone.4.num_batches_tracked"] == 0
    assert model.state_dict()["backbone.1.num_batches_tracked"] == 20


def test_with_everything_frozen_the_engine_says_so() -> None:
    engine = trainer_of(Network(), Freezing(["backbone", "backbone10", "head"]))
    with pytest.raises(RuntimeError) as caught:
        run(engine)
    assert any("no parameter of update 'main' requires a gradient" in note for note in caught.value.__notes__)


def test_two_of_them_refuse_each_other() -> None:
    with pytest.raises(ValueError, match="both 'one' and 'two' control which parameters are frozen"):
        trainer_of(Network(), Freezing("head", name="one"), Freezing("backbone", name="two"))


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((3,), {}, TypeError, "parts=3"),
        (([],), {}, ValueError, r"parts=\[\]"),
        (([""],), {}, TypeError, r"parts=\[''\]"),
        (([1],), {}, TypeError, r"parts=\[1\]"),
        (({"head": 1},), {}, ValueError, r"parts=\{'head': 1\}.*'head' would never be frozen"),
        (({"head": 1.5},), {}, TypeError, r"parts=\{'head': 1.5\}"),
        (({"head": 2},), {"unfreeze_at": 3}, ValueError, "unfreeze_at=3"),
        (("head",), {"unfreeze_at": 0}, ValueError, "unfreeze_at=0"),
        (("head",), {"unfreeze_at": True}, TypeError, "unfreeze_at=True"),
        (("head",), {"statistics": None}, TypeError, "statistics=None"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=rf"Freezing\({message}"):
        Freezing(*arguments, **options)


def test_each_parameter_has_the_rate_of_its_longest_path() -> None:
    model = Network()
    rates = {
        "backbone": 1e-3,
        "backbone.0": 1e-4,
        "*.bias": 0.0,
    }  # "backbone.0" is longer than "*.bias", "backbone" too
    groups = discriminative_rates(model, rates, default=1e-2)
    names = {p: name for name, p in model.named_parameters()}
    found = {group["lr"]: [names[p] for p in group["params"]] for group in groups}
    assert found == {
        1e-3: ["backbone.1.weight", "backbone.1.bias", "backbone.3.weight", "backbone.3.bias"],
        1e-4: ["backbone.0.weight", "backbone.0.bias"],
        0.0: ["backbone10.bias", "head.bias"],
        1e-2: ["backbone10.weight", "head.weight"],
    }
    assert [group.get("lr") for group in discriminative_rates(model, {"head": 0.1})] == [0.1, None]
    mixed = discriminative_rates(model, {"head": 0.1, "*.weight": 0.2}, default=0.3)
    assert [(group["lr"], len(group["params"])) for group in mixed] == [(0.1, 1), (0.2, 5), (0.3, 4)]
    whole = discriminative_rates(model, {"backbone": 0.1, "backbone10": 0.2, "head": 0.3})
    assert [group["lr"] for group in whole] == [0.1, 0.2, 0.3]


def test_training_with_rates_by_part_equals_a_plain_loop() -> None:
    update = Update.supervised(
        nn.functional.mse_loss, SGD, parameters=lambda engine: discriminative_rates(engine.model, {"backbone": 1e-3})
    )
    engine = Engine(update, model=(model := Network()), seed=0)
    engine.attach(Freezing("backbone.0", unfreeze_at=3))
    run(engine)

    def optimizer(_: Any) -> torch.optim.Optimizer:
        others = [*reference.backbone10.parameters(), *reference.head.parameters()]
        groups: list[dict[str, Any]] = [
            {"params": list(reference.backbone.parameters()), "lr": 1e-3},
            {"params": others},
        ]
        return SGD(groups)

    reference = Network()
    made = optimizer(None)
    seed_everything(1)
    for epoch in range(1, 5):
        reference.backbone[0].requires_grad_(epoch >= 3)
        for inputs, targets in batches():
            nn.functional.mse_loss(reference(inputs), targets).backward()
            made.step()
            made.zero_grad()
    assert_same(model, reference)


def test_bad_rates_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"discriminative_rates\(\): 'haed' matches no parameter; the parameters are 'backbone"
    ):
        discriminative_rates(Network(), {"haed": 0.1})
    with pytest.raises(ValueError, match=r"discriminative_rates\(rates\['head'\]=-1\)"):
        discriminative_rates(Network(), {"head": -1})
    with pytest.raises(TypeError, match=r"discriminative_rates\(default='1'\)"):
        discriminative_rates(Network(), {}, default="1")  # type: ignore[arg-type]


def test_the_earlier_name_of_unfreeze_at_still_works_and_says_the_new_one() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"Freezing\(until=3\) is deprecated and will be removed in 0.4.0; write unfreeze_at=3"
    ):
        earlier = Freezing("backbone", until=3)
    assert earlier.parts == Freezing("backbone", unfreeze_at=3).parts == {"backbone": 3}
    with (
        pytest.warns(DeprecationWarning, match="write unfreeze_at=3"),
        pytest.raises(TypeError, match=r"until= is the old name of unfreeze_at=; omit until="),
    ):
        Freezing("backbone", until=3, unfreeze_at=3)


def test_rates_by_part_are_named_by_it() -> None:
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    assert [group["name"] for group in discriminative_rates(model, {"backbone": 1e-4})] == ["backbone", "rest"]
