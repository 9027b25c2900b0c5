"""Every argument of every handler refuses what it cannot mean where it is written, naming the class and the argument."""

from __future__ import annotations

import inspect
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.optim.lr_scheduler import StepLR

import signalfire.handlers
from signalfire import Engine, Events, Update, seed_everything
from signalfire.handlers import Average, GradientClipping, MixedPrecision, Seeding, TruePrecision
from tests.kit import batches, build, linear, shipped

EVALUATOR = Engine(Update.supervised(nn.functional.mse_loss), model=nn.Linear(5, 1))

# Arguments with which each class can be built, where it needs any.
NEEDED: dict[str, dict[str, Any]] = {
    "ActivationCheckpointing": {"every": 2},
    "CSVLogger": {"path": "x.csv"},
    "Checkpoint": {"folder": tempfile.gettempdir()},
    "Cutout": {"length": 2},
    "Distillation": {"teacher": nn.Linear(5, 1)},
    "EarlyStopping": {"monitor": "loss"},
    "Export": {"path": "x.safetensors"},
    "Freezing": {"parts": ["head"]},
    "GradientAccumulation": {"steps": 2},
    "GradientClipping": {"max_norm": 1.0},
    "JSONLinesLogger": {"path": "x.jsonl"},
    "Trace": {"path": "x.jsonl"},
    "L1": {"weight": 0.1},
    "L2": {"weight": 0.1},
    "LimitBatches": {"train": 2},
    "LRScheduling": {"scheduler": partial(StepLR, step_size=1)},
    "MLflowLogger": {"experiment": "x", "folder": tempfile.gettempdir()},
    "MemorySnapshot": {"folder": tempfile.gettempdir()},
    "Metrics": {"loss": Average()},
    "MicroBatching": {"size": 2},
    "OptunaPruning": {"trial": None, "monitor": "loss"},
    "ParameterScheduling": {"field": "momentum", "schedule": {0: 0.9}},
    "Penalty": {"function": print},
    "Precision32": {"precision": "high"},
    "RemoteLogger": {"folder": tempfile.gettempdir()},
    "Reporting": {"report": print, "monitor": "loss"},
    "SWA": {"start": 1},
    "SequenceLengthWarmup": {"start": 2, "end": 4},
    "SharpnessAwareMinimization": {"rho": 0.1},
    "StochasticDepth": {"blocks": "a"},
    "TensorBoardLogger": {"folder": tempfile.gettempdir()},
    "ElasticDataParallel": {"shards": 2},
    "TensorParallel": {"plan": {"up": ColwiseParallel()}},
    "TrackioLogger": {"project": "x", "folder": tempfile.gettempdir()},
    "TruePrecision": {"precision": "fp64"},
    "TruncatedBPTT": {"steps": 2},
    "UpdateFrequency": {"main": 2},
    "Validation": {"evaluator": EVALUATOR, "data": batches(1)},
    "WandbLogger": {"project": "x", "folder": tempfile.gettempdir()},
    "WarmStart": {"source": "x.pt"},
}
# With other arguments beside, for arguments that only then have a meaning.
BESIDE: dict[str, dict[str, Any]] = {
    "ActivationCheckpointing.modules": {"every": None},
    "EarlyStopping.mode": {},
    "MicroBatching.pieces": {"size": None},
    "TruncatedBPTT.split": {"steps": None},
    "SWA.anneal_epochs": {"lr": 0.1},
    "SWA.anneal": {"lr": 0.1},
}
WRONG: dict[str, Any] = {"an object": object(), "bytes": b"x", "not a number": float("nan"), "a tensor": torch.ones(2)}

ARGUMENTS = [
    (kind, name)
    for kind in sorted(shipped(), key=lambda one: one.__name__)
    for name, parameter in inspect.signature(kind).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
]


CASES = [
    (kind, name, wrong)
    for kind, name in ARGUMENTS
    for wrong in WRONG
    if (name, wrong) not in (("data", "a tensor"), ("bn_data", "a tensor"))  # its rows may be the batches
]


@pytest.mark.parametrize(
    ("kind", "argument", "wrong"), CASES, ids=[f"{k.__name__}-{name}-{wrong}" for k, name, wrong in CASES]
)
def test_an_argument_that_cannot_be_meant_is_refused_with_its_class_and_name(
    kind: type, argument: str, wrong: str
) -> None:
    name = kind.__name__
    given = {**NEEDED.get(name, {}), **BESIDE.get(f"{name}.{argument}", {}), argument: WRONG[wrong]}
    with pytest.raises((TypeError, ValueError)) as caught:
        kind(**given)
    message = str(caught.value)
    assert name in message
    assert argument in message


