"""`attack-strength`: steps and restarts of the latent attack."""

from __future__ import annotations

from typing import Any

from tightrope.study import families, published
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Picture, Table, Value
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import curves
from tightrope.study.plans import Plan

WHERE = "Table 4; Section 4.2"


def groups(scale: str) -> dict[tuple[int, int], Plan]:
    """Return the plans by steps and restarts; 100 x 3 takes too long for a laptop."""
    pairs = [(steps, restarts) for steps in (1, 5, 20, 100) for restarts in (1, 3)]
    if scale == "paper":
        return {(s, r): families.paper("mnist-0.3", "taps", steps=s, restarts=r) for s, r in pairs}
    return {(s, r): families.short(steps=s, restarts=r) for s, r in pairs if s * r < 300}


def baseline(scale: str) -> Plan:
    """Return IBP on the same schedule."""
    return families.paper("mnist-0.3", "ibp") if scale == "paper" else families.short("ibp")


def plans(scale: str) -> list[Plan]:
    """Every strength, and IBP to compare with."""
    return [baseline(scale), *groups(scale).values()]


def analyse(runs: Measurements) -> Findings:
    """Follow certified and natural accuracy over the strength of the attack."""
    columns = (
        Column("steps", "steps", "d"),
        Column("restarts", "restarts", "d"),
        Column("certified", "certified"),
        Column("natural", "natural"),
        Column("taps", "TAPS accuracy"),
        Column("seconds", "training, s", ".0f"),
        Column("paper_certified", "paper: certified"),
        Column("paper_natural", "natural"),
    )
    base, found = baseline(runs.scale), groups(runs.scale)
    everything: dict[Any, Plan] = {("IBP", None): base, **found}
    rows = [_row(runs, steps, restarts, p) for (steps, restarts), p in everything.items()]
    names = {pair: plan.name for pair, plan in found.items()}
    title = "Strength of the latent attack, % (the paper's numbers: CNN7, MNIST at 0.3)"
    table = Table("attack-strength", title, columns, tuple(rows))
    pictures: tuple[Picture, ...] = ()
    if any(row["certified"] is not None for row in rows[1:]):
        pictures = (Picture("attack-strength", lambda plt: _draw(plt, rows[1:])),)
    return Findings((table,), tuple(_claims(runs, base.name, names)), pictures)


def _row(runs: Measurements, steps: Any, restarts: Any, plan: Plan) -> dict[str, Value]:
    certified, natural = published.ATTACK.get(restarts, {}).get(steps, (None, None))
    if steps == "IBP":
        _, natural, _, certified = published.WEIGHT["mnist-0.3"]["ibp"]
    return {
        "steps": steps,
        "restarts": restarts,
        "certified": runs.value(plan.name, lambda run: run.certified),
        "natural": runs.value(plan.name, lambda run: run.natural),
        "taps": runs.value(plan.name, lambda run: run.accuracy("taps")),
        "seconds": runs.value(plan.name, lambda run: run.training_seconds),
        "paper_certified": certified,
        "paper_natural": natural,
    }


def _claims(runs: Measurements, base: str, names: dict[tuple[int, int], str]) -> list[Claim]:
    weak = names[1, 1]
    strong = [name for (steps, _), name in names.items() if steps >= 20]
    return [
        runs.judge(
            "A single step and restart are enough to certify more than IBP training.",
            "Table 4",
            [base, weak],
            lambda ibp, one: (
                one.certified > ibp.certified,
                f"IBP {ibp.certified:.2f}, one step {one.certified:.2f}",
            ),
        ),
        runs.judge(
            "A stronger attack (20 steps or more) certifies slightly more than a single step.",
            "Table 4",
            [weak, *strong],
            lambda one, *rest: _compare(one, rest, "certified", 1),
        ),
        runs.judge(
            "A stronger attack (20 steps or more) costs a little natural accuracy.",
            "Table 4",
            [weak, *strong],
            lambda one, *rest: _compare(one, rest, "natural", -1),
        ),
    ]


def _compare(one: Measured, rest: tuple[Measured, ...], what: str, sign: int) -> tuple[bool, str]:
    """Compare one step with the mean over the strong attacks."""
    mean = sum(getattr(run, what) for run in rest) / len(rest)
    gain = mean - getattr(one, what)
    return (
        sign * gain > 0,
        f"one step {getattr(one, what):.2f}, strong attacks {mean:.2f} on average",
    )


def _draw(plt: Any, rows: list[dict[str, Value]]) -> Any:
    figure, grid = plt.subplots(1, 2, figsize=(8, 3.4))
    steps = [str(row["steps"]) for row in rows if row["restarts"] == 1]
    for axes, what in zip(grid, ("certified", "natural"), strict=True):
        lines: Any = {}
        for restarts in (1, 3):
            own = {str(r["steps"]): r[what] for r in rows if r["restarts"] == restarts}
            lines[f"{restarts} restart{'s' if restarts > 1 else ''}"] = [own.get(s) for s in steps]
        curves(axes, steps, lines, xlabel="steps", ylabel=f"{what} accuracy, %")
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="attack-strength",
    claim="Even a single latent step beats IBP; stronger attacks certify slightly more.",
    where=WHERE,
    plans=plans,
    analyse=analyse,
    paper_minutes=11_000,
)
