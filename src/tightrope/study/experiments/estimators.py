"""`estimators`: one latent point for all classes against one for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from tightrope.study import columns, families, published
from tightrope.study.columns import certified, natural_accuracy, paper, plans_of, taps_accuracy
from tightrope.study.experiment import Claim, Column, Experiment, Row, Sheet, Table
from tightrope.study.measured import Measured, Measurements, doubt, over_seeds
from tightrope.study.plans import Plan

COLLAPSED = 50.0  # natural accuracy, %, below which a training has gone nowhere
KINDS = ("single", "multi")
SEEDS = range(3)  # of tiny networks


def groups(scale: str) -> dict[tuple[str, int], dict[str, list[Plan]]]:
    """Return the plans by network, ReLUs in its classifier, and kind of estimator."""
    if scale == "paper":
        return {
            ("CNN7", k): {
                kind: [families.paper("mnist-0.3", "taps", classifier_relus=k, estimators=kind)]
                for kind in KINDS
            }
            for k in (1, 3, 6)
        }
    tiny = {kind: [families.short(estimators=kind, seed=s) for s in SEEDS] for kind in KINDS}
    own = {
        ("CNN3", k): {kind: [families.equal(classifier_relus=k, estimators=kind)] for kind in KINDS}
        for k in (1, 2)
    }
    return {("tiny CNN3", 1): tiny, **own}


def rows(scale: str) -> list[Row]:
    """All seeds of both kinds at every split."""
    made = []
    for (network, relus), group in groups(scale).items():
        for kind, plans in group.items():
            reference = published.ESTIMATORS[kind].get(relus, (None, None))
            known = paper("certified natural", reference)
            known |= {"network": network, "relus": relus, "kind": kind}
            made.append(Row(known, tuple(plans)))
    return made


def claims(runs: Measurements, tables: Sequence[Table]) -> Iterator[Claim]:
    """Compare the two kinds at every split."""
    for (network, relus), group in groups(runs.scale).items():
        yield from _claims(runs, network, relus, group)


def _claims(runs: Measurements, network: str, k: int, group: dict[str, list[Plan]]) -> list[Claim]:
    single, multi = ([plan.name for plan in group[kind]] for kind in KINDS)
    relus = f"{network}, {k} ReLU{'s' if k > 1 else ''} in the classifier"
    tested: dict[str, tuple[Callable[[Measured], float], bool]] = {
        "several estimators certify more than a single one.": (certified, True),
        "TAPS accuracy with several estimators is better.": (taps_accuracy, True),
        "natural accuracy with several estimators is better or equal.": (natural_accuracy, False),
    }
    found = [
        runs.judge(
            f"{relus}: {text}",
            "Table 3",
            single + multi,
            lambda *them, how=how: _better(them[: len(single)], them[len(single) :], *how),
        )
        for text, how in tested.items()
    ]
    if k == 1:
        found.append(
            runs.judge(
                f"{relus}: training with a single estimator collapses.",
                "Table 3",
                single,
                lambda *them: _collapses([run.accuracy("natural") for run in them]),
            )
        )
    return found


def _better(
    single: Sequence[Measured],
    multi: Sequence[Measured],
    read: Callable[[Measured], float],
    strictly: bool,
) -> tuple[bool, str]:
    """Compare means over seeds."""
    before, now = list(map(read, single)), list(map(read, multi))
    gap = fmean(now) - fmean(before)
    text = f"single {over_seeds(before)}, multi {over_seeds(now)}"
    if read is certified:  # on fewer samples than the others
        text += f" on {multi[0].samples} samples (± {multi[0].noise:.2f} each)"
    return gap > 0 or (not strictly and gap == 0), text + doubt((before, now))


def _collapses(natural: Sequence[float]) -> tuple[bool, str]:
    return max(natural) < COLLAPSED, f"natural accuracy {over_seeds(natural)}"


TABLE = Sheet(
    "estimators",
    "Single and multiple estimators, %, means over seeds (paper: CNN7, MNIST at 0.3)",
    (
        Column("network", "network"),
        Column("relus", "ReLUs in classifier", "d"),
        Column("kind", "estimator"),
        columns.SEEDS,
        columns.MEAN_CERTIFIED,
        columns.MEAN_NATURAL,
        columns.MEAN_TAPS,
        columns.CERTIFIED_ON,
        Column("paper_certified", "paper: certified"),
        Column("paper_natural", "natural"),
    ),
    lambda runs: rows(runs.scale),
)
EXPERIMENT = Experiment(
    name="estimators",
    claim="One latent point per class certifies more than one for all, and trains stably with "
    "small classifiers.",
    where="Table 3; Section 4.2",
    paper_minutes=5_400,
    plans=lambda scale: plans_of(rows(scale)),
    tables=(TABLE,),
    claims=claims,
)
