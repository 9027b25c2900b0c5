"""Testing with the best checkpoint, in the same process and in a new one; what an evaluator inherits from a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from signalfire import DataError, Engine, Events, Handler, Phase, ReloadedData, Update, on, seed_everything
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    DeviceTransfer,
    FastDevRun,
    LimitBatches,
    Metrics,
    MixedPrecision,
    OverfitBatches,
    Predictions,
    TruePrecision,
    Validation,
)
from signalfire.runs.evaluation import check_evaluable
from signalfire.testing import fingerprint
from tests import kit
from tests.kit import build, mlp

UPDATE = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.2))


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.BatchNorm1d(8))


def batches(seed: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return kit.batches(count, seed=seed)


def evaluator_of(model: nn.Module, *handlers: Any) -> Engine:
    engine = Engine(UPDATE.evaluation(), model=model)
    engine.attach(Metrics(loss=Average()), *handlers)
    return engine


def trained(folder: Path, keep: int = 1) -> tuple[Engine, Checkpoint, list[dict[str, Tensor]], list[float]]:
    """A trainer after its run, its checkpoints, and the weights and validation losses of every epoch."""
    model = network()
    trainer = Engine(UPDATE, model=model, seed=0)
    best = Checkpoint(folder, monitor="loss", keep=keep, name="best")
    trainer.attach(Validation(evaluator_of(model), batches(2)), best)
    weights: list[dict[str, Tensor]] = []
    losses: list[float] = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def note(engine: Engine) -> None:
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
        losses.append(engine.state.metrics["loss"])

    seed_everything(0)
    trainer.run(batches(1), max_epochs=8)
    return trainer, best, weights, losses


def measured(weights: dict[str, Tensor], data: list[tuple[Tensor, Tensor]]) -> float:
    model = network().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return sum(nn.functional.mse_loss(model(x), y).item() * len(x) for x, y in data) / sum(len(x) for x, _ in data)


def test_testing_uses_the_best_weights_and_not_the_last(tmp_path: Path) -> None:
    _, best, weights, losses = trained(tmp_path)
    of_best = losses.index(min(losses))
    assert of_best != len(losses) - 1  # otherwise nothing is shown
    assert best.best is not None

    predictions = Predictions()
    tester = evaluator_of(network(), predictions)
    tester.load_weights(Checkpoint.load(best.best))
    assert tester.run(batches(3)).metrics["loss"] == measured(weights[of_best], batches(3))
    assert tester.run(batches(2)).metrics["loss"] == losses[of_best]
    model = network().eval()
    model.load_state_dict(weights[of_best])
    with torch.no_grad():
        assert torch.equal(predictions.outputs, torch.cat([model(x) for x, _ in batches(2)]))


def test_the_trainers_own_model_may_be_tested_with_the_best_weights(tmp_path: Path) -> None:
    trainer, best, weights, losses = trained(tmp_path)
    tester = evaluator_of(trainer.model)
    assert tester.run(batches(3)).metrics["loss"] == measured(weights[-1], batches(3))
    assert best.best is not None
    tester.load_weights(Checkpoint.load(best.best))
    expected = measured(weights[losses.index(min(losses))], batches(3))
    assert tester.run(batches(3)).metrics["loss"] == expected


def test_best_and_last_are_files_that_are_kept(tmp_path: Path) -> None:
    _, best, _, losses = trained(tmp_path, keep=3)
    order = sorted(range(len(losses)), key=losses.__getitem__)[:3]
    iterations = [4 * (epoch + 1) for epoch in order]
    assert best.best is not None
    assert best.last is not None
    assert best.best.is_dir()
    assert best.last.is_dir()
    assert Checkpoint.load(best.best)["engine"]["iteration"] == iterations[0]
    assert Checkpoint.load(best.last)["engine"]["iteration"] == max(iterations)


def test_without_a_monitor_there_is_a_last_one_and_no_best(tmp_path: Path) -> None:
    last = Checkpoint(tmp_path, every="1ep", keep=2)
    assert (last.best, last.last) == (None, None)
    trainer = Engine(UPDATE, model=network(), seed=0)
    trainer.attach(last)
    trainer.run(batches(1), max_epochs=3)
    assert last.best is None
    assert last.last is not None
    assert Checkpoint.load(last.last)["engine"]["iteration"] == 12


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    _, best, _, _ = trained(tmp_path)
    assert best.best is not None
    other = evaluator_of(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    with pytest.raises(ValueError, match=r"'model' differs in 2\.weight .*, 2\.bias.*WarmStart"):
        other.load_weights(Checkpoint.load(best.best))


# ---- what an evaluator inherits -----------------------------------------------------------------------------------


def validated(*handlers: Handler, own: tuple[Handler, ...] = (), **options: Any) -> tuple[Engine, list[float]]:
    """A trainer after two epochs, with the validation losses; these evaluators measure what a loop without them would."""
    model = network()
    evaluator = evaluator_of(model, *own)
    trainer = build(model, Validation(evaluator, batches(2), **options), *handlers)
    losses: list[float] = []
    trainer.connect(Events.EPOCH_COMPLETED, lambda engine: losses.append(engine.state.metrics["loss"]))
    seed_everything(0)
    trainer.run(batches(1), max_epochs=2)
    return trainer, losses


def plain_loop(*, evaluate_in: torch.dtype | None) -> list[float]:
    """The validation losses of a plain loop under bfloat16 autocast, evaluated under the autocast of a dtype or none."""
    model, losses = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in batches(1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=evaluate_in, enabled=evaluate_in is not None):
            losses.append(sum(nn.functional.mse_loss(model(x), y).item() * 4 for x, y in batches(2)) / 16)
        model.train()
    return losses


def test_an_evaluator_runs_in_the_mixed_precision_of_the_trainer() -> None:
    trainer, losses = validated(MixedPrecision("bf16"))
    assert losses == plain_loop(evaluate_in=torch.bfloat16)
    assert "inherited by evaluators: mixed_precision.autocast" in str(trainer)
    assert validated(MixedPrecision("bf16"), own=(MixedPrecision("bf16"),))[1] == losses


def test_what_is_inherited_may_be_declined_or_replaced() -> None:
    assert validated(MixedPrecision("bf16"), inherit=False)[1] == plain_loop(evaluate_in=None)
    assert validated(MixedPrecision("bf16"), own=(MixedPrecision("fp16"),))[1] == plain_loop(evaluate_in=torch.float16)
    model = network()
    trainer = build(model, MixedPrecision("bf16"))
    trainer.run(batches(1), max_epochs=1)
    evaluator = evaluator_of(model)
    inherited = trainer.evaluate(evaluator, batches(2))["loss"]
    assert trainer.evaluate(evaluator, batches(2), inherit=False)["loss"] != inherited
    trainer.detach("mixed_precision")
    assert trainer.evaluate(evaluator, batches(2))["loss"] != inherited


def test_an_evaluator_inherits_true_precision_also_before_the_first_run() -> None:
    model = network()
    trainer = build(model, TruePrecision("fp64"))
    found: list[torch.dtype] = []
    evaluator = evaluator_of(model)
    evaluator.connect(Events.FORWARD_COMPLETED, lambda engine: found.append(engine.state.update.output.dtype))
    trainer.evaluate(evaluator, batches(2, 1))
    trainer.run(batches(1), max_epochs=1)
    trainer.evaluate(evaluator, batches(2, 1))
    assert found == [torch.float64] * 2


class Moving(Handler):
    """Converts batches as a handler of the user's own."""

    @on(Events.GET_BATCH_COMPLETED, phase=Phase.PREPARE)
    def scale(self, engine: Engine) -> None:
        x, y = engine.state.batch
        engine.state.batch = 2 * x, y


