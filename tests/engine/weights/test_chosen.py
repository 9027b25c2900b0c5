"""`Engine.test`: what was measured when a checkpoint was chosen is measured again, and the engine stays as it is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from signalfire import Engine, Events, FindingWarning, Handler, Update
from signalfire.handlers import (
    EMA,
    Accuracy,
    Average,
    Checkpoint,
    EarlyStopping,
    History,
    Lookahead,
    Metrics,
    Validation,
)
from signalfire.testing import fingerprint
from tests.kit import mlp
from tests.processes import run_together

Batches = list[tuple[Tensor, Tensor]]


def labelled(count: int, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 5, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(count)]


VALIDATION, TEST = labelled(3, 1), labelled(3, 2)


def trainer_of(*handlers: Handler) -> Engine:
    torch.manual_seed(0)
    model = mlp(5, 8, 3, nn.BatchNorm1d(8), nn.Dropout(0.5))
    engine = Engine(Update.supervised(cross_entropy, torch.optim.SGD, lr=0.5), model=model, seed=0)
    engine.attach(Validation(VALIDATION, accuracy=Accuracy()), History(), *handlers)
    return engine


def averages(kind: str) -> list[Handler]:
    found: dict[str, list[Handler]] = {"none": [], "ema": [EMA(0.5)], "lookahead": [Lookahead(k=3)]}
    return found[kind]


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("kind", ["none", "ema", "lookahead"])
def test_the_best_weights_are_those_that_were_chosen_averages_included(
    kind: str, weights_only: bool, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path, monitor="val_loss", weights_only=weights_only)
    engine = trainer_of(checkpoint, *averages(kind))
    engine.run(labelled(4), max_epochs=4)
    losses = engine[History]["val_loss"]
    assert engine.test(VALIDATION)["loss"] == losses[-1]
    assert engine.test(VALIDATION, weights="best")["loss"] == min(losses)
    assert engine.test(VALIDATION, weights=checkpoint)["loss"] == min(losses)
    assert engine.test(VALIDATION, weights=checkpoint.best)["loss"] == min(losses)
    assert engine.test(VALIDATION, weights=str(checkpoint.best))["loss"] == min(losses)


class Recording(Handler):
    """Every event that a handler can see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def attached(self, engine: Engine) -> None:
        for event in Events:
            engine.connect(event, lambda _, event=event: self.seen.append(event.name))


@pytest.mark.parametrize("weights", [None, "best"])
def test_it_leaves_no_trace(weights: str | None, tmp_path: Path) -> None:
    engine = trainer_of(Checkpoint(tmp_path, monitor="val_loss"), EMA(0.5), EarlyStopping("val_loss", patience=9))
    engine.run(labelled(4), max_epochs=2)
    recording = Recording()
    engine.attach(recording)
    before = fingerprint(engine), dict(engine.state.metrics), torch.get_rng_state().tolist()
    measured = dict(engine[Validation].evaluator.state.metrics)
    recording.seen.clear()
    first = engine.test(TEST, weights=weights)
    assert recording.seen == []
    assert engine.test(TEST, weights=weights) == first
    assert dict(engine[Validation].evaluator.state.metrics) == measured
    assert (fingerprint(engine), dict(engine.state.metrics), torch.get_rng_state().tolist()) == before


def test_it_is_the_plain_loop_with_the_best_weights(tmp_path: Path) -> None:
    engine = trainer_of(Checkpoint(tmp_path, monitor="val_loss"))
    engine.run(labelled(4), max_epochs=3)
    found = engine.test(
        TEST, weights="best", error=Average(lambda output, target: (output.argmax(1) != target).float().mean())
    )
    model = mlp(5, 8, 3, nn.BatchNorm1d(8), nn.Dropout(0.5))
    model.load_state_dict(Checkpoint.load(engine[Checkpoint].best)["modules"]["model"])  # type: ignore[arg-type]
    model.eval()
    with torch.no_grad():
        losses = [cross_entropy(model(inputs), targets).item() for inputs, targets in TEST]
        wrong = [(model(inputs).argmax(1) != targets).float().mean().item() for inputs, targets in TEST]
    assert found == {"loss": pytest.approx(sum(losses) / 3), "error": pytest.approx(sum(wrong) / 3)}


