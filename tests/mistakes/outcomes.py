"""What a run shows only by its outcome, or by what is left behind: metrics, weights, logs, signals and folders."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, TensorDataset, WeightedRandomSampler

from signalfire import Engine, Events, Findings, Handler, Update, on
from signalfire.findings import Finding
from signalfire.findings.unattached import report
from signalfire.handlers import (
    Accuracy,
    Average,
    Checkpoint,
    CSVLogger,
    DistributedDataParallel,
    FastDevRun,
    GradientAccumulation,
    LRScheduling,
    Metrics,
    Preemption,
    TruncatedBPTT,
    Validation,
    cosine_with_warmup,
)
from tests.kit import SGD, batches, build, evaluator_of, mlp
from tests.mistakes.registry import mistake, said
from tests.processes import run_together


def blobs(count: int = 400, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples of a few classes that are easily told apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    return torch.randn(count, 5, generator=generator) + 4 * F.one_hot(labels, 5), labels


def classifier(*handlers: Handler, evaluated: Any, **metrics: Any) -> Engine:
    model = mlp(5, 8, 4)
    evaluator = evaluator_of(model, F.cross_entropy)
    evaluator.attach(Metrics(**(metrics or {"accuracy": Accuracy()}), name="measures"))
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=model, seed=0)
    engine.attach(Validation(evaluator, evaluated), *handlers)
    return engine


def in_batches(inputs: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(50), labels.split(50), strict=True))


# ---- what the metrics show --------------------------------------------------------------------------------------------


@mistake("W64")
def inputs_and_labels_shuffled_apart(right: bool) -> None:
    inputs, labels = blobs()
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    train = in_batches(inputs[order], labels[order] if right else labels.roll(1)[order])
    classifier(evaluated=in_batches(*blobs(seed=2))).run(train, max_epochs=4)


@mistake("W64")
def a_rate_with_which_nothing_is_learned(right: bool) -> None:
    engine = classifier(evaluated=in_batches(*blobs(seed=2)))
    engine.updates[0].take_optimizer(torch.optim.SGD(engine.model.parameters(), lr=0.1 if right else 1e-6))
    with torch.no_grad():
        engine.model[-1].bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    engine.run(in_batches(*blobs()), max_epochs=4)


@mistake("W60")
def validation_data_that_is_not_scaled(right: bool) -> None:
    inputs, labels = blobs(seed=2)
    classifier(evaluated=in_batches(inputs if right else 100 * inputs, labels)).run(in_batches(*blobs()), max_epochs=1)


@mistake("W73")
def a_metric_that_broadcasts(right: bool) -> None:
    def error(output: Tensor, target: Tensor) -> Tensor:
        return (output - (target if right else target.squeeze(1))).abs().mean()

    model = mlp(5, 8, 1)
    evaluator = evaluator_of(model)
    evaluator.attach(Metrics(error=error, name="errors"))
    build(model, Validation(evaluator, batches(2))).run(batches(), max_epochs=1)


def f1_score(output: Tensor, target: Tensor) -> float:
    return float((output.argmax(1) == target).float().mean())


@mistake("W04")
def a_score_of_all_samples_averaged_over_batches(right: bool) -> None:
    def score(output: Tensor, target: Tensor) -> float:
        return f1_score(output, target)

    classifier(evaluated=in_batches(*blobs(seed=2)), score=Accuracy() if right else score).run(
        in_batches(*blobs()), max_epochs=1
    )


@mistake("W04")
def a_root_of_means_averaged_over_batches(right: bool) -> None:
    model = mlp(5, 8, 1)
    evaluator = evaluator_of(model)
    error = Average(lambda output, target: F.mse_loss(output, target) if right else F.mse_loss(output, target).sqrt())
    evaluator.attach(Metrics(error=error, name="errors"))
    build(model, Validation(evaluator, batches(2))).run(batches(), max_epochs=1)


@mistake("W65")
def an_annealed_loss_that_the_evaluator_computes_anew(right: bool) -> None:
    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch[1]) + engine.state.iteration / 100 * output.square().mean()

    def loss_of_trainer(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch[1]) + trainer.state.iteration / 100 * output.square().mean()

    model = mlp(5, 8, 1)
    update = Update(lambda engine, batch: engine.model(batch[0]), loss_of_trainer if right else loss, SGD)
    trainer = Engine(update, model=model, seed=0)
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average()))
    trainer.attach(Validation(evaluator, batches(2)))
    trainer.run(batches(), max_epochs=1)


# ---- data -------------------------------------------------------------------------------------------------------------


@mistake("W20")
def a_validation_whose_samples_are_drawn(right: bool) -> None:
    data = TensorDataset(*blobs(40, seed=2))
    sampler = SequentialSampler(data) if right else WeightedRandomSampler([1.0] * 40, 40)
    classifier(evaluated=DataLoader(data, 10, sampler=sampler)).run(in_batches(*blobs()), max_epochs=1)


@mistake("W20")
def a_validation_with_replacement(right: bool) -> None:
    data = TensorDataset(*blobs(40, seed=2))
    sampler = RandomSampler(data, replacement=not right)
    classifier(evaluated=DataLoader(data, 10, sampler=sampler)).run(in_batches(*blobs()), max_epochs=1)


@mistake("W59")
def a_validation_that_drops_a_third_of_its_samples(right: bool) -> None:
    data = TensorDataset(*blobs(59, seed=2))
    classifier(evaluated=DataLoader(data, 20, drop_last=not right)).run(in_batches(*blobs()), max_epochs=1)


@said("W59: each epoch leaves out 96 of 400 samples")
def a_training_that_drops_a_quarter_of_its_samples(right: bool) -> None:
    data = DataLoader(TensorDataset(*blobs()), 304, shuffle=True, drop_last=not right)
    build(mlp(5, 8, 4), loss=F.cross_entropy).run(data, max_epochs=1)


@mistake("C13")
def data_that_is_sorted_by_class(right: bool) -> Findings:
    inputs, labels = blobs()
    order = labels.argsort()
    data = DataLoader(TensorDataset(inputs[order], labels[order]), 50, shuffle=right)
    return build(mlp(5, 8, 4)).check(data, max_epochs=1).at_least("warning")


@mistake("C14")
def samples_that_were_repeated_before_the_split(right: bool) -> Findings:
    inputs, labels = blobs()
    held_out = blobs(100, seed=3) if right else (inputs[:100].clone(), labels[:100].clone())
    engine = classifier(evaluated=DataLoader(TensorDataset(*held_out), 50))
    return engine.check(DataLoader(TensorDataset(inputs, labels), 50, shuffle=True), max_epochs=1).at_least("warning")


@mistake("C14")
def two_splits_of_a_copied_data_set(right: bool) -> Findings:
    inputs, labels = blobs()
    other = TensorDataset(*blobs(seed=5)) if right else TensorDataset(inputs.clone(), labels.clone())
    engine = classifier(evaluated=DataLoader(Subset(other, range(0, 400, 4)), 50))
    train = Subset(TensorDataset(inputs, labels), range(300))
    return engine.check(DataLoader(train, 50, shuffle=True), max_epochs=1).at_least("warning")


@mistake("W98")
def a_table_with_the_targets_in_it(right: bool) -> None:
    data = [
        (torch.cat([inputs, inputs[:, :1] if right else targets], 1), targets) for inputs, targets in batches([16] * 3)
    ]
    build(mlp(6, 8, 1)).run(data, max_epochs=1)


# ---- weights ----------------------------------------------------------------------------------------------------------


@mistake("W67")
def the_best_weights_kept_without_a_copy(right: bool) -> None:
    best: dict[str, Any] = {}
    engine = build(mlp(5, 8, 1))

    def keep(engine: Engine) -> None:
        weights = engine.model.state_dict()
        best.update(copy.deepcopy(weights) if right else weights)

    engine.connect(Events.EPOCH_COMPLETED(once=1), keep)
    engine.connect(Events.COMPLETED, lambda engine: engine.model.load_state_dict(best))
    engine.run(batches(), max_epochs=2)


@mistake("W68")
def weights_initialised_at_the_start_of_each_run(right: bool) -> None:
    def initialize(engine: Engine) -> None:
        if not right or engine.state.iteration == 0:
            nn.init.xavier_uniform_(engine.model[0].weight)

    engine = build(mlp(5, 8, 1))
    engine.connect(Events.STARTED, initialize)
    engine.run(batches(), max_epochs=1)
    engine.run(batches(), max_epochs=2)


class Recurrent(nn.Module):
    """Carries its hidden state from chunk to chunk, or forgets it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 1)


