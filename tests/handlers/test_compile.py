"""Compile against training without it: bits, graphs, names, and nothing that stays; "inductor" where there is a C++ compiler."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Update
from signalfire.distributed import local_part
from signalfire.handlers import (
    EMA,
    ActivationCheckpointing,
    Checkpoint,
    Compile,
    DistributedDataParallel,
    Freezing,
    FullyShardedDataParallel,
    MicroBatching,
    MixedPrecision,
    ProgressiveResizing,
    SequenceLengthWarmup,
    Validation,
)
from tests import kit
from tests.kit import assert_same, batches, build, evaluator_of, mlp, needs_torch, quick
from tests.process_state import process_state
from tests.processes import Failed, run_together

# What torch warns of while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

ADAM = partial(torch.optim.Adam, lr=1e-2)
BITS = partial(Compile, backend="aot_eager")


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    """Also of automatic dynamic sizes, which torch keeps by the line of code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network() -> nn.Module:
    """A Sequential, of which ``module.compile()`` would compile nothing."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 1))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 10), nn.GELU(), nn.Dropout(0.2), nn.Linear(10, 5)) for _ in range(2)
        )
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.head(x)
        return result


def trained(*handlers: Handler, model: nn.Module | None = None, data: Any = None, epochs: int = 2) -> Engine:
    engine = build(model or network(), *handlers, optimizer=ADAM)
    torch.manual_seed(0)
    engine.run(data or batches([16, 16, 10], 5), max_epochs=epochs)
    return engine


def graphs(engine: Engine) -> list[int]:
    """A list that a run fills: the number of graphs after each epoch."""
    found: list[int] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: found.append(len(engine.find(Compile).sizes)))
    return found


@pytest.mark.slow
def test_a_short_last_batch_and_an_evaluation_compile_nothing_after_the_first_epoch() -> None:
    model = network()
    evaluator = evaluator_of(model)
    evaluator.attach(BITS())
    engine = build(model, BITS(), Validation(evaluator, batches([16, 7], 5)))
    found = graphs(engine)
    engine.run(batches([16, 16, 10], 5), max_epochs=3)
    assert found[0] in (1, 2)
    assert found == found[:1] * 3
    in_evaluations = len(evaluator.find(Compile).sizes)
    assert in_evaluations in (1, 2)
    engine.run(batches([16, 16, 10], 5), max_epochs=5)  # another run compiles nothing either
    assert found == found[:1] * 5
    assert len(evaluator.find(Compile).sizes) == in_evaluations


@pytest.mark.moderate
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_hundred_steps_give_the_same_bits_with_dropout_and_batch_norm(backend: str) -> None:
    plain, random = trained(epochs=34), torch.get_rng_state()
    compiled = trained(Compile(backend=backend), epochs=34)
    assert torch.equal(random, torch.get_rng_state())
    assert_same(plain.modules["model"], compiled.modules["model"])
    assert compiled.find(Compile).sizes


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["?", "blocks.*", nn.Linear, None], ids=str)
def test_modules_that_are_named_are_compiled_each_by_itself(modules: Any) -> None:
    model = Blocks if modules == "blocks.*" else network
    plain = trained(model=model())
    compiled = trained(BITS(modules), model=model())
    assert_same(plain.modules["model"], compiled.modules["model"])
    sizes = compiled.find(Compile).sizes
    assert sizes[0] == [("16", "5")]
    assert all("forward" not in vars(part) for part in compiled.modules["model"].modules())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "others"),
    [
        (lambda: BITS(), lambda: [ActivationCheckpointing(every=2)]),
        (lambda: Compile(backend="eager"), lambda: [ActivationCheckpointing(every=2)]),
        (lambda: BITS("?"), lambda: [ActivationCheckpointing("?")]),
        (lambda: BITS(), lambda: [ActivationCheckpointing(["3", "4"])]),
        (lambda: BITS(), lambda: [EMA(0.9)]),
        (lambda: Compile(backend="eager"), lambda: [MixedPrecision("bf16")]),
    ],
    ids=["checkpointed groups", "groups in eager", "checkpointed modules", "without statistics", "EMA", "bf16"],
)
def test_beside_other_handlers_the_bits_are_the_same(
    ours: Callable[[], Handler], others: Callable[[], list[Handler]]
) -> None:
    for handlers in ([*others(), ours()], [ours(), *others()]):
        assert_same(trained(*others()).modules["model"], trained(*handlers).modules["model"])


class Sequences(nn.Module):
    """A recurrent cell over the steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into, self.along, self.out = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 6)
        for time in x.unbind(1):
            state = torch.tanh(self.into(time) + self.along(state))
        return self.out(state)  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))


def drawn(*shape: int) -> list[Any]:
    made = torch.Generator().manual_seed(5)
    return [(torch.randn(8, *shape, generator=made), torch.randn(8, 1, generator=made)) for _ in range(3)]


