"""`repeatability`: mean and deviation over three seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tightrope.study import columns, families, published
from tightrope.study.columns import count, deviation, mean, plans_of
from tightrope.study.experiment import Claim, Column, Experiment, Row, Sheet, Table, Value
from tightrope.study.experiments import precision
from tightrope.study.measured import Measured, Measurements
from tightrope.study.plans import Plan

ACCURACIES = {
    "natural": columns.natural,
    "adversarial": columns.adversarial,
    "certified": columns.certified,
}
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


def rows(scale: str) -> list[Row]:
    """Three seeds of each."""
    made = []
    for name, group in groups(scale).items():
        references = published.REPEATABILITY.get(name, (None,) * 3)
        known: dict[str, Value] = {"run": name}
        for what, reference in zip(ACCURACIES, references, strict=True):
            known[f"paper_{what}"] = None if reference is None else "{} ± {}".format(*reference)
        made.append(Row(known, tuple(group)))
    return made


def claims(runs: Measurements, tables: Sequence[Table]) -> Iterator[Claim]:
    """Look at the deviation of certified accuracy."""
    for name, group in groups(runs.scale).items():
        yield runs.judge(
            f"{name}: certified accuracy varies little over seeds: by at most {SMALL} points "
            "(standard deviation).",
            "Table 15",
            [plan.name for plan in group],
            _varies_little,
        )


def _varies_little(*found: Measured) -> tuple[bool, str]:
    values = [run.certified for run in found]
    deviation = statistics.stdev(values)
    return deviation <= SMALL, f"{', '.join(f'{v:.2f}' for v in values)}: ± {deviation:.2f}"


def _columns() -> Iterator[Column]:
    yield Column("run", "run")
    yield Column("seeds", "seeds", "d", count(ACCURACIES["certified"]))
    for what, read in ACCURACIES.items():
        yield Column(what, what, read=mean(read))
        yield Column(f"{what}_deviation", "deviation", read=deviation(read))
        yield Column(f"paper_{what}", "paper")


TABLE = Sheet(
    "repeatability",
    "Mean and standard deviation over seeds, %",
    tuple(_columns()),
    lambda runs: rows(runs.scale),
)
EXPERIMENT = Experiment(
    name="repeatability",
    claim="Results vary little from seed to seed.",
    where="Table 15; Appendix C",
    paper_minutes=25_000,
    plans=lambda scale: plans_of(rows(scale)),
    tables=(TABLE,),
    claims=claims,
)
