"""NEFTune against a plain loop that adds the noise itself."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from signalfire import Engine, Events, Update
from signalfire.authoring.randomness import derived_seed, mixed
from signalfire.handlers import (
    GradientAccumulation,
    MicroBatching,
    MixedPrecision,
    NEFTune,
    SharpnessAwareMinimization,
    Validation,
)
from signalfire.testing import check_handler
from tests.kit import assert_same, average_gradients, same, windows

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Reader(nn.Module):
    """Classifies sequences of tokens; 0 is padding."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.again = again
        self.embed = nn.Embedding(12, 4)
        self.layer = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def body(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embed(ids)))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = checkpoint(self.body, ids, use_reentrant=False) if self.again else self.body(ids)
        assert isinstance(hidden, Tensor)
        output: Tensor = self.head(hidden.mean(1))
        return output


def texts(count: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for _ in range(count):
        ids = torch.randint(1, 12, (4, 7), generator=generator)
        lengths = torch.randint(1, 8, (4, 1), generator=generator)
        mask = (torch.arange(7) < lengths).long()
        made.append({"ids": ids * mask, "attention_mask": mask, "y": torch.randint(3, (4,), generator=generator)})
    return made


def supervised(model: nn.Module, *, evaluates: bool = False) -> Update:
    def forward(engine: Engine, batch: Any) -> Tensor:
        output: Tensor = model(batch["ids"])
        return output

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch["y"])

    return Update(forward, loss, None if evaluates else SGD)


def build(*handlers: Any, model: nn.Module | None = None) -> Engine:
    model = model or Reader()
    engine = Engine(supervised(model), model=model, seed=7)
    engine.attach(*handlers)
    return engine


def plain_loop(
    alpha: float | None = 5.0, *, masked: bool = False, window: int = 1, scaled: bool = False, again: bool = False
) -> nn.Module:
    model = Reader()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    iteration = 0
    for _ in range(2):
        for chunk in windows(texts(), window):
            for batch in chunk:
                iteration += 1
                generator = torch.Generator().manual_seed(derived_seed(7, "nef_tune", iteration))
                for _ in range(2 if again else 1):
                    key = int(torch.randint(2**62, (), generator=generator))
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    embedded = model.embed(batch["ids"])
                    noise = torch.empty(4, 7, 4).uniform_(-1, 1, generator=torch.Generator().manual_seed(mixed(key, 0)))
                    for sample, length in enumerate(batch["attention_mask"].sum(1)):
                        if alpha is None:
                            break
                        if masked:
                            magnitude = alpha / (length * 4).sqrt()
                            noise[sample] *= batch["attention_mask"][sample].unsqueeze(1) * magnitude
                        else:
                            noise[sample] *= alpha / math.sqrt(7 * 4)
                    if alpha is not None:
                        embedded = embedded + noise
                    output = model.head(torch.tanh(model.layer(embedded)).mean(1))
                    loss = nn.functional.cross_entropy(output, batch["y"])
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def mask_of(batch: Any) -> Tensor:
    mask: Tensor = batch["attention_mask"] == 1
    return mask


@pytest.mark.parametrize("mask", [None, "attention_mask", mask_of])
@pytest.mark.parametrize(("window", "scaled"), [(1, False), (2, True)])
def test_weights_equal_a_plain_loop(mask: Any, window: int, scaled: bool) -> None:
    engine = build(NEFTune(5.0, mask=mask), GradientAccumulation(window))
    if scaled:
        engine.attach(MixedPrecision("fp16", init_scale=1024.0))
    engine.run(texts(), max_epochs=2)
    assert_same(engine.model, plain_loop(masked=mask is not None, window=window, scaled=scaled))
    assert not same(engine.model, plain_loop(None, window=window, scaled=scaled))


def test_a_forward_that_is_computed_again_in_the_backward_has_the_same_noise() -> None:
    engine = build(NEFTune(), model=Reader(again=True))
    engine.run(texts(), max_epochs=2)
    assert_same(engine.model, plain_loop())


@pytest.mark.parametrize("handler", [SharpnessAwareMinimization(0.1), MicroBatching(2)], ids=["sam", "pieces"])
def test_each_forward_of_an_iteration_has_its_own_noise(handler: Any) -> None:
    engine = build(NEFTune(), handler)
    seen: list[Tensor] = []
    engine.model.layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    alike = {key: value[:1].repeat(4, *[1] * (value.dim() - 1)) for key, value in texts(1)[0].items()}
    engine.run([alike], max_epochs=1)
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


