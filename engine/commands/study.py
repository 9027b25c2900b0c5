"""``python -m signalfire study`` and ``... report``: ablation studies in one line."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signalfire import Engine
from signalfire.ablation import LeaveOneOut, Study
from signalfire.authoring.checks import did_you_mean

if TYPE_CHECKING:
    from signalfire.ablation import Report

__all__ = ["add_report", "add_study", "find_function", "report", "study"]

FORMATS = ("text", "markdown", "latex", "csv")


def add_study(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command ``study``."""
    parser.add_argument("build", help="function that takes a seed, as module:name or file.py:name, such as train:build")
    parser.add_argument("--metric", required=True, help="name of the metric to compare, such as accuracy")
    parser.add_argument(
        "--mode",
        choices=("min", "max"),
        help="whether smaller or larger values are better, if the metric does not declare this",
    )
    parser.add_argument("--seeds", default="8", help="number of seeds, or a list of seeds, such as 3,4,7 (default: 8)")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="number of worker processes; 0 runs everything in this process (default: 1)",
    )
    parser.add_argument(
        "--handlers", nargs="+", metavar="NAME", help="handlers to switch off (default: those that affect the training)"
    )
    parser.add_argument(
        "--run", help="function that runs the engine, such as train:run; needed if build returns only the engine"
    )
    parser.add_argument(
        "--store", default="runs/study.jsonl", help="file that stores the finished runs (default: runs/study.jsonl)"
    )
    parser.add_argument("--plan", action="store_true", help="print the planned runs without running them")
    parser.add_argument("--retry-failed", action="store_true", help="repeat failed runs")
    parser.add_argument(
        "--verify",
        type=int,
        metavar="K",
        help="repeat only K of the stored runs, and compare their results with the stored results",
    )
    parser.add_argument("--plot", metavar="FILE", help="write the plot of the report to a file, such as study.png")


