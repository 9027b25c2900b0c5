"""The pages that are made from the code: one a handler, the codes of findings, the interface."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from pasted import insert_imports  # type: ignore[import-not-found]  # beside this file
from sphinx.addnodes import pending_xref

import signalfire
import signalfire.handlers
from signalfire import Events, Handler, ablation, exact, testing, tuning
from signalfire.authoring.capture import Capture
from signalfire.core.declarations import THINGS
from signalfire.core.overrides import Override
from signalfire.findings.codes import CODES, PRINTED

_HANDLERS = Path(signalfire.handlers.__file__ or "").parent

IN_AN_ITERATION = {
    event
    for event in Events
    if re.match("ITERATION_|GET_BATCH_|UPDATE_|FORWARD_|LOSS_|BACKWARD_|GRADIENTS_|OPTIMIZER_STEP_", event.name)
} - {Events.UPDATE_RETRIED}

GROUPS = {
    "W": "What `Engine.run` notices while it begins or trains",
    "C": "What `Engine.check` finds in a composition, and `Engine.run` before its first batch",
    "G": "What `Guards` finds in a run",
}


def handler_classes() -> list[type[Handler]]:
    """The public handlers, by name."""
    named = ((name, getattr(signalfire.handlers, name)) for name in sorted(signalfire.handlers.__all__, key=str.lower))
    return [one for name, one in named if inspect.isclass(one) and issubclass(one, Handler)]


def handler_page(kind: type[Handler]) -> str:
    """Purpose, arguments and example from the docstring; then its receivers, with what they read and write."""
    file = Path(inspect.getfile(kind)).name
    text = [f"# {kind.__name__}", "", "```{eval-rst}", f".. autoclass:: signalfire.handlers.{kind.__name__}"]
    text += [f"   :members: {', '.join(members)}"] if (members := members_of(kind)) else []
    text += ["```", ""]
    rows = [
        " | ".join(["", f"`{one.method}`", _event(one.event), one.phase.name, str(one.rank), _things(one.reads),
                    _things(one.writes), ""]).strip()
        for one in kind.subscriptions
    ]  # fmt: skip
    if rows:
        text += ["## Events that it receives", "", "Events in *italics* depend on the arguments.", ""]
        text += ["| method | event | phase | rank | reads | writes |", "|---|---|---|---|---|---|", *rows, ""]
    traits = {
        "trains": "It is for training; an engine that only evaluates refuses it.",
        "writes": "It writes files or sends something away.",
        "rank_zero_only": "With several processes it works on rank 0 only.",
    }
    text += [sentence for name, sentence in traits.items() if getattr(kind, name, False)]
    graphs = {
        Capture.INSIDE: "What it does within a step could be recorded as a CUDA graph.",
        Capture.FORBIDDEN: "A step with it cannot be recorded as a CUDA graph.",
    }
    text += [sentence for capture, sentence in graphs.items() if kind.capture is capture]
    text += ["", "## Cost, and incompatible handlers", "", _calls(kind), "", *_refused_beside(kind)]
    return "\n".join([*text, "", f"Its code: `handlers/{file}`.", ""])


def _calls(kind: type[Handler]) -> str:
    """How many receivers it has in an iteration."""
    always = [one.method for one in kind.subscriptions if not isinstance(one.event, str)
              and any(event in IN_AN_ITERATION for event in _unfiltered(one.event))]  # fmt: skip
    depending = {one.method for one in kind.subscriptions if isinstance(one.event, str)} - {*always}
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(always))
    text = f"Called in each iteration: {names}." if always else "No method of it runs in every iteration."
    if depending:
        text += f" Depending on the arguments, too: {', '.join(f'`{name}`' for name in sorted(depending))}."
    if (row := _measured(kind)) is not None:
        text += " Measured, more than without it ([costs](../costs.md)):"
        return f"{text}\n\n```\n{row}\n```"
    return f"{text} What is measured of the loop, of a call and of those that change the step: [costs](../costs.md)."


def _measured(kind: type[Handler]) -> str | None:
    """The rows of a handler in the table of costs, below its header."""
    lines = (Path(__file__).parent / "costs.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith(f"{kind.__name__}(")]
    header = next(line for line in lines if line.strip().startswith("calls more"))
    return "\n".join([header, *rows]) if rows else None


def _unfiltered(event: Any) -> list[Any]:
    """The events of an expression that have no filter."""
    return [one for one in getattr(event, "members", [event]) if isinstance(one, Events)]


def _refused_beside(kind: type[Handler]) -> list[str]:
    """What it overrides, and who does the same."""
    lines, overridden = [], all_overridden()
    for name in sorted(overridden[kind.__name__]):
        others = [other for other, names in overridden.items() if other != kind.__name__ and name in names]
        beside = ", ".join(f"[{other}]({other}.md)" for other in others) or "a second one like it"
        if name == "FILE":
            lines.append(
                f"- It refuses a file that another handler writes: {beside}. With paths of their own, all can log."
            )
        else:
            lines.append(
                f"- It may override {Override[name].value}, and cannot be combined with what does the same: {beside}."
            )
    return lines


@cache
def all_overridden() -> dict[str, set[str]]:
    """By the names of the handlers, what they or their bases claim or replace."""
    calls = re.compile(r"overrides\.(?:claim|replace)\(\s*Override\.([A-Z_]+)")
    found: dict[str, set[str]] = {}
    for kind in handler_classes():
        bases = [one for one in kind.__mro__ if one.__module__.startswith("signalfire.handlers")]
        found[kind.__name__] = {name for base in bases for name in calls.findall(inspect.getsource(base))}
    return found


def members_of(kind: type[Handler]) -> list[str]:
    """The public methods and properties of a handler that are its own: neither receivers nor what every handler has."""
    receivers = {one.method for one in kind.subscriptions}
    return [
        name
        for name, one in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(one) or isinstance(one, property | staticmethod | classmethod))
        and one.__doc__
        and name not in receivers
        and not hasattr(Handler, name)
    ]


def _event(event: Any) -> str:
    return f"*{event}*" if isinstance(event, str) else str(event).replace("|", "or").replace("Events.", "")


def _things(things: Any) -> str:
    return "not declared" if things is None else ", ".join(sorted(things)) or "-"


def handlers_page() -> str:
    """A table of all handlers with the first line of each, and the pages as its contents."""
    kinds = handler_classes()
    text = ["# All handlers", "", "| handler | what it does |", "|---|---|"]
    for kind in kinds:
        first = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()).replace("|", "\\|")
        text.append(f"| [{kind.__name__}]({kind.__name__}.md) | {first} |")
    text += ["", "```{toctree}", ":hidden:", *(kind.__name__ for kind in kinds), "```", ""]
    return "\n".join(text)


def ways_out() -> dict[str, list[str]]:
    """What is said to do about a finding, by code: the text after its sentence, wherever one is made."""
    found: dict[str, list[str]] = {code: [] for code in CODES}
    for folder in (Path(signalfire.__file__).parent, _HANDLERS):
        for file in sorted(folder.rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            scopes: list[ast.FunctionDef | ast.Module] = [tree]
            scopes[:0] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            for code, way_out in (one for scope in scopes for one in _ways_in(scope)):
                if way_out not in found[code]:
                    found[code].append(way_out)
    return found


def _ways_in(scope: ast.FunctionDef | ast.Module) -> Iterator[tuple[str, str]]:
    named = _assigned(scope) if isinstance(scope, ast.FunctionDef) else {}
    for node in ast.walk(scope):
        parts = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
        for code, _, way_out in zip(parts, parts[1:], parts[2:], strict=False):
            if isinstance(code, ast.Constant) and isinstance(code.value, str) and code.value in CODES:
                yield from ((code.value, text) for text in _texts(way_out, named) if _says(text))


def _says(text: str) -> bool:
    return text not in CODES and bool(text.replace("{...}", "").strip())


def _assigned(scope: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """What names stand for in a function."""
    named: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for one, value in pairs:
                if isinstance(one, ast.Name):
                    named.setdefault(one.id, []).append(value)
    return named


def _texts(node: ast.expr, named: dict[str, list[ast.expr]]) -> list[str]:
    """The texts that an expression may give, with `{...}` for what they fill in."""
    if isinstance(node, ast.Constant):
        return [str(node.value)] if isinstance(node.value, str) else ["{...}"]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(one.value) if isinstance(one, ast.Constant) else "{...}" for one in node.values)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, named), *_texts(node.orelse, named)]
    if isinstance(node, ast.BinOp):
        return [one + other for one in _texts(node.left, named) for other in _texts(node.right, named)]
    if isinstance(node, ast.Name) and node.id in named:
        others = {key: values for key, values in named.items() if key != node.id}
        return [text for value in named[node.id] for text in _texts(value, others)]
    return ["{...}"]


def codes_page() -> str:
    """The codes of all findings."""
    text = [
        "# Warning codes (W, C, G)",
        "",
        "Something that looks wrong but may be intended is reported once per run, with a code. If it is intended,",
        'silence it with `Engine(..., allow=["W14"])` or `with signalfire.allow("W14"):`. `{...}` stands for a name or a value.',
        "A `warning` is a Python warning. An `info` requires no action: `engine.findings.of_run()` contains it, and "
        "for the codes "
        f"{', '.join(sorted(PRINTED))} it is also printed as one line on stderr.",
        "",
    ]
    ways = ways_out()
    for letter, title in GROUPS.items():
        text += [f"## {title}", "", "| code | severity | what it means | what to do |", "|---|---|---|---|"]
        text += [
            f"| [{code}]{{#{code}}} | {level} | {what} | "
            f"{'; or '.join(map(_in_table, ways[code])) or 'the finding says what to change'} |"
            for code, (level, what) in CODES.items()
            if code[0] == letter
        ]
        text.append("")
    return "\n".join(text)


def _in_table(text: str) -> str:
    return _as_code(" ".join(text.split()).replace("|", "\\|"))


VALUES = {
    "AnyEvent": "An event, an event with a filter, or several of them: ``Events.STARTED | Events.ITERATION_COMPLETED(every=2)``.",
    "BASELINE": 'The name of the variant that changes nothing: ``"baseline"``.',
}
"""Public names that are neither classes nor functions: their types have docstrings of their own, which say nothing of these."""

MEANT_HERE = [
    "signalfire.authoring.log.Log",
    "signalfire.authoring.log.Entry",
    "signalfire.handlers.remote_logger.Item",
]
"""What public names have as attributes or are given: ``engine.log`` and what loggers of one's own get."""

