"""Checkpoint versions on disk: written atomically, verified before they are loaded, removed only by the run that owns them.

`manifest` defines the content of a version and `names` its name; `store` writes, finds, reads and removes versions through the
operations of `files`. `ownership` determines which versions belong to a run, `retention` which ones are kept, and `failures`
which ones are no longer resumed from. `saver` makes the saves of a handler, each a `writer.Write`. Nothing here depends on
the loop or on handlers.
"""

from .failures import ResumeFailures
from .files import Files, make_folders
from .manifest import Damaged, check_json, encode, read_manifest, warn_if_environment_changed
from .names import DEFAULT_FILENAME, NameTemplate
from .ownership import Ownership
from .retention import Entry, Retention
from .saver import Saver, SavingRun
from .store import Taken, clean, commit, find, find_unreadable, open_version, preempted

__all__ = [
    "DEFAULT_FILENAME",
    "Damaged",
    "Entry",
    "Files",
    "NameTemplate",
    "Ownership",
    "ResumeFailures",
    "Retention",
    "Saver",
    "SavingRun",
    "Taken",
    "check_json",
    "clean",
    "commit",
    "encode",
    "find",
    "find_unreadable",
    "make_folders",
    "open_version",
    "preempted",
    "read_manifest",
    "warn_if_environment_changed",
]
