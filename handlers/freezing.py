"""Freezing, gradual unfreezing and discriminative learning rates, for transfer learning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from signalfire import Engine, Events, Finding, Handler, on
from signalfire.authoring import Capture, Claim, check_bool, check_int, check_number, last_epoch
from signalfire.findings import finding
from signalfire.models.modules import Modules

from ._common.parameters import all_names, check_matches, longest_match

__all__ = ["Freezing", "discriminative_rates"]


class Freezing(Handler):
    """Freezes parts of the model for the whole run or until an epoch (gradual unfreezing), for transfer learning.

    Frozen parameters have ``requires_grad=False`` and no gradient, so optimizers skip them, and neither momentum nor weight
    decay changes them. They can be in the optimizer from the start; the optimizer keeps its state for them. Frozen
    normalization layers with running statistics (BatchNorm) are in eval mode, because each forward would otherwise update the
    statistics; other modules, such as dropout, stay in training mode. (Without this handler, a part that has
    ``requires_grad=False`` and is in eval mode before the run stays in eval mode inside a model that trains.) Unfreezing
    restores each parameter's own ``requires_grad``, so parameters that you froze stay frozen. After the run, everything is as
    before.

    The set of frozen parameters depends only on the epoch, even in a resumed run.

    Args:
        parts: Paths of modules or parameters, such as "backbone" or "head.bias", or name patterns with ``*``, ``?`` and ``[]``,
            such as ``"*.bias"``. With several modules, paths start with the module's name. Alternatively a mapping from these
            to the epoch at which the part is unfrozen, or to None to keep it frozen for the whole run. If several match a
            parameter, the longest applies. A parameter shared by two parts may be named by either path.
        unfreeze_at: Epoch at whose start the parts are unfrozen, unless a mapping gives their epochs; at least 2. With 3, the
            parts are frozen for two epochs.
        until: Former name of ``unfreeze_at``; deprecated.
        statistics: Whether to also freeze the running statistics of frozen normalization layers.

    Source:
        Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification" (ACL 2018) for gradual unfreezing and
        discriminative learning rates.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> def build(model):
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
        ...     return Engine(update, model=model)
        >>> data = [(torch.ones(2, 1), torch.zeros(2, 1))] * 4
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Linear(3, 1))
        >>> engine = build(model)
        >>> _ = engine.attach(Freezing("0", unfreeze_at=3))  # the first layer, for two epochs
        >>> @engine.on(Events.EPOCH_STARTED)
        ... def show(engine):
        ...     first, second = (layer.weight.requires_grad for layer in model)
        ...     print(engine.state.epoch, first, second)
        >>> _ = engine.run(data, max_epochs=3)
        1 False True
        2 False True
        3 True True
    """

    capture = Capture.FORBIDDEN
    trains = True
    freezes = True

    def __init__(
        self,
        parts: str | Iterable[str] | Mapping[str, int | None],
        *,
        unfreeze_at: int | None = None,
        until: int | None = None,
        statistics: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if until is not None:
            until = check_int(self, "until", until, least=2)
            warnings.warn(
                f"Freezing(until={until}) is deprecated and will be removed in 0.4.0; write unfreeze_at={until} "
                f"instead, which likewise unfreezes at the start of epoch {until}",
                DeprecationWarning,
                stacklevel=2,
            )
            if unfreeze_at is not None:
                raise TypeError(
                    f"Freezing(until={until}, unfreeze_at={unfreeze_at}): until= is the old name of unfreeze_at=; omit "
                    "until="
                )
            unfreeze_at = until
        self.parts = _epochs_of(parts, unfreeze_at)
        if not self.parts:
            raise ValueError(f"Freezing(parts={parts!r}): expected at least one part of the model")
        for pattern, epoch in self.parts.items():
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"Freezing(parts={parts!r}): {pattern!r} is not the path of a module or parameter")
            if epoch is not None:
                _check_epoch(
                    f"parts={parts!r}" if isinstance(parts, Mapping) else f"unfreeze_at={unfreeze_at!r}", pattern, epoch
                )
        self.statistics = check_bool(self, "statistics", statistics)
        # What is frozen in some epoch: the object, the epoch at which it is unfrozen, and its original setting.
        self._parameters: list[tuple[nn.Parameter, float, bool]] = []
        self._norms: list[tuple[nn.Module, float, bool]] = []

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("which parameters are frozen"), by=self)

    @on(Events.STARTED, reads=["modules"], writes=["trainable", "modes", "gradients"])
    def find_parts(self, engine: Engine) -> None:
        """Find the parts, and freeze those of this epoch."""
        parameters, norms = all_names(engine.modules), _norms_of(engine)
        known_names = [name for names in parameters.values() for name in names]
        names = [*known_names, *(name for inner in norms.values() for names in inner.values() for name in names)]
        check_matches(f"{self.name!r}: ", self.parts, names, known_names)
        for parameter, own_names in parameters.items():
            if (epoch := self._until(own_names)) > 0:
                self._parameters.append((parameter, epoch, parameter.requires_grad))
        for norm, inner in norms.items() if self.statistics else ():
            # A layer is unfrozen together with the first of its parameters.
            if (epoch := min(map(self._until, inner.values()))) > 0:
                self._norms.append((norm, epoch, norm.training))
        self.apply(engine)

    @on(Events.CHECKPOINT_LOADED | Events.EPOCH_STARTED, reads=[], writes=["trainable", "modes", "gradients"])
    def apply(self, engine: Engine) -> None:
        """Freeze and unfreeze parts according to the epoch."""
        epoch = engine.state.epoch
        for parameter, until, trained in self._parameters:
            parameter.requires_grad_(trained and epoch >= until)
            if epoch < until:
                parameter.grad = None
        for norm, until, training in self._norms:
            norm.training = training and epoch >= until

    @on(Events.ENDED, reads=[], writes=["trainable", "modes"])
    def restore(self, engine: Engine) -> None:
        """Restore the state before the run."""
        for parameter, _, trained in self._parameters:
            parameter.requires_grad_(trained)
        for norm, _, training in self._norms:
            norm.training = training
        self._parameters, self._norms = [], []

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report parts that would be unfrozen after the end of the run."""
        last = last_epoch(engine)
        for part, epoch in self.parts.items():
            if last is not None and epoch is not None and epoch > last:
                yield finding(
                    "C17",
                    f"{self.name!r} unfreezes {part!r} in epoch {epoch}, but this run ends with epoch {last}, so the "
                    "part stays frozen",
                    "unfreeze this part earlier, or omit its epoch to keep it frozen",
                    [self.name],
                    "info",
                )

    def _until(self, names: Iterable[str]) -> float:
        """The epoch at which the parameter with these names is unfrozen: 0 if never frozen, infinity if always frozen."""
        pattern = longest_match(names, self.parts)
        if pattern is None:
            return 0
        epoch = self.parts[pattern]
        return math.inf if epoch is None else epoch


