"""`repeatability`: mean and deviation over three seeds."""

from __future__ import annotations

import statistics
from operator import attrgetter

from tightrope.study import families, published
from tightrope.study.experiment import Column, Experiment, Findings, Table, Value
from tightrope.study.experiments import precision
from tightrope.study.measured import Measured, Measurements
from tightrope.study.plans import Plan

WHERE = "Table 15; Appendix C"
SMALL = 0.5  # points; the largest deviation in the paper's table is 0.46 for certified accuracy


def groups(scale: str) -> dict[str, list[Plan]]:
    """Return the plans by what is repeated; seed 0 is the run of the other experiments."""
    if scale == "paper":
        return {
            name: [
                families.paper(*_setting_and_method(name), seed=seed) for seed in precision.SEEDS
            ]
            for name in published.REPEATABILITY
        }
    return {f"tiny-{method}": group for method, group in precision.repeated().items()}


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
    title = "Mean and standard deviation over seeds, %"
    table = Table("repeatability", title, tuple(columns), tuple(rows))
    return Findings((table,), tuple(claims))


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