def test_what_is_measured_comes_from_one_validation() -> None:
    engine = trainer_of(Validation(TEST, prefix="test_", name="other"))
    with pytest.raises(
        ValueError, match=r"several validations are attached: 'validation', 'other'.*validation='validation'"
    ):
        engine.test(TEST)
    assert sorted(engine.test(TEST, validation="other")) == ["loss"]
    assert sorted(engine.test(TEST, validation="validation")) == ["accuracy", "loss"]
    with pytest.raises(
        ValueError, match=r"test\(validation='none'\): no Validation has this name; available validations: 'validation'"
    ):
        engine.test(TEST, validation="none")
    with pytest.raises(ValueError, match=r"no Validation is attached, so nothing defines what to measure"):
        Engine(Update.prediction(), model=mlp(5, 8, 3)).test(TEST)
    with pytest.raises(TypeError, match=r"test\(acuracy=3\)"):
        engine.test(TEST, validation="other", acuracy=3)


def test_metrics_that_are_given_need_no_validation(tmp_path: Path) -> None:
    engine = trainer_of(Checkpoint(tmp_path, monitor="val_loss"))
    engine.run(labelled(4), max_epochs=2)
    expected = engine.test({"a": TEST}, weights="best")
    engine.detach("validation")
    assert engine.test({"a": TEST}, weights="best", accuracy=Accuracy()) == expected
    with pytest.raises(ValueError, match=r"nothing defines what to measure; pass metrics to test\(\)"):
        engine.test(TEST)
    with pytest.raises(
        TypeError, match=r"^test\(weigths='best'\): weigths= is not an argument.*did you mean 'weights'"
    ):
        engine.test(TEST, weigths="best")
    update = engine.updates[0].spec
    two = Engine([update, replace(update, name="second")], model=engine.model)
    with pytest.raises(
        ValueError, match=r"several updates \(main, second\), and no attached Validation .*, update=\.\.\.\)"
    ):
        two.test(TEST, accuracy=Accuracy())


def test_a_path_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = trainer_of(Checkpoint("~/runs", monitor="val_loss"))
    engine.run(labelled(4), max_epochs=2)
    assert engine.test(TEST, weights="~/runs") == engine.test(TEST, weights=engine[Checkpoint].last)


def test_the_long_form_is_measured_by_its_evaluator() -> None:
    engine = trainer_of()
    engine.detach("validation")
    evaluator = Engine(engine.updates[0].spec.evaluation(), model=engine.model)
    evaluator.attach(Metrics(right=Accuracy()))
    engine.attach(Validation(evaluator, VALIDATION))
    assert [*engine.test(TEST)] == ["right"]


def test_weights_that_nothing_chose_are_refused(tmp_path: Path) -> None:
    engine = trainer_of()
    with pytest.raises(ValueError, match=r"expected exactly one Checkpoint with monitor=, but found none"):
        engine.test(TEST, weights="best")
    engine.attach(Checkpoint(tmp_path / "each", name="each"))
    with pytest.raises(ValueError, match=r"expected exactly one Checkpoint with monitor=, but found none"):
        engine.test(TEST, weights="best")
    engine.attach(
        Checkpoint(tmp_path / "a", monitor="val_loss", name="a"),
        Checkpoint(tmp_path / "b", monitor="val_accuracy", name="b"),
    )
    with pytest.raises(ValueError, match=r"but found 'a', 'b'"):
        engine.test(TEST, weights="best")
    with pytest.raises(ValueError, match=r"the handler has written no checkpoint in this process"):
        engine.test(TEST, weights=engine["a"])
    with pytest.raises(TypeError, match=r"expected 'best', a Checkpoint handler, or the path of a checkpoint"):
        engine.test(TEST, weights=3)
    with pytest.raises(FileNotFoundError):
        engine.test(TEST, weights=tmp_path / "nothing")


def test_it_is_refused_inside_a_run() -> None:
    engine = trainer_of()
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.test(TEST))
    with pytest.raises(RuntimeError, match=r"test\(\) was called during a run; call engine.evaluate"):
        engine.run(labelled(1), max_epochs=1)


def test_load_weights_takes_the_path_of_a_checkpoint(tmp_path: Path) -> None:
    engine = trainer_of(Checkpoint(tmp_path, monitor="val_loss"))
    engine.run(labelled(4), max_epochs=2)
    other = trainer_of()
    other.load_weights(engine[Checkpoint].best)  # type: ignore[arg-type]
    assert other.test(VALIDATION)["loss"] == min(engine[History]["val_loss"])


class HalvedInEval(torch.optim.SGD):
    """Its evaluations see half of the weights that it trains, and the conversion is not made twice in a row."""

    trains = True

    def train(self) -> None:
        self._scale(2.0, trains=True)

    def eval(self) -> None:
        self._scale(0.5, trains=False)

    def _scale(self, factor: float, *, trains: bool) -> None:
        if self.trains is not trains:
            torch._foreach_mul_([one.data for one in self.param_groups[0]["params"]], factor)
            self.trains = trains