OF_THE_LOOP = {"UpdateState": "restart, reset, abandon, discard, end_run, take_optimizer, order_parameters"}
"""Methods that only the engine calls."""


def interface_page() -> str:
    """All public names but the handlers."""
    text = ["# API reference", "", "```{eval-rst}"]
    for module in (signalfire, signalfire.handlers, exact, testing, tuning, ablation):
        if module not in (signalfire, signalfire.handlers):
            text += [f".. automodule:: {module.__name__}", ""]
        for name in vars(module)["__all__"]:
            one = getattr(module, name)
            if one in handler_classes():  # each has its own page
                continue
            if name in VALUES:
                text += [f".. py:data:: {name}", f"   :module: {module.__name__}", "", f"   {VALUES[name]}", ""]
                continue
            kind = "autoclass" if inspect.isclass(one) else "autofunction"
            members = ["   :members:"] if kind == "autoclass" else []
            if name in OF_THE_LOOP:
                members += [f"   :exclude-members: {OF_THE_LOOP[name]}"]
            text += [f".. {kind}:: {module.__name__}.{name}", *members, ""]
    for name in MEANT_HERE:
        members = [] if name.endswith(".Item") else ["   :members:", "   :special-members: __call__"]
        text += [f".. autoclass:: {name}", *members, ""]
    return "\n".join([*text, "```", ""])


