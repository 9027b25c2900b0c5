"""What is said about how an engine is set up: processes that the user has connected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from signalfire import Engine, Events, FindingWarning, Handler, Update, on
from signalfire.findings import Findings
from signalfire.handlers import CSVLogger
from tests.kit import batches, build, evaluator_of, linear, mlp


class Reducing(Handler):
    """Averages the gradients itself."""

    @on(Events.GRADIENTS_READY)
    def average(self, engine: Engine) -> None:
        for parameter in engine.model.parameters():
            dist.all_reduce(parameter.grad)


@pytest.mark.parametrize("shared", [False, True])
def test_a_loader_that_gives_each_process_its_part_is_not_said_to_give_all(
    shared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    data = TensorDataset(torch.randn(8, 5), torch.randn(8, 1))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = DistributedDataParallel(linear(5, 1))
        loader = DataLoader(data, 2, sampler=DistributedSampler(data) if shared else None)
        with pytest.warns(FindingWarning, match="W46") as caught:
            evaluator_of(model).run(loader)
        assert ("as if it were alone: this one may read all of the data" in str(caught[0].message)) is not shared
        evaluator = evaluator_of(model)
        evaluator.attach(CSVLogger(tmp_path / "log.csv"))
        with pytest.warns(FindingWarning, match=r"W46: .* alone: this one .*writes with 'csv_logger'"):
            evaluator.run(loader)
        assert not build(model).check(loader).of("C30")  # the gradients of the processes are averaged
        (found,) = build(linear(5, 1)).check(loader).of("C30")
        assert found.severity == "warning"
        (found,) = build(linear(5, 1), Reducing()).check(loader).of("C30")
        assert found.severity == "info"
        hooked = linear(5, 1)
        hooked.weight.register_hook(lambda gradient: gradient)
        (found,) = build(hooked).check(loader).of("C30")
        assert found.severity == "info"
    finally:
        dist.destroy_process_group()


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.scale * (output - target)).square().mean()


def test_the_way_out_for_the_parameters_of_a_loss_names_what_chooses_them() -> None:
    def found(parameters: Any) -> Findings:
        update = Update.supervised(Scaled(), SGD, lr=0.1, parameters=parameters)
        engine = Engine(update, model=mlp(5, 8, 1), seed=0, allow=["C08", "W11"])
        engine.run(batches(1), max_epochs=1)
        return engine.findings.of_run().of("W42")

    with pytest.warns(
        FindingWarning, match="no optimizer of the engine holds.*if you also pass parameters=, add 'loss'"
    ):
        assert len(found("1")) == 1
    assert not found(["1", "loss"])


def test_dropout_is_kept_in_eval_mode_as_the_way_out_says() -> None:
    model = mlp(5, 8, 1, nn.Dropout())
    model[1].eval()
    with pytest.warns(FindingWarning, match=r"W52: .* or, if it has no parameters, call its eval\(\) at EPOCH_STARTED"):
        build(model).run(batches(1), max_epochs=1)
    engine, modes = build(mlp(5, 8, 1, nn.Dropout())), set[bool]()
    engine.connect(Events.EPOCH_STARTED, lambda engine: engine.model[1].eval() and None)
    engine.connect(Events.FORWARD_COMPLETED, lambda engine: modes.add(engine.model[1].training))
    engine.run(batches(2), max_epochs=2)
    assert modes == {False}
