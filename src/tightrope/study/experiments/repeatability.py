"""`repeatability`: mean and deviation over three seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from tightrope.study import families, published
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Table, Value
from tightrope.study.measured import Measured, Measurements, over_seeds
from tightrope.study.plans import Plan

WHERE = "Table 15; Appendix C"
SEEDS = range(3)
POINT = 1.0
SMALL = 0.5  # points; the largest deviation in the paper's table is 0.46 for certified accuracy


def groups(scale: str) -> dict[str, list[Plan]]:
    """Return the plans by what is repeated; seed 0 is the run of the other experiments."""
    if scale == "paper":
        return {
            name: [families.paper(*_setting_and_method(name), seed=seed) for seed in SEEDS]
            for name in published.REPEATABILITY
        }
    # The estimates are not needed here, only the certification.
    return {
        f"tiny-{method}": [replace(families.tiny(method, seed), estimate={}) for seed in SEEDS]
        for method in ("pgd", *families.CERTIFIED)
    }


def _setting_and_method(name: str) -> tuple[str, str]:
    setting, _, method = name.rpartition("-")
    return setting, method


def plans(scale: str) -> list[Plan]:
    """Three seeds of each."""
    return [plan for group in groups(scale).values() for plan in group]


def analyse(runs: Measurements) -> Findings:
    """Compute mean and deviation of the three accuracies."""
    whats = ("natural", "adversarial", "certified")
    columns = [Column("run", "run"), Column("seeds", "seeds", "d")]
    for what in whats:
        columns += [
            Column(what, what),
            Column(f"{what}_deviation", "deviation"),
            Column(f"paper_{what}", "paper"),
        ]
    rows, claims = [], []
    for name, group in groups(runs.scale).items():
        row: dict[str, Value] = {"run": name}
        for what, reference in zip(
            whats, published.REPEATABILITY.get(name, (None,) * 3), strict=True
        ):
            names, read = [plan.name for plan in group], attrgetter(what)
            row["seeds"] = len(runs.values(names, read))
            row[what] = runs.mean(names, read)
            row[f"{what}_deviation"] = runs.deviation(names, read)
            row[f"paper_{what}"] = None if reference is None else "{} ± {}".format(*reference)
        authors = published.EXACT.get(name.removeprefix("tiny-"))  # a single network each
        if authors is not None:
            row["paper_certified"] = f"{authors}"
        rows.append(row)
        claims.append(
            runs.judge(
                f"{name}: certified accuracy varies little over seeds: by at most {SMALL} points "
                "(standard deviation).",
                "Table 15",
                [plan.name for plan in group],
                _varies_little,
            )
        )
    claims += _beside_the_authors(runs) if runs.scale == "laptop" else []
    title = "Mean and standard deviation over seeds, %"
    table = Table("repeatability", title, tuple(columns), tuple(rows))
    return Findings((table,), tuple(claims))


def _beside_the_authors(runs: Measurements) -> list[Claim]:
    """Compare the means with the authors' networks, of one seed each."""
    own = {m: [p.name for p in groups("laptop")[f"tiny-{m}"]] for m in families.CERTIFIED}
    near = [
        runs.judge(
            f"Ours, not the paper's: tiny-{method} is within a point of the authors' network in "
            "mean exact robust accuracy.",
            "Figure 1",
            names,
            lambda *found, authors=published.EXACT[method]: _is_near(found, authors),
        )
        for method, names in own.items()
    ]
    ordered = runs.judge(
        "Mean robust accuracy rises from IBP over SABR to TAPS, and STAPS is no worse than TAPS "
        f"({SMALL} points allowed).",
        "Figure 1",
        [name for names in own.values() for name in names],
        _rises,
    )
    return [*near, ordered]


def _is_near(found: Sequence[Measured], authors: float) -> tuple[bool, str]:
    values = [run.certified for run in found]
    gap = statistics.fmean(values) - authors
    return abs(gap) <= POINT, f"{over_seeds(values)} against {authors}: {gap:+.2f}"


def _rises(*found: Measured) -> tuple[bool, str]:
    values = [run.certified for run in found]
    means = [
        statistics.fmean(values[i : i + len(SEEDS)]) for i in range(0, len(values), len(SEEDS))
    ]
    ibp, sabr, taps, staps = means
    text = ", ".join(f"{m} {v:.2f}" for m, v in zip(families.CERTIFIED, means, strict=True))
    return ibp < sabr < taps and staps >= taps - SMALL, text


def _varies_little(*found: Measured) -> tuple[bool, str]:
    values = [run.certified for run in found]
    deviation = statistics.stdev(values)
    return deviation <= SMALL, f"{', '.join(f'{v:.2f}' for v in values)}: ± {deviation:.2f}"


EXPERIMENT = Experiment(
    name="repeatability",
    claim="Results vary little from seed to seed.",
    where=WHERE,
    plans=plans,
    analyse=analyse,
    paper_minutes=25_000,
)
