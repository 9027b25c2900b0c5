"""Every optimizer: 20 steps bit-equal to a plain loop, and bit-equal when resumed at step 7."""

from __future__ import annotations

import inspect
import io
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from signalfire import Engine, Events, Handler, Phase, Update, groups, seed_everything
from signalfire.core.overrides import Override
from signalfire.exact import random_state, restore_random_state
from signalfire.updates.optimizers import JointOptimizer, needs_closure

from .outcomes import Outcome, judged, same

STEPS, CUT = 20, 7
MATRICES = {"matrices": lambda name, p: p.dim() == 2 and name != "0.weight", "rest": "*"}


def network(of: str = "") -> nn.Sequential:
    torch.manual_seed(3)
    if of == "sparse gradients":
        return nn.Sequential(nn.Embedding(9, 3, sparse=True))
    if of == "low-rank factors":
        embedding = nn.Embedding(9, 6).requires_grad_(False)
        return nn.Sequential(embedding, nn.Flatten(), nn.Linear(12, 2, bias=False), nn.Linear(2, 3, bias=False))
    return nn.Sequential(
        nn.Embedding(9, 6), nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)
    )


def batches(of: str = "") -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    inputs = (4,) if of == "sparse gradients" else (4, 2)
    return [
        (torch.randint(9, inputs, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(STEPS)
    ]


class CreateGraph(Handler):
    """Keeps the graph of the gradients, for optimizers that look at second derivatives."""

    trains = True

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.GRADIENTS, self.compute, by=self)

    def compute(self, engine: Engine, update: Any, compute: Any) -> None:
        inputs, targets = engine.state.batch
        update.output = engine.model(inputs)
        loss = F.cross_entropy(update.output, targets)
        loss.backward(create_graph=True)
        update.raw_loss = update.backward_loss = loss.detach()
        update.window.held += 1


Build = Callable[[nn.Module], Any]


def plain(build: Build, of: str, graph: bool, begin: dict[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """The plain loop; with what it has saved at the cut, and from there if it is given that."""
    model = network(of)
    optimizer = build(model)
    saved = None
    seed_everything(1)
    first = 0
    if begin is not None:
        model.load_state_dict(begin["model"])
        optimizer.load_state_dict(begin["optimizer"])
        restore_random_state(begin["random"])
        first = CUT
    for step, (inputs, targets) in enumerate(batches(of)[first:], first + 1):

        @torch.enable_grad()
        def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward(create_graph=graph)
            return loss

        if needs_closure(optimizer):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        optimizer.zero_grad()
        if step == CUT and begin is None:
            buffer = io.BytesIO()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random_state()}
            torch.save(state, buffer)
            buffer.seek(0)
            saved = torch.load(buffer, weights_only=False)
    return model, saved


def engine_of(build: Build, of: str, graph: bool) -> Engine:
    model = network(of)
    engine = Engine(Update.supervised(F.cross_entropy, build(model)), model=model, seed=0)
    if graph:
        engine.attach(CreateGraph())
    return engine


def check(build: Build, of: str = "", graph: bool = False) -> str | None:
    """Why an optimizer does not pass; None if it does."""
    expected, saved = plain(build, of, graph)
    engine = engine_of(build, of, graph)
    states: list[Any] = []

    def save(engine: Engine) -> None:
        buffer = io.BytesIO()
        torch.save(engine.state_dict(), buffer)
        buffer.seek(0)
        # Objects that optimizers keep are named as safe, as the finding about them says.
        refused = [pkgutil.resolve_name(name) for name in get_unsafe_globals_in_checkpoint(buffer)]
        buffer.seek(0)
        with safe_globals(refused):
            states.append(torch.load(buffer, weights_only=True))

    engine.connect(Events.ITERATION_COMPLETED(once=CUT), save, phase=Phase.PERSIST)
    seed_everything(1)
    engine.run(batches(of), max_epochs=1, check=False)
    if not same(engine.model.parameters(), expected.parameters()):
        return "differs from the plain loop"
    resumed = engine_of(build, of, graph)
    resumed.load_state_dict(states[0])
    torch.manual_seed(9)
    resumed.run(batches(of), max_epochs=1, check=False)
    if same(resumed.model.parameters(), expected.parameters()):
        return None
    again, _ = plain(build, of, graph, saved)
    if not same(again.parameters(), expected.parameters()):
        return "resumed, the plain loop differs as well: its state_dict() is not complete"
    return "resumed, it differs from the plain loop"


def of_torch() -> list[Outcome]:
    """The optimizers of torch.optim."""
    found = []
    for name, kind in sorted(vars(torch.optim).items()):
        if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
            continue
        if name == "Muon":
            found.append(judged(name, partial(check, _muon(kind))))
        else:
            found.append(
                judged(
                    name,
                    partial(check, partial(_built, kind, lr=0.01), "sparse gradients" if name == "SparseAdam" else ""),
                )
            )
    return found


def _built(kind: Any, model: nn.Module, **options: Any) -> Any:
    made = _with_closure(kind) if kind.__name__ in _CLOSURE else kind
    return made([p for p in model.parameters() if p.requires_grad], **options)


def _muon(kind: Any) -> Build:
    def build(model: nn.Module) -> Any:
        split = groups(model, MATRICES)
        return [kind(split["matrices"], lr=0.01), torch.optim.AdamW(split["rest"], lr=0.01)]

    return _together(build)


def _together(build: Build) -> Build:
    """Several optimizers, for an Update as they are, for the plain loop as one."""
    return lambda model: JointOptimizer({str(place): one for place, one in enumerate(build(model))})


_GRAPH = {"adahessian", "sophiah"}
"""Those whose documents say ``backward(create_graph=True)``."""

_CLOSURE = {"AliG", "BSAM"}
"""Those that raise an error without a closure."""

_DISTRIBUTED = {"demo", "distributedmuon"}
"""Those that exchange gradients by themselves."""


def of_pytorch_optimizer() -> list[Outcome]:
    """The names of pytorch_optimizer's get_supported_optimizers(), as its documents say they are built."""
    import pytorch_optimizer

    found = []
    for name in sorted(pytorch_optimizer.get_supported_optimizers()):
        kind = pytorch_optimizer.load_optimizer(name)
        of = "low-rank factors" if name == "lorarite" else ""
        with one_process() if name in _DISTRIBUTED else nullcontext():
            found.append(judged(name, partial(check, partial(_of_package, kind), of, graph=name in _GRAPH)))
    return found


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _with_closure(kind: Any) -> Any:
    """A class whose step requires the closure that its documents ask for, after a backward, and its signature does not."""

    class Closing(kind):  # type: ignore[misc]
        def step(self, closure: Callable[[], Any]) -> Any:
            closure()
            return super().step(torch.enable_grad()(closure))

    return Closing


def _of_package(kind: Any, model: nn.Module) -> Any:
    parameters = inspect.signature(kind.__init__).parameters
    first = next(name for name in parameters if name != "self")
    options: dict[str, Any] = (
        {"lr": 1e-3} if "lr" in parameters and parameters["lr"].default is inspect.Parameter.empty else {}
    )
    if first == "model":
        return kind(model, **options)
    if kind.__name__ == "SpectralSphere":
        split = groups(model, MATRICES)
        return JointOptimizer({"matrices": kind(split["matrices"]), "rest": torch.optim.AdamW(split["rest"])})
    if "muon" in kind.__name__.lower() or kind.__name__ == "AdaGO":
        split = groups(model, MATRICES)
        return kind(
            [{"params": split["matrices"], "use_muon": True}, {"params": split["rest"], "use_muon": False}], **options
        )
    if "num_data" in parameters:
        options["num_data"] = 4 * STEPS
    if "num_iterations" in parameters and parameters["num_iterations"].default is inspect.Parameter.empty:
        options["num_iterations"] = STEPS
    made = _with_closure(kind) if kind.__name__ in _CLOSURE else kind
    return made([p for p in model.parameters() if p.requires_grad], **options)