@pytest.mark.parametrize("address", ["s3://bucket/x", "memory://x", Path("gs://bucket/x"), "file:///tmp/x"], ids=repr)
@pytest.mark.parametrize(
    ("kind", "argument"),
    [one for one in ARGUMENTS if one[1] in ("folder", "path", "source")],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_path_that_is_a_url_is_refused_with_its_class_and_name(kind: type, argument: str, address: Any) -> None:
    given = {**NEEDED.get(kind.__name__, {}), argument: address}
    with pytest.raises(ValueError, match=rf"{kind.__name__}\({argument}='\w+://?.*: a URL is not a path"):
        kind(**given)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("Checkpoint", {"folder": "x", "every": 0}, r"Checkpoint\(every=0\)"),
        ("Checkpoint", {"folder": "x", "every": ""}, r"Checkpoint\(every=''\)"),
        ("Checkpoint", {"folder": "x", "mode": "x"}, r"Checkpoint\(mode='x'\): expected 'min' or 'max'"),
        ("Metrics", {"inputs": "x", "loss": Average()}, r"Metrics\(inputs='x'\): expected a function"),
        ("MixUp", {"name": ""}, "MixUp: name=''"),
        ("CutMix", {"name": ""}, "CutMix: name=''"),
        ("TensorBoardLogger", {"folder": "x", "name": ""}, "TensorBoardLogger: name=''"),
        ("ProgressBar", {"file": "x"}, r"ProgressBar\(file='x'\): expected an open text file"),
        ("ProgressBar", {"metrics": [1]}, r"ProgressBar\(metrics=\[1\]\): expected a list of names"),
        ("Validation", {"evaluator": EVALUATOR, "data": []}, r"Validation\(data=\[\]\): the data is empty"),
        ("Validation", {"evaluator": EVALUATOR, "data": {"a": []}}, r"Validation\(data=.*the data is empty"),
        ("GradientClipping", {"max_norm": 1.0, "update": ""}, r"GradientClipping\(update=''\): expected a name"),
        ("UpdateFrequency", {"every": 0, "main": 2}, r"UpdateFrequency\(every=0"),
    ],
)  # fmt: skip
def test_an_empty_or_misspelt_value_is_refused_too(kind: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(signalfire.handlers, kind)(**given)


@pytest.mark.parametrize(
    ("precision", "meant"),
    [
        (torch.bfloat16, "bf16"),
        ("bfloat16", "bf16"),
        ("bf16-mixed", "bf16"),
        (torch.float16, "fp16"),
        ("float16", "fp16"),
        ("16-mixed", "fp16"),
    ],
    ids=str,
)
def test_a_precision_may_be_written_as_others_write_it(precision: Any, meant: Any) -> None:
    one, other = MixedPrecision(precision), MixedPrecision(meant)
    assert (one.dtype, one.loss_event) == (other.dtype, other.loss_event)


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.float64, ["fp64", torch.float64, "float64", "double", "64-true", "fp64-true", "64", 64]),
        (torch.bfloat16, ["bf16", torch.bfloat16, "bfloat16", "bf16-true"]),
        (torch.float16, ["fp16", torch.float16, "float16", "half", "16-true", "fp16-true"]),
    ],
    ids=str,
)
def test_a_true_precision_may_be_written_as_others_write_it(dtype: torch.dtype, names: list[Any]) -> None:
    assert {TruePrecision(name).dtype for name in names} == {dtype}
    assert len({TruePrecision(name).device_features for name in names}) == 1


@pytest.mark.parametrize("wrong", ["32-true", torch.float32, 16, "16", 64.5, None, ["fp64"], torch.int64])
def test_another_precision_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"TruePrecision\(precision=.*expected 'bf16', 'fp16' or 'fp64'"):
        TruePrecision(wrong)


def test_a_precision_of_the_other_kind_names_its_handler() -> None:
    with pytest.raises(ValueError, match=r"use MixedPrecision\('bf16-mixed'\) instead"):
        TruePrecision("bf16-mixed")
    with pytest.raises(ValueError, match=r"use TruePrecision\('16-true'\) instead"):
        MixedPrecision("16-true")


def test_the_obvious_first_argument_needs_no_name() -> None:
    assert GradientClipping(1.0).max_norm == 1.0
    model = nn.Linear(5, 1)
    assert Engine(Update.prediction(), model).model is model


def test_integers_of_numpy_are_integers() -> None:
    five: Any = np.int64(5)
    some: list[Any] = [kind(number) for number, kind in enumerate((np.int8, np.int16, np.int32, np.uint8))]
    engine = build(linear(5, 1), Seeding(five), seed=some[3])
    seen: list[Engine] = []
    engine.connect(Events.ITERATION_COMPLETED(every=five), seen.append)
    engine.connect(Events.ITERATION_COMPLETED(once=[five], after=some[1], before=np.int32(9)), lambda engine: None)  # type: ignore[arg-type]
    seed_everything(five)
    engine.run(batches(6), max_epochs=some[2], max_iters=five, max_steps=five, min_iters=some[1], min_epochs=some[0],
               epoch_length=some[3])  # fmt: skip
    assert engine.state.iteration == 5
    assert type(engine.state.epoch_length) is int
    assert type(engine.seed) is type(engine.find(Seeding).seed) is int
    assert seen == [engine]