def inputs_seen(evaluator: Engine) -> list[float]:
    seen: list[float] = []
    evaluator.connect(Events.FORWARD_STARTED, lambda engine: seen.append(engine.state.batch[0].sum().item()))
    return seen


ONES = [(torch.ones(2, 5), torch.ones(2, 1))]


def test_the_handlers_that_prepare_batches_are_inherited_and_leave_nothing_behind() -> None:
    model = network()
    trainer, evaluator = build(model, Moving(), DeviceTransfer("cpu")), evaluator_of(model)
    wiring, seen = str(evaluator), inputs_seen(evaluator)
    trainer.evaluate(evaluator, ONES)
    trainer.handlers["moving"].enabled = False
    trainer.evaluate(evaluator, ONES)
    assert seen == [20.0, 10.0]
    evaluator.detach(next(one.receiver for one in evaluator.signal(Events.FORWARD_STARTED).connections))
    assert str(evaluator) == wiring
    assert "inherited by evaluators: device_transfer.move_model, device_transfer.move_batch" in str(trainer)


def test_a_function_that_prepares_batches_is_inherited_unless_it_is_connected_there_too() -> None:
    model = network()
    trainer, evaluator = build(model), evaluator_of(model)

    def double(engine: Engine) -> None:
        engine.state.batch = (2 * engine.state.batch[0], engine.state.batch[1])

    trainer.connect(Events.GET_BATCH_COMPLETED, double, phase=Phase.PREPARE)
    trainer.connect(Events.GET_BATCH_COMPLETED(every=1), lambda engine: 1 / 0, phase=Phase.PREPARE)
    trainer.connect(Events.GET_BATCH_COMPLETED, lambda engine: 1 / 0)
    seen = inputs_seen(evaluator)
    trainer.evaluate(evaluator, ONES)
    evaluator.connect(Events.GET_BATCH_COMPLETED, double, phase=Phase.PREPARE)
    trainer.evaluate(evaluator, ONES)
    assert seen == [20.0, 20.0]


