"""What looks wrong with data is noticed as a run begins; the single cases are among the mistakes."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from signalfire import Engine, Events, FindingWarning, Update
from signalfire.findings.data_checks import report_different, report_workers, values_of_first_batch
from signalfire.handlers import DistributedDataParallel
from tests.kit import SGD, batches, build, finished, linear
from tests.processes import run_together


def on_data_of_another_length() -> str:
    distributed = DistributedDataParallel()
    engine = build(linear(5, 1), distributed)
    with pytest.raises(ValueError, match="sharded") as caught:
        engine.run(batches(4 + distributed.processes.rank), max_epochs=1)
    return str(caught.value)


@pytest.mark.moderate
def test_ranks_with_data_of_different_lengths_are_refused_on_all_of_them() -> None:
    one, other = run_together(on_data_of_another_length, 2)
    assert one == other
    assert "its length differs between them: rank 0: 4 batches, rank 1: 5 batches; give all ranks the same data" in one


def test_an_endless_iterator_is_trained_on_within_bounds() -> None:
    engine = build(linear(5, 1))
    engine.run(itertools.cycle(batches()), max_iters=8)
    assert engine.updates[0].steps == 8
    engine = build(linear(5, 1))
    engine.run(itertools.cycle(batches()), max_epochs=2, epoch_length=4)
    assert engine.updates[0].steps == 8


def test_a_run_whose_every_step_is_skipped_on_purpose_is_no_loss_that_was_forgotten() -> None:
    def skip(engine: Engine) -> None:
        engine.state.update.skip("warming up")

    engine = build(linear(5, 1))
    engine.connect(Events.UPDATE_STARTED, skip)
    engine.run(batches(), max_epochs=2)
    assert "W29" not in [one.code for one in engine.findings.of_run()]


def test_a_run_that_resumes_where_only_the_end_of_an_epoch_is_left_made_no_iteration_to_judge() -> None:
    def skip(engine: Engine) -> None:
        engine.state.update.skip("warming up")

    states: list[dict[str, Any]] = []
    engine, other = build(linear(5, 1)), build(linear(5, 1))
    engine.connect(Events.UPDATE_STARTED, skip)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()))
    engine.run(batches(), max_epochs=1)
    other.load_state_dict(states[-1])
    other.run(batches(), max_epochs=1)
    assert other.state.iteration == engine.state.iteration
    assert "W29" not in [one.code for one in other.findings.of_run()]


INTERACTIVE = """
import sys, torch
from torch.utils.data import DataLoader, Subset, TensorDataset
from tests.kit import build, linear

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((5,), float(i)), torch.tensor([float(i)])

def collate(samples):
    return torch.utils.data.default_collate(samples)

plain = TensorDataset(torch.ones(8, 5), torch.ones(8, 1))
loader = {
    "dataset": lambda: DataLoader(Squares(), 4, num_workers=1, multiprocessing_context="spawn"),
    "subset": lambda: DataLoader(Subset(Squares(), [0, 1, 2, 3]), 4, num_workers=1, multiprocessing_context="spawn"),
    "collate": lambda: DataLoader(plain, 4, num_workers=1, multiprocessing_context="forkserver", collate_fn=collate),
    "fork": lambda: DataLoader(Squares(), 4, num_workers=1, multiprocessing_context="fork"),
    "no workers": lambda: DataLoader(Squares(), 4),
    "importable": lambda: DataLoader(plain, 4, num_workers=1, multiprocessing_context="spawn"),
}[sys.argv[1]]()
try:
    build(linear(5, 1)).run(loader, max_epochs=1)
except ValueError as error:
    print(error)
else:
    print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "printed"),
    [
        ("dataset", "the data's dataset (Squares) was defined in an interactive session, so the 1 worker processes (start "
                    "method 'spawn') cannot import it"),
        ("subset", "the data's dataset (Squares) was defined in an interactive session"),
        ("collate", "the data's collate_fn (collate) was defined in an interactive session, so the 1 worker processes "
                    "(start method 'forkserver')"),
        ("fork", "trained"),
        ("no workers", "trained"),
        ("importable", "trained"),
    ],
)  # fmt: skip
def test_workers_that_cannot_find_what_an_interactive_session_defined_are_refused(data: str, printed: str) -> None:
    done = finished("-c", INTERACTIVE, data)
    assert printed in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("data", [torch.randn(16, 5).split(4), tuple(torch.randn(4, 5) for _ in range(3))])
def test_a_tuple_of_batches_is_no_tuple_of_inputs_and_targets(data: Any) -> None:
    def loss(engine: Engine, batch: Tensor) -> Tensor:
        return mse_loss(engine.model(batch), batch)

    Engine(Update.from_function(loss, SGD), model=linear(5, 5), seed=0).run(data, max_epochs=1)


