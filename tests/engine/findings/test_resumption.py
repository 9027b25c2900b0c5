"""A resumed run says from where it resumes, and in what its composition differs from the one that saved the state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext as quiet
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from signalfire import Engine, Events, FindingWarning, Handler, Update, on
from signalfire.handlers import (
    EMA,
    Checkpoint,
    DistributedDataParallel,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    MixedPrecision,
)
from tests.kit import assert_same, batches, build, mlp, needs, quick


def trained(*handlers: Any, lr: float = 0.1) -> Engine:
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=lr)), model=mlp(5, 8, 1))
    engine.attach(*handlers)
    return engine


def test_a_resume_names_the_checkpoint_the_epoch_and_the_iteration(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Checkpoint(tmp_path, filename="last", keep=1)).run(batches(4), max_epochs=2)
    assert capfd.readouterr().err == ""
    engine = trained(Checkpoint(tmp_path, filename="last", keep=1, resume=True))
    engine.run(batches(4), max_epochs=3)
    [found] = engine.findings.of_run().of("W31")
    assert found.severity == "info"
    assert found.sentence == f"the run resumes from the checkpoint {str(tmp_path / 'last')!r}: epoch 2, iteration 8"
    assert capfd.readouterr().err == f"checkpoint: resuming from {str(tmp_path / 'last')!r}, epoch 2, iteration 8\n"


def test_a_resume_with_another_learning_rate_other_handlers_and_other_data_says_so_in_one_message() -> None:
    engine = trained(GradientClipping(max_norm=1.0), History())
    engine.run(batches(4), max_epochs=1)
    other = trained(lr=0.5)
    other.load_state_dict(engine.state_dict(), allow=["gradient_clipping", "history"])
    with pytest.warns(FindingWarning, match=r"W32: .*: lr=0.5 is not used, because the state has lr=0.1") as caught:
        other.run(batches(6), max_epochs=2)
    assert [str(one.message).split(":")[0] for one in caught] == ["W32"]
    assert "the data has 6 batches, but had 4" in str(caught[0].message)
    assert other.updates[0].optimizer is not None
    assert other.updates[0].optimizer.param_groups[0]["lr"] == 0.1


class Damping(Handler):
    """A handler of one's own, which keeps its argument under another name."""

    trains = True

    def __init__(self, factor: float, *, parts: Sequence[str] = ()) -> None:
        self.by = factor

    @on(Events.GRADIENTS_READY)
    def damp(self, engine: Engine) -> None:
        for parameter in engine.updates[0].parameters:
            assert parameter.grad is not None
            parameter.grad *= self.by


def decaying(rate: float) -> LRScheduling:
    return LRScheduling(partial(ExponentialLR, gamma=rate))


