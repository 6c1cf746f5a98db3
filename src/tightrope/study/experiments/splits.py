"""`split` and `trainability`: where TAPS cuts the network, in training and in testing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

from tightrope.study import columns, families, published
from tightrope.study.experiment import Claim, Column, Experiment, Picture, Row, Sheet, Table
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import curves
from tightrope.study.plans import Plan

RELUS = range(7)
TESTING = 3  # minutes of a laptop for TAPS accuracy under all of them


def groups(scale: str) -> dict[str, list[Plan]]:
    """Return, by setting, the runs with 0 to 6 ReLUs in the classifier."""
    if scale == "laptop":
        return {"mnist-0.1": [families.narrow(k) for k in RELUS]}
    return {
        setting: [families.paper(setting, "taps", classifier_relus=k) for k in RELUS]
        for setting in published.SPLIT
    }


def tinyimagenet() -> dict[tuple[str, int], Plan]:
    """Return the runs on TinyImageNet, by method and ReLUs in the classifier."""
    return {
        (method, k): families.paper("tinyimagenet-1-255", method, classifier_relus=k)
        for method, rows in published.SPLIT_TINYIMAGENET.items()
        for k in rows
    }


# --- split --------------------------------------------------------------------------------------


def split_rows(scale: str) -> list[Row]:
    """Every split."""
    made = [
        _row(setting, k, plan, published.SPLIT[setting][k])
        for setting, group in groups(scale).items()
        for k, plan in enumerate(group)
    ]
    if scale == "paper":
        for (method, k), plan in tinyimagenet().items():
            reference = (*published.SPLIT_TINYIMAGENET[method][k], None)
            made.append(_row(f"tinyimagenet-1-255 {method}", k, plan, reference))
    return made


def _row(setting: str, k: int, plan: Plan, reference: Sequence[float | None]) -> Row:
    known = columns.paper("natural adversarial certified by_ibp", reference)
    return Row({"setting": setting, "relus": k, **known}, (plan,))


def split_claims(runs: Measurements, tables: Sequence[Table]) -> Iterator[Claim]:
    """Compare splits with IBP training, by certification method."""
    for setting, group in groups(runs.scale).items():
        yield from _split_claims(runs, setting, [plan.name for plan in group])


def _split_claims(runs: Measurements, setting: str, names: list[str]) -> list[Claim]:
    where = "Figure 7; Tables 11, 12"

    def natural(*found: Measured) -> tuple[bool, str]:
        best = max(run.natural for run in found[1:])
        return best > found[0].natural, f"IBP {found[0].natural:.2f}, best split {best:.2f}"

    def only_precise(*found: Measured) -> tuple[bool, str]:
        gain = max(run.certified for run in found[1:]) - found[0].certified
        loss = max(run.certified_by("ibp") for run in found[1:]) - found[0].certified_by("ibp")
        text = f"best split against IBP training: {gain:+.2f} in all, {loss:+.2f} by IBP alone"
        text += f", on {found[0].samples} samples (certified ± {found[0].noise:.2f})"
        return gain > 0 and loss <= 0, text

    return [
        runs.judge(
            f"{setting}: a classifier with ReLUs, so less regularisation, raises natural accuracy.",
            where,
            names,
            natural,
        ),
        runs.judge(
            f"{setting}: a classifier with ReLUs raises certified accuracy, but only precise "
            "certification shows it: IBP certifies less.",
            where,
            names,
            only_precise,
        ),
    ]


def draw_split(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw accuracies over the size of the classifier, a figure per setting."""
    names = {
        "natural": "natural",
        "adversarial": "adversarial",
        "certified": "certified",
        "by_crown": "certified by CROWN-IBP",
        "by_ibp": "certified by IBP",
    }
    for setting, rows in _settings(runs, tables[0], "certified"):
        lines = {title: [row[name] for row in rows] for name, title in names.items()}
        options = {"xlabel": "ReLUs in the classifier"}
        yield Picture(f"split-{setting}", partial(_over_splits, setting, lines, options))


def _settings(runs: Measurements, table: Table, needed: str) -> Iterator[tuple[str, Any]]:
    """Return the rows of each setting of which all splits are trained."""
    own = groups(runs.scale)
    return ((name, rows) for name, rows in table.groups(needed).items() if name in own)


