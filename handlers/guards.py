"""Guards: detects silent training problems during a run."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from signalfire import AnyEvent, Engine, Events, Finding, FindingError, Handler, Interval, Phase, UpdateState, on
from signalfire.authoring import Capture, check_every, widened
from signalfire.findings import check_codes
from signalfire.findings.codes import Severity
from signalfire.findings.dropout import has_other_path
from signalfire.findings.epoch_checks import counted, counts_versions, names_of, rates_of, shown, trainable

from ._common.look import LOOKS_AT, Beginning, Look, looking
from ._common.ranks import RECORD_GROUPS
from ._common.watching import (
    Facts,
    Foreign,
    are_of_teachers,
    batch_of,
    changed,
    differing_rank,
    first_of,
    frozen_last_layer,
    gradient_facts,
    ignores_all,
    inputs_of,
    labels_of,
    left_in_eval,
    moving_frozen_norms,
    name_of_inputs,
    one_class,
    out_of_range,
    place_in_data,
    same_for_all,
    statistics_of,
    total,
    unheld_since,
    untrained_spectral_norms,
)

__all__ = ["Guards"]

_FIRST = 3  # iterations that are looked at as a training begins or resumes
_LONGEST = 500  # iterations after which a look that saw no step of some update ends


class Guards(Handler):
    """Detects silent training problems, such as bad data, modes or gradients, and reports them with codes G01 to G24.

    The handler checks the first three iterations, also after a resume, and every n-th iteration: the batch, the modes, the
    gradients, the step and, with several ranks, whether all ranks have the same weights. On an evaluator, the handler checks the
    first batch of every run. A check synchronizes with the device; between checks the handler is not called. Runs with and
    without the handler are bit-identical.

    ``Engine(allow=["G13"])`` silences a code; `signalfire.findings.codes.CODES` explains each one.

    Args:
        every: Interval between checks, in iterations.
        error: Codes that stop the run with a FindingError instead of a warning.

    Errors:
        FindingError: For a finding whose code is in ``error``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=1e-6)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(Guards(error=["G13"]))
        >>> _ = engine.run([(torch.full((4, 2), 255.0), torch.ones(4, 1))], max_epochs=1)
        Traceback (most recent call last):
            ...
        signalfire.findings.reports.FindingError: G13: the inputs are large: their mean absolute value is 255; normalize them...
    """

    capture = Capture.FORBIDDEN

    def __init__(self, *, every: str | Interval = "1000it", error: Sequence[str] = (), name: str | None = None) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every, units=["it"])
        self.error = check_codes("Guards(error=)", error)
        self.look_event: AnyEvent | None = None
        self.evaluation_event: AnyEvent | None = None
        self._forget()

    def _forget(self) -> None:
        self._facts, self._modes = dict[str, Facts](), dict[nn.Module, bool]()
        self._known: set[Tensor] = set()
        self._batches, self._labels = list[tuple[int, Hashable, Any]](), list[tuple[int, int]]()
        self._foreign: list[Foreign] = []
        self._stepped, self._moving = set[Tensor](), set[str]()
        self._look: Look | None = None

    def attached(self, engine: Engine) -> None:
        n, first = int(self.every.value), Events.ITERATION_STARTED(once=range(1, _FIRST + 1))
        every = Events.ITERATION_STARTED if n == 1 else first | Events.ITERATION_STARTED(every=n)
        events = (every, None) if engine.training else (None, Events.ITERATION_STARTED(once=1))
        self.look_event, self.evaluation_event = events
        self._beginning = Beginning(_FIRST if engine.state.iteration else 0)

    @on(Events.STARTED, phase=Phase.RECORD, reads=["trainable", "modes", "modules", "optimizer"], writes=[])
    def start(self, engine: Engine) -> None:
        """Record the modes of the modules, and the parameters that the optimizers were built for."""
        self._forget()
        self._facts = {update.name: Facts() for update in engine.updates}
        engine.findings.look(self._note_start, engine)
        self._beginning.open(engine, self.name, self.look, _FIRST)

    def _note_start(self, engine: Engine) -> None:
        self._modes = {part: part.training for root in engine.modules.values() for part in root.modules()}
        self._known = set(trainable(engine))
        names, updates = names_of(engine), [update for update in engine.updates if counts_versions(update)]
        self._foreign = [(p, p._version, one, one.steps) for one in updates for p in one.parameters if p not in names]

    @on(Events.ENDED, reads=[], writes=[])
    def end(self, engine: Engine) -> None:
        """Stop a check that is in progress."""
        self._beginning.close()
        if self._look is not None:
            self._look.close()
        self._forget()

    @on(Events.EPOCH_COMPLETED, phase=Phase.RECORD, reads=[], writes=[])
    def check_epoch(self, engine: Engine) -> None:
        """Compare the losses of the epoch with the loss of random guessing."""
        looking(engine, self.name, self.error)(self._check_losses, engine)

    def _check_losses(self, engine: Engine) -> None:
        for update in engine.updates if engine.training else ():
            facts = self._facts.get(update.name, Facts())
            losses, facts.epoch_losses = facts.epoch_losses, []
            guessed = [abs(loss - math.log(classes)) < 0.01 * math.log(classes) for loss, classes in losses]
            if len(losses) >= 5 and all(guessed):
                self._report(
                    "G24",
                    f"in epoch {engine.state.epoch} the loss of update {update.name!r} stayed at ln {losses[0][1]}, "
                    "the loss of random guessing",
                    "check the learning rate, and check that each input has the right label",
                    key=update.name,
                )

    # ---- looking at a training iteration --------------------------------------------------------------------------

    @on("look_event", phase=Phase.RECORD, reads=LOOKS_AT, writes=[])
    def look(self, engine: Engine) -> None:
        """Check this iteration, and the following ones until each update has taken a step."""
        if self._look is not None or not self._facts:
            return
        self._check_ranks(engine)
        safely = looking(engine, self.name, self.error)
        safely(self._check_batch, engine)
        safely(self._check_model, engine)
        self._look = look = safely(Look, engine, self.name)
        if look is None:
            return
        safely(lambda: look.watch(*left_in_eval(engine, self._modes)))
        look.connect(Events.BACKWARD_STARTED, partial(safely, self._check_left_over))
        look.connect(Events.LOSS_COMPUTED, partial(safely, self._see_loss))
        look.connect(Events.GRADIENTS_READY, partial(safely, self._see_gradients))
        look.connect(Events.OPTIMIZER_STEP_STARTED, partial(safely, self._see_before_step))
        look.connect(Events.OPTIMIZER_STEP_COMPLETED, partial(safely, look.compare), Phase.PREPARE, RECORD_GROUPS)
        look.connect(Events.OPTIMIZER_STEP_COMPLETED, partial(safely, self._see_step))
        look.connect(Events.ITERATION_COMPLETED, self._see_end)

    def _report(
        self, code: str, sentence: str, way_out: str, *, key: Any = None, severity: Severity | None = None
    ) -> None:
        if (engine := self.engine) is None:  # detached since
            return
        if code in self.error and not engine.findings.is_allowed(code):
            raise FindingError(Finding(code, sentence, way_out, (self.name,), "error"))
        engine.findings.report(code, sentence, way_out, self.name, key=key, severity=severity)

    def _check_ranks(self, engine: Engine) -> None:
        if (odd := differing_rank(engine)) is not None:
            self._report(
                "G09",
                f"the weights on rank {odd} differ from the weights on rank 0 before iteration "
                f"{engine.state.iteration}",
                "do not convert, move or replace parameters during a run; let only the engine step the optimizers; and "
                "use engine.model in the forward pass, so that the gradients are averaged over the ranks",
            )

    def _check_batch(self, engine: Engine) -> None:
        state = engine.state
        inputs, labels, what = inputs_of(state.batch), labels_of(state.batch), batch_of(state.batch)
        own_data = engine.overrides.data is None and state.epoch_length != 1
        if own_data and what is not None:
            self._check_repeated(engine, what)
        if own_data and labels is not None and min(len(labels), labels.numel()) >= 4:
            self._check_classes(engine, labels)
        if inputs is not None and inputs.numel():
            spread = float(widened(inputs.detach()).abs().mean())
            if math.inf > spread > 20:
                self._report(
                    "G13",
                    f"{name_of_inputs(state.batch)} are large: their mean absolute value is {spread:.3g}",
                    "normalize them, for example to a mean of 0 and a standard deviation of 1",
                )

    def _check_repeated(self, engine: Engine, what: Any) -> None:
        epoch, place = engine.state.epoch, place_in_data(engine)
        self._batches = [*[one for one in self._batches if one[0] == epoch][-2:], (epoch, place, what)]
        _, places, batches = zip(*self._batches, strict=True)
        if len(batches) == 3 and len({*places}) > 1 and len({*batches}) == 1:
            self._report(
                "G11",
                f"the batch in iteration {engine.state.iteration} is identical to the batches in the last two checks "
                "of this epoch",
                "check the dataset's __getitem__ and the sampler; to repeat batches on purpose, use OverfitBatches()",
            )

    def _check_classes(self, engine: Engine, labels: Tensor) -> None:
        low, high = int(labels.min()), int(labels.max())
        self._labels = [*self._labels[-2:], (low, high)]
        if one_class(self._labels, self._facts.values()):
            several = len(set(self._labels)) > 1
            self._report(
                "G15",
                "in the last three checks, each batch contained labels from only one class, "
                + ("as if the data were sorted by class" if several else f"always {low}"),
                "shuffle the data: DataLoader(shuffle=True), or mix the classes in your own sampler"
                if several
                else "check the labels",
                key=several,
                severity="warning" if several else "info",
            )

    def _check_model(self, engine: Engine) -> None:
        if new := unheld_since(engine, self._known, self._foreign):
            self._report(
                "G05",
                f"{shown(new, names_of(engine))} of the model {'is' if len(new) == 1 else 'are'} in no optimizer, "
                "probably because a layer was created, replaced or unfrozen after the optimizer was built",
                "create all layers before run() and pass the Update an optimizer factory, such as "
                "partial(torch.optim.AdamW, lr=1e-3)",
            )
        if (last := frozen_last_layer(engine)) is not None:
            self._report(
                "G22",
                f"only normalization layers are trained, and the last layer {last!r} is frozen",
                f"unfreeze {last!r} if this layer should learn the labels in this dataset",
            )

    def _check_left_over(self, engine: Engine) -> None:
        update, look = engine.state.update, self._look
        if look is None or update.name not in look.begun:
            return
        look.begun.discard(update.name)
        if (left := total(p.grad for p in update.parameters)) > 0:
            self._report(
                "G10",
                f"gradients with norm {left:.3g} already exist before the backward pass of iteration "
                f"{engine.state.iteration} and are added to the gradients of update {update.name!r}",
                "clear the gradients that your own backward() call produces, or use "
                "backward(inputs=...) to leave out the parameters of the model",
                key=update.name,
            )

    def _see_loss(self, engine: Engine) -> None:
        update, batch = engine.state.update, engine.state.batch
        facts, look = self._facts[update.name], self._look
        if look is None or update.evaluation > 0 or not isinstance(update.raw_loss, Tensor):
            return
        output, inputs, labels = update.output, inputs_of(batch), labels_of(batch)
        if not ignores_all(update.raw_loss):
            has_nan = inputs is not None and bool(inputs.isnan().any())
            look.seen[update.name] = update.raw_loss.detach(), batch_of(batch), name_of_inputs(batch) if has_nan else ""
        facts.see(update.raw_loss, output, labels)
        if (wrong := out_of_range(output, labels, update.raw_loss)) is not None:
            self._report(
                "G12",
                f"labels range from {wrong[0]} to {wrong[1]}, but {wrong[2]} classes are numbered 0 to {wrong[2] - 1}",
                "number the labels from 0, and give the last layer as many outputs as there are classes",
                key=update.name,
            )
        if facts.again("G16", update.steps > 0 and same_for_all(output, first_of(batch))) >= 2:
            self._report(
                "G16",
                f"the output of update {update.name!r} is the same for all samples of a batch, although their inputs "
                "differ",
                "look for dead ReLUs, saturated units, a learning rate that is too high, or inputs that the forward "
                "pass does not use",
                key=update.name,
            )

    def _see_gradients(self, engine: Engine) -> None:
        update = engine.state.update
        if update.skipped is not None or update.evaluation > 0 or self._look is None:
            return
        facts, names = self._facts[update.name], names_of(engine)
        wanted, missing, norm = gradient_facts(update)
        missing, several = facts.lasting(missing, wanted)
        self._look.trained.update(wanted)
        streak = facts.again("G01", bool(missing) and several)
        if missing and (streak != 1 or len(missing) == len(wanted)):
            self._report(
                "G01",
                f"{len(missing)} of the {len(wanted)} parameters of update {update.name!r} ({shown(missing, names)}) have no "
                f"gradient in iteration {engine.state.iteration}",
                "use engine.model in the forward pass; look for detach(), no_grad(), .item() and unused modules; freeze "
                "parameters that should not be trained",
                key=(update.name, several),
                severity="warning" if several else "info",
            )
        if facts.again("G02", len(missing) < len(wanted) and facts.is_dead(norm, update.raw_loss)) >= 2:
            self._report(
                "G02",
                f"all gradients of update {update.name!r} are zero in iteration {engine.state.iteration}",
                "look for dead ReLUs, a loss that is clamped or multiplied by 0, or cross_entropy of a single logit",
                key=update.name,
            )
        self._check_norm(update, facts, norm)

    def _check_norm(self, update: UpdateState, facts: Facts, norm: float) -> None:
        facts.norm = norm
        if math.isfinite(norm) and len(facts.norms) < _FIRST:
            facts.norms = [*facts.norms, norm]
        elif math.inf > norm > 1e6 * max(facts.norms, default=0.0) > 0:
            self._report(
                "G19",
                f"the gradient norm of update {update.name!r} is {norm:.3g}, compared with {max(facts.norms):.3g} at "
                "the beginning",
                "lower the learning rate, warm it up, or attach GradientClipping()",
                key=update.name,
            )

    def _see_before_step(self, engine: Engine) -> None:
        look, update = self._look, engine.state.update
        if look is not None and update.skipped is None:
            look.sample(update)

    def _see_step(self, engine: Engine) -> None:
        look, update = self._look, engine.state.update
        if look is None:
            return
        look.pending.discard(update.name)
        if update.skipped is not None:
            return
        facts = self._facts[update.name]
        facts.looks += 1
        rates = rates_of(update)
        if facts.again("G04", bool(rates) and not any(rates)) >= 2:
            self._report(
                "G04",
                f"the learning rate of update {update.name!r} is 0 in iteration {engine.state.iteration}",
                "check lr=, the warm-up of the schedule, and the unit of its length (steps or epochs)",
                key=update.name,
            )
        converged = facts.has_converged(look.largest.get(update.name, 0.0))
        if facts.again("G03", look.unchanged(update) and any(rates) and not converged) >= 2:
            self._report(
                "G03",
                f"the optimizer step in iteration {engine.state.iteration} does not change the weight with the "
                f"largest gradient of update {update.name!r}",
                "check that the optimizer's step() changes its parameters, and that their dtype is precise enough for "
                "such a small learning rate",
                key=update.name,
            )
        self._check_rate(engine, update, facts, rates)
        if update.name in look.seen:
            self._check_loss(engine, update, facts, *look.seen.pop(update.name))

    def _check_rate(self, engine: Engine, update: UpdateState, facts: Facts, rates: Sequence[float]) -> None:
        rate, state = max(rates, default=0.0), engine.state
        facts.largest_rate = max(rate, facts.largest_rate)
        planned = state.max_iters or (state.max_epochs or 0) * (state.epoch_length or 0)
        if facts.again("G18", 2 * state.iteration < planned and 0 < rate < 1e-6 * facts.largest_rate) >= 3:
            self._report(
                "G18",
                f"the learning rate of update {update.name!r} has fallen from {facts.largest_rate:.3g} to {rate:.3g} by "
                f"iteration {state.iteration} of {planned}",
                'check how fast the schedule decays, when it ends, and its unit: LRScheduling(..., every="1ep") steps '
                "the schedule once per epoch",
                key=update.name,
            )

    def _check_loss(
        self, engine: Engine, update: UpdateState, facts: Facts, loss: Tensor, what: Any, bad_inputs: str
    ) -> None:
        value = float(loss)
        if bad_inputs or not math.isfinite(value):
            where = f"in iteration {engine.state.iteration}"
            of_loss = f"the loss of update {update.name!r} {where} is {value}"
            self._report(
                "G14",
                f"{bad_inputs} {where} contain NaN" if bad_inputs else of_loss,
                "look for NaN in the data, a logarithm of zero, a division by zero, or a learning rate that is too "
                "high; NonFiniteGuard() skips such steps",
                key=(update.name, math.isfinite(value)),
                severity="info" if math.isfinite(value) else "warning",
            )
        self._check_same(update, facts, value, what)

    def _check_same(self, update: UpdateState, facts: Facts, value: float, what: Any) -> None:
        facts.losses = [*facts.losses[-2:], (value, what)]
        losses, batches = ({one[place] for one in facts.losses} for place in (0, 1))
        if value != 0 and what is not None and len(losses) == 1 and len(batches) == 3 and not facts.norm > 0:
            self._report(
                "G17",
                f"the loss of update {update.name!r} is exactly {value} for three different batches",
                "check that the loss depends on outputs and labels, and that the outputs are not saturated",
                key=update.name,
            )

    def _see_end(self, engine: Engine) -> None:
        if (look := self._look) is None:
            return
        looking(engine, self.name, self.error)(self._check_end, engine, look)
        if not look.pending or engine.state.iteration - look.iteration > _LONGEST:
            look.close()
            self._look = None

    def _check_end(self, engine: Engine, look: Look) -> None:
        for update, calls in look.counted(engine):
            self._report(
                "G20",
                f"the optimizer of update {update.name!r} was stepped {counted(calls, 'time')} in iteration "
                f"{engine.state.iteration}, more often than the engine steps it",
                "return the loss, and remove your backward() and optimizer.step(), because the engine calls them",
                key=update.name,
            )
        if look.in_eval:
            self._report(
                "G06",
                f"{look.in_eval} is in eval mode in the forward pass of iteration {engine.state.iteration}, so dropout "
                "is off and batch statistics are not used",
                "call model.train() after each evaluation, or use engine.evaluate(), which restores the mode",
            )
        moving = moving_frozen_norms(engine, look.statistics, look.trained)
        lasting = self._moving.intersection(moving)  # else it may be frozen for another part, such as a generator
        if lasting or (moving and moving_frozen_norms(engine, look.statistics, look.trained | self._known)):
            self._report(
                "G21",
                f"the weights of {moving[0]!r} are frozen, but the training batches still update its running "
                "statistics",
                "use Freezing(), which also freezes the statistics, or put the layer into eval mode at EPOCH_STARTED",
                severity="info" if are_of_teachers(engine, moving) else None,
            )
        self._moving = set(moving)
        if left := look.left_over(self._stepped):
            self._report(
                "G10",
                f"the gradients of {shown(left, names_of(engine))} are added to gradients that an optimizer step "
                "already used in the previous iteration",
                "call zero_grad() on the optimizer that you step yourself, or build an Update for that optimizer",
                key="elsewhere",
            )
        self._stepped = look.stepped()

    # ---- looking at an evaluation ---------------------------------------------------------------------------------

    @on("evaluation_event", phase=Phase.RECORD, reads=["buffers", "modules", "step"], writes=[])
    def look_at_evaluation(self, engine: Engine) -> None:
        """Check the first batch of an evaluation."""
        safely = looking(engine, self.name, self.error)
        self._look = look = safely(Look, engine, self.name)
        if look is None:
            return
        look.connect(Events.UPDATE_STARTED, partial(safely, self._see_forward_begin))
        look.connect(Events.UPDATE_COMPLETED, partial(safely, self._see_forward_end))
        look.connect(Events.ITERATION_COMPLETED, lambda engine: look.close())

    def _see_forward_begin(self, engine: Engine) -> None:
        look = self._look
        assert look is not None
        if found := untrained_spectral_norms(engine):
            self._report(
                "G23",
                f"the power iteration of the spectral norm of {found[0]!r} has not run, or has not run with "
                "the weights being evaluated, so these weights are divided by a number that is too small",
                "run a few forward passes with these weights in training mode first",
            )
        look.statistics = statistics_of(engine)  # once the modes are set
        if not has_other_path(engine):
            engine.regions.enter(look.dropout)

    def _see_forward_end(self, engine: Engine) -> None:
        look = self._look
        assert look is not None
        if look.dropout.seen:
            self._report(
                "G07",
                "dropout is active in the forward pass during an evaluation",
                "keep the model in eval mode, and pass training=self.training to dropout functions",
            )
        now = statistics_of(engine)
        if moved := sorted(changed(look.statistics, now)):
            self._report(
                "G08",
                f"the running statistics of {moved[0]!r} change during an evaluation",
                "keep the model in eval mode during the evaluation",
            )
