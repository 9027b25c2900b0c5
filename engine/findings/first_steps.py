"""The first steps of a run, in which the engine looks at what is the same in all later ones: how the losses are made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from ..acts import Override
from ..batches import tensors_in
from ..distributed.sharded import is_sharded, local_part
from ..events import Events
from ..step import Step
from ..update import UpdateState
from ..window import ONE
from .calls import FirstCalls
from .composition import listed
from .dropout import ActiveDropout, is_compiled
from .epoch_checks import counted, held_by_optimizers, names_of
from .evaluation_findings import note_scale, report_other_scale
from .given_gradients import GivenGradients
from .layouts import looking_for_mixed_up_layouts, samples_of
from .loss_graph import Problem, leaves_of, problems_of
from .target_counts import Mean, TargetCalls, TargetCounts, are_averaged

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["FirstEvaluation", "FirstStep"]

_ITERATIONS = 4
_OF_COMPUTE = (
    Events.FORWARD_STARTED,
    Events.FORWARD_COMPLETED,
    Events.LOSS_COMPUTED,
    Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED,
)


class FirstStep(Step):
    """A `Step` that looks at the losses of the first iterations, and then becomes a plain one, which costs nothing more."""

    __slots__ = ()

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.look = _Look(engine)

    def compute_loss(self, update: UpdateState, batch: Any, iteration: int, listened: bool) -> Tensor | None:
        """As `Step` does it."""
        look = self.look
        assert look is not None
        findings = self.engine.findings
        if findings.look(look.begins, update):
            samples = findings.look(samples_of, self.engine, self.state.batch)
            with (
                looking_for_mixed_up_layouts(self.engine, samples),
                FirstCalls(self.engine, samples, counts_targets=are_averaged(self.engine, update)) as calls,
            ):
                loss = super().compute_loss(update, batch, iteration, listened)
            findings.look(_report_calls, self.engine, update, calls)
            findings.look(look.note_means, update, calls.means)
        elif update.name in look.counts and iteration <= look.last:
            with TargetCalls(self.engine) as counted:
                loss = super().compute_loss(update, batch, iteration, listened)
            findings.look(look.note_means, update, counted.means)
        else:
            loss = super().compute_loss(update, batch, iteration, listened)
        if iteration > look.last:
            self.look_no_more()
        elif update.evaluation == 0 and isinstance(loss, Tensor):
            findings.look(look.at, update, loss)
        return loss

    def compute_gradients(self, update: UpdateState, iteration: int, listened: bool) -> None:
        """As `Step` does it."""
        try:
            Step.compute_gradients(
                self, update, iteration, listened
            )  # a `Step` itself by now, if this is a later piece
        finally:
            if update.window.given is not None:
                update.window.given.end_backward()

    def let_compute(self, function: Callable[..., None], update: UpdateState, iteration: int, listened: bool) -> None:
        """As `Step` does it."""
        super().let_compute(function, update, iteration, listened)
        if self.look is not None and iteration > self.look.last:
            self.look_no_more()
        elif self.look is not None and update.raw_loss is not None and self.look.sees_first(update):
            self.engine.findings.look(report_unheard, self.engine, update)

    def look_no_more(self) -> None:
        """Become a plain `Step`."""
        self.look = None
        self.__class__ = Step  # type: ignore[assignment]


class FirstEvaluation(Step):
    """A `Step` that looks at the first batch of an evaluation, whose forward should compute no dropout; then a plain one."""

    __slots__ = ()

    def compute_loss(self, update: UpdateState, batch: Any, iteration: int, listened: bool) -> Tensor | None:
        """As `Step` does it."""
        self.__class__ = Step  # type: ignore[assignment]
        self.engine.findings.look(report_other_scale, self.engine, self.state.batch)
        if is_compiled(self.engine):  # a mode around it would have it compiled again
            return self.compute_loss(update, batch, iteration, listened)
        with ActiveDropout() as dropout:
            loss = self.compute_loss(update, batch, iteration, listened)
        modules = (part for root in self.engine.modules.values() for part in root.modules())
        if dropout.seen and not any(part.training for part in modules):  # these are reported when the evaluation ends
            self.engine.findings.report(
                "W57",
                f"the forward of update {update.name!r} computes dropout in an evaluation: a function is called that does not "
                "know of the mode",
                "give it the mode: F.dropout(x, training=self.training); allow W57 where the randomness is meant",
                key=update.name,
            )
        return loss


def report_unheard(engine: Engine, update: UpdateState) -> None:
    """Report receivers of the events that a micro-step does not emit where a handler computes its gradients alone."""
    by = engine.overrides.owner_of(Override.GRADIENTS)
    unheard: dict[str, list[str]] = {}
    for event in _OF_COMPUTE:
        for one in engine.signal(event).connections:
            if one.is_foreign and one.owner != by:
                unheard.setdefault(one.owner or repr(one), []).append(str(event))
    for owner, events in unheard.items():
        engine.findings.report(
            "W49",
            f"update {update.name!r}: {owner} receives {' and '.join(events)}, but {by!r} computes the gradients without "
            "compute(), which emits them: it has no effect there",
            f"detach one of the two, or let {by!r} call compute()",
            key=f"{update.name} {owner}",
        )


def _report_calls(engine: Engine, update: UpdateState, calls: FirstCalls) -> None:
    report_problems(engine, update, calls.found())


def report_problems(engine: Engine, update: UpdateState, problems: Iterable[Problem]) -> None:
    """Report what looks wrong about an update's first loss."""
    for code, sentence, way_out in problems:
        engine.findings.report(code, f"update {update.name!r}: {sentence}", way_out, key=update.name)


