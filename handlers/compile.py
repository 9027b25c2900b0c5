"""Compilation of the model by torch.compile, during the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, check_bool, check_choice, check_int, warn
from signalfire.authoring.versions import options_of_compile, usual_recompile_limit

from ._common.claims import COMPILATION
from ._common.module_patterns import Pattern, check_modules, find_modules, named_modules
from ._common.ranks import COMPILE

__all__ = ["Compile"]

Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Compile(Handler):
    """Compiles the model, or some of its modules, with torch.compile during the run.

    Compilation slows the first iterations by seconds to minutes (`Throughput` leaves them out). Unless ``dynamic`` is set,
    torch compiles for the size of the first batch and, once a second size occurs, compiles again for all sizes. After
    ``recompile_limit`` graphs, further sizes run without compilation, and a warning lists those sizes.

    During a run, ``engine.model`` is the compiled model; afterwards it is the original again. ``engine.modules`` never changes,
    so parameter names and checkpoints stay the same, and runs with and without compilation can resume from each other's
    checkpoints. With `DistributedDataParallel`, the wrapped model is compiled. With `FullyShardedDataParallel`, pass the
    modules that are sharded as units in ``modules``. An evaluator calls its own model and needs a separate `Compile`, but
    shares the compiled modules given in ``modules``.

    With the backends "eager" and "aot_eager", results are bit-identical to those without compilation. "inductor" rounds
    differently, but draws the same random numbers unless ``fallback_random`` is False. Handlers that use hooks see nothing
    inside a compiled model.

    Args:
        modules: Modules to compile, each separately: a path such as "blocks.0", a pattern such as "blocks.*", a class, or a list
            of these; by default the whole model. Identical blocks compile faster than a whole model.
        backend: Name of a torch.compile backend, or a function that takes a graph and its inputs and returns a callable. On a
            CPU, "inductor" needs a C++ compiler, such as g++.
        mode: For "inductor": "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        options: For "inductor": a dict of options; see ``torch._inductor.list_options()``.
        dynamic: Whether to compile graphs for all sizes from the start (True) or for each size separately (False); by default,
            for all sizes once a second size occurs.
        fullgraph: Whether code that cannot be captured in one graph raises an error.
        fallback_random: For "inductor": whether to draw the same random numbers as without compilation. If False, dropout is
            somewhat faster, and all later random numbers of the run differ.
        recompile_limit: Number of graphs after which further sizes run without compilation; by default torch's limit, 8.

    Attributes:
        sizes: The input sizes of each compiled graph, in order; sizes that may vary have names, such as "s0".

    Raises:
        ValueError: At the start of a run, for a model that is already compiled, for a pattern that matches no module, for a
            sharded model without ``modules``, and for "inductor" on a CPU without a C++ compiler.

    Source:
        Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation"
        (ASPLOS 2024); ``torch.compile``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> compiled = Compile(backend="eager", dynamic=False)
        >>> _ = engine.attach(compiled)
        >>> batches = [(torch.ones(size, 2), torch.ones(size, 1)) for size in (4, 4, 3)]
        >>> _ = engine.run(batches, max_epochs=1)
        >>> compiled.sizes  # a graph for each size
        [[('4', '2')], [('3', '2')]]
    """

    capture = Capture.FORBIDDEN  # inductor captures graphs of its own

    def __init__(
        self,
        modules: Pattern | list[Pattern] | None = None,
        *,
        backend: str | Backend = "inductor",
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None,
        options: Mapping[str, Any] | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        fallback_random: bool = True,
        recompile_limit: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.modules = None if modules is None else check_modules(self, modules)
        if not callable(backend):
            check_choice(self, "backend", backend, torch._dynamo.list_backends(exclude_tags=None))
        if mode is not None:
            check_choice(self, "mode", mode, _MODES)
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"Compile(options={options!r}): expected a mapping from inductor option names to values")
        for argument, value in (("mode", mode), ("options", options)):
            if value is not None and backend != "inductor":
                raise ValueError(
                    f"Compile({argument}={value!r}, backend={backend!r}): {argument}= is only for backend='inductor'"
                )
        self.dynamic = None if dynamic is None else check_bool(self, "dynamic", dynamic)
        self.fullgraph = check_bool(self, "fullgraph", fullgraph)
        self.fallback_random = check_bool(self, "fallback_random", fallback_random)
        self.recompile_limit = None if recompile_limit is None else check_int(self, "recompile_limit", recompile_limit)
        self._options = options_of_compile(self.recompile_limit)
        self.backend, self.mode, self.options = backend, mode, options
        self.sizes: list[list[tuple[str, ...]]] = []
        self._compile: Callable[..., Any] | None = None  # torch's backend, made once
        self._known: dict[Any, Any] = {}  # what was compiled, by what it was compiled from, also between runs
        self._original: Any = None  # engine.model, only during a run
        self._compiled: Any = None  # in its place
        self._forwards: list[tuple[nn.Module, Any, Any]] = []  # modules, with the forwards before and in a run
        self._limit_hits = 0

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(COMPILATION, by=self)

    def detached(self, engine: Engine) -> None:
        self._known.clear()

    def settings(self) -> dict[str, Any]:
        """None: a run may resume with a different backend, or without one."""
        return {}

    # ---- beginning and end ----------------------------------------------------------------------------------------

    @on(Events.STARTED, phase=Phase.FINALIZE, rank=COMPILE, reads=["device", "modules"], writes=["modules"])
    @on(Events.CHECKPOINT_LOADED, phase=Phase.FINALIZE, rank=COMPILE, reads=["device", "modules"], writes=["modules"])
    @on(Events.EPOCH_STARTED, phase=Phase.FINALIZE, rank=COMPILE, reads=["device", "modules"], writes=["modules"])
    def compile(self, engine: Engine) -> None:
        """Compile the model or the modules; repeat it if a different handler has wrapped the model again."""
        if self.modules is not None:
            if not self._forwards:
                self._check(engine)
                self._compile_modules(engine)
        elif self._compiled is None or engine.model is not self._compiled:
            self._check(engine)
            self._original = engine.model
            if isinstance(engine.model, nn.ModuleDict) and engine.modules.get("model") is not engine.model:
                parts = {key: self._compiled_from(part) for key, part in engine.model.items()}
                engine.model = self._compiled = nn.ModuleDict(parts)
            else:
                engine.model = self._compiled = self._compiled_from(engine.model)

    def _check(self, engine: Engine) -> None:
        self._limit_hits = _limit_hits()
        if engine.device.type == "cpu" and self.backend == "inductor":
            self._check_compiler()
        for name, root in engine.modules.items():
            for part in root.modules():
                if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
                    raise ValueError(
                        f"{self.name!r}: the model {name!r} is already compiled ({type(part).__name__}); pass the "
                        f"original model to the Engine, or detach {self.name!r}"
                    )
        if self.modules is None and engine.processes.distributed:
            from torch.distributed.fsdp import FSDPModule

            if any(isinstance(part, FSDPModule) for root in engine.modules.values() for part in root.modules()):
                raise ValueError(
                    f"{self.name!r}: a sharded model cannot be compiled as a whole; compile its sharded units instead, "
                    "for example with modules='blocks.*'"
                )

    def _check_compiler(self) -> None:
        from torch._inductor import config, cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            tried = " or ".join(repr(one) for one in config.cpp.cxx if one is not None)
            raise ValueError(
                f"{self.name!r}: backend='inductor' needs a C++ compiler to compile for the CPU, but {tried} is not a "
                "working C++ compiler; install g++, or set the environment variable CXX to the name of a compiler"
            ) from None

    def _compile_modules(self, engine: Engine) -> None:
        assert self.modules is not None
        for module in find_modules(self.name, named_modules(engine), self.modules).values():
            forward = module.forward
            function = forward if inspect.isroutine(forward) else getattr(forward, "__call__")  # noqa: B004, B009
            self._forwards.append((module, vars(module).get("forward"), self._compiled_from(function)))
            vars(module)["forward"] = self._forwards[-1][2]

    def _compiled_from(self, function: Any) -> Any:
        if function not in self._known:
            # Lightning wraps it once it is imported: it copies the arguments, and keeps them as an attribute of the model.
            compile_: Any = inspect.unwrap(torch.compile)
            self._known[function] = compile_(
                function,
                backend=self._counting,
                dynamic=self.dynamic,
                fullgraph=self.fullgraph,
                **self._options,
            )
        return self._known[function]

    @on(Events.ENDED, phase=Phase.FINALIZE, rank=-COMPILE, reads=[], writes=["modules"])
    def restore(self, engine: Engine) -> None:
        """Put the original model, or the original forwards, back."""
        if self._compiled is not None and engine.model is self._compiled:
            engine.model = self._original
        for module, before, compiled in self._forwards:
            if vars(module).get("forward") is compiled:
                del vars(module)["forward"]
                if before is not None:
                    vars(module)["forward"] = before
        own = {part for root in engine.modules.values() for part in root.modules()}
        for function in list(self._known):
            if isinstance(function, nn.Module):
                vars(function).pop("_is_torch_compile", None)
            if getattr(function, "__self__", function) not in own:  # a wrapper of this run
                del self._known[function]
        self._original = self._compiled = None
        self._forwards = []

    # ---- what is compiled -----------------------------------------------------------------------------------------

    def _counting(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend that torch.compile calls: notes the sizes of a graph's inputs, and passes it on."""
        nodes = graph.graph.find_nodes(op="placeholder")
        self.sizes.append(
            [
                tuple(map(str, value.shape))
                for node, value in zip(nodes, inputs, strict=True)
                if isinstance(value, torch.Tensor) and not any(sign in str(node.target) for sign in _OF_MODULES)
            ]
        )
        if self._compile is None:
            self._compile = self._made_backend()
        compiled: Callable[..., Any] = self._compile(graph, inputs)
        return compiled

    def _made_backend(self) -> Callable[..., Any]:
        if callable(self.backend):
            return self.backend
        if self.backend != "inductor":
            found: Callable[..., Any] = torch._dynamo.lookup_backend(self.backend)
            return found
        inductor: Any = torch._inductor  # imported by the attribute
        options = {"fallback_random": self.fallback_random}
        options |= inductor.list_mode_options(self.mode) if self.mode not in (None, "default") else {}
        options |= dict(self.options or {})
        return lambda graph, inputs: inductor.compile(graph, inputs, options=options)

    @on(Events.ITERATION_COMPLETED, phase=Phase.RECORD, reads=[], writes=[])
    def report_limit(self, engine: Engine) -> None:
        """Warn once per run if more sizes occur than graphs may be compiled."""
        if len(self.sizes) < 2 or self._limit_hits < 0 or _limit_hits() == self._limit_hits:
            return
        self._limit_hits = -1
        compiled = "; ".join(dict.fromkeys(", ".join(map(_shown, one)) for one in self.sizes))
        limit = self.recompile_limit or usual_recompile_limit()
        warn(
            f"{self.name!r}: the limit of {limit} compiled graphs has been reached, so inputs of other sizes run "
            f"uncompiled. The compiled sizes are {compiled}. Pad or drop the smaller batches, omit dynamic=False, or "
            "pass a larger recompile_limit="
        )


_OF_MODULES = ("_parameters_", "_buffers_", "_modules_")


def _shown(size: tuple[str, ...]) -> str:
    return f"({', '.join(size)}{',' if len(size) == 1 else ''})"


def _limit_hits() -> int:
    """How often this process has met the limit."""
    counters = torch._dynamo.utils.counters["unimplemented"]
    return sum(count for reason, count in counters.items() if "recompile limit exceeded" in reason.split("\n")[0])
