"""The command line: ``python -m signalfire`` trains something at once; ``... new my_project`` begins a project.

``... study train:build --metric accuracy`` measures what each handler contributes, and ``... report store.jsonl`` says it again.
``... compare a.jsonl b.jsonl`` says where two traces of `handlers.Trace` differ first, and
``... bisect a.jsonl b.jsonl --script train.py`` what made the difference.
``... upgrade my_folder`` lists names of earlier versions in your files, with those of today.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from .commands import bisection, traces
from .commands import study as studies


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m signalfire", description="A PyTorch training engine whose loop only emits events."
    )
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser("demo", help="train two small models, then train one again without a handler (the default)")
    new = commands.add_parser("new", help="create a starter project")
    new.add_argument("folder", help="the folder, such as my_project")
    study = commands.add_parser(
        "study", help="measure what each handler contributes: train without each one in turn, over several seeds"
    )
    report = commands.add_parser("report", help="print the report on the stored runs of a study")
    studies.add_study(study)
    studies.add_report(report)
    commands.add_parser("handlers", help="list the included handlers and the handlers of installed packages")
    traces.add_compare(commands)
    bisection.add_bisect(commands)
    upgrade = commands.add_parser("upgrade", help="list outdated names in your files, with their replacements")
    upgrade.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="files, or folders that contain files")
    given = parser.parse_args(arguments)
    if given.command == "upgrade":
        return _upgrade(given.paths)
    if given.command == "handlers":
        from .commands.handlers import list_handlers

        print(*list_handlers(), sep="\n")
        return 0
    if given.command == "compare":
        return traces.compare(given)
    if given.command == "bisect":
        return bisection.bisect(given)
    if given.command in ("study", "report"):
        return studies.study(given) if given.command == "study" else studies.report(given)
    if given.command == "new":
        from .commands.new import new_project

        try:
            written = new_project(given.folder)
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        print(*written, sep="\n")
        print(f"\nNext: cd {shlex.quote(given.folder)}; python train.py; python -m pytest; python study.py")
        return 0
    from .commands.demo import demo

    demo()
    return 0


def _upgrade(paths: list[Path]) -> int:
    from .commands.upgrade import upgrade

    found, unread = upgrade(paths)
    for one in found:
        print(one.shown())
    for sentence in unread:
        print(sentence, file=sys.stderr)
    not_read = f"; {len(unread)} files could not be read" if unread else ""
    print(f"{len(found)} outdated names{not_read}", file=sys.stderr)
    return 2 if unread else 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
