"""What looks wrong about a composition or a run: found, reported once with a code, and silenced by its code.

`watch` is the service that calls all of this in a run. `reports` defines findings and reports them. Before a run, `check` reads
a `composition` by the rules of `rules` and of the files
called `..._rules`. In a run, `first_steps` looks at the first losses, by their graphs (`loss_graph`) and the calls behind them
(`layouts`, `dropout`); `data_checks` and `epoch_checks` compare what epochs leave; `evaluation_findings`, `late_scores`,
`own_evaluations`, `own_schedulers`, `own_weights`, `unattached`, `returned` and `resumption` look at what their names say.

`signalfire.findings.codes` lists the codes.
"""

from .reports import (
    Finding,
    FindingError,
    Findings,
    FindingWarning,
    Reports,
    allow,
    check_codes,
    finding,
    warn,
)

__all__ = [
    "Finding",
    "FindingError",
    "FindingWarning",
    "Findings",
    "Reports",
    "allow",
    "check_codes",
    "finding",
    "warn",
]
