"""The findings in words: what a variant changes, how sure that is, and what limits it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from signalfire.ablation.report import Report
from signalfire.ablation.results import Variant
from tests.engine.ablation.reports import BASE, BETTER, NOTHING, WORSE, report, results, without


def test_sentences_of_leaving_one_out() -> None:
    found = report({"- ema": WORSE, "- mixup": BETTER, "- clip": NOTHING, "- noise": [0] * 8, "- sched": [-2] * 8})
    assert found.sentences() == [
        "Without ema, accuracy fell by 1.6 percentage points (95 % interval 0.8 to 2.5, p = 0.0078 adjusted, 8 seeds): "
        "it contributes.",
        "Without mixup, accuracy rose by 1.6 percentage points (95 % interval 0.8 to 2.5, p = 0.0078 adjusted, 8 seeds): "
        "the setup is better without it.",
        "Without clip, accuracy shows no significant difference with 8 seeds (change of 0.1 percentage points, 95 % interval "
        "-1.4 to 1.5, p = 1 adjusted); a difference of 2.2 percentage points would be detected with a probability of 80 %, "
        "so a smaller one may exist.",
        "Without noise, accuracy was exactly the same with all 8 seeds.",
        "Without sched, accuracy fell by 2.0 percentage points (the same with every seed, so there is no interval, "
        "p = 0.0078 adjusted, 8 seeds): it contributes.",
    ]


def test_sentences_know_which_direction_is_better() -> None:
    found = report({"- ema": BETTER, "- mixup": WORSE}, metric="loss", mode="min")
    assert "loss rose by 0.016 (95 % interval 0.010 to 0.024" in found.sentences()[0]
    assert found.sentences()[0].endswith("it contributes.")
    assert found.sentences()[1].endswith("the setup is better without it.")


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
    assert found.needed == 6
    assert found.warnings() == [
        "Too few seeds: the smallest p that 5 pairs can reach is 0.062, so no direction is reported. For a level of "
        "0.05, at least "
        "6 seeds are needed."
    ]
    for name, sentence in zip("abcde", found.sentences(), strict=True):
        assert sentence == (
            f"Without {name}, 5 seeds are too few to say in which direction accuracy changes: at least 6 seeds are needed."
        )
    assert report({"- a": WORSE[:5]}).needed == 6
    assert report({"- a": WORSE[:6]}).warnings() == []
    assert "at least 6 seeds" in " ".join(str(found).split())
    assert report({"- a": WORSE[:5]}, level=0.9).needed == 5


def test_what_is_significant_only_before_the_adjustment_is_not_called_a_difference() -> None:
    almost = [-1, -2, -1, -3, -2, -1, -1, 1]
    others = {
        "- b": [1, 1, -2, 0, 2, 1, 1, 0],
        "- c": [1, 0, 2, -1, 2, -1, 0, -1],
        "- d": [-2, 2, 0, 2, 3, 2, -1, 0],
        "- e": [-2, 3, -2, 3, 0, 1, 2, -2],
    }
    found = report({"- a": almost} | others)
    row = found.rows[1]
    assert row.comparison is not None
    assert row.adjusted is not None
    assert row.comparison.p < 0.05 < row.adjusted
    assert row.comparison.high < 0  # Student's interval, which is not adjusted
    assert row.conclusion is not None
    assert row.conclusion.high >= 0
    assert found.sentences()[0].startswith("Without a, accuracy shows no significant difference with 8 seeds")


def test_only_the_variants_with_too_few_pairs_are_named() -> None:
    base: list[float | None] = [number / 100 for number in BASE[:6]]
    runs = results("baseline", base) + results("- a", [0.8] * 5) + results("- b", [0.8] * 6)
    variants = [Variant("baseline"), without("a"), without("b")]
    found = Report(runs, variants, metric="accuracy", mode="max", seeds=range(6))
    assert found.needed == 6
    (few,) = [line for line in found.warnings() if line.startswith("Too few")]
    assert few.startswith('Too few seeds for "- a": the smallest p that 5 pairs can reach is 0.062')


def test_one_pair_or_none_is_reported_as_such() -> None:
    found = report({"- a": [-1, None], "- b": [None, None]})
    one, none = found.sentences()
    assert one.startswith(
        "Without a, runs failed: in 1 of 2 pairs, only the run of this variant; in 0, only the run of the "
        "baseline; in 0, both runs (Mc"
    )
    assert "There are too few pairs to say more: at least 6 seeds are needed." in one
    assert "fell" not in one + none
    assert "2 of its 2 runs failed" in none
    assert "0/2" in str(found)
    assert [line.split(":")[0] for line in found.warnings()] == [
        '"- a", seed 1',
        '"- b", seed 0',
        '"- b", seed 1',
        'Too few seeds for "- a"',
    ]
    json.dumps(found.to_dict(), allow_nan=False)


def test_percentage_points_are_for_accuracies_up_to_one_or_on_request() -> None:
    assert "1.6 percentage points" in report({"- a": WORSE}).sentences()[0]
    assert "fell by 0.016 (" in report({"- a": WORSE}, metric="f1").sentences()[0]
    assert "1.6 percentage points" in report({"- a": WORSE}, metric="f1", percent=True).sentences()[0]
    assert "fell by 0.016 (" in report({"- a": WORSE}, percent=False).sentences()[0]
    runs = results("baseline", [float(number) for number in BASE])
    runs += results("- a", [float(number + one) for number, one in zip(BASE, WORSE, strict=True)])
    in_percent = Report(runs, [Variant("baseline"), without("a")], metric="accuracy", mode="max")
    assert "fell by 1.6 (95 % interval 1.0 to 2.3" in in_percent.sentences()[0]


def test_several_handlers_that_are_replaced_are_all_named() -> None:
    variants = [Variant("baseline"), Variant("s", swapped=(("a", "b"), ("c", "d")))]
    (better,) = report({"s": BETTER}, variants).sentences()
    (worse,) = report({"s": WORSE}, variants).sentences()
    assert better.startswith("With b in place of a and d in place of c, accuracy rose")
    assert better.endswith("b and d do better here.")
    assert worse.endswith("a and c do better here.")


def test_what_the_baseline_replaces_too_is_no_change_of_the_variant() -> None:
    baseline = Variant("baseline", swapped=(("a", "b"),))
    (sentence,) = report({"v": WORSE}, [baseline, Variant("v", frozenset({"c"}), (("a", "b"),))]).sentences()
    assert sentence.startswith("Without c, ")
    assert sentence.endswith(": it contributes.")


def test_runs_that_the_baseline_lacks_are_counted_in_every_sentence() -> None:
    base = [None, None, *(number / 100 for number in BASE[2:])]
    found = report({"- ema": WORSE, "- mixup": [*WORSE[:7], None]}, base=base, seeds=range(9))
    baseline, ema, mixup = found.sentences()
    assert baseline == (
        'Not all runs of "baseline", the reference for all comparisons, finished. '
        "2 of its 9 runs failed (seed 0: ValueError: boom; seed 1: ValueError: boom). "
        "1 of its 9 runs is missing (seed 8)."
    )
    left_out = "The differences omit seeds 0 and 1, for which the baseline has no finished run."
    assert ema.endswith(f"1 of its 9 runs is missing (seed 8). {left_out}")
    assert mixup.endswith(
        f"1 of its 9 runs failed (seed 7: ValueError: boom). 1 of its 9 runs is missing (seed 8). {left_out}"
    )
    assert '"- ema": the differences omit seeds 0 and 1, for which the baseline has no finished run' in found.warnings()


def test_a_level_that_no_number_of_seeds_reaches_is_said() -> None:
    found = report({"- a": WORSE}, level=0.9999999)
    assert found.needed is None
    (warning,) = found.warnings()
    assert warning.endswith("For a level of 1e-07, no number of seeds is enough.")
    assert found.sentences()[0].endswith("accuracy changes: no number of seeds is enough.")


FACTORIAL = [
    Variant("baseline", level=(("ema", True), ("mixup", True))),
    Variant("- ema", frozenset({"ema"}), level=(("ema", False), ("mixup", True))),
    Variant("- mixup", frozenset({"mixup"}), level=(("ema", True), ("mixup", False))),
    Variant("- ema - mixup", frozenset({"ema", "mixup"}), level=(("ema", False), ("mixup", False))),
]


@pytest.mark.moderate
def test_effects_and_interactions_have_sentences() -> None:
    # ema is worth 4 points with mixup and 2 without it; mixup nothing on average: -1 alone, and +1 with ema.
    changes: dict[str, Sequence[float | None]] = {
        "- ema": [-4.1, -3.9, -4.2, -3.8, -4.0, -4.1, -3.9, -4.0],
        "- mixup": [-1, -1.1, -0.9, -1, -1.2, -0.8, -1, -1],
        "- ema - mixup": [-3.0, -3.1, -2.9, -3.0, -3.2, -2.8, -3.1, -2.9],
    }
    ema, mixup, both = report(changes, FACTORIAL).sentences()[3:]
    assert ema.startswith(
        "ema raises accuracy by 3.0 percentage points, averaged over the other factors (95 % interval 2."
    )
    assert ema.endswith(", p = 0.0078 adjusted, 8 seeds): it contributes.")
    assert mixup.startswith("mixup has no significant effect on accuracy (")
    assert mixup.endswith(" would be detected with a probability of 80 %, so a smaller one may exist.")
    assert both.startswith("The interaction ema x mixup raises accuracy by 1.0 percentage points (95 % interval 0.")
    assert "contributes" not in both
    worse = report(changes, FACTORIAL, mode="min").sentences()[3]
    assert worse.endswith("): the setup is better without it.")
    wide = report(changes, FACTORIAL, margin=0.05).sentences()[3:]
    assert all(" by less than 5.0 percentage points (" in sentence for sentence in wide)


def test_effects_of_too_few_seeds_and_of_failed_runs_are_said() -> None:
    few = {"- ema": WORSE[:4], "- mixup": NOTHING[:4], "- ema - mixup": WORSE[:4]}
    sentences = report(few, FACTORIAL).sentences()[3:]
    assert (
        sentences[0]
        == "ema: 4 seeds are too few to say in which direction accuracy changes: at least 6 seeds are needed."
    )
    failed: dict[str, Sequence[float | None]] = {"- ema": WORSE, "- mixup": [None, *WORSE[1:]], "- ema - mixup": WORSE}
    ema = report(failed, FACTORIAL).sentences()[3]
    assert ema.endswith(" (The estimate omits seed 0, where not all runs finished, so it is conditional on finishing.)")
    assert "contributes" not in ema