def test_evaluations_an_embedding_in_eval_mode_and_calls_outside_of_an_update_see_no_noise() -> None:
    model = Reader()
    evaluator = Engine(supervised(model, evaluates=True), model=model)
    outputs: list[Tensor] = []
    clean: list[Tensor] = []
    evaluator.connect(Events.FORWARD_COMPLETED, lambda engine: outputs.append(engine.state.update.output.clone()))
    engine = build(NEFTune(50.0), Validation(evaluator, texts(1), every="1it"), model=model)

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine: Engine) -> None:
        assert model.training
        assert not model.embed._forward_hooks
        clean.append(model(texts(1)[0]["ids"]).detach())

    engine.run(texts(), max_epochs=1)
    assert len(outputs) == 5
    assert all(torch.equal(one, other) for one, other in zip(outputs, clean, strict=True))
    frozen = build(NEFTune(50.0))
    frozen.connect(Events.UPDATE_STARTED, lambda engine: engine.model.embed.eval())
    frozen.connect(Events.UPDATE_COMPLETED, lambda engine: engine.model.embed.train())
    frozen.run(texts(), max_epochs=2, check=False)
    assert_same(frozen.model, plain_loop(None))


def test_after_an_error_no_hook_is_left_and_the_iteration_is_made_again_with_the_same_noise() -> None:
    engine = build(NEFTune())

    def fail(engine: Engine) -> None:
        assert len(engine.model.embed._forward_hooks) == 1
        raise ArithmeticError

    handle = engine.connect(Events.BACKWARD_STARTED(once=1), fail)
    with pytest.raises(ArithmeticError):
        engine.run(texts(), max_epochs=2)
    assert not engine.model.embed._forward_hooks
    handle.detach()
    engine.run(texts(), max_epochs=2)
    assert_same(engine.model, plain_loop())


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 4), nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head((self.tokens(ids) + self.places(torch.arange(7))).mean(1))
        return output


class Named(TwoTables):
    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


class Unused(TwoTables):
    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.tokens.weight[ids].mean(1) + self.places(torch.arange(7)).mean(0))
        return output


def test_the_embedding_is_found_or_named() -> None:
    with pytest.raises(ValueError, match=r"'nef_tune': expected .* found 2 \('tokens', 'places'\); select the"):
        build(NEFTune(), model=TwoTables()).run(texts(), max_epochs=1)
    with pytest.raises(ValueError, match=r"'x' is not a module of the model; .* embeddings are 'tokens', 'places'"):
        build(NEFTune(embedding="x"), model=TwoTables()).run(texts(), max_epochs=1)
    with pytest.raises(ValueError, match=r"'nef_tune': the forward pass did not call the embedding"):
        build(NEFTune(embedding="tokens"), model=Unused()).run(texts(), max_epochs=1)
    torch.manual_seed(0)
    named = build(NEFTune(), model=Named())
    torch.manual_seed(0)
    chosen = build(NEFTune(embedding="tokens"), model=TwoTables())
    for engine in (named, chosen):
        engine.run(texts(), max_epochs=1)
    assert_same(named.model, chosen.model)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ("mask", TypeError, r"no tensor at 'mask'; set NEFTune\(mask=\) to the index or key of a tensor"),
        ("y", ValueError, r"the mask has shape \(4,\), but the embeddings have shape \(4, 7, 4\)"),
        (lambda batch: 3, ValueError, "the mask is 3"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(NEFTune(mask=mask)).run(texts(), max_epochs=1)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="both 'one' and 'two' control the noise added to embeddings"):
        build(NEFTune(name="one"), NEFTune(name="two"))
    with pytest.raises(TypeError, match=r"'nef_tune': the embedding's output has shape \(4, 6\); expected"):
        build(NEFTune(embedding="1"), model=nn.Sequential(nn.Flatten(), nn.Linear(7, 6), nn.Linear(6, 3))).run(
            [{"ids": torch.ones(4, 7), "y": torch.zeros(4).long()}], max_epochs=1
        )
    for options, message in (
        ({"alpha": 0}, "alpha=0"),
        ({"mask": 1.5}, "mask=1.5"),
        ({"embedding": ""}, "embedding=''"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"NEFTune\({message}\)"):
            NEFTune(**options)
    model = Reader()
    model.layer.compile(backend="eager")
    with pytest.raises(ValueError, match=r"'nef_tune': 'model\.layer' is compiled"):
        build(NEFTune(), model=model).run(texts(), max_epochs=1)
    torch._dynamo.reset()


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(build, lambda: NEFTune(mask="attention_mask"), texts(3), max_epochs=2)
