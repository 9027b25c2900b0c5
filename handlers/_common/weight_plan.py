"""Compares weights that were read with modules, before any of them is loaded."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from signalfire.authoring import preformatted
from signalfire.models.modules import Modules
from signalfire.resuming.loads import spread_over
from signalfire.weights import WeightFile, plain_name

from .parameters import matches

__all__ = ["Rules", "WeightPlan", "compare_weights"]

_PREFIXES = ("", "module.", "model.", "module.model.", "model.module.")
"""What DistributedDataParallel, and a module that holds the model, put before every name."""

_MOST_NAMED = 8


@dataclass
class WeightPlan:
    """What a warm start loads, and what does not fit. ``print`` it.

    Each tensor of the model is in one of ``loaded``, ``tied``, ``missing``, ``other_shape`` and ``kept``; each tensor of the file
    is in one of ``loaded.values()``, ``unexpected``, ``other_shape`` and ``left_out``.

    Attributes:
        label: Where the weights come from.
        loaded: Names in the file of the loaded tensors, by name in the model.
        renamed: Those of ``loaded`` that have a different name in the file.
        tied: Further names in the model of loaded parameters that have several names.
        missing: Names in the model that the file does not have.
        unexpected: Names, after renaming, that the model does not have.
        other_shape: Differences in shape or kind of dtype in words, by name in the model.
        kept: Names in the model that ``include`` and ``exclude`` leave unchanged.
        left_out: Names, after renaming, that ``include`` and ``exclude`` leave out of the file.
        refused: Mismatches that ``allow`` does not cover; with any of them, nothing is loaded.
        notes: Other contents of the file, and a prefix that was removed from its names.
    """

    label: str
    loaded: dict[str, str] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other_shape: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hint: str = ""

    @property
    def renamed(self) -> dict[str, str]:
        return {name: file for name, file in self.loaded.items() if name != file}

    @property
    def in_model(self) -> int:
        """Number of tensors of the model."""
        return len(self.loaded) + len(self.tied) + len(self.missing) + len(self.other_shape) + len(self.kept)

    @property
    def in_file(self) -> int:
        """Number of tensors of the file."""
        return len(self.loaded) + len(self.unexpected) + len(self.other_shape) + len(self.left_out)

    def summary(self) -> str:
        """One line: how much is loaded, and the other counts."""
        count = len(self.loaded) + len(self.tied)
        parts = [
            f"{len(found)} {what}"
            for found, what in (
                (self.renamed, "renamed"), (self.missing, "missing"), (self.unexpected, "unexpected"),
                (self.other_shape, "with a different shape"), (self.kept, "left unchanged"),
            )
            if found
        ]  # fmt: skip
        return f"{count} of {self.in_model} tensors loaded from {self.label!r}" + (
            f" ({', '.join(parts)})" if parts else ""
        )

    def check(self, where: str) -> None:
        """Raise ValueError if nothing would be loaded, or something does not fit and was not allowed."""
        hint = f". {self.hint}" if self.hint else ""
        if not self.loaded:
            raise ValueError(
                f"{where}: none of the {self.in_file} tensors in {self.label!r} matches any of the model's "
                f"{self.in_model} tensors, so nothing was loaded. "
                f"{_example('In the file', [*self.unexpected, *self.left_out])}; "
                f"{_example('in the model', [*self.missing, *self.kept])}{_different(self.other_shape)}{hint}"
            )
        if self.refused:
            patterns = list(dict.fromkeys(_pattern(name) for name in self.refused))[:_MOST_NAMED]
            raise ValueError(
                f"{where}: {self.label!r} does not match the model, so nothing was loaded: {self._problems()}. To "
                f"accept these differences, pass allow={patterns}{hint}"
            )

    def _problems(self) -> str:
        """The refused mismatches, in words."""
        refused = set(self.refused)
        missing = [name for name in self.missing if name in refused]
        unexpected = [name for name in self.unexpected if name in refused]
        different = {name: text for name, text in self.other_shape.items() if name in refused}
        problems = (
            f"missing from the file: {_some(missing)}" if missing else "",
            f"unexpected in the file: {_some(unexpected)}" if unexpected else "",
            _different(different).removeprefix("; "),
        )
        return "; ".join(filter(None, problems))

    def apply(self, modules: Modules, tensors: Mapping[str, Tensor]) -> None:
        """Load what fits into the modules that were compared; of shapes that were compared, no load fails halfway."""
        for root, module in modules.items():
            names = _tensors_in(modules, root)
            part = {key: tensors[self.loaded[name]] for name, (key, _) in names.items() if name in self.loaded}
            if part:
                module.load_state_dict(spread_over(module, part), strict=False)

    def __str__(self) -> str:
        rows = [self.summary()]
        rows += [f"  {note}" for note in self.notes]
        for what, names in (
            ("renamed", [f"{file} -> {name}" for name, file in self.renamed.items()]),
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("different shape", [f"{name} ({text})" for name, text in self.other_shape.items()]),
            ("shared with a loaded tensor", self.tied),
            ("kept", self.kept),
            ("left out", self.left_out),
        ):
            if names:
                rows.append(f"  {what} ({len(names)}): {_some(names, 20)}")
        if self.refused:
            rows.append(f"  differences that are not allowed, so nothing is loaded: {_some(self.refused, 20)}")
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        return preformatted(self)


@dataclass(frozen=True)
class Rules:
    """The tensors of a file to load, and their names.

    Attributes:
        rename: Replacements by regular expression, applied in order.
        include, exclude, allow: Patterns for names in the model.
        where: Caller, for messages.
    """

    rename: Mapping[str, str]
    include: Sequence[str] | None
    exclude: Sequence[str]
    allow: Sequence[str]
    where: str


def compare_weights(modules: Modules, file: WeightFile, rules: Rules) -> WeightPlan:
    """Compare names, shapes and dtypes; nothing is changed.

    Raises:
        ValueError: For a rule or a pattern that matches nothing, and for two tensors of the file for one of the model.
    """
    parts = {root: _tensors_in(modules, root) for root in modules}
    own = {name: tensor for part in parts.values() for name, (_, tensor) in part.items()}
    named, prefix = _renamed(list(file.tensors), own, rules)
    plan = WeightPlan(file.label, notes=list(file.notes))
    if prefix:
        plan.notes.append(f"{prefix!r} is removed from the names in the file")
    wanted = _wanted(list(named.values()), list(own), rules)
    given = _select(plan, named, wanted, rules.where)
    for root in modules.losses:
        if not given.keys() & parts[root].keys():  # a file may be without the loss's own parameters
            wanted -= parts[root].keys()
    _match(plan, own, wanted, given, file.tensors)
    plan.unexpected += [name for name in given if name not in own]
    _join_tied(plan, modules, file.tensors, rules.where)
    mismatched = (*plan.missing, *plan.unexpected, *plan.other_shape)
    plan.refused = [name for name in mismatched if not _matches_any(name, rules.allow)]
    plan.hint = _hint(plan.unexpected, plan.missing)
    return plan


def _wanted(named: list[str], own: list[str], rules: Rules) -> set[str]:
    """The names of the file and of the model that the patterns do not leave out; an error for one that matches none."""
    names = {*named, *own}
    for argument, patterns in (("include", rules.include or ()), ("exclude", rules.exclude)):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                no_name = f"{pattern!r} matches no name in the file or the model; the file has {_some(named)}"
                raise ValueError(f"{rules.where}: {argument}: {no_name}")
    included = names if rules.include is None else {name for name in names if _matches_any(name, rules.include)}
    return {name for name in included if not _matches_any(name, rules.exclude)}


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(matches(name, one) for one in patterns)


def _select(plan: WeightPlan, named: Mapping[str, str], wanted: Collection[str], where: str) -> dict[str, str]:
    """The wanted names as they are in the file, by those in the model; an error if two of them are the same."""
    given: dict[str, str] = {}
    for raw, name in named.items():
        if name not in wanted:
            plan.left_out.append(name)
        elif name in given:
            raise ValueError(
                f"{where}: {given[name]!r} and {raw!r} in the file would both be loaded as {name!r}; leave one out "
                "with exclude=, or rename only one of them"
            )
        else:
            given[name] = raw
    return given


def _match(
    plan: WeightPlan,
    own: Mapping[str, Tensor],
    wanted: Collection[str],
    given: Mapping[str, str],
    tensors: Mapping[str, Tensor],
) -> None:
    """Note for each tensor of the model whether it is loaded, and why not."""
    for name, tensor in own.items():
        if name not in wanted:
            plan.kept.append(name)
        elif name not in given:
            plan.missing.append(name)
        elif problem := _mismatch(tensors[given[name]], tensor):
            plan.other_shape[name] = problem
        else:
            plan.loaded[name] = given[name]


def _tensors_in(modules: Modules, root: str) -> dict[str, tuple[str, Tensor]]:
    """The keys and tensors of a module's state, by name in the model."""
    prefix = modules.prefix(root)
    return {
        plain_name(f"{prefix}.{key}" if prefix else key): (key, value)
        for key, value in modules[root].state_dict().items()
        if isinstance(value, Tensor)
    }


