"""`attack-strength`: steps and restarts of the latent attack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from tightrope.study import families, published
from tightrope.study.columns import CERTIFIED, NATURAL, TAPS, first, paper, plans_of
from tightrope.study.experiment import Claim, Column, Experiment, Picture, Row, Sheet, Table
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import curves
from tightrope.study.plans import Plan


def groups(scale: str) -> dict[tuple[int, int], Plan]:
    """Return the plans by steps and restarts; 100 x 3 takes too long for a laptop."""
    pairs = [(steps, restarts) for steps in (1, 5, 20, 100) for restarts in (1, 3)]
    if scale == "paper":
        return {(s, r): families.paper("mnist-0.3", "taps", steps=s, restarts=r) for s, r in pairs}
    return {(s, r): families.short(steps=s, restarts=r) for s, r in pairs if s * r < 300}


def baseline(scale: str) -> Plan:
    """Return IBP on the same schedule."""
    return families.paper("mnist-0.3", "ibp") if scale == "paper" else families.short("ibp")


def rows(scale: str) -> list[Row]:
    """Every strength, and IBP to compare with."""
    _, natural, _, certified = published.WEIGHT["mnist-0.3"]["ibp"]
    known = paper("certified natural", (certified, natural))
    made = [Row({"steps": "IBP", "restarts": None, **known}, (baseline(scale),))]
    for (steps, restarts), plan in groups(scale).items():
        reference = published.ATTACK.get(restarts, {}).get(steps, (None, None))
        known = paper("certified natural", reference)
        made.append(Row({"steps": steps, "restarts": restarts, **known}, (plan,)))
    return made


def claims(runs: Measurements, tables: Sequence[Table]) -> list[Claim]:
    """Compare a single step with IBP, and with stronger attacks."""
    base = baseline(runs.scale).name
    names = {pair: plan.name for pair, plan in groups(runs.scale).items()}
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


def draw(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw certified and natural accuracy over the steps."""
    rows = tables[0].rows[1:]
    if any(row["certified"] is not None for row in rows):
        yield Picture("attack-strength", lambda plt: _draw(plt, rows))


def _draw(plt: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, grid = plt.subplots(1, 2, figsize=(8, 3.4))
    steps = [str(row["steps"]) for row in rows if row["restarts"] == 1]
    for axes, what in zip(grid, ("certified", "natural"), strict=True):
        lines: Any = {}
        for restarts in (1, 3):
            own = {str(r["steps"]): r[what] for r in rows if r["restarts"] == restarts}
            lines[f"{restarts} restart{'s' if restarts > 1 else ''}"] = [own.get(s) for s in steps]
        curves(axes, steps, lines, xlabel="steps", ylabel=f"{what} accuracy, %")
    return figure


TABLE = Sheet(
    "attack-strength",
    "Strength of the latent attack, % (the paper's numbers: CNN7, MNIST at 0.3)",
    (
        Column("steps", "steps", "d"),
        Column("restarts", "restarts", "d"),
        CERTIFIED,
        NATURAL,
        TAPS,
        Column("seconds", "training, s", ".0f", first(attrgetter("training_seconds"))),
        Column("paper_certified", "paper: certified"),
        Column("paper_natural", "natural"),
    ),
    lambda runs: rows(runs.scale),
)
EXPERIMENT = Experiment(
    name="attack-strength",
    claim="Even a single latent step beats IBP; stronger attacks certify slightly more.",
    where="Table 4; Section 4.2",
    paper_minutes=11_000,
    plans=lambda scale: plans_of(rows(scale)),
    tables=(TABLE,),
    claims=claims,
    draw=draw,
)
