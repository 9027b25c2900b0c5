"""Simulates studies whose true differences are known, and counts how often the reports of ``signalfire.ablation`` are right.

    python tests/campaigns/calibration.py [--repetitions 3000] [--seeds 5 8 12] [--distributions normal t3] [--json FILE]
    python tests/campaigns/calibration.py --last

Each repetition is a study of a baseline and a family of five variants that share its seeds, once with no variant differing and
once with two that do. Its runs go through the rows of a report: step-down test over joint sign flips, simultaneous intervals,
verdicts. Counted are
- how often all five intervals of a report hold together, with no variant differing and with two that do;
- how often at least one verdict of a report is wrong: a direction for a variant that does not differ, or the wrong one;
- beside it, how often one of the five is found wrongly where nothing is adjusted, on the same numbers;
- the level of the sign-flip test: how often p <= 0.05 for one variant that does not differ. With n seeds p is a multiple of
  2**(1 - n), so that the level that can be reached is the largest such multiple up to 0.05;
- the power: how often a variant that differs by 1.5 standard deviations is found, by its own p; how often the report finds one of
  the two that differ, on average, and how often both; and how often Holm's correction, which is not used, would;
- the coverage of the 95 % Student-t interval of one variant, which reports show for runs that failed, costs and curves, of a
  variant that does not differ and of one that does; and that of a percentile bootstrap, which only aggregates over tasks use.

Distributions of the runs of one seed, besides what they have in common:
- normal;
- exponential: each run is skewed, the differences are not;
- exponential differences: the differences are skewed themselves, as if a variant failed badly now and then. With a mean of 0 they
  are not symmetric, so that the sign-flip test promises nothing here;
- t3: heavy tails, Student's t with 3 degrees of freedom;
- accuracies: the share of 250 test samples that are classified rightly, with ties.

What this cannot show: how the metrics of real runs are distributed, and what a study that is read by many ways finds by chance.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from signalfire.ablation import BASELINE
from signalfire.ablation.results import Result, Variant
from signalfire.ablation.rows import Row, Runs, make_rows
from signalfire.ablation.statistics import fewest_seeds, holm

RESULT = Path(__file__).parent / "results" / "calibration.json"
FAMILY, DIFFERING = 5, 2
LEVEL, ALPHA = 0.95, 0.05
SAMPLES = 250
"""How large the test set of the accuracies is."""
EFFECT = 1.5
"""By how many standard deviations of a difference a variant differs."""
RESAMPLES = 4000

Numbers = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int, int], tuple[Numbers, float]]
"""From a generator, repetitions, seeds and how many differ: runs of (repetition, baseline and variants, seed), and the effect."""


def continuous(noise: Callable[[np.random.Generator, tuple[int, ...]], Numbers], sd: float, in_baseline: bool) -> Draw:
    """Runs with a part that the seed gives to all of them alike, and noise of their own of this standard deviation."""

    def draw(generator: np.random.Generator, repetitions: int, n: int, differing: int) -> tuple[Numbers, float]:
        effect = EFFECT * sd * (math.sqrt(2) if in_baseline else 1)
        runs = generator.normal(0, 2, (repetitions, 1, n)) + np.zeros((1, FAMILY + 1, 1))
        first = 0 if in_baseline else 1
        runs[:, first:] += noise(generator, (repetitions, FAMILY + 1 - first, n))
        runs[:, 1 : differing + 1] += effect
        return runs, effect

    return draw


def accuracies(generator: np.random.Generator, repetitions: int, n: int, differing: int) -> tuple[Numbers, float]:
    effect = 0.05  # 1.57 standard deviations of a difference
    chances = np.clip(generator.normal(0.85, 0.03, (repetitions, 1, n)), 0.7, 0.93) + np.zeros((1, FAMILY + 1, 1))
    chances[:, 1 : differing + 1] += effect
    return generator.binomial(SAMPLES, chances) / SAMPLES, effect


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": continuous(lambda generator, shape: generator.normal(size=shape), 1.0, True),
    "exponential": continuous(lambda generator, shape: generator.exponential(size=shape), 1.0, True),
    "exponential differences": continuous(lambda generator, shape: generator.exponential(size=shape) - 1, 1.0, False),
    "t3": continuous(lambda generator, shape: generator.standard_t(3, size=shape), math.sqrt(3), True),
    "accuracies": accuracies,
}


def bootstrap_coverage(differences: Numbers, truth: float, generator: np.random.Generator) -> float:
    """How often the percentile interval of the mean covers the truth; all repetitions share their resamples."""
    n = differences.shape[1]
    weights = generator.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n
    covered = 0
    for some in np.array_split(differences, max(1, len(differences) // 500)):
        low, high = np.quantile(some @ weights.T, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
        # Means are sums that are rounded: a bound that is the truth itself has to count as covering it.
        covered += int(((low <= truth + 1e-9) & (truth - 1e-9 <= high)).sum())
    return covered / len(differences)


NAMES = [BASELINE, *(f"variant {place}" for place in range(1, FAMILY + 1))]


def rows_of(study: Sequence[Sequence[float]]) -> list[Row]:
    """The rows of the report on these runs, of (variant, seed), without that of the baseline."""
    runs = [
        Result(name, seed, value)
        for name, values in zip(NAMES, study, strict=True)
        for seed, value in enumerate(values)
    ]
    variants = [Variant(name) for name in NAMES]
    return make_rows(Runs(runs, variants, BASELINE, range(len(study[0])), "max"), "metric", LEVEL)[1:]


def calibrate(distribution: str, n: int, repetitions: int, seed: int = 0) -> dict[str, float]:
    """The rates of one distribution and number of seeds."""
    generator = np.random.default_rng([seed, n, zlib.crc32(distribution.encode())])
    counts: dict[str, float] = {}

    def count(what: str, number: float) -> None:
        counts[what] = counts.get(what, 0) + number

    bootstrap = {}
    for differing, where in ((0, "none differs"), (DIFFERING, "two differ")):
        runs, effect = DISTRIBUTIONS[distribution](generator, repetitions, n, differing)
        truths = [effect] * differing + [0.0] * (FAMILY - differing)
        bootstrap[where] = bootstrap_coverage(runs[:, 1] - runs[:, 0], truths[0], generator)
        for study in runs.tolist():
            found = rows_of(study)
            p = [row.p for row in found if row.p is not None]
            ends = [row.conclusion for row in found if row.conclusion is not None]
            first = found[0].comparison
            assert len(p) == len(ends) == FAMILY
            assert first is not None
            # Means are sums that are rounded: a bound that is the truth itself has to count as covering it.
            inside = [end.low - 1e-9 <= truth <= end.high + 1e-9 for end, truth in zip(ends, truths, strict=True)]
            wrong = [end.sign not in (0, 1 if truth else 0) for end, truth in zip(ends, truths, strict=True)]
            count(f"all covered, {where}", all(inside))
            count(f"any verdict wrong, {where}", any(wrong))
            count(f"any wrong without, {where}", min(p[differing:]) <= ALPHA)
            count(f"covered, {where}", first.low <= truths[0] <= first.high)
            count(f"no interval, {where}", math.isnan(first.low))
            if differing:
                right = [end.verdict == "better" for end in ends[:differing]]
                count("found alone", p[0] <= ALPHA)
                count("found", sum(right) / differing)
                count("found both", all(right))
                count("found both with Holm", max(holm(p)[:differing]) <= ALPHA)
            else:
                count("wrong alone", p[0] <= ALPHA)
    rates = {what: round(number / repetitions, 5) for what, number in counts.items()}
    return {
        "family_coverage": rates["all covered, none differs"],
        "family_coverage_two_differ": rates["all covered, two differ"],
        "family_wrong": rates["any verdict wrong, none differs"],
        "family_wrong_two_differ": rates["any verdict wrong, two differ"],
        "family_wrong_uncorrected": rates["any wrong without, none differs"],
        "level": rates["wrong alone"],
        "level_attainable": math.floor(ALPHA * 2 ** (n - 1)) / 2 ** (n - 1),
        "power_alone": rates["found alone"],
        "power": rates["found"],
        "power_both": rates["found both"],
        "power_both_with_holm": rates["found both with Holm"],
        "coverage": rates["covered, none differs"],
        "coverage_differing": rates["covered, two differ"],
        "no_interval": rates["no interval, none differs"],
        "coverage_bootstrap": round(bootstrap["none differs"], 5),
        "coverage_bootstrap_differing": round(bootstrap["two differ"], 5),
    }


def summary(found: dict[str, Any]) -> str:
    lines = [
        f"{found['repetitions']} repetitions each, families of {found['family']}: the standard error of a rate of 0.95 is "
        f"{found['standard_error']:.4f}; {found['seconds']:.0f} s",
        "family: all intervals hold, with none and two differing; any verdict wrong, likewise, and without a correction",
        "power: of one alone; in the report, of each; of both; of both with Holm",
        f"{'':24}{'seeds':>6}{'family':>16}{'wrong':>14}{'uncorr.':>9}{'level':>7}{'(most)':>8}{'alone':>7}{'power':>7}{'both':>6}"
        f"{'Holm':>6}{'Student-t':>14}{'bootstrap':>14}",
    ]
    for distribution, of_seeds in found["rates"].items():
        for n, rate in of_seeds.items():
            lines.append(
                f"{distribution:24}{n:>6}"
                f"{rate['family_coverage']:>8.3f}{rate['family_coverage_two_differ']:>8.3f}"
                f"{rate['family_wrong']:>7.3f}{rate['family_wrong_two_differ']:>7.3f}{rate['family_wrong_uncorrected']:>9.3f}"
                f"{rate['level']:>7.3f}{rate['level_attainable']:>8.4f}"
                f"{rate['power_alone']:>7.2f}{rate['power']:>7.2f}{rate['power_both']:>6.2f}{rate['power_both_with_holm']:>6.2f}"
                f"{rate['coverage']:>7.3f}{rate['coverage_differing']:>7.3f}"
                f"{rate['coverage_bootstrap']:>7.3f}{rate['coverage_bootstrap_differing']:>7.3f}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 8, 12], help="of a study (5 8 12)")
    parser.add_argument("--distributions", nargs="+", choices=list(DISTRIBUTIONS), default=list(DISTRIBUTIONS))
    parser.add_argument("--seed", type=int, default=0, help="of the simulation (0)")
    parser.add_argument(
        "--json", default=str(RESULT), help=f"where the result is written ({RESULT}); - for stdout alone"
    )
    parser.add_argument("--last", action="store_true", help="print the last result")
    options = parser.parse_args(arguments)
    if options.last:
        print(summary(json.loads(RESULT.read_text())))
        return 0
    began = time.monotonic()
    rates = {
        distribution: {str(n): calibrate(distribution, n, options.repetitions, options.seed) for n in options.seeds}
        for distribution in options.distributions
    }
    found = {
        "repetitions": options.repetitions,
        "family": FAMILY,
        "fewest_seeds": fewest_seeds(1),
        "standard_error": round(math.sqrt(LEVEL * (1 - LEVEL) / options.repetitions), 5),
        "seconds": round(time.monotonic() - began, 1),
        "rates": rates,
    }
    text = json.dumps(found, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
