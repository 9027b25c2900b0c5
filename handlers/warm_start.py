"""Warm start: loads pretrained weights from a file, and reports which were loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import check_local
from signalfire.models.modules import Modules
from signalfire.weights import WeightFile, read_weights

from ._common.parameters import check_patterns
from ._common.ranks import WARM_START
from ._common.weight_plan import Rules, WeightPlan, compare_weights

__all__ = ["WarmStart"]


class WarmStart(Handler):
    """Loads pretrained weights from a file when a new run starts: all, some, or under different names.

    Names, shapes and kinds of dtype are compared first. Missing weights, unexpected weights and different shapes raise an error
    before any weight changes, unless ``allow`` matches them. A file in which no weight fits always raises an error. One line on
    stderr reports how much was loaded; `plan` has the names.

    The weights are loaded before the model is moved, converted, frozen, sharded or compiled, and before optimizers and averages
    exist. Only weights and buffers are loaded; counters, optimizers and random streams start fresh. A run that resumes from a
    checkpoint (`Checkpoint(resume=True)`, `Engine.load_state_dict`), or continues, keeps its own weights.

    ``_orig_mod.`` and other parts that torch's wrappers add to names are ignored. The prefixes "module." and "model." are
    removed, and reported, if more names match without them. Dtypes are converted to the model's.

    Args:
        source: The weights: a safetensors file, or the index of its shards; a file of ``torch.save`` or Lightning's ``.ckpt``; a
            checkpoint, or a folder of them; a Hugging Face folder; or a mapping from names to tensors. See `read_weights`.
        rename: Regular expressions and their replacements, as for `re.sub`, applied to the names of the file in this order.
        include: Patterns of the weights to load; everything by default. All patterns are paths, such as "backbone", or contain
            ``*``, ``?`` or ``[]``, and are compared with the model's names.
        exclude: Patterns of weights that are not loaded and keep their initial values.
        allow: Patterns of weights that may be missing, unexpected or of a different shape. They keep their initial values.

    Attributes:
        plan: Report of the last load; None before.

    Raises:
        ValueError: For weights that do not fit (the error names what differs), and for a rule or pattern that matches nothing.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> pretrained = {
        ...     "encoder.weight": torch.eye(2),
        ...     "encoder.bias": torch.zeros(2),
        ...     "head.weight": torch.ones(9, 2),
        ... }
        >>> layers = {"backbone": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 3)}
        >>> model = torch.nn.ModuleDict(layers)
        >>> def loss(engine, x):
        ...     return model.head(model.backbone(x)).sum()
        >>> update = Update.from_function(loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=model, seed=0)
        >>> start = WarmStart(pretrained, rename={"^encoder": "backbone"}, allow=["head"])
        >>> _ = engine.attach(start)
        >>> # With zeros, the weights stay as they were loaded.
        >>> _ = engine.run([torch.zeros(4, 2)], max_epochs=1)
        >>> model.backbone.weight.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        >>> print(engine[WarmStart].plan)
        2 of 4 tensors loaded from 'a mapping' (2 renamed, 1 missing, 1 with a different shape)
          renamed (2): encoder.weight -> backbone.weight, encoder.bias -> backbone.bias
          missing (1): head.bias
          different shape (1): head.weight ([9, 2] in the file, [3, 2] in the model)
    """

    trains = True

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        rename: Mapping[str, str] | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        allow: str | Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.rename = _check_rename(self, rename)
        self.include = check_patterns(self, "include", include)
        self.exclude = check_patterns(self, "exclude", exclude) or []
        self.allow = check_patterns(self, "allow", allow) or []
        self.plan: WeightPlan | None = None
        if not isinstance(source, str | os.PathLike | Mapping) or not source or isinstance(source, bytes):
            raise TypeError(
                f"WarmStart(source={source!r}): expected the path of a file or folder, or a mapping from names to tensors"
            )
        self.source = source if isinstance(source, Mapping) else check_local(self, "source", source)

    def compare(self, model: nn.Module | Mapping[str, nn.Module] | Engine) -> WeightPlan:
        """The plan for loading into a model, or into the modules of an engine; nothing is changed.

        Raises:
            FileNotFoundError, ValueError, ImportError: For a source that cannot be read, and rules that match nothing. Mismatches
                are in the plan.
        """
        return self._compare(model.modules if isinstance(model, Engine) else Modules(model, ()), self._read())

    @on(
        Events.MODEL_SETUP,
        phase=Phase.PREPARE,
        rank=WARM_START,
        reads=["modules", "files", "processes"],
        writes=["weights", "buffers"],
    )
    def load(self, engine: Engine) -> None:
        """Load the weights, on every rank from its own file system; if one rank has an error, no rank loads."""
        if engine.state.epoch > 0:
            return
        if engine.snapshots.has_loaded_state:
            self._say(engine, "the run resumes from a checkpoint, so no other weights are loaded")
            return
        problem: Exception | None = None
        try:
            file = self._read()
            plan = self._compare(engine.modules, file)
            plan.check(self._where)
        except Exception as error:
            problem = error
        problems = engine.processes.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(problems):
            if text is not None:
                raise ValueError(f"{self._where}: rank {rank} cannot load the weights: {text}")
        plan.apply(engine.modules, file.tensors)
        self.plan = plan
        self._say(engine, plan.summary())

    @property
    def _where(self) -> str:
        given = "..." if isinstance(self.source, Mapping) else repr(os.fspath(self.source))
        return f"WarmStart({given})"

    def _read(self) -> WeightFile:
        return read_weights(self.source, where=self._where)

    def _compare(self, modules: Modules, file: WeightFile) -> WeightPlan:
        rules = Rules(self.rename, self.include, self.exclude, self.allow, self._where)
        return compare_weights(modules, file, rules)

    def _say(self, engine: Engine, text: str) -> None:
        engine.processes.print(f"{self.name}: {text}", file=sys.stderr)


def _check_rename(handler: Handler, rename: Any) -> dict[str, str]:
    if rename is None:
        return {}
    if not isinstance(rename, Mapping) or not all(isinstance(one, str) for pair in rename.items() for one in pair):
        raise TypeError(
            f"WarmStart(rename={rename!r}): expected a mapping from regular expressions to replacements, such as "
            "{r'^encoder\\.': 'backbone.'}"
        )
    for pattern, replacement in rename.items():
        try:
            re.compile(pattern).sub(replacement, "")
        except (re.error, IndexError) as error:
            raise ValueError(f"WarmStart(rename={rename!r}): {pattern!r}: {error}") from None
    return dict(rename)
