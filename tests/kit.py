"""What many tests share: values of the quick tier, extras, programs in processes of their own; models, data and engines."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import signalfire.handlers
from signalfire import Engine, EventEnum, Events, Handler, Phase, Update
from signalfire.authoring.versions import TORCH
from signalfire.checkpoints import Content
from signalfire.handlers import Average, Metrics

__all__ = [
    "CLIENTS",
    "DISTRIBUTING",
    "LIMIT",
    "MEMORY",
    "Clock",
    "Trial",
    "assert_same",
    "average_gradients",
    "batches",
    "build",
    "campaign",
    "cleaned_up",
    "content_of",
    "digest",
    "evaluator_of",
    "finished",
    "group_ended",
    "idle_engine",
    "interruptible",
    "last_of_campaign",
    "linear",
    "mlp",
    "needs",
    "needs_torch",
    "new_metrics",
    "python",
    "quick",
    "recorder",
    "same",
    "shipped",
    "spread",
    "validation_loss",
    "wait_until",
    "windows",
]

Batch = tuple[Tensor, Tensor]
SGD = partial(torch.optim.SGD, lr=0.1)

LIMIT = 300.0
"""Seconds after which a test gives up on another process: many times what a busy machine takes."""

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""A folder in memory, where there is one: thousands of synced files would wait for a disk."""

DISTRIBUTING = "DistributedDataParallel", "ElasticDataParallel", "FullyShardedDataParallel", "TensorParallel"
"""The handlers that distribute a run, of which an engine has one: they are tried in several processes."""

CLIENTS = {
    "signalfire.handlers.mlflow_logger": ("mlflow", "sqlalchemy", "alembic"),
    "signalfire.handlers.trackio_logger": ("trackio",),
    "signalfire.handlers.wandb_logger": ("wandb",),
}
"""What the loggers of other services import. Their examples run in processes of their own."""


def quick(values: Iterable[Any], *keep: Any, whole: bool = False) -> list[Any]:
    """Parameters of a test, of which the quick tier runs those in ``keep`` alone.

    Args:
        values: as ``parametrize`` takes them; a tuple gives several parameters, unless it is one as a ``whole``.
    """
    return [value if value in keep else _slow(value, whole) for value in values]


def spread(values: Iterable[Any], count: int, mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Parameters of a test, of which the quick tier runs so many, evenly spread; the first and the last are among them."""
    values = list(values)
    kept: Collection[int] = {round(i * (len(values) - 1) / max(1, count - 1)) for i in range(count)}
    return [value if place in kept else _slow(value, whole=False, mark=mark) for place, value in enumerate(values)]


def _slow(value: Any, whole: bool, mark: pytest.MarkDecorator = pytest.mark.slow) -> Any:
    together = isinstance(value, tuple) and not whole
    return pytest.param(*value, marks=mark) if together else pytest.param(value, marks=mark)


def needs_torch(*version: int, why: str) -> pytest.MarkDecorator:
    """Skip a test where torch is older."""
    return pytest.mark.skipif(
        version > TORCH, reason=f"needs torch {'.'.join(map(str, version))}, here it is {torch.__version__}: {why}"
    )


def needs(extra: str, *modules: str) -> None:
    """Skip the test, or all of a file, where a module of this extra is not installed."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        pytest.skip(f"install the extra: pip install -e '.[{extra}]'", allow_module_level=True)


def free_port() -> int:
    """A port to listen on. Connections get theirs above, so that none takes it before it is listened on, and no other process
    of tests is given it as long as this one lives."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)  # Linux gives connections ports from 32768
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0port {port} of Signalfire's tests")  # a name without a file, which ends with the process
            with socket.socket() as tried:
                tried.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        atexit.register(held.close)
        return port


class Clock:
    """What a module reads in place of `time`: it stands still but where a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait_until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """Wait for what another process or thread brings about.

    Raises:
        TimeoutError: if it does not, within so many seconds.
    """
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"still not so after {limit:g} s")
        time.sleep(0.005)


@contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT interrupt what is started meanwhile; in the background of a shell, the tests themselves ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def python(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python program while it runs; it is killed at the end, with all of its session if it has one of its own."""
    command = [sys.executable, *map(str, arguments)]
    with interruptible():
        process = subprocess.Popen(command, text=True, **options)
    with process:
        try:
            yield process
        finally:
            process.kill()
            if options.get("start_new_session"):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def group_ended(group: int) -> bool:
    """Whether no process of this process group is left."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return False
    return True


def finished(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """What has become of a Python program, with all that it wrote."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with python(*arguments, **pipes) as process:
        output, errors = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


CAMPAIGNS = Path(__file__).parent / "campaigns"


def campaign(name: str, *arguments: Any) -> Any:
    """What a short form of a campaign has found; it ends with an error where it has found a failure."""
    program = [sys.executable, str(CAMPAIGNS / f"{name}.py"), *map(str, arguments), "--json", "-"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=500)
    assert ended.stdout, ended.stderr
    return json.loads(ended.stdout)


def last_of_campaign(name: str, *options: str, result: str | None = None) -> tuple[str, Any]:
    """What a campaign prints of the last result of its long form, and that result, which has its name by default."""
    ended = finished(CAMPAIGNS / f"{name}.py", *options, "--last")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, json.loads((CAMPAIGNS / "results" / f"{result or name}.json").read_text())


def cleaned_up(folder: Path) -> Any:
    """A fixture for a module: the folder is there, and is removed only as the session ends.

    In parallel, a process may come back to a module.
    """

    @pytest.fixture(autouse=True, scope="session")
    def clean_up() -> Iterator[None]:
        folder.mkdir(exist_ok=True)
        yield
        shutil.rmtree(folder, ignore_errors=True)

    return clean_up


def content_of(content: Content) -> bytes:
    """What `Files.write` is to write, as bytes."""
    if not callable(content):
        return content
    file = BytesIO()
    content(file)
    return file.getvalue()


def shipped() -> set[type[Handler]]:
    """The classes of all handlers that are shipped."""
    public = [getattr(signalfire.handlers, name) for name in signalfire.handlers.__all__]
    return {one for one in public if isinstance(one, type) and issubclass(one, Handler)}


def batches(
    sizes: int | Iterable[int] = 6,
    inputs: int | tuple[int, ...] = 5,
    targets: int | tuple[int, ...] = 1,
    *,
    classes: int = 0,
    scale: float = 1.0,
    seed: int = 11,
) -> list[Batch]:
    """The same random batches with every call.

    Args:
        sizes: how many batches of 4 samples, or the number of samples of each.
        inputs: shape of a sample.
        targets: shape of its target; with classes, of so many numbers of classes.
        scale: of targets without classes.
    """
    generator = torch.Generator().manual_seed(seed)
    x_shape, y_shape = ((shape,) if isinstance(shape, int) else shape for shape in (inputs, targets))
    made = []
    for size in [4] * sizes if isinstance(sizes, int) else sizes:
        x = torch.randn(size, *x_shape, generator=generator)
        if classes:
            made.append((x, torch.randint(classes, (size, *y_shape), generator=generator)))
        else:
            made.append((x, scale * torch.randn(size, *y_shape, generator=generator)))
    return made


def mlp(inputs: int, hidden: int, outputs: int, *between: nn.Module, seed: int = 3) -> nn.Sequential:
    """Two layers, and modules without random weights between them; the same weights with every call."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), *between, nn.Linear(hidden, outputs))


def linear(inputs: int, outputs: int, seed: int = 3) -> nn.Linear:
    """One layer, with the same weights in every call."""
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def build(
    model: nn.Module,
    *handlers: Handler,
    loss: Callable[..., Tensor] = nn.functional.mse_loss,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    **options: Any,
) -> Engine:
    """An engine that trains the model in the usual way, with these handlers."""
    engine = Engine(Update.supervised(loss, optimizer), model=model, **{"seed": 0, **options})
    engine.attach(*handlers)
    return engine


def evaluator_of(model: nn.Module, loss: Callable[..., Tensor] = nn.functional.mse_loss) -> Engine:
    """An engine that measures the loss of a model."""
    engine = Engine(Update.supervised(loss), model=model)
    engine.attach(Metrics(loss=Average()))
    return engine


def idle_engine(*catalogues: type[EventEnum]) -> Engine:
    """An engine whose iterations do nothing, so that only the events count; with these catalogues of events besides."""
    engine = Engine(Update.from_function(lambda engine, batch: None))
    for catalogue in catalogues:
        engine.register_events(catalogue)
    return engine


def new_metrics(engine: Engine) -> list[tuple[int, dict[str, float]]]:
    """A list that a run fills: each iteration at which metrics were written, and these."""
    seen: list[tuple[int, dict[str, float]]] = []
    serials: dict[str, int] = {}

    def look(engine: Engine) -> None:
        new = engine.state.metrics.numbers_since(serials)
        serials.update(engine.state.metrics.serials)
        if new:
            seen.append((engine.state.iteration, new))

    engine.connect(Events.ITERATION_COMPLETED, look, phase=Phase.RECORD)
    return seen


def recorder(log: list[str], name: str) -> Callable[[Engine], str]:
    """A receiver that notes its name, and returns it."""

    def receiver(engine: Engine) -> str:
        log.append(name)
        return name

    return receiver


class Trial:
    """A trial of a search that prunes nothing."""

    def report(self, value: float, step: int) -> None:
        assert step >= 0

    def should_prune(self) -> bool:
        return False


def validation_loss(model: nn.Module) -> float:
    """The loss over three batches, without an engine; the modes stay as they are."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(inputs), targets).double() for inputs, targets in batches(3)]
    for module, mode in modes.items():
        module.training = mode
    return torch.stack(losses).mean().item()


def windows(data: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """For plain loops that accumulate: so many batches at a time, the last ones as many as are left."""
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def average_gradients(model: nn.Module, count: int) -> None:
    """For plain loops that accumulate: what so many batches have added up, divided once."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(count)


def assert_same(one: nn.Module | Mapping[str, Tensor], other: nn.Module | Mapping[str, Tensor]) -> None:
    """Parameters and buffers, or other tensors by name, are alike bit for bit, and of one type."""
    ours, theirs = (dict(it.state_dict() if isinstance(it, nn.Module) else it) for it in (one, other))
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


def same(one: nn.Module | Mapping[str, Tensor], other: nn.Module | Mapping[str, Tensor]) -> bool:
    """Whether parameters and buffers, or other tensors in one order, are alike bit for bit."""
    ours, theirs = (it.state_dict() if isinstance(it, nn.Module) else it for it in (one, other))
    return all(torch.equal(a, b) for a, b in zip(ours.values(), theirs.values(), strict=True))


def digest(value: Any) -> str:
    """A sha256 that is equal for equal states alone."""
    found = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            content = value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found.update(f"{value.dtype}{tuple(value.shape)}".encode() + content)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                found.update(f"{key}:".encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            found.update(b"[")
            for item in value:
                feed(item)
        else:
            found.update(f"{value!r};".encode())

    feed(value)
    return found.hexdigest()
