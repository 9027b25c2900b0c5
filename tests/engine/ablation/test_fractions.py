"""Fractional factorial designs: the aliases of textbooks, and estimates that are the sums of aliased effects."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from signalfire.ablation import Factorial, FractionalFactorial, Report, Result, effects
from tests.engine.ablation.builds import make_study

LETTERS = "ABCDEFGHJKLMNOP"  # without I, which is the identity


def fraction(count: int, **generators: str) -> FractionalFactorial:
    return FractionalFactorial(list(LETTERS[:count]), generators={name: list(of) for name, of in generators.items()})


def short(name: str) -> str:
    return name.replace(" x ", "")


def words(design: FractionalFactorial) -> set[str]:
    return {"".join(word) for word in design.words}


def chains(design: FractionalFactorial, most: int = 2) -> dict[str, set[str]]:
    """The aliases of up to so many factors."""
    return {
        short(name): {short(one) for one in others if len(short(one)) <= most}
        for name, others in design.aliases().items()
    }


# ---- textbooks: Montgomery, Design and Analysis of Experiments, chapter 8; Box, Hunter and Hunter, chapters 6 and 7 -----


def test_the_half_fraction_of_four_factors() -> None:
    design = FractionalFactorial(list("ABCD"), resolution=4)
    assert words(design) == {"ABCD"}
    assert design.generators == {"D": ("A", "B", "C")}
    assert chains(design, 3) == {
        "A": {"BCD"}, "B": {"ACD"}, "C": {"ABD"}, "D": {"ABC"}, "AB": {"CD"}, "AC": {"BD"}, "AD": {"BC"},
    }  # fmt: skip


def test_the_quarter_fraction_of_five_factors() -> None:
    design = fraction(5, D="AB", E="AC")
    assert words(design) == {"ABD", "ACE", "BCDE"}
    assert design.resolution == 3
    assert chains(design, 3) == {
        "A": {"BD", "CE"}, "B": {"AD", "CDE"}, "C": {"AE", "BDE"}, "D": {"AB", "BCE"}, "E": {"AC", "BCD"},
        "BC": {"DE", "ACD", "ABE"}, "BE": {"CD", "ABC", "ADE"},
    }  # fmt: skip
    assert words(FractionalFactorial(list("ABCDE"), resolution=3)) == {"ABD", "ACE", "BCDE"}


def test_the_saturated_sixteenth_fraction_of_seven_factors() -> None:
    design = fraction(7, D="AB", E="AC", F="BC", G="ABC")
    assert words(design) == {
        "ABD", "ACE", "BCF", "ABCG", "BCDE", "ACDF", "CDG", "ABEF", "BEG", "AFG", "DEF", "ADEG", "BDFG", "CEFG", "ABCDEFG",
    }  # fmt: skip
    assert chains(design) == {
        "A": {"BD", "CE", "FG"}, "B": {"AD", "CF", "EG"}, "C": {"AE", "BF", "DG"}, "D": {"AB", "CG", "EF"},
        "E": {"AC", "BG", "DF"}, "F": {"BC", "AG", "DE"}, "G": {"CD", "BE", "AF"},
    }  # fmt: skip
    assert Counter(map(len, FractionalFactorial(list(LETTERS[:7]), resolution=3).words)) == Counter(
        map(len, design.words)
    )


def test_the_quarter_fraction_of_six_factors() -> None:
    design = fraction(6, E="ABC", F="BCD")
    assert words(design) == {"ABCE", "BCDF", "ADEF"}
    found = chains(design)
    assert {name: those for name, those in found.items() if len(name) == 2} == {
        "AB": {"CE"}, "AC": {"BE"}, "AD": {"EF"}, "AE": {"BC", "DF"}, "AF": {"DE"}, "BD": {"CF"}, "BF": {"CD"},
    }  # fmt: skip
    assert all(not found[letter] for letter in "ABCDEF")  # resolution IV


# The number of words of each length, of designs of minimum aberration: Chen, Sun and Wu, A Catalogue of Two-level and Three-level
# Fractional Factorial Designs with Small Runs, International Statistical Review 61, 1993.
CATALOGUE = [
    (3, 3, 4, {3: 1}),
    (5, 5, 16, {5: 1}),
    (6, 3, 8, {3: 4, 4: 3}),
    (6, 4, 16, {4: 3}),
    (7, 4, 16, {4: 7}),
    (8, 4, 16, {4: 14, 8: 1}),
    (8, 5, 64, {5: 2, 6: 1}),
    (9, 3, 16, {3: 4, 4: 14, 5: 8, 7: 4, 8: 1}),
    (9, 4, 32, {4: 6, 5: 8, 8: 1}),
    (10, 3, 16, {3: 8, 4: 18, 5: 16, 6: 8, 7: 8, 8: 5}),
    (10, 4, 32, {4: 10, 5: 16, 8: 5}),
    (15, 3, 16, {3: 35, 4: 105, 5: 168, 6: 280, 7: 435, 8: 435, 9: 280, 10: 168, 11: 105, 12: 35, 15: 1}),
]


@pytest.mark.parametrize("case", CATALOGUE, ids=str)
def test_the_fraction_of_a_resolution_is_the_smallest_and_of_minimum_aberration(case: Any) -> None:
    count, resolution, runs, lengths = case
    design = FractionalFactorial(list(LETTERS[:count]), resolution=resolution)
    assert len(design.variants([])) == runs
    assert Counter(map(len, design.words)) == lengths
    assert design.resolution >= resolution


# ---- variants and estimates -----------------------------------------------------------------------------------------


def test_the_runs_are_a_part_of_all_combinations_with_the_baseline_among_them() -> None:
    every = {variant.name: variant for variant in Factorial(list("ABCDE")).variants([])}
    made = fraction(5, D="AB", E="AC").variants([])
    assert made[0].name == "baseline"
    assert len({variant.name for variant in made}) == 8
    for variant in made:
        assert variant == every[variant.name]
        sign = {name: 1 if on else -1 for name, on in variant.level}
        assert sign["D"] == sign["A"] * sign["B"]
        assert sign["E"] == sign["A"] * sign["C"]
    groups = FractionalFactorial({"A": ["ema", "swa"], "B": ["clip"], "C": ["mixup"]}, resolution=3).variants([])
    assert {variant.off for variant in groups if not dict(variant.level)["A"]} == {
        frozenset(["ema", "swa", "mixup"]),
        frozenset(["ema", "swa", "clip"]),
    }


def values_of(names: Sequence[str], cells: Sequence[Any], seeds: int = 6) -> list[Result]:
    """Runs in which all main effects and interactions are real, and differ by seed."""
    generator = np.random.default_rng(3)
    sizes = {
        those: generator.normal(size=seeds)
        for size in range(len(names) + 1)
        for those in itertools.combinations(names, size)
    }
    runs = []
    for variant in cells:
        on = dict(variant.level)
        total = sum(np.prod([1 if on[name] else -1 for name in those]) * own for those, own in sizes.items())
        runs += [Result(variant.name, seed, float(value)) for seed, value in enumerate(np.asarray(total))]
    return runs


def full_effects(names: Sequence[str]) -> Mapping[str, float]:
    cells = Factorial(names, limit=128).variants([])
    found = effects(values_of(names, cells), names, len(names), variants=cells)
    return {"".join(one.factors): one.comparison.mean for one in found}


@pytest.mark.moderate
@pytest.mark.parametrize(
    "design", [FractionalFactorial(list("ABCD"), resolution=4), fraction(5, D="AB", E="AC")], ids=["ABCD", "D=AB, E=AC"]
)
def test_an_estimate_is_the_sum_of_the_effects_that_are_aliases(design: FractionalFactorial) -> None:
    names, cells = list(design.factors), design.variants([])
    every = full_effects(names)
    found = Report(values_of(names, cells), cells, metric="loss", mode="min").effects()
    assert len(found) == len(cells) - 1  # as many as a seed has differences
    for one in found:
        chain = ["".join(one.factors), *("".join(other) for other in one.aliases)]
        assert one.comparison.mean == pytest.approx(sum(every[name] for name in chain), abs=1e-12)
    assert {
        " x ".join(one.factors): tuple(" x ".join(other) for other in one.aliases) for one in found
    } == design.aliases()


def test_estimates_are_those_of_least_squares() -> None:
    design = fraction(5, D="AB", E="AC")
    cells = design.variants([])
    runs = values_of("ABCDE", cells)
    found = Report(runs, cells, metric="loss", mode="min").effects()
    sign = {variant.name: {name: 1 if on else -1 for name, on in variant.level} for variant in cells}
    columns = [[float(np.prod([sign[run.variant][name] for name in one.factors])) / 2 for run in runs] for one in found]
    columns += [[float(run.seed == seed) for run in runs] for seed in range(6)]
    solved, _, rank, _ = np.linalg.lstsq(np.array(columns).T, np.array([run.value for run in runs]), rcond=None)
    assert rank == len(columns)
    assert [one.comparison.mean for one in found] == pytest.approx(solved[: len(found)], abs=1e-12)


@pytest.mark.moderate
def test_the_report_names_the_aliases_and_draws_no_conclusion_on_one_handler() -> None:
    design = FractionalFactorial(["ema", "mixup", "clip"], resolution=3)
    cells = design.variants([])
    runs = [
        Result(variant.name, seed, 0.5 + int(dict(variant.level)["ema"]) / 4 + seed / 100 + place * seed / 10**4)
        for place, variant in enumerate(cells)
        for seed in range(8)
    ]
    report = Report(runs, cells, metric="accuracy", mode="max")
    sentences = [one for one in report.sentences() if "and its alias" in one]
    assert len(sentences) == 3
    assert sentences[0].startswith("The sum of ema and its alias mixup x clip raises accuracy by 24.9")
    assert not any("it contributes" in one for one in sentences)
    text = " ".join(str(report).split())
    assert "ema + mixup x clip" in text
    assert "effects joined by + are aliases, and the estimate is their sum" in text
    # A combination of which one run failed leaves its seed out, as in a full design.
    failed = [Result(one.variant, one.seed, None, error="ValueError: no") if one is runs[0] else one for one in runs]
    assert Report(failed, cells, metric="accuracy", mode="max").effects()[0].left_out == (0,)
    # Without a cell, it is no fraction any more, and there are no effects.
    some = Report([one for one in runs if one.variant != cells[1].name], cells[:1] + cells[2:], metric="a", mode="max")
    with pytest.raises(ValueError, match="this is not a full factorial design"):
        some.effects()


def test_a_long_chain_of_aliases_shows_the_short_ones() -> None:
    design = fraction(7, D="AB", E="AC", F="BC", G="ABC")
    cells = design.variants([])
    found = Report(values_of(LETTERS[:7], cells), cells, metric="loss", mode="min").effects()
    assert found[0].name == "A + B x D + C x E + F x G + 12 of more factors"
    assert len(found[0].aliases) == 15
    cells = Factorial(list("ABC")).variants([])
    assert Report(values_of("ABC", cells), cells, metric="loss", mode="min").effects()[0].name == "A"


@pytest.mark.slow
def test_a_study_runs_the_fraction() -> None:
    design = FractionalFactorial(["ema", "gradient_clipping", "gradient_noise"], resolution=3)
    report = make_study(seeds=range(2)).run(design, workers=0)
    assert [row.finished for row in report.rows] == [2] * 4
    first = report.effects()[0]
    values = {row.variant.name: np.array(list(row.values.values())) for row in report.rows}
    on = [row.variant.name for row in report.rows if "ema" not in row.variant.off]
    expected = np.sum([value if name in on else -value for name, value in values.items()], axis=0) / 2
    assert list(first.contrasts.values()) == pytest.approx(list(expected))


def test_what_is_wrong_is_refused() -> None:
    for options, error, what in (
        ({}, ValueError, "pass either resolution="),
        ({"resolution": 3, "generators": {"D": ["A", "B"]}}, ValueError, "pass either resolution="),
        ({"resolution": 2}, ValueError, "resolution"),
        ({"resolution": 5}, ValueError, "a fraction with 4 factors has a resolution of at most 4"),
        ({"generators": {}}, TypeError, "expected a dict that maps factors to products"),
        ({"generators": {"D": "ABC"}}, TypeError, "expected a list of names"),
        ({"generators": {"X": ["A", "B"]}}, ValueError, "'X' is not a factor; the factors are A, B, C, D"),
        ({"generators": {"D": ["A", "X"]}}, ValueError, "'X' is not a factor"),
        ({"generators": {"D": ["A"]}}, ValueError, "a product of two or more different factors"),
        (
            {"generators": {"C": ["A", "B"], "D": ["A", "C"]}},
            ValueError,
            "the generator of 'D' uses 'C', which has a generator itself",
        ),
        ({"generators": {"C": ["A", "B"], "D": ["A", "B"]}}, ValueError, "C and D would always be on or off together"),
        ({"resolution": 4, "limit": 4}, ValueError, "4 factors need more than limit=4 runs"),
        ({"generators": {"D": ["A", "B"]}, "limit": 4}, ValueError, "8 runs per seed, more than limit=4"),
    ):
        with pytest.raises(error, match=what):
            FractionalFactorial(list("ABCD") if "D" not in options else "", **options)
    with pytest.raises(ValueError, match="expected 3 to 15 factors, got 2; for fewer factors, use Factorial"):
        FractionalFactorial(["A", "B"], resolution=3)