SETTINGS: dict[str, tuple[Handler, Handler, str]] = {
    "clipping": (
        GradientClipping(1.0),
        GradientClipping(5.0),
        "'gradient_clipping' has max_norm=5.0, but had max_norm=1.0",
    ),
    "window": (
        GradientAccumulation(2),
        GradientAccumulation(4),
        "'gradient_accumulation' has steps=4, but had steps=2",
    ),
    "average": (EMA(0.9), EMA(decay=0.5), "'ema' has decay=0.5, but had decay=0.9"),
    "schedule": (
        decaying(0.9),
        decaying(0.5),
        "'lr_scheduling' has scheduler=partial(ExponentialLR, gamma=0.5), but had scheduler=partial(ExponentialLR, "
        "gamma=0.9)",
    ),
    "own": (
        Damping(0.5),
        Damping(0.1, parts=["a"]),
        "'damping' has factor=0.1, but had factor=0.5; 'damping' has parts=['a'], but",
    ),
    "precision": (MixedPrecision("bf16"), History(), r"missing in this run: 'mixed_precision' (MixedPrecision)"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_resume_with_other_settings_of_a_handler_names_both(what: str) -> None:
    then, now, expected = SETTINGS[what]
    engine = trained(then)
    engine.run(batches(4), max_epochs=1)
    other = trained(now)
    other.load_state_dict(engine.state_dict(), allow=["history"])
    with pytest.warns(FindingWarning, match="W32") as caught:
        other.run(batches(4), max_epochs=2)
    assert expected in str(caught[0].message)


def test_a_resume_with_another_seed_dtype_sampler_or_with_frozen_layers_says_so() -> None:
    def loader(shuffle: bool, dtype: torch.dtype) -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(torch.ones(8, 5, dtype=dtype), torch.ones(8, 1, dtype=dtype)), 2, shuffle=shuffle
        )

    def engine_of(seed: int, dtype: torch.dtype) -> Engine:
        return Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=mlp(5, 8, 1).to(dtype), seed=seed)

    engine = engine_of(0, torch.float32)
    engine.run(loader(True, torch.float32), max_epochs=1)
    other = engine_of(7, torch.float64)
    other.model[0].requires_grad_(False)
    other.load_state_dict(engine.state_dict())
    with pytest.warns(FindingWarning, match="W32") as caught:
        other.run(loader(False, torch.float64), max_epochs=2)
    said, frozen = (str(one.message) for one in caught if "W32" in str(one.message))
    assert "weights are torch.float64, but were torch.float32" in said
    assert "now frozen: model.0.weight, model.0.bias" in frozen
    assert "the sampler of the data is a SequentialSampler, but was a RandomSampler" in said
    assert "seed=7 is not used, because the state has seed=0" in said


def unfreezing(once: bool) -> Engine:
    """An engine that unfreezes its first layer in epoch 2: by an event that comes once, or by the number of the epoch."""
    engine = trained()
    engine.model[0].requires_grad_(False)

    @engine.on(Events.EPOCH_STARTED(once=2) if once else Events.EPOCH_STARTED)
    def unfreeze(engine: Engine) -> None:
        engine.model[0].requires_grad_(engine.state.epoch >= 2)

    return engine


@pytest.mark.parametrize("once", [False, True])
def test_a_resumed_run_that_unfreezes_by_the_number_of_the_epoch_is_the_same_run(once: bool) -> None:
    engine = unfreezing(once)
    engine.run(batches(2), max_epochs=2)
    resumed = unfreezing(once)
    resumed.load_state_dict(engine.state_dict())
    with pytest.warns(FindingWarning, match="now frozen") if once else quiet():
        resumed.run(batches(2), max_epochs=3)
    engine.run(batches(2), max_epochs=3)
    same = torch.equal(engine.model[0].weight, resumed.model[0].weight)
    assert same is not once


@pytest.mark.slow
def test_a_resume_of_a_compiled_model_in_the_plain_one_has_the_same_frozen_layers_and_dtypes() -> None:
    def engine_of(compiled: bool, dtype: torch.dtype = torch.float32) -> Engine:
        model: torch.nn.Module = mlp(5, 8, 1).to(dtype)
        model[0].requires_grad_(False)  # type: ignore[index]
        model = torch.compile(model, backend="eager") if compiled else model  # type: ignore[assignment]
        return Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=model)

    engine = engine_of(True)
    engine.run(batches(4), max_epochs=1)
    other = engine_of(False)
    other.load_state_dict(engine.state_dict())
    other.run(batches(4), max_epochs=2)
    assert "W32" not in {one.code for one in other.findings.of_run()}

    wider = engine_of(False, torch.float64)
    wider.load_state_dict(engine.state_dict())
    data = [tuple(one.double() for one in batch) for batch in batches(4)]
    with pytest.warns(FindingWarning, match=r"W32.*weights are torch\.float64, but were torch\.float32"):
        wider.run(data, max_epochs=2)


def test_a_resume_with_another_timeout_of_the_processes_is_the_same_run() -> None:
    engine = trained(DistributedDataParallel(timeout=60))
    engine.run(batches(4), max_epochs=1)
    other = trained(DistributedDataParallel(timeout=90, bucket_cap_mb=5))
    other.load_state_dict(engine.state_dict())
    other.run(batches(4), max_epochs=2)
    assert "W32" not in {one.code for one in other.findings.of_run()}