PARTS = {
    "engine.regions": ("signalfire.core.regions.Regions", "enter"),
    "engine.overrides": (
        "signalfire.core.overrides.Overrides",
        "claim, replace, compute_gradients_once, owner_of, owned_by",
    ),
    "engine.snapshots": (
        "signalfire.resuming.snapshots.Snapshots",
        "take, restore, report_saved, add_write, wait_for_earlier_writes, has_loaded_state",
    ),
    "engine.boundary": ("signalfire.core.boundary.Boundary", "stop, withdraw, end_epoch, preempt, seconds_left"),
    "engine.processes": ("signalfire.distributed.Processes", ""),
    "engine.group": ("signalfire.distributed.group.Group", "join, read_alike, now, has_come"),
    "engine.feed": ("signalfire.data.feed.Feed", "on_last_batch, share"),
    "engine.signals": ("signalfire.core.bus.Bus", "call_through"),
    "update.window": ("signalfire.core.window.Window", None),
}
"""The parts of the engine by what they are called in code: the class, and which of its methods are for handlers ("" for all)."""

TOOLS = [
    *(
        "signalfire.core.overrides.Override",
        "signalfire.core.overrides.Claim",
        "signalfire.authoring.capture.Capture",
        "signalfire.authoring.monitor.Monitor",
    ),
    *(
        "signalfire.authoring.interval.check_every",
        "signalfire.runs.restore.attempt",
        "signalfire.runs.restore.Buffers",
    ),
    *(
        "signalfire.runs.restore.Modes",
        "signalfire.runs.evaluation.prepare_batch",
        "signalfire.runs.evaluation.inherited",
    ),
    *("signalfire.distributed.spread_like", "signalfire.distributed.local_part"),
    *("signalfire.authoring.randomness.derived_seed", "signalfire.authoring.randomness.unchanged_random_state"),
    *(
        "signalfire.findings.finding",
        "signalfire.resuming.frozen.FrozenBase",
        "signalfire.authoring.devices.DeviceFeature",
    ),
]
"""Classes and functions for authors of handlers; of the modules below all that they export."""