# Of the handlers that change what is computed, how often something is compiled for them at most.
CHANGING: dict[str, tuple[Callable[[], Handler], Callable[[], nn.Module], Any, int]] = {
    "a stage of freezing": (lambda: Freezing({"0": 3}), network, batches([16] * 3, 5), 2),
    "pieces of batches": (lambda: MicroBatching(pieces=2), network, None, 2),
    "growing images": (lambda: ProgressiveResizing({1: 8, 2: 12, 3: 16}), convolutions, drawn(3, 16, 16), 2),
    "growing sequences": (lambda: SequenceLengthWarmup(2, 8, over="9it", increment=2), Sequences, drawn(8, 3), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGING)
def test_what_changes_sizes_or_what_is_trained_gives_the_same_bits_with_few_graphs(case: str) -> None:
    make, model, data, most = CHANGING[case]
    plain = trained(make(), model=model(), data=data, epochs=4)
    compiled = trained(make(), Compile(backend="eager"), model=model(), data=data, epochs=4)
    assert_same(plain.modules["model"], compiled.modules["model"])
    assert 1 <= len(compiled.find(Compile).sizes) <= most


def everything(engine: Engine) -> dict[str, Any]:
    """What may be seen of a compilation: of the engine, its modules and the process."""
    model = engine.modules["model"]
    return {
        "type": type(engine.model),
        "names": list(dict(model.named_parameters())),
        "state": list(model.state_dict()),
        "fields": [sorted(vars(part)) for part in model.modules()],
        "calls": [part._compiled_call_impl for part in model.modules()],
        "process": process_state(),
    }


@pytest.mark.moderate
@pytest.mark.parametrize("modules", [None, pytest.param("?", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", quick(["completed", "failed", "detached"], "failed"))
def test_nothing_of_it_stays_however_the_run_ends(modules: str | None, how: str) -> None:
    engine, handler = build(network(), optimizer=ADAM), Compile(modules, backend="eager")
    before, model = everything(engine), engine.model
    names: list[str] = []
    engine.attach(handler)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def act(engine: Engine) -> None:
        names.extend(name for name, _ in engine.modules["model"].named_parameters())
        if how == "failed":
            raise ValueError("for the test")
        if how == "detached":
            engine.detach(handler)

    if how == "failed":
        with pytest.raises(ValueError, match="for the test"):
            engine.run(batches(4), max_epochs=1)
    else:
        engine.run(batches(4), max_epochs=1)
    assert everything(engine) == before
    assert engine.model is model
    assert names == before["names"]
    assert handler.sizes


BESIDE_LIGHTNING = """
import lightning, torch
from signalfire import Engine, Update
from signalfire.handlers import Compile

model = torch.nn.Linear(5, 1)
before = set(vars(model))
engine = Engine(Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD), model=model, seed=0)
engine.attach(Compile(backend="eager"))
engine.run([(torch.ones(4, 5), torch.ones(4, 1))] * 2, max_epochs=1, check=False)
print(set(vars(model)) ^ before)
"""


@pytest.mark.slow
def test_nothing_of_it_stays_where_lightning_has_wrapped_the_compiler() -> None:
    kit.needs("migration", "lightning")
    ended = kit.finished("-c", BESIDE_LIGHTNING)
    assert ended.stdout == "set()\n", ended.stderr


@pytest.mark.slow
def test_a_checkpoint_has_no_prefix_and_each_kind_of_run_resumes_the_other(tmp_path: Path) -> None:
    whole = trained(epochs=4).modules["model"]
    for first, second in (([BITS()], []), ([], [BITS()])):
        folder = tmp_path / str(len(first))
        trained(*first, Checkpoint(folder, every="1ep"), epochs=2)
        engine = build(network(), *second, Checkpoint(folder, every="1ep", resume=True), optimizer=ADAM)
        engine.run(batches([16, 16, 10], 5), max_epochs=4)
        assert_same(engine.modules["model"], whole)
        assert not any("_orig_mod" in name for name in engine.state_dict()["modules"]["model"])


@needs_torch(2, 13, why="a limit of graphs of each function")
@pytest.mark.moderate
def test_more_sizes_than_graphs_are_one_warning_that_names_them() -> None:
    engine = build(network(), Compile(backend="eager", dynamic=False, recompile_limit=3))
    message = r"'compile': the limit of 3 compiled graphs has been reached.* \(2, 5\); \(3, 5\); \(4, 5\)\. Pad or drop"
    with pytest.warns(UserWarning, match=message) as caught:
        engine.run(batches(range(2, 8), 5), max_epochs=2)
    assert len([one for one in caught if "the limit" in str(one.message)]) == 1
    assert len(engine.find(Compile).sizes) == 3


@pytest.mark.slow
def test_sizes_below_the_limit_are_no_warning() -> None:
    engine = trained(Compile(backend="eager", dynamic=False), data=batches(range(2, 8), 5))
    assert len(engine.find(Compile).sizes) == 6


@pytest.mark.slow
def test_several_models_are_compiled_each_by_itself() -> None:
    def run(*handlers: Handler) -> Engine:
        models = {"one": network(), "other": mlp(1, 4, 1, nn.Tanh())}
        engine = Engine(
            Update(lambda engine, batch: engine.model["other"](engine.model["one"](batch[0])),
                   lambda engine, output, batch: nn.functional.mse_loss(output, batch[1]), ADAM), model=models, seed=0
        )  # fmt: skip
        engine.attach(*handlers)
        torch.manual_seed(0)
        engine.run(batches(4), max_epochs=2)
        return engine

    plain, compiled = run(), run(BITS())
    for name in ("one", "other"):
        assert_same(plain.modules[name], compiled.modules[name])
    assert {len(compiled.find(Compile).sizes)} == {2}


def of_ranks(kind: str, compiled: bool) -> dict[str, Tensor]:
    model = network() if kind == "ddp" else Blocks()
    if kind == "ddp":
        handlers: list[Handler] = [DistributedDataParallel(timeout=60.0)]
    else:
        handlers = [FullyShardedDataParallel(units="blocks.*", timeout=60.0)]
    if compiled:
        handlers.append(BITS() if kind == "ddp" else BITS("blocks.*"))
    engine = build(model, *handlers, optimizer=ADAM)
    torch.manual_seed(engine.processes.rank)
    engine.run(batches([16] * 8, 5), max_epochs=2)
    if compiled:
        assert engine.find(Compile).sizes
        assert type(engine.model) is type(engine.modules["model"])
    return {name: local_part(value).detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_on_two_ranks_the_bits_are_the_same(kind: str) -> None:
    plain, compiled = (run_together(of_ranks, 2, kind, one) for one in (False, True))
    for ours, theirs in zip(plain, compiled, strict=True):
        assert_same(ours, theirs)


def whole_and_sharded() -> None:
    build(Blocks(), FullyShardedDataParallel(timeout=60.0), BITS(), optimizer=ADAM).run(batches(4), max_epochs=1)


@pytest.mark.slow
def test_a_sharded_model_as_a_whole_is_refused() -> None:
    with pytest.raises(
        Failed, match="'compile': a sharded model cannot be compiled as a whole; compile its sharded units"
    ):
        run_together(whole_and_sharded, 2)


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def test_without_a_compiler_inductor_is_refused_before_the_first_batch() -> None:
    import torch._inductor.config as options

    steps: list[int] = []
    engine = build(network(), Compile())
    engine.connect(Events.ITERATION_STARTED, lambda engine: steps.append(1))
    message = (
        r"needs a C\+\+ compiler to compile for the CPU, but 'no-such-compiler' is not a working C\+\+ compiler; "
        r"install g\+\+"
    )
    with options.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(ValueError, match=message):
        engine.run(batches([16], 5), max_epochs=1)
    assert not steps


@pytest.mark.slow
@pytest.mark.parametrize("fallback_random", [True, False])
def test_inductor_draws_the_same_random_numbers_and_rounds_a_little(fallback_random: bool) -> None:
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler on a CPU: install g++")

    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 1))

    data = batches([16] * 10, 5)
    plain, random = trained(model=model(), data=data), torch.get_rng_state()
    compiled = trained(Compile(fallback_random=fallback_random), model=model(), data=data)
    assert len(compiled.find(Compile).sizes) == 1
    if fallback_random:
        assert torch.equal(random, torch.get_rng_state())
        assert largest_difference(plain.modules["model"], compiled.modules["model"]) < 1e-5
    else:
        assert largest_difference(plain.modules["model"], compiled.modules["model"]) > 1e-3


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_a_model_that_is_compiled_already_is_refused(how: str) -> None:
    model: Any = network()
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    engine = build(model, Compile(backend="eager"))
    with pytest.raises(ValueError, match="'compile': the model 'model' is already compiled"):
        engine.run(batches(1), max_epochs=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "inductr"}, r"Compile\(backend='inductr'\): expected"),
        ({"mode": "fast"}, r"Compile\(mode='fast'\): expected 'default'"),
        ({"mode": "default", "backend": "eager"}, r"\(mode='default', backend='eager'\): mode= is only for backend="),
        ({"options": {}, "backend": "eager"}, r"\(options={}, backend='eager'\): options= is only for"),
        ({"options": 3}, r"\(options=3\): expected a mapping"),
        ({"dynamic": 1}, r"\(dynamic=1\): expected True or False"),
        ({"recompile_limit": 0}, r"\(recompile_limit=0\): expected an int of 1 or more"),
        ({"modules": 3}, r"\(modules=3\): 3 is not a module path"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Compile(**given)


def test_a_pattern_that_matches_nothing_is_refused_as_the_run_starts() -> None:
    engine = build(network(), Compile("layers.*", backend="eager"))
    with pytest.raises(ValueError, match=r"modules='layers.\*' matches no module; available modules: '0', '1'"):
        engine.run(batches(1), max_epochs=1)


def test_a_second_one_is_refused() -> None:
    with pytest.raises(ValueError, match="control what is compiled"):
        build(network(), Compile(backend="eager"), Compile(backend="eager", name="other"))