@pytest.mark.parametrize("change", [True, False])
def test_weights_that_are_changed_after_a_state_was_loaded_are_not_lost_in_silence(change: bool) -> None:
    engine = trained()
    engine.run(batches(4), max_epochs=1)
    other = trained()
    other.load_state_dict(engine.state_dict())
    if change:
        other.load_weights(trained().weights())
        with pytest.warns(FindingWarning, match=r"W35: the weights were changed after load_state_dict\(\)"):
            other.run(batches(4), max_epochs=2)
    else:
        other.run(batches(4), max_epochs=2)
    engine.run(batches(4), max_epochs=2)
    assert_same(other.model.state_dict(), engine.model.state_dict())


def test_a_resume_of_the_same_composition_says_nothing_of_it() -> None:
    engine = trained(GradientClipping(max_norm=1.0))
    engine.run(batches(4), max_epochs=1)
    other = trained(GradientClipping(1.0, norm_type=2.0))
    other.load_state_dict(engine.state_dict())
    other.run(batches(4), max_epochs=2)
    assert [one.code for one in other.findings.of_run()] == ["W31"]


@pytest.mark.parametrize(
    ("part", "key"), [("engine", "epoch_start"), ("engine", "stops"), ("updates", "window"), ("data", None)]
)
def test_a_state_that_lacks_a_part_is_refused_before_anything_is_changed(part: str, key: str | None) -> None:
    engine = trained()
    engine.run(batches(4), max_epochs=1)
    state = engine.state_dict()
    holder = state if key is None else state[part]["main"] if part == "updates" else state[part]
    del holder[part if key is None else key]
    other = trained()
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(ValueError, match=f"the loaded state has no {part}.*load_weights"):
        other.load_state_dict(state)
    assert_same(other.model, before)


