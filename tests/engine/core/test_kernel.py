"""The kernel trains by itself: with handlers, to the bits of an Engine, and without a room beside it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

from signalfire import Engine, Update
from signalfire.handlers import GradientAccumulation, GradientClipping
from tests.kit import SGD, mlp
from tests.processes import run_program

ROOT = Path(__file__).parents[3]
DATA = [(torch.randn(4, 5, generator=torch.Generator().manual_seed(number)), torch.ones(4, 1)) for number in range(6)]

PROGRAM = """
import json, sys, types
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn.functional import mse_loss

for name in [name for name in sys.modules if name.partition(".")[0] == "signalfire"]:
    del sys.modules[name]
# The package without what its own __init__ imports: every room.
package = sys.modules["signalfire"] = types.ModuleType("signalfire")
package.__path__ = [{engine!r}]
from signalfire.core.connection import Phase
from signalfire.core.events import Events
from signalfire.core.handler import Handler, on
from signalfire.core.kernel import Kernel

loaded = sorted(name for name in sys.modules if name.startswith("signalfire."))
package.Engine, package.Events, package.Handler, package.Phase, package.on = Kernel, Events, Handler, Phase, on
package.__getattr__ = lambda name: object  # types of annotations
handlers = sys.modules["signalfire.handlers"] = types.ModuleType("signalfire.handlers")
handlers.__path__ = [{handlers!r}]
from signalfire.handlers.gradient_accumulation import GradientAccumulation
from signalfire.handlers.gradient_clipping import GradientClipping

model, data = torch.load("given.pt", weights_only=False)
update = SimpleNamespace(
    name="main", forward=lambda kernel, batch: kernel.model(batch[0]), function=None, parameters=None,
    loss=lambda kernel, output, batch: mse_loss(output, batch[1]), optimizer=partial(torch.optim.SGD, lr=0.1),
)
kernel = Kernel(update, model=model, seed=0)
kernel.attach(GradientAccumulation(2), GradientClipping(0.5))
state = kernel.run(data, max_epochs=2)
assert (state.iteration, kernel.updates[0].steps) == (12, 6)
torch.save(model.state_dict(), "trained.pt")
print(json.dumps(loaded))
"""


def test_the_kernel_trains_by_itself_to_the_bits_of_an_engine(tmp_path: Path) -> None:
    torch.save((mlp(5, 8, 1), DATA), tmp_path / "given.pt")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(engine=str(ROOT / "engine"), handlers=str(ROOT / "handlers")))
    result = run_program(program, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    engine = Engine(Update.supervised(mse_loss, SGD), model=mlp(5, 8, 1), seed=0)
    engine.attach(GradientAccumulation(2), GradientClipping(0.5))
    engine.run(DATA, max_epochs=2)
    trained = torch.load(tmp_path / "trained.pt")
    assert all(torch.equal(value, trained[name]) for name, value in engine.model.state_dict().items())
    rooms = {name.split(".")[1] for name in json.loads(result.stdout)}
    assert rooms == {"core"}, "the kernel loads nothing else of the package"