@mistake("W69")
def chunks_of_time_without_the_hidden_state(right: bool) -> None:
    def forward(engine: Engine, batch: Any) -> Tensor:
        update = engine.state.update
        output, hidden = engine.model.rnn(batch[0], update.hidden if right else None)
        update.hidden = hidden if right else None
        return engine.model.head(output)  # type: ignore[no-any-return]

    update = Update(forward, lambda engine, output, batch: F.mse_loss(output, batch[1]), SGD)
    engine = Engine(update, model=Recurrent(), seed=0)
    engine.attach(TruncatedBPTT(4))
    engine.run([(torch.randn(2, 8, 3), torch.randn(2, 8, 1)) for _ in range(3)], max_epochs=1)


@mistake("C26")
def a_handler_that_clips_each_part_of_a_window(right: bool) -> Findings:
    class Clips(Handler):
        @on(Events.GRADIENTS_READY if right else Events.BACKWARD_COMPLETED)
        def clip(self, engine: Engine) -> None:
            nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)

    return build(mlp(5, 8, 1), GradientAccumulation(2), Clips()).check(batches(), max_epochs=1)


@mistake(ValueError, "ignores the optimizer passed to it and schedules a different one")
def a_schedule_of_another_optimizer(right: bool) -> None:
    own = torch.optim.SGD(mlp(5, 8, 1).parameters(), lr=0.1)
    schedule = partial(StepLR, step_size=2) if right else lambda optimizer: StepLR(own, step_size=2)
    build(mlp(5, 8, 1), LRScheduling(schedule, every="1ep")).run(batches(), max_epochs=2)


