"""The service of an engine that looks at its runs: a handler that every engine has, and that can be detached like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.connection import Connection, Phase
from ..core.events import Events, Filter, Lifecycle
from ..core.handler import Handler, Service, on
from ..core.modes import parts_in_eval
from .check import report as report_composition
from .connected import report_double, report_handler
from .data_checks import check_data, check_epoch, check_steps, note_batches, report_length
from .epoch_checks import EpochChecks
from .evaluation_findings import (
    has_other_weights,
    note_last_values,
    report_averages_left_out,
    report_drawn_samples,
    report_dropped_samples,
    report_left_in_training,
    report_nothing_measured,
    report_other_weights,
    report_random_samples,
    report_raw_weights,
    report_untaken_averages,
)
from .first_steps import FirstEvaluation, FirstLosses
from .late_scores import LateScores
from .own_evaluations import look_at_forwards
from .own_schedulers import OwnSchedulers
from .own_weights import OwnLoads, watch_started
from .resumption import report_frozen, report_resume, say_left_out
from .returned import look_at_return
from .setup_findings import (
    Parts,
    report_loss_parameters,
    report_never_emitted,
    report_parts_in_eval,
    report_shared_parameters,
    report_untrained,
    report_wrapped,
)
from .taken_states import UnsavedValues
from .unattached import note_run
from .worker_batches import WorkerBatches

if TYPE_CHECKING:
    from ..core.signals import Signal
    from ..engine import Engine

__all__ = ["AT_START", "FindingsWatch"]

FIRST, LAST = -(10**9), 10**9

AT_START = (
    report_untrained,
    report_shared_parameters,
    report_raw_weights,
    report_untaken_averages,
    report_dropped_samples,
    report_drawn_samples,
    report_never_emitted,
    report_loss_parameters,
    report_wrapped,
    say_left_out,
)
"""What looks for mistakes once the optimizers are built."""


class FindingsWatch(Service):
    """Looks at what is connected, at the start of a run, at its first losses, and at the ends of its epochs.

    Between its looks it is not called. What it finds goes to ``engine.findings``.
    """

    def __init__(self) -> None:
        super().__init__(name="findings")
        self._unsaved = UnsavedValues()
        self._has_other_weights = False
        self._forget()

    def _forget(self) -> None:
        self._began = 0
        self._in_eval: tuple[Parts, Parts] | None = None
        self._epochs: EpochChecks | None = None
        self._schedulers: OwnSchedulers | None = None
        self._evaluation = FirstEvaluation(self._disconnect)
        self._until_the_end: list[OwnLoads | LateScores | WorkerBatches] = []
        self._frozen: list[str] | None = None  # in the state from which the run resumes
        self._first: list[tuple[Signal, Connection]] = []

    def attached(self, engine: Engine) -> None:
        """From here on, findings are reported."""
        engine.findings.silent = False

    def detached(self, engine: Engine) -> None:
        """From here on, nothing is looked at, and nothing reported."""
        if not engine.running:
            engine.findings.begin_run()  # what was found before is not that of the latest run
        engine.findings.silent = True

    # ---- before a run ---------------------------------------------------------------------------------------------

    @on(Lifecycle.REMARKED)
    def report(
        self, engine: Engine, code: str, sentence: str, way_out: str, handlers: tuple[str, ...], how: dict[str, Any]
    ) -> None:
        """Report what a part of the engine has noticed."""
        engine.findings.report(code, sentence, way_out, *handlers, **how)

    @on(Lifecycle.CONNECTED)
    def look_at_function(self, engine: Engine, signal: Signal, connection: Connection, same: list[Connection]) -> None:
        """Look at a function that is connected, and at its first call."""
        engine.findings.look(report_double, engine, signal.event, connection, same)
        engine.findings.look(look_at_return, signal, connection)
        engine.findings.look(look_at_forwards, signal, connection)

    @on(Lifecycle.ATTACHED)
    def look_at_handler(self, engine: Engine, handler: Handler) -> None:
        """Look at a handler that is attached."""
        engine.findings.look(report_handler, engine, handler)

    # ---- the start of a run ---------------------------------------------------------------------------------------

    @on(Lifecycle.RUN_BEGAN, rank=FIRST)
    def begin_run(self, engine: Engine) -> None:
        """Report again what was reported in the run before, and look at the model as the user left it."""
        engine.findings.begin_run()
        self._forget()
        self._in_eval = engine.findings.look(parts_in_eval, engine)  # before the run puts them in training mode

    @on(Lifecycle.BUILT)
    def look_at_setup(self, engine: Engine) -> None:
        """Look at what the run trains, or evaluates."""
        engine.findings.look(report_parts_in_eval, engine, self._in_eval)
        for look in AT_START:
            engine.findings.look(look, engine)
        engine.findings.look(watch_started, engine)

    @on(Lifecycle.LOADING, rank=LAST)
    def look_at_data(self, engine: Engine) -> None:
        """Look at the data, once a loaded state is in place."""
        check_data(engine)  # each of its looks is guarded; a rank that is lost meanwhile is an error

    @on(Lifecycle.READY, rank=LAST)
    def look_at_composition(self, engine: Engine) -> None:
        """Look at the composition."""
        if engine.current_run is not None and engine.current_run.checks:
            engine.findings.look(report_composition, engine)

    @on(Lifecycle.STARTING)
    def look_at_beginning(self, engine: Engine) -> None:
        """Note how the run begins, and look at its first iterations."""
        engine.findings.look(self._begin, engine)

    def _begin(self, engine: Engine) -> None:
        self._began = engine.state.completed
        self._epochs, self._schedulers = EpochChecks(engine), OwnSchedulers(engine)
        self._until_the_end = [OwnLoads(engine), LateScores(engine), WorkerBatches(engine)]
        if not engine.training:
            self._connect(engine, Events.FORWARD_STARTED, self._evaluation.forward, None)
            return
        first = FirstLosses(engine, self._unsaved)
        self._connect(engine, Events.FORWARD_STARTED, first.forward, first.when)
        self._connect(engine, Events.LOSS_COMPUTED, first.loss, first.when)
        self._connect(engine, Events.BACKWARD_COMPLETED, first.backward, first.when)
        if engine.overrides.gradients is not None:
            self._connect(engine, Events.UPDATE_COMPLETED, first.update, first.when)

    def _connect(self, engine: Engine, event: Events, receiver: Any, when: Filter | None) -> None:
        late = event in (Events.BACKWARD_COMPLETED, Events.UPDATE_COMPLETED)
        phase, rank = (Phase.PERSIST, LAST) if late else (Phase.PREPARE, FIRST)
        signal, connection = engine.signal(event), Connection(receiver, phase, rank, when, self.name, internal=True)
        signal.add(connection)
        self._first.append((signal, connection))

    def _disconnect(self) -> None:
        first, self._first = self._first, []
        for signal, connection in first:
            signal.remove(connection)

    # ---- states, weights and evaluations ---------------------------------------------------------------------------

    @on(Lifecycle.STATE_TAKEN)
    def look_at_state(self, engine: Engine, state: dict[str, Any], at_once: bool) -> None:
        """Look at a state that was taken."""
        engine.findings.look(self._unsaved.look, engine, state, at_once)

    @on(Lifecycle.RESUMED)
    def look_at_resumption(
        self, engine: Engine, loaded: Mapping[str, Any], allowed: frozenset[str], seed: int, changed: bool
    ) -> None:
        """Report where a run resumes, and what differs from the run that saved the state."""
        engine.findings.look(report_resume, engine, loaded, allowed, seed, changed)
        self._frozen = loaded.get("composition", {}).get("frozen")

    @on(Lifecycle.WEIGHTS_GIVEN)
    def look_at_weights(self, engine: Engine, given: Mapping[str, Any]) -> None:
        """Look at the state whose weights were put in place."""
        engine.findings.look(report_averages_left_out, engine, given)

    @on(Lifecycle.EVALUATING)
    def look_at_evaluator(self, engine: Engine, evaluator: Engine) -> None:
        """Look at what is about to be evaluated."""
        self._has_other_weights = bool(engine.findings.look(has_other_weights, engine, evaluator))

    @on(Lifecycle.EVALUATED)
    def look_at_evaluation(
        self, engine: Engine, evaluator: Engine, measured: dict[str, Any], seen: dict[str, int], prefix: str
    ) -> None:
        """Look at what an evaluation has measured."""
        if self._has_other_weights:
            engine.findings.look(report_other_weights, engine, evaluator)
        engine.findings.look(report_nothing_measured, engine, evaluator, measured)
        engine.findings.look(note_last_values, engine, evaluator, seen, prefix)

    # ---- epochs, and the end --------------------------------------------------------------------------------------

    @on(Lifecycle.EPOCH_BEGAN)
    def note_epoch(self, engine: Engine, resumed: bool) -> None:
        """Note how an epoch begins."""
        if self._epochs is not None:
            engine.findings.look(self._epochs.begin_epoch)
        engine.findings.look(note_batches, engine)
        if self._frozen is not None:  # functions at EPOCH_STARTED may have unfrozen what was trained
            engine.findings.look(report_frozen, engine, self._frozen)
            self._frozen = None

    @on(Lifecycle.DATA_ENDED)
    def look_at_length(self, engine: Engine, more: bool) -> None:
        """Report data that gives another number of batches than its length says."""
        engine.findings.look(report_length, engine, more)

    @on(Lifecycle.EPOCH_ENDS)
    def look_at_epoch(self, engine: Engine) -> None:
        """Compare how an epoch ends with how it began."""
        if self._epochs is not None:
            engine.findings.look(self._epochs.end_epoch)
            engine.findings.look(check_epoch, engine, self._began)

    @on(Lifecycle.FINISHING)
    def look_at_end(self, engine: Engine) -> None:
        """Look at how the run ends."""
        if self._epochs is None or self._schedulers is None:  # attached inside this run
            return
        look = engine.findings.look
        if engine.state.epoch_open:
            look(self._epochs.end_epoch, whole=False)
        look(self._epochs.finish)
        look(report_left_in_training, engine, self._evaluation.known)
        look(report_random_samples, engine)
        if engine.state.stop_reason is None:
            look(check_steps, engine, self._began)
        look(self._schedulers.report)

    @on(Events.COMPLETED, phase=Phase.PERSIST, rank=LAST)
    def note_end(self, engine: Engine) -> None:
        """Note which handlers the run might have had."""
        if engine.training:
            engine.findings.look(note_run)

    @on(Events.ENDED, phase=Phase.PERSIST, rank=LAST)
    @on(Lifecycle.CLOSED)  # once more, where a receiver of ENDED could not be called
    def end_run(self, engine: Engine) -> None:
        """Leave everything as it was."""
        for update in engine.updates:
            if update.window.given is not None:
                update.window.given.end_backward()
        for one in self._until_the_end:
            one.stop()
        self._disconnect()
        self._forget()
        self._unsaved.end_run()