def _renamed(names: Sequence[str], own: Iterable[str], rules: Rules) -> tuple[dict[str, str], str]:
    """The names of a file as they are in the model, and the prefix that was removed from them.

    A rule applies to the names as they are in the file; one that matches none of them, to the names without the prefix.
    """
    there = set(own)
    found = {name: plain_name(name) for name in names}
    late: dict[str, str] = {}
    for pattern, replacement in rules.rename.items():
        if any(re.search(pattern, name) for name in found.values()):
            found = {raw: re.sub(pattern, replacement, name) for raw, name in found.items()}
        else:
            late[pattern] = replacement

    def without(prefix: str) -> dict[str, str]:
        shorter = {raw: name.removeprefix(prefix) for raw, name in found.items()}
        for pattern, replacement in late.items():
            shorter = {raw: re.sub(pattern, replacement, name) for raw, name in shorter.items()}
        return shorter

    best = max(_PREFIXES, key=lambda prefix: len(there.intersection(without(prefix).values())))
    for pattern in late:
        if not any(re.search(pattern, name.removeprefix(best)) for name in found.values()):
            raise ValueError(
                f"{rules.where}: rename: {pattern!r} matches no name in the file, which has {_some(names)}"
            )
    return without(best), best


def _mismatch(given: Tensor, own: Tensor) -> str:
    """How a tensor of the file differs in shape, or in the kind of its dtype; empty if it can be loaded."""
    if is_lazy(own):
        return ""
    if given.shape != own.shape:
        return f"{list(given.shape)} in the file, {list(own.shape)} in the model"
    if _kind(given) != _kind(own):
        return f"{given.dtype} in the file, {own.dtype} in the model"
    return ""