@mistake(TypeError, r"cosine_with_warmup\(warmup=")
def a_schedule_written_as_a_partial(right: bool) -> None:
    schedule = cosine_with_warmup(warmup=2) if right else partial(cosine_with_warmup, warmup=2)
    build(mlp(5, 8, 1), LRScheduling(schedule)).run(batches(), max_epochs=1)


@mistake("W52")
def a_trained_layer_that_was_put_into_eval_mode(right: bool) -> None:
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    if not right:
        model[1].eval()
    build(model).run(batches(), max_epochs=1)


# ---- logs, signals and folders ----------------------------------------------------------------------------------------


@mistake("W38")
def two_runs_that_write_one_log(right: bool, folder: Path) -> None:
    engine = build(mlp(5, 8, 1), CSVLogger(folder / "log.csv", every="1it"))

    def other_job(engine: Engine) -> None:
        build(mlp(5, 8, 1), CSVLogger(folder / ("other.csv" if right else "log.csv"), every="1it")).run(
            batches(1), max_epochs=1
        )

    engine.connect(Events.EPOCH_STARTED(once=2), other_job)
    engine.run(batches(), max_epochs=2)


@mistake("W36")
def a_preempted_run_that_is_not_resumed(right: bool, folder: Path) -> None:
    engine = build(mlp(5, 8, 1), Checkpoint(folder), Preemption(exit_status=None))
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: os.kill(os.getpid(), signal.SIGTERM))
    engine.run(batches(), max_epochs=2)
    again = build(mlp(5, 8, 1), Checkpoint(folder, resume=right), Preemption(exit_status=None))
    again.run(batches(), max_epochs=2)


@mistake("W66")
def another_handler_of_the_signal(right: bool, folder: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def install(engine: Engine | None = None) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    engine = build(mlp(5, 8, 1), Checkpoint(folder), Preemption())
    try:
        if right:
            install()
        else:
            engine.connect(Events.ITERATION_COMPLETED(once=1), install)
        engine.run(batches(), max_epochs=1)
    finally:
        signal.signal(signal.SIGTERM, before)


@mistake("W30")
def a_checkpoint_of_what_is_trained_where_everything_is(right: bool, folder: Path) -> None:
    model = mlp(5, 8, 1)
    if right:
        model[0].requires_grad_(False)
    build(model, Checkpoint(folder, trained_only=True)).run(batches(), max_epochs=1)


@mistake("W37")
def a_run_that_ends_before_its_first_checkpoint(right: bool, folder: Path) -> None:
    every = "1it" if right else "1000min"
    build(mlp(5, 8, 1), Checkpoint(folder, every=every)).run(batches(), max_epochs=1)


@mistake("W58")
def a_trial_run_that_was_left_in(right: bool, folder: Path) -> Findings:
    engine = build(mlp(5, 8, 1), Checkpoint(folder), *([] if right else [FastDevRun()]))
    engine.run(batches(), max_epochs=2)
    return engine.findings.of_run()


@mistake("W39")
def a_checkpoint_that_was_never_attached(right: bool, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report()  # those of other programs in this process
    checkpoint = Checkpoint(folder)
    build(mlp(5, 8, 1), *([checkpoint] if right else [])).run(batches(), max_epochs=1)
    report()  # as the process ends


def _with_own_data(right: bool) -> list[str]:
    distributed = DistributedDataParallel(shard_policy="own")
    inputs, labels = blobs(64)
    own = slice(distributed.processes.rank, None, 2) if right else slice(None)
    torch.manual_seed(0)
    engine = build(mlp(5, 8, 4), distributed, loss=F.cross_entropy)
    engine.run(DataLoader(TensorDataset(inputs[own], labels[own]), 8, shuffle=True), max_epochs=1)
    return [one.code for one in engine.findings.of_run()]


@mistake("W70")
def ranks_that_bring_the_same_data_as_their_own(right: bool) -> Findings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in the two processes, whose findings come back
        codes = run_together(_with_own_data, 2, right)
    return Findings(Finding(code, "of rank 0", "see there") for code in codes[0])