def test_an_evaluation_inside_an_evaluation_inherits_it_too_and_once() -> None:
    model = network()
    inner, outer = evaluator_of(model), Engine(UPDATE.evaluation(), model=model)
    seen = inputs_seen(inner)
    outer.attach(Validation(inner, ONES, prefix="inner_"))
    trainer = build(model, Moving(), Validation(outer, ONES))
    trainer.run(batches(1), max_epochs=1)
    assert seen == [20.0]


def test_after_an_error_in_an_evaluation_nothing_is_left_behind() -> None:
    model = network()
    trainer, evaluator = build(model, Moving(), MixedPrecision("bf16")), evaluator_of(model)
    wiring = str(evaluator)
    with pytest.raises(ValueError, match="unpack"):
        trainer.evaluate(evaluator, [torch.ones(3, 5)])
    assert str(evaluator) == wiring


# ---- the data of an evaluation ------------------------------------------------------------------------------------


def test_reloaded_data_is_loaded_for_the_epoch_of_the_trainer() -> None:
    for every, expected in ((1, [0, 1, 2, 3]), (2, [0, 2])):
        loaded: list[int] = []

        def load(epoch: int, loaded: list[int] = loaded) -> Any:
            loaded.append(epoch)
            return batches(epoch)

        model = network()
        evaluator = evaluator_of(model)
        trainer = build(model, Validation(evaluator, ReloadedData(load, every=every), every="0.5ep"))
        trainer.run(batches(1), max_epochs=4)
        assert loaded == expected


def test_reloaded_data_may_be_an_iterator() -> None:
    model = network()
    trainer = build(model, Validation(evaluator_of(model), ReloadedData(lambda epoch: iter(batches(2))), every="2it"))
    assert trainer.run(batches(1), max_epochs=2).epoch == 2


def sanity_lengths(*handlers: Handler) -> list[int]:
    model = network()
    evaluator = evaluator_of(model)
    lengths: list[int] = []
    evaluator.connect(Events.COMPLETED, lambda engine: lengths.append(engine.state.iteration))
    build(model, Validation(evaluator, batches(2), sanity=3), *handlers).run(batches(1), max_epochs=1)
    return lengths


def test_a_sanity_check_obeys_what_limits_the_data() -> None:
    assert sanity_lengths() == [3, 4]
    assert sanity_lengths(LimitBatches(validation=2)) == [2, 2]
    assert sanity_lengths(FastDevRun(1)) == [1, 1]
    assert sanity_lengths(OverfitBatches(1, validation=True)) == [1, 1]


def test_a_sanity_check_inherits_the_precision() -> None:
    model = network()
    validation = Validation(evaluator_of(model), batches(2), sanity=1)
    assert build(model, validation, TruePrecision("bf16")).run(batches(1), max_epochs=1).epoch == 1


def test_data_without_a_batch_is_refused_as_it_is_given() -> None:
    with pytest.raises(ValueError, match=r"Validation\(data=\{'far': \[\]\}\): the data is empty"):
        Validation(evaluator_of(network()), {"near": batches(2), "far": []})


def test_data_that_lost_its_batches_is_refused_as_the_run_starts() -> None:
    model = network()
    data = {"near": batches(2), "far": batches(1)}
    trainer = build(model, Validation(evaluator_of(model), data))
    data["far"].clear()
    with pytest.raises(DataError, match=r"'validation', data 'far': the data \(list\) is empty"):
        trainer.run(batches(1), max_epochs=1)
    assert trainer.state.epoch == 0
    fine: list[Any] = [batches(2), iter(batches(2)), ReloadedData(batches)]
    for one in fine:
        check_evaluable(trainer, evaluator_of(model), one, "here")


