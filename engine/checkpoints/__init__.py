"""Checkpoints on disk, as versions: written whole, verified before they are read, removed only by the run that owns them.

`manifest` is what a version consists of, `names` what it is called; `store` writes, finds, reads and removes versions, through
the operations of `files`. `ownership` says which of them belong to a run, `retention` which are kept, `failures` which are not
worth another try. `saver` makes the saves of a handler, and `writer` is one of them. Nothing here knows the loop or handlers.
"""

from .failures import ResumeFailures
from .files import Files, make_folders
from .manifest import Damaged, check_json, encode, read_manifest, warn_if_environment_changed
from .names import DEFAULT_FILENAME, NameTemplate
from .ownership import Ownership
from .retention import Entry, Retention
from .saver import Saver, SavingRun
from .store import Taken, clean, commit, find, open_version

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
    "make_folders",
    "open_version",
    "read_manifest",
    "warn_if_environment_changed",
]
