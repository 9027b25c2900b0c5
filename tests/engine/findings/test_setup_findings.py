"""What is said about how an engine is set up: processes that the user has connected."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from signalfire import FindingWarning
from tests.kit import build, evaluator_of, linear


@pytest.mark.parametrize("shared", [False, True])
def test_a_loader_that_gives_each_process_its_part_is_not_said_to_give_all(
    shared: bool, monkeypatch: pytest.MonkeyPatch
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
        assert ("reads all of the data" in str(caught[0].message)) is not shared
        assert not build(model).check(loader).of("C30")  # the gradients of the processes are averaged
        assert len(build(linear(5, 1)).check(loader).of("C30")) == 1
    finally:
        dist.destroy_process_group()
