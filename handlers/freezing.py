"""Freezing parts of a model, for good or until an epoch, and rates that differ between its parts: for transfer learning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from signalfire import Engine, Events, Handler, on
from signalfire.acts import Override
from signalfire.checks import check_bool, check_number

from ._common.parameters import all_names, longest_match, matches, unmatched

__all__ = ["Freezing", "discriminative_rates"]


class Freezing(Handler):
    """Keeps parts of the model as they are: for the whole run, or until an epoch starts (gradual unfreezing).

    Frozen parameters have ``requires_grad=False`` and no gradient, so that optimizers pass them over: neither momentum nor
    weight decay moves them. They may be in the optimizer from the beginning; what it remembers of them stays until they are
    trained again. Normalisation layers that keep running statistics are in eval mode while they are frozen, or else every
    forward would change them; other modules, such as dropout, train on. Once a part is unfrozen, its parameters are what they
    were before the run: those with ``requires_grad=False`` of the user's own stay so. After the run everything is as before.

    What is frozen depends on the epoch alone, also in a resumed run.

    Args:
        parts: paths of modules or parameters, such as "backbone" or "head.bias", or patterns with ``*``, ``?`` and ``[]`` for the
            names of parameters, such as "*.bias"; in an engine with several modules they begin with the module's name. Or a
            mapping from these to the epoch from which on the part is trained, or None for the whole run. Of several that match a
            parameter, the longest holds; one that parts share may be named in either.
        until: for parts that are no mapping, the epoch from which on they are trained, 2 or more.
        statistics: whether the running statistics of frozen normalisation layers are frozen, too.

    Source:
        Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification" (ACL 2018) for gradual unfreezing and
        discriminative rates.

    Example:
        >>> Freezing({"backbone": 5, "backbone.stem": None}).parts
        {'backbone': 5, 'backbone.stem': None}
    """

    trains = True

    def __init__(
        self,
        parts: str | Iterable[str] | Mapping[str, int | None],
        *,
        until: int | None = None,
        statistics: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(parts, Mapping):
            if until is not None:
                raise ValueError(
                    f"Freezing(until={until!r}): the mapping says for each part until when; leave out until="
                )
            self.parts = dict(parts)
        elif isinstance(parts, str | Iterable):
            self.parts = dict.fromkeys([parts] if isinstance(parts, str) else parts, until)
        else:
            raise TypeError(
                f"Freezing(parts={parts!r}): it has to be a path, several, or a mapping from paths to epochs"
            )
        if not self.parts:
            raise ValueError(f"Freezing(parts={parts!r}): name at least one part of the model")
        for pattern, epoch in self.parts.items():
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"Freezing(parts={parts!r}): {pattern!r} is no path of a module or parameter")
            argument = f"parts={parts!r}" if isinstance(parts, Mapping) else f"until={until!r}"
            if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int)):
                raise TypeError(
                    f"Freezing({argument}): the epoch from which on {pattern!r} is trained has to be an int"
                )
            if epoch is not None and epoch < 2:
                raise ValueError(f"Freezing({argument}): {pattern!r} would never be frozen; give epoch 2 or more")
        self.statistics = check_bool(self, "statistics", statistics)
        # What is frozen at times, with the first epoch in which it is not, and what it was before.
        self._parameters: list[tuple[nn.Parameter, float, bool]] = []
        self._norms: list[tuple[nn.Module, float, bool]] = []

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Override.FREEZING, by=self)

    @on(Events.STARTED)
    def find(self, engine: Engine) -> None:
        """Find the parts, and freeze what is frozen now."""
        parameters, norms = all_names(engine.modules), _norms_of(engine)
        there = [name for names in parameters.values() for name in names]
        names = [*there, *(name for inner in norms.values() for names in inner.values() for name in names)]
        for pattern in self.parts:
            if not any(matches(name, pattern) for name in names):
                raise ValueError(f"{self.name!r}: {unmatched(pattern, there)}")
        for parameter, own in parameters.items():
            if (epoch := self._until(own)) > 0:
                self._parameters.append((parameter, epoch, parameter.requires_grad))
        for norm, inner in norms.items() if self.statistics else ():
            if (
                epoch := min(map(self._until, inner.values()))
            ) > 0:  # as soon as one of its parameters is trained, it is
                self._norms.append((norm, epoch, norm.training))
        self.apply(engine)

    @on(Events.CHECKPOINT_LOADED | Events.EPOCH_STARTED)
    def apply(self, engine: Engine) -> None:
        """Freeze and unfreeze what this epoch asks for."""
        epoch = engine.state.epoch
        for parameter, until, trained in self._parameters:
            parameter.requires_grad_(trained and epoch >= until)
            if epoch < until:
                parameter.grad = None
        for norm, until, training in self._norms:
            norm.training = training and epoch >= until

    @on(Events.ENDED)
    def restore(self, engine: Engine) -> None:
        """Put everything back as it was before the run."""
        for parameter, _, trained in self._parameters:
            parameter.requires_grad_(trained)
        for norm, _, training in self._norms:
            norm.training = training
        self._parameters, self._norms = [], []

    def _until(self, names: Iterable[str]) -> float:
        """The first epoch in which the parameter with these names is trained: 0 if it always is, infinity if never."""
        pattern = longest_match(names, self.parts)
        if pattern is None:
            return 0
        epoch = self.parts[pattern]
        return math.inf if epoch is None else epoch


def discriminative_rates(
    model: nn.Module, rates: Mapping[str, float], *, default: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups whose learning rates differ between the parts of a model, smaller for what is already good.

    For ``Update(..., parameters=lambda engine: discriminative_rates(engine.model, {...}))``. Each parameter is in one group.
    Schedules that multiply the rate, such as LambdaLR, keep the ratios; OneCycleLR wants a list as ``max_lr=``.

    Args:
        model: the model.
        rates: paths of modules or parameters, or patterns as for `Freezing`, with their learning rates. Of several that match
            a parameter, the longest holds.
        default: the rate of all others; by default that of the optimizer.

    Returns:
        Groups for an optimizer, in the order of ``rates``, the others last; no group is empty.

    Raises:
        ValueError: for a path that matches no parameter, naming some that there are.

    Example:
        >>> model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
        >>> [(len(group["params"]), group["lr"]) for group in discriminative_rates(model, {"backbone": 1e-4}, default=1e-3)]
        [(2, 0.0001), (2, 0.001)]
    """
    rates = {
        pattern: check_number("discriminative_rates", f"rates[{pattern!r}]", rate, least=0)
        for pattern, rate in rates.items()
    }
    if default is not None:
        default = check_number("discriminative_rates", "default", default, least=0)
    parameters = all_names({"model": model})
    there = [name for names in parameters.values() for name in names]
    for pattern in rates:
        if not any(matches(name, pattern) for name in there):
            raise ValueError(f"discriminative_rates(): {unmatched(pattern, there)}")
    groups: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in [*rates, None]}
    for parameter, names in parameters.items():
        groups[longest_match(names, rates)].append(parameter)
    return [
        {"params": members} if rate is None else {"params": members, "lr": rate}
        for pattern, members in groups.items()
        for rate in [default if pattern is None else rates[pattern]]
        if members
    ]


def _norms_of(engine: Engine) -> dict[nn.Module, dict[str, list[str]]]:
    """The normalisation layers with running statistics, with all names of each tensor in them."""
    norms: dict[nn.Module, dict[str, list[str]]] = {}
    for root, module in engine.modules.items():
        prefix = "" if len(engine.modules) == 1 else root
        for path, part in module.named_modules(prefix=prefix, remove_duplicate=False):
            if isinstance(part, _NormBase) and part.running_mean is not None:
                inner = [key for key, own in part._parameters.items() if own is not None] or ["running_mean"]
                for key in inner:
                    norms.setdefault(part, {}).setdefault(key, []).append(f"{path}.{key}" if path else key)
    return norms