class _Node:
    """Lives as long as the node of the graph that it is attached to."""


class _Look:
    """What was seen of the losses of a run.

    Attributes:
        last: the last iteration that is looked at.
        counts: by update, how many targets its losses are means over, where these may count otherwise.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = weakref.ref(engine)
        self.last = engine.state.iteration + _ITERATIONS
        self._seen: set[str] = set()
        self._nodes: dict[str, list[weakref.ref[_Node]]] = {}
        self._streams: dict[str, list[Tensor]] = {}
        self._leaves: dict[str, list[weakref.ref[Tensor]]] = {}
        self.counts: dict[str, TargetCounts] = {}

    def begins(self, update: UpdateState) -> bool:
        """Whether it is the update's first loss, of a model that is not compiled: hooks would have it compiled again."""
        engine = self.engine()
        return update.name not in self._seen and engine is not None and not is_compiled(engine)

    def note_means(self, update: UpdateState, means: list[Mean]) -> None:
        """Note what a loss is a mean over, once the receivers of LOSS_COMPUTED have weighted it."""
        engine = self.engine()
        assert engine is not None
        if means and update.evaluation == 0:
            self.counts.setdefault(update.name, TargetCounts()).add(engine, update, means)

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
            engine.findings.look(note_scale, engine, engine.state.batch)
            engine.findings.look(engine.snapshots.note_unsaved)
        if update.name not in self._seen:
            self._seen.add(update.name)
            changed = [update.backward_loss] if isinstance(update.backward_loss, Tensor) else []
            output = next(iter(tensors_in(update.output)), None)
            counts = output is not None and output.dim() > 0 and update.weight is ONE
            samples = len(output) if output is not None and counts else None
            window, adversarial = update.window.length, len(engine.updates) > 1
            for one in (loss, *changed):  # a receiver may divide
                report_problems(engine, update, problems_of(one, window, samples, adversarial=adversarial))
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
        if update.raw_loss is not None and update.raw_loss.requires_grad:
            engine.findings.report(
                "W80",
                f"a receiver has set the loss of update {update.name!r}, which is only what is reported: the backward starts "
                "from the loss as it was",
                "set engine.state.update.backward_loss as well, or instead",
                key=update.name,
            )

    def _look_for_foreign_leaves(self, engine: Engine, update: UpdateState, loss: Tensor) -> None:
        """Trainable tensors of the loss that nobody trains; what is made for one batch is not meant to be."""
        found = self._leaves.get(update.name)
        if (found is not None and not found) or any(map(is_sharded, update.parameters)):
            return  # of sharded parameters, whole ones are made for each forward
        held = held_by_optimizers(engine) | set(names_of(engine))
        given = tensors_in(engine.state.batch)
        leaves = [one for one in leaves_of(loss) if one not in held and not any(one is other for other in given)]
        lasting = [one for one in leaves if any(one is ref() for ref in found or ())]
        self._leaves[update.name] = [] if found is not None else [weakref.ref(one) for one in leaves]
        if lasting:
            shapes = listed(str(list(one.shape)) for one in lasting)
            engine.findings.report(
                "W92",
                f"the loss of update {update.name!r} depends on {counted(len(lasting), 'trainable tensor')} of shape {shapes}, "
                f"which {'is' if len(lasting) == 1 else 'are'} in no optimizer and in no model of the engine",
                "if they are those of an older model, let the forward use engine.model; to train them, make them parameters of "
                "the model, or of a module given to the Engine: model={'model': ..., 'loss': ...}; or freeze them",
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
                f"update {update.name!r}: {len(several)} of its {len(update.parameters)} parameters have gradients before the "
                "backward of the window's first batch, to which its gradients are added",
                "leave backward() to the engine: call it neither in the forward, in the loss nor in a receiver; and clear "
                "gradients that were there before the run",
                key=update.name,
            )

    @staticmethod
    def _count_gradients(engine: Engine, update: UpdateState) -> None:
        """Count what the backwards of a window give, which its end may lack."""
        window = update.window
        if window.length < 2 or engine.processes.distributed or any(map(is_sharded, update.parameters)):
            return
        if window.held == 0:
            window.given = GivenGradients(engine, update)
        if window.given is not None:
            window.given.begin_backward()

    def _look_for_kept_graphs(self, engine: Engine, update: UpdateState, loss: Tensor) -> None:
        """The graph of a loss is freed with it, unless somebody holds the loss, a sum of several, or an output."""
        origin = next((one.grad_fn for one in tensors_in(update.output) if one.grad_fn is not None), loss.grad_fn)
        if origin is None or update.window.held:
            return
        node = _Node()
        origin.metadata["signalfire"] = node  # type: ignore[index]
        nodes = self._nodes.setdefault(update.name, [])
        if sum(one() is not None for one in nodes) == _ITERATIONS - 1:
            engine.findings.report(
                "W76",
                f"update {update.name!r}: the losses or outputs of the last {_ITERATIONS - 1} iterations are still held with "
                "their graphs, so that memory grows with each iteration",
                "keep what has no graph: loss.item(), or output.detach(); also in sums over batches",
                key=update.name,
            )
        nodes.append(weakref.ref(node))

    def _look_for_seeds(self, engine: Engine, update: UpdateState) -> None:
        """Dropout moves the global generator, unless it is seeded anew each time."""
        parts = [part for root in engine.modules.values() for part in root.modules()]
        drops = [part for part in parts if isinstance(part, _DropoutNd) and part.training and 0 < part.p < 1]
        if not drops or engine.streams != "shared" or engine.device.type != "cpu":
            return
        streams = self._streams.setdefault(update.name, [])
        streams.append(torch.get_rng_state())
        if len(streams) == _ITERATIONS - 1 and all(torch.equal(one, streams[0]) for one in streams):
            engine.findings.report(
                "W78",
                f"after each of the first {len(streams)} iterations, the global generator is where it was, though the model has "
                "dropout: it seems to be seeded in each iteration, so that each one draws the same masks",
                "seed once, before the run: Engine(seed=), Seeding or seed_everything",
                key=update.name,
            )
