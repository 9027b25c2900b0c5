"""What a report says of results that are known, in each of its forms, and that no run is left out without a word."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from signalfire.ablation.report import Report
from signalfire.ablation.results import Result, Variant
from signalfire.ablation.statistics import compare, exact, holm

BASE = [90, 91, 92, 90, 93, 91, 92, 94]
"""The accuracies of the baseline in percent, by seed."""


def without(*names: str) -> Variant:
    return Variant(f"- {' - '.join(names)}", off=frozenset(names))


def results(variant: str, values: Sequence[float | None], **others: Any) -> list[Result]:
    """Runs of seeds 0, 1, ...; None is one that failed."""
    return [
        Result(variant, seed, value, error=None if value is not None else "Traceback ...\nValueError: boom\n", **others)
        for seed, value in enumerate(values)
    ]


def report(
    changes: Mapping[str, Sequence[float | None]],
    variants: Sequence[Variant] | None = None,
    *,
    base: Sequence[float | None] | None = None,
    mode: Literal["min", "max"] = "max",
    metric: str = "accuracy",
    **options: Any,
) -> Report:
    """A report of variants by how many percent their runs differ from the baseline."""
    seeds = len(next(iter(changes.values())))
    runs = results("baseline", [number / 100 for number in BASE[:seeds]] if base is None else base)
    for name, change in changes.items():
        values = [None if one is None else (number + one) / 100 for number, one in zip(BASE, change, strict=False)]
        runs += results(name, values)
    if variants is None:
        variants = [Variant("baseline"), *(without(name.removeprefix("- ")) for name in changes)]
    return Report(runs, variants, metric=metric, mode=mode, **options)


WORSE = [-1, -2, -1, -3, -2, -1, -1, -2]
NOTHING = [1, -1, 0, 2, -2, 1, -1, 1]
BETTER = [1, 2, 1, 3, 2, 1, 1, 2]


def test_rows_hold_what_was_measured() -> None:
    runs = results("baseline", [0.5, 0.6, 0.7], seconds=2.0, steps=10, memory=100)
    runs += [
        Result("- ema", 0, 0.4, steps=9, seconds=1, memory=50),
        Result("- ema", 2, 0.5, steps=11, seconds=2, memory=70),
    ]
    found = Report(runs, [without("ema"), Variant("baseline")], metric="accuracy", mode="max")
    baseline, ema = found.rows  # the baseline comes first
    assert (baseline.variant.name, baseline.comparison, baseline.adjusted) == ("baseline", None, None)
    assert [baseline.mean, baseline.sd] == pytest.approx([0.6, 0.1])
    assert (baseline.seconds, baseline.steps, baseline.memory) == (2.0, 10, 100)
    assert (ema.finished, ema.planned, ema.missing, dict(ema.failed)) == (2, 3, (1,), {})
    assert (ema.seconds, ema.steps, ema.memory) == (1.5, 10, 70)
    assert ema.differences == pytest.approx({0: -0.1, 2: -0.2})


def test_differences_are_paired_by_seed_and_p_is_adjusted_over_all_variants() -> None:
    found = report({"- ema": WORSE, "- mixup": NOTHING, "- clip": BETTER})
    compared = [compare([exact(one / 100) for one in changes]) for changes in (WORSE, NOTHING, BETTER)]
    assert [row.comparison for row in found.rows[1:]] == compared
    assert [row.adjusted for row in found.rows[1:]] == holm([one.p for one in compared])
    assert found.comparisons == 3
    shuffled = random.Random(0).sample(found._results, len(found._results))
    again = Report(shuffled, found._variants, metric="accuracy", mode="max")
    assert str(again) == str(found)


def test_a_variant_without_any_pair_belongs_to_the_family() -> None:
    found = report({"- ema": WORSE[:6], "- mixup": [None] * 6})
    assert found.comparisons == 2
    assert found.rows[1].adjusted == 2 * 2 / 64
    assert found.rows[2].adjusted == 1.0


def test_a_failed_run_is_shown_and_named_in_every_form(tmp_path: Path) -> None:
    found = report({"- ema": [-1, -2, None, -3, -2, -1, -1, -2]})
    assert found.rows[1].finished == 7
    assert dict(found.rows[1].failed) == {2: "ValueError: boom"}
    assert list(found.rows[1].differences) == [0, 1, 3, 4, 5, 6, 7]
    for text in (str(found), found.markdown(), found.latex()):
        assert "7/8" in text
        assert '"- ema", seed 2: failed: ValueError: boom' in text
    (line,) = [line for line in csv.DictReader(io.StringIO(found.csv())) if line["variant"] == "- ema"]
    assert (line["finished"], line["planned"], line["pairs"], line["failed_seeds"]) == ("7", "8", "7", "2")
    assert found.to_dict()["rows"][1]["failed"] == {"2": "ValueError: boom"}
    assert found.sentences()[0].endswith("1 of its 8 runs failed (seed 2: ValueError: boom).")
    found.plot(tmp_path / "found.svg")
    assert "7/8 pairs" in (tmp_path / "found.svg").read_text()


def test_a_missing_run_is_shown_and_named() -> None:
    full = report({"- ema": WORSE, "- mixup": WORSE})
    runs = [run for run in full._results if (run.variant, run.seed) not in [("- ema", 3), ("- ema", 5)]]
    found = Report(runs, full._variants, metric="accuracy", mode="max")
    assert found.rows[1].missing == (3, 5)
    assert "6/8" in str(found)
    assert '"- ema": no run of seeds 3 and 5' in str(found)
    assert "2 of its 8 runs are missing (seeds 3 and 5)." in found.sentences()[0]
    assert "missing" not in found.sentences()[1]


def test_seeds_that_were_planned_and_never_run_are_missing() -> None:
    found = report({"- ema": WORSE[:6]}, seeds=range(8))
    assert [(row.finished, row.planned, row.missing) for row in found.rows] == [(6, 8, (6, 7))] * 2


def test_a_failed_baseline_takes_the_pair_away_and_this_is_said() -> None:
    base: list[float | None] = [number / 100 for number in BASE]
    base[4] = None
    found = report({"- ema": WORSE}, base=base)
    assert found.rows[1].finished == 8
    assert found.rows[1].without_pair == (4,)
    assert found.rows[1].comparison is not None
    assert found.rows[1].comparison.n == 7
    assert '"- ema": seed 4 omitted, because the baseline has no such run' in found.warnings()
    assert '"baseline", seed 4: failed: ValueError: boom' in found.warnings()
    baseline, ema = found.sentences()
    assert "1 of its 8 runs failed (seed 4: ValueError: boom)." in baseline
    assert ema.endswith("Seed 4 is omitted, because the baseline did not finish it.")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_no_number_is_a_failed_run(value: float) -> None:
    runs = results("baseline", [0.5, 0.6]) + results("- ema", [0.4, value])
    found = Report(runs, [Variant("baseline"), without("ema")], metric="loss", mode="min")
    assert dict(found.rows[1].failed) == {1: f"loss is {value}"}
    assert found.rows[1].mean == 0.4


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: boom\n", "ValueError: boom"),
        ("Traceback\n  File x\nValueError: boom\nin handler 'ema', epoch 3\n", "ValueError: boom"),
        ("Traceback\n  File x\ntorch.OutOfMemoryError: no\n", "torch.OutOfMemoryError: no"),
        ("Traceback\n  File x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("killed by signal 9", "killed by signal 9"),
        ("", ""),
    ],
)
def test_the_reason_of_a_failure_is_its_error(error: str, reason: str) -> None:
    runs = [Result("baseline", 0, 0.5), Result("- ema", 0, None, error=error)]
    found = Report(runs, [Variant("baseline"), without("ema")], metric="loss", mode="min")
    assert found.rows[1].failed[0] == reason


def test_sentences_of_leaving_one_out() -> None:
    found = report({"- ema": WORSE, "- mixup": BETTER, "- clip": NOTHING, "- noise": [0] * 8, "- sched": [-2] * 8})
    assert found.sentences() == [
        "Without ema, accuracy fell by 1.6 percentage points (95 % interval 1.0 to 2.2, p = 0.039 adjusted, 8 seeds): "
        "it contributes.",
        "Without mixup, accuracy rose by 1.6 percentage points (95 % interval 1.0 to 2.2, p = 0.039 adjusted, 8 seeds): "
        "the composition is better without it.",
        "Without clip, accuracy shows no significant difference with 8 seeds (change of 0.1 percentage points, 95 % interval "
        "-1.0 to 1.3, p = 1 adjusted).",
        "Without noise, accuracy was exactly the same with all 8 seeds.",
        "Without sched, accuracy fell by 2.0 percentage points (the same with every seed, so there is no interval, "
        "p = 0.039 adjusted, 8 seeds): it contributes.",
    ]


def test_sentences_know_which_direction_is_better() -> None:
    found = report({"- ema": BETTER, "- mixup": WORSE}, metric="loss", mode="min")
    assert "loss rose by 0.016 (95 % interval 0.010 to 0.022" in found.sentences()[0]
    assert found.sentences()[0].endswith("it contributes.")
    assert found.sentences()[1].endswith("the composition is better without it.")


@pytest.mark.parametrize(
    ("variant", "baseline", "change", "begin", "end"),
    [
        (without("a", "b"), Variant("baseline"), WORSE, "Without a and b, ", "they contribute."),
        (without("a", "b"), Variant("baseline"), BETTER, "Without a and b, ", "better without them."),
        (Variant("+ a"), Variant("baseline", frozenset({"a"})), BETTER, "With a, ", ": it contributes."),
        (Variant("+ a"), Variant("baseline", frozenset({"a"})), WORSE, "With a, ", "better without it."),
        (
            Variant("s", swapped=(("a", "b"),)),
            Variant("baseline"),
            BETTER,
            "With b in place of a, ",
            "b does better here.",
        ),
        (
            Variant("s", swapped=(("a", "b"),)),
            Variant("baseline"),
            WORSE,
            "With b in place of a, ",
            "a does better here.",
        ),
        (
            Variant("+ a - b", frozenset({"b"})),
            Variant("baseline", frozenset({"a"})),
            WORSE,
            "Without b and with a, ",
            "it is worse than the baseline.",
        ),
        (Variant("odd"), Variant("baseline"), BETTER, 'With "odd", ', "it is better than the baseline."),
    ],
)
def test_sentences_say_what_a_variant_changes(
    variant: Variant, baseline: Variant, change: Sequence[int], begin: str, end: str
) -> None:
    (sentence,) = report({variant.name: change}, [baseline, variant]).sentences()
    assert sentence.startswith(begin)
    assert sentence.endswith(end)
    assert ", p = 0.0078, 8 seeds" in sentence  # one comparison: nothing to adjust for


def test_too_few_seeds_are_said_with_how_many_it_takes() -> None:
    found = report({f"- {name}": WORSE[:5] for name in "abcde"})
    assert found.needed == 8
    assert found.warnings() == [
        "Too few seeds: the smallest p that 5 pairs can reach is 0.062, which Holm multiplies by up to 5; for 0.05, at least "
        "8 seeds are needed."
    ]
    for sentence in found.sentences():
        assert sentence.endswith("but 5 seeds are too few for 5 comparisons: at least 8 seeds are needed.")
        assert "earns" not in sentence
    assert report({"- a": WORSE[:5]}).needed == 6
    assert report({"- a": WORSE[:6]}).warnings() == []
    assert "at least 8 seeds" in " ".join(str(found).split())
    assert report({"- a": WORSE[:5]}, level=0.9).needed == 5


def test_what_is_significant_only_before_the_adjustment_is_not_called_a_difference() -> None:
    almost = [-1, -2, -1, -3, -2, -1, -1, 0.5]
    found = report({"- a": almost} | {f"- {name}": NOTHING for name in "bcde"})
    row = found.rows[1]
    assert row.comparison is not None
    assert row.adjusted is not None
    assert row.comparison.p < 0.05 < row.adjusted
    assert row.comparison.high < 0  # nor does the interval decide, which is not adjusted
    assert found.sentences()[0].startswith("Without a, accuracy shows no significant difference with 8 seeds")


def test_only_the_variants_with_too_few_pairs_are_named() -> None:
    found = report({"- a": [*WORSE[:5], None], "- b": WORSE[:6]}, seeds=range(6), level=0.9)
    assert found.needed == 6
    (few,) = [line for line in found.warnings() if line.startswith("Too few")]
    assert few.startswith('Too few seeds of "- a": the smallest p that 5 pairs can reach is 0.062')


def test_one_pair_or_none_is_reported_as_such() -> None:
    found = report({"- a": [-1, None], "- b": [None, None]})
    one, none = found.sentences()
    assert one.startswith("Without a, accuracy fell by 1.00 percentage points (1 seed), but 1 seed is too few")
    assert none.startswith(
        "Without b, accuracy cannot be compared: no seed finished both in this variant and in the baseline."
    )
    assert "2 of its 2 runs failed" in none
    assert "0/2" in str(found)
    assert [line.split(":")[0] for line in found.warnings()] == [
        '"- a", seed 1',
        '"- b", seed 0',
        '"- b", seed 1',
        'Too few seeds of "- a"',
    ]
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_report_without_any_result_is_one_of_missing_runs() -> None:
    found = Report([], [Variant("baseline"), without("a")], metric="accuracy", mode="max", seeds=range(3))
    assert '"- a": no run of seeds 0, 1 and 2' in str(found)
    assert found.rows[0].missing == (0, 1, 2)
    assert len(found.sentences()) == 2


def test_a_study_of_the_baseline_alone_has_a_table() -> None:
    found = Report(results("baseline", [0.5, 0.75]), [Variant("baseline")], metric="accuracy", mode="max")
    assert "2/2" in str(found)
    assert found.sentences() == found.warnings() == []


def test_drawn_signs_are_said() -> None:
    runs = results("baseline", [0.5] * 21) + results("- a", [0.4 - 0.001 * seed for seed in range(21)])
    found = Report(runs, [Variant("baseline"), without("a")], metric="accuracy", mode="max")
    assert "65,536 random sign patterns" in str(found).replace("\n", " ")
    assert "p < 0.001, from random signs" in found.sentences()[0]
    assert "random" not in str(report({"- ema": WORSE}))


def test_percentage_points_are_for_accuracies_up_to_one_or_on_request() -> None:
    assert "1.6 percentage points" in report({"- a": WORSE}).sentences()[0]
    assert "fell by 0.016 (" in report({"- a": WORSE}, metric="f1").sentences()[0]
    assert "1.6 percentage points" in report({"- a": WORSE}, metric="f1", percent=True).sentences()[0]
    assert "fell by 0.016 (" in report({"- a": WORSE}, percent=False).sentences()[0]
    runs = results("baseline", [float(number) for number in BASE])
    runs += results("- a", [float(number + one) for number, one in zip(BASE, WORSE, strict=True)])
    in_percent = Report(runs, [Variant("baseline"), without("a")], metric="accuracy", mode="max")
    assert "fell by 1.6 (95 % interval 1.0 to 2.2" in in_percent.sentences()[0]


def test_the_terminal_table() -> None:
    runs = results("baseline", [number / 100 for number in BASE], seconds=12.34, steps=1200, memory=412_000_000)
    runs += results("- ema", [(n + d) / 100 for n, d in zip(BASE, WORSE, strict=True)], seconds=123.4, steps=1200)
    found = str(Report(runs, [Variant("baseline"), without("ema")], metric="accuracy", mode="max"))
    assert [" ".join(line.split()) for line in found.splitlines()[:4]] == [
        "variant runs accuracy sd diff 95 % interval p p adj d_z seconds steps memory",
        "-" * len(found.splitlines()[1]),
        "baseline 8/8 0.916 0.014 - - - - - 12.3 1200 412 MB",
        "- ema 8/8 0.900 0.016 -0.016 [-0.022, -0.010] 0.008 0.008 -2.18 123 1200 -",
    ]
    assert len({len(line) for line in found.splitlines()[:2]}) == 1
    assert "larger is better" in found


names = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=70)
numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(names, min_size=1, max_size=4, unique=True).filter(lambda names: "baseline" not in names),
    st.lists(st.lists(numbers | st.none(), min_size=1, max_size=6), min_size=5, max_size=5),
    names,
)
def test_every_table_fits_120_columns_and_says_all_names_and_counts(
    names: list[str], values: list[list[float | None]], metric: str
) -> None:
    runs = [run for name, some in zip(["baseline", *names], values, strict=False) for run in results(name, some)]
    runs = [
        Result(run.variant, run.seed, run.value, steps=10**6, seconds=1e5, memory=10**11, error=run.error)
        for run in runs
    ]
    variants = [Variant("baseline"), *(Variant(name) for name in names)]
    found = Report(runs, variants, metric=metric, mode="min")
    assert max(map(len, str(found).splitlines())) <= 120
    letters = re.sub(r"\s", "", str(found))
    for row in found.rows:
        assert f"{row.finished}/{row.planned}" in letters
    found.sentences()
    json.dumps(found.to_dict(), allow_nan=False)
    read = list(csv.reader(io.StringIO(found.csv())))
    assert [line[0] for line in read[1:]] == ["baseline", *names]
    assert {len(line) for line in read} == {18}
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in found.markdown().splitlines() if line.startswith("|")}
    assert cells == {13}
    body = found.latex().split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {11}


def test_long_names_are_wrapped_and_not_cut() -> None:
    name = "- " + " - ".join(f"handler_number_{number}" for number in range(6))
    table = str(report({name: WORSE}, [Variant("baseline"), Variant(name)])).split("\n\n")[0]
    for number in range(6):
        assert f"handler_number_{number}" in table
    assert max(map(len, table.splitlines())) <= 120


def test_a_table_that_is_too_wide_goes_on_below_itself() -> None:
    runs = [Result("baseline", seed, 1e9 + seed, steps=10**6, seconds=1e5, memory=10**11) for seed in range(6)]
    runs += [Result("- ema", seed, -1e9 - seed**2, steps=10**6, seconds=1e5, memory=10**11) for seed in range(6)]
    metric = "mean_average_precision_at_fifty_percent"
    found = str(Report(runs, [Variant("baseline"), without("ema")], metric=metric, mode="max"))
    assert max(map(len, found.splitlines())) <= 120
    assert found.count("- ema ") >= 2
    assert "100.0 GB" in found
    assert metric in found


def test_csv_holds_every_digit() -> None:
    found = report({"- ema": WORSE})
    lines = list(csv.DictReader(io.StringIO(found.csv())))
    comparison = found.rows[1].comparison
    assert comparison is not None
    assert float(lines[1]["low"]) == comparison.low
    assert float(lines[1]["p_adjusted"]) == found.rows[1].adjusted
    assert lines[0]["difference"] == lines[0]["p"] == ""


def test_latex_is_escaped_and_uses_booktabs() -> None:
    name = r"50% & $a_b$ #1 {x} ~ ^ \ <z>"
    text = report({name: WORSE}, [Variant("baseline"), Variant(name)], metric="top_1").latex()
    escaped = (
        r"50\% \& \$a\_b\$ \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} $<$z$>$ & 8/8 & 0.900 & "
        r"0.016 & $-$0.016 & [$-$0.022, $-$0.010] & 0.008 & 0.008 & $-$2.18 & 0.0 & 0 & -- \\"
    )
    assert escaped in text.splitlines()
    assert (
        r"variant & runs & top\_1 & sd & diff & 95 \% interval & p & p adj & $d_z$ & seconds & steps & memory \\"
        in text
    )
    order = [r"\begin{tabular}{lrrrrrrrrrrr}", r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
    assert [line for line in text.splitlines() if line in order] == order


def test_markdown_escapes_what_would_break_a_cell() -> None:
    text = report({"a|b_c": WORSE}, [Variant("baseline"), Variant("a|b_c")]).markdown()
    assert r"| a\|b\_c | 8/8 | 0.900 |" in text


def test_to_dict_is_json_and_holds_every_seed() -> None:
    found = json.loads(json.dumps(report({"- ema": WORSE}).to_dict(), allow_nan=False))
    assert found["rows"][1]["differences"] == {str(seed): one / 100 for seed, one in enumerate(WORSE)}
    assert found["rows"][1]["comparison"]["p"] == found["rows"][1]["adjusted"] == 2 / 256
    assert found["rows"][1]["comparison"]["exact"] is True
    assert found["rows"][1]["variant"] == {"name": "- ema", "off": ["ema"], "swapped": [], "level": {}}
    assert found["seeds_needed"] == 6
    assert found["sentences"] == report({"- ema": WORSE}).sentences()


FACTORIAL = [
    Variant("baseline", level=(("ema", True), ("mixup", True))),
    Variant("- ema", frozenset({"ema"}), level=(("ema", False), ("mixup", True))),
    Variant("- mixup", frozenset({"mixup"}), level=(("ema", True), ("mixup", False))),
    Variant("- ema - mixup", frozenset({"ema", "mixup"}), level=(("ema", False), ("mixup", False))),
]


def test_a_factorial_design_shows_its_effects() -> None:
    changes = {"- ema": WORSE, "- mixup": NOTHING, "- ema - mixup": WORSE}
    found = report(changes, FACTORIAL)
    assert [one.name for one in found.effects()] == ["ema", "mixup", "ema x mixup"]
    assert [one.name for one in found.effects(1)] == ["ema", "mixup"]
    table = str(found).split("\n\n")[1]
    assert [line.split("  ")[0] for line in table.splitlines()[2:]] == ["ema", "mixup", "ema x mixup"]
    assert "Holm over 3 effects" in str(found)
    assert "| ema x mixup | 8/8 |" in found.markdown()
    part = report({"- ema": WORSE}, FACTORIAL[:2])
    assert "estimate" not in str(part)
    with pytest.raises(ValueError, match="not a full factorial design"):
        part.effects()


def test_the_picture_shows_each_seed(tmp_path: Path) -> None:
    found = report({"- ema": [None, *WORSE[1:]], "- a$b_c": NOTHING, "- noise": [0] * 8})
    found.plot(tmp_path / "found.svg")
    tree = ElementTree.parse(tmp_path / "found.svg")
    uses = [use.get("style", "") for use in tree.iter("{http://www.w3.org/2000/svg}use")]
    assert sum("#0072b2" in style for style in uses) == 7 + 8 + 8
    found.plot(str(tmp_path / "found.png"))
    assert np.asarray(imread(tmp_path / "found.png")).shape[0] > 300


@pytest.mark.slow
def test_the_picture_needs_no_display_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    script = (
        "import sys; from signalfire.ablation.report import Report; from signalfire.ablation.results import Result, Variant\n"
        "assert not {'matplotlib', 'scipy'} & set(sys.modules)\n"
        "report = Report([Result('baseline', 0, 1.0)], [Variant('baseline'), Variant('a')], metric='loss', mode='min')\n"
        f"report.plot({str(tmp_path / 'found.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert (tmp_path / "found.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "best"}, r"Report\(mode='best'\): expected 'min' or 'max'"),
        ({"level": 95}, r"Report\(level=95\): expected a number between 0 and 1"),
        ({"baseline": "all"}, r"Report\(baseline='all'\): no such variant; there are: \['baseline', '- a'\]"),
        ({"seeds": [0]}, r"variant 'baseline' with seed 1, which is not one of the seeds: \[0\]"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    runs = results("baseline", [0.5, 0.6]) + results("- a", [0.4, 0.5])
    with pytest.raises(ValueError, match=message):
        Report(runs, [Variant("baseline"), without("a")], **({"metric": "accuracy", "mode": "max"} | options))


def test_results_that_belong_nowhere_or_twice_are_refused() -> None:
    runs = results("baseline", [0.5]) + results("- a", [0.4])
    variants = [Variant("baseline"), without("a")]
    with pytest.raises(ValueError, match="variant '- a' with seed 0, which is not one of the variants"):
        Report(runs, variants[:1], metric="accuracy", mode="max")
    with pytest.raises(ValueError, match="variant '- a' with seed 0 more than once"):
        Report([*runs, runs[-1]], variants, metric="accuracy", mode="max")
    with pytest.raises(ValueError, match=r"two variants have the same name: \['- a'\]"):
        Report(runs, [*variants, variants[1]], metric="accuracy", mode="max")


def test_all_ways_of_failing_are_counted() -> None:
    """The finished runs, and the others with the reasons that are given for them, are all that was planned."""
    for states in product(("ok", "failed", "missing"), repeat=4):
        runs = []
        for place, state in enumerate(states):
            name, seed = ("baseline", "- a")[place % 2], place // 2
            if state != "missing":
                runs += [Result(name, seed, 0.5 if state == "ok" else None, error=None if state == "ok" else "E: no")]
        found = Report(runs, [Variant("baseline"), without("a")], metric="loss", mode="min", seeds=[0, 1])
        said = "\n".join(found.warnings())
        assert said.count("failed: E: no") == states.count("failed")
        for row in found.rows:
            assert row.finished + len(row.failed) + len(row.missing) == row.planned == 2
            assert len(row.differences) + len(row.without_pair) == (row.finished if row.comparison else 0)
            assert f"{row.finished}/2" in str(found)
            assert (f'"{row.variant.name}": no run of' in said) == bool(row.missing)
