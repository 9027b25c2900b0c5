"""Simulates studies whose true differences are known, and counts how often the statistics of ``signalfire.ablation`` are right.

    python tests/campaigns/calibration.py [--repetitions 3000] [--seeds 5 8 12] [--distributions normal t3] [--json FILE]
    python tests/campaigns/calibration.py --last

Each repetition is a study of a baseline and a family of five variants that share its seeds, once with no variant differing and
once with two that do. Counted are
- the coverage of the 95 % Student-t interval, of a variant that does not differ and of one that does, and, beside it on the same
  numbers, that of a percentile bootstrap, which is not used;
- the level of the sign-flip test: how often p <= 0.05 for one variant that does not differ. With n seeds p is a multiple of
  2**(1 - n), so that the level that can be reached is the largest such multiple up to 0.05;
- how often at least one of a family is found wrongly, with Holm and without, where none differs and where two do;
- the power: how often a variant that differs by 1.5 standard deviations is found.

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

from signalfire.ablation.statistics import compare, exact, fewest_seeds, holm

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


def calibrate(distribution: str, n: int, repetitions: int, seed: int = 0) -> dict[str, float]:
    """The rates of one distribution and number of seeds."""
    generator = np.random.default_rng([seed, n, zlib.crc32(distribution.encode())])
    counts: dict[str, int] = {}

    def count(what: str, number: float) -> None:
        counts[what] = counts.get(what, 0) + int(number)

    bootstrap = {}
    for differing, where in ((0, "none differs"), (DIFFERING, "two differ")):
        runs, effect = DISTRIBUTIONS[distribution](generator, repetitions, n, differing)
        truth = effect if differing else 0.0
        bootstrap[where] = bootstrap_coverage(runs[:, 1] - runs[:, 0], truth, generator)
        for study in runs.tolist():
            baseline = [exact(value) for value in study[0]]
            found = [
                compare([exact(value) - other for value, other in zip(variant, baseline, strict=True)], level=LEVEL)
                for variant in study[1:]
            ]
            p = [one.p for one in found]
            adjusted = holm(p)
            count(f"covered, {where}", found[0].low <= truth <= found[0].high)
            count(f"no interval, {where}", math.isnan(found[0].low))
            count(f"any wrong with Holm, {where}", min(adjusted[differing:]) <= ALPHA)
            count(f"any wrong without, {where}", min(p[differing:]) <= ALPHA)
            if differing:
                count("found alone", p[0] <= ALPHA)
                count("found with Holm", sum(one <= ALPHA for one in adjusted[:differing]) / differing == 1)
            else:
                count("wrong alone", p[0] <= ALPHA)
    rates = {what: round(number / repetitions, 5) for what, number in counts.items()}
    return {
        "coverage": rates["covered, none differs"],
        "coverage_differing": rates["covered, two differ"],
        "no_interval": rates["no interval, none differs"],
        "coverage_bootstrap": round(bootstrap["none differs"], 5),
        "coverage_bootstrap_differing": round(bootstrap["two differ"], 5),
        "level": rates["wrong alone"],
        "level_attainable": math.floor(ALPHA * 2 ** (n - 1)) / 2 ** (n - 1),
        "family_wrong": rates["any wrong with Holm, none differs"],
        "family_wrong_two_differ": rates["any wrong with Holm, two differ"],
        "family_wrong_uncorrected": rates["any wrong without, none differs"],
        "power_alone": rates["found alone"],
        "power_both_with_holm": rates["found with Holm"],
    }


def summary(found: dict[str, Any]) -> str:
    lines = [
        f"{found['repetitions']} repetitions each, families of {found['family']}: the standard error of a rate of 0.95 is "
        f"{found['standard_error']:.4f}; {found['seconds']:.0f} s",
        f"{'':24}{'seeds':>6}{'Student-t':>18}{'bootstrap':>18}{'level':>8}{'(most)':>8}{'family':>8}{'2 of 5':>8}"
        f"{'no Holm':>8}{'power':>8}{'Holm':>8}",
    ]
    for distribution, of_seeds in found["rates"].items():
        for n, rate in of_seeds.items():
            lines.append(
                f"{distribution:24}{n:>6}"
                f"{rate['coverage']:>9.3f}{rate['coverage_differing']:>9.3f}"
                f"{rate['coverage_bootstrap']:>9.3f}{rate['coverage_bootstrap_differing']:>9.3f}"
                f"{rate['level']:>8.4f}{rate['level_attainable']:>8.4f}{rate['family_wrong']:>8.4f}"
                f"{rate['family_wrong_two_differ']:>8.4f}{rate['family_wrong_uncorrected']:>8.3f}"
                f"{rate['power_alone']:>8.3f}{rate['power_both_with_holm']:>8.3f}"
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
        "fewest_seeds": {"1": fewest_seeds(1), str(FAMILY): fewest_seeds(FAMILY)},
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
