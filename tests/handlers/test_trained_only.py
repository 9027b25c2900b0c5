"""Checkpoints and averages of what is trained: without the frozen base, exact with the same base, refused with another."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, FindingWarning
from signalfire.handlers import EMA, Checkpoint, DistributedDataParallel, Freezing, FullyShardedDataParallel, Preemption
from signalfire.testing import fingerprint
from tests.kit import assert_same, batches, build, evaluator_of
from tests.processes import run_together

ADAM = partial(torch.optim.Adam, lr=0.02)


class Adapted(nn.Module):
    """A large frozen layer, and a small one beside it that is trained (LoRA)."""

    def __init__(self, base: int = 0, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Linear(5, 100)
        self.norm = nn.BatchNorm1d(100)
        self.out = nn.Linear(100, 1)
        if frozen:
            self.requires_grad_(False)
        torch.manual_seed(7)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 100, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.norm(self.base(x) + self.up(self.down(x)))))
        return out


def engine_of(*handlers: Any, base: int = 0, frozen: bool = True) -> Engine:
    return build(Adapted(base, frozen), *handlers, optimizer=ADAM)


def saved_in(path: Path | None) -> set[str]:
    assert path is not None
    return {name for name, value in torch.load(path / "state.pt", weights_only=True)["modules"]["model"].items()}


TRAINED = {"down.weight", "up.weight", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
FROZEN = {"base.weight", "base.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"}


def without_checkpoint(engine: Engine) -> dict[str, str]:
    return {name: value for name, value in fingerprint(engine).items() if name != "handlers.checkpoint"}


# ---- what is written, and what a run resumes to ---------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_frozen_base_is_not_written_and_the_run_goes_on_as_if_it_were(
    asynchronous: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = engine_of()
    whole.run(batches(), max_epochs=4)
    last = Checkpoint(tmp_path, trained_only=True, asynchronous=asynchronous)
    engine_of(last).run(batches(), max_epochs=2)
    assert "checkpoint: 6 frozen parameters (0.0 of 0.0 MB) are left out" in capsys.readouterr().err
    assert saved_in(last.last) == TRAINED
    assert last.last is not None
    base = json.loads((last.last / "manifest.json").read_text())["base"]
    assert set(base["sha256"]) == {f"model.{name}" for name in FROZEN}
    resumed = engine_of(Checkpoint(tmp_path, trained_only=True, resume=True))
    resumed.run(batches(), max_epochs=4)
    assert without_checkpoint(resumed) == fingerprint(whole)
    assert saved_in(resumed.find(Checkpoint).last) == TRAINED


def test_a_model_with_another_base_is_refused_and_keeps_its_weights(tmp_path: Path) -> None:
    engine_of(Checkpoint(tmp_path, trained_only=True)).run(batches(), max_epochs=1)
    other = engine_of(Checkpoint(tmp_path / "other"), base=1)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    other.load_state_dict(Checkpoint.load(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"its 6 frozen parameters, but 4 of these parameters, such as 'model\.base\.bias', have different",
    ):
        other.run(batches(), max_epochs=2)
    assert_same(other.model, before)
    smaller = build(nn.Linear(5, 1), Checkpoint(tmp_path / "smaller"))
    smaller.load_state_dict(Checkpoint.load(tmp_path))
    with pytest.raises(
        ValueError, match=r"frozen parameters, but some of them, such as 'model\.base\.bias', are missing"
    ):
        smaller.run(batches(), max_epochs=2)


def test_weights_of_what_is_trained_are_put_on_top_of_the_base(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, trained_only=True, weights_only=True)
    engine = engine_of(EMA(0.5, trained_only=True), handler)
    engine.run(batches(), max_epochs=2)
    assert handler.last is not None
    assert torch.load(handler.last / "state.pt", weights_only=True)["model"].keys() == TRAINED
    other = engine_of()
    other.load_weights(Checkpoint.load(tmp_path))
    assert_same(other.model, engine.weights()["model"])
    with pytest.raises(ValueError, match=r"load_weights\(\): .* build the model from the same base"):
        engine_of(base=1).load_weights(Checkpoint.load(tmp_path))


@pytest.mark.slow
def test_an_evaluator_loads_what_was_trained(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, trained_only=True))
    engine.run(batches(), max_epochs=1)
    model = Adapted()
    evaluator_of(model).load_state_dict(Checkpoint.load(tmp_path))
    assert_same(model, engine.model)


@pytest.mark.slow
def test_a_complete_checkpoint_and_one_of_what_is_trained_stand_side_by_side(tmp_path: Path) -> None:
    whole = Checkpoint(tmp_path / "whole", asynchronous=True, name="whole")
    small = Checkpoint(tmp_path / "small", asynchronous=True, trained_only=True, name="small")
    engine_of(whole, small).run(batches(), max_epochs=3)
    assert saved_in(whole.last) == TRAINED | FROZEN
    assert saved_in(small.last) == TRAINED
    states = [Checkpoint.load(folder) for folder in (tmp_path / "whole", tmp_path / "small")]
    for name in TRAINED:
        assert torch.equal(*(state["modules"]["model"][name] for state in states))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["preempted", "exception"])
def test_what_is_saved_at_the_end_of_a_run_leaves_out_the_base_as_well(how: str, tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, trained_only=True, on_exception=how == "exception")
    engine = engine_of(handler, *([Preemption(exit_status=None)] if how == "preempted" else []))

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def end(engine: Engine) -> None:
        if how == "exception":
            raise RuntimeError("as the user's code does")
        engine.boundary.preempt("a test")

    if how == "exception":
        with pytest.raises(RuntimeError, match="as the user's"):
            engine.run(batches(), max_epochs=2)
    else:
        engine.run(batches(), max_epochs=2)
    (path,) = tmp_path.glob(f"*-{how}")
    assert saved_in(path) == TRAINED
    again = engine_of(Checkpoint(tmp_path, trained_only=True))
    again.load_state_dict(Checkpoint.load(path))
    again.run(batches(), max_epochs=2)
    whole = engine_of()
    whole.run(batches(), max_epochs=2)
    assert without_checkpoint(again) == fingerprint(whole)


# ---- what does not stay frozen ------------------------------------------------------------------------------------------


def thawing(folder: Path | None) -> Engine:
    """The output layer is trained from the second epoch on, and the base from the third."""
    freezing = Freezing({"base": 3, "out": 2, "norm": None})
    return engine_of(
        freezing, *([] if folder is None else [Checkpoint(folder, trained_only=True, keep=9)]), frozen=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_part_is_written_from_when_it_is_trained(epochs: int, tmp_path: Path) -> None:
    whole = thawing(None)
    whole.run(batches(), max_epochs=4)
    first = thawing(tmp_path)
    first.run(batches(), max_epochs=epochs)
    left_out = {1: {"base", "norm", "out"}, 2: {"base", "norm"}, 3: {"norm"}}[epochs]
    names = saved_in(first.find(Checkpoint).last)
    assert names == TRAINED | {name for name in FROZEN if name.partition(".")[0] not in left_out}
    again = thawing(tmp_path)
    again.load_state_dict(Checkpoint.load(tmp_path))
    again.run(batches(), max_epochs=4)
    assert without_checkpoint(again) == fingerprint(whole)


@pytest.mark.moderate
def test_a_part_that_was_trained_is_written_though_it_is_frozen_later(tmp_path: Path) -> None:
    def train(folder: Path | None, epochs: int, state: Any = None) -> Engine:
        engine = engine_of(*([] if folder is None else [Checkpoint(folder, trained_only=True)]), frozen=False)
        engine.model.base.requires_grad_(False)
        engine.connect(Events.EPOCH_STARTED(once=2), lambda engine: engine.model.out.requires_grad_(False))
        if state is not None:
            engine.model.out.requires_grad_(False)
            engine.load_state_dict(state)
        engine.run(batches(), max_epochs=epochs)
        return engine

    first = train(tmp_path, 3)
    assert {"out.weight", "out.bias"} <= saved_in(first.find(Checkpoint).last)
    again = train(tmp_path, 4, Checkpoint.load(tmp_path))
    assert {"out.weight", "out.bias"} <= saved_in(again.find(Checkpoint).last), "its values are not those of the base"
    assert without_checkpoint(again) == fingerprint(train(None, 4))


def test_a_frozen_parameter_that_is_changed_by_hand_is_written(tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, trained_only=True))
    with torch.no_grad():
        engine.connect(Events.EPOCH_STARTED(once=2), lambda engine: engine.model.out.bias.add_(1))
        engine.run(batches(), max_epochs=3)
    assert saved_in(engine.find(Checkpoint).last) == TRAINED | {"out.bias"}
    assert float(Checkpoint.load(tmp_path)["modules"]["model"]["out.bias"]) == float(engine.model.out.bias)


def merged_through_data(model: Any) -> None:
    model.out.bias.data += 1


def moved_through_data(model: Any) -> None:
    model.out.bias.data = model.out.bias.data + 1


@pytest.mark.moderate
@pytest.mark.parametrize("change", [merged_through_data, moved_through_data])
def test_a_change_that_autograd_does_not_count_is_written(change: Any, tmp_path: Path) -> None:
    engine = engine_of(Checkpoint(tmp_path, trained_only=True))
    engine.connect(Events.EPOCH_STARTED(once=2), lambda engine: change(engine.model))
    engine.run(batches(), max_epochs=3)
    assert saved_in(engine.find(Checkpoint).last) == TRAINED | {"out.bias"}


@pytest.mark.slow
def test_frozen_parameters_that_are_views_of_one_tensor_are_left_out(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, trained_only=True)
    engine = engine_of(handler)
    sizes = [p.numel() for p in engine.model.base.parameters()]
    memory = torch.randn(1 + sum(sizes))
    for parameter, part in zip(engine.model.base.parameters(), memory[1:].split(sizes), strict=True):
        parameter.data = part.view_as(parameter)  # each begins in the middle of eight bytes
    engine.run(batches(), max_epochs=1)
    assert saved_in(handler.last) == TRAINED


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_part_that_a_fused_optimizer_trained_between_two_saves_is_written(tmp_path: Path) -> None:
    optimizer = partial(torch.optim.Adam, lr=0.02, fused=True)  # whose steps autograd does not count
    engine = build(Adapted(), Checkpoint(tmp_path, trained_only=True, every="3ep"), optimizer=optimizer)
    engine.model.requires_grad_(True)  # so that the optimizer holds all
    engine.connect(Events.STARTED, lambda engine: engine.model.base.requires_grad_(False))
    engine.connect(Events.EPOCH_STARTED(once=2), lambda engine: engine.model.base.requires_grad_(True))
    engine.connect(Events.EPOCH_STARTED(once=3), lambda engine: engine.model.base.requires_grad_(False))
    engine.run(batches(), max_epochs=3)
    assert {"base.weight", "base.bias"} <= saved_in(engine.find(Checkpoint).last)


class Omitting(Adapted):
    """As some adapters do, it leaves its base out of its state by itself."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        for key in [key for key in state if key.startswith("base.")]:
            del state[key]
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


