"""Checkpoint versions on disk: written atomically, verified before they are loaded, removed only by the run that owns them.

`manifest` defines the content of a version, `state_file` the file of its state, and `names` its name; `store` writes, finds,
reads and removes versions through the operations of `files`. `ownership` determines which versions belong to a run, `retention`
which ones are kept, and `failures` which ones are no longer resumed from. `saver` makes the saves of a handler, each a
`writer.Write`; `loading` reads them for a resume. Nothing here depends on the loop or on handlers.
"""

from .failures import ResumeFailures
from .files import Content, Files, make_folders
from .loading import load, load_hyperparameters
from .manifest import Damaged, check_json, encode, read_manifest, warn_if_environment_changed
from .names import DEFAULT_FILENAME, NameTemplate, hidden_name
from .ownership import Ownership
from .retention import Entry, Retention
from .saver import Saver, SavingRun
from .store import Taken, clean, commit, find, find_unreadable, open_version, preempted
from .writer import Write

__all__ = [
    "DEFAULT_FILENAME",
    "Content",
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
    "Write",
    "check_json",
    "clean",
    "commit",
    "encode",
    "find",
    "find_unreadable",
    "hidden_name",
    "load",
    "load_hyperparameters",
    "make_folders",
    "open_version",
    "preempted",
    "read_manifest",
    "warn_if_environment_changed",
]
