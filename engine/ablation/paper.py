"""What goes into a paper: how the study was made, in one paragraph, and the whole report as one page."""

from __future__ import annotations

import datetime
import html
import io
import os
from collections.abc import Sequence
from os import PathLike

from ..authoring import markup
from ..authoring.checks import check_local
from .detectability import detectable
from .formats import count, listed, numbers_in_words
from .joint import EXACT_UP_TO, FLIPS
from .looks import CLOSED_UP_TO
from .plot import draw
from .pruning import pruned_in_words
from .rows import Findings

__all__ = ["methods", "write_page"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; background: #fff; }
"""


def methods(report: Findings) -> str:
    """How the study was made and tested, in the past tense of a paper; it states only what the report knows."""
    return " ".join([*_what_was_run(report), *_how_it_was_tested(report), *_what_it_could_find(report)])


def _what_was_run(report: Findings) -> list[str]:
    better, seeds = "larger" if report.mode == "max" else "smaller", report.seeds
    compared_variants = report.comparisons - len(report.pruned)
    variants = count(compared_variants, "variant")
    compared = f'{variants} {"was" if compared_variants == 1 else "were"} compared with "{report.baseline}"'
    text = [
        f"{compared} over {count(len(seeds), 'seed')} ({numbers_in_words(seeds)}), with differences paired by seed.",
        f"The metric is {report.metric} at the end of each run; {better} values are better.",
    ]
    planned, finished = sum(row.planned for row in report.rows), sum(row.finished for row in report.rows)
    failed = sum(len(row.failed) for row in report.rows)
    note = f", and {failed} failed; a failed run counts as worse than any finished run" if failed else ""
    pruned = [pruned_in_words(report.pruned, report.comparisons)] if report.pruned else []
    return [*text, *report.facts, f"{finished} of {count(planned, 'run')} finished{note}.", *pruned]


def _how_it_was_tested(report: Findings) -> list[str]:
    compared = [row.comparison for row in report.rows if row.comparison is not None]
    exact = all(one.exact for one in compared)
    patterns = "all sign patterns" if exact else f"{FLIPS:,} random sign patterns (all up to {EXACT_UP_TO} pairs)"
    text = [
        f"Differences were tested with two-sided sign-flip tests over {patterns}, with the mean divided by the root mean square "
        "as the statistic."
    ]
    if any(row.failures for row in report.rows):
        text.append(
            "If either run of a pair failed, signed ranks of all pairs were tested instead of the differences, and "
            "failures were tested with McNemar's exact test."
        )
    text.append(_how_it_was_adjusted(report))
    simultaneous = "simultaneous " if report.comparisons > 1 else ""
    text.append(f"Intervals are {simultaneous}{100 * report.level:g} % intervals obtained by inverting the test.")
    if report.margin is not None:
        text.append(f"A variant is called equivalent if its interval lies within {report.margin:g} of 0.")
    return text


def _how_it_was_adjusted(report: Findings) -> str:
    alpha, family = f"{report.alpha:g}", count(report.comparisons, "comparison")
    if report.looks is not None:
        sizes = listed([str(size) for size in report.looks.sizes])
        test = "a closed test" if report.comparisons <= CLOSED_UP_TO else "a step-down test"
        return (
            f"Looks were planned at {sizes} seeds. The level of {alpha} was spent in proportion to the number of seeds "
            f"(Lan and DeMets, 1983), with boundaries from the joint sign flips of {family} in {test}. Variants that "
            "were found to differ were not run with further seeds."
        )
    if report.pruned:
        return (
            f"p-values were adjusted for {family}, including pruned variants, by Holm's procedure (1979), at a "
            f"family-wise level of {alpha}."
        )
    if report.comparisons > 1:
        return (
            f"p-values were adjusted for {family} by the step-down procedure over joint sign flips (Westfall and Young, 1993; "
            f"Romano and Wolf, 2005), at a family-wise level of {alpha}."
        )
    return f"The significance level is {alpha}."


def _what_it_could_find(report: Findings) -> list[str]:
    seeds = len(report.seeds)
    if report.looks is not None or report.comparisons == 0 or report.needed is None or seeds < report.needed:
        return []
    if report.pruned:  # Holm's first step
        size = detectable(seeds, 1, alpha=round(report.alpha / report.comparisons, 12))
    else:
        size = detectable(seeds, report.comparisons, alpha=report.alpha)
    return [
        f"According to a simulation, {count(seeds, 'seed')} are enough to detect a single difference of {size:.2g} "
        "standard deviations with a probability of 80 %."
    ]


def write_page(
    report: Findings,
    path: str | PathLike[str],
    *,
    tables: Sequence[Sequence[Sequence[str]]],
    sentences: Sequence[str],
    warnings: Sequence[str],
    legend: Sequence[str],
    pictures: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the report as one HTML file that needs no other: sentences, picture, tables, warnings, and how it was made.

    Args:
        report: The report.
        path: The file, ending with ".html"; its folder is created if necessary.
        tables: Tables with a header each.
        sentences, warnings, legend: What the report says.
        pictures: Titles and SVG of further pictures.

    Raises:
        ValueError: if the path is a URL, or ends otherwise.
    """
    target = check_local("Report.html", "path", path)
    if target.suffix not in (".html", ".htm"):
        raise ValueError(f"Report.html(path={os.fspath(path)!r}): expected a file name that ends with '.html'")
    picture = io.StringIO()
    draw(report, picture, format="svg")
    svg = picture.getvalue()
    title = html.escape(f"{report.metric}: {count(report.comparisons, 'variant')}, {count(len(report.seeds), 'seed')}")
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f"<p>{html.escape(target.stem)}, {datetime.date.today().isoformat()}</p>",
        *([_items(sentences)] if sentences else []),
        *([f"<h2>Limitations</h2>{_items(warnings)}"] if warnings else []),
        f"<h2>Differences by seed</h2><div class=scroll>{svg[svg.index('<svg') :]}</div>",
        *(f"<h2>{html.escape(name)}</h2><div class=scroll>{one[one.index('<svg') :]}</div>" for name, one in pictures),
        "<h2>Numbers</h2>",
        *(f"<div class=scroll>{markup.table(table)}</div>" for table in tables),
        *(f"<p>{html.escape(line)}</p>" for line in legend),
        f"<h2>Methods</h2><p>{html.escape(methods(report))}</p>",
        "</body></html>\n",
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(parts), encoding="utf-8")


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"
