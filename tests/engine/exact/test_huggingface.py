"""Hugging Face's Trainer, killed anywhere and started again: bit-equal with the callback, and what it does without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from signalfire.exact import SeededSamples, random_state
from signalfire.exact.seals import newest_sealed
from tests import kit
from tests.engine.exact.lives import Result, Samples, Tick, kill_and_resume, life, nothing

kit.needs("migration", "transformers", "accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*the folder has no checksums")]

STEPS = 9  # 3 epochs of 6 batches, in windows of 2


def masking(samples: Any) -> dict[str, Tensor]:
    """A collate function that draws, as one does that masks tokens."""
    inputs, targets = default_collate(list(samples))
    return {"x": inputs + 0.01 * torch.randn(3), "labels": targets}


def plain(samples: Any) -> dict[str, Tensor]:
    return dict(zip(("x", "labels"), default_collate(list(samples)), strict=True))


class Model(nn.Module):
    def __init__(self, tick: Tick) -> None:
        super().__init__()
        self.tick = tick
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.tick()
        outputs = self.net(x)
        return {"loss": F.mse_loss(outputs, labels), "logits": outputs}


def trainer_of(folder: Path, tick: Tick, exact: bool, draws: bool, workers: int, seedable: bool, **options: Any) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from signalfire.exact.huggingface import ExactResume

    class Ticks(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *given: Any, **others: Any) -> None:
            tick()

        def on_save(self, *given: Any, **others: Any) -> None:
            tick()

    arguments = TrainingArguments(
        str(folder),
        **{"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1} | options,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
        logging_strategy="no",
        accelerator_config={"use_seedable_sampler": seedable},
    )
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    samples: Any = Samples(draws)
    return Trainer(
        Model(tick),
        arguments,
        data_collator=masking if draws else plain,
        train_dataset=SeededSamples(samples) if exact else samples,
        eval_dataset=samples,
        callbacks=[Ticks(), *([ExactResume()] if exact else [])],
    )


def train(
    folder: Path,
    tick: Tick = nothing,
    *,
    exact: bool = True,
    draws: bool = True,
    workers: int = 0,
    seedable: bool = True,
    **options: Any,
) -> Result:
    """One life of a training; it continues from the newest checkpoint in the folder."""
    from signalfire.exact.huggingface import ExactResume

    trainer = trainer_of(folder, tick, exact, draws, workers, seedable, **options)
    newest = ExactResume.newest(folder) if exact else any(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=newest)
    assert trainer.state.global_step == STEPS
    states = {
        "weights": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "rate": trainer.lr_scheduler.state_dict(),
        "generators": random_state(),
    }
    return {name: kit.digest(state) for name, state in states.items()}


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    import transformers

    import signalfire.exact.huggingface

    transformers.logging.set_verbosity_error()
    assert transformers.Trainer
    assert signalfire.exact.huggingface


# In each step: 2 batches, the end of the step, and a checkpoint that is not sealed yet.
POINTS = range(STEPS * 4)
EVALUATING = {"eval_strategy": "epoch"}


@pytest.mark.campaign
@pytest.mark.parametrize(("workers", "seedable"), [(0, True), (2, False)])
def test_a_trainer_that_is_killed_at_any_of_36_points_ends_with_the_same_bits(
    tmp_path: Path, workers: int, seedable: bool
) -> None:
    kill_and_resume(train, tmp_path, POINTS, workers=workers, seedable=seedable, **EVALUATING)


def test_a_trainer_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    kill_and_resume(train, tmp_path / "0", [1, 23], workers=0, **EVALUATING)
    kill_and_resume(train, tmp_path / "2", [21], workers=2, seedable=False, **EVALUATING)


# What the bare trainer does. At the end of an epoch it once lost the generators (#17032 of transformers), and does so still if an
# evaluation follows; inside one, it loses what data draws (#39215).
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "from the end of an epoch": (10, True, {"save_strategy": "epoch"}),
    "inside an epoch": (8, True, {"draws": False}),
    "inside an epoch, data that draws": (8, False, {}),
    "from the end of an epoch, an evaluation after the checkpoint": (12, False, EVALUATING),
    "inside an epoch, its order drawn from the global generator": (20, False, {"draws": False, "seedable": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_bare_trainer_continues_exactly(tmp_path: Path, case: str) -> None:
    cut, is_exact, options = CASES[case]
    whole = life(train, tmp_path / "whole", exact=False, **options)
    assert life(train, tmp_path / "cut", cut, exact=False, **options) is None
    assert (life(train, tmp_path / "cut", exact=False, **options) == whole) is is_exact
    if not is_exact or "save_strategy" in options:
        kill_and_resume(train, tmp_path / "exact", [cut], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_only_model": True}, "save_only_model=True"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True"),
        ({"save_total_limit": 1, "save_only_model": True}, "save_only_model=True, save_total_limit=1"),
    ],
)
def test_arguments_that_leave_out_what_a_resume_needs_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    trainer = trainer_of(tmp_path, nothing, True, True, 0, True, **options)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_other_data_is_refused_and_hidden_generators_are_named(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, nothing, True, True, 0, True)
    trainer.train_dataset = Samples()
    with pytest.raises(ValueError, match=r"train_dataset is a Samples; .* train_dataset=SeededSamples\(dataset\)"):
        trainer.train()
    own = Samples()
    own.generator = np.random.default_rng(0)  # type: ignore[attr-defined]
    trainer.train_dataset = SeededSamples(own)
    with pytest.warns(UserWarning, match=r"save the state of the random generators dataset.*generator"):
        trainer.train()
    assert newest_sealed(tmp_path, "checkpoint-") == tmp_path / f"checkpoint-{STEPS}"


def test_weights_that_trainer_does_not_load_are_noticed(tmp_path: Path) -> None:
    """As those of models whose parameters it saves under other names."""
    options: dict[str, Any] = {"exact": True, "draws": False, "workers": 0, "seedable": True}
    trainer_of(tmp_path, nothing, **options, max_steps=4).train()
    trainer = trainer_of(tmp_path, nothing, **options)
    trainer._load_from_checkpoint = lambda *given, **others: None
    with pytest.raises(ValueError, match="the loaded weights differ from the weights that were saved"):
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_without_the_callback_is_continued_with_a_warning(tmp_path: Path) -> None:
    options: dict[str, Any] = {"draws": False, "workers": 0, "seedable": True}
    trainer_of(tmp_path, nothing, exact=False, **options, max_steps=4).train()
    trainer = trainer_of(tmp_path, nothing, exact=True, **options)
    with pytest.warns(UserWarning, match="was saved without ExactResume"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