class Synthetic(IterableDataset[Any]):
    """Samples that are drawn, and are others in each worker."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        for _ in range(self.samples):
            yield torch.randn(5), torch.randn(1)


@pytest.mark.moderate
def test_workers_that_draw_their_samples_read_none_twice() -> None:
    loader = DataLoader(Synthetic(4), 2, num_workers=2, multiprocessing_context="fork")
    build(linear(5, 1)).run(loader, max_epochs=1)


class Frozen(nn.Sequential):
    """Its normalization keeps the statistics that it has."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[0].eval()
        return self


def test_a_normalisation_that_is_in_eval_mode_does_not_normalise_over_the_batch() -> None:
    samples = TensorDataset(torch.randn(3, 5, 2), torch.randn(3, 1))
    data, rest = DataLoader(samples, 1, shuffle=True), (nn.Flatten(), linear(10, 1))
    build(Frozen(nn.BatchNorm1d(5), *rest)).run(data, max_epochs=1)
    with pytest.warns(
        FindingWarning, match=r"W27: the layer 'model.0' \(BatchNorm1d\) .* of shape \[1, 5, 2\] has a single"
    ):
        build(nn.Sequential(nn.BatchNorm1d(5), *rest)).run(data, max_epochs=1)


def test_an_item_that_holds_several_samples_is_no_single_sample() -> None:
    items = TensorDataset(torch.randn(3, 4, 5, 2), torch.randn(3, 4, 1))
    model = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(5), nn.Flatten(), linear(10, 1), nn.Unflatten(0, (1, 4)))
    build(model).run(DataLoader(items, 1, shuffle=True), max_epochs=1)


@pytest.mark.parametrize("replaced", [False, True])
def test_batches_that_are_replaced_or_changed_before_the_first_are_not_changed_between_epochs(replaced: bool) -> None:
    data = batches(3)
    for _, target in data:
        target.mul_(1.0)  # its version is that of a tensor that was changed
    engine = build(linear(5, 1))

    def center(engine: Engine) -> None:
        for inputs, _ in data:
            inputs.sub_(0.5)

    def label(engine: Engine) -> None:
        place = engine.state.epoch_iteration - 1
        data[place] = data[place][0], engine.state.update.output.detach()

    if replaced:
        engine.connect(Events.ITERATION_COMPLETED, label)
    else:
        engine.connect(Events.EPOCH_STARTED(once=1), center)
    engine.run(data, max_epochs=2)
    assert not engine.findings.of_run().of("W28")


def test_a_batch_that_lies_where_a_replaced_one_was_is_not_a_changed_one() -> None:
    data: list[Any] = [list(batch) for batch in batches(2)]
    engine = build(linear(5, 1))

    def replace(engine: Engine) -> None:
        replaced = id(data[0][1])
        data[0][1] = None
        kept = [torch.zeros(4, 1)]
        while id(kept[-1]) != replaced and len(kept) < 10_000:
            kept.append(torch.zeros(4, 1))
        assert id(kept[-1]) == replaced
        data[0][1] = kept[-1].add_(1.0)

    engine.connect(Events.ITERATION_COMPLETED(once=2), replace)
    engine.run(data, max_epochs=2)
    assert not engine.findings.of_run().of("W28")


@pytest.mark.parametrize("whole", [True, False])
def test_a_function_that_collects_batches_first_may_return_a_loss_later(whole: bool) -> None:
    collected: list[Any] = []

    def forward(engine: Engine, batch: Any) -> Tensor | None:
        collected.append(batch)
        return None if len(collected) < 5 else engine.model(batch[0])

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return mse_loss(output, batch[1])

    def both(engine: Engine, batch: Any) -> Tensor | None:
        output = forward(engine, batch)
        if output is not None:
            return loss(engine, output, batch)
        return None

    update = Update(function=both, optimizer=SGD) if whole else Update(forward, loss, SGD)
    engine = Engine(update, model=linear(5, 1), seed=0)
    engine.run(batches(3), max_epochs=3)
    assert engine.updates[0].steps == 5
    assert not engine.findings.of_run().of("W29")
    collected.clear()
    engine.reset()
    with pytest.warns(FindingWarning, match="W29"):
        engine.run(batches(3), max_epochs=1)


def test_first_batches_of_other_texts_or_numbers_are_not_equal() -> None:
    labels = torch.tensor([0, 1])
    same, *others = [
        values_of_first_batch([{"texts": texts, "labels": labels, "part": part}])
        for texts, part in ((("a", "b"), 0), (("a", "b"), 0), (("a", "c"), 0), (("a", "b"), 1))
    ]
    assert [one == same for one in others] == [True, False, False]


