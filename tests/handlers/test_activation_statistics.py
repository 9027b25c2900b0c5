"""Statistics of activations against those of outputs that hooks of the test have kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events
from signalfire.handlers import ActivationStatistics, MicroBatching, SharpnessAwareMinimization, Validation
from signalfire.testing import check_handler
from tests import kit
from tests.kit import batches, digest, mlp, new_metrics

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def network() -> nn.Sequential:
    model = mlp(5, 8, 1, nn.ReLU())
    first = model[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.bias[:3] = -100.0
    return model


def build(*handlers: Any, model: nn.Module | None = None) -> Engine:
    return kit.build(model or network(), *handlers, optimizer=SGD)


def kept_outputs(module: nn.Module) -> list[Tensor]:
    outputs: list[Tensor] = []
    module.register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
    return outputs


@pytest.mark.parametrize(("every", "window"), [(1, 1), (2, 1), (4, 3), (3, 3)])
def test_values_are_those_of_the_outputs_in_the_windows(every: int, window: int) -> None:
    engine = build(ActivationStatistics(every=f"{every}it", window=window))
    outputs = kept_outputs(engine.model[1])
    seen = new_metrics(engine)
    engine.run(batches(6), max_epochs=2)
    assert [iteration for iteration, _ in seen] == list(range(every, 13, every))
    for iteration, metrics in seen:
        values = torch.cat(outputs[iteration - window : iteration])
        assert metrics["activation_mean/1"] == pytest.approx(values.double().mean().item(), rel=1e-6)
        assert metrics["activation_sd/1"] == pytest.approx(values.double().std(correction=0).item(), rel=1e-6)
        dead = (values == 0).all(0).double().mean().item()
        assert metrics["dead_units/1"] == pytest.approx(dead)
        assert metrics["dead_units"] == pytest.approx(dead)
        assert dead >= 3 / 8


def test_hooks_are_on_the_modules_in_measured_forwards_alone() -> None:
    engine = build(ActivationStatistics(every="4it", window=2))
    hooked: list[tuple[str, int]] = []
    for event in (Events.FORWARD_COMPLETED, Events.BACKWARD_STARTED):

        @engine.on(event)
        def look(engine: Engine, event: Events = event) -> None:
            if engine.model[1]._forward_hooks:
                hooked.append((event.name, engine.state.iteration))

    engine.run(batches(6), max_epochs=2)
    assert hooked == [("FORWARD_COMPLETED", n) for n in (3, 4, 7, 8, 11, 12)]


def test_pieces_count_together_and_second_forwards_of_a_step_and_evaluations_do_not() -> None:
    model = network()
    for handler in (MicroBatching(1), SharpnessAwareMinimization(0.5)):
        engine = build(ActivationStatistics(every="1it"), handler, model=(model := network()))
        engine.attach(Validation(kit.evaluator_of(model), batches(2, seed=3), every="1it"))
        outputs = kept_outputs(model[1])
        seen = new_metrics(engine)
        engine.run(batches(1), max_epochs=1)
        values = torch.cat(outputs)[:4]  # of four samples
        assert seen[0][1]["activation_mean/1"] == pytest.approx(values.double().mean().item(), rel=1e-6)
        assert seen[0][1]["dead_units"] == pytest.approx((values == 0).all(0).double().mean().item())


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relu = nn.Conv2d(2, 3, 3), nn.ReLU()
        self.rows, self.act, self.head = nn.Linear(16, 6), nn.LeakyReLU(), nn.Linear(18, 1)
        with torch.no_grad():
            assert self.conv.bias is not None
            self.conv.bias[1] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(x)).flatten(2)
        output: Tensor = self.head(self.act(self.rows(x)).flatten(1))
        return output


def test_units_are_channels_of_pictures_and_the_last_dimension_of_sequences_or_what_is_given() -> None:
    engine = build(ActivationStatistics(every="1it"), model=Pictures())
    seen = new_metrics(engine)
    engine.run(batches(1, (2, 6, 6)), max_epochs=1, check=False)
    assert seen[0][1]["dead_units/relu"] == pytest.approx(1 / 3)
    assert seen[0][1]["dead_units/act"] == 0
    assert seen[0][1]["dead_units"] == pytest.approx(1 / 9)
    assert {name for name in seen[0][1] if "/" in name} == {
        f"{kind}/{path}" for kind in ("activation_mean", "activation_sd", "dead_units") for path in ("relu", "act")
    }
    engine = build(ActivationStatistics(every="1it", modules="relu", unit_dim=-1), model=Pictures())
    seen = new_metrics(engine)
    engine.run(batches(1, (2, 6, 6)), max_epochs=1, check=False)
    assert set(seen[0][1]) == {"activation_mean/relu", "activation_sd/relu", "dead_units/relu", "dead_units"}
    assert seen[0][1]["dead_units/relu"] == 0


def test_modules_may_be_named() -> None:
    engine = build(ActivationStatistics(every="1it", modules=["0", "2"]))
    seen = new_metrics(engine)
    outputs = kept_outputs(engine.model[2])
    engine.run(batches(1), max_epochs=1)
    assert seen[0][1]["activation_mean/2"] == pytest.approx(outputs[0].double().mean().item(), rel=1e-6)
    assert set(engine.find(ActivationStatistics).metric_names(engine)) == set(seen[0][1])


def test_a_window_that_is_cut_is_continued_with_what_was_measured() -> None:
    whole = build(ActivationStatistics(every="4it", window=4))
    seen = new_metrics(whole)
    states: list[Any] = []
    whole.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()))
    whole.run(batches(6), max_epochs=2)
    for cut in (2, 3, 5, 7):
        again = build(ActivationStatistics(every="4it", window=4))
        again.load_state_dict(states[cut - 1])
        later = new_metrics(again)
        again.run(batches(6), max_epochs=2)
        due = [[one for one in several if one[0] > cut and one[0] % 4 == 0] for several in (later, seen)]
        assert len(due[0]) == 3 - cut // 4
        assert digest(due[0]) == digest(due[1])


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'activation_statistics': the model has no activation modules such as nn\.ReLU"
    ):
        build(ActivationStatistics(), model=mlp(5, 8, 1)).run(batches(1), max_epochs=1)
    with pytest.raises(ValueError, match=r"modules='relu' matches no module; available modules: '0', '1', '2'"):
        build(ActivationStatistics(modules="relu")).run(batches(1), max_epochs=1)
    with pytest.raises(
        ValueError, match=r"'1' has 4 units in one output, but 3 units in a later output; set the unit dim"
    ):
        build(ActivationStatistics(every="2it", window=2, unit_dim=0)).run(batches([4, 3]), max_epochs=1)
    with pytest.raises(ValueError, match=r"ActivationStatistics\(window=3\): the window is longer than every='2it'"):
        ActivationStatistics(every="2it", window=3)
    with pytest.raises(ValueError, match=r"ActivationStatistics\(every='2ep'\)"):
        ActivationStatistics(every="2ep")
    with pytest.raises(TypeError, match=r"ActivationStatistics\(unit_dim='last'\)"):
        ActivationStatistics(unit_dim="last")  # type: ignore[arg-type]


@pytest.mark.moderate
def test_it_changes_nothing_and_keeps_the_promises_of_a_handler() -> None:
    make = partial(ActivationStatistics, every="3it", window=2)
    check_handler(build, make, batches(4), max_epochs=2, changes_training=False)
