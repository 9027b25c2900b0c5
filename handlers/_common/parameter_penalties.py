"""Base of `L1` and `L2`: penalties on the size of an update's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from signalfire import Engine, Events, UpdateState, on
from signalfire.authoring import check_bool
from signalfire.distributed import is_sharded

from .parameters import all_names, check_matches, check_patterns, longest_match
from .penalties import Penalizing, Weight
from .updates import selected_updates

__all__ = ["ParameterPenalty"]

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_HALF = (torch.float16, torch.bfloat16)


class ParameterPenalty(Penalizing):
    """A penalty that is the sum of a term (see `size`) over the parameters of the update, times a factor.

    Args:
        weight, update: As for `Penalizing`; the weight is 0 or more.
        parameters: Patterns of the names of the parameters; all of the update by default.
        norms_and_biases: Whether parameters of normalization layers and biases are included.
    """

    same_in_pieces = True
    factor = 1.0

    def __init__(
        self,
        weight: Weight,
        *,
        parameters: str | Sequence[str] | None = None,
        norms_and_biases: bool = False,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, update=update, name=name, least=0)
        self.parameters = check_patterns(self, "parameters", parameters)
        self.norms_and_biases = check_bool(self, "norms_and_biases", norms_and_biases)
        self._found: dict[str, tuple[list[Tensor], list[nn.Parameter]]] = {}

    def size(self, parameter: Tensor) -> Tensor:
        """The term of one parameter, a scalar."""
        raise NotImplementedError

    @on(Events.STARTED, reads=["modules", "optimizer"], writes=[])
    def find_parameters(self, engine: Engine) -> None:
        """Find the parameters, and raise an error if there are none, or if they are sharded."""
        updates = selected_updates(engine, self.update)
        own = _names_of(engine, [p for update in updates for p in update.parameters])
        every = [name for several in own.values() for name in several]
        check_matches(f"{self.name!r}: ", self.parameters or (), every)
        chosen, left_out = self._chosen(engine, own)
        if not chosen:
            some = ", ".join(left_out[:5])
            but = f" except norm weights and biases ({some}); to penalize these, pass norms_and_biases=True"
            raise ValueError(f"{self.name!r}: there is no parameter to penalize{but if left_out else ''}")
        if any(map(is_sharded, chosen)):
            raise ValueError(
                f"{self.name!r}: a loss penalty does not work with parameters that are sharded across ranks; use "
                "the optimizer's weight_decay instead"
            )
        self._found = {update.name: (update.parameters, self._of_update(engine, update)) for update in updates}

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to parameters."""
        self._found = {}

    def value(self, engine: Engine, update: UpdateState) -> Tensor | None:
        held, parameters = self._found[update.name]
        if held is not update.parameters:  # parameters were added to the optimizer
            parameters = self._of_update(engine, update)
            self._found[update.name] = update.parameters, parameters
        sizes = [self.size(p.float() if p.dtype in _HALF else p) for p in parameters if p.requires_grad]
        if not sizes:
            return None
        if any(one.device != sizes[0].device or one.dtype != sizes[0].dtype for one in sizes):
            sizes = [one.to(sizes[0]) for one in sizes]
        total = torch.stack(sizes).sum()
        return total if self.factor == 1 else self.factor * total

    def _of_update(self, engine: Engine, update: UpdateState) -> list[nn.Parameter]:
        return self._chosen(engine, _names_of(engine, update.parameters))[0]

    def _chosen(self, engine: Engine, own: dict[nn.Parameter, list[str]]) -> tuple[list[nn.Parameter], list[str]]:
        """The parameters to penalize, and the names of those that only `norms_and_biases` leaves out."""
        fitting = [
            p for p, several in own.items() if self.parameters is None or longest_match(several, self.parameters)
        ]
        if self.norms_and_biases:
            return fitting, []
        norms = _parameters_of_norms(engine)
        left_out = [p for p in fitting if p.dim() < 2 or p in norms or own[p][0].rpartition(".")[2] == "bias"]
        out = set(left_out)
        return [p for p in fitting if p not in out], [own[p][0] for p in left_out]

    def __repr__(self) -> str:
        engine, shown = self.engine, super().__repr__()
        if engine is None or self.norms_and_biases:
            return shown
        _, left_out = self._chosen(engine, all_names(engine.modules))
        more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        return f"{shown[:-1]}, without {', '.join(left_out[:5])}{more}>" if left_out else shown

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_found": {}}


def _names_of(engine: Engine, parameters: Iterable[Tensor]) -> dict[nn.Parameter, list[str]]:
    held = {id(p) for p in parameters}
    return {p: names for p, names in all_names(engine.modules).items() if id(p) in held}


def _parameters_of_norms(engine: Engine) -> set[nn.Parameter]:
    parts = (part for root in engine.modules.values() for part in root.modules() if isinstance(part, _NORMS))
    return {p for part in parts for p in part.parameters(recurse=False)}
