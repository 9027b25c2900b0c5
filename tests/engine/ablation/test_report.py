"""What a report says of results that are known, in each of its forms, and that no run is left out without a word."""

from __future__ import annotations

import csv
import io
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signalfire.ablation.report import Report
from signalfire.ablation.results import Result, Variant
from tests.engine.ablation.reports import BASE, NOTHING, WORSE, report, results, without


@pytest.mark.moderate
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
    assert "7 of 8 pairs" in (tmp_path / "found.svg").read_text()


def test_a_missing_run_is_shown_and_named() -> None:
    full = report({"- ema": WORSE, "- mixup": WORSE})
    runs = [
        Result(row.variant.name, seed, value)
        for row in full.rows
        for seed, value in row.values.items()
        if (row.variant.name, seed) not in [("- ema", 3), ("- ema", 5)]
    ]
    found = Report(runs, [row.variant for row in full.rows], metric="accuracy", mode="max")
    assert found.rows[1].missing == (3, 5)
    assert "6/8" in str(found)
    assert '"- ema": no run with seeds 3 and 5' in str(found)
    assert "2 of its 8 runs are missing (seeds 3 and 5)." in found.sentences()[0]
    assert "missing" not in found.sentences()[1]


def test_a_failed_baseline_takes_the_pair_away_and_this_is_said() -> None:
    base: list[float | None] = [number / 100 for number in BASE]
    base[4] = None
    found = report({"- ema": WORSE}, base=base)
    assert found.rows[1].finished == 8
    assert found.rows[1].without_pair == (4,)
    assert found.rows[1].comparison is not None
    assert found.rows[1].comparison.n == 7
    assert '"- ema": the differences omit seed 4, for which the baseline has no finished run' in found.warnings()
    assert '"baseline", seed 4: failed: ValueError: boom' in found.warnings()
    baseline, ema = found.sentences()
    assert "1 of its 8 runs failed (seed 4: ValueError: boom)." in baseline
    assert ema.endswith("The differences omit seed 4, for which the baseline has no finished run.")


def test_a_report_without_any_result_is_one_of_missing_runs() -> None:
    found = Report([], [Variant("baseline"), without("a")], metric="accuracy", mode="max", seeds=range(3))
    assert '"- a": no run with seeds 0, 1 and 2' in str(found)
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
    assert "p < 0.001, from random sign patterns" in found.sentences()[0]
    assert "random" not in str(report({"- ema": WORSE}))


def test_the_terminal_table() -> None:
    runs = results("baseline", [number / 100 for number in BASE], seconds=12.34, steps=1200, memory=412_000_000)
    runs += results("- ema", [(n + d) / 100 for n, d in zip(BASE, WORSE, strict=True)], seconds=123.4, steps=1200)
    found = str(Report(runs, [Variant("baseline"), without("ema")], metric="accuracy", mode="max"))
    assert [" ".join(line.split()) for line in found.splitlines()[:4]] == [
        "variant runs accuracy sd diff 95 % interval p p adj d_z seconds steps memory",
        "-" * len(found.splitlines()[1]),
        "baseline 8/8 0.916 0.014 - - - - - 12.3 1200 412 MB",
        "- ema 8/8 0.900 0.016 -0.016 [-0.023, -0.010] 0.008 0.008 -2.18 123 1200 -",
    ]
    assert len({len(line) for line in found.splitlines()[:2]}) == 1
    assert "larger is better" in found


names = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=70)
numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


@pytest.mark.moderate
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
    assert {len(line) for line in read} == {22}
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in found.markdown().splitlines() if line.startswith("|")}
    assert cells == {13}
    body = found.latex().split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {11}


def test_csv_holds_every_digit() -> None:
    found = report({"- ema": WORSE})
    lines = list(csv.DictReader(io.StringIO(found.csv())))
    conclusion = found.rows[1].conclusion
    assert conclusion is not None
    assert float(lines[1]["low"]) == conclusion.low
    assert (lines[0]["verdict"], lines[1]["verdict"], lines[1]["failed_pairs_variant"]) == ("", "worse", "0")
    assert float(lines[1]["p_adjusted"]) == found.rows[1].adjusted
    assert lines[0]["difference"] == lines[0]["p"] == ""


def test_latex_is_escaped_and_uses_booktabs() -> None:
    name = r"50% & $a_b$ #1 {x} ~ ^ \ <z>"
    text = report({name: WORSE}, [Variant("baseline"), Variant(name)], metric="top_1").latex()
    escaped = (
        r"50\% \& \$a\_b\$ \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} $<$z$>$ & 8/8 & 0.900 & "
        r"0.016 & $-$0.016 & [$-$0.023, $-$0.010] & 0.008 & 0.008 & $-$2.18 & 0.0 & 0 & -- \\"
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
    assert found["rows"][1]["variant"] == {"name": "- ema", "off": ["ema"], "swapped": [], "level": {}, "arguments": {}}
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
    assert "jointly over 3 effects" in str(found)
    assert "| ema x mixup | 8/8 |" in found.markdown()
    part = report({"- ema": WORSE}, FACTORIAL[:2])
    assert "estimate" not in str(part)
    with pytest.raises(ValueError, match="this is not a full factorial design"):
        part.effects()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "best"}, r"Report\(mode='best'\): expected 'min' or 'max'"),
        ({"level": 95}, r"Report\(level=95\): expected a number between 0 and 1"),
        (
            {"baseline": "all"},
            r"Report\(baseline='all'\): no variant has this name; the variants are \['baseline', '- a'\]",
        ),
        ({"seeds": [0]}, r"a run has variant 'baseline' and seed 1, but the only seeds are \[0\]"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    runs = results("baseline", [0.5, 0.6]) + results("- a", [0.4, 0.5])
    with pytest.raises(ValueError, match=message):
        Report(runs, [Variant("baseline"), without("a")], **({"metric": "accuracy", "mode": "max"} | options))


@pytest.mark.moderate
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
            assert (f'"{row.variant.name}": no run with' in said) == bool(row.missing)
