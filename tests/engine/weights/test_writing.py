"""Exported weights: the same bytes whichever form holds them, read back by safetensors; the old file or the new one, whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from signalfire import Engine, Events, Update
from signalfire.authoring.randomness import random_state
from signalfire.checkpoints import Files
from signalfire.checkpoints.files import Content
from signalfire.handlers import EMA, SWA, Checkpoint, DistributedDataParallel, FullyShardedDataParallel, TruePrecision
from signalfire.weights import export_weights
from tests.kit import assert_same, batches, build, digest, mlp, needs, quick
from tests.processes import assert_alike, run_together

needs("safetensors", "safetensors")

import safetensors.torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_model  # noqa: E402


class Network(nn.Module):
    """With convolutions, statistics, and a tied parameter."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3, dtype=torch.uint8))
        self.register_buffer("nothing", torch.empty(0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(self.norm(self.conv(x)).flatten(1)))
        return output


def load_file(path: Path) -> dict[str, Tensor]:
    return dict(sorted(safetensors.torch.load_file(path).items()))


def in_order(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(sorted(state.items()))


def idle(model: nn.Module) -> Engine:
    return Engine(Update.prediction(), model=model, seed=0)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checkpointed(model: Any) -> Any:
    forward = model.first.forward
    model.first.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    return model


def partly_compiled(model: Network) -> nn.Module:
    model.norm = torch.compile(model.norm, backend="eager")  # type: ignore[assignment]
    return model


FORMS: dict[str, Any] = {
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "partly compiled": partly_compiled,
    "checkpointed": checkpointed,
}


@pytest.mark.parametrize("form", quick(FORMS, "channels last", "checkpointed"))
def test_the_same_weights_give_the_same_bytes(form: str, tmp_path: Path) -> None:
    plain = export_weights(idle(Network()), tmp_path / "plain.safetensors")
    other = export_weights(idle(FORMS[form](Network())), tmp_path / "new" / "other.safetensors")
    assert sha256(plain) == sha256(other) == sha256(export_weights(idle(Network()), tmp_path / "again.safetensors"))
    changed = Network()
    with torch.no_grad():
        changed.conv.weight.view(-1)[0] += 1e-3
    assert sha256(export_weights(idle(changed), tmp_path / "changed.safetensors")) != sha256(plain)


def test_the_file_holds_the_state_without_aliases_and_loads_strictly(tmp_path: Path) -> None:
    model = Network()
    path = export_weights(idle(model), tmp_path / "x.safetensors")
    state = model.state_dict()
    expected = {key: value for key, value in state.items() if key != "second.weight"}
    found = load_file(path)
    assert found.keys() == expected.keys()
    assert_same(found, in_order(expected))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "second.weight": "first.weight"}
    fresh = Network(seed=4)
    assert load_model(fresh, path, strict=True) == (set(), [])
    assert_same(fresh, model)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    assert size % 8 == 0
    for name, tensor in expected.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, (
            "a reader that maps the file needs it aligned"
        )


class Wrapped(nn.Module):
    """A linear model with what the ranks train together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x).tanh())
        return output


def export_of_ranks(folder: Path, kind: str) -> str:
    """Export in a run before the first step, where all forms hold the same weights, and after it."""
    distributed = FullyShardedDataParallel() if kind == "fsdp" else DistributedDataParallel()
    engine = build(Wrapped(), distributed)
    engine.connect(Events.EPOCH_STARTED, lambda engine: export_weights(engine, folder / f"{kind}.safetensors"))
    engine.run(batches(2), max_epochs=1)
    return sha256(folder / f"{kind}.safetensors")


@pytest.mark.moderate
@pytest.mark.parametrize("kind", quick(["ddp", "fsdp"], "ddp"))
def test_two_ranks_export_the_bytes_of_one(kind: str, tmp_path: Path) -> None:
    alone = sha256(export_weights(idle(Wrapped()), tmp_path / "plain.safetensors"))
    assert assert_alike(run_together(export_of_ranks, 2, tmp_path, kind)) == alone


def test_several_models_and_half_precision_are_named_and_kept(tmp_path: Path) -> None:
    models = {"student": mlp(5, 4, 1), "teacher": mlp(5, 4, 1, seed=4)}
    path = export_weights(Engine(Update.prediction(), model=models), tmp_path / "x.safetensors")
    both = {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}
    assert_same(load_file(path), in_order(both))
    engine = build(mlp(5, 4, 1), TruePrecision("bf16"))
    engine.run(batches(1), max_epochs=1)
    path = export_weights(engine, tmp_path / "half.safetensors")
    assert_same(load_file(path), in_order(engine.modules["model"].state_dict()))
    assert load_file(path)["0.weight"].dtype is torch.bfloat16


# ---- averages -----------------------------------------------------------------------------------------------------


def test_averages_are_written_and_the_live_weights_untouched(tmp_path: Path) -> None:
    engine = build(mlp(5, 4, 1), EMA(0.5))
    engine.run(batches(4), max_epochs=1)
    before = digest((engine.model.state_dict(), random_state()))
    averages = load_file(export_weights(engine, tmp_path / "x.safetensors"))
    assert digest((engine.model.state_dict(), random_state())) == before
    assert_same(averages, in_order(engine.weights()["model"]))
    raw = load_file(export_weights(engine, tmp_path / "raw.safetensors", average=False))
    assert_same(raw, in_order(engine.model.state_dict()))
    assert digest(raw) != digest(averages)


def test_two_averaging_handlers_have_to_be_told_apart(tmp_path: Path) -> None:
    engine = build(mlp(5, 4, 1), EMA(0.5), SWA(1, bn_batches=0, evaluate=False), EMA(0.9, evaluate=False, name="slow"))
    engine.run(batches(4), max_epochs=2)
    with pytest.raises(ValueError, match=r"weights: 'ema', 'swa', 'slow'; .* average='ema', or .*average=False"):
        export_weights(engine, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()
    for name in ("ema", "swa", "slow"):
        found = load_file(export_weights(engine, tmp_path / "x.safetensors", average=name))
        kept: Any = engine.handlers[name]
        assert_same({f"model.{key}": value for key, value in found.items()}, in_order(kept.parameter_copies()))
    with engine.without("swa", "slow"):
        assert_same(load_file(export_weights(engine, tmp_path / "y.safetensors")), in_order(engine.weights()["model"]))
    with pytest.raises(
        ValueError, match=r"is not an attached handler that averages weights; attached averaging handlers: 'ema'"
    ):
        export_weights(engine, tmp_path / "x.safetensors", average="emma")


def test_averages_that_do_not_exist_yet_are_an_error_if_they_are_asked_for(tmp_path: Path) -> None:
    engine = build(mlp(5, 4, 1), EMA(0.5))
    with pytest.raises(ValueError, match=r"'ema' has no averages yet"):
        export_weights(engine, tmp_path / "x.safetensors", average="ema")
    assert_same(load_file(export_weights(engine, tmp_path / "x.safetensors")), in_order(engine.model.state_dict()))


def test_averages_of_a_loaded_state_are_written_before_the_run_that_resumes(tmp_path: Path) -> None:
    engine = build(mlp(5, 4, 1), EMA(0.5), Checkpoint(tmp_path / "run"))
    engine.run(batches(4), max_epochs=1)
    expected = sha256(export_weights(engine, tmp_path / "x.safetensors"))
    other = build(mlp(5, 4, 1, seed=8), EMA(0.5), Checkpoint(tmp_path / "run"))
    other.load_state_dict(Checkpoint.load(tmp_path / "run"))
    assert sha256(export_weights(other, tmp_path / "y.safetensors")) == expected


# ---- what cannot be written ---------------------------------------------------------------------------------------


class Stateful(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Stateful(2, 1), "'_extra_state' in the model's state is a dict"),
        (nn.Linear(2, 1, device="meta"), "'weight' is a tensor on the meta device, without values"),
        (
            nn.Linear(2, 1, dtype=torch.complex128),
            "'weight' has the dtype torch.complex128, which safetensors cannot store",
        ),
    ],
    ids=["extra state", "meta", "complex128"],
)
def test_what_safetensors_cannot_hold_is_named(model: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export_weights(idle(model), tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        (
            "model.pt",
            {},
            ValueError,
            r"export_weights\(path='model.pt'\): expected a file name that ends with '.safetensors'",
        ),
        (b"x.safetensors", {}, TypeError, r"export_weights\(path=b'x.safetensors'\): expected a path"),
        ("x.safetensors", {"average": True}, TypeError, r"export_weights\(average=True\)"),
    ],
)
def test_wrong_arguments_are_refused(path: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        export_weights(idle(nn.Linear(2, 1)), path, **options)


class Failing(Files):
    """Ends the process, or raises an error, at the n-th operation that writes."""

    def __init__(self, at: int, kill: bool) -> None:
        self.left, self.kill = at, kill

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "no space left")

    def write(self, path: Path, content: Content) -> None:
        def partial(file: BinaryIO) -> None:
            assert callable(content)
            content(file)
            file.truncate(file.tell() // 2)
            self.step()

        self.step()
        if self.left == 1:
            super().write(path, partial)
        self.left -= 1
        super().write(path, content)

    def sync(self, path: Path) -> None:
        self.step()
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self.step()
        super().rename(old, new)


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("kill", [False, True], ids=["error", "kill"])
def test_after_any_failure_there_is_the_old_file_or_the_new_one_whole(at: int, kill: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    old, new = idle(mlp(5, 4, 1, seed=1)), idle(mlp(5, 4, 1, seed=2))
    before = sha256(export_weights(old, path))
    after = sha256(export_weights(new, tmp_path / "y.safetensors"))
    if kill:
        if (child := os.fork()) == 0:
            export_weights(new, path, files=Failing(at, kill=True))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    else:
        with pytest.raises(OSError, match="no space left") as caught:
            export_weights(new, path, files=Failing(at, kill=False))
        assert "is unchanged" in caught.value.__notes__[0] or at == 5
        assert len(list(tmp_path.iterdir())) == 2
    assert sha256(path) == (after if at == 5 else before)
    assert sha256(export_weights(new, path)) == after
    assert len(list(tmp_path.iterdir())) == 2, "what the dead process left is removed"


def test_a_file_that_does_not_fit_on_the_disk_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    before = sha256(export_weights(idle(mlp(5, 4, 1)), path))
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            export_weights(idle(mlp(50, 40, 1)), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sha256(path) == before
    assert list(tmp_path.iterdir()) == [path]