class Stream(IterableDataset[Any]):
    """Data without a length, which counts its passes and draws by its own generator."""

    def __init__(self, count: int, size: tuple[int, ...] = ()) -> None:
        self.count, self.size, self.passes = count, size, 0
        self.own = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        for _ in range(self.count):
            yield torch.rand(*self.size, 5) * self.passes, torch.full((*self.size, 1), self.own.uniform())


class Once(Stream):
    """Data with a single iterator."""

    def __init__(self) -> None:
        self.rest = iter(batches(2))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.rest


class Queued(Stream):
    """Data that takes each batch out of a queue."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[Any] = SimpleQueue()
        for batch in batches(2):
            self.waiting.put(batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while not self.waiting.empty():
            yield self.waiting.get()


class Recording(Stream):
    """Data that depends on how often it was read, according to a list."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.read.append(len(self.read))
        yield torch.full((4, 5), float(len(self.read))), torch.zeros(4, 1)


@pytest.mark.parametrize("data_of", [lambda: DataLoader(Stream(0), 2), lambda: Stream(0)])
def test_data_without_a_length_that_has_no_batch_is_refused_as_the_run_starts(data_of: Any) -> None:
    trainer = build(network(), Validation({"far": data_of()}))
    with pytest.raises(
        DataError, match=r"'validation', data 'far': the data \(\w+\) is empty: it yields no batch; pass"
    ):
        trainer.run(batches(1), max_epochs=1)
    assert trainer.state.iteration == 0


@pytest.mark.parametrize(
    "data_of", [lambda: DataLoader(Stream(4), 2), lambda: Stream(4, (2,)), Once, Queued, Recording]
)
def test_looking_for_a_first_batch_leaves_no_trace(data_of: Any) -> None:
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        trainer = build(network())
        validation = Validation(data_of())
        if looks:
            trainer.attach(validation)
        else:
            evaluator = evaluator_of(trainer.model)
            trainer.on(Events.EPOCH_COMPLETED)(
                lambda engine, to=evaluator, data=validation.data: engine.evaluate(to, data, prefix="val_")
            )
        trainer.run(batches(1), max_epochs=1 if data_of in (Once, Queued) else 2)
        found.append((trainer.state.metrics["val_loss"], torch.rand(1)))
    assert found[0] == found[1]


# ---- the model as an evaluation would see it --------------------------------------------------------------------------


def sampled(*handlers: Handler, sampling: bool) -> tuple[Engine, list[Any]]:
    """A trainer after its run, and what it sampled at the ends of the epochs."""
    torch.manual_seed(0)
    engine = build(mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.5)), *handlers)
    found: list[Any] = []

    @engine.on(Events.EPOCH_COMPLETED)
    def sample(engine: Engine) -> None:
        if sampling:
            with engine.evaluating():
                output = engine.model(torch.ones(4, 5))
                found.append((output.tolist(), output.dtype, output.requires_grad, engine.model.training))
                torch.rand(3)

    torch.manual_seed(1)
    engine.run(kit.batches(4), max_epochs=3)
    return engine, found


@pytest.mark.parametrize("kind", ["none", "average", "precision"])
def test_a_receiver_samples_from_the_model_that_evaluations_see_without_a_trace(kind: str) -> None:
    def handlers() -> list[Handler]:
        found: dict[str, list[Handler]] = {"none": [], "average": [EMA(0.5)], "precision": [MixedPrecision("bf16")]}
        return found[kind]

    plain, _ = sampled(*handlers(), sampling=False)
    engine, found = sampled(*handlers(), sampling=True)
    assert fingerprint(engine) == fingerprint(plain)
    assert all(part.training == other.training for part, other in zip(engine.model, plain.model, strict=True))
    output, dtype, requires_grad, training = found[-1]
    assert (requires_grad, training) == (False, False)
    assert dtype == (torch.bfloat16 if kind == "precision" else torch.float32)
    evaluator = Engine(Update.prediction(), model=engine.model)
    seen = []
    evaluator.connect(Events.FORWARD_COMPLETED, lambda engine: seen.append(engine.state.update.output.tolist()))
    engine.evaluate(evaluator, [(torch.ones(4, 5),)])
    assert output == seen[0]


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    engine = build(mlp(5, 8, 1, nn.Dropout(0.5)), EMA(0.5))
    engine.run(kit.batches(2), max_epochs=1)
    engine.model.train()
    before = [tensor.tolist() for tensor in engine.model.state_dict().values()], torch.get_rng_state().tolist()
    with pytest.raises(RuntimeError, match="mat1"), engine.evaluating():
        engine.model(torch.rand(2))
    assert engine.model.training
    assert torch.is_grad_enabled()
    assert (
        [tensor.tolist() for tensor in engine.model.state_dict().values()],
        torch.get_rng_state().tolist(),
    ) == before