def _kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "integer"


def _join_tied(plan: WeightPlan, modules: Modules, tensors: Mapping[str, Tensor], where: str) -> None:
    """Count a missing name of a shared parameter as loaded with its other name; refuse different values for one parameter."""
    for names in _shared_names(modules):
        loaded = [name for name in names if name in plan.loaded]
        if not loaded:
            continue
        first = tensors[plan.loaded[loaded[0]]]
        for name in loaded[1:]:
            if not torch.equal(first, tensors[plan.loaded[name]]):
                raise ValueError(
                    f"{where}: {loaded[0]!r} and {name!r} are the same parameter in the model, but have different "
                    "values in the file; leave one out with exclude="
                )
        tied = [name for name in names if name in plan.missing]
        plan.missing = [name for name in plan.missing if name not in tied]
        plan.tied += tied


def _shared_names(modules: Modules) -> list[list[str]]:
    """The names of each parameter that has several."""
    groups: dict[int, list[str]] = defaultdict(list)
    for root, module in modules.items():
        for name, parameter in module.named_parameters(prefix=modules.prefix(root), remove_duplicate=False):
            groups[id(parameter)].append(plain_name(name))
    return [names for names in groups.values() if len(names) > 1]


def _hint(unexpected: Sequence[str], missing: Sequence[str]) -> str:
    """A renaming that would let most of what is left of both sides match; empty if there is none."""
    surplus, lacking = _prefixes(unexpected, missing), _prefixes(missing, unexpected)
    votes = Counter([*((re.escape(prefix), "") for prefix in surplus), *(("", prefix) for prefix in lacking)])
    if not votes:
        return ""
    ((old, new), count) = votes.most_common(1)[0]
    return f"{count} names would match with rename={{r'^{old}': {new!r}}}"


def _prefixes(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """What to remove from the beginning of each name that is one of the others then; the rest of the names is left out."""
    there, found = set(others), []
    for name in names:
        for place in [match.end() for match in re.finditer(r"\.", name)]:
            if name[place:] in there:
                found.append(name[:place])
                break
    return found


def _pattern(name: str) -> str:
    """A pattern for a tensor and those beside it."""
    parent = name.rpartition(".")[0]
    return f"{parent}.*" if parent else name


def _some(names: Sequence[str], most: int = _MOST_NAMED) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _example(where: str, names: Sequence[str]) -> str:
    return f"{where}: {_some(names, 4) or 'nothing'}"


def _different(texts: Mapping[str, str]) -> str:
    return f"; with a different shape: {_some([f'{name} ({text})' for name, text in texts.items()])}" if texts else ""