def _over_splits(setting: str, lines: Any, options: Mapping[str, str], plt: Any) -> Any:
    figure, axes = plt.subplots(figsize=(6, 4))
    curves(axes, list(RELUS), lines, **options)
    axes.set_title(setting)
    return figure


# --- trainability -------------------------------------------------------------------------------


def trainability_rows(scale: str) -> list[Row]:
    """The runs of `split`, each tested under every split."""
    samples = 1000 if scale == "laptop" else families.ALL
    options = {"relus": tuple(RELUS), "samples": samples}
    return [
        Row(
            {"setting": setting, "trained": k},
            (replace(plan, splits=options, minutes=plan.minutes + TESTING),),
        )
        for setting, group in groups(scale).items()
        for k, plan in enumerate(group)
    ]


def trainability_claims(runs: Measurements, tables: Sequence[Table]) -> Iterator[Claim]:
    """Look for the best training split of each test split."""
    for setting, group in groups(runs.scale).items():
        yield runs.judge(
            f"{setting}: under each test split with ReLUs, the network trained with that "
            "split has the highest TAPS accuracy.",
            "Figures 10, 11",
            [plan.name for plan in group],
            _diagonal,
        )


def _tested(relus: int) -> columns.Read:
    return lambda run: run.splits.get(relus)


def _diagonal(*found: Measured) -> tuple[bool, str]:
    best = {}
    for tested in RELUS[1:]:
        values = [run.splits[tested] for run in found]
        best[tested] = [k for k, value in enumerate(values) if value == max(values)]
    agreeing = sum(tested in trained for tested, trained in best.items())
    text = ", ".join(f"{t}: {'/'.join(map(str, trained))}" for t, trained in best.items())
    return agreeing == len(best), f"best training split by test split: {text}"


def draw_trainability(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw TAPS accuracy over the test split, a figure per setting."""
    options = {"xlabel": "ReLUs in the test split", "ylabel": "TAPS accuracy, %"}
    for setting, rows in _settings(runs, tables[0], "tested_1"):
        lines = {
            f"trained with {row['trained']}": [row[f"tested_{k}"] for k in RELUS] for row in rows
        }
        yield Picture(f"trainability-{setting}", partial(_over_splits, setting, lines, options))


SPLIT = Experiment(
    name="split",
    claim="A later cut regularises more; precise certification turns less regularisation into "
    "certified accuracy, IBP does not.",
    where="Figure 7; Tables 11-13; Section 4.2",
    paper_minutes=90_000,
    plans=lambda scale: columns.plans_of(split_rows(scale)),
    tables=(
        Sheet(
            "split",
            "Effect of the split, %",
            (
                Column("setting", "setting"),
                Column("relus", "ReLUs in classifier", "d"),
                columns.NATURAL,
                columns.ADVERSARIAL,
                columns.CERTIFIED,
                Column(
                    "by_crown",
                    "by IBP and CROWN-IBP",
                    read=columns.first(methodcaller("certified_by", "ibp", "crown-ibp")),
                ),
                Column("by_ibp", "by IBP", read=columns.first(columns.by_ibp)),
                columns.SAMPLES,
                Column("paper_natural", "paper: natural"),
                Column("paper_adversarial", "adversarial"),
                Column("paper_certified", "MN-BaB"),
                Column("paper_by_ibp", "IBP"),
            ),
            lambda runs: split_rows(runs.scale),
        ),
    ),
    claims=split_claims,
    draw=draw_split,
)
TRAINABILITY = Experiment(
    name="trainability",
    claim="The network trained with a split is the best one under that split, unless the "
    "optimisation is too hard.",
    where="Figures 10, 11; Appendix C",
    paper_minutes=90_000,
    plans=lambda scale: columns.plans_of(trainability_rows(scale)),
    tables=(
        Sheet(
            "trainability",
            "TAPS accuracy, %, by ReLUs in the classifier (the paper shows it as curves only)",
            (
                Column("setting", "setting"),
                Column("trained", "trained with", "d"),
                *(
                    Column(f"tested_{k}", f"tested with {k}", read=columns.first(_tested(k)))
                    for k in RELUS
                ),
            ),
            lambda runs: trainability_rows(runs.scale),
        ),
    ),
    claims=trainability_claims,
    draw=draw_trainability,
)
