"""The first steps of a run, in which the engine looks at what is the same in all later ones: how the losses are made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..authoring.batches import tensors_in
from ..authoring.functions import names_in
from ..core.events import Filter
from ..core.overrides import Override
from ..core.update import UpdateState
from ..core.window import ONE
from ..core.words import listed
from ..distributed.sharded import is_sharded, local_part
from ..resuming.windows import OF_MICRO_STEPS
from .calls import FirstCalls
from .data_checks import report_single_samples
from .dropout import ActiveDropout, has_other_path
from .epoch_checks import counted, held_by_optimizers, names_of
from .evaluation_findings import note_scale, note_trained_call, report_other_scale, report_training_mode
from .given_gradients import GivenGradients
from .layouts import looking_at_inputs, samples_of
from .loss_graph import Problem, problems_of
from .loss_nodes import leaves_of, nodes_of
from .other_optimizers import held_by_none
from .parameter_rules import ends_frozen
from .taken_states import UnsavedValues
from .target_counts import Mean, TargetCalls, TargetCounts, are_averaged, terms_of

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["FirstEvaluation", "FirstLosses"]

_ITERATIONS = 4


class FirstLosses:
    """Looks at the losses of the first iterations of a run that trains; its receivers are called in these only.

    Args:
        engine: the engine.
        unsaved: takes note of what no state holds, after the first forward.
    """

    def __init__(self, engine: Engine, unsaved: UnsavedValues) -> None:
        self._look = _Look(engine, unsaved)
        self._loss: Tensor | None = None  # as it was computed, before receivers change it
        first = engine.state.iteration + 1
        self.when = Filter(once=frozenset(range(first, first + _ITERATIONS)))

    def forward(self, engine: Engine) -> None:
        """Look at what follows, up to the loss, from the outermost place inside the region of FORWARD_STARTED."""
        engine.regions.enter(self._looking(engine, engine.state.update))

    @contextmanager
    def _looking(self, engine: Engine, update: UpdateState) -> Iterator[None]:
        try:
            with self._looking_at_calls(engine, update):
                yield
            if update.evaluation == 0 and isinstance(self._loss, Tensor):
                engine.findings.look(self._look.at, update, self._loss)
        finally:
            self._loss = None

    @contextmanager
    def _looking_at_calls(self, engine: Engine, update: UpdateState) -> Iterator[None]:
        look, findings = self._look, engine.findings
        if not look.has_begun:
            findings.look(note_scale, engine, engine.state.batch)  # which the forward may normalize in place
        if findings.look(look.begins, update):
            samples = findings.look(samples_of, engine, engine.state.batch)
            findings.look(report_single_samples, engine, engine.state.batch)
            with (
                looking_at_inputs(engine, samples),
                FirstCalls(engine, samples, counts_targets=are_averaged(engine, update)) as calls,
            ):
                yield
            findings.look(_report_calls, engine, update, calls)
            findings.look(look.note_means, update, calls.means)
            if not calls.has_left:
                look.note_points(update, calls.points)
        elif update.name in look.counts:
            with TargetCalls(engine) as counted:
                yield
            findings.look(look.note_means, update, counted.means)
        else:
            yield

    def loss(self, engine: Engine) -> None:
        """Note a loss as it was computed."""
        self._loss = engine.state.update.raw_loss

    def backward(self, engine: Engine) -> None:
        """Note that a backward has given its gradients."""
        if (given := engine.state.update.window.given) is not None:
            given.end_backward()

    def update(self, engine: Engine) -> None:
        """Look at an update whose gradients a handler has computed alone."""
        update = engine.state.update
        if engine.overrides.gradients is None or update.raw_loss is None or _is_idle(engine):
            return
        if self._look.sees_first(update):
            engine.findings.look(report_unheard, engine, update)


class FirstEvaluation:
    """Looks at the first batch of an evaluation, whose forward should compute no dropout.

    Args:
        leave: called at the first batch, so that no other is looked at.

    Attributes:
        known: the modules whose modes in the forward are known.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self.known: set[nn.Module] = set()

    def forward(self, engine: Engine) -> None:
        """Look at what follows, up to the loss."""
        self._leave()
        engine.findings.look(report_other_scale, engine, engine.state.batch)
        engine.findings.look(report_single_samples, engine, engine.state.batch)
        if not has_other_path(engine):
            engine.regions.enter(self._looking(engine, engine.state.update))

    @contextmanager
    def _looking(self, engine: Engine, update: UpdateState) -> Iterator[None]:
        before = {part for _, part in engine.modules.parts() if part.training}
        with _EvaluationForward(engine) as forward:
            yield
        self.known = forward.known
        engine.findings.look(self._report, engine, update, forward, before)

    @staticmethod
    def _report(engine: Engine, update: UpdateState, forward: _EvaluationForward, before: set[nn.Module]) -> None:
        if forward.uses_trained:
            note_trained_call(engine)
        ran = forward.in_training
        own = {part for part in ran if type(part).train is not nn.Module.train}
        report_training_mode(engine, ran, own | {part for part in ran - before if not part.training})
        if forward.seen and not ran and not any(part.training for _, part in engine.modules.parts()):
            engine.findings.report(
                "W57",
                f"the forward pass of update {update.name!r} applies dropout in an evaluation, because it calls a "
                "dropout function without passing the mode, or a module in training mode that does not belong to this "
                "engine",
                "pass the mode: F.dropout(x, training=self.training), or call eval() on the module; allow W57 if the "
                "randomness is intended",
                key=update.name,
            )


