"""`estimators`: one latent point for all classes against one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from tightrope.study import families, published
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Table, Value
from tightrope.study.measured import Measured, Measurements, doubt, over_seeds
from tightrope.study.plans import Plan

WHERE = "Table 3; Section 4.2"
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


def plans(scale: str) -> list[Plan]:
    """All seeds of both kinds at every split."""
    return [plan for group in groups(scale).values() for own in group.values() for plan in own]


def analyse(runs: Measurements) -> Findings:
    """Compare the two kinds at every split."""
    columns = (
        Column("network", "network"),
        Column("relus", "ReLUs in classifier", "d"),
        Column("kind", "estimator"),
        Column("seeds", "seeds", "d"),
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
        for kind, own in group.items():
            names = [plan.name for plan in own]
            certified, natural = published.ESTIMATORS[kind].get(k, (None, None))
            rows.append(
                {
                    "network": network,
                    "relus": k,
                    "kind": kind,
                    "seeds": sum(runs.get(name) is not None for name in names),
                    "certified": runs.mean(names, lambda run: run.certified),
                    "natural": runs.mean(names, lambda run: run.accuracy("natural")),
                    "taps": runs.mean(names, lambda run: run.accuracy("taps")),
                    "samples": runs.value(names[0], lambda run: run.samples),
                    "paper_certified": certified,
                    "paper_natural": natural,
                }
            )
        claims += _claims(runs, network, k, group)
    title = "Single and multiple estimators, %, means over seeds (paper: CNN7, MNIST at 0.3)"
    return Findings((Table("estimators", title, columns, tuple(rows)),), tuple(claims))


def _claims(runs: Measurements, network: str, k: int, group: dict[str, list[Plan]]) -> list[Claim]:
    single, multi = ([plan.name for plan in group[kind]] for kind in KINDS)
    relus = f"{network}, {k} ReLU{'s' if k > 1 else ''} in the classifier"
    tested: dict[str, tuple[Callable[[Measured], float], bool]] = {
        "several estimators certify more than a single one.": (_certified, True),
        "TAPS accuracy with several estimators is better.": (
            lambda run: run.accuracy("taps"),
            True,
        ),
        "natural accuracy with several estimators is better or equal.": (
            lambda run: run.accuracy("natural"),
            False,
        ),
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
    if read is _certified:  # on fewer samples than the others
        text += f" on {multi[0].samples} samples (± {multi[0].noise:.2f} each)"
    return gap > 0 or (not strictly and gap == 0), text + doubt((before, now))


def _certified(run: Measured) -> float:
    return run.certified


def _collapses(natural: Sequence[float]) -> tuple[bool, str]:
    return max(natural) < COLLAPSED, f"natural accuracy {over_seeds(natural)}"


EXPERIMENT = Experiment(
    name="estimators",
    claim="One latent point per class certifies more than one for all, and trains stably with "
    "small classifiers.",
    where=WHERE,
    plans=plans,
    analyse=analyse,
    paper_minutes=5_400,
)
