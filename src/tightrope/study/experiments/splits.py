"""`split` and `trainability`: where TAPS cuts the network, in training and in testing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tightrope.study import families, published
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Picture, Table, Value
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


def split_plans(scale: str) -> list[Plan]:
    """Every split."""
    made = [plan for group in groups(scale).values() for plan in group]
    return made + (list(tinyimagenet().values()) if scale == "paper" else [])


def analyse_split(runs: Measurements) -> Findings:
    """Follow accuracies over the size of the classifier, by certification method."""
    columns = (
        Column("setting", "setting"),
        Column("relus", "ReLUs in classifier", "d"),
        Column("natural", "natural"),
        Column("adversarial", "adversarial"),
        Column("certified", "certified"),
        Column("by_crown", "by IBP and CROWN-IBP"),
        Column("by_ibp", "by IBP"),
        Column("samples", "samples", "d"),
        Column("paper_natural", "paper: natural"),
        Column("paper_adversarial", "adversarial"),
        Column("paper_certified", "MN-BaB"),
        Column("paper_by_ibp", "IBP"),
    )
    rows: list[dict[str, Value]] = []
    claims: list[Claim] = []
    pictures = []
    for setting, group in groups(runs.scale).items():
        own = [
            _row(runs, setting, k, plan.name, published.SPLIT[setting][k])
            for k, plan in enumerate(group)
        ]
        rows += own
        claims += _split_claims(runs, setting, [plan.name for plan in group])
        if any(row["certified"] is not None for row in own):
            pictures.append(_split_picture(setting, own))
    if runs.scale == "paper":
        for (method, k), plan in tinyimagenet().items():
            reference = (*published.SPLIT_TINYIMAGENET[method][k], None)
            rows.append(_row(runs, f"tinyimagenet-1-255 {method}", k, plan.name, reference))
    table = Table("split", "Effect of the split, %", columns, tuple(rows))
    return Findings((table,), tuple(claims), tuple(pictures))


def _row(runs: Measurements, setting: str, k: int, name: str, reference: Any) -> dict[str, Value]:
    natural, adversarial, certified, by_ibp = reference
    return {
        "setting": setting,
        "relus": k,
        "natural": runs.value(name, lambda run: run.natural),
        "adversarial": runs.value(name, lambda run: run.adversarial),
        "certified": runs.value(name, lambda run: run.certified),
        "by_crown": runs.value(name, lambda run: run.certified_by("ibp", "crown-ibp")),
        "by_ibp": runs.value(name, lambda run: run.certified_by("ibp")),
        "samples": runs.value(name, lambda run: run.samples),
        "paper_natural": natural,
        "paper_adversarial": adversarial,
        "paper_certified": certified,
        "paper_by_ibp": by_ibp,
    }


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


def _split_picture(setting: str, rows: list[dict[str, Value]]) -> Picture:
    names = {
        "natural": "natural",
        "adversarial": "adversarial",
        "certified": "certified",
        "by_crown": "certified by CROWN-IBP",
        "by_ibp": "certified by IBP",
    }

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(6, 4))
        lines: Any = {title: [row[n] for row in rows] for n, title in names.items()}
        curves(axes, list(RELUS), lines, xlabel="ReLUs in the classifier")
        axes.set_title(setting)
        figure.tight_layout()
        return figure

    return Picture(f"split-{setting}", draw)


# --- trainability -------------------------------------------------------------------------------


def trainability_plans(scale: str) -> list[Plan]:
    """The runs of `split`, each tested under every split."""
    samples = 1000 if scale == "laptop" else families.ALL
    options = {"relus": tuple(RELUS), "samples": samples}
    return [
        replace(plan, splits=options, minutes=plan.minutes + TESTING)
        for group in groups(scale).values()
        for plan in group
    ]


def analyse_trainability(runs: Measurements) -> Findings:
    """Put TAPS accuracy in a table of training split by test split."""
    columns = (
        Column("setting", "setting"),
        Column("trained", "trained with", "d"),
        *(Column(f"tested_{k}", f"tested with {k}") for k in RELUS),
    )
    rows: list[dict[str, Value]] = []
    claims, pictures = [], []
    for setting, group in groups(runs.scale).items():
        own = []
        for k, plan in enumerate(group):
            found: dict[int, float] = runs.value(plan.name, lambda run: run.splits) or {}
            tested = {f"tested_{t}": found.get(t) for t in RELUS}
            own.append({"setting": setting, "trained": k, **tested})
        rows += own
        names = [plan.name for plan in group]
        claims.append(
            runs.judge(
                f"{setting}: under each test split with ReLUs, the network trained with that "
                "split has the highest TAPS accuracy.",
                "Figures 10, 11",
                names,
                _diagonal,
            )
        )
        if any(row["tested_1"] is not None for row in own):
            pictures.append(_trainability_picture(setting, own))
    title = "TAPS accuracy, %, by ReLUs in the classifier (the paper shows it as curves only)"
    return Findings(
        (Table("trainability", title, columns, tuple(rows)),), tuple(claims), tuple(pictures)
    )


def _diagonal(*found: Measured) -> tuple[bool, str]:
    best = {}
    for tested in RELUS[1:]:
        values = [run.splits[tested] for run in found]
        best[tested] = [k for k, value in enumerate(values) if value == max(values)]
    agreeing = sum(tested in trained for tested, trained in best.items())
    text = ", ".join(f"{t}: {'/'.join(map(str, trained))}" for t, trained in best.items())
    return agreeing == len(best), f"best training split by test split: {text}"


def _trainability_picture(setting: str, rows: list[dict[str, Any]]) -> Picture:
    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(6, 4))
        lines = {
            f"trained with {row['trained']}": [row[f"tested_{k}"] for k in RELUS] for row in rows
        }
        curves(
            axes, list(RELUS), lines, xlabel="ReLUs in the test split", ylabel="TAPS accuracy, %"
        )
        axes.set_title(setting)
        figure.tight_layout()
        return figure

    return Picture(f"trainability-{setting}", draw)


SPLIT = Experiment(
    name="split",
    claim="A later cut regularises more; precise certification turns less regularisation into "
    "certified accuracy, IBP does not.",
    where="Figure 7; Tables 11-13; Section 4.2",
    plans=split_plans,
    analyse=analyse_split,
    paper_minutes=90_000,
)
TRAINABILITY = Experiment(
    name="trainability",
    claim="The network trained with a split is the best one under that split, unless the "
    "optimisation is too hard.",
    where="Figures 10, 11; Appendix C",
    plans=trainability_plans,
    analyse=analyse_trainability,
    paper_minutes=90_000,
)