class _EvaluationForward(ActiveDropout):
    """Notes the modes in which a forward of an evaluation computes.

    Attributes:
        known: the modules, once something is computed.
        in_training: those that were in training mode then, or when dropout or batch statistics were computed.
        uses_trained: whether a weight of the engine that runs the evaluator was used, which the evaluator does not have.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        trainer = engine.findings.parent
        self._modules = {part for _, part in engine.modules.parts()}
        others = [] if trainer is None else list(trainer.modules.parameters())
        self._trained = set(others) - set(engine.modules.parameters())
        self.known: set[nn.Module] = set()
        self.in_training: set[nn.Module] = set()
        self.uses_trained = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.known or "dropout" in name or "batch_norm" in name:
            self.known = self._modules
            self.in_training.update(part for part in self._modules if part.training)
        self.uses_trained = self.uses_trained or any(
            one in self._trained for one in args if isinstance(one, nn.Parameter)
        )
        return super().__torch_function__(func, types, args, kwargs)


def _is_idle(engine: Engine) -> bool:
    """Whether other processes compute all batches of this step, which consists of shards."""
    return engine.group.shards is not None and all(batch is None for batch in engine.state.batch or ())


def report_unheard(engine: Engine, update: UpdateState) -> None:
    """Report receivers of the events that a micro-step does not emit where a handler computes its gradients alone."""
    by = engine.overrides.owner_of(Override.GRADIENTS)
    unheard: dict[str, list[str]] = {}
    for event in OF_MICRO_STEPS:
        for one in engine.signal(event).connections:
            if one.is_foreign and one.owner != by:
                unheard.setdefault(one.owner or repr(one), []).append(str(event))
    for owner, events in unheard.items():
        engine.findings.report(
            "W49",
            f"update {update.name!r}: {owner} has no effect on this update, because it relies on "
            f"{' and '.join(events)}. Only compute() emits these events, but {by!r} computes the gradients without "
            "calling compute()",
            f"detach {owner} or {by!r}, or let {by!r} call compute()",
            key=f"{update.name} {owner}",
        )


def _report_calls(engine: Engine, update: UpdateState, calls: FirstCalls) -> None:
    problems = calls.found(update.raw_loss)
    if "backward" in names_in(update.spec.function):  # a term may have had a backward of its own
        problems = [one for one in problems if one[0] != "W99"]
    report_problems(engine, update, problems)


def report_problems(engine: Engine, update: UpdateState, problems: Iterable[Problem]) -> None:
    """Report what looks wrong about an update's first loss."""
    for code, sentence, way_out in problems:
        engine.findings.report(code, f"update {update.name!r}: {sentence}", way_out, key=update.name)


def _untrained(leaves: Iterable[Tensor], before: Iterable[tuple[weakref.ref[Tensor], int]]) -> list[Tensor]:
    """The leaves of a loss that a loss before had, too, which no function changes, and no optimizer of this process holds."""
    seen = {(id(one()), version) for one, version in before}
    lasting = [one for one in leaves if (id(one), one._version) in seen]
    return held_by_none(lasting)


class _Node:
    """Lives as long as the node of the graph that it is attached to."""