class TwoInOne(Optimizer):
    """One optimizer for matrices and another for the rest, with a state of its own form."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 0.1})
        self.one = SGD([p for p in parameters if p.ndim > 1], lr=0.1, momentum=0.9)
        self.other = Adam([p for p in parameters if p.ndim < 2], lr=0.01)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.one.step()
        self.other.step()

    def state_dict(self) -> dict[str, Any]:
        return {"matrices": self.one.state_dict(), "rest": self.other.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.one.load_state_dict(state["matrices"])
        self.other.load_state_dict(state["rest"])


def test_an_optimizer_whose_state_has_a_form_of_its_own_resumes_exactly(tmp_path: Path) -> None:
    def engine_of(*handlers: Any) -> Engine:
        engine = Engine(Update.supervised(mse_loss, TwoInOne), model=mlp(5, 8, 1))
        engine.attach(*handlers)
        return engine

    whole = engine_of()
    whole.run(batches(4), max_epochs=3)
    engine_of(Checkpoint(tmp_path)).run(batches(4), max_epochs=1)
    resumed = engine_of(Checkpoint(tmp_path, resume=True))
    resumed.run(batches(4), max_epochs=3)
    assert_same(resumed.model, whole.model)
    plain = mlp(5, 8, 1)
    optimizer = TwoInOne(plain.parameters())
    for inputs, targets in batches(4) * 3:
        for parameter in plain.parameters():
            parameter.grad = None
        mse_loss(plain(inputs), targets).backward()
        optimizer.step()
    assert_same(whole.model, plain)


@pytest.mark.moderate
@pytest.mark.parametrize("compiled_first", quick([False, True], True))
def test_names_that_differ_by_compilation_alone_are_the_same(compiled_first: bool) -> None:
    def model(compiled: bool) -> nn.Module:
        return torch.compile(mlp(5, 8, 1), backend="eager") if compiled else mlp(5, 8, 1)  # type: ignore[return-value]

    first, second = build(model(compiled_first)), build(model(not compiled_first))
    first.run(batches(4), max_epochs=1)
    second.load_state_dict(first.state_dict())
    second.run(batches(4), max_epochs=2)
    first.run(batches(4), max_epochs=2)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    third = build(model(compiled_first))
    third.load_weights(second.weights())


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.rand(5), torch.zeros(1)


class KeepsPosition:
    """Data with workers, as far as it says, and with a position of its own; torchdata's loader is another one."""

    def __init__(self, dataset: Any, workers: int) -> None:
        self.dataset, self.num_workers, self.position = dataset, workers, 0

    def __iter__(self) -> Any:
        for number in range(self.position, 3):
            self.position = number + 1
            yield torch.ones(4, 5), torch.zeros(4, 1)
        self.position = 0

    def __len__(self) -> int:
        return 3

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize(
    ("dataset", "workers", "at", "reported"),
    [
        (Drawing(), 2, 1, True),
        (Drawing(), 2, 5, True),
        (Drawing(), 2, 3, False),  # the next epoch seeds its workers as it would have
        (Drawing(), 0, 1, False),
        (TensorDataset(torch.ones(12, 5), torch.zeros(12, 1)), 2, 1, False),
    ],
    ids=["first batch", "later epoch", "end of an epoch", "no workers", "no draws"],
)
def test_a_resume_inside_an_epoch_says_that_workers_do_not_continue_their_draws(
    dataset: Any, workers: int, at: int, reported: bool
) -> None:
    engine, states = trained(), list[Any]()
    engine.connect(Events.ITERATION_COMPLETED(once=at), lambda engine: states.append(engine.state_dict()))
    engine.run(KeepsPosition(dataset, workers), max_epochs=2)
    assert not engine.findings.of_run().of("W24")
    resumed = trained()
    resumed.load_state_dict(states[0])
    with (
        pytest.warns(FindingWarning, match="W24: the KeepsPosition continues after batch .*2 workers")
        if reported
        else quiet()
    ):
        resumed.run(KeepsPosition(dataset, workers), max_epochs=2)
    assert len(resumed.findings.of_run().of("W24")) == reported


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # called by torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_exactly_or_says_so(workers: int) -> None:
    needs("interop", "torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(Drawing(), 4, shuffle=True, num_workers=workers)

    engine, states = trained(), list[Any]()
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: states.append(engine.state_dict()))
    engine.run(loader(), max_epochs=2)
    resumed = trained()
    resumed.load_state_dict(states[0])
    with pytest.warns(FindingWarning, match="W24: the StatefulDataLoader") if workers else quiet():
        resumed.run(loader(), max_epochs=2)
    if workers == 0:
        assert_same(resumed.model, engine.model)


def toggled(engine: Engine, batch: Any) -> torch.Tensor:
    engine.model[0].requires_grad_(engine.state.iteration % 2 == 0)
    return mse_loss(engine.model(batch[0]), batch[1])


def lower_the_rate(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.05


def test_what_functions_of_the_users_change_before_it_matters_is_information() -> None:
    engine = trained()
    engine.run(batches(4), max_epochs=1)
    other = trained(lr=0.05)
    other.connect(Events.CHECKPOINT_LOADED, lower_the_rate)
    other.load_state_dict(engine.state_dict())
    other.run(batches(4), max_epochs=2)
    [found] = other.findings.of_run().of("W32")
    assert (found.severity, found.sentence[:34]) == ("info", "before your functions run, the set")


def test_a_step_that_freezes_and_unfreezes_resumes_with_what_it_froze_last() -> None:
    engines = [Engine(Update.from_function(toggled, SGD, lr=0.1), model=mlp(5, 8, 1), seed=0) for _ in range(2)]
    engines[0].run(batches(3), max_epochs=1)
    engines[1].load_state_dict(engines[0].state_dict())
    engines[1].run(batches(3), max_epochs=2)
    assert [one.severity for one in engines[1].findings.of_run().of("W32")] == ["info"]
