"""The engine: the class that users call. It adds services to the kernel; `Loop.iterate` in `core/loop.py` is the loop."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Never, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from .authoring.checks import did_you_mean
from .authoring.elsewhere import BOUNDS, ENGINE, instead, misuse
from .authoring.interval import Interval, event_of, seconds_of
from .authoring.log import Log
from .authoring.randomness import check_seed
from .core.events import AnyEvent
from .core.handler import Handler
from .core.kernel import Kernel
from .core.update import UpdateState
from .data.feed import Feed
from .data.refusals import DataRefusals
from .distributed.boundary import DistributedBoundary
from .distributed.group import Group
from .distributed.processes import Processes
from .findings import Findings, Reports
from .findings.check import check
from .findings.watch import FindingsWatch
from .models.environment import Environment
from .models.explain import ErrorHints
from .models.modules import Modules, model_of
from .models.streams import SeparateStreams, Streams, StreamsSetting
from .resuming.past import Past, Place
from .resuming.service import Resuming
from .resuming.snapshots import Snapshots
from .resuming.unfinished import Unfinished
from .runs.evaluation import evaluate, evaluating
from .runs.replay import Replay
from .runs.wiring import Wiring
from .updates.spec import Update

__all__ = ["Engine"]

H = TypeVar("H", bound=Handler)


class Engine(Kernel):
    """Runs updates over data and emits an event at every step; every feature is a handler of those events.

    An engine whose updates have no optimizer is an evaluator: it runs in eval mode without gradients, and each run restarts.

    Args:
        update: the update that runs in every iteration, or several in order.
        model: a module, or several by name (then ``engine.model`` is a ``ModuleDict`` of them); None if no update needs one.
        seed: the seed of the handlers' random numbers; torch's initial seed by default. It does not seed the global generators:
            `seed_everything` seeds them at once, for the model's weights, and `Seeding` when a run starts.
        training: whether to train; by default True if any update has an optimizer.
        streams: "shared": model and data draw from one stream of the global generators, as in a plain PyTorch loop.
            "separate": the generators are reseeded before each epoch's data and each update, for ablations; see `models.streams`.
        allow: codes of findings, such as "W10", that are intended and not reported; see `findings`.

    Attributes:
        state: the position and results of the run.
        model: the model that the forward calls, perhaps wrapped or sharded.
        modules: the unwrapped modules by name, for state, averages and optimizers, including losses that have parameters.
        updates, handlers: the states of the updates; the attached handlers by name.
        signals: the blinker namespace of the signals.
        seed, training: as given, or as derived from torch and from the updates.
        findings: the warnings of the latest run (`Reports.of_run`).
        log: logs custom values: ``engine.log("kl", value)``; see `Log`.
        dry_run: whether handlers that write files (`Handler.writes`) are disabled in every run.

    For handler authors, `signalfire.authoring` lists further parts of the engine.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> trainer = Engine(update, model=model, seed=0)
        >>> trainer.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=3).iteration
        3
    """

    streams = StreamsSetting()
    boundary: DistributedBoundary
    feed: Feed
    group: Group
    modules: Modules

    def __init__(
        self,
        update: Update | Sequence[Update],
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        *,
        seed: int | None = None,
        training: bool | None = None,
        streams: Streams = "shared",
        allow: Sequence[str] = (),
        **unknown: Never,
    ) -> None:
        if unknown:
            own = ("update", "model", "seed", "training", "streams", "allow")
            raise TypeError(misuse("Engine()", (), unknown, own))
        self.findings = Reports(self, allow)
        self.streams = streams
        specs, seed = _checked_specs(update), None if seed is None else check_seed("Engine", seed)
        if training is not False:
            _refuse_shared_parameters(specs, model)
        super().__init__(specs, model, seed=seed, training=training)
        self.model = model_of(model, self.modules)
        self.seed_given = seed is not None

    def _modules_of(self, model: Any, specs: Sequence[Update]) -> dict[str, nn.Module]:
        return Modules(model, specs)

    def event_of(self, every: Any) -> AnyEvent:
        """The event of a handler's attribute that holds an event or an interval."""
        return event_of(every)

    def seconds_in(self, max_time: str | Interval | None) -> float | None:
        """The ``max_time`` of `run` in seconds."""
        return None if max_time is None else seconds_of(max_time)

    def _misuse(self, unnamed: Sequence[Any], unknown: Iterable[str]) -> str:
        return misuse("run()", unnamed, unknown, (*BOUNDS, "data", "check"))

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property: the error inside it says what is missing
            hint = "" if name.startswith("_") else instead(name, ENGINE) or did_you_mean(name, dir(type(self)))
            raise AttributeError(f"Engine has no attribute {name!r}{hint}", name=name)

    def _furnish(self) -> None:
        self.boundary = DistributedBoundary(self)
        self.group = Group(self)
        self.feed = Feed(self.state)
        self.snapshots = Snapshots(self)
        self.log, self.past, self.unfinished = Log(self), Past(self), Unfinished(self)
        self.handlers.install(
            Environment(), ErrorHints(), SeparateStreams(), Resuming(), DataRefusals(), FindingsWatch()
        )

    def evaluate(
        self, evaluator: Engine, data: Iterable[Any] | None, *, prefix: str = "", inherit: bool = True, **bounds: Any
    ) -> dict[str, Any]:
        """Run an evaluator on data, store its metrics in this engine's metrics, and return them.

        Random streams, gradients and the modules' train or eval flags do not change.

        Args:
            evaluator: an engine that does not train.
            data: the data to evaluate.
            prefix: prefix of the names of its metrics.
            inherit: whether it moves and converts batches, and uses the precision, as this engine does; see `inherited`.
            bounds: bounds for ``evaluator.run``.
        """
        return evaluate(self, evaluator, data, prefix=prefix, inherit=inherit, **bounds)

    def evaluating(self) -> AbstractContextManager[None]:
        """Use the model as in an evaluation inside a ``with`` block, to sample text or images during or after a run.

        The model is in eval mode and without gradients, with averages in place of the weights, in the precision of the training.
        Afterwards the modes, weights and random generators are restored. Training, and taking or loading a state, raise an error
        inside the block, because the weights in place are not the trained ones. In distributed runs every rank must enter the
        block, since the weights may have to be gathered.

        Example:
            >>> engine = Engine(Update.prediction(), model=torch.nn.Dropout(0.5))
            >>> with engine.evaluating():
            ...     engine.model(torch.ones(3))
            tensor([1., 1., 1.])
        """
        return evaluating(self)

    def test(
        self,
        data: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        weights: Any = None,
        validation: str | None = None,
        inherit: bool = True,
        metrics: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """Evaluate test data as the attached `Validation` does, and return the metrics: ``trainer.test(data, weights="best")``.

        It emits no event, and does not change the weights, metrics, states and random generators of the engine. In distributed
        runs every rank must call it.

        Args:
            data: the test data; or several data sets by name, whose metrics are named as those of a `Validation` without the
                first prefix: "clean_loss" for the data set "clean".
            weights: the checkpoint whose weights are used, as evaluations saw them when it was written, with averages in place:
                "best" for the best one of the attached `Checkpoint` with a monitor, a `Checkpoint`, or a path. None uses the
                engine's current weights.
            validation: the name of the `Validation`, if several are attached.
            inherit: as for `evaluate`.
            metrics, named: metrics to measure besides the loss, in place of the validation's metrics; as for `Validation`.

        Raises:
            ValueError: without a `Validation` or metrics, or for "best" if no or several `Checkpoint` handlers have a monitor.
            RuntimeError: during a run.
        """
        from .weights.chosen import test  # what reads checkpoints is loaded only where one is read

        return test(self, data, weights, validation=validation, metrics=metrics, named=named, inherit=inherit)

    @property
    def processes(self) -> Processes:
        """The ranks that train together; a single process unless a handler has joined a process group."""
        return self.group.processes

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter; the CPU without a model."""
        first = next((parameter for root in self.modules.values() for parameter in root.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the only update. If given as a class or factory, it is built before STARTED."""
        update = self._only_update("optimizer")
        if update.optimizer is None:
            why = "the optimizer is built when a run begins" if self.training else "this engine only evaluates"
            raise AttributeError(f"engine.optimizer: there is no optimizer, because {why}")
        return update.optimizer

    @property
    def loss(self) -> Any:
        """The loss of the only update in the latest iteration, as a detached tensor; None before the first."""
        return self._only_update("loss").loss

    def _only_update(self, attribute: str) -> UpdateState:
        if len(self.updates) > 1:
            names = ", ".join(repr(update.name) for update in self.updates)
            raise AttributeError(  # which hasattr, inspect and getattr with a default expect
                f"engine.{attribute}: the engine has several updates: {names}; write "
                f"engine.find_update({self.updates[0].name!r}).{attribute}"
            )
        return self.updates[0]

    @overload
    def __getitem__(self, handler: str) -> Any: ...

    @overload
    def __getitem__(self, handler: type[H]) -> H: ...

    def __getitem__(self, handler: str | type[Handler]) -> Any:
        """An attached handler, by its name or its class: ``engine["ema"]``, ``engine[EMA]``; the latter is what `find` returns.

        Raises:
            KeyError: if none is attached, or several of the class, listing the attached handlers.
        """
        if isinstance(handler, str):
            return self.handlers[handler]
        if not isinstance(handler, type):
            raise TypeError(
                f"engine[{handler!r}]: expected the name or the class of a handler, such as engine['ema'] or "
                "engine[EMA]"
            )
        return self.find(handler)

    def __contains__(self, handler: object) -> bool:
        """Whether a handler of this name or class is attached: ``"ema" in engine``, ``EMA in engine``."""
        if isinstance(handler, str):
            return handler in self.handlers
        return isinstance(handler, type) and any(isinstance(one, handler) for one in self.handlers.values())

    __iter__ = None  # else `list(engine)` would ask for engine[0]

    def wiring(self) -> Wiring:
        """Event, phase and handlers in the order that they run; ``print`` it or ``draw`` it."""
        return Wiring(self)

    def check(self, data: Iterable[Any] | None = None, **bounds: Any) -> Findings:
        """Check the setup and the data for mistakes: returns a table for ``print``; nothing is trained or changed.

        ``bounds`` are those of `run`; without them, checks of its length are omitted. At most one batch is read, and none of data
        that may go on with each pass: iterators, `ReloadedData`, and iterables of your own without a length.
        """
        return check(self, data, bounds)

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The complete state to resume from: position, modules, optimizers, handlers, random states; all copied.

        In distributed runs every rank must call it. Rank 0 gets the state of all ranks; the others get their own.

        Raises:
            RuntimeError: inside an iteration, because the state would be incomplete.
        """
        return self.snapshots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Load the saved weights now, and resume in the next `run`, after the receivers of STARTED; at MODEL_SETUP, in this run.

        An evaluator loads only the weights of a trainer's state, not the position: it evaluates all of its data.

        Args:
            state: the state that `state_dict` returned, perhaps saved and loaded in between.
            allow: names of handlers that may exist in only one of the saved run and this one.

        Raises:
            ValueError: for an object that is not such a state. A state that does not fit this engine raises an error at the next
                run, before anything is changed.
        """
        self.snapshots.load_state_dict(state, allow=allow)

    def rewind(self, to: int, *, leave_out: int = 0) -> list[Place]:
        """Go back to the end of iteration ``to`` in this run, and skip the ``leave_out`` batches that follow it.

        At the end of the current iteration the newest state from before ``to`` is restored, and the run repeats bit for bit up to
        ``to``. The calling code runs again and has to remember that it has called this. A handler has to keep states:
        `Rewindable`, or `SpikeGuard`, which calls this itself.

        Returns:
            The batches that are left out.
        """
        return self.past.rewind(to, leave_out=leave_out)

    def replay(self, iteration: int) -> Replay:
        """Repeat an iteration of the last run, to tell bad data from a fault that does not recur; see `Replay`."""
        return Replay(self, iteration)

    def weights(self) -> dict[str, Any]:
        """The states of the modules by name for evaluation and export, with averages in place if a handler keeps them."""
        return self.snapshots.weights()

    def load_weights(self, weights: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Load only weights: the result of `weights` or `state_dict`, or the path of a checkpoint.

        Raises:
            ValueError: for weights that do not fit the engine's modules, naming them; nothing has changed then.
        """
        if isinstance(weights, str | os.PathLike):
            from .weights.chosen import read_state  # as in `test`

            weights = read_state(weights, "load_weights()")
        self.snapshots.load_weights(weights)

    def reset(self) -> None:
        """Reset counters, handlers and optimizers (except optimizers that were given as instances); keep the weights."""
        if self.running:
            raise RuntimeError("reset() was called during a run; call it between runs")
        self.snapshots.check_trained_weights("reset()")
        for part in (self.snapshots, self.feed, self.boundary, self.state, self.signals, self.past, self.unfinished):
            part.reset()
        for update in self.updates:
            update.reset()
        self.handlers.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an Engine can be neither copied nor pickled; build a second engine, and load this engine's state_dict() "
            "into it"
        )

    def __str__(self) -> str:
        return str(self.wiring())

    def __repr__(self) -> str:
        kind = "trains" if self.training else "evaluates"
        return f"<Engine {kind} {', '.join(update.name for update in self.updates)}; {len(self.handlers)} handlers>"


def _checked_specs(update: Update | Sequence[Update]) -> list[Update]:
    specs = [update] if isinstance(update, Update) else list(update) if isinstance(update, Sequence) else []
    if not specs or not all(isinstance(spec, Update) for spec in specs):
        raise TypeError(
            f"Engine: update={update!r} is neither an Update nor a sequence of updates; for a single function, use "
            "Update.from_function(function, optimizer=...)"
        )
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Engine: the update names {names} are not unique; give each update a different name: Update(..., name=)"
        )
    return specs


def _trains_what_it_is_given(optimizer: Any) -> bool:
    """Whether it is a class, perhaps with options: a function may choose the parameters itself, which W71 looks at in the run."""
    return isinstance(optimizer.func if isinstance(optimizer, partial) else optimizer, type)


def _refuse_shared_parameters(specs: Sequence[Update], model: Any) -> None:
    """Raise ValueError if two updates train all of several modules, and nothing says that this is meant."""
    if not isinstance(model, Mapping) or len(model) < 2:
        return
    of_all = [spec.name for spec in specs if spec.parameters is None and _trains_what_it_is_given(spec.optimizer)]
    if len(of_all) > 1:
        name = next(iter(model))
        raise ValueError(
            f"Engine: the updates {', '.join(map(repr, of_all))} each train all of the modules "
            f"{', '.join(map(repr, model))}, so the loss of each update also changes parameters that the others train; "
            f"give each update its own parameters: Update(..., parameters={name!r}), or parameters='all' if this is "
            "intended"
        )
