"""Public libraries as they are: models, batches, optimizers, schedules and configurations, each beside a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Update
from signalfire.authoring.batches import map_leaves, samples_in, tensors_in
from signalfire.handlers import (
    Accuracy,
    Average,
    Checkpoint,
    DeviceTransfer,
    Distillation,
    GradientAccumulation,
    GradientClipping,
    LabelSmoothing,
    LRScheduling,
    Metrics,
    MixUp,
    Predictions,
    Throughput,
    Validation,
)
from signalfire.testing import fingerprint
from signalfire.updates.places import value_at, with_value_at
from tests import kit
from tests.handlers.test_lr_scheduling import timm_schedulers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # as PyTorch Geometric is imported
]
kit.needs("neutral", "transformers", "schedulefree", "tensordict", "torch_geometric", "omegaconf", "pydantic")

ADAM = partial(torch.optim.AdamW, lr=1e-3)


def token_batches(count: int = 4, labels: bool = True) -> list[Any]:
    from transformers import BatchEncoding

    generator = torch.Generator().manual_seed(3)
    made = []
    for size in [4] * (count - 1) + [3]:
        batch = {
            "input_ids": torch.randint(1, 50, (size, 6), generator=generator),
            "attention_mask": torch.ones(size, 6, dtype=torch.long),
        }
        made.append(
            BatchEncoding(batch | ({"labels": torch.randint(2, (size,), generator=generator)} if labels else {}))
        )
    return made


def bert(seed: int = 3) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return BertForSequenceClassification(config)


def plain_bert(epochs: int, window: int = 1) -> Any:
    from transformers import get_linear_schedule_with_warmup

    model = bert()
    optimizer = ADAM(model.parameters())
    schedule = get_linear_schedule_with_warmup(optimizer, 2, epochs * 4 // window)
    torch.manual_seed(1)
    model.train()
    for _ in range(epochs):
        for chunk in kit.windows(token_batches(), window):
            for batch in chunk:
                model(**batch).loss.backward()
            if window > 1:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(len(chunk))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model


@pytest.mark.parametrize("window", [1, 2])
def test_f12_bert_trains_as_in_a_plain_loop_and_resumes(window: int) -> None:
    from transformers import get_linear_schedule_with_warmup

    def build() -> Engine:
        engine = Engine(Update.from_model(ADAM), model=bert(), seed=0)
        engine.attach(
            DeviceTransfer("cpu"),
            GradientAccumulation(window),
            GradientClipping(max_norm=1.0),
            LRScheduling(partial(get_linear_schedule_with_warmup, num_warmup_steps=2)),
            Metrics(loss=Average(), accuracy=Accuracy()),
            Throughput(every="4it", tokens="input_ids"),
        )
        return engine

    whole = build()
    torch.manual_seed(1)
    whole.run(token_batches(), max_epochs=3)
    kit.assert_same(whole.model, plain_bert(3, window))
    states: list[Any] = []
    first = build()
    first.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: states.append(engine.state_dict()))
    torch.manual_seed(1)
    first.run(token_batches(), max_epochs=3)
    resumed = build()
    resumed.load_state_dict(states[0])
    resumed.run(token_batches(), max_epochs=3)
    assert fingerprint(resumed, handlers=False) == fingerprint(whole, handlers=False)


def test_f12_predictions_smoothing_and_distillation_find_logits_and_labels() -> None:
    model = bert().eval()
    evaluator = Engine(Update.from_model(), model=model)
    evaluator.attach(Predictions(inputs="input_ids", targets=True), Metrics(accuracy=Accuracy()))
    evaluator.run(token_batches())
    found = evaluator.find(Predictions)
    with torch.no_grad():
        logits = torch.cat([model(**batch).logits for batch in token_batches()])
    assert torch.equal(found.outputs, logits)
    assert torch.equal(found.targets, torch.cat([batch["labels"] for batch in token_batches()]))
    assert found.inputs.shape == (15, 6)
    teacher, theirs = bert(7), bert()
    optimizer = ADAM(theirs.parameters())
    torch.manual_seed(1)
    theirs.train()
    teacher.eval()
    for batch in token_batches():
        output = theirs(**batch)
        with torch.no_grad():
            wanted = teacher(**batch).logits
        log_student, target = F.log_softmax(output.logits / 2.0, 1), F.softmax(wanted / 2.0, 1)
        term = F.kl_div(log_student, target, reduction="sum") / len(wanted) * 2.0**2
        (0.5 * output.loss + 0.5 * term).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = Engine(Update.from_model(ADAM), model=bert(), seed=0)
    engine.attach(Distillation(bert(7), temperature=2.0, weight=0.5))
    torch.manual_seed(1)
    engine.run(token_batches(), max_epochs=1)
    kit.assert_same(engine.model, theirs)
    smoothed = Engine(Update.from_model(ADAM), model=bert(), seed=0)
    smoothed.attach(LabelSmoothing(0.1))
    smoothed.run(token_batches(), max_epochs=1)


def test_f12_a_vision_model_is_trained_with_mixup() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    def build() -> Any:
        torch.manual_seed(3)
        config = ViTConfig(
            image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, num_labels=3,
        )  # fmt: skip
        return ViTForImageClassification(config)

    pairs = kit.batches(4, (1, 8, 8), (), classes=3)
    engine = Engine(Update.from_model(ADAM, loss=F.cross_entropy), model=build(), seed=0)
    engine.attach(MixUp(0.4, input="pixel_values"))
    torch.manual_seed(1)
    engine.run([{"pixel_values": x, "labels": y} for x, y in pairs], max_epochs=2)
    inner = build()
    forward = lambda engine, batch: engine.model(batch[0]).logits  # noqa: E731
    other = Engine(
        Update(forward, lambda engine, output, batch: F.cross_entropy(output, batch[1]), ADAM), model=inner, seed=0
    )
    other.attach(MixUp(0.4))
    torch.manual_seed(1)
    other.run(pairs, max_epochs=2)
    kit.assert_same(engine.model, inner)


def kinds() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    from pydantic import BaseModel, ConfigDict
    from tensordict import TensorDict
    from torch_geometric.data import Data
    from transformers import BatchEncoding
    from transformers.modeling_outputs import SequenceClassifierOutput

    class Pydantic(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        x: Tensor
        labels: Tensor

    return {
        "BatchEncoding": lambda x, y: BatchEncoding({"x": x, "labels": y}),
        "TensorDict": lambda x, y: TensorDict({"x": x, "labels": y}, batch_size=[len(x)]),
        "pydantic": lambda x, y: Pydantic(x=x, labels=y),
        "PyG": lambda x, y: Data(x=x, labels=y),
        "ModelOutput": lambda x, y: SequenceClassifierOutput(logits=x, loss=y),
    }


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Any = None, labels: Any = None, logits: Any = None, loss: Any = None) -> dict[str, Tensor]:
        output = self.inner(logits if x is None else x)
        return {"loss": F.cross_entropy(output, loss if labels is None else labels), "logits": output}


@pytest.mark.parametrize("kind", ["BatchEncoding", "TensorDict", "pydantic", "PyG", "ModelOutput"])
def test_f12_batches_of_other_libraries_train_as_in_a_plain_loop(kind: str) -> None:
    pairs = kit.batches([4, 4, 3], 5, (), classes=3)
    made = [kinds()[kind](x, y) for x, y in pairs]
    target = "loss" if kind == "ModelOutput" else "labels"
    theirs = Keyword()
    optimizer = ADAM(theirs.parameters())
    for x, y in pairs:
        theirs(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    samples = "x" if kind == "PyG" else None
    engine = Engine(Update.from_model(ADAM, target=target, samples=samples), model=Keyword(), seed=0)
    engine.attach(DeviceTransfer("cpu"), Metrics(accuracy=Accuracy(), loss=Average()))
    engine.run(made, max_epochs=1)
    kit.assert_same(engine.model, theirs)
    first = made[0]
    assert engine.updates[0].samples_in(first) == 4
    assert kind == "PyG" or samples_in(first) == 4
    assert {tuple(one.shape) for one in tensors_in(first)} == {(4, 5), (4,)}
    changed = with_value_at(first, target, torch.zeros(4))
    assert type(changed) is type(first)
    assert torch.equal(value_at(changed, target), torch.zeros(4))
    assert torch.equal(value_at(first, target), pairs[0][1]), "the batch itself is not changed"
    moved = map_leaves(lambda leaf: leaf.to("cpu"), first)
    assert type(moved) is type(first)


def test_f13_schedules_of_hugging_face_and_timm_get_their_totals() -> None:
    import transformers

    timm: Any = timm_schedulers()  # without torchvision, which the package would import, too

    every: list[tuple[Any, str | None, bool]] = [
        (partial(transformers.get_linear_schedule_with_warmup, num_warmup_steps=2), None, False),
        (partial(transformers.get_cosine_schedule_with_warmup, num_warmup_steps=2), None, False),
        (partial(transformers.get_cosine_with_hard_restarts_schedule_with_warmup, num_warmup_steps=2), None, False),
        (partial(transformers.get_polynomial_decay_schedule_with_warmup, num_warmup_steps=2), None, False),
        (partial(transformers.get_wsd_schedule, num_warmup_steps=2, num_decay_steps=4), None, False),
        (partial(transformers.get_scheduler, "linear", num_warmup_steps=2), None, False),
    ]
    every += (
        []
        if timm is None
        else [
            (partial(timm.CosineLRScheduler, t_in_epochs=False, warmup_t=2), None, True),
            (partial(timm.CosineLRScheduler, lr_min=1e-3), "1ep", True),
            (partial(timm.PolyLRScheduler, t_in_epochs=False), None, True),
            (partial(timm.TanhLRScheduler, t_in_epochs=False), None, True),
        ]
    )
    data = kit.batches(6)
    for factory, unit, by_timm in every:
        total = {"t_initial": 3 if unit else 18} if by_timm else {"num_training_steps": 18}
        theirs = kit.linear(5, 1)
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
        scheduler = factory(optimizer, **total)
        updates = 0
        for epoch in range(3):
            for x, y in data:
                F.mse_loss(theirs(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
                if by_timm:
                    scheduler.step_update(num_updates=updates)
                else:
                    scheduler.step()
            if by_timm:
                scheduler.step(epoch + 1)
        engine = kit.build(kit.linear(5, 1), LRScheduling(factory, every=unit), allow=["W18"])
        engine.run(data, max_epochs=3)
        kit.assert_same(engine.model, theirs)


def test_f15_schedule_free_optimizers_train_evaluate_and_resume() -> None:
    from schedulefree import AdamWScheduleFree

    data = kit.batches(6)
    factory = partial(AdamWScheduleFree, lr=0.05, warmup_steps=4)
    theirs = kit.mlp(5, 8, 1)
    optimizer = factory(theirs.parameters())
    optimizer.train()
    expected = []
    for _ in range(3):
        for x, y in data:
            F.mse_loss(theirs(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = copy.deepcopy(theirs.state_dict())
        optimizer.eval()
        with torch.no_grad():
            expected.append(sum(F.mse_loss(theirs(x), y).item() for x, y in data[:2]) / 2)
        evaluated = copy.deepcopy(theirs.state_dict())
        optimizer.train()
        theirs.load_state_dict(state)

    def build() -> Engine:
        model = kit.mlp(5, 8, 1)
        engine = kit.build(model, optimizer=factory)
        engine.attach(Validation(kit.evaluator_of(model), data[:2]))
        return engine

    values: list[float] = []
    states: list[Any] = []
    engine = build()
    engine.connect(Events.EVALUATION_COMPLETED, lambda engine: values.append(engine.state.metrics["loss"]))
    engine.connect(Events.ITERATION_COMPLETED(once=8), lambda engine: states.append(engine.state_dict()))
    engine.run(data, max_epochs=3)
    kit.assert_same(engine.model, theirs)
    assert values == pytest.approx(expected, rel=1e-6)
    kit.assert_same(engine.weights()["model"], evaluated)
    resumed = build()
    resumed.load_state_dict(states[0])
    resumed.run(data, max_epochs=3)
    kit.assert_same(resumed.model, theirs)


def test_f20_adafactor_without_a_rate_trains_as_in_a_plain_loop() -> None:
    from transformers.optimization import Adafactor

    data = kit.batches(6)
    factory = partial(Adafactor, lr=None, relative_step=True, warmup_init=True)
    theirs = kit.mlp(5, 8, 1)
    optimizer = factory(theirs.parameters())
    for x, y in data:
        F.mse_loss(theirs(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = kit.build(kit.mlp(5, 8, 1), optimizer=factory)
    engine.run(data, max_epochs=1)
    kit.assert_same(engine.model, theirs)


def test_f18_configurations_of_omegaconf_and_pydantic(tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from pydantic import BaseModel

    class Optimizer(BaseModel):
        lr: float = 0.1
        betas: tuple[float, float] = (0.9, 0.99)

    class Config(BaseModel):
        optimizer: Optimizer = Optimizer()
        folder: Path = Path("runs")

    plain = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "folder": "runs"}
    composed = OmegaConf.create({**plain, "name": "lr-${optimizer.lr}"})
    for number, (config, expected) in enumerate(((Config(), plain), (composed, {**plain, "name": "lr-0.1"}))):
        engine = kit.build(kit.linear(5, 1), Checkpoint(tmp_path / str(number), hyperparameters=config))
        engine.log.hyperparameters(config)
        assert engine.log.given["optimizer/lr"] == 0.1
        engine.run(kit.batches(2), max_epochs=1)
        (version,) = (tmp_path / str(number)).iterdir()
        assert Checkpoint.hyperparameters(version) == expected
