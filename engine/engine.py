"""The engine: what users call. It puts the rooms beside the kernel together; `Loop.iterate` in `core/loop.py` is the loop."""

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

    An engine whose updates have no optimizer evaluates: it runs in eval mode without gradients, and each run starts anew.

    Args:
        update: what to do in every iteration, or several updates in order.
        model: a module, or several by name (then ``engine.model`` is a ``ModuleDict`` of them); None if no update needs one.
        seed: the seed of what handlers draw; torch's initial seed by default. It leaves the global generators as they are:
            `seed_everything` seeds them at once, for the model's weights, and `Seeding` when a run begins.
        training: whether to train; by default, if any update has an optimizer.
        streams: "shared": model and data draw from one stream of the global generators, as in a plain PyTorch loop.
            "separate": the generators are reseeded before each epoch's data and each update, for ablations; see `models.streams`.
        allow: codes of findings, such as "W10", that are meant and are not reported; see `findings`.

    Attributes:
        state: where the run stands.
        model: what the forward calls, perhaps wrapped or sharded.
        modules: the bare modules by name, for state, averages and optimizers; with the losses that have parameters.
        updates, handlers: the updates at work; the attached handlers by name.
        signals: the blinker namespace of the signals.
        seed, training: as given, or as derived from torch and from the updates.
        findings: what looked wrong in the latest run (`Reports.of_run`).
        log: logs users' own values: ``engine.log("kl", value)``; see `Log`.
        dry_run: whether handlers that write files (`Handler.writes`) are disabled in every run.

    Authors of handlers find more on the parts; `signalfire.authoring` lists it.

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
        """The seconds of `run`'s ``max_time``."""
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
        """Run an evaluator on data, store what it measures in this engine's metrics, and return it.

        It changes no random stream, no gradient, no module's train or eval flag.

        Args:
            evaluator: an engine that does not train.
            data: its data.
            prefix: put before the names of its metrics.
            inherit: whether its batches are moved and converted, and its precision is, as in this engine: see `inherited`.
            bounds: for ``evaluator.run``.
        """
        return evaluate(self, evaluator, data, prefix=prefix, inherit=inherit, **bounds)

    def evaluating(self) -> AbstractContextManager[None]:
        """The model as an evaluation would see it, for a ``with`` block: to sample text or images inside a run, or after it.

        It is in eval mode and without gradients, with averages in place of the weights, in the precision of the training.
        Afterwards the modes, the weights and the random generators are as before. Training, and taking or loading a state, are
        errors in the block: the weights in place are not those that are trained. With several ranks each has to enter the block,
        since they may have to gather the weights.

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
        """Measure data as the attached `Validation` does, and return the metrics: ``trainer.test(data, weights="best")``.

        It emits no event, and leaves the weights, metrics, states and random generators of the engine as they are. With several
        ranks each has to call it.

        Args:
            data: its data; or several data sets by name, whose metrics are named as those of a `Validation` without the first
                prefix: "clean_loss" of the data set "clean".
            weights: those of a checkpoint, as evaluations saw them when it was written, with averages in their place: "best" for
                that of the one attached `Checkpoint` with a monitor, or a `Checkpoint`, or a path. By default those that the
                engine has.
            validation: the name of the `Validation`, where there are several.
            inherit: as for `evaluate`.
            metrics, named: what is measured besides the loss, in place of the validation's metrics; as for `Validation`.

        Raises:
            ValueError: without a `Validation`, or for "best" where none or several checkpoints are chosen by a metric.
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
        """Where the model's first parameter is; the CPU without a model."""
        first = next((parameter for root in self.modules.values() for parameter in root.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the only update, once it is built: before STARTED, if it was given as a class or factory."""
        update = self._only_update("optimizer")
        if update.optimizer is None:
            why = "it is built as a run begins" if self.training else "this engine evaluates"
            raise AttributeError(f"engine.optimizer: there is none yet: {why}")
        return update.optimizer

    @property
    def loss(self) -> Any:
        """The loss of the only update in the latest iteration, as a detached tensor; None before the first."""
        return self._only_update("loss").loss

    def _only_update(self, attribute: str) -> UpdateState:
        if len(self.updates) > 1:
            names = ", ".join(repr(update.name) for update in self.updates)
            raise AttributeError(  # which hasattr, inspect and getattr with a default expect
                f"engine.{attribute}: there are several updates, {names}; write "
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
            KeyError: if there is none, or several of the class, listing what is attached.
        """
        if isinstance(handler, str):
            return self.handlers[handler]
        if not isinstance(handler, type):
            raise TypeError(
                f"engine[{handler!r}]: give the name or the class of a handler, such as engine['ema'] or engine[EMA]"
            )
        return self.find(handler)

    def __contains__(self, handler: object) -> bool:
        """Whether a handler of this name or class is attached: ``"ema" in engine``, ``EMA in engine``."""
        if isinstance(handler, str):
            return handler in self.handlers
        return isinstance(handler, type) and any(isinstance(one, handler) for one in self.handlers.values())

    __iter__ = None  # else `list(engine)` would ask for engine[0]

    def wiring(self) -> Wiring:
        """Event, phase, handlers, in the order in which they run; ``print`` it or ``draw`` it."""
        return Wiring(self)

    def check(self, data: Iterable[Any] | None = None, **bounds: Any) -> Findings:
        """What looks wrong about the composition and the data, as a table for ``print``; nothing is trained or changed.

        ``bounds`` are those of `run`; without them, rules about its length are omitted. One batch at most is read.
        """
        return check(self, data, bounds)

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to resume: position, modules, optimizers, handlers, random states; all copied.

        With several ranks each has to call it. On rank 0 it is the state of all; on the others, their own.

        Raises:
            RuntimeError: inside an iteration, where half of it would be saved.
        """
        return self.snapshots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Put saved weights in place; resume at the next `run` once the receivers of STARTED have run; at MODEL_SETUP, in this.

        An engine that evaluates takes the weights of a trainer's state, and never a position: it evaluates all of its data.

        Args:
            state: what `state_dict` returned, perhaps saved and loaded in between.
            allow: names of handlers that may be in only one of the saved run and this one.

        Raises:
            ValueError: for what is not such a state. What does not fit this engine is an error at the next run, before
                anything is changed.
        """
        self.snapshots.load_state_dict(state, allow=allow)

    def rewind(self, to: int, *, leave_out: int = 0) -> list[Place]:
        """Go back to the end of iteration ``to``, in this run, and leave out the ``leave_out`` batches that follow it.

        At the end of the iteration under way the newest state from before is put back in place, and the run continues from there
        bit for bit as before, up to ``to``; what calls this comes up again, and has to remember it. A handler has to keep states:
        `Rewindable`, or `SpikeGuard`, which calls this itself.

        Returns:
            The batches that are left out.
        """
        return self.past.rewind(to, leave_out=leave_out)

    def replay(self, iteration: int) -> Replay:
        """An iteration of the last run, to be made again: was it the data, or a fault that does not repeat? See `Replay`."""
        return Replay(self, iteration)

    def weights(self) -> dict[str, Any]:
        """The states of the modules by name, as they are to be used: with averages in place, where a handler has them."""
        return self.snapshots.weights()

    def load_weights(self, weights: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Put weights in place, and nothing else: what `weights` or `state_dict` returned, or the path of a checkpoint.

        Raises:
            ValueError: for what does not fit the engine's modules, naming it; then nothing was changed.
        """
        if isinstance(weights, str | os.PathLike):
            from .weights.chosen import read_state  # as in `test`

            weights = read_state(weights, "load_weights()")
        self.snapshots.load_weights(weights)

    def reset(self) -> None:
        """Begin anew: counters, handlers and optimizers as new (but for optimizers that were given built), weights kept."""
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
            "an Engine can be neither copied nor pickled; build a second one, and load this one's state_dict() into it"
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
            f"Engine: update={update!r} is not an Update or a sequence of them; for a single function use "
            "Update.from_function(function, optimizer=...)"
        )
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"Engine: two updates have the same name in {names}; give Update(..., name=)")
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
            f"{', '.join(map(repr, model))}, so each loss changes what the other trains; give each its own: "
            f"Update(..., parameters={name!r}), or parameters='all' if you mean that"
        )
