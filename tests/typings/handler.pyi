"""For type checkers: what `from handler import ...` finds in examples/jobs."""

from examples.jobs.handler import *