@pytest.mark.parametrize("evaluates", ["a sample", "an evaluation"])
def test_within_the_autocast_of_a_forward_neither_uses_the_others_casts(evaluates: str) -> None:
    def trained(*, looks: bool) -> list[Tensor]:
        model = network()
        evaluator, engine = evaluator_of(model), Engine(UPDATE, model=model, seed=0)
        engine.attach(EMA(0.5), MixedPrecision("bf16"))
        in_autocast = []

        def look(engine: Engine) -> None:
            if evaluates == "an evaluation":
                engine.evaluate(evaluator, batches(2, 1))
                return
            with engine.evaluating():
                engine.model(batches(2)[0][0])

        if looks:
            engine.connect(Events.FORWARD_STARTED, look)
        engine.connect(Events.BACKWARD_COMPLETED, lambda engine: in_autocast.append(torch.is_autocast_enabled("cpu")))
        engine.run(batches(1), max_epochs=1)
        assert not any(in_autocast)
        return [*model.state_dict().values()]

    torch.manual_seed(0)
    expected = trained(looks=False)
    torch.manual_seed(0)
    assert all(map(torch.equal, trained(looks=True), expected))


def test_the_model_is_seen_as_evaluated_before_a_run_and_as_one_ends() -> None:
    engine = Engine(UPDATE, model=network())
    engine.attach(ema := EMA(0.5), MixedPrecision("bf16"))
    with engine.evaluating():
        assert engine.model(batches(2)[0][0]).dtype == torch.bfloat16
    seen: list[Tensor] = []

    def look(engine: Engine) -> None:
        with engine.evaluating():
            seen.append(engine.model[0].weight.detach().clone())

    engine.connect(Events.ENDED, look)
    engine.run(batches(1), max_epochs=1)
    assert torch.equal(seen[0], ema.parameter_copies()["model.0.weight"])


@pytest.mark.parametrize("call", ["run", "state_dict", "load_state_dict", "load_weights", "reset"])
def test_with_averages_in_place_the_trained_weights_are_neither_trained_nor_saved(call: str) -> None:
    engine = Engine(UPDATE, model=network())
    engine.attach(EMA(0.5))
    engine.run(batches(1), max_epochs=1)
    state, before = engine.state_dict(), fingerprint(engine)
    given: dict[str, Any] = {"run": batches(1), "load_state_dict": state, "load_weights": state}
    with (
        engine.evaluating(),
        pytest.raises(RuntimeError, match=rf"{call}\(\) was called during an evaluation, while the model holds"),
    ):
        getattr(engine, call)(*[given[call]] if call in given else [], **{"max_epochs": 2} if call == "run" else {})
    assert fingerprint(engine) == before
    engine.run(batches(1), max_epochs=2)


def test_an_evaluator_cannot_save_the_averages_as_the_weights_of_its_trainer() -> None:
    engine = Engine(UPDATE, model=network())
    engine.attach(EMA(0.5), validation := Validation(batches(1)))
    engine.run(batches(1), max_epochs=1)
    validation.evaluator.connect(Events.EPOCH_COMPLETED, lambda _: engine.state_dict())
    with pytest.raises(
        RuntimeError, match=r"state_dict\(\) was called during an evaluation, while the model holds averages"
    ):
        engine.test(batches(1))
    with pytest.raises(
        RuntimeError, match=r"state_dict\(\) was called during an evaluation, while the model holds averages"
    ):
        engine.run(batches(1), max_epochs=2)


class PreparingSometimes(Handler):
    """Prepares every evaluation, and every second one besides."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[str] = []

    @on(Events.EVALUATION_STARTED, phase=Phase.PREPARE)
    def prepare(self, engine: Engine) -> None:
        self.prepared.append("each")

    @on(Events.EVALUATION_STARTED(every=2), phase=Phase.PREPARE)
    def prepare_second(self, engine: Engine) -> None:
        self.prepared.append("second")


def test_what_counts_evaluations_is_not_called_where_none_is_counted() -> None:
    preparing = PreparingSometimes()
    engine = build(mlp(5, 8, 1), preparing)
    with engine.evaluating():
        assert preparing.prepared == ["each"]
    assert engine.signal(Events.EVALUATION_STARTED).fired == 0
