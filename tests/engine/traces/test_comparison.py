"""Two traces are compared: the first record that differs, what cannot be compared, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from signalfire import Engine, Events, Handler, Update, seed_everything
from signalfire.handlers import (
    EMA,
    Accuracy,
    Checkpoint,
    DistributedDataParallel,
    ElasticDataParallel,
    GradientClipping,
    Metrics,
    Trace,
)
from signalfire.traces import compare
from tests.processes import run_together

SGD = partial(torch.optim.SGD, lr=0.1)


def data(count: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(count)
    ]


def train(
    path: Path, *handlers: Handler, plant: Callable[[Engine], object] | None = None, until: int = 16, **options: Any
) -> Path:
    """Train with a trace, and return its path."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=model, seed=0)
    engine.attach(EMA(0.9), Metrics(accuracy=Accuracy()), *handlers, Trace(path, **({"every": "1it"} | options)))
    if plant is not None:
        plant(engine)
    engine.run(data(), max_epochs=2, max_iters=until)
    return path


def nudge(engine: Engine) -> None:
    engine.model[0].weight.data[1, 2] += 1e-3


def planted(event: Events = Events.BACKWARD_COMPLETED, iteration: int = 5) -> Callable[[Engine], object]:
    return lambda engine: engine.connect(event(once=iteration), nudge)


def test_the_first_record_that_differs_is_named_with_what_was_equal_before(tmp_path: Path) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", plant=planted())
    found = compare(a, b)
    assert found.first is not None
    assert (found.first.iteration, found.first.event, found.first.thing) == (5, "ITERATION_COMPLETED", "parameters")
    assert found.first.others == ("handlers/ema",)
    assert found.last_equal == (5, "GRADIENTS_READY")
    assert (found.equal_until, found.equal) == (4, False)
    assert [row.equal for row in found.rows] == [True] * 5 + [False] * 12
    printed = str(found)
    assert "first difference: iteration 5, ITERATION_COMPLETED: the parameters" in printed
    assert "all earlier records are equal, up to GRADIENTS_READY of iteration 5" in printed
    assert "on, 12 of 12 iterations differ" in printed
    assert found._repr_html_().startswith("<pre")


def test_by_tensor_the_tensor_and_the_event_are_named(tmp_path: Path) -> None:
    a, b = (
        train(tmp_path / name, plant=plant, detail="tensor")
        for name, plant in (("a", None), ("b", planted(Events.OPTIMIZER_STEP_COMPLETED)))
    )
    found = compare(a, b).first
    assert found is not None
    assert (found.event, found.thing) == ("OPTIMIZER_STEP_COMPLETED", "parameters/model.0.weight")


@pytest.mark.moderate
def test_traces_of_other_details_are_compared_by_their_numbers(tmp_path: Path) -> None:
    whole, by_tensor = train(tmp_path / "a"), train(tmp_path / "b", detail="tensor")
    assert compare(whole, by_tensor).equal
    found = compare(whole, train(tmp_path / "c", detail="tensor", plant=planted()))
    assert not found.equal


def test_one_that_ends_earlier_is_no_difference_but_is_said(tmp_path: Path) -> None:
    found = compare(train(tmp_path / "a"), train(tmp_path / "b", until=9))
    assert found.equal
    assert "b ends at iteration 9, a at 16" in str(found)


def test_handlers_of_one_run_are_named_and_are_no_difference(tmp_path: Path) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", GradientClipping(max_norm=1e9))
    found = compare(a, b)
    assert found.equal
    assert found.composed == ["'gradient_clipping' only in b"]
    assert "different setup: 'gradient_clipping' only in b" in str(found)


def test_runs_of_other_versions_and_flags_are_not_comparable(tmp_path: Path) -> None:
    path = train(tmp_path / "a")
    header, *records = path.read_text().splitlines(keepends=True)
    values = json.loads(header)
    values["environment"] |= {"torch": "2.6.0", "threads": 7}
    values["environment"]["flags"]["deterministic"] = True
    (tmp_path / "b").write_text(json.dumps(values) + "\n" + "".join(records))
    found = compare(path, tmp_path / "b")
    version = torch.__version__
    assert f"torch: {version} and 2.6.0" in found.unlike
    assert "deterministic: False and True" in found.unlike
    assert str(found).splitlines()[2].startswith("not comparable: ")