TOOL_MODULES = ["signalfire.authoring.checks", "signalfire.authoring.planning", "signalfire.authoring.batches"]


def parts_page() -> str:
    """What handlers of one's own use besides the interface: the parts of the engine, and tools."""
    introduction = inspect.getdoc(importlib.import_module("signalfire.authoring")) or ""
    text = ["# Engine API for handler authors", "", "```{eval-rst}", introduction.partition("\n\n")[2], ""]
    for part, (path, methods) in PARTS.items():
        members = [] if methods is None else [f"   :members: {methods}".rstrip()]
        text += [f".. rubric:: {part}", "", f".. autoclass:: {path}", *members, ""]
    text += [".. rubric:: Tools", ""]
    exported = {getattr(getattr(signalfire, name), "__module__", "") for name in vars(signalfire)["__all__"]}
    for tool in TOOLS:
        module, _, name = tool.rpartition(".")
        one = getattr(importlib.import_module(module), name)
        if one.__module__ in exported:
            # The code of a module links to all of its names as if they were exported where one of them is.
            text += [".. raw:: html", "", f'   <span id="signalfire.{name}"></span>', ""]
        kind, members = ("autoclass", ["   :members:"]) if inspect.isclass(one) else ("autofunction", [])
        text += [f".. {kind}:: {tool}", *members, ""]
        if one is Override:
            text += [*(f"   - ``{member.name}``: {member.value}" for member in Override), ""]
    for module in TOOL_MODULES:
        text += [f".. automodule:: {module}", "   :members:", ""]
    return "\n".join([*text, "```", ""])


def things_page() -> str:
    """What receivers may declare that they read and write."""
    text = [
        "# Names for reads= and writes=",
        "",
        "The `reads=` and `writes=` arguments of `on` accept these names.",
        "",
    ]
    text += ["| name | what it covers |", "|---|---|"]
    return "\n".join([*text, *(f"| `{name}` | {_in_text(what)} |" for name, what in THINGS.items()), ""])


def _in_text(text: str) -> str:
    """Names of the code as code: what has a dot or an underscore in it."""
    return re.sub(r"\w+(?:[._]\w+)+", lambda found: f"`{found.group()}`", text)


