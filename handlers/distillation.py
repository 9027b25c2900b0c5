"""Knowledge distillation: a student learns the outputs of a teacher besides the targets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Phase, UpdateState, on
from signalfire.authoring import Capture, Claim, check_function, check_number, random_state, unchanged_random_state
from signalfire.distributed import whole_tensor
from signalfire.runs.restore import Modes
from signalfire.updates.from_model import call_by_keyword, model_by_keyword

from ._common.loss_terms import LossTerm, check_losses
from ._common.ranks import DISTILL
from ._common.updates import selected_updates

__all__ = ["Distillation"]

_HALF = (torch.float16, torch.bfloat16)


class Distillation(LossTerm):
    """Knowledge distillation: adds the divergence from a teacher's outputs to the task loss.

    The loss becomes ``task_weight * loss + weight * T**2 * KL``. KL is the divergence of the student's class probabilities
    from the teacher's, averaged over samples and positions. Both distributions are computed from logits divided by the
    temperature T, and the factor ``T**2`` keeps the gradients at the same scale.

    The teacher receives the same inputs as the student, under the same autocast: the batch, or each piece of it, after MixUp,
    CutMix and Cutout. The teacher is moved to the model's device and runs in eval mode without gradients; after the run, its
    modules return to their previous modes. Random numbers that it draws even in eval mode come from a copy of the generators.
    No checkpoint, state or average contains the teacher. The handler's state contains the teacher's `fingerprint`, and W32
    reports a run that resumes with a different teacher. With SAM and LBFGS, the teacher is called each time gradients are
    computed.

    The reported loss is still the task loss. ``T**2 * KL`` is a separate metric with the handler's name.

    Args:
        teacher: The trained model. To distill several models, pass a module that averages their outputs.
        temperature: T, by which logits are divided. A higher T gives more weight to similarities between classes; 1 leaves the
            probabilities unchanged, and 2 to 10 are usual.
        weight: Factor for the divergence. With 0, the teacher is not called.
        task_weight: Factor for the task loss; by default, ``1 - weight``.
        dim: Dimension of the classes in the outputs: 1, or -1 for language models with logits of shape (N, T, C).
        forward: Function called as ``forward(teacher, batch)`` that returns the teacher's logits. By default, the teacher
            receives the update's inputs, converted to its own dtype; for `Update.from_model`, it receives the batch as keyword
            arguments.
        update: Name of the update that trains the student; by default all.

    Raises:
        ValueError: At the start of a run, if the teacher shares parameters with the model, or if an update is a single
            function. During the run, if the outputs of teacher and student differ in shape.
        TypeError: If the outputs (those at the update's ``output``, or their attribute ``logits``) are not tensors of logits.

    Source:
        Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015).

    Example:
        >>> from signalfire import Update
        >>> update = Update.supervised(F.cross_entropy, torch.optim.SGD, lr=0.1)
        >>> trainer = Engine(update, model=nn.Linear(4, 3), seed=0)
        >>> _ = trainer.attach(Distillation(nn.Linear(4, 3), temperature=2.0, weight=0.7))
        >>> _ = trainer.run([(torch.ones(2, 4), torch.tensor([0, 1]))], max_epochs=1)
        >>> trainer.state.metrics["distillation"] > 0
        tensor(True)
    """

    capture = Capture.INSIDE

    def __init__(
        self,
        teacher: nn.Module,
        *,
        temperature: float = 4.0,
        weight: float = 0.5,
        task_weight: float | None = None,
        dim: int = 1,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(update=update, name=name)
        self.temperature = check_number(self, "temperature", temperature, above=0)
        if task_weight is None:
            self.weight = check_number(self, "weight", weight, least=0, most=1)
            self.task_weight = 1 - self.weight
        else:
            self.weight = check_number(self, "weight", weight, least=0)
            self.task_weight = check_number(self, "task_weight", task_weight, least=0)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim == 0:
            raise ValueError(f"Distillation(dim={dim!r}): expected the class dimension, such as 1 or -1")
        self.dim = dim
        self.forward = check_function(self, "forward", forward, "teacher", "batch", optional=True)
        if not isinstance(teacher, nn.Module):
            raise TypeError(f"Distillation(teacher={teacher!r}): expected a trained torch.nn.Module")
        self.teacher = teacher
        self._modes: Modes | None = None
        self._parts: list[nn.Module] = []
        self._draws: bool | None = None  # whether the teacher draws random numbers; None before its first forward
        self._fingerprint: str | None = None

    def attached(self, engine: Engine) -> None:
        super().attached(engine)
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(Claim("distillation"), by=self, target=f"of update {update.name!r}")

    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), "teacher": self.fingerprint}

    @property
    def fingerprint(self) -> str:
        """The first 16 digits of a sha256 of the teacher's parameters and buffers, by name; the same on every device."""
        if self._fingerprint is None:
            found = hashlib.sha256()
            for key, value in self.teacher.state_dict().items():
                if isinstance(value, Tensor):
                    whole = whole_tensor(value.detach()).cpu().contiguous()
                    found.update(f"{key} {whole.dtype} {list(whole.shape)}".encode())
                    found.update(whole.reshape(-1).view(torch.uint8).numpy().data)
            self._fingerprint = found.hexdigest()[:16]
        return self._fingerprint

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["device", "modules", "optimizer"], writes=["metrics"])
    def announce_metrics(self, engine: Engine) -> None:
        """Announce the metrics, check the teacher, and prepare it."""
        super().announce_metrics(engine)
        check_losses(self, selected_updates(engine, self.update))
        own = {id(p) for p in self.teacher.parameters()}
        models = [p for root in engine.modules.values() for p in root.parameters()]
        if any(id(p) in own for p in [*models, *(p for update in engine.updates for p in update.parameters)]):
            raise ValueError(
                f"{self.name!r}: the teacher shares parameters with the model that is being trained, so the teacher "
                "would change during training; pass copy.deepcopy(model) as teacher=, and leave this copy out of "
                "model= and the optimizer"
            )
        self._draws = self._fingerprint = None
        self._modes, self._parts = Modes([self.teacher]), list(self.teacher.modules())
        self.teacher.to(engine.device).eval()

    @on(Events.LOSS_COMPUTED, rank=DISTILL, reads=["batch", "loss", "modes", "output"], writes=["loss"])
    def distill(self, engine: Engine) -> None:
        """Add the teacher's term to the loss before the backward."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        loss = update.backward_loss
        if self.task_weight != 1:
            loss = self.task_weight * loss
        if self.weight:
            term = self._divergence(update, self._teach(update, engine.state.batch))
            loss = loss + self.weight * term
            self.record(engine, update, term)
        update.backward_loss = loss

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Restore the teacher's modes."""
        if self._modes is not None:
            self._modes.put_back()
        self._modes, self._parts = None, []

    def _teach(self, update: UpdateState, batch: Any) -> Any:
        """The teacher's output, without gradients and without a trace in the random generators."""
        if any(part.training for part in self._parts):  # somebody has called train() on it
            self.teacher.eval()
        with torch.no_grad():
            if self._draws:
                with unchanged_random_state():
                    return self._forward(update, batch)
            if self._draws is None:
                with unchanged_random_state():
                    before = random_state()
                    output = self._forward(update, batch)
                    self._draws = not _same(before, random_state())
                return output
            return self._forward(update, batch)

    def _forward(self, update: UpdateState, batch: Any) -> Any:
        if self.forward is not None:
            return self.forward(self.teacher, batch)
        if update.forward is model_by_keyword:
            return call_by_keyword(self.teacher, batch, repr(self.name))
        if update.spec.input is None and (not isinstance(batch, tuple | list) or not batch):
            raise TypeError(
                f"{self.name!r}: the inputs cannot be found in a batch of type {type(batch).__name__}; pass their "
                "index or key with Update(..., input=), or pass Distillation(..., forward=lambda teacher, batch: ...)"
            )
        inputs = update.input_in(batch)
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            first = next((p for p in self.teacher.parameters() if p.is_floating_point()), inputs)
            inputs = inputs.to(first.dtype)
        return self.teacher(inputs)

    def _divergence(self, update: UpdateState, teacher: Any) -> Tensor:
        ours = self._logits(update, update.output, f"the output of update {update.name!r}")
        theirs = self._logits(update, teacher, "the teacher's output")
        if ours.shape != theirs.shape:
            raise ValueError(
                f"{self.name!r}: the output of update {update.name!r} has shape {tuple(ours.shape)}, but the teacher's "
                f"output has shape {tuple(theirs.shape)}; both must score the same classes for the same samples"
            )
        positions = ours.numel() // ours.shape[self.dim]
        T = self.temperature
        log_student, target = F.log_softmax(ours / T, self.dim), F.softmax(theirs.to(ours) / T, self.dim)
        # The target is not in logarithms: a probability of exactly 0 is one then, and no NaN.
        return F.kl_div(log_student, target, reduction="sum") / positions * T**2

    def _logits(self, update: UpdateState, output: Any, what: str) -> Tensor:
        if update.spec.output is not None:
            logits = update.output_in(output)
        else:
            logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        axis = self.dim if self.dim > 0 else -self.dim - 1
        fits = isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim() > max(axis, 1)
        if not isinstance(logits, Tensor) or not fits or logits.shape[self.dim] < 2:
            found = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__}"
            raise TypeError(
                f"{self.name!r}: {what} is {found}; expected a tensor of logits with at least two classes in dimension "
                f"dim={self.dim}"
            )
        # Half precision is not enough for the logarithm; cross_entropy under autocast computes in float32, too.
        return logits.float() if logits.dtype in _HALF else logits

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_modes": None, "_parts": []}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
