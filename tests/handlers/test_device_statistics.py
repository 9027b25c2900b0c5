"""DeviceStatistics against the memory that Linux reports for this process."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, Events, Phase
from signalfire.handlers import CSVLogger, DeviceStatistics
from tests import kit
from tests.kit import batches


def build() -> Engine:
    return kit.build(kit.mlp(5, 8, 1, nn.Tanh()), optimizer=partial(torch.optim.SGD, lr=0.1))


def of_process() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def test_the_memory_is_that_of_this_process_and_grows_with_what_it_holds() -> None:
    engine, held, seen = build(), [], []
    engine.attach(DeviceStatistics(every="2it"))
    engine.connect(Events.ITERATION_STARTED(once=3), lambda engine: held.append(torch.ones(2**24)))  # 64 MiB
    engine.connect(
        Events.ITERATION_COMPLETED(every=2),
        lambda engine: seen.append((engine.state.metrics["process_mib"], of_process())),
        phase=Phase.RECORD,
    )
    engine.run(batches(4), max_epochs=1)
    for measured, expected in seen:
        assert measured == pytest.approx(expected, abs=2)
    assert seen[1][0] - seen[0][0] == pytest.approx(64, abs=4)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert engine.state.metrics["process_peak_mib"] == pytest.approx(peak, abs=2)


def test_loggers_write_them_and_checkpoints_do_not_hold_them(tmp_path: Path) -> None:
    engine = build()
    engine.attach(DeviceStatistics(every="1ep"), CSVLogger(tmp_path / "log.csv"))
    engine.run(batches(4), max_epochs=2)
    rows = [line.split(",") for line in (tmp_path / "log.csv").read_text().splitlines()]
    for name in ("process_mib", "process_peak_mib"):
        assert sum(f"train/{name}" in row for row in rows) == 2
    assert not engine.state_dict()["engine"]["metrics"]["values"]


def test_on_a_cpu_no_gpu_is_announced() -> None:
    engine = build()
    engine.attach(DeviceStatistics())
    assert engine.handlers["device_statistics"].metric_names(engine) == ["process_mib", "process_peak_mib"]


@pytest.mark.parametrize("wrong", [{"every": "often"}, {"every": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"DeviceStatistics\(every="):
        DeviceStatistics(**wrong)