@pytest.mark.slow
def test_a_model_that_omits_its_base_by_itself_resumes(tmp_path: Path) -> None:
    build(Omitting(), Checkpoint(tmp_path, trained_only=True), optimizer=ADAM).run(batches(), max_epochs=2)
    again = build(Omitting(), Checkpoint(tmp_path, trained_only=True, resume=True), optimizer=ADAM)
    again.run(batches(), max_epochs=4)
    whole = build(Omitting(), optimizer=ADAM)
    whole.run(batches(), max_epochs=4)
    assert without_checkpoint(again) == without_checkpoint(whole)


class Centerd(nn.MSELoss):
    """A loss with a parameter that is trained, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.scale * x - self.center, y)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:C09:signalfire.FindingWarning"
)  # of the model, all that follows is frozen: meant here
def test_weights_load_into_an_engine_without_the_loss(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, trained_only=True, weights_only=True)
    engine = build(Adapted(), handler, optimizer=ADAM, loss=Centerd())
    engine.run(batches(), max_epochs=1)
    other = engine_of()
    other.load_weights(Checkpoint.load(tmp_path))
    assert_same(other.model, engine.model)


@pytest.mark.slow
def test_after_a_complete_checkpoint_of_another_base_what_differs_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_of(Checkpoint(tmp_path / "whole"), base=1).run(batches(), max_epochs=1)
    handler = Checkpoint(tmp_path / "small", trained_only=True)
    engine = engine_of(handler)  # of another base, which the complete state replaces
    engine.load_state_dict(Checkpoint.load(tmp_path / "whole"), allow=["checkpoint"])
    engine.run(batches(), max_epochs=2)
    alike = {"norm.weight", "norm.bias"}  # ones and zeros
    assert saved_in(handler.last) == (TRAINED | FROZEN) - alike
    again = engine_of()
    again.load_weights(Checkpoint.load(tmp_path / "small"))
    assert_same(again.model, engine.model)
    said = capsys.readouterr().err
    assert ": 6 frozen" in said
    assert said.endswith(
        "2 frozen parameters (0.0 of 0.0 MB) are left out, so the checkpoints can be loaded only into a model with the "
        "same frozen parameters\n"
    )


def test_where_nothing_is_frozen_it_says_so(tmp_path: Path) -> None:
    with pytest.warns(FindingWarning, match="W30: 'checkpoint': trained_only=True has no effect"):
        engine_of(Checkpoint(tmp_path, trained_only=True), frozen=False).run(batches(), max_epochs=1)


# ---- several processes -----------------------------------------------------------------------------------------------------


def _together(folder: Path, kind: type[Any], epochs: int, asynchronous: bool) -> tuple[set[str], list[float]]:
    checkpoint = Checkpoint(folder, trained_only=True, resume=True, asynchronous=asynchronous)
    engine = engine_of(kind(), EMA(0.5, trained_only=True), checkpoint)
    engine.run(batches(), max_epochs=epochs)
    weights = [
        value.full_tensor() if hasattr(value, "full_tensor") else value for value in engine.weights()["model"].values()
    ]
    return saved_in(checkpoint.last), [float(value.double().sum()) for value in weights]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [DistributedDataParallel, FullyShardedDataParallel])
def test_ranks_leave_out_the_base_and_resume_exactly(kind: type[Any], asynchronous: bool, tmp_path: Path) -> None:
    whole = run_together(_together, 2, tmp_path / "whole", kind, 3, asynchronous)
    first = run_together(_together, 2, tmp_path / "cut", kind, 2, asynchronous)
    assert first[0][0] == first[1][0] == TRAINED
    assert run_together(_together, 2, tmp_path / "cut", kind, 3, asynchronous) == whole
    if kind is FullyShardedDataParallel:
        shards = [path.name for path in (tmp_path / "cut").rglob("*.distcp")]
        assert len(shards) >= 2


def _changed_on_one_rank(folder: Path) -> set[str]:
    checkpoint = Checkpoint(folder, trained_only=True)
    engine = engine_of(FullyShardedDataParallel(), checkpoint)

    def change(engine: Engine) -> None:
        if engine.processes.rank == 1:
            engine.model.base.weight.to_local().data.add_(1)

    engine.connect(Events.EPOCH_STARTED(once=2), change)
    engine.run(batches(), max_epochs=2)
    return saved_in(checkpoint.last)


@pytest.mark.slow
def test_a_shard_that_changes_on_one_rank_is_written_by_all(tmp_path: Path) -> None:
    assert run_together(_changed_on_one_rank, 2, tmp_path) == [TRAINED | {"base.weight"}] * 2


# ---- averages --------------------------------------------------------------------------------------------------------------


def test_averages_of_what_is_trained_evaluate_as_averages_of_everything_do() -> None:
    weights = []
    for trained_only in (False, True):
        engine = engine_of(EMA(0.9, trained_only=trained_only))
        engine.run(batches(), max_epochs=3)
        weights.append(engine.weights()["model"])
        held = set(engine.find(EMA).state_dict()["averages"])
        assert held == {f"model.{name}" for name in (TRAINED if trained_only else TRAINED | FROZEN)}
    assert_same(*weights)


@pytest.mark.slow
def test_a_parameter_is_averaged_from_its_first_step_and_a_resumed_run_knows_it(tmp_path: Path) -> None:
    def engine_with(folder: Path) -> Engine:
        freezing = Freezing({"base": 2, "out": 3, "norm": None})
        return engine_of(freezing, EMA(0.5, trained_only=True), Checkpoint(folder, keep=9), frozen=False)

    whole = engine_with(tmp_path / "whole")
    first: list[Tensor] = []
    followed: list[tuple[Tensor, Tensor]] = []

    def note(engine: Engine) -> None:
        average = engine.find(EMA).state_dict()["averages"].get("model.out.bias")
        if average is not None:
            first.append(engine.model.out.bias.detach().clone())
            followed.append((average.clone(), first[-1]))

    whole.connect(Events.ITERATION_COMPLETED, note)
    whole.run(batches(), max_epochs=4)
    expected = first[0]
    for average, weight in followed:
        if weight is not first[0]:
            expected = torch.lerp(expected, weight, 0.5)
        assert torch.equal(average, expected)
    assert len(followed) == 2 * len(batches())
    for path in sorted((tmp_path / "whole").iterdir())[:-1]:
        again = engine_with(tmp_path / f"again {path.name}")
        again.load_state_dict(Checkpoint.load(path))
        again.run(batches(), max_epochs=4)
        assert without_checkpoint(again) == without_checkpoint(whole)
