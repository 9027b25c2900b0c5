"""Magnitude pruning: sets weights of small magnitude to zero, and keeps them zero."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import (
    Capture,
    Claim,
    Interval,
    check_choice,
    check_function,
    check_int,
    check_name,
    check_number,
    steps_to_come,
)
from signalfire.distributed import is_sharded
from signalfire.findings import Finding, finding
from signalfire.models.modules import bare_name

from ._common.parameters import all_names, check_matches, check_patterns, longest_match, moments_of
from ._common.ranks import MASK_GRADIENTS, PRUNE
from ._common.updates import made_step

__all__ = ["Pruning"]

EVERY_STEP = Interval(1, "st")
_READ, _WRITTEN = ["modules", "step", "trainable", "weights", "optimizer"], ["metrics", "weights", "optimizer"]


class Pruning(Handler):
    """Prunes the weights of smallest magnitude during training: sets a growing share of them to zero and keeps them there.

    Parameters keep their names, order and shapes, so checkpoints, averages and exports hold plain tensors with true zeros. Pruned
    weights are zero after every optimizer step, even with momentum or weight decay, and so are their gradients, the optimizer's
    moments and averages such as `EMA`. Detaching the handler leaves the zeros. The share of zeros is written to ``state.metrics``
    as "sparsity" whenever it grows.

    Args:
        amount: Final share of zero weights, such as 0.8; not with ``structure``.
        start: Number of optimizer steps before the first weights are pruned.
        end: Number of steps after which the amount is reached; None prunes everything at ``start``.
        every: Number of steps between prunings from ``start`` to ``end``.
        schedule: Function from progress (0 at ``start``, 1 at ``end``) to the share of the amount that is pruned; by default
            cubic, ``1 - (1 - progress) ** 3``, which prunes most at the beginning.
        scope: "global" compares the weights of all parameters; "layer" prunes the same share of each parameter.
        structure: Pattern of the zeros: "2:4" keeps the two largest of every four consecutive weights of a unit's inputs, as
            sparse tensor cores of GPUs require; any other "n:m" works likewise. All weights are pruned at once, at ``start``.
        parameters: Name patterns of the parameters to prune, such as ``"backbone"`` or ``["*.weight"]``; by default all
            parameters with two or more dimensions. Frozen parameters are neither pruned nor counted.
        update: Name of the update whose steps count; the first by default.

    Source:
        Zhu and Gupta, "To Prune, or Not to Prune: Exploring the Efficacy of Pruning for Model Compression" (ICLR 2018 workshop);
        Mishra et al., "Accelerating Sparse Deep Neural Networks" (arXiv:2104.08378).

    Example:
        >>> from signalfire import Update
        >>> update = Update.supervised(nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> trainer = Engine(update, model=nn.Linear(8, 1), seed=0)
        >>> _ = trainer.attach(Pruning(0.5))
        >>> _ = trainer.run([(torch.ones(4, 8), torch.ones(4, 1))], max_epochs=3)
        >>> int((trainer.model.weight == 0).sum())
        4
    """

    capture = Capture.INSIDE
    trains = True

    def __init__(
        self,
        amount: float | None = None,
        *,
        start: int = 0,
        end: int | None = None,
        every: int = 100,
        schedule: Callable[[float], float] | None = None,
        scope: Literal["global", "layer"] = "global",
        structure: str | None = None,
        parameters: str | Sequence[str] | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.structure = check_name(self, "structure", structure)
        self._kept, self._of = _parts(structure)
        self.start = check_int(self, "start", start, least=0)
        self.end = self.start if end is None else check_int(self, "end", end, least=self.start)
        self.every = check_int(self, "every", every, least=1)
        check_function(self, "schedule", schedule, "progress", optional=True)
        self.schedule = schedule or _cubic
        self.scope = check_choice(self, "scope", scope, ("global", "layer"))
        self.parameters = check_patterns(self, "parameters", parameters)
        self.update = check_name(self, "update", update)
        if (amount is None) == (structure is None):
            raise ValueError(f"Pruning(amount={amount!r}, structure={structure!r}): pass exactly one of the two")
        self.amount = (
            1 - self._kept / self._of if amount is None else check_number(self, "amount", amount, above=0, below=1)
        )
        if structure is not None and self.end > self.start:
            raise ValueError(
                f"Pruning(end={end!r}, structure={structure!r}): with structure=, all pruning happens in a single "
                "step, so end= does not apply; omit end="
            )
        self.masks: dict[str, Tensor] = {}  # by name: true where a weight is pruned
        self._found: dict[str, nn.Parameter] = {}
        self._pruned: list[tuple[nn.Parameter, Tensor]] = []

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)
        engine.overrides.claim(Claim("which weights are pruned"), by=self)

    def metric_names(self, engine: Engine) -> list[str]:
        return ["sparsity"]

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report pruning that ends after the run's last step."""
        update = engine.find_update(self.update)
        to_come = steps_to_come(engine, update)
        if to_come is not None and update.steps + to_come < self.end:
            yield finding(
                "C17",
                f"{self.name!r} reaches its final amount after {self.end} optimizer steps, but the run takes only "
                f"{update.steps + to_come}",
                "prune earlier, or train longer",
                [self.name],
            )

    @property
    def sparsity(self) -> float:
        """The share of the selected weights that are pruned."""
        counted = sum(parameter.numel() for parameter in self._found.values())
        return sum(int(mask.sum()) for mask in self.masks.values()) / counted if counted else 0.0

    @on(Events.STARTED | Events.CHECKPOINT_LOADED, phase=Phase.FINALIZE, rank=PRUNE, reads=_READ, writes=_WRITTEN)
    def find_parameters(self, engine: Engine) -> None:
        """Find the parameters, and prune those that were due before the handler joined."""
        engine.state.metrics.announce(self.name, ["sparsity"])
        self._found = self._select(engine)
        for name, mask in self.masks.items():
            if name not in self._found or self._found[name].shape != mask.shape:
                raise ValueError(
                    f"{self.name!r}: in the saved state, {name!r} is pruned, but this handler does not prune a "
                    "parameter with this name and shape; use the model and the parameters= of the saved run"
                )
        self._bind()
        steps = engine.find_update(self.update).steps
        if steps >= self.start and not self.masks and not engine.snapshots.has_loaded_state:
            self._prune(engine, steps)

    @on(Events.GRADIENTS_READY, rank=MASK_GRADIENTS, reads=["gradients"], writes=["gradients"])
    def mask_gradients(self, engine: Engine) -> None:
        """Set the gradients of pruned weights to zero."""
        for parameter, mask in self._pruned:
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    name = next(name for name, one in self._found.items() if one is parameter)
                    raise TypeError(
                        f"{self.name!r}: the gradient of {name!r} is sparse, which pruning does not support; exclude "
                        "the parameter with parameters=, or build the embedding with sparse=False"
                    )
                parameter.grad.masked_fill_(mask, 0)

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.PREPARE, rank=PRUNE, reads=_READ, writes=_WRITTEN)
    def prune(self, engine: Engine) -> None:
        """Prune more weights if due, and set all pruned weights to zero again."""
        if made_step(engine, self.update, EVERY_STEP):
            steps = engine.state.update.steps
            if self.start <= steps <= self.end and (steps == self.end or (steps - self.start) % self.every == 0):
                self._prune(engine, steps)
                return
        self._apply()

    @on(Events.WEIGHTS_LOADED, reads=[], writes=["weights"])
    def prune_loaded(self, engine: Engine) -> None:
        """Set pruned weights to zero in loaded weights."""
        self._apply()

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to parameters."""
        self._pruned = []

    def state_dict(self) -> dict[str, Any]:
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.masks = dict(state["masks"])

    def _select(self, engine: Engine) -> dict[str, nn.Parameter]:
        named = all_names(engine.modules)
        names = [name for several in named.values() for name in several]
        check_matches(f"{self.name!r}: parameters=", self.parameters or (), names)
        found = {
            several[0]: parameter
            for parameter, several in named.items()
            if (parameter.dim() > 1 if self.parameters is None else longest_match(several, self.parameters) is not None)
        }
        if not found:
            raise ValueError(
                f"{self.name!r}: no parameter has two or more dimensions; select the parameters to prune with "
                "parameters="
            )
        for name, parameter in found.items():
            self._check_prunable(name, parameter)
        return found

    def _check_prunable(self, name: str, parameter: nn.Parameter) -> None:
        if ".parametrizations." in f".{name}":
            raise ValueError(
                f"{self.name!r}: a parametrization computes a weight from {name!r}, so zeros in {name!r} do not "
                "become zeros in the weight; remove the parametrization, or exclude the parameter with parameters="
            )
        if is_sharded(parameter):
            raise ValueError(
                f"{self.name!r}: {name!r} is sharded over the ranks, which pruning does not support; exclude the "
                "parameter with parameters="
            )
        if self.structure is not None and (parameter.dim() < 2 or parameter[0].numel() % self._of):
            raise ValueError(
                f"{self.name!r}: structure={self.structure!r} requires the number of inputs per unit to be a multiple "
                f"of {self._of}, but {name!r} has shape {tuple(parameter.shape)}; exclude this parameter with "
                "parameters="
            )

    @torch.no_grad()
    def _prune(self, engine: Engine, steps: int) -> None:
        """Prune up to the amount that is due after a number of steps."""
        chosen = {name: parameter for name, parameter in self._found.items() if parameter.requires_grad}
        progress = 1.0 if self.end == self.start else min(1.0, (steps - self.start) / (self.end - self.start))
        part = self.schedule(progress)
        if not 0 <= part <= 1:
            raise ValueError(f"{self.name!r}: schedule({progress:g}) returned {part!r}; expected a number from 0 to 1")
        share = self.amount * part
        magnitudes = {
            name: parameter.detach().abs().masked_fill_(self.masks[name], -1)
            if name in self.masks
            else parameter.detach().abs()
            for name, parameter in chosen.items()
        }
        if self.structure is not None:
            masks = {name: _smallest_of_each(one, self._of - self._kept, self._of) for name, one in magnitudes.items()}
        elif self.scope == "layer":
            masks = {name: _smallest([one], share)[0] for name, one in magnitudes.items()}
        else:
            masks = dict(zip(magnitudes, _smallest([*magnitudes.values()], share), strict=True))
        self.masks |= {name: mask | self.masks[name] if name in self.masks else mask for name, mask in masks.items()}
        self._bind()
        self._apply()
        self._clear_copies(engine)
        engine.state.metrics["sparsity"] = self.sparsity

    def _bind(self) -> None:
        self.masks = {name: mask.to(self._found[name].device) for name, mask in self.masks.items()}
        self._pruned = [(self._found[name], mask) for name, mask in self.masks.items()]

    @torch.no_grad()
    def _apply(self) -> None:
        for parameter, mask in self._pruned:
            parameter.masked_fill_(mask, 0)

    def _clear_copies(self, engine: Engine) -> None:
        """Clear what optimizers and averages keep of the pruned weights."""
        masks: dict[Tensor, Tensor] = dict(self._pruned)
        for parameter, moment in moments_of(engine, masks):
            moment.masked_fill_(masks[parameter], 0)
        names = {bare_name(name): masks[parameter] for root, module in engine.modules.items()
                 for name, parameter in module.named_parameters(prefix=root) if parameter in masks}  # fmt: skip
        for handler in engine.handlers.values():
            for name, copy in handler.parameter_copies().items():
                if name in names:
                    copy.masked_fill_(names[name].to(copy.device), 0)


def _parts(structure: str | None) -> tuple[int, int]:
    """The numbers of a structure: how many weights are kept, and of how many."""
    if structure is None:
        return 1, 1
    found = re.fullmatch(r"(\d+):(\d+)", structure)
    if found is None or not 0 < int(found[1]) < int(found[2]):
        raise ValueError(
            f"Pruning(structure={structure!r}): expected 'n:m' to keep n of every m weights, such as '2:4'"
        )
    return int(found[1]), int(found[2])


def _cubic(progress: float) -> float:
    return 1 - (1 - progress) ** 3


def _smallest(magnitudes: list[Tensor], share: float) -> list[Tensor]:
    """Masks of the smallest of all these magnitudes: as many as the share of them, rounded."""
    device = magnitudes[0].device
    flat = torch.cat([one.flatten().to(device) for one in magnitudes])
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[torch.topk(flat, min(len(flat), round(share * len(flat))), largest=False, sorted=False).indices] = True
    parts = mask.split([one.numel() for one in magnitudes])
    return [part.view_as(one).to(one.device) for part, one in zip(parts, magnitudes, strict=True)]


def _smallest_of_each(magnitudes: Tensor, count: int, of: int) -> Tensor:
    """A mask of the smallest ones in each group of consecutive magnitudes."""
    groups = magnitudes.reshape(-1, of)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    mask.scatter_(1, torch.topk(groups, count, largest=False, dim=1).indices, True)
    return mask.view_as(magnitudes)