def test_generators_that_are_not_seeded_alike_are_said_and_hide_nothing(tmp_path: Path) -> None:
    def unseed(engine: Engine) -> None:
        torch.manual_seed(5)
        planted(iteration=3)(engine)

    found = compare(train(tmp_path / "a"), train(tmp_path / "b", plant=unseed))
    assert found.unseeded == ["torch"]
    assert "seeded differently: the random numbers of torch" in str(found)
    assert found.first is not None
    assert found.first.thing != "random/torch"


def test_records_in_common_are_needed(tmp_path: Path) -> None:
    a, b = (train(tmp_path / f"{every}", every=every, until=7) for every in ("5it", "7it"))
    for path in (a, b):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if "STARTED" not in line and "EPOCH" not in line))
    found = compare(a, b)
    assert not found.equal
    assert "no record in common" in str(found)


class Named(Handler):
    """A handler with a name of its own."""

    def attached(self, engine: Engine) -> None:
        """Do nothing."""


@pytest.mark.moderate
def test_what_is_printed_fits_one_screen(tmp_path: Path) -> None:
    a = train(tmp_path / "a", detail="tensor")
    many = [Named(name=f"named_{number}") for number in range(60)]
    b = train(tmp_path / "b", *many, plant=lambda engine: nn.init.ones_(engine.model[0].weight), detail="tensor")
    lines = str(compare(a, b)).splitlines()[2:]
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 100
    assert any("more" in line for line in lines)


@pytest.mark.moderate
def test_the_picture_shows_the_iterations(tmp_path: Path) -> None:
    found = compare(train(tmp_path / "a"), train(tmp_path / "b", plant=planted()))
    figure = found.plot(tmp_path / "apart.png")
    assert (tmp_path / "apart.png").stat().st_size > 5000
    (axes,) = figure.axes
    assert axes.get_title(loc="left").startswith("first difference: iteration 5")
    assert {text.get_text() for text in axes.get_legend().get_texts()} >= {"loss", "parameters", "equal, bit for bit"}


def distributed(folder: Path, name: str, shards: int, until: int, iteration: int | None) -> None:
    handler = ElasticDataParallel(shards=shards) if shards else DistributedDataParallel()

    def plant(engine: Engine) -> None:
        def swap(engine: Engine) -> None:
            if engine.state.shard == 3:
                engine.state.batch = engine.state.batch[0].flip(0), engine.state.batch[1].flip(0)

        engine.connect(Events.GET_BATCH_COMPLETED(once=iteration), swap)

    saving = Checkpoint(folder / f"{name} saved", every="2it", keep=9, resume=True)
    train(folder / f"{name}.jsonl", handler, saving, plant=plant if iteration else None, until=until)


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:C41", "ignore:C42")
def test_runs_of_shards_compare_for_any_number_of_processes_also_over_a_resume(tmp_path: Path) -> None:
    run_together(distributed, 1, tmp_path, "one", 4, 8, None)
    run_together(distributed, 3, tmp_path, "three", 4, 8, None)
    run_together(distributed, 4, tmp_path, "moved", 4, 4, None)
    run_together(distributed, 2, tmp_path, "moved", 4, 8, None)
    for name in ("three", "moved"):
        found = compare(tmp_path / "one.jsonl", tmp_path / f"{name}.jsonl")
        assert found.equal, found
        assert not found.unlike
    run_together(distributed, 2, tmp_path, "changed", 4, 8, 3)
    found = compare(tmp_path / "one.jsonl", tmp_path / "changed.jsonl")
    assert found.first is not None
    assert (found.first.iteration, found.first.event, found.first.shard) == (3, "GET_BATCH_COMPLETED", 3)
    assert "shard 3: the batch" in str(found)


@pytest.mark.moderate
def test_each_of_several_processes_has_a_trace_that_is_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_together(distributed, 2, tmp_path, name, 0, 4, None)
    assert (tmp_path / "a.rank1.jsonl").exists()
    found = compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert found.equal, found
    alone = train(tmp_path / "alone.jsonl", until=4)
    assert compare(alone, tmp_path / "a.jsonl").unlike == ["processes: 1 and 2"]