def critic(engine: Engine, batch: Any) -> None:
    mse_loss(engine.modules["critic"](batch[0]), batch[1])  # without return


def made_by_hand(engine: Engine, batch: Any) -> None:
    (optimizer,) = (one.optimizer for one in engine.updates if one.name == "critic")
    assert optimizer is not None
    mse_loss(engine.modules["critic"](batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def at_times(engine: Engine, batch: Any) -> Tensor | None:
    return mse_loss(engine.modules["critic"](batch[0]), batch[1]) if engine.state.iteration > 100 else None


@pytest.mark.whole
@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (critic, ["W29"]),
        (made_by_hand, []),
        (at_times, []),
    ],
)
def test_one_of_two_updates_whose_function_always_returns_none(function: Any, reported: Any) -> None:
    def actor(engine: Engine, batch: Any) -> Tensor:
        return mse_loss(engine.modules["actor"](batch[0]), batch[1])

    updates = [
        Update(function=actor, optimizer=SGD, parameters="actor", name="actor"),
        Update(function=function, optimizer=SGD, parameters="critic", name="critic"),
    ]
    engine = Engine(updates, model={"actor": linear(5, 1), "critic": linear(5, 1)}, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        engine.run(batches(3), max_epochs=2)
    found = engine.findings.of_run().of("W29")
    assert [one.code for one in found] == reported
    assert all(
        "update 'critic' ran no step in 6 iterations, because the function 'critic'" in str(one) for one in found
    )


class Collector:
    """Has a loss once it has collected a few batches."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def learn(self, engine: Engine, batch: Any) -> Tensor | None:
        self.batches.append(batch)
        if len(self.batches) < 5:
            return None
        return mse_loss(engine.model(batch[0]), batch[1])

    def __call__(self, engine: Engine, batch: Any) -> Tensor | None:
        if (loss := self.learn(engine, batch)) is not None:
            return loss
        return None


def timed(function: Any) -> Any:
    @functools.wraps(function)
    def call(*given: Any) -> Any:
        return function(*given)

    return call


@pytest.mark.parametrize("make", [lambda: Collector().learn, Collector, lambda: timed(Collector().learn)])
def test_a_method_an_object_or_a_wrapped_function_may_return_a_loss_later(make: Any) -> None:
    engine = Engine(Update(function=make(), optimizer=SGD), model=linear(5, 1), seed=0)
    engine.run(batches(3), max_epochs=2)
    assert (engine.updates[0].steps, len(engine.findings.of_run().of("W29"))) == (2, 0)


def test_rows_of_indices_and_a_data_set_of_batches_are_no_single_samples() -> None:
    inputs, targets = torch.randn(12, 5), torch.randn(12, 1)
    update = Update.from_function(lambda engine, rows: mse_loss(engine.model(inputs[rows]), targets[rows]), SGD)
    Engine(update, model=linear(5, 1), seed=0).run(torch.arange(12).view(3, 4), max_epochs=1)
    build(linear(5, 1)).run(TensorDataset(inputs.view(3, 4, 5), targets.view(3, 4, 1)), max_epochs=1)  # type: ignore[arg-type]
    with pytest.warns(FindingWarning, match="W23"):
        build(linear(5, 1)).run(TensorDataset(inputs, targets), max_epochs=1)  # type: ignore[arg-type]


def test_what_collates_itself_may_take_a_batch_of_the_data_set() -> None:
    items = TensorDataset(torch.randn(3, 4, 5), torch.randn(3, 4, 1))
    loader = DataLoader(items, 1, shuffle=True, collate_fn=lambda given: given[0])
    build(nn.Sequential(nn.BatchNorm1d(5), linear(5, 1))).run(loader, max_epochs=1)


class Drawn(Dataset[Any]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((5,), self.generator.normal()).float(), torch.zeros(1)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_draw_is_said_with_its_conditions(persistent: bool) -> None:
    loader = DataLoader(Drawn(), 2, shuffle=True, num_workers=1, persistent_workers=persistent)
    engine = Engine(Update.supervised(mse_loss, SGD), model=linear(5, 1), seed=0)
    with pytest.warns(FindingWarning, match="W24.*from one of these copies without seeding it") as caught:
        report_workers(engine, loader)
    assert ("in every epoch" in str(caught[0].message)) is not persistent


def test_what_is_not_a_number_on_all_ranks_is_not_different() -> None:
    engine = build(linear(5, 1))
    report_different(engine, [], [(1.0, float("nan")), (1.0, float("nan"))])
    with pytest.warns(FindingWarning, match="W25"):
        report_different(engine, [], [(1.0, float("nan")), (2.0, float("nan"))])