def add_report(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command ``report``."""
    parser.add_argument("store", help="file that a study has written, such as runs/study.jsonl")
    parser.add_argument("--metric", help="name of the metric to compare (default: the metric of the study)")
    parser.add_argument(
        "--mode", choices=("min", "max"), help="whether smaller or larger values are better (default: as in the study)"
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="format of the report (default: text)")
    parser.add_argument("--output", metavar="FILE", help="write the report to a file")


def study(given: argparse.Namespace) -> int:
    """Make a leave-one-out study; returns the exit code."""
    return _saying_errors(lambda: _study(given))


def report(given: argparse.Namespace) -> int:
    """Report on a store; returns the exit code."""
    return _saying_errors(lambda: _report(given))


def _study(given: argparse.Namespace) -> int:
    build = find_function(given.build, "build", "(seed)")
    run = None if given.run is None else find_function(given.run, "--run", "(engine)")
    if given.workers < 0:
        raise ValueError(f"--workers {given.workers}: expected 0 or more")
    made = Study(build, metric=given.metric, mode=given.mode, seeds=_seeds(given.seeds), store=given.store, run=run)
    design = LeaveOneOut(given.handlers)
    if given.verify is not None:
        done = made.verify(given.verify, design, workers=given.workers)
        print(f"{len(done)} runs repeated; all results are bit-identical to the stored results")
        return 0
    print(made.plan(design, retry_failed=given.retry_failed), flush=True)
    if given.plan:
        return 0
    try:
        found = made.run(design, workers=given.workers, retry_failed=given.retry_failed)
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; the finished runs are in {given.store}. Run the same command again to continue",
            file=sys.stderr,
        )
        return 130
    _say(found)
    if given.plot:
        found.plot(given.plot)
        print(f"\n{given.plot}")
    return 0 if any(row.finished for row in found.rows) else 1


def _report(given: argparse.Namespace) -> int:
    from signalfire.ablation.stored import read_reports

    reports = read_reports(given.store, metric=given.metric, mode=given.mode)
    if given.output is not None and len(reports) > 1:
        raise ValueError(
            f"--output {given.output}: the store has {len(reports)} studies, but a file holds only one report; omit "
            "--output to print the reports of all studies"
        )
    for title, found in reports.items():
        if given.format == "text":
            if len(reports) > 1:
                print(f"{title}\n")
            if given.output is None:
                _say(found)
                print()
                continue
        text = _formatted(found, given.format)
        if given.output is None:
            print(text)
        else:
            Path(given.output).write_text(text, encoding="utf-8")
            print(given.output)
    return 0


def _formatted(found: Report, style: str) -> str:
    if style == "text":
        return "\n".join([str(found), "", *found.sentences(), ""])
    return {"markdown": found.markdown, "latex": found.latex, "csv": found.csv}[style]()


def _say(found: Report) -> None:
    print(f"\n{found}\n")
    print(*found.sentences(), sep="\n")


def find_function(name: str, argument: str, call: str, given: tuple[Any, ...] = (0,)) -> Callable[..., Any]:
    """The function that ``module:name`` or ``file.py:name`` stands for.

    Args:
        name: What was given.
        argument: The argument, for errors.
        call: How it is called, such as "(seed)", for errors.
        given: Arguments as those that it is called with.

    Raises:
        ValueError: if it does not stand for a module and a name.
        ImportError: if the module is not found, or its import fails.
        AttributeError: if the module has no such function.
        TypeError: if it cannot be called as ``call`` says.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise ValueError(
            f"{argument} {name!r}: expected the name of a module and of a function in it, such as train:build"
        )
    module = _on_path(module, name, argument)
    found = _attribute_of(_imported(module, name, argument), attribute, f"{argument} {name!r}: {module!r}")
    if isinstance(found, Engine) or not callable(found):
        raise TypeError(f"{argument} {name!r} is {found!r}; expected a function {attribute}{call}")
    try:
        inspect.signature(found, follow_wrapped=False).bind(*given)
    except TypeError as error:
        raise TypeError(f"{argument} {name!r} cannot be called as {attribute}{call}: {error}") from None
    except ValueError:  # no signature, as of some functions in C
        pass
    return found  # type: ignore[no-any-return]


def _attribute_of(module: Any, attribute: str, where: str) -> Any:
    """What a module has under a name, which may have dots."""
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            there = [one for one, value in vars(found).items() if callable(value) and not one.startswith("_")]
            raise AttributeError(
                f"{where} has no {attribute!r}{did_you_mean(attribute, there)}; available functions: "
                f"{', '.join(sorted(there)) or 'none'}"
            )
        found = getattr(found, part)
    return found


def _on_path(module: str, name: str, argument: str) -> str:
    """The name of a module, or of that in a file; its folder is added to those from which modules are imported."""
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise ImportError(f"{argument} {name!r}: there is no file {module!r} in {Path.cwd()}")
        sys.path.insert(0, str(file.resolve().parent))
        return file.stem
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return module


def _imported(module: str, name: str, argument: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        near = [path.stem for path in Path.cwd().glob("*.py")]
        raise ImportError(
            f"{argument} {name!r}: there is no module {module!r}{did_you_mean(module, near)}; searched {Path.cwd()} "
            "and the environment"
        ) from None


def _seeds(text: str) -> Iterable[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--seeds {text}: expected a number of seeds, such as 8, or a list of seeds, such as 3,4,7"
        ) from None
    if "," in text:
        return numbers
    if numbers[0] < 1:
        raise ValueError(f"--seeds {text}: expected at least 1 seed")
    return range(numbers[0])


def _saying_errors(command: Callable[[], int]) -> int:
    """Run a command; what is wrong with what was given is said in a sentence, other errors have their traceback."""
    try:
        return command()
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, OSError, RuntimeError) as error:
        if not _is_raised_here(error):
            raise
        print(error.args[0] if isinstance(error, KeyError) and error.args else error, file=sys.stderr)
        return 2


def _is_raised_here(error: Exception) -> bool:
    """Whether an error was raised by this package, rather than by code that it calls."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].split(".")[0] == "signalfire"
