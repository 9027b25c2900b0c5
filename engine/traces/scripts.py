"""Scripts that train, each looked at in a process of its own."""

from __future__ import annotations

import os
import pickle
import runpy
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from signalfire import Engine

from ..authoring.randomness import set_random_state

__all__ = ["Look", "Script", "in_short"]

T = TypeVar("T")
Run = Callable[[Engine], object]
Look = Callable[[Engine, Run], T]
"""Looks at a run: it is called in place of the run, with the engine and with what runs it."""


class Script:
    """A training script, for `bisect`: its first training is examined inside the script, which then ends.

    Each examination has a separate process, so process-wide settings of a script do not affect the next one.

    Args:
        command: The path of the script, and its arguments as on a command line: "train.py --lr 0.1".

    Example:
        >>> from signalfire.traces import bisect
        >>> bisect(Script("train.py"), Script("train.py --lr 0.1"))  # doctest: +SKIP
    """

    def __init__(self, command: str) -> None:
        self.command = command

    def __repr__(self) -> str:
        return f"Script({self.command!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Script) and self.command == other.command

    def __hash__(self) -> int:
        return hash(self.command)

    def see(self, look: Look[T], random: Mapping[str, Any]) -> T:
        """What a look at the first training finds, in a new process that begins with these random states.

        Raises:
            ValueError: If the script ends without a training, or fails before it.
        """
        with tempfile.TemporaryDirectory() as folder:
            given, found = Path(folder, "given"), Path(folder, "found")
            given.write_bytes(pickle.dumps((self, look, dict(random))))
            program = "import sys; from signalfire.traces import scripts; scripts.answer(*sys.argv[1:])"
            done = subprocess.run(
                [sys.executable, "-c", program, str(given), str(found)], stdout=subprocess.DEVNULL, check=False
            )
            if not found.exists():
                raise ValueError(f"{self.command!r}: the process ended with exit status {done.returncode}")
            seen, error = pickle.loads(found.read_bytes())
        if error is not None:
            raise error
        return seen  # type: ignore[no-any-return]

    def _seen(self, look: Look[T]) -> T:
        """Run the script in this process, with a look in place of its first training."""
        seen: list[T] = []
        path, *arguments = shlex.split(self.command, posix=os.name != "nt")

        def see(engine: Engine, *args: Any, **options: Any) -> Any:
            if not engine.training:
                return run(engine, *args, **options)
            with _in_place_of_run(run):
                seen.append(look(engine, lambda engine: run(engine, *args, **options)))
            raise _Seen

        sys.argv, sys.path[0] = [path, *arguments], str(Path(path).resolve().parent)
        why = "ends without a training run, because it never calls run() on an engine that trains"
        with _in_place_of_run(see) as run:
            try:
                runpy.run_path(path, run_name="__main__")
            except _Seen:
                pass
            except SystemExit as error:
                why = f"ended before a training run, with exit status {error.code!r}"
        if not seen:
            raise _NoTraining(why)
        return seen[0]


class _NoTraining(Exception):
    """A script has ended without a training."""


class _Seen(BaseException):
    """Ends a script whose training has been looked at; not an `Exception`, which the script may catch."""


def answer(given: str, found: str) -> None:
    """What the process of a script does: look at its training, and leave what was found, or the error."""
    script, look, random = pickle.loads(Path(given).read_bytes())
    set_random_state(random)
    seen, failed = None, None
    try:
        seen = script._seen(look)
    except _NoTraining as error:
        failed = ValueError(f"{script.command!r} {error}")
    except Exception as error:
        failed = ValueError(f"{script.command!r}: {in_short(error)}")
    # Renamed when it is complete: a process that is killed leaves nothing.
    Path(found + ".new").write_bytes(pickle.dumps((seen, failed)))
    os.replace(found + ".new", found)


@contextmanager
def _in_place_of_run(replaced: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    run = Engine.run
    Engine.run = replaced  # type: ignore[method-assign]
    try:
        yield run
    finally:
        Engine.run = run  # type: ignore[method-assign]


_NOT_OF_USER = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<",
)
"""How the paths of code begin that the user has not written."""


def in_short(error: BaseException) -> str:
    """An error in a line: the last line of the user's code that it came through, its class and its message."""
    places = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_NOT_OF_USER)]
    return f"{f'{places[-1].filename}:{places[-1].lineno}: ' if places else ''}{type(error).__name__}: {error}"
