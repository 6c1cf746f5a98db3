"""`estimators`: one latent point for all classes against one for each."""

from __future__ import annotations

from tightrope.study import families, published
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Table, Value
from tightrope.study.measured import Measurements
from tightrope.study.plans import Plan

WHERE = "Table 3; Section 4.2"
COLLAPSED = 50.0  # natural accuracy, %, below which a training has gone nowhere


def groups(scale: str) -> dict[tuple[str, int], dict[str, Plan]]:
    """Return the plans by network, ReLUs in its classifier, and kind of estimator."""
    kinds = ("single", "multi")
    if scale == "paper":
        return {
            ("CNN7", k): {
                kind: families.paper("mnist-0.3", "taps", classifier_relus=k, estimators=kind)
                for kind in kinds
            }
            for k in (1, 3, 6)
        }
    own = {
        ("CNN3", k): {kind: families.equal(classifier_relus=k, estimators=kind) for kind in kinds}
        for k in (1, 2)
    }
    return {("tiny CNN3", 1): {kind: families.short(estimators=kind) for kind in kinds}, **own}


def plans(scale: str) -> list[Plan]:
    """Both kinds at every split."""
    return [plan for group in groups(scale).values() for plan in group.values()]


def analyse(runs: Measurements) -> Findings:
    """Compare the two kinds at every split."""
    columns = (
        Column("network", "network"),
        Column("relus", "ReLUs in classifier", "d"),
        Column("kind", "estimator"),
        Column("certified", "certified"),
        Column("natural", "natural"),
        Column("taps", "TAPS accuracy"),
        Column("samples", "certified on", "d"),
        Column("paper_certified", "paper: certified"),
        Column("paper_natural", "natural"),
    )
    rows: list[dict[str, Value]] = []
    claims: list[Claim] = []
    for (network, k), group in groups(runs.scale).items():
        for kind, plan in group.items():
            certified, natural = published.ESTIMATORS[kind].get(k, (None, None))
            rows.append(
                {
                    "network": network,
                    "relus": k,
                    "kind": kind,
                    "certified": runs.value(plan.name, lambda run: run.certified),
                    "natural": runs.value(plan.name, lambda run: run.accuracy("natural")),
                    "taps": runs.value(plan.name, lambda run: run.accuracy("taps")),
                    "samples": runs.value(plan.name, lambda run: run.samples),
                    "paper_certified": certified,
                    "paper_natural": natural,
                }
            )
        claims += _claims(runs, network, k, group)
    title = "Single and multiple estimators, % (the paper's numbers: CNN7, MNIST at 0.3)"
    return Findings((Table("estimators", title, columns, tuple(rows)),), tuple(claims))


def _claims(runs: Measurements, network: str, k: int, group: dict[str, Plan]) -> list[Claim]:
    names = [group["single"].name, group["multi"].name]
    relus = f"{network}, {k} ReLU{'s' if k > 1 else ''} in the classifier"
    found = [
        runs.judge(
            f"{relus}: several estimators certify more than a single one.",
            "Table 3",
            names,
            lambda single, multi: (
                multi.certified > single.certified,
                f"single {single.certified:.2f}, multi {multi.certified:.2f} "
                f"on {multi.samples} samples (± {multi.noise:.2f})",
            ),
        ),
        runs.judge(
            f"{relus}: natural accuracy with several estimators is better or equal.",
            "Table 3",
            names,
            lambda single, multi: (
                multi.accuracy("natural") >= single.accuracy("natural"),
                f"single {single.accuracy('natural'):.2f}, multi {multi.accuracy('natural'):.2f}",
            ),
        ),
    ]
    if k == 1:
        found.append(
            runs.judge(
                f"{relus}: training with a single estimator collapses.",
                "Table 3",
                names[:1],
                lambda single: (
                    single.accuracy("natural") < COLLAPSED,
                    f"natural accuracy {single.accuracy('natural'):.2f}",
                ),
            )
        )
    return found


EXPERIMENT = Experiment(
    name="estimators",
    claim="One latent point per class certifies more than one for all, and trains stably with "
    "small classifiers.",
    where=WHERE,
    plans=plans,
    analyse=analyse,
    paper_minutes=5_400,
)