def discriminative_rates(
    model: nn.Module, rates: Mapping[str, float], *, default: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups with a learning rate for each part of a model, typically smaller for pretrained parts.

    Use them as ``Update(..., parameters=lambda engine: discriminative_rates(engine.model, {...}))``. Each parameter is in one
    group. Schedules that multiply the learning rate, such as LambdaLR, keep the ratios; OneCycleLR needs a list as ``max_lr=``.

    Args:
        model: The model.
        rates: Learning rates by path of a module or parameter, or by pattern as in `Freezing`. If several match a parameter,
            the longest applies.
        default: Learning rate of all other parameters; None uses that of the optimizer.

    Returns:
        Parameter groups in the order of ``rates``, named by their parts, with the remaining parameters last, as "rest". Empty
        groups are omitted. Loggers write the rates under these names: "lr/backbone".

    Raises:
        ValueError: If a path matches no parameter; the message names some existing ones.

    Example:
        >>> model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
        >>> groups = discriminative_rates(model, {"backbone": 1e-4}, default=1e-3)
        >>> [(len(group["params"]), group["lr"]) for group in groups]
        [(2, 0.0001), (2, 0.001)]
    """
    rates = {
        pattern: check_number("discriminative_rates", f"rates[{pattern!r}]", rate, least=0)
        for pattern, rate in rates.items()
    }
    if default is not None:
        default = check_number("discriminative_rates", "default", default, least=0)
    parameters = all_names(Modules(model, ()))
    known_names = [name for names in parameters.values() for name in names]
    check_matches("discriminative_rates(): ", rates, known_names)
    rate_of: dict[str | None, float | None] = dict([*rates.items(), (None, default)])
    groups: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in rate_of}
    for parameter, names in parameters.items():
        groups[longest_match(names, rates)].append(parameter)
    return [
        {"params": groups[pattern], "name": pattern or "rest"} | ({} if rate is None else {"lr": rate})
        for pattern, rate in rate_of.items()
        if groups[pattern]
    ]


def _epochs_of(parts: Any, unfreeze_at: int | None) -> dict[str, int | None]:
    """The epoch at which each part is unfrozen."""
    if isinstance(parts, Mapping):
        if unfreeze_at is not None:
            raise ValueError(
                f"Freezing(unfreeze_at={unfreeze_at!r}): the mapping already contains an epoch for each part; omit "
                "unfreeze_at="
            )
        return dict(parts)
    if not isinstance(parts, str | Iterable):
        raise TypeError(
            f"Freezing(parts={parts!r}): expected a path, an iterable of paths, or a mapping from paths to epochs"
        )
    return dict.fromkeys([parts] if isinstance(parts, str) else parts, unfreeze_at)


def _check_epoch(argument: str, pattern: str, epoch: object) -> None:
    if isinstance(epoch, bool) or not isinstance(epoch, int):
        raise TypeError(f"Freezing({argument}): the epoch at which {pattern!r} is unfrozen must be an int")
    if epoch < 2:
        raise ValueError(f"Freezing({argument}): {pattern!r} would never be frozen; use an epoch of at least 2")


def _norms_of(engine: Engine) -> dict[nn.Module, dict[str, list[str]]]:
    """The normalization layers with running statistics, with all names of each of their tensors."""
    norms: dict[nn.Module, dict[str, list[str]]] = {}
    for root, module in engine.modules.items():
        for path, part in module.named_modules(prefix=engine.modules.prefix(root), remove_duplicate=False):
            if isinstance(part, _NormBase) and part.running_mean is not None:
                inner = [key for key, own in part._parameters.items() if own is not None] or ["running_mean"]
                for key in inner:
                    norms.setdefault(part, {}).setdefault(key, []).append(f"{path}.{key}" if path else key)
    return norms