def test_saved_weights_of_an_optimizers_eval_mode_are_not_converted_again(tmp_path: Path) -> None:
    engine = Engine(Update.supervised(cross_entropy, HalvedInEval, lr=0.5), model=nn.Linear(5, 3), seed=0)
    engine.attach(Validation(VALIDATION), Checkpoint(tmp_path, monitor="val_loss", weights_only=True), History())
    engine.run(labelled(4), max_epochs=3)
    losses, before = engine[History]["val_loss"], engine.model.weight.clone()
    assert engine.test(VALIDATION, weights="best")["loss"] == min(losses)
    assert engine.test(VALIDATION)["loss"] == losses[-1]
    assert torch.equal(engine.model.weight, before)


def _tested(folder: str) -> list[float]:
    from signalfire.handlers import DistributedDataParallel

    torch.set_num_threads(1)
    engine = trainer_of(DistributedDataParallel(timeout=60), Checkpoint(folder, monitor="val_loss"), EMA(0.5))
    engine.run(labelled(4), max_epochs=3)
    return [
        min(engine[History]["val_loss"]),
        engine.test(VALIDATION, weights="best")["loss"],
        engine.test(VALIDATION)["loss"],
    ]


@pytest.mark.moderate
def test_all_ranks_measure_the_same(tmp_path: Path) -> None:
    first, second = run_together(_tested, 2, str(tmp_path))
    assert first[1:] == second[1:]
    assert first[0] == first[1]


def test_averages_whose_handler_is_gone_are_not_left_out_in_silence(tmp_path: Path) -> None:
    engine = trainer_of(Checkpoint(tmp_path, monitor="val_loss"), EMA(0.5))
    engine.run(labelled(4), max_epochs=2)
    engine.detach("ema")
    with pytest.warns(FindingWarning, match=r"W56: the checkpoint .* contains weight averages from the handler 'ema'"):
        engine.test(VALIDATION, weights="best")


@pytest.mark.parametrize(
    ("slip", "hint"), {"bestt": "did you mean 'best'?", "last": "pass 'best', a Checkpoint handler"}.items()
)
def test_a_slip_in_what_is_chosen(slip: str, hint: str) -> None:
    engine = trainer_of()
    with pytest.raises(FileNotFoundError, match=rf"test\(weights='{slip}'\): no such checkpoint; {re.escape(hint)}"):
        engine.test(VALIDATION, weights=slip)


def test_what_is_disabled_is_absent(tmp_path: Path) -> None:
    checkpoints = [Checkpoint(tmp_path / name, monitor="val_loss", name=name) for name in ("c1", "c2")]
    engine = trainer_of(Validation(TEST, prefix="test_", name="other"), *checkpoints)
    engine.run(labelled(2), max_epochs=2)
    expected = engine.test(TEST, weights=checkpoints[0], validation="validation")
    with engine.without("c2", "other"):
        assert engine.test(TEST, weights="best") == expected
        with pytest.raises(
            ValueError, match=r"validation='other'\): this Validation is disabled; available validations: 'validation'"
        ):
            engine.test(TEST, validation="other")


def test_several_data_sets_are_measured_under_their_names(tmp_path: Path) -> None:
    engine = trainer_of(Checkpoint(tmp_path, monitor="val_loss"), EMA(0.5))
    engine.run(labelled(2), max_epochs=2)
    for weights in (None, "best"):
        single = {key: engine.test(data, weights=weights) for key, data in (("a", TEST), ("b", VALIDATION))}
        found = engine.test({"a": TEST, "b": VALIDATION}, weights=weights)
        assert found == {f"{key}_{name}": value for key, values in single.items() for name, value in values.items()}
    with pytest.raises(ValueError, match=r"test\(data=\{\}\): there is nothing to evaluate"):
        engine.test({})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prefix": "test_"},
            r"^test\(prefix='test_'\): prefix= is not an argument, and 'test_' is not a metric; the arguments are data",
        ),
        ({"weight": "best"}, r"^test\(weight='best'\): weight= is not an argument.*did you mean 'weights'\?"),
        ({"metrics": [Accuracy()]}, r"^test\(metrics=a list\): expected a mapping from names to metrics"),
        (
            {"weights": {"a": torch.zeros(9)}},
            r"^test\(weights=dict\(...\)\): expected 'best', a Checkpoint handler, or the path of a checkpoint$",
        ),
        (
            {"weights": torch.zeros(9)},
            r"^test\(weights=Tensor\(...\)\): expected 'best', a Checkpoint handler, or the path of a checkpoint$",
        ),
        (
            {"metrics": {"a": Accuracy()}, "a": Accuracy()},
            r"^test\(a=\): 'a' is given twice, in metrics= and as a keyword",
        ),
    ],
)
def test_arguments_of_test_are_refused_as_its_own(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        trainer_of().test(TEST, **arguments)