def _alive(nodes: list[weakref.ref[_Node]]) -> int:
    return sum(one() is not None for one in nodes)


class _Look:
    """What was seen of the losses of a run.

    Attributes:
        counts: by update, how many targets its losses are means over, where these may count otherwise.
        points: by what the latest first forward took derivatives.
    """

    def __init__(self, engine: Engine, unsaved: UnsavedValues) -> None:
        self.engine = weakref.ref(engine)
        self._unsaved = unsaved
        self._seen: set[str] = set()
        self._nodes: dict[str, list[weakref.ref[_Node]]] = {}
        self._streams: dict[str, list[Tensor]] = {}
        self._leaves: dict[str, list[tuple[weakref.ref[Tensor], int]] | None] = {}  # with their versions
        self.counts: dict[str, TargetCounts] = {}
        self.points: list[Tensor] = []

    @property
    def has_begun(self) -> bool:
        """Whether a loss was seen."""
        return bool(self._seen)

    def begins(self, update: UpdateState) -> bool:
        """Whether it is the update's first loss, of a model that is not compiled: hooks would have it compiled again."""
        engine = self.engine()
        first = update.name not in self._seen
        if first:
            self._streams[update.name] = [torch.get_rng_state()]
        return first and engine is not None and not has_other_path(engine)

    def note_points(self, update: UpdateState, points: list[Tensor]) -> None:
        """Note by what a first forward took derivatives; without that, leaves of the loss may be such inputs."""
        self.points, self._leaves[update.name] = points, None

    def note_means(self, update: UpdateState, means: list[tuple[Mean, Tensor]]) -> None:
        """Note what a loss is a mean over, once the receivers of LOSS_COMPUTED have weighted it."""
        engine = self.engine()
        assert engine is not None
        if update.evaluation == 0 and (terms := terms_of(update.raw_loss, means)):
            self.counts.setdefault(update.name, TargetCounts()).add(engine, update, terms)

    def sees_first(self, update: UpdateState) -> bool:
        """Whether no loss of this update was seen yet; from now on, one was."""
        first = update.name not in self._seen
        self._seen.add(update.name)
        return first

    def at(self, update: UpdateState, loss: Tensor) -> None:
        """Look at a loss before its backward."""
        engine = self.engine()
        assert engine is not None
        if not self._seen:
            engine.findings.look(self._unsaved.note, engine)
        if update.name not in self._seen:
            self._seen.add(update.name)
            changed = [update.backward_loss] if isinstance(update.backward_loss, Tensor) else []
            output = next(iter(tensors_in(update.output)), None)
            counts = output is not None and output.dim() > 0 and update.weight is ONE
            samples = len(output) if output is not None and counts else None
            window = update.window.length
            # Another update, or a trained input of a frozen model, may make the loss large on purpose.
            adversarial = len(engine.updates) > 1 or any(map(ends_frozen, engine.modules.values()))
            for one in (loss, *changed):  # a receiver may divide
                problems = problems_of(one, window, samples, adversarial=adversarial, received=one is not loss)
                report_problems(engine, update, problems)
            if update.backward_loss is loss and isinstance(update.raw_loss, Tensor) and update.raw_loss is not loss:
                self._report_reported_loss(engine, update)
        look = engine.findings.look
        look(self._look_for_foreign_leaves, engine, update, loss)
        look(self._look_for_gradients, engine, update)
        look(self._count_gradients, engine, update)
        look(self._look_for_kept_graphs, engine, update, loss)
        look(self._look_for_seeds, engine, update)

    @staticmethod
    def _report_reported_loss(engine: Engine, update: UpdateState) -> None:
        if update.raw_loss is not None:
            engine.findings.report(
                "W80",
                f"a function changed the loss of update {update.name!r}, but that changes only the reported loss. The "
                "backward pass still starts from the original loss",
                "set engine.state.update.backward_loss to change the gradients",
                key=update.name,
                severity=None if update.raw_loss.requires_grad else "info",  # without a graph, it may be only reported
            )

    def _look_for_foreign_leaves(self, engine: Engine, update: UpdateState, loss: Tensor) -> None:
        """Trainable tensors of the loss that nobody trains; what is made for one batch is not meant to be."""
        found = self._leaves.get(update.name, [])
        if found == [] or any(map(is_sharded, update.parameters)):
            return  # of sharded parameters, whole ones are made for each forward
        known = {
            *map(id, (*held_by_optimizers(engine), *names_of(engine), *tensors_in(engine.state.batch), *self.points))
        }
        leaves = [one for one in leaves_of(loss) if id(one) not in known]
        self._leaves[update.name] = [] if found is not None else [(weakref.ref(one), one._version) for one in leaves]
        if lasting := _untrained(leaves, found or ()):
            shapes = listed(str(list(one.shape)) for one in lasting)
            engine.findings.report(
                "W92",
                f"the loss of update {update.name!r} depends on {counted(len(lasting), 'tensor')} with "
                f"requires_grad=True of shape {shapes}, which {'is' if len(lasting) == 1 else 'are'} in no optimizer and "
                "in no model of the engine",
                "if they belong to an older model, use engine.model in the forward pass; if they should be trained, "
                "make them parameters of the model, or of a module passed to the Engine: model={'model': ..., 'loss': "
                "...}; if they are inputs or should not be trained, freeze them, or create them without requires_grad",
                key=update.name,
            )

    def _look_for_gradients(self, engine: Engine, update: UpdateState) -> None:
        """Gradients that are there as a window begins are not those of its batches."""
        if update.window.held or engine.overrides.gradients is not None:
            return
        several = [local_part(p.grad) for p in update.parameters if p.grad is not None]
        if any(grad.is_sparse or bool(grad.any()) for grad in several):
            engine.findings.report(
                "W75",
                f"update {update.name!r}: {len(several)} of its {len(update.parameters)} parameters have gradients "
                "before the first backward pass of the window, and each backward pass adds to these gradients",
                "do not call backward() in the forward function, the loss or a connected function, because the engine "
                "calls it; and clear old gradients before the run",
                key=update.name,
            )

    @staticmethod
    def _count_gradients(engine: Engine, update: UpdateState) -> None:
        """Count what the backwards of a window give, which its end may lack."""
        window = update.window
        if window.length < 2 or engine.processes.distributed or any(map(is_sharded, update.parameters)):
            return
        if window.held == 0:
            if window.given is not None:  # of a batch that counts nothing
                window.given.end_backward()
            window.given = GivenGradients(engine, update)
        if window.given is not None:
            window.given.begin_backward()

    def _look_for_kept_graphs(self, engine: Engine, update: UpdateState, loss: Tensor) -> None:
        """The graph of a loss is freed with it, unless somebody holds the loss, a term or a sum of several, or an output."""
        if loss.grad_fn is None or update.window.held:
            return
        node = _Node()
        for one in nodes_of(loss.grad_fn):
            if any(hasattr(child, "variable") for child, _ in one.next_functions):  # a parameter, or another leaf
                one.metadata["signalfire"] = node
        nodes = self._nodes.setdefault(update.name, [])
        if _alive(nodes) == _ITERATIONS - 1 and not (gc.collect() and _alive(nodes) < _ITERATIONS - 1):
            engine.findings.report(
                "W76",
                f"update {update.name!r}: losses, loss terms or outputs of the last {_ITERATIONS - 1} iterations are "
                "still held with their graphs, so the memory of all these iterations stays in use",
                "store loss.item() or output.detach() instead, even when you sum over batches",
                key=update.name,
            )
        nodes.append(weakref.ref(node))

    def _look_for_seeds(self, engine: Engine, update: UpdateState) -> None:
        """Dropout moves the global generator, unless it is seeded again each time."""
        parts = [part for _, part in engine.modules.parts() if isinstance(part, _DropoutNd) and part.training]
        if not any(0 < part.p < 1 for part in parts) or engine.streams != "shared" or engine.device.type != "cpu":
            return
        before, *streams = self._streams[update.name] = [*self._streams[update.name], torch.get_rng_state()]
        drew = not torch.equal(before, streams[0])  # a forward without dropout leaves the generator where it was
        if drew and len(streams) == _ITERATIONS - 1 and all(torch.equal(one, streams[0]) for one in streams):
            engine.findings.report(
                "W78",
                f"the global generator is in the same state after each of the first {len(streams)} iterations, "
                "although the model has dropout. It seems to be seeded in each iteration, so dropout draws the same "
                "masks",
                "seed once before the run, with Engine(seed=), Seeding or seed_everything",
                key=update.name,
            )