def errors_in(file: Path) -> list[tuple[str, str]]:
    """The errors that a module raises: their class, and their text with names in braces for what it fills in."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found.append((ast.unparse(node.exc.func), text.value))
            elif isinstance(text, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else "{...}" for one in text.values]
                found.append((ast.unparse(node.exc.func), "".join(map(str, parts))))
    return found


def errors_page() -> str:
    """Every error with its text, by module: what to search for with a part of a message."""
    text = [
        "# Error messages",
        "",
        "What each module raises; `{...}` stands for a value. Each text says what to do.",
        "",
    ]
    for folder, package in ((Path(signalfire.__file__).parent, "signalfire"), (_HANDLERS, "signalfire.handlers")):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            of_handlers = folder is not _HANDLERS and parts[0] == "handlers"  # where the package is one folder
            if "project" not in parts and not of_handlers and (errors := errors_in(file)):
                text += [f"## {'.'.join((package, *parts)).removesuffix('.__init__')}", ""]
                text += [f"- `{kind}`: {_as_code(' '.join(message.split()))}" for kind, message in errors] + [""]
    return "\n".join(text)


def _as_code(text: str) -> str:
    """A text as it stands there, whatever it holds."""
    ticks = "``" if "`" in text else "`"
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`"


def write_pages(source: Path) -> list[Path]:
    """Write all pages that are made below the folder of the guide; those that are the same stay untouched."""
    pages = {f"handlers/{kind.__name__}.md": handler_page(kind) for kind in handler_classes()}
    pages |= {"handlers/index.md": handlers_page(), "codes.md": codes_page(), "interface.md": interface_page()}
    pages |= {"things.md": things_page(), "errors.md": errors_page(), "parts.md": parts_page()}
    for name, text in pages.items():
        path = source / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return [source / name for name in pages]


def fences_as_literals(app: Any, what: str, name: str, one: Any, options: Any, lines: list[str]) -> None:
    """Show what a docstring has between fences as it stands there."""
    inside, shown = False, []
    for line in lines:
        if line.strip() == "```":
            inside = not inside
            shown += ["::", ""] if inside else [""]
        else:
            shown.append(f"    {line}" if inside and line else line)
    lines[:] = shown


GROUP = re.compile(r"( *)(\w+(?:, \w+)+): (.*)")


def arguments_apart(app: Any, what: str, name: str, one: Any, options: Any, lines: list[str]) -> None:
    """Give each argument an entry, where a docstring describes several together: "low, high: The bounds."."""
    shown: list[str] = []
    section, place = "", 0
    while place < len(lines):
        line = lines[place]
        section = line.strip() if line.strip() in ("Args:", "Attributes:") else section if line[:1] in ("", " ") else ""
        end = place + 1
        if section and (group := GROUP.fullmatch(line)) is not None:
            while end < len(lines) and lines[end].startswith(f"{group[1]} "):
                end += 1
            for argument in group[2].split(", "):
                shown += [f"{group[1]}{argument}: {group[3]}", *lines[place + 1 : end]]
        else:
            shown.append(line)
        place = end
    lines[:] = shown


def arguments_of(app: Any, what: str, name: str, one: Any, options: Any, signature: str, returns: str) -> Any:
    """The arguments of a handler, and not those of the base class that makes it."""
    if what != "class" or not issubclass(one, Handler):
        return None
    given = inspect.signature(one)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in given.parameters.values()]
    return str(given.replace(parameters=plain, return_annotation=inspect.Signature.empty)), ""


SOURCE = re.compile(r"\[`(\w+)`\]\(\.\./\.\./handlers/[\w/]+\.py\)")


def link_pages(app: Any, name: str, source: list[str]) -> None:
    """Where a page points to the code of a handler, point to its page, which the repository itself does not hold."""
    named = {kind.__name__ for kind in handler_classes()}
    folder = "" if name.startswith("handlers/") else "handlers/"

    def page(link: re.Match[str]) -> str:
        return f"[`{link[1]}`]({folder}{link[1]}.md)" if link[1] in named else link[0]

    source[0] = SOURCE.sub(page, source[0])


@cache
def public_names() -> dict[str, str]:
    """Where the site has a public name: `EMA` is at signalfire.handlers.EMA, `Engine.run` at signalfire.Engine.run."""
    places = {kind.__name__: f"signalfire.handlers.{kind.__name__}" for kind in handler_classes()}
    places |= {name: f"signalfire.{name}" for name in vars(signalfire)["__all__"]}
    for module in (exact, testing, tuning, ablation):
        places |= {name: f"{module.__name__}.{name}" for name in vars(module)["__all__"]}
    places |= {path.rpartition(".")[2]: path for path in [*TOOLS, *(path for path, _ in PARTS.values())]}
    return places


def named(role: str, raw: str, text: str, line: int, inliner: Any, options: Any = None, content: Any = ()) -> Any:
    """What stands in single backticks: a link where it is a public name or an attribute of one, code in any case."""
    part = ".".join(text.split(".")[:2])
    path = text
    if part in PARTS:
        path = f"{PARTS[part][0].rpartition('.')[2]}{text.removeprefix(part)}"
    elif any(tool.endswith(f".{text}") for tool in TOOLS):
        path = text.rpartition(".")[2]
    first, _, rest = path.removeprefix("signalfire.").removesuffix("()").partition(".")
    code = nodes.literal(text, text, classes=["xref", "py"])
    if first not in public_names():
        return [code], []
    link = pending_xref("", code, refdomain="py", reftype="obj", refexplicit=True, refwarn=False)
    link["reftarget"] = ".".join([public_names()[first], *([rest] if rest else [])])
    link["refdoc"] = inliner.document.settings.env.docname
    return [link], []


DIRECTIVE = re.compile(r"^\.\. auto(class|function|data|module):: ([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE)


def written_out(directive: re.Match[str]) -> str:
    """The signature and the docstring of a public name, and of its members where the page has them."""
    kind, path, lines = directive.groups()
    options = {name: _listed(value) for name, value in re.findall(r":([\w-]+):(.*)", lines)}
    if kind == "module":  # a function may have the same path
        one, title = sys.modules[path], path
        names = vars(one)["__all__"]
    else:
        owner, _, title = path.rpartition(".")
        module = owner if owner in sys.modules else owner.rpartition(".")[0]
        one = getattr(sys.modules[module], title)
        names = [name for name in vars(one) if not name.startswith("_")] if kind == "class" else []
    text = [_described(path, one)]
    if "members" in options:
        names = [*(options["members"] or names), *options.get("special-members", [])]
        shown = ((name, getattr(one, name, None)) for name in names if name not in options.get("exclude-members", []))
        text += [_described(f"{title}.{name}", member) for name, member in shown if _is_documented(member)]
    return "\n".join(text)


def _is_documented(member: Any) -> bool:
    """Whether a docstring is the member's own: that of a value is its type's."""
    has_its_own = inspect.isroutine(member) or inspect.isclass(member) or isinstance(member, property)
    return has_its_own and bool(inspect.getdoc(member))


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _described(name: str, one: Any) -> str:
    has_arguments = (
        inspect.isfunction(one)
        or inspect.ismethod(one)
        or (inspect.isclass(one) and not issubclass(one, BaseException | Enum))
    )
    signature = inspect.signature(one) if has_arguments else ""
    return f"{name}{signature}\n{textwrap.indent(inspect.getdoc(one) or '', '    ')}\n"


def write_texts(app: Any, problem: Exception | None) -> None:
    """Write ``llms.txt``, the contents, and ``llms-full.txt``, all pages as text, for assistants that read them."""
    if problem is not None:
        return
    order = ["index", *sorted(name for name in app.env.found_docs if name != "index")]
    texts = {name: Path(app.env.doc2path(name)).read_text(encoding="utf-8") for name in order}
    texts |= {name: DIRECTIVE.sub(written_out, text) for name, text in texts.items()}
    texts["changelog"] = (Path(app.srcdir).parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    lines = [f"- [{text.split(chr(10), 1)[0].lstrip('# ')}]({name}.html)" for name, text in texts.items()]
    (Path(app.outdir) / "llms.txt").write_text("# Signalfire\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    (Path(app.outdir) / "llms-full.txt").write_text("\n\n".join(texts.values()), encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir)))
    app.connect("source-read", link_pages)
    app.add_role("named", named)
    app.connect("autodoc-process-docstring", fences_as_literals, priority=400)  # before the sections are read
    app.connect("autodoc-process-docstring", arguments_apart, priority=350)
    app.connect("autodoc-process-docstring", insert_imports, priority=300)
    app.connect("autodoc-process-signature", arguments_of)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True}
